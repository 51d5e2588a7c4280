# %% [markdown]
# # Functionalization
#
# A compiler reasons about *values*: this node reads that one, so it runs after it; nobody reads this one,
# so it can go. In-place operations break that reasoning. In
#
#     v = x[0]          # a view
#     x.add_(1)         # changes x ... and v
#     return v * 2
#
# `v * 2` depends on `x.add_(1)` although no argument says so. Functionalization rewrites a graph so that
# every dependency is an argument:
#
#     x1 = x + 1
#     v1 = x1[0]        # the view, taken again
#     return v1 * 2
#
# Nothing is written any more, except that an input which the program changes is copied into at the very
# end. In-place operators were a way to save memory; the memory planner of a later chapter gives the saving
# back, for every operator, where it is legal.
#
# ## Memory, and the names for it
#
# Two notions are enough. A `Memory` is what a storage is to PyTorch: one block that several tensors may
# show. Its `value` is the node of the new graph that currently holds the contents of the whole block. An
# `Alias` is a tensor of the old program: a chain of view steps that starts at the memory. Reading an alias
# gives the node of its current contents: if the memory was written since the alias was last read, its view
# steps are applied again, lazily. Writing through an alias computes the new contents of the memory, by
# undoing the view steps one after the other: a `select` is undone by `select_scatter`, a `transpose` by a
# `transpose`.
#
# The real thing does this below the Python level, with one functional wrapper tensor per tensor, while it
# traces. A pass over a recorded graph is shorter, and the graph before it can still be printed.

# %%
from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..ch01_graphs.fake import FakeTensor, fake_call, storage_key
from ..ch01_graphs.graph import copy_provenance, graph_module
from ..ch01_graphs.shapes import ShapeEnv, SizeNode, expr_of
from ..ch01_graphs.symbolic import Expr
from ..errors import Unsupported

aten = torch.ops.aten


@dataclass
class Memory:
    """One block of memory. `value`: the node of the new graph that holds its contents after `version` writes."""

    value: fx.Node
    version: int = 0


@dataclass
class Step:
    """One view operation: `target(parent, *args, **kwargs)`, or its `index`-th result where it gives several."""

    target: Any
    args: tuple
    kwargs: dict
    index: int | None = None


@dataclass
class Alias:
    """A tensor of the old graph. `node` are its contents as of `version` of the memory. `fake`: its metadata in eager."""

    memory: Memory
    parent: "Alias | None"
    step: Step | None
    fake: FakeTensor
    node: fx.Node | None = None
    version: int = -1

# %% [markdown]
# ## What the schema says
#
# PyTorch's operator schemas state which arguments are written and which results are views of which
# arguments: `add_(Tensor(a!) self, ...) -> Tensor(a!)`, `select(Tensor(a) self, int dim, int index) ->
# Tensor(a)`. So the functional counterpart of an operator need not be listed. Its name is the name without
# the underscore, or without the `out` overload, or with `_functional` appended; its arguments have the same
# names; and it returns what the original returns followed by the new contents of each argument that was
# written.

# %%
def written_arguments(op) -> list:
    """The schema arguments that `op` writes."""
    return [a for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def is_mutable(op) -> bool:
    return isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable


@functools.cache
def functional_counterpart(op):
    """The operator that computes what `op` writes without writing it."""
    namespace, name = op._schema.name.split("::")
    ops = getattr(torch.ops, namespace)
    outs = {a.name for a in op._schema.arguments if a.is_out}
    wanted = [a.name for a in op._schema.arguments if a.name not in outs]
    stem = name.removesuffix("_")
    for candidate in ([name] if outs else [stem]) + [f"{stem}_functional"]:
        packet = getattr(ops, candidate, None)
        if packet is None:
            continue
        overloads = [getattr(packet, o) for o in packet.overloads()]
        overloads = [o for o in overloads if not o._schema.is_mutable
                     and [a.name for a in o._schema.arguments][:len(wanted)] == wanted]
        types = [str(a.type) for a in op._schema.arguments if a.name not in outs]
        exact = sorted((o for o in overloads if [str(a.type) for a in o._schema.arguments][:len(types)] == types),
                       key=lambda o: o._overloadname != op._overloadname)
        if exact:
            return exact[0]
    raise Unsupported(f"{op} writes to its arguments and has no functional counterpart")


METADATA_OPS = ("resize_", "resize_as_", "set_", "as_strided_", "detach_", "resize", "_resize_output_", "swap_")


def check_no_metadata_change(op):
    """Operators that change what a tensor *is* (its shape, its storage) rather than what it contains are refused."""
    name = op._schema.name.split("::")[1]
    view_in_place = name.endswith("_") and any(
        r.alias_info is not None for r in functional_counterpart(op)._schema.returns) if name not in METADATA_OPS else True
    if view_in_place:
        raise Unsupported(f"{op} changes the shape or the storage of a tensor in place")


# %% [markdown]
# Batch norm is the one operator whose schema lies: `native_batch_norm` updates the running statistics and
# does not say so. Its backward takes them too, though in training it does not read them; naming them there
# would keep their old values alive for nothing.

# %%
def batch_norm_counterpart(args: tuple):
    """For a `native_batch_norm` that updates running statistics: the functional operator; else None."""
    updates = args[5] and args[3] is not None and args[4] is not None
    return aten._native_batch_norm_legit_functional.default if updates else None

# %% [markdown]
# ## The pass
#
# The state of the pass: the graph under construction, and what each node of the old graph stands for now:
# an `Alias` for a tensor, a plain value or a new node for anything else.

# %%
@dataclass
class Functionalizer:
    old: fx.GraphModule
    graph: fx.Graph = field(default_factory=fx.Graph)
    env: dict[fx.Node, Any] = field(default_factory=dict)
    inputs: dict[str, Alias] = field(default_factory=dict)
    current: fx.Node | None = None
    shapes: ShapeEnv | None = None

    def __post_init__(self):
        for node in self.old.graph.nodes:
            val = node.meta.get("val") if node.op == "placeholder" else None
            for size in val.shape if isinstance(val, torch.Tensor) else [val]:
                if isinstance(size, torch.SymInt):
                    self.shapes = size.node.env


def fake_args(tree, env: ShapeEnv | None):
    """Arguments of a node, with nodes replaced by their fake values and symbolic sizes by SymInts."""
    def convert(x):
        if isinstance(x, fx.Node):
            return x.meta["val"]
        if isinstance(x, Expr):
            return torch.SymInt(SizeNode(x, env))
        return x

    return pytree.tree_map(convert, tree)


def emit(f: Functionalizer, target, args=(), kwargs=None, val=None) -> fx.Node:
    """Append a call to the new graph. Its fake value is computed unless `val` gives it."""
    kwargs = kwargs or {}
    node = f.graph.call_function(target, args, kwargs)
    if val is None:
        fakes = fake_args((args, kwargs), f.shapes)
        val = fakes[0][0][args[1]] if target is operator.getitem else fake_call(target, *fakes)
    node.meta["val"] = val
    return copy_provenance(node, f.current) if f.current is not None else node


def emit_step(f: Functionalizer, base: fx.Node, step: Step) -> fx.Node:
    node = emit(f, step.target, (base, *step.args), step.kwargs)
    return node if step.index is None else emit(f, operator.getitem, (node, step.index))


def read(f: Functionalizer, alias: Alias) -> fx.Node:
    """The node that holds the present contents of a tensor of the old program."""
    if alias.version != alias.memory.version:
        alias.node = alias.memory.value if alias.parent is None else emit_step(f, read(f, alias.parent), alias.step)
        alias.version = alias.memory.version
    return alias.node


def write(f: Functionalizer, alias: Alias, new: fx.Node) -> None:
    """Make `new` the contents of a tensor of the old program, and so of everything that shares its memory."""
    new = conform(f, new, alias.fake)
    if alias.parent is None:
        new = restride(f, new, alias.fake)
        alias.memory.value, alias.memory.version = new, alias.memory.version + 1
    else:
        write(f, alias.parent, undo(f, alias.step, read(f, alias.parent), new))
    if same_strides(new.meta["val"], alias.fake):
        alias.node, alias.version = new, alias.memory.version

# %% [markdown]
# An in-place operator keeps the dtype and the strides of the tensor it writes. Its functional counterpart
# may promote, and lays its result out as it likes, so the result is brought into the form of the target.
# Both corrections are rare and both are pointwise.

# %%
def same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal layout, not counting the strides of dimensions of size 1, which no address depends on."""
    return all(s == t or n == 1 for n, s, t in zip(a.shape, a.stride(), b.stride()))


def is_dense(t: torch.Tensor) -> bool:
    """Every element has its own place and there are no gaps."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(t.stride(), t.shape) if n != 1):
        if stride != expected:
            return False
        expected = expected * size
    return True


def conform(f: Functionalizer, new: fx.Node, target: FakeTensor) -> fx.Node:
    val = new.meta["val"]
    if val.dtype != target.dtype or val.device != target.device:
        new = emit(f, aten._to_copy.default, (new,), {"dtype": target.dtype, "device": target.device})
    if val.shape != target.shape:
        if val.dim() > target.dim():
            raise Unsupported("an `out` tensor of another shape would be resized")
        new = emit(f, aten.expand.default, (new, [expr_of(s) for s in target.shape]))
    return new


def restride(f: Functionalizer, node: fx.Node, target: torch.Tensor) -> fx.Node:
    """`node` with the strides of `target`, where those are dense (a permutation of a contiguous tensor)."""
    if same_strides(node.meta["val"], target) or target.numel() == 0 or not is_dense(target):
        return node
    order = sorted(range(target.dim()), key=lambda d: (target.stride(d), target.shape[d] != 1), reverse=True)
    back = [order.index(d) for d in range(target.dim())]
    permuted = emit(f, aten.permute.default, (node, order))
    copied = emit(f, aten.clone.default, (permuted,), {"memory_format": torch.contiguous_format})
    return emit(f, aten.permute.default, (copied, back))

# %% [markdown]
# ## Undoing a view
#
# `undo` puts the new contents of a view back into its parent. Views that keep every element have an inverse
# view; views that drop elements have a scatter. Everything else goes through `as_strided_scatter`, which
# states positions in memory and fits any view.

# %%
SAME_ELEMENTS = {aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default, aten.unsqueeze.default,
                 aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default, aten.reshape.default}
IDENTITY = {aten.alias.default, aten.detach.default, aten.lift_fresh.default}


def undo(f: Functionalizer, step: Step, parent: fx.Node, new: fx.Node) -> fx.Node:
    """The contents of `parent` after its view `step` was overwritten with `new`."""
    target, args, kwargs = step.target, step.args, step.kwargs
    shape = parent.meta["val"].shape
    dims = len(shape)
    if target in IDENTITY:
        return new
    if target in SAME_ELEMENTS:
        if new.meta["val"].numel() != parent.meta["val"].numel():
            raise Unsupported("writing through an expanded tensor")
        if not new.meta["val"].is_contiguous():
            new = emit(f, aten.clone.default, (new,), {"memory_format": torch.contiguous_format})
        return emit(f, aten.view.default, (new, [expr_of(s) for s in shape]))
    if target is aten.t.default:
        return emit(f, aten.t.default, (new,))
    if target is aten.transpose.int:
        return emit(f, aten.transpose.int, (new, *args))
    if target is aten.permute.default:
        order = [d % dims for d in args[0]]
        return emit(f, aten.permute.default, (new, [order.index(d) for d in range(dims)]))
    if target is aten.select.int:
        return emit(f, aten.select_scatter.default, (parent, new, *args))
    if target is aten.slice.Tensor:
        return emit(f, aten.slice_scatter.default, (parent, new, *args), kwargs)
    if target is aten.diagonal.default:
        return emit(f, aten.diagonal_scatter.default, (parent, new, *args), kwargs)
    if target is aten.unbind.int:
        return emit(f, aten.select_scatter.default, (parent, new, args[0] if args else 0, step.index))
    if target in (aten.split.Tensor, aten.split_with_sizes.default):
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        sizes = args[0] if isinstance(args[0], (list, tuple)) else [args[0]] * step.index
        start, length = sum(sizes[:step.index]), expr_of(new.meta["val"].shape[dim])
        return emit(f, aten.slice_scatter.default, (parent, new, dim, start, start + length))
    if target is aten.view_as_real.default:
        return emit(f, aten.view_as_complex.default, (emit(f, aten.clone.default, (new,)),))
    if target is aten.view_as_complex.default:
        return emit(f, aten.view_as_real.default, (new,))
    if target is aten._conj.default:
        return emit(f, aten.conj_physical.default, (new,))
    if target is aten.view.dtype and parent.meta["val"].element_size() == new.meta["val"].element_size():
        return emit(f, aten.view.dtype, (new, parent.meta["val"].dtype))
    if parent.meta["val"].dtype != new.meta["val"].dtype:
        raise Unsupported(f"writing through {target}")
    window = emit_step(f, parent, step).meta["val"]
    layout = [expr_of(s) for s in window.shape], [expr_of(s) for s in window.stride()], expr_of(window.storage_offset())
    return emit(f, aten.as_strided_scatter.default, (parent, new, *layout))

# %% [markdown]
# ## One node at a time
#
# Whether an operator's result is a view is not asked of a list either: it is one if its fake shares the
# storage of an argument's fake.

# %%
def read_args(f: Functionalizer, tree):
    """Arguments of an old node, in terms of the new graph, with the present contents of each tensor."""
    def convert(x):
        if not isinstance(x, fx.Node):
            return x
        entry = f.env[x]
        return read(f, entry) if isinstance(entry, Alias) else entry
    return pytree.tree_map(convert, tree)


def fresh(fake, node: fx.Node) -> Alias:
    """A tensor with memory of its own."""
    return Alias(Memory(node), None, None, fake, node, 0)


def viewed_argument(node: fx.Node, val: FakeTensor) -> fx.Node | None:
    """The tensor argument whose memory the result `val` of `node` shows, if any."""
    key = storage_key(val)
    for arg in pytree.tree_leaves((node.args, node.kwargs)):
        if isinstance(arg, fx.Node) and isinstance(arg.meta["val"], FakeTensor) and storage_key(arg.meta["val"]) == key:
            return arg
    return None


def visit_call(f: Functionalizer, node: fx.Node):
    val, op = node.meta["val"], node.target
    if op is operator.getitem:
        visit_getitem(f, node)
    elif is_mutable(op):
        visit_mutation(f, node)
    elif op is aten.native_batch_norm.default and batch_norm_counterpart(node.args):
        new = emit(f, batch_norm_counterpart(node.args), read_args(f, node.args))
        for position, argument in ((3, 3), (4, 4)):
            write(f, f.env[node.args[argument]], emit(f, operator.getitem, (new, position)))
        f.env[node] = new
    elif op is aten.native_batch_norm_backward.default and node.args[7]:
        f.env[node] = emit(f, op, (*read_args(f, node.args[:3]), None, None, *read_args(f, node.args[5:])), val=val)
    elif isinstance(val, FakeTensor):
        base = viewed_argument(node, val)
        if base is None:
            args, kwargs = read_args(f, (node.args, node.kwargs))
            f.env[node] = fresh(val, emit(f, op, args, kwargs, reuse(node, args, kwargs)))
        elif base is not node.args[0]:
            raise Unsupported(f"{op} returns a view of an argument that is not its first")
        else:
            parent = read(f, f.env[base])
            unchanged = val if parent.meta["val"] is base.meta["val"] else None
            view = emit(f, op, (parent, *node.args[1:]), node.kwargs, unchanged)
            step = Step(op, node.args[1:], node.kwargs)
            f.env[node] = Alias(f.env[base].memory, f.env[base], step, val, view, f.env[base].memory.version)
    else:
        args, kwargs = read_args(f, (node.args, node.kwargs))
        f.env[node] = emit(f, op, args, kwargs, val)


def reuse(node: fx.Node, args, kwargs):
    """The old fake serves again where no argument changed its layout."""
    before = [a.meta["val"] for a in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(a, fx.Node)]
    after = [a.meta["val"] for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, fx.Node)]
    same = all(not isinstance(a, torch.Tensor) or a is b or same_strides(a, b) for a, b in zip(before, after))
    return node.meta["val"] if same else None


def visit_getitem(f: Functionalizer, node: fx.Node):
    """A part of a tuple: of a fresh result, of several views, or of an in-place operator's results."""
    source, index = node.args
    entry = f.env[source]
    if isinstance(entry, (list, tuple)):
        f.env[node] = entry[index]
    elif isinstance(entry, fx.Node) and isinstance(node.meta["val"], FakeTensor):
        base = viewed_argument(source, node.meta["val"]) if source.op == "call_function" and not is_mutable(source.target) else None
        if base is None:
            f.env[node] = fresh(node.meta["val"], emit(f, operator.getitem, (entry, index), val=entry.meta["val"][index]))
        else:
            step = Step(source.target, source.args[1:], source.kwargs, index)
            f.env[node] = Alias(f.env[base].memory, f.env[base], step, node.meta["val"])
    else:
        f.env[node] = emit(f, operator.getitem, (entry, index), val=node.meta["val"])

# %% [markdown]
# An in-place operator: run the counterpart, write what it returned, and let the node stand for the tensors
# that were written. `copy_` and `zero_` need no counterpart: what they write does not depend on what was
# there.

# %%
def visit_mutation(f: Functionalizer, node: fx.Node):
    op = node.target
    schema = op._schema
    check_no_metadata_change(op)
    outs = {a.name for a in schema.arguments if a.is_out}
    bound = dict(zip([a.name for a in schema.arguments if not a.kwarg_only], node.args)) | node.kwargs
    targets = [bound.get(a.name) for a in written_arguments(op)]
    if op is aten.copy_.default:
        results = [read_args(f, node.args[1])]
        if not isinstance(results[0], fx.Node):
            raise Unsupported("copy_ from something that is not a tensor")
    else:
        functional = functional_counterpart(op)
        names = [a.name for a in schema.arguments if a.name not in outs]
        keyword_only = {a.name for a in functional._schema.arguments if a.kwarg_only}
        kwargs = {n: read_args(f, bound[n]) for n in names if n in bound and n in keyword_only}
        positional = [n for n in names if n not in keyword_only]
        defaults = {a.name: a.default_value for s in (functional._schema, schema) for a in s.arguments if a.has_default_value()}
        args = tuple(read_args(f, bound[n]) if n in bound else defaults[n] for n in positional)
        new = emit(f, functional, args, kwargs)
        results = [new] if len(functional._schema.returns) == 1 else \
            [emit(f, operator.getitem, (new, i)) for i in range(len(functional._schema.returns))]
    for target, result in zip(targets, results[len(results) - len(targets):]):
        if isinstance(target, (list, tuple)):
            for i, t in enumerate(target):
                write(f, f.env[t], emit(f, operator.getitem, (result, i)))
        elif target is not None:
            write(f, f.env[target], result)
    by_alias = {frozenset(a.alias_info.before_set): t for a, t in zip(written_arguments(op), targets)}
    pure = iter([fresh(r.meta["val"], r) if isinstance(r.meta["val"], FakeTensor) else r
                 for r in results[:len(results) - len(targets)]])
    returned = [f.env[by_alias[frozenset(r.alias_info.before_set)]] if r.alias_info is not None else next(pure)
                for r in schema.returns]
    f.env[node] = returned[0] if len(returned) == 1 else returned

# %% [markdown]
# ## From graph to graph
#
# Two graph inputs that share memory are refused when one of them is written: which bytes overlap would have
# to become part of the graph.

# %%
def functionalize_with_mutations(gm: fx.GraphModule) -> tuple[fx.GraphModule, dict[str, fx.Node]]:
    """A graph that writes nothing, and for each placeholder that `gm` writes (by name) the node of its final contents."""
    f = Functionalizer(gm)
    for node in gm.graph.nodes:
        f.current = node
        if node.op in ("placeholder", "get_attr"):
            new = f.graph.node_copy(node)
            f.env[node] = fresh(node.meta["val"], new) if isinstance(node.meta["val"], torch.Tensor) else new
            if isinstance(f.env[node], Alias):
                f.inputs[node.name] = f.env[node]
        elif node.op == "output":
            f.graph.output(read_args(f, node.args[0]))
        else:
            visit_call(f, node)
    mutations = {name: alias.memory.value for name, alias in f.inputs.items() if alias.memory.version > 0}
    keys = [storage_key(a.fake) for a in f.inputs.values() if isinstance(a.fake, FakeTensor)]
    for name in mutations:
        if not isinstance(f.inputs[name].fake, FakeTensor):
            raise Unsupported("a constant tensor is modified in place")
        if keys.count(storage_key(f.inputs[name].fake)) > 1:
            raise Unsupported("two inputs share memory and one of them is modified in place")
    return graph_module(gm, f.graph), mutations


def append_mutations(gm: fx.GraphModule, mutations: dict[str, fx.Node]) -> None:
    """Copy the final contents into each mutated input, as the last nodes of the graph."""
    placeholders = {n.name: n for n in gm.graph.nodes if n.op == "placeholder"}
    output = next(iter(reversed(gm.graph.nodes)))
    with gm.graph.inserting_before(output):
        for name, new in mutations.items():
            copy = gm.graph.call_function(aten.copy_.default, (placeholders[name], new))
            copy_provenance(copy, new).meta["val"] = placeholders[name].meta["val"]



def functionalize(gm: fx.GraphModule) -> fx.GraphModule:
    """The functional graph of a recorded ATen graph; mutated inputs become trailing `copy_` nodes.
    Raises Unsupported for what changes the metadata of a tensor, and for writes whose effect cannot be expressed."""
    new, mutations = functionalize_with_mutations(gm)
    append_mutations(new, mutations)
    return new
