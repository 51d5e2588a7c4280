# %% [markdown]
# # Tensors that share memory
#
# A pass that removes writes has to know at every point what each tensor holds. Two notions are enough. A
# `Memory` is what a storage is to PyTorch: one block that several tensors may show. Its `value` is the node of
# the new graph that currently holds the contents of the whole block. An `Alias` is a tensor of the old program:
# a chain of view steps that starts at the memory. Reading an alias gives the node of its current contents: if
# the memory was written since the alias was last read, its view steps are applied again, lazily. Writing
# through an alias computes the new contents of the memory, by undoing the view steps one after the other: a
# `select` is undone by `select_scatter`, a `transpose` by a `transpose`.
#
# `x.t()[0].mul_(2)`, followed by `return x + 1`, writes to the first column of `x`. Forwards along the steps to read, then backwards to
# write:
#
#     x: f32[2, 3] = input
#     t_default: f32[3, 2] = aten.t.default(x)
#     select_int: f32[2] = aten.select.int(t_default, 0, 0)
#     mul_tensor: f32[2] = aten.mul.Tensor(select_int, 2)
#     select_scatter_default: f32[3, 2] = aten.select_scatter.default(t_default, mul_tensor, 0, 0)
#     t_default_1: f32[2, 3] = aten.t.default(select_scatter_default)
#     add_tensor: f32[2, 3] = aten.add.Tensor(t_default_1, 1)
#
# The result of the second `t` is the new `value` of the memory of `x`. The last line reads just that, since the alias of `x` has no steps.
#
# torch.compile does this below the Python level, with one functional wrapper tensor per tensor, while it
# traces. A pass over a recorded graph is shorter, and the graph before it can still be printed.

# %%
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..ch01_graphs.fake import FakeTensor, storage_key
from ..ch01_graphs.floats import Float
from ..ch01_graphs.graph import Graph, copy_provenance, map_args
from ..ch01_graphs.layouts import each_has_its_place, inside, inverse, is_dense, lies_as_well_as_can_be, memory_order, same_layout
from ..ch01_graphs.recipes import fake_call
from ..ch01_graphs.shapes import FloatNode, ShapeEnv, SizeNode, expr_of, is_symbolic
from ..ch01_graphs.symbolic import Expr
from ..errors import Unsupported
from ..tables import Table

aten = torch.ops.aten


@dataclass
class Memory:
    """One block of memory. `value`: the node of the new graph that holds its contents after `version`
    writes."""

    value: fx.Node
    version: int = 0


@dataclass(repr=False)
class Step:
    """One view operation: `target(parent, *args, **kwargs)`, or its `index`-th result where it gives
    several."""

    target: Any
    args: tuple
    kwargs: dict
    index: int | None = None

    def __repr__(self):
        words = [*map(repr, self.args), *(f"{k}={v!r}" for k, v in self.kwargs.items())]
        return f"{self.target}({', '.join(words)})" + ("" if self.index is None else f"[{self.index}]")


@dataclass
class Alias:
    """A tensor of the old graph. `node` are its contents as of `version` of the memory. `fake`: its
    metadata in eager."""

    memory: Memory
    parent: "Alias | None"
    step: Step | None
    fake: FakeTensor
    node: fx.Node | None = None
    version: int = -1


def fresh_alias(fake, node: fx.Node) -> Alias:
    """A tensor with memory of its own."""
    return Alias(Memory(node), None, None, fake, node, 0)

# %% [markdown]
# Whether an operator's result is a view is not asked of a list: it is one if its fake shares the storage of
# an argument's fake.

# %%
def viewed_argument(node: fx.Node, val: FakeTensor, lent: dict[int, fx.Node] | None = None) -> fx.Node | None:
    """The tensor argument whose memory the result `val` of `node` shows, if any. lent: a table for further results of the same node,
    which may have hundreds of each."""
    lent = {} if lent is None else lent
    if not lent:
        for arg in node.all_input_nodes:
            if isinstance(fake := arg.meta["val"], FakeTensor):
                lent.setdefault(storage_key(fake), arg)
    return lent.get(storage_key(val))

# %% [markdown]
# ## Adding nodes
#
# Every node that a pass adds needs a fake value, as all nodes have. `append_call` computes it, by running the operator
# on the fakes of its operands, and gives the node the provenance of the node that is being rewritten.

# %%
@dataclass
class GraphBuilder:
    """Adds nodes to `graph`, on behalf of `current`, a node of `old`."""
    old: fx.GraphModule
    graph: fx.Graph = field(default_factory=Graph)
    current: fx.Node | None = None
    shapes: ShapeEnv | None = None
    several: dict[tuple, fx.Node] = field(default_factory=dict)      # (node, a step of several results from it) -> all of them

    def __post_init__(self):
        for node in self.old.graph.nodes:
            val = node.meta.get("val") if node.op == "placeholder" else None
            for size in val.shape if isinstance(val, torch.Tensor) else [val]:
                if is_symbolic(size):
                    self.shapes = size.node.env


def fake_args(tree, env: ShapeEnv | None):
    """Arguments of a node, with nodes replaced by their fake values, expressions by SymInts and SymFloats."""
    def convert(x):
        if isinstance(x, fx.Node):
            return x.meta["val"]
        if isinstance(x, Float):
            return torch.SymFloat(FloatNode(x, env))
        return torch.SymInt(SizeNode(x, env)) if isinstance(x, Expr) else x

    return map_args(convert, tree)


def append_call(b: GraphBuilder, target, args=(), kwargs=None, val=None) -> fx.Node:
    """Append a call to the new graph. Its fake value is computed unless `val` gives it."""
    kwargs = kwargs or {}
    node = b.graph.call_function(target, args, kwargs)
    if val is None:
        fakes = fake_args((args, kwargs), b.shapes)
        val = fakes[0][0][args[1]] if target is operator.getitem else fake_call(target, *fakes)
    node.meta["val"] = val
    return copy_provenance(node, b.current) if b.current is not None else node


def append_form(b: GraphBuilder, target, args=(), kwargs=None) -> fx.Node:
    """Append a view or a copy that nobody has asked for. It may show a gradient that others lead to than to `current`."""
    node = append_call(b, target, args, kwargs)
    node.meta.pop("tangents", None)
    return node


def emit_step(b: GraphBuilder, base: fx.Node, step: Step) -> fx.Node:
    """The view of `base` that a step leads to. The hundred parts of a `split` are read one by one; it is called once for them."""
    if step.index is None:
        return append_form(b, step.target, (base, *step.args), step.kwargs)
    key = base, step.target, str((step.args, step.kwargs))
    if key not in b.several:
        b.several[key] = append_form(b, step.target, (base, *step.args), step.kwargs)
    return append_form(b, operator.getitem, (b.several[key], step.index))


# %% [markdown]
# ## Reading and writing
#
# `read` is one half of the idea. A tensor of the old program is an `Alias`: some memory, and the steps that lead
# to this view of it. `version` tells how often the memory had been written when the node `alias.node` was made. If
# it was written since, the node is out of date. For the memory itself the new contents are at hand
# (`memory.value`). For a view the parent is read, which may have to be brought up to date in turn, and the view's
# step is repeated on it.

# %%
def read(b: GraphBuilder, alias: Alias) -> fx.Node:
    """The node that holds the present contents of a tensor of the old program."""
    if alias.version != alias.memory.version:
        if alias.parent is None:
            alias.node = alias.memory.value
        else:
            base = read(b, alias.parent)
            if looks_otherwise(alias.step.target, base, alias.parent.fake):
                base = append_form(b, aten.clone.default, (base,), {"memory_format": torch.contiguous_format})     # its gaps are closed
            elif alias.step.target is aten.as_strided.default:
                base = as_it_lies(b, base, alias)
            alias.node = emit_step(b, base, alias.step)
        alias.version = alias.memory.version
    return alias.node


def looks_otherwise(view, base: fx.Node, fake: FakeTensor) -> bool:
    """Does `view` need strides of `fake`, the tensor in eager, that `base`, its present contents, does not have? A change of
    dtype asks for all of them, also of dims of size 1, and for a place where a larger element may begin."""
    val = base.meta["val"]
    if view in (aten.view.dtype, aten.view_as_complex.default):
        return val.stride() != fake.stride() or val.storage_offset() not in (0, fake.storage_offset())
    return view is aten.view.default and not same_layout(val, fake)


# %% tags=["exercise:write-through-view"]
def write(b: GraphBuilder, alias: Alias, new: fx.Node) -> None:
    """Make `new` the contents of a tensor of the old program, and so of everything that shares its memory: `read` of any alias gives
    the new contents from now on. `new` may have another dtype, shape or other strides than the tensor has, which keeps its own.
    Raises Unsupported for a view of a tensor that has two elements in one place."""
    new = conform(b, new, alias.fake)
    if alias.parent is None:
        new = restride(b, new, alias.fake, closed=True)
        alias.memory.value, alias.memory.version = new, alias.memory.version + 1
    else:
        if not each_has_its_place(alias.parent.fake):
            raise Unsupported("writing through a view of a tensor that overlaps itself")
        parent = read(b, alias.parent)
        if alias.step.target is aten.as_strided.default:
            parent = as_it_lies(b, parent, alias)
        write(b, alias.parent, undo(b, alias.step, parent, new))
    if new.meta["val"].stride() == alias.fake.stride():          # of dims of size 1 as well: they tell where a result of `new` lies
        alias.node, alias.version = new, alias.memory.version

# %% [markdown]
# ## A view that speaks of memory
#
# `as_strided` is the one view that may show more than the tensor it is called on: `x[2:].as_strided((2,), (1,), 0)`
# are the first two elements of `x`. Until there is a write this makes no difference, since the tensors of the new graph lie
# as in eager. After one they need not, and elements that `x[2:]` does not have come from `x`. So does their gradient:
# while nothing is written, the gradient of elements outside of the tensor is lost in eager; after a write PyTorch makes the history of each
# view anew, from the tensor that owns the memory. The step of such an alias therefore starts there, and counts its offset from there.
# In between only a change of the dtype is in the way, and a `detach` has to be repeated.

# %%
def anchored(alias: Alias, view: FakeTensor) -> tuple[Alias, Step]:
    """`view`, an `as_strided` of `alias`, as a step from the tensor that owns the memory."""
    anchor, detached = alias, False
    while anchor.parent is not None and anchor.step.target not in KINDS and anchor.parent.fake.dtype == view.dtype:
        detached |= anchor.step.target is aten.detach.default
        anchor = anchor.parent
    if detached:
        anchor = Alias(anchor.memory, anchor, Step(aten.detach.default, (), {}), anchor.fake)
    sizes, strides = ([expr_of(s) for s in t] for t in (view.shape, view.stride()))
    offset = expr_of(view.storage_offset()) - expr_of(anchor.fake.storage_offset())
    return anchor, Step(aten.as_strided.default, (sizes, strides, *([] if offset == 0 else [offset])), {})


KINDS = {aten._conj.default, aten._neg_view.default, aten.view.dtype}


def as_it_lies(b: GraphBuilder, base: fx.Node, view: Alias) -> fx.Node:
    """`base`, the contents of the parent of `view`, in memory as in eager, but for what is around it."""
    if not inside(view.fake, view.parent.fake):
        raise Unsupported("as_strided beyond the elements of a tensor that was written")
    base = restride(b, base, view.parent.fake)
    if len(view.step.args) > 2 and base.meta["val"].storage_offset() != 0:      # it begins at an offset, and the step counts from its start
        base = append_form(b, aten.clone.default, (base,))
    return base

# %% [markdown]
# An in-place operator keeps the dtype and the strides of the tensor it writes. Its functional counterpart
# may promote, and lays its result out as it likes, so the result is brought into the form of the target.
# Both corrections are rare and both are pointwise.

# %%
def conform(b: GraphBuilder, new: fx.Node, target: FakeTensor) -> fx.Node:
    val = new.meta["val"]
    if val.dtype != target.dtype or val.device != target.device:
        new = append_call(b, aten._to_copy.default, (new,), {"dtype": target.dtype, "device": target.device})
    if val.shape != target.shape:
        if val.dim() > target.dim():
            raise Unsupported("an `out` tensor of another shape would be resized")
        try:
            new = append_call(b, aten.expand.default, (new, [expr_of(s) for s in target.shape]))
        except RuntimeError as error:       # eager takes a gradient known to be zero for any size, and zeroes the target
            raise Unsupported("a copy of another size") from error
    return new


def restride(b: GraphBuilder, node: fx.Node, target: torch.Tensor, closed: bool = False) -> fx.Node:
    """`node` with the strides of `target`, where those are dense (a permutation of a contiguous tensor). closed: where they have gaps,
    without these, but in their order, so that what is computed from it lies as in eager."""
    if target.numel() == 0 or lies_as_well_as_can_be(node.meta["val"], target, closed):
        return node
    order = memory_order(target.shape, target.stride())
    permuted = append_form(b, aten.permute.default, (node, order))
    copied = append_form(b, aten.clone.default, (permuted,), {"memory_format": torch.contiguous_format})
    return append_form(b, aten.permute.default, (copied, inverse(order)))

# %% [markdown]
# ## Undoing a view
#
# `undo` puts the new contents of a view back into its parent. Views that keep every element have an inverse
# view; views that drop elements have a scatter. The rules are in `rules/views.py`: each takes the step that made the view, the
# present contents of the parent and the new contents of the view, and gives the new contents of the parent.
#
# If a step has no rule, it is taken for an `as_strided`: the fallback computes where in the parent's memory the view
# lies, its sizes, strides and offset, and overwrites these positions.

# %%
UNDO = Table()               # view operator -> rule: function(builder, step, node of the parent, node of the view) -> new parent


def undo(b: GraphBuilder, step: Step, parent: fx.Node, new: fx.Node) -> fx.Node:
    """The contents of `parent` after its view `step` was overwritten with `new`."""
    if step.target in UNDO:
        return UNDO[step.target](b, step, parent, new)
    if parent.meta["val"].dtype != new.meta["val"].dtype:
        raise Unsupported(f"writing through {step.target}")
    if parent.op != "placeholder" and not is_dense(parent.meta["val"]):     # its gaps are those of an input
        parent = append_call(b, aten.clone.default, (parent,), {"memory_format": torch.contiguous_format})
    window = emit_step(b, parent, step).meta["val"]
    sizes, strides = ([expr_of(s) for s in t] for t in (window.shape, window.stride()))
    offset, own = (expr_of(t.storage_offset()) for t in (window, parent.meta["val"]))
    place = (sizes, strides) if offset == own else (sizes, strides, offset)     # an input may lie elsewhere
    return UNDO[aten.as_strided.default](b, Step(aten.as_strided.default, place, {}), parent, new)
