# %% [markdown]
# # Arithmetic
#
# This room makes the pointwise primitives *regular*, so that a code generator needs no case analysis. After
# it, operands agree on a dtype, scalar variants have become the tensor ones, and the rarer functions have
# become the common ones.

# %%
import functools
import math

import torch
from torch import get_default_dtype

from ..table import HALF, aten, constant, decomposition, formulas, in_float32, overload, promoted, real, widen

# %% [markdown]
# ## Type promotion, made explicit
#
# `float32_tensor + int64_tensor` is legal ATen: the kernel converts the integers as it loads them. We
# insert the conversion as a node. `where` promotes two of its three operands, and comparisons convert
# before they compare although their result is bool.
#
# Most pointwise operators need nothing but `agree`, and are registered in a loop.

# %%
def agree(op, operands, rest=(), **kwargs):
    """Call `op` with tensor operands converted to their promoted dtype, or decline if they agree already."""
    dtype = promoted(*operands)
    if not any(isinstance(x, torch.Tensor) and x.dtype != dtype for x in operands):
        return NotImplemented
    converted = (x.to(dtype) if isinstance(x, torch.Tensor) else x for x in operands)
    return op(*rest, *converted, **kwargs)


def converted(fn, floats: bool = False):
    """Convert the tensor operands of a formula to their promoted dtype, and run it in float32 if that is a half. Eager's kernels
    do so before they compute: of float32 factors and a float64 summand, the product is already one of float64. floats: integers become
    floats, each from its own dtype; 2006 does not become the byte -42 first, because the other operand has bytes."""
    @functools.wraps(fn)
    def convert(*args, **kwargs):
        dtype = promoted(*(x for x in args if isinstance(x, torch.Tensor)))
        dtype = get_default_dtype() if floats and not dtype.is_floating_point else dtype
        return in_float32(fn)(*(x.to(dtype) if isinstance(x, torch.Tensor) else x for x in args), **kwargs)
    return convert


def exact(op, a, b):
    """`op` of two operands, of which a 0-d tensor on the CPU, like a number, is not rounded to a half type: eager's kernels read it in
    float32."""
    dtype = promoted(a, b)
    if dtype in HALF and any(isinstance(x, torch.Tensor) and x.dtype != dtype and _keeps_its_value(x) for x in (a, b)):
        return op(*(x.float() if isinstance(x, torch.Tensor) else x for x in (a, b))).to(dtype)
    return agree(op, (a, b))


def promoting(op):
    return lambda a, b, **kwargs: agree(op, (a, b), **kwargs)


formulas({_name: promoting(overload(_name)) for _name in (
    "fmod.Tensor remainder.Tensor pow.Tensor_Tensor pow.Scalar maximum minimum hypot nextafter "
    "eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar "
    "bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor bitwise_left_shift.Tensor bitwise_right_shift.Tensor").split()})


formulas({"mul.Tensor": lambda a, b: exact(aten.mul.Tensor, a, b)})


@decomposition("where.self")
def where(condition, a, b):
    if condition.dtype is not torch.bool:
        return torch.where(condition != 0, a, b)
    return agree(aten.where.self, (a, b), (condition,))


formulas({"floor ceil trunc round": lambda x: NotImplemented if x.is_floating_point() else x.clone()})


# %% [markdown]
# ## Addition and its kin
#
# `add(a, b, alpha)` computes `a + alpha * b`, and it is what `a - b`, `a += b` and many formulas of
# optimizers become. The primitive has no `alpha`, so it is multiplied out here. In half precision eager's
# kernel does both in float32 and rounds once, and so does the rule. Division has three meanings: true
# division gives floats, also of integers; the other two round toward zero or toward minus infinity, where the
# quotient must be rounded exactly as eager rounds it, or a whole number is missed by one.

# %%
def _is_one(alpha) -> bool:
    return isinstance(alpha, (int, float)) and alpha == 1


def _scaled(x, alpha):
    """x * alpha, where True * 1 is still a bool."""
    return x if _is_one(alpha) else x * alpha


def _sum(op, a, b):
    """On a CPU a number is rounded before it is added, on a GPU it is not."""
    on_gpu = any(isinstance(x, torch.Tensor) and x.device.type == "cuda" for x in (a, b))
    return exact(op, a, b) if on_gpu else agree(op, (a, b))


@decomposition("add.Tensor")
def add(a, b, alpha=1):
    if _is_one(alpha):
        return _sum(aten.add.Tensor, a, b) if type(alpha) is int else aten.add.Tensor(a, b)
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return aten.add.Tensor(a, _scaled(b, alpha))
    dtype = promoted(a, b)
    if dtype is torch.bool:
        return aten.add.Tensor(a, b) if alpha else a             # -1 is a truth value, too
    return aten.add.Tensor(widen(a.to(dtype)), _scaled(widen(b.to(dtype)), alpha)).to(dtype)


@decomposition("sub.Tensor")
def sub(a, b, alpha=1):
    if _is_one(alpha):
        return _sum(aten.sub.Tensor, a, b) if type(alpha) is int else aten.sub.Tensor(a, b)
    return aten.add.Tensor(a, b, alpha=-alpha)


formulas({
    "add.Scalar": lambda a, b, alpha=1: aten.add.Tensor(a, b * alpha),
    "sub.Scalar": lambda a, b, alpha=1: aten.sub.Tensor(a, b * alpha),
})


@decomposition("rsub.Scalar", "rsub.Tensor")
def rsub(a, b, alpha=1):
    if isinstance(b, torch.Tensor):
        return aten.sub.Tensor(b, a, alpha=alpha)
    return aten.sub.Tensor(b, _scaled(a, alpha))


@decomposition("div.Tensor")
def div(a, b):
    if not promoted(a, b).is_floating_point:
        return aten.div.Tensor(*(real(x) if isinstance(x, torch.Tensor) else x for x in (a, b)))
    return exact(aten.div.Tensor, a, b)


@decomposition("div.Tensor_mode", "div.Scalar_mode")
def div_mode(a, b, rounding_mode=None):
    if rounding_mode is None:
        return aten.div.Tensor(a, b)
    dtype = promoted(a, b)
    if dtype in HALF and _keeps_its_value(b):
        b = b.float() if isinstance(b, torch.Tensor) else constant(b, a, torch.float32)
        return aten.div.Tensor_mode(a.float(), b, rounding_mode=rounding_mode).to(dtype)
    if not isinstance(b, torch.Tensor):
        b = constant(b, a, dtype)
    return agree(aten.div.Tensor_mode, (a, b), rounding_mode=rounding_mode)


def _keeps_its_value(divisor) -> bool:
    """Kernels for half precision read a divisor that is a number in float32, and on a CPU a tensor of one element as well: 0.7
    rounded to bfloat16 goes into 0.7 not quite once. Nor do they round such a quotient before it is truncated."""
    return not isinstance(divisor, torch.Tensor) or divisor.numel() == 1 and divisor.device.type == "cpu"


@decomposition("floor_divide", "floor_divide.Scalar")
def floor_divide(a, b):
    if not isinstance(a, torch.Tensor):
        a = constant(a, b, promoted(a, b))
    return aten.div.Tensor_mode(a, b, rounding_mode="floor")


@decomposition("atan2")
def atan2(a, b):
    if not promoted(a, b).is_floating_point:
        return torch.atan2(real(a), real(b))
    return agree(aten.atan2.default, (a, b))


def tensor_operand(op):
    return lambda a, b: op(a, constant(b, a, promoted(a, b)))


formulas({f"{_name}.{_kind}": tensor_operand(overload(_name + ".Tensor")) for _kind, _names in {
    "Scalar": "remainder fmod bitwise_and bitwise_or bitwise_xor", "Tensor_Scalar": "bitwise_left_shift bitwise_right_shift"}.items()
    for _name in _names.split()})
formulas({"mul.Scalar": aten.mul.Tensor, "div.Scalar": aten.div.Tensor, "sgn": aten.sign.default})


addcmul = converted(lambda x, a, b, value=1: x + _scaled(a, value) * b)
addcdiv = converted(lambda x, a, b, value=1: x + _scaled(a, value) / b)
formulas({"addcmul": addcmul, "addcdiv": addcdiv})


@decomposition("lerp.Scalar", "lerp.Tensor")
@converted
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
#
# `ldexp` moves a number by a power of two, and that power may be a number that its dtype does not have: `ldexp(1e-40, 140)` is 139, but
# `2.0 ** 140` is infinite in float32. In float64 it is not, nor is the product rounded there. A power of two is made from its bits: an
# exponent, which IEEE 754 counts from -1023, and zeros. What is float64 already takes up to three of them, the smaller first, so that only
# the last product can be rounded.

# %%
SMALL_POWERS = {0.5: torch.sqrt, -0.5: torch.rsqrt, -1: torch.reciprocal, 0: torch.ones_like, 1: torch.clone, 2: lambda x: x * x,
                3: in_float32(lambda x: x * x * x), -2: in_float32(lambda x: torch.reciprocal(x * x))}


def takes_roots(x) -> bool:
    """Whether eager takes a root where the exponent is a half, which of -inf and -0 is another number: on a CPU not of float16."""
    return x.dtype is not torch.float16 or x.device.type != "cpu"


@decomposition("pow.Tensor_Scalar")
def power(x, exponent):
    """The exponents for which eager has special cases too."""
    converted = agree(aten.pow.Tensor_Scalar, (x, exponent))
    special = SMALL_POWERS.get(exponent) if isinstance(exponent, (int, float)) and (abs(exponent) != 0.5 or takes_roots(x)) else None
    return special(x) if special and converted is NotImplemented else converted


@decomposition("ldexp.Tensor")
def ldexp(x, exponent):
    """`x * 2**exponent`, rounded once. Whole exponents are those of C: 32 bits of them count."""
    if not x.is_floating_point() or exponent.is_floating_point():
        return x * torch.pow(2.0 if not x.is_floating_point() or x.dtype is torch.float32 else constant(2.0, x), exponent)
    rest, out = exponent.to(torch.int32).to(torch.int64), x.to(torch.float64)
    powers = []
    for _ in range(3 if x.dtype is torch.float64 else 1):
        part = rest.clamp(-1022, 1023)
        powers.append(((part + 1023) << 52).view(torch.float64))
        rest = rest - part
    for power in reversed(powers):
        out = out * power
    return out.to(x.dtype)


# %% [markdown]
# ## Extremes
#
# `maximum` lets NaN win; `fmax` lets it lose. Clamping is two extremes, lower bound first: with crossed
# bounds the upper one wins. A bound that is the number NaN makes everything NaN, except for a `clamp` with a single bound on a GPU, and
# with PyTorch 2.11 on a CPU (`CPU_KEEPS`): its kernel keeps the elements, while that of `clamp_max` does not.

# %%
def _bound(x, bound, dtype):
    return bound.to(dtype) if isinstance(bound, torch.Tensor) else constant(bound, x, dtype)


def _clamp(x, min=None, max=None):
    dtype = promoted(x, min if min is not None else max, max if max is not None else min)
    out = x.to(dtype)
    if min is not None:
        out = torch.maximum(out, _bound(x, min, dtype))
    if max is not None:
        out = torch.minimum(out, _bound(x, max, dtype))
    return out


CPU_KEEPS = not torch.ones(1, device="cpu").clamp(max=math.nan).isnan().item()


@decomposition("clamp", "clamp.Tensor")
def clamp(x, min=None, max=None):
    only = min if max is None else max if min is None else None
    kept = (CPU_KEEPS or x.device.type == "cuda") and type(only) is float and only != only
    return x.to(promoted(x, only)) if kept else _clamp(x, min, max)


@decomposition("clamp_min", "clamp_min.Tensor")
def clamp_min(x, min):
    return _clamp(x, min=min)


@decomposition("clamp_max", "clamp_max.Tensor")
def clamp_max(x, max):
    return _clamp(x, max=max)


formulas({
    "fmax": lambda a, b: torch.where((a >= b) | (b != b), a, b),
    "fmin": lambda a, b: torch.where((a <= b) | (b != b), a, b),
})


# %% [markdown]
# ## Logic
#
# Truth is "not equal to zero"; on bools the bitwise operators are the logical ones.

# %%
def as_bool(x):
    """x != 0 as a bool tensor."""
    return x if x.dtype is torch.bool else x != 0


def of_floats(test):
    return lambda x: test(x) if x.is_floating_point() else torch.zeros_like(x, dtype=torch.bool)


formulas({
    "logical_and": lambda a, b: as_bool(a) & as_bool(b),
    "logical_or": lambda a, b: as_bool(a) | as_bool(b),
    "logical_xor": lambda a, b: as_bool(a) ^ as_bool(b),
    "logical_not": lambda x: aten.bitwise_not.default(x) if x.dtype is torch.bool else x == 0,
    "isnan": lambda x: x != x,
    "isinf": of_floats(lambda x: torch.abs(x) == math.inf),
    "isposinf": of_floats(lambda x: x == math.inf),
    "isneginf": of_floats(lambda x: x == -math.inf),
})


# %% [markdown]
# ## Less common functions
#
# Each of these is a line over more common ones, in the order of operations of eager's kernel. Comparisons are
# written so that a NaN ends up where eager has it.
#
# A logarithm of a sum of exponentials is computed from the larger term, so that nothing overflows. A product with a
# logarithm is 0 where the factor is.

# %%
formulas({
    "deg2rad": lambda x: x * (math.pi / 180),
    "rad2deg": lambda x: x * (180 / math.pi),
    "frac": lambda x: x - torch.trunc(x),
}, float32=True)


formulas({
    "heaviside": lambda x, values: torch.where(x == 0, values, torch.where(x > 0, constant(1, x), constant(0, x))),
})


@decomposition("copysign.Tensor", "copysign.Scalar")
def copysign(a, b):
    dtype = promoted(a, b)
    a = a.to(dtype if dtype.is_floating_point else get_default_dtype())
    magnitude = torch.abs(a)
    if isinstance(b, torch.Tensor):
        return torch.where(torch.signbit(b), -magnitude, magnitude)
    return -magnitude if math.copysign(1.0, b) < 0 else magnitude


@decomposition("nan_to_num")
def nan_to_num(x, nan=None, posinf=None, neginf=None):
    if not x.is_floating_point():
        return x.clone()
    limits = torch.finfo(x.dtype)
    out = torch.where(x != x, constant(0.0 if nan is None else nan, x), x)
    out = torch.where(x == math.inf, constant(limits.max if posinf is None else posinf, x), out)
    return torch.where(x == -math.inf, constant(limits.min if neginf is None else neginf, x), out)


def log_of_sum(a, b, exp, scale: float):
    """log(exp(a) + exp(b)), computed from the larger one."""
    return torch.where((a == b) & torch.isinf(a), a, torch.maximum(a, b) + torch.log1p(exp(-torch.abs(a - b))) * scale)


formulas({
    "logaddexp": lambda a, b: log_of_sum(a, b, torch.exp, 1),
    "logaddexp2": lambda a, b: log_of_sum(a, b, torch.exp2, 1 / math.log(2)),
}, float32=True)


def _times_log(x, y, log):
    """x * log(y) which is 0 where x is 0, unless y is NaN."""
    x, y = (real(t) if isinstance(t, torch.Tensor) else t for t in (x, y))
    if not isinstance(y, torch.Tensor):
        y = constant(y, x)
    if not isinstance(x, torch.Tensor):
        x = constant(x, y)
    return torch.where(y != y, math.nan, torch.where(x == 0, 0.0, x * log(y)))


formulas({
    "xlogy.Scalar_Other": tensor_operand(aten.xlogy.Tensor),
    "xlogy.Scalar_Self": lambda a, b: aten.xlogy.Tensor(constant(a, b, promoted(a, b)), b),
    "xlogy.Tensor": converted(lambda x, y: _times_log(x, y, torch.log), floats=True),
    "special_xlog1py": converted(lambda x, y: _times_log(x, y, torch.log1p), floats=True),
})


@decomposition("special_entr", float32=True)
def entr(x):
    x = real(x)
    below = torch.where(x == 0, 0.0, -math.inf)
    return torch.where(x != x, x, torch.where(x > 0, -x * torch.log(x), below))


@decomposition("sinc", float32=True)
def sinc(x):
    angle = math.pi * real(x)
    return torch.where(x == 0, 1.0, torch.sin(angle) / angle)
