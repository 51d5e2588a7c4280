# %% [markdown]
# # Equal kernels
#
# A transformer has twelve equal layers, and fusion finds the same kernel twelve times, over other buffers.
# Kernels are therefore compared, and emitted, in a *canonical* form: buffers are called `in0`, `out0`, `tmp0` in
# order of appearance. Kernels with the same canonical form share one compiled function.
#
# An example. The third layer's GELU reads `mm_9` and `b_3` and writes `gelu_3`; the fourth one reads `mm_13` and
# `b_4` and writes `gelu_4`. Both become a kernel that reads `in0` and `in1` and writes `out0`. The second time the
# text is not even generated: the key is known, and the host program calls the first function with the other layer's
# buffers. Without it a model of twelve layers would wait twelve times for g++ or Triton, which take far longer than
# everything before them.
#
# When are two kernels equal? Every difference that shows in the code has to be in the key, and nothing else should
# be. Names are out. Sizes, strides and dtypes are in, since the text contains them. The operations of a body are
# compared one by one, an operand by its place in the body, because the values of two kernels are different objects.
# Constants are compared as text, since equality of numbers is the wrong question: `0.0 == -0.0`, though `1 / x`
# tells them apart, and a NaN is not equal to itself, so that a kernel with one would never be found again. The
# order of buffers is no difference: `a - b` and `b - a` are both `in0 - in1`, called with their buffers in another
# order.
#
# `code_key` is the part without layouts, and lets the caller say what counts of an index. Lists of kernels
# ([`lists.py`](ref:minicompile.ch08_fusion.lists.shape_key)) ask it for kernels that are equal up to their numbers.

# %%
from collections import Counter
from dataclasses import replace
from typing import Any, Callable

from ..ch01_graphs.symbolic import Expr
from ..ch07_loops.ir import Value
from .build import rewrite
from .kernel import Kernel


def canonical_names(kernel: Kernel) -> dict[str, str]:
    """Inputs become in0, in1, ..., outputs out0, ... and local buffers tmp0, ..., counted apart, in that order
    of kinds; a buffer that has a name already keeps it."""
    names: dict[str, str] = {}
    count: Counter[str] = Counter()
    local = [n for n in kernel.buffers if n in kernel.local]
    for kind, members in (("in", kernel.inputs), ("out", kernel.outputs), ("tmp", local)):
        for n in members:
            if n not in names:
                names[n] = f"{kind}{count[kind]}"
                count[kind] += 1
    return names


def canonical(kernel: Kernel, names: dict[str, str]) -> Kernel:
    """The kernel with other buffer names (an alias of a buffer outside is none), and loops called loop0, loop1, ..."""
    buffers = {names[n]: replace(b, name=names[n], alias_of=names.get(b.alias_of)) for n, b in kernel.buffers.items()}
    loops = [replace(loop, name=f"loop{i}", stores=rewrite(loop.stores, {}, names)) for i, loop in enumerate(kernel.loops)]
    return replace(kernel, loops=loops, buffers=buffers, local=frozenset(renamed(kernel.local, names)),
                   inputs=renamed(kernel.inputs, names), outputs=renamed(kernel.outputs, names))


def canonical_key(k: Kernel, names: dict[str, str]) -> tuple:
    """Equal for kernels that compile to the same code. Values are compared by their places in the body, buffers by their
    canonical names, constants as text: 0.0 equals -0.0, and nan differs from itself."""
    layouts = tuple((names[n], b.layout) for n, b in k.buffers.items())
    return k.symbols, layouts, code_key(k, names, lambda e: e)


def code_key(k: Kernel, names: dict[str, str], of_index: Callable[[Any], Any]) -> tuple:
    """The part of `canonical_key` that is code; `of_index` says what is compared of an index or a size."""
    def nest(*variables):
        return tuple((v.name, of_index(v.size)) for v in variables)

    def body(loop):
        place, rows = {v: i for i, v in enumerate(loop.body)}, []
        for v in loop.body:
            args = [repr(v.args)] if v.op == "constant" else \
                [place[a] if type(a) is Value else of_index(a) if type(a) is Expr else a for a in v.args]
            if v.op in ("load", "store"):
                args[0], args[1] = names[v.buffer], of_index(v.index)
            rows.append((v.op, v.dtype, *args))
        return tuple(rows)

    return (k.device, nest(*k.vars), nest(*k.reduction_vars), len(k.walked), renamed(k.inputs, names), renamed(k.outputs, names),
            tuple((names[n], names.get(b.alias_of), n in k.local, b.dtype, b.device) for n, b in k.buffers.items()),
            tuple((nest(*l.vars), nest(*l.reduction_vars), body(l)) for l in k.loops))


def renamed(buffers, names: dict[str, str]) -> tuple[str, ...]:
    return tuple(names[n] for n in buffers)
