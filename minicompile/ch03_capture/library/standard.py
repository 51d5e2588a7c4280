# %% [markdown]
# # The standard library
#
# What Python programs lean on is half Python and half C. The Python half is inlined like any other code.
# Four sorts of C code remain. Some only compute: given constants they are called at compile time, and the
# result is a constant. Some exist in Python as well, and that is what is run. Some take functions or iterators
# (`groupby`, `tee`, `cmp_to_key`): they are written here for values. And some ask about the state of the process,
# which is guarded or ends the graph.

# %%
import _thread
import bisect
import builtins
import collections
import contextvars
import copy
import copyreg
import dataclasses
import fnmatch
import functools
import heapq
import importlib
import inspect
import json
import logging
import operator
import posixpath
import re
import reprlib
import sys
import textwrap
import types
import typing
import weakref

import torch

from ...ch01_graphs.fake import storage_key
from ...ch02_guards.identity import HEAP_TYPE, is_a
from ...ch02_guards.sources import AttrSource, CallSource
from ..attributes import get_attribute, set_attribute
from ..builders import as_python
from ..calls import BY_CODE, HANDLED, REAL_CALLS, handles, inline_code, inline_function, refuse_weak
from ..comparisons import equal
from ..exceptions import user_error
from ..interpreter import handled_exception, is_empty, read_cell, read_local, unless_raised
from ..iterate import iterate, unpack
from ..keys import hashes_by_identity, refuse_unhashable
from ..lookup import MISSING, captures, python_method
from ..methods import call_method
from ..operations import fold
from ..protocol import METHODS, method, special
from ..subscripts import contains, set_item
from ..tracer import answer, call, constant_source, guard, plain_python, unsupported
from ..values import (
    BuiltinVal, Const, DictVal, ExcVal, FuncVal, Identity, IterVal, ListVal, MethodVal, NONE, NotConstant, ObjVal, SetVal, SliceVal,
    SymVal, TensorVal, TupleVal, const, describe, dict_of, is_class, is_identity)
from ..wrap import part, realize, wrap
from .builtins_ import folded, refused
from .caches import is_known


# %% [markdown]
# ## Called at compile time

# %%
for _function in (
        re.match, re.search, re.fullmatch, re.sub, re.subn, re.split, re.findall, re.compile, re.escape,
        textwrap.dedent, textwrap.indent, textwrap.fill, textwrap.wrap, json.dumps, json.loads,
        fnmatch.fnmatch, posixpath.join, posixpath.basename, posixpath.dirname, posixpath.splitext,
        typing.get_origin, typing.get_args, sys.intern, operator.length_hint):
    HANDLED[_function] = folded(_function)


METHODS[SliceVal, "indices"] = lambda tx, self, length: fold(tx, slice.indices, [self, length])


# %% [markdown]
# ## Functions of functions

# %%
def called_until(tx, function, sentinel):
    def turn():
        value = unless_raised(StopIteration, lambda: call(tx, function, []))
        return None if value is None or equal(tx, value, sentinel) else value
    return iter(turn, None)


HANDLED[iter] = lambda tx, value, sentinel=None: iterate(tx, value) if sentinel is None else \
    IterVal(it=called_until(tx, value, sentinel), kind=type(iter(int, 1)))


@method(ObjVal, "__get__")
def bind_function(tx, self, obj, owner=NONE):
    if type(self.real) is not types.FunctionType:
        raise NotConstant
    return self if obj is NONE else MethodVal(func=self, self=obj)


# %% [markdown]
# Decorators make functions that all have one code object, by which they are known: `__repr__` of dataclasses notes which objects it is
# in the middle of, and capture has its own limit of depth; what `singledispatch` looks up is in weak dictionaries.

# %%
@BY_CODE.of(reprlib.recursive_repr()(len).__code__,
            getattr(dataclasses, "_recursive_repr", reprlib.recursive_repr())(len).__code__)
def call_wrapped(tx, function, *args, **kwargs):
    cell = function.real.__closure__[function.real.__code__.co_freevars.index("user_function")]
    return call(tx, wrap(tx, cell.cell_contents), args, kwargs)


@BY_CODE.of(functools.singledispatch(len).dispatch.__code__)
def dispatch(tx, function, cls):
    return wrap(tx, answer(tx, function.real, cls.real)) if is_class(cls) else inline_code(tx, function, [cls], {})


@REAL_CALLS.of(types.MethodWrapperType)
def bind_descriptor(tx, function, args, kwargs):
    """`object.__setattr__.__get__`, kept in a variable, binds the method to an object: classes made by `attrs` begin with it."""
    bound = function.real.__self__
    if function.real.__name__ != "__get__" or type(bound) is not types.WrapperDescriptorType or len(args) != 1 or kwargs:
        unsupported(tx, f"a call of {describe(function)}")
    return BuiltinVal(name=bound.__name__, call=lambda tx, more, named: call(tx, wrap(tx, bound), [*args, *more], named))


# %% [markdown]
# ## The Python below the C
#
# Some modules of the standard library are written twice: in Python, and once more in C, which replaces the Python
# where there is a C compiler. The interpreter cannot look into the C, but it can run the Python. So a call of
# `heapq.heappush`, `bisect.insort` or `operator.itemgetter` runs the bytecode of the other version, like that of any
# function of the program: the comparisons of the program's own classes, exceptions in a key function, and changes
# of a list all come out as they should, and only the items are guarded that the algorithm looks at.
#
# What these functions are given could be seen to differ from the C version in one respect, its class. So objects of
# these classes do not leave the graph.

# %%
@functools.lru_cache(None)
def below_c(module) -> dict:
    """The namespace of a module of the standard library without what it would take from its version in C."""
    def import_(name, *args):
        if name == f"_{module.__name__}":
            raise ImportError
        return __import__(name, *args)
    namespace = {"__name__": module.__name__, "__package__": "", "__builtins__": {**vars(builtins), "__import__": import_}}
    exec(compile(inspect.getsource(module), module.__file__, "exec"), namespace)
    namespace["__builtins__"] = builtins
    return namespace


def interpreted(module, name):
    """Calls of a function or a class of the C version run the Python version."""
    def handler(tx, *args, **kwargs):
        python = below_c(module)[name]
        if isinstance(python, type):
            tx.classes.made.add(python)
        return call(tx, wrap(tx, python), args, kwargs)
    HANDLED[getattr(module, name)] = handler


for _module, _names in {
        heapq: ("heappush", "heappop", "heapify", "heapreplace", "heappushpop"),
        bisect: ("bisect_left", "bisect_right", "insort_left", "insort_right"),
        operator: [n for n in operator.__all__ if n not in ("index", "length_hint")],
        functools: ("reduce", "cmp_to_key"), collections: ("_count_elements",)}.items():
    for _name in _names:
        interpreted(_module, _name)

@REAL_CALLS.of(operator.itemgetter, operator.attrgetter, operator.methodcaller)
def call_getter(tx, function, args, kwargs):
    """One that the program keeps is made again, of what it says to `pickle` that it was made of."""
    if len(args) != 1 or kwargs:
        unsupported(tx, f"a call of {describe(function)} with {len(args) + len(kwargs)} arguments")
    reduced = wrap(tx, function.real.__reduce__(), part(CallSource, function.source, "__reduce__"))
    make, parts = (realize(tx, item) for item in reduced.items)
    return call(tx, call(tx, make, [realize(tx, item) for item in parts.items]), args, kwargs)


HANDLED[operator.index] = lambda tx, a: a if type(a) is SymVal and a.cls is int else \
    special(tx, a, "__index__") or fold(tx, operator.index, [a])


# %% [markdown]
# ## Copies
#
# The module `copy` is Python code and is inlined. What it asks of objects is in C: how each can be taken
# apart, `__reduce_ex__(4)`, namely into a function, its arguments, a state, and iterators over items.
#
# A tensor's own `__deepcopy__` copies its memory, once for all the views in it. With one tensor in that
# memory it is a clone.

# %%
@handles(copy.deepcopy)
def deepcopy(tx, value, memo=NONE):
    if type(value) in (Const, FuncVal, SymVal):
        return value
    return inline_function(tx, wrap(tx, copy.deepcopy), [value, memo], {})


def taken_apart(tx, make, args, state=NONE, items=NONE, pairs=NONE):
    return TupleVal(items=[wrap(tx, make), TupleVal(items=args), state, items, pairs])


@method(TupleVal, "__reduce_ex__")
def reduce_tuple(tx, self, protocol):
    items = unpack(tx, self)
    return taken_apart(tx, self.cls, items if hasattr(self.cls, "_fields") else [TupleVal(items=items)])


METHODS.update({
    (SetVal, "__reduce_ex__"): lambda tx, self, protocol: taken_apart(tx, self.cls, [ListVal(items=unpack(tx, self))]),
    (ListVal, "__reduce_ex__"): lambda tx, self, protocol: taken_apart(          # of a deque
        tx, self.cls, [TupleVal(), const(self.items.maxlen)], items=iterate(tx, self)),
})


@method(DictVal, "__reduce_ex__")
def reduce_dict(tx, self, protocol):
    if self.cls not in (collections.OrderedDict, collections.defaultdict):
        raise NotConstant
    pairs = iterate(tx, call_method(tx, self, "items", []))
    state = dict_of(self.attrs) if self.attrs else NONE
    return taken_apart(tx, self.cls, [realize(tx, self.factory)] if self.factory else [], state, pairs=pairs)


def reduce_object(tx, self, protocol=NONE):
    own = python_method(self.cls, "__reduce__")
    if own is not None:
        return call(tx, wrap(tx, own), [self])
    namespace = self.cls is types.SimpleNamespace
    in_c = not namespace and any(
        base is not object and not base.__flags__ & HEAP_TYPE or {"__getnewargs__", "__getnewargs_ex__"} & set(vars(base))
        for base in self.cls.__mro__)
    if type(self) is not ObjVal or is_a(self.real, (type, types.ModuleType)) or in_c or issubclass(self.cls, torch.nn.Module):
        unsupported(tx, f"a copy of {describe(self)}")
    state = call(tx, get_attribute(tx, self, "__getstate__"), [])
    return taken_apart(tx, *((self.cls, []) if namespace else (copyreg.__newobj__, [wrap(tx, self.cls)])),
                       state)


def state_of_object(tx, self):
    """The `__dict__`, and, if there are any, the slots that hold something."""
    def held(name):
        return unless_raised(AttributeError, lambda: get_attribute(tx, self, name))
    fields = held("__dict__")
    fields = fields if fields is not None and fields.items else NONE
    slots = {name: value for name in copyreg._slotnames(self.cls) if (value := held(name)) is not None}
    return TupleVal(items=[fields, dict_of(slots)]) if slots else fields


HANDLED.update({object.__reduce_ex__: reduce_object, object.__getstate__: state_of_object})


@method(TensorVal, "__deepcopy__")
def copy_tensor(tx, tensor, memo):
    fake, source = tensor.fake, tensor.source
    memory = identity_number(tx, "memory", storage_key(fake))
    if tensor.cls is not torch.Tensor or fake.requires_grad or contains(tx, memo, memory) or tensor.real is not None and vars(tensor.real):
        unsupported(tx, "copy.deepcopy() of a tensor that requires gradients, has attributes or lies beside a view of it")
    guard(tx, part(AttrSource, source, "__dict__"), "LENGTH", 0)
    set_item(tx, memo, memory, tensor)
    result = call_method(tx, tensor, "clone", [])
    if fake.storage_offset() != 0 or result.fake.stride() != fake.stride():
        unsupported(tx, "copy.deepcopy() of a tensor that is a part of other memory")
    if (gradient := get_attribute(tx, tensor, "grad")) is not NONE:
        set_attribute(tx, result, "grad", call(tx, wrap(tx, copy.deepcopy), [gradient, memo]))
    return result


# %% [markdown]
# ## The state of the process
#
# `id(x)` is a number that means nothing but itself. Programs compare it and look it up (`copy.deepcopy`,
# `repr` of dataclasses); then any number will do that is the object's own. `Identity` is such a number, which
# can be compared but not computed with, and leaves the graph as a call of `id`. So is `hash(x)` where a class has the hash of
# `object`, and a tensor's hash is its `id`.

# %%
@handles(id)
def identity_of(tx, value, function=id):
    if type(value) is Const and type(value.value) not in (type(None), bool, str):
        unsupported(tx, "id() of a constant")
    key = (type(value.value), value.value) if type(value) is Const else id(value)
    captures[-1].told_apart.add(value.cls)
    tx.objects.keep.append(value)
    return identity_number(tx, function, key)


def identity_number(tx, *key) -> Const:
    return const(Identity(tx.objects.identities.setdefault(key, len(tx.objects.identities) + 1)))


HANDLED[_thread.get_ident] = lambda tx: const(Identity(0))


# %% [markdown]
# Other hashes follow from contents, and are constants. Of a tuple they are computed by Python itself, from objects that have the items'
# hashes. What the program computes from an address has none.

# %%
class Hashed:
    """An object with a given hash, for the hash of the tuple it is in."""

    def __init__(self, number):
        self.number = number

    def __hash__(self):
        return self.number


def hash_of(tx, value) -> int:
    """hash(value), where it does not depend on an address. Python takes what a `__hash__` returns as it is, and does not hash it again."""
    if type(value) is TupleVal and not python_method(value.cls, "__hash__"):
        return hash(tuple(Hashed(hash_of(tx, item)) for item in unpack(tx, value)))
    result = special(tx, value, "__hash__")
    if result is None:
        refuse_unhashable(value)
    return hash(as_python(tx, value) if result is None else Hashed(as_python(tx, result)))


@handles(hash)
def handle_hash(tx, value):
    if is_identity(value):
        return value
    if type(value) in (TensorVal, ObjVal, FuncVal) and (hashes_by_identity(value.cls) or value.cls.__hash__ is torch.Tensor.__hash__):
        return identity_of(tx, value, id if type(value) is TensorVal else hash)
    return fold(tx, hash, [value]) if type(value) is SymVal and value.scalar is None else const(hash_of(tx, value))


# %% [markdown]
# The other handlers ask the process for something that can change between two calls: whether an exception is being
# handled, what a weak reference leads to, the value of a context variable, the level of a logger. Each answer is
# guarded, mostly by a source that asks again.
#
# What has side effects in the process, such as a first import, breaks the graph.

# %%
HANDLED[sys.getrecursionlimit] = lambda tx: const(answer(tx, sys.getrecursionlimit))


@handles(sys.exception)
def current_exception(tx):
    exc = handled_exception(tx)
    if exc is NONE and sys.exception() is None:          # nor is the caller in a handler
        return const(answer(tx, sys.exception))
    return exc if type(exc) is ExcVal else unsupported(tx, "an exception caught outside of the trace")


@handles(sys.exc_info)
def exc_info(tx):
    exc = current_exception(tx)
    return TupleVal(items=[NONE] * 3 if exc is NONE else [wrap(tx, exc.cls), exc, exc.traceback])


@REAL_CALLS.of(weakref.ReferenceType)
def dereference(tx, function, args, kwargs):
    return wrap(tx, function.real(), part(CallSource, function.source, "__call__"))


@handles(weakref.proxy)
def weak_proxy(tx, referent, callback=None):
    refuse_weak(tx, referent)
    unsupported(tx, "a weak proxy")


@method(ObjVal, "get")
def context_variable_get(tx, self, default=None):
    if not is_a(self.real, contextvars.ContextVar):
        raise NotConstant
    source = self.source or constant_source(tx, self.real)
    now, at = self.real.get(MISSING), CallSource(source, "get", (constant_source(tx, MISSING),))
    if now is not MISSING:
        return wrap(tx, now, at)
    guard(tx, at, "ID_MATCH", MISSING)
    if default is not None:
        return default
    try:
        own = self.real.get()
    except LookupError:
        user_error(LookupError, self)
    return wrap(tx, own, CallSource(source, "get"))


@handles(logging.Logger.isEnabledFor)
def logger_is_enabled(tx, logger, level):
    if logger.source is None or not is_known(logger) or type(level.value) is not int:
        unsupported(tx, "a logger that is not known")
    at = CallSource(logger.source, "isEnabledFor", (level.value,))
    return wrap(tx, logger.real.isEnabledFor(level.value), at)


@handles(logging.getLogger)
def get_logger(tx, name=NONE):
    logger = logging.getLogger(name.value)
    return wrap(tx, logger, constant_source(tx, logger))


# `Logger.debug` and its like are inlined: a message below the logger's level does nothing, and a guard says so. Others
# are written by Python
HANDLED[logging.Logger._log] = refused("a message to a log")


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
    if sys.version_info < (3, 13) and [i.argval for i in frame.decoded.instructions].count("locals") > 1:
        plain_python(tx, "locals() more than once: before Python 3.13 that is one dictionary, which keeps what is written to it")
    found = {}
    for name in (*frame.code.co_varnames, *frame.code.co_cellvars, *frame.code.co_freevars):
        value = frame.locals.get(name)
        cell = value is not None and hasattr(value, "content")
        if value is None or cell and is_empty(tx, value):
            continue
        found[name] = read_cell(tx, value, name) if cell else read_local(tx, frame, name)
    return dict_of(found)
