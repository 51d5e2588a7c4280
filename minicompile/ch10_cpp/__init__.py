# %% [markdown]
# # Chapter 10: C++
#
# On a CPU a kernel is a nest of loops in C++, and g++ makes machine code of it. It can do much, but it can use the vector
# instructions of a processor only in an innermost loop of a certain form, without branches and calls, whose iterations do not
# depend on each other. To write such loops, and to share the outer ones among threads, is what this chapter does.
#
# The kernel of chapter 8's example, `x - x.mean(1, keepdim=True)` of 64 by 256 numbers (with the user's lines left out, which
# stand there as comments):
#
#     extern "C" void fused_sum_dim_int_list_div_sub_0(void** pointers, const int64_t* sizes, mc_problem* problem) {
#       const float* in0 = (const float*)pointers[0];
#       float* out0 = (float*)pointers[1];
#       for (int64_t i0 = 0; i0 < 64; i0 += 1) {
#         float acc_2 = 0.0f;
#         {
#           const int64_t chunk = 0;
#           const int64_t count = 256;
#           float part_2 = 0.0f; alignas(64) float part_2s[32]; for (int64_t k = 0; k < 32; k += 1) part_2s[k] = 0.0f;
#           const auto run = [=, &part_2s](const int64_t at, const int64_t steps) __attribute__((always_inline)) {
#             #pragma omp simd
#             for (int64_t step = 0; step < steps; step += 1) {
#               const int64_t lane = at + step;
#               const int64_t r0 = chunk + lane;
#               const float v1 = in0[256*i0 + r0];
#               part_2s[step] += (float)v1;
#             }
#           };
#           int64_t done = 0;
#           for (; done + 32 <= count; done += 32) run(done, 32);
#           part_2 = mc_fold<32>(part_2s);
#           acc_2 += part_2;
#         }
#         const float v3 = (float)acc_2;
#         const float v5 = v3 / 256.0f;
#         {
#           const int64_t chunk = 0;
#           const int64_t count = 256;
#           #pragma omp simd
#           for (int64_t lane = 0; lane < count; lane += 1) {
#             const int64_t r0 = chunk + lane;
#             const float v4 = in0[256*i0 + r0];
#             const float v6 = v4 - v5;
#             out0[256*i0 + r0] = v6;
#           }
#         }
#       }
#     }
#
# The row is walked twice, since a mean needs all of it. The first walk adds to 32 partial sums at once, which are a few vectors in
# registers. The division stands between the walks: it does not vary along the
# row. (The sums of longer rows are cut into chunks, and larger nests get threads.)
#
# At the end of the chapter you can read the C++ text of any kernel, say which of its loops are vectorised or shared among threads,
# and why its numbers are eager's.
#
# What it leaves: who calls the kernels, with which memory (chapter 11).
#
# Sources: D. Goldberg, *What Every Computer Scientist Should Know About Floating-Point Arithmetic* (1991); B. P. Welford, *Note
# on a method for calculating corrected sums of squares and products* (1962); the specification of OpenMP, on `simd`.
#
# In reading order:
#
# 1. `ops.py`: a scalar operation as text, with PyTorch's meaning;
# 2. `nests.py`: scopes, loops, and where a value is computed;
# 3. `lanes.py`: what is done to an innermost loop so that it becomes vectors;
# 4. `reductions.py`, `rows.py`, `columns.py`: reductions, along rows and across them; `emit.py`: pointwise kernels and the function
#    around a nest;
# 5. `build.py`: from texts to functions that Python can call. `prelude.h` and `reductions.h` go with every text,
#    `launch.cpp` is the way in from Python.
