"""Backward inside of the compiled function: gradients, `.grad`, what is freed, and what stays a graph break."""
import copy
import itertools

import pytest
import torch
import torch.nn.functional as F

import minicompile
from minicompile import logs
from minicompile.tools.explain import explain

pytestmark = pytest.mark.usefixtures("fresh")
RUNGS = ("eager", "aot_eager", "default")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)
        self.frozen = torch.nn.Parameter(torch.randn(8), requires_grad=False)
        self.unused = torch.nn.Parameter(torch.randn(2))

    def forward(self, x):
        return self.last(F.gelu(self.norm(self.first(x))) * self.frozen)


def batch():
    return torch.randn(5, 6), torch.randint(0, 3, (5,))


def plain(net, x, y):
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    return loss


def zeroed(net, x, y):
    for p in net.parameters():
        p.grad = None
    return plain(net, x, y)


def deleted(net, x, y):
    loss = plain(net, x, y)
    total = sum(p.grad.abs().sum() for p in net.parameters() if p.grad is not None)
    net.last.weight.grad = None
    return loss, total


def kept_zeros(net, x, y):
    net.zero_grad(set_to_none=False)
    return plain(net, x, y)


def micro_steps(net, x, y):
    net.zero_grad()
    total = 0.0
    for part, target in zip(x.split(2), y.split(2)):
        loss = F.cross_entropy(net.last(F.relu(net.first(part))), target) / 3
        loss.backward()
        total = total + loss.detach()
    return total


def retained(net, x, y):
    loss = F.cross_entropy(net(x), y)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss.detach()


def two_losses(net, x, y):
    hidden = net.first(x)
    one, two = hidden.square().mean(), F.relu(hidden).sum()
    torch.autograd.backward([one, two], [torch.tensor(0.5), None])
    return one.detach(), two


def some_inputs(net, x, y):
    loss = F.cross_entropy(net(x), y)
    loss.backward(inputs=[net.first.weight])
    return loss.detach()


def given_gradient(net, x, y):
    out = net(x)
    out.backward(torch.ones_like(out).expand(5, 3) * 2)
    return out.detach()


def shared_gradient(net, x, y):
    (net.first.bias + net.norm.weight).sum().backward()
    net.norm.bias.sum().backward()
    return x + 1


def transposed_gradient(net, x, y):
    (x @ net.first.weight.t()).square().sum().backward()
    return x * 2


def clipped(net, x, y):
    net.zero_grad()
    loss = plain(net, x, y)
    return loss.detach(), torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)


def manual_sgd(net, x, y):
    net.zero_grad()
    loss = plain(net, x, y)
    with torch.no_grad():
        for p in net.parameters():
            if p.grad is not None:
                p -= 0.1 * p.grad
    return loss.detach()


def functional(net, x, y):
    loss = F.cross_entropy(net(x), y)
    found = torch.autograd.grad(loss, [net.first.weight, net.last.bias])
    return loss.detach(), found[0] * 2, found[1]


def materialized(net, x, y):
    found = torch.autograd.grad(net.first(x).sum(), [net.first.bias, net.unused], materialize_grads=True)
    return found[0] + 1, found[1]


def wanted_twice(net, x, y):
    hidden, b = net.first(x), net.first.bias
    found = torch.autograd.grad(hidden.sum(), [b, hidden, b], retain_graph=True)
    hidden.square().sum().backward(inputs=[b, hidden, hidden, b])
    assert found[0] is found[2]
    return *found, hidden.grad


def of_an_activation(net, x, y):
    hidden = net.first(x)
    g, = torch.autograd.grad(F.relu(hidden).square().sum(), hidden)
    return g.sum(0), hidden.detach()


def with_autocast(net, x, y):
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(net.last(F.relu(net.first(x) + net.first(x * 2))), y)
    loss.backward()
    return loss.detach()


def with_dropout(net, x, y):
    loss = F.dropout(net(x), 0.5).square().sum()
    loss.backward()
    return loss.detach()


def fresh_leaf(net, x, y):
    z = torch.zeros(6, requires_grad=True)
    net.first(x + z).sum().backward()
    return z.grad * 2


def checkpointed(net, x, y):
    hidden = torch.utils.checkpoint.checkpoint(lambda x: F.dropout(torch.tanh(net.first(x)), 0.3), x, use_reentrant=False)
    loss = F.cross_entropy(net.last(hidden), y)
    loss.backward()
    return loss.detach()


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        return g * 2 + 0 * x


class Implicit(torch.autograd.Function):
    """Its backward differentiates what its forward has computed, more than once."""
    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = ctx.x.tanh() * 0.5
        return ctx.y.detach()

    @staticmethod
    def backward(ctx, g):
        v = g + torch.autograd.grad(ctx.y, ctx.x, g, retain_graph=True)[0]
        return torch.autograd.grad(ctx.y, ctx.x, v)[0]


@pytest.mark.parametrize("rung", RUNGS)
def test_a_backward_that_is_yet_to_come_has_freed_nothing(rung):
    @minicompile.compile(backend=rung, fullgraph=True)
    def f(x):
        return Implicit.apply(x * 2)

    x = torch.randn(5, requires_grad=True)
    again = x.detach().clone().requires_grad_()
    f(x).sum().backward()
    Implicit.apply(again * 2).sum().backward()
    assert torch.allclose(x.grad, again.grad)


def own_function(net, x, y):
    loss = Double.apply(net.first(x)).square().mean()
    loss.backward()
    return loss.detach()


def penalty(net, x, y):
    net.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward(create_graph=True)
    total = sum(p.grad.square().sum() for p in net.parameters() if p.grad is not None)
    net.zero_grad()
    (loss + total).backward()
    return loss.detach(), total.detach()


def with_a_history(net, x, y):
    """From the second call on it finds gradients that have one."""
    loss = F.cross_entropy(net(x), y)
    loss.backward(create_graph=True)
    net.last(x.repeat(1, 2)[:, :8]).square().mean().backward(create_graph=True)
    return net.last.weight.grad.square().sum()


def products(net, x, y):
    net.zero_grad()
    F.cross_entropy(net.last(net.first(x).tanh()), y).backward(create_graph=True)
    leaves = [net.first.weight, net.last.weight]
    return torch.autograd.grad([p.grad for p in leaves], leaves, [p.detach() for p in leaves])


PROGRAMS = [plain, zeroed, deleted, kept_zeros, micro_steps, retained, two_losses, some_inputs, given_gradient, shared_gradient,
            transposed_gradient, clipped, manual_sgd, functional, materialized, wanted_twice, of_an_activation, with_autocast,
            with_dropout, fresh_leaf, own_function, checkpointed, penalty, with_a_history, products]


def state(net):
    return {**{f"{n}.grad": p.grad for n, p in net.named_parameters()}, **dict(net.state_dict())}


def same(a, b, where):
    assert (a is None) == (b is None), where
    if a is not None:
        assert a.dtype == b.dtype and a.stride() == b.stride() and a.requires_grad == b.requires_grad, where
        torch.testing.assert_close(a, b, msg=lambda m: f"{where}: {m}")


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")
@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_as_eager(program, rung):
    net = Net()
    twin = copy.deepcopy(net)
    compiled = minicompile.compile(program, backend=rung, fullgraph=True)
    for call in range(4):
        x, y = batch()
        torch.manual_seed(call)
        expected = program(twin, x, y)
        torch.manual_seed(call)
        found = compiled(net, x, y)
        for i, (a, b) in enumerate(zip(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(expected), strict=True)):
            same(a, b, f"call {call}, output {i}")
        one, other = state(net), state(twin)
        for name in other:
            same(one[name], other[name], f"call {call}, {name}")
        with torch.no_grad():                         # each call starts from eager's state
            for p, q in zip(net.parameters(), twin.parameters()):
                p.copy_(q)


def test_a_gradient_that_is_there_is_added_to_in_place():
    net = Net()
    compiled = minicompile.compile(plain, fullgraph=True)
    compiled(net, *batch())
    kept = net.first.weight.grad
    before = kept.clone()
    compiled(net, *batch())
    assert net.first.weight.grad is kept and not torch.equal(kept, before)


def call_it(loss, backward):
    backward()


def call_it_behind_a_break(loss, backward):
    backward = loss.backward
    print(end="")
    backward()


def call_it_by_its_class(loss, backward):
    torch.Tensor.backward(loss * 1)


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("program", (call_it, call_it_behind_a_break, call_it_by_its_class))
def test_a_method_that_came_in_is_the_method(program, rung):
    p = torch.arange(3.0).requires_grad_()
    compiled = minicompile.compile(program, backend=rung)
    for _ in range(2):
        loss = p.square().sum()
        compiled(loss, loss.backward)
    assert p.grad.tolist() == [0, 4, 8]


def test_gradients_are_tensors_of_their_own():
    net = Net()
    minicompile.compile(shared_gradient, fullgraph=True)(net, *batch())
    one, other = net.first.bias.grad, net.norm.weight.grad
    assert torch.equal(one, other) and one.data_ptr() != other.data_ptr()


@pytest.mark.parametrize("rung", RUNGS)
def test_a_second_backward_raises_as_in_eager(rung):
    def both(net, x):
        loss = net.first(x).square().mean()
        loss.backward()
        return loss, net.last.bias.sum()
    loss, other = minicompile.compile(both, backend=rung, fullgraph=True)(Net(), batch()[0])
    assert loss.requires_grad
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    other.backward()                                    # nothing of it was freed


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("other", [torch.Tensor.detach, torch.t, lambda h: h[0], lambda h: h.view(-1)])
def test_what_was_used_up_leaves_beside_a_view_of_it(rung, other):
    def step(net, x):
        h = net.first(x).tanh()
        h.square().mean().backward()
        return h, other(h)
    net, (x, *_) = Net(), batch()
    got, want = minicompile.compile(step, backend=rung, fullgraph=True)(net, x), step(net, x)
    torch.testing.assert_close(got, want)
    assert [t.requires_grad for t in got] == [t.requires_grad for t in want]
    assert got[0].untyped_storage().data_ptr() == got[1].untyped_storage().data_ptr()
    with pytest.raises(RuntimeError, match="second time"):
        got[0].sum().backward()


@pytest.mark.parametrize("rung", RUNGS)
def test_what_backward_did_not_free_can_be_differentiated(rung):
    net = Net()

    def sums(x):
        loss = net.first(x).sum()                       # no derivative of this saves a tensor of the graph but x
        loss.backward(retain_graph=True)
        return loss
    loss = minicompile.compile(sums, backend=rung, fullgraph=True)(batch()[0])
    before = net.first.bias.grad.clone()
    loss.backward()
    torch.testing.assert_close(net.first.bias.grad, 2 * before)


HISTORIES = {"leaf": lambda x, w: x, "activation": lambda x, w: x * w, "view of one": lambda x, w: (x * w)[:], "itself": lambda x, w: w,
             "view of itself": lambda x, w: w[:], "leaf that is a view": lambda x, w: x.detach()[:].requires_grad_()}


@pytest.mark.parametrize("rung", ("aot_eager", "default"))
@pytest.mark.parametrize("program", (
    lambda x, w: torch.autograd.grad((x * w).sum(), w), lambda x, w: torch.autograd.grad((x * w).sum(), [x, w]),
    lambda x, w: torch.autograd.grad((x * w).sum(), x), lambda x, w: ((x * w).sum().backward(), w.grad.clone())[1:],
), ids=("w", "x and w", "x", "backward"))
def test_a_gradient_also_comes_by_what_another_input_was_computed_from(program, rung):
    for first, then in itertools.permutations(HISTORIES, 2):
        minicompile.reset()
        compiled = minicompile.compile(program, backend=rung)
        for kind in (first, then):
            found = []
            for function in (compiled, program):
                x, w = torch.arange(1., 4.).requires_grad_(), torch.full((3,), 3.).requires_grad_()
                found.append([g.tolist() for g in function(HISTORIES[kind](x, w), w)])
            assert found[0] == found[1], (first, then, kind)


BREAKS = {
    "a tensor that was computed before": lambda net, x, h: (h * net.norm.weight).sum().backward(),
    "into a tensor that was computed before": lambda net, x, h: torch.autograd.grad((h * net.norm.weight).sum(), net.norm.weight),
    "itself requires a gradient": lambda net, x, h: [net.first(x).square().sum().backward(create_graph=c) for c in (True, False)],
    "second time": lambda net, x, h: [loss.backward() for loss in [net.first(x).square().sum()] * 2],
    "does not require": lambda net, x, h: x.sum().backward(),
    "is not used": lambda net, x, h: torch.autograd.grad(net.first.bias.sum(), net.last.bias),
}


@pytest.mark.parametrize("reason", BREAKS)
def test_what_stays_a_break_says_why(reason):
    net = Net()
    with pytest.raises(minicompile.GraphBreakError, match=reason):
        minicompile.compile(BREAKS[reason], fullgraph=True)(net, batch()[0], net.first(batch()[0]))


def same_name(a, b):
    assert a == b


def hooked(net, order):
    """Hooks of both kinds, some of which change gradients, and one that keeps what it gets."""
    net.first.weight.register_hook(lambda g: g * 2)
    net.first.weight.register_hook(lambda g: order.append("weight"))
    net.last.bias.register_hook(lambda g: order.append(g))
    net.norm.bias.register_hook(lambda g: g.flip(0).flip(0))
    for name, p in net.named_parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda p, name=name: order.append(name))
    net.last.weight.register_post_accumulate_grad_hook(lambda p: order.append(p.grad.mul_(3).abs().sum()))
    return net


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("program", [plain, zeroed, micro_steps, functional, retained], ids=lambda p: p.__name__)
def test_hooks_of_leaves_are_in_the_graph(program, rung):
    orders = [], []
    net = Net()
    twin = hooked(copy.deepcopy(net), orders[1])
    hooked(net, orders[0])
    compiled = minicompile.compile(program, backend=rung, fullgraph=True)
    for call in range(3):
        x, y = batch()
        found, expected = compiled(net, x, y), program(twin, x, y)
        for i, (a, b) in enumerate(zip(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(expected), strict=True)):
            same(a, b, f"call {call}, output {i}")
        one, other = state(net), state(twin)
        for name in other:
            same(one[name], other[name], f"call {call}, {name}")
        assert len(orders[0]) == len(orders[1])
        for a, b in zip(*orders):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4) if isinstance(b, torch.Tensor) else same_name(a, b)


def test_an_optimizer_in_the_hooks():
    nets = [Net()]
    nets.append(copy.deepcopy(nets[0]))
    for net in nets:
        for p in net.parameters():
            if p.requires_grad:
                optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)

                def update(p, optimizer=optimizer):
                    optimizer.step()
                    optimizer.zero_grad()
                p.register_post_accumulate_grad_hook(update)
    compiled = minicompile.compile(plain, fullgraph=True)
    for _ in range(4):
        x, y = batch()
        same(compiled(nets[0], x, y).detach(), plain(nets[1], x, y).detach(), "loss")
    for name, value in state(nets[1]).items():
        same(state(nets[0])[name], value, name)


def test_a_hook_that_breaks_is_called_by_the_engine():
    net, seen = Net(), []
    net.first.weight.register_hook(lambda g: seen.append(float(g.sum())))
    compiled = minicompile.compile(plain)
    for _ in range(3):
        compiled(net, *batch())
    assert len(seen) == 3
    with pytest.raises(minicompile.GraphBreakError):
        minicompile.compile(plain, fullgraph=True)(net, *batch())


def test_a_hook_that_comes_later_is_noticed():
    net, seen = Net(), []
    compiled = minicompile.compile(plain)
    compiled(net, *batch())
    compiled(net, *batch())
    net.first.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm()))
    compiled(net, *batch())
    assert len(seen) == 1


def test_one_graph():
    net = Net()
    assert explain(clipped)(net, *batch()).graph_count == 1


def returned(a, b, x):
    old, a.grad = a.grad, None
    (a * x).sum().backward()
    return old


def swapped(a, b, x):
    a.grad, b.grad = b.grad, a.grad
    return x + 1


def handed_over(a, b, x):
    old, a.grad = a.grad, None
    (a * x).sum().backward()
    b.grad = old


def put_away(a, b, x):
    kept = [a.grad, {"b": b.grad}]
    a.grad = b.grad = None
    (a * b * x).sum().backward()
    return kept


def tagged(a, b, x):
    tag, a.grad = a.grad.tag, None
    (a * x).sum().backward()
    return tag, x * 2


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("program", [returned, swapped, handed_over, put_away, tagged], ids=lambda p: p.__name__)
def test_an_old_gradient_that_is_needed_is_not_dropped(program, rung):
    found = []
    for function in (program, minicompile.compile(program, backend=rung, fullgraph=True)):
        a, b = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2) * 2)
        a.grad, b.grad = torch.ones(2) * 3, torch.ones(2) * 5
        a.grad.tag = {"written": "by the program"}
        found.append(str((function(a, b, torch.ones(2) * 7), a.grad, b.grad)))
    assert found[0] == found[1]


def ends_without_gradients(net, x, y):
    loss = plain(net, x, y)
    for p in net.parameters():
        p.grad = None
    return loss


@pytest.mark.parametrize("asks", [True, False])
def test_a_gradient_that_is_none_before_and_after_is_not_assigned(asks):
    """Where the slot was read it is guarded; where it was only written, a gradient that is there has to go."""
    def step(net, x):
        assert not asks or net.first.weight.grad is None
        net.first.weight.grad = None
        return net.first(x)

    nets = [Net(), Net()]
    nets[1].load_state_dict(nets[0].state_dict())
    (x, _), texts, compiled = batch(), [], minicompile.compile(step)
    logs.watchers.append(watch := lambda kind, **data: texts.append(data["captured"].body) if kind == "captured" else None)
    try:
        for given in (None, None, torch.ones(1), None):
            for net, run in zip(nets, (step, compiled)):
                net.first.weight.grad = None if given is None or asks else given.expand_as(net.first.weight).clone()
            torch.testing.assert_close(*(run(net, x) for net, run in zip(nets, (step, compiled))))
            assert nets[1].first.weight.grad is None
    finally:
        logs.watchers.remove(watch)
    assert [".grad" in text for text in texts] == [not asks]


def test_a_step_that_ends_without_gradients_also_ends_without_those_that_it_finds():
    nets = [Net(), Net()]
    nets[1].load_state_dict(nets[0].state_dict())
    x, y = batch()
    compiled = minicompile.compile(ends_without_gradients)
    for found in (False, False, True, False, True):
        for net, run in zip(nets, (ends_without_gradients, compiled)):
            for p in net.parameters():
                p.grad = torch.ones_like(p) if found else None
            run(net, x, y)
            assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("shapes", [((4, 0), (2, 0)), ((0, 4), (2, 4)), ((0, 0), (2, 0))])
def test_gradients_of_empty_parameters_have_their_strides(shapes):
    grads = []
    for compiled in (False, True):
        w, x = torch.nn.Parameter(torch.zeros(shapes[0])), torch.zeros(shapes[1])

        def step(x):
            torch.nn.functional.linear(x, w).sum().backward()
        (minicompile.compile(step, backend="aot_eager") if compiled else step)(x)
        grads.append((w.grad.shape, w.grad.stride(), w.grad.dtype))
    assert grads[0] == grads[1]


@pytest.mark.parametrize("owner", ["optimizer", "module"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_become_zeros_are_one_graph(owner, set_to_none):
    found = []
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    for compiled in (False, True):
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x):
            (optimizer if owner == "optimizer" else net).zero_grad(set_to_none=set_to_none)
            loss = net(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()
        run, kept, losses = minicompile.compile(step, fullgraph=True) if compiled else step, None, []
        for _ in range(3):
            losses.append(run(x).item())
            kept, same = net.weight.grad, kept is net.weight.grad
        found.append((losses, same))
    torch.testing.assert_close(found[0][0], found[1][0])
    assert found[0][1] == found[1][1] == (not set_to_none)


@pytest.mark.parametrize("rung", RUNGS)
def test_what_lies_before_the_tensor_asked_for_is_not_used_up(rung):
    """`grad(loss, w)` runs what computed the loss of w, and not what computed w."""
    def f(x):
        w = x.sin() * x
        v = w * 2
        (g,) = torch.autograd.grad((w * w).sum() + v.sum(), w)
        return g, w

    def consumed(x):
        w = x.sin() * x
        v = w * w
        (g,) = torch.autograd.grad(v.sum(), w)
        return g, v
    gradients = []
    for fn in (f, minicompile.compile(f, backend=rung)):
        x = torch.arange(3.0, requires_grad=True)
        g, w = fn(x)
        w.sum().backward()
        gradients.append((g, x.grad))
    torch.testing.assert_close(*gradients)
    for fn in (consumed, minicompile.compile(consumed, backend=rung)):
        with pytest.raises(RuntimeError, match="second time"):
            fn(torch.arange(3.0, requires_grad=True))[1].sum().backward()


def test_clipping_the_step_and_zeroing_what_backward_has_left_is_one_graph():
    """The gradients come from outside, are written to by clipping, and are then asked for their history."""
    def trained(compiled):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        optimizer, norms = torch.optim.AdamW(net.parameters(), 0.1), []

        def finish():
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            return norm, sum(p.grad.is_leaf for p in net.parameters())

        last = minicompile.compile(finish, backend="aot_eager", fullgraph=True) if compiled else finish
        for _ in range(3):
            for _ in range(2):
                net(torch.randn(3, 4)).sum().backward()
            norms.append(last())
        return norms, list(net.parameters()), [p.grad for p in net.parameters()]

    torch.testing.assert_close(trained(True), trained(False))


@pytest.mark.parametrize("write", [lambda x, view: view.mul_(2), lambda x, view: x.mul_(2), lambda x, view: x[2:].mul_(2)])
def test_a_view_that_is_older_than_a_write_gets_a_history_when_its_base_asks_for_a_gradient(write):
    def program(x):
        view = x[1:]
        write(x, view)
        x.requires_grad_()
        return (x * x).sum() + view.sum()

    grads = []
    for f in program, minicompile.compile(program, backend="aot_eager"):
        x = torch.arange(4.0)
        f(x).backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


def slope_of_a_reshaped(x):
    v = x.amax(0, keepdim=True)
    v.data = x.data * 2
    return torch.autograd.grad(v[0].sum() * v.mean(), v)


def slope_of_a_reshaped_leaf(x):
    y = x * 3
    x.data = x.data.reshape(-1)[:2]
    return torch.autograd.grad((x * x).sum(), x), y


def backward_of_a_reshaped_leaf(x):
    y = x * 3
    x.data = x.data.reshape(-1)[:2]
    (x * x).sum().backward()
    return x.grad, y


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("program", [slope_of_a_reshaped, slope_of_a_reshaped_leaf, backward_of_a_reshaped_leaf])
def test_a_gradient_has_the_form_that_the_engine_remembers(program, rung):
    """It sums a gradient to that form, or raises."""
    def outcome(f):
        x = torch.arange(12.0).reshape(3, 4).requires_grad_()
        try:
            return [t.detach() for t in torch.utils._pytree.tree_leaves(f(x))]
        except RuntimeError as error:
            return str(error).partition(" - ")[2]

    assert str(outcome(minicompile.compile(program, backend=rung))) == str(outcome(program))


@pytest.mark.parametrize("differentiate", [
    lambda w: (w * 0).sqrt().sum().backward(), lambda w: torch.autograd.grad((w * 0).sqrt().sum(), w)])
def test_anomaly_detection_finds_a_nan_of_a_backward_inside(differentiate):
    """Also where a version is there already, in whose graph nobody looks."""
    fast, w = minicompile.compile(differentiate, backend="aot_eager"), torch.ones(2, requires_grad=True)
    fast(w), fast(w)
    with torch.autograd.set_detect_anomaly(True), pytest.raises(RuntimeError, match="returned nan values"):
        fast(w)
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        fast(w)


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("create", [False, True])
def test_gradients_that_are_made_of_nothing(rung, create):
    """With `create_graph` they are leaves, and can be differentiated on."""
    def f(x, w):
        a, b = torch.autograd.grad((x * 3).sum(), [x, w], create_graph=create, materialize_grads=True)
        c = torch.autograd.grad(b, b, torch.ones(2), materialize_grads=True) if create else None
        return a, b, c, a.requires_grad, b.requires_grad, b.is_leaf

    outcomes = [repr(g(torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)))
                for g in (f, minicompile.compile(f, backend=rung, fullgraph=True))]
    assert outcomes[0] == outcomes[1]


DETACHED = {"nothing": lambda y, v: None, "it": lambda y, v: y.add_(1), "a part": lambda y, v: y[0].mul_(2),
            "its view": lambda y, v: v.mul_(2)}


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("written", DETACHED)
def test_views_of_a_tensor_that_loses_its_history_keep_theirs_until_it_is_written_to(written, rung):
    def f(x):
        y = x * 2
        view = y.view(-1)
        y.detach_()
        DETACHED[written](y, view)
        return view

    found = []
    for g in (f, minicompile.compile(f, backend=rung)):
        x = torch.ones(3, 2, requires_grad=True)
        try:
            g(x).sum().backward()
            found.append(None if x.grad is None else x.grad.tolist())
        except RuntimeError as e:
            found.append(str(e))
    assert found[0] == found[1]
