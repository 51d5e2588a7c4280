# %% [markdown]
# # Lists of equal loops
#
# An optimizer does the same to each of its parameters: one kernel of twenty operations, 148 times, over tensors of
# other sizes. They share no memory, so fusion has no reason to join them, and each is so short that a launch
# costs more than its work. `_foreach_add_` on a list of tensors is the same, and so are the casts of all weights to
# bfloat16, or the norms of all gradients before they are clipped.
#
# Such kernels become one launch, with a table. A row of the table says where a *piece* finds its tensors and how large they are,
# and each block of the launch looks up the piece that it belongs to:
#
# | piece | tensors | n0 | first block |
# |---|---|---|---|
# | 0 | p0, g0, m0, v0 | 65,536 | 0 |
# | 1 | p1, g1, m1, v1 | 128 | 16 |
# | 2 | p2, g2, m2, v2 | 49,152 | 17 |
#
# Only the table grows with the list. The code of all pieces is one *body*, emitted and compiled once: a kernel whose sizes are
# symbols, like one for dynamic shapes. So a list is also what makes 148 parameters cheap to compile: without it, each size
# is another kernel. torch.compile does the same for `_foreach` operators ("combo kernels", with all pointers as
# arguments and a chain of ifs in place of a table). Here it is a property of kernels, wherever they come from.

# %%
from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any, Iterable

from ..ch01_graphs.symbolic import Expr, Int, Symbol, add, bounds, coefficient, mul, substitute, symbols
from ..ch07_loops.ir import Extern, Layout, Program, with_places
from .canonical import canonical, canonical_names, code_key
from .dependencies import dependency_edges, nbytes
from .kernel import Kernel, KernelList, Piece
from .memory import lifetimes

FEWEST = 4                   # pieces that make a list: below, a table costs as much as it saves
LITTLE = 1 << 20             # bytes: a piece that moves fewer is over before the next launch

# %% [markdown]
# ## Equal up to sizes
#
# Two kernels are pieces of one list if they differ in buffers and numbers only: sizes of loops, strides and
# offsets. `Shape` takes the numbers out. An index `512*i0 + i1` of a
# nest of 8 by 512 becomes `n1*i0 + i1` of a nest of `n0` by `n1`; equal numbers are one parameter, so what was contiguous stays
# visibly so. 0 and 1 are not numbers in this sense: a stride of 1 is what makes a loop fast.

# %%
class NoPiece(Exception):
    """A kernel that has no place in a list."""


class Shape:
    """The numbers of one kernel, in the order in which they occur."""

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.variables = kernel.vars + kernel.reduction_vars
        self.numbers: dict[int, int] = {}
        self.patterns: dict[Int, tuple] = {}

    def number(self, e: Int) -> Any:
        """What stands for a number in a key: itself if it is 0 or 1, else which parameter it is."""
        if e in (0, 1) or is_real(e):
            return e
        if not isinstance(e, int):
            raise NoPiece
        return "n", self.numbers.setdefault(e, len(self.numbers))

    def pattern(self, e: Int | None) -> tuple:
        """An index: what stands for its offset and for the factor of each variable."""
        if e not in self.patterns:
            factors = [coefficient(e, v) for v in self.variables]
            if None in factors:
                raise NoPiece
            rest = substitute(e, {v: 0 for v in self.variables})
            self.patterns[e] = tuple(self.number(n) for n in (rest, *factors))
        return self.patterns[e]


def is_real(e: Int) -> bool:
    return isinstance(e, Expr) and any(s.real for s in symbols(e))


def shape_key(kernel: Kernel) -> tuple[tuple, Shape] | None:
    """The key of the list that a kernel may belong to, and its numbers; None for kernels that scatter, gather, mask,
    draw random numbers or sum columns on their way, that read numbers of another device, and where sizes vary from call
    to call."""
    values = [v for loop in kernel.loops for v in loop.body]
    if any(kernel.buffers[n].device != kernel.device for n in kernel.inputs):
        return None
    if kernel.walked or any(v.op in ("philox", "indirect") or v.op in ("load", "store") and v.mask is not None or
                            v.op == "store" and v.mode is not None or v.op == "index" and not is_real(v.args[0]) or
                            v.op == "reduce" and v.args[2] is not None for v in values):
        return None
    shape = Shape(kernel)
    try:
        return code_key(kernel, canonical_names(kernel), shape.pattern), shape
    except NoPiece:
        return None

# %% [markdown]
# ## The body of a list
#
# `body_for` writes the kernel that all pieces run: the first of them, in canonical form, with a parameter wherever their
# numbers differ. A number that they share stays what it is, so a list of equal layers loses nothing.
#
# Let three pieces be the update of a weight of 512 by 128, one of 64 by 128, and one of 32 by 128, each in the nest
# of its rows and columns with the index `128*i0 + i1`. Their numbers, in order of appearance, are (512, 128), (64,
# 128) and (32, 128). The second column is the same for all and is written into the code. The first one varies, so
# it becomes the symbol `n0`, and the body is the loop over `i0 < n0`, `i1 < 128`. A compiler of C++ or Triton sees
# that the inner loop is contiguous and how long it is, which it could not if all numbers were parameters. That a
# place of the body is a parameter is decided by looking at the first piece: where its number stands, `n0` is put.
# This is why two places with the same number are one number of a `Shape` only if they agree in every piece, which
# the key has made sure of.
#
# `make_list` collects the pieces. For each it notes the body, the memory of its buffers, and the values of the
# parameters: a row of the table above. Two names for one memory (`x`, and `x` updated) are one entry, since a
# kernel gets pointers to memory. So are the parts of a buffer that pieces write, whose name no piece mentions: the list knows it, too.

# %%
def body_for(shapes: list[Shape]) -> tuple[Kernel, list[int]]:
    """The common kernel, and which of the numbers of a shape are its parameters: symbols `n0`, `n1`, ... of the kernel."""
    columns = list(zip(*(s.numbers for s in shapes)))
    vary = [k for k, column in enumerate(columns) if any(n != column[0] for n in column)]
    names: dict[int, Expr] = {}
    for n, k in enumerate(vary):
        most = max(columns[k])
        names[columns[k][0]] = Symbol(f"n{n}", most + 1, min(columns[k]), hint=most).expr
    first, kernel = shapes[0], canonical(shapes[0].kernel, canonical_names(shapes[0].kernel))
    variables = {v: Symbol(v.name, names.get(v.size, v.size)) for v in first.variables}

    def index(e: Int) -> Int:
        value = names.get(rest, rest) if (rest := substitute(e, {v: 0 for v in first.variables})) else 0
        for v in first.variables:
            factor = coefficient(e, v)
            value = add(value, mul(names.get(factor, factor), variables[v].expr))
        return value

    def rewritten(loop):
        stores = with_places(loop.stores, lambda name, at: (name, index(at)))
        return replace(loop, vars=tuple(variables[v] for v in loop.vars), stores=stores,
                       reduction_vars=tuple(variables[v] for v in loop.reduction_vars))

    parameters = tuple(next(iter(symbols(e))) for e in names.values())
    buffers = {n: replace(b, layout=Layout((), ())) for n, b in kernel.buffers.items()}
    body = replace(kernel, vars=tuple(variables[v] for v in kernel.vars), buffers=buffers, loops=list(map(rewritten, kernel.loops)),
                   reduction_vars=tuple(variables[v] for v in kernel.reduction_vars),
                   symbols=parameters + kernel.symbols)
    return body, vary


def make_list(groups: list[list[Shape]], program: Program, number: int) -> KernelList:
    """One kernel for all pieces; each group has a body."""
    kernels = [s.kernel for group in groups for s in group]
    inputs, outputs, notes, origins, known = (
        tuple(dict.fromkeys(n for k in kernels for n in getattr(k, field)))
        for field in ("inputs", "outputs", "notes", "origins", "symbols"))
    roots = {n: program.roots[n] for n in (*inputs, *outputs)}
    memory = {root: i for i, root in enumerate(dict.fromkeys(roots.values()))}
    bodies, pieces = [], []
    for b, group in enumerate(groups):
        body, vary = body_for(group)
        bodies.append(replace(body, name=f"{group[0].kernel.name}_{b}"))
        for s in group:
            values = tuple(s.numbers)
            pieces.append(Piece(s.kernel, b, tuple(memory[roots[n]] for n in s.kernel.tensors), tuple(values[k] for k in vary)))
    first = kernels[0]
    name = f"{first.name.rpartition('_')[0]}_list_{number}"
    return KernelList(
        name, first.device, (), (), [l for k in kernels for l in k.loops], frozenset().union(*(k.local for k in kernels)),
        {n: b for k in kernels for n, b in k.buffers.items()} | {root: program.buffers[root] for root in memory}, inputs, outputs, known,
        origins, [f"a list of {len(kernels)} loops of {len(groups)} kinds", *notes], roots=roots, bodies=bodies, pieces=pieces)

# %% [markdown]
# ## Which kernels, in which order
#
# Pieces run side by side, so none may need another, and joining them must not close a circle through what stands between
# them. Both follow from one count. Let the *level* of a step be the largest number of members of a class on a way that leads to it.
# A member that needs another one has a larger level. So members of equal level are independent; and each step's level
# is at least that of what it needs, so lists of one level after the other are an order. Classes are treated in turn, each on what the
# last one left, in the order of levels: `before` has its steps in an order in which they could run, from the first class to the last.

# %%
def levels(before: dict[int, set[int]], members: set[int]) -> dict[int, int]:
    """For each step, how many members are on the longest way that ends with it. before: what each step needs, in an order of steps."""
    level: dict[int, int] = {}
    for i, needed in before.items():
        level[i] = max([level[j] for j in needed], default=0) + (i in members)
    return level


def reorder(before: dict[int, set[int]], level: dict[int, int], members: set[int]) -> None:
    """Put the steps in order of their levels: members of one level side by side, before all else that has this level."""
    for i in sorted(before, key=lambda i: (level[i], i not in members)):
        before[i] = before.pop(i)


def contract(before: dict[int, set[int]], group: list[int]) -> None:
    """Make the steps of a group one step, named after the first."""
    first, gone = group[0], set(group[1:])
    for i in gone:
        before[first] |= before.pop(i)
    before[first] -= {first} | gone
    for needed in before.values():
        if not gone.isdisjoint(needed):
            needed -= gone
            needed.add(first)


def grouped(before: dict[int, set[int]], classes: Iterable[list[int]], fewest: int, room: Room) -> list[list[int]]:
    """The groups of at least `fewest` independent members of a class for which there is room; `before` is contracted to them."""
    found = []
    for members in classes:
        by_level: dict[int, list[int]] = {}
        if len(members) >= fewest:
            level = levels(before, set(members))
            reorder(before, level, set(members))
            for i in sorted(members):
                by_level.setdefault(level[i], []).append(i)
        for group in by_level.values():
            if len(group) >= fewest and len(group := room.taken(group)) >= fewest:
                contract(before, group)
                found.append(group)
    return found

# %% [markdown]
# A list runs when the last of its pieces can. Until then what its pieces read for the last time stays in memory, and what
# they write is not there yet. The sums over a batch that give the gradients of biases are such a list: each reads what
# backward is done with, and waiting for the last would keep everything to the end. An update waits at no cost, since
# all gradients are there when the norm of all of them is known. So each list is asked what it does to the bytes that are
# alive at each step. If the peak rises, only its short pieces are joined, which hold little and gain most, or none.
#
# `Room` has these bytes. A piece that writes as much as it frees writes over it (`memory.py`), which a list can do as well.

# %%
class Room:
    """The bytes alive at each step of `order`, and what they become with each list. `steps`: those of `order`, by name."""

    def __init__(self, program: Program, steps: dict[int, Kernel | Extern], order: list[Kernel | Extern]):
        times, b = lifetimes(program, order), program.buffers
        self.live = times.live
        self.limit = times.peak + LITTLE // 2
        freed, written = [0] * len(order), [0] * len(order)
        for bytes_at, roots in ((freed, times.death), (written, times.birth)):
            for root, k in roots.items():
                if root in times.birth or root in program.owned:
                    bytes_at[k] += nbytes(b[root])
        place = {id(step): k for k, step in enumerate(order)}
        self.waiting = {i: (place[id(step)], freed[place[id(step)]], written[place[id(step)]], 0) for i, step in steps.items()}
        self.short = {i for i, step in steps.items()
                      if isinstance(step, Kernel) and sum(nbytes(b[n]) for n in step.tensors) <= LITTLE}

    def taken(self, group: list[int]) -> list[int]:
        """The members of `group` that become one step: all of them, the short ones, or none."""
        for members in (group, [i for i in group if i in self.short]):
            if members and self.wait(members):
                return members
        return []

    def wait(self, members: list[int]) -> bool:
        """Let these wait for the last of them, if the peak allows it."""
        end = max(self.waiting[i][0] for i in members)
        change = [0] * (len(self.live) + 1)
        for k, freed, written, shared in (self.waiting[i] for i in members):
            for start, stop, size in ((k + 1, end + 1, freed), (k, end, -written), (k, k + 1, shared),
                                      (end, end + 1, -min(freed, written))):
                change[start] += size
                change[stop] -= size
        live = [now + more for now, more in zip(self.live, accumulate(change))]
        if max(live) > max(self.limit, max(self.live)):
            return False
        self.live = live
        freed, written = (sum(self.waiting[i][n] for i in members) for n in (1, 2))
        self.waiting[members[0]] = end, freed, written, sum(min(self.waiting[i][1:3]) for i in members)
        return True

# %% [markdown]
# The parts of one buffer, as in a `stack` of the norms of all gradients, are written one after the other as far as names tell: each is an
# update of the last. Here it is enough that they do not overlap. Only the first, who has the buffer allocated, stays
# the first; and who reads a part comes after all that its writer came after.

# %%
def without_order_of_parts(before: dict[int, set[int]], steps: dict[int, Kernel | Extern], roots: dict[str, str]) -> None:
    """Take from `before` what only orders the writes of kernels to different parts of one buffer."""
    kernels = {i: step for i, step in steps.items() if isinstance(step, Kernel)}
    reads = {i: {roots[n] for n in k.inputs} for i, k in kernels.items()}
    written: dict[int, dict[str, list]] = {i: {} for i in kernels}
    starts = {i: set(k.outputs) for i, k in kernels.items()}            # of these, names that are roots count
    for i, k in kernels.items():
        for store in (s for loop in k.loops for s in loop.stores if s.buffer in starts[i]):
            low, high = (None, None) if store.anywhere else bounds(store.index)
            written[i].setdefault(roots[store.buffer], []).append((low, high))

    def apart(i: int, j: int) -> bool:
        both = written[i].keys() & written[j].keys()
        return bool(both) and reads[i].isdisjoint(written[j]) and reads[j].isdisjoint(written[i]) and starts[j].isdisjoint(both) and all(
            None not in (*a, *b) and (a[1] < b[0] or b[1] < a[0]) for root in both for a in written[i][root] for b in written[j][root])

    dropped = {i: {j for j in before[i] if j in kernels and apart(i, j)} for i in kernels}
    for i in kernels:
        before[i] -= dropped[i]
    for i, needed in before.items():
        more = set().union(*(dropped.get(j, ()) for j in needed))
        needed |= more - dropped.get(i, set()) - {i}

# %% [markdown]
# On a CPU lists of different bodies become one launch as well: what counts there is the parallel region, which all threads enter
# and leave together, and a branch per block costs nothing. On a GPU a kernel takes the registers of its largest
# branch, so there each body is a launch of its own.
#
# Where one graph holds several backward passes, pieces of one list belong to one of them (its `turn`), and what is computed again
# late, so that it need not be kept, is in no list.

# %%
def make_lists(program: Program, steps: dict[int, Kernel | Extern], order: list[Kernel | Extern],
               mixed: bool) -> tuple[dict[int, Kernel | Extern], dict[int, set[int]]] | None:
    """The same steps with lists in the place of equal kernels, each at the position of its first piece, and what each needs; None
    if there are no lists. order: the steps as they would run without. mixed: join lists of different bodies on a CPU."""
    shapes: dict[int, Shape] = {}
    classes: dict[tuple, list[int]] = {}
    for i, step in steps.items():
        if isinstance(step, Kernel):
            turns = {loop.turn for loop in step.loops}
            if not any(turn % 2 for turn in turns) and (found := shape_key(step)) is not None:
                classes.setdefault((found[0], max(turns, default=0)), []).append(i)
                shapes[i] = found[1]
    if all(len(members) < FEWEST for members in classes.values()):
        return None
    names = {id(step): i for i, step in steps.items()}
    in_order = {names[id(step)]: step for step in order}
    before = dependency_edges(in_order, program.buffers)
    without_order_of_parts(before, steps, program.roots)
    room = Room(program, steps, order)
    lists = {group[0]: [group] for group in grouped(before, classes.values(), FEWEST, room)}
    for together in grouped(before, [[i for i in lists if mixed and steps[i].device.type == "cpu"]], 2, room):
        lists[together[0]] = [group for i in together for group in lists.pop(i)]
    result = {i: step for i, step in steps.items() if i in before}
    for i, groups in lists.items():
        result[i] = make_list([[shapes[k] for k in group] for group in groups], program, i)
    return (result, before) if lists else None
