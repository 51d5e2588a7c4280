"""Chapter 4: bytecode, liveness, graph breaks."""
import contextlib
import dis
import io
import textwrap

import torch

from .. import ExerciseError, behaviour, task
from .kit import graph_rows, program_file, questions, run_rows, traced

# ---- varint ----------------------------------------------------------------------------------------------

task("varint", title="Numbers in groups of six bits", minutes=15, about="""\
CPython 3.11 packs exception tables and line tables as numbers of variable length: six bits a byte, bit 6 (0x40) set if another byte
follows. The exception table starts with the highest group, the line table with the lowest. Every function that chapter 4 assembles
gets both tables through this one function.""", hints=[
    "Which operation gives the lowest six bits of a number, and which one the rest? How often has that to happen for 0?",
    "Collect the groups, the lowest first, until nothing is left. The flag of a byte says that another one follows it: so it depends on "
    "the order in which the bytes are written.",
    "Two steps: a list of groups in the order in which they are written, then a byte for each. All but one have the flag. Which one has "
    "not?"])


def numbers(big_endian, smallest, largest):
    return lambda rng: [(n, big_endian) for n in sorted({smallest, smallest + 1, largest - 1, *(
        rng.randrange(smallest, largest) for _ in range(30))})]


def varint_call(case):
    return f"varint({case[0]}, big_endian={case[1]})"


def show_varint(function, case):
    data = function(*case)
    return {"bytes": len(data), "bits": " ".join(f"{b:08b}" for b in data)}


behaviour("varint", points=2, name="one byte", cases=numbers(False, 0, 64), show=varint_call)(show_varint)
behaviour("varint", points=3, name="lowest group first", cases=numbers(False, 62, 1 << 40), show=varint_call)(show_varint)
behaviour("varint", points=3, name="highest group first", cases=numbers(True, 62, 1 << 40), show=varint_call)(show_varint)


@behaviour("varint", points=2, name="the tables of a code object survive taking apart and putting together",
           cases=lambda rng: [random_source(rng, n) for n in (2, 4, 8)], show=str)
def tables(function, source):
    from minicompile.ch04_breaks import bytecode as bc
    code = code_of(source)
    _, table, lines = bc.encode(*bc.disassemble(code), code.co_firstlineno)
    return {"exception table": [(e.start, e.end, e.target, e.depth, e.lasti)
                                for e in dis._parse_exception_table(code.replace(co_exceptiontable=table))],
            "lines": [p[0] for p in code.replace(co_linetable=lines).co_positions()]}


# ---- liveness --------------------------------------------------------------------------------------------

task("liveness", title="Which locals will still be read", minutes=75, about="""\
A resume function takes the locals that the rest of the code may still read. A tensor that is passed without need has to be an output
of the graph before the break, written to memory, and kept alive. Compute, for every instruction of a code object, which variables are
live before it: some path from there reads the variable before writing it.""", hints=[
    "When is a variable live before an instruction, if you know what is live before those that may come next? In which direction does "
    "that lead?",
    "live(i) = reads(i) | (union of live(successors) - writes(i)). A loop in the code makes these equations circular: start with empty "
    "sets, and repeat over all instructions until nothing changes.",
    "A list of sets, one an instruction, begins empty. A round goes from the last instruction to the first: the union of what is live "
    "before its successors, then what the instruction itself does (some write, some do neither, all others read). Repeat until a round "
    "changes nothing, and only then make the dictionary. The two halves of a split pair have one offset: the first counts."])


def code_of(source: str):
    space = {}
    exec(compile(source, "<program>", "exec"), space)
    return space["f"].__code__


def random_source(rng, statements) -> str:
    """A random function of branches, loops and handlers over a few locals. Never executed."""
    names = ["a", "b", "c", "d", "e"]

    def block(depth, count):
        lines = []
        for _ in range(count):
            kind = rng.choice(["set", "set", "set", "if", "while", "for", "try", "del", "call"] if depth < 3 else ["set", "call"])
            x, y, z = (rng.choice(names) for _ in range(3))
            compound = kind in ("if", "while", "for", "try")
            inner = compound and textwrap.indent("\n".join(block(depth + 1, rng.randrange(1, 3))), "    ")
            lines.append({"set": f"{x} = {y} + {z}", "call": f"print({x})", "if": f"if {x}:\n{inner}", "while": f"while {x}:\n{inner}",
                          "for": f"for {x} in {y}:\n{inner}", "try": f"try:\n{inner}\nexcept ValueError:\n    {z} = {x}",
                          "del": f"del {x}\n{x} = {y}"}[kind])
        return lines
    body = block(0, statements) + [f"return {rng.choice(names)}"]
    return "def f(a, b):\n" + textwrap.indent("\n".join(body), "    ") + "\n"


def programs(*sources):
    return lambda rng: [textwrap.dedent(s).lstrip() for s in sources]


def show_live(function, source):
    """Per code object and instruction, the names that are live."""
    from minicompile.ch04_breaks import bytecode as bc
    code = code_of(source)
    found = {}
    for code in (code, *(c for c in code.co_consts if hasattr(c, "co_code"))):
        names, table = bc.localsplus_names(code), function(code)
        for i in bc.disassemble(code)[0]:
            found[f"{code.co_name}: before {i.offset} {i.name}"] = sorted(names[v] for v in table[i.offset])
        found[f"{code.co_name}: entries"] = len(table)
    return found


STRAIGHT = programs("def f(a, b):\n    c = a + b\n    return c\n", "def f(a, b):\n    a = b\n    b = a\n    return a\n",
                    "def f(a, b):\n    del a\n    return b\n")
BRANCHES = programs("def f(a, b):\n    if a:\n        b = 1\n    return b\n",
                    "def f(a, b):\n    if a:\n        c = b\n    else:\n        c = a\n    return c\n")
LOOPS = programs("def f(a, b):\n    for c in a:\n        b = b + c\n    return b\n",
                 "def f(a, b):\n    c = d = e = 0\n    while a:\n        while b:\n            b = c\n            c = d\n"
                 "            d = e\n"
                 "        a = c\n    return a\n")
HANDLERS = programs("def f(a, b):\n    try:\n        c = a()\n    except ValueError:\n        c = b\n    return c\n",
                    "def f(a, b):\n    c = a\n    def g():\n        nonlocal c\n        c = c + b\n        return c\n    return g\n")
for _points, _name, _cases in ((3, "straight lines: a read makes live, a write ends it", STRAIGHT), (3, "branches: live on one way is live",
                                                                                                     BRANCHES),
                               (4, "loops: what the next round reads", LOOPS), (3, "handlers, and variables of closures", HANDLERS),
                               (4, "random programs", lambda rng: [random_source(rng, 1 + k // 4) for k in range(24)])):
    behaviour("liveness", points=_points, name=_name, cases=_cases, show=str)(show_live)


# ---- predict: graphs and breaks --------------------------------------------------------------------------

PROGRAMS = '''\
import torch


def straight(x):
    return torch.relu(x) + 1


def shape(x):
    if x.shape[0] > 4:
        x = x * 2
    return x.sum()


def printing(x):
    y = x + 1
    print("half way")
    return y * 2


def at_the_end(x):
    y = x.exp()
    print("done")
    return y


def data(x):
    y = x.sin()
    if y.sum() > 0:
        return y + 1
    return y - 1


def loop(x):
    for k in range(4):
        x = x + k
    return x


def item(x):
    n = x.max().item()
    m = x.min().item()
    return x * (n - m)

'''
GRAPHS = ("straight", "shape", "printing", "at_the_end", "data", "loop", "item")

task("predict-breaks", title="How many graphs?", minutes=20, kind="predict", about="""\
Each function is compiled and called once, with x = torch.randn(8). How many graphs does that compile? A part without a tensor
operation is no graph. Answer first, then try: minicompile.explain(f)(x) shows graphs and breaks.""",
     starter=PROGRAMS + questions(**{name.upper(): f"graphs that one call of {name}(torch.randn(8)) compiles" for name in GRAPHS}), hints=[
    "Which numbers are known while tracing: a size? The value of an element?",
    "A break splits a function into what comes before and what comes after. A part in which no tensor operation happens is no graph. A "
    "loop over a range is unrolled.",
    "minicompile.explain(f, backend='eager')(x).graph_count counts them. Try the one you doubt, and find out why."])


def graphs_of(name) -> tuple:
    import minicompile
    from minicompile.ch03_capture import hook
    if "no_hook" in hook._c.__name__:
        raise ExerciseError("without the frame hook other graphs are made: `python setup.py build_ext --inplace` builds it")
    minicompile.reset()
    torch.manual_seed(0)
    with contextlib.redirect_stdout(io.StringIO()):
        found = minicompile.explain(program_file(PROGRAMS)[name], backend="eager")(torch.randn(8))
    record = [f"a graph of {', '.join(o.call for o in g.operations)}" for g in found.graphs]
    record += [f"a break at `{b.source}`: {b.reason}" for b in found.breaks] or ["no break"]
    record += [f"not captured: {s.frame}: {s.reason}" for s in found.skipped]
    return found.graph_count, "\n  ".join(["Captured were:", *record])


for _name in GRAPHS:
    @behaviour("predict-breaks", points=1 + (_name in ("printing", "data", "item")), name=_name, answer=_name.upper())
    def _(name=_name):
        return graphs_of(name)


# ---- target: no breaks -----------------------------------------------------------------------------------

BROKEN = '''\
import torch


def step(x, weights, log):
    """x: [n, d]. weights: a list of [d, d]. log: a list, which gets a message for each layer."""
    total = 0.0
    for k, w in enumerate(weights):
        y = x @ w
        if y.abs().max() > 10:
            y = y / y.abs().max().item() * 10
        print("layer", k)
        log.append(f"layer {k}: {tuple(y.shape)}")
        total = total + float(y.sum())
        x = torch.relu(y)
    return x, torch.tensor(total)
'''

task("no-breaks", title="One graph instead of many", minutes=40, kind="target", function="step", starter=BROKEN, about="""\
This step breaks in every layer. Change it so that it compiles to one graph, with the same results and the same entries in `log` after the
call. Nobody needs what it prints.""", hints=[
    "minicompile.explain(step)(x, weights, log) lists the breaks with their lines. Which of them need the value of an element?",
    "A branch on data becomes torch.where on tensors. .item() and float() are not needed if the number goes on as a tensor. log.append "
    "is a side effect that capture can replay.",
    "Three places change. The condition becomes a tensor that chooses between two tensors; the total is summed as a tensor and never "
    "becomes a number of Python; and nothing is printed. The appends may stay."])


def step_cases(rng):
    return [(rng.randrange(1 << 20), layers, scale) for layers, scale in ((1, 0.1), (1, 9.0), (2, 3.0), (4, 2.0))]


def step_inputs(case):
    seed, layers, scale = case
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(5, 6, generator=g) * scale, *(torch.randn(6, 6, generator=g) for _ in range(layers))]


def run_step(step, case):
    """What the call returns and logs, and each graph as data, with the positions of its inputs."""
    import minicompile
    x, *weights = inputs = step_inputs(case)
    graphs, log = [], []

    def backend(gm, examples):
        def run(*args):
            graphs.append(([next(i for i, t in enumerate(inputs) if t is a) for a in args], graph_rows(traced(gm, *args))))
            return gm(*args)
        return run
    minicompile.reset()
    with contextlib.redirect_stdout(io.StringIO()):
        breaks = minicompile.explain(step, backend="eager")(x, weights, []).breaks
        if not breaks:
            minicompile.reset()
            out, total = minicompile.compile(step, backend=backend)(x, weights, log)
    return {"breaks": [f"{b.reason}: {b.source.strip()}" for b in breaks], **({} if breaks else {"graphs": graphs, "x": out, "total": total,
                                                                                                 "log": log})}


def run_graph(case, got):
    """Runs where no learner's code is: what the graph computes is seen, not claimed."""
    if len(got.get("graphs", ())) == 1:
        (positions, rows), = got["graphs"]
        inputs = step_inputs(case)
        got["graph"] = run_rows(rows, [inputs[i] for i in positions])
    return got


def same(a, b):
    return isinstance(a, torch.Tensor) and a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-3)


def one_graph(part):
    def check(case, got, expected):
        if got["breaks"]:
            return f"{len(got['breaks'])} graph breaks, the first: {got['breaks'][0]}"
        if len(got["graphs"]) != 1:
            return f"{len(got['graphs'])} graphs, not 1"
        for name in ("x", "total"):
            if not any(same(t, got[name]) for t in got["graph"]):
                return f"the graph does not compute {name}"
        if part == "log":
            return None if got["log"] == expected["log"] else f"the log is {got['log']}, not {expected['log']}"
        return None if same(got[part], expected[part]) else f"{part} is {got[part]}, not {expected[part]}"
    return check


for _points, _part in ((4, "x"), (3, "total"), (3, "log")):
    behaviour("no-breaks", points=_points, name=f"one graph, with the right {_part}", cases=step_cases, check=one_graph(_part),
              then=run_graph,
              show=lambda case: f"{case[1]} layers, inputs scaled by {case[2]}")(run_step)


# ---- resume-parameters -----------------------------------------------------------------------------------

task("resume-parameters", title="What a resume function needs", minutes=30, about="""\
After a graph break the rest of a function is a function of its own, made from the same bytecode. What are its parameters? Each one
has to be an output of the graph before the break, so nothing may be among them that is not read any more; and a variable that is
not set there cannot be passed. `needed_locals(code, offset)` are the names that the code from `offset` on may read.
`code.co_varnames` are the local variables in order, `co_cellvars` and `co_freevars` those that closures share: the resume function
gets their cells in another way. Generators and coroutines cannot be continued: `code.co_flags & SUSPENDS`.""",
     hints=[
    "Which variables of a function are read after a certain line? Which of them may have no value there?",
    "Go through code.co_varnames in order, and keep a name if it is needed, no cell, and bound. What if `bound` is None?",
    "Refuse first what cannot be continued. Then one walk over the local variables, in their order, with three conditions: read later, "
    "not shared with a closure, and set by now where `bound` can tell."])
RESUMED = """\
def straight(a, b, c):
    d = a + b
    print(d)
    return d * c

def loop(items, start):
    total = start
    for item in items:
        scaled = item * 2
        print(scaled)
        total = total + scaled
    return total

def shared(x, y):
    k = x + 1
    f = lambda z: z * k
    print(y)
    return f(y) + x

def branches(flag, a, b):
    if flag:
        only = a
    print(flag)
    return b if not flag else only

def captured(x, y):
    f = lambda z: z * x
    print(y)
    return f(y) + x + y

def yields(x):
    print(x)
    yield x
"""


def resumed_at(function, case):
    """The parameters for each offset at which a line begins."""
    name, bound = case
    code = program_file(RESUMED)[name].__code__
    return {offset: function(code, offset, bound) for offset, _, line in code.co_lines() if line is not None and offset >= 4}


def resumed_text(case):
    text = next(part for part in RESUMED.split("\n\n") if part.startswith(f"def {case[0]}("))
    return f"{text}\nbound: {'all that are read' if case[1] is None else sorted(case[1])}"


for _points, _name, _cases in ((3, "what is read later, in order", [("straight", None), ("loop", None)]),
                               (3, "what is set", [("branches", {"flag", "a", "b"}), ("branches", {"flag", "only", "b"}), ("straight",
                                                            {"c"}),
                                                   ("loop", set())]),
                               (3, "closures", [("shared", None), ("shared", {"x", "y", "k"}), ("captured", None)])):
    behaviour("resume-parameters", points=_points, name=_name, cases=lambda rng, cases=_cases: cases, show=resumed_text)(resumed_at)


@behaviour("resume-parameters", points=1, name="a generator is refused", show=lambda case: resumed_text(("yields", None)))
def refused(function, case):
    from minicompile.errors import Unsupported
    code = program_file(RESUMED)["yields"].__code__
    try:
        return function(code, 4, None)
    except Unsupported:
        return "Unsupported"


@behaviour("resume-parameters", points=2, name="programs with breaks", cases=lambda rng: ["straight", "loop", "shared", "branches"],
           show=lambda name: resumed_text((name, None)))
def broken(function, name):
    import minicompile
    minicompile.reset()
    x = torch.arange(3.0)
    args = {"straight": (x, x, x), "loop": ([x, x + 1, x + 2], x), "shared": (x, x + 1), "branches": (False, x, x * 2)}[name]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        result = minicompile.compile(program_file(RESUMED)[name], backend="eager")(*args)
    return result, len(said.getvalue().splitlines())
