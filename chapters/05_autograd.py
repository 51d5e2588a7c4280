# %% [markdown]
# # Autograd ahead of time
#
# Eager PyTorch builds the backward graph while the forward runs, one node for each operation, and throws it
# away after `backward()`. A compiler wants both graphs before anything runs: to fuse the operations of the
# backward pass, and to choose what is kept in memory from one to the other. This chapter makes one graph of
# both, and cuts it in two.

# %%
import torch
import torch.nn.functional as F

import minicompile
from chapters._lib import Table, bars, draw_fx, drawing, example, measured, size, watch
from minicompile.ch01_graphs.fake import FakeMode
from minicompile.ch01_graphs.graph import interpret, print_graph
from minicompile.ch01_graphs.trace import Recorder, trace

# %% [markdown]
# ## The naive version: a rule for each operation
#
# Reverse-mode differentiation of a list of operations is a loop from back to front, with a rule for each
# operation that says how a gradient of the result becomes gradients of the operands.

# %%
RULES = {
    "mul": lambda g, a, b: (f"mul({g}, {b})", f"mul({g}, {a})"),
    "add": lambda g, a, b: (g, g),
    "exp": lambda g, a: (f"mul({g}, exp({a}))",),
}


def differentiate(program, wanted):
    """Text of the gradient of the last result with respect to `wanted`. program: (result, name, operands)."""
    gradients = {program[-1][0]: ["tangent"]}
    for result, operation, operands in reversed(program):
        for operand, text in zip(operands, RULES[operation](" + ".join(gradients[result]), *operands)):
            gradients.setdefault(operand, []).append(text)
    return " + ".join(gradients[wanted])


print(differentiate([("y", "exp", ["x"]), ("z", "mul", ["y", "x"])], "x"))
try:
    differentiate([("y", "scaled_dot_product_attention", ["x", "x", "x"])], "x")
except KeyError as missing:
    print("no rule for", missing)

# %% [markdown]
# The loop is right. The table is the problem. PyTorch's has hundreds of entries (`derivatives.yaml`),
# written over years, with broadcasting, dtypes, numerical care and memory in mind. A second one would be
# different in small ways, and a compiler that trains slightly differently from eager is worse than none.
#
# ## The idea: ask the engine
#
# The autograd engine works on any tensor, and so on tensors without data. Run the captured program on fakes
# that require gradients. Call `torch.autograd.grad`. The engine executes the derivatives of PyTorch,
# operator by operator, and the recorder of [chapter 1](chapter:01) sits below and writes them down.

# %%
mode = FakeMode()
x = mode.from_real(torch.randn(16, 8))
w = mode.from_real(torch.randn(8, 8, requires_grad=True))
tangent = mode.from_real(torch.randn(16, 8))
recorder = Recorder()
for name, fake in (("x", x), ("w", w), ("tangent", tangent)):
    recorder.placeholder(name, fake)
with recorder:
    y = F.gelu(x @ w)
    (gradient,) = torch.autograd.grad(y, w, tangent)
joint = recorder.finish([y, gradient])
print(print_graph(joint))

# %%
draw_fx(
    joint,
    "The joint graph: x and w give mm, then gelu, the output. The tangent and mm give gelu_backward, "
    "and with x transposed a second mm, the gradient of w.",
)

# %% [markdown]
# Fifteen lines, and every operator that PyTorch can differentiate. The gradient that will arrive from
# outside is not known, so it is an input, the *tangent*. The real version has more to say about inputs and
# outputs; the heart of it is the same call:
#
# %show minicompile.ch05_autograd.joint._record_backward
#
# ## In-place operations
#
# A recording of a real program contains writes. Here is what a simple pass makes of one. It removes nodes
# that nobody reads, as compilers do.


# %%
def program(x):
    v = x[0]  # a view
    x.add_(1)  # changes x, and so v
    return [v * 2]


graph = trace(program, [mode.from_real(torch.zeros(2, 3))], ["x"])
print(print_graph(graph), "\n")
graph.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
print("after removing what nobody reads:", interpret(graph, [torch.zeros(2, 3)])[0].tolist())
print("eager:                           ", program(torch.zeros(2, 3))[0].tolist())

# %% [markdown]
# The result of `add_` has no reader, so it was removed. That `v` shows the same memory is in no argument of
# any node. One could make every later pass careful about memory. It is better to have graphs in which all
# dependencies are arguments: *functionalization* gives every write a new name, and takes views again after
# it.

# %%
from minicompile.ch05_autograd.functionalize import functionalize

graph = trace(program, [mode.from_real(torch.zeros(2, 3))], ["x"])
print(print_graph(functionalize(graph)))

# %% [markdown]
# The only write left is the last line, for the caller who will look at `x`. Writing *through* a view is the
# harder half: the new contents of the whole memory have to be computed from the new contents of the view,
# by undoing one view step after another.
#
# %show minicompile.ch05_autograd.functionalize.write
#
# ## Cutting the graph in two
#
# Forward runs now and backward later. Whatever backward reads of forward must be carried over. A small
# example, with everything in it that matters:


# %%
def layer(x, bias, w):
    return F.gelu(x + bias) @ w


def joint_of(function, *args):
    """The captured graph of a function, differentiated, in primitives."""
    from minicompile.ch05_autograd.joint import simplify, trace_joint
    from minicompile.ch06_decompositions.decompose import decompose

    graph = watch(function, *args, backend="eager").graphs[0]
    made = trace_joint(graph, [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"])
    simplify(made, decompose)
    return made


args = torch.randn(512, 64), torch.randn(64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
made = joint_of(layer, *args)
print(print_graph(made.gm))

# %% [markdown]
# Which values go across? Two naive answers. *Everything that backward reads*, as it stands in the graph.
# *Nothing but the inputs*: then backward begins by running forward again, with its matrix products. In
# between lie as many choices as there are sets of nodes.

# %%
from minicompile.ch05_autograd.partition import choose_saved, partition, size_in_bytes, split_nodes

halves = split_nodes(made)
crossing = [
    n
    for n in made.gm.graph.nodes
    if n not in halves.backward and n.op == "call_function" and any(u in halves.backward for u in n.users)
]
cut = choose_saved(made, halves)


def weight(nodes):
    return sum(size_in_bytes(n) for n in nodes if n.op != "placeholder")


print("read by backward:", [n.name for n in crossing], size(weight(crossing)))
print("chosen:          ", [n.name for n in cut], size(weight(cut)), "besides inputs")

# %% [markdown]
# `w` is free: it is in memory anyway, and since eager's product saves it, autograd complains if the
# program changes it before backward. The result of GELU is saved: the library call that computes the
# gradient of `w` needs it, and forward has just written it. And the slope of GELU, `add_tensor_3`, is
# computed in the forward kernel and saved as one tensor. Why not computed again from `x` and `bias`, which
# are inputs? Because eager's addition saves neither. A program may overwrite them before it calls
# `backward`, and eager gives the right gradient. To need them later is to save copies of them, and that
# costs more than the slope.
#
# ### As a minimum cut
#
# Give each value a pipe whose width is the price of saving it: bytes written and read. Connect the source
# to what need not or must not be computed again (inputs, matrix products, random numbers), and to the sink
# whatever backward reads. A set of saved values is sufficient when it cuts every way from the source to the
# sink. The cheapest sufficient set is a minimum cut, and maximum flow finds it.

# %% tags=["fold"]
from minicompile.ch05_autograd.partition import forward_use, must_not_recompute, price, stages, is_fusible

forward_nodes = [n for n in made.gm.graph.nodes if n.op != "output" and n not in halves.backward]
stage = stages(forward_nodes, halves)
boxes, edges = {"source": ("source", "", "plain")}, []
for n in forward_nodes:
    use = forward_use(n, halves, stage)
    cost = price(n, made, use.library or use.far or use.output or not is_fusible(n))
    if not any(u in forward_nodes or u in halves.backward for u in n.users):
        continue
    boxes[n.name] = (
        n.name[:20],
        "free" if cost == 0 else "never" if cost > 1 << 50 else size(cost),
        "saved" if n in cut else "input" if n.op == "placeholder" else "compute",
    )
    edges += [(a.name, n.name) for a in n.all_input_nodes]
    if n.op == "placeholder" or must_not_recompute(n, halves, use, "speed"):
        edges.append(("source", n.name))
    if any(u in halves.backward for u in n.users):
        edges.append((n.name, "backward"))
boxes["backward"] = ("sink: backward", "", "plain")
drawing(
    boxes,
    edges,
    "The network whose minimum cut is sought. Saved: " + ", ".join(n.name for n in cut) + ".",
    "Green: saved. The second line of a box is its price.",
    width=128,
)

# %% [markdown]
# %show minicompile.ch05_autograd.partition.choose_saved
#
# What must not be computed twice is the policy, in one place:
#
# %show minicompile.ch05_autograd.partition.must_not_recompute
#
# ## The running example
#
# For the GPT block: what do eager and compiled code keep between forward and backward? PyTorch can be
# asked, with hooks on saved tensors. Parameters and the input are left out, since they exist anyway.

# %%
block, x = example()
x.requires_grad_()


def kept(function):
    """{storage: bytes} of what autograd saves during one call, except parameters and the input."""
    known = {t.untyped_storage().data_ptr() for t in (*block.parameters(), x)}
    found = {}

    def note(t):
        if t.untyped_storage().data_ptr() not in known:
            found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        keep = function(x)  # alive, so that no storage is used twice
    return found


def compare_kept(function, alt):
    compiled = minicompile.compile(function)
    compiled(x)
    rows = [
        (f"{name}, {len(found)} tensors", sum(found.values()) / 1e3, kind)
        for name, kind, found in (("eager", "bad", kept(function)), ("compiled", "compute", kept(compiled)))
    ]
    return bars(rows, "kB", alt, form="{:.0f}")


compare_kept(block, "Memory kept between forward and backward.")

# %% [markdown]
# No difference. This block consists of operators whose authors chose by hand what to save: layer norm,
# GELU, attention. The compiler comes to the same choice from the arithmetic alone. Now write GELU out in
# Python, as early GPT code did, and add dropout:


# %%
def written_gelu(x):
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))


def perceptron(x):
    return x + F.dropout(block.down(written_gelu(block.up(block.norm2(x)))), 0.1)


compare_kept(perceptron, "Kept for the perceptron with its GELU written out.")

# %% [markdown]
# Eager keeps an intermediate for each line of the formula, because no operator knows of its neighbours. The
# compiled version keeps the input and the output of the formula. Which tensors are saved in the block? And
# what if memory matters more than speed? The partitioner has a second preference, which also computes again
# what is in memory anyway.

# %%
made = joint_of(block, x)
rows = []
for prefer in ("speed", "memory"):
    halves_of = partition(made, prefer)
    nodes = {n.name: n for n in made.gm.graph.nodes}
    saved = [nodes[name] for name in halves_of.saved if nodes[name].op != "placeholder"]
    rows.append(
        (
            prefer,
            len(saved),
            size(weight(saved)),
            sum(n.op == "call_function" for n in halves_of.backward.graph.nodes),
            ", ".join(n.name for n in saved),
        )
    )
Table(["prefer", "saved", "bytes", "operators in backward", "which"], rows)

# %% [markdown]
# ### On a GPU, in a real model
#
# GPT-2 is built from the same kinds of operators, at a width of 768 with 12 layers. Peak memory of a
# training step:

# %% tags=["gpu-result", "results:h100-gpt2"]
runs = measured("h100-gpt2")
bars(
    [
        (name, runs[run]["peak_memory_mb"] / 1000, kind)
        for name, run, kind in (
            ("eager", "eager", "bad"),
            ("minicompile", "minicompile", "compute"),
            ("torch.compile", "torch", "library"),
        )
    ],
    "GB",
    "Peak memory of a training step of GPT-2 124M.",
    form="{:.2f}",
)

# %% [markdown]
# ## What it costs
#
# The time to differentiate ahead of time, for one block and for more. The cut is a maximum flow over the
# nodes of forward; recording runs the autograd engine and every meta kernel once.

# %%
import time

from minicompile.ch05_autograd.joint import simplify, trace_joint
from minicompile.ch06_decompositions.decompose import decompose

rows = []
for depth in (1, 2):
    graph = watch(torch.nn.Sequential(*[type(block)() for _ in range(depth)]), x, backend="eager").graphs[0]
    inputs = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
    clock = [time.perf_counter()]
    made = trace_joint(graph, inputs)
    clock.append(time.perf_counter())
    simplify(made, decompose)
    clock.append(time.perf_counter())
    partition(made)
    clock.append(time.perf_counter())
    rows.append((depth, len(made.gm.graph.nodes), *(f"{1000 * (b - a):.0f} ms" for a, b in zip(clock, clock[1:]))))
Table(["blocks", "nodes of the joint graph", "record it", "to primitives", "cut it"], rows)

# %% [markdown]
# ## Putting it back into PyTorch
#
# The user calls `loss.backward()`, so the two graphs have to be one node of PyTorch's own autograd graph: a
# `torch.autograd.Function` whose forward calls the compiled forward and saves what the cut chose.

# %%
y = minicompile.compile(block)(x)
print("the block is one autograd node:", y.grad_fn.name())
eager_y = block(x)
names, pending = set(), [eager_y.grad_fn]
while pending:
    fn = pending.pop()
    if fn is not None and fn not in names:
        names.add(fn)
        pending += [next_fn for next_fn, _ in fn.next_functions]
print("in eager:", len(names), "nodes")
(ours_g,) = torch.autograd.grad(y.square().sum(), x)
(eager_g,) = torch.autograd.grad(eager_y.square().sum(), x)
print("largest difference of the gradients of x:", (ours_g - eager_g).abs().max().item())

# %% [markdown]
# ## What torch.compile does differently
#
# AOTAutograd records the joint graph in the same way, with the engine on fake tensors, and its default
# partitioner is the same minimum cut. Functionalization happens *during* tracing there, with wrapper
# tensors implemented in C++; ours is a pass over the finished recording, which is shorter and can print the
# graph before it. Its partitioner decides on ATen operators, knows a list of recomputable ones, and can be
# given a memory budget; ours decides after decomposition, when a softmax is visibly a small reduction to
# save and an exponential to repeat. It supports tensor subclasses, and traces one joint graph even if the
# backward has to run with other strides than expected.
#
# ## Exercises
#
# <!-- exercises -->
#
# ## Further reading
#
# - A. Griewank, A. Walther, *Evaluating Derivatives* (2008), chapters 3 and 12: reverse mode, and
#   checkpointing.
# - T. Chen and others, *Training Deep Nets with Sublinear Memory Cost* (2016).
# - Y. Dinitz (1970), whose algorithm [`maximum_flow`](ref:minicompile.ch05_autograd.maxflow.maximum_flow)
#   is; L. Ford, D. Fulkerson (1956) on cuts and flows.
# - H. He, S. Yu, *Transcending Runtime-Memory Tradeoffs in Checkpointing by being Fusion Aware* (MLSys
#   2023).
