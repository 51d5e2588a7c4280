"""Jumps on tensors that decide whether to raise: the graph goes on, and says whether it was right to.

The programs have assertions of their own: PYTEST_DONT_REWRITE."""
import types

import pytest
import torch
from torch import distributions as D, nn

import minicompile
from minicompile.versions import TRUST

pytestmark = pytest.mark.usefixtures("fresh")


def both(f, *calls, fullgraph=True, backend="aot_eager", g=None):
    """Each call in eager and compiled, from the same random state: results or exceptions, and the next random number."""
    compiled = minicompile.compile(g or f, backend=backend, fullgraph=fullgraph)

    def run(h, args):
        torch.manual_seed(0)
        try:
            return "", h(*args), torch.rand(2)
        except Exception as error:
            return f"{type(error)}: {error}", torch.rand(2)

    for args in calls:
        (said, *found), (expected, *results) = run(compiled, args), run(f, args)
        assert said == expected
        torch.testing.assert_close(found, results, equal_nan=True)


def checked(x, seen=None):
    y = x * 2
    if seen is not None:
        seen.append(1)
    assert (y > 0).all(), f"not all of {tuple(y.shape)} are positive"
    if torch.isnan(y).any():
        raise ValueError("nan")
    return y.sqrt()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "default"])
def test_an_assertion_does_not_break_the_graph(backend):
    both(checked, (torch.ones(3),), (-torch.ones(3),), (torch.tensor([1.0, float("nan"), 1]),), (torch.ones(3) * 4,), backend=backend)


def test_what_came_before_the_assertion_happens_once():
    compiled, seen = minicompile.compile(checked, backend="eager", fullgraph=True), []
    for n, x in enumerate([torch.ones(2), -torch.ones(2), torch.ones(2)]):
        try:
            compiled(x, seen)
        except AssertionError:
            assert n == 1
        assert len(seen) == n + 1


def test_an_assertion_that_fails_first():
    both(checked, (-torch.ones(3),), (torch.ones(3),))


def test_the_program_may_handle_it():
    def f(x):
        try:
            return checked(x) + 1
        except AssertionError:
            return x - 1

    both(f, (torch.ones(3),), (-torch.ones(3),), (torch.ones(3),))


def test_random_numbers_are_drawn_once():
    def f(x):
        y = x + torch.rand(3)
        if not (y > 0).all():
            raise ValueError("negative")
        return y * torch.rand(3)

    both(f, (torch.ones(3),), (-torch.ones(3) * 2,), (torch.ones(3),))


def test_the_check_comes_before_an_error_of_what_follows():
    def f(p):
        assert (p >= 0).all()
        torch.rand(2)
        return torch.multinomial(p, 1)

    both(f, (torch.ones(3),), (-torch.ones(3),), (torch.ones(3),))


def test_with_a_write_the_graph_breaks():
    def f(x, state):
        state.add_(x)
        assert (state < 3).all()
        state.mul_(1)
        return state * 2

    def fresh(h):
        state = torch.zeros(2)
        return lambda: h(torch.ones(2), state)

    both(fresh(f), *[()] * 4, fullgraph=False, g=fresh(minicompile.compile(f, backend="eager")))
    with pytest.raises(minicompile.GraphBreakError, match="a branch on the values of a tensor"):
        minicompile.compile(f, backend="eager", fullgraph=True)(torch.ones(2), torch.zeros(2))


LIMIT = 9


class Limits(nn.Module):
    def __init__(self):
        super().__init__()
        self.most = 9
        self.inner = types.SimpleNamespace(most=9.5)


def less_than_an_argument(x, i, n, limits):
    assert i.max().item() < n
    return x * 2


def more_on_the_left(x, i, n, limits):
    if n <= i.max().item():
        raise ValueError("too many")
    return x * 2


def an_attribute(x, i, n, limits):
    if i.max().item() >= limits.most:
        raise ValueError("too many")
    return x * 2


def an_attribute_of_an_attribute(x, i, n, limits):
    assert i.max().item() < limits.inner.most, f"{i.max().item()}"
    return x * 2


def between(x, i, n, limits):
    assert 0 <= i.min().item() and i.max().item() < LIMIT
    return x * 2


def a_condition(x, i, n, limits):
    assert not torch.isnan(x).any().item()
    return x * 2


def a_float(x, i, n, limits):
    assert x.max().item() <= 9.1
    return x * 2


def an_integer_beyond_floats(x, i, n, limits):
    assert (i.max() + 2**24).item() <= 2**24 + 8.5
    return x * 2


def an_int(x, i, n, limits):
    assert int(i.max()) < n and 0 <= int(torch.min(i)) and int(x.shape[0]) == 3
    return x * 2


def a_float_of_an_int(x, i, n, limits):
    if float(i.max()) >= limits.most or not float((x == x).all()) or bool(torch.isnan(x).any()):
        raise ValueError(f"{float(i.max())} of {int(i.sum())}")
    return x * 2


@pytest.mark.parametrize("backend", ["eager", "default"])
@pytest.mark.parametrize("f", [less_than_an_argument, more_on_the_left, an_attribute, an_attribute_of_an_attribute, between, a_condition,
                               a_float, an_integer_beyond_floats, an_int, a_float_of_an_int])
def test_a_number_that_only_decides_whether_to_raise(f, backend):
    x, i, limits = torch.arange(3.0), torch.arange(8), Limits()
    calls = [(x, i, 9), (x, i + 5, 9), (x + 7.1, i, 9), (x * float("nan"), i, 10), (x, i + 1, 9), (x, i + 2, 9), (x, i.int(), 12)]
    both(f, *[(*c, limits) for c in calls], backend=backend)


def test_a_number_that_decides_more():
    def used(x, i, n):
        k = i.max().item()
        assert k < n
        return x * k

    def chosen(x, i, n):
        if i.max().item() < n:
            return x * 2
        return x

    def of_a_tensor(x, i, n):
        assert i.max().item() < x.max() + 7
        return x * 2

    def as_an_int(x, i, n):
        assert int(x.max() * 1.5) < n
        return x * int(i.max())

    def of_several(x, i, n):
        assert max(map(int, [i.max(), i.min()])) < n and [*map(float, i)][0] < n and sum(map(int, i)) < 7 * n
        return x * 2

    def by_another_function(x, i, n):
        def same(number):
            return number
        assert same(int(i.max())) < n and len(str(int(i.min()))) < n and int("2", 3) < n
        return x * 2

    for f in (used, chosen, of_a_tensor, as_an_int, of_several, by_another_function):
        both(f, (torch.arange(3.0), torch.arange(8), 9), (torch.arange(3.0), torch.arange(8), 3), fullgraph=False)


class Rounded:
    def __init__(self, most):
        self.__dict__["most"] = most

    @property
    def most(self):
        return self.__dict__["most"] + 0.5


LARGEST = 2**24


@pytest.mark.parametrize("backend", ["eager", "default"])
def test_a_number_is_compared_as_exactly_as_python_compares(backend):
    def of_a_property(x, i, limits):
        assert i.item() <= limits.most
        return x * 2

    def of_what_was_written(x, i, limits):
        before, limits.most = limits.most, limits.most + 0.5
        try:
            assert i.item() <= limits.most
        finally:
            limits.most = before
        return x * 2

    def of_a_written_global(x, i, limits):
        global LARGEST
        LARGEST = 2**24 + 0.5
        try:
            assert i.item() <= LARGEST
        finally:
            LARGEST = 2**24
        return x * 2

    def of_a_large_int(x, i, limits):
        assert i.item() < limits
        return x * 2

    def of_a_constant(x, i, limits):
        assert i.item() != 2.0**53
        return x * 2

    x, at, near = torch.ones(2), torch.tensor(2**53 + 1), [torch.tensor(n) for n in (1, 2**24 + 1, 2)]
    both(of_a_property, *[(x, i, Rounded(2**24)) for i in near], fullgraph=False, backend=backend)
    both(of_what_was_written, *[(x, i, types.SimpleNamespace(most=2**24)) for i in near], fullgraph=False, backend=backend)
    both(of_a_written_global, *[(x, i, None) for i in near], fullgraph=False, backend=backend)
    both(of_a_large_int, *[(x, i, n) for i in (*near, at) for n in (2**63, 2**64, 5)], fullgraph=False, backend=backend)
    both(of_a_constant, *[(x, i, None) for i in (at, *near, at - 1)], fullgraph=False, backend=backend)


class Converged(Exception):
    pass


def test_a_loop_that_an_exception_ends():
    def f(x):
        try:
            while True:
                x = x / 2
                if x.norm() < 1e-4:
                    raise Converged
        except Converged:
            return x

    both(f, (torch.ones(3),), (torch.ones(3) * 100,), fullgraph=False, backend="eager")


def test_either_side_raises_or_neither():
    def f(x):
        if x.sum() > 0:
            raise ValueError
        raise KeyError

    def g(x):
        return x + 1 if x.sum() > 0 else x - 1

    for h in (f, g):
        both(h, (torch.ones(3),), (-torch.ones(3),), fullgraph=False)


# ---- what asks most: torch.distributions

WEAK = hasattr(D.transforms, "weakref")          # PyTorch 2.11 holds the inverse of a transform weakly, which ends a graph


def densities(mu, scale, logits):
    c = D.Categorical(logits=logits)
    action, n = c.sample(), D.Independent(D.Normal(mu, scale), 1)
    z = n.rsample()
    kl = D.kl_divergence(D.Normal(mu, scale), D.Normal(torch.zeros_like(mu), torch.ones_like(mu)))
    flow = D.TransformedDistribution(D.Normal(mu, scale), [D.TanhTransform(), D.AffineTransform(0, 2.0)])
    return (action, c.log_prob(action), c.entropy(), c.probs, n.log_prob(z), kl, WEAK or flow.log_prob(z.tanh()),
            D.Bernoulli(logits=mu).log_prob((z > 0).float()), D.Beta(scale, scale + 1).log_prob(torch.sigmoid(z)),
            D.Beta(scale, scale + 1).rsample(), D.Dirichlet(scale).rsample(), D.Gamma(scale.t(), 2.0).rsample(),
            D.Binomial(9, logits=mu.t()).sample())


def test_distributions_are_one_graph():
    good = torch.randn(4, 2), torch.rand(4, 2) + 0.1, torch.randn(4, 3)
    bad = torch.randn(4, 2), -torch.ones(4, 2), torch.randn(4, 3)
    nan = torch.randn(4, 2), torch.rand(4, 2) + 0.1, torch.full((4, 3), float("nan"))
    both(densities, good, bad, nan, good)


def test_policy_gradient_with_distributions():
    torch.manual_seed(0)
    policy = nn.Linear(4, 3)

    def loss(x, reward):
        pi = D.Categorical(logits=policy(x))
        action = pi.sample()
        return -(pi.log_prob(action) * reward).mean() - 0.01 * pi.entropy().mean()

    def gradient(h):
        def call(x, reward):
            policy.zero_grad()
            value = h(x, reward)
            value.backward()
            return value.detach(), policy.weight.grad.clone()
        return call

    calls = [(torch.randn(n, 4), torch.randn(n)) for n in (5, 5, 6, 7)]
    both(gradient(loss), *calls, fullgraph=False, g=gradient(minicompile.compile(loss, backend="aot_eager", fullgraph=True)))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_an_assertion_that_fails_often_breaks_the_graph(fullgraph):
    """In one call either the graph or the frame runs, not both."""
    runs = []

    def backend(gm, examples):
        return lambda *args: (runs.append(len(gm.graph.nodes)), gm(*args))[1]

    both(checked, *[(torch.full((3,), -1.0 - n),) for n in range(TRUST + 3)], (torch.ones(3),), fullgraph=fullgraph, backend=backend)
    assert len({*runs}) == (1 if fullgraph else 3)          # the whole; the part before the jump, and what is behind it


def test_graphs_on_other_devices_break_at_the_check():
    def function(x):
        assert (x > 0).all(), "not positive"
        return x * 2, torch.empty(3, device="meta") + 1

    assert len(minicompile.explain(function)(torch.ones(3)).breaks) == 1
    with pytest.raises(AssertionError, match="not positive"):
        minicompile.compile(function)(-torch.ones(3))


@pytest.mark.gpu
def test_what_follows_a_check_does_not_run_on_a_gpu_before_it():
    """There an index out of range is no exception: the process loses the device."""
    def looked_up(table, index):
        assert (index < 10).all(), "out of range"
        return torch.nn.functional.embedding(index, table)

    table, compiled = torch.randn(10, 4, device="cuda"), minicompile.compile(looked_up)
    for n in (3, 9, 100000, 4):
        index = torch.full((8,), n, device="cuda")
        if n < 10:
            torch.testing.assert_close(compiled(table, index), looked_up(table, index))
        else:
            with pytest.raises(AssertionError, match="out of range"):
                compiled(table, index)
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("search", [torch.max, torch.min])
def test_a_maximum_into_tensors_of_different_strides_is_refused_as_in_eager(search):
    def into(x, values, places):
        return search(x, 1, out=(values, places))[0] + 1

    x, compiled = torch.randn(3, 4, 5, device="cuda"), minicompile.compile(into)
    for across in (False, True):
        values, places = (torch.empty(3, 5, dtype=dtype, device="cuda") for dtype in (torch.float32, torch.int64))
        if across:
            values = torch.empty(5, 3, device="cuda").T
            with pytest.raises(RuntimeError, match="same strides"):
                into(x, values, places)
            with pytest.raises(RuntimeError, match="same strides"):
                compiled(x, values, places)
        else:
            assert torch.equal(compiled(x, values, places), search(x, 1)[0] + 1)
