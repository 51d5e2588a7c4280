"""What the topics of `MINICOMPILE_LOGS` say, made of what the stages tell (`logs.tell`).

A function here writes the texts of one topic about one kind of event. It is called only when somebody listens to the
topic, so no stage has to ask whether a long text is wanted.
"""
from __future__ import annotations

import dis
import re

from . import advice
from .ch01_graphs.graph import print_graph
from .ch02_guards.guards import in_words
from .ch04_breaks.breaks import place_of_break
from .logs import writes
from .versions import name_of_code


@writes("graph_breaks", "captured")
def breaks(state, captured):
    for b in captured.breaks:
        yield "\n".join([f"{name_of_code(state.code)}: {b.reason}", *place_of_break(b), f"  -> {b.hint}"])


@writes("graph_breaks", "skipped")
def skipped(state, reason):
    yield f"{name_of_code(state.code)} runs as it is: {reason}\n  -> {advice.for_break(reason.reason)}"


@writes("recompiles", "recompile")
def recompiled(state, version, why):
    yield f"{name_of_code(state.code)}: version {version} because {why}\n  -> {advice.for_recompile(why)}"


@writes("recompiles", "specialized")
def specialized(state, why):
    yield f"{name_of_code(state.code)}: compiled for fixed sizes because of {why}"


@writes("recompiles", "again")
def compiled_again(state, why):
    yield f"{name_of_code(state.code)}: compiled once more because {why}"


@writes("graph", "graph")
def captured_graph(state, captured):
    yield f"{name_of_code(state.code)}\n{print_graph(captured.gm)}"


@writes("guards", "entry")
def guards(state, captured, compiled):
    words = [f"  {in_words(g)}{f'  # {g.location}' if g.location else ''}" for g in captured.guards]
    yield "\n".join([f"{name_of_code(state.code)}: a call for which one of these does not hold is compiled again", *words,
                     "checked by", compiled.source_text])


@writes("bytecode", "entry")
def bytecode(state, captured, compiled):
    yield f"{name_of_code(state.code)}\n{dis.Bytecode(state.code).dis()}\nis replaced by\n{compiled.source_text}"


@writes("aot", "stage")
def half(name, gm):
    if name in ("forward", "backward"):
        yield f"{name}\n{print_graph(gm)}"


@writes("perf_hints", "fallback")
def fallback(which, reason):
    yield (f"the {which} graph runs operator by operator, because {reason}\n  -> take that operation out of the compiled "
           "function, and the rest becomes kernels")


@writes("loops", "schedule")
def loops(which, program, schedule, compiled):
    from .ch07_loops.verify import print_program
    yield f"{which}\n{print_program(program)}"


@writes("fusion", "schedule")
def fusion(which, program, schedule, compiled):
    for d in schedule.decisions:
        yield f"{'fused' if d.accepted else 'did not fuse'} {d.a} with {d.b} ({d.score} bytes): {d.reason}"


# Matrix products and their like, which libraries do better than generated loops
BEST_AS_LIBRARY_CALLS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot", "convolution", "attention", "copy", "randint",
                         "philox"}


@writes("perf_hints", "schedule")
def library_calls(which, program, schedule, compiled):
    from .ch07_loops.ir import Extern
    for op in sorted({str(step.op) for step in schedule.steps if isinstance(step, Extern)}):
        if BEST_AS_LIBRARY_CALLS.isdisjoint(re.split("[._]", op)):
            yield (f"the {which} graph calls {op}, for which no kernel is generated\n  -> it runs as in eager, and nothing "
                   "fuses with it; simpler operations in its place may")


@writes("code", "schedule")
def code(which, program, schedule, compiled):
    yield "\n".join([which, compiled.source, *(s.code for s in compiled.sources)])
