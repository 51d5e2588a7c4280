# %% [markdown]
# # Graphs, and tensors without data
#
# *What does a function do to its tensors?* A compiler has to know it before any numbers are there. It needs the
# program written down as data, so that it can look at the program as a whole, move parts of it, and replace
# them. And for each intermediate tensor it needs everything except the contents: how large is it, how does it
# lie in memory, which type do its elements have, on which device is it?
#
# PyTorch has neither on its own. In eager PyTorch an operation is executed at once and forgotten. This chapter
# makes both: a *graph*, which is a list of the operations that ran, and the *fake tensor*, which has all
# properties of a tensor and no data. All later chapters use them.

# %%
import inspect
import tracemalloc
import types

import torch
import torch.nn.functional as F

from chapters import tiny
from chapters._lib import Table, Walk, best_time, draw_fx, drawing, example, head, lines, row_of_boxes, shortened, size, watch
from minicompile.ch01_graphs.graph import interpret, print_graph, type_text
from minicompile.ch01_graphs.trace import Recorder, trace

# %% [markdown]
# ## The problem
#
# Take `x + bias` in the middle of a model, and suppose that we are to write the loop that computes it. Should
# the bias be read once for each row, or once for each element? That depends on the two *shapes*. At which
# address is the next element of a row? That depends on the *strides*: the stride of a dimension says how many
# elements of memory lie between neighbours in this dimension. Is the sum of a float16 and a float32 tensor
# computed in 16 or in 32 bits? That depends on the *dtypes*. May the sum be written over `x`? Only if nobody
# else looks at the memory of `x`, for instance through a view of it.
#
# When eager PyTorch executes the line, it knows all this, because the tensors are there. We want to know it
# earlier.
#
# ## The naive version: run it
#
# The simplest idea is to run the program once with real tensors, and to note what comes by. That is correct.
# This is what it costs for one attention layer, written out:


# %%
def attention(q, k, v):
    weights = torch.softmax(q @ k.transpose(-1, -2) / 8, -1)
    return (weights @ v).transpose(1, 2).reshape(2, -1, 256)


q, k, v = torch.randn(3, 2, 4, 1024, 64).unbind()
real_time = best_time(attention, q, k, v, repeat=3)
weights = 2 * 4 * 1024 * 1024 * 4  # bytes
print(f"real tensors: {1000 * real_time:.1f} ms, the matrix of weights alone has {size(weights)}")

# %% [markdown]
# A compiler that works like this owns as much memory as the program, and waits for matrix products whose
# results nobody reads. It draws random numbers when it meets a dropout, and updates the statistics of a batch
# norm, which belong to the user.
#
# ### A table of rules
#
# So compute only the shapes. Broadcasting has a rule, a matrix product has one, and a table holds them. Here
# is its beginning:


# %%
def broadcast(a, b):
    return tuple(max(m, n) for m, n in zip(a, b))


RULES = {"add": broadcast, "matmul": lambda a, b: (*a[:-1], b[-1])}
print(RULES["add"]((8, 1), (8, 4)), RULES["matmul"]((8, 4), (4, 3)))
print("wrong:", RULES["add"]((2, 3), (3,)), "instead of", tuple((torch.zeros(2, 3) + torch.zeros(3)).shape))
print("wrong:", RULES["add"]((2, 3), (4, 3)), "instead of an error")

# %% [markdown]
# Two rules have two bugs. The first one forgets that shapes are aligned at their *last* dimension. The second
# one accepts shapes that do not fit together. PyTorch has some three thousand operators, and their shapes are
# the easy part. Strides and promotion of dtypes follow rules that are written down nowhere but in the code of
# the operators.
#
# ## The idea: PyTorch's own shape code
#
# That code can be run alone. An operator of PyTorch is implemented by *kernels*, one for each kind of device,
# and beside the kernels for CPU and GPU there is a *meta kernel*. It computes everything about the result
# except its contents. It is what runs when the operands are on the device `meta`:

# %%
with torch.device("meta"):
    a, b = torch.empty(2, 3), torch.empty(3)
print(a + b)
try:
    a + torch.empty(4, 3, device="meta")
except RuntimeError as error:
    print("eager's own message:", error)

# %% [markdown]
# The shapes are right, and the error is the one that eager would raise, because the same lines of PyTorch have
# made it. One property is missing. A meta tensor has forgotten whether it stands for a tensor on the CPU or on a
# GPU. A program that asks `x.device` would get the answer `meta`, and `x + torch.ones(3)` would be an error.
#
# So keep both: a meta tensor, and the device that it stands for. This pair is called a *fake tensor*.
# [Part 1 of tiny](chapter:tiny.1), the compiler in one file, needs ten lines for it:

# %%
print(inspect.getsource(tiny.Fake))

# %% [markdown]
# `_make_wrapper_subclass` makes a tensor without memory that has a shape, strides, a dtype and a device. To the
# rest of PyTorch it is a tensor on that device, and autograd will differentiate through it. When a kernel would
# have to run, PyTorch finds no memory, and calls `__torch_dispatch__` in its place. In tiny nobody may use a fake
# unless somebody records, so this raises. `__torch_function__` is another hook, which PyTorch calls much earlier,
# at the call of the Python function. The form of it that every subclass inherits turns each result into a tensor of
# the subclass. tiny makes its results itself, so it switches this hook off.
#
# The attribute `node` belongs to the second half of the chapter's task, to write the program down.
#
# ## Writing the program down
#
# Between the Python function `F.linear` and the kernel that multiplies matrices lies the *dispatcher*, which
# looks at the operands and decides what has to be done with a call. It works in layers. Each layer may do
# something of its own and then passes the call on to the next:

# %% tags=["fold"]
row_of_boxes(
    [
        ("F.linear(x, w)", "the program", "input"),
        ("autocast", "casts operands", "plain"),
        ("autograd", "notes grad_fn", "plain"),
        ("the recorder", "writes a node", "compute"),
        ("meta kernel", "shape, strides", "library"),
    ],
    "A call of F.linear goes through autocast, which may cast its operands, and through autograd, which notes how to "
    "differentiate it, to the recorder, which writes a node, and from there to the meta kernel, which computes the shape.",
    "A call on its way down. The recorder stands where the kernels would be.",
)

# %% [markdown]
# PyTorch lets a Python object stand at the lower end, in front of all kernels: a `TorchDispatchMode`. While it is
# active, each call that reaches the bottom is handed to it. What arrives there is simpler than what the program
# wrote. An operator that is only a composition of others, as `linear` is, has no kernel of its own at any layer.
# What the dispatcher finds for it is a function that calls those others. Each of these calls goes down through the
# layers on its own, and `linear` itself never arrives at the bottom. If autocast is on, its casts have become calls of
# their own. And autograd has already noted whatever it needs.
#
# A mode that writes down each call that it gets is the whole of *tracing*. Here is what tiny's mode does with a call:

# %%
print(inspect.getsource(tiny.recorded))

# %%
print(inspect.getsource(tiny.on_meta))

# %% [markdown]
# tiny cannot handle an operator that writes into a tensor. It raises a `Break`, and the recording ends. Otherwise
# `as_meta` replaces each fake among the arguments by its meta tensor, and `op` runs on those: that is the call
# of the meta kernel. (`tree_map` and `tree_leaves` also find what lies in lists, tuples and dictionaries.) The result is
# on the device that the call names, or else on that of the operand with the most dimensions: PyTorch lets a CPU tensor
# without dimensions be combined with tensors on a GPU, and the result is on the GPU.
# `note` makes a node with the same operator, whose arguments are nodes where the call had
# fakes (`as_node`) and constants where it had constants. `wrap` makes a fake of the result, which remembers the
# node. So when this fake becomes an argument of the next call, the next node will refer to this one. An
# operator with several results gets one more node for each of them, which picks it out.
#
# ### Four nodes, by hand
#
# The program `F.gelu(F.linear(x, w)) + 1` calls three functions. Follow it down. `x` has the shape [4, 8], and
# its strides are (8, 1). `w` has the shape [16, 8]. `linear` multiplies with the *transposed* weight, so the first
# call that arrives at the bottom is `t(w)`. Its meta kernel answers with the shape [8, 16] and the strides
# (1, 8): a transposed matrix is the same memory, walked in another order. The second call is `mm`, a product
# of two matrices, which gives [4, 16]. The third is `gelu`, and the fourth is `add` with the constant 1.
#
# The frames below were recorded from the real recorder, while the program ran.


# %% tags=["fold"]
from minicompile.ch01_graphs.composites import with_symbols
from minicompile.ch01_graphs.fake import FakeMode, storage_key

mode = FakeMode()


class Watched(Recorder):
    """The recorder, and a frame for each call that arrives."""

    def __torch_dispatch__(self, func, types_, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types_, args, kwargs)
        tensors = ", ".join(type_text(a) for a in args if isinstance(a, torch.Tensor))
        self.frames.append((f"{func} arrives with {tensors}. The answer is {type_text(out)} with strides {tuple(out.stride())}.",
                            print_graph(types.SimpleNamespace(graph=self.graph))))
        return out


def watched(function, **inputs):
    recorder = Watched()
    for name, fake in inputs.items():
        recorder.placeholder(name, fake)
    recorder.frames = [("Before the first call the graph has its inputs.", print_graph(types.SimpleNamespace(graph=recorder.graph)))]
    with recorder:
        outputs = function(**inputs)
    gm = recorder.finish(outputs)
    recorder.frames.append(("The function has returned. What it returned becomes the output of the graph.", print_graph(gm)))
    return gm, recorder.frames


def layer(x, w):
    return [F.gelu(F.linear(x, w)) + 1]


graph, frames = watched(layer, x=mode.from_real(torch.randn(4, 8)), w=mode.from_real(torch.randn(16, 8)))
Walk("Recording, call by call", frames)

# %% [markdown]
# The list of nodes has one property on which every later stage relies. Each value gets a name once and is never
# changed. This is called *single assignment*. To know what a node depends on, it is enough to look at its
# arguments. (One kind of operator breaks the rule: those that write into a tensor. [Chapter 5](chapter:05) removes
# them.)
#
# ### What a graph means
#
# A graph can be run. A loop over the nodes calls each target with the values that its arguments have by now:
#
# %show minicompile.ch01_graphs.graph.interpret "for node in gm.graph.nodes" to "del env[value]"
#
# `resolve` replaces a node among the arguments by its value. `on_node` calls the operator, unless somebody asks
# for something else. The last two lines drop each value after its last use, because a graph should not need more
# memory than the eager program: `dead` says for each node which values nobody reads any more. It is computed in
# one walk from the end to the beginning, since the first use that one meets from behind is the last one.
#
# %show minicompile.ch01_graphs.graph.last_uses
#
# This loop is the *meaning* of a graph. Each stage of the compiler is tested by running what it made and
# comparing the numbers with eager's. And the same loop has a second use: run it on fakes, under a recorder, and it
# makes a new graph. That is how later stages turn one graph into another.

# %%
x, w = torch.randn(4, 8), torch.randn(16, 8)
print("equal to the last bit:", torch.equal(interpret(graph, [x, w])[0], layer(x, w)[0]))

# %% [markdown] tags=["page"]
# ## What breaks the smallest version
#
# tiny's recorder is complete for programs that only compute new tensors. Here are four programs for which it is
# not enough. Each of them shows one thing that the real [`FakeTensor`](ref:minicompile.ch01_graphs.fake.FakeTensor)
# and the real [`Recorder`](ref:minicompile.ch01_graphs.trace.Recorder) add.
#
# ### Tensors that share memory
#
# A *view* is a tensor that looks at the memory of another one. `base[0]` below is a view. If the program writes
# into `base`, the row changes as well.

# %%
base = torch.zeros(2, 3)
with tiny.Recorder() as recorder:
    fakes = recorder.input(base), recorder.input(base[0])
meta_storages = {fake.meta.untyped_storage()._cdata for fake in fakes}
print("tiny: two inputs of one memory have", len(meta_storages), "memories when they are faked")
whole, row = mode.from_real(base), mode.from_real(base[0])
print("minicompile:", len({storage_key(whole), storage_key(row)}))

# %% [markdown]
# tiny makes a new meta tensor for each input, so it does not know that they belong together. It gets away with it
# because it ends the graph in front of every operator that writes. If it did not, a write to the first would be
# lost on the second.
#
# In PyTorch the memory behind a tensor is an object of its own, its *storage*, and a meta tensor has one as well.
# It says how many bytes there would be. So the real version makes one blank storage for each real storage, and
# lays the meta tensor over it with the offset and the strides of the real one:
#
# %show minicompile.ch01_graphs.fake.FakeMode._meta_like "real = tensor" to "return meta.set_"
#
# From here on PyTorch itself keeps the books. A view of a fake is a view of its meta tensor, and shares the
# storage. Two fakes alias exactly if their meta tensors have one storage. A write into one counts up the version
# of both, as autograd expects it:

# %%
with mode:
    row = mode.from_real(torch.zeros(4, 6)).t()[2]
    print("strides", row.stride(), "offset", row.storage_offset(), "shares memory with its base:",
          storage_key(row) == storage_key(row._base))
    row.add_(1)
    print("version of the base, of the row:", row._base._version, row._version)

# %% [markdown]
# ### Errors that only a kernel raises
#
# A program that ends with an exception in eager PyTorch must end with one when it is compiled. Meta kernels check
# shapes. They do not check everything else:


# %%
def mixed(x, y):
    return x @ y


def tried(run):
    try:
        return run()
    except Exception as error:
        return shortened(f"{type(error).__name__}: {error}", 90)


# %% [markdown]
# `tried` answers with what a function returns, or with the words of its error. The next function asks the same of eager,
# of tiny's recording, and of minicompile's recording of fakes:


# %%
def in_all(f, *args, say=type_text):
    """What eager, tiny and minicompile answer."""
    def traced():
        graph = trace(lambda *fakes: [f(*fakes)], [mode.from_real(a) for a in args]).graph
        return graph.output_node().args[0][0].meta["val"]

    made = {"eager": lambda: f(*args), "tiny": lambda: tiny.record(f, *args).outputs[0].fake}
    for name, run in {**made, "minicompile": traced}.items():
        answer = tried(run)
        print(f"{name:12}", answer if isinstance(answer, str) else say(answer))


in_all(mixed, torch.randn(4, 4), torch.ones(4, 4, dtype=torch.int64))
in_all(lambda x: torch.softmax(x, 0), torch.arange(4))

# %% [markdown]
# tiny has recorded a product of floats and integers, and a softmax of integers. Its program would fail later, in
# another place and with another message, or compute something that eager refuses to compute.
#
# Some of these rules are written down in `rules/refused.py`, such as the one for products. For all others, the kernel is
# asked. The operator runs once on small tensors full of zeros that have the dtypes and strides of the fakes, and
# if the kernel refuses, so does the fake. The answer is remembered for the operator and its dtypes, so the
# question is asked once.
#
# In the lines below, `key` is the operator with all that a refusal can depend on, such as the dtypes. `shared` says that
# the operator writes and that elements of its operands lie in the same memory; such a call is asked every time. A
# `form` is the sizes, strides and offset of one fake, and `length_of` says how many elements of memory it takes. If the
# small copies would need more than `TRIED_BYTES`, one MiB, the kernel is not asked, and the call is accepted. `flat` and
# `spec` are the arguments as a flat list, and the way in which they were nested:
#
# %show minicompile.ch01_graphs.refusals.check_with_kernel "if not shared and key in _ACCEPTED" to "_ACCEPTED.add"
#
# A kernel may also complain about the zeros, for example that it cannot invert such a matrix. Such a message
# says nothing about the program. That is why `_kernel_refuses` compares the words of the message with those
# that speak of dtypes and of unsupported operations.
#
# ### Strides
#
# A *channels-last* image is a tensor of shape [batch, channels, height, width] in whose memory the channels of one
# point are neighbours. Libraries for convolutions prefer it, and answer in the same order.


# %%
def filtered(x, w):
    return F.conv2d(x, w)


def strides_of(t):
    return f"shape {tuple(t.shape)}, strides {tuple(t.stride())}"


image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
in_all(filtered, image, torch.randn(3, 3, 1, 1), say=strides_of)

# %% [markdown]
# The meta kernel of the convolution does not know what the library will do. If a compiler believes it, it
# generates code that reads element (0, 0, 0, 1) at address 1, where the library has put another channel. The
# result has the right shape and wrong numbers.
#
# So the answer of a meta kernel is corrected where it has to be. The corrections are
# registered in tables. A convolution has the order of its operands, and for a Fourier transform the kernel is asked. All
# elementwise operators share one rule (`elementwise_strides`): a result keeps what its operands have in common, and otherwise
# they are asked in turn which of two dimensions is the faster one. `_takes_part` tells which arguments count as operands.
# A copy follows the same rule alone. The kernel of `x[indices]` runs over the shape of its result like an elementwise one, and
# `_indexed` makes the operands that it would have as such:
#
# %show minicompile.ch01_graphs.corrections.true_form
#
# ### Questions about the data
#
# Some operators have a result whose shape depends on the numbers, such as `nonzero`, and some give Python a number,
# such as `item`. A fake has no answer to these. The real version has a list of them and says so with a reason, and
# [chapter 4](chapter:04) will cut the program there:

# %%
in_all(lambda x: x.nonzero(), torch.randn(4))

# %% [markdown]
# ### Where a node comes from
#
# tiny's nodes know what they compute. They do not know who asked for it. When something goes wrong ten stages
# later, in a generated kernel, the user wants to read a line of the own program. So a node of the real graph carries
# three entries in its dictionary `meta`: `val`, the fake result; `location`, the user's line; and `origins`, the
# names of the nodes of the stage before from which it was made. The last two are called *provenance*, and every
# stage has to pass them on.
#
# For forward operators that is easy: capture sets `recorder.provenance` before each call. But the recorder will
# also see operators that nobody has written, when autograd computes gradients. There is no line of user code under
# them. However, autograd keeps a node of its own for each forward operation, its *grad_fn*, and PyTorch says which
# `grad_fn` is at work. So after each forward operation the recorder goes through the new `grad_fn`s and notes the
# provenance of the operation beside each. One operation may have several, since a call like `linear` consists of other
# operators, and autograd makes a `grad_fn` for each of those. They form a chain that leads back to the inputs, so the
# recorder walks along it until it meets one that it knows. When a backward operator arrives, it looks there. (A few
# operators have a gradient in PyTorch that is computed differently on fakes than on a CPU. They are in
# `DERIVED_OTHERWISE`, and a hook on their `grad_fn` replaces that gradient.)
#
# %show minicompile.ch01_graphs.trace.Recorder.remember_grad_fns
#
# %show minicompile.ch01_graphs.trace.Recorder._provenance_now

# %%
from minicompile.ch01_graphs.trace import run_recorded


def slope(x, w):
    y = torch.tanh(x @ w)
    return y.sum()


captured = watch(slope, torch.randn(4, 8), torch.randn(8, 8, requires_grad=True), backend="eager").graphs[0]
fakes = mode.from_real(torch.randn(4, 8)), mode.from_real(torch.randn(8, 8, requires_grad=True))
recorder = Recorder()
for name, fake in zip("xw", fakes):
    recorder.placeholder(name, fake)
with recorder:
    (loss,) = run_recorded(recorder, captured, fakes)
    torch.autograd.grad(loss, fakes[1])
Table(["node", "made from", "the user's line"], [(n.name, *n.meta["origins"], n.meta["location"].source)
                                             for n in recorder.graph.nodes if n.op != "placeholder"])

# %% [markdown]
# `watch` has compiled `slope` only to get its graph, which is `captured`; [chapter 3](chapter:03) says how that is made.
# `run_recorded` is the loop of `interpret` under a recorder, with each node's provenance set before it is called.
# The last five rows are the backward pass. The product that computes the gradient of `w` comes from the line
# that multiplied by `w`.
#
# ## The real one, from end to end
#
# One function does the work of a fake operator. It refuses what depends on data, replaces fakes by meta tensors,
# checks, runs the meta kernel, corrects strides, and wraps the result. (It is called for what has not been asked
# before. Programs repeat themselves, so the answer to a question is kept as a *recipe*: the shape, strides, dtype and
# device of the result. When the same operator is asked for operands of the same form, a fake is made from the recipe.)
# An operator that writes in place has to return the very object that it was given, because Python programs compare
# identities. So `wrap` first looks whether the meta tensor belongs to a fake that was written (`written`). `apart` has the memories
# of the operands, for operators that never return one of them: some meta kernels return their operand where nothing is to be done,
# while the kernel copies, and then the result gets memory of its own. `with_small_sizes` is for
# sizes that have a name and no value, which come below: one that is 0 or 1 at present becomes a number.
#
# %show minicompile.ch01_graphs.operators.run_on_fakes "out = run_meta" to "return pytree"
#
# And `trace` is short, since the recorder does everything:
#
# %show minicompile.ch01_graphs.trace.trace


# %% tags=["explore:normalise(x, weight)"]
def normalise(x, weight):
    y = F.layer_norm(x, (64,), weight)
    return [F.dropout(y, 0.1, training=True) * 2]


x, weight = torch.randn(8, 64), torch.randn(64)
graph = trace(normalise, [mode.from_real(x), mode.from_real(weight)], ["x", "weight"])
print(print_graph(graph))

# %% [markdown]
# `layer_norm` has three results: the normalised tensor, and the mean and reciprocal deviation of each row, which
# its backward pass would want. `dropout` has come apart into four operators. Two of them write into a tensor in
# place: PyTorch makes an empty tensor, fills it with random zeros and ones, and divides it. No random numbers were
# drawn while we traced. They are drawn when the graph runs, from the same random stream as eager's:

# %% tags=["fold"]
draw_fx(graph, "The traced graph: layer norm, dropout and a multiplication in a row.")

# %%
torch.manual_seed(1)
ours = interpret(graph, [x, weight])[0]
torch.manual_seed(1)
theirs = normalise(x, weight)[0]
print("equal to the last bit:", torch.equal(ours, theirs))

# %% [markdown]
# The same holds for everything else that a program does *to* its tensors. A batch norm in training mode counts its
# calls, and moves its running statistics a little towards those of the batch. Trace one, and look at its statistics
# before and after:


# %% tags=["explore:normalised(torch.randn(8, 3), torch.zeros(3), torch.ones(3), torch.tensor(0))"]
def normalised(x, mean, var, count):
    count.add_(1)
    return [F.batch_norm(x, mean, var, training=True)]


state = torch.zeros(3), torch.ones(3), torch.tensor(0)
graph = trace(normalised, [mode.from_real(t) for t in (torch.randn(8, 3), *state)], ["x", "mean", "var", "count"])
print(print_graph(graph))
print("after tracing:", *state)
interpret(graph, [torch.randn(8, 3), *state])
print("after a run:  ", *state)

# %% [markdown]
# While the graph was recorded the statistics were fakes, so nothing happened to the real ones. The writes are *in the
# graph*: `add_` counts, and `native_batch_norm` gets `mean` and `var` and writes to them. They happen when the graph
# runs, once in each run, as in eager. The empty tensor of bytes between the two is made by PyTorch's own code for
# `batch_norm`. Some GPU kernels keep something in such a tensor for the backward pass; here nobody reads it.
# ([Chapter 5](chapter:05) turns such writes into values, so that later stages
# need not know about them.)
#
# ### What it costs
#
# Back to the attention layer from the beginning. A fake run takes the same time for every size, because it
# never touches an element. The real matrix of weights has four times as many elements when the sequence is twice
# as long:

# %% tags=["fold"]
def both(length):
    parts = torch.randn(3, 2, 4, length, 64).unbind()
    fakes = [mode.from_real(t) for t in parts]
    with mode:
        fake = best_time(attention, *fakes, repeat=5)
    return best_time(attention, *parts, repeat=3) * 1e3, fake * 1e3


curve = {n: both(n) for n in (64, 128, 256, 512, 1024)}
lines({"real": [(n, a) for n, (a, _) in curve.items()], "fake": [(n, b) for n, (_, b) in curve.items()]}, "length", "milliseconds",
      "Time of one attention layer by the length of the sequence, on a logarithmic scale.", log_y=True)

# %%
fakes = [mode.from_real(t) for t in (q, k, v)]
tracemalloc.start()
with mode:
    attention(*fakes)
peak = tracemalloc.get_traced_memory()[1]
tracemalloc.stop()
print(f"memory for data: none; {size(peak)} of Python objects, instead of {size(2 * weights)}")

# %% [markdown]
# For small tensors the fake run is the slower one. What it takes goes into Python: the mode, the checks, the meta
# kernel, and the new tensor. A compiler pays this once for each graph, and the program pays for its data at every
# step.

# %% [markdown] tags=["page"]
# ## Sizes that are not known
#
# A graph that was traced with a batch of 8 says 8 everywhere. For a batch of 9 it is useless. [tiny](chapter:tiny)
# compiles again for each size. A language model that is fed sentences of 5 to 255 tokens would be compiled
# 251 times. So we want to record with a size that has a name and no value.
#
# ### An integer that is an object
#
# PyTorch lets a size be a `torch.SymInt`. This is an integer whose arithmetic is done by a Python object, its
# *node*. When a meta kernel multiplies two sizes, it calls the method `mul` of a node, and the result is
# another `SymInt`. The kernels do not notice. Our node, [`SizeNode`](ref:minicompile.ch01_graphs.shapes.SizeNode),
# holds two things: an expression, and the environment to which the names in it belong.

# %% tags=["fold"]
drawing(
    {
        "fake": ("a fake tensor", "shape (2*s0, 6)", "input"),
        "symint": ("torch.SymInt", "what meta kernels see", "plain"),
        "node": ("SizeNode", "mul, add, eq, ...", "compute"),
        "expr": ("Expr", "2*s0", "saved"),
        "env": ("ShapeEnv", "s0 is 8 now; guards", "library"),
    },
    [("fake", "symint"), ("symint", "node"), ("node", "expr"), ("node", "env")],
    "A fake tensor has a SymInt among its sizes. The SymInt asks its node. The node has an expression and an environment, "
    "which knows the present values of the names and keeps the guards.",
)

# %%
from minicompile.ch01_graphs.shapes import SIGN_OF, ShapeEnv

env = ShapeEnv()
batch = env.create(8)  # 8 in this call
fake = mode.from_real(torch.randn(8, 6), (batch, 6))
graph = trace(lambda x: [(x.view(-1) * 2).view(-1, 3).sum(1)], [fake])
print(print_graph(graph))
print("questions asked:", [g.text() for g in env.guards])

# %% [markdown]
# By hand: the first `view` makes one dimension of `s0` times 6 elements, `6*s0`. The second one needs to know how
# many rows of three that is. PyTorch's code divides, `6*s0 // 3`, and our expression answers `2*s0`. The result
# has `2*s0` elements for every batch size.
#
# ### Questions
#
# Some code wants more than arithmetic. It wants to *decide*, and Python needs a truth value for that:


# %%
def choose(x, y):
    if x.shape[0] > 4:
        return [x + y]
    return [x - y]


env = ShapeEnv()
graph = trace(choose, [mode.from_real(torch.randn(8, 6), (env.create(8), 6)) for _ in range(2)])
print(print_graph(graph))

# %% [markdown]
# The trace took the answer for the present sizes, 8 rows, and went on in the branch with `+`. That alone is
# dangerous. Suppose that we use the graph again for a batch of 3:

# %%
x = torch.ones(3, 6)
print("the graph:", interpret(graph, [x, x])[0][0].tolist(), " eager:", choose(x, x)[0][0].tolist())

# %% [markdown]
# The graph has added where the program subtracts, and no shape was wrong. So the environment keeps each question
# with its answer. The trace may be used again for exactly those sizes for which all questions have the same
# answers. Such a recorded question is a *guard*, and [chapter 2](chapter:02) makes a check of all guards:

# %%
for text in dict.fromkeys(g.text() for g in env.guards):
    print("holds for this trace:", text)

# %% [markdown]
# The program's own `> 4` is there. The other two were not written by the user. They are one question, asked inside of PyTorch in
# both orders: `x + y` broadcasts if one of the sizes is 1, works if they are equal, and is an error otherwise. And each guard costs
# generality. This graph is for two batches of equal size, larger than 4.
#
# The function that answers has three steps. The *hint* of a symbol is its value in the present call, here 8, and the
# hint of an expression is computed from those of its symbols:
#
# %show minicompile.ch01_graphs.shapes.ShapeEnv.decide
#
# First it tries to *prove* the answer. A size symbol stands for a number of at least 2, because `create` refuses to
# make symbols for 0 and 1:
#
# %show minicompile.ch01_graphs.shapes.ShapeEnv.create
#
# A dimension of size 1 broadcasts, and a tensor with a dimension of size 0 is empty, so nearly every operator asks
# about these two. With the bound the answers are known. Is `s0 == 1`? The difference `s0 - 1` is at least 1, so it
# is never 0, and the answer is no for all sizes. No guard is needed. `bounds` computes from the bounds of the symbols
# between which two numbers an expression lies, with None where there is no end. Where there is none, the difference may
# be infinite. Both ends are compared with 0. If the answers are the same, it is the answer for all numbers between
# them too. Equality is the exception: neither end may be 0, and some number between them is.
#
# %show minicompile.ch01_graphs.shapes._prove "low, high = bounds" to "return at_ends"
#
# If there is no proof, the hint decides. Now the answer is true of this call only, so the guard is recorded. A guard
# that is recorded already is not recorded twice. `decide` does not look at the earlier guards, though: `s0 == s1` and
# `s1 == s0` are two guards, since they are compared as they are written.
# Here is a program, and what each of its questions met:


# %%
def questions(x, y):
    z = torch.cat([x, y])  # is the other dimension equal? is one of the tensors empty?
    half = z[: z.shape[0] // 2]  # is the end inside of the tensor?
    return [half.sum(0) if half.shape[0] % 2 == 0 else half.amax(0)]


# %% tags=["fold"]
def asked(function, *sizes):
    env, rows = ShapeEnv(), {}
    real = env.decide

    def decide(op, left, right):
        before = len(env.guards)
        answer = real(op, left, right)
        known = "the hint: a guard" if len(env.guards) > before else "bounds, or a guard before"
        rows.setdefault((f"{left} {SIGN_OF[op]} {right}", answer, known))
        return answer

    env.decide = decide
    trace(function, [mode.from_real(torch.randn(n, 6), (env.create(n), 6)) for n in sizes])
    return Table(["question", "answer", "known from"], list(rows))


asked(questions, 8, 12)

# %% [markdown]
# Most of the questions come from inside of PyTorch, and bounds answer nearly all of them: a sum of sizes is at
# least 4, so it is neither empty nor 1. Two needed the hint. Whether half of a number is larger than the number
# could be proved as well, by a prover that knows more about division than ours. The last question is the program's
# own, and no proof can exist. This graph is for an even half.
#
# ### Expressions
#
# What form should an expression have? The questions above compare them, so two expressions that are equal for all
# values should be *the same expression*. We write each as a *linear combination*: a constant, plus integers times
# products of symbols, with one entry for each product. `s0 + s0`, `2*s0` and `4*s0 - 2*s0` all become the one entry
# `{(s0,): 2}`. Such a form is called *canonical*. Addition adds the entries:
#
# %show minicompile.ch01_graphs.symbolic.add "terms = dict(a.terms)" to "return _make"
#
# Division is the hard part, and it matters beyond sizes. From [chapter 7](chapter:07) on, expressions describe
# addresses, and the symbols are loop variables. Element (i0, i1) of a matrix with rows of 64 lies at `64*i0 + i1`.
# Flatten the matrix and fold it again, and the row is `(64*i0 + i1) // 64`, the column `(64*i0 + i1) % 64`. If these
# do not become `i0` and `i1`, there will be two divisions for each element in the generated code, and a
# division takes longer than all other integer arithmetic there.
#
# Two facts are enough. The first: a multiple of the divisor leaves the division, `(64*i0 + i1) // 64 = i0 + i1 //
# 64`. That holds for all integers. The second: what is left is 0 if it lies between 0 and 63. A loop variable knows
# its range, so that can be checked. (What stays a division is shortened like a fraction: `6*s0 // 4` becomes
# `3*s0 // 2`.) The code is these two facts in this order:
#
# %show minicompile.ch01_graphs.symbolic.floordiv "quotient, rest" to "return quotient"
#
# Below it runs on four divisions. `i0` is below 8, and `i1` below 64.

# %% tags=["fold"]
from minicompile.ch01_graphs import symbolic
from minicompile.ch01_graphs.symbolic import Symbol, bounds

i0, i1, s0 = Symbol("i0", 8).expr, Symbol("i1", 64).expr, Symbol("s0", None, 2).expr  # i1: 0 <= i1 < 64; s0: at least 2


def division(text, a, b):
    q, r = symbolic._divide_terms(a, b)
    rows = [("what leaves the division", q), ("what stays", r), ("its bounds", "{} to {}".format(*bounds(r))),
            ("certainly less than the divisor", symbolic.provably_less(r, b)), ("result", a // b)]
    return text, Table(["step", ""], rows)


Walk("Four divisions", [
    division("(64*i0 + i1) // 64: the row of an element", 64 * i0 + i1, 64),
    division("(128*i0 + 2*i1 + 1) // 128: a constant is divided with the rest", 128 * i0 + 2 * i1 + 1, 128),
    division("(32*i0 + i1) // 64: nothing leaves, and what stays may be larger than 64", 32 * i0 + i1, 64),
    division("(i0*s0 + s0) // s0: the divisor is a size that nobody knows", i0 * s0 + s0, s0),
])

# %% [markdown]
# The third one stays a division, and has to: if `i0` is 2, the result is 1 or more. An expression may therefore
# contain one more kind of building block, a division or a remainder of two other expressions.
#
# torch.compile uses sympy for this, a general computer algebra system. It knows a great deal about integers, and
# nothing about the range of a loop variable unless it is told:

# %%
import sympy

a, b = (sympy.Symbol(name, integer=True, nonnegative=True) for name in ("i0", "i1"))
print("sympy:", (64 * a + b) // 64, "   ours:", (64 * i0 + i1) // 64)

# %% [markdown]
# ### Numbers that are not sizes
#
# A learning rate varies from step to step, too. Most programs only compute with such a number. They multiply a
# tensor by it and never ask how large it is. So a float may be symbolic as well, a `torch.SymFloat`.


# %%
def update(p, grad, lr):
    step = lr / (1 + 2 * lr)
    return [p - grad * step]


env = ShapeEnv()
inputs = [mode.from_real(torch.randn(4)), mode.from_real(torch.randn(4)), env.create_float(0.1)]
graph = trace(update, inputs, ["p", "grad", "lr"])
print(print_graph(graph))
print("holds for this trace:", [g.text() for g in env.guards])

# %% [markdown]
# The expression of a float is a tree of what the program computed, and it is never simplified. `(a + b) - b` is not
# `a` in floating point, so any rule of algebra would change numbers. The tree stands in the graph as it is, as the
# argument of the product: `f0 / (1.0 + (2.0 * f0))`. Before the kernels run, Python computes it again, operation by
# operation, with the float of the present call. One guard is recorded here. A division raises an exception if the
# divisor is zero, so the trace is valid as long as the quotient can be computed.
#
# ## The running example
#
# Here is the GPT block of the later chapters, recorded with names for the batch and the length. Each `linear` has
# become a transposition and a matrix product, and attention has become one particular kernel for this device.
# (Some versions of PyTorch have a `linear` that asks for sizes as plain numbers. `with_symbols` then runs their
# version in Python, which takes symbols.)

# %%
block, inputs = example()
env = ShapeEnv()
x = mode.from_real(inputs, (env.create(4), env.create(32), 64))
parameters = {name: mode.from_real(p.detach()) for name, p in block.named_parameters()}


def run(x, *values):
    return [with_symbols(torch.func.functional_call, block, dict(zip(parameters, values)), (x,))]


graph = trace(run, [x, *parameters.values()], ["x", *[name.replace(".", "_") for name in parameters]])
calls = sum(n.op.startswith("call") for n in graph.graph.nodes)
print(f"{calls} nodes\n")
head("\n".join(line for line in print_graph(graph).splitlines() if " = input" not in line), 16)

# %% [markdown]
# The whole block is one graph for all batches and all lengths. Two names are enough for it, since every other size
# follows from them: `s0*s1` rows go into each matrix product. These are the questions for which there was no proof:

# %%
for text in dict.fromkeys(g.text() for g in env.guards):
    print("holds for this trace:", text)

# %% [markdown]
# All of them are true for every length of at least 2. Our prover cannot see that. It knows the bounds of `s0*s1`
# and of `s0`, both without an upper end, so it knows nothing about their difference. The price is a comparison at
# each call, which always holds. A proof that is missing makes a guard too many, and never a wrong answer.
#
# ### What a name costs
#
# How long does it take to record the block? Here is the time for each of its nodes: with the two names, with numbers in
# their place, and with numbers once more, when every question has been asked before:


# %%
from minicompile.ch01_graphs.recipes import RECIPES


def anew(*arguments):
    RECIPES.clear()
    return trace(*arguments)


numbers = [FakeMode().from_real(inputs), *parameters.values()]
recordings = {"names": (trace, [x, *parameters.values()]), "numbers": (anew, numbers), "numbers, asked before": (trace, numbers)}
Table(["sizes", "time for each node"],
      [(sizes, f"{1e6 * best_time(f, run, given, repeat=5) / calls:,.0f} us") for sizes, (f, given) in recordings.items()])

# %% [markdown]
# A name is expensive. The meta kernels that are written in C++ know numbers only, so PyTorch's versions in Python run in
# their place, and whatever these compute with a size is a call of a method of our node. And no answer is kept as a
# recipe, since an answer may come with a guard. So the compiler begins with numbers, and gives a name to a size that has
# been seen to vary ([chapter 2](chapter:02)).
#
# ## What torch.compile does differently
#
# Its `FakeTensor` is the same pair of a meta tensor and a device. It also remembers the result of each operator for
# its arguments, for symbolic sizes as well, and it propagates constants. It does not ask kernels what they refuse, so the
# product of floats and integers above passes through its trace and fails when the compiled program runs.
#
# Its `ShapeEnv` keeps ranges for every expression, and can replace a symbol once two are found to be equal; ours
# keeps both and a guard. It also knows *unbacked* symbols: sizes that come from data, such as the length of
# `nonzero`, for which no hint exists. Here such operators end the graph. Its expressions are sympy's, with floor
# divisions and remainders of its own that know ranges.
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
