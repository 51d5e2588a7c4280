# %% [markdown]
# # Views: the rules
#
# Each says where an element of the view lies in its base, and `strided` finds out the rest.

# %%
import torch

from ...ch01_graphs.layouts import inside, same_strides
from ...ch01_graphs.shapes import expr_of
from ...ch01_graphs.symbolic import Int, as_expr, present, product
from ...errors import Unsupported
from ..ir import Layout
from ..lazy import as_view, from_buffer, linear, make_lazy, make_view, sizes_of, strides_of, window
from ..table import lowering
from ..views import strided


@lowering("permute", view=True)
def permute(g, x, dims):
    dims = [d % len(x.size) for d in dims]
    places = [dims.index(d) for d in range(len(dims))]
    return strided(g, x, lambda index: tuple(index[p] for p in places))


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
    dim = dim % len(x.size)
    start = clamp_start(start, x.size[dim])

    def pick(index):
        return index[:dim] + (as_expr(index[dim]) * step + start,) + index[dim + 1:]

    return strided(g, x, pick)


@lowering("select.int", view=True)
def select(g, x, dim, index):
    dim = dim % len(x.size)
    where = wrapped(index, x.size[dim])
    return strided(g, x, lambda index: index[:dim] + (where,) + index[dim:])


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

    return make_view(g, x, lambda index: index[:dim] + index[dim + 1:], relayout)


@lowering("squeeze.dims", view=True)
def squeeze(g, x, dims):
    gone = {d % len(x.size) for d in dims if x.size[d] == 1} if x.size else set()

    def pick(index):
        rest = iter(index)
        return tuple(0 if d in gone else next(rest) for d in range(len(x.size)))

    return strided(g, x, pick)


# %% [markdown]
# In a diagonal one index moves along two dimensions at once. So `pick` puts the last index into both, and its
# stride comes out as the sum of the two. `unfold`, which makes windows of `length` elements, does the opposite: two
# indices of the view, the number of the window and the place in it, move along one dimension.

# %%
@lowering("diagonal", view=True)
def diagonal(g, x, offset=0, dim1=0, dim2=1):
    a, c = dim1 % len(x.size), dim2 % len(x.size)
    kept = [d for d in range(len(x.size)) if d not in (a, c)]
    start = (0, 0) if 0 in sizes_of(g.val) else (max(-offset, 0), max(offset, 0))

    def pick(index):
        full: list = [0] * len(x.size)
        for place, d in enumerate(kept):
            full[d] = index[place]
        full[a], full[c] = as_expr(index[-1]) + start[0], as_expr(index[-1]) + start[1]
        return tuple(full)

    return strided(g, x, pick)


@lowering("unfold", view=True)
def unfold(g, x, dim, length, step):
    if not x.size:
        return NotImplemented
    dim = dim % len(x.size)

    def pick(index):
        return index[:dim] + (as_expr(index[dim]) * step + index[-1],) + index[dim + 1:-1]

    return strided(g, x, pick)


@lowering("flip", view=True)
def flip(g, x, dims):
    """Eager copies here, as strides cannot be negative; inside a loop it is one more index map, and no window."""
    flipped = {d % len(x.size) for d in dims} if x.size else set()
    return make_view(g, x, lambda index: tuple(
        x.size[d] - 1 - as_expr(i) if d in flipped else i for d, i in enumerate(index)), None)


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
    if 0 in g.val.shape:                    # eager refuses strides that do not fit, even here, and a kernel's need not be its own
        return make_lazy(g, lambda b, index: b.constant(0, dtype), [])
    if x.dtype.itemsize != dtype.itemsize or torch.bool in (x.dtype, dtype):
        return NotImplemented
    place = window(g, x)

    def inner(b, index):
        raw = b.load(place.buffer, linear(index, place.layout.stride, place.layout.offset), x.dtype, raw=True)
        bits = b.make("bitcast", (raw,), dtype)
        return b.to_dtype(bits, torch.float32) if dtype in (torch.float16, torch.bfloat16) else bits

    return make_lazy(g, inner, [x])
