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
