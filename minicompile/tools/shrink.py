"""A captured graph as Python, made small while a rung still gets it wrong; the second half of `bisect`.

The unit is text: a list of statements, the tensors that come in and the names that go out. Every smaller
program is run like any other program, so nothing here knows how a stage works. What is deleted becomes an
input, with the value that eager computes there, and so a long graph is cut from both ends before single
statements are tried.
"""
import ast
import dataclasses
import functools
import itertools
import linecache
import math
import os
import re
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from ..ch01_graphs.graph import with_own_names
from ..ch03_capture import hook
from . import apart
from .answers import Answers, Memories, References, Run, answers_of, find_differences

MODES = {"enter": re.compile(r"^(\w+) = torch\.amp\.autocast_mode\._enter_autocast\((.*)\)$"),
         "exit": re.compile(r"^\w+ = torch\.amp\.autocast_mode\._exit_autocast\((\w+)\)$")}
TRAILING = re.compile(r"(;  (\w+ = )+None)+$")
MAX_RECORDED = 3


# ---- programs as text -------------------------------------------------------------------------------------

@dataclass
class Statement:
    """text: one line, or a block of `with`. writes: the name it binds; reads: the names it needs. keeps: it
    changes something besides binding a name."""
    text: str
    writes: str | None
    reads: frozenset
    keeps: bool


@dataclass
class Argument:
    """An argument. value: a number, or a tensor on the CPU, where inputs that share memory still do. text: an
    expression that makes it, or None."""
    value: Any
    device: str = "cpu"
    requires_grad: bool = False
    leaf: bool = True
    text: str | None = None


@dataclass
class GraphText:
    inputs: dict
    statements: list
    outputs: list
    prelude: str = ""
    settings: dict = field(default_factory=dict)
    calls: int = 1
    grad: bool = True
    autocast: tuple = ()
    weighted: bool = True
    strict: bool = False

    def source(self) -> str:
        """A function of its inputs that returns a tuple of its outputs."""
        depth, lines = 1, []
        for s in self.statements:
            if match := MODES["enter"].match(s.text):
                lines.append("    " * depth + f"with torch.autocast({match[2]}):")
                depth += 1
            elif MODES["exit"].match(s.text):
                if lines[-1].endswith(":"):
                    lines.append("    " * depth + "pass")
                depth -= 1
            else:
                lines += ["    " * depth + line for line in s.text.split("\n")]
        outputs = ", ".join(self.outputs) + "," * (len(self.outputs) == 1)
        return "\n".join([f"def f({', '.join(self.inputs)}):", *lines, f"    return {outputs or '()'}"])

    def globals(self) -> dict:
        namespace = {"torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan}
        exec(self.prelude, namespace)
        return namespace

    def load(self):
        """(function, arguments, {}), as `Run.load` wants it."""
        torch.set_grad_enabled(self.grad)
        for device, dtype in self.autocast:
            torch.autocast(device, dtype).__enter__()
        namespace = self.globals()
        source = self.source()
        linecache.cache["<reduced>"] = len(source), None, source.splitlines(True), "<reduced>"
        exec(compile(source, "<reduced>", "exec"), namespace)
        return namespace["f"], self.arguments(), {}

    def arguments(self) -> list:
        """Fresh ones."""
        memories = Memories()
        torch.manual_seed(0)
        return [fresh_argument(i, memories, self.globals()) for i in self.inputs.values()]

    def run(self) -> Run:
        return Run(self.load, self.settings, self.calls, strict=self.strict, weighted=self.weighted)


def fresh_argument(given: Argument, memories: Memories, namespace: dict):
    """The value of an input, as a new tensor; those that share memory share the new one."""
    value = given.value if given.text is None else eval(given.text, namespace)
    if not isinstance(value, torch.Tensor):
        return value
    value = value.to(given.device) if given.text is not None else \
        memories.view(value, lambda flat: flat.clone().to(given.device)).detach()
    if given.requires_grad:
        value = value.detach().requires_grad_()
        value = value if given.leaf else value.clone()
    return value


# ---- recording --------------------------------------------------------------------------------------------

class CannotBeWritten(Exception):
    """The graph has no form as plain Python."""


def record_graphs(run: Run, number: int | None = None) -> tuple[Answers, dict]:
    """Run the program with all graphs as captured. Returns its answers, and for graph `number` (None: for
    all) a list of Programs, one for each of its first calls, or why it cannot be written. Changes this
    process: to be run apart."""
    from .. import versions
    programs, real, count = {}, versions.call_backend, itertools.count()

    def watch(captured, *settings):
        mine, compiled = next(count), real(captured, *settings)
        if number not in (None, mine):
            return compiled
        made = programs[mine] = []

        def call(*inputs):
            if isinstance(made, list) and len(made) < MAX_RECORDED:
                try:
                    made.append(program_of(captured.gm, inputs, run))
                except Exception as error:
                    programs[mine] = f"it has no form as plain Python ({type(error).__name__}: {error})"
            return compiled(*inputs)
        return functools.partial(hook.run, None, call)

    versions.call_backend = watch
    try:
        return answers_of(dataclasses.replace(run, only=frozenset()), "eager"), programs
    finally:
        versions.call_backend = real


def program_of(gm, values, run: Run) -> GraphText:
    placeholders = gm.graph.find_nodes(op="placeholder")
    lines = [TRAILING.sub("", line.strip()) for line in with_own_names(gm).code.strip().splitlines()]
    names = [str(n.target) for n in placeholders]          # what the code calls them
    start = next(i for i, line in enumerate(lines) if line.startswith("def forward")) + 1
    statements, inputs, memories = [], {}, Memories()
    for name, node, value in zip(names, placeholders, values):
        size = size_of(node, placeholders, names) if not isinstance(value, torch.Tensor) else None
        if size is not None:
            statements.append(statement(f"{name} = {size}"))
        else:
            inputs[name] = input_of(value, memories)
    dynamic = len(statements) > 0 or any(isinstance(n.meta["val"], torch.SymInt) for n in placeholders)
    prelude, classes = "", {}
    for node in gm.graph.nodes:
        if node.op == "call_function" and getattr(node.target, "__module__", "") == "minicompile.ch03_capture.library.regions":
            qualified = f"{node.target.__module__}.{node.target.__name__}".replace(".", "_")
            classes[qualified] = node.target
        elif node.op == "get_attr":
            raise CannotBeWritten("it has constants")
    body = lines[start:-1]
    for qualified, target in classes.items():
        text = function_class(target)
        prelude += text
        body = [line.replace(qualified + "(", f"{target.__name__}.apply(") for line in body]
    body = [line.replace("torch._C._set_grad_enabled(", "torch.set_grad_enabled(") for line in body if line]
    for line in body:
        statements += [statement(part) for part in line.split(";  ")]
    outputs = re.match(r"return \((.*?),?\)$", lines[-1])
    if outputs is None:
        raise CannotBeWritten(lines[-1])
    found = [o.strip() for o in outputs[1].split(",")]
    autocast = tuple((d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d))
    settings = run.settings | ({"dynamic": True} if dynamic else {})
    return GraphText(inputs, statements, [o for o in dict.fromkeys(found) if o.isidentifier() and o != "None"], prelude, settings, 1,
                   torch.is_grad_enabled(), autocast, run.weighted, run.strict)


def size_of(node, placeholders, names) -> str | None:
    """`x.shape[0]`, if this placeholder is a size of another."""
    for name, other in zip(names, placeholders):
        for d, size in enumerate(getattr(other.meta["val"], "shape", ())):
            if isinstance(size, torch.SymInt) and str(size) == str(node.meta["val"]):
                return f"{name}.shape[{d}]"
    return None


def input_of(value, memories: Memories) -> Argument:
    if not isinstance(value, torch.Tensor):
        return Argument(value)
    kept = memories.view(value, lambda flat: flat.clone().cpu())
    return Argument(kept, str(value.device), value.requires_grad, value.is_leaf)


IN_PLACE = re.compile(r"\w_\(|\[.*\] = |[-+*/|&^@%]=|set_grad_enabled|_autocast|out *=")


def statement(text: str) -> Statement:
    tree = ast.parse(text).body[0]
    reads = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    writes = None
    if isinstance(tree, ast.Assign) and isinstance(tree.targets[0], ast.Name):
        writes = tree.targets[0].id
    elif isinstance(tree, ast.AugAssign) and isinstance(tree.target, ast.Name):
        reads.add(tree.target.id)
    return Statement(text, writes, frozenset(reads), bool(IN_PLACE.search(text)))


def function_class(target) -> str:
    """The autograd function behind a joining node (chapter 3), as a class."""
    spec = target.joined
    if len(spec.graphs) != 1 or any(spec.aliases) or any(spec.frozen):
        raise CannotBeWritten("it has an autograd function of several cases")
    (graph, lifted), = spec.graphs.values()
    order = list(spec.sources)
    operands = [f"x{i}" for i in range(max([spec.outputs + spec.inputs - 1, *(p for p, _ in spec.sources.values())]) + 1)]
    code = [TRAILING.sub("", line.strip()) for line in graph.code.strip().splitlines()]
    start = next(i for i, line in enumerate(code) if line.startswith("def forward")) + 1
    given = [str(n.target) for n in graph.graph.find_nodes(op="placeholder")]
    saved = given[:len(lifted)]
    places = {n: operands[spec.sources[n][0]] for n in order}
    tangents = given[len(lifted):]
    result = code[-1].removeprefix("return").strip()
    none = ", ".join(["None"] * spec.outputs) + ", "
    rest = ["None"] * (len(operands) - spec.outputs - spec.inputs)
    lines = [f"class {spec.name}(torch.autograd.Function):", "    @staticmethod", f"    def forward(ctx, {', '.join(operands)}):",
             f"        ctx.save_for_backward({', '.join(places[n] for n in lifted)})",
             f"        return {', '.join(f'{o}.detach()' for o in operands[:spec.outputs])},", "",
             "    @staticmethod", f"    def backward(ctx, {', '.join(tangents)}):"]
    lines += [f"        {', '.join(saved)}, = ctx.saved_tensors"] if saved else []
    lines += [f"        {line}" for line in code[start:-1] if line]
    lines += [f"        return ({none}*{result}{''.join(', ' + r for r in rest)})", "", ""]
    return "\n".join(lines) + "\n"


# ---- values inside of a program ---------------------------------------------------------------------------

def values_after(program: GraphText, upto: int, names: list) -> dict:
    """The values of `names` in eager, when the first `upto` statements have run, as Inputs; those that cannot
    be inputs are absent. To be run apart."""
    part = dataclasses.replace(program, statements=balanced(program.statements[:upto]), outputs=list(names))
    function, args, _ = part.load()
    values, memories = function(*args), Memories()
    return {n: input_of(v, memories) for n, v in zip(names, values) if isinstance(v, (torch.Tensor, int, float))}


def balanced(statements: list) -> list:
    """Without the ends of blocks that did not begin, and with those that are missing."""
    kept, open_blocks = [], []
    for s in statements:
        if match := MODES["enter"].match(s.text):
            open_blocks.append(match[1])
        elif match := MODES["exit"].match(s.text):
            if match[1] not in open_blocks:
                continue
            open_blocks.remove(match[1])
        kept.append(s)
    for name in reversed(open_blocks):
        kept.append(statement(f"_ = torch.amp.autocast_mode._exit_autocast({name})"))
    return kept


def without_dead(program: GraphText) -> GraphText:
    """Without the pure statements and the inputs that nothing needs."""
    needed, kept = set(program.outputs), []
    for s in reversed(program.statements):
        if s.keeps or s.writes in needed:
            kept.append(s)
            needed |= s.reads
    inputs = {n: i for n, i in program.inputs.items() if n in needed}
    return dataclasses.replace(program, statements=balanced(kept[::-1]), inputs=inputs)


# ---- reducing ---------------------------------------------------------------------------------------------

@dataclass
class Oracle:
    """Whether a program still shows what the first one did."""
    rung: str
    below: str
    kind: str
    seconds: float
    deadline: float
    found: list = field(default_factory=list)     # the differences of the last program that showed it
    refuted: set = field(default_factory=set)

    def __call__(self, program: GraphText) -> bool:
        if time.monotonic() > self.deadline:
            return False
        key = program.prelude, program.source(), program.calls, program.weighted, tuple(
            (i.text, i.requires_grad, i.leaf, getattr(i.value, "shape", i.value)) for i in program.inputs.values())
        if key in self.refuted:
            return False
        self.refuted.add(key)
        run = program.run()
        refs = apart.run(references_of, program, seconds=self.seconds).value
        if refs is None or (self.kind != "exception" and any(s.kind == "raised" for s in refs.plain.values.values())):
            return False
        differences = find_differences(apart.run(answers_of, run, self.rung, seconds=self.seconds), refs)
        if not differences or differences[0].kind != self.kind:
            return False
        if self.below != "uncompiled" and find_differences(apart.run(answers_of, run, self.below, seconds=self.seconds), refs):
            return False
        self.refuted.discard(key)
        self.found = differences
        return True


def references_of(program: GraphText) -> References:
    """All of eager's answers in one process: each has inputs of its own. To be run apart."""
    plain = answers_of(program.run(), None)
    moved = answers_of(program.run(), None, "moved")
    return References(plain, None if plain.draws else answers_of(program.run(), None, "double"), moved)


def reduce(found, programs: list, rung: str, seconds: float, out: str) -> None:
    """Fill in code, nodes and path of a `Bisection` whose graph is known: `programs`, as recorded."""
    oracle = Oracle(rung, found.before, found.largest.kind, seconds, time.monotonic() + seconds)
    program = first_that_shows(programs, oracle)
    if program is None:
        found.notes.append("The graph alone, with the inputs that it had, does not show it; it needs the calls around it.")
        found.code, found.nodes = programs[0].source(), len(programs[0].statements)
        return
    program = shrink(program, oracle)
    found.code, found.nodes = program.prelude + program.source(), len(program.statements)
    found.largest, found.differences = oracle.found[0], oracle.found
    found.path = write_script(program, found, rung, out)


def first_that_shows(programs: list, oracle: Oracle) -> GraphText | None:
    for program in programs:
        for calls in (1, 2, MAX_RECORDED):
            for weighted in (True, False):
                attempt = dataclasses.replace(program, calls=calls, weighted=weighted)
                if oracle(attempt):
                    return attempt
    return None


def shrink(program: GraphText, oracle: Oracle) -> GraphText:
    def better(candidate: GraphText | None) -> bool:
        nonlocal program
        if candidate is None or not oracle(candidate):
            return False
        program = candidate
        return True

    better(without_dead(program))
    while True:
        before = program.source()
        for outputs in fewer_outputs(program, oracle):
            if better(without_dead(dataclasses.replace(program, outputs=outputs))):
                break
        better_prefix(program, better)
        chunk = max(len(program.statements) // 2, 1)
        while chunk >= 1:
            first = 0
            while first < len(program.statements):
                if not better(without_statements(program, first, first + chunk)):
                    first += chunk
            chunk //= 2
        for n in range(len(program.statements) - 1, -1, -1):
            for candidate in bypasses(program, n):
                if better(candidate):
                    break
        if program.source() == before or time.monotonic() > oracle.deadline:
            break
    for name in list(program.inputs):
        for text in texts_for(program.inputs[name]):
            if better(with_input(program, name, text=text)):
                break
    for name, given in list(program.inputs.items()):
        if given.requires_grad:
            better(with_input(program, name, requires_grad=False, leaf=True))
    smaller_sizes(program, better)
    return program


def with_input(program: GraphText, name: str, **changes) -> GraphText:
    return dataclasses.replace(program, inputs=program.inputs | {name: dataclasses.replace(program.inputs[name], **changes)})


def fewer_outputs(program: GraphText, oracle: Oracle) -> list:
    """Sets of outputs to be tried: those that differ, then each."""
    if len(program.outputs) < 2:
        return []
    wrong = {int(m[1]) for d in oracle.found if (m := re.search(r"result\[(\d+)\]", d.where))}
    first = [[program.outputs[i]] for i in sorted(wrong) if i < len(program.outputs)]
    half = len(program.outputs) // 2
    return first + [program.outputs[:half], program.outputs[half:]] + [[o] for o in program.outputs if [o] not in first]


def better_prefix(program: GraphText, better) -> None:
    """End earlier: the shortest beginning, found by halving, whose values in use are wrong."""
    low, high = 0, len(program.statements)
    while high - low > 1:
        middle = (low + high) // 2
        if better(ending_at(program, middle)):
            high = middle
        else:
            low = middle


def ending_at(program: GraphText, end: int) -> GraphText | None:
    made = {s.writes for s in program.statements[:end]} | set(program.inputs)
    later = set(program.outputs).union(*(s.reads for s in program.statements[end:]))
    values = apart.run(values_after, program, end, sorted(made & later)).value or {}
    outputs = [n for n, i in values.items() if isinstance(i.value, torch.Tensor) and n not in program.inputs]
    if not outputs:
        return None
    return without_dead(dataclasses.replace(program, statements=balanced(program.statements[:end]), outputs=outputs))


def without_statements(program: GraphText, first: int, last: int) -> GraphText | None:
    """What these statements compute becomes inputs, or is no longer needed."""
    last = min(last, len(program.statements))
    removed, rest = program.statements[first:last], program.statements[last:]
    written = {s.writes for s in removed} - {None}
    kept = balanced(program.statements[:first] + rest)
    needed = sorted(written & set(program.outputs).union(*(s.reads for s in kept)))
    values = apart.run(values_after, program, last, needed).value if needed else {}
    if values is None or len(values) < len(needed):
        return None
    outputs = [o for o in program.outputs if o not in needed]
    if not outputs:
        return None
    return without_dead(dataclasses.replace(program, statements=kept, inputs=program.inputs | values, outputs=outputs))


def bypasses(program: GraphText, n: int):
    """One statement's operand in the place of its result."""
    s = program.statements[n] if n < len(program.statements) else None
    if s is None or s.writes is None or s.keeps:
        return
    candidates = sorted(s.reads - {"torch", "device", "inf", "nan"})
    values = apart.run(values_after, program, n + 1, [s.writes, *candidates]).value or {}
    own = values.get(s.writes)
    for name in candidates:
        same = values.get(name)
        if own is None or same is None or not isinstance(same.value, torch.Tensor) or not isinstance(own.value, torch.Tensor) or \
                (own.value.shape, own.value.dtype) != (same.value.shape, same.value.dtype):
            continue
        renamed = [statement(re.sub(rf"\b{s.writes}\b", name, t.text)) for t in program.statements[n + 1:]]
        outputs = list(dict.fromkeys(name if o == s.writes else o for o in program.outputs))
        if not set(outputs) & set(program.inputs):
            yield without_dead(dataclasses.replace(program, statements=program.statements[:n] + renamed, outputs=outputs))


def texts_for(given: Argument) -> list[str]:
    """Expressions for a tensor that could take the place of this input, simplest first."""
    t = given.value
    if not isinstance(t, torch.Tensor):
        return [repr(t)]
    order = sorted(range(t.dim()), key=lambda d: (-t.stride(d), d))
    dense = t.permute(order).is_contiguous() if t.numel() else True
    shape = tuple(t.shape[d] for d in order) if dense else (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride())),)
    sizes = ", ".join(map(str, shape)) if shape else "()"
    back = tuple(sorted(range(t.dim()), key=order.__getitem__))
    view = f".permute{back}" if dense and order != sorted(order) else ""
    view = view if dense else f".as_strided({tuple(t.shape)}, {t.stride()})"
    name = str(t.dtype)
    if t.dtype is torch.bool:
        made = [f"(torch.randn({sizes}) > 0)"]
    elif t.dtype.is_floating_point or t.dtype.is_complex:
        suffix = "" if t.dtype is torch.float32 else f", dtype={name}" if t.dtype.itemsize > 1 else f").to({name}"
        made = [f"torch.ones({sizes if shape else '()'}{suffix})", f"torch.randn({sizes}{suffix})", f"torch.randn({sizes}{suffix}).abs()"]
    else:
        high = int(t.max()) + 1 if t.numel() else 1
        made = [f"torch.zeros({sizes}, dtype={name})"]
        made += [f"torch.randint({high}, ({', '.join(map(str, shape))}{',' * (len(shape) == 1)}), dtype={name})"] if high > 0 else []
    if dense and 0 < t.numel() <= 12 and not t.dtype.is_complex and t.dtype.itemsize > 1:
        made.append(f"torch.tensor({t.permute(order).tolist()}, dtype={name})")
    return [m + view for m in made]


def smaller_sizes(program: GraphText, better) -> None:
    """Offer `better` each size, wherever its number stands, as a smaller one."""
    numbers = {int(n) for i in program.inputs.values() if i.text for n in re.findall(r"\b\d+\b", i.text.partition("dtype")[0])}
    for number in sorted(numbers - {0, 1, 2}, reverse=True):
        for smaller in (1, 2, 3, 5, number // 4, number // 2):
            if smaller >= number:
                continue

            def swap(text):
                return re.sub(rf"(?<![\w.]){number}(?![\w.])", str(smaller), text)
            candidate = dataclasses.replace(
                program, statements=[statement(swap(s.text)) for s in program.statements],
                inputs={n: dataclasses.replace(i, text=swap(i.text)) if i.text else i for n, i in program.inputs.items()})
            if better(candidate):
                program = candidate
                break


# ---- the script -------------------------------------------------------------------------------------------

SCRIPT = '''"""{title}"""
import torch
from torch import device, inf, nan

import minicompile

{prelude}
{source}


def answers(rung):
    torch.manual_seed(0)
{inputs}    arguments = [{names}]
    g = f if rung is None else minicompile.compile(f, backend=rung{settings})
    for _ in range({calls}):
        out = g(*arguments)
{backward}    return [t.detach() for t in (*out, *arguments, *(t.grad for t in arguments if isinstance(t, torch.Tensor)))
            if isinstance(t, torch.Tensor)]


{setup}expected = answers(None)
for rung in {rungs}:
    print(rung, [(a.to(torch.float64) - b.to(torch.float64)).abs().max().item() for a, b in zip(answers(rung), expected) if a.numel()],
          flush=True)
'''


def write_script(program: GraphText, found, rung: str, out: str) -> str:
    os.makedirs(out, exist_ok=True)
    stem = re.sub(r"\W+", "_", found.name).strip("_") or "program"
    path, data = os.path.join(out, f"{stem}_{rung}.py"), os.path.join(out, f"{stem}_{rung}.pt")
    lines, kept = [], {}
    for name, given in program.inputs.items():
        text = given.text
        if text is None:
            kept[name] = given.value
            text = f"data[{name!r}]" + ".clone()" * isinstance(given.value, torch.Tensor)
        if isinstance(given.value, torch.Tensor):
            text += f".to({given.device!r})" * (given.device != "cpu")
            text += ".requires_grad_()" * given.requires_grad + ".clone()" * (given.requires_grad and not given.leaf)
        lines.append(f"    {name} = {text}\n")
    if kept:
        torch.save(kept, data)
        lines.insert(0, f"    data = torch.load({os.path.abspath(data)!r})\n")
    backward = ""
    if program.grad:
        loss = "t.sum()" if not program.weighted else "(t * torch.linspace(0.5, 1.5, t.numel()).to(t).view(t.shape)).sum()"
        backward = ("        loss = [" + loss + " for t in out if t.requires_grad]\n"
                    "        if loss:\n            sum(loss).backward()\n")
    setup = "" if program.grad else "torch.set_grad_enabled(False)\n"
    setup += "".join(f"torch.autocast({d!r}, {t}).__enter__()\n" for d, t in program.autocast)
    settings = "".join(f", {k}={v!r}" for k, v in program.settings.items() if v)
    rungs = (found.before, rung) if found.before != "uncompiled" else (rung,)
    with open(path, "w") as file:
        file.write(SCRIPT.format(
            title=f"On the rung {rung}: {found.largest}".replace('"', "'"), prelude=program.prelude, source=program.source(),
            inputs="".join(lines), names=", ".join(program.inputs), calls=program.calls, backward=backward, setup=setup,
            settings=settings, rungs=repr(rungs)))
    return path
