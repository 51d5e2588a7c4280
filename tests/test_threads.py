"""Threads that call the same compiled functions, from the first call on, with inputs of their own."""
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from threading_help import eager_switching
from torch import nn

import minicompile
from minicompile.ch02_guards import codegen

pytestmark = pytest.mark.usefixtures("fresh")


def softmax(x, n):
    h = torch.softmax(x * n, -1)
    return (h + x.mean()).sin().sum(0)


def with_breaks(x, n):
    y = x * 2
    if y.sum() > 0:
        y = y + n
    print(end="")
    return torch.cat([y, y.flip(0)]).cos()


def writes(x, n):
    y = x.clone()
    y[0] += n
    y.t().mul_(3)
    z = torch.zeros(x.shape[0], x.shape[1])
    for i in range(2):
        z[i] = y[i].relu()
    return y @ z.t()


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, n):
        ctx.save_for_backward(x)
        ctx.n = n
        return x.tanh() * n

    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        return g * ctx.n * x.cos(), None


def own_gradient(x, n):
    return Double.apply(x, n).exp()


def two_losses(x, n):
    return x.sin().sum() * n, (x * x).mean(0), x.argmax(1)


def autocast(x, n):
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(x, x)
    with torch.no_grad():
        z = x.sum()
    return y.float() * z + n


PROGRAMS = [softmax, with_breaks, writes, own_gradient, two_losses, autocast]


def answer(f, x, n):
    x = x.clone().requires_grad_()
    out = f(x, n)
    outs = out if isinstance(out, tuple) else (out,)
    sum(o.sum() for o in outs if o.requires_grad).backward()
    return [o.detach() for o in outs] + [x.grad]


@pytest.mark.parametrize("backend", ["aot_eager", "cpp"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_one_function(program, backend):
    """Sizes and numbers differ, so that threads compile further versions while others run."""
    cases = [(torch.randn(3 + number % 3, 4), number / 2) for number in range(6)]
    expected = [answer(program, *case) for case in cases]
    start = threading.Barrier(6)

    def work(number):
        start.wait()
        for i in range(12):
            chosen = (number + i * (i > 3)) % 6
            got = answer(fast, *cases[chosen])
            torch.testing.assert_close(got, expected[chosen], rtol=1e-4, atol=1e-4)
    fast = minicompile.compile(program, backend=backend)
    with eager_switching(), ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(work, number) for number in range(6)]:
            done.result(timeout=200)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.calls = nn.Linear(4, 8), nn.LayerNorm(8), 0

    def forward(self, x):
        self.calls += 1
        return self.b(self.a(x)).relu().sum(-1)


@pytest.mark.parametrize("backend", ["aot_eager", "cpp"])
def test_modules_and_their_gradients(backend):
    """A module per thread, of one class: they share compiled code."""
    def work(number):
        torch.manual_seed(number)
        net, x = Net(), torch.randn(2 + number, 4)
        twin, fast = Net(), minicompile.compile(net, backend=backend)
        twin.load_state_dict(net.state_dict())
        for i in range(10):
            for model in (fast, twin):
                model.zero_grad()
                model(x * i).sum().backward()
            torch.testing.assert_close([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])
        assert net.calls == 10
    with eager_switching(), ThreadPoolExecutor(5) as pool:
        for done in [pool.submit(work, number) for number in range(5)]:
            done.result(timeout=200)


def test_threads_that_wait_for_a_version_take_it():
    """Threads that begin together with batches of all sizes get as many versions as one thread would make."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    compiled, start, seen = minicompile.compile(model, backend="eager"), threading.Barrier(8), []
    minicompile.logs.watchers.append(watch := lambda kind, **data: seen.append(kind))

    def serve(size):
        start.wait()
        x = torch.randn(size, 8)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))

    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(serve, range(2, 10)))
    finally:
        minicompile.logs.watchers.remove(watch)
    assert seen.count("entry") <= 3


def test_reset_while_others_call():
    stop, x = threading.Event(), torch.randn(5)
    fast = [minicompile.compile(f, backend="eager") for f in (lambda x: x.sin() + 1, lambda x: x.cos().sum(), lambda x: (x * 2).tolist())]

    def call():
        while not stop.is_set():
            assert torch.equal(fast[0](x), x.sin() + 1) and torch.equal(fast[1](x), x.cos().sum()) and fast[2](x) == (x * 2).tolist()
    with eager_switching(), ThreadPoolExecutor(4) as pool:
        calling = [pool.submit(call) for _ in range(4)]
        for _ in range(15):
            minicompile.reset()
            stop.wait(0.05)
        stop.set()
        for done in calling:
            done.result(timeout=100)


def test_what_is_disabled_stays_so():
    @minicompile.disable(recursive=False)
    def f(x):
        seen.append(minicompile.is_compiling())
        return x + 1

    seen, g = [], minicompile.compile(lambda x: f(x) * 2, backend="eager")
    for _ in range(2):
        g(torch.ones(2))
        minicompile.reset()
    assert seen == [False, False] and minicompile.explain(g)(torch.ones(2)).graph_break_count == 1


def test_a_version_that_another_thread_makes_while_the_question_is_written_is_found(monkeypatch):
    def f(x, name):
        return x + len(name)

    compiled, x, limit = minicompile.compile(f, backend="eager", fullgraph=True), torch.ones(2), minicompile.config.recompile_limit
    for size in range(1, limit):
        compiled(x, "a" * size)
    write = codegen.build_question

    def while_another_compiles(*args):
        monkeypatch.setattr(codegen, "build_question", write)
        thread = threading.Thread(target=compiled, args=(x, "a" * limit))
        thread.start()
        thread.join()
        return write(*args)

    monkeypatch.setattr(codegen, "build_question", while_another_compiles)
    for size in (1, *range(1, limit + 1), *range(1, limit + 1)):         # one more version would be one too many
        assert compiled(x, "a" * size)[0] == 1 + size
    assert codegen.build_question is write


def test_a_thread_with_a_small_stack():
    compiled, results = minicompile.compile(with_breaks, backend="eager"), []
    before = threading.stack_size(256 * 1024)
    try:
        thread = threading.Thread(target=lambda: results.extend(compiled(torch.ones(2, 2), n) for n in range(3)))
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    for n, result in enumerate(results):
        torch.testing.assert_close(result, with_breaks(torch.ones(2, 2), n))
    assert len(results) == 3
