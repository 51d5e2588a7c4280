# %% [markdown]
# # Functions with a cache
#
# `functools.lru_cache` and `functools.cache` make an object in C of a function, which calls that only for arguments that are new. When
# it is called, and what a graph may make of its answer, is decided here.

# %%
import builtins
import contextlib
import enum
import functools
import logging
import math
import opcode
import types

import torch
from torch import is_grad_enabled, is_inference_mode_enabled

from ...ch02_guards.identity import is_a, is_long_lived, is_of_library, module_name, weakly
from ...errors import Unsupported, interrupts, marked
from ..calls import REAL_CALLS, handles
from ..comparisons import truth
from ..effects import effect_free
from ..exceptions import user_error
from ..inputs import wrap_dynamic_number
from ..interpreter import covering
from ..keys import key_of, refuse_unhashable
from ..tracer import call, constant_source, guard, location, say_where, unsupported
from ..values import (
    BuiltinVal, CONSTANT_TYPES, Const, FALSE, NUMBERS, NotConstant, ObjVal, SymVal, TensorVal, TupleVal, boolean, const, describe)
from ..varying import argument_at, call_at, varies_in
from ..wrap import is_fixed, wrap

# %% [markdown]
# ## When it is called
#
# What a function with an `lru_cache` does, it does once for the same arguments. So with arguments that the entry can find it is called now:
# the program would only find the answer. A constant is a constant of the trace, and a tensor or a list is read from the cache again in each
# call, since the program may write to it. Then the function may find nothing there, so it is called in the grad mode of the program. An
# object among the arguments, as `self`, is read where the program has it, so that no entry keeps it. A number that varies is one of
# these arguments, too (`call_at`). But of what is a number itself, the trace knows more if the function is inlined.
#
# After a write of the trace or under autocast the function might see what it should not (`sees_no_change`), and what the trace has made
# cannot be an argument before the graph runs. Then the function is inlined, and has to give a number or a constant, made of its arguments
# alone (`asks_only_arguments`): of a global that was another one the cache has the old answer. Only where an argument is a new tensor,
# which no cache knows, may it ask and give more. What it raises is in no cache; that ends the graph, as side effects and random numbers do.
#
# A cache that the trace makes keeps its results in the trace, under keys by the rules of CPython: one `int` or `str` is a key itself, so
# `f(1)` and `f(1.0)` are two calls. A cache for no results at all is no cache.

# %%
@REAL_CALLS.of(functools._lru_cache_wrapper)
def call_cached(tx, function, args, kwargs):
    arguments = [*args, *kwargs.values()]
    if function.real.cache_parameters()["maxsize"] == 0:
        return call(tx, wrap(tx, function.real.__wrapped__), args, kwargs)
    is_early = not (tx.effects.changed or tx.contexts) or sees_no_change(tx, function.real, arguments)
    known = (is_early or not tx.effects.changed) and all(map(is_known, arguments))
    if not known:
        for value in arguments:
            refuse_unhashable(value)
    if (known or is_early) and (found := found_again(tx, function, args, kwargs, known)) is not None:
        return found
    is_new = any(type(v) is TensorVal and v.source is None for v in arguments)
    if not is_new and not (all(map(is_numbers_only, arguments)) and asks_only_arguments(function.real)):
        unsupported(tx, f"{describe(function)}, which may know an older answer")
    result = inline_cached(tx, function, args, kwargs)
    if not is_new and not is_numbers_only(result):
        unsupported(tx, f"a result that {describe(function)} keeps")
    return result


def found_again(tx, function, args, kwargs, known: bool):
    """What the entry will find by calling the function; None if it cannot call it, or that is made of numbers that vary. known: the
    arguments are constants and objects, of which others are another version, so a constant that comes of them is one of the trace."""
    if known:                                            # so each is looked at, also if the program only hands it on
        args, kwargs = [seen(v) for v in args], {name: seen(v) for name, v in kwargs.items()}
    try:
        source, given, named = call_at(tx, calling_in_mode, [boolean(is_grad_enabled()), function, *args], kwargs, place_of)
    except NotConstant:
        return None
    result = call_now(tx, function, functools.partial(calling_in_mode, *given, **named))
    if known:
        for value in (*args, *kwargs.values()):
            if type(value) is ObjVal:
                guard(tx, value.source, "ID_MATCH", value.real)
        if type(result) in CONSTANT_TYPES and not kwargs:           # somebody may clear the cache
            asked = (weakly(v) if type(a) is ObjVal and a.source is not None else v for a, v in zip(args, given[2:]))
            tx.guards.add(None, "ANSWER", (function.real, tuple(asked), result), location(tx))
            return const(result)
    if id(result) not in tx.objects.tracked and any(value.source == source for value in tx.objects.tracked.values()):
        unsupported(tx, f"another result of {describe(function)}, whose cache has forgotten the first")
    if is_constant(result) and any(map(varies_in, (*args, *kwargs.values()))):
        if asks_only_arguments(function.real):
            return None
        if type(result) in NUMBERS:
            return wrap_dynamic_number(tx, result, source)
    return wrap(tx, result, source)


def seen(value):
    return const(value.value) if type(value) is Const else value


def is_constant(result) -> bool:
    return all(map(is_constant, result)) if type(result) is tuple else type(result) in CONSTANT_TYPES


def call_now(tx, function, again):
    """What it gives. Capture itself is not in inference mode."""
    inference = tx.options.inference
    try:
        with contextlib.nullcontext() if is_inference_mode_enabled() == inference else torch.inference_mode(inference):
            return again()
    except Exception as error:
        if interrupts(error):
            raise
        obstacle = say_where(tx, Unsupported(f"{describe(function)}, which has a cache, raises {type(error).__name__}", location(tx)))
        is_caught = any(covering(frame, frame.decoded.instructions[frame.ip - 1].offset) for frame in tx.frames)
        raise marked(obstacle, raises=tx.options.fullgraph and not is_caught) from None


def calling_in_mode(enabled: bool, function, /, *args, **kwargs):
    if is_grad_enabled() == enabled:
        return function(*args, **kwargs)
    with torch.set_grad_enabled(enabled):
        return function(*args, **kwargs)


def place_of(tx, value) -> tuple:
    """Where the entry finds an argument, and what it is now."""
    if type(value) not in (ObjVal, TensorVal):
        return argument_at(tx, value)
    if value.real is None:
        raise NotConstant
    return constant_source(tx, value.real) if value.source is None or is_fixed(value.real) else value.source, value.real


def inline_cached(tx, function, args, kwargs):
    mode = tx.tensors.mode
    drawn, mode.draws = mode.draws, False
    try:
        with effect_free(tx, describe(function)):
            result = call(tx, wrap(tx, function.real.__wrapped__), args, kwargs)
        if mode.draws:
            unsupported(tx, f"random numbers that {describe(function)} keeps")
    finally:
        mode.draws = drawn or mode.draws
    return result


def codes_of(function) -> list:
    """The code of a function, and of those that are made in it."""
    codes = [function.__code__]
    for code in codes:
        codes += [constant for constant in code.co_consts if type(constant) is types.CodeType]
    return codes


def asks_only_arguments(function, *callers) -> bool:
    """Whether what a function gives is made of its arguments alone: what its code names besides are such functions and what only computes,
    and the modules and the classes of libraries in which these are."""
    if isinstance(function, functools._lru_cache_wrapper):
        return asks_only_arguments(function.__wrapped__, *callers)
    if type(function) is not types.FunctionType or function in callers:
        return function in callers or only_computes(function)
    names = set().union(*(code.co_names for code in codes_of(function)))
    known = [function.__globals__[name] for name in names if name in function.__globals__]
    known += [vars(builtins)[name] for name in names if name in vars(builtins)]
    known += [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    known += [v for v in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()) if not is_constant(v)]
    owners = set()
    for owner in known:
        if owner is not math and is_a(owner, (type, types.ModuleType, types.FunctionType)) and id(owner) not in owners:
            owners.add(id(owner))
            known += [vars(owner)[name] for name in names if name in vars(owner)]
    return all(asks_only_arguments(value, function, *callers) for value in known)


# %% [markdown]
# `einops` keeps what it has made of a pattern, and models ask for it under autocast, in their rotary embeddings, or after `self.cache = t`,
# neither of which it sees. `sees_no_change` walks through all that a function may reach: what its code names in its globals, what lies in
# its closure, classes with their methods, the arguments. Nothing there may be what the trace has written to, nor, inside of a context, of
# PyTorch. What it does not know how to look into may be anything. A logger asks its filters and its handlers, and those write to a
# stream, which is taken to be one: `transformers` says a thing once by a method of its loggers that has a cache.

# %%
def sees_no_change(tx, function, arguments) -> bool:
    """Whether the function does now what it does before the graph."""
    if any(value.cls is types.ModuleType for value, _ in tx.effects.changed.values()):
        return False
    written = {id(value.real) for value, _ in tx.effects.changed.values()}
    things, seen = [function.__wrapped__, *map(real_of, arguments)], {}
    while things and len(seen) < LOOKED_AT_MOST:
        if id(thing := things.pop()) not in seen:
            seen[id(thing)] = thing
            inside = None if id(thing) in written else looked_into(thing, bool(tx.contexts))
            if inside is None:
                return False
            things += inside
    return not things


LOOKED_AT_MOST = 1000
SCALARS = (*CONSTANT_TYPES, types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType, logging.Manager)


def real_of(value):
    """What the program has for an argument, or for the parts of one."""
    if type(value) is TupleVal:
        return tuple(map(real_of, value.items))
    return value.value if type(value) in (Const, SymVal) else value.real


def looked_into(thing, pytorch: bool) -> list | None:
    """What a function finds in `thing`; None where that is not known. pytorch: and where it is of PyTorch."""
    if type(thing) in SCALARS:
        return []
    if type(thing) is types.BuiltinFunctionType:
        return None if thing in ASK_BY_NAME - {getattr} else [thing.__self__]
    if pytorch and module_name(vars(thing) if type(thing) is types.ModuleType else thing).partition(".")[0] == "torch":
        return None
    if is_long_lived(thing):
        return []
    if type(thing) in (tuple, list, set, frozenset):
        return list(thing)
    if type(thing) is dict:
        return [*thing, *thing.values()]
    if type(thing) in LOGGERS:
        return [logging.getLogRecordFactory(), *vars(thing).values()]
    if type(thing) in LOG_HANDLERS:
        return [value for name, value in vars(thing).items() if name not in ("lock", "stream", "flush")]
    if type(thing) in INSIDE:
        return [getattr(thing, name) for name in INSIDE[type(thing)] if hasattr(thing, name)]
    if type(thing) is types.FunctionType:
        return [] if is_of_library(thing, module_name(thing), thing.__qualname__) else named_by(thing, pytorch)
    if type(thing) is type:
        return [*vars(thing).values(), *thing.__bases__]
    if layout(type(thing)) == layout(Plain):
        return [type(thing), *thing.__dict__.values()]
    return None


def layout(kind) -> tuple:
    return kind.__basicsize__, kind.__dictoffset__, kind.__weakrefoffset__


class Plain:
    """Its instances hold a dictionary and nothing else. A slot is more, and so is what a class in C holds, as `functools.partial`."""


LOGGERS = (logging.Logger, logging.RootLogger)
LOG_HANDLERS = (logging.StreamHandler, logging.FileHandler, logging.NullHandler, type(logging.lastResort))
INSIDE = {functools._lru_cache_wrapper: ("__wrapped__",), staticmethod: ("__func__",), classmethod: ("__func__",),
          property: ("fget", "fset", "fdel"), types.CellType: ("cell_contents",)}


# %% [markdown]
# A function reaches what its code names: globals, builtins, what modules that it names have under one of these names, attributes on the
# way. `getattr`, `eval` and their like may reach more, and an `import` anything; then it is not known. A function of the standard library
# is taken to see its arguments only, and so is one that has no more than they have.

# %%
def named_by(function, pytorch: bool) -> list | None:
    """What the code of a function names, in the modules that it names, too."""
    codes = codes_of(function)
    names = set().union(*(code.co_names for code in codes))
    if any(opcode.opmap["IMPORT_NAME"] in code.co_code[::2] for code in codes):
        return None
    found, spaces = [*(function.__closure__ or ()), function.__defaults__, function.__kwdefaults__], [function.__globals__, vars(builtins)]
    for space in spaces:
        for value in [space[name] for name in names if name in space]:
            if type(value) is not types.ModuleType:
                found.append(value)
            elif pytorch and module_name(vars(value)).partition(".")[0] == "torch":
                return None
            elif not any(vars(value) is other for other in spaces):
                spaces.append(vars(value))
    return found


COMPUTE = {"builtins", "math", "cmath", "_operator"}
ASK_BY_NAME = {getattr, vars, globals, eval, exec, open, input, __import__, super}     # by a name in a string, or elsewhere


def only_computes(thing) -> bool:
    if type(thing) is types.BuiltinFunctionType:
        return type(thing.__self__) is types.ModuleType and thing.__self__.__name__ in COMPUTE and thing not in ASK_BY_NAME
    if is_a(thing, type):
        return is_long_lived(thing) and thing not in ASK_BY_NAME
    return is_a(thing, (types.ModuleType, types.MethodDescriptorType, types.WrapperDescriptorType, enum.Enum, torch.dtype))


def is_numbers_only(value) -> bool:
    """Whether a value is a number, another constant, or a tuple of them."""
    return all(map(is_numbers_only, value.items)) if type(value) is TupleVal else type(value) in (Const, SymVal)


def is_known(value) -> bool:
    return type(value) is Const or type(value) is ObjVal and value.real is not None and not value.attrs


@handles(functools.lru_cache)
def make_lru_cache(tx, maxsize=const(128), typed=FALSE):
    typed = truth(tx, typed)
    if type(maxsize) is not Const:
        return memoized(tx, maxsize, 128, typed)
    if not isinstance(maxsize.value, int | None):
        user_error(TypeError, "Expected first argument to be an integer, a callable, or None")
    return BuiltinVal(name="lru_cache", call=lambda tx, args, kwargs: memoized(tx, args[0], maxsize.value, typed))


def memoized(tx, function, limit, typed):
    known = {}

    def lookup_or_call(tx, args, kwargs):
        if limit is not None and limit <= 0:
            return call(tx, function, args, kwargs)
        key = key_of_call(tx, args, kwargs, typed)
        if key not in known:
            if limit is not None and len(known) >= limit:
                unsupported(tx, "an lru_cache that is full")
            known[key] = call(tx, function, args, kwargs)
        return known[key]
    return BuiltinVal(name="memoized", call=lookup_or_call, binds=True)


def key_of_call(tx, args, kwargs, typed):
    keys = tuple(key_of(tx, a) for a in args)
    if len(keys) == 1 and not kwargs and not typed and args[0].cls in (int, str):
        return keys[0]
    named = tuple((k, key_of(tx, v)) for k, v in kwargs.items())
    return keys, named, tuple(a.cls for a in (*args, *kwargs.values())) if typed else ()
