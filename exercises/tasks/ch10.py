"""Chapter 10: C++ text that means what eager means."""
import ctypes
import dataclasses
import math
import pathlib
import re
import tempfile

import torch

from .. import ExerciseError, behaviour, task
from .kit import kernels_of, lowered

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

KINDS = """
static int kind(bool) { return 1; } static int kind(float) { return 2; } static int kind(double) { return 3; }
static int kind(int8_t) { return 4; } static int kind(uint8_t) { return 5; } static int kind(int16_t) { return 6; }
static int kind(int32_t) { return 7; } static int kind(int64_t) { return 8; } static int kind(uint16_t) { return 9; }
static int kind(uint32_t) { return 10; } static int kind(uint64_t) { return 11; } static int kind(long long) { return 12; }
static int64_t bits(bool x) { return x; } static int64_t bits(float x) { return mc_bits<int32_t>(x); } static int64_t bits(double x) {
return mc_bits<int64_t>(x); } template <class T> static int64_t bits(T x) { return (int64_t)x; }
"""
TYPES = "? bool float double int8_t uint8_t int16_t int32_t int64_t uint16_t uint32_t uint64_t int64_t".split()


def evaluate(lines: list) -> list:
    """(type, bits) of each C++ statement list that ends by setting `auto y`. Raises ExerciseError if the compiler objects."""
    from minicompile.ch10_cpp import build
    body = "".join(f"  {{ {line} out[{2 * k}] = kind(y); out[{2 * k + 1}] = bits(y); }}\n" for k, line in enumerate(lines))
    text = build._companions() + KINDS + 'extern "C" void run(int64_t* out) {\n' + body + "}\n"
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "constants.so"
        try:
            build._compile(text, path)
        except RuntimeError as error:
            line, problem = (re.search(r":(\d+):\d+: error: (.*)", str(error)) or re.match("()(.*)", str(error))).groups()
            raise ExerciseError(f"C++: {problem}, in {text.splitlines()[int(line or 0) - 1].strip().split(' out[')[0]}") from None
        out = (ctypes.c_int64 * (2 * len(lines)))()
        ctypes.CDLL(str(path)).run(out)
    return [(TYPES[out[2 * k]], out[2 * k + 1]) for k in range(len(lines))]


# ---- cpp-literal -----------------------------------------------------------------------------------------

task("cpp-literal", title="A constant, to the last bit", minutes=40, seconds=20, about="""\
The constants of a loop body become C++ text. 0.1 without a suffix is a double, and drags a whole expression to double; `1f` is no literal
at all; float32's 0.1 printed with six digits is another number; -9223372036854775808 is minus a number that does not fit. Print a constant
of a given dtype so that the compiler reads exactly this value, with exactly this type.""", hints=[
    "Which kinds of constants need which kinds of text? What is a half type in registers (`register_type`)?",
    "A float32 is exact with 9 significant digits (%.9g), a double with repr. Round to float32 first (struct.pack 'f'); what overflows "
    "there becomes infinite. Then see that the text has a point or an exponent.",
    "Booleans and integers first; of the integers one cannot be written. For floats: round to float32 where the register is a float, "
    "and what overflows becomes an infinity of the same sign. Then NaN, then infinities, then numbers; a text without point and "
    "exponent gets a point, and a float its suffix."])


def constants(dtypes, *values, extra=None):
    def cases(rng):
        return [[(v, d) for v in (*values, *(extra(rng) if extra else ())) for d in dtypes]]
    return cases


def constants_text(case):
    return f"literal(value, dtype) for {case[0][1]}: " + ", ".join(repr(v) for v,
        d in case[:12] if d == case[0][1]) + (", ..." if len(case) > 12 else "")


def literals(function, case):
    return [function(v, d) for v, d in case]


def read_back(case, texts):
    found = {}
    for (value, dtype), (kind, number), text in zip(case, evaluate([f"auto y = {t};" for t in texts]), texts, strict=True):
        if isinstance(value, float) and math.isnan(value):
            number &= 0x7F800000 if kind == "float" else 0x7FF << 52           # any NaN will do
        found[f"literal({value!r}, {dtype})"] = {"C++ type": kind, "bits": number, "has a number that no type holds": str(2**63) in text}
    return found


# Between two float32, nearer to one; with nine digits they are nearer to the other
HALFWAY = [134365.11718750003, 847433.9062500001, 255069.77343750003, 449491.64062499994]


def some_floats(rng):
    return [rng.uniform(-1, 1) * 10 ** rng.randrange(-40, 39) for _ in range(40)]


for _points, _name, _cases in (
        (2, "booleans and integers", constants((*INTEGERS, torch.bool), 0, 1, 7, 100)),
        (2, "negative and extreme integers", lambda rng: [[(-1, torch.int64), (-128, torch.int8), (2**31 - 1, torch.int32),
                                                           (-2**31, torch.int32), (2**63 - 1, torch.int64),
                                                           (-2**63, torch.int64), (255, torch.uint8)]]),
        (3, "whole numbers and fractions as floats", constants(FLOATS, 0.0, 1.0, -2.0, 3, 0.5, 100.0, 1e6, 1e10, 123456789.0)),
        (3, "every bit", constants(FLOATS, 0.1, 1 / 3, math.pi, 1e-45, 1e-40, 16777217.0, 0.30000000000000004, -0.0, *HALFWAY,
                                     extra=some_floats)),
        (2, "infinities, NaN, overflow", constants(FLOATS, math.inf, -math.inf, math.nan, 1e39, -1e300))):
    behaviour("cpp-literal", points=_points, name=_name, cases=_cases, show=constants_text, then=read_back)(literals)


# ---- cpp-cast --------------------------------------------------------------------------------------------

task("cpp-cast", title="The casts that C++ does not have", minutes=35, seconds=20, about="""\
`to_dtype` in a loop body means torch's cast. C++ agrees for most pairs of types, and disagrees in the corners: bool is `!= 0`, not the
lowest bit; the cast of NaN or of a large float to an integer is undefined, and the compiler takes advantage of that; half types are floats
in registers, so nothing happens at all.""", hints=[
    "When has nothing to happen at all? Compare what is in registers (`register_type`), not the dtypes.",
    "To bool: `x != 0`. From bool to a floating type: `x ? 1 : 0` with literals of the right type (`literal(1, target)`).",
    "Six cases, and their order matters: equal registers; to bool; from bool to floating; from int64 to floating; from floating to an "
    "integer, by `mc_integer` with the width that the docstring names; the cast of C++. "
    "A half target is a float in registers, and no integer."])

VALUES = {torch.bool: [True, False], torch.uint8: [0, 1, 200, 255], **{d: [0, 1, -1, 100, -100] for d in (torch.int8, torch.int16,
    torch.int32, torch.int64)},
          **{d: [0.0, -0.0, 1.0, -1.5, 0.25, 127.9, -3.99, 1000.0] for d in FLOATS}}
WILD = [math.nan, math.inf, -math.inf, 3e9, -3e9, 1e20]


def casts(sources, targets, values=None):
    return lambda rng: [[(s, t, v) for s in sources for t in targets for v in (values or VALUES[s])]]


def cast_texts(function, case):
    return [function("x", source, target) for source, target, _ in case]


def cast_values(case, texts):
    from minicompile.ch10_cpp.ops import literal, register_type
    lines = [f"volatile {register_type(source)} v = {literal(value, source)}; const {register_type(source)} x = v; auto y = {text};"
             for (source, _, value), text in zip(case, texts, strict=True)]
    width = {k: re.findall(r"mc_integer<(\w+)>", text) for k, text in enumerate(texts)}
    return {f"{value} as {source} to {target}": {"C++ type": kind, "bits": number, "through mc_integer of": width[k]}
            for k, ((source, target, value), (kind, number)) in enumerate(zip(case, evaluate(lines)))}


def casts_text(case):
    return "casts " + ", ".join(dict.fromkeys(f"{str(s)[6:]} to {str(t)[6:]}" for s, t, _ in case[:40])) + ", ..."


for _points, _name, _cases in ((2, "between integers", casts(INTEGERS, INTEGERS)),
                               (2, "to bool", casts((*INTEGERS, *FLOATS), (torch.bool,))),
                               (2, "from bool", casts((torch.bool,), (*INTEGERS, *FLOATS))), (2, "between floating types",
                                                                                              casts(FLOATS, FLOATS)),
                               (2, "floating to integers, and back", lambda rng: [
                                   casts(FLOATS, (*INTEGERS, torch.uint32, torch.uint64))(rng)[0] + casts(INTEGERS, FLOATS)(rng)[0]]),
                               (3, "NaN, infinities and overflow to integers", casts((torch.float32, torch.float64), INTEGERS, WILD))):
    behaviour("cpp-cast", points=_points, name=_name, cases=_cases, show=casts_text, then=cast_values)(cast_texts)


# ---- row-bug ---------------------------------------------------------------------------------------------

task("row-bug", title="The maximum that forgets", minutes=45, kind="bug", function="_row_step", seconds=30,
     plant=[('step.after.append(f"nan{n} |= bad{n};")', 'step.after.append(f"nan{n} = bad{n};")')], about="""\
Reductions along a row go chunk by chunk; `_row_step` gives the C++ text of each part: what happens once per row, once per chunk, per
element, and after a chunk. One of the texts is wrong, for some kinds of reduction, some rows, some values. Eager's maximum of a row with a
NaN is NaN, wherever it stands.""", hints=[
         "The failing rows are long and have one NaN. Where does it stand, and how long is a chunk (`CHUNK`)?",
         "Which variable remembers that a NaN has been seen in this chunk, and which one that it has been seen in this row?",
         "Look at the statement after a chunk: what does it do to the row's variable if this chunk has no NaN, but the one before had?"])


OTHERS = {"sum": lambda x: x.sum(1), "sum of doubles": lambda x: x.double().sum(1), "sum of integers": lambda x: (x * 9).long().sum(1),
          "product": lambda x: (1 + x / 5000).prod(1), "any": lambda x: (x > 3.7).any(1),
          "largest integer": lambda x: (x * 9).long().amax(1),
          "place of the largest": lambda x: x.argmax(1), "place of the smallest": lambda x: x.argmin(1), "variance": lambda x: x.var(1),
          "softmax": lambda x: x.softmax(1)}


def rows(*kinds):
    """Rows with a NaN, and of other reductions than maxima also some without."""
    def cases(rng):
        return [(kind, dtype, n, at, rng.randrange(1000)) for kind, dtype in kinds for n, at in (
            ((5000, None),) if kind in OTHERS else ((4, 1), (5000, 4999), (5000, 3), (9000, 4500), (20000, 0)))]
    return cases


def row_text(case):
    kind, dtype, n, at, seed = case
    what = f"the {kind} of each row" if kind in OTHERS else f"x.{kind}(1)"
    return f"{what} of {str(dtype)[6:]} [3, {n}]" + (f" with a NaN at [1, {at}]" if at is not None else "") + f", seed {seed}"


def row_schedule(case):
    from minicompile.ch08_fusion.fuse import fuse
    kind, dtype, n, at, seed = case
    x = torch.randn(3, n, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if at is not None:
        x[1, at] = math.nan
    return fuse(lowered(OTHERS.get(kind, lambda x: getattr(x, kind)(1)), x)), x


def row_kernels(function, case):
    """The C++ text of each kernel."""
    from minicompile.ch10_cpp.emit import emit_cpp
    return [emit_cpp(kernel).code for kernel in kernels_of(row_schedule(case)[0])]


def row_reduced(case, texts):
    from minicompile.ch10_cpp.emit import emit_cpp
    from minicompile.ch11_runtime.host import compile_schedule
    schedule, x = row_schedule(case)
    texts = iter(texts)
    program = compile_schedule(schedule, lambda kernel: dataclasses.replace(emit_cpp(kernel), code=next(texts)))
    return dict(zip(("row 0", "row 1", "row 2"), program([x])[0].unbind()))


for _points, _name, _cases in ((3, "amax of float32 rows with a NaN", rows(("amax", torch.float32))),
                               (3, "amin of float32 rows with a NaN", rows(("amin", torch.float32))),
                               (3, "amax of float64 rows, and the other reductions",
                                rows(("amax", torch.float64), *((kind, torch.float32) for kind in OTHERS)))):
    behaviour("row-bug", points=_points, name=_name, cases=_cases, show=row_text, then=row_reduced)(row_kernels)
