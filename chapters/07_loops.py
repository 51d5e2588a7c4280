# %% [markdown]
# # Loops: from what to how
#
# A graph of primitives says *what* is computed: this tensor is the exponential of that one. To put two
# operations into one kernel, a compiler must know *how*: to make this element, read that element. This
# chapter rewrites every operator as a loop nest over elements, and finds that most of them need no loop.

# %%
import torch

import minicompile
from chapters._lib import Listings, Table, bars, example, head, watch
from minicompile.ch07_loops.ir import Extern, Loop, replay
from minicompile.ch07_loops.verify import print_program

# %% [markdown]
# ## The naive version: a loop for each operator
#
# Every operator reads its operands from memory and writes its result. Written as Python text for vectors:


# %%
def naive_loops(operations):
    lines = []
    for result, expression in operations:
        lines += ["for i in range(n):", f"    {result}[i] = {expression}"]
    return "\n".join(lines)


print(naive_loops([("a", "x[i] * 2"), ("b", "a[n - 1 - i]        # flip"), ("y", "b[i] + x[i]")]))

# %% [markdown]
# This is right, and it is eager PyTorch: `a` and `b` are written and read although nobody wants them. The
# second loop does nothing but move data. In a transformer, splitting `q`, `k`, `v` apart and moving the
# heads to the front is three views, and a loop for each would move all of them once more.
#
# ## The idea: a tensor is a function of its index
#
# Do not compute. Describe. A tensor that is not there yet is a function from an index to the expression for
# one element. An operator composes such functions; a view changes the index before it asks.


# %%
class Lazy:
    def __init__(self, shape, element):
        self.shape, self.element = shape, element  # element(index) -> text

    def __mul__(self, number):
        return Lazy(self.shape, lambda i: f"({self.element(i)} * {number})")

    def __add__(self, other):
        return Lazy(self.shape, lambda i: f"({self.element(i)} + {other.element(i)})")

    def t(self):
        return Lazy(self.shape[::-1], lambda i: self.element(i[::-1]))

    def flip(self):
        return Lazy(self.shape, lambda i: self.element((f"{self.shape[0] - 1} - {i[0]}", *i[1:])))


def source(name, shape):
    return Lazy(shape, lambda i: f"{name}[{', '.join(i)}]")


x = source("x", (4, 4))
y = (x * 2).flip().t() + x
print("y[i, j] =", y.element(("i", "j")))

# %% [markdown]
# One loop, no intermediate, and the two views are gone. They have become arithmetic on indices. What is
# wrong with it shows when a value is used twice:

# %%
y = x
reads = []
for step in range(1, 9):
    y = y + y.t()
    reads.append((step, y.element(("i", "j")).count("x[")))
bars(
    [(f"{step} steps", n, "bad") for step, n in reads],
    "reads of x",
    "Reads of x for one element of y = y + y.t(), repeated.",
    form="{:,}",
)

# %% [markdown]
# The work doubles at each step: nothing remembers. So there must be a decision for each value, whether it
# is computed again by each reader or put into memory once. It is a question of cost: with `n` readers of a
# value that is made from `r` tensors, recomputing moves `n*r` tensors, and keeping moves `r + 1 + n`. And
# there are things that have no formula for one element, such as sorting. They stay library calls.
#
# ## The real version
#
# [`Lazy`](ref:minicompile.ch07_loops.lazy.Lazy) is the class above with a dtype, strides, and a record of
# what it reads. The decision:
#
# %show minicompile.ch07_loops.lazy.worth_keeping
#
# When a value is realised, its function is called once with symbolic indices, and what comes out is written
# down as a flat list of instructions. That list is the loop IR. A softmax:

# %%
seen = watch(lambda x: torch.softmax(x, 1), torch.randn(8, 100))
print(print_program(seen.half()["program"]))

# %% [markdown]
# Four loops: the maximum of a row, the exponentials, their sum, the quotient. `r0` is a reduction variable.
# `buf1` is kept because two loops read it and `exp` is expensive on a CPU. Whether the four become one
# kernel is a question for [chapter 8](chapter:08). Views are index expressions. A chain of five of them,
# and the program has one load:


# %%
def views(x):
    return x.view(4, 6, 8).transpose(1, 2).flip(0)[:, 2:].unsqueeze(1) + 1


seen = watch(views, torch.randn(24, 8))
print(print_program(seen.half()["program"]))

# %% [markdown]
# `transpose` exchanged the coefficients, `flip` gave a minus, slicing added a constant. How a lowering
# looks, a view and a reduction:
#
# %show minicompile.ch07_loops.views.flip
#
# %show minicompile.ch07_loops.reductions.reduction
#
# ## One body, many readings
#
# A body is data. Every question about it is the same call, `replay(body, handler)`, where the handler says
# what each instruction means. Running on numbers is one handler, collecting memory accesses is another,
# emitting C++ a third. Here is one more, which counts:
#
# %show minicompile.ch07_loops.ir.replay


# %%
class Count:
    """Loads, stores and arithmetic of one element."""

    def __init__(self):
        self.loads = self.stores = self.arithmetic = 0

    def load(self, *args, dtype):
        self.loads += 1

    def store(self, *args, dtype):
        self.stores += 1

    def constant(self, *args, dtype):
        pass

    def __getattr__(self, name):
        def operation(*args, dtype):
            self.arithmetic += 1

        return operation


block, x = example()
seen = watch(block, x)
program = seen.half("forward")["program"]
rows = []
for node in program.nodes:
    if isinstance(node, Loop):
        count = Count()
        replay(node.body, count)
        rows.append(
            (
                node.name,
                " x ".join(str(v.size) for v in (*node.vars, *node.reduction_vars)),
                count.loads,
                count.arithmetic,
                count.stores,
                ", ".join(node.origins[:3]),
            )
        )
Table(["loop", "iterations", "loads", "operations", "stores", "made from"], rows)

# %% [markdown]
# These are the loops of the running example, the GPT block, forward. Few of them do more arithmetic than
# loads and stores; that is why memory decides.
#
# ## The running example
#
# From operators to loops and library calls:

# %%
graph = seen.graphs[0]
calls = [n for n in program.nodes if isinstance(n, Extern)]
Table(
    ["what", "number"],
    [
        ("operations in the captured graph", sum(n.op.startswith("call") for n in graph.graph.nodes)),
        ("loops", len(program.nodes) - len(calls)),
        ("library calls", len(calls)),
        ("buffers", len(program.buffers) - len(program.inputs)),
    ],
)

# %%
head(print_program(program), 60)

# %% [markdown]
# Look at the operands of the attention call: `q`, `k` and `v` are windows on the result of one matrix
# product, given by sizes, strides and an offset. No loop splits or transposes them.
#
# Is the program right? It can be executed, slowly, by [the reference
# interpreter](code:minicompile/ch07_loops/reference.py), which is a handler that computes with whole grids
# of indices. This is the `loops` rung of the ladder of backends:

# %%
with torch.no_grad():
    slow = minicompile.compile(block, backend="loops")(x)
    print("largest difference from eager:", (slow - block(x)).abs().max().item())

# %% [markdown]
# And a checker states what a program must obey: names defined before use, indices that speak of the loop's
# own variables, each buffer written once.
#
# %show minicompile.ch07_loops.verify.verify
#
# ## Reductions that are too long
#
# The sum of a million numbers is one loop with one result. On a GPU one block of threads would work and the
# others would wait. So the lowering splits it in two, many partial sums and a short sum of them. Here is
# the plan for a GPU, and for a CPU with one thread:

# %%
from minicompile.ch01_graphs.fake import FakeMode
from minicompile.ch01_graphs.trace import trace
from minicompile.ch06_decompositions.decompose import decompose
from minicompile.ch07_loops.lazy import Options
from minicompile.ch07_loops.lower import lower

gm = decompose(trace(lambda t: [t.sum()], [FakeMode().from_real(torch.randn(1_000_000))]))
Listings(
    [
        ("4 threads", print_program(lower(gm, Options(threads=4)))),
        ("1 thread", print_program(lower(gm, Options(threads=1)))),
    ]
)

# %% [markdown]
# ## What torch.compile does differently
#
# Inductor's `Pointwise` and `Reduction` nodes hold a Python closure, `inner_fn(index)`, as our `Lazy` does,
# and so does its loop IR: each analysis calls the closure again under another handler (`V.ops`). Here the
# closure is called once, and what follows works on a list of instructions that can be printed and compared.
# Inductor's lowerings carry layouts as objects that are decided late (*flexible layouts*); ours take
# eager's strides at once. It has lowerings with hardware templates for matrix products and convolutions;
# ours are library calls.
#
# ## Exercises
#
# <!-- exercises -->
#
# ## Further reading
#
# - J. Ragan-Kelley and others, *Halide* (PLDI 2013): what is computed, apart from when and where.
# - The design notes on TorchInductor (PyTorch developer forum, 2022), on define-by-run loop IR.
# - P. Feautrier, *Dataflow analysis of array and scalar references* (1991), on index expressions as the
#   object of analysis.
# - C. Elliott, *Functional Images* (2003): pictures as functions of a position.
