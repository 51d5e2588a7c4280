# %% [markdown]
# # Cleaning up: dead code and common subexpressions
#
# On a functional graph both are a few lines, which is the point of functional graphs. The traced graph
# needs them: functionalization leaves views that nobody reads, and the autograd engine computes the same
# transpose or cast in forward and in backward. So does the author of
#
#     def spread(x):
#         squares = (x - x.mean(1, keepdim=True)).square()
#         return squares * (x - x.mean(1, keepdim=True)).sum()
#
# whose trace has seven nodes, two for the mean of the rows and two that subtract it. `clean` leaves five:
#
#     x: f32[4, 8] = input
#     mean_dim: f32[4, 1] = aten.mean.dim(x, [1], True)
#     sub_tensor: f32[4, 8] = aten.sub.Tensor(x, mean_dim)
#     pow_tensor_scalar: f32[4, 8] = aten.pow.Tensor_Scalar(sub_tensor, 2)
#     sum_default: f32[] = aten.sum.default(sub_tensor)
#     mul_tensor: f32[4, 8] = aten.mul.Tensor(pow_tensor_scalar, sum_default)
#     return (mul_tensor,)
#
# Three kinds of node are not only values. Copies into inputs are effects. An operator that draws random
# numbers advances the generator: dropping one, merging two, or reordering them would give every later draw
# other numbers than eager gives. And an operator that looks at its numbers may refuse them: `table[indices]` raises
# for an index out of range, also where nobody uses the result. On a GPU nothing is raised, or later and
# for the whole process, so there such a node may go. It may also go where it is not the program that calls it
# (it is not marked `asked`): a derivative looks at indices that forward has looked at.

# %%
import functools
import operator

import torch
from torch import fx

from ..ch01_graphs.fake import FakeTensor, storage_key
from ..ch01_graphs.graph import together
from ..ch01_graphs.operators import NAMESPACES
from .rules.operators import REFUSING, REFUSING_INTEGERS, ZEROS
from .schemas import argument_of

aten = torch.ops.aten


@functools.cache
def may_draw(op) -> bool:
    return isinstance(op, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in op.tags


@functools.cache
def writes_or_checks(op) -> bool:
    return op._schema.is_mutable or not op._schema.returns


def is_random(node: fx.Node) -> bool:
    """True if the node draws from a random generator. Attention and dropout do only with a probability, and in training."""
    op = node.target
    if not may_draw(op):
        return False
    if op is aten.native_dropout.default:
        return argument_of(node, "train") is not False
    return not any(a.name == "dropout_p" for a in op._schema.arguments) or argument_of(node, "dropout_p") != 0.0


def may_refuse(node: fx.Node) -> bool:
    """Whether the program asks for what the operator may decline to do, depending on the numbers that it is given."""
    if "asked" not in node.meta or "backward" in node.meta or not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = node.target._schema.name.removeprefix("aten::")
    if name not in REFUSING and name not in REFUSING_INTEGERS and node.target.namespace in NAMESPACES:
        return False
    operands = [n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    if not operands or any(t.device.type != "cpu" for t in operands):
        return False
    if name in REFUSING_INTEGERS:
        divisor = node.args[1] if len(node.args) > 1 else None
        refused = isinstance(divisor, fx.Node) or isinstance(divisor, (int, float)) and divisor <= 0
        return refused and not any(t.is_floating_point() or t.is_complex() for t in operands)
    return True


def has_effect(node: fx.Node) -> bool:
    """True for a node that must stay even if nothing reads it: it draws, writes, only checks, or may refuse and is not read."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return is_random(node) or writes_or_checks(node.target) or not node.users and may_refuse(node)


def eliminate_dead_code(gm: fx.GraphModule) -> None:
    for node in reversed(gm.graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users and not has_effect(node):
            gm.graph.erase_node(node)

# %% [markdown]
# The second `mean` has the same operator and the same operand as the first, so its readers are given the first; now the two
# subtractions have equal operands, and are equal in their turn. One walk in the order of the graph finds both.
#
# Two nodes compute the same if they apply the same operator to the same arguments. Python says `1 == 1.0 ==
# True`; the operators do not, so types are part of the key. Fresh uninitialised memory is never merged. Nor are zeros that are a
# gradient: one that nobody asks for is left out later, with what is computed from it (`undefined.py`), and another stays.

# %%
UNIQUE = {aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default,
          aten.new_empty.default, aten.new_empty_strided.default}


def is_zero_gradient(node: fx.Node) -> bool:
    """Is it zeros that a derivative gives?"""
    return "tangents" in node.meta and (node.target in ZEROS or node.target is aten.full.default and node.args[1] == 0)


def is_unique(node: fx.Node) -> bool:
    return node.target in UNIQUE or is_zero_gradient(node)


def _key(argument):
    if type(argument) is fx.Node:
        return argument
    if isinstance(argument, (list, tuple)):
        return tuple([_key(a) for a in argument])
    if isinstance(argument, dict):
        return tuple((k, _key(v)) for k, v in sorted(argument.items()))
    return type(argument), repr(argument) if isinstance(argument, (float, complex)) else argument  # -0.0 is not 0.0


# %% tags=["exercise:merge-cse"]
def merge_common_subexpressions(gm: fx.GraphModule) -> None:
    """Keep the first of all call_function nodes with equal target, arguments and keyword arguments (equal by
    `_key`), in place: readers of a later one read the first, the later one is erased, and its origins,
    location (`together`) and tangents (if both have these) are added to those of the first. Nodes that
    are unique (`is_unique`), nodes with an effect, and nodes whose key cannot be hashed stay. A node whose operands have become equal
    by merging is merged, too."""
    seen: dict = {}
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or is_unique(node) or has_effect(node):
            continue
        try:
            earlier = seen.setdefault((node.target, _key(node.args), _key(node.kwargs)), node)
        except TypeError:
            continue
        if earlier is not node:
            origins = earlier.meta.get("origins", ()) + node.meta.get("origins", ())
            earlier.meta["origins"] = tuple(dict.fromkeys(origins))
            earlier.meta["location"] = together([n.meta.get("location") for n in (earlier, node)])
            behind = earlier.meta.pop("tangents", None), node.meta.get("tangents")
            if all(behind):
                earlier.meta["tangents"] = set.union(*behind)
            node.replace_all_uses_with(earlier)
            gm.graph.erase_node(node)


# %% [markdown]
# Fakes say who shares memory with whom. Views of a node that was erased show the memory of the node that
# stands for it now, and their fakes have to say so.

# %%
def renew_views(gm: fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        if node.target is operator.getitem:
            base = node.args[0].meta["val"][node.args[1]]
        elif is_always_view(node.target):
            base = node.args[0].meta["val"]
        else:
            continue
        node.meta["val"] = rebase(node.meta["val"], base)


@functools.cache
def is_always_view(op) -> bool:
    """A view by its schema. (Composite operators such as `reshape` say so, too, and sometimes copy.)"""
    if not isinstance(op, torch._ops.OpOverload) or op._schema.is_mutable:
        return False
    composite = op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    return op is aten._unsafe_view.default or \
        not composite and any(r.alias_info is not None for r in op._schema.returns)


def rebase(val, base):
    """The fake `val` (or fakes) in the memory of `base`."""
    if isinstance(val, (list, tuple)):
        return type(val)([rebase(v, base) for v in val])
    if not (isinstance(val, FakeTensor) and isinstance(base, FakeTensor)) or val.dtype != base.dtype \
            or storage_key(val) == storage_key(base):
        return val
    return FakeTensor(base.meta.as_strided(val.shape, val.stride(), val.storage_offset()), val.device)

# %% [markdown]
# A graph is cleaned in this order: equal nodes become one, their views follow them, and what nobody reads goes.

# %%
def clean(gm: fx.GraphModule) -> fx.GraphModule:
    """All of them, in place."""
    merge_common_subexpressions(gm)
    renew_views(gm)
    eliminate_dead_code(gm)
    return gm
