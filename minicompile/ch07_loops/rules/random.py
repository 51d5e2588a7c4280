# %% [markdown]
# # Random numbers inside a loop
#
# Dropout is a random mask and a multiplication. As a library call it reads and writes whole tensors and cuts
# a chain of pointwise operators in two. Inside a loop it is a few dozen integer instructions. What makes this
# possible is that CUDA's generator is *counter-based*: the numbers of element `i` are a function of a seed
# and of a counter, with no state to carry from element to element.
#
# They are to be eager's numbers, so the counter of each element must be the one that eager's kernel gives it. That follows from how
# this kernel is launched. It has at most as many threads as the GPU holds at once; each of them takes some neighbouring
# elements, then others as many places further on as all threads together took, until there are none left. Each time a thread
# draws four numbers. So two numbers describe it, a *layout*: the elements that a thread takes at a time, and the threads.
#
# How many elements a thread takes is PyTorch's choice, and has changed with its versions. We find it by asking: `eager_layout`
# draws once with eager's kernel, and looks for the layout that gives the same mask. If there is none, dropout stays a library
# call.

# %%
import functools
import threading
from typing import Sequence

import torch

from ...ch01_graphs.generators import generator_of
from ..externs import emit_extern
from ..ir import Extern
from ..lazy import Lazy, Lowering, dense_strides, from_buffer, linear, make_lazy, new_buffer, realize, sizes_of, strides_of
from ..reference import philox_uniform
from ..table import aten, lowering

BLOCK = 256                 # threads of a block of eager's kernel
WORTH_A_LAUNCH = 1 << 20              # elements from which reading and writing them costs more than another launch
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def all_threads(device: torch.device) -> int:
    """Threads that a GPU holds at once."""
    p = torch.cuda.get_device_properties(device)
    return p.multi_processor_count * (p.max_threads_per_multi_processor // BLOCK) * BLOCK


@functools.cache
def eager_layout(dtype: torch.dtype, device: torch.device) -> tuple[int, int] | None:
    """(elements that a thread takes at a time, threads) of eager's dropout of a large tensor; None if it is another scheme. Checked with a
    tensor for which the threads go round more than once, in a place of its own of the random stream."""
    if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return None
    threads, generator = all_threads(device), generator_of(device)
    before, seed = generator.get_offset(), torch.tensor(signed(generator.initial_seed()), device=device)
    try:
        for width in (4, 8, 16):
            n, count = 16 * threads + 64, draws(16 * threads + 64, threads)
            generator.set_offset(before + 4)
            kept = torch.native_dropout(torch.empty(n, dtype=dtype, device=device), 0.5, True)[1]
            at = torch.arange(0, n, 97, device=device)
            number = philox_uniform(seed, torch.tensor(before + 4, device=device), at, (width, threads))
            if generator.get_offset() == before + 4 + count and torch.equal(number < 0.5, kept[at]):
                return width, threads
    finally:
        generator.set_offset(before)
    return None


def signed(n: int) -> int:
    """A 64-bit number without sign, as int64 has it."""
    return n - (n >> 63 << 64)


def draws(numel: int, threads: int) -> int:
    """By how much eager's dropout of so many elements advances the generator."""
    return ((numel - 1) // (4 * threads) + 1) * 4


# %% [markdown]
# ## The place in the stream
#
# A kernel needs the seed and the generator's *offset*, the place in the stream at which this dropout begins, and the generator must move
# on past it, as if eager's kernel had run. `Draw` does both, as a step among the library calls, so it keeps its
# place among other calls that draw.
#
# For a CUDA graph the place is only known when the graph is replayed, and PyTorch keeps it in memory to which library kernels get a
# pointer. Nobody else is told. But there is one operator that *returns* what it was told, because its backward
# draws the same numbers again: attention. Its forward pass also advances the generator by exactly one for each pair of a query and a
# key. So a recording contains an attention of `count` queries and one key, whose result nobody reads.
#
# That kernel takes time of its own. It waits for nothing, though: the order in which calls are *recorded* is what fixes
# their places in the stream, not the order in which they run. So these kernels are recorded on a stream of their own, which
# joins the program where the place is needed, and run beside what comes before. PyTorch uses memory of that stream again for that stream as
# soon as it is free, when a kernel of the other may still read it. So all places of a recording are kept until the next recording.

# %%
class Draw(threading.local):
    """Called with the offsets to pass over, a multiple of 4, and a GPU: the seed and the offset before, as 0-d int64 tensors on the GPU."""

    tags = (torch.Tag.nondeterministic_seeded,)

    def __init__(self):
        self.beside: dict[torch.device, torch.cuda.Stream] = {}
        self.kept: list = []

    def __repr__(self) -> str:
        return "draw"

    def __call__(self, count: int, device: torch.device) -> Sequence[torch.Tensor]:
        if torch.cuda.is_current_stream_capturing():
            return self.recorded(count, device)
        generator = generator_of(device)
        offset = generator.get_offset()
        generator.set_offset(offset + count)
        numbers = signed(generator.initial_seed()), offset
        return [torch.full((), n, dtype=torch.int64, device=device) for n in numbers]

    def recorded(self, count: int, device: torch.device) -> Sequence[torch.Tensor]:
        main = torch.cuda.current_stream(device)
        if device not in self.beside:
            self.beside[device] = torch.cuda.Stream(device)
        with torch.cuda.stream(self.beside[device]):
            if not torch.cuda.is_current_stream_capturing():       # the first of this recording
                self.beside[device].wait_stream(main)
                self.kept.clear()
            q, k = (torch.empty(1, rows, 1, 8, dtype=torch.float16, device=device) for rows in (count, 1))
            place = aten._efficient_attention_forward(q, k, k, None, None, None, None, None, 0.5, 0)[2:4]
        main.wait_stream(self.beside[device])
        self.kept.append(place)
        return place


draw = Draw()


# %% [markdown]
# Two dropouts between which nobody else draws share a step, which passes over the numbers of both.

# %%
def place_in_stream(g: Lowering, count: int, device: torch.device) -> tuple[Lazy, Lazy, int]:
    """For the next `count` offsets: the seed, the offset of a step that draws, and how far behind this offset they begin."""
    before = [n for n in g.program.nodes if isinstance(n, Extern) and torch.Tag.nondeterministic_seeded in getattr(n.op, "tags", ())]
    if before and before[-1].op is draw and before[-1].args[1] == device:
        call, skipped = before[-1], before[-1].args[0]
        call.args = (skipped + count, device)
    else:
        emit_extern(g, draw, (count, device), {}, tuple(new_buffer(g, torch.int64, device, (), ()) for _ in range(2)))
        call, skipped = g.program.nodes[-1], 0
    return *(from_buffer(g, name) for name in call.outputs), skipped

# %% [markdown]
# ## Dropout
#
# The mask is needed again in the backward pass, so it goes to memory, a byte for an element. The product is lazy: it becomes a part of
# whatever reads it. An operand that the caller made may lie at an odd address, and with it eager's kernel takes fewer
# elements at a time. Such a call, and a small one, stays with the library.

# %%
@lowering("native_dropout")
def native_dropout(g, x, p, train):
    out, kept = g.val
    size, stride = sizes_of(out), strides_of(out)
    if x.device.type != "cuda" or train is False or not 0 < p < 1 or x.dtype not in DTYPES or not isinstance(out.numel(), int) \
            or out.numel() < WORTH_A_LAUNCH or out.numel() % 16 or dense_strides(size, stride) != tuple(stride) \
            or x.view and x.view.buffer in g.program.inputs:
        return NotImplemented
    layout = eager_layout(x.dtype, x.device)
    if layout is None:
        return NotImplemented
    seed, offset, skipped = place_in_stream(g, draws(out.numel(), layout[1]), x.device)

    def mask(b, index):
        start = b.op("add", b.read(offset, ()), b.constant(skipped, torch.int64))
        number = b.make("philox", (b.read(seed, ()), start, linear(index, stride), layout), torch.float32)
        return b.op("lt", number, b.constant(1 - p, torch.float32))

    drawn = make_lazy(g, mask, [seed, offset], val=kept)
    realize(g, drawn)

    def scaled(b, index):
        value = b.read(x, index)
        factor = b.constant((1 / torch.tensor(1 - p, dtype=torch.float32)).item(), torch.float32)
        return b.op("mul", b.op("mul", value, b.to_dtype(b.read(drawn, index), torch.float32)), factor)

    return [make_lazy(g, scaled, [x, drawn], val=out), drawn]
