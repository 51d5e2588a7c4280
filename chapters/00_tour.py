# %% [markdown]
# # A tour: one function through every stage
#
# This page takes a single function through the whole compiler and shows what it looks like after each
# stage. Nothing is explained to the end here. Each stop names the chapter that does so.
#
# Four words first. An *operator* is a function of PyTorch's library, ATen: a matrix product, an addition.
# A *kernel* is machine code that loops over the elements of tensors, started by one call. A *graph* is a
# list of operator calls in which each line names the lines whose results it uses. *Lowering* replaces what
# should be done by how to do it, in several steps: graph, loops, kernels.
#
# The function is the second half of a transformer block, cut down to what is interesting: a normalisation,
# a branch on an ordinary Python value, a matrix product, an activation, a residual connection.

# %%
import dis

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import minicompile
from chapters._lib import Table, bars, best_time, draw_fx, folded, head, measured, watch


# %%
def half_block(x, w, scale):
    h = F.layer_norm(x, (64,))
    if scale is not None:
        h = h * scale
    return x + F.gelu(h @ w)


torch.manual_seed(0)
x = torch.randn(256, 64)
w = torch.randn(64, 64, requires_grad=True)

# %% [markdown]
# ## What there is to gain
#
# Eager PyTorch executes one operator after the other. PyTorch lets us listen at its dispatcher, below which
# the kernels are: which operators run, and how many bytes do they read and write?


# %%
class Listen(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        touched = [t for t in (*args, *(out if isinstance(out, tuple) else [out])) if isinstance(t, torch.Tensor)]
        moved = sum(t.numel() * t.element_size() for t in touched)
        self.total = getattr(self, "total", 0) + moved
        print(f"{str(operator):32}{moved / 1e3:6.0f} kB")
        return out


with torch.no_grad(), Listen() as listening:
    half_block(x, w, 0.5)
needed = sum(t.numel() * t.element_size() for t in (x, w, x))
print(f"\nmoved {listening.total / 1e3:.0f} kB; the arguments and the result are {needed / 1e3:.0f} kB")

# %% [markdown]
# Except for the matrix product, each operator does next to no arithmetic: its time is that of reading its
# operands and writing its result, and of being called. Most of that traffic is between neighbours. One
# operator writes 66 kB that the next one reads. If both were one kernel, the values would stay in
# registers. To write such kernels for every combination of operators by hand is hopeless, so a compiler
# has to do it, and for that it needs the whole list of operators before the first of them runs. Python
# does not give such a list away: it is a program, with branches and side effects.
#
# Compile the function, call it once, and compare with what PyTorch computes. `watch` does exactly that,
# and keeps what the stages report on the way; the rest of the page looks into it.

# %%
seen = watch(half_block, x, w, 0.5)
print("largest difference from eager:", (seen.result - half_block(x, w, 0.5)).abs().max().item())

# %% [markdown]
# ## 1. Bytecode
#
# A compiler for PyTorch programs meets a function that is already running. What it can get hold of is the
# bytecode that CPython would execute: instructions for a machine with a stack. The branch is a `POP_JUMP`,
# the tensors are nameless objects on the stack, and nothing says which call is a matrix product.

# %%
for i in dis.get_instructions(half_block):
    if i.opname not in ("RESUME", "CACHE", "PRECALL", "PUSH_NULL"):
        print(f"{i.offset:4}  {i.opname:28}{i.argrepr}")

# %% [markdown]
# ## 2. The captured graph
#
# A second implementation of that stack machine, written in Python, runs these instructions on *values* in
# the place of objects. `scale` is the number 0.5, so the branch has one way out and disappears. A tensor
# operation does not compute; it writes a line into a graph. The right-hand comments are the user's lines:
# each node remembers where it came from, and will do so until it is a line of C++. ([Chapter
# 3](chapter:03); [`interpreter.run_instructions`](ref:minicompile.ch03_capture.interpreter.run_instructions))

# %%
from minicompile.ch01_graphs.graph import print_graph

graph = seen.graphs[0]
print(print_graph(graph))

# %%
draw_fx(
    graph,
    "The captured graph: x goes through layer_norm, mul, a matmul with w, gelu, and is added to itself.",
)

# %% [markdown]
# ## 3. Guards
#
# That graph is right for tensors of these shapes and for `scale == 0.5`. Everything the capture relied on
# becomes a guard, and all guards become one generated function. A later call runs it first; if it passes,
# the graph may be used again without looking at the bytecode. ([Chapter 2](chapter:02))

# %%
found = minicompile.explain(half_block, backend="eager")(x, w, 0.5)
for guard in found.guards:
    print(guard)

# %% [markdown]
# ## 4. The compiled function
#
# Guards and graph together are one ordinary Python function. No bytecode is assembled; Python compiles this text. (Names
# that begin with two underscores are the compiler's own.) The `try` block is the check. Each of its lines is a guard from
# the list above, or one of two memos, `__stable` and `__tensors`, which answer for many guards at once. Where a guard
# does not hold, `raise __Miss` ends the check, and the last line asks the next version, or the compiler. If all
# hold, `__graph` runs, which is the compiled graph. (If it raises an error that the program itself would raise, `__EVALUATE` leaves
# the call to CPython, so that the error comes from the program's own line.) [Chapter 2](chapter:02) reads such a text line by line.

# %%
text = seen.entry_text()
print(folded(text[text.index("def __compiled_half_block") :]))

# %% [markdown]
# ## 5. The joint graph
#
# `w` requires a gradient. Autograd would build its graph while the program runs; a compiler wants it
# before. So the captured graph is run on tensors without data, PyTorch's own autograd engine is asked for
# the gradient, and every operator that it calls on the way, forward or backward, is written down. The
# result is one graph of ATen operators that takes the inputs and a *tangent* (the gradient of the output)
# and returns the output and the gradient of `w`. ([Chapter 5](chapter:05))

# %%
from minicompile.ch05_autograd.joint import simplify, trace_joint

fakes = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
joint = trace_joint(graph, fakes)
print(print_graph(joint.gm))

# %% [markdown]
# ## 6. Primitives
#
# `native_layer_norm` and `gelu` are large operators. A table rewrites everything in terms of a few
# primitives. What was one call is now visible arithmetic, which can be fused with its neighbours. ([Chapter
# 6](chapter:06))

# %%
from minicompile.ch06_decompositions.decompose import decompose
from minicompile.ch06_decompositions.primitives import PRIMITIVES

before = sum(n.op == "call_function" for n in joint.gm.graph.nodes)
simplify(joint, decompose)
after = sum(n.op == "call_function" for n in joint.gm.graph.nodes)
aten = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
print(f"{len(aten):,} operators (overloads counted) in PyTorch's library, {len(PRIMITIVES)} primitives")
print(f"{before} operators became {after} primitives\n")
head(print_graph(joint.gm), 24)

# %% [markdown]
# ## 7. Two graphs
#
# The joint graph is cut in two, because forward runs now and backward runs later. What should be carried
# from one to the other? Saving costs memory traffic, computing again costs arithmetic. A minimum cut weighs
# them. Here it saves the two tensors that a matrix product reads or writes, and nothing of the
# normalisation or of the activation: those are computed again inside of the backward kernel.

# %%
from minicompile.ch05_autograd.partition import partition

halves = partition(joint)
print("saved for backward:", halves.saved)

# %% [markdown]
# ## 8. Loops
#
# An operator says *what* is computed. To put two operators into one kernel one has to know *how*: which
# element of which buffer goes into which element of the result. So each operator becomes a loop nest with a
# body for one element. The matrix product does not; libraries are better at it, and it stays a call. Views
# have no code at all, they are index expressions. ([Chapter 7](chapter:07))
#
# This is how to read the text. `for i0 < 256 reduce r0 < 64` is two nested loops: the outer one makes a result for each
# `i0`, and the inner one folds the values of all `r0` into it. `x[64*i0 + r0]` is the element of `x` at that distance
# from the first one. `welford` is a way of finding mean and variance in one walk along the row. It keeps three numbers:
# the mean so far, the sum of the squared distances from it, and the count. `get` takes one of them, by number. In the
# line of the product, each operand has its shape in brackets and its strides behind the colon: `buf2[256, 64]:64,1` has
# rows of 64 elements, 64 elements apart.

# %%
from minicompile.ch07_loops.verify import print_program

forward = seen.half("forward")
print(print_program(forward["program"]))

# %% [markdown]
# ## 9. Fused kernels
#
# `loop0` computes mean and variance of a row, `loop1` reads the row again and normalises it. Apart, the
# statistics make a round trip through memory. Together they stay in registers. Each pair that shares data
# was considered, and each decision has its reason. ([Chapter 8](chapter:08))
#
# The bytes are those that the pair would not have to move. `loop0` writes 256 means and 256 variances, 2,048 bytes, and
# `loop1` reads them: 4,096 bytes. Both loops also read `x`, 65,536 bytes, and one of the two readings would do if both
# loops came to the same element at the same time. Since that is not known before it has been tried, it counts half:
# 32,768. Together that is the 36,864 of the second line. `vertical` means that one loop reads what the other writes,
# and `buf0, buf1` are what.

# %%
from chapters._lib import draw_fusion

for d in forward["schedule"].decisions:
    print(f"{'fused' if d.accepted else 'apart'}  {d.a} with {d.b} ({d.score:,} bytes): {d.reason}")
draw_fusion(forward["program"], forward["schedule"], "Fusion of the forward graph.")

# %% [markdown]
# ## 10. C++ and Triton
#
# The same kernel for two machines. For a CPU: a loop nest with `omp simd` on the innermost loop ([chapter
# 10](chapter:10)). For a GPU: a Triton program in which one instance handles a block of rows ([chapter
# 9](chapter:09)). This page is built without a GPU; the Triton text is generated all the same, since
# generating needs no device.
#
# Both walk along a row twice. The C++ puts the row into a small array, in which a function of ours, `mc_row_welford`, finds
# the mean and the squared distances. Then it loads the row once more and normalises it. In the Triton text the row is a
# *tile*, a block of values that stays in registers, and each walk is a few operations on the whole tile. The comments are
# the user's lines.

# %%
from chapters._lib import Listings
from minicompile.ch09_triton.emit import emit_triton

kernel = forward["schedule"].steps[0]
Listings([("C++", forward["compiled"].sources[0].code), ("Triton", emit_triton(kernel).code)])

# %% [markdown]
# ## 11. The host program
#
# Somebody has to allocate buffers and call the kernels in order. That program is generated too, one line a
# step, with every decision made in advance: when to free, whose memory to take over. ([Chapter
# 11](chapter:11))

# %%
print(forward["compiled"].source)
print(seen.half("backward")["compiled"].source)

# %% [markdown]
# In the backward program a line ends in *takes over its memory*. A saved activation that
# nothing else needs is overwritten with the gradient.
#
# ## 12. How long does it take?
#
# Two figures. First this function, on the CPU that built this page, one thread. It is small, so a good part
# of each bar is the cost of calling anything at all.

# %%
compiled = minicompile.compile(half_block)
with torch.no_grad():
    eager_s, ours_s = best_time(half_block, x, w, 0.5, repeat=200), best_time(
        compiled, x, w, 0.5, repeat=200
    )
bars(
    [("eager", eager_s * 1e6, "plain"), ("compiled", ours_s * 1e6)],
    "us",
    "Time of one call of half_block.",
    form="{:.0f}",
)

# %% [markdown]
# Then a whole training step of a small GPT on an H100: the character-level nanoGPT, measured by `python -m
# minicompile bench nanogpt`: forward, backward, clipping and optimizer.

# %% tags=["gpu-result", "results:h100-nanogpt"]
rows = [
    (name, r["ms"], {"e": "plain", "m": "compute", "t": "library"}[name[0]])
    for name, r in measured("h100-nanogpt").items()
]
bars(
    rows,
    "ms",
    "Milliseconds per training step of nanoGPT on an H100.",
    "Median of one run; lower is better.",
    form="{:.2f}",
)

# %% [markdown]
# And compile time. Where does it go? `explain` measures each stage of a fresh compilation.

# %%
found = minicompile.explain(half_block)(x, w, 0.25)
Table(["stage", "milliseconds"], [(stage, f"{1000 * t:.1f}") for stage, t in found.seconds.items()])

# %% [markdown]
# The stages add up to less than the call. What is left is the C++ compiler and the first run. The emit
# stage only starts it.
#
# ## What torch.compile does differently
#
# The stages are the same, and so is their order. The names differ: TorchDynamo is chapters 2 to 4, AOTAutograd is
# chapter 5, TorchInductor is chapters 6 to 11, and compiled autograd and compiled optimizers are chapter 12.
# [A map](../internals_map.html) pairs its parts with ours, and [a glossary](../glossary.html) explains the terms. The
# largest difference is size. The other recurring one is that this compiler writes Python text and lets Python compile
# it where torch.compile assembles bytecode.
#
# ## Read on
#
# The chapters follow the running example, a GPT block with attention, which is larger than the function
# above. Every chapter ends with exercises in which your own function takes the place of ours in the
# compiler.
#
# <!-- exercises -->
#
# Further reading: J. Ansel and others, *PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode
# Transformation and Graph Compilation* (ASPLOS 2024), is the paper on the original.
