"""Reduction kernels, persistent and looped, under Triton's interpreter against eager."""
import math
import os

import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="run by test_interpreter in a process of its own")

import minicompile
from minicompile.ch09_triton.emit import emit_triton
from minicompile.ch09_triton.heuristics import Config
from minicompile.ch09_triton.launch import load_triton

from .helpers import Body, buffer, kernel, sym

FORMS = [Config({"x": 2, "r": 64}, 4, persistent=True), Config({"x": 2, "r": 16}, 4)]
forms = pytest.mark.parametrize("form", FORMS, ids=["persistent", "looped"])
ROWS, COLUMNS = 5, 45


def run(k, form, *args):
    source = emit_triton(k, form)
    load_triton([source])[0](*args)
    return source


def row_kernel(kind, dtype, out_dtype, column_major=False, index=False):
    i, r = sym("i0", ROWS), sym("r0", COLUMNS)
    b = Body()
    at = r.expr * ROWS + i.expr if column_major else i.expr * COLUMNS + r.expr
    x = b.load("in0", at, dtype=dtype)
    value = b.emit("reduce", kind, x, r.expr if index else None, dtype=out_dtype)
    b.store("out0", i.expr, value)
    shape = (COLUMNS, ROWS) if column_major else (ROWS, COLUMNS)
    return kernel([b.loop((i,), (r,))], [buffer("in0", shape, dtype), buffer("out0", (ROWS,), out_dtype)],
                  ["in0"], ["out0"], (i,), (r,))


@forms
@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("kind", ["sum", "prod", "max", "min"])
def test_float(kind, form, column_major):
    x = torch.randn(ROWS, COLUMNS)
    if kind in ("max", "min"):
        x[1, 7] = float("nan")
        x[2] = float("-inf")
    out = torch.empty(ROWS)
    run(row_kernel(kind, torch.float32, torch.float32, column_major), form, x.t().contiguous() if column_major else x, out)
    expected = {"sum": x.sum(1), "prod": x.prod(1), "max": x.amax(1), "min": x.amin(1)}[kind]
    torch.testing.assert_close(out, expected, equal_nan=True)


@forms
@pytest.mark.parametrize("kind", ["argmax", "argmin"])
def test_arg_takes_first_index_and_nan(kind, form):
    x = torch.randint(-3, 4, (ROWS, COLUMNS)).float()
    x[1, 7] = x[1, 30] = float("nan")
    x[2] = float("-inf")
    x[3] = float("inf")
    out = torch.empty(ROWS, dtype=torch.int64)
    run(row_kernel(kind, torch.float32, torch.int64, index=True), form, x, out)
    best = x.amax(1, keepdim=True) if kind == "argmax" else x.amin(1, keepdim=True)
    first = ((x == best) | (x.isnan() & best.isnan())).int().argmax(1)
    assert out.tolist() == first.tolist() and out[1] == 7 and out[2] == out[3] == 0


@forms
def test_integers_and_bools(form):
    x = torch.randint(-50, 50, (ROWS, COLUMNS))
    out = torch.empty(ROWS, dtype=torch.int64)
    run(row_kernel("sum", torch.int64, torch.int64), form, x, out)
    assert out.tolist() == x.sum(1).tolist()
    run(row_kernel("max", torch.int64, torch.int64), form, x, out)
    assert out.tolist() == x.amax(1).tolist()
    m = torch.zeros(ROWS, COLUMNS, dtype=torch.bool)
    m[1, 44] = True
    m[2] = True
    flags = torch.empty(ROWS, dtype=torch.bool)
    run(row_kernel("any", torch.bool, torch.bool), form, m, flags)
    assert flags.tolist() == m.any(1).tolist()


def layer_norm_kernel(dtype, columns=COLUMNS):
    """Statistics, then the normalised row: two loops, the second reads the row again."""
    i, r = sym("i0", ROWS), sym("r0", columns)
    at = i.expr * columns + r.expr
    first = Body()
    stats = first.emit("reduce", "welford", first.load("in0", at, dtype=dtype), None, dtype=torch.float32)
    variance = first.truediv(first.emit("get", stats, 1), first.emit("get", stats, 2))
    first.store("tmp0", i.expr, first.emit("get", stats, 0))
    first.store("out1", i.expr, first.rsqrt(first.add(variance, first.constant(1e-5))))
    second = Body()
    centred = second.sub(second.load("in0", at, dtype=dtype), second.load("tmp0", i.expr))
    second.store("out0", at, second.mul(second.mul(centred, second.load("out1", i.expr)), second.load("in1", r.expr)))
    buffers = [buffer("in0", (ROWS, columns), dtype), buffer("in1", (columns,)), buffer("tmp0", (ROWS,)),
               buffer("out0", (ROWS, columns), dtype), buffer("out1", (ROWS,))]
    return kernel([first.loop((i,), (r,)), second.loop((i, r))], buffers, ["in0", "in1"], ["out0", "out1"], (i,), (r,), local=["tmp0"])


@forms
def test_equal_halves_have_no_variance(form):
    n = 41                                          # times its inverse it is not 1
    x, w = torch.linspace(1, 2, ROWS)[:, None].bfloat16().expand(ROWS, n).contiguous(), torch.ones(n)
    out, rstd = torch.empty(ROWS, n, dtype=torch.bfloat16), torch.empty(ROWS)
    run(layer_norm_kernel(torch.bfloat16, n), form, x, w, out, rstd)
    assert not out.any() and rstd.unique().numel() == 1


@forms
def test_layer_norm(form):
    x, w = torch.randn(ROWS, COLUMNS) * 3 + 50, torch.randn(COLUMNS)
    out, rstd = torch.empty(ROWS, COLUMNS), torch.empty(ROWS)
    source = run(layer_norm_kernel(torch.float32), form, x, w, out, rstd)
    torch.testing.assert_close(out, torch.nn.functional.layer_norm(x, (COLUMNS,), w), rtol=1e-4, atol=1e-4)
    assert source.code.count("for roffset") == (0 if form.persistent else 2)
    assert source.code.count("tl.load(in0") == (1 if form.persistent else 2)


@forms
@pytest.mark.parametrize("special", [0.0, float("-inf"), float("nan"), float("inf")])
def test_softmax(form, special):
    i, r = sym("i0", ROWS), sym("r0", COLUMNS)
    at = i.expr * COLUMNS + r.expr
    a, b, c = Body(), Body(), Body()
    a.store("tmp0", i.expr, a.emit("reduce", "max", a.load("in0", at), None))
    b.store("tmp1", i.expr, b.emit("reduce", "sum", b.exp(b.sub(b.load("in0", at), b.load("tmp0", i.expr))), None))
    e = c.exp(c.sub(c.load("in0", at), c.load("tmp0", i.expr)))
    c.store("out0", at, c.truediv(e, c.load("tmp1", i.expr)))
    buffers = [buffer("in0", (ROWS, COLUMNS)), buffer("tmp0", (ROWS,)), buffer("tmp1", (ROWS,)), buffer("out0", (ROWS, COLUMNS))]
    k = kernel([a.loop((i,), (r,)), b.loop((i,), (r,)), c.loop((i, r))], buffers, ["in0"], ["out0"], (i,), (r,), local=["tmp0", "tmp1"])
    x, out = torch.randn(ROWS, COLUMNS) * 4, torch.empty(ROWS, COLUMNS)
    x[1, 3:9] = special
    x[2] = special
    x[3, :20] = float("-inf")
    source = run(k, form, x, out)
    torch.testing.assert_close(out, x.softmax(1), equal_nan=True, rtol=1e-5, atol=1e-6)
    assert source.code.count("for roffset") == (0 if form.persistent else 2)


@forms
def test_maximum_and_sum_of_exponentials_join_into_one_pass(form):
    i, r = sym("i0", ROWS), sym("r0", COLUMNS)
    at = i.expr * COLUMNS + r.expr
    a, b = Body(), Body()
    a.store("out0", i.expr, a.emit("reduce", "max", a.load("in0", at), None))
    e = b.exp(b.sub(b.load("in0", at), b.load("out0", i.expr)))
    b.store("out1", i.expr, b.add(b.emit("reduce", "sum", e, None), b.load("out0", i.expr)))
    k = kernel([a.loop((i,), (r,)), b.loop((i,), (r,))], [buffer("in0", (ROWS, COLUMNS)), buffer("out0", (ROWS,)), buffer("out1", (ROWS,))],
               ["in0"], ["out0", "out1"], (i,), (r,))
    x, top, total = torch.randn(ROWS, COLUMNS) * 9, torch.empty(ROWS), torch.empty(ROWS)
    source = run(k, form, x, top, total)
    torch.testing.assert_close(top, x.amax(1))
    torch.testing.assert_close(total, (x - top[:, None]).exp().sum(1) + top)
    assert source.code.count("for roffset") == (0 if form.persistent else 1)


def test_symbolic_row_is_never_persistent():
    s = sym("s0", None)
    i, r = sym("i0", ROWS), sym("r0", s.expr)
    b = Body()
    stats = b.emit("reduce", "welford", b.load("in0", i.expr * s.expr + r.expr), None)
    for k in range(3):
        b.store(f"out{k}", i.expr, b.emit("get", stats, k))
    out = [buffer(f"out{k}", (ROWS,)) for k in range(3)]
    k = kernel([b.loop((i,), (r,))], [buffer("in0", (ROWS, s.expr)), *out], ["in0"], ["out0", "out1", "out2"], (i,), (r,), symbols=(s,))
    for columns in (3, 1500):
        x, (mean, m2, n) = torch.randn(ROWS, columns) + 7, torch.empty(3, ROWS)
        source = run(k, None, x, mean, m2, n, columns)
        torch.testing.assert_close(mean, x.mean(1))
        torch.testing.assert_close(m2, x.var(1, correction=0) * columns, rtol=1e-4, atol=1e-4)
        assert n.tolist() == [columns] * ROWS
    assert "for roffset" in source.code


@forms
def test_in_place_update_is_stored_after_the_last_read(form):
    """x -= mean(x) * sum((x - mean)^2): three passes when looped; x is written in the last one only."""
    i, r = sym("i0", ROWS), sym("r0", COLUMNS)
    at = i.expr * COLUMNS + r.expr
    a, b, c = Body(), Body(), Body()
    a.store("tmp0", i.expr, a.mul(a.emit("reduce", "sum", a.load("in0", at), None), a.constant(1 / COLUMNS)))
    d = b.sub(b.load("in0", at), b.load("tmp0", i.expr))
    b.store("tmp1", at, d)
    e = Body()
    f = e.load("tmp1", at)
    e.store("tmp2", i.expr, e.emit("reduce", "sum", e.mul(f, f), None))
    c.store("out0", at, c.mul(c.load("tmp1", at), c.load("tmp2", i.expr)))
    buffers = [buffer("in0", (ROWS, COLUMNS)), buffer("tmp0", (ROWS,)), buffer("tmp1", (ROWS, COLUMNS)), buffer("tmp2", (ROWS,)),
               buffer("out0", (ROWS, COLUMNS), alias_of="in0")]
    loops = [a.loop((i,), (r,)), b.loop((i, r)), e.loop((i,), (r,)), c.loop((i, r))]
    k = kernel(loops, buffers, ["in0"], ["out0"], (i,), (r,), local=["tmp0", "tmp1", "tmp2"])
    x = torch.randn(ROWS, COLUMNS)
    centred = x - x.mean(1, keepdim=True)
    expected = centred * (centred**2).sum(1, keepdim=True)
    run(k, form, x, x)
    torch.testing.assert_close(x, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows, columns, inner, batch", [(1, 3000, True, False), (300, 8, True, False), (3, 700, False, False),
                                                         (33_800, 20, False, True)])
def test_default_configurations(rows, columns, inner, batch):
    i, r = sym("i0", rows), sym("r0", columns)
    b = Body()
    b.store("out0", i.expr, b.emit("reduce", "sum", b.load("in0", i.expr * columns + r.expr if inner else r.expr * rows + i.expr), None))
    k = kernel([b.loop((i,), (r,))], [buffer("in0", (rows * columns,)), buffer("out0", (rows,))], ["in0"], ["out0"], (i,), (r,))
    x, out = torch.randn(rows, columns), torch.empty(rows)
    source = run(k, None, x if inner else x.t().contiguous(), out)
    torch.testing.assert_close(out, x.sum(1), rtol=1e-5, atol=1e-4)
    assert not batch or math.prod(source.options["constants"].values()) == 1024 and source.options["num_warps"] == 2


def test_reduction_over_two_variables_of_a_constant_and_of_an_index():
    i, r, s = sym("i0", 4), sym("r0", 3), sym("r1", 10)
    b = Body()
    x = b.load("in0", r.expr * 40 + i.expr * 10 + s.expr)
    b.store("out0", i.expr, b.emit("reduce", "sum", x, None))
    b.store("out1", i.expr, b.emit("reduce", "sum", b.constant(2.0), None))
    b.store("out2", i.expr, b.emit("reduce", "sum", b.emit("index", s.expr, dtype=torch.int64), None, dtype=torch.int64))
    k = kernel([b.loop((i,), (r, s))], [buffer("in0", (3, 4, 10)), buffer("out0", (4,)), buffer("out1", (4,)),
                                        buffer("out2", (4,), torch.int64)], ["in0"], ["out0", "out1", "out2"], (i,), (r, s))
    x, out, two, index = torch.randn(3, 4, 10), torch.empty(4), torch.empty(4), torch.empty(4, dtype=torch.int64)
    for form in FORMS:
        run(k, form, x, out, two, index)
        torch.testing.assert_close(out, x.sum((0, 2)))
        assert two.tolist() == [60.0] * 4 and index.tolist() == [135] * 4


def test_a_result_does_not_take_over_memory_that_a_later_walk_reads():
    """What is written last in the program may be stored in an early walk along the row; `x` is of no further use, and read in each."""
    def f(x):
        y = x.sin()
        z = y.unfold(1, 5, 1).amax(-1)
        z.add_(z.sum())
        return z - z.sum(), z, 1 * z

    for rows in 7, 300:
        x = torch.randn(rows, 5)
        torch.testing.assert_close(minicompile.compile(f, backend="triton", dynamic=True)(x), f(x), rtol=1e-4, atol=1e-4)


def test_nothing_is_written_over_what_a_later_walk_reads(monkeypatch):
    """A row whose length varies is walked along. A sum over a dim of size 1 alone is known in the first walk, and may be written there."""
    def function(x):
        y = torch._neg_view(x * 2) + x.sum()
        return -y - y.sum(), (1 - y).nanmean(-1), y
    x = torch.arange(4.0).view(1, 4, 1, 1)
    with minicompile.config.patch(check_passes=True, raise_on_internal_error=True):
        got = minicompile.compile(function, backend="triton", dynamic=True)(x)
        for a, b in zip(got, function(x), strict=True):
            torch.testing.assert_close(a, b)
        monkeypatch.setattr("minicompile.ch08_fusion.memory.overwrites_safely", lambda *args: True)
        with pytest.raises(AssertionError, match="over"):
            minicompile.compile(lambda x: function(x), backend="triton", dynamic=True)(x)
