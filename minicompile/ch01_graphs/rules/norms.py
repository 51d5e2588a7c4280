# %% [markdown]
# # Functions of floats that vary, continued: norms, distances, tolerances
#
# Of the norms to a power `p`, those for 1, 2 and infinity have kernels and derivatives of their own, and those below 1 another derivative;
# for all others it is the formula below. The mask is for vectors of zeros, whose derivative is zero.

# %%
import math

import torch
import torch.nn.functional as F

from ..shapes import float_function
from .floats import TINY, are_plain, power_of, rule


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p, dims):
        norm = x.abs().pow(p).sum(dims, keepdim=True).pow(1 / p)
        ctx.save_for_backward(x, norm)
        ctx.p = p
        return norm

    @staticmethod
    def backward(ctx, grad):
        x, norm = ctx.saved_tensors
        slope = ctx.p - 1
        return x.sgn() * power_of(x.abs(), slope) * (grad / power_of(norm, slope)).masked_fill(norm == 0, 0), None, None


def norm_of(x, p, dim, keepdim):
    """The norm of a tensor; NotImplemented for powers that eager has kernels for, or another derivative."""
    if type(p) is not torch.SymFloat or not are_plain(x) or not 1 < p < 1 / TINY or p == 2:
        return NotImplemented
    dims = [d % max(x.dim(), 1) for d in (range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim)]
    if not dims or len({*dims}) < len(dims):
        return NotImplemented
    norm = Norm.apply(x, p, dims)
    return norm if keepdim else norm.squeeze(dims)


def vector_length(x, p, dim, keepdim):
    """The same, of which the power may be known."""
    return norm_of(x, p, dim, keepdim) if type(p) is torch.SymFloat else torch.linalg.vector_norm(x, p, dim, keepdim)


@rule(torch.linalg.vector_norm)
def vector_norm(x, ord=2, dim=None, keepdim=False):
    return norm_of(x, ord, dim, keepdim)


@rule(torch.linalg.norm)
def norm_of_vectors(x, ord=None, dim=None, keepdim=False):
    return norm_of(x, ord, dim, keepdim) if isinstance(dim, int) or dim is None and x.dim() == 1 else NotImplemented


@rule(torch.norm)
def norm(x, p="fro", dim=None, keepdim=False, out=None, dtype=None):
    return NotImplemented if dtype is not None or out is not None else norm_of(x, p, dim, keepdim)


@rule("norm")
def norm_of_tensor(x, p="fro", dim=None, keepdim=False, dtype=None):
    return NotImplemented if dtype is not None else norm_of(x, p, dim, keepdim)


@rule(torch.renorm, "renorm")
def renorm(x, p, dim, maxnorm):
    if not are_plain(x) or x.dim() < 2 or not maxnorm >= 0 or not -x.dim() <= dim < x.dim():
        return NotImplemented
    dims = [d for d in range(x.dim()) if d != dim % x.dim()]
    length = vector_length(x, p, dims, True)
    return NotImplemented if length is NotImplemented else x * torch.where(length > maxnorm, maxnorm / (length + 1e-7), 1.0)


# %% [markdown]
# Distances are norms of differences, and a normalized vector is divided by its norm. PyTorch computes the lengths of a cosine's vectors and
# raises them where autograd does not look, so their derivative is that of lengths which were not raised.

# %%
@rule(torch.dist, "dist")
def dist(x, y, p=2):
    return norm_of(x - y, p, None, False) if are_plain(x, y) else NotImplemented


@rule(F.normalize)
def normalize(x, p=2.0, dim=1, eps=1e-12, out=None):
    if out is not None or not are_plain(x):
        return NotImplemented
    length = vector_length(x, p, dim, True)
    return NotImplemented if length is NotImplemented else x / length.clamp_min(eps).expand_as(x)


@rule(F.pairwise_distance, torch.pairwise_distance)
def pairwise_distance(x, y, p=2.0, eps=1e-6, keepdim=False):
    if not are_plain(x, y) or x.dim() == 0 or x.shape != y.shape:
        return NotImplemented
    return vector_length(x - y + eps, p, -1, keepdim)


@rule(F.cosine_similarity, torch.cosine_similarity)
def cosine_similarity(x, y, dim=1, eps=1e-8):
    if not are_plain(x, y) or x.shape != y.shape or x.dim() == 0 or not eps >= 0:
        return NotImplemented
    lengths = [torch.linalg.vector_norm(t, 2, dim, True) for t in (x, y)]
    lengths = [n + (eps - n.detach()).clamp_min(0) for n in lengths]             # no difference of two that are infinite
    return (x / lengths[0] * (y / lengths[1])).sum(dim)


# %% [markdown]
# ## Tolerances, bounds, factors
#
# What remains are functions that PyTorch composes of operators which take the number as data, and of which it asks for the number before
# that: how far two numbers may be apart, where a probability is cut off before its logarithm is taken, the distance of samples, and what is
# taken from the number of samples to give a variance.

# %%
@rule(torch.isclose, "isclose")
def isclose(x, y, rtol=1e-5, atol=1e-8, equal_nan=False):
    if not are_plain(x, y) or not (rtol >= 0 and atol >= 0):
        return NotImplemented
    apart, equal = (x - y).abs(), x == y
    equal = equal | x.isnan() & y.isnan() if equal_nan else equal
    return equal | apart.isfinite() & (apart <= atol + (rtol * y).abs())


@rule(torch.logit, "logit")
def logit(x, eps=None):
    if not are_plain(x) or not 0 < eps < 0.5:
        return NotImplemented
    z = torch.where(x.isnan(), x, x.clamp(eps, 1 - eps))         # the derivative of a NaN is one
    return (z / (1 - z)).log()


@rule(torch.float_power, "float_power")
def float_power(x, exponent):
    if not isinstance(x, torch.Tensor) or x.is_complex():
        return NotImplemented
    return power_of(x.to(torch.float64), exponent)


@rule(torch.copysign, "copysign")
def copysign(x, y):
    return torch.copysign(x, x.new_full((), y)) if isinstance(x, torch.Tensor) and x.is_floating_point() else NotImplemented


@rule(torch.trapezoid, torch.trapz)
def trapezoid(y, *, dx=1.0, dim=-1):
    return torch.trapezoid(y, dim=dim) * dx if are_plain(y) else NotImplemented


@rule(torch.cumulative_trapezoid)
def cumulative_trapezoid(y, *, dx=1.0, dim=-1):
    return torch.cumulative_trapezoid(y, dim=dim) * dx if are_plain(y) else NotImplemented


def spread_by(function, root: bool):
    def spread(x, dim=None, *, correction=1, keepdim=False):
        dims = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
        count = math.prod(x.shape[d] for d in dims)
        if not are_plain(x) or len(dims) == 0 or not 0 <= correction < count:
            return NotImplemented
        factor = count / (count - correction)
        return function(x, dim, correction=0, keepdim=keepdim) * (float_function("sqrt")(factor) if root else factor)
    return spread


for _function in (torch.var, torch.std):
    rule(_function, _function.__name__)(spread_by(_function, _function is torch.std))
