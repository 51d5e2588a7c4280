# %% [markdown]
# # Context managers that the compiler knows
#
# `with torch.no_grad():` changes what the operations inside mean, so it must be in the graph. It appears
# there as plain calls, `torch._C._set_grad_enabled(False)` and later `(True)`. While tracing, the same call
# is made for real: the state of the library *is* the interpreter's record of the state, and fakes then get
# the right `requires_grad` and the right autocast dtype without any rule of ours.
#
# PyTorch's context managers are objects of classes written in Python, and are inlined as any others. Those for gradients come down to
# one function of C, which switches the mode. What the mode is at the end of a trace is an effect of it like others (`capture.py`).

# %%
import contextlib
import functools
from dataclasses import dataclass, field
from typing import Callable

import torch
from torch import is_grad_enabled
from torch.utils._device import DeviceContext

from ..attributes import get_attribute, store_attribute
from ..calls import HANDLED, handles
from ..comparisons import identical
from ..exceptions import user_errors
from ..protocol import METHODS
from ..tensors import finish_node
from ..tracer import Tracer, call, unsupported
from ..values import AbstractValue, BIRTHS, Const, FALSE, MethodName, MethodVal, ObjVal, boolean, const
from ..wrap import wrap
from .builtins_ import refused

enter_autocast = torch.amp.autocast_mode._enter_autocast
exit_autocast = torch.amp.autocast_mode._exit_autocast


def set_grad(tx: Tracer, enabled: bool):
    """Switch grad mode in the graph and in the tracing thread."""
    if is_grad_enabled() != enabled:
        finish_node(tx, tx.graph.call_function(torch._C._set_grad_enabled, (enabled,)), None)
        torch._C._set_grad_enabled(enabled)


@handles(torch._C._set_grad_enabled)
def switch_grad(tx, mode):
    before = is_grad_enabled()
    with user_errors():
        torch._C._set_grad_enabled(mode.value)
    mode = is_grad_enabled()
    torch._C._set_grad_enabled(before)
    set_grad(tx, mode)


# %% [markdown]
# Inlining the rest would be right and slow: six functions for each `with torch.no_grad()`. So their constructors are handled, and the
# methods of the two that people write in loops.

# %%
@handles(torch.set_grad_enabled)
def make_grad_switch(tx, *args, **named):
    made = ObjVal(cls=torch.set_grad_enabled)
    call(tx, get_attribute(tx, made, "__init__"), list(args), named)             # takes effect already when it is made
    return made


def make_grad_context(cls, tx, function=None):
    made = ObjVal(cls=cls, attrs={"prev": FALSE})
    return made if function is None else call(tx, made, [function])


def enter_grad(enabled, tx, self):
    store_attribute(tx, self, "prev", boolean(is_grad_enabled()))
    set_grad(tx, enabled)


def leave_grad(tx, self, exc_type, exc_value, traceback):
    switch_grad(tx, get_attribute(tx, self, "prev"))


for cls in (torch.no_grad, torch.enable_grad):
    HANDLED.update({cls: functools.partial(make_grad_context, cls), cls.__exit__: leave_grad,
                    cls.__enter__: functools.partial(enter_grad, cls is torch.enable_grad)})


# %% [markdown]
# ## Two that a graph cannot leave open
#
# Autocast is a call that enters and one that leaves, between which the graph has the casts. `with torch.device("cuda"):` needs no node:
# each call inside that makes a tensor is given the device as an argument. Where the graph ends inside of one of these, `close_all` leaves
# it, and a resume function enters it again (chapter 4).

# %%
@dataclass(eq=False)
class Entered:
    """A context that the trace is in. leave: a function that undoes it, in the graph and in the tracing thread."""
    manager: AbstractValue
    leave: Callable
    born: int = field(default_factory=BIRTHS.__next__)

    def left_by(self, value) -> bool:
        """Whether `value` is the bound `__exit__` that `with` keeps on the stack."""
        of_device = type(value) is MethodName and value.name == "__exit__"
        bound = of_device or type(value) is MethodVal and getattr(value.func, "real", None) is torch.autocast.__exit__
        return bound and value.self is self.manager


def leave(tx: Tracer, manager: AbstractValue, *error) -> AbstractValue:
    """manager.__exit__(...)"""
    if not tx.contexts or not identical(tx.contexts[-1].manager, manager):
        unsupported(tx, "context managers left in another order than entered")
    tx.contexts.pop().leave()
    return FALSE


def close_all(tx: Tracer) -> list:
    """Leave every context, because the graph ends inside of them or the trace has failed; answers them,
    outermost first."""
    active = list(tx.contexts)
    while tx.contexts:
        tx.contexts.pop().leave()
    return active


@handles(torch.autocast.__enter__)
def autocast(tx, self):
    state = tuple(get_attribute(tx, self, name).value for name in ("device", "fast_dtype", "_enabled", "_cache_enabled"))
    with user_errors():
        real = enter_autocast(*state)
    node = tx.graph.call_function(enter_autocast, state)
    finish_node(tx, node, None)

    def undo():
        finish_node(tx, tx.graph.call_function(exit_autocast, (node,)), None)
        exit_autocast(real)
    tx.contexts.append(Entered(self, undo))
    return self


@METHODS.of((Const, "__enter__"))
def enter_device(tx, device):
    context = DeviceContext(device.value)
    context.__enter__()
    tx.contexts.append(Entered(device, lambda: context.__exit__(None, None, None)))
    return device


HANDLED[torch.autocast.__exit__] = METHODS[Const, "__exit__"] = leave


# %% [markdown]
# What `torch.autocast("cuda", torch.bfloat16)` gives: a real object is made, so that PyTorch itself checks the arguments and fills in
# defaults, and its attributes are taken over. `inference_mode` is refused, because tensors that are made inside stay
# different from others for ever.

# %%
def make_autocast(cls, tx, *args, **kwargs) -> ObjVal:
    with user_errors():
        real = cls(*(a.value for a in args), **{k: v.value for k, v in kwargs.items()})
    return ObjVal(cls=torch.autocast, attrs={name: const(value) for name, value in vars(real).items()})


HANDLED.update({cls: functools.partial(make_autocast, cls) for cls in (torch.autocast, torch.cpu.amp.autocast, torch.cuda.amp.autocast)})
HANDLED.update(dict.fromkeys((torch.profiler.record_function, torch.autograd.profiler.record_function),
                             lambda tx, *args, **kwargs: call(tx, wrap(tx, contextlib.nullcontext), [])))
HANDLED[torch.inference_mode] = refused("inference_mode(), whose results are inference tensors")
HANDLED[torch.backends.cudnn.flags] = refused("cudnn.flags(), which chooses kernels for all that runs inside")
