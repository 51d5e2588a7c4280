# %% [markdown]
# # Symbolic sizes
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

# %%
from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, field

import torch

from .symbolic import Int, Symbol, add, bounds, evaluate, floordiv, mod, mul, product, to_text

COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


@dataclass(frozen=True)
class SizeGuard:
    """`(left <op> right) is answer` must hold for the trace to be reused."""

    op: str
    left: Int
    right: Int
    answer: bool

    def text(self, name=lambda s: s.name) -> str:
        """A Python condition over the symbols' names."""
        condition = f"{to_text(self.left, name)} {COMPARISONS[self.op]} {to_text(self.right, name)}"
        return condition if self.answer else f"not ({condition})"


@dataclass
class ShapeEnv:
    """Owns size symbols: their values in the present call (`hints`), and the guards recorded so far."""

    hints: dict[str, int] = field(default_factory=dict)
    symbols: dict[str, Symbol] = field(default_factory=dict)
    guards: list[SizeGuard] = field(default_factory=list)

    def create(self, hint: int, name: str | None = None) -> torch.SymInt | int:
        """A fresh symbolic size with the value `hint`. 0 and 1 stay ints: they broadcast differently."""
        if hint in (0, 1):
            return hint
        symbol = Symbol(name or f"s{len(self.symbols)}", None, 2)
        self.symbols[symbol.name], self.hints[symbol.name] = symbol, hint
        return torch.SymInt(SizeNode(symbol.expr, self))

    def decide(self, op: str, left: Int, right: Int) -> bool:
        """The truth of a comparison: proved from bounds, or taken from the hints and recorded as a guard."""
        known = _prove(op, left, right)
        if known is not None:
            return known
        answer = getattr(operator, op)(self.hint(left), self.hint(right))
        guard = SizeGuard(op, left, right, answer)
        if guard not in self.guards:
            self.guards.append(guard)
        return answer

    def hint(self, e: Int) -> int:
        return evaluate(e, self.hints)


def _prove(op: str, left: Int, right: Int) -> bool | None:
    low, high = bounds(add(left, mul(right, -1)))
    if low is not None and low == high:
        return getattr(operator, op)(low, 0)
    positive, negative = low is not None and low > 0, high is not None and high < 0
    if op in ("eq", "ne") and (positive or negative):
        return op == "ne"
    if op in ("gt", "le"):
        if positive or (high is not None and high <= 0):
            return positive == (op == "gt")
    if op in ("ge", "lt"):
        if negative or (low is not None and low >= 0):
            return negative == (op == "lt")
    return None

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
    def wrap_float(self, value): return FloatNode(value, (), self.env)
    def wrap_bool(self, value): return ConditionNode("eq", 0 if value else 1, 0, self.env)

# %% [markdown]
# An integer is an expression. Asking for its value (`guard_int`) fixes it by a guard.

# %%
class SizeNode(Node):
    """An integer expression with its environment."""

    def __init__(self, expr: Int, env: ShapeEnv):
        self.expr, self.env = expr, env

    def is_int(self): return True
    def is_symbolic(self): return not isinstance(self.expr, int)
    def maybe_as_int(self): return self.expr if isinstance(self.expr, int) else None
    def constant_int(self): return self.maybe_as_int()
    def str(self): return str(self.expr)

    @property
    def hint(self): return self.env.hint(self.expr)
    _hint = hint

    def guard_int(self, file=None, line=None):
        value = self.env.hint(self.expr)
        self.env.decide("eq", self.expr, value)
        return value

    int_ = guard_int
    def guard_bool(self, file=None, line=None): return self.env.decide("ne", self.expr, 0)
    def guard_size_oblivious(self, file=None, line=None): return self.guard_bool()
    def expect_size(self, file=None, line=None): return self.env.decide("ge", self.expr, 0)

    def sym_int(self): return self
    def sym_float(self): return FloatNode(float(self.hint), (self.expr,), self.env)
    def truediv(self, other): return self.sym_float().truediv(other)
    int_truediv = float_truediv = truediv

    def sym_min(self, other): return self if self.env.decide("le", self.expr, other.expr) else other
    def sym_max(self, other): return other if self.env.decide("le", self.expr, other.expr) else self
    def neg(self): return SizeNode(mul(self.expr, -1), self.env)
    def pos(self): return self
    def abs(self): return self if self.env.decide("ge", self.expr, 0) else self.neg()

    def sym_sum(self, nodes):
        return SizeNode(functools.reduce(add, [n.expr for n in nodes], 0), self.env)

    def pow(self, other):
        return SizeNode(product([self.expr] * other.guard_int()), self.env)

    pow_by_natural = pow


def _arithmetic(fn):
    return lambda self, other: SizeNode(fn(self.expr, other.expr), self.env)


def _comparison(op):
    return lambda self, other: ConditionNode(op, self.expr, other.expr, self.env)


for _name, _fn in {"add": add, "sub": lambda a, b: add(a, mul(b, -1)), "mul": mul, "floordiv": floordiv,
                   "int_floordiv": floordiv, "mod": mod}.items():
    setattr(SizeNode, _name, _arithmetic(_fn))
for _name in COMPARISONS:
    setattr(SizeNode, _name, _comparison(_name))

# %% [markdown]
# A comparison stays undecided until something asks for a Python `bool`: then `guard_bool` decides.

# %%
class ConditionNode(Node):
    """A comparison of two expressions."""

    def __init__(self, op: str, left: Int, right: Int, env: ShapeEnv):
        self.op, self.left, self.right, self.env = op, left, right, env

    def is_bool(self): return True
    def is_symbolic(self): return True
    def maybe_as_int(self): return None
    def constant_bool(self): return _prove(self.op, self.left, self.right)
    def str(self): return f"{self.left} {COMPARISONS[self.op]} {self.right}"

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
# A quotient of sizes (the `1/n` of a mean) is a float. Meta kernels compute such numbers and never look at
# them, so a float node carries the value for the present sizes and the sizes that it came from. Only when
# someone does look are those sizes fixed by guards.

# %%
class FloatNode(Node):
    """A number, and the size expressions that determine it."""

    def __init__(self, value: float, sizes: tuple, env: ShapeEnv):
        self.hint, self.sizes, self.env = value, sizes, env

    def is_float(self): return True
    def is_symbolic(self): return bool(self.sizes)
    def maybe_as_float(self): return None if self.sizes else self.hint
    def str(self): return f"float({', '.join(map(to_text, self.sizes))})"
    def sym_float(self): return self
    def neg(self): return FloatNode(-self.hint, self.sizes, self.env)

    def guard_float(self, file=None, line=None):
        for size in self.sizes:
            self.env.decide("eq", size, self.env.hint(size))
        return self.hint

    def guard_bool(self, file=None, line=None): return self.guard_float() != 0


def _float_operation(fn):
    def method(self, other):
        other = other.sym_float()
        return FloatNode(fn(self.hint, other.hint), self.sizes + other.sizes, self.env)
    return method


def _float_comparison(fn):
    return lambda self, other: self.wrap_bool(fn(self.guard_float(), other.sym_float().guard_float()))


for _name, _fn in {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv,
                   "float_truediv": operator.truediv, "pow": operator.pow, "float_pow": operator.pow}.items():
    setattr(FloatNode, _name, _float_operation(_fn))
for _name in COMPARISONS:
    setattr(FloatNode, _name, _float_comparison(getattr(operator, _name)))


def expr_of(size: "int | torch.SymInt") -> Int:
    """The expression behind a size: an int for an int, the node's `Expr` for a SymInt."""
    return size.node.expr if isinstance(size, torch.SymInt) else size
