# %% [markdown]
# # Views
#
# A view is two functions: how an index of the view becomes an index of its base (used inside loops), and how
# the strides of a base in memory become strides of the view (used for library calls and graph outputs).
# Neither moves data. The first is called `pick` here, the second `relayout`. They must agree: the address that
# `relayout`'s strides give for an index is the address of `pick`'s index in the base.
#
# For most views the second follows from the first. Where `pick` is linear, a step along one dimension of the
# view is the same distance in memory wherever it begins, so it is enough to look at the first element and its
# neighbours: where the first lies is the offset, and how far away the next one along a dimension is, its stride.

# %%
import itertools

from ..ch01_graphs.layouts import contiguous_strides
from ..ch01_graphs.symbolic import floordiv, mod, product
from .ir import Layout
from .lazy import Lazy, Lowering, linear, make_view, sizes_of
from .table import lowering


def strided(g: Lowering, x: Lazy, pick) -> Lazy:
    """The view of `x` by a linear index map, which also tells the steps in memory."""
    size = sizes_of(g.val)

    def relayout(base: Layout):
        def place(dim=None):
            return linear(pick(tuple(int(d == dim) for d in range(len(size)))), base.stride)
        return Layout(size, tuple(place(d) - place() for d in range(len(size))), base.offset + place())

    return make_view(g, x, pick, relayout)


@lowering("expand", view=True)
def broadcast(g: Lowering, x: Lazy, *_) -> Lazy:
    """`x` repeated along new dims on the left and dims of size 1: stride 0 in memory."""
    size = sizes_of(g.val)
    if x.size == size:
        return x
    skip = len(size) - len(x.size)
    repeated = [d < skip or (x.size[d - skip] == 1 and size[d] != 1) for d in range(len(size))]

    def pick(index):
        return tuple(0 if repeated[d] else index[d] for d in range(skip, len(size)))

    return strided(g, x, pick)

# %% [markdown]
# ## Reshaping
#
# A reshape keeps the order of elements. Going through the flat position always works, but leaves divisions by
# sizes in every index. Most reshapes only split or merge neighbouring dims, so old and new dims are first cut
# into groups with equal products: `[8, 12, 64] -> [96, 8, 8]` is `[8, 12] -> [96]` and `[64] -> [8, 8]`.
# Splitting a dim needs no division in the index; merging dims needs one per dim, inside the group only. Sizes that vary can be
# asked whether they are equal, not which is less, so an end of a group is looked for among all, the nearest first.

# %% tags=["exercise:dim-groups"]
def dim_groups(old, new) -> list[tuple[list[int], list[int]]]:
    """Neighbouring dims of `old` and `new` whose products agree, as small as can be told: [(positions in old,
    positions in new)], in order, with every dim in exactly one group. Sizes are positive and have the same
    product. A dim of size 1 may be in either of the groups next to it, or in one of its own, where the other
    list may be empty. Of symbolic sizes a group ends where the products since its begin are the same expression, or those of all that
    follows."""
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        ends = itertools.product(range(min(i + 1, len(old)), len(old) + 1), range(min(j + 1, len(new)), len(new) + 1))
        k, m = next((k, m) for k, m in sorted(ends, key=sum)
                    if product(old[i:k]) == product(new[j:m]) or product(old[k:]) == product(new[m:]))
        groups.append((list(range(i, k)), list(range(j, m))))
        i, j = k, m
    return groups


# %% [markdown]
# `reshape` has the two functions of a view. `pick` takes, for each group, the position in the new dims and divides it by the
# strides that the old dims would have without gaps; the algebra of chapter 1 cancels what can be. `reshape_layout` asks whether
# memory can do without a copy: the old dims of a group, seen together, have to be one walk of equal steps.

# %%
@lowering("view", view=True)
def reshape(g: Lowering, x: Lazy, *_) -> Lazy:
    """The elements of `x`, in order, as another size of equal product."""
    size = sizes_of(g.val)
    if size == x.size:
        return x
    if 0 in size:
        return make_view(g, x, lambda index: (0,) * len(x.size), lambda base: Layout(size, contiguous_strides(size), base.offset))
    groups = dim_groups(x.size, size)

    def pick(index):
        out: list = [0] * len(x.size)
        for left, right in groups:
            position = linear([index[d] for d in right], contiguous_strides([size[d] for d in right]))
            for d, stride in zip(left, contiguous_strides([x.size[d] for d in left])):
                if x.size[d] != 1:
                    out[d] = floordiv(position, stride)
                    position = mod(position, stride)
        return tuple(out)

    return make_view(g, x, pick, lambda base: reshape_layout(base, size, groups))


# %% tags=["exercise:reshape-layout"]
def reshape_layout(base: Layout, size, groups) -> Layout | None:
    """The layout of `base` reshaped to `size` without a copy, or None if a merged group of dims does not lie
    evenly in memory. groups: `dim_groups(base.size, size)`. The offset stays. Within a group, the last new
    dim has the stride of the last old dim that is not of size 1 (1 if there is none), and the others are
    contiguous on top of it."""
    stride: list = [1] * len(size)
    for left, right in groups:
        left = [d for d in left if base.size[d] != 1]
        for outer, inner in zip(left, left[1:]):
            if base.stride[outer] != base.stride[inner] * base.size[inner]:
                return None
        step = base.stride[left[-1]] if left else 1
        for d, s in zip(right, contiguous_strides([size[d] for d in right])):
            stride[d] = s * step
    return Layout(size, tuple(stride), base.offset)
