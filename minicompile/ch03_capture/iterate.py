# %% [markdown]
# # Iteration
#
# A `for` loop is unrolled: the iterator runs at compile time, once per turn, and each turn's operations are
# appended to the graph. An `IterVal` holds a Python generator that yields values. It reads its container
# lazily, so a program that appends to a list while looping over it sees what Python would show.
#
# `for layer in self.layers: x = layer(x)` over twelve layers records twelve layers. The loop itself is not in the
# graph, and what decided about its turns is in the guards: the length of the list, and which modules lie in it.
#
# Why is the iterator not simply Python's own, as in [tiny](chapter:tiny.3)? Because of what may become of it. A
# graph break in the third turn has to hand a real iterator to the rest of the function, one that has two items
# behind it. So an `IterVal` keeps, beside the generator, the container it goes `over` and how many items were
# `taken`. From those the epilogue makes a new iterator and advances it. That is only right if the real one would
# have come as far: had the program removed a key from a dictionary meanwhile, Python's iterator would raise at its
# next turn, and the new one would not notice. `unchanged` asks for that, and where the answer is no, the iterator
# is not handed over.
#
# What the trace knows item by item is iterated over item by item, by a row of `METHODS` for each kind
# (`library/iterators.py`). An object of the program is asked for its `__iter__`, which is inlined, or by indices 0, 1,
# 2 ..., as Python does where a class has only `__getitem__`.

# %%
import collections
import itertools

from .exceptions import interprets, user_error, user_errors
from .interpreter import advance, unless_raised
from .keys import entries
from .lookup import MISSING, lookup, python_method
from .protocol import operate, special
from .tracer import Tracer, unsupported
from .values import (
    AbstractValue, Const, DictVal, GenVal, IterVal, ListVal, ObjVal, SetVal, TupleVal, ViewVal, const, describe)
from .wrap import realize


def iterate(tx: Tracer, value: AbstractValue) -> AbstractValue:
    """iter(value)"""
    if (iterator := operate(tx, value, "__iter__")) is not None:
        return iterator
    if type(value) is ObjVal and not hasattr(value.cls, "__iter__") and hasattr(value.cls, "__getitem__"):
        return IterVal(it=by_index(tx, value), kind=type(iter(Indexed())))
    if type(value) is Const:
        user_error(TypeError, f"'{value.cls.__name__}' object is not iterable")
    unsupported(tx, f"iterating over {describe(value)}")


class Indexed:
    def __getitem__(self, index):
        raise IndexError


def by_index(tx, value):
    """Python's oldest protocol: `value[0]`, `value[1]`, ... until an IndexError."""
    for i in itertools.count():
        item = unless_raised(IndexError, lambda: special(tx, value, "__getitem__", const(i)))
        if item is None:
            return
        yield item


class natively:
    """Python's own iterator, over a container of values or of what the program gives. What it says is for the program, which may ask
    for the next item after an error; a generator would be at its end."""

    def __init__(self, iterator):
        self.iterator = iterator

    def __iter__(self):
        return self

    def __next__(self):
        with user_errors():
            item = next(self.iterator, self)
        if item is self:
            raise StopIteration
        return item


# %% [markdown]
# ## One turn
#
# `next_value` is the step that `for`, `next` and unpacking share. Three things can be asked for a next
# value: our own `IterVal`, a generator of the program, whose frame goes on to its next `yield`, and an
# object whose class has a `__next__`. An exhausted iterator stays exhausted, even if its list grows
# afterwards, so it lets go of it.

# %%
def next_value(tx: Tracer, iterator: AbstractValue) -> AbstractValue | None:
    """next(iterator), or None when it is exhausted."""
    if type(iterator) is IterVal:
        iterator.taken += 1
        item = next(iterator.it, None)
        if item is None:
            iterator.over, iterator.unchanged = emptied(iterator.over), lambda: True
            plain = iterator.over is not None or type(iterator.it) in PLAIN_ITERATORS
            iterator.it, iterator.taken = iter(()) if plain else (v for v in ()), 0
            iterator.made = iterator.made if iterator.made and iterator.made[0] in STEADY else ()
        return item
    if type(iterator) is GenVal:
        return advance(tx, iterator)
    if type(iterator) is ObjVal and python_method(iterator.cls, "__next__"):
        return unless_raised(StopIteration, lambda: special(tx, iterator, "__next__"))
    unsupported(tx, f"next() of {describe(iterator)}")


PLAIN_ITERATORS = (type(iter([])), type(iter(())), type(reversed([])))
STEADY = (zip, map, filter, enumerate, itertools.filterfalse, itertools.starmap, itertools.compress)     # at their end where their own are


def emptied(container):
    """An empty container of the same kind: an exhausted iterator stays so whatever becomes of its own."""
    kind = type(container)
    if kind is ViewVal:
        return ViewVal(of=emptied(container.of), kind=container.kind)
    if kind is Const and container.cls in (str, bytes):
        return const(container.cls())
    plain = kind is SetVal or kind in (ListVal, TupleVal, DictVal) and container.cls in (list, tuple, dict, collections.OrderedDict)
    return kind(cls=container.cls) if plain else None


# %% [markdown]
# ## All turns at once
#
# `list(x)`, `a, b = x` and `f(*x)` want every value. The program's iterator may never end, which in eager
# code is an endless loop that a user can interrupt. Here it counts against the limit of instructions.

# %%
@interprets
def values_of(tx: Tracer, value: AbstractValue):
    """A Python generator over the values of an iterable value."""
    yield from rest_of(tx, iterate(tx, value))


def rest_of(tx: Tracer, iterator: AbstractValue):
    """A Python iterator over what the program's iterator still gives."""
    @interprets
    def turn():
        tx.ops += 1
        if tx.ops > tx.options.max_ops:
            unsupported(tx, "an iteration that does not end")
        return next_value(tx, iterator)
    return iter(turn, None)


def unpack(tx: Tracer, value: AbstractValue) -> list:
    """list(value), as a Python list of values."""
    if type(value) is TupleVal or type(value) is ListVal:
        return [realize(tx, item) for item in entries(tx, value)]
    return list(values_of(tx, value))


def length(tx: Tracer, value: AbstractValue) -> AbstractValue:
    """len(value)"""
    if (found := operate(tx, value, "__len__")) is not None:
        return found
    if lookup(value.cls, "__len__") is MISSING:
        user_error(TypeError, f"object of type '{value.cls.__name__}' has no len()")
    unsupported(tx, f"len() of {describe(value)}")
