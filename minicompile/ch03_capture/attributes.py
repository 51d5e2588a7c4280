# %% [markdown]
# # Attributes
#
# `x.name` looks harmless and is one of the most involved operations of Python: the class and its bases are
# searched, a property runs code, a function becomes a bound method, the instance dictionary comes in
# between, `__getattr__` is the last resort. Capture follows the same steps on the real class, without
# running the program's code: a property's getter is inlined, and what the instance dictionary holds is
# wrapped with a source and guarded. Writes never touch the real object. They are kept in `ObjVal.attrs`, in
# front of it, and are replayed after the graph has run.
#
# Three attributes, found in three places: `calls` in the object, `factor` in its class, and `shift` is computed.
#
#     class Scaled:
#         factor = 2.0
#
#         def __init__(self):
#             self.calls = 0
#
#         @property
#         def shift(self):
#             return self.calls / 4
#
#     def scaled(layer, x):
#         layer.calls += 1
#         return x * layer.factor + layer.shift
#
# For a layer that has not been called before, the graph is a multiplication by 2 and an addition of 0.25, since both
# numbers are constants of the trace: the getter of `shift` was inlined, and saw the `calls` that the trace had
# written. What makes them constants is what each search has found, or has not found, on its way:
#
#     layer is a Scaled
#     layer.calls == 0
#     layer.__dict__ has no key 'factor'
#     layer.factor == 2.0
#     Scaled.shift has the same code and defaults
#     Scaled.calls is what it was
#     Scaled.factor is a float
#     Scaled.shift is what it was
#
# The last three are of the class. `Scaled.calls` was nothing, and must stay nothing: a property `calls` would come before what the object
# holds. Of `factor` it is enough that it stays data, which is no descriptor, as its number has the guard above. And the write, which is the
# one line of text that follows the graph (`epilogue.py`):
#
#     layer.calls = 1

# %%
import enum
import functools
import sys
import types

import torch

from ..ch02_guards.guards import class_lookup, slot, slot_is_empty
from ..ch02_guards.identity import HEAP_TYPE
from ..ch02_guards.sources import (
    AttrSource, ClassAttrSource, ConstantSource, FieldSource, InstanceDictSource, ItemSource, SlotSource, Source)
from .effects import changed, touch
from .exceptions import UserError, user_error
from .interpreter import unless_raised
from .lookup import MISSING, lookup, python_method
from .tensors import tensor_attribute
from .tracer import PYTHON, Tracer, answer, call, constant_source, guard, read_once, unsupported, written_global
from .values import (
    AbstractValue, CONSTANT_TYPES, Const, DELETED, DictVal, Lazy, ListVal, MethodName, MethodVal, NONE, NUMBERS, ObjVal,
    SetVal, SymVal, Table, TensorVal, TupleVal, const, describe, is_class)
from .wrap import entries, part, realize, wrap

GETATTR = Table()                    # kind of value -> function(tx, value, name) -> AbstractValue
# kind of value, or `type`, for classes of the trace -> function(tx, value, name, new value; None deletes), or NotImplemented
SETATTR = Table()


def get_attribute(tx: Tracer, value: AbstractValue, name: str) -> AbstractValue:
    """value.name; raises AttributeError in the traced program when there is none."""
    handler = GETATTR.get(type(value))
    if handler is None:
        unsupported(tx, f"the attribute {name} of {describe(value)}")
    try:
        return handler(tx, value, name)
    except UserError as error:
        if issubclass(error.exc.cls, AttributeError) and not {"name", "obj"} & error.exc.attrs.keys():
            error.exc.attrs.update(name=const(name), obj=value)
        raise


def has_attribute(tx: Tracer, value: AbstractValue, name: str) -> bool:
    return unless_raised(AttributeError, lambda: get_attribute(tx, value, name)) is not None


GETATTR[TensorVal] = tensor_attribute


# %% [markdown]
# An attribute that is missing is an ordinary event: programs ask `hasattr(self, "cache")`, or catch the AttributeError, and may print
# it. So it is raised in the traced program, by `user_error`, in the words that this version of Python has for the case. An object
# whose class has `__slots__` keeps attributes in places of fixed offset, and such a place may be empty; that it was is guarded as well.
# `own_fields` reads the dictionary of a real object past a `__getattribute__` of the program's.

# %%
SLOTS_ONLY = " and no __dict__ for setting new attributes" if PYTHON >= (3, 13) else ""


def no_attribute(value_cls, name, more=None):
    """more: words that follow when the attribute cannot be written; before 3.13 that error has no `name`."""
    named = const(name) if PYTHON >= (3, 13) else NONE
    own = value_cls.__flags__ & HEAP_TYPE or value_cls.__module__ == "builtins"         # of others C knows the full name only
    called = value_cls.__name__ if own else f"{value_cls.__module__}.{value_cls.__name__}"
    user_error(AttributeError, f"'{called}' object has no attribute '{name}'{more or ''}",
               **({} if more is None else {"name": named}))


def no_accessor(cls, name, kind):
    user_error(AttributeError, f"property {name!r} of {cls.__qualname__!r} object has no {kind}er")


def empty_slot(tx, obj, name):
    """What reading a slot without a value raises."""
    cls = obj.cls
    guard_empty(tx, obj, name)
    full = cls.__qualname__ if cls.__module__ == "__main__" else f"{cls.__module__}.{cls.__qualname__}"
    called = cls.__name__ if PYTHON < (3, 13) else full
    user_error(AttributeError, f"'{called}' object has no attribute '{name}'")


def guard_empty(tx, obj, name):
    if name not in obj.attrs:
        guard(tx, obj.source, "EMPTY_SLOT", name)


def own_fields(real) -> dict | None:
    """The `__dict__` of an object."""
    read = type(real).__getattribute__
    try:
        return (object.__getattribute__ if type(read) is types.FunctionType else read)(real, "__dict__")
    except AttributeError:
        return None


# %% [markdown]
# ## Objects
#
# The order is Python's: data descriptors of the class, the instance, other descriptors of the class,
# `__getattr__`. The last is asked whenever the others end in an AttributeError, also in one that comes out of a property: a typo in the
# property `device` of a module is reported as a module that has no `device`.

# %%
@GETATTR.of(ObjVal)
def object_attribute(tx, obj, name):
    own, fallback = python_method(obj.cls, "__getattribute__"), MISSING if isinstance(obj.real, type) else lookup(obj.cls, "__getattr__")
    find = functools.partial(get_plainly if fallback is MISSING else found_attribute, tx, obj, name) if own is None else \
        functools.partial(call, tx, wrap(tx, own), [obj, const(name)])
    if fallback is MISSING:
        return find()
    if (found := unless_raised(AttributeError, find)) is not None:
        return found
    return call(tx, wrap(tx, fallback), [obj, const(name)])


def get_plainly(tx, obj, name):
    """object.__getattribute__(obj, name), which for what is no `ObjVal` is the only way."""
    if type(obj) is not ObjVal:
        return get_attribute(tx, obj, name)
    found = found_attribute(tx, obj, name)
    if found is None:
        guard_bare(tx, obj, name)
        no_attribute(obj.cls, name)
    return found


# %% [markdown]
# If the class has its own `__getattribute__`, that is inlined in place of all this; it mostly ends in `super().__getattribute__(name)`,
# which is `get_plainly`.
#
# `found_attribute` begins with what the trace has written, since that hides everything else. Modules,
# classes, functions and members of an enum have rules of their own. All others are instances, and for them
# the steps of Python are written down one after the other in `instance_attribute`: a property or
# another data descriptor of the class; the instance's own dictionary; a method or another non-data
# descriptor of the class.
#
# Each step that finds nothing is an assumption. If `obj.scale` was found in the class, the instance must
# not get an attribute `scale` of its own, or the next call would read the wrong one. The guard says that
# the key is not in the instance's dictionary (NO_KEY). It is left out for classes of libraries, whose
# instances nobody gives methods, with the exception of `forward`, which people do replace.
#
# The source that a value gets is the shortest text that reads it and runs no code of the program. `layer.calls` would, if the class had a
# `__getattr__` or a descriptor of that name; then it is `layer.__dict__['calls']`.

# %%
def found_attribute(tx, obj, name):
    """What the object or its class has by this name. None: neither has."""
    if name in obj.attrs:
        found = obj.attrs[name]
        if found is DELETED:
            found = lookup(obj.cls, name)
            return empty_slot(tx, obj, name) if isinstance(found, types.MemberDescriptorType) else shared_attribute(tx, obj, name, found)
        obj.attrs[name] = found = realize(tx, found)         # what a copy took over may be waiting
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
    if isinstance(real, types.GenericAlias) and name in ("__name__", "__qualname__", "__module__"):
        return get_attribute(tx, wrap(tx, real.__origin__), name)
    return instance_attribute(tx, obj, name, lookup(obj.cls, name))


# A guard must not read these, which runs hooks of the program: what a checkpoint has saved can be read only once
UNPACKED = ("saved_tensors", "saved_variables", "_saved_")


def instance_attribute(tx, obj, name, found):
    real, kind = obj.real, type(found)
    at = part(AttrSource, obj.source, name)
    # Of an object that has none of its own, `obj.name` would run code of the class
    runs = real is not None and (
        type(real).__getattribute__ is not object.__getattribute__ or lookup(obj.cls, "__getattr__") is not MISSING)
    if is_property(found):
        return bind_attribute(tx, obj, name, found)
    if kind in (types.MemberDescriptorType, types.GetSetDescriptorType) and name != "__dict__":
        if name.startswith(UNPACKED) and isinstance(real, torch.autograd.graph.Node):
            unsupported(tx, f"reading {name} of {obj.cls.__name__}, which runs the hooks that they were saved with")
        return empty_slot(tx, obj, name) if real is None or slot_is_empty(real, name) else \
            wrap(tx, slot(real, name), part(SlotSource, obj.source, name) if runs else at)
    if name == "__dict__" and (obj.cls.__dictoffset__ if real is None else own_fields(real) is not None):
        return instance_dict(tx, obj)
    if found is not MISSING and python_method(kind, "__set__"):
        return bind_attribute(tx, obj, name, found, at)
    fields = own_fields(real)
    if fields is not None and name in fields:
        runs = runs or hasattr(kind, "__get__")
        at = at and (ItemSource(InstanceDictSource(obj.source), name) if runs else FieldSource(obj.source, name))
        return wrap(tx, fields[name], at)
    own = python_method(obj.cls, "__getattribute__")         # which would be run once more to read it at `at`
    return shared_attribute(tx, obj, name, found, at if own is None else None)


# %% [markdown]
# What is left is what all instances share. A `cached_property` is the one thing of a class that writes: its result is stored in
# the instance, and the next call finds it there and not the property, hence the guard that it is not there yet.

# %%
def shared_attribute(tx, obj, name, found, at=None):
    """The object has no attribute of its own by this name: what its class makes of it, or None."""
    if type(found) is functools.cached_property:
        guard_bare(tx, obj, name)                # at the next call it may be there
        result = call(tx, wrap(tx, found.func), [obj])
        store_attribute(tx, obj, name, result)
        return result
    if (written := written_in_class(tx, obj.cls, name)) is not None:
        guard_bare(tx, obj, name)
        return written
    if found is not MISSING:
        if name == "forward" or not is_library_class(obj.cls):
            guard_bare(tx, obj, name)
        return bind_attribute(tx, obj, name, found, at)
    if lookup(obj.cls, "__getattr__") is not torch.nn.Module.__getattr__:        # the children that this finds are guarded by themselves
        guard_bare(tx, obj, name)
    return None


def guard_bare(tx, obj, name):
    """The object has no attribute `name` of its own, in front of what its class has, unless the trace has deleted it."""
    if own_fields(obj.real) is not None and name not in obj.attrs:
        guard(tx, part(InstanceDictSource, obj.source), "NO_KEY", name)


# %% [markdown]
# What lies in a class is not yet the attribute. A function becomes a method that remembers the instance, a
# property is called, a `staticmethod` is unwrapped. This is Python's descriptor protocol, and its kinds
# follow here. A descriptor that the program has written is called like any function of the program. One
# that others wrote in C is asked, as long as the trace has not changed what it might look at.
#
# `vars(obj)` gives a dictionary that is another view of the same attributes. It is made when somebody asks
# for it, and from then on each write to one of the two is made to both.

# %%
def is_property(found) -> bool:
    """Whether a thing in a class is a property, or of a class derived from it that reads and writes as it does."""
    kind = type(found)
    return kind is property or issubclass(kind, property) and all(
        getattr(kind, name) is getattr(property, name) for name in ("__get__", "__set__", "__delete__"))


BOUND = functools._lru_cache_wrapper, types.MethodDescriptorType, types.WrapperDescriptorType


def bind_attribute(tx, obj, name, found, at=None, owner=None):
    """What `obj.name` is when `found` lies in the class of `obj`, or as `super()` finds it in `owner`: the descriptor protocol."""
    kind, cls = type(found), obj.cls
    if kind is types.FunctionType:
        return MethodVal(func=wrap(tx, found), self=obj, source=at)
    if is_property(found):
        return call(tx, wrap(tx, found.fget), [obj]) if found.fget else no_accessor(cls, name, "gett")
    if kind is staticmethod:
        return wrap(tx, found.__func__)
    if kind is classmethod:
        return MethodVal(func=wrap(tx, found.__func__), self=wrap(tx, cls))
    if kind is types.ClassMethodDescriptorType:
        return wrap(tx, getattr(cls, name))
    if kind in BOUND:
        return MethodVal(func=wrap(tx, found), self=obj)
    if getter := python_method(kind, "__get__"):
        return call(tx, wrap(tx, getter), [part_of_class(tx, owner or cls, name, found), obj, wrap(tx, cls)])
    if hasattr(kind, "__get__"):             # a method made by Cython or pybind11
        if obj.real is None or obj.attrs:
            unsupported(tx, f"the attribute {name} of {describe(obj)}, made by {kind.__name__}")
        return wrap(tx, getattr(obj.real, name), at)
    if at is not None and not isinstance(at.base, ConstantSource):
        return data_of_class(tx, cls, name, found, at)
    return part_of_class(tx, owner or cls, name, found)


def instance_dict(tx, obj):
    """vars(obj): a dictionary of its attributes, made when somebody asks for it and kept up to date."""
    if obj.fields is None and obj.real is None:
        obj.fields = DictVal(owner=obj)
    elif obj.fields is None:
        met = id(own_fields(obj.real)) in tx.objects.tracked                # as a dictionary like others
        whole = wrap(tx, own_fields(obj.real), part(InstanceDictSource, obj.source))
        if type(whole) is not DictVal or met and (obj.attrs or id(whole) in tx.effects.changed):
            unsupported(tx, f"the __dict__ of {describe(obj)}, of which one was written to before the other was seen")
        obj.before = entries(tx, whole).copy()
        whole.owner, obj.fields = obj, whole
    items = obj.before.copy()
    for key, v in obj.attrs.items():
        if v is DELETED or key in obj.moved:
            items.pop(key, None)
        if v is not DELETED and type(lookup(obj.cls, key)) is not types.MemberDescriptorType:        # a slot
            items[key] = const(key), v
    obj.fields.items = items
    return obj.fields


def store_in_dict(tx, obj, key, value):
    """`vars(obj)[key] = value`, or del without a value: an attribute past all that the class has to say."""
    name, kind = key.value, object if value is None else value.cls
    if type(obj) is not ObjVal or hasattr(type(lookup(obj.cls, name)), "__set__") or \
            issubclass(obj.cls, torch.nn.Module) and issubclass(kind, (torch.nn.Module, torch.nn.Parameter)):
        unsupported(tx, f"writing {name} into the __dict__ of {describe(obj)}")
    put_attribute(tx, obj, name, value)


# %% [markdown]
# ## Classes, Python modules, functions
#
# Attributes of Python modules and of the program's classes may be rebound between calls, by a test that
# patches `torch.nn.functional.linear` or a program that sets `torch.backends.cudnn.benchmark`, and are
# guarded. It costs little: the dictionary of a Python module is rarely written (`stable.py` in chapter 2).

# %%
def python_module_attribute(tx, obj, name):
    real, at = obj.real, constant_source(tx, obj.real)
    if (written := written_global(tx, vars(real), name)) is not None:
        return written if written is not DELETED else no_module_attribute(real, name)
    return read_once(tx, real, name, lambda: find_module_attribute(tx, real, at, name))


def find_module_attribute(tx, real, at, name):
    if not hasattr(real, name):
        guard(tx, InstanceDictSource(at), "NO_KEY", name)
        if "__getattr__" in vars(real):
            answer(tx, hasattr, real, name)              # it may find something later
        else:
            guard(tx, InstanceDictSource(at), "NO_KEY", "__getattr__")
        no_module_attribute(real, name)
    plain = type(real) is types.ModuleType and name in vars(real)
    return wrap(tx, getattr(real, name),
                ItemSource(InstanceDictSource(at), name) if plain else AttrSource(at, name))


def no_module_attribute(real, name):
    user_error(AttributeError, f"module '{real.__name__}' has no attribute '{name}'")


# %% [markdown]
# For a class the rules are those of `type.__getattribute__`. A function found in the class comes as it is, a
# classmethod is bound to the class, and a descriptor is asked. What is left is data, and data of the program's own
# classes may be rebound, so it gets a source and with it a guard. Of classes of torch and the standard library it is enough that
# the same object still lies there, which the search has noted (`lookup.py`).
#
# `class_attribute` has the order: what the trace has written, facts that the object of a class holds itself (`class_fact`),
# what the metaclass has if the class has nothing, functions, descriptors, data.

# %%
LIBRARY_PACKAGES = ("torch", "builtins", "collections", "typing", "enum", "functools")
C_DESCRIPTORS = (types.MethodDescriptorType, types.WrapperDescriptorType, types.MemberDescriptorType,
                 types.GetSetDescriptorType)


def is_library_class(cls) -> bool:
    return (cls.__module__ or "").split(".")[0] in LIBRARY_PACKAGES


def in_library(module) -> bool:
    """Whether a Python module without a file is one of torch or of Python."""
    root = module.__name__.split(".")[0]
    return root in LIBRARY_PACKAGES or root in sys.stdlib_module_names


ORIGINAL_METHODS: dict = {}          # (class with a handler, name of a method) -> what it was when all handlers were there (`capture.py`)
DECISIVE = ("__new__", "__init__", "__call__", "__enter__", "__exit__")


def is_patched(cls) -> bool:
    """Whether the program has put something of its own into a class with a handler: what that knows may be true no more."""
    return any((cls, name) in ORIGINAL_METHODS and lookup(cls, name) is not ORIGINAL_METHODS[cls, name] for name in DECISIVE)


def class_attribute(tx, obj, name):
    cls, found = obj.real, lookup(obj.real, name)
    kind = type(found)
    if (written := written_in_class(tx, cls, name)) is not None:
        return written
    if isinstance(lookup(type(cls), name), (types.GetSetDescriptorType, types.MemberDescriptorType)) and hasattr(cls, name):
        return class_fact(tx, obj, name)
    if found is MISSING or isinstance(cls, enum.EnumMeta) and (isinstance(found, enum.Enum) or hasattr(kind, "__get__")):
        return metaclass_attribute(tx, obj, name)
    if isinstance(found, (types.FunctionType, staticmethod, classmethod, property, *C_DESCRIPTORS)):
        return bind_to_class(tx, obj, found, cls, name)
    if getter := python_method(kind, "__get__"):
        return call(tx, wrap(tx, getter), [part_of_class(tx, cls, name, found), NONE, obj])
    library = kind is types.ClassMethodDescriptorType or is_library_class(cls)
    if library or obj.source is None:
        return wrap(tx, getattr(cls, name)) if library else part_of_class(tx, cls, name, found)
    return data_of_class(tx, cls, name, getattr(cls, name), AttrSource(obj.source, name))


def class_fact(tx, obj, name):
    """What the object of a class itself holds, its name, its bases or its `__dict__`, of which a view shows what lies in it."""
    cls = obj.real
    fixed = not cls.__flags__ & HEAP_TYPE or cls in tx.classes.made
    source = None if fixed else obj.source or constant_source(tx, cls)
    if name != "__dict__":
        return wrap(tx, getattr(cls, name), part(AttrSource, source, name))
    if changed(tx, cls) is not None:
        unsupported(tx, f"the __dict__ of {describe(obj)}, which the trace has written to")
    at = part(InstanceDictSource, source)
    items = {key: (const(key), Lazy(found, part(ItemSource, at, key))) for key, found in vars(cls).items()}
    return DictVal(items=items, cls=types.MappingProxyType, real=vars(cls), source=at)


def data_of_class(tx, cls, name, found, at):
    """`found`, which is no descriptor, is read at `at` in each call, and guarded by itself. Then it may be another thing of its type."""
    if cls.__flags__ & HEAP_TYPE:
        tx.classes.data.add((cls, name))
    return wrap(tx, found, at)


def part_of_class(tx, cls, name, found):
    """`found`, the attribute of a class, as it lies in the class. A guard of its own says that it lies there;
    what it is made of may change, and is looked up again in the next call."""
    owner = next((base for base in cls.__mro__ if vars(base).get(name) is found), None)
    if type(found) in CONSTANT_TYPES - NUMBERS or owner is None or owner in tx.classes.made or is_library_class(owner):
        return wrap(tx, found)
    return data_of_class(tx, cls, name, found, ClassAttrSource(constant_source(tx, cls), name))


def bind_to_class(tx, obj, found, cls, name):
    """What the class `obj` has in `found`, which a search from `cls` finds by this name."""
    if type(found) is classmethod:
        return MethodVal(func=wrap(tx, found.__func__), self=obj)
    value = wrap(tx, found.__func__ if type(found) is staticmethod else found)
    if type(found) is property and value.source is None:             # `lookup` has guarded it, but not its text
        value.source = ClassAttrSource(constant_source(tx, cls), name)
    return value


# %% [markdown]
# If the class and its bases do not have the name, the class is asked as an object: its metaclass may have it.
# `Enum` makes most use of this.

# %%
def metaclass_attribute(tx, obj, name):
    """What a class gets from its metaclass, and everything of an Enum."""
    cls, found = obj.real, lookup(type(obj.real), name)
    fallback = python_method(type(cls), "__getattr__") if found is MISSING else None
    if fallback and not isinstance(cls, enum.EnumMeta):
        return call(tx, wrap(tx, fallback), [obj, const(name)])
    if not hasattr(cls, name):
        guard(tx, obj.source, "NO_ATTR", name)
        user_error(AttributeError, f"type object '{cls.__name__}' has no attribute '{name}'")
    if in_python(found):
        return bind_attribute(tx, obj, name, found)
    plain = found is not MISSING and not hasattr(type(found), "__get__")
    plain = plain and not isinstance(cls, enum.EnumMeta)
    return part_of_class(tx, type(cls), name, found) if plain else wrap(tx, getattr(cls, name))


def in_python(found) -> bool:
    """Whether an attribute of a class is a method or a property written in Python."""
    return isinstance(found.fget if is_property(found) else found, types.FunctionType)


# %% [markdown]
# Functions, builtins and members of Enums have attributes as well, few of which ever change. Those of functions and members are
# guarded, and so is a name that is missing, since programs use both as a place to hang things on.

# %%
def constant_attribute(tx, obj, name):
    """Attributes of functions, builtins and Enum members."""
    real, found = obj.real, lookup(type(obj.real), name)
    if isinstance(real, enum.Enum) and in_python(found):
        return bind_attribute(tx, obj, name, found)
    made = type(real) in tx.classes.made
    source = source_of_function(tx, obj) if isinstance(real, (types.FunctionType, enum.Enum)) and not made else None
    if not hasattr(real, name):
        guard(tx, part(InstanceDictSource, source), "NO_KEY", name)              # somebody may hang it on
        no_attribute(type(real), name)
    value = getattr(real, name)
    if isinstance(value, types.MethodWrapperType):
        return MethodName(self=obj, name=name)
    if isinstance(value, types.BuiltinFunctionType):
        return wrap(tx, value)
    key = IN_MEMBER.get(name, name) if isinstance(real, enum.Enum) else None
    if key is not None and vars(real).get(key, MISSING) is value:
        return wrap(tx, value, part(FieldSource, source, key))
    return wrap(tx, value, part(AttrSource, source, name))


IN_MEMBER = {"name": "_name_", "value": "_value_"}            # where a member of an Enum keeps it


def source_of_function(tx, obj) -> Source:
    """Where a function, or a member of an Enum, is found: if nowhere, as the default of a parameter, the trace takes it for what it is, but
    not what hangs on it."""
    return obj.source or constant_source(tx, obj.real)


# %% [markdown]
# ## Writing attributes
#
# `set_attribute` looks into a table for the kind of value. For an object the class may have its own
# `__setattr__`, and then this is called. PyTorch's modules have one (`library/modules.py`).

# %%
def set_attribute(tx: Tracer, obj: AbstractValue, name: str, value: AbstractValue | None):
    """obj.name = value, or `del obj.name` when value is None."""
    kind = type if is_class(obj) and obj.real in tx.classes.made else type(obj)
    if kind not in SETATTR or SETATTR[kind](tx, obj, name, value) is NotImplemented:
        unsupported(tx, f"setting the attribute {name} of {describe(obj)}")


@SETATTR.of(ObjVal)
def set_object_attribute(tx, obj, name, value):
    if is_class(obj) and value is not None and may_write_to_class(obj, name, value):
        obj.attrs[name] = value
        tx.classes.data.add((obj.real, name))
        return touch(tx, obj)
    if isinstance(obj.real, (types.ModuleType, types.FunctionType, type)):
        return NotImplemented
    method, arguments = ("__delattr__", [obj, const(name)]) if value is None else ("__setattr__", [obj, const(name), value])
    hook = lookup(obj.cls, method)
    if getattr(hook, "__objclass__", None) in (object, types.SimpleNamespace):
        store_attribute(tx, obj, name, value)
    elif isinstance(hook, (types.FunctionType, types.WrapperDescriptorType)):        # of dict: `__setattr__ = dict.__setitem__`
        call(tx, wrap(tx, hook), arguments)
    else:
        return NotImplemented


# %% [markdown]
# `cls.calls += 1`: a class of the program has attributes like an object, which lie in front of it in the same way. Here they have to be
# data, before and after. Methods and other descriptors decide what attributes of objects mean, and all that is known about them is read
# from the real class. What finds data, in an object of the class or of a derived one, asks `written_in_class` first.

# %%
DATA = (Const, SymVal, TensorVal, ListVal, TupleVal, DictVal, SetVal, ObjVal)


def may_write_to_class(obj, name, value) -> bool:
    """Whether `obj.name = value` sets data of a class of the program, and runs no code."""
    cls = obj.real
    plain = cls.__flags__ & HEAP_TYPE and lookup(type(cls), "__setattr__") is type.__setattr__ and not is_library_class(cls)
    return plain and type(value) in DATA and not name.startswith("__") and class_lookup(type(cls), name) is MISSING and all(
        class_lookup(kind, descriptor) is MISSING for kind in (type(lookup(cls, name)), value.cls) for descriptor in ("__get__", "__set__"))


def written_in_class(tx, cls, name: str) -> AbstractValue | None:
    """What the trace has written to the attribute that is found in `cls` by this name."""
    if not tx.effects.changed:
        return None
    for base in cls.__mro__:
        value = changed(tx, base)
        if value is not None and name in value.attrs:
            tx.classes.data.add((cls, name))
            return value.attrs[name]
        if name in vars(base):
            return None


# %% [markdown]
# `store_attribute` is `object.__setattr__`, which is reached when no class objects: descriptors
# first, then the instance. A property calls its setter, and a descriptor its
# `__set__`. Otherwise the value goes into `attrs`, in front of the real object, which stays as it is until
# the epilogue. Deleting is writing a marker. If there is nothing to delete, Python's own error is raised,
# with Python's words.

# %%
def store_attribute(tx, obj, name, value):
    """object.__setattr__(obj, name, value), or `__delattr__` when value is None; for what is no `ObjVal` the only way."""
    if type(obj) is not ObjVal:
        return set_attribute(tx, obj, name, value)
    found, arguments = lookup(obj.cls, name), [] if value is None else [value]
    if is_property(found):
        setter = found.fdel if value is None else found.fset
        if setter is None:
            no_accessor(obj.cls, name, "delet" if value is None else "sett")
        call(tx, wrap(tx, setter), [obj, *arguments])
        return
    hook = python_method(type(found), "__delete__" if value is None else "__set__")
    if hook is not None:
        call(tx, wrap(tx, hook), [part_of_class(tx, obj.cls, name, found), obj, *arguments])
        return
    if hasattr(type(found), "__set__") and type(found) is not types.MemberDescriptorType:
        unsupported(tx, f"the descriptor {name} of {obj.cls.__name__}")
    if name in ("__class__", "__dict__"):
        unsupported(tx, f"assigning {name}")
    real, slot = own_fields(obj.real) or (), type(found) is types.MemberDescriptorType
    filled = slot and obj.real is not None and not slot_is_empty(obj.real, name)
    own = obj.attrs[name] is not DELETED if name in obj.attrs else name in real or filled
    if value is None and own and name not in obj.attrs and name in real:
        guard(tx, part(ItemSource, part(InstanceDictSource, obj.source), name), "TYPE_MATCH", type(real[name]))
    bare = not obj.cls.__dictoffset__ and obj.cls is not object
    if bare and found is not MISSING and not slot:
        user_error(AttributeError, f"'{obj.cls.__name__}' object attribute '{name}' is read-only", name=NONE)
    if value is None and not (own and has_attribute(tx, obj, name)):
        if slot:
            guard_empty(tx, obj, name)
            user_error(AttributeError, name, name=NONE)
        guard_bare(tx, obj, name)
        no_attribute(obj.cls, name, SLOTS_ONLY if bare else "")
    if found is MISSING and bare:
        no_attribute(obj.cls, name, SLOTS_ONLY)
    put_attribute(tx, obj, name, value)


def put_attribute(tx, obj, name, value):
    """Into `attrs`, or out of it without a value. They are in the order of writing, where what was deleted before is written last."""
    if value is None and obj.real is None:
        del obj.attrs[name]
    else:
        if obj.attrs.get(name) is DELETED:
            del obj.attrs[name]
            obj.moved.add(name)
        obj.attrs[name] = DELETED if value is None else value
    touch(tx, obj)
    if obj.fields is not None:
        instance_dict(tx, obj)
