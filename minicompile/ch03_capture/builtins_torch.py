# %% [markdown]
# # Builtin functions, continued: classes, operators, torch
#
# `getattr`, `isinstance` and `super` ask about classes; the `operator` module repeats the instructions as
# functions; and some functions of torch ask about the state of the library.

# %%
from __future__ import annotations

import copy
import functools
import operator
import types
import typing
import warnings

import torch

from .. import marks
from .attributes import call, class_of, get_attribute, has_attribute, set_attribute
from .calls import HANDLED, handles
from .interpreter import unsupported
from .iterate import length, values_of
from .methods import call_method
from .operations import (
    BINARY, COMPARE, INPLACE, as_python, binary, compare, contains, delete_item, fold, get_item,
    identical, set_item, truth, unary)
from .tensors import emit, make_tensor
from .values import (
    CellVal, Const, DictVal, ExcVal, FuncVal, ListVal, MethodName, MethodVal, NEW, NONE, ObjVal,
    PartialVal, PropertyVal, SetVal, SuperVal, SymVal, TRUE, TensorVal, TupleVal, TupleVal, UserError,
    describe, user_error)
from .wrap import wrap
from .attributes import module_child, set_module_attribute
from .builtins_ import boolean
from .contexts import make_context
from .opcodes import read_cell, read_local


# %% [markdown]
# ## Functions of functions

# %%
@handles(functools.partial)
def make_partial(tx, function, *args, **kwargs):
    return PartialVal(func=function, args=list(args), kwargs=kwargs)


@handles(functools.reduce)
def reduced(tx, function, items, initial=None):
    items = values_of(tx, items)
    value = initial if initial is not None else next(items, None)
    if value is None:
        user_error(TypeError, "reduce() of empty iterable with no initial value")
    for item in items:
        value = call(tx, function, [value, item])
    return value


@handles(operator.itemgetter)
def make_itemgetter(tx, *keys):
    return getter(keys, lambda tx, value, key: get_item(tx, value, key))


@handles(operator.attrgetter)
def make_attrgetter(tx, *names):
    def read(tx, value, name):
        for part in name.value.split("."):
            value = get_attribute(tx, value, part)
        return value
    return getter(names, read)


def getter(keys, read) -> PropertyVal:
    """A callable of one value that reads one thing of it, or a tuple of several."""
    def apply(tx, args, kwargs):
        found = [read(tx, args[0], key) for key in keys]
        return found[0] if len(found) == 1 else TupleVal(items=found)
    return PropertyVal(call=apply, name="getter")


@handles(types.SimpleNamespace)
def make_namespace(tx, **attributes):
    return ObjVal(real=NEW, cls=types.SimpleNamespace, attrs=attributes)


@handles(callable)
def is_callable(tx, value):
    if type(value) in (FuncVal, MethodVal, MethodName, PartialVal, PropertyVal):
        return TRUE
    return boolean(hasattr(class_of(value), "__call__"))


# %% [markdown]
# ## Classes and attributes

# %%
@handles(type)
def type_of(tx, value, *more):
    if more:
        unsupported(tx, "making a class")
    return wrap(tx, class_of(value))


@handles(isinstance)
def is_instance(tx, value, classes):
    classes = as_python(tx, classes)
    real = getattr(value, "real", None)
    if type(value) in (TensorVal, ObjVal) and real is not None and real is not NEW:
        return boolean(isinstance(real, classes))
    if type(value) is TensorVal:
        return boolean(isinstance(value.fake, classes) if classes in TENSOR_METACLASSES
                       else any_subclass(torch.Tensor, classes))
    return boolean(any_subclass(class_of(value), classes))


TENSOR_METACLASSES = ()


def any_subclass(cls, classes) -> bool:
    if isinstance(classes, tuple):
        return any(any_subclass(cls, c) for c in classes)
    return issubclass(cls, classes)


@handles(issubclass)
def is_subclass(tx, cls, classes):
    return boolean(issubclass(as_python(tx, cls), as_python(tx, classes)))


@handles(hasattr)
def has(tx, value, name):
    return boolean(has_attribute(tx, value, name.value))


@handles(getattr)
def get(tx, value, name, default=None):
    if default is None:
        return get_attribute(tx, value, name.value)
    try:
        return get_attribute(tx, value, name.value)
    except UserError as error:
        if issubclass(error.exc.cls, AttributeError):
            return default
        raise


@handles(setattr)
def set_(tx, value, name, new):
    set_attribute(tx, value, name.value, new)


@handles(delattr)
def delete(tx, value, name):
    set_attribute(tx, value, name.value, None)


@handles(vars)
def variables(tx, value):
    return get_attribute(tx, value, "__dict__")


@handles(len)
def len_(tx, value):
    return length(tx, value)


@handles(super)
def make_super(tx, cls=None, obj=None):
    if cls is None:
        frame = tx.frames[-1]
        cls = read_cell(tx, frame.locals["__class__"], "__class__")
        obj = read_local(tx, frame, frame.code.co_varnames[0])
        if type(obj) is CellVal:
            obj = read_cell(tx, obj, "self")
    return SuperVal(cls=cls.real, self=obj)


@handles(object)
def make_object(tx):
    return ObjVal(real=NEW, cls=object)


@handles(object.__new__)
def new_object(tx, cls, *args, **kwargs):
    return ObjVal(real=NEW, cls=cls.real)


@handles(torch.nn.Module.__setattr__)
def module_setattr(tx, module, name, value):
    set_module_attribute(tx, module, name.value, value)


@handles(torch.nn.Module.__getattr__)
def module_getattr(tx, module, name):
    return module_child(tx, module, name.value)


@handles(types.MethodType)
def make_method(tx, function, self):
    return MethodVal(func=function, self=self)


@handles(typing.cast)
def cast(tx, cls, value):
    return value


@handles(copy.copy)
def shallow_copy(tx, value):
    if type(value) in (ListVal, DictVal, SetVal):
        return call_method(tx, value, "copy", [], {})
    if type(value) in (Const, TupleVal, FuncVal):
        return value
    if type(value) is ObjVal and value.real is NEW and not hasattr(value.cls, "__copy__"):
        return ObjVal(real=NEW, cls=value.cls, attrs=dict(value.attrs))
    unsupported(tx, f"copy.copy() of {describe(value)}")


# %% [markdown]
# ## The operator module

# %%
for _symbol, (_name, _function) in BINARY.items():
    HANDLED[_function] = functools.partial(lambda tx, a, b, s: binary(tx, s, a, b), s=_symbol)
    HANDLED[INPLACE[_symbol]] = functools.partial(lambda tx, a, b, s: binary(tx, s, a, b, inplace=True), s=_symbol)
for _symbol, (_name, _function) in COMPARE.items():
    HANDLED[_function] = functools.partial(lambda tx, a, b, s: compare(tx, s, a, b), s=_symbol)
for _name in ("neg", "pos", "invert"):
    HANDLED[getattr(operator, _name)] = functools.partial(lambda tx, a, n: unary(tx, n, a), n=_name)
HANDLED[operator.getitem] = get_item
HANDLED[operator.setitem] = set_item
HANDLED[operator.delitem] = delete_item
HANDLED[operator.not_] = lambda tx, a: boolean(not truth(tx, a))
HANDLED[operator.truth] = lambda tx, a: boolean(truth(tx, a))
HANDLED[operator.is_] = lambda tx, a, b: boolean(identical(a, b))
HANDLED[operator.is_not] = lambda tx, a, b: boolean(not identical(a, b))
HANDLED[operator.contains] = lambda tx, a, b: boolean(contains(tx, a, b))
HANDLED[operator.index] = lambda tx, a: a if type(a) is SymVal else fold(tx, operator.index, [a])


# %% [markdown]
# ## Questions that the program asks torch
#
# The trace is neither scripting nor tracing in the sense of `torch.jit`. Grad mode and autocast are asked
# of the tracing thread, which is in the state that the program would be in.

# %%
def constant_answer(value):
    return lambda tx, *args, **kwargs: Const(value=value)


for _function in (torch.jit.is_scripting, torch.jit.is_tracing, torch._C._get_tracing_state, torch._C._is_tracing,
                  torch.overrides.has_torch_function, torch.overrides.has_torch_function_unary,
                  torch.overrides.has_torch_function_variadic, torch.compiler.is_compiling, torch._jit_internal.is_scripting,
                  torch.compiler.is_exporting, torch.compiler.is_dynamo_compiling,
                  torch.overrides.is_tensor_method_or_property, torch._C._is_torch_function_mode_enabled):
    HANDLED[_function] = constant_answer(False)
HANDLED[torch._C._get_tracing_state] = constant_answer(None)


HANDLED[marks.is_compiling] = constant_answer(True)


@handles(torch.is_grad_enabled)
def grad_enabled(tx):
    return Const(value=torch.is_grad_enabled())


@handles(torch.is_inference_mode_enabled)
def inference_enabled(tx):
    return Const(value=torch.is_inference_mode_enabled())


@handles(torch.is_autocast_enabled)
def autocast_enabled(tx, *device):
    return Const(value=torch.is_autocast_enabled(*(d.value for d in device)))


@handles(torch.get_autocast_dtype)
def autocast_dtype(tx, device):
    return Const(value=torch.get_autocast_dtype(device.value))


@handles(torch.is_tensor)
def is_tensor(tx, value):
    return boolean(type(value) is TensorVal)


@handles(torch.numel)
def numel(tx, value):
    return call_method(tx, value, "numel", [], {})


@handles(torch.broadcast_shapes)
def broadcast_shapes(tx, *shapes):
    return fold(tx, torch.broadcast_shapes, shapes)


@handles(torch.as_tensor, torch.asarray)
def as_tensor(tx, data, dtype=None, device=None):
    """No copy when there is nothing to convert; constants become a new tensor."""
    named = {k: v for k, v in (("dtype", dtype), ("device", device)) if v is not None and not identical(v, NONE)}
    if type(data) is not TensorVal:
        return make_tensor(tx, torch.as_tensor, [data], named)
    return call_method(tx, data, "to", [], named) if named else data


@handles(torch.result_type)
def result_type(tx, a, b):
    return emit(tx, "call_function", torch.result_type, [a, b], {})


@handles(torch.set_grad_enabled)
def set_grad_enabled(tx, *args, **kwargs):
    return make_context(tx, torch.set_grad_enabled, args, kwargs)


@handles(warnings.warn)
def warn(tx, *args, **kwargs):
    tx.replays.append((ObjVal(real=warnings.warn, cls=types.BuiltinFunctionType), args, {}))


@handles(print)
def print_(tx, *args, **kwargs):
    unsupported(tx, "print()")


@handles(id)
def identity(tx, value):
    unsupported(tx, "id()")


@handles(globals, locals, eval, exec, compile, open, input, breakpoint, __import__)
def refused(tx, *args, **kwargs):
    unsupported(tx, "a builtin that looks at or runs the program itself")


@handles(torch._assert)
def torch_assert(tx, condition, message):
    if not truth(tx, condition):
        raise UserError(ExcVal(cls=AssertionError, args=[message]))
