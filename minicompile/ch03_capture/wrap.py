# %% [markdown]
# # Wrapping: from an object of the program to a value
#
# Everything that enters a trace from outside, an argument, a global, an attribute of an argument, passes
# through `wrap`. It decides what kind of value stands for the object and which guard pins what is assumed
# about it:
#
# - a number, string or None becomes a constant, guarded by its value;
# - a tensor becomes a graph input, guarded by its metadata;
# - a container is guarded by its type and length, its items wait (`Lazy`) until they are read;
# - a function, class or Python module is guarded by identity;
# - any other object is guarded by its class; its attributes are guarded one by one when they are read.
#
# The same object met twice, by two paths, must be the same value: writing through one path is seen through
# the other. The table `tracked` finds it by identity, and a guard records that the two paths lead to one
# object.

# %%
from __future__ import annotations

import collections
import enum
import functools
import re
import types

import torch

from ..ch02_guards.guards import CHILD_DICTS, ModuleSpec, TensorSpec
from ..ch02_guards.sources import (
    AttrSource, CallSource, ConstantSource, DictGetSource, InstanceDictSource, ItemSource,
    ModuleAttrSource, Source)
from .interpreter import Tracer, constant_source, guard, location, unsupported
from .values import (
    ByIdentity, CONSTANT_TYPES, CellVal, Const, ContextVal, DictVal, FuncVal, Lazy, ListVal, MethodVal,
    NEW, ObjVal, PartialVal, SetVal, SliceVal, SymVal, TensorVal, TupleVal, Value, describe, MethodName)

TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
BY_IDENTITY = (type, types.ModuleType, types.BuiltinFunctionType, types.FunctionType, types.MethodDescriptorType,
               types.WrapperDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
               types.ClassMethodDescriptorType, types.MethodWrapperType, staticmethod, classmethod, property)


def wrap(tx: Tracer, real, source: Source | None = None) -> Value:
    """The value for a real object found at `source` (None: a constant of the trace, not guarded)."""
    kind = type(real)
    if kind in CONSTANT_TYPES:
        if source is not None:
            if kind is int and source in tx.dynamic:
                return wrap_dynamic_int(tx, real, source)
            guard(tx, source, "CONSTANT_MATCH", real)
        return Const(value=real)
    known = tx.tracked.get(id(real))
    if known is not None:
        if source is not None and isinstance(real, (*BY_IDENTITY, enum.Enum)):
            guard_identity(tx, real, source)
        elif source is not None and known.source is not None and source != known.source:
            if not isinstance(source, ConstantSource) and not isinstance(known.source, ConstantSource):
                guard(tx, source, "ALIASED", known.source)
        return known
    value = build(tx, real, kind, source)
    tx.tracked[id(real)] = value
    tx.keep.append(real)
    return value


def is_made_per_call(function) -> bool:
    """Whether a function is likely made anew for each call, as closures and lambdas are. Then only its code can be
    guarded; its cells and defaults are read through it."""
    return bool(function.__closure__) or "<lambda>" in function.__name__ or "<locals>" in function.__qualname__


def guard_identity(tx, real, source):
    if type(real) is types.FunctionType and is_made_per_call(real):
        guard(tx, source, "FUNCTION_CODE", real)
    else:
        guard(tx, source, "ID_MATCH", real)


def realize(tx, item) -> Value:
    """A Lazy item becomes a value now, and is guarded now."""
    return wrap(tx, item.real, item.source) if type(item) is Lazy else item


# %% [markdown]
# ## The kinds
#
# The order below matters where classes overlap: a named tuple is a tuple, an Enum member of an `IntEnum` is
# an int.

# %%
def build(tx, real, kind, source) -> Value:
    if isinstance(real, torch.Tensor):
        return wrap_tensor(tx, real, source)
    if kind is types.BuiltinFunctionType and type(real.__self__) in (list, dict, set, collections.deque):
        guard(tx, source, "TYPE_MATCH", kind)    # a bound method such as `log.append`: a new object each time it is read
        guard(tx, None if source is None else AttrSource(source, "__name__"), "CONSTANT_MATCH", real.__name__)
        owner = wrap(tx, real.__self__, None if source is None else AttrSource(source, "__self__"))
        return MethodName(self=owner, name=real.__name__)
    if isinstance(real, BY_IDENTITY):
        guard_identity(tx, real, source)
        return ObjVal(real=real, cls=kind, source=source)
    if isinstance(real, enum.Enum):
        guard(tx, source, "ID_MATCH", real)
        return ObjVal(real=real, cls=kind, source=source)
    if isinstance(real, torch.nn.Module):
        guard(tx, source, "MODULE_STRUCTURE", ModuleSpec.of(real) if source is not None else None)
        return ObjVal(real=real, cls=kind, source=source)
    builder = next((BUILDERS[c] for c in kind.__mro__ if c in BUILDERS), None)
    if builder is not None:
        value = builder(tx, real, kind, source)
        if value is not None:
            return value
    guard(tx, source, "TYPE_MATCH", kind)
    return ObjVal(real=real, cls=kind, source=source)


BUILDERS: dict = {}


def builder(*kinds):
    def register(function):
        for kind in kinds:
            BUILDERS[kind] = function
        return function
    return register


@builder(tuple)
def wrap_tuple(tx, real, kind, source):
    structural = kind in (tuple, torch.Size) or hasattr(kind, "_fields") or hasattr(kind, "n_sequence_fields")
    if not structural:
        return None
    guard(tx, source, "TYPE_MATCH", kind)
    guard(tx, source, "LENGTH", len(real))
    return TupleVal(items=lazy_items(real, source), cls=kind, source=source)


@builder(list, collections.deque)
def wrap_list(tx, real, kind, source):
    if kind not in (list, collections.deque):
        return None
    guard(tx, source, "TYPE_MATCH", kind)
    guard(tx, source, "LENGTH", len(real))
    value = ListVal(items=lazy_items(real, source), cls=kind, real=real, source=source)
    value.maxlen = getattr(real, "maxlen", None)
    return value


def lazy_items(real, source) -> list:
    return [Lazy(item, None if source is None else ItemSource(source, i)) for i, item in enumerate(real)]


def key_source(tx, key):
    """How the text of a subscript names a key: itself when its repr reads back, else the constant pool."""
    plain = type(key) in (str, int, bool, type(None)) or type(key) is tuple and all(
        type(k) in (str, int, bool) for k in key)
    return key if plain else constant_source(tx, key)


@builder(dict)
def wrap_dict(tx, real, kind, source):
    if kind not in (dict, collections.OrderedDict, collections.defaultdict):
        return None
    value = DictVal(cls=kind, real=real, source=source)
    owner = None
    if isinstance(source, ItemSource) and isinstance(source.base, InstanceDictSource) and source.key in CHILD_DICTS:
        owner, value.keys_guarded = source.base.base, True       # MODULE_STRUCTURE has guarded the keys
    else:
        guard(tx, source, "TYPE_MATCH", type(real))
    for key, item in dict.items(real):
        if owner is not None:
            at = ModuleAttrSource(owner, source.key, key)
        else:
            at = None if source is None else DictGetSource(source, key_source(tx, key))
        value.items[key_of_real(tx, key)] = [Lazy(key, None), Lazy(item, at)]
    if kind is collections.defaultdict and real.default_factory is not None:
        value.factory = Lazy(real.default_factory, None if source is None else AttrSource(source, "default_factory"))
    return value


def dict_contents(tx, obj: ObjVal) -> DictVal | None:
    """The dictionary part of an object whose class derives from dict; None for other objects."""
    if obj.contents is None and issubclass(obj.cls, dict):
        base = next(c for c in obj.cls.__mro__ if c in (dict, collections.OrderedDict, collections.defaultdict))
        if obj.real is NEW or base is collections.defaultdict:
            return None
        obj.contents = wrap_dict(tx, obj.real, base, obj.source)
    return obj.contents


@builder(set, frozenset)
def wrap_set(tx, real, kind, source):
    if kind not in (set, frozenset):
        return None
    if not all(type(item) in CONSTANT_TYPES for item in real):
        return None
    guard(tx, source, "CONSTANT_MATCH", kind(real))
    return SetVal(items={item: Const(value=item) for item in real}, cls=kind, real=real, source=source)


# %%
@builder(types.MethodType)
def wrap_method(tx, real, kind, source):
    guard(tx, source, "TYPE_MATCH", kind)
    at = lambda name: None if source is None else AttrSource(source, name)
    return MethodVal(func=wrap(tx, real.__func__, at("__func__")), self=wrap(tx, real.__self__, at("__self__")),
                     source=source)


@builder(functools.partial)
def wrap_partial(tx, real, kind, source):
    guard(tx, source, "TYPE_MATCH", kind)
    at = lambda name: None if source is None else AttrSource(source, name)
    args, keywords = wrap(tx, real.args, at("args")), wrap(tx, real.keywords, at("keywords"))
    guard_keys(tx, keywords)
    return PartialVal(func=wrap(tx, real.func, at("func")), args=[realize(tx, a) for a in args.items],
                      kwargs={k: realize(tx, v) for k, (_, v) in keywords.items.items()}, source=source)


@builder(slice)
def wrap_slice(tx, real, kind, source):
    guard(tx, source, "CONSTANT_MATCH", real)
    return SliceVal(*(Const(value=v) for v in (real.start, real.stop, real.step)))


@builder(types.CellType)
def wrap_cell(tx, real, kind, source):
    try:
        content = real.cell_contents
    except ValueError:
        return CellVal(content=None, real=real, source=source)
    return CellVal(content=Lazy(content, None if source is None else AttrSource(source, "cell_contents")), real=real,
                   source=source)


@builder(torch.no_grad, torch.enable_grad, torch.set_grad_enabled)
def wrap_grad_context(tx, real, kind, source):
    guard(tx, source, "TYPE_MATCH", kind)
    if kind is torch.set_grad_enabled:
        guard(tx, None if source is None else AttrSource(source, "mode"), "CONSTANT_MATCH", real.mode)
        return ContextVal(kind="grad", state=(real.mode,), factory=kind, source=source)
    return ContextVal(kind="grad", state=(kind is torch.enable_grad,), factory=kind, source=source)


@builder(torch.amp.autocast_mode.autocast)
def wrap_autocast(tx, real, kind, source):
    guard(tx, source, "TYPE_MATCH", kind)
    names = ("device", "fast_dtype", "_enabled", "_cache_enabled")
    for name in names:
        guard(tx, None if source is None else AttrSource(source, name), "CONSTANT_MATCH", getattr(real, name))
    return ContextVal(kind="autocast", state=tuple(getattr(real, n) for n in names), factory=kind, source=source)


# %% [markdown]
# ## Tensors
#
# Parameters, arguments, globals: whatever tensor the trace touches becomes a placeholder, in the order of
# first use. The backend receives a function of flat tensors and knows nothing about modules.
#
# Dimensions named in `dynamic` (because the caller marked them, or because they differed from an earlier
# call) get a `SymInt` instead of a number. Each symbol is a graph input of its own.

# %%
def placeholder_name(source: Source) -> str:
    text = re.sub(r"\W+", "_", source.name()).strip("_").lower()
    return ("in_" if not text or text[0].isdigit() else "") + text


def wrap_tensor(tx, real, source):
    if type(real) not in TENSOR_TYPES:
        unsupported(tx, f"a tensor of the subclass {type(real).__qualname__}")
    if real.layout is not torch.strided or real.is_quantized or real.is_nested:
        unsupported(tx, f"a tensor of layout {real.layout}")
    if source is None:
        source = constant_source(tx, real)
    dynamic = tx.dynamic.get(source) or ()
    if not isinstance(source, ConstantSource):
        guard(tx, source, "TENSOR_MATCH", TensorSpec.of(real, dynamic))
    sizes = None
    if dynamic:
        sizes = tuple(symbol_for(tx, n, CallSource(source, "size", (d,))) if d in dynamic else n
                      for d, n in enumerate(real.shape))
    fake = tx.fake_mode.from_real(real, sizes) if sizes else tx.fake_mode.from_real(real)
    node = tx.graph.placeholder(placeholder_name(source))
    node.meta.update(val=fake, location=location(tx), origins=(), source=source)
    tx.inputs.append(source)
    tx.example_inputs.append(real)
    value = TensorVal(node=node, fake=fake, real=real, source=source, version=fake._version)
    tx.tensor_of_fake[id(fake)] = value
    return value


def symbol_for(tx, size: int, source):
    """A SymInt of value `size` (an int for 0 and 1), read from `source` at each call. Equal sizes share a symbol, guarded
    by their equality: a batch size is one number, however many tensors have it."""
    known = tx.symbols.get(size)
    if known is not None:
        name = str(known[0].node.expr)
        guard(tx, source, "SIZE", (f"{name} == n", ((name, known[1]), ("n", source))))
        return known[0]
    symbol = tx.shape_env.create(size)
    if isinstance(symbol, torch.SymInt):
        tx.symbols[size] = symbol, source
        tx.symbol_sources[str(symbol.node.expr)] = source
    return symbol


def wrap_dynamic_int(tx, real, source):
    known = tx.dynamic_ints.get(source)
    if known is not None:
        return known
    symbol = symbol_for(tx, real, source) if real > 1 else real
    if type(symbol) is int:
        guard(tx, source, "CONSTANT_MATCH", real)
        return Const(value=real)
    guard(tx, source, "TYPE_MATCH", int)
    guard(tx, source, "SIZE", ("n > 1", (("n", source),)))
    node = tx.graph.placeholder(placeholder_name(source))
    node.meta.update(val=symbol, location=location(tx), origins=(), source=source)
    tx.inputs.append(source)
    tx.example_inputs.append(real)
    value = tx.dynamic_ints[source] = SymVal(node=node, sym=symbol, source=source)
    return value


def guard_sizes(tx):
    """The questions that shape code asked about symbols, with their answers, become guards."""
    for g in tx.shape_env.guards:
        text = g.text()
        names = tuple((name, source) for name, source in tx.symbol_sources.items() if re.search(rf"\b{name}\b", text))
        tx.guards.add(names[0][1] if names else None, "SIZE", (text, names))


# %% [markdown]
# ## Keys
#
# The items of a traced dict are found by *real* Python keys, so the trace's dictionary is itself a Python
# dictionary. Constants are their own keys. Objects that hash by identity are keyed by it.

# %%
def key_of_real(tx, key):
    if type(key) in CONSTANT_TYPES or isinstance(key, (type, enum.Enum, types.FunctionType, types.BuiltinFunctionType)):
        return key
    if type(key) is tuple:
        return tuple(key_of_real(tx, k) for k in key)
    if isinstance(key, torch.Tensor) or type(key).__hash__ is object.__hash__:
        return ByIdentity(key, id(key))
    unsupported(tx, f"a dictionary key of type {type(key).__qualname__}")


def key_of(tx, value: Value):
    """The Python key under which `value` is found in a DictVal or SetVal."""
    if type(value) is Const:
        return value.value
    if type(value) is SymVal:
        return int(value.sym)
    if type(value) is TupleVal:
        return tuple(key_of(tx, realize(tx, item)) for item in value.items)
    real = getattr(value, "real", None)
    if type(value) in (ObjVal, TensorVal) and real is not None and type(real) is not types.SimpleNamespace:
        return key_of_real(tx, real)
    if type(value) is SetVal and value.cls is frozenset:
        return frozenset(value.items)
    if type(value) in (TensorVal, FuncVal) or type(value) is ObjVal and value.cls.__hash__ is object.__hash__:
        return ByIdentity(value, id(value))
    unsupported(tx, f"{describe(value)} as a dictionary key")


def guard_keys(tx, value: DictVal):
    """The program depends on which keys there are, and on their order."""
    if not value.keys_guarded and value.real is not None and value.source is not None:
        value.keys_guarded = True
        guard(tx, value.source, "DICT_KEYS", tuple(value.real))


def guard_missing(tx, value: DictVal, key):
    if value.real is not None and value.source is not None and not value.keys_guarded:
        if key in value.real:
            return                               # deleted by the trace itself
        if type(key) is str:
            guard(tx, value.source, "NO_KEY", key)
        else:
            guard_keys(tx, value)
