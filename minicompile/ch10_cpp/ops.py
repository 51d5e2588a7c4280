# %% [markdown]
# # Scalar operations in C++
#
# A loop body is a list of scalar operations, and each becomes one C++ expression. What makes this a page and
# not a line is that C++ and PyTorch disagree in the corners: integer division rounds to zero in C++ and down
# in Python, `fmax` drops NaNs and `torch.maximum` keeps them, shifting an `int` by 40 is undefined, and an
# `int8 + int8` is an `int`. Each rule here states PyTorch's meaning.
#
# A second concern shapes every rule: the expression must *vectorise*. The compiler turns a loop into vector
# instructions only if it contains no calls and no branches, so choices are written `?:`, and transcendental
# functions come from `prelude.h`, where they are polynomials.

# %%
import math
import struct

import torch

from ..ch07_loops.ir import Value
from ..errors import Unsupported
from ..tables import Table

MEMORY_TYPE = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "uint16_t",
               torch.float16: "uint16_t",
               torch.int64: "int64_t", torch.int32: "int32_t", torch.int16: "int16_t", torch.int8: "int8_t",
               torch.uint8: "uint8_t", torch.bool: "uint8_t", torch.uint16: "uint16_t",
               torch.uint32: "uint32_t",
               torch.uint64: "uint64_t"}
HALVES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
BITS = torch.uint16          # a half number that is only moved, as it lies in memory: no loop computes in this dtype


def memory_type(dtype: torch.dtype) -> str:
    """The C++ type of an element in memory. Raises Unsupported for complex, float8 and quantized types."""
    if dtype not in MEMORY_TYPE:
        raise Unsupported(f"the C++ backend has no type for {dtype}")
    return MEMORY_TYPE[dtype]


def register_type(dtype: torch.dtype) -> str:
    """The C++ type of a value being computed: half types live in registers as float, booleans as bool."""
    return "float" if dtype in HALVES else "bool" if dtype is torch.bool else memory_type(dtype)


# %% [markdown]
# A constant must be the same number in C++ that it is in the loop IR, to the last bit. Nine digits name every
# float, and Python's `repr` names every double.

# %% tags=["exercise:cpp-literal"]
def literal(value: float | int | bool, dtype: torch.dtype) -> str:
    """A C++ constant of `dtype`, as an expression. Floats are exact: the text of a float or half `dtype` ends
    in `f`, is a floating literal (with a point or an exponent), and reads back as the nearest float; of a
    double as the same double. Infinities and NaN are MC_INF and MC_NAN, cast where `dtype` is float64. What
    overflows a float is infinite. Booleans are `true` and `false`. Integers are cast to the register type;
    the lowest int64 cannot be written as a literal and is `(-9223372036854775807L - 1)`."""
    if dtype is torch.bool:
        return "true" if value else "false"
    if not (dtype.is_floating_point):
        value = int(value)
        return f"({register_type(dtype)}){value}" if value != -2**63 else "(-9223372036854775807L - 1)"
    value = float(value)
    single = register_type(dtype) == "float"
    if single and math.isfinite(value):
        try:
            value = struct.unpack("f", struct.pack("f", value))[0]
        except OverflowError:
            value = math.copysign(math.inf, value)
    if math.isnan(value):
        return "MC_NAN" if single else "(double)MC_NAN"
    if math.isinf(value):
        text = "MC_INF" if single else "(double)MC_INF"
        return text if value > 0 else "-" + text
    text = f"{value:.9g}" if single else repr(value)
    text += "" if any(c in text for c in ".e") else ".0"
    return text + ("f" if single else "")

# %% [markdown]
# ## The table
#
# `@CPP_OPS.of(names...)` registers a rule `(value, args) -> text`: `args` are the texts of the operands. What depends on an
# operand's dtype, or on its being a constant, is asked of the node, `value.args`.

# %%
CPP_OPS = Table()            # operation -> rule


# %% [markdown]
# Most operations are a text with holes. `form` registers one, or several for different kinds of types. In C++ `a +
# b` of two 8-bit integers is an `int`, so the text casts its result; for wider types the cast is left out.
#
# `form("abs", float=..., int=..., unsigned=..., bool=...)`: of the kinds that are given the most specific counts, the dtype
# itself, then its kind, then `any`. What cannot be a text with holes has a rule of its own, further below.

# %%
def form(name: str, **forms: str) -> None:
    """Register an operation by its text for each kind of type that the last operand may have, the most specific counts.
    `{0}`, `{1}` stand for operands, `{t}` for the type of the result, `{f}` for the suffix of libm's functions, `{by}` for a divisor that
    is not zero. A leading cast is for types narrower than int, on which C++ computes in int."""
    def rule(value, args):
        given, dtype = value.args[-1].dtype, value.dtype
        kinds = (str(given)[6:], "float" if given.is_floating_point else "int" if given.is_signed else "unsigned", "int", "any")
        text = next(forms[k] for k in kinds if k in forms)
        if text.startswith("({t})(") and (dtype.is_floating_point or dtype.itemsize >= 4):
            text = text[len("({t})("):-1]
        return text.format(*args, t=register_type(dtype), f=_suffix(given),
                           by=_checked_divisor(value.args[-1], args[-1]) if "{by}" in text else "")
    CPP_OPS[name] = rule


def operation(value: Value, args: list[str]) -> str:
    """The C++ expression for one scalar operation. Raises Unsupported if there is no rule."""
    if value.op not in CPP_OPS:
        raise Unsupported(f"the C++ backend has no operation {value.op!r}")
    return CPP_OPS[value.op](value, args)


for _name, _text in {
    "add": "({t})({0} + {1})", "sub": "({t})({0} - {1})", "mul": "({t})({0} * {1})", "truediv": "{0} / {1}",
    "eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "logical_and": "({0} != 0) & ({1} != 0)", "logical_or": "({0} != 0) | ({1} != 0)",
    "logical_xor": "({0} != 0) ^ ({1} != 0)", "logical_not": "{0} == 0",
    "bitwise_and": "({t})({0} & {1})", "bitwise_or": "({t})({0} | {1})", "bitwise_xor": "({t})({0} ^ {1})",
    "lshift": "mc_shl<{t}>({0}, {1})", "rshift": "mc_shr<{t}>({0}, {1})",
    "where": "{0} ? {1} : {2}",
    "reciprocal": "({t})1 / {0}", "neg": "({t})(-({0}))", "sign": "({t})(({0} > 0) - ({0} < 0))",
}.items():
    form(_name, any=_text)
for _name in "exp exp2 expm1 log log2 log10 log1p tanh erf erf_plus_one sin cos sigmoid".split():
    form(_name, any=f"mc_{_name}({{0}})")
form("abs", float="__builtin_fabs{f}({0})", int="({t})({0} < 0 ? -{0} : {0})", unsigned="{0}", bool="{0}")
form("signbit", float="mc_bits<int32_t>({0}) < 0", float64="mc_bits<int64_t>({0}) < 0", int="{0} < 0")
form("bitwise_not", int="({t})(~{0})", bool="!{0}")

# %% [markdown]
# `a > b ? a : b` is one instruction, whose result is `b` where one of the two is NaN, and of two zeros. Where `a` is a constant
# (other than NaN), that is what eager has: a NaN and -0 stay as they are.

# %%
@CPP_OPS.of("maximum", "minimum")
def _extreme(value, args):
    name, sign = ("max", ">") if value.op == "maximum" else ("min", "<")
    (x, y), (first, second) = args, value.args
    if second.constant is not None:
        (x, y), first = (y, x), second
    known = first.constant is not None and first.constant == first.constant
    return f"{x} {sign} {y} ? {x} : {y}" if known else f"mc_{name}<{register_type(value.dtype)}>({x}, {y})"

# %% [markdown]
# Functions without a polynomial of ours are calls into libm: for vectors where it has them (`MC_LIBM` in `prelude.h`), else one
# element at a time.

# %%
def _suffix(dtype: torch.dtype) -> str:
    return "f" if register_type(dtype) == "float" else ""


for _name in "sqrt tan asin acos atan sinh cosh asinh acosh atanh erfc floor ceil trunc".split():
    form(_name, any=f"__builtin_{_name}{{f}}({{0}})")
for _name in "atan2 hypot".split():
    form(_name, any=f"__builtin_{_name}{{f}}({{0}}, {{1}})")
form("round", any="__builtin_rint{f}({0})")
form("rsqrt", any="({t})1 / __builtin_sqrt{f}({0})")

# %% [markdown]
# ## Division
#
# An integer division by zero stops a C++ program; in PyTorch it raises. So an integer divisor that is not a
# non-zero constant passes through `mc_divisor`, which notes the problem for the caller and divides by one
# instead.

# %%
def _checked_divisor(value: Value, text: str) -> str:
    return text if value.constant else f"mc_divisor<{register_type(value.dtype)}>({text}, problem)"


form("floordiv", int="mc_ifloordiv<{t}>({0}, {by})")
form("remainder", int="mc_imod<{t}>({0}, {by})")
form("truncdiv", float="__builtin_trunc{f}({0} / {1})", int="({t})({0} / {by})")
form("fmod", int="({t})({0} % {by})")


_POWERS = {2.0: "{0} * {0}", 3.0: "{0} * {0} * {0}", 1.0: "{0}", -1.0: "1 / {0}", -2.0: "1 / ({0} * {0})"}
PRODUCT = 64                 # the largest power that is a product


# %% [markdown]
# An integral power of a float is a product, which is made of doubles: their rounding is not seen in the result.

# %%
@CPP_OPS.of("pow")
def _pow(value, args):
    (x, y), dtype, exponent = args, value.dtype, value.args[1].constant
    if not dtype.is_floating_point:
        return f"mc_ipow<{register_type(dtype)}>({x}, {y})"
    if exponent in _POWERS:
        return _POWERS[exponent].format(x)
    if exponent is not None and register_type(dtype) == "float" and abs(exponent) <= PRODUCT and exponent == int(exponent):
        return f"(float)mc_power<{int(exponent)}>({x})"
    return f"mc_pow<{register_type(dtype)}>({x}, {y})"

# %% [markdown]
# ## Conversions
#
# `to_dtype` to a half type costs nothing: the value stays a float until it is stored, which rounds it.
# `round_to` is the operation that really loses the bits, for those who want eager's intermediate roundings.
#
# A NaN has no integer, so C++ lets the compiler invent one where it knows that a value may be NaN, and
# `mc_integer` states what the processor (and so eager) gives. For int64 there and back an AVX2 processor has no vector instruction:
# `mc_float` and `mc_double` put the halves of the integer into doubles, and are ten instructions for four numbers.

# %% tags=["exercise:cpp-cast"]
def convert(x: str, source: torch.dtype, target: torch.dtype) -> str:
    """C++ text of `x`, a value of dtype `source`, as a value of `target`. Both are in
    registers (`register_type`), where half types are floats. To bool: is it not 0? From bool to floating: 1
    or 0, chosen by `?:`. From int64 to floating: `mc_float` or `mc_double`. From floating to integers through `mc_integer<W>`, with W
    int64_t for int64, uint32 and uint64 and int32_t for the others, then cast. Everything else is a C++ cast, or nothing."""
    given, wanted = register_type(source), register_type(target)
    if given == wanted:
        return x
    if wanted == "bool":
        return f"{x} != 0"
    if given == "bool" and wanted in ("float", "double"):
        return f"{x} ? {literal(1, target)} : {literal(0, target)}"
    if given == "int64_t" and target.is_floating_point:
        return f"mc_{wanted}({x})"
    if given in ("float", "double") and not target.is_floating_point:
        wide = "int64_t" if wanted in ("int64_t", "uint32_t", "uint64_t") else "int32_t"
        return f"({wanted})mc_integer<{wide}>({x})"
    return f"({wanted}){x}"


# %% [markdown]
# Between memory and registers lie two conversions, for half types and for bools, which are bytes in memory. `round_to` is both
# of them, there and back. For float16 they would be twenty instructions; to round a float in place takes half of them.

# %%
@CPP_OPS.of("to_dtype")
def _to_dtype(value, args):
    return convert(args[0], value.args[0].dtype, value.dtype)


@CPP_OPS.of("round_to")
def _round_to(value, args):
    """The values that a half type can represent, in a float."""
    if value.args[1] is torch.float16:
        return f"mc_round_fp16({args[0]})"
    return from_memory(to_memory(args[0], value.args[1]), value.args[1])


@CPP_OPS.of("bitcast")
def _bitcast(value, args):
    given = value.args[0].dtype
    return from_memory(f"mc_bits<{memory_type(value.dtype)}>(({memory_type(given)})({to_memory(args[0], given)}))", value.dtype)


def from_memory(text: str, dtype: torch.dtype) -> str:
    """A loaded element as a register value."""
    if dtype in HALVES:
        return f"mc_from_{HALVES[dtype]}({text})"
    return f"{text} != 0" if dtype is torch.bool else text


def to_memory(text: str, dtype: torch.dtype, exact: bool = False) -> str:
    """A register value (already of `dtype`'s register type) as an element to store. exact: there is nothing to round."""
    if exact and dtype is torch.bfloat16:
        return f"(uint16_t)(mc_bits<uint32_t>({text}) >> 16)"
    return f"mc_to_{HALVES[dtype]}({text})" if dtype in HALVES else text
