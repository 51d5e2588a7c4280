# %% [markdown]
# # Reductions
#
# A reduction folds the `r` axis of a tile `[XBLOCK, RBLOCK]`. If a whole row fits one tile, it is
# *persistent*: the row is loaded once, stays in registers, and may be used again after its sum is known
# (softmax reads memory once). Longer rows are *looped*: a tile of accumulators, one per lane, is updated on
# the way along the row and folded at the end; whatever needs the result loads the row again.
#
# Each kind of reduction is three pieces of text: the value that changes nothing (for masked lanes), how a
# lane takes in one more value, and how lanes fold into one number. Kinds with several results carry several
# accumulators. All of the folds are built from sums, maxima and minima over a tile: Triton lowers these to
# warp shuffles, and custom combine functions over tuples cost compile time.

# %%
from dataclasses import dataclass

import torch

from ..ch07_loops.ir import identity
from ..errors import Unsupported
from .ops import constant_tile, convert, triton_type


@dataclass
class Reduction:
    """One `reduce` instruction being emitted. `name` prefixes its variables; the texts are: `shape` of the
    full tile's shape, `index` of the linear index (argmax), `mask` of the r mask or None, `count` of the r
    axis' size."""

    kind: str
    name: str
    value: str
    value_dtype: torch.dtype
    dtype: torch.dtype
    shape: str
    mask: str | None
    index: str | None = None
    index_type: str = "tl.int32"
    count: str = ""
    full: bool = False                      # the value varies along both axes: it has the full shape already

# %% [markdown]
# ## One accumulator
#
# `merge(accumulator, value, dtype)` and `fold(tile, dtype)` as texts. Bools are reduced as int32, because
# Triton has no one-bit tiles to shuffle.

# %%
def _extremum(name: str):
    nan = ", propagate_nan=tl.PropagateNan.ALL"
    return (lambda a, x, d: f"tl.{name}imum({a}, {x}{nan if d.is_floating_point else ''})",
            lambda t, d: f"tl.reduce({t}, 1, nan_{name})" if d.is_floating_point else f"tl.{name}({t}, 1)")


SIMPLE = {
    "sum": (lambda a, x, d: f"{a} + {x}", lambda t, d: f"tl.sum({t}, 1)"),
    "prod": (lambda a, x, d: f"{a} * {x}", lambda t, d: f"tl.reduce({t}, 1, multiply)"),
    "any": (lambda a, x, d: f"{a} | {x}", lambda t, d: f"tl.max({t}, 1)"),
    "max": _extremum("max"),
    "min": _extremum("min"),
}


# %% [markdown]
# The pieces that all kinds need: in which dtype to accumulate, the value as a full tile (`_tile`), the tile with
# its hidden lanes replaced by a harmless number (`_masked`), and the folded result as a column with one number per
# row (`_result`).

# %%
def folding_dtype(r: Reduction) -> torch.dtype:
    """The dtype in which a simple reduction accumulates."""
    if r.kind == "any":
        return torch.int32
    if r.kind in ("max", "min", "argmax", "argmin"):
        dtype = r.value_dtype
    else:
        dtype = r.dtype
    return torch.int32 if dtype in (torch.bool, torch.int8, torch.int16, torch.uint8) else dtype


def _tile(r: Reduction, dtype: torch.dtype) -> str:
    value = convert(r.value, r.value_dtype, torch.bool) if r.kind == "any" else r.value
    source = torch.bool if r.kind == "any" else r.value_dtype
    value = convert(value if value.isidentifier() else f"({value})", source, dtype)
    return value if r.full else f"tl.broadcast_to({value}, {r.shape})"


def _masked(r: Reduction, tile: str, hidden, dtype: torch.dtype) -> str:
    """`tile` with the number `hidden` where the mask is false."""
    return tile if r.mask is None else f"tl.where({r.mask}, {tile}, {constant_tile(hidden, dtype, 2)})"


def _result(r: Reduction, folded: str) -> str:
    """The folded row, shaped [XBLOCK, 1], in the instruction's dtype."""
    text = f"{folded}[:, None]"
    if r.dtype == torch.bool:
        return f"{text} != 0"
    return f"{text}.to({triton_type(r.dtype)})"

# %% [markdown]
# ## Persistent
#
# The statements, and the names of the results. `argmax` finds the extreme value first and then the smallest
# index that has it; a NaN is the extreme value, as in eager. Welford's single pass is needed only where a
# second pass would load again: in registers, the mean and then the sum of squared differences is both
# simpler and more accurate.
#
# In this form the row lies in registers as one tile, so a fold is a single call, `tl.sum(tile, 1)`. The statements
# are those that one would write by hand for a whole row: for a softmax, mask, maximum, sum of exponentials.

# %%
def persistent(r: Reduction) -> tuple[list[str], list[str]]:
    n = r.name
    if r.kind in SIMPLE:
        _, fold = SIMPLE[r.kind]
        dtype = folding_dtype(r)
        tile = _masked(r, _tile(r, dtype), identity(r.kind, dtype), dtype)
        return [f"{n} = {_result(r, fold(tile, dtype))}"], [n]
    if r.kind in ("argmax", "argmin"):
        dtype = folding_dtype(r)
        _, fold = SIMPLE[r.kind[3:]]
        return [f"{n}_v = {_tile(r, dtype)}",
                f"{n}_i = {_masked_index(r)}",
                f"{n}_m = {fold(_masked(r, f'{n}_v', identity(r.kind, dtype), dtype), dtype)}[:, None]",
                *_arg_fold(r, f"{n}_v", f"{n}_i", f"{n}_m", dtype)], [n]
    if r.kind == "softmax":
        return [f"{n}_x = {_masked(r, _tile(r, r.dtype), float('-inf'), r.dtype)}",
                f"{n}_max = tl.reduce({n}_x, 1, nan_max)[:, None]",
                f"{n}_sum = tl.sum({_masked(r, f'tl.exp({n}_x - {n}_max)', 0.0, r.dtype)}, 1)[:, None]",
                ], [f"{n}_max", f"{n}_sum"]
    if r.kind == "welford":
        return [f"{n}_x = {_tile(r, r.dtype)}",
                f"{n}_mean = {_mean(r, _masked(r, f'{n}_x', 0.0, r.dtype))}",
                f"{n}_d = {_masked(r, f'{n}_x - {n}_mean', 0.0, r.dtype)}",
                f"{n}_m2 = tl.sum({n}_d * {n}_d, 1)[:, None]",
                f"{n}_n = tl.full([1, 1], {r.count}, {triton_type(r.dtype)})",
                ], [f"{n}_mean", f"{n}_m2", f"{n}_n"]
    raise Unsupported(f"the Triton backend has no reduction {r.kind!r}")


def _index_limit(r: Reduction, shape: str = "[1, 1]") -> str:
    return f"tl.full({shape}, {2**31 - 1 if r.index_type == 'tl.int32' else 2**63 - 1}, {r.index_type})"


def _masked_index(r: Reduction) -> str:
    tile = f"tl.broadcast_to({r.index}, {r.shape})"
    return tile if r.mask is None else f"tl.where({r.mask}, {tile}, {_index_limit(r)})"


def _arg_fold(r: Reduction, value: str, index: str, extreme: str, dtype: torch.dtype) -> list[str]:
    hit = f"({value} == {extreme})"
    if dtype.is_floating_point:
        hit = f"{hit} | (({value} != {value}) & ({extreme} != {extreme}))"
    first = f"tl.min(tl.where({hit}, {index}, {_index_limit(r)}), 1)[:, None]"
    return [f"{r.name} = {first}.to({triton_type(r.dtype)})"]

# %% [markdown]
# ## Looped
#
# Three lists of statements: before the loop, in it, and after it. The online softmax keeps, per lane, the
# largest value so far and the sum of exponentials relative to it; when a larger value arrives the sum is
# rescaled. Either way only one exponential is new: that of minus the distance. Lanes that have seen nothing
# but minus infinity hold a wrong sum, which the last line multiplies by zero.

# %% tags=["exercise:online-softmax"]
def online_softmax(r: Reduction) -> tuple[list[str], list[str], list[str], list[str]]:
    """The maximum of a row, and the sum of exp(x - maximum), in one walk along it: statements of Triton before, in and
    after the loop, and the names of the two results, each shaped [XBLOCK, 1].

    Each pass of the loop sees `_tile(r, r.dtype)`, a tile of shape `r.shape`; `_masked(r, tile, number, r.dtype)` puts a number
    where it is beyond the end of the row. `_full(r, number, r.dtype)` is a tile of one number. All names begin with `r.name`
    and an underscore. A row of minus infinities has the maximum minus infinity, one with a NaN the maximum NaN;
    `tl.reduce(tile, 1, nan_max)` folds to a maximum that does so."""
    n = r.name
    x, m, s, e = f"{n}_x", f"{n}_m", f"{n}_s", f"{n}_e"
    return ([f"{m} = {_full(r, float('-inf'), r.dtype)}", f"{s} = {_full(r, 0.0, r.dtype)}"],
            [f"{x} = {_masked(r, _tile(r, r.dtype), float('-inf'), r.dtype)}",
             f"{e} = tl.where({x} == {m}, 1.0, tl.exp(-tl.abs({x} - {m})))",
             f"{s} = tl.where({x} > {m}, {s} * {e} + 1.0, {s} + {e})",
             f"{m} = tl.maximum({m}, {x}, propagate_nan=tl.PropagateNan.ALL)"],
            [f"{n}_max = tl.reduce({m}, 1, nan_max)[:, None]",
             f"{n}_sum = tl.sum({s} * tl.exp({m} - {n}_max), 1)[:, None]"], [f"{n}_max", f"{n}_sum"])


# %%
def _full(r: Reduction, value, dtype: torch.dtype) -> str:
    """A tile of one number."""
    return f"tl.full({r.shape}, {_literal(value)}, {triton_type(dtype)})"

# %% [markdown]
# Welford's update keeps mean and squared differences per lane. All lanes have seen equally many values, so
# the division is one scalar reciprocal per iteration; at the end the lanes are merged by the formula for
# combining the statistics of two samples, over all lanes at once.
#
# Here a row is longer than a tile, so each lane keeps an accumulator through the loop, and only behind the loop
# are the lanes folded into one number. For a sum: a tile of zeros, one addition in the loop, `tl.sum` behind it.
# `keep` leaves the accumulator as it was where the last tile hangs over the end of the row. `argmax` needs a
# second accumulator for the position.

# %%
def looped(r: Reduction, counter: str) -> tuple[list[str], list[str], list[str], list[str]]:
    """Statements before, in and after the loop, and the names of the results. `counter`: text of the
    iteration's number, from 0."""
    n = r.name
    keep = lambda new, old: new if r.mask is None else f"tl.where({r.mask}, {new}, {old})"
    if r.kind in SIMPLE:
        merge, fold = SIMPLE[r.kind]
        dtype = folding_dtype(r)
        acc = f"{n}_acc"
        return ([f"{acc} = {_full(r, identity(r.kind, dtype), dtype)}"],
                [f"{acc} = {keep(merge(acc, _tile(r, dtype), dtype), acc)}"],
                [f"{n} = {_result(r, fold(acc, dtype))}"], [n])
    if r.kind in ("argmax", "argmin"):
        dtype = folding_dtype(r)
        _, fold = SIMPLE[r.kind[3:]]
        sign = ">" if r.kind == "argmax" else "<"
        better = f"({n}_v {sign} {n}_acc) | ({n}_at == {_index_limit(r)})"
        if dtype.is_floating_point:
            better += f" | (({n}_v != {n}_v) & ({n}_acc == {n}_acc))"
        if r.mask is not None:
            better = f"{r.mask} & ({better})"
        return ([f"{n}_acc = {_full(r, identity(r.kind, dtype), dtype)}",
                 f"{n}_at = {_index_limit(r, r.shape)}"],
                [f"{n}_v = {_tile(r, dtype)}", f"{n}_better = {better}",
                 f"{n}_acc = tl.where({n}_better, {n}_v, {n}_acc)",
                 f"{n}_at = tl.where({n}_better, tl.broadcast_to({r.index}, {r.shape}), {n}_at)"],
                [f"{n}_m = {fold(f'{n}_acc', dtype)}[:, None]",
                 *_arg_fold(r, f"{n}_acc", f"{n}_at", f"{n}_m", dtype)], [n])
    if r.kind == "softmax":
        return online_softmax(r)
    if r.kind == "welford":
        x, d, mean, m2 = f"{n}_x", f"{n}_d", f"{n}_mu", f"{n}_sq"
        share = f"(1.0 / tl.full([1, 1], {counter} + 1, {triton_type(r.dtype)}))"
        return ([f"{mean} = {_full(r, 0.0, r.dtype)}", f"{m2} = {_full(r, 0.0, r.dtype)}"],
                [f"{x} = {_tile(r, r.dtype)}", f"{d} = {x} - {mean}",
                 f"{mean} = {keep(f'{mean} + {d} * {share}', mean)}",
                 f"{m2} = {keep(f'{m2} + {d} * ({x} - {mean})', m2)}"],
                [f"{n}_cnt = (({r.count} + RBLOCK - 1 - rbase) // RBLOCK).to({triton_type(r.dtype)})",
                 f"{n}_mean = {_mean(r, f'{mean} * {n}_cnt')}",
                 f"{n}_off = {mean} - {n}_mean",
                 f"{n}_m2 = tl.sum({m2} + {n}_cnt * {n}_off * {n}_off, 1)[:, None]",
                 f"{n}_n = tl.full([1, 1], {r.count}, {triton_type(r.dtype)})"],
                [f"{n}_mean", f"{n}_m2", f"{n}_n"])
    raise Unsupported(f"the Triton backend has no reduction {r.kind!r}")


def _mean(r: Reduction, tile: str) -> str:
    """Not multiplied by an inverse: of equal numbers in half precision the mean is the number itself, and the variance 0, as in eager."""
    count = f"{r.count}.0" if r.count.isdigit() else f"tl.full([1, 1], {r.count}, {triton_type(r.dtype)})"
    total = f"tl.sum({tile}, 1)[:, None]"
    return f"tl.div_rn({total}, {count})" if r.dtype is torch.float32 else f"{total} / {count}"


def _literal(value) -> str:
    return f'float("{value}")' if value in (float("inf"), float("-inf")) else repr(value)
