# %% [markdown]
# # Planning: the shape of a program
#
# Before a line of text is written, somebody has to decide what one program of the GPU takes upon itself: a run of elements, a tile with two
# sides, one row or several, and of a long row all of it or a part at a time. `plan` looks at the kernel for what decides that, and
# `heuristics.py` has the numbers. Of `x - x.mean(1, keepdim=True)` with 4,096 rows of different lengths:
#
#     64 numbers in a row      XBLOCK 8, RBLOCK 64     in registers, 2 warps
#     1024 numbers in a row    XBLOCK 1, RBLOCK 1024   in registers, 4 warps
#     16384 numbers in a row   XBLOCK 1, RBLOCK 16384  in registers, 16 warps
#     50257 numbers in a row   XBLOCK 1, RBLOCK 8192   walked along, 16 warps
#
# Short rows share a program, and a long one has it for itself, with more warps. The last row is too long for the registers of a program,
# which reads it twice: once for the mean, and once to subtract it.
#
# The first of these that applies decides:
#
# 1. Rows with column sums on the way (`walked`): a tile of whole rows.
# 2. Two axes, since some access is contiguous in another variable (`tiling.py`): a tile with two sides.
# 3. No reduction, but additions to rows of a short table: rows and columns (`rows_added_to`).
# 4. No reduction, but vectors along the columns, in half precision (`rows_and_columns`): rows and columns as well.
# 5. No reduction: a run of elements.
# 6. A reduction over a length that is not known: always walked along (`unknown_row`).
# 7. A reduction: by the numbers of rows and columns, whether rows or columns are contiguous, how often the row is needed, and how many
#    full-size operands there are.

# %%
from collections.abc import Sequence

import torch

from ..ch01_graphs.symbolic import Symbol, present, product, substitute, symbols
from ..ch07_loops.ir import Value
from ..ch08_fusion.dependencies import storage_size
from ..ch08_fusion.values import LinkedKernel
from . import heuristics
from .passes import schedule_passes
from .tiling import COLUMNS, Axis, choose_axes, column_block, contiguous_var, divides, rows_and_columns, visits


def plan(g: LinkedKernel, pieces: Sequence[dict] = ({},)) -> tuple[list[Axis], heuristics.Config]:
    """The axes of a linked kernel and the default configuration. pieces: of a list, the values of its parameters."""
    kernel = g.kernel
    accesses = [s.index for s in g.steps if s.op in ("load", "store")]
    axes = choose_axes(kernel.vars, kernel.reduction_vars, accesses)
    vars = kernel.vars + kernel.reduction_vars
    total = present(product(v.size for v in vars))
    heavy = [i for i in accesses if visits(i, vars) * 2 > total]
    sizes = {a.name: present(a.numel) for a in axes}
    if kernel.walked:
        return axes, heuristics.walking(present(product(v.size for v in kernel.walked)), sizes["r"])
    if "y" in sizes:
        return axes, heuristics.tiled(sizes["y"], sizes["x"], len(heavy))
    if "r" not in sizes:
        if (split := rows_added_to(g, axes)) and total >= heuristics.MANY:
            return split, heuristics.added(column_block(split[1].numel))
        split = rows_and_columns(axes, [s.index for s in g.steps if s.op == "load"])
        widths = [kernel.buffers[s.buffer].dtype.itemsize for s in g.steps if s.op in ("load", "store") and s.index in heavy]
        if len(split) > 1 and total >= heuristics.MANY and sum(widths) <= 2 * len(widths):
            return split, heuristics.rows_config(column_block(split[1].numel))
        return axes, heuristics.pointwise_config(sizes["x"], len(heavy))
    inner = not any(contiguous_var(i, vars) in kernel.vars for i in heavy)  # one strided access is too many
    if not all(isinstance(v.size, int) for v in kernel.reduction_vars):
        return axes, heuristics.unknown_row(inner, sum(present(substitute(axes[0].numel, v)) for v in pieces))
    walks = sum(bool(inside) for _, inside in schedule_passes(g))
    sums = sum(s.op == "reduce" for s in g.steps)
    return axes, heuristics.reduction_config(sizes["x"], sizes["r"], inner, walks, len(heavy), sums, draws_random(g))


def draws_random(g: LinkedKernel) -> bool:
    return any(s.op == "philox" for s in g.steps)


# %% [markdown]
# An atomic store whose place is a row of a table, looked up for each row of the loop, gets a tile of rows and columns, if the table is
# so much shorter than the loop that rows of a tile will meet (`add_rows` in `rules/prelude.py`).

# %%
def row_of(g: LinkedKernel, s: Value, rows: tuple[Symbol, ...]) -> Value | None:
    """The looked-up number that says to which row of a table `s` adds, if it comes from the loop variables `rows` and these give nothing
    else of the place."""
    data = [g.symbols[v] for v in symbols(s.index) if v in g.symbols]
    fits = len(data) == 1 and s.mode is not None and s.mask is None and g.kernel.buffers[s.buffer].dtype == torch.float32
    return data[0] if fits and data[0].dims and data[0].dims <= set(rows) and symbols(s.index).isdisjoint(rows) else None


def rows_added_to(g: LinkedKernel, axes: list[Axis]) -> list[Axis] | None:
    """Two axes, rows and columns, for a kernel on one axis that adds to rows of a short table; else None."""
    vars = axes[0].vars
    looked_up = {v for s in g.stores if s.mode is not None for d in symbols(s.index) if d in g.symbols for v in g.symbols[d].dims}
    cut = 1 + max([vars.index(v) for v in looked_up], default=-1)
    rows, columns = (product(v.size for v in part) for part in (vars[:cut], vars[cut:]))
    short = [s for s in g.stores if row_of(g, s, vars[:cut])
             and 8 * present(storage_size(g.kernel.buffers[s.buffer])) <= present(rows * columns)]
    if not cut or not short or not divides(heuristics.ROWS, rows) or column_block(columns) < COLUMNS[0]:
        return None
    return [Axis("y", vars[:cut], 0, 2), Axis("x", vars[cut:], 1, 2)]
