"""`minicompile.bisect(f)(*args)`: which stage changes an answer, on which graph, shown by a few lines.

The backends are a ladder, and each rung runs what the stage before it made. So the first rung whose answer is
not eager's names the stage that is wrong. Every rung runs in a process of its own (`apart.py`) and starts from
the same memory: arguments, parameters, random state. Crashes are answers, too. Where the rung is found, so is
the graph, by compiling one graph of the program there and running the others as they were captured; then that
graph is written as Python and made small (`shrink.py`).
"""
import dataclasses
import functools
import os
from dataclasses import dataclass, field

import torch

from .. import marks
from ..config import resolve_options
from ..errors import MinicompileError
from . import apart, shrink
from .answers import Difference, References, Run, answers_of, find_differences, references, rungs_for, settings_of, undone

# ---- the ladder -------------------------------------------------------------------------------------------

@dataclass
class Bisection:
    """What `bisect` found. rung: the first that differs, or None; before: the rung below it ("uncompiled"
    under the first). graph: number of the graph (from 1) and the place where it begins, or None. code: the
    reduced graph as a function. nodes: how many operations it has. path: a script that shows the difference.
    largest: the largest Difference at that rung; differences: all. notes: what else there is to say."""
    name: str
    rung: str | None = None
    before: str | None = None
    graph: tuple | None = None
    code: str | None = None
    nodes: int | None = None
    path: str | None = None
    largest: Difference | None = None
    differences: list = field(default_factory=list)
    notes: list = field(default_factory=list)
    tried: list = field(default_factory=list)

    def __str__(self):
        return bisection_text(self)

    __repr__ = __str__


def bisection_text(b: Bisection) -> str:
    lines = [f"{b.name}: no difference" + (f" ({', '.join(b.tried)})" if b.tried else "")]
    if b.largest is not None:
        lines = [f"{b.name}: {b.rung or 'uncompiled'} differs from eager" if b.rung else f"{b.name}: not compared", f"  {b.largest}"]
        if b.largest.kind == "value" and b.largest.amount != float("inf"):
            lines.append(f"  by {b.largest.amount:.3g}; eager's own error is {b.largest.own:.3g}")
        lines += [f"  also {d}" for d in b.differences[1:4]]
        if len(b.differences) > 4:
            lines.append(f"  and {len(b.differences) - 4} more")
    if b.rung and b.before:
        lines.append(f"  {b.before} does not")
    if b.graph:
        lines.append(f"Graph {b.graph[0]}" + (f", from {b.graph[1]}" if b.graph[1] else ""))
    if b.code:
        lines += [f"reduced to {b.nodes} operation{'s' * (b.nodes != 1)}:", "", *("    " + line for line in b.code.splitlines()), ""]
    if b.path:
        lines.append(f"Shown by {b.path}")
    return "\n".join(lines + b.notes)


def bisect(function, *, then=(), calls: int | None = None, seconds: float = 120.0, out: str = "bisect-results",
           **settings):
    """bisect(f)(*args, **kwargs): find the first rung of the ladder of backends whose answer differs from
    eager's, reduce the graph on which it does, and write a script that shows it. Returns a `Bisection`.

    Compared are results, arguments and modules afterwards, gradients and exceptions; a crash is a difference,
    too. Numbers may be no further from a float64 evaluation than four times eager's own error (measured also
    on inputs moved by one rounding) plus a floor by dtype.

    then: positional arguments of further calls, `then=[(torch.randn(7),)]`. calls: how often the first
    arguments are used (default 2, with CUDA graphs 4). seconds: the limit for one rung, and for reducing.
    out: folder of the script. settings: of `compile` (dynamic, mode, options, fullgraph). Without `dynamic`,
    a program without a difference is tried once more with dynamic=True."""
    if unknown := set(settings) - {"dynamic", "mode", "options", "fullgraph"}:
        raise MinicompileError(f"bisect takes the settings dynamic, mode, options and fullgraph of compile, not {min(unknown)!r}.")
    resolve_options(settings.get("mode"), settings.get("options"))

    def run(*args, **kwargs):
        plain = marks.uncompiled(function)
        name = getattr(plain, "__qualname__", None) or type(plain).__name__
        found = Bisection(name)
        case = Run(lambda: (function, args, kwargs), settings, calls or 2, tuple(then))
        return climb(found, case, calls, seconds, out)
    return run


def search_recorded(found: Bisection, case: Run, calls: int | None, seconds: float, out: str) -> Bisection:
    """In a process that has used a GPU, which cannot be forked: the graphs are captured here, and the rungs
    above run them apart, with the inputs that they had."""
    with undone(case):
        refs = References(answers_of(case, None), None, None)
    rungs = rungs_for(refs.plain, case.settings)
    with undone(case):
        answers, programs = shrink.record_graphs(case)
    found.tried.append("eager")
    if differences := find_differences(apart.Outcome(answers), refs):
        found.rung, found.before, found.largest, found.differences = "eager", "uncompiled", differences[0], differences
        return found
    written = {n: p for n, p in programs.items() if isinstance(p, list) and p}
    found.notes += [f"Graph {n + 1} was not compared: {p or 'it was not called'}." for n, p in programs.items() if n not in written]
    known: dict = {}
    repeat = calls or (4 if {"cudagraphs", "default"} & set(rungs) else 2)
    for number, recorded in list(written.items()):
        for i, program in enumerate(recorded):
            known[number, i] = apart.run(shrink.references_of, dataclasses.replace(program, calls=repeat), seconds=seconds)
            if known[number, i].error:
                found.notes.append(f"Graph {number + 1} was not compared: {known[number, i].error.splitlines()[0]}")
                written.pop(number, None)
                break
    for below, rung in zip(rungs, rungs[1:] if written or not programs else []):
        found.tried.append(rung)
        for number, recorded in written.items():
            for i, program in enumerate(recorded):
                program = dataclasses.replace(program, calls=repeat, settings=settings_of(rung, program.settings))
                outcome = apart.run(answers_of, program.run(), rung, seconds=seconds)
                if differences := find_differences(outcome, known[number, i].value):
                    found.rung, found.before, found.largest, found.differences = rung, below, differences[0], differences
                    found.graph = number + 1, answers.graphs[number]
                    shrink.reduce(found, [program], rung, seconds, out)
                    return found
    return found


def bisect_file(what: str, arguments: list[str], *, seconds: float, out: str, **settings) -> Bisection:
    """The same for FILE:FUNCTION and expressions for its arguments (`target.py`). The file is imported in the
    processes apart only, so that each of them may use a GPU."""
    from .target import load
    os.environ.update(apart.ASK_NVML)
    settings = {k: v for k, v in settings.items() if v is not None}
    found = climb(Bisection(what.rpartition(":")[2]), Run(functools.partial(load, what, arguments), settings), None,
                   seconds, out)
    if not found.rung and found.largest and found.largest.text.startswith("MinicompileError: "):
        raise MinicompileError(found.largest.text.removeprefix("MinicompileError: "))
    return found


def climb(found: Bisection, case: Run, calls: int | None, seconds: float, out: str) -> Bisection:
    apart.warm()
    if torch.cuda.is_initialized():
        return search_recorded(found, case, calls, seconds, out)
    refs = references(case, seconds)
    if not isinstance(refs, str) and refs.needs_this_process:
        return search_recorded(found, case, calls, seconds, out)
    if isinstance(refs, str):
        found.largest = Difference("uncompiled", "crash", refs)
        found.notes.append("The program ends like this without minicompile.")
        return found
    rungs = rungs_for(refs.plain, case.settings)
    if calls is None and {"cudagraphs", "default"} & set(rungs):
        case.calls = 4                 # plain, recorded, replayed, and replayed over what was kept
        refs = references(case, seconds)
    variants = [case.settings] + [case.settings | {"dynamic": True}] * (case.settings.get("dynamic") is None)
    internal = None
    for settings in variants:
        for below, rung in zip(["uncompiled", *rungs], rungs):
            attempt = dataclasses.replace(case, settings=settings_of(rung, settings))
            outcome = apart.run(answers_of, attempt, rung, seconds=seconds)
            found.tried.append(rung + " with dynamic shapes" * (settings.get("dynamic") is True))
            if outcome.error and outcome.error.startswith("not finished"):
                found.notes.append(f"{rung}: {outcome.error}; not compared.")
                continue
            if outcome.value is not None and outcome.value.internal and internal is None:
                internal = below, rung, attempt
            if differences := find_differences(outcome, refs):
                return find_cause(found, attempt, refs, below, rung, differences, seconds, out)
    if internal is not None:           # right answers, by running eagerly
        below, rung, attempt = internal
        attempt.strict = True
        if differences := find_differences(apart.run(answers_of, attempt, rung, seconds=seconds), refs):
            found.notes.append("Outside of bisect the program runs eagerly there, with a warning.")
            return find_cause(found, attempt, refs, below, rung, differences, seconds, out)
    return found


def find_cause(found: Bisection, case: Run, refs, below, rung, differences, seconds, out) -> Bisection:
    """The rung is known: find the graph, and reduce it."""
    found.rung, found.before, found.largest, found.differences = rung, below, differences[0], differences
    again = apart.run(answers_of, dataclasses.replace(case), None, seconds=seconds)
    if any(d.kind != "crash" for d in find_differences(again, refs)):
        found.notes.append("Eager differs from itself when it is run again: the program is not deterministic.")
        return found
    if rung == "eager":
        found.notes.append("The captured graph, its guards or its side effects are wrong; explain(f)(*args) shows them.")
        return found
    graph = find_graph(case, rung, refs, seconds)
    if graph is None:
        found.notes.append("No graph by itself makes the difference.")
        return found
    number, place = graph
    found.graph = number + 1, place
    recorded = apart.run(shrink.record_graphs, case, number, seconds=seconds)
    programs = recorded.value[1].get(number) if recorded.value else recorded.error
    if isinstance(programs, list) and programs:
        shrink.reduce(found, programs, rung, seconds, out)
    else:
        found.notes.append(f"The graph was not reduced: {programs or 'it was not called'}.")
    return found


def find_graph(case: Run, rung: str, refs, seconds) -> tuple[int, str] | None:
    """(number, place) of the graph that differs on this rung while all others run as captured."""
    def differs(only):
        outcome = apart.run(answers_of, dataclasses.replace(case, only=frozenset(only)), rung, seconds=seconds)
        return bool(find_differences(outcome, refs)), outcome
    wrong, outcome = differs([])
    graphs = outcome.value.graphs if outcome.value else []
    low, high = 0, len(graphs)         # the first `low` graphs make no difference, the first `high` do
    if wrong or not graphs or not differs(range(high))[0]:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if differs(range(middle))[0] else (middle, high)
    return (low, graphs[low]) if differs([low])[0] else None
