# %% [markdown]
# # May two groups be one kernel?
#
# `fuse.py` proposes pairs of groups that share memory. Here it is decided whether a pair may be one kernel without any result
# changing, and whether that kernel would be the better one. The answer is the nest in which both run, or a sentence that says why
# they stay apart, which ends up in a `Decision`. Cheap tests come before dear ones.
#
# `refusal` has those that need no look at indices. The device must be the same, and the numbers of loops, of instructions and of
# arguments limited. Then come *turns*. Where a graph holds backward passes (chapter 12), the turn of a loop says on which side of
# them it stands. What is computed again, so that it need not be kept, has an odd turn, and is not to be joined to what runs before:
# that would keep it after all. And what only reads something in common is not joined across a backward pass.
#
# Then what flows between the two. If the second one also needs what is ready only much later, what the first one reads would have
# to wait for it in memory (`waits`). A buffer that is written at computed positions is complete only when the kernel has
# ended, and one that is read at computed positions needs to be in memory.
#
# Then usefulness: two loops that only read something in common must share a good part of their traffic, and must not lie far apart in the
# program, since fusing them keeps everything between them alive for longer. (That is no reason where both touch nothing but
# inputs that stay, and gradients that both read: an optimizer does all of a parameter's work in places far apart.) The last test is
# whether something else would have to run in the middle of the kernel (`makes_cycle`).
#
# What is said of four programs, on matrices of 64 by 64 numbers:
#
#     x.softmax(1)
#         loop1 and loop2: one kernel, vertical: buf1
#         loop1+loop2 and loop3: one kernel, vertical: buf1, buf2
#         loop0 and loop1+loop2+loop3: one kernel, vertical: buf0
#     x.sum(0) + x.sum(1)
#         loop0 and loop1: apart, both read x, but at different elements
#         loop1 and loop2: one kernel, vertical: buf1
#         loop0 and loop1+loop2: one kernel, vertical: buf0
#     x.exp() @ w + x.exp()
#         loop0 and loop2: apart, something between them needs one and feeds the other
#     torch.zeros(64, 64).index_add(0, i, x).relu()
#         loop1 and loop2: apart, buf1 is written at computed positions: it is complete only when the kernel ends
#         loop0 and loop1: apart, both write the memory of buf0
#
# "Vertical" names the buffers that one writes and the other reads. In the second program two sums walk through `x` in different orders,
# so there is nothing to share. In the third the product needs the exponential whole, and stands between the two that would share it.

# %%
import math

from ..ch01_graphs.symbolic import Int, Symbol, add, coefficient, mul, present, provably_less, provably_nonnegative, substitute, symbols
from .alignment import align_across, find_alignment, numel, same_reads, scattered_stores
from .dependencies import nbytes
from .groups import Fuser, Group, makes_cycle
from .iteration import Alignment, apply, strides_in

NEAR = 16             # positions in the program


def waits(f: Fuser, a: Group, b: Group) -> bool:
    """Would more memory be alive if a, whose results b reads, had to wait for what else b reads? A sum over rows is small.
    Added to another one that comes much later, it would keep its operand alive until then."""
    ready = max([f.writer[n] for n in b.reads.keys() - a.writes.keys() - b.writes.keys() if n in f.writer], default=0)
    if ready - a.members[-1] <= NEAR:
        return False
    kept = sum(nbytes(f.buffers[n]) for n in a.reads if n in f.writer and max(f.readers[n]) < ready)
    return kept > sum(nbytes(f.buffers[n]) for n in a.writes)


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
            abs(b.members[-1] - a.members[0]) > f.options.max_distance and not (f.adds_nothing(a, b) and f.adds_nothing(b, a)):
        return "far apart in the program: intermediates would have to live longer"
    if not flows and common and 5 * points < min(_traffic(f, a), _traffic(f, b)):
        return "too little in common"
    return "something between them needs one and feeds the other" if makes_cycle(f, ia, ib) else None


# %% [markdown]
# ## A nest for both
#
# Only now is a common nest looked for. Mostly the nests agree already and all accesses are equal (`same`);
# that is decided by comparing, with no search. Otherwise `alignment.py` searches. The last questions need the alignment: whether
# the buffers that both read are read at the same elements, whether a store would run across memory, whether a reduction
# with few results would slow down the loop (`_starved`, on GPUs), and the hazards.

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
    writes never meet? `_is_wide(y, x)`: would y run over x's reduction dimensions? A kernel that reduces walks these more than once.
    Old contents have another name than the update: who reads the name that the other group writes wants the new ones."""
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


# %% [markdown]
# Two writes to one memory need not collide. The parts of a `cat` are written to one buffer, each to its own columns or rows,
# and a kernel may write several of them if their addresses never meet. `disjoint` looks at the ways in which parts lie: alternating, as
# the numbers of a pair, interleaved, within one step of the slowest variable, and one behind the other.

# %%
def disjoint(a: Int, b: Int) -> bool:
    """Do two accesses of equal strides never meet? True where their distance is no sum of strides, as for the numbers of a pair, and for
    the parts of a `cat`: there the distance, modulo the largest stride, is more than the inner dimensions can cover. Where sizes vary,
    parts that lie behind each other: the distance is more than all dimensions cover."""
    distance = add(a, mul(b, -1))
    if not isinstance(distance, int) or any(s.size is None for s in symbols(a)):
        loops = [s for s in symbols(a) | symbols(distance) if s.size is not None]
        reach = add(a, mul(substitute(a, dict.fromkeys(loops, 0)), -1))
        return symbols(distance).isdisjoint(loops) and provably_nonnegative(reach) and (
            provably_less(reach, distance) or provably_less(reach, mul(distance, -1)))
    terms = strides_in(a, tuple(symbols(a)))
    if terms is None or not all(isinstance(stride, int) and isinstance(v.size, int) and stride > 0
                                for v, stride, _ in terms[0]):
        return False
    if distance % (math.gcd(*(stride for _, stride, _ in terms[0])) or abs(distance) + 1):
        return True
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
