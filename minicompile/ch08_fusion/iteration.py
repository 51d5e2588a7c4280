# %% [markdown]
# # One iteration space for two loops
#
# A kernel has one loop nest. To run two loops in it, both must be written over the same variables. Often
# the nests already agree. When they do not, the difference is mostly one of description:
#
# - `(8, 64)` and `(512,)` visit the same 512 elements: split the second into `(8, 64)`, its variable
#   becoming `64*i0 + i1`;
# - `(rows, columns)` and `(columns, rows)` visit the same elements in another order: for loops without order
#   of their own, take one of the two;
# - `(rows, columns)` and the reduction `(rows | columns)` visit the same elements: the pointwise loop runs
#   inside the reduction.
#
# The tool for all three is an *alignment*: cut the dimensions of both nests into *segments* until they pair
# up one to one. Memory says how. If both loops access buffer `x`, one at `64*a + b` and the other at `c`,
# then `b` (stride 1, size 64) pairs with the fast 64 of `c` and `a` (stride 64, size 8) with the rest.
# Without such evidence, dimensions are paired in order.

# %%
from typing import NamedTuple

from ..ch01_graphs.symbolic import Int, Symbol, as_expr, coefficient, floordiv, mul, present, product, substitute
from ..ch07_loops.builder import normal


class Space(NamedTuple):
    """The nest of a group of loops: output variables and reduction variables (empty when nothing is
    reduced)."""

    vars: tuple[Symbol, ...]
    rvars: tuple[Symbol, ...]

    @property
    def all(self) -> tuple[Symbol, ...]:
        return self.vars + self.rvars


class Segment(NamedTuple):
    """A part of a dimension of each of two nests that visits the same `size` elements."""

    a: Symbol
    b: Symbol
    size: Int


class Alignment(NamedTuple):
    """The common nest, and what the variables of the two nests are in terms of it (empty where they stay
    the same). `permuted`: one nest walks its dimensions in a different order now."""

    space: Space
    a: dict[Symbol, Int]
    b: dict[Symbol, Int]
    permuted: bool = False


def apply(e: Int, mapping: dict[Symbol, Int]) -> Int:
    return normal(substitute(e, mapping)) if mapping else e


def _exact(a: Int, b: Int) -> Int | None:
    """a / b when b divides a, else None."""
    if b == 0:
        return None
    q = floordiv(a, b)
    return q if mul(q, b) == a else None

# %% [markdown]
# ## Cutting
#
# Both nests are lists of (variable, stride, size), fastest first. Look at the fastest dimension of each. If
# sizes agree they are a segment. If one size divides the other, cut the larger one; what is left of it has a
# larger stride. If neither divides (`(6, 4)` against `(4, 6)`), no common nest exists without divisions in
# the inner loop, and the two loops stay apart.

# %%
def pair_up(a: list[tuple], b: list[tuple]) -> list[Segment] | None:
    """Pair up two lists of (variable, stride or None, size), fastest dimension first."""
    a, b, segments = a[::-1], b[::-1], []
    while a and b:
        (va, sa, na), (vb, sb, nb) = a.pop(), b.pop()
        if sa != sb:
            return None
        if na == nb:
            size = na
        elif (q := _exact(na, nb)) is not None:
            size = nb
            a.append((va, None if sa is None else mul(sa, nb), q))
        elif (q := _exact(nb, na)) is not None:
            size = na
            b.append((vb, None if sb is None else mul(sb, na), q))
        else:
            return None
        segments.append(Segment(va, vb, size))
    return None if a or b else segments


def _in_order(dims: tuple[Symbol, ...]) -> list[tuple]:
    return [(d, None, d.size) for d in reversed(dims)]


def strides_in(index: Int, dims: tuple[Symbol, ...]) -> tuple[list[tuple], tuple[Symbol, ...]] | None:
    """The (variable, stride, size) of the dims that occur in a linear index, fastest first, and the dims that
    do not occur. None if the index is not linear in them."""
    used, unused = [], []
    for d in dims:
        c = coefficient(index, d)
        if c is None:
            return None
        if c == 0:
            unused.append(d)
        else:
            used.append((d, c, d.size))
    used.sort(key=lambda item: (present(item[1]), present(item[2])))
    return used, tuple(unused)


def segments_by_access(a_index: Int, a_dims, b_index: Int, b_dims) -> list[Segment] | None:
    """Pair the dimensions of two nests that reach the same elements of one buffer; dimensions that the
    index does not mention are paired in order."""
    a, b = strides_in(a_index, a_dims), strides_in(b_index, b_dims)
    if a is None or b is None:
        return None
    seen, rest = pair_up(a[0], b[0]), pair_up(_in_order(a[1]), _in_order(b[1]))
    return None if seen is None or rest is None else seen + rest


def segments_in_order(a_dims, b_dims) -> list[Segment] | None:
    return pair_up(_in_order(a_dims), _in_order(b_dims))

# %% [markdown]
# ## From segments to a nest
#
# The common nest keeps the order of the first one, the *base*: each base dimension is replaced by its
# segments. A variable of either nest is the mixed-radix number that its segments spell. If `i` of size 512 was cut
# into segments of 64 and 8, fastest first, with the new variables `i1` and `i0`, then `i` is `i1 + 64*i0`.
#
# `combine` gives each segment a variable (`digits`), unless nothing of the base was cut, in which case the base keeps
# its own. Then it spells the variables of both nests with them. `_monotone` says whether the second nest also walks
# through the segments in its own order. Where it does not, as for a transposed tensor, the alignment is legal as
# before, and costs more, since neighbours in the nest are not neighbours in its memory.

# %%
def _spell(segments: list[tuple[Symbol, Int]]) -> Int:
    """The number spelled by (digit, size) pairs, fastest first."""
    value, scale = 0, 1
    for digit, size in segments:
        value = value + mul(digit.expr, scale)
        scale = mul(scale, size)
    return value


def combine(base: Space, segments: list[Segment], other_dims: tuple[Symbol, ...]) -> Alignment:
    """The refined nest of `base` and the substitutions for both sides."""
    if len(segments) == len(base.all):
        # Nothing in the base was cut: its variables stay as they are.
        digits = {i: p.a for i, p in enumerate(segments)}
        space, of_base = base, {}
    else:
        parts: dict[Symbol, list[int]] = {}
        for i, p in enumerate(segments):
            parts.setdefault(p.a, []).append(i)
        digits, new = {}, ([], [])
        for kind, (letter, dims) in enumerate((("i", base.vars), ("r", base.rvars))):
            for d in dims:
                for i in reversed(parts[d]):
                    digits[i] = Symbol(f"{letter}{len(new[kind])}", segments[i].size)
                    new[kind].append(digits[i])
        space = Space(tuple(new[0]), tuple(new[1]))
        of_base = {d: _spell([(digits[i], segments[i].size) for i in which]) for d, which in parts.items()}
    of_other: dict[Symbol, list] = {}
    for i, p in enumerate(segments):
        of_other.setdefault(p.b, []).append((digits[i], p.size))
    mapping = {d: _spell(ds) for d, ds in of_other.items()}
    if all(e == d.expr for d, e in mapping.items()):
        mapping = {}
    return Alignment(space, of_base, mapping, not _monotone(base.all, other_dims, segments))


def _monotone(a_dims, b_dims, segments: list[Segment]) -> bool:
    """Do the segments, in the order of the dimensions of a, also follow the order of the dimensions of b?"""
    rank_a, rank_b = ({v: k for k, v in enumerate(reversed(vs))} for vs in (a_dims, b_dims))
    walk = sorted((p for p in segments if p.b in rank_b), key=lambda p: rank_a[p.a])
    return all(rank_b[x.b] <= rank_b[y.b] for x, y in zip(walk, walk[1:]))


def roles_agree(base: Space, other: Space, segments: list[Segment]) -> bool:
    """Two reductions share a nest only if output dimensions meet output dimensions, and if both fold in the
    same order: the first of equal maxima wins."""
    reduced, folded = set(base.rvars), set(other.rvars)
    if any((p.a in reduced) != (p.b in folded) for p in segments):
        return False
    return _monotone(base.rvars, other.rvars, [p for p in segments if p.a in reduced])

# %% [markdown]
# ## Fewer, longer loops
#
# Once the group is complete, neighbouring dimensions that every access treats as one are merged: `(12,
# 1024, 768)` with contiguous accesses only is a loop of 9,437,184. Fewer variables mean less index
# arithmetic and longer vectors. Two neighbours `a` (slower) and `b` of size `n` may become `m` when each
# index satisfies `index(a, b) == index(0, n*a + b)`. For a linear index that says: the stride of `a` is `n`
# times that of `b`.

# %%
def mergeable(index: Int, slow: Symbol, fast: Symbol) -> bool:
    index = as_expr(index)
    if isinstance(index, int):
        return True
    a, b = coefficient(index, slow), coefficient(index, fast)
    if a is not None and b is not None:
        return a == mul(b, fast.size)
    flat = Symbol("_flat", mul(slow.size, fast.size))
    merged = substitute(index, {slow: 0, fast: flat.expr})
    return substitute(merged, {flat: mul(slow.expr, fast.size) + fast.expr}) == index


def merge_dims(dims: tuple[Symbol, ...], indices: list[Int], letter: str):
    """The shortest list of dims that all `indices` allow, and what the old ones are in terms of it (a dict of
    symbols to expressions). Old dim `a` of a merged pair becomes 0 and `b` becomes the merged variable, which
    is only right for the given `indices`."""
    groups: list[list[Symbol]] = []
    for d in dims:
        if d.size == 1:
            continue
        if groups and all(mergeable(e, groups[-1][-1], d) for e in indices):
            groups[-1].append(d)
        else:
            groups.append([d])
    mapping: dict[Symbol, Int] = {d: 0 for d in dims}
    new, back = [], {}
    for k, group in enumerate(groups):
        new.append(Symbol(f"{letter}{k}", product(d.size for d in group)))
        mapping[group[-1]] = new[-1].expr
        back[new[-1]] = _spell([(_old(d), d.size) for d in reversed(group)])
    # For linear indices pairwise agreement is enough for a chain of three; others are checked whole.
    for e in indices:
        if any(coefficient(e, d) is None for d in dims):
            there = substitute(e, mapping)
            if substitute(there, back) != substitute(e, {d: _old(d).expr for d in dims}):
                kept = tuple(Symbol(f"{letter}{k}", d.size) for k, d in enumerate(dims) if d.size != 1)
                return kept, dict(zip((d for d in dims if d.size != 1), (k.expr for k in kept)))
    return tuple(new), mapping


def _old(d: Symbol) -> Symbol:
    return Symbol("_old_" + d.name, d.size)
