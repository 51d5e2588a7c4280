# %% [markdown]
# # Random numbers inside a loop
#
# Dropout is a random mask and a multiplication. As a library call it reads and writes whole tensors and cuts
# a chain of pointwise operators in two. Inside a loop it is a few dozen integer instructions. What makes this
# possible is that CUDA's generator is *counter-based*: the numbers of element `i` are a function of a seed
# and of `i`, with no state to carry from element to element.
#
# The price is the stream. Eager's kernel gives element `i` the counter that its own launch configuration
# implies, and advances the generator by an amount that depends on it too. Here each dropout draws one seed
# from PyTorch's generator, as a library call so that a CUDA graph replays it correctly, and derives the rest
# from that. Runs are reproducible under `torch.manual_seed`, but differ from eager's. So it is a switch
# (`config.fuse_dropout`), off unless asked for. torch.compile makes the same trade by default
# (`fallback_random=False`).

# %%
import torch

from .externs import emit_extern
from .lazy import Lazy, Lowering, dense_strides, from_buffer, linear, make_lazy, new_buffer, realize, sizes_of, strides_of
from .table import aten, lowering

STREAM = (4, 2**40)         # four numbers per thread, and a thread for every four elements of any tensor


def fresh_seed(g: Lowering, device: torch.device) -> Lazy:
    """One int64 drawn from the generator of `device` when the program gets to this point."""
    name = new_buffer(g, torch.int64, device, (1,), (1,))
    emit_extern(g, aten.randint.low, (0, 2**62, [1]), {"dtype": torch.int64, "device": device}, (name,))
    return from_buffer(g, name)


@lowering("native_dropout")
def native_dropout(g, x, p, train):
    if not g.options.fuse_dropout or x.device.type != "cuda" or train is False or not 0 < p < 1:
        return NotImplemented
    out, kept = g.val
    size = sizes_of(out)
    seed, stride = fresh_seed(g, x.device), dense_strides(size, strides_of(out))

    def mask(b, index):
        key = b.read(seed, (0,))
        zero = b.constant(0, torch.int64)
        number = b.make("philox", (key, zero, linear(index, stride), STREAM), torch.float32)
        return b.op("lt", number, b.constant(1 - p, torch.float32))

    drawn = make_lazy(g, mask, [seed], val=kept)
    realize(g, drawn)

    def scaled(b, index):
        value = b.read(x, index)
        dtype = value.dtype
        factor = b.op("mul", b.to_dtype(b.read(drawn, index), dtype), b.constant(1 / (1 - p), dtype))
        return b.op("mul", value, factor)

    return [make_lazy(g, scaled, [x, drawn], val=out), drawn]
