# %% [markdown]
# # Writing loop bodies
#
# A lowering says how *one element* of its result is computed. It does so by running: it receives a `Builder`
# and an index, calls `b.read(x, index)` for the elements it needs and `b.op("add", u, v)` for the arithmetic,
# and returns a `Value`. When the operand `x` is itself not in memory, reading it runs *its* function instead, into
# the same body. That is all there is to inlining one operator into the next.
#
# Two things happen on the way, so that no later stage has to do them:
#
# - operations on constants are folded, with the arithmetic of their dtype;
# - half-precision values become float32 as they are loaded. Arithmetic on half types never appears in a body.
#
# Eight numbers in float16, doubled, with a zero in front (`F.pad(x * 2, (1, 0))`), plus a one that is a tensor (`torch.full((), 1.0)`):
#
#     loop0: for i0 < 9    # mul_tensor, constant_pad_nd_default, full_default, _to_copy_default, add_tensor
#         v0: i64 = index(i0 - 1)
#         v1: i64 = constant(0)
#         v2: b8 = ge(v0, v1)
#         v3: f32 = constant(0.0)
#         v4: f16 = load x[i0 - 1] if v2
#         v5: f32 = to_dtype(v4)
#         v6: f32 = constant(2.0)
#         v7: f32 = mul(v5, v6)
#         v8: f32 = where(v2, v7, v3)
#         v9: f32 = constant(1.0)
#         v10: f32 = add(v8, v9)
#         buf0[i0] = v10
#
# The padding asked for element `i0 - 1` under the condition that there is one, and the product, which was lazy, wrote itself down at that
# place. The tensor with the one is a constant, and its cast to float16 has been done.

# %%
import math
import operator
from contextlib import contextmanager
from functools import partial

import torch

from ..ch01_graphs.floats import Float
from ..ch01_graphs.symbolic import Expr, FloorDiv, Int, Mod, Symbol, add, as_expr, floordiv, mod, mul, provably_less, provably_nonnegative
from ..ch06_decompositions.table import HALF
from .ir import Value, Values
from .reference import SCALAR

SUPPORTED = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.uint8, torch.int8,
             torch.int16, torch.int32, torch.int64}


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a loop body holds values of `dtype`: float32 for the half types."""
    return torch.float32 if dtype in HALF else dtype


COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
EXACT = (0, 1, -1, math.inf, -math.inf)            # float32 values that every half type has
PREDICATES = COMPARISONS | {"logical_and", "logical_or", "logical_xor", "logical_not", "signbit"}

# %% [markdown]
# ## Folding
#
# Constants meet constants more often than one would think: masks of padding that turn out always true, `full`
# tensors, scaled scalars. The folded value is computed by PyTorch itself in the right dtype, so that float32
# arithmetic rounds as float32. Integer arithmetic on loop variables stays an index expression. So indexing
# with a computed range, as pooling and resizing do, becomes a plain load at a known stride, and not a gather.

# %%
FOLDED = COMPARISONS | set("add sub mul neg maximum minimum truediv sqrt rsqrt logical_and logical_or logical_not".split())


def _at_least(a: Int, b: Int) -> bool | None:
    """Is a >= b for all values of the variables? None: for some."""
    return True if provably_nonnegative(a - b) else False if provably_less(a, b) else None


def _not(decided: bool | None) -> bool | None:
    return None if decided is None else not decided


def _quotient(a: Int, b: Int, divide) -> Int | None:
    return divide(a, b) if isinstance(b, int) and b > 0 and provably_nonnegative(a) else None


def _larger(a: Int, b: Int) -> Int | None:
    return a if _at_least(a, b) else b if _at_least(b, a) else None


DIVISIONS = {"floordiv": floordiv, "truncdiv": floordiv, "remainder": mod, "fmod": mod}
ON_INDEX = {
    "add": operator.add, "sub": operator.sub, "neg": operator.neg, "maximum": _larger,
    "minimum": lambda a, b: b if _at_least(a, b) else a if _at_least(b, a) else None,
    "mul": lambda a, b: mul(a, b) if isinstance(a, int) or isinstance(b, int) else None,
    **{name: partial(_quotient, divide=divide) for name, divide in DIVISIONS.items()},
    "ge": _at_least, "lt": lambda a, b: _not(_at_least(a, b)),
    "le": lambda a, b: _at_least(b, a), "gt": lambda a, b: _not(_at_least(b, a))}


def nearest(x: int | float, dtype: torch.dtype) -> float:
    """The number of a half type that is nearest to `x`."""
    return torch.tensor(x, dtype=dtype).item()


def typed(value, dtype: torch.dtype):
    """A Python number as a value of `dtype`: truncated, wrapped or rounded as a tensor of it would hold
    it."""
    if dtype is torch.bool:
        return bool(value)
    if dtype.is_floating_point:
        return float(value)
    value = int(value)
    info = torch.iinfo(dtype)
    return (value - info.min) % 2**info.bits + info.min

# %% [markdown]
# ## Normal form
#
# The algebra of chapter 1 cancels divisions by their bounds. One identity it leaves alone, because it is
# only an improvement for memory accesses: `c*(x % n) + c*n*(x // n)` is `c*x`. It appears when a dimension
# was split by a view and the parts happen to be contiguous, and without it equal accesses would not compare
# equal.

# %%
def normal(e: Int) -> Int:
    """The index `e` with each remainder joined to its quotient, where both are there in the right proportion."""
    if isinstance(e, int):
        return e
    for term, c in e.terms.items():
        if len(term) == 1 and type(term[0]) is Mod and isinstance(term[0].divisor, int):
            x, n = term[0].numerator, term[0].divisor
            for other, d in e.terms.items():
                if d == c * n and len(other) == 1 and other[0] == FloorDiv(x, n):
                    rest = {t: k for t, k in e.terms.items() if t is not term and t is not other}
                    return normal(add(mul(x, c), Expr(rest, e.const) if rest else e.const))
    return e

# %% [markdown]
# ## Leaves and dtypes
#
# A body is written from its leaves. `constant`, `index` and `number` make the three that read no memory: a number, an index
# expression as an integer, and a float argument of the kernel. `to_dtype` converts, and a constant is converted now.
#
# A half value has two forms. In memory it has 16 bits; in a body it is a float32, and `round_to` says which float32 numbers the
# half type has. `cast` decides where that matters. The element of a bfloat16 tensor that becomes a float32 tensor must be what
# memory would have held, or `x - x.bfloat16().float()` would be 0. An integer that becomes a half value is rounded, and so is a
# constant; between other dtypes `to_dtype` is enough:
#
#     cast(x, bfloat16, float32)                 round_to(x, bfloat16)
#     cast(x, float32, float16)                  x
#     cast(i, int64, bfloat16)                   round_to(to_dtype(index(i)), bfloat16)
#     cast(constant(0.1), float32, float16)      constant(0.0999755859375)
#
# The second row is right only because the store of a float16 buffer rounds.

# %%
class Leaves(Values):
    """Makes what a body begins with, and converts it."""

    def constant(self, value, dtype: torch.dtype) -> Value:
        return self.make("constant", (typed(value, dtype),), dtype)

    def index(self, expr: Int | Symbol, dtype: torch.dtype = torch.int64) -> Value:
        """An index expression as an integer value."""
        expr = as_expr(expr)
        if isinstance(expr, int):
            return self.constant(expr, dtype)
        return self.to_dtype(self.make("index", (expr,), torch.int64), dtype)

    def number(self, symbol: Symbol, dtype: torch.dtype) -> Value:
        """A float argument of the kernel."""
        return self.to_dtype(self.make("index", (symbol.expr,), torch.float64), dtype)

    def to_dtype(self, x: Value, dtype: torch.dtype) -> Value:
        if x.dtype == dtype:
            return x
        if x.constant is not None and abs(x.constant) < 2**31:    # not nan; extreme values are cast at run time
            return self.constant(torch.tensor(x.constant, dtype=x.dtype).to(dtype).item(), dtype)
        return self.make("to_dtype", (x,), dtype)

    def round_to(self, x: Value, dtype: torch.dtype) -> Value:
        """`x` rounded to a half type and kept as float32. Whether there is anything to round is known only when
        values are linked (chapter 8): what is loaded here may then be a value that was never in memory."""
        if x.constant is not None:
            return self.constant(nearest(x.constant, dtype), torch.float32)
        return x if x.op == "round_to" and x.args[1] == dtype else self.make("round_to", (x, dtype), torch.float32)

    def cast(self, x: Value, source: torch.dtype, target: torch.dtype) -> Value:
        """An element of a tensor of dtype `source` as one of `target`, as a body holds it."""
        if source in HALF and target != source:
            x = self.round_to(x, source)
        value = self.to_dtype(x, compute_dtype(target))
        wide = not source.is_floating_point and source.itemsize > 1 or value.constant is not None
        return self.round_to(value, target) if wide and target in HALF and source != target else value


# %% [markdown]
# ## Operations
#
# `op` asks three questions before it makes a value. Are all operands constants? Then the result is one, computed by the PyTorch
# function that a kernel would imitate. Is one of them neutral, as the 1 of a product or the `True` of an `and`? Then the other is
# the result. Is this arithmetic on indices? Then the result stays an index expression, if chapter 1 can say it as one:
#
#     op("mul", constant(2.0), constant(0.25))   constant(0.5)
#     op("mul", x, constant(1.0))                x
#     op("add", index(i), index(i))              index(2*i)
#     op("ge", index(i), constant(0))            constant(True)
#     op("floordiv", index(i - 4), constant(3))  floordiv(index(i - 4), constant(3))
#     between(0, i - 1, 8)                       ge(index(i - 1), constant(0))
#     between(0, i, 9)                           constant(True)
#
# Here `i < 9`. The quotient is made as a value, since `i - 4` may be negative, where the division of index expressions is not
# that of integers. `between` is the test at a border, and asks the bounds of chapter 1 which half of it is needed at all.
#
# `mask` is the condition under which what is written at the moment is evaluated, or None (the next section sets it). Loads under a
# mask give 0 where they are not done, and no integer may be divided by that: there the divisor is 1.

# %%
class Operations(Leaves):
    """Makes scalar operations, as far as their results are not known."""

    mask: Value | None = None

    def op(self, name: str, *args: Value, dtype: torch.dtype | None = None) -> Value:
        """A scalar operation. Operands of arithmetic share a dtype, which is the result's unless given;
        comparisons and predicates give bool."""
        dtype = dtype or (torch.bool if name in PREDICATES else args[0].dtype)
        if name in DIVISIONS and self.mask is not None and not dtype.is_floating_point and not args[1].constant:
            args = args[0], self.where(self.mask, args[1], self.constant(1, dtype))
        known = self.of_constants(name, args, dtype) if name in FOLDED else None
        if known is None and name in ON_INDEX and args[0].dtype is torch.int64:
            known = self.of_indices(name, args, dtype)
        return self.make(name, args, dtype) if known is None else known

    def of_constants(self, name: str, args: tuple[Value, ...], dtype: torch.dtype) -> Value | None:
        """The result that constants among the operands decide."""
        values = [a.constant for a in args]
        if None not in values:
            tensors = [torch.tensor(v, dtype=a.dtype) for v, a in zip(values, args)]
            return self.constant(SCALAR[name](*tensors).item(), dtype)
        if name == "logical_and" and any(v is True for v in values):
            return args[0] if values[1] is True else args[1]
        if name == "mul" and any(v == 1 for v in values if v is not None):
            return args[0] if values[1] == 1 else args[1]

    def of_indices(self, name: str, args: tuple[Value, ...], dtype: torch.dtype) -> Value | None:
        """The result as an index expression, or as the answer that bounds give to a comparison."""
        exprs = [as_index(a) for a in args]
        known = ON_INDEX[name](*exprs) if None not in exprs else None
        if known is not None:
            return self.constant(known, dtype) if dtype is torch.bool else self.index(known)

    def where(self, condition: Value, a: Value, b: Value) -> Value:
        known = condition.constant
        if known is not None or a is b:
            return a if known or a is b else b
        return self.make("where", (condition, a, b), a.dtype)

    def between(self, low: Int, expr: Int, high: Int) -> Value:
        """`low <= expr < high` as a bool; the halves that hold for every index are left out."""
        condition = self.constant(True, torch.bool)
        if not provably_nonnegative(expr - low):
            condition = self.op("ge", self.index(expr), self.index(low))
        if not provably_less(expr, high):
            condition = self.op("logical_and", condition, self.op("lt", self.index(expr), self.index(high)))
        return condition


# %% [markdown]
# ## The builder
#
# What is left touches memory. Padding, `cat` and partial blocks of a split reduction read operands at indices that may lie
# outside; inside `with b.masked(condition)` every load and store carries the condition and is not done where it is false. A
# condition inside of another is joined to it with `and`; `outside` keeps the masks around the present one.
#
# `read` is the entrance for lazy tensors: it evaluates the operand's element function at an index. `memo` remembers which operand
# was evaluated at which index, and under which mask. Sharing values alone would give a small body but take exponential time to
# find it: a chain of thirty `y = y * y` would visit a billion paths. What was evaluated outside of a mask holds inside it too, so
# `read` looks there as well: each write into a part of a tensor reads the tensor before it twice, once where it is kept and once,
# under a mask, where it is written.
#
# `load` and `store` bring their index into normal form. `indirect` is how data becomes a position, as in an embedding: it binds
# an integer value to a symbol that indices may mention. A negative index counts from the end, so a value that may be negative goes
# through a `where`, and where the mask is false the position is 0, which is always in range.

# %%
class Builder(Operations):
    """Collects the body of one loop."""

    def __init__(self):
        super().__init__()
        self.memo: dict[tuple, Value] = {}
        self.outside: list[Value | None] = []         # the masks around the present one

    def read(self, x, index: tuple) -> Value:
        """The element of the lazy tensor `x` at `index`; float32 for half types."""
        for mask in (self.mask, *reversed(self.outside)):
            value = self.memo.get((id(x), index, mask))
            if value is not None:
                return value
        value = self.memo[id(x), index, self.mask] = x.inner(self, index)
        return value

    def load(self, buffer: str, index: Int, dtype: torch.dtype, raw: bool = False) -> Value:
        """Load from memory; half types are widened unless `raw`."""
        value = self.make("load", (buffer, normal(as_expr(index)), self.mask), dtype)
        return value if raw else self.to_dtype(value, compute_dtype(dtype))

    def store(self, buffer: str, index: Int, value: Value, mode: str | None = None) -> None:
        self.write(buffer, normal(as_expr(index)), self.mask, value, mode)

    @contextmanager
    def masked(self, condition: Value):
        """Within the block, loads and stores happen only where `condition` (and every enclosing one)
        holds."""
        if condition.constant is True:
            yield
            return
        outer = self.mask
        self.mask = condition if outer is None else self.op("logical_and", outer, condition)
        self.outside.append(outer)
        try:
            yield
        finally:
            self.mask = self.outside.pop()

    def indirect(self, value: Value, size: Int, wrap: bool = True) -> Int:
        """Use an integer value as an index into a dim of `size` elements. `wrap`: negative ones count
        from the end. Where the current mask is false the index is 0, so that it is always in range."""
        value = self.to_dtype(value, torch.int64)
        expr = as_index(value)
        if isinstance(expr, int) and expr < 0 and wrap:
            expr = expr + size
        if expr is not None and provably_nonnegative(expr) and provably_less(expr, size):
            return expr
        if wrap and not nonnegative(value):
            negative = self.op("lt", value, self.constant(0, torch.int64))
            value = self.where(negative, self.op("add", value, self.index(size)), value)
        if self.mask is not None:
            value = self.where(self.mask, value, self.constant(0, torch.int64))
        return self.position(value, size).args[1].expr

    def reduce(self, kind: str, value: Value, linear_index: Int | None = None,
               dtype: torch.dtype | None = None) -> Value:
        return self.make("reduce", (kind, value, linear_index), dtype or value.dtype)

    def get(self, value: Value, i: int) -> Value:
        """Component `i` of a reduction that gives several values."""
        return self.make("get", (value, i), value.dtype)


# %% [markdown]
# Two questions about a value that is to become a position: is it an index expression after all, and can it be negative?

# %%
def as_index(value: Value) -> Int | None:
    """The index expression that an int64 value is, or None if it depends on data."""
    return value.args[0] if value.op in ("index", "constant") and value.dtype is torch.int64 else None


def nonnegative(value: Value) -> bool:
    """Is this integer value known not to be negative."""
    op, args = value.op, value.args
    if op == "constant" and isinstance(args[0], (bool, float)):
        return args[0] >= 0
    if op in ("index", "constant") and not isinstance(args[0], Float):
        return provably_nonnegative(args[0])
    if op in ("maximum", "minimum", "add", "mul", "to_dtype"):
        return (any if op == "maximum" else all)(map(nonnegative, args))
    return value.dtype in (torch.bool, torch.uint8)
