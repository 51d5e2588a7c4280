"""Hand-built kernels through the C++ backend, against PyTorch and the reference interpreter of loops."""
import itertools
import math
import re
import subprocess

import pytest
import torch

from minicompile.ch01_graphs.symbolic import Symbol
from minicompile.ch08_fusion.reference import run_kernel
from minicompile.ch10_cpp import build
from minicompile.ch10_cpp.build import load_cpp
from minicompile.ch10_cpp.emit import emit_cpp

from .kernels import Body, flat, kernel, run, variables

F32 = torch.float32
SPECIAL = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 1e-40, -1e-40, 3e38, 88.7, 89.0,
                        -87.5, -104.0])


def check(k, inputs, outputs, sizes=(), **tolerance):
    """Run `k` compiled and interpreted on copies of the same tensors and compare every output."""
    want = {n: t.clone() for n, t in outputs.items()}
    run_kernel(k, {**{n: t.clone() for n, t in inputs.items()}, **want},
               {s.name: v for s, v in zip(k.symbols, sizes)})
    source = run(k, inputs, outputs, sizes)
    for name in outputs:
        torch.testing.assert_close(outputs[name], want[name], equal_nan=True, **tolerance,
                                   msg=lambda m: f"{name}: {m}")
    return source


def test_softmax_rows_share_loads_and_keep_expensive_values():
    x, y, s = torch.randn(70, 333), torch.empty(70, 333), torch.empty(70)
    i, r = variables("i", 70), variables("r", 333)
    index = flat(i + r, (333, 1))
    a = Body()
    a.store("top", i[0].expr, a.reduce("max", a.load("x", index, F32)))
    b = Body()
    e = b.exp(b.sub(b.load("x", index, F32), b.load("top", i[0].expr, F32)))
    b.store("e", index, e)
    b.store("sum", i[0].expr, b.reduce("sum", b.load("e", index, F32)))
    c = Body()
    c.store("y", index, c.truediv(c.load("e", index, F32), c.load("sum", i[0].expr, F32)))
    k = kernel(i, r, [(i, r, a), (i, r, b), (i + r, (), c)], {"x": x},
               {"y": y},
               {"top": s, "sum": s, "e": y})
    source = run(k, {"x": x}, {"y": y})
    torch.testing.assert_close(y, x.softmax(-1))
    assert source.code.count("mc_exp(") == 1, "the exponential is computed once and kept for the last pass"


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (17, 1000), (300, 33), (2, 5000), (5000, 2), (1, 100000)])
@pytest.mark.parametrize("columns", [False, True])
def test_all_reductions(shape, columns):
    torch.manual_seed(0)
    n, m = shape
    x = torch.randn(n, m)
    i, r = (variables("i", m), variables("r", n)) if columns else (variables("i", n), variables("r", m))
    index = flat(r + i, (m, 1)) if columns else flat(i + r, (m, 1))
    b, names, outputs, size = Body(), [], {}, m if columns else n
    v = b.load("x", index, F32)

    def out(name, value, dtype=F32):
        b.store(name, i[0].expr, value)
        outputs[name] = torch.empty(size, dtype=dtype)
        names.append(name)
    for kind in ("sum", "prod", "max", "min"):
        out(kind, b.reduce(kind, v))
    positive = b.gt(v, b.constant(0.0, dtype=F32), dtype=torch.bool)
    out("any", b.reduce("any", positive), torch.bool)
    out("count", b.reduce("sum", b.to_dtype(positive, dtype=torch.int64)), torch.int64)
    for kind in ("argmax", "argmin"):
        out(kind, b.reduce(kind, v, r[0].expr, dtype=torch.int64), torch.int64)
    w = b.reduce("welford", v)
    for j, name in enumerate(("mean", "m2", "n")):
        out(name, b.emit("get", w, j, dtype=F32))
    k = kernel(i, r, [(i, r, b)], {"x": x}, outputs)
    check(k, {"x": x}, outputs, rtol=1e-5, atol=2e-3 if max(shape) > 10000 else 1e-4)


@pytest.mark.parametrize("columns", [False, True])
def test_reductions_of_nan_and_inf(columns):
    x = torch.randn(6, 40)
    x[0, 3] = math.nan
    x[1, :] = -math.inf
    x[2, 5] = math.inf
    x[3, [7, 9]] = math.nan
    x[4, [2, 30]] = 9.0
    x[5, :] = 0.0
    x = x.t().contiguous() if columns else x
    i, r = variables("i", 6), variables("r", 40)
    index = flat(r + i, (6, 1)) if columns else flat(i + r, (40, 1))
    b, outputs = Body(), {}
    v = b.load("x", index, F32)
    for kind in ("max", "min", "sum", "argmax", "argmin"):
        integer = kind.startswith("arg")
        b.store(kind, i[0].expr, b.reduce(kind, v, r[0].expr if integer else None, dtype=torch.int64
                                          if integer else F32))
        outputs[kind] = torch.empty(6, dtype=torch.int64 if integer else F32)
    run(kernel(i, r, [(i, r, b)], {"x": x}, outputs), {"x": x}, outputs)
    rows = x.t() if columns else x
    for kind, want in {"max": rows.amax(1), "min": rows.amin(1), "sum": rows.sum(1), "argmax": rows.argmax(1),
                       "argmin": rows.argmin(1)}.items():
        torch.testing.assert_close(outputs[kind], want, equal_nan=True, msg=lambda m: f"{kind}: {m}")


def test_a_million_floats_sum_as_accurately_as_double():
    x, y = torch.rand(1_000_003), torch.empty(())
    r = variables("r", x.numel())
    b = Body()
    b.store("y", 0, b.reduce("sum", b.load("x", r[0].expr, F32)))
    run(kernel((), r, [((), r, b)], {"x": x}, {"y": y}), {"x": x}, {"y": y})
    assert abs(y.item() / x.double().sum().item() - 1) < 2e-7


def test_two_reduction_variables_and_symbolic_sizes():
    s = Symbol("s0", None, 2)
    x = torch.randn(5, 4, 77)
    i, r = variables("i", 4), (Symbol("r0", 5), Symbol("r1", s.expr))
    b = Body()
    v = b.load("x", r[0].expr * (s.expr * 4) + i[0].expr * s.expr + r[1].expr, F32)
    b.store("y", i[0].expr, b.reduce("sum", v))
    y = torch.empty(4)
    k = kernel(i, r, [(i, r, b)], {"x": x}, {"y": y}, symbols=(s,))
    run(k, {"x": x}, {"y": y}, (77,))
    torch.testing.assert_close(y, x.sum((0, 2)))


def test_output_in_the_memory_of_an_input():
    x = torch.randn(50, 65)
    want = x.softmax(-1) * 2
    i, r = variables("i", 50), variables("r", 65)
    index = flat(i + r, (65, 1))
    a, b, c = Body(), Body(), Body()
    a.store("top", i[0].expr, a.reduce("max", a.load("x", index, F32)))
    b.store("sum", i[0].expr, b.reduce("sum", b.exp(b.sub(b.load("x", index, F32), b.load("top", i[0].expr, F32)))))
    e = c.exp(c.sub(c.load("x", index, F32), c.load("top", i[0].expr, F32)))
    c.store("y", index, c.mul(c.truediv(e, c.load("sum", i[0].expr, F32)), c.constant(2.0, dtype=F32)))
    t = torch.empty(50)
    k = kernel(i, r, [(i, r, a), (i, r, b), (i + r, (), c)], {"x": x}, {"y": x},
               {"top": t, "sum": t})
    run(k, {"x": x}, {"y": x})
    torch.testing.assert_close(x, want)


def test_too_little_memory_for_a_row_is_an_error():
    n, x = Symbol("n", None, 2), torch.randn(50, 65)
    i, r = variables("i", 50), (Symbol("r0", n.expr),)
    index = i[0].expr * n.expr + r[0].expr
    a, b = Body(), Body()
    a.store("sum", i[0].expr, a.reduce("sum", a.exp(a.load("x", index, F32))))
    b.store("y", index, b.truediv(b.exp(b.load("x", index, F32)), b.load("sum", i[0].expr, F32)))
    y, t = torch.empty(50, 65), torch.empty(50)
    k = kernel(i, r, [(i, r, a), ((*i, *r), (), b)], {"x": x}, {"y": y}, {"sum": t}, symbols=(n,))
    source = run(k, {"x": x}, {"y": y}, (65,))
    torch.testing.assert_close(y, x.softmax(-1))
    with pytest.raises(MemoryError):
        load_cpp([source])[0](x, y, 1 << 57)


def embedding_backward(rows, width, tokens):
    i = variables("i", tokens, width)
    b = Body()
    row = b.indirect(b.load("at", i[0].expr, torch.int64), rows)
    b.store("table", row.expr * width + i[1].expr, b.load("g", flat(i, (width, 1)), F32),
            "atomic_add")
    return i, b


def test_embedding_backward_is_deterministic_and_parallel():
    rows, width, tokens = 11, 96, 3000
    at, g = torch.randint(0, rows, (tokens,)), torch.randn(tokens, width)
    i, b = embedding_backward(rows, width, tokens)
    results = []
    for _ in range(3):
        table = torch.zeros(rows, width)
        source = run(kernel(i, (), [(i, (), b)], {"at": at, "g": g}, {"table": table}),
                     {"at": at, "g": g}, {"table": table})
        results.append(table)
    torch.testing.assert_close(results[0], torch.zeros(rows, width).index_add_(0, at, g), rtol=1e-5,
                               atol=1e-4)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert "omp atomic" not in source.code and "lane0" in source.code


def test_rows_are_added_along_themselves():
    """The index of a row is read once, and its columns, of which no two are one element, are one loop of vectors."""
    s, g, at = torch.randint(0, 9, (300,)), torch.randn(9, 32), torch.randint(0, 11, (300,))
    i, b, table = variables("i", 300, 32), Body(), torch.zeros(11, 32)
    read = b.indirect(b.load("s", i[0].expr, torch.int64), 9)
    row = b.indirect(b.load("at", i[0].expr, torch.int64), 11)
    b.store("table", row.expr * 32 + i[1].expr, b.load("g", read.expr * 32 + i[1].expr, F32), "atomic_add")
    tensors = {"s": s, "at": at, "g": g}
    source = run(kernel(i, (), [(i, (), b)], tensors, {"table": table}), tensors, {"table": table})
    torch.testing.assert_close(table, torch.zeros(11, 32).index_add_(0, at, g[s]))
    inner = source.code[source.code.index("omp simd"):]
    assert "mc_index" not in inner and "table" not in inner and inner.count("out0[") == 2


def test_scatter_without_a_direct_variable_runs_on_one_thread():
    at, g, out = torch.randint(0, 7, (100_000,)), torch.ones(100_000), torch.zeros(7)
    i = variables("i", 100_000)
    b = Body()
    place = b.indirect(b.load("at", i[0].expr, torch.int64), 7)
    b.store("out", place.expr, b.load("g", i[0].expr, F32), "atomic_add")
    source = run(kernel(i, (), [(i, (), b)], {"at": at, "g": g}, {"out": out}), {"at": at, "g": g},
                 {"out": out})
    torch.testing.assert_close(out, torch.bincount(at, minlength=7).float())
    assert "parallel" not in source.code


@pytest.mark.parametrize("bad", [-1, 5, 10**12])
def test_index_out_of_range_raises_like_eager(bad):
    at, x, y = torch.tensor([0, 4, bad]), torch.randn(5, 8), torch.empty(3, 8)
    i = variables("i", 3, 8)
    b = Body()
    row = b.indirect(b.load("at", i[0].expr, torch.int64), 5)
    b.store("y", flat(i, (8, 1)), b.load("x", row.expr * 8 + i[1].expr, F32))
    k = kernel(i, (), [(i, (), b)], {"at": at, "x": x}, {"y": y})
    for type in IndexError, RuntimeError:                       # which of them eager raises is for the operator to say
        with pytest.raises(type, match=f"index {bad} is out of bounds for dimension with size 5"):
            run(k, {"at": at, "x": x}, {"y": y})
    at[2] = 3
    run(k, {"at": at, "x": x}, {"y": y})
    assert torch.equal(y, x[at])


def test_integer_division_by_zero_raises_like_eager():
    a, c, y = torch.tensor([7, -7]), torch.tensor([2, 0]), torch.empty(2, dtype=torch.int64)
    i = variables("i", 2)
    b = Body()
    b.store("y", i[0].expr, b.floordiv(b.load("a", i[0].expr, torch.int64),
                                       b.load("c", i[0].expr, torch.int64)))
    k = kernel(i, (), [(i, (), b)], {"a": a, "c": c}, {"y": y})
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        run(k, {"a": a, "c": c}, {"y": y})
    c[1] = 2
    run(k, {"a": a, "c": c}, {"y": y})
    assert y.tolist() == [3, -4]


@pytest.mark.parametrize("through", [torch.int64, torch.int32])
@pytest.mark.parametrize("n", [3, 40])
def test_what_was_truncated_is_not_negative_zero(through, n):
    x, y = torch.tensor([-0.3, -0.0, 0.7, -1.5] * n)[:n], torch.empty(n)
    i = variables("i", n)
    b = Body()
    b.store("y", i[0].expr, b.emit("to_dtype", b.emit("to_dtype", b.load("x", i[0].expr, F32), dtype=through), dtype=F32))
    run(kernel(i, (), [(i, (), b)], {"x": x}, {"y": y}), {"x": x}, {"y": y})
    assert torch.equal(y, x.to(through).float()) and not y[y == 0].signbit().any()


def test_masked_load_and_masked_store():
    x, y = torch.randn(10), torch.full((14,), 9.0)
    i = variables("i", 14)
    b = Body()
    inside = b.emit("lt", b.emit("index", i[0].expr, dtype=torch.int64),
                    b.emit("constant", 10, dtype=torch.int64), dtype=torch.bool)
    b.write("y", i[0].expr, inside, b.load("x", i[0].expr, F32, inside), None)
    run(kernel(i, (), [(i, (), b)], {"x": x}, {"y": y}), {"x": x}, {"y": y})
    assert torch.equal(y, torch.cat([x, torch.full((4,), 9.0)]))


@pytest.mark.parametrize("size, first, branches", [((4, 6), 0, False), ((4, 1), 0, False), ((3, 6), 0, True), ((4, 6), 1, True)])
def test_a_masked_load_is_a_branch_only_where_it_could_leave_the_memory(size, first, branches):
    """Rows 0 to 3 of a table of this size, from column `first`, under a mask that holds for rows 0 and 1, asked for each element."""
    i, j = Symbol("i", 4), Symbol("j", size[1])
    x, y = torch.randn(size), torch.zeros(4, size[1])
    b = Body()
    element = i.expr * size[1] + (j.expr if size[1] > 1 else 0)
    inside = b.lt(b.emit("index", element, dtype=torch.int64), b.emit("constant", 2 * size[1], dtype=torch.int64), dtype=torch.bool)
    b.store("y", element, b.load("x", element + first, torch.float32, inside))
    variables = (i, j) if size[1] > 1 else (i,)
    expected = torch.zeros(4, size[1])
    expected.view(-1)[:2 * size[1]] = x.view(-1)[first:first + 2 * size[1]]
    source = check(kernel(variables, (), [(variables, (), b)], {"x": x}, {"y": y}), {"x": x}, {"y": expected})
    assert ("? in0[" in source.code) is branches


def test_vectorised_functions_are_accurate_and_handle_special_values():
    torch.manual_seed(0)
    x = torch.cat([torch.randn(3000) * s for s in (1e-3, 1, 30, 1e9)] + [SPECIAL])
    i = variables("i", x.numel())
    names = "exp exp2 expm1 log log2 log10 log1p tanh erf sin cos sigmoid".split()
    b = Body()
    v = b.load("x", i[0].expr, F32)
    outputs = {n: torch.empty_like(x) for n in names}
    for n in names:
        b.store(n, i[0].expr, getattr(b, n)(v))
    run(kernel(i, (), [(i, (), b)], {"x": x}, outputs), {"x": x}, outputs)
    for n in names:
        exact = getattr(torch, n)(x.double())
        torch.testing.assert_close(outputs[n], exact.float(), equal_nan=True, rtol=4e-7, atol=1.2e-7
                                   if n in ("sin", "cos") else 1e-38,
                                   msg=lambda m: f"{n}: {m}")
        zero = x == 0
        if n in ("expm1", "log1p", "tanh", "erf", "sin"):
            assert torch.equal(outputs[n][zero].signbit(), x[zero].signbit()), f"{n} loses the sign of zero"


@pytest.mark.skipif(build._glibc() < 235 or "avx2" not in open("/proc/cpuinfo").read(), reason="no functions for vectors")
@pytest.mark.parametrize("dtype, name", [(F32, b"sincosf"), (torch.float64, b"sincos")])
def test_the_sine_and_the_cosine_of_a_number_are_two_calls_for_vectors(tmp_path, dtype, name):
    """g++ would make one of them, of which there is none for vectors."""
    i, b, x = variables("i", 64), Body(), torch.empty(64, dtype=dtype)
    v = b.load("x", i[0].expr, dtype)
    b.store("y", i[0].expr, b.mul(b.sin(v), b.cos(v)))
    source = emit_cpp(kernel(i, (), [(i, (), b)], {"x": x}, {"y": x}))
    build._compile(build._file_text([(source.name, source.code, source)]), tmp_path / "kernel.so")
    assert name not in (tmp_path / "kernel.so").read_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_function_gives_the_same_bits_in_a_loop_of_any_length(dtype):
    """In vectors of every width, and alone: what one loop has stored and another computes anew are compared for equality."""
    torch.manual_seed(0)
    x, y = torch.rand(2, 221, dtype=dtype) * 0.998 + 0.001
    binary = "pow atan2 hypot truediv".split()
    names = ("exp exp2 expm1 log log2 log10 log1p tanh erf erf_plus_one erfc sin cos tan asin acos atan sinh cosh asinh "
             "atanh sigmoid rsqrt sqrt reciprocal").split() + binary
    def one(name, length):
        i, b = variables("i", length), Body()
        operands = [b.load(operand, i[0].expr, dtype) for operand in ("xy" if name in binary else "x")]
        b.store("z", i[0].expr, getattr(b, name)(*operands))
        given = {"x": x[:length], "y": y[:length]} if name in binary else {"x": x[:length]}
        return emit_cpp(kernel(i, (), [(i, (), b)], given, {"z": x[:length]}))

    lengths = (221, 7, 3, 1)
    compiled = dict(zip(itertools.product(names, lengths), load_cpp([one(name, length) for name in names for length in lengths])))
    for name in names:
        found = []
        for length in lengths:
            z = torch.full_like(x, math.nan)
            for piece in (slice(start, start + length) for start in range(0, 210 if length < 221 else 1, length)):
                compiled[name, length](x[piece], *[y[piece]] * (name in binary), z[piece])
            found.append(z[:210])
        assert all(torch.equal(found[0], z) for z in found), name


def test_exponentials_round_without_a_conversion():
    """By an addition, whose last bits are the integer: a conversion and a rounding are four instructions of a tanh's thirty."""
    i, b = variables("i", 1024), Body()
    v = b.load("x", i[0].expr, F32)
    for name in ("exp", "tanh", "sigmoid", "exp2"):
        b.store(name, i[0].expr, getattr(b, name)(v))
    x = torch.empty(1024)
    source = emit_cpp(kernel(i, (), [(i, (), b)], {"x": x}, dict.fromkeys(("exp", "tanh", "sigmoid", "exp2"), x)))
    text = build._file_text([(source.name, source.code, source)])
    command = [build.compiler(), *(f for f in build._flags() if f != "-shared"), "-S", "-x", "c++", "-", "-o", "-"]
    assembly = subprocess.run(command, input=text, text=True, capture_output=True, check=True).stdout
    assert not re.search(r"cvtt?ps2dq|roundps|rndscaleps", assembly)


def test_one_plus_erf_is_one_function():
    """As exact as the sum where the sum is, more exact left of zero, and 0 without a remainder far out."""
    x = torch.cat([torch.linspace(-10, 10, 20001), SPECIAL, torch.tensor([-9.0, -1e30, -math.inf])])
    i, b = variables("i", x.numel()), Body()
    v, out = b.load("x", i[0].expr, F32), torch.empty_like(x)
    b.store("y", i[0].expr, b.add(b.erf(v), b.emit("constant", 1.0, dtype=F32)))
    source = run(kernel(i, (), [(i, (), b)], {"x": x}, {"y": out}), {"x": x}, {"y": out})
    assert "= mc_erf_plus_one(" in source.code and "= mc_erf(" not in source.code
    torch.testing.assert_close(out, (1 + torch.erf(x.double())).float(), rtol=0, atol=2.5e-7, equal_nan=True)
    left = (x < -1) & (x > -4)
    torch.testing.assert_close(out[left], torch.erfc(-x[left].double()).float(), rtol=5e-4, atol=0)
    assert out[-3:].tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_conversions_are_exact(dtype):
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    floats = torch.cat([torch.randint(-2**31, 2**31 - 1, (200_000,), dtype=torch.int32).view(F32),
                        torch.randn(10_000) * 1e-6, SPECIAL,
                        torch.tensor([65504.0, 65519.9, 65520.0, 2.0**-24, 2.0**-25, 2.0**-25 * 1.001])])
    i, j = variables("i", every.numel()), variables("i", floats.numel())
    wide, narrow = torch.empty(every.numel()), torch.empty(floats.numel(), dtype=dtype)
    b = Body()
    b.store("y", i[0].expr, b.load("x", i[0].expr, dtype))
    run(kernel(i, (), [(i, (), b)], {"x": every}, {"y": wide}), {"x": every}, {"y": wide})
    torch.testing.assert_close(wide, every.float(), rtol=0, atol=0, equal_nan=True)
    b = Body()
    b.store("y", j[0].expr, b.load("x", j[0].expr, F32))
    run(kernel(j, (), [(j, (), b)], {"x": floats}, {"y": narrow}), {"x": floats}, {"y": narrow})
    torch.testing.assert_close(narrow, floats.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_products_are_not_contracted_into_fused_multiply_add():
    a, y = torch.randn(1000), torch.empty(1000)
    c = torch.randn(1000)
    p = a * c
    i = variables("i", 1000)
    b = Body()
    b.store("y", i[0].expr, b.sub(b.mul(b.load("a", i[0].expr, F32), b.load("c", i[0].expr, F32)),
                                  b.load("p", i[0].expr, F32)))
    run(kernel(i, (), [(i, (), b)], {"a": a, "c": c, "p": p}, {"y": y}), {"a": a, "c": c, "p": p},
        {"y": y})
    assert torch.equal(y, torch.zeros(1000))


def test_reduction_over_one_element_beside_a_real_one():
    x, z = torch.randn(6, 50), torch.tensor([0.5, -2.0, math.inf, -math.inf, math.nan, 0.0])
    i, r = variables("i", 6), variables("r", 50)
    a, b, outputs = Body(), Body(), {}

    def out(body, name, value, dtype=F32):
        body.store(name, i[0].expr, value)
        outputs[name] = torch.empty(6, dtype=dtype)
    out(a, "sum", a.reduce("sum", a.load("x", flat(i + r, (50, 1)), F32)))
    v = b.load("z", i[0].expr, F32)
    out(b, "max", b.reduce("max", v))
    out(b, "argmax", b.reduce("argmax", v, 0, dtype=torch.int64), torch.int64)
    s = b.reduce("welford", v)
    for j in range(3):
        out(b, f"welford{j}", b.emit("get", s, j, dtype=F32))
    k = kernel(i, r, [(i, r, a), (i, (), b)], {"x": x, "z": z}, outputs)
    run(k, {"x": x, "z": z}, outputs)
    torch.testing.assert_close(outputs["sum"], x.sum(1))
    torch.testing.assert_close(outputs["max"], z, equal_nan=True)
    assert outputs["argmax"].tolist() == [0] * 6 and outputs["welford2"].tolist() == [1] * 6
    assert outputs["welford1"][:2].tolist() == [0, 0]
