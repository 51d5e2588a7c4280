# %% [markdown]
# # Reductions
#
# A reduction is a loop with two kinds of variables. `vars` run over the elements of the output; for each of them
# `reduction_vars` run over the elements that are folded into it. Inside the body, `reduce` marks the place where many become one.
#
# Besides the ordinary kinds there are two that return several numbers from one pass over the data. `welford` gives mean and sum
# of squared deviations, without the cancellation of `mean(x*x) - mean(x)**2`. `softmax` gives the maximum and
# the sum of `exp(x - maximum)`, rescaling the running sum whenever a new maximum appears: without it, softmax reads its
# input three times.

# %%
from __future__ import annotations

import math

import torch

from ..ch01_graphs.symbolic import Symbol, add, as_expr, mul, product
from .builder import HALF, Builder, compute_dtype
from .ir import Layout
from .lazy import (NONE, Lazy, Lowering, contiguous_strides, dense_strides, emit_loop, footprint, from_buffer, linear,
                   make_vars, magnitude, memory_order, new_buffer, realize, sizes_of, strides_of)
from .table import lowering


def accumulator(dtype: torch.dtype, kind: str) -> torch.dtype:
    """Partial results live in float32 for half types; sums and products of integers in int64."""
    if kind in ("sum", "prod") and not dtype.is_floating_point:
        return torch.int64
    return compute_dtype(dtype)


IDENTITY = {"sum": 0, "prod": 1, "any": False, "all": True, "xor_sum": 0}


def identity(kind: str, dtype: torch.dtype):
    """The value that changes nothing when reduced."""
    if kind in IDENTITY:
        return IDENTITY[kind]
    lowest = kind in ("max", "argmax", "softmax")
    if dtype.is_floating_point:
        return -math.inf if lowest else math.inf
    if dtype is torch.bool:
        return not lowest
    return torch.iinfo(dtype).min if lowest else torch.iinfo(dtype).max

# %% [markdown]
# ## One reduction loop
#
# `Reduction` is the request: what is reduced (over the full index space of the input), over which dims, and what is stored from the results.
# The order of the reduction variables is the order of the input in memory, so that the innermost one walks along a cache line when it can.

# %%
def reduction_loop(g: Lowering, x: Lazy, dims, finish, names, strides, ops=None) -> None:
    """Emit the loop that folds `dims` of `x` and stores `finish(b, value, linear index) -> [Ref, ...]` into the buffers
    `names` (size of `x` without `dims`, each with its `strides`)."""
    kept = [d for d in range(len(x.size)) if d not in dims]
    kept_size = [x.size[d] for d in kept]
    variables, out_index = make_vars("i", kept_size, memory_order(kept_size, strides[0]))
    order = [d for d in memory_order(x.size, x.stride) if d in dims]
    reduction_vars, inner_index = make_vars("r", [x.size[d] for d in order])
    index: list = [0] * len(x.size)
    for d, i in zip(kept, out_index):
        index[d] = i
    for d, i in zip(order, inner_index):
        index[d] = i
    b = Builder()
    value = b.read(x, tuple(index))
    position = linear([index[d] for d in dims], contiguous_strides([x.size[d] for d in dims]))
    for name, stride, result in zip(names, strides, finish(b, value, position)):
        b.store(name, linear(out_index, stride), result)
    emit_loop(g, variables, reduction_vars, b, names, footprint(x)[0] if ops is None else ops)


def without(sequence, dims):
    return tuple(v for d, v in enumerate(sequence) if d not in dims)


def result_buffers(g: Lowering, fakes, dims, rank: int, keepdim: bool):
    """Buffers for results with the sizes of `fakes`: names, and strides without the reduced dims."""
    names, strides = [], []
    for fake in fakes:
        size = sizes_of(fake)
        stride = dense_strides(size, strides_of(fake))
        names.append(new_buffer(g, fake.dtype, fake.device, size, stride))
        strides.append(without(stride, dims) if keepdim else stride)
    return names, strides


def constant_result(g: Lowering, fake, value) -> Lazy:
    """What reducing nothing gives."""
    from .lazy import make_lazy
    return make_lazy(g, lambda b, index: b.constant(value, compute_dtype(fake.dtype)), [], val=fake)


def reduce_dims(dim, rank: int) -> list[int]:
    if dim is None or isinstance(dim, (list, tuple)) and not dim:
        return list(range(rank))
    return sorted({d % max(rank, 1) for d in ([dim] if isinstance(dim, int) else dim)}) if rank else []


def reduction(g: Lowering, kind: str, x: Lazy, dim, keepdim: bool, convert=None):
    """The single-valued reduction `kind`, result described by the fake of the current node."""
    dims = reduce_dims(dim, len(x.size))
    fake = g.val
    dtype = convert or accumulator(x.dtype, kind)
    if any(x.size[d] == 0 for d in dims):
        if kind not in IDENTITY:
            return NotImplemented
        return constant_result(g, fake, IDENTITY[kind])
    if convert is not None and compute_dtype(x.dtype) != convert:
        x = converted(g, x, convert)
    names, strides = result_buffers(g, [fake], dims, len(x.size), keepdim)
    parts = split_plan(g, x, dims) if kind not in ("argmax", "argmin") else None
    if parts is not None:
        x, dims, strides_now = partial_reduction(g, kind, x, dims, parts, dtype), None, None
        dims = [d for d in range(len(x.size)) if d in x_split_dims(x)]

    def finish(b: Builder, value, position):
        value = b.to_dtype(value, dtype)
        if kind in ("argmax", "argmin"):
            return [b.reduce(kind, value, position, torch.int64)]
        return [b.to_dtype(b.reduce(kind, value), compute_dtype(fake.dtype))]

    reduction_loop(g, x, dims, finish, names, strides)
    return from_buffer(g, names[0])


def converted(g: Lowering, x: Lazy, dtype: torch.dtype) -> Lazy:
    from .pointwise import cast
    return cast(g, x, dtype)
