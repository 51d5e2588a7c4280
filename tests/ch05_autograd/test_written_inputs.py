"""Programs that write to a tensor they were given: a leaf, an activation that has a gradient, or plain numbers."""
import random
import warnings

import pytest
import torch
import torch.nn.functional as F

import minicompile
from minicompile.backends import extent, harm_each_other
from minicompile.ch02_guards.memory import Spans, lie_at, raise_versions

needs_extension = pytest.mark.skipif(Spans is None, reason="the C extension is not built")

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
    "data after": lambda x, w: (F.logsigmoid(x), x.data.mul_(2))[0] * w,
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


@pytest.mark.parametrize("dynamic", (False, True))
def test_a_written_input_with_gaps_has_the_gradient_of_its_places(dynamic):
    def write(v):
        v.clamp_(-1, 1)
    compiled = minicompile.compile(write, backend="cpp", dynamic=dynamic)
    for n in (5, 6):
        grads = []
        for function in (write, compiled):
            x = torch.linspace(-2, 2, 8 * n).view(n, 8).requires_grad_()
            v = torch.empty_strided((n, 8), (2, 2 * n)).copy_(x)
            function(v)
            grads += torch.autograd.grad((v * x.detach()).sum(), x)
        assert torch.equal(*grads), n


@pytest.mark.parametrize("asked", (lambda v: (v.grad_fn is None, v * 2), lambda v: (v.is_leaf, v * 2)), ids=("grad_fn", "is_leaf"))
def test_a_view_that_a_write_has_made_invalid_is_asked_for_its_history(asked):
    """Eager's error leaves, and not one of ours."""
    base, w = torch.ones(3), torch.ones(3, requires_grad=True)
    with torch.no_grad():
        view = base.view(-1)
    base.mul_(w)
    for function in (asked, minicompile.compile(asked, backend="eager")):
        with warnings.catch_warnings(), minicompile.config.patch(raise_on_internal_error=False), \
                pytest.raises(RuntimeError, match="A view was created in no_grad mode"):
            warnings.simplefilter("error")
            function(view)


@pytest.mark.parametrize("name", [n for n in PROGRAMS if n != "asked after"])
def test_an_activation_is_written_in_the_graph(name):
    found = minicompile.explain(PROGRAMS[name])(torch.ones(3, requires_grad=True) * 3, torch.ones(3, requires_grad=True))
    assert len(found.graphs) == 1 and not found.breaks


@pytest.mark.parametrize("backend", ("aot_eager", "loops"))
def test_what_is_saved_for_other_outputs_is_written(backend):
    """Eager has saved `b` for its square and `result` for its cube, and copies of both for the rest."""
    def f(a, b):
        result = a * 3
        return b.square(), F.softsign(b.t().reshape(6)), result, result ** 3, result.t().reshape(6).sin()

    for k in (1, 2, 4):
        gradients = []
        for function in (f, minicompile.compile(f, backend=backend)):
            a = torch.arange(6.0).view(2, 3).requires_grad_()
            outputs = function(a, b := a * 1.5)
            with torch.no_grad():
                b.zero_(), outputs[2].zero_()
            gradients.append(torch.autograd.grad(outputs[k].sum(), a)[0])
        assert torch.allclose(*gradients)


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


@needs_extension
@pytest.mark.parametrize("most_that_move", [1, 40])
def test_spans_answer_as_the_ranges_do(most_that_move):
    """Windows onto one memory that move a few at a time, or all; sizes known in advance, and read from the tensors."""
    draw, found = random.Random(1), []
    def window(memory, size):
        at = draw.randrange(len(memory) - 5)
        return memory[at:at + (draw.choice((0, 1, 2, 3, 5)) if size is None else size // 2)]

    for many in (2, 5, 40):
        memory = torch.zeros(16 * many, dtype=torch.int16)
        kinds, sizes = [(draw.random() < .2, draw.random() < .4) for _ in range(many)], [draw.choice((None, 6)) for _ in range(many)]
        tensors = [window(memory, size) for size in sizes]
        spans = Spans([(i, size or -1, 2, *kind) for i, (size, kind) in enumerate(zip(sizes, kinds))])
        for _ in range(400):
            for i in draw.sample(range(many), draw.randint(0, min(most_that_move, many))):
                tensors[i] = window(memory, sizes[i])
            ranges = [(t.data_ptr(), t.data_ptr() + extent(t)) for t in tensors]
            found.append(spans(*tensors))
            assert found[-1] is not harm_each_other(ranges, kinds)
    assert 100 < sum(found) < len(found) - 100


@needs_extension
def test_spans_of_strided_tensors_and_of_what_is_no_plain_tensor():
    memory = torch.zeros(100)
    dynamic = Spans([(0, -1, 4, True, False), (1, -1, 4, False, False)])
    assert dynamic(memory.as_strided((3, 2), (10, 2), 5), memory[28:]) is True           # 5 ... 27
    assert dynamic(memory.as_strided((3, 2), (10, 2), 5), memory[27:]) is False
    assert dynamic(memory.as_strided((3, 0), (10, 2), 5), memory) is True
    assert dynamic(memory[:3], 5) is None and dynamic(memory[:3]) is None
    assert dynamic(memory[:3], memory[2:]) is False and dynamic(memory[:3], memory[3:]) is True


@needs_extension
def test_what_was_apart_is_looked_at_again_after_an_overlap():
    def f(a, b):
        a.add_(1)
        return b * a.sum()

    compiled, memory = minicompile.compile(f), torch.arange(12.0)
    for start in (4, 4, 3, 3, 4, 3):
        there = memory.clone()
        got = compiled(memory[:4], memory[start:start + 4])
        assert torch.equal(got, f(there[:4], there[start:start + 4])) and torch.equal(memory, there)


def test_versions_are_raised_once_and_not_in_inference_mode():
    with torch.inference_mode():
        without = torch.ones(2)
    for others in ([], [without], [torch.ones(2).to_sparse()]):
        tensors = [torch.ones(2), torch.nn.Parameter(torch.ones(2)), torch.ones(2, dtype=torch.complex64).conj(), *others]
        before = [t._version for t in tensors if t is not without]
        raise_versions(*tensors)
        assert [t._version for t in tensors if t is not without] == [n + 1 for n in before]
    raise_versions()


def test_tensors_lie_where_they_lay():
    a, b = torch.zeros(4), torch.zeros(4)
    there = [a.data_ptr(), b.data_ptr()]
    assert lie_at([5, a, None, b], [1, 3], there) and not lie_at([5, b, None, a], [1, 3], there)
    assert lie_at([torch.nn.Parameter(a), b[:2]], [0, 1], there) and not lie_at([a, b[1:]], [0, 1], there)
    assert lie_at([5], [], [])
    with pytest.raises(IndexError):
        lie_at([a], [1], there[:1])
    with pytest.raises(AttributeError):
        lie_at([5], [0], there[:1])


def remembers(a, b, c):
    total = a + b + c
    b.copy_(a)
    a.mul_(2)
    return total


def remembers_two(a, b, c):
    total = a + b + c
    c.copy_(b)
    b.copy_(a[:])
    a.copy_(total)
    return total


def exchanges(a, b, c):
    total, old = a + b + c, a.view(-1)
    old = old.clone()
    a.copy_(b)
    b.view(-1).copy_(old)
    c.copy_(a.flip(0))
    return total


@pytest.mark.parametrize("rung", ["aot_eager", "decomposed", "loops", "cpp"])
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("fn", [remembers, remembers_two, exchanges])
def test_what_an_input_held_is_written_to_another_before_it_is_written_itself(fn, learns, rung):
    seen = []
    for f in (fn, minicompile.compile(fn, backend=rung, fullgraph=True)):
        given = [torch.arange(6.0).view(2, 3) * n for n in (1, 2, 3)]
        w = torch.ones(3, requires_grad=learns)
        for _ in range(2):
            result = f(*given) * w
        seen.append([*given, result])
    assert all(map(torch.equal, *seen))
