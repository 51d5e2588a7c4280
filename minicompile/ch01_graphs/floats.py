# %% [markdown]
# # Symbolic floats
#
# A learning rate that a schedule changes on every step, a temperature, a dropout of attention scaled by
# `1 / sqrt(n)`: Python floats vary too. A graph that treats them as constants is compiled again for each
# value. Most programs only *use* such a number: they multiply a tensor by it, or compute another float from
# it first. For that the number may stay unknown, as a size may.
#
# Nothing is ever simplified here. Floating-point arithmetic has no algebra worth trusting (`(a + b) - b` is
# not `a`), and a float never decides an address. So an expression is just a tree of what the program
# computes, and its meaning is that Python computes it again, operation by operation, before the kernels run:
#
#     lr * math.sqrt(1 - beta ** step)    ->    Float("mul", (f0, Float("sqrt", (Float("sub", ...),))))
#
# Operands are other trees, and integers: plain ones, or the `Expr` of a size. Where eager keeps the number in a float32 tensor on the way,
# the tree rounds it there (`float32`). In the real torch.compile a
# float input becomes a 0-d tensor, and a pass turns arithmetic on it back into scalars where it can.

# %%
import ctypes
import math
import operator
from dataclasses import dataclass
from typing import Callable

import numpy

from .symbolic import Expr, count_atoms, evaluate, symbols, to_text


@dataclass(frozen=True)
class Float:
    """A float to be computed at run time. A leaf is `symbol` (a name) or `constant` (the number as hex, since
    0.0 equals -0.0, and nan differs from itself)."""

    op: str
    args: tuple

    def __repr__(self):
        return float_text(self)


def float_constant(value: float) -> Float:
    return Float("constant", (value.hex(),))


def float_symbol(name: str) -> Float:
    return Float("symbol", (name,))


# %% [markdown]
# ## Operations
#
# Each is named, and known both as a Python function and as text. Some are *partial*: `math.sqrt(-1.0)`
# raises, and `(-1.0) ** 0.5` is not even a float. Where one of them is used on unknown numbers, the trace
# needs a guard that it gives a float.
#
# `float_operation` builds a tree, and computes at once what consists of numbers only. `evaluate_float`
# computes a tree from the values of its symbols, and `float_text` prints one as Python, which is how guards
# and host programs use it. Constants are kept as hexadecimal text, because a float that is compared by `==`
# would confuse 0.0 with -0.0.

# %%
INFIX = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**"}
OPERATIONS: dict[str, Callable] = {name: getattr(operator, name) for name in (*INFIX, "neg", "pos", "abs")}
MATH = {name: name for name in "sqrt cbrt exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh "
        "atan2 hypot fabs erf erfc gamma lgamma degrees radians copysign fmod remainder".split()}
MATH["pow"] = "math.pow"                                    # not the operator: a negative base is refused


def float32(x: float) -> float:
    """The float32 nearest to `x`."""
    return ctypes.c_float(x).value


def numpy_warnings(instead: str):
    """A context in which NumPy does this, "ignore" or "raise", where the program lets it warn, as of a division by zero."""
    return numpy.errstate(**{kind: instead for kind, how in numpy.geterr().items() if how == "warn"})


OPERATIONS.update({op: getattr(math, name) for name, op in MATH.items() if hasattr(math, name)}, float=float, float32=float32, round=round)
NAMESPACE = {"__math": math, "__float32": float32}          # what the text of an expression refers to
TOTAL = {"add", "sub", "mul", "neg", "pos", "abs", "float", "float32", "fabs", "copysign", "symbol", "constant"}


def is_partial(e: Float) -> bool:
    """May computing the last step of `e` raise, or give something that is no float?"""
    if e.op in ("truediv", "floordiv", "mod"):
        divisor = e.args[1]
        return not (isinstance(divisor, int) and divisor) and \
            not (isinstance(divisor, Float) and divisor.op == "constant" and float.fromhex(divisor.args[0]))
    return e.op not in TOTAL


def float_operation(op: str, *operands) -> Float:
    """The tree of `op` on trees, sizes and numbers. What consists of numbers only is computed now."""
    args = tuple(float_constant(a) if isinstance(a, float) else a for a in operands)
    e = Float(op, args)
    constant = all(isinstance(a, int) or isinstance(a, Float) and a.op == "constant" for a in args)
    return float_constant(float(evaluate_float(e, {}))) if constant else e


def evaluate_float(e, values: dict[str, object]):
    """The number, given each symbol's value by name; Python's own exceptions where it has none."""
    if not isinstance(e, Float):
        return evaluate(e, values)
    if e.op == "constant":
        return float.fromhex(e.args[0])
    if e.op == "symbol":
        return values[e.args[0]]
    return OPERATIONS[e.op](*[evaluate_float(a, values) for a in e.args])


def tree_size(e) -> int:
    """The number of leaves of a tree, or of symbols in a size."""
    if not isinstance(e, Float):
        return count_atoms(e) if isinstance(e, Expr) else 0
    return 1 if e.op in ("constant", "symbol") else sum(map(tree_size, e.args))


def free_names(e) -> set[str]:
    """The names of all symbols in a tree or a size."""
    if not isinstance(e, Float):
        return {s.name for s in symbols(e)} if isinstance(e, Expr) else set()
    if e.op == "symbol":
        return set(e.args)
    return set().union(*map(free_names, e.args)) if e.op != "constant" else set()


def float_text(e, name: Callable[[str], str] = str) -> str:
    """Python text; functions of the math module are spelled `__math.sqrt` (`NAMESPACE`)."""
    if not isinstance(e, Float):
        return to_text(e, lambda symbol: name(symbol.name))
    if e.op == "constant":
        value = float.fromhex(e.args[0])
        return repr(value) if math.isfinite(value) else f"float('{value}')"
    if e.op == "symbol":
        return name(e.args[0])
    parts = [float_text(a, name) for a in e.args]
    if e.op in INFIX:
        left, right = (f"({p})" if {*" *"} & {*p} or p.startswith("-") else p for p in parts)      # a size may be `2*s0`
        return f"{left} {INFIX[e.op]} {right}"
    if e.op in ("neg", "pos"):
        return f"{'-' if e.op == 'neg' else '+'}({parts[0]})"
    prefix = {"abs": "", "float": "", "round": "", "float32": "__", "math.pow": "__"}.get(e.op, "__math.")
    return f"{prefix}{e.op}({', '.join(parts)})"
