# %% [markdown]
# # Gradients that never arrive
#
# A model that returns `(logits, loss)` is trained through the loss; nobody differentiates the logits. The
# joint graph has a tangent for both, and the engine delivers `None` for one of them. Filling in zeros would
# be right, and for the logits of a language model would cost a gigabyte written and read again.
#
# The backward graph is linear in its tangents, as every derivative is. So `None` can be followed through the
# graph by three rules: what only scales, moves or sums an absent gradient is absent itself; a sum of an
# absent gradient and another is the other; everything else sees zeros. The result is another, smaller
# backward graph. Gradients that absent tangents lead to and no other are `None`, as in eager, and zeros otherwise.
#
# torch.compile decides this when it traces and supposes that every output will be differentiated; what is
# left of the question at run time it answers with zeros.

# %%
from __future__ import annotations

import operator
from typing import Iterable

import torch
from torch import fx

from ..ch01_graphs.graph import copy_provenance, graph_module
from ..ch01_graphs.shapes import expr_of
from .cleanup import eliminate_dead_code

aten = torch.ops.aten

# Operators that are linear in their first operand: zero if it is, whatever the others are.
LINEAR = {
    aten.div.Tensor, aten.neg.default, aten.clone.default, aten._to_copy.default, aten.detach.default,
    aten.sum.default, aten.sum.dim_IntList, operator.getitem,
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.as_strided.default,
    aten.t.default, aten.transpose.int, aten.permute.default, aten.expand.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.slice.Tensor, aten.select.int,
    aten.select_backward.default, aten.slice_backward.default, aten.threshold_backward.default,
    aten.gelu_backward.default, aten._softmax_backward_data.default, aten._log_softmax_backward_data.default,
    aten.nll_loss_backward.default, aten.embedding_dense_backward.default, aten.convolution_backward.default,
    aten.native_layer_norm_backward.default, aten.native_batch_norm_backward.default,
    aten.native_dropout_backward.default, aten.tanh_backward.default, aten.sigmoid_backward.default,
    aten.mul.Scalar, aten.div.Scalar, aten.flip.default, aten.index.Tensor, aten.masked_fill.Scalar,
}
ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default}
PRODUCTS = {aten.mul.Tensor, aten.mm.default, aten.bmm.default}      # zero as soon as either operand is


def _is_absent(node: fx.Node, absent: set[fx.Node]) -> bool:
    """Is the value of `node` zero because gradients that it is computed from are?"""
    def is_zero(x):
        return x in absent or isinstance(x, fx.Node) and (
            x.target in ZEROS or x.target is aten.full.default and x.args[1] == 0)

    if node.target in PRODUCTS:
        return any(a in absent for a in node.args[:2])
    if node.target is aten.where.self:
        return all(map(is_zero, node.args[1:3]))
    if node.target is aten.index_put.default:
        return is_zero(node.args[0]) and node.args[2] in absent
    if node.target is aten.masked_fill.Scalar and node.args[2] != 0:
        return False
    return node.target in LINEAR and node.args[0] in absent


def _same_kind(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    return x.shape == y.shape and x.stride() == y.stride() and x.dtype == y.dtype


def without_tangents(gm: fx.GraphModule, names: set[str], lost: Iterable[int] = ()) -> fx.GraphModule:
    """The backward graph `gm` for a call in which the tangents called `names` are None. It has no
    placeholders for them. lost: the positions of gradients that are None then, in eager."""
    graph, env, absent = fx.Graph(), {}, set()

    def value(node: fx.Node) -> fx.Node:
        """The copy of `node`; zeros if it is absent but has to be there."""
        if node not in env:
            val = node.meta["val"]
            sizes, kind = [expr_of(s) for s in val.shape], {"dtype": val.dtype, "device": val.device}
            env[node] = copy_provenance(graph.call_function(aten.full.default, (sizes, 0), kind), node)
            env[node].meta["val"] = torch.empty_like(val, memory_format=torch.contiguous_format)
        return env[node]

    for node in gm.graph.nodes:
        if node.op == "output":
            break
        kept = None
        is_sum = node.target is aten.add.Tensor and not node.kwargs
        if is_sum and all(isinstance(a, fx.Node) for a in node.args):
            kept = [a for a in node.args if a not in absent]
        if node.name in names or _is_absent(node, absent) or kept == []:
            absent.add(node)
        elif kept is not None and len(kept) == 1 and _same_kind(kept[0], node):
            env[node] = env[kept[0]]
        else:
            env[node] = graph.node_copy(node, value)
    graph.output(tuple(None if g is None or i in lost else value(g) for i, g in enumerate(node.args[0])))
    result = graph_module(gm, graph)
    eliminate_dead_code(result)
    return result
