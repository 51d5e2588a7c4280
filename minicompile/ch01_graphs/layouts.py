# %% [markdown]
# # Where elements lie
#
# Sizes, strides and an offset say which element of memory each element of a tensor is. A few questions about
# them come up again and again. Are two layouts the same? In which order do the dims lie in memory? Has every
# element a place of its own, so that writing has one meaning? And do two tensors of one memory touch each other?
# All chapters ask them here.
#
# The element `[i, j, k]` of a tensor lies at `offset + i * stride[0] + j * stride[1] + k * stride[2]`. Four tensors, and what the functions
# below say of them (`order` is `memory_order`, the dims from the slowest to the fastest):
#
#     zeros(2, 3, 4)                    strides (12, 4, 1)   order [0, 1, 2]   dense   length 24   copy (12, 4, 1)
#     zeros(2, 3, 4).transpose(1, 2)    strides (12, 1, 4)   order [0, 2, 1]   dense   length 24   copy (12, 1, 4)
#     zeros(2, 8)[:, :4]                strides (8, 1)       order [0, 1]      gaps    length 12   copy (4, 1)
#     zeros(1, 4).expand(3, 4)          strides (0, 1)       order [1, 0]      shared  length 4    copy (4, 1)
#
# The second has the elements of the first, read in another order, and no memory of its own. The third sees half of each row of eight, so
# there are gaps: from its first element to its last there are 12 places for 8 elements. The last shows one row three times, so
# a write to one of its elements is a write to three (`each_has_its_place` is false). A copy that may lie as it likes keeps the order, and
# has neither gaps nor elements that share a place.

# %%
import math

import torch

from .symbolic import present

# %% [markdown]
# Two layouts are the same if each index has the same address in both. The stride of a dim of size 1 is only ever multiplied by 0, and
# PyTorch itself sets it in more than one way, so it does not count.

# %%
def same_strides(size, a, b) -> bool:
    """Equal strides, not counting those of dimensions of size 1, which no address depends on."""
    return all(s == t or n == 1 for n, s, t in zip(size, a, b))


def same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    return same_strides(a.shape, a.stride(), b.stride())


def lies_as_well_as_can_be(a: torch.Tensor, wanted: torch.Tensor, closed: bool = False) -> bool:
    """Would a copy of `a` lie no more as `wanted` does? A copy in the order of its dims has its strides, also those of dims of size 1, if
    these are without gaps, too; where `wanted` has gaps, no copy has. closed: then one in that order is as near as can be."""
    copied = strides_in_order(wanted.shape, memory_order(wanted.shape, wanted.stride())[::-1])
    if same_layout(a, wanted):
        return a.stride() == wanted.stride() or copied != wanted.stride()
    return not is_dense(wanted) and (not closed or same_strides(wanted.shape, a.stride(), copied))


def copy_with_layout(t: torch.Tensor, shape, stride, dtype, device) -> torch.Tensor:
    """A copy that lies otherwise. Where a dim of it has stride 0, all its elements are one, the first."""
    out = target = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    for d, (n, step) in enumerate(zip(shape, stride)):
        if step == 0 and n > 1:
            t, target = t.narrow(d, 0, 1), target.narrow(d, 0, 1)
    target.copy_(t)
    return out


def memory_order(size, stride) -> list[int]:
    """Dims from the slowest to the fastest in memory."""
    return sorted(range(len(size)), key=lambda d: (stride[d], bool(size[d] != 1)), reverse=True)


# %% tags=["exercise:contiguous-strides"]
def inverse(order: list[int]) -> list[int]:
    """The permutation that undoes `order`."""
    return [order.index(d) for d in range(len(order))]


def contiguous_strides(shape) -> tuple:
    """The strides of a row-major tensor; sizes may be symbolic."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step = step * (max(size, 1) if isinstance(size, int) else size)
    return tuple(reversed(strides))


# %% tags=["exercise:is-dense"]
def is_dense(t: torch.Tensor) -> bool:
    """Every element has its own place and there are no gaps: the strides are those of a contiguous tensor, in
    some order of the dims. The strides of dims of size 1 do not count."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(t.stride(), t.shape) if n != 1):
        if stride != expected:
            return False
        expected = expected * size
    return True


# %% [markdown]
# Strides with gaps, and an offset, show part of a larger memory. Whoever copies such a tensor as it lies, or runs a program on
# bare memory (chapter 7), needs the memory itself, without the shape that is seen in it.

# %%
def length_of(form) -> int:
    """How many elements the memory of a tensor with these (sizes, strides, offset) must have, at least; none if it has no elements."""
    sizes, strides, offset = form
    return 0 if any(n == 0 for n in sizes) else 1 + offset + sum((n - 1) * s for n, s in zip(sizes, strides))


def flat_storage(tensor: torch.Tensor) -> torch.Tensor:
    """All memory from the first element of `tensor` to its last, as a one-dimensional tensor."""
    return tensor.as_strided((length_of((tensor.shape, tensor.stride(), 0)),), (1,))


# %% [markdown]
# The next questions are about two tensors on one memory, and what may be written. `overlap` and `inside` compare pieces of
# memory, and so they answer where the tensors have no gaps. `each_has_its_place` is true where no two elements share an
# address: with the dims sorted by stride, each step has to be longer than all that the faster dims reach.

# %%
def is_window(t: torch.Tensor) -> bool:
    """Can one see that there is more memory than that of its elements?"""
    return t.storage_offset() != 0 or not is_dense(t)


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Do two windows without gaps onto one memory share elements, and not simply all in the same order?"""
    if a.numel() == 0 or b.numel() == 0 or not (is_dense(a) and is_dense(b)):
        return False
    (start, end), (other, last) = ((t.storage_offset(), t.storage_offset() + t.numel()) for t in (a, b))
    if start == other and end == last:
        return not same_layout(a, b)
    return start < last and other < end


def inside(view: torch.Tensor, of: torch.Tensor) -> bool:
    """Does a window onto memory show elements of `of` only, which is known where that has no gaps?"""
    start, length = view.storage_offset() - of.storage_offset(), length_of((view.shape, view.stride(), 0))
    return length == 0 or is_dense(of) and bool(start >= 0) and bool(start + length <= of.numel())


def each_has_its_place(t: torch.Tensor) -> bool:
    """Is each element in a place of its own? Symbolic sizes count with their present values."""
    sizes, reach = tuple(map(present, t.shape)), 0
    for stride, size in sorted(zip(map(present, t.stride()), sizes)):
        if size > 1 and stride <= reach:
            return 0 in sizes
        reach += stride * (size - 1)
    return True


# %% [markdown]
# Where does a kernel put its result? An elementwise one keeps what its operands have in common: rows after rows, channels last, or
# just the same strides, which settles those of dims of size 1, too. Where they have nothing in common, the operands are asked
# in turn which of two dims is the faster one. A dim in which one is broadcast has no opinion, and rows after rows is what is left.
# With one operand that has gaps this is also the order of a copy. All of it is decided by the sizes of the present call.
#
# A fake has to get this right to the last stride, since generated code stores the result where the fake says, and the program may ask for
# its strides. For a tensor `a` of shape (2, 3, 4) in rows and `t`, a `zeros(4, 3, 2).permute(2, 1, 0)`, of the same shape, where the
# first dim is the fastest: `a + a` has strides (12, 4, 1) and `t + t` those of `t`, (1, 2, 6). In `a + t` nothing is common; the
# first operand is asked first, so `a + t` lies as `a` does and `t + a` as `t`.

# %%
def strides_in_order(sizes, dims, least: int = 1) -> tuple:
    """Strides without gaps, where `dims` names the dims from the fastest to the slowest. least: what a size counts for at least."""
    strides, step = [0] * len(sizes), 1
    for d in dims:
        strides[d] = step
        step = step * (max(sizes[d], least) if isinstance(sizes[d], int) else sizes[d])
    return tuple(strides)


def _lies_in_order(sizes, strides, dims) -> bool:
    """Are these such strides, as far as an address depends on them? Those of an empty tensor are."""
    expected = strides_in_order(sizes, dims)
    return 0 in sizes or all(n == 1 or s == t for n, s, t in zip(sizes, strides, expected))


def _by_stride(strides) -> list[int]:
    return sorted(range(len(strides)), key=strides.__getitem__)


def _by_opinion(sizes, operands) -> list[int]:
    """Dims from the fastest to the slowest."""
    strides = [[0] * (len(sizes) - len(own)) + [0 if n == 1 != size else s for n, s, size in zip(own, steps, sizes[len(sizes) - len(own):])]
               for own, steps in operands]

    def slower(a, b) -> int:
        for steps in strides:
            if steps[a] and steps[b] and (difference := steps[a] - steps[b] or sizes[a] > sizes[b]):
                return difference
        return 0
    dims = list(reversed(range(len(sizes))))
    for place in range(1, len(dims)):
        for before in reversed(range(place)):
            if (opinion := slower(dims[before], dims[place])) < 0:
                break
            if opinion > 0:
                dims[before], dims[place], place = dims[place], dims[before], before
    return dims


def _now(numbers) -> tuple:
    return tuple(map(present, numbers))


def elementwise_strides(sizes, operands) -> tuple:
    """Where an elementwise kernel puts a result of these sizes. operands: (sizes, strides) of each, numbers among them."""
    now, forms = _now(sizes), [(_now(own), _now(strides)) for own, strides in operands]
    rows = range(len(sizes))[::-1]
    if all(own == now for own, _ in forms):
        for order in (rows, (1, 3, 2, 0))[:1 + (len(sizes) == 4)]:
            if all(_lies_in_order(now, strides, order) for _, strides in forms):
                return strides_in_order(sizes, order)
        first = forms[0][1]
        if all(strides == first for _, strides in forms) and _lies_in_order(now, first, _by_stride(first)):
            return tuple(operands[0][1])
    dims = _by_opinion(now, forms)
    return strides_in_order(sizes, dims, dims == list(rows))


def copied_strides(sizes, strides) -> tuple:
    """Those of a copy that may lie as it likes: of a tensor without gaps its own."""
    now, steps = _now(sizes), _now(strides)
    return tuple(strides) if _lies_in_order(now, steps, _by_stride(steps)) else strides_in_order(sizes, _by_opinion(now, [(now, steps)]))


# %% [markdown]
# Strides of a tensor with symbolic sizes follow from what they are now. In a dense tensor each stride is the
# product of the sizes inside of it, and varies with them; a stride that is larger, as that of `buffer[:,
# :n]`, is that of some other memory, and a number, or, at the dims in `steps`, a symbol of its own. The pattern found here is guarded
# (chapter 2): a stride that is such a product by chance is one only as long as it stays one.

# %%
def from_inside(sizes, strides) -> list[int]:
    """Dims from the fastest to the slowest, without those that are expanded."""
    return [d for d in sorted(range(len(sizes)), key=lambda d: (strides[d], sizes[d])) if strides[d]]


def dims_with_gaps(tensor) -> list[int]:
    """The dims between whose elements there is other memory; none where one dim lies between the elements of another."""
    order, found, running = from_inside(tensor.shape, tensor.stride()), [], 1
    for d in order:
        if tensor.shape[d] == 1:
            continue
        if tensor.stride(d) < running:
            return []
        if tensor.stride(d) > running:
            found.append(d)
        running = tensor.stride(d) * tensor.shape[d]
    return found


def stride_pattern(tensor, dynamic, steps=frozenset()) -> tuple:
    """For each dim its stride: an int, or (base, dims) for `base`, the stride of the first of `dims`, times the sizes of `dims`, where
    one of these is in `dynamic` or the first is in `steps`."""
    pattern: list = [0] * tensor.dim()
    base, inside, running = 1, (), 1
    for d in from_inside(tensor.shape, tensor.stride()):
        stride = tensor.stride(d)
        if stride != running or d in steps:
            base, inside, running = stride, (), stride
        pattern[d] = (base, inside) if not dynamic.isdisjoint(inside) or not steps.isdisjoint(inside[:1]) else stride
        inside, running = (*inside, d), running * tensor.shape[d]
    return tuple(pattern)


def symbolic_strides(tensor, sizes, steps: dict) -> list:
    """The strides of `tensor`, where its sizes are `sizes` and some of these symbols. steps: dim -> symbol that its stride is."""
    dynamic = frozenset(d for d, size in enumerate(sizes) if isinstance(size, torch.SymInt))
    return [steps.get(d, p) if isinstance(p, int) else math.prod([sizes[i] for i in p[1]], start=steps.get(p[1][0], p[0]))
            for d, p in enumerate(stride_pattern(tensor, dynamic, frozenset(steps)))]
