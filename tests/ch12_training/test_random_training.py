"""Random training steps, and whether they find a planted bug: `python -m tests.programs --kind training`."""
import pytest
from programs import training
from programs.compare import check
from programs.run import run_seeds

from minicompile.ch12_training import backward

pytestmark = [pytest.mark.usefixtures("fresh"), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("rung,first", [("eager", 0), ("eager", 4), ("aot_eager", 100), ("cpp", 200)])
def test_random(rung, first):
    failures, features = run_seeds(("training", "cpu", first, first + 4, rung, 0, None, float("inf")))
    assert not failures, f"python -m tests.programs --kind training --backend {rung} --seed {failures[0][0]}"
    assert features["graphs"] >= 8 and features["calls that returned"] >= 20


def gradients_are_replaced(tx, leaf, gradient):
    backward.set_gradient(tx, leaf, gradient)


def test_a_planted_bug_is_found(monkeypatch):
    """A second backward that replaces the gradient instead of adding to it."""
    monkeypatch.setattr(backward, "accumulate", gradients_are_replaced)
    assert any(check(training.program(seed), "eager") for seed in range(20))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 2000, 50))
def test_many(first):
    failures, _ = run_seeds(("training", "cpu", first, first + 50, None, 0, None, float("inf")))
    assert not failures, failures
