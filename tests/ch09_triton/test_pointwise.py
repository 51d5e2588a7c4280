"""Pointwise kernels under Triton's interpreter against eager."""
import math
import os

import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="run by test_interpreter in a process of its own")

from minicompile.ch09_triton.emit import emit_triton
from minicompile.ch09_triton.launch import load_triton

from .helpers import Body, buffer, kernel, sym


def run(k, *args):
    source = emit_triton(k)
    load_triton([source])[0](*args)
    return source


def elementwise(fn, inputs, out, ops=None):
    """A kernel that applies `fn(body, *loaded)` to equally shaped inputs."""
    n = out.numel()
    i = sym("i0", n)
    b = Body()
    loaded = [b.load(f"in{k}", i.expr, dtype=t.dtype) for k, t in enumerate(inputs)]
    b.store("out0", i.expr, fn(b, *loaded))
    buffers = [buffer(f"in{k}", (n,), t.dtype) for k, t in enumerate(inputs)] + [buffer("out0", (n,), out.dtype)]
    return kernel([b.loop((i,))], buffers, [f"in{k}" for k in range(len(inputs))], ["out0"], (i,))


def check(fn, expected, *inputs, tolerance=2e-6):
    out = torch.empty_like(expected).fill_(1)
    run(elementwise(fn, inputs, out), *inputs, out)
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_chain_in_bf16_rounds_once_at_the_end():
    x, y = torch.randn(300).bfloat16(), torch.randn(300).bfloat16()
    expected = (torch.exp(x.float()) * y.float() + 1).bfloat16()
    check(lambda b, x, y: b.add(b.mul(b.exp(x), y), b.constant(1.0, dtype=torch.float32)), expected, x, y,
          tolerance=4e-3)       # one rounding


UNARY = ["exp", "exp2", "expm1", "log1p", "sin", "cos", "tan", "tanh", "atan", "sinh", "cosh", "asinh", "erf", "erfc",
         "sigmoid", "floor", "ceil", "trunc", "round", "sign", "abs", "neg", "digamma", "lgamma"]


@pytest.mark.parametrize("op", UNARY)
def test_unary(op):
    x = torch.randn(64) * 3
    x[:6] = torch.tensor([0.0, -0.0, 0.5, 2.5, -1.5, 4.0])
    expected = {"sigmoid": torch.sigmoid, "erf": torch.erf}.get(op, getattr(torch, op, None))(x)
    check(lambda b, x: getattr(b, op)(x), expected, x, tolerance=3e-5 if op == "digamma" else 3e-6)


def test_tanh_has_no_branch_and_keeps_its_digits():
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.linspace(-1, 1, 2001) ** 5,
                   torch.tensor([math.nan, math.inf, -math.inf, -1e30, 1e-30, 0.0, -0.0, 0.6, -0.6])])
    out, expected = torch.empty_like(x), torch.tanh(x.double()).float()
    source = run(elementwise(lambda b, x: b.tanh(x), [x], out), x, out)
    torch.testing.assert_close(out, expected, rtol=4e-7, atol=0, equal_nan=True)
    assert torch.equal(out.signbit(), expected.signbit()) and "libdevice.tanh" not in source.code


def test_one_plus_erf_is_one_function():
    x = torch.cat([torch.linspace(-10, 10, 2001), torch.tensor([math.nan, math.inf, -math.inf, -1e30, 0.0])])
    out = torch.empty_like(x)
    made = elementwise(lambda b, x: b.add(b.constant(1.0, dtype=torch.float32), b.erf(x)), (x,), out)
    assert "erf_plus_one(" in emit_triton(made).code and "tl.erf" not in emit_triton(made).code
    run(made, x, out)
    torch.testing.assert_close(out, (1 + torch.erf(x.double())).float(), rtol=0, atol=2.5e-7, equal_nan=True)
    left = (x < -1) & (x > -4)
    torch.testing.assert_close(out[left], torch.erfc(-x[left].double()).float(), rtol=5e-4, atol=0)
    assert out[-3:-1].tolist() == [0, 0]


@pytest.mark.parametrize("op", ["exp2", "rsqrt", "tanh"])
def test_what_is_one_instruction_needs_no_library(op):
    """To link libdevice takes as long as to compile a small kernel."""
    x = torch.tensor([0.3, 4.0, math.inf, math.nan])
    out = torch.empty_like(x)
    source = run(elementwise(lambda b, x: getattr(b, op)(x), [x], out), x, out)
    torch.testing.assert_close(out, getattr(torch, op)(x), equal_nan=True)
    body = source.code.split("@triton.jit", 1)[1]
    assert "inline_asm" in body and not any(word in body for word in ("libdevice", "tl.exp2", "tl.rsqrt"))


@pytest.mark.parametrize("op", ["log", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "acosh"])
def test_unary_positive(op):
    x = torch.rand(64) * 5 + 1
    check(lambda b, x: getattr(b, op)(x), getattr(torch, op)(x), x)


@pytest.mark.parametrize("op, reference", [
    ("floordiv", torch.floor_divide), ("remainder", torch.remainder), ("fmod", torch.fmod), ("pow", torch.pow),
    ("maximum", torch.maximum), ("minimum", torch.minimum), ("atan2", torch.atan2),
    ("truncdiv", lambda a, b: torch.div(a, b, rounding_mode="trunc")), ("truediv", torch.true_divide)])
def test_binary_float(op, reference):
    a = torch.tensor([7.0, -7.0, 7.5, -7.5, 0.0, float("nan"), 3.0, -0.0, 6.0])
    b = torch.tensor([2.0, 2.0, -2.5, -2.0, 3.0, 1.0, float("nan"), 5.0, 3.0])
    check(lambda w, x, y: getattr(w, op)(x, y), reference(a, b), a, b)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("op, reference", [
    ("floordiv", torch.floor_divide), ("remainder", torch.remainder), ("fmod", torch.fmod),
    ("truncdiv", lambda a, b: torch.div(a, b, rounding_mode="trunc")), ("pow", lambda a, b: torch.pow(a, b.abs())),
    ("maximum", torch.maximum), ("bitwise_xor", torch.bitwise_xor)])
def test_binary_int(op, reference, dtype):
    a = torch.tensor([7, -7, 7, -7, 0, 1, -1, 13], dtype=dtype)
    b = torch.tensor([2, 2, -2, -3, 3, 7, 5, 4], dtype=dtype)
    rhs = b.abs() if op == "pow" else b
    check(lambda w, x, y: getattr(w, op)(x, y), reference(a, b), a, rhs)


def test_bool_and_conversions():
    x, m = torch.tensor([1.7, -2.3, 0.0, 300.0, -1.0]), torch.tensor([True, False, True, True, False])
    check(lambda b, x, m: b.to_dtype(b.logical_and(b.to_dtype(x, dtype=torch.bool), m), dtype=torch.bool),
          (x != 0) & m, x, m)
    check(lambda b, x, m: b.to_dtype(x, dtype=torch.int32), x.to(torch.int32), x, m)
    check(lambda b, x, m: b.where(m, x, b.constant(0.0, dtype=torch.float32)), torch.where(m, x, 0.0), x, m)
    check(lambda b, x, m: b.to_dtype(m, dtype=torch.int64), m.long(), x, m)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_a_constant_keeps_the_sign_of_zero(monkeypatch, dtype):
    from triton.language.semantic import TritonSemantic
    made = TritonSemantic.scalar_constant           # that of Triton 3.6 has one zero
    monkeypatch.setattr(TritonSemantic, "scalar_constant", lambda self, value, dtype: made(self, value if value else 0.0, dtype))
    x, signs = torch.tensor([1.0, -0.0, 0.0], dtype=dtype), torch.tensor([1, 1, -1], dtype=dtype)
    is_large = lambda b, x: b.gt(x, b.constant(0.5, dtype=dtype), dtype=torch.bool)
    for fn, expected in ((lambda b, x, zero: zero, -torch.zeros_like(x)), (lambda b, x, zero: b.add(x, zero), x),
                         (lambda b, x, zero: b.where(is_large(b, x), x, zero), x * signs)):
        out = torch.empty_like(expected)
        run(elementwise(lambda b, x: fn(b, x, b.constant(-0.0, dtype=dtype)), (x,), out), x, out)
        assert str(out) == str(expected)


def test_double_constants_keep_their_bits():
    x = torch.randn(10, dtype=torch.float64)
    check(lambda b, x: b.add(x, b.constant(0.1, dtype=torch.float64)), x + 0.1, x, tolerance=1e-15)


def test_transpose_is_tiled():
    a, c = 96, 72
    i, j = sym("i0", a), sym("i1", c)
    b = Body()
    x = b.load("in0", j.expr * a + i.expr)
    y = b.load("in1", i.expr * c + j.expr)
    z = b.load("in2", j.expr)
    b.store("out0", i.expr * c + j.expr, b.add(b.add(x, y), z))
    k = kernel([b.loop((i, j))], [buffer("in0", (c, a)), buffer("in1", (a, c)), buffer("in2", (c,)), buffer("out0", (a, c))],
               ["in0", "in1", "in2"], ["out0"], (i, j))
    x, y, z, out = torch.randn(c, a), torch.randn(a, c), torch.randn(c), torch.empty(a, c)
    source = run(k, x, y, z, out)
    assert "YBLOCK" in source.options["constants"]
    torch.testing.assert_close(out, x.t() + y + z)


def test_fused_loops_forward_values_and_skip_local_stores():
    n = 200
    i = sym("i0", n)
    first, second = Body(), Body()
    first.store("tmp0", i.expr, first.exp(first.load("in0", i.expr)))
    second.store("out0", i.expr, second.mul(second.load("tmp0", i.expr), second.load("in0", i.expr)))
    k = kernel([first.loop((i,)), second.loop((i,))], [buffer("in0", (n,)), buffer("tmp0", (n,)), buffer("out0", (n,))],
               ["in0"], ["out0"], (i,), local=["tmp0"])
    x, out = torch.randn(n), torch.empty(n)
    source = run(k, x, out)
    assert source.code.count("tl.load") == 1 and source.code.count("tl.store") == 1
    torch.testing.assert_close(out, x.exp() * x)


def test_gather_with_mask_and_indirect_index():
    rows, columns, vocabulary = 6, 40, 17
    i, j = sym("i0", rows), sym("i1", columns)
    b = Body()
    index = b.load("in0", i.expr, dtype=torch.int64)
    keep = b.lt(b.index(j.expr, dtype=torch.int64), b.constant(30, dtype=torch.int64), dtype=torch.bool)
    at = b.indirect(index, vocabulary)
    b.store("out0", i.expr * columns + j.expr, b.load("in1", at.expr * columns + j.expr, keep))
    k = kernel([b.loop((i, j))], [buffer("in0", (rows,), torch.int64), buffer("in1", (vocabulary, columns)),
                                  buffer("out0", (rows, columns))],
               ["in0", "in1"], ["out0"], (i, j))
    index, table, out = torch.randint(0, vocabulary, (rows,)), torch.randn(vocabulary, columns), torch.empty(rows, columns)
    run(k, index, table, out)
    expected = table[index]
    expected[:, 30:] = 0
    torch.testing.assert_close(out, expected)


def test_a_number_in_memory_says_what_is_read_and_whether():
    """The pointer has to be a block, as the condition is."""
    b = Body()
    index = b.load("in0", 0, dtype=torch.int64)
    keep = b.lt(index, b.constant(3, dtype=torch.int64), dtype=torch.bool)
    b.store("out0", 0, b.load("in1", b.indirect(index, 5).expr, keep))
    k = kernel([b.loop(())], [buffer("in0", (), torch.int64), buffer("in1", (5,)), buffer("out0", ())], ["in0", "in1"], ["out0"], ())
    for at, expected in (2, 2.0), (4, 0.0):
        out = torch.empty(())
        run(k, torch.tensor(at), torch.arange(5.0), out)
        assert out.item() == expected


def test_scatter_add_is_atomic():
    n, rows = 50, 7
    i = sym("i0", n)
    b = Body()
    at = b.indirect(b.load("in0", i.expr, dtype=torch.int64), rows)
    b.store("out0", at.expr, b.load("in1", i.expr), "atomic_add")
    k = kernel([b.loop((i,))], [buffer("in0", (n,), torch.int64), buffer("in1", (n,)), buffer("out0", (rows,))],
               ["in0", "in1"], ["out0"], (i,))
    index, value, out = torch.randint(0, rows, (n,)), torch.randn(n), torch.zeros(rows)
    run(k, index, value, out)
    torch.testing.assert_close(out, torch.zeros(rows).index_add(0, index, value))


def test_a_number_is_added_at_many_places():
    n, rows = 50, 7
    i = sym("i0", n)
    b = Body()
    b.store("out0", b.indirect(b.load("in0", i.expr, dtype=torch.int64), rows).expr, b.constant(2.0), "atomic_add")
    k = kernel([b.loop((i,))], [buffer("in0", (n,), torch.int64), buffer("out0", (rows,))], ["in0"], ["out0"], (i,))
    index, out = torch.randint(0, rows, (n,)), torch.zeros(rows)
    run(k, index, out)
    assert torch.equal(out, 2 * index.bincount(minlength=rows))


def additions_of_rows(n, rows, columns):
    """out0[in0[i]] += in1[i], atomically, for n rows."""
    i, j = sym("i0", n), sym("i1", columns)
    b = Body()
    at = b.indirect(b.load("in0", i.expr, dtype=torch.int64), rows)
    b.store("out0", at.expr * columns + j.expr, b.load("in1", i.expr * columns + j.expr), "atomic_add")
    return kernel([b.loop((i, j))], [buffer("in0", (n,), torch.int64), buffer("in1", (n, columns)), buffer("out0", (rows, columns))],
                  ["in0", "in1"], ["out0"], (i, j))


@pytest.mark.parametrize("odd", [False, True], ids=["finite", "infinite"])
def test_rows_that_go_to_one_place_are_added_up_in_the_tile(odd):
    n, rows, columns = 8192, 50, 128
    k = additions_of_rows(n, rows, columns)
    generator = torch.Generator().manual_seed(0)
    index, value = torch.randint(0, rows, (n,), generator=generator), torch.randn(n, columns, generator=generator)
    index[n // 2:] = 7                                              # padding
    value *= torch.tensor([1e-6, 1.0, 1e4, 1e30]).repeat(columns // 4)
    if odd:
        value[5], value[600, 3] = float("inf"), float("nan")
    out, expected = torch.ones(rows, columns), torch.ones(rows, columns, dtype=torch.float64).index_add(0, index, value.double())
    source = run(k, index, value, out)
    assert "add_rows(" in source.code and source.options["constants"] == {"YBLOCK": 64, "XBLOCK": 64}
    amount = torch.ones(rows, columns, dtype=torch.float64).index_add(0, index, value.double().abs())
    same = (out.double() - expected).abs() <= 1e-6 * amount
    assert torch.equal(out.isnan(), expected.isnan()) and torch.equal(out.isinf(), expected.isinf())
    assert bool((same | ~expected.isfinite()).all()) and int(expected.isfinite().sum()) >= expected.numel() - 2 * columns


@pytest.mark.parametrize("n, rows, columns", [(8190, 50, 128), (8192, 2000, 128), (8192, 50, 129)],
                         ids=["no full tiles", "a long table", "odd columns"])
def test_when_rows_are_not_added_up_in_the_tile(n, rows, columns):
    assert "add_rows(" not in emit_triton(additions_of_rows(n, rows, columns)).code


@pytest.mark.parametrize("columns", [1, 128])
def test_one_row_to_which_everything_goes(columns):
    i, j = sym("i0", 8192), sym("i1", columns)
    b = Body()
    at = b.indirect(b.load("in0", 0, dtype=torch.int64), 50)
    b.store("out0", at.expr * columns + j.expr, b.load("in1", i.expr * columns + j.expr), "atomic_add")
    k = kernel([b.loop((i, j))], [buffer("in0", (1,), torch.int64), buffer("in1", (8192, columns)), buffer("out0", (50, columns))],
               ["in0", "in1"], ["out0"], (i, j))
    index, value, out = torch.tensor([7]), torch.ones(8192, columns), torch.zeros(50, columns)
    run(k, index, value, out)
    torch.testing.assert_close(out, torch.zeros(50, columns).index_fill(0, index, 8192))


def test_symbolic_size():
    s = sym("s0", None)
    i, j = sym("i0", s.expr), sym("i1", 24)
    b = Body()
    b.store("out0", i.expr * 24 + j.expr, b.add(b.load("in0", i.expr * 24 + j.expr), b.load("in1", j.expr)))
    k = kernel([b.loop((i, j))], [buffer("in0", (s.expr, 24)), buffer("in1", (24,)), buffer("out0", (s.expr, 24))],
               ["in0", "in1"], ["out0"], (i, j), symbols=(s,))
    for rows in (3, 11):
        x, y, out = torch.randn(rows, 24), torch.randn(24), torch.empty(rows, 24)
        source = run(k, x, y, out, rows)
        torch.testing.assert_close(out, x + y)
    assert "in0, in1, out0, s0" in source.code


def test_zero_dimensional():
    b = Body()
    b.store("out0", 0, b.exp(b.load("in0", 0)))
    x, out = torch.randn(()), torch.empty(())
    run(kernel([b.loop(())], [buffer("in0", ()), buffer("out0", ())], ["in0"], ["out0"], ()), x, out)
    torch.testing.assert_close(out, x.exp())


def test_philox_is_cuda_eagers_generator():
    """Reference values: Random123's known answers for philox4x32-10 with counter and key zero, and all ones."""
    n = 8
    i = sym("i0", n)
    b = Body()
    seed, offset = b.load("in0", 0, dtype=torch.int64), b.load("in1", 0, dtype=torch.int64)
    b.store("out0", i.expr, b.emit("philox", seed, offset, i.expr, (4, 1), dtype=torch.float32))
    k = kernel([b.loop((i,))], [buffer("in0", (), torch.int64), buffer("in1", (), torch.int64), buffer("out0", (n,))],
               ["in0", "in1"], ["out0"], (i,))
    out = torch.empty(n)
    run(k, torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64), out)
    bits = torch.tensor([0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8], dtype=torch.float64)
    torch.testing.assert_close(out[:4].double(), bits / 2**32 + 2.0**-33, rtol=0, atol=1e-7)


@pytest.mark.parametrize("rows, columns, stride, layout, four", [
    (6, 8, 8, (4, 3), True), (6, 8, 12, (8, 3), True), (3, 12, 12, (16, 2), True), (5, 6, 6, (4, 3), False), (3, 12, 14, (8, 2), False)])
def test_four_neighbours_share_a_draw(rows, columns, stride, layout, four):
    from minicompile.ch07_loops.reference import philox_uniform
    i, j, b = sym("i0", rows), sym("i1", columns), Body()
    seed, offset = b.load("in0", 0, dtype=torch.int64), b.load("in1", 0, dtype=torch.int64)
    b.store("out0", columns * i.expr + j.expr, b.emit("philox", seed, offset, stride * i.expr + j.expr, layout, dtype=torch.float32))
    k = kernel([b.loop((i, j))], [buffer("in0", (), torch.int64), buffer("in1", (), torch.int64), buffer("out0", (rows * columns,))],
               ["in0", "in1"], ["out0"], (i, j))
    assert ("philox_four(" in emit_triton(k).code) == four
    out, start = torch.empty(rows * columns), (torch.tensor(-123456789012345), torch.tensor(2**34 + 88))
    run(k, *start, out)
    at = (stride * torch.arange(rows)[:, None] + torch.arange(columns)).flatten()
    assert torch.equal(out, philox_uniform(*start, at, layout))


def test_kernels_of_one_name_keep_their_own_text():
    def one(scale):
        i, b = sym("i0", 6), Body()
        b.store("out0", i.expr, b.mul(b.load("in0", i.expr), b.emit("constant", scale)))
        return emit_triton(kernel([b.loop((i,))], [buffer("in0", (6,)), buffer("out0", (6,))], ["in0"], ["out0"], (i,)))
    x, out = torch.arange(6.0), torch.empty(6)
    runs = [load_triton([one(scale)])[0] for scale in (2.0, 3.0)]
    for run, scale in zip(runs, (2.0, 3.0)):
        run(x, out)
        torch.testing.assert_close(out, x * scale)


def test_vectors_of_channels_are_computed_once_for_the_rows_of_a_tile():
    """What depends on the last variable only is a row of the tile, in a kernel of bf16 with two such vectors."""
    rows, channels = 8197, 128
    x, scale, shift = torch.randn(rows, channels).bfloat16(), torch.rand(channels), torch.randn(channels)
    i, j = sym("i0", rows), sym("i1", channels)
    b = Body()
    load = b.load("in0", i.expr * channels + j.expr, dtype=torch.bfloat16)
    b.store("out0", i.expr * channels + j.expr, b.add(b.mul(load, b.rsqrt(b.load("in1", j.expr))), b.load("in2", j.expr)))
    buffers = [buffer("in0", (rows, channels), torch.bfloat16), buffer("in1", (channels,)), buffer("in2", (channels,)),
               buffer("out0", (rows, channels), torch.bfloat16)]
    out = torch.full((rows, channels), math.nan, dtype=torch.bfloat16)
    source = run(kernel([b.loop((i, j))], buffers, ["in0", "in1", "in2"], ["out0"], (i, j)), x, scale, shift, out)
    torch.testing.assert_close(out.float(), x.float() * scale.rsqrt() + shift, rtol=4e-3, atol=4e-3)
    assert source.options["constants"]["XBLOCK"] == channels and "tl.load(in1 + (xindex))" in source.code


def test_sums_of_narrow_lists_get_enough_programs():
    from minicompile.ch09_triton.heuristics import MULTIPROCESSORS, unknown_row
    narrow, wide = unknown_row(False, 4992), unknown_row(False, 1 << 20)
    assert 4992 // narrow.blocks["x"] >= 2 * MULTIPROCESSORS and wide.blocks["x"] == 64
    assert narrow.blocks["x"] * narrow.blocks["r"] == wide.blocks["x"] * wide.blocks["r"] == 2048
    assert unknown_row(True, 1).blocks == {"x": 1, "r": 1024}


@pytest.mark.parametrize("channels, vectors, split", [(128, 2, True), (96, 2, True), (96, 1, False), (100, 2, False), (16, 2, False)])
def test_when_rows_and_columns_are_worth_it(channels, vectors, split):
    from minicompile.ch09_triton.tiling import Axis, rows_and_columns
    i, j = sym("i0", 1 << 20), sym("i1", channels)
    axes = rows_and_columns([Axis("x", (i, j), 0, 1)], [i.expr * channels + j.expr] + [j.expr] * vectors)
    assert [a.vars for a in axes] == ([(i,), (j,)] if split else [(i, j)])
