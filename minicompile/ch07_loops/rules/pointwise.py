# %% [markdown]
# # Pointwise operators: the rules
#
# `pointwise` (next door) does what they share. A rule says which instruction an overload is.

# %%
import math
from dataclasses import replace

import torch

from ...ch01_graphs.floats import Float
from ...ch01_graphs.symbolic import Expr, as_expr
from ...ch06_decompositions.rules.arithmetic import takes_roots
from ...errors import Unsupported
from ..builder import HALF, compute_dtype
from ..lazy import make_lazy, strides_of
from ..pointwise import HEAVY, argument, broadcast_index, cast, element, is_number, number, on_device, pointwise, rounded
from ..table import LOWERINGS, aten, lowering

# %% [markdown]
# ## The regular ones
#
# Most rules say only which instruction an overload is. On bools, `add` is "or" and `mul` is "and", as in
# eager.
#
# A half value that was computed in this very body, or in one that is fused with it, is an unrounded float32.
# Where a function is continuous the difference is a rounding error. Where it jumps, or ends, it is another answer:
# `floor` of 2.999 is not that of the 3.0 that eager has in memory, and `acos` of a cosine of 1.0001 is NaN. These
# functions see rounded operands.

# %%
SHARP = set("floor ceil round trunc sign remainder fmod pow sqrt rsqrt log log2 log10 log1p asin acos acosh "
            "atanh erfinv lgamma digamma".split())


ON_BOOL = {"add": "logical_or", "mul": "logical_and", "maximum": "logical_or", "minimum": "logical_and",
           "bitwise_and": "logical_and", "bitwise_or": "logical_or", "bitwise_xor": "logical_xor",
           "bitwise_not": "logical_not"}


# %% [markdown]
# On a CPU a few functions are left to their kernels (`is_called`). C++ has them for single numbers only, if at all: eager takes 1.4 ms for
# the remainders of a million float32 numbers, loops that call `fmod` 50; from 1.3 times as long (`digamma`) to 40 times (`nextafter`).
# And the results are eager's, to the last bit.

# %%
CALLED = {"fmod", "remainder", "floordiv", "erfinv", "lgamma", "digamma", "nextafter"}


def is_called(g, name: str) -> bool:
    return name in CALLED and g.val.device.type == "cpu" and g.val.dtype.is_floating_point


def simple(name: str, *overloads: str) -> None:
    """Lower the overloads to the instruction `name`."""
    @lowering(*overloads)
    def rule(g, *operands):
        dtype = g.val.dtype
        if is_called(g, name):
            return NotImplemented
        instruction = ON_BOOL.get(name, name) if dtype is torch.bool else name

        def fn(b, *values):
            return b.op(instruction, *(rounded(b, dtype, values) if name in SHARP else values))

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
    """Of integers a negative power is refused, which is left to the kernel. A power that varies may be one for which eager takes a root:
    that of `-inf` is NaN."""
    if not x.dtype.is_floating_point and not isinstance(exponent, Expr) and exponent < 0:
        return NotImplemented
    if not isinstance(exponent, Float) or not takes_roots(g.val):
        return LOWERINGS[aten.pow.Tensor_Tensor](g, x, exponent)

    def fn(b, base, exponent):
        base, exponent = rounded(b, g.val.dtype, (base, exponent))
        out = b.op("pow", base, exponent)
        for value, root in ((0.5, "sqrt"), (-0.5, "rsqrt")):
            out = b.where(b.op("eq", exponent, b.constant(value, exponent.dtype)), b.op(root, base), out)
        return out
    return pointwise(g, fn, x, exponent, heavy=True)


@lowering("nextafter")
def nextafter(g, x, y):
    """The neighbour of a half number is not that of the float32 in which loops compute."""
    called = x.dtype in HALF or is_called(g, "nextafter")
    return NotImplemented if called else pointwise(g, lambda b, u, v: b.op("nextafter", u, v), x, y)


simple("lshift", "bitwise_left_shift.Tensor")
simple("rshift", "bitwise_right_shift.Tensor")

# %% [markdown]
# ## Comparisons
#
# The result is bool, so it does not say in which dtype to compare; the operands, which agree, do. Half values are
# rounded: else a value that went through memory and the same value that did not would be found different. Numbers are rounded too,
# on both devices, as in eager: the bfloat16 nearest to 0.1 is larger than 0.1, but `x > 0.1` is false for it.

# %%
def comparison(name: str) -> None:
    @lowering(f"{name}.Tensor", f"{name}.Scalar")
    def rule(g, x, y):
        if isinstance(y, complex):
            return NotImplemented

        def fn(b, *values):
            values = rounded(b, x.dtype, values, numbers=True)
            if x.dtype is torch.bool and name not in ("eq", "ne"):
                values = [b.to_dtype(v, torch.int32) for v in values]
            return b.op(name, *values)

        return pointwise(g, fn, x, y, dtype=x.dtype, exact=True)


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
    dtype = g.val.dtype
    condition, x, y = (argument(g, v) for v in (condition, x, y))

    def inner(b, index):
        test = b.read(condition, broadcast_index(condition, index))
        return b.where(test, element(b, x, index, dtype), element(b, y, index, dtype))

    return make_lazy(g, inner, [condition, x, y])


@lowering("div.Tensor_mode")
def div_mode(g, x, y, *, rounding_mode):
    dtype = g.val.dtype
    if rounding_mode == "floor" and is_called(g, "floordiv"):
        return NotImplemented

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
        if not x.size and not is_number(x):                 # of an integer, the host makes the number
            x = replace(cast(g, x, g.val.dtype), device=x.device)
        if not is_number(x):
            return NotImplemented
        x = on_device(g, x, g.val.device)
    out = cast(g, x, g.val.dtype)
    out.stride = strides_of(g.val)
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
    dtype, value = g.val.dtype, number(argument(g, value), g.val.dtype)
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
            first, by = (element(b, value, index, torch.float64) for value in (start, step))
            return b.to_dtype(b.op("add", b.op("mul", b.index(index[0], torch.float64), by), first), dtype)
        return b.index(as_expr(index[0]) * step + start, dtype)

    return make_lazy(g, inner, [])
