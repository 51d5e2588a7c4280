"""The rules of safe CUDA graphs, with a fake graph on any machine and with real ones on a GPU."""
import contextlib
import gc
import operator
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from recorders import FakeRecorder
from threading_help import eager_switching

import minicompile
from minicompile.ch01_graphs.fake import FakeMode
from minicompile.ch05_autograd.runtime import compile_training
from minicompile.ch06_decompositions.decompose import decompose
from minicompile.ch11_runtime.cudagraphs import GraphSet, graphed, outputs_that_leave
from minicompile.ch11_runtime.recorder import CudaRecorder
from minicompile.driver import compile_aten

KINDS = [pytest.param("cpu", id="fake"), pytest.param("cuda", id="real", marks=pytest.mark.gpu)]


class SlowRecorder(FakeRecorder):
    """Gives way to other threads in the middle of each replay."""

    def record(self, fn, inputs):
        replay, outputs = super().record(fn, inputs)

        def slow():
            time.sleep(0.001)
            replay()
            time.sleep(0.001)
        return slow, outputs


def in_threads(work, count=6):
    """Whatever `work(number)` raises in one of several threads."""
    with eager_switching(), ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(work, number) for number in range(count)]:
            done.result(timeout=100)


def test_threads_take_turns():
    f = GraphSet(SlowRecorder()).wrap(lambda a: [a[0] * 2, a[0].sum()])
    for _ in range(2):
        f([torch.ones(8)])

    def work(number):
        for i in range(25):
            x = torch.full((8,), float(100 * number + i))
            doubled, total = f([x.clone()])
            assert torch.equal(doubled, x * 2) and total == x.sum()
    in_threads(work)
    assert f.counts["replayed"] >= 150


def test_what_comes_in_the_same_memory_is_static():
    """As `x.data` of a tensor that the graph writes does: it is written in place, and there is nothing to copy back."""
    f = GraphSet(FakeRecorder()).wrap(lambda a: [a[0].add_(a[1]).sum()], mutated=frozenset([0]))
    x = torch.zeros(3)
    for i in range(4):
        f([x.data, torch.full((3,), float(i))])
    (recording,) = f.recordings.values()
    assert recording.static == [0] and recording.copied == [1] and not recording.written
    assert x.tolist() == [6.0] * 3 and f.counts["recorded"] == 1


def test_a_window_elsewhere_in_the_same_memory_is_copied():
    f = GraphSet(FakeRecorder()).wrap(lambda a: [a[0] * 2])
    x = torch.arange(8.0)
    for i in range(4):
        assert f([x[2 * i:2 * i + 2]])[0].tolist() == [4.0 * i, 4.0 * i + 2]
    (recording,) = f.recordings.values()
    assert recording.copied == [0] and f.counts["recorded"] == 1


@pytest.mark.parametrize("recorder", [FakeRecorder, SlowRecorder])
def test_threads_train(recorder):
    """Forward and backward passes of several threads in any order: those that find one pending run plainly."""
    graphs, examples = GraphSet(recorder()), [torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)]
    f, _ = pipeline(lambda x, w: (torch.tanh(x @ w), x * 2), examples, "cpu", "aot_eager", graphs)

    def work(number):
        for i in range(20):
            x, w = torch.randn(3, 4), torch.randn(4, 4)
            want, *gradients = reference(x, w)
            x, w = x.requires_grad_(), w.requires_grad_()
            y = f(x, w)[0]
            time.sleep(0.0005 * (number % 3))
            y.sum().backward()
            torch.testing.assert_close([y.detach(), x.grad, w.grad], [want, *gradients])
    work(0)                            # recorded
    before = [m.counts["replayed"] for m in graphs.members]
    in_threads(work, 4)
    more = [(m.is_backward, m.counts["replayed"] - n) for m, n in zip(graphs.members, before)]
    assert any(n for is_backward, n in more if is_backward) and any(n for is_backward, n in more if not is_backward), more


def test_a_call_in_the_middle_of_a_call_runs_without_the_graph():
    """From a finaliser, or a signal handler."""
    inner = []

    class Nested(FakeRecorder):
        def record(self, fn, inputs):
            replay, outputs = super().record(fn, inputs)

            def nested():
                if not inner:
                    inner.append(None)
                    inner[0] = f([torch.full((3,), 5.0)])[0]
                replay()
            return nested, outputs

    f = GraphSet(Nested()).wrap(lambda a: [a[0] + 1])
    for n in range(4):
        assert torch.equal(f([torch.full((3,), float(n))])[0], torch.full((3,), n + 1.0))
    assert torch.equal(inner[0], torch.full((3,), 6.0))


@pytest.mark.gpu
@pytest.mark.parametrize("streams", [False, True])
def test_threads_and_streams_of_a_gpu(streams):
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(20)]).cuda()
    fast = minicompile.compile(model, mode="reduce-overhead")

    def call(x, grad):
        with torch.set_grad_enabled(grad):
            y = fast(x)
            if grad:
                y.sum().backward()
        return y.detach()
    inputs = torch.randn(6, 10, 256, 64, device="cuda")     # PyTorch forbids to draw numbers during a recording
    torch.cuda.synchronize()

    def work(number):
        stream, grad = torch.cuda.Stream() if streams else torch.cuda.current_stream(), number % 2 == 1
        with torch.cuda.stream(stream):
            for i in range(100):
                x, z = (inputs[number, i % 10].clone().requires_grad_(grad) for _ in range(2))
                y, want = call(x, grad), model(z).detach()
                torch.testing.assert_close(y, want, rtol=1e-3, atol=1e-4)
                if grad:
                    torch.testing.assert_close(x.grad, torch.autograd.grad(model(z).sum(), z)[0], rtol=1e-3, atol=1e-4)
    in_threads(work, 6)
    minicompile.reset()


ALONE = """
import threading, torch
from minicompile.ch11_runtime.recorder import is_only_thread

def answer(done=None):
    found.append(is_only_thread())

found, x, stop = [], torch.ones(1, requires_grad=True), threading.Event()
answer()
for name in "minicompile-compiles", "worker":
    thread = threading.Thread(target=stop.wait, name=name)
    thread.start()
    answer()
    stop.set()
    thread.join()
    stop.clear()
y = x * 2
y.register_hook(answer)
y.sum().backward()
print(found)
"""


@pytest.mark.processes
def test_whether_other_threads_may_call_libraries():
    """In a process of its own, where the tests' tools have no threads."""
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=100)
    assert done.stdout.split("\n")[0] == "[True, True, False, True]", done.stderr


@contextlib.contextmanager
def another_thread():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


LONG = 1 << 13


def products(count):
    """Recorded products of matrices that need a workspace, few numbers of long sums, many in a row, so that two recordings can overlap."""
    weights = [torch.randn(LONG, 64, device="cuda") for _ in range(count)]
    functions = [GraphSet().wrap(lambda args, w=w: [[args[0].t() @ w for _ in range(50)][-1]]) for w in weights]
    x = torch.randn(LONG, 64, device="cuda")
    for f in functions:
        for _ in range(3):
            f([x.clone()])
    assert all(f.counts["replayed"] == 2 for f in functions)
    return functions, weights


@pytest.mark.gpu
def test_workspaces_of_other_threads_are_not_given_back(monkeypatch):
    def fail():
        raise AssertionError("another thread may be using its workspace")
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", fail)
    with another_thread():
        products(1)


@pytest.mark.gpu
def test_what_lies_where_a_workspace_was_is_not_overwritten():
    """The workspaces of recordings stay theirs if somebody else gives all of them back."""
    with another_thread():
        (f,), (w,) = products(1)
    x = torch.randn(LONG, 64, device="cuda")
    want = x.t() @ w
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    taken = [torch.zeros(1 << 20, device="cuda") for _ in range(32)]
    torch.testing.assert_close(f([x.clone()])[0], want, rtol=1e-3, atol=1e-2)
    assert not any(t.any() for t in taken)
    del taken
    torch.cuda.empty_cache()
    torch.testing.assert_close(f([x.clone()])[0], want, rtol=1e-3, atol=1e-2)


@pytest.mark.gpu
def test_graphs_that_share_a_workspace_take_turns():
    with another_thread():
        functions, weights = products(2)
    inputs = [torch.randn(LONG, 64, device="cuda") for _ in weights]
    wants = [x.t() @ w for x, w in zip(inputs, weights)]
    streams = [torch.cuda.Stream() for _ in weights]
    torch.cuda.synchronize()
    found = []
    for _ in range(50):
        for f, x, stream in zip(functions, inputs, streams):
            with torch.cuda.stream(stream):
                found.append(f([x.clone()])[0])
    torch.cuda.synchronize()
    for k, y in enumerate(found):
        torch.testing.assert_close(y, wants[k % 2], rtol=1e-3, atol=1e-2)


def test_no_replay_while_the_caller_records(monkeypatch):
    f = GraphSet(FakeRecorder()).wrap(lambda a: [a[0] * 2])
    for _ in range(3):
        f([torch.ones(8)])
    before = dict(f.counts)
    with monkeypatch.context() as patch:
        patch.setattr("minicompile.ch11_runtime.cudagraphs.is_recorded", lambda: True)
        f([torch.ones(8)])
    f([torch.ones(8)])
    assert f.counts == {**before, "plain": before["plain"] + 1, "replayed": before["replayed"] + 1}


@pytest.mark.gpu
@pytest.mark.parametrize("warm", [1, 2, 5])
def test_a_program_records_a_graph_of_its_own(warm):
    """A training step in it, whose function would have a graph: to be recorded at its next call, recorded, replayed before."""
    def train(compiler):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).cuda()
        step, x = compiler(net), torch.linspace(-1, 1, 512, device="cuda").view(16, 32)
        own, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()

        def once():
            net.zero_grad(set_to_none=False)
            loss = step(x).square().mean()
            loss.backward()
            with torch.no_grad():
                torch._foreach_add_(list(net.parameters()), [p.grad for p in net.parameters()], alpha=-0.1)
            return loss
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(warm):
                once()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(own):
            loss = once()
        losses = []
        for _ in range(5):
            own.replay()
            losses.append(loss.item())
        return losses + [once().item() for _ in range(3)]

    expected = train(lambda net: net)
    torch.testing.assert_close(train(partial(minicompile.compile, mode="reduce-overhead")), expected)


@pytest.mark.gpu
def test_what_follows_a_recording_that_cannot_be_ended():
    """Waiting makes a recording invalid."""
    f = GraphSet().wrap(lambda args: [args[0] * args[0].sum().item()])
    stream = torch.cuda.current_stream()
    for n in range(4):
        assert f([torch.full((3,), float(n), device="cuda")])[0].tolist() == [3.0 * n * n] * 3
    assert f.disabled and torch.cuda.current_stream() == stream
    torch.randn(3, device="cuda")
    g = GraphSet().wrap(lambda args: [args[0] + 1])
    for n in range(4):
        assert g([torch.full((3,), float(n), device="cuda")])[0].tolist() == [n + 1.0] * 3
    assert g.counts["replayed"] and not g.disabled


def group(device):
    return GraphSet(FakeRecorder() if device == "cpu" else CudaRecorder())


def region(device):
    """A hand-made compiled region: y = tanh(x @ w), saving y."""
    graphs = group(device)
    forward = graphs.wrap(lambda a: [(y := torch.tanh(a[0] @ a[1])), y.clone()], results=1)
    backward = graphs.wrap(lambda a: [(d := a[3] * (1 - a[2] * a[2])) @ a[1].t(), a[0].t() @ d], is_backward=True)

    class Region(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            y, saved = forward([x, w])
            ctx.save_for_backward(x, w, saved)
            return y

        @staticmethod
        def backward(ctx, tangent):
            return tuple(backward([*ctx.saved_tensors, tangent.contiguous()]))
    return Region.apply, forward, backward


def reference(x, w):
    x, w = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    y = torch.tanh(x @ w)
    y.sum().backward()
    return y.detach(), x.grad, w.grad


@pytest.mark.parametrize("device", KINDS)
def test_outputs_stay_valid(device):
    w = torch.randn(4, 4, device=device)
    f = group(device).wrap(lambda a: [a[0] @ a[1], a[0] + 1])
    kept, expected = [], []
    for _ in range(5):
        x = torch.randn(3, 4, device=device)
        kept.append(f([x, w]))
        expected.append([x @ w, x + 1])
    for a, b in zip(kept, expected):
        torch.testing.assert_close(a, b)
    assert f.counts["recorded"] == 1 and f.counts["replayed"] == 4 and f.counts["plain"] == 1


@pytest.mark.parametrize("device", KINDS)
def test_arguments_are_emptied(device):
    f = group(device).wrap(lambda a: [a.pop() + 1])
    for _ in range(3):
        args = [torch.ones(2, device=device)]
        f(args)
        assert not args


@pytest.mark.parametrize("device", KINDS)
def test_training_matches_eager_and_replays(device):
    f, forward, backward = region(device)
    w = torch.randn(4, 4, device=device, requires_grad=True)
    for _ in range(6):
        x = torch.randn(3, 4, device=device, requires_grad=True)
        w.grad = None
        y = f(x, w)
        y.sum().backward()
        for got, want in zip((y, x.grad, w.grad), reference(x, w)):
            torch.testing.assert_close(got, want)
    assert forward.counts["replayed"] == 5 and backward.counts["replayed"] == 5, (backward.counts, backward.disabled)
    (f_recording,), (b_recording,) = forward.recordings.values(), backward.recordings.values()
    assert f_recording.static == [1] and f_recording.copied == [0], "the parameter is read in place, the batch is copied"
    assert b_recording.static == [1, 2] and b_recording.copied == [0, 3], "and so are activations that stayed in the pool"


@pytest.mark.parametrize("device", KINDS)
def test_gradients_accumulate(device):
    f, forward, _ = region(device)
    w = torch.randn(4, 4, device=device, requires_grad=True)
    total = torch.zeros_like(w)
    for _ in range(5):
        x = torch.randn(3, 4, device=device)
        f(x, w).sum().backward()
        total += reference(x, w)[2]
    torch.testing.assert_close(w.grad, total)
    assert forward.counts["replayed"] == 4


@pytest.mark.parametrize("device", KINDS)
def test_two_forwards_before_the_first_backward(device):
    f, forward, backward = region(device)
    w = torch.randn(4, 4, device=device, requires_grad=True)
    for step in range(4):
        xs = [torch.randn(3, 4, device=device, requires_grad=True) for _ in range(3)]
        ys = [f(x, w) for x in xs]
        w.grad = None
        for x, y in zip(xs, ys):
            y.sum().backward()
        want = [reference(x, w) for x in xs]
        for x, y, (wy, wx, _) in zip(xs, ys, want):
            torch.testing.assert_close(y, wy)
            torch.testing.assert_close(x.grad, wx)
        torch.testing.assert_close(w.grad, sum(g for _, _, g in want))
    assert forward.counts["replayed"] and forward.counts["plain"] > 4


@pytest.mark.parametrize("device", KINDS)
def test_retain_graph(device):
    f, _, _ = region(device)
    w = torch.randn(4, 4, device=device, requires_grad=True)
    for _ in range(4):
        x = torch.randn(3, 4, device=device, requires_grad=True)
        y = f(x, w)
        y.sum().backward(retain_graph=True)
        f(torch.randn(3, 4, device=device), w)               # must not disturb what y saved
        y.sum().backward()
        torch.testing.assert_close(x.grad, 2 * reference(x, w)[1])


@pytest.mark.parametrize("device", KINDS)
def test_a_replaced_or_moved_parameter_is_noticed(device):
    f, forward, _ = region(device)
    w = torch.randn(4, 4, device=device, requires_grad=True)
    for step in range(8):
        if step == 3:
            w = torch.randn(4, 4, device=device, requires_grad=True)
        if step == 5:
            w.data = torch.randn(4, 4, device=device)
        if step == 6:
            with torch.no_grad():
                w.mul_(2)
        x = torch.randn(3, 4, device=device, requires_grad=True)
        y = f(x, w)
        w.grad = None
        y.sum().backward()
        for got, want in zip((y, x.grad, w.grad), reference(x, w)):
            torch.testing.assert_close(got, want)
    assert forward.counts["recorded"] >= 2


@pytest.mark.parametrize("device", KINDS)
def test_sizes_have_their_own_recordings(device):
    f = group(device).wrap(lambda a: [a[0] * a[1]])
    for _ in range(3):
        for n in (2, 3):
            x = torch.randn(n, device=device)
            torch.testing.assert_close(f([x, n])[0], x * n)
    assert f.counts["recorded"] == 2


def test_recordings_tell_floats_apart():
    """0.0 equals -0.0, and nan is not equal to itself."""
    f, x = group("cpu").wrap(lambda a: [a[0] / a[1]]), torch.ones(2)
    for _ in range(3):
        for n, answer in ((0.0, torch.inf), (-0.0, -torch.inf), (float("nan"), torch.nan)):
            torch.testing.assert_close(f([x, n])[0], torch.full((2,), answer), equal_nan=True)
    assert f.counts["recorded"] == 3


def test_a_number_that_changes_at_every_call_switches_graphs_off():
    f, x = group("cpu").wrap(lambda a: [a[0] * a[1]]), torch.ones(2)
    for n in range(100):
        assert f([x, n / 7])[0][0] == torch.tensor(n / 7)
    assert "combinations" in f.disabled and f.counts["recorded"] == 0 and len(f.seen) <= 64


@pytest.mark.parametrize("device", KINDS)
def test_inputs_that_are_written_and_returned(device):
    def step(a):
        a[0].add_(a[1])
        return [a[0], a[0] * 2]
    for static in (True, False):
        f = group(device).wrap(step, mutated=[0])
        state = torch.zeros(4, device=device)
        for i in range(5):
            if not static:
                state = state.clone()
            same, double = f([state, torch.ones(4, device=device)])
            assert same is state and state[0] == i + 1 and double[0] == 2 * (i + 1)


@pytest.mark.parametrize("device", KINDS)
def test_what_cannot_be_recorded_runs_plainly(device):
    class Broken(FakeRecorder):
        def record(self, fn, inputs):
            raise RuntimeError("operation not permitted when stream is capturing")
    f = GraphSet(Broken()).wrap(lambda a: [a[0] + 1])
    for i in range(4):
        assert f([torch.tensor(float(i), device=device)])[0] == i + 1
    assert "not permitted" in f.disabled and f.counts == {"plain": 4, "recorded": 0, "replayed": 0}


def test_results_that_a_recording_moves_to_another_device_switch_graphs_off():
    class Moving(FakeRecorder):
        def record(self, fn, inputs):
            replay, outputs = super().record(fn, inputs)
            return replay, [outputs[0], outputs[1].to("meta")]
    f = GraphSet(Moving()).wrap(lambda a: [a[0] + 1, a[0].sum()], results=1)
    for i in range(4):
        assert [o.tolist() for o in f([torch.full((2,), float(i))])] == [[i + 1, i + 1], 2 * i]
    assert "another device" in f.disabled and f.counts["replayed"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_with_a_mask(dropout):
    """Its kernel gives the place in the random stream as numbers, or, when it is recorded, as memory."""
    def attend(q, mask):
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, mask, dropout).sin().sum()

    fast, mask = minicompile.compile(attend, mode="reduce-overhead"), torch.randn(2, 1, 64, 64, device="cuda")
    for seed in range(5):
        results = []
        for f in (attend, fast):
            torch.manual_seed(seed)
            q = torch.randn(2, 4, 64, 32, device="cuda", requires_grad=True)
            y = f(q, mask)
            y.backward()
            results.append((y.detach(), q.grad))
        for found, wanted in zip(results[1], results[0]):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_cpu_inputs_switch_graphs_off():
    f = GraphSet(CudaRecorder()).wrap(lambda a: [a[0] + 1])
    assert f([torch.ones(1)])[0] == 2 and "GPU" in f.disabled


@pytest.mark.gpu
def test_dropout_differs_between_replays_and_follows_the_seed():
    f = group("cuda").wrap(lambda a: [torch.nn.functional.dropout(a[0], 0.5)])
    x = torch.ones(1000, device="cuda")
    torch.manual_seed(0)
    first = [f([x])[0] for _ in range(5)]
    assert all(not torch.equal(a, b) for a, b in zip(first, first[1:]))
    torch.manual_seed(0)
    expected = torch.nn.functional.dropout(x, 0.5)
    torch.manual_seed(0)
    assert torch.equal(f([x])[0], expected)


@pytest.mark.gpu
def test_the_first_replay_does_not_overtake_what_begins_its_recording(monkeypatch):
    cycles = 50_000_000

    class Late(torch.cuda.CUDAGraph):
        def capture_begin(self, *args, **kwargs):
            torch.cuda._sleep(cycles)                  # what PyTorch prepares for the generator now waits behind this
            super().capture_begin(*args, **kwargs)

    def drop(a):
        torch.cuda._sleep(3 * cycles)
        return [torch.nn.functional.dropout(a[0], 0.5)]
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Late)
    f, x = group("cuda").wrap(drop), torch.ones(1000, device="cuda")
    torch.manual_seed(0)
    expected = [torch.nn.functional.dropout(x, 0.5) for _ in range(4)]
    torch.manual_seed(0)
    assert all(torch.equal(f([x])[0], one) for one in expected)


def pipeline(fn, examples, device, rung, graphs=None):
    """(fn compiled like a captured graph, for inputs like the examples, the set of its CUDA graphs)"""
    graph, graphs = torch.fx.Graph(), graphs or group(device)
    inputs = [graph.placeholder(f"x{i}") for i in range(len(examples))]
    for node, t in zip(inputs, examples):
        node.meta["val"] = FakeMode().from_real(t)
    call = graph.call_function(fn, tuple(inputs))
    graph.output(tuple(graph.call_function(operator.getitem, (call, i)) for i in range(2)))
    prepare = None if rung == "aot_eager" else decompose
    run = compile_training(torch.fx.GraphModule(torch.nn.Module(), graph), [node.meta["val"] for node in inputs],
                           graphed(graphs, partial(compile_aten, rung=rung)), prepare)
    outputs_that_leave(graphs, run.joint.results + len(run.joint.written))
    return run, graphs


@pytest.mark.parametrize("device", KINDS)
def test_a_compiled_function_with_saved_activations(device):
    """The real pipeline: forward results are copied out, activations stay in the pool, gradients are right."""
    def fn(x, w, b):
        h = torch.nn.functional.gelu(x @ w + b)
        return torch.nn.functional.layer_norm(h, (8,)).sum(1), h

    torch.manual_seed(0)
    w = torch.randn(4, 8, device=device, requires_grad=True)
    b = torch.randn(8, device=device, requires_grad=True)
    run, graphs = pipeline(fn, [torch.randn(6, 4, device=device), w, b], device, "loops" if device == "cpu" else "triton")
    kept = []
    for step in range(5):
        x = torch.randn(6, 4, device=device)
        y, h = run(x, w, b)
        y.square().sum().backward()
        expected = fn(x, w, b)
        kept.append((y, h, *expected))
        before = w.grad.clone(), b.grad.clone()
        w.grad = b.grad = None
        expected[0].square().sum().backward()
        torch.testing.assert_close(before, (w.grad, b.grad), rtol=1e-4, atol=1e-4)
        w.grad = b.grad = None
        with torch.no_grad():
            w -= 0.01
    for y, h, a, c in kept:
        torch.testing.assert_close((y, h), (a, c), rtol=1e-4, atol=1e-4)
    forward, *_, backward = graphs.members         # the last backward graph: the one without a tangent for h
    assert forward.counts["replayed"] == 4 and backward.counts["replayed"] == 4, (forward.disabled, backward.disabled)
    assert forward.results == 2
    if device == "cpu":
        assert not graphs.pending


@pytest.mark.parametrize("device", KINDS)
@pytest.mark.parametrize("rung", ["aot_eager", "default"])
def test_writes_to_inputs_that_are_copied_in(device, rung):
    def fn(x, count):
        x.add_(count)
        count.mul_(2)
        return x * 2, count + 0

    count = torch.ones(3, device=device)
    run, graphs = pipeline(fn, [torch.zeros(3, device=device), count.clone()], device, rung)
    for step in range(5):
        x = torch.zeros(3, device=device)
        before = x._version, count._version
        out, _ = run(x, count)
        assert x.tolist() == [2.0 ** step] * 3 and out.tolist() == [2.0 ** (step + 1)] * 3 and count.tolist() == out.tolist()
        assert x._version > before[0] and count._version > before[1]
    assert graphs.members[0].counts["replayed"] == 4


@pytest.mark.parametrize("device", KINDS)
def test_a_retained_graph_is_not_overwritten(device):
    def fn(x, w):
        y = (torch.exp(x @ w) @ w).tanh()
        return y.sum(), y.detach()

    x, w = (0.1 * torch.randn(64, 64, device=device) for _ in range(2))
    x.requires_grad_(), w.requires_grad_()
    expected = torch.autograd.grad(fn(x, w)[0], (x, w))
    run, graphs = pipeline(fn, [x, w], device, "default")
    for _ in range(4):
        out, _ = run(x, w)
        for retain in (True, True, False):
            torch.testing.assert_close(torch.autograd.grad(out, (x, w), retain_graph=retain), expected)
    forward, *_, backward = graphs.members
    assert backward.overwritten and forward.counts["replayed"] == 3


@pytest.mark.gpu
def test_forgotten_graphs_do_not_end_a_recording():
    """A cycle with a recorded graph in it, and a collector that runs at every allocation."""
    def record(function):
        x = torch.ones(4, device="cuda")
        replay, outputs = CudaRecorder().record(function, [x])
        return replay, outputs, x

    cycle = [record(lambda inputs: [inputs[0] + 1])]
    cycle.append(cycle)
    threshold, died = gc.get_threshold(), weakref.ref(cycle[0][1][0])

    def function(inputs):
        nonlocal cycle
        cycle = None
        return [inputs[0] * len([[n] for n in range(100)])]

    gc.set_threshold(1)
    try:
        replay, (out,), _ = record(function)
    finally:
        gc.set_threshold(*threshold)
    replay()
    gc.collect()
    assert out.tolist() == [100.0] * 4 and died() is None and gc.isenabled()
