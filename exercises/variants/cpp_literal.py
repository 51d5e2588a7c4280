import math
import struct
from functools import partial

import torch

from minicompile.ch10_cpp.ops import register_type


def _text(value, dtype, *, digits=9, suffix="f", point=".0", cast=True, lowest=True, special=True, overflow=True, round_first=True):
    if dtype is torch.bool:
        return "true" if value else "false"
    if not dtype.is_floating_point:
        value = int(value)
        if value == -2**63 and lowest:
            return "(-9223372036854775807L - 1)"
        return f"({register_type(dtype)}){value}" if cast else str(value)
    value, single = float(value), register_type(dtype) == "float"
    if single and overflow and math.isfinite(value) and abs(value) > 3.4028235677973366e38:
        value = math.copysign(math.inf, value)
    if not math.isfinite(value):
        name = "MC_NAN" if math.isnan(value) else "MC_INF"
        name = name if single or not special else f"(double){name}"
        return "-" + name if value < 0 else name
    text = f"{value:.{digits}g}" if single else repr(value)
    return text + (point if not any(c in text for c in ".e") else "") + (suffix if single else "")


wrong_no_suffix = partial(_text, suffix="")
wrong_six_digits = partial(_text, digits=6)
wrong_no_point = partial(_text, point="")
wrong_untyped_integers = partial(_text, cast=False)


def wrong_lowest_integer(value, dtype):
    return _text(value, dtype) if value != -2**63 else "(int64_t)9223372036854775807"


wrong_float_specials = partial(_text, special=False)


def wrong_doubles_are_floats(value, dtype):
    return _text(value, torch.float32 if dtype is torch.float64 else dtype)


def wrong_overflow_is_largest(value, dtype):
    if dtype.is_floating_point and register_type(dtype) == "float" and math.isfinite(float(value)):
        value = max(-3.4028234663852886e38, min(3.4028234663852886e38, float(value)))
    return _text(value, dtype)


def right_hexadecimal(value, dtype):
    kind = register_type(dtype)
    if kind == "bool":
        return str(bool(value)).lower()
    if kind in ("float", "double"):
        value = float(value)
        if kind == "float" and math.isfinite(value):
            try:
                (value,) = struct.unpack("f", struct.pack("f", value))
            except OverflowError:
                value = math.inf if value > 0 else -math.inf
        if math.isnan(value):
            return f"({kind})MC_NAN"
        if math.isinf(value):
            return f"({kind})(-MC_INF)" if value < 0 else f"({kind})MC_INF"
        return value.hex() + ("f" if kind == "float" else "")
    value = int(value)
    return f"(({kind}){value}L)" if value > -2**63 else "(-9223372036854775807L - 1)"


SAME = [
    "- if dtype is torch.bool:\n- return 'true' if value else 'false'\n+ if True:\n+ pass",
    "- if single and math.isfinite(value):\n+ if single:",
    "- return text if value > 0 else '-' + text\n+ return text if value >= 0 else '-' + text",
    "- return text if value > 0 else '-' + text\n+ return text if value > 1 else '-' + text",
    "- text = f'{value:.9g}' if single else repr(value)\n+ text = repr(value)",
]
