# %% [markdown]
# # Symbolic sizes and floats
#
# When a size is symbolic, PyTorch's own shape code must compute with it: broadcasting, output sizes of
# convolutions, strides. PyTorch has a door for that. `torch.SymInt(node)` is an integer whose arithmetic is
# delegated to a Python object, and meta kernels pass such integers through. The node here holds an `Expr` and
# the environment that owns its symbols.
#
# Shape code also *branches*: "is this size 1, so that it broadcasts?". A branch needs a truth value. Often
# the bounds of the symbols decide it for all sizes. Where they do not, the answer for the sizes of the
# present call is used, and the question with its answer is recorded as a guard: the trace is valid for
# exactly those inputs for which all recorded questions have the same answers.
#
# With `size = env.create(6)`, a size that is 6 in this call and at least 2 in all others, a program that asks gets
#
#     size + 2              s0 + 2
#     size // 2 * 4         4*(s0 // 2)
#     size > 100            s0 > 100
#     bool(2 * size > 3)    True
#     bool(size > 100)      False           guard: not (s0 > 100)
#     bool(size % 2 == 0)   True            guard: s0 % 2 == 0
#     int(size // 3)        2               guard: s0 // 3 == 2
#
# Arithmetic asks nothing. Nor does a comparison, until somebody wants a `bool` of it: the fourth line has a proof, the two below have
# an answer of the present call. The last one wants the number itself, which is the strongest question. A version with that guard
# serves the sizes 6, 7 and 8.

# %%
import contextlib
import functools
import math
import operator
import re
import threading
from dataclasses import dataclass, field
from typing import Callable

import torch
from torch.utils import _pytree as pytree

from ..errors import Unsupported
from .floats import OPERATIONS, Float, evaluate_float, float_operation, float_symbol, float_text, is_partial, tree_size
from .symbolic import Int, Symbol, add, bounds, floordiv, mod, mul, product

SIGN_OF = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
OPPOSITE = {"eq": "ne", "ne": "eq"}      # the others have none where nan may occur


@dataclass(frozen=True)
class SizeGuard:
    """`(left <op> right) is answer` must hold for the trace to be reused."""

    op: str
    left: Int | Float
    right: Int | Float | float | None
    answer: bool = True

    def text(self) -> str:
        """A Python condition over the symbols' names."""
        left = float_text(self.left)
        if self.op == "value":         # that very float: -0.0 is not 0.0, nan is nan
            plain = self.right and self.right - self.right == 0
            return f"{left} == {self.right!r}" if plain else f"repr({left}) == {repr(self.right)!r}"
        if self.op == "computable":
            return f"type({left}) is float"
        op = SIGN_OF[self.op if self.answer or self.op not in OPPOSITE else OPPOSITE[self.op]]
        condition = f"{left} {op} {float_text(self.right)}"
        return condition if self.answer or self.op in OPPOSITE else f"not ({condition})"


# %% [markdown]
# A `SizeGuard` is a question and its answer, and `text` writes it as a condition in Python. The environment
# collects them. Its method `decide` is what all questions end in: it asks `_prove`, and if there is no proof
# it takes the answer of the present call and records it, with the line of the user's program that was running
# when the question was first asked, for messages.

# %%
@dataclass(eq=False)
class ShapeEnv:
    """Owns the symbols of sizes and floats: their values in the present call (`hints`), and the guards
    recorded so far. Once the guards have been written (`frozen`) no new question can be asked."""

    hints: dict[str, int | float] = field(default_factory=dict)
    symbols: dict[str, Symbol] = field(default_factory=dict)
    guards: dict[SizeGuard, object] = field(default_factory=dict)     # and the user's line that asked
    floats: int = 0
    frozen: bool = False
    promised: set[Symbol] = field(default_factory=set)                # sizes that the program has marked: one version serves all
    place: Callable = lambda: None

    def create(self, hint: int) -> torch.SymInt | int:
        """A fresh symbolic size with the value `hint`. 0 and 1 stay ints: they broadcast differently."""
        if hint in (0, 1):
            return hint
        symbol = Symbol(f"s{len(self.symbols)}", None, 2, hint=hint)
        self.symbols[symbol.name], self.hints[symbol.name] = symbol, hint
        return torch.SymInt(SizeNode(symbol.expr, self))

    def create_float(self, hint: float) -> torch.SymFloat:
        """A fresh float symbol with the value `hint`."""
        name = f"f{self.floats}"
        self.floats, self.hints[name] = self.floats + 1, hint
        return torch.SymFloat(FloatNode(float_symbol(name), self))

    def decide(self, op: str, left, right) -> bool:
        """The truth of a comparison: proved from bounds, or taken from the hints and recorded as a guard."""
        known = _prove(op, left, right)
        if known is not None:
            return known
        answer = getattr(operator, op)(self.hint(left), self.hint(right))
        self.record(SizeGuard(op, left, right, answer))
        return answer

    def record(self, guard: SizeGuard) -> None:
        if guard not in self.guards:
            if self.frozen:
                raise Unsupported(f"it is too late to guard {guard.text()}")
            self.guards[guard] = self.place()

    def hint(self, e) -> int | float:
        return evaluate_float(e, self.hints)

    @contextlib.contextmanager
    def asked_nothing(self):
        """Who asks a new question in here hears that it is too late."""
        was, self.frozen = self.frozen, True
        try:
            yield
        finally:
            self.frozen = was


# %% [markdown]
# A proof looks at the bounds of the difference of the two sides. If the comparison with 0 has the same answer at
# both, that is the answer between them as well, except for equality where 0 lies between them. `None` means that
# bounds do not decide.

# %%
def _prove(op: str, left, right) -> bool | None:
    if isinstance(left, Float) or isinstance(right, Float):
        return None
    low, high = bounds(add(left, mul(right, -1)))
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    at_ends = {getattr(operator, op)(end, 0) for end in (low, high)}
    return at_ends.pop() if len(at_ends) == 1 and not (op in OPPOSITE and low < 0 < high) else None


# %% [markdown]
# ## The node protocol
#
# PyTorch calls the methods below by name from C++. First what it asks of every node, whatever it stands for:
# an integer, a truth value or a float.

# %%
class Node:
    """What `torch.SymInt`, `torch.SymBool` and `torch.SymFloat` wrap."""

    env: ShapeEnv

    def is_int(self): return False
    def is_bool(self): return False
    def is_float(self): return False
    def is_nested_int(self): return False
    def nested_int(self): return None
    def is_constant(self): return not self.is_symbolic()
    def has_hint(self): return True
    def clone(self): return self
    def __str__(self): return self.str()
    def __repr__(self): return self.str()
    def _graph_repr(self): return self.str()
    def wrap_int(self, value): return SizeNode(value, self.env)
    def wrap_float(self, value): return FloatNode(float_operation("float", float(value)), self.env)
    def wrap_bool(self, value): return ConditionNode("eq", 0 if value else 1, 0, self.env)

# %% [markdown]
# An integer is an expression. Asking for its value (`guard_int`) fixes it by a guard. So does computing with
# expressions that have grown too large: twenty times `n = n % (n + k)` is a text of a million symbols.

# %%
LARGEST = 64


def kept_small(env, *operands) -> tuple:
    """The operands of an operation, fixed to their present values if the result would be too large."""
    if sum(map(tree_size, operands)) <= LARGEST:
        return operands
    return tuple([e if isinstance(e, (int, float)) else FloatNode(e, env).guard_float()
                  if isinstance(e, Float) else SizeNode(e, env).guard_int() for e in operands])


# %% [markdown]
# PyTorch finds the methods by their names. Those with `guard` in their name want a Python value, and get it
# through `decide`. `sym_min` and `sym_max` have to know which operand is smaller, so they decide as well, and
# return one of the two. A division decides whether its divisor is zero, since the program may see the error of a quotient that
# nobody needs. The rest is arithmetic on expressions, of which the simple operations are registered in a loop at the end.

# %%
class NumberNode(Node):
    """An expression with its environment."""

    def __init__(self, expr: Int | Float, env: ShapeEnv):
        self.expr, self.env = expr, env

    @property
    def hint(self): return self.env.hint(self.expr)
    _hint = hint

    def guard_bool(self, file=None, line=None): return self.env.decide("ne", self.expr, 0)
    def sym_min(self, other): return self if self.env.decide("le", self.expr, other.expr) else other
    def sym_max(self, other): return other if self.env.decide("le", self.expr, other.expr) else self


class SizeNode(NumberNode):
    """An integer."""

    def is_int(self): return True
    def is_symbolic(self): return not isinstance(self.expr, int)
    def maybe_as_int(self): return self.expr if isinstance(self.expr, int) else None
    def constant_int(self): return self.maybe_as_int()
    def wrap_bool(self, value): return self.wrap_int(int(value))
    def str(self): return str(self.expr)

    def guard_int(self, file=None, line=None):
        value = self.env.hint(self.expr)
        self.env.decide("eq", self.expr, value)
        return value

    int_ = guard_int
    def guard_size_oblivious(self, file=None, line=None): return self.guard_bool()
    def expect_size(self, file=None, line=None): return self.env.decide("ge", self.expr, 0)

    def sym_int(self): return self
    def sym_float(self): return float_node(self.env, "float", self.expr)
    def truediv(self, other): return float_node(self.env, "truediv", self.expr, other.expr)
    int_truediv = float_truediv = truediv

    def neg(self): return SizeNode(mul(self.expr, -1), self.env)
    def pos(self): return self
    def abs(self): return self if self.env.decide("ge", self.expr, 0) else self.neg()

    def sym_sum(self, nodes):
        return SizeNode(functools.reduce(add, [n.expr for n in nodes], 0), self.env)

    def pow(self, other):
        if other.is_float() or other.guard_int() < 0:
            return float_node(self.env, "pow", self.expr, other.expr)
        return SizeNode(product(kept_small(self.env, *[self.expr] * other.guard_int())), self.env)

    pow_by_natural = pow


def _arithmetic(fn):
    return lambda self, other: SizeNode(fn(*kept_small(self.env, self.expr, other.expr)), self.env)


def _comparison(op):
    return lambda self, other: ConditionNode(op, self.expr, other.expr, self.env)


def _divided(fn, python):
    def operation(self, other):
        if self.env.decide("eq", other.expr, 0):
            python(self.hint, 0)                       # raises
        return SizeNode(fn(*kept_small(self.env, self.expr, other.expr)), self.env)
    return operation


for _name, _fn in {"add": add, "sub": lambda a, b: add(a, mul(b, -1)), "mul": mul}.items():
    setattr(SizeNode, _name, _arithmetic(_fn))
SizeNode.floordiv = SizeNode.int_floordiv = _divided(floordiv, operator.floordiv)
SizeNode.mod = _divided(mod, operator.mod)
for _name in SIGN_OF:
    setattr(SizeNode, _name, _comparison(_name))

# %% [markdown]
# A comparison stays undecided until something asks for a Python `bool`: then `guard_bool` decides.

# %%
class ConditionNode(Node):
    """A comparison of two expressions."""

    def __init__(self, op: str, left: Int, right: Int, env: ShapeEnv):
        self.op, self.left, self.right, self.env = op, left, right, env

    expr = None                        # of PyTorch's own kind, which would let it prove more
    def is_bool(self): return True
    def is_symbolic(self): return True
    def maybe_as_int(self): return None
    def constant_bool(self): return _prove(self.op, self.left, self.right)
    def str(self): return f"{self.left} {SIGN_OF[self.op]} {self.right}"

    @property
    def hint(self): return getattr(operator, self.op)(self.env.hint(self.left), self.env.hint(self.right))
    _hint = hint

    def guard_bool(self, file=None, line=None): return self.env.decide(self.op, self.left, self.right)
    bool_ = expect_true = guard_size_oblivious = guard_or_false = guard_or_true = guard_bool
    def statically_known_true(self, file=None, line=None): return self.constant_bool() is True

    def sym_and(self, other): return self.wrap_bool(self.guard_bool() and other.guard_bool())
    def sym_or(self, other): return self.wrap_bool(self.guard_bool() or other.guard_bool())
    def sym_not(self): return self.wrap_bool(not self.guard_bool())
    def sym_ite(self, then, otherwise): return then if self.guard_bool() else otherwise
    and_, or_, not_ = sym_and, sym_or, sym_not

# %% [markdown]
# Floats are inputs of the program, quotients of sizes (the `1/n` of a mean), and what is computed from those.
# Meta kernels compute such numbers and rarely look at them. Who does look (`guard_float`) fixes the value.

# %%
class FloatNode(NumberNode):
    """A float to be computed at run time."""

    def is_float(self): return True
    def is_symbolic(self): return self.expr.op != "constant"
    def maybe_as_float(self): return None if self.is_symbolic() else self.hint
    def wrap_bool(self, value): return self.wrap_float(value)
    def str(self): return float_text(self.expr)
    def sym_float(self): return self

    def guard_float(self, file=None, line=None):
        if self.is_symbolic():
            self.env.record(SizeGuard("value", self.expr, self.hint))
        return self.hint

    bool_ = NumberNode.guard_bool


# %% [markdown]
# The methods of a float that are left all have one of two forms, so they are made in loops. Rounding to an integer
# has to know the number, so it fixes the value. Arithmetic makes a new expression, and gives PyTorch a node for
# it. If an operation could fail for other values of the symbols (a division by zero), that it can be computed
# becomes a guard as well: an error that eager would raise must not be lost.

# %%
for _fn in (math.trunc, math.floor, math.ceil):
    setattr(FloatNode, _fn.__name__, lambda self, fn=_fn: SizeNode(fn(self.guard_float()), self.env))


def float_node(env: ShapeEnv, op: str, *operands) -> FloatNode:
    """The node of a float operation. Raises what Python raises for the present values."""
    e = float_operation(op, *kept_small(env, *operands))
    if is_partial(e):
        if type(env.hint(e)) is not float:
            raise TypeError(f"{e} is not a float")
        env.record(SizeGuard("computable", e, None))
    return FloatNode(e, env)


def _float_operation(name):
    return lambda self, *others: float_node(self.env, name, self.expr, *(o.expr for o in others))


for _name in (*OPERATIONS, "float_truediv", "float_pow"):
    if _name not in ("float", "floordiv", "mod"):
        setattr(FloatNode, _name, _float_operation(_name.removeprefix("float_")))
for _name in SIGN_OF:
    setattr(FloatNode, _name, _comparison(_name))


# %% [markdown]
# The last functions lead out of PyTorch's protocol and back. `expr_of` takes the expression out of a `SymInt` or
# `SymFloat`; graphs and the later stages store expressions. `at_run_time` is the way back, when all symbols have
# values. `float_function` is what a captured graph calls for an operation on floats, so that interpreting the
# graph with symbols gives symbols, and with numbers numbers.

# %%
def expr_of(size: "int | torch.SymInt | torch.SymFloat") -> "Int | Float":
    """The expression behind a number: the node's `Expr` for a SymInt, its `Float` for a SymFloat, an int for
    an int."""
    return size.node.expr if isinstance(size, (torch.SymInt, torch.SymFloat)) else size


def at_run_time(e: "Int | Float", values: dict):
    """The value of an expression, given each symbol's by name: a number, or SymInts and SymFloats for
    such."""
    if isinstance(e, Float):
        env = next((v.node.env for v in values.values() if is_symbolic(v)), None)
        if env is not None:
            return torch.SymFloat(FloatNode(e, env))
    return evaluate_float(e, values)


@functools.cache
def float_function(op: str) -> Callable:
    """What a graph calls for a float operation: Python's own function, which also takes symbolic numbers."""
    def function(*operands):
        env = next((a.node.env for a in operands if is_symbolic(a)), None)
        if env is None:
            return OPERATIONS[op](*operands)
        return torch.SymFloat(float_node(env, op, *map(expr_of, operands)))

    function.__name__ = function.__qualname__ = op
    return function


def is_symbolic(value) -> bool:
    """A number that is not known at compile time?"""
    return isinstance(value, (torch.SymInt, torch.SymFloat))


# %% [markdown]
# Some operators ask for sizes as plain numbers, since they are composed of others in C++. Chapter 1's fakes refuse at
# first (`composites.with_symbols` says what happens then), and answer if nothing else helps; guards then fix the sizes.

# %%
class NumbersNeeded(RuntimeError):
    """An operator, or the text of an error, asks for symbolic sizes as numbers."""


aten = torch.ops.aten
IN_NUMBERS = {aten.size.default: lambda t: list(t.shape), aten.stride.default: lambda t: list(t.stride()),
           aten.numel.default: torch.Tensor.numel, aten.storage_offset.default: torch.Tensor.storage_offset}
_answering = threading.local()           # .now: whether they get them


def answer_in_numbers(numbers):
    if not getattr(_answering, "now", False):
        raise NumbersNeeded("symbolic sizes are asked for as numbers")
    return pytree.tree_map(int, numbers)


@contextlib.contextmanager
def answering():
    """Who asks for symbolic sizes as numbers gets them."""
    _answering.now = True
    try:
        yield
    finally:
        _answering.now = False


def needs_numbers(error) -> bool:
    return isinstance(error, NumbersNeeded) or bool(re.search(
        "operator aten::.* does not exist|SymIntArrayRef expected to contain only concrete|Cannot call .* on tensor with symbolic",
        str(error)))
