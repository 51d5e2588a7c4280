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
import operator

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..ch01_graphs.graph import call_node
from ..ch01_graphs.trace import Recorder, run_recorded
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
    """Eager execution in which each ATen operator that has a decomposition runs as that. `used`
    collects them;
    `leaves` collects the operators that ran as they are."""

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

    def stamp(self, mark: fx.Node | None, source: fx.Node):
        """Give the nodes recorded since `mark` whatever else earlier stages noted on the node they come
        from."""
        extra = {k: v for k, v in source.meta.items() if k not in ("val", "location", "origins")}
        if extra:
            for node in reversed(self.graph.nodes):
                if node is mark:
                    return
                node.meta.update(extra)

    def mark(self) -> fx.Node | None:
        return next(iter(reversed(self.graph.nodes)), None)

    def erase_after(self, mark: fx.Node | None):
        """Drop what a decomposition recorded before it declined."""
        for node in reversed(self.graph.nodes):
            if node is mark:
                return
            self.graph.erase_node(node)


def _agrees(node: fx.Node, out) -> bool:
    """Do the results that anything reads have the dtype and shape that the operator promised?"""
    wanted = node.meta["val"]
    if isinstance(wanted, torch.Tensor):
        return isinstance(out, torch.Tensor) and _type(out) == _type(wanted)
    if not isinstance(out, (list, tuple)) or not isinstance(wanted, (list, tuple)) or len(out) != len(wanted):
        return False
    read = {user.args[1] if user.target is operator.getitem else None for user in node.users}
    return all(pytree.tree_map(_type, out[i]) == pytree.tree_map(_type, wanted[i])
               for i in range(len(wanted)) if i in read or None in read)


def _type(value):
    return (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else value


def _ordered(out, wanted):
    """`out` with the strides of `wanted`, by a copy if they differ. Only dense layouts can be asked for."""
    if not isinstance(out, torch.Tensor) or not isinstance(wanted, torch.Tensor):
        return out
    if _strides(out) == _strides(wanted):
        return out
    order = sorted(range(wanted.dim()), key=lambda d: (-_hint(wanted.stride(d)), -_hint(wanted.shape[d])))
    if _type(out) != _type(wanted) or not _dense(wanted, order):
        return out
    copy = out.permute(order).clone(memory_format=torch.contiguous_format)
    return copy.permute([order.index(d) for d in range(wanted.dim())])


def _strides(t):
    """(dim, stride) of the dims that can have more than one element."""
    return [(d, t.stride(d)) for d, n in enumerate(t.shape) if not (isinstance(n, int) and n == 1)]


def _dense(t, order) -> bool:
    """Do the dims, in `order` from outer to inner, fill memory without gaps?"""
    step = 1
    for d in reversed(order):
        if _hint(t.shape[d]) != 1 and _hint(t.stride(d)) != _hint(step):
            return False
        step = step * t.shape[d]
    return True


def _hint(n):
    return n if isinstance(n, int) else getattr(n.node, "hint", None) or 1


def _like(out, wanted):
    if isinstance(out, (list, tuple)):
        return [_like(o, w) for o, w in zip(out, wanted)]
    return _ordered(out, wanted)


def _saved_as_promised(node: fx.Node, out):
    """Saved statistics (results after the first) in the float dtype of the fake: eager's kernels differ
    by device."""
    wanted = node.meta["val"]
    if not isinstance(out, (list, tuple)) or not isinstance(wanted, (list, tuple)):
        return out

    def convert(o, w):
        both = isinstance(o, torch.Tensor) and isinstance(w, torch.Tensor)
        return o.to(w.dtype) if both and o.is_floating_point() and w.is_floating_point() else o

    return [*out[:1], *(convert(o, w) for o, w in zip(out[1:], wanted[1:]))]


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
            recorder.placeholder(node.name, node.meta["val"])

    def call(node, args, kwargs):
        mark = recorder.mark()
        out = call_node(gm, node, args, kwargs)
        if node.target in TABLE:
            out = _saved_as_promised(node, out)
            if _agrees(node, out):
                out = _like(out, node.meta["val"])
            else:
                recorder.erase_after(mark)
                recorder.literal = True
                out = call_node(gm, node, args, kwargs)
                recorder.literal = False
        recorder.stamp(mark, node)
        return out

    with torch.no_grad(), recorder:
        outputs = run_recorded(recorder, gm, inputs, call)
    result = recorder.finish(outputs)
    result.meta.update(gm.meta)
    merge_equal_nodes(result)
    result.recompile()
    return result


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


# %% [markdown]
# ## Cleaning up
#
# Decompositions repeat themselves: each asks for its own 0, its own float32 copy of the same bfloat16
# tensor. Two nodes with the same operator and operands are one, unless they draw random numbers, or unless
# they may leave the graph: two results of a program must not become the same memory, for the caller may
# write to one of them. Then results that nothing reads are dropped.

# %%
def _escaping(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that are results of the graph, or that a result is a view of."""
    pending, found = list(next(iter(reversed(graph.nodes))).all_input_nodes), set()
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            primitive = PRIMITIVES.get(node.target)
            if node.target is operator.getitem or primitive is None or primitive.category == "view":
                pending.extend(node.all_input_nodes)
    return found


def merge_equal_nodes(gm: fx.GraphModule) -> None:
    """Common-subexpression and dead-code elimination, in place."""
    escaping, first = _escaping(gm.graph), {}
    for node in list(gm.graph.nodes):
        primitive = PRIMITIVES.get(node.target) if node.op == "call_function" else None
        if primitive is None or primitive.category == "random" or node in escaping:
            continue
        key = (node.target, _frozen(node.args), _frozen(node.kwargs))
        twin = first.setdefault(key, node)
        if twin is not node:
            twin.meta["origins"] = tuple(dict.fromkeys((*twin.meta["origins"], *node.meta["origins"])))
            node.replace_all_uses_with(twin)
            gm.graph.erase_node(node)
    for node in reversed(list(gm.graph.nodes)):
        if not node.users and node.op in ("call_function", "get_attr") and not _has_effect(node.target):
            gm.graph.erase_node(node)


def _frozen(value):
    """A hashable form in which 1, 1.0 and True, and 0.0 and -0.0, stay different."""
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, _frozen(v)) for k, v in sorted(value.items()))
    if isinstance(value, (fx.Node, torch.dtype, torch.device)):
        return value
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return type(value), str(value)
    return type(value), repr(value)


def _has_effect(target) -> bool:
    """Does a call matter although nothing reads its result: it writes, asserts, or advances the random
    stream."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    schema = target._schema
    return schema.is_mutable or not schema.returns or torch.Tag.nondeterministic_seeded in target.tags

