"""Graph breaks in awkward places: the compiled program is compared with the uncompiled one, over several calls."""
import sys
import time

import break_programs as programs
import pytest
import torch
from recorders import Recorder, same

import minicompile

pytestmark = pytest.mark.usefixtures("fresh")


def outcome(function, x, capsys):
    programs.LOG.clear()
    try:
        result = function(x)
    except Exception as error:
        result = type(error), str(error), repr(error.__cause__), repr(error.__context__)
    assert sys.exc_info()[1] is None, "an exception of the program counts as handled still"
    return result, list(programs.LOG), capsys.readouterr().out


def check(function, capsys, graphs=None):
    backend = Recorder()
    compiled = minicompile.compile(function, backend=backend)
    torch.manual_seed(0)
    x = torch.randn(2, 3)
    for value in (x, x, -x.abs(), x.abs(), x.requires_grad_(True)):
        same(outcome(compiled, value.detach().requires_grad_(value.requires_grad), capsys),
             outcome(function, value.detach().requires_grad_(value.requires_grad), capsys))
    if graphs is not None:
        assert len(backend.graphs) <= graphs
    return backend.graphs


@pytest.mark.parametrize("function", programs.ALL, ids=lambda f: f.__name__)
def test_like_eager(function, capsys):
    assert check(function, capsys) or function.__name__ in programs.EAGER, "nothing was compiled"


@pytest.mark.parametrize("function, graphs", [
    (programs.many_rounds, 4), (programs.printing, 4), (programs.while_tensor, 4), (programs.item_in_loop, 4),
    (programs.floats_in_loop, 6), (programs.two_loops_share, 6)], ids=lambda v: getattr(v, "__name__", str(v)))
def test_rounds_share_graphs(function, graphs, capsys):
    """A loop that breaks in each round compiles a few graphs, however many rounds it has."""
    check(function, capsys, graphs=2 * graphs)        # once with and once without gradients


def test_loop_without_tensors_is_one_step():
    calls = []

    def f(x):
        for i in range(5000):
            calls.append(minicompile_free(i))
        return x + 1

    compiled = minicompile.compile(f, backend="eager")
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0)) and calls == list(range(5000))


minicompile_free = minicompile.disable(lambda v: v)


def test_converging_paths_share_one_resume_function():
    from minicompile.ch03_capture import hook
    from minicompile.ch04_breaks import resume
    minicompile.compile(programs.two_loops_share, backend="eager")(torch.ones(2, 3))
    pieces = hook.kept(resume.pieces, programs.two_loops_share.__code__).values()
    starts = [(p.name, p.locals, p.stack) for p in pieces if resume.is_resume(p.code)]
    assert starts
    assert len(starts) == len(set(starts)) <= 6


def outer_of_error(x):
    y = x + 1
    return 2 * inner_of_error(y)


def inner_of_error(y):
    z = y * 2
    return z, (z.sum() + 1).item(), y


def branch_of_error(x):
    return x if x.sum() > 0 else -x


def print_of_error(x):
    x = print(x) or x
    return x


def call_of_error(x):
    return x + time.time()


@pytest.mark.parametrize("function, marked, hint", [
    (outer_of_error, "(z.sum() + 1).item()", "tensor"), (branch_of_error, "x.sum() > 0", "torch.where"),
    (print_of_error, "print(x)", "after the compiled function"), (call_of_error, "time.time()", "Call it")],
    ids=["item", "branch", "print", "call"])
def test_fullgraph_points_at_the_expression(function, marked, hint):
    with pytest.raises(minicompile.errors.GraphBreakError) as info:
        minicompile.compile(function, backend="eager", fullgraph=True)(torch.ones(2))
    text = str(info.value)
    lines = text.splitlines()
    n = next(n for n, line in enumerate(lines) if "^" in line)
    start = lines[n].index("^")
    assert lines[n - 1][start:start + lines[n].count("^")] == marked and __file__ in text
    assert hint in text.partition("Hint:")[2]
    if function is outer_of_error:
        assert "in inner_of_error" in text and "called from" in text and "in outer_of_error" in text


def test_library_function_compiled_on_purpose_goes_on_after_a_break():
    """torch's own files are not captured as frames, unless the user compiles such a function."""
    model = torch.nn.Sequential(programs.Layer(2.0), programs.Layer(3.0))
    seen = Recorder()
    compiled = minicompile.compile(model, backend=seen)
    x = torch.randn(2, 3)
    torch.testing.assert_close(compiled(x), model(x))
    assert len(seen.graphs) >= 2
