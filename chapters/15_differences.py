# %% [markdown]
# # When an answer differs
#
# A compiler that is wrong says nothing. The loss is a little higher, a test fails in the third decimal, and
# the program has passed through seven stages on the way. This page is about finding the stage, then the
# graph, then the operation, without reading any of them: `minicompile.bisect` does it, and each step of it
# is an experiment that could be made by hand.
#
# We need a bug. The rule that prints `tanh` in C++ ([chapter 10](chapter:10)) gets one: it is one percent off.

# %%
import contextlib
import os
import tempfile

import torch

import minicompile
from chapters._lib import Table, row_of_boxes
from minicompile.ch10_cpp.ops import CPP_OPS
from minicompile.tools import apart
from minicompile.tools.answers import Run, references

minicompile.config.raise_on_internal_error = False  # as it is for users
scratch = tempfile.TemporaryDirectory()            # gone with the page


# %%
@contextlib.contextmanager
def one_percent_off():
    right = CPP_OPS["tanh"]
    CPP_OPS["tanh"] = lambda *a: f"({right(*a)} * 1.01f)"
    try:
        yield
    finally:
        CPP_OPS["tanh"] = right


def program(x, w):
    h = torch.relu(x @ w) + w.sum(0)
    p = torch.softmax(h, -1)
    q = torch.tanh(p * 3) + h.mean()
    return q * 2, (q - p).sum(1), h.sin()


x, w = torch.randn(6, 8), torch.randn(8, 8, requires_grad=True)

# %% [markdown]
# ## Climb the ladder
#
# Each backend of the ladder runs what one more stage has made. The captured graph as it is (`eager`), after
# differentiation (`aot_eager`), in primitives (`decomposed`), as loops by an interpreter (`loops`), as C++
# (`cpp`). So the first rung with another answer names the stage:

# %%
rows = []
with one_percent_off():
    for rung in ("eager", "aot_eager", "decomposed", "loops", "cpp"):
        answer = minicompile.compile(program, backend=rung)(x, w)
        distance = max((a - b).abs().max().item() for a, b in zip(answer, program(x, w)))
        rows.append((rung, f"{distance:.1e} off", "bad" if distance > 1e-3 else "compute"))
minicompile.reset()
row_of_boxes(
    rows,
    "The rungs in order, each with its largest difference from eager. The last one, cpp, is wrong.",
    "Up the ladder: each box has the largest difference from eager.",
)

# %% [markdown]
# Two questions are left open. Is what the box of `loops` says a difference? And what if a rung does not return at all?
#
# ## What is a difference?
#
# A fused kernel rounds elsewhere than eager does, so its answer is another one, and often a better one. A fixed
# tolerance is too strict for a sum of a million numbers and too lax for a copy. What is fair depends on how
# much the *program* amplifies rounding, and that can be measured. Evaluate the program in float64: now eager,
# too, has an error. Evaluate it on inputs that are moved by one rounding: the answer moves by what no
# implementation can be blamed for. A compiled answer may be no further from the float64 one than four times the
# larger of the two, plus a floor for the dtype.


# %%
def cancelling(x):
    return (x.sum(0) - x.flip(0).sum(0)) * 1e4


def copying(x):
    return x * 1.0


# %% [markdown]
# One program amplifies rounding, the other does not. `references` evaluates a program in the three ways:

# %%
rows = []
data = torch.randn(1000, 3)
for f in (copying, cancelling):
    refs = references(Run(lambda f=f: (f, (data,), {}), calls=1), 60)
    double, eager, moved = (r.values["call 1: result"].data for r in (refs.double, refs.plain, refs.moved))
    errors = (eager.double() - double).abs().max(), (moved - eager).abs().max()
    rows.append((f.__name__, *(f"{error:.1e}" for error in errors)))
Table(["program", "eager's own error", "moved by one rounding"], rows)

# %% [markdown]
# Where rounding decides something that is not a number (an `argmax` between two equal values, an overflow to
# infinity), the three evaluations disagree among themselves, and those elements are not compared. A program
# that draws random numbers has no float64 twin, since the stream would be used up differently; there eager
# itself is the reference.
#
# In the code the three are `want`, which is eager's, `double`, and `moved`. First, what do they agree about?
#
# %show minicompile.tools.answers.numbers "decided = torch" to "finite = want"
#
# An integer or a truth value must be equal where the others are equal to eager's, and an infinity must be an
# infinity. Of the finite numbers, eager's own error is the largest distance of `want` from the float64 evaluation,
# or from what it becomes on moved inputs. Four times that is allowed, and a floor, since eager may have been lucky:
#
# %show minicompile.tools.answers.numbers "own = 0.0" to "beyond = "
#
# ## A process for each rung
#
# A bug in generated code may end the process. It may also write to memory that the next rung reads, and the
# program itself may change its arguments, its buffers, the random state and a counter in a closure. So every
# rung gets a process of its own. On Linux that is a fork: the child has everything that the parent has, be it a
# lambda or a monkeypatch, and what it changes is gone when it ends.

# %%
counter = [0]


def count():
    counter[0] += 1
    return counter[0]


print(apart.run(count), apart.run(count), counter)
print(apart.run(os.abort))

# %% [markdown]
# CUDA does not survive a fork. In a process that has used a GPU the graphs are captured, and every rung above
# runs their text, with the inputs that they had, in children of a second interpreter that never touches the
# GPU itself.
#
# ## Which graph?
#
# A program with graph breaks is several graphs. They are numbered in the order of compilation, and any set of
# them can be given to the wrong rung while the others run as captured. Halving finds the first that matters in
# a logarithmic number of runs.
#
# %show minicompile.tools.bisect.find_graph
#
# ## Make it small
#
# The graph is written as Python: a list of statements, inputs, outputs. It shows the difference; so may a
# smaller one. What is tried, in this order:
#
# 1. fewer outputs, and with them all that only the others needed;
# 2. an earlier end, found by halving, with the values in use there as outputs;
# 3. runs of statements deleted, half of them first, then quarters, down to single ones: what they computed
#    becomes an *input*, with the value that eager has there. Deleting the first half is a later beginning;
# 4. a statement bypassed: its operand takes its place, if it has the same shape;
# 5. inputs replaced by `torch.ones` or `torch.randn`, sizes by smaller ones.
#
# Each candidate is a program like any other. It is accepted if this rung still differs *in the same way* and
# the rung below does not: a reduction that slips from a wrong number into an exception of its own, or into
# another stage's bug, is none. This is delta debugging, on a graph instead of on text.
#
# %show minicompile.tools.shrink.without_statements
#
# All of it together:

# %%
row_of_boxes(
    [
        ("stage", "the first rung", "compute"),
        ("graph", "halve the set", "compute"),
        ("operations", "leave out, bypass", "compute"),
        ("inputs", "simple and small", "compute"),
        ("a script", "stands alone", "saved"),
    ],
    "Bisection: the stage, by climbing the ladder; the graph, by halving; the operations, by leaving out and bypassing; simple inputs; "
    "and at last a script that stands alone.",
    "What is searched, in which order, and how.",
)

# %%
with one_percent_off():
    found = minicompile.bisect(program, out=scratch.name)(x, w)
print(str(found).replace(scratch.name, "bisect-results"))

# %% [markdown]
# The script is what belongs into a report. It needs nothing of the program it came from:

# %%
print(open(found.path).read())

# %% [markdown]
# ## Other kinds of differences
#
# Gradients are compared like results, and so are exceptions, the arguments after the call, buffers, shapes,
# dtypes and strides. Every program is called twice, since some bugs need a second call; a program that shows
# nothing is tried once more with dynamic shapes; `then=[...]` adds calls with other arguments. Crashes are
# reduced in the same way:


# %%
right = CPP_OPS["sin"]
CPP_OPS["sin"] = lambda *a: f"(__builtin_trap(), {right(*a)})"
found = minicompile.bisect(lambda x: (x.exp().sin() + 1).sum(), out=scratch.name)(x)
CPP_OPS["sin"] = right
print(str(found).replace(scratch.name, "bisect-results"))

# %% [markdown]
# On the command line: `python -m minicompile bisect model.py:step "torch.randn(8, 64)"`. On the lowest rung, `eager`,
# there is no graph to reduce: there capture itself is wrong, and `minicompile.explain` shows what it made.
#
# ## What torch.compile does differently
#
# Its *minifier* (`TORCHDYNAMO_REPRO_AFTER`) also cuts graphs from both ends and deletes nodes. The user chooses
# the stage in advance, by running again with `"dynamo"` or `"aot"`, and asks for wrong numbers, rather than
# exceptions, with a second variable. It works on graphs of operators after the fact, so what a program does
# between graphs, to its arguments or at the second call is not part of the test.
#
# ## Exercises
#
# In four exercises a part of the compiler has a bug, and you look for it: [a chain that bites its
# tail](exercise:cache-bug), [a flow that cannot change its mind](exercise:flow-bug), [the maximum that
# forgets](exercise:row-bug) and [memory that is never given back](exercise:host-bug).
#
# <!-- exercises -->
#
# ## Further reading
#
# - A. Zeller and R. Hildebrandt, *Simplifying and Isolating Failure-Inducing Input* (2002): delta debugging.
# - J. Regehr and others, *Test-Case Reduction for C Compiler Bugs* (2012): why reductions slip, and what a
#   good test of "still the same bug" is.
# - W. McKeeman, *Differential Testing for Software* (1998).
