"""Whole programs through every rung of the ladder of backends, against eager: values, gradients, mutation, aliasing, randomness.

The first rung that fails names the stage that is wrong."""

import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import minicompile
from minicompile.bench.models import GPT, Bottleneck, GPTConfig

RUNGS = ["eager", "aot_eager", "decomposed", "loops", "cpp"]

pytestmark = pytest.mark.usefixtures("fresh")


def run(fn, inputs, seed=7):
    """(outputs, gradients, inputs afterwards) of `fn` on fresh copies of the inputs."""
    inputs = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in inputs]
    leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    torch.manual_seed(seed)
    out = fn(*inputs)
    outs = [o for o in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(o, torch.Tensor)]
    differentiable = [o for o in outs if o.requires_grad]
    if isinstance(fn, nn.Module):
        leaves += list(fn.parameters())
    grads = torch.autograd.grad(sum((o.float() * torch.arange(1, o.numel() + 1).view(o.shape) / o.numel()).sum() for o in differentiable),
                                leaves, allow_unused=True) if differentiable and leaves else []
    return outs, list(grads), inputs


def check(fn, inputs, rung, tolerance=2e-5, **options):
    expected = run(fn, inputs)
    compiled = minicompile.compile(fn, backend=rung, fullgraph=True, **options)
    for _ in range(2):
        for want, got in zip(expected, run(compiled, inputs)):
            assert len(want) == len(got)
            for w, g in zip(want, got):
                if not isinstance(w, torch.Tensor):
                    assert type(w) is type(g) and (w is None or w == g)
                    continue
                torch.testing.assert_close(g, w, rtol=tolerance, atol=tolerance, equal_nan=True)
                assert (g.stride(), g.requires_grad) == (w.stride(), w.requires_grad)


def bias_gelu_residual(x, bias, residual):
    return F.gelu(x + bias) + residual


def bytes_of_empty(x):
    return x.view(torch.int8).view(torch.float32) + 1, x.view(torch.int16)


def softmax_masked(x):
    mask = torch.tril(torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device))
    return F.softmax((x * 0.3).masked_fill(~mask, float("-inf")), dim=-1)


def layer_norm_residual(x, w, b):
    return F.layer_norm(x + x.sin(), (x.shape[-1],), w, b), x.mean((0, 1))


def cross_entropy(x, w):
    return F.cross_entropy(x @ w, torch.arange(x.shape[0]) % w.shape[1])


def views_and_mutation(x):
    y = x.clone()
    y[1:].mul_(2)
    y.t()[0].add_(1)
    return y.view(-1)[::2], y.sum(0)


def mutates_input(x, y):
    x.add_(y)
    return (x * y).sum(1)


def gather_scatter(x, w):
    index = torch.arange(6).view(2, 3) % x.shape[0]
    picked = x[index] + F.embedding(index, w)
    return picked.sum(), torch.zeros(4, x.shape[1]).index_add(0, index.view(-1), picked.view(6, -1))


def reductions(x):
    return x.amax(1), x.argmax(0), x.std(1), x.prod(0), (x > 0).any(1), x.logsumexp(1), x.norm()


def dropout_chain(x):
    return F.dropout(F.relu(x), 0.5, True) * 2


def pooling(x):
    return F.max_pool2d(x, 3, 2, 1), F.adaptive_avg_pool2d(x, 1), F.avg_pool2d(x, 2)


def autocast_linear(x, w):
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(x, w).float().relu()


def t(*shape, grad=True, **kwargs):
    return torch.randn(*shape, **kwargs).requires_grad_(grad)


PROGRAMS = {
    "bias_gelu_residual": (bias_gelu_residual, lambda: [t(8, 33), t(33), t(8, 33)]),
    "broadcast_size_one": (bias_gelu_residual, lambda: [t(5, 1), t(7), t(1, 7)]),
    "empty": (bias_gelu_residual, lambda: [t(0, 33), t(33), t(0, 33)]),
    "bytes_of_empty": (bytes_of_empty, lambda: [t(2, 0, grad=False)]),
    "softmax_masked": (softmax_masked, lambda: [t(2, 9, 9)]),
    "layer_norm_residual": (layer_norm_residual, lambda: [t(4, 5, 40), t(40), t(40)]),
    "cross_entropy": (cross_entropy, lambda: [t(12, 16), t(16, 10)]),
    "views_and_mutation": (views_and_mutation, lambda: [t(4, 6)]),
    "mutates_input": (mutates_input, lambda: [t(4, 6, grad=False), t(4, 6)]),
    "gather_scatter": (gather_scatter, lambda: [t(4, 6), t(9, 6)]),
    "reductions": (reductions, lambda: [t(7, 11)]),
    "reductions_nan": (reductions, lambda: [torch.tensor([[1.0, float("nan"), 3.0], [0.0, -1.0, float("inf")]])]),
    "transposed_input": (reductions, lambda: [torch.randn(11, 7).t()]),
    "dropout_chain": (dropout_chain, lambda: [t(64, 64)]),
    "pooling": (pooling, lambda: [t(2, 3, 12, 12)]),
    "pooling_channels_last": (pooling, lambda: [torch.randn(2, 4, 12, 12).to(memory_format=torch.channels_last)]),
    "autocast_linear": (autocast_linear, lambda: [t(8, 16), t(4, 16)]),
}


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name, rung):
    fn, inputs = PROGRAMS[name]
    check(fn, inputs(), rung, tolerance=2e-2 if "autocast" in name else 2e-5)


@pytest.mark.parametrize("rung", RUNGS)
def test_gpt(rung):
    model = GPT(GPTConfig(vocab_size=23, block_size=8, layers=2, heads=2, width=16, dropout=0.1, bias=True))
    tokens = torch.randint(23, (3, 8))
    check(model, [tokens, tokens.roll(-1, 1)], rung)


@pytest.mark.parametrize("rung", RUNGS)
def test_bottleneck_updates_running_statistics(rung):
    def build():
        torch.manual_seed(3)
        return Bottleneck(8, 4, 2)

    x = torch.randn(2, 8, 8, 8, requires_grad=True)
    plain, other = build(), build()
    compiled = minicompile.compile(other, backend=rung, fullgraph=True)
    for _ in range(3):
        a, b = run(plain, [x]), run(compiled, [x])
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(other.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rung", ["aot_eager", "cpp"])
def test_training_follows_eager(rung):
    def losses(wrap):
        torch.manual_seed(1)
        model = GPT(GPTConfig(vocab_size=17, block_size=8, layers=1, heads=2, width=16))
        run, optimizer = wrap(model), torch.optim.AdamW(model.parameters(), lr=1e-2)
        out = []
        for _ in range(12):
            tokens = torch.randint(17, (4, 8))
            _, loss = run(tokens, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            out.append(loss.item())
        return out

    want = losses(lambda m: m)
    got = losses(lambda m: minicompile.compile(m, backend=rung))
    assert want[-1] < want[0] * 0.8
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def with_tail(x):
    """x and a few numbers more at which rounding decides."""
    return torch.cat([x, torch.tensor([1.0, -0.5, 0.1, 2.0, 3.0, 0.33, -7.0]).to(x.dtype)])


def gradient_of(fn):
    def run(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(fn(x * 1.7).float().sum(), x)[0]
    return run


# What is computed in half precision is rounded to it, also where fusion keeps it in a register
HALVES = {
    "is_the_largest": lambda x: (x * 1.7) == (x * 1.7).amax(0, keepdim=True),
    "is_the_largest_widened": lambda x: (x * 1.7).float() == (x * 1.7).amax().float(),
    "first_of_equals": lambda x: (torch.cat([x * 1e-3 + 1, x]) * 3).argmax(),
    "floor": lambda x: ((x * 3) / 3).floor(),
    "trunc_of_quotient": lambda x: torch.div(x * 3 * 0.1, x.new_tensor(0.3), rounding_mode="trunc"),
    "remainder": lambda x: torch.remainder(x * 3, 1.5),
    "sign_of_underflow": lambda x: (x * 1e-5 * 1e-5).sign(),
    "integer": lambda x: (x * 3 * 0.3333).to(torch.int64),
    "two_halves": lambda x: ((x.float() * 1.1).to(x.dtype).float() - x.float() * 1.1).to(x.dtype),
    "between_halves": lambda x: (x * 1.1).to(torch.float16).to(torch.bfloat16).to(torch.float16),
    "acos_of_one": lambda x: ((x * 1.7) / (x * 1.7).abs()).mul(1.001).acos(),
    "logarithm_of_zero": lambda x: (1.001 - x / x).log(),
}
HALF_GRADIENTS = {"amax": lambda q: q.amax(0), "norm": lambda q: q.norm(p=float("inf")), "aminmax": lambda q: sum(q.aminmax()),
                  "dist": lambda q: torch.dist(q, q.detach() * 0.3, p=float("inf"))}
if torch.__version__.startswith("2.11"):         # where `aminmax` has no derivative
    del HALF_GRADIENTS["aminmax"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", HALVES)
def test_half_precision_is_rounded_where_it_can_be_told(name, dtype):
    check_halves(name, dtype, "cpp")


def check_halves(name, dtype, rung):
    for seed in range(3):
        torch.manual_seed(seed)
        x = with_tail(torch.randn(64).to(dtype))
        got = minicompile.compile(HALVES[name], backend=rung, fullgraph=True)(x)
        torch.testing.assert_close(got, HALVES[name](x), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", HALF_GRADIENTS)
def test_gradients_go_where_the_largest_is(name):
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(64).bfloat16()
        leaf = x.clone().requires_grad_()
        fn = HALF_GRADIENTS[name]
        minicompile.compile(lambda x: fn(x * 1.7), backend="cpp", fullgraph=True)(leaf).backward()
        torch.testing.assert_close(leaf.grad, gradient_of(fn)(x))


INDICES = {
    "repeat_interleave": (lambda x: x.repeat_interleave(3, 0).flip(0) + 1, (5, 4)),
    "tile": (lambda x: (x.tile(2) * 2)[:, :, torch.arange(10).flip(0)], (2, 3, 5)),
    "roll_of_repeat": (lambda x: x.repeat(3, 2).flip(0, 1).roll(3, 1) * 2, (4, 5)),
    "flipped_blocks": (lambda x: x.reshape(3, 4, 2).flip(1).reshape(6, 4).flip(0, 1).t() + 1, (24,)),
}


def check_indices(name, rung, dynamic):
    fn, size = INDICES[name]
    x = torch.rand(size)
    got = minicompile.compile(fn, backend=rung, fullgraph=True, dynamic=dynamic)(x)
    torch.testing.assert_close(got, fn(x), rtol=0, atol=0)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", INDICES)
def test_indices_whose_numerators_are_negative(name, dynamic):
    check_indices(name, "cpp", dynamic)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="run by test_triton_rung in a process of its own")
@pytest.mark.parametrize("name", [*INDICES, *HALVES])
def test_triton_exact(name, captured):
    if name in HALVES:
        check_halves(name, torch.float16, "triton")
        check_halves(name, torch.bfloat16, "triton")
    else:
        check_indices(name, "triton", False)
    assert captured and all(code.co_filename == __file__ for code in captured)          # nothing of Triton's own Python


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="run by test_triton_rung in a process of its own")
@pytest.mark.parametrize("name", ["bias_gelu_residual", "softmax_masked", "layer_norm_residual", "reductions", "cross_entropy"])
def test_triton_program(name):
    fn, inputs = PROGRAMS[name]
    check(fn, inputs(), "triton")


@pytest.mark.processes
def test_triton_rung():
    """Triton decides at import whether it interprets, so these programs run in a process of their own."""
    import subprocess
    import sys
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", __file__, "-k", "test_triton_program or test_triton_exact", "-p",
                          "no:xdist", "-p", "no:cacheprovider"],
                         env=dict(os.environ, TRITON_INTERPRET="1"), capture_output=True, text=True)
    assert run.returncode == 0 and f"{5 + len(INDICES) + len(HALVES)} passed" in run.stdout, run.stdout[-3000:]


# ---- as_strided, which may show more than the tensor it is called on

def strided_before_a_write(x):
    v1 = x * 1
    v3 = v1[2:7:2]
    view = v3.as_strided((2, 2), (1, 1))
    v3.mul_(0.1)
    return view.clone()


def strided_of_detached_before_a_write(x):
    v1 = x * 1
    v3 = v1[2:]
    view = v3.detach().as_strided((2,), (1,), 1)
    v3.mul_(3)
    return v1 * view[0], view.clone()


def written_through_strided(x):
    v1 = x * 1
    v = v1[1:7]
    w, u = v.as_strided((2, 2), (2, 1)), v.as_strided((3,), (1,), 0)
    w.mul_(2)
    u.sin_()
    return w * 2, v1 * 2, v * 3, u * 2


def strided_of_another_dtype(x):
    v1 = x * 1
    bits = v1.view(torch.int32)[2:].as_strided((3,), (1,), 1)
    v1.mul_(2)
    bits.bitwise_and_(-2)
    return v1 * 2, bits * 2


def strided_of_a_flip(x):
    v = (x * 1).flip(0)[2:]
    return v.as_strided((2,), (1,), 0) * 2, torch.as_strided_scatter(v, x[:2], (2,), (1,), 3)


def scattered_beyond(x):
    return torch.as_strided_scatter((x * 1)[2:], x[:2], (2,), (1,), 0) * 2


def strided_of_an_input(x):
    v = x[2:]
    return v.as_strided((2,), (1,), 3) * v.sin()[0], v.as_strided((2,), (1,)) * 2


def beyond_an_input(x):
    return x.as_strided((4,), (1,)) * 2


def read_through_strided_after_a_write(x):
    w = x.as_strided((2,), (1,), 1)
    x.add_(1)
    return w * 2


def write_through_strided(x):
    x.as_strided((2,), (1,)).add_(1)
    return x * 2


MEMORIES = {"whole": lambda t: t, "from 1": lambda t: t[1:], "from 2": lambda t: t[2:], "stepped": lambda t: t[::2],
            "transposed": lambda t: t.view(3, 4).t(), "expanded": lambda t: t[:1].expand(8), "short": lambda t: t[:3]}


@pytest.mark.parametrize("rung", RUNGS[1:])
@pytest.mark.parametrize("fn", [
    strided_before_a_write, strided_of_detached_before_a_write, written_through_strided, strided_of_another_dtype, strided_of_a_flip,
    scattered_beyond, strided_of_an_input, beyond_an_input, read_through_strided_after_a_write, write_through_strided],
    ids=lambda f: f.__name__)
def test_strided_views_of_all_memory(fn, rung):
    """The same compiled function on memory of many forms, which a view may show more of than the tensor has."""
    compiled = minicompile.compile(fn, backend=rung)
    for part in MEMORIES.values():
        results = []
        for f in (fn, compiled):
            leaf = torch.linspace(-2, 3, 12).sin().requires_grad_(not fn.__name__.endswith(("write", "strided")))
            try:
                out = f(part(leaf))
                out = out if isinstance(out, tuple) else (out,)
                if wanted := [o for o in out if o.requires_grad]:
                    sum((o * torch.linspace(0.5, 1.5, o.numel()).view(o.shape)).sum() for o in wanted).backward()
                results.append([*out, leaf, torch.zeros(12) if leaf.grad is None else leaf.grad])
            except Exception as error:
                results.append([torch.zeros(0), type(error).__name__])
        assert len(results[0]) == len(results[1]), results
        for a, b in zip(*results):
            if isinstance(a, str):
                assert a == b, results
            else:
                torch.testing.assert_close(b.detach(), a.detach())
