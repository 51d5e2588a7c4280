"""Programs that write to a tensor they were given: a leaf, an activation that has a gradient, or plain numbers."""
import random

import pytest
import torch
import torch.nn.functional as F

import minicompile
from minicompile.backends import harm_each_other

PROGRAMS = {
    "setitem": lambda x, w: (x.__setitem__(0, 1), x * w)[1],
    "relu_": lambda x, w: F.relu(x, inplace=True) * w,
    "dropout_": lambda x, w: F.dropout(x, 0.5, True, True) * w,
    "through a view": lambda x, w: (x[1:].mul_(w[1:]), x * 2)[1],
    "mul_": lambda x, w: x.mul_(w).exp() * x,
    "only the write": lambda x, w: x.add_(w) is x,
    "overwritten": lambda x, w: (x.zero_(), x + w)[1],
    "copy_": lambda x, w: (x.copy_(w), x * 2)[1],
    "saved before": lambda x, w: (x.exp(), x.mul_(2))[0] * x,
    "detached": lambda x, w: (x.detach().mul_(2), x * w)[1],
    "data": lambda x, w: (x.data.add_(1), x * w)[1],
    "index_put_": lambda x, w: (x.__setitem__(torch.tensor([0, 2]), w[:2]), x.sum())[1],
    "asked after": lambda x, w: (x.is_leaf, x.grad_fn is None, x.mul_(w), x.is_leaf, x.grad_fn is None, x.requires_grad),
}
INPUTS = {"leaf": lambda v: v, "activation": lambda v: v * 3, "plain": lambda v: v.detach().clone(), "view": lambda v: (v * 3)[:]}

pytestmark = pytest.mark.usefixtures("fresh")


def seen(function, make):
    """What one call shows: results, gradients, what became of the input, or the error."""
    w, v = torch.tensor([2., 3, 4], requires_grad=True), torch.tensor([.5, .6, .7], requires_grad=True)
    x = make(v)
    torch.manual_seed(0)
    try:
        result = function(x, w)
        tensors = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        (sum(t.sum() for t in tensors) + (x * 5).sum()).backward()
    except RuntimeError as error:
        result = str(error)
    return result, x.detach(), x.requires_grad, x.is_leaf, w.grad, v.grad


@pytest.mark.parametrize("backend", ("eager", "aot_eager", "loops"))
@pytest.mark.parametrize("name", PROGRAMS)
def test_writes(name, backend):
    """All kinds of input through one compiled function, in both orders: what one relied on must not serve another."""
    program = PROGRAMS[name]
    for order in (INPUTS, reversed(INPUTS)):
        minicompile.reset()
        compiled = minicompile.compile(program, backend=backend)
        for kind in order:
            for got, expected in zip(seen(compiled, INPUTS[kind]), seen(program, INPUTS[kind]), strict=True):
                if isinstance(expected, str):
                    assert got == expected, kind
                else:
                    torch.testing.assert_close(got, expected, msg=lambda m: f"{kind}: {m}")


@pytest.mark.parametrize("name", [n for n in PROGRAMS if n != "asked after"])
def test_an_activation_is_written_in_the_graph(name):
    found = minicompile.explain(PROGRAMS[name])(torch.ones(3, requires_grad=True) * 3, torch.ones(3, requires_grad=True))
    assert len(found.graphs) == 1 and not found.breaks


def test_ranges_that_overlap_are_found_in_order_of_address():
    def every_pair(spans, kinds):
        return any(a < d and c < b and a < b and c < d and (w or x) and not (m and y)
                   for n, ((a, b), (w, m)) in enumerate(zip(spans, kinds)) for (c, d), (x, y) in zip(spans[:n], kinds[:n]))

    draw, found = random.Random(0), 0
    for _ in range(3000):
        spans = [(at, at + draw.choice((0, 1, 2, 3, 5))) for at in (draw.randint(0, 20) for _ in range(draw.randint(2, 6)))]
        kinds = [(draw.random() < .4, draw.random() < .4) for _ in spans]
        assert harm_each_other(spans, kinds) == every_pair(spans, kinds), (spans, kinds)
        found += harm_each_other(spans, kinds)
    assert 300 < found < 2700
