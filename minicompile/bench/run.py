"""The benchmark command: one process per compiler, a live display, then a table, a report and raw numbers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
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
from rich import progress
from rich.console import Console

from ..errors import MinicompileError
from .data import load_text
from .table import label, summary_table
from .worker import EXTENTS, MODES, Task, settings_of

WORKS = ("nanogpt", "gpt2", "resnet50", "captions")
COMPILERS = ("eager", "minicompile", "torch")

# Sizes and steps: the published ones on a GPU, small ones on a CPU.
SIZES = {
    ("nanogpt", "cuda"): dict(steps=250, batch=64, model=dict(
        layers=6, heads=6, width=384, block_size=256, dropout=0.2)),
    ("nanogpt", "cpu"): dict(steps=200, batch=12, model=dict(layers=4, heads=4, width=128, block_size=64)),
    ("gpt2", "cuda"): dict(steps=60, batch=12, model=dict(
        layers=12, heads=12, width=768, block_size=1024, vocab_size=50304)),
    ("gpt2", "cpu"): dict(steps=20, batch=4, model=dict(
        layers=12, heads=12, width=192, block_size=64, vocab_size=3144)),
    ("resnet50", "cuda"): dict(steps=60, batch=128, model=dict(size=224)),
    ("resnet50", "cpu"): dict(steps=20, batch=8, model=dict(size=64)),
    ("captions", "cuda"): dict(steps=40, batch=64, model=dict(vit={}, gpt2=dict(vocab_size=1024), block=256)),
    ("captions", "cpu"): dict(steps=20, batch=4, model=dict(
        vit=dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256, image_size=64),
        gpt2=dict(vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=64), block=32)),
}


def default_tasks(work: str, device: str, dtype: str | None) -> list[Task]:
    """The configurations of one benchmark on one device, for compiler "eager"."""
    dtypes = ["fp32"] if device == "cpu" else ["tf32", "bf16"] if work == "resnet50" else ["bf16"]
    return [Task(work=work, compiler="eager", device=device, dtype=d, **SIZES[work, device],
                 channels_last=work == "resnet50" and d == "bf16")
            for d in ([dtype] if dtype else dtypes)]


def check_compilers(text: str, extents: tuple = EXTENTS) -> list[str]:
    """The compilers that `text` lists, each with its settings in one order. extents: which may be asked for."""
    names = []
    for c in filter(None, map(str.strip, text.split(","))):
        try:
            name, mode, extent = settings_of(c)
        except ValueError:
            name = mode = extent = ""
        if name not in COMPILERS or name == "eager" and c != name or extent not in ("", *extents):
            also = f", {' or '.join(extents)} for what is compiled besides the model, or both joined by +" if extents else ""
            raise MinicompileError(
                f"There is no compiler {c!r}. Choose from eager, minicompile and torch, the last two with an "
                f"optional setting such as minicompile:reduce-overhead: a mode ({', '.join(MODES)}){also}.")
        names.append(":".join(filter(None, (name, "+".join(filter(None, (mode, extent)))))))
    if not names:
        raise MinicompileError("--compilers names none. Give a list such as eager,minicompile,torch.")
    return names


def resolve_device(device: str | None) -> str:
    if device in (None, "auto"):
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise MinicompileError(f"There is no device {device!r}. Choose cpu or cuda.")
    if device == "cuda" and not torch.cuda.is_available():
        raise MinicompileError("--device cuda asks for a GPU, but PyTorch finds none here. "
                               "Leave --device out to run on the CPU.")
    return device


def _output(*command: str) -> str:
    """What a command prints in this folder; empty if it fails or does not exist."""
    here = pathlib.Path(__file__).parent
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, cwd=here).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _commit() -> str:
    commit = os.environ.get("MINICOMPILE_COMMIT") or _output("git", "rev-parse", "--short=12", "HEAD")
    changed = commit and _output("git", "status", "--porcelain", "--untracked-files=no")
    return (commit or "unknown") + (" (modified)" if changed else "")


def _processor() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "minicompile"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    return versions


def environment(program: str = "minicompile") -> dict:
    """Command, commit, hardware and versions: what a reader needs to repeat a figure. program: what was run
    with `python -m`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"command": shlex.join(["python", "-m", program, *sys.argv[1:]]), "commit": _commit(),
            "date": time.strftime("%Y-%m-%d"), "hardware": {"cpu": _processor(), "cores": cores, "gpu": gpu},
            "versions": _versions()}


def run_task(task: Task, on_event) -> dict:
    """Run one task in a process of its own with empty compile caches, passing its events to `on_event`.
    Returns its result; of a run that failed `task`, `error` and `log`."""
    command = [sys.executable, "-m", "minicompile.bench.worker", json.dumps(asdict(task))]
    with (tempfile.TemporaryDirectory(prefix="minicompile-bench-") as caches,
          tempfile.TemporaryFile("w+") as errors):
        env = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=f"{caches}/inductor", PYTHONUNBUFFERED="1",
                   TRITON_CACHE_DIR=f"{caches}/triton", MINICOMPILE_CACHE_DIR=f"{caches}/minicompile")
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env)
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
        if result is not None and result["event"] == "result":
            return result
        errors.seek(0)
        log = errors.read()[-4000:]
    if result is None:
        result = {"message": f"the process ended with status {process.returncode}", "traceback": ""}
    return {"task": asdict(task), "error": result["message"], "log": result["traceback"] + log}


def run_all(tasks: list[Task], console: Console, keep=lambda results: None) -> list[dict]:
    """Run the tasks one after the other, with one progress bar each on the console; `keep` is given the results after each. Where the
    console is no terminal, which shows bars only at the end, each task gets a line when it is done."""
    results = []
    columns = (progress.SpinnerColumn(), progress.TextColumn("{task.description}"), progress.BarColumn(),
               progress.MofNCompleteColumn(), progress.TimeElapsedColumn(),
               progress.TextColumn("{task.fields[note]}"))
    with progress.Progress(*columns, console=console) as display:
        bars = [display.add_task(f"{label(asdict(t))} {t.compiler}", total=t.steps, note="", start=False)
                for t in tasks]
        for task, bar in zip(tasks, bars):
            def on_event(event, bar=bar):
                if event["event"] == "step":
                    loss = "" if event["loss"] is None else f"loss {event['loss']:.3f}"
                    display.update(bar, completed=event["step"], note=loss)

            display.start_task(bar)
            display.update(bar, note="starting" if task.compiler == "eager" else "compiling")
            results.append(run_task(task, on_event))
            keep(results)
            failed = "error" in results[-1]
            note = "failed" if failed else f"{results[-1]['ms']:.2f} ms"
            if not console.is_terminal:
                console.print(f"{label(asdict(task))} {task.compiler}: {note}", markup=False, highlight=False)
            display.update(bar, note=note, **({} if failed else {"completed": task.steps}))
            display.stop_task(bar)
    return results


def bench(work: str, *, compilers: str = "eager,minicompile,torch", steps: int | None = None,
          dtype: str | None = None, device: str | None = None, data: str | None = None,
          out: str = "bench-results", json_only: bool = False, profile: bool = False) -> dict:
    """Run a benchmark, print its table, and write `report.html`, PNG plots and `result.json` to `out`/`work`. The last is
    written after each compiler: what is stopped has measured something. Returns the result as written. Raises
    MinicompileError on wrong use before anything is run."""
    if work not in WORKS:
        raise MinicompileError(f"There is no benchmark {work!r}. Choose from zoo, {', '.join(WORKS)}.")
    names = check_compilers(compilers)
    device = resolve_device(device)
    if dtype not in (None, "fp32", "tf32", "bf16"):
        raise MinicompileError(f"There is no dtype {dtype!r}. Choose fp32, tf32 or bf16.")
    if steps is not None and steps < 4:
        raise MinicompileError(f"--steps {steps} is too few to measure: give at least 4.")
    if work in ("nanogpt", "gpt2"):
        load_text(data)
    if work == "captions" and importlib.util.find_spec("transformers") is None:
        raise MinicompileError("The benchmark captions trains models of the library transformers, which is not installed: "
                               "pip install 'minicompile[zoo]'.")
    folder = pathlib.Path(out) / work
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MinicompileError(f"The folder {str(folder)!r} cannot be made ({error.strerror}). "
                               "Give another with --out.") from None
    tasks = [replace(t, compiler=c, steps=steps or t.steps, data=data, profile=profile)
             for t in default_tasks(work, device, dtype) for c in names]
    console = Console(stderr=json_only)
    record = {"benchmark": work, **environment()}

    def keep(results):
        temporary = folder / "result.tmp"
        temporary.write_text(json.dumps(record | {"results": results}, indent=1))
        temporary.replace(folder / "result.json")

    record["results"] = run_all(tasks, console, keep)
    if json_only:
        print(json.dumps(record))
        return record
    console.print(summary_table(record["results"]))
    for r in record["results"]:
        if "error" in r:
            console.print(f"{r['task']['compiler']} failed: {r['error']}", style="red", markup=False)
            console.print(r["log"], markup=False, highlight=False)
    from .report import write_report
    console.print(f"Report: {write_report(record, folder)}")
    return record
