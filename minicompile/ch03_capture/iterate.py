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
# The cases of `iterate` follow the kinds of values. What the trace knows item by item is iterated over item by
# item. A tensor becomes its rows by one `unbind`. An object of the program is asked for its `__iter__`, which is
# inlined, or by indices 0, 1, 2 ..., as Python does where a class has only `__getitem__`.

# %%
import collections
import enum
import itertools

import numpy

from ..ch02_guards.sources import CallSource
from .attributes import special
from .interpreter import advance, unless_raised
from .tensors import emit, tensor_shape
from .tracer import Tracer, unsupported
from .values import (
    AbstractValue, Const, DictVal, GenVal, IterVal, ListVal, MISSING, ObjVal, SetVal, TensorVal, TupleVal, ViewVal, const, describe,
    interprets, lookup, python_method, user_error, user_errors)
from .wrap import dict_contents, entries, order_of, part, realize, wrap


def as_dict(tx: Tracer, container: AbstractValue, method: str) -> AbstractValue:
    """The dictionary inside an object whose class derives from dict and does not override `method`; another
    value as it is."""
    if type(container) is ObjVal and not python_method(container.cls, method):
        return dict_contents(tx, container) or container
    return container


def iterate(tx: Tracer, value: AbstractValue) -> AbstractValue:
    """iter(value)"""
    value = as_dict(tx, value, "__iter__")
    kind = type(value)
    if kind in (IterVal, GenVal):
        return value
    if kind is ListVal and value.cls is collections.deque:
        first, it = iter(entries(tx, value)), natively(iter(value.items))
        return IterVal(it=(realize(tx, item) for item in it), over=value, unchanged=lambda: may_go_on(first))
    if kind in (TupleVal, ListVal):
        return IterVal(it=sequence(tx, value), over=value)
    if kind in (DictVal, ViewVal):
        view = value if kind is ViewVal else ViewVal(of=value)
        keys = list(entries(tx, view.of))
        return IterVal(it=entries_of(tx, view), over=value, unchanged=lambda: list(view.of.items) == keys)
    if kind is SetVal:
        keys = list(order_of(tx, value))
        return IterVal(it=members(value), over=value,
                       unchanged=lambda: list(value.order) == keys)
    if kind is Const:
        if not hasattr(value.value, "__iter__"):
            user_error(TypeError, f"'{type(value.value).__name__}' object is not iterable")
        return IterVal(it=(wrap(tx, item) for item in value.value), over=value)
    if kind is TensorVal:
        if value.fake.dim() == 0:
            unsupported(tx, "iterating over a 0-d tensor")
        return IterVal(it=iter(emit(tx, "call_method", "unbind", [value], {}).items))
    if kind is ObjVal and isinstance(value.real, enum.EnumMeta):
        return IterVal(it=(wrap(tx, item) for item in list(value.real)))
    iterator = special(tx, value, "__iter__")
    if iterator is not None:
        return iterator
    if kind is ObjVal and not hasattr(value.cls, "__iter__") and hasattr(value.cls, "__getitem__"):
        return IterVal(it=by_index(tx, value))
    unsupported(tx, f"iterating over {describe(value)}")


# %% [markdown]
# ## A container that changes meanwhile
#
# Python has an answer for each kind. A list that grows during its loop has more turns. A dictionary, a set
# or a deque that changes its size raises a `RuntimeError`, at the next turn and not before. Values are
# kept in Python's own containers, so most of these answers come from Python's own iterators (`natively`).
# What they say is then raised in the program that is being captured, where a handler may wait for it.

# %%
def sequence(tx, value, backwards=False):
    """The items of a list or tuple, which may grow or shrink meanwhile."""
    items, step = entries(tx, value), -1 if backwards else 1
    i = len(items) - 1 if backwards else 0
    while 0 <= i < len(items):
        yield realize(tx, items[i])
        i += step


def natively(iterator):
    """Python's own iterator over a container of values. What it says about a change meanwhile is for the
    program."""
    with user_errors():
        yield from iterator


def may_go_on(iterator) -> bool:
    """Whether Python would not refuse the next item, because of a change."""
    try:
        next(iterator, None)
        return True
    except RuntimeError:
        return False


def members(value):
    """The items of a SetVal. The first change may replace the `order` that is iterated over by a copy."""
    order = value.order
    for key in natively(iter(order)):
        if len(value.order) != len(order):
            break
        if key in value.items:
            yield value.items[key]
    if len(value.order) != len(order):
        user_error(RuntimeError, "Set changed size during iteration")


def ordered_entries(value, order):
    """The [key, value] pairs of an OrderedDict. Its iterator knows the next key in advance, and after the
    last one does not look any more."""
    keys = list(value.items)
    for entry in list(order(value.items.values())):
        if list(value.items) != keys:
            user_error(RuntimeError, "OrderedDict mutated during iteration")
        yield entry


def entries_of(tx, view, order=iter):
    """What `order`, which is `iter` or `reversed`, gives for a view of a dictionary."""
    wanted = {"keys": (0,), "values": (1,), "items": (0, 1)}[view.kind]
    ordered = issubclass(view.of.cls, collections.OrderedDict)
    for entry in ordered_entries(view.of, order) if ordered else natively(order(view.of.items.values())):
        shown = [realize(tx, entry[i]) for i in wanted]
        yield TupleVal(items=shown) if view.kind == "items" else shown[0]


def by_index(tx, value):
    """Python's oldest protocol: `value[0]`, `value[1]`, ... until an IndexError."""
    for i in itertools.count():
        item = unless_raised(IndexError, lambda: special(tx, value, "__getitem__", const(i)))
        if item is None:
            return
        yield item


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
        return item
    if type(iterator) is GenVal:
        return advance(tx, iterator)
    if type(iterator) is ObjVal and python_method(iterator.cls, "__next__"):
        return unless_raised(StopIteration, lambda: special(tx, iterator, "__next__"))
    unsupported(tx, f"next() of {describe(iterator)}")


PLAIN_ITERATORS = (type(iter([])), type(iter(())), type(reversed([])))


def emptied(container):
    """An empty container of the same kind: an exhausted iterator stays so whatever becomes of its own."""
    kind = type(container)
    if kind is ViewVal:
        return ViewVal(of=emptied(container.of), kind=container.kind)
    if kind in (ListVal, TupleVal):
        return kind(items=type(container.items)()) if container.cls in (list, tuple) else None
    if kind is SetVal:
        return SetVal(cls=container.cls)
    if kind is DictVal and container.cls in (dict, collections.OrderedDict):
        return DictVal(cls=container.cls)
    if kind is Const and type(container.value) in (str, bytes):
        return const(type(container.value)())
    return None


# %% [markdown]
# ## All turns at once
#
# `list(x)`, `a, b = x` and `f(*x)` want every value. The program's iterator may never end, which in eager
# code is an endless loop that a user can interrupt. Here it counts against the limit of instructions.

# %%
@interprets
def values_of(tx: Tracer, value: AbstractValue):
    """A Python generator over the values of an iterable value."""
    iterator = iterate(tx, value)
    while (item := next_value(tx, iterator)) is not None:
        tx.ops += 1
        if tx.ops > tx.options.max_ops:
            unsupported(tx, "an iteration that does not end")
        yield item


def unpack(tx: Tracer, value: AbstractValue) -> list:
    """list(value), as a Python list of values."""
    if type(value) is TupleVal or type(value) is ListVal:
        return [realize(tx, item) for item in entries(tx, value)]
    return list(values_of(tx, value))


def length(tx: Tracer, value: AbstractValue) -> AbstractValue:
    """len(value)"""
    value = as_dict(tx, value, "__len__")
    kind = type(value)
    if kind is SetVal:
        return const(len(value.items))
    if kind in (TupleVal, ListVal, DictVal, ViewVal):
        return const(len(entries(tx, value.of if kind is ViewVal else value)))
    if kind is TensorVal:
        if value.fake.dim() == 0:
            user_error(TypeError, "len() of a 0-d tensor")
        return tensor_shape(tx, value).items[0]
    if kind is Const and hasattr(value.value, "__len__"):
        return const(len(value.value))
    if kind is ObjVal and isinstance(value.real, enum.EnumMeta):
        return const(len(value.real))
    if value.cls is numpy.ndarray and value.real.ndim:
        return wrap(tx, len(value.real), part(CallSource, value.source, "__len__"))
    result = special(tx, value, "__len__")
    if result is None and lookup(value.cls, "__len__") is MISSING:
        user_error(TypeError, f"object of type '{value.cls.__name__}' has no len()")
    return result or unsupported(tx, f"len() of {describe(value)}")
