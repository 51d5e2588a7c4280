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
# Each value learns two things that decide where its statement can stand:
#
# - `dims`, the loop variables that it varies along. What does not vary along the innermost one is computed
#   outside of it, and on a GPU has a smaller tile;
# - `phase`, the number of complete reductions that must have run before it is known. In `x - mean(x)` the
#   subtraction has phase 1: it cannot share a walk along the row with the sum, however much we fuse,
#   because the sum needs the whole row first.
#
# The two loops of `x - x.mean(1, keepdim=True)`, of 64 by 256 numbers, load `x` twice, and the second loads `buf0`, which the first
# has stored. Linked, there are six steps:
#
#     v0  load in0[256*i0 + r0]   dims i0, r0   phase 0
#     v1  reduce sum, v0          dims i0       phase 1
#     v2  constant 256.0          dims          phase 0
#     v3  truediv v1, v2          dims i0       phase 1
#     v4  sub v0, v3              dims i0, r0   phase 1
#     v5  store out0[256*i0 + r0] dims i0, r0   phase 1
#
# `buf0` is gone, and there is one load. The quotient varies along `i0` only, so it is computed once for a row. `v0` has phase 0 and is
# needed in phase 1 as well: a generator either keeps the row in registers, or loads it again in a second walk.
#
# torch.compile does the same inside each of its code generators, while it prints: a cache of expressions
# there, a cache of stored names here. As a graph it is done once, and what follows can look ahead.

# %%
import functools
from typing import Callable, Iterable

import torch

from ..ch01_graphs.symbolic import Expr, Int, symbols
from ..ch07_loops.builder import EXACT, HALF
from ..ch07_loops.ir import Loop, Value, Values, behind, body_of, remake
from ..errors import Unsupported
from ..tables import Table
from .kernel import Kernel


class LinkedKernel(Values):
    """A linked kernel: `steps` are its stores and what they are computed from, in order."""

    def __init__(self, kernel: Kernel):
        super().__init__()
        self.kernel = kernel
        self.row = frozenset(kernel.reduction_vars)
        self.variables = self.row | frozenset(kernel.vars)
        self.loop: Loop | None = None                           # whose body is being linked
        self.written: dict[str, dict[Int, Value]] = {}          # buffer -> index -> value
        self.steps: tuple[Value, ...] = ()

    def new(self, op: str, args: tuple, dtype: torch.dtype | None) -> Value:
        value = super().new(op, args, dtype)
        value.loop, value.half = self.loop, half_of(op, args)
        dims = {s for a in args if type(a) is Expr for s in symbols(a) if s in self.variables}
        value.dims = frozenset(dims.union(*(o.dims for o in value.operands)))
        value.phase = max((o.phase for o in value.operands), default=0)
        if op == "reduce":
            value.dims, value.phase = frozenset(self.kernel.vars), value.phase + 1
        elif op == "column_sum":
            value.dims = self.variables.difference(self.kernel.walked)
        elif op == "store" and not self.loop.reduction_vars:
            value.dims = value.dims.union(self.loop.vars)
        return value

    @property
    def values(self) -> list[Value]:
        return [s for s in self.steps if s.op != "store"]

    @property
    def reductions(self) -> list[Value]:
        return [s for s in self.steps if s.op == "reduce"]

    def is_element(self, step: Value) -> bool:
        """Does it vary along the row? A store: does it happen for each element of a row, or once per row?"""
        return not self.row.isdisjoint(step.dims)

# %% [markdown]
# ## Halves
#
# A float32 value stays float32 when it passes through a half-precision buffer that is local to the kernel: the rounding would be
# lost work, and the result is closer to the true one. Where a program could tell (it compares, or takes the floor,
# or widens), the body has a `round_to`, and only here is it known whether that has anything to do: what was
# loaded from memory is rounded, and so is the choice among such values. What another body of this kernel stored is not.
#
# A buffer that others read is another matter, for they read rounded numbers. In `q == q.amax()` with `q = p * 1.4`, a first kernel may
# compute `p` and the largest `q`, and a second one may compute `q` again, from the `p` that the first has stored. Had the first kernel
# gone on with its unrounded `p`, then its maximum would be no element of the second's `q`, and the gradient of `amax`, which
# looks for it, would be a division by zero. So what a kernel passes on through such a buffer is rounded: one tensor is
# one set of numbers for all its readers, and for backward, which computes again what forward has not saved.

# %%
CHOICES = ("maximum", "minimum", "where")
SIGNS = ("neg", "abs")


def half_of(op: str, args: tuple) -> torch.dtype | None:
    """The half type that holds the result exactly. Choosing among values of one keeps them so, and so does another sign."""
    if op == "to_dtype":
        return args[0].dtype if args[0].dtype in HALF else None
    if op == "round_to":
        return args[1]
    chosen = args[1:2] if op == "reduce" and args[0] in ("max", "min") else args[-2:] if op in CHOICES else args if op in SIGNS else ()
    halves = {v.half for v in chosen if v.constant not in EXACT}
    return halves.pop() if len(halves) == 1 else None


def cast_to(g: LinkedKernel, value: Value, dtype: torch.dtype) -> Value:
    return value if value.dtype == dtype else g.make("to_dtype", (value,), dtype)


def rounded_to(g: LinkedKernel, value: Value, half: torch.dtype) -> Value:
    return value if value.half == half or value.constant in EXACT else g.make("round_to", (value, half), torch.float32)

# %% [markdown]
# ## Linking
#
# The bodies are copied into the graph one after the other. Most operations stay what they are; a few have a rule here.

# %%
RULES = Table()              # operation -> how a value of it is linked: function(graph, value, args), where `args` are linked


def link(kernel: Kernel) -> LinkedKernel:
    """The graph of `kernel`. Raises Unsupported when a load cannot be resolved."""
    g = LinkedKernel(kernel)
    for g.loop in kernel.loops:
        remake(g.loop.body, g, lambda g, value, args: RULES.get(value.op, LinkedKernel.again)(g, value, args))
    g.steps = body_of(g.stores)
    return g


def relink(g: LinkedKernel, step: Callable[[LinkedKernel, Value, tuple], Value]) -> LinkedKernel:
    """The graph again, with `step(new graph, value, its new arguments)` for each value."""
    new = LinkedKernel(g.kernel)

    def steps() -> Iterable[Value]:
        for value in g.steps:
            new.loop = value.loop
            yield value

    new.steps = body_of(remake(steps(), new, step))
    return new

# %% [markdown]
# ## Through memory
#
# A buffer that the kernel writes is remembered with the index of the write. A later load at that index is
# the value; a load at another index would need an element that perhaps another thread has not written yet.
# Fusion never produces that, so it is refused.

# %%
@RULES.of("load")
def _load(g: LinkedKernel, load: Value, args: tuple) -> Value:
    buffer, index, mask = args
    if buffer not in g.written:
        return g.make("load", args, load.dtype)
    if index not in g.written[buffer]:
        raise Unsupported(f"a fused kernel reads {buffer} at {index}, where it did not write it",
                          g.loop.location)
    value = g.written[buffer][index]
    if not (value.dtype == torch.float32 and load.dtype in HALF):
        value = cast_to(g, value, load.dtype)
    elif buffer not in g.kernel.local:
        value = rounded_to(g, value, load.dtype)
    if mask is not None:
        value = g.make("where", (mask, value, g.make("constant", (0,), value.dtype)), value.dtype)
    return value


@RULES.of("store")
def _store(g: LinkedKernel, store: Value, args: tuple) -> None:
    buffer, index, mask, value, mode = args
    if mode is None and mask is None:
        g.written.setdefault(buffer, {})[index] = value
    if buffer not in g.kernel.local:
        twice = mode is None and value.op == "round_to" and value.args[1] == g.kernel.buffers[buffer].dtype     # the store rounds, too
        g.write(buffer, index, mask, value.args[0] if twice else value, mode)


@RULES.of("to_dtype")
def _to_dtype(g: LinkedKernel, cast: Value, args: tuple) -> Value:
    return cast_to(g, args[0], cast.dtype)


@RULES.of("round_to")
def _round_to(g: LinkedKernel, rounding: Value, args: tuple) -> Value:
    return rounded_to(g, *args)


@RULES.of("bitcast")
def _bitcast(g: LinkedKernel, cast: Value, args: tuple) -> Value:
    """Of the very bits that a load would have given."""
    return g.make("bitcast", (cast_to(g, args[0], cast.args[0].dtype),), cast.dtype)

# %% [markdown]
# ## 1 + erf(x)
#
# GELU contains `1 + erf(x)`, twice the probability that a normal number is below x. A general `erf` has to be exact near 0,
# where it is small itself, and has one polynomial there and another one outside. The sum needs neither: it is `2^(t Q(t))` with
# `t = |x|` on the left, where the exponent is the logarithm of `1 - erf(t)`, and 2 minus that on the right. That is half the
# instructions, and instructions are what a GELU on a GPU waits for.
# The coefficients minimize the largest error, which is 2.1e-7 (in C++, at 4 million points from -6 to 6), less than two units in the
# last place of results above 1; left of 0, where
# `1 + erf(x)` computed as written has lost its digits, the relative error is below 3.4e-4 down to x = -4. `t Q(t)` falls without end,
# so that the result is 0 from there on. Both languages have a function `erf_plus_one`, and its coefficients from here.

# %%
@RULES.of("add")
def _add(g: LinkedKernel, addition: Value, args: tuple) -> Value:
    for one, other in (args, args[::-1]):
        if one.constant == 1 and other.op == "erf" and addition.dtype == torch.float32:
            return g.make("erf_plus_one", other.args, addition.dtype)
    return g.make("add", args, addition.dtype)


ERF_Q = (-1.9281249e-5, 2.3076169e-4, -8.0662564e-4, -1.8475127e-3, 2.9136388e-2, -1.4885111e-1, -9.1834682e-1, -1.6279128)


def erf_polynomial(step: str) -> str:
    """The text of Q(t). step: how a language says `{} * t + {}`."""
    return functools.reduce(step.format, map(str, ERF_Q))

# %% [markdown]
# ## Reductions
#
# A sum over the rows that a program walks along is a value of its own kind, `column_sum`: complete when the
# program ends. And dimensions of size 1 are gone by now: a reduction over nothing else is a pointwise operation.
# (As an operand, a reduction with several results stands for the first.)

# %%
@RULES.of("reduce")
def _reduce(g: LinkedKernel, fold: Value, args: tuple) -> Value | tuple[Value, ...]:
    kind, value, index = args
    if not g.loop.reduction_vars:
        return _reduce_one(g, kind, value, index, fold.dtype)
    if g.loop.reduction_vars == g.kernel.walked:
        return g.make("column_sum", (value,), fold.dtype)
    return g.make("reduce", args, fold.dtype)


@RULES.of("get")
def _get(g: LinkedKernel, get: Value, args: tuple) -> Value:
    results, i = args
    return results[i] if isinstance(results, tuple) else g.make("get", args, get.dtype)


def _reduce_one(g: LinkedKernel, kind: str, x: Value, index, dtype: torch.dtype):
    """A reduction of a single element: its result, or a tuple of results."""
    def make(op, *args, dtype=x.dtype):
        return g.make(op, args, dtype)

    if kind == "welford":
        rest = make("sub", x, x)                 # 0, or NaN where x is not finite
        return x, make("mul", rest, rest), make("constant", 1)
    if kind in ("argmax", "argmin"):
        return make("index", index, dtype=torch.int64)
    return cast_to(g, x, dtype)

# %% [markdown]
# ## Walking the row more than once
#
# A kernel with reductions walks along the row in *passes*: reductions of equal phase share one. A value
# that two passes need is in no register when the second comes by, so its statement is repeated there, down
# to its loads. `elements` lists the statements of a pass.

# %%
def elements(g: LinkedKernel, steps: Iterable[Value]) -> list[Value]:
    """What a pass over the row computes for these reductions and stores, in order: the values behind them that vary
    along it."""
    return behind(steps, g.is_element)
