# %% [markdown]
# # Side effects: what changed
#
# The traced program writes to what existed before the call: lists, dictionaries, sets, objects, cells, global
# variables. None of that may change while it is traced; what changes is the value that stands for it. At the
# end somebody has to say what is different, so that the generated function can make the same difference.
#
# There is one way to know. Before the first write to a value, `touch` keeps a copy of what it holds. When the
# trace is over, what it holds then is compared with the copy, and the epilogue writes a statement for each
# difference:
#
#     the program                 before        after                 the statement
#     log.append(y)               a, b          a, b, y               log.extend([y])
#     l[1] = y; l.pop()           a, b, c       a, y                  l[1:3] = [y]
#     d["n"] += 1; del d["k"]     k: v, n: 1    n: 2                  d.pop("k"); d["n"] = 2
#     x, y = l; l[:] = [y, x]     a, b          b, a                  l[0:2] = [l1, l0]
#     l.append(y); l.pop()        a, b          a, b
#
# The first three as one function, and the statements that were generated for it (`__out[0]` is `y`, and `__K[0]` is `dict.pop`, which
# deletes a key that may be gone):
#
# ```python
# def noted(log, l, d, x):
#     y = x + 1
#     log.append(y)
#     l[1] = y
#     l.pop()
#     d["n"] += 1
#     del d["k"]
#     return y
# ```
#
# ```python
# log.extend([__out[0], ])
# l[1:3] = [__out[0], ]
# __K[0](d, 'k', None)
# d['n'] = 2
# return __out[0]
# ```
#
# What is compared is which values there are, not what they are equal to. An item that nobody looked at is the
# same `Lazy` before and after, and one that was read is the value that its `Lazy` has become. So the
# comparison asks nothing of the program's objects, and needs no guard: `log` above may have any length in the
# next call, since the statement is right for all of them.
#
# An object or the namespace of a Python module has many attributes, of which a program writes few. They are
# not copied. What is written lies in front of the object, in `attrs`, and is the difference.

# %%
import contextlib
import warnings
from dataclasses import dataclass, field

from ..ch01_graphs.fake import storage_key
from ..errors import Unsupported
from .values import BIRTHS, CellVal, DictVal, Lazy, ListVal, ObjVal, SetVal, AbstractValue, describe, like


@dataclass(eq=False)
class Effects:
    """changed: id of a value -> the value, and what it held before. calls: those that are made after the graph has run,
    (function, values of its arguments); calls_before: and before anything is written. undo: functions that take back what was done
    ahead of the graph. ahead: how it is done in another call, (source, function of what is found there that returns such functions).
    pure_since: when the code began that may change only what it has made, or 0. region: the number of the checkpoint that the program
    is in, or 0. generators: those that have begun."""
    changed: dict = field(default_factory=dict)
    calls: list = field(default_factory=list)
    calls_before: list = field(default_factory=list)
    undo: list = field(default_factory=list)
    ahead: list = field(default_factory=list)
    generators: list = field(default_factory=list)
    pure_since: int = 0
    region: int = 0


def touch(tx, value: AbstractValue):
    """`value` is about to change."""
    effects = tx.effects
    existed = value.real is not None
    if effects.pure_since and (existed or value.born < effects.pure_since):
        raise Unsupported(f"a change of {describe(value)} in code that is not run exactly once")
    if not existed or id(value) in effects.changed:
        return
    if value.source is None and type(value) is not ObjVal:
        raise Unsupported(f"changing {describe(value)} that belongs to a library")
    effects.changed[id(value)] = value, SNAPSHOT[type(value)](value)


def set_snapshot(value: SetVal) -> set:
    """The program's own set, in place of which a copy is changed from now on."""
    before, content = value.keys, like(value.keys)
    if content is None:
        raise Unsupported("changing a set whose copy would have another order")
    value.keys = set(content)
    return before


SNAPSHOT = {ListVal: lambda value: value.items.copy(), DictVal: lambda value: value.items.copy(), SetVal: set_snapshot,
            CellVal: lambda value: value.content, ObjVal: lambda value: None}


def changed(tx, real) -> AbstractValue | None:
    """The value that stands for a real object, if the program has written to it."""
    value = tx.objects.tracked.get(id(real))
    return value if id(value) in tx.effects.changed else None


# %% [markdown]
# ## The difference
#
# Of a sequence, what lies between the common beginning and the common end is replaced. Of a dictionary, whose
# keys are in the order in which they were written, those go that are not in their old order among the rest, or that are other
# objects than before (`True` for `1`): they were deleted, and perhaps written again.

# %%
def settled(item):
    """What an item has become."""
    return item.value if type(item) is Lazy and item.value is not None else item


# %% tags=["exercise:list-effects"]
def difference_of_lists(before, after) -> tuple:
    """(start, stop, items): `before[start:stop] = items` gives `after`, and no shorter assignment of this form does. Items are the same
    if they are one object, once both are `settled`."""
    before, after = ([settled(item) for item in items] for items in (before, after))
    shorter = min(len(before), len(after))
    start = next((i for i in range(shorter) if before[i] is not after[i]), shorter)
    end = next((i for i in range(shorter - start) if before[-1 - i] is not after[-1 - i]), shorter - start)
    return start, len(before) - end, after[start:len(after) - end]


# %%
def difference_of_dicts(before, after) -> tuple:
    """(keys to delete, items to write afterwards). The values are pairs of a key and an item, which are written, too."""
    places, items = {id(key): i for i, key in enumerate(before)}, [item for _, item in before.values()]
    last, kept = -1, {}
    for key, (_, item) in after.items():                # by the key's `id`: to compare keys may be to trace a method of the program
        place = places.get(id(key), -1)
        if place <= last:
            break
        last, kept[id(key)] = place, settled(item) is settled(items[place])
    return [key for key in before if id(key) not in kept], [pair for key, pair in after.items() if not kept.get(id(key))]


# %% [markdown]
# ## Code that must not change anything
#
# The backward of an autograd function (`library/regions.py`) runs later, perhaps never; a checkpointed function runs
# twice; one with an `lru_cache` perhaps not at all. What such code changes outside of itself cannot be part
# of the one epilogue of this call, so there must be nothing. Objects that the trace makes are numbered; a
# change of one that is older than the region ends the graph, and eager does it.

# %%
def written_storages(tx, versions: dict | None = None) -> set:
    """Keys of the storages that the trace has written to. versions: id of a value -> its version to begin
    with, where that is not the one it was made with. `x.data` has a version counter of its own, and the
    storage of x."""
    versions = versions or {}
    return {storage_key(v.fake) for v in tx.tensors.of_fake.values()
            if v.fake._version > versions.get(id(v), v.version)}


@contextlib.contextmanager
def effect_free(tx, what: str):
    """Code traced inside may change only what it has made."""
    calls = len(tx.effects.calls)
    known = {id(v): (v, v.fake._version) for v in tx.tensors.of_fake.values()}
    since, tx.effects.pure_since = tx.effects.pure_since, next(BIRTHS)
    try:
        yield
    finally:
        tx.effects.pure_since = since
    outside = {storage_key(v.fake) for v in tx.tensors.of_fake.values()
               if v.real is not None or id(v) in known}
    written = outside & written_storages(tx, {key: version for key, (_, version) in known.items()})
    if written or calls != len(tx.effects.calls):
        raise Unsupported(f"{what} with a side effect")


# %% [markdown]
# ## Before the graph and after it
#
# Two kinds of effects are not differences between values. A call that nobody waits for, such as a warning, is made by the
# epilogue (`call_later`). And now and then an object of the program's has to be there before the graph runs, for instance the
# state that an optimizer makes at its first step (chapter 12). It is made while tracing, which is before all else that
# the call does, so whoever makes it adds a function to `undo`. That list is shared by all traces of a call, since a frame with a break
# is traced twice; if the call comes to nothing, whoever made it (`frames.py`) calls what is in it, the latest first. What a later call
# finds missing again is added to `ahead`.

# %%
def call_later(tx, function, *args: AbstractValue) -> None:
    """Let the epilogue call `function`, which is ours, with `args`."""
    tx.effects.calls.append((function, args))


def kept_warnings() -> list | None:
    """The list into which `warnings.catch_warnings(record=True)` puts what is warned of now. Who reads it sees when a warning is given."""
    return getattr(warnings._showwarnmsg_impl, "__self__", None)
