# %% [markdown]
# # Kernels without a GPU
#
# Under `TRITON_INTERPRET=1` Triton runs a kernel in Python, block after block, with NumPy arrays for tiles.
# It is slow, and it lets the tests of this chapter run anywhere. It has no libdevice; this stands in, with
# PyTorch's own functions. It cuts off the bits that bfloat16 has not, where a GPU rounds to nearest: a NaN can
# become infinite. It makes numbers of a truth value when it spreads it over a tile. And where a scalar bounds a loop,
# Triton 3.6 relies on a conversion that NumPy gave up in version 2.4. `repair` mends all three.

# %%
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


def repair() -> None:
    """Conversions from and to bfloat16 in Triton's interpreter are those of PyTorch (Triton keeps the bits as uint16), products see them,
    a tile has the type of the value that fills it, and a scalar can bound a loop."""
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _get_np_dtype

    truncating = InterpreterBuilder.cast_impl
    if truncating.__name__ == "cast_rounding":
        return

    def cast_rounding(self, source, target):
        kinds = source.dtype.scalar, target.scalar
        if tl.bfloat16 not in kinds or kinds[0] == kinds[1]:
            return truncating(self, source, target)
        x = torch.from_numpy(np.ascontiguousarray(source.data))
        if kinds[0] == tl.bfloat16:
            out = x.view(torch.bfloat16).float().numpy().astype(_get_np_dtype(target))
        else:
            out = x.float().bfloat16().view(torch.int16).numpy().view(np.uint16)
        return TensorHandle(out, kinds[1])

    def create_splat(self, kind, value):
        shape = kind.shape if hasattr(kind, "shape") else kind
        return TensorHandle(np.full(shape, np.ravel(value.data)[0], dtype=value.data.dtype), value.dtype.scalar)

    multiplying = InterpreterBuilder.create_dot

    def create_dot(self, a, b, *rest):
        wide = [cast_rounding(self, t, tl.float32) if t.dtype.scalar == tl.bfloat16 else t for t in (a, b)]
        return multiplying(self, *wide, *rest)

    adding_methods = interpreter._patch_lang_tensor

    def add_methods(tensor, scope):
        adding_methods(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.ravel(self.handle.data)[0]))

    InterpreterBuilder.cast_impl, InterpreterBuilder.create_splat, InterpreterBuilder.create_dot = cast_rounding, create_splat, create_dot
    interpreter._patch_lang_tensor = add_methods
