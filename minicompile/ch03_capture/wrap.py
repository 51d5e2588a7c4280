# %% [markdown]
# # Wrapping: from an object of the program to a value
#
# Everything that enters a trace from outside, an argument, a global, an attribute of an argument, passes
# through `wrap`. It decides what kind of value stands for the object and which guard pins what is assumed
# about it:
#
# - a number, string or None becomes a constant, guarded by its value, once the program looks at it;
# - a tensor becomes a graph input, guarded by its metadata;
# - a container is guarded by its type and length (a list by its length only once somebody looks), its items
#   wait (`Lazy`) until they are read;
# - a function, class or Python module is guarded by identity;
# - any other object is guarded by its class; its attributes are guarded one by one when they are read.
#
# The same object met twice, by two paths, must be the same value: writing through one path is seen through
# the other. The table `tracked` finds it by identity, and a guard records that the two paths lead to one
# object.

# %%
import enum
import functools
import linecache
import types
import weakref

import numpy
import torch

from ..ch01_graphs.shapes import is_symbolic
from ..ch02_guards.guards import class_lookup
from ..ch02_guards.identity import is_a
from ..ch02_guards.sources import (
    AttrSource, CallSource, ConstantSource, Source)
from .inputs import varies, wrap_dynamic_number, wrap_tensor
from .lookup import lookup
from .tracer import Tracer, guard, location, unsupported
from .values import (
    AbstractValue, CONSTANT_TYPES, Const, DictVal, Lazy, ListVal, MethodName, NUMBERS, ObjVal, SINGLETONS, SetVal, SliceVal, Table,
    TupleVal, const, like, place_of_nan, unseen)

BY_IDENTITY = (type, types.ModuleType, types.BuiltinFunctionType, types.FunctionType,
               types.MethodDescriptorType,
               types.WrapperDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
               types.ClassMethodDescriptorType, types.MethodWrapperType, staticmethod, classmethod, property,
               functools._lru_cache_wrapper)


# %% [markdown]
# Step by step: a constant waits for somebody who looks at it (`wait`), unless earlier calls have seen it vary: then it becomes a symbol. An
# object that was met before has its value already; if it was found by another path this time, a guard says that
# both paths lead to one object (`ALIASED`), or, where objects are guarded by identity anyway, that this path leads
# to it, too. Everything else is new: `build` makes the value. `keep` holds the object until the trace is over,
# because `tracked` is a table by `id`, and the id of an object that dies is given to another one.

# %%
def wrap(tx: Tracer, real, source: Source | None = None) -> AbstractValue:
    """The value for a real object found at `source` (None: a constant of the trace, not guarded)."""
    kind = type(real)
    if type(kind) is not type or type in kind.__mro__:
        refuse_own_equality(tx, real, kind)
    if kind in CONSTANT_TYPES:
        if source is not None:
            if kind in NUMBERS and varies(tx, source):
                return wrap_dynamic_number(tx, real, source)
            if kind not in SINGLETONS and not isinstance(source, (ConstantSource, CallSource)):
                return wait(tx, real, source)
            guard(tx, source, "CONSTANT_MATCH", real)
        return const(real)
    known = tx.objects.tracked.get(id(real))
    if known is not None:
        if source is not None and is_fixed(real):
            guard_identity(tx, real, source)
        elif source != known.source:
            found = [s for s in (source, known.source) if s is not None and not isinstance(s, ConstantSource)]
            if len(found) == 2:
                guard(tx, source, "ALIASED", known.source)
            elif found and getattr(known, "real", None) is real:          # it is this very object, whatever else leads to it
                guard(tx, found[0], "ID_MATCH", real)
        return known
    value = build(tx, real, kind, source)
    tx.objects.tracked[id(real)] = value
    tx.objects.keep.append(real)
    return value


def refuse_own_equality(tx: Tracer, real, kind: type):
    """Classes are keys in tables of the trace. A metaclass with an `__eq__` makes them unhashable, or two of them one key."""
    for metaclass in (type(kind), kind, real) if issubclass(kind, type) else (type(kind),):
        if issubclass(metaclass, type) and (metaclass.__hash__ is not type.__hash__ or metaclass.__eq__ is not type.__eq__):
            unsupported(tx, "a metaclass that says which classes are equal")


def wait(tx: Tracer, real, source: Source) -> Const:
    """The constant found at `source`, which is guarded by value once somebody looks at that."""
    if tx.objects.unseen.setdefault(source, (type(real), location(tx))) is None:
        place = place_of_nan(real, source)
        return const(real) if place is None else Const(real, source=place)

    def look(trace=weakref.ref(tx)):                     # a trace that led back to itself would keep the program's objects for a while
        if (tx := trace()) is not None:
            tx.objects.unseen[source] = None
            guard(tx, source, "CONSTANT_MATCH", real)
        return real
    return unseen(type(real), look, source, hidden=real)


def guard_unseen(tx: Tracer):
    """The trace is over: of what nobody looked at the class is guarded."""
    for source, known in tx.objects.unseen.items():
        if known is not None:
            tx.guards.add(source, "TYPE_MATCH", *known)


# %% [markdown]
# Functions need care. A function at the top level of a file is one object as long as the program runs, so its
# identity is a good guard. A lambda or a closure is made anew each time its `def` is executed, and a guard on
# identity would fail at each call. Such a function is guarded by its code object, which is shared by all of them,
# and what it closes over is read through it and guarded by itself.

# %%
def is_made_per_call(function) -> bool:
    """Whether a function is likely made anew for each call, as closures and lambdas are. Then only its code
    can be guarded; its cells and defaults are read through it. The code says so: `functools.wraps` renames the function."""
    code = function.__code__
    return code.co_name == "<lambda>" or "<locals>" in code.co_qualname or bool(function.__closure__)


def is_fixed(real) -> bool:
    """Whether an object is guarded by its identity."""
    made = type(real) is types.FunctionType and is_made_per_call(real)
    return is_a(real, (*BY_IDENTITY, enum.Enum)) and not made


def part(step, source: Source | None, *args) -> Source | None:
    """The source of a part of what is found at `source`: `part(AttrSource, source, "x")`."""
    return None if source is None else step(source, *args)


def guard_identity(tx, real, source):
    guard(tx, source, "ID_MATCH" if is_fixed(real) else "FUNCTION_CODE", real)


def source_of_item(tx, item: Lazy) -> Source | None:
    if callable(item.source):
        item.source = item.source(tx)
    return item.source


def realize(tx, item) -> AbstractValue:
    """A Lazy item becomes a value now, and is guarded now."""
    if type(item) is not Lazy:
        return item
    if item.value is None:
        item.value = wrap(tx, item.real, source_of_item(tx, item))
    return item.value


# %% [markdown]
# Some functions are simply called at compile time, such as `math.sqrt(2)` or `torch.Size.numel`, and give a fresh
# object. It is a constant of the trace and cannot change, so nothing in it has a source or a guard.

# %%
def wrap_constant(tx, result) -> AbstractValue:
    """The value of a fresh object made of constants, such as the result of a call: containers are new and
    unguarded."""
    kind = type(result)
    if isinstance(result, tuple):
        return TupleVal(items=[wrap_constant(tx, r) for r in result], cls=kind)
    if kind is list:
        return ListVal(items=[wrap_constant(tx, r) for r in result])
    if kind is dict:
        return DictVal(items={k: (wrap_constant(tx, k), wrap_constant(tx, v)) for k, v in result.items()})
    if kind in (set, frozenset):
        content = result if kind is frozenset else like(result)
        if content is None:
            unsupported(tx, "a set whose copy would have another order")
        return SetVal(keys=kind(content), cls=kind)
    if kind is slice:
        return SliceVal(*(const(v) for v in (result.start, result.stop, result.step)))
    if isinstance(result, numpy.ndarray):
        unsupported(tx, "a NumPy array")
    if is_symbolic(result):
        unsupported(tx, "a symbolic number in an unexpected place")
    if kind is torch.SymBool:
        return const(bool(result))
    return wrap(tx, result)


# %% [markdown]
# ## The kinds
#
# The first match decides, and the order matters where classes overlap: an Enum member of an `IntEnum` is an
# int. Classes in `BUILDERS` are found along the method resolution order; a builder that answers None leaves
# the object to the general case, as for a list subclass, which is an object with a list inside (`contents_of`).

# %%
BUILDERS = Table()                   # class -> function(tx, real, kind, source) -> AbstractValue | None


# %% [markdown]
# A tensor is dealt with in `inputs.py`. A bound method that is written in C, `log.append` or `x.add` in a variable, is a new object
# each time it is read, and identity would make a version for each. So it is taken apart: the guards are on its type and name, and
# the object that it is bound to is wrapped by itself. The name is all that is kept of the method, so only one class of the object
# may have it: `dict.pop.__get__(d)` and `d.pop` are two methods of an `OrderedDict`, of one type and name.
#
# Classes, functions and the members of Enums are guarded by identity. Then come the builders, in `builders.py` and in the library. What
# none of them wants is an ordinary object, guarded by its class.

# %%
def is_bound(function) -> bool:
    """Whether a function of C is the only method of this name that an object, neither a class nor a module, has."""
    owner, name = function.__self__, function.__name__
    if owner is None or isinstance(owner, (type, types.ModuleType)) or name == "__get__":
        return False
    return sum(name in vars(cls) for cls in type(owner).__mro__) == 1 and \
        isinstance(lookup(type(owner), name), (types.MethodDescriptorType, types.WrapperDescriptorType))


def build(tx, real, kind, source) -> AbstractValue:
    if kind in weakref.ProxyTypes:
        unsupported(tx, "a weak proxy, which speaks for an object that may be dead")
    if real is linecache.cache:
        unsupported(tx, "the lines that linecache keeps, to which compiling adds some")
    if issubclass(kind, super):
        unsupported(tx, "a super object, whose attributes are not those of its class")
    if is_a(real, torch.Tensor):
        return wrap_tensor(tx, real, source)
    if kind in (types.BuiltinFunctionType, types.MethodWrapperType) and is_bound(real):
        guard(tx, source, "TYPE_MATCH", kind)
        guard(tx, part(AttrSource, source, "__name__"), "CONSTANT_MATCH", real.__name__)
        return MethodName(self=wrap(tx, real.__self__, part(AttrSource, source, "__self__")),
                          name=real.__name__, source=source)
    if is_a(real, (*BY_IDENTITY, enum.Enum)):
        guard_identity(tx, real, source)
    else:
        builder = next((BUILDERS[c] for c in kind.__mro__ if c in BUILDERS), None)
        value = builder(tx, real, kind, source) if builder is not None else None
        if value is not None:
            return value
        if type(class_lookup(kind, "__dict__")) not in (types.GetSetDescriptorType, types.MemberDescriptorType, object):
            unsupported(tx, f"a {kind.__qualname__} object, whose class has a __dict__ of its own")
        guard(tx, source, "TYPE_MATCH", kind)
    return ObjVal(real=real, cls=kind, source=source)
