# %% [markdown]
# # Graph breaks: compile what can be compiled
#
# *What if capture cannot go on?* Some lines cannot be in a graph: `print(x)`, `x.item()`, a branch on the values of
# a tensor, a call into a library that capture does not know. Real programs have a few of them, often for good
# reasons. This chapter cuts a function at such a line, compiles both sides, and lets Python execute the line
# itself.
#
# After the cut there is a second question, and it is the harder one. The rest of the function has no beginning. It
# starts in the middle of a line, with variables that are set already, perhaps inside of a loop or a `try`. How does
# one compile *that*?

# %%
import dis
import inspect
import sys
import textwrap
import types
import weakref

import torch
import torch.nn.functional as F

import minicompile
from chapters import tiny
from chapters._lib import (
    Block,
    Listings,
    Table,
    Walk,
    bars,
    best_time,
    drawing,
    example,
    results,
    row_of_boxes,
    shortened,
    step_through,
    tidy,
    watch,
    watching,
)
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
# One line out of four, and nothing is compiled. A compiler could instead guess a number for `loss.item()` and go
# on. Then the list would get the same number at each call, and nobody would be told. Or the user could split the
# function by hand:


# %%
def first_part(x, w):
    y = torch.tanh(x @ w)
    loss = y.square().mean()
    return y, loss


def second_part(y, loss):
    return loss * 2, y


def split_by_hand(x, w):
    y, loss = minicompile.compile(first_part, backend="eager")(x, w)
    history.append(loss.item())
    return minicompile.compile(second_part, backend="eager")(y, loss)


print(torch.equal(split_by_hand(x, w)[0], training_loss(x, w)[0]))

# %% [markdown]
# Users of earlier compilers did that, and it shows what has to be done. There is a graph for what comes before the
# line. There is the line, executed by Python. And the rest is *a function of its own*, whose arguments are the
# variables that are still needed. This function can be captured like any other, and if it breaks again, it can be
# split again.

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

# %% [markdown]
# ## The smallest form
#
# [Part 4 of tiny](chapter:tiny.4), the compiler in one file, does not make a function of the rest. Its capture is
# an interpreter of bytecode, so at the break it knows the complete *state* of the program: for each function that
# has begun, its local variables, the values that wait on its stack, and the number of the next instruction. tiny
# writes this state down as a Python expression. This is the body of what it generates for the first part:

# %%
small = tiny.compile(training_loss, backend=tiny.eager)
small(x, w)
known = list(small.entries.values())
text = known[0][0].text
print(text[text.index("    def body") :])

# %% [markdown]
# Read it by hand. `out` holds what the graph computed, `y` and `loss`. The dictionary is the table of local
# variables. Two things wait on the stack: the method `history.append`, which Python loads before it computes the
# argument, and the method `loss.item`, which is about to be called. For every call CPython reserves two slots, one
# for the function and one for the `self` of a method. Our two methods know their objects already, so one slot of each
# stays empty. A special mark stands in an empty slot, which Python's listings call NULL and this text calls `k6`.
# `Frame(...)` puts all of it together, and the number at its end says which instruction is the next. The last line
# returns the list of frames, and no result yet.
#
# What runs this is a loop. It looks for compiled code for the present state. The code leads to a new state. If this
# is not the end, the interpreter executes *one* instruction, the one that broke, and the loop begins again. (If there are
# too many versions, `find` gives no code, and `body` is None. Then the inner loop interprets the program to its end.)

# %%
print(inspect.getsource(tiny.execute))

# %% [markdown]
# This is complete: three states of the program above have code of their own, since `append` breaks as well in tiny.
# What is wrong with it?
#
# **It is slow.** The state is built as Python objects and taken apart again, and an interpreter that is written in
# Python executes the instruction in between:

# %%
ours = minicompile.compile(training_loss, backend="eager")
ours(x, w)
calls = {"not compiled": training_loss, "tiny": small, "minicompile": ours}
bars([(name, 1e6 * best_time(f, x, w, repeat=200), "bad" if name == "tiny" else "plain") for name, f in calls.items()],
     "us", "Time of a call with one break; no kernels are generated.", form="{:.0f}")

# %% [markdown]
# **It cannot be where exceptions are handled.** A `try` or a `with` is a table beside the bytecode, and tiny's
# interpreter does not read it.
#
# **It compiles loops again and again.** The state contains the loop's iterator, which stands at another position in
# each round:


# %%
def rounds(x, n):
    for i in range(n):
        x = torch.tanh(x * i)
        history.append(x.sum().item())
    return x


in_loop = tiny.compile(rounds, backend=tiny.eager)
in_loop(torch.randn(8), 20)
found = watch(rounds, torch.randn(8), 20, backend="eager")
print("tiny:", [len(made) for made in in_loop.entries.values()], "versions of the places where it goes on; above 8 it interprets")
print("minicompile:", len(found.graphs), "graphs")

# %% [markdown]
# The real stage answers all three with one decision. The rest of a function becomes an ordinary function again, in
# *bytecode*, and CPython runs it. The following sections build it: where to cut, what to hand over, and how to
# begin in the middle.

# %% [markdown] tags=["page"]
# ## Where to cut
#
# The cut cannot be planned. It is wherever the trace fails, and by then the trace may be deep inside of a function
# that the user's function called, with half of its side effects noted down. One could roll all of that back. It is
# simpler to forget the trace and to trace the frame a second time, with an order to stop *before* the instruction
# under which the first trace failed. The trace counts the instructions of the outermost frame. `error.step` says how
# many had been begun when it failed, so the second trace executes one less, and stops there (`stop_at`). (Here
# names with `step` in them are about this count; in "The first part" the word gets another meaning.) It may happen
# that the second trace does not stop there and comes to the end of the function. Then it has a result, and the two
# traces have not gone the same way. In this case the frame is left to CPython:
#
# %show minicompile.ch04_breaks.breaks.capture_until "stop = error.step" to "return cut(done"
#
# The second trace stops with the frame exactly as Python would have it there. Here are the last instructions of the
# trace, with the stack before each:

# %%
before = step_through(training_loss, x=x, w=w)
before.rows = before.rows[-6:]
before

# %% [markdown]
# Under which instruction did it fail? If the break is in a function that was inlined, there are several, one in
# each frame. The cut is made in the *outermost* frame, before the call. The callee then runs as a frame of its own.
# The frame hook sees it, captures it, and cuts it in its own body:


# %%
def inner(y):
    history.append(y.mean().item())
    return y * 2


def outer(x):
    z = inner(x.sin())
    return z.cos()


found = watch(outer, torch.randn(4), backend="eager")
rows = []
for state, graph in zip(found.states, found.graphs):
    operators = [n.name for n in graph.graph.nodes if n.op not in ("placeholder", "output")]
    rows.append((state.code.co_qualname, ", ".join(operators)))
Table(["function", "its graph"], rows)

# %% [markdown]
# Four functions, and a graph for each. The names of the new ones contain the offset of the instruction at which
# they go on.
#
# Sometimes the state before the instruction cannot be handed over. A generator that has run half of its body exists
# only inside of the trace; there is no Python object for it. But some instruction has created it. So the cut moves
# back to *that* instruction. Python executes it, and from then on there is a real generator, whose body Python runs, outside
# of all graphs. The descriptions that the trace makes are numbered in the order of making. The error says which one cannot
# be handed over: its field `born` is the number of this description. `step_of` finds the instruction of the outermost
# frame during which it was made. This is the second half of the loop:
#
# %show minicompile.ch04_breaks.breaks.capture_until "except Unsupported as inner" to "stop = earlier"
#
# ### What happens once
#
# Tracing twice is only allowed because a trace does nothing. Each effect on the outside, such as an `append`, is
# kept in a log ([chapter 3](chapter:03)), and generated code carries it out. So the first part performs its own
# effects before Python executes the breaking line, and the rest performs its own afterwards:


# %%
def in_order(x, events):
    events.append("first part")
    events.append(round(x.sum().item()))
    events.append("rest")
    return x + 1


for name, f in (("eager", in_order), ("compiled", minicompile.compile(in_order, backend="eager"))):
    events = []
    f(torch.ones(3), events), f(torch.ones(3), events)
    print(f"{name:9}", events)

# %% [markdown]
# ## What is still needed
#
# The rest of the function gets the variables that it may still read. A variable is *live* before an instruction if
# some way from there reads it before it is written. This is found by going backwards. Before an instruction, live
# is what the instruction reads, and whatever is live after it, except what the instruction writes. Where a jump
# leads to two places, both count. In the code, `follow[n]` are the instructions that may come after instruction `n`.
# `LOCAL_OPS` are the opcodes whose argument is the number of a variable, except those in `NO_INDEX`. `MAKE_CELL` prepares
# a variable that inner functions share, and neither reads nor writes it.
#
# By hand, for `z = x + y; y = z * z; return y`, from the last line to the first: before `return y`, live is {y}.
# Before `y = z * z`, y is written and z is read, so live is {z}. Before `z = x + y`, z is written, x and y are
# read: {x, y}. In a loop, what is live at the beginning of the body is also live at its end. So the walk is
# repeated until nothing changes:
#
# %show minicompile.ch04_breaks.bytecode.live_table "while changed:" to "live[n], changed"
#
# The sets below are those of `training_loss`. The first part has four variables at its end. The rest reads two.

# %%
from minicompile.ch04_breaks.bytecode import live_table, localsplus_names

code = training_loss.__code__
live, names = live_table(code), localsplus_names(code)
interesting = ("LOAD_FAST", "STORE_FAST", "CALL", "RETURN_VALUE")
rows = [(i.offset, f"{i.opname} {i.argval if 'FAST' in i.opname else ''}", ", ".join(sorted(names[n] for n in live[i.offset])))
        for i in dis.get_instructions(code) if i.opname in interesting]
Table(["offset", "instruction", "live before it"], rows)

# %% [markdown]
# To pass everything would be correct as well. It would not be cheap. Here is a function with a large tensor that is
# dead after its sum is taken, compiled as it is, and with liveness switched off:


# %%
def wasteful(x):
    large = torch.exp(x)
    y = large.sum(0)
    history.append(y.sum().item())
    return y * 2


# %% [markdown]
# The compiler asks a function, `needed_locals`, which variables are live where a graph ends. For the second run we put
# another function in its place, which answers that all of them are:

# %%
from minicompile.ch04_breaks import resume


def everything(code, offset):
    return set(code.co_varnames)


sparing = watch(wasteful, torch.randn(64, 8), backend="eager").graphs[0]
real, resume.needed_locals = resume.needed_locals, everything
try:
    generous = watch(wasteful, torch.randn(64, 8), backend="eager").graphs[0]
finally:
    resume.needed_locals = real
for name, graph in (("live variables", sparing), ("all variables", generous)):
    print(f"graph 1 returns, with {name}:", ", ".join(n.name for n in graph.graph.output_node().all_input_nodes))

# %% [markdown]
# With all variables, `exp` is an output of the first graph. It has to be written to memory, where a fused kernel
# would have kept each element in a register, and it stays alive until the function returns. (`live_table` is an
# [exercise](exercise:liveness).)
#
# ## The first part
#
# What the first part has to do is known now: run the graph, carry out its effects, read what else is on the stack,
# and hand everything over. It hands over to a function that executes the breaking instruction. Such a function is
# called a *step*. (From here on that is what the word means. It has nothing to do with the counting of instructions.)
# The step will hand over to the function that has the rest.
#
# No piece calls the next one, for a reason that comes in "Who calls whom". It *returns* a pair, the next function and
# its arguments. So that nobody takes the pair for a result of the program, it has a class of its own, `TailCall`,
# which is a list and nothing else: it is emptied when it is called, so that what the program deletes later is gone
# then. A loop, `finish`, calls what such a pair says, as long as what comes back is again such a pair.
#
# All of this can be said in Python, as in [chapter 3](chapter:03). In the text below, `__out` are the results of the
# graph and `__G` are the globals of the user's function. `__K` is a list of objects that cannot be spelled in a text:
# here `__K[2]` is `TailCall` and `__K[3]` is `finish`. `__k1` is the bytecode of the step:

# %%
seen = watch(training_loss, x, w, backend="eager")
entry = seen.entry_text(0)
print(textwrap.dedent(entry[entry.index("        __t0 = ") : entry.rindex("    return __next")]))

# %% [markdown]
# The first three lines fetch the two methods that wait on the stack. The fourth makes a function of the step's
# bytecode, with the globals `__G`, a name, no default arguments (`None`) and no variables of a closure (`()`). It puts
# the function into a `TailCall`, together with its four arguments: the live variables `y` and `loss`, and the
# two methods. The fifth forgets what is not needed any more, so that memory is free while the rest runs. The last one
# starts the loop. (The bytecode is held weakly, and that it is still there is one of the guards. It lives as long as
# the function that it was made from.)

# %% [markdown] tags=["page"]
# ## Beginning in the middle
#
# Write the rest as Python source, too? There is no source that begins in the middle of an expression, with values
# on the interpreter's stack. Bytecode can do that. So the step and the resume function are made of bytecode: *the
# original bytecode behind a new beginning*. The new beginning takes the state as ordinary arguments, puts the
# values back on the stack, and jumps.
#
# ### One by hand
#
# Take the smallest case, in which one value waits on the stack:


# %%
def twice(x):
    return x.sum().item() * 2


# %% [markdown]
# The trace breaks at the call of `item`. The step executes this call. Then the number is on the stack, and nothing
# else. The rest is to multiply it by 2 and to return it. So the resume function has one parameter, which we name
# after its place on the stack, `__stack0`. It is the original, with two instructions in front: the first pushes the
# parameter, and the second jumps over everything that has happened already. In the first column is the end of
# `twice`, in the second the resume function as we would write it, and in the third what the compiler makes:


# %% tags=["fold"]
def argument(i):
    """A function or class by its name, a number where there is nothing better."""
    named = getattr(i.argval, "__name__", None) or getattr(i.argval, "co_name", None)
    return named or i.argrepr or ("" if i.arg is None else i.arg)


def listing(code, first=0, last=10**6):
    return "\n".join(
        f"{i.offset:4} {i.opname} {argument(i)}"
        for i in dis.get_instructions(code)
        if i.opname not in ("CACHE", "EXTENDED_ARG") and first <= i.offset <= last
    )


def jump_of(code):
    return next(i for i in dis.get_instructions(code) if i.opname == "JUMP_FORWARD")


def signature(code):
    return f"{code.co_qualname}({', '.join(code.co_varnames[: code.co_argcount])})"


def resume_function(found):
    """The code of the last resume function of a run, and where it goes on in the original."""
    code = found.states[-1].code
    return code, int(code.co_qualname.rpartition("_")[2])


rest, resumed_at = resume_function(watch(twice, torch.ones(3), backend="eager"))
jump = jump_of(rest)
middle = listing(twice.__code__, resumed_at)
Listings(
    [
        ("twice, the end", " ...\n" + middle),
        ("rest(__stack0), by hand", f"push __stack0\njump to {resumed_at}\n ...\n" + middle),
        (signature(rest), listing(rest, 0, jump.offset) + "\n ...\n" + listing(rest, jump.argval)),
    ]
)

# %% [markdown]
# Two things differ. The compiler's function has `RESUME` in front, with which every function begins, and all that follows has
# other offsets, as it has been moved. And it pushes `__stack0` in a way that also empties the variable; why is explained
# below. It is an ordinary function, and can be called:

# %%
print("the rest of twice, for 3:", types.FunctionType(rest, {})(3))

# %% [markdown]
#
# ### The one of `training_loss`
#
# In `training_loss` the step has more to put back, and more to hand over. It is the second listing. It begins as a
# resume function does. Then it executes the call, empties the stack into the variables `__exit0`, `__exit1` and
# `__exit2`, and returns a `TailCall` with the resume function, which is the third listing:

# %% tags=["fold"]
seen = watch(training_loss, x, w, backend="eager")
step = next(c() for c in seen.captured[0].constants if isinstance(c, weakref.ref) and c().co_name == "training_loss")
rest, resumed_at = resume_function(seen)
jump = jump_of(rest)
Listings(
    [
        ("training_loss, the end", listing(training_loss.__code__, resumed_at - 40)),
        ("the step: " + signature(step), listing(step)),
        (signature(rest), listing(rest, 0, jump.offset) + "\n ...\n" + listing(rest, jump.argval)),
    ]
)

# %% [markdown]
# (The listings are those of the Python that made this page. In 3.11 `PRECALL` stands before each `CALL`. It leaves the
# stack as it is, and the trace has passed it already, so the step begins with `CALL`. Behind it the step jumps to its
# exit, which begins with a `NOP` as the target of jumps. Here there is one exit, and it comes next.)
#
# Follow the stack. The step's arguments `__stack1` and `__stack3` are numbered by their places: below each of them is
# an empty slot, at places 0 and 2, which `PUSH_NULL` makes (from Python 3.13 on it lies above each of them). `CALL 0` takes
# the upper two and leaves the number. So three things are on the stack now: the empty slot, `history.append`, and the
# number. The upper two become arguments of the resume function. The empty slot is no object, so it is not handed over.
# The resume function makes it anew, pushes `history.append` and the number, and jumps over everything before the
# break. From there on it is the original.
#
# ### Building one
#
# CPython has no function that edits a code object. Its format is documented, though, so a code object can be taken
# apart and put together again. Four parts of it depend on positions: the instructions, the jumps among them, the
# table of exception handlers, and the table of line numbers. If one instruction is inserted, all of them are wrong.
#
# So the first step is to get rid of positions. [`disassemble`](ref:minicompile.ch04_breaks.bytecode.disassemble) makes a list
# of objects in which a jump points to *the instruction* that it jumps to. Now instructions can be inserted and
# dropped like elements of any list. At the very end [`encode`](ref:minicompile.ch04_breaks.bytecode.encode)
# computes positions anew.
#
# These frames were recorded while the resume function above was made once more.

# %% tags=["fold"]
from minicompile.ch03_capture.hook import kept
from minicompile.ch04_breaks import bytecode as bc


def spelled(i, names=()):
    """One decoded instruction; a jump names where it goes."""
    if i.target is not None:
        return f"{i.name} -> {i.target.name} (was at {i.target.offset})"
    argument = names[i.arg] if i.op in bc.LOCAL_OPS and i.op not in bc.NO_INDEX else i.arg
    return i.name if argument is None else f"{i.name} {argument}"


def building(code, point):
    """Make the resume function `point` again, from a copy of `code`, and keep what happens."""
    offset, frames, places = int(point.name.rpartition("_")[2]), [], {}
    real = resume.assemble, resume.restore_stack, bc.encode

    def assemble(draft, name, with_original, firm=False):
        some = [f"{i.offset:4} {spelled(i, draft.names)}" for i in draft.instructions if offset - 24 <= i.offset]
        frames.append((f"The original is taken apart. The rest begins at {offset}.", " ...\n" + "\n".join(some)))
        made = real[0](draft, name, with_original, firm)
        text = listing(made[0], 0, jump_of(made[0]).offset) + "\n ..."
        frames.append(("Positions are computed, and the code object is made.", text))
        return made

    def restore_stack(draft, slot, firm):
        old = {n: k for k, n in enumerate(draft.names)}
        count = len(draft.parameters) + len(draft.stack_names)
        rows = [(n, old.get(n, ""), k, "an argument" if k < count else "") for n, k in slot.items()]
        frames.append(("Every variable gets a place: live variables and stack values come first, since they are arguments.",
                       Table(["variable", "place before", "place now", ""], rows)))
        pushes = real[1](draft, slot, firm)
        places.update({k: n for n, k in slot.items()})
        said = f"The new beginning pushes the stack, bottom first: {', '.join(draft.stack)}."
        frames.append((said, "\n".join(spelled(i, places) for i in pushes)))
        return pushes

    def encode(instructions, handlers, line):
        at = next(k for k, i in enumerate(instructions) if i.offset >= 0)
        shown = [spelled(i, places) for i in instructions]
        shown[at + 3 : -6] = [" ..."]
        said = f"New beginning, jump, original: {len(instructions)} instructions. The jump points to an object."
        frames.append((said, "\n".join(shown)))
        return real[2](instructions, handlers, line)

    resume.assemble, resume.restore_stack, bc.encode = assemble, restore_stack, encode
    try:
        resume.make_resume(code.replace(), offset, set(point.locals), point.stack)
    finally:
        resume.assemble, resume.restore_stack, bc.encode = real
    return frames


point = next(p for p in kept(resume.pieces, training_loss.__code__).values() if "resume" in p.name)
Walk("A resume function is built", building(training_loss.__code__, point))

# %% [markdown]
# One detail of the last frame needs an explanation. The jump's argument is the number of code units that it jumps
# over. An argument above 255 does not fit into one byte, so the instruction gets a prefix, `EXTENDED_ARG`. The
# prefix makes the code longer, and this may make another jump too long. `encode` begins without any prefix and lets
# instructions grow until everything fits. They never shrink, so this ends.
#
# Which instructions restore the stack depends on the release. 3.12 and 3.13 have `LOAD_FAST_AND_CLEAR`, made for
# comprehensions: it pushes a variable and empties it. 3.11 has no such instruction. There `LOAD_CLOSURE` pushes the
# variable, and `DELETE_FAST` empties it. (`LOAD_CLOSURE` is meant for variables that hold a cell, which inner functions
# share, but it pushes whatever the variable holds.) A plain `LOAD_FAST` would push it as well, but two things would be wrong.
#
# The variable would keep its value until the function returns. On the original's stack the value lived only until it was
# used. If it is a large tensor, that is a difference in memory.
#
# And the value would get a guard. The resume function is captured, too, and a variable that is loaded counts as used.
# But a value that only goes back to its place has not been used yet. A loop's iterator, for
# example, is another object at each call, and the loop's body does not depend on it. So capture treats these two
# instructions as a mere move. A guard is made when the program does something with the value. To load a variable by
# `LOAD_FAST`, as the program's own code does, is to do something with it, even if the value then only waits on the stack
# until the next break.
#
# ### What it is guarded by
#
# A resume function is captured when it is called for the first time, as any function is, and what it reads gets a
# guard. Among its arguments is the number that `item` has given. The rest appends this number to the list. Here are
# four calls, with the guards on that number:

# %%
minicompile.reset()
again = minicompile.compile(training_loss, backend="eager")
for call in range(4):
    with watching() as seen_again:
        again(torch.randn(32, 32), torch.randn(32, 32))
    learnt = [f"{g.kind}, expected {g.expected}" for c in seen_again.captured for g in c.guards if "pending value 2" in str(g.source)]
    failed = [r["why"].partition("  #")[0] for r in seen_again.recompiles]
    print(f"call {call + 1}: captured {len(seen_again.captured)} parts", *failed, *learnt, sep="\n    ")

# %% [markdown]
# At the first call the number is a constant of the trace, like any Python number, so the guard asks for this very
# value. At the second call the guard fails. A number that has changed once will change again, so now it becomes an
# input, and the guard asks only for its type. From the third call on nothing is compiled. This is the same way in
# which the sizes of tensors become symbols ([chapter 2](chapter:02)). The first part was compiled once. (A capture
# is not a graph. A part may be captured a second time only because a number has changed, so there can be more
# captures than graphs.)
#
# ### Who calls whom
#
# The first part could call the step, the step the resume function, and that the next step. In a loop of a thousand
# rounds with a break in each, this would be a chain of two thousand calls, and Python would raise a
# `RecursionError`. So a piece *returns* what is to be called next, and one loop at the top calls it. Such a loop is
# named a *trampoline*:
#
# %show minicompile.ch04_breaks.resume.finish

# %%
depths = []


@minicompile.disable
def note_depth():
    frame, depth = sys._getframe(), 0
    while frame := frame.f_back:
        depth += 1
    depths.append(depth)


def deep(x):
    for _ in range(2000):
        x = torch.tanh(x)
        note_depth()
    return x


minicompile.compile(deep, backend="eager")(torch.ones(3))
print("rounds:", len(depths), " different depths of the stack:", len(set(depths)))

# %% [markdown] tags=["page"]
# ## Harder places
#
# ### Inside `with`
#
# A graph cannot be left open. Where the break is inside of `with torch.autocast(...)`, the first graph ends by
# leaving it. Python then executes the line *inside* of the context, and the rest is inside, too.
# So the resume function gets the context manager and enters it anew, with the instruction that the user's `with`
# used. Below are the beginning of the resume function and its graph, which is the second of the two. (`torch.no_grad()` is simpler: it
# is Python code that sets a flag, so it is inlined, and what the flag is at the break is an effect of the first part like others.)


# %%
def report(x, w):
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ w
        history.append(y.mean().item())
        return torch.relu(y)


inside = watch(report, x, w, backend="eager")
rest = inside.states[-1].code
print(signature(rest) + "\n" + listing(rest, 0, jump_of(rest).offset) + "\n")
print(print_graph(inside.graphs[1]))

# %% [markdown]
# On the stack of the original lies the method `__exit__` of the context, which Python will call at the end of the
# block. The resume function must have one as well, at the same place. `BEFORE_WITH` calls `__enter__` and pushes
# `__exit__`, so afterwards the stack is as it was. To each kind of value on the stack belongs a way to put it back.
# There are five:
#
# | kind | what it is | how it comes back |
# |---|---|---|
# | value | any object, for example a loop's iterator | pushed |
# | null | the empty slot beside a callable | `PUSH_NULL` |
# | context | the `__exit__` of a context that the graph implements | `BEFORE_WITH` |
# | handling | the exception that was current when a handler began | `PUSH_EXC_INFO` |
# | lasti | a position, which is used in tracebacks only | any number |
#
# The last two are on the stack only where a break is inside of a handler, such as the block of an `except`.
#
# ### Inside `try`
#
# A `try` is the reason why the step *copies* the instruction, where the text `loss.item()` would be shorter. If the
# line raises an exception, it belongs to the user's handler. CPython finds handlers in a table: from this offset to
# that one, go there. An instruction that is copied gets a copy of its entry, and the handlers are copied behind it. In
# fact the whole original is copied behind it. So when the instruction raises, the handler and all that follows it run
# inside of the step, as plain Python without a graph.
#
# In the code below, `w` is the walk along the instructions, and `w.draft` is the function that is being built.
# `position` gives the place of each original instruction. An entry `h` of the table covers the instructions from
# `h.first` to `h.last`. The copy is appended to the body, and for every entry that covers the original, a new entry
# covers the copy alone. It is added to the new table, `w.draft.own`, with three fields of the old one: where the handler
# is (`target`), how high the stack is there (`depth`), and whether the position is pushed as well (`lasti`):
#
# %show minicompile.ch04_breaks.steps.copy_of


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
# ### In a loop
#
# A loop that breaks in every round is the test of any such scheme, and tiny did not pass it. A resume function is
# made once for a position in the original code and a set of variables. So each round resumes in the same function,
# whose graph is used again, because the loop variable is an input of it. The iterator passes through on the
# stack, without a guard:

# %%
for n in (5, 50, 500):
    found = watch(rounds, torch.randn(8), n, backend="eager")
    print(f"{n:3} rounds: {len(found.graphs)} graphs, {len(found.states)} functions")
for graph in found.graphs:
    print(next(line for line in print_graph(graph).splitlines() if "mul(" in line).partition("  #")[0])

# %% [markdown]
# Why two graphs and not one? The first one is that of the function, up to the first break. The second one is that
# of the loop's body, and serves all other rounds: a number is a constant until it changes, but what a loop counts will change, so that
# behind a break it is an input from the beginning. The four functions are `rounds` itself, the
# rest after `item`, the loop's body, and the end behind the loop. The rest and the end have no tensor operation, so they
# have no graph.
#
# Each round has a second break. After `item()`, the rest appends the number, jumps back, and asks the iterator for
# the next value. That is a real iterator by now, which the trace cannot advance without changing it. So the graph
# ends, and a step executes `FOR_ITER`. (A loop over the modules of a model with no break in the turns that are left is another matter:
# its rest is unrolled into one graph, guarded by what the iterator has [still to give](ref:minicompile.ch03_capture.iterate.begun_before).)
#
# Should the step end there? Think of a loop whose body ends with `print(i)`. After this call, three instructions
# follow: drop the result, jump back to the head of the loop, and `FOR_ITER`, which breaks again. A resume function
# for these three would have guards, and an empty graph. So a step goes on, as long as the instructions only put a
# result away: storing it in a variable, dropping it, appending it to the list of a comprehension. A jump that is
# always taken is followed. `FOR_ITER` and conditional jumps are copied, and they can go two ways. One way is walked
# on. The other one, and the place where the walk ends, is an *exit*. An exit returns a `TailCall` with the resume
# function for that place. Here is the step of `rounds`:

# %% tags=["fold"]
drawing(
    {
        "begin": ("push the iterator", "from __stack0", "input"),
        "for": ("FOR_ITER", "copied", "bad"),
        "store": ("STORE_FAST i", "copied: puts away", "compute"),
        "next": ("exit: the next round", "body(x, i, iterator)", "library"),
        "end": ("exit: the end", "after the loop(x)", "library"),
    },
    [("begin", "for"), ("for", "store"), ("store", "next"), ("for", "end")],
    "The step pushes the iterator and executes FOR_ITER. If there is a next value, the step stores it in i and leaves by the exit for the "
    "next round, with x, i and the iterator. If there is none, it leaves by the exit for the end, with x.",
    "One instruction, two exits. The walk stops behind STORE_FAST, because the body's first instruction does more than put away.",
    width=170,
)

# %% [markdown]
# And this is its bytecode. The second exit, the one for the end, is written first. Each exit empties the stack into variables, builds
# the `TailCall`, and returns it:

# %%
steps = [p.code for p in kept(resume.pieces, rounds.__code__).values() if "resume" not in p.name]
loop_step = next(c for c in steps if "FOR_ITER" in [i.opname for i in dis.get_instructions(c)])
print(signature(loop_step) + "\n" + listing(loop_step))

# %% [markdown]
# ## What a break costs
#
# Here is the running example, with a look at the activations in the middle.


# %%
class Watched(Block):
    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        history.append(x.abs().max().item())
        return x + self.down(F.gelu(self.up(self.norm2(x))))


whole, x = example()
broken = Watched()
broken.load_state_dict(whole.state_dict())

# %% [markdown]
# It has the parameters of the block without the look. We compile both, and count what the compiler makes of each: its
# graphs, its kernels, and the guards of all its frames. Then we take the time of a call:

# %%
rows = []
for name, module in (("whole", whole), ("broken", broken)):
    minicompile.reset()
    compiled = minicompile.compile(module)
    with watching() as seen, torch.no_grad():
        compiled(x)
    with torch.no_grad():
        seconds = best_time(compiled, x, repeat=100)
    kernels = sum(len(h["compiled"].sources) for h in seen.halves)
    guards = sum(len(list(c.guards)) for c in seen.captured)
    rows.append((name, len(seen.graphs), kernels, guards, f"{seconds * 1e6:.0f} us"))
Table(["block", "graphs", "kernels", "guards", "time of one call"], rows)

# %% tags=["fold"]
drawing(
    {
        "g1": ("graph 1", "attention half", "compute"),
        "stat": ("x.abs().max()", "kernel", "compute"),
        "item": (".item()", "waits for the device", "bad"),
        "list": ("history.append", "Python", "input"),
        "g2": ("graph 2", "reads x from memory", "compute"),
    },
    [("g1", "stat"), ("stat", "item"), ("item", "list"), ("list", "g2"), ("g1", "g2")],
    "Graph one computes the attention half and the maximum. item waits for the device. Python appends the number. Then graph two "
    "reads x, which graph one has written to memory.",
)

# %% [markdown]
# The numbers are the same, but two graphs have two sets of guards, and nothing is fused across the cut: `x` is
# written by the first graph and read by the second. On a GPU a third thing is added. Kernels are queued there, and
# Python runs ahead of them. `item()` needs a number, so it waits until the queue is empty, and the device then
# waits until Python has caught up.
#
# ## Saying why
#
# A break that is not reported is a slow program without an explanation. `explain` shows the line, the column, and a
# way out. (Two exercises are about that: [count the graphs](exercise:predict-breaks) of a program, and [make one of
# many](exercise:no-breaks).)

# %%
report = minicompile.explain(broken, backend="eager")(x)
for b in report.breaks:
    print(f"{b.reason}\n    {b.source}\n    {b.caret}\n-> {b.advice}")

# %% [markdown]
# CPython keeps the columns of each instruction, for tracebacks, and that is where the caret comes from. How often
# do breaks happen in practice? Here are the 92 architectures of the `transformers` library with the reasons for
# their breaks, as measured by the test suite. A reason with `next()` is a real iterator that the trace cannot advance, as
# in the loop above. `aten._local_scalar_dense` is the operator under `item()`, which also `int(t)` and `float(t)` call. A
# reason with "raised" is the error of an operator on fakes: the graph ends, and CPython executes the line.

# %%
from collections import Counter

data = results("transformers")
reasons = Counter()
for row in data["rows"]:
    reasons.update({shortened(b.split(" (")[0], 70) for b in row["breaks"]})
print(
    f"{data['ok']} of {data['architectures']} give eager's numbers, {data['one graph']} as one graph "
    f"(transformers {data['transformers']}, torch {data['torch']}, commit {data['commit']})"
)
Table(["reason", "architectures"], reasons.most_common(6))

# %% [markdown]
# ## What torch.compile does differently
#
# TorchDynamo has resume functions, too; the idea is its authors'. It generates the code before the break and the
# breaking instruction as bytecode, and reconstructs the `with` blocks it knows. A break inside of a `for` loop
# makes it give up on the frame and try the functions that the loop calls, unless nested breaks are enabled. It can
# capture some of what breaks here: `item()` as an *unbacked* symbol (`capture_scalar_outputs`), and branches on
# data with `torch.cond`. When tracing fails it restarts from the beginning with a list of places where to break
# (*speculation log*), which is the same as tracing twice.
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
