# %% [markdown]
# # What fusion hands to the code generators
#
# Fusion ends with a list of steps: library calls, as they were, and kernels. This module is the contract between those who
# make, print and call a kernel: the `Kernel` itself, which chapters 9 and 10 turn into text; the `KernelSource` that they
# answer with; and the `LazyKernel` that chapter 11 calls.

# %%
import struct
from dataclasses import dataclass, field
from typing import Callable

import torch

from ..ch01_graphs.symbolic import Symbol
from ..ch07_loops.ir import Buffer, Loop

# %% [markdown]
# A `Kernel` is a group of loops that run over one common iteration space, in order. Each loop's body has
# been rewritten to the kernel's own variables, so both code generators see one set of names: `vars` (with
# sizes) for the output dimensions and `reduction_vars`. A loop in the group is one of three things:
# *pointwise over `vars`* (no reduction variables), *pointwise over `vars x reduction_vars`* (the elements
# that a reduction consumes or that are computed from its result), or a *reduction*. If there are `walked`
# variables, it may also be a *column sum*: over `walked`, for each of the other `vars` and the
# `reduction_vars`; its result is stored and not read in the kernel.
#
# `local` names buffers that live only inside the kernel: nothing outside reads them, so they are never
# stored. Where a loop reads a local buffer, the code generator uses the value in its register; if that was
# in an earlier walk along the row, it computes the value again from its loads (`values.py`). A buffer that
# a kernel writes is read inside the same kernel only at the very index it was written, and never under a
# mask.

# %%
@dataclass
class Kernel:
    """Loops fused into one launch."""

    name: str
    device: torch.device
    vars: tuple[Symbol, ...]
    reduction_vars: tuple[Symbol, ...]
    loops: list[Loop]                       # in order
    local: frozenset[str]                   # buffers that are never stored
    buffers: dict[str, Buffer]              # every buffer that a body mentions
    inputs: tuple[str, ...]                 # buffers read from outside, in argument order
    outputs: tuple[str, ...]                # buffers written and visible outside, in argument order
    symbols: tuple[Symbol, ...] = ()        # size symbols and floats, last in argument order
    origins: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)   # why each loop is here
    walked: tuple[Symbol, ...] = ()         # the last of `vars`: a program walks along them, to sum columns

    @property
    def tensors(self) -> tuple[str, ...]:
        """The buffers among its arguments, in call order."""
        return tuple(dict.fromkeys(self.inputs + self.outputs))

    @property
    def args(self) -> tuple[str, ...]:
        return self.tensors + tuple(s.name for s in self.symbols)

    @property
    def blocks(self) -> tuple[Symbol, ...]:
        """The other `vars`."""
        return self.vars[:len(self.vars) - len(self.walked)]

# %% [markdown]
# A `KernelList` is one launch for many kernels that do not need each other (`lists.py`). Its `pieces` are these kernels. Each
# runs one of the `bodies`, which are kernels in canonical form whose first `symbols` are parameters: the numbers in which the
# pieces of a body differ. Its loops are those of all pieces, and run over the variables of their pieces.

# %%
@dataclass
class Piece:
    """One kernel of a list."""

    kernel: Kernel
    body: int                               # which of the bodies it runs
    tensors: tuple[int, ...]                # for each tensor of the body, which of the list's it is
    parameters: tuple[int, ...]             # values of the body's first symbols


@dataclass
class KernelList(Kernel):
    """Independent kernels as one launch."""

    roots: dict[str, str] = field(default_factory=dict)     # of inputs and outputs: whose memory they are
    bodies: list[Kernel] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)

    @property
    def tensors(self) -> tuple[str, ...]:
        """What is passed: each memory once, under the name of its root."""
        return tuple(dict.fromkeys(self.roots[n] for n in self.inputs + self.outputs))


def pieces_of(kernel: Kernel) -> list[Kernel]:
    """The kernels that run side by side in this launch."""
    return [piece.kernel for piece in kernel.pieces] if isinstance(kernel, KernelList) else [kernel]

# %% [markdown]
# Arguments are addresses and 64-bit integers. A float is passed as the integer with the same bits
# (`bits_of_float`), which spares both launchers, and the cache of CUDA graphs, a second kind of number.

# %%
def bits_of_float(value: float) -> int:
    return struct.unpack("q", struct.pack("d", value))[0]


def float_of_bits(bits: int) -> float:
    return struct.unpack("d", struct.pack("q", bits))[0]

# %% [markdown]
# A code generator answers with a `KernelSource`. Its text must not depend on the names of the buffers it
# will be called with (fusion renames them to `in0`, `out0`, `tmp0` before it asks), so that the twelve
# equal layers of a transformer share one compiled kernel.

# %%
@dataclass
class KernelSource:
    """Source text of one kernel; it is called with the kernel's `args`. `lines`: for
    each line of `code` the position in `Kernel.loops` of the loop that it computes, None where it belongs to no
    single one. Kernels that share a text have loops of their own, with their own locations and origins."""

    name: str
    language: str                           # "triton", "cpp" or "reference"
    code: str
    options: dict = field(default_factory=dict)   # grid, num_warps, ...
    lines: tuple[int | None, ...] = ()

# %% [markdown]
# Building goes on in the background while the compiler carries on, so what a loader gives for a text can be called at
# once, and waits the first time. A host program that wants no indirection asks for the bare function, `resolve()`.

# %%
@dataclass(eq=False)
class LazyKernel:
    """A kernel that may still be being built. finish: waits for it."""

    finish: Callable[[], Callable]
    function: Callable | None = None

    def resolve(self) -> Callable:
        if self.function is None:
            self.function = self.finish()
        return self.function

    def __call__(self, *args):
        return (self.function or self.resolve())(*args)
