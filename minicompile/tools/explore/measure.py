"""What can only be known by running: times of kernels against copies of as many bytes, and whether each stage's
graph, when run, gives eager's answers."""
import contextlib
import functools
import os
import re
import time
from collections import deque
from dataclasses import dataclass, field

import torch

from .. import apart
from ..answers import References, Run, answers_of, backward_of, find_differences, references, rungs_for, settings_of, undone
from ..findings import Findings, compile_alone, count, listening

SETTINGS = ("dynamic", "mode", "options", "fullgraph")
# Rung of the ladder -> the panes whose meaning it runs
RUNS = {"eager": ["graph"], "aot_eager": ["joint"], "decomposed": ["primitives", "cut"], "loops": ["loops", "fusion"],
        "cpp": ["cpp", "host"], "triton": ["triton", "host"]}


@dataclass
class Measured:
    """steps: (number of the graph, which of its host programs) -> seconds of each step. compiled, eager: seconds of
    a whole call, forward and, where the result needs it, backward. All are the shortest of many, which other work on the
    machine disturbs least. checks: pane -> words. problem: why there are no times."""
    steps: dict[tuple, list] = field(default_factory=dict)
    compiled: float = 0.0
    eager: float = 0.0
    checks: dict[str, str] = field(default_factory=dict)
    problem: str = ""
    device: str = "cpu"
    copies: dict[int, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Of all steps of a call."""
        return sum(map(sum, self.steps.values()))

    def against_copy(self, moved: int, seconds: float) -> str:
        """How far a kernel is from what memory allows: PyTorch's copy of as many bytes, measured here."""
        size = 1 << max(moved - 1, 1).bit_length()             # the next power of two, to measure few of them
        if size not in self.copies:
            self.copies[size] = copy_seconds(size, self.device)
        limit = self.copies[size] * moved / size
        return f"a copy that moves as many bytes takes {1e6 * limit:,.1f} µs: {seconds / limit:.1f} times that" if limit else ""

    def summary(self) -> dict[str, str]:
        if not self.compiled:
            return {"a call": f"not timed: {self.problem}"} if self.problem else {}
        where = f"{count(torch.get_num_threads(), 'thread')}" if self.device == "cpu" else torch.cuda.get_device_name()
        return {"a call": f"{1e3 * self.compiled:.3g} ms, in eager {1e3 * self.eager:.3g} ms ({where}); "
                          f"kernels and library calls {1e3 * self.total:.3g} ms"}


def copy_seconds(moved: int, device: str) -> float:
    """Seconds of a copy that reads and writes `moved` bytes in all."""
    source = torch.empty(max(moved // 2, 1), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return min(run_timed(lambda: target.copy_(source), device) for _ in range(30 if moved < 1 << 26 else 5))


def run_timed(function, device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(100_000)                                 # so that the launch does not wait for the host
    first.record()
    function()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3


# ---- clocks in a host program -----------------------------------------------------------------------------

class Clocks:
    """Takes the time of each step of a host program: kernels and library calls are globals of its text. total: seconds
    of all steps of all runs; times: those of the last runs, step by step."""

    def __init__(self, host, most: int = 2000):
        self.host, self.run, self.total, self.times, self.spans, self.plain = host, host.run, 0.0, deque(maxlen=most), [], None
        self.cuda = any(getattr(getattr(s, "device", None), "type", "") == "cuda" for s in host.schedule.steps)
        host.run = self

    def __call__(self, args):
        if self.plain is None:                                 # only now kernels that were being built are bound
            self.plain = {n: f for n, f in self.host.namespace.items() if re.fullmatch(r"[kx]\d+", n)}
            self.host.namespace.update({n: functools.partial(self.step, f) for n, f in self.plain.items()})
        self.spans = []
        if self.cuda:
            torch.cuda._sleep(20_000_000)                      # about ten milliseconds: the host gets ahead of the GPU
        result = self.run(args)
        if self.cuda:
            torch.cuda.synchronize()
        self.times.append([a.elapsed_time(b) / 1e3 if self.cuda else b - a for a, b in self.spans])
        self.total += sum(self.times[-1])
        return result

    def step(self, function, *args, **kwargs):
        before = self.now()
        result = function(*args, **kwargs)
        self.spans.append((before, self.now()))
        return result

    def now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def shortest(self) -> list[float] | None:
        """Seconds of each step."""
        whole = [t for t in self.times if len(t) == len(self.host.schedule.steps)]
        return [min(column) for column in zip(*whole)] if whole else None


def clocked(clocks: dict, most: int = 2000):
    """For `listening`: puts clocks into every host program, `clocks[id(program)]`."""
    def also(kind, data):
        if kind == "schedule" and hasattr(data["compiled"], "namespace"):
            clocks[id(data["compiled"])] = Clocks(data["compiled"], most)
    return also


def steps_of(found: Findings, clocks: dict) -> dict[tuple, list]:
    """clocks: id of a host program -> Clocks."""
    steps = {}
    for number, graph in enumerate(found.graphs):
        schedules = [data for kind, data in graph.told if kind == "schedule"]
        for n, data in enumerate(schedules):
            clock = clocks.get(id(data["compiled"]))
            if clock is not None and (times := clock.shortest()) is not None:
                steps[number, n] = times
    return steps


def measure(found: Findings, seconds: float = 2.0) -> Measured:
    """Compile what was explained once more, and time calls of it for that long. Whatever the calls change is restored."""
    from ...api import compile
    function, args, kwargs, settings = found.call
    device = "cuda" if any(isinstance(n.meta.get("val"), torch.Tensor) and n.meta["val"].is_cuda
                           for g in found.graphs for n in g.gm.graph.nodes if n.op == "placeholder") else "cpu"
    measured = Measured(device=device)
    case, again, clocks = Run(lambda: (function, args, kwargs)), Findings(found.name), {}
    with undone(case):
        compiled, context = compile_alone(compile, function, settings_of("triton", settings) if device == "cuda" else settings)
        with listening(again, context, clocked(clocks)):       # without CUDA graphs, which are one launch
            calls(compiled, args, kwargs, seconds / 3, device)
        measured.steps = steps_of(again, clocks)
    with undone(case):
        measured.compiled = calls(compile_alone(compile, function, settings)[0], args, kwargs, seconds / 3, device)
    with undone(case):
        measured.eager = calls(function, args, kwargs, seconds / 3, device)
    return measured


@contextlib.contextmanager
def unheard():
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def calls(function, args, kwargs, seconds: float, device: str) -> float:
    """Seconds of the shortest call with its backward pass. What the calls print is not shown."""
    times, end = [], time.perf_counter() + seconds
    with unheard():
        while len(times) < 3 or time.perf_counter() < end and len(times) < 1000:
            start = time.perf_counter()
            backward_of(function(*args, **kwargs), False)
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    return min(times)


# ---- the ladder -------------------------------------------------------------------------------------------

def check(found: Findings, seconds: float = 20.0) -> dict[str, str]:
    """Run what each stage made and compare with eager: results, gradients, and what the call left in its arguments,
    modules and random streams' numbers. Each rung has so many seconds. In processes of their own where a fork is
    possible; otherwise here, and whatever the runs change is restored."""
    function, args, kwargs, settings = found.call
    if settings.get("backend") not in (None, "default"):
        return {}
    case = Run(lambda: (function, args, kwargs), {k: v for k, v in settings.items() if k in SETTINGS}, calls=1)
    forks = not torch.cuda.is_initialized()
    if forks:
        apart.warm()
        refs = references(case, seconds)
        forks = not isinstance(refs, str) and not refs.needs_this_process
        if isinstance(refs, str):
            return {pane: f"not checked: eager {refs}" for panes in RUNS.values() for pane in panes}
    if not forks:
        with undone(case), unheard():
            plain = answers_of(case, None)
        with undone(case), unheard():
            refs = References(plain, None, answers_of(case, None, "moved"))
    checks = {}
    for rung in rungs_for(refs.plain, settings):
        if rung not in RUNS:
            continue
        attempt = Run(case.load, settings_of(rung, case.settings), calls=1)
        if forks:
            outcome = apart.run(answers_of, attempt, rung, seconds=seconds)
        else:
            try:
                with undone(case), unheard():
                    outcome = apart.Outcome(answers_of(attempt, rung))
            except Exception as error:
                outcome = apart.Outcome(error=f"{type(error).__name__}: {error}")
        words = verdict(outcome, refs)
        checks |= dict.fromkeys(RUNS[rung], words)
    return checks


def verdict(outcome: apart.Outcome, refs: References) -> str:
    if outcome.error:
        return f"not checked: {outcome.error}" if outcome.error.startswith("not finished") else f"fails: {outcome.error}"
    largest, where = largest_difference(outcome.value.values, refs.plain.values)
    if differences := find_differences(outcome, refs):
        return f"differs from eager: {differences[0]}"
    return f"checked: largest difference to eager {largest:.2g}{where}" if largest else "checked: equal to eager"


def largest_difference(got: dict, want: dict) -> tuple[float, str]:
    """(amount, where that is, and how large the numbers are there)."""
    largest, where = 0.0, ""
    for name, seen in want.items():
        other = got.get(name)
        if seen.kind != "tensor" or other is None or other.data is None or seen.data.shape != other.data.shape:
            continue
        a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (seen.data, other.data))
        apart_by = (a.to(torch.float64) - b.to(torch.float64)).abs()
        apart_by = apart_by[apart_by.isfinite()]
        if apart_by.numel() and apart_by.max() > largest:
            what = re.sub(r"^after\['(function|arguments)'\](\['(?:module|object)'\])?\.?", lambda m: m[1] if m[1] == "arguments" else "",
                          name.partition(": ")[2])
            largest, where = apart_by.max().item(), f" ({what}, whose numbers reach {b.abs().max():.2g})"
    return largest, where

