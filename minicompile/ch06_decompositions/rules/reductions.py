# %% [markdown]
# # Reductions
#
# Everything that folds dims goes through eight primitives. Two things are made explicit on the way: *which*
# dims (eager accepts none, an empty list, negative numbers), and *in which dtype* partial results live.
# Summing a million bfloat16 numbers in bfloat16 stops growing at 256, so eager accumulates in float32; here
# that is a visible `_to_copy` before the sum and another one after it.

# %%
import math

import torch

from ..table import HALF, aten, constant, decomposition, dims_of, formulas, overload, real, reduced_size, widen
from .arithmetic import as_bool


def _explicit(dim, dims) -> bool:
    return isinstance(dim, (list, tuple)) and list(dim) == dims


def _holds_partials(x) -> bool:
    """Does x have a dtype in which partial results may live: int64, or a float that is not half."""
    return x.dtype not in HALF and (x.is_floating_point() or x.dtype is torch.int64)


def _widened(x, dtype):
    """(x in the dtype to fold it in, the dtype of the result)."""
    dtype = dtype or (x.dtype if x.is_floating_point() else torch.int64)
    return widen(x).to(torch.float32 if dtype in HALF else dtype), dtype


# %% [markdown]
# The rule for `sum` shows the pattern of the room. If dims and dtype are explicit already, it declines, and
# the call is the primitive. Otherwise it converts, calls the primitive, and converts back.

# %%
@decomposition("sum", "sum.dim_IntList")
def sum_(x, dim=None, keepdim=False, dtype=None):
    dims = dims_of(dim, x.dim())
    if dtype is None and _holds_partials(x) and dims and _explicit(dim, dims):
        return NotImplemented
    x, dtype = _widened(x, dtype)
    total = aten.sum.dim_IntList(x, dims, keepdim) if dims else x.clone()
    return total.to(dtype)


@decomposition("mean", "mean.dim")
def mean(x, dim=None, keepdim=False, dtype=None):
    dtype = dtype or x.dtype
    if not dtype.is_floating_point:
        return NotImplemented
    dims = dims_of(dim, x.dim())
    x = x.to(torch.float32 if dtype in HALF else dtype)
    return (torch.sum(x, dims, keepdim) / reduced_size(x, dims)).to(dtype) if dims else x.to(dtype).clone()


formulas({
    "nansum": lambda x, dim=None, keepdim=False, dtype=None: (
        torch.sum(torch.where(x != x, constant(0, x), x), dims_of(dim, x.dim()), keepdim, dtype=dtype)),
    "count_nonzero count_nonzero.dim_IntList": lambda x, dim=None: torch.sum(as_bool(x), dims_of(dim, x.dim())),
})


@decomposition("prod", "prod.dim_int")
def prod(x, dim=None, keepdim=False, dtype=None):
    if dtype is None and _holds_partials(x) and dim is not None and 0 <= dim < x.dim():
        return NotImplemented
    x, dtype = _widened(x, dtype)
    if x.dim() == 0:
        return x.to(dtype).clone()
    out = aten.prod.dim_int(x.reshape(-1), 0) if dim is None else aten.prod.dim_int(x, dim % x.dim(), keepdim)
    return out.to(dtype)


# %% [markdown]
# ## Extremes and their indices
#
# `max.dim` answers two questions, so it becomes two reductions over the same input; being side by side they
# end up in one loop.
#
# A maximum needs no wider dtype, since nothing is added. What has to be made explicit is the list of dims,
# and for an index without a dim the tensor is flattened first.

# %%
def _extreme(name: str) -> None:
    op = overload(name)

    @decomposition(name)
    def extreme(x, dim=(), keepdim=False):
        dims = dims_of(dim, x.dim())
        if not dims:
            return x.clone()
        return NotImplemented if _explicit(dim, dims) else op(x, dims, keepdim)


_extreme("amax")
_extreme("amin")


def _arg(name: str) -> None:
    op = overload(name)

    @decomposition(name)
    def arg(x, dim=None, keepdim=False):
        if dim is None:
            index = op(x.reshape(-1), 0)
            return index.view([1] * x.dim()) if keepdim else index
        if x.dim() == 0:
            return torch.zeros_like(x, dtype=torch.int64)
        if 0 <= dim and x.dtype is not torch.bool:
            return NotImplemented
        return op(x.to(torch.uint8) if x.dtype is torch.bool else x, dim % x.dim(), keepdim)


_arg("argmax")
_arg("argmin")


def _with_index(name: str, extreme, index) -> None:
    decomposition(name)(lambda x: extreme(x, list(range(x.dim()))))
    decomposition(name + ".dim")(lambda x, dim, keepdim=False:
                                 (extreme(x, dim, keepdim), index(x, dim, keepdim)))


_with_index("max", torch.amax, torch.argmax)
_with_index("min", torch.amin, torch.argmin)


@decomposition("aminmax")
def aminmax(x, *, dim=None, keepdim=False):
    if dim is None and keepdim:
        return torch.amin(x, list(range(x.dim())), True), torch.amax(x, list(range(x.dim())), True)
    dims = dims_of(dim, x.dim())
    return torch.amin(x, dims, keepdim), torch.amax(x, dims, keepdim)


def _some(x, dim, keepdim):
    """Is any bool of dims set. An empty list of dims, unlike None, means no dims."""
    dims = [] if isinstance(dim, (list, tuple)) and not dim else dims_of(dim, x.dim())
    return aten.any.dims(x, dims, keepdim) if dims else x.clone()


def _as_eager(out, x):
    return out.to(torch.uint8) if x.dtype is torch.uint8 else out


@decomposition("any.dims", "any.dim", "any")
def any_(x, dim=None, keepdim=False):
    if x.dtype is torch.bool and dim and _explicit(dim, dims_of(dim, x.dim())):
        return NotImplemented
    return _as_eager(_some(as_bool(x), dim, keepdim), x)


@decomposition("all.dims", "all.dim", "all")
def all_(x, dim=None, keepdim=False):
    return _as_eager(torch.logical_not(_some(torch.logical_not(x), dim, keepdim)), x)


# %% [markdown]
# ## Variance and norms
#
# All variances and standard deviations are the one primitive `var_mean` and a square root at most. A norm is
# a sum of powers and a root of it, with shorter formulas for the orders 0, 1, 2 and infinity. `logsumexp`
# subtracts the largest element first, as softmax does, and has to take care where that element is infinite.

# %%
def moments(x, dim, correction, keepdim):
    """(variance, mean) over dims, in float32 for half inputs."""
    correction = 1 if correction is None else correction
    return aten.var_mean.correction(widen(x), dims_of(dim, x.dim()), correction=correction, keepdim=keepdim)


@decomposition("var_mean.correction")
def var_mean(x, dim=None, *, correction=None, keepdim=False):
    dims = dims_of(dim, x.dim())
    if not dims or (_explicit(dim, dims) and x.dtype not in HALF and correction is not None):
        return NotImplemented
    var, mean = moments(x, dims, correction, keepdim)
    return var.to(x.dtype), mean.to(x.dtype)


formulas({
    "var.correction": lambda x, dim=None, *, correction=None, keepdim=False: moments(x, dim, correction, keepdim)[0].to(x.dtype),
    "std.correction": lambda x, dim=None, *, correction=None, keepdim=False: (
        torch.sqrt(moments(x, dim, correction, keepdim)[0]).to(x.dtype)),
})


@decomposition("std_mean.correction")
def std_mean(x, dim=None, *, correction=None, keepdim=False):
    var, mean = moments(x, dim, correction, keepdim)
    return torch.sqrt(var).to(x.dtype), mean.to(x.dtype)


@decomposition("linalg_vector_norm")
def vector_norm(x, ord=2, dim=None, keepdim=False, *, dtype=None):
    out_dtype = dtype or x.dtype
    dims = dims_of(dim, x.dim())
    x = torch.abs(x.to(torch.float32 if out_dtype in HALF else out_dtype))
    if ord != 0 and all(type(n) is int and n == 1 for n in (x.shape[d] for d in dims)):       # the square of one number may overflow
        ord = 1
    if ord == 2:
        out = torch.sqrt(torch.sum(x * x, dims, keepdim))
    elif ord == 1:
        out = torch.sum(x, dims, keepdim)
    elif ord == 0:
        out = torch.sum((x != 0).to(x.dtype), dims, keepdim)
    elif ord in (math.inf, -math.inf):
        out = (torch.amax if ord > 0 else torch.amin)(x, dims, keepdim)
    else:
        out = torch.pow(torch.sum(torch.pow(x, ord), dims, keepdim), 1.0 / ord)
    return out.to(out_dtype)


formulas({
    "norm.Scalar norm.ScalarOpt_dim": lambda x, p=2, dim=None, keepdim=False: (
        aten.linalg_vector_norm.default(x, 2 if p is None else p, dim, keepdim)),
    "dist": lambda a, b, p=2: aten.linalg_vector_norm.default(a - b, p),
})


@decomposition("logsumexp", float32=True)
def logsumexp(x, dim, keepdim=False):
    x = real(x)
    dims = dims_of(dim, x.dim())
    if 0 in x.shape:                                  # no largest element: log(0)
        total = torch.log(torch.sum(torch.exp(x), dims, True))
    else:
        top = torch.amax(x, dims, True)
        top = torch.where(torch.abs(top) == math.inf, constant(0, top), top)
        total = torch.log(torch.sum(torch.exp(x - top), dims, True)) + top
    return total if keepdim or not x.dim() else torch.squeeze(total, dims)
