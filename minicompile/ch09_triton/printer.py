# %% [markdown]
# # Printing: one line per value
#
# A kernel is a list of steps by now: loads, values, reductions, stores. Each becomes a line of text, and the only state that is needed is
# where lines go, what each value is called, and which masks exist. For `torch.relu(x[i]).half()`, with 65 rows of 100 numbers in
# `x` and 40 of them picked by `i`, the steps and their lines are
#
#     load      tmp0 = tl.load(in0 + (x0), xmask)
#     constant
#     lt        tmp2 = tmp0 < tl.full([1], 0, tl.int64)
#     constant
#     add       tmp4 = tmp0 + tl.full([1], 65, tl.int64)
#     where     tmp5 = tl.where(tmp2, tmp4, tmp0)
#     indirect  tmp6 = tmp5.to(tl.int32)
#     load      tmp7 = tl.load(in1 + (100*tmp6 + x1), xmask)
#     constant
#     maximum   tmp9 = tl.maximum(tmp7, 0.0, propagate_nan=tl.PropagateNan.ALL)
#     store     tl.store(out0 + (xindex), tmp9.to(tl.float16), xmask)
#
# An index below zero counts from the end; then, as an offset, it has the name `tmp6` in the address of the second load. The store rounds
# to the type of its buffer.
#
# `Printer` is the state. The functions below it print one step each. The axes of a value follow from its dimensions. What depends on a
# reduction has the shape of a column of results, one per row of the tile.

# %%
from dataclasses import dataclass, field

import torch

from ..ch01_graphs.symbolic import Int, Symbol, coefficient, substitute, symbols, to_text
from ..ch07_loops.builder import COMPARISONS
from ..ch07_loops.ir import Loop, Value
from ..ch08_fusion.values import LinkedKernel
from ..errors import Unsupported
from . import reductions
from .ops import OPS, constant_tile, convert, convert_computed, triton_type
from .passes import CHOOSE
from .plan import row_of
from .tiling import Axis, Indexer


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
    elif op in CHOSEN_BY and may_end_llvm(value):
        a, b = (value_text(p, v) for v in args)
        text = f"tl.where(({a} {CHOSEN_BY[op]} {b}) | ({a} != {a}), {a}, {b})"
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
# One combination must not reach the LLVM of Triton 3.6: `minimum(x / y, minimum(x, y))`. Where two operands of a minimum are instructions
# with equal operands, it asks of which kind of extreme they are, also of the division with exact rounding, which is none, and ends its
# process. LLVM finds more operands equal than are one value here, so the extreme of a quotient and another computed number is chosen by
# a comparison. (A bound of `clamp` is a constant.)

# %%
CHOSEN_BY = {"minimum": "<", "maximum": ">"}


def may_end_llvm(value: Value) -> bool:
    """Whether an extreme has a quotient and no constant to choose from."""
    ops = {a.op for a in value.args}
    return value.dtype is torch.float32 and not ops.isdisjoint(("truediv", "reciprocal")) and "constant" not in ops


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
