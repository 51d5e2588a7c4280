# %% [markdown]
# # Kernels without a GPU
#
# Under `TRITON_INTERPRET=1` Triton runs a kernel in Python, block after block, with NumPy arrays for tiles.
# It is slow and exact, and it lets the tests of this chapter run anywhere. It has no libdevice; this stands
# in, with PyTorch's own functions.

# %%
from __future__ import annotations

import numpy as np
import torch

_FUNCTIONS = {"nearbyint": torch.round}         # those that torch calls by another name


class InterpretedLibdevice:
    """`libdevice.<name>(tiles...)` computed by torch on the tiles' arrays."""

    def __getattr__(self, name):
        function = _FUNCTIONS.get(name) or getattr(torch, name, None) or getattr(torch.special, name)
        return lambda *tiles: _apply(function, tiles)


def _apply(function, tiles):
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    first = next(t for t in tiles if isinstance(t, tl.tensor))
    dtype = first.dtype.scalar
    kind = torch.from_numpy(np.ascontiguousarray(first.handle.data)).dtype
    arrays = [torch.from_numpy(np.array(t.handle.data)) if isinstance(t, tl.tensor)
              else torch.tensor(getattr(t, "value", t), dtype=kind) for t in tiles]
    out = function(*torch.broadcast_tensors(*arrays)).numpy()
    if not any(isinstance(t, tl.tensor) and t.type.is_block() for t in tiles):
        return tl.tensor(TensorHandle(out.reshape(1), dtype), dtype)
    return tl.tensor(TensorHandle(out, dtype), tl.block_type(dtype, list(out.shape)))
