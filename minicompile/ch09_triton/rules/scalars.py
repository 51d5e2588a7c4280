# %% [markdown]
# # The table of scalar operations
#
# Most are a function of Triton's language or of libdevice, or a sign between their arguments.

# %%
from ..ops import OPS, form, triton_type

_LIBDEVICE = ("expm1 log10 log1p sin cos tan asin acos atan sinh cosh asinh acosh atanh erfc erfinv "
              "lgamma")
_INFIX = {"sub": "-", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
          "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^"}
for _name in _LIBDEVICE.split():
    form(_name, any=f"libdevice.{_name}({{0}})")
for _name in "atan2 hypot nextafter".split():
    form(_name, any=f"libdevice.{_name}({{0}}, {{1}})")
for _name in "exp log log2 abs erf sigmoid".split():
    form(_name, any=f"tl.{_name}({{0}})")
for _name, _sign in _INFIX.items():
    form(_name, any=f"{{0}} {_sign} {{1}}")
form("where", any="tl.where({0}, {1}, {2})")

# %% [markdown]
# ## Those that need thought
#
# Triton's unary minus is `0 - x`, which makes `+0.0` of `+0.0`; multiplying by -1 changes the sign, but is refused for unsigned
# integers. For these `~x` is refused as well, by the interpreter of Triton 3.6. Booleans add with `|` and multiply with `&`.
# Triton's `maximum` drops NaN unless told otherwise; PyTorch's keeps it. Rounding is half to even. Integer `//` and `%` truncate
# as C does, so Python's floor needs a correction, by one of the helpers of `prelude.py`. So does a shift by
# all bits or more, or by less than 0: LLVM leaves open what it gives, and eager does not.

# %%
form("neg", int="0 - {0}", float="{0} * -1")
form("add", any="{0} + {1}", bool="{0} | {1}")
form("mul", any="{0} * {1}", bool="{0} & {1}")
form("truediv", any="{0} / {1}", float32="tl.div_rn({0}, {1})")
form("reciprocal", any="1.0 / {0}", float32="tl.div_rn(tl.full({0}.shape, 1.0, tl.float32), {0})")
form("sqrt", any="tl.sqrt({0})", float32="tl.sqrt_rn({0})")
for _name in "exp2 rsqrt".split():
    form(_name, any=f"tl.{_name}({{0}})", float32=f"{_name}_float({{0}})")
form("pow", int="int_pow({0}, {1})", float="libdevice.pow({0}, {1})")
form("floordiv", int="int_floordiv({0}, {1})", float="float_floordiv({0}, {1})")
form("remainder", int="int_remainder({0}, {1})", float="float_remainder({0}, {1})")
form("fmod", int="{0} % {1}", float="libdevice.fmod({0}, {1})")
form("truncdiv", int="{0} // {1}", float="libdevice.trunc({0} / {1})",
     float32="libdevice.trunc(tl.div_rn({0}, {1}))")
form("lshift", any="shift_left({0}, {1})")
form("rshift", any="shift_right({0}, {1})")
form("digamma", any="digamma({0})")
form("tanh", any="libdevice.tanh({0})", float32="tanh_float({0})")
form("erf_plus_one", any="1 + tl.erf({0})", float32="erf_plus_one({0})")
for _name, _sign in {"maximum": "|", "minimum": "&"}.items():
    form(_name, int=f"tl.{_name}({{0}}, {{1}})", bool=f"{{0}} {_sign} {{1}}",
         float=f"tl.{_name}({{0}}, {{1}}, propagate_nan=tl.PropagateNan.ALL)")
for _name, _sign in {"logical_and": "&", "logical_or": "|", "logical_xor": "^"}.items():
    form(_name, any=f"({{0}} != 0) {_sign} ({{1}} != 0)", bool=f"{{0}} {_sign} {{1}}")
for _name, _function in {"floor": "tl.floor", "ceil": "tl.ceil", "trunc": "libdevice.trunc",
                         "round": "libdevice.nearbyint"}.items():
    form(_name, int="{0}", float=f"{_function}({{0}})")
form("logical_not", any="{0} == 0")
form("bitwise_not", int="~{0}", uint8="{0} ^ 255", bool="{0} == 0")
form("signbit", any="{0} < 0", float32="{0}.to(tl.int32, bitcast=True) < 0",
     float64="{0}.to(tl.int64, bitcast=True) < 0")


@OPS.of("sign")
def _sign_of(dtype, x):
    """Of the shape of x, which may be none. Not as integers that become floats: see `convert_computed`."""
    one, zero = ("1.0", "0.0") if dtype.is_floating_point else ("1", "0")
    return f"tl.where({x} > 0, {one}, tl.where({x} < 0, -{one}, {zero})).to({triton_type(dtype)})"
