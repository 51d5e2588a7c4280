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

from .table import HALF, decomposition


def _combined(x, product, beta, alpha):
    """beta * x + alpha * product, where beta == 0 ignores even a NaN in x."""
    product = product if alpha == 1 else product * alpha
    if beta == 0:
        return product
    return (x if beta == 1 else x * beta) + product


def _taken_apart(name: str, product, keep_epilogue: bool = False) -> None:
    @decomposition(name)
    def plus_product(x, a, b, *, beta=1, alpha=1):
        epilogue = keep_epilogue and x.dim() == 1 and beta == 1 and alpha == 1
        if epilogue or x.dtype in HALF or not x.is_floating_point() or not x.dtype == a.dtype == b.dtype:
            return NotImplemented
        return _combined(x, product(a, b), beta, alpha)


_taken_apart("addmm", torch.mm, keep_epilogue=True)
_taken_apart("baddbmm", torch.bmm)
_taken_apart("addmv", torch.mv)
_taken_apart("addbmm", lambda a, b: torch.sum(torch.bmm(a, b), [0]))
_taken_apart("addr", lambda a, b: a.unsqueeze(1) * b)
