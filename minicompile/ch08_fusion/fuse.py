# %% [markdown]
# # Fusion
#
# On a modern device, arithmetic is nearly free and memory is not: an H100 does some 300 float32 operations
# in the time it moves one float. A chain of ten pointwise operators run one by one reads and writes
# everything ten times; as one kernel it reads once and writes once. That is most of what a compiler gains
# on models whose matrix products are already optimal.
#
# This module decides which loops become one kernel. It is greedy: among all pairs of groups that share
# memory, fuse the pair that saves the most bytes, then look again. Greedy is not optimal; finding the best
# partition is NP-hard, and the graphs are good-natured. torch.compile's scheduler works the same way, with
# more heuristics.
#
# Every pair that was looked at leaves a `Decision` with its reason, so "why were these not fused?" has an
# answer.

# %%
from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..ch01_graphs.symbolic import Int, Symbol, add, coefficient, mul, present, symbols
from ..ch07_loops.ir import Extern, Loop, Program, View, written_by
from .alignment import align_across, find_alignment, numel, same_reads, scattered_stores
from .build import build_kernel
from .dependencies import dependency_edges, nbytes, remove_dead, root_of
from .iteration import Alignment, Space, apply, strided
from .kernel import Kernel
from .lists import LITTLE, make_lists
from .memory import MemoryPlan, estimate_peak, order_for_memory, plan_memory


class Decision(NamedTuple):
    """What became of one candidate pair. `a`, `b`: names of the loops, joined by + where already fused."""

    a: str
    b: str
    accepted: bool
    score: int
    reason: str


@dataclass
class FusionOptions:
    """Limits of one kernel: more arguments or instructions cost registers and compile time."""

    enabled: bool = True
    max_buffers: int = 48
    max_instructions: int = 900
    max_loops: int = 64
    max_distance: int = 100
    reuse_memory: bool = True
    lists: bool = True
    mixed_lists: bool = True                         # on a CPU, of different bodies
    columns_with_rows: bool | None = None            # see `align_across`; None: on GPUs


@dataclass
class Schedule:
    """The program as launches in order, with its allocation plan and the reasons for its shape."""

    program: Program
    steps: list[Kernel | Extern]
    plan: MemoryPlan
    decisions: list[Decision] = field(default_factory=list)

# %% [markdown]
# ## Groups
#
# A `Group` is a kernel in the making: members, the common nest, and its memory accesses rewritten to that
# nest. Bodies stay as they are until the end; each member only keeps the substitution that leads from its
# own variables to the nest, because a loop may be re-aligned several times on the way. Library calls are
# groups that never fuse.

# %%
@dataclass
class Group:
    members: list[int]
    space: Space | None                              # None for a library call
    device: torch.device | None = None
    mapping: dict[int, dict[Symbol, Int]] = field(default_factory=dict)
    reads: dict[str, set[Int]] = field(default_factory=dict)
    writes: dict[str, Int] = field(default_factory=dict)
    guarded: set[str] = field(default_factory=set)   # read under a mask or at a loaded index: needs memory
    scattered: set[str] = field(default_factory=set)  # written at a loaded index, atomically, or under a mask
    wide_reads: set[str] = field(default_factory=set)  # read by loops that cover the reduction dimensions
    walked: tuple[Symbol, ...] = ()                  # last output variables, which some members sum over
    instructions: int = 0
    turns: frozenset[int] = frozenset()
    notes: list[str] = field(default_factory=list)   # why the members are together
    successors: set[int] = field(default_factory=set)
    ancestors: int = 0                               # bit i: group i must run before

    @property
    def reduces(self) -> bool:
        return bool(self.space and self.space.rvars)


def make_group(i: int, node: Loop | Extern, buffers) -> Group:
    """The group of one node, with its variables renamed to i0, i1, ... and r0, r1, ..."""
    if isinstance(node, Extern):
        return Group([i], None)
    names = {v: Symbol(f"i{k}", v.size) for k, v in enumerate(node.vars)}
    rnames = {v: Symbol(f"r{k}", v.size) for k, v in enumerate(node.reduction_vars)}
    space = Space(tuple(names.values()), tuple(rnames.values()))
    mapping = {v: s.expr for v, s in {**names, **rnames}.items()}
    identity = all(v.name == s.name for v, s in {**names, **rnames}.items())
    group = Group([i], space, buffers[node.outputs[0]].device, {i: mapping}, instructions=len(node.body),
                  turns=frozenset([node.turn]))
    for a in node.loads:
        index = a.index if identity else apply(a.index, mapping)
        group.reads.setdefault(a.buffer, set()).add(index)
        if a.anywhere:
            group.guarded.add(a.buffer)
    if space.rvars:
        group.wide_reads = set(group.reads)
    for a in node.stores:
        twice = a.buffer in group.writes
        group.writes[a.buffer] = a.index if identity else apply(a.index, mapping)
        if twice or a.mode is not None or a.anywhere:
            group.scattered.add(a.buffer)
    return group

# %% [markdown]
# ## May they be one kernel?
#
# Cheap tests first. Then the cycle test: `a` and `b` may not fuse if some third group must run after one
# and before the other. With `ancestors` as bit sets this is one AND: a direct successor of `a` that is an
# ancestor of `b`.

# %%
class Fuser:
    """The state of one run: groups by id (the position of their first member), union-find over positions."""

    def __init__(self, program: Program, nodes, options: FusionOptions):
        self.program, self.nodes, self.options = program, nodes, options
        self.buffers = program.buffers
        self.groups = {i: make_group(i, n, self.buffers) for i, n in enumerate(nodes)}
        self.parent = list(range(len(nodes)))
        self.decisions: dict[tuple, Decision] = {}
        self.root = {name: root_of(self.buffers, name) for name in self.buffers}
        self.kept = set(program.inputs) - program.owned
        self.aliased = {self.root[n] for n, b in self.buffers.items() if b.alias_of is not None}
        self.readers: dict[str, set[int]] = defaultdict(set)
        self.writer: dict[str, int] = {}
        reads = [node.inputs for node in nodes]
        for i, names in enumerate(reads):
            for name in names:
                self.readers[name].add(i)
            for name in written_by(nodes[i]):
                self.writer[name] = i
        steps, read, written = (dict(enumerate(xs)) for xs in (nodes, reads, map(written_by, nodes)))
        before = dependency_edges(steps, read, written, self.buffers)
        for i, earlier in before.items():
            for j in earlier:
                self.groups[j].successors.add(i)
                self.groups[i].ancestors |= self.groups[j].ancestors | (1 << j)

    def find(self, i: int) -> int:
        while self.parent[i] != i:
            self.parent[i] = self.parent[self.parent[i]]
            i = self.parent[i]
        return i

    def permanent(self, g: Group) -> bool:
        """Does the group touch only its own values, and memory that is there before and after, as an update of a parameter does?"""
        own = set(g.members)
        return all(self.root[n] in self.kept or self.writer.get(n) in own and self.readers.get(n, own) <= own
                   for names in (g.reads, g.writes) for n in names)

    def name(self, g: Group) -> str:
        names = [self.nodes[i].name for i in g.members[:6]]
        return "+".join(names) + ("+..." if len(g.members) > 6 else "")


# %%
def makes_cycle(f: Fuser, a: int, b: int) -> bool:
    """Is there a third group on a path from a to b, or from b to a?

    a, b: ids in `f.groups`. A group's `successors` are the ids of groups that directly need it, perhaps
    merged into another one since: `f.find(id)` is who they are now. Bit i of `ancestors` says that group i
    must run before, directly or not; it is kept right for ids that are in `f.groups`."""
    groups, find = f.groups, f.find
    for x, y in ((a, b), (b, a)):
        above = groups[y].ancestors
        if any(s != y and s != x and above >> s & 1 for s in map(find, groups[x].successors)):
            return True
    return False

# %% [markdown]
# ## Memory hazards
#
# In-place updates make fusing delicate. Inside one kernel, different elements run in any order, so a write
# may be seen by a read of another element. It is safe when each element of the memory is read and written
# only at the same index by the same iteration, and the nest is not walked twice: a reduction kernel walks
# its rows several times, and the second walk would read what the first one wrote. Scatters write anywhere;
# nobody else in the kernel may touch their memory.

# %% tags=["exercise:fusion-hazard"]
def hazard(f: Fuser, a: Group, b: Group, alignment: Alignment) -> str | None:
    """Why fusing would break the order of accesses to shared memory, or None.

    `f.root[name]` is the buffer whose memory a name is, and `f.aliased` are those whose memory is updated. A group has `writes`
    (name -> index) and `reads` (name -> set of indices), `scattered` (names that it writes masked, atomically or at computed
    positions), `guarded` (names that it reads so), `reduces`, and `wide_reads` (what its loops over the reduction dimensions
    read). `apply(index, alignment.a)` is an index of a in the common nest, with `alignment.b` one of b. `disjoint(i, j)`: do two
    writes never meet? `_is_wide(y, x)`: would y run over x's reduction dimensions? A kernel that reduces walks these more than once."""
    if f.aliased.isdisjoint(f.root[n] for n in (*a.writes, *b.writes)):
        return None
    reduces = a.reduces or b.reduces
    for x, y, map_x, map_y in ((a, b, alignment.a, alignment.b), (b, a, alignment.b, alignment.a)):
        for name, index in x.writes.items():
            root = f.root[name]
            if root not in f.aliased:
                continue
            for other, target in y.writes.items():
                if f.root[other] == root and (other in y.scattered or name in x.scattered or not disjoint(
                        apply(index, map_x), apply(target, map_y))):
                    return f"both write the memory of {root}"
            for other, indices in y.reads.items():
                if f.root[other] != root:
                    continue
                if name in x.scattered or other in y.guarded:
                    return f"{root} is updated at computed positions"
                if reduces and other != name and (other in y.wide_reads or _is_wide(y, x)):
                    return f"{root} would be read again after its update"
                at = apply(index, map_x)
                if any(apply(e, map_y) != at for e in indices):
                    return f"{root} is read at another index than it is updated"
    return None


# %%
def disjoint(a: Int, b: Int) -> bool:
    """Do two accesses of equal strides never meet? True for the parts of a `cat`: the distance between them,
    modulo the largest stride, is more than the inner dimensions can cover."""
    distance = add(a, mul(b, -1))
    if not isinstance(distance, int) or any(s.size is None for s in symbols(a)):
        return False
    terms = strided(a, tuple(symbols(a)))
    if terms is None or not all(isinstance(stride, int) and isinstance(v.size, int) and stride > 0
                                for v, stride, _ in terms[0]):
        return False
    *inner, outer = terms[0] or [(None, abs(distance) + 1, 1)]
    reach = sum(stride * (v.size - 1) for v, stride, _ in inner)
    # Interleaved, or in sequence
    for stride in (outer[1], reach + outer[1] * outer[2] + abs(distance) + 1):
        covered = reach if stride == outer[1] else reach + outer[1] * (outer[2] - 1)
        if covered < abs(distance) % stride and abs(distance) % stride + covered < stride:
            return True
    return False


def _is_wide(y: Group, x: Group) -> bool:
    """A pointwise group that would run over the reduction dimensions of x."""
    return not y.reduces and numel(y.space.vars) != numel(x.space.vars)

# %% [markdown]
# ## The score
#
# Bytes saved: each value that flows from `a` to `b` is not read again, and if nobody else wants it, not
# written at all. Each buffer read by both, at the same index, is read once instead of twice.

# %%
def shared_buffers(a: Group, b: Group) -> tuple[list[str], list[str]]:
    """(buffers flowing from a to b, buffers read by both)."""
    flows = [n for n in a.writes if n in b.reads]
    small, large = (a, b) if len(a.reads) <= len(b.reads) else (b, a)
    return flows, [n for n in small.reads if n in large.reads]


# %% tags=["exercise:fusion-score"]
def score(f: Fuser, a: Group, b: Group, flows, common) -> int:
    """Bytes that fusing a and b saves. flows, common: as `shared_buffers` gives them.

    A buffer that flows counts twice, once if a loop outside of b reads it too (`f.readers[name]` are the
    positions of all its readers). A buffer that both read counts once if they share an index expression for
    it, and half (rounded down) if not. Sizes are the `nbytes` of `f.buffers`."""
    members = set(b.members)
    total = 0
    for n in flows:
        size = nbytes(f.buffers[n])
        total += size if f.readers[n] - members else 2 * size
    for n in common:
        if not a.reads[n].isdisjoint(b.reads[n]):
            total += nbytes(f.buffers[n])
        else:
            total += nbytes(f.buffers[n]) // 2
    return total

# %% [markdown]
# ## One pair
#
# `try_fuse` puts the questions together, from the cheapest to the dearest. First come those that need no
# look at indices (`refusal`): the same device, the number of loops, of instructions and of arguments. Then what flows
# between the two. A buffer that is written at computed positions is complete only when the kernel has
# ended, and one that is read at computed positions needs to be in memory. Then usefulness: two loops that
# only read something in common must share a good part of their traffic, and must not lie far apart in the
# program, since fusing them keeps everything between them alive for longer. (That is no reason where both touch nothing but
# inputs that stay: `_foreach` operators do all of a parameter's work in places far apart.) Then the cycle test.
#
# Only now is a common nest looked for (`common_nest`). Mostly the nests agree already and all accesses are equal (`same`);
# that is decided by comparing, with no search. The last questions need the alignment: whether the buffers
# that both read are read at the same elements, whether a store would run across memory, whether a reduction
# with few results would slow down the loop (`_starved`, on GPUs), and the hazards.
#
# Each answer no is a sentence in `decisions`. A yes notes what kind of fusion it was: *vertical*, if a
# value flows, or *horizontal*.

# %%
def _starved(a: Group, b: Group) -> str | None:
    """A reduction with few outputs runs on few processors of a GPU. A pointwise loop over all its elements is
    better off alone."""
    if a.reduces == b.reduces:
        return None
    base, other = (a, b) if a.reduces else (b, a)
    rows, row = (present(numel(dims)) for dims in base.space)
    columns = any(coefficient(e, v) == 1 for v in base.space.vars[-1:] for es in base.reads.values()
                  for e in es if not symbols(e).isdisjoint(base.space.rvars))
    wide = present(numel(other.space.vars)) > rows
    if row > 2048 and rows < (2048 if columns else 128) and wide:
        return f"a reduction to {rows} values would slow down a loop over {rows * row} elements"
    return None


def waits(f: Fuser, a: Group, b: Group) -> bool:
    """Would more memory be alive if a, whose results b reads, had to wait for what else b reads? A sum over rows is small.
    Added to another one that comes much later, it would keep its operand alive until then."""
    ready = max([f.writer[n] for n in b.reads if n in f.writer and n not in a.writes], default=0)
    if ready - a.members[-1] <= NEAR:
        return False
    kept = sum(nbytes(f.buffers[n]) for n in a.reads if n in f.writer and max(f.readers[n]) < ready)
    return kept > sum(nbytes(f.buffers[n]) for n in a.writes)


NEAR = 16             # positions in the program


def _traffic(f: Fuser, g: Group) -> int:
    return sum(nbytes(f.buffers[n]) for n in g.reads.keys() | g.writes.keys())


def refusal(f: Fuser, ia: int, ib: int, flows, common, points: int) -> str | None:
    """Why the groups ia and ib are not to be one kernel, whatever their nests, or None."""
    a, b = f.groups[ia], f.groups[ib]
    if a.device != b.device:
        return "different devices"
    if a.walked or b.walked:
        return "one of them sums up columns on the way along its rows"
    if len(a.members) + len(b.members) > f.options.max_loops or \
            a.instructions + b.instructions > f.options.max_instructions:
        return "the kernel would be too long"
    reads = a.reads.keys() | b.reads.keys()
    if len(reads | a.writes.keys() | b.writes.keys()) > f.options.max_buffers and \
            len(reads) > f.options.max_buffers // 2:
        return "the kernel would have too many arguments"
    turns = a.turns | b.turns
    if max((t for t in turns if t % 2), default=0) > min(turns):
        return "one computes again, later, what is not to be kept until then"
    if not flows and max(turns) // 4 > min(turns) // 4:
        return "a backward pass comes between them"
    if flows and waits(f, a, b):
        return "what the first reads would have to live until the second can run"
    for n in flows:
        if n in a.scattered:
            return f"{n} is written at computed positions: it is complete only when the kernel ends"
        if n in b.guarded:
            return f"{n} is read under a mask or at a computed position"
    if not flows and abs(a.members[-1] - b.members[0]) > f.options.max_distance and \
            abs(b.members[-1] - a.members[0]) > f.options.max_distance and not (f.permanent(a) and f.permanent(b)):
        return "far apart in the program: intermediates would have to live longer"
    if not flows and common and 5 * points < min(_traffic(f, a), _traffic(f, b)):
        return "too little in common"
    return "something between them needs one and feeds the other" if makes_cycle(f, ia, ib) else None


def common_nest(f: Fuser, a: Group, b: Group, flows, common, across: bool) -> tuple[Alignment, tuple[Symbol, ...]] | str:
    """The alignment in which a and b are one kernel, and the variables that it walks along; or why there is none, or none that is
    legal and fast."""
    walked: tuple[Symbol, ...] = ()
    same = not across and a.space.vars == b.space.vars and a.space.rvars == b.space.rvars and \
        all(x.size == y.size for x, y in zip(a.space.all, b.space.all)) and \
        all(b.reads[n] == {a.writes[n]} for n in flows) and all(a.reads[n] == b.reads[n] for n in common)
    if same:
        alignment = Alignment(a.space, {}, {})
    elif across:
        alignment = align_across(f, a, b, flows + common)
        if not isinstance(alignment, str):
            alignment, walked = alignment
    else:
        alignment = find_alignment(a, b, flows + common)
    if isinstance(alignment, str):
        return alignment
    if not same and common and not flows and not any(same_reads(a, b, n, alignment) for n in common):
        return "both read " + ", ".join(common) + ", but at different elements"
    if alignment.permuted and (a.reduces or b.reduces or not flows) and \
            (bad := scattered_stores(f, a, b, alignment)):
        return f"{bad} would be written across memory"
    slow = _starved(a, b) if a.device.type == "cuda" else None
    return slow or hazard(f, a, b, alignment) or (alignment, walked)


def try_fuse(f: Fuser, ia: int, ib: int, across: bool = False) -> bool:
    """Fuse groups ia and ib if that is legal and useful; either way, record why. `across`: if one reduces
    rows and the other columns."""
    a, b = f.groups[ia], f.groups[ib]
    if b.ancestors >> ia & 1 == 0 and (a.ancestors >> ib & 1 or ib < ia):
        ia, ib, a, b = ib, ia, b, a
    names = f.name(a), f.name(b)
    key = (*names, len(a.members), len(b.members))
    flows, common = shared_buffers(a, b)
    points = score(f, a, b, flows, common)
    nest = refusal(f, ia, ib, flows, common, points) or common_nest(f, a, b, flows, common, across)
    if isinstance(nest, str):
        f.decisions[key] = Decision(*names, False, points, nest)
        return False
    reason = "vertical: " + ", ".join(flows) if flows else \
        "horizontal: both read " + ", ".join(common) if common else \
        "horizontal: parts of one buffer, or fed by one kernel"
    f.decisions[key] = Decision(*names, True, points, reason)
    a.notes = a.notes + b.notes + [f"{names[0]} and {names[1]}: {reason}"]
    merge(f, ia, ib, nest[0])
    a.walked = nest[1]
    return True

# %% [markdown]
# ## Merging two groups
#
# A fusion has been decided; now the books are kept. Both groups are rewritten to the common variables. What a
# pointwise loop reads becomes a `wide` read if the loop now runs inside of a reduction's row. Reads and writes are
# united. Then the ancestors: who is above `a` or `b` is above the new group, and who has one of them above it has
# all of the new group's ancestors above it now. To go through all groups for each fusion would be quadratic, so
# `settled` finds out when it changes nothing.

# %%
def _apply(g: Group, mapping: dict[Symbol, Int]) -> None:
    """Rewrite a group's accesses and its members' substitutions."""
    if not mapping:
        return
    g.reads = {n: {apply(e, mapping) for e in es} for n, es in g.reads.items()}
    g.writes = {n: apply(e, mapping) for n, e in g.writes.items()}
    g.mapping = {i: {s: apply(e, mapping) for s, e in m.items()} for i, m in g.mapping.items()}


def merge(f: Fuser, ia: int, ib: int, alignment: Alignment) -> None:
    """Fold group ib into ia, and keep the ancestor sets of everybody right."""
    a, b = f.groups[ia], f.groups[ib]
    wide = a.wide_reads | b.wide_reads
    for g, mapping in ((a, alignment.a), (b, alignment.b)):
        if not g.reduces and any(not symbols(e).isdisjoint(alignment.space.rvars) for e in mapping.values()):
            wide |= set(g.reads)                    # it will run over the reduction dimensions
        _apply(g, mapping)
    a.space = alignment.space
    for n, es in b.reads.items():
        a.reads[n] = a.reads[n] | es if n in a.reads else es
    a.writes.update(b.writes)
    a.mapping.update(b.mapping)
    a.guarded |= b.guarded
    a.scattered |= b.scattered
    a.wide_reads = wide
    a.instructions += b.instructions
    a.turns |= b.turns
    a.members = sorted(a.members + b.members)
    bits = (1 << ia) | (1 << ib)
    above = (a.ancestors | b.ancestors) & ~bits
    # If everything after a also comes after b, and b after a, nobody gains an ancestor.
    settled = b.ancestors >> ia & 1 and all(
        s in (ia, ib) or f.groups[s].ancestors >> ib & 1 for s in map(f.find, a.successors))
    a.successors = a.successors | b.successors
    a.ancestors = above
    del f.groups[ib]
    f.parent[ib] = ia
    if not settled:
        for g in f.groups.values():
            if g.ancestors & bits:
                g.ancestors |= above | bits

# %% [markdown]
# ## The greedy loop
#
# Candidates are found through buffers, never by comparing all loops with all: the writer of a buffer with
# each of its readers, and neighbouring readers of one buffer that have the same number of elements. Three
# thousand loops give some ten thousand pairs. A round scores them all, tries them best first, and rounds
# repeat until nothing fuses, because a fusion can remove the obstacle of another: what stood between two
# loops may now be inside one of them. Column sums join the rows last: a nest that has them is fixed.

# %% tags=["exercise:fewer-kernels"]
def candidate_pairs(f: Fuser) -> set[tuple[int, int]]:
    pairs: set[tuple[int, int]] = set()
    sizes = {i: {str(numel(g.space.vars)), str(numel(g.space.all))} for i, g in f.groups.items() if g.space}
    for name, readers in f.readers.items():
        writer = f.writer.get(name)
        loops = sorted(r for r in readers if f.groups[r].space)
        if writer is not None and f.groups[writer].space:
            pairs.update((writer, r) for r in loops)
        by_size: dict[str, list[int]] = defaultdict(list)
        for r in loops:
            for n in sizes[r]:
                by_size[n].append(r)
        for same in by_size.values():
            for k, r in enumerate(same):
                pairs.update((r, other) for other in same[k + 1:k + 4])
    for name, b in f.buffers.items():                 # a value and its update in place
        if b.alias_of is not None and name in f.writer and f.groups[f.writer[name]].space:
            before = {*f.readers.get(b.alias_of, ()), f.writer.get(b.alias_of, f.writer[name])}
            pairs.update((r, f.writer[name]) for r in before if f.groups[r].space and r != f.writer[name])
    return pairs

# %% [markdown]
# A pair that was refused is not tried again until one of the two has changed: the number of its members is
# part of the key. Pairs are kept as positions of loops, and `find` gives the groups that they are in by
# now, so a pair whose two loops have met in one group drops out by itself.

# %%
def fuse_groups(f: Fuser, rounds: int = 8) -> None:
    pairs = candidate_pairs(f)
    refused: set[tuple] = set()
    for _ in range(rounds):
        scored = {}
        for i, j in pairs:
            i, j = sorted((f.find(i), f.find(j)))
            if i != j and (i, j) not in scored:
                a, b = f.groups[i], f.groups[j]
                flows, common = shared_buffers(b, a) if a.ancestors >> j & 1 else shared_buffers(a, b)
                scored[i, j] = score(f, a, b, flows, common)
        pairs = set(scored)
        fused = False
        for i, j in sorted(scored, key=lambda p: (-scored[p], p[1] - p[0], p)):
            i, j = sorted((f.find(i), f.find(j)))
            if i == j:
                continue
            version = (i, j, len(f.groups[i].members), len(f.groups[j].members))
            if version in refused:
                continue
            if try_fuse(f, i, j):
                fused = True
            else:
                refused.add(version)
        if not fused:
            break
    across = f.options.columns_with_rows
    for i, j in sorted(scored, key=lambda p: (-scored[p], p)):
        i, j = sorted((f.find(i), f.find(j)))
        if i != j and f.groups[i].reduces and f.groups[j].reduces and \
                (f.groups[i].device.type == "cuda" if across is None else across):
            try_fuse(f, i, j, across=True)
    for i in sorted(f.groups):
        if i in f.groups and f.groups[i].space:
            fuse_siblings(f, f.groups[i])


def fuse_siblings(f: Fuser, g: Group) -> None:
    """Equal nests that read different results of one kernel: the second halves of split reductions. They
    share no memory, but two short kernels cost two launches."""
    alike: dict[tuple, int] = {}
    for name in g.writes:
        for r in sorted(f.readers.get(name, ())):
            r = f.find(r)
            if f.groups[r].space is None or f.groups[r] is g:
                continue
            key = tuple(tuple(d.size for d in ds) for ds in f.groups[r].space)
            first = alike.setdefault(key, r)
            if f.find(first) != r and present(numel(f.groups[r].space.all)) <= SHORT:
                try_fuse(f, f.find(first), r)


SHORT = 1 << 20       # elements

# %% [markdown]
# ## The stage
#
# Kernels that are equal up to sizes and need nothing from each other become lists at the end (`lists.py`). A list keeps alive what all its
# pieces read; if that costs memory, only short pieces are put into lists.

# %%
def with_lists(program: Program, kernels: dict[int, Kernel | Extern], steps: list[Kernel | Extern],
               options: FusionOptions) -> list[Kernel | Extern]:
    """`steps`, which are the kernels in order, with lists."""
    limit = None
    for short in (False, True):
        listed = make_lists(program, kernels, short, options.mixed_lists)
        if listed is None:
            return steps
        found = order_for_memory(program, *listed)
        limit = limit or 1.02 * estimate_peak(program, steps) + LITTLE
        if estimate_peak(program, found) <= limit:
            return found
    return steps


# %%
def fuse(program: Program, options: FusionOptions | None = None) -> Schedule:
    """Group the loops of `program` into kernels, order them, and plan their memory."""
    options = options or FusionOptions()
    nodes = remove_dead(program)
    f = Fuser(program, nodes, options)
    if options.enabled:
        fuse_groups(f)
    visible = {v.buffer for v in program.outputs if isinstance(v, View)} | set(program.inputs)
    visible |= {n for n in f.buffers if f.root[n] in visible}
    built = ((i, build_kernel(f, g, visible, i) if g.space else nodes[i]) for i, g in f.groups.items())
    kernels = {i: step for i, step in built if step is not None}
    steps = order_for_memory(program, kernels)
    if options.lists:
        steps = with_lists(program, kernels, steps, options)
    plan = plan_memory(program, steps, options.reuse_memory)
    return Schedule(program, steps, plan, list(f.decisions.values()))
