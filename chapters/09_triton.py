# %% [markdown]
# # Triton: kernels for a GPU
#
# A GPU runs thousands of threads in blocks. Triton is a language in which one writes the program of a
# *block*, on tiles of data, and leaves threads, shared memory and synchronisation to its compiler. So it is
# the natural target for a loop nest: choose the tile, print the body. This page is built without a GPU.
# Kernels are generated all the same, and they run in Triton's interpreter, which executes a program block
# by block on the CPU.

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

import torch
import torch.nn.functional as F

import minicompile
from chapters._lib import Listings, Table, example, head, measured, tidy, watch
from minicompile.ch08_fusion.kernel import Kernel
from minicompile.ch09_triton.emit import emit_triton

# %% [markdown]
# ## The naive version: one program per element
#
# Number the elements, start one program for each. The template takes ten lines:


# %%
def naive_triton(name, inputs, expression):
    loads = "\n".join(f"    {n} = tl.load({n}_ptr + i)" for n in inputs)
    pointers = ", ".join(f"{n}_ptr" for n in inputs)
    return f"""@triton.jit
def {name}({pointers}, out_ptr):
    i = tl.program_id(0)
{loads}
    tl.store(out_ptr + i, {expression})
"""


print(naive_triton("scaled", ["x", "y"], "x * 2 + y"))

# %% [markdown]
# It is right, and it wastes the machine. A GPU executes 32 threads in lockstep and reads memory in pieces
# of 32 bytes and more. A program that handles one float uses one lane of 32 and one float of what was
# fetched. So a program must handle a *block* of neighbours: then a hundred questions follow. How large?
# What if the size is not a multiple? Which of several dimensions are neighbours? What about a sum along a
# row of 50,000?
#
# ## The idea: axes and tiles
#
# Each dimension of the kernel becomes an *axis*, and each axis is cut into blocks. A value varies along
# some of the axes, and that is all one needs to know to print it: its tile has a block's length along these
# and 1 along the others. Broadcasting does the rest, as in NumPy.


# %%
def kernels_of(function, *args):
    """The fused kernels of a function, forward."""
    return [
        s
        for s in watch(function, *args, backend="loops", dynamic=False).half()["schedule"].steps
        if isinstance(s, Kernel)
    ]


def scaled(x, y):
    return x * 2 + y


(kernel,) = kernels_of(scaled, torch.randn(1000), torch.randn(1000))
source = emit_triton(kernel)
print(tidy(source.code))
print(
    "block sizes",
    source.options["constants"],
    " grid",
    source.options["grid"],
    " warps",
    source.options["num_warps"],
)

# %% [markdown]
# `xmask` switches off the lanes behind the end, because 1000 is not a multiple of the block. For 1024
# elements there is none. What a division would cost at run time is settled when the code is written:

# %%
(kernel,) = kernels_of(scaled, torch.randn(1024), torch.randn(1024))
print("is there a mask?", "xmask" in emit_triton(kernel).code)

# %% [markdown]
# ## Two shapes of memory access
#
# When all operands are walked in the same order, one flat axis is best, however many dimensions the tensors
# have. When they are not, as in `x + y.t()`, either order makes one of them jump. Then there are two axes
# and a tile that is a piece of both:


# %%
def straight(x, y):
    return x + y


def across(x, y):
    return x + y.t()


(flat,) = kernels_of(straight, torch.randn(256, 256), torch.randn(256, 256))
(crossed,) = kernels_of(across, torch.randn(256, 256), torch.randn(256, 256))
Listings([("x + y", emit_triton(flat).code), ("x + y.t()", emit_triton(crossed).code)])

# %% [markdown]
# Which axes there are is decided by looking at the strides of every access:
#
# %show minicompile.ch09_triton.tiling.choose_axes
#
# ## Reductions: hold the row or walk it
#
# A row that fits into registers is loaded once, and everything happens to it there: maximum, exponentials,
# sum, division. This is the *persistent* form. A longer row is walked in a loop, and for a softmax twice,
# with the maximum and the sum of the first walk computed online, in one pass.


# %%
def rows(x):
    return torch.softmax(x, 1)


(short,) = kernels_of(rows, torch.randn(64, 500))
(long,) = kernels_of(rows, torch.randn(64, 50000))
Listings([("rows of 500", emit_triton(short).code), ("rows of 50,000", emit_triton(long).code)])

# %% [markdown]
# The choice, and the sizes of blocks, are made by rules with numbers measured on an H100. They are not a
# search; `alternatives` lists what a search would try.
#
# %show minicompile.ch09_triton.heuristics.reduction
#
# ## Does it compute the same?
#
# In the interpreter each program runs in Python, with NumPy arrays as tiles. Slow, and exact enough to find
# a missing mask.

# %%
x = torch.randn(6, 40)
for function in (rows, lambda x: x + x.sum(0), lambda x: F.gelu(x).t() * 2):
    ours = minicompile.compile(function, backend="triton")(x)
    print("largest difference from eager:", (ours - function(x)).abs().max().item())

# %% [markdown]
# ## From text to a launch
#
# Triton is a large package to import, and it compiles kernel by kernel. So one separate process imports it
# once and forks for each kernel, and the user's process never imports it (except here, to interpret). A
# launch through Triton's own Python code inspects its arguments at every call. Ours goes through a small C
# function that knows the address of the kernel and packs the arguments:
#
# %show minicompile.ch09_triton.launch.make_callable
#
# ## The running example
#
# The kernels of the GPT block as Triton text. This is the one that adds the attention's result to the
# residual stream and normalises it for the perceptron:

# %%
block, x = example()
seen = watch(block, x)
forward = [s for s in seen.half("forward")["schedule"].steps if isinstance(s, Kernel)]
sources = [emit_triton(k) for k in forward]
head(max((s.code for s in sources), key=len), 50)

# %%
Table(
    ["kernel", "blocks", "grid", "warps", "lines"],
    [
        (
            s.name[:48],
            s.options["constants"],
            s.options["grid"],
            s.options["num_warps"],
            len(s.code.splitlines()),
        )
        for s in sources
    ],
)

# %% [markdown]
# ## Measured
#
# On an H100: milliseconds per training step. In each row the matrix products, attention, convolutions and
# the optimizer are the same library kernels. What differs is the generated kernels, and the host ([chapter
# 11](chapter:11)).

# %% tags=["gpu-result", "results:h100-nanogpt", "results:h100-gpt2", "results:h100-resnet50"]
table = []
for name in ("h100-nanogpt", "h100-gpt2", "h100-resnet50"):
    rows = measured(name)
    eager, ours, theirs = (rows[c] for c in ("eager", "minicompile", "torch"))
    table.append(
        (
            name.removeprefix("h100-"),
            *(f"{r['ms']:.2f}" for r in (eager, ours, theirs)),
            f"{eager['ms'] / ours['ms']:.2f}x",
            *(r["kernels"] for r in (ours, theirs)),
        )
    )
header = ["work, bf16", "eager", "minicompile", "torch.compile", "over eager", "our kernels", "its kernels"]
Table(header, table)

# %% [markdown]
# Fewer kernels is not the aim. Inductor fuses a GPT into fewer of them and takes slightly longer; what
# counts is the bytes that go through memory. ResNet-50 gains most: between its convolutions stand batch
# norms, ReLUs and additions, which are memory traffic and little else.

# %% [markdown]
# ## What torch.compile does differently
#
# Inductor's Triton backend prints from the same kind of information. It can tune block sizes by measuring
# (`coordinate_descent_tuning`, `max_autotune`), generates matrix products and attention from templates with
# fused epilogues, and can use tensor descriptors and cooperative reductions across blocks. It decides
# between persistent and looped reductions by a limit on the row length, as we do. Its launcher is generated
# Python per kernel, or C++ with `cpp_wrapper`.
#
# ## Exercises
#
# <!-- exercises -->
#
# ## Further reading
#
# - P. Tillet, H. T. Kung, D. Cox, *Triton: An Intermediate Language and Compiler for Tiled Neural Network
#   Computations* (2019).
# - M. Milakov, N. Gimelshein, *Online normalizer calculation for softmax* (2018).
# - M. Harris, *Optimizing Parallel Reduction in CUDA* (2007).
# - J. K. Salmon and others, *Parallel Random Numbers: As Easy as 1, 2, 3* (2011), on Philox.
