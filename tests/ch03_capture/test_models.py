"""Whole models become one graph each, with eager's outputs, gradients and buffer updates."""
import copy

import pytest
import torch
from gpt_and_resnet import GPT, GPTConfig, ResNet
from recorders import Recorder

import minicompile

pytestmark = pytest.mark.usefixtures("fresh")


def train_step(model, call, *args):
    out = call(*args)
    loss = out[1] if isinstance(out, tuple) else out.square().mean()
    loss.backward()
    return loss


def compare(model, *args, steps=2):
    other = copy.deepcopy(model)
    recorder = Recorder()
    compiled = minicompile.compile(model, backend=recorder, fullgraph=True)
    for _ in range(steps):
        a, b = train_step(model, compiled, *args), train_step(other, other, *args)
        torch.testing.assert_close(a, b)
    assert len(recorder.graphs) == 1
    for (name, p), (_, q) in zip(model.named_parameters(), other.named_parameters()):
        torch.testing.assert_close(p.grad, q.grad, msg=name)
    for (name, p), (_, q) in zip(model.named_buffers(), other.named_buffers()):
        torch.testing.assert_close(p, q, msg=name)
    return recorder.graphs[0]


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_gpt(flash, bias):
    torch.manual_seed(0)
    model = GPT(GPTConfig(flash=flash, bias=bias))
    idx, targets = torch.randint(0, 33, (2, 16)), torch.randint(0, 33, (2, 16))
    gm = compare(model, idx, targets)
    weights = [n for n in gm.graph.nodes if n.op == "placeholder"]
    assert len(weights) == len(list(model.parameters())) + 2 + (3 if not flash else 0)
    lines = {n.meta["location"].function for n in gm.graph.nodes if n.op == "call_function"}
    assert {"forward"} == lines and all("val" in n.meta for n in gm.graph.nodes)


def test_gpt_inference_and_generate():
    torch.manual_seed(0)
    model = GPT(GPTConfig()).eval()
    idx = torch.randint(0, 33, (2, 4))
    compiled = minicompile.compile(model, backend="eager")
    logits, loss = compiled(idx)
    assert loss is None
    torch.testing.assert_close(logits, model(idx)[0])
    torch.manual_seed(1)
    expected = model.generate(idx, 3, top_k=5)
    torch.manual_seed(1)
    torch.testing.assert_close(compiled.generate(idx, 3, top_k=5), expected)


def test_gpt_too_long_raises_as_eager():
    model = GPT(GPTConfig())
    with pytest.raises(AssertionError, match="Cannot forward sequence of length 17"):
        minicompile.compile(model, backend="eager")(torch.zeros(1, 17, dtype=torch.long))


def test_resnet_training():
    torch.manual_seed(0)
    model = ResNet([1, 2, 1, 1], width=4, num_classes=5)
    gm = compare(model, torch.randn(2, 3, 32, 32))
    assert model.bn1.num_batches_tracked == 2
    assert not any(n.op == "get_attr" for n in gm.graph.nodes)


def test_resnet_train_then_eval_recompiles():
    torch.manual_seed(0)
    model = ResNet([1, 1, 1, 1], width=4, num_classes=5)
    recorder = Recorder()
    compiled = minicompile.compile(model, backend=recorder)
    x = torch.randn(2, 3, 32, 32)
    compiled(x)
    model.eval()
    torch.testing.assert_close(compiled(x), model(x))
    model.train()
    compiled(x)
    assert len(recorder.graphs) == 2


def test_eager_training_loop_around_a_broken_step():
    """zero_grad, backward, clipping and step break the graph; what is between is compiled, and nothing drifts."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1))
    other = copy.deepcopy(model)
    batches = [torch.randint(0, 33, (2, 16)) for _ in range(4)]

    def make_step(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)

        def step(x, y):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16):
                logits, loss = model(x, y)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss.item(), norm
        return step
    recorder = Recorder()
    compiled, eager = minicompile.compile(make_step(model), backend=recorder), make_step(other)
    for x, y in zip(batches, batches[1:]):
        assert compiled(x, y) == eager(x, y)
    assert any("embedding" in n.name for gm in recorder.graphs for n in gm.graph.nodes)
