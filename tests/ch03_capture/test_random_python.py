"""Random Python modules, plain and compiled, must not differ: `tests/programs/`. Programs that once did are kept in
`tests/programs/found/`."""
import pathlib

import pytest
from programs.compare import check
from programs.generate import program
from programs.run import backend_of, run_seeds

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


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 21000, 250))
def test_many(first):
    failures, _ = run_seeds(("python", "cpu", first, first + 250, None, 0, None, float("inf")))
    assert not failures, failures
