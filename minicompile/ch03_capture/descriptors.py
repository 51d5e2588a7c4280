# %% [markdown]
# # What lies in a class
#
# A class is a dictionary, and what lies in it is rarely what an attribute gives. A function comes as a method that remembers
# its object, a property is called, a `staticmethod` is unwrapped, and a number comes as it is. What decides is the *descriptor
# protocol*: if the class of the thing that was found has a `__get__`, that is asked, and its answer is the attribute. With a `__set__` as
# well, the thing is a *data descriptor*, which comes before what the object itself holds.
#
#     class Layer:
#         factor = 2.0
#
#         def double(self):
#             return self.factor * 2
#
#         @property
#         def half(self):
#             return self.factor / 2
#
#         @classmethod
#         def made(cls):
#             return cls()
#
#         @staticmethod
#         def root(x):
#             return x.sqrt()
#
# `bind_attribute` does this for the kinds that Python itself has, without running code of the program. For an object of this class, what
# lies in the class under each name, and the value that stands for the attribute:
#
#     factor  float         a float
#     double  function      method Layer.double
#     half    property      float 1.0
#     made    classmethod   method Layer.made
#     root    staticmethod  Layer.root
#
# The number of `half` comes from its getter, which was traced like any other function of the program. At `factor` itself nobody has
# looked, so it is known as some float, and its number is guarded once somebody does.

# %%
import functools
import sys
import types

from ..ch02_guards.identity import HEAP_TYPE, module_name
from ..ch02_guards.sources import ClassAttrSource, ConstantSource, HiddenDictSource, InstanceDictSource, ItemSource, Source
from .effects import changed
from .exceptions import user_error
from .lookup import MISSING, lookup, python_method
from .tracer import PYTHON, call, constant_source, guard, unsupported
from .values import AbstractValue, CONSTANT_TYPES, MethodVal, NONE, NUMBERS, const, describe
from .wrap import part, wrap


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
    if issubclass(kind, staticmethod) and kind.__get__ is staticmethod.__get__:
        return wrap(tx, found.__func__)
    if issubclass(kind, classmethod) and kind.__get__ is classmethod.__get__:
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


# %% [markdown]
# A descriptor that the program has written is called like any function of the program. One that others wrote in C is asked, as long as
# the trace has not changed what it might look at.
#
# What is left is data. Data of the program's own classes may be rebound between calls, so it gets a source and with it a guard. Of
# classes of torch and the standard library it is enough that the same object still lies there, which the search has noted (`lookup.py`).

# %%
LIBRARY_PACKAGES = ("torch", "builtins", "collections", "typing", "enum", "functools")


def is_library_class(cls) -> bool:
    return module_name(cls).split(".")[0] in LIBRARY_PACKAGES


def in_library(module) -> bool:
    """Whether a Python module without a file is one of torch or of Python."""
    root = module_name(vars(module)).split(".")[0]
    return root in LIBRARY_PACKAGES or root in sys.stdlib_module_names


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


# %% [markdown]
# An attribute that is asked of the class itself comes without an object. A function comes as it is, and a classmethod is bound to the
# class.

# %%
def bind_to_class(tx, obj, found, cls, name):
    """What the class `obj` has in `found`, which a search from `cls` finds by this name."""
    if isinstance(found, classmethod):
        return MethodVal(func=wrap(tx, found.__func__), self=obj)
    value = wrap(tx, found.__func__ if isinstance(found, staticmethod) else found)
    if type(found) is property and value.source is None:             # `lookup` has guarded it, but not its text
        value.source = ClassAttrSource(constant_source(tx, cls), name)
    return value


def in_python(found) -> bool:
    """Whether an attribute of a class is a method or a property written in Python."""
    return isinstance(found.fget if is_property(found) else found, types.FunctionType)


# %% [markdown]
# Capture knows many classes of libraries by heart: a handler says what a call of them gives (`calls.py`). A program may put a method of
# its own into such a class, and then the handler no longer speaks for it.

# %%
ORIGINAL_METHODS: dict = {}          # (class with a handler, name of a method) -> what it was when all handlers were there (`capture.py`)
DECISIVE = ("__new__", "__init__", "__call__", "__enter__", "__exit__")


def is_patched(cls) -> bool:
    """Whether the program has put something of its own into a class with a handler: what that knows may be true no more."""
    return any((cls, name) in ORIGINAL_METHODS and lookup(cls, name) is not ORIGINAL_METHODS[cls, name] for name in DECISIVE)


# %% [markdown]
# The trace may have written to a class: `cls.calls += 1`. The class has an attribute then that lies in front of it, as attributes of
# objects do, and what finds data, in an object of the class or of a derived one, asks `written_in_class` first. Which of the
# classes has the name is then a guard: a write to one of them is no write to the others.
#
# And each search that ends in the class is an assumption about the object: that it has nothing of its own by this name. `guard_bare`
# keeps it as a guard. `own_fields` reads the dictionary of a real object past a `__getattribute__` of the program's.

# %%
def written_in_class(tx, cls, name: str) -> AbstractValue | None:
    """What the trace has written to the attribute that is found in `cls` by this name."""
    written = {base: value for base in cls.__mro__ if (value := changed(tx, base)) is not None and name in value.attrs} \
        if tx.effects.changed else {}
    for base in cls.__mro__ if written else ():
        if base in written:
            tx.classes.data.add((cls, name))
            return written[base].attrs[name]
        own = vars(base).get(name, MISSING)
        if base.__flags__ & HEAP_TYPE and base not in tx.classes.made:
            fields = InstanceDictSource(constant_source(tx, base))
            guard(tx, fields, "NO_KEY", name) if own is MISSING else guard(tx, ItemSource(fields, name), "TYPE_MATCH", type(own))
        if own is not MISSING:
            return None


def own_fields(real) -> dict | None:
    """The `__dict__` of an object."""
    read = type(real).__getattribute__
    try:
        return (object.__getattribute__ if type(read) is types.FunctionType else read)(real, "__dict__")
    except AttributeError:
        return None


def fields_at(obj) -> Source | None:
    """Where an entry finds `own_fields(obj.real)`."""
    hidden = type(type(obj.real).__getattribute__) is types.FunctionType
    return part(HiddenDictSource if hidden else InstanceDictSource, obj.source)


def guard_bare(tx, obj, name):
    """The object has no attribute `name` of its own, in front of what its class has, unless the trace has deleted it."""
    if own_fields(obj.real) is not None and name not in obj.attrs:
        guard(tx, fields_at(obj), "NO_KEY", name)


# %% [markdown]
# An attribute that is missing is an ordinary event: programs ask `hasattr(self, "cache")`, or catch the AttributeError, and may print
# it. So it is raised in the traced program, by `user_error`, in the words that this version of Python has for the case.

# %%
SLOTS_ONLY = " and no __dict__ for setting new attributes" if PYTHON >= (3, 13) else ""


def no_attribute(value_cls, name, more=None):
    """more: words that follow when the attribute cannot be written; before 3.13 that error has no `name`."""
    named = const(name) if PYTHON >= (3, 13) else NONE
    own = value_cls.__flags__ & HEAP_TYPE or module_name(value_cls) == "builtins"         # of others C knows the full name only
    called = value_cls.__name__ if own else f"{module_name(value_cls)}.{value_cls.__name__}"
    user_error(AttributeError, f"'{called}' object has no attribute '{name}'{more or ''}",
               **({} if more is None else {"name": named}))


def no_accessor(cls, name, kind):
    user_error(AttributeError, f"property {name!r} of {cls.__qualname__!r} object has no {kind}er")
