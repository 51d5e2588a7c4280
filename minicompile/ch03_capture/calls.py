# %% [markdown]
# # Calls
#
# A call is decided by what is called. Python functions are inlined: their bytecode runs in a frame of this
# trace. Torch functions become nodes. Builtins have handlers (`builtins_.py`), and pure functions of
# constants are simply called. Calling a class makes an object of the trace and inlines `__init__`. What is
# left, a C function that we know nothing about, ends the graph: it may do anything.

# %%
from __future__ import annotations

import collections
import enum
import functools
import types
import weakref

import torch

from ..ch02_guards.sources import AttrSource, CallSource, ItemSource
from .attributes import MISSING, class_of, get_attribute, lookup, store_attribute
from .interpreter import Tracer, constant_source, inline, is_library, unsupported
from .methods import call_method
from .operations import NotConstant, fold
from .tensors import call_graph_function, is_graph_function
from .values import (
    Const, ContextVal, DictVal, ExcVal, FuncVal, MethodName, MethodVal, NEW, NONE, ObjVal, PartialVal, PropertyVal,
    TupleVal, Value, describe, user_error)
from .wrap import dict_contents, is_made_per_call, wrap

HANDLED: dict = {}


def handles(*functions):
    """Register what a call of these very objects does: handler(tx, *args, **kwargs), values in, value or None out."""
    def register(handler):
        for function in functions:
            HANDLED[function] = handler
        return handler
    return register


def call_value(tx: Tracer, function: Value, args, kwargs) -> Value:
    """function(*args, **kwargs); args: list of values, kwargs: dict of values."""
    kind = type(function)
    if kind is ObjVal:
        return call_object(tx, function, args, kwargs)
    if kind is MethodVal:
        return call_value(tx, function.func, [function.self, *args], kwargs)
    if kind is MethodName:
        return call_method(tx, function.self, function.name, args, kwargs)
    if kind is FuncVal:
        defaults = [functools.partial(lambda v: v, d) for d in function.defaults]
        kwdefaults = {k: functools.partial(lambda v: v, d) for k, d in function.kwdefaults.items()}
        return inline(tx, function.code, function.name, function.globals, function.globals_source, function.closure,
                      defaults, kwdefaults, args, kwargs, function)
    if kind is PartialVal:
        return call_value(tx, function.func, function.args + list(args), {**function.kwargs, **kwargs})
    if isinstance(function, PropertyVal):
        return function.call(tx, args, kwargs)
    if kind is ContextVal:
        return decorate_with_context(tx, function, args)
    user_error(TypeError, f"'{class_of(function).__name__}' object is not callable")


def decorate_with_context(tx, context, args):
    """`@torch.no_grad()` on a function defined inside the trace: each call enters a fresh copy of the context."""
    from .contexts import enter, leave

    def apply(tx, call_args, call_kwargs):
        inner = ContextVal(kind=context.kind, state=context.state, factory=context.factory)
        enter(tx, inner)
        try:
            return call_value(tx, args[0], call_args, call_kwargs)
        finally:
            leave(tx, inner)
    return PropertyVal(call=apply, name="decorated")


# %%
def call_object(tx: Tracer, function: ObjVal, args, kwargs) -> Value:
    real = function.real
    try:
        handler = HANDLED.get(real)
    except TypeError:
        handler = None
    if handler is not None:
        return call_handler(tx, handler, function, args, kwargs)
    if isinstance(real, type):
        return call_class(tx, function, args, kwargs)
    kind = type(real)
    if is_graph_function(real) and (kind is not types.FunctionType or all(
            type(v) not in NO_ARGUMENT for v in (*args, *kwargs.values()))):
        return call_graph_function(tx, real, args, kwargs)
    inner = getattr(real, "__dict__", {}).get("_minicompile_original") if kind is types.FunctionType else None
    if inner is not None:
        return call_value(tx, wrap(tx, inner), args, kwargs)
    if kind is types.FunctionType:
        return inline_function(tx, function, args, kwargs)
    if isinstance(real, torch.nn.Module):
        return call_module(tx, function, args, kwargs)
    if kind in (types.MethodDescriptorType, types.WrapperDescriptorType) and args:
        return call_descriptor(tx, real, args, kwargs)
    if kind is types.BuiltinFunctionType:
        return call_builtin(tx, real, args, kwargs)
    if kind is functools._lru_cache_wrapper:
        return call_value(tx, wrap(tx, real.__wrapped__), args, kwargs)
    if kind is weakref.ReferenceType:
        return wrap(tx, real(), None if function.source is None else CallSource(function.source, "__call__"))
    if kind in CALLABLE_DESCRIPTORS:
        unsupported(tx, f"a call of {describe(function)}")
    found = lookup(function.cls, "__call__")
    if isinstance(found, types.FunctionType):
        return call_value(tx, wrap(tx, found), [function, *args], kwargs)
    if found is MISSING:
        user_error(TypeError, f"'{function.cls.__name__}' object is not callable")
    unsupported(tx, f"a call of {describe(function)}")


NO_ARGUMENT = (ObjVal, FuncVal, MethodVal, PartialVal)       # a functional given one of these is inlined instead
CALLABLE_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodWrapperType,
                        types.ClassMethodDescriptorType)


def call_handler(tx, handler, function, args, kwargs):
    try:
        return handler(tx, *args, **kwargs) or NONE
    except TypeError as error:
        if "positional argument" not in str(error) and "keyword argument" not in str(error):
            raise
        unsupported(tx, f"this call of {describe(function)}: {error}")
    except NotConstant:
        unsupported(tx, f"{describe(function)} of something that is no constant")


# %% [markdown]
# ## Python functions
#
# Globals and cells of an inlined function are read with sources of their own, and guarded, unless the
# function belongs to torch or the standard library: nobody rebinds `torch.nn.functional.F` between two
# calls. Its globals dictionary is an object that the entry can own, so the source is short:
# `__K[3]["scale"]`.

# %%
def inline_function(tx: Tracer, function: ObjVal, args, kwargs) -> Value:
    real = function.real
    code, source = real.__code__, function.source
    if getattr(real, "_minicompile_disabled", False) is True:
        unsupported(tx, f"{real.__qualname__} is disabled for compilation")
    if is_refused_module(real.__module__):
        unsupported(tx, f"a call of {real.__module__}.{real.__qualname__}")
    library = is_library(code.co_filename)
    globals_source = None if library else constant_source(tx, real.__globals__)
    reread = source is not None and is_made_per_call(real)
    defaults, kwdefaults = [], {}
    for i, default in enumerate(real.__defaults__ or ()):
        at = ItemSource(AttrSource(source, "__defaults__"), i) if reread else None
        defaults.append(functools.partial(wrap, tx, default, at))
    for name, default in (real.__kwdefaults__ or {}).items():
        at = ItemSource(AttrSource(source, "__kwdefaults__"), name) if reread else None
        kwdefaults[name] = functools.partial(wrap, tx, default, at)
    closure = []
    for i, cell in enumerate(real.__closure__ or ()):
        if source is not None:
            at = ItemSource(AttrSource(source, "__closure__"), i)
        else:
            at = None if library or code.co_freevars[i] == "__class__" else constant_source(tx, cell)
        closure.append(wrap(tx, cell, at))
    return inline(tx, code, real.__name__, real.__globals__, globals_source, closure, defaults, kwdefaults, args,
                  kwargs, function)


REFUSED_ROOTS = frozenset(("numpy", "random", "logging", "threading", "multiprocessing", "subprocess", "socket",
                           "importlib", "pickle", "json", "tempfile", "shutil", "pathlib", "time"))
REFUSED_PREFIXES = ("torch._dynamo", "torch._inductor", "torch.distributed", "torch.autograd", "torch.cuda",
                    "torch.utils.data", "torch.utils.checkpoint", "torch.optim", "torch.jit", "torch.profiler",
                    "torch._utils", "torch.serialization", "torch.random")


def is_refused_module(name) -> bool:
    name = name or ""
    if name.startswith("minicompile.bench"):
        return False
    return name.split(".")[0] in REFUSED_ROOTS or name.startswith(REFUSED_PREFIXES)


# %% [markdown]
# ## Modules
#
# `module(x)` is `Module.__call__`, a long function about hooks that ends in `self.forward(x)`. Without
# hooks (the guard on the module's structure says so) that is all it does.

# %%
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_module = torch.nn.modules.module


def call_module(tx: Tracer, function: ObjVal, args, kwargs) -> Value:
    fields = function.real.__dict__
    if isinstance(function.real, torch.jit.ScriptModule):
        unsupported(tx, "a call of a TorchScript module")
    call_of_class = lookup(function.cls, "__call__")
    if call_of_class is not torch.nn.Module.__call__:
        return call_value(tx, wrap(tx, call_of_class), [function, *args], kwargs)
    if any(fields.get(h) for h in HOOKS) or _module._global_forward_hooks or _module._global_forward_pre_hooks \
            or _module._global_backward_hooks or _module._global_backward_pre_hooks:
        return call_value(tx, wrap(tx, torch.nn.Module._call_impl), [function, *args], kwargs)
    return call_value(tx, get_attribute(tx, function, "forward"), args, kwargs)


# %% [markdown]
# ## C functions

# %%
PURE_MODULES = frozenset(("math", "cmath", "_operator", "_struct", "_bisect", "unicodedata", "_string"))


def call_builtin(tx: Tracer, real, args, kwargs) -> Value:
    owner = getattr(real, "__self__", None)
    pure = (real.__module__ or "") in PURE_MODULES or isinstance(owner, types.ModuleType) and \
        owner.__name__ in PURE_MODULES
    if owner is not None and not isinstance(owner, (types.ModuleType, type)):
        holder = tx.tracked.get(id(owner))
        if holder is not None:
            return call_method(tx, holder, real.__name__, args, kwargs)
    if isinstance(owner, type) and owner in (dict, int, float, bytes, str) or pure:
        try:
            return fold(tx, real, args, kwargs)
        except NotConstant:
            pass
    unsupported(tx, f"a call of the C function {real.__module__ or ''}.{real.__qualname__}")


def call_descriptor(tx: Tracer, real, args, kwargs) -> Value:
    """An unbound C method: `torch.Tensor.add(x, y)`, `list.append(l, 1)`, `object.__setattr__(o, n, v)`."""
    owner, name, self = real.__objclass__, real.__name__, args[0]
    if owner is object:
        if name == "__setattr__":
            store_attribute(tx, self, args[1].value, args[2])
            return NONE
        if name == "__delattr__":
            store_attribute(tx, self, args[1].value, None)
            return NONE
        if name == "__init__":
            return NONE
        if name in ("__eq__", "__ne__"):
            return Const(value=(self is args[1]) == (name == "__eq__"))
        if name == "__getattribute__":
            return get_attribute(tx, self, args[1].value)
        unsupported(tx, f"object.{name}")
    if type(self) is ObjVal and issubclass(owner, dict) and (contents := dict_contents(tx, self)) is not None:
        return call_method(tx, contents, name, args[1:], kwargs)
    if type(self) is ObjVal and issubclass(owner, BaseException):
        return NONE
    if not issubclass(class_of(self), owner):
        unsupported(tx, f"{owner.__name__}.{name} of {describe(self)}")
    return call_method(tx, self, name, args[1:], kwargs)


# %% [markdown]
# ## Classes
#
# An object made while tracing exists only in the trace, until it escapes (is returned, or stored somewhere
# that outlives the call). Only then is it built for real, without running `__init__` again: its attributes
# are known.

# %%
FOLDED_CLASSES = (torch.device, torch.finfo, torch.iinfo, complex, bytes, object.__class__)


def call_class(tx: Tracer, function: ObjVal, args, kwargs) -> Value:
    from .contexts import make_context
    cls = function.real
    context = make_context(tx, cls, args, kwargs)
    if context is not None:
        return context
    if issubclass(cls, BaseException):
        return ExcVal(cls=cls, args=list(args))
    if cls in FOLDED_CLASSES or isinstance(cls, enum.EnumMeta):
        try:
            return fold(tx, cls, args, kwargs)
        except NotConstant:
            unsupported(tx, f"{cls.__name__}() of something that is no constant")
    if issubclass(cls, tuple) and hasattr(cls, "_fields") and not isinstance(lookup(cls, "__init__"), types.FunctionType):
        return make_named_tuple(tx, cls, args, kwargs)
    if issubclass(cls, (torch.Tensor, torch.nn.Module, torch.autograd.Function)):
        unsupported(tx, f"creating a {cls.__qualname__} inside a compiled function")
    if type(cls) is not type and isinstance(lookup(type(cls), "__call__"), types.FunctionType):
        unsupported(tx, f"the metaclass of {cls.__qualname__}")
    new, init = lookup(cls, "__new__"), lookup(cls, "__init__")
    if issubclass(cls, dict) and new in (dict.__dict__["__new__"], collections.OrderedDict.__dict__.get("__new__")):
        return make_dict_object(tx, cls, args, kwargs)
    if new is not object.__dict__["__new__"] or not hasattr(cls, "__dict__"):
        unsupported(tx, f"creating a {cls.__qualname__} inside a compiled function")
    if not cls.__flags__ & (1 << 9):
        unsupported(tx, f"creating a {cls.__qualname__} inside a compiled function")
    obj = ObjVal(real=NEW, cls=cls)
    if isinstance(init, types.FunctionType):
        call_value(tx, wrap(tx, init), [obj, *args], kwargs)
    elif args or kwargs:
        user_error(TypeError, f"{cls.__name__}() takes no arguments")
    return obj


def make_dict_object(tx, cls, args, kwargs):
    """An instance of a class derived from dict: its attributes, and a dictionary beside them."""
    base = collections.OrderedDict if issubclass(cls, collections.OrderedDict) else dict
    obj = ObjVal(real=NEW, cls=cls, contents=DictVal(cls=base))
    call_value(tx, get_attribute(tx, obj, "__init__"), args, kwargs)
    return obj


def make_named_tuple(tx, cls, args, kwargs):
    items = dict(zip(cls._fields, args))
    if len(args) > len(cls._fields) or set(kwargs) - set(cls._fields) or set(kwargs) & set(items):
        user_error(TypeError, f"wrong arguments for {cls.__name__}()")
    items.update(kwargs)
    for field in cls._fields:
        if field not in items:
            if field not in cls._field_defaults:
                user_error(TypeError, f"{cls.__name__}() missing required argument: {field!r}")
            items[field] = wrap(tx, cls._field_defaults[field])
    return TupleVal(items=[items[f] for f in cls._fields], cls=cls)
