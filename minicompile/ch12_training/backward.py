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
import contextlib
import inspect
from dataclasses import dataclass, field
from typing import Callable

import torch

from ..ch01_graphs.fake import storage_key
from ..ch01_graphs.graph import closure, history_of
from ..ch01_graphs.layouts import is_dense, same_layout
from ..ch01_graphs.trace import backward_pass
from ..ch02_guards.sources import AttrSource
from ..ch03_capture.calls import handles, inline_code
from ..ch03_capture.iterate import unpack
from ..ch03_capture.protocol import METHODS
from ..ch03_capture.storage import taken_without_gradients
from ..ch03_capture.tensors import emit, finish_node, rename_tensor
from ..ch03_capture.tracer import Tracer, answer, call, guard, location, unsupported
from ..ch03_capture.values import NONE, AbstractValue, Const, ObjVal, TensorVal, TupleVal
from ..ch03_capture.wrap import wrap
from ..ch05_autograd.joint import saved_by
from ..errors import SkipFrame
from .data import on_former
from .hooks import (LATER_HOOKS, TENSOR_HOOKS, changed_at_point, changed_by_hooks, hooks_of, points_before, retain_grad, tell_hooks,
                    until_points)
from .slots import autograd, gradient_of, guard_apart, set_gradient

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
    # A recorder belongs to its thread
    with backward_pass(), without_hooks(leaves), stopped_at(stops), torch.autograd.set_multithreading_enabled(False):
        found = torch.autograd.grad(outputs, leaves, tangents, retain_graph=retain_graph, create_graph=create_graph, allow_unused=True)
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
# ## What is refused
#
# The engine does more than add up when it comes to a leaf. Under `torch.distributed` gradients are reduced as they arrive. A
# leaf that is a view has a history outside. And two inputs may be one tensor, or one may have been computed from another,
# before the call: then a gradient has to come by a way that the trace does not see. Each of these is asked here. What can be
# another way in the next call is guarded, what cannot be captured is a break.

# %%
def check_leaf(tx: Tracer, leaf: TensorVal):
    """What accumulating into a leaf may do beyond adding and calling hooks is not captured."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        unsupported(tx, "backward() with torch.distributed, where gradients may be reduced as they arrive")
    check_end(tx, leaf, "backward()")


def check_end(tx: Tracer, leaf: TensorVal, call: str):
    """The history of `leaf` ends in it, also outside of the trace."""
    if leaf.real is None:
        return
    if leaf.real._is_view() or not leaf.real.is_leaf:
        unsupported(tx, f"{call} into a view of another tensor")
    check_form(tx, leaf, call)
    guard_gradient(tx, leaf, "NOT_A_VIEW", True)


def check_form(tx: Tracer, tensor: TensorVal, call: str):
    """The engine brings a gradient into the form that the tensor had when it first was differentiated, or refuses it. Since then it may
    have got memory of another form."""
    if tensor.real.requires_grad:
        node, i = torch.autograd.graph.get_gradient_edge(tensor.real)[:2]
        if tuple(node._input_metadata[i].shape) != tuple(tensor.real.shape):
            unsupported(tx, f"{call} into a tensor that has got another shape since it was first differentiated")


def check_history(tx: Tracer, outputs: list, wanted: list):
    """An input may be another one, or have been computed from it: then the gradient would have to come also by that way."""
    ends = history_of([o.fake for o in outputs if type(o) is TensorVal])
    entered = {n for n in ends if type(n).__name__ == "EnterBackward"}
    leaves = [leaf for n in ends if type(n).__name__ == "AccumulateGrad" and (leaf := tx.tensors.of_fake.get(id(n.variable)))]
    inputs = [w for w in wanted if type(w) is TensorVal and w.real is not None and (w.fake.is_leaf or w.fake.grad_fn in entered)]
    for w in inputs:
        if entered - {w.fake.grad_fn}:
            unsupported(tx, "torch.autograd.grad() into a tensor that was computed before the compiled function was called")
    for leaf in leaves if inputs else ():
        if inputs != [leaf]:
            check_end(tx, leaf, "torch.autograd.grad()")
    guard_apart(tx, dict.fromkeys([*inputs, *leaves]) if inputs else ())


def guard_gradient(tx: Tracer, tensor: TensorVal, kind: str, expected=None):
    """A parameter is never a view, and asking each costs time in every step."""
    if tensor.cls is not torch.nn.Parameter:
        guard(tx, tensor.source, kind, expected)


def check_wanted(tx: Tracer, tensor: TensorVal):
    """Eager finds no gradient for a view that was taken while gradients were off, though its fake, a leaf, has one."""
    if type(tensor) is not TensorVal or tensor.real is None:
        return
    try:
        unconnected = tensor.real._is_view() and tensor.real.grad_fn is None and tensor.real._base.requires_grad
    except RuntimeError:                    # autograd refuses to say so of a view that a write has invalidated
        unconnected = True
    if unconnected:
        unsupported(tx, "torch.autograd.grad() for a view that was taken, while gradients were off, of a tensor that requires one")
    check_form(tx, tensor, "torch.autograd.grad()")
    if not tensor.real.is_leaf:
        guard(tx, AttrSource(tensor.source, "retains_grad"), "CONSTANT_MATCH", tensor.real.retains_grad)
        if tensor.real.retains_grad:
            raise SkipFrame("torch.autograd.grad() for an argument that retains its gradient")
    guard_gradient(tx, tensor, "GRADIENT_OF_ITS_OWN")

# %% [markdown]
# ## The calls
#
# `differentiate` is used by both entrances: `backward`, which finds the leaves itself and accumulates into them,
# and `torch.autograd.grad`, which is told for what the gradients are wanted, and returns them.
#
# Without hooks it is one pass: one node, and a note of which autograd nodes have lost what they had saved, for a later second
# `backward()`. A hook is a point that gradients have to pass, so with hooks the pass stops there, the
# hook runs, and the next pass goes on behind it.

# %%
@dataclass(eq=False)
class Walk:
    """The passes of one call. leaves: what gradients are wanted for; pending: those of them that have none yet. points: still to be
    passed. create: the gradients are to have a history; retain: what forward has saved stays; keep: the gradients go into `.grad`.
    found: tensor -> the sum of what came to it. arrived(leaf, gradient or None): called for each leaf when its gradient is complete."""
    tx: Tracer
    leaves: list
    points: list
    create: bool
    retain: bool
    keep: bool
    arrived: Callable
    found: dict = field(default_factory=dict)

    def __post_init__(self):
        self.pending = dict.fromkeys(self.leaves)
        self.several = bool(self.points)                # where a pass stops, the engine would free what lies behind, too


def one_pass(walk: Walk, outputs: list, wanted: list, tangents: AbstractValue, stops: list, nodes) -> None:
    """Emit the node of a pass from `outputs`, which comes to `nodes` of the autograd graph."""
    tx = walk.tx
    if on_former(tx, nodes) is not None:
        unsupported(tx, "backward() through a tensor whose attribute data was set since")
    saving = {node for node in on_the_way(nodes, wanted) if any(isinstance(t, torch.Tensor) for t in saved_by(node))}
    if walk.several and not saving.isdisjoint(autograd(tx).consumed):
        unsupported(tx, "backward() through a graph a second time")
    further = {"create_graph": Const(value=True)} if walk.create else {}
    if stops:
        further["stops"] = TupleVal(items=stops)
    result = emit(tx, gradients, [TupleVal(items=outputs), TupleVal(items=wanted), tangents,
                                 Const(value=walk.retain or walk.several), Const(value=walk.keep)], further)
    if not walk.retain:
        autograd(tx).consumed |= saving
    for leaf, gradient in zip(wanted, result.items):
        if type(gradient) is TensorVal:
            before = walk.found.get(leaf)
            walk.found[leaf] = gradient if before is None else emit(tx, torch.add, [before, gradient])


def arrive(walk: Walk, leaf: TensorVal, gradient: AbstractValue) -> None:
    if leaf in walk.pending:
        del walk.pending[leaf]
        walk.arrived(leaf, gradient)


def deliver(walk: Walk, outputs: list) -> None:
    """Leaves that no point is before have all of their gradient now."""
    for i in in_order_of_engine(walk.tx, outputs, walk.leaves):
        leaf = walk.leaves[i]
        if leaf in walk.pending and not any(leads_to(p.before, leaf) or leaf in p.after for p in walk.points):
            arrive(walk, leaf, walk.found.get(leaf, NONE))


# %% [markdown]
# With points, the walk alternates. `pass_to_points` goes from the outputs to the leaves and points in front of it, and
# `pass_point` runs the hooks of the latest point that a gradient has come to. What it lets through is where the next pass begins.
# A point may stand for a module, whose hooks see several tensors at once, so it has tensors `before` and `after` it. If one of
# the latter is a leaf as well, its gradient is what arrives at the point. `differentiate` joins the two: without points there is one
# pass, and the loop does not run.

# %%
def pass_to_points(walk: Walk, outputs: list, tangents: AbstractValue) -> None:
    tx, nodes = walk.tx, until_points(walk.tx, outputs)
    here = [p for p in walk.points if any(t.fake.grad_fn in nodes for t in p.after)]
    if any(t.fake.requires_grad and autograd(tx).points.get(t.fake.grad_fn) is not p for p in here for t in p.after):
        unsupported(tx, "a tensor with a hook that was written to")
    leaves = [t for t in walk.leaves if is_one_of(t, outputs) or is_at(t, nodes)]
    wanted = dict.fromkeys(leaves + [t for p in here for t in p.after if t.fake.requires_grad])
    if wanted:
        stops = [next(t for t in p.after if t.fake.requires_grad) for p in here]
        one_pass(walk, outputs, list(wanted), tangents, stops, nodes)
    deliver(walk, outputs)


def pass_point(walk: Walk) -> tuple[list, AbstractValue] | None:
    """The tensors before the next point, and the gradients that it lets through; None if no gradient has come to any."""
    while walk.points:
        point = walk.points.pop(0)
        arriving = [walk.found.get(t, NONE) for t in point.after]
        if all(g is NONE for g in arriving):
            continue
        flowing = changed_at_point(walk.tx, point, arriving, walk.create)
        for t, g in zip(point.after, arriving if point.of_module else flowing):
            arrive(walk, t, g)
        through = [(t, g) for t, g in zip(point.before, flowing) if g is not NONE and t.fake.requires_grad]
        return [t for t, _ in through], TupleVal(items=[g for _, g in through])
    return None


# %% [markdown]
# `differentiate` first sees to what it is given: everything must be a tensor of the trace, and a leaf that is wanted twice is computed
# once. Only those points matter that lie in front of a leaf. Without any, one pass gives all gradients.

# %%
def differentiate(tx: Tracer, outputs: list, leaves: list, tangents: AbstractValue, retain_graph: AbstractValue,
                  create_graph: AbstractValue, arrived, to_keep: bool = False) -> None:
    """Emit the node, or one for each pass from point to point (`hooks.py`). `arrived(leaf, gradient)` is called for each leaf when its
    gradient, or None, is complete. Afterwards what forward had saved is gone, unless the graph is retained."""
    if any(type(t) is not TensorVal for t in (*outputs, *leaves)):
        unsupported(tx, "gradients of something that is no tensor")
    if answer(tx, torch.is_anomaly_enabled) and answer(tx, torch.is_anomaly_check_nan_enabled):
        unsupported(tx, "backward() under anomaly detection, which looks for NaN in each gradient")
    create, leaves = bool(create_graph.value), list(dict.fromkeys(leaves))         # one may be wanted twice
    retain = create if retain_graph is NONE else bool(retain_graph.value)
    points = [p for p in points_before(tx, outputs) if any(leads_to(p.before, t) or t in p.after for t in leaves)]
    walk = Walk(tx, leaves, points, create, retain, to_keep and not points, arrived)
    tangents = NONE if tangents is NONE else TupleVal(items=tangents)
    if not points:
        one_pass(walk, outputs, leaves, tangents, [], history_of([o.fake for o in outputs]))
    further = (outputs, tangents) if points else None
    while further is not None:
        outputs, tangents = further
        pass_to_points(walk, outputs, tangents)
        further = pass_point(walk)
    deliver(walk, outputs)


# %% [markdown]
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


def as_list(tx: Tracer, value: AbstractValue) -> list[AbstractValue]:
    """The tensors of an argument that may be one tensor or a sequence of them."""
    return [value] if type(value) in (TensorVal, Const) else unpack(tx, value)


# %% [markdown]
# In `backward` the order of steps is the engine's. All gradients come from one node. Then, leaf by leaf, the
# tensor's hooks may change the gradient, it is accumulated, and hooks that wait for this are told. A gradient that
# came out of a hook may be shared with somebody else, so it goes through `to_be_kept` once more.

# %%
@handles(torch.autograd.backward)
def backward(tx: Tracer, tensors, grad_tensors=NONE, retain_graph=NONE, create_graph=Const(value=False),
             inputs=NONE) -> AbstractValue:
    """torch.autograd.backward(...)"""
    outputs = as_list(tx, tensors)
    if any(type(o) is not TensorVal or not o.fake.requires_grad for o in outputs):
        unsupported(tx, "backward() of a tensor that does not require a gradient")
    leaves, history = leaves_of(tx, outputs), history_of([o.fake for o in outputs])
    retained = [t for t in autograd(tx).retained if t.fake.grad_fn in history]
    if inputs is not NONE:
        wanted = as_list(tx, inputs)
        for w in wanted:
            if type(w) is not TensorVal or not is_at(w, history):
                unsupported(tx, "backward(inputs=...) with something that is not in the history")
            retain_grad(tx, w)
        if any(t not in wanted for t in retained):
            unsupported(tx, "backward(inputs=...) where other tensors retain their gradients")
        leaves, retained = [leaf for leaf in leaves if leaf in wanted], [w for w in wanted if not w.is_leaf]
    for leaf in leaves:
        check_leaf(tx, leaf)

    def arrived(leaf, gradient):
        if not leaf.is_leaf:
            return retain(tx, leaf, gradient)
        hooks, later = hooks_of(tx, leaf, TENSOR_HOOKS), hooks_of(tx, leaf, LATER_HOOKS)
        changed = changed_by_hooks(tx, hooks, gradient, bool(create_graph.value))
        if type(changed) is not TensorVal:
            return
        if hooks or points_before(tx, outputs):                         # a hook may have kept it, or returned what is used elsewhere
            one = TupleVal(items=[changed])
            changed, = emit(tx, to_be_kept, [one, TupleVal(items=[leaf]), one]).items
        accumulate(tx, leaf, changed, bool(create_graph.value))
        if later:
            call(tx, wrap(tx, tell_hooks), [TupleVal(items=later), leaf], {})

    tangents = grad_tensors if grad_tensors is NONE else as_list(tx, grad_tensors)
    differentiate(tx, outputs, [*leaves, *retained], tangents, retain_graph, create_graph, arrived, to_keep=not retained)
    return NONE


# %% tags=["exercise:gradient-slot"]
def accumulate(tx: Tracer, leaf: TensorVal, gradient: TensorVal, create_graph: bool):
    """`leaf` gets one more gradient: what `leaf.grad` is from here on, and what the graph does for it, is what the engine would do. With
    `create_graph` the sum has a history, so what was there is not overwritten."""
    present = gradient_of(tx, leaf)
    if type(present) is Const:                          # None
        set_gradient(tx, leaf, gradient)
    elif create_graph:
        set_gradient(tx, leaf, emit(tx, "add", [present, gradient]))
    elif present.fake.requires_grad or present.fake.layout != gradient.fake.layout:
        unsupported(tx, "backward() into a gradient that itself requires a gradient")
    else:
        emit(tx, "add_", [present, gradient])


# %% [markdown]
# ## Clearing
#
# `zero_grad()` asks of each parameter whether it has a gradient, and drops it if it has one. Before the first step there
# is none and before the second there is, so a trace that asks is a version for the first step alone, forward, backward,
# update and all. But after the loop all gradients are None, whatever was there. So the trace does not ask. It assigns
# None to each slot, and the end of the compiled function does the same, for a gradient that is there and for one that
# is not.

# %%
def clear_group(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            clear_one(p)


def clear_module(module):
    for p in module.parameters():
        clear_one(p)


def clear_one(p):
    if p.grad is not None:
        p.grad = None


@handles(clear_one)
def clear_slot(tx: Tracer, p: AbstractValue) -> AbstractValue:
    if type(p) is not TensorVal or p.real is None or not p.real.is_leaf:
        return inline_code(tx, wrap(tx, clear_one), [p], {})
    return set_gradient(tx, p, NONE)


def handle_clearing(function, loop, is_plain):
    @handles(function)
    def zero_grad(tx: Tracer, self, set_to_none=Const(value=True)) -> AbstractValue:
        """zero_grad(set_to_none=True)"""
        if type(set_to_none) is Const and set_to_none.value and type(self) is ObjVal and is_plain(getattr(self.real, "__dict__", {})):
            return call(tx, wrap(tx, loop), [self])
        return inline_code(tx, wrap(tx, inspect.unwrap(function)), [self, set_to_none], {})


handle_clearing(torch.optim.Optimizer.zero_grad, clear_group, lambda fields: "_zero_grad_profile_name" in fields)
handle_clearing(torch.nn.Module.zero_grad, clear_module, lambda fields: "_is_replica" not in fields)


# %% [markdown]
# An activation that retains its gradient gets one that is contiguous, and is never written in place.

# %%
def retain(tx: Tracer, tensor: TensorVal, gradient: AbstractValue):
    if type(gradient) is TensorVal:
        present = gradient_of(tx, tensor)
        autograd(tx).gradients[tensor] = emit(tx, torch.add, [present, gradient]) if type(present) is TensorVal else \
            emit(tx, "clone", [gradient], {"memory_format": Const(value=torch.contiguous_format)})


# %% [markdown]
# Four entrances are left. `Tensor.backward` is `torch.autograd.backward` of one tensor. `requires_grad_` makes a
# leaf of a tensor that the trace has made, there and then; an input gets its flag before the graph runs, and only as
# long as the graph has not used it. And `torch.autograd.grad` refuses first what it cannot do, then lets
# `differentiate` compute, with the hooks of each tensor on the way.
#
# `requires_grad_` has four cases: nothing changes; the tensor was made by the trace, and becomes a leaf by a node; it is an
# input that the graph has not used yet, whose flag is noted (`flags`); or it is one that the graph has used, and then the graph
# has to end before. `detach_` takes the history from a tensor that the trace has made.

# %%
@METHODS.of((TensorVal, "backward"))
def tensor_backward(tx, self, gradient=NONE, retain_graph=NONE, create_graph=Const(value=False), inputs=NONE):
    return backward(tx, self, gradient, retain_graph, create_graph, inputs)


@METHODS.of((TensorVal, "requires_grad_"))
def requires_grad_(tx, self, requires_grad=Const(value=True)):
    """What the trace has made becomes a leaf there and then. An input does before the graph runs, if the graph has not used it yet."""
    if self.fake.requires_grad == requires_grad.value and not (self.real is not None and taken_without_gradients(self.real)):
        return self
    if self.fake.grad_fn is not None or tx.effects.pure_since or tx.outer is not None:
        unsupported(tx, "Tensor.requires_grad_() of a tensor with a history, or in code that is not run exactly once")
    if not self.fake.is_floating_point() and not self.fake.is_complex():
        unsupported(tx, f"Tensor.requires_grad_() of a {self.fake.dtype} tensor")
    if self.real is None:
        node = tx.graph.call_method("requires_grad_", (self.node, requires_grad.value))
        finish_node(tx, node, self.fake)
    elif self.fake._version != self.version and any(v.fake._base is self.fake for v in tx.tensors.of_fake.values()):
        # Autograd gives a view a history that is older than the last write. Behind a break it would be a new view
        raise SkipFrame("Tensor.requires_grad_() of an input that the graph has written to, and has views of", location(tx))
    elif self.node.users or self.node.op != "placeholder" or self.real._is_view() or self.source is None:
        unsupported(tx, "Tensor.requires_grad_() of an input that the graph has used, or of a view")
    else:
        autograd(tx).flags[self] = requires_grad.value
    self.fake.requires_grad_(requires_grad.value)
    return self


@METHODS.of((TensorVal, "detach_"))
def detach_(tx, self):
    """The tensor itself loses its history. A view refuses, and an argument is another tensor to its owner after the call."""
    if self.real is not None or self.fake._is_view() or self in autograd(tx).retained or self in autograd(tx).hooks or tx.outer is not None:
        unsupported(tx, "Tensor.detach_() of an input or a view, or of a tensor with hooks")
    if self.fake.requires_grad:
        rename_tensor(tx, self, emit(tx, "detach", [self]))
    return self


# %% [markdown]
# What `torch.autograd.grad` cannot do here depends on hooks: those of a tensor on the way are called once for each pass, and several wanted
# tensors may need several passes. It returns gradients and puts none into `.grad`, so what arrives at a tensor is only
# collected, after its hooks have changed it. A tensor that no output depends on has no gradient. With
# `materialize_grads` that is a tensor of zeros, with `allow_unused` it is None, and otherwise PyTorch raises, so the graph breaks.

# %%
@handles(torch.autograd.grad)
def grad(tx: Tracer, outputs, inputs, grad_outputs=NONE, retain_graph=NONE, create_graph=Const(value=False),
         only_inputs=NONE, allow_unused=NONE, is_grads_batched=Const(value=False), materialize_grads=Const(value=False)):
    """torch.autograd.grad(...)"""
    if is_grads_batched.value:
        unsupported(tx, "torch.autograd.grad() with batched gradients")
    if materialize_grads.value and allow_unused is not NONE and not allow_unused.value:
        unsupported(tx, "torch.autograd.grad() that may not leave out gradients, and makes those that it leaves out")
    wanted, tangents = as_list(tx, inputs), grad_outputs if grad_outputs is NONE else as_list(tx, grad_outputs)
    outputs, found = as_list(tx, outputs), {}
    if len(wanted) > 1 and any(w in p.after and p.hooks for p in autograd(tx).points.values() for w in wanted):
        unsupported(tx, "torch.autograd.grad() for several tensors, one of which has a hook")
    if any(t.fake.grad_fn in history_of([o.fake for o in outputs if type(o) is TensorVal]) for t in autograd(tx).retained):
        unsupported(tx, "torch.autograd.grad() where a tensor retains its gradient")

    check_history(tx, outputs, wanted)
    for w in wanted:
        check_wanted(tx, w)

    def arrived(leaf, gradient):
        found[leaf] = changed_by_hooks(tx, hooks_of(tx, leaf, TENSOR_HOOKS), gradient, bool(create_graph.value))

    differentiate(tx, outputs, wanted, tangents, retain_graph, create_graph, arrived)
    result = [found[w] for w in wanted]
    if materialize_grads.value:
        result = [emit(tx, torch.zeros_like, [w]) if type(g) is Const else g for w, g in zip(wanted, result)]
    elif any(type(g) is Const for g in result) and not (allow_unused is not NONE and allow_unused.value):
        unsupported(tx, "torch.autograd.grad() for a tensor that is not used")
    return TupleVal(items=result)
