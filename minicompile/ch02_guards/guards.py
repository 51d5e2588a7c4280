# %% [markdown]
# # Guards: when may yesterday's graph be used again?
#
# Tracing a function answers every question the Python code asks (is there a mask? how many layers? is this
# training?) with the answer of the moment. A **guard** writes one such answer down: *this source, looked at
# in this way, gave that*. If all guards of a compiled entry hold at the next call, running the function
# again would ask the same questions and get the same answers, so the graph may stand for it.
#
# A guard is data, (source, kind, expected), not code. That lets us do four different things with it:
#
# 1. turn all guards of an entry into one fast Python function (`codegen.py`);
# 2. find those that need no second look as long as nothing was written (`stable.py`);
# 3. when the function says no, walk the same guards slowly and say in words which one failed and why;
# 4. print them for a person.
#
# Take
#
#     def sized(x, sizes, mode):
#         return x if mode is None else x * len(sizes)
#
# called as `sized(torch.ones(3), [2, 4], "fast")`. These are four of its guards, as data and in words:
#
#     TENSOR_MATCH(x) <TensorSpec>           x is a float32 tensor [3] on cpu, contiguous
#     TYPE_MATCH(sizes) list                 sizes is a list
#     LENGTH(sizes) 2                        sizes has 2 elements
#     TYPE_MATCH(mode) str                   mode is a str
#
# The numbers in the list are not guarded, nor which text `mode` is: nobody has asked. (The other guards are about the state of the
# library and about `len`, which the program might replace.) In the generated function the third guard is one line. If it fails, the slow
# walk tells why:
#
#     if not (len(sizes) == 2): raise __Miss
#     length of sizes changed: expected 2, got 1
#
# What a kind means for each of the four uses is one record, and the first field of it one small function, which returns
# the conditions as Python text, each with its explanation.

# %%
import gc
import math
import re
import types
import weakref
from dataclasses import dataclass, field
from typing import Any, Callable

import torch

from ..logs import count
from .identity import Made, held, is_a, is_found, is_long_lived, module_name, strongly, weakly, weakly_found
from .sources import AttrSource, DictGetSource, GlobalStateSource, InstanceDictSource, ItemSource, Source, readable


@dataclass(frozen=True)
class Guard:
    source: Source | None
    kind: str
    expected: Any = None
    location: Any = None                      # the user's line that needed it

    def __str__(self):
        expected = "" if self.expected is None else f" {short(strongly(self.expected))}"
        return f"{self.kind}({self.source if self.source is not None else ''}){expected}"


@dataclass(frozen=True)
class Condition:
    """`text` must be true; `why(value)` explains a failure, given what the source read this time."""
    text: str
    why: Callable[[Any], str]


def short(value, limit: int = 80) -> str:
    """repr for messages: never huge, never raises, and no code of the program."""
    try:
        text = value.__qualname__ if isinstance(value, (type, types.FunctionType)) else \
            f"<{type(value).__name__}>" if speaks(value) else repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    text = " ".join(text.split())
    return text if len(text) <= limit else text[:limit - 3] + "..."


def speaks(value) -> bool:
    """Whether the repr of an object, or of what it contains, is a function of the program."""
    function, inside = type(value).__repr__, ()
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        inside = (*dict.keys(value), *dict.values(value)) if isinstance(value, dict) else value
    return type(function) is types.FunctionType and module_name(function).split(".")[0] not in ("torch", "enum") or any(map(speaks, inside))


def one(words: str) -> str:
    return f"{'an' if words[0] in 'aeiouAEIOU' else 'a'} {words}"


def changed_in_words(what, expected, got) -> str:
    return f"{what} changed: expected {short(expected)}, got {short(got)}"


# %% [markdown]
# ## A set of guards
#
# Capture asks about the same things over and over: each of twelve layers reads `config.dropout`. `add`
# keeps the first of equal guards, so that the message names the first line that needed it. Two expected
# values are equal here only if no code could tell them apart: `1`, `1.0` and `True` are three different
# values, `0.0` and `-0.0` are two.

# %%
class Spec:
    """What a guard expects, described: equal ones are interchangeable."""


def identity_key(value):
    """A hashable stand-in for `value`, equal exactly when the expected values are interchangeable."""
    if isinstance(value, (tuple, list, frozenset)):
        return (type(value), tuple(map(identity_key, value)))
    if isinstance(value, float):
        return (float, "nan") if value != value else (float, value, math.copysign(1.0, value))
    if isinstance(value, (Source, Spec, int, str, bytes, type(None))):
        return (type(value), value)
    return ("id", id(value))


@dataclass
class GuardSet:
    """Guards in the order in which the trace met them, without repeats."""
    guards: dict = field(default_factory=dict)

    def add(self, source: Source | None, kind: str, expected: Any = None, location: Any = None) -> None:
        """Record one fact. Raises KeyError on an unknown kind."""
        if source is None and kind in STATE:
            source = GlobalStateSource(kind)
        expected = GUARD_KINDS[kind].weak(expected)
        key = (source, kind, identity_key(expected))
        if key not in self.guards:
            self.guards[key] = Guard(source, kind, expected, location)

    def has_none(self, source: Source) -> bool:
        """Whether it is guarded that the source reads None."""
        return (source, "CONSTANT_MATCH", identity_key(None)) in self.guards

    def __iter__(self):
        return iter(self.guards.values())

    def __len__(self):
        return len(self.guards)


# %% [markdown]
# ## Kinds
#
# `@guard_kind("NAME", ...)` makes a kind of the function below it, which gets the guard, the text `x` that reads its
# source, and `const`: `const(object)` is a name for any object, `const.read(source)` the text that reads a
# further source. It returns conditions; all must hold. The other fields:
#
# - `words`, what the guard says about the user's variables.
# - `weak`, what is compared, given what the trace found. It may hold no object of the program (`identity.py`
#   says which objects, and why), and nothing that changes later: not a tensor, but what was assumed about it.
# - `looks`, what a memo has to look at to vouch for the guard: pairs of a kind of look and a source, or, for
#   WATCHED, a class or a function, for MEMBER a class and what in it: a name, (a name, ) if only the type of what
#   is found matters, or the number of a base. None if no memo can.

# %%
@dataclass(frozen=True, eq=False)
class Kind:
    conditions: Callable[..., list[Condition]]
    words: Callable[[Guard], str]
    weak: Callable[[Any], Any]
    looks: Callable[[Guard], list[tuple] | None]


GUARD_KINDS: dict[str, Kind] = {}
STATE: dict[str, Callable] = {}        # kind -> reads a state of the library; the trace compares with what it was at its beginning

OBJECT, DICT, ALL, TUPLE, FUNCTION, CLASS, LIST, HOOKS = range(8)   # the kinds of things, as `unchanged.c` numbers them
SAME, HELD, TENSOR = "the very object", "the address", "the metadata"
WATCHED, MEMBER = OF_CLASSES = "a class or function", "what is in a class"
KEYS, BARE = "the keys of a dict", "that there is no gradient"
FIXED = (int, float, bool, str, bytes, type(None), complex, torch.dtype, torch.device)


def as_it_is(expected):
    return expected


def guard_kind(kind: str, words, weak=as_it_is, looks=lambda g: None):
    def register(conditions):
        GUARD_KINDS[kind] = Kind(conditions, words, weak, looks)
        return conditions
    return register


def in_words(g: Guard) -> str:
    """A guard as a sentence about the user's variables."""
    try:
        return GUARD_KINDS[g.kind].words(g)
    except Exception:                  # an object that it names is gone
        return str(g)


@guard_kind("TYPE_MATCH", lambda g: f"{g.source} is {one(strongly(g.expected).__qualname__)}", weakly, lambda g: [(OBJECT, g.source)])
def type_match(g, x, const):
    return [Condition(f"type({x}) is {name_of(g.expected, const)}",
                      lambda v: changed_in_words(f"type of {g.source}", strongly(g.expected), type(v)))]


# %% [markdown]
# **Identity.** An object is compared with a weak reference to it.

# %%
def name_of(expected, const) -> str:
    """Text for an object that `weakly` returned."""
    return const(expected) + "()" * isinstance(expected, weakref.ref)


@guard_kind("ID_MATCH", lambda g: f"{g.source} is the same object", weakly, lambda g: [(SAME, g.source)])
def id_match(g, x, const):
    alive = f"{x} is not None and " if isinstance(g.expected, weakref.ref) else ""
    return [Condition(f"{alive}{x} is {name_of(g.expected, const)}",
                      lambda v: f"{g.source} is another object: {short(v)}")]


# %% [markdown]
# **Constants.** Equality is too kind: `True == 1 == 1.0`, but `x * True` and `x * 1.0` have different
# dtypes, so types are compared first. It is also too strict: `nan != nan`. And `0.0 == -0.0` although `1 /
# x` differs.

# %% tags=["exercise:same-constant"]
def same_constant(a, b) -> bool:
    """Whether no program can tell `a` from `b`; for compound constants of tuples, frozensets, slices,
    floats."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (a != a and b != b) or (a == b and math.copysign(1.0, a) == math.copysign(1.0, b))
    if isinstance(a, complex):
        return same_constant(a.real, b.real) and same_constant(a.imag, b.imag)
    if isinstance(a, (tuple, list, frozenset)):          # a loop over a set was unrolled in its order
        return len(a) == len(b) and all(map(same_constant, a, b))
    if isinstance(a, slice):
        return same_constant((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    return a is b or bool(a == b)


def looks_of_constant(g) -> list[tuple] | None:
    if g.expected is None and type(g.source) is AttrSource and g.source.attribute == "grad":
        return [(BARE, g.source.base)]                   # no field of the object that Python sees
    return [(SAME, g.source)] if type(g.expected) in FIXED else None


def said_of_constant(g) -> str:
    """`torch.bool` reads like what it is; that it is so can be told only by the class."""
    said = short(e := strongly(g.expected))
    return f"{g.source} is the {type(e).__name__} {said}" if said == str(g.source) else f"{g.source} == {said}"


@guard_kind("CONSTANT_MATCH", said_of_constant, held, looks_of_constant)
def constant_match(g, x, const):
    e = g.expected
    why = lambda v: changed_in_words(g.source, strongly(e), v)
    if e is None or isinstance(e, (bool, type, torch.dtype)) or e is Ellipsis:
        return [Condition(f"{x} is {e if e is None or isinstance(e, bool) else const(e)}", why)]
    if type(e) in (int, str, bytes):
        return [Condition(f"type({x}) is {type(e).__name__} and {x} == {readable(e)}", why)]
    if type(e) is float and e == e and e != 0.0 and not math.isinf(e):
        return [Condition(f"type({x}) is float and {x} == {e!r}", why)]
    return [Condition(f"__same_constant({x}, {name_of(e, const)})", why)]


# %% [markdown]
# **Containers and attributes.** A loop over a list was unrolled, so its length matters; a loop over a dict
# was unrolled in the order of its keys.
#
# An empty one is asked for its truth value. `looks` names what a memo has to watch. A class derived from list or dict may
# have methods of its own for all of this; what is asked there are the methods of its base (`BASE_LENGTH`, `BASE_KEYS`, `BASE_NO_KEY`).

# %%
def length_in_words(g) -> str:
    return f"{g.source} has {count(g.expected, 'element')}"


@guard_kind("TUPLE_LENGTH", length_in_words, looks=lambda g: [(TUPLE, g.source)])
@guard_kind("LENGTH", length_in_words, looks=lambda g: [(LIST, g.source)])
@guard_kind("DEQUE_LENGTH", length_in_words)
@guard_kind("COUNT", length_in_words)
def length(g, x, const):
    return [Condition(f"len({x}) == {g.expected}",
                      lambda v: changed_in_words(f"length of {g.source}", g.expected, len(v)))]


@guard_kind("BASE_LENGTH", length_in_words)
def base_length(g, x, const):
    return [Condition(f"__list_len({x}) == {g.expected}",
                      lambda v: changed_in_words(f"length of {g.source}", g.expected, list.__len__(v)))]


def keys_in_words(g) -> str:
    return f"{g.source} has the keys {short(list(g.expected))}"


@guard_kind("DICT_KEYS", keys_in_words, looks=lambda g: [(KEYS, g.source)])
@guard_kind("ORDERED_KEYS", keys_in_words)
def dict_keys(g, x, const):
    why = lambda v: changed_in_words(f"keys of {g.source}", list(g.expected), list(v))
    if not g.expected:
        return [Condition(f"not {x}", why)]
    if all(type(k) is str for k in g.expected):
        return [Condition(f"[*{x}] == {list(g.expected)!r}", why)]
    return [Condition(f"__same_keys([*{x}], {const(list(g.expected))})", why)]


def same_keys(keys, expected) -> bool:
    return len(keys) == len(expected) and all(map(same_key, keys, expected))


def same_key(a, b) -> bool:
    """Whether a key is the one that was there. The program may be handed tensors and objects of its classes, so equal ones are others."""
    if a is b or type(a) is not type(b):
        return a is b
    if isinstance(a, (tuple, frozenset)):
        return same_keys([*a], [*b])
    return not isinstance(a, torch.Tensor) and is_long_lived(type(a)) and same_constant(a, b)


@guard_kind("KEY_OF", lambda g: f"{g.source} is {'' if g.expected[1] else 'not '}a key of {g.expected[0]}",
            looks=lambda g: [(HELD, g.source), (KEYS, g.expected[0])])
def key_of(g, x, const):
    """expected: the source of a dictionary, and whether it has the key."""
    at, found = g.expected
    return [Condition(f"({x} in {const.read(at)}) is {found}", lambda v: f"{g.source} is {'not ' * found}a key of {at} now")]


@guard_kind("BASE_KEYS", lambda g: f"{g.source} has the keys {short(list(g.expected[1]))}")
def base_keys(g, x, const):
    """expected: the class from which that of a dictionary derives, and the keys. The class may have an `__iter__` of its own."""
    base, keys = g.expected
    return [Condition(f"__same_keys([*{const(base)}.keys({x})], {const(list(keys))})",
                      lambda v: changed_in_words(f"keys of {g.source}", list(keys), list(base.keys(v))))]


@guard_kind("NO_ATTR", lambda g: f"{g.source} has no attribute {g.expected!r}")
def no_attr(g, x, const):
    return [Condition(f"not hasattr({x}, {g.expected!r})",
                      lambda v: f"{g.source} has an attribute {g.expected!r} now")]


def at_key(g) -> Source:
    return (ItemSource if isinstance(g.source, InstanceDictSource) else DictGetSource)(g.source, g.expected)


def spelled_key(g, const) -> str:
    """The key in a condition: a string as it is read, all else as a constant."""
    return repr(g.expected) if isinstance(g.expected, str) else const(g.expected)


@guard_kind("NO_KEY", lambda g: f"{g.source} has no key {g.expected!r}", looks=lambda g: [(SAME, at_key(g))])
def no_key(g, x, const):
    return [Condition(f"{spelled_key(g, const)} not in {x}", lambda v: f"{g.source} has a key {g.expected!r} now")]


@guard_kind("HAS_KEY", lambda g: f"{g.source} has a key {g.expected!r}", looks=lambda g: [(SAME, at_key(g))])
def has_key(g, x, const):
    return [Condition(f"{spelled_key(g, const)} in {x}", lambda v: f"{g.source} has no key {g.expected!r} now")]


@guard_kind("BASE_NO_KEY", lambda g: f"{g.source} has no key {g.expected!r}")
def base_no_key(g, x, const):
    return [Condition(f"not {const(dict)}.__contains__({x}, {g.expected!r})", lambda v: f"{g.source} has a key {g.expected!r} now")]


# %% [markdown]
# **Functions.** A function that was inlined is a part of the trace. A program can give it other code or other defaults and
# leave it the same object, so what is compared are these parts, each by identity (FUNCTION, which a memo can watch). A function
# that is made for each call, such as a lambda, is another object each time; of it the code is compared (FUNCTION_CODE), and
# GLOBALS says which module the names in it are looked up in.

# %% tags=["exercise:function-guard"]
def function_has(function, code, defaults, kwdefaults) -> bool:
    """Whether the function still is what it was: its code, its `__defaults__` (a tuple or None) and its `__kwdefaults__` (pairs of name
    and value, in order), each the same object. All of it as `weakly` gives it. A function that is gone has changed."""
    function = strongly(function)
    if function is None or function.__code__ is not strongly(code):
        return False
    pairs = [((None, value), (None, old)) for value, old in zip(function.__defaults__ or (), defaults or ())]
    now = tuple((function.__kwdefaults__ or {}).items())
    return len(pairs) == len(function.__defaults__ or ()) == len(defaults or ()) and \
        len(now) == len(kwdefaults) and all(name == other and value is strongly(old) for (name, value), (other, old)
                                            in (*pairs, *zip(now, kwdefaults)))


# %%
def weak_function(facts) -> tuple:
    """facts: a function, its code, defaults, and keyword-only defaults (name, value)."""
    function, code, defaults, kwdefaults = facts
    return (weakly(function), weakly(code), defaults and tuple(map(weakly, defaults)),
            tuple((name, weakly(value)) for name, value in kwdefaults))


@guard_kind("FUNCTION", lambda g: f"{strongly(g.expected[0]).__qualname__} has the same code and defaults", weak_function,
       lambda g: [(WATCHED, g.expected[0])])
def function_facts(g, x, const):
    """No source; expected: a function that was inlined, with what `weak_function` takes."""
    return [Condition(f"__function_has({', '.join(map(const, g.expected))})",
                      lambda v: f"the code or a default of {short(strongly(g.expected[0]))} was replaced")]


@guard_kind("FUNCTION_CODE", lambda g: f"{g.source} is the same function", lambda f: weakly(getattr(f, "__code__", f)))
def function_code(g, x, const):
    return [Condition(f"{x}.__code__ is {name_of(g.expected, const)}",
                      lambda v: f"{g.source} is another function: {short(v)}")]


@guard_kind("GLOBALS", lambda g: f"the function has the globals of {g.source or getattr(strongly(g.expected), '__name__', None)}",
       weakly)
def same_globals(g, x, const):
    """That the function being called has the globals of `expected`, a module or a function, or without it
    those of the function that the source reads. Functions of equal code may have others."""
    owner = x if g.expected is None else name_of(g.expected, const)
    name = "__dict__" if isinstance(strongly(g.expected), types.ModuleType) else "__globals__"
    return [Condition(f"{owner}.{name} is __G", lambda v: "the function has other globals")]


# %% [markdown]
# **Classes.** Calling `obj.method()` finds `method` in a dictionary of the class or of a base. Programs do
# replace methods (`Model.forward = patched`), and a class may gain a property that shadows an instance's
# attribute. So every search along the bases is guarded, also one that found nothing.

# %%
MISSING = object()


def class_lookup(cls: type, name: str):
    """The attribute as it lies in the dictionary of the first class that has it, or MISSING."""
    for base in cls.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return MISSING


def slot(real, name: str):
    """What a slot (`__slots__`) of an object holds, or an AttributeError. No code of the program is run."""
    return class_lookup(type(real), name).__get__(real)


def slot_is_empty(real, name: str) -> bool:
    try:
        slot(real, name)
    except AttributeError:
        return True
    return False


@guard_kind("EMPTY_SLOT", lambda g: f"the slot {g.expected!r} of {g.source} is empty")
def empty_slot(g, x, const):
    return [Condition(f"__slot_is_empty({x}, {g.expected!r})",
                      lambda v: f"the slot {g.expected!r} of {g.source} holds something now")]


@guard_kind("EMPTY_CELL", lambda g: f"{g.source} is empty")
def empty_cell(g, x, const):
    return [Condition(f"{x} == __new_cell()", lambda v: f"{g.source} holds something now")]


# %% [markdown]
# Where a loop is left, its iterator dies. That runs code of the program if it is a generator, and an `enumerate` or a `zip` may hold one.

# %%
HOLD_OTHERS = (tuple, type(iter(())), enumerate, zip, map, filter, reversed)


def holds_others(real) -> bool:
    """Whether what dies with `real` is not known by its type."""
    return is_a(real, HOLD_OTHERS) or module_name(type(real)) == "itertools"


def runs_code_at_death(real) -> bool:
    """Whether dropping an object may run code of the program: a suspended generator, or what takes items from one, or a `__del__`."""
    if is_a(real, (types.GeneratorType, types.CoroutineType)) or hasattr(type(real), "__del__"):
        return True
    return holds_others(real) and any(map(runs_code_at_death, gc.get_referents(real)))


@guard_kind("DIES_QUIETLY", lambda g: f"{g.source} holds no generator and nothing with a `__del__`")
def dies_quietly(g, x, const):
    return [Condition(f"not __runs_code_at_death({x})", lambda v: f"{g.source} holds a generator or something with a `__del__` now")]


# %% [markdown]
# Three questions about a class have a guard each. Does it still have the attribute that was found, or none where none was? Does it
# still derive from the same classes, which `isinstance` asked? And is what lies there, if it is data such as a counter, still of that type?

# %%
def class_has(cls, name: str, found) -> bool:
    """Whether the class still has this attribute; both as `weakly` and `weakly_found` give them."""
    cls = strongly(cls)
    return cls is not None and is_found(class_lookup(cls, name), found)


def looks_of_class(g) -> list[tuple]:
    """A property takes no weak reference, and may not be held, since its functions lead to the class: the class has to be as it is."""
    cls, name, found = g.expected
    if type(found) is Made and found.parts:
        return [(WATCHED, cls)]
    return [(MEMBER, (cls, (name,) if is_any(found) else name))]


@guard_kind("CLASS_ATTR", lambda g: f"{strongly(g.expected[0]).__qualname__}.{g.expected[1]} is {in_class(g.expected[2])}",
       lambda facts: (weakly(facts[0]), facts[1], weakly_found(facts[2])), looks_of_class)
def class_attr(g, x, const):
    """No source; expected: (class, name, what `class_lookup` finds). Of data, such as a counter, which is read like an attribute of an
    object, and guarded by itself, only the type (`any_of`)."""
    cls, name, found = g.expected
    return [Condition(f"__class_has({const(cls)}, {name!r}, {const(found)})",
                      lambda v: f"the attribute {name!r} of {short(strongly(cls))} was set, replaced or "
                                "removed")]


def in_class(found) -> str:
    return one(strongly(found.type).__qualname__) if is_any(found) else "what it was"


def is_any(found) -> bool:
    """Whether it is from `any_of`."""
    return type(found) is Made and not found.parts


def class_derives(cls, bases) -> bool:
    """Whether the class still has these bases, in this order; all as `weakly` gives them."""
    cls = strongly(cls)
    return cls is not None and len(cls.__mro__) == len(bases) and all(base is strongly(old) for base, old in zip(cls.__mro__, bases))


@guard_kind("BASES", lambda g: f"{strongly(g.expected[0]).__qualname__} has the bases that it had",
       lambda facts: (weakly(facts[0]), tuple(map(weakly, facts[1]))),
       lambda g: [(MEMBER, (g.expected[0], number)) for number in range(len(g.expected[1]) + 1)])
def class_bases(g, x, const):
    """No source; expected: (class, its `__mro__`), for who asked whether it derives from another."""
    cls, bases = g.expected
    return [Condition(f"__class_derives({const(cls)}, {const(bases)})", lambda v: f"the bases of {short(strongly(cls))} were replaced")]


def class_leads_to(cls, subclasses) -> bool:
    """Whether these are the classes derived from it, in this order; all as `weakly` gives them."""
    found = type.__subclasses__(strongly(cls) or object)
    return len(found) == len(subclasses) and all(one is strongly(old) for one, old in zip(found, subclasses))


@guard_kind("SUBCLASSES", lambda g: f"{strongly(g.expected[0]).__qualname__} has the subclasses that it had",
       lambda facts: (weakly(facts[0]), tuple(map(weakly, facts[1]))))
def class_subclasses(g, x, const):
    """No source; expected: (class, its `__subclasses__()`)."""
    cls, subclasses = g.expected
    return [Condition(f"__class_leads_to({const(cls)}, {const(subclasses)})",
                      lambda v: f"the subclasses of {short(strongly(cls))} are others")]


# %% [markdown]
# **Identity of two.** Two arguments may be the *same* tensor, or the same list. A graph traced with two different ones reads the
# second after writing the first and sees no change, so identity among what was found is part of what was
# assumed: for tensors and objects of a class of which one was written to, or that the program told apart.
# `NOT_ALIASED` takes one other source or a tuple of them; all are compared at once by the size of a set.

# %%
def others(g) -> tuple:
    """The further sources of ALIASED and NOT_ALIASED."""
    return g.expected if isinstance(g.expected, tuple) else (g.expected,)


def held_together(g) -> list[tuple]:
    return [(HELD, source) for source in (g.source, *others(g))]


@guard_kind("ALIASED", lambda g: f"{g.source} and {g.expected} are one object", looks=held_together)
def aliased(g, x, const):
    return [Condition(f"{x} is {const.read(g.expected)}",
                      lambda v: f"{g.source} and {g.expected} are not the same object now")]


@guard_kind("NOT_ALIASED", lambda g: f"{g.source} is another object than {', '.join(map(str, others(g)))}", looks=held_together)
def not_aliased(g, x, const):
    first, *more = others(g)
    if not more:
        return [Condition(f"{x} is not {const.read(first)}",
                          lambda v: f"{g.source} and {first} are the same object now")]
    ids = ", ".join(f"id({text})" for text in (x, *map(const.read, others(g))))
    names = [str(source) for source in (g.source, *others(g))]
    return [Condition(f"len({{{ids}}}) == {len(names)}",
                      lambda v: f"two of {short(names)} are the same object now")]


# %% [markdown]
# **Sizes.** A branch on a symbolic size, `if n % 8 == 0`, was answered for the traced size. The guard is
# the predicate itself: its text over symbol names, and the source that each symbol is read from.

# %%
def predicate_in_words(g) -> str:
    where = ", ".join(f"{name} is {source}" for name, source in g.expected[1] if name != str(source))
    return " where ".join(filter(None, (g.expected[0], where)))


@guard_kind("SIZE", predicate_in_words)
def size(g, x, const):
    """expected: (predicate text, ((symbol, Source), ...)), e.g. ("s0 % 8 == 0", (("s0", SizeSource(x, 0)),))."""
    predicate, symbols = g.expected
    where = ", ".join(f"{name} = {source}" for name, source in symbols)
    reads = {name: const.read(source) for name, source in symbols}
    text = re.sub(r"[A-Za-z_]\w*", lambda m: reads.get(m.group(), m.group()), predicate)
    return [Condition(f"({text})", lambda v: f"size guard failed: {predicate}" + (f" with {where}"
                                                                                  if where else ""))]
