# %% [markdown]
# # Capture: from a running function to a graph
#
# *What does a function read, and which branch does it take?* The user hands over a Python function. The compiler
# wants a list of tensor operations. Between the two lies all of Python: branches, loops, attribute lookups, calls
# into modules, lists that grow, dictionaries of settings. This chapter is about getting the list without asking the
# author to write the function differently, and without changing what it does.

# %%
import inspect

import torch
import torch.nn.functional as F

import minicompile
from chapters import tiny
from chapters._lib import Listings, Table, Walk, best_time, drawing, example, head, lines, shortened, step_through, watch
from minicompile.ch01_graphs.graph import print_graph

# %% [markdown]
# ## The naive version: call it and listen
#
# The obvious way: call the function with objects that pretend to be tensors and write down what is done to
# them. PyTorch offers the door. When one of its functions is given an object that has a method `__torch_function__`,
# it calls this method instead of computing anything. Operators such as `+` are methods of the object anyway:


# %%
class Proxy:
    """Stands for a tensor. Whatever is done to it is written down."""

    def __init__(self, name):
        self.name = name

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return written_down(function.__name__, args)

    def __add__(self, other):
        return written_down("add", (self, other))

    def __mul__(self, other):
        return written_down("mul", (self, other))


# %% [markdown]
# To write an operation down is to add a line to a list, and to make one more proxy, which stands for the result. A
# recording is the list after one call:

# %%
log = []


def written_down(name, args):
    result = Proxy(f"v{len(log)}")
    log.append(f"{result.name} = {name}({', '.join(getattr(a, 'name', repr(a)) for a in args)})")
    return result


def record(function, *names):
    log.clear()
    function(*map(Proxy, names))
    return list(log)


print("\n".join(record(lambda x, y: F.gelu(x + y) * 2, "x", "y")))

# %% [markdown]
# It works, and `torch.fx.symbolic_trace` and `jax.jit` are built on this idea. Here is what goes wrong when
# the program is not written for it.

# %%
settings = {"scale": 2}
calls = []


def layer(x):
    calls.append(1)  # the program counts its calls
    return F.relu(x) * settings["scale"]


trace = record(layer, "x")
print("\n".join(trace))
print("calls counted by one trace:", len(calls))


def replay(x):  # what the trace says, as a function
    return F.relu(x) * 2


settings["scale"] = 3
one = torch.ones(1)
print("trace:", replay(one).item(), " program:", layer(one).item())

# %% [markdown]
# Two wrong answers, and no error. The trace contains the 2 but not where it came from, so nobody notices
# that it is out of date. And the append happened while tracing, once; replaying the trace a hundred times
# counts nothing. A third case at least complains:

# %%
try:
    record(lambda x: x * 2 if x.sum() > 0 else x, "x")
except Exception as error:
    print(f"{type(error).__name__}: {error}")

# %% [markdown]
# What is missing is not a better proxy. A proxy sees what is done *to tensors*. The 2 was read from a
# dictionary, the list was appended to, the branch was taken: none of that passes through a tensor. To see
# it one has to be the machine that executes the function.
#
# ## The idea: be the interpreter
#
# CPython runs bytecode on a stack machine. Its instructions are few and simple. So write a second such
# machine, whose stack holds descriptions of objects. For arithmetic on two tensor descriptions it writes a
# graph node, for everything else it works out the answer at once. It sees every read, so it can guard it,
# and every write, so it can postpone it.
#
# The core fits on a page. This one knows four instructions. Strings stand for tensors, and what is no string is a
# value that is known:

# %%
import dis


def interpret(function, *args):
    """Run straight-line arithmetic on names."""
    graph, stack = [], []
    variables = dict(zip(function.__code__.co_varnames, args))
    for i in dis.get_instructions(function):
        if i.opname.startswith("LOAD_FAST"):
            names = [i.argval] if isinstance(i.argval, str) else i.argval  # 3.13 loads pairs
            stack += [variables[n] for n in names]
        elif i.opname == "LOAD_CONST":
            stack.append(i.argval)
        elif i.opname == "BINARY_OP":
            b, a = stack.pop(), stack.pop()
            stack.append(arithmetic(a, i.argrepr, b, graph))
        elif i.opname == "RETURN_VALUE":
            return graph, stack.pop()


# %% [markdown]
# Three of the four only move things. The fourth decides when something is computed. If one operand is a tensor, that
# happens when the graph runs, so a line of the graph is written. If both are known, it happens now:


# %%
def arithmetic(a, operator, b, graph):
    if isinstance(a, str) or isinstance(b, str):
        graph.append(f"v{len(graph)} = {a} {operator} {b}")
        return f"v{len(graph) - 1}"
    return eval(f"{a} {operator} {b}")


def polynomial(x, n):
    return x * (n + 1) + x


print(interpret(polynomial, "x", 3))

# %% [markdown]
# `n + 1` is gone: it was computed at compile time, because `n` is a number. That is right as long as `n` is
# 3. The real machine says so by adding a guard when it reads `n`.
#
# Follow the stack by hand. `LOAD_FAST x` pushes the name `x`, `LOAD_FAST n` pushes 3, `LOAD_CONST` pushes 1. The
# first `BINARY_OP` pops 3 and 1. Both are numbers, so it pushes 4. The second one pops `x` and 4. One of them
# stands for a tensor, so a line is written, and its name is pushed. The stack holds two kinds of things: values
# that are known now, and names of values that will be known when the graph runs. Keeping the two apart is most of
# what capture does. The field calls it *partial evaluation*.
#
# ### tiny's machine
#
# [Part 3 of tiny](chapter:tiny.3), the compiler in one file, completes this to a machine for a useful part of
# Python. What stands for a tensor is a fake ([chapter 1](chapter:01)), so operations on tensors are simply
# executed, and the recorder notes them. An instruction has a handler in a table, which says what it pops and gives
# back what it pushes. This is the heart of it:

# %%
source = inspect.getsource(tiny.step)
print(source[: source.index("    except")])

# %% [markdown]
# The lines that are left out are for a handler that fails. They put the stack back as it was (`before`), and take back the
# guards that the instruction has written: `m.outside.lines` are all lines of guards so far, and `written` says how many
# there were before the instruction. The handler itself is called in the last line above.
#
# What is read from outside goes through a function that writes guards ([chapter 2](chapter:02)). A Python function
# that is called gets a frame of its own on the machine's list of frames. That is all, and it is enough to train a
# GPT. Here are five programs for which it is not enough. The first two leave a block of code in another way than by
# its last instruction, one by an exception, the other at the end of a `with`:


# %%
def with_handler(x):
    try:
        scale = {"a": 2}["b"]
    except KeyError:
        scale = 3
    return torch.relu(x) * scale


def with_context(x):
    with torch.no_grad():
        return torch.relu(x) * 2


# %% [markdown]
# The next two call something that is not an ordinary function, a generator and the formatting of a text. The last one
# changes an object that others can see:


# %%
def with_generator(x):
    return torch.relu(sum(x * k for k in range(3)))


def with_text(x):
    return torch.relu(x) * len(f"{x.dim()} dims")


class Counter:
    calls = 0


counter = Counter()


def with_effect(x):
    counter.calls += 1
    return torch.relu(x) * 2


# %% [markdown]
# Into how many parts does tiny take each of them, and why? A graph that ends early is a graph break ([chapter
# 4](chapter:04)):

# %%
rows = []
for program in (with_handler, with_context, with_generator, with_text, with_effect):
    small = tiny.compile(program, backend=tiny.eager)
    small(torch.ones(3))
    why = small.breaks[0].partition(" at 0x")[0] if small.breaks else "instructions that it does not know"
    ours = len(watch(program, torch.ones(3), backend="eager").graphs)
    rows.append((program.__name__, sum(map(len, small.entries.values())), shortened(why, 60), ours))
Table(["program", "tiny: parts", "because", "minicompile: graphs"], rows)

# %% [markdown]
# The first two are not even begun by tiny, since exceptions and contexts need a table beside the bytecode. A generator
# keeps a frame of its own between two items, and tiny can only leave it to Python, item by item. For the text, tiny calls
# a function of its own, `formatted`, as if the program had called it. tiny has a list of functions that may be called
# while tracing, and `formatted` is not in it. The last
# one writes to an object that others can see, and tiny leaves every such write to Python. Each of them is one graph
# in the real machine. The difference is not in the loop. It is in what stands on the stack, and in what an
# instruction may do with it.

# %% [markdown] tags=["page"]
# ## The real version
#
# The loop is the same. The instructions are in a table, filled by decorated functions whose parameters are what the
# instruction pops and whose result is what it pushes. Three parameters come before these. `tx` is the *tracer*, the
# state of one whole capture: the graph so far, the guards, the inputs, and the writes that are postponed. `frame` is
# one function that is being executed: its code, its variables, its stack, and `ip`, the number of the next instruction.
# When the program calls a Python function, a new frame is made, with the same tracer. The third is the instruction
# itself, and `i.argval` is what it refers to: the name of a variable, a constant, the target of a jump.
#
# Here is one instruction of a loop. It asks the iterator for its next value. If there is one, the iterator stays on the
# stack below it. If not, the handler jumps behind the loop.
#
# %show minicompile.ch03_capture.opcodes.for_iter
#
# The loop takes the next step, which is a handler, the number of values that it pops, and the instruction:
#
# %show minicompile.ch03_capture.interpreter.run_instructions "handler, pops, instruction" to "tx.ops += 1"
#
# The handler gets the popped values as its arguments. What it returns is pushed: one value, a list of them, or
# nothing. The handlers of `return` and `yield` give a `Leave`, which holds a value. With it this run of the frame ends:
#
# %show minicompile.ch03_capture.interpreter.run_instructions "if type(pushed) is list" to "stack.append(pushed)"
#
# Between the two stands the call of the handler, and two kinds of exceptions may come out of it. They must not be
# confused.
#
# A `UserError` belongs to the *program*: it would have been raised in eager code as well. It looks for an `except`, as
# in CPython. Beside the bytecode of a function CPython keeps its *exception table*. For each range of instructions
# inside of a `try` or a `with`, the table says where the handler begins, and how high the stack is there. So `unwind`
# cuts the stack to this height, pushes the exception and jumps ([exercise](exercise:unwind)). A frame without a handler
# ends, and the search goes on in the frame that called it. If no frame has one, the capture is given up. CPython
# evaluates the whole frame, and the exception is raised for real.
#
# `Unsupported` belongs to the *compiler*: it does not know what to do here, and the graph ends.
#
# The errors of tensor operators are of the second kind. When an addition on fakes fails because shapes do not fit, eager
# would raise as well, but its message and perhaps its type are the kernel's affair. So the graph ends in front of that
# line, CPython executes it, and whatever it raises is raised inside of the program's own `try`. If the line does raise,
# CPython also executes the handler and all that follows it in this function, and none of that becomes a graph. If it
# does not raise, what follows the line is captured as a function of its own ([chapter 4](chapter:04)).
#
# ### What stands on the stack
#
# tiny has Python's own objects on its stack. The real machine has descriptions of objects. The book calls them values, and
# in the code each is an [`AbstractValue`](ref:minicompile.ch03_capture.values.AbstractValue). A value can say more than an object:
# where the object was read from (its source), and whether it existed before the call or was made by the trace. A list of tensors,
# for example, is a description that holds descriptions. The program may append to it. The trace then changes its
# description, and the real list stays as it is until the graph has run.

# %% tags=["fold"]
drawing(
    {
        "value": ("a value", "what an instruction sees", "plain"),
        "const": ("a constant", "3, 'mean', None", "compute"),
        "tensor": ("a tensor", "a graph node, a fake", "library"),
        "box": ("a container", "values inside", "compute"),
        "obj": ("an object", "the real one, its source", "input"),
    },
    [("value", "const"), ("value", "tensor"), ("value", "box"), ("value", "obj")],
    "A value is a constant, a tensor with its graph node and its fake, a container of values, or an object that existed before, with its "
    "source.",
    "The most frequent kinds of values. Only an orange one becomes a name in the graph.",
)

# %% [markdown]
# Below is the interpreter at work on a small function,
# instruction by instruction: what is on the stack, and which instructions write to the graph. (`NULL + range` means that
# CPython pushes an empty slot together with the function, where the `self` of a method would be. The table does not show
# empty slots.)


# %%
def residual(x, w, steps):
    for _ in range(steps):
        x = x + F.gelu(x @ w)
    return x


x, w = torch.randn(8, 16), torch.randn(16, 16)
step_through(residual, x=x, w=w, steps=2)

# %% [markdown]
# The loop ran twice, at compile time, and left two copies of its body. The jump, the iterator and the
# counter are gone. What is left of the function is three things. A graph:

# %%
seen = watch(residual, x, w, 2, backend="eager")
print(print_graph(seen.graphs[0]))

# %% [markdown]
# The conditions under which it may be used. The first ones are about the state of the library. The others are
# answers that the trace got, in the order in which it asked. It looked for `range` among the globals, did
# not find it, and took the builtin: both are written down.

# %%
import linecache

from minicompile.ch02_guards.guards import in_words


def line(location):
    return linecache.getline(location.filename, location.lineno).strip() if location else ""


facts = seen.captured[0].guards
Table(["kind", "in words", "asked by"], [(g.kind, in_words(g), line(g.location)) for g in facts])

# %% [markdown]
# And the text of a function around the two, which [chapter 2](chapter:02) completes with the checks. In it, `__out` is the
# list of the graph's results:

# %%
print(seen.captured[0].body)

# %% [markdown]
# This is *specialisation*. Its price is in the table: `steps == 2` is a guard, and another number of steps
# is another graph. With `steps == 0` there would be no graph at all: a way through the program that meets no tensor operation
# makes no node, and the generated function only checks its guards and returns `x`.
#
# ### One function makes nodes
#
# Whatever the program does to a tensor ends in one function, [`emit`](ref:minicompile.ch03_capture.tensors.emit). It
# gets the operation and its arguments as values. Every value that stands for a tensor has two sides: a node, which is
# its name in the graph, and a fake, which knows its shape. If all arguments were tensors, and if each operation gave one
# new tensor, the function would have six lines:
#
#     def emit(tx, target, args):
#         nodes = [value.node for value in args]
#         fakes = [value.fake for value in args]
#         result = target(*fakes)
#         node = tx.graph.call_function(target, nodes)
#         return TensorVal(node, result)
#
# The real one has the same order. The arguments, which may be numbers and lists of tensors as well, are written down
# twice, once with nodes and once with fakes. All fakes among them are collected in the list `fakes`, and their
# version numbers are noted:
#
# %show minicompile.ch03_capture.tensors.emit "fx_args" to "before = "
#
# Then the operation runs, on the fakes ([chapter 1](chapter:01)). If the shapes do not fit, this is where it shows,
# with the user's line. And the versions of the fakes tell whether the operation has written to one of them. No list
# of operators that write is needed. (`check_strided` is for `as_strided` and its like, the `AS_STRIDED` operators, which
# look at memory by addresses and need a check of their own.)
#
# %show minicompile.ch03_capture.tensors.emit "result = run_fake" to "written = "
#
# Not every operation becomes a node. `x.dim()` gives a number that is known now, so it is a constant of the trace.
# `x.contiguous()` of a tensor that is contiguous gives back the very tensor that it got, so its result is the value
# that is there already. [`known_result`](ref:minicompile.ch03_capture.tensors.known_result) looks for both:
#
# %show minicompile.ch03_capture.tensors.known_result "if not holds_tensor" to "return tx.tensors.of_fake"
#
# All others are written down, and what is pushed on the stack is a value with the new node and the new fake. (`updated` is
# empty for nearly all operations. It is for tensors that count, such as the number of steps of an optimizer: when a
# number is added to a tensor without dimensions, the trace keeps beside the tensor what has been added.)
#
# %show minicompile.ch03_capture.tensors.emit "node = tx.graph.create_node" to "return wrap_result(tx, node, result)"
#
# ### Three Pythons
#
# CPython changes its instructions in every release. Here is one function as 3.11, 3.12 and 3.13 compile it.
# The listings are recorded; the cell checks the one of the Python that runs it.

# %% tags=["fold"]
import sys


def means(xs, training):
    if training:
        xs = [x.mean() for x in xs]
    return xs


RECORDED = {
    "3.11": """RESUME, LOAD_FAST training, POP_JUMP_FORWARD_IF_FALSE, LOAD_CONST <listcomp>, MAKE_FUNCTION, LOAD_FAST xs,
        GET_ITER, PRECALL, CALL, STORE_FAST xs, LOAD_FAST xs, RETURN_VALUE""",
    "3.12": """RESUME, LOAD_FAST training, POP_JUMP_IF_FALSE, LOAD_FAST xs, GET_ITER, LOAD_FAST_AND_CLEAR x, SWAP,
        BUILD_LIST, SWAP, FOR_ITER, STORE_FAST x, LOAD_FAST x, LOAD_ATTR mean, CALL, LIST_APPEND, JUMP_BACKWARD,
        END_FOR, STORE_FAST xs, STORE_FAST x, LOAD_FAST xs, RETURN_VALUE, SWAP, POP_TOP, SWAP, STORE_FAST x, RERAISE""",
    "3.13": """RESUME, LOAD_FAST training, TO_BOOL, POP_JUMP_IF_FALSE, LOAD_FAST xs, GET_ITER, LOAD_FAST_AND_CLEAR x,
        SWAP, BUILD_LIST, SWAP, FOR_ITER, STORE_FAST_LOAD_FAST x x, LOAD_ATTR mean, CALL, LIST_APPEND, JUMP_BACKWARD,
        END_FOR, POP_TOP, STORE_FAST xs, STORE_FAST x, LOAD_FAST xs, RETURN_VALUE, SWAP, POP_TOP, SWAP, STORE_FAST x,
        RERAISE""",
}
recorded = {version: [" ".join(i.split()) for i in text.split(",")] for version, text in RECORDED.items()}
here = recorded[f"{sys.version_info[0]}.{sys.version_info[1]}"]
assert [i.opname for i in dis.get_instructions(means)] == [i.split()[0] for i in here]
Listings([(version, "\n".join(listing)) for version, listing in recorded.items()])

# %% [markdown]
# In 3.11 a comprehension is a function of its own, made and called on the spot. Since 3.12 it is a loop in
# the same frame, which hides an outer `x` and puts it back, also when an exception passes (the last five
# instructions). A method is `LOAD_METHOD` in 3.11 and a flag of `LOAD_ATTR` later; 3.13 asks for a truth
# value before it jumps, packs two locals into one instruction, and leaves the spent iterator to a
# `POP_TOP`. The differences are many and small: a name that one release has is a handler that the others
# never meet. [`opcodes.py`](code:minicompile/ch03_capture/opcodes.py) begins with the whole table.
#
# ### Side effects
#
# Here is the counting layer again.

# %%
settings["scale"] = 2
seen = watch(layer, one, backend="eager")
entry = seen.entry_text()
before = len(calls)
compiled = minicompile.compile(layer, backend="eager")
for _ in range(5):
    compiled(one)
print("five calls counted:", len(calls) - before)
settings["scale"] = 3
print("after the setting changed:", compiled(one).item(), " eager:", layer(one).item())

# %% [markdown]
# Right both times. The first version of the generated function shows how: `settings["scale"]` is compared
# with 2 before the graph may run, and the append is Python text after it. When the setting changed, that
# guard failed and a second version was made ([chapter 2](chapter:02)). `__refused` stands for the case in which the
# graph raises an error, as for an index that is out of range. Then no statement behind the graph has run yet, and
# `__EVALUATE` leaves the whole call to CPython, which raises the error at the program's own line.

# %%
print(entry[entry.index("def __compiled") :])

# %% [markdown]
# How did the append get there? While tracing, nothing was appended to the real list. That would be wrong: the trace
# runs once, and perhaps it fails in the middle and the function is executed by CPython after all. So every write of the
# program goes to the *description* of the object, and statements behind the graph carry it out. They are called the
# *epilogue*. They follow from a comparison of what each description held at first with what it holds at the end. There
# are three rules for it.
#
# **A snapshot before the first write.** [`touch`](ref:minicompile.ch03_capture.effects.touch) is called before any
# description changes. If the object existed before the call, and this is the first write to it, a copy of what the
# description holds is kept. Objects that the trace itself has made need no copy, because nobody has seen them yet. The
# attributes of an object need none either. The description of an object holds only those attributes that the trace has
# assigned, so there is nothing to compare them with.
#
# **The difference at the end.** It does not matter how the program got there. An item that is appended and popped again
# is no difference. Of a list, what lies between the common beginning and the common end is replaced. Of a dictionary,
# some keys are deleted and some are written. (A key that was deleted and set again is among both, since it has moved to
# the end.) Of an object, the attributes that were assigned are assigned.
#
# **Read first, then write.** The statements have one order. After `a.x, a.y = a.y, a.x` the new
# `a.y` is the old `a.x`; if `a.x` were written first, the second statement would read the new one. So everything that a
# statement needs is read into a variable before the first statement writes.
#
# The program below does all three kinds. Step through it line by line. The table shows every object that has been
# written to so far: what its snapshot says, what the description says now, and what the real object holds, which is
# always the same.


# %%
class Meter:
    def __init__(self):
        self.count, self.last = 0, None


log, totals, meter = ["begin", "middle"], {"calls": 0, "old": 1}, Meter()


def observed(x):
    y = F.relu(x)
    log[1] = y
    log.append("end")
    log.pop()
    totals["calls"] += 1
    del totals["old"]
    meter.last, meter.count = meter.count, meter.count + 1
    return y.sum()


# %% tags=["fold"]
import dataclasses

from minicompile.ch03_capture import capture as capture_module
from minicompile.ch03_capture.effects import settled
from minicompile.ch03_capture.values import Const, DictVal, ListVal, TensorVal


def held(content):
    """What a description or its snapshot holds, in words."""
    if isinstance(content, list):
        return "[" + ", ".join(map(held, content)) + "]"
    if isinstance(content, dict):
        pairs = [(key, item[1] if isinstance(item, tuple) else item) for key, item in content.items()]
        return "{" + ", ".join(f"{key!r}: {held(item)}" for key, item in pairs) + "}"
    item = settled(content)
    if type(item) is Const:
        return repr(item.value)
    return f"the tensor {item.node.name}" if type(item) is TensorVal else "not looked at" if item is not None else "-"


def writes_of(function, names, **args):
    """A frame for each line of the function that changed a description."""
    frames, last, real_start = [], [None], capture_module.start_trace
    text, first = inspect.getsourcelines(function)

    def note(tx, instruction):
        rows = []
        for value, before in tx.effects.changed.values():
            now = value.items if type(value) in (ListVal, DictVal) else value.attrs
            name = next(n for n, thing in names.items() if thing is value.real)
            real = value.real if isinstance(value.real, (list, dict)) else vars(value.real)
            rows.append((name, held(before) if before is not None else "none needed", held(now), repr(real)))
        if rows and rows != last[0]:
            last[0] = rows
            line = text[instruction.positions.lineno - first].strip()
            frames.append((line, Table(["object", "snapshot", "the description now", "the real one"], rows)))

    def start(*arguments):
        tx, frame = real_start(*arguments)

        def watched(handler):
            def run(tx, frame, instruction, *operands):
                pushed = handler(tx, frame, instruction, *operands)
                note(tx, instruction)
                return pushed

            return run

        steps = [(watched(handler), pops, i) for handler, pops, i in frame.decoded.steps]
        frame.decoded = dataclasses.replace(frame.decoded, steps=steps)
        return tx, frame

    capture_module.start_trace = start
    try:
        made = capture_module.capture(function, args)
    finally:
        capture_module.start_trace = real_start
    return made, frames


made, frames = writes_of(observed, {"log": log, "totals": totals, "meter": meter}, x=torch.randn(3))
frames.append(("The end of the trace: the epilogue writes the differences as statements.", made.body))
Walk("Writes to a list, a dictionary and an object", frames)

# %% [markdown]
# Look at the statements in the last frame. The list gets one assignment, of the slice that differs; that `"end"` was
# there for a moment cannot be seen any more. `"old"` is removed from the dictionary (`__K[1]` is `dict.pop`), and
# `"calls"` is assigned. Both numbers are constants, because the trace has read them, and a guard says that
# `totals["calls"]` is 0. At the next call it is 1, and the guard fails. Numbers that change with every call would
# mean a version for every call. So such a number soon becomes an input of the function ([chapter 2](chapter:02)). This
# one begins at 0, and since 0 and 1 always stay constants, it is the third version that serves all later calls.
# The list has no such guard. An append does not look at what is in the
# list, so a function that only appends has no guard about the contents or the length. Here `pop` does look, as `len(log)`
# would, and so a guard says that the list has two items. (A length never becomes an input. The trace has a description for
# each item, so another length is another trace.)
# Nobody asked what its first item is, and the statement is right whatever it is: that item was *not looked at* before
# and after. That is why items are compared by identity, and never by asking whether they are equal. (An item that was
# looked at in between has got a description. `settled` gives this description in place of the unread item, so that the
# two count as one.)
#
# %show minicompile.ch03_capture.effects.difference_of_lists
#
# And does the compiled function do what the program does?

# %%
def after_two_calls(function):
    log[:], totals["calls"], totals["old"], meter.count, meter.last = ["begin", "middle"], 0, 1, 0, None
    function(torch.tensor([-1.0, 2.0]))
    totals["old"] = 1
    function(torch.tensor([-3.0, 4.0]))
    return log[0], log[1].tolist(), dict(totals), vars(meter).copy()


print("eager:   ", after_two_calls(observed))
print("compiled:", after_two_calls(minicompile.compile(observed, backend="eager")))

# %% [markdown]
# What cannot be postponed ends the graph. A `print` has to happen when it happens; so has a write to a file, or a
# call of a C function that might look at the list. The graph breaks there, and the statements of the epilogue run
# *before* the break, so that whoever looks finds what the program has written ([chapter 4](chapter:04)).

# %% [markdown]
# ### Getting hold of the frame
#
# One question is left: who calls the interpreter? A decorator can replace the function that it decorates. But the
# function may be called from anywhere, and after a graph break ([chapter 4](chapter:04)) the compiler wants to see
# functions that nobody decorated. CPython lets an extension replace the C function that evaluates frames (PEP 523).
# A *frame* is a call that is about to run: the code object and its arguments. From then on each Python call comes
# by before its first instruction:

# %% tags=["fold"]
drawing(
    {
        "call": ("a Python call", "code and arguments", "input"),
        "hook": ("the hook, in C", "looks up the code", "compute"),
        "skip": ("skip", "CPython evaluates it", "plain"),
        "target": ("a target", "is called instead", "library"),
        "unknown": ("nothing known yet", "ask the compiler, once", "saved"),
    },
    [("call", "hook"), ("hook", "skip"), ("hook", "target"), ("hook", "unknown")],
    "A Python call comes to the hook with its code and arguments. The hook looks up what is known about the code: skip, so that "
    "CPython evaluates the frame; a target, which is called instead; or nothing yet, so that the compiler is asked once.",
)

# %% [markdown]
# The hook is one C file, and there is little in it. What is known about a code object is attached to the code object,
# so a lookup is one pointer. A target is an ordinary Python function, the one that chapter 2 generates: it gets the
# arguments of the frame, and its result becomes the result of the call. It may also decline, when no version fits and
# none is to be made any more, and then the untouched frame is evaluated. A skipped function is never asked about
# again. And the hook is installed only while a compiled function runs, because CPython has a faster way of calling
# Python functions that is switched off while a hook is there.
#
# What all that costs on top of a plain call:


# %%
def nothing(x):
    return x


tensor = torch.ones(4)
plain = best_time(lambda: [nothing(tensor) for _ in range(1000)]) / 1000
hooked_f = minicompile.compile(nothing, backend="eager")
hooked = best_time(lambda: [hooked_f(tensor) for _ in range(1000)]) / 1000
operation = best_time(lambda: [tensor.add(tensor) for _ in range(1000)]) / 1000
Table(
    ["what", "time of one call"],
    [
        ("a Python call", f"{plain * 1e9:,.0f} ns"),
        ("the same, compiled: hook, guards, body", f"{hooked * 1e9:,.0f} ns"),
        ("adding two tensors of four elements, eagerly", f"{operation * 1e9:,.0f} ns"),
    ],
)

# %% [markdown]
# A compiled call costs about as much as one or two eager operations. A function that has fewer than that
# gains nothing from being compiled.

# %% [markdown] tags=["page"]
# ## The running example
#
# From here on the book follows one block of a small GPT: attention and a two-layer perceptron, each behind
# a normalisation and with a residual connection.

# %%
from chapters._lib import Attention, Block

print(inspect.getsource(Attention))
print(inspect.getsource(Block))

# %%
block, x = example()
seen = watch(block, x, backend="eager")
graph = seen.graphs[0]
head(print_graph(graph), 45)

# %% [markdown]
# Modules have disappeared: their `forward`s were interpreted one frame deeper (*inlining*), and their
# parameters became inputs. So did the list comprehension over `q`, `k`, `v`. How much Python went into
# this?

# %%
from minicompile.ch03_capture import capture
from minicompile.ch03_capture.capture import CaptureOptions

done = capture.trace_frame(Block.forward, {"self": block, "x": x}, CaptureOptions())
calls_in_graph = sum(n.op in ("call_function", "call_method") for n in done.tx.graph.nodes)
Table(
    ["what", "number"],
    [
        ("instructions interpreted", done.tx.ops),
        ("in the block's own frame", len(done.tx.path)),
        ("operations in the graph", calls_in_graph),
        ("guards", len(list(done.tx.guards))),
    ],
)

# %% [markdown]
# Most of the instructions are those of callees. A call of a Python function is not a node of the graph. The
# interpreter makes a frame for it, interprets its instructions, and pushes what it returns. Here are the frames of
# the block in the order in which they were entered:

# %% tags=["fold"]
from minicompile.ch03_capture import interpreter

entered, real_run = [], interpreter.run_instructions


def noted_run(tx, frame, *args):
    before, nodes, row = tx.ops, len(tx.graph.nodes), [len(tx.frames), frame.code.co_qualname, 0, 0]
    entered.append(row)
    try:
        return real_run(tx, frame, *args)
    finally:
        row[2:] = tx.ops - before, len(tx.graph.nodes) - nodes


interpreter.run_instructions = noted_run
try:
    capture.trace_frame(Block.forward, {"self": block, "x": x}, CaptureOptions())
finally:
    interpreter.run_instructions = real_run
Table(["depth", "frame", "instructions, with those below", "nodes added"],
      [("\u00b7 " * depth, name, ops, nodes) for depth, name, ops, nodes in entered])

# %% [markdown]
# A node that a frame adds may also be an input, for a parameter that is read for the first time. These frames are
# executed once, here, instead of at every call. The guards are many because each of these modules could be replaced
# by another.
#
# Unrolling has a price, too: a model with more layers is a longer graph, even though the code is a loop.
# Capture time grows in proportion.

# %%
import time


def first_call(depth):
    """Milliseconds of the first call of a new model, and the number of nodes in its graph."""
    stack = torch.nn.Sequential(*[Block() for _ in range(depth)])
    minicompile.reset()
    start = time.perf_counter()
    deep = watch(stack, x, backend="eager")
    return 1000 * (time.perf_counter() - start), len(deep.graphs[0].graph.nodes)


best = {depth: min(first_call(depth) for _ in range(4)) for depth in (1, 2, 4, 8)}
points, counts = [(depth, ms) for depth, (ms, _) in best.items()], {depth: nodes for depth, (_, nodes) in best.items()}
print("nodes in the graph, with inputs and output, by number of blocks:", counts)
lines({"first call": points}, "blocks", "ms", "Milliseconds of the first call against the number of blocks.")

# %% [markdown]
# ## What cannot be captured
#
# When the machine meets something that it has no answer for, it raises `Unsupported` with a reason, and the
# graph ends there. It never guesses. The branch on a tensor's value is such a case, since no value exists
# at compile time:

# %%
found = minicompile.explain(lambda x: x * 2 if x.sum() > 0 else x, backend="eager")(torch.ones(3))
for b in found.breaks:
    print(b.reason)
    print("->", b.advice)

# %% [markdown]
# What happens to such a function is [chapter 4](chapter:04). (One such branch is taken, on a CPU: that which does not raise,
# where the other side only raises, as in an `assert`. Then the graph also computes whether that was right, and if not, the frame is
# evaluated as it is: [`assume`](ref:minicompile.ch03_capture.comparisons.assume).)
#
# Many other breaks are a matter of telling the machine something. It cannot look into a function written in
# C, so a call of one that it does not know ends the graph. What it knows is in tables
# ([`values.py`](code:minicompile/ch03_capture/values.py) lists them). The one for functions is `HANDLED`:
# real function -> what to do with the values. `folded` makes a handler that calls the function now, if all
# arguments are constants.

# %%
import zlib

from minicompile.ch03_capture.calls import HANDLED
from minicompile.ch03_capture.library.builtins_ import folded


def bucket(x, name):
    return torch.relu(x) * (zlib.crc32(name.encode()) % 8)


for known in ({}, {zlib.crc32: folded(zlib.crc32)}):
    HANDLED.update(known)
    found = minicompile.explain(bucket, backend="eager")(torch.ones(3), "layer.3")
    print(len(found.graphs), "graphs", [b.reason for b in found.breaks])
del HANDLED[zlib.crc32]

# %% [markdown]
# A handler must do what the function does, side effects included; that is why the tables are not filled by
# guessing. The surest handler is Python. `heapq`, `bisect` and `operator` are in the standard library twice, in C
# and, below it, in Python, and the machine interprets that one as it would the program's own
# ([`below_c`](ref:minicompile.ch03_capture.library.standard.below_c)): a `__lt__` of the program is called, a list
# that is changed is a change like any other, and `bisect` guards the items it compares, not the whole list.
#
# ## What torch.compile does differently
#
# TorchDynamo is built on the same two doors, PEP 523 and a Python interpreter of bytecode. Three
# differences are worth knowing.
#
# - Its values (`VariableTracker`) are more than two hundred classes that carry behaviour. Ours are small
#   records, and behaviour is in tables keyed by the kind of value. With classes, a subclass can refine one
#   method and inherit the rest, which pays off when hundreds of people add special cases. With tables,
#   everything that `call` can do is in one place.
# - It writes new bytecode by hand and installs that as the function's code. We write Python text. Text
#   takes longer to compile, and it can be read, printed and stepped through.
# - Its hook builds the replacement frame itself, from copies of CPython's internal functions, one set for
#   each version. Ours calls an ordinary function. The frame that it replaced must still be cleared. From 3.12 on that is
#   the interpreter's task, so ours enters it with an exception pending: it leaves the frame before the first instruction
#   ([hook](code:minicompile/ch03_capture/hook.py)).
#
# torch.compile handles many more library functions, tensor subclasses, and a `torch.cond` that asks for the value of a
# tensor.
#
# ## Exercises
#
# <!-- exercises -->
#
# ## Further reading
#
# - PEP 523, *Adding a frame evaluation API to CPython*.
# - J. Ansel and others, *PyTorch 2* (ASPLOS 2024), section 3, on why earlier ways of capture (tracing,
#   `torch.jit.script`, lazy tensors) were not enough.
# - C. F. Bolz and others, *Tracing the Meta-Level: PyPy's Tracing JIT Compiler* (2009): the same idea, for
#   a language implementation.
# - The CPython documentation of the `dis` module.
