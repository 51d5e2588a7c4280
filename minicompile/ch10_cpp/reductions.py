# %% [markdown]
# # Reductions in C++
#
# What rows (`rows.py`) and columns (`columns.py`) have in common.
#
# A sum in a plain loop is a chain: each addition waits for the last, and floating-point addition may not be
# reordered, so the compiler leaves it scalar. `#pragma omp simd reduction(+:s)` permits one partial sum per
# vector lane. That is fast, and also more accurate, for the same reason that pairwise summation is: each
# partial sum is shorter. But one vector of partial sums is a chain as well, of additions that take four cycles each, while the
# processor could begin two in a cycle. So long rows have 32 partial sums (`PARTIAL_SUMS` in `rows.py`), which are several vectors.
# Rows longer than 1,024 are summed in chunks of that length, whose sums are added up in double.
#
# What OpenMP does not know (Welford's variance, the position of a maximum) works on
# chunks as well: the values of a chunk go to a small array that stays in the L1 cache, simple vectorised
# loops reduce it, and the chunk's result is merged into the row's. For a row of which `n` elements with the mean `m` and the sum of
# squared distances `q` have been seen, and a chunk of `nc` elements with `mc` and `qc`, that is
#
#     d = mc - m          m = m + d * nc / (n + nc)          q = q + qc + d * d * n * nc / (n + nc)
#
# These merging steps are C++, in `reductions.h`.

# %%
import torch

from ..ch01_graphs.symbolic import Symbol
from ..ch07_loops.builder import compute_dtype
from ..ch07_loops.ir import Value, identity, in_order
from ..ch07_loops.pointwise import HEAVY
from ..ch08_fusion.values import elements
from ..errors import Unsupported
from .nests import Emitter, along_lane
from .ops import literal

SCRATCH = 1 << 18            # bytes of a row's or block's expensive values that are kept rather than computed again

# %% [markdown]
# ## The kinds
#
# `OPERATOR` is the step of a simple reduction. `max` and `min` propagate NaN, like torch: a NaN that has been
# accumulated stays.

# %%
OPERATOR = {"sum": "+", "prod": "*", "any": "|"}


def start_text(kind: str, dtype: torch.dtype) -> str:
    """The value that an accumulator starts with, in C++."""
    return literal(identity(kind, dtype), dtype)


def accumulator_type(value: Value) -> torch.dtype:
    kind, source, _ = value.args
    dtype = source.dtype if kind in ("argmax", "argmin") else value.dtype
    return compute_dtype(dtype)


def unknown(r: Value) -> Unsupported:
    return Unsupported(f"the C++ backend has no reduction {r.args[0]!r}", r.loop.location)

# %% [markdown]
# ## Passes
#
# Reductions of equal phase share a pass over the row. Stores of elements wait for the last pass, so that no
# pass reads an input that an output has already overwritten.

# %%
def passes(e: Emitter) -> list[tuple[list[Value], list[Value]]]:
    """(reductions, element stores) of each pass."""
    reductions, stores = e.graph.reductions, [s for s in e.graph.stores if e.graph.is_element(s)]
    last = max([r.phase - 1 for r in reductions] + [s.phase for s in stores])
    plan = [([r for r in reductions if r.phase - 1 == p], stores if p == last else [])
            for p in range(last + 1)]
    return [step for step in plan if any(step)]


def compares(reductions: list[Value]) -> bool:
    return any(r.args[0] not in ("sum", "prod") for r in reductions)

# %% [markdown]
# What is expensive (an `exp`, an `erf`, a load whose elements lie apart along the lane), and what a later pass needs again, is worth an
# array. The second walk of a softmax puts its exponentials there, and the third divides them. Everything else is computed again from its
# loads, which are in the cache by then.

# %%
def needed_again(e: Emitter, plan: list[tuple[list[Value], list[Value]]], lane: Symbol) -> list[Value]:
    """The expensive values that more than one pass needs: also what lies apart along the lane, and is loaded one by one."""
    def expensive(v: Value) -> bool:
        return v.op in HEAVY or v.op == "load" and along_lane(e, v.index, lane) not in (-1, 0, 1)

    uses = [elements(e.graph, reductions + stores) for reductions, stores in plan]
    return sorted({v for i, used in enumerate(uses) for v in used if expensive(v) and any(v in later for later in uses[i + 1:])},
                  key=in_order)
