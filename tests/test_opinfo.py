"""PyTorch's operators through the whole pipeline, against eager: values, dtypes, shapes, strides, aliasing, gradients.

Always run: every operator of the sample database on one or two samples in float32 and in one exact type, through `cpp`.
Deselected by default, `pytest -m slow tests/test_opinfo.py`: eight samples, the in-place variants, and every rung of the ladder.

A wrong answer, or an error where eager has none, fails. Falling back (a graph break, or running eagerly) does not, but
`test_coverage` counts it."""

from collections import Counter

import pytest
import torch
from opinfo import NOT_CLOSE, OPERATORS, check_program, dtypes_of, observe, program_of, samples_of

import minicompile

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = {op.formatted_name: op for op in OPERATORS}


@pytest.fixture(autouse=True)
def one_thread(reset):
    torch.set_num_threads(1)


def runs_in_eager(program) -> bool:
    try:
        observe(program.function, program.inputs)
    except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError):
        return False
    return True


def check_operator(op, backend, counts, variant=None) -> Counter:
    """Compile `op` on `counts[i]` samples of its i-th dtype as one program. Returns how often each thing happened."""
    seen = Counter()
    samples = [s for dtype, count in zip(dtypes_of(op), counts) for s in samples_of(op, dtype, count)]
    samples = [s for s in samples if runs_in_eager(program_of(op, [s], variant))]
    if samples:
        outcome = check_program(program_of(op, samples, variant), backend, **NOT_CLOSE.get(op.name, {}))
        assert not outcome.problems, "\n".join([*outcome.problems, program_of(op, samples, variant).text])
        seen[outcome.state] += 1
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_operator(name):
    """`cpp`, two samples in float32 and one in an exact type."""
    check_operator(NAMES[name], "cpp", (2, 1))


def test_coverage():
    """Nine in ten operators can be captured as one graph, which the tests above compile; here, every twelfth is asked."""
    some = OPERATORS[::12]
    states = sum((check_operator(op, "eager", (1, 0)) for op in some), Counter())
    assert states["compiled"] >= 0.8 * len(some), states


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_samples(name):
    check_operator(NAMES[name], "cpp", (8, 8))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "decomposed", "loops"])
@pytest.mark.parametrize("name", NAMES)
def test_rung(name, backend):
    check_operator(NAMES[name], backend, (4, 4))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, op in NAMES.items() if op.inplace_variant is not None])
def test_in_place(name):
    check_operator(NAMES[name], "cpp", (4, 4), "inplace")


def test_lazily_negated_inputs():
    """`z.conj().imag` is an ordinary float32 tensor, except that its memory holds the negated numbers."""
    def double(x):
        return x * 2

    z = torch.randn(4, 5, dtype=torch.complex64)
    compiled = minicompile.compile(double, backend="cpp")
    for x in (z.imag, z.conj().imag, z.imag):
        assert torch.equal(compiled(x), x * 2)
