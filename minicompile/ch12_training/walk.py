# %% [markdown]
# # From the outputs to the leaves
#
# `differentiate` is what each call of the engine comes to, from `backward()` or from `torch.autograd.grad`: outputs, the tensors that
# gradients are wanted for, and somebody to tell when one is complete.
#
# Without hooks it is one pass: one node, and a note of which autograd nodes have lost what they had saved, for a later second
# `backward()`. A pass in the backward of an `autograd.Function` is yet to come, and has freed nothing. A hook is Python code that sees
# a gradient on its way and may return another:
#
#     def hooked(p, x):
#         h = p * x
#         h.register_hook(lambda g: g * 2)
#         h.sum().backward()
#
# So it is a *point* that gradients have to pass (`hooks.py`). The pass stops there, the hook is interpreted, its operators follow in the
# graph, and the next pass goes on behind it with what it returned:
#
#     mul: f32[3] = mul(p, x)
#     passed: (f32[3]) = passed(mul)
#     getitem: f32[3] = getitem(passed, 0)
#     sum_1: f32[] = getitem.sum()
#     gradients: (f32[3]) = gradients((sum_1,), (getitem,), None, True, False, stops=(getitem,))
#     getitem_1: f32[3] = getitem(gradients, 0)
#     _set_grad_enabled: None = _set_grad_enabled(False)
#     mul_1: f32[3] = mul(getitem_1, 2)
#     _set_grad_enabled_1: None = _set_grad_enabled(True)
#     gradients_1: (f32[3]) = gradients((mul,), (p,), (mul_1,), True, False)
#
# `passed` is the point: a function that returns its argument, so that there are two tensors, the one before the hook and the one after it.

# %%
from dataclasses import dataclass, field
from typing import Callable

import torch

from ..ch01_graphs.graph import history_of
from ..ch02_guards.sources import AttrSource
from ..ch03_capture.inputs import is_form_of
from ..ch03_capture.tensors import emit
from ..ch03_capture.tracer import Tracer, answer, guard, unsupported
from ..ch03_capture.values import NONE, AbstractValue, Const, TensorVal, TupleVal
from ..ch05_autograd.joint import saved_by
from ..errors import SkipFrame
from .data import on_former
from .engine import gradients, in_order_of_engine, is_at, is_one_of, leads_to, on_the_way
from .hooks import changed_at_point, points_before, until_points
from .slots import autograd, guard_apart


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
    if not walk.retain and tx.outer is None:
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
        if not is_form_of(node._input_metadata[i], tensor.real):
            unsupported(tx, f"{call} into a tensor that has got another shape or dtype since it was first differentiated")


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
