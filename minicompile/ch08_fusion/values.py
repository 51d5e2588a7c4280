# %% [markdown]
# # From fused loops to one graph of values
#
# A kernel is a list of loop bodies that talk to each other through buffers. Both code generators begin by
# *linking* them into one graph, and this is the moment when fusion pays:
#
# - a load of what an earlier body stored becomes that value: no memory, a register;
# - equal loads and equal operations become one;
# - what no store needs disappears.
#
# So `exp(x)` into `tmp0`, followed by `tmp0 * x` into `out0`, becomes four steps:
#
# ```
# load in0[i0]      exp      mul      store out0[i0]
# ```
#
# Each value learns two things that decide where its statement can stand:
#
# - `dims`, the loop variables that it varies along. What does not vary along the innermost one is computed
#   outside of it, and on a GPU has a smaller tile;
# - `phase`, the number of complete reductions that must have run before it is known. In `x - mean(x)` the
#   subtraction has phase 1: it cannot share a walk along the row with the sum, however much we fuse,
#   because the sum needs the whole row first.
#
# torch.compile does the same inside each of its code generators, while it prints: a cache of expressions
# there, a cache of stored names here. As a graph it is done once, and what follows can look ahead.

# %%
from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Iterable

import torch

from ..ch01_graphs.symbolic import Expr, Int, Symbol, substitute, symbols
from ..ch07_loops.builder import EXACT, HALF
from ..ch07_loops.ir import Loop, Ref
from ..errors import Unsupported
from .kernel import Kernel


@dataclass(eq=False)
class Value:
    """One computed value. `args`: Values, index expressions, names and numbers, as in the loop IR; a `reduce`
    is always (kind, value, index or None), a `load` (buffer, index, mask or None)."""

    op: str
    args: tuple
    dtype: torch.dtype
    loop: Loop
    operands: tuple[Value, ...]                 # in `args`, or behind a symbol of an index
    dims: frozenset[Symbol]
    phase: int
    number: int = 0                             # position among the steps
    half: torch.dtype | None = None             # the half type that holds this float32 exactly, if one is known to


@dataclass(eq=False)
class Store:
    """A write to memory. `element`: does it happen for each element of a row, or once per row?"""

    buffer: str
    index: Int
    value: Value
    mode: str | None
    mask: Value | None
    loop: Loop
    element: bool
    operands: tuple[Value, ...]
    phase: int
    number: int = 0
    op = "store"


@dataclass
class Graph:
    """A linked kernel. `steps` are in a valid order; `indirect`: the symbols that stand for values in
    indices."""

    kernel: Kernel
    online_softmax: bool = False
    steps: list[Value | Store] = field(default_factory=list)
    indirect: dict[Symbol, Value] = field(default_factory=dict)
    known: dict[tuple, Value] = field(default_factory=dict)
    written: dict[str, dict[Int, Value]] = field(default_factory=dict)      # buffer -> index -> value

    @cached_property
    def row(self) -> frozenset[Symbol]:
        return frozenset(self.kernel.reduction_vars)

    @cached_property
    def variables(self) -> frozenset[Symbol]:
        return self.row | frozenset(self.kernel.vars)

    @property
    def values(self) -> list[Value]:
        return [s for s in self.steps if s.op != "store"]

    @property
    def stores(self) -> list[Store]:
        return [s for s in self.steps if s.op == "store"]

    @property
    def reductions(self) -> list[Value]:
        return [s for s in self.steps if s.op == "reduce"]

    def is_element(self, value: Value) -> bool:
        """Does it vary along the row?"""
        return not self.row.isdisjoint(value.dims)

# %% [markdown]
# ## Adding a value
#
# A value is found again by its operation and arguments. Constants are compared as text: 0.0 equals -0.0,
# and NaN differs from itself.

# %%
CHOICES = ("maximum", "minimum", "where")


def inputs_of(g: Graph, args: Iterable) -> tuple[tuple[Value, ...], frozenset[Symbol], int]:
    """(operands, dims, phase) of something with these arguments."""
    operands, dims = [], set()
    for a in args:
        if isinstance(a, Value):
            operands.append(a)
        elif isinstance(a, Expr):
            for s in symbols(a):
                if s in g.indirect:
                    operands.append(g.indirect[s])
                elif s in g.variables:
                    dims.add(s)
    dims = dims.union(*(o.dims for o in operands))
    return tuple(operands), frozenset(dims), max((o.phase for o in operands), default=0)


def half_of(op: str, args: tuple) -> torch.dtype | None:
    """The half type that holds the result exactly. Choosing among values of one keeps them so."""
    if op == "to_dtype":
        return args[0].dtype if args[0].dtype in HALF else None
    if op == "round_to":
        return args[1]
    chosen = args[1:2] if op == "reduce" and args[0] in ("max", "min") else args[-2:] if op in CHOICES else ()
    halves = {v.half for v in chosen if not is_exact(v)}
    return halves.pop() if len(halves) == 1 else None


def is_exact(value: Value) -> bool:
    return value.op == "constant" and value.args[0] in EXACT


def add(g: Graph, loop: Loop, op: str, args: tuple, dtype: torch.dtype) -> Value:
    """The value of `op(*args)`, new or known."""
    if op == "to_dtype" and args[0].dtype == dtype:
        return args[0]
    key = (op, repr(args) if op == "constant" else args, dtype)
    if key not in g.known:
        operands, dims, phase = inputs_of(g, args)
        if op == "reduce":
            dims, phase = frozenset(g.kernel.vars), phase + 1
        elif op == "column_sum":
            dims = g.variables.difference(g.kernel.walked)
        g.known[key] = Value(op, args, dtype, loop, operands, dims, phase, half=half_of(op, args))
        g.steps.append(g.known[key])
    return g.known[key]

# %% [markdown]
# ## Through memory
#
# A buffer that the kernel writes is remembered with the index of the write. A later load at that index is
# the value; a load at another index would need an element that perhaps another thread has not written yet.
# Fusion never produces that, so it is refused.
#
# A float32 value stays float32 when it passes through a half-precision buffer: the rounding would be lost
# work, and the result is closer to the true one. Where a program could tell (it compares, or takes the floor,
# or widens), the body has a `round_to`, and only here is it known whether that has anything to do: what was
# loaded from memory is rounded, and so is the choice among such values. What another body of this kernel stored is not.

# %%
def _load(g: Graph, loop: Loop, args: tuple, dtype: torch.dtype) -> Value:
    buffer, index, mask = (*args, None)[:3]
    if buffer not in g.written:
        return add(g, loop, "load", (buffer, index, mask), dtype)
    if index not in g.written[buffer]:
        raise Unsupported(f"a fused kernel reads {buffer} at {index}, where it did not write it",
                          loop.location)
    value = g.written[buffer][index]
    if not (value.dtype == torch.float32 and dtype in HALF):
        value = add(g, loop, "to_dtype", (value,), dtype)
    if mask is not None:
        nothing = add(g, loop, "constant", (0,), value.dtype)
        value = add(g, loop, "where", (mask, value, nothing), value.dtype)
    return value


def _store(g: Graph, loop: Loop, args: tuple) -> None:
    buffer, index, value, mode, mask = (*args, None, None)[:5]
    if mode is None and mask is None:
        g.written.setdefault(buffer, {})[index] = value
    if buffer not in g.kernel.local:
        operands, dims, phase = inputs_of(g, (index, value, mask))
        over = dims if loop.reduction_vars else dims.union(loop.vars)
        element = not g.row.isdisjoint(over)
        g.steps.append(Store(buffer, index, value, mode, mask, loop, element, operands, phase))

# %% [markdown]
# ## Indices that are loaded
#
# `indirect` gives a value a symbol. Bodies number their symbols from `t0`, so each is replaced by one that
# is unique in the kernel, and the same for equal values.

# %%
def _indirect(g: Graph, loop: Loop, value: Value, size: Int) -> tuple[Value, Symbol]:
    bound = add(g, loop, "indirect", (value, size), torch.int64)
    symbol = next((s for s, v in g.indirect.items() if v is bound), None)
    if symbol is None:
        symbol = Symbol(f"at{len(g.indirect)}", size)
        g.indirect[symbol] = bound
    return bound, symbol

# %% [markdown]
# ## Reductions
#
# A sum over the rows that a program walks along is a value of its own kind, `column_sum`: complete when the
# program ends. Two of the others are not what they seem. Dimensions of size 1 are gone by now, and a
# reduction over nothing else is a pointwise operation. And a kernel that has both `max(x)` and
# `sum(exp(x - max(x)))` can compute the two in one walk along the row, with the online softmax; for code
# generators that ask for it, the maximum becomes a `softmax` reduction of two results and the sum becomes the
# second of them. (As an operand, a reduction with several results stands for the first.)

# %%
def _reduce(g: Graph, loop: Loop, args: tuple, dtype: torch.dtype) -> Value | tuple[Value, ...]:
    kind, value, index = (*args, None)[:3]
    if not loop.reduction_vars:
        return _reduce_one(g, loop, kind, value, index, dtype)
    if loop.reduction_vars == g.kernel.walked:
        return add(g, loop, "column_sum", (value,), dtype)
    if g.online_softmax and kind == "sum" and (top := _shifted_by(value)) is not None and top.dtype == dtype:
        top.args = ("softmax", top.args[1], None)
        return add(g, loop, "get", (top, 1), dtype)
    return add(g, loop, "reduce", (kind, value, index), dtype)


def _shifted_by(value: Value) -> Value | None:
    """The maximum m of a floating-point `exp(x - m)`, if that is what `value` is."""
    if value.op == "exp" and value.args[0].op == "sub":
        x, top = value.args[0].args
        if top.op == "reduce" and top.args[0] in ("max", "softmax") and top.args[1] is x:
            return top
    return None


def _reduce_one(g: Graph, loop: Loop, kind: str, x: Value, index, dtype: torch.dtype):
    """A reduction of a single element: its result, or a tuple of results."""
    def make(op, *args, dtype=x.dtype):
        return add(g, loop, op, args, dtype)

    rest = make("sub", x, x) if kind in ("welford", "softmax") else None    # 0, or NaN where x is not finite
    if kind == "welford":
        return x, make("mul", rest, rest), make("constant", 1)
    if kind == "softmax":
        empty = make("eq", x, make("constant", float("-inf")), dtype=torch.bool)
        return x, make("where", empty, make("constant", 0), make("exp", rest))
    if kind in ("argmax", "argmin"):
        return make("index", index, dtype=torch.int64)
    return make("to_dtype", x, dtype=dtype)

# %% [markdown]
# ## Linking

# %%
def link(kernel: Kernel, online_softmax: bool = False) -> Graph:
    """The graph of `kernel`. Raises Unsupported when a load cannot be resolved."""
    g = Graph(kernel, online_softmax)
    for loop in kernel.loops:
        values: list = []
        unique: dict[Symbol, Int] = {}                  # the body's indirect symbols -> the kernel's
        for op, inst_args, dtype in loop.body:
            args = tuple(values[a.id] if type(a) is Ref else
                         substitute(a, unique) if unique and isinstance(a, Expr) else a for a in inst_args)
            if op == "load":
                value = _load(g, loop, args, dtype)
            elif op == "store":
                value = _store(g, loop, args)
            elif op == "reduce":
                value = _reduce(g, loop, args, dtype)
            elif op == "get" and isinstance(args[0], tuple):
                value = args[0][args[1]]
            elif op == "round_to" and (args[0].half == args[1] or is_exact(args[0])):
                value = args[0]
            elif op == "bitcast":                       # of the very bits that a load would have given
                bits = add(g, loop, "to_dtype", args, loop.body[inst_args[0].id].dtype)
                value = add(g, loop, "bitcast", (bits,), dtype)
            elif op == "indirect":
                value, symbol = _indirect(g, loop, args[0], args[2])
                unique[args[1]] = symbol.expr
            else:
                value = add(g, loop, op, args, dtype)
            values.append(value)
    needed = _behind(g.stores)
    g.steps = [s for s in g.steps if s.op == "store" or s in needed]
    for number, step in enumerate(g.steps):
        step.number = number
    return g


def _behind(steps: Iterable[Value | Store], keep=lambda value: True) -> set[Value]:
    """All values with `keep(value)` that the steps are computed from."""
    found: set[Value] = set()
    stack = [o for s in steps for o in s.operands]
    while stack:
        value = stack.pop()
        if value not in found and keep(value):
            found.add(value)
            stack += value.operands
    return found

# %% [markdown]
# ## Walking the row more than once
#
# A kernel with reductions walks along the row in *passes*: reductions of equal phase share one. A value
# that two passes need is in no register when the second comes by, so its statement is repeated there, down
# to its loads. `elements` lists the statements of a pass.

# %%
def elements(g: Graph, steps: Iterable[Value | Store]) -> set[Value]:
    """What a pass over the row computes for these reductions and stores: the values behind them that vary
    along it."""
    return _behind(steps, g.is_element)


def memory_of(kernel: Kernel, name: str) -> str:
    """The buffer whose memory `name` is, as far as the kernel knows."""
    while name in kernel.buffers and kernel.buffers[name].alias_of is not None:
        name = kernel.buffers[name].alias_of
    return name
