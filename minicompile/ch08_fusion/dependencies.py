# %% [markdown]
# # Who touches which memory
#
# Two loops may become one only if nothing observable changes, and everything observable goes through
# memory. So fusion begins with bookkeeping: for each node of the program, which buffers it reads, which it
# writes, and at which index. A loop answers by itself: its `loads` and `stores` carry the
# index expressions. A library call reads the buffers of the `View`s among its arguments, whole.
#
# Three kinds of order must be kept:
#
# - *read after write*: a consumer runs after its producer;
# - *write after read*: an update in place runs after everyone who still wants the old contents;
# - *write after write*: two updates of the same memory keep their order.
#
# Programs are in single-assignment form, so a name is written once. Memory is not: a buffer with `alias_of`
# set is the same memory under a new name. The *root* of a buffer is the name at the end of the `alias_of`
# chain, and the last two kinds of order are questions about roots.

# %%
from typing import Any

import torch

from ..ch01_graphs.symbolic import Int, mul, present
from ..ch07_loops.ir import Buffer, Extern, Loop, Program, View, written_by

# %% [markdown]
# ## Sizes in bytes
#
# The currency of fusion is bytes moved. With dynamic shapes the sizes are expressions; scores only compare, and take
# the sizes of the call that was traced.

# %% tags=["exercise:storage-size"]
def storage_size(buffer: Buffer) -> Int:
    """Elements from the first to the last addressed one, inclusive; 0 for an empty tensor. `buffer.layout` has `size` and
    `stride`, both in elements. Sizes may be symbolic."""
    sizes = buffer.layout.size
    if 0 in sizes:
        return 0
    last: Int = 1
    for size, stride in zip(sizes, buffer.layout.stride):
        last = last + mul(size - 1, stride)
    return last


# %%
def nbytes(buffer: Buffer) -> int:
    """Bytes that the buffer occupies (in the traced call)."""
    if buffer.nbytes is None:
        buffer.nbytes = present(storage_size(buffer)) * buffer.dtype.itemsize
    return buffer.nbytes

# %% [markdown]
# ## The order that must be kept
#
# One sweep in program order finds all edges. `readers[name]` are the nodes that read a name. When an alias
# of it is written, they all come first, and so does the writer of the old name, whose contents the update
# builds on. Calls that draw random numbers keep their order among themselves: the stream of numbers must be
# eager's.

# %% tags=["exercise:dependency-edges"]
def dependency_edges(steps: dict[int, Any], buffers: dict[str, Buffer]) -> dict[int, set[int]]:
    """For each step, the steps that must run before it. Steps are loops, library calls or kernels, by position. A step
    reads the buffers `step.inputs`, and writes `written_by(step)`.

    Before a step runs: the writers of the names it reads; for a name it writes that is an alias, the writers
    and all readers of every earlier name of that memory (the chain of `alias_of`); and if it is a library
    call that `must_happen`, the one before it among those. A step is not before itself."""
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    for i, step in steps.items():
        writer.update((name, i) for name in written_by(step))
        for name in step.inputs:
            readers.setdefault(name, []).append(i)
    before: dict[int, set[int]] = {i: set() for i in steps}
    effects = sorted(i for i, step in steps.items() if isinstance(step, Extern) and must_happen(step))
    for earlier, later in zip(effects, effects[1:]):
        before[later].add(earlier)
    for i, step in steps.items():
        before[i].update(writer[name] for name in step.inputs if name in writer)
        for name in written_by(step):
            old = buffers[name].alias_of
            while old is not None:
                before[i].update(readers.get(old, ()))
                if old in writer:
                    before[i].add(writer[old])
                old = buffers[old].alias_of
        before[i].discard(i)
    return before


# %% [markdown]
# A node may be left out if nobody needs what it writes. The walk goes backwards from the outputs. Memory that
# belongs to an input counts as needed, because the caller will see it, and so does a call that draws random
# numbers, because later draws depend on it, or one that may raise.

# %%
def remove_dead(program: Program) -> list[Loop | Extern]:
    """The nodes whose results are used: by an output, by another live node, or because they write memory that
    someone else owns (an input). Stores to unused outputs of a live loop are left for the kernel to drop."""
    owned = set(program.inputs) | set(program.constants)
    needed = {v.buffer for v in program.outputs if isinstance(v, View)}
    needed |= {name for name, root in program.roots.items() if root in owned and name != root}
    live = []
    for node in reversed(program.nodes):
        writes = written_by(node)
        wanted = any(w in needed for w in writes) or (isinstance(node, Extern) and must_happen(node))
        if not wanted:
            continue
        live.append(node)
        needed.update(node.inputs)
        for w in writes:
            old = program.buffers[w].alias_of
            if old is not None:
                needed.add(old)
    return live[::-1]


def must_happen(node: Extern) -> bool:
    """Does the call do something besides its results: change the state of the random number generator, or raise?"""
    schema = getattr(node.op, "_schema", None)
    if torch.Tag.nondeterministic_seeded in getattr(node.op, "tags", ()):
        return True                                     # it advances the generator
    return node.asked or bool(schema is not None and not schema.returns)
