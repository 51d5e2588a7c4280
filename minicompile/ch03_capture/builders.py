# %% [markdown]
# # What an object is made of
#
# A list is made of items, a bound method of a function and an object, a slice of three numbers. The builders here take such
# objects apart. They fill the table of `wrap.py`, and each decides what has to be the same in every call, and what waits until
# the program looks at it.
#
#     def unpacked(x, pair, log, options, method):
#         first, second = pair
#         log.append(first)
#         return method(x) * options["scale"]
#
# With `torch.nn.ReLU().forward` for `method`, what is asked of the other arguments is
#
#     pair is a tuple
#     pair has 2 elements
#     log is a list
#     method is a method
#     method.__func__ is the same object
#     method.__self__ is a ReLU with the same children and no hooks
#     options is a dict
#     options['scale'] == 3.0
#     pair[0] is a float
#     pair[1] is a float
#
# The log may be of any length, and `options` may have other keys, since the program has not asked for them. It has unpacked the pair,
# which fails for three items. But it has not looked at the two numbers, one of which is only handed on.

# %%
import collections
import enum
import functools
import gc
import types
from typing import Callable

import numpy
import torch

from ..ch02_guards.identity import is_a, module_name
from ..ch02_guards.sources import (
    AttrSource, BaseItemSource, CallSource, DictGetSource, InstanceDictSource, ItemSource, ListItemSource, ModuleAttrSource, NthSource,
    Source, TupleItemSource)
from ..ch02_guards.torch_guards import CHILD_DICTS
from .effects import kept_warnings
from .keys import entries, guard_keys, is_plain_key, key_of_real, value_of_key
from .lookup import is_plain_tuple, native_new, python_method
from .tracer import Tracer, constant_source, guard, unsupported
from .values import (
    AbstractValue, CONSTANT_TYPES, CellVal, Const, DictVal, ExcVal, Identity, Lazy, ListVal, MethodVal, NotConstant, ObjVal, PartialVal,
    SetVal, SliceVal, SymVal, TupleVal, like)
from .wrap import BUILDERS, is_fixed, part, realize, wrap


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
    if real is kept_warnings():
        unsupported(tx, "reading the list of warnings, to which what is in the graph may add")
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
# of modules and tensors are found by their order (*Hooks*, in `keys.py`).

# %%
def item_source(dictionary: Source, key) -> Source | Callable[[Tracer], Source]:
    """What a dictionary has at a key, whose repr reads back. Any other is taken from the constant pool, which keeps it, when somebody
    looks; who looks for it by a source of its own (`key_in`) needs none."""
    plain = type(key) in (str, int, bool, type(None)) or type(key) is tuple and all(
        type(k) in (str, int, bool) for k in key)
    return DictGetSource(dictionary, key) if plain else lambda tx: DictGetSource(dictionary, constant_source(tx, key))


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
            at = NthSource(source, "values", i) if value.of_hooks else part(item_source, source, key)
        read = value.of_hooks or source is not None and type(real) in DICT_CLASSES and may_change(key)
        from_key = NthSource(source, "keys", i) if read else None
        value.items[key_of_real(tx, key, from_key)] = Lazy(key, from_key), Lazy(item, at)
    if kind is collections.defaultdict and real.default_factory is not None:
        value.factory = Lazy(real.default_factory, part(AttrSource, source, "default_factory"))
    return value


def contents_of(tx, obj: ObjVal) -> DictVal | ListVal | None:
    """The dictionary or list inside an object whose class derives from dict or list; None for other objects."""
    if obj.contents is None and issubclass(obj.cls, list) and obj.real is not None:
        obj.contents = ListVal(items=lazy_items([*list.__iter__(obj.real)], obj.source, BaseItemSource), real=obj.real, source=obj.source)
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
    if kind is not functools.partial:            # whose class may call it in another way, or hide its parts
        return None
    func, args, keywords = wrap_parts(tx, real, source, "func", "args", "keywords")
    partial = PartialVal(func=func, args=[realize(tx, a) for a in args.items], keywords=keywords, origin=real, source=source)
    if source is None:
        partial.attrs, partial.origin = hung_on(tx, partial) or {}, None
    return partial


def hung_on(tx, partial: PartialVal) -> dict | None:
    """The attributes of a partial, or None if it has no `__dict__`. Reading that makes one, and Python sees whether there is one:
    a partial of a partial without is one of that one's function. So `__reduce__` is asked."""
    if partial.origin is None:
        return partial.attrs or None
    found = partial.origin.__reduce__()[2][3]
    state = part(ItemSource, part(ItemSource, part(CallSource, partial.source, "__reduce__"), 2), 3)
    guard(tx, state, "TYPE_MATCH", type(found))
    if found is None:
        return None
    guard(tx, state, "DICT_KEYS", tuple(found))
    return {k: Lazy(v, part(ItemSource, state, k)) for k, v in found.items()}


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
    if kind is ObjVal and value.real is not None and not value.attrs:
        if module_name(type(value.real)) == "typing" and value.source is not None:
            guard(tx, value.source, "ID_MATCH", value.real)
        if is_a(value.real, GIVEN_AS_THEY_ARE) or module_name(type(value.real)) == "typing":
            return value.real
    raise NotConstant


GIVEN_AS_THEY_ARE = (type, types.BuiltinFunctionType, types.ModuleType, torch.finfo, torch.iinfo, numpy.finfo, numpy.iinfo,
                     types.GenericAlias, types.UnionType, enum.Enum, torch.torch_version.TorchVersion)
