"""The pass itself: functional graphs equal the programs they came from, also for random sequences of views and writes."""

import pytest
import torch
from helpers import check, same
from hypothesis import given, settings, strategies as st

import minicompile
from minicompile.ch01_graphs.fake import FakeMode
from minicompile.ch01_graphs.graph import interpret
from minicompile.ch01_graphs.trace import trace
from minicompile.ch05_autograd.cleanup import clean, is_random
from minicompile.ch05_autograd.functionalize import functionalize
from minicompile.ch05_autograd.schemas import functional_counterpart, is_mutable
from minicompile.errors import Unsupported

aten = torch.ops.aten


def functional(fn, *inputs):
    mode = FakeMode()
    gm = trace(lambda *a: tuple(fn(*a)), [mode.from_real(t) for t in inputs])
    new = clean(functionalize(gm))
    calls = [n for n in new.graph.nodes if n.op == "call_function"]
    writes = [is_mutable(n.target) for n in calls]
    assert all(n.target is aten.copy_.default for n, w in zip(calls, writes) if w)
    assert writes == sorted(writes), "copies into inputs come last"
    return new


def agree(fn, *inputs):
    new = functional(fn, *inputs)
    ours = [t.clone() for t in inputs]
    theirs = [t.clone() for t in inputs]
    torch.manual_seed(3)
    expected = fn(*theirs)
    torch.manual_seed(3)
    for i, (a, b) in enumerate(zip(expected, interpret(new, ours))):
        same(a, b, what=f"output {i}")
    for i, (a, b) in enumerate(zip(theirs, ours)):
        same(a, b, what=f"input {i}")
    return new


@pytest.mark.parametrize("inplace,expected", [
    (aten.add_.Tensor, aten.add.Tensor), (aten.relu_.default, aten.relu.default), (aten.pow_.Scalar, aten.pow.Tensor_Scalar),
    (aten.bernoulli_.float, aten.bernoulli.p), (aten.normal_.default, aten.normal_functional.default),
    (aten.add.out, aten.add.Tensor), (aten._foreach_add_.List, aten._foreach_add.List), (aten.zero_.default, aten.zero.default),
    (aten._fused_adamw_.default, aten._fused_adamw.default), (aten.index_put_.default, aten.index_put.default),
    (aten.__ilshift__.Scalar, aten.__lshift__.Scalar), (aten.__irshift__.Tensor, aten.__rshift__.Tensor)])
def test_counterparts_come_from_schemas(inplace, expected):
    assert functional_counterpart(inplace) is expected


def test_most_inplace_operators_have_a_counterpart():
    found = missing = 0
    for name in dir(aten):
        if name.endswith("_") and not name.endswith("__"):
            packet = getattr(aten, name)
            for overload in packet.overloads():
                op = getattr(packet, overload)
                if not is_mutable(op):
                    continue
                try:
                    assert not is_mutable(functional_counterpart(op))
                    found += 1
                except Unsupported:
                    missing += 1
    assert found > 200 and missing < 0.1 * found


def test_views_are_taken_again():
    def f(x):
        y = x + 1
        v = y.view(4, 3, 4)
        v[0].add_(1)
        y.t()[1:3].mul_(2)
        a, b = y.split(6, 0)
        b.copy_(a)
        y.diagonal().zero_()
        y.unfold(0, 3, 3)[1].fill_(7.0)
        y.unbind(1)[2].sub_(y[:, 0])
        return y.sum(0), v * 2, a.clone(), y.expand(2, 12, 4).permute(2, 0, 1) + 1
    agree(f, torch.randn(12, 4))


def test_input_mutation_through_a_view():
    agree(lambda x, y: (x[1:].mul_(2), x.view(-1)[::2].copy_(y), x + 1), torch.randn(4, 4), torch.randn(8))


def test_random_inplace_operators_keep_the_stream():
    def f(x):
        a = torch.empty(5).uniform_(2, 3)
        b = x.clone().normal_(1, 2)
        c = torch.empty(5).bernoulli_(0.3)
        d = torch.empty(5).exponential_()
        torch.rand(3)                                   # nobody reads it, but it advances the generator
        return a, b, c, d, torch.randperm(7), torch.randint(0, 9, (3,)), x.random_(10)
    agree(f, torch.randn(5))


def test_dtype_and_broadcast_of_the_target_win():
    agree(lambda x, i: (x.eq_(0.5), x.add_(torch.ones(4, dtype=torch.float64)), i.mul_(torch.tensor(3, dtype=torch.int8))),
          torch.randn(3, 4), torch.arange(3))


def test_complex():
    def f(x):
        z = torch.view_as_complex(x.clone())
        z.mul_(2j)
        r = torch.view_as_real(z)
        r[..., 0].zero_()
        return r.clone(), z.abs()
    agree(f, torch.randn(3, 2))


def test_a_write_to_the_parts_of_a_complex_tensor_in_any_layout():
    def f(z):
        r = torch.view_as_real(z.rot90())
        r.permute(2, 1, 0).mul_(0.5)
        s = torch.view_as_real(torch.complex(z.real.flip(0), z.imag)).mT
        s.copy_(s.roll(1))
        return r.reshape(-1) + 1, s.reshape(-1) + 1
    for shape in ((1, 5), (5, 1), (3, 4)):
        agree(f, torch.complex(torch.randn(shape), torch.randn(shape)))


OVERWRITTEN = {"masked_fill": lambda x: x.masked_fill_(x > 0, 1.0), "zero": lambda x: x.zero_(), "fill": lambda x: x.fill_(2),
          "copy": lambda x: x.copy_(torch.ones(x.shape)), "eq": lambda x: x.eq_(1.0), "through a view": lambda x: x[0].mul_(2)}


@pytest.mark.parametrize("backend", ["aot_eager", "decomposed", "cpp"])
@pytest.mark.parametrize("name", OVERWRITTEN)
def test_strides_of_dims_of_size_1_after_a_write(name, backend):
    """The next operator asks them for an order."""
    def f(x):
        OVERWRITTEN[name](y := x.clone())
        OVERWRITTEN[name](x)
        return y, y.clone(), x.clone(), x + 1
    for order in ((2, 1, 0), (1, 2, 0), (2, 0, 1)):
        given, again = (torch.arange(5.0).view(1, 1, 5).permute(order) for _ in range(2))
        for got, want in zip(minicompile.compile(f, backend=backend)(given), f(again)):
            assert got.stride() == want.stride() and torch.equal(got, want)


@pytest.mark.parametrize("backend", ["aot_eager", "decomposed", "cpp"])
def test_strides_of_dims_of_size_1_of_a_view_that_was_written_through_a_view_of_it(backend):
    def f(x):
        y = x.abs()[None, :, None]
        z = y.movedim(0, -1)
        z.sub_(z.flip(0))
        return y, y * x
    x = torch.randn(3, 4, 6)
    for got, want in zip(minicompile.compile(f, backend=backend)(x), f(x)):
        assert got.stride() == want.stride() and torch.equal(got, want)


@pytest.mark.parametrize("backend", ["aot_eager", "cpp"])
@pytest.mark.parametrize("name", ["masked_fill", "zero", "copy"])
def test_views_of_what_is_computed_from_written_memory_with_gaps(name, backend):
    """The new contents have no gaps, but the order of the old ones."""
    def f(x):
        OVERWRITTEN[name](x.movedim(1, 0))
        return (x * 2)[:, 1:2], (x.sin() + 1).T[1:]
    for x in (torch.arange(12.0).view(4, 3)[::2], torch.arange(12.0).view(4, 3)[::2].mT, torch.arange(24.0).view(4, 6)[:, ::2]):
        again = torch.arange(24.0).as_strided(x.shape, x.stride())
        again.copy_(x)
        for got, want in zip(minicompile.compile(f, backend=backend)(x), f(again)):
            assert got.stride() == want.stride() and torch.equal(got, want)


def test_dead_views_and_duplicates_go():
    def f(x):
        y = x.exp()
        y.view(-1)
        return y + x.exp(),
    new = agree(f, torch.randn(3))
    assert [n.target for n in new.graph.nodes if n.op == "call_function"] == [aten.exp.default, aten.add.Tensor]


def test_merging_tells_types_apart():
    new = agree(lambda x: (x + 1, x + 1.0, x * 0.0, x * -0.0), torch.arange(3))
    assert sum(n.op == "call_function" for n in new.graph.nodes) == 4
    new = agree(lambda x: (x * complex(0.0, 1.0), x * complex(-0.0, 1.0)), torch.arange(3) * 1j)
    assert sum(n.op == "call_function" for n in new.graph.nodes) == 2


def test_random_nodes_are_not_merged():
    new = agree(lambda x: (torch.rand_like(x) + torch.rand_like(x),), torch.zeros(3))
    assert sum(is_random(n) for n in new.graph.nodes) == 2


# ---- random programs: a list of tensors, each step takes a view of one, writes one, or computes from two

VIEWS = [lambda t: t[0] if t.dim() and t.shape[0] else t, lambda t: t[..., 1:] if t.dim() and t.shape[-1] > 1 else t,
         lambda t: t[::2] if t.dim() else t, lambda t: t.transpose(0, -1) if t.dim() else t,
         lambda t: t.unsqueeze(1) if t.dim() else t, lambda t: t.squeeze(), lambda t: t.reshape(-1),
         lambda t: t.diagonal() if t.dim() >= 2 else t, lambda t: t.flatten() if t.is_contiguous() else t,
         lambda t: t.split(1)[-1] if t.dim() and t.shape[0] else t, lambda t: t.unbind(-1)[0] if t.dim() and t.shape[-1] else t,
         lambda t: t.detach(), lambda t: t.expand(2, *t.shape), lambda t: t.permute(*reversed(range(t.dim())))]


def fit(t, like):
    """A value of the shape of `like` that depends on `t`."""
    return (t.sum() * 0.01).expand(like.shape)


WRITES = [lambda t, u: t.add_(fit(u, t)), lambda t, u: t.mul_(0.5), lambda t, u: t.copy_(fit(u, t)), lambda t, u: t.zero_(),
          lambda t, u: t.clamp_(min=-0.5), lambda t, u: t.fill_(1.5), lambda t, u: t.sub_(u) if u.shape == t.shape else t.neg_(),
          lambda t, u: t.masked_fill_(t.detach() > 0.3, 0.1), lambda t, u: t.sin_()]
step = st.tuples(st.sampled_from(["view", "view", "write", "write", "compute"]), st.integers(0, 100), st.integers(0, 100),
                 st.integers(0, 100))


def program(steps):
    def run(*inputs):
        tensors = list(inputs) + [inputs[0] * 1.5]
        for kind, op, i, j in steps:
            t, u = tensors[i % len(tensors)], tensors[j % len(tensors)]
            if kind == "view":
                tensors.append(VIEWS[op % len(VIEWS)](t))
            elif kind == "write" and 0 not in t.stride():
                tensors.append(WRITES[op % len(WRITES)](t, u))
            elif kind == "compute":
                tensors.append(t * 2 + u if t.shape == u.shape else t.exp())
        return tuple(tensors[len(inputs):])
    return run


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(step, min_size=2, max_size=10), st.sampled_from([(3, 4), (2, 3, 4)]))
def test_random_programs(steps, shape):
    torch.manual_seed(0)
    agree(lambda *a: [t.clone() for t in program(steps)(*a)], torch.randn(shape), torch.randn(shape))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(step, min_size=2, max_size=8), st.sampled_from([(3, 4), (2, 3, 4)]), st.booleans())
def test_random_programs_with_gradients_and_aliasing_outputs(steps, shape, grad):
    """Outputs alias inputs and each other as they like; whatever eager allows must come out equal, or be refused."""
    torch.manual_seed(0)
    inputs = torch.randn(shape, requires_grad=grad), torch.randn(shape)
    fn = program(steps)
    try:
        fn(*[t.clone() for t in inputs])
    except RuntimeError:
        return                                          # autograd refuses the program itself
    try:
        check(fn, *inputs, nonleaf=True)
    except Unsupported:
        return
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise


def test_drawing_into_a_window_is_left_to_eager():
    with pytest.raises(Unsupported, match="draws other numbers"):
        functional(lambda x: (x[:, 1:].normal_(), x), torch.ones(6, 6))
    agree(lambda x: (x.t().normal_(), x[2:].uniform_(), x[:, 1:].bernoulli_(0.5), x), torch.ones(6, 6))


LITERALS = {
    "number": lambda x: (torch.tensor(0.0), x + 1), "row": lambda x: (torch.tensor([1.0, 2.0]), x + 1),
    "shared": lambda x: ((y := torch.tensor([[1.0, 2.0], [3.0, 4.0]])).t(), y[0], x * y[1]),
    "only": lambda x: (torch.tensor([1, 2])[1:],), "made": lambda x: (torch.arange(4), torch.ones(2), torch.eye(2), x),
    "written": lambda x: ((y := torch.tensor([1.0, 2.0])).add_(x.detach()), y[:1]),
}


@pytest.mark.parametrize("rung", ["eager", "aot_eager", "decomposed", "loops", "cpp"])
@pytest.mark.parametrize("f", LITERALS.values(), ids=LITERALS)
def test_a_literal_is_a_new_tensor_at_each_call(f, rung):
    """It is a constant of the graph, which the receiver of a result must not be able to write."""
    for requires_grad in (False, True):
        fast = minicompile.compile(f, backend=rung)
        x = torch.ones(2, requires_grad=requires_grad)
        for _ in range(3):
            got, expected = fast(x), f(x)
            for results in (got, expected):
                results[0].mul_(5)
            for a, b in zip(got, expected):
                assert torch.equal(a, b) and a.stride() == b.stride()


def test_a_written_column_seen_as_another_dtype():
    """The dtype's view asks for the last stride, also of a dim of size 1, which is free elsewhere."""
    def fn(x):
        row, bits = x.movedim(0, 1), x.view(torch.int32)
        row.clamp_(1)
        return [bits.clone()]

    agree(fn, torch.randn(7, 1, dtype=torch.float64))


@pytest.mark.parametrize("place", [6, 8, 1, None])
def test_operators_that_name_a_place_in_memory_find_what_was_written(place):
    """`middle` begins at the seventh element of its memory, and what is written to it at the first of its own."""
    def f(x):
        middle = torch.zeros(3, 3, 2)[1]
        middle.add_(x)
        copied = torch.as_strided_copy(middle, (2,), (2,), place)
        if place == 1:
            return copied
        return copied, torch.as_strided_scatter(middle, torch.ones(2, 1), (2, 1), (2, 1), storage_offset=place) * 2

    x = torch.randn(3, 2)
    for backend in ("aot_eager", "loops", "cpp"):
        for got, want in zip(minicompile.compile(f, backend=backend)(x), f(x)):
            assert torch.equal(got, want)


@pytest.mark.parametrize("seen", [torch.view_as_complex, lambda x: x.view(torch.float64), lambda x: x.view(torch.int64)])
def test_a_written_vector_seen_as_larger_elements_from_an_odd_place(seen):
    """It lies at an odd place of its memory, so that what is seen begins at an even one; its new contents begin at 0."""
    def fn(x):
        larger = seen(x[1:].view(1, 2))
        x.mul_(3)
        return [larger * 2]

    agree(lambda memory: fn(memory[1:4]), torch.randn(8))


def test_an_operator_that_asks_for_rows_gets_what_was_written_row_by_row():
    def f(a):
        columns = a.movedim(0, -1)
        columns.copy_(columns.roll(1, 0))
        return torch.nn.functional.pdist(a - a.sum(), 3.0)
    numbers = torch.randn(7, 4)
    for backend in ("aot_eager", "cpp"):
        torch.testing.assert_close(minicompile.compile(f, backend=backend)(numbers.clone()[..., ::2]), f(numbers.clone()[..., ::2]))


@pytest.mark.parametrize("lazy", [torch.conj, torch.Tensor.conj_physical, lambda z: torch.complex(z.real, torch._neg_view(z.imag))])
def test_a_conjugate_is_computed_when_it_is_copied(lazy):
    def conjugated(z):
        pairs = torch.view_as_real(z)
        z.copy_(lazy(z))
        return pairs * 1, pairs[..., 1].view(torch.int32) * 1
    agree(conjugated, torch.randn(3, dtype=torch.complex64))
