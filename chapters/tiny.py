# %% [markdown]
# # tiny: torch.compile in an afternoon
#
# This file is a whole compiler for PyTorch programs, in 1,200 lines of code. It has every stage that
# `torch.compile` has, and each stage is the smallest version that does its job. At the end it trains a small GPT,
# forward and backward, to the losses that eager PyTorch reaches, and in less time.
#
#     python chapters/tiny.py
#
# runs all of it: first the demonstrations of the parts, in order, and then the training. It imports PyTorch and the
# standard library, and nothing else; the kernels that it writes need g++, or Triton and a GPU. Each chapter of the
# book starts from its part of tiny. It shows programs that break this part, and what the real stage does about them.
#
# The surest way to understand it is to write it. Fourteen functions of this file are exercises, and together they are
# the *build track*: in a file of your own a compiler grows, from [the handler of one instruction](exercise:tiny-loop)
# to [a fused reduction in Triton](exercise:tiny-triton), and in the end it [trains the GPT](exercise:tiny-train).
# `python -m exercises start tiny-loop` begins. As pages of the book (`make site`) these functions are folded away until
# you open them; in the file `chapters/tiny.py` they stand open.
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
# | [8](chapter:tiny.8) | What does an operator do to memory? | strides, and the digits of a position | [7](chapter:07) |
# | [9](chapter:tiny.9) | Which loops can share a pass over memory? | a test for legality, and greed | [8](chapter:08) |
# | [10](chapter:tiny.10) | How does a kernel become a program? | text in Triton and in C++ | [9](chapter:09), [10](chapter:10) |
# | [11](chapter:tiny.11) | Who calls the kernels? | a generated Python function | [11](chapter:11) |
# | [12](chapter:tiny.12) | Does all of it work together? | a GPT | |
#
# Smallness has a price, and here is all of it. Shapes are static: another shape is another compilation. Kernels work
# on contiguous memory. A function that writes into a tensor is cut there. Matrix products, attention, embeddings and
# the loss are calls of PyTorch's own library, and so are reductions of other dimensions than the last ones. Loops
# compute in float32. The optimizer stays eager. Functions with `with`, `try`, `yield`, `super` or `locals` are left to Python, and
# who looks at Python's frames sees those of tiny.
# After a graph break an interpreter written in Python executes one instruction, which is slow. The bytecode is that
# of CPython 3.11 and 3.12; with another release, everything runs uncompiled. And where a chapter says that the real
# stage must prove something, tiny often only assumes it: that nobody replaces a method of a class, say, or a function
# of PyTorch. A class that is asked for an attribute only reads. An operation whose result nobody needs is left out, and
# with it an error that only its kernel would have raised. A gradient of a gradient is refused; and an input that has
# no influence on the loss, but on another output, gets a gradient of zeros.

# %%
from __future__ import annotations

import builtins
import copy
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
# called, and with which arguments. An argument is a constant or another node, so the nodes form a graph.

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


# %% [markdown]
# A `Graph` lists the nodes in the order in which the operations ran, and says which of them are inputs and which are
# results. Printed, it has a line for each node, with the dtype and the shape of what the node computes.

# %%


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
# Two small functions translate. In a call of an operator, `as_meta` puts meta tensors in the place of fakes, so that
# the operator can run. `as_node` puts nodes in their place, and that is what a graph holds.

# %%
def as_meta(x):
    if isinstance(x, Fake):
        return x.meta
    with _disable_current_modes():                       # this is no operation of the program
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, torch.Tensor) else x


def as_node(x):
    return x.node if isinstance(x, Fake) else x


# %% [markdown]
# While a `TorchDispatchMode` is active, PyTorch hands every operator to it, below autograd and after composite
# operators have fallen apart (`F.linear` arrives as a transpose and an `addmm`). Our mode keeps the nodes.

# %%


class Recorder(TorchDispatchMode):
    _should_skip_dynamo = classmethod(lambda cls: False)          # else PyTorch would import its own compiler here

    def __init__(self):
        super().__init__()
        self.nodes, self.inputs = [], []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        return recorded(self, op, args, kwargs or {})

    def note(self, target, args=(), kwargs={}):
        """A new node, the last of the recording."""
        name = f"{getattr(target, '__name__', 'x').partition('.')[0]}_{len(self.nodes)}"
        self.nodes.append(Node(name, target, args, kwargs))
        return self.nodes[-1]

    def input(self, like, requires_grad=None):
        """A fake input that looks like this tensor."""
        self.inputs.append(node := self.note(None))
        return wrap(as_meta(like), like.device, node, like.requires_grad if requires_grad is None else requires_grad)


# %% [markdown]
# What happens to one operator? It runs on meta tensors, a node is noted, and the results are wrapped as fakes. A
# fake and its node know each other. An operator with several results makes one more node for each of them, which
# stands for taking it out of the tuple.

# %% tags=["exercise:tiny-record"]
def recorded(recorder, op, args, kwargs):
    """What a call of an operator gives while `recorder` records: a fake for a tensor, a tuple or a list of fakes for several, anything
    else as it is. The call becomes a node of the recording, and each of several results one more, of `operator.getitem`."""
    result, device = on_meta(op, args, kwargs)
    node = recorder.note(op, *tree_map(as_node, (args, kwargs)))
    if isinstance(result, (tuple, list)):
        node.fake = result
        return type(result)([wrap(r, device, recorder.note(operator.getitem, (node, k))) for k, r in enumerate(result)])
    return wrap(result, device, node)


# %% [markdown]
# Two kinds of operators end the graph. One writes into a tensor, to which tiny has no answer. The other needs data, as
# `.item()` does: there is no meta kernel for it, and so it raises by itself.

# %%
def on_meta(op, args, kwargs):
    """The operator's result on meta tensors, and the device that it would be on."""
    if op._schema.is_mutable:
        raise Break(f"{op} writes into a tensor")
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    device = kwargs.get("device") or max(tensors, key=torch.Tensor.dim).device if tensors or "device" in kwargs else "cpu"
    kwargs = {**kwargs, "device": "meta"} if not tensors or "device" in kwargs else kwargs
    return op(*tree_map(as_meta, args), **tree_map(as_meta, kwargs)), torch.device(device)


def wrap(result, device, node, requires_grad=False):
    """A fake for a meta tensor that this node has made; anything else as it is."""
    node.fake = Fake(result, device, node, requires_grad) if isinstance(result, torch.Tensor) else result
    return node.fake


# %% [markdown]
# Of all that was recorded, a graph needs what leads to its outputs. So we walk backwards from them. The same function
# will later cut the graph of a training step in two.

# %%
def part(graph, inputs, outputs):
    """The graph of what leads from these inputs to these outputs."""
    needed = {n for n in outputs if n}
    for node in reversed(graph.nodes):
        if node in needed and node not in inputs:
            needed.update(operands(node))
    return Graph([n for n in graph.nodes if n in needed or n in inputs], inputs, outputs)


def operands(node):
    return [x for x in tree_leaves((node.args, node.kwargs)) if isinstance(x, Node)]


def finish(recorder, outputs):
    """The graph of what the outputs need. outputs: fakes, or None."""
    return part(recorder, list(recorder.inputs), [as_node(x) for x in outputs])


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
        return finish(recorder, tree_leaves(f(*[recorder.input(x) for x in examples])))


# %%
if __name__ == "__main__":
    print(record(lambda x, w: F.gelu(x @ w) + 1, torch.randn(4, 8), torch.randn(8, 8)))

# %% [markdown]
# ### Line by line
#
# Here are four lines of a program, executed one after the other while a recorder is active. Beside each line stand the
# nodes that it has added.

# %%
if __name__ == "__main__":
    recorder = Recorder()
    scope = {"F": F, "x": recorder.input(torch.randn(4, 8)), "w": recorder.input(torch.randn(8, 8))}
    for line in ("y = F.linear(x, w)", "n = y.shape[0] * 2", "z = y + n", "y = F.gelu(z)"):
        begin = len(recorder.nodes)
        with recorder:
            exec(line, scope)
        added = str(Graph(recorder.nodes[begin:], [], [])).splitlines()[:-1] or [f"nothing: n is {scope['n']}"]
        for n, text in enumerate(added):
            print(f"{'' if n else line:20}{text}")

# %% [markdown]
# The first line shows where the recorder sits: below `F.linear`, which is two operators there. The second line leaves
# no trace. A shape is a tuple of Python's numbers, so `n` is computed at once, and the third line has recorded the bare
# number 8. With an `x` of five rows it would be 10, but the recording does not know where its 8 came from. So it must not
# be used for five rows, and to see to that is the work of part 2. In the last line `y` becomes the name of another fake. To
# the graph that means nothing, since its nodes refer to each other, and not to the program's variables.

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
# itself gives the same answers. So the compiler writes a Python function, the *check*, while it records. For each
# thing that is read, a line of the check reads the same thing again at the next call, and another line compares it.
#
# tiny writes Python twice, here and for the host program of part 11. A `Text` is a function that is being written: its
# lines, and the objects that its text needs but cannot spell, such as a class or a tensor's strides. Those get names.

# %%


class Text:
    """A Python function that is being written."""

    def __init__(self):
        self.lines = []                  # of its body
        self.names = {}                  # id of an object that text cannot spell -> (its name, the object)

    def name(self, thing):
        return self.names.setdefault(id(thing), (f"k{len(self.names)}", thing))[0]

    def function(self, head, names={}):
        """The function. head: its name and parameters. names: what else the text may use."""
        text = "\n    ".join([f"def {head}:", *self.lines])
        exec(text, scope := {**names, **dict(self.names.values())})
        made = scope[head.partition("(")[0]]
        made.text = text
        return made


# %% [markdown]
# The check is such a text, and it knows what the trace has read. It also remembers by which variable each object can
# be reached at the next call: part 4 will need that to hand objects over.

# %%


class Outside(Text):
    """The check, and what a trace has read from the world."""

    def __init__(self, recorder):
        super().__init__()
        self.recorder = recorder
        self.seen = {}                   # path -> what the trace works with
        self.variables = {}              # id of what the trace works with -> its variable in the check
        self.inputs = {}                 # id of a real tensor -> (its variable, its fake), in the order of the graph's inputs
        self.made = []                   # what the trace itself has made: functions, and what part 4 spells
        self.outputs = []                # fakes that the graph returns

    def test(self, condition):
        self.lines.append(f"if not ({condition}): return None")


# %% [markdown]
# Each read goes through one function. It writes the line that reads, lets `compare` write the line that compares, and
# returns what the trace works with: a fake for a tensor, the thing itself for almost everything else. A path such as
# `frames[0].locals['self'].up.weight` is read step by step, each step into a variable, so that no step is done twice.

# %%
def read(outside, path, thing):
    if path not in outside.seen:
        variable = f"v{len(outside.seen)}"
        outside.seen[path] = None
        outside.lines.append(f"{variable} = {path}")
        outside.seen[path] = made = compare(outside, variable, thing)
        if not isinstance(made, CONSTANTS) and type(made) not in VALUES:
            if outside.variables.setdefault(id(made), variable) != variable and made is thing:        # a second path to one object
                outside.test(f"{variable} is {outside.variables[id(made)]}")
    return outside.seen[path]


# %% [markdown]
# The opposite question comes up when code is written for the next call: by which variable can a thing be reached there?
# What never changes, such as a function or a class, need not be read again. It gets a name in the text.

# %%
def reach(outside, thing):
    """How to reach a thing at the next call; None for what the trace itself has made."""
    if id(thing) in outside.variables:
        return outside.variables[id(thing)]
    known = isinstance(thing, FIXED) or type(thing) is dict and "__builtins__" in thing          # the globals of a function
    fixed = known and not is_bound(thing) and not any(thing is x for x in outside.made)
    return outside.name(thing) if fixed else None


# %% [markdown]
# What is compared depends on what was read. A number is compared by its value, since the trace computes with it. A
# tensor by everything except its data. A list by its length, and then element by element. A function by its code and
# the globals that it works with; its defaults are read where a call uses them. Any other object by its class alone:
# what matters of it will be read through its attributes, each with a guard of its own. If two paths lead to one object,
# they have to lead to one at the next call as well, because what is read through the first is not read again.
#
# So there are kinds of things, and this is how they are told apart:

# %%
CONSTANTS = (type(None), bool, int, float, complex, str, bytes, slice, range, type(...), torch.dtype, torch.device)
FIXED = (type, types.ModuleType, types.BuiltinFunctionType, types.FunctionType, types.CodeType, type(torch.Tensor.add))


def is_bound(thing):
    """Whether it is a method together with its object."""
    return isinstance(thing, (types.MethodType, types.BuiltinMethodType)) and not isinstance(thing.__self__, (type(None), types.ModuleType))


# %%
def compare(outside, v, thing):
    """Write the guard of what variable v holds, and return what the trace works with."""
    kind = type(thing)
    if isinstance(thing, torch.Tensor):
        return compare_tensor(outside, v, thing)
    if kind in CONSTANTS:
        outside.test(f"type({v}) is {outside.name(kind)} and repr({v}) == {repr(thing)!r}")
    elif is_bound(thing):
        outside.test(f"type({v}) is {outside.name(kind)} and {v}.__name__ == {thing.__name__!r}")
        owner = read(outside, f"{v}.__self__", thing.__self__)
        return kind(read(outside, f"{v}.__func__", thing.__func__), owner) if kind is types.MethodType else getattr(owner, thing.__name__)
    elif kind is types.FunctionType:
        outside.test(f"{v}.__code__ is {outside.name(thing.__code__)} and {v}.__globals__ is {outside.name(thing.__globals__)}")
    else:                                        # a constant of a class of its own may print anything, and is itself or not
        outside.test(f"{v} is {outside.name(thing)}" if isinstance(thing, FIXED + CONSTANTS) else f"type({v}) is {outside.name(kind)}")
    return VALUES[kind](outside, v, thing) if kind in VALUES else thing


# %% [markdown]
# A tensor is compared by its description. Two paths may lead to one tensor. Then the trace has one fake for it, and
# the guard says that at the next call the two paths have to lead to one tensor again.

# %% tags=["exercise:tiny-guard"]
def compare_tensor(outside, v, thing):
    """Write the guard of a tensor that variable v holds, and return its fake, an input of the recording. A tensor that was read before
    has its fake already; the guard then asks for one tensor again. `outside.inputs` keeps both."""
    if id(thing) not in outside.inputs:
        outside.inputs[id(thing)] = v, outside.recorder.input(thing)
    first, fake = outside.inputs[id(thing)]      # first is another variable where a tensor is reached by a second path
    outside.test(f"{v} is {first}" if v != first else f"describe({v}) == {outside.name(describe(thing))}")
    return fake


# %%
def describe(t):
    return type(t), t.shape, t.stride(), t.dtype, t.device, t.requires_grad


# %% [markdown]
# A list or a dictionary is only looked into when the trace does. `contents` gives a copy of it whose elements have
# been read. Containers of other classes have no row in the table, and the `KeyError` ends the graph.

# %%
def read_sequence(outside, v, thing):
    outside.test(f"len({v}) == {len(thing)}")
    return type(thing)([read(outside, f"{v}[{i}]", x) for i, x in enumerate(thing)])


def read_dict(outside, v, thing):
    outside.test(f"list({v}) == {outside.name(list(thing))} and [*map(type, {v})] == {outside.name([*map(type, thing)])}")
    return {k: read(outside, f"{v}[{k!r}]", x) for k, x in thing.items()}


# %%
VALUES = {tuple: read_sequence, torch.Size: read_sequence}         # these cannot change: they are read at once
CONTAINERS = {list: read_sequence, dict: read_dict} | dict.fromkeys((torch.nn.ModuleList, torch.nn.Sequential), lambda outside, v, thing:
              list(read_dict(outside, f"{v}._modules", thing._modules).values()))


def contents(outside, thing):
    """A copy of a container from outside; anything else as it is."""
    path = outside and outside.variables.get(id(thing))
    if not path or isinstance(thing, Fake) or not hasattr(type(thing), "__iter__"):
        return thing
    if f"*{path}" not in outside.seen:
        outside.seen[f"*{path}"] = CONTAINERS[type(thing)](outside, path, thing)
    return outside.seen[f"*{path}"]


# %% [markdown]
# ### Reads by hand
#
# Let a function have the parameters `x` and `settings`, and let it look into the dictionary `settings`, which holds a
# number and, once more, the tensor `x`. We do the reads of its trace ourselves. Each is printed with what the trace
# gets, and with the lines by which the check has grown.

# %%
if __name__ == "__main__":
    def brief(thing):
        """A value of the trace in few letters."""
        if isinstance(thing, Fake):
            return f"{thing.node}: {shown(thing)}"
        return repr(thing) if isinstance(thing, CONSTANTS) else f"a {type(thing).__name__}"

    x = torch.ones(2, 3)
    settings = {"scale": 2.5, "bias": x}
    outside = Outside(Recorder())
    for what, act in (("read x", lambda: read(outside, "x", x)), ("read settings", lambda: read(outside, "settings", settings)),
                      ("look into settings", lambda: contents(outside, settings)),
                      ("read x again", lambda: read(outside, "x", x))):
        begin = len(outside.lines)
        print(f"{what}: the trace gets {brief(act())}", *outside.lines[begin:], sep="\n    ")

# %% [markdown]
# The tensor becomes a fake, and its guard compares descriptions. The one it had is an object that text cannot spell, so `Text`
# has named it k0. Of the dictionary only the class is compared, until somebody looks into it. Then its keys are compared, and each element
# is a read of its own, whose path begins at the dictionary's variable. The number is compared by its
# value. The tensor under "bias" has a fake already. The trace gets the same one, the graph has one input for both, and
# in exchange the check asks that both are one tensor the next time. The last read was made before: it writes nothing.
#
# Two dictionaries have taken notes. `seen` goes from a path to what the trace has got, and so no path is read twice.
# `variables` goes the other way, from an object of the trace to the variable that holds its counterpart in the check:

# %%
if __name__ == "__main__":
    print("seen:     ", {path: brief(thing) for path, thing in outside.seen.items()})
    print("variables:", {brief(thing): outside.variables[id(thing)] for thing in (outside.inputs[id(x)][1], settings)})
    outside.lines.append("return True")
    check = outside.function("check(x, settings)", {"describe": describe})
    for what, calls in {"another tensor, in both": (y := torch.zeros(2, 3), {"scale": 2.5, "bias": y}),
                        "two tensors": (y, {"scale": 2.5, "bias": x}), "another number": (y, {"scale": 3.5, "bias": y}),
                        "three rows": (z := torch.zeros(3, 3), {"scale": 2.5, "bias": z})}.items():
        print(f"{what}: {check(*calls)}")

# %% [markdown]
# The path `*v1` stands for the contents of what v1 holds. Called with other arguments, the check is True where the recording holds for
# them, and None at the first comparison that fails.

# %% [markdown]
# ### In the real compiler
#
# Each line names a piece of this part, its counterpart, and what the counterpart adds.
#
# - `read`: [](ref:minicompile.ch02_guards.sources.Source). A path is data: it can be read, guarded, written
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
NULL = types.SimpleNamespace()                   # CPython's mark on the stack beside a function that will be called without an object


@dataclass(eq=False)
class Frame:
    """A function that has begun to run. at: the position of the next instruction."""
    function: types.FunctionType
    locals: dict                                 # name -> value; a variable that closures share is in a cell
    stack: list
    at: int = 0


# %% [markdown]
# How does a call become the first frame? Its arguments have to be sorted into parameters, with defaults and keywords and
# `*args`, by rules that fill pages. CPython knows them. So we give it code that has the same parameters and, in the place of
# the body, `locals()`. Called with the arguments, it returns the dictionary that we want.

# %%
@functools.cache
def binder(code):
    """Code with the same parameters, which returns their values by name."""
    bare, several = (lambda: locals()).__code__, code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    kept = {name: getattr(code, name) for name in ("co_name", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount")}
    count = code.co_argcount + code.co_kwonlyargcount + several.bit_count()
    return bare.replace(**kept, co_nlocals=count, co_varnames=code.co_varnames[:count], co_flags=bare.co_flags | several)


# %%
def first_frame(function, args, kwargs, outside=None):
    """The frame of a call. With `outside`, the defaults of a function from there are read through it."""
    defaults, named = function.__defaults__, function.__kwdefaults__
    if outside and (defaults or named) and (path := reach(outside, function)):
        defaults = read(outside, f"{path}.__defaults__", defaults)
        named = contents(outside, read(outside, f"{path}.__kwdefaults__", named))
    bind = new_function(binder(function.__code__), vars(builtins), defaults, named, None)
    return Frame(function, bind(*args, **kwargs), [])


# %% [markdown]
# Two kinds of objects need care. A variable that the trace has not used yet is an `Unread`: what the trace never uses,
# it need not guard. And every iterator is one over a tuple, since only of those we know what is left: a copy of the
# iterator tells it, and the original does not notice.

# %%
Unread, ITERATOR = namedtuple("Unread", "path thing"), type(iter(()))


def rest(iterator):
    """What an iterator over a tuple has not given yet."""
    return tuple(copy.copy(iterator))


VALUES[ITERATOR] = lambda outside, v, thing: iter(read(outside, f"rest({v})", rest(thing)))

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


# %% [markdown]
# Before anything is traced, the list is looked through once. An instruction without a handler rules a function out, and
# so does the name of a builtin that asks Python for the frame which called it, since no such frame exists here.

# %%
@functools.cache
def supported(code):
    """Whether the machine knows every instruction, and Python need not find the function's frame. Those of generators are not known."""
    return all(i.name in OPCODES and not (i.name == "LOAD_GLOBAL" and i.value in LOOKING_AT_FRAMES) for i in instructions(code))


LOOKING_AT_FRAMES = {"super", "locals", "globals", "vars", "dir", "eval", "exec"}


# %% [markdown]
# The machine has frames, and while it traces, `outside` to read through. Without that, it is a plain interpreter of
# Python on real values.

# %%
class Machine:
    def __init__(self, frames, outside=None):
        self.frames, self.outside, self.result = frames, outside, None

    def local(self, name):
        return used(self.outside, self.frames[-1].locals, name)

    def top(self, depth=1):
        return used(self.outside, self.frames[-1].stack, -depth)

    def pop(self, count):
        """The last values of the stack, the topmost last."""
        values = [self.top(depth) for depth in range(count, 0, -1)]
        del self.frames[-1].stack[len(self.frames[-1].stack) - count:]
        return values

    def path(self, thing):
        return reach(self.outside, thing) if self.outside else None


# %% [markdown]
# A value that lies in a variable or on the stack need not have been read yet. It is read, with its guard, when it is used
# for the first time:

# %%
def used(outside, place, key):
    if isinstance(value := place[key], Unread):
        place[key] = read(outside, value.path, value.thing)
    return place[key]


# %% [markdown]
# It executes one instruction at a time. An instruction has a handler, which gets what the instruction pops, and
# returns the list of what it pushes. A `Break` may come out of the middle of it. Then the frame is put back to where
# it was, and the guards that the instruction wrote are dropped. Any other exception is turned into a break, so that
# the instruction will raise it for real.

# %%
def step(m):
    frame, lines = m.frames[-1], m.outside.lines if m.outside else []
    i, before, written = instructions(frame.function.__code__)[frame.at], list(frame.stack), len(lines)
    frame.at += 1
    pops, handler = OPCODES[i.name]
    try:
        frame.stack += handler(m, i, *m.pop(pops)) or []
    except Exception as error:
        if m.outside is None:
            raise
        frame.at, frame.stack = frame.at - 1, before
        lines[written:] = [line for line in lines[written:] if not line.startswith("if")]
        raise error if isinstance(error, Break) else Break(f"{type(error).__name__}: {error}") from error


# %% [markdown]
# CPython changes its instructions with every release. The tables below are for 3.11 and 3.12; with another release, they
# stay empty, so that `supported` is false and everything runs as if it were not compiled. A handler is registered under the names of its
# instructions. How many values it pops is seen from its parameters.

# %%
OPCODES = {}                                     # name -> (how many values it pops, its handler)


def opcode(names):
    def register(handler):
        pops = len(inspect.signature(handler).parameters) - 2
        OPCODES.update({name: (pops, handler) for name in names.split() if sys.version_info < (3, 13)})
        return handler
    return register


def opcodes(table):
    for names, handler in table.items():
        opcode(names)(handler)


# %% [markdown]
# Most instructions are one line. `i.number` and `i.value` are the instruction's number and what the number stands for.
# The first table moves values between the stack and the variables.

# %%
opcodes({
    "RESUME NOP PRECALL EXTENDED_ARG KW_NAMES END_FOR": lambda m, i: None,
    "LOAD_CONST": lambda m, i: [i.value], "LOAD_ASSERTION_ERROR": lambda m, i: [AssertionError],
    "LOAD_FAST LOAD_FAST_CHECK LOAD_CLOSURE": lambda m, i: [m.local(i.value)],
    "LOAD_FAST_AND_CLEAR": lambda m, i: [m.frames[-1].locals.pop(i.value, NULL)],
    "PUSH_NULL": lambda m, i: [NULL], "POP_TOP": lambda m, i, value: None, "COPY": lambda m, i: [m.top(i.number)],
    "SWAP": lambda m, i: (lambda first, *others: [*others[-1:], *others[:-1], first])(*m.pop(i.number)),
    "STORE_FAST": lambda m, i, value: m.frames[-1].locals.update({i.value: value}) if value is not NULL else None,
    "STORE_DEREF": lambda m, i, value: setattr(own(m, m.local(i.value)), "cell_contents", value),
    "MAKE_CELL": lambda m, i: m.frames[-1].locals.update(
        {i.value: types.CellType(m.local(i.value)) if i.value in m.frames[-1].locals else types.CellType()}),
})

# %% [markdown]
# The second table computes. Operators are calls of the functions in Python's module `operator`, and what a call may do
# is decided further below, in one place.

# %%
opcodes({
    "UNARY_POSITIVE UNARY_NEGATIVE UNARY_INVERT": lambda m, i, a: call(m, getattr(operator, i.name[6:9].lower()), [a]),
    "BINARY_OP COMPARE_OP": lambda m, i, a, b: call(m, OPERATORS[i.value], [a, b]),
    "BINARY_SUBSCR": lambda m, i, a, k: call(m, operator.getitem, [a, k]), "RAISE_VARARGS RERAISE": lambda m, i: throw(*m.pop(i.number)),
    "BINARY_SLICE": lambda m, i, a, start, stop: call(m, operator.getitem, [a, slice(start, stop)]),
    "CONTAINS_OP": lambda m, i, a, b: [call(m, operator.contains, [b, a])[0] != bool(i.number)],
    "CALL_INTRINSIC_1": lambda m, i, value: [tuple(value)] if i.number == 6 else call(m, operator.pos, [value]),
    "FORMAT_VALUE": lambda m, i: call(m, functools.partial(formatted, i.number & 3), m.pop(2 if i.number & 4 else 1)),
    "GET_ITER": lambda m, i, thing: [elements(m, thing)], "UNARY_NOT": lambda m, i, a: [not truth(m, a)],
    "STORE_SUBSCR": lambda m, i, value, thing, key: operator.setitem(own(m, thing), key, value),
    "STORE_ATTR": lambda m, i, value, thing: setattr(own(m, thing), i.value, value),
    "JUMP_FORWARD JUMP_BACKWARD JUMP_BACKWARD_NO_INTERRUPT": lambda m, i: setattr(m.frames[-1], "at", i.value),
    "RETURN_VALUE": lambda m, i, value: leave(m, value), "RETURN_CONST": lambda m, i: leave(m, i.value),
})

# %% [markdown]
# The third table makes containers, and adds to those that are being made.

# %%
opcodes({
    "BUILD_TUPLE": lambda m, i: [tuple(m.pop(i.number))], "BUILD_LIST": lambda m, i: [m.pop(i.number)],
    "BUILD_SLICE": lambda m, i: [slice(*m.pop(i.number))], "BUILD_STRING": lambda m, i: ["".join(m.pop(i.number))],
    "BUILD_MAP": lambda m, i: [dict(zip(*[iter(m.pop(2 * i.number))] * 2))],
    "BUILD_CONST_KEY_MAP": lambda m, i, keys: [dict(zip(keys, m.pop(i.number)))],
    "LIST_APPEND": lambda m, i, value: own(m, m.top(i.number)).append(value), "LIST_TO_TUPLE": lambda m, i, values: [tuple(values)],
    "LIST_EXTEND": lambda m, i, values: own(m, m.top(i.number)).extend(elements(m, values)),
    "MAP_ADD": lambda m, i, key, value: own(m, m.top(i.number)).update({key: value}),
    "DICT_MERGE DICT_UPDATE": lambda m, i, values: own(m, m.top(i.number)).update(contents(m.outside, values)),
})

# %% [markdown]
# ### Reading from outside
#
# Globals, variables of enclosing functions, and attributes. What is about to be called lies on the stack in two
# places, a method and its object, or `NULL` and a function; one bit of the instruction asks for that. A name that is
# not among the globals is a builtin. Builtins are taken to be what they are, and so is everything in `torch`.

# %%
@opcode("LOAD_GLOBAL")
def load_global(m, i):
    scope = m.frames[-1].function.__globals__
    value = getattr(builtins, i.value) if i.value not in scope else scope[i.value]
    if i.value in scope and m.outside:
        value = read(m.outside, f"{m.outside.name(scope)}[{i.value!r}]", value)
    return [NULL, value] if i.number & 1 else [value]


@opcode("LOAD_ATTR LOAD_METHOD")
def load_attr(m, i, thing):
    found = attribute(m, thing, i.value)
    method = i.name == "LOAD_METHOD" or sys.version_info >= (3, 12) and i.number & 1
    return found and ([NULL, *found] if method else found)


# %% [markdown]
# What the trace itself has made has no guards, and neither has what PyTorch answers, or a fake, except for a few
# questions that it would answer otherwise than the real tensor. A property is a function, which is inlined. Anything
# else is read, from the class or from the object. Where a class decides in Python what an attribute is, by a
# `__getattr__` of its own or by a descriptor, the graph ends: the guard would ask again, and asking may have an effect.

# %%
def attribute(m, thing, name):
    """[the attribute], or nothing where the function of a property has been entered, which will push it."""
    path = m.path(thing)
    if not path or isinstance(thing, CONSTANTS) or isinstance(thing, Fake) and name not in UNKNOWN or in_torch(thing):
        return [getattr(thing, name)]
    if isinstance(found := inspect.getattr_static(type(thing), name, None), property):
        return call(m, found.fget, [thing])
    hooks = {getattr(type(thing), hook, None) for hook in ("__getattr__", "__getattribute__")} - {torch.nn.Module.__getattr__}
    if isinstance(thing, Fake) or any(map(inspect.isfunction, hooks)) or hasattr(found, "__get__") and type(found).__module__ != "builtins":
        raise Break(f"{name}, which a class looks up in its own way")
    value = getattr(thing, name)
    if getattr(value, "__self__", None) is not thing or name in getattr(thing, "__dict__", ()):
        return [read(m.outside, f"{path}.{name}", value)]
    m.outside.test(f"{name!r} not in getattr({path}, '__dict__', ())")       # a method of the class, which stays what it is
    return [value]


# %%
def in_torch(thing):
    """Whether a module or function belongs to PyTorch itself. Its layers do not count: they are read like the user's."""
    name = getattr(thing, "__name__" if isinstance(thing, types.ModuleType) else "__module__", None) or ""
    return name.partition(".")[0] in ("torch", "math", "_operator") and not name.startswith("torch.nn.modules")


# %% [markdown]
# A variable that functions share is in a *cell*. The cells of the enclosing function hang on the function object, and
# so they have a path.

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
    return [read(m.outside, f"{path}.cell_contents", cell.cell_contents) if (path := m.path(cell)) else cell.cell_contents]


# %% [markdown]
# A thing that was reached by a path must not be written to while we trace: the write would happen once, now, and not at
# each call. Every handler that writes asks first:

# %%
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
        return enter(m, function, args, kwargs)
    function, args = opened(m, function, args)
    if not allowed(m, function, [*args, *kwargs.values()]):
        raise Break(f"a call of {getattr(function, '__qualname__', function)}")
    return [known(m, function(*args, **kwargs))]


# %% [markdown]
# What comes back has to be something that the trace can go on with: a fake, a constant, a container, or a thing that was
# read. An iterator is replaced by one over a tuple, whose items are known.

# %%
def known(m, result):
    result = iter(tuple(result)) if hasattr(result, "__next__") else tuple(result) if isinstance(result, DICT_VIEWS) else result
    if not isinstance(result, (Fake, tuple, list, dict, ITERATOR, type, torch.finfo, *CONSTANTS)) and not m.path(result):
        raise Break(f"a new {type(result).__name__}")
    return result


# %% [markdown]
# To inline a function is to put its frame on top of the others. The next step of the machine executes its first
# instruction, and its `return` takes the frame away and pushes the result on the stack of the caller.

# %% tags=["exercise:tiny-inline"]
def enter(m, function, args, kwargs):
    """Begin a call of a Python function: the machine goes on with its first instruction. Returns nothing, since the result is pushed by
    the function's own return. A function that the machine does not support breaks the graph."""
    if not supported(function.__code__):
        raise Break(f"{function.__qualname__} has instructions that tiny does not know")
    m.frames.append(first_frame(function, args, kwargs, m.outside))


# %%
def leave(m, value):
    m.frames.pop()
    m.result = value
    if m.frames:
        m.frames[-1].stack.append(value)


# %% [markdown]
# Before a function is executed at once, a list or a dictionary from outside among its arguments is read. A module is
# called through its `forward`, and hooks, which would be skipped so, break the graph.

# %%
def opened(m, function, args):
    """The same with the contents of lists and dictionaries from outside, where the function only reads them."""
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    function = getattr(contents(m.outside, owner), name) if name in ("items", "keys", "values", "get", "index", "count") else function
    return function, args if function in WRITING | CLASSES else [contents(m.outside, x) for x in args]


def hooked(module):
    return module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks


def forward_of(m, module):
    if hooked(module):
        raise Break("a module with hooks")
    m.outside.test(f"not hooked({m.path(module)})")
    return attribute(m, module, "forward")[0]


# %% [markdown]
# Which functions may be executed at once? Those that we know to have no effect but their result, on arguments of
# which we know that they are fakes or constants.

# %%
def allowed(m, function, args):
    """Whether a call has no effect but its result, which depends on nothing but the arguments."""
    if function in CLASSES:                      # PyTorch has classes that answer differently for a fake
        return not isinstance(args[0], Fake) or all(c is torch.Tensor or type(c) is type for c in tree_leaves(args[1:] or [Fake]))
    if function in ARRANGING and isinstance(args[0], (Fake, ITERATOR, list, tuple, dict, str)):
        return True
    leaves = tree_leaves(args, is_leaf=lambda x: type(x) not in (list, tuple, dict))
    return all(isinstance(x, (Fake, ITERATOR, *CONSTANTS, type)) for x in leaves) and without_effect(m, function, args, leaves)


# %% [markdown]
# With such arguments it depends on whose function it is: a method of a fake, a method of a container, a function that
# stands in a table, or one of PyTorch's.

# %%
def without_effect(m, function, args, leaves):
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if isinstance(owner, Fake) or isinstance(function, types.MethodDescriptorType) and isinstance(leaves[0], Fake):
        return name not in REFUSED
    if type(owner) in (list, dict, tuple, str, torch.Size):
        return not m.path(owner)
    if function in FACTORIES or function in BUILTINS or function.__module__ in ("math", "_operator"):
        return not (function in WRITING and m.path(args[0]))
    return in_torch(function) and any(isinstance(x, Fake) for x in leaves)


# %%
ARRANGING = {operator.getitem, len, zip, enumerate, reversed, list, tuple}              # they do nothing to the elements
DICT_VIEWS, CLASSES = (type({}.items()), type({}.values())), {isinstance, callable, type}
BUILTINS = {range, dict, min, max, sum, abs, int, float, bool, round, pow, divmod, slice, any, all, sorted}
FACTORIES = {torch.arange, torch.zeros, torch.ones, torch.full, torch.empty, torch.tensor, torch.finfo, torch.Size, torch.device}
REFUSED = {"backward", "register_hook", "retain_grad", "data_ptr", "numpy", "tolist", "item", "requires_grad_", "detach_", "type"}
UNKNOWN = {"data", "grad", "grad_fn", "is_leaf", "_base", "_version", "__class__"}               # what a fake would answer otherwise
SYMBOLS = dict(zip("+ - * / // % ** @ << >> & | ^".split(),
                   "add sub mul truediv floordiv mod pow matmul lshift rshift and or xor".split()))
WRITING = {symbol + "=": getattr(operator, "i" + name) for symbol, name in SYMBOLS.items()}
OPERATORS = {symbol: getattr(operator, name, None) or getattr(operator, name + "_") for symbol, name in SYMBOLS.items()} | WRITING
OPERATORS |= dict(zip("< <= == != > >=".split(), (operator.lt, operator.le, operator.eq, operator.ne, operator.gt, operator.ge)))
WRITING = set(WRITING.values())


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


# %% [markdown]
# A function may be made while we trace. It has no path, and part 4 has to make it anew.

# %%
def new_function(code, scope, defaults, keyword_defaults, closure):
    made = types.FunctionType(code, scope, code.co_name, defaults, closure)
    made.__kwdefaults__ = keyword_defaults
    return made


@opcode("MAKE_FUNCTION")
def make_function(m, i, code):
    given = dict(zip([flag for flag in (1, 2, 4, 8) if i.number & flag], m.pop(i.number.bit_count())))
    made = new_function(code, m.frames[-1].function.__globals__, given.get(1), given.get(2), given.get(8))
    if m.outside:
        m.outside.made.append(made)
    return [made]


# %% [markdown]
# ### Loops and jumps
#
# A loop runs while we trace, so its body is recorded once for each round. The instruction `FOR_ITER` is at its head,
# with the iterator on top of the stack.

# %%
def elements(m, thing):
    """An iterator over a thing, whose rest can be written down."""
    if not m.outside or isinstance(thing, ITERATOR):
        return iter(thing)
    if not isinstance(thing := contents(m.outside, thing), (Fake, list, tuple, dict, str, range)):
        raise Break(f"a loop over a {type(thing).__name__}")
    return iter(tuple(thing))


# %% tags=["exercise:tiny-loop"]
@opcode("FOR_ITER")
def for_iter(m, i):
    """Push the next value of the iterator on top of the stack, which stays there. If it has none, pop the iterator and go on at the
    position `i.value`. While tracing, an iterator that is not an ITERATOR breaks the graph."""
    if m.outside and not isinstance(m.top(), ITERATOR):
        raise Break("a loop over an iterator from outside")
    for value in m.top():
        return [value]
    m.frames[-1].at = i.value
    m.pop(1)


# %%
@opcode("UNPACK_SEQUENCE")
def unpack_sequence(m, i, value):
    values = list(elements(m, value))
    if len(values) != i.number:
        raise ValueError(f"{len(values)} values for {i.number} variables")
    return values[::-1]


# %% [markdown]
# A condition must be known now. For one that depends on a tensor's data, `bool` of the fake raises an error, and that
# ends the graph.

# %%
def truth(m, value):
    value = contents(m.outside, value)
    if m.outside and {"__len__", "__bool__"} & {*dir(type(value))} and not isinstance(value, (Fake, *CONSTANTS, list, tuple, dict)):
        raise Break(f"whether a {type(value).__name__} is empty")
    return bool(value)


CONDITIONS = {"TRUE": truth, "FALSE": lambda m, value: not truth(m, value), "NONE": lambda m, value: value is None,
              "NOT_NONE": lambda m, value: value is not None}


@opcode(" ".join(name for name in dis.opmap if "JUMP" in name and "_IF_" in name))
def jump_if(m, i, value):
    taken = CONDITIONS[i.name.partition("_IF_")[2].removesuffix("_OR_POP")](m, value)
    if taken:
        m.frames[-1].at = i.value
    return [value] if taken and i.name.endswith("_OR_POP") else None


# %%
@opcode("IS_OP")
def is_op(m, i, a, b):
    if m.outside and m.path(a) and m.path(b):
        m.outside.test(f"({m.path(a)} is {m.path(b)}) == {a is b}")
    return [(a is b) != bool(i.number)]


def formatted(conversion, value, form=""):
    return format([lambda value: value, str, repr, ascii][conversion](value), form)


def throw(error, *cause):
    raise error


# %% [markdown]
# Without `outside`, this is an interpreter of Python. (Demonstrations of the machine are left out on a release whose
# instructions it does not know.)

# %%
if __name__ == "__main__" and OPCODES:
    def collatz(n, steps=0):
        while n != 1:
            n = n // 2 if n % 2 == 0 else 3 * n + 1
            steps += 1
        return [steps, n]

    machine = Machine([first_frame(collatz, [27], {})])
    while machine.frames:
        step(machine)
    print(machine.result, collatz(27))

# %% [markdown]
# ### A trace, instruction by instruction
#
# With `outside`, the same machine traces. The demonstration below does what `capture` in part 4 will do. It makes the
# frame of a call, in which both parameters are still `Unread`, and lets the machine go on until no frame is left. Below
# each line of the program stand its instructions. Beside an instruction is the stack that it leaves behind, the
# topmost value last, and below it are the lines that it has written into the check.

# %%
if __name__ == "__main__" and OPCODES:
    def scaled(x, settings):
        if settings["double"]:
            x = x * 2
        return x.relu()

# %% tags=["fold"]
if __name__ == "__main__" and OPCODES:
    def traced(m):
        """Run the machine to the end or to a break, and print what it does."""
        line, places = None, [i for i in dis.get_instructions(m.frames[-1].function.__code__) if i.opname != "CACHE"]
        while m.frames:
            frame, begin = m.frames[-1], (len(m.outside.lines), len(m.outside.recorder.nodes))
            i, place = instructions(frame.function.__code__)[frame.at], places[frame.at].positions.lineno
            if place != line:
                line = place
                print(linecache.getline(frame.function.__code__.co_filename, line).strip())
            try:
                step(m)
            except Break as reason:
                return print(f"    {i.name:27} breaks: {reason}")
            written = m.outside.lines[begin[0]:] + [f"graph: {n} = {n.target}" for n in m.outside.recorder.nodes[begin[1]:] if n.target]
            stack = ", ".join("NULL" if x is NULL else brief(x) for x in frame.stack)
            print(f"    {i.name + ' ' + str(i.value or ''):28}[{stack}]", *written, sep="\n" + " " * 12)

    def begun(f, **values):
        """A machine that traces a call of f, at its first instruction."""
        variables = {name: Unread(f"frames[0].locals[{name!r}]", x) for name, x in values.items()}
        return Machine([Frame(f, variables, [])], Outside(Recorder()))

# %%
if __name__ == "__main__" and OPCODES:
    m = begun(scaled, x=torch.ones(2, 3), settings={"double": True})
    with m.outside.recorder:
        traced(m)
    print("result:", brief(m.result))

# %% [markdown]
# Follow `settings`. Until the first `LOAD_FAST` it is `Unread`, and nothing is known about it. Loading it is a read, which
# asks for its class. The subscript is a `call` of `operator.getitem`. The dictionary is one from outside, so it is looked
# into, which brings the guards of its keys and of its element, and what is left on the stack is a plain `True`. With it
# the jump knows where to go, and has nothing to guard any more: what decided is guarded already, by its value. The other branch was
# not looked at, and is no part of the recording. If the entry is False one day, `repr(v1) == 'True'` fails, and that call is traced anew.
#
# Follow `x`. Its read writes a guard, and puts a fake on the stack. The multiplication writes nothing into the check.
# It is executed on the fake, and the recorder below notes the node. `STORE_FAST` puts the new fake into the variable `x`, so the
# second `LOAD_FAST x` finds what the trace itself has made. That has no path, so there is nothing to read and nothing to guard.
#
# Before `relu` is called, the stack holds a `NULL` beside it. CPython's instructions for calls expect two values below the
# arguments, a method and its object. Where there is only one, a function or a method that knows its object, the `NULL`
# takes the other place. (The numbers of the variables are those of the paths in `seen`, so `*v0`, the contents of the
# dictionary, uses up a number.)

# %% [markdown]
# ### In the real compiler
#
# Each line names a piece of this part, its counterpart, and what the counterpart adds.
#
# - `step`: [](ref:minicompile.ch03_capture.interpreter.run_instructions). Exceptions and their handlers, generators,
#   `with`.
# - `load_attr`: [](ref:minicompile.ch03_capture.opcodes.load_attr). Descriptors, `__getattr__`, modules, classes.
# - `for_iter`: [](ref:minicompile.ch03_capture.opcodes.for_iter). Iterators of every kind.
# - `call`: [](ref:minicompile.ch03_capture.tracer.call). Tables of what is known about thousands of functions.
# - `own`: [](ref:minicompile.ch03_capture.effects.touch). What is different about outside objects at the end is written
#   to them after the graph.

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
def spell(outside, thing):
    """Text that makes, at the next call, what the trace has made."""
    text = reach(outside, thing)
    if text is None:
        outside.variables[id(thing)] = text = spell_new(outside, thing)
        outside.made.append(thing)                               # so that no other thing gets its id
    return text


# %% [markdown]
# Each thing is spelled once, into a variable if it is a container, so that two places which hold one list will hold one
# list again.

# %%
def spell_new(outside, thing):
    if isinstance(thing, Fake):
        outside.outputs.append(thing)
        return f"out[{len(outside.outputs) - 1}]"
    if type(thing) not in SPELLINGS and isinstance(thing, tuple):            # torch.Size, or what a function of PyTorch returns
        return f"{outside.name(type(thing))}({spell(outside, tuple(thing))})"
    if type(thing) not in SPELLINGS:
        return repr(thing) if type(thing) in (type(None), bool, int, str) else outside.name(thing)
    text = SPELLINGS[type(thing)](lambda x: spell(outside, x), thing)
    outside.lines.append(f"    t{len(outside.lines)} = {text}")
    return outside.lines[-1].split()[0]


# %%
PARTS = ("__code__", "__globals__", "__defaults__", "__kwdefaults__", "__closure__")
SPELLINGS = {
    list: lambda spell, x: f"[{', '.join(map(spell, x))}]", tuple: lambda spell, x: f"({''.join(spell(e) + ', ' for e in x)})",
    dict: lambda spell, x: "{" + ", ".join(f"{spell(k)}: {spell(v)}" for k, v in x.items()) + "}",
    slice: lambda spell, x: f"slice({spell(x.start)}, {spell(x.stop)}, {spell(x.step)})",
    ITERATOR: lambda spell, x: f"iter({spell(rest(x))})",
    Frame: lambda spell, x: f"Frame({spell(x.function)}, {spell(x.locals)}, {spell(x.stack)}, {x.at})",
    types.CellType: lambda spell, x: f"CellType({spell(x.cell_contents)})", Unread: lambda spell, x: x.path,
    types.FunctionType: lambda spell, f: f"new_function({', '.join(spell(getattr(f, x)) for x in PARTS)})",
    types.MethodType: lambda spell, x: f"MethodType({spell(x.__func__)}, {spell(x.__self__)})",
    types.BuiltinMethodType: lambda spell, x: f"getattr({spell(x.__self__)}, {x.__name__!r})",
}


# %% [markdown]
# ### A break by hand
#
# This function makes a list, and then calls `print`, which breaks the graph. First the trace, as in part 3. Then the
# state that it has stopped at is spelled, variable by variable, with the lines that this writes into the function.

# %%
if __name__ == "__main__" and OPCODES:
    def paired(x, settings):
        pair = [x * settings["scale"], settings]
        print("half way", pair)
        return pair

    m = begun(paired, x=torch.ones(2, 3), settings={"scale": 2.5})
    with m.outside.recorder:
        traced(m)
    state = m.frames[-1]
    for name, value in [*state.locals.items(), ("the stack", state.stack), ("all frames", m.frames)]:
        begin = len(m.outside.lines)
        text = spell(m.outside, value)
        print(f"{name}: {text}", *m.outside.lines[begin:], sep="\n        ")
    print("outputs of the graph:", *map(brief, m.outside.outputs))

# %% [markdown]
# The tensor `x` and the dictionary were read, so each of them is spelled as its variable. The list is new: a line makes it, of two
# elements. The first is a fake that the graph has computed. It becomes the graph's first output, `out[0]`. The second is the
# dictionary of the caller itself, and not a copy of it. So whoever changes it later, through the list or without, changes the same
# object as in eager.
#
# On the stack lie, for the call that broke, the `NULL`, the function `print` and its arguments. The last one is the same list as
# in `pair`, and is spelled as the variable that has been made for it; a second list would be wrong. `print` itself is an
# object that text cannot spell, and gets a name. The number at the end of `Frame` is the position of the instruction that
# broke. Python executes that one on the frame, and everything after it is the beginning of another trace, in which
# `pair` is read from outside like a parameter.
#
# The lines of the trace stand before those of the state, in one function. That is why `step` drops only the guards of an instruction that
# broke and keeps its reads: `seen` knows them as done, so a line of the state may use their variables.

# %% [markdown]
# Now guards and spelling can be joined. `capture` runs the machine as far as it goes, and returns one Python
# function. It checks the guards and returns None, or a function that runs the graph and makes the state.

# %%
def capture(frames, compile_graph, log):
    """A function of frames like these: None where a guard fails, else a function that returns (frames, result)."""
    outside = Outside(recorder := Recorder())
    m = Machine([unread(f"frames[{n}]", frame, outside) for n, frame in enumerate(frames)], outside)
    with recorder:
        try:
            while m.frames:
                step(m)
        except Break as reason:
            log.append(str(reason))
    outside.lines += ["def body():", f"    out = graph({', '.join(v for v, _ in outside.inputs.values())})"]
    state = spell(outside, m.frames), spell(outside, None if m.frames else m.result)
    outside.lines += [f"    return {', '.join(state)}", "return body"]
    graph = compile_graph(recorder, outside.outputs)
    return outside.function("check(frames)", {**globals(), **vars(types), "graph": graph})


# %% [markdown]
# The frames that it begins with are the caller's, with everything in them `Unread`. What is compared of a frame from the start
# is only which variables are set, how high its stack is, and of which function it is.

# %%
def unread(path, frame, outside):
    outside.test(f"list({path}.locals) == {list(frame.locals)} and len({path}.stack) == {len(frame.stack)}")
    variables = {name: Unread(f"{path}.locals[{name!r}]", x) for name, x in frame.locals.items()}
    return Frame(read(outside, f"{path}.function", frame.function), variables,
                 [Unread(f"{path}.stack[{n}]", x) for n, x in enumerate(frame.stack)], frame.at)


# %% [markdown]
# At run time there is a loop. It looks for an entry whose guards hold, and makes one if there is none. If the entry
# comes back with frames instead of a result, the next instruction is the one that broke. The machine executes that
# one instruction on real values, and the loop goes on with whatever state this has led to. Where eight entries were
# not enough, there is none, and the machine does the rest without recording.

# %% tags=["exercise:tiny-break"]
def execute(compiled, m):
    """Run a machine to its end, and return its result. `find` gives compiled code for a state of its frames; a call of that code gives
    the frames and the result that it arrives at. If frames are left, their next instruction could not be compiled."""
    while m.frames:
        if body := find(compiled, m.frames):
            m.frames, m.result = body()
        while m.frames:
            step(m)
            if body:
                break
    return m.result


# %%
LIMIT = 8


def find(compiled, frames):
    """The code for this state; None where there are too many versions of it."""
    known = compiled.entries.setdefault((*modes(), *[(f.function.__code__, f.at) for f in frames]), [])
    for n in range(LIMIT):
        if n == len(known):
            known.append(capture(frames, compiled.compile_graph, compiled.breaks))
        try:
            if body := known[n](frames):
                return body
        except Exception:                                        # a guard that cannot be evaluated has failed
            pass


def modes():
    """What of PyTorch's state a recording depends on."""
    autocast = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), torch.get_default_device(), *autocast


# %% [markdown]
# `compile` wraps a function or a module. What is called for the graph is the *backend*; the simplest one runs the
# recorded operations, one after the other.

# %%
class Compiled:
    def __init__(self, f, compile_graph):
        self.f, self.compile_graph = f, compile_graph
        self.entries, self.breaks = {}, []       # state of the machine -> functions made by `capture`; reasons

    def __call__(self, *args, **kwargs):
        f = self.f.forward if isinstance(self.f, torch.nn.Module) and not hooked(self.f) else self.f
        f, args = (f.__func__, (f.__self__, *args)) if isinstance(f, types.MethodType) else (f, args)
        if not isinstance(f, types.FunctionType) or not supported(f.__code__):
            return f(*args, **kwargs)
        return execute(self, Machine([first_frame(f, args, kwargs)]))


def compile(f, backend=None):
    """f, compiled when it is called."""
    return Compiled(f, backend or loops)


# %%
def eager(recorder, outputs):
    graph = finish(recorder, outputs)
    return lambda *inputs: interpret(graph, inputs)


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
# - `spell`: [](ref:minicompile.ch04_breaks.breaks.capture_until). Only what is alive is handed over.
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


# %% tags=["exercise:tiny-joint"]
def joint_graph(recorder, outputs):
    """The Joint of forward and backward. outputs: fakes of forward. Its graph has one more input, a tangent, for each output that requires
    a gradient, and returns, after the outputs, the gradients of all inputs that require one, None where an input has no influence. If
    no output requires a gradient, there are neither tangents nor gradients."""
    differentiable = [x for x in outputs if x.requires_grad]
    wanted = [n.fake for n in recorder.inputs if n.fake.requires_grad]
    if not differentiable:
        return Joint(finish(recorder, outputs), 0, len(outputs))
    with recorder, torch.autograd.set_multithreading_enabled(False):
        tangents = [recorder.input(x, requires_grad=False) for x in differentiable]
        gradients = torch.autograd.grad(differentiable, wanted, tangents, allow_unused=True)
    return Joint(finish(recorder, [*outputs, *gradients]), len(tangents), len(outputs))


# %% [markdown]
# Below are both passes of a small layer. Two of the nodes, `detach`, are autograd's: it keeps the result of tanh under a name
# of its own. They are views, of which no kernel will know anything.

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
    aten.neg: "-{0}", aten.exp: "exp({0})", aten.log: "log({0})", aten.sqrt: "sqrt({0})", aten.rsqrt: "rsqrt({0})", aten.tanh: "tanh({0})",
    aten.erf: "erf({0})", aten.sin: "sin({0})", aten.cos: "cos({0})", aten.abs: "abs({0})", aten.reciprocal: "1 / {0}",
    aten.add: "{0} + {1}", aten.sub: "{0} - {1}", aten.mul: "{0} * {1}", aten.div: "{0} / {1}", aten.maximum: "maximum({0}, {1})",
    aten.where: "where({0}, {1}, {2})", aten.masked_fill: "where({1}, {2}, {0})", aten.threshold_backward: "where({1} <= {2}, 0, {0})",
    aten.gt: "{0} > {1}", aten.ge: "{0} >= {1}", aten.lt: "{0} < {1}", aten.le: "{0} <= {1}", aten.eq: "{0} == {1}", aten.ne: "{0} != {1}",
    aten.logical_not: "{0} == 0", aten._to_copy: "{0}", aten.bitwise_and: "({0} != 0) & ({1} != 0)",
    aten.bitwise_or: "({0} != 0) | ({1} != 0)", aten.clone: "{0}", aten.rsub: "{1} - {0}", aten.relu: "maximum({0}, 0.0)",
    aten.sigmoid: "1 / (1 + exp(-{0}))", aten.tanh_backward: "{0} * (1 - {1} * {1})", aten.sigmoid_backward: "{0} * (1 - {1}) * {1}",
}
VIEWS = {aten.view, aten._unsafe_view, aten.expand, aten.permute, aten.t, aten.transpose, aten.unsqueeze, aten.squeeze,
         aten.select, aten.slice, aten.alias, aten.detach}
REDUCTIONS = {aten.sum: "sum", aten.amax: "maximum"}


def packet(node):
    """The operator without its overload: aten.add for aten.add.Tensor."""
    return getattr(node.target, "overloadpacket", None)


# %% [markdown]
# A recorder that knows the rules applies them before it records, except to what is empty. A rule may give up with
# `NotImplemented`.

# %%
RULES = {}                                       # operator -> a function that computes the same with others


def rule(*operators):
    def register(f):
        RULES.update(dict.fromkeys(operators, f))
        return f
    return register


# %%
class Decomposer(Recorder):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        rule = RULES.get(op.overloadpacket)
        with self:
            result = rule(*args, **kwargs or {}) if rule and 0 not in getattr(args[0], "shape", ()) else NotImplemented
        return super().__torch_dispatch__(op, types, args, kwargs) if result is NotImplemented else result


def decompose(graph):
    with torch.no_grad(), Decomposer() as recorder:
        outputs = interpret(graph, [recorder.input(n.fake) for n in graph.inputs])
    return finish(recorder, outputs)


# %% [markdown]
# The rules that a GPT needs. Each can be checked against the operator that it replaces, which is what the tests do.

# %%
@rule(aten.pow)
def power(x, n):
    products = {0.5: torch.sqrt, -0.5: torch.rsqrt, 1: torch.clone, 2: lambda x: x * x, 3: lambda x: x * x * x, -1: torch.reciprocal}
    return products[n](x) if n in products and x.is_floating_point() else NotImplemented


@rule(aten.gelu)
def gelu(x, approximate="none"):
    return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5))) if approximate == "none" else NotImplemented


@rule(aten.gelu_backward)
def gelu_backward(g, x, approximate="none"):
    slope = 0.5 * (1 + torch.erf(x * math.sqrt(0.5))) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return g * slope if approximate == "none" else NotImplemented


# %% [markdown]
# Softmax divides exponentials by their sum. An exponential of a large number would overflow. So the largest element
# of the row is subtracted first, which changes numerator and denominator by the same factor.

# %% tags=["exercise:tiny-rule"]
@rule(aten._softmax)
def softmax(x, dim, half_to_float):
    """The softmax of x over one dimension, in ordinary operations of PyTorch."""
    e = torch.exp(x - x.amax(dim, keepdim=True))
    return e / e.sum(dim, keepdim=True)


# %%
@rule(aten._softmax_backward_data)
def softmax_backward(g, y, dim, dtype):
    return y * (g - (g * y).sum(dim, keepdim=True))


@rule(aten.mean)
def mean(x, dims=None, keepdim=False, dtype=None):
    dims = list(range(x.dim())) if dims is None else dims
    return x.sum(dims, keepdim) / math.prod(x.shape[d] for d in dims)


# %% [markdown]
# A layer norm has three results, since its backward pass uses the average and the deviation again.

# %%
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

# %% tags=["exercise:tiny-cut"]
def minimum_cut(capacity, source, sink):
    """The nodes on the source's side of a minimum cut: those that can still be reached from it once the largest flow runs.
    capacity: {node: {node: room}}; changed to what is left of it."""
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


# %%
def to_save(graph, forward):
    """The nodes of forward that backward gets, besides inputs of the graph."""
    capacity, inputs, early, endless = defaultdict(dict), set(graph.inputs), set(forward), 1 << 60
    calls = {n for n in forward if packet(n) not in POINTWISE and packet(n) not in VIEWS}
    in_memory = calls.union(*map(operands, calls))
    for n in forward:
        many = isinstance(n.fake, (tuple, list))                    # results of one call: each is saved on its own
        capacity[n, "in"][n, "out"] = 1 if n in inputs else endless if many else size(n) * (1 if n in in_memory else 2) + 1
        if n in in_memory and packet(n) not in VIEWS:
            capacity["source"][n, "in"] = endless
    for u in graph.nodes:
        for n in operands(u):
            capacity[n, "out"][(u, "in") if u in early else "sink"] = endless
    side = minimum_cut(capacity, "source", "sink")
    return [n for n in forward if (n, "in") in side and (n, "out") not in side]


# %% [markdown]
# In the code the two nodes of a value are `(n, "in")` and `(n, "out")`. The pipe between them is as wide as what it costs to
# save the value. A pipe from `"source"` says that it must not be computed again, and one to `"sink"` that backward reads it.
# `in_memory` are values that forward writes anyway, because a call makes them or reads them. The last line is the cut:
# water arrives at the first node of the value and cannot go on to the second.
#
# With the set known, both halves are parts of the joint graph, each given by its inputs and outputs. What the tangents
# have an influence on belongs to backward; everything else can be computed before.

# %% tags=["exercise:tiny-halves"]
def partition(joint):
    """Two graphs. forward: inputs -> outputs and what is saved. backward: what is saved, and the tangents -> gradients. `to_save` chooses
    what is saved, among the nodes that do not depend on a tangent."""
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
# GELU as GPT-2's code spells it has eight operations, and eager keeps four tensors for the backward pass: the
# product and three results of the formula. The cut keeps the product. The rest is computed from it once more.

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
# - `partition`: [](ref:minicompile.ch05_autograd.partition.partition). Random numbers, checkpoints.

# %% [markdown] tags=["page"]
# ## Part 8. Loops
#
# *What does an operator do to memory?* ([Chapter 7](chapter:07).)
#
# Until here an operator was a name. To join two of them in one kernel, the compiler must see inside: which element do
# they read when they write an element? All our buffers are contiguous, so an element has one number, its position in
# memory. A view moves no data; it only changes the order in which positions are visited. PyTorch describes that by
# *strides*: how many positions lie between neighbours, for each dimension. A transposed matrix of 6 rows and 4
# columns has the strides 1 and 6, and a matrix that was expanded from a row has the strides 0 and 1.
#
# So we need no rules for views. We apply them to a meta tensor, one after the other, and read its strides.
#
# A kernel runs over rows `r` and columns `c`. Where does it read a tensor with given strides? The last dimensions
# are counted by `c`, the first ones by `r`. If one variable counts several dimensions, each of them is a *digit* of
# it, as hours and minutes are digits of a time: `r // 60` and `r % 60`. Neighbouring dimensions whose strides fit
# together are one digit, so a contiguous tensor has one for each variable. And where the border between rows and
# columns runs through a dimension, the dimension is split into two digits, if it can be.

# %%
def digits(seen, rows, columns):
    """[(variable, how many of its values are one step, number of steps, stride)], the last first; None if they do not exist."""
    found, name, inner, left = [], "c", 1, columns
    seen = seen.flatten() if seen.is_contiguous() else seen
    for size, stride in reversed(list(zip(seen.shape, seen.stride()))):
        while size > 1:
            if left == 1:
                name, inner, left = "r", 1, rows
            if (count := math.gcd(size, left)) == 1:
                return None
            if found and found[-1][0] == name and stride == found[-1][2] * found[-1][3]:
                found[-1] = name, found[-1][1], found[-1][2] * count, found[-1][3]
            else:
                found.append((name, inner, count, stride))
            size, stride, inner, left = size // count, stride * count, inner * count, left // count
    return found


# %% [markdown]
# The position is the sum of the digits, each times its stride. The last digit of a variable needs no division, the
# first one no remainder, and a digit with stride 0 has no influence. A tensor may have one element for each row
# instead of one for each row and column; then its position depends on `r` alone.

# %% tags=["exercise:tiny-view"]
def position(seen, rows):
    """Text of the position in memory that iteration (r, c) reads, None if it has no `digits`. seen: a view of a contiguous tensor, on the
    device meta. Its number of elements is `rows` times the number of columns. The same position has the same text."""
    columns = seen.numel() // rows
    if (found := digits(seen, rows, columns)) is None:
        return None
    terms = [str(seen.storage_offset())] if seen.storage_offset() else []
    for name, inner, count, stride in found:
        if stride:
            text = name if inner == 1 else f"({name} // {inner})"
            text = text if inner * count == {"r": rows, "c": columns}[name] else f"({text} % {count})"
            terms.append(text if stride == 1 else f"{stride} * {text}")
    return " + ".join(terms) or "0"


# %%
if __name__ == "__main__":
    for view, shape in ((lambda x: x, (6, 4)), (lambda x: x.t(), (4, 6)), (lambda x: x.expand(6, 4), (4,)), (lambda x: x[:, 1:5], (6, 9)),
                        (lambda x: x.transpose(0, 1), (2, 3, 4)), (lambda x: x, (6, 1))):
        seen = view(torch.empty(shape, device="meta"))
        print(f"{tuple(seen.shape)} with strides {seen.stride()}: {position(seen, 6)}")

# %% [markdown]
# An operator becomes a `Loop`: for each position, an expression of what its operands hold at their positions. A
# reduction is a loop over rows, whose result has one element for each row. An operand is a constant or a `Read`: a
# buffer, named by the node that fills it, and how it is seen.

# %%
Read = namedtuple("Read", "node seen")           # seen: a meta tensor with the shape, strides and offset of what is read


@dataclass(eq=False)
class Loop:
    """For i < size: node[i] = text, of operands at i. For a reduction over rows: node[i // row], from all i of the row."""
    node: Node
    text: str
    operands: list
    size: int
    row: int = 0                                 # length of what a reduction reduces, else 0


def contiguous(node):
    """How the buffer of a node lies in memory."""
    return torch.empty(node.fake.shape, device="meta")


# %% [markdown]
# To lower a graph is to turn its nodes into loops. Views vanish: whoever reads a view reads the buffer below it. A view
# that no strides describe, such as a transposed matrix seen as a single row, stays a call. PyTorch says there that it
# would have to copy.

# %%
def lower(graph):
    """[Loop, or the Node of a call] in order, and {node of a view: Read}."""
    steps, views = [], {}

    def through(x, view):
        """x, a node or a constant, seen through a view."""
        base = views.get(x) or Read(x, contiguous(x)) if isinstance(x, Node) else None
        return Read(base.node, view(base.seen)) if base else x

    for node in [n for n in graph.nodes if n not in graph.inputs]:
        if packet(node) in VIEWS and node.fake.dtype is node.args[0].fake.dtype:
            try:
                views[node] = through(node.args[0], lambda t: node.target(t, *node.args[1:], **node.kwargs))
            except RuntimeError:
                steps.append(node)
        else:
            steps.append(loop_of(node, through) or node)
    return steps, views


# %% [markdown]
# Everything else is a loop if it is in our tables, and a call if not. An element-wise loop reads its operands as if they had
# the shape of the result. A reduction reads all that it reduces.

# %%
def loop_of(node, through):
    kind, shape = packet(node), getattr(node.fake, "shape", None)
    if kind in POINTWISE and fits(node):
        return Loop(node, POINTWISE[kind], [through(x, lambda t: t.expand(shape)) for x in node.args], shape.numel())
    if row := reduced_row(node):
        return Loop(node, REDUCTIONS[kind], [through(node.args[0], lambda t: t)], node.args[0].fake.numel(), row)


# %%
FLOAT, DTYPES, COPIES, LONGEST_ROW = torch.float32, (torch.float32, torch.bool), (aten._to_copy, aten.clone), 1 << 14


def fits(node):
    """Whether a loop can do it: numbers of 32 bits and truth values, on one device, and no special requests. Arithmetic needs a number."""
    tensors, kind = [n.fake for n in (node, *operands(node))], packet(node)
    return (all(t.dtype in DTYPES and t.device == node.fake.device and t.numel() for t in tensors)
            and (FLOAT in [t.dtype for t in tensors[1:]] or kind in COPIES or re.search("where|[!=]=", POINTWISE[kind]))
            and (not node.kwargs or kind in COPIES) and all(isinstance(x, (Node, int, float)) and x == x for x in node.args[:3]))


def reduced_row(node):
    """The number of elements in a row, for a reduction of the last dimensions; else 0."""
    if packet(node) not in REDUCTIONS or node.kwargs or node.fake.dtype is not FLOAT or not node.args[0].fake.dim():
        return 0
    shape = node.args[0].fake.shape
    dims = sorted(d % len(shape) for d in (node.args[1:2] or [None])[0] or range(len(shape)))
    row = math.prod(shape[d] for d in dims)
    return row if dims == list(range(len(shape) - len(dims), len(shape))) and 1 < row <= LONGEST_ROW and shape.numel() else 0


# %%
if __name__ == "__main__":
    for loop in lower(decompose(record(lambda x: torch.softmax(x, -1).t() * 2, torch.randn(6, 4))))[0]:
        rows = loop.size // (loop.row or loop.node.fake.shape[-1])
        reads = ", ".join(f"{x.node}[{position(x.seen, rows)}]" if isinstance(x, Read) else str(x) for x in loop.operands)
        print(f"{rows} rows of {loop.size // rows}: {loop.node}: {loop.text:12} of {reads}" + "    reduced" * (loop.row > 0))

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
# A kernel has rows and columns, its *nest*. A pointwise loop runs over all positions `columns * r + c`. A reduction does
# too, and then there is one result for each row, at position `r`, complete when the row is. What comes after it in the
# same row may use it. A pointwise loop may also have one element for each row; most often they come from a reduction.
#
# `nest` finds rows and columns for some loops. If there is a reduction among them, it says how long a row is. If there is
# none, a row is the last dimension of the largest loop. Reductions of different rows have no nest, and neither have loops
# with other numbers of elements than one for each position or one for each row.

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


# %%
def nest(loops):
    """(rows, columns) over which all these loops can run; None if there are none."""
    largest = max(loops, key=lambda loop: loop.size)
    last = largest.node.fake.shape[-1] if largest.node.fake.dim() else 1
    nests = {(loop.size // loop.row, loop.row) for loop in loops if loop.row} or {(largest.size // last, last)}
    rows, columns = min(nests)
    return (rows, columns) if len(nests) == 1 and {loop.size for loop in loops} <= {rows * columns, rows} else None


def written(loop, rows):
    return position(contiguous(loop.node), rows)


# %% tags=["exercise:tiny-legal"]
def refusal(first, second):
    """A sentence that says why two kernels, which would run in this order, cannot be one; None if they can. They can if all their loops
    run over one nest, every position in it can be told, and what one loop makes and another reads is read where it has just been made."""
    loops = first.loops + second.loops
    if not (shape := nest(loops)):
        return "they run over different rows and columns"
    made = {loop.node: written(loop, shape[0]) for loop in loops}
    for loop in loops:
        for x in [x for x in loop.operands if isinstance(x, Read)]:
            at = position(x.seen, shape[0])
            if at is None or at != made.get(x.node, at):
                return f"{loop.node} reads {x.node} at {at or 'no position'}, which is made at {made.get(x.node)}"
    return None


# %% [markdown]
# Two steps that become one have one place in the order. What needs the first has to come after it, what the second
# needs, before. If one and the same step is in both groups, there is no such place.

# %% tags=["exercise:tiny-order"]
def merged(steps, a, b):
    """A list of the steps in an order in which they can run, with the kernels a and b as one; None if there is no such order, since
    something between needs the one and is needed by the other. `steps` stays as it is."""
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


# %%
def fuse(steps, refused=None):
    """refused: a list that gets (first, second, reason) of the last round."""
    refused = [] if refused is None else refused
    while True:
        gone = set()
        refused.clear()
        for a, b in neighbours(steps):
            if not {a, b} & gone:
                if not (reason := refusal(a, b)) and (after := merged(steps, a, b)):
                    steps, gone = after, gone | {a, b}
                else:
                    refused.append((a, b, reason or "a step between needs the one and is needed by the other"))
        if not gone:
            return steps


# %% [markdown]
# Softmax is one kernel. What adds its own transpose is two, and the refusal says why. (`x.exp()` stands in the program
# twice, and tiny records both.)

# %%
def fused(graph, refused=None):
    """The steps of a graph, and what its views read."""
    lowered, views = lower(graph)

    steps = [kernel([x]) if isinstance(x, Loop) else Step(buffers(views, operands(x)), {x}, call=x) for x in lowered]
    return fuse(steps, refused), views


def buffers(views, nodes):
    """Where the values of nodes are: a view is in the buffer that it reads."""
    return {views[n].node if n in views else n for n in nodes if n}


if __name__ == "__main__":
    for f in (lambda x: torch.softmax(x, -1), lambda x: x.exp() + x.exp().t()):
        steps, _ = fused(decompose(record(f, torch.randn(4, 4))), refused := [])
        print([[loop.node for loop in step.loops] for step in steps], *[reason for _, _, reason in refused])

# %% [markdown]
# ### In the real compiler
#
# Each line names a piece of this part, its counterpart, and what the counterpart adds.
#
# - `refusal`: [](ref:minicompile.ch08_fusion.legality.hazard). A nest is turned around where that helps, and a buffer may
#   be read at two places.
# - `gain`: [](ref:minicompile.ch08_fusion.fuse.score). What is in the cache counts less.
# - `merged`: [](ref:minicompile.ch08_fusion.groups.makes_cycle). The same question, asked of a graph.
# - `fuse`: [](ref:minicompile.ch08_fusion.fuse.fuse_groups). And afterwards a plan of who uses whose memory.

# %% [markdown] tags=["page"]
# ## Part 10. Kernels as text
#
# *How does a fused kernel become a program?* ([Chapter 9](chapter:09) for Triton, [chapter 10](chapter:10) for C++.)
#
# The loops of a kernel are in order. Each is one line: `t3 = t2 * p0[...]`, with registers `t` for what was made in
# the kernel, and loads from buffers `p` for the rest. What both languages need to know of a kernel is in a `Draft`.

# %%
# text: the same for equal kernels. buffers: nodes, first those that it fills. blocks: how many programs of a Triton kernel to start.
Kernel = namedtuple("Kernel", "text buffers blocks")


class Draft:
    """A kernel that is being written. stored: nodes that somebody else reads."""

    def __init__(self, step, stored):
        self.loops, self.lines, self.loaded = step.loops, [], {}
        self.rows, self.columns = nest(step.loops)
        self.stored = [loop.node for loop in step.loops if loop.node in stored]
        reads = {x.node: None for loop in step.loops for x in loop.operands if isinstance(x, Read) and x.node in step.reads}
        self.buffers = self.stored + list(reads)
        self.pointers = {n: f"p{k}" for k, n in enumerate(self.buffers)}
        self.registers = {loop.node: f"t{k}" for k, loop in enumerate(step.loops)}


# %% [markdown]
# ### Triton
#
# A program in Triton works on a block of rows and columns at once. A row that is reduced fits into the block as a
# whole, so that a reduction is one operation on it. Only pointwise kernels also cut columns into blocks. The sizes of
# a block have to be powers of two, so blocks reach over the edge, and a load or a store there has a *mask*, which says
# which elements exist.

# %%
def triton_kernel(step, stored):
    draft = Draft(step, stored)
    width = next_power(draft.columns) if any(loop.row for loop in draft.loops) else min(next_power(draft.columns), 1024)
    height, across = max(1, min(next_power(draft.rows), 2048 // width)), -(-draft.columns // width)
    draft.lines = [f"def NAME({', '.join(draft.pointers.values())}):", "pid = tl.program_id(0)",
                   f"r = pid // {across} * {height} + tl.arange(0, {height})[:, None]",
                   f"c = pid % {across} * {width} + tl.arange(0, {width})[None, :]",
                   f"row, column = r < {draft.rows}, c < {draft.columns}"]
    for loop in draft.loops:
        triton_loop(draft, loop)
    return Kernel("@triton.jit\n" + "\n    ".join(draft.lines) + "\n", draft.buffers, across * -(-draft.rows // height))


def next_power(n):
    return 1 << (n - 1).bit_length()


# %% [markdown]
# An operand is a constant, a register, or a load. A load is a line of its own, and is written once for each address.
# It needs the mask of the rows only if its address depends on `r`, and that of the columns only if it depends on `c`.

# %%
def triton_value(draft, x):
    """Text of an operand."""
    if not isinstance(x, Read) or x.node in draft.registers:
        return draft.registers[x.node] if isinstance(x, Read) else repr(float(x))
    address = f"{draft.pointers[x.node]} + {position(x.seen, draft.rows)}"
    if address not in draft.loaded:
        mask = " & ".join(name for name in ("row", "column") if re.search(rf"\b{name[0]}\b", address))
        draft.loaded[address] = f"x{len(draft.loaded)}"
        draft.lines.append(f"{draft.loaded[address]} = tl.load({address}{', ' * bool(mask)}{mask})")
    return draft.loaded[address]


# %% [markdown]
# A loop becomes its formula, with Triton's names of the functions. In a reduction, what lies over the edge has to
# count for nothing: it is replaced by the neutral element, 0 for a sum and minus infinity for a maximum. The result
# has a column of its own for each row (`keep_dims`), so that what follows in the same row can use it like any other
# register.

# %% tags=["exercise:tiny-triton"]
def triton_loop(draft, loop):
    """Append the lines of Triton for one loop to `draft.lines`: the value goes into the register `draft.registers[loop.node]`, a block of
    rows `r` and columns `c` (one column for a reduction over rows). A node in `draft.stored` is stored as well, where row and column
    exist."""
    register, values = draft.registers[loop.node], [triton_value(draft, x) for x in loop.operands]
    text = re.sub(r"\b(exp|log|sqrt|rsqrt|erf|sin|cos|abs|where)\b", r"tl.\1", loop.text).format(*values)
    if loop.row:
        text = f"tl.reduce(tl.where(row & column, {values[0]}, {NEUTRAL[loop.text]}), 1, {loop.text}, keep_dims=True)"
    elif packet(loop.node) is aten._to_copy:
        text = f"({text}).to(tl.{'int1' if loop.node.fake.dtype is torch.bool else 'float32'})"
    draft.lines.append(f"{register} = {text}")
    if loop.node in draft.stored:
        draft.lines.append(f"tl.store({draft.pointers[loop.node]} + {written(loop, draft.rows)} + 0 * (r + c), {register}, row & column)")


# %%
NEUTRAL = {"sum": "0.0", "maximum": "-inf"}


# %% [markdown]
# ### C++
#
# C++ has no blocks, and a row is a loop over columns. A reduction is complete only after that loop, so what uses it
# needs another one: the loops of a kernel are in *passes*. What one pass makes and a later pass needs goes through a
# small array `k`, which stays in the cache. Rows are divided among the threads, columns among the lanes of a vector
# register.

# %%
def passes(loops):
    """{loop: its pass}, {node: the pass from which on its value is there}."""
    runs, there = {}, {}
    for loop in loops:
        runs[loop] = max([there[x.node] for x in loop.operands if isinstance(x, Read) and x.node in there], default=0)
        there[loop.node] = runs[loop] + (loop.row > 0)
    return runs, there


# %% [markdown]
# With the passes known, the kernel is a loop over the rows around its passes.

# %%
def cpp_kernel(step, stored):
    draft = Draft(step, stored)
    draft.runs, draft.there = passes(draft.loops)
    draft.kept = {x.node for loop in draft.loops for x in loop.operands if isinstance(x, Read) and x.node in draft.there
                  and x.node.fake.numel() == draft.rows * draft.columns and draft.there[x.node] < draft.runs[loop]}
    arguments = ", ".join(f"{cpp_type(n)}* __restrict {p}" for n, p in draft.pointers.items())
    lines = [f'extern "C" void NAME({arguments}) {{', f"#pragma omp parallel for if({draft.rows * draft.columns} > 16384)",
             f"for (long r = 0; r < {draft.rows}; r++) {{",
             *[f"{cpp_type(n)} k{t}[{draft.columns}];" for n, t in draft.registers.items() if n in draft.kept]]
    for number in range(max(draft.there.values()) + 1):
        lines += cpp_pass(draft, [loop for loop in draft.loops if draft.runs[loop] == number])
    return Kernel("\n".join(lines) + "\n}\n}\n", draft.buffers, 0)


def cpp_type(node):
    return "bool" if node.fake.dtype is torch.bool else "float"


# %% [markdown]
# In a pass, loops with one value for each row come first. Then the loop over the columns runs, with everything that
# has a value for each element in its body. A variable for each reduction is declared before it, and stored after it.

# %%
def cpp_pass(draft, loops):
    narrow, full = [[loop for loop in loops if (loop.size == draft.rows * draft.columns) == all_of_it] for all_of_it in (False, True)]
    folds = {loop: draft.registers[loop.node] for loop in full if loop.row}
    lines = [cpp_line(draft, loop) for loop in narrow]
    lines += [f"float {t} = {NEUTRAL[loop.text]};" for loop, t in folds.items()]
    if full:
        lines += ["#pragma omp simd" + "".join(f" reduction({loop.text}: {t})" for loop, t in folds.items()),
                  f"for (long c = 0; c < {draft.columns}; c++) {{", *[cpp_line(draft, loop) for loop in full], "}"]
    return lines + [f"{draft.pointers[loop.node]}[r] = {t};" for loop, t in folds.items() if loop.node in draft.stored]


# %%
def cpp_line(draft, loop):
    t, values = draft.registers[loop.node], [cpp_value(draft, x, loop) for x in loop.operands]
    if loop.row:
        return f"{t} = {loop.text}({t}, {values[0]});"
    return (f"{cpp_type(loop.node)} {t} = {loop.text.format(*values)};" + f" k{t}[c] = {t};" * (loop.node in draft.kept)
            + f" {draft.pointers.get(loop.node)}[{written(loop, draft.rows)}] = {t};".replace("//", "/") * (loop.node in draft.stored))


def cpp_value(draft, x, loop):
    """Text of an operand of a loop."""
    if not isinstance(x, Read):
        return repr(float(x))
    if x.node not in draft.registers:
        return f"{draft.pointers[x.node]}[{position(x.seen, draft.rows)}]".replace("//", "/")
    early = x.node in draft.kept and draft.there[x.node] < draft.runs[loop]
    return f"k{draft.registers[x.node]}[c]" if early else draft.registers[x.node]


# %% [markdown]
# Both languages need the functions of the table by the same names.

# %%
TRITON = """import triton, triton.language as tl
inf = tl.constexpr(float("inf"))
@triton.jit
def tanh(x): return 2 * tl.sigmoid(2 * x) - 1
@triton.jit
def sum(a, b): return a + b
@triton.jit
def maximum(a, b): return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
"""
CPP = """#define __FAST_MATH__                      // vector versions of expf and its like
#include <math.h>
#define inline static inline __attribute__((always_inline))
#define inf INFINITY
#define FLOAT(name, f) inline float name(float x) { return f(x); }
FLOAT(log, logf) FLOAT(sqrt, sqrtf) FLOAT(tanh, tanhf) FLOAT(erf, erff) FLOAT(sin, sinf) FLOAT(cos, cosf) FLOAT(abs, fabsf)
inline float fast_exp(float x) { float y = expf(x < -87 ? -87 : x); return x < -87 ? 0 : y; }
#define exp fast_exp
inline float rsqrt(float x) { return 1 / sqrtf(x); }  inline float where(int c, float a, float b) { return c != 0 ? a : b; }
inline float sum(float a, float b) { return a + b; }  inline float maximum(float a, float b) { return a > b || a != a ? a : b; }
#pragma omp declare reduction(sum: float: omp_out = sum(omp_out, omp_in)) initializer(omp_priv = 0)
#pragma omp declare reduction(maximum: float: omp_out = maximum(omp_out, omp_in)) initializer(omp_priv = -inf)
"""
# %% [markdown]
# ### Loading
#
# A kernel is compiled once for each text. g++ gets all new kernels in one file, without the headers of C++ (`-nostdinc++`),
# which take more time than the kernels; Triton compiles a kernel when it is first launched.

# %%
FLAGS = "-O3 -march=native -fopenmp -fsingle-precision-constant -fno-math-errno -fno-trapping-math -fno-signed-zeros -shared -fPIC"
LOADED = {}                                      # text of a kernel -> what launches it


def load_triton(kernels):
    for kernel in kernels:
        source, file, names = TRITON + kernel.text.replace("NAME", "kernel"), f"<kernel {len(LOADED)}>", {"__name__": "tiny"}
        linecache.cache[file] = len(source), None, source.splitlines(True), file              # where Triton looks for it
        exec(builtins.compile(source, file, "exec"), names)
        LOADED[kernel.text] = lambda *tensors, launcher=names["kernel"][(kernel.blocks,)]: launcher(*tensors)


# %% [markdown]
# The files of g++ can go as soon as the library is loaded: what a process has mapped stays there until it ends.

# %%
def load_cpp(kernels):
    texts = [kernel.text for kernel in kernels]
    with tempfile.TemporaryDirectory(prefix="tiny") as folder:
        file = pathlib.Path(folder, "k.cpp")
        file.write_text(CPP + "\n".join(text.replace("NAME", f"k{n}") for n, text in enumerate(texts)))
        subprocess.run(["g++", "-nostdinc++", *FLAGS.split(), file, "-o", file.with_suffix(".so")], check=True)
        library = ctypes.CDLL(str(file.with_suffix(".so")))
    for n, text in enumerate(texts):
        LOADED[text] = lambda *tensors, f=library[f"k{n}"]: f(*[ctypes.c_void_p(t.data_ptr()) for t in tensors])


# %%
def load(kernels, target):
    """Compile the kernels whose text is new."""
    if new := {kernel.text: kernel for kernel in kernels if kernel.text not in LOADED}:
        (load_triton if target == "cuda" else load_cpp)(new.values())


# %%
if __name__ == "__main__":
    (whole,), _ = fused(decompose(record(lambda x: torch.softmax(x, -1), torch.randn(64, 48))))
    print(triton_kernel(whole, {whole.loops[-1].node}).text)
    print(cpp_kernel(whole, {whole.loops[-1].node}).text)

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
# A Python function, one line for each kernel and each call, in order. Its variables have the names of the nodes. It
# makes a tensor just before it is written, and lets go of it after its last use. Views which a call or the caller
# wants to see are made by PyTorch, without moving data.

# %%
def program(graph, target):
    """The function that runs a graph: kernels for its loops, calls of PyTorch for the rest."""
    host, (steps, views) = Text(), fused(graph)
    host.made = set(graph.inputs)                # nodes whose variables are there
    wanted = buffers(views, graph.outputs).union(*[s.reads for s in steps])
    kernels = {s: (triton_kernel if target == "cuda" else cpp_kernel)(s, wanted) for s in steps if s.loops}
    load(kernels.values(), target)
    for s in steps:
        launch(host, kernels[s], s) if s.loops else call_on_host(host, s.call)
    result = value_on_host(host, graph.outputs)
    host.lines = [*freed(host.lines, result), f"return {result}"]
    return host.function(f"run({', '.join(map(str, graph.inputs))})", {"torch": torch})


# %%
def launch(host, kernel, s):
    for n in kernel.buffers:
        if n in s.writes:
            host.made.add(n)
            host.lines.append(f"{n} = torch.empty({tuple(n.fake.shape)}, dtype={n.fake.dtype}, device={str(n.fake.device)!r})")
    given = [f"{n}" if n in s.writes else f"{value_on_host(host, n)}.contiguous()" for n in kernel.buffers]
    host.lines.append(f"{host.name(LOADED[kernel.text])}({', '.join(given)})")


# %% [markdown]
# A call of PyTorch is a line, too. An argument is a constant, a variable, or a list of such. A view is made where it is
# first wanted, by a call as well.

# %%
ON_HOST = {aten.view.default: torch.reshape, aten._unsafe_view.default: torch.reshape}          # our buffers may lie otherwise than eager's


def value_on_host(host, x):
    if isinstance(x, (list, tuple)):
        return f"[{', '.join(value_on_host(host, e) for e in x)}]"
    if not isinstance(x, Node):
        return repr(x) if isinstance(x, (int, type(None))) else host.name(x)
    if x not in host.made:
        call_on_host(host, x)
    return x.name


def call_on_host(host, node):
    given = [*[value_on_host(host, x) for x in node.args], *[f"{k}={value_on_host(host, x)}" for k, x in node.kwargs.items()]]
    host.made.add(node)
    host.lines.append(f"{node} = {host.name(ON_HOST.get(node.target, node.target))}({', '.join(given)})")


# %%
def freed(lines, result):
    """The lines, and a `del` after the last line that names a variable."""
    last = {name: n for n, line in enumerate(lines) for name in re.findall(r"\b\w+_\d+\b", line)}
    for n, line in enumerate(lines):
        dead = [name for name, at in last.items() if at == n and not re.search(rf"\b{name}\b", result)]
        yield line + (f"; del {', '.join(dead)}" if dead else "")


# %% [markdown]
# What is left is to make the two programs one operation of PyTorch's own autograd, so that `loss.backward()` finds
# the second one.

# %% tags=["exercise:tiny-train"]
def in_autograd(forward, backward, differentiable, wanted):
    """One operation of autograd from two programs. forward: inputs -> a list of outputs and what is saved. backward: what is saved, and the
    gradients of those outputs that are `differentiable` (a truth value for each output) -> a list of the gradients of those inputs
    that are `wanted` (a truth value for each input). Returns a function of the inputs that gives the tuple of the outputs."""
    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            results = forward(*inputs)
            outputs, saved = results[:len(differentiable)], results[len(differentiable):]
            ctx.save_for_backward(*saved)
            ctx.mark_non_differentiable(*[x for x, d in zip(outputs, differentiable) if not d])
            return tuple(outputs)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, *tangents):
            gradients = iter(backward(*ctx.saved_tensors, *[t for t, d in zip(tangents, differentiable) if d]))
            return tuple(next(gradients) if w else None for w in wanted)

    return Differentiable.apply


# %% [markdown]
# All stages after capture, in order. Some formulas of the backward pass write into a tensor or look at data, and
# cannot be recorded. Then the graph runs operator by operator, and autograd differentiates that.

# %%
def loops(recorder, outputs, target=None):
    """The whole compiler after capture: a function of the graph's inputs."""
    inputs, uncompiled = list(recorder.inputs), eager(recorder, outputs)
    try:
        joint = joint_graph(recorder, outputs)
    except (Break, NotImplementedError):
        return uncompiled
    joint = joint._replace(graph=decompose(joint.graph))
    devices = {n.fake.device.type for n in joint.graph.nodes if isinstance(n.fake, torch.Tensor)}
    target = target or ("cuda" if "cuda" in devices else "cpu")
    if not joint.tangents:
        return program(joint.graph, target)
    forward, backward = [program(graph, target) for graph in partition(joint)]
    return in_autograd(forward, backward, [x.requires_grad for x in outputs], [n.fake.requires_grad for n in inputs])


# %%
if __name__ == "__main__":
    def perceptron(x, up, down):
        return spelled_gelu(x @ up) @ down

    print(program(decompose(record(perceptron, torch.randn(8, 4), torch.randn(4, 16), torch.randn(16, 4))), "cpu").text)

# %% [markdown]
# ### In the real compiler
#
# Each line names a piece of this part, its counterpart, and what the counterpart adds.
#
# - `program`: [](ref:minicompile.ch11_runtime.host.compile_schedule). Memory that is planned, launches without Python's
#   detours, CUDA graphs.
# - `in_autograd`: [](ref:minicompile.ch05_autograd.region.build_function). Aliases of inputs, gradients of
#   gradients, tensors that changed in between.

# %% [markdown] tags=["page"]
# ## Part 12. Training a GPT
#
# *Does all of it work together?*
#
# A small GPT, written as one would write it. A block is attention and two linear layers, each behind a layer norm and
# beside a sum. Its GELU is spelled out as in the code of GPT-2, so eager runs eight kernels for it, and keeps what most
# of them made.

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


# %% [markdown]
# The model looks up a row for each letter and one for each place in the text, adds them, goes through the blocks, and gives
# every possible next letter a score.

# %%
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


# %% [markdown]
# The text that it learns to continue is this file. A batch is some pieces of it, and the same pieces one letter further
# on, which is what is wanted.

# %%
def batches(data, count, batch, length):
    for _ in range(count):
        places = torch.randint(len(data) - length - 1, (batch, 1)).to(data.device) + torch.arange(length + 1, device=data.device)
        yield data[places[:, :-1]], data[places[:, 1:]]


# %% [markdown]
# `wrap` is what is tried: the identity for eager, or `compile`. Only the
# model is wrapped. The optimizer runs eagerly, which is one of the restrictions of the first page.

# %%
def train(wrap, steps, device, batch=12, **sizes):
    """The losses, and the seconds that a step takes (median, without the first five)."""
    torch.manual_seed(0)
    model = GPT(**sizes).to(device)
    step, optimizer = wrap(model), torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.tensor(list(pathlib.Path(__file__).read_bytes()), device=device)
    losses, seconds = [], []
    for text, wanted in batches(data, steps, batch, model.places.num_embeddings):
        started = time.perf_counter()
        loss = step(text, wanted)
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
