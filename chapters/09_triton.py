# %% [markdown]
# # Triton: kernels for a GPU
#
# The scheduler of [chapter 8](chapter:08) decided which loops share a kernel. This chapter writes the kernel.
# For a GPU that is a text in Triton, a language in which one writes the program of a *block* of threads, on
# *tiles* of data, and leaves threads, shared memory and synchronisation to its compiler.
#
# Three questions have to be answered before a line can be printed: which elements does one program handle,
# what happens at the ends, and how does a row of fifty thousand elements become one number? Each has a naive
# answer, and on this machine naive answers cost a factor of ten or a hundred.
#
# The page is built without a GPU. Kernels are generated all the same, they run in Triton's interpreter, and further
# down you can step through one. What a GPU measured is marked as such.

# %% tags=["fold"]
import dataclasses
import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

import numpy as np
import torch
import torch.nn.functional as F

import minicompile
from chapters import tiny
from chapters._lib import Listings, Table, drawing, example, kernel_walk, lines, measured, results, row_of_boxes, run_statements, watch
from minicompile.ch08_fusion.kernel import Kernel
from minicompile.ch09_triton.emit import emit_triton
from minicompile.ch09_triton.heuristics import Config

# %% [markdown]
# ## The machine, in four numbers
#
# An H100 has 132 *multiprocessors*. Each runs *warps*, groups of 32 threads that execute the same instruction
# at the same time. Its memory delivers about 3.35 TB a second, in pieces of 32 bytes and more, and a piece
# arrives about 600 ns after it was asked for. Arithmetic is nearly free beside that: in the time that one
# number takes to arrive a thread could do several hundred multiplications.
#
# So a kernel of a neural network, apart from its matrix products, is a problem of moving bytes, and there are
# two ways to waste them. One is to fetch a piece and use a part of it: neighbouring threads have to read
# neighbouring addresses. The other is to ask for too little at a time. How much has to be on its way at any
# moment, so that the memory is never idle? As much as it delivers in the time that one request takes: 3.35
# TB/s times 600 ns, which is 2 MB, or 15 kB for each multiprocessor. (This is Little's law; it holds for
# queues of people as well.)

# %% tags=["fold"]
row_of_boxes(
    [
        ("memory", "80 GB, 3.35 TB/s", "saved"),
        ("cache, L2", "50 MB, shared", "library"),
        ("multiprocessor", "132 of them", "compute"),
        ("warp", "32 threads in step", "compute"),
        ("registers", "255 a thread", "input"),
    ],
    "From memory through the shared cache to a multiprocessor, its warps, and their registers.",
    "What a byte passes on its way to the arithmetic, on an H100.",
)

# %% [markdown]
# ## The naive version: one program per element
#
# Number the elements, and start one program for each. The template takes ten lines:


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
# It is right, and it wastes the machine in both ways. A program runs in at least one warp, so 31 of 32
# threads do nothing, and each program asks for eight bytes and waits. Here is what an H100 makes of `x * 2 +
# y` on 67 million elements when a program handles more and more of them:

# %% tags=["gpu-result", "results:h100-curves", "fold"]
curve = {}
for point in results("h100-curves")["pointwise"]:
    curve[point["block"]] = max(point["gbs"], curve.get(point["block"], 0))
lines(
    {"x * 2 + y": [(np.log2(block), gbs) for block, gbs in sorted(curve.items())]},
    "elements per program, as a power of two",
    "GB/s",
    "Bandwidth of a pointwise kernel by the number of elements per program, from 1 to 8192.",
    "Bytes that are read and written per second, on an H100. One element per program is at the left.",
)

# %% [markdown]
# One element per program moves 20 GB/s, less than a processor does. 32 elements move 32 times as much, since they take no
# longer. Up to 128 each doubling of the block doubles what is on its way, and with it the bytes per second. From 256 on the
# memory is busy, at 3 TB/s, and larger blocks gain nothing. (Blocks of 4096 and 8192 were measured with 16 warps only. Why
# 4096 is slower than its neighbours on both sides, this measurement does not say.) The compiler takes 1024 for a tensor
# of this size, with four warps, which is eight elements a thread. It takes fewer where the tensor is so small that some
# multiprocessors would get no program at all, and where a kernel has many operands, each of which needs registers:
#
# %show minicompile.ch09_triton.heuristics.pointwise_config
#
# ## The smallest version that works: rows and columns
#
# A program that handles a *block* of elements needs a way to say so. In Triton a value is a *tile*, and an
# operation on tiles works on all their elements, with the broadcasting that you know from NumPy. [Part 10 of
# tiny](chapter:tiny.10), the compiler in one file, gives every kernel the same two dimensions. A program handles
# some rows and some columns, and all that happens to these elements. Here is its softmax of 64 rows of 48 numbers:


# %%
def rows_of(x):
    return torch.softmax(x, 1)


def smallest(function, *args):
    """tiny's kernels and calls for a function: texts of kernels, names of library functions."""
    steps, _ = tiny.fused(tiny.decompose(tiny.record(function, *args)))
    return [tiny.triton_kernel(s, {s.loops[-1].node}).text if s.loops else s.call.target._schema.name for s in steps]


print(smallest(rows_of, torch.randn(64, 48))[0])

# %% [markdown]
# Read it from the top. `pid` is the number of this program. `r` is a tile of row numbers. `tl.arange(0, 32)` gives
# 0 to 31, and `[:, None]` stands them up as a column, 32 by 1. `c` is a tile of column numbers that lies down, 1 by
# 64. Tiles have to be powers of two, so 64 columns are more than the 48 that exist. `row` and `column` say which of
# the numbers are real.
#
# `48 * r + c` is the address of an element. The column and the row of numbers are broadcast, so this is a tile of
# 32 by 64 addresses, and `tl.load` fetches all of them. The mask `row & column` says which ones it may touch.
# `tl.reduce` folds each row of the tile into one number. A lane behind the end of a row takes part in that, so it
# must contribute something that changes nothing: minus infinity for a maximum, zero for a sum. What is left is
# arithmetic, written as for numbers. The row stays in registers from the load to the store, which is what fusion
# was for.
#
# Why 32 rows? Because 32 times 64 is 2048, and tiny gives every program about as many elements. It decides nothing
# else. So this is where it stops:

# %%
def columns_of(x):
    return x.exp().sum(0)


def scheduled(function, *args):
    steps = watch(function, *args, backend="loops", dynamic=False).half()["schedule"].steps
    return ["@triton" if isinstance(step, Kernel) else str(step.op) for step in steps]


cases = {"softmax of rows of 48": (rows_of, torch.randn(64, 48)), "softmax of rows of 50,000": (rows_of, torch.randn(4, 50_000)),
         "sums of columns": (columns_of, torch.randn(64, 48))}


def counted(made):
    kernels = sum(text.startswith("@triton") for text in made)
    return f"{kernels} of our kernels, {len(made) - kernels} of the library's"


Table(["program", "tiny", "minicompile"], [(name, counted(smallest(*case)), counted(scheduled(*case))) for name, case in cases.items()])

# %% [markdown]
# A row of 50,000 numbers does not fit into the registers of a program, so tiny lets the library compute the maximum
# and the sum, and the exponentials travel through memory three times. A sum over columns does not fold its last
# dimension, so the library computes it, too. And a tensor of 1000 elements gets a single program of 1024, while 131
# multiprocessors of the GPU have nothing to do.
#
# The real generator makes decisions in these places: which dimensions become axes of a tile, how a reduction walks
# along a row that does not fit, and how large a block is. The rest of this chapter is about these three.
#
# ## The idea: axes and tiles
#
# Two dimensions become any number. Each dimension of the loop nest becomes an *axis*; each axis is cut into blocks;
# and a value that varies along some of the axes is a tile that is a block long along these, and 1 along the others.
# That is all one needs to know about a value in order to print it. Here is a sum of two vectors, printed. (Three helpers
# for this page are folded away: they take the kernels of a function, and shorten a text.)

# %% tags=["fold"]
def kernels_of(function, *args):
    """The fused kernels of a function, forward."""
    return [
        s
        for s in watch(function, *args, backend="loops", dynamic=False).half()["schedule"].steps
        if isinstance(s, Kernel)
    ]


def text_of(source):
    """The kernel itself, without imports and the user's lines behind each statement."""
    code = source.code[source.code.rindex("@triton.jit") :]
    return "\n".join(line.split("  #")[0] for line in code.strip().splitlines())


def how(source):
    """Block sizes, number of programs and warps of a kernel."""
    sizes = " by ".join(f"{name} {size}" for name, size in source.options["constants"].items())
    programs = eval(source.options["grid"], dict(source.options["constants"]))
    return f"{sizes}; programs: {programs}; warps in each: {source.options['num_warps']}"


# %%
def scaled(x, y):
    return x * 2 + y


(kernel,) = kernels_of(scaled, torch.randn(1000), torch.randn(1000))
source = emit_triton(kernel)
print(text_of(source))
print("\n" + how(source))

# %% [markdown]
# Read it line by line. `xpid` is the number of this program. `xindex` is a tile of positions: for program 3 the numbers
# from 384 to 511. `xmask` is a tile of truth values, and says which of these positions exist, since 1000 is not a
# multiple of 128 and the eighth program hangs over the end. Both loads and the store get it: a hidden lane reads and
# writes nothing. Between them stands the arithmetic as one would write it for numbers. `XBLOCK` is a `tl.constexpr`, a
# number that is known when the text is compiled; below the text stands which. Here are ten elements in blocks of four.
# They take three programs, of which the last one hangs over:

# %% tags=["fold"]
drawing(
    {
        "x": ("x", "10 elements", "input"),
        "p0": ("program 0", "elements 0 to 3", "compute"),
        "p1": ("program 1", "elements 4 to 7", "compute"),
        "p2": ("program 2", "8, 9, two hidden", "bad"),
        "out": ("buf0", "10 elements", "saved"),
    },
    [("x", "p0"), ("x", "p1"), ("x", "p2"), ("p0", "out"), ("p1", "out"), ("p2", "out")],
    "Ten elements are read by three programs of four lanes each. Program 0 has elements 0 to 3, program 1 elements 4 to 7, program 2 "
    "elements 8 and 9 and two lanes that are hidden by the mask. Each writes the same elements of the result.",
    "The programs run in any order, and at the same time.",
    width=140,
)

# %% [markdown]
# Step through the last one:

# %%
source = emit_triton(kernels_of(scaled, torch.randn(10), torch.randn(10))[0], Config({"x": 4}, 1))
ten = np.arange(10, dtype=np.float32)
kernel_walk("The third program of x * 2 + y", source, {"x": ten, "y": 100 + ten, "buf0": np.zeros(10, np.float32)}, program=2)

# %% [markdown]
# Two of the four lanes are behind the end. A dot stands for a value that nobody may look at. What if the mask
# were forgotten? On ten elements of a larger memory the program would write into whatever comes next, so it
# has to be there whenever blocks do not cover an axis exactly. When they do, nothing needs to be hidden, and
# the question is settled when the text is written, because sizes are known then:

# %%
for n in (1000, 1024):
    (kernel,) = kernels_of(scaled, torch.randn(n), torch.randn(n))
    print(n, "elements; is there a mask?", "xmask" in emit_triton(kernel).code)

# %% [markdown]
# ## What is a neighbour?
#
# When all operands are walked in the same order, one flat axis is best, however many dimensions the tensors
# have: position 5 in memory is element 5 for everyone. In `x + y.t()` the operands disagree. Neighbours in a
# row of `x` lie beside each other; the elements of `y` that are added to them lie 256 numbers apart.
# Whichever order a flat axis takes, one of the two reads fetches a piece of 32 bytes for every four that it
# uses.
#
# The way out is a tile with two axes that is a piece of both. A square of 32 by 32 elements consists of 32
# rows of 128 bytes of `x`, and of 32 rows of 128 bytes of `y`, and every byte that is fetched is used.
# Bringing the two squares into the same order happens inside of the multiprocessor, and Triton's compiler
# does it.


# %%
def straight(x, y):
    return x + y


def across(x, y):
    return x + y.t()


(flat,) = kernels_of(straight, torch.randn(256, 256), torch.randn(256, 256))
(crossed,) = kernels_of(across, torch.randn(256, 256), torch.randn(256, 256))
Listings([(name, f"{text_of(s)}\n\n{how(s)}") for name, s in (("x + y", emit_triton(flat)), ("x + y.t()", emit_triton(crossed)))])

# %% [markdown]
# In the second kernel `yindex` is a column of positions and `xindex` a row of them; that is what `[:, None]` and
# `[None, :]` say. `256*yindex + xindex` is a tile of 32 by 64 addresses. (32 of them in each direction are enough for whole
# pieces of memory; 64 give each program more to ask for. Where the last axis is shorter, the other one gets more: for
# `x.permute(0, 2, 1).contiguous()` with `x` of shape (8, 32, 64) the tile is 64 by 32. With more than four operands of full
# size a tile has 1024 elements in place of 2048.) There are 8 by 4 such tiles, and the first two lines make of the
# number of the program the position of its tile: the remainder says in which column of tiles it is, the quotient in
# which row.
#
# The decision between the two forms is a vote. A nest of less than 4096 elements is not worth it. Otherwise each access
# that visits more than half of the nest votes for the variable along which it is contiguous:
#
# %show minicompile.ch09_triton.tiling.contiguous_var
#
# If some access votes for another variable than the last one, the nest is cut behind that variable (of several, behind
# the one with most votes): it and the variables before it are one axis, the rest are the other. The variable at the cut
# has to have at least 4 values, since shorter runs are not worth a tile; otherwise there is one axis.
# Take `x.transpose(0, 1).contiguous()` with `x` of shape
# (16, 32, 64). The store goes along `i2`, and so does the load, so both vote for the last variable, and one axis
# will do: rows of 64 move as a whole. For `x.permute(1, 2, 0).contiguous()` of the same tensor the load goes along `i1`
# of the nest (32, 64, 16). So the cut is behind `i1`, the axes are `(i0, i1)` and `(i2)`, and a tile is a piece of both:
#
# %show minicompile.ch09_triton.tiling.choose_axes "total =" to "return [Axis("x", vars, 0, 1)]"
#
# ## From a row to a number
#
# A reduction folds one axis, called `r`. The naive version starts one thread for each row and lets it walk
# along, so that neighbouring threads read addresses a whole row apart: every piece of 32 bytes is fetched for
# four of them. The better way is that a program takes a row, its threads take neighbouring elements, and the
# partial results meet at the end. If the row fits into the registers of a program, it is loaded once and
# everything happens to it there. This form is called *persistent*.


# %%
def rows(x):
    return torch.softmax(x, 1)


(kernel,) = kernels_of(rows, torch.randn(64, 500))
print(text_of(emit_triton(kernel)))

# %% [markdown]
# The tile has two axes, a row of outputs by a row of inputs. 500 elements are padded to 512, since tiles are
# powers of two, and `rmask` hides the last twelve. It is used in two places, for two purposes. In `tl.load` and
# `tl.store` it protects *memory*, as before: what lies behind the row is not touched. But a hidden lane of a loaded tile
# still holds something, and a fold takes all lanes of the tile. So in front of each fold stands
# `tl.where(rmask, ..., identity)`, which protects the *result*: it replaces whatever the hidden lanes hold by the number
# that changes nothing. This number is the *identity* of the reduction, minus infinity for a maximum and zero for a sum.
# If the mask of the load were forgotten, the sum would still be right, and the program would read memory that is not its
# own. If the identity is wrong, no memory is touched and the number is wrong. That is a classic mistake. (Two names are
# there for the sake of equal numbers: `nan_max` is a maximum that is NaN if one of the numbers is, as PyTorch's, and
# `tl.div_rn` divides with the rounding that the standard asks for, while Triton's `/` is faster and less exact.)

# %%
row = np.array([-3, -1, -2, -9, -4, -5], np.float32)
(kernel,) = kernels_of(rows, torch.randn(3, 6))
right = emit_triton(kernel, Config({"x": 1, "r": 8}, 1, persistent=True))
wrong = dataclasses.replace(right, code=right.code.replace('float("-inf"))', "0.0)"))
for shift in (0, -200):
    for words, source in (("identity -inf", right), ("identity 0", wrong)):
        out = np.zeros(6, np.float32)
        *_, (_, registers, _) = run_statements(source, {"x": row + shift, "buf3": out})
        print(f"row {shift:+}, {words:14} maximum {registers['red1_max'].item():6}   sum of the softmax {out.sum():.4f}")

# %% [markdown]
# `wrong` is the kernel with one number changed. Its maximum is that of the padding. Softmax does not mind a
# wrong maximum as long as no exponential vanishes, so the first row comes out right. In the second all of
# them vanish, and the answer is 0/0. Such a bug waits for a model whose logits are all negative.
#
# ### A softmax in one walk
#
# A row of 50,000 elements does not fit. Then the program walks along it in tiles: this is a *looped*
# reduction. For a sum that is easy to imagine. Each lane of the tile keeps a running sum, and in the end the
# lanes are folded. Softmax is harder, because it needs two numbers, and the second seems to need the first:
# the maximum of the row, and then the sum of the exponentials relative to it. That would be two walks before
# the third one can write the result.
#
# The two can be had in one walk. Suppose that after some elements we hold the maximum `m` of what we have
# seen, and the sum `s` of the exponentials *relative to it*: of `exp(x_i - m)`. Now comes `x`. If it is not
# larger than `m`, it adds `exp(x - m)` to the sum, and the maximum stays. If it is larger, it becomes the new
# maximum, and every term of the old sum is relative to the wrong one. But all of them are wrong by the same
# factor, because `exp(x_i - x)` is `exp(x_i - m) * exp(m - x)`. So the whole sum is multiplied by `exp(m -
# x)`, and the new element adds `exp(0)`, which is 1.
#
# | the new element | new sum | new maximum |
# |---|---|---|
# | `x <= m` | `s + exp(-(m - x))` | `m` |
# | `x > m` | `s * exp(-(x - m)) + 1` | `x` |
#
# Both rows of the table need one exponential, and it is the same one: that of minus the distance between `x`
# and `m`. In the compiler the rule is four lines of text, where `m`, `s`, `e` and `x` are the names of tiles:
#
# %show minicompile.ch09_triton.reductions.online_softmax "[f"{x} = {_masked(r, _tile(r, r.dtype), float('-inf')" to "f"{m} = tl.maximum"
#
# One thing in these lines is not in the table. Where `x` and `m` are equal, `e` is set to 1, and no distance is
# taken. For two equal numbers that is the same, since exp(0) is 1. It is there for infinities. Every lane begins
# with the maximum minus infinity, and an element behind the end of the row counts as minus infinity. When a lane
# that has met nothing yet meets such an element, the distance would be infinity minus infinity, which is NaN, and
# one NaN makes the whole row NaN. With `e` set to 1 the lane adds 1 to its sum instead. That is wrong, too, but it
# does no harm: the lane's maximum is still minus infinity, and at the end its sum is multiplied by exp(minus
# infinity), which is 0.
#
# Each lane runs this rule on the elements that it meets. At the end there is one pair per lane, and pairs are
# combined in the same way: the largest maximum is that of the row, and each sum is multiplied by the
# exponential of its own maximum minus the largest. Here is the kernel for rows of six, in tiles of four, and the way of
# one row through it:

# %%
looped = emit_triton(kernel, Config({"x": 1, "r": 4}, 1))
print(text_of(looped))

# %%
x = np.zeros(18, np.float32)
x[6:12] = [3, 1, 2, 9, 4, 0]
kernel_walk("One row of a softmax through its looped kernel", looped, {"x": x, "buf3": np.zeros(18, np.float32)}, program=1)

# %% [markdown]
# In the second round of the loop lane 0 meets a 4 and had a 3: it is rescaled. Lane 1 meets a 0 and had a 1: it
# adds. Lanes 2 and 3 are behind the end of the row, meet minus infinity, and add zero, since they have met numbers
# before. Then the four pairs are folded, and the second loop loads the row again to write the result.
#
# The row is read twice, where the persistent kernel reads it once. How much does that cost?

# %% tags=["gpu-result", "results:h100-curves", "fold"]
found = results("h100-curves")["softmax"]
lines(
    {name: [(np.log2(p["row"]), p[name]) for p in found] for name in ("persistent", "looped")},
    "elements per row, as a power of two",
    "GB/s",
    "Bandwidth of a softmax by row length, persistent and looped.",
    "A softmax over 67 million float32 elements on an H100. Each byte counts once, however often it is loaded.",
)

# %% [markdown]
# Up to rows of 8192 elements nearly nothing, except for very short ones: the second reading is served by the cache.
# Beyond that the rows that are being worked on do not fit into the cache together, and the looped kernel moves half
# again as many bytes. (Rows of 16,384 lose more than that, and this measurement does not say why.) The persistent one
# pays in another currency, registers: a row of 32768 floats is 64 of them in each of 512 threads. When other values are
# alive at the same time there are not enough, and the compiler begins to *spill* them to memory. So the choice between
# the two needs to know several things:
#
# | parameter | what it is | what follows |
# |---|---|---|
# | `rnumel` | the length of the row | up to a limit the row is held in registers, beyond it the row is walked |
# | `passes` | how often a looped kernel would walk it | one walk gains little from holding the row: a low limit |
# | `live` | full-size values alive at one time | the more there are, the lower the limit |
# | `inner` | whether the row lies along memory | if not, as in a sum of columns, a program takes many columns side by side |
# | `xnumel` | the number of results | if there are few, a program takes fewer, so that no multiprocessor is without one |
# | `sums` | tiles that a sum of columns accumulates | each takes registers, so the steps along the column are shorter |
#
# One function is for rows that lie along memory. A row that is shorter than the limit is held, and a program takes as
# many of them as make 1024 elements. A longer one is walked, in steps of 2048 to 8192 elements:
#
# %show minicompile.ch09_triton.heuristics.along_rows
#
# The other is for rows that lie across memory, as those of a sum of columns. Here a program takes up to 64 neighbours,
# and holds only what is short. (The first lines are for sums of few rows and very many columns, where a program takes 64
# or 128 neighbours and has only 1024 elements at a time.)
#
# %show minicompile.ch09_triton.heuristics.down_columns
#
# The numbers in both were measured, on an H100 or an H200, as the module says where it stands. They are rules, not a
# search, so that one configuration per kernel is compiled.
#
# ### What is printed once per row
#
# A looped kernel needs to know which of its statements belong to which walk. In a softmax the maximum and the
# sum belong to the first, the division and the store to the second, and the load to both. The printer asks of
# each value which reductions it depends on. What depends on none can be done in the first walk; what depends
# on a result waits until that walk has ended; what does not vary along the row at all is printed between the
# loops, once.
#
# %show minicompile.ch09_triton.passes.schedule_passes "inside = []" to "inside.append"
#
# A *phase* counts how many reductions a value is behind. The elements of the row have phase 0. A reduction of them has
# phase 1, and so has everything that is computed from its result. A reduction of that, such as the sum of the squared
# distances from a mean, has phase 2. So loop `k` computes the reductions of phase `k + 1`, with all elements that they
# need. A store of elements belongs to the loop of its own phase. In the code, `when` has for each store the loop that
# it belongs to, `is_element` says whether a value varies along the row, and `elements` finds the elements that a list
# of values is computed from.
#
# There is one exception. If the kernel writes over memory that a later loop will load once more, the store has to wait
# for that loop. Waiting may move loads, and these may make other stores wait. So it is repeated until nothing moves.
# The third hazard of chapter 8 refuses most such kernels, but not all: two pointwise loops, of which one updates `x`, may
# become one, and a reduction that reads only what they have computed may join them. In `x.sub_(x.mean(1, keepdim=True))`
# with a softmax of `x` behind it, the update and the exponentials share a kernel with the sum of these. Its first loop
# knows the new `x`, but its second one loads the old `x` again to compute the exponentials, so the store waits for it:
#
# %show minicompile.ch09_triton.passes.schedule_passes "last_load" to "when |= late"
#
# Loads that a later walk repeats ask the cache to keep what they fetched (`evict_last`), and the last ones to
# let it go (`evict_first`). Both words stand in the listing of the looped softmax.
#
# ## Does it compute the same?
#
# In Triton's own interpreter each program runs in Python. That is slow, and exact enough to find a missing
# mask. The test suite runs every reduction, every operator and thousands of random programs through it, on
# machines without a GPU:

# %%
x = torch.randn(6, 40)
for function in (rows, lambda x: x + x.sum(0), lambda x: F.gelu(x).t() * 2):
    ours = minicompile.compile(function, backend="triton")(x)
    print("largest difference from eager:", (ours - function(x)).abs().max().item())

# %% [markdown]
# ## From text to a launch
#
# The text has to become machine code, and the machine code has to be started fifty times in a training step
# that takes five milliseconds. Both have a naive version: import Triton, define the function, call it.
#
# Importing Triton takes half a second, and compiling a kernel 30 to 210 ms, so the 42 kernels of a small GPT's training step
# would take seconds on one core. Instead one separate process imports it once and forks for each
# kernel, on all cores at once, and the user's process never imports it (except here, to interpret). Results
# are kept on disk under a hash of the text.
#
# Calling a kernel through Triton's Python code inspects every argument to choose a specialisation, which takes
# about 20 microseconds, four times as long as a small kernel runs. Here the specialisation is known in advance:
# sizes are in the text, and that pointers are multiples of 16 is checked with one bit mask. A launch goes through a
# small C function that holds the address of the kernel and packs the arguments. What it is told in advance stands
# in [`make_callable`](ref:minicompile.ch09_triton.launch.make_callable): the machine code, how many threads and how
# much shared memory, how many pointers and sizes will come, and how many programs to start, as a number, or as a
# function where sizes vary. A tensor that does not begin at a multiple of 16 bytes, such as `x[1:]`, goes to a
# second version of the kernel, with narrower loads, which is compiled when the first such tensor arrives:
#
# %show minicompile.ch09_triton.launch.make_callable "unaligned: list" to "return unaligned[0]"
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
print(text_of(max(sources, key=lambda s: len(s.code))))

# %% [markdown]
# Rows of 64 are held in registers, one row to a program, because there are only 128. Nothing is masked, since 64 is a
# power of two. The mean and the sum of the squared distances from it are two folds along `r` (0.015625 is 1/64). What
# is computed from them has the shape of a column. The result is stored next to the residual that the rest of the block
# reads. `red4_n` is the count, which belongs to every variance and which nobody reads here; Triton's compiler drops it.

# %%
Table(
    ["kernel", "block sizes", "programs", "warps in each", "lines"],
    [(s.name, *(part.partition(": ")[2] or part for part in how(s).split("; ")), len(text_of(s).splitlines())) for s in sources],
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
    found = measured(name)
    eager, ours, theirs = (found[c] for c in ("eager", "minicompile", "torch"))
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
# Fewer kernels is not the aim. Inductor fuses nanoGPT into fewer of them and takes slightly longer; what
# counts is the bytes that go through memory. ResNet-50 gains most: between its convolutions stand batch
# norms, ReLUs and additions, which are memory traffic and little else.
#
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
# - J. D. C. Little, *A Proof for the Queuing Formula L = λW* (1961).
# - J. K. Salmon and others, *Parallel Random Numbers: As Easy as 1, 2, 3* (2011), on Philox.
