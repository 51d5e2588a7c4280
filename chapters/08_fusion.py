# %% [markdown]
# # Fusion: fewer trips to memory
#
# After [chapter 7](chapter:07) a program is a list of loops. One could generate a kernel for each, and be
# no faster than eager PyTorch. The gain comes from putting loops together, so that a value goes from one to
# the next in a register and not through memory. This chapter decides which loops, in which order, and who
# gets which memory.

# %%
import torch
import torch.nn.functional as F

import minicompile
from chapters._lib import (
    Table, bars, best_time, draw_fusion, drawing, example, lines, measured, size, timeline, watch
)
from minicompile.ch07_loops.ir import Extern, Loop
from minicompile.ch07_loops.verify import print_program
from minicompile.ch08_fusion.fuse import FusionOptions, fuse
from minicompile.ch08_fusion.kernel import Kernel

# %% [markdown]
# ## The problem, measured
#
# Ten operations on a large tensor. Each does one addition or multiplication for an element, and each reads
# and writes all elements.


# %%
def chain(x):
    for i in range(5):
        x = x * 1.5 + 0.25
    return x


def chain_into(x, out):  # eager as well, but into memory that is there already
    for i in range(5):
        torch.mul(x if i == 0 else out, 1.5, out=out)
        torch.add(out, 0.25, out=out)


big = torch.randn(2_000_000)
other = torch.empty_like(big)
copy_time = best_time(lambda: other.copy_(big), repeat=15)
eager_time = best_time(chain, big, repeat=7)
ready_time = best_time(chain_into, big, other, repeat=7)
fused_time = best_time(minicompile.compile(chain), big, repeat=9)
bars(
    [
        ("one copy of the tensor", copy_time * 1e3, "plain"),
        ("ten operations, eager", ready_time * 1e3, "bad"),
        ("ten operations, one kernel", fused_time * 1e3),
    ],
    "ms",
    "Time on 2 million floats, into memory that is there already.",
    form="{:.2f}",
)

# %% [markdown]
# The copy does no arithmetic: it is the time of reading and writing the tensor once. The fused kernel does
# ten operations for each element and is nearer to the copy than to eager, because the processor computes
# while it waits for memory. Eager PyTorch waits ten times. On a GPU arithmetic is cheaper still, compared
# with memory.
#
# That was kind to eager: it wrote into memory that was there already. An ordinary chain allocates a tensor
# for each result, and on a CPU the operating system has to find and clear its pages:

# %%
print(f"ten operations, eager, with a new tensor each: {eager_time * 1e3:.1f} ms")

# %% [markdown]
#
# ## The naive version: fuse neighbours
#
# Put each loop into the kernel of the loop before it, as long as both have the same number of elements.
# This takes five lines.


# %%
def fuse_neighbours(program):
    groups = []
    for node in program.nodes:
        same = (
            groups
            and all(isinstance(n, Loop) for n in (node, groups[-1][-1]))
            and [v.size for v in groups[-1][-1].vars] == [v.size for v in node.vars]
        )
        groups[-1].append(node) if same else groups.append([node])
    return groups


def two_branches(x, w):
    a = F.silu(x)
    b = x.sum(1)
    c = x @ w
    d = a * 2
    return d, b, c + 1


n = torch.randn(64, 64)
seen = watch(two_branches, n, n.clone())
program = seen.half()["program"]
print(print_program(program))

# %%
print("neighbours:", [[node.name for node in group] for group in fuse_neighbours(program)])
print(
    "ours:      ",
    [
        [loop.name for loop in s.loops] if isinstance(s, Kernel) else [s.name]
        for s in seen.half()["schedule"].steps
    ],
)

# %% [markdown]
# It misses what a look at the data shows. The sum reads the same `x` as the pointwise loop, and can read it
# in the same pass, but it has another number of result elements, and a library call may stand between two
# loops that have nothing to do with it.
#
# Worse, it can be wrong. Loops of one size are not always loops over the same elements:


# %%
def transposed(x):
    y = torch.exp(x)
    return y + y.t()


seen_t = watch(transposed, n)
print(print_program(seen_t.half()["program"]))

# %% [markdown]
# Here the lowering has already done the right thing and computes `exp` twice per element instead of storing
# it. Had it stored `y`, then a kernel that writes `y[64*i0 + i1]` and reads `y[i0 + 64*i1]` in the same
# iteration would read an element that has not been written yet. "Same size" is the wrong question.
#
# ## The idea: dependencies decide, bytes count
#
# Two questions, for a pair of loops that share memory.
#
# **May they?** Write down for each loop which buffers it reads and writes, and *at which index*, as an
# expression over its variables. Rename the variables of one so that the indices agree. If every value that
# flows from the first to the second is read at the index at which it was written, each iteration depends
# only on itself, and the two may be one kernel. And nothing else may have to run between them.
#
# **Is it worth it?** Count the bytes that need not move: what flows is not read again, and if nobody else
# wants it, never written.
#
# Then be greedy: take the pair that saves most, fuse it, look again.
#
# ## The real version
#
# The dependencies of a loop are collected by replaying its body with a handler that notes loads and stores:
#
# %show minicompile.ch08_fusion.dependencies.accesses
#
# The score is the second question:
#
# %show minicompile.ch08_fusion.fuse.score
#
# And the first, with everything that can be in the way. Every exit leaves a reason.
#
# %show minicompile.ch08_fusion.fuse.try_fuse
#
# The order is from cheap to expensive: counting, then reachability, then `find_alignment`, which renames
# the variables of one loop so that the indices of both agree, and last `hazard`, which looks at every pair
# of accesses to a common buffer. A pair that is refused today may be accepted after another fusion, so the
# search goes round until nothing changes.
#
# The cycle test deserves a picture. `relu` and `add` both touch `a`, and could be fused, if it were not for
# the matrix product. It needs the result of one and feeds the other: a kernel that contains both would have
# to run before itself.


# %%
def sandwich(x, w):
    a = F.relu(x)
    return a + a @ w


seen_s = watch(sandwich, n, n.clone())
for d in seen_s.half()["schedule"].decisions:
    print("fused" if d.accepted else "apart", d.a, "with", d.b, f"({d.score:,} bytes):", d.reason)
drawing(
    {
        "a": ("relu", "a loop", "compute"),
        "mm": ("mm", "a library call", "library"),
        "b": ("add", "a loop", "compute"),
    },
    [("a", "mm"), ("mm", "b"), ("a", "b")],
    "relu feeds both a matrix product and an addition, and the product feeds the addition; "
    "fusing relu with the addition would make a cycle through the product.",
    marked=[("a", "b")],
)

# %% [markdown]
# ## The running example
#
# The block of [chapter 3](chapter:03), forward. On the left the loops and library calls in program order,
# on the right what runs.

# %%
block, x = example()
seen = watch(block, x)
forward = seen.half("forward")
program, schedule = forward["program"], forward["schedule"]
draw_fusion(program, schedule, "Fusion in the forward pass of the GPT block.")

# %% [markdown]
# The kernels lie between the library calls, like mortar. What does each of them save? And the pairs that
# shared data and stayed apart:

# %%
accepted = [d for d in schedule.decisions if d.accepted]
refused = [d for d in schedule.decisions if not d.accepted and d.score > 0]
print(f"fused {len(accepted)} times, {size(sum(d.score for d in accepted))} of traffic saved\n")
for d in accepted:
    print(f"  {d.a} + {d.b}: {size(d.score)}, {d.reason}")
print("\napart:")
for reason in dict.fromkeys(d.reason for d in refused):
    print(f"  {sum(d.reason == reason for d in refused)} pairs: {reason}")

# %% [markdown]
# How much is that of all traffic? Count what each step reads and writes, with and without fusion. The same
# program is scheduled twice.

# %%
from minicompile.ch08_fusion.dependencies import nbytes
from minicompile.ch08_fusion.memory import step_reads, step_writes


def traffic(schedule):
    """(bytes moved by kernels, bytes moved by library calls), each operand counted once per step."""
    moved = {Kernel: 0, Extern: 0}
    for step in schedule.steps:
        names = [*dict.fromkeys(step_reads(step)), *dict.fromkeys(step_writes(step))]
        moved[type(step)] += sum(
            nbytes(schedule.program.buffers[n]) for n in names if n in schedule.program.buffers
        )
    return moved[Kernel], moved[Extern]


apart = fuse(program, FusionOptions(enabled=False))
rows = [
    ("one kernel per loop", traffic(apart)[0] / 1e3, "bad"),
    ("fused", traffic(schedule)[0] / 1e3),
    ("library calls", traffic(schedule)[1] / 1e3, "library"),
]
bars(
    rows,
    "kB",
    "Bytes moved in the forward pass of the block.",
    "Matrix products and attention move what they move.",
    form="{:,.0f}",
)

# %% [markdown]
# "One kernel per loop" is not eager PyTorch. Eager's layer norm and GELU are kernels written by hand, each of
# which does in one pass what is several loops here:

# %%
eager_bytes = 0
for node in seen.graphs[0].graph.nodes:
    tensors = [
        n.meta["val"] for n in (node, *node.all_input_nodes) if isinstance(n.meta.get("val"), torch.Tensor)
    ]
    if node.op == "call_function" and getattr(node.target, "__name__", "") in ("layer_norm", "gelu", "add"):
        eager_bytes += sum(t.numel() * t.element_size() for t in tensors)
bars(
    [("eager's pointwise and norm kernels", eager_bytes / 1e3, "bad"), *rows[:2]],
    "kB",
    "The same, with eager.",
    form="{:,.0f}",
)

# %% [markdown]
# Taken apart, the loops move more than eager. Fused, they move less, but not much: people have fused this
# block by hand, and most of its traffic belongs to library calls. Fusion saves more in backward, where
# eager runs a chain of small kernels for each gradient:

# %%
seen.result.sum().backward()
with_backward = watch(block, x)
halves = {h["which"]: h for h in seen.halves + with_backward.halves}
Table(
    ["graph", "loops", "kernels", "library calls", "traffic saved by fusing"],
    [
        (
            which,
            sum(isinstance(n, Loop) for n in h["program"].nodes),
            sum(isinstance(s, Kernel) for s in h["schedule"].steps),
            sum(isinstance(s, Extern) for s in h["schedule"].steps),
            size(sum(d.score for d in h["schedule"].decisions if d.accepted)),
        )
        for which, h in halves.items()
    ],
)

# %% [markdown]
# And on a GPU, measured for whole training steps. The arithmetic of a bf16 step is fixed by its matrix
# products; time and peak memory fall because tensors between kernels are gone, in forward as well as among
# what is saved for backward:

# %% tags=["gpu-result", "results:h100-gpt2", "results:h100-resnet50"]
rows = []
for name in ("h100-gpt2", "h100-resnet50"):
    runs = measured(name)
    for label, run in (("eager", "eager"), ("fused", "minicompile")):
        ms, megabytes, kernels = (runs[run][k] for k in ("ms", "peak_memory_mb", "kernels"))
        rows.append((name[5:], label, f"{ms:.2f}", f"{megabytes / 1000:.2f}", kernels or "-"))
Table(["work, bf16", "how", "ms per step", "peak GB", "generated kernels"], rows)

# %% [markdown]
# ## Order and memory
#
# The order of the steps is free within the dependencies, and it decides how much memory is alive at once.
# For each buffer the plan says when it is allocated, when it dies, and whether it takes over the memory of
# a dead one.

# %%
from minicompile.ch08_fusion.memory import lifetimes

lives = lifetimes(program, schedule.steps)
last = len(schedule.steps) - 1
timeline(
    [
        (name, birth, lives.death.get(name, last), size(nbytes(program.buffers[name])))
        for name, birth in lives.birth.items()
    ],
    len(schedule.steps),
    "Lifetimes of the buffers of the forward pass.",
    "Buffers that live to the end are results, or saved for backward.",
)

# %%
plan = schedule.plan
everything = sum(nbytes(program.buffers[n]) for n in lives.birth)
taken = [pair for step in plan.steps for pair in step.reuse]
print(f"all buffers together {size(everything)}, alive at once at most {size(plan.peak)}")
print("takes over memory:", ", ".join(f"{new} of {old}" for new, old in taken) or "nothing, in forward")
back = halves["backward"]["schedule"].plan
print("in backward:", ", ".join(f"{new} of {old}" for step in back.steps for new, old in step.reuse))

# %% [markdown]
# A network that trains keeps most of what forward computes, because backward wants it. So little is reused
# in forward. In backward gradients take over the memory of the activations they were computed from. One
# function decides whether that is safe inside of a kernel:
#
# %show minicompile.ch08_fusion.memory.overwrites_safely
#
# ## What it costs
#
# Two loops are a candidate only if they touch a common buffer, so candidates are found through buffers,
# not by trying all pairs. Time to schedule the forward pass of deeper models:

# %%
points, considered = [], {}
for depth in (1, 2, 4):
    stack = torch.nn.Sequential(*[type(block)() for _ in range(depth)])
    deep = watch(stack, x, backend="loops").half("forward")["program"]
    points.append((depth, 1000 * best_time(fuse, deep, FusionOptions(), repeat=3)))
    considered[depth] = len(fuse(deep, FusionOptions()).decisions)
print("pairs considered, by number of blocks:", considered)
lines({"fuse": points}, "blocks", "ms", "Milliseconds to fuse the forward pass against the number of blocks.")

# %% [markdown]
# ## What torch.compile does differently
#
# Inductor's scheduler is greedy in the same way, scores by bytes saved and by distance, and tests for
# cycles. It also fuses into matrix products when it generates those itself (templates), groups unrelated
# small kernels into one launch (`combo_kernels`, horizontal fusion), can benchmark a fusion before it
# accepts it, and limits how far apart two nodes may be. Its indices are sympy expressions; ours are linear
# forms that compare by structure ([symbolic](code:minicompile/ch01_graphs/symbolic.py)), which is why each
# alignment test is cheap. It does not keep the reasons for refusals, except in its debug log.
#
# Polyhedral compilers (Pluto, Tiramisu) solve for a good order of all iterations with integer programming.
# They find fusions that need shifted or tiled loops. The graphs of neural networks rarely need them.
#
# ## Exercises
#
# <!-- exercises -->
#
# ## Further reading
#
# - S. Williams, A. Waterman, D. Patterson, *Roofline: An Insightful Visual Performance Model* (2009).
# - A. Darte, *On the complexity of loop fusion* (1999), on why nobody searches for the best one.
# - J. Ragan-Kelley and others, *Halide* (PLDI 2013): computing again against storing, as a choice.
# - The design notes on TorchInductor in the PyTorch developer forum (2022).
