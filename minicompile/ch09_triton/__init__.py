# %% [markdown]
# # Chapter 9: Triton
#
# A GPU runs thousands of threads, and a kernel has to say which of them does what. Triton is a language, inside of Python, in
# which one writes what a *program* does to *tiles*, blocks of numbers, and leaves it to a compiler to spread a tile over threads
# and to keep it in registers. So a kernel of chapter 8 becomes a text of tiles. How many elements a program takes, in which
# shape, and where the end of a tensor has to be hidden by a mask, is for this chapter to decide.
#
# The kernel of chapter 8's example, `x - x.mean(1, keepdim=True)` of 64 by 256 numbers:
#
#     @triton.jit
#     def fused_sum_dim_int_list_div_sub_0(in0, out0, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr):
#         xpid = tl.program_id(0)
#         xindex = xpid * XBLOCK + tl.arange(0, XBLOCK)[:, None]
#         rindex = tl.arange(0, RBLOCK)[None, :]
#         tmp0 = tl.load(in0 + (256*xindex + rindex))
#         red1 = tl.sum(tmp0, 1)[:, None].to(tl.float32)
#         tmp3 = tl.div_rn(red1, 256.0)
#         tmp4 = tmp0 - tmp3
#         tl.store(out0 + (256*xindex + rindex), tmp4)
#
# With `XBLOCK` 1 and `RBLOCK` 256 there are 64 programs, a row each. A row is one tile: it is loaded once, stays in registers
# while its sum is found, and is written once. Both blocks divide their lengths, so there is no mask.
#
# At the end of the chapter you can read the Triton text of any kernel, say why it has the shape and the blocks that it has, and what
# lies between a text and a launch.
#
# What it leaves: who calls the kernels, with which memory (chapter 11).
#
# Sources: P. Tillet and others, *Triton* (2019); M. Harris, *Optimizing Parallel Reduction in CUDA* (2007); J. K. Salmon and
# others, *Parallel Random Numbers* (2011), for draws that are eager's.
#
# In reading order:
#
# 1. `ops.py`: a scalar operation as text (the table is in `rules`);
# 2. `tiling.py`: which variables share an axis of a tile, and index expressions as text; `reductions.py`: folding an axis;
# 3. `heuristics.py`: how large tiles are;
# 4. `passes.py`: what is done to a kernel's graph of values first; `plan.py`: which shape its programs have; `printer.py`: a step of
#    it as text; `emit.py`: the text of a whole kernel;
# 5. `launch.py` and `worker.py`: compiling in other processes, loading, launching; `interpreted.py`: kernels without a GPU.
