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
import gc
import itertools
import weakref

import torch

from ..ch02_guards.sources import OVER_DICTS, LocalSource, RestSource, TurnSource, rest_of_loop, sources_of_loop
from ..errors import SkipFrame
from .effects import changed
from .exceptions import interprets, user_error, user_errors
from .interpreter import advance, let_go, unless_raised
from .keys import entries
from .lookup import MISSING, lookup, python_method
from .protocol import operate, special
from .tracer import Tracer, guard, location, unsupported
from .values import (
    AbstractValue, Const, DictVal, GenVal, IterVal, Lazy, ListVal, ObjVal, SetVal, TupleVal, ViewVal, const, describe)
from .wrap import realize, wrap


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


class by_index:
    """Python's oldest protocol: `value[0]`, `value[1]`, ... until an IndexError. After another error the same index is asked for."""

    def __init__(self, tx, value):
        self.tx, self.value, self.index = tx, value, 0

    def __iter__(self):
        return self

    def __next__(self):
        item = self.value and unless_raised(
            (IndexError, StopIteration), lambda: special(self.tx, self.value, "__getitem__", const(self.index)))
        if item is None:
            self.value = None
            raise StopIteration
        self.index += 1
        return item


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
# afterwards, so it lets go of it. A `zip` does not: asked again, it asks its own iterators again. What is `STEADY` has no position but
# that of its own iterators and how many items it gave.
#
# In Python 3.11 a comprehension is a function, and where its caller runs eagerly, a frame of its own whose argument is a real iterator. A
# break at each turn would cost more than the turns do, so it runs as it is, unless it goes over modules.

# %%
def next_value(tx: Tracer, iterator: AbstractValue) -> AbstractValue | None:
    """next(iterator), or None when it is exhausted."""
    if type(iterator) is IterVal:
        iterator.made = iterator.made if iterator.made and iterator.made[0] in STEADY else ()
        item = next(iterator.it, None)
        if item is not None:
            iterator.taken += 1
        elif iterator.over is not None:
            iterator.kind, iterator.over, iterator.unchanged = iterator.cls, emptied(iterator.over), lambda: True
            iterator.it, iterator.taken = (v for v in ()) if iterator.over is None else iter(()), 0
        return item
    if type(iterator) is GenVal:
        return advance(tx, iterator)
    if type(iterator) is ObjVal and python_method(iterator.cls, "__next__"):
        return unless_raised(StopIteration, lambda: special(tx, iterator, "__next__"))
    if type(iterator) is ObjVal and iterator.source == COMPREHENDED and not any(map(has_module, rest_of_loop(iterator.real) or ())):
        raise SkipFrame("a comprehension over what its caller gives", location(tx))
    unsupported(tx, f"next() of {describe(iterator)}")


COMPREHENDED = LocalSource(".0")                 # the argument of a comprehension, which is a function in Python 3.11


PLAIN_ITERATORS = (type(iter([])), type(iter(())), type(reversed([])))
STEADY = (zip, map, filter, enumerate, itertools.filterfalse, itertools.starmap, itertools.compress,     # at their end where their own are
          itertools.count)


def emptied(container):
    """An empty container of the same kind: an exhausted iterator stays so whatever becomes of its own."""
    kind = type(container)
    if kind is ViewVal:
        of = emptied(container.of)
        return of and ViewVal(of=of, kind=container.kind)
    if kind is Const and container.cls in (str, bytes):
        return const(container.cls())
    plain = kind is SetVal or kind in (ListVal, TupleVal, DictVal) and container.cls in (list, tuple, dict, collections.OrderedDict)
    return kind(cls=container.cls) if plain else None


# %% [markdown]
# ## A loop that has begun
#
# A model's third layer of twelve breaks the graph. In the resume function behind it the iterator of `for layer in self.layers` is one of
# Python, which waits on the stack. Were the loop to break the graph at each turn because of that, nine layers would be nine graphs. So
# what it has still to give (`rest_of_loop`) is unrolled like any loop, guarded by its length and, item by item, by what is read of it.
#
# That is worth its guards only under two conditions. The loop goes over modules: what layers a model has does not change from call to
# call, as the length of a list of boxes does, and with that the version. And it has no further break: a loop of a thousand turns that
# breaks in each would have a thousand versions, one for each place, where it has one for all. So if a trace that has unrolled a loop
# stops inside of it, chapter 4 makes another one that does not (`capture_frame`).
#
# The program may hold the iterator by a name of its own, so in the end that is taken as far as the trace has come. What it goes over
# may not change meanwhile. After the last turn it may, so the iterator is taken before anything is written.

# %%
MOST_TURNS = 64
MAKE_TUPLES = (enumerate, zip, OVER_DICTS[2])


def begun_before(tx: Tracer, iterator: AbstractValue) -> AbstractValue:
    """What a `for` goes on with: the iterator, or where that is a real one of a loop around a graph break, one of the trace."""
    waits = type(iterator) is ObjVal and type(iterator.source) is LocalSource and iterator.source.local.startswith("__stack")
    if not waits or not tx.options.unrolls or tx.loop is not None:
        return iterator
    rest = rest_of_loop(iterator.real)
    if not rest or len(rest) > MOST_TURNS or not all(map(has_module, rest)):
        return iterator
    let_go(tx, iterator)
    at = RestSource(iterator.source)
    guard(tx, at, "TYPE_MATCH", list)
    guard(tx, at, "LENGTH", len(rest))
    tx.options.unrolled = True
    unrolled = IterVal(it=turns_left(tx, iterator, rest, at), kind=iterator.cls)
    tx.loop = weakref.ref(unrolled)
    return unrolled


def has_module(item) -> bool:
    return isinstance(item, torch.nn.Module) or type(item) is tuple and any(map(has_module, item))


def turns_left(tx, iterator: ObjVal, rest: list, at: RestSource):
    """The values of the turns. What the real iterator is asked for by then is asked at the end, as one call of the epilogue."""
    calls, containers = tx.effects.calls_before, [c for source in sources_of_loop(iterator.real) for c in gc.get_referents(source)]
    for turn in range(len(rest) + 1):
        if any(changed(tx, container) is not None for container in containers):
            unsupported(tx, "a loop over what has changed meanwhile")
        calls[:] = [(take, (iterator, const(turn + 1)))]
        if turn < len(rest):
            yield item_of_turn(tx, iterator.real, rest[turn], TurnSource(at, turn))


def take(iterator, turns: int):
    """Ask an iterator for so many items."""
    collections.deque(itertools.islice(iterator, turns), 0)


def item_of_turn(tx, iterator, item, source) -> AbstractValue:
    """What an iterator gives at one turn. The tuples of `enumerate`, `zip` and `items()` are made for the turn."""
    kind = type(iterator)
    if kind not in MAKE_TUPLES:
        return wrap(tx, item, source)
    inner = (None, iterator.__reduce__()[1][0]) if kind is enumerate else iterator.__reduce__()[1] if kind is zip else (None, None)
    return TupleVal(items=[Lazy(part, TurnSource(source, n)) if type(of) not in MAKE_TUPLES else
                           item_of_turn(tx, of, part, TurnSource(source, n)) for n, (of, part) in enumerate(zip(inner, item))])


# %% [markdown]
# ## All turns at once
#
# `list(x)`, `a, b = x` and `f(*x)` want every value. The program's iterator may never end, which in eager
# code is an endless loop that a user can interrupt. Here it counts against the limit of instructions.
#
# Who makes a list or a tuple asks first how long it will be (`ask_length`). The answer changes nothing, but an object of the program has
# code of its own for it, which may print, or raise.

# %%
@interprets
def values_of(tx: Tracer, value: AbstractValue, into=None):
    """A Python generator over the values of an iterable value. into: the class of what CPython gathers them in."""
    iterator = iterate(tx, value)
    asked = value.it.value if type(value) is IterVal and isinstance(value.it, by_index) else value
    if into in (list, tuple) and type(asked) is ObjVal:
        ask_length(tx, asked)
    yield from rest_of(tx, iterator)


def ask_length(tx: Tracer, value: AbstractValue) -> None:
    """As `operator.length_hint`; a TypeError says that there is no answer."""
    if unless_raised(TypeError, lambda: special(tx, value, "__len__")) is None:
        answer = unless_raised(TypeError, lambda: special(tx, value, "__length_hint__"))
        if answer is None or answer.cls is type(NotImplemented):
            return
        if answer.cls is not int or type(answer) is Const and answer.value < 0:
            unsupported(tx, f"the __length_hint__ of {describe(value)}, which is no length")


class rest_of:
    """A Python iterator over what the program's iterator still gives. After an error, and at its end, it may be asked again."""

    def __init__(self, tx: Tracer, iterator: AbstractValue):
        self.tx, self.iterator = tx, iterator

    def __iter__(self):
        return self

    @interprets
    def __next__(self):
        self.tx.ops += 1
        if self.tx.ops > self.tx.options.max_ops:
            unsupported(self.tx, "an iteration that does not end")
        if (item := next_value(self.tx, self.iterator)) is None:
            raise StopIteration
        return item


class Later:
    """An iterable value, which is asked for its iterator when Python asks for one."""

    def __init__(self, tx: Tracer, value: AbstractValue):
        self.tx, self.value = tx, value

    @interprets
    def __iter__(self):
        return rest_of(self.tx, iterate(self.tx, self.value))


def unpack(tx: Tracer, value: AbstractValue) -> list:
    """list(value), as a Python list of values."""
    if type(value) is TupleVal or type(value) is ListVal:
        return [realize(tx, item) for item in entries(tx, value)]
    return list(values_of(tx, value, list))


def sequence(tx: Tracer, value: AbstractValue) -> list:
    """The same where CPython is content with a sequence, and lists the iterator of anything else: it asks that for its iterator again."""
    return unpack(tx, value if type(value) in (TupleVal, ListVal) else iterate(tx, value))


def length(tx: Tracer, value: AbstractValue) -> AbstractValue:
    """len(value)"""
    if (found := operate(tx, value, "__len__")) is not None:
        return found
    if lookup(value.cls, "__len__") is MISSING:
        user_error(TypeError, f"object of type '{value.cls.__name__}' has no len()")
    unsupported(tx, f"len() of {describe(value)}")
