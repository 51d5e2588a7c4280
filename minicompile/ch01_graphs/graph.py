# %% [markdown]
# # Graphs that remember where they came from
#
# Between capture and code generation a program is a `torch.fx.Graph`: a list of calls in single-assignment
# form. fx is only the container. What makes it a compiler's graph are three entries that every node carries
# in `node.meta`:
#
# - `val`: the fake result, so any pass can ask for a shape, dtype, stride or device without running anything;
# - `location`: the line of the user's program that asked for this operation;
# - `origins`: the names of the nodes of the stage before that it was made from.
#
# The last two are *provenance*. They survive each pass, down to a comment in the generated kernel, and they
# are what lets an error in stage seven name a line in the user's file.
#
# A function, the graph that capture (chapter 3) makes of it, and the graph of ATen operators that is recorded from that one, backward
# included (chapter 5). Each node of the second names the node of the first that it comes from, and has its line:
#
#     def slope(x, w):
#         y = torch.tanh(x @ w)
#         return y.sum()
#
#     x: f32[4, 8] = input  # y = torch.tanh(x @ w)
#     w: f32[8, 8] = input
#     matmul: f32[4, 8] = matmul(x, w)
#     tanh: f32[4, 8] = tanh(matmul)
#     sum_1: f32[] = tanh.sum()  # return y.sum()
#     return (sum_1,)
#
#     mm_default             of matmul  y = torch.tanh(x @ w)
#     tanh_default           of tanh    y = torch.tanh(x @ w)
#     sum_default            of sum_1   return y.sum()
#     ones_like_default      of sum_1   return y.sum()
#     expand_default         of sum_1   return y.sum()
#     tanh_backward_default  of tanh    y = torch.tanh(x @ w)
#     t_default              of matmul  y = torch.tanh(x @ w)
#     mm_default_1           of matmul  y = torch.tanh(x @ w)

# %%
from __future__ import annotations

import functools
import linecache
import re
import sys
import types
import weakref
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Sequence

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import _Namespace

from .composites import with_symbols
from .floats import Float
from .shapes import at_run_time, is_symbolic
from .symbolic import Expr


@dataclass(frozen=True)
class Location:
    """A line of the user's program. Two are equal if they are one line.

    `offset`, where it is known, in bytes: of the instruction in the code that was captured (behind a graph break that of the
    resume function). `others`: further lines that asked for the same."""

    filename: str
    lineno: int
    function: str
    offset: int | None = field(default=None, compare=False)
    others: tuple[Location, ...] = field(default=(), compare=False, repr=False)

    def __str__(self):
        return f"{self.filename}:{self.lineno} in {self.function}"

    @property
    def lines(self) -> tuple[Location, ...]:
        """This line and the others, in the order of the file."""
        if not self.others:
            return (self,)
        return tuple(sorted((replace(self, others=()), *self.others), key=lambda l: (l.filename, l.lineno)))

    @property
    def source(self) -> str:
        """The text of the line, or an empty string when the file cannot be read."""
        return linecache.getline(self.filename, self.lineno).strip()


def together(locations: Sequence[Location | None]) -> Location | None:
    """One location for what several lines asked for: the first, which knows the others."""
    known = [l for l in locations if l is not None]
    if not known:
        return None
    others = tuple(dict.fromkeys(line for l in known for line in l.lines if line != known[0]))
    return replace(known[0], others=others) if len(others) > len(known[0].others) else known[0]


# %% [markdown]
# ## The container
#
# fx was made for graphs that people write passes for, a few at a time. Here each stage builds graphs of thousands of nodes and
# most are never run, so three things are changed. The Python code of a module is generated when somebody asks for it, and its
# text is forgotten with it. Nodes get their arguments after they are made, and names continue a series; each of them saves work
# that PyTorch does for every node. What they mean is fx's.

# %%
class _Module(_LazyGraphModule):
    """PyTorch remembers the text of every GraphModule for ever; this one's goes with its code."""

    def _real_recompile(self):
        result = super()._real_recompile()
        code = type(self).forward.__code__
        weakref.finalize(code, _forget_text, code.co_filename).atexit = False
        return result


def _forget_text(filename: str) -> None:
    linecache.cache.pop(filename, None)
    getattr(getattr(fx.graph_module, "_loader", None), "eval_cache", {}).pop(filename, None)


class Names(_Namespace):
    """The names of a graph's nodes. Most continue a series, `mul_17` after `mul_16`, and need not be taken apart to see so."""

    def create_name(self, candidate: str, obj) -> str:
        last = self._base_count.get(candidate) if obj is None else None
        if last is None or (name := f"{candidate}_{last + 1}") in self._used_names:
            return super().create_name(candidate, obj)
        self._base_count[candidate] = last + 1
        self._used_names.add(name)
        return name


class Graph(fx.Graph):
    """A graph whose nodes get their arguments once they are there. PyTorch 2.13 walks through the arguments of a node that it makes,
    to warn of symbolic sizes among them, and this takes longer than all else. Nor do arguments change where `find_nodes` finds a node,
    for which PyTorch takes it out and puts it in again; and each operator gives many nodes their names."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._graph_namespace = Names()

    def create_node(self, op, target, args=None, kwargs=None, name=None, type_expr=None) -> fx.Node:
        name = stem(target.__name__) if name is None and op == "call_function" else name
        node = super().create_node(op, target, None, None, name, type_expr)
        if args:
            fx.Node.args.fset(node, args)
        if kwargs:
            fx.Node.kwargs.fset(node, kwargs)
        return node


@functools.lru_cache(1000)
def stem(name: str) -> str:
    """What PyTorch makes of the name of a function for the names of its nodes."""
    return re.sub("[^0-9a-zA-Z_]+", "_", re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower())


def graph_module(root, graph: fx.Graph) -> fx.GraphModule:
    """A GraphModule that generates its Python code when somebody asks for it: stages build many, run few."""
    return _Module(root, graph)


# %% [markdown]
# A pass that makes a node from another one calls `copy_provenance`. Beside the provenance it hands on the notes of earlier
# stages, `MARKS`.

# %%
def copy_provenance(node: fx.Node, source: fx.Node) -> fx.Node:
    """Mark `node` (of a new graph) as made from `source` (of the graph before)."""
    node.meta["location"] = source.meta.get("location")
    node.meta["origins"] = (source.name,)
    node.meta.update({mark: source.meta[mark] for mark in MARKS if mark in source.meta})
    return node


# What one stage says of a node to a later one: the checkpoint that it belongs to, the backward pass of the program, that the
# program itself calls it, so that what the operator refuses has to be refused, and which gradients lead to it.
MARKS = "recompute", "backward", "asked", "tangents"

# %% [markdown]
# ## An executable meaning
#
# A graph can be run: node by node, in order, each value dropped after its last use. Every later stage is
# checked against this. The `on_node` hook lets a caller replace the meaning of single nodes; tracing into the
# next, lower-level graph is this same loop run under a recording mode.
#
# Numbers that are symbolic stand in a node's arguments as expressions (`Expr` for sizes, `Float`). Each
# symbol has a placeholder of its own, so running the graph starts by learning the symbols' values, be they
# numbers or, when tracing again, SymInts and SymFloats.

# %% tags=["exercise:last-uses"]
def last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values that nothing after it reads."""
    seen: set[fx.Node] = set()
    dead: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        for used in node.all_input_nodes:
            if used not in seen:
                seen.add(used)
                dead.setdefault(node, []).append(used)
    return dead

# %% [markdown]
# The arguments of a node are nodes, constants, and containers of both. `map_args` replaces the leaves. `call_node`
# evaluates one node whose arguments are values already: a function, a method of its first argument, or a tensor that
# the graph holds. `interpret` is the loop. It keeps the values in `env`, the numbers that symbolic sizes have in this
# run in `sizes`, and it drops a value when `last_uses` says that nothing will read it. The first rung of the ladder, and a call that no
# compiled graph fits, run the graph's own code instead (`eager_callable`), with `out=` where the program has it (`with_out`).

# %%
def map_args(fn: Callable[[Any], Any], args):
    """Apply `fn` to every leaf of a node's arguments (nodes, sizes, constants). Keeps tuples, lists, dicts
    and slices, which pytree would not enter."""
    if isinstance(args, (tuple, list)):
        return type(args)([map_args(fn, a) if isinstance(a, CONTAINERS) else fn(a) for a in args])
    if isinstance(args, dict):
        return {k: map_args(fn, v) for k, v in args.items()}
    if isinstance(args, slice):
        return slice(map_args(fn, args.start), map_args(fn, args.stop), map_args(fn, args.step))
    return fn(args)


CONTAINERS = (tuple, list, dict, slice)


def eager_callable(gm: fx.GraphModule) -> Callable:
    """Backend `eager`: the graph's own Python code."""
    gm = with_out(with_own_names(gm, held=True))
    gm.real_recompile()
    forward = gm.forward
    names = forward.__globals__
    names.update({name: f.func for name, f in names.items() if type(f) is Held})         # to call it through a partial takes longer
    return forward


# %% [markdown]
# The code calls functions by their names, and a few functions of C++ have that of a Python function around them: a graph of `torch.cdist`
# has a call of `torch._VF.cdist`, which says that its name is `torch.cdist`. A `partial` of it, which may have any name, tells its own. One
# of a function in whose place the program has put another has a name that is no module's, so the code holds it. The program may do that
# at any time, to a function that itself has got hold of before (`from torch import relu`). So where the graph's own code is run it holds
# all of them.

# %%
FUNCTIONS = types.BuiltinFunctionType, types.FunctionType


class Held(functools.partial):
    """Of a function that the code of a graph is to have as a global of its own."""


def is_wrapped(node: fx.Node) -> bool:
    """Is it a call of a function whose name is that of another?"""
    f = node.target
    return type(f) in FUNCTIONS and getattr(sys.modules.get(f.__module__), f.__name__, f) is not f


def is_read_by_name(node: fx.Node) -> bool:
    """Does the code of the graph look for the function that it calls?"""
    f = node.target
    return type(f) in FUNCTIONS and (f.__module__ or "").startswith("torch") or is_wrapped(node)


def with_own_names(gm: fx.GraphModule, held: bool = False) -> fx.GraphModule:
    """The graph with a function that tells its own name in place of each that tells another's. held: that has none, but is held by the
    code, in place of each that the code would look for."""
    chosen = is_read_by_name if held else is_wrapped
    if not any(map(chosen, gm.graph.nodes)):
        return gm
    graph, env = fx.Graph(), {}
    for node in gm.graph.nodes:
        env[node] = copied = graph.node_copy(node, env.__getitem__)
        if chosen(node):
            copied.target = Held(node.target)
            copied.target.__name__ = name = node.target.__name__
            copied.target.__module__ = "torch._VF" if not held and getattr(torch._VF, name, None) is node.target else "held"
    return graph_module(gm, graph)


def with_out(gm: fx.GraphModule) -> fx.GraphModule:
    """`torch.add(x, y, out=z)`, captured as `z.copy_(torch.add(x, y))`, as it was: where `z` and `x` overlap, PyTorch refuses it."""
    if not any("given_out" in n.meta for n in gm.graph.nodes):
        return gm
    graph, env = fx.Graph(), {}
    for node in gm.graph.nodes:
        env[node] = copied = graph.node_copy(node, env.__getitem__)
        if node.target == "copy_" and "given_out" in getattr(node.args[-1], "meta", ()) and len(node.args[-1].users) == 1:
            written, result = copied.args
            result.update_kwarg("out", written)
            graph.erase_node(copied)
            env[node] = written
    return graph_module(gm, graph)


def call_node(gm: fx.GraphModule, node: fx.Node, args, kwargs):
    """Evaluate one node on concrete arguments."""
    if node.op == "call_function":
        return with_symbols(node.target, *args, **kwargs)
    if node.op == "call_method":
        return with_symbols(getattr(args[0], node.target), *args[1:], **kwargs)
    if node.op == "get_attr":
        value = gm
        for name in node.target.split("."):
            value = getattr(value, name)
        return value
    raise AssertionError(f"cannot evaluate a {node.op} node")


def interpret(gm: fx.GraphModule, inputs: Sequence[Any],
              on_node: Callable[[fx.Node, tuple, dict], Any] | None = None):
    """Run `gm` on `inputs` (one per placeholder). `on_node(node, args, kwargs)` computes each call instead of
    PyTorch. Returns the graph's output structure."""
    on_node = on_node or (lambda node, args, kwargs: call_node(gm, node, args, kwargs))
    env: dict[fx.Node, Any] = {}
    sizes: dict[str, Any] = {}
    dead = last_uses(gm.graph)
    remaining = iter(inputs)

    def resolve(a):
        if isinstance(a, fx.Node):
            return env[a]
        return at_run_time(a, sizes) if isinstance(a, (Expr, Float)) else a

    for node in gm.graph.nodes:
        if node.op == "placeholder":
            env[node] = value = next(remaining)
            if is_symbolic(node.meta.get("val")):
                sizes[str(node.meta["val"])] = value
            continue
        args, kwargs = map_args(resolve, (node.args, node.kwargs))
        if node.op == "output":
            return args[0]
        env[node] = on_node(node, args, kwargs)
        for value in dead.get(node, ()):
            del env[value]

# %% [markdown]
# ## Printing
#
# A stage that cannot be read cannot be debugged. `print_graph` writes one line a node: name, type, call, and
# the user's line.
#
# The text is close to Python, so that one can paste a line into an interpreter. A node that came from the
# same user's line as the node above it does not repeat the line.

# %%
def dtype_text(dtype: torch.dtype) -> str:
    """`f32`, `bf16`, `i64`, `u8`; `b8` for truth values."""
    return "b8" if dtype is torch.bool else str(dtype).removeprefix("torch.").replace("float", "f").replace("uint", "u").replace("int", "i")


def type_text(value) -> str:
    """`f32[8, 64]` for a tensor, the number for anything else."""
    if isinstance(value, torch.Tensor):
        return f"{dtype_text(value.dtype)}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(type_text, value)) + ")"
    return str(value)


def _call_text(node: fx.Node) -> str:
    args = [repr(a) for a in node.args] + [f"{k}={v}" for k, v in node.kwargs.items()]
    if node.op == "call_method":
        return f"{args[0]}.{node.target}({', '.join(args[1:])})"
    if isinstance(node.target, torch._ops.OpOverload):
        return f"{node.target}({', '.join(args)})"
    return f"{getattr(node.target, '__name__', node.target)}({', '.join(args)})"


def print_graph(gm: fx.GraphModule) -> str:
    """One line per node: `name: type = call(...)  # user line`; the line where it is another one than above."""
    lines, above = [], None
    for node in gm.graph.nodes:
        if node.op == "output":
            lines.append(f"return {_call_text(node)[len('output('):-1]}")
            continue
        kind = type_text(node.meta.get("val")) if "val" in node.meta else "?"
        where = node.meta.get("location")
        text = str(where.source or where) if where else ""
        comment, above = f"  # {text}" if text and text != above else "", text
        call = "input" if node.op == "placeholder" else _call_text(node)
        lines.append(f"{node.name}: {kind} = {call}{comment}")
    return "\n".join(lines)


# %% [markdown]
# What a set of nodes depends on, and what depends on it, is asked in several chapters, of
# nodes of our graphs and of autograd's, which hang on the tensors that they made.

# %%
def closure(nodes, following) -> set:
    """The nodes, and all that can be reached from them by `following(node)`."""
    found, pending = set(), list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend(following(node))
    return found


def history_of(outputs: Sequence) -> set:
    """The nodes of the autograd graph from which `outputs` come."""
    return closure(filter(None, (t.grad_fn for t in outputs)),
                   lambda node: filter(None, (before for before, _ in node.next_functions)))


def is_kept_error(node) -> bool:
    """Autograd keeps the error of `@once_differentiable` as a node, which leads to no leaf."""
    return node.name() == "torch::autograd::Error"


def raise_kept_errors(outputs: Sequence) -> None:
    """Raise what `backward()` would."""
    for node in history_of(outputs):
        if is_kept_error(node):
            node(*[None] * len(node._input_metadata))


def known_history(fake) -> set:
    """The history of a tensor; of a view that autograd has made invalid, which raises when it is asked, none."""
    try:
        return history_of([fake])
    except RuntimeError:
        return set()
