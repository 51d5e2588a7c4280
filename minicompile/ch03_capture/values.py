# %% [markdown]
# # Values: what the interpreter computes with
#
# Capture runs the user's bytecode without running the user's program. The stack of the interpreter
# therefore holds no Python objects but **values**: small records of what is known about an object. A
# constant knows everything. A tensor knows its node in the graph and a fake tensor (shape, dtype, device,
# no data). A list knows its items, which are values again. An object that existed before the call knows the
# real object, where it was found (its *source*), and the attributes that the traced program has written so
# far; the real object is never touched.
#
# The real torch.compile calls these `VariableTracker` and has some two hundred classes, each with methods
# for every operation. Here a value is only data. What can be done with it lives in tables, one for each
# question, filled by small functions next to the prose that explains them:
#
# | table | key | module |
# |---|---|---|
# | `BUILDERS`: what stands for a real object, and its guards | class | `wrap.py` |
# | `GETATTR`, `FIELDS`: its attributes | kind of value (and name) | `attributes.py` |
# | `METHODS`: methods and operators that are written in C | kind of value, name | `methods.py` |
# | `CALLS`: what calling it does | kind of value | `calls.py` |
# | `HANDLED`: calls of builtins, some of torch | real function | `builtins_.py`, `builtins_torch.py` |
# | `RECONSTRUCT`: how it is built again when the call returns | kind of value | `epilogue.py` |
# | `HANDLERS`: the bytecode instructions | name | `opcodes.py`, `opcodes_calls.py` |
#
# So a builtin that the compiler does not know yet is one registered function, and a new kind of value is a
# dataclass and an entry in each table that it has an answer for. Where there is no entry, the graph breaks
# with a reason; nothing is guessed.

# %%
from __future__ import annotations

import functools
import types
from dataclasses import dataclass, field
from typing import Any

import torch

from ..ch02_guards.sources import Source


class Table(dict):
    """Handlers by key; `@table.of(key, ...)` registers one. Most keys are kinds of values or real
    functions."""

    def of(self, *keys):
        def register(function):
            self.update(dict.fromkeys(keys, function))
            return function
        return register


@dataclass(eq=False)
class Value:
    """source: where the generated function can read this object, or None for what the trace made."""
    source: Source | None = field(default=None, kw_only=True)


@dataclass(eq=False)
class Const(Value):
    """An immutable object compared by value: numbers, strings, None, dtypes, devices, ranges, slices of
    constants."""
    value: Any = None


@dataclass(eq=False)
class TensorVal(Value):
    """A tensor: `node` computes it in the graph, `fake` says what it looks like; `real` only for graph
    inputs."""
    node: torch.fx.Node = None
    fake: Any = None
    real: Any = None
    version: int = 0


@dataclass(eq=False)
class SymVal(Value):
    """A size that is not known at compile time: a node of the graph and a `torch.SymInt`."""
    node: torch.fx.Node = None
    sym: Any = None


# %% [markdown]
# ## Containers
#
# Items of a container that existed before the call are `Lazy` until somebody reads them: reading is what
# adds guards, and a configuration dictionary of fifty entries of which the program reads two should be
# guarded on two. `real` is the object when it existed before; it is not touched while tracing.

# %%
@dataclass(eq=False)
class Lazy:
    """An item nobody has looked at yet."""
    real: Any
    source: Source


@dataclass(eq=False)
class TupleVal(Value):
    items: list = field(default_factory=list)
    cls: type = tuple


@dataclass(eq=False)
class ListVal(Value):
    """A list or a collections.deque; `items` is one, too."""
    items: list = field(default_factory=list)
    cls: type = list
    real: Any = None


@dataclass(eq=False)
class DictVal(Value):
    """dict, OrderedDict or defaultdict. items: key -> [key value, value]; keys are plain Python objects
    (see key_of)."""
    items: dict = field(default_factory=dict)
    cls: type = dict
    real: Any = None
    removed: set = field(default_factory=set)
    written: dict = field(default_factory=dict)
    factory: Value | None = None
    keys_guarded: bool = False


@dataclass(eq=False)
class SetVal(Value):
    """set or frozenset. items: key -> value."""
    items: dict = field(default_factory=dict)
    cls: type = set
    real: Any = None


@dataclass(eq=False)
class SliceVal(Value):
    start: Value = None
    stop: Value = None
    step: Value = None


@dataclass(eq=False)
class IterVal(Value):
    """An iterator; `it` is a Python iterator that yields values."""
    it: Any = None


@dataclass(frozen=True)
class ByIdentity:
    """The dictionary key standing for a value that hashes by identity."""
    value: Any = field(hash=False, compare=False)
    ident: int = 0


# %% [markdown]
# ## Objects and callables

# %%
@dataclass(eq=False)
class ObjVal(Value):
    """Any other object. `real` is the object when it existed before the call; `attrs` are the writes since
    then (DELETED marks a deletion). For an object made by the trace `real` is NEW and `attrs` is everything
    it has."""
    real: Any = None
    cls: type = object
    attrs: dict = field(default_factory=dict)
    contents: Any = None


NEW = types.SimpleNamespace(name="made by the trace")
DELETED = Const(value="<deleted>")


@dataclass(eq=False)
class FuncVal(Value):
    """A function made by a MAKE_FUNCTION inside the trace."""
    code: types.CodeType = None
    globals: dict = None
    globals_source: Source | None = None
    name: str = ""
    defaults: list = field(default_factory=list)
    kwdefaults: dict = field(default_factory=dict)
    closure: list = field(default_factory=list)
    attrs: dict = field(default_factory=dict)


@dataclass(eq=False)
class MethodVal(Value):
    """A function bound to its first argument."""
    func: Value = None
    self: Value = None


@dataclass(eq=False)
class MethodName(Value):
    """A method, by name, of a value whose methods are in the tables (tensor, list, str, ...)."""
    self: Value = None
    name: str = ""


@dataclass(eq=False)
class PartialVal(Value):
    func: Value = None
    args: list = field(default_factory=list)
    kwargs: dict = field(default_factory=dict)


@dataclass(eq=False)
class SuperVal(Value):
    cls: type = None
    self: Value = None


@dataclass(eq=False)
class BuiltinVal(Value):
    """A builtin the interpreter itself implements: `call(tx, args, kwargs) -> Value`."""
    call: Any = None
    name: str = ""


@dataclass(eq=False)
class CellVal(Value):
    """A closure cell. `content` is a Value, a Lazy, or None when empty; `real` when the cell existed
    before."""
    content: Any = None
    real: Any = None


@dataclass(eq=False)
class ContextVal(Value):
    """A known context manager. kind: 'grad' (enabled,), 'autocast' (device, dtype, enabled, cache), 'null'
    (). immediate: the grad mode before a `set_grad_enabled`, which acts when it is made; result: of
    `__enter__`."""
    kind: str = ""
    state: tuple = ()
    saved: list = field(default_factory=list)
    factory: type = None
    immediate: bool | None = None
    result: Value | None = None


@dataclass(eq=False)
class GenVal(Value):
    """A generator: its frame, suspended."""
    frame: Any = None
    done: bool = False
    started: bool = False
    result: Value | None = None


@dataclass(eq=False)
class ExcVal(Value):
    """An exception object."""
    cls: type = Exception
    args: list = field(default_factory=list)
    cause: Value | None = None
    real: Any = None


NULL = Value()                       # the NULL that CPython keeps on its stack next to a plain callable
NONE = Const(value=None)
TRUE = Const(value=True)
FALSE = Const(value=False)


def boolean(flag) -> Const:
    return TRUE if flag else FALSE



LITERALS = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented))
CONSTANT_TYPES = frozenset(LITERALS + (
    torch.dtype, torch.device, torch.layout, torch.memory_format, range, types.CodeType))


# %% [markdown]
# ## Python exceptions of the traced program
#
# `UserError` carries an exception that the *traced* program raises, through the interpreter's own Python
# frames, to the interpreter frame whose exception table covers it. It must not be confused with
# `Unsupported`, which is ours.

# %%
class NotConstant(Exception):
    """A value that should be made of constants is not."""


class UserError(Exception):
    def __init__(self, exc: ExcVal):
        super().__init__(exc.cls.__name__)
        self.exc = exc


def user_error(cls, *args):
    """Raise `cls(*args)` in the traced program; args are plain constants."""
    raise UserError(ExcVal(cls=cls, args=[Const(value=a) for a in args]))


# %% [markdown]
# ## Classes
#
# What a value can do is decided by the class of the object it stands for. `lookup` reads a class without
# running anything: it ignores metaclasses and leaves descriptors as they are.

# %%
MISSING = object()
CLASS_OF = {SymVal: int, FuncVal: types.FunctionType, MethodVal: types.MethodType,
            MethodName: types.BuiltinFunctionType,
            PartialVal: functools.partial, BuiltinVal: types.BuiltinFunctionType, SliceVal: slice,
            GenVal: types.GeneratorType, IterVal: type(iter([])), CellVal: types.CellType}


def class_of(value: Value) -> type:
    """type(value)"""
    if isinstance(value, Const):
        return type(value.value)
    if isinstance(value, TensorVal):
        return torch.Tensor if value.real is None else type(value.real)
    if isinstance(value, (ObjVal, ListVal, TupleVal, DictVal, SetVal, ExcVal)):
        return value.cls
    if isinstance(value, ContextVal):
        return value.factory
    return CLASS_OF.get(type(value), object)


def lookup(cls: type, name: str):
    """The attribute as it lies in the dictionary of the first class that has it, or MISSING."""
    for base in cls.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return MISSING


def describe(value) -> str:
    """A few words for a message."""
    if isinstance(value, Const):
        return f"{type(value.value).__name__} {value.value!r}"[:60]
    if isinstance(value, TensorVal):
        return f"a tensor of shape {tuple(value.fake.shape)}"
    if isinstance(value, ObjVal):
        named = getattr(value.real, "__qualname__", None) or getattr(value.real, "__name__", None)
        return named if isinstance(named, str) else f"a {value.cls.__qualname__} object"
    if isinstance(value, (TupleVal, ListVal, DictVal, SetVal)):
        return f"a {value.cls.__name__}"
    if isinstance(value, MethodVal):
        return f"method {describe(value.func)}"
    if isinstance(value, MethodName):
        return f"{describe(value.self)}.{value.name}"
    if isinstance(value, SymVal):
        return "a symbolic size"
    return type(value).__name__.removesuffix("Val").lower()
