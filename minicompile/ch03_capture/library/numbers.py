# %% [markdown]
# # Numbers
#
# A conversion has three cases. A tensor has no number at compile time, so it breaks the graph, unless only a `raise` depends
# on it. A symbolic number stays one if the conversion keeps its kind. An object of the program may have a method for it,
# `__int__` for example, which is traced. What is left are constants, for which the function itself is called.

# %%
import math

import torch

from ..calls import HANDLED, handles
from ..comparisons import number_left_open, truth
from ..constants import as_item
from ..lookup import MISSING, lookup
from ..operations import binary, emit_float, fold, later, scalar_of, unary
from ..protocol import special
from ..tensors import emit
from ..tracer import unsupported
from ..values import Const, FALSE, NONE, SymVal, TensorVal, TupleVal, boolean, const, describe

ZERO, ONE = const(0), const(1)


def whole_number(tx, rounding, value: SymVal):
    """rounding(value) of a symbolic number."""
    return value if value.cls is int else fold(tx, rounding, [value])


def own_conversion(tx, value, *names):
    """The number that a class of the program makes of its object, by the first of these methods that it has; None if that is one in C."""
    name = next((name for name in names if lookup(value.cls, name) is not MISSING), None)
    return name and special(tx, value, name)


def conversion(kind, of_symbol, *methods):
    """The handler of `int` or `float`. of_symbol: what it is of a symbolic number of the other kind."""
    def handler(tx, value=ZERO, *base):
        value = as_item(value)
        if type(value) is TensorVal:
            number = None if base else number_left_open(tx, value, kind.__name__)
            return number or unsupported(tx, f"{kind.__name__}() of a tensor")
        if base:                                     # only texts have one
            return fold(tx, kind, [value, *base])
        if type(value) is SymVal:
            return scalar_of(value, None) if value.number is kind else of_symbol(tx, value)
        made = own_conversion(tx, value, *methods) or fold(tx, kind, [value])
        return handler(tx, made) if kind is float and made.cls is int else made             # of `__index__`
    return handler


def rounds(rounding, method):
    def handler(tx, value):
        return whole_number(tx, rounding, value) if type(value) is SymVal else \
            own_conversion(tx, value, method) or fold(tx, rounding, [value])
    return handler


# %% [markdown]
# `bool` asks for the truth of its argument as a jump does, and leaves it open where only a `raise` depends on it. The functions of
# two numbers are the operators, as far as there are any, and ask a class of the program for its method.

# %%
@handles(bool)
def truth_of(tx, value=FALSE):
    number = number_left_open(tx, value, "bool") if type(as_item(value)) is TensorVal else None
    return number or boolean(truth(tx, value))


@handles(abs)
def absolute(tx, value):
    if type(value) is TensorVal:
        return emit(tx, torch.abs, [value])
    return unary(tx, "abs", value)


@handles(round)
def rounded(tx, value, digits=None):
    more = [] if digits in (None, NONE) else [digits]
    if type(value) is SymVal and not more:
        return whole_number(tx, round, value)
    if type(value) is SymVal and value.cls is float:
        if type(digits) is Const and type(digits.value) is int:
            return emit_float(tx, "round", [value, digits])
    if more and type(digits) is Const and value.cls is float and (made := later(tx, float, round, [value, digits])) is not None:
        return made
    return special(tx, value, "__round__", *more) or fold(tx, round, [value, *more], reason=f"round() of {describe(value)}")


def power(tx, base, exp, mod=NONE):
    if mod is NONE:
        return binary(tx, "**", base, exp)
    return special(tx, base, "__pow__", exp, mod) or fold(tx, pow, [base, exp, mod])


def divided(tx, a, b):
    result = special(tx, a, "__divmod__", b) or special(tx, b, "__rdivmod__", a)
    if result is None and SymVal in (type(a), type(b)) and {a.cls, b.cls} <= {int, float}:
        return TupleVal(items=[binary(tx, "//", a, b), binary(tx, "%", a, b)])
    return result or fold(tx, divmod, [a, b], reason=f"divmod() of {describe(a)} and {describe(b)}")


HANDLED.update({
    int: conversion(int, lambda tx, value: whole_number(tx, int, value), "__int__", "__index__", "__trunc__"),
    float: conversion(float, lambda tx, value: emit_float(tx, "float", [value]), "__float__", "__index__"),
    complex: lambda tx, *args: args and own_conversion(tx, args[0], "__complex__") or fold(tx, complex, args),
    math.trunc: rounds(math.trunc, "__trunc__"), math.floor: rounds(math.floor, "__floor__"), math.ceil: rounds(math.ceil, "__ceil__"),
    divmod: divided, pow: power})
