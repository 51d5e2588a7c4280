# %% [markdown]
# # Looking things up in classes
#
# What a value can do is decided by the class of the object it stands for. `lookup` reads a class without
# running anything: it ignores metaclasses and leaves descriptors as they are.
#
# A program may replace a method of a class between two calls, or give a class one that it did not have. So
# each search in a class that a `class` statement made is noted, with its answer, also when nothing was found;
# when the trace ends, `capture` turns each into a `CLASS_ATTR` guard. The guards cost little: they are looked
# at again only after some class has changed (`stable.py` in chapter 2).

# %%
import types
from dataclasses import dataclass, field

from ..ch02_guards.guards import MISSING, class_lookup  # noqa: F401 (MISSING is an answer of `lookup`)
from ..ch02_guards.identity import HEAP_TYPE


@dataclass(eq=False)
class Classes:
    """What a trace asks of classes. found: (class, name) -> what a search found; data: (class, name) of data that is guarded by itself,
    where it is read; told_apart: classes of objects that the program asked to tell apart: by `is`, `id`, or as keys; made: those
    that the trace has made."""
    found: dict = field(default_factory=dict)
    data: set = field(default_factory=set)
    told_apart: set = field(default_factory=set)
    made: set = field(default_factory=set)


captures: list = []                  # in progress


def lookup(cls: type, name: str):
    """The attribute as it lies in the dictionary of the first class that has it, or MISSING. `capture` guards
    the answer, which is that of the whole trace, unless the trace has made the class."""
    if not cls.__flags__ & HEAP_TYPE:
        return class_lookup(cls, name)
    known = captures[-1]
    if (cls, name) not in known.found or cls in known.made:
        known.found[cls, name] = class_lookup(cls, name)
    return known.found[cls, name]


def python_method(cls: type, name: str):
    """The method of a class if it is written in Python, so that it can be inlined; else None."""
    found = lookup(cls, name)
    return found if isinstance(found, types.FunctionType) else None


def says_its_class(cls: type) -> bool:
    """Whether the `__class__` of an object of this class is what a property, or another thing in the class, makes of it."""
    return class_lookup(cls, "__class__") is not vars(object)["__class__"]


def class_in_c(cls: type) -> type:
    """The class written in C that a class of the program is derived from, or the class itself."""
    return next(base for base in cls.__mro__ if not base.__flags__ & HEAP_TYPE)


def is_plain_tuple(cls: type) -> bool:
    """Whether tuples of this class are looked at as a `TupleVal` is: by no code of the program."""
    return cls is tuple or cls.__hash__ is not None and not any(python_method(cls, name) for name in TUPLE_METHODS)


TUPLE_METHODS = ("__len__", "__iter__", "__getitem__", "__bool__", "__reversed__", "__contains__", "__hash__", "__getattr__",
                 "__getattribute__", "__setattr__", "__call__", "__enter__", "__index__", "count", "index")


def native_new(cls: type):
    """The nearest `__new__` that is written in C: it makes an instance without any code of the program."""
    return next(new for base in cls.__mro__ if type(new := vars(base).get("__new__")) is types.BuiltinFunctionType)


def native(cls: type, name: str):
    """The nearest method of that name that is written in C."""
    return next(found for base in cls.__mro__ if type(found := vars(base).get(name)) in (types.WrapperDescriptorType,
                                                                                        types.MethodDescriptorType))
