# %% [markdown]
# # Gradients that never arrive
#
# A model that returns `(logits, loss)` is trained through the loss; nobody differentiates the logits. The
# joint graph has a tangent for both, and the engine delivers `None` for one of them. Filling in zeros would
# be right, and for the logits of a language model would cost a gigabyte written and read again.
#
# The backward graph is linear in its tangents, as every derivative is. So `None` can be followed through the
# graph by three rules: what only scales, moves or sums absent gradients is absent itself; a sum of an
# absent gradient and another is the other; everything else sees zeros. The result is another, smaller
# backward graph. It is also the right one where a derivative is infinite: eager computes nothing there, and zero times
# infinity is NaN. Gradients that absent tangents lead to and no other are `None`, as in eager, and zeros otherwise.
#
# torch.compile decides this when it traces and supposes that every output will be differentiated; what is
# left of the question at run time it answers with zeros.

# %%
from typing import Iterable

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..ch01_graphs.graph import Graph, copy_provenance, graph_module
from ..ch01_graphs.layouts import inverse, memory_order
from ..ch01_graphs.shapes import expr_of
from ..ch01_graphs.symbolic import present
from .cleanup import eliminate_dead_code, is_always_view
from .rules.operators import JOINS, LINEAR, PRODUCTS, ZEROS

aten = torch.ops.aten


def is_derivative(op) -> bool:
    """Is it a derivative of PyTorch's, whose first operand is the incoming gradient?"""
    schema = getattr(op, "_schema", None)
    return schema is not None and schema.name.endswith("_backward") and schema.arguments[0].name.startswith("grad")


def _is_absent(node: fx.Node, absent: set[fx.Node]) -> bool:
    """Is the value of `node` zero because gradients that it is computed from are?"""
    def is_zero(x):
        return x in absent or isinstance(x, fx.Node) and (
            x.target in ZEROS or x.target is aten.full.default and x.args[1] == 0)

    if node.target in PRODUCTS:
        return any(a in absent for a in node.args[:2])
    if node.target in JOINS:
        return all(map(is_zero, pytree.tree_leaves([node.args[i] for i in JOINS[node.target]])))
    if node.target is aten.masked_fill.Scalar and node.args[2] != 0:
        return False
    return (node.target in LINEAR or is_always_view(node.target) or is_derivative(node.target)) and node.args[0] in absent


def _same_kind(a: fx.Node, b: fx.Node) -> bool:
    """Are the values of `a` and `b` known to agree in shape, strides and dtype? Sizes are compared as expressions: the question
    comes when `backward` runs, too late for a guard on their numbers."""
    x, y = a.meta["val"], b.meta["val"]
    return x.dtype == y.dtype and [expr_of(n) for n in (*x.shape, *x.stride())] == [expr_of(n) for n in (*y.shape, *y.stride())]


def without_tangents(gm: fx.GraphModule, names: set[str], lost: Iterable[int] = ()) -> fx.GraphModule:
    """The backward graph `gm` for a call in which the tangents called `names` are None. It has no
    placeholders for them. lost: the positions of gradients that are None then, in eager."""
    graph, env, absent = Graph(), {}, set()

    def value(node: fx.Node) -> fx.Node:
        """The copy of `node`; zeros that lie as it does if it is absent but has to be there."""
        if node not in env:
            val = node.meta["val"]
            order = memory_order(*(list(map(present, form)) for form in (val.shape, val.stride())))
            sizes, kind = [expr_of(val.shape[d]) for d in order], {"dtype": val.dtype, "device": val.device}
            zeros = env[node] = copy_provenance(graph.call_function(aten.full.default, (sizes, 0), kind), node)
            zeros.meta["val"] = torch.empty_like(val.permute(order), memory_format=torch.contiguous_format)
            if order != sorted(order):
                env[node] = copy_provenance(graph.call_function(aten.permute.default, (zeros, inverse(order))), node)
                env[node].meta["val"] = zeros.meta["val"].permute(inverse(order))
        return env[node]

    for node in gm.graph.nodes:
        if node.op == "output":
            break
        kept = None
        is_sum = node.target is aten.add.Tensor and not node.kwargs
        if is_sum and all(isinstance(a, fx.Node) for a in node.args):
            kept = [a for a in node.args if a not in absent]
        if node.name in names or _is_absent(node, absent):
            absent.add(node)
        elif kept is not None and len(kept) == 1 and _same_kind(kept[0], node):
            env[node] = env[kept[0]]
        else:
            env[node] = graph.node_copy(node, value)
    graph.output(tuple(None if g is None or i in lost else value(g) for i, g in enumerate(node.args[0])))
    result = graph_module(gm, graph)
    eliminate_dead_code(result)
    return result
