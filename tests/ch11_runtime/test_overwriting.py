"""Compiled backward passes write gradients over saved activations. Nobody may notice."""
import pytest
import torch

import minicompile
from minicompile.ch11_runtime.host import HostProgram

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def network(x, w, b):
    for _ in range(3):
        x = torch.tanh(torch.nn.functional.layer_norm(x, (16,), w, b) * 2).sin()
        x = x @ torch.eye(16, dtype=x.dtype, device=x.device)
    return x.exp().sum()


@pytest.fixture(params=DEVICES)
def case(request, monkeypatch):
    """(compiled, inputs, gradients of eager, set that fills with the positions that programs overwrite)"""
    minicompile.reset()
    overwritten = set()
    run = HostProgram.__call__

    def watch(program, args):
        overwritten.update(program.overwritten)
        return run(program, args)
    monkeypatch.setattr(HostProgram, "__call__", watch)
    torch.manual_seed(0)
    inputs = [torch.randn(*shape, dtype=torch.double, device=request.param, requires_grad=True)
              for shape in [(20, 16), (16,), (16,)]]
    yield (minicompile.compile(network), inputs, torch.autograd.grad(network(*inputs), inputs), overwritten)
    minicompile.reset()


def test_activations_are_overwritten_and_gradients_are_right(case):
    compiled, inputs, expected, overwritten = case
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(compiled(*inputs), inputs), expected)
    assert overwritten


def test_a_retained_graph_can_be_run_again(case):
    compiled, inputs, expected, overwritten = case
    loss = compiled(*inputs)
    for retain in (True, True, False):
        torch.testing.assert_close(torch.autograd.grad(loss, inputs, retain_graph=retain), expected)
    assert overwritten


def test_saved_tensor_hooks_may_keep_what_they_see(case):
    compiled, inputs, expected, overwritten = case
    kept = []

    def pack(t):
        kept.append((t, t.clone()))
        return t
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = compiled(*inputs)
    torch.testing.assert_close(torch.autograd.grad(loss, inputs), expected)
    assert overwritten and all(torch.equal(t, before) for t, before in kept)


def test_results_that_are_also_saved_survive(case):
    _, (x, *_), _, _ = case

    def several(x):
        y = torch.tanh(x)
        z = torch.exp(y)
        return y, z, y.view(-1), z.sin()
    compiled = minicompile.compile(several)
    out = compiled(x)
    before = [t.detach().clone() for t in out]
    sum(t.sum() for t in out).backward()
    assert all(torch.equal(t, old) for t, old in zip(out, before))


def test_what_another_backward_will_read_is_not_overwritten(monkeypatch):
    """Two losses of one region, differentiated one after the other, share an activation."""
    overwritten, run = set(), HostProgram.__call__
    monkeypatch.setattr(HostProgram, "__call__", lambda program, args: overwritten.update(program.overwritten) or run(program, args))

    def losses(x, v, *weights):
        h, m = x @ v, torch.eye(64)
        return [((((h * w) @ m) * h) @ m).exp().sum() for w in weights]
    x, v, *weights = torch.randn(64, 8), torch.randn(8, 64) / 10, *(torch.randn(64, 64, requires_grad=True) for _ in range(2))
    compiled = minicompile.compile(losses, backend="cpp")
    for order in ((0, 1), (1, 0)):
        found = []
        for function in (compiled, losses):
            results = function(x, v, *weights)
            found.append([torch.autograd.grad(results[i], weights[i])[0] for i in order])
        torch.testing.assert_close(*found)
    assert overwritten
