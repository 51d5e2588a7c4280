"""Chapter 8: dependencies, fusion, memory."""
import sys
from unittest import mock

import torch
import torch.nn.functional as F

from .. import behaviour, task
from .kit import SOURCES, keep_sources, kernels_of, lowered, made_kernel, program_file, questions

F32, CPU = torch.float32, torch.device("cpu")

# ---- storage-size ----------------------------------------------------------------------------------------

task("storage-size", title="How much memory a layout spans", minutes=15, about="""\
Fusion is paid in bytes, so something has to count them. A buffer with strides spans memory from its first to its last addressed element;
that is more than its number of elements if it has gaps, and less if elements share memory. With dynamic shapes the answer is an
expression.""", hints=[
    "Which index has the last addressed element? What is its offset?",
    "The last index in each dim is size - 1, and its offset is a sum over the dims. First and last count both. An empty tensor has no "
    "last element.",
    "One question about the sizes (only an int can be known to be 0), then one loop that adds up. Sizes may be expressions, so multiply "
    "with `mul`."])


def spans(*pairs):
    return lambda rng: list(pairs)


def buffer_of(name, size, stride, alias=None):
    from minicompile.ch01_graphs.symbolic import Symbol
    from minicompile.ch07_loops.ir import Buffer, Layout
    size, stride = (tuple(Symbol(n).expr if isinstance(n, str) else n for n in side) for side in (size, stride))
    return Buffer(name, F32, CPU, Layout(size, stride), alias)


def random_spans(rng):
    return [(size, tuple(rng.randrange(0, 20) for _ in size)) for size in
            (tuple(rng.randrange(1, 6) for _ in range(rng.randrange(1, 5))) for _ in range(40))]


for _points, _name, _cases in ((2, "contiguous layouts", spans(((), ()), ((5,), (1,)), ((2, 3), (3, 1)), ((2, 3, 4), (12, 4, 1)))),
                               (2, "gaps and shared elements", spans(((2, 3), (10, 1)), ((3,), (4,)), ((4, 3), (0, 1)), ((3, 3), (1, 1)))),
                               (2, "empty tensors, and others without steps", spans(((0,), (1,)), ((2, 0, 3), (3, 3, 1)), ((1, 1), (9, 7)),
                                                                                    ((4,), (0,)))),
                               (2, "symbolic sizes", spans((("n",), (1,)), (("n", 4), (4, 1)), ((2, "n"), ("n", 1)))),
                               (2, "random layouts", random_spans)):
    @behaviour("storage-size", points=_points, name=_name, cases=_cases, show=lambda c: f"size {list(c[0])}, stride {list(c[1])}")
    def span(function, case):
        size = function(buffer_of("x", *case))
        return size if isinstance(size, int) else repr(size)


# ---- dependency-edges ------------------------------------------------------------------------------------

task("dependency-edges", title="Who has to run first", minutes=60, about="""\
Kernels may be reordered and fused as long as nothing observable changes. Three kinds of order must be kept: read after write, write after
read, and write after write. Names are written once, but memory is not: a buffer with `alias_of` is the memory of another one, updated.
Find for each step all steps that must run before it.""", hints=[
    "Who writes each name, and who reads it? Once you know that for all steps, what does one step have to wait for?",
    "A read waits for the writer of that name. A write to an alias waits for all readers and for the writer of the name below it, and "
    "of the name below that one, down the chain.",
    "Two tables: from a name to its writer, and from a name to its readers. Then for each step: the writers of what it reads, unless "
    "that is an input; for what it writes, a walk down the chain of `alias_of`, which takes the readers and the writer of every older "
    "name; and for a library call that `must_happen`, the one before it. No step waits for itself."])


def pure(*reads, writes, effect=False):
    return (reads, (writes,) if isinstance(writes, str) else writes, effect)


def random_steps(rng):
    aliases, steps = {}, []
    latest = {"x": "x", "y": "y"}
    for k in range(rng.randrange(3, 12)):
        current = sorted(latest.values())
        reads = tuple(rng.sample(current, min(len(current), rng.randrange(1, 3))))
        name = f"b{k}"
        if rng.random() < 0.4:
            root = rng.choice(list(latest))
            aliases[name], latest[root] = latest[root], name
        else:
            latest[name] = name
        steps.append((reads, (name,), rng.random() < 0.2))
    return steps, aliases


def steps_text(case):
    steps, aliases = case
    lines = [f"{k}: {', '.join(w + (' (= memory of ' + aliases[w] + ')' if w in aliases else '') for w in writes)} from {', '.join(reads)}"
             + (", random" if effect else "") for k, (reads, writes, effect) in enumerate(steps)]
    return "\n".join(lines)


READS = [([pure("x", writes="a"), pure("a", writes="b")], {}), ([pure("x", writes="a"), pure("x", writes="b"), pure("a", "b", writes="c")],
                                                                {}),
         ([pure("x", writes=("a", "b")), pure("b", writes="c"), pure("x", writes="d")], {})]
UPDATES = [([pure("x", writes="a"), pure("y", writes="x1")], {"x1": "x"}), ([pure("x", writes="x1"), pure("x1", writes="a"),
                                                                             pure("y", writes="x2")], {"x1": "x", "x2": "x1"}),
           ([pure("y", writes="a"), pure("y", writes="a1"), pure("y", writes="a2")], {"a1": "a", "a2": "a1"}),
           ([pure("x", writes="a"), pure("x", writes="x1"), pure("y", writes="x2"), pure("x2", writes="b")], {"x1": "x", "x2": "x1"})]
DRAWS = [([pure("x", writes="a", effect=True), pure("y", writes="b", effect=True)], {}),
         ([pure("x", writes="a", effect=True), pure("x", writes="b"), pure("y", writes="c", effect=True),
           pure("y", writes="d", effect=True)], {})]

for _points, _name, _cases in ((3, "read after write", lambda rng: READS), (4, "write after read, write after write", lambda rng: UPDATES),
                               (2, "random draws keep their order", lambda rng: DRAWS),
                               (3, "random programs", lambda rng: [random_steps(rng) for _ in range(40)])):
    @behaviour("dependency-edges", points=_points, name=_name, cases=_cases, show=steps_text)
    def edges(function, case):
        from minicompile.ch07_loops.ir import Extern, View
        steps, aliases = case
        names = {n for reads, writes, _ in steps for n in (*reads, *writes)} | set(aliases.values())
        buffers = {n: buffer_of(n, (4,), (1,), aliases.get(n)) for n in names}
        op = {True: torch.ops.aten.bernoulli.default, False: torch.ops.aten.sin.default}
        nodes = {k: Extern(f"e{k}", op[e], tuple(View(n, buffers[n].layout) for n in reads), {}, writes)
                 for k, (reads, writes, e) in enumerate(steps)}
        before = function(nodes, buffers)
        return {f"before step {k}": sorted(before[k]) for k in nodes}


# ---- fusion-score ----------------------------------------------------------------------------------------

task("fusion-score", title="What a fusion is worth", minutes=30, about="""\
The greedy fuser takes the pair first that saves the most bytes. A value that flows from a to b is not read again from memory; if nobody
else wants it, it is not even written. A buffer that both read is read once instead of twice, if they read it at the same elements. `flows`
and `common` are lists of names,
`b.members` the positions of the loops in b, and `a.reads[name]` the set of index expressions at which a reads a buffer.""", hints=[
    "For which buffers does fusing save a read, and for which the write as well? nbytes(f.buffers[n]) is the size of one.",
    "f.readers[n] are positions of loops, b.members are those inside b. Is there a reader outside of b? Then the write stays, and only "
    "the read is saved.",
    "Two loops that add up. What flows counts once or twice: is there a reader that is no member of b? What both read counts fully or "
    "half: do the two sets of indices have one in common?"])


def chain(x, y):
    return torch.relu(x + y).exp() * 2


def shared_value(x, y):
    s = (x + y).sin()
    return s.exp(), s.cos() * x, s.sum(0)


def normalised(x, y):
    return F.layer_norm(x * y, (8,)) + y


def transposed_read(x, y):
    return x + 1, x.t() * y.t(), x.sum(1), y.t().sum(1)


SCORED = {f.__name__: f for f in (chain, shared_value, normalised, transposed_read)}


keep_sources(*SCORED.values())


def fuser_of(name):
    from minicompile.ch08_fusion.dependencies import remove_dead
    from minicompile.ch08_fusion.groups import Fuser, FusionOptions
    program = lowered(SCORED[name], torch.randn(6, 8), torch.randn(6, 8), max_ops=1)
    return Fuser(program, remove_dead(program), FusionOptions())


def source_of(name):
    return SOURCES[name] + "# x, y: float32 [6, 8]; one loop for each operation"


def scored(name, wanted):
    @behaviour("fusion-score", points=3, name=name, cases=lambda rng: list(SCORED), show=source_of)
    def scores(function, case):
        from minicompile.ch08_fusion.fuse import shared_buffers
        f = fuser_of(case)
        found = {}
        for i in f.groups:
            for j in f.groups:
                flows, common = shared_buffers(f.groups[i], f.groups[j])
                flows, common = flows if "flows" in wanted else [], common if "common" in wanted else []
                if i < j and (flows or common):
                    found[f"{f.name(f.groups[i])} and {f.name(f.groups[j])}, flows {flows}, common {common}"] = \
                        function(f, f.groups[i], f.groups[j], flows, common)
        return found


scored("values that flow", "flows")
scored("buffers that both read", "common")


@behaviour("fusion-score", points=3, name="the scores of the decisions of the fuser, merged groups included",
           cases=lambda rng: list(SCORED), show=source_of)
def decided(function, case):
    from minicompile.ch08_fusion.fuse import fuse
    program = lowered(SCORED[case], torch.randn(6, 8), torch.randn(6, 8), max_ops=1)
    return {f"{d.a} and {d.b}": (d.score, d.accepted) for d in fuse(program).decisions}


# ---- fusion-hazard ---------------------------------------------------------------------------------------

task("fusion-hazard", title="When one kernel would be wrong", minutes=60, about="""\
A program that writes into a tensor gives its memory a second name: the buffer `x1` may be the memory of `x`, updated. As two kernels, one
loop that reads `x` and one that writes `x1` run one after the other. As one kernel their iterations run in any order and side by side, and
a read may find what another iteration has just written. Say why two groups of loops must not become one kernel, or None. Groups over
memory that nobody updates are never in danger: names are written once.""", hints=[
    "Take each buffer that one group writes, and each that the other reads or writes. When are two names the same memory? When is it sure "
    "that an element is read and written by the same iteration?",
    "Both directions count: (a, b) and (b, a). Indices can be compared only in the variables of the common nest: apply(index, alignment.a) "
    "for a's, apply(index, alignment.b) for b's.",
    "For each write of memory in f.aliased: another write to the memory is fine only if neither is scattered and disjoint(...) says so. A "
    "read: refuse if the write is scattered or the read guarded; if one of the groups reduces and another name is read in y.wide_reads or "
    "_is_wide(y, x); and if any index of the read differs from that of the write."])


def access_loop(reads, target, at="i", *, mode=None, mask=False, reduce=False, over="i"):
    """A loop as data. reads: (buffer, index); indices are "i", "i+1", "8i+r" and the like; over: its variables, of "i", "j", "ij", "ir"."""
    return reads, target, at, mode, mask, reduce, over


def access_program(case):
    """A program of two loops, and the fuser that has them as two groups."""
    from minicompile.ch01_graphs.symbolic import Symbol
    from minicompile.ch07_loops.ir import Buffer, Layout, Loop, Program, Values
    from minicompile.ch08_fusion.groups import Fuser, FusionOptions
    loops, aliases = case
    nodes, names = [], set(aliases) | set(aliases.values())
    for n, (reads, target, at, mode, mask, reduce, over) in enumerate(loops):
        i, j, r = Symbol("i0", 8), Symbol("i1", 4), Symbol("r0", 4)
        place = {"i": i.expr, "i+1": i.expr + 1, "i+8": i.expr + 8, "7-i": i.expr * -1 + 7, "0": 0,
                 "2i": i.expr * 2, "2i+1": i.expr * 2 + 1, "4i+r": i.expr * 4 + r.expr, "4i+j": i.expr * 4 + j.expr,
                 "8j+i": j.expr * 8 + i.expr}
        body = Values()
        condition = body.make("lt", (body.make("index", (i.expr,), torch.int64), body.make("constant", (5,), torch.int64)), torch.bool)
        values = [body.make("load", (buffer, place[index], condition if masked else None), F32) for buffer, index, *masked in reads]
        value = values[0]
        for other in values[1:]:
            value = body.make("add", (value, other), F32)
        if reduce:
            value = body.make("reduce", ("sum", value, None), F32)
        body.write(target, place[at], condition if mask else None, value, mode)
        nodes.append(Loop(f"loop{n}", (i, j) if "j" in over else (i,), (r,) if "r" in over else (), tuple(body.stores)))
        names |= {target, *(b for b, *_ in reads)}
    buffers = {n: Buffer(n, F32, CPU, Layout((64,), (1,)), aliases.get(n)) for n in sorted(names)}
    written = {loop[1] for loop in loops}
    return Fuser(Program([n for n in sorted(names) if n not in written], buffers, nodes, []), nodes, FusionOptions())


def access_text(case):
    loops, aliases = case
    lines = [f"{new} is the memory of {old}, updated" for new, old in aliases.items()]
    for reads, target, at, mode, mask, reduce, over in loops:
        text = " + ".join(f"{b}[{i}]" + (" where i < 5" if m else "") for b, i, *m in reads)
        lines.append(f"for {', '.join(over)}: {target}[{at}] = " + (f"sum over r of {text}" if reduce else text)
                     + (f", mode {mode}" if mode else "") + (", where i < 5" if mask else ""))
    return "\n".join(lines)


def refused(function, case):
    """Whether the two groups may not be one kernel, in either order, in a common nest that exists."""
    from minicompile.ch08_fusion.alignment import find_alignment
    from minicompile.ch08_fusion.fuse import shared_buffers
    f = access_program(case)
    a, b = f.groups[0], f.groups[1]
    found = {}
    for name, x, y in (("first, second", a, b), ("second, first", b, a)):
        flows, common = shared_buffers(x, y)
        alignment = find_alignment(x, y, flows + common)
        if isinstance(alignment, str):
            raise ValueError(alignment)
        found[name] = "refused" if function(f, x, y, alignment) is not None else "may be fused"
    return found


def pairs(*cases):
    return lambda rng: [((one, two), aliases) for one, two, aliases in cases]


X1 = {"x1": "x"}
L = access_loop
UPDATED = pairs((L([("x", "i")], "a"), L([("y", "i")], "x1"), X1), (L([("x", "i+1")], "a"), L([("y", "i")], "x1"), X1),
                (L([("x", "i"), ("x", "i+1")], "a"), L([("y", "i")], "x1"), X1), (L([("x", "7-i")], "a"), L([("y", "i")], "x1"), X1),
                (L([("x", "0")], "a"), L([("x", "i")], "x1"), X1), (L([("x", "i+1")], "a"), L([("y", "i")], "b"), {}),
                (L([("y", "i")], "x1"), L([("x1", "i")], "a"), X1), (L([("x", "i+1")], "a"), L([("y", "i")], "z1"), {"z1": "z"}),
                (L([("x", "i")], "x1"), L([("x1", "i")], "x2"), {"x1": "x", "x2": "x1"}))
WRITTEN = pairs((L([("y", "i")], "x1"), L([("z", "i")], "x2"), {"x1": "x", "x2": "x1"}),
                (L([("y", "i")], "x1"), L([("z", "i")], "x2", "i+8"), {"x1": "x", "x2": "x1"}),
                (L([("y", "i")], "x1", "2i"), L([("z", "i")], "x2", "2i+1"), {"x1": "x", "x2": "x1"}),
                (L([("y", "i")], "x1"), L([("z", "i")], "x2", "i+1"), {"x1": "x", "x2": "x1"}),
                (L([("y", "i")], "x1"), L([("z", "i")], "y1"), {"x1": "x", "y1": "w"}),
                (L([("y", "i")], "x1", mode="atomic_add"), L([("z", "i")], "x2", "i+8"), {"x1": "x", "x2": "x1"}))
COMPUTED = pairs((L([("x", "i")], "a"), L([("y", "i")], "x1", mode="atomic_add"), X1),
                 (L([("x", "i", True)], "a"), L([("y", "i")], "x1"), X1), (L([("x", "i")], "a"), L([("y", "i")], "x1", mask=True), X1),
                 (L([("z", "i", True)], "a"), L([("y", "i")], "x1"), X1),
                 (L([("z", "i")], "a"), L([("y", "i")], "x1", mode="atomic_add"), X1),
                 (L([("x", "i"), ("z", "i", True)], "a"), L([("y", "i")], "x1"), X1),
                 (L([("x", "i")], "a"), L([("y", "i"), ("a", "i", True)], "x1"), X1))
WALKED = pairs((L([("x", "4i+r")], "a", reduce=True, over="ir"), L([("y", "4i+j"), ("a", "i")], "x1", "4i+j", over="ij"), X1),
               (L([("y", "4i+r")], "a", reduce=True, over="ir"), L([("x", "4i+j"), ("a", "i")], "x1", "4i+j", over="ij"), X1),
               (L([("x", "4i+j")], "b", "4i+j", over="ij"), L([("y", "4i+r")], "x1", "i", reduce=True, over="ir"), X1),
               (L([("z", "4i+r"), ("x", "i")], "a", reduce=True, over="ir"), L([("y", "i")], "x1"), X1),
               (L([("z", "4i+r")], "a", reduce=True, over="ir"), L([("x", "i"), ("a", "i")], "x1"), X1),
               (L([("y", "i")], "x1"), L([("x1", "i"), ("z", "4i+r")], "a", reduce=True, over="ir"), X1),
               (L([("x", "i")], "b"), L([("b", "i"), ("z", "4i+r")], "x1", "i", reduce=True, over="ir"), X1),
               (L([("x", "i"), ("z", "4i+j")], "b", "4i+j", over="ij"), L([("z", "4i+r")], "x1", "i", reduce=True, over="ir"), X1))
TURNED = pairs((L([("y", "4i+j")], "a", "4i+j", over="ij"), L([("x", "4i+j"), ("a", "4i+j")], "x1", "4i+j", over="ij"), X1),
               (L([("x", "4i+j"), ("y", "4i+j")], "a", "4i+j", over="ij"), L([("y", "8j+i")], "x1", "8j+i", over="ij"), X1),
               (L([("x", "8j+i"), ("y", "4i+j")], "a", "4i+j", over="ij"), L([("y", "4i+j")], "x1", "4i+j", over="ij"), X1),
               (L([("x", "8j+i"), ("y", "8j+i")], "a", "8j+i", over="ij"), L([("y", "4i+j")], "x1", "4i+j", over="ij"), X1))
for _points, _name, _cases in ((3, "reads of updated memory", UPDATED), (2, "two updates of one memory", WRITTEN),
                               (2, "computed positions", COMPUTED), (3, "memory that is walked twice", WALKED),
                               (2, "nests that had to be aligned", TURNED)):
    behaviour("fusion-hazard", points=_points, name=_name, cases=_cases, show=access_text)(refused)


# ---- overwrites-safely -----------------------------------------------------------------------------------

task("overwrites-safely", title="May y be written over x?", minutes=60, about="""\
If x dies in a kernel, y may take over its memory, and the program needs less of it: unless some element of x is read after y has been
written there. Elements run in any order, so each has to be read at the very index at which y is written, by the same iteration. A mistake
here is a wrong answer that depends on timing: the worst kind.""", hints=[
    "Which reads of old could still come when an element of new has been written? Think of other iterations, of later loops, and of a "
    "second walk along the row.",
    "Go through each of orders_of(kernel), loop by loop, with their `loads` and `stores`. Remember all reads of old, and where new is "
    "written. After the loop that writes new, none may read old; if the kernel has reduction variables, none may read anything that "
    "depends on old.",
    "A set of buffers that depend on old grows: a loop that reads one of them adds what it writes. A write of new that is masked or has "
    "a mode decides at once. At the end every remembered read is compared with the write: the same index, and no mask. And if nothing "
    "was written, or another name has the same memory?"])


def op_loop(sources, target, at="i", mode=None, mask=False, reduce=False):
    """Loads (buffer, index) pairs, adds them up, stores. Indices: "i", "i+1", "2i", "0"."""
    return sources, target, at, mode, mask, reduce


def make_kernel(loops, reduces):
    from minicompile.ch01_graphs.symbolic import Symbol
    from minicompile.ch07_loops.ir import Loop, Values
    i, r = Symbol("i0", 8), Symbol("r0", 4)
    place = {"i": i.expr, "i+1": i.expr + 1, "2i": i.expr * 2, "0": 0, "r": i.expr * 4 + r.expr}
    made = []
    for n, (sources, target, at, mode, mask, reduce) in enumerate(loops):
        body = Values()
        hidden = body.make("constant", (True,), torch.bool)
        value, *others = [body.make("load", (buffer, place[index], hidden if masked else None), F32) for buffer, index, *masked in sources]
        for other in others:
            value = body.make("add", (value, other), F32)
        if reduce:
            value = body.make("reduce", ("sum", value, None), F32)
        body.write(target, place[at], hidden if mask else None, value, mode)
        made.append(Loop(f"loop{n}", (i,), (r,) if reduces else (), tuple(body.stores)))
    return made_kernel("kernel", made, (i,), (r,) if reduces else ())


def kernel_text(case):
    loops, reduces, same = case
    lines = [("reduction kernel" if reduces else "pointwise kernel") + (f"; names of x's memory: {sorted(same)}" if same else "")]
    for sources, target, at, mode, mask, reduce in loops:
        reads = " + ".join(f"{b}[{i}]" + (" masked" if m else "") for b, i, *m in sources)
        lines.append(f"  {target}[{at}] = " + (f"sum({reads})" if reduce else reads) + (f"  mode {mode}" if mode else "")
                     + (", masked" if mask else ""))
    return "\n".join(lines)


def kernels(*cases):
    return lambda rng: [(loops, reduces, frozenset(same)) for loops, reduces, same in cases]


ONE = kernels(([op_loop([("x", "i")], "y")], False, ()), ([op_loop([("x", "i"), ("z", "i+1")], "y")], False, ()),
              ([op_loop([("x", "i+1")], "y")], False, ()),
              ([op_loop([("x", "0")], "y")], False, ()), ([op_loop([("x", "2i")], "y", "2i")], False, ()),
              ([op_loop([("x", "i"), ("x", "i+1")], "y")], False, ()),
              ([op_loop([("z", "i")], "y")], False, ()), ([op_loop([("x", "i")], "t")], False, ()),
              ([op_loop([("z", "i")], "t")], False, ()))
MODES = kernels(([op_loop([("x", "i")], "y", mode="atomic_add")], False, ()), ([op_loop([("x", "i")], "y", mask=True)], False, ()),
                ([op_loop([("x", "i", True)], "y")], False, ()), ([op_loop([("x", "i"), ("z", "i", True)], "y")], False, ()),
                ([op_loop([("x", "i")], "y")], False, ("x",)), ([op_loop([("x", "i")], "y")], False, ("x", "x1")))
LATER = kernels(([op_loop([("x", "i")], "t"), op_loop([("t", "i")], "y")], False, ()),
                ([op_loop([("x", "i")], "y"), op_loop([("y", "i")], "t")], False, ()),
                ([op_loop([("x", "i")], "y"), op_loop([("x", "i")], "t")], False, ()),
                ([op_loop([("x", "i+1")], "t"), op_loop([("t", "i")], "y")], False, ()),
                ([op_loop([("x", "i")], "t"), op_loop([("z", "i")], "y"), op_loop([("t", "i")], "u")], False, ()))
ROWS = kernels(([op_loop([("x", "r")], "y", "r")], True, ()), ([op_loop([("x", "r")], "s", reduce=True), op_loop([("x", "r"), ("s", "i")],
    "y", "r")], True, ()),
               ([op_loop([("x", "r")], "y", "r"), op_loop([("x", "r")], "s", reduce=True)], True, ()),
               ([op_loop([("x", "r")], "y", "r"), op_loop([("y", "r")], "s", reduce=True)], True, ()),
               ([op_loop([("x", "r")], "t", "r"), op_loop([("z", "r")], "y", "r"), op_loop([("t", "r")], "s", reduce=True)], True, ()),
               ([op_loop([("x", "r")], "t", "r"), op_loop([("t", "r")], "u", "r"), op_loop([("x", "r")], "y", "r"),
                 op_loop([("u", "r")], "s", reduce=True)], True, ()),
               ([op_loop([("x", "r")], "y", "r"), op_loop([("z", "r")], "s", reduce=True)], True, ()),
               ([op_loop([("x", "r")], "t", "r"), op_loop([("t", "r")], "s", reduce=True), op_loop([("t", "r"), ("s", "i")], "u", "r"),
                 op_loop([("t", "r")], "y", "r")], True, ()),
               ([op_loop([("x", "r")], "s", reduce=True), op_loop([("s", "i"), ("x", "r")], "y", "r"),
                 op_loop([("x", "r")], "u", "r")], True, ()))


def random_kernels(rng):
    found = []
    for _ in range(60):
        reduces, target = rng.random() < 0.4, rng.randrange(3)
        place = "r" if reduces else "i"
        loops = []
        for k in range(3):
            sources = [(rng.choice(["x", "z", "t0", "t1", "y"][:3 + k]),
                        place if rng.random() < 0.9 else "i+1") for _ in range(rng.randrange(1, 3))]
            loops.append(op_loop(sources, "y" if k == target else f"t{k}", place))
        found.append((loops, reduces, frozenset()))
    return found


for _points, _name, _cases in ((3, "one loop: read at the index of the write", ONE), (2, "masks, modes, and other names of the memory",
                                                                                      MODES),
                               (3, "several loops", LATER), (4, "reduction kernels walk their rows again", ROWS),
                               (2, "random kernels", random_kernels)):
    @behaviour("overwrites-safely", points=_points, name=_name, cases=_cases, show=kernel_text)
    def overwrites(function, case):
        loops, reduces, same = case
        return {kernel_text(case) + "\ny over x is safe": bool(function(make_kernel(loops, reduces), "x", "y", set(same)))}


# ---- predict-kernels -------------------------------------------------------------------------------------

FUSED = '''\
import torch
import torch.nn.functional as F


def chain(x, w):
    return torch.relu(torch.sin(x) * 2 + w).exp()


def softmax(x, w):
    return torch.softmax(x * w, -1)


def two_axes(x, w):
    return x.sum(0), x.sum(1)


def around_a_product(x, w):
    return torch.relu((x + 1) @ w).sum(1)


def layer_norm_and_back(x, w):
    y = F.layer_norm(x, (64,))
    return y * w, y.sum(1)


def strangers(x, w):
    return x + 1, w[:32] * 2


def neighbours(x, w):
    return x + 1, x.cos(), w * x

'''
FUSING = ("chain", "softmax", "two_axes", "around_a_product", "layer_norm_and_back", "strangers", "neighbours")

task("predict-kernels", title="How many kernels?", minutes=25, kind="predict", about="""\
x and w are float32 [64, 64]. How many kernels does each function become after fusion, on a CPU with one thread? Library calls, such as a
matrix product, do not count.""", starter=FUSED + questions(**{n.upper(): f"kernels of {n}(x, w)" for n in FUSING}), hints=[
    "What do two loops have to share to be worth one kernel, and what to be able to become one?",
    "Loops fuse if one reads what the other wrote, at the same index, or if both read the same elements, and if their iteration spaces "
    "agree. A library call cannot be inside of a kernel: what comes before and what comes after it are apart. A pointwise loop over "
    "[64, 64] fits a reduction of the rows of [64, 64]; two reductions along different axes do not fit each other.",
    "fuse(program).decisions names each pair with its reason. Ask for the one that you doubt."])


def kernel_count(name) -> tuple:
    from minicompile.ch08_fusion.fuse import fuse
    schedule = fuse(lowered(program_file(FUSED)[name], torch.randn(64, 64), torch.randn(64, 64)))
    record = [f"{d.a} and {d.b}: {'fused' if d.accepted else 'not fused'}, {d.reason}" for d in schedule.decisions]
    made = [f"{k.name}: " + ", ".join(loop.name for loop in k.loops) for k in kernels_of(schedule)]
    record = ["Pairs that share data:", *(record or ["none"])], ["What became of the loops:", *made]
    return len(made), "\n".join("\n  ".join(lines) for lines in record)


for _name in FUSING:
    @behaviour("predict-kernels", points=1 + (_name in ("two_axes", "layer_norm_and_back")), name=_name, answer=_name.upper())
    def _(name=_name):
        return kernel_count(name)


# ---- fewer-kernels ---------------------------------------------------------------------------------------

NAIVE_PAIRS = '''\
from minicompile.ch08_fusion.groups import Fuser


def candidate_pairs(f: Fuser) -> set[tuple[int, int]]:
    """Pairs of ids of groups (smaller first) for the fuser to try. f.groups[i].space is None for a library
    call, which does not fuse."""
    loops = [i for i, g in f.groups.items() if g.space]
    return {(i, j) for i in loops for j in loops if i < j}
'''

task("fewer-kernels", title="Look for partners in the right places", minutes=75, kind="target", function="candidate_pairs",
     starter=NAIVE_PAIRS, seconds=30, about="""\
The fuser only tries the pairs that this function proposes. The version here proposes all pairs. That finds
everything, but three thousand loops have four million pairs. Reach the kernel counts of the book with at most twice as many pairs as it
proposes.""", hints=[
    "Loops are worth fusing if they share memory. Who shares a buffer, if f.writer[name] is the loop that writes it, and "
    "f.readers[name] are those that read it?",
    "Propose each writer with each of its readers, and readers of one buffer with each other, but of those only the next few in the "
    "order of the program with the same number of elements. Leave out library calls.",
    "Group the readers of a buffer by the number of elements of their nest, once with the reduced variables and once without, and pair "
    "each with only a few of those that follow it in the program. An update in place (buffers[n].alias_of) shares no name with the "
    "readers of the old contents: which pairs does it need?"])


def fan(x, w):
    """Readers of one buffer, with others in between."""
    out = []
    for k in range(6):
        out += [x + k, w.sin() * k, (x * k).sum(1)]
    return out


def blocks(x, w):
    for _ in range(3):
        h = F.layer_norm(x, (64,)) @ w
        x = x + F.gelu(h) * torch.softmax(h, -1)
    return x


def branches(x, w):
    """Two programs of different sizes in turns."""
    left, right = [x], [w]
    for k in range(5):
        left.append(torch.relu(left[-1] * 2 + k))
        right.append(torch.sin(right[-1]) - k)
    return left[1:] + right[1:] + [left[-1].sum(0), right[-1].sum(0)]


WIDE = {f.__name__: f for f in (fan, blocks, branches)}


keep_sources(*WIDE.values())


def fuser_for_pairs(case):
    from minicompile.ch08_fusion.dependencies import remove_dead
    from minicompile.ch08_fusion.groups import Fuser, FusionOptions
    program = lowered(WIDE[case], torch.randn(32, 64), torch.randn(64, 64) if case == "blocks" else torch.randn(48, 16), max_ops=1)
    return program, Fuser(program, remove_dead(program), FusionOptions())


def proposed_pairs(function, case):
    return set(function(fuser_for_pairs(case)[1]))


def kernels_from(case, pairs):
    """Runs where no learner's code is: what the pairs lead to is counted, not claimed."""
    program, fuser = fuser_for_pairs(case)
    module = sys.modules["minicompile.ch08_fusion.fuse"]
    with mock.patch.object(module, "candidate_pairs", lambda f: pairs):
        return {"pairs": len(pairs), "steps": len(fuser.groups), "kernels": len(kernels_of(module.fuse(program)))}


def few_enough(case, got, expected):
    if got["pairs"] > 2 * expected["pairs"]:
        return f"{got['pairs']} pairs for {got['steps']} loops and library calls; {2 * expected['pairs']} are allowed"
    return f"{got['kernels']} kernels; {expected['kernels']} are possible" if got["kernels"] > expected["kernels"] else None


for _points, _name in ((3, "fan"), (4, "blocks"), (3, "branches")):
    def show_source(case):
        return SOURCES[case]
    behaviour("fewer-kernels", points=_points, name=f"kernels and pairs of {_name}", cases=lambda rng, name=_name: [name], check=few_enough,
              then=kernels_from, show=show_source)(proposed_pairs)
