# %% [markdown]
# # Without the frame hook
#
# Building `frame_hook.c` needs CPython's headers, and a system Python often comes without them. This module
# has the same functions as the C extension, in Python, so the rest of the compiler need not know which of the two it has. It
# can do one thing less: it never sees a frame by itself.
#
# The hook is called by CPython, for every frame. Here there is one place at which something can be done, `run(context, f, ...)`, which
# stands behind each function that `minicompile.compile` has returned. That is enough to replace the call of `f`: `run` binds the
# arguments of `f`, consults the same rules as the hook would for the frame of `f`, and calls the target in place of `f`. So the
# function that was compiled is captured, with everything that capture inlines. But a compiled function that ends in a graph break (chapter
# 4) *calls* what comes next: the instruction that cannot be in a graph, what that calls, and the rest of the function. These are ordinary
# calls of Python, `run` does not stand behind them, and they run as they are.
#
# ## Rules
#
# What is known about a code object is kept in tables by the object's `id`. An `id` is used again once its object is gone, so a
# weak reference removes the rows when the code dies (`forget_with_code`). `_rules` has the targets for each context, or None for
# "skip"; `_records` has a dictionary per code, which `hook.py` uses for all that lives as long as the code. The region, whose context says
# how functions are compiled at the moment, belongs to a thread.

# %%
import functools
import sys
import threading
import types
import weakref

import torch

from ..ch02_guards.torch_guards import HOOK_DICTS
from ..errors import GraphBreakError
from ..marks import passed_over
from .binding import SUSPENDS, bind

EVALUATE = object()


class _Region(threading.local):
    context = None


_region = _Region()
_state = {"callback": None, "missed": EVALUATE}
_rules: dict = {}          # id(code) -> {context: target}, or None = skip
_records: dict = {}        # id(code) -> dict
_alive: dict = {}          # id(code) -> weak reference that removes both when the code object dies


def set_region(context):
    old, _region.context = _region.context, context
    return old


def get_region():
    return _region.context


def set_callback(callback) -> None:
    _state["callback"] = callback


def frame_of(code, namespace) -> types.FrameType:
    """A frame that nobody runs. Only C can make one of this code; this one is of a thread that is over."""
    frames = []
    thread = threading.Thread(target=lambda: frames.append(sys._getframe()))
    thread.start()
    thread.join()
    return frames[0]


def set_missed(missed) -> None:
    _state["missed"] = missed


def set_target(code, context, target) -> None:
    forget_with_code(code)
    _rules[id(code)] = {**(_rules.get(id(code)) or {}), context: target}


def skip_code(code) -> None:
    forget_with_code(code)
    _rules[id(code)] = None


def record_of(code) -> dict:
    forget_with_code(code)
    return _records.setdefault(id(code), {})


def forget_with_code(code) -> None:
    key = id(code)
    if key not in _alive:
        _alive[key] = weakref.ref(code, lambda _: [table.pop(key, None) for table in (_rules, _records, _alive)])


def forget_code(code) -> None:
    _rules.pop(id(code), None)


def targets_of(code) -> list | None:
    if id(code) not in _rules:
        return None
    return list((_rules[id(code)] or {}).values())


def is_installed() -> bool:
    return False


# %% [markdown]
# ## Which frame would it be?
#
# A method is its function with `self` in front, a `partial` its function with more arguments, and a module's
# call is its `forward`, unless hooks are registered on the module: those must run around it, so such a
# module runs as it is.
#
# The hook in C sees every frame. Here only the call of the compiled function itself is seen, so it has to be found
# out what frame that call would make. `python_function` peels off partials, bound methods, modules without hooks
# and objects with a `__call__`, until a function with code is left. Take a module and a `partial` of it:
#
#     class Scaled(torch.nn.Module):
#         def forward(self, x, factor=1.0):
#             return x * factor
#     doubled = functools.partial(Scaled(), factor=2.0)
#
# `doubled(x)` makes one frame of the program's, that of `forward`, whose first argument is the module. Step by step, with the
# arguments that have been collected by then:
#
#     partial          (x)
#     Scaled           (x, factor=2.0)
#     method           (x, factor=2.0)
#     Scaled.forward   (Scaled(), x, factor=2.0)

# %%
_HOOKS = (*HOOK_DICTS, "_compiled_call_impl")


def python_function(function, args, kwargs):
    """(function with code, args, kwargs) of the frame that function(*args, **kwargs) would make, or None."""
    while not isinstance(function, types.FunctionType):
        if type(function) is functools.partial:
            function, args, kwargs = function.func, (*function.args, *args), {**function.keywords, **kwargs}
        elif isinstance(function, types.MethodType):
            function, args = function.__func__, (function.__self__, *args)
        elif isinstance(function, torch.nn.Module):
            kind = type(function)
            own_call = kind.__call__ is not torch.nn.Module.__call__ or kind._call_impl is not torch.nn.Module._call_impl
            if own_call or any(getattr(function, name, None) for name in _HOOKS):
                return None
            function = function.forward
        elif isinstance(getattr(type(function), "__call__", None), types.FunctionType):
            function, args = type(function).__call__, (function, *args)
        else:
            return None
    return function, args, kwargs


# %% [markdown]
# `run` then asks as the hook would: is there a target for this code in this region? If not, `target_of` calls the
# callback, which compiles and answers with one, or with False for "never again". The target gets the values of the
# frame's arguments, bound as Python binds them, and answers with a result, or says that the frame is to be
# evaluated as it is.

# %%
@passed_over
def run(context, function, /, *args, **kwargs):
    """Call function(*args, **kwargs) as the C hook's `run` does, seeing this one frame only."""
    saved, _region.context = _region.context, context
    try:
        found = None if context is None else python_function(function, args, kwargs)
        if found is None and getattr(context, "fullgraph", False):
            raise GraphBreakError("fullgraph=True, but without the frame hook a module with hooks, or with a __call__ "
                                  "of its own, cannot be captured. Build the hook, or remove them.")
        if found is None or found[0].__code__.co_flags & SUSPENDS:
            return function(*args, **kwargs)
        inner, *call = found
        target = target_of(inner, context)
        if target is None:
            return function(*args, **kwargs)
        values = bind(inner.__code__, inner.__defaults__, inner.__kwdefaults__, *call)
        result = target(inner, *values)
        return function(*args, **kwargs) if result is EVALUATE or result is _state["missed"] else result
    finally:
        _region.context = saved


def target_of(function, context):
    code = function.__code__
    targets = _rules.get(id(code), {})
    if targets is None or _state["callback"] is None:
        return None
    if context not in targets:
        old = set_region(None)
        try:
            answer = _state["callback"](function, code, context)
        finally:
            set_region(old)
        if answer is False:
            skip_code(code)
            return None
        set_target(code, context, answer)
        return answer
    return targets[context]
