"""Random programs dense in expressions: `tests/programs/expressions.py`."""
import ast
import pathlib

import pytest
from programs import compare, expressions
from programs.run import differ_interpreted, run_seeds

from minicompile.ch10_cpp.ops import CPP_OPS, register_type

FOUND = sorted((pathlib.Path(__file__).parent / "programs" / "found").glob("expressions_*.py"))
RUNGS = {"aot_eager": 2, "decomposed": 2, "loops": 2, "cpp": 4}         # how many programs

pytestmark = [pytest.mark.usefixtures("fresh"), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("rung", RUNGS)
def test_random(rung):
    failures, features = run_seeds(("expressions", "cpu", 0, RUNGS[rung], rung, 0, None, float("inf")))
    assert not failures, f"python -m tests.programs --kind expressions --backend {rung} --seed {failures[0][0]}"
    assert features["graphs"] >= RUNGS[rung] and not features["calls that raised"]


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("path", FOUND, ids=lambda p: p.stem)
def test_found_before(path, rung):
    assert compare.check(path.read_text(), rung) is None


@pytest.mark.processes
def test_in_tritons_interpreter():
    assert differ_interpreted("expressions", 2, FOUND) == ""


def test_a_program_is_its_seeds_and_returns_dozens_of_expressions():
    assert expressions.program(5) == expressions.program(5) != expressions.program(6)
    for seed in range(5):
        entry = next(n for n in ast.parse(expressions.program(seed, "cuda")).body if getattr(n, "name", "") == "entry")
        assert len(entry.body[-1].value.elts) >= 30
        assert sum(isinstance(n, (ast.Call, ast.BinOp, ast.UnaryOp, ast.Compare)) for n in ast.walk(entry)) > 100


BUGS = {                                                    # the operation, and what it is printed as
    "a maximum that drops NaN": ("maximum", lambda t, x, y: f"{x} > {y} ? {x} : {y}"),
    "a division that truncates": ("floordiv", lambda t, x, y: f"({t})({x} / ({y} == 0 ? 1 : {y}))"),
    "the middle rounded away from zero": ("round", lambda t, x: f"__builtin_round{'f' * (t == 'float')}({x})"),
    "a half that is not rounded": ("round_to", lambda t, x, dtype: x),
    "a product that is a rounding away": ("mul", lambda t, x, y: f"({t})({x} * {y}{' * 1.0000001f' * (t == 'float')})")}


@pytest.mark.parametrize("name,printed", BUGS.values(), ids=BUGS)
def test_a_few_programs_find_a_planted_bug(name, printed, monkeypatch):
    monkeypatch.setitem(CPP_OPS, name, lambda value, args: printed(register_type(value.dtype), *args))
    assert any(compare.check(expressions.program(seed), "cpp") for seed in range(8))
