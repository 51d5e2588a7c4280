"""`x.data = value` inside of a compiled function: which memory is whose afterwards, gradients, and what stays a graph break."""
import copy

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import minicompile
from minicompile.tools.explain import explain

pytestmark = pytest.mark.usefixtures("fresh")
RUNGS = ("eager", "aot_eager", "default")


class Pair:
    """Two models, one of which follows the other, and tensors of a step."""
    def __init__(self):
        torch.manual_seed(0)
        self.q, self.k = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.q.parameters(), lr=0.1, momentum=0.9)
        self.a, self.b = torch.randn(3, 4), torch.randn(3, 4)
        self.w = torch.nn.Parameter(torch.randn(4))

    def state(self):
        tensors = {**dict(self.q.named_parameters()), **{f"k.{n}": p for n, p in self.k.named_parameters()},
                   "a": self.a, "b": self.b, "w": self.w}
        return {n: t for n, t in (*tensors.items(), *((f"{n}.grad", t.grad) for n, t in tensors.items()))}


def train(s, x):
    loss = F.mse_loss(s.q(x), x)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


def followed(s, x):
    with torch.no_grad():
        for p, q in zip(s.k.parameters(), s.q.parameters()):
            p.data = p.data * 0.9 + q.data * 0.1
        target = s.k(x)
    return train(s, x), target


def followed_after(s, x):
    loss = train(s, x)
    for p, q in zip(s.k.parameters(), s.q.parameters()):
        p.data = p * 0.9 + q.data * 0.1
    return loss


def sharpness_aware(s, x):
    F.mse_loss(s.q(x), x).backward()
    before = [p.data for p in s.q.parameters()]
    for p in s.q.parameters():
        p.data = p.data + 0.1 * p.grad
    s.optimizer.zero_grad()
    loss = F.mse_loss(s.q(x), x)
    loss.backward()
    for p, old in zip(s.q.parameters(), before):
        p.data = old
    s.optimizer.step()
    return loss


def swapped(s, x):
    s.a.data, s.b.data = s.b.data, s.a.data
    return s.a * x, s.b + 1


def chained(s, x):
    s.a.data = s.b
    s.b.data = x * 2
    s.a.data.add_(1)
    return s.a * 2, s.b * 3


def old_views_stay(s, x):
    view, row = s.a.data, s.a[1]
    s.a.data = x * 3
    view.add_(1)
    row.mul_(2)
    return view, row, s.a + 0


def shared_afterwards(s, x):
    fresh = x * 2
    s.a.data = fresh
    fresh.add_(1)
    s.a.mul_(3)
    return fresh, s.a[0]


def memory_of_another(s, x):
    s.a.data = s.b.data
    s.a.mul_(1.5)
    return s.a + s.b


def of_itself(s, x):
    s.a.data = s.a
    return s.a.add_(1)


def cut_from_one(s, x):
    flat = torch.nn.utils.parameters_to_vector(s.k.parameters()) * 0.5
    torch.nn.utils.vector_to_parameters(flat, s.k.parameters())
    flat.add_(1)
    return s.k(x)


def made_here(s, x):
    t = x * 2
    t.data = s.a
    t.add_(1)
    return t, t * 2


def projected(s, x):
    loss = train(s, x)
    for p in s.q.parameters():
        p.data.clamp_(-0.3, 0.3)
        p.data = p.data / p.data.norm()
    return loss


def written_by_the_optimizer(s, x):
    s.q.weight.data = s.q.weight.data * 0.5
    return train(s, x), s.q.weight.detach() * 2


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("program", [followed, followed_after, sharpness_aware, swapped, chained, old_views_stay, shared_afterwards,
                                     memory_of_another, of_itself, cut_from_one, made_here, projected, written_by_the_optimizer])
def test_as_eager_in_one_graph(program, rung):
    compare(program, rung, 1)


def weights_of_the_forward(s, x):
    s.q.weight.data = F.normalize(s.q.weight.data)
    return F.mse_loss(s.q(x), x)


def history_of_the_former(s, x):
    y = x.sum(0) * s.w
    s.w.data = s.w.data * 2
    return y.square().sum()


def saved_by_another(s, x):
    y = s.q(x) * s.a                    # the derivative of this finds what is in `a` then
    s.a.data = s.a * 2
    return y.sum()


def numbers_of_the_former(s, x):
    y = s.q(x) * s.a.data               # and of this, what it was
    s.a.data = s.a * 2
    return y.sum()


def backward_in_between(s, x):
    y = (s.q(x) * s.a * s.w).sum()
    s.a.data = s.a * 2
    y.backward()
    return s.w.grad * 1


def twice_through(s, x):
    y = (s.q(x) * s.w).square().sum()
    y.backward(retain_graph=True)
    s.w.data = s.w.data + 1
    y.backward()
    return y.detach()


def in_a_checkpoint(s, x):
    def f(x):
        s.a.data = s.a * 2
        return s.q(x) * x
    return checkpoint(f, x, use_reentrant=False).sum()


def another_shape(s, x):
    s.a.data = x.t().contiguous()
    y = s.a.sum(1)
    s.a.data = s.b
    return y


def another_order(s, x):
    s.a.data = x.t().contiguous().t()
    return s.a * 2


def another_dtype(s, x):
    s.a.data = x.double()
    return s.a * 2


def of_a_view(s, x):
    row = s.a[0]
    row.data = x[1] * 2
    return row + 1, s.a * 2


def requires_one_afterwards(s, x):
    s.a.data = x * 2
    s.a.requires_grad_()
    return (s.a * s.w).sum()


def a_history_afterwards(s, x):
    s.a.data = x * 2
    s.a.mul_(s.w)
    return s.a + 1


def of_what_is_saved(s, x):
    t = s.q(x)
    y = (t * t).sin()                   # eager has saved `t` and what `t * t` was
    t.data = t.data * 0.5
    return y.sum()


def of_what_is_saved_as_a_view(s, x):
    t = s.q(x)
    print(end="")
    y = t[1:].sigmoid() * t[1:]
    t.data = t.data * 0.5
    return y.sum()


def fewer_rows(s, x):
    t = s.q(x)
    t.data = t.data[:1]                 # the gradient of `t` keeps its three rows
    return (t * s.q(x)).sum()


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("program", [
    of_what_is_saved, of_what_is_saved_as_a_view, fewer_rows, a_history_afterwards,
    weights_of_the_forward, history_of_the_former, saved_by_another, numbers_of_the_former, backward_in_between, twice_through,
    in_a_checkpoint, another_shape, another_order, another_dtype, of_a_view, requires_one_afterwards])
def test_as_eager(program, rung):
    compare(program, rung)


def compare(program, rung, graphs=None):
    ours, plain = Pair(), Pair()
    f = minicompile.compile(program, backend=rung)
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(3, 4)
        got, expected = f(ours, x.clone()), program(plain, x.clone())
        same(got, expected)
        if isinstance(expected, torch.Tensor) and expected.dim() == 0 and expected.requires_grad and graphs is None:
            got.backward()
            expected.backward()
        same(ours.state(), plain.state())
        same(shared(ours, got), shared(plain, expected))
    if graphs is not None:
        minicompile.reset()
        report = explain(program, backend=rung)(Pair(), torch.randn(3, 4))
        assert len(report.graphs) == graphs and not report.breaks, report


def same(a, b):
    if isinstance(b, torch.Tensor):
        assert type(a) is type(b) and a.requires_grad == b.requires_grad and a.stride() == b.stride()
        torch.testing.assert_close(a, b)
    elif isinstance(b, (tuple, list)):
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(b, dict):
        assert a.keys() == b.keys()
        for key in b:
            same(a[key], b[key])
    else:
        assert a == b


def shared(s, results):
    """Which tensors lie in one memory."""
    tensors = [*(t for t in s.state().values() if t is not None), *(results if isinstance(results, tuple) else (results,))]
    return [[i for i, u in enumerate(tensors) if u.untyped_storage()._cdata == t.untyped_storage()._cdata] for t in tensors]


def test_two_names_of_one_tensor():
    def f(a, b):
        a.data = b * 2
        return a + b

    compiled, x = minicompile.compile(f), torch.ones(3)
    assert torch.equal(compiled(x, torch.full((3,), 2.0)), torch.full((3,), 6.0))
    x = torch.ones(3)
    assert torch.equal(compiled(x, x), torch.full((3,), 4.0)) and x[0] == 2


@pytest.mark.parametrize("write", [lambda w: w.add_(1), lambda w: None])
def test_what_is_written_afterwards_counts(write):
    """A history outside has saved the tensor: a write is noticed, an assignment is not."""
    def step(w, x):
        with torch.no_grad():
            w.data = x * 2
            write(w)

    seen = []
    for f in step, minicompile.compile(step):
        w, x = torch.ones(3, requires_grad=True), torch.full((3,), 5.0)
        y = (w * w).sum()
        f(w, x)
        try:
            y.backward()
            seen.append(w.grad)
        except RuntimeError as error:
            seen.append(type(error))
    same(*seen)


def test_a_counter_gets_other_memory():
    w = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizers = [torch.optim.Adam([p], lr=0.1) for p in w]

    def step(p, optimizer):
        p.grad = p.detach() * 2
        optimizer.step()
        state = optimizer.state[p]
        state["step"].data = state["step"] + 3
        optimizer.step()

    compiled = minicompile.compile(step)
    for _ in range(3):
        compiled(w[0], optimizers[0])
        step(w[1], optimizers[1])
        same(w[0].detach(), w[1].detach())
        assert optimizers[0].state[w[0]]["step"] == optimizers[1].state[w[1]]["step"]


def test_hooks_of_the_tensor_stay():
    seen = []

    def step(w, x):
        w.data = w.data * 0.5
        (w * x).sum().backward()

    for f in step, minicompile.compile(step):
        w = torch.nn.Parameter(torch.ones(3))
        w.register_hook(lambda g: g * 3)
        w.register_post_accumulate_grad_hook(lambda p: None if p.grad.add_(1) is None else None)
        for i in range(2):
            f(w, torch.full((3,), 2.0 + i))
        seen.append((w.detach(), w.grad))
    same(*seen)


@pytest.mark.parametrize("program, reason", [
    (another_order, "the new memory has another form"), (another_dtype, "the new memory has another form"),
    (of_a_view, "it is a view, or has a history"), (of_what_is_saved, "a derivative has saved it"),
    (saved_by_another, "whose attribute data was set since")])
def test_what_stays_a_break_says_why(program, reason):
    report = explain(program)(Pair(), torch.randn(3, 4))
    assert reason in (*report.breaks, *report.skipped)[0].reason


class Masked(torch.nn.Linear):
    def __init__(self, way):
        super().__init__(4, 4)
        self.register_buffer("mask", torch.ones(4, 4).tril())
        self.way = way

    def forward(self, x):
        if self.way == "in place":
            self.weight.data *= self.mask
        else:
            self.weight.data = self.weight.data.mul_(self.mask).view(4, 4)
        return F.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("way", ["in place", "viewed"])
@pytest.mark.parametrize("backend", RUNGS)
def test_the_memory_that_a_tensor_has_is_no_other(backend, way):
    torch.manual_seed(0)
    model = torch.nn.Sequential(Masked(way), torch.nn.Tanh(), Masked(way))
    models = copy.deepcopy(model), copy.deepcopy(model)
    compiled = minicompile.compile(models[1], backend=backend, fullgraph=True)
    for n in (3, 5, 5):
        x = torch.randn(n, 4)
        for model, run in zip(models, (models[0], compiled)):
            run(x).square().sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
        for p, q in zip(*(model.parameters() for model in models)):
            torch.testing.assert_close(p, q)
            assert p._version == q._version


@pytest.mark.parametrize("backend", RUNGS)
@pytest.mark.parametrize("given", [False, True])
def test_a_view_of_the_former_memory_gets_the_history_of_its_base(backend, given):
    def f(x, y):
        y = y if given else torch.ones(3, 2)
        view = y.view(-1)
        y.data = y.data * 0.5
        y.add_(x)
        return view * 2, view.requires_grad

    found = []
    for g in (f, minicompile.compile(f, backend=backend)):
        x = torch.ones(3, 2, requires_grad=True)
        out, requires_grad = g(x, torch.ones(3, 2))
        out.sum().backward()
        found.append((out.tolist(), requires_grad, x.grad is None or x.grad.tolist()))
    assert found[0] == found[1]


def test_a_transposition_of_the_memory_that_a_tensor_has_is_another_form():
    def turned(w, x):
        w.data = w.data.t()
        return x @ w
    w, x = torch.nn.Parameter(torch.randn(3, 3)), torch.randn(2, 3)
    before = w.detach().clone()
    assert torch.allclose(minicompile.compile(turned, backend="aot_eager")(w, x), x @ before.t()) and w.stride() == (1, 3)
