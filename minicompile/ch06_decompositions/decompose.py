# %% [markdown]
# # Running the table
#
# There is no rewriting of patterns here. The graph is *executed* on fake tensors, node by node, under a
# recorder that writes down the ATen calls it sees; a call that has a decomposition is not written down, the
# decomposition is run instead, and its calls are seen in turn. What is left when the run ends is the new
# graph. Shapes, dtypes and strides of every new node come for free, and so does the recursion: a layer norm
# that calls `mean` never asks how `mean` is done.

# %%
from __future__ import annotations

import functools
import itertools
import operator

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from ..ch01_graphs.graph import call_node
from ..ch01_graphs.layouts import inverse, is_dense, memory_order, same_layout
from ..ch01_graphs.trace import Recorder, run_recorded
from ..ch05_autograd.cleanup import clean
from .primitives import PRIMITIVES, is_primitive
from .table import HALF, TABLE

aten = torch.ops.aten


def expand(func, args, kwargs):
    """The result of the decomposition of one ATen call, or NotImplemented if it has none for these arguments.

    Operators that PyTorch itself defines as compositions (`reshape`, `to`) come apart by its own definition.
    They show up here when a decomposition calls them: below autograd nothing else opens them.
    """
    rule = TABLE.get(func)
    if rule is not None:
        return rule(*args, **kwargs)
    if func not in PRIMITIVES and _is_composite(func):
        return func.decompose(*args, **kwargs)
    return NotImplemented


@functools.cache
def _is_composite(func) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


# %% [markdown]
# ## The oracle
#
# The same few lines on *real* tensors are a backend: a mode under which a program runs on primitives only.
# It needs no graph, no fakes and no capture, so it tests the table by itself: run an operator with and
# without, compare.

# %%
class Decomposed(TorchDispatchMode):
    """Eager execution in which each ATen operator that has a decomposition runs as that. `used` collects
    them; `leaves` collects the operators that ran as they are."""

    def __init__(self):
        super().__init__()
        self.used: set = set()
        self.leaves: set = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:
            out = expand(func, args, kwargs)
        if out is NotImplemented or any(out is x for x in args):    # autograd wants a view to be a new object
            self.leaves.add(func)
            return func(*args, **kwargs)
        self.used.add(func)
        return out


# %% [markdown]
# ## The driver
#
# Two promises of the operator must survive: dtype and shape (checked against the fake of the original node;
# a decomposition that disagrees is not used), and the order of dims in memory, because a later `view` or a
# library call may depend on it. An outcome with other strides gets a `clone` in the right order, which is
# pointwise and fuses away.
#
# Decompositions repeat themselves: each asks for its own 0, its own float32 copy of the same bfloat16 tensor.
# The cleanup of chapter 5 makes equal nodes one, and drops what nothing reads.
#
# Three functions make it. `decompose` interprets the old graph under the recorder, node by node.
# `as_promised` compares what came out with the fake of the node, result by result, and `_ordered` repairs
# strides. If a result cannot be repaired, everything is erased that this node has caused (`erase_after`), and
# the operator is recorded as it is, with the rules switched off (`literal`). Notes that other stages have
# left on a node, such as that it should be recomputed, are handed on to all nodes that were made from it.

# %%
class Decomposer(Recorder):
    """A recorder that records what decompositions are made of. While `literal`, calls are recorded as
    they are."""

    literal = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self.literal:
            mark = self.mark()
            with self:
                out = expand(func, args, kwargs)
            if out is not NotImplemented:       # autograd wants a view to be a new object
                return self._alias(out) if any(out is x for x in args) else out
            self.erase_after(mark)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def mark(self) -> fx.Node | None:
        return next(iter(reversed(self.graph.nodes)), None)

    def since(self, mark: fx.Node | None) -> list[fx.Node]:
        """The nodes recorded after `mark`, newest first."""
        return list(itertools.takewhile(lambda node: node is not mark, reversed(self.graph.nodes)))

    def erase_after(self, mark: fx.Node | None):
        """Drop what a decomposition recorded before it declined."""
        for node in self.since(mark):
            self.graph.erase_node(node)


def as_promised(node: fx.Node, out):
    """`out` with the dtypes, shapes and strides that the fakes of `node` have, or NotImplemented if it cannot
    have them. Of several results those that nothing reads do not matter; and saved statistics, which follow
    the first result, are cast: in which float dtype a kernel returns them differs by device."""
    wanted = node.meta["val"]
    if not isinstance(wanted, (list, tuple)):
        return _fitted(out, wanted)
    if not isinstance(out, (list, tuple)) or len(out) != len(wanted):
        return NotImplemented
    read = {user.args[1] if user.target is operator.getitem else None for user in node.users}
    results = []
    for i, (o, w) in enumerate(zip(out, wanted)):
        if i > 0 and all(isinstance(t, torch.Tensor) and t.is_floating_point() for t in (o, w)):
            o = o.to(w.dtype)
        results.append(_fitted(o, w) if i in read or None in read else o)
    return NotImplemented if any(r is NotImplemented for r in results) else results


def _fitted(out, wanted):
    if isinstance(wanted, (list, tuple)):
        parts = [_fitted(o, w) for o, w in zip(out, wanted, strict=True)]
        return NotImplemented if any(p is NotImplemented for p in parts) else parts
    if not isinstance(wanted, torch.Tensor):
        return out
    if not isinstance(out, torch.Tensor) or out.dtype != wanted.dtype or out.shape != wanted.shape:
        return NotImplemented
    return _ordered(out, wanted)


def _ordered(out, wanted):
    """`out` with the strides of `wanted`, by a copy if they differ. Only dense layouts can be asked for."""
    if same_layout(out, wanted) or not is_dense(wanted):
        return out
    order = memory_order(wanted.shape, wanted.stride())
    copy = out.permute(order).clone(memory_format=torch.contiguous_format)
    return copy.permute(inverse(order))


def decompose(gm: fx.GraphModule) -> fx.GraphModule:
    """The functional ATen graph `gm` over primitives, and operators that nothing decomposes (see
    `fallbacks`).

    Every node keeps `location` and names the node it came from in `origins`. The input graph is unchanged.
    """
    recorder = Decomposer()
    inputs = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            inputs.append(node.meta["val"])
            recorder.placeholder(node.name, node.meta["val"]).meta.update(node.meta)

    def call(node, args, kwargs):
        mark = recorder.mark()
        out = call_node(gm, node, args, kwargs)
        if node.target in TABLE:
            out = as_promised(node, out)
            if out is NotImplemented:
                recorder.erase_after(mark)
                recorder.literal = True
                out = call_node(gm, node, args, kwargs)
                recorder.literal = False
        notes = {k: v for k, v in node.meta.items() if k not in ("val", "location", "origins")}
        for recorded in recorder.since(mark) if notes else ():
            recorded.meta.update(notes)
        return out

    with torch.no_grad(), torch._C._DisableAutocast(), recorder:     # the graph has its casts already
        outputs = run_recorded(recorder, gm, inputs, call)
    result = recorder.finish(outputs)
    result.meta.update(gm.meta)
    return clean(result)


def fallbacks(gm: fx.GraphModule) -> dict:
    """Operator -> number of calls, for calls that are not primitives: later stages run them as library
    calls."""
    targets = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    return {op: targets.count(op) for op in dict.fromkeys(targets)
            if isinstance(op, torch._ops.OpOverload) and not is_primitive(op)}


# %% [markdown]
# ## The spec
#
# What the primitives promise to code generators, as a function that reads a graph and lists the nodes that
# break a promise.

# %%
def violations(gm: fx.GraphModule) -> list[str]:
    """One line per node that is not regular; an empty list for every graph that `decompose` returns."""
    found = []
    for node in gm.graph.nodes:
        primitive = PRIMITIVES.get(node.target) if node.op == "call_function" else None
        if primitive is None or primitive.category not in ("pointwise", "reduction"):
            continue
        operands = [n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta["val"], torch.Tensor)]
        if any(t.is_complex() for t in operands):
            continue
        if primitive.category == "pointwise":
            compared = operands[1:] if node.target is aten.where.self else operands
            if len({t.dtype for t in compared}) > 1:
                found.append(f"{node.format_node()}: operands of several dtypes")
            if node.kwargs.get("alpha", 1) != 1:
                found.append(f"{node.format_node()}: alpha")
        else:
            dims = node.args[1] if len(node.args) > 1 else None
            dims = [dims] if isinstance(dims, int) else dims
            if not dims or any(d < 0 for d in dims) or node.kwargs.get("dtype") is not None:
                found.append(f"{node.format_node()}: dims or dtype not explicit")
            if primitive.op not in EXTREMES and operands[0].dtype in HALF:
                found.append(f"{node.format_node()}: accumulates in half precision")
    return found


EXTREMES = (aten.amax.default, aten.amin.default, aten.argmax.default, aten.argmin.default)
