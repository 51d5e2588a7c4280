"""Linking a kernel's loops into one graph of values, and what both code generators make of it."""
import pytest
import torch
from ch07_loops.helpers import program_of
from ch09_triton.helpers import Body, buffer, kernel, sym

import minicompile
from minicompile.ch08_fusion.fuse import fuse
from minicompile.ch08_fusion.kernel import Kernel
from minicompile.ch08_fusion.values import elements, link
from minicompile.ch09_triton.emit import emit_triton
from minicompile.ch09_triton.passes import with_online_softmax
from minicompile.ch10_cpp.emit import emit_cpp
from minicompile.ch11_runtime.host import compile_schedule
from minicompile.errors import Unsupported

N = 12
I, R = sym("i0", N), sym("r0", 8)


def pointwise(*bodies, local=(), outputs=("out0",), dtype=torch.float32):
    names = {v.buffer for b in bodies for v in [*b.known.values(), *b.stores] if v.op in ("load", "store")}
    return kernel([b.loop((I,)) for b in bodies], [buffer(n, (N,), dtype) for n in sorted(names)], ["in0"], outputs, (I,), local=local)


def ops(graph):
    return [s.op for s in graph.steps]


def test_values_pass_through_local_buffers_and_equal_loads_are_one():
    a, b = Body(), Body()
    a.store("tmp0", I.expr, a.exp(a.load("in0", I.expr)))
    b.sin(b.load("in0", I.expr))                                  # nobody needs it
    b.store("out0", I.expr, b.mul(b.load("tmp0", I.expr), b.load("in0", I.expr)))
    g = link(pointwise(a, b, local=["tmp0"]))
    assert ops(g) == ["load", "exp", "mul", "store"]
    assert all(v.dims == {I} and v.phase == 0 for v in g.values)


def test_constants_that_compare_equal_stay_apart():
    a = Body()
    zero, minus = a.constant(0.0, dtype=torch.float32), a.constant(-0.0, dtype=torch.float32)
    a.store("out0", I.expr, a.atan2(a.add(a.load("in0", I.expr), zero), minus))
    assert [repr(v.constant) for v in link(pointwise(a)).values if v.op == "constant"] == ["0.0", "-0.0"]


def test_a_read_at_another_index_is_refused():
    a, b = Body(), Body()
    a.store("tmp0", I.expr, a.exp(a.load("in0", I.expr)))
    b.store("out0", I.expr, b.load("tmp0", N - 1 - I.expr))
    with pytest.raises(Unsupported, match="reads tmp0 at"):
        link(pointwise(a, b, local=["tmp0"]))


def test_half_precision_buffers_do_not_round_what_passes_through():
    a, b = Body(), Body()
    a.store("tmp0", I.expr, a.exp(a.load("in0", I.expr, dtype=torch.bfloat16)))
    b.store("out0", I.expr, b.sin(b.load("tmp0", I.expr, dtype=torch.bfloat16)))
    g = link(pointwise(a, b, local=["tmp0"], dtype=torch.bfloat16))
    assert ops(g) == ["load", "to_dtype", "exp", "sin", "store"]


def test_what_passes_through_a_half_precision_buffer_is_rounded_where_that_can_be_told():
    """A comparison asks for rounded operands: of two loads only the one that another body computed is not."""
    a, b = Body(), Body()
    a.store("tmp0", I.expr, a.exp(a.load("in0", I.expr, dtype=torch.bfloat16)))
    x, y = (b.round_to(b.load(name, I.expr, dtype=torch.bfloat16), torch.bfloat16, dtype=torch.float32) for name in ("tmp0", "in0"))
    b.store("out0", I.expr, b.to_dtype(b.eq(x, y, dtype=torch.bool), dtype=torch.float32))
    g = link(pointwise(a, b, local=["tmp0"], dtype=torch.bfloat16))
    assert ops(g) == ["load", "to_dtype", "exp", "round_to", "eq", "to_dtype", "store"]


def test_what_others_read_from_a_half_precision_buffer_is_rounded_for_the_kernel_that_stores_it_too():
    a, b = Body(), Body()
    a.store("out0", I.expr, a.exp(a.load("in0", I.expr, dtype=torch.bfloat16)))
    b.store("out1", I.expr, b.sin(b.load("out0", I.expr, dtype=torch.bfloat16)))
    g = link(pointwise(a, b, outputs=("out0", "out1"), dtype=torch.bfloat16))
    assert ops(g) == ["load", "to_dtype", "exp", "store", "round_to", "sin", "store"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_largest_element_is_found_in_a_kernel_that_computes_the_elements_again(dtype):
    """sort() is in neither kernel: the first computes p, and the largest q from it, the second each q from the p in memory."""
    def fn(x, y):
        p = (x * y).sin()
        q = p.abs() * 1.37
        return p @ p.T, q == torch.sort(q.amax(0, keepdim=True), 0).values
    compiled = minicompile.compile(fn, backend="cpp", fullgraph=True)
    for seed in range(5):
        x, y = (t.to(dtype) for t in torch.randn(2, 40, 9, generator=torch.Generator().manual_seed(seed)))
        assert compiled(x, y)[1].any(0).all()


def test_choosing_among_half_values_needs_no_rounding():
    def fn(x, y):
        return [torch.where(torch.maximum(x, y) > 0, x, y) > y, x.float() * y.float(), x == x.amax(0, keepdim=True)]
    kernels = kernels_of(fn, torch.randn(8, 3).bfloat16(), torch.randn(8, 3).bfloat16())
    assert "round_to" in {i.op for k in kernels for loop in k.loops for i in loop.body}
    assert not any("round_to" in ops(link(k)) for k in kernels)


def softmax_loops():
    at = I.expr * 8 + R.expr
    a, b, c = Body(), Body(), Body()
    a.store("tmp0", I.expr, a.emit("reduce", "max", a.load("in0", at), None))
    b.store("tmp1", I.expr, b.emit("reduce", "sum", b.exp(b.sub(b.load("in0", at), b.load("tmp0", I.expr))), None))
    c.store("out0", at, c.truediv(c.exp(c.sub(c.load("in0", at), c.load("tmp0", I.expr))), c.load("tmp1", I.expr)))
    buffers = [buffer("in0", (N, 8)), buffer("tmp0", (N,)), buffer("tmp1", (N,)), buffer("out0", (N, 8))]
    return kernel([a.loop((I,), (R,)), b.loop((I,), (R,)), c.loop((I, R))], buffers, ["in0"], ["out0"], (I,), (R,),
                  local=["tmp0", "tmp1"])


def test_phases_count_the_reductions_before():
    g = link(softmax_loops())
    assert [(r.args[0], r.phase) for r in g.reductions] == [("max", 1), ("sum", 2)]
    assert all(r.dims == {I} for r in g.reductions)
    [store] = g.stores
    assert g.is_element(store) and store.phase == 2
    assert [v.op for v in elements(g, [store])] == ["load", "sub", "exp", "truediv"]
    online = with_online_softmax(link(softmax_loops()))
    assert [(r.args[0], r.phase) for r in online.reductions] == [("softmax", 1)] and online.stores[0].phase == 1


def kernels_of(fn, *inputs, device="cpu"):
    return [s for s in fuse(program_of(fn, inputs, device=device)).steps if isinstance(s, Kernel)]


def test_a_reduction_over_one_element_is_pointwise():
    def fn(x):
        return [x.var(1, correction=0), x.argmax(1), x.logsumexp(1), x.prod(1)]
    x = torch.tensor([[1.0], [float("inf")], [-3.0]])
    [k] = kernels_of(fn, x, device="cuda:0")
    text = emit_triton(k).code
    assert not k.reduction_vars and "tl.sum" not in text and "tl.reduce" not in text
    got = compile_schedule(fuse(program_of(fn, [x])), "cpp")([x])
    torch.testing.assert_close(got, fn(x), equal_nan=True)


def test_the_bits_of_a_value_that_passes_through_a_half_buffer():
    def fn(x):
        return (x + 1).view(torch.int16) + 1
    x = torch.randn(50).bfloat16()
    [k] = kernels_of(fn, x, device="cuda:0")
    assert ".to(tl.bfloat16)" in emit_triton(k).code
    [k] = kernels_of(fn, x)
    assert "mc_to_bf16" in emit_cpp(k).code
    assert compile_schedule(fuse(program_of(fn, [x])), "cpp")([x])[0].tolist() == fn(x).tolist()
