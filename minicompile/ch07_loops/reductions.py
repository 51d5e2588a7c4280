# %% [markdown]
# # Reductions
#
# A reduction is a loop with two kinds of variables. `vars` run over the elements of the output; for each of
# them `reduction_vars` run over the elements that are folded into it. Inside the body, `reduce` marks the
# place where many become one.
#
# Besides the ordinary kinds there is one that returns several numbers from one pass over the data: `welford`
# gives mean and sum of squared deviations, without the cancellation of `mean(x*x) - mean(x)**2`.

# %%
import math

import torch

from ..ch01_graphs.symbolic import add, mul, product
from .builder import Builder, compute_dtype
from .ir import IDENTITY, identity
from .lazy import (NONE, Lazy, Lowering, contiguous_strides, dense_strides, emit_loop, footprint, from_buffer,
                   linear, make_lazy, make_vars, present_order, new_buffer, sizes_of, strides_of)
from .pointwise import rounded

# %% [markdown]
# ## One reduction loop
#
# The order of the reduction variables is the order of the input in memory, so that the innermost one walks
# along a cache line when it can.

# %% tags=["exercise:reduction-loop"]
def reduction_loop(g: Lowering, xs, dims, finish, names, strides) -> None:
    """Emit the loop that folds `dims` of the equally sized tensors `xs` and stores the values that
    `finish(b, elements, position)` returns into the buffers `names`; `strides[k]` are those of `names[k]`, for the dims
    that remain.

    `elements` are the values of `xs` at one index. `position` is the place of that element among those that are folded, an index
    expression, counted in the order of `dims`, the last one fastest. The loop's variables are nested as the first result lies in memory,
    its reduction variables as `xs[0]` does, the slowest first; a dim of size 1 has none."""
    x = xs[0]
    kept = [d for d in range(len(x.size)) if d not in dims]
    kept_size = [x.size[d] for d in kept]
    variables, out_index = make_vars("i", kept_size, present_order(kept_size, strides[0]))
    order = [d for d in present_order(x.size, x.stride) if d in dims]
    reduction_vars, inner_index = make_vars("r", [x.size[d] for d in order])
    index: list = [0] * len(x.size)
    for d, i in [*zip(kept, out_index), *zip(order, inner_index)]:
        index[d] = i
    b = Builder()
    elements = [b.read(x, tuple(index)) for x in xs]
    position = linear([index[d] for d in dims], contiguous_strides([x.size[d] for d in dims]))
    for name, stride, result in zip(names, strides, finish(b, elements, position)):
        b.store(name, linear(out_index, stride), result)
    emit_loop(g, variables, reduction_vars, b, NONE.union(*[footprint(x)[0] for x in xs]))


# %%
def without(sequence, dims) -> tuple:
    return tuple(v for d, v in enumerate(sequence) if d not in dims)


def result_buffers(g: Lowering, fakes, dims, keepdim: bool):
    """Buffers with the sizes of `fakes`: (names, strides of the dims that are not reduced)."""
    names, strides = [], []
    for fake in fakes:
        size = sizes_of(fake)
        stride = dense_strides(size, strides_of(fake))
        names.append(new_buffer(g, fake.dtype, fake.device, size, stride))
        strides.append(without(stride, dims) if keepdim else stride)
    return names, strides

# %% [markdown]
# ## Splitting
#
# The gradient of a bias adds up 16,384 rows into 384 columns. With one program per 32 columns a GPU with 132
# processors would use twelve of them. A large reduction with few results is therefore done in two loops: the
# first reduces blocks, the second reduces the results of the blocks. The plan says into how many blocks each
# reduced dim is cut; slow dims are cut first, so that a block stays contiguous. Exact divisors are preferred.
# Where there is none, the last block is short and the loads beyond the end are masked: 197 rows are 25 blocks of 8. (Of 19 blocks of 11
# each would fill a tile of 16 to two thirds.)
#
# The column sums of 16,384 rows, for a GPU of 132 processors:
#
#     loop0: for i0 < 32, i1 < 384 reduce r0 < 512    # sum_dim_int_list
#         v0: f32 = load x[196608*i0 + i1 + 384*r0]
#         v1: f32 = reduce(sum, v0)
#         buf1[384*i0 + i1] = v1
#     loop1: for i0 < 384 reduce r0 < 32    # sum_dim_int_list
#         v0: f32 = load buf1[i0 + 384*r0]
#         v1: f32 = reduce(sum, v0)
#         buf0[i0] = v1
#
# Of 1,576 rows the last of 24 blocks of 66 is short, and its load is masked: `load x[25344*i0 + i1 + 384*r0] if v2`, where `v2`
# is `66*i0 + r0 < 1576`.
#
# Column sums over something that has numbers per row, as in the gradients of a layer norm, come with a
# reduction of those rows, and one kernel can do both (chapter 8, `align_across`): a program takes a block of
# whole rows. There are then more and shorter blocks, of 8 to 16 rows, than a kernel of its own would want.

# %%
def block_count(size: int, wanted: int) -> int:
    """How many blocks to cut `size` into: the divisor nearest to `wanted`. If none is near, as many as short blocks of a power of two
    make, which a tile holds without a rest, or `wanted` itself."""
    near = [p for p in range(max(wanted // 2, 2), min(2 * wanted, size) + 1) if size % p == 0]
    if near:
        return min(near, key=lambda p: (abs(math.log(p / wanted)), -p))
    length = size // wanted
    return -(-size // 2 ** round(math.log2(length))) if 1 < length <= 64 else wanted


# %% [markdown]
# `split_plan` asks three numbers of the machine: how many programs would run without a split (`programs`), how many are enough,
# and how short a block may be. They differ for a CPU and a GPU, and for rows and columns, since a program of a column sum takes
# 32 columns at a time. From them follows how many blocks are wanted. These are then dealt out to the reduced dims, from the
# slowest on, each getting a divisor near to what is still wanted (`block_count`). `of_rows` recognises the case of the last
# paragraph.

# %%
LONGEST_ROW = 2048        # elements of a row, and of its column sums, that fit in registers
ENOUGH_BLOCKS = 512       # programs that keep a GPU busy when each is one warp


def split_plan(g: Lowering, x: Lazy, dims, exact: bool = False) -> dict[int, int] | None:
    """{dim: number of blocks}, or None when one loop is enough. `exact`: only blocks of equal length."""
    if not g.options.split_reductions or any(not isinstance(s, int) or s == 0 for s in x.size):
        return None
    results = product(without(x.size, dims))
    folded = product(x.size[d] for d in dims)
    order = [d for d in present_order(x.size, x.stride) if x.size[d] != 1]
    columns = bool(order) and order[-1] not in dims
    if x.device.type == "cpu":
        enough, shortest = g.options.threads, 4096
        programs = -(-results // 32) if columns else results
        wanted = enough if results * folded >= 65536 and enough > 1 else 0
        shortest = max(shortest // results, 16)
    else:
        enough, shortest = 2 * g.options.processors, 64 if columns else 2048
        programs = -(-results // 32) if columns else results
        wanted = -(-4 * g.options.processors // max(programs, 1))
        if columns and folded >= 16 * ENOUGH_BLOCKS and results <= LONGEST_ROW and of_rows(g, x, folded):
            wanted, shortest = 9 * g.options.processors, 8
    wanted = min(wanted, folded // shortest)
    if programs >= enough or wanted < 2:
        return None
    plan: dict[int, int] = {}
    for d in (d for d in order if d in dims):
        if wanted < 2:
            break
        blocks = x.size[d] if wanted * 2 > x.size[d] else block_count(x.size[d], wanted)
        if exact and x.size[d] % blocks:
            return plan or None
        plan[d] = blocks
        wanted = -(-wanted // blocks)
    return plan


def of_rows(g: Lowering, x: Lazy, rows: int) -> bool:
    """Is `x` computed with numbers per row, such as the statistics of a layer norm, or from what is?"""
    sizes = {n: product(g.program.buffers[n].layout.size) for n in footprint(x)[1]}
    g.in_rows.update(n for n in sizes if rows in sizes.values())
    return not g.in_rows.isdisjoint(sizes)


# %% [markdown]
# To cut a dim is an index map, like a `view`: element `(block, place)` is element `length * block + place`. `in_blocks` makes
# the lazy tensor that has two dims for each one that is cut, and hides what lies behind the end. `block_results` emits the
# first loop over it. Its results lie in memory so that the second loop, which folds the blocks, walks along them as the first
# has walked: for columns the blocks are the slow dim, for rows the fast one.

# %%
def in_blocks(x: Lazy, dims, plan, filler) -> tuple[Lazy, list[int], list[int]]:
    """`x` with each planned dim cut in two, (block, place in block): the tensor, its block dims and its
    dims to reduce first. `filler` is the value past the end of a short last block."""
    size, stride, blocks, inside, source = [], [], [], [], []
    for d, (n, s) in enumerate(zip(x.size, x.stride)):
        if d in plan:
            length = -(-n // plan[d])
            blocks.append(len(size))
            inside.append(len(size) + 1)
            source.append((len(size), length))
            size += [plan[d], length]
            stride += [s * length, s]
        else:
            if d in dims:
                inside.append(len(size))
            source.append((len(size), None))
            size.append(n)
            stride.append(s)

    def inner(b: Builder, index):
        full, inside_x = [], b.constant(True, torch.bool)
        for d, (place, length) in enumerate(source):
            if length is None:
                full.append(index[place])
                continue
            full.append(add(mul(index[place], length), index[place + 1]))
            if length * plan[d] != x.size[d]:
                inside_x = b.op("logical_and", inside_x, b.between(0, full[-1], x.size[d]))
        with b.masked(inside_x):
            value = b.read(x, tuple(full))
        return b.where(inside_x, value, b.constant(filler, value.dtype))

    ops, reads, heavy = footprint(x)
    return Lazy(tuple(size), x.dtype, x.device, inner, tuple(stride), ops=ops, reads=reads), blocks, inside


def block_results(g: Lowering, x: Lazy, dims, plan, dtypes, finish, filler) -> tuple[list[Lazy], list[int]]:
    """The first loop of a split reduction. Returns the results of the blocks, and which of their dims to
    reduce next."""
    columns = present_order(x.size, x.stride)[-1] not in dims
    cut, blocks, inside = in_blocks(x, dims, plan, filler)
    kept = [d for d in range(len(cut.size)) if d not in inside]
    size = tuple(cut.size[d] for d in kept)
    rank = {d: i for i, d in enumerate(present_order(cut.size, cut.stride))}
    order = sorted(range(len(kept)), key=lambda k: ((kept[k] in blocks) != columns, rank[kept[k]]))
    stride, running = [0] * len(kept), 1
    for k in reversed(order):
        stride[k] = running
        running *= size[k]
    names = [new_buffer(g, dtype, x.device, size, stride) for dtype in dtypes]
    reduction_loop(g, [cut], inside, finish, names, [tuple(stride)] * len(names))
    return [from_buffer(g, name) for name in names], [k for k, d in enumerate(kept) if d in blocks]

# %% [markdown]
# ## Ordinary reductions
#
# A large one takes two loops, whose bodies are the same fold.

# %%
def reduction(kind: str, g: Lowering, x: Lazy, dims, keepdim: bool = False) -> Lazy:
    """The single-valued reduction `kind` over `dims` (one dim or several); the fake of the current node
    describes the result."""
    dims, fake, dtype = [dims] if isinstance(dims, int) else list(dims), g.val, compute_dtype(x.dtype)
    is_index = kind in ("argmax", "argmin")
    if any(x.size[d] == 0 for d in dims):
        if kind not in IDENTITY:                # max and min of no elements have no answer
            return NotImplemented
        return make_lazy(g, lambda b, index: b.constant(IDENTITY[kind], dtype), [])
    names, strides = result_buffers(g, [fake], dims, keepdim)

    def fold(b: Builder, elements, position):
        if is_index:                     # equal elements have a first one, so they are compared as memory has them
            return [b.reduce(kind, *rounded(b, x.dtype, elements), position, torch.int64)]
        return [b.reduce(kind, elements[0])]

    plan = None if is_index else split_plan(g, x, dims)
    xs = [x]
    if plan is not None:
        xs, dims = block_results(g, x, dims, plan, [dtype], fold, identity(kind, dtype))
    reduction_loop(g, xs, dims, fold, names, strides)
    return from_buffer(g, names[0])
