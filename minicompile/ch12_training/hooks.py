# %% [markdown]
# # Hooks
#
# A hook is Python that the engine calls when it has the gradient of some tensor. Capture interprets it where the program
# calls `backward()`, as if the program called it there. For a *leaf* this is easy, because nothing follows: the gradient
# comes out of the `gradients` node, and the hook is interpreted behind it. A hook on an *activation* is called in the
# middle of a backward pass, and what it returns flows on from there. One node for the whole pass cannot give it that.
#
# So such a tensor becomes a *point*, at which a backward pass can be stopped. It is the identity, and one node of the
# graph. `backward()` then takes several passes: from the loss to the points, and from each point on, with
# what its hooks have made of the gradient:
#
#     h = x @ w                              h = x @ w
#     h.register_hook(clamp)                 p, = passed(h)
#     loss = h.square().sum()                loss = p.square().sum()
#     loss.backward()                        g, _ = gradients((loss,), (p, w), ..., stops=(p,))
#                                            c = clamp(g)
#                                            _, dw = gradients((h,), (p, w), (c,))
#
# Hooks of modules are made of the same piece. `register_full_backward_hook` passes the inputs of the module through one
# function that does nothing, and its outputs through another, and hangs hooks on the nodes of these two. Here each of
# them is a point with several tensors.

# %%
from dataclasses import field
from typing import Any

import torch
from torch import is_grad_enabled
from torch.utils.hooks import BackwardHook

from ..ch01_graphs.graph import closure, history_of
from ..ch02_guards.sources import HooksSource
from ..ch02_guards.stable import HOOKS_OF_TENSOR
from ..ch03_capture.attributes import GETATTR
from ..ch03_capture.calls import handles
from ..ch03_capture.iterate import unpack
from ..ch03_capture.methods import call_method
from ..ch03_capture.protocol import METHODS
from ..ch03_capture.tensors import check_unused, emit
from ..ch03_capture.tracer import Tracer, call, location, unsupported
from ..ch03_capture.values import NONE, AbstractValue, DictVal, MethodName, Mutable, TensorVal, TupleVal, const
from ..ch03_capture.wrap import part, wrap
from .slots import autograd


class Point(torch.autograd.Function):
    """The identity, at which a backward pass can be stopped."""

    @staticmethod
    def forward(ctx, *tensors):
        ctx.set_materialize_grads(False)
        ctx.stopped = False
        results = tuple([t.detach() for t in tensors])
        ctx.mark_non_differentiable(*[r for t, r in zip(tensors, results) if not t.requires_grad])
        return results

    @staticmethod
    def backward(ctx, *gradients):
        return (None,) * len(gradients) if ctx.stopped else gradients


def passed(*tensors):
    return Point.apply(*tensors)


# %% [markdown]
# ## Points of the trace
#
# A tensor becomes a point when its first hook is registered: from here on its value in the trace is what `passed` returns.
# What was computed from it before goes past the point, and the hook would not see the gradient that comes from there.
# That is a graph break, and it comes before this use; so it is for an input that was written, which has a new history.
# Otherwise both would leave the same graph, where the real tensor, which gets the hook, has no part in what was computed from it.
#
# A `Handle` is what the program gets, to remove its hook.

# %%
class Crossing(AbstractValue):
    """What stands for a point, and for the node of autograd's graph that a module's hooks are registered on. before, after: the
    tensors that go in, and come out. hooks: handle -> function; of one tensor, or, where `of_module`, of all of them."""
    before: list
    after: list
    of_module: bool
    hooks: dict = field(default_factory=dict)
    cls = torch.autograd.graph.Node


class Handle(Mutable):
    """What `register_hook` returns. hooks: those among which it is. location: the line that registered it."""
    hooks: dict
    location: Any
    cls = torch.utils.hooks.RemovableHandle


@GETATTR.of(Crossing, Handle)
def attribute(tx, self, name):
    return MethodName(self=self, name=name)


@METHODS.of((Handle, "remove"))
def remove(tx, self):
    self.hooks.pop(self, None)


@METHODS.of((Crossing, "register_hook"))
def register(tx, self, hook):
    handle = Handle(hooks=self.hooks, location=location(tx))
    self.hooks[handle] = hook
    return handle


def cross(tx: Tracer, tensors: list[TensorVal], of_module: bool) -> Crossing:
    """A new point that `tensors` pass."""
    if tx.effects.pure_since or tx.outer is not None:
        unsupported(tx, "a hook that is registered in code that is not run exactly once")
    before = [TensorVal(node=t.node, fake=t.fake) for t in tensors]
    after = emit(tx, passed, tensors).items
    point = Crossing(before=before, after=after, of_module=of_module)
    autograd(tx).points[next(t.fake.grad_fn for t in after if t.fake.grad_fn is not None)] = point
    return point


# %% [markdown]
# `cross` makes a point of some tensors: one node of the graph, `passed`, whose results take their place. A hook of a tensor
# that the trace has computed goes to its point. At a leaf there is nothing behind it, so a hook there needs no point: the
# record of `slots.py` has it in `hooks`, and in `later_hooks` those that wait until the gradient was accumulated.

# %%
@METHODS.of((TensorVal, "register_hook"))
def register_hook(tx: Tracer, self: TensorVal, hook: AbstractValue) -> AbstractValue:
    """tensor.register_hook(hook)"""
    if not self.fake.requires_grad:
        unsupported(tx, "a hook on a tensor that does not require a gradient")
    if self.is_leaf:
        return register_at_leaf(tx, self, hook, autograd(tx).hooks)
    point = autograd(tx).points.get(self.fake.grad_fn)
    if point is None or point.of_module:
        check_unused(tx, self, "a hook on a tensor that was used before")
        if self.real is not None:
            unsupported(tx, "a hook on a tensor that was computed before the compiled function was called")
        point = cross(tx, [self], of_module=False)
        self.node, self.fake = point.after[0].node, point.after[0].fake
        point.after[0] = tx.tensors.of_fake[id(self.fake)] = self
    return register(tx, point, hook)


def register_at_leaf(tx, leaf, hook, table) -> AbstractValue:
    if tx.effects.pure_since or tx.outer is not None:
        unsupported(tx, "a hook that is registered in code that is not run exactly once")
    handle = Handle(hooks=table.setdefault(leaf, {}), location=location(tx))
    handle.hooks[handle] = hook
    return handle


@METHODS.of((TensorVal, "register_post_accumulate_grad_hook"))
def register_later_hook(tx: Tracer, self: TensorVal, hook: AbstractValue) -> AbstractValue:
    if not self.is_leaf or not self.fake.requires_grad:
        unsupported(tx, "a hook for accumulated gradients of a tensor that is no leaf")
    return register_at_leaf(tx, self, hook, autograd(tx).later_hooks)


@METHODS.of((TensorVal, "retain_grad"))
def retain_grad(tx: Tracer, self: TensorVal) -> AbstractValue:
    """tensor.retain_grad(): a backward pass leaves its gradient in `.grad`, as for a leaf."""
    if not self.is_leaf and self.real is not None:
        check_unused(tx, self, "retain_grad() of a tensor that was used before")
    if not self.fake.requires_grad or not self.is_leaf and self.real is not None or tx.effects.pure_since:
        unsupported(tx, "retain_grad() of a tensor that was computed before the compiled function was called, or needs no gradient")
    if not self.is_leaf:
        autograd(tx).retained[self] = Handle(hooks={}, location=location(tx))
    return NONE


# %% [markdown]
# A module with full backward hooks calls a function of PyTorch's on its inputs and on its outputs. `apply_on_tensors` stands
# for it: one point for all tensors among them.

# %%
@handles(BackwardHook._apply_on_tensors)
def apply_on_tensors(tx: Tracer, self, fn: AbstractValue, args: AbstractValue) -> AbstractValue:
    """Pass the tensors among `args` through a node, and call `fn` with it. Returns the new `args` and the positions of the tensors."""
    items = unpack(tx, args)
    places = [i for i, item in enumerate(items) if type(item) is TensorVal]
    if not is_grad_enabled() or not any(items[i].fake.requires_grad for i in places):
        return TupleVal(items=[args, NONE])
    if type(args) is not TupleVal:
        unsupported(tx, "backward hooks of a module with such arguments or results")
    point = cross(tx, [items[i] for i in places], of_module=True)
    call(tx, fn, [point])
    for i, new in zip(places, point.after):
        items[i] = new
    return TupleVal(items=[TupleVal(items=items, cls=args.cls), wrap(tx, places)])


# %% [markdown]
# ## Calling them
#
# The first two functions are Python of ours that is *traced*, as if the program contained it. So a hook is inlined, and
# what it does becomes a part of the graph. They say what the engine does in C++. The hooks of a tensor get its gradient one
# after the other, and what one returns is what the next one gets; None changes nothing. Those of a node get all of its
# results, and what flowed into it. Those that run after accumulation get the leaf itself, and may not return anything.
# The list is copied before it is walked through, since a hook may remove itself.

# %%
TENSOR_HOOKS, LATER_HOOKS = HOOKS_OF_TENSOR


def run_hooks(hooks, grad_mode, result, *given):
    """What hooks make of `result`, a gradient of a tensor or the results of a node, to which gradients were `given`."""
    with torch.set_grad_enabled(grad_mode):
        for hook in list(hooks):
            other = hook(result, *given)
            if other is not None:
                result = other
    return result


def tell_hooks(hooks, leaf):
    """The hooks that run when the gradient of a leaf has been accumulated."""
    with torch.no_grad():
        for hook in list(hooks):
            if hook(leaf) is not None:
                raise RuntimeError("Tensor post accumulate grad hooks should return None.")


def hooks_of(tx: Tracer, tensor: TensorVal, name: str) -> list[AbstractValue]:
    """The hooks of a tensor: those that an input came with, guarded, unless they belong to what it was before it was written; and those of
    the trace."""
    table = autograd(tx).hooks if name == TENSOR_HOOKS else autograd(tx).later_hooks
    own = list(table.get(tensor, {}).values())
    if tensor.real is None or not tensor.real.is_leaf and tensor.fake._version != tensor.version:
        return own
    hooks = wrap(tx, getattr(tensor.real, name), part(HooksSource, tensor.source, name))
    return [*(unpack(tx, call_method(tx, hooks, "values", [])) if type(hooks) is DictVal else ()), *own]


def changed_by_hooks(tx: Tracer, hooks: list[AbstractValue], gradient: AbstractValue, create_graph: bool) -> AbstractValue:
    if type(gradient) is not TensorVal or not hooks:
        return gradient
    made = call(tx, wrap(tx, run_hooks), [TupleVal(items=hooks), const(create_graph), gradient])
    check_changed(tx, made, gradient)
    return made


def check_changed(tx, made, gradient):
    if type(made) is not TensorVal or made.fake.shape != gradient.fake.shape or made.fake.dtype != gradient.fake.dtype:
        unsupported(tx, "a hook that makes something else of a gradient")


def changed_at_point(tx: Tracer, point: Crossing, gradients: list[AbstractValue], create_graph: bool) -> list[AbstractValue]:
    """What flows on from a point, for each of its tensors a gradient or None."""
    if not point.of_module:
        return [changed_by_hooks(tx, list(point.hooks.values()), gradients[0], create_graph)]
    results = [g if type(g) is TensorVal else emit(tx, torch.zeros_like, [t]) for g, t in zip(gradients, point.before)]
    if not point.hooks:
        return results
    items = unpack(tx, call(tx, wrap(tx, run_hooks), [
        TupleVal(items=list(point.hooks.values())), const(create_graph), TupleVal(items=results), TupleVal(items=gradients)]))
    if len(items) != len(results):
        unsupported(tx, "a hook that returns another number of gradients")
    for new, old in zip(items, results):
        if new is not NONE:
            check_changed(tx, new, old)
    return items


# %% [markdown]
# ## Passes from point to point
#
# Points are numbered by their order in the program, and backward comes to later ones first.

# %%
def points_before(tx: Tracer, outputs: list[TensorVal]) -> list[Crossing]:
    """The points in the history of `outputs`, later ones first."""
    history = history_of([o.fake for o in outputs]) if autograd(tx).points else ()
    return [point for node, point in reversed(autograd(tx).points.items()) if node in history]


def until_points(tx: Tracer, outputs: list[TensorVal]) -> set:
    """The nodes of the autograd graph that a pass from `outputs` comes to, if it stops at points."""
    return closure([o.fake.grad_fn for o in outputs if o.fake.grad_fn is not None], lambda node: () if node in autograd(tx).points else
                   filter(None, (before for before, _ in node.next_functions)))
