# %% [markdown]
# # Chapter 8: fusion
#
# Chapter 7 leaves loops, each of which reads its operands from memory and writes its result there. This chapter decides which
# of them become one kernel, in which order kernels and library calls run, and which memory each result gets. `fuse(program)` does it;
# the `Schedule` that it returns is what chapters 9 and 10 print and chapter 11 runs.
#
# For example, `x - x.mean(1, keepdim=True)` of 64 by 256 numbers is two loops:
#
#     loop0: for i0 < 64 reduce r0 < 256    # sum_dim_int_list
#         v0: f32 = load x[256*i0 + r0]
#         v1: f32 = reduce(sum, v0)
#         buf0[i0] = v1
#     loop1: for i0 < 64, i1 < 256    # div_tensor, sub_tensor
#         v0: f32 = load x[256*i0 + i1]
#         v1: f32 = load buf0[i0]
#         v2: f32 = constant(256.0)
#         v3: f32 = truediv(v1, v2)
#         v4: f32 = sub(v0, v3)
#         buf1[256*i0 + i1] = v4
#
# They become one kernel. The second loop runs over the variables of the first, so its `i1` is `r0` now. Nothing outside reads
# the sums, so they are local (`tmp0`): a number in a register, which goes through no memory.
#
#     kernel fused_sum_dim_int_list_div_sub_0 over (i0,) reducing (r0,)
#     loop0: for i0 < 64 reduce r0 < 256    # sum_dim_int_list
#         v0: f32 = load in0[256*i0 + r0]
#         v1: f32 = reduce(sum, v0)
#         tmp0[i0] = v1
#     loop1: for i0 < 64, r0 < 256    # div_tensor, sub_tensor
#         v0: f32 = load in0[256*i0 + r0]
#         v1: f32 = load tmp0[i0]
#         v2: f32 = constant(256.0)
#         v3: f32 = truediv(v1, v2)
#         v4: f32 = sub(v0, v3)
#         out0[256*i0 + r0] = v4
#
# At the end of the chapter you can say of two loops whether they become one kernel, and if not, which reason was
# recorded; in which order steps run, and whose memory a result takes over.
#
# What it leaves: that a kernel is still data. Chapters 9 and 10 write it as a text that a compiler takes.
#
# Sources: S. Williams and others, *Roofline* (2009), for bytes as the measure; A. Darte, *On the complexity of loop fusion*
# (1999), for why nobody looks for the best fusion.
#
# In reading order:
#
# 1. `kernel.py`: what comes out, the contract with the code generators;
# 2. `dependencies.py`: who touches which memory, and what must run before what;
# 3. `iteration.py` and `alignment.py`: how two loops come to run over the same variables;
# 4. `groups.py`, `legality.py` and `fuse.py`: kernels in the making, whether two may be one, and which pairs are tried in which order;
# 5. `build.py` and `canonical.py`: from groups to kernels, and kernels that are equal but for names;
# 6. `memory.py`: the order of steps, and who gets which memory; `lists.py`: many equal kernels as one launch;
# 7. `reference.py`: kernels, executed, and what they must obey;
# 8. `values.py`: where both code generators begin. The loops of a kernel are linked to one graph of values.
