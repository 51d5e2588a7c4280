# %% [markdown]
# # Builtin functions
#
# `len`, `zip`, `isinstance`, `getattr`: the small change of Python. Each handler below says what the builtin does to
# values. Iterators stay lazy, so `zip(self.layers, itertools.count())` ends.

# %%
from __future__ import annotations

import builtins
import collections
import contextlib
import copy
import functools
import inspect
import itertools
import operator
import types
import typing
import warnings

import torch

from .. import marks
from .attributes import call, class_of, get_attribute, has_attribute, lookup, set_attribute, store_attribute
from .calls import HANDLED, handles
from .interpreter import Tracer, guard, unsupported
from .iterate import iterate, length, next_value, unpack, values_of
from .methods import call_method, dict_update, pairs_of, sort_values
from .operations import (
    BINARY, COMPARE, INPLACE, NotConstant, as_python, binary, compare, contains, delete_item, fold, get_item, identical,
    set_item, truth, unary)
from .tensors import emit, tensor_shape, wrap_plain
from .values import (
    Const, DictVal, ExcVal, FALSE, FuncVal, GenVal, IterVal, ListVal, MethodName, MethodVal, NEW, NONE, ObjVal,
    PartialVal, PropertyVal, SetVal, SliceVal, SuperVal, SymVal, TensorVal, TRUE, TupleVal, UserError, Value, describe,
    user_error)
from .wrap import key_of, realize, wrap


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


# %% [markdown]
# ## Functions of functions

# %%
@handles(functools.partial)
def make_partial(tx, function, *args, **kwargs):
    return PartialVal(func=function, args=list(args), kwargs=kwargs)


@handles(functools.reduce)
def reduced(tx, function, items, initial=None):
    items = values_of(tx, items)
    value = initial if initial is not None else next(items, None)
    if value is None:
        user_error(TypeError, "reduce() of empty iterable with no initial value")
    for item in items:
        value = call(tx, function, [value, item])
    return value


@handles(callable)
def is_callable(tx, value):
    if type(value) in (FuncVal, MethodVal, MethodName, PartialVal, PropertyVal):
        return TRUE
    return boolean(hasattr(class_of(value), "__call__"))


# %% [markdown]
# ## Classes and attributes

# %%
@handles(type)
def type_of(tx, value, *more):
    if more:
        unsupported(tx, "making a class")
    return wrap(tx, class_of(value))


@handles(isinstance)
def is_instance(tx, value, classes):
    classes = as_python(tx, classes)
    real = getattr(value, "real", None)
    if type(value) in (TensorVal, ObjVal) and real is not None and real is not NEW:
        return boolean(isinstance(real, classes))
    if type(value) is TensorVal:
        return boolean(isinstance(value.fake, classes) if classes in TENSOR_METACLASSES
                       else any_subclass(torch.Tensor, classes))
    return boolean(any_subclass(class_of(value), classes))


TENSOR_METACLASSES = ()


def any_subclass(cls, classes) -> bool:
    if isinstance(classes, tuple):
        return any(any_subclass(cls, c) for c in classes)
    return issubclass(cls, classes)


@handles(issubclass)
def is_subclass(tx, cls, classes):
    return boolean(issubclass(as_python(tx, cls), as_python(tx, classes)))


@handles(hasattr)
def has(tx, value, name):
    return boolean(has_attribute(tx, value, name.value))


@handles(getattr)
def get(tx, value, name, default=None):
    if default is None:
        return get_attribute(tx, value, name.value)
    try:
        return get_attribute(tx, value, name.value)
    except UserError as error:
        if issubclass(error.exc.cls, AttributeError):
            return default
        raise


@handles(setattr)
def set_(tx, value, name, new):
    set_attribute(tx, value, name.value, new)


@handles(delattr)
def delete(tx, value, name):
    set_attribute(tx, value, name.value, None)


@handles(vars)
def variables(tx, value):
    return get_attribute(tx, value, "__dict__")


@handles(len)
def len_(tx, value):
    return length(tx, value)


@handles(super)
def make_super(tx, cls=None, obj=None):
    if cls is None:
        from .opcodes import read_cell
        frame = tx.frames[-1]
        cls = read_cell(tx, frame.locals["__class__"], "__class__")
        obj = frame.locals[frame.code.co_varnames[0]]
        if type(obj).__name__ == "CellVal":
            obj = read_cell(tx, obj, "self")
    return SuperVal(cls=cls.real, self=obj)


@handles(object)
def make_object(tx):
    return ObjVal(real=NEW, cls=object)


@handles(object.__new__)
def new_object(tx, cls, *args, **kwargs):
    return ObjVal(real=NEW, cls=cls.real)


@handles(torch.nn.Module.__setattr__)
def module_setattr(tx, module, name, value):
    from .attributes import set_module_attribute
    set_module_attribute(tx, module, name.value, value)


@handles(torch.nn.Module.__getattr__)
def module_getattr(tx, module, name):
    from .attributes import module_child
    return module_child(tx, module, name.value)


@handles(types.MethodType)
def make_method(tx, function, self):
    return MethodVal(func=function, self=self)


@handles(typing.cast)
def cast(tx, cls, value):
    return value


@handles(copy.copy)
def shallow_copy(tx, value):
    if type(value) in (ListVal, DictVal, SetVal):
        return call_method(tx, value, "copy", [], {})
    if type(value) in (Const, TupleVal, FuncVal):
        return value
    if type(value) is ObjVal and value.real is NEW and not hasattr(value.cls, "__copy__"):
        return ObjVal(real=NEW, cls=value.cls, attrs=dict(value.attrs))
    unsupported(tx, f"copy.copy() of {describe(value)}")


# %% [markdown]
# ## The operator module

# %%
for _symbol, (_name, _function) in BINARY.items():
    HANDLED[_function] = functools.partial(lambda tx, a, b, s: binary(tx, s, a, b), s=_symbol)
    HANDLED[INPLACE[_symbol]] = functools.partial(lambda tx, a, b, s: binary(tx, s, a, b, inplace=True), s=_symbol)
for _symbol, (_name, _function) in COMPARE.items():
    HANDLED[_function] = functools.partial(lambda tx, a, b, s: compare(tx, s, a, b), s=_symbol)
for _name in ("neg", "pos", "invert"):
    HANDLED[getattr(operator, _name)] = functools.partial(lambda tx, a, n: unary(tx, n, a), n=_name)
HANDLED[operator.getitem] = get_item
HANDLED[operator.setitem] = set_item
HANDLED[operator.delitem] = delete_item
HANDLED[operator.not_] = lambda tx, a: boolean(not truth(tx, a))
HANDLED[operator.truth] = lambda tx, a: boolean(truth(tx, a))
HANDLED[operator.is_] = lambda tx, a, b: boolean(identical(a, b))
HANDLED[operator.is_not] = lambda tx, a, b: boolean(not identical(a, b))
HANDLED[operator.contains] = lambda tx, a, b: boolean(contains(tx, a, b))
HANDLED[operator.index] = lambda tx, a: a if type(a) is SymVal else fold(tx, operator.index, [a])


# %% [markdown]
# ## Questions that the program asks torch
#
# The trace is neither scripting nor tracing in the sense of `torch.jit`. Grad mode and autocast are asked of the
# tracing thread, which is in the state that the program would be in.

# %%
def constant_answer(value):
    return lambda tx, *args, **kwargs: Const(value=value)


for _function in (torch.jit.is_scripting, torch.jit.is_tracing, torch._C._get_tracing_state, torch._C._is_tracing,
                  torch.overrides.has_torch_function, torch.overrides.has_torch_function_unary,
                  torch.overrides.has_torch_function_variadic, torch.compiler.is_compiling, torch._jit_internal.is_scripting,
                  torch.compiler.is_exporting, torch.compiler.is_dynamo_compiling,
                  torch.overrides.is_tensor_method_or_property, torch._C._is_torch_function_mode_enabled):
    HANDLED[_function] = constant_answer(False)
HANDLED[torch._C._get_tracing_state] = constant_answer(None)


HANDLED[marks.is_compiling] = constant_answer(True)


@handles(torch.is_grad_enabled)
def grad_enabled(tx):
    return Const(value=torch.is_grad_enabled())


@handles(torch.is_inference_mode_enabled)
def inference_enabled(tx):
    return Const(value=torch.is_inference_mode_enabled())


@handles(torch.is_autocast_enabled)
def autocast_enabled(tx, *device):
    return Const(value=torch.is_autocast_enabled(*(d.value for d in device)))


@handles(torch.get_autocast_dtype)
def autocast_dtype(tx, device):
    return Const(value=torch.get_autocast_dtype(device.value))


@handles(torch.is_tensor)
def is_tensor(tx, value):
    return boolean(type(value) is TensorVal)


@handles(torch.numel)
def numel(tx, value):
    return call_method(tx, value, "numel", [], {})


@handles(torch.broadcast_shapes)
def broadcast_shapes(tx, *shapes):
    return fold(tx, torch.broadcast_shapes, shapes)


@handles(torch.result_type)
def result_type(tx, a, b):
    return emit(tx, "call_function", torch.result_type, [a, b], {})


@handles(torch.set_grad_enabled)
def set_grad_enabled(tx, *args, **kwargs):
    from .contexts import make_context
    return make_context(tx, torch.set_grad_enabled, args, kwargs)


@handles(warnings.warn)
def warn(tx, *args, **kwargs):
    tx.replays.append((ObjVal(real=warnings.warn, cls=types.BuiltinFunctionType), args, {}))


@handles(print)
def print_(tx, *args, **kwargs):
    unsupported(tx, "print()")


@handles(id)
def identity(tx, value):
    unsupported(tx, "id()")


@handles(globals, locals, eval, exec, compile, open, input, breakpoint, __import__)
def refused(tx, *args, **kwargs):
    unsupported(tx, "a builtin that looks at or runs the program itself")


@handles(torch._assert)
def torch_assert(tx, condition, message):
    if not truth(tx, condition):
        raise UserError(ExcVal(cls=AssertionError, args=[message]))
