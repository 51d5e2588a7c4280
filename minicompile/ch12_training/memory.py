# %% [markdown]
# # What forward keeps, inside one graph
#
# In one graph nothing has to be carried from forward to backward: backward reads what forward has computed, and a
# value dies after its last reader. That sounds like less memory than two graphs need, and is more. The
# engine recorded the derivative formulas as they are, so they read what eager saves, and a chain of cheap operators
# keeps each of its values alive from forward to backward. The cut of chapter 5 keeps a small value and
# computes the others again; what is checkpointed it must not keep at all. Without it, a whole step would need more
# memory than a compiled model with its optimizer beside it.
#
# So the same question is asked, `choose_saved`, with other words for its two sides. Backward is what the recorder
# marked while the `gradients` node ran; forward is what stands before it. What the answer means is different,
# too. There are no two graphs to be made. A forward value that is read by backward, and is not to be kept, is computed a
# second time, by copies of its nodes in front of the first reader in backward:
#
#     def steepest(x, w):
#         h = x @ w
#         loss = h.sin().exp().sum()
#         loss.backward()
#         return loss.detach()
#
# As it was recorded, the result of `exp` is alive from forward to backward, beside the product that `cos` needs:
#
#     exp_default: f32[64, 256] = aten.exp.default(sin_default)
#     mul_tensor: f32[64, 256] = aten.mul.Tensor(expand_default, exp_default)
#     cos_default: f32[64, 256] = aten.cos.default(mm_default)
#
# Sine and exponential cost less than their memory. So afterwards backward reads nothing of forward but the product:
#
#     sin_default_1: f32[64, 256] = aten.sin.default(mm_default)
#     exp_default_1: f32[64, 256] = aten.exp.default(sin_default_1)
#     mul_tensor: f32[64, 256] = aten.mul.Tensor(expand_default, exp_default_1)
#     cos_default: f32[64, 256] = aten.cos.default(mm_default)
#
# Inputs cost nothing: they are alive through the whole step, and the graph writes them at its end only.

# %%
import operator

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from ..ch01_graphs.fake import FakeTensor, fake_like
from ..ch01_graphs.graph import Graph, copy_provenance, graph_module, map_args
from ..ch05_autograd.cleanup import eliminate_dead_code, has_effect, renew_views
from ..ch05_autograd.joint import Joint
from ..ch05_autograd.partition import Halves, choose_saved, is_view, price, with_ancestors


def recompute_in_backward(gm: fx.GraphModule) -> fx.GraphModule:
    """A functional ATen graph with the same results in which each backward pass computes again what is not worth keeping."""
    passes = {n.meta["backward"] for n in gm.graph.nodes if "backward" in n.meta}
    for number in sorted(passes):
        gm = recompute_in_pass(gm, number)
    if passes:
        renew_views(gm)
        eliminate_dead_code(gm)
        take_turns(gm)
    return gm


# %% [markdown]
# A graph may hold several backward passes, which are rewritten one after the other. `recompute_in_pass` asks first and copies then.
#
# *The question.* `backward` are the nodes that the recorder marked with the number of this pass, and what stands before the first of them
# is forward. Two kinds of marked nodes belong to forward after all: masks, which are small (`masks_of_forward`), and parts of a tuple,
# which can be kept where a tuple cannot (`picked_in_forward`). `choose_saved` then gives the forward values that are kept, and
# those masks among them, with what they are made from, are computed `early`, in forward.
#
# *The copy.* The nodes are copied in order into a new graph, where `env` has the copy of each, and `again` what a reader in backward
# gets in
# its place. Before a node of backward is copied, `bring` sees to each of its operands: what is kept, is an input, or belongs to backward is
# read as it is; a view of such is taken as it is, since it has no memory; and all else is copied once more, after its own operands. It
# keeps a stack of its own in place of recursion, since a chain of operators may be longer than Python's.

# %%
def recompute_in_pass(gm: fx.GraphModule, number: int) -> fx.GraphModule:
    nodes = list(gm.graph.nodes)
    backward = {n for n in nodes if n.meta.get("backward") == number}
    begin = next(i for i, n in enumerate(nodes) if n in backward)
    masks = masks_of_forward(nodes, backward)
    backward -= masks | picked_in_forward(backward)
    outputs = [o for o in gm.graph.output_node().args[0] if isinstance(o, fx.Node)]
    joint = Joint(gm, len(outputs), [], [], [], [], {})
    saved = set(choose_saved(joint, Halves(backward, set(nodes[:begin]), outputs, []), prices=price_inside))
    early = with_ancestors(saved & masks) & masks
    graph, env, again = Graph(), {}, {}

    def bring(node: fx.Node) -> fx.Node:
        """`node` for a reader in backward: itself, or a copy."""
        pending = [node]
        while pending:
            top = pending[-1]
            if top in again:
                pending.pop()
            elif top in backward or top in saved or top.op != "call_function":
                again[pending.pop()] = env[top]
            elif missing := [a for a in top.all_input_nodes if a not in again]:
                pending.extend(missing)
            elif top in env and is_view(top) and all(again[a] is env[a] for a in top.all_input_nodes):
                again[pending.pop()] = env[top]                      # a view of what is there
            else:
                again[pending.pop()] = copy = copy_provenance(graph.node_copy(top, again.__getitem__), top)
                copy.meta.update(val=memory_of_its_own(top.meta["val"]), turn=4 * number - 3)
                copy.meta.pop("saved", None)
        return again[node]

    for node in in_order(nodes, masks, early):
        for a in node.all_input_nodes:
            if node in backward or a not in env:
                bring(a)
        operand = again.__getitem__ if node in backward else lambda a: env.get(a) or again[a]
        env[node] = copy_provenance(graph.node_copy(node, operand), node)
        if node in saved and node.op == "call_function":
            env[node].meta["saved"] = True
        if node in early:
            del env[node].meta["backward"]
    return graph_module(gm, graph)


# %% [markdown]
# Which nodes change sides? What a derivative computes from forward values alone, if it is a mask: `x <= 0` is a quarter of the size of
# `x`. The cut decides whether forward computes it, and it is what is kept. One kind of mask the cut always keeps (chapter 5): equality of
# floats, `x.abs() == m.unsqueeze(1)`. Computed again from what forward has rounded, it may hold nowhere. Of its three steps the first two
# are no masks, but only a mask reads them, and so they go with it. `masks_of_forward` first looks for all that needs no gradient that
# comes in, then for what of that is a mask or read by masks only, and last for what has all its operands among these.

# %%
def masks_of_forward(nodes: list[fx.Node], backward: set[fx.Node]) -> set[fx.Node]:
    known: dict[fx.Node, None] = {}
    for node in nodes:
        if node in backward and isinstance(node.meta.get("val"), torch.Tensor) and not has_effect(node) and node.all_input_nodes and \
                known.keys() >= backward.intersection(node.all_input_nodes):
            known[node] = None
    wanted, masks = set(), set()
    for node in reversed(known):
        if node.meta["val"].dtype == torch.bool or wanted.issuperset(node.users):
            wanted.add(node)
    for node in known:
        if node in wanted and masks.issuperset(backward.intersection(node.all_input_nodes)):
            masks.add(node)
    return masks


# %% [markdown]
# The order in which they are copied, and two small matters: inputs are alive anyway, so keeping them costs nothing, and a copy has memory
# of its own.

# %%
def picked_in_forward(backward: set[fx.Node]) -> set[fx.Node]:
    """Parts of a tuple that forward has made, taken where a derivative reads them. A part can be kept, a tuple cannot."""
    return {n for n in backward if n.target is operator.getitem and n.args[0] not in backward}


def in_order(nodes: list[fx.Node], masks: set[fx.Node], early: set[fx.Node]):
    """The nodes without `masks`, but those in `early`: each as soon as its operands are there."""
    done: set[fx.Node] = set()

    def after(node):
        yield node
        done.add(node)
        for user in node.users:
            if user in early and user not in done and done.issuperset(user.all_input_nodes):
                yield from after(user)

    for node in nodes:
        if node not in masks:
            yield from after(node)


def price_inside(node: fx.Node, joint: Joint, written: bool) -> int:
    return 0 if node.op == "placeholder" else price(node, joint, written)


def memory_of_its_own(val):
    """A fake, or a structure of them, as `val`."""
    with _disable_current_modes():
        return map_args(lambda t: fake_like(t) if isinstance(t, FakeTensor) else t, val)

# %% [markdown]
# ## Later stages must not undo it
#
# A copy computes what its original computes, from the same operands. A stage that looks for common work would find it
# at once. Merging equal nodes is over by now. But two loops that read the same value are also candidates for one
# kernel, and a copy of `relu(a)` that shares a kernel with the original is computed in forward and kept. Each node
# therefore has a *turn*: 0 in forward, 1 for copies that the first backward pass needs, 2 for that pass, 4 for what
# follows it, 5 for copies of the second pass, and so on. Fusion does not put copies into one kernel with anything of
# an earlier turn. It puts no two loops on different sides of a backward pass into one kernel only because they read
# the same: the forward passes of two micro-steps, run together, would need the memory of both.
#
# And what is to be kept is put into memory in its own turn (`saved`). A lazy stage would compute it wherever it is
# read, and keep what it is made from. So is what one backward pass leaves for the next: a gradient to which each
# micro-step adds is one tensor, and not a sum of many that are alive until the end.

# %%
def take_turns(gm: fx.GraphModule) -> None:
    passed = 0
    for node in gm.graph.nodes:
        number = node.meta.get("backward", 0)
        passed = max(passed, number)
        node.meta.setdefault("turn", 4 * number - 2 if number else 4 * passed)
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.all_input_nodes and node.meta["turn"] > 0 and \
                any(u.meta["turn"] >= node.meta["turn"] + 4 for u in node.users):
            node.meta["saved"] = True
