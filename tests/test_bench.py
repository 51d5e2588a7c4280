"""The benchmark command, run as a user runs it: a few steps of the small GPT under eager and minicompile."""

import json
import os
import pathlib
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from minicompile.__main__ import main
from minicompile.bench import run
from minicompile.bench.report import write_report
from minicompile.bench.run import bench, check_compilers, default_tasks
from minicompile.bench.table import HEADER, rows
from minicompile.bench.worker import build
from minicompile.errors import MinicompileError

ROOT = pathlib.Path(__file__).resolve().parent.parent
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """One run of eager, the compiled model and the compiled step: (what was printed, the folder of results)."""
    folder = tmp_path_factory.mktemp("bench")
    command = [sys.executable, "-m", "minicompile", "bench", "nanogpt", "--compilers", "eager,minicompile,minicompile:step",
               "--steps", "4", "--device", "cpu", "--out", str(folder)]
    environment = dict(os.environ, OMP_NUM_THREADS="1", COLUMNS="80")
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout, folder / "nanogpt"


@pytest.mark.processes
def test_table(both):
    printed, folder = both
    lines = {line.split("│")[1].strip(): line for line in printed.splitlines() if line.startswith("│")}
    assert lines.keys() == set(HEADER)
    assert "eager" in lines["compiler"] and "minicompile" in lines["compiler"]
    assert "1.00x" in lines["vs eager"]
    assert f"Report: {folder / 'report.html'}" in printed.replace("\n", "")


@pytest.mark.processes
def test_result(both):
    record = json.loads((both[1] / "result.json").read_text())
    assert record["benchmark"] == "nanogpt" and "bench nanogpt" in record["command"]
    assert record["commit"] and record["hardware"]["cores"] >= 1 and record["versions"]["torch"]
    eager, ours, step = record["results"]
    assert [r["task"]["compiler"] for r in record["results"]] == ["eager", "minicompile", "minicompile:step"]
    assert (eager["graphs"], eager["kernels"]) == (0, 0)
    assert ours["graphs"] == 1 and ours["kernels"] > 10
    assert step["graphs"] == 1 and step["kernels"] > ours["kernels"]
    for r in record["results"]:
        assert len(r["losses"]) == 4 and r["ms_low"] <= r["ms"] <= r["ms_high"] and r["peak_memory_mb"] > 50
    for compiled in ours, step:
        assert max(abs(a - b) for a, b in zip(eager["losses"], compiled["losses"])) < 1e-4
    assert eager["losses"][0] != eager["losses"][-1]


@pytest.mark.processes
def test_report(both):
    folder = both[1]
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3 and "src=\"http" not in page
    assert all(f"<th>{name}</th>" in page for name in HEADER)
    for name in ("loss", "time", "compile"):
        picture = (folder / f"{name}.png").read_bytes()
        assert picture.startswith(PNG) and len(picture) > 5000
    assert not list(folder.glob("*.tmp"))


def invoke(monkeypatch, *arguments):
    """The command line, in this process. Returns its exit status, or the message that it exits with."""
    monkeypatch.setattr(sys, "argv", ["minicompile", "bench", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code


@pytest.mark.processes
def test_json_is_the_only_output(tmp_path, monkeypatch, capsys):
    assert invoke(monkeypatch, "nanogpt", "--compilers", "eager", "--steps", "4", "--device", "cpu", "--json",
                  "--out", str(tmp_path)) == 0
    record = json.loads(capsys.readouterr().out)
    assert [r["task"]["compiler"] for r in record["results"]] == ["eager"]
    assert not (tmp_path / "nanogpt" / "report.html").exists()


def test_what_is_stopped_has_told_what_it_measured(tmp_path, monkeypatch, capsys):
    def run_task(task, on_event):
        if task.compiler == "torch":
            raise KeyboardInterrupt
        return {"task": asdict(task), "ms": 12.5}
    monkeypatch.setattr(run, "run_task", run_task)
    with pytest.raises(KeyboardInterrupt):
        bench("nanogpt", device="cpu", out=str(tmp_path))
    record = json.loads((tmp_path / "nanogpt" / "result.json").read_text())
    assert [r["task"]["compiler"] for r in record["results"]] == ["eager", "minicompile"]
    assert "fp32 eager: 12.50 ms\nfp32 minicompile: 12.50 ms\n" in capsys.readouterr().out


def test_wrong_use_is_said_in_one_line(monkeypatch, capsys):
    said = invoke(monkeypatch, "nanogpt", "--compilers", "jax")
    assert said.startswith("minicompile: There is no compiler 'jax'.") and "\n" not in said
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("settings, says", [
    (dict(work="nanogtp"), "There is no benchmark 'nanogtp'"),
    (dict(steps=2), "at least 4"),
    (dict(dtype="fp8"), "There is no dtype 'fp8'"),
    (dict(device="tpu"), "There is no device 'tpu'"),
    (dict(data="/no/such/file"), "cannot be read"),
])
def test_wrong_use_is_refused_before_anything_runs(tmp_path, settings, says):
    with pytest.raises(MinicompileError, match=says):
        bench(**{"work": "nanogpt", "device": "cpu", "out": str(tmp_path / "new"), **settings})
    assert not (tmp_path / "new").exists()


def test_captions():
    """Captions have the published lengths, padding is -100 and not looked at, and the model learns from them."""
    from minicompile.bench.data import CaptionBatches
    source = CaptionBatches(2000, 2, 256, 50, "cpu", 0)
    _, labels, mask = source.batch()
    lengths = mask.sum(1)
    assert ((labels == -100) == ~mask).all() and labels.max() == 49
    assert 5 <= lengths.min() and lengths.max() <= 255 and not {32, 64} & set(lengths.tolist())
    assert abs((lengths < 32).float().mean() - 0.9) < 0.03 and 0 < (lengths > 64).float().mean() < 0.03
    pytest.importorskip("transformers")
    [task] = default_tasks("captions", "cpu", None)
    model, optimizer, [batch], flops = build(replace(task, steps=1))
    losses = []
    for _ in range(3):
        logits, loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert logits.shape == (4, 32, 256) and losses[2] < losses[0] and flops > 1e8


def test_captions_without_transformers(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install" in invoke(monkeypatch, "captions", "--device", "cpu", "--out", str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def record_of(*compilers, failed=()):
    """A record as two GPU runs would leave it, with the runs named in `failed` failed."""
    results = []
    for task in default_tasks("resnet50", "cuda", None):
        for n, compiler in enumerate(compilers):
            described = {"compiler": compiler, "dtype": task.dtype, "channels_last": task.channels_last}
            if compiler in failed:
                results.append({"task": described, "error": "ValueError: <b>[red]", "log": ""})
            else:
                results.append({"task": described, "ms": 10.0 / (n + 1), "ms_low": 1.0, "ms_high": 20.0,
                                "losses": [2.0, 1.0 + n], "cold_seconds": 3.0, "peak_memory_mb": 100.0,
                                "mfu": 0.4, "graphs": n, "kernels": n})
    return {"benchmark": "resnet50", "command": "<command>", "commit": "0", "date": "2026-01-01",
            "versions": {}, "hardware": {"cpu": "cpu", "cores": 1, "gpu": "gpu"}, "results": results}


def test_rows_compare_within_equal_numbers_and_modes():
    record = record_of("eager", "torch:max-autotune", "minicompile", "minicompile:max-autotune")
    table = rows(record["results"])
    assert [row[0] for row in table] == ["tf32"] * 4 + ["bf16 channels_last"] * 4
    assert {len(row) for row in table} == {len(HEADER)}
    against_torch = HEADER.index("vs torch")
    assert [row[against_torch] for row in table[:4]] == ["-", "-", "-", "2.00x"]
    assert table[3][HEADER.index("vs eager")] == "4.00x" and table[3][-1] == "3"


def test_a_whole_step_is_compared_with_the_fastest_run_of_torch():
    table = rows(record_of("eager", "torch", "torch:optimizer", "torch:reduce-overhead", "minicompile:step", "minicompile")["results"])
    against_torch = HEADER.index("vs torch")
    assert [row[against_torch] for row in table[:6]] == ["-", "-", "-", "-", "1.25x", "3.00x"]


def test_report_of_failed_runs(tmp_path):
    page = write_report(record_of("eager", "minicompile", failed=["minicompile"]), tmp_path).read_text()
    assert page.count("failed") == 2 and "&lt;command&gt;" in page
    assert (tmp_path / "loss.png").exists() and not (tmp_path / "compile.png").exists()
    nothing = write_report(record_of("eager", failed=["eager"]), tmp_path)
    assert "data:image" not in nothing.read_text()


def test_compilers_and_modes():
    assert check_compilers("eager, minicompile:reduce-overhead") == ["eager", "minicompile:reduce-overhead"]
    assert check_compilers("minicompile:step,torch:optimizer+reduce-overhead") == ["minicompile:step", "torch:reduce-overhead+optimizer"]
    with pytest.raises(MinicompileError, match="torch:step"):
        check_compilers("torch:step", extents=())
    for wrong in ("", "eager:max-autotune", "eager:step", "torch:fast", "torch:", "torch:step+optimizer", "torch:default+reduce-overhead"):
        with pytest.raises(MinicompileError):
            check_compilers(wrong)
