# %% [markdown]
# # Writing at indices that are data
#
# A scatter is the transpose of a gather: the loop runs over the *source*, and the position of the store is
# loaded. Two steps, then: a loop that copies `self` into the result, and a loop that stores into it, under an
# alias name so that nobody reads the first version by mistake. When several sources hit one element and
# should add up, the store is an `atomic_add`.
#
# This is how the gradient of an embedding is computed. Half types accumulate in a float32 buffer, which is
# rounded once at the end: adding thousands of small gradients in bfloat16 would lose them.
#
# Which of two stores to one element comes last, and in which order sums are added up, is decided on a GPU by who is first. Under
# deterministic algorithms such a scatter is the library's, which then sorts, or refuses.

# %%
from functools import partial

import torch

from ...ch01_graphs.symbolic import present, product
from ..builder import HALF, Builder
from ..ir import Layout, root_of
from .indexing import are_positions, index_plan, indexed_position
from ..lazy import (Lazy, Lowering, alias, as_view, copy_to_buffer, dense_strides, emit_loop, footprint, from_buffer, linear,
                   make_vars, new_buffer, sizes_of, store_into, strides_of)
from ..pointwise import broadcast_index, cast
from ..table import lowering
from .views import offset_of


def scatter_into(g: Lowering, x: Lazy, space, position, value, readers, mode: str | None) -> Lazy:
    """`x` with `value(b, index)` stored at `position(b, index)` for every index of `space`."""
    if x.device.type == "cuda" and torch.are_deterministic_algorithms_enabled():
        return NotImplemented
    dtype, size = g.val.dtype, sizes_of(g.val)
    wide = mode == "atomic_add" and dtype in HALF
    kind = torch.float32 if wide else dtype
    if g.node in g.in_place and not wide:
        base = as_view(g, x)
        layout, first = base.layout, g.latest.get(root_of(g.program.buffers, base.buffer), base.buffer)
    else:
        layout = Layout(size, dense_strides(size, strides_of(g.val)))
        first = copy_to_buffer(g, cast(g, x, torch.float32) if wide else x, layout.stride)
    name = first
    if 0 not in space:                   # a loop over nothing would be dropped, and its reader find no memory
        name = alias(g, first) if g.node in g.in_place and not wide else \
            new_buffer(g, kind, x.device, size, layout.stride, alias_of=first)
        variables, index = make_vars("i", space)
        b = Builder()
        element = b.to_dtype(value(b, index), torch.float32 if kind in HALF else kind)
        b.store(name, linear(position(b, index), layout.stride, layout.offset), element, mode)
        emit_loop(g, variables, (), b, frozenset().union(*[footprint(r)[0] for r in readers]))
    out = from_buffer(g, name, layout)
    return cast(g, out, dtype) if wide else out


@lowering("index_put", loops=True)
def index_put(g, x, indices, values, accumulate=False):
    if not are_positions(indices) or 0 in x.size:
        return NotImplemented
    if g.val.dtype is torch.bool and accumulate:
        return NotImplemented
    indices = list(indices) + [None] * (len(x.size) - len(indices))
    dims, rank, place = index_plan(indices)
    rest = [x.size[d] for d in range(len(x.size)) if d not in dims]
    broadcast = [1] * rank
    for d in dims:
        for k, s in enumerate(reversed(indices[d].size)):
            if s != 1:
                broadcast[rank - 1 - k] = s
    space = tuple(rest[:place] + broadcast + rest[place:])

    def position(b: Builder, index):
        return indexed_position(b, x, indices, index, (dims, rank, place))

    def value(b: Builder, index):
        return b.read(values, broadcast_index(values, index))

    return scatter_into(g, x, space, position, value, [values, *(indices[d] for d in dims)],
                        "atomic_add" if accumulate else None)


def scatter_dim(mode: str | None, g: Lowering, x: Lazy, dim: int, indices: Lazy, source: Lazy):
    if not x.size or not indices.size or g.val.dtype is torch.bool and mode:
        return NotImplemented
    dim = dim % len(x.size)

    def position(b: Builder, index):
        return index[:dim] + (b.indirect(b.read(indices, index), x.size[dim], wrap=False),) + index[dim + 1:]

    def value(b: Builder, index):
        return b.read(source, index)

    return scatter_into(g, x, indices.size, position, value, [indices, source], mode)


lowering("scatter.src", loops=True)(partial(scatter_dim, None))
lowering("scatter_add", loops=True)(partial(scatter_dim, "atomic_add"))


@lowering("scatter_reduce.two", loops=True)
def scatter_reduce(g, x, dim, indices, source, reduce, *, include_self=True):
    if reduce != "sum" or not include_self:
        return NotImplemented
    return scatter_dim("atomic_add", g, x, dim, indices, source)


@lowering("as_strided_scatter", loops=True)
def as_strided_scatter(g, x, source, size, stride, storage_offset=None):
    """A copy of `x`, and the source stored at strided positions of its memory."""
    shape, start = sizes_of(g.val), offset_of(g.node.args[0].meta["val"])
    offset = 0 if storage_offset is None else storage_offset - start
    own = dense_strides(shape, strides_of(g.val))
    if own != tuple(strides_of(g.val)) or own != tuple(x.stride):
        return NotImplemented
    last = offset + sum((n - 1) * s for n, s in zip(source.size, stride))
    if not 0 <= present(offset) <= present(last) < present(product(shape)) and 0 not in source.size:
        return NotImplemented
    name = copy_to_buffer(g, x, own)
    if 0 in source.size:
        return from_buffer(g, name)
    after = new_buffer(g, g.val.dtype, x.device, shape, own, alias_of=name)
    store_into(g, source, after, Layout(source.size, tuple(stride), offset))
    return from_buffer(g, after)
