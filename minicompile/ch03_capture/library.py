# %% [markdown]
# # The standard library
#
# What Python programs lean on is half Python and half C. The Python half is inlined like any other code.
# Three sorts of C code remain. Some only compute: given constants they are called at compile time, and the
# result is a constant. Some take functions or iterators (`groupby`, `tee`, `cmp_to_key`): they are written
# here for values. And some ask about the state of the process, which is guarded or ends the graph.

# %%
from __future__ import annotations

import _thread
import contextvars
import copy
import enum
import fnmatch
import functools
import heapq
import importlib
import inspect
import itertools
import json
import logging
import operator
import posixpath
import re
import sys
import textwrap
import types
import typing
import weakref

import torch

from ..ch02_guards.sources import CallSource
from .attributes import get_attribute
from .builtins_ import folded, function_of
from .calls import HANDLED, REAL_CALLS, handles
from .interpreter import call, effect_free, guard, handled_exception, unsupported
from .iterate import iterate, unpack, values_of
from .methods import call_method, method
from .operations import equal, fold, identical, set_item, truth, user_errors
from .values import (
    BuiltinVal, CONSTANT_TYPES, Const, DictVal, ExcVal, FuncVal, Identity, IterVal, ListVal, MISSING,
    MethodVal, NEW, NONE, NotConstant, ObjVal, SetVal, SliceVal, TupleVal, class_of, describe, dict_of,
    lookup)
from .wrap import key_of, part, realize, wrap


# %% [markdown]
# ## Called at compile time

# %%
for _function in (
        re.match, re.search, re.fullmatch, re.sub, re.subn, re.split, re.findall, re.compile, re.escape,
        textwrap.dedent, textwrap.indent, textwrap.fill, textwrap.wrap, json.dumps, json.loads,
        fnmatch.fnmatch, posixpath.join, posixpath.basename, posixpath.dirname, posixpath.splitext,
        typing.get_origin, typing.get_args, sys.getrecursionlimit, sys.intern, operator.length_hint):
    HANDLED[_function] = folded(_function)


@method(SliceVal, "indices")
def slice_indices(tx, self, length):
    return fold(tx, slice.indices, [self, length])


# %% [markdown]
# ## Iterators and functions of functions

# %%
@handles(itertools.tee)
def make_tee(tx, items, n=Const(value=2)):
    copies = itertools.tee(values_of(tx, items), n.value)
    return TupleVal(items=[IterVal(it=(v for v in one)) for one in copies])


@handles(itertools.groupby)
def make_groupby(tx, items, key=NONE):
    measure = function_of(tx, key, lambda v: v)
    groups = itertools.groupby(values_of(tx, items), lambda v: Same(tx, measure(v)))
    return IterVal(it=(TupleVal(items=[k.value, IterVal(it=(v for v in group))]) for k, group in groups))


class Same:
    """A value that Python code compares with the traced `==`."""

    def __init__(self, tx, value):
        self.tx, self.value = tx, value

    def __eq__(self, other):
        return equal(self.tx, self.value, other.value)


def by_test(function):
    """`takewhile(test, items)` and its like."""
    def handler(tx, test, items):
        keep = function_of(tx, test, lambda v: v)
        return IterVal(it=(v for v in function(lambda v: truth(tx, keep(v)), values_of(tx, items))))
    return handler


HANDLED.update({f: by_test(f) for f in (itertools.takewhile, itertools.dropwhile, itertools.filterfalse)})
HANDLED[itertools.compress] = lambda tx, items, selectors: IterVal(it=(
    v for v, s in zip(values_of(tx, items), values_of(tx, selectors)) if truth(tx, s)))


def called_until(tx, function, sentinel):
    while not equal(tx, value := call(tx, function, []), sentinel):
        yield value


HANDLED[iter] = lambda tx, value, *sentinel: \
    IterVal(it=called_until(tx, value, *sentinel)) if sentinel else iterate(tx, value)


@handles(operator.methodcaller)
def make_methodcaller(tx, name, *args, **kwargs):
    return BuiltinVal(name="methodcaller", call=lambda tx, given, _: call(
        tx, get_attribute(tx, given[0], name.value), args, kwargs))


@handles(functools.cmp_to_key)
def make_cmp_to_key(tx, function):
    return BuiltinVal(name="cmp_to_key", call=lambda tx, args, kwargs: ObjVal(
        real=NEW, cls=Ordered, attrs={"compare": function, "item": args[0]}))


class Ordered:
    """What `cmp_to_key` makes of an item. Inlined like a class of the program."""

    def __lt__(self, other):
        return self.compare(self.item, other.item) < 0

    def __eq__(self, other):
        return self.compare(self.item, other.item) == 0


# %% [markdown]
# What a function with an `lru_cache` does, it does once for the same arguments. So with objects that are
# known now it is called now: the program would only find the answer. Other calls are inlined, as are those
# after a write; then the cache is bypassed, which only a function with side effects would show, and those end
# the graph. A cache that the trace makes keeps its results in the trace.

# %%
@REAL_CALLS.of(functools._lru_cache_wrapper)
def call_cached(tx, function, args, kwargs):
    arguments = [*args, *kwargs.values()]
    if not tx.dirty and not tx.global_writes and all(is_known(v) for v in arguments):
        named = {k: known_object(v) for k, v in kwargs.items()}
        with user_errors():
            result = function.real(*(known_object(v) for v in args), **named)
        if type(result) in CONSTANT_TYPES:
            for value in arguments:
                if type(value) is ObjVal:
                    guard(tx, value.source, "ID_MATCH", value.real)
            return Const(value=result)
    with effect_free(tx, describe(function)):
        return call(tx, wrap(tx, function.real.__wrapped__), args, kwargs)


def is_known(value) -> bool:
    return type(value) is Const or type(value) is ObjVal and value.real is not NEW and not value.attrs \
        and not isinstance(value.real, torch.nn.Module)


def known_object(value):
    return value.value if type(value) is Const else value.real


@handles(functools.lru_cache)
def make_lru_cache(tx, maxsize=Const(value=128), typed=None):
    if type(maxsize) is not Const:
        return memoized(tx, maxsize, 128)
    return BuiltinVal(name="lru_cache", call=lambda tx, args, kwargs: memoized(tx, args[0], maxsize.value))


HANDLED[functools.cache] = lambda tx, function: memoized(tx, function, None)


def memoized(tx, function, limit):
    known = {}

    def lookup_or_call(tx, args, kwargs):
        key = tuple(key_of(tx, a) for a in args), tuple((k, key_of(tx, v)) for k, v in kwargs.items())
        if key not in known:
            if limit is not None and len(known) >= limit:
                unsupported(tx, "an lru_cache that is full")
            known[key] = call(tx, function, args, kwargs)
        return known[key]
    return BuiltinVal(name="memoized", call=lookup_or_call)


@method(ObjVal, "__get__")
def bind_function(tx, self, obj, owner=NONE):
    if type(self.real) is not types.FunctionType:
        raise NotConstant
    return self if identical(obj, NONE) else MethodVal(func=self, self=obj)


# %% [markdown]
# Heaps: the algorithm is Python code in `heapq.py`, below the C that replaces it.

# %%
@functools.lru_cache(None)
def pure_python_heapq() -> dict:
    source = inspect.getsource(heapq).split("# If available, use C implementation")[0]
    namespace = {"__name__": "heapq"}
    exec(compile(source, heapq.__file__, "exec"), namespace)
    return namespace


for _name in ("heappush", "heappop", "heapify", "heapreplace", "heappushpop"):
    HANDLED[getattr(heapq, _name)] = lambda tx, *args, name=_name: call(
        tx, wrap(tx, pure_python_heapq()[name]), args)


# %% [markdown]
# `collections.Counter` counts in C when it can.

# %%
@handles(__import__("_collections")._count_elements)
def count_elements(tx, mapping, items):
    get = get_attribute(tx, mapping, "get")
    for item in values_of(tx, items):
        number = call(tx, get, [item, Const(value=0)])
        set_item(tx, mapping, item, fold(tx, operator.add, [number, Const(value=1)]))


# %% [markdown]
# ## Copies

# %%
ATOMIC = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, enum.Enum)


def deep(tx, value, memo):
    """copy.deepcopy of one value. memo: id of a value -> its copy."""
    value = realize(tx, value)
    if id(value) in memo:
        return memo[id(value)]
    kind = type(value)
    if kind in (Const, FuncVal) or kind is ObjVal and isinstance(value.real, ATOMIC):
        return value
    if kind is TupleVal:
        return TupleVal(items=[deep(tx, v, memo) for v in unpack(tx, value)], cls=value.cls)
    if kind is SetVal and all(type(v) is Const for v in value.items.values()):
        return call_method(tx, value, "copy", [])
    if kind is ListVal:
        result = memo[id(value)] = call_method(tx, value, "copy", [])
        for i, item in enumerate(unpack(tx, value)):
            result.items[i] = deep(tx, item, memo)
        return result
    if kind is DictVal:
        result = memo[id(value)] = DictVal(cls=value.cls, factory=value.factory)
        for pair in unpack(tx, call_method(tx, value, "items", [])):
            set_item(tx, result, *(deep(tx, v, memo) for v in pair.items))
        return result
    return deep_object(tx, value, memo)


COPY_HOOKS = ("__deepcopy__", "__copy__", "__getstate__", "__setstate__", "__reduce__", "__reduce_ex__",
              "__getnewargs__", "__getnewargs_ex__", "__new__")


def plain_object(value) -> bool:
    """Whether copying an object is copying its attributes."""
    if type(value) is not ObjVal or value.contents is not None:
        return False
    slots = any("__slots__" in vars(base) for base in value.cls.__mro__)
    return value.cls is types.SimpleNamespace or not slots and all(
        lookup(value.cls, hook) in (MISSING, vars(object).get(hook)) for hook in COPY_HOOKS)


def deep_object(tx, value, memo):
    own = lookup(class_of(value), "__deepcopy__")
    if isinstance(own, types.FunctionType):
        return call(tx, wrap(tx, own), [value, DictVal()])
    if not plain_object(value):
        unsupported(tx, f"copy.deepcopy() of {describe(value)}")
    result = memo[id(value)] = ObjVal(real=NEW, cls=value.cls)
    for key, entry in get_attribute(tx, value, "__dict__").items.items():
        result.attrs[key] = deep(tx, entry[1], memo)
    return result


@handles(copy.deepcopy)
def deepcopy(tx, value, memo=NONE):
    return deep(tx, value, {})


@handles(copy.copy)
def shallow_copy(tx, value):
    if type(value) in (ListVal, DictVal, SetVal):
        return call_method(tx, value, "copy", [])
    if type(value) in (Const, TupleVal, FuncVal):
        return value
    own = lookup(class_of(value), "__copy__")
    if isinstance(own, types.FunctionType):
        return call(tx, wrap(tx, own), [value])
    if not plain_object(value):
        unsupported(tx, f"copy.copy() of {describe(value)}")
    fields = get_attribute(tx, value, "__dict__").items
    return ObjVal(real=NEW, cls=value.cls, attrs={key: entry[1] for key, entry in fields.items()})


# %% [markdown]
# ## The state of the process
#
# `id(x)` is a number that means nothing but itself. Programs compare it and look it up (`copy.deepcopy`,
# `repr` of dataclasses); then any number will do that is the object's own. `Identity` is such a number, which
# can be compared but not computed with, and does not leave the graph.

# %%
@handles(id)
def identity_of(tx, value):
    if type(value) is Const and type(value.value) not in (type(None), bool, str):
        unsupported(tx, "id() of a constant")
    key = (type(value.value), value.value) if type(value) is Const else id(value)
    tx.keep.append(value)
    return Const(value=Identity(tx.identities.setdefault(key, len(tx.identities) + 1)))


HANDLED[_thread.get_ident] = lambda tx: Const(value=Identity(0))


@handles(sys.exc_info)
def exc_info(tx):
    exc = handled_exception(tx)
    if type(exc) is not ExcVal:                  # perhaps that of a handler outside of the trace
        unsupported(tx, "sys.exc_info()")
    return TupleVal(items=[wrap(tx, exc.cls), exc, NONE])


@REAL_CALLS.of(weakref.ReferenceType)
def dereference(tx, function, args, kwargs):
    return wrap(tx, function.real(), part(CallSource, function.source, "__call__"))


@method(ObjVal, "get")
def context_variable_get(tx, self, default=None):
    if not isinstance(self.real, contextvars.ContextVar):
        raise NotConstant
    try:
        now = self.real.get()
    except LookupError:
        unsupported(tx, "a context variable without a value")
    return wrap(tx, now, part(CallSource, self.source, "get"))


@handles(logging.Logger.isEnabledFor)
def logger_is_enabled(tx, logger, level):
    if logger.source is None or not is_known(logger) or type(level.value) is not int:
        unsupported(tx, "a logger that is not known")
    at = CallSource(logger.source, "isEnabledFor", (level.value,))
    return wrap(tx, logger.real.isEnabledFor(level.value), at)


def logs_at(name, level):
    """A message below the logger's level does nothing, and a guard says so. Others are written by Python."""
    @handles(getattr(logging.Logger, name))
    def log(tx, logger, *args, **kwargs):
        if truth(tx, logger_is_enabled(tx, logger, Const(value=level))):
            unsupported(tx, "a message to a log")
        return NONE


for _name, _level in {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}.items():
    logs_at(_name, _level)


@handles(importlib.import_module)
def import_module(tx, name, package=NONE):
    if type(name) is not Const or name.value.startswith(".") or name.value not in sys.modules:
        unsupported(tx, "importing a module for the first time")
    return wrap(tx, sys.modules[name.value])


@handles(__import__)
def import_(tx, name, *more):
    if more or type(name) is not Const or name.value not in sys.modules:
        unsupported(tx, "__import__() of a module for the first time")
    return wrap(tx, sys.modules[name.value.split(".")[0]])


@handles(locals)
def local_variables(tx):
    frame = tx.frames[-1]
    if frame.code.co_name == "<module>" or not frame.code.co_flags & inspect.CO_OPTIMIZED:
        unsupported(tx, "locals() outside a function")
    from .opcodes import read_cell, read_local
    found = {}
    for name in (*frame.code.co_varnames, *frame.code.co_cellvars, *frame.code.co_freevars):
        value = frame.locals.get(name)
        cell = value is not None and hasattr(value, "content")
        if value is None or cell and value.content is None:
            continue
        found[name] = read_cell(tx, value, name) if cell else read_local(tx, frame, name)
    return dict_of(found)
