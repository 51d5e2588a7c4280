# %% [markdown]
# # Channels last
#
# PyTorch's default layout of images is NCHW: one plane per channel. Tensor cores multiply matrices, and a
# convolution becomes a matrix product most directly when the channels of one pixel lie next to each other,
# NHWC. cuDNN therefore transposes NCHW tensors before and after each convolution, and on ResNet-50 the
# transposes cost more than the convolutions save.
#
# A user can avoid them with `model.to(memory_format=torch.channels_last)`. A compiler can do it without being
# asked, because layout is not part of what a program means, except at its borders. The whole pass is one
# insertion: ask for channels-last inputs and weights at each convolution. The request costs a copy only where
# the layout really changes. Everything between convolutions follows by itself: the fake output of a
# channels-last convolution is channels last, pointwise operators and batch norm keep the layout of their
# input, and so every later request is already satisfied. At the graph's outputs the layout that the user
# would have seen is restored.
#
# torch.compile's Inductor has the same optimization. It first estimates whether it pays; we apply it on GPUs
# wherever all convolutions of a graph are ordinary two-dimensional ones, which is where it always did in our
# measurements.

# %%
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import fx

CONVOLUTIONS = {F.conv2d, torch.conv2d}


def _wants_channels_last(node: fx.Node) -> bool:
    operands = [a.meta.get("val") for a in node.args[:2] if isinstance(a, fx.Node)]
    groups = node.kwargs.get("groups", node.args[6] if len(node.args) > 6 else 1)
    return (len(operands) == 2 and all(isinstance(o, torch.Tensor) and o.is_cuda for o in operands)
            and operands[0].dim() == 4 and groups == 1)


# %% tags=["exercise:channels-last"]
def convolutions_to_channels_last(gm: fx.GraphModule) -> fx.GraphModule:
    """Ask for channels-last operands at each 2-d convolution of a captured graph (changed in place), and
    restore contiguous outputs. Does nothing unless every convolution is on a GPU and ungrouped."""
    convolutions = [n for n in gm.graph.nodes if n.op == "call_function" and n.target in CONVOLUTIONS]
    if not convolutions or not all(map(_wants_channels_last, convolutions)):
        return gm
    for node in convolutions:
        with gm.graph.inserting_before(node):
            for position in (0, 1):
                operand = node.args[position]
                moved = gm.graph.call_method("contiguous", (operand,), {"memory_format": torch.channels_last})
                moved.meta.update(node.meta, val=operand.meta["val"])
                node.update_arg(position, moved)
    output = next(n for n in gm.graph.nodes if n.op == "output")
    restored = []
    for value in output.args[0]:
        fake = value.meta.get("val") if isinstance(value, fx.Node) and value.op != "placeholder" else None
        if isinstance(fake, torch.Tensor) and fake.dim() == 4 and fake.is_contiguous():
            with gm.graph.inserting_before(output):
                contiguous = gm.graph.call_method("contiguous", (value,))
                contiguous.meta.update(value.meta)
            restored.append(contiguous)
        else:
            restored.append(value)
    output.args = (tuple(restored),)
    gm.recompile()
    return gm
