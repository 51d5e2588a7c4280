# %% [markdown]
# # Methods of containers and constants
#
# The methods of `list`, `dict`, `set` and their relatives are C code: there is no bytecode to inline. But a
# container of values is itself a Python container, so for most methods Python does the work: `pop` of a
# traced list is `pop` of its list of values, the union of two traced sets is the union of their keys. The
# operators are methods too (`+` is `__add__`). Methods of constants (`"{}_{}".format(...)`,
# `name.split(".")`) need nothing at all: they are called, now.
#
# A container that existed before the call must not change while we trace. Every change goes to the value,
# `touch` marks it, and the epilogue writes the final contents into the real object.

# %%
from __future__ import annotations

import functools
import inspect

import torch

from .attributes import get_attribute, has_attribute
from .interpreter import Tracer, advance, call, touch, unless_raised, unsupported
from .iterate import as_dict, iterate, length, next_value, unpack
from .operations import (
    METHODS, as_python, binary, compare, contains, delete_item, equal, fold, get_item, index_of, is_missing,
    set_item, specialize, truth, user_errors)
from .tensors import call_tensor_method
from .values import (
    Const, DictVal, ExcVal, FALSE, GenVal, IterVal, ListVal, MISSING, NONE, NotConstant, ObjVal, SetItems,
    SetVal, SliceVal, TRUE, TensorVal, TupleVal, Value, ViewVal, boolean, class_of, describe, is_class,
    user_error)
from .wrap import guard_keys, key_of, keyed, order_of, realize


def method(kind, *names):
    """Register methods of a kind of value: function(tx, self, *args, **kwargs), values in, value (or None)
    out."""
    return METHODS.of(*((kind, name) for name in names))


FOLDED = (Const, TupleVal, SetVal, SliceVal, ObjVal)      # of these, methods of constants are called now


def call_method(tx: Tracer, value: Value, name: str, args, kwargs=None) -> Value:
    """value.name(*args, **kwargs) for a value whose methods are written in C."""
    kwargs = kwargs or {}
    if type(value) is TensorVal:
        return call_tensor_method(tx, value, name, args, kwargs)
    function = METHODS.get((type(value), name)) or METHODS.get((Value, name))
    if function is not None:
        return call_handler(tx, f"{describe(value)}.{name}", function, [value, *args], kwargs)
    reason = f"the method {name} of {describe(value)}"
    if type(value) not in FOLDED or name in ("__enter__", "__exit__", "__call__"):
        unsupported(tx, reason)
    if type(value) is Const and isinstance(value.value, str) and name == "join":
        args = [TupleVal(items=unpack(tx, args[0]))]
    return fold(tx, lambda self, /, *args, **kwargs: getattr(self, name)(*args, **kwargs), [value, *args],
                kwargs, reason)


def call_handler(tx, name, handler, args, kwargs):
    """handler(tx, *args, **kwargs). A handler need not take every argument that the real function takes; other
    TypeErrors are ours."""
    try:
        return handler(tx, *args, **kwargs) or NONE
    except TypeError as error:
        if fits(handler, (tx, *args), kwargs):
            raise
        unsupported(tx, f"this call of {name}: {error}")
    except NotConstant:
        unsupported(tx, f"{name} of something that is no constant")


def fits(handler, args, kwargs) -> bool:
    """Whether a handler takes these arguments. One with `*args` hands them on, to what may not."""
    try:
        bound = inspect.signature(handler).bind(*args, **kwargs)
    except TypeError:
        return False
    return not any(p.kind is p.VAR_POSITIONAL for p in bound.signature.parameters.values())


METHODS.update({(Value, "__len__"): length, (Value, "__iter__"): iterate, (Value, "__getitem__"): get_item,
                (Value, "__setitem__"): set_item, (Value, "__delitem__"): delete_item})


@method(Value, "__contains__")
def any_contains(tx, self, item):
    return boolean(contains(tx, self, item))


@method(Value, "__eq__")
def any_eq(tx, self, other):
    return compare(tx, "==", self, other)


# %% [markdown]
# ## list, tuple, deque

# %%
def itself(tx, value):
    return value


def changes_items(name, *converters):
    """A method that moves items about: Python's own, on the list of values, after converting the
    arguments."""
    @method(ListVal, name)
    def apply(tx, self, *args):
        converted = [convert(tx, arg) for convert, arg in zip(converters, args)]
        touch(tx, self)
        if self.on_look is not None and name in ("append", "extend"):
            getattr(self.added, name)(*converted)
            return None
        with user_errors():
            result = getattr(self.items, name)(*converted, *args[len(converters):])
        return realize(tx, result)


for _name, _converters in {
        "append": (itself,), "appendleft": (itself,), "insert": (index_of, itself), "extend": (unpack,),
        "extendleft": (unpack,), "pop": (index_of,), "popleft": (), "clear": (), "reverse": (),
        "rotate": (index_of,)}.items():
    changes_items(_name, *_converters)


@method(ListVal, "__init__")
def list_init(tx, self, items=TupleVal()):
    touch(tx, self)
    self.items.clear()
    self.items.extend(unpack(tx, items))


@method(ListVal, "remove")
def list_remove(tx, self, item):
    index = sequence_index(tx, self, item, asked="remove")
    touch(tx, self)
    del self.items[index.value]


@method(ListVal, "copy", "__copy__")
def list_copy(tx, self):
    return ListVal(items=self.items.copy(), cls=self.cls)


@method(ListVal, "sort")
def list_sort(tx, self, *, key=NONE, reverse=FALSE):
    items = sort_values(tx, unpack(tx, self), key, reverse)
    touch(tx, self)
    self.items[:] = items


def sort_values(tx, items, key, reverse) -> list:
    """sorted(items, key=key, reverse=reverse): constants are compared by Python, other keys by the traced
    `<`."""
    keys = items if type(key) is Const else [call(tx, key, [item]) for item in items]
    try:
        measure = [as_python(tx, k) for k in keys].__getitem__
    except NotConstant:
        def order_of(i, j):
            less = lambda a, b: truth(tx, compare(tx, "<", keys[a], keys[b]))
            return -1 if less(i, j) else 1 if less(j, i) else 0
        measure = functools.cmp_to_key(order_of)
    with user_errors():
        order = sorted(range(len(items)), key=measure, reverse=truth(tx, reverse))
    return [items[i] for i in order]


def sequence_index(tx, self, item, start=NONE, stop=NONE, asked="index"):
    items = unpack(tx, self)
    for i in range(*slice(start.value, stop.value).indices(len(items))):
        if equal(tx, items[i], item):
            return Const(value=i)
    empty = type(self)(items=type(self.items)(), cls=self.cls)
    fold(tx, getattr(self.cls, asked), [empty, item])                # raises


def sequence_count(tx, self, item):
    return Const(value=sum(equal(tx, v, item) for v in unpack(tx, self)))


def repeated(tx, self, count):
    count = specialize(count)
    if type(count) is Const and type(count.value) in (int, bool):
        items = self.items * count.value
        return ListVal(items=items, cls=self.cls) if type(self) is ListVal else \
            TupleVal(items=items, cls=torch.Size if self.cls is torch.Size else tuple)


for _kind in (ListVal, TupleVal):
    METHODS.update({(_kind, "index"): sequence_index, (_kind, "count"): sequence_count,
                    (_kind, "__mul__"): repeated, (_kind, "__rmul__"): repeated})


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
    if type(count) is Const:
        touch(tx, self)
        self.items *= count.value
        return self


@method(TupleVal, "numel")
def size_numel(tx, self):
    return functools.reduce(lambda a, b: binary(tx, "*", a, b), unpack(tx, self), Const(value=1))


# %% [markdown]
# ## dict
#
# `keys()`, `values()` and `items()` are views: they show the dictionary as it is when one looks, so a view is
# no list of items but the dictionary and what to show of it. Views of keys and items are sets as well.

# %%
def entries(tx, self: DictVal) -> dict:
    """key -> [key value, value], for a program that depends on all keys."""
    guard_keys(tx, self)
    return self.items


for _kind in ("keys", "values", "items"):
    method(DictVal, _kind)(lambda tx, self, kind=_kind: ViewVal(of=self, kind=kind))


def as_set(tx, value) -> Value:
    """A view of keys or items as the set that it also is; other values as they are."""
    if type(value) is ViewVal and value.kind != "values":
        return SetVal(items=items_of_set(tx, value))
    return value


def view_method(name, takes_any):
    """A method of sets, for views. takes_any: whether the other operand may be any iterable."""
    @method(ViewVal, name)
    def operate(tx, self, other):
        if self.kind != "values":
            other = SetVal(items=items_of_set(tx, other)) if takes_any else as_set(tx, other)
            return METHODS[SetVal, name](tx, as_set(tx, self), other)


SET_OPERATORS, COMPARISONS = ("or", "and", "sub", "xor"), ("eq", "ne", "lt", "le", "gt", "ge")
for _name in SET_OPERATORS:
    view_method(f"__{_name}__", takes_any=True)
    view_method(f"__r{_name}__", takes_any=True)
for _name in COMPARISONS:
    view_method(f"__{_name}__", takes_any=False)
view_method("isdisjoint", takes_any=True)


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
def dict_update(tx, self, other=None, **kwargs):
    for key, value in pairs_of(tx, other):
        set_item(tx, self, key, value)
    for key, value in kwargs.items():
        set_item(tx, self, Const(value=key), value)


def pairs_of(tx, value) -> list:
    """The (key, value) pairs of what one may pass to dict(): a mapping with keys(), or an iterable of
    pairs."""
    if value is None:
        return []
    value = as_dict(tx, value, "__iter__")               # Python does not ask the class's own `keys`, either
    if type(value) is DictVal:
        return [(realize(tx, k), realize(tx, v)) for k, v in entries(tx, value).values()]
    if type(value) is ObjVal and has_attribute(tx, value, "keys"):
        keys = call(tx, get_attribute(tx, value, "keys"), [])
        return [(k, get_item(tx, value, k)) for k in unpack(tx, keys)]
    pairs = [unpack(tx, v) if hasattr(class_of(v), "__iter__") else () for v in unpack(tx, value)]
    if any(len(pair) != 2 for pair in pairs):
        unsupported(tx, "a dictionary of what are no pairs")
    return pairs


@method(DictVal, "__or__")
def dict_or(tx, self, other):
    if type(other) is DictVal:
        result = dict_copy(tx, self)
        dict_update(tx, result, other)
        return result


@method(DictVal, "__ior__")
def dict_ior(tx, self, other):
    dict_update(tx, self, other)
    return self


@method(DictVal, "copy", "__copy__")
def dict_copy(tx, self):
    return DictVal(items={k: list(v) for k, v in entries(tx, self).items()}, cls=self.cls,
                   factory=self.factory)


@method(DictVal, "clear")
def dict_clear(tx, self):
    for key, _ in list(entries(tx, self).values()):
        delete_item(tx, self, realize(tx, key))


@method(DictVal, "move_to_end")
def dict_move_to_end(tx, self, key, last=TRUE):
    value = dict_pop(tx, self, key)
    if truth(tx, last):
        set_item(tx, self, key, value)
    elif self.real is None:
        self.items = {key_of(tx, key): [key, value], **self.items}
    else:
        unsupported(tx, "move_to_end(last=False)")


# %% [markdown]
# ## set
#
# Which keys a set operation gives is for Python to say; the values behind the keys are found again in the
# operands.

# %%
def items_of_set(tx, value) -> dict:
    """What set(value) has as `items`."""
    if type(value) is SetVal:
        order_of(tx, value)
        return value.items.copy()
    items = keyed(tx, unpack(tx, value))
    return SetItems(items, set(items)) if type(value) is DictVal else items


def set_operation(tx, name, self, others):
    """set.<name>(self, *others): the keys, or a bool; and id of a key -> value of all that may be among them.
    Of equal keys Python may keep either."""
    operands = [other.items if type(other) is SetVal else items_of_set(tx, other) for other in others]
    for other in (self, *others):
        order_of(tx, other)
    order = self.items.own() if name.endswith("update") else self.items.order
    known = {id(key): value for items in (*operands, self.items) for key, value in items.items()}
    keys = getattr(order, name)(*(o.order if type(o) is SetItems else list(o) for o in operands))
    return keys, known


def set_methods(name, inplace=None, symbol=None):
    """Register `s.union(t)`, `s.update(t)`, `s | t` and `s |= t`, or those of them that exist."""
    def combine(tx, self, *others):
        keys, known = set_operation(tx, name, self, others)
        if isinstance(keys, bool):
            return boolean(keys)
        items = SetItems({key: known[id(key)] for key in keys}, keys)
        return SetVal(items=items, cls=frozenset if self.cls is frozenset else set)

    def change(tx, self, *others):
        touch(tx, self)
        _, known = set_operation(tx, inplace, self, others)
        self.items.replace({key: known[id(key)] for key in self.items.order})

    def operate(tx, self, other):
        return combine(tx, self, other) if type(other) is SetVal else None

    def operate_inplace(tx, self, other):
        if self.cls is set and type(other) is SetVal:
            change(tx, self, other)
            return self

    method(SetVal, name)(combine)
    if symbol is not None:
        method(SetVal, inplace)(change)
        method(SetVal, f"__{symbol}__")(operate)
        method(SetVal, f"__r{symbol}__")(lambda tx, self, other: operate(tx, other, self)
                                         if type(other) is SetVal else None)
        method(SetVal, f"__i{symbol}__")(operate_inplace)


set_methods("union", "update", "or")
set_methods("intersection", "intersection_update", "and")
set_methods("difference", "difference_update", "sub")
set_methods("symmetric_difference", "symmetric_difference_update", "xor")
for _name in ("issubset", "issuperset", "isdisjoint"):
    set_methods(_name)


def set_comparison(name):
    """<, <=, ==, ... of sets: by their keys."""
    @method(SetVal, name)
    def compare_sets(tx, self, other):
        if type(other) is SetVal:
            return boolean(getattr(self.items.keys(), name)(other.items.keys()))


for _name in COMPARISONS:
    set_comparison(f"__{_name}__")


# %%
@method(SetVal, "add")
def set_add(tx, self, item):
    key = key_of(tx, item, self.items)
    if key not in self.items:
        touch(tx, self)
        self.items[key] = item


@method(SetVal, "discard")
def set_discard(tx, self, item):
    touch(tx, self)
    self.items.pop(key_of(tx, item, self.items), None)


@method(SetVal, "remove")
def set_remove(tx, self, item):
    if key_of(tx, item, self.items) not in self.items:
        user_error(KeyError, item)
    set_discard(tx, self, item)


@method(SetVal, "pop")
def set_pop(tx, self):
    if not self.items:
        user_error(KeyError, "pop from an empty set")
    touch(tx, self)
    order_of(tx, self)
    return self.items.pop(self.items.own().pop())


@method(SetVal, "clear")
def set_clear(tx, self):
    touch(tx, self)
    self.items.own().clear()
    self.items.replace({})


@method(SetVal, "copy", "__copy__")
def set_copy(tx, self):
    return self if self.cls is frozenset else SetVal(items=items_of_set(tx, self))


# %% [markdown]
# ## Iterators and generators

# %%
def stop_iteration(*args):
    user_error(StopIteration, *args)


def result_of(generator) -> list:
    """Arguments of the StopIteration that a generator ends with."""
    result = generator.result if type(generator) is GenVal else NONE
    return [] if result is None or getattr(result, "value", MISSING) is None else [result]


@method(IterVal, "__next__")
def iterator_next(tx, self):
    return next_value(tx, self) or stop_iteration()


@method(GenVal, "__next__")
def generator_next(tx, self):
    return generator_send(tx, self, NONE)


@method(GenVal, "send")
def generator_send(tx, self, value):
    sent = advance(tx, self, value)
    if sent is None:
        stop_iteration(*result_of(self))
    return sent


@method(GenVal, "throw")
def generator_throw(tx, self, exc, *more):
    if is_class(exc):
        exc = call(tx, exc, [v for v in more[:1] if v is not NONE])
    if type(exc) is not ExcVal or len(more) > 2:
        unsupported(tx, f"throw() of {describe(exc)}")
    return advance(tx, self, thrown=exc) or stop_iteration(*result_of(self))


@method(GenVal, "close")
def generator_close(tx, self):
    if self.started and not self.done:
        thrown = ExcVal(cls=GeneratorExit)
        ends = GeneratorExit, StopIteration
        if unless_raised(ends, lambda: advance(tx, self, thrown=thrown)) is not None:
            user_error(RuntimeError, "generator ignored GeneratorExit")
    self.done = True
