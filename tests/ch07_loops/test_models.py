"""Training graphs of a transformer block and a residual convolution block: numbers, layouts, and how many loops they take."""
import pytest
import torch
import torch.nn.functional as F

from .helpers import externs, loops, program_of, run_program, same_strides

aten = torch.ops.aten


def block(x, targets, norm1, qkv, proj, norm2, up, down, norm3, table, indices):
    """Embedding, attention, MLP, tied output layer, loss."""
    x = x + F.embedding(indices, table)
    b, t, c = x.shape
    q, k, v = (y.view(b, t, 4, c // 4).transpose(1, 2) for y in (F.layer_norm(x, (c,), norm1) @ qkv.t()).split(c, 2))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous().view(b, t, c)
    x = x + y @ proj.t()
    x = x + F.gelu(F.layer_norm(x, (c,), norm2) @ up.t()) @ down.t()
    logits = F.layer_norm(x, (c,), norm3) @ table.t()
    return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def normalized(x, weight, bias):
    return aten._native_batch_norm_legit.no_stats(x, weight, bias, True, 0.1, 1e-5)[0]


def bottleneck(x, conv0, w0, b0, conv1, w1, b1, conv2, w2, b2):
    """The stem of a ResNet and one residual branch."""
    x = F.max_pool2d(F.relu(normalized(F.conv2d(x, conv0, None, 2, 3), w0, b0)), 3, 2, 1)
    y = F.relu(normalized(F.conv2d(x, conv1, None, 1, 1), w1, b1))
    y = F.relu(x + normalized(F.conv2d(y, conv2), w2, b2))
    return y.mean((2, 3)).square().mean()


def training(fn):
    def step(*args):
        leaves = [a for a in args if a.requires_grad]
        loss = fn(*[a for a in args])
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]
    return step


def small(*size):
    return (torch.randn(*size) * 0.1).requires_grad_()


def block_arguments(b=4, t=16, c=32, v=33):
    return [small(b, t, c).detach(), torch.randint(0, v, (b, t)), small(c), small(3 * c, c), small(c, c), small(c),
            small(4 * c, c), small(c, 4 * c), small(c), small(v, c), torch.randint(0, v, (b, t))]


def bottleneck_arguments(form):
    def laid(t):
        return t.detach().contiguous(memory_format=form).requires_grad_(t.requires_grad)
    return [laid(small(4, 3, 32, 32).detach()), laid(small(8, 3, 7, 7)), small(8), small(8), laid(small(16, 8, 3, 3)), small(16),
            small(16), laid(small(8, 16, 1, 1)), small(8), small(8)]


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_transformer_block(device):
    torch.manual_seed(0)
    program = checked(block, block_arguments(), device)
    assert len(externs(program)) == 17
    assert len(loops(program)) < 45
    assert max(len(loop.body) for loop in loops(program)) < 60


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_residual_block(form, device):
    torch.manual_seed(0)
    program = checked(bottleneck, bottleneck_arguments(form), device)
    # Three convolutions, each with its backward; the backward of a maximum over rows of pixels
    assert len(externs(program)) == (6 if form is torch.channels_last else 7)
    assert len(loops(program)) < 40
    if form is torch.channels_last:
        for call in externs(program):
            for name in call.outputs:
                layout = program.buffers[name].layout if name else None
                if layout is not None and len(layout.size) == 4 and layout.size[1] > 1 and layout.size[2] > 1:
                    assert layout.stride[1] == 1


def checked(fn, arguments, device):
    step = training(fn)
    fresh = [a.detach().clone().requires_grad_(a.requires_grad) for a in arguments]
    want = step(*fresh)
    program = program_of(step, arguments, device=device)
    for g, w in zip(run_program(program, [a.detach() for a in arguments]), want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-3, atol=1e-5)
        assert same_strides(g, w)
    return program
