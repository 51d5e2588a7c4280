# %% [markdown]
# # Decompositions: three thousand operators, and few enough
#
# PyTorch has an operator for everything, with variants for every overload, and backward operators beside
# them. A compiler that must generate code for each will never be finished. This chapter rewrites a graph
# until only *primitives* are left.
#
# The smallest version of this stage is [part 6 of tiny](chapter:tiny.6), the compiler in one file.

# %%
import collections

import torch
import torch.nn.functional as F

import minicompile
from chapters._lib import Table, bars, best_time, example, watch
from minicompile.ch01_graphs.fake import FakeMode
from minicompile.ch01_graphs.graph import print_graph
from minicompile.ch01_graphs.trace import trace
from minicompile.ch06_decompositions.decompose import Decomposed, decompose
from minicompile.ch06_decompositions.primitives import PRIMITIVES
from minicompile.ch06_decompositions.table import TABLE

# %%
every = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")]
kinds = collections.Counter(p.category for p in PRIMITIVES.values())
print(f"{len(every):,} ATen operators, overloads counted; {len(TABLE)} of them have a decomposition here")
Table(["primitives", "number"], [*kinds.items(), ("all", len(PRIMITIVES))])

# %% [markdown]
# The rest of the three thousand are variants with an `out` argument or in place, which [chapter
# 5](chapter:05) has rewritten; compositions that come apart by PyTorch's own definition; and operators that
# are left to library calls.
#
# ## The naive version: the formula from the textbook
#
# A decomposition is a formula. Here are two, as one finds them in any book.


# %%
def softmax(x):
    return torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)


def gelu(x):
    return x * 0.5 * (1 + torch.erf(x * 0.7071067811865476))


x = torch.tensor([1.0, 2.0, 90.0])
print("softmax:", softmax(x).tolist(), " eager:", F.softmax(x, -1).tolist())
half = torch.linspace(-4, 4, 4001).bfloat16()
wrong = (gelu(half).float() - F.gelu(half).float()).abs()
print(f"gelu in bfloat16: {int((wrong > 0).sum())} of {len(half)} elements differ from eager,", end=" ")
print(f"by up to {wrong.max().item():.4f}")

# %% [markdown]
# The first overflows. Subtracting the maximum of the row helps; every library does it. The second is
# subtle: each operation rounds to 8 bits of precision, five times in all, where eager's kernel computes in
# float32 and rounds once. A model trained with the first version has another loss curve, and nobody finds
# out why.
#
# So a decomposition must agree with eager's *kernel*, not with the formula: its accumulation type, its
# treatment of NaN and of empty tensors, its result strides, the dtype it promotes to. The one for GELU says
# `float32=True`, which widens the operand and rounds the result:
#
# %show minicompile.ch06_decompositions.activations.gelu

# %%
with Decomposed():
    ours = F.gelu(half)
apart = (ours.float() - F.gelu(half).float()).abs()
print("decomposed:", int((apart > 0).sum()), f"elements differ, by at most {apart.max().item():.2g}")

# %% [markdown]
# What is left are values so close to the middle between two bfloat16 numbers that the last bit of the error
# function decides. Eager's kernel and the primitive `erf` do not share that bit.

# %% [markdown]
# ## The idea: run the formula instead of the operator
#
# There is no pattern to match and no graph to edit. The graph is executed on fake tensors under the
# recorder of [chapter 1](chapter:01). When a call has a decomposition, the recorder runs that in its place,
# and records what *it* calls. If that calls something with a decomposition, the same happens again.
#
# %show minicompile.ch06_decompositions.decompose.expand
#
# A decomposition is ordinary PyTorch, so it can be run on its own, on real tensors: `Decomposed` above is
# such a mode. That is how the table is tested, against PyTorch's own database of sample inputs.

# %%
mode = FakeMode()


def norm(x, weight):
    return [F.layer_norm(x, (64,), weight)]


graph = trace(norm, [mode.from_real(torch.randn(8, 64)), mode.from_real(torch.randn(64))], ["x", "weight"])
print(print_graph(graph), "\n")
print(print_graph(decompose(graph)))

# %% [markdown]
# %show minicompile.ch06_decompositions.normalization.native_layer_norm
#
# ## Where to stop
#
# Addition can be written with subtraction, `tanh` with `exp`, a matrix product as a multiplication and a
# sum. Fewer primitives would make the later stages smaller. Two forces stop it.

# %%
small = torch.tensor([1e-5], dtype=torch.float32)
by_exp = (torch.exp(2 * small) - 1) / (torch.exp(2 * small) + 1)
print(f"tanh(1e-5): {torch.tanh(small).item():.8e}; written with exp: {by_exp.item():.8e}")

a, b = torch.randn(128, 128), torch.randn(128, 128)
library = best_time(torch.mm, a, b)
by_sum = best_time(lambda: (a[:, :, None] * b[None]).sum(1), repeat=5)
bars(
    [("mm", library * 1e3), ("multiply and sum", by_sum * 1e3, "bad")],
    "ms",
    "A product of two 128x128 matrices.",
    form="{:.3f}",
)

# %% [markdown]
# Precision stops the first, speed the second. A primitive is what can neither be written with others
# without a loss, nor is better opened up. Matrix products, convolutions and attention are primitives that
# the compiler never opens.
#
# What about those that *are* opened? Are they not faster as one kernel, too? Without fusion they are:

# %%
block, inputs = example(batch=8, length=64)
rows = []
with torch.no_grad():
    for backend in ("aot_eager", "decomposed", "cpp"):
        minicompile.reset()
        compiled = minicompile.compile(block, backend=backend)
        rows.append(
            (
                backend,
                best_time(compiled, inputs, repeat=40) * 1e6,
                "bad" if backend == "decomposed" else "compute",
            )
        )
bars(rows, "us", "Time of the GPT block, forward, on three rungs of the ladder.", form="{:,.0f}")

# %% [markdown]
# The rung `decomposed` runs the primitives one by one. It takes apart what eager has as one kernel and puts
# nothing together again. It is there for debugging: if its numbers are wrong and those of `aot_eager` are
# right, the table has a bug. The gain comes from the chapters that follow.
#
# ## The running example
#
# The joint graph of the block, before and after:

# %%
from minicompile.ch05_autograd.joint import trace_joint

captured = watch(block, inputs, backend="eager").graphs[0]
joint = trace_joint(captured, [n.meta["val"] for n in captured.graph.nodes if n.op == "placeholder"])
before = collections.Counter(
    n.target.overloadpacket.__name__
    for n in joint.gm.graph.nodes
    if isinstance(n.target, torch._ops.OpOverload)
)
after_graph = decompose(joint.gm)
after = collections.Counter(
    n.target.overloadpacket.__name__
    for n in after_graph.graph.nodes
    if isinstance(n.target, torch._ops.OpOverload)
)
print(f"{sum(before.values())} operators of {len(before)} kinds became", end=" ")
print(f"{sum(after.values())} of {len(after)} kinds\n")
gone = {op: n for op, n in before.items() if op not in after}
new = {op: n for op, n in after.items() if op not in before}
print("taken apart:", gone)
print("new:        ", new)

# %% [markdown]
# More operators, of fewer and simpler kinds. Common subexpressions are merged on the way: forward and
# backward of GELU both compute the error function, and after decomposition that is visible. Before, it was
# hidden in two operators:

# %%
print("erf in the formula of gelu: 1, of gelu_backward: 1, in the graph:", after["erf"])

# %% [markdown]
# What remains are primitives or declared library calls; a checker says so in tests and in debug mode:
#
# %show minicompile.ch06_decompositions.decompose.violations
#
# ## What torch.compile does differently
#
# It has several tables: the core ATen decompositions, Inductor's own, and `torch._refs`, a rewriting of
# most of PyTorch in Python over `prims`, a second operator set below ATen. A backend can choose its own
# table, and `torch.export` another. We keep one vocabulary, ATen overloads, so that every graph at every
# stage is runnable PyTorch. torch.compile decomposes while it traces the joint graph; we do it afterwards,
# but before the graph is cut in two, so that both see the same operators. Its table is larger, and some of
# its entries depend on the backend's hardware.
#
# ## Exercises
#
# <!-- exercises -->
#
# ## Further reading
#
# - N. Higham, *Accuracy and Stability of Numerical Algorithms* (2002), chapters 1 and 4.
# - *Core ATen IR* and *Prims IR*, in PyTorch's documentation of its IRs.
# - M. Milakov, N. Gimelshein, *Online normalizer calculation for softmax* (2018).
# - J. L. Ba and others, *Layer Normalization* (2016).
