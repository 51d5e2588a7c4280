# %% [markdown]
# # Whom an entry keeps alive
#
# Most objects must not be kept alive by a cache entry: a compiled function that pins the user's model leaks
# gigabytes. So an object is remembered by a weak reference. Comparing `id(x)` with a remembered number would
# cost the same and be wrong: once the object is gone, a new one can get its address. Classes, modules and
# builtin functions of libraries live long anyway and are held directly. Those of the program are not: a
# class leads to its methods, a method to its globals, these to everything, and an entry is attached to a code
# object, where the garbage collector does not see it. The same goes for functions and for code.
#
# How some objects are remembered:
#
#     torch.float32                      itself
#     torch.nn.Linear                    itself
#     math.sqrt                          itself
#     a class of the program             by a weak reference
#     a function of the program          by a weak reference
#     a module, torch.nn.Linear(2, 2)    by a weak reference
#     a list                             itself: there are no weak references to it

# %%
import enum
import functools
import sys
import types
import weakref
from typing import Any, NamedTuple

import torch

LIBRARIES = frozenset((*sys.stdlib_module_names, "torch", "numpy", "minicompile")) - {"__main__"}
HEAP_TYPE = 1 << 9


def is_a(thing, classes) -> bool:
    """`isinstance` of what the program may have made: that would ask the object for its `__class__`, which may be code, and another one."""
    return issubclass(type(thing), classes)


def is_long_lived(thing) -> bool:
    """Whether an entry may hold `thing` directly."""
    if is_a(thing, (torch.dtype, torch.device, weakref.ref, type(None))):
        return True
    if is_a(thing, type):
        return not thing.__flags__ & HEAP_TYPE or is_of_library(thing, *full_name(thing))
    if is_a(thing, types.ModuleType):
        return is_of_library(thing, module_name(vars(thing)))
    if is_a(thing, types.BuiltinFunctionType):
        return thing.__self__ is None or isinstance(thing.__self__, (type, types.ModuleType)) \
            and is_long_lived(thing.__self__)
    return False


def full_name(cls: type) -> tuple[str, str]:
    """Module and qualified name: what a class has in common with those that the same statement makes."""
    return module_name(cls), cls.__qualname__


def module_name(thing) -> str:
    """The module of which a class, a function or a namespace says that it is; "" if none, since programs write and delete these names. What
    `functools.wraps` has written into a function of the program is no answer: that is of the module whose globals it has."""
    if type(thing) is types.FunctionType and (own := module_name(thing.__globals__)).partition(".")[0] not in LIBRARIES:
        return own
    if type(thing) is dict:
        name = thing.get("__name__")
    else:
        name = getattr(thing, "__module__", None) if not is_a(thing, type) else \
            vars(thing).get("__module__") if thing.__flags__ & HEAP_TYPE else thing.__module__
    return name if isinstance(name, str) else ""


def is_of_library(thing, module: str, name: str = "") -> bool:
    """Whether `thing` is what a library has under this name."""
    if module.partition(".")[0] not in LIBRARIES:
        return False
    found = sys.modules.get(module)
    for part in name.split(".") if name else ():
        found = getattr(found, part, None)
    return found is thing


def weakly(expected):
    """A weak reference to what a cache entry must not keep alive; long-lived objects as they are."""
    if is_long_lived(expected):
        return expected
    try:
        return weakref.ref(expected)
    except TypeError:                          # no weak references to this type: hold it
        return expected


def strongly(expected):
    """The object behind what `weakly` returned; None when it is gone."""
    return expected() if isinstance(expected, weakref.ref) else expected


def identified(expected):
    """The objects, alive, that what a guard expects refers to weakly."""
    if isinstance(expected, weakref.ref):
        if (target := expected()) is not None:
            yield target
    elif isinstance(expected, tuple):
        for part in expected:
            yield from identified(part)


# %% [markdown]
# Two refinements. What lies in a class may be a `property`, a `staticmethod`, a slot or its `__dict__`, to which there are no
# weak references; it is recognised by what it is made of. And an entry owns the constants that its text cannot
# spell. Many are made by the trace and belong to nobody else, so only those are held weakly that the program
# must own somewhere: classes, functions, modules, code.

# %%
PARTS = {property: ("fget", "fset", "fdel"), staticmethod: ("__func__",), classmethod: ("__func__",),
         types.MemberDescriptorType: ("__objclass__", "__name__"), types.GetSetDescriptorType: ("__objclass__", "__name__")}


class Made(NamedTuple):
    """What a descriptor was made of, or anything of a type, which has no parts."""
    type: Any
    parts: tuple = ()

    def is_of(self, found) -> bool:
        return type(found) is strongly(self.type) and all(
            getattr(found, name) is strongly(part) for name, part in zip(PARTS.get(type(found), ()), self.parts))


def any_of(kind: type) -> Made:
    return Made(weakly(kind))


def weakly_found(found):
    """`weakly` for what lies in the dictionary of a class."""
    names = PARTS.get(type(found))
    return weakly(found) if names is None else Made(type(found), tuple(weakly(getattr(found, n)) for n in names))


def is_found(found, expected) -> bool:
    """Whether `found` is what `weakly_found` was given."""
    return expected.is_of(found) if type(expected) is Made else found is strongly(expected)


OWNED = (type, types.FunctionType, functools._lru_cache_wrapper, types.ModuleType, types.CodeType, enum.Enum,
         torch.nn.Module)


def held(constant):
    """A constant as an entry holds it: a weak reference, or itself."""
    if not is_a(constant, OWNED) or is_a(constant, types.FunctionType) and is_of_library(
            constant, module_name(constant), constant.__qualname__):
        return constant
    return weakly(constant)
