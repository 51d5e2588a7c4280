"""Control flow given as functions: torch.cond, and associative scans as trees of slices."""
import pytest
import torch
from recorders import Recorder
from torch._higher_order_ops.associative_scan import associative_scan

import minicompile
from minicompile.errors import GraphBreakError

pytestmark = pytest.mark.usefixtures("fresh")


def recurrence(left, right):
    return left[0] * right[0], right[0] * left[1] + right[1]


@pytest.mark.parametrize("n", (1, 2, 3, 4, 5, 8, 13))
@pytest.mark.parametrize("dim, reverse", [(0, False), (1, True), (-1, False)])
def test_scan_of_a_recurrence(n, dim, reverse):
    shape = [2, 3, 2]
    shape[dim] = n
    pair = [torch.rand(shape, requires_grad=True) for _ in range(2)]

    def function(a, b):
        return associative_scan(recurrence, (a * 2, b), dim=dim, reverse=reverse, combine_mode="generic")
    backend = Recorder()
    got, want = minicompile.compile(function, backend=backend, fullgraph=True)(*pair), function(*pair)
    torch.testing.assert_close(got, want)
    grads = [torch.autograd.grad((out[0] + out[1].sin()).sum(), pair) for out in (got, want)]
    torch.testing.assert_close(*grads)
    assert len(backend.graphs) == 1


def test_scans_of_other_shapes_of_argument():
    x = torch.rand(3, 9)
    for function in (lambda x: associative_scan(lambda a, b: a + b, x, 1, combine_mode="generic"),
                     lambda x: associative_scan(torch.maximum, x, 0, combine_mode="generic"),
                     lambda x: associative_scan(lambda a, b: {"x": a["x"] * b["x"]}, {"x": x}, 1, combine_mode="generic")["x"],
                     lambda x: associative_scan(lambda a, b: [a[0] + b[0]], [x], 1, combine_mode="generic")[0]):
        torch.testing.assert_close(minicompile.compile(function, backend="eager")(x), function(x))
    with pytest.raises(ValueError, match="pointwise"):
        minicompile.compile(lambda x: associative_scan(torch.add, x, 1), backend="eager")(x)


def test_a_scan_that_sees_one_item_at_a_time():
    """What is not elementwise would mix items: products of matrices, scans."""
    for combine, x in ((lambda a, b: a @ b, torch.rand(5, 2, 2)),
                       (lambda a, b: torch.max(a, b) + (a * 0).cumsum(0), torch.rand(5, 2))):
        def function(x):
            return associative_scan(combine, x, 0, combine_mode="generic") + 1
        with pytest.raises(GraphBreakError, match="not pointwise"):
            minicompile.compile(function, backend="eager", fullgraph=True)(x)
        torch.testing.assert_close(minicompile.compile(function, backend="eager")(x), function(x))


def test_cond():
    def on_size(x):
        return torch.cond(x.shape[0] > 2, torch.sin, torch.cos, (x,)) + 1

    def on_value(x):
        y = x * 2
        return torch.cond(y.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (y,)) + 1

    for n in (2, 3, 4):
        assert minicompile.compile(on_size, backend="eager", fullgraph=True)(torch.ones(n)).equal(
            1 + (torch.sin if n > 2 else torch.cos)(torch.ones(n)))
    backend = Recorder()
    compiled = minicompile.compile(on_value, backend=backend)
    for x in (torch.ones(2), -torch.ones(2)):
        torch.testing.assert_close(compiled(x), 1 + ((2 * x).sin() if x[0] > 0 else (2 * x).cos()))
    assert len(backend.graphs) == 4, "before, two branches, after"
    with pytest.raises(GraphBreakError, match="torch.cond"):
        minicompile.compile(on_value, backend="eager", fullgraph=True)(torch.ones(2))


@pytest.mark.parametrize("compare, rate, known", [
    (lambda p, rate: p < rate, 0.0, True), (lambda p, rate: p < rate, 0.5, False), (lambda p, rate: p < rate, 1, True),
    (lambda p, rate: p < rate, float("nan"), True), (lambda p, rate: p <= rate, -0.1, True), (lambda p, rate: p <= rate, 0.0, False),
    (lambda p, rate: p >= rate, 0, True), (lambda p, rate: rate > p, 0.0, True), (lambda p, rate: rate >= p, 0.0, False),
    (lambda p, rate: p.mul_(2) < rate, 1.0, False), (lambda p, rate: p.sub_(1) < rate, 0.0, False),
    (lambda p, rate: p - 1 < rate, 0.0, False),
    (lambda p, rate: torch.randn([]) < rate, 0.0, False), (lambda p, rate: (p < rate).logical_not_(), 0.0, False)])
def test_what_no_uniform_random_number_decides(compare, rate, known):
    """`if torch.rand([]) < self.layerdrop` is no branch on a value where the rate is outside of the range of `rand`; the number is
    drawn all the same."""
    def f(x):
        if compare(torch.rand([]), rate):
            x = x + torch.rand(3)
        return x * torch.rand(3)

    torch.manual_seed(3)
    wanted = f(torch.ones(3)), torch.rand(2)
    torch.manual_seed(3)
    assert all(map(torch.equal, wanted, (minicompile.compile(f)(torch.ones(3)), torch.rand(2))))
    assert bool(minicompile.explain(f)(torch.ones(3)).breaks) != known
