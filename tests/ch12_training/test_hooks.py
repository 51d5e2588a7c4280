"""Hooks on activations and modules, retained gradients, leaves made inside and derivatives of derivatives: in one graph, as eager."""
import copy

import pytest
import torch
import torch.nn.functional as F
from recorders import Captures

import minicompile

pytestmark = pytest.mark.usefixtures("fresh")
RUNGS = ("eager", "aot_eager", "default")


class Several(torch.nn.Module):
    def forward(self, x, n, z):
        return x * 2 + z, x.tanh(), n


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3)
        self.several, self.seen = Several(), []

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


def changed(net, x, y):
    h = net.first(x)
    h.register_hook(lambda g: g * 2)
    h.register_hook(torch.sign)
    F.cross_entropy(net.last(F.relu(h) + h), y).backward()


def watched(net, x, y):
    h = net.first(x)
    h.register_hook(lambda g: net.seen.append(g.sum()))
    F.cross_entropy(net.last(F.relu(h)), y).backward()


def one_after_the_other(net, x, y):
    """The second hook sees what the first has made of the gradient; the bias is reached behind both, and past them."""
    a = net.first(x)
    a.register_hook(lambda g: net.seen.append(g.norm()))
    b = torch.tanh(a)
    b.register_hook(lambda g: g.clamp(-0.01, 0.01))
    loss = F.cross_entropy(net.last(b), y) + net.first.bias.square().sum()
    loss.backward()
    return loss.detach()


def side_by_side(net, x, y):
    a, b = net.first(x), net.first(x * 2)
    a.register_hook(lambda g: g * 3)
    b.register_hook(lambda g: g.flip(0))
    F.cross_entropy(net.last(a * b.detach() + b), y).backward()


def removed(net, x, y):
    h = net.first(x)
    handle, other = h.register_hook(lambda g: g * 100), h.register_hook(lambda g: g * 3)
    handle.remove()
    F.cross_entropy(net.last(h), y).backward()
    other.remove()


def of_parameters(net, x, y):
    handles = [net.first.weight.register_hook(lambda g: g * 3),
               net.first.weight.register_post_accumulate_grad_hook(lambda p: net.seen.append(p.grad.sum()))]
    F.cross_entropy(net(x), y).backward()
    for handle in handles:
        handle.remove()


def twice(net, x, y):
    h = net.first(x)
    h.register_hook(lambda g: g + 1)
    loss = F.cross_entropy(net.last(h), y)
    loss.backward(retain_graph=True)
    loss.backward()


def asked_for(net, x, y):
    h = net.first(x)
    h.register_hook(lambda g: g * 2)
    return torch.autograd.grad(F.cross_entropy(net.last(h.tanh()), y), [net.first.weight, net.last.bias])


def asked_for_the_hooked(net, x, y):
    h = net.first(x)
    h.register_hook(lambda g: g * 2)
    return torch.autograd.grad(F.cross_entropy(net.last(h.tanh()), y), h)


def not_on_the_way(net, x, y):
    h = net.first(x)
    h.register_hook(lambda g: net.seen.append(g))
    loss = F.cross_entropy(net.last(h), y) + net.norm.bias.sum()
    found = torch.autograd.grad(loss, net.norm.bias, retain_graph=True)
    loss.backward()
    return found


def of_modules(net, x, y):
    F.cross_entropy(net(x), y).backward()


def of_modules_that_leaves_go_into(net, x, y):
    x.requires_grad_()
    F.cross_entropy(net(x), y).backward()
    net.last(net.first.bias).sin().mean().backward()
    return torch.autograd.grad(net.last(net.first.bias).tanh().sum(), net.first.bias)


def of_a_module_with_several(net, x, y):
    for which in range(2):
        net.several(net.first(x), y, torch.ones(8))[which].sum().backward()


def retained(net, x, y):
    h = net.first(x).t()
    h.retain_grad()
    loss = F.cross_entropy(net.last(h.t().relu()), y)
    loss.backward(retain_graph=True)
    first = h.grad
    loss.backward()
    return first, h.grad, h.grad is first, h.retains_grad


def retained_and_hooked(net, x, y):
    h = net.first(x)
    h.retain_grad()
    h.register_hook(lambda g: g * 2)
    F.cross_entropy(net.last(h), y).backward()
    return h.grad


def for_an_activation(net, x, y):
    h = net.first(x)
    F.cross_entropy(net.last(h.relu()), y).backward(inputs=[h, net.last.bias])
    return h.grad


def penalty(net, x, y):
    x = x.detach().requires_grad_()
    out = net(x)
    g, = torch.autograd.grad(out.sum(), x, create_graph=True)
    loss = F.cross_entropy(out, y) + (g.norm(dim=1) - 1).square().mean()
    loss.backward()
    return loss.detach(), g.detach(), x.grad


def penalty_of_parameters(net, x, y):
    loss = F.cross_entropy(net(x), y)
    found = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
    (loss + sum(g.square().sum() for g in found)).backward()


def product_with_the_hessian(net, x, y):
    parameters = list(net.parameters())
    found = torch.autograd.grad(F.cross_entropy(net(x), y), parameters, create_graph=True)
    return torch.autograd.grad(found, parameters, [torch.ones_like(p) for p in parameters])


def inner_steps(net, x, y):
    w = net.first.weight
    for _ in range(2):
        g, = torch.autograd.grad(torch.tanh(x @ w.t()).square().mean(), w, create_graph=True)
        w = w - 0.1 * g
    torch.tanh(x @ w.t()).abs().sum().backward()


def third(net, x, y):
    x = x.detach().requires_grad_()
    g, = torch.autograd.grad((x ** 4).sum(), x, create_graph=True)
    h, = torch.autograd.grad(g.sum(), x, create_graph=True)
    return g.detach(), h.detach(), torch.autograd.grad(h.sum(), x)[0]


def hooked_twice_differentiated(net, x, y):
    h = net.first(x)
    h.register_hook(lambda g: g * g)
    found = torch.autograd.grad(net.last(h.tanh()).square().sum(), list(net.first.parameters()), create_graph=True)
    (0.01 * sum(g.square().sum() for g in found)).backward()


def made_a_leaf(net, x, y):
    z, other = x * 2, torch.zeros(6).requires_grad_()
    z.requires_grad = True
    net(z + other).sum().backward()
    return z.grad, other.grad, z, other


def attacked(net, x, y):
    a = x.clone()
    for _ in range(2):
        a.requires_grad_(True)
        g, = torch.autograd.grad(F.cross_entropy(net(a), y), a)
        a = (a.detach() + 0.1 * g.sign()).clamp(-1, 1)
    return a


def of_the_input(net, x, y):
    x.requires_grad_()
    F.cross_entropy(net(x), y).backward()
    return x.grad


def only_the_flag(net, x, y):
    x.requires_grad_()


def frozen_from_here_on(net, x, y):
    for p in net.first.parameters():
        p.requires_grad_(False)
    F.cross_entropy(net(x), y).backward()


PROGRAMS = [changed, watched, one_after_the_other, side_by_side, removed, of_parameters, twice, asked_for, asked_for_the_hooked,
            not_on_the_way, of_modules, of_modules_that_leaves_go_into, of_a_module_with_several, retained, retained_and_hooked,
            for_an_activation, penalty, penalty_of_parameters, product_with_the_hessian, inner_steps, third, hooked_twice_differentiated,
            made_a_leaf, attacked, of_the_input, only_the_flag, frozen_from_here_on]


def same(a, b, where):
    assert type(a) is type(b), where
    if isinstance(b, torch.Tensor):
        assert (a.dtype, a.stride(), a.requires_grad, a.is_leaf) == (b.dtype, b.stride(), b.requires_grad, b.is_leaf), where
        torch.testing.assert_close(a, b, msg=lambda m: f"{where}: {m}")
    else:
        assert a == b, where


def hooks_on_modules(net):
    net.last.register_full_backward_hook(lambda m, i, o: net.seen.extend([i[0].norm(), o[0].norm()]))
    net.norm.register_full_backward_hook(lambda m, i, o: (i[0] * 2,))
    net.norm.register_full_backward_pre_hook(lambda m, o: (o[0] + 1,))
    net.first.register_full_backward_hook(lambda m, i, o: net.seen.extend([i[0], o[0].norm()]))
    net.several.register_full_backward_hook(
        lambda m, i, o: net.seen.extend([*(g.double().sum() for g in i), *(g if g is None else g.sum() for g in o)]))


def compare(program, net, twin, compiled, calls=3):
    """Several calls, each from eager's state: outputs, parameters, gradients and whether they are the tensors they were, hooks."""
    for call in range(calls):
        torch.manual_seed(call)
        inputs = torch.randn(5, 6), torch.randint(0, 3, (5,))
        copies = [t.clone() for t in inputs]
        before = [[p.grad for p in n.parameters()] for n in (net, twin)]
        found, expected = compiled(net, *inputs), program(twin, *copies)
        outputs = [torch.utils._pytree.tree_leaves(r) for r in (found, expected)]
        for i, (a, b) in enumerate(zip(*outputs, strict=True)):
            same(a, b, f"call {call}, output {i}")
        for (name, p), q, *old in zip(net.named_parameters(), twin.parameters(), *before):
            same(p, q, f"call {call}, {name}")
            same(p.grad, q.grad, f"call {call}, {name}.grad")
            assert (p.grad is old[0]) == (q.grad is old[1]), f"call {call}, {name}.grad"
        same(inputs[0], copies[0], f"call {call}, the input")
        same(inputs[0].grad, copies[0].grad, f"call {call}, the gradient of the input")
        assert len(net.seen) == len(twin.seen)
        for a, b in zip(net.seen, twin.seen):
            same(a, b, f"call {call}, what a hook saw")


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_as_eager(program, rung):
    torch.manual_seed(0)
    net = Net()
    twin = copy.deepcopy(net)
    if program.__name__.startswith(("of_modules", "of_a_module")):
        hooks_on_modules(net), hooks_on_modules(twin)
    compare(program, net, twin, minicompile.compile(program, backend=rung, fullgraph=True))


def later(net, x, y):
    h = net.first(x)
    h.register_hook(lambda g: g * 2)
    return net.last(h).sum()


def after_a_use(net, x, y):
    h = net.first(x)
    loss = net.last(h).sum()
    h.register_hook(lambda g: g * 2)
    (loss + h.sum()).backward()


def written_afterwards(net, x, y):
    h = net.first(x)
    h.register_hook(lambda g: g * 2)
    h.mul_(3)
    h.square().sum().backward()


def stays_on_a_parameter(net, x, y):
    net.first.weight.register_hook(lambda g: g * 2)
    net(x).sum().backward()


def with_its_leaf(net, x, y):
    z = torch.zeros(6, requires_grad=True)
    return z, net(x + z).sum()


def of_its_leaf_only(net, x, y):
    z = torch.ones(6, requires_grad=True)
    return (z * x).sum()


def used_before(net, x, y):
    out = (x * 2).sum()
    x.requires_grad_()
    (net(x).sum() + out).backward()
    return x.grad


BREAKS = {later: ("a hook waits", "register_hook"), after_a_use: ("used before", "register_hook"),
          written_afterwards: ("that was written to", "backward"),
          stays_on_a_parameter: ("has registered", "register_hook"), with_its_leaf: ("a leaf that the function has made", "torch.zeros"),
          of_its_leaf_only: ("a leaf that the function has made", "torch.ones"),
          used_before: ("graph has used", "requires_grad_")}


def parameters_lose_their_hooks(net):
    for p in net.parameters():
        p._backward_hooks = p.grad = None


@pytest.mark.parametrize("program", BREAKS, ids=lambda p: p.__name__)
def test_what_stays_a_break_says_why_and_where_and_is_as_eager(program):
    reason, line = BREAKS[program]
    torch.manual_seed(0)
    net = Net()
    with pytest.raises(minicompile.GraphBreakError, match=reason) as error:
        minicompile.compile(program, fullgraph=True)(copy.deepcopy(net), torch.randn(5, 6), torch.zeros(5, dtype=torch.int64))
    assert line in str(error.value)
    twin = copy.deepcopy(net)
    compiled = minicompile.compile(program)
    for call in range(3):
        torch.manual_seed(call)
        x = torch.randn(5, 6)
        results = []
        for f, n, given in ((compiled, net, x.clone()), (program, twin, x.clone())):
            parameters_lose_their_hooks(n)
            outputs = torch.utils._pytree.tree_leaves(f(n, given, None))
            for out in outputs:
                if isinstance(out, torch.Tensor) and out.grad_fn is not None:
                    out.backward()
            results.append([*outputs, *(o.grad for o in outputs if isinstance(o, torch.Tensor) and o.is_leaf),
                            *(p.grad for p in n.parameters()), given.grad])
        for i, (a, b) in enumerate(zip(*results, strict=True)):
            same(a, b, f"call {call}, {i}")


def grad_of(x):
    return torch.autograd.grad((x * x).sum(), x)[0], x.grad


def grad_of_what_is_written(x):
    x.mul_(2)
    return torch.autograd.grad((x * x).sum(), x)


def grad_of_what_gets_a_hook(x):
    x.register_hook(lambda g: g * 3)
    return torch.autograd.grad((x * x).sum(), x)


def grad_of_what_retains(x):
    x.retain_grad()
    return torch.autograd.grad((x * x).sum(), x)[0], x.grad, x.retains_grad


def asks_for_a_gradient(x):
    x.requires_grad = True
    return x * 2


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("before", [lambda x: None, lambda x: x.register_hook(lambda g: g * 5), lambda x: x.retain_grad()],
                         ids=["plain", "hook", "retains"])
@pytest.mark.parametrize("argument", [lambda w: w * 1, lambda w: (w * 1)[:, :1]], ids=["computed", "view"])
@pytest.mark.parametrize("program", [grad_of, grad_of_what_is_written, grad_of_what_gets_a_hook, grad_of_what_retains, asks_for_a_gradient])
def test_arguments_that_were_computed_before(program, argument, before):
    found = []
    for f in program, minicompile.compile(program):
        x = argument(torch.ones(2, 2, requires_grad=True))
        before(x)
        try:
            found.append((*f(x), x.grad))
        except RuntimeError as error:
            found.append(str(error))
    torch.testing.assert_close(found[1], found[0]) if type(found[0]) is tuple else None
    assert type(found[1]) is type(found[0]) is tuple or found[1] == found[0]


def test_a_view_without_a_history_becomes_a_leaf():
    """It says that it requires a gradient when its base does, but gets none before it is asked to."""
    @minicompile.compile
    def f(x):
        x.requires_grad_()
        return x * 2

    base = torch.ones(4, requires_grad=True)
    with torch.no_grad():
        x = base.view(2, 2)
    f(x).sum().backward()
    assert x.grad.tolist() == [[2, 2], [2, 2]] and base.grad is None


@pytest.mark.parametrize("asks", [lambda x: x.grad_fn is not None, lambda x: not x.is_leaf])
def test_asking_for_the_history_of_a_written_input_breaks_before_its_first_use(asks):
    """Behind the break the hook hangs on the real tensor, which what was computed before the break does not depend on."""
    def program(x):
        x.mul_(2)
        y = x * x
        if asks(x):
            x.register_hook(lambda g: g * 0.5)
        return y + x

    grads = []
    for f in (program, minicompile.compile(program, backend="aot_eager")):
        leaf = torch.linspace(-1, 2, 6, requires_grad=True)
        f(leaf * 1.5).sum().backward()
        grads.append(leaf.grad)
    same(*grads, "the gradient of the leaf")


def every_kind(model, optimizer, log):
    """Functions that register a hook each and return its handle."""
    weight, layer, every = model[0].weight, model[1], torch.nn.modules.module
    return {"gradient": lambda: weight.register_hook(lambda g: g * 2),
            "later": lambda: weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 2)),
            "forward": lambda: layer.register_forward_hook(lambda m, args, out: out * 2),
            "forward, arguments by name": lambda: layer.register_forward_hook(lambda m, args, kwargs, out: out * 2, with_kwargs=True),
            "before": lambda: layer.register_forward_pre_hook(lambda m, args: (args[0] * 2,)),
            "before, arguments by name": lambda: layer.register_forward_pre_hook(lambda m, a, k: ((a[0] * 2,), k), with_kwargs=True),
            "backward": lambda: layer.register_full_backward_hook(lambda m, given, came: (given[0] * 2,)),
            "before backward": lambda: layer.register_full_backward_pre_hook(lambda m, came: (came[0] * 2,)),
            "optimizer": lambda: optimizer.register_step_post_hook(lambda o, args, kwargs: log.append(len(args))),
            "every module": lambda: every.register_module_forward_hook(lambda m, args, out: out * 1.5)}


def steps_with_hooks(part, register, count):
    """Losses of `count` steps, each with the hooks that `register(step, kinds)` registers anew, and how many graphs there were after each.
    part: what is compiled, `forward`, `step` or nothing."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    optimizer, losses, graphs = torch.optim.SGD(model.parameters(), lr=0.1), [], []
    kinds = every_kind(model, optimizer, losses)

    def forward(x):
        return model(x).square().mean()

    def step(x):
        optimizer.zero_grad()
        loss = forward(x)
        loss.backward()
        optimizer.step()
        return loss
    if part == "forward":
        forward = minicompile.compile(forward, backend="eager")
    run = minicompile.compile(step, backend="eager") if part == "step" else step
    with Captures() as seen:
        for i in range(count):
            handles = register(i, kinds)
            losses.append(run(torch.randn(3, 4)).item())
            graphs.append(len(seen.graphs))
            for handle in handles:
                handle.remove()
    return losses, graphs


@pytest.mark.parametrize("kind", every_kind(torch.nn.Sequential(*[torch.nn.Linear(1, 1)] * 2), None, None))
@pytest.mark.parametrize("part", ["forward", "step"])
def test_hooks_that_each_step_registers_anew_are_one_version(part, kind):
    def register(step, kinds):
        return [kinds[kind]()]
    want, _ = steps_with_hooks(None, register, 12)
    got, graphs = steps_with_hooks(part, register, 12)
    torch.testing.assert_close(got, want)
    assert graphs[0] == graphs[-1] > 0


@pytest.mark.parametrize("register", [
    lambda step, kinds: [kinds["forward"]() for _ in range(step % 3)],
    lambda step, kinds: [kinds[("forward", "forward, arguments by name")[step % 2]](), kinds["forward"]()],
    lambda step, kinds: [kinds[k]() for k in sorted(kinds)[::-1 if step % 2 else 1] if k != "optimizer"]])
@pytest.mark.parametrize("part", ["forward", "step"])
def test_other_hooks_in_each_step(part, register):
    want, got = [steps_with_hooks(compiled, register, 8)[0] for compiled in (None, part)]
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("look", [
    lambda hooks: next(iter(hooks)), lambda hooks: sum(hooks), lambda hooks: len(hooks), lambda hooks: [*hooks][-1],
    lambda hooks: {**hooks}.popitem()[0], lambda hooks: max(hooks.copy()), lambda hooks: 7 in hooks])
def test_the_numbers_of_hooks_are_guarded_where_a_program_looks_at_them(look):
    model = torch.nn.Linear(2, 2)

    def f(x):
        return model(x), look(model._forward_hooks)
    compiled = minicompile.compile(f, backend="eager")
    for i in range(6):
        model._forward_hooks.clear()
        for n in (i + 5, i + 9) if i % 2 else (i + 3,):
            model._forward_hooks[n] = lambda m, args, out: out * 2
        (got, said), (want, told) = compiled(torch.ones(2)), f(torch.ones(2))
        assert torch.equal(got, want) and said == told
