"""On a GPU: attention is recorded as the kernel that eager would pick, batch norm generically, dropout with eager's stream."""
import pytest
import torch
import torch.nn.functional as F
from helpers import compile_function

import minicompile

pytestmark = pytest.mark.gpu


def rand(*shape, dtype=torch.float32, grad=True):
    return torch.randn(*shape, dtype=dtype, device="cuda").requires_grad_(grad)


def targets(compiled):
    return {str(n.target) for n in compiled.joint.gm.graph.nodes if n.op == "call_function"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_kernel_is_eagers_choice(dtype, causal):
    q, k, v = (rand(2, 4, 128, 64, dtype=dtype) for _ in range(3))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal).grad_fn.name()
    compiled = compile_function(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal), [q, k, v])
    kind = next(kind for kind in ("Flash", "Efficient", "Cudnn", "Math", "Unsafe", "Bmm") if kind in expected)
    if kind in ("Flash", "Efficient", "Cudnn"):
        assert any(kind.lower() in t for t in targets(compiled)), (expected, targets(compiled))
    out, = compiled(q, k, v)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, is_causal=causal), rtol=1e-2, atol=1e-2)
    out.sum().backward()
    assert q.grad is not None and torch.isfinite(q.grad).all()


def test_batch_norm_is_recorded_generically():
    x, w, b = rand(4, 8, 6, 6), rand(8), rand(8)
    mean, var = torch.zeros(8, device="cuda"), torch.ones(8, device="cuda")
    compiled = compile_function(lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, training=True), [x, w, b, mean, var])
    assert not any("cudnn_batch_norm" in t for t in targets(compiled))
    out, = compiled(x, w, b, mean, var)
    mean2, var2 = torch.zeros(8, device="cuda"), torch.ones(8, device="cuda")
    torch.testing.assert_close(out, F.batch_norm(x, mean2, var2, w, b, training=True), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mean, mean2)


def test_dropout_stream():
    x = rand(64, 64)
    compiled = compile_function(lambda x: F.dropout(x.sin(), 0.3), [x])
    torch.manual_seed(5)
    ours, = compiled(x)
    torch.manual_seed(5)
    assert torch.equal(ours, F.dropout(x.sin(), 0.3))


def test_backward_is_recorded_in_the_calling_thread():
    compiled = compile_function(lambda x, w: F.gelu(x @ w).sum(), [rand(8, 8), rand(8, 8)])
    assert any("gelu_backward" in t for t in targets(compiled))


def test_sampling_that_cudnn_computes():
    def f(x, theta):
        return F.grid_sample(x, F.affine_grid(theta, [2, 3, 5, 6], align_corners=True), align_corners=True)
    x, theta = rand(2, 3, 8, 8), rand(2, 2, 3)
    compiled = minicompile.compile(f, fullgraph=True)
    expected = torch.autograd.grad(f(x, theta).square().sum(), (x, theta))
    for got, e in zip(torch.autograd.grad(compiled(x, theta).square().sum(), (x, theta)), expected):
        torch.testing.assert_close(got, e, rtol=1e-4, atol=1e-4)

    def inside(x, theta):
        return torch.autograd.grad(f(x, theta).square().sum(), (x, theta))
    for got, e in zip(minicompile.compile(inside, fullgraph=True)(x, theta), expected):
        torch.testing.assert_close(got, e, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_some_gradients_of_many(mode):
    """A version of the backward without the others, compiled at the second call and recorded by then or later."""
    weights = [rand(8, 8) for _ in range(3)]

    def loss(x):
        for w in weights:
            x = (x @ w).tanh()
        return x.square().sum()

    fast = minicompile.compile(loss, mode=mode)
    for turn in range(5):
        x = rand(16, 8)
        for wanted in ([x], [weights[1]], [x, *weights], [weights[0], weights[2]]):
            found = torch.autograd.grad(fast(x), wanted)
            torch.testing.assert_close(found, torch.autograd.grad(loss(x), wanted), rtol=1e-4, atol=1e-4)
