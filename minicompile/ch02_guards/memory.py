# %% [markdown]
# # Where tensors lie
#
# A compiled call asks every tensor that it gets for its address, sometimes twice: to see whether one that the graph
# writes overlaps another (`backends.py`), and whether what a CUDA graph reads in place is where it was (chapter 11).
# A training step has six hundred of them: parameters, and what the optimizer keeps for each. Asked one by one from
# Python they take 0.1 microseconds each, which is longer than many a kernel runs. The extension of the memos knows
# what a tensor is and asks all of them in one call, a few nanoseconds each. So it does for other things that are
# done to many tensors: raising a version, reading a counter.

# %%
from __future__ import annotations

import math

import torch

from .stable import unchanged

Spans = unchanged and unchanged.Spans          # `backends.harm_each_other`, for the same arguments call after call


def raise_versions(*tensors: torch.Tensor) -> None:
    """Tell autograd that these were written to. Those of inference mode have no version, and are left out."""
    if unchanged is None or not unchanged.raise_versions(*tensors):
        torch.autograd.graph.increment_version(tensors)


def lie_at(tensors: list, positions: list[int], addresses: list[int]) -> bool:
    """Whether the tensors at these positions are at these addresses."""
    if unchanged is None:
        return [tensors[i].data_ptr() for i in positions] == addresses
    return unchanged.lie_at(tensors, positions, addresses)


def counters_agree(limit: int | None, *tensors: torch.Tensor) -> bool:
    """Whether 0-d tensors hold one number, each in memory of its own; limit: whether it is also whole and smaller than this."""
    number = unchanged and unchanged.common_number(*tensors)
    if number is None:
        numbers, places = {t.item() for t in tensors}, {t.data_ptr() for t in tensors}
        number = numbers.pop() if len(numbers) == 1 and len(places) == len(tensors) else math.nan
    return number == number and (not limit or number == number // 1 and -limit < number < limit)
