"""The zoo: its list of models, its judgement, and what it makes of processes that crash, hang or end."""
import json
import math
import os
import runpy
import signal
import time

import pytest
import torch
from torch import nn

from minicompile.bench.zoo import imports, run, worker
from minicompile.bench.zoo.check import Bench, Yardstick
from minicompile.bench.zoo.huggingface import TINY
from minicompile.bench.zoo.models import LIBRARIES, MODELS, build, installed
from minicompile.errors import MinicompileError


def test_the_list_is_long_and_its_names_are_distinct():
    assert len(MODELS) == len(set(MODELS)) >= 163
    assert {name.partition("/")[0] for name in MODELS} == set(LIBRARIES)


def test_nothing_in_a_model_is_constant_or_random():
    model, inputs = build("plain/resnet50", TINY)
    assert all(p.min() < p.max() for p in model.parameters())
    (images, labels), _ = inputs(3)
    assert images.shape[0] == labels.shape[0] == 3 and torch.equal(images, inputs(3)[0][0])


# ---- the judgement -----------------------------------------------------------------------------------------

class Small(nn.Module):
    """A norm with buffers, a sum that cancels, a gradient that is zero but for rounding (the bias before a norm)."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        y = self.norm(self.linear(x))
        return {"y": y, "loss": (y * torch.arange(8)).pow(3).mean() + (y - y.mean()).sum()}


def yard(dtype=torch.float32):
    torch.manual_seed(0)
    bench = Bench(Small(), "cpu", dtype, training=True)
    made = ((torch.randn(16, 8),), {})
    return bench, made, Yardstick(bench, made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eager_passes_and_leaves_the_state_alone(dtype):
    bench, made, yardstick = yard(dtype)
    before = {k: v.clone() for k, v in bench.model.state_dict().items()}
    assert yardstick.judge(bench.answers(bench.model, bench.inputs(made)))[0] <= 1
    assert yardstick.dtype == "float64"
    assert all(torch.equal(v, before[k]) for k, v in bench.model.state_dict().items())


@pytest.mark.parametrize("name, spoil", [
    ("output.y", lambda t: t + 1e-3),
    ("output.y", lambda t: torch.where(torch.arange(t.numel()).view(t.shape) == 7, t + 0.1, t)),        # one element of 128
    ("output.y", lambda t: t * torch.nan),
    ("output.y", lambda t: t.double()),
    ("output.y", lambda t: t[:-1]),
    ("loss", lambda t: t * 1.001),
    ("gradient of linear.weight", lambda t: t * 1.001),
    ("gradient of linear.weight", lambda t: None),
    ("buffer norm.running_mean", lambda t: t + 1e-3),
    ("buffer norm.num_batches_tracked", lambda t: t + 1),
])
def test_what_is_wrong_is_found(name, spoil):
    bench, made, yardstick = yard()
    answers = bench.answers(bench.model, bench.inputs(made))
    times, what = yardstick.judge(answers | {name: spoil(answers[name])})
    assert times > 1 and name in what


def test_an_answer_that_is_missing_is_found():
    bench, made, yardstick = yard()
    answers = bench.answers(bench.model, bench.inputs(made))
    del answers["output.y"]
    assert yardstick.judge(answers)[0] == math.inf


def test_a_tie_is_told_from_a_wrong_number():
    """A ReLU of a number that is zero but for rounding: on which side it falls is not asked, a gradient that is always wrong is."""
    tie = torch.randn(4096).mul(1e-9)
    tie[0] = 1e-12

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4096))

        def forward(self, x):
            return torch.relu(x * self.weight).mul(1e6).sin().sum()

    bench = Bench(Tied(), "cpu", torch.float32, training=True)
    yardstick = Yardstick(bench, ((tie,), {}))
    calls = iter(range(100))

    def on_the_other_side(x):                       # at the given numbers only: at neighbours it is eager
        return bench.model(torch.where((tie == x).all() & (torch.arange(4096) == 0), -1e-3, x))

    def wrong(x):
        return bench.model(x) + bench.model.weight[0] * 1e-2

    def wrong_once(x):
        return wrong(x) if next(calls) == 0 else bench.model(x)

    for call, persists in ((on_the_other_side, False), (wrong, True), (wrong_once, True)):
        times, what = yardstick.judge(bench.answers(call, bench.inputs(yardstick.made)))
        assert 1 < times < math.inf and yardstick.persists(call) == persists, (call, times, what)


# ---- processes ---------------------------------------------------------------------------------------------

def crash(task, connection, env, cores, threads, log):
    os.setsid()
    for kind in task.works:
        for stage in ("build", "eager", "compile"):
            connection.send({"event": "stage", "work": kind, "stage": stage})
        if kind == "training":
            os.kill(os.getpid(), signal.SIGSEGV)
        connection.send({"event": "result", **vars(task), "work": kind, "verdict": "pass"})


def hang(task, connection, env, cores, threads, log):
    os.setsid()
    connection.send({"event": "stage", "work": task.works[0], "stage": "compile"})
    time.sleep(100)


def eager_crash(task, connection, env, cores, threads, log):
    os.setsid()
    connection.send({"event": "stage", "work": task.works[0], "stage": "eager"})
    os._exit(3)


@pytest.fixture(scope="module", autouse=True)
def loaded_once():
    """The processes are forked from one that has the libraries, as in a run."""
    run.PROCESSES.set_forkserver_preload(["minicompile.bench.zoo.imports"])


def rows_of(serve, works, timeout=60.0, deadline=math.inf):
    rows = []
    task = worker.Task("plain/perceptron", "minicompile", works, "cpu", "fp32", 0.0, 1)
    plan = run.Plan("cpu", 1, timeout, time.monotonic() + min(deadline, 1e6), [""])
    run.run_model(task, {}, set(), 1, plan, rows.append, serve)
    return rows


def test_a_crash_is_one_and_the_other_work_runs():
    first, second = rows_of(crash, ["training", "inference"])
    assert (first["work"], first["verdict"], first["stage"], first["error"]) == ("training", "crash", "compile", "ended by SIGSEGV")
    assert (second["work"], second["verdict"]) == ("inference", "pass")


def test_a_hanging_model_is_ended():
    rows_of(eager_crash, ["inference"])                             # from here on a process takes a moment
    row, = rows_of(hang, ["training", "inference"], timeout=5.0)
    assert (row["work"], row["verdict"], row["stage"]) == ("training", "timeout", "compile")
    assert rows_of(hang, ["training"], deadline=1.0) == []          # the run's end is not the model's fault


def test_what_eager_cannot_do_does_not_count():
    row, = rows_of(eager_crash, ["inference"])
    assert row["verdict"] == "eager fails" and row["error"] == "ended with status 3"
    assert run.summary([row])[0]["models"] == 0


def test_a_run_and_its_continuation(tmp_path, capsys):
    settings = dict(compilers="minicompile", models="plain/perceptron,plain/nothing", device="cpu", seconds=0.05, out=str(tmp_path))
    record = run.bench_zoo(**settings)
    assert [(r["work"], r["verdict"]) for r in record["results"]] == [("training", "pass"), ("inference", "pass")]
    for r in record["results"]:
        assert r["speed_low"] <= r["speed"] <= r["speed_high"] and r["graphs"] == 1 and r["breaks"] == [] and 0 < r["distance"] <= 1
    assert [(r["work"], r["pass"]) for r in record["summary"]] == [("inference", 1), ("training", 1)]
    folder = tmp_path / "zoo"
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3 and "plain/perceptron" in page
    lines = (folder / "results.jsonl").read_text().splitlines()
    (folder / "results.jsonl").write_text(lines[0] + "\n" + lines[1][:40])                        # as after a kill
    capsys.readouterr()
    again = run.bench_zoo(**settings, json_only=True)
    assert [r["work"] for r in again["results"]] == ["training", "inference"]
    assert json.loads(lines[0])["cold_seconds"] == again["results"][0]["cold_seconds"]
    assert json.loads(capsys.readouterr().out)["benchmark"] == "zoo"


def test_models_of_missing_libraries_are_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "installed", lambda name: False)
    record = run.bench_zoo(compilers="minicompile", models="timm/resnet18", device="cpu", out=str(tmp_path))
    assert [r["verdict"] for r in record["results"]] == ["not installed"] * 2
    assert installed("plain/gpt") and record["summary"][0]["models"] == 0


def test_comparison_with_torch():
    def row(model, compiler, speed, cold, verdict="pass"):
        return {"model": model, "compiler": compiler, "work": "training", "verdict": verdict, "speed": speed, "speed_low": 0.99 * speed,
                "speed_high": 1.01 * speed, "cold_seconds": cold}
    rows = [row("a", "minicompile", 2.0, 1.0), row("a", "torch", 1.0, 10.0), row("b", "minicompile", 1.0, 1.0),
            row("b", "torch", 2.0, 10.0), row("c", "minicompile", 1.0, 1.0), row("c", "torch", 9.0, 1.0, "wrong")]
    found = run.against(rows, "training")
    assert found["models"] == 2 and found["slower"] == ["b"] and found["speed"] == pytest.approx(1) and abs(found["cold"] - 0.1) < 1e-9


@pytest.mark.parametrize("settings, says", [
    (dict(models="timm/nothing"), "No model's name fits"), (dict(works="sleeping"), "There is no work"),
    (dict(dtype="fp8"), "There is no dtype"), (dict(compilers="jax"), "There is no compiler"), (dict(compilers="eager"), "names none")])
def test_wrong_use_is_refused(tmp_path, settings, says):
    with pytest.raises(MinicompileError, match=says):
        run.bench_zoo(**{"device": "cpu", "out": str(tmp_path / "new"), **settings})
    assert not (tmp_path / "new").exists()


def test_a_library_that_does_not_fit_this_torch_stops_nobody_else(monkeypatch):
    asked = []

    def broken(name):
        asked.append(name)
        raise RuntimeError("operator torchvision::nms does not exist")
    monkeypatch.setattr("importlib.import_module", broken)
    runpy.run_path(imports.__file__)
    assert "torchvision" in asked and "timm" in asked
