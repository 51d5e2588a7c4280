# %% [markdown]
# # Cutting the joint graph in two
#
# The joint graph becomes a forward graph, run now, and a backward graph, run later. What the backward half
# reads of the forward half has to be carried over somehow, and there is a choice for each value: *save* it
# in memory from one half to the other, or save something smaller that it was made from, and *recompute* it.
#
#     def masked_layer(x, b, mask, w):
#         a = x + b
#         d = F.gelu(a) * mask
#         return d @ w
#
# Backward needs `a` for the slope of gelu, `mask` (a byte for each element), and `d` and `w` for the product.
#
# Eager saves whatever each backward formula asks for: a, mask, d and w, and the result of gelu if the mask wanted a gradient. But a is one
# addition away from x and b. In a compiler that fuses pointwise operators, computing it again inside a backward kernel costs almost
# nothing, while saving it costs a write in forward and a read in backward. Memory traffic is what such kernels spend their time on.
#
# But x and b must still be the same when backward runs. That is true of parameters, and of what eager saves as well: whoever writes into
# that gets an error. Eager's addition saves nothing, so into any other input the user may write before backward runs. To save such
# an input is to copy it, which is no cheaper than to save a (`is_safe` below).
#
# What this module finds for the example, of 64 by 256 numbers, `b` and `w` with gradients: some of the values, with what
# saving each would cost in bytes moved.
#
# ```python
# x                    131072
# b                      2048
# mask                      0  saved
# w                         0  saved
# add_tensor           131072
# erf_default          131072
# mul_tensor_3          65536  saved
# add_tensor_3         131072  saved
# ```
#
# The first sum is `a`. The third product is `d`: forward writes it for the matrix product anyway, so only the read is paid. The last row is
# the slope of gelu, all that backward still wants of `a`. It costs as much as `a` or a copy of `x`, and leaves less to compute in backward.
#
# ## As a minimum cut
#
# Make each forward value an edge whose capacity is the price of saving it. Sources are the values that
# exist in any case and the values that must not be computed twice; sinks are the operators of the backward
# half. Every path from a source to a sink has to be cut somewhere: that is where a value is saved, and
# everything behind the cut is recomputed. The cheapest such cut is a minimum cut.
#
# What may not be computed twice, and why:
#
# - *random numbers*: the second draw would be a different one;
# - *matmuls, convolutions, attention, sorts*: expensive;
# - *reductions*: their results are small, so saving is cheap;
# - *values that a library call reads both in forward and in backward*: such a call needs its operand in
#   memory. Forward has written it there already, so saving costs nothing but the space, while recomputing
#   would have to write it again;
# - *values that live long in forward*, like the residual stream of a transformer: recomputing one would
#   recompute all that came before it. "Long" means across a library call: the value is in memory then, too;
# - *windows that overlap*: the maximum of a 3x3 pool reads every pixel two to nine times; the place of the
#   maximum is one byte a window;
# - *equality of floats*, the `x == x.amax()` in the gradient of a maximum: computed again from what was rounded when it
#   was saved, x may nowhere be equal to its maximum, and the gradient would be lost.
#
# Views and casts from a saved half-precision copy are free or nearly so; inputs cost nothing to save, unless
# somebody may write to them before backward runs.
#
# The program may decide for itself. What `torch.utils.checkpoint` computes is not saved at any price, except
# what leaves the checkpoint (it is the next one's input) and random numbers.

# %%
import functools
import itertools
import math
import operator
from collections import Counter
from dataclasses import dataclass

import torch
from torch import fx

from .. import logs
from ..ch01_graphs.fake import FakeTensor, storage_key
from ..ch01_graphs.graph import Graph, closure, copy_provenance, graph_module, map_args
from ..ch01_graphs.layouts import is_dense
from ..ch01_graphs.shapes import expr_of
from ..errors import Unsupported
from .aliases import viewed_argument
from .cleanup import has_effect, is_random, is_zero_gradient
from .joint import Joint
from .maxflow import INFINITE, Network, add_edge, add_vertex, maximum_flow, sink_side
from .output_plan import view_chain
from .rules.operators import BECOME_LOOPS, CHEAP

aten = torch.ops.aten

# %% [markdown]
# ## Which operators are cheap
#
# PyTorch tags its elementwise operators (`torch.Tag.pointwise`), so the list holds only what the tags leave
# out.
#
# Three questions are asked of an operator. `is_cheap`: would it be worth computing twice? Views and
# elementwise operators are, since they disappear in the kernel that reads them. Random draws are not,
# whatever they cost, because the second draw gives other numbers. `is_fusible`: will it become a loop, so
# that its operands may be computed in the same kernel? Reductions are that, although they are not cheap.
# And `is_widening`: is the value only a wider form of another? Then the narrow one is what should be saved.

# %%


def is_view(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return (isinstance(node.target, torch._ops.OpOverload) and isinstance(val, FakeTensor)
            and viewed_argument(node, val) is not None)


def is_widening(node: fx.Node) -> bool:
    """A cast that loses nothing, such as bfloat16 to float32, on one device: the narrow value will do."""
    if node.target is not aten._to_copy.default:
        return False
    new, old = node.meta["val"], node.args[0].meta["val"]
    return new.device == old.device and new.dtype.is_floating_point and old.dtype.is_floating_point \
        and new.dtype.itemsize > old.dtype.itemsize


def is_cheap(node: fx.Node) -> bool:
    """A view, or an operator that computes each element from a few elements: worth computing twice."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or is_random(node):
        return False
    if node.target is aten.index.Tensor:
        return not any(_has_data(i) for i in node.args[1] if i is not None)
    return torch.Tag.pointwise in node.target.tags or node.target.overloadpacket in CHEAP or is_view(node)


def _has_data(node: fx.Node) -> bool:
    """Does the value depend on any input? Positions counted with `arange` do not."""
    seen, pending = {node}, [node]
    while pending:
        node = pending.pop()
        if node.op != "call_function" or len(seen) > 50:
            return True
        pending += [a for a in node.all_input_nodes if a not in seen]
        seen.update(pending)
    return False


def is_fusible(node: fx.Node) -> bool:
    """Cheap operators and reductions become loops; the rest are library calls, which go through memory."""
    if is_cheap(node) or node.target is operator.getitem:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and node.target.overloadpacket in BECOME_LOOPS


def numel_of(node: fx.Node) -> int:
    """Of the tensor at a node; symbolic sizes count with their present values."""
    return max(math.prod(s.node.hint if isinstance(s, torch.SymInt) else s for s in node.meta["val"].shape), 1)


def size_in_bytes(node: fx.Node) -> int:
    return numel_of(node) * node.meta["val"].element_size()

# %% [markdown]
# ## Three kinds of node
#
# A node that depends on a tangent can only run in backward. A node that an output needs has to run in
# forward. A node that neither is true of (the comparison inside the derivative of `abs`) may run in either,
# and the cut decides. But a library call of the engine's that no output needs runs in backward, as it does in eager: the zeros that are the
# gradient of `ceil` depend on no tangent, nor does the derivative of a pool that is given them, and a kernel may raise. So do these zeros,
# and what is computed from them: where no gradient comes to the `ceil`, they are left out (`undefined.py`). So does any
# gradient: were it saved, a program that writes to it would write to what a second backward reads.

# %%
@dataclass
class Halves:
    """Sets of nodes of a joint graph: `backward` depends on tangents, `forward` is needed for the outputs."""

    backward: set[fx.Node]
    forward: set[fx.Node]
    outputs: list
    gradients: list

    @functools.cached_property
    def given(self) -> set[fx.Node]:
        """The outputs, to be looked up: a step has hundreds."""
        return {o for o in self.outputs if isinstance(o, fx.Node)}


def split_nodes(joint: Joint) -> Halves:
    backward: set[fx.Node] = set()
    forward: set[fx.Node] = set()
    output = next(iter(reversed(joint.gm.graph.nodes)))
    count = joint.results + len(joint.written)
    outputs, gradients = list(output.args[0][:count]), list(output.args[0][count:])
    needed = {n for n in outputs if isinstance(n, fx.Node)}
    for_outputs = with_ancestors([*needed, *joint.gm.graph.find_nodes(op="call_function", target=aten.copy_.default)])
    in_backward, handed_out = False, {view_chain(g)[0] for g in gradients if isinstance(g, fx.Node)}
    for node in joint.gm.graph.nodes:
        tangent = "tangent" in node.meta
        if node.op == "output":
            continue
        if tangent or any(a in backward for a in node.all_input_nodes) or (in_backward and is_random(node)) or \
                node not in for_outputs and is_of_the_engine(node, node in handed_out):
            backward.add(node)
            in_backward = in_backward or not tangent
        elif node.op == "call_function" and has_effect(node):
            needed.add(node)
    if any(node.target is aten.copy_.default for node in backward):
        raise Unsupported("the backward pass modifies an input")
    for node in reversed(joint.gm.graph.nodes):
        if node in needed and node.op != "output":
            forward.add(node)
            needed.update(node.all_input_nodes)
    return Halves(backward, forward, outputs, gradients)


def is_of_the_engine(node: fx.Node, handed_out: bool) -> bool:
    """Is it a library call, zeros for a gradient, or what is `handed_out` as one, that the program has not asked for?"""
    unasked = isinstance(node.target, torch._ops.OpOverload) and "asked" not in node.meta
    return unasked and not has_effect(node) and (handed_out or not is_fusible(node) or is_zero_gradient(node))

# %% [markdown]
# ## Prices
#
# Saving a value that forward writes to memory anyway costs one read in backward, any other a write and a
# read: twice as much. Whether forward writes it is estimated by *stages*. Library calls divide a program
# into stages; the loops of one stage can share a kernel, in which values stay in registers. A loop runs in
# the latest stage that all its readers allow: a dropout mask is drawn where it is applied. A value is
# written if a library call reads it, or a loop of a later stage does.

# %%
def stages(nodes, halves: Halves) -> dict[fx.Node, int]:
    """The stage of each node: library calls of stage k come after the loops of stage k and before those of
    stage k + 1."""
    earliest: dict[fx.Node, int] = {}
    for node in nodes:
        operands = [a for a in node.all_input_nodes if a in earliest]
        earliest[node] = max([earliest[a] + (not is_fusible(a)) for a in operands], default=0)
    stage: dict[fx.Node, int] = {}
    for node in reversed(nodes):
        users = [u for u in node.users if u in halves.forward and u in stage] if is_fusible(node) else []
        stage[node] = min([stage[u] for u in users], default=earliest[node])
    return stage


def readers(node: fx.Node, among: set[fx.Node]) -> list[fx.Node]:
    """The users of a node, looking through views, widening casts and tuple elements."""
    def passes(user):
        return is_view(user) or is_widening(user) or user.target is operator.getitem
    return [u for u in closure(node.users, lambda u: u.users if passes(u) else ()) if u in among and not passes(u)]


# %% [markdown]
# Who uses a value? Views and widening casts compute nothing, so `readers` looks through them, to the loops and calls that read
# the value in the end. From these follows its `Use` in forward.
#
# `rereads`, `is_equality_of_floats` and `is_checkpointed` recognise the last cases of the list at the beginning; a checkpointed
# value that leaves its checkpoint is saved after all. `must_not_recompute` is the whole list.

# %%
def rereads(node: fx.Node) -> bool:
    """Does the node combine overlapping windows of one tensor, reading each element several times?"""
    windows: dict[fx.Node, dict[fx.Node, int]] = {}
    seen, pending = {node}, [node] if torch.Tag.pointwise in node.target.tags else []
    while pending:
        for operand in pending.pop().all_input_nodes:
            if operand in seen or len(seen) > 200:
                continue
            seen.add(operand)
            base, sliced = operand, False
            while base.target in (aten.slice.Tensor, aten.view.default, aten.permute.default):
                base, sliced = base.args[0], sliced or base.target is aten.slice.Tensor
            if sliced:
                windows.setdefault(base, {})[operand] = size_in_bytes(operand)
            elif torch.Tag.pointwise in getattr(operand.target, "tags", ()):
                pending.append(operand)
    return any(2 * sum(w.values()) >= 3 * size_in_bytes(base) for base, w in windows.items())


def is_equality_of_floats(node: fx.Node) -> bool:
    return node.target is aten.eq.Tensor and all(
        isinstance(a, fx.Node) and a.meta["val"].is_floating_point() for a in node.args)


@dataclass
class Use:
    """How forward uses a value: a `library` call reads it, a later stage does (`far`), it is an `output`."""

    library: bool
    far: bool
    output: bool


def forward_use(node: fx.Node, halves: Halves, stage) -> Use:
    found = readers(node, halves.forward)
    return Use(library=any(not is_fusible(u) for u in found), far=any(stage[u] > stage[node] for u in found),
               output=node in halves.given)


def is_checkpointed(node: fx.Node) -> bool:
    """The program asks that this value be computed again (`torch.utils.checkpoint`), and it can be."""
    if "recompute" not in node.meta or node.op != "call_function" or has_effect(node):
        return False
    return not is_random(node.args[0] if node.target is operator.getitem else node)


def leaves_region(node: fx.Node, halves: Halves) -> bool:
    """Is a checkpointed value, or a view of it, read outside of its checkpoint, or an output?"""
    region = node.meta["recompute"]
    return node in halves.given or any(
        u in halves.forward and (u.meta.get("recompute") != region or is_view(u) and leaves_region(u, halves))
        for u in node.users)


def must_not_recompute(node: fx.Node, halves: Halves, use: Use) -> bool:
    if is_checkpointed(node):
        return leaves_region(node, halves) and not is_view(node)
    if is_view(node) or is_widening(node) or node.op == "get_attr":
        return False
    if not is_cheap(node) or rereads(node) or is_equality_of_floats(node):
        return True
    if node not in halves.forward or not node.all_input_nodes:
        return False
    return use.far or use.library and any(not is_fusible(u) for u in readers(node, halves.backward))


# %% [markdown]
# Now the network. Each forward value that can matter becomes *two* vertices, `enter` and `leave`, with an edge
# between them whose capacity is the price of saving the value. To cut this edge is to save it. Everything else
# gets infinite capacity, so that no cut goes through it: the edges from a value to those that are computed from
# it, the edges from the source to what is there anyway (placeholders) or must not be computed twice, and the edges
# to the sink from what backward reads. A cut of finite price is then a set of values such that everything that
# backward reads can be computed from them.

# %%
def with_ancestors(nodes) -> set[fx.Node]:
    """The nodes, and all that they are computed from."""
    return closure(nodes, lambda node: node.all_input_nodes)


# %% tags=["exercise:choose-saved"]
def choose_saved(joint: Joint, halves: Halves, prices=None) -> list[fx.Node]:
    """The forward values that backward gets: a minimum cut of the nodes that do not depend on tangents.

    joint: the joint graph; halves: its `split_nodes`. prices: to be asked in the place of `price`. Returns nodes in the order
    of the graph.

    Needed is what a node of `halves.backward` reads, or what is itself a gradient. Every path to it from a
    placeholder, or from a node that `must_not_recompute`, has to contain a saved node (perhaps its first or
    its last one). Saving a node costs its `price`, where `written` means that a library call, a later stage
    or an output needs it in memory, or that it is not fusible; what is checkpointed and does not leave its
    region has no price at which it is saved (INFINITE). The sum of the prices is minimal; among equal cuts
    the one nearest to backward wins. Raises AssertionError if every cut is INFINITE."""
    consumed = {a for n in halves.backward for a in n.all_input_nodes if a not in halves.backward} | \
        {g for g in halves.gradients if isinstance(g, fx.Node) and g not in halves.backward}
    wanted = with_ancestors(consumed)
    nodes = [n for n in joint.gm.graph.nodes if n in wanted or n in halves.forward]
    stage = stages(nodes, halves)
    net = Network()
    source, sink = add_vertex(net), add_vertex(net)
    inner: dict[fx.Node, tuple[int, int]] = {}
    for node in nodes:
        if node not in wanted:
            continue
        enter, leave = inner[node] = add_vertex(net), add_vertex(net)
        use = forward_use(node, halves, stage)
        written = use.library or use.far or use.output or not is_fusible(node)
        repeated = is_checkpointed(node) and not leaves_region(node, halves)
        add_edge(net, enter, leave, INFINITE if repeated else (prices or price)(node, joint, written))
        if node.op == "placeholder" or must_not_recompute(node, halves, use):
            add_edge(net, source, enter, INFINITE)
        for argument in node.all_input_nodes:
            add_edge(net, inner[argument][1], enter, INFINITE)
        if node in consumed:
            add_edge(net, leave, sink, INFINITE)
    if maximum_flow(net, source, sink) >= INFINITE:
        raise AssertionError("the joint graph cannot be cut: a value can be neither saved nor recomputed")
    behind = sink_side(net, sink)
    return [n for n, (enter, leave) in inner.items() if leave in behind and enter not in behind]


# %% [markdown]
# What is the price? A value that is in memory in any case, because a library call has written it, costs its bytes
# once, for reading it in backward. One that fusion would have kept in registers has to be written as well, which
# is twice. A view cannot be saved, only what it is a view of. An input costs nothing, unless the program could
# write to it before backward runs; then what is saved would be a copy.

# %%
def is_safe(node: fx.Node, joint: Joint) -> bool:
    """Will an input be the same in backward, or eager fail as well? If not, a copy has to be saved."""
    return node.name not in joint.mutated and node.name not in joint.exposed


def price(node: fx.Node, joint: Joint, written: bool) -> int:
    """What saving `node` costs, in bytes moved. Inputs are free, except those that have to be copied."""
    val = node.meta.get("val")
    if node.op == "placeholder" and is_safe(node, joint):
        return 0
    if node.op == "get_attr" or not isinstance(val, torch.Tensor) or is_view(node):
        return INFINITE if node.op != "placeholder" else 0
    return size_in_bytes(node) * (1 if written and node.op != "placeholder" else 2)

# %% [markdown]
# ## What a ReLU is asked in backward
#
# The derivative of a ReLU asks which elements of its result are 0. The convolution behind it has kept the result, so this reads
# memory that is there. But reading is what a backward kernel spends its time on, and often it need not read at all. A batch norm in
# front of the ReLU reads *its* operand in backward:
#
#     t = (x - mean) * rstd * weight + bias      backward needs x
#     y = relu(t)                                the convolution needs y
#     ...
#     g = where(y <= 0, 0, dy)
#     dw = sum(g * (x - mean)) * rstd
#
# `relu(t) <= 0` says the same as `t <= 0`, also for NaN, and t is four operations away from an x that the kernel has in a register. With
# this, the two kernels of such a backward pass read 2 and 2 large tensors in place of 3 and 3, which is a quarter of their traffic.
# For `relu(t1 + t2)`, where t needs two large tensors, there is nothing to gain.

# %%
ARITHMETIC = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten._to_copy.default}


def made_from(node: fx.Node) -> tuple[set[fx.Node], set[fx.Node]]:
    """(the nodes from which a little arithmetic gives a value, those of the arithmetic), without what is much smaller than the value."""
    sources, inner, pending = set(), set(), [node]
    while pending:
        top = pending.pop()
        if not isinstance(top.meta.get("val"), torch.Tensor) or 2 * numel_of(top) <= numel_of(node):
            continue
        if top.target in ARITHMETIC or is_view(top):
            inner.add(top)
            pending += top.all_input_nodes
        else:
            sources.add(top)
    return sources, inner


def compare_operands(gm: fx.GraphModule) -> None:
    """In place: `maximum(t, c) <= c` asks t, where t is made from one large tensor that is read later anyway."""
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    for node in gm.graph.find_nodes(op="call_function", target=aten.le.Scalar):
        clipped = node.args[0]
        if clipped.target is not aten.maximum.default:
            continue
        operand, bound = clipped.args
        sources, inner = made_from(operand)
        if bound.target is aten.full.default and bound.args[1] == node.args[1] and len(sources) == 1 and \
                any(order[user] > order[node] for n in sources | inner for user in n.users):
            node.update_arg(0, operand)

# %% [markdown]
# ## Two graphs
#
# The backward graph takes the saved values, then the tangents. Recomputed operators are placed directly
# before their first reader, so that they live briefly.

# %%
@dataclass
class Partition:
    """The two graphs, and what goes from one to the other."""

    forward: fx.GraphModule         # inputs -> results, written values, saved
    backward: fx.GraphModule        # saved, tangents -> gradients
    saved: list[str]                # names of the saved values
    saved_inputs: list[int | None]  # for each the position of the input that it is; None if computed
    reached: list[set[int]]         # for each gradient the positions of the tangents that it depends on in eager

# %% [markdown]
# `partition` asks for the cheapest set of values to save and builds two graphs around it. The forward graph
# returns the program's results, and then whatever is computed and saved. A saved value that is simply an
# input of the program need not be returned, since the caller has it. But an input that the caller could
# overwrite before backward runs is not safe; of such an input a copy is returned (`clone`). So is of a result that eager
# has not saved, which therefore costs as much as a value that is not in memory. What eager has saved for some outputs is safe
# where only their gradients read it; if others do (`expose_more`), it is not, and the cut is made again.
#
# The backward graph begins with the saved values and the tangents as inputs. It is built backwards from
# need: `bring` copies a node of the joint graph together with everything that it depends on and that is not
# there yet. So whatever was not saved is computed again, just in front of the first node that reads it.
# `private` finds those saved values whose memory nobody else knows. The backward pass may overwrite them,
# which saves memory while gradients are computed.

# %%
def partition(joint: Joint) -> Partition:
    halves, found = split_nodes(joint), True
    while found:
        lent = {storage_key(halves.outputs[i].meta["val"]) for i in joint.writable if isinstance(halves.outputs[i], fx.Node)}

        def price_here(node, joint, written):
            return price(node, joint, written and not is_lent(node, lent))
        saved = choose_saved(joint, halves, price_here)
        found = expose_more(joint, halves, saved)
    logs.tell("cut", joint=joint, halves=halves, saved=saved)
    inputs = [n for n in joint.gm.graph.nodes if n.op == "placeholder" and n not in halves.backward]
    if joint.symbols:       # every size goes to backward
        saved = [n for n in inputs if not isinstance(n.meta["val"], torch.Tensor) and n not in saved] + saved
    positions = [inputs.index(n) if n in inputs and is_safe(n, joint) else None for n in saved]
    computed = [n for n, p in zip(saved, positions) if p is None]
    copied = [n for n in computed if isinstance(n.meta["val"], torch.Tensor) and (n.op == "placeholder" or is_lent(n, lent))]
    forward = _forward_graph(joint, halves, inputs, computed, copied)
    returned = forward.graph.output_node().args[0][len(halves.outputs):]
    copies = {n: copy.meta["val"] for n, copy in zip(computed, returned) if n in copied}
    return Partition(forward, _backward_graph(joint, halves, saved, copies), [n.name for n in saved], positions, joint.reached)


def expose_more(joint: Joint, halves: Halves, saved: list) -> bool:
    """Is one of the `saved` an input or a result that is read for the gradient of an output for which eager has not saved it? Then it may
    be written before backward, though it is saved for other outputs. Notes such ones in the joint graph."""
    known = set().union(*joint.kept) - joint.writable
    results = {storage_key(o.meta["val"]): i for i, o in enumerate(halves.outputs) if i in known}
    names = {n: n.name if n.op == "placeholder" else results.get(storage_key(n.meta["val"])) for n in saved
             if isinstance(n.meta.get("val"), torch.Tensor)}
    behind = {n: {name} for n, name in names.items() if name in known and (n.op != "placeholder" or is_safe(n, joint))}
    tangents, count, found = {}, itertools.count(), set()
    for node in joint.gm.graph.nodes if behind else ():
        read = set().union(*(behind.get(a, ()) for a in node.all_input_nodes))
        if node not in halves.backward:
            behind.setdefault(node, read)
            continue
        tangents[node] = {next(count)} if "tangent" in node.meta else set().union(*(tangents.get(a, ()) for a in node.all_input_nodes))
        found |= {name for name in read if not all(name in joint.kept[k] for k in tangents[node])}
    joint.exposed |= {name for name in found if type(name) is str}
    joint.writable |= {name for name in found if type(name) is int}
    return bool(found)


def is_lent(node: fx.Node, lent: set[int]) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor) and storage_key(node.meta["val"]) in lent


# %% [markdown]
# The forward graph has the nodes that its outputs, or the computed among the saved values, are made from, in the order of the joint
# graph. The
# writes to inputs (`copy_`) come last, as the contract of a functional graph asks. A saved input that may be
# written before backward runs is saved as a copy, made ahead of these writes. Backward sees it as it lay: an expanded dim is
# copied once and expanded again, and the others keep their order, since the views of the graph were made for that.

# %%
def _forward_graph(joint, halves, inputs, computed, copied) -> fx.GraphModule:
    graph, env = Graph(), {}
    wanted = with_ancestors([*inputs, *computed, *halves.forward])
    copies = []
    for node in joint.gm.graph.nodes:
        if node in wanted:
            if node.target is aten.copy_.default:
                copies.append(node)
            else:
                env[node] = copy_provenance(graph.node_copy(node, env.__getitem__), node)
    extra = [saved_copy(graph, env[node], node) if node in copied else env[node] for node in computed]
    for node in copies:
        copy_provenance(graph.node_copy(node, env.__getitem__), node)
    graph.output((*(fx.map_arg(o, env.__getitem__) for o in halves.outputs), *extra))
    return graph_module(joint.gm, graph)


def expanded_dims(node: fx.Node) -> list[int]:
    return [d for d, stride in enumerate(node.meta["val"].stride()) if isinstance(stride, int) and stride == 0]


def add_call(graph: Graph, origin: fx.Node, op, value: fx.Node, *numbers) -> fx.Node:
    node = copy_provenance(graph.call_function(op, (value, *map_args(expr_of, numbers))), origin)
    node.meta["val"] = op(value.meta["val"], *numbers)
    return node


def saved_copy(graph: Graph, value: fx.Node, node: fx.Node) -> fx.Node:
    """A saved copy: gaps are not copied, nor an element twice."""
    if not is_dense(node.meta["val"]) and any(user.target is aten.as_strided.default for user in node.users):
        raise Unsupported("an input that has gaps is copied, and as_strided looks at the gaps")
    for d in expanded_dims(node):
        value = add_call(graph, node, aten.slice.Tensor, value, d, 0, 1)
    return add_call(graph, node, aten.clone.default, value)


# %% [markdown]
# The backward graph: first its inputs, then each of its nodes with what `bring` finds missing in front of it. `bring` goes by a stack of
# its
# own, since a chain of operators may be longer than Python's recursion.

# %%
def private(joint, halves, saved) -> set[fx.Node]:
    """The saved values whose memory only the backward graph needs, and under no second name. What depends on
    no input may be a constant, the same memory in every call."""
    def memory_of(nodes):
        return [storage_key(n.meta["val"]) for n in nodes
                if isinstance(n, fx.Node) and isinstance(n.meta.get("val"), torch.Tensor)]
    times = Counter(memory_of(saved))
    public = {*memory_of(joint.gm.graph.find_nodes(op="placeholder")), *memory_of(halves.outputs)}
    varying = closure(joint.gm.graph.find_nodes(op="placeholder"), lambda node: node.users)
    return {n for n in saved for key in memory_of([n]) if times[key] == 1 and key not in public and n in varying}


def _backward_graph(joint, halves, saved, copies) -> fx.GraphModule:
    graph, env = Graph(), {}
    owned = private(joint, halves, saved)
    for node in saved + [n for n in joint.gm.graph.nodes if n.op == "placeholder" and n in halves.backward]:
        env[node] = graph.placeholder(node.name)
        env[node].meta.update(node.meta)
        env[node].meta["owned"] = node in owned
    for node, copy in copies.items():
        env[node].meta["val"] = copy
        if expanded_dims(node):
            env[node] = add_call(graph, node, aten.expand.default, env[node], list(node.meta["val"].shape))

    def bring(node):
        stack = [] if node in env else [node]
        while stack:
            missing = [a for a in stack[-1].all_input_nodes if a not in env]
            if missing:
                stack.extend(missing)
            else:
                top = stack.pop()
                if top not in env:
                    env[top] = copy_provenance(graph.node_copy(top, env.__getitem__), top)

    for node in joint.gm.graph.nodes:
        if node in halves.backward and (node.users or has_effect(node)):
            bring(node)
    for node in halves.gradients:
        if isinstance(node, fx.Node):
            bring(node)
    graph.output(tuple(env[g] if isinstance(g, fx.Node) else None for g in halves.gradients))
    return graph_module(joint.gm, graph)
