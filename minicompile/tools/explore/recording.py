"""One call of a compiled function as *items*: the lines of every stage, each with the items it was made from.

Everything is collected from what the stages tell (`logs.tell`, by way of `explain`) and from the provenance that
nodes carry: the `location` and `origins` of graphs, loops and library calls, the `lines` of kernel texts.
"""
import dis
import linecache
import os
import re
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from types import CodeType

from ...ch01_graphs import graph as printing
from ...ch04_breaks.resume import original_name
from ..findings import all_places, count, fact, frame_name, half_in_words, short_place, size_in_words, summary

# In the order of the pipeline: title, and what the pane shows.
PANES = {
    "source": ("Source", "the lines of the program that were compiled"),
    "bytecode": ("Bytecode", "the instructions that capture interpreted"),
    "guards": ("Guards", "what has to hold at the next call, and the line that needed it"),
    "graph": ("Captured graph", "the calls that were recorded, and where the graph broke"),
    "joint": ("Joint graph", "forward and backward in one graph of functional operators"),
    "primitives": ("Primitives", "the same after decomposition, cut in two"),
    "cut": ("The cut", "what forward saves for backward, and what the alternatives would cost"),
    "loops": ("Loops", "the loop IR: which elements are read to make which"),
    "fusion": ("Fusion", "the loops of each kernel, and the fusions that were refused"),
    "cpp": ("C++", "what the C++ generator writes for each kernel"),
    "triton": ("Triton", "what the Triton generator writes for each kernel"),
    "host": ("Host program", "who allocates, launches and frees"),
    "timeline": ("Timeline", "where the time goes: compiling, and a call"),
}
SECONDS_FOR_ALTERNATIVES = 5.0


@dataclass
class Item:
    """A line, or a few that belong together. made_from: ids of items. facts: what is known about it, by name. kind:
    how it is shown (head, input, saved, recomputed, backward, refused, break). quiet: says nothing about what it is
    made from, as a closing brace does. width: of its bar, a part of 1."""
    id: str
    pane: str
    text: str
    made_from: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    kind: str = ""
    quiet: bool = False
    width: float | None = None


@dataclass
class Exploration:
    """notes: pane -> what its heading says besides. summary: name -> text."""
    title: str
    summary: dict[str, str] = field(default_factory=dict)
    items: list[Item] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    numbers: Counter = field(default_factory=Counter, repr=False)

    def pane(self, name: str) -> list[Item]:
        return [i for i in self.items if i.pane == name]

    def add(self, pane: str, text: str, made_from=(), kind: str = "", quiet: bool = False, width=None, **facts) -> str:
        self.numbers[pane] += 1
        facts = {name.replace("_", " "): str(value) for name, value in facts.items() if value not in (None, "")}
        item = Item(f"{pane}-{self.numbers[pane]}", pane, text.rstrip(), list(dict.fromkeys(made_from)), facts, kind, quiet, width)
        self.items.append(item)
        return item.id

    def as_dict(self) -> dict:
        return {"title": self.title, "summary": self.summary, "notes": self.notes, "items": [asdict(i) for i in self.items]}


def from_dict(data: dict) -> Exploration:
    return Exploration(data["title"], data["summary"], [Item(**i) for i in data["items"]], data["notes"])


def collect(found, measured=None) -> Exploration:
    """found: `Findings`. measured: a `measure.Measured`, or None."""
    r = Exploration(found.name)
    program, breaks = Lines(r, found), list(found.breaks)
    for number, graph in enumerate(found.graphs):
        record_graph(program, number, graph, measured)
        record_breaks(program, [b for b in breaks if b.frame == graph.frame])
        breaks = [b for b in breaks if b.frame != graph.frame]
    record_guards(program)
    record_breaks(program, breaks)
    record_skipped(program)
    record_times(r, found, measured)
    r.summary = {"what": summary(found), **r.summary}
    order = list(PANES)
    r.items.sort(key=lambda i: order.index(i.pane))
    return r


# ---- source and bytecode ----------------------------------------------------------------------------------

class Lines:
    """The lines and instructions of everything that was captured, as items."""

    def __init__(self, r: Exploration, found):
        self.r, self.found = r, found
        self.lines: dict[tuple, str] = {}               # (file, line) -> id
        self.instructions: dict[tuple, str] = {}        # (code, offset) -> id
        self.known: dict[tuple, CodeType | None] = {}   # (file, line, offset) -> code
        self.inputs: dict[tuple, str] = {}              # (code, text of a source) -> id of the graph's input
        self.codes: list[CodeType] = list(dict.fromkeys(code for code, _ in found.frames))
        for place in self.places():
            if self.code_of(place) is None:
                self.codes += [c for c in codes_in(place.filename) if c.co_name == place.function and holds(c, place)][:1]
        self.add_source()
        for code in self.codes:
            self.add_bytecode(code)

    def places(self):
        for _, captured in self.found.frames:
            for g in captured.guards:
                yield from g.location.lines if g.location else ()
        for graph in self.found.graphs:
            for node in graph.gm.graph.nodes:
                yield from node.meta["location"].lines if node.meta.get("location") else ()

    def code_of(self, place) -> CodeType | None:
        """The code object in which an instruction of that line stands at that offset."""
        key = place.filename, place.lineno, place.offset
        if self.known.get(key) is None:
            self.known[key] = next((c for c in self.codes if c.co_filename == place.filename and holds(c, place)), None)
        return self.known[key]

    def add_source(self) -> None:
        shown: dict[str, dict[int, str]] = {}
        for code in self.codes:
            last = max([line for _, _, line in code.co_lines() if line] or [code.co_firstlineno])
            name = original_name(code)
            lines = shown.setdefault(code.co_filename, {})
            for n in range(code.co_firstlineno, last + 1):
                lines.setdefault(n, name if n == code.co_firstlineno else "")
        for place in self.places():
            shown.setdefault(place.filename, {}).setdefault(place.lineno, "")
        for file, lines in shown.items():
            text = linecache.getlines(file)
            self.r.add("source", os.path.basename(file), kind="head", file=os.path.basename(file))
            before = None
            for n in sorted(lines):
                if before is not None and n > before + 1:
                    self.r.add("source", "", kind="gap", quiet=True)
                code = text[n - 1].rstrip("\n") if n <= len(text) else "(the text of this line is not known)"
                self.lines[file, n] = self.r.add("source", f"{n:4}  {code}", line=f"{os.path.basename(file)}:{n}")
                before = n

    def add_bytecode(self, code: CodeType) -> None:
        lines, current = {}, code.co_firstlineno
        for start, end, line in code.co_lines():
            lines.update(dict.fromkeys(range(start, end, 2), line))
        targets = set(dis.findlabels(code.co_code))
        self.r.add("bytecode", frame_name(code), kind="head")
        for i in dis.get_instructions(code):
            current = lines.get(i.offset) or current
            at = self.lines.get((code.co_filename, current))
            text = f"{'>>' if i.offset in targets else '  '} {i.offset:4} {i.opname:24} {i.argrepr}"
            self.instructions[code, i.offset] = self.r.add("bytecode", text, [at] if at else [])

    def at(self, location) -> list[str]:
        """The instructions that a location names, or its lines where there are none."""
        found = []
        for place in location.lines if location is not None else ():
            code = self.code_of(place)
            item = self.instructions.get((code, place.offset)) if code else None
            found.append(item or self.lines.get((place.filename, place.lineno)))
        return [i for i in found if i]

    def lines_at(self, location) -> list[str]:
        places = location.lines if location is not None else ()
        return [self.lines[p.filename, p.lineno] for p in places if (p.filename, p.lineno) in self.lines]


def codes_in(filename: str) -> list[CodeType]:
    """All code objects of a file, compiled again: those of functions that were inlined are not told."""
    if filename not in _codes:
        try:
            pending = [compile("".join(linecache.getlines(filename)), filename, "exec", dont_inherit=True)]
        except (SyntaxError, ValueError):
            pending = []
        found = _codes[filename] = []
        while pending:
            found.append(pending.pop())
            pending += [c for c in found[-1].co_consts if isinstance(c, CodeType)]
    return _codes[filename]


_codes: dict[str, list[CodeType]] = {}


def holds(code: CodeType, place) -> bool:
    return place.offset is not None and any(start <= place.offset < end and line == place.lineno for start, end, line in code.co_lines())


# ---- guards and breaks ------------------------------------------------------------------------------------

def record_guards(p: Lines) -> None:
    for code, captured in p.found.frames:
        p.r.add("guards", frame_name(code), kind="head")
        first = p.lines.get((code.co_filename, code.co_firstlineno))
        for g in list(captured.guards):
            needed = p.lines_at(g.location)
            tensor = p.inputs.get((code, str(g.source)))
            p.r.add("guards", fact(code, g).text, [*(needed or [first] if first else needed), *([tensor] if tensor else [])],
                    guard=g.kind.lower().replace("_", " "), needed_by=short_place(g.location) or "the function as a whole")


def record_breaks(p: Lines, breaks: list) -> None:
    for b in breaks:
        lines = [i for (file, n), i in p.lines.items() if b.where.startswith(f"{file}:{n} ")]
        p.r.add("graph", f"graph break: {b.reason}", lines, kind="break", where=tidy(b.where), advice=b.advice)


def record_skipped(p: Lines) -> None:
    for s in p.found.skipped:
        p.r.add("graph", f"runs as it is: {s.frame}", kind="break", why=tidy(s.reason), advice=s.advice)


# ---- graphs -----------------------------------------------------------------------------------------------

def record_graph(p: Lines, number: int, graph, measured) -> None:
    r, several = p.r, len(p.found.graphs) > 1
    short = f"graph {number + 1}, " if several else ""
    title = f"graph {number + 1}: {graph.frame}" if several else graph.frame
    code = next((c for c, captured in p.found.frames if captured is graph.captured), None)
    r.add("graph", title, kind="head")
    names = add_nodes(r, "graph", graph.gm, lambda node, own: p.at(node.meta.get("location")))
    inputs = [n.name for n in graph.gm.graph.nodes if n.op == "placeholder"]
    for name, source in zip(inputs, graph.captured.inputs):
        p.inputs[code, str(source)] = names[name][0]
    stage = names                                    # name of a node -> ids, for the origins of the stage after
    told = {}                                        # the last graphs that are no half
    halves: dict[str, dict] = {}
    schedules = 0
    for kind, data in graph.told:
        if kind == "stage" and data["name"] in ("forward", "backward"):
            gm = data["gm"]
            halves[data["name"]] = told[id(gm)] if id(gm) in told else through(p, gm, stage)
        elif kind == "stage":
            if data["name"] in PANES:
                r.add(data["name"], title, kind="head")
                stage = add_nodes(r, data["name"], data["gm"], lambda node, own, before=stage: origins(p, node, before, own))
            else:
                stage = through(p, data["gm"], stage)
            told = {id(data["gm"]): stage}
        elif kind == "cut":
            r.add("cut", title, kind="head")
            record_cut(r, stage, **data)
        elif kind == "schedule":
            which = data["which"]
            times = measured.steps.get((number, schedules)) if measured is not None else None
            schedules += 1
            if times is not None and len(times) != len(data["schedule"].steps):
                times = None                                   # compiled once more, it has become another program
            record_half(r, short + which, halves.get(which, {}), data, times, measured)
        elif kind == "fallback":
            r.add("loops", f"{data['which']}: operator by operator, because {data['reason']}", kind="break")
        elif kind == "as_captured":
            r.add("host", f"{short}runs as captured, because {data['why']}", kind="break")
    for half in graph.halves:
        r.summary[f"{half.which} of graph {number + 1}" if several else half.which] = half_in_words(half).split(": ", 1)[-1]


def origins(p: Lines, node, before: dict, own: dict) -> list[str]:
    """Ids of what a node was made from. A pass that adds nodes to a graph names others of the same graph (`own`)."""
    if node.op == "placeholder" and node.name in before:       # inputs keep their names; those of backward are saved values
        return before[node.name]
    names = node.meta.get("origins") or ()
    return [i for name in names for i in before.get(name) or own.get(name, ())] or p.at(node.meta.get("location"))


def through(p: Lines, gm, before: dict) -> dict:
    """Names of a graph that is not shown -> ids of what its nodes were made from."""
    own: dict[str, list[str]] = {}
    for node in gm.graph.nodes:
        own[node.name] = origins(p, node, before, own)
    return own


def add_nodes(r: Exploration, pane: str, gm, made_from) -> dict[str, list[str]]:
    ids = {}
    for node in gm.graph.nodes:
        if node.op == "output":
            r.add(pane, "return " + printing._call_text(node)[len("output("):-1], [i for a in node.all_input_nodes for i in ids[a.name]],
                  quiet=True)
            continue
        result = printing.type_text(node.meta["val"]) if node.meta.get("val") is not None else "?"
        call = "input" if node.op == "placeholder" else printing._call_text(node)
        ids[node.name] = [r.add(pane, f"{node.name}: {result} = {call}", made_from(node, ids), "input" if node.op == "placeholder" else "",
                                line=all_places(node.meta.get("location")))]
    return ids


# ---- the cut ----------------------------------------------------------------------------------------------

def record_cut(r: Exploration, ids: dict, joint, halves, saved) -> None:
    """Every saved value with its price and the cheapest cut without it, and marks on the nodes of the joint graph."""
    from ...ch05_autograd.partition import INFINITE, choose_saved, forward_use, must_not_recompute, price, stages
    asked: dict = {}

    def prices(node, joint, written):
        asked[node] = price(node, joint, written), written
        return asked[node][0]

    choose_saved(joint, halves, prices)
    nodes = [n for n in joint.gm.graph.nodes if n.op != "output" and n not in halves.backward]
    stage, deadline = stages(nodes, halves), time.perf_counter() + SECONDS_FOR_ALTERNATIVES
    by_id = {i.id: i for i in r.items}
    again = recomputed(halves, set(saved))
    for node in joint.gm.graph.nodes:
        item = by_id.get(ids.get(node.name, [None])[0])
        if item is None:
            continue
        runs = "backward" if node in halves.backward else "forward and again in backward" if node in again and node in halves.forward else \
            "backward only" if node in again else "forward"
        item.kind = item.kind or {"forward": ""}.get(runs, "backward" if node in halves.backward else "recomputed")
        item.facts["runs in"] = runs
        if node in asked and asked[node][0] < INFINITE:
            item.facts["price of saving"] = size_in_words(asked[node][0]) if asked[node][0] else "nothing: it is an input"
    total = 0
    for node in saved:
        cost, written = asked.get(node, (0, False))
        total += cost
        item = by_id.get(ids.get(node.name, [None])[0])
        if item is not None and node.op != "placeholder":
            item.kind, item.facts["saved"] = "saved", "for backward"
        if node.op == "placeholder" and not cost:
            r.add("cut", f"{node.name}: an input, which is alive anyway", ids.get(node.name, ()), "input", price="nothing")
            continue
        why = "" if node.op == "placeholder" else why_not_again(node, halves, forward_use(node, halves, stage), must_not_recompute)
        other = "not looked for: there are too many" if time.perf_counter() > deadline else \
            alternative(node, joint, halves, saved, asked)
        r.add("cut", f"{node.name}: {printing.type_text(node.meta.get('val'))}, {size_in_words(cost)}", ids.get(node.name, ()), "saved",
              price=size_in_words(cost), counted="once: forward writes it anyway" if written else "twice: a write and a read",
              not_recomputed_because=why, the_alternative=other)
    r.add("cut", f"all of it: {size_in_words(total)}", quiet=True)
    r.summary["saved for backward"] = f"{size_in_words(total)} of memory traffic"


def alternative(node, joint, halves, saved, asked) -> str:
    """The cheapest cut that does not contain `node`, in words."""
    from ...ch05_autograd.partition import INFINITE, choose_saved, price
    try:
        others = choose_saved(joint, halves, lambda n, joint, written: INFINITE if n is node else price(n, joint, written))
    except AssertionError:
        return "none: without it backward cannot be computed"
    more = sum(asked[n][0] for n in others if n in asked) - sum(asked[n][0] for n in saved if n in asked)
    new = [n.name for n in others if n not in saved]
    words = ", ".join(new[:6]) + (f" and {len(new) - 6} more" if len(new) > 6 else "")
    return f"save {words or 'nothing'} instead, for {size_in_words(more)} more" if more else f"save {words} instead, for the same price"


def why_not_again(node, halves, use, must_not_recompute) -> str:
    from ...ch05_autograd.partition import is_cheap, is_equality_of_floats, is_random, rereads
    if not must_not_recompute(node, halves, use):
        return ""
    reasons = {"a second draw would give other numbers": lambda: is_random(node),
               "it is a library call or a reduction: dear to compute, or small": lambda: not is_cheap(node),
               "it reads overlapping windows several times": lambda: rereads(node),
               "computed again from rounded numbers it might be false everywhere": lambda: is_equality_of_floats(node),
               "it lives across a library call, so that it is in memory anyway": lambda: use.far}
    return next((words for words, holds in reasons.items() if holds()), "a library call reads it in both halves")


def recomputed(halves, saved) -> set:
    """Nodes that do not depend on tangents and run in backward."""
    def again(nodes):
        return [n for n in nodes if hasattr(n, "op") and n.op != "placeholder" and n not in halves.backward and n not in saved]
    first = [*halves.gradients, *(a for n in halves.backward for a in n.all_input_nodes)]
    return printing.closure(again(first), lambda node: again(node.all_input_nodes))


# ---- loops, kernels, host program -------------------------------------------------------------------------

def record_half(r: Exploration, heading: str, names: dict, data: dict, times, measured) -> None:
    program, schedule, host = data["program"], data["schedule"], data["compiled"]
    loops = record_loops(r, heading, program, names)
    steps, members = record_fusion(r, heading, program, schedule, loops, times, measured)
    record_kernels(r, heading, schedule, host, steps, members)
    record_host(r, heading, schedule, host, steps, times)


def record_loops(r: Exploration, heading: str, program, names: dict) -> dict[str, str]:
    """name of a node of the program -> id."""
    from ...ch07_loops.verify import print_program
    ids, blocks, last = {}, {}, None
    known = {node.name: node for node in program.nodes}
    r.add("loops", heading, kind="head")
    for line in print_program(program).split("\n"):
        name = line.split(":")[0]
        if not line.startswith(" ") and name in known:
            last = name
            blocks[name] = [line]
        elif line.startswith(" ") and last is not None:
            blocks[last].append(line)
    for name, block in blocks.items():
        node = known[name]
        made = [i for o in node.origins for i in names.get(o, ())]
        head = re.sub(r"    # .*", "", block[0])
        ids[name] = r.add("loops", head, made, of=", ".join(node.origins), line=all_places(node.location))
        for line in block[1:]:
            r.add("loops", line, [ids[name]])
    return ids


def bytes_of(step, buffers) -> int:
    """Bytes that a step has to read and write."""
    from ...ch01_graphs.symbolic import present
    from ...ch07_loops.ir import views_in
    from ...ch08_fusion.dependencies import nbytes
    if hasattr(step, "loops"):
        return sum(nbytes(step.buffers[n]) for n in (*step.inputs, *step.outputs))
    total = sum(nbytes(buffers[n]) for n in step.outputs if n is not None)
    for view in views_in((step.args, step.kwargs)):
        size = buffers[view.buffer].dtype.itemsize
        for n in view.layout.size:
            size *= present(n)
        total += size
    return total


def record_fusion(r: Exploration, heading: str, program, schedule, loops: dict, times, measured) -> tuple[list, list]:
    """(id of each step, for each step that is a kernel the ids of its loops)."""
    r.add("fusion", heading, kind="head")
    steps, members, home = [], [], {}
    total = measured.total if measured is not None else 0.0
    for k, step in enumerate(schedule.steps):
        moved = bytes_of(step, program.buffers)
        facts, took = dict(bytes=size_in_words(moved)), ""
        if times is not None:
            took = f"  {microseconds(times[k])}"
            facts |= dict(time=microseconds(times[k]), share_of_the_call=f"{100 * times[k] / total:.1f} %" if total else "",
                          bandwidth=measured.against_copy(moved, times[k]) if hasattr(step, "loops") else "")
        if not hasattr(step, "loops"):
            made = [loops[step.name]] if step.name in loops else ()
            steps.append(r.add("fusion", f"{step.name}: library call {step.op}{took}", made, **facts))
            members.append([])
            home[step.name] = k
            continue
        inside = []
        for loop in step.loops:
            home[loop.name] = k
        names = [loop.name for loop in step.loops]
        steps.append(r.add("fusion", step.name + took, [loops[n] for n in names if n in loops], "kernel", loops=count(len(names), "loop"),
                           inside_the_kernel=", ".join(sorted(step.local)), why="; ".join(step.notes[:12]), **facts))
        for loop in step.loops:
            made = [loops[loop.name]] if loop.name in loops else ()
            inside.append(r.add("fusion", f"    {loop.name}  {', '.join(loop.origins[:6])}", made, line=all_places(loop.location)))
        members.append(inside)
    refused = {}
    for d in schedule.decisions:                      # the last word on each pair of kernels counts
        a, b = d.a.split("+")[0], d.b.split("+")[0]
        if not d.accepted and home.get(a) is not None and home.get(a) != home.get(b):
            refused[tuple(sorted((home[a], home.get(b, -1))))] = d
    if refused:
        r.add("fusion", "refused", kind="head")
    for d in sorted(refused.values(), key=lambda d: -d.score):
        parts = [loops[n] for n in (*d.a.split("+"), *d.b.split("+")) if n in loops]
        r.add("fusion", f"{d.a} with {d.b}: {d.reason}", parts, "refused", reason=d.reason, would_have_saved=size_in_words(d.score))
    return steps, members


def microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:,.1f} µs"


GENERATORS = {"cpp": "minicompile.ch10_cpp.emit", "triton": "minicompile.ch09_triton.emit"}


def generated(language: str, kernel):
    """The text of a generator for a kernel that another one may be meant for; a reason where it has none."""
    from importlib import import_module

    from ...errors import Unsupported
    try:
        return getattr(import_module(GENERATORS[language]), f"emit_{language}")(kernel)
    except (Unsupported, NotImplementedError, KeyError) as error:
        return str(error) or type(error).__name__


def record_kernels(r: Exploration, heading: str, schedule, host, steps, members) -> None:
    for language in GENERATORS:
        r.add(language, heading, kind="head")
        for number, (own, kernel) in enumerate(zip(host.sources, host.kernels)):
            source = own if own.language == language else generated(language, kernel)
            users = [k for k, n in enumerate(host.source_of) if n == number]
            runs = "this is what runs" if own.language == language else f"not what runs here: that is {PANES[own.language][0]}" \
                if own.language in PANES else f"not what runs here: that is the {own.language}"
            title = f"{schedule.steps[users[0]].name}" + (f", also for {count(len(users) - 1, 'other kernel')}" if len(users) > 1 else "")
            r.add(language, title, [steps[k] for k in users], "kernel", quiet=isinstance(source, str), here=runs)
            if isinstance(source, str):
                r.add(language, f"no text: {source}", [steps[k] for k in users], quiet=True)
                continue
            for position, line in zip(source.lines, source.code.split("\n")):
                at = [members[k][position] if position is not None else steps[k] for k in users]
                r.add(language, tidy(line), at, quiet=position is None)


def tidy(line: str) -> str:
    """Comments of kernels name files by their whole path."""
    return re.sub(r"(?:/[^/\s]+)+/(?=[^/\s]+:\d+)", "", line)


def record_host(r: Exploration, heading: str, schedule, host, steps, times) -> None:
    """Each step is one call of `k0`, `k1`, ... (kernels) or `x0`, `x1`, ... (library calls), in the order of the schedule. What
    stands before it is for it, up to what frees memory."""
    r.add("host", heading, kind="head")
    lines = host.source.rstrip("\n").split("\n")
    calls = [n for n, line in enumerate(lines) if re.match(r"\s*(\w+ = )?[kx]\d+\(", line)]
    known = len(calls) == len(schedule.steps)
    at = 0
    for n, line in enumerate(lines):
        if known and at < len(calls) and n == calls[at]:
            step = schedule.steps[at]
            ident = r.add("host", line, [steps[at]], time=microseconds(times[at]) if times is not None else "")
            if times is not None:
                name = step.name if hasattr(step, "loops") else str(step.op)
                r.add("timeline", f"{heading}  {name}", [ident], width=times[at], time=microseconds(times[at]))
            at += 1
        elif steps and known and re.match(r"\s*(\w+ = (empty|view|as_strided)\(|del |\w+ = \w+  #|if \w+\.stride|\w+ = result\[)", line):
            back = re.match(r"\s*(del |if \w+\.stride|\w+ = result\[)", line)
            k = max(at - 1, 0) if back else min(at, len(steps) - 1)
            r.add("host", line, [steps[k]], quiet=True)
        else:
            r.add("host", line, quiet=True)


# ---- times ------------------------------------------------------------------------------------------------

STAGE_PANES = {"capture": "graph", "differentiate": "primitives", "lower": "loops", "fuse": "fusion", "emit": "cpp"}


def record_times(r: Exploration, found, measured) -> None:
    steps = [i for i in r.items if i.pane == "timeline"]
    r.items = [i for i in r.items if i.pane != "timeline"]
    stages = {s: t for s, t in found.seconds.items() if s != "call"}
    if stages:
        r.add("timeline", "compiling", kind="head")
    for stage, seconds in stages.items():
        r.add("timeline", f"{stage}  {1000 * seconds:,.1f} ms", width=seconds / max(stages.values()), time=f"{1000 * seconds:,.1f} ms")
        if pane := STAGE_PANES.get(stage):
            r.notes[pane] = f"{1000 * seconds:,.0f} ms"
    if stages:
        r.summary["compiling"] = f"{1000 * sum(stages.values()):,.0f} ms"
    if measured is None:
        return
    if steps:
        longest = max(i.width for i in steps)
        r.add("timeline", "a call, step by step", kind="head")
        for i in steps:
            i.text, i.width = f"{i.facts['time']:>12}  {i.text}", i.width / longest if longest else 0.0
        r.items += steps
    r.summary |= measured.summary()
    for pane, words in measured.checks.items():
        r.notes[pane] = "; ".join(filter(None, [r.notes.get(pane), words]))
