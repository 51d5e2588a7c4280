"""One model under one compiler, in a process of its own: `serve`.

It tells its parent when a stage begins, and each result: {"event": "stage" | "result", ...}.
"""
from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import importlib
import os
import resource
import sys
import time
import traceback
import warnings
from dataclasses import asdict, dataclass

import torch

from ..worker import compiled, synchronize
from .check import Bench, Yardstick
from .huggingface import REAL, TINY
from .models import build

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Task:
    """A row of the run."""

    model: str
    compiler: str                    # "minicompile[:MODE]" or "torch[:MODE]"
    works: list[str]                 # of "training" and "inference"
    device: str                      # "cpu" or "cuda"
    dtype: str                       # "fp32" or "bf16" (autocast)
    seconds: float                   # of timing a work; 0 for none
    sizes: int                       # at how many batch sizes it is judged, up to 3
    lock: str = ""                   # two files next to this path order the use of the device
    quiet: tuple[int, ...] = ()      # cores that only a process that is timed runs on


@contextlib.contextmanager
def on_cores(cores):
    """All threads of this process on the given cores; none: where they are."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)

    def move(where):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), where)
    move(cores)
    try:
        yield
    finally:
        move(before)


@contextlib.contextmanager
def device_lock(path: str, alone: bool):
    """Share a device with other processes, or have it alone. Whoever waits to be alone keeps newcomers out."""
    with open(path + ".gate", "w") as gate, open(path + ".room", "w") as room:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        if not alone:
            fcntl.flock(gate, fcntl.LOCK_UN)
        yield


def batch_sizes(task: Task) -> list[int]:
    """Of the calls, in order. The first is the one that is timed."""
    first, *others = (2, 3, 4) if task.device == "cpu" else (16, 12, 10)
    others = others[:task.sizes - 1]
    return [first, first, *others, first] if others else [first, first]


def measure(bench: Bench, call, inputs, seconds: float) -> dict:
    """Milliseconds of a step, eager and compiled in turns, and their ratio with an interval of 95% confidence."""
    def run(f, times):
        synchronize(bench.device)
        start = time.perf_counter()
        for _ in range(times):
            bench.step(f, inputs)
        synchronize(bench.device)
        return 1e3 * (time.perf_counter() - start) / times

    def peak(f):
        if bench.device != "cuda":
            run(f, 1)
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        bench.model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        others = torch.cuda.memory_allocated() - held              # references to compare with
        run(f, 2)
        return (torch.cuda.max_memory_allocated() - others) / 2**20

    held = sum(t.nbytes for t in (*bench.model.parameters(), *bench.model.buffers()))
    eager_peak, own_peak = peak(bench.model), peak(call)
    rounds = 11
    estimate = run(bench.model, 2) + run(call, 2)
    times = max(1, round(1e3 * seconds / rounds / estimate))
    gc.collect()
    gc.disable()
    try:
        pairs = [(run(bench.model, times), run(call, times)) for _ in range(rounds)]
    finally:
        gc.enable()
    ratios = sorted(eager / own for eager, own in pairs)
    # The second and the tenth of eleven values enclose the median with a probability of 0.99.
    return {"speed": ratios[5], "speed_low": ratios[1], "speed_high": ratios[9], "eager_ms": sorted(p[0] for p in pairs)[5],
            "ms": sorted(p[1] for p in pairs)[5], "eager_memory_mb": eager_peak, "memory_mb": own_peak}


class Counts:
    """Graphs, breaks and kernels since this was made."""

    def __init__(self, compiler: str):
        self.ours, self.breaks = compiler.startswith("minicompile"), set()
        if self.ours:
            from ... import logs
            logs.watchers.append(self.see)
        self.start = self.now()

    def see(self, kind, captured=None, **data):
        if kind == "captured":
            self.breaks.update(f"{b.reason} ({os.path.basename(b.location.filename)}:{b.location.lineno})" for b in captured.breaks)

    def now(self):
        from ..worker import counts
        found = counts("minicompile" if self.ours else "torch")
        return [found["graphs"], found["kernels"]]

    def result(self) -> dict:
        graphs, kernels = (b - a for a, b in zip(self.start, self.now()))
        if not self.ours:
            self.breaks = importlib.import_module("torch._dynamo.utils").counters["graph_break"]
        return {"graphs": graphs, "kernels": kernels, "breaks": sorted(map(str, self.breaks))[:20]}


def work(task: Task, training: bool, stage) -> dict:
    """Compile, judge and time one kind of work. Answers the row without its names."""
    stage("build")
    model, made = build(task.model, REAL if task.device == "cuda" else TINY)
    bench = Bench(model, task.device, DTYPES[task.dtype], training)
    sizes = batch_sizes(task)
    yards = {}

    def yard(n):
        if n not in yards:
            yards[n] = Yardstick(bench, made(n), lambda: device_lock(task.lock, alone=False))
        return yards[n]

    stage("eager")
    first = bench.inputs(made(sizes[0]))
    yard(sizes[0])
    stage("compile")
    call, counts = compiled(bench.model, task.compiler), Counts(task.compiler)
    start = time.perf_counter()
    found = [bench.answers(call, first)]
    synchronize(task.device)
    bench.answers(call, first)
    synchronize(task.device)
    row = {"cold_seconds": time.perf_counter() - start} | counts.result()
    if task.seconds:
        stage("time")
        with device_lock(task.lock, alone=True), on_cores(task.quiet):
            stage("timed")
            row |= measure(bench, call, first, task.seconds)
        bench.restore()
    worst, ratio = (0.0, ""), 0.0
    for n in sizes:
        stage(f"call at batch size {n}")
        found.append(bench.answers(call, bench.inputs(made(n))))
        stage(f"check at batch size {n}")
        for answers in found:
            times, what = yard(n).judge(answers)
            if 1 < times < float("inf") and not yard(n).persists(call):
                continue
            worst, ratio = max(worst, (times, f"batch size {n}, {what}")), max(ratio, yard(n).ratio)
        found.clear()
    return {"verdict": "pass" if worst[0] <= 1 else "wrong", "distance": min(worst[0], 1e9), "worst": worst[1],
            "ratio": min(ratio, 1e9), "sizes": task.sizes,
            "reference": yards[sizes[0]].dtype, **row}


def run(task: Task, say) -> None:
    """All kinds of work of a task; say(event=..., ...) tells the parent."""
    warnings.simplefilter("ignore")
    if task.compiler.startswith("minicompile"):
        import minicompile
        # What runs eagerly after an internal error must not count as compiled.
        minicompile.config.raise_on_internal_error = True
    for kind in list(task.works):
        began = []

        def stage(name):
            began.append((name, time.monotonic()))
            say(event="stage", work=kind, stage=name)
        try:
            row = work(task, kind == "training", stage)
        except Exception as error:
            last = began[-1][0]
            row = {"verdict": "eager fails" if last in ("build", "eager") else "error", "stage": last,
                   "error": f"{type(error).__name__}: {str(error)[:1000]}", "log": traceback.format_exc()[-3000:]}
        ends = [start for _, start in began[1:]] + [time.monotonic()]
        row["stages"] = [(name, round(end - start, 2)) for (name, start), end in zip(began, ends)]
        say(event="result", **(asdict(task) | {"work": kind} | row))
        if task.compiler.startswith("minicompile"):
            minicompile.reset()
        else:
            torch.compiler.reset()
        gc.collect()


def serve(task: Task, connection, env: dict, cores: set[int], threads: int, log: str) -> None:
    """What the process runs: a session of its own, so that all it starts ends with it; its output goes to the file `log`."""
    os.setsid()
    os.environ.update(env)
    if cores:
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable(2)
    run(task, lambda **event: connection.send(event))
    connection.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)                      # nothing of a passed model can fail on the way out
