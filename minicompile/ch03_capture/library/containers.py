# %% [markdown]
# # Methods of containers and generators
#
# The methods of `list`, `dict`, `set` and their relatives are C code. But a container of values is itself a Python container, so for
# most methods Python does the work: `pop` of a traced list is `pop` of its list of values, the union of two traced sets is the union of
# their keys.
#
# A container that existed before the call must not change while we trace. Every change goes to the value, after
# `touch` has noted what it held before (`effects.py`).

# %%
import collections
import itertools
import operator

import torch

from ..attributes import get_attribute, has_attribute
from ..builders import as_python, order_of
from ..comparisons import Deputy, deputies, truth
from ..effects import touch
from ..exceptions import user_error, user_errors
from ..interpreter import advance, unless_raised
from ..iterate import length, next_value, sequence, unpack, values_of
from ..keys import entries, guard_keys, key_of, key_sought, value_of_key
from ..lookup import python_method
from ..protocol import METHODS, as_dict, method
from ..subscripts import contains, delete_item, get_item, index_of, is_missing, set_item
from ..tracer import call, unsupported
from ..values import (
    Const, DictVal, ExcVal, FALSE, GenVal, IterVal, ListVal, NONE, NotConstant, ObjVal, SetVal, TRUE,
    TracebackVal, TupleVal, ViewVal, boolean, const, describe, is_class, specialize)
from ..varying import varies_in
from ..wrap import realize


# %% [markdown]
# ## list, tuple, deque
#
# A list in the trace is a Python list of values. Methods that only move items about can therefore be
# Python's own, called on that list: `changes_items` makes them from their names, with converters for
# arguments (an index has to be a number, and what `extend` takes has to be unpacked first). Before that
# come the two duties of every method that writes. The length of the list is guarded, unless the method does
# not depend on it, and `touch` notes what the list held.
#
# Methods that compare items (`remove`, `index`, `count`, `sort`) are Python's own as well, but on deputies
# (`comparisons.py`), which ask the interpreter. Sorting constants needs none.

# %%
def changes_items(name, *converters):
    """A method that moves items about: Python's own, on the list of values, after converting the first arguments."""
    @method(ListVal, name)
    def apply(tx, self, *args):
        converted = [convert(tx, arg) for convert, arg in zip(converters, args)]
        if self.cls is not list or name not in ("append", "extend"):        # which do not depend on the length
            guard_keys(tx, self)
        touch(tx, self)
        with user_errors():
            result = getattr(self.items, name)(*converted, *args[len(converters):])
        return realize(tx, result)


for _name, _converters in {
        "append": (), "appendleft": (), "insert": (index_of,), "extend": (unpack,), "extendleft": (unpack,), "pop": (index_of,),
        "popleft": (), "clear": (), "reverse": (), "rotate": (index_of,), "__delitem__": (index_of,)}.items():
    changes_items(_name, *_converters)


# %% [markdown]
# One thing can be seen of the way in which a method takes many items: `out.extend(generator())`, where the generator
# looks at `out`, or raises after two items. The two are in the list by then. So a method that takes items of something
# whose iteration runs code of the program is its method for one item, in turn; `in_turn` registers that.

# %%
RUNS_CODE = (IterVal, GenVal, ObjVal)        # when it is iterated over


def in_turn(kind, name, one):
    """The method `name` takes any iterables at once. What the program can watch goes through the method `one`, item by item."""
    at_once = METHODS[kind, name]

    @method(kind, name)
    def apply(tx, self, *others):
        if not any(type(other) in RUNS_CODE for other in others):
            return at_once(tx, self, *others)
        for item in itertools.chain.from_iterable(values_of(tx, other, self.cls) for other in others):
            METHODS[kind, one](tx, self, item)


in_turn(ListVal, "extend", "append")
in_turn(ListVal, "extendleft", "appendleft")


@method(ListVal, "__init__")
def list_init(tx, self, items=TupleVal()):
    items = items if type(items) in RUNS_CODE else TupleVal(items=unpack(tx, items))
    METHODS[ListVal, "clear"](tx, self)
    METHODS[ListVal, "extend"](tx, self, items)


@method(ListVal, "copy", "__copy__")
def list_copy(tx, self):
    return ListVal(items=entries(tx, self).copy(), cls=self.cls)


@method(ListVal, "sort")
def list_sort(tx, self, *, key=NONE, reverse=FALSE):
    """While it sorts, the list is empty for the program's code, as in CPython. If that raises, the items lie in the order of then."""
    items = unpack(tx, self).copy()
    order = list(range(len(items)))
    touch(tx, self)
    self.items.clear()
    try:
        sort_order(tx, items, order, key, reverse)
    finally:
        modified, self.items[:] = bool(self.items), [items[i] for i in order]
    if modified:
        user_error(ValueError, "list modified during sort")


def sort_values(tx, items, key, reverse) -> list:
    """sorted(items, key=key, reverse=reverse)"""
    order = list(range(len(items)))
    sort_order(tx, items, order, key, reverse)
    return [items[i] for i in order]


def sort_order(tx, items, order: list, key, reverse):
    """Sort the indices of `items`."""
    keys = items if key is NONE else [call(tx, key, [item]) for item in items]
    try:
        if any(map(varies_in, keys)):
            raise NotConstant
        measure = [as_python(tx, k) for k in keys]
        if any(python_method(type(m), "__lt__") for m in measure):
            raise NotConstant
    except NotConstant:
        measure = [Deputy(tx, k) for k in keys]
    reverse = reverse.value if type(reverse) is Const else truth(tx, reverse)
    with user_errors():
        order.sort(key=measure.__getitem__, reverse=reverse)


def looks_for(kind, name, changes=False):
    """A method that looks for an item: Python's own, on deputies. changes: the sequence itself."""
    @method(kind, name)
    def apply(tx, self, item, *bounds):
        sequence = deputies(tx, self)
        with user_errors():
            result = getattr(sequence, name)(Deputy(tx, item), *(b.value for b in bounds))
        if changes:
            touch(tx, self)
            self.items.clear()
            self.items.extend(p.value for p in sequence)
        return const(result)


looks_for(ListVal, "remove", changes=True)


def repeated(tx, self, count):
    count = specialize(count)
    if type(count) is Const and type(count.value) in (int, bool):
        items = entries(tx, self) * count.value
        return ListVal(items=items, cls=self.cls) if type(self) is ListVal else \
            TupleVal(items=items, cls=torch.Size if self.cls is torch.Size else tuple)


for _kind in (ListVal, TupleVal):
    looks_for(_kind, "index")
    looks_for(_kind, "count")
    METHODS.update({(_kind, "__mul__"): repeated, (_kind, "__rmul__"): repeated})


@method(ListVal, "__add__")
def list_add(tx, self, other):
    if type(other) is ListVal and self.cls is other.cls is list:
        return ListVal(items=unpack(tx, self) + unpack(tx, other))


@method(TupleVal, "__add__")
def tuple_add(tx, self, other):
    if type(other) is TupleVal:
        # What `+` makes of a torch.Size differs between releases of torch
        left, right = ((torch.Size if v.cls is torch.Size else tuple)(()) for v in (self, other))
        cls = type(left + right)
        return TupleVal(items=unpack(tx, self) + unpack(tx, other), cls=cls)


@method(ListVal, "__iadd__")
def list_iadd(tx, self, other):
    METHODS[ListVal, "extend"](tx, self, other)
    return self


@method(ListVal, "__imul__")
def list_imul(tx, self, count):
    if repeated(tx, self, count) is not None:
        touch(tx, self)
        self.items *= specialize(count).value
        return self


# %% [markdown]
# ## dict
#
# `keys()`, `values()` and `items()` are views: they show the dictionary as it is when one looks, so a view is
# no list of items but the dictionary and what to show of it. Views of keys and items are sets as well.

# %%
for _kind in ("keys", "values", "items"):
    method(DictVal, _kind)(lambda tx, self, kind=_kind: ViewVal(of=self, kind=kind))


OF_LENGTHS = {"eq": operator.eq, "ne": operator.eq, "lt": operator.lt, "le": operator.le, "gt": operator.lt, "ge": operator.le}


def view_comparison(name, of_lengths):
    """A comparison with a set or another view goes by lengths, then item by item: an item needs no hash for that."""
    @method(ViewVal, f"__{name}__")
    def operate(tx, self, other):
        views = [v for v in (self, other) if type(v) is ViewVal]
        if type(other) not in (SetVal, ViewVal) or any(v.kind == "values" for v in views):
            return None
        some, all_of = (other, self) if name in ("gt", "ge") else (self, other)
        answer = of_lengths(length(tx, some).value, length(tx, all_of).value) and all(contains(tx, all_of, v) for v in unpack(tx, some))
        return boolean(answer != (name == "ne"))


for _name, _of_lengths in OF_LENGTHS.items():
    view_comparison(_name, _of_lengths)


@method(ViewVal, "isdisjoint")
def view_isdisjoint(tx, self, other):
    if self.kind != "values":
        return boolean(not any(contains(tx, self, item) for item in values_of(tx, other)))


# %% [markdown]
# Of 1 and True, which are equal, `d.keys() & {True}` gives that of the other operand, and `d.keys() | {True}` its own. Such rules are
# for Python to know. So its operator is called on a view of a real dictionary of keys.

# %%
def view_operator(name, combine):
    """combine: the operator, given the view and the other operand in their order."""
    @method(ViewVal, name)
    def operate(tx, self, other):
        if self.kind != "values":
            return SetVal(keys=combine(view_of_keys(tx, self), view_of_keys(tx, other)))


def view_of_keys(tx, value):
    """What stands for a value where Python combines views."""
    keys, kind = keys_of(tx, value), value.kind if type(value) is ViewVal else None
    return dict.fromkeys(keys).keys() if kind == "keys" else dict(keys).items() if kind == "items" else keys


SET_OPERATORS = "or", "and", "sub", "xor"
for _name in SET_OPERATORS:
    view_operator(f"__{_name}__", getattr(operator, f"__{_name}__"))
    view_operator(f"__r{_name}__", lambda view, rest, combine=getattr(operator, f"__{_name}__"): combine(rest, view))

# %% [markdown]
# The methods of dictionaries are written in terms of four operations: `is_missing`, which guards that a key
# is not there, `get_item`, `set_item` and `delete_item`. So each guards what it asks, and no more:
# `d.get("a")` where there is no "a" holds for all dictionaries without this key. Only methods that see the
# whole, such as `popitem` or `copy`, guard all keys and their order.

# %%
@method(DictVal, "get")
def dict_get(tx, self, key, default=NONE):
    return default if is_missing(tx, self, key) else get_item(tx, self, key)


@method(DictVal, "pop")
def dict_pop(tx, self, key, default=None):
    if is_missing(tx, self, key):
        if default is None:
            user_error(KeyError, key)
        return default
    value = get_item(tx, self, key)
    delete_item(tx, self, key)
    return value


@method(DictVal, "popitem")
def dict_popitem(tx, self, last=TRUE):
    if not entries(tx, self):
        user_error(KeyError, "popitem(): dictionary is empty")
    key, value = (realize(tx, v) for v in list(self.items.values())[-1 if truth(tx, last) else 0])
    delete_item(tx, self, key)
    return TupleVal(items=[key, value])


@method(DictVal, "setdefault")
def dict_setdefault(tx, self, key, default=NONE):
    if is_missing(tx, self, key):
        set_item(tx, self, key, default)
    return get_item(tx, self, key)


@method(DictVal, "update", "__init__")
def dict_update(tx, self, other=None, /, **kwargs):
    for key, value in pairs_of(tx, other):
        set_item(tx, self, key, value)
    for key, value in kwargs.items():
        set_item(tx, self, const(key), value)


# %% [markdown]
# `update` and `dict(...)` take a mapping or an iterable of pairs. `pairs_of` gives the pairs of either, one after the
# other, as Python does: an object with a method `keys` is a mapping.
#
# The operators `|` and `|=`, and the methods that change many entries, are made of it.

# %%
def pairs_of(tx, value):
    """The (key, value) pairs of what one may pass to dict(): a mapping with keys(), or an iterable of
    pairs."""
    value = TupleVal() if value is None else as_dict(tx, value, "__iter__")     # Python does not ask the class's own `keys`, either
    if type(value) is DictVal:
        yield from [(realize(tx, k), realize(tx, v)) for k, v in entries(tx, value).values()]
    elif type(value) is ObjVal and has_attribute(tx, value, "keys"):
        for key in unpack(tx, call(tx, get_attribute(tx, value, "keys"), [])):
            yield key, get_item(tx, value, key)
    else:
        for item in values_of(tx, value):
            pair = sequence(tx, item) if hasattr(item.cls, "__iter__") else ()
            if len(pair) != 2:
                unsupported(tx, "a dictionary of what are no pairs")
            yield pair


@method(DictVal, "__or__")
def dict_or(tx, self, other):
    if type(other) is ObjVal and issubclass(other.cls, dict):
        unsupported(tx, f"a dictionary | {describe(other)}")
    if type(other) is DictVal:
        shape = other if self.cls is dict and other.cls in (collections.OrderedDict, collections.defaultdict) else self
        result = DictVal(items=entries(tx, self).copy(), cls=shape.cls, factory=shape.factory)
        dict_update(tx, result, other)
        return result


@method(DictVal, "__ior__")
def dict_ior(tx, self, other):
    dict_update(tx, self, other)
    return self


@method(DictVal, "copy", "__copy__")
def dict_copy(tx, self):
    return DictVal(items=entries(tx, self).copy(), cls=self.cls, factory=self.factory)


@method(DictVal, "clear")
def dict_clear(tx, self):
    for key, _ in list(entries(tx, self).values()):
        delete_item(tx, self, realize(tx, key))


@method(DictVal, "move_to_end")
def dict_move_to_end(tx, self, key, last=TRUE):
    value = dict_pop(tx, self, key)
    if truth(tx, last):
        set_item(tx, self, key, value)
    else:
        items = {key_of(tx, key): (key, value), **self.items}
        self.items.clear()
        self.items.update(items)


# %% [markdown]
# ## set
#
# A `SetVal` is a *real* set of keys, and the methods run on that. So what `a & b` contains, and in which order an iteration will
# meet it, is not computed by rules of ours.

# %%
def keys_of(tx, value, until_known=False):
    """What stands for a value where Python's own methods of sets take it. until_known: they take no more of it than they need."""
    if type(value) is SetVal:
        return order_of(tx, value)
    keys = (key_of(tx, item) for item in values_of(tx, value))
    return dict.fromkeys(keys) if type(value) is DictVal else keys if until_known else list(keys)


def set_of(tx, value, cls=set) -> SetVal:
    """set(value)"""
    return SetVal(keys=set(keys_of(tx, value)), cls=cls)


def set_method(name, changes=False):
    """Register a method that takes any iterables, or an operator, which takes a set. changes: itself."""
    @method(SetVal, name)
    def apply(tx, self, *others):
        operator = name.startswith("__")
        if operator and type(others[0]) is ObjVal and issubclass(others[0].cls, (set, frozenset)):
            unsupported(tx, f"{name} of a set and {describe(others[0])}")
        if operator and (type(others[0]) is not SetVal or changes and self.cls is frozenset):
            return None
        if changes:
            touch(tx, self)
        with user_errors():
            keys = getattr(self.keys, name)(*(v.keys if type(v) is SetVal else keys_of(tx, v, name in ENDS_EARLY) for v in others))
        if isinstance(keys, bool):
            return boolean(keys)
        for v in (self, *others):
            if type(v) is SetVal:
                order_of(tx, v)
        if changes:
            return self if operator else None
        return SetVal(keys=keys, cls=self.cls)


ENDS_EARLY = ("isdisjoint", "issuperset")

for _name in ("union", "intersection", "difference", "symmetric_difference", "issubset", "issuperset", "isdisjoint",
              *(f"__{side}{name}__" for name in SET_OPERATORS for side in ("", "r")), *(f"__{name}__" for name in OF_LENGTHS)):
    set_method(_name)
for _name in ("update", "intersection_update", "difference_update", "symmetric_difference_update",
              *(f"__i{name}__" for name in SET_OPERATORS)):
    set_method(_name, changes=True)


# %% [markdown]
# A method that changes one item does the same to its key, where there is something to change: `touch` tells the side effects that
# the set has changed, and takes a copy.

# %%
def changes_one(name):
    @method(SetVal, name)
    def apply(tx, self, item):
        key = (key_of if name == "add" else key_sought)(tx, item, self.keys)
        if name == "remove" and key not in self.keys:
            user_error(KeyError, item)
        if (key in self.keys) != (name == "add"):
            touch(tx, self)
            getattr(self.keys, name)(key)


for _name in ("add", "discard", "remove"):
    changes_one(_name)
in_turn(SetVal, "update", "add")
in_turn(SetVal, "difference_update", "discard")


@method(SetVal, "pop")
def set_pop(tx, self):
    if not self.keys:
        user_error(KeyError, "pop from an empty set")
    order_of(tx, self)
    touch(tx, self)
    return value_of_key(tx, self.keys.pop())


@method(SetVal, "clear")
def set_clear(tx, self):
    touch(tx, self)
    self.keys.clear()


@method(SetVal, "copy", "__copy__")
def set_copy(tx, self):
    return self if self.cls is frozenset else set_of(tx, self)


# %% [markdown]
# ## Iterators and generators

# %%
def stop_iteration(*args):
    user_error(StopIteration, *args)


def result_of(generator) -> list:
    """Arguments of the StopIteration that a generator ends with."""
    result = generator.result if type(generator) is GenVal else None
    return [] if result in (None, NONE) else [result]


# %% [markdown]
# An iterator of the trace has its next value or is at its end, in which case the program gets a `StopIteration`. A
# generator is a frame that is interrupted: `send` and `throw` resume it (`advance`), and `close` throws a
# `GeneratorExit` into it, which it has to let pass.

# %%
@METHODS.of((IterVal, "__next__"), (GenVal, "__next__"))
def next_or_stop(tx, self):
    return next_value(tx, self) or stop_iteration(*result_of(self))


@method(GenVal, "send")
def generator_send(tx, self, value):
    return advance(tx, self, value) or stop_iteration(*result_of(self))


@method(GenVal, "throw")
def generator_throw(tx, self, exc, value=NONE, traceback=NONE):
    if is_class(exc):
        exc = value if type(value) is ExcVal and issubclass(value.cls, exc.real) else call(tx, exc, [] if value is NONE else [value])
    if type(exc) is not ExcVal or type(traceback) is not TracebackVal and traceback is not NONE:
        unsupported(tx, f"throw() of {describe(exc)}")
    exc.traceback = exc.traceback if traceback is NONE else traceback
    return advance(tx, self, thrown=exc) or stop_iteration(*result_of(self))


@method(GenVal, "close")
def generator_close(tx, self):
    if self.started and not self.done:
        thrown = ExcVal(cls=GeneratorExit)
        ends = GeneratorExit, StopIteration
        if unless_raised(ends, lambda: advance(tx, self, thrown=thrown)) is not None:
            user_error(RuntimeError, "generator ignored GeneratorExit")
    self.done = True
