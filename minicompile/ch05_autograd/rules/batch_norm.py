# %% [markdown]
# # An operator whose schema lies
#
# What an operator writes, and what it would be called if it wrote nothing, its schema says (`schemas.py`).
# Batch norm is the one whose schema lies: `native_batch_norm` updates the running statistics and
# does not say so. Its backward takes them too, though in training it does not read them; naming them there
# would keep their old values alive for nothing.

# %%
import operator

import torch
from torch import fx

from ..aliases import append_call, write
from ..functionalize import VISITORS, read_args, visit_pure

aten = torch.ops.aten


@VISITORS.of(aten.native_batch_norm.default)
def visit_batch_norm(f, node: fx.Node):
    training, statistics = node.args[5], node.args[3:5]
    if not training or None in statistics:
        return visit_pure(f, node)
    op = aten._native_batch_norm_legit_functional.default
    f.env[node] = new = append_call(f, op, read_args(f, node.args))
    for statistic, position in zip(statistics, (3, 4)):
        write(f, f.env[statistic], append_call(f, operator.getitem, (new, position)))


@VISITORS.of(aten.native_batch_norm_backward.default)
def visit_batch_norm_backward(f, node: fx.Node):
    training = node.args[7]
    args = read_args(f, (*node.args[:3], None, None, *node.args[5:]) if training else node.args)
    f.env[node] = append_call(f, node.target, args, val=node.meta["val"])
