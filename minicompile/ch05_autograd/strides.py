# %% [markdown]
# # Where elements lie
#
# Sizes, strides and an offset say which element of memory each element of a tensor is. Three questions about
# them come up again and again. Are two layouts the same? Has every element a place of its own, so that
# writing has one meaning? And do two tensors of one memory touch each other?

# %%
from __future__ import annotations

import torch

from ..ch01_graphs.fake import present


def same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal layout, not counting the strides of dimensions of size 1, which no address depends on."""
    return all(s == t or n == 1 for n, s, t in zip(a.shape, a.stride(), b.stride()))


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


# %%
def memory_order(t: torch.Tensor) -> tuple[list[int], list[int]]:
    """The permutation that makes `t` row-major, and its inverse."""
    order = sorted(range(t.dim()), key=lambda d: (t.stride(d), bool(t.shape[d] != 1)), reverse=True)
    return order, [order.index(d) for d in range(t.dim())]


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Do two windows without gaps onto one memory share elements, and not simply all in the same order?"""
    if a.numel() == 0 or b.numel() == 0 or not (is_dense(a) and is_dense(b)):
        return False
    (start, end), (other, last) = ((t.storage_offset(), t.storage_offset() + t.numel()) for t in (a, b))
    if start == other and end == last:
        return not same_strides(a, b)
    return start < last and other < end


def each_has_its_place(t: torch.Tensor) -> bool:
    """Is each element in a place of its own? Symbolic sizes count with their present values."""
    sizes, reach = tuple(map(present, t.shape)), 0
    for stride, size in sorted(zip(map(present, t.stride()), sizes)):
        if size > 1 and stride <= reach:
            return 0 in sizes
        reach += stride * (size - 1)
    return True
