# %% [markdown]
# # Loops: from what to how
#
# A graph of primitives says *what* is computed: this tensor is the exponential of that one. To put two
# operations into one kernel, a compiler must know *how*: to make this element, read that element. This
# chapter rewrites every operator as a loop nest over elements, and finds that most of them need no loop.

# %%
import inspect

import torch

import minicompile
from chapters import tiny
from chapters._lib import Listings, Table, bars, drawing, example, head, row_of_boxes, watch
from minicompile.ch07_loops.ir import Extern, Loop, replay
from minicompile.ch07_loops.verify import print_program

# %% [markdown]
# ## The smallest version
#
# [Part 8 of tiny](chapter:tiny.8), the compiler in one file, knows one kind of iteration: over rows `r` and columns
# `c`. A view is a meta tensor, and from its strides follows which position an iteration reads. `digits` writes `r` and
# `c` as numbers whose digits are the indices of the view's dimensions. A digit is `(name, inner, count, stride)`: it is
# `name // inner % count`, and each step of it is `stride` elements in memory:

# %%
print(inspect.getsource(tiny.position))

# %% [markdown]
# That is enough for a GPT, and it stops soon after. A reduction of a dimension that is not the last one has no
# rows. A half-precision number needs two types, one in memory and one in registers. And concatenation
# reads from one of several buffers, depending on the position. In tiny each of these is a call of PyTorch's
# own kernel, and a call stands between the loops before it and after it. A view that strides cannot describe is a call, too.


# %%
def unlike_tiny(x):
    centred = x - x.mean(0)
    return torch.cat([centred, -centred], 1).exp()


x = torch.randn(64, 32)
lowered, _ = tiny.lower(tiny.decompose(tiny.record(unlike_tiny, x)))
print("tiny:", ["loop" if isinstance(step, tiny.Loop) else step.name for step in lowered])
print("minicompile:", [type(step).__name__ for step in watch(unlike_tiny, x).half()["program"].nodes])

# %% [markdown]
# (`watch` compiles a function and keeps what the compiler made on the way. `half()` is its forward half, and `"program"`
# the loops and calls of that half.) What this chapter builds has no such stops. A loop has any number of variables and
# may reduce over any of them, and the position that it reads is an arithmetic expression of them.

# %% [markdown]
# ## The naive version: a loop for each operator
#
# Every operator reads its operands from memory and writes its result. Written as Python text for vectors:


# %%
def naive_loops(operations):
    lines = []
    for result, expression in operations:
        lines += ["for i in range(n):", f"    {result}[i] = {expression}"]
    return "\n".join(lines)


print(naive_loops([("a", "x[i] * 2"), ("b", "a[n - 1 - i]        # flip"), ("y", "b[i] + x[i]")]))

# %% [markdown]
# This is right, and it is eager PyTorch: `a` and `b` are written and read although nobody wants them. The
# second loop does nothing but move data. In a transformer, splitting `q`, `k`, `v` apart and moving the
# heads to the front is three views, and a loop for each would move all of them once more.
#
# ## The idea: a tensor is a function of its index
#
# Do not compute. Describe. A tensor that is not there yet is a function from an index to the expression for
# one element. An operator composes such functions:


# %%
class Lazy:
    def __init__(self, shape, element):
        self.shape, self.element = shape, element  # element(index) -> text

    def __mul__(self, number):
        return Lazy(self.shape, lambda i: f"({self.element(i)} * {number})")

    def __add__(self, other):
        return Lazy(self.shape, lambda i: f"({self.element(i)} + {other.element(i)})")


def source(name, shape):
    return Lazy(shape, lambda i: f"{name}[{', '.join(i)}]")


# %% [markdown]
# A view computes nothing. It changes the index before it asks:


# %%
def transposed(x):
    return Lazy(x.shape[::-1], lambda i: x.element(i[::-1]))


def flipped(x):
    return Lazy(x.shape, lambda i: x.element((f"{x.shape[0] - 1} - {i[0]}", *i[1:])))


x = source("x", (4, 4))
y = transposed(flipped(x * 2)) + x
print("y[i, j] =", y.element(("i", "j")))

# %% [markdown]
# One loop, no intermediate, and the two views are gone. They have become arithmetic on indices. What is
# wrong with it shows when a value is used twice:

# %%
y = x
reads = []
for step in range(1, 9):
    y = y + transposed(y)
    reads.append((step, y.element(("i", "j")).count("x[")))
bars(
    [(f"{step} steps", n, "bad") for step, n in reads],
    "reads of x",
    "Reads of x for one element of y = y + transposed(y), repeated.",
    form="{:,}",
)

# %% [markdown]
# The work doubles at each step: nothing remembers. So there must be a decision for each value, whether it is
# computed again by each reader or put into memory once. It is a question of cost: with `n` readers of a value that
# is made from `r` tensors, recomputing moves `n*r` tensors, and keeping moves `r + 1 + n`. And there are things
# that have no formula for one element, such as sorting or a running sum. They stay library calls, as matrix
# products and convolutions do, for which libraries are better than any loop that we would write.
#
# ## A view is a map of indices
#
# Before the real code, follow one index through a chain of views by hand. `x` has shape (24, 8). The program
# makes it (4, 6, 8), exchanges the last two dimensions, reverses the first, drops the first two of the
# second, and asks for an element. Which element of `x` is it?
#
# Go backward, from the result to `x`. The result has shape (4, 6, 6). Its element `[a, b, c]` is, before the
# slice, the element `[a, b + 2, c]`: the slice has dropped two, so we count from two on. Before the flip that
# was `[3 - a, b + 2, c]`. Before the transpose it was `[3 - a, c, b + 2]`. And the first `view` numbered the
# rows of `x` by two numbers, block and row in the block, six rows to a block: so this is row `6 * (3 - a) +
# c`, column `b + 2`. In memory, with eight elements to a row, that is position `8 * (18 - 6a + c) + b + 2`,
# or `146 - 48a + b + 8c`.
#
# None of this looked at a number in `x`:

# %% tags=["fold"]
row_of_boxes(
    [
        ("a, b, c", "of the result", "plain"),
        ("a, b + 2, c", "before [:, 2:]", "compute"),
        ("3 - a, b + 2, c", "before flip(0)", "compute"),
        ("3 - a, c, b + 2", "before transpose", "compute"),
        ("18 - 6a + c, b + 2", "before view: in x", "input"),
    ],
    "An index of the result, followed backward through the slice, the flip, the transpose and the view to an index of x.",
    "An index goes backward through the views. Each box is what one view makes of the index in the box before it.",
)

# %% [markdown]
# Each view has a function from an index of its result to an index of
# its operand, and a chain of views is a composition of such functions. The compiler makes the calculation that we have
# made by hand, one view at a time:


# %%
def views(x, steps=4):
    chain = [
        lambda t: t.view(4, 6, 8),
        lambda t: t.transpose(1, 2),
        lambda t: t.flip(0),
        lambda t: t[:, 2:],
    ]
    for view in chain[:steps]:
        x = view(x)
    return x + 1


# %% [markdown]
# The loop that it makes is among the things that `watch` keeps. We ask it for its variables and for the index of its one
# load, after none of the views, after the first, after the first two, and so on:


# %%
def load_of(function, *args):
    """The loop that a function of one input becomes: its variables, and the index at which it loads."""
    (loop,) = watch(function, *args, dynamic=False).half()["program"].nodes
    (load,) = loop.loads
    return ", ".join(f"{v} < {v.size}" for v in loop.vars), str(load.index)


words = ["nothing", "view(4, 6, 8)", "transpose(1, 2)", "flip(0)", "[:, 2:]"]
rows = [(words[n], *load_of(lambda x, n=n: views(x, n), torch.randn(24, 8))) for n in range(5)]
Table(["after", "the loop runs over", "and loads x at"], rows)

# %% [markdown]
# `flip` made one coefficient negative and added a constant, the slice added another. `transpose` changes nothing in
# the table. The reason is the order of the loops: they follow the memory of the result, slowest first, and eager
# lays the sum of a transposed tensor and a number out as the transposed tensor is. So the loop variables are not in
# the order of the letters above: `i0` is `a`, `i1` is `c`, and `i2` is `b`. Put the letters in, and the last row
# says `146 - 48a + 8c + b`. In the end there is one loop and one load.
#
# This is a view in the compiler. It gets the operand as a lazy tensor, and returns one whose element function
# asks the operand at another index. `g` is the state of the lowering, and `g.val` the fake of the node that is being
# lowered. `b`, a `Builder`, writes down the body of a loop, and `b.read(x, index)` asks `x` for an element. Size and
# strides are those of the fake:
#
# %show minicompile.ch07_loops.rules.views.slice_ "def pick" to "return index"
#
# %show minicompile.ch07_loops.lazy.make_view
#
# The last two arguments of `make_view` answer a second question. A library call that reads the view wants memory,
# described by sizes, strides and an offset. Many views are such a *window* on the memory of their operand: the rule
# is that each dimension of the view has to walk through that memory in equal steps, none of them negative. A slice
# does, also one with a step; a transpose, an expansion (in steps of zero), and the splitting of a dimension do.
# Merging two dimensions does if there is no gap between them. A flip does not, since it walks backwards. `relayout`
# is the function that computes the window, or says that there is none; then the view is copied when a library asks.
#
# ### Indices that divide
#
# `view` was easy because it split a dimension: a pair of numbers became one by a multiplication. Merging is
# the other direction, and divides. If `y = x.view(192)`, then element `i` of `y` is row `i // 8`, column `i %
# 8` of `x`, and in memory it is at `8 * (i // 8) + i % 8`. A person sees at once that this is `i`. A compiler
# has to be told, or every kernel behind a `view` divides twice for each element, which on a GPU costs more
# than the load.
#
# So index expressions are kept in one canonical form, a sum of products with integer coefficients, and each
# time something is added, multiplied or divided the result is brought into this form again. Bounds do most of
# the work: each loop variable knows how large it can be. Watch what the algebra of [chapter 1](chapter:01)
# makes of some:

# %%
from minicompile.ch01_graphs.symbolic import Symbol, floordiv, mod, to_text

i, j = Symbol("i", 12).expr, Symbol("j", 8).expr
rows = [
    ("(8i + j) // 8, where j < 8", floordiv(8 * i + j, 8), "j cannot carry into the next row"),
    ("(8i + j) % 8", mod(8 * i + j, 8), "8i leaves no remainder"),
    ("(8i + j) // 4", floordiv(8 * i + j, 4), "8i divides, j / 4 has to be computed"),
    ("(16i + 2j) // 6", floordiv(16 * i + 2 * j, 6), "a common factor of 2 goes out"),
    ("8 * ((8i + j) // 8) + (8i + j) % 8", 8 * floordiv(8 * i + j, 8) + mod(8 * i + j, 8), "a view and back"),
    ("(i // 3) // 2", floordiv(floordiv(i, 3), 2), "one division"),
]
Table(["written", "becomes", "because"], rows)

# %% [markdown]
# The algebra stops somewhere. A division splits off only those terms whose coefficient is a multiple of the divisor, and
# drops what remains if its bounds show that it is at least 0 and less than the divisor. So `(4i + j) // 8` with `j < 4`
# stays as it is, although a person sees that `j` cannot carry and that this is `i // 2`.
#
# ### A trap: division below zero
#
# A tensor of five elements is repeated, so that it has ten, and reversed. Element `i` of the result is
# element `9 - i` of the repeated one, and that is element `(9 - i) % 5` of the original. The canonical form
# subtracts a multiple of five inside of a remainder, since that changes nothing: `(4 - i) % 5`. For `i = 7`
# that is `-3 % 5`. Python says 2, which is right. C++ and Triton say -3, because their division rounds toward
# zero, and a kernel that reads element -3 reads somebody else's memory.

# %%
seen = watch(lambda x: x.repeat(2).flip(0) + 1, torch.arange(5.0), dynamic=False)
(loop,) = seen.half()["program"].nodes
index = loop.loads[0].index
print("for Python:       x[" + to_text(index) + "]")
print("for C++, Triton:  x[" + to_text(index, truncates=True) + "]")
print("result:", seen.result.tolist())

# %% [markdown]
# The bounds help here, too. The numerator is known to be at least -5, so adding one multiple of the divisor
# makes it at least 0, and then both ways of rounding agree.
#
# ## Computed again, or kept
#
# [`Lazy`](ref:minicompile.ch07_loops.lazy.Lazy) is the class from the beginning of this page, with a dtype,
# strides, and a record of what it reads. That record is what the decision needs which stopped the doubling. A
# value with one reader becomes a part of its reader, unless that reader would compute it many times: `x + torch.log(y)`
# with a column `y` asks for each logarithm once per element of its row, so on a CPU the column of logarithms is kept.
#
# Some values are put into memory without any question: what the graph returns, which in forward includes all that
# backward reads (chapter 5), what a library call reads, and the result of a reduction. For any other value with several
# readers it is a question of bytes:
#
# %show minicompile.ch07_loops.lazy.worth_keeping
#
# The last line is the comparison from the beginning of this page. Recomputing moves more than keeping if `n*r > r +
# 1 + n`, and that is the same as `(n - 1) * (r - 1) > 2`. With two readers of a sum of three tensors both ways move
# six tensors. With three readers it is nine against seven, so the sum is kept. Only operands that are more than half as
# large as the result count (`big`): a bias that is added to each row of a matrix is read from the cache. The first test
# leaves out what reads no memory, such as a constant, and what is in memory already.
#
# Four more names stand in the code. `footprint` says what one element of the value costs: which nodes of the graph
# would run, which buffers would be read, and whether an expensive function is among them. `present` gives a
# symbolic size the value that it has now. `reuse_ops` is 12: a value made of more nodes than that is kept whatever
# its bytes, since its arithmetic would be repeated. And `windows` counts at how many positions a reader asks for
# the value. A pooling over 3 by 3 asks nine times for each element of its result, so that nearly anything that
# costs more than a load is better kept.
#
# `readers` are counted before anything is lowered, and not as users of the node. Each use is followed through pointwise
# operators and views to the place where it ends: a reduction, a library call, a value that has to be in memory, or an
# output. The different ends are counted. So in `x * sigmoid(x)` the value `x` has two users and one reader, since both
# end up in the same loop. On a CPU an exponential costs as much as ten loads, so a value with an expensive operation
# in it is kept earlier there.
#
# When a value is put into memory (the code says *realised*), its function is called once with symbolic indices, and
# what it does is written down, value by value. That is the loop IR. A softmax:

# %%
seen = watch(lambda x: torch.softmax(x, 1), torch.randn(8, 100))
print(print_program(seen.half()["program"]))

# %% [markdown]
# Four loops: the maximum of a row, the exponentials, their sum, the quotient. `r0` is a reduction variable:
# the loop runs over it and folds. `buf1` is kept because two loops read it and `exp` is expensive on a CPU.
# Whether the four become one kernel is a question for [chapter 8](chapter:08).
#
# ## Lowering an operator, from nothing
#
# Suppose that a program uses an operator that no compiler has heard of. `echo` adds to each sample of a
# signal half of the sample that came `delay` steps earlier:


# %%
@torch.library.custom_op("book::echo", mutates_args=())
def echo(x: torch.Tensor, delay: int) -> torch.Tensor:
    past = torch.cat([torch.zeros(delay), x[: len(x) - delay]])
    return x + 0.5 * past


@echo.register_fake
def _(x, delay):
    return torch.empty_like(x)


def sound(x):
    return echo(x * 2, 3).relu() + 1


signal = torch.randn(10)
print(print_program(watch(sound, signal, dynamic=False).half()["program"]))

# %% [markdown]
# It works already. What has no lowering is an *extern*, a call of the operator on whole tensors, and the
# program is cut there: `x * 2` goes through memory, and so does the result. Three lines of thought make it a
# part of the loop. What is element `t` of the result? It is element `t` of `x`, plus half of element `t -
# delay`. Which elements may be read? Those with `t - delay >= 0`; so the second read stands under a
# condition, and gives zero where that does not hold. And in which dtype? In that of the result.

# %%
from minicompile.ch01_graphs.symbolic import as_expr
from minicompile.ch07_loops.lazy import make_lazy
from minicompile.ch07_loops.rules.indexing import selected
from minicompile.ch07_loops.table import LOWERINGS


def lower_echo(g, x, delay):
    def element(b, index):
        (t,) = index
        earlier = as_expr(t) - delay
        exists = b.between(0, earlier, x.size[0])
        past = selected(b, exists, x, (earlier,), b.constant(0.0, g.val.dtype), g.val.dtype)
        return b.op("add", b.read(x, index), b.op("mul", past, b.constant(0.5, g.val.dtype)))

    return make_lazy(g, element, [x])


LOWERINGS[torch.ops.book.echo.default] = lower_echo
seen = watch(sound, signal, dynamic=False)
print(print_program(seen.half()["program"]))
print("right:", torch.allclose(seen.result, sound(signal)))

# %% [markdown]
# As in `make_view`, `g` is the state of the lowering, and knows what the result has to look like. `b` is the builder of
# one loop body: `b.read(x, index)` asks the operand for an element, whatever the operand is by now; here it is `x *
# 2`, which has never been computed. `b.op` makes a value. `selected` reads under a condition. `b.between` makes a
# condition of two bounds, and leaves out a bound that holds for every index. Here `t - delay` is always less than the
# size, so only the comparison with 0 (`ge`) stands in the body.
#
# Look at the body. `x` is loaded at two positions, doubled at both, and the second load has a condition
# behind it. The multiplication by two and the ReLU have joined the loop although nobody asked them to. Drawn as a
# graph of values, from the loads at the top to the store:

# %% tags=["fold"]
def draw_body(loop, alt, caption=""):
    """The values of a body; constants and indices stand in the boxes that use them."""
    small = {v: str(v.constant if v.op == "constant" else v.args[0]) for v in loop.body if v.op in ("constant", "index")}
    values = {v: f"v{n}" for n, v in enumerate(loop.body) if v not in small}
    kinds = {"load": "input", "store": "saved", "reduce": "library"}

    def note(v):
        if v.op in ("load", "store"):
            return f"{v.buffer}[{v.index}]"
        return v.args[0] if v.op == "reduce" else ", ".join(small[o] for o in v.operands if o in small)

    return drawing(
        {name: (v.op, note(v), kinds.get(v.op, "compute")) for v, name in values.items()},
        [(values[o], name) for v, name in values.items() for o in dict.fromkeys(v.operands) if o in values],
        alt,
        caption,
        width=120,
    )


draw_body(
    seen.half()["program"].nodes[0],
    "The body of the loop: two loads of x, one of them under a condition, products, sums, a maximum with zero, and one store.",
    "The values of the loop above. Blue ones are computed in registers, for one element. A number in a box is a constant.",
)

# %% [markdown]
# All lowerings of elementwise operators and of views are of this kind. There are about a hundred, one for each primitive
# that is not a library call. None of them says anything about the operators around it.
#
# ### A reduction, by hand
#
# The sum of a matrix over its rows is different in one respect: many elements of the operand make one element of the
# result. Written for a matrix of three rows and four columns, the sum over dimension 0 is
#
#     for j in range(4):                # which element of the result
#         total = 0
#         for i in range(3):            # what is folded into it
#             total = total + x[4 * i + j]
#         out[j] = total
#
# There are two kinds of variables. `j` says which element of the result is made, and `i` runs over the elements
# that become one. The loop IR has both: `vars` and `reduction_vars`. Its body has one special value, `reduce`,
# which stands where many become one. What `reduce` is computed from depends on both kinds of variables, and is done
# for every element. What is computed from it depends on `j` alone, and is done once for each result. Here is a body
# that has both parts. It computes mean and variance of each column of `x * 2`. The kind of its reduction,
# `welford`, is explained below; it gives several numbers, and `get` picks one:

# %%
(loop,) = watch(lambda x: torch.var_mean(x * 2, 0), torch.randn(3, 4), dynamic=False).half()["program"].nodes
print("runs over", ", ".join(f"{v} < {v.size}" for v in loop.vars), "and folds", ", ".join(f"{v} < {v.size}" for v in loop.reduction_vars))
draw_body(
    loop,
    "The body of a reduction: a load of x, its double, reduce, and behind it a division and two stores.",
    "Above the box of the reduction everything is done once for each element, below it once for each result.",
)

# %% [markdown]
# Lowering a reduction is therefore a matter of choosing variables. Each dimension of the operand gets one, of the
# first kind if it remains, of the second if it is folded. The element that is read is the one at all of these
# variables, and the element that is written is the one at those that remain.
#
# One choice is left: the order of the variables, which is the order in which the loops are nested. The result may
# be walked in any order, and so may the elements that are folded. But memory comes in cache lines of 64 bytes, so
# the innermost loop should move to the next element in memory. The strides of the operand tell which variable does
# that. Here is one sum of a tensor of shape (4, 5, 6), over its first and last dimension, when the tensor is
# contiguous, and when its dimensions lie in memory in another order:

# %%
rows = []
for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
    x = torch.randn([(4, 5, 6)[d] for d in order]).permute([order.index(d) for d in range(3)])
    (loop,) = watch(lambda x: x.sum((0, 2)), x, dynamic=False).half()["program"].nodes
    (load,) = loop.loads
    folds = ", ".join(f"{v} < {v.size}" for v in loop.reduction_vars)
    rows.append((str(tuple(x.stride())), ", ".join(f"{v} < {v.size}" for v in loop.vars), folds, str(load.index)))
Table(["strides of x", "remain", "folded, the last one innermost", "loads x at"], rows)

# %% [markdown]
# In each row the reduction variable that stands last has the smaller stride. The function that does this for all
# reductions is [an exercise](exercise:reduction-loop). What it needs to know from a rule is only what becomes of
# the elements:
#
# %show minicompile.ch07_loops.reductions.reduction "def fold" to "return [b.reduce(kind, elements[0])]"
#
# (For `argmax` it needs more, namely the `position` of each element among those that are folded. Of equal elements the
# first one wins, so it matters which ones are equal. A half-precision value is float32 in a register, and two that
# differ there may be equal once they are stored. `rounded` makes them what memory would hold before they are compared.)
#
# ### Two numbers from one pass
#
# A variance needs the mean first, and then the squared distances from it. That reads the data twice. A formula from the
# textbook reads it once: the mean of the squares minus the square of the mean. Chapter 6 has shown that in
# float32 it is a trap, and named Welford's method as the way out. Here is what our loop makes of such data:

# %%
samples = torch.randn(100_000) + 3000
mean = samples.mean()
in_one_pass = minicompile.compile(lambda x: torch.var_mean(x, 0, correction=0))(samples)[0]
Table(
    ["variance of 100,000 numbers near 3000", "result"],
    [
        ("in float64", f"{samples.double().var(correction=0):.4f}"),
        ("mean of squares minus square of mean", f"{(samples * samples).mean() - mean * mean:.4f}"),
        ("two passes", f"{((samples - mean) ** 2).mean():.4f}"),
        ("ours, one pass", f"{in_one_pass:.4f}"),
    ],
)

# %% [markdown]
# The squares are nine million, and a float32 of that size is exact to one half or so. The variance is 1, so the
# difference of two such numbers says nothing about it. Welford's method keeps the mean of what it has seen, and the
# sum of the squared distances from that mean. A new number moves the mean by a fraction of its distance, and adds
# to the sum the product of its distances from the old mean and from the new one. No large numbers are subtracted.
# So `welford` is a kind of reduction in the loop IR, one that gives several results, and each generator knows how
# to write it.
#
# ## One body, many readings
#
# A body is data: a graph of [values](ref:minicompile.ch07_loops.ir.Value), each with an operation, its arguments and a
# dtype. The arguments are the very values that it is computed from. So the ends of the graph, the stores, are all
# that a loop has to hold, and its body is what they need:
#
# %show minicompile.ch07_loops.ir.behind
#
# Values are numbered as they are made, operands before what is computed from them, and `in_order` is this number. With
# `keep` a caller may stop the walk at some values; for the body of a loop it keeps all.
#
# A question about a body is a question to its values: fusion asks each load and store for its buffer and its index.
# What has a meaning for every operation goes through the body once, forwards, operands first:
#
# %show minicompile.ch07_loops.ir.replay
#
# What the arguments of a value are depends on its operation. Those of `add` are two values. Those of a store are
# its buffer, its index, its mask, the value that is stored, and a mode, in this order.
#
# The reference interpreter computes that way, and what rewrites a body makes other values. Here is a step that
# writes the formula of the loop above:


# %%
def formula(value, args):
    if value.op in ("load", "store"):
        element = f"{value.buffer}[{value.index}]"
        return element if value.op == "load" else f"{element} = {args[3]}"
    return str(value.constant) if value.op == "constant" else f"{value.op}({', '.join(map(str, args))})"


(loop,) = seen.half()["program"].nodes
print(replay(loop.body, formula)[loop.stores[0]])

# %% [markdown]
# The code generators of chapters 9 and 10 go the other way. They begin at the stores and ask for what those need,
# because where a statement has to stand depends on who asks for it.
#
# How much does one element cost? Count what a body has of each kind:


# %%
def cost_of(loop):
    iterations = " x ".join(str(v.size) for v in (*loop.vars, *loop.reduction_vars))
    arithmetic = sum(v.op not in ("load", "store", "constant") for v in loop.body)
    return loop.name, iterations, len(loop.loads), arithmetic, len(loop.stores), ", ".join(loop.origins[:3])


block, x = example()
seen = watch(block, x)
program = seen.half("forward")["program"]
rows = [cost_of(node) for node in program.nodes if isinstance(node, Loop)]
Table(["loop", "iterations", "loads", "operations", "stores", "made from"], rows)

# %% [markdown]
# These are the loops of the running example, the GPT block, forward. Few of them do more arithmetic than
# loads and stores; that is why memory decides.
#
# ## The running example
#
# From operators to loops and library calls:

# %%
graph = seen.graphs[0]
calls = [n for n in program.nodes if isinstance(n, Extern)]
Table(
    ["what", "number"],
    [
        ("operations in the captured graph", sum(n.op.startswith("call") for n in graph.graph.nodes)),
        ("loops", len(program.nodes) - len(calls)),
        ("library calls", len(calls)),
        ("buffers", len(program.buffers) - len(program.inputs)),
    ],
)

# %%
head(print_program(program), 60)

# %% [markdown]
# Look at the operands of the attention call: `q`, `k` and `v` are windows on the result of one matrix
# product, given by sizes, strides and an offset. No loop splits or transposes them.
#
# Is the program right? It can be executed, slowly, by [the reference
# interpreter](code:minicompile/ch07_loops/reference.py), which computes with whole grids of indices. Each stage of
# the compiler has such a way to execute what it has made, and a name by which `compile` stops after it: `eager`
# runs the captured graph, `aot_eager` the joint graph cut in two, `decomposed` the primitives, `loops` these loops.
# The book calls them the rungs of a *ladder*. The first rung whose answer differs from eager's is the stage that is
# wrong.

# %%
with torch.no_grad():
    slow = minicompile.compile(block, backend="loops")(x)
    print("largest difference from eager:", (slow - block(x)).abs().max().item())

# %% [markdown]
# And a checker states what a program must obey. It goes through the steps in order, with a set of what has been
# `written` so far, which begins with the inputs and the constants. What a step reads has to be in this set. A loop has
# a checker of its own, `verify_loop`, since there the indices have to speak of the loop's own variables as well:
#
# %show minicompile.ch07_loops.verify.verify "if isinstance(node, Loop)" to "assert name in written"
#
# What it writes must be known as a buffer and not be written yet. One case needs `alias_of`. A program may write into an
# input, and the loop that does so is given a new name for the memory of that input. The old name then means the
# contents before the write and the new name those after it, so that each name is still written once. The new name may
# only be written after the old one:
#
# %show minicompile.ch07_loops.verify.verify "for name in written_by" to "written.add"
#
# In tests it runs after every stage, so that a lowering with a mistake is found where it was made. Exchange two
# loops of the softmax from above, and it says what is wrong:

# %%
from minicompile.ch07_loops.verify import verify

broken = watch(lambda x: torch.softmax(x, 1), torch.randn(8, 100)).half()["program"]
verify(broken)
broken.nodes[1:3] = broken.nodes[2], broken.nodes[1]
try:
    verify(broken)
except AssertionError as problem:
    print(problem)

# %% [markdown]
# ## Reductions that are too long
#
# The sum of a million numbers is one loop with one result. Nothing in it can be shared: one thread of a CPU would
# work, or one block of threads of a GPU, and the others would wait. So the lowering splits it in two, many partial
# sums and a short sum of them. Here is the plan for a CPU with four threads, and with one, which has nobody to
# share with:

# %%
from minicompile.ch01_graphs.fake import FakeMode
from minicompile.ch01_graphs.trace import trace
from minicompile.ch06_decompositions.decompose import decompose
from minicompile.ch07_loops.lazy import Options
from minicompile.ch07_loops.lower import lower

gm = decompose(trace(lambda t: [t.sum()], [FakeMode().from_real(torch.randn(1_000_000))]))
Listings(
    [
        ("4 threads", print_program(lower(gm, Options(threads=4)))),
        ("1 thread", print_program(lower(gm, Options(threads=1)))),
    ]
)

# %% [markdown]
# This is the end of the rule for a reduction. `split_plan` makes the plan, which says into how many blocks each folded
# dimension is cut, or None if one loop is enough. If there is a plan, `block_results` emits the first loop, and what
# is reduced from then on are its results. `identity(kind, dtype)` is the number that changes nothing when it is folded,
# such as 0 for a sum; it fills a last block that is short. `names` has the name of the buffer for the result, and
# `from_buffer` makes this buffer a lazy tensor again:
#
# %show minicompile.ch07_loops.reductions.reduction "plan = None" to "return from_buffer"
#
# The first loop on the left makes one sum for each block, and its variable over the blocks is an ordinary one, so
# threads can share it. To cut a dimension in two is the same index map as a `view`: element `(block, place)` is
# element `length * block + place`. Where the length does not divide the size, the last block is short, and the
# loads behind its end stand under a condition, as those of `echo` do. How many blocks to make depends on the
# machine: enough for all threads, but none so short that starting it costs more than its sum.
#
# ## What torch.compile does differently
#
# Inductor's `Pointwise` and `Reduction` nodes hold a Python closure, `inner_fn(index)`, as our `Lazy` does,
# and so does its loop IR: each analysis calls the closure again under another handler (`V.ops`). Here the
# closure is called once, and what follows works on a graph that can be printed and compared.
# Inductor's lowerings carry layouts as objects that are decided late (*flexible layouts*); ours take
# eager's strides at once. It has lowerings with hardware templates for matrix products and convolutions;
# ours are library calls.
#
# ## Exercises
#
# <!-- exercises -->
#
# ## Further reading
#
# - J. Ragan-Kelley and others, *Halide* (PLDI 2013): what is computed, apart from when and where.
# - The design notes on TorchInductor (PyTorch developer forum, 2022), on define-by-run loop IR.
# - P. Feautrier, *Dataflow analysis of array and scalar references* (1991), on index expressions as the
#   object of analysis.
# - C. Elliott, *Functional Images* (2003): pictures as functions of a position.
