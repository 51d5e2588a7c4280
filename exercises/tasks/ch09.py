"""Chapter 9: axes and tiles of Triton kernels, reductions in them."""
import ast
import dataclasses
import os
import sys
from unittest import mock

import torch

from .. import behaviour, task
from .kit import kernels_of, lowered

# ---- contiguous-var --------------------------------------------------------------------------------------

task("contiguous-var", title="Along which variable memory runs", minutes=20, about="""\
A GPU reads memory in runs. Which variable of the nest has to be the fastest in a block, so that neighbouring threads read neighbouring
addresses? For an index expression it is the variable with stride 1, if there is one.""", hints=[
    "What is the stride of an index along a variable that it ignores, and which variables have no neighbours at all? `stride_of(index, "
    "v)` and `present(v.size)` tell.",
    "Among the variables with a stride above 0 take the one with the smallest; it counts only if that is 1.",
    "Filter twice, by the number of values and by the stride; take the smallest of what is left, if anything is. The earlier of two "
    "equals wins."])


def nest(sizes):
    from minicompile.ch01_graphs.symbolic import Symbol
    return tuple(Symbol(f"i{k}", Symbol(n).expr if isinstance(n, str) else n) for k, n in enumerate(sizes))


def index_of(variables, what):
    """strides, or ("mod", a, b, c): i0 * c + (i_last // a) % b."""
    from minicompile.ch01_graphs.symbolic import floordiv, mod
    if what and what[0] == "mod":
        return variables[0].expr * what[3] + mod(floordiv(variables[-1].expr, what[1]), what[2])
    return sum((v.expr * s for v, s in zip(variables, what)), 0)


def index_text(case):
    sizes, what = case
    return f"{index_of(nest(sizes), what)} for " + ", ".join(f"i{k} < {n}" for k, n in enumerate(sizes))


def indices(*pairs):
    return lambda rng: list(pairs)


def random_indices(rng):
    found = []
    for _ in range(60):
        sizes = tuple(rng.choice([1, 2, 8, 64]) for _ in range(rng.randrange(1, 4)))
        found.append((sizes, tuple(rng.choice([0, 1, 1, 2, 64]) for _ in sizes)))
    return found


for _points, _name, _cases in (
        (2, "contiguous and transposed", indices(((8, 64), (64, 1)), ((8, 64), (1, 8)), ((64,), (1,)), ((4, 8, 16), (16, 64, 1)),
                                                 ((4, 8, 16), (8, 1, 32)))),
        (2, "no variable of stride 1", indices(((8, 64), (64, 1)), ((8, 64), (128, 2)), ((64,), (2,)), ((8, 64), (0, 0)),
                                               ((8, 64), (2, 0)))),
        (2, "variables of one value, unused and symbolic ones", indices(((8, 1), (1, 1)), ((1, 8), (1, 4)), ((8, 64), (1, 0)),
                                                                        (("n", 4), (4, 1)), (("n", 4), (1, 0)))),
        (2, "indices that are not linear in a variable", indices(((4, 64), ("mod", 8, 4, 1)), ((4, 64), ("mod", 1, 32, 32)))),
        (2, "random indices", random_indices)):
    @behaviour("contiguous-var", points=_points, name=_name, cases=_cases, show=index_text)
    def contiguous(function, case):
        variables = nest(case[0])
        found = function(index_of(variables, case[1]), variables)
        return None if found is None else found.name


# ---- choose-axes -----------------------------------------------------------------------------------------

task("choose-axes", title="One axis or two", minutes=60, about="""\
A Triton program handles a block of consecutive positions on one or two axes, and each axis flattens some variables of the nest. If
everything is contiguous along the last variable, one axis is best. A transposition is contiguous along an earlier variable on one side:
then a square tile reads and writes in runs.""", hints=[
    "When does one axis do, and what makes a second one worth it? Which accesses matter: those that visit a few elements, or those that "
    "visit most?",
    "Reductions are decided by the rule alone. For others, take the accesses that count and ask `contiguous_var` of each. A variable "
    "that is not the last of those with more than one value speaks for two axes.",
    "If nobody speaks for it, or the nest is small, there is one axis. Otherwise the variable with the most votes ends the first axis, "
    "and the variables behind it are the second; see that both are worth it. The docstring has the limits, the names, dims and ranks."])


def kernel_text(case):
    sizes, reduced, strides = case
    variables = nest(sizes)
    text = ", ".join(f"i{k} < {n}" for k, n in enumerate(sizes)) + "".join(f", reduce r{k} < {n}" for k, n in enumerate(reduced))
    return text + "; accesses " + ", ".join(str(index_of(variables, s)) for s in strides)


def axes_of(function, case):
    from minicompile.ch01_graphs.symbolic import Symbol
    sizes, reduced, strides = case
    variables, folded = nest(sizes), tuple(Symbol(f"r{k}", n) for k, n in enumerate(reduced))
    axes = function(variables, folded, [index_of(variables, s) for s in strides])
    return [{"axis": a.name, "variables": [v.name for v in a.vars], "dim": a.dim, "rank": a.rank} for a in axes]


def nests(*cases):
    return lambda rng: list(cases)


def random_nests(rng):
    found = []
    for _ in range(60):
        sizes = tuple(rng.choice([1, 2, 4, 16, 64, 256]) for _ in range(rng.randrange(1, 4)))
        strides = []
        for _ in range(rng.randrange(1, 5)):
            order, stride, running = rng.sample(range(len(sizes)), len(sizes)), [0] * len(sizes), 1
            for d in order:
                stride[d], running = (running if rng.random() < 0.85 else 0), running * sizes[d]
            strides.append(tuple(stride))
        strides = [s for s in strides if len({v for v in strides_won([s], sizes)}) <= 1]
        if len(strides_won(strides, sizes)) <= 1 and strides:
            found.append((sizes, (), strides))
    return found


def strides_won(strides, sizes):
    """The variables of stride 1 that are not the last: with two of them the choice could be a tie."""
    return {d for s in strides for d, (k, n) in enumerate(zip(s, sizes)) if k == 1 and n > 1 and d < len(sizes) - 1}


for _points, _name, _cases in (
        (2, "reductions", nests(((64,), (128,), [(1,)]), ((8, 64), (4, 4), [(64, 1)]), ((), (4096,), []))),
        (2, "one axis if all is contiguous in the last variable", nests(((64, 128), (), [(128, 1), (0, 1)]), ((8192,), (), [(1,)]),
                                                                        ((64, 128, 1), (), [(128, 1, 0)]))),
        (3, "two axes for a transposition", nests(((64, 128), (), [(128, 1), (1, 64)]), ((16, 32, 64), (), [(2048, 64, 1), (32, 1, 512)]),
                                                  ((16, 32, 64), (), [(2048, 64, 1), (1, 16, 512)]),
                                                  ((64, 128, 1), (), [(1, 64, 0), (128, 1, 0)]))),
        (3, "small nests, small accesses, short variables", nests(((32, 64), (), [(64, 1), (1, 32)]), ((64, 128), (), [(128, 1), (1, 0)]),
                                                                  ((2, 4096), (), [(4096, 1), (1, 2)]),
                                                                   ((4, 2048), (), [(2048, 1), (1, 4)]), ((4096, 1), (), [(1, 0)]),
                                                                   ((64, 1, 128), (), [(128, 0, 1), (1, 0, 64)]))),
        (2, "what most accesses want", nests(((64, 2, 64), (), [(128, 64, 1), (1, 0, 64)]),
                                             ((64, 128, 1), (), [(128, 1, 0), (128, 1, 0), (1, 64, 0)]),
                                             ((4096, 2), (), [(2, 1), (1, 4096)]), ((64, 128), (), [(256, 2), (256, 2), (1, 64)]),
                                             ((16, 32, 64), (), [(1, 16, 512), (32, 1, 512), (32, 1, 512)]),
                                             ((16, 32, 64), (), [(1, 16, 512), (1, 16, 512), (32, 1, 512)]))),
        (2, "random nests", random_nests)):
    behaviour("choose-axes", points=_points, name=_name, cases=_cases, show=kernel_text)(axes_of)


# ---- online-softmax --------------------------------------------------------------------------------------

task("online-softmax", title="A softmax in one walk", minutes=45, seconds=20, about="""\
Softmax needs the maximum of a row and the sum of exp(x - maximum). The textbook walks along the row twice for that. Write the statements of
Triton that need one walk: before the loop that walks, in it, and after it. The kernels that the compiler emits for long rows have your
statements in them, and run in Triton's interpreter. Numbers stay small: the exponential of a large positive number never occurs, or
the sum is infinite.""", hints=[
    "If you knew the maximum m of the elements so far, and the sum s of exp(x - m), what becomes of s when a larger element arrives? "
    "Let every lane keep a pair of its own.",
    "By which factor does exp(x - m) change when m becomes m2? For a lane: new maximum = the larger of m and x, new sum = s times that "
    "factor plus exp(x - new maximum). At the end the pairs of the lanes are one more case of the same rule.",
    "Before: a tile of minus infinity and one of zeros. In the loop: a tile of the row, minus infinity beyond its end; one exponential "
    "of minus the distance of x and m serves both cases, but is 1 where they are equal, since infinity less itself is NaN; tl.where "
    "says whether the old sum shrinks or the new term does; then the maximum, with propagate_nan=tl.PropagateNan.ALL. After: the "
    "maximum of all lanes, and the sum of their sums, each shrunk by its distance from that; [:, None] gives back the second dimension."])


def rows_of(case):
    """A softmax as a kernel of the compiler, and its rows."""
    from minicompile.ch08_fusion.fuse import fuse

    what, columns, special, log = case
    x = torch.randn(5, columns, generator=torch.Generator().manual_seed(columns)) * 4
    x[1, columns // 3:columns // 2] = special
    x[2] = special
    x[3, : columns // 2] = float("-inf")
    x = x.to(torch.float64) if what == "float64" else x
    kernel, = kernels_of(fuse(lowered(lambda x: (torch.log_softmax if log else torch.softmax)(x, -1), x)))
    return kernel, x


def tiled(kernel, case):
    from minicompile.ch09_triton.emit import emit_triton
    from minicompile.ch09_triton.heuristics import Config
    return emit_triton(kernel, Config({"x": 2, "r": 16}, 4))


def row_kernel(function, case):
    with mock.patch("minicompile.ch09_triton.emit.prelude_for", lambda code: ""):       # it reads a file
        return tiled(rows_of(case)[0], case).code


def run_rows(case, text):
    """What the kernel gives, in Triton's interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"
    for name in [n for n in sys.modules if n.startswith("triton") and not n.startswith("triton._C")]:
        del sys.modules[name]               # whether Triton interprets is decided when it is imported, and PyTorch may have done that
    from minicompile.ch09_triton.launch import load_triton
    from minicompile.ch09_triton.rules.prelude import prelude_for
    only_statements(text)
    text = text.replace("@triton.jit", prelude_for(text) + "@triton.jit")
    kernel, x = rows_of(case)
    out = torch.empty_like(x)
    load_triton([dataclasses.replace(tiled(kernel, case), code=text)])[0](x, out)
    return {"walks along the row": text.count("for roffset"), "loads": text.count("tl.load("),
            **{f"row {k}": row for k, row in enumerate(out)}}


def only_statements(text):
    """ValueError if a text does something else than a kernel does."""
    for node in ast.walk(ast.parse(text)):
        hidden = isinstance(node, ast.Name) and (node.id.startswith("_") or node.id in FORBIDDEN) or \
            isinstance(node, ast.Attribute) and node.attr.startswith("_")
        if hidden or isinstance(node, (ast.Lambda, ast.With, ast.Try, ast.While)):
            raise ValueError(f"a kernel has no {ast.unparse(node)}")


FORBIDDEN = {"eval", "exec", "open", "getattr", "setattr", "globals", "locals", "vars", "torch", "os", "sys", "compile", "print"}


def rows_text(case):
    what, columns, special, log = case
    return f"{'log_softmax' if log else 'softmax'} of {what} [5, {columns}]; row 2 and a part of row 1 are {special}, half of row 3 is -inf"


for _points, _name, _cases in (
        (3, "rows of several tiles", [("float32", n, 0.5, False) for n in (16, 32, 45, 100)]),
        (2, "its logarithm, and float64", [("float32", 45, 1.0, True), ("float64", 70, 1.0, False)]),
        (2, "large numbers", [("float32", 45, 300.0, False), ("float32", 45, -300.0, True), ("float32", 33, 3e38, False)]),
        (3, "minus infinity, and NaN", [("float32", 45, float("-inf"), False), ("float32", 45, float("nan"), False),
                                        ("float32", 64, float("-inf"), True)])):
    behaviour("online-softmax", points=_points, name=_name, cases=lambda rng, cases=_cases: cases, show=rows_text, tolerance=1e-5,
              then=run_rows)(row_kernel)
