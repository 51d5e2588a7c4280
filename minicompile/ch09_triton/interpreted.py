# %% [markdown]
# # Kernels without a GPU
#
# Under `TRITON_INTERPRET=1` Triton runs a kernel in Python, block after block, with NumPy arrays for tiles. It is slow, and
# it lets the tests of this chapter run anywhere. It has no libdevice, the library of functions such as `erf` for NVIDIA's
# GPUs, and none of their instructions (`exp2_float`); this stands in, with PyTorch's own functions on the arrays of the tiles.
# Four more things are not as on a GPU. It
# cuts off the bits that bfloat16 has not, where a GPU rounds to nearest: a NaN can become infinite. It makes numbers of a
# truth value when it spreads it over a tile. Where a scalar bounds a loop, Triton 3.6 relies on a conversion that NumPy
# gave up in version 2.4. And an atomic addition in Triton 3.6 reads a tile's memory from its first number on, also where a tile that
# was spread has one number only: it adds whatever lies behind. `repair`, at the end, mends all four.

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


# %% [markdown]
# The interpreter keeps a bfloat16 as the uint16 of its bits. `rounding` is given the interpreter's own cast and makes one that
# leaves these bits to PyTorch: it widens them exactly, and rounds a float32 to the nearest bfloat16, as a GPU does. A product of such
# tiles multiplied the bits; `widening` has it see floats.

# %%
def rounding(truncate):
    """The cast of the interpreter, of which `truncate` is the original."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle, _get_np_dtype

    def cast(self, source, target):
        kinds = source.dtype.scalar, target.scalar
        if tl.bfloat16 not in kinds or kinds[0] == kinds[1]:
            return truncate(self, source, target)
        x = torch.from_numpy(np.ascontiguousarray(source.data))
        if kinds[0] == tl.bfloat16:
            out = x.view(torch.bfloat16).float().numpy().astype(_get_np_dtype(target))
        else:
            out = x.float().bfloat16().view(torch.int16).numpy().view(np.uint16)
        return TensorHandle(out, kinds[1])
    return cast


def widening(multiply, cast):
    """The product of the interpreter, of which `multiply` is the original."""
    import triton.language as tl

    def dot(self, a, b, *rest):
        wide = [cast(self, t, tl.float32) if t.dtype.scalar == tl.bfloat16 else t for t in (a, b)]
        return multiply(self, *wide, *rest)
    return dot


# %% [markdown]
# A scalar that is spread over a tile (`tl.full`) keeps its type. `adding` gives atomic operations tiles that lie in memory whole. And
# `range(n)` in a kernel asks `n` for its `__index__`, which the interpreter puts on tensors each time that it starts a kernel; ours has
# to come after it.

# %%
def splat(self, kind, value):
    from triton.runtime.interpreter import TensorHandle

    shape = kind.shape if hasattr(kind, "shape") else kind
    return TensorHandle(np.full(shape, np.ravel(value.data)[0], dtype=value.data.dtype), value.dtype.scalar)


def bounding(add_methods):
    """What gives tensors their methods when a kernel starts, of which `add_methods` is the original."""
    def patch(tensor, scope):
        add_methods(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.ravel(self.handle.data)[0]))
    return patch


def adding(add):
    """The atomic operation of the interpreter, of which `add` is the original, on tiles that have all their numbers in memory."""
    from triton.runtime.interpreter import TensorHandle

    def atomic(self, operation, pointers, values, mask, *order):
        tiles = (TensorHandle(np.ascontiguousarray(t.data), t.dtype) for t in (pointers, values, mask))
        return add(self, operation, *tiles, *order)
    return atomic


def repair() -> None:
    """All of it, once in a process."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if builder.create_splat is not splat:
        builder.cast_impl = rounding(builder.cast_impl)
        builder.create_dot = widening(builder.create_dot, builder.cast_impl)
        builder.create_atomic_rmw = adding(builder.create_atomic_rmw)
        builder.create_splat, interpreter._patch_lang_tensor = splat, bounding(interpreter._patch_lang_tensor)
