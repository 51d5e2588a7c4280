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
import types

import numpy
import torch

from ..ch02_guards.guards import class_lookup, slot, slot_is_empty
from ..ch02_guards.identity import HEAP_TYPE, is_a, module_name
from ..ch02_guards.sources import AttrSource, FieldSource, ItemSource, SlotSource
from .class_attributes import class_attribute, constant_attribute, python_module_attribute
from .descriptors import (
    SLOTS_ONLY, bind_attribute, fields_at, guard_bare, is_library_class, is_property, no_accessor, no_attribute, own_fields,
    part_of_class, written_in_class)
from .effects import touch
from .exceptions import UserError, user_error
from .hook import is_library_file
from .interpreter import unless_raised
from .keys import entries
from .lookup import MISSING, lookup, python_method, says_its_class
from .tensors import tensor_attribute
from .tracer import PYTHON, Tracer, call, globals_of, guard, module_of, plain_python, unsupported, writable_globals
from .values import (
    AbstractValue, Const, DELETED, DictVal, ListVal, NONE, ObjVal, SetVal, SymVal, Table, TensorVal, TupleVal, const, describe, is_class)
from .wrap import part, realize, wrap

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
# ## Objects
#
# The order is Python's: data descriptors of the class, the instance, other descriptors of the class,
# `__getattr__`. The last is asked whenever the others end in an AttributeError, also in one that comes out of a property: a typo in the
# property `device` of a module is reported as a module that has no `device`.

# %%
@GETATTR.of(ObjVal)
def object_attribute(tx, obj, name):
    own, fallback = python_method(obj.cls, "__getattribute__"), MISSING if is_a(obj.real, type) else lookup(obj.cls, "__getattr__")
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
        if name not in obj.attrs and is_found_in_c(obj.real, name):
            plain_python(tx, f"the attribute {name} of a {obj.cls.__qualname__} object, which its class finds in C")
        guard_bare(tx, obj, name)
        no_attribute(obj.cls, name)
    return found


def is_found_in_c(real, name: str) -> bool:
    """Whether an object has an attribute that lies in no dictionary, as a decimal context its flags."""
    read = type(real).__getattribute__
    in_c = isinstance(read, types.WrapperDescriptorType) and read is not object.__getattribute__
    if real is None or not in_c or is_a(real, (type, types.ModuleType)):
        return False
    try:
        read(real, name)
    except AttributeError:
        return False
    return True


# %% [markdown]
# If the class has its own `__getattribute__`, that is inlined in place of all this; it mostly ends in `super().__getattribute__(name)`,
# which is `get_plainly`.
#
# `found_attribute` begins with what the trace has written, since that hides everything else. Modules,
# classes, functions and members of an enum have rules of their own (`class_attributes.py`). All others are instances, and for them
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
    if name == "__class__" and not says_its_class(obj.cls):
        return wrap(tx, obj.cls)
    if is_a(real, types.ModuleType):
        return python_module_attribute(tx, obj, name)
    if is_a(real, type):
        return class_attribute(tx, obj, name)
    if is_a(real, (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType,
                   types.WrapperDescriptorType, enum.Enum)):
        return constant_attribute(tx, obj, name)
    if is_a(real, types.GenericAlias) and name in ("__name__", "__qualname__", "__module__"):
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
        return wrap(tx, getattr(real, name), at) if is_a(real, numpy.iinfo) else bind_attribute(tx, obj, name, found)
    if kind in (types.MemberDescriptorType, types.GetSetDescriptorType) and name != "__dict__":
        if name.startswith(UNPACKED) and is_a(real, torch.autograd.graph.Node):
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
        at = at and (ItemSource(fields_at(obj), name) if runs else FieldSource(obj.source, name))
        return wrap(tx, fields[name], at)
    own = python_method(obj.cls, "__getattribute__")         # which would be run once more to read it at `at`
    return shared_attribute(tx, obj, name, found, at if own is None else None)


# %% [markdown]
# An object whose class has `__slots__` keeps attributes in places of fixed offset, and such a place may be empty; that it was is guarded
# as well.

# %%
def empty_slot(tx, obj, name):
    """What reading a slot without a value raises."""
    cls = obj.cls
    guard_empty(tx, obj, name)
    full = cls.__qualname__ if module_name(cls) in ("", "__main__", "builtins") else f"{module_name(cls)}.{cls.__qualname__}"
    called = cls.__name__ if PYTHON < (3, 13) else full
    user_error(AttributeError, f"'{called}' object has no attribute '{name}'")


def guard_empty(tx, obj, name):
    if name not in obj.attrs:
        guard(tx, obj.source, "EMPTY_SLOT", name)


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


# %% [markdown]
# `vars(obj)` gives a dictionary that is another view of the same attributes. It is made when somebody asks
# for it, and from then on each write to one of the two is made to both.

# %%
def instance_dict(tx, obj):
    """vars(obj): a dictionary of its attributes, made when somebody asks for it and kept up to date."""
    if obj.fields is None and obj.real is None:
        obj.fields = DictVal(owner=obj)
    elif obj.fields is None:
        met = id(own_fields(obj.real)) in tx.objects.tracked                # as a dictionary like others
        whole = wrap(tx, own_fields(obj.real), fields_at(obj))
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
    if type(obj.real) is types.ModuleType and value is not None and may_write_to_module(obj.real, name):
        globals_of(tx, vars(obj.real))                   # if they are also this function's, they have to stay that
        namespace = writable_globals(tx, vars(obj.real))
        touch(tx, namespace)
        namespace.attrs[name] = value
        return None
    if is_a(obj.real, (types.ModuleType, types.FunctionType, type)):
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
# from the real class.

# %%
DATA = (Const, SymVal, TensorVal, ListVal, TupleVal, DictVal, SetVal, ObjVal)


def may_write_to_class(obj, name, value) -> bool:
    """Whether `obj.name = value` sets data of a class of the program, and runs no code."""
    cls = obj.real
    plain = cls.__flags__ & HEAP_TYPE and lookup(type(cls), "__setattr__") is type.__setattr__ and not is_library_class(cls)
    return plain and type(value) in DATA and not name.startswith("__") and class_lookup(type(cls), name) is MISSING and all(
        class_lookup(kind, descriptor) is MISSING for kind in (type(lookup(cls, name)), value.cls) for descriptor in ("__get__", "__set__"))


# %% [markdown]
# `settings.calls += 1`, where `settings` is a Python module of the program, is a write to one of its global variables. (Those of
# PyTorch, of the standard library and of C are read by code that no trace sees, and a name like `__class__` means something to Python.)

# %%
def may_write_to_module(module, name) -> bool:
    """Whether `module.name = value` sets a global variable of the program and nothing else."""
    file = vars(module).get("__file__")
    return type(file) is str and file.endswith(".py") and not is_library_file(file) and module_of(vars(module)) is module and \
        not name.startswith("__")


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
        guard(tx, part(ItemSource, fields_at(obj), name), "TYPE_MATCH", type(real[name]))
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
