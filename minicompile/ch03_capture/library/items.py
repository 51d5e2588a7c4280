# %% [markdown]
# # Items, by kinds of containers
#
# A tensor gives a node. A list that existed before the call guards its length, and then the item at an index is a constant
# matter. (Not so an item that the trace itself has appended and that is addressed from the end: it is there
# whatever the list held.) A dictionary guards that the key is there, and no more.
#
# A sequence or a dictionary has its items here, as values, so Python's own indexing finds them. An item that nobody has
# looked at is wrapped when it is found (`realize`). What would raise in the program raises the same here. A `defaultdict`
# makes the missing item by calling its factory, and that is traced like any call.

# %%
import contextlib
import operator
import types

import numpy
import torch

from ...ch02_guards.guards import same_constant
from ...ch02_guards.identity import is_a
from ...ch02_guards.sources import CallSource
from ..attributes import store_in_dict
from ..builders import as_python
from ..comparisons import compare, equal, truth
from ..effects import touch, written_storages
from ..exceptions import user_error, user_errors
from ..iterate import sequence, values_of
from ..keys import counted, entries, guard_found, guard_keys, has_number, is_asked, is_plain_key, key_in, key_of, key_sought
from ..lookup import lookup, python_method
from ..operations import binary, fold
from ..protocol import METHODS, as_dict, method, special
from ..subscripts import contains, index_of, is_missing, is_among, set_item
from ..tensors import emit, tensor_shape
from ..tracer import call, unsupported
from ..values import (
    Const, DictVal, FALSE, Lazy, ListVal, NONE, NUMPY_SCALARS, NotConstant, ObjVal, SetVal, SliceVal, SymVal, TRUE, TensorVal,
    TupleVal, ViewVal, boolean, const, is_unseen)
from ..varying import varying_item
from ..wrap import part, realize, wrap

for _kind in (TupleVal, ListVal, DictVal):
    METHODS[_kind, "__len__"] = lambda tx, self: const(len(counted(tx, self)))
METHODS.update({
    (SetVal, "__len__"): lambda tx, self: const(len(self.keys)),
    (ViewVal, "__len__"): lambda tx, self: const(len(entries(tx, self.of))),
    (ListVal, "__contains__"): lambda tx, self, item: boolean(any(equal(tx, v, item) for v in values_of(tx, self))),
    (SetVal, "__contains__"): lambda tx, self, item: is_among(tx, self.keys, item) or boolean(
        key_sought(tx, item, self.keys) in self.keys),
    (ViewVal, "__contains__"): lambda tx, self, item: boolean(contains(tx, self.of, item)) if self.kind == "keys" else NotImplemented,
    (Const, "__contains__"): lambda tx, self, item: fold(tx, operator.contains, [self, item]),
    (TensorVal, "__contains__"): lambda tx, self, item: unsupported(tx, "`in` of a tensor"),
})


@method(Const, "__len__")
def length_of_constant(tx, self):
    if is_unseen(self) and self.cls is range and self.recipe:
        return length_of_range(tx, *self.recipe[1])
    return fold(tx, len, [self]) if hasattr(self.cls, "__len__") else NotImplemented


def length_of_range(tx, start, stop=None, step=const(1)):
    """Of a range whose ends vary; the step does not."""
    start, stop = (const(0), start) if stop is None else (start, stop)
    first, last = (start, stop) if step.value > 0 else (stop, start)
    if not truth(tx, compare(tx, "<", first, last)):
        return const(0)
    size = abs(step.value)
    return binary(tx, "//", binary(tx, "+", binary(tx, "-", last, first), const(size - 1)), const(size))


@METHODS.of((TupleVal, "__getitem__"), (ListVal, "__getitem__"))
def item_of_sequence(tx, container, key):
    if (item := varying_item(tx, container, key)) is not None:
        return item
    index = index_of(tx, key)
    if type(container) is ListVal and not (type(index) is int and is_appended(container, index)):
        guard_keys(tx, container)
    if isinstance(index, slice):
        with user_errors():
            items = container.items[index]
        items = [realize(tx, item) for item in items]
        if type(container) is ListVal:
            return ListVal(items=items)
        return TupleVal(items=items, cls=torch.Size if container.cls is torch.Size else tuple)
    builtin = "tuple" if type(container) is TupleVal else container.cls.__name__
    if type(index) not in (int, bool):
        user_error(TypeError, f"{builtin} indices must be integers or slices, not {type(index).__name__}")
    if not -len(container.items) <= index < len(container.items):
        user_error(IndexError, f"{builtin} index out of range")
    return realize(tx, container.items[index])


def is_appended(container: ListVal, index: int) -> bool:
    """Whether what is `index` items from the end was appended by the trace to a list that existed before, which
    does not depend on its length."""
    return container.real is not None and container.cls.__len__(container.real) - len(container.items) <= index < 0


# %% [markdown]
# Writing goes to the description of the container and never to the real one. `touch` takes a snapshot
# before the first change, so that the epilogue can tell the difference (`effects.py`).

# %%
@method(ListVal, "__setitem__")
def store_in_list(tx, self, key, value):
    index = index_of(tx, key)
    new = sequence(tx, value) if isinstance(index, slice) else value
    guard_keys(tx, self)
    touch(tx, self)
    with user_errors():
        self.items[index] = new


# %% [markdown]
# The `__dict__` of an object is written through the object it belongs to, its `owner`, since a write there is a write to an attribute.

# %%
@method(DictVal, "__contains__")
def has_key(tx, self, key):
    if (answer := has_number(tx, self, key)) is not None:
        return boolean(answer)
    if is_missing(tx, self, key):
        return FALSE
    guard_found(tx, self, key_of(tx, key))
    return TRUE


@method(DictVal, "__getitem__")
def item_of_dict(tx, container, key):
    if is_missing(tx, container, key):
        if container.factory is None:
            user_error(KeyError, key)
        value = call(tx, realize(tx, container.factory), [])
        set_item(tx, container, key, value)
        return value
    return realize(tx, container.items[key_of(tx, key)][1])


@method(DictVal, "__setitem__")
def store_key(tx, self, key, value):
    if self.owner is not None:
        return store_in_dict(tx, self.owner, key, value)
    touch(tx, self)
    k = key_in(tx, self, key)
    known = k in self.items and not is_asked(self, k)
    stored = self.items[k][0] if known else key
    if type(stored) is Lazy and type(k) is not str and is_plain_key(k) and not same_constant(stored.real, k):
        guard_found(tx, self, k)                         # 1 stays the key where 1.0 is written
    self.items[k] = stored, value
    self.writes.setdefault(id(stored), len(self.writes))


@method(DictVal, "__delitem__")
def delete_key(tx, self, key):
    if is_missing(tx, self, key):
        user_error(KeyError, key)
    if self.owner is not None:
        return store_in_dict(tx, self.owner, key, None)
    guard_keys(tx, self)
    touch(tx, self)
    del self.items[key_of(tx, key)]


# %% [markdown]
# Objects are asked by their classes, and a class by its metaclass or its `__class_getitem__`. Of an array of NumPy the numbers that are
# read are guarded, one by one.

# %%
@method(ObjVal, "__len__")
def length_of_object(tx, self):
    if self.cls is numpy.ndarray and self.real.ndim:
        return wrap(tx, len(self.real), part(CallSource, self.source, "__len__"))
    return NotImplemented


@method(ObjVal, "__getitem__")
def item_of_object(tx, self, key):
    if type(self.real).__module__ == "typing":                              # of an annotation, as `Callable[[int], str]`
        with contextlib.suppress(NotConstant), user_errors():
            return wrap(tx, as_python(tx, self)[as_python(tx, key)])
    inner = as_dict(tx, self, "__getitem__")
    if inner is not self and python_method(self.cls, "__missing__") and not contains(tx, inner, key):
        return special(tx, self, "__missing__", key)
    if is_a(self.real, type) and not python_method(self.cls, "__getitem__"):
        own = getattr(lookup(self.real, "__class_getitem__"), "__func__", None)
        return call(tx, wrap(tx, own), [self, key]) if type(own) is types.FunctionType and own.__module__ != "typing" else NotImplemented
    if self.cls is numpy.ndarray and not written_storages(tx):               # which may be its memory, seen as a tensor
        with contextlib.suppress(NotConstant), user_errors():
            if type(found := self.real[index := as_python(tx, key)]) in NUMPY_SCALARS:      # at whole numbers, of whatever class
                place = tuple(map(operator.index, index if isinstance(index, tuple) else (index,)))
                return wrap(tx, found, part(CallSource, self.source, "__getitem__", (place,)))
    return NotImplemented


# %% [markdown]
# ## Tensors
#
# Tensors have one difficulty, symbolic positions. `x[:, n]` with a symbolic `n` would be fixed to its
# present value by PyTorch's indexing. A slice of length one accepts a symbol, so `select_symbolic` takes
# `x[:, n:n+1]` and removes the dimension of length one. It does so only after it has asked whether `n` is
# in range, because a slice that is out of range is empty, and not an error. `dim` counts the dimensions of
# the tensor, and `out` those of the result; `picked` are the ones to be removed. Tensors of indices come later, as in
# PyTorch's own indexing: `x[n, rows]` is `x[n][rows]`, and `x[rows, n]` is `x[:, n][rows]`. Some scalars of NumPy are no numbers for
# indexing, though they are for operators: these are eager's (`check_scalars`).

# %%
def select_symbolic(tx, tensor, key) -> tuple | None:
    """The tensor and the key that are left of `tensor[key]` when symbolic positions are taken: for `x[:, n]`, `x[:, n:n+1].select(1, 0)`
    and `...`. None where the key is not of this kind, or n may be out of range."""
    parts = without_dots(tensor, key.items if type(key) is TupleVal else [key])
    if not any(type(p) is SymVal and p.cls is int for p in parts):
        return None
    if not all(type(p) in (SymVal, SliceVal) or is_index_tensor(p) or type(p) is Const and type(p.value) in (int, type(None))
               for p in parts):
        return None
    sizes, dim, out, picked, new, rest = tensor.fake.shape, 0, 0, [], [], []
    for p in parts:
        fresh, indices = p is NONE, type(p) is TensorVal
        if type(p) is SymVal:
            n = p.sym
            if dim >= len(sizes) or not (-sizes[dim] <= n and n < sizes[dim]):
                return None
            picked.append(out - len(picked))
            p = SliceVal(p, binary(tx, "+", p, const(1)), NONE)
        elif fresh or type(p) is not Const:
            rest.append(p if indices else SliceVal(NONE, NONE, NONE))
        out += fresh or type(p) is not Const
        dim += not fresh
        new.append(SliceVal(NONE, NONE, NONE) if indices else p)
    result = emit(tx, operator.getitem, [tensor, TupleVal(items=new)])
    for d in picked:
        result = emit(tx, "select", [result, const(d), const(0)])
    return result, TupleVal(items=rest) if any(type(p) is TensorVal for p in rest) else const(Ellipsis)


def without_dots(tensor, parts: list) -> list:
    """The parts of a key with as many whole slices as there are dimensions left in the place of `...`."""
    dots = [i for i, p in enumerate(parts) if type(p) is Const and p.value is Ellipsis]
    if len(dots) != 1:
        return parts
    left = tensor.fake.dim() - sum(p is not NONE for p in parts) + 1
    return [*parts[:dots[0]], *[SliceVal(NONE, NONE, NONE)] * left, *parts[dots[0] + 1:]]


def is_index_tensor(value) -> bool:
    """Whether this is a tensor of positions in one dimension: no mask, and no number, which eager's indexing would look at."""
    return type(value) is TensorVal and value.fake.dim() > 0 and value.fake.dtype in (torch.int64, torch.int32)


MISTAKEN = (numpy.bool_, numpy.float16, numpy.float32, numpy.complex64, numpy.unsignedinteger)


def check_scalars(tx, *values):
    """Indexing knows fewer of NumPy's scalars than operators do: it refuses `x[0] = numpy.float32(1)`, for one."""
    for value in values:
        kind = type(value)
        if kind in (TupleVal, ListVal):
            check_scalars(tx, *(realize(tx, item) for item in entries(tx, value)))
        elif kind is SliceVal:
            check_scalars(tx, value.start, value.stop, value.step)
        elif kind in (Const, SymVal) and issubclass(value.cls, MISTAKEN):
            unsupported(tx, f"{value.cls.__name__} of NumPy in the indexing of a tensor, which may refuse it")


def with_ranges(tx, tensor, key):
    """The key with a tensor in the place of each range whose ends vary: PyTorch makes one of it, for which it would look at the numbers."""
    if type(key) is TupleVal:
        return TupleVal(items=[with_ranges(tx, tensor, realize(tx, part)) for part in key.items]) if key.cls is tuple else key
    is_open = is_unseen(key) and key.cls is range and key.recipe
    return emit(tx, torch.arange, list(key.recipe[1]), {"device": const(tensor.fake.device)}) if is_open else key


@method(TensorVal, "__getitem__")
def item_of_tensor(tx, self, key):
    check_scalars(tx, key)
    key = with_ranges(tx, self, key)
    place, left = select_symbolic(tx, self, key) or (self, key)
    return place if place is not self and type(left) is Const else emit(tx, operator.getitem, [place, left])


@method(TensorVal, "__setitem__")
def store_in_tensor(tx, self, key, value):
    check_scalars(tx, key, value)
    key = with_ranges(tx, self, key)
    emit(tx, operator.setitem, [*(select_symbolic(tx, self, key) or (self, key)), value])


@method(TensorVal, "__len__")
def rows_of_tensor(tx, self):
    if self.fake.dim() == 0:
        user_error(TypeError, "len() of a 0-d tensor")
    return tensor_shape(tx, self).items[0]
