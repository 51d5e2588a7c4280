# %% [markdown]
# # Scalar operations in Triton
#
# A Triton program computes on tiles: `a + b` adds two blocks of numbers that the compiler spreads over the
# threads of a program instance. So a scalar operation of the loop IR becomes one expression on tiles. This
# module is the form of the table: the name of an operation, and a function from the texts of its arguments to the text
# of the result. Its rows are in `rules/scalars.py`.
#
# Speed does not decide the spelling here, agreement does. The kernels we generate wait for memory, so a
# division rounded correctly (`div_rn`, what eager uses) costs nothing over the approximate one that `/`
# stands for, and keeps the last bit. What is missing from Triton's own language comes from libdevice,
# NVIDIA's bitcode library of math functions, which is also what eager's CUDA kernels call.

# %%
import math

import torch

from ..errors import Unsupported
from ..tables import Table

# dtype: (its name in Triton code, its name in a kernel's signature)
TYPES = {
    torch.float64: ("float64", "fp64"), torch.float32: ("float32", "fp32"),
    torch.float16: ("float16", "fp16"), torch.bfloat16: ("bfloat16", "bf16"),
    torch.bool: ("int1", "i1"), torch.int8: ("int8", "i8"),
    torch.int16: ("int16", "i16"), torch.int32: ("int32", "i32"), torch.int64: ("int64", "i64"),
    torch.uint8: ("uint8", "u8"), torch.uint16: ("uint16", "u16"), torch.uint32: ("uint32", "u32"),
    torch.uint64: ("uint64", "u64"),
}


def triton_type(dtype: torch.dtype) -> str:
    """`tl.float32` for torch.float32; Unsupported for types that Triton has not (complex, quantized)."""
    if dtype not in TYPES:
        raise Unsupported(f"Triton has no type for {dtype}")
    return "tl." + TYPES[dtype][0]


def pointer_type(dtype: torch.dtype) -> str:
    """`*fp32` for torch.float32."""
    triton_type(dtype)
    return "*" + TYPES[dtype][1]

# %% [markdown]
# ## Constants
#
# A Python number in Triton code takes the type of the tile that it meets, or float32/int32 when it meets
# none. Float32 numbers can therefore stay literals; any other constant is written as a tile of one element
# with its type, so that no rule of promotion can change it. Triton 3.6 makes 0.0 of a constant -0.0, but not of a product.

# %%
def constant_tile(value, dtype: torch.dtype, rank: int) -> str:
    """Text for a constant of `dtype`, usable with tiles of `rank` dimensions."""
    if dtype.is_floating_point:
        value = float(value)
        if value == 0 and math.copysign(1, value) < 0:
            return f"(tl.full([{', '.join(['1'] * rank)}], 0.0, {triton_type(dtype)}) * -1)"
        text = repr(value) if math.isfinite(value) else f'float("{value}")'
        if dtype == torch.float32 and (value == 0 or not math.isfinite(value) or 1e-30 < abs(value) < 1e38):
            return text if value >= 0 or not math.isfinite(value) else f"({text})"
    else:
        text = repr(bool(value) if dtype == torch.bool else int(value))
    return f"tl.full([{', '.join(['1'] * rank)}], {text}, {triton_type(dtype)})"

# %% [markdown]
# ## The table
#
# `OPS[name](dtype, *texts)` is the text of an operation; `dtype` is that of its arguments (of the last one).
# Most entries are a form with places for the arguments. Where it depends on the type, the most specific form
# counts: `float32` before `float` before `any`.

# %%
OPS = Table()                # `rules/scalars.py` fills it


def form(name: str, **forms: str) -> None:
    """Register an operation by its text for each kind of type."""
    def emit(dtype, *args):
        kinds = ("float",) if dtype.is_floating_point else ("bool", "int") if dtype == torch.bool else ("int",)
        text = next((forms[k] for k in (TYPES[dtype][0], *kinds, "any") if k in forms), None)
        if text is None:
            raise Unsupported(f"{name} of {dtype} in Triton")
        return text.format(*args)
    OPS[name] = emit

# %% [markdown]
# ## Conversions
#
# A float becomes a small integer by way of a larger one: what does not fit wraps around, as it does in eager,
# and is not clamped. float64 reaches the half types through float32.
#
# The LLVM of Triton 3.6 has a fault that `convert_computed` avoids. An integer that is 0 or -1 for a truth value, such as
# `mask.int() - 1`, is the truth value itself to LLVM, with its one bit taken for the sign. Where it compares half numbers two at a time,
# and the result becomes a bfloat16, the bit is converted without its sign, and -1 is 1. Later versions are right. So
# an integer that is computed from truth values brings its sign along: where it is below 0, the float is minus its absolute value.

# %%
BY_WAY_OF = {torch.uint8: "tl.int64", torch.int8: "tl.int32", torch.int16: "tl.int32"}


def convert(x: str, source: torch.dtype, target: torch.dtype) -> str:
    """Text of `x` converted from `source` to `target` with the meaning of a torch cast."""
    if source == target:
        return x
    if target == torch.bool:
        return f"{x} != 0"
    if source.is_floating_point and target in BY_WAY_OF:
        return f"{x}.to({BY_WAY_OF[target]}).to({triton_type(target)})"
    if source == torch.float64 and target in (torch.float16, torch.bfloat16):
        return f"{x}.to(tl.float32).to({triton_type(target)})"
    return f"{x}.to({triton_type(target)})"


def convert_computed(x: str, target: torch.dtype) -> str:
    """Text of a signed integer `x` that was computed from truth values, converted to a float."""
    number = f"{x}.to({triton_type(target)})"
    return f"tl.where({x} < 0, 0 - tl.abs({number}), {number})"
