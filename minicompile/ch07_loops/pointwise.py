# %% [markdown]
# # Pointwise operators
#
# One element from one element of each operand. `pointwise` does what they share: operands broadcast to the
# size of the result, numbers become constants, everything is converted to the dtype that the operator
# computes in, and the result stays lazy.

# %%
import math
from dataclasses import replace
from typing import NamedTuple

import torch

from ..ch01_graphs.floats import Float
from ..ch01_graphs.symbolic import Expr, Symbol, as_expr, present
from ..errors import Unsupported
from .builder import HALF, Builder, compute_dtype
from .externs import move
from .lazy import Lazy, Lowering, become, footprint, in_memory, make_lazy, product, realize, sizes_of, strides_of, window
from .table import LOWERINGS, aten, lowering

# Functions that take as long as ten loads on a CPU
HEAVY = set("exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh "
            "erf erf_plus_one erfc erfinv lgamma digamma sigmoid pow atan2 hypot".split())


# %% tags=["exercise:broadcast-index"]
def broadcast_index(x: Lazy, index: tuple) -> tuple:
    """The index into `x` for an index of the (larger) broadcast result: aligned right, 0 where `x` has
    size 1."""
    skip = len(index) - len(x.size)
    return tuple(0 if s == 1 else i for s, i in zip(x.size, index[skip:]))


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
# eager rounds a number to the dtype of a half tensor before it computes. For a known number that can be
# done now; for an unknown one the rounding is a value of the body (`Rounded`).
#
# `pointwise` ties the rules together: move what lies on another device, decide what is too dear to be
# computed for each element that it is broadcast to (`hoist`), and make the lazy tensor whose function reads
# all operands and calls `fn`.

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


def nearest(x: int | float, dtype: torch.dtype) -> float:
    """The number of a half type that is nearest to `x`."""
    return torch.tensor(x, dtype=dtype).item()


def number(x, dtype: torch.dtype, device: torch.device):
    """A number beside a half tensor. Eager's CPU kernels round it to the tensor's dtype first (except in
    products and quotients), its GPU kernels do not."""
    if isinstance(x, (int, float)) and dtype in HALF and device.type == "cpu":
        return nearest(x, dtype)
    if isinstance(x, (Expr, Symbol)) and dtype in HALF and device.type == "cpu":
        return Rounded(x, dtype)
    return x


def hoist(g: Lowering, x, elements) -> None:
    """A small tensor that takes an expensive function to compute is computed once, not once per element it is
    broadcast to. GPUs keep it lazy: there it is arithmetic in the shadow of memory."""
    if isinstance(x, Lazy) and x.device.type == "cpu" and x.base is None and x.heavy and not in_memory(x):
        if isinstance(elements, int) and present(product(x.size)) * 4 <= elements:
            realize(g, x)


def pointwise(g: Lowering, fn, *operands, dtype: torch.dtype | None = None, heavy: bool = False,
              exact: bool = False) -> Lazy:
    """The current node as `fn(b, *values)`. `dtype`: what operands are converted to (default: the result's).
    `exact`: numbers are not rounded to a half dtype."""
    val = g.val
    dtype = dtype or val.dtype
    operands = [argument(g, x) for x in operands]
    operands = [on_device(g, x, val.device) if isinstance(x, Lazy) or exact else number(x, dtype, val.device)
                for x in operands]
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
# ## The regular ones
#
# Most rules say only which instruction an overload is. On bools, `add` is "or" and `mul` is "and", as in
# eager.
#
# A half value that was computed in this very body, or in one that is fused with it, is an unrounded float32.
# Where a function is continuous the difference is a rounding error. Where it jumps, or ends, it is another answer:
# `floor` of 2.999 is not that of the 3.0 that eager has in memory, and `acos` of a cosine of 1.0001 is NaN. These
# functions see rounded operands. So they do numbers on a CPU, which `number` has rounded unless it met them as tensors. On a GPU only
# `fmod` and `remainder` round them: what is left of 0.55 is 0.053 there, where a tenth is the nearest half, and not 0.052.

# %%
SHARP = set("floor ceil round trunc sign remainder fmod pow sqrt rsqrt log log2 log10 log1p asin acos acosh "
            "atanh erfinv lgamma digamma".split())


def rounded(b: Builder, dtype: torch.dtype, values, numbers: bool = False):
    """The values of operands of `dtype`, a half type rounded. numbers: also those that are constants."""
    def one(v):
        if v.constant is None:
            return b.round_to(v, dtype)
        return b.constant(nearest(v.constant, dtype), v.dtype) if numbers and type(v.constant) is float else v
    return [one(v) for v in values] if dtype in HALF else list(values)


ON_BOOL = {"add": "logical_or", "mul": "logical_and", "maximum": "logical_or", "minimum": "logical_and",
           "bitwise_and": "logical_and", "bitwise_or": "logical_or", "bitwise_xor": "logical_xor",
           "bitwise_not": "logical_not"}


def simple(name: str, *overloads: str) -> None:
    """Lower the overloads to the instruction `name`."""
    @lowering(*overloads)
    def rule(g, *operands):
        dtype = g.val.dtype
        instruction = ON_BOOL.get(name, name) if dtype is torch.bool else name

        numbers = g.val.device.type == "cpu" or name in ("fmod", "remainder")

        def fn(b, *values):
            return b.op(instruction, *(rounded(b, dtype, values, numbers) if name in SHARP else values))

        return pointwise(g, fn, *operands, heavy=name in HEAVY, exact=name in ("mul", "truediv"))


for _name in (*"neg abs sqrt rsqrt reciprocal sign floor ceil round trunc bitwise_not maximum minimum".split(),
              *(HEAVY - {"pow", "erf_plus_one"})):
    simple(_name, _name)
for _name in "add sub mul fmod remainder bitwise_and bitwise_or bitwise_xor".split():
    simple(_name, f"{_name}.Tensor")
simple("truediv", "div.Tensor")
simple("pow", "pow.Tensor_Tensor", "pow.Scalar")


@lowering("pow.Tensor_Scalar")
def power(g, x, exponent):
    """Of integers a negative power is refused, which is left to the kernel."""
    refused = not x.dtype.is_floating_point and not isinstance(exponent, Expr) and exponent < 0
    return NotImplemented if refused else LOWERINGS[aten.pow.Tensor_Tensor](g, x, exponent)


@lowering("nextafter")
def nextafter(g, x, y):
    """The neighbour of a half number is not that of the float32 in which loops compute."""
    return NotImplemented if x.dtype in HALF else pointwise(g, lambda b, u, v: b.op("nextafter", u, v), x, y)


simple("lshift", "bitwise_left_shift.Tensor")
simple("rshift", "bitwise_right_shift.Tensor")

# %% [markdown]
# ## Comparisons
#
# The result is bool, so it does not say in which dtype to compare; the operands, which agree, do. Half values are
# rounded: else a value that went through memory and the same value that did not would be found different.

# %%
def comparison(name: str) -> None:
    @lowering(f"{name}.Tensor", f"{name}.Scalar")
    def rule(g, x, y):
        if isinstance(y, complex):
            return NotImplemented

        def fn(b, *values):
            values = rounded(b, x.dtype, values)
            if x.dtype is torch.bool and name not in ("eq", "ne"):
                values = [b.to_dtype(v, torch.int32) for v in values]
            return b.op(name, *values)

        return pointwise(g, fn, x, y, dtype=x.dtype)


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    comparison(_name)

# %% [markdown]
# ## The irregular ones
#
# Some operators are elementwise and yet fit no row of the table. `where` has a condition of another dtype
# than its operands. A division with a rounding mode is three different instructions. A copy to another
# device is no loop at all, and a cast must round where eager has rounded. Each is a rule of its own, and
# shows the form that all rules have: a function from an index to a value, and `make_lazy` around it.

# %%
lowering("signbit")(lambda g, x: pointwise(g, lambda b, v: b.op("signbit", v), x, dtype=x.dtype))


@lowering("where.self")
def where(g, condition, x, y):
    dtype, device = g.val.dtype, g.val.device
    condition, x, y = (argument(g, on_device(g, v, device)) for v in (condition, x, y))

    def inner(b, index):
        test = b.read(condition, broadcast_index(condition, index))
        return b.where(test, element(b, x, index, dtype), element(b, y, index, dtype))

    return make_lazy(g, inner, [condition, x, y])


@lowering("div.Tensor_mode")
def div_mode(g, x, y, *, rounding_mode):
    dtype = g.val.dtype

    def fn(b, *values):
        u, v = rounded(b, dtype, values)
        if rounding_mode == "floor":
            return b.op("floordiv", u, v)
        if dtype.is_floating_point:                 # of two half tensors, the quotient is rounded before it is truncated
            return b.op("trunc", *rounded(b, dtype, [b.op("truediv", u, v)]))
        return b.op("truncdiv", u, v)

    return pointwise(g, fn, x, y, exact=True)


@lowering("_to_copy")
def to_copy(g, x, **kwargs):
    if x.device != g.val.device:
        if not is_number(x):
            return NotImplemented
        x = on_device(g, x, g.val.device)
    out = cast(g, x, g.val.dtype)
    out.stride = strides_of(g.val)
    return out


def cast(g: Lowering, x: Lazy, dtype: torch.dtype) -> Lazy:
    """`x` converted to `dtype`."""
    def inner(b, index):
        value = b.cast(b.read(x, index), x.dtype, dtype)
        if dtype in HALF and g.options.emulate_precision_casts:
            value = b.round_to(value, dtype)
        return value

    out = make_lazy(g, inner, [x], size=x.size, dtype=dtype)
    out.stride = x.stride
    return out


@lowering("clone")
def clone(g, x, *, memory_format=None):
    """The same elements in fresh memory."""
    return pointwise(g, lambda b, v: v, x)

# %% [markdown]
# ## Tensors from nothing
#
# `full` and `arange` are functions of the index alone. They are never stored unless something outside a loop
# wants them. Memory of any value is just allocated when a library call asks for it (`bernoulli` wants the
# shape only); a loop sees zeros, or under deterministic algorithms what PyTorch then fills new memory with: NaN, the largest
# integer, True.

# %%
@lowering("full")
def full(g, size, value, **kwargs):
    dtype, value = g.val.dtype, number(argument(g, value), g.val.dtype, g.val.device)
    if type(value) is int and not -2**63 <= value < 2**63:
        raise Unsupported(f"torch.full() with {value}, which it may refuse")
    return make_lazy(g, lambda b, index: element(b, value, index, dtype), [])


@lowering("empty.memory_format")
def empty(g, size, **kwargs):
    if g.node in g.wanted:
        return NotImplemented
    dtype, value = g.val.dtype, 0
    if torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory:
        value = math.nan if dtype.is_floating_point else True if dtype is torch.bool else torch.iinfo(dtype).max
    return full(g, size, value)


@lowering("arange.start_step")
def arange(g, start, end, step=1, **kwargs):
    dtype = compute_dtype(g.val.dtype)

    def inner(b, index):
        if isinstance(start, float) or isinstance(step, float):
            scaled = b.op("mul", b.index(index[0], torch.float64), b.constant(step, torch.float64))
            return b.to_dtype(b.op("add", scaled, b.constant(start, torch.float64)), dtype)
        return b.index(as_expr(index[0]) * step + start, dtype)

    return make_lazy(g, inner, [])
