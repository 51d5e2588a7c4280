# %% [markdown]
# # Attributes
#
# `x.name` looks harmless and is one of the most involved operations of Python: the class and its bases are
# searched, a property runs code, a function becomes a bound method, the instance dictionary comes in
# between, `__getattr__` is the last resort. Capture follows the same steps on the real class, without
# running the program's code: a property's getter is inlined, and what the instance dictionary holds is
# wrapped with a source and guarded. Writes never touch the real object. They are kept in `ObjVal.attrs`, in
# front of it, and are replayed after the graph has run.

# %%
from __future__ import annotations

import enum
import functools
import types

import torch

from ..ch02_guards.sources import AttrSource, ConstantSource, InstanceDictSource, ItemSource, ModuleAttrSource
from .interpreter import Tracer, guard, is_library, mark_dirty, unsupported
from .tensors import tensor_attribute
from .values import (
    CellVal, Const, ContextVal, DELETED, DictVal, ExcVal, FuncVal, GenVal, IterVal, ListVal, MethodName,
    MethodVal, NEW, NONE, ObjVal, PartialVal, PropertyVal, SetVal, SliceVal, SuperVal, SymVal, TensorVal,
    TupleVal, UserError, Value, describe, user_error)
from .wrap import realize, wrap

GETATTR: dict = {}
MISSING = object()


def attributes_of(*kinds):
    """Register `getattr` for kinds of values: function(tx, value, name) -> Value."""
    def register(function):
        for kind in kinds:
            GETATTR[kind] = function
        return function
    return register


def get_attribute(tx: Tracer, value: Value, name: str) -> Value:
    """value.name; raises AttributeError in the traced program when there is none."""
    handler = GETATTR.get(type(value))
    if handler is None:
        unsupported(tx, f"the attribute {name} of {describe(value)}")
    return handler(tx, value, name)


def has_attribute(tx: Tracer, value: Value, name: str) -> bool:
    try:
        get_attribute(tx, value, name)
        return True
    except UserError as error:
        if issubclass(error.exc.cls, AttributeError):
            return False
        raise


GETATTR[TensorVal] = tensor_attribute


def lookup(cls: type, name: str):
    """The attribute as it lies in the dictionary of the first class that has it, descriptors untouched."""
    for base in cls.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return MISSING


def no_attribute(value_cls, name):
    user_error(AttributeError, f"'{value_cls.__name__}' object has no attribute '{name}'")


# %% [markdown]
# ## Objects
#
# The order is Python's: data descriptors of the class, the instance, other descriptors of the class,
# `__getattr__`.

# %%
@attributes_of(ObjVal)
def object_attribute(tx, obj, name):
    if name in obj.attrs:
        found = obj.attrs[name]
        if found is DELETED:
            no_attribute(obj.cls, name)
        return found
    real = obj.real
    if name == "__class__":
        return wrap(tx, obj.cls)
    if isinstance(real, types.ModuleType):
        return python_module_attribute(tx, obj, name)
    if isinstance(real, type):
        return class_attribute(tx, obj, name)
    if isinstance(real, (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType,
                         types.WrapperDescriptorType, enum.Enum)):
        return constant_attribute(tx, obj, name)
    return instance_attribute(tx, obj, name, lookup(obj.cls, name))


def instance_attribute(tx, obj, name, found):
    real, kind = obj.real, type(found)
    at = None if obj.source is None else AttrSource(obj.source, name)
    if kind is property:
        if found.fget is None:
            no_attribute(obj.cls, name)
        return call(tx, wrap(tx, found.fget), [obj])
    if isinstance(lookup(obj.cls, "__getattribute__"), types.FunctionType):
        unsupported(tx, f"{obj.cls.__name__}.__getattribute__")
    if kind in (types.MemberDescriptorType, types.GetSetDescriptorType) and name != "__dict__":
        if real is NEW or not hasattr(real, name):
            guard(tx, obj.source, "NO_ATTR", name)
            no_attribute(obj.cls, name)
        return wrap(tx, getattr(real, name), at)
    if name == "__dict__":
        return instance_dict(tx, obj)
    if found is not MISSING and isinstance(getattr(kind, "__set__", None), types.FunctionType):
        return bind_descriptor(tx, obj, name, found, at)
    fields = getattr(real, "__dict__", None) if real is not NEW else None
    if fields is not None and name in fields:
        if isinstance(real, torch.nn.Module) and at is not None:      # cheaper to read than through __getattr__
            at = ItemSource(InstanceDictSource(obj.source), name)
        return wrap(tx, fields[name], at)
    if kind is functools.cached_property:
        result = call(tx, wrap(tx, found.func), [obj])
        store_attribute(tx, obj, name, result)
        return result
    if found is not MISSING:
        return bind_descriptor(tx, obj, name, found, at)
    if isinstance(real, torch.nn.Module) and lookup(obj.cls, "__getattr__") is torch.nn.Module.__getattr__:
        return module_child(tx, obj, name)
    fallback = lookup(obj.cls, "__getattr__")
    if fallback is not MISSING:
        if real is not NEW and obj.source is not None and hasattr(real, "__dict__"):
            guard(tx, InstanceDictSource(obj.source), "NO_KEY", name)
        if isinstance(real, torch.nn.Module) and any(name in fields[k] for k in CHILDREN):
            return module_child(tx, obj, name)
        return call(tx, wrap(tx, fallback), [obj, Const(value=name)])
    if real is not NEW:
        guard(tx, obj.source, "NO_ATTR", name)
    no_attribute(obj.cls, name)


def bind_descriptor(tx, obj, name, found, at):
    """A non-data attribute of the class, seen through an instance."""
    kind = type(found)
    if at is not None and (name == "forward" or not is_library_class(obj.cls)) and hasattr(obj.real, "__dict__") \
            and type(obj.real) is not type:
        guard(tx, InstanceDictSource(obj.source), "NO_KEY", name)       # nobody has shadowed it on the instance
    if kind is types.FunctionType:
        return MethodVal(func=wrap(tx, found), self=obj, source=at)
    if kind is staticmethod:
        return wrap(tx, found.__func__)
    if kind is classmethod:
        return MethodVal(func=wrap(tx, found.__func__), self=wrap(tx, obj.cls))
    if kind in (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType):
        return MethodVal(func=wrap(tx, found), self=obj)
    getter = lookup(kind, "__get__")
    if isinstance(getter, types.FunctionType):
        return call(tx, wrap(tx, getter), [wrap(tx, found), obj, wrap(tx, obj.cls)])
    return wrap(tx, found, at if at is not None and not isinstance(at.base, ConstantSource) else None)


def instance_dict(tx, obj):
    """vars(obj): a dictionary of its attributes. Writing to it is not tracked, so it is a frozen copy."""
    items = {}
    if obj.real is not NEW:
        at = None if obj.source is None else InstanceDictSource(obj.source)
        whole = wrap(tx, obj.real.__dict__, at)
        from .wrap import guard_keys
        guard_keys(tx, whole)
        for key, (k, v) in whole.items.items():
            items[key] = [realize(tx, k), realize(tx, v)]
    for key, v in obj.attrs.items():
        if v is DELETED:
            items.pop(key, None)
        else:
            items[key] = [Const(value=key), v]
    result = DictVal(items=items)
    result.instance = obj
    return result


# %% [markdown]
# ## nn.Module
#
# A module keeps its parameters, buffers and children in three dictionaries, which its `__getattr__`
# searches. Following it by inlining would be right and slow; the search is short enough to write down.

# %%
CHILDREN = ("_parameters", "_buffers", "_modules")


def module_child(tx, obj, name):
    fields = obj.real.__dict__
    for kind in CHILDREN:
        children = fields.get(kind)
        if children is not None and name in children:
            overlay = module_dict(tx, obj, kind)
            if overlay is not None:
                if name not in overlay.items:
                    no_attribute(obj.cls, name)
                return realize(tx, overlay.items[name][1])
            source = None if obj.source is None else ModuleAttrSource(obj.source, kind, name)
            return wrap(tx, children[name], source)
    no_attribute(obj.cls, name)                  # MODULE_STRUCTURE guards the names; the class is guarded with them


def module_dict(tx, obj, kind):
    """The traced version of `obj._parameters` and its like, when the program has changed it."""
    known = tx.tracked.get(id(obj.real.__dict__[kind]))
    return known if known is not None and known.mutated else None


# %% [markdown]
# ## Classes, Python modules, functions

# %%
def python_module_attribute(tx, obj, name):
    real = obj.real
    try:
        found = getattr(real, name)
    except AttributeError:
        user_error(AttributeError, f"module '{real.__name__}' has no attribute '{name}'")
    at = None
    if obj.source is not None and not is_library(getattr(real, "__file__", None) or "<frozen"):
        at = AttrSource(obj.source, name)
    return wrap(tx, found, at)


def class_attribute(tx, obj, name):
    cls, found = obj.real, lookup(obj.real, name)
    at = None if obj.source is None or is_library_class(cls) else AttrSource(obj.source, name)
    meta = lookup(type(cls), name)
    if isinstance(found, enum.property if hasattr(enum, "property") else property) and isinstance(cls, enum.EnumMeta):
        found = MISSING
    if found is MISSING or isinstance(cls, enum.EnumMeta):
        try:
            value = getattr(cls, name)
        except AttributeError:
            guard(tx, obj.source, "NO_ATTR", name)
            user_error(AttributeError, f"type object '{cls.__name__}' has no attribute '{name}'")
        if isinstance(meta, types.FunctionType):
            return MethodVal(func=wrap(tx, meta), self=obj)
        if isinstance(meta, property) and isinstance(meta.fget, types.FunctionType):
            return call(tx, wrap(tx, meta.fget), [obj])
        return wrap(tx, value)
    kind = type(found)
    if kind is staticmethod:
        return wrap(tx, found.__func__)
    if kind is classmethod:
        return MethodVal(func=wrap(tx, found.__func__), self=obj)
    if kind is types.ClassMethodDescriptorType:
        return wrap(tx, getattr(cls, name))
    if kind in (types.FunctionType, property, types.MethodDescriptorType, types.WrapperDescriptorType,
                types.MemberDescriptorType, types.GetSetDescriptorType):
        if name in ("__name__", "__qualname__", "__module__", "__doc__", "__dict__", "__mro__", "__bases__"):
            return wrap(tx, getattr(cls, name))
        return wrap(tx, found)
    if name in ("__module__", "__doc__"):
        at = None
    return wrap(tx, getattr(cls, name), at)


def is_library_class(cls) -> bool:
    return (cls.__module__ or "").split(".")[0] in ("torch", "builtins", "collections", "typing", "enum", "functools")


def constant_attribute(tx, obj, name):
    """Attributes of functions, builtins and Enum members."""
    real = obj.real
    found = lookup(type(real), name)
    if isinstance(real, enum.Enum) and type(found) is property and isinstance(found.fget, types.FunctionType):
        return call(tx, wrap(tx, found.fget), [obj])
    try:
        value = getattr(real, name)
    except AttributeError:
        no_attribute(type(real), name)
    if isinstance(value, types.MethodType) and value.__self__ is real:
        return MethodVal(func=wrap(tx, value.__func__), self=obj)
    if isinstance(value, types.MethodWrapperType):
        return MethodName(self=obj, name=name)
    if isinstance(real, types.FunctionType) and obj.source is not None and name not in ("__name__", "__qualname__",
                                                                                        "__module__", "__code__"):
        return wrap(tx, value, AttrSource(obj.source, name))
    return wrap(tx, value)


# %% [markdown]
# ## Values of the trace

# %%
@attributes_of(Const, ListVal, SetVal, IterVal, GenVal, SliceVal)
def plain_attribute(tx, value, name):
    cls = type(value.value) if type(value) is Const else PLAIN_CLASSES.get(type(value)) or value.cls
    if name == "__class__":
        return wrap(tx, cls)
    if type(value) is SliceVal and name in ("start", "stop", "step"):
        return getattr(value, name)
    if type(value) is Const:
        found = getattr(value.value, name, MISSING)
        if found is not MISSING and not callable(found):
            return wrap(tx, found)
    if not hasattr(cls, name):
        no_attribute(cls, name)
    return MethodName(self=value, name=name)


PLAIN_CLASSES = {IterVal: type(iter([])), GenVal: types.GeneratorType, SliceVal: slice}


@attributes_of(SymVal)
def sym_attribute(tx, value, name):
    unsupported(tx, f"the attribute {name} of a symbolic size")


@attributes_of(DictVal)
def dict_attribute(tx, value, name):
    if name == "default_factory" and value.factory is not None:
        return realize(tx, value.factory)
    return plain_attribute(tx, value, name)


@attributes_of(TupleVal)
def tuple_attribute(tx, value, name):
    fields = getattr(value.cls, "_fields", None)
    if fields is not None and name in fields:
        return realize(tx, value.items[fields.index(name)])
    found = lookup(value.cls, name)
    if hasattr(value.cls, "n_sequence_fields") and isinstance(found, types.MemberDescriptorType):
        names = [n for n in dir(value.cls) if isinstance(lookup(value.cls, n), types.MemberDescriptorType)]
        probe = value.cls(range(value.cls.n_sequence_fields))
        return realize(tx, value.items[getattr(probe, name)]) if name in names else NONE
    if isinstance(found, types.FunctionType):
        return MethodVal(func=wrap(tx, found), self=value)
    if type(found) is property:
        return call(tx, wrap(tx, found.fget), [value])
    if type(found) is classmethod:
        return MethodVal(func=wrap(tx, found.__func__), self=wrap(tx, value.cls))
    if name == "__class__":
        return wrap(tx, value.cls)
    if found is MISSING:
        no_attribute(value.cls, name)
    if isinstance(found, (types.MethodDescriptorType, types.WrapperDescriptorType)):
        return MethodName(self=value, name=name)
    return wrap(tx, found)


@attributes_of(FuncVal)
def function_attribute(tx, value, name):
    if name in value.attrs:
        return value.attrs[name]
    if name in ("__name__", "__qualname__"):
        return Const(value=value.name)
    if name == "__module__":
        return Const(value=value.globals.get("__name__"))
    if name == "__doc__":
        doc = value.code.co_consts[0] if value.code.co_consts else None
        return Const(value=doc if isinstance(doc, str) else None)
    if name == "__dict__":
        return DictVal(items={k: [Const(value=k), v] for k, v in value.attrs.items()})
    if name == "__code__":
        return Const(value=value.code)
    if name == "__defaults__":
        return TupleVal(items=list(value.defaults)) if value.defaults else NONE
    if hasattr(types.FunctionType, name):
        unsupported(tx, f"the attribute {name} of a function made in the same frame")
    no_attribute(types.FunctionType, name)


@attributes_of(MethodVal)
def method_attribute(tx, value, name):
    if name == "__func__":
        return value.func
    if name == "__self__":
        return value.self
    return get_attribute(tx, value.func, name)


@attributes_of(MethodName)
def method_name_attribute(tx, value, name):
    if name == "__self__":
        return value.self
    if name == "__name__":
        return Const(value=value.name)
    unsupported(tx, f"the attribute {name} of {describe(value)}")


@attributes_of(PartialVal)
def partial_attribute(tx, value, name):
    if name == "func":
        return value.func
    if name == "args":
        return TupleVal(items=list(value.args))
    if name == "keywords":
        return DictVal(items={k: [Const(value=k), v] for k, v in value.kwargs.items()})
    no_attribute(functools.partial, name)


@attributes_of(CellVal)
def cell_attribute(tx, value, name):
    if name == "cell_contents":
        from .opcodes import read_cell
        return read_cell(tx, value, "cell_contents")
    no_attribute(types.CellType, name)


@attributes_of(ExcVal)
def exception_attribute(tx, value, name):
    if name == "args":
        return TupleVal(items=list(value.args))
    if name == "__class__":
        return wrap(tx, value.cls)
    if name in ("__cause__", "__context__"):
        return value.cause or NONE
    if name == "value" and issubclass(value.cls, StopIteration):
        return value.args[0] if value.args else NONE
    if name in ("with_traceback", "add_note"):
        return PropertyVal(name=name, call=lambda tx, args, kwargs: value)
    unsupported(tx, f"the attribute {name} of an exception")


# %% [markdown]
# ## super()
#
# `super().forward(x)` continues the search behind the class in which the calling method was defined.

# %%
@attributes_of(SuperVal)
def super_attribute(tx, value, name):
    obj = value.self
    is_class = isinstance(getattr(obj, "real", None), type) and issubclass(obj.real, value.cls)
    cls = obj.real if is_class else class_of(obj)
    order = cls.__mro__
    for base in order[order.index(value.cls) + 1:]:
        if name in base.__dict__:
            found = base.__dict__[name]
            break
    else:
        user_error(AttributeError, f"'super' object has no attribute '{name}'")
    if name == "__new__":
        return wrap(tx, found.__func__ if isinstance(found, staticmethod) else found)
    if is_class:
        func = found.__func__ if isinstance(found, (classmethod, staticmethod)) else found
        return MethodVal(func=wrap(tx, func), self=obj) if isinstance(found, classmethod) else wrap(tx, func)
    if type(found) is property:
        return call(tx, wrap(tx, found.fget), [obj])
    if isinstance(obj, (DictVal, ListVal, TupleVal)) and not isinstance(found, types.FunctionType):
        return MethodName(self=obj, name=name)
    return bind_descriptor(tx, obj, name, found, None)


def class_of(value: Value) -> type:
    """type(value)"""
    if isinstance(value, Const):
        return type(value.value)
    if isinstance(value, (ObjVal, ListVal, TupleVal, DictVal, SetVal, ExcVal)):
        return value.cls
    if isinstance(value, TensorVal):
        return torch.Tensor if value.real is None else type(value.real)
    if isinstance(value, SymVal):
        return int
    if isinstance(value, ContextVal):
        return value.factory
    if type(value) in CLASS_OF:
        return CLASS_OF[type(value)]
    return object


CLASS_OF = {FuncVal: types.FunctionType, MethodVal: types.MethodType, PartialVal: functools.partial, SliceVal: slice,
            GenVal: types.GeneratorType, IterVal: type(iter([])), CellVal: types.CellType,
            MethodName: types.BuiltinFunctionType}


# %% [markdown]
# ## Writing attributes
#
# `store_attribute` is `object.__setattr__`: descriptors first, then the instance. `set_attribute` asks the
# class before.

# %%
def set_attribute(tx: Tracer, obj: Value, name: str, value: Value | None):
    """obj.name = value, or `del obj.name` when value is None."""
    if type(obj) is FuncVal and value is not None:
        obj.attrs[name] = value
        return
    if type(obj) is TensorVal and value is not None and obj.real is None and name not in TENSOR_SLOTS:
        unsupported(tx, f"setting the attribute {name} of a tensor made in the graph")
    if type(obj) is ExcVal and value is not None and name.startswith("__"):
        return
    if type(obj) is not ObjVal or isinstance(obj.real, (types.ModuleType, types.FunctionType, type)):
        unsupported(tx, f"setting the attribute {name} of {describe(obj)}")
    hook = lookup(obj.cls, "__setattr__" if value is not None else "__delattr__")
    if isinstance(obj.real, torch.nn.Module) and hook in (torch.nn.Module.__setattr__, torch.nn.Module.__delattr__):
        return set_module_attribute(tx, obj, name, value)
    if getattr(hook, "__objclass__", None) not in (object, types.SimpleNamespace):
        if not isinstance(hook, types.FunctionType):
            unsupported(tx, f"setting the attribute {name} of {describe(obj)}")
        call(tx, wrap(tx, hook), [obj, Const(value=name)] + ([value] if value is not None else []))
        return
    store_attribute(tx, obj, name, value)


TENSOR_SLOTS = frozenset(dir(torch.Tensor))


def store_attribute(tx, obj, name, value):
    found = lookup(obj.cls, name)
    if type(found) is property:
        setter = found.fset if value is not None else found.fdel
        if setter is None:
            user_error(AttributeError, f"property '{name}' of '{obj.cls.__name__}' object has no setter")
        call(tx, wrap(tx, setter), [obj] + ([value] if value is not None else []))
        return
    setter = getattr(type(found), "__set__", None)
    if isinstance(setter, types.FunctionType) and value is not None:
        call(tx, wrap(tx, setter), [wrap(tx, found), obj, value])
        return
    if setter is not None and type(found) is not types.MemberDescriptorType:
        unsupported(tx, f"the descriptor {name} of {obj.cls.__name__}")
    if name in ("__class__", "__dict__"):
        unsupported(tx, f"assigning {name}")
    if value is None and not has_attribute(tx, obj, name):
        no_attribute(obj.cls, name)
    if obj.real is NEW and value is None:
        obj.attrs.pop(name)
        return
    obj.attrs[name] = DELETED if value is None else value
    if obj.real is not NEW:
        mark_dirty(tx, obj)


def set_module_attribute(tx, obj, name, value):
    """nn.Module.__setattr__ sorts values into three dictionaries. Buffers and plain attributes are simple; replacing a
    parameter or a child changes the structure that guards describe."""
    fields = obj.real.__dict__
    structural = name in fields["_parameters"] or name in fields["_modules"]
    adds = isinstance(value, TensorVal) and isinstance(value.real, torch.nn.Parameter) \
        or isinstance(value, ObjVal) and isinstance(value.real, torch.nn.Module)
    if value is None or structural or adds:
        unsupported(tx, f"changing the parameters or submodules of a module ({name})")
    if name in fields["_buffers"] and not (type(value) is TensorVal or type(value) is Const and value.value is None):
        unsupported(tx, f"a buffer set to something that is no tensor ({name})")
    store_attribute(tx, obj, name, value)


def call(tx, function, args, kwargs=None):
    from .calls import call_value
    return call_value(tx, function, args, kwargs or {})
