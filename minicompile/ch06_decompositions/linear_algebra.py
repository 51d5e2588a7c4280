# %% [markdown]
# # Linear algebra
#
# Matrix products are library calls and stay whole. Around them a little is left to do. `addmm` keeps a 1-d
# bias, because cuBLASLt adds it while the result is still in registers. Any other addend costs the library
# a copy into the output first; taken out, the addition fuses with what follows the product. In half
# precision that would round twice where eager rounds once, so there it stays.

# %%
from __future__ import annotations

import torch

from .table import HALF, aten, decomposition


def _combined(x, product, beta, alpha):
    """beta * x + alpha * product, where beta == 0 ignores even a NaN in x."""
    product = product if alpha == 1 else product * alpha
    if beta == 0:
        return product
    return (x if beta == 1 else x * beta) + product


@decomposition("addmm")
def addmm(x, a, b, *, beta=1, alpha=1):
    if x.dtype in HALF or not x.is_floating_point() or (x.dim() == 1 and beta == 1 and alpha == 1):
        return NotImplemented
    return _combined(x, torch.mm(a, b), beta, alpha)


@decomposition("baddbmm")
def baddbmm(x, a, b, *, beta=1, alpha=1):
    if x.dtype in HALF or not x.is_floating_point():
        return NotImplemented
    return _combined(x, torch.bmm(a, b), beta, alpha)


@decomposition("addmv")
def addmv(x, a, b, *, beta=1, alpha=1):
    if x.dtype in HALF or not x.is_floating_point():
        return NotImplemented
    return _combined(x, torch.mv(a, b), beta, alpha)


@decomposition("addbmm")
def addbmm(x, a, b, *, beta=1, alpha=1):
    if x.dtype in HALF or not x.is_floating_point():
        return NotImplemented
    return _combined(x, torch.sum(torch.bmm(a, b), [0]), beta, alpha)


@decomposition("addr")
def addr(x, a, b, *, beta=1, alpha=1):
    if x.dtype in HALF or not x.is_floating_point() or a.dtype != x.dtype or b.dtype != x.dtype:
        return NotImplemented
    return _combined(x, a.unsqueeze(1) * b, beta, alpha)
