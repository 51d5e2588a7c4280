# %% [markdown]
# # The engine as one node
#
# A training step calls the autograd engine in its middle. The engine is C++ that walks a graph of its own,
# so one might expect capture to end there. But the engine is also an ordinary function: from some outputs
# and some leaves it computes one tensor per leaf. As such a function it becomes one node of the captured
# graph,
#
#     loss = cross_entropy(...)                    # the program's forward
#     g0, g1 = gradients((loss,), (w, b), None)    # loss.backward()
#
# and later stages need no new idea for it. Chapter 5 records a graph by running it on fakes that require
# gradients. When it comes to this node, the engine runs on those fakes, under the recorder, and each operator
# that it calls is written down where the program called `backward()`. What follows, clipping and the
# optimizer's update, is recorded after it. Forward, backward and update are then one straight list of ATen
# operators.
#
# What `loss.backward()` does besides computing is Python-visible state, which capture has to keep:
#
# - It finds the leaves by itself. So do we, by walking the autograd graph of the fakes.
# - It leaves each gradient in the leaf's `.grad`. That attribute is a *slot* of the trace: the gradient that is
#   there now. Capture reads and writes slots, and the end of the compiled function assigns those that changed.
# - It frees what forward had saved. A second `backward()` through the same graph raises an error, in eager and
#   here, also if it comes after the compiled function has returned the loss.

# %%
import contextlib

import torch
from torch.autograd import grad

from ..ch01_graphs.fake import FakeTensor, storage_key
from ..ch01_graphs.graph import closure, history_of
from ..ch01_graphs.layouts import is_dense, same_layout
from ..ch01_graphs.rules.derivatives import derive_otherwise
from ..ch01_graphs.trace import backward_pass
from ..ch03_capture.tracer import Tracer, unsupported
from ..ch03_capture.values import TensorVal
from .hooks import LATER_HOOKS, TENSOR_HOOKS, hooks_of

# %% [markdown]
# ## The node
#
# On the rungs that record ATen operators nothing is left of this function: its recording replaces it. With
# `backend="eager"` it runs as it is.
#
# A gradient that goes into `.grad` has to be a tensor of its own, because the next `backward()` adds to it in
# place, and it has the strides of its parameter. The engine sees to both when it accumulates;
# `torch.autograd.grad`, which only computes, leaves them to its caller.

# %%
def gradients(outputs, leaves, tangents, retain_graph: bool, to_keep: bool, create_graph: bool = False, stops=()):
    """The gradients of `outputs` for `leaves`, a tuple; None for a leaf that they do not depend on. tangents: the
    gradients that flow into the outputs, or None. to_keep: whether each result is to be a tensor of its own,
    with the strides of its leaf. create_graph: whether the results can be differentiated. stops: tensors beyond which nothing
    flows."""
    if isinstance(outputs[0], FakeTensor):
        derive_otherwise(history_of(outputs))
    # A recorder belongs to its thread
    with backward_pass(), without_hooks(leaves), stopped_at(stops), torch.autograd.set_multithreading_enabled(False):
        found = grad(outputs, leaves, tangents, retain_graph=retain_graph, create_graph=create_graph, allow_unused=True)
        return to_be_kept(found, leaves, tangents) if to_keep else found


@contextlib.contextmanager
def stopped_at(stops):
    nodes = [t.grad_fn for t in stops]
    try:
        for node in nodes:
            node.stopped = True
        yield
    finally:
        for node in nodes:
            node.stopped = False


@contextlib.contextmanager
def without_hooks(leaves):
    """Where the graph runs as it was captured, on the program's own tensors, the calls of their hooks are in it already."""
    present = [(t._backward_hooks, dict(t._backward_hooks)) for t in leaves if t._backward_hooks]
    try:
        for hooks, _ in present:
            hooks.clear()
        yield
    finally:
        for hooks, before in present:
            hooks.update(before)


def to_be_kept(found, leaves, tangents):
    """Tensors of their own, with the strides of the leaves."""
    taken, kept = {storage_key(t) for t in tangents or () if t is not None}, []
    for gradient, leaf in zip(found, leaves):
        if gradient is not None:
            form = torch.empty_like(leaf, memory_format=torch.preserve_format if is_dense(leaf) else torch.contiguous_format)
            if any(type(n) is int and n == 0 for n in form.shape):          # nothing is in it, but its strides can be read
                gradient = form
            elif storage_key(gradient) in taken or not same_layout(gradient, form):
                gradient = form.copy_(gradient)
            taken.add(storage_key(gradient))
        kept.append(gradient)
    return tuple(kept)

# %% [markdown]
# ## Which leaves
#
# `loss.backward()` names no leaves. The autograd graph of the fakes has them: it ends in one `AccumulateGrad` node
# for each, which holds the fake, and the trace knows which of its values has that fake. The graph may also end
# in a tensor that was computed before the compiled function was called. Its history is outside, the gradient would
# have to go on there, and so that is a graph break.

# %% tags=["exercise:find-leaves"]
def leaves_of(tx: Tracer, outputs: list[TensorVal]) -> list[TensorVal]:
    """The leaves from which `outputs` were computed, in the order in which the trace met them (`tx.tensors.of_fake`). The graph breaks
    where the history goes on outside of the trace, and at a leaf that the trace does not know."""
    found = set()
    for node in history_of([o.fake for o in outputs]):
        kind = type(node).__name__
        if kind == "EnterBackward":
            unsupported(tx, "backward() into a tensor that was computed before the compiled function was called")
        if kind == "AccumulateGrad":
            found.add(id(node.variable))
    leaves = [value for key, value in tx.tensors.of_fake.items() if key in found]
    if len(leaves) < len(found):
        unsupported(tx, "backward() into a leaf that the trace does not know")
    return leaves


# %% [markdown]
# ## In which order
#
# Hooks (`hooks.py`) are interpreted leaf by leaf, in the order in which the engine would have reached the leaves. This
# repeats the engine's own walk: a node is ready when all that need it have run, and among the ready ones the node that
# forward made last comes first.

# %%
def in_order_of_engine(tx: Tracer, outputs: list[TensorVal], leaves: list[TensorVal]) -> list[int]:
    """The positions of `leaves` in the order in which the engine gets to them, where that can be seen."""
    if not any(hooks_of(tx, leaf, TENSOR_HOOKS) or hooks_of(tx, leaf, LATER_HOOKS) for leaf in leaves):
        return list(range(len(leaves)))
    nodes = history_of([o.fake for o in outputs])
    waiting = {node: 0 for node in nodes}
    for node in nodes:
        for before, _ in node.next_functions:
            if before is not None:
                waiting[before] += 1
    ready = [o.fake.grad_fn for o in outputs if o.fake.grad_fn is not None and not waiting[o.fake.grad_fn]]
    place, order = {id(leaf.fake): i for i, leaf in enumerate(leaves)}, []
    while ready:
        node = max(ready, key=lambda n: n._sequence_nr())
        ready.remove(node)
        if type(node).__name__ == "AccumulateGrad" and id(node.variable) in place:
            order.append(place[id(node.variable)])
        for before, _ in node.next_functions:
            if before is not None:
                waiting[before] -= 1
                if not waiting[before]:
                    ready.append(before)
    return order + [i for i in range(len(leaves)) if i not in order]


# %% [markdown]
# ## What lies behind a tensor
#
# Four questions about the autograd graph of the fakes. Its edges (`next_functions`) lead from an output to what it was computed from, so
# `history_of` finds all that lies behind some tensors. Whether a tensor is among that is asked in two ways: one that was computed has
# its node there, and a leaf has a node of the kind `AccumulateGrad` that names it.

# %%
def on_the_way(nodes, wanted: list[TensorVal]) -> set:
    """Those of `nodes` that the engine runs for the gradients of `wanted`: not what lies on other ways, nor what computed these."""
    later: dict = {}
    for node in nodes:
        for before, _ in node.next_functions:
            later.setdefault(before, []).append(node)
    makers, leaves = {t.fake.grad_fn for t in wanted} - {None}, {id(t.fake) for t in wanted}
    ends = [n for n in later if n in makers or type(n).__name__ == "AccumulateGrad" and id(n.variable) in leaves]
    return closure([after for end in ends for after in later[end]], lambda node: later.get(node, ()))


def is_at(leaf: TensorVal, nodes) -> bool:
    """Whether a pass that comes to `nodes` of the autograd graph has a gradient for `leaf`."""
    if leaf.fake.grad_fn is not None:
        return leaf.fake.grad_fn in nodes
    return any(type(n).__name__ == "AccumulateGrad" and n.variable is leaf.fake for n in nodes)


def leads_to(tensors: list[TensorVal], leaf: TensorVal) -> bool:
    return is_one_of(leaf, tensors) or is_at(leaf, history_of([t.fake for t in tensors]))


def is_one_of(leaf: TensorVal, tensors: list[TensorVal]) -> bool:
    return any(t.fake is leaf.fake for t in tensors)
