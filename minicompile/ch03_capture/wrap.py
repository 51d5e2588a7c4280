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
    ByIdentity, CONSTANT_TYPES, CellVal, Const, ContextVal, DictVal, FuncVal, Lazy, ListVal, MethodName,
    MethodVal, NEW, ObjVal, PartialVal, SetVal, SliceVal, SymVal, Table, TensorVal, TupleVal, Value, describe)

TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
BY_IDENTITY = (type, types.ModuleType, types.BuiltinFunctionType, types.FunctionType,
               types.MethodDescriptorType,
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
    """Whether a function is likely made anew for each call, as closures and lambdas are. Then only its code
    can be guarded; its cells and defaults are read through it."""
    inside = "<lambda>" in function.__name__ or "<locals>" in function.__qualname__
    return inside or bool(function.__closure__)


def part(step, source: Source | None, *args) -> Source | None:
    """The source of a part of what is found at `source`: `part(AttrSource, source, "x")`."""
    return None if source is None else step(source, *args)


def guard_identity(tx, real, source):
    if type(real) is types.FunctionType and is_made_per_call(real):
        guard(tx, source, "FUNCTION_CODE", real)
    else:
        guard(tx, source, "ID_MATCH", real)


def realize(tx, item) -> Value:
    """A Lazy item becomes a value now, and is guarded now."""
    return wrap(tx, item.real, item.source) if type(item) is Lazy else item


def wrap_constant(tx, result) -> Value:
    """The value of a fresh object made of constants, such as the result of a call: containers are new and
    unguarded."""
    kind = type(result)
    if isinstance(result, tuple):
        return TupleVal(items=[wrap_constant(tx, r) for r in result], cls=kind)
    if kind is list:
        return ListVal(items=[wrap_constant(tx, r) for r in result])
    if kind is dict:
        return DictVal(items={k: [wrap_constant(tx, k), wrap_constant(tx, v)] for k, v in result.items()})
    if kind in (set, frozenset):
        return SetVal(items={r: wrap_constant(tx, r) for r in result}, cls=kind)
    if kind is slice:
        return SliceVal(*(Const(value=v) for v in (result.start, result.stop, result.step)))
    if kind is torch.SymInt:
        unsupported(tx, "a symbolic size in an unexpected place")
    return wrap(tx, result)


# %% [markdown]
# ## The kinds
#
# The first match decides, and the order matters where classes overlap: an Enum member of an `IntEnum` is an
# int. Classes in `BUILDERS` are found along the method resolution order; a builder that answers None leaves
# the object to the general case, as for a list subclass with methods of its own.

# %%
BUILDERS = Table()                   # class -> function(tx, real, kind, source) -> Value | None
BOUND_TO = (list, dict, set, collections.deque)


def build(tx, real, kind, source) -> Value:
    if isinstance(real, torch.Tensor):
        return wrap_tensor(tx, real, source)
    if kind is types.BuiltinFunctionType and type(real.__self__) in BOUND_TO:
        # A bound method such as `log.append`: a new object each time it is read
        guard(tx, source, "TYPE_MATCH", kind)
        guard(tx, part(AttrSource, source, "__name__"), "CONSTANT_MATCH", real.__name__)
        return MethodName(self=wrap(tx, real.__self__, part(AttrSource, source, "__self__")),
                          name=real.__name__)
    if isinstance(real, (*BY_IDENTITY, enum.Enum)):
        guard_identity(tx, real, source)
    elif isinstance(real, torch.nn.Module):
        guard(tx, source, "MODULE_STRUCTURE", ModuleSpec.of(real) if source is not None else None)
    else:
        builder = next((BUILDERS[c] for c in kind.__mro__ if c in BUILDERS), None)
        value = builder(tx, real, kind, source) if builder is not None else None
        if value is not None:
            return value
        guard(tx, source, "TYPE_MATCH", kind)
    return ObjVal(real=real, cls=kind, source=source)


@BUILDERS.of(tuple)
def wrap_tuple(tx, real, kind, source):
    structural = kind in (tuple, torch.Size) or hasattr(kind, "_fields") or hasattr(kind, "n_sequence_fields")
    if not structural:
        return None
    guard(tx, source, "TYPE_MATCH", kind)
    guard(tx, source, "LENGTH", len(real))
    return TupleVal(items=lazy_items(real, source), cls=kind, source=source)


@BUILDERS.of(list, collections.deque)
def wrap_list(tx, real, kind, source):
    if kind not in (list, collections.deque):
        return None
    guard(tx, source, "TYPE_MATCH", kind)
    guard(tx, source, "LENGTH", len(real))
    items = lazy_items(real, source)
    if kind is collections.deque:
        items = collections.deque(items, real.maxlen)
    return ListVal(items=items, cls=kind, real=real, source=source)


def lazy_items(real, source) -> list:
    return [Lazy(item, part(ItemSource, source, i)) for i, item in enumerate(real)]


def key_source(tx, key):
    """How the text of a subscript names a key: itself when its repr reads back, else the constant pool."""
    plain = type(key) in (str, int, bool, type(None)) or type(key) is tuple and all(
        type(k) in (str, int, bool) for k in key)
    return key if plain else constant_source(tx, key)


DICT_CLASSES = (dict, collections.OrderedDict, collections.defaultdict)


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
    for key, item in dict.items(real):
        if owner is not None:
            at = ModuleAttrSource(owner, source.key, key)
        else:
            at = part(DictGetSource, source, key_source(tx, key))
        value.items[key_of_real(tx, key)] = [Lazy(key, None), Lazy(item, at)]
    if kind is collections.defaultdict and real.default_factory is not None:
        value.factory = Lazy(real.default_factory, part(AttrSource, source, "default_factory"))
    return value


def dict_contents(tx, obj: ObjVal) -> DictVal | None:
    """The dictionary part of an object whose class derives from dict; None for other objects."""
    if obj.contents is None and issubclass(obj.cls, dict):
        base = next(c for c in obj.cls.__mro__ if c in DICT_CLASSES)
        if obj.real is NEW or base is collections.defaultdict:
            return None
        obj.contents = wrap_dict(tx, obj.real, base, obj.source)
    return obj.contents


@BUILDERS.of(set, frozenset)
def wrap_set(tx, real, kind, source):
    if kind not in (set, frozenset) or not all(type(item) in CONSTANT_TYPES for item in real):
        return None
    guard(tx, source, "CONSTANT_MATCH", kind(real))
    return SetVal(items={item: Const(value=item) for item in real}, cls=kind, real=real, source=source)


# %%
@BUILDERS.of(types.MethodType)
def wrap_method(tx, real, kind, source):
    guard(tx, source, "TYPE_MATCH", kind)
    func, self = (wrap(tx, getattr(real, n), part(AttrSource, source, n)) for n in ("__func__", "__self__"))
    return MethodVal(func=func, self=self, source=source)


@BUILDERS.of(functools.partial)
def wrap_partial(tx, real, kind, source):
    guard(tx, source, "TYPE_MATCH", kind)
    func, args, keywords = (wrap(tx, getattr(real, n), part(AttrSource, source, n))
                            for n in ("func", "args", "keywords"))
    guard_keys(tx, keywords)
    return PartialVal(func=func, args=[realize(tx, a) for a in args.items],
                      kwargs={k: realize(tx, v) for k, (_, v) in keywords.items.items()}, source=source)


@BUILDERS.of(slice)
def wrap_slice(tx, real, kind, source):
    guard(tx, source, "CONSTANT_MATCH", real)
    return SliceVal(*(Const(value=v) for v in (real.start, real.stop, real.step)))


@BUILDERS.of(types.CellType)
def wrap_cell(tx, real, kind, source):
    try:
        content = Lazy(real.cell_contents, part(AttrSource, source, "cell_contents"))
    except ValueError:                           # an empty cell
        content = None
    return CellVal(content=content, real=real, source=source)


@BUILDERS.of(torch.no_grad, torch.enable_grad, torch.set_grad_enabled)
def wrap_grad_context(tx, real, kind, source):
    guard(tx, source, "TYPE_MATCH", kind)
    enabled = kind is torch.enable_grad
    if kind is torch.set_grad_enabled:
        enabled = real.mode
        guard(tx, part(AttrSource, source, "mode"), "CONSTANT_MATCH", enabled)
    return ContextVal(kind="grad", state=(enabled,), factory=kind, source=source)


@BUILDERS.of(torch.amp.autocast_mode.autocast)
def wrap_autocast(tx, real, kind, source):
    guard(tx, source, "TYPE_MATCH", kind)
    state = {name: getattr(real, name) for name in ("device", "fast_dtype", "_enabled", "_cache_enabled")}
    for name, value in state.items():
        guard(tx, part(AttrSource, source, name), "CONSTANT_MATCH", value)
    return ContextVal(kind="autocast", state=tuple(state.values()), factory=kind, source=source)


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
    sizes = tuple(symbol_for(tx, n, CallSource(source, "size", (d,))) if d in dynamic else n
                  for d, n in enumerate(real.shape)) if dynamic else None
    fake = tx.fake_mode.from_real(real, sizes)
    value = TensorVal(node=add_input(tx, real, fake, source), fake=fake, real=real, source=source,
                      version=fake._version)
    tx.tensor_of_fake[id(fake)] = value
    return value


def add_input(tx, real, fake, source) -> torch.fx.Node:
    """A placeholder of the graph, fed from `source`."""
    node = tx.graph.placeholder(placeholder_name(source))
    node.meta.update(val=fake, location=location(tx), origins=(), source=source)
    tx.inputs.append(source)
    tx.example_inputs.append(real)
    return node


def symbol_for(tx, size: int, source):
    """A SymInt of value `size` (an int for 0 and 1), read from `source` at each call. Equal sizes share a
    symbol, guarded by their equality: a batch size is one number, however many tensors have it."""
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
    if source in tx.dynamic_ints:
        return tx.dynamic_ints[source]
    symbol = symbol_for(tx, real, source) if real > 1 else real
    if type(symbol) is int:
        guard(tx, source, "CONSTANT_MATCH", real)
        return Const(value=real)
    guard(tx, source, "TYPE_MATCH", int)
    guard(tx, source, "SIZE", ("n > 1", (("n", source),)))
    value = SymVal(node=add_input(tx, real, symbol, source), sym=symbol, source=source)
    tx.dynamic_ints[source] = value
    return value


def guard_sizes(tx):
    """The questions that shape code asked about symbols, with their answers, become guards."""
    for g in tx.shape_env.guards:
        text = g.text()
        names = tuple((name, source) for name, source in tx.symbol_sources.items()
                      if re.search(rf"\b{name}\b", text))
        tx.guards.add(names[0][1] if names else None, "SIZE", (text, names))


# %% [markdown]
# ## Keys
#
# The items of a traced dict are found by *real* Python keys, so the trace's dictionary is itself a Python
# dictionary. Constants are their own keys. Objects that hash by identity are keyed by it.

# %%
def key_of_real(tx, key):
    if type(key) in CONSTANT_TYPES or isinstance(key, (type, enum.Enum, types.FunctionType,
                                                       types.BuiltinFunctionType)):
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
    if type(value) in (ObjVal, TensorVal) and value.real is not None and value.real is not NEW:
        return key_of_real(tx, value.real)
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
