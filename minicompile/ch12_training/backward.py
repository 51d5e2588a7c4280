# %% [markdown]
# # What the program calls
#
# Two functions of PyTorch ask for gradients. `backward()` finds the leaves and adds to their `.grad`, and `torch.autograd.grad` is told
# for what gradients are wanted, and returns them. Both come to `differentiate` (`walk.py`). The rest of this page is what they do
# besides: which `.grad` there is from then on, and what a program does to it between two calls.
#
#     def twice(p, x):
#         (p * x).sum().backward()
#         (p * 3).sum().backward()
#         return p.grad.norm()
#
# The first gradient is assigned to `p.grad`, where none was, and the second is added to it in place. Both are values of the graph, and
# so is what the program reads afterwards:
#
#     gradients: (f32[3]) = gradients((sum_1,), (p,), None, False, True)
#     getitem: f32[3] = getitem(gradients, 0)
#     mul_1: f32[3] = mul(p, 3)
#     sum_2: f32[] = mul_1.sum()
#     gradients_1: (f32[3]) = gradients((sum_2,), (p,), None, False, True)
#     getitem_1: f32[3] = getitem(gradients_1, 0)
#     add_: f32[3] = getitem.add_(getitem_1)
#     norm: f32[] = getitem.norm()
#     return (norm, getitem)
#
# That `p.grad` was None is guarded, and the gradient itself is a result of the graph, which the line `p.grad = __out[1]` behind it assigns.

# %%
import inspect

import torch

from ..ch01_graphs.graph import history_of
from ..ch03_capture.calls import handles, inline_code
from ..ch03_capture.iterate import unpack
from ..ch03_capture.protocol import METHODS
from ..ch03_capture.storage import taken_without_gradients, views_of
from ..ch03_capture.tensors import emit, finish_node, rename_tensor
from ..ch03_capture.tracer import Tracer, call, location, unsupported
from ..ch03_capture.values import NONE, AbstractValue, Const, ObjVal, TensorVal, TupleVal
from ..ch03_capture.wrap import wrap
from ..errors import SkipFrame
from .engine import is_at, leaves_of, to_be_kept
from .hooks import LATER_HOOKS, TENSOR_HOOKS, changed_by_hooks, hooks_of, points_before, retain_grad, tell_hooks
from .slots import autograd, gradient_of, set_gradient
from .walk import check_history, check_leaf, check_wanted, differentiate


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
    elif self.fake._version != self.version and views_of(tx, self):
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
    """The tensor itself loses its history. A view refuses, and an argument is another tensor to its owner after the call. What is a view
    of the tensor keeps its history until one of them is written to, and then has none."""
    if self.real is not None or self.fake._is_view() or self in autograd(tx).retained or self in autograd(tx).hooks or tx.outer is not None:
        unsupported(tx, "Tensor.detach_() of an input or a view, or of a tensor with hooks")
    if self.fake.requires_grad and any(v.fake.requires_grad for v in views_of(tx, self)):
        unsupported(tx, "Tensor.detach_() of a tensor that has views with a history")
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
        zeros, named = wrap(tx, torch.zeros_like), {"requires_grad": Const(value=bool(create_graph.value))}
        result = [call(tx, zeros, [w], named) if type(g) is Const else g for w, g in zip(wanted, result)]
    elif any(type(g) is Const for g in result) and not (allow_unused is not NONE and allow_unused.value):
        unsupported(tx, "torch.autograd.grad() for a tensor that is not used")
    return TupleVal(items=result)
