# %% [markdown]
# # Pointwise operators
#
# One element from one element of each operand. `pointwise` does what they share: operands broadcast to the
# size of the result, numbers become constants, everything is converted to the dtype that the operator
# computes in, and the result stays lazy.

# %%
from __future__ import annotations

import torch

from ..ch01_graphs.symbolic import Expr
from .builder import HALF, Builder, compute_dtype
from .externs import move
from .lazy import Lazy, Lowering, footprint, in_memory, make_lazy, product, realize, sizes_of
from .table import lowering

HEAVY = {"exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "sinh",
         "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "erfinv", "lgamma", "digamma", "sigmoid", "pow",
         "atan2", "hypot"}


def broadcast_index(x: Lazy, index: tuple) -> tuple:
    """The index into `x` for an index of the (larger) broadcast result: aligned right, 0 where `x` has
    size 1."""
    skip = len(index) - len(x.size)
    return tuple(0 if s == 1 else i for s, i in zip(x.size, index[skip:]))


def on_device(g: Lowering, x, device):
    """A 0-d tensor of another device may take part; it is copied over unless it is a constant."""
    if isinstance(x, Lazy) and x.device != device and footprint(x)[1]:
        return move(g, x, device)
    return x


def element(b: Builder, x, index: tuple, dtype: torch.dtype):
    """An operand's value at an index of the result, in the dtype the operator computes in."""
    if isinstance(x, Lazy):
        return b.to_dtype(b.read(x, broadcast_index(x, index)), compute_dtype(dtype))
    return b.index(x, compute_dtype(dtype)) if isinstance(x, Expr) else b.constant(x, compute_dtype(dtype))


def number(x, dtype: torch.dtype, device: torch.device):
    """A number beside a half tensor. Eager's CPU kernels round it to the tensor's dtype first (except in
    products and quotients), its GPU kernels do not."""
    if isinstance(x, (int, float)) and dtype in HALF and device.type == "cpu":
        return torch.tensor(x, dtype=dtype).item()
    return x


def hoist(g: Lowering, x, elements) -> None:
    """A small tensor that takes an expensive function to compute is computed once, not once per element it is
    broadcast to. GPUs keep it lazy: there it is arithmetic in the shadow of memory."""
    if isinstance(x, Lazy) and x.device.type == "cpu" and x.base is None and x.heavy and not in_memory(x):
        if isinstance(elements, int) and product(x.size) * 4 <= elements:
            realize(g, x)


def pointwise(g: Lowering, fn, *operands, dtype: torch.dtype | None = None, heavy: bool = False, exact: bool = False) -> Lazy:
    """The current node as `fn(b, *values)`. `dtype`: what operands are converted to (default: the result's).
    `exact`: numbers are not rounded to a half dtype."""
    val = g.val
    dtype = dtype or val.dtype
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

# %%
ON_BOOL = {"add": "logical_or", "mul": "logical_and", "maximum": "logical_or", "minimum": "logical_and",
           "bitwise_and": "logical_and", "bitwise_or": "logical_or", "bitwise_xor": "logical_xor",
           "bitwise_not": "logical_not"}


def simple(name: str, *overloads: str) -> None:
    heavy = name in HEAVY

    @lowering(*overloads)
    def rule(g, *operands, alpha=1):
        if g.val.dtype is torch.bool and name == "sub":
            return NotImplemented
        instruction = ON_BOOL.get(name, name) if g.val.dtype is torch.bool else name

        def fn(b, *values):
            if alpha != 1:
                values = (values[0], b.op("mul", values[1], b.constant(alpha, b.dtype(values[1]))))
            return b.op(instruction, *values)

        return pointwise(g, fn, *operands, heavy=heavy, exact=name in ("mul", "truediv"))


for _name in ("neg abs exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan asin acos atan sinh cosh "
              "tanh asinh acosh atanh erf erfc erfinv lgamma digamma sigmoid floor ceil round trunc bitwise_not "
              "maximum minimum atan2 hypot nextafter").split():
    simple(_name, _name)
simple("sign", "sign", "sgn")
for _name in ("add", "sub", "mul"):
    simple(_name, f"{_name}.Tensor", f"{_name}.Scalar")
simple("truediv", "div.Tensor", "div.Scalar")
simple("copysign", "copysign.Tensor", "copysign.Scalar")
for _name in ("and", "or", "xor"):
    simple(f"bitwise_{_name}", f"bitwise_{_name}.Tensor", f"bitwise_{_name}.Scalar")
simple("lshift", "bitwise_left_shift.Tensor", "bitwise_left_shift.Tensor_Scalar")
simple("rshift", "bitwise_right_shift.Tensor", "bitwise_right_shift.Tensor_Scalar")
for _name in ("fmod", "remainder"):
    simple(_name, f"{_name}.Tensor", f"{_name}.Scalar")

# %% [markdown]
# ## Comparisons
#
# The result is bool, so it does not say in which dtype to compare; the promotion of the operands does. A half
# value that was computed in this very body is still unrounded float32: comparing it with a value that went
# through memory would find two equal numbers different. So it is rounded first.

# %%
def common_dtype(g: Lowering) -> torch.dtype:
    """The dtype to which eager converts the operands of the current node."""
    args = [a.meta["val"] if hasattr(a, "meta") else a for a in g.node.args]
    return torch.result_type(args[0], args[1]) if len(args) > 1 else args[0].dtype


def rounded(b: Builder, dtype: torch.dtype, values):
    return [b.round_to(v, dtype) if dtype in HALF and b.constant_value(v) is None else v for v in values]


def comparison(name: str) -> None:
    @lowering(f"{name}.Tensor", f"{name}.Scalar")
    def rule(g, x, y):
        dtype = common_dtype(g)

        def fn(b, *values):
            values = rounded(b, dtype, values)
            if dtype is torch.bool and name not in ("eq", "ne"):
                values = [b.to_dtype(v, torch.int32) for v in values]
            return b.op(name, *values)

        return pointwise(g, fn, x, y, dtype=dtype)


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    comparison(_name)


def predicate(name: str) -> None:
    @lowering(name)
    def rule(g, x, y=None):
        to_bool = name.startswith("logical")

        def fn(b, *values):
            values = [b.to_dtype(v, torch.bool) if to_bool else v for v in values]
            return b.op(name, *values)

        if name in ("isnan", "isinf") and not x.dtype.is_floating_point:
            return pointwise(g, lambda b, v: b.constant(False, torch.bool), x, dtype=x.dtype)
        if y is None:
            return pointwise(g, fn, x, dtype=x.dtype)
        return pointwise(g, lambda b, *v: b.op(name, *v), x, y, dtype=torch.bool)


for _name in ("logical_and", "logical_or", "logical_xor", "logical_not", "isnan", "isinf", "signbit"):
    predicate(_name)

# %% [markdown]
# ## The irregular ones

# %%
@lowering("where.self")
def where(g, condition, x, y):
    condition, x, y = (on_device(g, v, g.val.device) for v in (condition, x, y))

    def inner(b, index):
        test = b.to_dtype(b.read(condition, broadcast_index(condition, index)), torch.bool)
        return b.where(test, element(b, x, index, g_dtype), element(b, y, index, g_dtype))

    g_dtype = g.val.dtype
    return make_lazy(g, inner, [v for v in (condition, x, y) if isinstance(v, Lazy)])


@lowering("div.Tensor_mode", "div.Scalar_mode")
def div_mode(g, x, y, *, rounding_mode=None):
    integral = not g.val.dtype.is_floating_point

    def fn(b, u, v):
        if rounding_mode == "floor":
            return b.op("floordiv", u, v)
        if rounding_mode == "trunc":
            return b.op("truncdiv", u, v) if integral else b.op("trunc", b.op("truediv", u, v))
        return b.op("truediv", u, v)

    return pointwise(g, fn, x, y, exact=True)


@lowering("pow.Tensor_Tensor", "pow.Tensor_Scalar", "pow.Scalar")
def power(g, x, y):
    """Small constant exponents are what eager computes too: products, roots and reciprocals instead of
    `pow`."""
    if not isinstance(y, Lazy) and y in (0.5, -0.5, 1, 2, 3, -1, -2) and (g.val.dtype.is_floating_point or y in (1, 2, 3)):
        return pointwise(g, lambda b, v: small_power(b, v, y), x)
    if not isinstance(y, Lazy) and not g.val.dtype.is_floating_point and y < 0:
        return NotImplemented
    return pointwise(g, lambda b, u, v: b.op("pow", u, v), x, y, heavy=True)


def small_power(b: Builder, v, exponent):
    if exponent in (0.5, -0.5):
        return b.op("sqrt" if exponent > 0 else "rsqrt", v)
    out = v
    for _ in range(abs(int(exponent)) - 1):
        out = b.op("mul", out, v)
    return out if exponent > 0 else b.op("reciprocal", out)


@lowering("_to_copy")
def to_copy(g, x, **kwargs):
    if x.device != g.val.device:
        return NotImplemented
    return cast(g, x, g.val.dtype, g.val)


def cast(g: Lowering, x: Lazy, dtype: torch.dtype, val=None) -> Lazy:
    """`x` converted to `dtype`. Rounding to a half type and back inside one body is skipped unless asked
    for; a half value that becomes an integer or a bool is rounded first, for the integer would show the
    difference."""
    def inner(b, index):
        value = b.read(x, index)
        if x.dtype in HALF and not dtype.is_floating_point:
            value = b.round_to(value, x.dtype)
        value = b.to_dtype(value, compute_dtype(dtype))
        if dtype in HALF and g.options.emulate_precision_casts:
            value = b.round_to(value, dtype)
        return value

    if val is not None:
        return make_lazy(g, inner, [x], val=val)
    out = make_lazy(g, inner, [x], val=g.val, size=x.size, dtype=dtype)
    out.stride = x.stride
    return out


@lowering("clone", "copy", "lift_fresh_copy", "contiguous", "_conj_physical", "positive")
def clone(g, x, other=None, *, memory_format=None, non_blocking=False):
    """The same elements in fresh memory. `copy(x, y)` is `y` in the place of `x`."""
    if other is not None and other.device != g.val.device:
        return NotImplemented
    return pointwise(g, lambda b, v: v, x if other is None else other)


@lowering("relu")
def relu(g, x):
    return pointwise(g, lambda b, v: b.op("maximum", v, b.constant(0, b.dtype(v))), x)
