# %% [markdown]
# # Fusion: fewer trips to memory
#
# After [chapter 7](chapter:07) a program is a list of loops. One could generate a kernel for each, and be
# no faster than eager PyTorch. The gain comes from putting loops together, so that a value goes from one to
# the next in a register and not through memory. This chapter decides which loops, in which order, and who
# gets which memory.

# %%
import inspect

import torch
import torch.nn.functional as F

import minicompile
from chapters import tiny
from chapters._lib import (
    Listings,
    Table,
    Walk,
    bars,
    best_time,
    draw_fusion,
    drawing,
    example,
    lines,
    measured,
    shortened,
    size,
    timeline,
    watch,
)
from minicompile.ch07_loops.ir import Extern, Loop, written_by
from minicompile.ch07_loops.verify import print_loop, print_program
from minicompile.ch08_fusion import fuse as fuse_module
from minicompile.ch08_fusion.alignment import find_alignment
from minicompile.ch08_fusion.dependencies import remove_dead
from minicompile.ch08_fusion.fuse import fuse, score, shared_buffers
from minicompile.ch08_fusion.groups import Fuser, FusionOptions
from minicompile.ch08_fusion.kernel import Kernel

# %% [markdown]
# ## The smallest version
#
# [Part 9 of tiny](chapter:tiny.9), the compiler in one file, has a test for legality and greed. The test asks, for
# each value that crosses from one loop to another, whether it is read at the position where it was made:

# %%
print(inspect.getsource(tiny.refusal))

# %% [markdown]
# Two loops pass this test only if they run over the same rows and columns in the same order. These two have the
# same elements in another order. One kernel could do both, and tiny makes two. (In its words `r` and `c` are the row
# and the column of a result.)


# %%
def turned(x):
    y = x.t().exp()
    return y, y.t() * 2


square = torch.randn(64, 64)
steps, _ = tiny.fused(tiny.decompose(tiny.record(turned, square)), refused := [])
print("tiny:", len(steps), "kernels, because", refused[0][2])
print("minicompile:", len(watch(turned, square).half()["schedule"].steps), "kernel")

# %% [markdown]
# The real scheduler may turn one of two nests around before it compares them (*alignment*), it knows
# reductions of any dimensions, and it decides who may use whose memory afterwards. But first, what is it all for?

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


# %%
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
# while it waits for memory. Eager PyTorch goes through the tensor ten times. On a GPU arithmetic is cheaper still, compared
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
# Put each loop into the kernel of the loop before it, as long as both run over the same sizes.


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


# %% [markdown]
# Try it on a program with two branches and a matrix product:


# %%
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
# This rule misses what a look at the data shows. The sum reads the same `x` as the pointwise loop, and both could read it
# in one pass; but the sum has fewer results, so the rule keeps them apart. It also separates two loops between which a
# library call stands that neither of them has to do with.
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
# it. Suppose that it had stored `y`, and that a scheduler had fused the two loops because they have the same
# size. Such a kernel is easy to write by hand, and to run:

# %%
x = torch.arange(9.0).view(3, 3) / 10


def two_loops(x):
    y, out = torch.full((3, 3), torch.nan), torch.full((3, 3), torch.nan)
    for i in range(3):
        for j in range(3):
            y[i, j] = x[i, j].exp()
    for i in range(3):
        for j in range(3):
            out[i, j] = y[i, j] + y[j, i]
    return out


# %% [markdown]
# The fused kernel has the two lines under one pair of loops:


# %%
def one_loop(x):
    y, out = torch.full((3, 3), torch.nan), torch.full((3, 3), torch.nan)
    for i in range(3):
        for j in range(3):
            y[i, j] = x[i, j].exp()
            out[i, j] = y[i, j] + y[j, i]
    return out


Listings([("two loops", str(two_loops(x))), ("fused", str(one_loop(x)))])

# %% [markdown]
# The upper half is wrong. When the iteration (0, 1) reads `y[1, 0]`, that element has not been written. In
# this order of iterations the lower half comes out right, and that is luck: on a GPU all of them run at the
# same time. Whether two loops have the same size is the wrong question.
#
# ## The idea: dependencies decide, bytes count
#
# Two questions take its place, for a pair of loops that share memory.
#
# **May they?** Write down for each loop which buffers it reads and writes, and *at which index*, as an
# expression over its variables. If every value that flows from the first loop to the second is read at the
# index at which it was written, each iteration depends only on itself, and the two may be one kernel. And
# nothing else may have to run between them.
#
# **Is it worth it?** Count the bytes that need not move: what flows is not read again, and if nobody else
# wants it, it is never written. Two loops of which one feeds the other are fused *vertically*; two that only read the same
# buffer, *horizontally*. The compiler's reasons below use these words.
#
# Then be greedy: take the pair that saves most, fuse it, look again.
#
# ## What has to run before what
#
# The order of the program is one order that gives the right answer. Fusion will change it, so it has to know which parts of
# it matter. Three kinds do. A loop that reads a buffer runs after the one that has written it: *read after write*. A
# write into memory that already holds something runs after everybody who still wants the old contents: *write after
# read*. And two writes to one memory keep their order: *write after write*.
#
# Chapter 5 has left few of the latter two. Programs are functional, and every buffer of the loop IR is written once,
# except where the caller will look: an input that the program changes. There a buffer has a new name and is memory that
# exists already. It is an *alias*, and says of which buffer, in its field `alias_of`. Here is a program with all of
# that, and with the three kinds of order in one table. (In the code each loop is a *group*, which will grow when loops are
# fused. Its `ancestors` are the groups that have to run before it, as the bits of one integer.)


# %%
def changes_input(x, w):
    old = x @ w
    x.mul_(2)
    return old + 1, x.sum(0)


def fuser_of(function, *args):
    """The scheduler's state before anything is fused: a group for each loop."""
    program = watch(function, *args, backend="loops", dynamic=False).half()["program"]
    return Fuser(program, remove_dead(program), FusionOptions())


f = fuser_of(changes_input, torch.randn(64, 64), torch.randn(64, 64))
print(print_program(f.program))
print("\naliases:", {name: buffer.alias_of for name, buffer in f.buffers.items() if buffer.alias_of})

# %%
rows = []
for i, node in enumerate(f.nodes):
    earlier = [f.name(f.groups[j]) for j in f.groups if f.groups[i].ancestors >> j & 1]
    rows.append((node.name, ", ".join(node.inputs), ", ".join(written_by(node)), ", ".join(earlier) or "-"))
Table(["step", "reads", "writes", "runs after"], rows)

# %% [markdown]
# `loop1` needs `buf0`, and so runs after the product. `loop2` does not need `loop3`, although the sum is one of the
# changed `x`: the multiplication is done in its own body, which costs less than to wait and to read. `loop3` is the
# write. What it writes is called `buf3` and is the memory of `x`, so all readers of `x` come first, among them the
# product, whose result has nothing to do with it. What is not in the table is free: `loop1` may
# run last.
#
# A library call that draws random numbers has one more predecessor, the last call that drew some, since the stream of
# numbers has to be eager's. The function behind the last column walks over all names that a step writes, and from each
# along `alias_of` to all earlier names of the memory:
#
# %show minicompile.ch08_fusion.dependencies.dependency_edges
#
# ## May they? On four loops, by hand
#
# A softmax of rows is four loops, two of which reduce:

# %%
def softmax(x):
    return torch.softmax(x, 1)


f = fuser_of(softmax, torch.randn(8, 64))
print(print_program(f.program))

# %% [markdown]
# Everything that the scheduler wants to know stands in the loads and stores of a loop, and they are values that can be
# asked for their buffer and their index. The function that makes a group of one loop begins with the nest:
#
# %show minicompile.ch08_fusion.groups.make_group "names = {v" to "identity"
#
# A group begins as one loop and ends as a kernel. Its `space` is the nest, with the loop's variables renamed to `i0`,
# `i1` and `r0`, so that two loops over the same nest look the same. `mapping` has the new names, and `apply` puts them
# into an index; most loops have them already (`identity`). Then it asks the loads:
#
# %show minicompile.ch08_fusion.groups.make_group "for a in node.loads" to "group.wide_reads"
#
# `reads` maps each buffer to the *set* of indices at which it is read. Two more sets hold exceptions. `guarded` are
# buffers that are read under a condition or at a position that is itself data, so that nobody knows which elements are
# read. And `wide_reads` are those that are read inside of a reduction, for each element of the row. Last come the
# stores:
#
# %show minicompile.ch08_fusion.groups.make_group "for a in node.stores" to "group.scattered"
#
# `writes` maps a buffer to the one index at which it is written, and `scattered` are the buffers that are written under
# a condition, at a position that is data, or twice. The table shows the four groups of the softmax:

# %%
def access_table(f):
    rows = []
    for i, g in f.groups.items():
        nest = ", ".join(f"{v} < {v.size}" for v in g.space.vars)
        folds = ", ".join(f"{v} < {v.size}" for v in g.space.rvars) or "-"
        reads = "; ".join(f"{n}[{', '.join(map(str, es))}]" for n, es in g.reads.items())
        rows.append((f.name(g), nest, folds, reads, "; ".join(f"{n}[{e}]" for n, e in g.writes.items())))
    return Table(["loop", "output variables", "reduced", "reads", "writes"], rows)


access_table(f)

# %% [markdown]
# Take loop0 and loop1. `buf0` flows from one to the other. Loop0 writes it at `i0`, and loop1 reads it at
# `i0`: good. But the nests differ. Loop0 runs over `i0` and folds `r0`; loop1 runs over `i0` and `i1`. Both
# read `x`, one at `64*i0 + r0`, the other at `64*i0 + i1`. If `i1` were called `r0` the two reads would be
# the same, and both loops would have the nest `(i0 | r0)`: before the bar are the variables of the output, behind it those
# that are folded. So rename it. Loop1 then runs *inside* the
# reduction's nest, once for each element of the row; that is, it walks along the row a second time, when the
# maximum is known, but within the same kernel and for a row that is still at hand.
#
# Written out, the kernel that both become is this:
#
#     for i0 in range(8):                       # one row
#         top = -inf
#         for r0 in range(64):                  # first walk: loop0
#             top = max(top, x[64*i0 + r0])
#         for r0 in range(64):                  # second walk: loop1
#             buf1[64*i0 + r0] = exp(x[64*i0 + r0] - top)
#
# Loop1 folds nothing. It only runs over the same elements in the same order, and so it may use the reduction's
# variable. `buf0` has become the variable `top`.
#
# This is called an *alignment*: a nest for both, and what the variables of each are in terms of it. Here are
# those of all neighbours:

# %%
def alignment_table(f):
    rows, groups = [], list(f.groups.values())
    for a, b in zip(groups, groups[1:]):
        flows, common = shared_buffers(a, b)
        found = find_alignment(a, b, flows + common)
        words = (found, "", "") if isinstance(found, str) else (
            "(" + ", ".join(map(str, found.space.vars)) + " | " + ", ".join(map(str, found.space.rvars)) + ")",
            *(", ".join(f"{v} = {e}" for v, e in m.items() if str(v) != str(e)) or "as they are" for m in found[1:3]),
        )
        rows.append((f"{f.name(a)}, {f.name(b)}", ", ".join(flows) or "-", ", ".join(common) or "-", *words))
    return Table(["pair", "flows", "read by both", "common nest", "the first's variables", "the second's"], rows)


alignment_table(f)

# %% [markdown]
# ### Cutting dimensions
#
# Renaming is enough when the nests have the same dimensions. Often they do not. A `view` makes 512 elements
# of 8 rows of 64, and the two loops below visit the same elements under different descriptions:


# %%
def viewed(x):
    return x + 1, x.view(512) * 2


f = fuser_of(viewed, torch.randn(8, 64))
access_table(f)

# %% [markdown]
# Memory says how they belong together. One loop reaches an element of `x` at `64*i0 + i1`, the other at `i0`. List the
# variables of each by stride, the fastest first: the first has `i1` (stride 1, size 64) and `i0` (stride 64, size 8);
# the second has one variable (stride 1, size 512). Both lists begin at stride 1. The smaller size, 64, divides the
# larger, so cut 64 off the larger: that pairs with `i1`. What is left of the second variable has stride 64 and size 8,
# and pairs with `i0`. The second loop's variable is therefore `64*i0 + i1`. (Where two loops touch no common buffer
# there are no strides to compare. Then the strides are None, and the dimensions are paired in order, by size alone.) In
# the code both lists are turned around, so that `pop` takes the fastest of each, as variable, stride and size:
#
# %show minicompile.ch08_fusion.iteration.pair_up "a, b, segments" to "return None"
#
# The rest of the loop is the comparison of the two sizes. `_exact(na, nb)` is the quotient if `nb` divides `na`, and None
# otherwise. What is left of the larger variable goes back to its list:
#
# %show minicompile.ch08_fusion.iteration.pair_up "if na == nb" to "return None if a"

# %%
alignment_table(f)

# %% [markdown]
# When neither size divides the other, as with (6, 4) and (4, 6), no common nest exists without a division in
# the innermost loop, `cut` gives up, and the loops stay apart.
#
# Whatever alignment is found, it is only a proposal. It counts if every value that flows is read, in the
# common nest, at the index at which it was written. `apply` writes an index in the variables of the common nest:
#
# %show minicompile.ch08_fusion.alignment._first_mismatch
#
# The wrong fusion from above fails this test. To make the compiler store `y` it is enough to return it:


# %%
def stored_transposed(x):
    y = torch.exp(x)
    return y, y + y.t()


for d in watch(stored_transposed, n, dynamic=False).half()["schedule"].decisions:
    print("fused:" if d.accepted else "apart:", d.a, "with", d.b, "-", d.reason)

# %% [markdown]
#
# ## Is it worth it?
#
# A value that flows is not read from memory any more. If no other loop reads it, it is not written either.
# And a buffer that both loops read is read once instead of twice. In the code, `flows` are the buffers that `a` writes
# and `b` reads, and `common` are those that both read. (A group of several loops may write a buffer and read it as well.
# If `b` reads it, too, it is in both lists, and counts in both.) `members` are the loops of `b` alone, so another loop of
# `a` that reads the buffer counts as one that still wants it, and the score is lower than what is saved:
#
# %show minicompile.ch08_fusion.fuse.score
#
# On the softmax of 8 rows of 64 floats, a buffer as large as `x` has 2048 bytes, and one number per row makes 32.
# These are the scores of all pairs that share something, before anything is fused:

# %%
f, rows = fuser_of(softmax, torch.randn(8, 64)), []
for i, a in f.groups.items():
    for j, b in f.groups.items():
        flows, common = shared_buffers(a, b)
        if i < j and (flows or common):
            rows.append((f"{f.name(a)}, {f.name(b)}", ", ".join(flows) or "-", ", ".join(common) or "-", score(f, a, b, flows, common)))
Table(["pair", "flows", "read by both", "bytes saved"], rows)

# %% [markdown]
# The exponentials (`buf1`) flow from loop1 to loop2, but loop3 reads them as well. So one reading is saved and the
# writing is not: 2048 bytes, and not 4096. Loop0 and loop1 both read `x`, one at `64*i0 + r0` and the other at
# `64*i0 + i1`. These indices look different, since nobody has looked for a common nest yet, and in a common nest they
# may turn out to be the same. Until that is known, such a buffer counts half. The half orders the candidates, and counts
# when a pair is asked whether it has enough in common. It does not say that the pair will be fused. If the indices are
# still different *in the common nest*, then what one loop has in a register is never what the other one needs. A pair
# between which nothing flows, and in which this holds for every buffer that both read, would save nothing and is
# refused. Here is such a pair. Both loops read nearly all of `x`, but in the same iteration they read different rows:


# %%
def neighbours(x):
    return x[1:] * 2, x[:-1] * 3


for d in watch(neighbours, torch.randn(65, 64), dynamic=False).half()["schedule"].decisions:
    print(f"scored {d.score:,} bytes, {'fused' if d.accepted else 'refused'}: {d.reason}")

# %% [markdown]
# A score is also a fact about the groups of the moment. When two groups have become one, their scores with all others
# change. So each round computes them anew.
#
# ## The decision, piece by piece
#
# `try_fuse` asks a dozen questions about a pair, from cheap to expensive, and the first *no* ends it. Every
# exit leaves a `Decision` with a reason, so that "why are these not fused?" has an answer. First come the
# limits: a kernel with too many arguments or values has too few registers. Two loops that are far apart in the program,
# of which neither feeds the other, would only make what they read and write live longer. And if what both read is less than a
# fifth of what the smaller one moves, there is too little in common to give up two simple kernels for. A last limit is for
# GPUs: a reduction with few results runs on few processors, and a loop over all its elements must not be tied to it.
#
# %show minicompile.ch08_fusion.legality.refusal "if a.device" to "return "the kernel would have too many"
#
# (`walked` belongs to a special form on GPUs. A layer norm's backward pass needs sums along rows and sums of
# columns of the same data. One kernel can do both if each program takes a block of whole rows and adds up its
# columns on the way. Such a kernel has a nest of its own, into which nothing else fits.)
#
# Then what flows is looked at. A value that is written at positions that are themselves data, as in a
# scatter, is complete only when all iterations have run. Nobody can read it in the same kernel.
#
# %show minicompile.ch08_fusion.legality.refusal "for n in flows" to "return f"{n} is read"
#
# Then the question whether something has to run between the two.
#
# ### Nothing in between
#
# `relu` and `add` below both touch `a`, and could be fused, if it were not for the matrix product. It needs
# the result of one and feeds the other: a kernel that contains both would have to run before itself.


# %%
def sandwich(x, w):
    a = F.relu(x)
    return a + a @ w


n = torch.randn(64, 64)
seen_s = watch(sandwich, n, n.clone())
for d in seen_s.half()["schedule"].decisions:
    print("fused" if d.accepted else "apart", d.a, "with", d.b, f"({d.score:,} bytes):", d.reason)

# %% tags=["fold"]
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
# In a graph: is there a path from `a` to `b` that goes through a third group? To search for paths for each of
# ten thousand pairs would be slow. So each group carries its *ancestors*, all groups that must run before it, with
# whatever is between them. A path through a third group exists exactly if some direct successor
# of `a`, other than `b`, is an ancestor of `b`:
#
# %show minicompile.ch08_fusion.groups.makes_cycle
#
# Groups are named by numbers. When two become one, the number of one of them stays, and `find(s)` answers which
# group `s` is in by now. `above >> s & 1` is bit `s` of the integer, that is, whether `s` is among the ancestors.
#
# ### Updates in place
#
# Last come *hazards*, and only for a pair that nothing else has refused: two loops that read `x` at different elements, of
# which one also updates it, are refused because nothing is saved, before anybody asks for a hazard.
# A buffer may be an alias, a new name for memory that already holds something, because the program
# updates a parameter or the statistics of a batch norm. As two kernels, the one that reads the old contents runs before
# the one that overwrites them. Inside of one kernel the iterations have no order, so an element may be overwritten
# before another iteration has read it. Four things are forbidden for the memory of an alias:
#
# - It is read at another index than it is written. The rule is the same as for values that flow, also where nothing
#   flows: both indices have to be equal in the common nest.
# - It is written at a position that is data, or under a condition, or it is read so. Then nobody can compare indices.
# - The kernel reduces, and reads the old contents along its rows. It walks along these more than once, and the second
#   walk would read what the first has written. That concerns the loops that fold, and those that would run over the
#   folded dimensions because they are aligned with one that folds.
# - Both loops write it. (Unless the two can be seen never to meet, as the parts of a `cat` do, which write one
#   result side by side.)
#
# Here is a program with such a hazard. It adds up each element and its mirror image, and then adds one to all of
# them. The two loops, and what one loop would do:

# %%
def reversed_then_changed(x):
    kept = x.flip(0) + x
    x.add_(1)
    return kept


def as_one_loop(x):
    kept = torch.empty(len(x))
    for i in range(len(x)):
        kept[i] = x[len(x) - 1 - i] + x[i]
        x[i] += 1
    return kept


print("two loops:", reversed_then_changed(torch.arange(5.0)).tolist())
print("one loop: ", as_one_loop(torch.arange(5.0)).tolist())
for d in watch(reversed_then_changed, torch.arange(5.0), dynamic=False).half()["schedule"].decisions:
    print("fused" if d.accepted else "apart:", d.reason)

# %% [markdown]
# From the middle on the one loop reads mirror images to which it has already added one. The scheduler keeps the two
# loops apart, and says why. Without `flip` each element would be read by the iteration that changes it, and one
# kernel would do.
#
# The second walk goes wrong in another way. This program subtracts the sum of each row, and then adds one to the
# matrix. The addition needs no sum, so in one kernel it would be done during the first walk, and the second would
# read what is no longer there:

# %%
def centred_then_changed(x):
    centred = x - x.sum(1, keepdim=True)
    x.add_(1)
    return centred


# %%
def in_two_walks(x):
    centred = torch.empty(x.shape)
    for row, out in zip(x, centred):
        total = 0.0
        for j in range(len(row)):  # first walk
            total += row[j].item()
            row[j] += 1
        for j in range(len(row)):  # second walk
            out[j] = row[j] - total
    return centred


# %%
print("right:  ", centred_then_changed(torch.arange(6.0).view(2, 3)).tolist())
print("one kernel:", in_two_walks(torch.arange(6.0).view(2, 3)).tolist())
for d in watch(centred_then_changed, torch.randn(8, 64), dynamic=False).half()["schedule"].decisions:
    print("fused:" if d.accepted else "apart:", d.a, "with", d.b, "-", d.reason)

# %% [markdown]
# The function asks this of both groups, in turns: `x` is the one that writes `name`, `y` the other one, `root` the
# memory, and `map_x` and `map_y` take their indices to the common nest. These are its lines about reads. They are the
# answer to the exercise [when one kernel would be wrong](exercise:fusion-hazard), which gives you the rest:
#
# %show minicompile.ch08_fusion.legality.hazard "for other, indices" to "return f"{root} is read"
#
# ## Greedy, round by round
#
# Candidates are found through buffers: the writer of each with its readers, and neighbouring readers of one
# buffer. All of them are scored, and tried in the order of their scores. A fusion may remove the obstacle of
# another, because what stood between two loops is now inside of one of them. So the rounds repeat until
# nothing changes, at most eight times. A round begins with the scores:
#
# %show minicompile.ch08_fusion.fuse.fuse_groups "scored = {}" to "scored[i, j]"
#
# `pairs` are positions of loops, and `find` tells in which group a loop is by now. Of two groups the one that runs first is
# given first to `shared_buffers`; who that is, says the bit of `ancestors`. Then the pairs are tried:
#
# %show minicompile.ch08_fusion.fuse.fuse_groups "for i, j in sorted(scored" to "if not fused"
#
# The highest score comes first, and equal scores come in the order of their distance, nearest neighbours first. Pairs of no
# score are tried last, and are fused only as parts of one result: two operands of a `cat`, say, or two loops fed by one. A pair
# that was refused is asked again only if one of the two has grown since; that is what `version` is for.
#
# Below is a layer norm with its GELU and the sum that a bias gradient would be, as the scheduler goes through
# it. Each frame is one accepted pair, with all groups that exist after it.

# %% tags=["fold"]
def normed(x, w, b):
    y = F.layer_norm(x, (64,), w, b)
    return y, F.gelu(y), (y * x).sum(1), x.amax(1)


def rounds_of(function, *args):
    f, frames = fuser_of(function, *args), []
    real = fuse_module.merge

    def noted(f, ia, ib, alignment):
        names = f.name(f.groups[ia]), f.name(f.groups[ib])
        flows, common = shared_buffers(f.groups[ia], f.groups[ib])
        saved = score(f, f.groups[ia], f.groups[ib], flows, common)
        real(f, ia, ib, alignment)
        why = f"{', '.join(flows)} flows" if flows else f"both read {', '.join(common)}"
        rows = [(f.name(g), len(g.members), "yes" if g.reduces else "", ", ".join(g.writes)) for g in f.groups.values() if g.space]
        frames.append((f"{names[0]} with {names[1]} saves {size(saved)}: {why}.", Table(["group", "loops", "reduces", "writes"], rows)))

    fuse_module.merge = noted
    try:
        fuse_module.fuse_groups(f)
    finally:
        fuse_module.merge = real
    return f, frames


args = torch.randn(128, 64), torch.randn(64), torch.randn(64)
f, frames = rounds_of(normed, *args)
Walk("Fusion, pair by pair", [("Before: one group for each loop.", access_table(fuser_of(normed, *args))), *frames])

# %% [markdown]
# Greedy is not optimal. To find the best partition of a graph of loops is NP-hard (Darte 1999), and there are
# small graphs in which the pair that saves most blocks two that would save more together. In the graphs of
# neural networks that is rare, since most values have one producer and few readers, close by.
#
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


def traffic(schedule):
    """(bytes moved by kernels, bytes moved by library calls), each operand counted once per step."""
    moved = {Kernel: 0, Extern: 0}
    for step in schedule.steps:
        names = [*step.inputs, *written_by(step)]
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
halves = {h["which"]: h for h in seen.halves}
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

# %% tags=["gpu-result", "results:h100-gpt2", "results:h100-resnet50", "fold"]
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
# The order of the steps is free within the dependencies, and it decides how much memory is alive at once. The
# scheduler tries two: the order of the program, and one that takes, among the steps that are ready, the one that frees
# most. It takes the second order if that lowers the peak by more than five per cent. Then it
# plans the memory. A buffer is born at the step that writes it, and dead after the last step that reads it:

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

# %% [markdown]
# A new buffer can take over the memory of one that dies *in this very step*, if the kernel reads each element before it
# writes it. That is tried first, and of several the one that was made first is taken. If there is none, it can take over
# the memory of one that died in an earlier step and was kept, unless keeping it raises the peak. In both cases size,
# dtype and device have to be equal. The frames show the backward pass of the block, step by step: what is allocated, what
# is taken over, what is freed, and how much is alive.

# %% tags=["fold"]
def plan_frames(half):
    program, schedule = half["program"], half["schedule"]
    b, alive, frames = program.buffers, {}, []
    for step, plan in zip(schedule.steps, schedule.plan.steps):
        for new in plan.allocate:
            alive[new] = nbytes(b[new])
        for new, old in plan.reuse:
            alive.pop(old, None)
            alive[new] = nbytes(b[new])
        rows = [
            ("allocates", ", ".join(f"{n} ({size(nbytes(b[n]))})" for n in plan.allocate) or "-"),
            ("takes over", ", ".join(f"{new} has the memory of {old}" for new, old in plan.reuse) or "-"),
            ("frees", ", ".join(plan.free) or "-"),
            ("alive, allocated here", f"{size(sum(alive.values()))} in {len(alive)} buffers"),
        ]
        for n in plan.free:
            alive.pop(n, None)
        words = step.name if isinstance(step, Kernel) else str(step.op)
        frames.append((shortened(words, 80), Table(["", "memory"], rows)))
    return frames


Walk("The memory plan of the backward pass", plan_frames(halves["backward"]))

# %% [markdown]
# When is it safe to write over a value in the kernel that reads it last? Here is a kernel in which it is not:
# it adds a matrix to its transpose, and writes the result over the matrix.

# %%
y = torch.arange(9.0).view(3, 3)
right = y + y.t()
for i in range(3):
    for j in range(3):
        y[i, j] = y[i, j] + y[j, i]
print("right:", right.tolist(), "\nin place:", y.tolist())

# %% [markdown]
# The element (1, 0) was computed from an element (0, 1) that had been overwritten. So every read of the old
# value has to be at the index of the write, unmasked, and in the same iteration. And a kernel that walks its
# rows again must not need the old value, or anything that was computed from it, after the write:
#
# %show minicompile.ch08_fusion.memory.overwrites_safely

# %%
plan = schedule.plan
everything = sum(nbytes(program.buffers[n]) for n in lives.birth)
taken = [pair for step in plan.steps for pair in step.reuse]
print(f"forward: all buffers together {size(everything)}, alive at once at most {size(plan.peak)}")
print("takes over memory:", ", ".join(f"{new} of {old}" for new, old in taken) or "nothing, in forward")
back = halves["backward"]["schedule"].plan
print("in backward:", ", ".join(f"{new} of {old}" for step in back.steps for new, old in step.reuse))

# %% [markdown]
# A network that trains keeps most of what forward computes, because backward wants it. So little is reused in forward.
# In the backward pass of the block two matrix products write over gradients that are dead by then. Activations that
# were saved die there, too. If a kernel reads one for the last time and writes a gradient of its size, the gradient
# takes its place, as here for the input of a GELU:

# %%
def activated(x, w):
    return F.gelu(x @ w)


seen_a = watch(activated, torch.randn(64, 64), torch.randn(64, 64, requires_grad=True))
seen_a.result.sum().backward()
back = seen_a.half("backward")
print("backward reads:", ", ".join(back["program"].inputs))
print("takes over memory:", ", ".join(f"{new} of {old}" for step in back["schedule"].plan.steps for new, old in step.reuse))

# %% [markdown]
# ## Lists of tensors
#
# Fusion counts bytes that two loops share. The loops of an optimizer share none: each updates a parameter of its own.
# They are many, mostly short, and equal up to their sizes, so a launch for each costs more than it does. From four such
# loops on, they become one *list*, which is launched once (a table costs as much as three launches). Here is an
# update with momentum, of six parameters, as loops that fusion leaves apart:

# %%
def update(parameters, gradients, momenta):
    torch._foreach_mul_(momenta, 0.9)
    torch._foreach_add_(momenta, gradients)
    torch._foreach_add_(parameters, momenta, alpha=-0.01)


shapes = [(64, 64), (64,), (192, 64), (192,), (7, 3), (65,)]
half = watch(update, *[[torch.randn(shape) for shape in shapes] for _ in range(3)]).half("forward")
apart = fuse(half["program"], FusionOptions(lists=False)).steps
print("kernels:", len(apart), " of", [k.vars[0].size for k in apart], "elements")

# %% [markdown]
# Since they need nothing from each other, they become one launch, a *list*. What differs is a row of a table: which
# tensors are a piece's own, and how many elements they have. The code of all pieces is one body, in which the size is a
# symbol, `n0`:

# %%
(launch,) = half["schedule"].steps
(body,) = launch.bodies
print(*(print_loop(loop) for loop in body.loops), sep="\n")
Table(
    ["piece", "its tensors", "n0"],
    [(k, ", ".join(launch.tensors[i] for i in dict.fromkeys(p.tensors)), *p.parameters) for k, p in enumerate(launch.pieces)],
)

# %% [markdown]
# A block of the launch looks up the piece that it works on (chapters 9 and 10 print the look-up). So the 148 parameters of
# GPT-2 cost one launch, or on a CPU one parallel region, and the compilation of one body.
#
# Which kernels may be one list? They must not need each other, and no third one may stand between two of them, as in
# the cycle test above. Testing pairs would be a question for each two of hundreds. Kernels that are equal but for their
# sizes form a *class*. Each step gets a *level*: how many members of the class are on the longest way that leads to it.
# The steps are in an order in which each comes behind all that it needs:
#
# %show minicompile.ch08_fusion.lists.levels
#
# Members of equal level cannot need each other: who needs a member is a level above it. And joined level by level, they
# leave an order, since no step is below what it needs.
#
# A list starts when the last of its pieces can, and ends for all of them together. What its pieces read lives until
# then. In an optimizer that is free, as parameters and gradients live longer anyway. Elsewhere it can raise the peak:
# then only those of its pieces that move less than a megabyte are joined, which gain most, or none.
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
# cycles. It also fuses into matrix products when it generates those itself (templates), groups loops of `_foreach`
# operators and, on request, other small kernels into one launch (`combo_kernels`, with a branch per piece), can benchmark a
# fusion before it accepts it, and limits how far apart two nodes may be. Its indices are sympy expressions; ours are linear
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
