# %% [markdown]
# # Items
#
# `a[i]`, `a[i] = b`, `del a[i]` and `a in b`: one function each.
#
# `in` is a comparison with each item, except where a container has keys. Then the keys are looked up,
# and the answer is guarded in the weakest form: that a key is missing is a guard on this one key, and says
# nothing of the others.

# %%
import contextlib
import enum
import operator
import types

import numpy
import torch

from ..ch02_guards.sources import CallSource
from .attributes import special, store_in_dict
from .effects import touch, written_storages
from .iterate import as_dict, unpack, values_of
from .operations import METHODS, binary, equal, fold, truth
from .tensors import emit
from .tracer import Tracer, call, unsupported
from .values import (
    AbstractValue, Const, DictVal, ListVal, NONE, NUMPY_SCALARS, NotConstant, ObjVal, SetVal, SliceVal, SymVal, TensorVal, TupleVal,
    ViewVal, const, describe, python_method, user_error, user_errors)
from .wrap import as_python, guard_keys, guard_missing, key_in, key_of, part, realize, wrap


def is_missing(tx, dictionary: DictVal, key: AbstractValue) -> bool:
    """Whether there is no such key, which is then guarded."""
    k = key_in(tx, dictionary, key)
    if k not in dictionary.items:
        guard_missing(tx, dictionary, k)
    return k not in dictionary.items


def contains(tx: Tracer, container: AbstractValue, item: AbstractValue) -> bool:
    """item in container"""
    container = as_dict(tx, container, "__contains__")
    kind = type(container)
    if kind is DictVal:
        found = not is_missing(tx, container, item)
        if found:
            guard_keys(tx, container)
        return found
    if kind is SetVal:
        return key_of(tx, item, container.items) in container.items
    if kind is ViewVal and container.kind == "keys":
        return contains(tx, container.of, item)
    if kind is Const or kind is ObjVal and isinstance(container.real, enum.EnumMeta):
        return truth(tx, fold(tx, operator.contains, [container, item]))
    if kind is TensorVal:
        unsupported(tx, "`in` of a tensor")
    result = special(tx, container, "__contains__", item)
    if result is not None:
        return truth(tx, result)
    return any(equal(tx, v, item) for v in values_of(tx, container))


# %% [markdown]
# ## Subscripts
#
# What `container[key]` means depends on the container, and so does what has to be guarded. A tensor gives a
# node. A list that existed before the call guards its length, and then the item at an index is a constant
# matter. (Not so an item that the trace itself has appended and that is addressed from the end: it is there
# whatever the list held.) A dictionary guards that the key is there, and no more. An object is asked for
# `__getitem__`.
#
# The function only chooses. What the kinds of containers do stands behind it, one after the other.

# %%
def index_of(tx, key: AbstractValue):
    """A sequence index as an int or slice."""
    if type(key) is TensorVal:
        unsupported(tx, "a list index that is not a Python constant")
    try:
        return as_python(tx, key)
    except NotConstant:
        index = special(tx, key, "__index__") or unsupported(tx, f"{describe(key)} as an index")
        return index.value


def get_item(tx: Tracer, container: AbstractValue, key: AbstractValue) -> AbstractValue:
    """container[key]"""
    whole, container = container, as_dict(tx, container, "__getitem__")
    if whole is not container and python_method(whole.cls, "__missing__") and \
            not contains(tx, container, key):
        return special(tx, whole, "__missing__", key)
    kind = type(container)
    if kind is TensorVal:
        return select_symbolic(tx, container, key) or emit(
            tx, "call_function", operator.getitem, [container, key], {})
    if kind in (TupleVal, ListVal):
        index = index_of(tx, key)
        return get_from_sequence(tx, container, index)
    if kind is DictVal:
        return get_from_dict(tx, container, key)
    if container.cls is numpy.ndarray and not written_storages(tx):          # which may be its memory, seen as a tensor
        with contextlib.suppress(NotConstant), user_errors():
            if type(found := container.real[index := as_python(tx, key)]) in NUMPY_SCALARS:
                return wrap(tx, found, part(CallSource, container.source, "__getitem__", (index,)))
    return special(tx, container, "__getitem__", key) or fold(
        tx, operator.getitem, [container, key], reason=f"a subscript of {describe(container)}")

# %% [markdown]
# Tensors have one difficulty, symbolic positions. `x[:, n]` with a symbolic `n` would be fixed to its
# present value by PyTorch's indexing. A slice of length one accepts a symbol, so `select_symbolic` takes
# `x[:, n:n+1]` and removes the dimension of length one. It does so only after it has asked whether `n` is
# in range, because a slice that is out of range is empty, and not an error. `dim` counts the dimensions of
# the tensor, and `out` those of the result; `picked` are the ones to be removed.

# %%
def select_symbolic(tx, tensor, key) -> AbstractValue | None:
    """`x[:, n]` with a symbolic n. PyTorch's indexing would fix n; `x[:, n:n+1].select(1, 0)` does not. None
    where the key is not of this kind, or n may be out of range."""
    parts = key.items if type(key) is TupleVal else [key]
    if not any(type(p) is SymVal and p.cls is int for p in parts):
        return None
    if any(type(p) not in (SymVal, SliceVal) and not (type(p) is Const and type(p.value) in (int, type(None)))
           for p in parts):
        return None
    sizes, dim, out, picked, new = tensor.fake.shape, 0, 0, [], []
    for p in parts:
        fresh = p is NONE
        if type(p) is SymVal:
            n = p.sym
            if dim >= len(sizes) or not (-sizes[dim] <= n and n < sizes[dim]):
                return None
            picked.append(out - len(picked))
            p = SliceVal(p, binary(tx, "+", p, const(1)), NONE)
        out += fresh or type(p) is SliceVal
        dim += not fresh
        new.append(p)
    result = emit(tx, "call_function", operator.getitem, [tensor, TupleVal(items=new)], {})
    for d in picked:
        result = emit(tx, "call_method", "select", [result, const(d), const(0)], {})
    return result

# %% [markdown]
# A sequence or a dictionary has its items here, as values, so Python's own indexing finds them. An item that nobody has
# looked at is wrapped when it is found (`realize`). What would raise in the program raises the same here. A `defaultdict`
# makes the missing item by calling its factory, and that is traced like any call.

# %%
def get_from_sequence(tx, container, index):
    if type(container) is ListVal and not (type(index) is int and is_appended(container, index)):
        guard_keys(tx, container)
    if isinstance(index, slice):
        with user_errors():
            items = container.items[index]
        items = [realize(tx, item) for item in items]
        if type(container) is ListVal:
            return ListVal(items=items)
        return TupleVal(items=items, cls=torch.Size if container.cls is torch.Size else tuple)
    if type(index) not in (int, bool):
        user_error(TypeError, f"{container.cls.__name__} indices must be integers or slices, "
                              f"not {type(index).__name__}")
    if not -len(container.items) <= index < len(container.items):
        user_error(IndexError, f"{container.cls.__name__} index out of range")
    return realize(tx, container.items[index])


def is_appended(container: ListVal, index: int) -> bool:
    """Whether what is `index` items from the end was appended by the trace to a list that existed before, which
    does not depend on its length."""
    return container.real is not None and len(container.real) - len(container.items) <= index < 0


def get_from_dict(tx, container, key):
    if is_missing(tx, container, key):
        if container.factory is None:
            user_error(KeyError, key)
        value = call(tx, realize(tx, container.factory), [])
        set_item(tx, container, key, value)
        return value
    return realize(tx, container.items[key_of(tx, key)][1])

# %% [markdown]
# Writing goes to the description of the container and never to the real one. `touch` takes a snapshot
# before the first change, so that the epilogue can tell the difference (`effects.py`). The `__dict__` of an object is
# written through the object it belongs to, its `owner`, since a write there is a write to an attribute. And a read-only
# view of a dictionary refuses, in Python's words.

# %%
def set_item(tx: Tracer, container: AbstractValue, key: AbstractValue, value: AbstractValue):
    """container[key] = value"""
    container = as_dict(tx, container, "__setitem__")
    kind = type(container)
    refuse_proxy(container, "assignment")
    if kind is TensorVal:
        place = select_symbolic(tx, container, key)
        if place is not None:
            container, key = place, const(Ellipsis)
        emit(tx, "call_function", operator.setitem, [container, key, value], {})
    elif kind is DictVal and container.owner is not None:
        store_in_dict(tx, container.owner, key, value)
    elif kind is DictVal:
        touch(tx, container)
        k = key_in(tx, container, key)
        container.items[k] = container.items[k][0] if k in container.items else key, value
    elif kind is ListVal:
        index = index_of(tx, key)
        new = unpack(tx, value) if isinstance(index, slice) else value
        guard_keys(tx, container)
        touch(tx, container)
        with user_errors():
            container.items[index] = new
    elif special(tx, container, "__setitem__", key, value) is None:
        unsupported(tx, f"assigning to a subscript of {describe(container)}")


def refuse_proxy(container, what):
    if container.cls is types.MappingProxyType:
        user_error(TypeError, f"'mappingproxy' object does not support item {what}")


def delete_item(tx: Tracer, container: AbstractValue, key: AbstractValue):
    """del container[key]"""
    container = as_dict(tx, container, "__delitem__")
    refuse_proxy(container, "deletion")
    if type(container) is DictVal:
        if is_missing(tx, container, key):
            user_error(KeyError, key)
        if container.owner is not None:
            store_in_dict(tx, container.owner, key, None)
            return
        guard_keys(tx, container)
        touch(tx, container)
        del container.items[key_of(tx, key)]
    elif type(container) is ListVal:
        METHODS[ListVal, "__delitem__"](tx, container, key)
    elif special(tx, container, "__delitem__", key) is None:
        unsupported(tx, f"deleting a subscript of {describe(container)}")
