# %% [markdown]
# # What the topics say
#
# A stage tells what it does as data (`logs.tell`). This table makes the texts of `MINICOMPILE_LOGS` from them. Each row is a topic, a
# kind of event, and a function that takes the data of the event and gives the texts. Two topics can speak of one event: when an entry is
# made, `guards` prints what it asks and `bytecode` what it replaces. A function is called only when somebody listens to its topic, so no
# stage has to ask whether a long text is wanted.
#
# Nothing imports this module but the one on top, `frames.py`: the stages do not know who listens.

# %%
import dis
import re

from . import advice
from .ch01_graphs.graph import print_graph
from .ch02_guards.guards import in_words
from .ch04_breaks.breaks import place_of_break
from .logs import writes
from .versions import name_of_code


def of(state) -> str:
    return name_of_code(state.code)


for _topic, _kind, _texts in (
        ("graph_breaks", "captured", lambda state, captured: (
            "\n".join([f"{of(state)}: {b.reason}", *place_of_break(b), f"  -> {b.hint}"]) for b in captured.breaks)),
        ("graph_breaks", "skipped", lambda state, reason: [
            f"{of(state)} runs as it is: {reason}\n  -> {advice.for_break(reason.reason)}"]),
        ("recompiles", "recompile", lambda state, version, why: [
            f"{of(state)}: version {version} because {why}\n  -> {advice.for_recompile(why)}"]),
        ("recompiles", "specialized", lambda state, why: [f"{of(state)}: compiled for fixed sizes because of {why}"]),
        ("recompiles", "again", lambda state, why: [f"{of(state)}: compiled once more because {why}"]),
        ("graph", "graph", lambda state, captured: [f"{of(state)}\n{print_graph(captured.gm)}"]),
        ("guards", "entry", lambda state, captured, compiled: ["\n".join([
            f"{of(state)}: a call for which one of these does not hold is compiled again",
            *(f"  {in_words(g)}{f'  # {g.location}' if g.location else ''}" for g in captured.guards),
            "checked by", compiled.source_text])]),
        ("bytecode", "entry", lambda state, captured, compiled: [
            f"{of(state)}\n{dis.Bytecode(state.code).dis()}\nis replaced by\n{compiled.source_text}"]),
        ("aot", "stage", lambda name, gm: [f"{name}\n{print_graph(gm)}"] if name in ("forward", "backward") else []),
        ("perf_hints", "fallback", lambda which, reason: [
            f"the {which} graph runs operator by operator, because {reason}\n  -> take that operation out of the compiled "
            "function, and the rest becomes kernels"]),
        ("code", "as_captured", lambda why: [f"the captured graph runs as it is: {why}"]),
        ("fusion", "schedule", lambda which, program, schedule, compiled: (
            f"{'fused' if d.accepted else 'did not fuse'} {d.a} with {d.b} ({d.score} bytes): {d.reason}" for d in schedule.decisions)),
        ("code", "schedule", lambda which, program, schedule, compiled: [
            "\n".join([which, compiled.source, *(s.code for s in compiled.sources)])])):
    writes(_topic, _kind)(_texts)


# %% [markdown]
# Two rows are longer, or import what is not there before chapter 7 is needed. `perf_hints` names operators for which no
# kernel is generated, unless a library does them better anyway.

# %%
@writes("loops", "schedule")
def loops(which, program, schedule, compiled):
    from .ch07_loops.verify import print_program
    yield f"{which}\n{print_program(program)}"


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
