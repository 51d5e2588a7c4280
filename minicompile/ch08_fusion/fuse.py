# %% [markdown]
# # Fusion
#
# On a modern device, arithmetic is nearly free and memory is not: an H100 (67 TFLOP/s, 3.35 TB/s) does 80 float32 operations
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
# answer. What is merged are the groups of `groups.py`.

# %%
from collections import defaultdict
from dataclasses import dataclass, field

from ..ch01_graphs.symbolic import present
from ..ch07_loops.ir import Extern, Program, View
from .alignment import numel
from .build import build_kernel
from .dependencies import nbytes, remove_dead
from .groups import Decision, Fuser, FusionOptions, Group, merge
from .kernel import Kernel
from .legality import common_nest, refusal
from .lists import LITTLE, make_lists
from .memory import MemoryPlan, order_for_memory, plan_memory


@dataclass
class Schedule:
    """The program as launches in order, with its allocation plan and the reasons for its shape."""

    program: Program
    steps: list[Kernel | Extern]
    plan: MemoryPlan
    decisions: list[Decision] = field(default_factory=list)

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
# Whether two groups may be one kernel is asked in `legality.py`. Each answer no is a sentence in `decisions`. A yes notes what
# kind of fusion it was: *vertical*, if a value flows, or *horizontal*.

# %%
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
# ## The greedy loop
#
# Candidates are found through buffers, never by comparing all loops with all: the writer of a buffer with
# each of its readers, and neighbouring readers of one buffer that have the same number of elements. A training step
# of a GPT of 12 layers with AdamW is 1,085 loops, which make 2,483 candidates (and 588,070 pairs). A round scores them all, tries
# them best first, and rounds repeat until nothing fuses, because a fusion can remove the obstacle of another: what stood between two
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
#
# `fuse_groups` has three parts: the rounds; on a GPU one more walk through the pairs of reductions, for column sums that join a
# kernel of rows (`align_across`); and `fuse_siblings`, for pairs that no buffer leads to.

# %%
MOST_ROUNDS = 8


def fuse_groups(f: Fuser) -> None:
    pairs = candidate_pairs(f)
    refused: set[tuple] = set()
    for _ in range(MOST_ROUNDS):
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
# Kernels that are equal up to sizes and need nothing from each other become lists at the end (`lists.py`), and the steps are ordered
# once more. If that costs memory after all, there are no lists.

# %%
def with_lists(program: Program, kernels: dict[int, Kernel | Extern], steps: list[Kernel | Extern],
               options: FusionOptions) -> tuple[list[Kernel | Extern], MemoryPlan]:
    """`steps`, which are the kernels in order, with lists; and who gets which memory."""
    plan = plan_memory(program, steps, options.reuse_memory)
    if options.lists and (listed := make_lists(program, kernels, steps, options.mixed_lists)) is not None:
        found = order_for_memory(program, *listed)
        planned = plan_memory(program, found, options.reuse_memory)
        if planned.peak <= 1.02 * plan.peak + LITTLE:
            return found, planned
    return steps, plan


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
    steps, plan = with_lists(program, kernels, order_for_memory(program, kernels), options)
    return Schedule(program, steps, plan, list(f.decisions.values()))
