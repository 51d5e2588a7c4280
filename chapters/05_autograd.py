# %% [markdown]
# # Autograd ahead of time
#
# Eager PyTorch builds the backward graph while the forward runs, one node for each operation, and throws it
# away after `backward()`. A compiler wants both graphs before anything runs: to fuse the operations of the
# backward pass, and to choose what is kept in memory from one to the other. This chapter makes one graph of
# both, removes all writes from it, cuts it in two, and puts the halves back into PyTorch, so that the user's
# `loss.backward()` finds them.
#
# Four questions lead through it. Where do the derivatives come from? What does a compiler do with a program
# that writes to its tensors? Which values should forward keep for backward? And what has to surround two
# compiled graphs, so that nobody notices that they are not eager PyTorch?

# %%
import inspect
import time
import types

import torch
import torch.nn.functional as F

import minicompile
from chapters import tiny
from chapters._lib import Table, Walk, bars, best_time, draw_fx, drawing, example, measured, pipes, shortened, size, watch, watching
from minicompile.ch01_graphs.fake import FakeMode
from minicompile.ch01_graphs.graph import interpret, print_graph
from minicompile.ch01_graphs.layouts import is_dense
from minicompile.ch01_graphs.trace import Recorder, trace
from minicompile.ch07_loops.ir import Extern

# %% [markdown]
# ## The smallest version
#
# tiny, the compiler in one file, does the work of this chapter in its parts [5](chapter:tiny.5) and
# [7](chapter:tiny.7). Its joint graph is one function, which asks autograd while the recorder is still there:

# %%
print(inspect.getsource(tiny.joint_graph))

# %% [markdown]
# It does not see writes. tiny's recorder ends the graph at an operator that writes into a tensor, and the
# interpreter executes that one for real. Two writes make three graphs out of one:


# %%
def writes(x):
    y = x * 2
    y += 1
    y.mul_(3)
    return torch.tanh(y)


weight = torch.randn(8, requires_grad=True)
in_one_file = tiny.compile(writes)
in_one_file(weight)
print("tiny:", len(in_one_file.entries), "graphs; minicompile:", len(watch(writes, weight).graphs))

# %% [markdown]
# And when two outputs share memory, or an output is an input, or the program writes to a tensor between
# forward and backward, tiny assumes that nothing goes wrong. This chapter answers the first with
# *functionalization*, and the others around the compiled graphs. But begin at the beginning: why ask autograd at all?

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

# %% [markdown]
# A value that is used twice gets a gradient from each use, and its own gradient is their sum. So the loop keeps a list
# for each value. When it comes to the operation that made the value, all uses have been passed, and the list is
# complete:


# %%
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
# The autograd engine does not care whether a tensor has data. It calls operators, and the dispatcher decides
# what an operator does. On the fakes of [chapter 1](chapter:01) an operator computes a shape and a dtype and
# nothing else, and the recorder that sits below the dispatcher writes it down. So we run the captured program
# on fakes that require gradients, and then call `torch.autograd.grad`. The engine executes PyTorch's own
# derivative formulas, operator by operator, and the recorder writes those down as well.

# %% tags=["explore:layer(torch.randn(16, 8), torch.randn(8, 8, requires_grad=True))"]
def layer(x, w):
    return F.gelu(x @ w)


mode = FakeMode()
x = mode.from_real(torch.randn(16, 8))
w = mode.from_real(torch.randn(8, 8, requires_grad=True))
tangent = mode.from_real(torch.randn(16, 8))
recorder = Recorder()
for name, fake in (("x", x), ("w", w), ("tangent", tangent)):
    recorder.placeholder(name, fake)
with recorder:
    y = layer(x, w)
    forward_nodes = len(recorder.graph.nodes)
    (gradient,) = torch.autograd.grad(y, w, tangent)
joint = recorder.finish([y, gradient])
print(print_graph(joint))

# %% [markdown]
# That is all, and it covers every operator that PyTorch can differentiate. Follow it once by hand. `x @ w` reaches the
# dispatcher twice. Autograd sees it first: it notes that the result needs the derivative of `mm`, remembers
# `x` for it, and passes the call on. The recorder sees it second, writes `mm`, and answers with a fake. `gelu`
# goes the same way. Up to here the recording holds the two operators of forward, and the fakes carry what real
# tensors would carry: a `grad_fn` each.
#
# `torch.autograd.grad` then walks the `grad_fn`s from back to front. The formula of GELU calls
# `gelu_backward(tangent, mm)`, the formula of `mm` calls `t` and `mm`. Each of these calls goes through the
# dispatcher, so each is recorded. Nothing in the recorder knows that this is a backward pass. The result is one
# straight list in which the second half reads values of the first. It is called the *joint graph*.

# %% tags=["fold"]
draw_fx(
    joint,
    "The joint graph: x and w give mm, then gelu, the output. The tangent and mm give gelu_backward, "
    "and with x transposed a second mm, the gradient of w.",
)

# %% [markdown]
# One input of the joint graph is not an input of the program. The gradient that arrives from outside, from
# whatever the caller does with `y`, is not known yet, so it is a placeholder too. The field calls it the
# *tangent* of `y`. There is one for each output that can be differentiated, with the output's shape.
#
# The real version is the same call. What it adds are the cases in which "one tangent for each output" needs
# care: it makes the tangents' fakes with the strides of the outputs, and it lets the engine run in this
# thread, because the recorder is installed in this thread and would see nothing of another.
#
# In the listing, `fake_like` makes a fake with the strides of the output. An output with several elements in one place,
# such as an expanded tensor (`each_has_its_place` is false), gets a contiguous tangent, which the code calls "row by
# row". `_disable_current_modes` hides the making of the tangents from the recorder, since they are inputs of the
# joint graph and no operators of it.
#
# %show minicompile.ch05_autograd.joint._record_backward
#
# ### What the caller gets
#
# A compiled graph computes fresh tensors. Programs return other things, too: an input, a view of an input, two
# views of one tensor, a number.


# %%
def several(x):
    y = x * 2
    return x, x.t(), y, y[0], x.shape[0] * 3


x = torch.randn(4, 4, requires_grad=True)
eager, compiled = several(x), minicompile.compile(several, backend="aot_eager")(x)
for kind, outputs in (("eager", eager), ("compiled", compiled)):
    same = outputs[0] is x, outputs[1]._base is x, outputs[3]._base is outputs[2]
    print(f"{kind:9} the input itself: {same[0]}; a view of it: {same[1]}; a view of another output: {same[2]}")

# %% [markdown]
# All three matter to the caller. Whoever writes to `y` expects to see it in `y[0]`, and gradients that arrive
# at the view have to flow on into `x`. If the graph returned five tensors with the right numbers, programs
# would go wrong later, and far from here. So the graph computes only what has to be computed, and each output
# has a *recipe* that ordinary PyTorch carries out afterwards. There are three kinds. `Result(k)` is the graph's
# result number k. `Input(k)` is the caller's own tensor. A `ViewOf` is made from one of the other two by a list of
# view operators, its `steps`:

# %%
from minicompile.ch05_autograd.joint import trace_joint

graph = watch(several, x, backend="eager").graphs[0]
made = trace_joint(graph, [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"])
for recipe in made.recipes:
    print(recipe)
print(print_graph(made.gm))

# %% [markdown]
# Capture has taken care of two of the five already: the code that it generated returns the input and the number.
# The graph has three outputs, and it computes one result. The steps of a view are run again on the real tensor. A view
# has two flags for autograd. `detach` is true if the program has taken the view behind a `detach()`, so that no
# gradient may flow through it, and `no_grad` is true if the program has taken it under `torch.no_grad()`. To find the
# steps, each output is followed back through the recording, as long as the node shows the memory of one of its
# arguments. `viewed_by` finds this argument by comparing the storages of the fakes. An operator with several
# results is followed by a `getitem` node, whose index becomes a part of the step (`made_by` gives the operator and the
# index). An operator that writes returns the tensor that it was given, so it adds no step:
#
# %show minicompile.ch05_autograd.output_plan.view_chain
#
# ## Programs that write
#
# The recording of a real program contains writes: `x.add_(1)`, `y[0] = 3`, the running statistics of batch
# norm, a cache of keys and values. Here is what the simplest pass of any compiler makes of one. It removes
# nodes that nobody reads.


# %% tags=["explore:program(torch.zeros(2, 3))"]
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
# The result of `add_` has no reader, so it was removed. That `v` shows the same memory is in no argument of any
# node. Reordering two nodes, computing one again in backward, or merging two equal ones go wrong in the same
# way: each needs to know what a node depends on, and the arguments do not say it.
#
# One could make every later pass careful about memory. It is better to make graphs in which all dependencies
# *are* arguments, once, and to let every pass be naive again. That is *functionalization*: every write gets a
# new name, and whoever looks at the memory afterwards reads the new name.

# %% tags=["explore:program(torch.zeros(2, 3))"]
from minicompile.ch05_autograd.functionalize import functionalize

graph = trace(program, [mode.from_real(torch.zeros(2, 3))], ["x"])
print(print_graph(functionalize(graph)))

# %% [markdown]
# `add_` became `add`. The view was taken a second time, from the new value. The only write that is left is the
# last line, for the caller who will look at `x`, and as the last node it is in nobody's way.
#
# ### Two notions
#
# The pass keeps two kinds of records, and everything else follows from them. A *memory* is what PyTorch calls a
# storage: one block that several tensors may show. Its `value` is the node of the new graph that holds the
# block's contents at present, and its `version` counts the writes.
#
# %show minicompile.ch05_autograd.aliases.Memory
#
# An *alias* is a tensor of the old program. It knows its memory, and how it looks at it: `parent` is the alias
# that it is a view of, and `step` the view operator. It also remembers the node that held its own contents when
# it was last asked, and at which version of the memory that was.
#
# %show minicompile.ch05_autograd.aliases.Alias
#
# Reading an alias is then a comparison of two numbers. If nobody has written since, the remembered node will do.
# If somebody has, the contents are looked up anew: an alias without a parent shows the memory itself, any other
# reads its parent and takes its view step again. Nothing happens at the moment of the write to the aliases that
# show the memory; each finds out when it is read, and one that is never read again costs nothing.
#
# Three kinds of views can only be repeated if the new contents lie in memory as eager's do. `view` to other sizes and
# `view` as another dtype are the first two: if the strides differ from eager's, the contents are copied row by row
# before the step is taken. The third is `as_strided`, whose arguments are positions in memory, and there `as_it_lies`
# brings back eager's strides.
#
# %show minicompile.ch05_autograd.aliases.read
#
# ### Writing through a view
#
# The harder half is a write through a view. In this program `end` is a part of a row of `x`:


# %% tags=["explore:through(torch.zeros(2, 4))"]
def through(x):
    row = x[1]
    end = row[2:]
    end.mul_(10)
    x.add_(1)
    return [row.sum()]


graph = trace(through, [mode.from_real(torch.zeros(2, 4))], ["x"])
print(print_graph(graph))

# %% [markdown]
# What is `x` after `end.mul_(10)`? By hand: the new contents of `end` are two numbers, `end * 10`. The new
# contents of `row` are the old row with these two in places 2 and 3. The new contents of `x` are the old `x`
# with that row in place 1. Each view step is undone by an operator that puts a part back into a whole: a slice by
# `slice_scatter`, a `select` by `select_scatter`. A view that keeps every element is undone by another view, a
# transpose by a transpose. The function that writes is this recursion and two corrections:
#
# %show minicompile.ch05_autograd.aliases.write
#
# The corrections are `conform` and `restride`. They bring the new value into the dtype, shape and strides of the tensor
# that was written: an in-place operator keeps them, its functional counterpart may not. The last two lines note the new
# contents as those of the alias itself, if they have its strides, so that its next reader need not take the view again.
# Since the recursion writes each parent in turn, this is done for all aliases on the way. The rules that undo one step
# each are registered functions. This is the one for views that drop elements:
#
# %show minicompile.ch05_autograd.rules.views.undo_window
#
# Below, the real pass runs over the program above, one node of the old graph at a time.

# %% tags=["fold"]
from minicompile.ch05_autograd import functionalize as pass_

NAMES = {"x": "x", "select_int": "row", "slice_tensor": "end"}


def steps_of(graph):
    """(old node, nodes that were written for it, table of the aliases) after each node of the old graph."""
    f, written = pass_.Functionalizer(graph), 0
    for node in graph.graph.nodes:
        f.current = node
        if node.op == "output":
            return
        if node.op == "placeholder":
            f.env[node] = pass_.fresh_alias(node.meta["val"], f.graph.node_copy(node))
        else:
            pass_.visit_call(f, node)
        new = list(f.graph.nodes)[written:]
        written += len(new)
        aliases = {n.name: a for n, a in f.env.items() if isinstance(a, pass_.Alias)}
        rows = [
            (NAMES[name], a.node.name, a.version, f"{a.memory.version}{'' if a.version == a.memory.version else ': stale'}")
            for name, a in aliases.items()
            if name in NAMES
        ]
        yield node, new, Table(["variable", "its contents as last read", "at version", "memory is at"], rows)


def said(node, new):
    made = ", ".join(n.name for n in new)
    return f"{node.name}: writes {made}." if node.op != "placeholder" else f"{node.name}: an input, which has memory of its own."


Walk("Functionalization, one node at a time", [(said(node, new), table) for node, new, table in steps_of(graph)])

# %% [markdown]
# Look at the fourth frame. One in-place multiplication has become three nodes, and all three aliases are up to
# date, because the recursion computed the contents of each on its way. In the fifth frame `x.add_(1)` writes one
# node, and the two views are stale. In the sixth `row.sum()` reads `row`: only now `select` is taken again, from
# the new `x`. `end` is still stale at the end, and no node was wasted on it. This is the graph that came of it, with the
# write for the caller as its last node. The pass removes nothing: a view that was taken and has no reader any more
# stays in the graph, until the cleanup below removes it.

# %% tags=["explore:through(torch.zeros(2, 4))"]
print(print_graph(functionalize(graph)))

# %% [markdown]
# ### The strides stay
#
# A write changes the numbers of a tensor, and leaves them in their places. A new tensor has its own places. In the
# program below the elements of a column of `x` lie side by side in memory, and those of a row of `y`. The program may
# look at `x.t()` as one list of six, since a row of `x.t()` is a column of `x`. If `y` simply stood for `x` after the
# write, that view would be an error:


# %% tags=["explore:overwritten(x, y)"]
def overwritten(x, y):
    x.copy_(y)
    return [x.t().view(6)]


x, y = torch.randn(2, 3).t(), torch.randn(3, 2)
print("x: strides", x.stride(), " y: strides", y.stride())
print(print_graph(functionalize(trace(overwritten, [mode.from_real(x), mode.from_real(y)], ["x", "y"]))))

# %% [markdown]
# The pass has put three nodes after `y` that change no number: the dims in the order in which they lie in the memory of
# `x`, a contiguous copy in that order, and the dims back in their old order. The copy is now laid out as `x` was. This
# works for every `x` whose elements fill a piece of memory, each with a place of its own, in whatever order of the
# dims. Such a tensor is called *dense*. Sort the dims by stride: the smallest stride must be 1, and each next one must
# be the number of elements that all faster dims have together. (A dim of size 1 is left out, since no address depends
# on its stride. A tensor without elements has no places at all; the callers let it pass before they ask.)

# %%
for name, t in (
    ("x, columns one after the other", x),
    ("two columns of three", torch.zeros(4, 3)[:, :2]),
    ("every other element", torch.zeros(6)[::2]),
    ("a row repeated by expand", torch.zeros(3).expand(2, 3)),
):
    print(f"{name:31} sizes {str(tuple(t.shape)):7} strides {str(t.stride()):7} {'dense' if is_dense(t) else 'not dense'}")

# %% [markdown]
# ### What cannot be expressed
#
# Two kinds of writes stay outside of this scheme, and the pass has to notice them. `x -= x.t()` overwrites
# elements that it has yet to read; what comes out depends on the order in which eager's kernel walks. And a
# window onto memory that overlaps itself (`expand`, `unfold`) has several places for one element. Eager refuses
# most of these. The pass raises `Unsupported`, the graph runs operator by operator, and eager's own error reaches
# the user:


# %%
def overlapping(x):
    x.sub_(x.t())
    return x * 2


for function in (overlapping, minicompile.compile(overlapping)):
    try:
        function(torch.randn(3, 3))
    except RuntimeError as error:
        print(shortened(str(error).splitlines()[0], 100))

# %% [markdown]
# ### What it costs
#
# A functional graph never writes into a block, it makes a new one. In-place operators were a way to save memory
# traffic, so have we given that away? Not in a chain: loops that are fused keep their values in registers, and
# the memory plan of [chapter 8](chapter:08) lets a result take over the memory of a value that is read for the
# last time, which makes `add` into `add_` again wherever that is legal. What does cost is a small write into a
# large block, since the `scatter` makes a new block and copies what it does not change. Here is a chain, and two
# writes to the first row of a block:


# %%
def chain(x):
    y = x * 2
    y.add_(1).relu_().mul_(x)
    return y


def corner(x):
    x[:1].add_(1)
    return x[:1] * 2


def corner_of_result(x):
    y = x[:, :4] @ x[:4]
    y[:1].add_(1)
    return y


# %% [markdown]
# The two differ in where the block comes from. In `corner` it is an input, in `corner_of_result` the graph has made it:

# %%
x, rows = torch.randn(1000, 1000), []
for function in (chain, corner, corner_of_result):
    compiled = minicompile.compile(function)
    eager_s, ours_s = best_time(function, x), best_time(compiled, x)
    rows.append((function.__name__, f"{1e6 * eager_s:.0f} us", f"{1e6 * ours_s:.0f} us"))
Table(["program", "eager", "compiled"], rows)

# %% [markdown]
# The chain of four operators is one pass over memory. In `corner` the block is an input, and what the graph makes of it
# is copied back into the input at the end. [Chapter 7](chapter:07) sees that only the first row differs, and writes this
# row alone. The bad case is the last one. There the block is the result of a matrix product: eager touches one of its
# thousand rows, and the compiled version copies all of them.
#
# ### What it allows
#
# What a node computes now depends on its arguments and on nothing else. So two nodes with the same operator and the same
# arguments have the same value, and one of them will do. The joint graph has many such pairs, because the engine
# transposes and casts in backward what forward has transposed and cast already. To merge equal nodes is a walk with a
# dictionary, and to remove what nobody reads is a walk backwards. Here the second `sin` and the second `exp` go, the
# latter because its argument has become the former's:


# %%
from minicompile.ch05_autograd.cleanup import clean


def repeated(x, p):
    n = p.long()
    return [x.sin().exp() * x.sin().exp(), n + 1, n + 1.0, n + True, torch.bernoulli(p), torch.bernoulli(p), torch.empty(2), torch.empty(2)]


print(print_graph(clean(trace(repeated, [mode.from_real(torch.rand(3)) for _ in range(2)], ["x", "p"]))))

# %% [markdown]
# Three kinds of nodes look equal and are not. To a dictionary of Python the numbers 1, 1.0 and True are one key, but adding
# 1.0 to integers gives floats: the type is a part of the key (for -0.0 and 0.0 the text is, too). Two draws of random
# numbers have equal arguments, and what tells them apart is the state of the generator, which is no argument. And two
# pieces of fresh memory are two, since somebody is about to write to them. Where two nodes become one, the one that is
# left remembers the lines of both.

# %% [markdown] tags=["page"]
# ## Cutting the graph in two
#
# Forward runs now and backward later. Whatever backward reads of forward must be carried over. A small
# example, with everything in it that matters:


# %%
def layer(x, bias, w):
    return F.gelu(x + bias) @ w


def joint_of(function, *args):
    """The captured graph of a function, differentiated, in primitives."""
    from minicompile.ch05_autograd.joint import simplify
    from minicompile.ch06_decompositions.decompose import decompose

    graph = watch(function, *args, backend="eager").graphs[0]
    made = trace_joint(graph, [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"])
    simplify(made, decompose)
    return made


args = torch.randn(512, 64), torch.randn(64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
made = joint_of(layer, *args)
print(print_graph(made.gm))

# %% [markdown]
# The operators are smaller than before: `simplify` with `decompose` has taken GELU apart into additions,
# multiplications and one `erf`. Such small operators, from which the others can be put together, are called
# *primitives*. How a graph is brought into primitives is the subject of [chapter 6](chapter:06); here we only need the
# result. It comes before the cut on purpose. As long as GELU is one operator, the only choice is to keep its
# input or not. Taken apart, there are a dozen values between its input and its slope, and some of them are better
# to keep than others.
#
# A node that depends on the tangent can only run in backward. A node that an output needs has to run in forward.
# Which values go across the border between them? There are two naive answers. The first is *everything that
# backward reads*, as it stands in the graph. The second is *nothing but the inputs*: then backward begins by
# running forward again, with its matrix products. In between lie as many choices as there are sets of nodes.

# %%
from minicompile.ch05_autograd.partition import choose_saved, is_view, partition, size_in_bytes, split_nodes


def shown_by(node):
    """The value whose memory a view shows; any other node itself."""
    while is_view(node):
        node = node.args[0]
    return node


def crossing(made, halves):
    """The values of forward that nodes of backward read, directly or through a view."""
    read = [n for n in made.gm.graph.nodes if n not in halves.backward and any(u in halves.backward for u in n.users)]
    return list(dict.fromkeys(shown_by(n) for n in read))


def weight(nodes):
    return sum(size_in_bytes(n) for n in nodes if n.op != "placeholder")


halves = split_nodes(made)
cut = choose_saved(made, halves)
for words, nodes in (("read by backward:", crossing(made, halves)), ("chosen:", cut)):
    print(f"{words:17} {', '.join(n.name for n in nodes)}: {size(weight(nodes))} besides inputs")

# %% [markdown]
# Backward reads `w` and the result of GELU, `mul_tensor_2`, through a transpose each, which is a view. The third value,
# `add_tensor_3`, is the slope of GELU. For this function the compiler keeps exactly what backward reads, and further
# down is one for which it keeps a quarter of it. Even here there was something to decide. The two computed values could
# be computed again from `x` and `bias`, which are smaller together, and exist anyway. And backward could begin at the
# sum `add_tensor`, from which both follow. The compiler does neither, and has a reason for each. To give the reasons
# one needs to know what it costs to keep a value, and when a value may be computed again. Both come below, and then we
# return to this graph. What is needed is one rule that weighs all values at once, also in a graph of ten thousand
# nodes. It comes from a question about water.
#
# ### Pipes
#
# Six places are joined by pipes. The number at a pipe says how much water it carries, say in litres a second.
# How much can flow from S to T in all? A first answer is found by looking for a way along which every pipe has
# room left, and sending as much as its narrowest pipe allows. Such a way is an *augmenting path*. Then one looks
# for the next.

# %%
PLACES = {"S": (40, 100), "a": (190, 40), "b": (190, 160), "c": (400, 40), "d": (400, 160), "T": (550, 100)}
CAPACITY = {("S", "a"): 4, ("S", "b"): 3, ("a", "d"): 3, ("b", "d"): 2, ("a", "c"): 2, ("d", "T"): 3, ("c", "T"): 4}
pipes(
    PLACES,
    [(a, b, str(room), "plain") for (a, b), room in CAPACITY.items()],
    "A network of six places from S to T.",
    "Each pipe has a capacity.",
)

# %% [markdown]
# Suppose the first path is S, a, d, T. Its narrowest pipes carry 3, so 3 are sent, and a to d and d to T are
# full. A second path, S, a, c, T, takes the one litre that is left of S to a. Now T gets 4, and no way has room:
# S to a is full, and from b one comes to d, from which nothing leads on.
#
# Is 4 the answer? It is not. Water from b could go to d and on to T, if a sent less to d and more to c, where
# there is room. The first path was a poor choice, and the trick is that it does not have to be taken back. Let the
# search also walk a pipe *against* its direction, as far as water is flowing in it: to send one litre from d back to
# a is to send one litre less from a to d. What a pipe can still take in its direction, and what can be taken back
# from it, are its two *residual* capacities. Flow that is sent along a pipe moves from the first to the second.
#
# The search keeps both in one dictionary, `room`, which has an entry for each pipe and one for its reverse. It goes out from
# the source, place by place, and notes where it came from. When it has reached the sink, the way back is the path:


# %%
def augment(room, source, sink):
    """A shortest path from source to sink over pipes with room left, as a list of places, or None."""
    came_from, queue = {source: None}, [source]
    for place in queue:
        for (a, b), left in room.items():
            if a == place and left > 0 and b not in came_from:
                came_from[b] = place
                queue.append(b)
    path = [sink] if sink in came_from else None
    while path and came_from[path[0]] is not None:
        path.insert(0, came_from[path[0]])
    return path


# %% [markdown]
# Then paths are found and used until there is none. `pushed` is what the narrowest pipe of the path has room for:

# %%
room = {**CAPACITY, **{(b, a): 0 for a, b in CAPACITY}}
frames, total = [], 0
while path := augment(room, "S", "T"):
    way = list(zip(path, path[1:]))
    pushed = min(room[pipe] for pipe in way)
    for a, b in way:
        room[a, b] -= pushed
        room[b, a] += pushed
    total += pushed
    frames.append((path, pushed, total, dict(room)))

# %% tags=["fold"]
def flow_picture(room, way=(), inside=()):
    edges = []
    for (a, b), capacity in CAPACITY.items():
        kind = "path" if (a, b) in way or (b, a) in way else "full" if room[a, b] == 0 else "plain"
        edges.append((a, b, f"{capacity - room[a, b]} of {capacity}", kind))
    caption = "Red and dashed: full." + (" Orange: the path." if way else "") + (" Green: from here T can be reached." if inside else "")
    return pipes(PLACES, edges, "Flow in each pipe.", caption, inside=inside)


Walk(
    "Maximum flow, path by path",
    [
        (
            f"Path {', '.join(path)} carries {pushed}; {total} in all."
            + (" From d to a it goes backward: that takes 1 back." if ("d", "a") in zip(path, path[1:]) else ""),
            flow_picture(left, list(zip(path, path[1:]))),
        )
        for path, pushed, total, left in frames
    ],
)

# %% [markdown]
# The third path is S, b, d, a, c, T. It walks from d to a against the pipe, so that pipe carries 2 at the end where
# it had carried 3. No place has lost or gained water, and T gets 5. After it there is no further path.
#
# ### The cut is where the search ends
#
# Look at the moment when the search fails. Mark all places from which T can still be reached. Every pipe that leads
# from an unmarked place into a marked one is full, or its beginning would have been marked. S is unmarked, or there
# would be one more path. And no water flows from a marked place back to an unmarked one, since it could be taken back,
# and that place would have been marked. So together these pipes carry all of the flow. A set of pipes whose removal
# separates S from T is called a *cut*, and all water has to pass through any cut, so no flow is larger than any cut.
# Here is a cut that is exactly as large as the flow, so the flow is the largest and the cut the smallest. That is the
# theorem of Ford and Fulkerson, and its proof is the paragraph that you have just read.

# %%
marked, queue = {"T"}, ["T"]
for place in queue:
    for (a, b), left in room.items():
        if b == place and left > 0 and a not in marked:
            marked.add(a)
            queue.append(a)
through_cut = [(a, b) for a, b in CAPACITY if a not in marked and b in marked]
print("reach T:", sorted(marked), " the cut:", through_cut, "carries", sum(CAPACITY[p] for p in through_cut), "of", total)
flow_picture(room, inside=marked)

# %% [markdown]
# The compiler's own version is the same search with a better order, Dinitz's. It numbers the places by their
# distance from the source, pushes water along many paths of that length at once, and only then numbers them
# again. A pipe and its reverse stand beside each other in one list, edge `e` and edge `e ^ 1`, so that the
# two residual capacities are two additions apart:
#
# %show minicompile.ch05_autograd.maxflow.maximum_flow "pushed = min" to "net.room[e ^ 1]"
#
# Reading the cut off is the loop from above, from the sink backward:
#
# %show minicompile.ch05_autograd.maxflow.sink_side
#
# ### From values to pipes
#
# Now the graph. The pipes are the edges of the program: one leads from each operand to its result. The source feeds what
# exists in any case, the inputs, and the sink is backward: whatever value backward reads has a pipe to it. So a way
# from the source to the sink is a chain of computations that begins with an input and ends with something that
# backward reads.
#
# To save a value is to cut the ways that lead through it. Backward then begins at this value, and computes again
# what lies between it and the sink. Inputs are values like the others: backward has an input only if it is among the
# saved values, though saving it may cost nothing. If one way had no saved value on it, backward would have to
# compute along this way from its first value, the input, and would not have it. So a set of saved values is sufficient
# when it cuts every way from the source to the sink.
# Give each value the price of saving it as a capacity, and the cheapest sufficient set is a minimum cut.
#
# A value that must not be computed again, such as a matrix product, gets a pipe from the source, as if it were an
# input. Then it has to be saved itself, or a saved value has to stand between it and backward.
#
# ### Five values, by hand
#
# Take `exp(relu(x @ w))`, with 64 by 64 floats in each tensor. Let h be the product, r the result of relu, and e
# that of the exponential. Backward reads three values of forward. It multiplies by e, which is the slope of the
# exponential. It sets the gradient to zero where m says so, which is the comparison r <= 0. And it multiplies by
# x, for the gradient of w. (w itself is not read by backward, since x needs no gradient, so it is left out.)
#
# A tensor of floats has 16 kB, and the booleans of m have 4. Whoever saves a value pays for a write and a read, and
# only for the read if forward writes the value anyway. Forward writes e, because it is the output. It also writes h. A
# matrix product is not made into a loop by this compiler: it stays a call of PyTorch's own function, a *library call*,
# as convolutions, attention and sorting do, and a library call reads its operands from memory and writes its result to
# memory. Everything else becomes loops of the compiler's own, which may share a kernel and keep their values in
# registers. So the prices are 16 for h, 32 for r, 8 for m, 16 for e, and nothing for x, which exists anyway.

# %% tags=["fold"]
pipes(
    {"S": (25, 75), "x": (115, 30), "h": (205, 110), "r": (315, 110), "m": (425, 22), "e": (425, 150), "T": (545, 90)},
    [("S", "x", "∞", "plain"), ("S", "h", "∞", "plain"), ("x", "h", "∞", "plain"), ("h", "r", "∞", "plain"), ("r", "m", "∞", "plain"),
     ("r", "e", "∞", "plain"), ("m", "T", "∞", "plain"), ("e", "T", "∞", "plain"), ("x", "T", "∞", "plain")],
    "Five values between the source and the sink. Their prices are: x 0, h 16, r 32, m 8, e 16.",
    "Below each value its price. S also feeds the product h, which is never computed again. The green value is saved.",
    inside=("h",),
    notes={"x": "free", "h": "16", "r": "32", "m": "8", "e": "16"},
)

# %% [markdown]
# Find the flow. The way S, h, r, m, T takes 8, and then m is full. The way S, h, r, e, T takes another 8, and
# then h is full, because both ways lead through it. Nothing gets through x, whose price is 0. So the flow is 16,
# and the cut is h, with x for nothing. The alternatives cost more: r alone costs 32, and m with e costs 24.
# Backward gets the product, and its kernel computes r, m and e again.
#
# Now leave out the exponential: `relu(x @ w)`. Then r is the output, e is gone, and backward reads m and x. The
# only way through h takes 8, and m is full. The cut is m, with x for nothing. Nothing needs the product any more. Here is
# what the compiler finds, with its own names. The sizes are those in memory, and 4 kB are saved at a price of 8:


# %%
def with_exp(x, w):
    return torch.exp(F.relu(x @ w))


def without_exp(x, w):
    return F.relu(x @ w)


pair = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)
for function in (with_exp, without_exp):
    joint = joint_of(function, *pair)
    saved = choose_saved(joint, split_nodes(joint))
    print(f"{function.__name__:12}", ", ".join(f"{n.name}: {'an input' if n.op == 'placeholder' else size(weight([n]))}" for n in saved))

# %% [markdown]
# ### A value is two vertices
#
# One thing does not fit yet. Prices belong to values, and capacities to pipes. A value that three operators read is
# saved once and paid for once, but in the network three pipes would leave it. So each value becomes *two* vertices,
# `enter` and `leave`, with one pipe between them, and that pipe carries the price. All pipes between different values
# are infinitely wide: the cut can only go through values.

# %% tags=["fold"]
pipes(
    {
        "S": (30, 90),
        "x in": (120, 90),
        "x out": (215, 90),
        "h in": (310, 90),
        "h out": (405, 90),
        "f": (500, 35),
        "g": (500, 145),
        "T": (590, 90),
    },
    [
        ("S", "x in", "∞", "plain"),
        ("x in", "x out", "0", "path"),
        ("x out", "h in", "∞", "plain"),
        ("h in", "h out", "8", "path"),
        ("h out", "f", "∞", "plain"),
        ("h out", "g", "∞", "plain"),
        ("f", "T", "∞", "plain"),
        ("g", "T", "∞", "plain"),
    ],
    "An input x and a value h that two operators f and g of backward read. Only the pipes inside of x and of h have a price.",
    "Orange: the two pipes with a price. h has two readers, and is paid for once.",
    radius=24,
    width=640,
)

# %% [markdown]
# The function that builds the network is short enough to be read in four pieces. Before the first, two sets have been
# made. `consumed` are the values that do not depend on tangents and that backward reads, and `wanted` are these and
# all that they are computed from. (A gradient may not depend on a tangent at all, for example a gradient of zeros.
# It is returned by backward, so it counts as read.) Only what is wanted becomes a part of the network. The first piece
# lists the `nodes` that are wanted or that forward runs for its outputs, `halves.forward`, because both decide in which
# `stage` of forward a value is computed. Stages are explained below, with the prices.
#
# %show minicompile.ch05_autograd.partition.choose_saved "nodes =" to "source, sink"
#
# The second makes the two vertices of each value and the pipe between them. `use` says how forward uses the
# value, and `written` is what follows for the price; both are explained below. `repeated` is true of a value inside
# of `torch.utils.checkpoint`: the user has asked that it be computed again, so no price is high enough, unless a node
# outside of the checkpoint reads the value (`leaves_region`). `prices` is another function that a caller may give in the
# place of `price`. `is_fusible` is true of what becomes a loop, and false of a library call. `inner` holds the two
# vertices of each value. The last line hangs inputs, and what must not be computed again, on the source.
#
# %show minicompile.ch05_autograd.partition.choose_saved "enter, leave" to "add_edge(net, source"
#
# Then come the wide pipes, from each operand and to the sink:
#
# %show minicompile.ch05_autograd.partition.choose_saved "for argument in" to "add_edge(net, leave"
#
# The last piece asks for the flow, and reads off the cut: the values whose `leave` can reach the sink and whose `enter`
# cannot.
#
# %show minicompile.ch05_autograd.partition.choose_saved "if maximum_flow"
#
# Here is the network of `layer`, with the two vertices of a value drawn as one box again:

# %% tags=["fold"]
from minicompile.ch05_autograd.partition import forward_use, is_fusible, must_not_recompute, price, stages

forward_nodes = [n for n in made.gm.graph.nodes if n.op != "output" and n not in halves.backward]
stage = stages(forward_nodes, halves)
boxes, edges = {"source": ("source", "", "plain")}, []
for n in forward_nodes:
    use = forward_use(n, halves, stage)
    cost = price(n, made, use.library or use.far or use.output or not is_fusible(n))
    if not any(u in forward_nodes or u in halves.backward for u in n.users):
        continue
    boxes[n.name] = (
        shortened(n.name, 20),
        "free" if cost == 0 else "never" if cost > 1 << 50 else size(cost),
        "saved" if n in cut else "input" if n.op == "placeholder" else "compute",
    )
    edges += [(a.name, n.name) for a in n.all_input_nodes]
    if n.op == "placeholder" or must_not_recompute(n, halves, use):
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
# ### What a value costs
#
# The price is counted in bytes that have to be moved. Saving a value means a write in forward and a read in
# backward, unless forward writes it anyway; then only the read is left, and it is half as expensive. A view is never saved,
# because it has no memory of its own: what it shows is saved instead.
#
# An input costs nothing if it is sure to be the same when backward runs. The program that is compiled may write
# to it; then it is in `joint.mutated`. Or the user may write to it between forward and backward. If eager saves
# this input, autograd notices the write and raises an error, in compiled code as in eager. If eager saves it
# nowhere, then eager gives the right gradient after the write, and so must we. Such an input is in
# `joint.exposed`. An input in neither of the two is safe. A module's parameters count as safe, too, because they change
# only after backward. An input that is not safe has to be copied, which is a read and a write:
#
# %show minicompile.ch05_autograd.partition.is_safe
#
# %show minicompile.ch05_autograd.partition.price
#
# Whether forward writes a value is not known yet, since fusion ([chapter 8](chapter:08)) comes later. It is estimated.
# Library calls divide the program into stages, and the loops between two library calls can share a kernel, in which
# values stay in registers. So there are three ways in which forward uses a value that make it write the value: a
# library call reads it (`use.library` in the code), a loop of a later stage reads it (`use.far`), or it is an output of
# the program (`use.output`). `written` is true if one of the three is, or if a library call computes the value.
#
# Now we can give the reasons for the cut of `layer`. `w` is safe and costs nothing, because eager's product saves
# it. The result of GELU is read by a matrix product, so it is written and costs half of what its neighbours cost,
# and backward's product for the gradient of `w` reads it from memory in any case. `x` and `bias` are exposed:
# eager's addition saves neither of them. To compute the slope of GELU from them, both would have to be copied.
# The sum and the slope are as large as the copy of `x` alone, so one of them is the cheapest. They cost the same,
# and among equal cuts the compiler takes the one nearest to backward, which leaves least to compute there: the
# slope.
#
# ### The same question, asked of another value
#
# What backward reads is what PyTorch's derivative formulas name, and a formula may name a dear value where a cheap one
# would do. Take the ReLU once more. Its formula asks where the *result* is zero or less. The operand gives the same
# answer everywhere. In the example above this helps nobody, since backward would need the operand for nothing else. But
# in a convolutional network a batch norm stands in front of most ReLUs. The backward pass of a batch norm reads the
# tensor that was normalised, and so its kernel has each element of this tensor in a register. The operand of the ReLU is
# the result of this batch norm. The kernel can compute it from that element with four operations (subtract the mean,
# divide by the deviation, multiply by the weight, add the bias), and the numbers for these are few, one for each
# channel. To ask the result of the ReLU, in contrast, the kernel would have to read one more large tensor. So before
# the network is built,
# [`compare_operands`](ref:minicompile.ch05_autograd.partition.compare_operands) puts the question to the operand,
# wherever the operand is made from one large tensor that backward reads anyway. In a training step of ResNet-50 (128
# images, TF32, on an H200), the kernels of the first two such layers take 53 and 69 microseconds. With the question left
# as it was they took 74 and 91.
#
# ### A case in which a quarter is kept
#
# Write GELU out in Python, as early GPT code did, behind a matrix product. What eager keeps for backward can be heard:
# autograd calls a hook for each tensor that it saves.


# %%
def written_gelu(x):
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))


def up(x, w):
    return written_gelu(x @ w)


def kept(function, *args, known=()):
    """{storage: bytes} of what autograd saves during one call, except the tensors in `known`."""
    known = {t.untyped_storage().data_ptr() for t in known}
    found = {}

    def note(t):
        if t.untyped_storage().data_ptr() not in known:
            found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        keep = function(*args)  # noqa: F841 (alive, so that no storage is used twice)
    return found


# %% [markdown]
# The table counts bytes in three ways: as eager keeps them, as the joint graph reads them, and with the minimum cut.

# %%
a, w = torch.randn(256, 256), torch.randn(256, 256, requires_grad=True)
made = joint_of(up, a, w)
halves = split_nodes(made)
rows = [("eager", size(sum(kept(up, a, w, known=(a, w)).values())), "")]
for words, nodes in (("everything that backward reads", crossing(made, halves)), ("minimum cut", choose_saved(made, halves))):
    rows.append((words, size(weight(nodes)), ", ".join(n.name for n in nodes)))
Table(["what is kept", "bytes", "which values"], rows)

# %% [markdown]
# Eager keeps four tensors, since no operator knows of its neighbours: the input of the power, the result of tanh, and
# both operands of the last product. Adding something and multiplying by a number keep nothing. The joint graph as it
# stands reads four as well, other ones. Besides the input `x`, which is free, the cut goes through the result of the
# matrix product alone, and keeps one tensor in the place of four. Everything else in the formula can be computed from
# the product, in the backward kernel, which would have to load something in any case: now it is one value for each
# element, and not four.
#
# ### A case in which computing again costs time
#
# The prices alone would let backward compute matrix products again: they count bytes, and inputs are free. That is why a
# product got a pipe from the source. The policy that decides which values get one stands in one function:
#
# %show minicompile.ch05_autograd.partition.must_not_recompute
#
# Read it from above. A checkpoint is the user's own decision and comes first. Views and casts to a wider
# dtype are free. Whatever is not cheap (a product, a convolution, a sort, a reduction, a random number) is
# computed once. So is a cheap operator that reads overlapping windows, because it would read every element
# several times, and so is an equality of floats. The gradient of a maximum goes to the elements for which `x == x.amax()`. If x
# is computed again from values that were rounded when they were saved, it may be equal to its maximum nowhere, and the
# gradient would be lost. A node that forward does not need, or that has no operands, may always be computed in backward.
# What is left are pointwise operators of forward. They may be computed again, with two exceptions. The first is
# `use.far`: a loop behind a library call reads the value, so forward has written it, and it is in memory. The
# second is next to it: a library call of forward reads the value (`use.library`), so it has been written, and a library
# call of backward reads it from memory, too. In both cases a second computation would only replace a read by more work.
#
# To see what it is worth, take the policy away:

# %%
from minicompile.ch05_autograd import partition as partition_module


def three_layers(x, a, b, c):
    return torch.relu(torch.relu(torch.relu(x @ a) @ b) @ c).sum()


weights = [torch.randn(512, 512, requires_grad=True) for _ in range(3)]
batch = torch.randn(512, 512)

# %% [markdown]
# Two helpers. `training` is one step, without an optimizer. `compiled_with` compiles a copy of the function, because the
# policy is read when something is compiled, and reports what the copy keeps and how many products it runs. It counts
# them in the schedule of each half, the list of its steps (chapter 8), in which a library call is an `Extern`:

# %%
def training(function):
    for parameter in weights:
        parameter.grad = None
    function(batch, *weights).backward()


def compiled_with(name):
    """A copy of the function, compiled now, under the policy of the moment; the bytes that it keeps; its matrix products."""
    copy = types.FunctionType(three_layers.__code__.replace(co_name=name), globals())
    compiled = minicompile.compile(copy)
    with watching() as seen:
        training(compiled)
    products = sum(isinstance(step, Extern) for half in seen.halves for step in half["schedule"].steps)
    return compiled, size(sum(kept(compiled, batch, *weights, known=(batch, *weights)).values())), products


# %% [markdown]
# Now the policy is replaced by one that forbids nothing, and both are timed:

# %%
policy, contenders = partition_module.must_not_recompute, {}
contenders["as it is"] = compiled_with("as_it_is")
partition_module.must_not_recompute = lambda node, halves, use: False
contenders["everything may be computed again"] = compiled_with("computed_again")
partition_module.must_not_recompute = policy
seconds = {words: [] for words in contenders}
for _ in range(3):  # in turns, so that both meet the same machine
    for words, (compiled, *_) in contenders.items():
        seconds[words].append(best_time(training, compiled, repeat=8))
rows = [(words, *facts, f"{1e3 * min(seconds[words]):.1f} ms") for words, (_, *facts) in contenders.items()]
Table(["policy", "kept for backward", "products in a step", "one step"], rows)

# %% [markdown]
# With the policy three values are kept: the results of the first two relus, of 1.05 MB each, which a product reads in
# forward and another one in backward, and the mask of the third relu, with one byte for each element.
# Without the policy only the result of the first relu is kept, and backward runs the other two products again. (Not
# the first as well: its operand `a` is exposed, so computing it again would need a copy of `a`. Eager saves `a` only for
# the gradient of `batch`, and `batch` needs none.) Where memory is
# short that can be the right trade, and it is what `torch.utils.checkpoint` asks for; a program that uses it is
# compiled with its marks respected. As a default it is the wrong one.

# %% [markdown] tags=["page"]
# ## The running example
#
# For the GPT block: what do eager and compiled code keep between forward and backward? Parameters and the
# input are left out, since they exist anyway.

# %%
block, x = example()
x.requires_grad_()


def compare_kept(function, alt):
    compiled = minicompile.compile(function)
    compiled(x)
    found = {
        name: kept(f, x, known=(*block.parameters(), x)) for name, f in (("eager", function), ("compiled", compiled))
    }
    rows = [
        (f"{name}, {len(f)} tensors", sum(f.values()) / 1e3, "bad" if name == "eager" else "compute")
        for name, f in found.items()
    ]
    return bars(rows, "kB", alt, form="{:.0f}")


compare_kept(block, "Memory kept between forward and backward.")

# %% [markdown]
# No difference. This block consists of operators whose authors chose by hand what to save: layer norm,
# GELU, attention. The compiler comes to the same choice from the arithmetic alone. Now the perceptron of the block
# with its GELU written out, and dropout added:


# %%
def perceptron(x):
    return x + F.dropout(block.down(written_gelu(block.up(block.norm2(x)))), 0.1)


compare_kept(perceptron, "Kept for the perceptron with its GELU written out.")

# %% [markdown]
# Which tensors are saved in the block?

# %%
made = joint_of(block, x)
nodes = {n.name: n for n in made.gm.graph.nodes}
saved = [nodes[name] for name in partition(made).saved if nodes[name].op != "placeholder"]
print(f"{len(saved)} tensors, {size(weight(saved))}:", ", ".join(n.name for n in saved))

# %% [markdown]
# ### On a GPU, in a real model
#
# GPT-2 is built from the same kinds of operators, at a width of 768 with 12 layers. Peak memory of a
# training step:

# %% tags=["gpu-result", "results:h100-gpt2", "fold"]
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
# ### What it costs to decide
#
# The time to differentiate ahead of time, for one block and for more. The cut is a maximum flow over the
# nodes of forward; recording runs the autograd engine and every meta kernel once.

# %%
from minicompile.ch05_autograd.joint import simplify
from minicompile.ch06_decompositions.decompose import decompose


def timed(graph):
    """The joint graph of a captured graph, and the seconds that recording, simplifying and cutting take."""
    inputs = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
    clock = [time.perf_counter()]
    made = trace_joint(graph, inputs)
    clock.append(time.perf_counter())
    simplify(made, decompose)
    clock.append(time.perf_counter())
    partition(made)
    clock.append(time.perf_counter())
    return made, [b - a for a, b in zip(clock, clock[1:])]


# %% [markdown]
# Each figure of the table is the best of three:

# %%
rows = []
for depth in (1, 2, 4):
    graph = watch(torch.nn.Sequential(*[type(block)() for _ in range(depth)]), x, backend="eager").graphs[0]
    (made, *_), turns = zip(*[timed(graph) for _ in range(3)])
    rows.append((depth, len(made.gm.graph.nodes), *(f"{1000 * min(turn):.0f} ms" for turn in zip(*turns))))
Table(["blocks", "nodes of the joint graph", "record it", "to primitives", "cut it"], rows)

# %% [markdown]
# ## Putting it back into PyTorch
#
# The user calls `loss.backward()`, so the two graphs have to be one node of PyTorch's own autograd graph.
# PyTorch has a way to write such a node: a `torch.autograd.Function` has a forward and a backward, and the
# engine treats it as one operator. The smallest one that joins the two halves is this. Forward returns the results,
# and keeps in `ctx` what backward reads, which is either computed by forward or one of the inputs:

# %%
def naive_region(halves, results):
    """An autograd.Function that interprets the two graphs of a Partition with that many results."""

    def forward(ctx, *inputs):
        outputs = interpret(halves.forward, list(inputs))
        computed = iter(outputs[results:])
        ctx.keep = [next(computed) if i is None else inputs[i] for i in halves.saved_inputs]
        return tuple(outputs[:results])

    def backward(ctx, *tangents):
        return (None, *interpret(halves.backward, [*ctx.keep, *tangents]))

    return type("Naive", (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})


# %% [markdown]
# We give it the two halves of a function of two tensors, and compare the gradient with eager's:


# %%
def decay(x, w):
    return torch.exp(x * w)


w = torch.randn(4, 4, requires_grad=True)
x = torch.randn(4, 4)
made = joint_of(decay, x, w)
region = naive_region(partition(made), made.results)
(ours,) = torch.autograd.grad(region.apply(x, w)[0].sum(), w)
(eager,) = torch.autograd.grad(decay(x, w).sum(), w)
print("the same gradient:", torch.allclose(ours, eager))

# %% [markdown]
# It works, for this program, called like this. Now four programs that break it.
#
# **The caller writes to what was saved.** The derivative of `exp` is its own result, so the result is kept. A
# caller who changes it before `backward` gets an error from eager, and from the naive region a wrong gradient
# without a word:


# %%
def writes(function):
    y = function(x, w)
    y.mul_(3)
    return torch.autograd.grad(y.sum(), w)[0].abs().max().item()


right = torch.autograd.grad(3 * decay(x, w).sum(), w)[0].abs().max().item()
print(f"the largest gradient is {right:.2f}")
for name, function in (
    ("eager", decay),
    ("naive", lambda x, w: region.apply(x, w)[0]),
    ("compiled", minicompile.compile(decay)),
):
    try:
        print(f"{name:9} {writes(function):.2f}")
    except RuntimeError as error:
        print(f"{name:9} {shortened(str(error), 88)}")

# %% [markdown]
# The naive answer is three times too large, since the three is in the tangent and, by now, in the saved
# tensor as well. The remedy is to save through `ctx.save_for_backward`: the engine notes the version of each
# tensor, and compares when they are fetched.
#
# **Memory lives too long.** For eager, what an operator saved dies when the backward of that operator has
# run. Here one node spans the whole region. If it holds everything until its backward returns, the first
# activations stay alive while the last gradients are computed. So backward gives its references away at once,
# into the list of arguments, and the compiled code empties that list and frees each tensor after its last
# use:
#
# %show minicompile.ch05_autograd.region.take_saved "for i, number" to "ctx.maybe_clear"
#
# Among the saved values are sizes, too, if shapes vary. `save_for_backward` takes tensors alone, so numbers are kept in
# `ctx.numbers`, and `region.numbers` says in which places they belong. PyTorch's
# `maybe_clear_saved_tensors` then lets `ctx` forget its references.
#
# **Tangents are not what one expects.** The graph was compiled for a contiguous tangent. The gradient of
# `sum` is one number that is *expanded* to the shape of its input, which takes no memory:

# %%
seen = []


class Look(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, tangent):
        seen.append((tuple(tangent.shape), tangent.stride(), tangent.untyped_storage().nbytes()))
        return tangent


Look.apply(torch.randn(256, 256, requires_grad=True)).sum().backward()
print("shape {}, strides {}, {} bytes of memory".format(*seen[0]))

# %% [markdown]
# A kernel that was generated for strides (256, 1) would read 262,144 bytes where there are four. Each tangent
# is therefore compared with what was expected, and copied if it differs. (`is_lazy` is true of a tensor whose memory does
# not hold its values, for example because a conjugation or a negation is still pending. It is copied as well.)
#
# %show minicompile.ch05_autograd.region.match_tangent
#
# **Tangents that never come.** A model that returns its features and a loss is usually differentiated through
# the loss alone, and the tangent of the features is None. To put a tensor of zeros in its place is right, and
# then all derivatives of the features are computed, of zeros. Instead, each set of missing tangents gets a
# backward graph of its own, from which everything that only zeros would reach has been removed:


# %%
def features_and_loss(x, v, w):
    return F.gelu(x @ v), F.cross_entropy(x @ w, torch.zeros(len(x), dtype=torch.long))


from minicompile.ch05_autograd.undefined import without_tangents

made = joint_of(features_and_loss, torch.randn(32, 64), *(torch.randn(64, 100, requires_grad=True) for _ in range(2)))
backward = partition(made).backward
tangents = [n.name for n in backward.graph.nodes if n.op == "placeholder" and "tangent" in n.meta]
only_loss = without_tangents(backward, {tangents[0]})
for words, gm in (("both tangents", backward), ("only the loss", only_loss)):
    print(f"{words}: {sum(n.op == 'call_function' for n in gm.graph.nodes)} operators")

# %% [markdown]
# A gradient that no tangent reaches is None, as it is in eager, and not a tensor of zeros: if only the loss is
# differentiated, `v.grad` stays None here. An optimizer leaves such a parameter alone, while zeros would still
# decay its weights.
#
# Which set will occur is not known when forward is compiled. The guess is that a scalar output is a loss and
# that only losses are differentiated. That one is compiled in advance; any other, when it first arrives.
#
# The function that joins the halves in the real compiler has a line for each of these, and a few more: for
# inputs that the program writes, for saved-tensor hooks, for two losses that share a region.
# [`region.py`](code:minicompile/ch05_autograd/region.py) explains each where it stands. From outside, all
# of it is one node:

# %%
block, x = example()
x.requires_grad_()
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
# ### The derivative of a derivative
#
# One thing the naive region cannot do, and neither could ours if it stopped here. A gradient penalty keeps the slope of a
# network near 1: its loss contains a gradient, and training differentiates that. In eager one asks for it with
# `create_graph=True`, and the engine notes the operators of the backward pass while it runs them. A compiled backward
# runs kernels, and of these the engine notes nothing.
#
# Is there a function that computes the gradients, and that a compiler can differentiate? There is, and we have all of its
# parts. It runs the captured program, and then calls the engine:
#
#     def gradients(x, w, tangent):
#         y = region(x, w)
#         return torch.autograd.grad(y, (x, w), tangent, create_graph=True)
#
# This chapter began by running a program on fakes, with the engine. The engine may just as well be called *inside* of the program
# that is recorded. So `gradients` has a joint graph: its forward half computes the gradients, its backward half their
# derivative. What was compiled there may be differentiated again, by the same function.

# %%
net = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
fast = minicompile.compile(net)


def slopes(f, x):
    """The first three derivatives of the sum of f(x) by the first column of x."""
    found, y = [], f(x)
    for _ in range(3):
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        y = gradient[:, 0]
        found.append(y)
    return found


x = torch.randn(5, 2, dtype=torch.double, requires_grad=True)
for order, (ours, eager) in enumerate(zip(slopes(fast, x), slopes(net, x)), 1):
    print(f"derivative {order}: largest difference {(ours - eager).abs().max().item():.1e}")
(penalty,) = torch.autograd.grad(slopes(fast, x)[2].square().sum(), net[0].weight)
print("and by the weights:", torch.allclose(penalty, torch.autograd.grad(slopes(net, x)[2].square().sum(), net[0].weight)[0]))

# %% [markdown]
# What does it cost? Each call notes a few numbers, among them the versions of its inputs. If a second derivative is
# asked for later, they show whether the inputs have been written since. A training step that asks for none pays for
# nothing else. A second derivative computes the forward pass and the first derivative once more, and is compiled
# when it is first asked for. This is twice the work of eager, which differentiates what it has computed already. So on a CPU a
# region that is differentiated twice call after call soon runs as it was captured, under eager's autograd.
#
# What goes wrong? The program runs again on the *inputs* of the region, where eager goes on from what it has saved.
# So the first calls of a region keep them, and copies of the small ones, which the program may write to. A training that takes no
# second derivative by then is one that will not, and large inputs that backward does not need are let go of. If one is asked for after
# all, an input that is gone, or was written, ends in an error that says so. Dropout draws the same mask again, from
# the state that the generator had. A batch norm in training writes its running statistics, but in its
# joint graph in primitives no gradient is computed from them, so nobody needs the old ones.
# [`second.py`](code:minicompile/ch05_autograd/second.py) has the details.
#
# ## What torch.compile does differently
#
# AOTAutograd records the joint graph in the same way, with the engine on fake tensors, and its default
# partitioner is the same minimum cut. Functionalization happens *during* tracing there, with wrapper
# tensors implemented in C++; ours is a pass over the finished recording, which is shorter and can print the
# graph before it. Its partitioner decides on ATen operators, knows a list of recomputable ones, and can be
# given a memory budget; ours decides after decomposition, when a softmax is visibly a small reduction to
# save and an exponential to repeat. It supports tensor subclasses, and traces one joint graph even if the
# backward has to run with other strides than expected. A second derivative through a compiled region is an error there.
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
# - L. Ford, D. Fulkerson, *Maximal Flow through a Network* (1956), on cuts and flows; Y. Dinitz (1970), whose algorithm
#   [`maximum_flow`](ref:minicompile.ch05_autograd.maxflow.maximum_flow) is.
# - H. He, S. Yu, *Transcending Runtime-Memory Tradeoffs in Checkpointing by being Fusion Aware* (MLSys
#   2023).
