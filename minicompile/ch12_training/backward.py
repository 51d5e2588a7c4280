# %% [markdown]
# # Backward inside the graph
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
from __future__ import annotations

import contextlib

import torch

from ..ch01_graphs.fake import storage_key
from ..ch01_graphs.graph import history_of
from ..ch01_graphs.layouts import is_dense, same_layout
from ..ch01_graphs.trace import backward_pass
from ..ch02_guards.sources import AttrSource
from ..ch03_capture.calls import handles
from ..ch03_capture.iterate import unpack
from ..ch03_capture.operations import METHODS
from ..ch03_capture.tensors import emit, gradient_of, set_gradient
from ..ch03_capture.tracer import Tracer, call, unsupported
from ..ch03_capture.values import NONE, Const, TensorVal, TupleVal, Value
from ..ch03_capture.wrap import part, wrap
from ..ch05_autograd.joint import saved_by

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
def gradients(outputs, leaves, tangents, retain_graph: bool, to_keep: bool):
    """The gradients of `outputs` for `leaves`, a tuple; None for a leaf that they do not depend on. tangents: the
    gradients that flow into the outputs, or None. to_keep: whether each result is to be a tensor of its own,
    with the strides of its leaf."""
    # A recorder belongs to its thread
    with backward_pass(), without_hooks(leaves), torch.autograd.set_multithreading_enabled(False):
        found = torch.autograd.grad(outputs, leaves, tangents, retain_graph=retain_graph, allow_unused=True)
        return to_be_kept(found, leaves, tangents) if to_keep else found


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
            if storage_key(gradient) in taken or not same_layout(gradient, form):
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
    """The leaves from which `outputs` were computed, in the order in which the trace met them (`tx.tensor_of_fake`). The graph breaks
    where the history goes on outside of the trace, and at a leaf that the trace does not know."""
    found = set()
    for node in history_of([o.fake for o in outputs]):
        kind = type(node).__name__
        if kind == "EnterBackward":
            unsupported(tx, "backward() into a tensor that was computed before the compiled function was called")
        if kind == "AccumulateGrad":
            found.add(id(node.variable))
    leaves = [value for key, value in tx.tensor_of_fake.items() if key in found]
    if len(leaves) < len(found):
        unsupported(tx, "backward() into a leaf that the trace does not know")
    return leaves


# %% [markdown]
# ## Hooks
#
# A leaf may have hooks, Python that the engine calls when it gets there: hooks on the tensor change its gradient before it
# is accumulated, others run afterwards, with `.grad` in place. Capture interprets them as if the program called them there.
# All gradients come from one node, so the hooks of all leaves run after it, one leaf after the other, in the order in
# which the engine would have reached them. The engine takes the ready node that forward made last, and accumulates at once;
# that is a few lines to repeat.

# %%
TENSOR_HOOKS, LATER_HOOKS = "_backward_hooks", "_post_accumulate_grad_hooks"


def hooks_of(tx: Tracer, tensor: TensorVal, name: str) -> Value:
    """The dictionary of hooks, guarded; None where there are none."""
    return NONE if tensor.real is None else wrap(tx, getattr(tensor.real, name), part(AttrSource, tensor.source, name))


def change_gradient(hooks, gradient):
    """What the hooks of a tensor make of its gradient."""
    previous = torch.is_grad_enabled()
    try:
        torch.set_grad_enabled(False)
        for hook in list(hooks.values()):
            changed = hook(gradient)
            if changed is not None:
                gradient = changed
        return gradient
    finally:
        torch.set_grad_enabled(previous)


def tell_hooks(hooks, leaf):
    """The hooks that run when the gradient of a leaf has been accumulated."""
    previous = torch.is_grad_enabled()
    try:
        torch.set_grad_enabled(False)
        for hook in list(hooks.values()):
            if hook(leaf) is not None:
                raise RuntimeError("Tensor post accumulate grad hooks should return None.")
    finally:
        torch.set_grad_enabled(previous)


# %% [markdown]
# The two functions above are Python of ours that is *traced*, as if the program contained it. So a hook is
# inlined, and what it does becomes a part of the graph. `in_order_of_engine` finds out in which order the engine
# would reach the leaves. It repeats the engine's own walk: a node is ready when all that need it have run, and
# among the ready ones the node that forward made last comes first.

# %%
def changed_by_hooks(tx: Tracer, tensor: TensorVal, gradient: Value) -> Value:
    hooks = hooks_of(tx, tensor, TENSOR_HOOKS)
    if type(gradient) is not TensorVal or hooks is NONE or not getattr(tensor.real, TENSOR_HOOKS):
        return gradient
    changed = call(tx, wrap(tx, change_gradient), [hooks, gradient], {})
    if type(changed) is not TensorVal or changed.fake.shape != gradient.fake.shape or changed.fake.dtype != gradient.fake.dtype:
        unsupported(tx, "a hook that makes something else of a gradient")
    return changed


def in_order_of_engine(outputs: list[TensorVal], leaves: list[TensorVal]) -> list[int]:
    """The positions of `leaves` in the order in which the engine gets to them, where that can be seen."""
    if not any(leaf.real is not None and (getattr(leaf.real, TENSOR_HOOKS) or getattr(leaf.real, LATER_HOOKS)) for leaf in leaves):
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


def check_leaf(tx: Tracer, leaf: TensorVal):
    """What accumulating into a leaf may do beyond adding and calling hooks is not captured."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        unsupported(tx, "backward() with torch.distributed, where gradients may be reduced as they arrive")
    if leaf.real is None:
        return
    if leaf.real._is_view() or not leaf.real.is_leaf:
        unsupported(tx, "backward() into a view of another tensor")

# %% [markdown]
# ## The calls
#
# `differentiate` emits the node and notes which autograd nodes have lost what they had saved, for a later second
# `backward()`. It is used by both entrances: `backward`, which finds the leaves itself and accumulates into them,
# and `torch.autograd.grad`, which is told for what the gradients are wanted, and returns them.

# %%
def differentiate(tx: Tracer, outputs: list, leaves: list, tangents: Value, retain_graph: Value, create_graph: Value,
                  to_keep: bool) -> list[Value]:
    """Emit the node. Afterwards what forward had saved is gone, unless the graph is retained."""
    if create_graph.value:
        unsupported(tx, "create_graph=True: derivatives of derivatives")
    if any(type(t) is not TensorVal for t in (*outputs, *leaves)):
        unsupported(tx, "gradients of something that is no tensor")
    retain = retain_graph.value if retain_graph is not NONE else False
    given = NONE if tangents is NONE else TupleVal(items=tangents)
    before = history_of([o.fake for o in outputs])
    saving = {node for node in before if any(isinstance(t, torch.Tensor) for t in saved_by(node))}
    result = emit(tx, "call_function", gradients, [
        TupleVal(items=outputs), TupleVal(items=leaves), given, Const(value=bool(retain)), Const(value=to_keep)], {})
    if not retain:
        tx.effects.consumed |= saving
    return list(result.items)


def as_list(tx: Tracer, value: Value) -> list[Value]:
    """The tensors of an argument that may be one tensor or a sequence of them."""
    return [value] if type(value) in (TensorVal, Const) else unpack(tx, value)


# %% [markdown]
# In `backward` the order of steps is the engine's. All gradients come from one node. Then, leaf by leaf, the
# tensor's hooks may change the gradient, it is accumulated, and hooks that wait for this are told. A gradient that
# came out of a hook may be shared with somebody else, so it goes through `to_be_kept` once more.

# %%
@handles(torch.autograd.backward)
def backward(tx: Tracer, tensors, grad_tensors=NONE, retain_graph=NONE, create_graph=Const(value=False),
             inputs=NONE) -> Value:
    """torch.autograd.backward(...)"""
    outputs = as_list(tx, tensors)
    if any(type(o) is not TensorVal or not o.fake.requires_grad for o in outputs):
        unsupported(tx, "backward() of a tensor that does not require a gradient")
    leaves = leaves_of(tx, outputs)
    if inputs is not NONE:
        wanted = as_list(tx, inputs)
        if any(w not in leaves for w in wanted):
            unsupported(tx, "backward(inputs=...) with tensors that are no leaves of the graph")
        leaves = [leaf for leaf in leaves if leaf in wanted]
    for leaf in leaves:
        check_leaf(tx, leaf)
    tangents = grad_tensors if grad_tensors is NONE else as_list(tx, grad_tensors)
    found = differentiate(tx, outputs, leaves, tangents, retain_graph, create_graph, to_keep=True)
    for i in in_order_of_engine(outputs, leaves):
        leaf, gradient = leaves[i], found[i]
        changed, later = changed_by_hooks(tx, leaf, gradient), hooks_of(tx, leaf, LATER_HOOKS)
        if type(changed) is not TensorVal:
            continue
        if getattr(leaf.real, TENSOR_HOOKS, None):                      # a hook may have kept it, or returned what is used elsewhere
            one = TupleVal(items=[changed])
            changed, = emit(tx, "call_function", to_be_kept, [one, TupleVal(items=[leaf]), one], {}).items
        accumulate(tx, leaf, changed)
        if later is not NONE and getattr(leaf.real, LATER_HOOKS):
            call(tx, wrap(tx, tell_hooks), [later, leaf], {})
    return NONE


# %% tags=["exercise:gradient-slot"]
def accumulate(tx: Tracer, leaf: TensorVal, gradient: TensorVal):
    """`leaf` gets one more gradient: what `leaf.grad` is from here on, and what the graph does for it, is what the engine would do."""
    present = gradient_of(tx, leaf)
    if type(present) is Const:                          # None
        set_gradient(tx, leaf, gradient)
    elif present.fake.requires_grad or present.fake.layout != gradient.fake.layout:
        unsupported(tx, "backward() into a gradient that itself requires a gradient")
    else:
        emit(tx, "call_method", "add_", [present, gradient], {})


# %%
@METHODS.of((TensorVal, "backward"))
def tensor_backward(tx, self, gradient=NONE, retain_graph=NONE, create_graph=Const(value=False), inputs=NONE):
    return backward(tx, self, gradient, retain_graph, create_graph, inputs)


@METHODS.of((TensorVal, "requires_grad_"))
def requires_grad_(tx, self, requires_grad=Const(value=True)):
    """Where it changes nothing, as for the gradients in `Optimizer.zero_grad`."""
    if self.fake.requires_grad != requires_grad.value:
        unsupported(tx, "Tensor.requires_grad_() that changes what the tensor is")
    return self


@handles(torch.autograd.grad)
def grad(tx: Tracer, outputs, inputs, grad_outputs=NONE, retain_graph=NONE, create_graph=Const(value=False),
         only_inputs=NONE, allow_unused=NONE, is_grads_batched=Const(value=False), materialize_grads=Const(value=False)):
    """torch.autograd.grad(...)"""
    if is_grads_batched.value:
        unsupported(tx, "torch.autograd.grad() with batched gradients")
    if materialize_grads.value and allow_unused is not NONE and not allow_unused.value:
        unsupported(tx, "torch.autograd.grad() that may not leave out gradients, and makes those that it leaves out")
    wanted, tangents = as_list(tx, inputs), grad_outputs if grad_outputs is NONE else as_list(tx, grad_outputs)
    outputs = as_list(tx, outputs)
    found = differentiate(tx, outputs, wanted, tangents, retain_graph, create_graph, to_keep=False)
    if materialize_grads.value:
        found = [emit(tx, "call_function", torch.zeros_like, [w], {}) if type(g) is Const else g for w, g in zip(wanted, found)]
    elif any(type(g) is Const for g in found) and not (allow_unused is not NONE and allow_unused.value):
        unsupported(tx, "torch.autograd.grad() for a tensor that is not used")
    for i in in_order_of_engine(outputs, wanted):
        found[i] = changed_by_hooks(tx, wanted[i], found[i])
    return TupleVal(items=found)
