# %% [markdown]
# # Iterators
#
# What `iter(x)` and `reversed(x)` are for each kind of value. An iterator gives values, one at a time, and only an item that is asked for
# is looked at and guarded.
#
# A row of the table makes an `IterVal`, with a Python generator that yields the values (further down), the container it goes `over`, and,
# where the container may change meanwhile, `unchanged`. Strings and other constants have their items as constants again, a class that is
# an `Enum` has its members, and a tensor becomes its rows by one `unbind`. An iterator is one itself.

# %%
import collections
import functools

from ..builders import order_of
from ..calls import handles
from ..exceptions import user_error
from ..interpreter import unless_raised
from ..iterate import by_index, length, natively, unpack
from ..keys import counted, entries, value_of_key
from ..lookup import MISSING, lookup
from ..protocol import METHODS, method, operate
from ..subscripts import get_item
from ..tensors import call_tensor_method, emit
from ..tracer import unsupported
from ..values import Const, DictVal, GenVal, IterVal, ListVal, ObjVal, SetVal, TensorVal, TupleVal, ViewVal, const, plain_like
from ..wrap import realize, wrap


@METHODS.of((TupleVal, "__iter__"), (ListVal, "__iter__"))
def iterate_sequence(tx, self):
    if self.cls is collections.deque:
        first, it = iter(entries(tx, self)), natively(iter(self.items))
        return IterVal(it=map(functools.partial(realize, tx), it), over=self, unchanged=lambda: may_go_on(first))
    return IterVal(it=sequence(tx, self), over=self)


@METHODS.of((DictVal, "__iter__"), (ViewVal, "__iter__"))
def iterate_dict(tx, self):
    view = shown_by(self)
    keys = list(counted(tx, view.of))
    return IterVal(it=entries_of(tx, view), over=self, unchanged=lambda: list(view.of.items) == keys)


def shown_by(value) -> ViewVal:
    """A view itself; of a dictionary, that of its keys, which is what it gives."""
    return value if type(value) is ViewVal else ViewVal(of=value)


@method(SetVal, "__iter__")
def iterate_set(tx, self):
    keys = list(order_of(tx, self))
    return IterVal(it=members(tx, self), over=self, unchanged=lambda: list(self.keys) == keys)


@method(TensorVal, "__iter__")
def iterate_tensor(tx, self):
    if self.fake.dim() == 0:
        unsupported(tx, "iterating over a 0-d tensor")
    return IterVal(it=iter(emit(tx, "unbind", [self]).items), kind=type(iter(())))


METHODS.update(dict.fromkeys([(IterVal, "__iter__"), (GenVal, "__iter__")], lambda tx, self: self))
METHODS.update({
    (Const, "__iter__"): lambda tx, self: IterVal(it=(wrap(tx, item) for item in self.value), over=self)
    if hasattr(self.cls, "__iter__") else NotImplemented,
})


# %% [markdown]
# Backwards the same. What has no `__reversed__` of its own is reversed by its length and its items, as in Python. A list of these asks for
# the length once more (`ask_length` in `iterate.py`).

# %%
@METHODS.of((TupleVal, "__reversed__"), (ListVal, "__reversed__"))
def reverse_sequence(tx, self):
    if self.cls is not collections.deque:
        return IterVal(it=sequence(tx, self, backwards=True), kind=type(reversed([] if type(self) is ListVal else ())))
    entries(tx, self)
    return IterVal(it=map(functools.partial(realize, tx), natively(reversed(self.items))), kind=type(reversed(self.items)))


@METHODS.of((DictVal, "__reversed__"), (ViewVal, "__reversed__"))
def reverse_dict(tx, self):
    view = shown_by(self)
    entries(tx, view.of)
    return IterVal(it=entries_of(tx, view, reversed), kind=type(reversed(plain_like(view))))


METHODS[TensorVal, "__reversed__"] = lambda tx, self: call_tensor_method(tx, self, "__reversed__", [], {})


class backwards(by_index):
    """`value[index]` and so on down to 0; after any error it is at its end."""

    def __init__(self, tx, value, index: int):
        self.tx, self.value, self.index = tx, value, index

    def __next__(self):
        value, self.value = self.value, None
        item = None if value is None or self.index < 0 else unless_raised(
            (IndexError, StopIteration), lambda: get_item(self.tx, value, const(self.index)))
        if item is None:
            raise StopIteration
        self.value, self.index = value, self.index - 1
        return item


@handles(reversed)
def reverse(tx, items):
    if (iterator := operate(tx, items, "__reversed__")) is not None:
        return iterator
    if type(items) is ObjVal and lookup(items.cls, "__getitem__") is not MISSING:
        return IterVal(it=backwards(tx, items, length(tx, items).value - 1), kind=reversed)
    if lookup(items.cls, "__reversed__") is MISSING and lookup(items.cls, "__getitem__") is MISSING:
        user_error(TypeError, f"'{items.cls.__name__}' object is not reversible")
    return IterVal(it=(v for v in unpack(tx, items)[::-1]), kind=type(reversed(items.value)) if type(items) is Const else reversed)


# %% [markdown]
# ## A container that changes meanwhile
#
# Python has an answer for each kind. A list that grows during its loop has more turns. A dictionary, a set
# or a deque that changes its size raises a `RuntimeError`, at the next turn and not before. Values are
# kept in Python's own containers, so most of these answers come from Python's own iterators (`natively`).
# What they say is then raised in the program that is being captured, where a handler may wait for it, and again at the turn after that:
# a generator would be at its end, so only what raises no error, or one only, is one. An iterator knows from its
# beginning what it goes over, so each generator is `begun`, up to a first `yield` without a value.

# %%
def begun(generator):
    @functools.wraps(generator)
    def made(*args, **kwargs):
        it = generator(*args, **kwargs)
        next(it)
        return it
    return made


@begun
def sequence(tx, value, backwards=False):
    """The items of a list or tuple, which may grow or shrink meanwhile."""
    items, step = entries(tx, value), -1 if backwards else 1
    i = len(items) - 1 if backwards else 0
    yield
    while 0 <= i < len(items):
        yield realize(tx, items[i])
        i += step


def may_go_on(iterator) -> bool:
    """Whether Python would not refuse the next item, because of a change."""
    try:
        next(iterator, None)
        return True
    except RuntimeError:
        return False


def members(tx, value):
    """The items of a SetVal. The first change may replace the `keys` that are iterated over by a copy."""
    keys = value.keys
    given = natively(iter(keys))

    def turn():
        for key in given:
            if len(value.keys) != len(keys):
                break
            if key in value.keys:
                return value_of_key(tx, key)
        if len(value.keys) != len(keys):
            user_error(RuntimeError, "Set changed size during iteration")
    return iter(turn, None)


@begun
def ordered_entries(value, order):
    """The [key, value] pairs of an OrderedDict. Its iterator knows the next key in advance, and after the
    last one does not look any more."""
    keys, pairs = list(value.items), list(order(value.items.values()))
    yield
    for entry in pairs:
        if list(value.items) != keys:
            user_error(RuntimeError, "OrderedDict mutated during iteration")
        yield entry


def entries_of(tx, view, order=iter):
    """What `order`, which is `iter` or `reversed`, gives for a view of a dictionary."""
    wanted = {"keys": (0,), "values": (1,), "items": (0, 1)}[view.kind]
    ordered = issubclass(view.of.cls, collections.OrderedDict)

    def shown(entry):
        parts = [realize(tx, entry[i]) for i in wanted]
        return TupleVal(items=parts) if view.kind == "items" else parts[0]
    return map(shown, ordered_entries(view.of, order) if ordered else natively(order(view.of.items.values())))
