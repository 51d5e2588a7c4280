# %% [markdown]
# # Attributes of classes, Python modules and functions
#
# They are objects, too, but few of them are what the chapter calls an object: a class is searched along its bases, a Python module has
# one dictionary, and functions, builtins and members of Enums hardly ever change. So each has its own way.
#
# All of them outlive the call. A test patches `torch.nn.functional.linear`, a program sets `torch.backends.cudnn.benchmark`, or counts in a
# class, and the next call must notice. Hence the guards here. They cost little: the dictionary of a Python module is rarely
# written (`stable.py` in chapter 2).
#
#     class Config:
#         scale = 2.0
#
#     def configured(x):
#         if hasattr(F, "my_relu"):
#             return F.my_relu(x)
#         return F.relu(x) * Config.scale
#
# The trace is guarded by the name being absent, and with it a `__getattr__` of the module that could make it, by the very `relu`, and
# by the number in `Config`:
#
#     torch.nn.functional.__dict__ has no key 'my_relu'
#     torch.nn.functional.__dict__ has no key '__getattr__'
#     torch.nn.functional.relu is the same object
#     Config is the same object
#     Config.scale == 2.0
#     Config.scale is a float
#
# The last line is of the search in the class: what lies there is data, so it was no descriptor that would have to be asked.

# %%
import enum
import types

from ..ch02_guards.identity import HEAP_TYPE
from ..ch02_guards.sources import AttrSource, FieldSource, InstanceDictSource, ItemSource, Source
from .descriptors import (
    bind_attribute, bind_to_class, data_of_class, in_python, is_library_class, is_property, no_attribute, part_of_class,
    written_in_class)
from .effects import changed
from .exceptions import user_error
from .hook import is_library_file
from .lookup import MISSING, lookup, python_method
from .tracer import answer, call, constant_source, guard, read_once, unsupported, written_global
from .values import DELETED, DictVal, Lazy, MethodName, NONE, const, describe
from .wrap import part, wrap


def python_module_attribute(tx, obj, name):
    real, at = obj.real, constant_source(tx, obj.real)
    if (written := written_global(tx, vars(real), name)) is not None:
        return written if written is not DELETED else no_module_attribute(real, name)
    if (fallback := asked_instead(real, name)) is not None:
        guard(tx, InstanceDictSource(at), "NO_KEY", name)
        return call(tx, wrap(tx, fallback, ItemSource(InstanceDictSource(at), "__getattr__")), [const(name)])
    return read_once(tx, real, name, lambda: find_module_attribute(tx, real, at, name))


def asked_instead(module, name):
    """The program's `__getattr__` of a module (PEP 562), if that is what `module.name` calls. What one of a library gives is read once."""
    found = vars(module).get("__getattr__")
    missing = type(module) is types.ModuleType and name not in vars(module) and not hasattr(types.ModuleType, name)
    return found if missing and isinstance(found, types.FunctionType) and not is_library_file(found.__code__.co_filename) else None


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
    called = vars(real).get("__name__")
    user_error(AttributeError, (f"module {called!r}" if isinstance(called, str) else "module") + f" has no attribute '{name}'")


# %% [markdown]
# For a class the rules are those of `type.__getattribute__`. `class_attribute` has the order: what the trace has written, facts that the
# object of a class holds itself (`class_fact`), what the metaclass has if the class has nothing, functions, descriptors, data.

# %%
C_DESCRIPTORS = (types.MethodDescriptorType, types.WrapperDescriptorType, types.MemberDescriptorType,
                 types.GetSetDescriptorType)


def class_attribute(tx, obj, name):
    cls, found = obj.real, lookup(obj.real, name)
    kind = type(found)
    if (written := written_in_class(tx, cls, name)) is not None:
        return written
    above = lookup(type(cls), name)
    made = name in ("__doc__", "__annotations__") and hasattr(kind, "__get__")         # by what lies in the class
    if isinstance(above, (types.GetSetDescriptorType, types.MemberDescriptorType)) and not made and hasattr(cls, name):
        return class_fact(tx, obj, name)
    if is_property(above) or python_method(type(above), "__get__") and python_method(type(above), "__set__"):
        return bind_attribute(tx, obj, name, above)                 # a data descriptor of the metaclass comes before the class
    if found is MISSING or isinstance(cls, enum.EnumMeta) and (isinstance(found, enum.Enum) or hasattr(kind, "__get__")):
        return metaclass_attribute(tx, obj, name)
    if getter := python_method(kind, "__get__"):
        return call(tx, wrap(tx, getter), [part_of_class(tx, cls, name, found), NONE, obj])
    if isinstance(found, (types.FunctionType, staticmethod, classmethod, property, *C_DESCRIPTORS)):
        return bind_to_class(tx, obj, found, cls, name)
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
    if in_python(found) or python_method(type(found), "__get__"):
        return bind_attribute(tx, obj, name, found)
    if not hasattr(cls, name):
        guard(tx, obj.source, "NO_ATTR", name)
        user_error(AttributeError, f"type object '{cls.__name__}' has no attribute '{name}'")
    plain = found is not MISSING and not hasattr(type(found), "__get__")
    plain = plain and not isinstance(cls, enum.EnumMeta)
    return part_of_class(tx, type(cls), name, found) if plain else wrap(tx, getattr(cls, name))


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
        if isinstance(real, types.FunctionType):
            guard(tx, part(InstanceDictSource, source), "NO_KEY", name)
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
