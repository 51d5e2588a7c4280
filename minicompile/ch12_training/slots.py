# %% [markdown]
# # Slots
#
# What a program sees of autograd, besides results, are attributes of tensors and hooks. A trace must not change them, so it notes
# what has become of them, in one record.
#
# `grad` is special. A program may read it, clear it and set it, and an optimizer does all three. What the
# trace assigns is noted, read from there if somebody asks again, and assigned for real at the end.
#
# `Autograd` is the record. `gradients` has what `.grad` of a leaf has become in the trace, `found` what was read there before
# anything was assigned. So `gradient_of` looks into the first, then into the second, and only then wraps the real attribute,
# with a guard.
#
# A function that halves a gradient, called when `p.grad` is None. What its version asks about the slot, what follows the graph, and the
# graph:
#
#     def halved(p, x):
#         (p * x).sum().backward()
#         p.grad = p.grad / 2
#         return p.grad.norm()
#
#     p.grad == None
#     p.grad = __out[1]
#     return __out[0]
#
#     mul: f32[3] = mul(p, x)
#     sum_1: f32[] = mul.sum()
#     gradients: (f32[3]) = gradients((sum_1,), (p,), None, False, True)
#     getitem: f32[3] = getitem(gradients, 0)
#     truediv: f32[3] = truediv(getitem, 2)
#     norm: f32[] = truediv.norm()
#     return (norm, truediv)
#
# The slot has been None, then what `backward` found, then half of it. Only the last is assigned, and `p.grad.norm()` read it from the
# record.

# %%
from dataclasses import dataclass, field

import torch

from ..ch01_graphs.graph import known_history
from ..ch02_guards.sources import AttrSource, path_of
from ..ch03_capture.attributes import SETATTR
from ..ch03_capture.epilogue import (
    AHEAD,
    ENDINGS,
    HISTORIES,
    expression,
    leaves_in,
    output_text,
    pool,
    refuse_to_leave,
    source_text,
    written_with_history,
)
from ..ch03_capture.tensors import TENSOR_ATTRIBUTES, finish_node
from ..ch03_capture.tracer import Tracer, call, guard, notes_of, unsupported
from ..ch03_capture.values import NONE, AbstractValue, Const, MethodName, TensorVal, const
from ..ch03_capture.wrap import wrap
from ..tables import Table


@dataclass(eq=False)
class Autograd:
    """gradients: leaf -> what its `.grad` has become; found: leaf -> what was read there before. consumed: nodes of the autograd graph
    that a backward pass has freed. points: node of the autograd graph -> what the trace knows of the hooks there; hooks, later_hooks:
    leaf -> hooks that the trace has registered, by their handles; retained: tensors that retain their gradients, with a handle. flags:
    input -> whether it requires a gradient, from before the graph runs."""
    gradients: dict = field(default_factory=dict)
    found: dict = field(default_factory=dict)
    points: dict = field(default_factory=dict)
    hooks: dict = field(default_factory=dict)
    later_hooks: dict = field(default_factory=dict)
    retained: dict = field(default_factory=dict)
    flags: dict = field(default_factory=dict)
    consumed: set = field(default_factory=set)


def autograd(tx: Tracer) -> Autograd:
    return notes_of(tx, Autograd)


def gradient_of(tx: Tracer, leaf: TensorVal) -> AbstractValue:
    """`leaf.grad`, as it is now."""
    notes = autograd(tx)
    if leaf in notes.gradients or leaf.real is None:
        return notes.gradients.get(leaf, NONE)
    if leaf not in notes.found:
        notes.found[leaf] = wrap(tx, leaf.real.grad, AttrSource(leaf.source, "grad"))
    return notes.found[leaf]


# %% [markdown]
# Assigning is noting. Eager checks what is assigned to `.grad` (shape, dtype, device), so it is checked here, and what eager
# would refuse is left to it. In code that the compiled function may run more than once, or not at all, nothing may be assigned
# (`pure_since`).

# %%
def set_gradient(tx: Tracer, leaf: TensorVal, gradient: AbstractValue):
    """`leaf.grad = gradient`; it happens at the end of the compiled function."""
    if leaf.real is not None and not leaf.real.is_leaf:
        unsupported(tx, "the attribute grad of a tensor that is no leaf")
    if gradient is not NONE and (type(gradient) is not TensorVal or gradient is leaf or any(
            getattr(gradient.fake, fact) != getattr(leaf.fake, fact) for fact in ("shape", "dtype", "device"))):
        unsupported(tx, "the attribute grad set to what is no gradient of the tensor")
    if tx.effects.pure_since:
        unsupported(tx, "a gradient assigned in code that is not run exactly once")
    autograd(tx).gradients[leaf] = gradient


# %% [markdown]
# Chapter 3 asks tables for what it does not know about tensors. Here are the entries: what writing `x.grad` and
# `x.requires_grad` does, and what reading `x.grad` and `x.retains_grad` gives. Of a tensor that is no leaf eager gives None and
# a warning, and so the question is left to the general case.

# %%
SETTERS = Table()            # name -> function(tx, tensor, value or None)


@SETATTR.of(TensorVal)
def set_tensor_attribute(tx, tensor, name, value):
    return SETTERS[name](tx, tensor, value) if name in SETTERS else NotImplemented


@SETTERS.of("grad")
def set_grad(tx, tensor, value):
    set_gradient(tx, tensor, NONE if value is None else value)


@SETTERS.of("requires_grad")
def set_requires_grad(tx, tensor, value):
    if type(value) is not Const or not tensor.is_leaf:
        return NotImplemented
    call(tx, MethodName(self=tensor, name="requires_grad_"), [value])


TENSOR_ATTRIBUTES.update({
    "grad": lambda tx, tensor: gradient_of(tx, tensor) if tensor.is_leaf or tensor in autograd(tx).retained
    or tensor in autograd(tx).gradients else NotImplemented,
    "retains_grad": lambda tx, tensor: const(tensor in autograd(tx).retained) if tensor.is_leaf or tensor.real is None else NotImplemented})


# %% [markdown]
# Two leaves of the trace have two slots. If the next call passes one tensor for both, there is one slot, to which both
# gradients are added. So they are guarded to be different, those among them that could be the same at all: of one class, dtype
# and number of dims.

# %%
def guard_apart(tx: Tracer, tensors):
    """`tensors`, those of them that are inputs, are different ones: one that came twice would have one gradient."""
    alike: dict = {}
    for t in tensors:
        if t.source is not None:
            alike.setdefault((t.cls, t.fake.dtype, t.fake.dim()), []).append(t.source)
    for source, *others in alike.values():
        if others:
            guard(tx, source, "NOT_ALIASED", tuple(others))


# %% [markdown]
# ## The end of the trace
#
# What was noted becomes lines of the compiled function, behind the graph: one assignment of `.grad` for each leaf that the
# caller can see and whose gradient has changed. A hook that the trace has registered and not removed would have to be called by
# later backward passes; it cannot leave, which is a graph break.

# %%
def write_gradients(ep) -> None:
    tx, notes = ep.tx, autograd(ep.tx)
    for leaf, gradient in notes.gradients.items():
        if leaf.source is not None or leaf in ep.names:
            if gradient is NONE and leaf.source is not None and tx.guards.has_none(AttrSource(leaf.source, "grad")):
                continue                             # a step that ends with `zero_grad()` finds none and leaves none
            ep.writes.append(f"{expression(ep, leaf)}.grad = {expression(ep, gradient)}")
    for leaf, hooks in (*notes.hooks.items(), *notes.later_hooks.items()):
        if hooks and leaf.source is not None:
            refuse_to_leave(ep, "a tensor with a hook that the function has registered", next(iter(hooks)))
    for written in written_with_history(tx) if notes.points or notes.hooks or notes.later_hooks else ():
        refuse_hooks(ep, written)
    if notes.gradients:
        guard_apart(tx, {**notes.gradients, **notes.found})


ENDINGS.append(write_gradients)


# %% [markdown]
# Some of it comes before the graph runs: the old gradients go that nothing reads, and inputs get their flags.

# %% tags=["exercise:forget-gradients"]
def forget_gradients(ep) -> list[str]:
    """Lines of text that drop, before the graph runs, the gradients that the end replaces and that nothing reads: no node, and not the
    text that `ep` has written, which also reads what is reached through a gradient. A step that begins with `zero_grad()` then needs no
    memory for the gradients of the step before. They are no inputs of the graph any more."""
    tx, lines, unread = ep.tx, [], set()
    read = {source for value in ep.names for source in path_of(value.source)}
    for leaf in autograd(tx).gradients:
        old = autograd(tx).found.get(leaf)               # None: the program has not looked whether there is one
        if type(old) is TensorVal and not old.node.users and old.node not in ep.outputs and old.source not in read:
            unread.add(old.node)
        elif old is not None or leaf.source is None:
            continue
        lines.append(f"{source_text(ep, leaf.source)}.grad = None")
    for node in unread:
        del tx.tensors.inputs[node]
        tx.graph.erase_node(node)
    return lines


# %%
AHEAD.append(lambda ep: [*forget_gradients(ep), *(
    f"{source_text(ep, leaf.source)}.requires_grad_({flag})" for leaf, flag in autograd(ep.tx).flags.items())])


# %% [markdown]
# ## Tensors that leave after a `backward()`
#
# A tensor whose autograd graph was used up by a `backward()` in the trace still says that it requires a
# gradient, and asking for one is an error, the one that eager raises.
# Where a history is not used up, a later `backward()` comes through it without the hooks that the trace has seen, and the graph
# ends before the hook is made. So it is with a leaf itself, and with an input that was written.

# %%
def spent_text(ep, value) -> str | None:
    notes = autograd(ep.tx)
    if notes.consumed and is_consumed(ep.tx, value.fake):
        node = ep.tx.graph.call_method("detach", (value.node,))
        finish_node(ep.tx, node, value.fake.detach())
        return f"{pool(ep, with_spent_history)}({output_text(ep, node)}, {value in notes.retained})"
    if notes.points or notes.hooks or notes.later_hooks or notes.retained:
        refuse_hooks(ep, value)


HISTORIES.append(spent_text)


def is_consumed(tx, fake) -> bool:
    """Whether a backward pass in the trace has freed what the derivative of `fake` needs."""
    return not autograd(tx).consumed.isdisjoint(known_history(fake))


class Spent(torch.autograd.Function):
    """The identity, whose derivative is what a second `backward()` is in eager."""

    @staticmethod
    def forward(ctx, anchor, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("Trying to backward through the graph a second time (or directly access saved tensors after they "
                           "have already been freed). The compiled function has called backward() on it; specify "
                           "retain_graph=True there.")


def with_spent_history(tensor, retains_grad):
    with torch.enable_grad():
        spent = Spent.apply(torch.empty(0, requires_grad=True), tensor)
        if retains_grad:
            spent.retain_grad()
        return spent


def refuse_hooks(ep, value):
    notes, history = autograd(ep.tx), known_history(value.fake)
    leaves = {id(value.fake), *leaves_in(history)}
    hooks = [h for node, point in notes.points.items() if node in history for h in point.hooks]
    hooks += [h for leaf, found in (*notes.hooks.items(), *notes.later_hooks.items())
              if leaf.source is None and id(leaf.fake) in leaves for h in found]
    hooks += [h for tensor, h in notes.retained.items() if tensor is value]
    if hooks:
        refuse_to_leave(ep, "a tensor on which a hook waits, or that depends on one,", hooks[0])
