# %% [markdown]
# # Keys
#
# The dictionary that stands for one of the program is itself a Python dictionary, with *real* Python keys. Which key a value has
# decides what is found under it, and each look is a question that later calls have to answer alike.
#
#     def looked_up(x, table, part):
#         if "bias" in table:
#             return x + table["bias"]
#         return x * table[part]
#
# Here `table` is `{p: 2.0, "scale": 3.0}`, and `part` is the same `p`, an object of a class `Part` that has no `__hash__` of its own. The
# graph is a multiplication by 2, for every call in which
#
#     table is a dict
#     table has no key 'bias'
#     part is a Part
#     part is a key of table
#     table[part] == 2.0
#     Part.__hash__ is what it was
#
# The table may get further keys, and lose `scale`: nobody has looked for that. It may be another table, with another part: both are
# asked for as the program does it. The last line says that objects of this class are still told apart by identity.
#
# Constants are their own keys, but for a NaN, which is not equal to itself and is found where it is the same object: for Python to see.
# Objects that hash by identity are keyed by it (`ByIdentity`).

# %%
import collections
import enum
import operator
import types

import torch

from ..ch02_guards.identity import is_a
from ..ch02_guards.sources import ConstantSource, DictGetSource, NthSource, Source
from .effects import effect_free
from .exceptions import user_error
from .lookup import captures, lookup, native_new, python_method
from .tracer import call, constant_source, guard, unsupported
from .values import (
    AbstractValue, ByIdentity, ByValue, CONSTANT_TYPES, Const, DictVal, FuncVal, Identity, Lazy, ListVal, MAY_BE_NAN, ObjVal, SetVal,
    SymVal, TensorVal, TupleVal, const, describe, is_identity, is_unseen)
from .wrap import is_fixed, realize, wrap


def key_of_real(tx, key, source=None):
    if type(key) in (*CONSTANT_TYPES, torch.Size):
        return key
    if is_a(key, (type, enum.Enum, types.FunctionType, types.BuiltinFunctionType)) and is_fixed(key):
        return key
    if type(key) is tuple:
        return tuple(key_of_real(tx, k) for k in key)
    if type(key) is frozenset and all(map(is_plain_key, key)):
        return key
    if is_a(key, torch.Tensor) or hashes_by_identity(type(key)):
        return ByIdentity(key, id(key))
    if python_method(type(key), "__hash__"):
        return value_key(tx, wrap(tx, key, source))
    unsupported(tx, f"a dictionary key of type {type(key).__qualname__}")


# %% [markdown]
# The rest are keys that are not that simple. An object with a `__hash__` and an `__eq__` of its own is a key whose
# hash must be computed by the program's code, so `value_key` asks it, by tracing the call: more often than Python would, so it may change
# nothing. `key_of` gives the key of a value of the trace, for a subscript such as `d[k]`. Here constants, tuples and real objects are
# their own keys, and what the trace has made itself is a key by identity. `value_of_key` is the way back: a key knows its value, or `wrap`
# finds it (`stand_for`).

# %%
def hashes_by_identity(cls) -> bool:
    return lookup(cls, "__hash__") is object.__hash__


def value_key(tx, value) -> ByValue:
    """The key for an object with a hash and an equality of its own, which are asked as a program would."""
    def ask(function, *args):
        with effect_free(tx, "a __hash__ or __eq__ of a key"):
            return call(tx, wrap(tx, function), args)

    def equal(value, key):
        other = value_of_key(tx, key)
        return value is other or ask(bool, ask(operator.eq, value, other)).value
    if is_identity(hashed := ask(hash, value)):
        unsupported(tx, "a hash that depends on an address")          # so would the order of a set
    return ByValue(value, hashed.value, equal)


def value_of_key(tx, key) -> AbstractValue:
    """The value that has this key."""
    real = key.value if type(key) in (ByIdentity, ByValue) else key
    if is_a(real, AbstractValue):
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
        if isinstance(key := value.value, MAY_BE_NAN) and key != key:
            unsupported(tx, "a NaN as a dictionary key, which is found if it is the same object")
        return key
    if type(value) is TupleVal:
        inside = [part for key in among if isinstance(key, tuple) for part in key]
        parts = [key_of(tx, realize(tx, item), inside) for item in value.items]
        return stand_for(tx, native_new(value.cls)(value.cls, parts), value) if parts else ()
    if type(value) in (ObjVal, TensorVal) and value.real is not None:
        captures[-1].told_apart.add(value.cls)
        return key_of_real(tx, value.real, value.source)
    if type(value) is SetVal and value.cls is frozenset:
        return stand_for(tx, frozenset(value.keys), value)
    if type(value) in (TensorVal, FuncVal) or type(value) is ObjVal and hashes_by_identity(value.cls):
        return ByIdentity(value, id(value))
    if type(value) is ObjVal and python_method(value.cls, "__hash__"):
        return value_key(tx, value)
    refuse_unhashable(value)
    unsupported(tx, f"{describe(value)} as a dictionary key")


def key_sought(tx, value: AbstractValue, among):
    """The same for what a set is asked for, which may be a set: it is looked for as a frozen one."""
    return key_of(tx, SetVal(keys=value.keys, cls=frozenset) if type(value) is SetVal else value, among)


def refuse_unhashable(value):
    if value.cls.__hash__ is None:
        user_error(TypeError, f"unhashable type: '{value.cls.__name__}'")


# %% [markdown]
# `key_in` is the look-up. A key that is compared by identity raises a question for later calls in both outcomes: does the dictionary have
# it? If a source leads to the object and another to the dictionary, that is the guard (`source_of_key`), and the item is read at whatever
# object is found then. So a step of an optimizer, whose state lies under its parameters, serves another model with another optimizer, too.
#
# That is enough as long as nobody looks at the keys in another way. `d[p] = 1` and a loop over `d.values()` give another result for another
# `p`, though both are in it. Then, and where nothing leads to the object, objects are compared (`tell_keys_apart`). Found: the object that
# is looked for must be that very object again. Not found: it must be none of the objects in the keys. Objects to which a source leads are
# guarded when they are wrapped; for the others the guard names them as constants.

# %%
def key_in(tx, dictionary: DictVal, value: AbstractValue):
    """The key under which `value` is in the dictionary, or would be. An object in it that is found is guarded to be that very
    object (`wrap` does that), one that is not found to be none of those in keys that nothing else leads to."""
    if dictionary.of_hooks:
        guard_keys(tx, dictionary)
    key = key_of(tx, value, dictionary.items)
    if (source := source_of_key(tx, dictionary, key)) is not None:
        if key not in dictionary.asked:
            guard(tx, source, "KEY_OF", (dictionary.source, key.value in dictionary.real))
            dictionary.asked[key], item = dictionary.items.get(key, (None, None))
            if type(item) is Lazy:
                item.source = DictGetSource(dictionary.source, source)
        return key
    if isinstance(key, (ByIdentity, tuple)):
        tell_keys_apart(tx, dictionary)
    if isinstance(key, (ByIdentity, tuple)) and key in dictionary.items:
        key_of(tx, realize(tx, dictionary.items[key][0]))
    elif objects := objects_in_key(key):
        known = {id(o): constant_source(tx, o) for o in objects_in_key(tuple(dictionary.items)) if source_of_object(tx, o) is None}
        for o in objects if known else ():
            guard(tx, source_of_object(tx, o), "NOT_ALIASED", tuple(known.values()))
    return key


def source_of_key(tx, dictionary: DictVal, key) -> Source | None:
    """What leads to the object in a key, if the dictionary of the program can be asked for it."""
    if type(key) is not ByIdentity or dictionary.source is None or type(dictionary.real) is not dictionary.cls:
        return None
    source = None if isinstance(key.value, AbstractValue) else source_of_object(tx, key.value)
    return None if isinstance(source, ConstantSource) or dictionary.keys_guarded or dictionary.asked is None else source


def is_asked(dictionary: DictVal, key) -> bool:
    """Whether the dictionary was only asked for this key, so that nobody knows where it lies."""
    return key in (dictionary.asked or ())


def tell_keys_apart(tx, dictionary: DictVal):
    """Somebody looks at keys in another way. Which of them those were that were asked for matters from now on."""
    asked, dictionary.asked = dictionary.asked, None
    for key, known in (asked or {}).items():
        if known is not None and key.value in dictionary.real:
            key_of(tx, realize(tx, known))


def objects_in_key(key) -> list:
    """The real objects in a key that are told apart by identity."""
    if isinstance(key, tuple):
        return [o for part in key for o in objects_in_key(part)]
    return [key.value] if type(key) is ByIdentity and not isinstance(key.value, AbstractValue) else []


def source_of_object(tx, real) -> Source | None:
    return tx.objects.tracked[id(real)].source if id(real) in tx.objects.tracked else None


# %% [markdown]
# Then what a program has learned about all keys is guarded. `guard_keys` is for somebody who looked at
# all of them: the length of a list, the keys of a dictionary in order. `guard_missing` is for somebody who found
# nothing: the dictionary may change as it likes, as long as this one key stays away. For `guard_found` it must stay.

# %%
def guard_keys(tx, value: ListVal | DictVal):
    """The program depends on how many items of a list there are, or which keys of a dictionary, in which order."""
    if not value.keys_guarded and value.real is not None and value.source is not None:
        if type(value) is DictVal:
            tell_keys_apart(tx, value)
        value.keys_guarded = True
        if type(value) is ListVal:
            kind = "DEQUE_LENGTH" if value.cls is not list else "LENGTH" if type(value.real) is list else "BASE_LENGTH"
            guard(tx, value.source, kind, value.cls.__len__(value.real))
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


def is_readable(key) -> bool:
    """Whether a key can be written down: a text, a whole number, a tuple of such."""
    return type(key) in (str, bytes, int, bool, type(None)) or type(key) in (tuple, torch.Size) and all(map(is_readable, key))


def written_down(key):
    return tuple(key) if type(key) is torch.Size else key


def guard_found(tx, value: DictVal, key):
    if is_asked(value, key):
        return
    if value.source is None or value.keys_guarded or type(value.real) is not value.cls or not is_readable(key) or key not in value.real:
        return guard_keys(tx, value)
    guard(tx, value.source, "HAS_KEY", written_down(key))


def guard_missing(tx, value: DictVal, key):
    if value.real is not None and value.source is not None and not value.keys_guarded and not is_asked(value, key):
        if value.cls.__contains__(value.real, key):
            return                               # deleted by the trace itself
        if is_readable(key):
            guard(tx, value.source, "NO_KEY" if type(value.real) is value.cls else "BASE_NO_KEY", written_down(key))
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
