# %% [markdown]
# # Tensors from nothing
#
# `full` and `arange` are functions of the index alone. They are never stored unless something outside a loop
# wants them.

# %%
from __future__ import annotations

import torch

from ..ch01_graphs.symbolic import Expr, as_expr
from .builder import compute_dtype
from .lazy import Lazy, make_lazy
from .pointwise import broadcast_index
from .table import lowering


def constant(g, value):
    """The current node's result with every element equal to a number (or to a 0-d tensor)."""
    dtype = g.val.dtype
    if isinstance(value, Lazy):
        return make_lazy(g, lambda b, index: b.to_dtype(b.read(value, broadcast_index(value, index)),
                                                        compute_dtype(dtype)), [value])
    if isinstance(value, complex):
        return NotImplemented
    if isinstance(value, Expr):
        return make_lazy(g, lambda b, index: b.index(value, compute_dtype(dtype)), [])
    return make_lazy(g, lambda b, index: b.constant(value, compute_dtype(dtype)), [])


@lowering("full", "full_like", "new_full", "fill.Scalar", "fill.Tensor")
def full(g, _, value, **kwargs):
    return constant(g, value)


@lowering("scalar_tensor")
def scalar_tensor(g, value, **kwargs):
    return constant(g, value)


@lowering("zeros", "zeros_like", "new_zeros", "_efficientzerotensor")
def zeros(g, *args, **kwargs):
    return constant(g, 0)


@lowering("empty.memory_format", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted")
def empty(g, *args, **kwargs):
    """Memory of any value. For a library call (`bernoulli` wants the shape only) it is just allocated; a
    loop sees zeros."""
    return NotImplemented if g.node in g.wanted else constant(g, 0)


@lowering("ones", "ones_like", "new_ones")
def ones(g, *args, **kwargs):
    return constant(g, 1)


@lowering("arange.start_step", "arange.start", "arange.default", "iota")
def arange(g, first, end=None, step=1, **kwargs):
    start = 0 if end is None else first
    dtype = g.val.dtype

    def inner(b, index):
        if isinstance(start, float) or isinstance(step, float):
            scaled = b.op("mul", b.index(index[0], torch.float64), b.constant(step, torch.float64))
            return b.to_dtype(b.op("add", scaled, b.constant(start, torch.float64)), compute_dtype(dtype))
        return b.index(as_expr(index[0]) * step + start, compute_dtype(dtype))

    return make_lazy(g, inner, [])


@lowering("eye", "eye.m")
def eye(g, *args, **kwargs):
    dtype = g.val.dtype

    def inner(b, index):
        same = b.op("eq", b.index(index[0]), b.index(index[1]))
        return b.to_dtype(same, compute_dtype(dtype))

    return make_lazy(g, inner, [])


@lowering("tril", "triu")
def triangle(g, x, diagonal=0):
    lower = "tril" in g.node.target._schema.name

    def inner(b, index):
        kept = b.op("le" if lower else "ge", b.index(index[-1]), b.op("add", b.index(index[-2]), b.index(diagonal)))
        return b.where(kept, b.read(x, index), b.constant(0, compute_dtype(x.dtype)))

    return make_lazy(g, inner, [x])
