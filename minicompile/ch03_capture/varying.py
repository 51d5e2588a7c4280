# %% [markdown]
# # What functions make of numbers that vary
#
# `round(n, -1)`, `math.isqrt(n)`, `len(f"{n}")`, `math.isnan(lr)`, `numpy.cos(t)`: of a number that varies, what the function gives is no
# expression that sizes or floats can have, but the entry can call it, as capture does. If it gives a number, this is a number of its own, a
# text waits for somebody who looks at it, and yes or no is guarded. Anything else needs a version for each value.

# %%
import builtins
import math

import numpy
import torch

from ..ch01_graphs.floats import free_names, numpy_warnings
from ..ch01_graphs.shapes import expr_of
from ..ch02_guards.sources import CallSource, ComputedSource, Source, VaryingItemSource
from .inputs import TENSOR_TYPES, wrap_dynamic_number
from .keys import entries
from .tracer import Tracer, constant_source, guard
from .values import (
    AbstractValue, Const, ListVal, NUMBERS, NUMPY_SCALARS, NotConstant, ObjVal, SliceVal, SymVal, TupleVal, boolean, const, is_identity,
    is_unseen)
from .wrap import realize, wait, wrap


MOST_LETTERS = 4096              # letters of an expression that the entry computes


def computed(tx: Tracer, function, args, named: dict) -> AbstractValue | None:
    """function(*args, **named) where the entry can compute it from numbers that vary; None where it cannot, or there are none."""
    if tx.symbols.env.frozen or not any(map(varies_in, (*args, *named.values()))):
        return None
    try:
        source, result = application(tx, function, args, named)
    except NotConstant:
        return None
    if len(source.text()) > MOST_LETTERS:                    # each `s = s % 5 + s` doubles it
        return None
    if type(result) in (bool, numpy.bool_):
        guard(tx, source if type(result) is bool else CallSource(source, "item"), "CONSTANT_MATCH", bool(result))
        return boolean(result) if type(result) is bool else const(result)
    if type(result) in NUMBERS:
        return wrap_dynamic_number(tx, result, source)
    return wait(tx, result, source) if type(result) is str else None


def varies_in(value, items: bool = True) -> bool:
    """Whether a value is a number that varies, is made of one, or, if items count, is a tuple, a list or a slice with such an item."""
    if is_unseen(value):
        return any(map(varies_in, (*value.recipe[1], *value.recipe[2].values()))) if value.recipe else type(value.source) is ComputedSource
    inside = value.items if type(value) in (TupleVal, ListVal) else ends(value) if type(value) is SliceVal else ()
    return type(value) is SymVal or items and any(varies_in(v, False) for v in inside)


def ends(value: SliceVal) -> tuple:
    return value.start, value.stop, value.step


# %% [markdown]
# An item at a place that varies, `self.betas[t]` or `layers[n]`, needs no version for each place if it is a tensor or a number: the
# entry reads what is there, and what is guarded is its metadata or its type. The trace must not have written to the sequence before.

# %%
def varying_item(tx: Tracer, container: TupleVal | ListVal, key: AbstractValue) -> AbstractValue | None:
    """container[key] of a sequence of the program at a place that varies; None where the place must be known."""
    if type(key) is not SymVal or key.scalar or tx.symbols.env.frozen:
        return None
    if container.source is None or type(container.real) is not container.cls or id(container) in tx.effects.changed:
        return None
    place = expr_of(key.sym)
    at = tx.symbols.env.hint(place)
    if type(at) is not int or not -len(container.real) <= at < len(container.real):
        return None
    real, symbols = container.real[at], tuple((name, tx.symbols.sources[name]) for name in sorted(free_names(place)))
    source = VaryingItemSource(container.source, place, symbols)
    if type(real) in (int, float):
        return wrap_dynamic_number(tx, real, source)
    return wrap(tx, real, source) if type(real) in TENSOR_TYPES else None


# %% [markdown]
# The source of such a number is the call itself. For `round(lr * 10, 2)` of a varying `lr` it holds the name `round`, the
# expression `lr * 10`, the text `2`, and where the entry finds `lr`. `application` makes it, and calls the function once, on
# the numbers of this call: the trace goes on with what that gives. `argument_at` does the same for one argument. A constant is
# its text, a number that varies its expression, a tuple or a slice another call, whose function puts the parts together
# (`as_tuple`, `slice`). What has no text raises `NotConstant`, and so does a function that raises for these numbers, which is
# then for the program to see.

# %%
def application(tx: Tracer, function, args, named: dict) -> tuple:
    """The source of function(*args, **named), and what it gives now. Raises NotConstant: where it raises for these very numbers, and for
    arguments that have no text."""
    at, given, by_name = call_at(tx, function, args, named)
    try:
        with numpy_warnings("ignore"):               # of which the entry warns
            return at, function(*given, **by_name)
    except REFUSALS_OF_VALUES as error:
        raise NotConstant from error


def call_at(tx: Tracer, function, args, named: dict, find=None) -> tuple:
    """The source of function(*args, **named), and the arguments as they are now. find: gives both for one argument (`argument_at`)."""
    find = find or argument_at
    given, by_name = [find(tx, a) for a in args], {name: find(tx, v) for name, v in named.items()}
    numbers = [x for x, _ in (*given, *by_name.values()) if not isinstance(x, (str, Source))]
    symbols = sorted(set().union(*map(free_names, numbers)))
    at = ComputedSource(function_at(tx, function), tuple(x for x, _ in given), tuple((name, x) for name, (x, _) in by_name.items()),
                        tuple((name, tx.symbols.sources[name]) for name in symbols))
    return at, [v for _, v in given], {name: v for name, (_, v) in by_name.items()}


REFUSALS_OF_VALUES = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)     # what functions of numbers and texts raise


def argument_at(tx: Tracer, value) -> tuple:
    """What stands for a value in a `ComputedSource`, and the object that it is now."""
    if is_unseen(value):
        return application(tx, *value.recipe) if value.recipe else (value.source, value.hidden)
    if type(value) is SymVal and value.scalar is not None:
        return application(tx, value.scalar, [SymVal(node=value.node, sym=value.sym)], {})
    if type(value) is SymVal:
        number = expr_of(value.sym)
        return number, tx.symbols.env.hint(number)
    if type(value) in (TupleVal, ListVal) and value.cls in SEQUENCES:
        return application(tx, SEQUENCES[value.cls], [realize(tx, v) for v in entries(tx, value)], {})
    if type(value) is SliceVal:
        return application(tx, slice, ends(value), {})
    if type(value) is ObjVal and type(value.real) is type and value.real in NUMPY_SCALARS | NUMBERS:
        return function_at(tx, value.real), value.real
    if type(value) is not Const or is_identity(value):
        raise NotConstant
    plain = type(value.value) in (int, bool, str, bytes, type(None)) or type(value.value) is float and math.isfinite(value.value)
    return repr(value.value) if plain else constant_source(tx, value.value), value.value


def function_at(tx: Tracer, function) -> "str | Source":
    """How the entry names a function."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    owner = getattr(function, "__objclass__", None)
    if getattr(builtins, name, None) is function or owner and getattr(builtins, owner.__name__, None) is owner:
        return name
    return f"__math.{name}" if module == "math" else constant_source(tx, function)


def as_tuple(*items) -> tuple:
    return items


def as_plain_list(*items) -> list:
    return [*items]


def as_size(*items) -> torch.Size:
    return torch.Size(items)


SEQUENCES = {tuple: as_tuple, list: as_plain_list, torch.Size: as_size}
