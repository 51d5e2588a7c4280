"""The text of a compiled call."""
import torch

import minicompile
from minicompile.ch02_guards.codegen import reading_inputs
from minicompile.ch02_guards.sources import AttrSource, LocalSource, ModuleAttrSource


def test_what_is_an_input_is_read_from_the_inputs():
    weight = ModuleAttrSource(LocalSource("net"), "_parameters", "weight")
    gradient = AttrSource(weight, "grad")
    path = weight.text()
    lines = [f"{path}.grad = None", f"__t1 = {path}", f"__t2 = {path}.grad", f"__t3 = {path}.data", "__t4 = x", "__t1.grad = __out[0]",
             f"{path} = __out[1]", "return __out[1]"]
    assert reading_inputs(lines, [LocalSource("x"), weight]) == [
        "__inputs[1].grad = None", "__t1 = __inputs[1]", f"__t2 = {path}.grad", f"__t3 = {path}.data", "__t4 = x", "__t1.grad = __out[0]",
        f"{path} = __out[1]", "return __out[1]"]
    assert reading_inputs(lines, [gradient, weight])[2] == "__t2 = __inputs[0]"
    assert reading_inputs(lines, []) == lines


def test_objects_and_gradients_after_the_call_are_those_of_eager():
    """Every line that the end reads or writes through a path that the graph has, too."""
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.seen = torch.nn.Parameter(torch.arange(3.0)), None

    def step(net, x):
        net.weight.grad = None
        loss = (net.weight * x).sum()
        loss.backward()
        before, net.seen = net.seen, net.weight
        return net.weight, before, {"loss": loss.detach()}

    nets, compiled = (Net(), Net()), minicompile.compile(step)
    for n in range(4):
        x, kept, seen = torch.full((3,), n + 1.0), [net.weight.grad for net in nets], nets[1].seen
        expected, got = step(nets[0], x), compiled(nets[1], x)
        assert got[0] is nets[1].weight is nets[1].seen and got[1] is seen
        assert torch.equal(got[2]["loss"], expected[2]["loss"]) and torch.equal(nets[1].weight.grad, x)
        assert n in (0, 3) or torch.equal(kept[1], torch.full((3,), float(n)))
        if n == 2:
            for net in nets:
                net.weight = torch.nn.Parameter(torch.ones(3))
