# %% [markdown]
# # Chapter 7: Loops
#
# A graph of primitives says which operators to run. This chapter says how each of them visits its elements,
# for only then can a later stage see that two of them visit the same ones. `lower(graph)` gives a `Program`
# of loops and library calls; `run_loop` runs a loop, slowly and strictly.
#
# The three primitives of `x - x.mean(1, keepdim=True)` (chapter 6) become two loops. The first makes one sum for each `i0`, by
# walking along `r0`. The second makes one element for each `i0` and `i1`; the division is in there as well, since its result is
# not needed in memory. `x[256*i0 + r0]` is the element of `x` so many elements after the first.
#
#     inputs: x
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
#     return buf1[64, 256]:256,1
#
# At the end of the chapter you can read such a program, write the lowering of an operator, and say why a view, a broadcast or a `cat` has
# no loop of its own.
#
# What it leaves: which loops walk over memory together, and in which order (chapter 8).
#
# Sources: J. Ragan-Kelley and others, *Halide* (2013), for what is computed apart from when; P. Feautrier, *Dataflow analysis of
# array and scalar references* (1991), for index expressions.
#
# Read `ir.py` for the language, `builder.py` for how a body is written, and `lazy.py` for the one idea behind the rest: a
# tensor is a function from an index to an element until somebody needs it in memory. `pointwise.py`, `reductions.py` and
# `views.py` have what the lowerings of a family share, `updates.py` what is written in place, `externs.py` what stays a library
# call. `table.py` has the lowerings of single operators, which are in `rules`, by subject. `lower.py` walks the graph,
# `reference.py` executes loops, `verify.py` checks and prints them.
