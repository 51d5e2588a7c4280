# %% [markdown]
# # Gradients that never arrive
#
# A model that returns `(logits, loss)` is trained through the loss; nobody differentiates the logits. The joint graph
# has a tangent for both, and the engine delivers `None` for one of them. Filling in zeros would be right, and for the
# logits of a language model would cost a gigabyte written and read again.
#
# The backward graph is linear in its tangents, as every derivative is. So `None` can be followed through the graph by
# three rules: what only scales, moves or sums an absent gradient is absent itself; a sum of an absent gradient and another
# is the other; everything else sees zeros. The result is another, smaller backward graph. Gradients of inputs that only
# an absent tangent leads to become `None`, as in eager.
#
# torch.compile decides this when it traces and supposes that every output will be differentiated; what is left of the
# question at run time it answers with zeros.

# %%
from __future__ import annotations

import operator

import torch
from torch import fx

from ..ch01_graphs.graph import copy_provenance, graph_module
from ..ch01_graphs.shapes import expr_of
from .cleanup import eliminate_dead_code

aten = torch.ops.aten

# Operators whose result is zero if the operands at these positions are: linear in them, whatever the other operands are.
LINEAR = {aten.mul.Tensor: (0,), aten.div.Tensor: (0,), aten.neg.default: (0,), aten.clone.default: (0,), aten._to_copy.default: (0,),
          aten.view.default: (0,), aten._unsafe_view.default: (0,), aten.reshape.default: (0,), aten.permute.default: (0,),
          aten.t.default: (0,), aten.transpose.int: (0,), aten.expand.default: (0,), aten.unsqueeze.default: (0,),
          aten.squeeze.dims: (0,), aten.squeeze.dim: (0,), aten.slice.Tensor: (0,), aten.select.int: (0,), aten.as_strided.default: (0,),
          aten.sum.dim_IntList: (0,), aten.sum.default: (0,), aten.detach.default: (0,), aten.mm.default: (0,), aten.bmm.default: (0,),
          aten.threshold_backward.default: (0,), aten.gelu_backward.default: (0,), aten.embedding_dense_backward.default: (0,),
          aten.select_backward.default: (0,), aten.slice_backward.default: (0,), aten.convolution_backward.default: (0,),
          aten._log_softmax_backward_data.default: (0,), aten._softmax_backward_data.default: (0,),
          aten.nll_loss_backward.default: (0,), aten.native_layer_norm_backward.default: (0,),
          aten.native_batch_norm_backward.default: (0,), aten.native_dropout_backward.default: (0,), operator.getitem: (0,),
          aten.where.self: (1, 2)}
COMMUTING = {aten.mul.Tensor, aten.mm.default, aten.bmm.default}      # zero as soon as either operand is


def _is_absent(node: fx.Node, absent: set[fx.Node]) -> bool:
    """Is the value of `node` zero because gradients that it is computed from are?"""
    if node.target in COMMUTING:
        return any(a in absent for a in node.args[:2] if isinstance(a, fx.Node))
    positions = LINEAR.get(node.target)
    return positions is not None and all(isinstance(node.args[p], fx.Node) and
                                         (node.args[p] in absent or p and _is_zero(node.args[p])) for p in positions)


def _is_zero(node: fx.Node) -> bool:
    return node.target is aten.full.default and node.args[1] == 0


def _same_kind(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    return x.shape == y.shape and x.stride() == y.stride() and x.dtype == y.dtype


def without_tangents(gm: fx.GraphModule, names: set[str]) -> fx.GraphModule:
    """The backward graph `gm` for a call in which the tangents called `names` are None. It has no placeholders for them."""
    graph, env, absent = fx.Graph(), {}, set()

    def value(node: fx.Node) -> fx.Node:
        """The copy of `node`; zeros if it is absent but has to be there."""
        if node not in env:
            val = node.meta["val"]
            plain = graph.call_function(aten.full.default, ([expr_of(s) for s in val.shape], 0), {"dtype": val.dtype, "device": val.device})
            copy_provenance(plain, node).meta["val"] = torch.empty_like(val, memory_format=torch.contiguous_format)
            env[node] = plain
        return env[node]

    for node in gm.graph.nodes:
        if node.op == "output":
            break
        operands = node.args[:2]
        if node.op == "placeholder" and node.name in names or node.op == "call_function" and _is_absent(node, absent):
            absent.add(node)
        elif node.target is aten.add.Tensor and not node.kwargs and any(a in absent for a in operands) \
                and all(isinstance(a, fx.Node) for a in operands):
            kept = [a for a in operands if a not in absent]
            if not kept:
                absent.add(node)
            elif _same_kind(kept[0], node):
                env[node] = env[kept[0]]
            else:
                env[node] = graph.node_copy(node, value)
        else:
            env[node] = graph.node_copy(node, value)
    graph.output(tuple(value(g) if isinstance(g, fx.Node) and g not in absent else None for g in node.args[0]))
    result = graph_module(gm, graph)
    eliminate_dead_code(result)
    return result
