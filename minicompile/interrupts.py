# %% [markdown]
# # What Python calls by itself
#
# Some functions are called by Python, in the middle of whatever runs at that moment: callbacks of the garbage collector, finalisers,
# handlers of signals. They are no part of the compiled call that they interrupt, and few run there a second time, so they run outside of
# the region, with all that they call. Weak references call C or, through `weakref.finalize`, a method that is known.

# %%
import contextlib
import functools
import gc
import sys
import threading
import weakref

import torch
from torch import is_grad_enabled, is_inference_mode_enabled

from . import marks
from .ch03_capture import hook
from .errors import called_by, handlers_of_signals, interrupts

FINALIZE = weakref.finalize.__call__.__code__


def comes_unasked(code) -> bool:
    """Is this code called by Python when it comes to that, not by the program?"""
    if code.co_name == "__del__" or code is FINALIZE:
        return True
    return code in handlers_of_signals() or any(called_by(callback) is code for callback in (*gc.callbacks, sys.unraisablehook))


# %% [markdown]
# ## In the middle of a compilation
#
# The compiler is such a moment, too. While it traces, the thread is in modes that turn every tensor into a fake, and where the program has
# been followed into a `torch.no_grad()`, gradients are off. A handler knows nothing of this: its tensors are the program's. So the
# compiler runs in a region of its own, `COMPILING`, whose only targets are the functions above. The hook hands their frames to
# `run_as_before`, which puts the thread into the state in which the compiler found it. PyTorch has no name for that state.
# `ThreadState` has its parts, as far as a trace changes them. `again` puts them back for a while, and `restore` when the compiler is done.
#
# | what | how it is put back |
# |---|---|
# | dispatch modes, of which there were none | taken off |
# | function modes: default devices | those on top of the program's are taken off |
# | the sets of dispatch keys (below autograd, without Python, autocast or not) | a guard |
# | whether functions ask for `__torch_function__`, gradients, inference mode | contexts |
# | whether autocast is on, and in what dtype | set, and set again |
# | hooks for saved tensors, which the compiler has taken off | put on |

# %%
AUTOCAST = ("cpu", "cuda")


def autocast_states() -> list[tuple]:
    return [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in AUTOCAST]


def set_autocast(states: list[tuple]) -> None:
    for device, enabled, dtype in states:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


class ThreadState:
    """What this thread is in. hooks: for saved tensors, outermost first, if they were taken off. raised: by a handler of signals."""

    def __init__(self):
        self.hooks, self.raised = (), None
        self.grad, self.inference = is_grad_enabled(), is_inference_mode_enabled()
        self.asks, self.depth = torch._C._is_torch_function_enabled(), torch._C._len_torch_function_stack()
        self.keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        self.autocast = autocast_states()

    @contextlib.contextmanager
    def again(self):
        """Inside, the thread is in this state again."""
        with contextlib.ExitStack() as stack:
            while torch._C._len_torch_dispatch_stack():
                stack.callback(torch._C._push_on_torch_dispatch_stack, torch._C._pop_torch_dispatch_stack(None))
            while torch._C._len_torch_function_stack() > self.depth:
                stack.callback(torch._C._push_on_torch_function_stack, torch._C._pop_torch_function_stack())
            stack.callback(set_autocast, autocast_states())
            set_autocast(self.autocast)
            stack.enter_context(torch._C._ForceDispatchKeyGuard(*self.keys))
            if self.inference != is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            if self.asks:
                stack.enter_context(torch._C._EnableTorchFunction())
            for pack, unpack in self.hooks:
                torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
                stack.callback(torch._C._autograd._pop_saved_tensors_default_hooks)
            yield

    def restore(self) -> None:
        """An interrupt, or the recursion limit, can strike while a mode of the tracer is being left, and leave it on."""
        while torch._C._len_torch_dispatch_stack():
            torch._C._pop_torch_dispatch_stack(None)
        while torch._C._len_torch_function_stack() > self.depth:
            torch._C._pop_torch_function_stack()
        restore_gradients(self.grad)
        if autocast_states() != self.autocast:
            set_autocast(self.autocast)


def restore_gradients(grad: bool) -> None:
    with torch._C.DisableTorchFunction():               # at the recursion limit, a mode that sees this call would end the process
        torch._C._set_grad_enabled(grad)


# %% [markdown]
# The hook has to be installed, or nobody sees those frames. Where a frame is compiled it is. What is compiled later, from within
# `backward()`, is run by `as_compiler`, which installs it. A thread can be in several compilations, one inside of the other: a handler may
# ask for a second derivative.
#
# What a handler of signals raises, such as `TimeoutError`, is for the program, which waits for it around its call. The compiler may take it
# for a mistake of its own and go on, so it is kept, and raised at the end. (In what was compiled, guards and graphs, `interrupts` tells it
# from their own exceptions.) What a finaliser raises Python reports, and nobody gets it.

# %%
COMPILING = "the compiler"                       # a context, in which nothing is captured
_found = threading.local()


@contextlib.contextmanager
def without_saved_tensor_hooks():
    """The user's hooks are for the tensors that the program saves, not for those of a compilation or a trial. Others in their place
    would not do: under any hooks the engine does not notice that what it has saved was written to."""
    autograd, hooks = torch._C._autograd, []
    while (top := autograd._top_saved_tensors_default_hooks(False)) is not None:
        hooks.append(top)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield hooks[::-1]
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


@contextlib.contextmanager
def compiling(state: ThreadState | None = None):
    """Inside, this thread compiles: what Python calls by itself finds it as it was in `state`, or is now."""
    outer, _found.state = getattr(_found, "state", None), (state := state or ThreadState())
    try:
        with without_saved_tensor_hooks() as state.hooks, hook.in_region(COMPILING):
            yield
    finally:
        _found.state = outer
        if state.raised is not None:
            raise state.raised


def as_compiler(function, *args):
    with compiling():
        return hook.run(COMPILING, function, *args)


@functools.cache
def is_of_library(filename: str) -> bool:
    return hook.is_library_file(filename)


KEPT_FROM_TORCH = torch._disable_dynamo(comes_unasked).__code__       # all functions that it decorates have this one
DECORATED = KEPT_FROM_TORCH.co_freevars.index("fn")


def target_in_compiler(code):
    """The target of code that runs while this thread compiles. Nearly all is the compiler's own, or PyTorch's, and is not asked further."""
    if code is KEPT_FROM_TORCH:
        return run_undecorated
    try:
        return run_as_before if code is FINALIZE or not is_of_library(code.co_filename) and comes_unasked(code) else None
    except Exception as error:
        if interrupts(error):
            _found.state.raised = error
        raise


@marks.passed_over
def run_undecorated(function, args, kwargs):
    """Meta kernels that are written in Python are decorated: torch.compile is not to look into them. It does not here, but
    the decoration would import all of it. (`__wrapped__` may be another function: some are decorated again in place.)"""
    return function.__closure__[DECORATED].cell_contents(*args, **kwargs)


@marks.passed_over
def run_as_before(function, *values):
    args, kwargs = hook.arguments_of(function.__code__, values)
    handles_signal = function.__code__ in handlers_of_signals()         # it may take itself off
    with (state := _found.state).again():
        try:
            return hook.run(None, function, *args, **kwargs)
        except Exception as error:
            if handles_signal:
                state.raised = error
            raise


def interrupted() -> bool:
    """Whether a handler of signals has raised since this compilation began."""
    return _found.state.raised is not None
