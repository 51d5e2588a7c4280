"""Random programs that differentiate twice and more, and whether they find a planted bug: `python -m tests.programs --kind derivatives`."""
import pytest
import torch
from programs import derivatives
from programs.compare import check
from programs.run import run_seeds

from minicompile.ch05_autograd import second

pytestmark = [pytest.mark.usefixtures("fresh"), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("rung,first", [("eager", 0), ("aot_eager", 8), ("cpp", 100)])
def test_random(rung, first):
    failures, features = run_seeds(("derivatives", "cpu", first, first + 5, rung, 0, None, float("inf")))
    assert not failures, f"python -m tests.programs --kind derivatives --backend {rung} --seed {failures[0][0]}"
    assert features["graphs"] >= 5 and features["calls that returned"] >= 10


def test_a_planted_bug_is_found(monkeypatch):
    """A region remembers its inputs without their history."""
    monkeypatch.setattr(second, "copied", torch.Tensor.detach)
    assert any(check(derivatives.program(seed), "aot_eager") for seed in range(20))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 2000, 50))
def test_many(first):
    failures, _ = run_seeds(("derivatives", "cpu", first, first + 50, None, 0, None, float("inf")))
    assert not failures, failures
