# %% [markdown]
# # Graphs, and tensors without data
#
# A compiler works on the program before the numbers are there. So it needs two things that PyTorch does not
# have on its own: a program written down as data, and tensors that know everything about themselves except
# their contents. This chapter makes both. All later chapters use them.
#
# The smallest version of this stage is [part 1 of tiny](chapter:tiny.1), the compiler in one file.

# %%
import tracemalloc

import torch
import torch.nn.functional as F

from chapters._lib import Table, best_time, draw_fx, example, head, size, watch
from minicompile.ch01_graphs.graph import interpret, print_graph
from minicompile.ch01_graphs.trace import trace

# %% [markdown]
# ## The problem
#
# Take `x + bias` in the middle of a model. To generate code for it, the compiler has to know the shapes
# (does the bias broadcast?), the strides (which index goes with which address?), the dtypes (what is
# promoted to what?), the device, and whether anything else shares the memory of `x`. In eager PyTorch each
# of these is known when the operation runs, and at no other time.
#
# ## The naive version: run it
#
# Run the program once with real tensors and note what comes by. That is correct, and this is what it costs
# for one large attention layer:


# %%
def attention(q, k, v):
    weights = torch.softmax(q @ k.transpose(-1, -2) / 8, -1)
    return (weights @ v).transpose(1, 2).reshape(2, 1024, 256)


q, k, v = torch.randn(3, 2, 4, 1024, 64).unbind()
real_time = best_time(attention, q, k, v, repeat=3)
weights = 2 * 4 * 1024 * 1024 * 4  # bytes
print(f"real tensors: {1000 * real_time:.1f} ms, the matrix of weights alone has {size(weights)}")

# %% [markdown]
# The compiler would have to own as much memory as the program, would wait for matrix products whose results
# nobody reads, and would draw random numbers and update buffers that belong to the user.
#
# The next idea is a table of shape rules: broadcasting for `add`, inner dimensions for `matmul`. Here is
# the beginning of one.


# %%
def broadcast(a, b):
    return tuple(max(m, n) for m, n in zip(a, b))


RULES = {"add": broadcast, "matmul": lambda a, b: (*a[:-1], b[-1])}
print(RULES["add"]((8, 1), (8, 4)), RULES["matmul"]((8, 4), (4, 3)))
print("wrong:", RULES["add"]((2, 3), (3,)), "instead of", tuple((torch.zeros(2, 3) + torch.zeros(3)).shape))
print("wrong:", RULES["add"]((2, 3), (4, 3)), "instead of an error")

# %% [markdown]
# Two rules, two bugs. PyTorch has thousands of operators, and shapes are the easy part: strides, dtype
# promotion and aliasing follow rules that are written down nowhere but in the code.
#
# ## The idea: PyTorch's own shape code
#
# That code can be run alone. Every operator has a *meta kernel*, which computes everything about the result
# except its contents. It is what runs on `device="meta"`. One thing is missing there: a meta tensor has
# forgotten whether it stands for a CPU or a GPU tensor. So a *fake tensor* is a meta tensor and a device
# that it pretends to be on.
#
# %show minicompile.ch01_graphs.fake.FakeTensor

# %%
from minicompile.ch01_graphs.fake import FakeMode, storage_key

mode = FakeMode()
fakes = [mode.from_real(t) for t in (q, k, v)]
with mode:
    out = attention(*fakes)
print(out)
with mode:
    fake_time = best_time(attention, *fakes, repeat=5)
tracemalloc.start()
with mode:
    attention(*fakes)
peak = tracemalloc.get_traced_memory()[1]
tracemalloc.stop()
Table(
    ["tensors", "time", "memory for data"],
    [
        ("real", f"{1000 * real_time:.2f} ms", size(2 * 2 * 4 * 1024 * 1024 * 4)),
        ("fake", f"{1000 * fake_time:.2f} ms", f"none ({size(peak)} of Python objects)"),
    ],
)

# %% [markdown]
# The fake run costs the same whatever the sizes are. It is right about strides and aliasing, too, because
# the meta tensors have storages:

# %%
with mode:
    base = mode.from_real(torch.zeros(4, 6))
    row = base.t()[2]
    print(
        "strides",
        row.stride(),
        "offset",
        row.storage_offset(),
        "shares memory:",
        storage_key(row) == storage_key(base),
    )
    row.add_(1)
    print("versions seen by autograd:", base._version, row._version)
    try:
        base + torch.empty(5, 6)
    except RuntimeError as error:
        print("eager's own message:", error)

# %% [markdown]
# One function does the work: unwrap, run the meta kernel, wrap. (A few questions only the real kernel can
# answer, such as whether it takes this dtype. It is asked once, with zeros.)
#
# %show minicompile.ch01_graphs.fake.fake_call
#
# ## Writing the program down
#
# Fakes pass through PyTorch's dispatcher, so a mode that sits at the bottom of it sees every operator that
# is about to run. It notes the operator, its arguments and its fake result. That is the whole of *tracing*.
#
# %show minicompile.ch01_graphs.trace.trace


# %%
def normalise(x, weight):
    y = F.layer_norm(x, (64,), weight)
    return [F.dropout(y, 0.1, training=True) * 2]


x, weight = torch.randn(8, 64), torch.randn(64)
graph = trace(normalise, [mode.from_real(x), mode.from_real(weight)], ["x", "weight"])
print(print_graph(graph))

# %%
draw_fx(graph, "The traced graph: layer norm, dropout and a multiplication in a row.")

# %% [markdown]
# The container is `torch.fx.Graph`. What makes it useful is attached to each node: `val` is the fake
# result, `location` the user's line, `origins` the nodes of the stage before. A graph can also be run. That
# is its meaning, and each stage of this compiler is tested by running what it made and comparing with
# eager.

# %%
torch.manual_seed(1)
ours = interpret(graph, [x, weight])[0]
torch.manual_seed(1)
theirs = normalise(x, weight)[0]
print("equal to the last bit:", torch.equal(ours, theirs))

# %% [markdown]
# ## Sizes that are not known
#
# A graph traced for `[8, 64]` says 64 everywhere. For a batch of 9 it is useless. Naively: compile again
# for every size. A language model that is fed sentences of 5 to 255 tokens would be compiled 251 times.
#
# PyTorch lets a size be an object: `torch.SymInt(node)` is an integer whose arithmetic is done by a Python
# `node`. Meta kernels pass it through. So give the batch size a name.

# %%
from minicompile.ch01_graphs.shapes import ShapeEnv

env = ShapeEnv()
batch = env.create(8)  # 8 in this call
fake = mode.from_real(torch.randn(8, 6), (batch, 6))
graph = trace(lambda x: [(x.view(-1) * 2).view(-1, 3).sum(1)], [fake])
print(print_graph(graph))
print("questions asked:", [g.text() for g in env.guards])

# %% [markdown]
# The output has `2*s0` elements, for every batch size. No question was asked that depends on it. But some
# programs do ask:


# %%
def choose(x, y):
    if x.shape[0] > 4:
        return [x + y]
    return [x - y]


other = mode.from_real(torch.randn(8, 6), (env.create(8), 6))
graph = trace(choose, [fake, other])
print(print_graph(graph))
for text in dict.fromkeys(g.text() for g in env.guards):
    print("holds for this trace:", text)

# %% [markdown]
# Python needs a truth value, so the trace takes the answer for the present sizes and records the question.
# The program's own `> 4` is there, and so is a question that the program did not write: `x + y` broadcasts
# unless the sizes are equal. The trace may be used again for all sizes with the same answers. These become
# guards in [chapter 2](chapter:02). Where bounds decide, no guard is needed:
#
# %show minicompile.ch01_graphs.shapes.ShapeEnv
#
# ## Integers with names
#
# The same small algebra serves a second master. From [chapter 7](chapter:07) on, memory addresses are
# expressions over loop variables, and a view such as flattening must not leave divisions behind.

# %%
from minicompile.ch01_graphs.symbolic import Symbol

i0, i1 = Symbol("i0", 8).expr, Symbol("i1", 64).expr  # 0 <= i0 < 8, 0 <= i1 < 64
flat = 64 * i0 + i1
Table(
    ["expression", "simplified"],
    [
        ("(64*i0 + i1) // 64", flat // 64),
        ("(64*i0 + i1) % 64", flat % 64),
        ("(64*i0 + i1) // 16 // 4", flat // 16 // 4),
        ("(32*i0 + i1) // 64", (32 * i0 + i1) // 64),
    ],
)

# %% [markdown]
# The last one stays, and has to: `i1` can be larger than 32. An expression is a sum of products with
# integer coefficients, always in the same order, so equal expressions are equal objects and "is this
# contiguous?" means "is the coefficient of the last variable 1?". How it divides:
#
# %show minicompile.ch01_graphs.symbolic.floordiv
#
# torch.compile uses sympy here, a general computer algebra system. General systems know nothing of the
# range of a loop variable:

# %%
import sympy

a, b = sympy.Symbol("i0", integer=True, nonnegative=True), sympy.Symbol(
    "i1", integer=True, nonnegative=True
)
print("sympy:", (64 * a + b) // 64, "   ours:", flat // 64)

# %% [markdown]
# ## The running example
#
# The GPT block of the later chapters as an ATen graph: below the dispatcher `linear` is a transposition and
# a matrix product, and attention has become one particular kernel for this device.

# %%
block, inputs = example()
captured = watch(block, inputs, backend="eager").graphs[0]
fakes = [n.meta["val"].detach() for n in captured.graph.nodes if n.op == "placeholder"]
aten_graph = trace(lambda *args: interpret(captured, args), fakes)
print("operators as written:", sum(n.op.startswith("call") for n in captured.graph.nodes))
print("operators below the dispatcher:", sum(n.op.startswith("call") for n in aten_graph.graph.nodes), "\n")
head("\n".join(line for line in print_graph(aten_graph).splitlines() if " = input" not in line), 24)

# %% [markdown]
# ## What torch.compile does differently
#
# Its `FakeTensor` is the same pair of a meta tensor and a device. It also caches the result of each
# operator by its arguments and propagates constants. Its `ShapeEnv` keeps ranges for every expression, can
# replace a symbol once two are found equal, and knows *unbacked* symbols, sizes that come from data, such
# as the length of `nonzero`. Here such operators end the graph. Symbolic sizes are sympy expressions with
# floor divisions and remainders of its own, which do know ranges.
#
# ## Exercises
#
# <!-- exercises -->
#
# ## Further reading
#
# - J. Reed and others, *torch.fx: Practical Program Capture and Transformation for Deep Learning in Python*
#   (MLSys 2022).
# - *The dynamic shapes manual*, PyTorch's design document on symbolic sizes.
# - E. Yang, *Let's talk about the PyTorch dispatcher* (2020), on modes and keys.
# - R. Cytron and others, *Efficiently Computing Static Single Assignment Form* (1991), on why each value
#   has one name.
