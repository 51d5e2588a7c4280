# %% [markdown]
# # Arithmetic
#
# This room makes the pointwise primitives *regular*, so that a code generator needs no case analysis. After
# it, operands agree on a dtype, scalar variants have become the tensor ones, and the rarer functions have
# become the common ones.

# %%
from __future__ import annotations

import math

import torch

from .table import aten, constant, decomposition, in_float32, overload, promoted, real, widen

# %% [markdown]
# ## Type promotion, made explicit
#
# `float32_tensor + int64_tensor` is legal ATen: the kernel converts the integers as it loads them. We
# insert the conversion as a node. `where` promotes two of its three operands, and comparisons convert
# before they compare although their result is bool.

# %%
def agree(op, operands, rest=(), **kwargs):
    """Call `op` with tensor operands converted to their promoted dtype, or decline if they agree already."""
    dtype = promoted(*operands)
    if not any(isinstance(x, torch.Tensor) and x.dtype != dtype for x in operands):
        return NotImplemented
    converted = (x.to(dtype) if isinstance(x, torch.Tensor) else x for x in operands)
    return op(*rest, *converted, **kwargs)


def _binary(name):
    op = overload(name)

    def promote(a, b, **kwargs):
        return agree(op, (a, b), **kwargs)

    decomposition(op)(promote)


for _name in ("mul.Tensor fmod.Tensor remainder.Tensor pow.Tensor_Tensor pow.Tensor_Scalar pow.Scalar "
              "maximum minimum hypot nextafter eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor "
              "eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar "
              "bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor "
              "bitwise_left_shift.Tensor bitwise_right_shift.Tensor").split():
    _binary(_name)


@decomposition(aten.where.self)
def where(condition, a, b):
    if condition.dtype is not torch.bool:
        return torch.where(condition != 0, a, b)
    return agree(aten.where.self, (a, b), (condition,))


def _float_function(name):
    op = overload(name)

    def on_integers(x, *rest):
        return NotImplemented if x.is_floating_point() else op(real(x), *rest)

    decomposition(op)(on_integers)


for _name in ("exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan asin acos atan "
              "sinh cosh tanh asinh acosh atanh sigmoid erf erfc erfinv lgamma digamma").split():
    _float_function(_name)


@decomposition(aten.floor.default, aten.ceil.default, aten.trunc.default, aten.round.default)
def rounded(x):
    return NotImplemented if x.is_floating_point() else x.clone()


# %% [markdown]
# ## Addition and its kin

# %%
def _scaled(x, alpha):
    """x * alpha, where True * 1 is still a bool."""
    return x if isinstance(alpha, (int, bool)) and alpha == 1 else x * alpha


@decomposition(aten.add.Tensor)
def add(a, b, alpha=1):
    if isinstance(alpha, (int, float)) and alpha == 1:
        return agree(aten.add.Tensor, (a, b))
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return _plus(a, _scaled(b, alpha))
    dtype = promoted(a, b)
    return _plus(widen(a.to(dtype)), _scaled(widen(b.to(dtype)), alpha)).to(dtype)


def _plus(a, b):
    return aten.add.Tensor(a, b)


@decomposition(aten.sub.Tensor)
def sub(a, b, alpha=1):
    if isinstance(alpha, (int, float)) and alpha == 1:
        return agree(aten.sub.Tensor, (a, b))
    return aten.add.Tensor(a, b, alpha=-alpha)


@decomposition(aten.add.Scalar)
def add_scalar(a, b, alpha=1):
    return aten.add.Tensor(a, b * alpha)


@decomposition(aten.sub.Scalar)
def sub_scalar(a, b, alpha=1):
    return aten.sub.Tensor(a, b * alpha)


@decomposition(aten.rsub.Scalar, aten.rsub.Tensor)
def rsub(a, b, alpha=1):
    if isinstance(b, torch.Tensor):
        return aten.sub.Tensor(b, a, alpha=alpha)
    return aten.sub.Tensor(b, _scaled(a, alpha))


@decomposition(aten.mul.Scalar)
def mul_scalar(a, b):
    return aten.mul.Tensor(a, b)


@decomposition(aten.div.Scalar)
def div_scalar(a, b):
    return aten.div.Tensor(a, b)


@decomposition(aten.div.Tensor)
def div(a, b):
    if not promoted(a, b).is_floating_point:
        return aten.div.Tensor(*(real(x) if isinstance(x, torch.Tensor) else x for x in (a, b)))
    return agree(aten.div.Tensor, (a, b))


@decomposition(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(a, b, rounding_mode=None):
    if rounding_mode is None:
        return aten.div.Tensor(a, b)
    if not isinstance(b, torch.Tensor):
        return aten.div.Tensor_mode(a, constant(b, a, promoted(a, b)), rounding_mode=rounding_mode)
    return agree(aten.div.Tensor_mode, (a, b), rounding_mode=rounding_mode)


@decomposition(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(a, b):
    if not isinstance(a, torch.Tensor):
        a = constant(a, b, promoted(a, b))
    return aten.div.Tensor_mode(a, b, rounding_mode="floor")


@decomposition(aten.atan2.default)
def atan2(a, b):
    if not promoted(a, b).is_floating_point:
        return torch.atan2(real(a), real(b))
    return agree(aten.atan2.default, (a, b))


def _with_tensor(name, scalar_name):
    op = overload(name)

    def tensor_operand(a, b):
        return op(a, constant(b, a, promoted(a, b)))

    decomposition(scalar_name)(tensor_operand)


for _name in "remainder fmod bitwise_and bitwise_or bitwise_xor".split():
    _with_tensor(_name + ".Tensor", _name + ".Scalar")
for _name in "bitwise_left_shift bitwise_right_shift".split():
    _with_tensor(_name + ".Tensor", _name + ".Tensor_Scalar")


@decomposition(aten.addcmul.default)
@in_float32
def addcmul(x, a, b, value=1):
    return x + _scaled(a, value) * b


@decomposition(aten.addcdiv.default)
@in_float32
def addcdiv(x, a, b, value=1):
    return x + _scaled(a, value) / b


@decomposition(aten.lerp.Scalar, aten.lerp.Tensor)
@in_float32
def lerp(a, b, weight):
    """From a (weight 0) to b (weight 1), computed from the nearer end so that both ends are exact."""
    if isinstance(weight, torch.Tensor):
        near_a = torch.abs(weight) < 0.5
        return torch.where(near_a, a + weight * (b - a), b - (b - a) * (1 - weight))
    return a + weight * (b - a) if abs(weight) < 0.5 else b - (b - a) * (1 - weight)


# %% [markdown]
# ## Powers
#
# Small exponents are multiplications: exact, and a hundred times cheaper than a general power.

# %%
def power(x, exponent):
    """pow.Tensor_Scalar on the exponents for which eager has special cases too."""
    if not x.is_floating_point():
        square = exponent == 2 and x.dtype is not torch.bool
        return x * x if square else agree(aten.pow.Tensor_Scalar, (x, exponent))
    special = {0.5: torch.sqrt, -0.5: torch.rsqrt, -1.0: torch.reciprocal, 2.0: _square,
               1.0: torch.clone, 3.0: _cube, -2.0: _inverse_square}.get(exponent)
    return special(x) if special else NotImplemented


def _square(x):
    return x * x


@in_float32
def _cube(x):
    return x * x * x


@in_float32
def _inverse_square(x):
    return torch.reciprocal(x * x)


decomposition(aten.pow.Tensor_Scalar)(power)


@decomposition(aten.ldexp.Tensor)
def ldexp(x, exponent):
    return x * torch.pow(2.0, exponent)


# %% [markdown]
# ## Extremes
#
# `maximum` lets NaN win; `fmax` lets it lose. Clamping is two extremes, lower bound first: with crossed
# bounds the upper one wins.

# %%
def _bound(x, bound, dtype):
    return bound.to(dtype) if isinstance(bound, torch.Tensor) else constant(bound, x, dtype)


@decomposition(aten.clamp.default, aten.clamp.Tensor)
def clamp(x, min=None, max=None):
    dtype = promoted(x, min if min is not None else max, max if max is not None else min)
    out = x.to(dtype)
    if min is not None:
        out = torch.maximum(out, _bound(x, min, dtype))
    if max is not None:
        out = torch.minimum(out, _bound(x, max, dtype))
    return out


@decomposition(aten.clamp_min.default, aten.clamp_min.Tensor)
def clamp_min(x, min):
    return clamp(x, min=min)


@decomposition(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(x, max):
    return clamp(x, max=max)


@decomposition(aten.fmax.default)
def fmax(a, b):
    return torch.where((a >= b) | (b != b), a, b)


@decomposition(aten.fmin.default)
def fmin(a, b):
    return torch.where((a <= b) | (b != b), a, b)


# %% [markdown]
# ## Logic
#
# Truth is "not equal to zero"; on bools the bitwise operators are the logical ones.

# %%
def truth(x):
    """x != 0 as a bool tensor."""
    return x if x.dtype is torch.bool else x != 0


@decomposition(aten.logical_and.default)
def logical_and(a, b):
    return aten.bitwise_and.Tensor(truth(a), truth(b))


@decomposition(aten.logical_or.default)
def logical_or(a, b):
    return aten.bitwise_or.Tensor(truth(a), truth(b))


@decomposition(aten.logical_xor.default)
def logical_xor(a, b):
    return aten.bitwise_xor.Tensor(truth(a), truth(b))


@decomposition(aten.logical_not.default)
def logical_not(x):
    return aten.bitwise_not.default(x) if x.dtype is torch.bool else x == 0


@decomposition(aten.isnan.default)
def isnan(x):
    return x != x


@decomposition(aten.isinf.default)
def isinf(x):
    return torch.abs(x) == math.inf if x.is_floating_point() else torch.zeros_like(x, dtype=torch.bool)


@decomposition(aten.isposinf.default)
def isposinf(x):
    return x == math.inf if x.is_floating_point() else torch.zeros_like(x, dtype=torch.bool)


@decomposition(aten.isneginf.default)
def isneginf(x):
    return x == -math.inf if x.is_floating_point() else torch.zeros_like(x, dtype=torch.bool)


# %% [markdown]
# ## Less common functions

# %%
@decomposition(aten.deg2rad.default)
@in_float32
def deg2rad(x):
    return x * (math.pi / 180)


@decomposition(aten.rad2deg.default)
@in_float32
def rad2deg(x):
    return x * (180 / math.pi)


@decomposition(aten.frac.default)
@in_float32
def frac(x):
    return x - torch.trunc(x)


@decomposition(aten.sgn.default)
def sgn(x):
    return torch.sign(x)


@decomposition(aten.copysign.Tensor, aten.copysign.Scalar)
def copysign(a, b):
    dtype = promoted(a, b)
    a = a.to(dtype if dtype.is_floating_point else torch.get_default_dtype())
    magnitude = torch.abs(a)
    if isinstance(b, torch.Tensor):
        return torch.where(torch.signbit(b), -magnitude, magnitude)
    return -magnitude if math.copysign(1.0, b) < 0 else magnitude


@decomposition(aten.heaviside.default)
def heaviside(x, values):
    return torch.where(x == 0, values, torch.where(x > 0, constant(1, x), constant(0, x)))


@decomposition(aten.nan_to_num.default)
def nan_to_num(x, nan=None, posinf=None, neginf=None):
    if not x.is_floating_point():
        return x.clone()
    limits = torch.finfo(x.dtype)
    out = torch.where(x != x, 0.0 if nan is None else nan, x)
    out = torch.where(x == math.inf, limits.max if posinf is None else posinf, out)
    return torch.where(x == -math.inf, limits.min if neginf is None else neginf, out).to(x.dtype)


@decomposition(aten.logaddexp.default)
@in_float32
def logaddexp(a, b):
    return torch.where((a == b) & torch.isinf(a), a,
                       torch.maximum(a, b) + torch.log1p(torch.exp(-torch.abs(a - b))))


@decomposition(aten.logaddexp2.default)
@in_float32
def logaddexp2(a, b):
    return torch.where((a == b) & torch.isinf(a), a,
                       torch.maximum(a, b) + torch.log1p(torch.exp2(-torch.abs(a - b))) * (1 / math.log(2)))


def _times_log(x, y, log):
    """x * log(y) which is 0 where x is 0, unless y is NaN."""
    x, y = (real(t) if isinstance(t, torch.Tensor) else t for t in (x, y))
    if not isinstance(y, torch.Tensor):
        y = constant(y, x)
    if not isinstance(x, torch.Tensor):
        x = constant(x, y)
    return torch.where(y != y, math.nan, torch.where(x == 0, 0.0, x * log(y)))


@decomposition(aten.xlogy.Tensor, aten.xlogy.Scalar_Self, aten.xlogy.Scalar_Other)
@in_float32
def xlogy(x, y):
    return _times_log(x, y, torch.log)


@decomposition(aten.special_xlog1py.default)
@in_float32
def xlog1py(x, y):
    return _times_log(x, y, torch.log1p)


@decomposition(aten.special_entr.default)
@in_float32
def entr(x):
    x = real(x)
    below = torch.where(x == 0, 0.0, -math.inf)
    return torch.where(x != x, x, torch.where(x > 0, -x * torch.log(x), below))


@decomposition(aten.sinc.default)
@in_float32
def sinc(x):
    angle = math.pi * real(x)
    return torch.where(x == 0, 1.0, torch.sin(angle) / angle)
