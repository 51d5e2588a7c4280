# %% [markdown]
# # Builtin functions
#
# `len`, `zip`, `isinstance`, `getattr`: the small change of Python. Each handler below says what the
# builtin does to values. Iterators stay lazy, so `zip(self.layers, itertools.count())` ends.

# %%
from __future__ import annotations

import collections
import inspect
import itertools
import types

import torch

from .attributes import call, class_of, lookup
from .calls import HANDLED, handles
from .interpreter import unsupported
from .iterate import iterate, length, next_value, unpack, values_of
from .methods import dict_update, sort_values
from .operations import binary, compare, fold, get_item, identical, set_item, truth
from .tensors import emit
from .values import (
    Const, DictVal, ExcVal, FALSE, IterVal, ListVal, NONE, ObjVal, SetVal, SliceVal, SymVal, TRUE,
    TensorVal, TupleVal, UserError, user_error)
from .wrap import key_of, wrap


def boolean(flag) -> Const:
    return TRUE if flag else FALSE


# %% [markdown]
# ## Making containers

# %%
@handles(list)
def make_list(tx, items=None):
    return ListVal(items=[] if items is None else unpack(tx, items))


@handles(tuple)
def make_tuple(tx, items=None):
    if type(items) is TupleVal and items.cls is tuple:
        return items
    return TupleVal(items=[] if items is None else unpack(tx, items))


@handles(tuple.__new__)
def new_tuple(tx, cls, items=None):
    return TupleVal(items=[] if items is None else unpack(tx, items), cls=cls.real)


@handles(torch.Size)
def make_size(tx, items=None):
    return TupleVal(items=[] if items is None else unpack(tx, items), cls=torch.Size)


def set_of(tx, items, cls):
    found = {}
    for item in [] if items is None else unpack(tx, items):
        found.setdefault(key_of(tx, item), item)
    return SetVal(items=found, cls=cls)


@handles(set)
def make_set(tx, items=None):
    return set_of(tx, items, set)


@handles(frozenset)
def make_frozenset(tx, items=None):
    return set_of(tx, items, frozenset)


@handles(dict)
def make_dict(tx, *args, **kwargs):
    result = DictVal()
    dict_update(tx, result, *args, **kwargs)
    return result


@handles(collections.OrderedDict)
def make_ordered_dict(tx, *args, **kwargs):
    result = DictVal(cls=collections.OrderedDict)
    dict_update(tx, result, *args, **kwargs)
    return result


@handles(collections.defaultdict)
def make_defaultdict(tx, factory=None, *args, **kwargs):
    result = DictVal(cls=collections.defaultdict)
    if factory is not None and not identical(factory, NONE):
        result.factory = factory
    dict_update(tx, result, *args, **kwargs)
    return result


@handles(dict.fromkeys)
def dict_fromkeys(tx, keys, value=NONE):
    result = DictVal()
    for key in unpack(tx, keys):
        set_item(tx, result, key, value)
    return result


@handles(collections.deque)
def make_deque(tx, items=None, maxlen=NONE):
    result = ListVal(items=[] if items is None else unpack(tx, items), cls=collections.deque, maxlen=maxlen.value)
    if result.maxlen is not None and len(result.items) > result.maxlen:
        del result.items[:len(result.items) - result.maxlen]
    return result


@handles(slice)
def make_slice(tx, *args):
    start, stop, step = (NONE, args[0], NONE) if len(args) == 1 else (*args, NONE)[:3]
    return SliceVal(start, stop, step)


@handles(range)
def make_range(tx, *args):
    if any(type(a) is SymVal for a in args):
        args = [Const(value=int(a.sym)) if type(a) is SymVal else a for a in args]
    if any(type(a) is TensorVal for a in args):
        unsupported(tx, "range() of a tensor")
    return fold(tx, range, args)


# %% [markdown]
# ## Numbers and strings

# %%
@handles(int)
def to_int(tx, value=Const(value=0), *base):
    if type(value) is SymVal:
        return value
    if type(value) is TensorVal:
        unsupported(tx, "int() of a tensor")
    return fold(tx, int, [value, *base])


@handles(float)
def to_float(tx, value=Const(value=0.0)):
    if type(value) is TensorVal:
        unsupported(tx, "float() of a tensor")
    return fold(tx, float, [value])


@handles(bool)
def to_bool(tx, value=FALSE):
    return boolean(truth(tx, value))


@handles(str, repr, format, ascii)
def to_text(tx, *args, **kwargs):
    unsupported(tx, "text of a value")


def text_handler(function):
    def handler(tx, *args, **kwargs):
        if args and type(args[0]) is ExcVal and function is str:
            if len(args[0].args) == 1:
                return handler(tx, args[0].args[0])
        if args and type(args[0]) is ObjVal and function is format:
            method = lookup(args[0].cls, "__format__")
            if isinstance(method, types.FunctionType):
                return call(tx, wrap(tx, method), [args[0], args[1] if len(args) > 1 else Const(value="")])
            if not identical(args[-1], Const(value="")) and len(args) > 1:
                unsupported(tx, "format() of an object")
            return HANDLED[str](tx, args[0])
        if args and type(args[0]) is ObjVal:
            method = lookup(args[0].cls, "__str__")
            if not isinstance(method, types.FunctionType) or function is repr:
                method = lookup(args[0].cls, "__repr__")
            if isinstance(method, types.FunctionType) and function in (str, repr) and not isinstance(args[0].real, type):
                return call(tx, wrap(tx, method), [args[0]])
        if args and type(args[0]) is TensorVal:
            unsupported(tx, "the text of a tensor")
        return fold(tx, function, args, kwargs)
    return handler


for _function in (str, repr, format, ascii):
    HANDLED[_function] = text_handler(_function)


def folded(function):
    """The handler of a pure function: constants only."""
    return lambda tx, *args, **kwargs: fold(tx, function, args, kwargs)


for _function in (ord, chr, hex, bin, oct, hash, int.from_bytes, torch.promote_types, torch.can_cast,
                  torch.get_default_dtype, torch.are_deterministic_algorithms_enabled, torch.cuda.is_available,
                  torch.cuda.device_count, torch.get_float32_matmul_precision, str.maketrans,
                  torch.is_deterministic_algorithms_warn_only_enabled, inspect.isclass):
    HANDLED[_function] = folded(_function)


@handles(abs)
def absolute(tx, value):
    return unary_builtin(tx, abs, torch.abs, value, "__abs__")


def unary_builtin(tx, function, torch_function, value, method):
    if type(value) is TensorVal:
        return emit(tx, "call_function", torch_function, [value], {})
    found = lookup(class_of(value), method) if type(value) is ObjVal else None
    if isinstance(found, types.FunctionType):
        return call(tx, wrap(tx, found), [value])
    return fold(tx, function, [value])


@handles(round)
def rounded(tx, value, digits=None):
    if type(value) is TensorVal:
        return emit(tx, "call_function", torch.round, [value], {} if digits is None else {"decimals": digits})
    return fold(tx, round, [value] if digits is None else [value, digits])


@handles(divmod)
def both(tx, a, b):
    return TupleVal(items=[binary(tx, "//", a, b), binary(tx, "%", a, b)])


@handles(pow)
def power(tx, a, b):
    return binary(tx, "**", a, b)


@handles(sum)
def total(tx, items, start=Const(value=0)):
    for item in values_of(tx, items):
        start = binary(tx, "+", start, item)
    return start


@handles(any)
def any_of(tx, items):
    return boolean(any(truth(tx, v) for v in values_of(tx, items)))


@handles(all)
def all_of(tx, items):
    return boolean(all(truth(tx, v) for v in values_of(tx, items)))


def extreme(symbol):
    def handler(tx, *items, key=NONE, default=None):
        if len(items) == 1:
            items = unpack(tx, items[0])
        if not items:
            if default is not None:
                return default
            user_error(ValueError, "min() or max() of an empty sequence")
        if all(type(v) is SymVal or type(v) is Const for v in items) and any(type(v) is SymVal for v in items):
            items = sorted(items, key=lambda v: type(v) is Const)
        measure = (lambda v: v) if identical(key, NONE) else (lambda v: call(tx, key, [v]))
        best, size = items[0], measure(items[0])
        for item in items[1:]:
            this = measure(item)
            if truth(tx, compare(tx, symbol, this, size)):
                best, size = item, this
        return best
    return handler


HANDLED[min], HANDLED[max] = extreme("<"), extreme(">")


# %% [markdown]
# ## Iterators

# %%
@handles(iter)
def make_iter(tx, value):
    return iterate(tx, value)


@handles(next)
def take_next(tx, iterator, default=None):
    value = next_value(tx, iterator)
    if value is not None:
        return value
    if default is None:
        raise UserError(ExcVal(cls=StopIteration, args=[]))
    return default


@handles(enumerate)
def enumerated(tx, items, start=Const(value=0)):
    return IterVal(it=(TupleVal(items=[Const(value=i), v]) for i, v in enumerate(values_of(tx, items), start.value)))


@handles(zip)
def zipped(tx, *sequences, strict=FALSE):
    rows = zip(*[values_of(tx, s) for s in sequences], strict=strict.value)
    return IterVal(it=rows_as_tuples(tx, rows))


def rows_as_tuples(tx, rows):
    try:
        for row in rows:
            yield TupleVal(items=list(row))
    except ValueError as error:
        user_error(ValueError, str(error))


@handles(map)
def mapped(tx, function, *sequences):
    return IterVal(it=(call(tx, function, list(row)) for row in zip(*[values_of(tx, s) for s in sequences])))


@handles(filter)
def filtered(tx, function, items):
    keep = (lambda v: truth(tx, v)) if identical(function, NONE) else (lambda v: truth(tx, call(tx, function, [v])))
    return IterVal(it=(v for v in values_of(tx, items) if keep(v)))


@handles(reversed)
def reverse(tx, items):
    found = lookup(class_of(items), "__reversed__")
    if type(items) is ObjVal and isinstance(found, types.FunctionType):
        return call(tx, wrap(tx, found), [items])
    if type(items) is ObjVal:
        n = length(tx, items).value
        return IterVal(it=(get_item(tx, items, Const(value=i)) for i in range(n - 1, -1, -1)))
    return IterVal(it=iter(unpack(tx, items)[::-1]))


@handles(sorted)
def sort(tx, items, *, key=None, reverse=FALSE):
    return ListVal(items=sort_values(tx, unpack(tx, items), key, truth(tx, reverse)))


# %%
@handles(itertools.chain)
def chained(tx, *sequences):
    return IterVal(it=itertools.chain.from_iterable(values_of(tx, s) for s in sequences))


@handles(itertools.chain.from_iterable)
def chained_from(tx, sequences):
    return IterVal(it=itertools.chain.from_iterable(values_of(tx, s) for s in values_of(tx, sequences)))


@handles(itertools.islice)
def sliced(tx, items, *bounds):
    return IterVal(it=itertools.islice(values_of(tx, items), *(b.value for b in bounds)))


@handles(itertools.count)
def counted(tx, start=Const(value=0), step=Const(value=1)):
    return IterVal(it=(Const(value=i) for i in itertools.count(start.value, step.value)))


@handles(itertools.repeat)
def repeated(tx, item, times=None):
    return IterVal(it=itertools.repeat(item) if times is None else itertools.repeat(item, times.value))


@handles(itertools.cycle)
def cycled(tx, items):
    return IterVal(it=itertools.cycle(unpack(tx, items)))


@handles(itertools.accumulate)
def accumulated(tx, items, function=NONE, *, initial=None):
    add = (lambda a, b: binary(tx, "+", a, b)) if identical(function, NONE) else (lambda a, b: call(tx, function, [a, b]))
    return IterVal(it=itertools.accumulate(values_of(tx, items), add, initial=initial))


@handles(itertools.starmap)
def starmapped(tx, function, rows):
    return IterVal(it=(call(tx, function, unpack(tx, row)) for row in values_of(tx, rows)))


@handles(itertools.zip_longest)
def zipped_longest(tx, *sequences, fillvalue=NONE):
    return IterVal(it=rows_as_tuples(tx, itertools.zip_longest(*[values_of(tx, s) for s in sequences],
                                                               fillvalue=fillvalue)))


def combinatoric(function):
    def handler(tx, *args, **kwargs):
        is_count = [type(a) is Const and type(a.value) is int for a in args]
        iterables = [unpack(tx, a) for a, n in zip(args, is_count) if not n]
        counts = [a.value for a, n in zip(args, is_count) if n]
        return IterVal(it=rows_as_tuples(tx, function(*iterables, *counts, **{k: v.value for k, v in kwargs.items()})))
    return handler


for _function in (itertools.product, itertools.combinations, itertools.permutations, itertools.pairwise,
                  itertools.combinations_with_replacement):
    HANDLED[_function] = combinatoric(_function)
