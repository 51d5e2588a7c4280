"""A bug planted on each rung is named by `bisect`, and reduced to a handful of operations; without one, nothing is named."""
import contextlib
import io
import itertools
import os
import pickle
import runpy
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import minicompile
from minicompile import backends, stances
from minicompile.ch05_autograd import callables, region
from minicompile.ch06_decompositions import table
from minicompile.ch07_loops import reference, table as lowerings
from minicompile.ch10_cpp import ops
from minicompile.tools import apart, shrink
from minicompile.tools.answers import Run, answers_of, find_differences, references

pytestmark = [pytest.mark.usefixtures("reset"), pytest.mark.processes]


@pytest.fixture
def bisect(tmp_path):
    return lambda f, **settings: minicompile.bisect(f, out=str(tmp_path), seconds=60, **settings)


def program(x, w):
    h = torch.relu(x @ w) + w.sum(0)
    p = torch.softmax(h, -1)
    q = torch.tanh(p * 3) + h.mean()
    return q * 2, (q - p).sum(1), h.sin()


def arguments():
    return torch.randn(6, 8), torch.randn(8, 8, requires_grad=True)


def script_of(found) -> str:
    """What the script prints where the bug is, too."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(found.path)
    return said.getvalue()


def wrong_rule(monkeypatch, rules: dict, name, wrong):
    monkeypatch.setitem(rules, name, wrong(rules[name]))


def test_no_difference(bisect):
    found = bisect(program)(*arguments())
    assert found.rung is None and found.largest is None and found.path is None
    assert "no difference" in str(found) and "cpp with dynamic shapes" in str(found)


def test_cpp_operation(bisect, monkeypatch):
    wrong_rule(monkeypatch, ops.CPP_OPS, "tanh", lambda rule: lambda *a: f"({rule(*a)} * 1.01f)")
    found = bisect(program)(*arguments())
    assert (found.rung, found.before, found.nodes) == ("cpp", "loops", 1) and "torch.tanh" in found.code
    assert 0.005 < found.largest.amount < 0.01 and found.largest.kind == "value" and found.largest.own < 1e-5
    assert found.graph[0] == 1 and "in program" in found.graph[1]
    lines = script_of(found).splitlines()
    assert lines[0] == "loops [0.0, 0.0]" and lines[1].startswith("cpp [0.007")
    assert "cpp differs" in str(found) and found.path in str(found)


def test_crash(bisect, monkeypatch):
    wrong_rule(monkeypatch, ops.CPP_OPS, "sin", lambda rule: lambda *a: f"(__builtin_trap(), {rule(*a)})")
    found = bisect(program)(*arguments())
    assert (found.rung, found.largest.kind, found.nodes) == ("cpp", "crash", 1) and "SIG" in found.largest.text
    assert "sin" in found.code


def test_capture(bisect, monkeypatch):
    monkeypatch.setattr(backends, "eager_callable", lambda gm: lambda *inputs: tuple(-t for t in gm.forward(*inputs)))
    found = bisect(program)(*arguments())
    assert (found.rung, found.before, found.path) == ("eager", "uncompiled", None) and found.largest.kind == "value"


def test_gradient(bisect, monkeypatch):
    real = region.match_tangent
    monkeypatch.setattr(region, "match_tangent", lambda t, *layout: real(t, *layout) * 2)
    found = bisect(program)(*arguments())
    assert (found.rung, found.before) == ("aot_eager", "eager") and found.nodes <= 2 and ".grad" in found.largest.where
    assert "requires_grad_()" in open(found.path).read()


def test_decomposition(bisect, monkeypatch):
    wrong_rule(monkeypatch, table.TABLE, torch.ops.aten._softmax.default, lambda rule: lambda *a: rule(*a) + 0.25)
    found = bisect(program)(*arguments())
    assert (found.rung, found.nodes) == ("decomposed", 1) and "softmax" in found.code


def test_loop_interpreter(bisect, monkeypatch):
    wrong_rule(monkeypatch, reference.SCALAR, "tanh", lambda rule: lambda x: rule(x).abs() - 1)
    found = bisect(program)(*arguments())
    assert (found.rung, found.before, found.nodes) == ("loops", "decomposed", 1) and "tanh" in found.code


def test_lowering_whose_error_is_softened(bisect, monkeypatch):
    def wrong(*args):
        raise ZeroDivisionError("planted")
    monkeypatch.setitem(lowerings.LOWERINGS, torch.ops.aten.tanh.default, wrong)
    found = bisect(program)(*arguments())
    assert (found.rung, found.before, found.nodes) == ("loops", "decomposed", 1) and "planted" in found.largest.text
    assert "with a warning" in str(found)


def test_module_with_state_keeps_it(bisect, monkeypatch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.calls, self.scale = nn.BatchNorm1d(8), 0, 2.0

        def forward(self, x, out):
            self.calls += 1
            out.add_(1)
            h = F.dropout(self.norm(x), 0.5)
            print("a break")
            return torch.erf(h) * self.scale

    net, x, out = Net(), torch.randn(4, 8), torch.zeros(3)
    before, state = {k: v.clone() for k, v in net.state_dict().items()}, torch.get_rng_state()
    assert bisect(net)(x, out).rung is None
    wrong_rule(monkeypatch, ops.CPP_OPS, "erf", lambda rule: lambda *a: f"({rule(*a)} + 1)")
    found = bisect(net)(x, out)
    assert (found.rung, found.nodes, found.graph[0]) == ("cpp", 1, 2) and "erf" in found.code
    for key, value in net.state_dict().items():
        assert torch.equal(value, before[key])
    assert net.calls == 0 and out.sum() == 0 and torch.equal(torch.get_rng_state(), state)


def test_only_at_the_second_call(bisect, monkeypatch):
    real, count = callables.interpret, itertools.count()
    monkeypatch.setattr(callables, "interpret", lambda *a: [t + (next(count) > 0) for t in real(*a)])
    found = bisect(lambda x: x.sin())(torch.randn(3))
    assert (found.rung, found.nodes) == ("aot_eager", 1) and found.largest.where.startswith("call 2")
    assert "for _ in range(2)" in open(found.path).read()


def test_only_under_dynamic_shapes(bisect, monkeypatch):
    wrong_rule(monkeypatch, table.TABLE, torch.ops.aten._softmax.default,
               lambda rule: lambda x, *a: rule(x, *a) + any(isinstance(n, torch.SymInt) for n in x.shape))
    f = lambda x: torch.softmax(x.reshape(-1, x.shape[0]), -1)        # noqa: E731
    found = bisect(f)(torch.randn(4, 6))
    assert (found.rung, found.tried[-1]) == ("decomposed", "decomposed with dynamic shapes") and found.nodes <= 2
    assert "dynamic=True" in open(found.path).read()
    assert bisect(f, dynamic=False)(torch.randn(4, 6)).rung is None
    assert bisect(f, then=[(torch.randn(5, 6),)])(torch.randn(4, 6)).tried[-1] == "decomposed"


def test_exceptions_are_answers(bisect, monkeypatch):
    def f(x, i):
        return x.index_select(0, i) * 2

    x, i = torch.randn(3, 2), torch.tensor([5])
    assert bisect(f)(x, i).rung is None                               # both raise
    assert "uncompiled" in str(bisect(lambda: os.kill(os.getpid(), signal.SIGKILL))())


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        return g * 3 * x.sin()


def test_autograd_function_is_written(bisect, monkeypatch):
    wrong_rule(monkeypatch, ops.CPP_OPS, "sin", lambda rule: lambda *a: f"({rule(*a)} + 0.5f)")
    found = bisect(lambda x: Scale.apply(x * 2).exp())(torch.randn(5, requires_grad=True))
    assert found.rung == "cpp" and "class Scale" in found.code and found.nodes <= 3
    assert script_of(found).startswith("loops [0.0")


def test_autocast_and_no_grad(bisect, monkeypatch):
    wrong_rule(monkeypatch, ops.CPP_OPS, "tanh", lambda rule: lambda *a: f"({rule(*a)} + 0.5f)")

    def f(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ w
        return y.float().tanh().sum(0)

    with torch.no_grad():
        found = bisect(f)(*arguments())
    assert (found.rung, found.nodes) == ("cpp", 1) and "set_grad_enabled(False)" in open(found.path).read()


def test_a_function_that_has_the_name_of_another_is_written_as_itself(bisect, monkeypatch):
    wrong_rule(monkeypatch, ops.CPP_OPS, "tanh", lambda rule: lambda *a: f"({rule(*a)} + 0.5f)")
    found = bisect(lambda x: torch._VF.chain_matmul((x, x)).tanh())(torch.eye(3))
    assert found.rung == "cpp" and script_of(found).startswith("loops [0.0")


def test_rounding_is_no_difference(bisect):
    def f(x):
        y = x.to(torch.bfloat16)
        return (y * y + y).sum(0), (y - y.mean()).argmax(), torch.softmax(y, 0)
    assert bisect(f)(torch.randn(50, 7)).rung is None


def test_the_rule_of_numbers():
    def answers(value, **more):
        run = Run(lambda: (lambda x: value(x), (torch.tensor([1.0, 1e-3, 5.0]),), {}), calls=1)
        return run, apart.Outcome(answers_of(run, None))

    run, _ = answers(lambda x: x / 3)
    refs = references(run, 60)
    assert not find_differences(answers(lambda x: x / 3 + 2e-8)[1], refs)
    assert find_differences(answers(lambda x: x / 3 + 1e-5)[1], refs)[0].kind == "value"
    assert find_differences(answers(lambda x: (x / 3).double())[1], refs)[0].kind == "form"
    assert "nan where eager has" in find_differences(answers(lambda x: x / 3 * torch.tensor([1, float("nan"), 1]))[1], refs)[0].text
    assert find_differences(answers(lambda x: x.nosuch)[1], refs)[0].kind == "exception"


@pytest.mark.parametrize("t", [torch.randn(3, 4), torch.randn(2, 3, 4).permute(2, 0, 1), torch.randn(9)[::2], torch.randn(3, 1).expand(3,
    4),
                               torch.randint(5, (2, 3)), torch.rand(20) > 0.5, torch.tensor(2.0), torch.zeros(0, 2),
                               torch.randn(4).bfloat16()])
def test_inputs_as_text(t):
    for text in shrink.texts_for(shrink.Argument(t)):
        made = eval(text)
        assert (made.shape, made.dtype, made.stride()) == (t.shape, t.dtype, t.stride()), text


def test_a_server_in_the_place_of_forks(monkeypatch):
    server = apart.Server()
    try:
        assert server.run(sum, ([1, 2],), 60) == apart.Outcome(3)
        assert server.run(divmod, (1, 0), 60).error.startswith("ZeroDivisionError")
        assert "SIGABRT" in server.run(os.abort, (), 60).error
        assert server.run(time.sleep, (30,), 0.2).error == "not finished after 0.2 s"
        assert server.run(torch.add, (torch.ones(2), 1), 60).value.tolist() == [2, 2]
    finally:
        server.close()


def test_graphs_recorded_here(bisect, monkeypatch):
    """What a process does that has used a GPU."""
    wrong_rule(monkeypatch, ops.CPP_OPS, "tanh", lambda rule: lambda *a: f"({rule(*a)} + 0.5f)")
    monkeypatch.setattr(apart, "run", lambda f, *a, seconds=60: apart.forked(*pickle.loads(pickle.dumps((f, a))), seconds))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", list)
    x, w = arguments()
    y = x.clone()
    found = bisect(lambda x, w: program(x.add_(1), w))(x, w)
    assert (found.rung, found.nodes) == ("cpp", 1) and "tanh" in found.code
    assert torch.equal(x, y) and w.grad is None and stances.current.name == "default"


def test_command(tmp_path):
    (tmp_path / "mine.py").write_text("""
import torch
from minicompile.ch10_cpp import ops
real = ops.CPP_OPS["tanh"]
ops.CPP_OPS["tanh"] = lambda *a: f"({real(*a)} + 0.5f)"
def f(x): return x.tanh()
""")
    command = [sys.executable, "-m", "minicompile", "bisect", f"{tmp_path}/mine.py:f", "--out", str(tmp_path)]
    done = subprocess.run([*command, "torch.randn(4)"], capture_output=True, text=True)
    assert done.returncode == 1 and "f: cpp differs from eager" in done.stdout, done.stdout + done.stderr
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "missing a required argument" in done.stderr and "Traceback" not in done.stderr


def test_triton_operation(tmp_path):
    """Triton decides at import whether it interprets, so this runs in a process of its own."""
    (tmp_path / "planted.py").write_text(textwrap.dedent("""
        import torch, minicompile, sys
        from minicompile.ch09_triton.rules import scalars as ops
        real = ops.OPS["tanh"]
        ops.OPS["tanh"] = lambda *a: f"({real(*a)} + 0.5)"
        found = minicompile.bisect(lambda x: torch.tanh(x * 2).sum(0) + 1, out=sys.argv[1])(torch.randn(5, 4))
        print(found.rung, found.before, found.nodes)
    """))
    done = subprocess.run([sys.executable, str(tmp_path / "planted.py"), str(tmp_path)], capture_output=True, text=True,
                          env=dict(os.environ, TRITON_INTERPRET="1"))
    assert done.stdout.strip() == "triton cpp 1", done.stdout + done.stderr
