# %% [markdown]
# # Scalar operations in Triton
#
# A Triton program computes on tiles: `a + b` adds two blocks of numbers that the compiler spreads over the
# threads of a program instance. So a scalar operation of the loop IR becomes one expression on tiles. This
# module is the table: the name of an operation, and a function from the texts of its arguments to the text
# of the result.
#
# Speed does not decide the spelling here, agreement does. The kernels we generate wait for memory, so a
# division rounded correctly (`div_rn`, what eager uses) costs nothing over the approximate one that `/`
# stands for, and keeps the last bit. What is missing from Triton's own language comes from libdevice,
# NVIDIA's bitcode library of math functions, which is also what eager's CUDA kernels call.

# %%
from __future__ import annotations

import math
from typing import Callable

import torch

from ..errors import Unsupported

TRITON_TYPES = {
    torch.float32: "float32", torch.float64: "float64", torch.float16: "float16", torch.bfloat16: "bfloat16",
    torch.int8: "int8", torch.int16: "int16", torch.int32: "int32", torch.int64: "int64", torch.uint8: "uint8",
    torch.uint16: "uint16", torch.uint32: "uint32", torch.uint64: "uint64", torch.bool: "int1",
}
POINTER_TYPES = {
    torch.float32: "*fp32", torch.float64: "*fp64", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int8: "*i8",
    torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8", torch.uint16: "*u16",
    torch.uint32: "*u32", torch.uint64: "*u64", torch.bool: "*i1",
}
OPS: dict[str, Callable] = {}


def triton_op(*names: str):
    """Register `f(dtype, *texts) -> text` for operations `names`; `dtype` is that of the arguments (of the last one)."""
    def register(f):
        for name in names:
            OPS[name] = f
        return f
    return register


def triton_type(dtype: torch.dtype) -> str:
    """`tl.float32` for torch.float32; Unsupported for types that Triton has not (complex, quantized)."""
    if dtype not in TRITON_TYPES:
        raise Unsupported(f"Triton has no type for {dtype}")
    return "tl." + TRITON_TYPES[dtype]

# %% [markdown]
# ## Constants
#
# A Python number in Triton code takes the type of the tile that it meets, or float32/int32 when it meets
# none. Float32 numbers can therefore stay literals; any other constant is written as a tile of one element
# with its type, so that no rule of promotion can change it.

# %%
def constant(value, dtype: torch.dtype, rank: int) -> str:
    """Text for a constant of `dtype`, usable with tiles of `rank` dimensions."""
    if dtype.is_floating_point:
        value = float(value)
        text = repr(value) if math.isfinite(value) else f'float("{value}")'
        if dtype == torch.float32 and (value == 0 or not math.isfinite(value) or 1e-30 < abs(value) < 1e38):
            return text if value >= 0 or not math.isfinite(value) else f"({text})"
    else:
        text = repr(bool(value) if dtype == torch.bool else int(value))
    return f"tl.full([{', '.join(['1'] * rank)}], {text}, {triton_type(dtype)})"

# %% [markdown]
# ## Functions with one name
#
# Most unary functions differ only in where they live.

# %%
_LIBDEVICE = ("expm1 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erfc erfinv lgamma trunc "
              "atan2 hypot copysign nextafter fmod")
_NATIVE = {"exp": "tl.exp", "exp2": "tl.exp2", "log": "tl.log", "log2": "tl.log2", "abs": "tl.abs",
           "rsqrt": "tl.rsqrt", "erf": "tl.erf", "sigmoid": "tl.sigmoid"}
_INFIX = {"sub": "-", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
          "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^", "lshift": "<<", "rshift": ">>"}


def _call(function: str):
    return lambda dtype, *args: f"{function}({', '.join(args)})"


for _name in _LIBDEVICE.split():
    OPS[_name] = _call(f"libdevice.{_name}")
for _name, _function in _NATIVE.items():
    OPS[_name] = _call(_function)
for _name, _sign in _INFIX.items():
    OPS[_name] = lambda dtype, a, b, sign=_sign: f"{a} {sign} {b}"
OPS["where"] = _call("tl.where")

# %% [markdown]
# ## Those that need thought
#
# Triton's unary minus is `0 - x`, which makes `+0.0` of `+0.0`; multiplying by -1 keeps the sign. Booleans
# add with `|` and multiply with `&`. Triton's `maximum` drops NaN unless told otherwise; PyTorch's keeps
# it. Integer `//` and `%` truncate as C does, so Python's floor needs a correction.

# %%
@triton_op("neg")
def _neg(dtype, x):
    return f"{x} * -1"


@triton_op("add")
def _add(dtype, a, b):
    return f"{a} | {b}" if dtype == torch.bool else f"{a} + {b}"


@triton_op("mul")
def _mul(dtype, a, b):
    return f"{a} & {b}" if dtype == torch.bool else f"{a} * {b}"


@triton_op("truediv")
def _truediv(dtype, a, b):
    return f"tl.div_rn({a}, {b})" if dtype == torch.float32 else f"{a} / {b}"


@triton_op("reciprocal")
def _reciprocal(dtype, x):
    return f"tl.div_rn(tl.full({x}.shape, 1.0, tl.float32), {x})" if dtype == torch.float32 else f"1.0 / {x}"


@triton_op("sqrt")
def _sqrt(dtype, x):
    return f"tl.sqrt_rn({x})" if dtype == torch.float32 else f"tl.sqrt({x})"




def _extremum(name: str, sign: str):
    def emit(dtype, a, b):
        if dtype == torch.bool:
            return f"{a} {sign} {b}"
        nan = ", propagate_nan=tl.PropagateNan.ALL" if dtype.is_floating_point else ""
        return f"tl.{name}({a}, {b}{nan})"
    OPS[name] = emit


_extremum("maximum", "|")
_extremum("minimum", "&")




def _rounding(name: str, function: str):
    OPS[name] = lambda dtype, x: f"{function}({x})" if dtype.is_floating_point else x


_rounding("floor", "tl.floor")
_rounding("ceil", "tl.ceil")
_rounding("trunc", "libdevice.trunc")
_rounding("round", "libdevice.nearbyint")       # half to even


@triton_op("sign")
def _sign(dtype, x):
    one = constant(1, dtype, 1)
    return f"tl.where({x} > 0, {one}, tl.where({x} < 0, -1, 0).to({triton_type(dtype)}))"


@triton_op("isnan")
def _isnan(dtype, x):
    return f"{x} != {x}"


@triton_op("isinf")
def _isinf(dtype, x):
    return f'tl.abs({x}) == float("inf")' if dtype.is_floating_point else f"{x} != {x}"


@triton_op("signbit")
def _signbit(dtype, x):
    bits = {torch.float32: "tl.int32", torch.float64: "tl.int64"}.get(dtype)
    return f"{x}.to({bits}, bitcast=True) < 0" if bits else f"{x} < 0"


@triton_op("logical_not")
def _logical_not(dtype, x):
    return f"{x} == 0"


@triton_op("bitwise_not")
def _bitwise_not(dtype, x):
    return f"{x} == 0" if dtype == torch.bool else f"~{x}"


def _logical(name: str, sign: str):
    def emit(dtype, a, b):
        return f"{a} {sign} {b}" if dtype == torch.bool else f"({a} != 0) {sign} ({b} != 0)"
    OPS["logical_" + name] = emit


_logical("and", "&")
_logical("or", "|")
_logical("xor", "^")


@triton_op("digamma")
def _digamma(dtype, x):
    return f"digamma({x})"


@triton_op("pow")
def _pow(dtype, a, b):
    return f"libdevice.pow({a}, {b})" if dtype.is_floating_point else f"int_pow({a}, {b})"


@triton_op("floordiv")
def _floordiv(dtype, a, b):
    return f"float_floordiv({a}, {b})" if dtype.is_floating_point else f"int_floordiv({a}, {b})"


@triton_op("truncdiv")
def _truncdiv(dtype, a, b):
    return f"libdevice.trunc({_truediv(dtype, a, b)})" if dtype.is_floating_point else f"{a} // {b}"


@triton_op("remainder")
def _remainder(dtype, a, b):
    return f"float_remainder({a}, {b})" if dtype.is_floating_point else f"int_remainder({a}, {b})"


_float_fmod = OPS["fmod"]


@triton_op("fmod")
def _fmod(dtype, a, b):
    return _float_fmod(dtype, a, b) if dtype.is_floating_point else f"{a} % {b}"

# %% [markdown]
# ## Conversions
#
# A float becomes a small unsigned integer by way of a signed one: negative numbers wrap around, as they do
# in eager, and are not clamped. float64 reaches the half types through float32.

# %%
def convert(x: str, source: torch.dtype, target: torch.dtype) -> str:
    """Text of `x` converted from `source` to `target` with the meaning of a torch cast."""
    if source == target:
        return x
    if target == torch.bool:
        return f"{x} != 0"
    if source.is_floating_point and target == torch.uint8:
        return f"{x}.to(tl.int32).to(tl.uint8)"
    if source == torch.float64 and target in (torch.float16, torch.bfloat16):
        return f"{x}.to(tl.float32).to({triton_type(target)})"
    return f"{x}.to({triton_type(target)})"
