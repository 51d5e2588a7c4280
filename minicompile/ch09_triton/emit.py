# %% [markdown]
# # From a kernel to Triton source
#
# Fusion decided which loops share a launch. What is left is to write the program that one block of the GPU
# runs. Three steps:
#
# 1. *Link* the bodies of all loops into one graph of values (chapter 8, `values.py`).
# 2. *Plan*: choose the axes and block sizes, and for reductions whether a row is held in registers or
#    walked along several times.
# 3. *Print*: one line per value, with the user's source line behind it as a comment.
#
# For `torch.relu(x) + 1` over 1,000 elements that is (without the comments, and with an `XBLOCK` of 128)
#
# ```python
# xpid = tl.program_id(0)
# xindex = xpid * XBLOCK + tl.arange(0, XBLOCK)
# xmask = xindex < 1000
# tmp0 = tl.load(in0 + (xindex), xmask)
# tmp2 = tl.maximum(tmp0, 0.0, propagate_nan=tl.PropagateNan.ALL)
# tmp4 = tmp2 + 1.0
# tl.store(out0 + (xindex), tmp4, xmask)
# ```
#
# Inductor does the same with strings through a handler object (`V.ops`) and keeps the tile shape of a value
# in a class per variable. Here a value's shape is the set of axes that it varies along, known before anything
# is printed.

# %%
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..ch01_graphs.symbolic import Int, Symbol, coefficient, present, product, substitute, symbols, to_text
from ..ch07_loops.builder import COMPARISONS
from ..ch07_loops.ir import Loop, Value
from ..ch08_fusion.dependencies import storage_size
from ..ch08_fusion.kernel import Kernel, KernelList, KernelSource
from ..ch08_fusion.values import LinkedKernel, link
from ..errors import Unsupported
from . import heuristics, reductions
from .ops import OPS, constant_tile, convert, convert_computed, pointer_type, triton_type
from .passes import CHOOSE, narrow_positions, schedule_passes, with_online_softmax
from .rules.prelude import prelude_for
from .tiling import COLUMNS, Axis, Indexer, choose_axes, column_block, contiguous_var, divides, fits_int32, rows_and_columns, visits

# %% [markdown]
# ## Planning
#
# What the heuristics want to know: how large the axes are, how many full-size operands there are, whether
# rows or columns are contiguous, and how often a loop would walk along the row.

# %%
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

# %% [markdown]
# ## Printing
#
# `Printer` is the state of the text being written: where lines go, what each value is called, and which
# masks exist. The functions below it print one step each.
#
# The axes of a value follow from its dimensions. What depends on a reduction has the shape of a column of
# results, one per row of the tile.

# %%
@dataclass
class Printer:
    graph: LinkedKernel
    axes: list[Axis]
    indexer: Indexer
    masks: dict[str, str]                                # axis -> mask name, where one is needed
    parameters: dict[str, str]                           # buffer -> parameter of the kernel
    lines: list[tuple[str, str]] = field(default_factory=list)       # (statement, comment)
    names: dict[Value, str | list[str]] = field(default_factory=dict)
    policy: dict[Value, str] = field(default_factory=dict)           # load -> eviction policy in this pass
    rows: tuple[Symbol, ...] = ()                        # of a tile in which additions to one row of memory meet first

    def __post_init__(self):
        self.cast = ".to(tl.int64)" if self.indexer.index_type == "tl.int64" else ""
        self.axis_of: dict[Symbol, str] = {v: a.name for a in self.axes for v in a.vars}
        self.everything = frozenset(a.name for a in self.axes)
        self.number = {s: k for k, s in enumerate(self.graph.steps)}
        self.per_row = self.everything - {"r"}

    def axes_of(self, value: Value) -> frozenset[str]:
        axes = frozenset(self.axis_of[d] for d in value.dims)
        return axes | self.per_row if value.phase else axes

    def say(self, statement: str, loop: Loop | None = None):
        self.lines.append((statement, loop))

    def shape(self, names, last: str = "") -> str:
        """The text of the shape of a tile that varies along `names`. last: behind the size of the last axis."""
        return "[" + ", ".join(a.block if a.name in names else "1" for a in self.axes) + last + "]"

    def mask(self, names, extra: str | None = None) -> str | None:
        parts = [self.masks[n] for n in sorted(names) if n in self.masks] + ([extra] if extra else [])
        return " & ".join(parts) if parts else None


# %% [markdown]
# Each statement remembers the loop that it came from, and behind the statement stands the user's line as a
# comment. `value_text` gives the text of an operand, its variable or a literal. `offset_text` gives an address as
# a tile. If an address does not vary along an axis although the tile has it, the text is broadcast.

# %%
_comments: dict = {}


def comment(loop: Loop | None) -> str:
    """`model.py:12 return x.exp()`, or nothing; of several lines the numbers, and the text of the last."""
    if loop is None or loop.location is None:
        return ""
    where = loop.location.lines
    if where not in _comments:
        file, numbers = where[-1].filename.rpartition("/")[2], sorted({l.lineno for l in where if l.filename == where[-1].filename})
        _comments[where] = f"{file}:{','.join(map(str, numbers))} {where[-1].source[:60]}".strip().replace("\n", " ")
    return _comments[where]


LITERALS_FIT = {"add", "sub", "mul", "truediv"} | COMPARISONS | CHOOSE


def value_text(p: Printer, value: Value, literal: bool = False) -> str:
    """The text of an operand: a variable, or a constant (a bare number only if `literal`)."""
    if value.op != "constant":
        name = p.names[value]
        return name[0] if isinstance(name, list) else name
    text = constant_tile(value.args[0], value.dtype, len(p.axes))
    if not literal and "tl.full" not in text:
        return f"tl.full([{', '.join('1' * len(p.axes))}], {text}, tl.float32)"
    return text


def offset_text(p: Printer, index: Int, want: frozenset[str]) -> str:
    """An offset as a tile over the axes `want`, of which it may use only some. Without any it may be a number, which is no tile."""
    text = p.indexer.text(index)
    used = {p.axis_of[s] for s in symbols(index) if s in p.axis_of}
    data = [p.graph.symbols[s] for s in symbols(index) if s in p.graph.symbols]
    used = used.union(*map(p.axes_of, data))
    if not used and not data:
        return f"tl.full({p.shape(want)}, {text}, {p.indexer.index_type})"
    return text if used == want and used else f"tl.broadcast_to({text}, {p.shape(want)})"

# %% [markdown]
# Loads are masked along the axes that they vary along; a condition from the program joins in, with 0 for
# what it hides.

# %%
def print_load(p: Printer, value: Value):
    axes = p.axes_of(value)
    extra = None if value.mask is None else value_text(p, value.mask)
    offset = p.indexer.text(value.index) if extra is None else offset_text(p, value.index, axes)
    mask = p.mask(axes, extra)
    tail = f", {mask}" if mask else ""
    if extra:
        tail += ", other=0"
    if value in p.policy:
        tail += f', eviction_policy="{p.policy[value]}"'
    p.names[value] = f"tmp{p.number[value]}"
    p.say(f"{p.names[value]} = tl.load({p.parameters[value.buffer]} + ({offset}){tail})", value.loop)


# %% [markdown]
# A store covers all axes if its value is an element of the row, and only the output's axes if it is a result per
# row. Values that were computed for fewer axes, such as a constant, are broadcast. Where several elements may hit
# one address, as in a scatter, the store is an atomic addition.

# %%
def print_store(p: Printer, s: Value):
    axes = p.everything if p.graph.is_element(s) else p.per_row
    target = p.graph.kernel.buffers[s.buffer].dtype
    text = value_text(p, s.value)
    if s.value.dtype != target:
        text = convert(f"({text})" if " " in text else text, s.value.dtype, target)
    if p.axes_of(s.value) != axes:
        text = f"tl.broadcast_to({text}, {p.shape(axes)})"
    mask = p.mask(axes, None if s.mask is None else value_text(p, s.mask))
    pointer = f"{p.parameters[s.buffer]} + ({offset_text(p, s.index, axes)})"
    if s.mode is None:
        p.say(f"tl.store({pointer}, {text}{f', {mask}' if mask else ''})", s.loop)
        return
    if target in (torch.bool, torch.int8, torch.uint8, torch.int16):
        raise Unsupported(f"no atomic addition to {target} on this GPU", s.loop.location)
    if (row := row_of(p.graph, s, p.rows)) is not None:
        p.say(f"add_rows({pointer}, {text}, {p.names[row]})", s.loop)
    else:
        p.say(f'tl.atomic_add({pointer}, {text}{f", mask={mask}" if mask else ""}, sem="relaxed")', s.loop)

# %% [markdown]
# Everything else is a value. `index` turns an expression into one; `indirect` does the opposite, and gives
# a value a name that later offsets use. A constant is no statement: it stands where it is used. `get` takes one of the
# results of a reduction, which have names already. Three operations are about types: `to_dtype` converts as PyTorch does,
# `round_to` goes to a narrower type and back to lose what that type cannot hold, and `bitcast` reads the same bits as
# another type. The arithmetic is a table from names to text, `OPS`. A text that is only a name makes no line.

# %%
def print_value(p: Printer, value: Value):
    op, args, dtype = value.op, value.args, value.dtype
    if op == "constant":
        return
    if op == "get":
        p.names[value] = p.names[args[0]][args[1]]
        return
    name = p.names[value] = f"tmp{p.number[value]}"
    if op == "index":
        text, kind = p.indexer.text(args[0]), triton_type(dtype)
        if dtype is torch.float64:
            text = f"{text}.to(tl.int64).to(tl.float64, bitcast=True)"
        looked_up = any(v in p.indexer.names for v in symbols(args[0]))         # a block already, if only of one element
        text = f"({text}).to({kind})" if looked_up or p.axes_of(value) else f"tl.full({p.shape(())}, {text}, {kind})"
    elif op == "indirect":
        p.indexer.names[args[1]] = name
        text = f"{value_text(p, args[0])}.to({p.indexer.index_type})"
    elif op == "to_dtype":
        signed = dtype.is_floating_point and args[0].dtype in SIGNED and of_truths(args[0])
        text = convert_computed(value_text(p, args[0]), dtype) if signed else convert(value_text(p, args[0]), args[0].dtype, dtype)
    elif op == "round_to":
        text = f"{value_text(p, args[0])}.to({triton_type(args[1])}).to({triton_type(dtype)})"
    elif op == "bitcast":
        text = f"{value_text(p, args[0])}.to({triton_type(dtype)}, bitcast=True)"
    elif op == "philox":
        text = philox_text(p, value)
    elif op in OPS:
        literal = op in LITERALS_FIT and any(a.op != "constant" for a in args)
        text = OPS[op](args[-1].dtype, *[value_text(p, a, literal) for a in args])
    else:
        raise Unsupported(f"the Triton backend has no operation {op!r}", value.loop.location)
    if text.isidentifier():
        p.names[value] = text
    else:
        p.say(f"{name} = {text}", value.loop)


# %% [markdown]
# `of_truths` finds the integers for which a conversion takes more care (`convert_computed`).

# %%
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)


def of_truths(value: Value) -> bool:
    """Whether an integer is computed from truth values, by nothing but integers."""
    seen, waiting = {value}, [value]
    while waiting:
        found = waiting.pop()
        if found.dtype == torch.bool:
            return True
        if found.op not in ("load", "index", "constant", "get", "reduce") and not found.dtype.is_floating_point:
            waiting += [a for a in found.args if type(a) is Value and a not in seen]
            seen.update(waiting)
    return False


# %% [markdown]
# A random number is computed from its position (`philox`). One call of the generator gives four numbers, and eager gives them to four
# neighbours. Where a tile has these side by side (`neighbours_of_four`), one call for four elements is enough.
#
# A reduction is described by texts, and `reductions.py` writes its statements. `print_step` is the table of
# contents of the printer: every step of a kernel is a load, a store, a reduction or a value.

# %%
def draws_random(g: LinkedKernel) -> bool:
    return any(s.op == "philox" for s in g.steps)


def philox_text(p: Printer, value: Value) -> str:
    """Uniform numbers of a random stream whose `layout` is (elements per thread at a time, threads)."""
    seed, offset, index, (width, threads) = value.args
    start, place = f"{value_text(p, seed)}, {value_text(p, offset)}", p.indexer.text(index)
    if not neighbours_of_four(index, p.axes):
        return f"philox_uniform({start}, ({place}).to(tl.int64), {width}, {threads})"
    axes = p.axes_of(value)
    fours = f"tl.reshape({place}, {p.shape(axes, ' // 4, 4')})"
    return f"tl.reshape(philox_four({start}, {fours}, {width}, {threads}), {p.shape(axes)})"


def neighbours_of_four(index: Int, axes: list[Axis]) -> bool:
    """Are elements 4n to 4n + 3 along the last axis four neighbours in memory, the first of them at a multiple of 4?"""
    vars = [v for axis in axes for v in axis.vars]
    steps = [coefficient(index, v) for v in vars]
    start = substitute(index, {v: 0 for v in vars})
    return bool(axes[-1].vars) and steps[-1] == 1 and all(isinstance(n, int) and n % 4 == 0 for n in (vars[-1].size, *steps[:-1], start))


def describe_reduction(p: Printer, value: Value) -> reductions.Reduction:
    kind, source, index = value.args
    return reductions.Reduction(
        kind, f"red{p.number[value]}", value_text(p, source), source.dtype, value.dtype or source.dtype,
        p.shape({"x", "r"}), p.masks.get("r"), p.indexer.text(index) if index is not None else None,
        p.indexer.index_type, to_text(p.axes[-1].numel, truncates=True), full=p.axes_of(source) == {"x", "r"})


def print_step(p: Printer, step: Value):
    if step.op == "load":
        print_load(p, step)
    elif step.op == "store":
        print_store(p, step)
    elif step.op == "reduce":
        statements, results = reductions.persistent(describe_reduction(p, step))
        for s in statements:
            p.say(s, step.loop)
        p.names[step] = results
    else:
        print_value(p, step)

# %% [markdown]
# ## Looped reductions
#
# The passes are printed one after the other. The start of an accumulator goes before the loop, its fold
# after it. Loads that a later pass repeats ask the cache to keep the line (`evict_last`), the last ones to
# let it go.

# %%
def print_passes(p: Printer) -> None:
    passes = schedule_passes(p.graph)
    for k, (before, inside) in enumerate(passes):
        for step in before:
            if step.op != "reduce":
                print_step(p, step)
        if inside:
            earlier, later = ({s for _, steps in part for s in steps}
                              for part in (passes[:k], passes[k + 1:]))
            p.policy = {s: "evict_last" if s in later else "evict_first" for s in inside
                        if s.op == "load" and (s in later or s in earlier)}
            print_pass(p, inside)
            p.policy = {}


# %% [markdown]
# One pass is printed into a list of its own, because the lines in front of the loop are only known when its body
# has been printed: each reduction in it contributes a start, an update in the loop, and an end. Then the parts are
# put together, with the index of the row and its mask at the top of the loop's body.

# %%
def print_pass(p: Printer, inside: list[Value]) -> None:
    """One loop along the row."""
    outer, p.lines = p.lines, []
    ends: list[tuple[str, Loop | None]] = []
    p.indexer.defs.pop("r", None)
    for step in inside:
        if step.op != "reduce":
            print_step(p, step)
            continue
        r = describe_reduction(p, step)
        start, update, end, p.names[step] = reductions.looped(r, "roffset // RBLOCK")
        outer += [(s, step.loop) for s in start]
        for s in update:
            p.say(s, step.loop)
        ends += [(s, step.loop) for s in end]
    rnumel = to_text(p.axes[-1].numel, truncates=True)
    head = ["rindex = roffset + rbase"]
    if "r" in p.masks:
        head.append(f"rmask = rindex < {rnumel}")
    head += [f"{n} = {text}" for n, text in p.indexer.defs.pop("r", {}).items()]
    body = [(s, None) for s in head] + p.lines
    loop = (f"for roffset in range(0, {rnumel}, RBLOCK):", None)
    p.lines = [*outer, loop, *(("    " + s, l) for s, l in body), *ends]

# %% [markdown]
# ## Rows, and columns on the way
#
# A program with `walked` variables takes a block of rows, a tile of whole rows at a time. Each tile is
# treated as in a persistent reduction, and added to the tiles of column sums. These are folded and stored
# behind the loop.
#
# There are few programs, of one warp each, so nobody else keeps the memory busy while a program computes. All loads of a tile therefore
# stand in front of its arithmetic, and are on their way together; Triton's compiler would not move one over a store. The same holds
# where random numbers are drawn.

# %%
def loads_first(g: LinkedKernel) -> list[Value]:
    """The steps of a kernel, those loads in front whose address and condition are known without a load. A load wants what was there before
    the kernel: what the kernel itself has written is a value already."""
    early = [s for s in g.steps if s.op == "load" and s.mask is None and g.symbols.keys().isdisjoint(symbols(s.index))]
    return [*early, *(s for s in g.steps if s not in set(early))]


def print_walk(p: Printer) -> None:
    kernel, (x, r) = p.graph.kernel, p.axes
    behind = Indexer([Axis("block", kernel.blocks, 0, 2), r], p.indexer.index_type)
    sums = {s: f"sum{p.number[s]}" for s in p.graph.steps if s.op == "column_sum"}
    ends: list[tuple[str, Loop | None]] = []
    for step in loads_first(p.graph):
        if step in sums:
            text = convert(value_text(p, step.args[0]), step.args[0].dtype, step.dtype)
            p.say(f"{sums[step]} += " + (f"tl.where({p.masks['x']}, {text}, 0)" if "x" in p.masks else text),
                  step.loop)
        elif step.op == "store" and step.value in sums:
            target = kernel.buffers[step.buffer].dtype
            text = convert(f"tl.sum({sums[step.value]}, 0)[None, :]", step.value.dtype, target)
            pointer = f"{p.parameters[step.buffer]} + ({behind.text(step.index)})"
            mask = f", {p.masks['r']}" if "r" in p.masks else ""
            ends.append((f"tl.store({pointer}, {text}{mask})", step.loop))
        else:
            print_step(p, step)
    length = to_text(product(v.size for v in kernel.walked))
    head = axis_lines(p, x, f"blockindex * {length} + xoffset + ", f"(blockindex + 1) * {length}")
    starts = [f"blockindex = tl.program_id(0){p.cast}", *axis_lines(p, r),
              *(f"{name} = tl.zeros([XBLOCK, RBLOCK], {triton_type(s.dtype)})" for s, name in sums.items()),
              f"for xoffset in range(0, {length}, XBLOCK):"]
    names = [f"{n} = {text}" for defs in behind.defs.values() for n, text in defs.items()]
    p.lines = [*((s, None) for s in starts), *(("    " + s, None) for s in head),
               *(("    " + s, loop) for s, loop in p.lines), *((s, None) for s in names), *ends]

# %% [markdown]
# ## The whole kernel
#
# In front of the statements stand the indices: the number of the program, for two axes taken apart by a division, the positions
# of its tile on each axis, a mask where the tile can hang over the end, and the parts of an index that addresses use.

# %%
def axis_lines(p: Printer, a: Axis, start: str = "", end: str | None = None) -> list[str]:
    """Statements that define the index of an axis, its mask, and the parts of it that offsets use."""
    lines = [f"{a.name}index = {start}tl.arange(0, {a.block}){a.slot}{p.cast}"]
    if a.name in p.masks:
        lines.append(f"{p.masks[a.name]} = {a.name}index < {end or to_text(a.numel, truncates=True)}")
    return lines + [f"{n} = {text}" for n, text in p.indexer.defs.get(a.name, {}).items()]


def header(p: Printer, looped: bool, program: str) -> list[str]:
    """Statements that define the axes' indices and masks. `program`: the text of its number."""
    lines = [f"xpid = {program}"]
    if "y" in p.everything:
        count = f"(({to_text(p.axes[1].numel, truncates=True)} + XBLOCK - 1) // XBLOCK)"
        lines = [f"xpid = {program} % {count}", f"ypid = {program} // {count}"]
    for a in p.axes:
        if a.name != "r":
            lines += axis_lines(p, a, f"{a.name}pid{p.cast} * {a.block} + ")
        elif looped:
            lines.append(f"rbase = tl.arange(0, RBLOCK){a.slot}{p.cast}")
        else:
            lines += axis_lines(p, a)
    return lines

# %% [markdown]
# The statements are printed in one of three ways: straight, pass by pass for a row that does not fit a tile, or as a
# walk for column sums on the way along rows. An axis needs a mask only if its block does not divide its length.

# %%
def print_kernel(graph: LinkedKernel, axes: list[Axis], config: heuristics.Config, index_type: str, program: str = "tl.program_id(0)",
                 exact: bool = False) -> tuple[Printer, list[tuple[str, Loop | None]]]:
    """The statements of a kernel. `exact`: blocks are full, so there are no masks."""
    kernel = graph.kernel
    lengths = {a.name: a.numel for a in axes}
    if kernel.walked:
        lengths["x"] = product(v.size for v in kernel.walked)
    masks = {} if exact else {n: f"{n}mask" for n, length in lengths.items() if not divides(config.blocks[n], length)}
    parameters = {b: b if b.isidentifier() else f"buffer{k}" for k, b in enumerate(kernel.tensors)}
    p = Printer(graph, axes, Indexer(axes, index_type), masks, parameters)
    if config.blocks.get("y") == heuristics.ROWS and config.blocks["x"] >= 16 and not masks:      # a product needs 16 columns
        p.rows = axes[0].vars
    looped = bool(kernel.reduction_vars) and not config.persistent
    if looped:
        print_passes(p)
    elif kernel.walked:
        print_walk(p)
    else:
        for step in loads_first(graph) if draws_random(graph) else graph.steps:
            print_step(p, step)
    return p, p.lines if kernel.walked else [(line, None) for line in header(p, looped, program)] + p.lines

# %% [markdown]
# `emit_triton` goes through the stages in order. The kernel's bodies are linked to one graph, and pairs of
# a maximum and a sum of exponentials become one reduction. The plan gives axes and block sizes, unless the
# caller brings some. Positions are 32 bits wide if every buffer is small enough. Then the statements are printed.
#
# What is left is to put the text together (`source_of`): the signature, with block sizes as constants of the compilation,
# the header that computes indices and masks, the statements with the user's lines as comments, and in front
# of everything the helpers that are called. `lines` says for each line of the text which loop it came from;
# the explorer reads it.

# %%
def emit_triton(kernel: Kernel, config: heuristics.Config | None = None) -> KernelSource:
    """Triton source for `kernel`. `options`: `signature` (argument -> Triton type), `constants` (block
    sizes), `grid` (the number of programs, an expression over the size symbols), `num_warps`. Raises
    Unsupported."""
    if isinstance(kernel, KernelList):
        return emit_list(kernel)
    graph = with_online_softmax(link(kernel))
    axes, default = plan(graph)
    config = config or default
    graph, index_type = with_index_type(kernel, graph, [product(a.numel for a in axes)])
    p, body = print_kernel(graph, axes, config, index_type)
    signature = {p.parameters[b]: pointer_type(kernel.buffers[b].dtype) for b in kernel.tensors}
    wide = index_type == "tl.int64" or any(s.real for s in kernel.symbols)
    signature |= {s.name: "i64" if wide else "i32" for s in kernel.symbols}
    grid = " * ".join(f"(({to_text(a.numel)} + {config.blocks[a.name] - 1}) // {config.blocks[a.name]})"
                      for a in axes if a.name != "r")
    if kernel.walked:
        grid = to_text(product(v.size for v in kernel.blocks))
    constants = {a.block: config.blocks[a.name] for a in axes}
    return source_of(kernel, body, signature, constants, grid, config, {id(loop): k for k, loop in enumerate(kernel.loops)})


def with_index_type(kernel: Kernel, graph: LinkedKernel, spaces: list[Int]) -> tuple[LinkedKernel, str]:
    """Offsets are 32 bits wide where all buffers and iteration spaces are that small."""
    sizes = [storage_size(b) for n, b in kernel.buffers.items() if n not in kernel.local]
    return (narrow_positions(graph), "tl.int32") if fits_int32([*sizes, *spaces]) else (graph, "tl.int64")


def source_of(kernel: Kernel, body, signature: dict, constants: dict, grid: str, config: heuristics.Config,
              position: dict[int, int], **options) -> KernelSource:
    """The source with these statements. position: of loops, by id."""
    head = f"def {kernel.name}({', '.join([*signature, *(f'{c}: tl.constexpr' for c in constants)])}):"
    text = "\n".join([head, *(f"    {s}  # {c}" if (c := comment(loop)) else f"    {s}" for s, loop in body)]) + "\n"
    before = ("import triton\nimport triton.language as tl\nfrom triton.language.extra import libdevice\n\n\n"
              + prelude_for(text) + "@triton.jit\n")
    lines = [None] * (before.count("\n") + 1)
    for statement, loop in body:
        lines += [position.get(id(loop))] * (statement.count("\n") + 1)
    return KernelSource(kernel.name, "triton", before + text, dict(
        signature=signature, constants=constants, grid=grid, num_warps=config.num_warps,
        device=kernel.device.index, **options), (*lines, None))

# %% [markdown]
# ## A list of kernels
#
# A program of a list (chapter 8, `lists.py`) looks its piece up: `pieces` says for each program which piece it works
# on, and the piece's row of `table` has the number of its first program, its parameters, and the addresses of its
# tensors, as integers. The rest of the text is the kernel's as if it were alone, with the row's values for arguments.
#
# What the compiler of Triton knows about arguments, it has to be told about what comes from memory: that addresses are
# multiples of 16 (`ALIGN`; where they are not, another version runs), and sizes of a power of two. A mask at an unknown
# size would split each load of 16 bytes into words. Where sizes are odd, all programs but the last of a piece have full
# blocks, and take a branch without masks.

# %%
def emit_list(kernel: KernelList) -> KernelSource:
    """The source of a list with one body. Further options: `pieces`, for each piece the number of its programs, its
    parameters and which tensors are its own (`launch.py` makes the tables of it)."""
    if len(kernel.bodies) > 1:
        raise Unsupported("a list of different bodies is for the CPU")
    body = kernel.bodies[0]
    graph = with_online_softmax(link(body))
    values = [dict(zip(body.symbols, piece.parameters)) for piece in kernel.pieces]
    axes, config = plan(graph, values)
    spaces = [substitute(product(a.numel for a in axes), v) for v in values]
    if set(config.blocks) == {"x"}:
        accesses = sum(s.op in ("load", "store") for s in graph.steps)
        config = heuristics.pointwise_config(sum(spaces), accesses)
    graph, index_type = with_index_type(kernel, graph, spaces)
    own = body.symbols[:len(kernel.pieces[0].parameters)]
    width = 1 + len(own) + len(body.tensors)
    lines = ["piece = tl.load(pieces + tl.program_id(0))", f"row = table + piece * {width}",
             "program = tl.program_id(0) - tl.load(row).to(tl.int32)"]
    exact = False
    for k, s in enumerate(own):
        column = [piece.parameters[k] for piece in kernel.pieces]
        even = math.gcd(*column, 16)
        exact = exact or even < 16
        load = f"tl.load(row + {1 + k}).to({index_type})"
        lines.append(f"{s.name} = {load}" if even == 1 else f"{s.name} = tl.multiple_of({load}, {even})")
    for k, name in enumerate(body.tensors):
        kind = triton_type(body.buffers[name].dtype)
        lines.append(f"{name} = tl.multiple_of(tl.load(row + {1 + len(own) + k}).to(tl.pointer_type({kind})), ALIGN)")
    statements = [(line, None) for line in lines]
    p, rest = print_kernel(graph, axes, config, index_type, "program")
    if exact and list(p.masks) == ["x"] and len(axes) == 1:
        _, unmasked = print_kernel(graph, axes, config, index_type, "program", exact=True)
        full = f"if program * XBLOCK + XBLOCK <= {to_text(axes[0].numel)}:"
        statements += [(full, None), *indented(unmasked), ("else:", None), *indented(rest)]
    else:
        statements += rest
    counts = [math.prod(-(-substitute(a.numel, v) // config.blocks[a.name]) for a in axes if a.name != "r") for v in values]
    places = {id(loop): k for k, loop in enumerate(kernel.loops)}
    position = {id(new): places[id(old)] for new, old in zip(body.loops, kernel.pieces[0].kernel.loops)}
    return source_of(
        kernel, statements, {"pieces": "*i32", "table": "*i64"} | {s.name: "i64" for s in kernel.symbols},
        {a.block: config.blocks[a.name] for a in axes} | {"ALIGN": 16}, str(sum(counts)), config, position,
        pieces=[(n, piece.parameters, piece.tensors) for n, piece in zip(counts, kernel.pieces)], tensors=len(kernel.tensors))


def indented(lines: list[tuple[str, Loop | None]]) -> list[tuple[str, Loop | None]]:
    return [("    " + line, loop) for line, loop in lines]
