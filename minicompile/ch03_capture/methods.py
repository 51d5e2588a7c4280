# %% [markdown]
# # Methods of containers and constants
#
# The methods of `list`, `dict`, `set` and their relatives are C code: there is no bytecode to inline. Each
# gets a small function on values. Methods of constants (`"{}_{}".format(...)`, `name.split(".")`) need
# none: they are called, now.
#
# A container that existed before the call must not change while we trace. Every change goes to the value,
# `touch` marks it, and the epilogue writes the final contents into the real object.

# %%
from __future__ import annotations

import functools


from .attributes import call
from .interpreter import Tracer, advance, mark_dirty, unsupported
from .iterate import iterate, next_value, unpack
from .operations import (
    NotConstant, as_python, compare, contains, delete_item, fold, get_item, identical, index_of, set_item,
    truth)
from .tensors import call_tensor_method
from .values import (
    Const, DictVal, ExcVal, FALSE, GenVal, IterVal, ListVal, NONE, ObjVal, SetVal, TensorVal, TupleVal,
    UserError, Value, describe, user_error)
from .wrap import guard_keys, guard_missing, key_of, realize

METHODS: dict = {}


def method(kind, *names):
    """Register methods of a kind of value: function(tx, self, *args, **kwargs), values in, value out."""
    def register(function):
        for name in names:
            METHODS[kind, name] = function
        return function
    return register


def touch(tx: Tracer, value: Value):
    """`value` is about to change."""
    if value.real is not None:
        if value.source is None:
            unsupported(tx, f"changing {describe(value)} that belongs to a library")
        value.mutated = True
        mark_dirty(tx, value)


def call_method(tx: Tracer, value: Value, name: str, args, kwargs) -> Value:
    """value.name(*args, **kwargs) for a value whose methods are written in C."""
    if type(value) is TensorVal:
        return call_tensor_method(tx, value, name, args, kwargs)
    function = METHODS.get((type(value), name)) or METHODS.get((Value, name))
    if function is not None:
        try:
            return function(tx, value, *args, **kwargs) or NONE
        except TypeError as error:
            if "positional argument" not in str(error) and "keyword argument" not in str(error):
                raise
            unsupported(tx, f"this call of {describe(value)}.{name}: {error}")
    if type(value) in (Const, TupleVal, SetVal, ObjVal) and name not in ("__enter__", "__exit__", "__call__"):
        try:
            if type(value) is Const and isinstance(value.value, str) and name == "join":
                args = [TupleVal(items=unpack(tx, args[0]))]
            real = as_python(tx, value)
            return fold(tx, lambda *a, **k: getattr(real, name)(*a, **k), args, kwargs)
        except NotConstant:
            pass
    unsupported(tx, f"the method {name} of {describe(value)}")


def constant(value, default=None):
    return default if value is None else value.value


# %% [markdown]
# ## Any container

# %%
@method(Value, "__len__")
def any_len(tx, self):
    from .iterate import length
    return length(tx, self)


@method(Value, "__getitem__")
def any_getitem(tx, self, key):
    return get_item(tx, self, key)


@method(Value, "__contains__")
def any_contains(tx, self, item):
    return Const(value=contains(tx, self, item))


@method(Value, "__iter__")
def any_iter(tx, self):
    return iterate(tx, self)


@method(Value, "__setitem__")
def any_setitem(tx, self, key, value):
    set_item(tx, self, key, value)


@method(Value, "__delitem__")
def any_delitem(tx, self, key):
    delete_item(tx, self, key)


@method(Value, "__eq__")
def any_eq(tx, self, other):
    return compare(tx, "==", self, other)


# %% [markdown]
# ## list, tuple, deque

# %%
@method(ListVal, "append")
def list_append(tx, self, item):
    touch(tx, self)
    self.items.append(item)
    if self.maxlen is not None:
        del self.items[:-self.maxlen or len(self.items)]


@method(ListVal, "appendleft")
def list_appendleft(tx, self, item):
    touch(tx, self)
    self.items.insert(0, item)
    if self.maxlen is not None:
        del self.items[self.maxlen:]


@method(ListVal, "extend")
def list_extend(tx, self, items):
    for item in unpack(tx, items):
        list_append(tx, self, item)


@method(ListVal, "__init__")
def list_init(tx, self, items=None):
    list_clear(tx, self)
    if items is not None:
        list_extend(tx, self, items)


@method(ListVal, "insert")
def list_insert(tx, self, index, item):
    touch(tx, self)
    self.items.insert(index_of(tx, index), item)


@method(ListVal, "pop", "popleft")
def list_pop(tx, self, index=None):
    touch(tx, self)
    if not self.items:
        user_error(IndexError, f"pop from empty {self.cls.__name__}")
    at = index_of(tx, index) if index is not None else -1
    if not -len(self.items) <= at < len(self.items):
        user_error(IndexError, "pop index out of range")
    return realize(tx, self.items.pop(at))


@method(ListVal, "popleft")
def list_popleft(tx, self):
    return list_pop(tx, self, Const(value=0))


@method(ListVal, "remove")
def list_remove(tx, self, item):
    index = sequence_index(tx, self, item)
    touch(tx, self)
    del self.items[index.value]


@method(ListVal, "clear")
def list_clear(tx, self):
    touch(tx, self)
    self.items.clear()


@method(ListVal, "reverse")
def list_reverse(tx, self):
    touch(tx, self)
    self.items.reverse()


@method(ListVal, "copy", "__copy__")
def list_copy(tx, self):
    return ListVal(items=unpack(tx, self), cls=self.cls, maxlen=self.maxlen)


@method(ListVal, "sort")
def list_sort(tx, self, *, key=None, reverse=FALSE):
    items = sort_values(tx, unpack(tx, self), key, truth(tx, reverse))
    touch(tx, self)
    self.items[:] = items


def sort_values(tx, items, key, reverse):
    """sorted(items, key=key): constants are compared by Python, other keys by the traced `<`."""
    if key is not None and not (type(key) is Const and key.value is None):
        keys = [call(tx, key, [item]) for item in items]
    else:
        keys = items
    try:
        plain = [as_python(tx, k) for k in keys]
    except NotConstant:
        def order_of(i, j):
            less = lambda a, b: truth(tx, compare(tx, "<", keys[a], keys[b]))
            return -1 if less(i, j) else 1 if less(j, i) else 0
        order = sorted(range(len(items)), key=functools.cmp_to_key(order_of), reverse=reverse)
        return [items[i] for i in order]
    try:
        order = sorted(range(len(items)), key=plain.__getitem__, reverse=reverse)
    except TypeError as error:
        user_error(TypeError, str(error))
    return [items[i] for i in order]


@method(ListVal, "index")
def sequence_index(tx, self, item, start=None, stop=None):
    items = unpack(tx, self)
    low, high, _ = slice(constant(start), constant(stop)).indices(len(items))
    for i in range(low, high):
        if identical(items[i], item) or truth(tx, compare(tx, "==", items[i], item)):
            return Const(value=i)
    user_error(ValueError, f"{describe(item)} is not in {self.cls.__name__}")


@method(ListVal, "count")
def sequence_count(tx, self, item):
    return Const(value=sum(identical(v, item) or truth(tx, compare(tx, "==", v, item)) for v in unpack(tx, self)))


METHODS[TupleVal, "index"] = sequence_index
METHODS[TupleVal, "count"] = sequence_count


@method(TupleVal, "numel")
def size_numel(tx, self):
    from .operations import binary
    total = Const(value=1)
    for item in unpack(tx, self):
        total = binary(tx, "*", total, item)
    return total


# %% [markdown]
# ## dict
#
# `keys()`, `values()` and `items()` are snapshots here, not views: enough for loops, which is what they are
# for. They carry the view's class, so that one that escapes is noticed and not returned as a tuple.

# %%
@method(DictVal, "keys")
def dict_keys(tx, self):
    items = {k: realize(tx, entry[0]) for k, entry in dict_entries(tx, self).items()}
    return SetVal(items=items, cls=type({}.keys()))


@method(DictVal, "values")
def dict_values(tx, self):
    entries = dict_entries(tx, self)
    return IterableView(items=[lazily(tx, entry) for entry in entries.values()], cls=type({}.values()))


@method(DictVal, "items")
def dict_items(tx, self):
    pairs = [TupleVal(items=[realize(tx, e[0]), e[1]]) for e in dict_entries(tx, self).values()]
    return IterableView(items=pairs, cls=type({}.items()))


IterableView = TupleVal


def lazily(tx, entry):
    return entry[1]


def dict_entries(tx, self) -> dict:
    guard_keys(tx, self)
    return self.items


@method(DictVal, "get")
def dict_get(tx, self, key, default=NONE):
    k = key_of(tx, key)
    if k not in self.items:
        guard_missing(tx, self, k)
        return default
    return get_item(tx, self, key)


@method(DictVal, "pop")
def dict_pop(tx, self, key, default=None):
    k = key_of(tx, key)
    if k not in self.items:
        guard_missing(tx, self, k)
        if default is None:
            raise UserError(ExcVal(cls=KeyError, args=[key]))
        return default
    value = get_item(tx, self, key)
    delete_item(tx, self, key)
    return value


@method(DictVal, "popitem")
def dict_popitem(tx, self, last=Const(value=True)):
    if not dict_entries(tx, self):
        user_error(KeyError, "popitem(): dictionary is empty")
    k = list(self.items)[-1 if truth(tx, last) else 0]
    key, value = (realize(tx, v) for v in self.items[k])
    delete_item(tx, self, key)
    return TupleVal(items=[key, value])


@method(DictVal, "setdefault")
def dict_setdefault(tx, self, key, default=NONE):
    k = key_of(tx, key)
    if k in self.items:
        return get_item(tx, self, key)
    guard_missing(tx, self, k)
    set_item(tx, self, key, default)
    return default


@method(DictVal, "update", "__init__")
def dict_update(tx, self, other=None, **kwargs):
    if type(other) is DictVal:
        for entry in list(dict_entries(tx, other).values()):
            set_item(tx, self, realize(tx, entry[0]), realize(tx, entry[1]))
    elif other is not None:
        for key, value in pairs_of(tx, other):
            set_item(tx, self, key, value)
    for key, value in kwargs.items():
        set_item(tx, self, Const(value=key), value)


def pairs_of(tx, value):
    """The (key, value) pairs of what one may pass to dict(): a mapping with keys(), or an iterable of pairs."""
    from .attributes import get_attribute, has_attribute
    if type(value) is ObjVal and has_attribute(tx, value, "keys"):
        return [(k, get_item(tx, value, k)) for k in unpack(tx, call(tx, get_attribute(tx, value, "keys"), []))]
    return [tuple(unpack(tx, pair)) for pair in unpack(tx, value)]


@method(DictVal, "copy", "__copy__")
def dict_copy(tx, self):
    return DictVal(items={k: list(v) for k, v in dict_entries(tx, self).items()}, cls=self.cls, factory=self.factory)


@method(DictVal, "clear")
def dict_clear(tx, self):
    for key in [realize(tx, entry[0]) for entry in list(dict_entries(tx, self).values())]:
        delete_item(tx, self, key)


@method(DictVal, "move_to_end")
def dict_move_to_end(tx, self, key, last=Const(value=True)):
    value = dict_pop(tx, self, key)
    if truth(tx, last):
        set_item(tx, self, key, value)
    elif self.real is None:
        self.items = {key_of(tx, key): [key, value], **self.items}
    else:
        unsupported(tx, "move_to_end(last=False)")


# %% [markdown]
# ## set

# %%
@method(SetVal, "add")
def set_add(tx, self, item):
    key = key_of(tx, item)
    if key not in self.items:
        touch(tx, self)
        self.items[key] = item


@method(SetVal, "discard", "remove")
def set_discard(tx, self, item):
    touch(tx, self)
    self.items.pop(key_of(tx, item), None)


@method(SetVal, "remove")
def set_remove(tx, self, item):
    key = key_of(tx, item)
    if key not in self.items:
        raise UserError(ExcVal(cls=KeyError, args=[item]))
    set_discard(tx, self, item)


@method(SetVal, "clear")
def set_clear(tx, self):
    touch(tx, self)
    self.items.clear()


@method(SetVal, "update")
def set_update(tx, self, *others):
    for other in others:
        for item in unpack(tx, other):
            set_add(tx, self, item)


@method(SetVal, "copy", "union")
def set_union(tx, self, *others):
    result = SetVal(items=dict(self.items), cls=self.cls)
    set_update(tx, result, *others)
    return result


@method(SetVal, "intersection")
def set_intersection(tx, self, *others):
    keys = [{key_of(tx, item) for item in unpack(tx, other)} for other in others]
    return SetVal(items={k: v for k, v in self.items.items() if all(k in ks for ks in keys)}, cls=self.cls)


@method(SetVal, "difference")
def set_difference(tx, self, *others):
    keys = [{key_of(tx, item) for item in unpack(tx, other)} for other in others]
    return SetVal(items={k: v for k, v in self.items.items() if not any(k in ks for ks in keys)}, cls=self.cls)


@method(SetVal, "issubset")
def set_issubset(tx, self, other):
    keys = {key_of(tx, item) for item in unpack(tx, other)}
    return Const(value=all(k in keys for k in self.items))


@method(SetVal, "issuperset")
def set_issuperset(tx, self, other):
    return Const(value=all(key_of(tx, item) in self.items for item in unpack(tx, other)))


# %% [markdown]
# ## Iterators and generators

# %%
@method(IterVal, "__next__")
def iterator_next(tx, self):
    value = next_value(tx, self)
    if value is None:
        raise UserError(ExcVal(cls=StopIteration, args=[]))
    return value


@method(GenVal, "__next__")
def generator_next(tx, self):
    return generator_send(tx, self, NONE)


@method(GenVal, "send")
def generator_send(tx, self, value):
    result = advance(tx, self, value)
    if result is None:
        last = self.result
        raise UserError(ExcVal(cls=StopIteration, args=[] if last is NONE else [last]))
    return result


@method(GenVal, "close")
def generator_close(tx, self):
    if self.started and not self.done and any(True for _ in self.frame.code.co_exceptiontable):
        unsupported(tx, "closing a generator that may have to clean up")
    self.done = True
