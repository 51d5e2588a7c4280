# %% [markdown]
# # From a kernel to Triton source
#
# Fusion decided which loops share a launch. What is left is to write the program that one block of the GPU
# runs. Three steps:
#
# 1. *Flatten*: the bodies of all loops become one list of instructions. Where a loop loads what an earlier
#    one stored, the load disappears and the value is used; this is the moment when fusion pays. Equal loads
#    are shared.
# 2. *Plan*: choose the axes and block sizes, and for reductions whether a row is held in registers or
#    walked along several times.
# 3. *Print*: one line per instruction, with the user's source line behind it.
#
# Inductor does the same with strings through a handler object (`V.ops`) and keeps the tile shape of a value
# in a class per variable. Here a value's shape is the set of axes that it depends on, known before anything
# is printed.

# %%
from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..ch01_graphs.symbolic import Expr, Int, Symbol, product, substitute, symbols, to_text
from ..ch07_loops.ir import Loop, Ref
from ..ch08_fusion.kernel import Kernel, KernelSource
from ..errors import Unsupported
from . import heuristics, reductions
from .ops import OPS, POINTER_TYPES, constant, convert, triton_type
from .prelude import prelude_for
from .tiling import Axis, Indexer, choose_axes, contiguous_var, divides, extent, fits_int32, hint, visits

# %% [markdown]
# ## Flattening
#
# A `Node` is an instruction whose `Ref`s point into the common list. Loads from a buffer that this kernel
# wrote must use the index of the store: the element is then in a register. Anything else would need the
# whole grid to wait, and is refused.

# %%
@dataclass
class Node:
    op: str
    args: tuple
    dtype: torch.dtype | None
    loop: Loop
    axes: frozenset = frozenset()           # names of the axes along which the value varies
    level: int = 0                          # the pass along the row in which it is first known
    per_row: bool = False                   # for stores: runs once per row, not once per element


@dataclass
class Flat:
    """All instructions of a kernel. `indirect`: symbols bound to values, with the node that binds each."""

    nodes: list[Node] = field(default_factory=list)
    seen: dict = field(default_factory=dict)
    written: dict = field(default_factory=dict)         # buffer -> [(index, Ref)]
    indirect: dict[Symbol, int] = field(default_factory=dict)

    def add(self, loop: Loop, op: str, args: tuple, dtype) -> Ref:
        key = (op, repr(args) if op == "constant" else args, dtype)     # 0.0 == -0.0, but they differ
        if op != "store" and key in self.seen:
            return self.seen[key]
        self.nodes.append(Node(op, args, dtype, loop))
        self.seen[key] = ref = Ref(len(self.nodes) - 1)
        return ref


def _forwarded(flat: Flat, loop: Loop, buffer: str, index: Int, mask, dtype) -> Ref:
    """The value that this kernel stored to `buffer[index]`, as a load would give it."""
    for at, ref in reversed(flat.written[buffer]):
        if at == index:
            break
    else:
        raise Unsupported(f"a fused kernel reads {buffer} at {index}, where it did not write it", loop.location)
    have = flat.nodes[ref.id].dtype
    if have != dtype and not (have.is_floating_point and dtype.is_floating_point):
        ref = flat.add(loop, "to_dtype", (ref,), dtype)
    if mask is not None:
        kind = flat.nodes[ref.id].dtype
        ref = flat.add(loop, "where", (mask, ref, flat.add(loop, "constant", (0,), kind)), kind)
    return ref


def flatten(kernel: Kernel) -> Flat:
    flat = Flat()
    for loop in kernel.loops:
        values: list[Ref] = []
        renamed: dict[Symbol, Int] = {}

        def argument(a):
            if type(a) is Ref:
                return values[a.id]
            return substitute(a, renamed) if renamed and isinstance(a, Expr) else a

        for op, args, dtype in loop.body:
            args = tuple(argument(a) for a in args)
            if op == "load":
                buffer, index, mask = args if len(args) == 3 else (*args, None)
                if buffer in flat.written:
                    ref = _forwarded(flat, loop, buffer, index, mask, dtype)
                else:
                    ref = flat.add(loop, "load", (buffer, index, mask), dtype)
            elif op == "store":
                buffer, index, value, mode, mask = (*args, None, None)[:5]
                if mode is None and mask is None:
                    flat.written.setdefault(buffer, []).append((index, value))
                if buffer in kernel.local:
                    ref = value
                else:
                    ref = flat.add(loop, "store", (buffer, index, value, mode, mask), dtype)
            elif op == "indirect":
                value, symbol, size = args
                ref = flat.seen.get(("indirect", value))
                if ref is None:
                    fresh = Symbol(f"at{len(flat.nodes)}", size)
                    ref = flat.seen[("indirect", value)] = flat.add(loop, "indirect", (value, fresh, size), None)
                    flat.indirect[fresh] = ref.id
                renamed[symbol] = flat.nodes[ref.id].args[1].expr
            else:
                ref = flat.add(loop, op, args, dtype)
            values.append(ref)
    _join_softmax(flat)
    return _live(flat)


def _join_softmax(flat: Flat) -> None:
    """Where a kernel has both max(x) and sum(exp(x - max(x))), compute the two in one pass along the row. The node
    of the maximum then has two results; as an operand it stands for the first."""
    at = lambda ref: flat.nodes[ref.id]
    for node in flat.nodes:
        if node.op == "reduce" and node.args[0] == "sum" and at(node.args[1]).op == "exp":
            difference = at(at(node.args[1]).args[0])
            if difference.op == "sub" and at(difference.args[1]).op == "reduce":
                top = at(difference.args[1])
                if top.args[:2] == ("max", difference.args[0]) and top.dtype == node.dtype and \
                        node.dtype.is_floating_point:
                    top.args = ("softmax", difference.args[0], None)
                if top.args[:2] == ("softmax", difference.args[0]):
                    node.op, node.args = "get", (difference.args[1], 1)


def _live(flat: Flat) -> Flat:
    """Drop instructions that no store needs."""
    needed: set[int] = set()
    stack = [i for i, n in enumerate(flat.nodes) if n.op == "store"]
    while stack:
        i = stack.pop()
        if i not in needed:
            needed.add(i)
            stack.extend(operands(flat, flat.nodes[i]))
    if len(needed) == len(flat.nodes):
        return flat
    place = {old: new for new, old in enumerate(sorted(needed))}
    move = lambda a: Ref(place[a.id]) if type(a) is Ref else a
    nodes = [flat.nodes[i] for i in sorted(needed)]
    for n in nodes:
        n.args = tuple(move(a) for a in n.args)
    return Flat(nodes, indirect={s: place[i] for s, i in flat.indirect.items() if i in needed})


def operands(flat: Flat, node: Node) -> list[int]:
    """The nodes whose values an instruction uses, in arguments or through symbols in an index."""
    found = []
    for a in node.args:
        if type(a) is Ref:
            found.append(a.id)
        elif isinstance(a, Expr):
            found.extend(flat.indirect[s] for s in symbols(a) if s in flat.indirect)
    return found

# %% [markdown]
# ## Shapes and levels
#
# Forward through the list: which axes a value varies along, and in which pass along the row it is first
# known. Pass 0 is the first walk; what depends on the result of a reduction of pass 0 belongs to level 1,
# and so on. LayerNorm has two levels: statistics, then the normalised row.

# %%
def annotate(flat: Flat, axes: list[Axis]) -> int:
    """Fill in `axes`, `level` and `per_row` of each node; returns the highest level."""
    axis_of = {v: a.name for a in axes for v in a.vars}
    everything = frozenset(a.name for a in axes)
    rows = everything - {"r"}
    highest = 0
    for node in flat.nodes:
        names = set()
        for a in node.args:
            if isinstance(a, Expr):
                names |= {axis_of[s] for s in symbols(a) if s in axis_of}
        used = [flat.nodes[i] for i in operands(flat, node)]
        for u in used:
            names |= u.axes
        node.level = max((u.level for u in used), default=0)
        if node.op == "reduce":
            names = rows
            node.level += 1
        elif node.op == "store":
            reduces = any(i.op == "reduce" for i in node.loop.body)
            over_row = "r" in names or (not reduces and any(axis_of.get(v) == "r" for v in node.loop.vars))
            node.per_row = not over_row
            names = everything if over_row else rows
        node.axes = frozenset(names)
        highest = max(highest, node.level)
    return highest

# %% [markdown]
# Positions are int64 in the IR, as index tensors are in PyTorch. A comparison of positions (is this element inside the
# window?) does not need the upper half. Values that are only compared, clamped or used as an index become int32, where
# the kernel's indices are; anything that could overflow or be seen from outside stays as it is.

# %%
_COMPARE = {"eq", "ne", "lt", "le", "gt", "ge"}
_CHOOSE = {"minimum", "maximum", "where"}


def narrow_positions(flat: Flat) -> None:
    """Retype int64 values that hold only positions to int32."""
    nodes = flat.nodes
    narrow: set[int] = set()
    for i, n in enumerate(nodes):
        small = n.op == "constant" and n.dtype == torch.int64 and abs(int(n.args[0])) < 2**31 - 1
        values = [a.id for a in n.args if type(a) is Ref][1 if n.op == "where" else 0:]
        if small or n.op == "index" and n.dtype == torch.int64 or n.op in _CHOOSE and n.dtype == torch.int64 and all(v in narrow for v in values):
            narrow.add(i)
    while True:
        wide = set()
        for i, n in enumerate(nodes):
            values = [a.id for a in n.args if type(a) is Ref]
            together = n.op in _COMPARE or n.op in _CHOOSE and i in narrow
            if not (n.op in ("indirect", "to_dtype") or together and all(
                    v in narrow or nodes[v].dtype != torch.int64 for v in values)):
                wide.update(v for v in values if v in narrow)
        if not wide:
            break
        narrow -= wide
        narrow = {i for i in narrow if nodes[i].op not in _CHOOSE or all(
            a.id in narrow or nodes[a.id].dtype != torch.int64 for a in nodes[i].args if type(a) is Ref)}
    for i in narrow:
        nodes[i].dtype = torch.int32

# %% [markdown]
# ## Planning
#
# What the heuristics want to know: how large the axes are, how many full-size operands there are, and
# whether rows or columns are contiguous.

# %%
def _accesses(flat: Flat) -> list[Int]:
    return [n.args[1] for n in flat.nodes if n.op in ("load", "store")]


def plan(kernel: Kernel, flat: Flat, axes: list[Axis], passes: int) -> heuristics.Config:
    vars = kernel.vars + kernel.reduction_vars
    total = hint(product(v.size for v in vars))
    heavy = [i for i in _accesses(flat) if visits(i, vars) * 2 > total]
    sizes = {a.name: hint(a.numel) for a in axes}
    if not kernel.reduction_vars:
        if len(axes) == 2:
            return heuristics.tiled(sizes["y"], sizes["x"], len(heavy))
        return heuristics.pointwise(sizes["x"], len(heavy))
    runs = [contiguous_var(i, vars) for i in heavy]
    inner = not any(v in kernel.vars for v in runs if v is not None)      # one strided access is too many
    known = all(isinstance(v.size, int) for v in kernel.reduction_vars)
    if not known:
        return heuristics.unknown_row(inner)
    return heuristics.reduction(sizes["x"], sizes["r"], inner, passes, len(heavy))

# %% [markdown]
# ## Printing
#
# `Printer` is the state of the text being written: where lines go, what each node is called, and which
# masks exist. The functions below it print one instruction each.

# %%
@dataclass
class Printer:
    kernel: Kernel
    flat: Flat
    axes: list[Axis]
    config: heuristics.Config
    indexer: Indexer
    masks: dict[str, str]                                # axis -> mask name, where one is needed
    lines: list[tuple[str, str]] = field(default_factory=list)      # (statement, comment)
    names: dict[int, str] = field(default_factory=dict)
    policy: dict[int, str] = field(default_factory=dict)             # load -> eviction policy in this pass
    parameters: dict[str, str] = field(default_factory=dict)

    def say(self, statement: str, node: Node | None = None):
        self.lines.append((statement, comment(node.loop) if node is not None else ""))

    def shape(self, names) -> str:
        """The text of the shape of a tile that varies along `names`."""
        return "[" + ", ".join(a.block if a.name in names else "1" for a in self.axes) + "]"

    def mask(self, names, extra: str | None = None) -> str | None:
        parts = [self.masks[n] for n in sorted(names) if n in self.masks] + ([extra] if extra else [])
        return " & ".join(parts) if parts else None


_comments: dict = {}


def comment(loop: Loop) -> str:
    """`model.py:12 return x.exp()`, or nothing."""
    where = loop.location
    if where is None:
        return ""
    if where not in _comments:
        file = where.filename.rpartition("/")[2]
        _comments[where] = f"{file}:{where.lineno} {where.source[:60]}".strip().replace("\n", " ")
    return _comments[where]


LITERALS_FIT = {"add", "sub", "mul", "truediv"} | _COMPARE | _CHOOSE


def value_text(p: Printer, ref: Ref, literal: bool = False) -> str:
    """The text of an operand: a variable, or a constant (a bare number only if `literal`)."""
    node = p.flat.nodes[ref.id]
    if node.op != "constant":
        name = p.names[ref.id]
        return name[0] if isinstance(name, list) else name
    text = constant(node.args[0], node.dtype, len(p.axes))
    if not literal and not text.startswith("tl.full"):
        return f"tl.full([{', '.join('1' * len(p.axes))}], {text}, tl.float32)"
    return text


def index_text(p: Printer, index: Int, index_axes: frozenset, want: frozenset) -> str:
    """An offset as text, spread over the axes `want` if it does not vary along all of them."""
    text = p.indexer.text(index)
    if index_axes == want:
        return text
    if isinstance(index, int) or not index_axes:
        return f"tl.full({p.shape(want)}, {text}, {p.indexer.index_type})"
    return f"tl.broadcast_to({text}, {p.shape(want)})"


def axes_of_index(p: Printer, index: Int) -> frozenset:
    axis_of = {v: a.name for a in p.axes for v in a.vars}
    found: set[str] = set()
    for s in symbols(index):
        if s in axis_of:
            found.add(axis_of[s])
        elif s in p.flat.indirect:
            found |= p.flat.nodes[p.flat.indirect[s]].axes
    return frozenset(found)

# %% [markdown]
# Loads are masked along the axes that they vary along; a condition from the program joins in, with 0 for
# what it hides.

# %%
def print_load(p: Printer, i: int, node: Node):
    buffer, index, condition = node.args
    at = axes_of_index(p, index)
    extra = value_text(p, condition) if condition is not None else None
    offset = index_text(p, index, at, node.axes) if extra is None or at == node.axes and at else \
        f"tl.broadcast_to({p.indexer.text(index)}, {p.shape(node.axes)})" if at else \
        f"tl.full({p.shape(node.axes)}, {p.indexer.text(index)}, {p.indexer.index_type})"
    mask = p.mask(node.axes, extra)
    tail = f", {mask}" if mask else ""
    if extra:
        tail += ", other=0"
    if i in p.policy:
        tail += f', eviction_policy="{p.policy[i]}"'
    p.names[i] = f"tmp{i}"
    p.say(f"tmp{i} = tl.load({p.parameters[buffer]} + ({offset}){tail})", node)


def print_store(p: Printer, i: int, node: Node):
    buffer, index, value, mode, condition = node.args
    at = axes_of_index(p, index)
    offset = index_text(p, index, at, node.axes)
    target = p.kernel.buffers[buffer].dtype
    have = p.flat.nodes[value.id].dtype
    text = value_text(p, value)
    if have != target:
        text = convert(f"({text})" if " " in text else text, have, target)
    mask = p.mask(node.axes, value_text(p, condition) if condition is not None else None)
    tail = f", {mask}" if mask else ""
    pointer = f"{p.parameters[buffer]} + ({offset})"
    if p.flat.nodes[value.id].axes != node.axes:
        text = f"tl.broadcast_to({text}, {p.shape(node.axes)})"
    if mode is None:
        p.say(f"tl.store({pointer}, {text}{tail})", node)
        return
    if target in (torch.bool, torch.int8, torch.uint8, torch.int16):
        raise Unsupported(f"no atomic addition to {target} on this GPU", node.loop.location)
    tail = f", mask={mask}" if mask else ""
    p.say(f'tl.atomic_add({pointer}, {text}{tail}, sem="relaxed")', node)

# %% [markdown]
# Everything else is a value. `index` turns an expression into one; `indirect` does the opposite, and gives
# a value a name that later offsets use.

# %%
def print_value(p: Printer, i: int, node: Node):
    op, args = node.op, node.args
    name = p.names[i] = f"tmp{i}"
    if op == "constant":
        return
    if op == "index":
        text = p.indexer.text(args[0])
        kind = triton_type(node.dtype)
        text = f"({text}).to({kind})" if node.axes else f"tl.full({p.shape(())}, {text}, {kind})"
    elif op == "indirect":
        p.indexer.names[args[1]] = name
        text = f"{value_text(p, args[0])}.to({p.indexer.index_type})"
    elif op == "get":
        p.names[i] = p.names[args[0].id][args[1]]
        return
    elif op in ("to_dtype", "round_to", "bitcast"):
        have, x = p.flat.nodes[args[0].id].dtype, value_text(p, args[0])
        if op == "to_dtype":
            text = convert(x, have, node.dtype)
        elif op == "round_to":
            text = f"{x}.to({triton_type(args[1])}).to({triton_type(node.dtype)})"
        else:
            text = f"{x}.to({triton_type(node.dtype)}, bitcast=True)"
    elif op == "philox":
        seed, offset, index, kind = args
        vec, threads = philox_layout(kind, p.kernel.device)
        where = p.indexer.text(index) if not isinstance(index, Ref) else value_text(p, index)
        start = f"{value_text(p, seed)}, {value_text(p, offset)}"
        text = f"philox_uniform({start}, ({where}).to(tl.int64), {vec}, {threads})"
    elif op in OPS:
        refs = [a for a in args if type(a) is Ref]
        literal = op in LITERALS_FIT and any(p.flat.nodes[a.id].op != "constant" for a in refs)
        if len(refs) != len(args):
            raise Unsupported(f"operation {op} with arguments {args}", node.loop.location)
        text = OPS[op](p.flat.nodes[refs[-1].id].dtype, *[value_text(p, a, literal) for a in refs])
    else:
        raise Unsupported(f"the Triton backend has no operation {op!r}", node.loop.location)
    if text.isidentifier():
        p.names[i] = text
    else:
        p.say(f"{name} = {text}", node)


def philox_layout(kind, device) -> tuple[int, int]:
    """(VEC, THREADS) of a random stream: `kind` is that pair."""
    if not isinstance(kind, tuple):
        raise Unsupported(f"random numbers in the layout {kind!r}")
    return kind


def describe_reduction(p: Printer, i: int, node: Node, rmask: str | None) -> reductions.Reduction:
    kind, value, index = node.args if len(node.args) == 3 else (*node.args, None)
    source = p.flat.nodes[value.id].dtype
    return reductions.Reduction(
        kind, f"red{i}", value_text(p, value), source, node.dtype or source, p.shape({"x", "r"}), rmask,
        p.indexer.text(index) if index is not None else None, p.indexer.index_type, to_text(p.axes[-1].numel),
        full=p.flat.nodes[value.id].axes == {"x", "r"})


def print_node(p: Printer, i: int):
    node = p.flat.nodes[i]
    if node.op == "load":
        print_load(p, i, node)
    elif node.op == "store":
        print_store(p, i, node)
    elif node.op == "reduce":
        statements, results = reductions.persistent(describe_reduction(p, i, node, p.masks.get("r")))
        for s in statements:
            p.say(s, node)
        p.names[i] = results[0] if len(results) == 1 else results
    else:
        print_value(p, i, node)

# %% [markdown]
# ## Looped reductions
#
# The list is printed in passes. A pass walks along the row and contains what its reductions and stores
# need, recomputed from loads if an earlier pass had it: a value of the row is in no register once the loop
# has moved on. Loads that a later pass repeats ask the cache to keep the line (`evict_last`), the last ones
# to let it go.
#
# One point of care: a buffer updated in place must not be stored before the last pass that loads it.

# %%
def schedule_passes(kernel: Kernel, flat: Flat, highest: int) -> list[tuple[list[int], list[int]]]:
    """For each pass: the nodes printed before its loop (per row), and those inside it."""
    root = lambda name: kernel.buffers[name].alias_of or name
    level_of = {i: n.level for i, n in enumerate(flat.nodes) if n.op == "store"}
    while True:
        inside = []
        for level in range(highest + 1):
            wanted = [i for i, n in enumerate(flat.nodes) if
                      (n.op == "reduce" and n.level == level + 1) or
                      (n.op == "store" and not n.per_row and level_of[i] == level)]
            needed: set[int] = set()
            while wanted:
                i = wanted.pop()
                if i in needed:
                    continue
                needed.add(i)
                node = flat.nodes[i]
                for j in operands(flat, node):
                    other = flat.nodes[j]
                    if "r" in other.axes and other.op != "store":
                        wanted.append(j)
            inside.append(sorted(needed))
        last_load: dict[str, int] = {}
        for level, ids in enumerate(inside):
            for i in ids:
                if flat.nodes[i].op == "load":
                    last_load[root(flat.nodes[i].args[0])] = level
        late = {i: last_load[root(flat.nodes[i].args[0])] + flat.nodes[i].per_row for i, level in level_of.items()
                if last_load.get(root(flat.nodes[i].args[0]), -1) + flat.nodes[i].per_row > level}
        late = {i: min(level, highest) if not flat.nodes[i].per_row else level for i, level in late.items()}
        if all(level_of[i] == level for i, level in late.items()):
            break
        level_of.update(late)
    before = [[i for i, n in enumerate(flat.nodes) if "r" not in n.axes and level_of.get(i, n.level) == level]
              for level in range(highest + 2)]
    return list(zip(before, inside + [[]]))


def print_passes(p: Printer, highest: int) -> None:
    rnumel = to_text(p.axes[-1].numel)
    passes = schedule_passes(p.kernel, p.flat, highest)
    for level, (before, inside) in enumerate(passes):
        for i in before:
            if p.flat.nodes[i].op != "reduce":
                print_node(p, i)
        if not inside:
            continue
        outer, p.lines = p.lines, []
        later = {i for _, ids in passes[level + 1:] for i in ids}
        earlier = {i for _, ids in passes[:level] for i in ids}
        p.policy = {i: "evict_last" if i in later else "evict_first" for i in inside
                    if p.flat.nodes[i].op == "load" and (i in later or i in earlier)}
        p.indexer.defs.pop("r", None)
        ends: list[tuple[str, str]] = []
        for i in inside:
            node = p.flat.nodes[i]
            if node.op != "reduce":
                print_node(p, i)
                continue
            r = describe_reduction(p, i, node, p.masks.get("r"))
            start, update, end, results = reductions.looped(r, "roffset // RBLOCK")
            outer += [(s, "") for s in start]
            for s in update:
                p.say(s, node)
            ends += [(s, comment(node.loop)) for s in end]
            p.names[i] = results[0] if len(results) == 1 else results
        p.policy = {}
        body = [("rindex = roffset + rbase", "")]
        if "r" in p.masks:
            body.append((f"rmask = rindex < {rnumel}", ""))
        body += [(f"{n} = {text}", "") for n, text in p.indexer.defs.pop("r", {}).items()] + p.lines
        p.lines = outer + [(f"for roffset in range(0, {rnumel}, RBLOCK):", "")] + \
            [("    " + s, c) for s, c in body] + ends

# %% [markdown]
# ## The whole kernel

# %%
def _header(p: Printer, looped: bool) -> list[str]:
    """Statements that define the axes' indices and masks."""
    lines = []
    index_type = p.indexer.index_type
    names = [a.name for a in p.axes if a.name != "r"]
    cast = ".to(tl.int64)" if index_type == "tl.int64" else ""
    if names == ["y", "x"]:
        count = f"(({to_text(p.axes[1].numel)} + XBLOCK - 1) // XBLOCK)"
        lines += [f"xpid = tl.program_id(0) % {count}", f"ypid = tl.program_id(0) // {count}"]
    else:
        lines.append("xpid = tl.program_id(0)")
    for a in p.axes:
        numel = to_text(a.numel)
        if a.name == "r":
            lines.append(f"rbase = tl.arange(0, RBLOCK){a.slot}{cast}")
            if looped:
                continue
            lines.append("rindex = rbase")
        else:
            lines.append(f"{a.name}index = {a.name}pid{cast} * {a.block} + tl.arange(0, {a.block}){a.slot}")
        if a.name in p.masks:
            lines.append(f"{p.masks[a.name]} = {a.name}index < {numel}")
        lines += [f"{n} = {text}" for n, text in p.indexer.defs.get(a.name, {}).items()]
    return lines


def emit_triton(kernel: Kernel, config: heuristics.Config | None = None) -> KernelSource:
    """Triton source for `kernel`. `options`: `signature` (argument -> Triton type), `constants` (block sizes),
    `grid` (three Python expressions over the size symbols), `num_warps`, `num_stages`. Raises Unsupported."""
    flat = flatten(kernel)
    axes = choose_axes(kernel.vars, kernel.reduction_vars, _accesses(flat))
    highest = annotate(flat, axes)
    walks = 0
    if kernel.reduction_vars:
        walks = sum(bool(inside) for _, inside in schedule_passes(kernel, flat, highest))
    config = config or plan(kernel, flat, axes, walks)
    sizes = [extent(b.layout) for n, b in kernel.buffers.items() if n not in kernel.local]
    index_type = "tl.int32" if fits_int32([*sizes, product(a.numel for a in axes)]) else "tl.int64"
    if index_type == "tl.int32":
        narrow_positions(flat)
    masks = {a.name: f"{a.name}mask" for a in axes if not divides(config.blocks[a.name], a.numel)}
    arguments = tuple(dict.fromkeys(kernel.inputs + kernel.outputs))
    parameters = {b: b if b.isidentifier() else f"buffer{k}" for k, b in enumerate(arguments)}
    p = Printer(kernel, flat, axes, config, Indexer(axes, index_type), masks, parameters=parameters)
    looped = bool(kernel.reduction_vars) and not config.persistent
    if looped:
        print_passes(p, highest)
    else:
        for i in range(len(flat.nodes)):
            print_node(p, i)
    signature = {parameters[b]: pointer_type(kernel.buffers[b].dtype) for b in arguments}
    signature |= {s.name: "i64" if index_type == "tl.int64" else "i32" for s in kernel.symbols}
    constants = {a.block: config.blocks[a.name] for a in axes}
    head = f"def {kernel.name}({', '.join([*signature, *(f'{c}: tl.constexpr' for c in constants)])}):"
    body = [("    " + line, "") for line in _header(p, looped)] + [("    " + s, c) for s, c in p.lines]
    text = "\n".join([head, *(f"{s}  # {c}" if c else s for s, c in body)]) + "\n"
    code = ("import triton\nimport triton.language as tl\nfrom triton.language.extra import libdevice\n\n\n"
            + prelude_for(text) + "@triton.jit\n" + text)
    grid = " * ".join(f"(({to_text(a.numel)} + {config.blocks[a.name] - 1}) // {config.blocks[a.name]})"
                      for a in axes if a.name != "r")
    names = arguments + tuple(s.name for s in kernel.symbols)
    return KernelSource(kernel.name, "triton", code, names, dict(
        signature=signature, constants=constants, grid=(grid, "1", "1"), num_warps=config.num_warps,
        num_stages=config.num_stages, device=kernel.device.index))


def pointer_type(dtype: torch.dtype) -> str:
    if dtype not in POINTER_TYPES:
        raise Unsupported(f"Triton has no type for {dtype}")
    return POINTER_TYPES[dtype]
