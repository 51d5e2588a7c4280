"""Chapter 7: loops, index maps, layouts."""
import math

import torch

from .. import behaviour, task
from .kit import lowered, operand, program_file, questions, run_program

# ---- broadcast-index -------------------------------------------------------------------------------------

task("broadcast-index", title="Broadcasting is an index map", minutes=15, about="""\
The body of a loop computes one element of the result, at an index. Which element of a smaller operand does it read? Write the map that
broadcasting means. Nothing is copied or expanded: the loop reads the same element again.""", hints=[
    "Broadcasting aligns the dims on the right. How many dims of the result does the operand not have?",
    "Drop the first len(index) - len(x.size) entries of the index. Where the operand has size 1, it reads at 0.",
    "The result has one entry for each dim of x. Pair the sizes of x with those entries of the index that are left, in order: there are "
    "two cases."])


def index_names(rng, sizes):
    return [(size, tuple(f"i{d}" for d in range(rank))) for size, rank in sizes]


for _points, _name, _sizes in ((2, "as many dims", [((3,), 1), ((2, 3), 2), ((2, 3, 4), 3)]), (2, "fewer dims: aligned right",
    [((), 2), ((3,), 2), ((2, 3), 4)]),
                               (2, "dims of size 1", [((1,), 1), ((1, 3), 2), ((3, 1), 2), ((1, 1), 3), ((2, 1, 3), 4)])):
    @behaviour("broadcast-index", points=_points, name=_name, cases=lambda rng, sizes=_sizes: index_names(rng, sizes),
               show=lambda c: f"operand of size {list(c[0])}, index ({', '.join(c[1])})")
    def mapped(function, case):
        return function(operand(case[0]), case[1])


def add_row(x, y):
    return x + y


@behaviour("broadcast-index", points=2, name="sums of random shapes in the loop IR",
           cases=lambda rng: [random_shapes(rng) for _ in range(12)],
           show=lambda c: f"x + y with x: {list(c[0])}, y: {list(c[1])}")
def broadcast_sum(function, case):
    x, y = (torch.arange(float(math.prod(s))).reshape(s) * k for s, k in zip(case, (1, 100)))
    return run_program(lowered(add_row, x, y), [x, y])


def random_shapes(rng):
    full = [rng.randrange(1, 4) for _ in range(rng.randrange(1, 4))]
    def cut():
        return tuple(n if rng.random() < 0.6 else 1 for n in full[rng.randrange(len(full)):])
    return cut(), cut()


# ---- dim-groups ------------------------------------------------------------------------------------------

task("dim-groups", title="A reshape in small pieces", minutes=45, about="""\
Going through the flat position, a reshape always works, but leaves divisions in every index of the kernel. Most reshapes only split or
merge neighbouring dims: [8, 12, 64] -> [96, 8, 8] is [8, 12] -> [96] and [64] -> [8, 8]. Find these pieces,
as small as possible.""", hints=[
    "What has to be true of the products of two pieces that belong together? Which side has to grow while it is not?",
    "Keep two positions and two products. A group begins with one dim from each side; while the products differ, the side with the "
    "smaller one takes its next dim. Mind what is left at the end: dims of size 1.",
    "A symbolic size can be compared for equality, but not with <: so instead of asking which product is smaller, try pairs of ends, the "
    "nearest first. A pair is right if the products since the begin of the group are equal, or those of all that follows."])


def reshapes(*pairs):
    return lambda rng: list(pairs)


def random_reshapes(rng):
    def factors(primes):
        out = []
        for p in primes:
            if out and rng.random() < 0.4:
                out[-1] *= p
            else:
                out.append(p)
            if rng.random() < 0.15:
                out.append(1)
        return tuple(out)
    found = []
    for _ in range(60):
        primes = [rng.choice([2, 3, 5]) for _ in range(rng.randrange(0, 6))]
        found.append((factors(primes), factors(primes)))
    return found


def sizes(case):
    from minicompile.ch01_graphs.symbolic import Symbol
    return [tuple(Symbol(n).expr if isinstance(n, str) else n for n in side) for side in case]


def grouped(function, case):
    return [(list(left), list(right)) for left, right in function(*sizes(case))]


def groups_are_right(case, got, expected):
    old, new = case
    if [i for left, _ in got for i in left] != list(range(len(old))) or [j for _, right in got for j in right] != list(range(len(new))):
        return f"the groups are {got}, and do not have every dim once and in order"
    if any(isinstance(n, str) for side in case for n in side):
        return None if got == expected else f"the groups are {got}, not {expected}"
    products = [(math.prod(old[i] for i in left), math.prod(new[j] for j in right)) for left, right in got]
    for (left, right), (a, b) in zip(got, products):
        if a != b:
            return f"the group {left} -> {right} has {a} elements on the left and {b} on the right"
    if sum(a != 1 for a, _ in products) != sum(math.prod(old[i] for i in left) != 1 for left, _ in expected):
        return f"the groups are {got}; smaller ones are {expected}"
    return None


for _points, _name, _cases in (
        (3, "split and merge", reshapes(((6,), (2, 3)), ((2, 3), (6,)), ((8, 12, 64), (96, 8, 8)), ((2, 3), (2, 3)), ((4, 3), (2, 6)))),
        (3, "dims of size 1, and no dims", reshapes(((), ()), ((1,), ()), ((), (1, 1)), ((2, 1), (2,)), ((1, 6), (2, 3, 1)),
                                                    ((3, 1, 2), (3, 2)))),
        (2, "symbolic sizes", reshapes((("n", 4), ("n", 2, 2)), (("n", 2), ("m",)), ((2, "n"), ("n", 2)), (("n",), ("n", 1)),
                                       (("n", 4), (4, "n")))),
        (3, "random reshapes", random_reshapes)):
    behaviour("dim-groups", points=_points, name=_name, cases=_cases, show=lambda c: f"old {list(c[0])}, new {list(c[1])}",
              check=groups_are_right)(grouped)


# ---- reshape-layout --------------------------------------------------------------------------------------

task("reshape-layout", title="When a reshape needs no copy", minutes=50, about="""\
`x.view(...)` of a tensor that is not contiguous works sometimes. A library call or an output needs strides, so the compiler has to know
when. Group by group: the old dims of a group have to lie evenly in memory, each stride the next one times its size. Then the new dims
divide that piece.""", hints=[
    "When do two neighbouring dims of a group lie in memory as if they were one dim? Which dims have strides that mean nothing?",
    "Leave old dims of size 1 out. Of two neighbours, the outer stride has to be the inner stride times the inner size; where it is "
    "not, a copy is needed. A group that lies evenly has a step: the stride of its last dim.",
    "For each group: compare the old dims pair by pair, find the step (what is it if no dim is left?), and give the new dims the "
    "strides of a contiguous piece of their sizes (`contiguous_strides`), times the step. Groups name positions, so write into a list "
    "of strides for all dims. The offset stays."])


def strided(rng):
    found = []
    for _ in range(80):
        old, new = random_reshapes(rng)[0]
        stride, running = [], 1
        for n in reversed(old):
            stride.insert(0, running if n != 1 or rng.random() < 0.5 else rng.randrange(1, 50))
            running *= n * (1 if rng.random() < 0.8 else 2)
        if rng.random() < 0.3 and len(old) > 1:
            order = rng.sample(range(len(old)), len(old))
            stride = [stride[d] for d in order]
        found.append((old, tuple(stride), new, rng.randrange(3)))
    return found


def relaid(function, case):
    from minicompile.ch07_loops.ir import Layout
    from minicompile.ch07_loops.views import dim_groups
    old, stride, new, offset = case
    layout = function(Layout(old, stride, offset), new, dim_groups(old, new))
    if layout is None:
        return "needs a copy"
    return {"size": tuple(layout.size), "stride, None for size 1": tuple(None if n == 1 else s for n, s in zip(layout.size, layout.stride)),
            "offset": layout.offset}


def layout_text(case):
    old, stride, new, offset = case
    return f"size {list(old)}, stride {list(stride)}, offset {offset} as {list(new)}"


for _points, _name, _cases in (
        (2, "splitting a dim always works", reshapes(((6,), (1,), (2, 3), 0), ((6,), (5,), (2, 3), 1), ((4, 6), (1, 4), (2, 2, 3, 2), 0))),
        (3, "merging dims only if they lie evenly", reshapes(((2, 3), (3, 1), (6,), 2), ((2, 3), (4, 1), (6,), 0),
                                                             ((2, 3), (1, 2), (6,), 0), ((2, 3), (6, 2), (6,), 0),
                                                             ((2, 2, 3), (9, 3, 1), (4, 3), 0), ((2, 2, 3), (6, 3, 1), (2, 6), 0))),
        (2, "dims of size 1 have no say", reshapes(((2, 1, 3), (3, 77, 1), (6,), 0), ((1,), (9,), (), 4), ((1, 4), (50, 2), (2, 2), 0),
                                                   ((2, 3, 1), (3, 1, 8), (6,), 0))),
        (3, "random strides", strided)):
    behaviour("reshape-layout", points=_points, name=_name, cases=_cases, show=layout_text)(relaid)


# ---- reduction-loop --------------------------------------------------------------------------------------

task("reduction-loop", title="Lower a reduction", minutes=45, about="""\
Lowering an operator means writing down how one element of its result is computed, and for which elements. A reduction has two kinds of
variables: those of the result, and those along which many elements become one. All reductions of the compiler, from a sum to a variance,
are loops that this function emits; what differs is only `finish`. The order of the variables matters, as that of loops in C does: the
last one runs fastest, and should walk along memory.""", hints=[
    "For each dim of x there is either a variable of the result or one of the reduction. Which index reads x, and which one writes the "
    "result?",
    "make_vars(prefix, sizes, order) makes variables, slowest first, and gives one index for each size. For the result the order is "
    "that of its strides, present_order(sizes, strides[0]). For the reduced dims it is that of x in memory: present_order(x.size, "
    "x.stride), without those that are kept.",
    "Split the dims into kept and folded, and order each as the text says; `make_vars` gives variables and an index for both, which "
    "together make one index into x. With a `Builder`, read every one of xs there; the position among the folded is `linear` with the "
    "strides of a contiguous tensor of their sizes; store what `finish` gives at the index of the kept dims, by each result's own "
    "strides. `emit_loop` also asks what was read: the union of `footprint(x)[0]`."])


def reduced_program(case):
    what, size, order, dims = case
    x = torch.arange(float(math.prod(size))).mul(1.7).sin().reshape(size).permute(order)
    functions = {"sum": lambda x: x.sum(dims), "sum in blocks": lambda x: x.sum(dims),
                 "sum of products": lambda x: (x * x.flip(0)).sum(dims),
                 "keepdim": lambda x: x.amax(dims, True),
                 "argmax": lambda x: x.argmax(dims[0]), "var_mean": lambda x: torch.var_mean(x, dims),
                 "any": lambda x: (x > 0.99).any(dims[0])}
    return functions[what], x


def reduced_text(case):
    what, size, order, dims = case
    return f"{what} over dims {list(dims)} of float32 {list(size)} permuted by {list(order)}"


def reduced_values(function, case):
    fn, x = reduced_program(case)
    return run_program(lowered(fn, x), [x])


def reduced_nest(function, case):
    """How far apart the elements are that neighbouring iterations read and write."""
    from minicompile.ch01_graphs.symbolic import coefficient
    fn, x = reduced_program(case)
    found = {}
    for loop in lowered(fn, x, threads=4 if case[0] == "sum in blocks" else 1).nodes:
        steps = [(str(a.buffer), a.index) for a in (*loop.loads, *loop.stores)]
        for kind, variables in (("kept", loop.vars), ("reduced", loop.reduction_vars)):
            found[f"{loop.name}, {kind}, slowest first"] = [
                {"size": v.size, **{name: coefficient(index, v) if not isinstance(index, int) else 0 for name, index in steps}}
                for v in variables]
    return found


PERMUTED = [("sum", (4, 6), (0, 1), (1,)), ("sum", (4, 6), (1, 0), (1,)), ("sum", (3, 4, 5), (0, 1, 2), (0, 2)),
            ("sum", (3, 4, 5), (2, 0, 1), (0, 1)), ("sum", (3, 4, 5), (1, 2, 0), (2, 0)), ("sum", (3, 4, 5), (2, 1, 0), (1,)),
            ("keepdim", (2, 3, 4, 5), (3, 1, 0, 2), (1,)), ("sum", (2, 3, 4, 5), (3, 1, 0, 2), (1, 3)),
            ("sum in blocks", (4096, 64), (1, 0), (1,)), ("sum in blocks", (4096, 64), (0, 1), (0,))]
for _points, _name, _cases, _observe in (
        (3, "sums of rows, columns, and both", [("sum", (4, 6), (0, 1), d) for d in ((0,), (1,), (0, 1))] + [
            ("sum of products", (3, 4, 5), (0, 1, 2), d) for d in ((1,), (0, 2), (0, 1, 2))], reduced_values),
        (3, "the last variable walks along memory", PERMUTED, reduced_nest),
        (3, "positions, and several results", [("argmax", (4, 6), (0, 1), (0,)), ("argmax", (3, 4, 5), (2, 0, 1), (1,)),
                                               ("var_mean", (4, 6), (0, 1), (1,)), ("var_mean", (3, 4, 5), (1, 2, 0), (0, 2)),
                                               ("any", (4, 6), (1, 0), (1,))], reduced_values),
        (2, "dims that stay, dims of size 1", [("keepdim", (4, 6), (0, 1), (1,)), ("keepdim", (3, 1, 5), (2, 0, 1), (2, 0)),
                                               ("sum", (1, 4, 1), (0, 1, 2), (0,)), ("sum", (1, 4, 1), (2, 1, 0), (0, 1))],
         reduced_values)):
    behaviour("reduction-loop", points=_points, name=_name, cases=lambda rng, cases=_cases: cases, show=reduced_text,
              tolerance=1e-5)(_observe)


# ---- predict-loops ---------------------------------------------------------------------------------------

LOOPS = '''\
import torch
import torch.nn.functional as F


def chain(x, w):
    return torch.relu(torch.sin(x) * 2 + w).exp()


def column_means(x, w):
    return x - x.mean(0)


def softmax(x, w):
    return torch.softmax(x * w, -1)


def two_results(x, w):
    y = x.sin()
    return y + 1, y * 2


def through_a_product(x, w):
    return torch.relu(torch.sin(x) @ w) + 1


def transposed(x, w):
    return (x.t() + w).reshape(-1)

'''
LOOPING = ("chain", "column_means", "softmax", "two_results", "through_a_product", "transposed")

task("predict-loops", title="How many loops?", minutes=20, kind="predict", about="""\
x and w are float32 [64, 64]. Into how many loops does each function lower, before fusion, on a CPU with one thread? Library calls, such as
a matrix product, do not count.""", starter=LOOPS + questions(**{n.upper(): f"loops of {n}(x, w)" for n in LOOPING}), hints=[
    "Which operations stay lazy, so that whoever reads them computes them? What is left of a view?",
    "Pointwise operations are inlined into whatever reads them, and views are index maps. A loop is needed for each output, for each "
    "reduction, for each operand that a library call wants in memory, and for an expensive value (a sine, an exponential) that several "
    "loops read.",
    "minicompile.ch07_loops.verify.print_program(lower(decompose(graph))) shows the loops. Softmax reduces twice before it can write "
    "its result."])


def loop_count(name) -> tuple:
    from minicompile.ch07_loops.ir import Loop
    program = lowered(program_file(LOOPS)[name], torch.randn(64, 64), torch.randn(64, 64))
    def kind(node):
        if not isinstance(node, Loop):
            return f"a library call of {node.op}"
        return f"reducing along {', '.join(map(str, node.reduction_vars))}" if node.reduction_vars else "one element at a time"
    record = [f"{n.name} writes {', '.join(filter(None, n.outputs))} ({', '.join(n.origins)}), {kind(n)}" for n in program.nodes]
    return sum(isinstance(n, Loop) for n in program.nodes), "\n  ".join(["The program, in order:", *record])


for _name in LOOPING:
    @behaviour("predict-loops", points=1 + (_name in ("softmax", "through_a_product")), name=_name, answer=_name.upper())
    def _(name=_name):
        return loop_count(name)
