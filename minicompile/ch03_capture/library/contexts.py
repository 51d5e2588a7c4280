# %% [markdown]
# # Context managers that the compiler knows
#
# `with torch.no_grad():` changes what the operations inside mean, so it must be in the graph. It appears
# there as plain calls, `torch._C._set_grad_enabled(False)` and later `(True)`. While tracing, the same call
# is made for real: the state of the library *is* the interpreter's record of the state, and fakes then get
# the right `requires_grad` and the right autocast dtype without any rule of ours. `close_all` undoes it when
# the trace ends, however it ends. `with torch.device("cuda"):` needs no node: each call inside that makes a
# tensor is given the device as an argument.

# %%
import contextlib
import functools
from dataclasses import replace

import torch
from torch.utils._device import DeviceContext

from ..attributes import GETATTR, is_patched
from ..calls import HANDLED, handles
from ..epilogue import pool, reconstructs
from ..exceptions import user_errors
from ..protocol import METHODS
from ..tensors import finish_node
from ..tracer import CALLS, Tracer, call, unsupported
from ..values import AbstractValue, BIRTHS, BuiltinVal, Const, ContextVal, FALSE, NONE, const
from ..wrap import BUILDERS, wrap, wrap_parts
from .builtins_ import refused

enter_autocast = torch.amp.autocast_mode._enter_autocast
exit_autocast = torch.amp.autocast_mode._exit_autocast


def set_grad(tx: Tracer, enabled: bool):
    """Switch grad mode in the graph and in the tracing thread."""
    if torch.is_grad_enabled() != enabled:
        finish_node(tx, tx.graph.call_function(torch._C._set_grad_enabled, (enabled,)), None)
        torch._C._set_grad_enabled(enabled)


def enter(tx: Tracer, context: ContextVal) -> AbstractValue:
    """context.__enter__()"""
    if context.kind == "grad":
        context.saved.append(torch.is_grad_enabled() if context.immediate is None else context.immediate)
        set_grad(tx, context.state[0])
    elif context.kind == "autocast":
        with user_errors():
            real = enter_autocast(*context.state)
        node = tx.graph.call_function(enter_autocast, tuple(context.state))
        finish_node(tx, node, None)
        context.saved.append((node, real))
    elif context.kind == "device":
        context.saved.append(DeviceContext(*context.state))
        context.saved[-1].__enter__()
    tx.contexts.append(context)
    context.entered = next(BIRTHS)
    return context if context.kind == "autocast" else context.result or NONE


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
    elif context.kind == "device":
        context.saved.pop().__exit__(None, None, None)


def close_all(tx: Tracer) -> list:
    """Leave every context, because the graph ends inside of them or the trace has failed; answers them,
    outermost first."""
    active = list(tx.contexts)
    for context in reversed(active):
        leave(tx, context)
    return active


# %% [markdown]
# ## As a value
#
# A context manager has attributes like any other value, so it may be entered by hand, or by a
# `contextlib.ExitStack`, whose Python code is inlined and calls `type(cm).__enter__(cm)`. Where the graph
# breaks inside, it ends before the call that entered: Python enters, and what follows is traced in that
# state. Called as a decorator, `@torch.no_grad()`, it wraps a function: each call enters a fresh copy.

# %%
def not_entered(context: ContextVal) -> ContextVal:
    return replace(context, saved=[], immediate=None, source=None)


@GETATTR.of(ContextVal)
def context_attribute(tx, value, name):
    if name == "__enter__":
        return BuiltinVal(name=name, call=lambda tx, args, kwargs: enter(tx, value))
    if name == "__exit__":
        return BuiltinVal(name=name, call=lambda tx, args, kwargs: leave(tx, value) or FALSE, stands_for=value)
    if name == "clone":
        return BuiltinVal(name=name, call=lambda tx, args, kwargs: not_entered(value))
    if name == "__class__":
        return wrap(tx, value.cls)
    if name == "prev" and value.kind == "grad":
        return const(value.saved[-1] if value.saved else False)
    unsupported(tx, f"the attribute {name} of a context manager")


def leaves_context(value) -> bool:
    """Whether this is the bound `__exit__` that `with` keeps on the stack; a resume function makes it anew."""
    return type(value) is BuiltinVal and type(value.stands_for) is ContextVal


def device_context(device: Const) -> ContextVal:
    return ContextVal(kind="device", state=(device.value,), cls=torch.device, result=device)


METHODS[Const, "__enter__"] = lambda tx, device: enter(tx, device_context(device))


@METHODS.of((Const, "__exit__"))
def leave_device(tx, device, *error):
    """A device is a context manager without a state of its own: what it leaves is what was entered last."""
    innermost = tx.contexts[-1] if tx.contexts else None
    if innermost is None or innermost.result is not device:
        unsupported(tx, "a device left in another order than entered")
    leave(tx, innermost)


@CALLS.of(ContextVal)
def decorate(tx, context, args, kwargs):
    def apply(tx, call_args, call_kwargs):
        inner = not_entered(context)
        enter(tx, inner)
        try:
            return call(tx, args[0], call_args, call_kwargs)
        finally:
            leave(tx, inner)
    return BuiltinVal(call=apply, name="decorated")


# %% [markdown]
# Those that a program keeps in variables, such as a `no_grad` made in an `__init__`, are known by kind, and what they will set is a
# constant that is guarded. One that leaves is a call of its class.

# %%
def wrap_context(kind_of_context, *names):
    def build_context(tx, real, kind, source):
        if is_patched(kind):
            return None
        state = tuple(v.value for v in wrap_parts(tx, real, source, *names)) or (kind is torch.enable_grad,)
        return ContextVal(kind=kind_of_context, state=state, cls=kind, source=source)
    return build_context


BUILDERS.update({
    torch.no_grad: wrap_context("grad"),
    torch.enable_grad: wrap_context("grad"),
    torch.set_grad_enabled: wrap_context("grad", "mode"),
    torch.amp.autocast_mode.autocast: wrap_context("autocast", "device", "fast_dtype", "_enabled", "_cache_enabled"),
})


@reconstructs(ContextVal)
def context_text(ep, value):
    if value.kind == "autocast":
        device, dtype, enabled, cache = value.state
        return (f"{pool(ep, value.cls)}({device!r}, dtype={pool(ep, dtype)}, enabled={enabled}, "
                f"cache_enabled={cache})")
    if value.kind == "device":
        return pool(ep, value.state[0])
    if value.cls is torch.set_grad_enabled:
        return f"{pool(ep, grad_switch)}({value.state[0]}, {value.immediate})"
    return f"{pool(ep, value.cls)}()"


# %% [markdown]
# ## Making one
#
# What `torch.no_grad()` or `torch.autocast("cuda", torch.bfloat16)` give when called.

# %%
def grad_switch(mode: bool, previous: bool) -> torch.set_grad_enabled:
    """The `set_grad_enabled(mode)` that the trace made when the grad mode was `previous`. The constructor
    would note, and switch, the mode of the moment at which the object is rebuilt."""
    context = object.__new__(torch.set_grad_enabled)
    context.mode, context.prev = mode, previous
    return context


# %% [markdown]
# For autocast and `set_grad_enabled` a real object is made first, so that PyTorch itself checks the arguments and fills in
# defaults, and the state is taken from it.
# `set_grad_enabled` is odd: it switches the mode when it is *made*, not when it is entered, so this is undone and
# done again as an effect of the trace. `inference_mode` is refused, because tensors that are made inside stay
# different from others for ever.

# %%
def made_of_constants(tx: Tracer, cls: type, args, kwargs):
    if not all(type(a) is Const for a in (*args, *kwargs.values())):
        unsupported(tx, f"{cls.__name__}() with arguments that are not constants")
    with user_errors():
        return cls(*(a.value for a in args), **{k: v.value for k, v in kwargs.items()})


def make_autocast(cls, tx, *args, **kwargs) -> ContextVal:
    real = made_of_constants(tx, cls, args, kwargs)
    return ContextVal(kind="autocast", state=(real.device, real.fast_dtype, real._enabled, real._cache_enabled), cls=torch.autocast)


@handles(torch.set_grad_enabled)
def make_grad_switch(tx, *args, **kwargs) -> ContextVal:
    real = made_of_constants(tx, torch.set_grad_enabled, args, kwargs)
    torch._C._set_grad_enabled(real.prev)
    set_grad(tx, real.mode)                      # takes effect already when it is made
    return ContextVal(kind="grad", state=(real.mode,), cls=torch.set_grad_enabled, immediate=real.prev)


HANDLED.update({cls: functools.partial(make_autocast, cls) for cls in (torch.autocast, torch.cpu.amp.autocast, torch.cuda.amp.autocast)})
HANDLED.update(dict.fromkeys((torch.profiler.record_function, torch.autograd.profiler.record_function),
                             lambda tx, *args, **kwargs: call(tx, wrap(tx, contextlib.nullcontext), [])))
HANDLED.update({
    torch.no_grad: lambda tx: ContextVal(kind="grad", state=(False,), cls=torch.no_grad),
    torch.enable_grad: lambda tx: ContextVal(kind="grad", state=(True,), cls=torch.enable_grad),
    torch.inference_mode: refused("inference_mode(), whose results are inference tensors")})
