# %% [markdown]
# # Graph breaks: compile what can be compiled
#
# Some lines cannot be in a graph: `print(x)`, `x.item()`, a branch on the values of a tensor, a call into a
# library that capture does not know. Real programs have a few of them. This chapter cuts a function at such
# a line, compiles both sides, and lets Python execute the line itself.
#
# The smallest version of this stage is [part 4 of tiny](chapter:tiny.4), the compiler in one file: there a
# break is resumed by an interpreter.

# %%
import dis
import weakref

import torch
import torch.nn.functional as F

import minicompile
from chapters._lib import Block, Listings, Table, best_time, example, results, row_of_boxes, step_through, tidy, watch, watching
from minicompile.ch01_graphs.graph import print_graph

# %% [markdown]
# ## The naive version: all or nothing
#
# Capture either gets the whole function or gives up. `fullgraph=True` behaves like that:

# %%
history = []


def training_loss(x, w):
    y = torch.tanh(x @ w)
    loss = y.square().mean()
    history.append(loss.item())  # one number per call, for a plot
    return loss * 2, y


x, w = torch.randn(32, 32), torch.randn(32, 32)
try:
    minicompile.compile(training_loss, fullgraph=True, backend="eager")(x, w)
except minicompile.GraphBreakError as error:
    print(tidy(str(error)))

# %% [markdown]
# One line out of four, and nothing is compiled. The opposite, to guess a value and hope, is worse. A third
# possibility: split the function by hand. Users of earlier compilers did that.
#
# ## The idea: a function in three parts
#
# What comes before the line is a graph. The line is Python. And the rest is *a function of its own*, whose
# arguments are the variables that are still needed. That function is called like any other, so it is
# captured like any other, and it may break again.

# %%
row_of_boxes(
    [
        ("graph 1", "x @ w, tanh, mean", "compute"),
        ("Python", "loss.item()", "bad"),
        ("resume function", "loss, y", "input"),
        ("graph 2", "loss * 2", "compute"),
    ],
    "A broken function: graph one, then the instruction in Python, then a resume function with the live "
    "variables, which becomes graph two.",
)

# %%
seen = watch(training_loss, x, w, backend="eager")
for n, graph in enumerate(seen.graphs, 1):
    print(f"graph {n}\n{print_graph(graph)}\n")
print("history:", len(history), "number; right:", torch.equal(seen.result[0], training_loss(x, w)[0]))

# %% [markdown]
# The first graph returns `loss` and `y`, because the rest reads them, and nothing else. Which variables
# these are is found by a textbook liveness analysis on the bytecode. Passing all of them would be right as
# well, but each would have to be written to memory.
#
# %show minicompile.ch04_breaks.bytecode.live_table
#
# Where to cut is not known before the trace fails, perhaps deep inside a callee, with half of its side
# effects noted down. There is no rollback. The frame is traced a second time, and told to stop before the
# instruction under which the first trace failed:
#
# %show minicompile.ch04_breaks.breaks.capture_until
#
# These are the last instructions of that trace. When it stops, two things wait on the stack: the method
# `history.append`, which was loaded before its argument, and the method `loss.item`.

# %%
before = step_through(training_loss, x=x, w=w)
before.rows = before.rows[-6:]
before

# %% [markdown]
# ## The first part
#
# What the first part has to do is known now: run the graph, read what else is on the stack, hand everything
# over. That can be said in Python, as in [chapter 3](chapter:03):

# %%
entry = seen.entry_text(0)
print(entry[entry.index("    else:") :])

# %% [markdown]
# `__K` holds objects that the text cannot spell. `__K[1]` is the bytecode of a function that executes the breaking
# instruction, a *step*. The generated code makes a function of it, in the globals of the user's function, and hands it
# the two live variables and the two values from the stack. The other two objects call it, in a way that is explained
# below. (The bytecode is held weakly, and that it is still there is one of the guards: it lives as long as the function
# that it was made from.)
#
# ## The step and the resume function
#
# Write the rest as Python source, too? There is none that begins in the middle of an expression, with
# values on the interpreter's stack. So the other two parts are made of bytecode: *the original bytecode*
# behind a new beginning.


# %%
def argument(i):
    """A function or class by its name, a number where there is nothing better."""
    return getattr(i.argval, "__name__", None) or i.argrepr or ("" if i.arg is None else i.arg)


def listing(code, first=0, last=10**6):
    return "\n".join(
        f"{i.offset:4} {i.opname} {argument(i)}"
        for i in dis.get_instructions(code)
        if i.opname not in ("CACHE", "EXTENDED_ARG") and first <= i.offset <= last
    )


def jump_of(code):
    return next(i for i in dis.get_instructions(code) if i.opname == "JUMP_FORWARD")


def signature(code):
    return f"{code.co_name}({', '.join(code.co_varnames[: code.co_argcount])})"


step = next(c() for c in seen.captured[0].constants if isinstance(c, weakref.ref) and c().co_name == "training_loss")
rest = seen.states[-1].code
resumed_at, jump = int(rest.co_name.rpartition("_")[2]), jump_of(rest)
Listings(
    [
        ("training_loss, the end", listing(training_loss.__code__, resumed_at - 40)),
        ("the step: " + signature(step), listing(step)),
        (signature(rest), listing(rest, 0, jump.offset) + "\n ...\n" + listing(rest, jump.argval)),
    ]
)

# %% [markdown]
# The first listing is the end of the function that the user wrote. The step begins by pushing what waited on
# the stack, executes a copy of the one instruction that broke, and then undoes its beginning: it empties the
# stack into variables, and returns the resume function with its arguments. The resume function pushes
# `history.append` and the number that `loss.item()` gave, and jumps over everything before the break. From
# there on it is the original. All offsets in the code object have moved for that: jumps, the exception table,
# the table of line numbers. [`bytecode.py`](code:minicompile/ch04_breaks/bytecode.py) is a small assembler.
#
# Which instructions restore the stack depends on the release. 3.12 and 3.13 have `LOAD_FAST_AND_CLEAR`, made
# for comprehensions. 3.11 has no instruction that pushes a variable and empties it; `LOAD_CLOSURE` pushes
# any slot as it is, `DELETE_FAST` empties it. Neither looks at the value, so capture makes no guard on what
# only passes through. A callable and the `NULL` beside it change places in 3.13. And a jump out of a `for`
# loop has another target in each release: behind the loop in 3.11, to an `END_FOR` in 3.12, to an `END_FOR`
# with a `POP_TOP` in 3.13.
#
# The resume function is called like any other, so the frame hook sees it, and it becomes graph 2 above.
#
# ## Inside `with` and `try`
#
# A graph cannot be left open. Where the break is inside `with torch.no_grad()`, graph 1 ends by switching
# gradients on again, and the resume function enters the context anew, with the instruction that the user's
# `with` used:


# %%
def report(x, w):
    with torch.no_grad():
        y = x @ w
        history.append(y.mean().item())
        return torch.relu(y)


inside = watch(report, x, w, backend="eager")
rest = inside.states[-1].code
print(signature(rest) + "\n" + listing(rest, 0, jump_of(rest).offset) + "\n")
print(print_graph(inside.graphs[1]))

# %% [markdown]
# A `try` is the reason why the step copies the bytecode of `loss.item()`, where the text `loss.item()` would
# be shorter. Its exception belongs to the user's handler. A copied instruction is covered by the copied
# exception table:


# %%
def careful(x):
    y = x * 2
    try:
        values.remove(y.sum().item())  # breaks, and raises
    except ValueError:
        y = y + 100
    return y.relu()


values = []
found = watch(careful, torch.ones(3), backend="eager")
print(found.result.tolist(), "eager:", careful(torch.ones(3)).tolist(), "graphs:", len(found.graphs))

# %% [markdown]
# ## Breaks in loops
#
# A loop that breaks in every round is the test of any such scheme. Each round resumes at the same
# instruction, so it gets the same function, and its graph is used again as soon as the loop variable has
# become an input.


# %%
def rounds(x, n):
    for i in range(n):
        x = torch.tanh(x * i)
        history.append(x.sum().item())
    return x


for n in (5, 50):
    found = watch(rounds, torch.randn(8), n, backend="eager")
    print(f"{n} rounds: {len(found.graphs)} graphs, {len(found.states)} functions")

# %% [markdown]
# Pieces do not call each other: fifty rounds would be a hundred frames deep. A piece *returns* the next
# call, and one loop at the top executes it, a *trampoline*.
#
# ## What a break costs
#
# The running example, with a look at the activations in the middle.


# %%
class Watched(Block):
    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        history.append(x.abs().max().item())
        return x + self.down(F.gelu(self.up(self.norm2(x))))


whole, x = example()
broken = Watched()
broken.load_state_dict(whole.state_dict())
rows = []
for name, module in (("whole", whole), ("broken", broken)):
    minicompile.reset()
    compiled = minicompile.compile(module)
    with watching() as seen, torch.no_grad():
        compiled(x)
    with torch.no_grad():
        seconds = best_time(compiled, x, repeat=100)
    rows.append(
        (
            name,
            len(seen.graphs),
            sum(len(h["compiled"].sources) for h in seen.halves),
            sum(len(list(c.guards)) for c in seen.captured),
            f"{seconds * 1e6:.0f} us",
        )
    )
Table(["block", "graphs", "kernels", "guards", "time of one call"], rows)

# %% [markdown]
# The result is the same, but two graphs are two sets of guards, nothing is fused across the cut, and
# `item()` waits for the device. On a GPU that means: the queue of kernels runs dry at every call.
#
# ## Saying why
#
# A break that is not reported is a slow program with no explanation. `explain` shows the line, the column,
# and a way out.

# %%
report = minicompile.explain(broken, backend="eager")(x)
for b in report.breaks:
    print(f"{b.reason}\n    {b.source}\n    {b.caret}\n-> {b.advice}")

# %% [markdown]
# How often does this happen in practice? Here are the 92 architectures of the `transformers` library with
# the reasons for breaks, as measured by the test suite.

# %%
from collections import Counter

data = results("transformers")
reasons = Counter()
for row in data["rows"]:
    reasons.update({b.split(" (")[0][:70] for b in row["breaks"]})
print(
    f"{data['ok']} of {data['architectures']} give eager's numbers, {data['one graph']} as one graph "
    f"(transformers {data['transformers']}, torch {data['torch']}, commit {data['commit']})"
)
Table(["reason", "architectures"], reasons.most_common(6))

# %% [markdown]
# ## What torch.compile does differently
#
# TorchDynamo has resume functions, too; the idea is its authors'. It generates the code before the break
# and the breaking instruction as bytecode, and reconstructs the `with` blocks it knows. A break inside a
# `for` loop makes it give up on the frame and try the functions that the loop calls, unless nested breaks
# are enabled. It can capture some of what breaks here: `item()` as an *unbacked* symbol
# (`capture_scalar_outputs`), and branches on data with `torch.cond`. When tracing fails it restarts from
# the beginning with a list of places where to break (*speculation log*), which is the same as tracing
# twice.
#
# ## Exercises
#
# <!-- exercises -->
#
# ## Further reading
#
# - J. Ansel and others, *PyTorch 2* (ASPLOS 2024), section 3.6 on graph breaks.
# - J. C. Reynolds, *The discoveries of continuations* (1993): a resume function is one.
# - D. P. Friedman, M. Wand, *Essentials of Programming Languages*, on trampolines.
# - CPython's `InternalDocs/exception_handling.md`, on exception tables.
