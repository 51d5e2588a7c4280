# %% [markdown]
# # The loop IR
#
# An ATen graph says *what* each operator computes. To fuse two operators one must know *how*: which element
# of which buffer is read to produce which element of the output. The loop IR says exactly that and no more. A
# `Loop` is a perfect loop nest, with a body that computes one element: it loads from buffers at index
# expressions, applies scalar operations, perhaps reduces over the inner dimensions, and stores.
#
# `relu(x @ w).sum(0)` for `x: [3, 4]` and `w: [4, 5]` is a library call and one loop
# (`print_program` of `verify` shows it so; `[3, 4]:4,1` are sizes and strides):
#
#     inputs: arg0, arg1
#     extern0: buf0 = aten.mm.default(arg0[3, 4]:4,1, arg1[4, 5]:5,1)
#     loop1: for i0 < 5 reduce r0 < 3    # full_default, maximum_default, sum_dim_int_list
#         v0: f32 = load buf0[i0 + 5*r0]
#         v1: f32 = constant(0.0)
#         v2: f32 = maximum(v0, v1)
#         v3: f32 = reduce(sum, v2)
#         buf1[i0] = v3
#     return buf1[5]:1
#
# The body is a flat list of instructions in single-assignment form. There are six kinds:
#
# | instruction | meaning |
# |---|---|
# | `load(buffer, index, mask)` | the element at `index`; 0, without a load, where `mask` is false |
# | `store(buffer, index, value, mode)` | write it; mode `"atomic_add"` accumulates |
# | `reduce(kind, value, index)` | combine `value` over all reduction variables |
# | `index(expr)` | an index expression as an int64 value; as float64, a float argument of the kernel |
# | `indirect(value, symbol, size)` | binds an integer value to a symbol for later indices: a gather |
# | any scalar operation | `add`, `exp`, `where`, `to_dtype`, ... |
#
# Every analysis and every backend is the same call, `replay(body, handler)`: the handler decides what an
# instruction means. Running with numbers, collecting memory dependencies, printing, emitting Triton and
# emitting C++ are five handlers. Inductor's loop IR keeps the Python closure that made the body and calls it
# again for every analysis; a list of instructions is made once, can be printed, and can be compared.

# %%
from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..ch01_graphs.floats import Float
from ..ch01_graphs.graph import Location
from ..ch01_graphs.symbolic import Int, Symbol

# %% [markdown]
# ## Memory
#
# A `Buffer` is named memory with a strided layout. A buffer made by updating another one in place (an input
# that the program mutates, a scatter into zeros) is a *new* name with `alias_of` set: readers of the old name
# must run before the update, readers of the new name after. A `View` names part of a buffer with its own
# layout; views cost nothing, and only graph outputs and library calls need them: inside loops a view is just
# a different index expression.

# %%
@dataclass(frozen=True)
class Layout:
    """Sizes and strides in elements, and the offset of the first element."""

    size: tuple[Int, ...]
    stride: tuple[Int, ...]
    offset: Int = 0


@dataclass
class Buffer:
    """Named memory. `layout.offset` is 0 for buffers that we allocate."""

    name: str
    dtype: torch.dtype
    device: torch.device
    layout: Layout
    alias_of: str | None = None


class View(NamedTuple):
    """A strided window on a buffer: what a library call receives, or what the program returns."""

    buffer: str
    layout: Layout

# %% [markdown]
# ## Instructions
#
# `identity` belongs to the meaning of `reduce`: it is what a reduction of no elements gives, what an
# accumulator starts with, and what a masked lane contributes.

# %%
class Ref(NamedTuple):
    """The result of instruction number `id` of the same body."""

    id: int


class Inst(NamedTuple):
    """One instruction. `args` hold `Ref`s, index expressions, strings, numbers; `dtype` is that of the
    value computed."""

    op: str
    args: tuple
    dtype: torch.dtype | None


Body = tuple[Inst, ...]
IDENTITY = {"sum": 0, "prod": 1, "any": False}       # the kinds of reduction that are defined on no elements


def identity(kind: str, dtype: torch.dtype):
    """The number that changes nothing when it is reduced."""
    if kind in IDENTITY:
        return IDENTITY[kind]
    lowest = kind in ("max", "argmax")
    if dtype.is_floating_point:
        return -math.inf if lowest else math.inf
    if dtype is torch.bool:
        return not lowest
    return torch.iinfo(dtype).min if lowest else torch.iinfo(dtype).max


def replay(body: Body, handler: Any, values: list | None = None) -> list:
    """Interpret `body`: calls `handler.<op>(*args, dtype=...)` per instruction, with each `Ref` replaced
    by what the handler returned for it. Returns the list of results."""
    values = [] if values is None else values
    for op, args, dtype in body:
        operands = [values[a.id] if type(a) is Ref else a for a in args]
        values.append(getattr(handler, op)(*operands, dtype=dtype))
    return values

# %% [markdown]
# ## Nodes of a program
#
# `vars` index the output, `reduction_vars` are folded by `reduce`. Instructions after a `reduce` that use its
# result run once per output element. Whatever has no loop form is an `Extern`: an ATen kernel called on whole
# tensors.

# %%
@dataclass
class Loop:
    """A loop nest over `vars` x `reduction_vars` that writes `outputs` (buffer names)."""

    name: str
    vars: tuple[Symbol, ...]
    reduction_vars: tuple[Symbol, ...]
    body: Body
    outputs: tuple[str, ...]
    location: Location | None = None
    origins: tuple[str, ...] = ()


@dataclass
class Extern:
    """A call of an ATen operator that writes nothing. `args`/`kwargs` are pytrees with `View`s for tensors
    and `Int`s for sizes. `outputs`: one name per tensor result, None where a result is not used or not a
    tensor."""

    name: str
    op: Any
    args: tuple
    kwargs: dict
    outputs: tuple[str | None, ...]
    location: Location | None = None
    origins: tuple[str, ...] = ()


@dataclass
class Program:
    """A lowered graph. `inputs` are buffer or symbol names in call order; `outputs` are `View`s, `Int`s
    or None."""

    inputs: list[str]
    buffers: dict[str, Buffer]
    nodes: list[Loop | Extern]
    outputs: list[View | Int | None]
    symbols: dict[str, Symbol] = field(default_factory=dict)
    numbers: dict[Symbol, Float] = field(default_factory=dict)    # float arguments of kernels, from the host
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    owned: set[str] = field(default_factory=set)    # inputs that nobody else needs after their last use
