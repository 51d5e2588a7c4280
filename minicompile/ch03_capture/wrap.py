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
import collections
import enum
import functools
import gc
import operator
import types
import weakref

import numpy
import torch

from ..ch01_graphs.shapes import is_symbolic
from ..ch02_guards.sources import (
    AttrSource, CallSource, ConstantSource, DictGetSource, InstanceDictSource, ItemSource, ListItemSource, ModuleAttrSource,
    NthSource, Source, TupleItemSource)
from ..ch02_guards.torch_guards import CHILD_DICTS
from .effects import kept_warnings
from .exceptions import user_error
from .inputs import varies, wrap_dynamic_number, wrap_tensor
from .lookup import captures, is_plain_tuple, lookup, native_new, python_method
from .tracer import Tracer, call, constant_source, guard, location, unsupported
from .values import (
    AbstractValue, ByIdentity, ByValue, CONSTANT_TYPES, CellVal, Const, DictVal, ExcVal, FuncVal, Identity, Lazy, ListVal,
    MethodName, MethodVal, NUMBERS, NotConstant, ObjVal, PartialVal, SINGLETONS, SetVal, SliceVal, SymVal, Table, TensorVal,
    TupleVal, const, describe, is_unseen, like, unseen)

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


def wait(tx: Tracer, real, source: Source) -> Const:
    """The constant found at `source`, which is guarded by value once somebody looks at that."""
    if tx.objects.unseen.setdefault(source, (type(real), location(tx))) is None:
        return const(real)

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
    return isinstance(real, (*BY_IDENTITY, enum.Enum)) and not made


def part(step, source: Source | None, *args) -> Source | None:
    """The source of a part of what is found at `source`: `part(AttrSource, source, "x")`."""
    return None if source is None else step(source, *args)


def guard_identity(tx, real, source):
    guard(tx, source, "ID_MATCH" if is_fixed(real) else "FUNCTION_CODE", real)


def realize(tx, item) -> AbstractValue:
    """A Lazy item becomes a value now, and is guarded now."""
    if type(item) is not Lazy:
        return item
    if item.value is None:
        item.value = wrap(tx, item.real, item.source)
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
# the object to the general case, as for a list subclass with methods of its own.

# %%
BUILDERS = Table()                   # class -> function(tx, real, kind, source) -> AbstractValue | None


# %% [markdown]
# A tensor is dealt with in `inputs.py`. A bound method that is written in C, `log.append` or `x.add` in a variable, is a new object
# each time it is read, and identity would make a version for each. So it is taken apart: the guards are on its type and name, and
# the object that it is bound to is wrapped by itself. The name is all that is kept of the method, so only one class of the object
# may have it: `dict.pop.__get__(d)` and `d.pop` are two methods of an `OrderedDict`, of one type and name.
#
# Classes, functions and the members of Enums are guarded by identity. Then come the builders, below and in the library. What none of
# them wants is an ordinary object, guarded by its class.

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
    if issubclass(kind, super):
        unsupported(tx, "a super object, whose attributes are not those of its class")
    if isinstance(real, torch.Tensor):
        return wrap_tensor(tx, real, source)
    if kind in (types.BuiltinFunctionType, types.MethodWrapperType) and is_bound(real):
        guard(tx, source, "TYPE_MATCH", kind)
        guard(tx, part(AttrSource, source, "__name__"), "CONSTANT_MATCH", real.__name__)
        return MethodName(self=wrap(tx, real.__self__, part(AttrSource, source, "__self__")),
                          name=real.__name__)
    if isinstance(real, (*BY_IDENTITY, enum.Enum)):
        guard_identity(tx, real, source)
    else:
        builder = next((BUILDERS[c] for c in kind.__mro__ if c in BUILDERS), None)
        value = builder(tx, real, kind, source) if builder is not None else None
        if value is not None:
            return value
        guard(tx, source, "TYPE_MATCH", kind)
    return ObjVal(real=real, cls=kind, source=source)


# %% [markdown]
# Containers come first. Their items are not wrapped. They wait in a `Lazy`, which has the real item and its
# source, until somebody reads them (`realize`), because a guard should exist only for what the program has looked
# at. A tuple cannot change its length, so it is guarded at once. For a list the length is guarded when it is asked
# for (`guard_keys` below): a program that appends to a long list of losses does not depend on how long it is.

# %%
@BUILDERS.of(tuple)
def wrap_tuple(tx, real, kind, source):
    if not is_plain_tuple(kind):
        return None
    guard(tx, source, "TYPE_MATCH", kind)
    guard(tx, source, "TUPLE_LENGTH", len(real))
    return TupleVal(items=lazy_items(real, source, TupleItemSource), cls=kind, real=real, source=source)


@BUILDERS.of(list, collections.deque)
def wrap_list(tx, real, kind, source):
    if kind not in (list, collections.deque):
        return None
    if tx.effects.calls and real is kept_warnings():
        unsupported(tx, "reading the list of warnings after one that is given when the graph has run")
    guard(tx, source, "TYPE_MATCH", kind)
    items = lazy_items(real, source, ListItemSource if kind is list else ItemSource)
    if kind is list:
        return ListVal(items=items, real=real, source=source)
    guard(tx, part(AttrSource, source, "maxlen"), "CONSTANT_MATCH", real.maxlen)
    return ListVal(items=collections.deque(items, real.maxlen), cls=kind, real=real, source=source)


def lazy_items(real, source, step) -> list:
    return [Lazy(item, part(step, source, i)) for i, item in enumerate(real)]


# %% [markdown]
# A dictionary is the same with keys. `owner` is a case of its own: the dictionaries `_parameters`, `_buffers` and
# `_modules` of a module, whose keys the module's own guard covers, and whose items have a shorter way to be read. Hooks
# of modules and tensors are found by their order (*Hooks*, below).

# %%
def key_source(tx, key):
    """How the text of a subscript names a key: itself when its repr reads back, else the constant pool."""
    plain = type(key) in (str, int, bool, type(None)) or type(key) is tuple and all(
        type(k) in (str, int, bool) for k in key)
    return key if plain else constant_source(tx, key)


DICT_CLASSES = (dict, collections.OrderedDict, collections.defaultdict)
HOOK_ENDINGS = "_hooks", "_hooks_with_kwargs", "_hooks_always_called"           # how the names of dictionaries of hooks end


def is_of_hooks(real, source) -> bool:
    named = type(real) in DICT_CLASSES and source is not None and source.name().endswith(HOOK_ENDINGS)
    return named and bool(real) and all(type(key) is int for key in real)


def may_change(key) -> bool:
    """Whether a key is an object in which the program may write."""
    return type(key) not in CONSTANT_TYPES and not isinstance(key, (torch.Tensor, tuple, frozenset)) and not is_fixed(key)


@BUILDERS.of(dict)
def wrap_dict(tx, real, kind, source):
    if kind not in DICT_CLASSES:
        return None
    value = DictVal(cls=kind, real=real, source=source)
    owner = None
    in_module = isinstance(source, ItemSource) and isinstance(source.base, InstanceDictSource)
    if in_module and source.key in CHILD_DICTS:
        owner, value.keys_guarded = source.base.base, True       # MODULE_STRUCTURE has guarded the keys
    else:
        guard(tx, source, "TYPE_MATCH", type(real))
    ordered = collections.OrderedDict if isinstance(real, collections.OrderedDict) else dict
    value.of_hooks = is_of_hooks(real, source)
    for i, (key, item) in enumerate(ordered.items(real)):
        if owner is not None:
            at = ModuleAttrSource(owner, source.key, key)
        else:
            at = NthSource(source, "values", i) if value.of_hooks else part(DictGetSource, source, key_source(tx, key))
        read = value.of_hooks or source is not None and type(real) in DICT_CLASSES and may_change(key)
        from_key = NthSource(source, "keys", i) if read else None
        value.items[key_of_real(tx, key, from_key)] = Lazy(key, from_key), Lazy(item, at)
    if kind is collections.defaultdict and real.default_factory is not None:
        value.factory = Lazy(real.default_factory, part(AttrSource, source, "default_factory"))
    return value


def dict_contents(tx, obj: ObjVal) -> DictVal | None:
    """The dictionary part of an object whose class derives from dict, or the list of one that the trace has made of a class derived from
    list; None for other objects."""
    if obj.contents is None and issubclass(obj.cls, dict):
        base = next(c for c in obj.cls.__mro__ if c in DICT_CLASSES)
        if obj.real is None or base is collections.defaultdict:
            return None
        obj.contents = wrap_dict(tx, obj.real, base, obj.source)
    return obj.contents


# %% [markdown]
# A set is guarded as a whole, by value, so it may only contain constants and classes. Its *order* is not part of
# its value: two equal sets may give their items in different orders. A program that iterates over one depends on
# it, and then `order_of` guards the text of its `repr`, in which the order is visible.

# %%
@BUILDERS.of(set, frozenset)
def wrap_set(tx, real, kind, source):
    if kind not in (set, frozenset) or not all(
            type(item) in CONSTANT_TYPES or isinstance(item, type) for item in real):
        return None
    guard(tx, source, "CONSTANT_MATCH", kind(real))
    return SetVal(keys=real, cls=kind, real=real, source=source)


def order_of(tx, value: SetVal) -> set:
    """The keys in the order in which a set gives them. Equal sets may differ in that, which is guarded when
    somebody asks."""
    if value.real is not None and value.source is not None:
        guard(tx, CallSource(value.source, "__repr__"), "CONSTANT_MATCH", repr(value.real))
    return value.keys

# %% [markdown]
# Methods, partials, slices and cells are small objects made of parts. Each is guarded by its type, and its
# parts are wrapped in turn, with sources that say how to reach them: the `__func__` of the method, the
# `start` of the slice.
#
# For example, a bound method that a program keeps in a variable is guarded by its type, by the code of its
# function, and, as far as the program reads it, by its object.

# %%
def wrap_parts(tx, real, source, *names) -> list[AbstractValue]:
    """The attributes that an object of this class is made of."""
    guard(tx, source, "TYPE_MATCH", type(real))
    return [wrap(tx, getattr(real, n), part(AttrSource, source, n)) for n in names]


BUILDERS.update({
    types.MethodType: lambda tx, real, kind, source: MethodVal(*wrap_parts(tx, real, source, "__func__", "__self__"), source=source),
    slice: lambda tx, real, kind, source: SliceVal(*wrap_parts(tx, real, source, "start", "stop", "step"), source=source),
})


@BUILDERS.of(types.MappingProxyType)
def wrap_read_only(tx, real, kind, source):
    """A read-only view has the items of the dictionary that it shows, which others may write to. Of a constant of the trace it is one."""
    if source is None:
        return wrap_dict(tx, dict(real), dict, None)
    shown, = gc.get_referents(real)
    if type(shown) not in DICT_CLASSES:
        return None
    guard(tx, source, "TYPE_MATCH", kind)
    mapping = wrap(tx, shown, ItemSource(CallSource(constant_source(tx, gc), "get_referents", (source,)), 0))
    guard_keys(tx, mapping)
    return DictVal(items=mapping.items, cls=kind, real=real, source=source, keys_guarded=True)


@BUILDERS.of(functools.partial)
def wrap_partial(tx, real, kind, source):
    func, args, keywords = wrap_parts(tx, real, source, "func", "args", "keywords")
    named = entries(tx, keywords)
    fields = part(InstanceDictSource, source)
    guard(tx, fields, "DICT_KEYS", tuple(vars(real)))
    attrs = {k: Lazy(v, part(ItemSource, fields, k)) for k, v in vars(real).items()}
    return PartialVal(func=func, args=[realize(tx, a) for a in args.items], attrs=attrs, source=source,
                      kwargs={k: realize(tx, v) for k, (_, v) in named.items()})


@BUILDERS.of(types.CellType)
def wrap_cell(tx, real, kind, source):
    try:
        content = Lazy(real.cell_contents, part(AttrSource, source, "cell_contents"))
    except ValueError:                           # an empty cell
        content = None
    return CellVal(content=content, real=real, source=source)


# %% [markdown]
# The way back: what is made of constants, or of values that are, is a Python object again, for a function that is
# called at compile time.
#
# `NotConstant` says that a tensor, a symbol without a value, or an object of the program is in it. Who knows what to put in the place
# of some values gives a function `instead`.

# %%
def as_python(tx: Tracer, value: AbstractValue, instead=lambda value: None):
    """The Python object that a value made of constants stands for; raises NotConstant. instead: value -> an object for it, or None; not
    in sets, whose order depends on the objects."""
    kind = type(value)
    if (other := instead(value)) is not None:
        return other
    if kind in (Const, SymVal):
        if kind is Const and type(value.value) is Identity:
            raise NotConstant
        return value.value
    if kind in (TupleVal, ListVal):
        items = [as_python(tx, realize(tx, item), instead) for item in entries(tx, value)]
        if kind is ListVal:
            return items if value.cls is list else value.cls(items, value.items.maxlen)
        return native_new(value.cls)(value.cls, items)
    if kind is SetVal:
        if all(map(is_plain_key, value.keys)):
            content = like(order_of(tx, value))
            if content is None:
                raise NotConstant
            return value.cls(content)
        return value.cls([as_python(tx, value_of_key(tx, key)) for key in value.keys])
    if kind is DictVal:
        if value.cls not in (dict, collections.OrderedDict):
            raise NotConstant
        return value.cls([tuple(as_python(tx, realize(tx, v), instead) for v in entry) for entry in entries(tx, value).values()])
    if kind is ExcVal and not python_method(value.cls, "__init__"):
        args = [as_python(tx, a, instead) for a in value.args]
        exc = value.cls.__new__(value.cls, *args)
        value.cls.__init__(exc, *args)
        return exc
    if kind is SliceVal:
        return slice(*(as_python(tx, v) for v in (value.start, value.stop, value.step)))
    if kind is ObjVal and value.real is not None and not value.attrs and (
            isinstance(value.real, GIVEN_AS_THEY_ARE)
            or value.source is None and type(value.real).__module__ == "typing"):
        return value.real
    raise NotConstant


GIVEN_AS_THEY_ARE = (type, types.BuiltinFunctionType, types.ModuleType, torch.finfo, torch.iinfo, numpy.finfo, numpy.iinfo,
                      types.GenericAlias, types.UnionType, enum.Enum, torch.torch_version.TorchVersion)


# %% [markdown]
# ## Keys
#
# The items of a traced dict are found by *real* Python keys, so the trace's dictionary is itself a Python
# dictionary. Constants are their own keys. Objects that hash by identity are keyed by it.

# %%
def key_of_real(tx, key, source=None):
    if type(key) in CONSTANT_TYPES or isinstance(key, (type, enum.Enum, types.FunctionType, types.BuiltinFunctionType)) and is_fixed(key):
        return key
    if type(key) is tuple:
        return tuple(key_of_real(tx, k) for k in key)
    if isinstance(key, torch.Tensor) or hashes_by_identity(type(key)):
        return ByIdentity(key, id(key))
    if python_method(type(key), "__hash__"):
        return value_key(tx, wrap(tx, key, source))
    unsupported(tx, f"a dictionary key of type {type(key).__qualname__}")


# %% [markdown]
# The rest are keys that are not that simple. An object with a `__hash__` and an `__eq__` of its own is a key whose
# hash must be computed by the program's code, so `value_key` asks it, by tracing the call. `key_of` gives the key
# of a value of the trace, for a subscript such as `d[k]`. Here constants, tuples and real objects are their own
# keys, and what the trace has made itself is a key by identity. `value_of_key` is the way back: a key knows its value, or `wrap`
# finds it (`stand_for`).

# %%
def hashes_by_identity(cls) -> bool:
    return lookup(cls, "__hash__") is object.__hash__


def value_key(tx, value) -> ByValue:
    """The key for an object with a hash and an equality of its own, which are asked as a program would."""
    def ask(function, *args):
        return call(tx, wrap(tx, function), args)

    def equal(value, key):
        other = value_of_key(tx, key)
        return value is other or ask(bool, ask(operator.eq, value, other)).value
    return ByValue(value, ask(hash, value).value, equal)


def value_of_key(tx, key) -> AbstractValue:
    """The value that has this key."""
    real = key.value if type(key) in (ByIdentity, ByValue) else key
    if isinstance(real, AbstractValue):
        return real
    if type(real) is tuple and id(real) not in tx.objects.tracked:
        return TupleVal(items=[value_of_key(tx, part) for part in real])
    if type(real) is frozenset and id(real) not in tx.objects.tracked:
        return SetVal(keys=real, cls=frozenset)
    return const(real) if type(real) is Identity else wrap(tx, real)


def stand_for(tx, real, value: AbstractValue):
    """An object that the trace has made, for which `wrap` gives this value back."""
    tx.objects.tracked[id(real)] = value
    tx.objects.keep.append(real)
    return real


def is_plain_key(key) -> bool:
    """Whether a key is a constant, or a tuple of such."""
    return type(key) in CONSTANT_TYPES or type(key) is tuple and all(map(is_plain_key, key))


def key_of(tx, value: AbstractValue, among=()):
    """The Python key under which `value` is found in a DictVal or SetVal. among: the keys that it may be
    equal to. Numbers there might have come from id(), too."""
    if type(value) in (Const, SymVal):
        if type(value.value) is Identity and any(type(key) is int for key in among):
            unsupported(tx, "the id() of an object looked up among numbers")
        return value.value
    if type(value) is TupleVal:
        inside = [part for key in among if isinstance(key, tuple) for part in key]
        parts = [key_of(tx, realize(tx, item), inside) for item in value.items]
        return stand_for(tx, native_new(value.cls)(value.cls, parts), value) if parts else ()
    if type(value) in (ObjVal, TensorVal) and value.real is not None:
        captures[-1].told_apart.add(value.cls)
        return key_of_real(tx, value.real)
    if type(value) is SetVal and value.cls is frozenset:
        return stand_for(tx, frozenset(value.keys), value)
    if type(value) in (TensorVal, FuncVal) or type(value) is ObjVal and hashes_by_identity(value.cls):
        return ByIdentity(value, id(value))
    if type(value) is ObjVal and python_method(value.cls, "__hash__"):
        return value_key(tx, value)
    refuse_unhashable(value)
    unsupported(tx, f"{describe(value)} as a dictionary key")


def refuse_unhashable(value):
    if value.cls.__hash__ is None:
        user_error(TypeError, f"unhashable type: '{value.cls.__name__}'")


# %% [markdown]
# The last functions guard what a program has learned about the keys. `guard_keys` is for somebody who looked at
# all of them: the length of a list, the keys of a dictionary in order. `guard_missing` is for somebody who found
# nothing: the dictionary may change as it likes, as long as this one key stays away.
#
# `key_in` is the look-up. A key that is compared by identity raises a question for later calls in both outcomes. Found: the
# object that is looked for must be that very object again. Not found: it must be none of the objects in the keys. Objects to
# which a source leads are guarded when they are wrapped; for the others the guard names them as constants.

# %%
def key_in(tx, dictionary: DictVal, value: AbstractValue):
    """The key under which `value` is in the dictionary, or would be. An object in it that is found is guarded to be that very
    object (`wrap` does that), one that is not found to be none of those in keys that nothing else leads to."""
    if dictionary.of_hooks:
        guard_keys(tx, dictionary)
    key = key_of(tx, value, dictionary.items)
    if isinstance(key, (ByIdentity, tuple)) and key in dictionary.items:
        key_of(tx, realize(tx, dictionary.items[key][0]))
    elif objects := objects_in_key(key):
        known = {id(o): constant_source(tx, o) for o in objects_in_key(tuple(dictionary.items)) if source_of_object(tx, o) is None}
        for o in objects if known else ():
            guard(tx, source_of_object(tx, o), "NOT_ALIASED", tuple(known.values()))
    return key


def objects_in_key(key) -> list:
    """The real objects in a key that are told apart by identity."""
    if isinstance(key, tuple):
        return [o for part in key for o in objects_in_key(part)]
    return [key.value] if type(key) is ByIdentity and not isinstance(key.value, AbstractValue) else []


def source_of_object(tx, real) -> Source | None:
    return tx.objects.tracked[id(real)].source if id(real) in tx.objects.tracked else None


def guard_keys(tx, value: ListVal | DictVal):
    """The program depends on how many items of a list there are, or which keys of a dictionary, in which order."""
    if not value.keys_guarded and value.real is not None and value.source is not None:
        value.keys_guarded = True
        if type(value) is ListVal:
            guard(tx, value.source, "LENGTH" if value.cls is list else "DEQUE_LENGTH", len(value.real))
        else:
            keys = tuple(value.cls.keys(value.real))
            if type(value.real) is value.cls:
                guard(tx, value.source, "DICT_KEYS" if issubclass(value.cls, dict) and value.cls is not collections.OrderedDict
                      else "ORDERED_KEYS", keys)
            else:
                guard(tx, value.source, "BASE_KEYS", (value.cls, keys))


def entries(tx, value: AbstractValue):
    """The items of a tuple, a list or a dictionary, for a program that may look at all of them."""
    if type(value) is not TupleVal:
        guard_keys(tx, value)
    return value.items


def guard_missing(tx, value: DictVal, key):
    if value.real is not None and value.source is not None and not value.keys_guarded:
        if value.cls.__contains__(value.real, key):
            return                               # deleted by the trace itself
        if type(key) in (str, bytes):
            guard(tx, value.source, "NO_KEY" if type(value.real) is value.cls else "BASE_NO_KEY", key)
        else:
            guard_keys(tx, value)


# %% [markdown]
# ## Hooks
#
# A hook is kept under a number that is never given again. If the keys were guarded, a program that registers its hooks for each
# step and removes them afterwards would get a version for each. So the hooks in such a dictionary are found by their order. What is
# guarded is how many there are, and of a number whether another dictionary has it, too (`counted`, `has_number`). Who looks at the
# numbers, or for one of them, has them guarded as other keys.

# %%
def counted(tx, value: AbstractValue):
    """The items for a program that depends on how many there are, and on their order, but not on the keys."""
    if type(value) is not DictVal or not value.of_hooks or value.keys_guarded:
        return entries(tx, value)
    guard(tx, value.source, "COUNT", len(value.real))
    return value.items


def has_number(tx, dictionary: DictVal, key: AbstractValue) -> bool | None:
    """Whether a dictionary has the number that another one, of hooks, has at some place; None if this is not such a question."""
    if not is_unseen(key) or not isinstance(key.source, NthSource):
        return None
    if dictionary.source is None or type(dictionary.real) is not dictionary.cls or id(dictionary) in tx.effects.changed:
        return None
    found = key.hidden in dictionary.real
    guard(tx, key.source, "KEY_OF", (dictionary.source, found))
    return found
