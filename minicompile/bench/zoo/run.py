"""`python -m minicompile bench zoo`: every model of the zoo under every compiler, a process each.

Several processes compile at once on each device, one is timed at a time. A JSON line per finished work (training or inference of a model
under a compiler) goes to `zoo/results.jsonl`; a later run on the same commit and machine goes on where that ended.
"""
from __future__ import annotations

import fnmatch
import json
import math
import multiprocessing
import os
import pathlib
import queue
import signal
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, replace

import torch
from rich.console import Console
from rich.table import Table

from ...errors import MinicompileError
from ..run import check_compilers, environment, resolve_device
from .models import LIBRARIES, MODELS, installed
from .worker import Task, serve

PROCESSES = multiprocessing.get_context("forkserver")        # imports once, then forks a process per model
WORKS = ("training", "inference")


@dataclass
class Plan:
    """How a run goes about it."""

    device: str
    jobs: int                        # processes at once on each device
    timeout: float                   # seconds for a model under a compiler, both works
    deadline: float                  # time.monotonic() after which nothing is begun or waited for
    devices: list[str]               # values of CUDA_VISIBLE_DEVICES; [""] on a CPU


def visible_devices(device: str) -> list[str]:
    if device == "cpu":
        return [""]
    named = [d for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d.strip()]
    return named or [str(i) for i in range(torch.cuda.device_count())]


def key(row: dict) -> tuple:
    return row["model"], row["compiler"], row["work"], row["device"], row["dtype"]


def ended(code: int | None) -> str:
    """What an exit status says."""
    if code is not None and code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"ended with status {code}"


def run_process(task: Task, env: dict, cores: set[int], threads: int, seconds: float, on_event, serve=serve) -> tuple[str, str]:
    """Run a task in a process and pass its events on. Answers how it ended ("", "timeout", or a crash in words) and the end of what it
    printed."""
    with tempfile.TemporaryDirectory(prefix="minicompile-zoo-") as folder:
        env = dict(env, TORCHINDUCTOR_CACHE_DIR=f"{folder}/inductor", TRITON_CACHE_DIR=f"{folder}/triton",
                   MINICOMPILE_CACHE_DIR=f"{folder}/minicompile")
        here, there = PROCESSES.Pipe(duplex=False)
        log = pathlib.Path(folder, "log")
        process = PROCESSES.Process(target=serve, args=(task, there, env, cores, threads, str(log)))
        process.start()
        there.close()
        until, how = time.monotonic() + seconds, ""
        try:
            while not how:
                if not here.poll(max(0.0, until - time.monotonic())):
                    how = "timeout"
                else:
                    on_event(here.recv())
        except EOFError:
            process.join(10)
            how = ended(process.exitcode) if process.exitcode != 0 else ""
        finally:
            end_group(process.pid)       # its compile workers too
            process.join()
        return how, log.read_text(errors="replace")[-2000:] if log.exists() else ""


def end_group(pid: int):
    for kill in (os.killpg, os.kill):    # the second, if it did not come as far as leading a group
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass


def run_model(task: Task, env: dict, cores: set[int], threads: int, plan: Plan, write, serve=serve) -> None:
    """Both works of a model under a compiler; after a crash, the other one in a new process."""
    left, until = list(task.works), time.monotonic() + plan.timeout
    while left:
        reached: dict = {}

        def on_event(event):
            if event.pop("event") == "stage":
                reached.update(event)
            else:
                left.remove(event["work"])
                write(event)
        how, log = run_process(replace(task, works=list(left)), env, cores, threads, min(until, plan.deadline) - time.monotonic(),
                               on_event, serve)
        if not left:
            return
        if how == "timeout" and time.monotonic() >= plan.deadline:
            return                       # the run's time is over, not the model's: the next run takes it up
        stage, kind = reached.get("stage", "start"), left.pop(0)
        verdict = "eager fails" if stage in ("build", "eager") else "timeout" if how == "timeout" else "crash"
        write(asdict(task) | {"work": kind, "verdict": verdict, "stage": stage, "error": how or "it ended without a result", "log": log})
        if how == "timeout":
            left.clear()


def run_all(tasks: list[Task], plan: Plan, write) -> None:
    """Work through the tasks with `plan.jobs` processes on each device, in order. A device has cores of its own, two of them only for the
    process that is timed, so that those that compile do not slow it down."""
    waiting: queue.SimpleQueue = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    share = len(cores) // len(plan.devices)
    quiet = 2 if plan.jobs > 1 and share >= 4 else 0
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"        # to ask for a device must not start CUDA where processes are forked
    PROCESSES.set_forkserver_preload(["minicompile.bench.zoo.imports"])

    def work_through(n: int):
        own = cores[n * share:(n + 1) * share]
        threads = max(1, len(own) // plan.jobs)
        env = {"TORCHINDUCTOR_COMPILE_THREADS": str(max(4, 2 * threads))}         # as many as there are cores would drown its neighbours
        if plan.devices[n]:
            env["CUDA_VISIBLE_DEVICES"] = plan.devices[n]
        while time.monotonic() < plan.deadline:
            try:
                task = waiting.get_nowait()
            except queue.Empty:
                return
            run_model(replace(task, lock=f"{folder}/device-{n}", quiet=tuple(own[:quiet])), env, set(own[quiet:]),
                      threads, plan, write)

    with tempfile.TemporaryDirectory(prefix="minicompile-zoo-locks-") as folder:
        threads = [threading.Thread(target=work_through, args=(n,)) for _ in range(plan.jobs) for n in range(len(plan.devices))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


# ---- what a run found --------------------------------------------------------------------------------------

def geometric_mean(values) -> float | None:
    values = [v for v in values if v and v > 0]
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def median(values) -> float | None:
    values = sorted(values)
    return values[len(values) // 2] if values else None


def summary(rows: list[dict]) -> list[dict]:
    """One row per compiler, kind of work and dtype."""
    groups: dict = {}
    for row in rows:
        groups.setdefault((row["work"], row["dtype"], row["compiler"]), []).append(row)
    found = []
    for (kind, dtype, compiler), members in sorted(groups.items()):
        counted = [r for r in members if r["verdict"] not in ("eager fails", "not installed")]
        passed = [r for r in counted if r["verdict"] == "pass"]
        timed = [r for r in passed if "speed" in r]
        found.append({
            "work": kind, "dtype": dtype, "compiler": compiler, "models": len(counted), "pass": len(passed),
            **{v: sum(r["verdict"] == v for r in counted) for v in ("wrong", "error", "crash", "timeout")},
            "speed": geometric_mean(r["speed"] for r in timed),
            "slower": sum(r["speed_high"] < 0.97 for r in timed),
            "one_graph": sum(r.get("graphs") == 1 and not r.get("breaks") for r in passed),
            "cold_seconds": median(r["cold_seconds"] for r in passed),
            "memory": geometric_mean(r["memory_mb"] / r["eager_memory_mb"] for r in timed)})
    return found


def against(rows: list[dict], kind: str) -> dict | None:
    """minicompile over torch.compile on the models that both pass: speed, cold compile, and who is slower beyond doubt."""
    ours, peer = ({r["model"]: r for r in rows if r["work"] == kind and r["verdict"] == "pass" and r["compiler"] == name}
                  for name in ("minicompile", "torch"))
    both = sorted(ours.keys() & peer.keys())
    timed = [n for n in both if "speed" in ours[n] and "speed" in peer[n]]
    if not both:
        return None
    return {"models": len(both), "speed": geometric_mean(ours[n]["speed"] / peer[n]["speed"] for n in timed),
            "cold": geometric_mean(ours[n]["cold_seconds"] / peer[n]["cold_seconds"] for n in both),
            "slower": [n for n in timed if ours[n]["speed_high"] / peer[n]["speed_low"] < 0.95]}


def line(row: dict) -> str:
    """A finished work in one line."""
    if "speed" in row:
        told = f"{row['speed']:.2f}x ({row['speed_low']:.2f}-{row['speed_high']:.2f})  {row['ms']:.2f} ms"
    else:
        told = ""
    if row["verdict"] in ("pass", "wrong"):
        told += f"  compile {row['cold_seconds']:.1f} s  {row['graphs']} graphs  {len(row['breaks'])} breaks"
    if row["verdict"] == "wrong":
        told += f"  {row['distance']:.1f} times what is allowed: {row['worst']}"
    return f"{row['model']:45} {row['work']:9} {row['compiler']:12} {row['verdict']:13} {told}{row.get('error', '')}"


def totals(rows: list[dict]) -> Table:
    """The summary for a console: one column per compiler and kind of work."""
    found = summary(rows)
    table = Table(show_header=False)
    for _ in range(1 + len(found)):
        table.add_column(justify="right", overflow="fold")
    for name in found[0] if found else ():
        cells = [r[name] for r in found]
        table.add_row(name.replace("_", " "), *("-" if c is None else f"{c:.2f}" if isinstance(c, float) else str(c) for c in cells))
    return table


def as_json(record: dict) -> str:
    """A line per row, without logs: they stay in results.jsonl."""
    rows = ",\n".join(json.dumps({k: v for k, v in r.items() if k not in ("log", "stages", "made_by")}) for r in record["results"])
    return json.dumps(record | {"results": []}, indent=1).replace('"results": []', f'"results": [\n{rows}\n]')


def previous(path: pathlib.Path, made_by: dict) -> list[dict]:
    """The rows of an earlier run of the same commit on the same machine; a half-written last line is none."""
    rows = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            row = json.loads(text)
        except ValueError:
            continue
        if row.get("made_by") == made_by:
            rows.append(row)
    return rows


def bench_zoo(*, compilers: str = "minicompile,torch", models: str = "*", works: str = "training,inference", limit: int | None = None,
              dtype: str | None = None, device: str | None = None, jobs: int | None = None, seconds: float = 1.0,
              timeout: float = 300.0, total: float = math.inf, sizes: int = 3, fresh: bool = False, out: str = "bench-results",
              json_only: bool = False) -> dict:
    """Run the zoo; print a line per finished work and a summary; write `results.jsonl`, `result.json` and `report.html` to `out`/zoo.

    models: patterns with `*`, comma-separated; limit: so many models; seconds: of timing each work (0: only correctness); timeout: for a
    model under a compiler; total: of the whole run; sizes: at how many batch sizes each is judged. Raises MinicompileError on
    wrong use before anything is run."""
    names = [c for c in check_compilers(compilers, ()) if c != "eager"]          # eager always runs along
    if not names:
        raise MinicompileError("--compilers names none but eager, which always runs along. Give minicompile, torch or both.")
    device = resolve_device(device)
    dtype = dtype or ("bf16" if device == "cuda" else "fp32")
    if dtype not in ("fp32", "bf16"):
        raise MinicompileError(f"There is no dtype {dtype!r} in the zoo. Choose fp32 or bf16 (autocast).")
    kinds = tuple(w.strip() for w in works.split(","))
    if not set(kinds) <= set(WORKS):
        raise MinicompileError(f"There is no work {works!r}. Choose from {', '.join(WORKS)}.")
    chosen = [m for m in MODELS if any(fnmatch.fnmatch(m, p.strip()) for p in models.split(","))][:limit]
    if not chosen:
        raise MinicompileError(f"No model's name fits {models!r}. Names are library/architecture, e.g. hf/bert or timm/*.")
    folder = pathlib.Path(out) / "zoo"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MinicompileError(f"The folder {str(folder)!r} cannot be made ({error.strerror}). Give another with --out.") from None
    told = environment()
    made_by = {"commit": told["commit"], "machine": told["hardware"]["gpu"] or told["hardware"]["cpu"]}
    results = folder / "results.jsonl"
    rows = [] if fresh else previous(results, made_by)
    done = {key(r) for r in rows}
    earlier = json.loads((folder / "result.json").read_text())["command"] if rows and (folder / "result.json").exists() else None
    if earlier and earlier != told["command"]:
        told["command"] = f"{earlier}; {told['command']}"
    console, writing = Console(stderr=json_only), threading.Lock()

    def write(row):
        row = {k: v for k, v in row.items() if k not in ("works", "lock", "seconds", "quiet")} | {"made_by": made_by}
        with writing:
            rows.append(row)
            with open(results, "a") as file:
                file.write(json.dumps(row) + "\n")
            console.print(line(row), markup=False, highlight=False, soft_wrap=True)

    if fresh:
        results.unlink(missing_ok=True)
    tasks = []
    for compiler in names:
        for name in chosen:
            left = [w for w in kinds if (name, compiler, w, device, dtype) not in done]
            task = Task(name, compiler, left, device, dtype, seconds, sizes)
            if not installed(name):
                for kind in left:
                    write(asdict(task) | {"work": kind, "verdict": "not installed",
                                          "error": f"{LIBRARIES[name.partition('/')[0]]} is missing"})
            elif left:
                tasks.append(task)
    devices = visible_devices(device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    jobs = jobs or (1 if device == "cpu" else max(1, min(8, cores // 2 // len(devices))))
    run_all(tasks, Plan(device, jobs, timeout, time.monotonic() + total, devices), write)
    record = {"benchmark": "zoo", **told, "jobs": jobs, "devices": len(devices), "chosen": len(chosen),
              "summary": summary(rows), "against_torch": {kind: against(rows, kind) for kind in kinds}, "results": rows}
    temporary = folder / "result.tmp"
    temporary.write_text(as_json(record))
    temporary.replace(folder / "result.json")
    if json_only:
        print(json.dumps(record))
        return record
    console.print(totals(rows))
    from .report import write_report
    console.print(f"Report: {write_report(record, folder)}")
    return record
