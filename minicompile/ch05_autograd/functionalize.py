# %% [markdown]
# # Functionalization
#
# A compiler reasons about *values*: this node reads that one, so it runs after it; nobody reads this one,
# so it can go. In-place operations break that reasoning. In
#
#     def stale(x):
#         row = x[0]
#         x.add_(1)
#         return row * 2
#
# `row` is a view, so the write changes it, and `row * 2` depends on `x.add_(1)` although no argument says so. As it was recorded:
#
#     x: f32[2, 3] = input
#     select_int: f32[3] = aten.select.int(x, 0, 0)
#     add__tensor: f32[2, 3] = aten.add_.Tensor(x, 1)
#     mul_tensor: f32[3] = aten.mul.Tensor(select_int, 2)
#     return (mul_tensor,)
#
# By its arguments, the second and the third line could change places, or the second could be dropped, since nobody reads its result.
# Functionalization rewrites a graph so that every dependency is an argument:
#
#     x: f32[2, 3] = input
#     select_int: f32[3] = aten.select.int(x, 0, 0)
#     add_tensor: f32[2, 3] = aten.add.Tensor(x, 1)
#     select_int_1: f32[3] = aten.select.int(add_tensor, 0, 0)
#     mul_tensor: f32[3] = aten.mul.Tensor(select_int_1, 2)
#     copy__default: f32[2, 3] = aten.copy_.default(x, add_tensor)
#     return (mul_tensor,)
#
# The view is taken again, of the new contents, and the old one is read by nobody (`cleanup.py` drops it). Nothing is written any more,
# except that an input which the program changes is copied into at the very end. In-place operators were a way to save memory; the memory
# planner of chapter 8 gives the saving back, for every operator, where it is legal.
#
# What each tensor of the old program holds at a point is kept by `aliases.py`; this module goes from node to
# node.

# %%
import math
import operator
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..ch01_graphs.fake import FakeTensor, is_lazy, storage_key
from ..ch01_graphs.graph import copy_provenance, graph_module, map_args
from ..ch01_graphs.layouts import each_has_its_place, inside, inverse, is_dense, is_window, memory_order, overlap, same_layout
from ..ch01_graphs.operators import leaves
from ..ch01_graphs.shapes import expr_of
from ..ch01_graphs.symbolic import Expr
from ..errors import Unsupported
from ..tables import Table
from . import aliases
from .aliases import Alias, GraphBuilder, Step, anchored, append_call, emit_step, fresh_alias, looks_otherwise, read, viewed_argument, write
from .schemas import check_no_metadata_change, functional_counterpart, is_mutable, parameters_of_counterpart, written_arguments

aten = torch.ops.aten

# %% [markdown]
# ## The pass
#
# The state of the pass, besides the graph under construction: what each node of the old graph stands for now,
# an `Alias` for a tensor, a plain value or a new node for anything else.

# %%
@dataclass
class Functionalizer(GraphBuilder):
    env: dict[fx.Node, Any] = field(default_factory=dict)
    inputs: dict[str, Alias] = field(default_factory=dict)
    lent: dict[fx.Node, dict[int, fx.Node]] = field(default_factory=dict)     # of nodes with several results: their arguments by memory

# %% [markdown]
# ## One node at a time
#
# `read_args` translates the arguments of a node by `env`. For a tensor that is the node with its contents at this moment, which may have
# to be made first: a view of something that was written meanwhile is taken again.

# %%
def read_args(f: Functionalizer, tree):
    """Arguments of an old node, in terms of the new graph, with the present contents of each tensor."""
    def convert(x):
        if not isinstance(x, fx.Node):
            return x
        entry = f.env[x]
        return read(f, entry) if isinstance(entry, Alias) else entry
    return map_args(convert, tree)


# %% [markdown]
# Each call of the old graph is one of three things. It may write to an argument. Then it is replaced by its
# functional counterpart, and the new contents are noted. It may return a view. Then nothing is computed: an
# `Alias` is made that knows its parent and the step that leads from there, and its contents are read when
# somebody asks. Anything else is copied, with the present contents of its arguments. Batch norm has two
# visitors of its own, because it writes to its running statistics without saying so in its schema.
#
# After a write a tensor may lie in memory otherwise than in eager, for the counterpart chose its own layout. A view that eager could take
# may then be impossible (`looks_otherwise`); it is taken of a copy that lies row by row.

# %%
VISITORS = Table()           # operator whose schema lies -> its visitor (`rules/batch_norm.py`)


def visit_call(f: Functionalizer, node: fx.Node):
    val, op = node.meta["val"], node.target
    if op is operator.getitem:
        visit_getitem(f, node)
    elif is_mutable(op):
        visit_mutation(f, node)
    elif op in VISITORS:
        VISITORS[op](f, node)
    elif isinstance(val, FakeTensor) and (base := viewed_argument(node, val)) is not None:
        visit_view(f, node, base)
    else:
        visit_pure(f, node)


def visit_pure(f: Functionalizer, node: fx.Node):
    val, (args, kwargs) = node.meta["val"], read_args(f, (node.args, node.kwargs))
    if not isinstance(val, FakeTensor):
        f.env[node] = append_call(f, node.target, args, kwargs, val)
        return
    try:
        result = append_call(f, node.target, args, kwargs, val if lie_as_before(f, node) else None)
    except RuntimeError:                # it asks for operands row by row, as `_pdist_forward` does
        args, kwargs = map_args(lambda a: laid_out(f, a), (node.args, node.kwargs))
        result = append_call(f, node.target, args, kwargs)
    f.env[node] = fresh_alias(val, result)


def laid_out(f: Functionalizer, x):
    """The present contents of a node, lying as in eager."""
    entry = f.env[x] if isinstance(x, fx.Node) else x
    return aliases.restride(f, read(f, entry), x.meta["val"]) if isinstance(entry, Alias) else entry


def visit_view(f: Functionalizer, node: fx.Node, base: fx.Node):
    if base is not node.args[0]:
        raise Unsupported(f"{node.target} returns a view of an argument that is not its first")
    val, alias = node.meta["val"], f.env[base]
    parent = read(f, alias)
    if node.target is aten.as_strided.default:
        return visit_as_strided(f, node, alias, parent)
    if looks_otherwise(node.target, parent, base.meta["val"]):
        parent = append_call(f, aten.clone.default, (parent,), {"memory_format": torch.contiguous_format})
    unchanged = val if parent.meta["val"] is base.meta["val"] else None
    try:
        view = append_call(f, node.target, (parent, *node.args[1:]), node.kwargs, unchanged)
    except RuntimeError as error:       # a written value lies otherwise than what it was written to, without its gaps
        raise Unsupported(f"{node.target} of what was written") from error
    step = Step(node.target, node.args[1:], node.kwargs)
    f.env[node] = Alias(alias.memory, alias, step, val, view, alias.memory.version)


def visit_as_strided(f: Functionalizer, node: fx.Node, alias: Alias, parent: fx.Node):
    val, (anchor, step) = node.meta["val"], anchored(alias, node.meta["val"])
    f.env[node] = view = Alias(alias.memory, anchor, step, val)
    if parent.meta["val"] is node.args[0].meta["val"]:          # it lies in memory as in eager
        view.node, view.version = append_call(f, node.target, (parent, *node.args[1:]), node.kwargs, val), alias.memory.version
    elif not inside(val, alias.fake):
        raise Unsupported("as_strided beyond the elements of a tensor that was written")


# %% [markdown]
# The rest of the visitors are special cases. Operators that count from the beginning of their operand's memory must find the
# same memory there, or be moved to where it is now. A layout that a write has changed makes the old fake of a result wrong, so
# `lie_as_before` asks for it. And `getitem` takes a part of a tuple, which is a new tensor, a view of an argument (`split`), or
# a tensor that was written.

# %%
@VISITORS.of(aten.as_strided_copy.default, aten.as_strided_scatter.default)
def visit_place(f: Functionalizer, node: fx.Node):
    """They count from where the memory of their operand begins; what was written to it may lie in memory of another length."""
    names, bound = bound_arguments(node)
    given, place = read_args(f, bound), bound.get("storage_offset")
    before, after = bound["self"].meta["val"], given["self"].meta["val"]
    if before is not after:
        if any(isinstance(n, Expr) for n in (*bound["size"], *bound["stride"], place)) or not same_layout(before, after) or \
                not inside(FakeTensor.run(aten.as_strided.default, (before, bound["size"], bound["stride"], place), {}), before):
            raise Unsupported(f"{node.target} beyond the elements of a tensor that was written")
        if place is not None:
            given["storage_offset"] = place - before.storage_offset() + after.storage_offset()
    f.env[node] = fresh_alias(node.meta["val"], append_call(f, node.target, tuple(map(given.get, names))))


def bound_arguments(node: fx.Node) -> tuple[list[str], dict[str, Any]]:
    """The names of an operator's positional parameters, and the arguments of a call by name."""
    names = [a.name for a in node.target._schema.arguments if not a.kwarg_only]
    return names, dict(zip(names, node.args)) | node.kwargs


def lie_as_before(f: Functionalizer, node: fx.Node) -> bool:
    """Has no argument changed its layout? Then the old fake serves again."""
    for a in node.all_input_nodes:
        if isinstance(f.env[a], Alias):
            before, after = a.meta["val"], read(f, f.env[a]).meta["val"]
            if before is not after and not same_layout(before, after):
                return False
    return True


def visit_getitem(f: Functionalizer, node: fx.Node):
    """A part of a tuple: of a fresh result, of several views, or of an in-place operator's results."""
    (source, index), val = node.args, node.meta["val"]
    entry = f.env[source]
    if isinstance(entry, (list, tuple)):
        f.env[node] = entry[index]
    elif not isinstance(val, FakeTensor):
        f.env[node] = append_call(f, operator.getitem, (entry, index), val=val)
    elif (base := viewed_argument(source, val, f.lent.setdefault(source, {}))) is not None:
        step = Step(source.target, source.args[1:], source.kwargs, index)
        f.env[node] = Alias(f.env[base].memory, f.env[base], step, val)
    else:
        part = append_call(f, operator.getitem, (entry, index), val=entry.meta["val"][index])
        f.env[node] = fresh_alias(val, part)

# %% [markdown]
# An in-place operator: run the counterpart, write what it returned, and let the node stand for the tensors
# that were written. `copy_` needs no counterpart: what it writes is its operand.
#
# `x -= x.t()` would overwrite elements that it has yet to read. Eager refuses it, by a rule that looks at
# windows without gaps only; the same rule here leaves the refusal to eager. Windows onto memory that overlap
# themselves (`expand`, `unfold`) are left to eager, too: it refuses some writes, and the result of others
# depends on their order. And `_foreach_add_([x, x], 1)` adds 2.

# %%
def check_no_overlap(f: Functionalizer, node: fx.Node, targets: list) -> None:
    operands: dict[int, list[Alias]] = {}               # by their memory
    for alias in (f.env[a] for a in node.all_input_nodes):
        if isinstance(alias, Alias):
            operands.setdefault(id(alias.memory), []).append(alias)
    for target in leaves(targets, {}):
        if not isinstance(target, fx.Node) or not isinstance(target.meta["val"], FakeTensor):
            continue
        val, memory = f.env[target].fake, f.env[target].memory
        if not each_has_its_place(val):
            raise Unsupported(f"{node.target} writes to a tensor that overlaps itself")
        if any(overlap(val, a.fake) for a in operands[id(memory)]):
            raise Unsupported(f"{node.target} writes to a tensor that overlaps one that it reads")
    last: dict[int, float] = {}                         # the last place at which each memory is read: after all, if not from a list
    for argument in node.args:
        whole = not isinstance(argument, (list, tuple))
        for i, a in enumerate([argument] if whole else argument):
            if isinstance(a, fx.Node) and isinstance(f.env[a], Alias):
                memory = id(f.env[a].memory)
                last[memory] = max(last.get(memory, -1), math.inf if whole else i)
    for tensors in targets:
        for i, target in enumerate(tensors if isinstance(tensors, (list, tuple)) else ()):
            if last.get(id(f.env[target].memory), -1) > i:
                raise Unsupported(f"{node.target} writes to a tensor before it reads it")

# %% [markdown]
# ## One write, replaced
#
# An operator that writes has a counterpart that returns. `add_` has `add`, and `native_batch_norm`, which
# updates its running statistics, has a form that returns them. The schema tells which arguments are
# written. So the replacement goes in four steps. Check that what is written does not overlap itself, for
# then the order of the elements would matter. Call the counterpart on the present values of all arguments
# (`read_args`). Of its results, the last ones are the new contents of what was written, and `write` stores
# each. Finally say what the *original* call has returned: where the schema says that a result is one of the
# arguments, it is the alias that was written, and not a new tensor.
#
# Random numbers need care. `bernoulli_` fills memory in its order, `bernoulli` goes row by row. On a
# transposed tensor the two would draw different masks from the same seed, so the draw is made on the tensor
# as it lies in memory, and turned back.

# %%
def visit_mutation(f: Functionalizer, node: fx.Node):
    op, written = node.target, written_arguments(node.target)
    check_no_metadata_change(op)
    _, bound = bound_arguments(node)
    targets = [bound.get(a.name) for a in written]
    check_no_overlap(f, node, targets)
    if op is aten.copy_.default:
        results = [read_args(f, node.args[1])]
        if not isinstance(results[0], fx.Node):
            raise Unsupported("copy_ from something that is not a tensor")
        if is_lazy(results[0].meta["val"].meta):            # memory holds numbers, not a conjugation to come
            results = [append_call(f, aten.clone.default, tuple(results))]
    elif op is aten.bernoulli_.float:
        results = [draw_in_memory_order(f, bound)]
    elif torch.Tag.nondeterministic_seeded in op.tags and not is_dense(f.env[node.args[0]].fake):
        raise Unsupported(f"{op} draws other numbers for a window than for a whole tensor")
    else:
        results = call_counterpart(f, op, bound)
    pure, contents = results[:len(results) - len(targets)], results[len(results) - len(targets):]
    for target, result in zip(targets, contents):
        if isinstance(target, (list, tuple)):
            for i, t in enumerate(target):
                write(f, f.env[t], append_call(f, operator.getitem, (result, i)))
        elif target is not None:
            write(f, f.env[target], result)
    by_alias = {frozenset(a.alias_info.before_set): t for a, t in zip(written, targets)}
    pure = iter(pure)
    returned = []
    for r in op._schema.returns:
        if r.alias_info is not None:
            returned.append(f.env[by_alias[frozenset(r.alias_info.before_set)]])
        else:
            new = next(pure)
            is_tensor = isinstance(new.meta["val"], FakeTensor)
            returned.append(fresh_alias(new.meta["val"], new) if is_tensor else new)
    f.env[node] = returned[0] if len(returned) == 1 else returned


def draw_in_memory_order(f: Functionalizer, bound: dict) -> fx.Node:
    """`bernoulli_` draws numbers in the order of memory, `bernoulli` row by row whatever the strides of its
    operand. A dropout of a transposed tensor must get the mask it gets in eager."""
    tensor, generator = read_args(f, bound["self"]), bound.get("generator")
    order = memory_order(tensor.meta["val"].shape, tensor.meta["val"].stride())
    if order != sorted(order):
        tensor = append_call(f, aten.permute.default, (tensor, order))
    else:
        order = None
    kwargs = {"generator": generator} if generator else {}
    drawn = append_call(f, aten.bernoulli.p, (tensor, bound.get("p", 0.5)), kwargs)
    return drawn if order is None else append_call(f, aten.permute.default, (drawn, inverse(order)))


def call_counterpart(f: Functionalizer, op, bound: dict) -> list[fx.Node]:
    """Call the functional counterpart of `op` on the arguments `bound` by name; its results."""
    functional, args, kwargs = functional_counterpart(op), [], {}
    for name, keyword_only, default in parameters_of_counterpart(op):
        if not keyword_only:
            args.append(read_args(f, bound[name]) if name in bound else default)
        elif name in bound:
            kwargs[name] = read_args(f, bound[name])
    new, count = append_call(f, functional, tuple(args), kwargs), len(functional._schema.returns)
    return [new] if count == 1 else [append_call(f, operator.getitem, (new, i)) for i in range(count)]

# %% [markdown]
# ## From graph to graph
#
# A result that is a view shows a place in a larger memory, and the caller can see which (`storage_offset`, strides).
# What was last written through it need not be laid out like that, or has no larger memory around it, which then only
# its fake would have; the view is taken once more.
#
# Two graph inputs that share memory are refused when one of them is written: which bytes overlap would have
# to become part of the graph.

# %%
def view_again(f: Functionalizer, alias: Alias) -> fx.Node:
    return alias.memory.value if alias.step is None else \
        emit_step(f, view_again(f, alias.parent), alias.step)


def read_output(f: Functionalizer, x):
    node = read_args(f, x)
    alias = f.env[x] if isinstance(x, fx.Node) else None
    if not isinstance(alias, Alias):
        return node
    val, memory = node.meta["val"], alias.memory.value.meta["val"]
    lies_so = val.storage_offset() == alias.fake.storage_offset() and same_layout(val, alias.fake)
    return node if lies_so and (storage_key(val) == storage_key(memory) or not is_window(val)) else view_again(f, alias)


def copy_constants(f: Functionalizer, results) -> None:
    """`torch.tensor([1.0, 2.0])` is a new tensor at each call, but one constant of the graph. What leaves the graph may be written by
    its receiver: it is a copy, in which results that share memory still do."""
    for x in pytree.tree_leaves(results):
        alias = f.env[x] if isinstance(x, fx.Node) else None
        if isinstance(alias, Alias) and (alias.memory.value.op == "get_attr" or alias.memory.value.target is aten.lift_fresh.default):
            alias.memory.value, alias.memory.version = append_call(f, aten.clone.default, (alias.memory.value,)), alias.memory.version + 1


def keep_gaps(f: Functionalizer, results) -> None:
    """A written value has no gaps, and neither has what `select_scatter` makes of one. Where memory that is made here and leaves the graph
    has some (that of `x[:, ::2].select_scatter(...)`, or of `empty_strided`), its last contents are put between gaps once more."""
    inputs = {id(alias.memory) for alias in f.inputs.values()}
    for x in pytree.tree_leaves(results):
        alias = f.env[x] if isinstance(x, fx.Node) else None
        if not isinstance(alias, Alias) or id(alias.memory) in inputs:
            continue
        while alias.parent is not None:
            alias = alias.parent
        memory, fake = alias.memory, alias.fake
        changed = memory.version > 0 or not same_layout(memory.value.meta["val"], fake)
        if changed and fake.numel() > 0 and not is_dense(fake) and each_has_its_place(fake):
            empty = append_call(f, aten.new_empty_strided.default, (
                memory.value, *([expr_of(s) for s in t] for t in (fake.shape, fake.stride()))))
            memory.value, memory.version = append_call(f, aten.slice_scatter.default, (empty, memory.value)), memory.version + 1


# %% [markdown]
# `functionalize_with_mutations` is the walk. Placeholders and constants are memory that nobody has written yet. At the output,
# inputs whose memory has a later version than at the beginning are those that the program writes, and the results are read,
# after the two corrections above. Then come the refusals. `append_mutations` writes the final contents into the inputs, as last
# nodes: the only writes of the new graph. Of `last.copy_(now)` and then `now.mul_(2)` the final contents of `last` are `now`, as it came
# in, so `last` is written first. If `now` has to be written first as well, since it gets what a third one held, or if the two exchange
# their contents, a copy is made ahead of all writes.

# %%
def functionalize_with_mutations(gm: fx.GraphModule) -> tuple[fx.GraphModule, dict[str, fx.Node]]:
    """A graph that writes nothing, and for each placeholder that `gm` writes (by name) the node of its
    final contents."""
    f = Functionalizer(gm)
    for node in gm.graph.nodes:
        f.current = node
        if node.op in ("placeholder", "get_attr"):
            new = f.graph.node_copy(node)
            f.env[node] = fresh_alias(node.meta["val"], new) if isinstance(node.meta["val"], torch.Tensor) else new
            if isinstance(f.env[node], Alias):
                f.inputs[node.name] = f.env[node]
        elif node.op == "output":
            mutations = {name: alias.memory.value for name, alias in f.inputs.items() if alias.memory.version > 0}
            copy_constants(f, node.args[0])
            keep_gaps(f, node.args[0])
            f.graph.output(pytree.tree_map(lambda x: read_output(f, x), node.args[0]))
        else:
            visit_call(f, node)
    sharing = Counter(storage_key(a.fake) for a in f.inputs.values() if isinstance(a.fake, FakeTensor))
    for name in mutations:
        if not isinstance(f.inputs[name].fake, FakeTensor):
            raise Unsupported("a constant tensor is modified in place")
        if sharing[storage_key(f.inputs[name].fake)] > 1:
            raise Unsupported("two inputs share memory and one of them is modified in place")
        if not each_has_its_place(f.inputs[name].fake):
            raise Unsupported("an input that overlaps itself is modified in place")
    return graph_module(gm, f.graph), mutations


def append_mutations(gm: fx.GraphModule, mutations: dict[str, fx.Node]) -> None:
    """Copy the final contents into each mutated input, as the last nodes of the graph, ahead of others into those that show another one."""
    placeholders = {n.name: n for n in gm.graph.nodes if n.op == "placeholder"}
    written = {storage_key(placeholders[name].meta["val"]): name for name in mutations}
    shown = {name: written.get(storage_key(new.meta["val"]), name) for name, new in mutations.items()}
    first = [name for name in mutations if shown[name] != name]
    output = next(iter(reversed(gm.graph.nodes)))
    b, values = GraphBuilder(gm, gm.graph), dict(mutations)
    with gm.graph.inserting_before(output):
        for name in first:
            if shown[name] in first:
                b.current = values[name]
                values[name] = append_call(b, aten.clone.default, (values[name],))
        for name in sorted(mutations, key=lambda name: name not in first):
            new = values[name]
            copy = gm.graph.call_function(aten.copy_.default, (placeholders[name], new))
            copy_provenance(copy, new).meta["val"] = placeholders[name].meta["val"]


def functionalize(gm: fx.GraphModule) -> fx.GraphModule:
    """The functional graph of a recorded ATen graph; mutated inputs become trailing `copy_` nodes. Raises
    Unsupported for what changes the metadata of a tensor, and for writes whose effect cannot be
    expressed."""
    new, mutations = functionalize_with_mutations(gm)
    append_mutations(new, mutations)
    return new
