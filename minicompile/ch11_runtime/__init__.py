# %% [markdown]
# # Chapter 11: the runtime
#
# There are kernels now, and library calls between them. Somebody has to allocate, call, and free, for each step of each graph.
# In a small model this is where the time goes: Python takes some microseconds to launch a kernel that takes two on a GPU. So nothing
# is decided at run time that was known before. The chapter generates the calls as a text, and then removes even that, by
# recording what was launched.
#
# The running example with a product behind it, `(x - x.mean(1, keepdim=True)) @ w` of 64 by 256 and 256 by 128 numbers, is one kernel and
# one library call:
#
#     def call(args):
#         x, w = args
#         args.clear()
#         with below_autograd():
#             buf1 = empty_float32((64, 256), (256, 1))
#             k0(x, buf1)  # fused_sum_dim_int_list_div_sub_0
#             del x
#             buf2 = empty_float32((64, 128), (128, 1))
#             x0(buf1, w, out=buf2)
#             del buf1, w
#             result = [buf2]
#         return result
#
# `k0` is the kernel, `x0` the library's matrix product, and both write where they are told to. The `del` lines are the memory plan of
# chapter 8, in Python: a name goes after its last use, so that its memory is free for the next allocation.
#
# At the end of the chapter you can say what a call of a compiled function does besides computing, what of it a CUDA graph takes away, and
# what has to be true before a graph may be replayed.
#
# What it leaves: the loop around the model: gradients that accumulate, the optimizer, the learning rate (chapter 12).
#
# Sources: A. Gray, *Getting Started with CUDA Graphs* (2019); B. Steiner and others, *MODeL* (2023), for memory plans.
#
# In reading order:
#
# 1. `host.py`: the program that calls the kernels;
# 2. `cudagraphs.py`: recordings that are safe to use; `recorder.py`: what records;
# 3. `numbers.py`: learning rates and counters, which change while a recording does not;
# 4. `collector.py`: Python's garbage collector, held back meanwhile.
