"""Operators of a program whose derivatives, written in Python, ask for numbers."""
import pytest
import torch

import minicompile
from minicompile.ch05_autograd import registered


@torch.library.custom_op("minicompile_registered::groups", mutates_args=())
def groups(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
    start, found = 0, torch.zeros(len(x), w.size(2), dtype=x.dtype, device=x.device)
    for i, end in enumerate(ends.tolist()):
        found[start:end] = x[start:end] @ w[i] * scale
        start = end
    return found


@groups.register_fake
def _(x, w, ends, *, scale=1.0):
    return x.new_empty(len(x), w.size(2))


def save(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(*inputs[:2])
    ctx.ends, ctx.scale = inputs[2], keyword_only_inputs["scale"]


def groups_backward(ctx, grad):
    x, w = ctx.saved_tensors
    start, of_x, of_w = 0, torch.zeros_like(x), torch.zeros_like(w)
    for i, end in enumerate(ctx.ends.tolist()):
        of_x[start:end] = grad[start:end] @ w[i].T * ctx.scale
        of_w[i] = x[start:end].T @ grad[start:end] * ctx.scale
        start = end
    return of_x, of_w, None


groups.register_autograd(groups_backward, setup_context=save)


@torch.library.custom_op("minicompile_registered::above", mutates_args=())
def above(x: torch.Tensor, least: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return x.clamp(min=0 if least is None else least.item()), (x > 0).sum()


@above.register_fake
def _(x, least=None):
    return torch.empty_like(x), x.new_empty((), dtype=torch.int64)


def above_backward(ctx, grad, of_count):
    return (grad if ctx.kept.min().item() > 0 else grad * (ctx.kept > 0)), None         # its own operand, or a new tensor


above.register_autograd(above_backward, setup_context=lambda ctx, inputs, output: setattr(ctx, "kept", output[0]))

_library = torch.library.Library("minicompile_registered", "FRAGMENT")
_library.define("sums(Tensor x, int n=2) -> Tensor")
_library.impl("sums", lambda x, n=2: torch.stack([part.sum() for part in x.chunk(n)]), "CompositeExplicitAutograd")
torch.library.register_fake("minicompile_registered::sums", lambda x, n=2: x.new_empty(n))
torch.library.register_autograd(
    "minicompile_registered::sums",
    lambda ctx, grad: (torch.cat([torch.full((size,), g) for g, size in zip(grad.tolist(), ctx.sizes)]), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "sizes", [len(part) for part in inputs[0].chunk(inputs[1])]))

ENDS = torch.tensor([2, 2, 8])


def rand(*size):
    return torch.rand(size, generator=torch.Generator().manual_seed(sum(size))).requires_grad_()


def by_keyword(x, w):
    return groups(x.sin(), w=w, ends=ENDS, scale=2.0).relu() * 3


def own_result(x, w):
    y, count = above(x - w)
    return y.cos() * count


def own_operand(x, w):
    return above(x + w, torch.tensor(0.1))[0] * w


def in_fragments(x, w):
    return torch.ops.minicompile_registered.sums(x * w) * torch.ops.minicompile_registered.sums(w, n=2)


def under_checkpoint(x, w):
    return torch.utils.checkpoint.checkpoint(by_keyword, x, w, use_reentrant=False) * 2


PROGRAMS = {by_keyword: ((8, 4), (3, 4, 5)), own_result: ((8, 4), (8, 4)), own_operand: ((8, 4), (8, 4)), in_fragments: ((7,), (7,)),
            under_checkpoint: ((8, 4), (3, 4, 5))}


@pytest.mark.parametrize("backend", ["aot_eager", "cpp"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_gradients_in_one_graph(program, backend):
    inputs = [rand(*size) for size in PROGRAMS[program]]
    expected = torch.autograd.grad(program(*inputs).sum(), inputs)
    compiled = minicompile.compile(program, backend=backend, fullgraph=True)
    for _ in range(3):
        for got, e in zip(torch.autograd.grad(compiled(*inputs).sum(), inputs), expected, strict=True):
            torch.testing.assert_close(got, e)
        inputs[0].grad = None
        compiled(*inputs).sum().backward()
        torch.testing.assert_close(inputs[0].grad, expected[0])


def test_a_write_to_what_is_saved_is_an_error():
    def f(x, w):
        x = x * 1
        y = groups(x, w, ENDS)
        x.add_(1)
        return y
    x, w = rand(8, 4), rand(3, 4, 5)
    for run in (f, minicompile.compile(f)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run(x, w).sum().backward()


def test_a_write_to_what_is_kept_otherwise_is_seen():
    def f(x, w, ends):
        y = groups(x, w, ends)
        ends.copy_(ends.roll(1).sort().values)
        return y

    def gradients(run):
        x, w, ends = rand(8, 4), rand(3, 4, 5), torch.tensor([1, 4, 8])
        return torch.autograd.grad(run(x, w, ends).sum(), (x, w))
    compiled = minicompile.compile(f)
    for got, e in zip(gradients(compiled), gradients(f)):
        torch.testing.assert_close(got, e)


def test_a_second_derivative_is_that_of_eager():
    def penalty(x, w):
        slope, = torch.autograd.grad(by_keyword(x, w).square().sum(), x, create_graph=True)
        return slope.square().sum()
    x, w = rand(8, 4), rand(3, 4, 5)
    expected = torch.autograd.grad(penalty(x, w), (x, w))
    for got, e in zip(torch.autograd.grad(minicompile.compile(penalty)(x, w), (x, w)), expected):
        torch.testing.assert_close(got, e)
    compiled = minicompile.compile(by_keyword)

    def from_outside(x, w):
        slope, = torch.autograd.grad(compiled(x, w).square().sum(), x, create_graph=True)
        return slope.square().sum()
    for got, e in zip(torch.autograd.grad(from_outside(x, w), (x, w)), expected):
        torch.testing.assert_close(got, e)


def test_sizes_that_vary():
    def f(x, w, ends):
        return groups(x.sin(), w, ends, scale=0.5) * x.sum()
    compiled, w = minicompile.compile(f, fullgraph=True, dynamic=True), rand(3, 4, 5)
    for n in (8, 11, 5, 8):
        x, ends = rand(n, 4), torch.tensor([1, 3, n])
        expected = torch.autograd.grad(f(x, w, ends).sum(), (x, w))
        for got, e in zip(torch.autograd.grad(compiled(x, w, ends).sum(), (x, w)), expected):
            torch.testing.assert_close(got, e)


@pytest.mark.gpu
def test_on_a_gpu():
    def f(x, w):
        return groups(x.sin(), w, ENDS.cuda(), scale=2.0).relu() * 3
    x, w = (rand(*size).detach().cuda().requires_grad_() for size in ((8, 4), (3, 4, 5)))
    for mode in ("default", "reduce-overhead"):
        compiled = minicompile.compile(f, fullgraph=True, mode=mode)
        for _ in range(5):
            for got, e in zip(torch.autograd.grad(compiled(x, w).sum(), (x, w)), torch.autograd.grad(f(x, w).sum(), (x, w))):
                torch.testing.assert_close(got, e)


@torch.library.custom_op("minicompile_registered::scaled", mutates_args=())
def scaled(x: torch.Tensor, by: torch.Tensor | None = None) -> torch.Tensor:
    return x * (2 if by is None else by.item())


@scaled.register_fake
def _(x, by=None):
    return torch.empty_like(x)


def scaled_backward(ctx, grad):
    scale = [by.item() for by in ctx.saved_tensors] or [2]
    return torch.tensor([g * scale[0] for g in grad.tolist()]), None


scaled.register_autograd(scaled_backward,
                         setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*[t for t in inputs[1:] if t is not None]))


@pytest.mark.parametrize("backend", ["aot_eager", "cpp"])
def test_calls_that_save_other_arguments_do_not_take_each_others_derivative(backend):
    with_default, with_scale = (minicompile.compile(f, fullgraph=True, backend=backend) for f in (
        lambda x: scaled(x.sin()).cos(), lambda x: scaled(x.sin(), torch.tensor(3.0)).cos()))
    for compiled, scale in ((with_default, 2), (with_scale, 3), (with_default, 2), (with_scale, 3)):
        x = rand(5)
        got, expected = torch.autograd.grad(compiled(x).sum(), x), torch.autograd.grad((x.sin() * scale).cos().sum(), x)
        torch.testing.assert_close(got, expected)


def test_calls_alike_try_the_derivative_once(monkeypatch):
    def f(x, w):
        for _ in range(4):
            x = scaled(x) + scaled(x.sin()) * scaled(x, w)
        return x + scaled(x[:3]).sum() + scaled(x.detach())
    tried, ask = [], registered.asks_for_numbers
    monkeypatch.setattr(registered, "asks_for_numbers", lambda op, *args: tried.append(op) or ask(op, *args))
    x, w = rand(5), torch.tensor(3.0)
    got = torch.autograd.grad(minicompile.compile(f, fullgraph=True, backend="aot_eager")(x, w).sum(), x)
    torch.testing.assert_close(got, torch.autograd.grad(f(x, w).sum(), x))
    assert len(tried) == 3
