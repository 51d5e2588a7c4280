"""What the stages tell (`logs.tell`) about one call, collected: graphs, breaks, guards, kernels, and words for them."""
import contextlib
import contextvars
import os
import threading
from collections import Counter
from dataclasses import dataclass, field

from .. import advice, logs, stances
from ..logs import count

# ---- the data --------------------------------------------------------------------------------------------

@dataclass
class Operation:
    """One node of a captured graph. result: its type, such as `f32[8, 64]`. where: `file.py:12`; source: that
    line."""
    call: str
    result: str
    where: str
    source: str


@dataclass
class Kernels:
    """What became of one ATen graph. which: "forward" or "backward". loops: before fusion. bytes_saved: of
    memory traffic, by fusing. refused: pairs that share data and were not fused, with the reason. fallback:
    why it runs operator by operator, or None."""
    which: str
    kernels: list[str] = field(default_factory=list)
    library_calls: list[str] = field(default_factory=list)
    loops: int = 0
    fused: int = 0
    bytes_saved: int = 0
    refused: list[str] = field(default_factory=list)
    fallback: str | None = None


@dataclass
class CapturedGraph:
    """A captured graph of the frame `frame`. gm: the fx GraphModule. captured: what capture returned. told: what the
    stages below it told, (kind, data). as_captured: why it runs as it is, and not what was compiled of it, or None."""
    frame: str
    gm: object
    operations: list[Operation] = field(default_factory=list)
    operators: Counter = field(default_factory=Counter)
    halves: list[Kernels] = field(default_factory=list)
    captured: object = field(default=None, repr=False)
    told: list[tuple] = field(default_factory=list, repr=False)
    as_captured: str | None = None


@dataclass
class Break:
    """A graph break. chain: lines of the calls that lead to it, outermost first. advice: what to do about
    it."""
    frame: str
    reason: str
    where: str
    source: str
    caret: str
    chain: list[str]
    advice: str

    def __str__(self):
        return f"{self.reason} ({self.where})"


@dataclass
class Skipped:
    """A frame that runs as it is."""
    frame: str
    reason: str
    advice: str


@dataclass
class Fact:
    """A guard in words. where: the line that needed it."""
    frame: str
    text: str
    where: str
    guard: object

    def __str__(self):
        return self.text


@dataclass
class Recompile:
    frame: str
    version: int
    why: str
    advice: str


@dataclass
class Findings:
    """What the stages told about one call. seconds: per stage; "call": all of the call. frames: (code, what capture
    returned) of each frame. call: what was called (function, args, kwargs, settings of `compile`)."""
    name: str
    graphs: list[CapturedGraph] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)
    guards: list[Fact] = field(default_factory=list)
    recompiles: list[Recompile] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    frames: list[tuple] = field(default_factory=list, repr=False)
    call: tuple | None = field(default=None, repr=False)

    @property
    def graph_count(self) -> int:
        return len(self.graphs)

    @property
    def graph_break_count(self) -> int:
        return len(self.breaks)

    @property
    def op_count(self) -> int:
        return sum(len(g.operations) for g in self.graphs)

    @property
    def operators(self) -> Counter:
        return sum((g.operators for g in self.graphs), Counter())

    @property
    def halves(self) -> list[Kernels]:
        """Of the graphs that do not run as they were captured."""
        return [half for g in self.graphs if g.as_captured is None for half in g.halves]

    @property
    def kernel_count(self) -> int:
        return sum(len(half.kernels) for half in self.halves)

    @property
    def bytes_saved(self) -> int:
        return sum(half.bytes_saved for half in self.halves)


# ---- listening -------------------------------------------------------------------------------------------

ANY = object()                         # in the place of a context
_graph = contextvars.ContextVar("graph being explained", default=None)


def compile_alone(compile, target, settings):
    """(compiled function, its context): a context of its own, so that nothing compiled before is used."""
    with stances.fresh_contexts() as made:
        compiled = compile(target, **settings)
    return compiled, made[-1] if made else None


@contextlib.contextmanager
def listening(found: Findings, context, also=lambda kind, data: None):
    """While the block runs, `found` fills with what the stages tell about a context (ANY: about all), and also(kind, data) is called.
    Yields the list of frame states that were seen."""
    states, thread, outer = [], threading.get_ident(), _graph.get()

    def watch(kind, **data):
        if context is ANY or threading.get_ident() == thread or _graph.get() is not None:
            listen(found, context, states, kind, data)
            also(kind, data)

    logs.watchers.append(watch)
    try:
        yield states
    finally:
        logs.watchers.remove(watch)
        _graph.set(outer)


def listen(found: Findings, context, states: list, kind: str, data: dict) -> None:
    state = data.get("state")
    if state is not None and context is not ANY and (state.context.unseen or state.context) is not context:
        return
    if state is not None and state not in states:
        states.append(state)
    if kind in LISTENERS:
        LISTENERS[kind](found, state and state.code, **{k: v for k, v in data.items() if k != "state"})
    if state is None and _graph.get() is not None:
        _graph.get().told.append((kind, data))


def frame_name(code) -> str:
    from ..ch04_breaks.resume import is_resume, original_name
    return f"{'the rest of ' if is_resume(code) else ''}{original_name(code)} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


def fact(code, guard) -> Fact:
    from ..ch02_guards.guards import in_words
    return Fact(frame_name(code), in_words(guard), short_place(guard.location), guard)


def heard_captured(found, code, captured):
    frame = frame_name(code)
    found.frames.append((code, captured))
    found.guards += [fact(code, guard) for guard in captured.guards]
    found.breaks += [explain_break(frame, reason) for reason in captured.breaks]


def heard_graph(found, code, captured):
    from ..ch01_graphs import graph as printing
    graph = CapturedGraph(frame_name(code), captured.gm, captured=captured)
    for node in captured.gm.graph.nodes:
        if node.op in ("call_function", "call_method"):
            place = node.meta.get("location")
            graph.operations.append(Operation(f"{node.name} = {printing._call_text(node)}",
                                              printing.type_text(node.meta.get("val")), short_place(place),
                                              place.source if place else ""))
            graph.operators[operator_name(node)] += 1
    found.graphs.append(graph)
    _graph.set(graph)                  # its backward may be compiled later, in a copy of this context


def heard_schedule(found, code, which, program, schedule, compiled):
    from ..ch07_loops.ir import Extern, Loop
    half = Kernels(which)
    for step in schedule.steps:
        if isinstance(step, Extern):
            half.library_calls.append(str(step.op))
        else:
            half.kernels.append(step.name + (f" ({', '.join(step.origins[:6])})" if step.origins else ""))
    half.loops = sum(isinstance(node, Loop) for node in program.nodes)
    for decision in schedule.decisions:
        if decision.accepted:
            half.fused += 1
            half.bytes_saved += int(decision.score)
        elif decision.score > 0:
            half.refused.append(f"{decision.a} with {decision.b}: {decision.reason}")
    add_half(half)


def heard_fallback(found, code, which, reason):
    add_half(Kernels(which, fallback=str(reason)))


def heard_as_captured(found, code, why):
    if _graph.get() is not None:
        _graph.get().as_captured = why


def add_half(half: Kernels) -> None:
    if _graph.get() is not None:
        _graph.get().halves.append(half)


LISTENERS = {
    "captured": heard_captured, "graph": heard_graph, "schedule": heard_schedule, "fallback": heard_fallback,
    "as_captured": heard_as_captured,
    "recompile": lambda found, code, version, why: found.recompiles.append(
        Recompile(frame_name(code), version, why, advice.for_recompile(why))),
    "skipped": lambda found, code, reason: found.skipped.append(
        Skipped(frame_name(code), str(reason), advice.for_break(reason)))}


# ---- words -----------------------------------------------------------------------------------------------

def short_place(location) -> str:
    return "" if location is None else f"{os.path.basename(location.filename)}:{location.lineno}"


def all_places(location) -> str:
    return "" if location is None else ", ".join(map(short_place, location.lines))


def operator_name(node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def explain_break(frame: str, reason) -> Break:
    from ..ch04_breaks.breaks import source_with_caret
    place = reason.location
    source, caret = (*(source_with_caret(place, reason.position) if place else ()), "", "")[:2]
    where = str(place or "unknown line")
    return Break(frame, reason.reason, where, source, caret, reason.chain[:-1], reason.hint)


def summary(e: Findings) -> str:
    parts = [count(e.graph_count, "graph"), count(e.graph_break_count, "graph break"),
             count(e.op_count, "operation"), count(len(e.guards), "guard")]
    if e.halves:
        parts.append(count(e.kernel_count, "kernel"))
    return ", ".join(parts)


def half_in_words(half: Kernels) -> str:
    if half.fallback is not None:
        return f"{half.which}: operator by operator, because {half.fallback}"
    text = f"{half.which}: {count(half.loops, 'loop')} in {count(len(half.kernels), 'kernel')}"
    if half.library_calls:
        text += f" and {count(len(half.library_calls), 'library call')}"
    saved = size_in_words(half.bytes_saved)
    return text + (f"; fusion saves {saved} of memory traffic" if half.bytes_saved else "")


def size_in_words(number: float) -> str:
    for unit in ("bytes", "KB", "MB"):
        if number < 1000:
            break
        number /= 1000
    else:
        unit = "GB"
    return f"{number:.3g} {unit}"
