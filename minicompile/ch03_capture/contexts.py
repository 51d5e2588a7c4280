# %% [markdown]
# # Context managers that the compiler knows
#
# `with torch.no_grad():` changes what the operations inside mean, so it must be in the graph. It appears
# there as plain calls, `torch._C._set_grad_enabled(False)` and later `(True)`. While tracing, the same call
# is made for real: the state of the library *is* the interpreter's record of the state, and fakes then get
# the right `requires_grad` and the right autocast dtype without any rule of ours. `restore` undoes it when
# the trace ends, however it ends.

# %%
from __future__ import annotations

import contextlib

import torch

from .attributes import attributes_of
from .interpreter import Tracer, unsupported
from .tensors import finish_node
from .values import Const, ContextVal, NONE, PropertyVal, Value
from .wrap import wrap

enter_autocast = torch.amp.autocast_mode._enter_autocast
exit_autocast = torch.amp.autocast_mode._exit_autocast


def set_grad(tx: Tracer, enabled: bool):
    """Switch grad mode in the graph and in the tracing thread."""
    if torch.is_grad_enabled() != enabled:
        finish_node(tx, tx.graph.call_function(torch._C._set_grad_enabled, (enabled,)), None)
        torch._C._set_grad_enabled(enabled)


def enter(tx: Tracer, context: ContextVal) -> Value:
    """context.__enter__()"""
    if context.kind == "grad":
        context.saved.append(getattr(context, "immediate", torch.is_grad_enabled()))
        set_grad(tx, context.state[0])
    elif context.kind == "autocast":
        node = tx.graph.call_function(enter_autocast, tuple(context.state))
        finish_node(tx, node, None)
        context.saved.append((node, enter_autocast(*context.state)))
    tx.contexts.append(context)
    return NONE if context.kind == "grad" else context if context.kind == "autocast" else context.result


def leave(tx: Tracer, context: ContextVal):
    """context.__exit__(...)"""
    if not tx.contexts or tx.contexts[-1] is not context:
        unsupported(tx, "context managers left in another order than entered")
    tx.contexts.pop()
    if context.kind == "grad":
        set_grad(tx, context.saved.pop())
    elif context.kind == "autocast":
        node, real = context.saved.pop()
        finish_node(tx, tx.graph.call_function(exit_autocast, (node,)), None)
        exit_autocast(real)


def close_all(tx: Tracer) -> list:
    """Leave every context in the graph (the graph ends inside them); answers them, outermost first."""
    active = list(tx.contexts)
    for context in reversed(active):
        leave(tx, context)
    return active


def restore(tx: Tracer):
    """Undo the contexts for real, after a trace that failed in the middle."""
    while tx.contexts:
        context = tx.contexts.pop()
        if context.kind == "grad":
            torch._C._set_grad_enabled(context.saved.pop())
        elif context.kind == "autocast":
            exit_autocast(context.saved.pop()[1])


# %%
@attributes_of(ContextVal)
def context_attribute(tx, value, name):
    if name == "__enter__":
        return PropertyVal(name=name, call=lambda tx, args, kwargs: enter(tx, value))
    if name == "__exit__":
        return ContextExit(name=name, call=lambda tx, args, kwargs: leave(tx, value) or Const(value=False),
                           context=value)
    if name == "clone":
        return PropertyVal(name=name, call=lambda tx, args, kwargs: ContextVal(
            kind=value.kind, state=value.state, factory=value.factory))
    if name == "__class__":
        return wrap(tx, value.factory)
    if name == "prev" and value.kind == "grad":
        return Const(value=value.saved[-1] if value.saved else False)
    unsupported(tx, f"the attribute {name} of a context manager")


class ContextExit(PropertyVal):
    """The bound `__exit__` that `with` keeps on the stack; a resume function makes it anew."""

    def __init__(self, name, call, context):
        super().__init__(call=call, name=name)
        self.context = context


# %% [markdown]
# ## Making one
#
# What `torch.no_grad()`, `torch.autocast("cuda", torch.bfloat16)` or `nullcontext(x)` give when called.

# %%
def make_context(tx: Tracer, cls: type, args, kwargs) -> Value | None:
    """The context value for a call of a known class, or None when the class is not known."""
    if cls in (torch.no_grad, torch.enable_grad):
        return ContextVal(kind="grad", state=(cls is torch.enable_grad,), factory=cls)
    if cls in (torch.set_grad_enabled, torch.autograd.grad_mode.set_grad_enabled):
        mode = (list(args) + list(kwargs.values()))[0]
        if type(mode) is not Const:
            unsupported(tx, "set_grad_enabled() of something that is no constant")
        context = ContextVal(kind="grad", state=(bool(mode.value),), factory=cls)
        context.immediate = torch.is_grad_enabled()
        set_grad(tx, bool(mode.value))
        return context
    if issubclass(cls, torch.amp.autocast_mode.autocast):
        if not all(type(a) is Const for a in (*args, *kwargs.values())):
            unsupported(tx, "autocast() with arguments that are not constants")
        real = cls(*(a.value for a in args), **{k: v.value for k, v in kwargs.items()})
        return ContextVal(kind="autocast", state=(real.device, real.fast_dtype, real._enabled, real._cache_enabled),
                          factory=torch.autocast)
    if cls in (torch.profiler.record_function, torch.autograd.profiler.record_function):
        context = ContextVal(kind="null", factory=contextlib.nullcontext)
        context.result = NONE
        return context
    if cls is contextlib.nullcontext:
        context = ContextVal(kind="null", factory=cls)
        context.result = args[0] if args else kwargs.get("enter_result", NONE)
        return context
    return None
