# %% [markdown]
# # C++: kernels for a CPU
#
# A kernel of [chapter 8](chapter:08) is a loop nest in data structures. A CPU wants machine code, and a C++
# compiler can make it. The work of this chapter is to write C++ that the compiler can turn into *vector*
# instructions, that rounds like PyTorch, and that compiles in a fraction of a second.

# %%
import dataclasses
import textwrap

import torch
import torch.nn.functional as F

import minicompile
from chapters import tiny
from chapters._lib import Listings, Table, bars, best_time, drawing, example, head, row_of_boxes, tidy, watch
from minicompile.ch07_loops.ir import Value
from minicompile.ch10_cpp.build import FLAGS, load_cpp

# %% [markdown]
# ## The smallest version
#
# [Part 10 of tiny](chapter:tiny.10), the compiler in one file, writes C++ with a loop over rows, loops over
# columns in it, and a pragma that asks for vectors:

# %%
steps, _ = tiny.fused(tiny.decompose(tiny.record(lambda x: torch.softmax(x, -1), torch.randn(64, 48))))
print(tiny.cpp_kernel(steps[0], {steps[0].loops[-1].node}).text)

# %% [markdown]
# On long rows of floats this is fast. It knows nothing else. A number of 16 bits, an integer, a sum over rows
# instead of columns are calls of PyTorch's own kernels; a tensor of one row runs on one thread; and an
# addition is done in whatever order the vectors have:


# %%
def mixed(x):
    return (x.bfloat16() * 2).float() + x.sum(0)


x = torch.randn(256, 64)
steps, _ = tiny.fused(tiny.decompose(tiny.record(mixed, x)))
print("tiny:", [step.call or [loop.node for loop in step.loops] for step in steps])
print("minicompile:", len(watch(mixed, x).half()["compiled"].sources), "kernels")

# %% [markdown]
# What follows begins once more with printing the loop, and pays attention to what the C++ compiler needs to know.

# %% [markdown]
# ## The naive version: print the loop
#
# The obvious translation has one `for` per loop variable and one line per value of the body. Here is one that
# does that for a kernel without reductions. For arithmetic there is a template per operation:

# %%
C = {
    "add": "{} + {}",
    "mul": "{} * {}",
    "erf": "erff({})",
    "truediv": "{} / {}",
    "sub": "{} - {}",
    "exp": "expf({})",
}

# %% [markdown]
# The line of one value: `v3` becomes the variable `v3`. A load reads an array, a store writes one, a constant is a
# literal, and for anything else the template is filled in. (`names` has the name of each buffer's array.)
#
# A kernel comes with as few variables as will do: dimensions that every access passes through in one go are merged when
# the kernel is built, so that a nest of 8 by 64 whose every address is `64*i0 + i1` is one of 512.


# %%
def naive_line(value, names):
    if value.op == "store":
        return f"  {names[value.buffer]}[{value.index}] = v{value.value.number};"
    if value.op == "load":
        text = f"{names[value.buffer]}[{value.index}]"
    elif value.op == "constant":
        text = f"{value.constant}f"
    else:
        text = C[value.op].format(*[f"v{a.number}" if isinstance(a, Value) else a for a in value.args])
    return f"  float v{value.number} = {text};"


# %% [markdown]
# Around these lines goes the loop, and around the loop a function. A kernel gets the addresses of its tensors in one
# array, inputs first, and begins by giving each a name:

# %%
def naive_cpp(kernel):
    """C++ text of a pointwise kernel of floats over one flat variable."""
    (var,) = kernel.vars
    names = {n: f"in{i}" for i, n in enumerate(kernel.inputs)} | {n: f"out{i}" for i, n in enumerate(kernel.outputs)}
    lines = [f"{'const ' * (n in kernel.inputs)}float* {name} = (float*)pointers[{k}];" for k, (n, name) in enumerate(names.items())]
    lines.append(f"for (int64_t {var} = 0; {var} < {var.size}; {var}++) {{")
    lines += [naive_line(value, names) for loop in kernel.loops for value in loop.body]
    body = "\n  ".join([*lines, "}"])
    arguments = "void** pointers, const int64_t* sizes, mc_problem* problem"
    start = f'extern "C" float erff(float);\nextern "C" void {kernel.name}({arguments}) {{'
    return f"{start}\n  {body}\n}}"


# %% [markdown]
# A GELU, printed in this way and by the compiler:


# %%
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
# The naive kernel is the slowest of the three, and the reason is one call. To see why it matters, one has to know
# how a CPU computes.
#
# ## Lanes
#
# A core of a current processor has registers of 256 or 512 bits, which hold 8 or 16 floats. One instruction
# adds two such registers, number by number, in the time in which an ordinary instruction adds two numbers.
# The places in the register are called *lanes*. A loop that is compiled to such *vector* instructions is up
# to 16 times as fast as one that is not, and nothing else in this chapter is worth a factor like that.
#
# A C++ compiler turns a loop into vector instructions if it can prove that running 16 iterations at once gives the
# same result as running them one after the other. Three things stand in its way:
#
# - *a call of a function for one number*, such as `erff` of the C library. There is no `erff` for 16;
# - *memory that might overlap*. If `out0` could be `in0` moved by one element, iteration 2 would read what iteration 1 has
#   written. Pointers do not say that they do not overlap;
# - *a branch*. Sixteen lanes cannot go two ways.
#
# Ours has none of them. `mc_erf_plus_one` is a function of our own, a polynomial written without branches, and the
# compiler puts it into the loop. (Our generators take the `erf` and the addition of 1 for one function, which needs half
# the instructions; its derivation is in [`values.py`](code:minicompile/ch08_fusion/values.py).) The line
# `#pragma omp simd` is a promise: no iteration reads what another one wrote. (It is true of every loop that we print,
# because the fusion of chapter 8 has made sure of it.) How many vector instructions did each version become?

# %%
import re
import subprocess

from minicompile.ch10_cpp import build


def vectors_in(code):
    """How often the assembly of a kernel names a register of 256 or 512 bits."""
    command = [build.compiler(), *(f for f in FLAGS if f != "-shared"), "-S", "-x", "c++", "-", "-o", "-"]
    text = subprocess.run(command, input=build._companions() + code, capture_output=True, text=True, check=True).stdout
    return len(re.findall(r"%[yz]mm", text))


for words, code in (("naive", naive_cpp(kernel)), ("ours", source.code)):
    print(f"{words:6} vector registers are named {vectors_in(code)} times, erff is called: {'erff(v' in code}")

# %% [markdown]
# ### What one branch costs
#
# The third obstacle is the one that bites without warning. Here is a program that adds one to the first
# column of a matrix:


# %% tags=["explore:first_column(matrix)"]
def first_column(x):
    y = x * 2
    y[:, 0].add_(1)
    return y.relu()


matrix = torch.randn(1000, 1000)
column = watch(first_column, matrix, dynamic=False).half()["compiled"].sources[0]
print(tidy(column.code[column.code.index("for (int64_t i0") :]))

# %% [markdown]
# The write to a column has become a selection (chapter 5 made the in-place addition functional, chapter 7 made it a
# condition on the index). In column 0 the value is one thing, elsewhere another. `x[1000*i0]`, the element that the
# addition reads, is needed in column 0 alone, and the loop IR says so: it is a load under a condition. The obvious
# way to print that is `condition ? x[...] : 0`. But in C++ this is a branch, since a load that is not to happen may
# point outside of the memory, and must not be tried. Here it never does: row `i0` exists. So the load comes first,
# and the condition selects. The cell below edits the text: it takes out the line that loads, and puts what it has
# loaded in place of its name, behind the question mark. Then it compares the two:

# %%
branch = re.sub(r"const float (m\d+) = (in0\[[^\]]*\]);\n(.*?)\? \1 :", r"\n\3? \2 :", column.code, flags=re.S)
timed = {}
for words, code in (("as generated", column.code), ("with the branch", branch)):
    name = "column_" + words.split()[-1]
    run = load_cpp([dataclasses.replace(column, name=name, code=code.replace(column.name, name))])[0]
    result = torch.empty_like(matrix)
    timed[words] = best_time(run, matrix, result) * 1e3
    print(f"{words:16} {timed[words]:.2f} ms, right: {torch.equal(result, first_column(matrix))}")

# %% [markdown]
# Both are right. With the branch the compiler does not make vectors of the loop. It copies the rest of the body behind
# each side of every selection, so that `relu` becomes a jump that depends on the data, and the processor guesses it
# wrongly every second time. Whether a conditional load may be made unconditional is a question about bounds, which the
# index expressions of [chapter 7](chapter:07) answer:
#
# %show minicompile.ch10_cpp.nests.stays_inside
#
# ## Rounding
#
# There is a trap in the flags, too. `-ffast-math` would vectorise nearly anything, and assumes that NaN and infinity do not
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
# One accumulator is slow, because each addition waits for the one before it. It is also inaccurate. A float
# has 24 bits. When the total has grown to 500,000, a number between 0 and 1 that is added to it keeps 5 bits
# behind the point, and the rest is rounded away, a million times.
#
# Both are cured by having several accumulators. Sixteen lanes with a partial sum each need not wait for each
# other, and each of them grows to a sixteenth of the total:

# %% tags=["fold"]
row_of_boxes(
    [(f"+ x[{k}]", "waits" if k else "begins", "bad") for k in range(5)],
    "Five additions, each of which waits for the one before it.",
    "One accumulator: a chain.",
)

# %% tags=["fold"]
drawing(
    {f"l{k}": (f"+ x[{k}]", f"lane {k % 3}", "compute") for k in range(6)} | {"all": ("fold", "once, at the end", "saved")},
    [(f"l{k}", f"l{k + 3}") for k in range(3)] + [(f"l{k}", "all") for k in (3, 4, 5)],
    "Six additions in three lanes of two each, folded at the end.",
    "Three lanes, of which none waits for another.",
    width=100,
)

# %% [markdown]
# Long rows are summed in chunks besides, and the sums of the chunks are added in double:

# %%
seen = watch(lambda t: t.sum(1), torch.randn(64, 3000), dynamic=False)
print(tidy(seen.half()["compiled"].sources[0].code))

# %% [markdown]
# Read it from the inside. The loop over `lane` has the clause `reduction(+:part)`. It says that `part` is a sum
# whose order does not matter, so the compiler may give each lane a `part` of its own and add these up behind the
# loop. (Without the clause it must not, since floating-point additions in another order round to another result.)
# `part` starts at zero for each chunk of 1024 numbers, so each of its 16 lanes adds up 64 of them. The chunks go
# into `acc`, which is a double. Around that is the loop over rows. Rows have nothing to do with each other, so
# threads share them, if there is enough to do: below 32,768 elements (fewer where each is expensive) starting threads costs
# more than they save, and the pragma is left out. The same loops serve every reduction that OpenMP knows: a product, a
# maximum, an "any". Only the sum's `acc` is a double.
#
# ## Rows and columns
#
# The sum of each *column* has another shape. Its obvious loop goes down one column and then down the next. But
# neighbours in a column are far apart in memory. Each load brings a cache line of 16 floats, of which one is used,
# and before the next column asks for its neighbour the line has been evicted. Turned inside out, the loop goes
# along the rows, and holds as many accumulators as there are columns:

# %% tags=["fold"]
def part(code, first, last="}"):
    """The lines of a listing from the one that holds `first` up to the one that begins with `last`."""
    lines = code.splitlines()
    begin = next(n for n, line in enumerate(lines) if first in line)
    end = next(n for n in range(begin + 1, len(lines)) if lines[n].startswith(last))
    return tidy(textwrap.dedent("\n".join(lines[begin:end])))


# %%
wide = torch.randn(3000, 1024)
columns = watch(lambda t: t.sum(0), wide, dynamic=False).half()["compiled"].sources[0]
print(part(columns.code, "for (int64_t begin", "    #pragma"))

# %%
by_columns = """extern "C" void by_columns(void** pointers, const int64_t* sizes, mc_problem* problem) {
  const float* in0 = (const float*)pointers[0];
  float* out0 = (float*)pointers[1];
  for (int64_t i0 = 0; i0 < 1024; i0++) {
    float total = 0;
    for (int64_t r0 = 0; r0 < 3000; r0++) total += in0[i0 + 1024 * r0];
    out0[i0] = total;
  }
}"""
result = torch.empty(1024)
down, along = built(by_columns, "by_columns"), load_cpp([columns])[0]
bars(
    [
        ("down each column", best_time(down, wide, result, repeat=7) * 1e3, "bad"),
        ("eager", best_time(lambda: wide.sum(0), repeat=7) * 1e3, "plain"),
        ("ours, along the rows", best_time(along, wide, result, repeat=7) * 1e3),
    ],
    "ms",
    "Sum of each of 1024 columns of 3000 floats, one thread.",
    form="{:.2f}",
)

# %% [markdown]
# Each lane owns a column now, so no clause is needed: no two lanes touch one accumulator. The rows are
# walked in blocks of 64, after which the float accumulators are added to accumulators in double, for the reason that chunks have.
#
# ### What is needed twice
#
# A softmax walks along its row three times: for the maximum, for the sum of the exponentials, and to divide. Its
# values are needed at different times, and each has to be either kept or made again. Here is its second walk. (`v3`
# is the maximum, which the first walk has found, and `v4` an element of the row.)

# %%
softmax = watch(lambda t: torch.softmax(t, 1), torch.randn(64, 3000), dynamic=False).half()["compiled"].sources[0].code
print(part(softmax, "float kept", "    const float v9"))

# %% [markdown]
# The row itself is loaded in every walk. It is in the cache after the first, so that costs little. An exponential
# costs as much as ten loads, and the third walk wants it again. So it goes into an array as long as the row,
# `kept`. Only expensive values are kept this way, and only as many as 256 KiB hold: one of a row of 65,536 floats, because the array
# lies on the stack of the thread, of which there are some megabytes, and has to stay in the cache as well.
#
# ### What OpenMP does not know
#
# There is no clause for a variance. Its two numbers, mean and sum of squared distances, have to be merged together.
# Suppose that one part of a row has `n` numbers with the mean `a` and the squares `p`, another one `m` numbers with
# `b` and `q`. The mean of all is between the two, nearer to the larger part. And each square was taken around the
# wrong mean. The correction depends only on the distance `b - a` of the two:
#
#     p + q + (b - a) * (b - a) * n * m / (n + m)
#
# Try it on (1, 3) and (5, 7, 9). The means are 2 and 7, the squares 2 and 8. Together they have the mean 5, and the
# squares are 2 + 8 + 25 * 6/5 = 40. Directly: 16 + 4 + 0 + 4 + 16 = 40.
#
# So a chunk goes through three steps. Its values are put into an array that stays in the first-level cache. Two
# plain loops over the array, both vectorised, compute its mean and its squares. The formula merges them into those
# of the row, in double:

# %%
variance = watch(lambda t: t.var(1), torch.randn(64, 320), dynamic=False).half()["compiled"].sources[0].code
print(part(variance, "double mean", "    // "))

# %% [markdown]
# The position of a maximum works in the same way. Both merging steps are functions in `reductions.h`, which is put in front
# of the kernels. (The generator of chapter 9 also merges maxima and sums of exponentials, so that a softmax walks its row twice. On
# a CPU, where exponentials are what takes time, it walks three times and computes each of them once.)
#
# ### Two iterations that hit one element
#
# The gradient of an embedding adds a row of the incoming gradient to the row of the table that was looked up. Two
# tokens may have looked up the same row. If threads share the tokens, two of them may add to one element at the
# same time, and one of the additions is lost. Atomic additions would lose none, but then the order of the
# additions, and with it the last bits of the sum, would depend on timing. The loop nest offers a third way:
# whatever the tokens are, different *columns* of the table never collide. So the loop over blocks of columns
# (`lane0` is the first of a block) goes outside, where threads can share it, and all tokens of a column are added
# in their order:

# %%
def lookup(table, tokens):
    return F.embedding(tokens, table)


table, tokens = torch.randn(100, 32, requires_grad=True), torch.randint(100, (4000,))
seen = watch(lookup, table, tokens, dynamic=False)
seen.result.sum().backward()
scatter = seen.half("backward")["compiled"].sources[-1].code
print(part(scatter, "for (int64_t lane0"))
gradient = lambda: torch.autograd.grad(minicompile.compile(lookup)(table, tokens).sin().sum(), table)[0]
print("the same bits in every run:", all(torch.equal(gradient(), gradient()) for _ in range(3)))

# %% [markdown]
# `mc_index` compares the token with the size of the table. Eager raises an IndexError for a token that is not in
# it; a kernel cannot raise, so it notes the problem, reads row 0 instead, and the host program raises when the
# kernel has returned.
#
# ## The real version
#
# First the bodies of all loops of a kernel become one graph of values
# ([`link`](ref:minicompile.ch08_fusion.values.link)). A buffer is *local* if one loop of the kernel writes it,
# others of the same kernel read it, and nobody else wants it. It needs no memory: its store and its loads become an
# edge, and equal values are one. Then each value is computed in the outermost loop that knows all of its variables,
# so that what does not change along a row is not computed for each element of it.
#
# ### Which loop is innermost?
#
# The innermost loop is the one whose iterations become lanes. Sixteen lanes load with one instruction if they
# read sixteen neighbours. If each reads from another row, it takes sixteen loads. So each access votes: a
# variable that moves it by one element gets its bytes as votes, one that moves it further loses them, and
# stores count twice, because a strided store has to read the cache line as well. Take `x + y.t()` on 1000 by
# 1000 floats. `x[1000*i0 + i1]` gives 4 votes to `i1` and takes 4 from `i0`. `y[i0 + 1000*i1]` does the
# opposite. The store `out[1000*i0 + i1]` decides, with 8 for `i1`.
#
# %show minicompile.ch10_cpp.nests.vote
#
# These are the votes for that sum and for two others:

# %%
from minicompile.ch08_fusion.values import link
from minicompile.ch10_cpp.nests import Emitter, vote

square, rows = torch.randn(1000, 1000), []
for words, function in (
    ("x + y.t()", lambda x, y, z: x + y.t()),
    ("(x.t() + y.t()).contiguous()", lambda x, y, z: (x.t() + y.t()).contiguous()),
    ("(x.t() + y.t() + z.t()).contiguous()", lambda x, y, z: (x.t() + y.t() + z.t()).contiguous()),
):
    (step,) = watch(function, square, square.clone(), square.clone(), dynamic=False).half()["schedule"].steps
    e = Emitter(link(step), 1, {})
    accesses = [str(v.index) for v in e.graph.steps if v.op in ("load", "store")]
    rows.append((words, "; ".join(accesses), *(f"{vote(e, v):g}" for v in step.vars)))
Table(["program", "loads, and the store", "votes for i0", "votes for i1"], rows)

# %% [markdown]
# A variable with fewer than 16 values cannot fill the lanes, so what it has won counts in proportion (`min(size,
# 16) / 16`). And in a kernel that reduces only the accesses inside of the row vote, since the others happen once
# per row.
#
# In the second row there is a tie, which goes to the variable that stands last. In the third, three strided loads
# outvote the store.
#
# Whoever has lost the vote still jumps. If some access of a pointwise kernel jumps along the lane and moves by one element
# along another variable, as the load of a transposition does, the nest is cut into tiles of 32 by 64 elements. (An access
# that does not depend on the lane at all, such as `s[i0]`, does not jump.) A tile is finished before
# the next one begins, so that a cache line which was fetched for one element is still there for its neighbours:


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
# them makes the graph of values, and asks whether anything in it reduces:
#
# %show minicompile.ch10_cpp.emit.emitted "e = Emitter" to "emit_pointwise"
#
# What these functions leave behind are the lines of the loops, in `function`. In front of them go the pointers. A
# kernel gets one array of addresses, and gives each a name and a type:
#
# %show minicompile.ch10_cpp.emit.pointer_lines "lines = {}" to "return"
#
# Sizes that vary come in a second array, as numbers.
#
# ## Compile time
#
# A C++ compiler that reads torch's headers takes half a minute for a file. Ours reads no header at all, not
# even the standard library's; what kernels need is declared in three small files. Four headers of the standard library, with
# nothing behind them, already cost this:

# %% tags=["fold"]
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
# Kernels of one program are dealt into a few files, as many as there are cores, and more if there are many kernels.
# One run of g++ makes a library of each. They run side by side in threads that only wait, while the compiler goes
# on with the rest of the program. A kernel waits for its file when it is first called. Of kernels with equal texts
# only one is compiled: a GPT of twelve equal layers has the kernels of one. Libraries stay on disk, so the next
# process runs no g++ at all, and after a change to the program it runs only for the kernels that are new.
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
            (half["which"], s.name, len(s.code.splitlines()), s.code.count("#pragma omp simd"))
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
