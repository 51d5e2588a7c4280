"""The generated host program: layouts, views, aliases, memory, symbols, errors that point at its lines."""
import contextlib
import functools
import re
import sys
import threading
import traceback
import weakref

import pytest
import torch

import minicompile
from minicompile.ch01_graphs.fake import FakeMode
from minicompile.ch01_graphs.symbolic import Symbol
from minicompile.ch01_graphs.trace import trace
from minicompile.ch02_guards.memory import empty_on_cpu, facts, view, window
from minicompile.ch02_guards.stable import below_autograd, find_state, has_state, unchanged
from minicompile.ch03_capture import hook
from minicompile.ch06_decompositions.decompose import decompose
from minicompile.ch07_loops.builder import Builder
from minicompile.ch07_loops.ir import Buffer, Extern, Layout, Loop, Program, View
from minicompile.ch07_loops.lower import lower
from minicompile.ch08_fusion.fuse import fuse
from minicompile.ch08_fusion.kernel import LazyKernel
from minicompile.ch11_runtime.host import Arrived, binding, compile_schedule, only_reads, relayout
from minicompile.config import config

aten = torch.ops.aten
CPU = torch.device("cpu")


def compiled(fn, args):
    mode = FakeMode()
    return compile_schedule(fuse(lower(decompose(trace(fn, [mode.from_real(a) for a in args])))), "loops")


def buffer(name, size, stride=None, dtype=torch.float32, alias_of=None):
    if stride is None:
        stride, running = [], 1
        for s in reversed(size):
            stride.insert(0, running)
            running = running * s
    return Buffer(name, dtype, CPU, Layout(tuple(size), tuple(stride)), alias_of)


def pointwise(name, size, source, target, op="neg"):
    v, b = Symbol("i0", size), Builder()
    b.store(target, v.expr, b.op(op, b.load(source, v.expr, torch.float32)))
    return Loop(name, (v,), (), tuple(b.stores))


def program(inputs, buffers, nodes, outputs, **kw):
    buffers = {b.name: b for b in buffers}
    return Program(inputs, buffers, nodes, [View(o, buffers[o].layout) if isinstance(o, str) else o for o in outputs], **kw)


def test_the_list_is_emptied_and_outputs_are_a_list():
    host = compiled(lambda x: [x + 1, x], [torch.ones(3)])
    args = [torch.ones(3)]
    x = args[0]
    out = host(args)
    assert not args and isinstance(out, list) and out[0].tolist() == [2, 2, 2] and out[1] is x


def test_a_program_of_kernels_is_a_function_of_its_arguments():
    mode, x = FakeMode(), torch.arange(3.0)
    schedule = fuse(lower(decompose(trace(lambda x: [x.sum() * 2, x.sin() > 0], [mode.from_real(x)]))))
    host = compile_schedule(schedule, "cpp")
    spread = host.spread()
    for _ in range(2):                          # the first call builds the kernels
        assert not isinstance(spread(x), list) and [r.tolist() for r in spread(x)] == [6, [False, True, True]]
    assert host.resolved and not any(isinstance(v, functools.partial) for v in spread.__globals__.values())
    assert [r.tolist() for r in host([x])] == [6, [False, True, True]]
    host.run = functools.partial(host.run)      # as the explorer does to measure
    assert host.spread() is None
    assert compiled(lambda x: [x @ x], [torch.ones(3, 3)]).spread() is None


def test_a_program_of_kernels_is_called_inside_of_the_region_and_is_not_captured():
    def f(x):
        return x.relu() + 1
    compiled, x = minicompile.compile(f), torch.arange(3.0)
    for _ in range(3):
        assert compiled(x).tolist() == [1, 2, 3]
    (entry,) = hook.targets_of(f.__code__)
    graph = entry.__globals__["__graph"]
    assert graph.in_region and hook.record(graph.__code__)["skipped"]


def test_python_in_the_place_of_kernels_is_not_captured(captured, monkeypatch):
    def f(x):
        return x.relu() + 1

    def unbuilt(kernel):
        raise ZeroDivisionError

    def loaded(kernels):
        return [lambda x, out: exec("out.copy_((lambda t: t.relu() + 1)(x))", {"x": x, "out": out})]
    monkeypatch.setattr(config, "raise_on_internal_error", False)
    monkeypatch.setattr(LazyKernel, "resolve", unbuilt)
    monkeypatch.setattr("minicompile.ch11_runtime.host.load_reference", loaded)
    compiled, x = minicompile.compile(f), torch.arange(3.0)
    with pytest.warns(RuntimeWarning, match="slow reference interpreter"):
        assert compiled(x).tolist() == [1, 2, 3]
    assert compiled(x).tolist() == [1, 2, 3] and captured == [f.__code__]


def test_a_kernel_of_a_spread_program_that_cannot_be_built(monkeypatch):
    monkeypatch.setattr(config, "raise_on_internal_error", False)
    host = compile_schedule(fuse(lower(decompose(trace(lambda x: [x + 1], [FakeMode().from_real(torch.ones(3))])))), "cpp")
    spread = host.spread()
    monkeypatch.setattr(host.namespace["k0"], "finish", lambda: 1 // 0)
    with pytest.warns(RuntimeWarning, match="slow reference interpreter"):
        assert spread(torch.ones(3))[0].tolist() == [2, 2, 2]
    assert spread(torch.ones(3))[0].tolist() == [2, 2, 2]


@pytest.mark.parametrize("dynamic", (False, True))
def test_inputs_that_are_called_as_buffers_are(dynamic):
    def f(buf0, buf1, buf2):
        return buf0.sin() * buf2, buf1.sum() * 2, buf0.sum() * buf2
    compiled, x, y = minicompile.compile(f, dynamic=dynamic), torch.arange(6.0), torch.ones(4)
    for number in (2, 3):
        assert all(map(torch.allclose, compiled(x, y, number), f(x, y, number)))


def test_inputs_with_an_offset_in_their_storage():
    def f(x, w):
        return [torch.mm(x, w.t()).relu(), x.t() * 2]
    base, weights = torch.randn(10, 8), torch.randn(40)
    args = [base[3:7], weights[8:40].view(4, 8)]
    for got, want in zip(compiled(f, args)(list(args)), f(*args)):
        torch.testing.assert_close(got, want)


def test_strides_of_a_library_result_are_checked():
    """An operator may answer with other strides than its fake promised. Kernels read memory by the promise."""
    class Op:                                    # stands for an operator whose result is column-major
        tags = ()
        def __call__(self, x):
            return (x + 1).t().contiguous().t()
    p = program(["x"], [buffer("x", (3, 4)), buffer("y", (3, 4)), buffer("z", (12,))],
                [Extern("e", Op(), (View("x", Layout((3, 4), (4, 1))),), {}, ("y",)), pointwise("n", 12, "y", "z")], ["z", "y"])
    x = torch.randn(3, 4)
    z, y = compile_schedule(fuse(p), "loops")([x])
    torch.testing.assert_close(z, -(x + 1).reshape(12))
    assert y.stride() == (4, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [3, 2])
def test_dtype_and_shape_of_a_library_result_are_checked(dtype, rows):
    """A kernel that is compiled for another dtype, or for more rows, reads beyond the memory of the result."""
    class Op:
        tags = ()
        def __call__(self, x):
            return (x + 1).to(dtype)[:rows]
    p = program(["x"], [buffer("x", (3, 4)), buffer("y", (3, 4)), buffer("z", (12,))],
                [Extern("e", Op(), (View("x", Layout((3, 4), (4, 1))),), {}, ("y",)), pointwise("n", 12, "y", "z")], ["z"])
    host, x = compile_schedule(fuse(p), "loops"), torch.ones(3, 4)
    if rows < 3:
        with pytest.raises(RuntimeError, match="shape"):
            host([x])
        return
    for _ in range(2):
        assert host([x])[0].tolist() == [-2] * 12
    assert isinstance(host.namespace["x0"], Op) == (dtype == torch.float32)          # a call that keeps its promise is checked once


def test_relayout_copies_only_when_it_matters():
    t = torch.randn(1, 4)
    odd = t.as_strided((1, 4), (77, 1))
    assert relayout(odd, (1, 4), (4, 1)) is odd
    assert relayout(torch.randn(3, 4).t(), (4, 3), (3, 1)).stride() == (3, 1)
    expanded = relayout(t.expand(3, 4).contiguous(), (3, 4), (0, 1))
    assert expanded.stride() == (0, 1) and expanded.equal(t.expand(3, 4))
    with pytest.raises(RuntimeError, match="shape"):
        relayout(t, (4, 1), (1, 1))


def test_updates_are_seen_by_autograd():
    def f(x):
        y = x * 2
        x.copy_(y)
        return [y.sum()]
    host, x = compiled(f, [torch.ones(4)]), torch.ones(4)
    version = x._version
    assert host([x])[0] == 8 and x.tolist() == [2] * 4 and x._version > version
    with torch.inference_mode():
        host([torch.ones(4)])


def test_below_autograd_operators_are_dispatched_as_torch_has_it():
    def words():
        return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()

    assert unchanged is None or below_autograd is unchanged.below_autograd
    for outer in (contextlib.nullcontext, torch._C._AutoDispatchBelowAutograd, torch.inference_mode, lambda: torch.autocast("cpu")):
        with outer():
            before = words()
            with torch._C._AutoDispatchBelowAutograd():
                expected = words()
            with pytest.raises(KeyError), below_autograd():
                assert words() == expected
                with below_autograd():
                    assert words() == expected
                assert words() == expected
                raise KeyError
            assert words() == before
            left = below_autograd()
            left.__enter__()
            assert words() == expected
            del left
            assert words() == before
    seen = []
    with below_autograd():
        thread = threading.Thread(target=lambda: seen.append(words()))
        thread.start()
        thread.join()
    assert seen == [words()]


@pytest.mark.skipif(not has_state, reason="the extension knows no state")
@pytest.mark.parametrize("outer", [torch.inference_mode, torch._C._AutoDispatchBelowAutograd])
def test_the_keys_of_autograd_are_found_where_they_are_off(outer):
    """As in a program that calls compiled code for the first time, and so imports it, in inference mode."""
    with outer():
        assert find_state()
    with torch._C._AutoDispatchBelowAutograd():
        expected = torch._C._dispatch_tls_local_exclude_set()
    with below_autograd():
        assert torch._C._dispatch_tls_local_exclude_set() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn])
def test_memory_of_the_cpu_is_made_from_numbers(dtype):
    empty = empty_on_cpu(dtype)
    assert unchanged is None or type(empty) is unchanged.Maker
    for size, stride in (((), ()), ((0, 3), (3, 1)), ((4, 5), (1, 4)), ((2, 3), (8, 1)), ((1,) * 12, (1,) * 12), ([2], [1])):
        for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
            with mode():
                made, expected = empty(size, stride), torch.empty_strided(size, stride, dtype=dtype)
            assert (made.shape, made.stride(), made.dtype, made.device) == (expected.shape, expected.stride(), dtype, CPU)
            assert torch._C._dispatch_keys(made).raw_repr() == torch._C._dispatch_keys(expected).raw_repr()
            assert made.untyped_storage().nbytes() == expected.untyped_storage().nbytes()
            assert sys.getrefcount(made) == sys.getrefcount(expected) and made._use_count() == expected._use_count()
            assert made.is_inference() or made._version == 0
    for wrong in (((-1,), (1,)), ((2, 3), (1,)), ((2,), (-1,)), (("2",), (1,)), ((1 << 70,), (1,)), ((True,), (1,))):
        with pytest.raises((RuntimeError, TypeError)) as error:
            torch.empty_strided(*wrong, dtype=dtype)
        with pytest.raises(error.type, match=re.escape(str(error.value).splitlines()[0][:40])):
            empty(*wrong)
    del made, expected
    kept = weakref.ref(tensor := empty((1000,), (1,)))
    del tensor
    assert kept() is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_window_is_a_tensor_of_its_own_in_the_memory_of_another(mode):
    with mode():
        base = torch.arange(24.)
        for tensor in (base, base[3:], base.view(4, 6)[:, 1:], torch.nn.Parameter(base), base.to(torch.complex64).conj().imag):
            for size, stride, offset in (((2, 3), (3, 1), 1), ((), (), 0), ((0, 2), (2, 1), 0), ((3, 2), (1, 3), 2), ([2], [1], 1)):
                made, expected = window(tensor, size, stride, offset), view(tensor, size, stride, offset)
                assert facts(made) == facts(expected.detach()) and made.data_ptr() == expected.data_ptr()
                counts = [(sys.getrefcount(t), t._use_count()) for t in (made, expected)]
                assert counts[0] == counts[1] and not made._is_view()
        with pytest.raises(RuntimeError):
            window(base, (2,), (-1,), 0)
        with pytest.raises(TypeError):
            window(base, (2.5,), (1,), 0)
        made = window(base, (2,), (1,), 0)
        made.fill_(7)
        assert base[:2].tolist() == [7, 7]
        del base, tensor, expected
        assert made.tolist() == [7, 7]


def test_only_calls_that_keep_nothing_get_windows():
    assert only_reads(aten.addmm.default) and only_reads(aten._scaled_dot_product_flash_attention_for_cpu.default)
    assert not only_reads(aten.add_.Tensor) and not only_reads(aten.view.default) and not only_reads(torch.ops.prims.sin.default)
    assert not only_reads(print)
    host = compiled(lambda x, w: [torch.mm(x.view(4, 6), w[1:].t())], [torch.randn(24), torch.randn(4, 6)])
    assert "window(" in host.source and "as_strided(" not in host.source
    x, w = torch.randn(24), torch.randn(4, 6)
    torch.testing.assert_close(host([x, w])[0], torch.mm(x.view(4, 6), w[1:].t()))


def test_memory_is_taken_over_in_place():
    n = 1000
    p = program(["x"], [buffer(b, (n,)) for b in "xabcd"],
                [Extern("e1", aten.sin.default, (View("x", Layout((n,), (1,))),), {}, ("a",)), pointwise("l", n, "a", "b"),
                 Extern("e2", aten.sin.default, (View("b", Layout((n,), (1,))),), {}, ("c",)), pointwise("m", n, "c", "d")], ["d"])
    schedule = fuse(p)
    assert schedule.plan.peak == 2 * 4 * n
    assert [new for s in schedule.plan.steps for new, _ in s.reuse] == ["b", "d"]
    assert "empty_" not in compile_schedule(schedule, "loops").source
    x = torch.randn(n)
    torch.testing.assert_close(compile_schedule(schedule, "loops")([x])[0], -torch.sin(-torch.sin(x)))


def test_a_result_that_takes_over_memory_in_another_layout_is_no_view():
    def fn(x):
        y = (x - x).renorm(2, 0, 1.0)
        return y * 1, y
    x = torch.randn(3, 7, 2, 4).permute(3, 2, 1, 0)
    f = compiled(fn, [x])
    assert "takes over" in f.source
    first, second = f([x])
    assert not first._is_view() and not second._is_view()
    first.detach_()                                # eager's message for views: use detach() instead


def test_a_result_with_memory_of_its_own_is_no_view():
    x = torch.randn(3, 4)
    for fn in (lambda x: [x.repeat(2, 1, 3)], lambda x: [x.rot90()], lambda x: [x + 1, x.tile(2)],
               lambda x: [torch.nn.functional.scaled_dot_product_attention(*[x[None, None]] * 3)]):
        result = compiled(fn, [x])([x])[-1]
        torch.testing.assert_close(result, fn(x)[-1])
        assert not fn(x)[-1]._is_view() and not result._is_view()
        result.detach_()


def test_results_that_share_memory_share_a_version():
    def fn(x):
        y = x + 1
        return [y, y.view(2, 6), y.t()]
    x = torch.randn(3, 4)
    y, flat, turned = compiled(fn, [x])([x])
    before = flat._version
    y.mul_(2)
    assert flat._version == turned._version == before + 1
    torch.testing.assert_close([flat, turned], [y.view(2, 6), y.t()])


def test_inputs_are_never_overwritten():
    x = torch.ones(100)
    compiled(lambda x: [(x + 1).sin()], [x])([x])
    assert x.eq(1).all()


def test_dead_memory_is_reused_for_equal_sizes():
    def f(x, w):
        for _ in range(6):
            x = torch.mm(x, w).relu().flip(0)
        return [x]
    args = [torch.randn(32, 32), torch.randn(32, 32)]
    host = compiled(f, args)
    torch.testing.assert_close(host(list(args)), f(*args))
    assert host.source.count("= empty_") <= 3
    assert len(host.sources) == 2, "equal kernels share one compiled function"


def test_symbols_are_arguments():
    s = Symbol("s0", None, 2)
    n = s.expr
    v, b = Symbol("i0", n * 3), Builder()
    b.store("y", v.expr, b.op("mul", b.load("x", v.expr, torch.float32), b.index(n, torch.float32)))
    p = program(["s0", "x"], [buffer("x", (n, 3)), buffer("y", (n, 3))],
                [Loop("l", (v,), (), tuple(b.stores))], ["y", n * 2], symbols={"s0": s})
    host = compile_schedule(fuse(p), "loops")
    for size in (2, 5):
        x = torch.randn(size, 3)
        y, twice = host([size, x])
        torch.testing.assert_close(y, x * size)
        assert twice == 2 * size


def test_constants_and_several_results():
    table = torch.randn(4, 6)
    def f(x):
        values, indices = torch.sort(x + table, 1)
        return [values * 2, indices]
    x = torch.randn(4, 6)
    for got, want in zip(compiled(f, [x])([x]), f(x)):
        torch.testing.assert_close(got, want)


def test_tracebacks_show_the_generated_line():
    host = compiled(lambda x, w: [torch.mm(x, w)], [torch.randn(2, 3), torch.randn(3, 4)])
    try:
        host([torch.randn(2, 3), torch.randn(5)])
    except RuntimeError:
        assert "out=buf" in traceback.format_exc()
    else:
        raise AssertionError("expected an error")


def test_gradients_do_not_leak_into_library_calls():
    w = torch.randn(3, 4, requires_grad=True)
    out, = compiled(lambda x, w: [torch.mm(x, w) + 1], [torch.randn(2, 3), w])([torch.randn(2, 3), w])
    assert not out.requires_grad


def test_canonical_kernels_tell_minus_zero_from_zero():
    x = torch.ones(3)
    out = compiled(lambda x: [torch.mm(x[:, None], x[None]) + 0.0, torch.full((3,), -0.0), torch.full((3,), 0.0)], [x])([x])
    assert torch.signbit(out[1]).all() and not torch.signbit(out[2]).any()


def test_dynamic_sizes_through_the_pipeline():
    from minicompile.ch01_graphs.shapes import ShapeEnv

    def f(n, x, w):
        h = torch.nn.functional.gelu(torch.mm(x, w))
        return [torch.softmax(h, -1), (h * 2).sum(0), h.reshape(-1).sin()]
    env, mode = ShapeEnv(), FakeMode()
    n = env.create(6)
    w = torch.randn(4, 8)
    fakes = [n, mode.from_real(torch.randn(6, 4), (n, 4)), mode.from_real(w)]
    host = compile_schedule(fuse(lower(decompose(trace(f, fakes)))), "loops")
    for size in (3, 6, 11):
        x = torch.randn(size, 4)
        for got, want in zip(host([size, x, w]), f(size, x, w)):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_library_call_reaches_its_own_overload():
    """Whatever function is called, the operator of the step arrives, with its arguments."""
    t = View("t", Layout((2, 3), (3, 1)))
    buffers = {"t": buffer("t", (2, 3))}
    real = torch.randn(2, 3)
    steps = [(aten.mul.Tensor, (t, t)), (aten.mul.Scalar, (t, 2.0)), (aten.sum.dim_IntList, (t, [1], True)), (aten.sum.default, (t,)),
             (aten._fft_r2c.default, (t, [1], 0, True)), (aten.gelu.default, (t,)), (aten.amax.default, (t, [0])),
             (aten.cat.default, ([t, t], 1)), (aten.add.Tensor, (t, t), {"alpha": 3}), (aten.matmul.default, (t, t)),
             (aten.div.Tensor_mode, (t, t), {"rounding_mode": "floor"}), (aten.sort.stable, (t,), {"stable": True, "dim": 0})]
    fast = 0
    for op, args, *kwargs in steps:
        step = Extern("x", op, args, *(kwargs or [{}]), ("out",))
        call = binding(step, buffers)
        put = lambda a: real if isinstance(a, View) else [put(x) for x in a] if isinstance(a, list) else a
        fast += call is not op._op
        if op is not aten.matmul.default:
            with pytest.raises(LookupError) as arrived, Arrived():
                call(*map(put, args), **step.kwargs)
            assert arrived.value.args[0] is op
    assert fast == len(steps) - 2                  # mul takes a number for a tensor, matmul is made of others


@pytest.mark.parametrize("name", ["multi_margin_loss", "mse_loss", "huber_loss", "binary_cross_entropy"])
def test_defaults_of_a_library_call_are_those_of_its_operator(name):
    """The function of that name in PyTorch's Python interface does not take the mean."""
    op, t = getattr(aten, name).default, View("t", Layout((2, 3), (3, 1)))
    call = binding(Extern("x", op, (t, t), {}, ("out",)), {"t": buffer("t", (2, 3))})
    x, y = torch.rand(2, 3), torch.tensor([0, 1]) if name == "multi_margin_loss" else torch.rand(2, 3)
    assert call(x, y).equal(op(x, y))


def test_library_calls_on_what_requires_a_gradient_give_no_history():
    """Gradients are on while a program runs that has no backward."""
    x, w, b = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True), torch.randn(4, requires_grad=True)

    def f(x):
        return torch.addmm(b, x, w.t()).argmax(1), (x @ w).detach(), torch.fft.fft(w).detach()

    for got, expected in zip(minicompile.compile(f)(x), f(x)):
        assert not got.requires_grad and got.grad_fn is None and torch.equal(got, expected)


@pytest.mark.parametrize("fn", [lambda x, at: x.index_add(0, at, x[:2]), lambda x, at: x[:, 0].index_add(0, at, x[:2, 0]),
                                lambda x, at: torch.nn.functional.nll_loss(x[:2], at)])
@pytest.mark.parametrize("backend", ["loops", "cpp"])
def test_an_index_out_of_range_raises_what_eager_raises(fn, backend):
    def writes(x, at, kept):
        kept.add_(1)
        return fn(x, at)

    x, at, kept = torch.ones(3, 2), torch.tensor([0, 9]), torch.zeros(2)
    with pytest.raises((IndexError, RuntimeError)) as plain:
        writes(x, at, kept)
    step = minicompile.compile(writes, backend=backend)
    for _ in range(2):
        with pytest.raises(type(plain.value)):
            step(x, at, kept)


@pytest.mark.parametrize("deterministic", [False, True])
def test_memory_of_any_value_is_allocated_like_other_memory(deterministic):
    """But where PyTorch has to fill it."""
    torch.use_deterministic_algorithms(deterministic)
    try:
        host = compiled(lambda x: [torch.bernoulli(x.new_empty(2, 3), 0.5) * x, x.new_empty(4)], [torch.ones(2, 3)])
        torch.manual_seed(0)
        drawn, unfilled = host([torch.ones(2, 3)])
        torch.manual_seed(0)
        assert torch.equal(drawn, torch.bernoulli(torch.empty(2, 3), 0.5)) and unfilled.shape == (4,)
        assert len([name for name in host.namespace if re.fullmatch(r"x\d", name)]) == (3 if deterministic else 1)
        assert not deterministic or unfilled.isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)
