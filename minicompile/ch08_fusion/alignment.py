# %% [markdown]
# # Finding a common nest
#
# A reduction dictates the nest, and a pointwise loop adapts: either it covers the output dimensions, or
# output and reduction dimensions together. Between two pointwise loops the earlier one is the base.
# Evidence is tried first: the buffers that both touch, those written by one and read by the other before
# those that both read. Whatever alignment results, it counts only if every value that flows from `a` to `b`
# is read at the index at which it was written.

# %%
from ..ch01_graphs.symbolic import Int, Symbol, coefficient, present, product, symbols
from ..ch07_loops.reductions import ENOUGH_BLOCKS, LONGEST_ROW
from .dependencies import nbytes
from .groups import Fuser, Group
from .iteration import Alignment, Segment, Space, apply, combine, roles_agree, segments_by_access, segments_in_order


def numel(dims) -> Int:
    return product(d.size for d in dims)


# %% [markdown]
# `base` is the group whose nest is kept, `other` the one that adapts. If the sizes of the nests do not match at
# all, there is nothing to look for. If only the base reduces, the other may cover all of its dimensions or just
# those of its output; in the second case the row's dimensions are `absent` from it. Then each candidate is
# completed to an alignment and tested.

# %%
def find_alignment(a: Group, b: Group, shared: list[str]) -> Alignment | str:
    """How a and b share a nest, or a reason why they do not."""
    flip = b.reduces and not a.reduces
    base, other = (b, a) if flip else (a, b)
    mine, its = base.space, other.space
    dims, absent = mine.all, ()
    same = numel(mine.vars) == numel(its.vars) and numel(mine.rvars) == numel(its.rvars)
    if base.reduces and not other.reduces:
        same = numel(its.vars) == numel(mine.all)
        if not same and numel(its.vars) == numel(mine.vars):
            same, dims, absent = True, mine.vars, mine.rvars
    if not same:
        return f"iteration spaces differ: {_sizes(a)} and {_sizes(b)}"
    tried = set()
    reason = f"no common refinement of {_sizes(a)} and {_sizes(b)}"
    for segments in _candidates(base, other, dims, shared):
        if segments is None or tuple(segments) in tried:
            continue
        if other.reduces and not roles_agree(base.space, other.space, segments):
            continue
        tried.add(tuple(segments))
        # Dimensions of the base that the other loop does not have stay whole.
        segments = segments + [Segment(d, _ABSENT, d.size) for d in absent]
        alignment = combine(base.space, segments, other.space.all)
        alignment.b.pop(_ABSENT, None)
        if flip:
            alignment = alignment._replace(a=alignment.b, b=alignment.a)
        bad = _first_mismatch(a, b, alignment)
        if bad is None:
            return alignment
        reason = f"{bad} is read at another index than it was written"
    return reason


_ABSENT = Symbol("_absent")


# %% [markdown]
# A candidate pairs segments of the two nests. The first ones come from memory: for a buffer that both touch, the
# variables are paired by their strides in it. The last one pairs them in order. `_first_mismatch` is the test: a
# value that `a` writes and `b` reads must have the same index in the common nest. `same_reads` asks the same of a
# buffer that both only read.

# %%
def _candidates(base: Group, other: Group, dims, shared):
    for name in shared:
        x, y = (g.writes[name] if name in g.writes else min(g.reads.get(name, ()), key=repr, default=None)
                for g in (base, other))
        if x is not None and y is not None:
            yield segments_by_access(x, dims, y, other.space.all)
    yield segments_in_order(dims, other.space.all)


def _first_mismatch(a: Group, b: Group, alignment: Alignment) -> str | None:
    for name, index in a.writes.items():
        if name in b.reads:
            at = apply(index, alignment.a)
            if any(apply(e, alignment.b) != at for e in b.reads[name]):
                return name
    return None


def same_reads(a: Group, b: Group, name: str, alignment: Alignment) -> bool:
    mine = {apply(e, alignment.a) for e in a.reads[name]}
    return not mine.isdisjoint(apply(e, alignment.b) for e in b.reads[name])


# %% [markdown]
# A legal nest can be a slow one. If one group's memory is contiguous along one variable and the other's along
# another one, a kernel for both jumps through memory somewhere.

# %%
def scattered_stores(f: Fuser, a: Group, b: Group, alignment: Alignment) -> str | None:
    """A large buffer of one group that is not contiguous along the variable along which the other group's
    memory is. Pointwise kernels can be tiled in two dimensions and absorb a transposition; it is no good
    inside a reduction, and not worth it without a flow."""
    base, other = (b, a) if b.reduces and not a.reduces else (a, b)
    moved = [(n, e, m) for g, m in ((a, alignment.a), (b, alignment.b)) for n, e in g.writes.items()]
    if base.reduces:
        mapping = alignment.a if base is a else alignment.b
        moved += [(n, e, mapping) for n, es in base.reads.items() for e in es]
    fast = {_fastest(apply(e, m), alignment.space) for n, e, m in moved if nbytes(f.buffers[n]) >= 4096}
    fast.discard(None)
    return None if len(fast) < 2 else next(iter(other.writes))


def _fastest(index: Int, space: Space) -> Symbol | None:
    """The variable along which an access is contiguous; None for one that does not move over the whole
    nest."""
    if space.rvars and symbols(index).isdisjoint(space.rvars):
        return None
    return next((v for v in space.all if v.size != 1 and coefficient(index, v) == 1), None)


def _sizes(g: Group) -> str:
    text = "x".join(str(d.size) for d in g.space.vars) or "1"
    return text + (" reducing " + "x".join(str(d.size) for d in g.space.rvars) if g.space.rvars else "")

# %% [markdown]
# ## Rows, and columns on the way
#
# The backward pass of LayerNorm reads the gradient and the input twice: to reduce each row (the input's
# gradient) and to sum up each column (the weight's). No nest has both as reductions in the usual sense. But
# the column sums are split reductions: a first loop sums blocks of 8 to 16 rows, a second one their results
# (chapter 7). A GPU program that walks along the rows of one block, a tile of whole rows at a time, has all
# that the first loop needs in registers. It adds each tile to a tile of column sums and stores that at the
# end. So the nest is that of the row reduction, whose last variables are the place of a row in its block: the
# group's `walked`.
#
# On an H100 the gradients of a layer norm of 16,384 rows of 384 take 47 us so, and 64 us in two kernels;
# 12,288 rows of 768 take 67 us, and 89 us. torch.compile calls this a mix-order reduction. It decides at
# this stage how many blocks there are; here the lowering has done so, and the fusion takes place only if
# that leaves enough programs for a GPU.

# %%
def align_across(f: Fuser, a: Group, b: Group, shared: list[str]):
    """(alignment, walked variables) of a reduction of rows and a sum over blocks of rows, in either order, or
    a reason why they stay apart."""
    if not a.reduces or not b.reduces:
        return f"iteration spaces differ: {_sizes(a)} and {_sizes(b)}"
    for base, other in ((a, b), (b, a)):
        rows, row = base.space
        sums = _column_sums(f, other)
        used = {i for n in sums for i in f.readers.get(n, ())}
        if not sums or not used.isdisjoint(base.members + other.members) or \
                not isinstance(numel(row), int) or numel(row) > LONGEST_ROW:
            continue
        for segments in _candidates(base, other, base.space.all, shared):
            if segments is None or any(p.a in row and p.b in other.space.rvars for p in segments):
                continue
            found = combine(base.space, segments, other.space.all)
            walked = set().union(*(symbols(found.b[v]) for v in other.space.rvars))
            blocks = found.space.vars[:-len(walked)]
            if not walked.isdisjoint(blocks) or present(numel(blocks)) < ENOUGH_BLOCKS:
                continue
            along = {_fastest(apply(e, found.a), found.space) for es in base.reads.values() for e in es}
            alignment = found if base is a else found._replace(a=found.b, b=found.a)
            if along <= {None, found.space.rvars[-1]} and _first_mismatch(a, b, alignment) is None:
                return alignment, found.space.vars[-len(walked):]
    return f"they reduce different dimensions: {_sizes(a)} and {_sizes(b)}"


def _column_sums(f: Fuser, g: Group) -> set[str]:
    """The results of a group of sums that are stored as they are, and of loops over their operands; nothing
    for other groups."""
    results: set[str] = set()
    for node in (f.nodes[i] for i in g.members):
        if node.reduction_vars:
            folds = {v for v in node.body if v.op == "reduce"}
            if {s.value for s in node.stores} != folds or any(v.args[0] != "sum" for v in folds):
                return set()
            results.update(node.outputs)
        elif numel(node.vars) != numel(g.space.all):
            return set()
    return results
