"""Random Python modules, plain and compiled, must not differ: `tests/programs/`. Programs that once did are kept in
`tests/programs/found/`."""
import pathlib

import pytest
from programs.compare import check
from programs.cuts import mark
from programs.generate import program
from programs.reduce import reduce
from programs.run import backend_of, run_seeds

from minicompile.ch04_breaks import breaks

FOUND = sorted(p for p in (pathlib.Path(__file__).parents[1] / "programs" / "found").glob("*.py") if not p.stem.startswith("tensors_"))
PER_TEST = 15

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.mark.parametrize("first", range(0, 150, PER_TEST))
def test_random(first):
    graphs = 0
    for seed in range(first, first + PER_TEST):
        statistics = {}
        found = check(program(seed), backend_of(seed, "python", "cpu"), statistics)
        assert found is None, f"python -m tests.programs --seed {seed}: {found}"
        graphs += statistics["graphs"]
    assert graphs >= PER_TEST                       # the programs reach the compiler


@pytest.mark.parametrize("path", FOUND, ids=lambda p: p.stem)
def test_found_before(path):
    backend = "aot_eager" if "aot_eager" in path.stem else "eager"
    assert check(path.read_text(), backend) is None


def test_same_seed_same_program():
    assert program(5) == program(5) != program(6)


def test_differences_are_noticed():
    """A compiler that loses a side effect, shares memory where it should not, or changes a message is caught."""
    text = ("import torch\nG = [1]\ndef entry(x):\n    G.append(2)\n    return x + 1\n"
            "def drive(compile_, call):\n    fn = compile_(entry)\n    call(fn, torch.ones(2))\n")
    assert check(text) is None
    wrong = {"loses": lambda f: lambda x: x + 1, "aliases": lambda f: lambda x: (f(x), x.add_(1))[1],
             "wrong type": lambda f: lambda x: f(x).double()}
    from programs import compare
    for name, wrap in wrong.items():
        plain = compare.execute(compile(text, "<t>", "exec"), lambda f: f)
        other = compare.execute(compile(text, "<t>", "exec"), wrap)
        assert any(compare.difference(a, b) for a, b in zip(plain, other)), name


@pytest.mark.parametrize("handled", (True, False))
def test_how_often_an_endless_program_calls_is_not_compared(handled):
    """A program that handles its RecursionError counts other calls when it is called from deeper, and only such a program does."""
    from programs import compare
    text = ("import torch\nG = [0]\ndef down(n):\n    G[0] += 1\n    return down(n - 1) if n else 0\n"
            "def entry(x):\n    try:\n        return x + down(N)\n    except RecursionError:\n        return x\n"
            "def drive(compile_, call):\n    call(compile_(entry), torch.ones(2))\n").replace("N", "-1" if handled else "50")
    code = compile(text, "<t>", "exec")
    assert compare.differs_from_itself(code, compare.execute(code, lambda f: f)) == handled
    assert check(text) is None


# ---- graphs that end at random instructions

@pytest.mark.parametrize("kind,permille,count", [("python", 20, 3), ("python", 150, 4), ("python", 500, 2), ("tensors", 150, 3),
                                                 ("training", 150, 1), ("derivatives", 150, 3)])
def test_random_with_cuts(kind, permille, count):
    failures, features = run_seeds((kind, "cpu", 0, count, None, 0, None, float("inf"), permille))
    assert not failures, f"python -m tests.programs --kind {kind} --cuts {permille} --seed {failures[0][0]}"
    assert features["breaks"] > count


TWO_ON_THE_STACK = """import torch
import math
def helper(x, k):
    for i in range(k):
        x = x + i
    return x
def entry(x):
    y = helper(x, 3)
    if y is not None:
        z = x.cos() - y
    return z * 2
def drive(compile_, call):
    call(compile_(entry), torch.ones(2))
"""


def reasons(text) -> list:
    statistics = {}
    assert check(text, "eager", statistics) is None
    return statistics["breaks"]


def test_a_program_keeps_its_cuts(monkeypatch):
    """The line that is in its text says where they are, also in the reduced one."""
    seed = next(s for s in range(1000) if reasons(mark(TWO_ON_THE_STACK, s, 100)) == ["a cut at BINARY_OP"])
    text = mark(TWO_ON_THE_STACK, seed, 100)
    assert not reasons(TWO_ON_THE_STACK) and reasons(text.replace("import math\n", "").replace("3)", "1)")) == reasons(text)

    def turned_around(*args, of=breaks.stack_slots):
        kinds, slots = of(*args)
        return kinds, slots[::-1]
    monkeypatch.setattr(breaks, "stack_slots", turned_around)
    small = reduce(text, check, check(text)[0])
    assert check(text) and check(small) and not check(TWO_ON_THE_STACK)
    assert small.startswith(f"CUTS = ({seed}, 100)\n") and "helper" not in small


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 21000, 250))
def test_many(first):
    failures, _ = run_seeds(("python", "cpu", first, first + 250, None, 0, None, float("inf")))
    assert not failures, failures
