# %% [markdown]
# # tiny: torch.compile in an afternoon
#
# This file is a whole compiler for PyTorch programs, in about a thousand lines of code. It has every stage that
# `torch.compile` has, and each stage is the smallest version that does its job. At the end it trains a small GPT,
# forward and backward, to the losses that eager PyTorch reaches, and in less time.
#
#     python chapters/tiny.py
#
# runs all of it: first the demonstrations of the parts, in order, and then the training. It imports PyTorch and the
# standard library, and nothing else; the kernels that it writes need g++, or Triton and a GPU. Each chapter of the
# book starts from its part of tiny. It shows programs that break this part, and what the real stage does about them.
#
# | part | the question | what answers it | chapter |
# |---|---|---|---|
# | [1](chapter:tiny.1) | What does a function do to its tensors? | record it on tensors without data | [1](chapter:01) |
# | [2](chapter:tiny.2) | When may a recording be used again? | a generated function that reads and compares again | [2](chapter:02) |
# | [3](chapter:tiny.3) | What does a function read, and which branch does it take? | an interpreter of bytecode | [3](chapter:03) |
# | [4](chapter:tiny.4) | What if it cannot go on? | the state of that interpreter, written down as an expression | [4](chapter:04) |
# | [5](chapter:tiny.5) | What will the backward pass compute? | ask autograd, while recording | [5](chapter:05) |
# | [6](chapter:tiny.6) | How many operators must a compiler know? | rules that write one operator as several others | [6](chapter:06) |
# | [7](chapter:tiny.7) | What is kept for the backward pass? | a minimum cut | [5](chapter:05) |
# | [8](chapter:tiny.8) | What does an operator do to memory? | positions, and maps of positions | [7](chapter:07) |
# | [9](chapter:tiny.9) | Which loops can share a pass over memory? | a test for legality, and greed | [8](chapter:08) |
# | [10](chapter:tiny.10) | How does a kernel become a program? | text in Triton and in C++ | [9](chapter:09), [10](chapter:10) |
# | [11](chapter:tiny.11) | Who calls the kernels? | a generated Python function | [11](chapter:11) |
# | [12](chapter:tiny.12) | Does all of it work together? | a GPT | |
#
# Smallness has a price, and here is all of it. Shapes are static: another shape is another compilation. Kernels work
# on contiguous memory. A function that writes into a tensor is cut there. Matrix products, attention, embeddings and
# the loss are calls of PyTorch's own library, and so are reductions of other dimensions than the last ones. Loops
# compute in float32. The optimizer stays eager. Functions with `with`, `try`, `yield` or `super` are left to Python.
# After a graph break an interpreter written in Python executes one instruction, which is slow. The bytecode is that
# of CPython 3.11 and 3.12; with another release, everything runs uncompiled. And where a chapter says that the real
# stage must prove something, tiny often only assumes it: that nobody replaces a method of a class, say.

# %%
from __future__ import annotations

import builtins
import ctypes
import dis
import functools
import inspect
import linecache
import math
import operator
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import types
from collections import defaultdict, deque, namedtuple
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten

# %% [markdown] tags=["page"]
# ## Part 1. Recording
#
# *What does a function do to its tensors?* ([Chapter 1](chapter:01) asks it again.)
#
# We run the function once, and write down each operation that it reaches. A written operation is a `Node`: what is
# called, and with which arguments. An argument is a constant or another node, so the nodes form a graph. The list
# order is the order in which the operations ran.

# %%


@dataclass(eq=False)
class Node:
    """A call of `target`. fake: its result without data. `target` of an input of the graph is None."""
    name: str
    target: object
    args: tuple
    kwargs: dict
    fake: object = None

    def __repr__(self):
        return self.name


@dataclass
class Graph:
    nodes: list                          # in an order in which they can run; the inputs are among them
    inputs: list
    outputs: list                        # nodes, or None

    def __str__(self):
        return "\n".join([f"{n} = {n.target or 'input'}({', '.join(map(str, n.args))})    # {shown(n.fake)}"
                          for n in self.nodes] + [f"return {self.outputs}"])


def shown(fake):
    return f"{str(fake.dtype).removeprefix('torch.')}{list(fake.shape)}" if isinstance(fake, torch.Tensor) else "several"


# %% [markdown]
# To know the shape of a result we need not compute it. PyTorch has tensors without data, those on the device `meta`,
# and every operator runs on them. But a function may ask `x.device`, and must not get the answer "meta". So a `Fake`
# is a meta tensor with the device that it stands for. It is a tensor to autograd and to all of PyTorch, except that
# its operations arrive in Python.

# %%


class Fake(torch.Tensor):
    """A tensor without data. meta: its shape, strides and dtype. node: the call that made it."""

    @staticmethod
    def __new__(cls, meta, device, node, requires_grad=False):
        fake = torch.Tensor._make_wrapper_subclass(cls, meta.shape, strides=meta.stride(), dtype=meta.dtype,
                                                   device=device, requires_grad=requires_grad)
        fake.meta, fake.node = meta, node
        return fake

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        raise Break(f"{op} on a fake tensor outside of a recording")


class Break(Exception):
    """The graph ends here, for the reason given."""


# %% [markdown]
# While a `TorchDispatchMode` is active, PyTorch hands every operator to it, below autograd and after composite
# operators have fallen apart (`F.linear` arrives as a transpose and an `addmm`). Our mode does three things: run the
# operator on meta tensors, note a node, and wrap the results as fakes. An operator with several results makes one
# more node for each.
#
# What writes into a tensor ends the graph, since tiny has no answer to it. So does what needs data, such as
# `.item()`: a meta kernel cannot answer that either.

# %%


class Recorder(TorchDispatchMode):
    _should_skip_dynamo = classmethod(lambda cls: False)          # else PyTorch would import its own compiler here

    def __init__(self, rules={}):
        super().__init__()
        self.nodes, self.inputs, self.rules = [], [], rules

    def note(self, target, args=(), kwargs={}):
        name = f"{getattr(target, '__name__', 'x').partition('.')[0]}_{len(self.nodes)}"
        self.nodes.append(Node(name, target, args, kwargs))
        return self.nodes[-1]

    def input(self, like, requires_grad=None):
        """A fake input that looks like this tensor."""
        self.inputs.append(node := self.note(None))
        node.fake = Fake(as_meta(like), like.device, node, like.requires_grad if requires_grad is None else requires_grad)
        return node.fake

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if op._schema.is_mutable:
            raise Break(f"{op} writes into a tensor")
        if rule := self.rules.get(op.overloadpacket):            # part 6: an operator in terms of others
            with self:
                if (result := rule(*args, **kwargs)) is not NotImplemented:
                    return result
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        device = kwargs.get("device") or max(tensors, key=torch.Tensor.dim).device if tensors or "device" in kwargs else "cpu"
        on_meta = {**kwargs, "device": "meta"} if not tensors or "device" in kwargs else kwargs
        result = op(*tree_map(as_meta, args), **tree_map(as_meta, on_meta))
        node = self.note(op, *tree_map(as_node, (args, kwargs)))
        if isinstance(result, (tuple, list)):
            node.fake = result
            return type(result)([self.wrap(r, device, self.note(operator.getitem, (node, k))) for k, r in enumerate(result)])
        return self.wrap(result, device, node)

    def wrap(self, result, device, node):
        node.fake = Fake(result, torch.device(device), node) if isinstance(result, torch.Tensor) else result
        return node.fake

    def finish(self, outputs):
        """The graph of what the outputs need. outputs: fakes, or None."""
        return part(self, self.inputs, [as_node(x) for x in outputs])


def part(graph, inputs, outputs):
    """The graph of what leads from these inputs to these outputs."""
    needed = {n for n in outputs if n}
    for node in reversed(graph.nodes):
        if node in needed and node not in inputs:
            needed.update(operands(node))
    return Graph([n for n in graph.nodes if n in needed or n in inputs], inputs, outputs)


def operands(node):
    return [x for x in tree_leaves((node.args, node.kwargs)) if isinstance(x, Node)]


def as_meta(x):
    if isinstance(x, Fake):
        return x.meta
    with _disable_current_modes():                       # this is no operation of the program
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, torch.Tensor) else x


def as_node(x):
    return x.node if isinstance(x, Fake) else x


# %% [markdown]
# A graph is run by a loop over its nodes. This loop is used again and again below, each time with other inputs. With
# real tensors it computes. With fakes, inside of a recorder, it makes a new graph.

# %%


def interpret(graph, inputs):
    values = dict(zip(graph.inputs, inputs))

    for node in graph.nodes:
        if node not in values:
            args, kwargs = tree_map(lambda x: values[x] if isinstance(x, Node) else x, (node.args, node.kwargs))
            values[node] = node.target(*args, **kwargs)
    return [x and values[x] for x in graph.outputs]


def record(f, *examples):
    """The graph of f, which takes tensors and returns a tensor or several."""
    with Recorder() as recorder:
        return recorder.finish(tree_leaves(f(*[recorder.input(x) for x in examples])))


# %%
if __name__ == "__main__":
    print(record(lambda x, w: F.gelu(x @ w) + 1, torch.randn(4, 8), torch.randn(8, 8)))

# %% [markdown]
# ### In the real compiler
#
# Each line names a piece of this part, its counterpart, and what the counterpart adds.
#
# - `Fake`: [](ref:minicompile.ch01_graphs.fake.FakeTensor). Storage, so that views and writes keep their meaning;
#   errors that only a kernel would raise.
# - `Recorder`: [](ref:minicompile.ch01_graphs.trace.Recorder). Where each node comes from in the user's program.
# - `interpret`: [](ref:minicompile.ch01_graphs.graph.interpret). The same loop.

# %% [markdown] tags=["page"]
# ## Part 2. Guards
#
# *When may a recording be used again?* ([Chapter 2](chapter:02).)
#
# A recording was made from one call. It holds for another call if everything that the function read from outside of
# itself gives the same answers. So each read goes through one method, `read`, which does three things. It writes a
# line of Python that reads the same thing again at the next call. It writes a line that compares it. And it returns
# what the trace works with: a fake for a tensor, the thing itself for almost everything else.
#
# The lines together will be the body of a function. A path such as `frames[0].locals['self'].up.weight` is read step
# by step, each step into a variable, so that no step is done twice.

# %%


class Outside:
    """What a trace has read from the world."""

    def __init__(self, recorder):
        self.recorder = recorder
        self.lines = []                  # of the check
        self.seen = {}                   # path -> what the trace works with
        self.variables = {}              # id of what the trace works with -> its variable in the check
        self.inputs = {}                 # id of a real tensor -> (its variable, its fake), in the order of the graph's inputs
        self.names = {}                  # id of an object that text cannot spell -> (its name, the object)
        self.fresh = {}                  # id -> a function that the trace itself has made

    def read(self, path, thing):
        if path not in self.seen:
            variable = f"v{len(self.seen)}"
            self.seen[path] = None
            self.lines.append(f"{variable} = {path}")
            self.seen[path] = made = compare(self, variable, thing)
            if not isinstance(made, CONSTANTS) and type(made) not in VALUES:
                self.variables.setdefault(id(made), variable)
        return self.seen[path]

    def test(self, condition):
        self.lines.append(f"if not ({condition}): return None")

    def name(self, thing):
        return self.names.setdefault(id(thing), (f"k{len(self.names)}", thing))[0]

    def path(self, thing):
        """How to reach a thing at the next call; None for what the trace itself has made."""
        if id(thing) in self.variables:
            return self.variables[id(thing)]
        fixed = isinstance(thing, FIXED) and id(thing) not in self.fresh and not is_bound(thing)
        return self.name(thing) if fixed else None


# %% [markdown]
# What is compared depends on what was read. A number is compared by its value, since the trace computes with it. A
# tensor by everything except its data. A list by its length, and then element by element. A function by its code. Any
# other object by its class alone: what matters of it will be read through its attributes, each with a guard of its
# own.

# %%
CONSTANTS = (type(None), bool, int, float, complex, str, bytes, slice, range, type(...), torch.dtype, torch.device)
FIXED = (type, types.ModuleType, types.BuiltinFunctionType, types.FunctionType, types.CodeType, type(torch.Tensor.add))


def compare(outside, v, thing):
    """Write the guard of what variable v holds, and return what the trace works with."""
    kind = type(thing)
    if isinstance(thing, torch.Tensor):
        return compare_tensor(outside, v, thing)
    if isinstance(thing, CONSTANTS):
        outside.test(f"repr({v}) == {repr(thing)!r}")
    elif is_bound(thing):
        outside.test(f"{v}.__name__ == {thing.__name__!r}")
        return getattr(outside.read(f"{v}.__self__", thing.__self__), thing.__name__)
    elif kind is types.FunctionType:
        outside.test(f"{v}.__code__ is {outside.name(thing.__code__)}")
    elif isinstance(thing, FIXED):
        outside.test(f"{v} is {outside.name(thing)}")
    else:
        outside.test(f"type({v}) is {outside.name(kind)}")
    return VALUES[kind](outside, v, thing) if kind in VALUES else thing


def is_bound(thing):
    """Whether it is a method together with its object."""
    return not isinstance(getattr(thing, "__self__", None), (type(None), types.ModuleType))


def compare_tensor(outside, v, thing):
    if id(thing) not in outside.inputs:
        outside.inputs[id(thing)] = v, outside.recorder.input(thing)
    first, fake = outside.inputs[id(thing)]      # first is another variable where a tensor is reached by a second path
    outside.test(f"{v} is {first}" if v != first else f"describe({v}) == {outside.name(describe(thing))}")
    return fake


def describe(t):
    return t.shape, t.stride(), t.dtype, t.device, t.requires_grad


# %% [markdown]
# A list or a dictionary is only looked into when the trace does. `contents` gives a copy of it whose elements have
# been read.

# %%
def read_sequence(outside, v, thing):
    outside.test(f"len({v}) == {len(thing)}")
    return type(thing)([outside.read(f"{v}[{i}]", x) for i, x in enumerate(thing)])


def read_dict(outside, v, thing):
    outside.test(f"list({v}) == {outside.name(list(thing))}")
    return {k: outside.read(f"{v}[{k!r}]", x) for k, x in thing.items()}


def read_modules(outside, v, thing):
    outside.test(f"list({v}._modules) == {list(thing._modules)}")
    return [outside.read(f"{v}._modules[{k!r}]", x) for k, x in thing._modules.items()]


VALUES = {tuple: read_sequence, torch.Size: read_sequence}         # these cannot change: they are read at once
CONTAINERS = {list: read_sequence, dict: read_dict, torch.nn.ModuleList: read_modules, torch.nn.Sequential: read_modules}


def contents(outside, thing):
    """A copy of a container from outside; anything else as it is."""
    path = outside and outside.variables.get(id(thing))
    if not path or type(thing) not in CONTAINERS:
        return thing
    if f"*{path}" not in outside.seen:
        outside.seen[f"*{path}"] = CONTAINERS[type(thing)](outside, path, thing)
    return outside.seen[f"*{path}"]



# %%
if __name__ == "__main__":
    outside = Outside(Recorder())
    outside.read("x", torch.ones(2, 3))
    contents(outside, outside.read("settings", {"scale": 2.5}))
    print("\n".join(outside.lines))

# %% [markdown]
# ### In the real compiler
#
# Each line names a piece of this part, its counterpart, and what the counterpart adds.
#
# - `Outside.read`: [](ref:minicompile.ch02_guards.sources.Source). A path is data: it can be read, guarded, written
#   to and put back together.
# - `compare`: [](ref:minicompile.ch02_guards.codegen.check_text). Cheap checks first, what is shared read once, a
#   memo for what seldom changes.

# %% [markdown] tags=["page"]
# ## Part 3. Capture
#
# *How do we see what a function reads, and which branch it takes?* ([Chapter 3](chapter:03).)
#
# A fake sees what is done to tensors. It does not see that a number came from a dictionary. To see everything that a
# Python function does, be the machine that runs it. CPython compiles a function to instructions for a stack machine,
# and we write that machine again. Its stack holds ordinary objects, with fakes for the tensors. So most instructions
# do just what they do in CPython, and the recorder notes the operations on tensors without being asked. What our
# machine adds are the reads.
#
# The state of the machine is a list of frames, the innermost last. It is plain data, which graph breaks will need.

# %%
NULL = types.SimpleNamespace()                   # CPython's mark on the stack, beside a function that is about to be called


@dataclass(eq=False)
class Frame:
    """A function that has begun to run. at: the position of the next instruction."""
    function: types.FunctionType
    locals: dict                                 # name -> value; a variable that closures share is in a cell
    stack: list
    at: int = 0


signature = functools.cache(inspect.signature)


def first_frame(function, args, kwargs):
    """The frame of a call."""
    bound = signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return Frame(function, {name.replace("implicit", "."): value for name, value in bound.arguments.items()}, [])


# %% [markdown]
# Two kinds of objects exist in frames only while we trace. An `Unread` stands for a variable that the trace has not
# used yet: what it never uses, it need not guard. And an `Iter` stands for any iterator. Python's own iterators do
# not tell what is left of them.

# %%
Unread = namedtuple("Unread", "path thing")


@dataclass(eq=False)
class Iter:
    items: tuple
    at: int = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        if self.at > len(self.items):
            raise StopIteration
        return self.items[self.at - 1]


def read_iter(outside, v, thing):
    outside.test(f"{v}.at == {thing.at}")
    return Iter(outside.read(f"{v}.items", thing.items), thing.at)


VALUES[Iter] = read_iter

# %% [markdown]
# The `dis` module of the standard library reads instructions. We turn the targets of jumps into positions in the
# list, and move the names of keyword arguments into the call that they belong to.

# %%
Instruction = namedtuple("Instruction", "name number value")


@functools.cache
def instructions(code):
    found = [i for i in dis.get_instructions(code) if i.opname != "CACHE"]
    position, made, keywords = {i.offset: n for n, i in enumerate(found)}, [], ()
    for i in found:
        value = position[i.argval] if "JUMP" in i.opname or i.opname == "FOR_ITER" else i.argval
        if i.opname == "KW_NAMES":
            keywords = code.co_consts[i.arg]
        elif i.opname == "CALL":
            value, keywords = keywords, ()
        made.append(Instruction(i.opname, i.arg, i.argrepr if i.opname == "BINARY_OP" else value))
    return made


@functools.cache
def supported(code):
    """Whether the machine can run it: it knows every instruction, and the function is not a generator."""
    generator = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    return not code.co_flags & generator and all(i.name in OPCODES for i in instructions(code))


# %% [markdown]
# The machine executes one instruction at a time. While it traces, `outside` is there to read through. Without it, it
# is a plain interpreter of Python on real values.
#
# An instruction has a handler, which gets what the instruction pops, and returns the list of what it pushes. A
# `Break` may come out of the middle of it. Then the frame is put back to where it was, and the guards that the
# instruction wrote are dropped. Any other exception is turned into a break, so that the instruction will raise it for
# real.

# %%
class Machine:
    def __init__(self, frames, outside=None):
        self.frames, self.outside, self.result = frames, outside, None

    def step(self):
        frame, lines = self.frames[-1], self.outside.lines if self.outside else []
        i, before, written = instructions(frame.function.__code__)[frame.at], list(frame.stack), len(lines)
        frame.at += 1
        pops, handler = OPCODES[i.name]
        try:
            frame.stack += handler(self, i, *self.pop(pops)) or []
        except Exception as error:
            if self.outside is None:
                raise
            frame.at, frame.stack = frame.at - 1, before
            lines[written:] = [line for line in lines[written:] if not line.startswith("if")]
            raise error if isinstance(error, Break) else Break(f"{type(error).__name__}: {error}") from error

    def used(self, place, key):
        """A local variable or a value on the stack, read from outside if it has not been yet."""
        if isinstance(value := place[key], Unread):
            place[key] = self.outside.read(value.path, value.thing)
        return place[key]

    def local(self, name):
        return self.used(self.frames[-1].locals, name)

    def top(self, depth=1):
        return self.used(self.frames[-1].stack, -depth)

    def pop(self, count):
        """The last values of the stack, the topmost last."""
        values = [self.top(depth) for depth in range(count, 0, -1)]
        del self.frames[-1].stack[len(self.frames[-1].stack) - count:]
        return values

    def path(self, thing):
        return self.outside.path(thing) if self.outside else None


# %% [markdown]
# CPython changes its instructions with every release. The table below is for 3.11 and 3.12; with another release,
# `supported` is false and everything runs as if it were not compiled. Most instructions are one line. `i.number` and
# `i.value` are the instruction's number and what the number stands for.

# %%
OPCODES = {}                                     # name -> (how many values it pops, its handler)


def opcode(names):
    def register(handler):
        pops = len(inspect.signature(handler).parameters) - 2
        OPCODES.update({name: (pops, handler) for name in names.split()})
        return handler
    return register


for names, handler in {
    "RESUME NOP PRECALL EXTENDED_ARG KW_NAMES END_FOR": lambda m, i: None,
    "LOAD_CONST": lambda m, i: [i.value],
    "LOAD_FAST LOAD_FAST_CHECK LOAD_CLOSURE": lambda m, i: [m.local(i.value)],
    "LOAD_FAST_AND_CLEAR": lambda m, i: [m.frames[-1].locals.pop(i.value, NULL)],
    "LOAD_ASSERTION_ERROR": lambda m, i: [AssertionError],
    "PUSH_NULL": lambda m, i: [NULL],
    "POP_TOP": lambda m, i, value: None,
    "COPY": lambda m, i: [m.top(i.number)],
    "UNARY_POSITIVE UNARY_NEGATIVE UNARY_INVERT": lambda m, i, a: call(m, getattr(operator, i.name[6:9].lower()), [a]),
    "UNARY_NOT": lambda m, i, a: [not truth(m, a)],
    "BINARY_OP COMPARE_OP": lambda m, i, a, b: call(m, OPERATORS[i.value], [a, b]),
    "BINARY_SUBSCR": lambda m, i, a, key: call(m, operator.getitem, [a, key]),
    "BINARY_SLICE": lambda m, i, a, start, stop: call(m, operator.getitem, [a, slice(start, stop)]),
    "CONTAINS_OP": lambda m, i, a, b: [call(m, operator.contains, [b, a])[0] != bool(i.number)],
    "BUILD_TUPLE": lambda m, i: [tuple(m.pop(i.number))],
    "BUILD_LIST": lambda m, i: [m.pop(i.number)],
    "BUILD_SLICE": lambda m, i: [slice(*m.pop(i.number))],
    "BUILD_STRING": lambda m, i: ["".join(m.pop(i.number))],
    "BUILD_MAP": lambda m, i: [dict(zip(*[iter(m.pop(2 * i.number))] * 2))],
    "BUILD_CONST_KEY_MAP": lambda m, i, keys: [dict(zip(keys, m.pop(i.number)))],
    "LIST_APPEND": lambda m, i, value: own(m, m.top(i.number)).append(value),
    "LIST_EXTEND": lambda m, i, values: own(m, m.top(i.number)).extend(elements(m, values)),
    "MAP_ADD": lambda m, i, key, value: own(m, m.top(i.number)).update({key: value}),
    "DICT_MERGE DICT_UPDATE": lambda m, i, values: own(m, m.top(i.number)).update(contents(m.outside, values)),
    "LIST_TO_TUPLE": lambda m, i, values: [tuple(values)],
    "CALL_INTRINSIC_1": lambda m, i, value: [tuple(value)] if i.number == 6 else call(m, operator.pos, [value]),
    "STORE_SUBSCR": lambda m, i, value, thing, key: operator.setitem(own(m, thing), key, value),
    "STORE_ATTR": lambda m, i, value, thing: setattr(own(m, thing), i.value, value),
    "GET_ITER": lambda m, i, thing: [elements(m, thing)],
    "JUMP_FORWARD JUMP_BACKWARD JUMP_BACKWARD_NO_INTERRUPT": lambda m, i: setattr(m.frames[-1], "at", i.value),
    "RETURN_VALUE": lambda m, i, value: leave(m, value),
    "RETURN_CONST": lambda m, i: leave(m, i.value),
    "STORE_FAST": lambda m, i, value: m.frames[-1].locals.update({i.value: value}) if value is not NULL else None,
    "STORE_DEREF": lambda m, i, value: setattr(own(m, m.local(i.value)), "cell_contents", value),
    "MAKE_CELL": lambda m, i: m.frames[-1].locals.update(
        {i.value: types.CellType(m.local(i.value)) if i.value in m.frames[-1].locals else types.CellType()}),
    "SWAP": lambda m, i: (lambda first, *others: [*others[-1:], *others[:-1], first])(*m.pop(i.number)),
    "FORMAT_VALUE": lambda m, i: [text(m, *m.pop(2 if i.number & 4 else 1), conversion=i.number & 3)],
    "RAISE_VARARGS RERAISE": lambda m, i: throw(*m.pop(i.number)),
}.items():
    opcode(names)(handler)

# %% [markdown]
# ### Reading from outside
#
# Globals, variables of enclosing functions, and attributes. A name that is not among the globals is a builtin.
# Builtins are taken to be what they are, and so is everything in `torch`.

# %%
@opcode("LOAD_GLOBAL")
def load_global(m, i):
    scope = m.frames[-1].function.__globals__
    value = getattr(builtins, i.value) if i.value not in scope else scope[i.value]
    if i.value in scope and m.outside:
        value = m.outside.read(f"{m.outside.name(scope)}[{i.value!r}]", value)
    return [NULL, value] if i.number & 1 else [value]


@opcode("LOAD_ATTR LOAD_METHOD")
def load_attr(m, i, thing):
    found = attribute(m, thing, i.value)
    method = i.name == "LOAD_METHOD" or sys.version_info >= (3, 12) and i.number & 1
    return found and ([NULL, *found] if method else found)


def attribute(m, thing, name):
    """[the attribute], or nothing where the function of a property has been entered, which will push it."""
    path = m.path(thing)
    if not path or isinstance(thing, (Fake, *CONSTANTS)) or in_torch(thing):
        return [getattr(thing, name)]
    if isinstance(found := inspect.getattr_static(type(thing), name, None), property):
        return call(m, found.fget, [thing])
    value = getattr(thing, name)
    return [value if getattr(value, "__self__", None) is thing else m.outside.read(f"{path}.{name}", value)]


def in_torch(thing):
    """Whether a module or function belongs to PyTorch itself. Its layers do not count: they are read like the user's."""
    name = getattr(thing, "__name__" if isinstance(thing, types.ModuleType) else "__module__", None) or ""
    return name.partition(".")[0] in ("torch", "math", "_operator") and not name.startswith("torch.nn.modules")


# %%
@opcode("COPY_FREE_VARS")
def copy_free_vars(m, i):
    function = m.frames[-1].function
    m.frames[-1].locals.update(zip(function.__code__.co_freevars, function.__closure__))
    if path := m.path(function):
        m.outside.variables.update({id(c): f"{path}.__closure__[{k}]" for k, c in enumerate(function.__closure__)})


@opcode("LOAD_DEREF")
def load_deref(m, i):
    cell = m.local(i.value)
    return [m.outside.read(f"{path}.cell_contents", cell.cell_contents) if (path := m.path(cell)) else cell.cell_contents]


def own(m, thing):
    """A thing that may be written to: one that the trace has made."""
    if m.outside and (m.path(thing) or isinstance(thing, Fake)):
        raise Break(f"a write to a {type(thing).__name__} from outside")
    return thing


# %% [markdown]
# ### Calls
#
# Everything that computes goes through `call`, which is the one place that decides what may be done while tracing.
#
# - A Python function gets a frame of its own, and its instructions are interpreted like the rest. This is *inlining*.
# - A function of PyTorch or a simple builtin is executed at once, on fakes and constants.
# - Everything else breaks the graph. What we do not know might print, write, or answer differently tomorrow.

# %%
def call(m, function, args, kwargs={}):
    """[the result]; nothing where a frame was entered, whose return will push it."""
    if m.outside is None:
        return [function(*args, **kwargs)]
    if isinstance(function, torch.nn.Module):
        function = forward_of(m, function)
    if isinstance(function, types.MethodType):
        function, args = function.__func__, [function.__self__, *args]
    if isinstance(function, types.FunctionType) and not in_torch(function):
        if not supported(function.__code__):
            raise Break(f"{function.__qualname__} has instructions that tiny does not know")
        m.frames.append(first_frame(function, args, kwargs))
        return None
    if function not in (isinstance, callable):
        function, args = opened(m, function, args)
        if not allowed(m, function, [*args, *kwargs.values()]):
            raise Break(f"a call of {getattr(function, '__qualname__', function)}")
    result = function(*args, **kwargs)
    return [Iter(tuple(result)) if isinstance(result, (zip, enumerate, reversed, type({}.items()), type({}.values()))) else result]


def opened(m, function, args):
    """The same with the contents of lists and dictionaries from outside, where the function only reads them."""
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    function = getattr(contents(m.outside, owner), name) if name in ("items", "keys", "values", "get", "index", "count") else function
    return function, args if function is operator.iadd else [contents(m.outside, x) for x in args]


def forward_of(m, module):
    hooks = "{0}._forward_hooks or {0}._forward_pre_hooks or {0}._backward_hooks or {0}._backward_pre_hooks"
    if eval(hooks.format("module")):
        raise Break("a module with hooks")
    m.outside.test(f"not ({hooks.format(m.path(module))})")
    return attribute(m, module, "forward")[0]


# %%
ARRANGING = {operator.getitem, len, zip, enumerate, reversed, list, tuple}              # they do nothing to the elements
BUILTINS = {range, dict, min, max, sum, abs, int, float, bool, round, pow, divmod, slice, type, any, all, sorted}
FACTORIES = {torch.arange, torch.zeros, torch.ones, torch.full, torch.empty, torch.tensor, torch.finfo, torch.Size, torch.device}
REFUSED = {"backward", "register_hook", "retain_grad", "data_ptr", "numpy", "tolist", "item", "requires_grad_", "detach_"}


def allowed(m, function, args):
    """Whether a call has no effect but its result, which depends on nothing but the arguments."""
    leaves, owner, name = tree_leaves(args), getattr(function, "__self__", None), getattr(function, "__name__", "")
    if function in ARRANGING and isinstance(args[0], (Fake, Iter, list, tuple, dict, str)):
        return True
    if not all(isinstance(x, (Fake, Iter, *CONSTANTS, type)) for x in leaves):
        return False
    if isinstance(owner, Fake) or isinstance(function, types.MethodDescriptorType) and isinstance(leaves[0], Fake):
        return name not in REFUSED
    if type(owner) in (list, dict, tuple, str, torch.Size):
        return not m.path(owner)
    if function in FACTORIES or function in BUILTINS or function.__module__ in ("math", "_operator"):
        return not (function is operator.iadd and m.path(args[0]) and isinstance(args[0], list))
    return in_torch(function) and any(isinstance(x, Fake) for x in leaves)


SYMBOLS = {"+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "**": "pow", "@": "matmul", "&": "and_",
           "|": "or_", "^": "xor", "<": "lt", "<=": "le", "==": "eq", "!=": "ne", ">": "gt", ">=": "ge"}
OPERATORS = {symbol: getattr(operator, name) for symbol, name in SYMBOLS.items()}
OPERATORS |= {symbol + "=": getattr(operator, "i" + name.rstrip("_")) for symbol, name in list(SYMBOLS.items())[:11]}


# %% [markdown]
# Before a call the stack holds two values below the arguments: CPython's mark and the function. In 3.11 a
# comprehension has the function and its argument there instead.

# %%
@opcode("CALL")
def call_function(m, i):
    a, b, *args = m.pop(i.number + 2)
    args = args if a is NULL else [b, *args]
    split = len(args) - len(i.value)
    return call(m, b if a is NULL else a, args[:split], dict(zip(i.value, args[split:])))


@opcode("CALL_FUNCTION_EX")
def call_function_ex(m, i):
    kwargs = m.pop(1)[0] if i.number & 1 else {}
    _, function, args = m.pop(3)
    return call(m, function, list(elements(m, args)), kwargs)


@opcode("MAKE_FUNCTION")
def make_function(m, i, code):
    given = dict(zip([flag for flag in (1, 2, 4, 8) if i.number & flag], m.pop(i.number.bit_count())))
    made = types.FunctionType(code, m.frames[-1].function.__globals__, code.co_name, given.get(1), given.get(8))
    made.__kwdefaults__ = given.get(2)
    if m.outside:
        m.outside.fresh[id(made)] = made
    return [made]


def leave(m, value):
    m.frames.pop()
    m.result = value
    if m.frames:
        m.frames[-1].stack.append(value)


# %% [markdown]
# ### Loops and jumps
#
# A loop runs while we trace, so its body is recorded once for each round. A condition must be known now. For one that
# depends on a tensor's data, `bool` of the fake raises an error, and that ends the graph.

# %%
def elements(m, thing):
    """An iterator over a thing, whose rest can be written down."""
    if not m.outside or isinstance(thing, Iter):
        return thing if isinstance(thing, Iter) else iter(thing)
    if not isinstance(thing := contents(m.outside, thing), (Fake, list, tuple, dict, str, range)):
        raise Break(f"a loop over a {type(thing).__name__}")
    return Iter(tuple(thing))


@opcode("FOR_ITER")
def for_iter(m, i):
    if m.outside and not isinstance(m.top(), Iter):
        raise Break("a loop over an iterator from outside")
    for value in m.top():
        return [value]
    m.frames[-1].at = i.value
    m.pop(1)


@opcode("UNPACK_SEQUENCE")
def unpack_sequence(m, i, value):
    values = list(elements(m, value))
    if len(values) != i.number:
        raise ValueError(f"{len(values)} values for {i.number} variables")
    return values[::-1]


def truth(m, value):
    value = contents(m.outside, value)
    if m.outside and hasattr(type(value), "__len__") and not isinstance(value, (Fake, *CONSTANTS, list, tuple, dict)):
        raise Break(f"whether a {type(value).__name__} is empty")
    return bool(value)


def conditional(name):
    holds = {"TRUE": truth, "FALSE": lambda m, value: not truth(m, value), "NONE": lambda m, value: value is None,
             "NOT_NONE": lambda m, value: value is not None}[name.partition("_IF_")[2].removesuffix("_OR_POP")]

    def handler(m, i, value):
        if taken := holds(m, value):
            m.frames[-1].at = i.value
        return [value] if taken and name.endswith("OR_POP") else None
    opcode(name)(handler)


for name in [name for name in dis.opmap if "JUMP" in name and "_IF_" in name]:
    conditional(name)


# %%
@opcode("IS_OP")
def is_op(m, i, a, b):
    if m.outside and m.path(a) and m.path(b):
        m.outside.test(f"({m.path(a)} is {m.path(b)}) == {a is b}")
    return [(a is b) != bool(i.number)]


def text(m, value, form="", conversion=0):
    if m.outside:
        raise Break("text")
    return format([lambda value: value, str, repr, ascii][conversion](value), form)


def throw(error, *cause):
    raise error


# %% [markdown]
# Without `outside`, this is an interpreter of Python:

# %%
if __name__ == "__main__":
    def collatz(n, steps=0):
        while n != 1:
            n = n // 2 if n % 2 == 0 else 3 * n + 1
            steps += 1
        return [steps, n]

    machine = Machine([first_frame(collatz, [27], {})])
    while machine.frames:
        machine.step()
    print(machine.result, collatz(27))

# %% [markdown]
# ### In the real compiler
#
# Each line names a piece of this part, its counterpart, and what the counterpart adds.
#
# - `Machine.step`: [](ref:minicompile.ch03_capture.interpreter.run). Exceptions and their handlers, generators,
#   `with`.
# - `load_attr`: [](ref:minicompile.ch03_capture.opcodes.load_attr). Descriptors, `__getattr__`, modules, classes.
# - `for_iter`: [](ref:minicompile.ch03_capture.opcodes.for_iter). Iterators of every kind.
# - `call`: [](ref:minicompile.ch03_capture.interpreter.call). Tables of what is known about thousands of functions.
# - `own`: [](ref:minicompile.ch03_capture.capture.trace). Writes to outside objects become a log, which is replayed
#   after the graph.

# %% [markdown] tags=["page"]
# ## Part 4. Graph breaks
#
# *What if it cannot go on?* ([Chapter 4](chapter:04).)
#
# The trace ends at a `return`, or at a `Break`. In both cases there is a state that the compiled code must arrive at:
# the result, or the frames just before the instruction that broke. All that is left is to write down how to make that
# state from what the graph computes and from what was read. That is a Python expression: a fake becomes `out[k]`,
# something from outside its variable, a container the expression of its elements.

# %%


class Spelling:
    """Text that makes, at the next call, what the trace has made."""

    def __init__(self, outside):
        self.outside, self.lines, self.done, self.outputs = outside, [], {}, []

    def spell(self, thing):
        if path := self.outside.path(thing):
            return path
        if id(thing) not in self.done:
            self.done[id(thing)] = self.made(thing), thing           # the thing itself, so that no other one gets its id
        return self.done[id(thing)][0]

    def made(self, thing):
        if isinstance(thing, Fake):
            self.outputs.append(thing)
            return f"out[{len(self.outputs) - 1}]"
        if type(thing) not in SPELLINGS:
            return repr(thing) if isinstance(thing, (type(None), int, str)) else self.outside.name(thing)
        text = SPELLINGS[type(thing)](self.spell, thing)
        self.lines.append(f"t{len(self.lines)} = {text}")
        return f"t{len(self.lines) - 1}"


def spell_function(spell, f):
    made = [spell(x) for x in (f.__code__, f.__globals__, f.__name__, f.__defaults__, f.__closure__)]
    return f"FunctionType({', '.join(made)})"


SPELLINGS = {
    list: lambda spell, x: f"[{', '.join(map(spell, x))}]",
    tuple: lambda spell, x: f"({''.join(spell(e) + ', ' for e in x)})",
    dict: lambda spell, x: "{" + ", ".join(f"{spell(k)}: {spell(v)}" for k, v in x.items()) + "}",
    slice: lambda spell, x: f"slice({spell(x.start)}, {spell(x.stop)}, {spell(x.step)})",
    Iter: lambda spell, x: f"Iter({spell(x.items)}, {x.at})",
    Unread: lambda spell, x: x.path,
    Frame: lambda spell, x: f"Frame({spell(x.function)}, {spell(x.locals)}, {spell(x.stack)}, {x.at})",
    types.CellType: lambda spell, x: f"CellType({spell(x.cell_contents)})",
    types.FunctionType: spell_function,
    types.MethodType: lambda spell, x: f"MethodType({spell(x.__func__)}, {spell(x.__self__)})",
    types.BuiltinMethodType: lambda spell, x: f"getattr({spell(x.__self__)}, {x.__name__!r})",
}


# %% [markdown]
# Now guards and spelling can be joined. `capture` runs the machine as far as it goes, and returns one Python
# function. It checks the guards and returns None, or a function that runs the graph and makes the state.

# %%
def unread(path, frame, outside):
    outside.test(f"list({path}.locals) == {list(frame.locals)} and len({path}.stack) == {len(frame.stack)}")
    return Frame(outside.read(f"{path}.function", frame.function),
                 {name: Unread(f"{path}.locals[{name!r}]", x) for name, x in frame.locals.items()},
                 [Unread(f"{path}.stack[{n}]", x) for n, x in enumerate(frame.stack)], frame.at)


def capture(frames, compile_graph, log):
    """A function of frames like these: None where a guard fails, else a function that returns (frames, result)."""
    recorder = Recorder()
    outside = Outside(recorder)
    machine = Machine([unread(f"frames[{n}]", frame, outside) for n, frame in enumerate(frames)], outside)
    with recorder:
        try:
            while machine.frames:
                machine.step()
        except Break as reason:
            log.append(str(reason))
    spelling = Spelling(outside)
    state = spelling.spell(machine.frames), spelling.spell(None if machine.frames else machine.result)
    graph = compile_graph(recorder, spelling.outputs)
    inputs = ", ".join(v for v, _ in outside.inputs.values())
    text = "\n    ".join(["def check(frames):", *outside.lines, "def body():", f"    out = graph({inputs})",
                          *["    " + line for line in spelling.lines], f"    return {', '.join(state)}", "return body"])
    names = {"graph": graph, "Iter": Iter, "Frame": Frame, "describe": describe, **vars(types), **dict(outside.names.values())}
    exec(text, names)
    names["check"].text = text
    return names["check"]


# %% [markdown]
# At run time there is a loop. It looks for an entry whose guards hold, and makes one if there is none. If the entry
# comes back with frames instead of a result, the next instruction is the one that broke. The machine executes that
# one instruction on real values, and the loop goes on with whatever state this has led to.
#
# Where eight entries were not enough, the machine does the rest without recording.

# %%
LIMIT = 8


class Compiled:
    def __init__(self, f, compile_graph):
        self.f, self.compile_graph = f, compile_graph
        self.entries, self.breaks = {}, []       # state of the machine -> functions made by `capture`; reasons

    def __call__(self, *args, **kwargs):
        f = self.f.forward if isinstance(self.f, torch.nn.Module) else self.f
        if isinstance(f, types.MethodType):
            f, args = f.__func__, (f.__self__, *args)
        if not supported(f.__code__):
            return f(*args, **kwargs)
        machine = Machine([first_frame(f, args, kwargs)])
        while machine.frames:
            if body := self.find(machine.frames):
                machine.frames, machine.result = body()
            while machine.frames:
                machine.step()
                if body:
                    break
        return machine.result

    def find(self, frames):
        """The code for this state; None where there are too many versions of it."""
        known = self.entries.setdefault((torch.is_grad_enabled(), *[(f.function.__code__, f.at) for f in frames]), [])
        for check in known:
            try:
                if body := check(frames):
                    return body
            except (AttributeError, LookupError, TypeError):         # a guard that cannot be evaluated has failed
                pass
        if len(known) < LIMIT:
            known.append(capture(frames, self.compile_graph, self.breaks))
            return known[-1](frames)


def eager(recorder, outputs):
    """The simplest backend: run the recorded operations, one after the other."""
    graph = recorder.finish(outputs)
    return lambda *inputs: interpret(graph, inputs)


def compile(f, backend=None):
    """f, compiled when it is called."""
    return Compiled(f, backend or loops)


# %% [markdown]
# A function that breaks twice: once since `.item()` needs data, and once since `append` writes to a list that others
# can see. So there are three states from which something was compiled. The text of the first one ends with the frame
# as it is before `item` is called. The text of the last one is the rest of the function.

# %%
if __name__ == "__main__":
    history = []

    def training_loss(x, w):
        y = torch.tanh(x @ w)
        loss = y.square().mean()
        history.append(loss.item())
        return loss * 2, y

    compiled = compile(training_loss, backend=eager)
    for _ in range(3):
        compiled(torch.randn(4, 4), torch.randn(4, 4))
    print(compiled.breaks, len(history), [len(known) for known in compiled.entries.values()])
    for known in list(compiled.entries.values())[::2]:
        print(known[0].text)


# %% [markdown]
# ### In the real compiler
#
# Each line names a piece of this part, its counterpart, and what the counterpart adds.
#
# - `Spelling`: [](ref:minicompile.ch04_breaks.breaks.capture_until). Only what is alive is handed over.
# - `Compiled`: [](ref:minicompile.ch02_guards.codegen.build_entry). Guards and body are one function, called by a
#   frame hook; the rest is bytecode again.

# %% [markdown] tags=["page"]
# ## Part 5. The joint graph
#
# *What will the backward pass compute?* ([Chapter 5](chapter:05).)
#
# Differentiating needs no rules of our own. The fakes were real tensors to autograd: while we traced, it noted how
# each of them was made. So ask it for gradients while the recorder is still there, and what the engine executes is
# written into the same graph. The gradients of the outputs are not known yet. They are inputs, called *tangents*.

# %%
# graph: of both passes. tangents: how many of its inputs, the last ones, are. outputs: how many, the first ones, are those of forward.
Joint = namedtuple("Joint", "graph tangents outputs")


def joint_graph(recorder, outputs):
    """outputs: fakes. The gradients are those of all inputs that require one, None where an input has no influence."""
    differentiable = [x for x in outputs if x.requires_grad]
    wanted = [n.fake for n in recorder.inputs if n.fake.requires_grad]
    if not differentiable:
        return Joint(recorder.finish(outputs), 0, len(outputs))
    with recorder, torch.autograd.set_multithreading_enabled(False):
        tangents = [recorder.input(x, requires_grad=False) for x in differentiable]
        gradients = torch.autograd.grad(differentiable, wanted, tangents, allow_unused=True)
    return Joint(recorder.finish([*outputs, *gradients]), len(tangents), len(outputs))


# %%
if __name__ == "__main__":
    with Recorder() as recorder:
        y = torch.tanh(recorder.input(torch.ones(2, 3)) @ recorder.input(torch.ones(3, 3, requires_grad=True)))
    print(joint_graph(recorder, [y]).graph)

# %% [markdown]
# ### In the real compiler
#
# Each line names a piece of this part, its counterpart, and what the counterpart adds.
#
# - `joint_graph`: [](ref:minicompile.ch05_autograd.joint.trace_joint). Writes, aliases, strides, mixed precision,
#   gradients that do not exist.

# %% [markdown] tags=["page"]
# ## Part 6. Decompositions
#
# *How many operators must a compiler know?* ([Chapter 6](chapter:06).)
#
# PyTorch has two thousand. Most of them are formulas of a few simple ones. A rule writes an operator as such a
# formula, in ordinary PyTorch. To apply all rules, run the graph again, on fakes, inside of a recorder which knows
# the rules. A rule may use operators that have rules themselves.
#
# The operators that stay are in two tables. `POINTWISE` has those that compute one element from one element of each
# operand, with the text that does it; the text is the same in C++ and in Triton. `VIEWS` has those that move no data.
# Besides there are two reductions, `sum` and `amax`, over the last dimensions. Whatever else is left becomes a call
# of PyTorch's own kernel, so a missing rule costs speed, and nothing else.

# %%
POINTWISE = {
    aten.neg: "-{0}", aten.exp: "exp({0})", aten.log: "log({0})", aten.sqrt: "sqrt({0})", aten.rsqrt: "rsqrt({0})",
    aten.tanh: "tanh({0})", aten.erf: "erf({0})", aten.sin: "sin({0})", aten.cos: "cos({0})", aten.abs: "abs({0})",
    aten.reciprocal: "1 / {0}", aten.add: "{0} + {1}", aten.sub: "{0} - {1}", aten.mul: "{0} * {1}", aten.div: "{0} / {1}",
    aten.maximum: "maximum({0}, {1})", aten.where: "where({0}, {1}, {2})",
    aten.masked_fill: "where({1}, {2}, {0})", aten.threshold_backward: "where({1} > {2}, {0}, 0)",
    aten.gt: "{0} > {1}", aten.ge: "{0} >= {1}", aten.lt: "{0} < {1}", aten.le: "{0} <= {1}", aten.eq: "{0} == {1}",
    aten.ne: "{0} != {1}", aten.logical_not: "{0} == 0", aten.bitwise_and: "{0} & {1}", aten.bitwise_or: "{0} | {1}",
    aten._to_copy: "{0}",
}
VIEWS = {aten.view, aten._unsafe_view, aten.expand, aten.permute, aten.t, aten.transpose, aten.unsqueeze, aten.squeeze,
         aten.select, aten.slice, aten.alias, aten.detach, aten.clone}
REDUCTIONS = {aten.sum: "sum", aten.amax: "maximum"}
RULES = {}


def rule(*operators):
    def register(f):
        RULES.update(dict.fromkeys(operators, f))
        return f
    return register


def packet(node):
    """The operator without its overload: aten.add for aten.add.Tensor."""
    return getattr(node.target, "overloadpacket", None)


def decompose(graph):
    with torch.no_grad(), Recorder(RULES) as recorder:
        outputs = interpret(graph, [recorder.input(n.fake) for n in graph.inputs])
    return recorder.finish(outputs)


# %% [markdown]
# The rules that a GPT needs. Each can be checked against the operator that it replaces, which is what the tests do.

# %%
@rule(aten.rsub)
def rsub(a, b, alpha=1):
    return b + a * -alpha


@rule(aten.pow)
def power(x, n):
    products = {0.5: torch.sqrt, -0.5: torch.rsqrt, 1: torch.clone, 2: lambda x: x * x, 3: lambda x: x * x * x, -1: torch.reciprocal}
    return products[n](x) if n in products else NotImplemented


@rule(aten.relu)
def relu(x):
    return x.masked_fill(x <= 0, 0)


@rule(aten.gelu)
def gelu(x, approximate="none"):
    if approximate == "tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))


@rule(aten.gelu_backward)
def gelu_backward(g, x, approximate="none"):
    if approximate == "tanh":
        k = math.sqrt(2 / math.pi)
        t = torch.tanh(k * (x + 0.044715 * x * x * x))
        return g * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * k * (1 + 3 * 0.044715 * x * x))
    return g * (0.5 * (1 + torch.erf(x * math.sqrt(0.5))) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi))


@rule(aten.tanh_backward)
def tanh_backward(g, y):
    return g * (1 - y * y)


@rule(aten._softmax)
def softmax(x, dim, half_to_float):
    e = torch.exp(x - x.amax(dim, keepdim=True))
    return e / e.sum(dim, keepdim=True)


@rule(aten._softmax_backward_data)
def softmax_backward(g, y, dim, dtype):
    return y * (g - (g * y).sum(dim, keepdim=True))


@rule(aten.mean)
def mean(x, dims=None, keepdim=False, dtype=None):
    dims = list(range(x.dim())) if dims is None else dims
    return x.sum(dims, keepdim) / math.prod(x.shape[d] for d in dims)


@rule(aten.native_layer_norm)
def layer_norm(x, shape, weight, bias, eps):
    dims = list(range(-len(shape), 0))
    average = x.mean(dims, keepdim=True)
    rstd = torch.rsqrt(((x - average) * (x - average)).mean(dims, keepdim=True) + eps)
    y = (x - average) * rstd * (1 if weight is None else weight)
    return y if bias is None else y + bias, average, rstd


@rule(aten.native_layer_norm_backward)
def layer_norm_backward(g, x, shape, average, rstd, weight, bias, wanted):
    inner, outer = list(range(-len(shape), 0)), list(range(x.dim() - len(shape)))
    y, gw = (x - average) * rstd, g if weight is None else g * weight
    gx = rstd * (gw - gw.mean(inner, keepdim=True) - y * (gw * y).mean(inner, keepdim=True))
    return gx, (g * y).sum(outer) if wanted[1] else None, g.sum(outer) if wanted[2] else None


@rule(aten.split, aten.split_with_sizes)
def split(x, sizes, dim=0):
    sizes = [sizes] * (x.shape[dim] // sizes) if isinstance(sizes, int) else sizes
    return [x.narrow(dim, sum(sizes[:k]), size) for k, size in enumerate(sizes)]



# %%
if __name__ == "__main__":
    print(decompose(record(lambda x: torch.softmax(x, -1), torch.randn(4, 8))))

# %% [markdown]
# ### In the real compiler
#
# Each line names a piece of this part, its counterpart, and what the counterpart adds.
#
# - `decompose`: [](ref:minicompile.ch06_decompositions.decompose.decompose). Rules for hundreds of operators, and
#   what they may assume about dtypes.

# %% [markdown] tags=["page"]
# ## Part 7. What to keep for the backward pass
#
# *Which values shall forward save, and which shall backward compute again?* ([Chapter 5](chapter:05).)
#
# The joint graph has to be cut in two, because the loss is only known in between. Every value on the cut is kept in
# memory. Whatever lies above the cut and is needed below it is computed again, which is cheap for arithmetic and
# expensive for a product. So we look for the cheapest set of values to save, such that the rest follows from them by
# arithmetic.
#
# That is a minimum cut. Think of values as pipes, as wide as their bytes, and of uses as joints between them that let
# everything through. Water comes in where a value must not be computed again. It leaves where the backward pass
# reads. The narrowest place that all water passes is the set to save, and the largest flow finds it: push water along
# any path with room until there is none. The pipes that are then full and can be reached from the source at one end
# only are the cut.

# %%
def minimum_cut(capacity, source, sink):
    """Nodes on the source's side. capacity: {node: {node: room}}; changed to what is left of it."""
    while True:
        reached, frontier = {source: None}, deque([source])
        while frontier and sink not in reached:
            here = frontier.popleft()
            for there, room in capacity[here].items():
                if room > 0 and there not in reached:
                    reached[there] = here
                    frontier.append(there)
        if sink not in reached:
            return set(reached)
        path = [sink]
        while path[-1] != source:
            path.append(reached[path[-1]])
        steps = list(zip(path[1:], path))
        flow = min(capacity[a][b] for a, b in steps)
        for a, b in steps:
            capacity[a][b] -= flow
            capacity[b][a] = capacity[b].get(a, 0) + flow         # a later path may send this water elsewhere


# %% [markdown]
# Each value becomes two nodes of the network with a pipe between them, since a value is saved once, however many read
# it. An input of the compiled function costs next to nothing, as somebody keeps it anyway. What nobody would have
# written to memory costs twice: it would be written and read.
#
# What must not be computed again? Products and other calls; reductions, which need a loop of their own; and arguments
# of those, since for them the value would have to be written to memory a second time.

# %%
def size(node):
    return node.fake.numel() * node.fake.element_size() if isinstance(node.fake, torch.Tensor) else 0


def to_save(graph, forward):
    """The nodes of forward that backward gets, besides inputs of the graph."""
    capacity, users, inputs, early, endless = defaultdict(dict), defaultdict(list), set(graph.inputs), set(forward), 1 << 60
    for n in graph.nodes:
        for x in operands(n):
            users[x].append(n)
    cheap = {n for n in forward if packet(n) in POINTWISE or packet(n) in VIEWS}
    for n in forward:
        readers = [u for u in users[n] if u in early]
        in_memory = n not in cheap or any(u not in cheap for u in readers)
        many = isinstance(n.fake, (tuple, list))                    # results of one call: each is saved on its own
        capacity[n, "in"][n, "out"] = 1 if n in inputs else endless if many else size(n) * (1 if in_memory else 2) + 1
        if in_memory and packet(n) not in VIEWS:
            capacity["source"][n, "in"] = endless
        for u in users[n]:
            capacity[n, "out"][(u, "in") if u in early else "sink"] = endless
    side = minimum_cut(capacity, "source", "sink")
    return [n for n in forward if (n, "in") in side and (n, "out") not in side]


# %% [markdown]
# With the set known, both halves are parts of the joint graph, each given by its inputs and outputs.

# %%
def partition(joint):
    """forward: inputs -> outputs and what is saved; backward: what is saved and tangents -> gradients."""
    graph, k = joint.graph, len(joint.graph.inputs) - joint.tangents
    inputs, tangents = graph.inputs[:k], graph.inputs[k:]
    outputs, gradients = graph.outputs[:joint.outputs], graph.outputs[joint.outputs:]
    backward = set(tangents)
    for n in graph.nodes:
        if backward & set(operands(n)):
            backward.add(n)
    forward = part(graph, inputs, [n for n in graph.nodes if n not in backward]).nodes
    saved = to_save(graph, forward)
    return part(graph, inputs, outputs + saved), part(graph, saved + tangents, gradients)


# %% [markdown]
# GELU as GPT-2's code spells it has eight operations, and eager keeps four of their results for the backward pass.
# The cut keeps the product. The rest is computed from it once more.

# %%
def spelled_gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))


if __name__ == "__main__":
    with Recorder() as recorder:
        y = spelled_gelu(recorder.input(torch.randn(64, 32)) @ recorder.input(torch.randn(32, 32, requires_grad=True)))
    joint = joint_graph(recorder, [y])
    forward, backward = partition(joint._replace(graph=decompose(joint.graph)))
    print("backward gets", [f"{n}: {shown(n.fake)}" for n in backward.inputs])
    print(len(forward.nodes), "nodes in forward,", len(backward.nodes), "in backward")

# %% [markdown]
# ### In the real compiler
#
# Each line names a piece of this part, its counterpart, and what the counterpart adds.
#
# - `minimum_cut`: [](ref:minicompile.ch05_autograd.maxflow.maximum_flow). Dinitz's algorithm, which pushes along many
#   paths at a time.
# - `to_save`: [](ref:minicompile.ch05_autograd.partition.choose_saved). Prices that know what will be fused.
# - `partition`: [](ref:minicompile.ch05_autograd.partition.partition). Random numbers, checkpoints, memory instead of
#   speed.

# %% [markdown] tags=["page"]
# ## Part 8. Loops
#
# *What does an operator do to memory?* ([Chapter 7](chapter:07).)
#
# Until here an operator was a name. To join two of them in one kernel, the compiler must see inside: which element do
# they read when they write element `i`? All our buffers are contiguous, so an element has one number, its position in
# memory.
#
# A reshape leaves positions as they are. Other views change them: row `r` and column `c` of a transposed matrix lie
# at `c * rows + r`. So a view is a *map of positions*, made of `+`, `*`, `//` and `%`. We keep such an expression as
# a sum of atoms with factors. An atom is a loop variable, or the quotient or the remainder of an expression.
# Simplification is then mostly a question of size: if everything that is not a multiple of `k` adds up to less than
# `k`, division by `k` just drops it.

# %%
Atom = namedtuple("Atom", "text size")           # it is less than its size


class Index(namedtuple("Index", "terms constant", defaults=(0,))):
    """The sum of factor * atom, and a constant."""

    def __str__(self):
        terms = [a.text if f == 1 else f"{f} * {a.text}" for a, f in self.terms] + [str(self.constant)] * (self.constant != 0)
        return " + ".join(terms) or "0"

    def __add__(self, other):
        return total([*self.terms, *other.terms], self.constant + other.constant)

    def __mul__(self, k):
        return total([(a, f * k) for a, f in self.terms], self.constant * k)

    def split(self, k):
        """The part that k divides, divided by k, and the rest."""
        return (total([(a, f // k) for a, f in self.terms if f % k == 0], self.constant // k),
                total([(a, f) for a, f in self.terms if f % k], self.constant % k))

    def __floordiv__(self, k):
        whole, rest = self.split(k)
        if rest.largest() < k:
            return whole
        for g in common(rest, k):                # (g * big + small) // (g * n) is big // n
            return whole + rest.split(g)[0] // (k // g)
        return whole + atom("//", rest, k)

    def __mod__(self, k):
        rest = self.split(k)[1]
        if rest.largest() < k:
            return rest
        for g in common(rest, k):
            big, small = rest.split(g)
            return big % (k // g) * g + small
        return atom("%", rest, k)

    def largest(self):
        return self.constant + sum((a.size - 1) * f for a, f in self.terms)


def common(index, k):
    """Factors that divide k, where what they do not divide is smaller than they are."""
    return [f for _, f in index.terms if f > 1 and k % f == 0 and index.split(f)[1].largest() < f]


def variable(name, size):
    return Index(((Atom(name, size), 1),) if size > 1 else ())


PARTS = {}                                       # atom of x % k -> atom of x // k, x, k


def atom(operation, x, k):
    quotient, rest = Atom(f"(({x}) // {k})", x.largest() // k + 1), Atom(f"(({x}) % {k})", k)
    PARTS[rest] = quotient, x, k
    return Index(((quotient if operation == "//" else rest, 1),))


def total(terms, constant):
    """The sum; where both are in it, k * (x // k) and x % k become x."""
    factors = defaultdict(int)
    for a, f in terms:
        factors[a] += f
    for rest, (quotient, x, k) in [(a, PARTS[a]) for a in factors if a in PARTS]:
        if factors.get(quotient) == factors[rest] * k:
            f = factors.pop(rest)
            del factors[quotient]
            return total([*factors.items(), *(x * f).terms], constant + x.constant * f)
    return Index(tuple(sorted((a, f) for a, f in factors.items() if f)), constant)


# %%
if __name__ == "__main__":
    r, c = variable("r", 6), variable("c", 4)
    i = r * 4 + c
    print(i // 4, "|", i % 4, "|", i // 8, "|", i % 8, "|", i // 8 * 8 + i % 8)

# %% [markdown]
# What is the map of `permute`, of `expand`, of a slice? PyTorch knows: apply the view to a contiguous meta tensor,
# and read the strides of the result. They say where each of its elements lies.

# %%
def view_map(view, shape):
    """A function: position in the result of `view` -> position in its operand, a tensor of this shape."""
    seen = view(torch.empty(shape, device="meta"))
    if seen.is_contiguous() and not seen.storage_offset():
        return lambda i: i

    def position(i):
        found, inner = Index((), seen.storage_offset()), 1
        for length, stride in reversed(list(zip(seen.shape, seen.stride()))):
            if length > 1:
                found, inner = found + (i // inner) % length * stride, inner * length
        return found
    return position


# %%
if __name__ == "__main__":
    for view, shape in ((lambda x: x.t(), (4, 6)), (lambda x: x.expand(6, 4), (4,)), (lambda x: x[:, 1:5], (6, 9))):
        print(view_map(view, shape)(i))

# %% [markdown]
# An operator becomes a `Loop`: for each position, an expression of what its operands hold at their positions. A
# reduction is a loop over rows, whose result has one element for each row. The rest are calls. An operand is a
# constant or a `Read`: a buffer, named by the node that fills it, and a map.

# %%
Read = namedtuple("Read", "node at")             # at: position in the view -> position in the buffer


@dataclass(eq=False)
class Loop:
    """For i < size: node[i] = text, of operands at i. For a reduction over rows: node[i // row], from all i of the row."""
    node: Node
    text: str
    operands: list
    size: int
    row: int = 0                                 # length of what a reduction reduces, else 0


FLOAT, DTYPES = torch.float32, (torch.float32, torch.bool)
LONGEST_ROW = 1 << 14


def lower(graph):
    """[Loop, or the Node of a call] in order, and {node of a view: Read}."""
    steps, views, inputs = [], {}, set(graph.inputs)

    def read(x, view):
        """x, a node or a constant, seen through a view."""
        if not isinstance(x, Node):
            return x
        base, move = views.get(x) or Read(x, lambda i: i), view_map(view, x.fake.shape)
        return Read(base.node, lambda i: base.at(move(i)))

    for node in [n for n in graph.nodes if n not in inputs]:
        kind, shape = packet(node), getattr(node.fake, "shape", None)
        if kind in VIEWS:
            views[node] = read(node.args[0], lambda t: node.target(t, *node.args[1:], **node.kwargs))
        elif kind in POINTWISE and fits(node):
            steps.append(Loop(node, POINTWISE[kind], [read(x, lambda t: t.expand(shape)) for x in node.args], shape.numel()))
        elif row := reduced_row(node):
            steps.append(Loop(node, REDUCTIONS[kind], [read(node.args[0], lambda t: t)], node.args[0].fake.numel(), row))
        else:
            steps.append(node)
    return steps, views


def fits(node):
    """Whether a loop can do it: numbers of 32 bits and truth values, on one device, and no special requests."""
    tensors = [n.fake for n in (node, *operands(node))]
    return (all(t.dtype in DTYPES and t.device == node.fake.device for t in tensors) and len(tensors) > 1
            and (not node.kwargs or packet(node) is aten._to_copy) and all(isinstance(x, (Node, int, float)) for x in node.args[:3]))


def reduced_row(node):
    """The number of elements in a row, for a reduction of the last dimensions; else 0."""
    if packet(node) not in REDUCTIONS or node.fake.dtype != FLOAT or node.args[0].fake.dtype != FLOAT or node.kwargs:
        return 0
    shape = node.args[0].fake.shape
    dims = sorted(d % len(shape) for d in (node.args[1:2] or [0])[0] or range(len(shape))) if node.args[1:] else list(range(len(shape)))
    row = math.prod(shape[d] for d in dims)
    return row if dims == list(range(len(shape) - len(dims), len(shape))) and 1 < row <= LONGEST_ROW else 0


# %%
if __name__ == "__main__":
    for step in lower(decompose(record(lambda x: torch.softmax(x, -1).t() * 2, torch.randn(6, 4))))[0]:
        read = ", ".join(f"{x.node}[{x.at(variable('i', step.size))}]" if isinstance(x, Read) else str(x) for x in step.operands)
        print(f"{step.size:3} x  {step.node}: {step.text:12} of {read}" + f"    rows of {step.row}" * (step.row > 0))

# %% [markdown]
# ### In the real compiler
#
# Each line names a piece of this part, its counterpart, and what the counterpart adds.
#
# - `lower`: [](ref:minicompile.ch07_loops.lower.lower). Half precision, integers, concatenation, gathers, scatters,
#   reductions of any dimension.

# %% [markdown] tags=["page"]
# ## Part 9. Fusion
#
# *Which loops can share a pass over memory?* ([Chapter 8](chapter:08).)
#
# Two loops in one kernel run in step: iteration `(r, c)` of the one, then iteration `(r, c)` of the other. If the
# second needs what the first has made *in that same iteration*, the value never leaves a register. If it needs what
# another iteration makes, the kernel would read memory that may not have been written yet, and the answer would be
# wrong. So this is the test: for each value that crosses, is it read at the position where it has just been written?
#
# A kernel has rows and columns. A pointwise loop runs over all positions `r * columns + c`. A reduction does too, and
# then there is one result for each row, at position `r`, complete when the row is. What comes after it in the same
# row may use it.

# %%
@dataclass(eq=False)
class Step:
    """A kernel, or a call. reads, writes: nodes whose buffers it uses and fills."""
    reads: set
    writes: set
    loops: list = field(default_factory=list)
    call: Node = None


def kernel(loops):
    writes = {loop.node for loop in loops}
    return Step({x.node for loop in loops for x in loop.operands if isinstance(x, Read)} - writes, writes, loops)


def nest(loops):
    """(rows, columns) over which all these loops can run; None if there are none."""
    rows_of = {(loop.size // loop.row, loop.row) for loop in loops if loop.row}
    largest = max(loops, key=lambda loop: loop.size)
    last = largest.node.fake.shape[-1] if largest.node.fake.dim() else 1
    rows, columns = min(rows_of) if rows_of else (largest.size // last, last)
    allowed = {rows * columns, rows} if rows_of else {rows * columns}
    return (rows, columns) if len(rows_of) <= 1 and {loop.size for loop in loops} <= allowed else None


def positions(loop, rows, columns):
    """Where an iteration reads, and where it writes."""
    r, c = variable("r", rows), variable("c", columns)
    each = r * columns + c if loop.size == rows * columns else r
    return each, (r if loop.row else each)


def refusal(first, second):
    """Why two kernels cannot be one, or None."""
    loops = first.loops + second.loops
    if not (shape := nest(loops)):
        return "they run over different rows and columns"
    made = {loop.node: positions(loop, *shape)[1] for loop in loops}
    for loop in loops:
        for x in loop.operands:
            if isinstance(x, Read) and x.node in made and x.at(positions(loop, *shape)[0]) != made[x.node]:
                return f"{loop.node} reads {x.node} at {x.at(positions(loop, *shape)[0])}, which is made at {made[x.node]}"
    return None


# %% [markdown]
# Two steps that become one have one place in the order. What needs the first has to come after it, what the second
# needs, before. If one and the same step is in both groups, there is no such place.

# %%
def merged(steps, a, b):
    """The steps with a and b, in this order among them, as one; None where something between needs a and is needed by b."""
    a, b = sorted((a, b), key=steps.index)
    start, end = steps.index(a), steps.index(b)
    before, after, tainted = [], [], set()
    for step in steps[start + 1:end]:
        late = step.reads & (a.writes | tainted)
        (after if late else before).append(step)
        tainted |= step.writes if late else set()
    if b.reads & tainted:
        return None
    return [*steps[:start], *before, kernel(a.loops + b.loops), *after, *steps[end + 1:]]


# %% [markdown]
# Which pairs first? Those that save the most memory traffic: the bytes of the buffers that both touch. We go from the
# best pair to the worst, join what may be joined, and begin again until nothing can be.

# %%
def gain(a, b):
    return sum(size(n) for n in (a.reads | a.writes) & (b.reads | b.writes))


def neighbours(steps):
    """Pairs of kernels that touch the same buffer, with what their fusion gains, the best first."""
    touching = defaultdict(list)
    for step in steps:
        for n in step.reads | step.writes if step.loops else ():
            touching[n].append(step)
    pairs = {(a, b) for group in touching.values() for n, a in enumerate(group) for b in group[n + 1:]}
    place = {step: n for n, step in enumerate(steps)}
    return sorted(pairs, key=lambda pair: (-gain(*pair), place[pair[0]], place[pair[1]]))


def fuse(steps, refused=None):
    """refused: a list that gets (first, second, reason) of the last round."""
    while True:
        gone, reasons = set(), []
        for a, b in neighbours(steps):
            if not {a, b} & gone:
                reason = refusal(a, b)
                after = None if reason else merged(steps, a, b)
                if after:
                    steps = after
                    gone |= {a, b}
                else:
                    reasons.append((a, b, reason or "a step between needs the one and is needed by the other"))
        if not gone:
            if refused is not None:
                refused += reasons
            return steps


# %% [markdown]
# Softmax is one kernel. What adds its own transpose is two, and here is why:

# %%
def fused(graph, refused=None):
    """The steps of a graph, and what its views read."""
    lowered, views = lower(graph)

    def step(lowered):
        buffers = {views[n].node if n in views else n for n in (operands(lowered) if isinstance(lowered, Node) else ())}
        return kernel([lowered]) if isinstance(lowered, Loop) else Step(buffers, {lowered}, call=lowered)
    return fuse(list(map(step, lowered)), refused), views


if __name__ == "__main__":
    for f in (lambda x: torch.softmax(x, -1), lambda x: x.exp() + x.exp().t()):
        steps, _ = fused(decompose(record(f, torch.randn(4, 4))), refused := [])
        print([[loop.node for loop in step.loops] for step in steps], *[reason for _, _, reason in refused])

# %% [markdown]
# ### In the real compiler
#
# Each line names a piece of this part, its counterpart, and what the counterpart adds.
#
# - `refusal`: [](ref:minicompile.ch08_fusion.fuse.hazard). A nest is turned around where that helps, and a buffer may
#   be read at two places.
# - `gain`: [](ref:minicompile.ch08_fusion.fuse.score). What is in the cache counts less.
# - `merged`: [](ref:minicompile.ch08_fusion.fuse.makes_cycle). The same question, asked of a graph.
# - `fuse`: [](ref:minicompile.ch08_fusion.fuse.fuse_groups). And afterwards a plan of who uses whose memory.

# %% [markdown] tags=["page"]
# ## Part 10. Kernels as text
#
# *How does a fused kernel become a program?* ([Chapter 9](chapter:09) for Triton, [chapter 10](chapter:10) for C++.)
#
# The loops of a kernel are in order. Each is one line: `t3 = t2 * p0[...]`, with registers for what was made in the
# kernel, and loads for the rest. In Triton that is all. A program there works on a block of rows and columns at once,
# and a whole row fits into the block, so that a reduction is one operation on it. Only pointwise kernels also cut
# columns into blocks.

# %%
# text: the same for equal kernels. buffers: nodes, first those that it fills. blocks: how many programs of a Triton kernel to start.
Kernel = namedtuple("Kernel", "text buffers blocks")


def arguments(step, stored):
    """The buffers of a kernel; their names; the names of registers."""
    reads = {x.node: None for loop in step.loops for x in loop.operands if isinstance(x, Read) and x.node in step.reads}
    buffers = [loop.node for loop in step.loops if loop.node in stored] + list(reads)
    return buffers, {n: f"p{k}" for k, n in enumerate(buffers)}, {loop.node: f"t{k}" for k, loop in enumerate(step.loops)}


def next_power(n):
    return 1 << (n - 1).bit_length()


def triton_kernel(step, stored):
    rows, columns = nest(step.loops)
    buffers, pointers, made = arguments(step, stored)
    width = next_power(columns) if any(loop.row for loop in step.loops) else min(next_power(columns), 1024)
    height, across, loaded = max(1, min(next_power(rows), 2048 // width)), -(-columns // width), {}
    lines = [f"def NAME({', '.join(pointers.values())}):", "pid = tl.program_id(0)",
             f"r = pid // {across} * {height} + tl.arange(0, {height})[:, None]",
             f"c = pid % {across} * {width} + tl.arange(0, {width})[None, :]", f"row, column = r < {rows}, c < {columns}"]

    def value(x, each):
        if not isinstance(x, Read) or x.node in made:
            return made[x.node] if isinstance(x, Read) else repr(x)
        address = f"{pointers[x.node]} + {x.at(each)}"
        if address not in loaded:
            mask = " & ".join(name for name in ("row", "column") if re.search(rf"\b{name[0]}\b", address))
            loaded[address] = f"x{len(loaded)}"
            lines.append(f"{loaded[address]} = tl.load({address}{', ' * bool(mask)}{mask})")
        return loaded[address]

    for loop in step.loops:
        each, written = positions(loop, rows, columns)
        values = [value(x, each) for x in loop.operands]
        text = re.sub(r"\b(exp|log|sqrt|rsqrt|erf|sin|cos|abs|where)\b", r"tl.\1", loop.text).format(*values)
        if loop.row:
            text = f"tl.reduce(tl.where(row & column, {values[0]}, {NEUTRAL[loop.text]}), 1, {loop.text}, keep_dims=True)"
        elif packet(loop.node) is aten._to_copy:
            text = f"({text}).to(tl.{'int1' if loop.node.fake.dtype is torch.bool else 'float32'})"
        lines.append(f"{made[loop.node]} = {text}")
        if loop.node in stored:
            lines.append(f"tl.store({pointers[loop.node]} + {written} + 0 * (r + c), {made[loop.node]}, row & column)")
    return Kernel("@triton.jit\n" + "\n    ".join(lines) + "\n", buffers, across * -(-rows // height))


# %% [markdown]
# C++ has no blocks, and a row is a loop over columns. A reduction is complete only after that loop, so what uses it
# needs another one: the loops of a kernel are in *passes*. What one pass makes and a later pass needs goes through a
# small array, which stays in the cache. Rows are divided among the threads, columns among the lanes of a vector
# register.

# %%
def passes(step):
    """{loop: its pass}, {node: the pass from which on its value is there}."""
    runs, there = {}, {}
    for loop in step.loops:
        runs[loop] = max([there[x.node] for x in loop.operands if isinstance(x, Read) and x.node in there], default=0)
        there[loop.node] = runs[loop] + (loop.row > 0)
    return runs, there


def cpp_kernel(step, stored):
    rows, columns = nest(step.loops)
    buffers, pointers, made = arguments(step, stored)
    runs, there = passes(step)
    kinds = {n: "unsigned char" if n.fake.dtype is torch.bool else "float" for n in [*buffers, *made]}
    wide = {loop.node for loop in step.loops if loop.size == rows * columns and not loop.row}
    kept = {x.node for loop in step.loops for x in loop.operands if isinstance(x, Read) and x.node in wide and there[x.node] < runs[loop]}

    def value(x, loop, each):
        if not isinstance(x, Read):
            return repr(x)
        if x.node not in made:
            return f"{pointers[x.node]}[{x.at(each)}]".replace("//", "/")
        return f"k{made[x.node]}[c]" if x.node in wide and there[x.node] < runs[loop] else made[x.node]

    def line(loop):
        (each, written), name = positions(loop, rows, columns), made[loop.node]
        values = [value(x, loop, each) for x in loop.operands]
        if loop.row:
            return f"{name} = {loop.text}({name}, {values[0]});"
        return (f"{kinds[loop.node]} {name} = {loop.text.format(*values)};" + f" k{name}[c] = {name};" * (loop.node in kept)
                + f" {pointers.get(loop.node)}[{written}] = {name};" * (loop.node in stored))

    lines = [f'extern "C" void NAME({", ".join(f"{kinds[n]}* __restrict {p}" for n, p in pointers.items())}) {{',
             f"#pragma omp parallel for if({rows * columns} > 16384)", f"for (long r = 0; r < {rows}; r++) {{",
             *[f"{kinds[n]} k{made[n]}[{columns}];" for n in made if n in kept]]
    for number in range(max(there.values()) + 1):
        narrow, full = [[loop for loop in step.loops if runs[loop] == number and (loop.size == rows * columns) == all_of_it]
                        for all_of_it in (False, True)]
        folds = [loop for loop in full if loop.row]
        lines += [line(loop) for loop in narrow] + [f"float {made[loop.node]} = {NEUTRAL[loop.text]};" for loop in folds]
        lines += ["#pragma omp simd" + "".join(f" reduction({loop.text}: {made[loop.node]})" for loop in folds),
                  f"for (long c = 0; c < {columns}; c++) {{", *map(line, full), "}"] if full else []
        lines += [f"{pointers[loop.node]}[r] = {made[loop.node]};" for loop in folds if loop.node in stored]
    return Kernel("\n".join(lines) + "\n}\n}\n", buffers, 0)


# %% [markdown]
# Both languages need the functions of the table by the same names.

# %%
NEUTRAL = {"sum": "0.0", "maximum": "-inf"}
TRITON = """import triton
import triton.language as tl
inf = tl.constexpr(float("inf"))

@triton.jit
def tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1

@triton.jit
def sum(a, b):
    return a + b

@triton.jit
def maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)

"""
CPP = """#define __FAST_MATH__                      // vector versions of expf and its like
#include <cmath>
#define inline static inline __attribute__((always_inline))
#define inf INFINITY
using namespace std;
inline float fast_exp(float x) { float y = expf(x < -87 ? -87 : x); return x < -87 ? 0 : y; }
#define exp fast_exp
inline float rsqrt(float x) { return 1 / sqrtf(x); }
inline float where(int c, float a, float b) { return c != 0 ? a : b; }
inline float sum(float a, float b) { return a + b; }
inline float maximum(float a, float b) { return a > b || a != a ? a : b; }
#pragma omp declare reduction(sum: float: omp_out = sum(omp_out, omp_in)) initializer(omp_priv = 0)
#pragma omp declare reduction(maximum: float: omp_out = maximum(omp_out, omp_in)) initializer(omp_priv = -inf)

"""
FLAGS = "-O3 -march=native -fopenmp -fsingle-precision-constant -fno-math-errno -fno-trapping-math -fno-signed-zeros -shared -fPIC"
LOADED = {}                                      # text of a kernel -> what launches it


def load_triton(kernels):
    for kernel in kernels:
        source, file, names = TRITON + kernel.text.replace("NAME", "kernel"), f"<kernel {len(LOADED)}>", {"__name__": "tiny"}
        linecache.cache[file] = len(source), None, source.splitlines(True), file              # where Triton looks for it
        exec(builtins.compile(source, file, "exec"), names)
        LOADED[kernel.text] = lambda *tensors, launcher=names["kernel"][(kernel.blocks,)]: launcher(*tensors)


def load_cpp(kernels):
    folder, texts = pathlib.Path(tempfile.mkdtemp(prefix="tiny")), [kernel.text for kernel in kernels]
    (folder / "k.cpp").write_text(CPP + "\n".join(text.replace("NAME", f"k{n}") for n, text in enumerate(texts)))
    subprocess.run(["g++", *FLAGS.split(), folder / "k.cpp", "-o", folder / "k.so"], check=True)
    library = ctypes.CDLL(str(folder / "k.so"))
    for n, text in enumerate(texts):
        LOADED[text] = lambda *tensors, f=library[f"k{n}"]: f(*[ctypes.c_void_p(t.data_ptr()) for t in tensors])


def load(kernels, target):
    """Compile the kernels whose text is new."""
    if new := {kernel.text: kernel for kernel in kernels if kernel.text not in LOADED}:
        (load_triton if target == "cuda" else load_cpp)(new.values())


# %%
if __name__ == "__main__":
    (step,), _ = fused(decompose(record(lambda x: torch.softmax(x, -1), torch.randn(64, 48))))
    print(triton_kernel(step, {step.loops[-1].node}).text)
    print(cpp_kernel(step, {step.loops[-1].node}).text)

# %% [markdown]
# ### In the real compiler
#
# Each line names a piece of this part, its counterpart, and what the counterpart adds.
#
# - `triton_kernel`: [](ref:minicompile.ch09_triton.emit.emit_triton). Rows that fit into no block, sums over columns,
#   sizes of blocks from measurements.
# - `cpp_kernel`: [](ref:minicompile.ch10_cpp.emit.emit_cpp). Vectors written out, tiles, sums that many threads
#   share.

# %% [markdown] tags=["page"]
# ## Part 11. The host program
#
# *Who calls the kernels?* ([Chapter 11](chapter:11).)
#
# A Python function, one line for each kernel and each call, in order. It makes a tensor just before it is written,
# and lets go of it after its last use. Views which a call or the caller wants to see are made by PyTorch, without
# moving data.

# %%
ON_HOST = {aten.view: torch.reshape, aten._unsafe_view: torch.reshape, aten.clone: lambda x, **_: x.contiguous()}


class Host:
    """The text of a program for a graph."""

    def __init__(self, graph, target):
        self.steps, self.views = fused(graph)
        self.lines, self.names, self.graph, self.target = [], {"aten": aten, "torch": torch}, graph, target
        self.variables = {n: f"x{k}" for k, n in enumerate(graph.inputs)}
        wanted = {self.views[n].node if n in self.views else n for n in graph.outputs if n}
        for step in self.steps:
            wanted |= step.reads
        self.kernels = [(triton_kernel if target == "cuda" else cpp_kernel)(s, wanted) if s.loops else None for s in self.steps]

    def name(self, thing):
        name = f"k{len(self.names)}"
        self.names[name] = thing
        return name

    def value(self, x):
        """The variable of a node; a view is made where it is first wanted."""
        if isinstance(x, (list, tuple)):
            return f"[{', '.join(map(self.value, x))}]"
        if not isinstance(x, Node):
            return repr(x) if isinstance(x, (int, type(None))) else self.name(x)
        if x not in self.variables:
            self.call(x)
        return self.variables[x]

    def call(self, node):
        args = [*map(self.value, node.args), *[f"{k}={self.value(x)}" for k, x in node.kwargs.items()]]
        target = ON_HOST.get(packet(node), node.target)
        self.variables[node] = f"x{len(self.variables)}"
        self.lines.append(f"{self.variables[node]} = {self.name(target)}({', '.join(args)})")

    def launch(self, kernel, step):
        for n in kernel.buffers:
            if n in step.writes:
                self.variables[n] = f"x{len(self.variables)}"
                shape, dtype, device = tuple(n.fake.shape), n.fake.dtype, str(n.fake.device)
                self.lines.append(f"{self.variables[n]} = empty({shape}, dtype={dtype}, device={device!r})")
        given = [self.value(n) + ("" if n in step.writes else ".contiguous()") for n in kernel.buffers]
        self.lines.append(f"{self.name(LOADED[kernel.text])}({', '.join(given)})")

    def program(self):
        load([k for k in self.kernels if k], self.target)
        for step, kernel in zip(self.steps, self.kernels):
            self.launch(kernel, step) if kernel else self.call(step.call)
        result = self.value(self.graph.outputs)
        inputs = ", ".join(self.variables[n] for n in self.graph.inputs)
        text = "\n    ".join([f"def run({inputs}):", *self.freed(result), f"return {result}"])
        exec(text, names := {**self.names, "empty": torch.empty})
        names["run"].text = text
        return names["run"]

    def freed(self, result):
        """The lines, and a `del` after the last line that names a variable."""
        last = {v: n for n, line in enumerate(self.lines) for v in re.findall(r"\bx\d+\b", line)}
        for n, line in enumerate(self.lines):
            dead = [v for v, at in last.items() if at == n and not re.search(rf"\b{v}\b", result)]
            yield line + (f"; del {', '.join(dead)}" if dead else "")


# %% [markdown]
# What is left is to make the two programs one operation of PyTorch's own autograd, so that `loss.backward()` finds
# the second one.

# %%
def loops(recorder, outputs, target=None):
    """The whole compiler after capture: a function of the graph's inputs."""
    joint = joint_graph(recorder, outputs)
    joint = joint._replace(graph=decompose(joint.graph))
    devices = {n.fake.device.type for n in joint.graph.nodes if isinstance(n.fake, torch.Tensor)}
    target = target or ("cuda" if "cuda" in devices else "cpu")
    if not joint.tangents:
        return Host(joint.graph, target).program()
    forward, backward = [Host(graph, target).program() for graph in partition(joint)]
    return in_autograd(forward, backward, [x.requires_grad for x in outputs], [n.fake.requires_grad for n in recorder.inputs])


def in_autograd(forward, backward, differentiable, wanted):
    class Compiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            results = forward(*inputs)
            outputs, saved = results[:len(differentiable)], results[len(differentiable):]
            ctx.save_for_backward(*saved)
            ctx.mark_non_differentiable(*[x for x, d in zip(outputs, differentiable) if not d])
            return tuple(outputs)

        @staticmethod
        def backward(ctx, *tangents):
            given = [t for t, d in zip(tangents, differentiable) if d]
            gradients = iter(backward(*ctx.saved_tensors, *given))
            return tuple(next(gradients) if w else None for w in wanted)

    return Compiled.apply


# %%
if __name__ == "__main__":
    def perceptron(x, up, down):
        return spelled_gelu(x @ up) @ down

    print(Host(decompose(record(perceptron, torch.randn(8, 4), torch.randn(4, 16), torch.randn(16, 4))), "cpu").program().text)

# %% [markdown]
# ### In the real compiler
#
# Each line names a piece of this part, its counterpart, and what the counterpart adds.
#
# - `Host`: [](ref:minicompile.ch11_runtime.host.compile_schedule). Memory that is planned, launches without Python's
#   detours, CUDA graphs.
# - `in_autograd`: [](ref:minicompile.ch05_autograd.runtime.build_function). Aliases of inputs, gradients of
#   gradients, tensors that changed in between.

# %% [markdown] tags=["page"]
# ## Part 12. Training a GPT
#
# *Does all of it work together?*
#
# A small GPT, written as one would write it. Its GELU is spelled out as in the code of GPT-2, so eager runs eight
# kernels for it, and keeps what most of them made. The text that it learns to continue is this file.

# %%
class Block(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        batch, time, width = x.shape
        q, k, v = [t.view(batch, time, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(width, dim=2)]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, time, width))
        h = self.up(self.norm2(x))
        return x + self.down(spelled_gelu(h))


class GPT(torch.nn.Module):
    def __init__(self, layers=2, width=64, heads=4, length=64, letters=256):
        super().__init__()
        self.letters, self.places = torch.nn.Embedding(letters, width), torch.nn.Embedding(length, width)
        self.blocks = torch.nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, letters, bias=False)

    def forward(self, text, wanted):
        x = self.letters(text) + self.places(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x))
        return F.cross_entropy(scores.flatten(0, 1), wanted.flatten())


def train(wrap, steps, device, batch=12, **sizes):
    """The losses, and the seconds that a step takes (median, without the first five)."""
    torch.manual_seed(0)
    model = GPT(**sizes).to(device)
    step, optimizer = wrap(model), torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.tensor(list(pathlib.Path(__file__).read_bytes()), device=device)
    losses, seconds, length = [], [], model.places.num_embeddings
    for _ in range(steps):
        starts = torch.randint(len(data) - length - 1, (batch, 1)).to(device) + torch.arange(length + 1, device=device)
        started = time.perf_counter()
        loss = step(data[starts[:, :-1]], data[starts[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
    return losses, sorted(seconds[5:])[len(seconds[5:]) // 2]


# %% [markdown]
# The losses of both are printed side by side, and under them the milliseconds of a step: forward, backward and the
# optimizer. On an H100, with 6 layers of width 384, a batch of 64 times 256 characters, and tf32 products, a step took
# 23.6 ms in eager and 15.5 ms with tiny (torch 2.11, triton 3.6), and the peak of memory for forward and backward fell from
# 4.57 to 2.03 GB. In eager, 10 ms of the step are element-wise kernels, most of them of the GELU; all generated kernels
# together, the layer norms among them, take 2.2 ms.

# %%
if __name__ == "__main__":
    gpu = torch.cuda.is_available()
    sizes = dict(layers=6, width=384, heads=6, length=256, batch=64) if gpu else dict(layers=2, width=64, length=64, batch=8)
    torch.set_float32_matmul_precision("high")
    table = {name: train(wrap, 40, "cuda" if gpu else "cpu", **sizes) for name, wrap in (("eager", lambda m: m), ("tiny", compile))}
    print("step", *[f"{name:>8}" for name in table])
    for n in range(0, 40, 4):
        print(f"{n:4}", *[f"{losses[n]:8.4f}" for losses, _ in table.values()])
    print("  ms", *[f"{1e3 * seconds:8.2f}" for _, seconds in table.values()])
