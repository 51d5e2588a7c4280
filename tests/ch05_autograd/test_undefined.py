"""A backward graph without some of its tangents gives what the whole one gives for zeros in their place."""
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import compile_function

import minicompile
from minicompile.ch01_graphs.graph import interpret
from minicompile.ch05_autograd.undefined import without_tangents
from minicompile.ch06_decompositions.decompose import decompose

aten = torch.ops.aten


def rand(*shape):
    return torch.randn(*shape, requires_grad=True)


def language_model(x, w):
    logits = F.layer_norm(F.gelu(x @ w), (6,))
    return logits, F.cross_entropy(logits, torch.arange(4) % 6)


def chain(x, w):
    h = torch.relu(x @ w)
    return h, h.sum(), (h * x.sum(1, keepdim=True)).transpose(0, 1) + 1


def pieces(x, w):
    joined = torch.cat([x, w.t() * 2], 1)
    return joined[:, :3], torch.where(x > 0, x, -x), joined.softmax(1).view(-1), F.dropout(w, 0.5)


CASES = {"language_model": (language_model, rand(4, 5), rand(5, 6)), "chain": (chain, rand(4, 5), rand(5, 5)),
         "pieces": (pieces, rand(4, 5), rand(5, 4))}


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_like_zeros(name, decomposed):
    fn, *inputs = CASES[name]
    backward = compile_function(fn, inputs).partition.backward
    backward = decompose(backward) if decomposed else backward
    placeholders = [n for n in backward.graph.nodes if n.op == "placeholder"]
    torch.manual_seed(0)
    values = {n.name: torch.empty(n.meta["val"].shape, device="cpu").uniform_(0, 4).to(n.meta["val"].dtype)
              for n in placeholders}
    tangents = [n.name for n in placeholders if n.name.startswith("tangent")]
    for count in range(1, len(tangents) + 1):
        for absent in itertools.combinations(tangents, count):
            zeros = {name: torch.zeros_like(values[name]) for name in absent}
            want = interpret(backward, list({**values, **zeros}.values()))
            smaller = without_tangents(backward, set(absent))
            got = interpret(smaller, [v for name, v in values.items() if name not in absent])
            for a, b in zip(want, got, strict=True):
                torch.testing.assert_close(b if b is not None else torch.zeros_like(a), a)


def test_nothing_is_computed_for_logits_that_nobody_differentiates():
    x, w = rand(4, 5), rand(5, 6)
    compiled = compile_function(lambda x, w: ((x @ w).sin(), (x @ w).sin().sum()), [x, w])
    only_loss = without_tangents(compiled.partition.backward, {"tangent0"})
    unneeded = (aten.add.Tensor, aten.zeros.default, aten.full.default)
    assert not any(n.target in unneeded for n in only_loss.graph.nodes)
    assert sum(n.target is aten.mm.default for n in only_loss.graph.nodes) == 2
    nothing = without_tangents(compiled.partition.backward, {"tangent0", "tangent1"}, {0, 1})
    assert [n.op for n in nothing.graph.nodes if n.op == "call_function"] == []


def test_gradients_by_any_set_of_outputs():
    fn, *inputs = CASES["chain"]
    compiled = compile_function(fn, inputs)
    for used in ([0], [1], [2], [0, 2], [0, 1, 2]):
        want, got = [torch.autograd.grad(sum(f(*inputs)[i].sum() for i in used), inputs)
                     for f in (fn, compiled)]
        for a, b in zip(want, got):
            torch.testing.assert_close(b, a)


@pytest.mark.parametrize("step", [torch.floor, torch.sgn, lambda x: x.pow(0), lambda x: torch.copysign(x.detach(), x), lambda x: x.ne_(0)],
                         ids=["of the tangent", "lazy", "a number", "of the input", "a write"])
def test_gradients_of_zero_are_zeros_and_not_none(step):
    """Such a derivative depends on its tangent in eager, where None stays None, and only there, be its zeros made of the tangent or not."""
    def fn(x, y):
        return step(x * 2) + 1, x.sin() * y, y * 2, x * 3
    for rung in ("aot_eager", "decomposed"):
        for used in ([0], [1], [2], [0, 2], [3]):
            grads = []
            for f in (fn, minicompile.compile(fn, backend=rung)):
                x, y = (torch.ones(3).requires_grad_() for _ in "xy")
                sum(f(x, y)[i].sum() for i in used).backward()
                grads.append([t.grad for t in (x, y)])
            assert [g is None for g in grads[0]] == [g is None for g in grads[1]], (rung, used)


def test_a_zero_depends_on_the_tangent_it_is_made_of_and_on_no_other():
    """Nobody uses what was copied into `x`, and the norm has no derivative: so there is none for `x`, which is 0 times infinity if taken
    for zeros."""
    def norm(x):
        x.copy_(x * 2)
        return x.sin().norm(p=0)

    grads = []
    for f in (norm, minicompile.compile(norm, backend="aot_eager")):
        a = torch.tensor([1.0, math.inf]).requires_grad_()
        (a.sum() + f(a ** 3)).backward()
        grads.append(a.grad)
    assert torch.equal(*grads)


CARRIES = {"a product": lambda x, k: (x * k).relu(), "a choice": lambda x, k: torch.where(x > 0, x, x * k) * k,
           "a part": lambda x, k: (x * k)[1:], "parts": lambda x, k: torch.cat([x * k, x.sin()]),
           "a sum": lambda x, k: (x * k + x).relu() * k.sum(),
           "a write": lambda x, k: (x * k).index_add(0, torch.tensor([0]), x[:1] * k[:1])}


@pytest.mark.parametrize("carry", CARRIES.values(), ids=list(CARRIES))
@pytest.mark.parametrize("step", [torch.sign, torch.floor, lambda x: x.sin() * 0, lambda x: x - x.detach()],
                         ids=["sign", "floor", "times 0", "itself"])
def test_zeros_that_a_derivative_gives_are_numbers_also_beside_a_tangent_that_never_arrives(carry, step):
    """A gradient of zeros that is computed, times infinity, is NaN; of a gradient that never arrives nothing is."""
    def fn(x, k):
        x = x * 1
        x.mul_(2)
        return x.cos() * k, step(carry(x, k)), x
    minicompile.reset()
    for rung in ("aot_eager", "decomposed", "loops"):
        compiled = minicompile.compile(fn, backend=rung)
        for used in ([0], [1], [2], [1, 2], [0, 1]):
            grads = []
            for f in (fn, compiled):
                x = torch.tensor([1.0, -2.0, 3.0, math.inf]).requires_grad_()
                k = torch.tensor([math.inf, 1.0, math.nan, 0.0])
                sum(f(x, k)[i].sum() for i in used).backward()
                grads.append(x.grad)
            assert torch.equal(grads[0].isnan(), grads[1].isnan()) and torch.equal(*(g.nan_to_num() for g in grads)), (rung, used, grads)


@pytest.mark.parametrize("step", [torch.sign, torch.floor, torch.round])
def test_zeros_that_no_tangent_leads_to_are_not_computed_in_forward(step):
    """What is computed of them depends on no tangent, and forward could do it: it is NaN."""
    def fn(x):
        scale = x.sigmoid().sum(0).log().sum() + torch.zeros(4, 3).sum()
        return scale, step(x / scale)
    for rung in ("aot_eager", "decomposed", "loops"):
        compiled = minicompile.compile(fn, backend=rung)
        for used in ([0], [1], [0, 1]):
            grads = []
            for f in (fn, compiled):
                x = torch.tensor([[1.0, math.inf, 2.0], [3.0, 1.0, math.inf], [1.0, 2.0, 4.0], [0.0, 0.5, 1.0]]).requires_grad_()
                sum(f(x)[i].sum() for i in used).backward()
                grads.append(x.grad)
            torch.testing.assert_close(*grads, equal_nan=True, msg=lambda text: f"{rung} {used}: {text}")


def halves_of(x, k):
    """Sizes of one number that are spelled differently: half of a dimension, and half of it rounded up."""
    rows = x.sin().view(k.shape[0], -1, 4)
    a, b = rows.chunk(2, 1)
    return (a * b).sum(), torch.cat([a, b], 1).transpose(0, 1), x.sin() * 2


def test_outputs_that_are_first_missing_at_a_later_call_ask_for_no_guard():
    compiled = minicompile.compile(halves_of, dynamic=True)
    for n, used in itertools.product((8, 16, 24), ([0], [0, 1], [1], [1, 2], [2])):
        torch.manual_seed(n)
        x, k = rand(n, 6), torch.zeros(2)
        got, want = (torch.autograd.grad(sum(f(x, k)[i].square().sum() for i in used), x)[0] for f in (compiled, halves_of))
        torch.testing.assert_close(got, want)
