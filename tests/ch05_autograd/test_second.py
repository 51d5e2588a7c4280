"""Derivatives of derivatives, and of those, through compiled functions."""
import gc
import itertools
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import minicompile
import minicompile.ch05_autograd.second as derivatives
from minicompile.ch05_autograd import region
from minicompile.errors import MinicompileError


def net(*layers):
    torch.manual_seed(0)
    return nn.Sequential(*layers).double()


def penalty(f, x):
    """A gradient penalty: a loss with a gradient in it."""
    x.requires_grad_()
    y = f(x)
    g, = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.mean() + ((g.flatten(1).norm(2, 1) - 1) ** 2).mean()


def residual(f, x):
    """A differential equation of the third order."""
    x.requires_grad_()
    u = f(x)
    ux, = torch.autograd.grad(u.sum(), x, create_graph=True)
    uxx, = torch.autograd.grad(ux[:, 0].sum(), x, create_graph=True)
    uxxx, = torch.autograd.grad(uxx[:, 1].sum(), x, create_graph=True)
    return (uxx[:, 0] - u[:, 0] * ux[:, 1]).square().mean() + uxxx.square().sum()


def one_step_ahead(f, x):
    """The loss after a step of gradient descent, differentiated through that step."""
    weights = list(f.parameters())
    gradients = torch.autograd.grad(f(x).square().mean(), weights, create_graph=True)
    return sum((w - 0.1 * g).square().sum() for w, g in zip(weights, gradients))


def into_grad(f, x):
    weights = list(f.parameters())
    f(x).square().mean().backward(create_graph=True)
    loss = sum(w.grad.square().sum() for w in weights)
    for w in weights:
        w.grad = None
    return loss


class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        print(end="")
        return torch.sigmoid(self.b(h))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.norm, self.out = nn.Linear(6, 18), nn.LayerNorm(6), nn.Linear(6, 1)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x))[:, None].chunk(3, -1)
        return self.out(F.gelu((q @ k.mT).softmax(-1) @ v) + x[:, None])


CRITIC = [nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2, padding=1), nn.BatchNorm2d(4), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(48, 1)]


PERCEPTRON = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")
@pytest.mark.parametrize("layers, loss, rung", [
    (PERCEPTRON, penalty, "cpp"), (PERCEPTRON, residual, "cpp"), (PERCEPTRON, into_grad, "aot_eager"),
    ([Breaks()], penalty, "aot_eager"), ([Attention()], penalty, "aot_eager"), ([Attention()], one_step_ahead, "cpp"),
    (CRITIC, penalty, "cpp"), (CRITIC, penalty, "aot_eager")])
def test_losses_with_gradients_in_them(layers, loss, rung):
    """Over three steps with other batch sizes, which change the parameters."""
    results = []
    for compiled in (False, True):
        model = net(*layers)
        state = {k: v.clone() for k, v in model.state_dict().items()}
        f, seen = minicompile.compile(model, backend=rung) if compiled else model, []
        for step in range(3):
            x = torch.randn(4 + step, 6, dtype=torch.double, generator=torch.Generator().manual_seed(step))
            value = loss(f, x)
            weights = list(model.parameters())
            gradients = torch.autograd.grad(value, weights, allow_unused=True)
            seen += [value.detach(), *gradients, *(b.clone() for b in model.buffers())]
            with torch.no_grad():
                for w, g in zip(weights, gradients):
                    w.sub_(0.05 * g if g is not None else 0)
        model.load_state_dict(state)
        results.append(seen)
    torch.testing.assert_close(*results, rtol=1e-7, atol=1e-9)


def two(x, w):
    h = torch.sin(x @ w)
    return h * 2, (h * h).sum()


FUNCTIONS = [
    lambda x, w: (x.exp() * w.sum()).sum().tanh(), lambda x, w: F.layer_norm(x @ w, (3,)), two,
    lambda x, w: (x.detach() * x * w[0]).cumsum(0),
    lambda x, w: torch.logsumexp(x @ w, 1) * x.amax(1), lambda x, w: (x / x.norm(dim=1, keepdim=True)) @ w,
    lambda x, w: F.pad(x, (1, 2)).unfold(1, 3, 1).mean(2) @ torch.cat([w, w])[:4].sin()]


@pytest.mark.parametrize("f", FUNCTIONS, ids=range(7))
def test_second_and_third_derivatives(f):
    """With what is detached inside, inputs that are activations, and several results."""
    seen = []
    for g in (f, minicompile.compile(f, fullgraph=True)):
        x, w, v = (torch.randn(3, 3, dtype=torch.double, generator=torch.Generator().manual_seed(k)).requires_grad_() for k in (1, 2, 3))
        y = g(x * 1, w)
        for _ in range(3):
            value = sum((t * v.flatten()[:1]).sum() for t in (y if isinstance(y, tuple) else [y]))
            y = torch.autograd.grad(value, (x, w), create_graph=True, materialize_grads=True)
            seen += [t.detach() for t in y]
            if not any(t.requires_grad for t in y):
                break
    half = len(seen) // 2
    torch.testing.assert_close(seen[half:], seen[:half])


@pytest.mark.parametrize("rung", ("aot_eager", "cpp"))
def test_an_input_that_was_made_in_inference_mode(rung):
    with torch.inference_mode():
        k = torch.full((3,), 2.)

    def f(x, k):
        return x.sin() * x, k * 2
    found = []
    for f in (f, minicompile.compile(f, backend=rung)):
        x = torch.arange(3.).requires_grad_()
        slope, = torch.autograd.grad(f(x, k)[0].sum(), x, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), x))
    torch.testing.assert_close(*found)


def second(f, x, tangent):
    x = x.clone().requires_grad_()
    y = f(x)
    gradient, = torch.autograd.grad(y, x, tangent(y), create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), [x, *f.parameters()], materialize_grads=True)


TANGENTS = [lambda y: y.new_ones(()).expand(y.shape), lambda y: torch.arange(1.0, y.numel() + 1, dtype=y.dtype).view(y.shape),
            lambda y: torch.arange(1.0, y.numel() + 1, dtype=y.dtype).view(y.shape[::-1]).t(), lambda y: torch.view_as_complex(
                torch.ones(*y.shape, 2, dtype=y.dtype)).conj().imag, lambda y: y.detach().cos().requires_grad_()]


def test_tangents_of_all_forms_and_many_sizes():
    """A program is compiled for the strides of its tangents, and for at most so many sizes."""
    model = net(*PERCEPTRON)
    fast = minicompile.compile(model)
    for rows in (5, *range(2, 14)):
        x = torch.randn(rows, 6, dtype=torch.double, generator=torch.Generator().manual_seed(rows))
        for tangent in TANGENTS if rows == 5 else TANGENTS[:1]:
            torch.testing.assert_close(second(fast, x, tangent), second(model, x, tangent))


@pytest.mark.parametrize("every, compiled", [(1, "10100100001000000001"), (2, "11010011000011000000"), (16, "1" * 20)])
def test_where_second_derivatives_are_expected_a_region_runs_as_captured(every, compiled):
    minicompile.reset()
    model = net(*PERCEPTRON)
    fast, regions = minicompile.compile(model), ""
    for step in range(20):
        x = torch.randn(5, 6, dtype=torch.double, generator=torch.Generator().manual_seed(step)).requires_grad_()
        values = [f(x) for f in (fast, model)]
        regions += str(int("CompiledRegion" in values[0].grad_fn.name()))
        gradients = [torch.autograd.grad(y.sum(), x, create_graph=True)[0] for y in values]
        torch.testing.assert_close(*gradients)
        if (step + 1) % every == 0:
            torch.testing.assert_close(*(torch.autograd.grad(g.square().sum(), list(model.parameters()), materialize_grads=True)
                                         for g in gradients))
    assert regions == compiled


@pytest.mark.parametrize("backend", ["aot_eager", None])
def test_under_a_checkpoint(backend):
    """It gives each saved tensor back once in a backward pass, and asks that a second run saves as many as the first."""
    model = net(*PERCEPTRON)
    fast = minicompile.compile(model, backend=backend)
    for step in range(12):
        x = torch.randn(5, 6, dtype=torch.double, generator=torch.Generator().manual_seed(step))
        found = []
        for f in (fast, model):
            a = x.clone().requires_grad_()
            gradient, = torch.autograd.grad(checkpoint(f, a, use_reentrant=False).sum(), a, create_graph=True)
            found.append(torch.autograd.grad(gradient.square().sum(), [a, *model.parameters()], materialize_grads=True))
        torch.testing.assert_close(*found)


def test_parameters_without_a_gradient():
    """Those that the program names and does not use, as `functional_call` does with the ones it replaces, and those that it detaches."""
    f = net(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def steps(run):
        fast = dict(f.named_parameters())
        for x in torch.linspace(-1, 1, 18).double().view(3, 2, 3):
            loss = run(fast, x).square().mean()
            slopes = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
            fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), slopes)}
        return torch.autograd.grad(run(fast, x).sum(), list(f.parameters()))

    def model(weights, x):
        return torch.func.functional_call(f, weights, (x,))

    def shifted(weights, x):
        return torch.func.functional_call(f, weights, (x,)) + f[0].bias.detach().sum()

    for each in (model, shifted):
        torch.testing.assert_close(steps(minicompile.compile(each)), steps(each))


def test_a_large_parameter_without_a_gradient():
    weight, results = nn.Parameter(torch.linspace(0, 1, 300_000)), []
    for f in (model := lambda x: (x + weight.detach().mean()).tanh(), minicompile.compile(model)):
        x = torch.linspace(-1, 1, 5).requires_grad_()
        slope, = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        results.append(torch.autograd.grad(slope.square().sum(), x))
    torch.testing.assert_close(*results)


def test_gradients_of_a_batch_of_tangents():
    model = net(*PERCEPTRON)
    results = []
    for f in (model, minicompile.compile(model)):
        x = torch.linspace(-1, 1, 30, dtype=torch.double).view(5, 6).requires_grad_()
        jacobian = torch.autograd.functional.jacobian(lambda z: f(z).sum(0), x, create_graph=True, vectorize=True)
        results.append(torch.autograd.grad(jacobian.square().sum(), x))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("batched", [True, False])
def test_a_batch_of_tangents_and_random_numbers(batched):
    """`vmap` refuses operators that draw; the region has drawn before."""
    model = net(nn.Linear(3, 4), nn.Dropout(0.4), nn.Tanh(), nn.Linear(4, 2))
    found = []
    for f in (model, minicompile.compile(model, backend="aot_eager")):
        torch.manual_seed(1)
        x = torch.linspace(-1, 1, 9, dtype=torch.double).view(3, 3).requires_grad_()
        y = f(x).square()
        rows = torch.eye(y.numel(), dtype=y.dtype).view(-1, *y.shape)
        if batched:
            g, = torch.autograd.grad(y, x, rows, is_grads_batched=True, create_graph=True)
        else:
            g = torch.vmap(lambda row: torch.autograd.grad(y, x, row, create_graph=True, retain_graph=True)[0])(rows)
        found.append([g, *torch.autograd.grad(g.sin().sum(), (x, *model.parameters()), materialize_grads=True)])
    torch.testing.assert_close(*found)


def test_a_batch_of_second_tangents_and_random_numbers():
    model = net(nn.Linear(3, 4), nn.Dropout(0.4), nn.Tanh(), nn.Linear(4, 2))
    found = []
    for f in (model, minicompile.compile(model, backend="aot_eager")):
        torch.manual_seed(1)
        x = torch.linspace(-1, 1, 9, dtype=torch.double).view(3, 3).requires_grad_()
        g, = torch.autograd.grad(f(x).square().sum(), x, create_graph=True)
        rows = torch.eye(9, dtype=x.dtype).view(9, 3, 3)
        found.append(torch.autograd.grad(g, (x, *model.parameters()), rows, is_grads_batched=True, materialize_grads=True))
    torch.testing.assert_close(*found)


def test_a_batch_of_tangents_and_a_gradient_that_does_not_depend_on_an_input():
    def f(x, b):
        y = x + b * b
        return y[1:], y[0]

    def derive(f):
        x, b = torch.linspace(-1, 1, 9).double().view(3, 3).requires_grad_(), torch.linspace(0, 1, 3).double()
        g, = torch.autograd.grad(sum(y.square().sum() for y in f(x * 1, b)), x, create_graph=True)
        return torch.autograd.grad(g, x, torch.eye(9, dtype=torch.double).view(9, 3, 3), is_grads_batched=True, create_graph=True)
    torch.testing.assert_close(derive(minicompile.compile(f)), derive(f))
    torch.testing.assert_close(derive(minicompile.compile(f, backend="cpp")), derive(f))


def test_what_has_no_second_derivative_has_a_first():
    f = minicompile.compile(lambda x: F.scaled_dot_product_attention(x, x, x).sum())
    x = torch.randn(1, 2, 4, 8, requires_grad=True)
    gradient, = torch.autograd.grad(f(x), x, create_graph=True)           # PyTorch has no derivative of this one
    want, = torch.autograd.grad(F.scaled_dot_product_attention(x, x, x).sum(), x)
    assert gradient.requires_grad and torch.allclose(gradient, want, atol=1e-6)
    with pytest.raises(RuntimeError, match="not implemented"):
        gradient.sum().backward()


class CubeOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x ** 3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, = ctx.saved_tensors
        return 3 * x * x * grad


@pytest.mark.parametrize("inside", [False, True])
def test_once_differentiable_is_differentiated_once(inside):
    def value(x):
        return CubeOnce.apply(x).square().sum()

    def gradient(f, x):
        return torch.autograd.grad(f(x), x, create_graph=True)[0]

    derive = minicompile.compile(lambda x: gradient(value, x)) if inside else lambda x: gradient(minicompile.compile(value), x)
    x = torch.randn(4, requires_grad=True)
    found = derive(x)
    torch.testing.assert_close(found, gradient(value, x))
    with pytest.raises(RuntimeError, match="once_differentiable"):
        found.sum().backward()


@pytest.mark.parametrize("backend", ["aot_eager", "cpp", None])
@pytest.mark.parametrize("wrap", [lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=False)], ids=["plain", "checkpoint"])
def test_random_numbers_are_drawn_again(backend, wrap):
    """The masks are eager's in each step, whatever was drawn since, and the generator is where eager leaves it."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.4), nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))
    model.double()
    fast = minicompile.compile(model, backend=backend)
    for step, rows in enumerate((5, 5, 7, 9, 5, 7, 5)):
        found = []
        for f in (model, fast):
            torch.manual_seed(step)
            x = torch.randn(rows, 6, dtype=torch.double).requires_grad_()
            y = wrap(f, x)
            torch.rand(3)
            gradient, = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            again, = torch.autograd.grad(gradient.sin().sum(), x, create_graph=True)
            found.append([gradient, again, *torch.autograd.grad(again.square().sum(), [x, *model.parameters()], materialize_grads=True),
                          torch.rand(3)])
        torch.testing.assert_close(*found)


def views_of_its_result(x, w):
    y = torch.sin(x @ w)
    return y[0], y[1:], y.T


def views_without_history(x, w):
    y = (x * w).tanh()
    with torch.no_grad():
        v = y[0]
    return v, y[1] * 1, y[:2], y.detach()


def a_written_view(x, w):
    y = (x * w).tanh() + 1
    y[0].mul_(w[0])
    return y.unbind(0)


def a_written_input(x, w):
    s = x.exp()
    x.mul_(2).add_(w)
    return (x * s).sum()


def a_written_input_and_its_views(x, w):
    x[0] = w[1].sin()
    x[:, 1].mul_(x[:, 0].clone())
    return x.cos(), x[1], x


def a_written_input_with_gaps(x, w):
    gaps = x.t()[1:]
    y = gaps.relu_()
    return y * w[1:], x


def slopes_of(f, x, w, orders=3):
    found, results = [], f(x * 1.5, w)
    for order in range(1, orders + 1):
        results = results if isinstance(results, tuple) else (results,)
        value = sum((r * order).square().sum() for r in results if r.requires_grad)
        results = torch.autograd.grad(value, (x, w), create_graph=True, materialize_grads=True)
        found += [r.detach() for r in results]
    return found


@pytest.mark.parametrize("backend", ["aot_eager", "cpp", None])
@pytest.mark.parametrize("f", [views_of_its_result, views_without_history, a_written_view, a_written_input, a_written_input_and_its_views,
                               a_written_input_with_gaps])
def test_views_of_results_and_written_inputs(f, backend):
    fast = minicompile.compile(f, backend=backend, fullgraph=True)
    for step in range(6):
        x, w = (torch.randn(3, 3, dtype=torch.double, generator=torch.Generator().manual_seed(step + k)).requires_grad_() for k in (0, 9))
        torch.testing.assert_close(slopes_of(fast, x, w), slopes_of(f, x, w))


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_was_written_since_is_copied_or_noticed(when):
    """The shift is an input that the first derivative does not need."""
    def f(x, shift):
        return ((x + shift) ** 3).sum()
    fast = minicompile.compile(f)

    def slope(f, x, shift):
        shift = shift.clone()
        value = f(x, shift)
        if when == "before":
            shift.add_(1)
        gradient, = torch.autograd.grad(value, x, create_graph=True)
        if when == "after":
            shift.add_(1)
        return torch.autograd.grad(gradient.sum(), x)[0]

    x, shift = torch.randn(4, requires_grad=True), torch.randn(4)
    torch.testing.assert_close(slope(fast, x, shift), slope(f, x, shift))
    minicompile.reset()
    for _ in range(5):
        fast(x, shift)
    if when == "before":
        with pytest.raises(MinicompileError, match="modified"):
            slope(fast, x, shift)
    else:
        torch.testing.assert_close(slope(fast, x, shift), slope(f, x, shift))


@pytest.mark.parametrize("backend", ["aot_eager", None])
def test_what_the_gradients_in_question_do_not_need_may_be_written(backend):
    """Eager has saved `b` for another gradient, and running statistics for none."""
    def f(x, b):
        return (x + b * b).exp()
    critic = net(*CRITIC)

    def derive(f, g):
        x, b = torch.linspace(-1, 1, 24).double().view(4, 6).requires_grad_(), torch.linspace(0, 1, 6).double().requires_grad_()
        slopes = [torch.autograd.grad(y, x, create_graph=True)[0] for y in (f(x, b).sum(), g(x).square().sum())]
        with torch.no_grad():
            b.add_(1)
        g(x)
        return torch.autograd.grad(sum(s.square().sum() for s in slopes), x)
    for _ in range(3):
        torch.testing.assert_close(derive(minicompile.compile(f, backend=backend), minicompile.compile(critic, backend=backend)),
                                   derive(f, critic))


def test_a_second_derivative_of_one_result_does_not_need_what_others_read():
    """The node saves `b` for its other result. It was written since: eager's formula for the first asks for nothing of that."""
    def f(x, w, b):
        return x ** 3, w * b
    x, w, b = torch.linspace(-1, 1, 6).requires_grad_(), torch.ones(6, requires_grad=True), torch.ones(6)
    cube, product = minicompile.compile(f, backend="aot_eager")(x, w, b)
    b.add_(1)
    slope, = torch.autograd.grad(cube.sum(), x, create_graph=True, retain_graph=True)
    torch.testing.assert_close(slope, 3 * x ** 2)
    torch.testing.assert_close(torch.autograd.grad(slope.sum(), x)[0], 6 * x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(product.sum(), w, create_graph=True)


@pytest.mark.parametrize("asked, written", itertools.product(["x", "w", "b", "xw", "xb"], "xwb"))
@pytest.mark.parametrize("f", [lambda x, w, b: x.sin() + w.sin() + b.square() * b, lambda x, w, b: (x.sin() + w.exp(), b.sin() * b)])
def test_a_gradient_that_nobody_asks_for_needs_nothing(f, asked, written):
    """What only that would read may be written, before the first derivative and before the second."""
    def derive(f, before, twice, leaf):
        leaves = {name: torch.linspace(-1, 1, 6, dtype=torch.double).add(k).requires_grad_() for k, name in enumerate("xwb")}
        given = leaves if leaf else {name: t * 1 for name, t in leaves.items()}

        def write():
            with torch.no_grad():
                given[written].add_(0.5)
        wanted, y = [leaves[name] for name in asked], f(*given.values())
        try:
            write() if before else None
            first = torch.autograd.grad(sum(t.sum() for t in y), wanted, create_graph=twice, retain_graph=True)
            once = torch.autograd.grad(sum(t.square().sum() for t in y), wanted, retain_graph=True) if before else ()
            if not twice:
                return [*first, *once]
            write() if not before else None
            return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), wanted), *once]
        except RuntimeError:
            return None
    compiled, returned = minicompile.compile(f, backend="aot_eager"), 0
    for case in itertools.product([True, False], repeat=3):
        plain = derive(f, *case)
        if plain is not None:
            torch.testing.assert_close(derive(compiled, *case), plain)
            returned += 1
    assert returned or written in asked


def test_what_a_first_backward_has_left_of_copies_that_hooks_made():
    def f(x, w):
        return torch.tanh(x * w).sin(), (x.exp() * w).sum()

    def derive(f):
        x, w = torch.linspace(-1, 1, 6).requires_grad_(), torch.linspace(1, 2, 6).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
            y, z = f(x, w)
        with torch.no_grad():
            w.add_(1)
        return *torch.autograd.grad(y.sum(), (x, w)), *torch.autograd.grad(z, (x, w))
    torch.testing.assert_close(derive(minicompile.compile(f, backend="aot_eager")), derive(f))


def test_a_second_backward_raises_as_the_engine_does():
    x, w = torch.ones(6, requires_grad=True), torch.ones(6, requires_grad=True)
    y = minicompile.compile(lambda x, w: (x * w).sin(), backend="aot_eager")(x, w).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="a second time") as raised:
        y.backward()
    assert raised.value.__context__ is None


SELECTING = {"amax": lambda x: x.amax(1), "median": lambda x: x.median(), "cummax": lambda x: x.cummax(1)[0],
             "nanmean": lambda x: x.nanmean(), "clamp": lambda x: x.clamp(-1, 1), "where": lambda x: torch.where(x > 0, x, x * 2),
             "sort": lambda x: x.sort(1)[0], "detach": lambda x: x.detach() * x, "pool": lambda x: F.avg_pool1d(x, 2),
             "square": lambda x: x.square(),
             "scatter": lambda x: torch.zeros(4, 4).scatter_reduce(1, torch.zeros(4, 4, dtype=torch.long), x, "amax")}


@pytest.mark.parametrize("backend", ["aot_eager", "decomposed"])
@pytest.mark.parametrize("name", SELECTING)
def test_a_gradient_has_a_history_where_eagers_has_one(name, backend):
    """That of a maximum reads the input, and does not depend on it as a function that can be differentiated."""
    def derive(f, square):
        x = torch.linspace(-2, 2, 16).reshape(4, 4).sin().requires_grad_()
        y = f(x)
        slope, = torch.autograd.grad((y.square() if square else y).sum(), x, create_graph=True)
        return slope.requires_grad, slope.detach(), torch.autograd.grad(slope.sum(), x)[0] if slope.requires_grad else None
    compiled = minicompile.compile(SELECTING[name], backend=backend)
    for square in False, True, False:
        torch.testing.assert_close(derive(compiled, square), derive(SELECTING[name], square))


def test_a_write_under_a_checkpoint_raises_what_eager_raises():
    def f(x):
        y = x.softmax(1)
        x.masked_fill_(y > 0.5, 0.5)
        return x.softmax(1) * y

    def raised(f):
        x = torch.linspace(-1, 1, 9).view(3, 3).requires_grad_()
        with pytest.raises(RuntimeError) as error:
            torch.autograd.grad(checkpoint(f, x * 1, use_reentrant=False).sum(), x, create_graph=True)
        return str(error.value)[:90], error.value.__context__
    assert raised(minicompile.compile(f, backend="aot_eager")) == raised(f)


@pytest.mark.parametrize("backend", ["aot_eager", "cpp"])
def test_hooks_of_the_program_do_not_see_what_a_second_derivative_is_recorded_with(backend):
    """A checkpoint around a call and its derivative compares how much the two runs save; only the first one compiles."""
    def steps(f):
        def slope(x):
            y = f(x)
            return torch.autograd.grad(y.sum(), x, create_graph=True)[0] * x
        found = []
        for _ in range(3):
            x = torch.linspace(-1, 1, 6, dtype=torch.double).requires_grad_()
            checkpoint(slope, x, use_reentrant=False).sum().backward()
            found.append(x.grad)
        return found

    def f(x):
        return torch.atan2(x, x * x + 1)
    torch.testing.assert_close(steps(minicompile.compile(f, backend=backend)), steps(f))


def doubled(x, b):
    x.copy_(x * 2)
    x[0] = b
    return x


def hooked(x, b):
    x = x - 1
    b.register_hook(torch.neg)
    return x + b


@pytest.mark.parametrize("backend", ["aot_eager", "cpp"])
@pytest.mark.parametrize("f", [doubled, hooked])
def test_a_checkpoint_does_not_run_again_what_has_saved_nothing(f, backend):
    """A second run would write or hang on a hook once more, of which eager does neither."""
    def derive(f):
        x, b = torch.linspace(-1, 1, 9).double().view(3, 3).requires_grad_(), torch.linspace(0, 1, 3).double().requires_grad_()
        gradients = torch.autograd.grad(checkpoint(f, x * 1, b, use_reentrant=False).square().sum(), (x, b), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in gradients), (x, b))
    torch.testing.assert_close(derive(minicompile.compile(f, backend=backend)), derive(f))


@pytest.mark.parametrize("backend", ["aot_eager", "cpp"])
def test_a_gradient_has_a_history_if_it_depends_on_what_has_one(backend):
    def histories(f):
        x, w = torch.linspace(-1, 1, 9).view(3, 3).requires_grad_(), torch.ones(3, requires_grad=True)
        y = f(x, w)
        found = [torch.autograd.grad(z.sum(), (x, w), create_graph=True) for z in (y, y.square())]
        return [g.requires_grad for gradients in found for g in gradients]
    for f, expected in (lambda x, w: x * 2 + w, [False, False, True, True]), (lambda x, w: x * 2 + w.sin(), [False, True, True, True]):
        assert histories(minicompile.compile(f, backend=backend)) == histories(f) == expected


@pytest.mark.parametrize("backend", ["aot_eager", "cpp"])
def test_a_second_derivative_needs_no_result_of_another_history(backend):
    """`y` is written after a graph has saved it for a gradient that nobody asks for."""
    def f(x, w):
        y, z = torch.tanh(x), w.sin()
        print(end="")
        y[:, 0].zero_()
        return z * w

    def derive(f):
        x, w = (torch.linspace(-1, 1, 9).double().view(3, 3).requires_grad_() for _ in range(2))
        g, = torch.autograd.grad(f(x * 1, w).sum(), w, create_graph=True)
        return torch.autograd.grad(g.square().sum(), w)
    torch.testing.assert_close(derive(minicompile.compile(f, backend=backend)), derive(f))


@pytest.mark.parametrize("expected", [True, False])
def test_large_inputs_that_are_not_needed_are_kept_while_a_second_derivative_is_likely(expected):
    def f(x, w):
        return (x + w).sin().sum()
    minicompile.reset()
    fast, w = minicompile.compile(f, backend="cpp"), torch.randn(1 << 19, requires_grad=True)
    for step in range(5):
        large = torch.randn(1 << 19) + 0
        seen, value, want = weakref.ref(large), fast(large, w), -torch.sin(large + w)
        del large
        gc.collect()
        assert (seen() is None) == (step == 4 and not expected)
        gradient, = torch.autograd.grad(value, w, create_graph=True)
        if step == 4 and not expected:
            with pytest.raises(MinicompileError, match="not alive"):
                gradient.sum().backward()
        elif expected:
            torch.testing.assert_close(torch.autograd.grad(gradient.sum(), w)[0], want)


@pytest.mark.parametrize("f", [lambda x: x.prod(-1), lambda x: x.prod(0, keepdim=True), lambda x: x.prod(), lambda x: x.cumprod(-1)],
                         ids=["rows", "columns", "all", "running"])
def test_products_with_factors_of_zero(f):
    rows = [[0.0, 2, 3], [0, 0, 3], [1, 2, 3], [0, 0, 0]]

    def curvature(x):
        gradient, = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        return gradient, torch.autograd.grad((gradient * torch.arange(12.0).view(4, 3)).sum(), x)[0]
    compiled = minicompile.compile(curvature, fullgraph=True)
    torch.testing.assert_close(compiled(torch.tensor(rows, requires_grad=True)), curvature(torch.tensor(rows, requires_grad=True)))


@pytest.mark.parametrize("row", [[1.0, float("inf"), 3, 4], [2.0, float("nan"), 1, 3], [3.0, 1, 0, 2], [0.0, 4, 0, 1]], ids=str)
def test_derivatives_of_a_running_product(row):
    """Up to the third; eager divides if nothing is zero. The graph does not grow with the number of factors."""
    def third(x):
        weights, y, seen = torch.arange(1.0, x.shape[-1] + 1), x.cumprod(-1), []
        for _ in range(3):
            y, = torch.autograd.grad((y * weights).sum(), x, create_graph=True)
            seen.append(y)
        return seen
    x = torch.tensor([row, row[::-1]])
    compiled, sizes = minicompile.compile(third, fullgraph=True, dynamic=False), []
    torch.testing.assert_close(compiled(x.clone().requires_grad_()), third(x.clone().requires_grad_()), equal_nan=True)
    for n in (6, 12):
        graphs = minicompile.explain(third, dynamic=False)(torch.rand(n).requires_grad_()).graphs
        sizes.append(sum(len(list(g.gm.graph.nodes)) for g in graphs))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("f", [lambda x: x.prod(-1), lambda x: x.cumprod(-1), lambda x: x.cumprod(0)], ids=["rows", "running", "columns"])
def test_products_of_one_infinite_factor(f):
    def gradient(x):
        return torch.autograd.grad(f(x).sum(), x)[0]
    x = torch.tensor([[2.0], [float("-inf")], [3.0]])
    compiled = minicompile.compile(gradient, fullgraph=True)
    torch.testing.assert_close(compiled(x.requires_grad_()), gradient(x), equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_gradient_penalty_on_a_gpu(mode):
    results = []
    for compiled in (False, True):
        model = net(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).cuda()
        f, seen = minicompile.compile(model, mode=mode) if compiled else model, []
        for step in range(5):
            x = torch.randn(4, 6, dtype=torch.double, generator=torch.Generator().manual_seed(step)).cuda()
            seen += torch.autograd.grad(penalty(f, x), list(model.parameters()))
        results.append(seen)
    torch.testing.assert_close(*results)


def test_a_usual_backward_asks_nothing_of_the_general_case(monkeypatch):
    def refused(*args):
        raise AssertionError("asked")
    x = torch.randn(4, 5, requires_grad=True)
    f = minicompile.compile(lambda x: x.sin().exp().cos(), backend="cpp")
    f(x).sum().backward()
    monkeypatch.setattr(region, "take_saved", refused)
    expected, = torch.autograd.grad(x.sin().exp().cos().sum(), x)
    torch.testing.assert_close(torch.autograd.grad(f(x).sum(), x), (expected,))
    for settings in ({"retain_graph": True}, {"create_graph": True}):
        with pytest.raises(AssertionError, match="asked"):
            torch.autograd.grad(f(x).sum(), x, **settings)


def test_a_large_leaf_that_is_not_saved_leads_to_its_second_derivative_by_itself(monkeypatch):
    monkeypatch.setattr(derivatives, "empty_with_history", None)
    x = torch.randn(600, 500, requires_grad=True)
    f = minicompile.compile(lambda x: x.softmax(-1), backend="cpp")
    for _ in range(derivatives.FIRST + 2):
        f(x).sum().backward()

    def penalty(f):
        gradient, = torch.autograd.grad(f(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), x)
    torch.testing.assert_close(penalty(f), penalty(lambda x: x.softmax(-1)))
