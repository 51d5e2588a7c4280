# %% [markdown]
# # C++: kernels for a CPU
#
# A kernel of [chapter 8](chapter:08) is a loop nest in data structures. A CPU wants machine code, and a C++
# compiler can make it. The work of this chapter is to write C++ that the compiler can turn into *vector*
# instructions, that rounds like PyTorch, and that compiles in a fraction of a second.

# %%
import dataclasses

import torch
import torch.nn.functional as F

import minicompile
from chapters._lib import Listings, Table, bars, best_time, example, head, tidy, watch
from minicompile.ch10_cpp.build import FLAGS, load_cpp

# %% [markdown]
# ## The naive version: print the loop
#
# The obvious translation has one `for` per loop variable and one line per instruction. Here is one that
# does that for a kernel without reductions:

# %%
C = {
    "add": "{} + {}",
    "mul": "{} * {}",
    "erf": "erff({})",
    "truediv": "{} / {}",
    "sub": "{} - {}",
    "exp": "expf({})",
}


def naive_cpp(kernel):
    """C++ text of a pointwise kernel of floats over one flat variable."""
    (var,) = kernel.vars
    names = {n: f"in{i}" for i, n in enumerate(kernel.inputs)} | {
        n: f"out{i}" for i, n in enumerate(kernel.outputs)
    }
    lines = [f"const float* in{i} = (const float*)pointers[{i}];" for i in range(len(kernel.inputs))]
    lines += [
        f"float* out{i} = (float*)pointers[{len(kernel.inputs) + i}];" for i in range(len(kernel.outputs))
    ]
    lines.append(f"for (int64_t {var} = 0; {var} < {var.size}; {var}++) {{")
    for loop in kernel.loops:
        for number, (op, args, dtype) in enumerate(loop.body):
            args = [f"v{a.id}" if hasattr(a, "id") else a for a in args]
            text = (
                f"{names[args[0]]}[{args[1]}]"
                if op == "load"
                else f"{args[0]}f" if op == "constant" else None if op == "store" else C[op].format(*args)
            )
            lines.append(
                f"  float v{number} = {text};" if text else f"  {names[args[0]]}[{args[1]}] = {args[2]};"
            )
    body = "\n  ".join([*lines, "}"])
    arguments = "void** pointers, const int64_t* sizes, mc_problem* problem"
    start = f'extern "C" float erff(float);\nextern "C" void {kernel.name}({arguments}) {{'
    return f"{start}\n  {body}\n}}"


def activation(x):
    return F.gelu(x) * 2


x = torch.randn(200_000)
seen = watch(activation, x)
kernel, source = seen.half()["schedule"].steps[0], seen.half()["compiled"].sources[0]
kernel = dataclasses.replace(kernel, name="naive_gelu")
Listings([("naive", naive_cpp(kernel)), ("ours", source.code)])

# %% [markdown]
# They look alike. Compile both with the same flags and run them:


# %%
def built(code, name):
    return load_cpp([dataclasses.replace(source, name=name, code=code)])[0]


naive, out = built(naive_cpp(kernel), "naive_gelu"), torch.empty_like(x)
naive(x, out)
print("largest difference of the naive one from eager:", (out - activation(x)).abs().max().item())
ours = minicompile.compile(activation)
with torch.no_grad():
    rows = [
        ("eager", best_time(activation, x) * 1e3, "plain"),
        ("naive C++", best_time(naive, x, out) * 1e3, "bad"),
        ("ours", best_time(ours, x) * 1e3),
    ]
bars(rows, "ms", "GELU of 200,000 floats, one thread.", form="{:.2f}")

# %% [markdown]
# The naive kernel is the slowest of the three. The reason is one call: `erff` is a function of the C
# library for one number, and a loop that calls it cannot be vectorised. `mc_erf` is our own, a polynomial
# written without branches, so that the compiler can run it on 8 or 16 numbers at once. The pragma tells it
# that iterations do not depend on each other, which it could not know of pointers.
#
# ## Rounding
#
# A second trap. `-ffast-math` would vectorise nearly anything, and assumes that NaN and infinity do not
# exist. The flags in use:

# %%
print(" ".join(FLAGS))

# %% [markdown]
# `-ffp-contract=off` keeps `a*b + c` two roundings, as in eager.
# [`build.py`](code:minicompile/ch10_cpp/build.py) says what each of the others permits. A sum shows why
# order matters:


# %%
def plain_sum(values):
    total = torch.zeros((), dtype=torch.float32)
    for block in values.view(-1, 1000).unbind():  # one number after the other, in float32
        total = torch.cumsum(torch.cat([total.view(1), block]), 0, dtype=torch.float32)[-1]
    return total


numbers = torch.rand(1_000_000)
exact = numbers.double().sum().item()
total = minicompile.compile(lambda t: t.sum())(numbers).item()
Table(
    ["sum of a million numbers", "error"],
    [
        ("one after the other, in float32", f"{abs(plain_sum(numbers).item() - exact):.3f}"),
        ("eager", f"{abs(numbers.sum().item() - exact):.3f}"),
        ("ours", f"{abs(total - exact):.3f}"),
    ],
)

# %% [markdown]
# One accumulator is both slow, because each addition waits for the one before, and inaccurate, because a
# small number is added to a large one. So there is one partial sum per vector lane, and long rows are
# summed in chunks whose sums are added in double.

# %%
seen = watch(lambda t: t.sum(1), torch.randn(64, 3000))
print(tidy(seen.half()["compiled"].sources[0].code))

# %% [markdown]
# ## The real version
#
# First the bodies of all loops of a kernel become one graph of values
# ([`link`](ref:minicompile.ch08_fusion.values.link)): a store to a local buffer and its load become an
# edge, and equal values are one. Then a choice: which variable runs along the vector lanes? Each access
# votes. One that walks memory in order wants it, one that jumps is against it.
#
# %show minicompile.ch10_cpp.emit.best_lane
#
# When the loads and the stores disagree, as in a transposition, the nest is cut into tiles that fit the
# cache:


# %%
def transposed(t):
    return t.t().contiguous() * 2


seen = watch(transposed, torch.randn(1000, 1000))
head(seen.half()["compiled"].sources[0].code, 30)

# %%
rows = []
with torch.no_grad():
    for n in (1000, 1024):
        m, compiled = torch.randn(n, n), minicompile.compile(transposed, dynamic=False)
        rows += [
            (f"{n} x {n}, eager", best_time(transposed, m, repeat=15) * 1e3, "plain"),
            (f"{n} x {n}, ours", best_time(compiled, m, repeat=15) * 1e3),
        ]
bars(rows, "ms", "Transposing and doubling a square matrix.", form="{:.2f}")

# %% [markdown]
# The tiles do their work at 1000 and much less at 1024. There a step down a column is 4096 bytes, and a
# first-level cache, which finds its place for a line from the low bits of the address, puts a whole column
# of the tile into the same few places. ATen's transposing copy goes through a small buffer with dense rows
# and does not care. Ours does not do that yet.

# %% [markdown]
# Pointwise kernels, row reductions and column reductions each have a plan of their own. The entry to all of
# them:
#
# %show minicompile.ch10_cpp.emit.emit_cpp
#
# ## Compile time
#
# A C++ compiler that reads torch's headers takes half a minute for a file. Ours reads no header at all, not
# even the standard library's; what kernels need is declared in three small files.

# %%
import subprocess
import tempfile
import time
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "k.cpp").write_text(
        "#include <cmath>\n#include <vector>\n#include <algorithm>\n#include <functional>\n"
        "int f() { return 0; }\n"
    )
    (Path(folder) / "n.cpp").write_text("int f() { return 0; }\n")
    times = {}
    for name, label in (("n", "no header"), ("k", "four headers of the standard library")):
        start = time.perf_counter()
        subprocess.run(
            ["g++", "-O3", "-std=c++17", "-c", f"{folder}/{name}.cpp", "-o", f"{folder}/{name}.o"],
            check=True,
        )
        times[label] = time.perf_counter() - start
bars(
    [(label, 1e3 * t, "bad" if "four" in label else "compute") for label, t in times.items()],
    "ms",
    "Time of g++ for an otherwise empty file.",
    form="{:.0f}",
)

# %% [markdown]
# Kernels of one program are dealt into a few files that compile in parallel in the background. A kernel
# waits for its file when it is first called. Equal kernels are compiled once, and libraries stay on disk.
#
# ## The running example
#
# The kernels of the GPT block, forward and backward:

# %%
block, x = example()
seen = watch(block, x)
seen.result.sum().backward()
rows = []
for half in seen.halves:
    for s in half["compiled"].sources:
        rows.append(
            (half["which"], s.name[:60], len(s.code.splitlines()), s.code.count("#pragma omp simd"))
        )
Table(["graph", "kernel", "lines", "vector loops"], rows)

# %% [markdown]
# The most interesting one joins a residual addition, a layer norm and its affine transformation:

# %%
longest = max(seen.half("forward")["compiled"].sources, key=lambda s: len(s.code))
head(longest.code, 70)

# %% [markdown]
# A row of the sum goes into a small array, from which mean and variance are computed. The second loop adds
# the two operands once more: by then both rows are in the first-level cache. The comments are the user's
# lines.
#
# ## What torch.compile does differently
#
# Inductor's C++ backend writes explicit vector code with `at::vec::Vectorized`, one class for each
# instruction set, and includes ATen's headers. That gives it full control and the same `exp` as eager, and
# costs compile time, which precompiled headers reduce. It also generates matrix products (with oneDNN or
# templates of its own), tunes for the cache hierarchy, and has a masked form for the tail of a row. We
# leave vectorisation to the compiler and write loops that it can vectorise.
#
# ## Exercises
#
# <!-- exercises -->
#
# ## Further reading
#
# - D. Goldberg, *What Every Computer Scientist Should Know About Floating-Point Arithmetic* (1991).
# - B. P. Welford, *Note on a method for calculating corrected sums of squares and products* (1962).
# - N. Higham, *The accuracy of floating point summation* (1993).
# - The OpenMP specification, on the `simd` construct; GCC's documentation of auto-vectorisation.
