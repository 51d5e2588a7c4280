# %% [markdown]
# # Values: what the interpreter computes with
#
# Capture runs the user's bytecode without running the user's program. The stack of the interpreter
# therefore holds no Python objects but **values**: small records of what is known about an object. A
# constant knows everything. A tensor knows its node in the graph and a fake tensor (shape, dtype, device,
# no data). A list knows its items, which are values again. An object that existed before the call knows the
# real object, where it was found (its *source*), and the attributes that the traced program has written so
# far; the real object is never touched (`effects.py`).
#
# The real torch.compile calls these `VariableTracker` and has more than two hundred classes, each with methods
# for every operation. Here a value is only data. What can be done with it lives in tables, one for each
# question, filled by small functions next to the prose that explains them:
#
# | table | key | module |
# |---|---|---|
# | `BUILDERS`: what stands for a real object, and its guards | class | `wrap.py`, `builders.py` |
# | `GETATTR`, `SETATTR`, `FIELDS`: its attributes | kind of value (and name) | `attributes.py`, `library/fields.py` |
# | `METHODS`: methods and operators that are written in C | kind of value, name | `protocol.py`, `library/containers.py`, ... |
# | `CALLS`: what calling it does | kind of value | `calls.py` |
# | `REAL_CALLS`: the same, for callables that existed before | class | `calls.py`, `library/standard.py` |
# | `HANDLED`: calls of builtins, methods of `object`, some of torch | real function, or its module and name | `library` |
# | `RECONSTRUCT`: how it is built again when the call returns | kind of value | `epilogue.py` |
# | `HANDLERS`: the bytecode instructions | name | `opcodes.py`, `opcodes_calls.py` |
#
# So a builtin that the compiler does not know yet is one registered function, and a new kind of value is a
# dataclass and an entry in each table that it has an answer for. Where there is no entry, the graph breaks
# with a reason; nothing is guessed.

# %%
import collections
import datetime
import decimal
import functools
import itertools
import operator
import re
import sys
import types
from dataclasses import dataclass, field
from typing import Any, Callable

import numpy
import torch

from ..ch02_guards.identity import is_a
from ..ch02_guards.sources import Source, readable
from ..tables import Table  # noqa: F401 (of handlers by kind of value)


class NotConstant(Exception):
    """A value that should be made of constants is not."""


@dataclass(eq=False)
class AbstractValue:
    """source: where the generated function can read this object, or None for what the trace made. cls: `type(x)`."""
    source: Source | None = field(default=None, kw_only=True)
    cls = object

    def __init_subclass__(cls):
        dataclass(eq=False)(cls)                 # each kind is a record, and one record stands for one object

    @property
    def value(self):
        """The constant that this is; where a handler needs one and there is none, the graph breaks."""
        raise NotConstant


class Const(AbstractValue):
    """An immutable object compared by value: numbers, strings, None, dtypes, devices, ranges, slices of
    constants. kind: its class, where that is all that is known so far, and hidden the value that is not to be known."""
    value: Any = None
    kind: type | None = field(default=None, kw_only=True)
    hidden: Any = field(default=None, kw_only=True)

    @property
    def cls(self):
        return self.kind or (int if type(self.value) is Identity else type(self.value))


# %% [markdown]
# A name that a program only hands on, from the batch to what it returns, would be another version for each batch if it
# were guarded by value. So a constant with a source has no `value` at first. It has a `look`, and whoever reads its value for the
# first time, looks at it; that is what is guarded (`wrap.py`). If nobody does, the generated code reads the source again. The text of a
# number that varies, as in `f"step {i}"`, has no source but a `recipe`, and waits in the same way (`later` in `operations.py`).

# %%
class FirstLook:
    """What Python finds in place of the `value` that an unseen constant does not have."""

    def __get__(self, constant, owner=None):
        if constant is None:
            return self
        constant.value = constant.look()
        constant.source = place_of_nan(constant.value, constant.source)
        return constant.value


Const.value = FirstLook()


def place_of_nan(value, source: Source | None) -> Source | None:
    """Where a constant that was looked at is read again when it leaves. It need not be, but a NaN is equal to no other, so one can see
    which one it is."""
    return source if type(value) in (float, complex) and value != value else None


def unseen(kind: type, look, source: Source | None = None, recipe: tuple = (), hidden=None) -> Const:
    """A constant of which nothing but its class is known. look() -> its value, which is guarded by then. recipe: without a source, the
    function that makes it, its arguments, and those by name."""
    made = Const(kind=kind, source=source, hidden=hidden)
    made.look, made.recipe = look, recipe
    del made.value
    return made


def is_unseen(value) -> bool:
    return type(value) is Const and "value" not in vars(value)


def is_identity(value) -> bool:
    """Whether it is what `id()` gave, a number without a meaning."""
    return type(value) is Const and not is_unseen(value) and type(value.value) is Identity


class TensorVal(AbstractValue):
    """A tensor: `node` computes it in the graph, `fake` says what it looks like; `real` only for graph
    inputs; `number`, where it is known: its value and the version that has it; `updates`: what the trace has
    done to the number that came in, pairs of an operation and a number, and the version then; `made`: the class of one that
    the trace has made."""
    node: torch.fx.Node = None
    fake: Any = None
    real: Any = None
    version: int = 0
    number: Any = None
    updates: Any = None
    made: type = torch.Tensor

    @property
    def cls(self):
        return self.made if self.real is None else type(self.real)

    @property
    def is_leaf(self):
        """Whether it is one to the program: the fake of an argument that is a view is, whatever history the view has."""
        return (self.real is None or self.real.is_leaf) and self.fake.is_leaf


class SymVal(AbstractValue):
    """A size, int or float that is not known at compile time: a node of the graph and a `torch.SymInt` or
    `torch.SymFloat`. scalar: the class of NumPy whose object this is, if any: tensors take it for a number of Python."""
    node: torch.fx.Node = None
    sym: Any = None
    scalar: type | None = None

    @property
    def number(self) -> type:
        return float if isinstance(self.sym, torch.SymFloat) else int

    @property
    def cls(self):
        return self.scalar or self.number

    @property
    def value(self):
        """The present number: a guard says that the trace is for this one."""
        return self.cls(self.number(self.sym))


# %% [markdown]
# ## Containers
#
# What can change is numbered in the order in which the trace made it (`born`). Two questions need that: may
# code that runs twice or never change this object (`effect_free` in `effects.py`), and, when something
# turns out to be impossible to rebuild, where must the graph break so that it is not made at all?
#
# Items of a container that existed before the call are `Lazy` until somebody reads them: reading is what
# adds guards, and a configuration dictionary of fifty entries of which the program reads two should be
# guarded on two. What keys there are is guarded when the program depends on it, too (`keys_guarded`; the keys
# of a list are its indices): a list that it only appends to may have any length. `real` is the object when it
# existed before; it is not touched while tracing.

# %%
BIRTHS = itertools.count(1)


class Mutable(AbstractValue):
    """What can change."""
    born: int = field(default_factory=BIRTHS.__next__, kw_only=True)


@dataclass(eq=False)
class Lazy:
    """An item nobody had looked at when its container was wrapped; `value` once somebody has. source: or a function
    of the trace that finds it."""
    real: Any
    source: Source | Callable
    value: Any = None


class TupleVal(AbstractValue):
    items: list = field(default_factory=list)
    cls: type = tuple
    real: Any = None                         # of a named tuple that existed before


class ListVal(Mutable):
    """A list or a collections.deque; `items` is one, too."""
    items: list = field(default_factory=list)
    cls: type = list
    real: Any = None
    keys_guarded: bool = False


class DictVal(Mutable):
    """dict, OrderedDict or defaultdict. items: key -> (key value, value); keys are plain Python objects
    (see key_of). owner: the object whose `__dict__`, or the partial whose `keywords`, this is. attrs: what the trace has hung on an
    OrderedDict that it has made. of_hooks: its keys are the numbers of hooks, which nobody has looked at. asked: the keys that were only
    asked for (`key_in`), with the value of each that was found; None once they are told apart. writes: `id` of the value of a key ->
    when it was first written."""
    items: dict = field(default_factory=dict)
    cls: type = dict
    real: Any = None
    factory: AbstractValue | None = None
    keys_guarded: bool = False
    of_hooks: bool = False
    asked: dict | None = field(default_factory=dict)
    writes: dict = field(default_factory=dict)
    owner: AbstractValue | None = None
    attrs: dict = field(default_factory=dict)


def dict_of(named: dict, **fields) -> DictVal:
    """A dictionary of values by name."""
    return DictVal(items={name: (const(name), value) for name, value in named.items()}, **fields)


# %% [markdown]
# A view of a dictionary shows what the dictionary holds at any time, so it only remembers which one it is of. A set
# is the hardest container, because a program can see in which order it gives its items. This order follows from
# hashes and from the history of the set, and no description can foretell it. So a set is described by a real set, of the
# keys that its items have (`keys.py`).

# %%
class ViewVal(Mutable):
    """d.keys(), d.values() or d.items() (`kind`) of the dictionary `of`."""
    of: DictVal = None
    kind: str = "keys"

    @property
    def cls(self):
        return type(getattr(collections.OrderedDict() if self.of.cls is collections.OrderedDict else {}, self.kind)())


class Unequal:
    """In place of a key that equals no other one: only its hash is asked for."""
    def __init__(self, key):
        self.hashed = hash(key)

    def __hash__(self):
        return self.hashed


def like(order, copied=True):
    """What a set is made of, by `set(...)`, that gives its items in the order of the set `order`, and
    preferably has as much room for more; None when no such thing is found. copied: this may be a set."""
    places = {id(key): key if copied else Unequal(key) for key in order}

    def made(content):
        return set(content) if copied else {places[id(key)] for key in content}
    for contents in ([order, tuple(order)][not copied:], itertools.islice(itertools.permutations(order), 1000)):
        if alike := [content for content in contents if all(map(operator.is_, made(content), places.values()))]:
            return next((content for content in alike if sys.getsizeof(made(content)) == sys.getsizeof(order)), alike[0])
    return None


class SetVal(Mutable):
    """set or frozenset. The order in which a set gives its items depends on all that was ever done to it, so the same is done to
    `keys`, the set of their keys. As long as nothing changes, that is the object of the program itself."""
    keys: set | frozenset = field(default_factory=set)
    cls: type = set
    real: Any = None


# %% [markdown]
# An iterator runs on while the trace does. If it leaves the function, or a graph break hands it over, it has to be made
# anew at run time: an iterator over the same container, that many items further. This is why it remembers the container
# and how much it has taken. The last two classes are keys. A dictionary of the trace is a Python dictionary, and looks
# keys up by their hashes. What the program would look up by identity, or by a `__hash__` written in Python, is put into
# one of these.

# %%
class SliceVal(AbstractValue):
    cls = slice
    start: AbstractValue = None
    stop: AbstractValue = None
    step: AbstractValue = None


class IterVal(Mutable):
    """An iterator; `it` is a Python iterator that yields values. over: the container that it has taken
    `taken` items from, if that is all there is to it; unchanged: function() -> whether the container has not
    changed since in a way that the iterator minds. kind: its class, if it is not that of an iterator over `over`; made: the
    function, arguments and keywords that it was made by, such as `zip`."""
    it: Any = None
    over: AbstractValue | None = None
    taken: int = 0
    unchanged: Any = field(default=lambda: True)
    kind: type | None = None
    made: tuple = ()

    @property
    def cls(self):
        return self.kind or type(iter([] if self.over is None else plain_like(self.over)))


def plain_like(value):
    """A container of Python, whose iterators are of the same classes as those of `value`: it may be of a class that is not made
    of nothing."""
    kind = type(value)
    if kind is ViewVal:
        return getattr(plain_like(value.of), value.kind)()
    if kind is DictVal or kind is ListVal:
        special = collections.OrderedDict if kind is DictVal else collections.deque
        return special() if issubclass(value.cls, special) else {} if kind is DictVal else []
    return value.value if kind is Const else () if kind is TupleVal else set()


@dataclass(frozen=True)
class ByIdentity:
    """The dictionary key standing for a value that hashes by identity."""
    value: Any = field(hash=False, compare=False)
    ident: int = 0

    def __hash__(self):
        return hash(self.ident if is_a(self.value, AbstractValue) else self.value)


@dataclass(frozen=True)
class ByValue:
    """The dictionary key standing for an object whose class defines `__hash__` and `__eq__` in Python. equal(value, key): whether it equals
    another key, of any kind."""
    value: Any
    hashed: int
    equal: Any

    def __hash__(self):
        return self.hashed

    def __eq__(self, other):
        return self.equal(self.value, other)


# %% [markdown]
# ## Objects and callables
#
# Any object without a kind of its own is an `ObjVal`. There are two sorts. An object that existed before
# the call has its `real` self. Attributes are read from there and guarded, and `attrs` holds only what the
# trace has written since. An object that the trace has made has no real self yet: `real` is None, and
# `attrs` is all there is. If it leaves the function, the epilogue builds it from them.

# %%
class ObjVal(Mutable):
    """Any other object. `real` is the object when it existed before the call; `attrs` are the writes since
    then (DELETED marks a deletion; of what is in `moved` there was one before). For an object made by the trace `real` is None
    and `attrs` is everything it has. fields: its `__dict__`, if that was asked for, which had the items `before`."""
    real: Any = None
    cls: type = object
    attrs: dict = field(default_factory=dict)
    moved: set = field(default_factory=set)
    contents: Any = None
    fields: DictVal | None = None
    before: dict = field(default_factory=dict)


class HandlingVal(AbstractValue):
    """The stack slot of a running handler: what was handled before (what CPython keeps there) and what is
    now."""
    previous: AbstractValue = None
    current: AbstractValue = None


DELETED = Const(value="<deleted>")

# %% [markdown]
# What can be called has several kinds, because the interpreter calls each of them in another way. A
# function that existed before is an object like others, and its bytecode is inlined. A `FuncVal` was made
# by a `def` or a lambda inside of the trace; its defaults and its closure are values, not objects. A
# `MethodVal` remembers the first argument of a function. A `MethodName` is the method of a list, a string,
# or a tensor, for which there is no bytecode, only an entry in a table. A `BuiltinVal` is a function of the
# interpreter itself.

# %%
class FuncVal(AbstractValue):
    """A function made by a MAKE_FUNCTION inside the trace."""
    code: types.CodeType = None
    globals: dict = None
    name: str = ""
    defaults: list = field(default_factory=list)
    kwdefaults: dict = field(default_factory=dict)
    closure: list = field(default_factory=list)
    attrs: dict = field(default_factory=dict)
    cls = types.FunctionType


class MethodVal(AbstractValue):
    """A function bound to its first argument."""
    func: AbstractValue = None
    self: AbstractValue = None
    cls = types.MethodType


class MethodName(AbstractValue):
    """A method, by name, of a value whose methods are in the tables (tensor, list, str, ...)."""
    self: AbstractValue = None
    name: str = ""
    cls = types.BuiltinFunctionType


class PartialVal(AbstractValue):
    """origin: the partial, where it existed before; attrs: what the trace has hung on one that it made (`hung_on` in `builders.py`)."""
    func: AbstractValue = None
    args: list = field(default_factory=list)
    keywords: DictVal = None
    attrs: dict = field(default_factory=dict)
    origin: functools.partial | None = None
    cls = functools.partial


class SuperVal(AbstractValue):
    """after: the class behind which the search begins."""
    after: type = None
    self: AbstractValue = None
    cls = super


class BuiltinVal(AbstractValue):
    """A builtin the interpreter itself implements: `call(tx, args, kwargs) -> AbstractValue`. stands_for: an object of C in a class of
    the trace, such as a property. binds: whether it is a method there, as a function is."""
    call: Any = None
    name: str = ""
    stands_for: Any = None
    binds: bool = False
    cls = types.BuiltinFunctionType


# %% [markdown]
# The rest are the pieces of Python's own machinery that a program can get hold of. A cell is a variable that functions
# share. A generator is a frame that waits.

# %%
class CellVal(Mutable):
    """A closure cell. `content` is an AbstractValue, a Lazy, or None when empty; `real` when the cell existed
    before."""
    content: Any = None
    real: Any = None
    cls = types.CellType


class GenVal(Mutable):
    """A generator: its frame, suspended."""
    frame: Any = None
    done: bool = False
    started: bool = False
    result: AbstractValue | None = None
    cls = types.GeneratorType


# %% [markdown]
# An exception is an object as well, but it may arise in the middle of the trace, from a value that does not exist yet. It
# knows its arguments and what it was raised from. Its traceback names the frames that it has come through, and they are
# frames of the program, although the compiler's own have been on the stack.

# %%
class TracebackVal(Mutable):
    """The traceback of an exception, into which nobody may look while the program is traced. passed: (code, globals, offset, line) of
    each frame that the exception has come through, the innermost first."""
    passed: tuple = ()
    cls = types.TracebackType


class ExcVal(AbstractValue):
    """An exception object. cause: of `raise ... from`; context: what was handled when it was raised; seen:
    whether it has been raised before; attrs: as of any object."""
    cls: type = Exception
    args: list = field(default_factory=list)
    cause: AbstractValue | None = None
    context: AbstractValue | None = None
    seen: bool = False
    attrs: dict = field(default_factory=dict)
    traceback: AbstractValue = field(default_factory=TracebackVal)


# %% [markdown]
# Last come the values of which there is one each. Python has one None, one True and one False, and programs compare them
# with `is`, so the trace has one description of each. The tables behind them name the classes whose objects never change:
# the trace holds such an object itself.

# %%
NULL = AbstractValue()                       # the NULL that CPython keeps on its stack next to a plain callable
LASTI = Const(value=0)               # where an exception was raised; CPython keeps it for tracebacks only
NONE, TRUE, FALSE = (Const(value=one) for one in (None, True, False))


def boolean(flag) -> Const:
    return TRUE if flag else FALSE


def const(value) -> Const:
    """The value of a constant. None, True and False are one value each, as they are one object."""
    return NONE if value is None else boolean(value) if type(value) is bool else Const(value=value)


def specialize(value: AbstractValue) -> AbstractValue:
    """A symbolic number fixed to its present value, by a guard."""
    return const(value.value) if type(value) is SymVal else value


NUMPY_SCALARS = frozenset(type(numpy.zeros((), k)[()]) for k in numpy.typecodes["AllInteger"] + "?efdFD")
NUMBERS = frozenset((int, float)) | {scalar for scalar in NUMPY_SCALARS if issubclass(scalar, (numpy.integer, numpy.floating))}
MAY_BE_NAN = (float, complex, numpy.inexact)
NUMPY_TYPES = frozenset(type(numpy.dtype(scalar)) for scalar in NUMPY_SCALARS)
IMMUTABLE = NUMPY_SCALARS | NUMPY_TYPES | {
    re.Pattern, re.Match, decimal.Decimal, datetime.timedelta, datetime.date,
    datetime.datetime}


class Identity(int):
    """What id() gives in the trace: equal for the same object, and otherwise without meaning."""

    def __eq__(self, other):
        return type(other) is Identity and int(self) == int(other)

    def __hash__(self):
        return hash((Identity, int(self)))


LITERALS = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented))
SINGLETONS = (type(None), bool, type(Ellipsis), type(NotImplemented))
CONSTANT_TYPES = frozenset(LITERALS + (
    torch.dtype, torch.device, torch.layout, torch.memory_format, range, types.CodeType)) | IMMUTABLE


def is_class(value) -> bool:
    return type(value) is ObjVal and is_a(value.real, type)


def own_name_of(real) -> str | None:
    """How a function, a class or a module is called, without asking a `__getattr__` of the program."""
    find = (type if is_a(real, type) else object).__getattribute__
    for attribute in ("__qualname__", "__name__"):
        try:
            found = find(real, attribute)
        except AttributeError:
            continue
        if isinstance(found, str):
            return found
    return None


def describe(value) -> str:
    """A few words for a message."""
    if isinstance(value, Const):
        return f"a {value.cls.__name__}" if is_unseen(value) else f"{type(value.value).__name__} {readable(value.value)}"[:60]
    if isinstance(value, TensorVal):
        return f"a tensor of shape {tuple(value.fake.shape)}"
    if isinstance(value, ObjVal):
        return own_name_of(value.real) or f"a {value.cls.__qualname__} object"
    if isinstance(value, (TupleVal, ListVal, DictVal, SetVal)):
        return f"a {value.cls.__name__}"
    if isinstance(value, MethodVal):
        return f"method {describe(value.func)}"
    if isinstance(value, MethodName):
        return f"{describe(value.self)}.{value.name}"
    if isinstance(value, SymVal):
        return f"a symbolic {value.cls.__name__}"
    return type(value).__name__.removesuffix("Val").lower()
