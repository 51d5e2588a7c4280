"""The benchmark command: one process per compiler, a live display, then a table, a report and the raw numbers."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..errors import MinicompileError
from .data import load_text
from .worker import Task

WORKS = ("nanogpt", "gpt2", "resnet50")
COMPILERS = ("eager", "minicompile", "torch")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def default_tasks(work: str, device: str, dtype: str | None) -> list[Task]:
    """The configurations of one benchmark on one device: the published ones on a GPU, small ones on a CPU."""
    gpu = device == "cuda"
    if work == "nanogpt":
        model = dict(layers=6, heads=6, width=384, block_size=256, dropout=0.2) if gpu else \
            dict(layers=4, heads=4, width=128, block_size=64)
        return [Task(work, "eager", device, dtype or ("bf16" if gpu else "fp32"), 250 if gpu else 200, 64 if gpu else 12, model)]
    if work == "gpt2":
        model = dict(layers=12, heads=12, width=768, block_size=1024, vocab_size=50304) if gpu else \
            dict(layers=12, heads=12, width=192, block_size=64, vocab_size=50304 // 16)
        return [Task(work, "eager", device, dtype or ("bf16" if gpu else "fp32"), 60 if gpu else 20, 12 if gpu else 4, model)]
    size, batch, steps = (224, 128, 60) if gpu else (64, 8, 20)
    dtypes = [dtype] if dtype else (["tf32", "bf16"] if gpu else ["fp32"])
    return [Task(work, "eager", device, d, steps, batch, {"size": size}, channels_last=d == "bf16") for d in dtypes]


def check_compilers(text: str) -> list[str]:
    names = [c.strip() for c in text.split(",") if c.strip()]
    for c in names:
        name, _, mode = c.partition(":")
        if name not in COMPILERS or (mode and (mode not in MODES or name == "eager")):
            raise MinicompileError(f"There is no compiler {c!r}. Choose from eager, minicompile and torch, the last two with "
                                   f"an optional mode such as minicompile:reduce-overhead (modes: {', '.join(MODES)}).")
    if not names:
        raise MinicompileError("--compilers names none. Give a list such as eager,minicompile,torch.")
    return names


def resolve_device(device: str | None) -> str:
    if device in (None, "auto"):
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise MinicompileError(f"There is no device {device!r}. Choose cpu or cuda.")
    if device == "cuda" and not torch.cuda.is_available():
        raise MinicompileError("--device cuda asks for a GPU, but PyTorch finds none here. Leave --device out to run on the CPU.")
    return device


def environment() -> dict:
    """Command, commit, hardware and versions: what a reader needs to repeat a figure."""
    def first(command):
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=10, cwd=pathlib.Path(__file__).parent).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            return ""
    cpu = platform.processor() or platform.machine()
    if pathlib.Path("/proc/cpuinfo").exists():
        names = [line.partition(":")[2].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
        cpu = names[0] if names else cpu
    commit = os.environ.get("MINICOMPILE_COMMIT") or first(["git", "rev-parse", "--short=12", "HEAD"])
    if commit and first(["git", "status", "--porcelain", "--untracked-files=no"]):
        commit += " (modified)"
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "minicompile"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    return {"command": shlex.join(["python", "-m", "minicompile", *sys.argv[1:]]), "commit": commit or "unknown",
            "date": time.strftime("%Y-%m-%d"), "hardware": {
                "cpu": cpu, "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
                "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None}, "versions": versions}


def run_task(task: Task, on_event) -> dict:
    """Run one task in a process of its own with empty compile caches; returns its result, with `error` set if it failed."""
    with tempfile.TemporaryDirectory(prefix="minicompile-bench-") as caches:
        env = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=f"{caches}/inductor", TRITON_CACHE_DIR=f"{caches}/triton",
                   MINICOMPILE_CACHE_DIR=f"{caches}/minicompile", PYTHONUNBUFFERED="1")
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen([sys.executable, "-m", "minicompile.bench.worker", json.dumps(asdict(task))],
                                       stdout=subprocess.PIPE, stderr=errors, text=True, env=env)
            result = None
            try:
                for line in process.stdout:
                    if line.startswith("{"):
                        event = json.loads(line)
                        result = event if event["event"] in ("result", "error") else result
                        on_event(event)
                process.wait()
            finally:
                process.kill()
            if result is None or result["event"] == "error":
                errors.seek(0)
                message = result["message"] if result else f"the process ended with status {process.returncode}"
                return {"task": asdict(task), "error": message, "log": (result or {}).get("traceback", "") + errors.read()[-4000:]}
    return result


def loss_difference(result: dict, reference: dict) -> float | None:
    """Largest absolute difference of two loss curves."""
    if "error" in result or "error" in reference:
        return None
    return max(abs(a - b) for a, b in zip(result["losses"], reference["losses"]))


def label(task: dict) -> str:
    return f"{task['dtype']}{' channels_last' if task['channels_last'] else ''}"


HEADER = ("numbers", "compiler", "ms/iter", "10%-90%", "vs eager", "vs torch, same mode", "MFU", "cold compile s", "peak MB",
          "graphs", "kernels", "max loss difference")


def summary_table(results: list[dict]) -> Table:
    """One column a run, one row a figure, so that it fits a narrow terminal."""
    table = Table(show_header=False)
    for _ in range(1 + len(results)):
        table.add_column(justify="right", overflow="fold")
    for name, *cells in zip(HEADER, *rows(results)):
        table.add_row(name, *cells)
    return table


def rows(results: list[dict]) -> list[list[str]]:
    """The table's cells as text, one list of len(HEADER) a run."""
    out = []
    by_group: dict[str, dict[str, dict]] = {}
    for r in results:
        by_group.setdefault(label(r["task"]), {})[r["task"]["compiler"]] = r
    for r in results:
        task = r["task"]
        group = by_group[label(task)]
        if "error" in r:
            out.append([label(task), task["compiler"], "failed"] + ["-"] * (len(HEADER) - 3))
            continue
        name, _, mode = task["compiler"].partition(":")
        peer = group.get("torch" + (":" + mode if mode else "")) if name == "minicompile" else None
        eager = group.get("eager", {})
        out.append([label(task), task["compiler"], f"{r['ms']:.2f}", f"{r['ms_low']:.2f}-{r['ms_high']:.2f}",
                    f"{eager['ms'] / r['ms']:.2f}x" if "ms" in eager else "-",
                    f"{peer['ms'] / r['ms']:.2f}x" if peer and "ms" in peer else "-",
                    f"{100 * r['mfu']:.1f}%" if r["mfu"] else "-",
                    "-" if name == "eager" else f"{r['cold_seconds']:.1f}", f"{r['peak_memory_mb']:.0f}",
                    str(r["graphs"] or "-"), str(r["kernels"] or "-"),
                    "-" if name == "eager" or "ms" not in eager else f"{loss_difference(r, eager):.2g}"])
    return out


def bench(work: str, *, compilers: str = "eager,minicompile,torch", steps: int | None = None, dtype: str | None = None,
          device: str | None = None, data: str | None = None, out: str = "bench-results", json_only: bool = False,
          profile: bool = False) -> dict:
    """Run a benchmark, print its table, and write `report.html`, PNG plots and `result.json` to `out`/`work`. Returns the
    result as written. Raises MinicompileError on wrong use before anything is run."""
    if work not in WORKS:
        raise MinicompileError(f"There is no benchmark {work!r}. Choose from {', '.join(WORKS)}.")
    names = check_compilers(compilers)
    device = resolve_device(device)
    if dtype not in (None, "fp32", "tf32", "bf16"):
        raise MinicompileError(f"There is no dtype {dtype!r}. Choose fp32, tf32 or bf16.")
    if steps is not None and steps < 4:
        raise MinicompileError(f"--steps {steps} is too few to measure: give at least 4.")
    if work != "resnet50":
        load_text(data)
    folder = pathlib.Path(out) / work
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MinicompileError(f"The folder {str(folder)!r} cannot be made ({error.strerror}). Give another with --out.") from None
    tasks = [replace(t, compiler=c, steps=steps or t.steps, data=data, profile=profile)
             for t in default_tasks(work, device, dtype) for c in names]

    console = Console(stderr=json_only)
    results = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("{task.fields[note]}"))
    with Progress(*columns, console=console) as progress:
        bars = [progress.add_task(f"{label(asdict(t))} {t.compiler}", total=t.steps, note="", start=False) for t in tasks]
        for task, bar in zip(tasks, bars):
            progress.start_task(bar)
            progress.update(bar, note="starting, compiling" if task.compiler != "eager" else "starting")

            def on_event(event, bar=bar):
                if event["event"] == "step":
                    loss = "" if event["loss"] is None else f"loss {event['loss']:.3f}"
                    progress.update(bar, completed=event["step"], note=loss)

            results.append(run_task(task, on_event))
            r = results[-1]
            progress.update(bar, completed=task.steps, note=f"failed: {r['error'][:70]}" if "error" in r else f"{r['ms']:.2f} ms")
            progress.stop_task(bar)
    record = {"benchmark": work, **environment(), "results": results}
    path = folder / "result.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=1))
    temporary.replace(path)
    if json_only:
        print(json.dumps(record))
        return record
    console.print(summary_table(results))
    for r in results:
        if "error" in r:
            console.print(f"[red]{r['task']['compiler']} failed:[/red] {r['error']}")
            console.print(r["log"], markup=False, highlight=False)
    from .report import write_report
    console.print(f"Report: {write_report(record, folder)}")
    return record
