# %% [markdown]
# # Groups: kernels in the making
#
# A `Group` is a kernel in the making: members, the common nest, and its memory accesses rewritten to that
# nest. Bodies stay as they are until the end; each member only keeps the substitution that leads from its
# own variables to the nest, because a loop may be re-aligned several times on the way. Library calls are
# groups that never fuse.
#
# For example, `y = x + 1` over 4 by 8 elements and `s = y.sum(1)` begin as two groups. The first has the variables
# `i0`, `i1`, reads `x` at `8*i0 + i1` and writes `y` there. The second has `i0` and, for the sum, `r0`, and reads
# `y` at `8*i0 + r0`. To become one kernel they need one nest, and the first takes that of the second: its `i1`
# becomes `r0`. Now both speak of `y` at `8*i0 + r0`, so each element is read where it was written, and need not go
# through memory. That is all that happened to the first loop. Its body says `i1` as before, and `mapping` says that
# this is `r0`. Were bodies rewritten at each step, a loop that ends up in a kernel of twenty would be copied twenty
# times.
#
# What legality asks about is kept per group, so that no body is looked at twice: where each buffer is read and
# written (`reads`, `writes`), and three sets of names with which one has to be careful. `guarded` are reads of
# which an index does not tell everything: under a mask, or at an index that was loaded itself. `scattered` are such
# writes. `wide_reads` matter for kernels that reduce. A row is walked several times there, and what is read in a
# walk is read again in the next one, so nobody may overwrite it in between. To merge two groups is to unite these
# sets. Only `wide_reads` may grow by more: a pointwise group that comes to run over the reduction dimensions adds
# all that it reads.

# %%
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..ch01_graphs.symbolic import Int, Symbol, symbols
from ..ch07_loops.ir import Extern, Loop, Program, written_by
from .dependencies import dependency_edges
from .iteration import Alignment, Space, apply


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
# ## All groups of a program
#
# A `Fuser` has them, and knows who reads and writes what. It also knows what has to run before what: `a` and `b` may not fuse if
# some third group must run after one and before the other (`makes_cycle`). With `ancestors` as bit sets this is one AND: a
# direct successor of `a` that is an ancestor of `b`.

# %%
class Fuser:
    """The state of one run: groups by id (the position of their first member), union-find over positions."""

    def __init__(self, program: Program, nodes, options: FusionOptions):
        self.program, self.nodes, self.options = program, nodes, options
        self.buffers = program.buffers
        self.groups = {i: make_group(i, n, self.buffers) for i, n in enumerate(nodes)}
        self.parent = list(range(len(nodes)))
        self.decisions: dict[tuple, Decision] = {}
        self.root = program.roots
        self.kept = set(program.inputs) - program.owned
        self.aliased = {self.root[n] for n, b in self.buffers.items() if b.alias_of is not None}
        self.readers: dict[str, set[int]] = defaultdict(set)
        self.writer: dict[str, int] = {}
        for i, node in enumerate(nodes):
            for name in node.inputs:
                self.readers[name].add(i)
            self.writer.update((name, i) for name in written_by(node))
        for i, earlier in dependency_edges(dict(enumerate(nodes)), self.buffers).items():
            for j in earlier:
                self.groups[j].successors.add(i)
                self.groups[i].ancestors |= self.groups[j].ancestors | (1 << j)

    def find(self, i: int) -> int:
        while self.parent[i] != i:
            self.parent[i] = self.parent[self.parent[i]]
            i = self.parent[i]
        return i

    def adds_nothing(self, g: Group, other: Group) -> bool:
        """Does the group touch only what `other` reads, its own values, and memory that is there before and after, as an update of a
        parameter does? What is only copied to such memory counts as that."""
        own = set(g.members)
        return all(self.root[n] in self.kept or n in other.reads or self.writer.get(n) in own and self.readers.get(n, own) <= own
                   for n in g.reads) and \
            all(self.root[n] in self.kept or all(r in own or self.ends_in_place(r) for r in self.readers.get(n, own)) for n in g.writes)

    def ends_in_place(self, i: int) -> bool:
        """Is all that a loop writes memory that is there before and after?"""
        return all(self.root[n] in self.kept for n in written_by(self.nodes[i]))

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
# ## Merging two groups
#
# A fusion has been decided; now the books are kept. Both groups are rewritten to the common variables. What a
# pointwise loop reads becomes a `wide` read if the loop now runs inside of a reduction's row. Reads and writes are
# united. Then the ancestors: who is above `a` or `b` is above the new group, and who has one of them above it has
# all of the new group's ancestors above it now. To go through all groups for each fusion would be quadratic, so the
# news goes from successor to successor, and ends at each group that knew: all behind it knew as well. Most fusions are
# no news to one side. The norm of all gradients joins the sums of each of them, one after the other, and hundreds of
# updates follow it; that each of these sums had to run before them they know.

# %%
def _substitute(g: Group, mapping: dict[Symbol, Int]) -> None:
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
        _substitute(g, mapping)
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
    known = [(g.ancestors | 1 << i) & ~(1 << ib) for g, i in ((a, ia), (b, ib))]       # to the successors of each
    a.ancestors = (a.ancestors | b.ancestors) & ~bits
    del f.groups[ib]
    f.parent[ib] = ia
    above, sides = a.ancestors | 1 << ia, [set(map(f.find, g.successors)) - {ia} for g in (a, b)]
    a.successors = sides[0] | sides[1]
    pending = [s for side, before in zip(sides, known) if above & ~before for s in side]
    while pending:
        g = f.groups[f.find(pending.pop())]
        if above & ~g.ancestors and g is not a:
            g.ancestors |= above
            pending.extend(g.successors)
