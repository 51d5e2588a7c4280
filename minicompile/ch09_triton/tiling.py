# %% [markdown]
# # Axes, tiles and masks
#
# A kernel's loop nest has any number of variables; a Triton program covers one or two *axes*. Each axis
# flattens some of the variables, and a program handles a block of consecutive positions on each. Which
# variables share an axis decides whether memory is read in long runs or in single words, which on a GPU is
# a factor of eight or more.
#
# - Pointwise, all accesses contiguous in the same variable: one axis `x` over everything.
# - Pointwise, some access contiguous in an earlier variable (a transpose, NCHW to NHWC): two axes. `y` ends
#   with that variable and `x` holds the rest, so in a square tile both the read and the write run along
#   consecutive addresses; Triton moves the tile through shared memory in between.
# - Pointwise, with several vectors along the last variables, such as mean, scale and weight of each channel: two axes, rows `y` and columns
#   `x`. What depends on the column only is loaded and computed once for all rows of the tile, not for every element. (This is done in
#   half precision and for a million elements and more; elsewhere one axis is as fast.)
# - Reductions: `x` over the output variables, `r` over the reduced ones, whatever is contiguous.
#
# An example of each, with the axes, and the blocks that `heuristics.py` then gives them:
#
#     torch.relu(x) + 1    x [64, 100]                           x: i0             XBLOCK 128
#     x.t() + y            x [256, 512], y [512, 256]            y: i0, x: i1      YBLOCK 32, XBLOCK 64
#     x * a + b            x [131072, 64], a, b [64], bfloat16   y: i0, x: i1      YBLOCK 32, XBLOCK 64
#     x.sum((0, 2))        x [8, 32, 100]                        x: i0, r: r0, r1  XBLOCK 1, RBLOCK 1024
#
# In the first, `i0` counts to 6,400: the two dimensions of a contiguous tensor have become one before (chapter 8). In the last, 800
# numbers are folded, in a block of 1,024 whose last lanes are masked: a block is a power of two.

# %%
import math
from dataclasses import dataclass, field

from ..ch01_graphs.symbolic import Int, Symbol, as_expr, bounds, coefficient, mul, present, product, substitute, to_text


@dataclass
class Axis:
    """Variables that are flattened together, slowest first. `dim` is the axis' dimension in the tile."""

    name: str                               # "x", "y" or "r"
    vars: tuple[Symbol, ...]
    dim: int
    rank: int

    @property
    def numel(self) -> Int:
        return product(v.size for v in self.vars)

    @property
    def block(self) -> str:
        return self.name.upper() + "BLOCK"

    @property
    def slot(self) -> str:
        """The indexing that puts a 1-D range on this axis: `[:, None]`."""
        if self.rank == 1:
            return ""
        return "[" + ", ".join(":" if i == self.dim else "None" for i in range(self.rank)) + "]"


# %% [markdown]
# ## Where an access is contiguous
#
# Only accesses that move much data matter: those that visit most of the iteration space. A bias vector
# stays in cache however it is read.

# %%
def stride_of(index: Int, var: Symbol) -> int:
    """Elements between neighbours along `var`, about: 0 if the index ignores it, a large number if it is not
    linear in it."""
    c = coefficient(index, var)
    return 1 << 30 if c is None else abs(present(c))


# %% tags=["exercise:contiguous-var"]
def contiguous_var(index: Int, vars: tuple[Symbol, ...]) -> Symbol | None:
    """The variable along which neighbours in the nest are neighbours in memory: of those with more than one
    value (`present`) that the index depends on, the one with the smallest stride (`stride_of`), if that is 1.
    None if there is none. The earlier of two equals wins."""
    used = [(stride_of(index, v), v) for v in vars if present(v.size) > 1]
    best = min((u for u in used if u[0] > 0), key=lambda u: u[0], default=(0, None))
    return best[1] if best[0] == 1 else None


# %%
def visits(index: Int, vars: tuple[Symbol, ...]) -> int:
    return math.prod(present(v.size) for v in vars if stride_of(index, v) > 0)


# %% tags=["exercise:choose-axes"]
def choose_axes(vars: tuple[Symbol, ...], reduction_vars: tuple[Symbol, ...],
                accesses: list[Int]) -> list[Axis]:
    """The axes of a kernel, in the order of the tile's dimensions, given the indices of its loads and
    stores.

    With reduction variables: x over `vars` and r over `reduction_vars`. Otherwise one axis x of rank 1,
    unless the nest has at least 4096 elements and some access that `visits` more than half of them is
    contiguous in a variable that is not the last one of more than one value. Then the most frequent such
    variable ends the axis y, dim 0, and the variables after it are the axis x, dim 1, of rank 2; provided
    that this variable has at least 4 values and the axis x more than one element. (Sizes are compared by
    their `present` value.)"""
    if reduction_vars:
        return [Axis("x", vars, 0, 2), Axis("r", reduction_vars, 1, 2)]
    total = math.prod(present(v.size) for v in vars)
    heavy = [i for i in accesses if visits(i, vars) * 2 > total]
    wanted = [contiguous_var(i, vars) for i in heavy]
    real = [v for v in vars if present(v.size) > 1]
    split = [v for v in wanted if v is not None and v != real[-1]]
    if split and total >= 4096:
        v = max(set(split), key=split.count)
        cut = vars.index(v) + 1
        if present(product(u.size for u in vars[cut:])) > 1 and present(v.size) >= 4:
            return [Axis("y", vars[:cut], 0, 2), Axis("x", vars[cut:], 1, 2)]
    return [Axis("x", vars, 0, 1)]

# %% [markdown]
# The backward pass of a batch norm reads five vectors with one number for each channel, and computes with them: two divisions, a
# square root and its reciprocal. On one axis every element does that again, and the kernel waits for its arithmetic. `rows_and_columns`
# splits the axis before the first variable that any of the vectors depends on. Columns have to come in full blocks of a
# power of two, so that rows stay aligned and need no masks.

# %%
COLUMNS = 32, 256           # the narrowest and the widest block of columns


def column_block(columns: Int) -> int:
    """The widest block of columns that divides their number; 1 if that is not known."""
    return math.gcd(columns, COLUMNS[1]) if isinstance(columns, int) else 1


def rows_and_columns(axes: list[Axis], loads: list[Int]) -> list[Axis]:
    """`axes`, or two where they are a single one with at least two loads among `loads` that depend on the last variables only."""
    vars = axes[0].vars
    first = [min((k for k, v in enumerate(vars) if stride_of(i, v)), default=0) for i in loads]
    cut = min((k for k in first if k > 0), default=0)
    if len(axes) > 1 or sum(k > 0 for k in first) < 2 or column_block(product(v.size for v in vars[cut:])) < COLUMNS[0]:
        return axes
    return [Axis("y", vars[:cut], 0, 2), Axis("x", vars[cut:], 1, 2)]

# %% [markdown]
# ## Index text
#
# `xindex` counts along an axis; its variables are recovered by division: for sizes (12, 64), `x0 = xindex
# // 64` and `x1 = xindex % 64`. Mostly that is not needed. Where an index is `64*x0 + x1` it *is* `xindex`.
# So we look for chains of neighbouring variables in which each stride is the next stride times the next
# size, and give each chain one name. Divisions that remain are by constants, and cheap.

# %%
@dataclass
class Indexer:
    """Renders index expressions. `defs` collects, per axis name, the definitions that the text uses: name
    -> text."""

    axes: list[Axis]
    index_type: str                                    # "tl.int32" or "tl.int64"
    defs: dict[str, dict[str, str]] = field(default_factory=dict)
    names: dict[Symbol, str] = field(default_factory=dict)     # indirect symbol -> the text of its value

    def chain(self, axis: Axis, first: int, last: int) -> str:
        """The name of the flattened variables `first..last` of an axis."""
        if first == 0 and last == len(axis.vars) - 1:
            return f"{axis.name}index"
        name = f"{axis.name}{first}" + (f"_{last}" if last > first else "")
        after = product(v.size for v in axis.vars[last + 1:])
        text = f"{axis.name}index"
        if after != 1:
            text = f"{text} // {_paren(after)}"
        if first > 0:
            size = _paren(product(v.size for v in axis.vars[first:last + 1]))
            text = f"({text}) % {size}" if after != 1 else f"{text} % {size}"
        self.defs.setdefault(axis.name, {})[name] = text
        return name

    def text(self, index: Int) -> str:
        """Triton text of an index expression."""
        index = as_expr(index)
        names = dict(self.names)
        rewritten: dict[Symbol, Int] = {}
        for axis in self.axes:
            strides = [coefficient(index, v) for v in axis.vars]
            i = 0
            while i < len(axis.vars):
                last = i
                while last + 1 < len(axis.vars) and strides[i] not in (None, 0) and \
                        strides[last + 1] not in (None, 0) and \
                        strides[last] == mul(strides[last + 1], axis.vars[last + 1].size):
                    last += 1
                if strides[i] != 0:
                    for v in axis.vars[i:last]:
                        rewritten[v] = 0
                    names[axis.vars[last]] = self.chain(axis, i, last)
                i = last + 1
        if rewritten:
            index = substitute(index, rewritten)
        return to_text(index, lambda s: names.get(s, s.name), truncates=True)


def _paren(value: Int) -> str:
    return str(value) if isinstance(value, int) else f"({to_text(value, truncates=True)})"

# %% [markdown]
# ## 32 or 64 bits
#
# Index arithmetic in 64 bits takes twice the instructions and registers. A kernel uses 32 where neither its
# iteration space nor any of its buffers reaches 2^31 elements; with symbolic sizes nothing is known, and it
# uses 64.

# %%
def fits_int32(values: list[Int]) -> bool:
    highs = [bounds(v)[1] for v in values]
    return all(h is not None and h < 2**31 - 65536 for h in highs)


def divides(block: int, numel: Int) -> bool:
    """True when blocks cover an axis exactly, so that no mask is needed."""
    return isinstance(numel, int) and numel % block == 0
