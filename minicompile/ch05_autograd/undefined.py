# %% [markdown]
# # Gradients that never arrive
#
# A model that returns `(logits, loss)` is trained through the loss; nobody differentiates the logits. The
# joint graph has a tangent for both, and the engine delivers `None` for one of them. Filling in zeros would
# be right, and for the logits of a language model would cost a gigabyte written and read again.
#
# Eager computes nothing there. Its engine runs a derivative only if some gradient reaches it, and the recording knows for each
# derivative which tangents lead to it: each node that it added to the graph bears their numbers. If all of these are `None`, the node
# and what is computed from it are *absent*: they are left out. The sum of an absent gradient and another is the other, and a derivative
# that some gradient reaches sees zeros in place of what is absent. The result is another, smaller backward graph, and the right one where
# a derivative is infinite: zeros times infinity are NaN, absent or not. Zeros that a derivative gives are numbers like others, if it runs.
# Gradients that absent tangents lead to and no other are `None`, as in eager, and zeros otherwise.
#
# The backward graph of
#
#     def two_results(x, w):
#         logits = torch.tanh(x * w)
#         return logits, (logits * 3).sum()
#
# has a tangent for each result, and adds up what comes from the two:
#
#     tangent0: f32[4] = input
#     tangent1: f32[] = input
#     expand_default: f32[4] = aten.expand.default(tangent1, [4])
#     mul_tensor_2: f32[4] = aten.mul.Tensor(expand_default, 3)
#     add_tensor: f32[4] = aten.add.Tensor(tangent0, mul_tensor_2)
#     mul_tensor_3: f32[4] = aten.mul.Tensor(tanh_default, tanh_default)
#     sub_tensor: f32[4] = aten.sub.Tensor(1, mul_tensor_3)
#     mul_tensor_4: f32[4] = aten.mul.Tensor(add_tensor, sub_tensor)
#     mul_tensor_5: f32[4] = aten.mul.Tensor(mul_tensor_4, x)
#     return (mul_tensor_5,)
#
# Without `tangent0`, which nobody gives if only the sum is differentiated, the sum of the two is its other operand:
#
#     tangent1: f32[] = input
#     expand_default: f32[4] = aten.expand.default(tangent1, [4])
#     mul_tensor_2: f32[4] = aten.mul.Tensor(expand_default, 3)
#     mul_tensor_3: f32[4] = aten.mul.Tensor(tanh_default, tanh_default)
#     sub_tensor: f32[4] = aten.sub.Tensor(1, mul_tensor_3)
#     mul_tensor_4: f32[4] = aten.mul.Tensor(mul_tensor_2, sub_tensor)
#     mul_tensor_5: f32[4] = aten.mul.Tensor(mul_tensor_4, x)
#     return (mul_tensor_5,)
#
# torch.compile decides this when it traces and supposes that every output will be differentiated; what is
# left of the question at run time it answers with zeros.

# %%
import operator
from typing import Iterable

import torch
from torch import fx

from ..ch01_graphs.graph import graph_module
from ..ch01_graphs.layouts import inverse, memory_order
from ..ch01_graphs.shapes import expr_of
from ..ch01_graphs.symbolic import present
from .aliases import GraphBuilder, append_call
from .cleanup import eliminate_dead_code, is_always_view, is_zero_gradient

aten = torch.ops.aten

# %% [markdown]
# ## Which tangents lead to a node
#
# `_behind` collects the numbers that the recording has left. Two things are known otherwise.
# The engine adds gradients between two derivatives, so the numbers on such a sum say little, and those of
# its operands count as well. And a node that was put in to give a gradient its form, a view or a copy, has no number: it is absent if what
# it reads is.

# %%
def _behind(gm: fx.GraphModule) -> dict[fx.Node, set[int]]:
    """For each node that was recorded in a derivative the positions of the tangents that lead there; for a sum, those of its operands,
    too: the engine adds gradients between two derivatives."""
    behind = {node: {i} for i, node in enumerate(n for n in gm.graph.nodes if "tangent" in n.meta)}
    shown = dict(behind)                # of forms as well
    for node in gm.graph.nodes:
        if "tangents" in node.meta:
            of_operands = node.all_input_nodes if node.target is aten.add.Tensor else ()
            behind[node] = shown[node] = node.meta["tangents"].union(*(shown.get(a, ()) for a in of_operands))
        elif _is_form(node) and node.args[0] in shown:
            shown[node] = shown[node.args[0]]
    return behind


def _is_form(node: fx.Node) -> bool:
    return node.target in (aten.clone.default, operator.getitem) or is_always_view(node.target)


# %% [markdown]
# A node is absent if all the tangents that lead to it are, and it reads something absent or is a zero that stands for it. A sum of
# two absent gradients is absent whatever its numbers say.

# %%
def _is_absent(node: fx.Node, absent: set[fx.Node], behind: set[int] | None, positions: set[int]) -> bool:
    """Is `node` part of a derivative that no tangent reaches when those at `positions` are None?"""
    reads = not absent.isdisjoint(node.all_input_nodes)
    if behind is None:
        return reads and _is_form(node)
    if node.target is aten.add.Tensor and all(a in absent for a in node.args):
        return True
    return behind <= positions and (reads or is_zero_gradient(node))


def _same_kind(a: fx.Node, b: fx.Node) -> bool:
    """Are the values of `a` and `b` known to agree in shape, strides and dtype? Sizes are compared as expressions: the question
    comes when `backward` runs, too late for a guard on their numbers."""
    x, y = a.meta["val"], b.meta["val"]
    return x.dtype == y.dtype and [expr_of(n) for n in (*x.shape, *x.stride())] == [expr_of(n) for n in (*y.shape, *y.stride())]


# %% [markdown]
# ## The smaller graph
#
# The nodes are copied in order. What is absent is left out, and a sum with one operand left is that operand, if it has the same form. Where
# a derivative that runs reads something absent, `value` makes zeros for it, which lie in memory as the missing tensor would.

# %%
def without_tangents(gm: fx.GraphModule, names: set[str], lost: Iterable[int] = ()) -> fx.GraphModule:
    """The backward graph `gm` for a call in which the tangents called `names` are None. It has no
    placeholders for them. lost: the positions of gradients that are None then, in eager."""
    b, env, absent, behind = GraphBuilder(gm), {}, set(), _behind(gm)
    positions = set().union(*(behind[n] for n in gm.graph.nodes if n.name in names))

    def value(node: fx.Node) -> fx.Node:
        """The copy of `node`; zeros that lie as it does if it is absent but has to be there."""
        if node not in env:
            val, b.current = node.meta["val"], node
            order = memory_order(*(list(map(present, form)) for form in (val.shape, val.stride())))
            sizes, kind = [expr_of(val.shape[d]) for d in order], {"dtype": val.dtype, "device": val.device}
            zeros = append_call(b, aten.full.default, (sizes, 0), kind)
            env[node] = zeros if order == sorted(order) else append_call(b, aten.permute.default, (zeros, inverse(order)))
        return env[node]

    for node in gm.graph.nodes:
        if node.op == "output":
            break
        kept = None
        is_sum = node.target is aten.add.Tensor and not node.kwargs
        if is_sum and all(isinstance(a, fx.Node) for a in node.args):
            kept = [a for a in node.args if a not in absent]
        if node.name in names or _is_absent(node, absent, behind.get(node), positions):
            absent.add(node)
        elif kept is not None and len(kept) == 1 and _same_kind(kept[0], node):
            env[node] = env[kept[0]]
        else:
            env[node] = b.graph.node_copy(node, value)
    b.graph.output(tuple(None if g is None or i in lost else value(g) for i, g in enumerate(node.args[0])))
    result = graph_module(gm, b.graph)
    eliminate_dead_code(result)
    return result
