# %% [markdown]
# # Pointwise operators
#
# One element from one element of each operand. `pointwise` does what they share: operands broadcast to the
# size of the result, numbers become constants, everything is converted to the dtype that the operator
# computes in, and the result stays lazy.

# %%
from dataclasses import replace
from typing import NamedTuple

import torch

from ..ch01_graphs.floats import Float
from ..ch01_graphs.symbolic import Expr, Symbol, present
from .builder import HALF, Builder, compute_dtype, nearest
from .externs import move
from .lazy import Lazy, Lowering, become, footprint, in_memory, make_lazy, product, realize, sizes_of, window

# Functions that take as long as ten loads on a CPU
HEAVY = set("exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh "
            "erf erf_plus_one erfc erfinv lgamma digamma sigmoid pow atan2 hypot".split())


# %% tags=["exercise:broadcast-index"]
def broadcast_index(x: Lazy, index: tuple) -> tuple:
    """The index into `x` for an index of the (larger) broadcast result: aligned right, 0 where `x` has
    size 1."""
    skip = len(index) - len(x.size)
    return tuple(0 if s == 1 else i for s, i in zip(x.size, index[skip:]))


# %% [markdown]
# A 0-d tensor of the CPU may stand beside tensors of a GPU, as in eager, where it is a number to the kernel. `on_device` makes
# a number of it here as well (`by_value`), and copies what is more than a number.

# %%
def on_device(g: Lowering, x, device):
    """A 0-d tensor of another device may take part. A constant needs no memory; a number on the CPU goes to the kernel
    by value; others are copied over."""
    if not isinstance(x, Lazy) or x.device == device or not footprint(x)[1]:
        return x
    return by_value(g, x, device) if is_number(x) else move(g, x, device)


def is_number(x: Lazy) -> bool:
    """Is it a float in a 0-d tensor on the CPU?"""
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64) and x.size == ()


def by_value(g: Lowering, x: Lazy, device) -> Lazy:
    """The number `x` for loops of another device. They load it from the CPU's memory; the host program (chapter 11)
    reads it there when it launches them, and makes it an argument, as eager does."""
    there = replace(x, device=device, base=None, relayout=None)
    become(there, window(g, x))
    return there

# %% [markdown]
# An operand may be three things. A lazy tensor is read at the index that broadcasting gives, and cast. A
# Python number is a constant of the dtype in which the operator computes. And a number that only the run
# time knows, such as a learning rate, is an argument of the kernel, one for equal expressions. On a CPU
# eager rounds a number to the dtype of a half tensor before it computes (except in products and quotients), on a GPU it does not
# (except where it compares). For a known number that can be done now; for an unknown one the rounding is a value of the body (`Rounded`).
#
# `pointwise` ties the rules together: decide what is too dear to be computed for each element that it is broadcast to (`hoist`), and make
# the lazy tensor whose function reads all operands and calls `fn`.

# %%
def element(b: Builder, x, index: tuple, dtype: torch.dtype):
    """An operand's value at an index of the result, in the dtype the operator computes in."""
    if isinstance(x, Lazy):
        return b.cast(b.read(x, broadcast_index(x, index)), x.dtype, dtype)
    dtype = compute_dtype(dtype)
    if isinstance(x, Rounded):
        return b.round_to(element(b, x.number, index, dtype), x.dtype)
    if isinstance(x, Symbol):
        return b.number(x, dtype)
    return b.index(x, dtype) if isinstance(x, Expr) else b.constant(x, dtype)


class Rounded(NamedTuple):
    """A number of which only the run time knows the value, rounded to a half dtype."""

    number: Expr | Symbol
    dtype: torch.dtype


def argument(g: Lowering, x):
    """A symbolic float becomes an argument of the kernels, equal ones the same."""
    if not isinstance(x, Float):
        return x
    known = next((s for s, e in g.program.numbers.items() if e == x), None)
    if known is None:
        known = Symbol(f"number{len(g.program.numbers)}", real=True)
        g.program.numbers[known] = x
    return known


def number(x, dtype: torch.dtype):
    """A number as a tensor of `dtype` holds it."""
    if dtype not in HALF:
        return x
    return nearest(x, dtype) if isinstance(x, (int, float)) else Rounded(x, dtype)


def hoist(g: Lowering, x, elements) -> None:
    """A small tensor that takes an expensive function to compute is computed once, not once per element it is
    broadcast to. GPUs keep it lazy: there it is arithmetic in the shadow of memory."""
    if isinstance(x, Lazy) and x.device.type == "cpu" and x.base is None and x.heavy and not in_memory(x):
        if isinstance(elements, int) and present(product(x.size)) * 4 <= elements:
            realize(g, x)


def pointwise(g: Lowering, fn, *operands, dtype: torch.dtype | None = None, heavy: bool = False,
              exact: bool = False) -> Lazy:
    """The current node as `fn(b, *values)`. `dtype`: what operands are converted to (default: the result's).
    `exact`: numbers are not rounded to a half dtype, as they never are on a GPU."""
    val = g.val
    dtype = dtype or val.dtype
    operands = [argument(g, x) for x in operands]
    exact = exact or val.device.type != "cpu"
    operands = [x if isinstance(x, Lazy) or exact else number(x, dtype) for x in operands]
    elements = product(sizes_of(val))
    for x in operands:
        hoist(g, x, elements)

    def inner(b: Builder, index):
        out = fn(b, *[element(b, x, index, dtype) for x in operands])
        out = b.to_dtype(out, compute_dtype(val.dtype))
        if g.options.emulate_precision_casts and val.dtype in HALF:
            out = b.round_to(out, val.dtype)
        return out

    return make_lazy(g, inner, [x for x in operands if isinstance(x, Lazy)], val=val, heavy=heavy)

# %% [markdown]
# Two more are shared. `cast` is a pointwise operator of its own, with the strides of its operand. A 0-d tensor that becomes a half
# value is rounded, as a constant is: type promotion makes such casts for the operand that a tensor is compared with. `rounded` is for
# functions that see the difference between a half value in memory and the float32 that it is in a body.

# %%
def cast(g: Lowering, x: Lazy, dtype: torch.dtype) -> Lazy:
    """`x` converted to `dtype`."""
    def inner(b, index):
        value = b.cast(b.read(x, index), x.dtype, dtype)
        if dtype in HALF and (x.size == () or g.options.emulate_precision_casts):
            value = b.round_to(value, dtype)
        return value

    out = make_lazy(g, inner, [x])
    out.size, out.dtype, out.stride = x.size, dtype, x.stride
    return out


def rounded(b: Builder, dtype: torch.dtype, values, numbers: bool = False):
    """The values of operands of `dtype`, a half type rounded. numbers: also those that are constants."""
    return [b.round_to(v, dtype) if numbers or v.constant is None else v for v in values] if dtype in HALF else list(values)
