# %% [markdown]
# # Views
#
# A view is two functions: how an index of the view becomes an index of its base (used inside loops), and how
# the strides of a base in memory become strides of the view (used for library calls and graph outputs).
# Neither moves data. The first is called `pick` here, the second `relayout`. They must agree: the address that
# `relayout`'s strides give for an index is the address of `pick`'s index in the base.
#
# For most views the second follows from the first. Where `pick` is linear, a step along one dimension of the
# view is the same distance in memory wherever it begins, so it is enough to look at the first element and its
# neighbours: where the first lies is the offset, and how far away the next one along a dimension is, its stride.

# %%
import torch

from ..ch01_graphs.layouts import contiguous_strides, inside, same_strides
from ..ch01_graphs.shapes import expr_of
from ..ch01_graphs.symbolic import Int, as_expr, floordiv, mod, present, product
from ..errors import Unsupported
from .ir import Layout
from .lazy import Lazy, Lowering, as_view, from_buffer, linear, make_lazy, make_view, sizes_of, strides_of, window
from .table import lowering


def strided(g: Lowering, x: Lazy, size, pick) -> Lazy:
    """The view of `x` by a linear index map, which also tells the steps in memory."""
    size = tuple(size)

    def relayout(base: Layout):
        def place(dim=None):
            return linear(pick(tuple(int(d == dim) for d in range(len(size)))), base.stride)
        return Layout(size, tuple(place(d) - place() for d in range(len(size))), base.offset + place())

    return make_view(g, x, size, pick, relayout)


@lowering("expand", view=True)
def expand(g, x, size):
    return broadcast_to(g, x, sizes_of(g.val))


def broadcast_to(g: Lowering, x: Lazy, size) -> Lazy:
    """`x` repeated along new dims on the left and dims of size 1: stride 0 in memory."""
    size = tuple(size)
    if x.size == size:
        return x
    skip = len(size) - len(x.size)
    repeated = [d < skip or (x.size[d - skip] == 1 and size[d] != 1) for d in range(len(size))]

    def pick(index):
        return tuple(0 if repeated[d] else index[d] for d in range(skip, len(size)))

    return strided(g, x, size, pick)


@lowering("permute", view=True)
def permute(g, x, dims):
    dims = [d % len(x.size) for d in dims]
    places = [dims.index(d) for d in range(len(dims))]
    return strided(g, x, [x.size[d] for d in dims], lambda index: tuple(index[p] for p in places))


# %% [markdown]
# ## Picking
#
# `slice` and `select` change offsets and strides. PyTorch clamps slice bounds to the size; the size of the
# fake already says how many elements are left. Where bounds or sizes are symbols, the meta kernel has asked
# how they compare, so the answers for the present values are guarded, and may be used again.

# %%
def wrapped(index: Int, size: Int) -> Int:
    """Negative indices count from the end."""
    return as_expr(index) + size if present(index) < 0 else index


def clamp_start(start, size) -> Int:
    start = wrapped(0 if start is None else start, size)
    return 0 if present(start) < 0 else size if present(start) > present(size) else start


@lowering("slice.Tensor", view=True)
def slice_(g, x, dim=0, start=None, end=None, step=1):
    dim, size = dim % len(x.size), sizes_of(g.val)
    start = clamp_start(start, x.size[dim])

    def pick(index):
        return index[:dim] + (as_expr(index[dim]) * step + start,) + index[dim + 1:]

    return strided(g, x, size, pick)


@lowering("select.int", view=True)
def select(g, x, dim, index):
    dim, size = dim % len(x.size), sizes_of(g.val)
    where = wrapped(index, x.size[dim])
    return strided(g, x, size, lambda index: index[:dim] + (where,) + index[dim:])


# %% [markdown]
# A new dimension of size 1 has only the index 0, which `pick` drops, so any stride would do. But eager gives it
# one, the caller may ask for it, and `unsqueeze` says it itself.

# %%
@lowering("unsqueeze", view=True)
def unsqueeze(g, x, dim):
    dim, size = dim % (len(x.size) + 1), sizes_of(g.val)

    def relayout(base: Layout):
        stride = base.stride[dim] * base.size[dim] if dim < len(base.size) else 1
        return Layout(size, base.stride[:dim] + (stride,) + base.stride[dim:], base.offset)

    return make_view(g, x, size, lambda index: index[:dim] + index[dim + 1:], relayout)


@lowering("squeeze.dims", view=True)
def squeeze(g, x, dims):
    gone = {d % len(x.size) for d in dims if x.size[d] == 1} if x.size else set()
    kept = [d for d in range(len(x.size)) if d not in gone]

    def pick(index):
        rest = iter(index)
        return tuple(0 if d in gone else next(rest) for d in range(len(x.size)))

    return strided(g, x, [x.size[d] for d in kept], pick)


# %% [markdown]
# In a diagonal one index moves along two dimensions at once. So `pick` puts the last index into both, and its
# stride comes out as the sum of the two. `unfold`, which makes windows of `length` elements, does the opposite: two
# indices of the view, the number of the window and the place in it, move along one dimension.

# %%
@lowering("diagonal", view=True)
def diagonal(g, x, offset=0, dim1=0, dim2=1):
    a, c = dim1 % len(x.size), dim2 % len(x.size)
    kept = [d for d in range(len(x.size)) if d not in (a, c)]
    size = sizes_of(g.val)
    start = (0, 0) if 0 in size else (max(-offset, 0), max(offset, 0))

    def pick(index):
        full: list = [0] * len(x.size)
        for place, d in enumerate(kept):
            full[d] = index[place]
        full[a], full[c] = as_expr(index[-1]) + start[0], as_expr(index[-1]) + start[1]
        return tuple(full)

    return strided(g, x, size, pick)


@lowering("unfold", view=True)
def unfold(g, x, dim, length, step):
    if not x.size:
        return NotImplemented
    dim = dim % len(x.size)
    size = sizes_of(g.val)

    def pick(index):
        return index[:dim] + (as_expr(index[dim]) * step + index[-1],) + index[dim + 1:-1]

    return strided(g, x, size, pick)


@lowering("flip", view=True)
def flip(g, x, dims):
    """Eager copies here, as strides cannot be negative; inside a loop it is one more index map, and no window."""
    flipped = {d % len(x.size) for d in dims} if x.size else set()
    return make_view(g, x, x.size, lambda index: tuple(
        x.size[d] - 1 - as_expr(i) if d in flipped else i for d, i in enumerate(index)), None)


# %% [markdown]
# ## Reshaping
#
# A reshape keeps the order of elements. Going through the flat position always works, but leaves divisions by
# sizes in every index. Most reshapes only split or merge neighbouring dims, so old and new dims are first cut
# into groups with equal products: `[8, 12, 64] -> [96, 8, 8]` is `[8, 12] -> [96]` and `[64] -> [8, 8]`.
# Splitting a dim needs no division in the index; merging dims needs one per dim, inside the group only.

# %% tags=["exercise:dim-groups"]
def dim_groups(old, new) -> list[tuple[list[int], list[int]]]:
    """Neighbouring dims of `old` and `new` whose products agree, as small as can be told: [(positions in old,
    positions in new)], in order, with every dim in exactly one group. Sizes are positive and have the same
    product. A dim of size 1 may be in either of the groups next to it, or in one of its own, where the other
    list may be empty. If a symbolic size has to be compared with a different one, everything is one group."""
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        left, right, a, b = [], [], 1, 1
        if i < len(old):
            left, a, i = [i], old[i], i + 1
        if j < len(new):
            right, b, j = [j], new[j], j + 1
        while a != b:
            if not isinstance(a, int) or not isinstance(b, int) or i == len(old) and j == len(new):
                return [(list(range(len(old))), list(range(len(new))))]
            if i < len(old) and (a < b or j == len(new)):
                left.append(i)
                a, i = a * old[i], i + 1
            else:
                right.append(j)
                b, j = b * new[j], j + 1
        groups.append((left, right))
    return groups


# %%
@lowering("view", view=True)
def view(g, x, *_):
    return reshape(g, x, sizes_of(g.val))


def reshape(g: Lowering, x: Lazy, size) -> Lazy:
    """The elements of `x`, in order, as another size of equal product."""
    size = tuple(size)
    if size == x.size:
        return x
    if 0 in size:
        return make_view(g, x, size, lambda index: (0,) * len(x.size),
                         lambda base: Layout(size, contiguous_strides(size), base.offset))
    groups = dim_groups(x.size, size)

    def pick(index):
        out: list = [0] * len(x.size)
        for left, right in groups:
            position = linear([index[d] for d in right], contiguous_strides([size[d] for d in right]))
            for d, stride in zip(left, contiguous_strides([x.size[d] for d in left])):
                if x.size[d] != 1:
                    out[d] = floordiv(position, stride)
                    position = mod(position, stride)
        return tuple(out)

    return make_view(g, x, size, pick, lambda base: reshape_layout(base, size, groups))


# %% tags=["exercise:reshape-layout"]
def reshape_layout(base: Layout, size, groups) -> Layout | None:
    """The layout of `base` reshaped to `size` without a copy, or None if a merged group of dims does not lie
    evenly in memory. groups: `dim_groups(base.size, size)`. The offset stays. Within a group, the last new
    dim has the stride of the last old dim that is not of size 1 (1 if there is none), and the others are
    contiguous on top of it."""
    stride: list = [1] * len(size)
    for left, right in groups:
        left = [d for d in left if base.size[d] != 1]
        for outer, inner in zip(left, left[1:]):
            if base.stride[outer] != base.stride[inner] * base.size[inner]:
                return None
        step = base.stride[left[-1]] if left else 1
        for d, s in zip(right, contiguous_strides([size[d] for d in right])):
            stride[d] = s * step
    return Layout(size, tuple(stride), base.offset)

# %% [markdown]
# ## Memory as such
#
# `as_strided` speaks of storage, not of elements: it is only meaningful for a tensor that is in memory with
# the strides of eager. A tensor that has its memory for itself is copied into them where it lies otherwise, as the result of
# `flip` may, which here is a view. `view.dtype` reads the same bytes as another dtype of equal width.

# %%
@lowering("as_strided", view=True)
def as_strided(g, x, size, stride, storage_offset=None):
    node = g.node.args[0]
    val, wanted = node.meta["val"], strides_of(node.meta["val"])
    place = as_view(g, x)
    if place is None or not same_strides(x.size, place.layout.stride, wanted):
        memory = val.meta.untyped_storage().nbytes() // val.element_size()
        place = window(g, x, wanted) if present(expr_of(memory)) == present(product(x.size)) else None
        if place is None or not same_strides(x.size, place.layout.stride, wanted):
            raise Unsupported("as_strided of a tensor that does not lie in memory as in eager")
    sources = {n.name: n.meta["val"] for n in node.graph.nodes if n.op in ("placeholder", "get_attr")}
    start = offset_of(sources[place.buffer]) if place.buffer in sources else 0          # our own buffers start at 0
    if present(place.layout.offset + start) != present(offset_of(val)) and not inside(g.val, val):
        raise Unsupported("as_strided of a tensor that does not lie in memory as in eager")
    offset = 0 if storage_offset is None else storage_offset - offset_of(val)
    return from_buffer(g, place.buffer, Layout(sizes_of(g.val), tuple(stride), place.layout.offset + offset))


def offset_of(fake) -> Int:
    return expr_of(getattr(fake, "meta", fake).storage_offset())


@lowering("view.dtype", view=True)
def view_dtype(g, x, dtype):
    if x.dtype == dtype:
        return x
    if x.dtype.itemsize != dtype.itemsize or torch.bool in (x.dtype, dtype):
        return NotImplemented
    place = window(g, x)

    def inner(b, index):
        raw = b.load(place.buffer, linear(index, place.layout.stride, place.layout.offset), x.dtype, raw=True)
        bits = b.make("bitcast", (raw,), dtype)
        return b.to_dtype(bits, torch.float32) if dtype in (torch.float16, torch.bfloat16) else bits

    return make_lazy(g, inner, [x])
