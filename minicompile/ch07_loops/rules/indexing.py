# %% [markdown]
# # Reading at indices that are data
#
# `embedding`, `gather` and `x[i]` are still one element from one element; only the position is itself loaded.
# `b.indirect` turns a loaded integer into an index symbol with a bounds check, and from there on nothing is
# special: the gather inlines into whatever reads it, and whatever computes the table (a cast to bfloat16,
# say) is done for the gathered elements only.

# %%
import torch

from ...ch01_graphs.symbolic import as_expr, floordiv
from ..builder import Builder, compute_dtype
from ..ir import Layout
from ..lazy import Lazy, dense_strides, footprint, from_buffer, make_lazy, new_buffer, product, sizes_of, store_into, strides_of
from ..pointwise import argument, broadcast_index, cast, element
from ..table import lowering
from .views import clamp_start, wrapped


@lowering("embedding", reindex=True)
def embedding(g, weight, indices, *_):
    def inner(b, index):
        row = b.indirect(b.read(indices, index[:-1]), weight.size[0], wrap=False)
        return b.read(weight, (row, index[-1]))

    return make_lazy(g, inner, [weight, indices])


@lowering("gather", reindex=True)
def gather(g, x, dim, indices, **_):
    if not x.size or not indices.size or product(indices.size) == 0:
        return NotImplemented
    return taken(g, x, dim, indices, lambda index, dim: index)


@lowering("index_select", reindex=True)
def index_select(g, x, dim, indices):
    if not x.size or not indices.size:
        return NotImplemented
    return taken(g, x, dim, indices, lambda index, dim: (index[dim],))


def taken(g, x, dim, indices, where):
    """The elements of `x` at positions along `dim` that are data: that of `index` is in `indices` at `where(index, dim)`."""
    dim = dim % len(x.size)

    def inner(b, index):
        place = b.indirect(b.read(indices, where(index, dim)), x.size[dim], wrap=False)
        return b.read(x, index[:dim] + (place,) + index[dim + 1:])

    return make_lazy(g, inner, [x, indices])


# %% [markdown]
# ## Indexing with several tensors
#
# `x[i, :, j]` broadcasts `i` and `j` together. Where the broadcast dims go in the result depends on whether
# the indexed dims are neighbours: in their place if so, at the front if not.

# %%
def index_plan(indices):
    """(dims that are indexed, rank of the broadcast index, position of its dims in the result).

    indices: for each of the leading dims of a tensor an index (`.size` is its shape, a tuple),
    or None where the whole dim is taken. At least one is not None. In a tuple of indexed dims they ascend."""
    dims = [d for d, i in enumerate(indices) if i is not None]
    rank = max(len(indices[d].size) for d in dims)
    neighbours = dims == list(range(dims[0], dims[-1] + 1))
    return dims, rank, dims[0] if neighbours else 0


# %%
def indexed_position(b: Builder, x: Lazy, indices, index, plan) -> tuple:
    """The index into `x` that the element `index` of `x[indices]` reads."""
    dims, rank, place = plan
    broadcast, rest = index[place:place + rank], list(index[:place] + index[place + rank:])
    return tuple(b.indirect(b.read(indices[d], broadcast_index(indices[d], broadcast)), x.size[d])
                 if d in dims else rest.pop(0) for d in range(len(x.size)))


def are_positions(indices) -> bool:
    """Is there an index, and none of them a mask? Of what a mask reads, the size depends on data."""
    given = [i for i in indices if i is not None]
    return bool(given) and all(i.dtype not in (torch.bool, torch.uint8) for i in given)


@lowering("index.Tensor", reindex=True)
def index_tensor(g, x, indices):
    if not are_positions(indices) or 0 in x.size:
        return NotImplemented
    plan = index_plan(indices)

    def inner(b, index):
        return b.read(x, indexed_position(b, x, indices, index, plan))

    return make_lazy(g, inner, [x] + [i for i in indices if i is not None])

# %% [markdown]
# ## Borders and pieces
#
# `constant_pad_nd`, `slice_scatter` and a small `cat` are selections: at each index one of several operands
# supplies the element, and the others are not read. The condition is a comparison of loop variables, so for a
# GPU it is a mask. A CPU compiler cannot vectorise past such a branch, and a large `cat` has few rows to
# spare; there each piece gets a loop of its own that stores into its part of the result.

# %%
def selected(b: Builder, inside, x, index, otherwise, dtype):
    """The element of `x` where `inside` holds, else `otherwise`; `x` is not read outside."""
    with b.masked(inside):
        value = element(b, x, index, dtype)
    return b.where(inside, value, otherwise)


@lowering("constant_pad_nd", reindex=True)
def constant_pad(g, x, pad, value=0):
    dtype, rank, value = g.val.dtype, len(x.size), argument(g, value)
    before = [0] * rank
    for k in range(len(pad) // 2):
        before[rank - 1 - k] = pad[2 * k]
    padded = [d for d in range(rank) if any(p != 0 for p in pad[2 * (rank - 1 - d):2 * (rank - d)])]

    def inner(b, index):
        inside = b.constant(True, torch.bool)
        source = list(index)
        for d in padded:
            source[d] = as_expr(index[d]) - before[d]
            inside = b.op("logical_and", inside, b.between(0, source[d], x.size[d]))
        return selected(b, inside, x, tuple(source), element(b, value, index, compute_dtype(dtype)), dtype)

    return make_lazy(g, inner, [x])


@lowering("slice_scatter", reindex=True)
def slice_scatter(g, x, source, dim=0, start=None, end=None, step=1):
    dim, dtype = dim % len(x.size), g.val.dtype
    first, length = clamp_start(start, x.size[dim]), source.size[dim]

    def inner(b, index):
        distance = as_expr(index[dim]) - first
        inside = b.between(0, distance, length * step)
        if step != 1:
            exact = b.op("remainder", b.index(distance), b.index(step))
            inside = b.op("logical_and", inside, b.op("eq", exact, b.constant(0, torch.int64)))
        place = index[:dim] + (floordiv(distance, step),) + index[dim + 1:]
        return selected(b, inside, source, place, b.read(x, index), dtype)

    if length == 0:
        return make_lazy(g, lambda b, index: b.read(x, index), [x])
    return make_lazy(g, inner, [x, source])


@lowering("select_scatter", reindex=True)
def select_scatter(g, x, source, dim, where):
    dim = dim % len(x.size)
    where = wrapped(where, x.size[dim])
    dtype = g.val.dtype

    def inner(b, index):
        inside = b.op("eq", b.index(index[dim]), b.index(where))
        return selected(b, inside, source, index[:dim] + index[dim + 1:], b.read(x, index), dtype)

    return make_lazy(g, inner, [x, source])


# %% [markdown]
# In `cat` the pieces are nested from the last to the first: `piece0 if i < n0 else (piece1 if i < n1 else ...)`. What has no elements is
# no piece, also where it has fewer dims than the others, which eager allows.
# Each is evaluated under a mask, so no element is read from a piece to which it does not belong.

# %%
@lowering("cat", reindex=True)
def cat(g, tensors, dim=0):
    dtype, size = g.val.dtype, sizes_of(g.val)
    dim = dim % max(len(size), 1)
    tensors = [x for x in tensors if 0 not in x.size]
    if not tensors:
        return NotImplemented
    starts, running = [], 0
    for x in tensors:
        starts.append(running)
        running = running + x.size[dim]

    def inner(b, index):
        """Pieces from the last to the first: each takes over below the start of the next."""
        value = None
        for x, start in reversed(list(zip(tensors, starts))):
            place = index[:dim] + (as_expr(index[dim]) - start,) + index[dim + 1:]
            end = start + x.size[dim]
            if len(tensors) == 1:
                return element(b, x, place, dtype)
            with b.masked(b.between(start, index[dim], end)):
                piece = element(b, x, place, dtype)
            below = b.op("lt", b.index(index[dim]), b.index(end))
            value = piece if value is None else b.where(below, piece, value)
        return value

    reads = sum(len(footprint(x)[1]) for x in tensors)
    elements = product(size)
    small = g.val.device.type != "cpu" or isinstance(elements, int) and elements < 4096
    if len(tensors) == 1 or reads <= 6 and small:
        return make_lazy(g, inner, tensors)
    stride = dense_strides(size, strides_of(g.val))
    name = None
    for x, start in zip(tensors, starts):
        name = new_buffer(g, dtype, g.val.device, size, stride, alias_of=name)
        x = x if x.dtype == dtype else cast(g, x, dtype)
        store_into(g, x, name, Layout(x.size, stride, start * stride[dim]))
    return from_buffer(g, name)
