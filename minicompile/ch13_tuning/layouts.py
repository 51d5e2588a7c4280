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
# input, and so every later request is already satisfied. Where the program would see the difference, the layout
# that it expects is restored.
#
# torch.compile's Inductor has the same optimization. It first estimates whether it pays; we apply it on GPUs
# wherever all convolutions of a graph are ordinary two-dimensional ones, which is where it always did in our
# measurements.

# %%
from itertools import takewhile

import torch
import torch.nn.functional as F
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from ..ch01_graphs.fake import FakeTensor, storage_key
from ..ch01_graphs.graph import call_node, interpret
from ..ch01_graphs.layouts import memory_order
from ..ch01_graphs.symbolic import present
from ..ch03_capture.constants import name_of_target
from ..ch03_capture.storage import AS_STRIDED
from ..ch12_training.engine import gradients

CONVOLUTIONS = {F.conv2d, torch.conv2d}


def operands_of(node: fx.Node) -> list[fx.Node]:
    """The image and the weights of a convolution, by position or by name."""
    given = (*node.args[:2], *(node.kwargs[name] for name in ("input", "weight") if name in node.kwargs))
    return [a for a in given if isinstance(a, fx.Node)]


def _wants_channels_last(node: fx.Node) -> bool:
    operands = [a.meta.get("val") for a in operands_of(node)]
    groups = node.kwargs.get("groups", node.args[6] if len(node.args) > 6 else 1)
    return (len(operands) == 2 and all(isinstance(o, torch.Tensor) and o.is_cuda for o in operands)
            and operands[0].dim() == 4 and groups == 1)


# %% tags=["exercise:channels-last"]
def convolutions_to_channels_last(gm: fx.GraphModule) -> fx.GraphModule:
    """Ask for channels-last operands at each 2-d convolution of a captured graph (changed in place). Does nothing
    unless every convolution is on a GPU and ungrouped."""
    convolutions = [n for n in gm.graph.nodes if n.op == "call_function" and n.target in CONVOLUTIONS]
    if not convolutions or not all(map(_wants_channels_last, convolutions)):
        return gm
    for node in convolutions:
        with gm.graph.inserting_before(node):
            for operand in operands_of(node):
                moved = gm.graph.call_method("contiguous", (operand,), {"memory_format": torch.channels_last})
                moved.meta.update(node.meta, val=operand.meta["val"])
                node.replace_input_with(operand, moved)
    gm.recompile()
    return gm

# %% [markdown]
# The first convolution of a network reads an image of three channels, too few to fill a tensor core in any order. A vision
# transformer has no other convolution, so there is nothing to gain, and something to lose: PyTorch lets cuDNN compute convolutions of
# float32 in TF32, with ten bits of mantissa, and for such a one cuDNN does so in channels last where it computes exactly in NCHW
# (errors of 3e-4 against 5e-7 on an H200).

# %%
def reads_many_channels(gm: fx.GraphModule) -> bool:
    """Whether some convolution of a captured graph has as many input channels as fill a tensor core's rows of 16 bytes."""
    images = [operands[0].meta["val"] for n in gm.graph.nodes if n.target in CONVOLUTIONS and (operands := operands_of(n))]
    return any(present(image.shape[1]) >= 8 for image in images if image.dim() == 4)

# %% [markdown]
# ## Who sees the layout
#
# A program sees where elements lie in four ways. It gets a tensor as a result, and asks for its strides. It calls
# `view`, which fails where `reshape` would copy. It writes to a tensor that in eager shares its memory with another,
# `y.flatten(1).mul_(2)`, and now does not, because `flatten` had to copy; or the other way round, a `contiguous()` that made a copy
# finds nothing to do. Or an operator that we know nothing about reads the memory itself.
#
# To find such places, the changed graph is run on fakes, and each result is compared with the fake that capture left on the
# node. A tensor whose strides are others is *turned*. All tensors that share a memory, a tensor and its views, are one
# group, and the first node of a group is where a layout can be restored: behind it stands a copy, and those that
# see the layout read the copy. If the group is written later, all read the copy, so that there is one memory as before.

# %%
def reads_memory(node: fx.Node) -> bool:
    """Whether the node reads memory by itself: as_strided and its kin, or an operator that is not PyTorch's."""
    target = getattr(node.target, "default", node.target)
    return getattr(target, "namespace", "aten") != "aten" or name_of_target(node.target) in AS_STRIDED


def memories(value) -> set[int]:
    return {storage_key(t) for t in tree_leaves(value) if isinstance(t, FakeTensor)}


def strides(t: FakeTensor) -> tuple:
    return tuple(present(s) for n, s in zip(t.shape, t.stride()) if present(n) != 1)

# %% [markdown]
# The run notes three things for each node: its value, which memories it writes, and whether it failed. After a failure it goes
# on with the value that capture saw. What reads no tensor is not run: it would make a real one, and `torch.rand` would draw from
# the program's random numbers. It gets a fake like that of capture. `ours` are the requests and the copies that restored a layout
# before; they belong to no group.

# %%
def alike(val):
    """Fakes with memory of their own that lie as those of capture do."""
    return tree_map(lambda t: FakeTensor(torch.empty_like(t.meta), t.device) if isinstance(t, FakeTensor) else t, val)


class Turned:
    """A changed graph, run on fakes. values: what each node gives; written: memory (of capture's fakes) -> position of the last node
    that writes it; seen: the memories whose layout some node sees; joined: the copies that have nothing to copy and should."""

    def __init__(self, gm: fx.GraphModule, inputs, ours: set[fx.Node]):
        self.gm, self.ours, self.values, self.written, self.seen, self.joined = gm, ours, {}, {}, set(), set()
        self.position = {node: i for i, node in enumerate(gm.graph.nodes)}
        fakes = [FakeTensor(t.meta.detach(), t.device) if isinstance(t, torch.Tensor) else t for t in inputs]
        self.values.update(zip(gm.graph.find_nodes(op="placeholder"), fakes))
        with torch.no_grad():
            interpret(gm, fakes, self.call)
        self.parted_or_joined()

    def call(self, node: fx.Node, args, kwargs):
        operands = [(a, self.values[a]) for a in node.all_input_nodes if isinstance(self.values.get(a), FakeTensor)]
        versions = [value._version for _, value in operands]
        turned = set().union(*(memories(a.meta["val"]) for a, _ in operands if self.is_turned(a)))
        if reads_memory(node):
            self.seen |= turned
        try:
            if node.target is gradients:
                value = node.meta["val"]
            else:
                reads = any(memories(self.values.get(a)) for a in node.all_input_nodes)
                value = call_node(self.gm, node, args, kwargs) if reads else alike(node.meta["val"])
        except RuntimeError:
            self.seen |= turned
            value = node.meta["val"]
        for (a, operand), version in zip(operands, versions):
            if operand._version != version:
                self.written.update(dict.fromkeys(memories(a.meta["val"]), self.position[node]))
        self.values[node] = value
        return value

    def is_turned(self, node: fx.Node) -> bool:
        val, value = node.meta.get("val"), self.values.get(node)
        return node not in self.ours and isinstance(val, FakeTensor) and isinstance(value, FakeTensor) and strides(val) != strides(value)

    def parted_or_joined(self) -> None:
        """What was one memory and is two, or was two and is one (a copy that has nothing to copy any more), is seen where it is
        written afterwards or leaves in two results."""
        results = [n for n in next(iter(self.gm.graph.find_nodes(op="output"))).args[0] if isinstance(n, fx.Node)]
        for node in filter(self.is_turned, results):
            self.seen |= memories(node.meta["val"])
        was, now = ({node: memories(v) for node, v in values} for values in (
            [(node, node.meta.get("val")) for node in self.values], self.values.items()))
        for node in self.values:
            for a in node.all_input_nodes if node not in self.ours else ():
                one, other, together = was[node], was[a], bool(now[node] & now[a])
                if a not in self.ours and together != bool(one & other):
                    leaving = [{id(n.meta["val"]) for n in results if was[n] & m} for m in (one, other)]
                    both = all(leaving) if together else len(leaving[0] | leaving[1]) > 1
                    if both or any(self.written.get(m, -1) > self.position[node] for m in one | other):
                        self.seen |= other
                        self.joined |= {node} if together else set()

# %% [markdown]
# A layout is restored behind the node that made the memory, or behind the in-place operators that directly follow it, as
# `relu_` follows a batch norm. Restoring may turn what comes after, or turn it back, so the graph is run again until nothing is
# seen.
#
# In each round `places` gives the memories that somebody sees turned, with the nodes that made them, and `restored` puts three
# nodes behind the last of these: a permutation into the order of memory that capture saw, a copy, and the way back. Then those
# who see the layout, or all where the memory is written later, read the copy.

# %%
def keep_layouts(gm: fx.GraphModule, inputs) -> None:
    """Restore the layouts that the program of a graph sees, after `convolutions_to_channels_last` (changed in place). inputs: its fakes."""
    convolutions = [n for n in gm.graph.nodes if n.target in CONVOLUTIONS]
    ours = {a for n in convolutions for a in operands_of(n) if a.target == "contiguous"}
    while ours and (groups := places(run := Turned(gm, inputs, ours))):
        for memory, made in groups:
            copies = restored(gm, made[-1])
            ours.update(copies)
            everywhere = run.written.get(memory, -1) > run.position[made[-1]]
            for user in [u for n in made for u in n.users if run.position.get(u, -1) > run.position[made[-1]]]:
                if everywhere or user.op == "output" or user in run.joined or reads_memory(user) or \
                        memory in memories(user.meta.get("val")) and user not in ours:
                    for node in made:
                        user.replace_input_with(node, copies[-1])
        gm.recompile()


def places(run: Turned) -> list[tuple[int, list[fx.Node]]]:
    """For each group whose layout is seen, its memory and the nodes that made it: the first, and in-place operators after it."""
    groups = {}
    for node in run.position:
        val = node.meta.get("val")
        if isinstance(val, FakeTensor) and node not in run.ours and storage_key(val) in run.seen:
            groups.setdefault(storage_key(val), []).append(node)
    return [(memory, list(takewhile(lambda n: n.meta["val"] is nodes[0].meta["val"], nodes)))
            for memory, nodes in groups.items() if run.is_turned(nodes[0])]


def restored(gm: fx.GraphModule, node: fx.Node) -> list[fx.Node]:
    """New nodes after `node`, the last of which has its elements in the order of capture's fake."""
    val, nodes = node.meta["val"], [node]
    order = memory_order([present(n) for n in val.shape], [present(s) for s in val.stride()])
    back = sorted(range(val.dim()), key=order.__getitem__)
    for target, args in (("permute", order), ("contiguous", ()), ("permute", back)):
        if target == "contiguous" or order != back or order != sorted(order):
            with gm.graph.inserting_after(nodes[-1]):
                nodes.append(gm.graph.call_method(target, (nodes[-1], *args)))
            nodes[-1].meta.update(node.meta)
    return nodes[1:]
