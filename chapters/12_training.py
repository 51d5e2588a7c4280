# %% [markdown]
# # The training step, one graph
#
# *What does a training step do besides the model?* So far the compiled function was a model, or a part of one. The
# loop around it was left to Python: clear the gradients, call `backward()`, clip, call the optimizer, move the
# learning rate. Each of these lines runs operators, and some of them run more operators than the model does.
#
# This chapter compiles the loop's body as a whole. That asks for more than it seems. `backward()` is a machine in C++
# that finds its work by itself. `.grad` is an attribute that belongs to nobody in particular. An optimizer counts, in
# tensors, and decides with the count. All three have to be understood before they can be put into a graph.

# %%
import bisect
import inspect
import json
import linecache
import subprocess
import sys
from collections import Counter

import torch
import torch.nn.functional as F

import minicompile
from chapters import tiny
from chapters._lib import Block, Table, Walk, bars, best_time, drawing, head, size, tidy, watch, watching
from minicompile.ch01_graphs.graph import print_graph
from minicompile.ch05_autograd.joint import trace_joint
from minicompile.ch05_autograd.partition import size_in_bytes
from minicompile.ch06_decompositions.decompose import decompose
from minicompile.ch08_fusion.fuse import fuse
from minicompile.ch08_fusion.groups import FusionOptions
from minicompile.ch08_fusion.kernel import Kernel, KernelList
from minicompile.ch08_fusion.lists import levels
from minicompile.ch12_training.memory import recompute_in_backward

# %% [markdown]
# ## Line by line
#
# Here is a step as one finds it in training scripts. The model is two blocks of a small GPT, the loss is a simple one,
# and the optimizer is AdamW.


# %%
def made():
    """A model, its optimizer and its scheduler; the same numbers each time."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(), Block())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)


# %% [markdown]
# `forward` is the model or, later in this chapter, a compiled form of it.


# %%
def training(model, optimizer, scheduler, forward=None):
    forward = forward or model

    def step(x, y):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(forward(x), y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        return loss.detach(), norm

    return step


torch.manual_seed(0)
x, y = torch.randn(2, 4, 32, 64)

# %% [markdown]
# Which operators does each line run? A mode in the dispatcher sees every one of them ([chapter 1](chapter:01)), and the
# stack says which line of `step` is being executed. The count below is for the second step, when the optimizer has its
# state already.

# %% tags=["fold"]
from torch.utils._python_dispatch import TorchDispatchMode


class PerLine(TorchDispatchMode):
    """Counts operators by the line of `code` that is being executed."""

    def __init__(self, code):
        super().__init__()
        self.code, self.counts = code, Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        frame = sys._getframe(1)
        while frame and frame.f_code is not self.code:
            frame = frame.f_back
        if frame and op.namespace != "profiler":
            self.counts[frame.f_lineno] += 1
        return op(*args, **(kwargs or {}))


eager = training(*made())
eager(x, y)
with PerLine(eager.__code__) as per_line, torch.autograd.set_multithreading_enabled(False):
    eager(x, y)
lines = range(eager.__code__.co_firstlineno + 1, eager.__code__.co_firstlineno + 9)
rows = [(linecache.getline(eager.__code__.co_filename, n).strip(), per_line.counts[n]) for n in lines]
Table(["line", "operators in eager"], rows)

# %% [markdown]
# Now read the lines for what they do to the world, because that is what a compiler must keep.
#
# `zero_grad` runs nothing. It sets an attribute, `p.grad = None`, for each parameter. The autocast region makes a
# bfloat16 copy of each weight. `backward` runs more operators than forward, and it leaves one new tensor in the `.grad`
# of each parameter. `clip_grad_norm_` reads all gradients to find their common norm, and writes all of them. The
# optimizer reads the gradients, and writes the parameters and two *moments* for each, which are running averages of
# the gradient and of its square. It also adds one to a counter, a tensor with one element, for each parameter. And
# `scheduler.step()` computes a float and puts it into a dictionary.

# %% tags=["fold"]
drawing(
    {
        "zero": ("zero_grad", "p.grad = None", "plain"),
        "forward": ("forward", "reads parameters", "compute"),
        "backward": ("backward", "writes p.grad", "compute"),
        "clip": ("clip", "reads, writes p.grad", "compute"),
        "optimizer": ("optimizer", "writes p, moments", "compute"),
        "scheduler": ("scheduler", "a float", "plain"),
        "state": ("p, p.grad, moments", "state, kept by Python", "saved"),
    },
    [("zero", "forward"), ("forward", "backward"), ("backward", "clip"), ("clip", "optimizer"), ("optimizer", "scheduler"),
     ("optimizer", "state"), ("backward", "state")],
    "The lines of a step in order: zero_grad, forward, backward, clip, optimizer, scheduler. Backward and the optimizer write the state: "
    "parameters, their gradients and the moments.",
)

# %% [markdown]
# So a step is a function of a batch *and of a state*. The state lies in attributes and dictionaries of Python objects,
# and after the step it must lie there again, changed. Capture knows how to do this ([chapter 3](chapter:03)): it
# follows attributes, and the end of the compiled function carries out what the program changed. New are the engine,
# which changes attributes from C++, and the numbers.
#
# ## Several graphs
#
# What does a compiler do that has no answer to these? It breaks the graph. Here is what torch.compile reports, in its
# own terms, for the same step around a model of one layer. It is asked in a process of its own, because it replaces
# functions of PyTorch's optimizers when it is first used. (`explain` only captures; nothing is compiled there.)

# %%
REPORT = """
import json, logging
import torch, torch.nn.functional as F
logging.getLogger("torch._dynamo").setLevel(logging.CRITICAL)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
found = torch._dynamo.explain(training(model, optimizer, scheduler))(*torch.randn(2, 8, 64))
breaks = [(reason.reason.splitlines()[0], reason.user_stack[-1].name) for reason in found.break_reasons]
print(json.dumps([breaks, [[getattr(op, "__name__", str(op)) for op in graph] for graph in found.ops_per_graph]]))
"""

# %% [markdown]
# The text of `training` goes into this script, behind its imports. What comes back are the reasons of the breaks, and
# for each graph the calls in it:

# %%
source = REPORT.replace("logging.get", f"{inspect.getsource(training)}\nlogging.get", 1)
done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
breaks, graphs = json.loads(done.stdout.splitlines()[-1])
print(f"torch {torch.__version__.partition('+')[0]} breaks at:", *[words for words, _ in breaks], sep="\n    ")
Table(["graph", "calls", "the first ones"], [(n, len(ops), ", ".join(ops[:4])) for n, ops in enumerate(graphs, 1) if ops])

# %% [markdown]
# The model is a graph, and its backward pass is compiled with it, but as a half that the engine calls from outside of
# all graphs. Clipping is a graph, and so is the update. This is a working program, and it is what most people train
# with. Each border costs four things:
#
# - **Memory traffic.** Whatever crosses a border is written to memory on one side and read again on the other. The
#   table below counts this for one gradient.
# - **What neither side can see.** The weights were cast for the forward pass and change in the update. A buffer that
#   dies at the end of one graph cannot become the memory of a value in the next.
# - **The host.** Each graph has guards, which are checked at each call, and an entry, the code that leads from the
#   caller into it. Between forward and backward stand autograd's node and the engine. The optimizer, where it is not
#   compiled, is Python over hundreds of tensors.
# - **A recording each.** A CUDA graph ([chapter 11](chapter:11)) replays one graph. Between two of them everything has
#   to be where the other one will look for it.
#
# To see what the first point amounts to, follow one gradient of *n* float32 numbers, which is 4*n* bytes, through a
# step. Four parts of the step touch it: the matrix product in backward that computes it, the norm, the clipping, and
# the update of the parameter. Each time one of them reads or writes the gradient in memory, 4*n* bytes move:

# %%
parts = {
    "the product writes it": (4, 4, 4),
    "the norm reads it": (4, 4, 4),
    "clipping reads it": (4, 4, 4),
    "clipping writes it back, scaled": (4, 4, 0),
    "the update reads it": (4, 0, 0),
}
rows = [(part, *(f"{b}n" if b else "-" for b in moved)) for part, moved in parts.items()]
rows.append(("bytes in all", *(f"{sum(column)}n" for column in zip(*parts.values()))))
Table(["", "a graph each", "clipping and update in one kernel", "and nobody needs the gradient afterwards"], rows)

# %% [markdown]
# In the second column, the kernel that scales an element of the gradient still has it in a register when it updates the
# parameter, so the update reads nothing. It does write the scaled gradient. `clip_grad_norm_` changes `p.grad` in
# place, the program can look at `p.grad` after the step, and so the new numbers have to be there. Only if the step
# itself lets go of the gradient, by calling `zero_grad()` at its end and not at its beginning, can nobody see them. Then
# they are never written, which is the third column. (The norm stays a reading of its own in all three. Until the last
# element has been added to it, no element can be scaled.)
#
# And here is the same function as this chapter compiles it. `fullgraph=True` forbids breaks. The step is called twice:

# %%
minicompile.reset()
compiled, eager = minicompile.compile(training(*made()), fullgraph=True), training(*made())
with watching() as seen_step:
    losses = [(compiled(x, y)[0].item(), eager(x, y)[0].item()) for _ in range(2)]
print("loss, compiled and eager:", *[f"{ours:.4f} {theirs:.4f}" for ours, theirs in losses], sep="   ")
for graph, half in zip(seen_step.graphs, seen_step.halves):
    nodes, steps = sum(n.op != "placeholder" for n in graph.graph.nodes), half["schedule"].steps
    own = sum(isinstance(s, Kernel) for s in steps)
    print(f"one graph of {nodes} calls, which becomes {own} kernels and {len(steps) - own} library calls")

# %% [markdown]
# The second call ran what the first had compiled. This is less natural than it sounds, since the first step finds no
# gradients and no moments; how it comes about is told on the last page of this chapter.

# %% [markdown]
# ## The smallest form
#
# How far does one get with what we have? [tiny](chapter:tiny), the compiler in one file, has a recorder, and fakes that
# are tensors to autograd. Its joint graph asks the engine for gradients while the recorder is still there. A whole step
# needs only a little more: go on recording, and write down the update, too. Let the loss be a function of the
# parameters and the batch, and the update a function that computes a parameter's new value from the old one and its
# gradient:


# %%
def trace_step(loss_of, parameters, update, batch):
    """The graph of a step: the loss, then the gradients, then the new parameters."""
    with tiny.Recorder() as recorder, torch.autograd.set_multithreading_enabled(False):
        fakes = [recorder.input(t) for t in (*parameters, *batch)]
        loss = loss_of(*fakes)
        gradients = torch.autograd.grad(loss, fakes[: len(parameters)])  # the engine runs, on fakes
        with torch.no_grad():
            new = [update(p, g) for p, g in zip(fakes, gradients)]
    return tiny.finish(recorder, [loss, *gradients, *new])


# %% [markdown]
# To run it, interpret the graph, and put what it returns where the program expects it:


# %%
class NaiveStep:
    def __init__(self, loss_of, parameters, update):
        self.loss_of, self.parameters, self.update, self.graph = loss_of, parameters, update, None

    def __call__(self, *batch):
        self.graph = self.graph or trace_step(self.loss_of, self.parameters, self.update, batch)
        with torch.no_grad():
            loss, *rest = tiny.interpret(self.graph, [*self.parameters, *batch])
            for p, gradient, new in zip(self.parameters, rest, rest[len(self.parameters) :]):
                p.grad = gradient
                p.copy_(new)
        return loss


# %% [markdown]
# Try it on a layer and gradient descent. The graph has no border anywhere: `tanh_backward` stands behind the loss,
# and the update behind it. The nodes called `detach` are autograd's: it keeps a tensor under a name without a
# history, and nothing is computed there.


# %%
def loss_of(w, x, y):
    return F.mse_loss(torch.tanh(x @ w), y)


def descent(p, g):
    return p - 0.1 * g


torch.manual_seed(0)
rows, targets = torch.randn(8, 4), torch.randn(8, 3)
w = torch.nn.Parameter(torch.randn(4, 3))
print(trace_step(loss_of, [w], descent, (rows, targets)))

# %% [markdown]
# Does it train? A copy of `w` makes three steps in eager, and `w` makes them through the graph:

# %%
naive = NaiveStep(loss_of, [w], descent)
twin = w.detach().clone().requires_grad_()
for _ in range(3):
    twin.grad = None
    loss_of(twin, rows, targets).backward()
    twin.data -= 0.1 * twin.grad
    naive(rows, targets)
print("three steps agree with eager:", torch.allclose(w, twin))

# %% [markdown]
# This is a page of code, it makes one graph, and the numbers are right. What is wrong with it? Four ordinary programs
# show it.
#
# **The program adds up gradients.** With a batch that does not fit into memory one calls `backward()` for each part of
# it, and updates afterwards. The naive version *assigns* each time:

# %%
w = torch.nn.Parameter(torch.randn(4, 3))
only_backward = NaiveStep(loss_of, [w], lambda p, g: p)
only_backward(rows[:4], targets[:4])
only_backward(rows[4:], targets[4:])
found, w.grad = w.grad, None
loss_of(w, rows[:4], targets[:4]).backward()
loss_of(w, rows[4:], targets[4:]).backward()
print(f"norm of the gradient: naive {found.norm():.3f}, eager {w.grad.norm():.3f}")

# %% [markdown]
# No error is raised, and the training learns from half of the data.
#
# **Two parameters have equal gradients.** The derivative of `a + b` gives what it gets to both, as one tensor. The
# naive version puts this tensor into two `.grad`s, and then the program scales each of them:

# %%
a, b = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))


def sum_of_two(a, b, y):
    return F.mse_loss(a + b, y, reduction="sum")


for name in ("naive", "eager"):
    a.grad = b.grad = None
    if name == "naive":
        NaiveStep(sum_of_two, [a, b], lambda p, g: p)(torch.ones(2))
    else:
        sum_of_two(a, b, torch.ones(2)).backward()
    for p in (a, b):
        p.grad.mul_(0.5)
    print(f"{name}: {a.grad.tolist()}, one memory: {a.grad.data_ptr() == b.grad.data_ptr()}")

# %% [markdown]
# **The optimizer counts.** Adam divides by `1 - beta ** t`, where `t` is the number of the step. While the trace runs
# `t` is 1, and in the graph it stays 1:

# %%
counted = [0]


def decaying(p, g):
    counted[0] += 1
    return p - 0.1 * g / (1 - 0.9 ** counted[0])


w = torch.nn.Parameter(torch.ones(4, 3))
naive = NaiveStep(loss_of, [w], decaying)
for _ in range(3):
    naive(rows, targets)
divisors = [n.args[1] for n in naive.graph.nodes if "div" in n.name]
print("steps taken: 3, the count says:", counted[0], " divisor in the graph:", divisors[-1])

# %% [markdown]
# **The program looks at the loss again.** In eager the loss that comes back has a history that is used up, and a second
# `backward()` says so. The naive loss claims that it never had one:

# %%
eager_loss = loss_of(w, rows, targets)
eager_loss.backward()
for name, value in (("eager", eager_loss), ("naive", naive(rows, targets))):
    try:
        value.backward()
    except RuntimeError as error:
        print(f"{name}: {str(error).partition('.')[0]}")

# %% [markdown]
# There is a fifth fault. The naive version was *given* everything: the loss as a function of the parameters, a list of
# the parameters, and an update without a write. A program hands over none of these, since it has objects. The rest of
# the chapter answers these points in turn.

# %% [markdown] tags=["page"]
# ## The engine inside the trace
#
# Capture follows the program's bytecode and arrives at `loss.backward()`. It could follow no further, since the method
# is C++. But look at what the engine *computes*. Given some outputs and some leaves, it returns one tensor for each
# leaf. That is an ordinary function, so it can be an ordinary node of the captured graph. Here is a program of four
# nodes:


# %%
def four(x, w):
    loss = torch.tanh(x * w).sum()
    loss.backward()
    return loss


w = torch.randn(3, requires_grad=True)
seen = watch(four, torch.randn(3), w)
captured = seen.graphs[0]
print(print_graph(captured))

# %% [markdown]
# The fourth call is `gradients`. Its arguments are the outputs, the leaves, the gradients that flow into the outputs
# (none are given, so 1 is meant), and two flags: whether the graph is to be kept for another backward pass, and whether
# the results are to be kept as `.grad`s. It returns a tuple, of which `getitem` takes the only gradient. The graph
# returns this gradient for `w.grad`, and the loss. The loss goes through `detach`, because its history is used up by
# now; what it leaves with instead is the subject of a later section. The function behind the node is short, and it is
# the one that runs with `backend="eager"`:
#
# %show minicompile.ch12_training.engine.gradients "with backward_pass"
#
# (`backward_pass` marks what is recorded meanwhile; a later section needs the marks. `to_be_kept` is explained in a
# later section, too. `stops` are tensors beyond which this pass does not go, and `stopped_at` marks their nodes in
# autograd's graph while it runs. They are needed where a tensor has a hook, which is told further below.
# `without_hooks` keeps the hooks of the leaves from being called, since these calls are in the graph already.)
#
# Now the next stage. [Chapter 5](chapter:05) records a captured graph by running it once more on fakes, with a recorder
# below the dispatcher. It comes to this node like to any other, and calls it. The engine runs, *on fakes and under the
# recorder*. Each operator that a derivative formula calls is written down. What is left of the node is what it
# computes.
#
# ### By hand
#
# Do it for the four nodes. `x * w` reaches autograd, which notes a `MulBackward0`, since `w` requires a gradient, and
# saves `x` in it. The recorder notes `mul`. Then `tanh`: autograd notes `TanhBackward0` and saves the *result*, because
# the derivative of tanh is `1 - tanh²`. For `sum` it saves nothing but the shape. Now the engine starts with a gradient
# of 1, which it makes with `ones_like`. The formula of the sum expands it to three elements. The formula of tanh calls
# `tanh_backward` with it and the saved result. The formula of the product multiplies by the saved `x`. These are four
# more operators. Step through the real recording; each frame runs one node of the captured graph.

# %% tags=["fold"]
from minicompile.ch01_graphs.fake import FakeMode
from minicompile.ch01_graphs.graph import type_text
from minicompile.ch01_graphs.trace import Recorder

mode, recorder, values, frames = FakeMode(), Recorder(), {}, []
for node, real in zip(captured.graph.find_nodes(op="placeholder"), (torch.randn(3), w)):
    values[node] = mode.from_real(real)
    recorder.placeholder(node.name, values[node])


def line_of(node):
    operands = ", ".join(map(str, node.args))
    return f"{node.name} = {getattr(node.target, '_opname', getattr(node.target, '__name__', node.target))}({operands})"


for node in captured.graph.nodes:
    if node.op not in ("call_function", "call_method") or node.name in ("getitem", "detach"):
        continue
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.get)
    before = len(recorder.graph.nodes)
    with recorder:
        values[node] = (getattr(args[0], node.target)(*args[1:], **kwargs) if node.op == "call_method" else node.target(*args, **kwargs))
    written = list(recorder.graph.nodes)[before:]
    fake = values[node]
    note = f"Autograd notes {type(fake.grad_fn).__name__}." if isinstance(fake, torch.Tensor) else "The engine runs."
    shown = [(n.name, line_of(n).partition(" = ")[2], type_text(n.meta["val"])) for n in written]
    frames.append((f"The captured node {node.name}. {note}", Table(["written", "call", "what it is"], shown)))
Walk("Recording a graph that contains backward()", frames)

# %% [markdown]
# The fourth frame has one operator more than was said. `empty_like` is asked for its strides only; nobody reads the
# node, so it is dropped. We will come back to why the strides matter.
#
# What follows in the program, clipping and the update, is recorded behind it. In the end there is one straight list of
# operators. Functionalization, decompositions, fusion and the memory plan need no new idea, and this is the reason to
# do it here and not later. The whole step of the beginning, before anything is fused:

# %%
def step_graph(seen):
    """The captured graph of the last call, recorded: ATen operators."""
    graph = seen.graphs[-1]
    return trace_joint(graph, [n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")])


recorded = [n for n in step_graph(seen_step).gm.graph.nodes if n.op == "call_function"]


def asked_by(location):
    """The line of the step that an operator was recorded for; backward has the lines of forward."""
    if location.function != "step":
        return "inside of the model, forward and backward"
    return linecache.getline(location.filename, location.lineno).strip()


wheres = Counter(asked_by(n.meta["location"]) for n in recorded)
Table(["recorded for", "operators"], wheres.most_common())

# %% [markdown]
# ## Which leaves
#
# `loss.backward()` names no leaves. In eager they are found by walking: from the loss to the node that made it, from
# there to what its operands came from, until the walk ends. It ends in nodes of a special kind, `AccumulateGrad`, and
# each of these holds the tensor whose `.grad` is meant. Here is the graph that autograd made for a small network with a
# frozen parameter and an unused one:

# %%
torch.manual_seed(0)
up, bias, frozen, unused = (torch.nn.Parameter(torch.randn(3)) for _ in range(4))
frozen.requires_grad_(False)
loss = (torch.tanh(torch.randn(3) * up + bias) * frozen * up).sum()


def walk(node, found):
    """All nodes of an autograd graph, each once."""
    if node is not None and node not in found:
        found.append(node)
        for before, _ in node.next_functions:
            walk(before, found)
    return found


names = {id(up): "up", id(bias): "bias", id(frozen): "frozen", id(unused): "unused"}
nodes = walk(loss.grad_fn, [])
print("leaves:", [names[id(n.variable)] for n in nodes if type(n).__name__ == "AccumulateGrad"])

# %% tags=["fold"]
label = {n: f"n{k}" for k, n in enumerate(nodes)}


def kind_of(n):
    return type(n).__name__.replace("Backward0", "")


drawing(
    {label[n]: (kind_of(n), names[id(n.variable)] if hasattr(n, "variable") else "", "saved" if hasattr(n, "variable") else "compute")
     for n in nodes},
    [(label[n], label[before]) for n in nodes for before, _ in n.next_functions if before is not None],
    "The autograd graph: from the sum through two products, tanh and an addition to two AccumulateGrad nodes. up is reached over two ways, "
    "bias over one, frozen and unused not at all.",
    width=130,
)

# %% [markdown]
# `up` is used twice and is one leaf, because all edges to it lead to one node. `frozen` has no node. `unused` is not in
# the graph of this loss, so its `.grad` stays `None`, and an optimizer will skip it. A compiler that took
# `model.parameters()` for the leaves would give `unused` a gradient of zeros, and then weight decay would shrink a
# parameter that eager leaves alone.
#
# The trace can do the same walk, with `history_of`, which gives each node behind some fakes once. Its fakes are
# tensors to autograd, so they have such a graph, and each `AccumulateGrad` in it holds a fake. The trace has a table,
# `of_fake`, in which it finds its own value for that fake. The value knows its node in the captured graph, and
# by which path the program reaches the tensor. This is the [function that does
# it](ref:minicompile.ch12_training.engine.leaves_of). It is one of this chapter's
# [exercises](exercise:find-leaves).
#
# One end of the walk is not ours. If a tensor was computed *before* the compiled function was called, its history
# lies outside, and the gradient would have to go on there. The history of the fake of such an input ends in
# a node of its own kind, `EnterBackward`, and the graph breaks with that reason:


# %%
def from_outside(h, w):
    (h * w).sum().backward()


report = minicompile.explain(from_outside, backend="eager")(w * 2, w)
print(report.breaks[0].reason)

# %% [markdown]
# A parameter may have *hooks*, which are Python functions that the engine calls when it has a gradient for it.
# Capture interprets them as it interprets any call, leaf by leaf, in the engine's order. A hook on an activation is
# called in the middle of a backward pass, and what it returns flows on. There the pass is divided: one `gradients`
# node goes from the loss to this tensor, the hook is interpreted, and another node [goes on from
# there](code:minicompile/ch12_training/hooks.py). The tensor is one of the `stops` of the first node.
#
# `torch.autograd.grad` becomes a `gradients` node as well. With `create_graph=True` the gradients that it returns can
# be differentiated themselves, as a gradient penalty needs it. For the recorder this is nothing special. The engine
# notes what it does, on fakes, and the next `gradients` node walks through that. `backward(create_graph=True)` leaves such
# gradients in `.grad`.
#
# ## Who owns `.grad`
#
# The engine's results have to arrive in `p.grad`. The naive version assigned them when the step was over, and it was
# wrong twice. What are the rules?
#
# 1. If `p.grad` is `None`, the gradient is assigned. It has to be a tensor that nobody else has, and its strides are
#    those of the parameter.
# 2. If there is a gradient, the new one is *added to it in place*. Whoever holds the old tensor sees the sum. (With
#    `create_graph=True` the sum is a new tensor, since what has a history is not overwritten.)
#
# If the trace notes each change of `.grad`, it knows at each moment whether it is `None`. So `.grad` is a *slot* of
# the trace: for each leaf, what its gradient is now. At first that is what the real attribute holds, under a guard.
# `zero_grad`, `p.grad = None`, `del p.grad` and `backward()` change the slot, and reading `p.grad` reads it. Rule 2
# is then one node, `add_`, in the graph. Here are two *micro-steps* after a `zero_grad`. A micro-step is forward and
# backward for one part of a batch, whose gradients are added to those of the other parts:


# %%
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(4, 3))

    def forward(self, rows, targets):
        return loss_of(self.w, rows, targets)


def micro_steps(layer, rows, targets):
    layer.zero_grad()
    for part, target in zip(rows.split(4), targets.split(4)):
        layer(part, target).backward()
    return layer.w.grad.norm()


# %% [markdown]
# Of its graph we print only the lines about gradients. Then the program runs once more in eager, with an empty slot, to
# compare the sums:

# %%
layer = Layer()
seen = watch(micro_steps, layer, rows, targets)
print("\n".join(line.partition("  #")[0] for line in print_graph(seen.graphs[0]).splitlines() if "gradients" in line or "add_" in line))
mine, layer.w.grad = layer.w.grad, None
micro_steps(layer, rows, targets)
print("as eager:", torch.allclose(mine, layer.w.grad))

# %% [markdown]
# The first `gradients` fills an empty slot, and nothing is emitted for it. The second finds a tensor, and `add_` is
# emitted. If the loop ran on for ten parts there would be nine `add_`s, and functionalization makes of them a sum that
# can be fused. With `zero_grad(set_to_none=False)` no slot is emptied. The old tensor stays in it and is filled with
# zeros, which is a node, `zero_`, and then already the first gradient is added to it. What the slots hold at the end is
# assigned by the code behind the graph, the *epilogue*, and only where it is another tensor than before:

# %%
print(tidy(seen.captured[0].body))

# %% [markdown]
# A gradient that was there when the function was called, and was only added to, is not in these lines. It is an input
# of the graph, and the graph writes it.


# %%
def keeps_on(layer, rows, targets):
    layer(rows, targets).backward()


kept = layer.w.grad
seen = watch(keeps_on, layer, rows, targets)
print("the epilogue assigns:", "grad" in seen.captured[0].body, " the same tensor:", layer.w.grad is kept)

# %% [markdown]
# ### A tensor of its own
#
# Rule 1 has two conditions, and both were broken by the naive version. When the engine accumulates it takes care of
# them, in C++: if somebody else still holds the gradient, it copies. We asked the engine only to compute, so we look
# ourselves. Inside a recording it is clear who shares what: two fakes are aliases if their storages are one. In the
# listing, `form` is a tensor with the strides that the gradient has to have. These are the strides of the leaf if it
# is dense, which means without gaps or overlaps in memory, and those of a contiguous tensor otherwise. If the tensor
# has no elements there is nothing to copy, and `form` itself is the gradient.
#
# %show minicompile.ch12_training.engine.to_be_kept
#
# The second condition, the strides, is visible with a transposed weight. The formula of the product returns the
# gradient transposed, as a view. Eager's engine would copy it into the parameter's strides, and so do we, in the graph,
# where the copy is part of the kernel or the library call that makes the gradient:


# %%
def transposed(layer, rows):
    (layer.w.t() * rows[:3]).sum().backward()


layer.w.grad = None
strides = {}
(computed,) = torch.autograd.grad((layer.w.t() * rows[:3]).sum(), layer.w)
strides["as computed"] = computed.stride()
transposed(layer, rows)
strides["eager"], layer.w.grad = layer.w.grad.stride(), None
minicompile.compile(transposed, fullgraph=True)(layer, rows)
strides["compiled"] = layer.w.grad.stride()
print(strides)

# %% [markdown]
# Why does it matter? The next gradient is added to this one, the optimizer makes its moments like it, and a compiled
# optimizer has a guard on its strides.
#
# ### A gradient that nobody will read
#
# Our step begins with `zero_grad`. In eager this frees the old gradients before forward makes its activations, and a
# step never needs memory for two sets of gradients. In a compiled function, effects happen at the end. So the old
# gradients would live until the new ones are there, and for a large model that is a lot: as much as the model.
#
# The trace knows better. If the slot of a leaf has changed, and no node of the graph reads the old tensor, then the
# only thing that keeps it alive is the attribute. So the attribute is emptied *before* the graph runs, and the old
# gradient is no input of the graph. These lines stand in front of the call of the graph:

# %%
head(seen_step.captured[-1].before, 3)

# %% [markdown]
# `__F` is the function that was compiled, and one of its cells holds the optimizer. The step begins with
# `optimizer.zero_grad()`, so the trace has met each parameter first in the optimizer's list, and that is the path by
# which the line reaches it; the model, where it also lies, was not looked at yet.
#
# It has to be done with care: only where the program itself replaced the gradient, and only if nothing reads it. To
# return it counts as reading. A program that prints the norm of the old gradient first keeps the gradient until it
# has printed. To decide this is [another exercise](exercise:forget-gradients). A backend that looks around while the
# graph runs shows the effect:


# %%
def spying(gm, inputs):
    def run(*args):
        alive.append(layer.w.grad is not None)
        return gm(*args)

    return run


# %% [markdown]
# Two programs are compiled with it. The first replaces the gradient unseen, the second reads it before:


# %%
def cleared(layer, rows, targets):
    layer.zero_grad()
    layer(rows, targets).backward()


def looks_first(layer, rows, targets):
    old = layer.w.grad.norm()
    layer.zero_grad()
    layer(rows, targets).backward()
    return old


for function in (cleared, looks_first):
    alive, layer.w.grad = [], torch.ones(4, 3)
    minicompile.reset()
    minicompile.compile(function, backend=spying, fullgraph=True)(layer, rows, targets)
    print(f"{function.__name__}: the old gradient is there while the graph runs: {alive[0]}")

# %% [markdown]
# ## A history that is used up
#
# `backward()` frees what forward has saved. In eager a second call raises an error, which has saved many people from a
# wrong training loop. In the compiled function nothing was saved that could be freed, the loss comes back as a plain
# result. It must not look like a constant, though, and must not be differentiable either.
#
# So the trace notes which nodes of the autograd graph have lost what they had saved. When a tensor leaves the
# function, its own history is compared with these. If it contains one, the tensor leaves with a node whose derivative
# is the error. (`anchor` is an empty tensor that requires a gradient. Without it no operand would, and autograd would
# not note the node.)
#
# %show minicompile.ch12_training.slots.Spent


# %%
def returns_three(layer, rows, targets):
    hidden = rows @ layer.w
    loss = F.mse_loss(torch.tanh(hidden), targets)
    loss.backward()
    return loss, hidden, layer.w.sum()


def differentiated(value):
    try:
        value.sum().backward()
    except RuntimeError as error:
        return str(error).partition(" (")[0]
    return "can be differentiated"


# %% [markdown]
# The function has used its loss for `backward()` already. Which of its three results can be differentiated afterwards, in
# eager and compiled?

# %%
programs = returns_three, minicompile.compile(returns_three, fullgraph=True)
answers = [[differentiated(value) for value in program(layer, rows, targets)] for program in programs]
Table(["output", "eager", "compiled"], list(zip(("loss", "hidden", "w.sum()"), *answers)))

# %% [markdown]
# The second row is the interesting one. `hidden` is no loss, and its history is one product. But that product's node
# had saved `rows`, and the backward pass through the loss has freed it. The third output shares only the leaf, which
# saves nothing, and can still be differentiated. ([Say for eight programs](exercise:predict-spent) which outputs raise.)

# %% [markdown]
# ## What lives until backward
#
# Forward computes values that backward reads. Until backward has read them, they take up memory, and in training they
# take up most of it.
#
# A compiled model has two graphs, and whatever backward reads has to be carried from the first to the second.
# [Chapter 5](chapter:05) chooses what is carried, with a minimum cut. What is cheap to compute is not carried, and the
# backward graph computes it again.
#
# A step that is one graph carries nothing from one graph to another. Backward is simply the later part, and a value
# lives until its last reader has run. At first this sounds as if there were nothing left to choose. But who are these
# readers? The engine has recorded the derivative formulas as PyTorch wrote them, and a formula reads what eager has
# saved for it. The formula of the GELU, for example, reads the GELU's input. So this large tensor stays in memory from
# forward to backward, although a kernel could compute it again in registers. Without a choice, a compiled step would
# need *more* memory than a compiled model with an eager optimizer beside it. And if the program put a part of the model
# under a *checkpoint*, which means "do not keep this, compute it again", it would be kept all the same.
#
# So the choice of chapter 5 is made here as well, by the [same
# function](ref:minicompile.ch05_autograd.partition.choose_saved). It needs to know which nodes belong to backward.
# The recorder marks every node that is written down while a `gradients` node runs. The marked nodes are one side of
# the cut, and the nodes in front of the first of them are the other. Clipping and the update stand behind backward
# and belong to neither side. The answer is a set of values that are worth their memory. Chapter 5 then cuts the graph
# in two. Here it stays in one piece. For each value that is *not* in the set, the nodes that compute it are copied to
# the place right before its first reader in backward, and the readers in backward use the copy. The original then
# dies in forward:

# %%
def wide(x, w, v):
    (F.gelu(x @ w) @ v).sum().backward()


def carried(gm):
    """What is computed before the first marked node and read behind it: name -> bytes."""
    nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
    begin = next(i for i, n in enumerate(nodes) if "backward" in n.meta)
    return {n.name: size(size_in_bytes(n)) for n in nodes[:begin] if set(n.users) & set(nodes[begin:])}


factors = torch.randn(64, 16), torch.randn(16, 256, requires_grad=True), torch.randn(256, 16, requires_grad=True)
primitives = decompose(step_graph(watch(wide, *factors)).gm)
print("as recorded:", carried(primitives))
print("after it:   ", carried(recompute_in_backward(primitives)))

# %% [markdown]
# The lines list what is computed in forward and read in backward. As recorded, three values of equal size live that
# long: the result of the first matrix product, a part of the GELU that its derivative needs again (`add_tensor`), and
# the GELU's result (`mul_tensor_2`), which the gradient of `v` multiplies. After the choice only the product is left.
# It is dear to compute, and the two others follow from it by a few cheap operators. These operators now occur twice
# in the graph, but the copies do not become a kernel of their own. Backward has a kernel for the GELU's derivative,
# which reads the product anyway, and fusion takes the copies into it. The copy of the GELU's result is an operand of
# a matrix product, so it has to be written to memory once more. But it is alive only until that product has run, and
# not from forward on.

# %% [markdown] tags=["page"]
# ## Optimizers are programs
#
# `optimizer.step()` is Python: loops over parameter groups, a dictionary from each parameter to its state, a choice
# among three implementations. Interpreting Python is what capture does, so in principle there is nothing to add. PyTorch
# does keep these functions from its own compiler, though, with decorators that break graphs. What they do besides is a
# few lines, and they are written out and interpreted in their place:
#
# %show minicompile.ch12_training.optimizers.in_grad_mode
#
# One thing is not ordinary Python. At the top of each optimizer's arithmetic stands a number that comes out of a
# tensor.
#
# ### Counters are numbers of the host
#
# Adam corrects its moments, which begin at zero, by dividing by `1 - beta ** t`. The count `t` is a tensor with one
# element, so that it is saved with the rest of the state, and PyTorch reads it with `.item()`. What should the trace
# answer? There are three candidates.
#
# **The number that is there now.** That was the naive version. The graph is right for one step.
#
# **A break,** as for every other `.item()` ([chapter 4](chapter:04)). The break is in the middle of the optimizer, once
# for each parameter. On a GPU it would be worse if the counter were there: `.item()` waits until the device has computed
# everything, so the host could never run ahead.
#
# **An operation on the device.** The counter stays a tensor, and the graph computes `beta ** t` with tensors. PyTorch
# has this form (`capturable=True`), it needs no answer from us, and it is not what the program asked for: eager
# computes in Python floats, which are float64, and the tensor is float32. How much is that?

# %%
found = []
for t in (1, 10, 100, 1000, 10000):
    exact = 1 - 0.999**t
    on_device = float(1 - torch.tensor(0.999) ** torch.tensor(float(t)))
    found.append((t, f"{exact:.10f}", f"{on_device:.10f}", f"{abs(on_device - exact) / exact:.1e}"))
Table(["step", "1 - 0.999 ** t in float64", "in float32", "relative difference"], found)

# %% [markdown]
# The first steps differ in the fifth digit: 0.999 is rounded, and then almost everything cancels. That is two hundred
# times the rounding of float32. A compiler may round differently from eager, but not by that much, if it can help it.
#
# It can. The counter of an ordinary optimizer lies on the *CPU*. Its number can be read when the compiled function is
# called, before anything runs, and without waiting for anybody. So it becomes an input of the graph like a size or a
# learning rate: a symbol ([chapter 1](chapter:01)). What the optimizer computes with it is an expression, and the
# host program evaluates it in float64, once, before the kernels:

# %%
program_text = seen_step.halves[-1]["compiled"].source
print("\n".join(line.strip() for line in program_text.splitlines() if "bits_of_float" in line))

# %% [markdown]
# These are all the numbers of AdamW. `f0` is the learning rate, `f1` the count. They are handed to kernels as
# arguments. A kernel takes addresses and integers of 64 bits, so `bits_of_float` makes of each number the integer
# with the same bits. The next step has other numbers, and nothing is compiled.
#
# The program adds one to the counter *before* it asks. The trace has seen this: as long as numbers were only added to a
# tensor that came in, or multiplied by it, the host can do the same to the number that came in. That is the `+ 1.0` above.
# The counter is a float32 tensor, and from 2^24 on its sum is rounded (2^24 + 1 is 2^24), so `__float32` rounds the number as well.
# NAdam keeps a product of decaying factors in such a tensor. There each step is rounded, and the number is the tensor's to the last bit.
#
# ### A hundred counters, one number
#
# The optimizer keeps a counter for *each* parameter. In a model of a hundred parameters there are a hundred tensors with
# one element each, and after seven steps all of them hold a 7. If the trace gave each counter a symbol of its own, there
# would be a hundred guards for their range, the host would compute `1 - 0.999 ** t` a hundred times with the same result,
# and the updates of two parameters would differ in the number that they divide by.
#
# So the trace looks at what the counters hold *now*. The first one whose number is asked for gets a symbol. When
# another counter is asked that holds the same number, it gets the same symbol. This assumes that the two will be
# equal at later calls as well, and what a trace assumes has to be checked at each call. So the counters that share a
# symbol become one guard, "all of these are equal". ([The function](exercise:equal-counters) is short.)
#
# The step above has twenty parameters. This is what guards their counters:

# %%
for g in seen_step.captured[-1].guards:
    if g.kind == "COUNTERS":
        count = 1 + len(g.expected)
        print(f"{count} tensors: one number, in {count} places of memory")

# %% [markdown]
# It is one guard, and one call asks all twenty ([`counters_agree`](ref:minicompile.ch02_guards.memory.counters_agree)).
# It asks two things. First, whether their numbers are equal. When does that fail? Suppose that the program adds a parameter to
# the optimizer later, or loads a checkpoint in which some counters are behind. Then there are two different numbers, the
# guard fails, and the step is compiled once more, with two symbols.
#
# Second, whether the addresses differ: twenty counters, twenty places in memory. Sharing a symbol is sharing a
# *number*, but each counter is also a tensor to which the step adds one. If two parameters shared one counter *tensor*,
# eager would count it up twice in each step, and this graph, which was made for twenty tensors, would not.
#
# Only PyTorch's own code is answered with a symbol. Where *your* program asks for `.item()`, the graph breaks as ever.
# A program that takes a number out of a tensor often decides something with it, and a decision on a symbol is a guard
# that fails at the next step.
#
# ### The first step
#
# The first step of a training is not like the second. Before it no parameter has a gradient, and `zero_grad` asks each
# of them. The optimizer has no state, and makes it (`if len(state) == 0`). The scheduler is at its first count. Each of
# these answers is a guard that fails in the second call. The trace would have to be made again, and with it everything
# that follows from it, forward and backward included: a compilation as long as the first.
#
# For each of them there is a way not to ask.
#
# - What `zero_grad` leaves does not depend on what it finds. The trace assigns `None` to each slot without looking.
# - The state that an optimizer begins with does not depend on the step. When the trace comes to the method that makes
#   it, the method is called for real, and the trace finds the moments as later calls will. This happens only if the
#   program has not looked at the state before, and what was made is removed again if the step does not happen,
#   because the compilation fails or the call raises an exception. The momentum of SGD is the gradient itself in the
#   first step, and `momentum * buffer + gradient` later. If the buffer is made of `-0.0`, the second formula gives
#   the gradient, too, to the last bit: a positive momentum times `-0.0` is `-0.0`, and to add it changes no number.
#   (To add `0.0` would change one: it makes `0.0` of `-0.0`.)
# - The learning rate will vary, so it is a symbol from the beginning. (Weight decay and betas seldom do. They are guarded by
#   their values until one changes, which makes a second version, with a symbol.)
# - `scheduler.step()` is mostly the last thing that a step does. Then it need not be interpreted, since nothing is left
#   that could notice it. The end of the compiled function calls it.
#
# Here are five calls of the step of the beginning. Beside it stands a step that looks for itself, in the same words as
# `zero_grad`:


# %%
def asking(model, optimizer, scheduler):
    def step(x, y):
        for p in model.parameters():
            if p.grad is not None:
                p.grad = None
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    return step


# %% [markdown]
# For each call: was something compiled, and if so, because of which guard?

# %%
found = []
for program in (training, asking):
    minicompile.reset()
    compiled = minicompile.compile(program(*made()), fullgraph=True, backend="eager")
    for call in range(1, 6):
        with watching() as seen:
            compiled(x, y)
        why = sorted({r["why"].partition(":")[0].partition("  #")[0] for r in seen.recompiles}, key=len)
        found.append((program.__name__, call, "yes" if seen.graphs else "no", why[-1] if why and seen.graphs else ""))
Table(["step", "call", "compiled", "the guard that failed"], found)

# %% [markdown]
# The words are the same, but a program of yours may do anything with the answer. That it will do the same in both cases is
# known of `zero_grad` only because its text is known. To tell which calls of a program compile is the subject of
# [an exercise](exercise:predict-steps).
#
# ## Autocast's memory
#
# In an autocast region a product casts its operands to bfloat16. A weight that is used twice would be cast twice, so
# autocast keeps a *cache*: within the region, the copy of a parameter is made once. It looks like a detail of speed. It
# decides about numbers. Consider the backward pass of a weight that two products use:
#
# - With one copy, both gradients arrive at the copy, in bfloat16. They are added there, *in bfloat16*, and the sum is
#   cast to float32.
# - With two copies each gradient is cast to float32, and they are added in float32.
#
# The second is more precise by one rounding. But it is not what eager computes. A compiler that records the region on
# fakes gets it right if its fakes are parameters to autocast: leaves that require a gradient, and no views. Then
# PyTorch's own cache does its work during the recording, and one cast is written. The first line that is printed
# below counts the casts of the weight in the recorded graph. This number alone proves nothing. Without the cache it
# is 1 as well, since equal nodes are merged after recording ([chapter 5](chapter:05)), and two casts of one weight
# are equal. What merging cannot make equal is backward, where the gradients are added before their cast with the
# cache, and after it without. So the proof is in the other two lines: the compiled step has eager's gradient, and
# eager without its cache has another one.


# %%
class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        return torch.relu(x @ self.w) @ self.w


def tied_step(model, x, cache=True):
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
        out = model(x)
    out.float().square().sum().backward()


# %%
torch.manual_seed(0)
tied, numbers = Tied(), torch.randn(32, 16)
seen = watch(tied_step, tied, numbers)
(weight,) = [n for n in step_graph(seen).gm.graph.find_nodes(op="placeholder") if n.meta["val"].requires_grad]
print("casts of the weight in the recording:", sum("_to_copy" in str(user.target) for user in weight.users))
ours = tied.w.grad
tied_step(tied, numbers)
cached = tied.w.grad
tied_step(tied, numbers, cache=False)
scale = cached.abs().max()
print(f"relative difference from eager: {(ours - cached).abs().max() / scale:.1e}")
print(f"eager without the cache, from eager: {(tied.w.grad - cached).abs().max() / scale:.1e}")

# %% [markdown]
# ## A list of tensors as one loop
#
# Twenty parameters are updated, all in the same way. Fusion ([chapter 8](chapter:08)) joins loops that share memory, and
# these share none. So the update would be twenty kernels, many of them over 64 or 256 elements. A launch on a GPU costs as
# much time as moving several megabytes; these move a kilobyte. (Three or fewer stay what they are.)
#
# What they have in common is their code. So launch the code once, for all of them. The work is divided into blocks, as
# always, and a *table* says at which block each tensor begins. A block looks up to which tensor it belongs, and where in it
# it has to work. By hand, for tensors of 5, 2 and 3 elements, in blocks of 2:

# %%
sizes, length, first = [5, 2, 3], 2, [0]
for n in sizes:
    first.append(first[-1] + -(-n // length))
print("the table:", dict(enumerate(first[:-1])))
for block in range(first[-1]):
    tensor = bisect.bisect_right(first, block) - 1
    begin = (block - first[tensor]) * length
    print(f"block {block}: tensor {tensor}, elements {begin} to {min(begin + length, sizes[tensor]) - 1}")

# %% [markdown]
# The code does not grow with the list, only the table does. This matters for the time of compilation as well: for a
# compiler that knows sizes, tensors of ten sizes are ten kernels, and here they are one, with the size as a parameter.
#
# Two things have to be true. First, the loops are *equal up to numbers*: the same operations, with other buffers, sizes,
# strides and offsets. Second, they *need nothing from each other*, since nobody says in which order blocks run. The
# second condition is less innocent than it looks. When gradients are accumulated, the same addition occurs once for each
# parameter *and once for each part of the batch*, and of these only the ones of one part may run side by side. So each
# loop of a kind gets a *level*: how many loops of its kind lie on the longest way that leads to it. Whoever needs
# another one has a larger level. Loops of one level are independent, and become one launch:

# %%
needs = {"a += 1st": set(), "b += 1st": set(), "a += 2nd": {"a += 1st"}, "b += 2nd": {"b += 1st"}}
found = levels(needs, set(needs))
print({name: found[name] for name in needs})

# %% [markdown]
# Lists are found at the end of fusion, among finished kernels, wherever these come from: `_foreach_` operators, a loop in
# the program, the layers of a model. Here is our step with and without them, and the lists that it
# has:

# %%
program = seen_step.halves[-1]["program"]
for lists in (False, True):
    steps = fuse(program, FusionOptions(lists=lists)).steps
    print("with lists:" if lists else "without:   ", sum(isinstance(s, Kernel) for s in steps), "kernels")
lists = [s for s in steps if isinstance(s, KernelList)]
Table(["list", "pieces", "kinds of code"], [(s.name, len(s.pieces), len(s.bodies)) for s in lists])

# %% [markdown]
# With lists it is the number of kernels from the beginning of the chapter. Each row is one launch, and a *piece* is
# what one tensor, or one group of them, needs. The first list has 32 pieces of two kinds: the casts of twelve weights
# and biases to bfloat16, and the twenty counters. In the last one a piece is what AdamW does to one parameter, so
# there are twenty. On a CPU a list may hold loops of several kinds, since its blocks are shared among threads and a
# branch costs nothing there. What limits lists is memory. A list needs all that its pieces read at once, so what
# could have died early has to live on. A list that would raise the peak has only its short loops joined, or none.
#
# ## What one launch saves
#
# Back to the question of the beginning. Here is the step without autocast and scheduler, on this machine's CPU, three
# times: as it is, with only the model compiled, and as one graph. All three begin with the same numbers.


# %%
def plain_training(model, optimizer, forward):
    def step(x, y):
        optimizer.zero_grad(set_to_none=True)
        loss = F.mse_loss(forward(x), y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach(), norm

    return step


# %%
minicompile.reset()
contenders = {}
for name in ("eager", "model compiled", "step compiled"):
    model, optimizer, _ = made()
    forward = minicompile.compile(model) if name == "model compiled" else model
    contenders[name] = plain_training(model, optimizer, forward)
contenders["step compiled"] = minicompile.compile(contenders["step compiled"], fullgraph=True)
losses, halves = {}, {}
for name, f in contenders.items():
    with watching() as seen:
        losses[name] = [f(x, y)[0].item() for _ in range(20)]
    halves[name] = {half["which"]: half for half in seen.halves}
Table(["step", *losses], [(n, *(f"{losses[name][n]:.5f}" for name in losses)) for n in (0, 1, 5, 19)])

# %%
times = {name: min(best_time(f, x, y, repeat=40) for _ in range(2)) for name, f in contenders.items()}
bars(
    [(name, 1e3 * seconds, {"eager": "bad", "model compiled": "plain"}.get(name, "compute")) for name, seconds in times.items()],
    "ms",
    "Milliseconds per training step.",
    form="{:.2f}",
)

# %% [markdown]
# The model is small, so most of the time is not spent in it. What the host has to do in each of the three, counted in
# calls into PyTorch's dispatcher, and in kernels of our own:

# %% tags=["fold"]


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += 1
        return op(*args, **(kwargs or {}))


def counts(name):
    steps = [s for half in halves[name].values() for s in half["schedule"].steps]
    own = sum(isinstance(s, Kernel) for s in steps)
    return own, len(steps) - own


with Calls() as calls, torch.autograd.set_multithreading_enabled(False):
    contenders["eager"](x, y)
forward_only = made()[0]
with Calls() as of_model, torch.autograd.set_multithreading_enabled(False):
    forward_only(x).sum().backward()
outside = calls.count - of_model.count
Table(
    ["", "operators that eager runs", "kernels", "library calls"],
    [
        ("eager", calls.count, "", ""),
        ("model compiled", f"about {outside}", *counts("model compiled")),
        ("step compiled", 0, *counts("step compiled")),
    ],
)

# %% [markdown]
# Compiling the model removed its own operators. The optimizer's stayed. With the step as one graph nothing of eager is
# left: the host program calls kernels and libraries, and there is one set of guards in front of it. The updates of all
# twenty parameters are one launch, a list as in the section before. On a GPU the same graph can be recorded as one CUDA
# graph, and [chapter 11](chapter:11) shows what this brings to a model that a slow host has to launch.
#
# A recording has no arguments, and a step has numbers that change: the learning rate, the corrections, the counters.
# So the program is taken apart first ([`take_apart`](ref:minicompile.ch11_runtime.numbers.take_apart)). The host's part
# computes the numbers, and counts up the counters. The device's part is what is recorded; it loads the numbers from a
# small tensor, which is filled before each replay.

# %% [markdown]
# ## What it costs to compile
#
# The first step waits for the compiler. It has one optimizer to look at, and yet this costs more than the model. Count
# what reaches the end of the pipeline:


# %%
def work(name):
    programs = [half["program"] for half in halves[name].values()]
    own = [s for half in halves[name].values() for s in half["schedule"].steps if isinstance(s, Kernel)]
    code = sum(len(s.bodies) if isinstance(s, KernelList) else 1 for s in own)
    return sum(len(p.nodes) for p in programs), len(own), code


Table(["", "loops and library calls", "launches", "pieces of code for g++"], [(name, *work(name)) for name in halves if halves[name]])

# %% [markdown]
# The right columns are what lists do for the compiler: the updates of all parameters add one launch and one piece of code, and
# so do their norms. The left column they do not change. In front of a list stand five loops for each parameter, and each of
# them has been an instruction of a Python loop that was interpreted, a node that was recorded, a node without writes, some primitives,
# and a member of a group. In a GPT with 148 parameters the model becomes 492 loops and calls, and the step 1,232. The compiler
# works half as long again for the step as for the model, and g++ equally long for both.
#
# Must a compiler do 148 times what it could do once? Where it asks the same *small* question again, it does not. A
# question is small if all that its answer depends on can be compared:
#
# - What does this operator give? That depends on operator, shapes, strides and dtypes
#   ([`fake_call`](ref:minicompile.ch01_graphs.recipes.fake_call)). An operator on lists is asked about a short list, which has
#   one item of each form ([`ask_by_form`](ref:minicompile.ch01_graphs.recipes.ask_by_form)).
# - Is this tensor still what it was? One function asks it of all parameters and moments that lie alike
#   ([`check_text`](ref:minicompile.ch02_guards.codegen.check_text)).
# - Which primitives is it made of? On the same, and on which operands share memory
#   ([`Pattern`](ref:minicompile.ch06_decompositions.decompose.Pattern)).
# - Which number has the counter? One guard says that all of a group are equal.
# - What is the code of the kernel? It depends on the operations, and not on their numbers
#   ([`shape_key`](ref:minicompile.ch08_fusion.lists.shape_key)): one text for each list.
#
# The other questions depend on who stands beside a loop. One gradient is the result of a library call, the next one
# is a sum whose loop could take the update in, a third belongs to a tied weight and has two writers; one parameter
# has a hook, and one has other strides. So what becomes one kernel may differ from parameter to parameter. To prove
# that two parameters are treated alike would take as long as to decide for each of them.
#
# One could also send a single parameter through the first half of the pipeline, as the representative of all 148.
# What this would bring can be tried out without building it. `AdamW(fused=True)` *is* one operator for all
# parameters, from capture to decomposition, and `foreach=True` is one for each line of the formula. In the GPT,
# capture then takes two thirds of the time with `fused`. But the whole takes about as long in all three forms, and
# before the formula was written down once for all parameters of equal form
# ([`each`](ref:minicompile.ch06_decompositions.rules.foreach_optimizers.each)), `fused` took longest. What is long
# comes behind, where each parameter has its loops. There it helps to have fewer of them, and to give each less to do.
# The new parameter is made of the old moments. So it is stored before these are overwritten, and no loop has to keep
# a copy of them ([`readers_first`](ref:minicompile.ch07_loops.lower.readers_first)). And the loop that stores it has
# computed the new moments on its way, so it stores them as well
# ([`shared_loop`](ref:minicompile.ch07_loops.lower.shared_loop)). Which memory a buffer is, the planner looks up in
# one table and not in each of its walks. And a function that the interpreted loop reads 148 times by the same name is
# looked up and guarded once ([`read_once`](ref:minicompile.ch03_capture.tracer.read_once)).
#
# ## What stays outside
#
# Some programs cannot be one graph, and it is better to know which. Each line below is the reason that `explain` gives.


# %%
def hook_that_stays(layer, rows, targets):
    hidden = rows @ layer.w
    hidden.register_hook(torch.sign)
    return F.mse_loss(hidden, targets)


def decides(layer, rows, targets):
    loss = layer(rows, targets)
    loss.backward()
    if loss.item() > 10:
        layer.zero_grad()


def second_time(layer, rows, targets):
    loss = layer(rows, targets)
    loss.backward()
    loss.backward()


# %% tags=["fold"]
found = []
for function in (hook_that_stays, decides, second_time):
    minicompile.reset()
    try:
        minicompile.compile(function, fullgraph=True, backend="eager")(layer, rows, targets)
        found.append((function.__name__, "it is one graph"))
    except minicompile.GraphBreakError as error:
        reason = str(error).splitlines()[0].partition(": ")[2].partition(" (")[0]
        found.append((function.__name__, reason.rstrip(".")))
Table(["program", "why the graph ends"], found)

# %% [markdown]
# ## What torch.compile does differently
#
# AOTAutograd makes a joint graph of forward and backward as chapter 5 does, and hands the halves to the engine as the
# two methods of a function. `loss.backward()` is then called by Python, outside of any graph. *Compiled autograd*
# captures what the engine does at run time, when it is called, hooks and accumulation included, and compiles this as a
# graph of its own; it needs no knowledge of the forward pass, so it also works across several forward graphs. A newer
# option, `trace_autograd_ops`, lets TorchDynamo trace `backward()` where the loss does not leave the function. Compiled
# optimizers are a graph of their own there, and fuse the updates of many parameters into few kernels (*horizontal
# fusion*; here [lists](code:minicompile/ch08_fusion/lists.py)). The counters and a learning rate that changes have to be
# tensors, or each change compiles again.
# tinygrad's `TinyJit` takes a whole step, of its own tensors, and replays what it saw at the second call. It has no
# guards: whoever changes the program between two calls gets the old one.
#
# ## Exercises
#
# <!-- exercises -->
#
# ## Further reading
#
# - A. Paszke and others, *Automatic differentiation in PyTorch* (2017), on the engine and its graph.
# - D. Kingma and J. Ba, *Adam: A Method for Stochastic Optimization* (2015), section 3, on the correction by the count.
# - P. Micikevicius and others, *Mixed Precision Training* (2018).
# - *Autograd mechanics* and *Compiled Autograd*, in PyTorch's documentation.
