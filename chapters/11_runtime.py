# %% [markdown]
# # Run time: the program around the kernels
#
# Kernels do not call themselves. Somebody allocates memory, launches them in order, calls the libraries for
# matrix products and attention, and gives back what is no longer needed. On a GPU a small kernel takes two
# microseconds, and Python can easily spend more than that on the way to it. Then the GPU waits, and a better
# kernel would change nothing.
#
# So this last stage is about *not* doing things. Whatever can be decided before the first call is decided
# before the first call. The chapter goes as far as it can in three steps: a loop over the schedule, a
# generated program without the loop, and on a GPU no program at all.

# %%
import weakref

import torch

import minicompile
from chapters import tiny
from chapters._lib import Table, Walk, bars, best_time, check_of, drawing, example, head, measured, results, shortened, timeline, watch
from minicompile.ch02_guards.codegen import define
from minicompile.ch08_fusion.fuse import fuse
from minicompile.ch08_fusion.groups import FusionOptions
from minicompile.ch08_fusion.kernel import Kernel
from minicompile.ch10_cpp.build import load_cpp
from minicompile.ch10_cpp.emit import emit_cpp
from minicompile.ch11_runtime.host import compile_schedule

# %% [markdown]
# ## The smallest version
#
# [Part 11 of tiny](chapter:tiny.11), the compiler in one file, writes its host program as Python text, too:


# %%
def two_products(x, w):
    return torch.tanh(torch.tanh(x @ w) @ w)


small = torch.randn(16, 16)
print(tiny.program(tiny.decompose(tiny.record(two_products, small, small)), "cpu").text)

# %% [markdown]
# It gives tensors back in time. What it does not do is save time on the way to the kernels: each call makes
# its tensors anew, calls operators through the dispatcher, and asks every tensor for its address. For a small
# program that is most of the time:

# %%
contenders = {"eager": two_products, "tiny": tiny.compile(two_products), "minicompile": minicompile.compile(two_products)}
times = {name: best_time(lambda: f(small, small), repeat=200) for name, f in contenders.items()}
Table(["two small products", "time of one call"], [(name, f"{seconds * 1e6:.0f} us") for name, seconds in times.items()])

# %% [markdown]
# Eager needs least, as it has four small operators to dispatch and nothing else to do. A compiled function pays for its
# hook and its guards first, and on so little work it cannot earn that back ([chapter 3](chapter:03)). But between tiny
# and the real compiler there are many microseconds, with the same kernels and the same library calls. They are the
# subject of this chapter.
#
# ## The naive version: a loop over steps
#
# A schedule is a list of kernels and library calls with names for their buffers ([chapter 8](chapter:08)). Here is one
# of four kernels. They could be one, so fusion is switched off for it:


# %%
def chain(x):
    a = x.sum(1, keepdim=True)
    b = (x - a).amax(1, keepdim=True)
    c = (x * b).sum(1, keepdim=True)
    return (x + c).amin(1, keepdim=True)


x = torch.randn(4, 16)
program = watch(chain, x).half()["program"]
schedule = fuse(program, FusionOptions(enabled=False))  # kept apart, to have several steps
functions = load_cpp([emit_cpp(k) for k in schedule.steps])
arguments = [k.args for k in schedule.steps]

# %% [markdown]
# An interpreter for a schedule is a dictionary and a loop. For each step it makes memory for the results, as the
# layouts of their buffers say, and calls the kernel with its tensors:


# %%
def naive_run(inputs):
    values = dict(zip(program.inputs, inputs))
    for step, function, names in zip(schedule.steps, functions, arguments):
        for name in step.outputs:
            b = program.buffers[name]
            values[name] = torch.empty_strided(
                b.layout.size, b.layout.stride, dtype=b.dtype, device=b.device
            )
        function(*[values[n] for n in names])
    out = program.outputs[0]
    return [values[out.buffer].as_strided(out.layout.size, out.layout.stride)]


# %%
compiled = compile_schedule(schedule, "cpp")
print("same result:", torch.equal(naive_run([x])[0], compiled([x])[0]), " steps:", len(schedule.steps))
with torch.no_grad():
    naive_t = best_time(lambda: naive_run([x]), repeat=400)
    ours_t = best_time(lambda: compiled([x]), repeat=400)
    eager_t = best_time(chain, x, repeat=400)
bars(
    [
        ("eager", eager_t * 1e6, "plain"),
        ("loop over steps", naive_t * 1e6, "bad"),
        ("generated program", ours_t * 1e6),
    ],
    "us",
    "Time of four small steps, where nearly all of it is the host.",
    form="{:.1f}",
)

# %% [markdown]
# The loop takes longer than the work. It also has a second fault: `values` keeps every buffer alive until the
# end. To free one in time the loop would have to count its remaining readers, at run time, in every call.
#
# ## The idea: generate the host program
#
# Look at what the loop decides: which function, which buffers, which sizes, when each name dies. It decides
# the same in every call. So write the decisions down, as Python, with one line per step:

# %%
print(compiled.source)

# %% [markdown]
# Read the lines up to `del buf0`. `empty_float32` is `torch.empty_strided` for one dtype. It makes four
# rows of one number, with strides that the compiler has chosen. `k0` is the first kernel, called with the tensor
# that it reads and the one that it writes. Then `buf0` is dead after the next kernel, which reads it at the very
# places at which it writes `buf1`. So no memory is asked for: `buf1 = buf0` gives the same tensor another name. And
# `del buf0` drops the old name, so that the memory goes back when the last name does.
#
# There is no dictionary any more. Buffers are local variables, which CPython keeps in an array, and sizes are
# constants. Where the memory plan of [chapter 8](chapter:08) says that a value dies, there stands a `del`. A
# line that ends in *takes over its memory* gives the memory of a dead value a new name. The functions `k0` to
# `k3` are globals of the generated module: the kernels.
#
# ### How the text is made
#
# The generator is a state and one function for each kind of line. The state is the list of lines, and what is known
# about names. `globals` has the objects that the text will need (kernels, dtypes, operators), and `known` the names
# that they have got. `locals` has, for each buffer, the Python name of its memory, and `taken` is the set of these
# names, so that none is given twice. (A *root* in the listing is a buffer that is no alias of another one. Aliases
# share the Python name of their root.) `fresh` says which of them are memory that this program has made, as opposed
# to an input or a result of a library, which may begin anywhere in its memory:
#
# %show minicompile.ch11_runtime.host.Writer "program: Program" to "fresh: set"
#
# An allocation is one call of `torch.empty_strided` with everything spelled out. On a CPU its arguments take longer to read
# than the memory takes to get, and a small function in C, one for each dtype, stands in its place:
#
# %show minicompile.ch11_runtime.host.write_allocation
#
# And here is the walk over the schedule. For each step the plan says what to allocate before it, which dead memory to
# take over, and what to free behind it. In between stands the call. In the listing, `p` is the program, and
# `calls[k]` has the function of the kernel and its arguments. An argument is the name of a buffer or of a size. It
# can also be a `View` of one number in the memory of the CPU, which a kernel of the GPU cannot load. Then the host
# reads the number with `.item()`. Kernels take only addresses and integers of 64 bits, so `bits_of_float` makes of it
# the integer with the same bits. If a value could take over both the memory of a value that dies in this very step
# and memory that has been dead before, the plan takes the former.
#
# %show minicompile.ch11_runtime.host.generate_host "for k, (step, plan)" to "write_free"
#
# ### Library calls
#
# A matrix product is not ours to generate. It is called in its `out=` form, so that it writes into memory
# that the plan has chosen. Any other operator allocates its own result, and there is a trap: nobody promises
# how a library lays its result out in memory. Fakes predicted strides, kernels were compiled for these
# strides, and if the library of some other release returns others, the kernels read the wrong elements. So
# each such result is compared, and copied if need be. The comparison is one line of the host program and
# takes a tenth of a microsecond:


# %%
def attention(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2) * 2


q = torch.randn(1, 2, 8, 16)
print(watch(attention, q, q, q).half()["compiled"].source)

# %% [markdown]
# `x0` is the operator, and the comparison stands two lines below its call. `relayout` makes a copy with the given
# strides. The program has one input, since `watch` was given one tensor three times. `view` is a window on a tensor,
# given by sizes, strides and an offset from where the tensor begins. It is used for inputs and for results of
# libraries, which may begin anywhere in their memory. Where the program has made the memory (`fresh`), the tensor
# begins where the memory does, and `as_strided` is called directly. And around everything stands
# `with below_autograd()`, as in each program that calls an operator. An operator would ask whether autograd has to
# record it. Here it need not: for autograd the whole program is one operation ([chapter 5](chapter:05)), and to say
# so once is cheaper than to be asked at every call.
#
# ## Two lines that look superfluous
#
# ### `args.clear()`
#
# The program takes a *list* of inputs, and the first thing that it does is to empty the list. Leave the line out, and
# everything still computes. What is lost is found by asking when an input dies. The cell below takes the generated
# text, with and without the line, and puts a function of its own in the place of the last kernel. This function looks
# through a weak reference whether the program's input is still there, although the first kernel was its last reader.
# (`host.namespace` has the globals of the generated module, the keys of `host.numbers` are the names of the kernels
# in it, and `define` makes a function of the changed text.)


# %%
def squares(x):
    return ((x * x).sum(1, keepdim=True) + 1).sqrt().sum()


wide = torch.randn(512, 512)
found = watch(squares, wide).half()
steps = fuse(found["program"], FusionOptions(enabled=False))


# %%
def probe(source_change):
    """Run the host program with its text changed, and tell whether its input outlives the first kernel."""
    host = compile_schedule(steps, "cpp")
    host([torch.randn(512, 512)])  # builds and binds the kernels
    space = dict(host.namespace)
    seen, last = [], [name for name in host.numbers if name.startswith("k")][-1]
    kernel = space[last]

    def look(*arguments):
        seen.append(alive() is not None)
        return kernel(*arguments)

    space[last] = look
    run = define(source_change(host.source), "call", space, "changed")
    given = [torch.randn(512, 512)]
    alive = weakref.ref(given[0])
    run(given)
    return seen[0]


# %%
print("as it is:             input alive at the last kernel:", probe(lambda text: text))
print("without args.clear(): input alive at the last kernel:", probe(lambda text: text.replace("args.clear()", "pass")))

# %% [markdown]
# The caller holds the list, and the list holds the tensors. For a forward pass that costs little. The inputs
# of a *backward* pass are all activations that forward has saved, most of the memory of a training step, and
# nobody needs one any more after its last use. With the line they go one after the other while gradients are
# computed. Without it all of them stay until the last gradient is done.
#
# ### `raise_versions`
#
# When autograd saves a tensor it notes the tensor's version, and every in-place operator raises that number.
# This is how eager finds out that a saved tensor was overwritten. A generated kernel writes through a
# pointer, and autograd sees nothing:


# %%
def counter(c, x):
    c.add_(1)
    return x * c


c, w = torch.zeros(4), torch.ones(4, requires_grad=True)
compiled = minicompile.compile(counter)
for name, function in (("eager", counter), ("compiled", compiled)):
    y = w * c  # saves c
    function(c, torch.ones(4))
    try:
        y.sum().backward()
        print(f"{name}: no error")
    except RuntimeError as error:
        print(f"{name}: {shortened(str(error), 84)}")
print(watch(counter, c, torch.ones(4)).half()["compiled"].source)

# %% [markdown]
# The compiled version raises as eager does, thanks to the line that raises the version by hand. Drop it and
# the gradient is computed from the wrong `c`, in silence.
#
# ## The running example
#
# The backward pass of the GPT block gets parameters, the saved activations, and the gradient of the result. Of the
# activations and the gradient it is the only owner.

# %%
block, x = example()
seen = watch(block, x)
seen.result.sum().backward()
head(seen.half("backward")["compiled"].source, 45)

# %% [markdown]
# Read some of its lines. `x0` is a matrix product. It writes its result into memory that the line above has made for it.
# Its operands are windows: with the sizes (64, 128) and the strides (1, 64), `tangent0` is read as its own transpose, and
# nothing is copied. Behind each step stand the names that die there. So the saved activations go one after the other, as
# their gradients are done, and their memory is free for what comes next. Where a comment says so, a value has
# taken over the memory of a dead one of the same size. `x1` is the backward pass of attention. It returns the gradients of `q`, `k`
# and `v`, and the strides of each are compared before anything reads it.
#
# ### Equal kernels are one
#
# A model of twelve equal layers has every kernel twelve times, each time over other buffers. Before a kernel is
# printed, its buffers get neutral names in the order in which they appear: `in0`, `in1`, `out0`. Two kernels that are
# equal then have equal texts, are compiled once, and are called with different arguments. Each of them is still a
# launch of its own. Where four or more equal kernels need nothing from each other, they become one launch as well, a
# *list* ([chapter 12](chapter:12)). The cell below counts for three blocks. A block alone has four kernels in
# forward, but three have ten and not twelve: the addition at the end of a block and the norm at the beginning of the
# next are one kernel, and it is equal to the one in the middle of a block. (`kernel.local` in the listing are buffers
# that are never stored: only this kernel uses them.)
#
# %show minicompile.ch08_fusion.canonical.canonical_names

# %%
three = watch(torch.nn.Sequential(*[type(block)() for _ in range(3)]), x)
half = three.half("forward")
launches = [s for s in half["schedule"].steps if isinstance(s, Kernel)]
print(
    f"three blocks, forward: {len(launches)} launches of {len(half['compiled'].sources)} different kernels"
)

# %% [markdown]
# ## Where the time of a call goes
#
# A call of compiled code goes through several layers. The frame hook finds the compiled function, which checks its
# guards. Then comes autograd's node, in it the host program, and from there kernels and libraries are called. Here
# are two of these layers, each timed alone, and the whole. The guards are hardly to be seen. Nearly everything is the
# host program with its kernels, which on a CPU run on the same processor. What the whole call needs beyond these two
# is the hook and autograd's node:

# %%
forward = seen.half("forward")["compiled"]
fn = type(block).forward
check = check_of(seen.captured[0], fn)
values = check(fn, block, x)
compiled = minicompile.compile(block)
compiled(x)
guards_t = best_time(lambda: check(fn, block, x), repeat=200)
with torch.no_grad():
    detached = [v.detach() for v in values]
    host_t = best_time(lambda: forward(list(detached)), repeat=200)
whole_t = best_time(compiled, x, repeat=200)
bars(
    [
        ("guards", guards_t * 1e6),
        ("host program and kernels", host_t * 1e6, "library"),
        ("the whole call", whole_t * 1e6, "plain"),
    ],
    "us",
    "One call of the compiled block, with gradients.",
    form="{:.1f}",
)

# %% [markdown]
# ## No host program at all
#
# On a GPU the host and the device work side by side. The host puts launches into a queue, the device takes
# them out. As long as the queue is not empty, the host's time does not count. nanoGPT's training step has
# some 300 launches, and at five microseconds each the host needs 1.5 ms to fill the queue, while a recent GPU
# empties it faster than that. Then the GPU waits after every kernel.
#
# That can be played through with two clocks. The host puts a launch into the queue every five microseconds. The
# device takes a kernel when it is there and the one before it is done. The picture has six kernels of two
# microseconds each:

# %%
def two_clocks(kernel, launch=5, count=6):
    """(host, device) as lists of (begin, end) in microseconds."""
    host = [(launch * n, launch * (n + 1)) for n in range(count)]
    device, free = [], 0
    for _, launched in host:
        begin = max(launched, free)
        free = begin + kernel
        device.append((begin, free))
    return host, device


host, device = two_clocks(2)
spans = [(f"{words} {n}", a, b - 1, "") for words, clock in (("launch", host), ("kernel", device)) for n, (a, b) in enumerate(clock)]
timeline(
    spans, device[-1][1], "Six launches of five microseconds, and six kernels of two.",
    "Each kernel is done three microseconds before the next one arrives.", "microsecond",
)

# %%
rows = []
for kernel in (1, 2, 5, 10, 20):
    _, device = two_clocks(kernel, count=300)
    whole = device[-1][1]
    rows.append((f"{kernel} us", f"{whole} us", f"{100 * (1 - 300 * kernel / whole):.0f} %"))
Table(["a kernel takes", "300 of them take", "of which the device waits"], rows)

# %% [markdown]
# Below five microseconds the time does not depend on the kernels at all: to make them faster gains nothing. Above
# it the host is ahead, and its own time has disappeared. A whole model is in between, since its kernels differ.
#
# A *CUDA graph* is a recording of everything that was put into a queue. It is replayed with one call, which takes
# about as long as one launch. It is the largest gain there is for models of many small kernels. And it has a price
# that one has to understand before one may use it: a recording contains *addresses*. The kernels in it read where
# their inputs were when they were recorded, and they write where their outputs were. (It contains the numbers of each
# launch, too. What is done about numbers that change, such as a learning rate, is told in [chapter 12](chapter:12).)
# Here is a class that behaves like a CUDA graph, on the CPU. It holds on to one input and one output:


# %%
class Graph:
    """Runs a function once; a replay reads and writes the same memory again."""

    def __init__(self, function, x):
        self.function, self.x = function, x
        self.out = function(self.x).clone()

    def replay(self):
        self.out.copy_(self.function(self.x))
        return self.out


# %% [markdown]
# Two programs that are right in eager are wrong with it. One has a new tensor where there was another when the graph
# was recorded. The other keeps a result while the graph is replayed:

# %%
weight = torch.ones(2)
graph = Graph(lambda t: t * 10, weight)
weight = torch.tensor([5.0, 5.0])  # a new tensor, as a new batch or a loaded parameter would be
print("an input that moved: ", graph.replay().tolist(), "where [50.0, 50.0] is right")

batch = torch.tensor([1.0, 2.0])
graph = Graph(lambda t: t * 10, batch)
first = graph.replay()
batch.copy_(torch.tensor([3.0, 4.0]))
graph.replay()
print("a result that was kept:", first.tolist(), "where [10.0, 20.0] is right")

# %% [markdown]
# The third fault needs training to be seen. Forward leaves activations in the graph's memory, and backward reads them
# there. If the program runs forward *twice* before it runs the first backward, as every program does that adds two
# losses or accumulates gradients, the second forward overwrites the activations of the first, and the first gradient
# is computed from the wrong batch. No error is raised. Users of torch.compile's mode `reduce-overhead`, which replays
# CUDA graphs, have met all three.
#
# ### Three rules
#
# **An input is static or it is copied in.** A tensor that is the same memory at the same address in two calls in a
# row, such as a parameter, is read in place, and its address is compared at every call. Anything else is copied into
# a placeholder that never moves. If a static input turns out to have moved, the recording is thrown away. The first
# time, a parameter was probably replaced, as by loading a state, and the graph is recorded anew with the new address.
# An input that moves again is no parameter. It is copied from then on. (A recorded backward pass is more careful.
# What it reads in place are parameters and activations. It is replayed only if each parameter lies where forward has
# found it, and each activation where forward has left it. Once forward copies an input, backward finds it in a new
# place each time, and runs without its graph, which is right and slower.)
#
# %show minicompile.ch11_runtime.cudagraphs.GraphedCallable "if not lie_at(" to "return run_recording"
#
# (These lines stand in the method that is called instead of the host program. `recording` is what the second call has
# left behind. The *first* call of each size runs as it is, because at that time libraries still allocate their
# workspaces and kernels are still being compiled, and neither may happen while a graph is recorded. A *workspace* is
# memory that a library keeps for its intermediate results. `lie_at` compares addresses, and `relocated` decides what
# becomes of an input that has moved. `queue_behind` makes this launch wait for the last one if that was put into
# another queue. `lent` and `group.out` belong to the next rule.)
#
# **What leaves is copied out.** Results and gradients go into fresh tensors, all of them in one launch. This
# is where we differ from torch.compile, which hands out the graph's own memory and asks the user to be done
# with it before the next call.
#
# One copy can be spared without asking anything of the user. A whole training step (chapter 12) that begins with
# `zero_grad()` drops the gradients of the step before, and GPT-2 would then make 148 tensors to copy the new ones
# into. So when the second call is about to be recorded, we look which results of the first call have been freed by
# then. The caller has dropped these, and is likely to drop them each time. From now on they are *lent*: the caller
# gets the graph's own tensor. (`group.out` has the recordings whose lent tensors may be with the caller.) Before each
# replay the references to what is lent are counted, in Python and in C++. If somebody has kept one, or a view of one,
# its memory is left to them, and everything is recorded once more elsewhere.
#
# **What stays is watched.** Activations for backward are not copied, or the gain would be gone. They are
# handed to autograd as throw-away aliases, and the graph keeps a weak reference to each. While one of them is
# alive, a backward pass is *pending*, and another forward pass runs without the graph.
#
# How does the alias know when it is not needed any more? Only autograd's node holds it. When the backward pass has
# run, or the loss is dropped, the node gives up what it has saved, the alias dies, and the weak reference is empty.
# Nobody has to be told.
#
# %show minicompile.ch11_runtime.cudagraphs.GraphedCallable.must_run_plainly
#
# Read it for the two kinds. A forward pass must not be replayed while a backward is pending (or while a hook may keep
# what is saved). A backward pass may be replayed if the activations that it gets are the graph's *own*. Those of a
# forward that ran without the graph lie elsewhere, and its backward must not be replayed over the ones that still
# wait. And with `retain_graph=True` the activations must survive, so a recording that would overwrite them is not
# used. There is a case in which this function answers no and a backward pass runs without its graph all the same. Its
# forward ran without the graph, but nobody waits any more. Then the comparison of addresses, further above, finds
# that the activation is not where the recording would read it, and `relocated` has the pass run as it is.
#
# The picture shows which way each kind of tensor takes.

# %% tags=["fold"]
drawing(
    {
        "parameters": ("parameters", "stay where they are", "input"),
        "batch": ("batch", "is elsewhere each time", "input"),
        "held": ("placeholder", "never moves", "plain"),
        "graph": ("the recording", "fixed addresses", "compute"),
        "pool": ("activations", "in the graph's memory", "saved"),
        "results": ("results", "in the graph's memory", "plain"),
        "fresh": ("fresh tensors", "for the caller", "library"),
        "backward": ("backward", "reads them in place", "compute"),
    },
    [("batch", "held"), ("held", "graph"), ("parameters", "graph"), ("graph", "results"), ("graph", "pool"), ("results", "fresh"),
     ("pool", "backward")],
    "A batch is copied into a placeholder. The recording reads the placeholder and the parameters, and writes results and activations "
    "in its own memory. Results are copied into fresh tensors; activations are read by backward where they are.",
    "Two arrows are copies: batch to placeholder, and results to fresh tensors. While an activation is alive, forward must not be "
    "replayed.",
)

# %% [markdown]
# With these rules a replay is: copy in, replay, copy out. In the listing `r` is the recording and `g` the callable
# that it belongs to. The fresh tensors are made first: if memory runs out, this is known before anything is written.
# `r.written` has the placeholders that the graph writes to, and what it has written there goes back into the caller's
# tensors. `g.mutated` are the positions of all inputs that the graph writes. `g.pick_mutated` takes these from the
# arguments, and their versions are raised.
#
# %show minicompile.ch11_runtime.cudagraphs.run_recording "with torch._C" to "torch._foreach_copy_(fresh"
#
# ### Watched while it works
#
# The rules are separate from CUDA, so they run here with a recorder that behaves like `Graph` above. On a GPU
# `borrow` makes a tensor that looks at the graph's memory without keeping it from being freed, and `leave_pool` has
# later recordings use other memory; here neither has anything to do. The region computes `tanh(x @ w)` and saves its
# result for backward. (`results=1` says that only the first output goes to the caller, and the second is what is
# saved.) Each frame is one event of a training loop, with what the real code decided.

# %% tags=["fold"]
from minicompile.ch11_runtime.cudagraphs import GraphSet


class CpuRecorder:
    """A graph where there is none: the same addresses, the same overwriting."""

    def usable(self, tensors):
        return True

    def record(self, function, inputs):
        outputs = [o.clone() for o in function(list(inputs))]

        def replay():
            for kept, new in zip(outputs, function(list(inputs))):
                kept.data.copy_(new)

        return replay, outputs

    def queue_behind(self, last):
        return None  # there is one queue here

    def borrow(self, tensor):
        return tensor

    def leave_pool(self):
        pass  # memory belongs to tensors here


graphs = GraphSet(CpuRecorder())
forward = graphs.wrap(lambda a: [(y := torch.tanh(a[0] @ a[1])), y.clone()], results=1)
backward = graphs.wrap(lambda a: [a[0].t() @ (a[3] * (1 - a[2] * a[2]))], is_backward=True)


class Region(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        y, saved = forward([x, w])
        ctx.save_for_backward(x, w, saved)
        return y

    @staticmethod
    def backward(ctx, tangent):
        return None, *backward([*ctx.saved_tensors, tangent.contiguous()])


w, frames, answers = torch.randn(3, 3, requires_grad=True), [], {}


def event(words, action):
    before = dict(forward.counts), dict(backward.counts)
    result = action()
    rows = []
    for name, member, old in (("forward", forward, before[0]), ("backward", backward, before[1])):
        new = [kind for kind in member.counts if member.counts[kind] != old[kind]]
        rows.append((name, ", then ".join(new) or "not called", *member.counts.values()))
    rows.append(("a backward is pending", "yes" if graphs.pending else "no", "", "", ""))
    frames.append((words, Table(["", "this time", "plain", "recorded", "replayed"], rows)))
    return result


def step(x):
    return Region.apply(x, w)


def grad(y, name):
    (answers[name],) = torch.autograd.grad(y.sum(), w)


inputs = [torch.randn(2, 3) for _ in range(6)]
y = event("First forward: it runs as it is, since libraries still allocate their workspaces.", lambda: step(inputs[0]))
event("First backward: the same.", lambda: grad(y, 0))
del y
y = event(
    "Second forward: it is recorded, and replayed at once. w was the same memory twice: it is static. x is copied in.",
    lambda: step(inputs[1]),
)
event("Second backward: recorded. It finds the activation where forward leaves it.", lambda: grad(y, 1))
del y
y = event("Third forward: replayed.", lambda: step(inputs[2]))
z = event(
    "A fourth forward while the third waits for its backward: it must not touch the activation, so it runs without the graph.",
    lambda: step(inputs[3]),
)
event("The backward of the third: replayed, its activation is intact.", lambda: grad(y, 2))
event("The backward of the fourth: its activation is not the graph's, so it runs without the graph too.", lambda: grad(z, 3))
y = z = None
y = event("Fifth forward: nothing is pending any more. Replayed.", lambda: step(inputs[4]))
event("Its backward: replayed.", lambda: grad(y, 4))
right = all(
    torch.allclose(answers[k], torch.autograd.grad(torch.tanh(inputs[k] @ w).sum(), w)[0], atol=1e-6) for k in answers
)
print("all five gradients are right:", right)
Walk("Two graphs through a training loop", frames)

# %% [markdown]
# ### What it brings
#
# It depends on the host. Here is one training step of the small GPT on two machines that have the
# same GPU and different processors:

# %% tags=["gpu-result", "results:h100-nanogpt-slow-host", "results:h100-nanogpt", "fold"]
rows = []
for host, name in (("slow host", "h100-nanogpt-slow-host"), ("fast host", "h100-nanogpt")):
    runs = measured(name)
    rows += [
        (f"{host}, eager", runs["eager"]["ms"], "bad"),
        (f"{host}, compiled", runs["minicompile"]["ms"], "plain"),
        (f"{host}, graph replayed", runs["minicompile:reduce-overhead"]["ms"], "compute"),
    ]
bars(rows, "ms", "Milliseconds per training step of nanoGPT on an H100.", form="{:.2f}")

# %% [markdown]
# On the slow host, eager and compiled code are as fast as the processor that launches the kernels. The
# replayed graph takes the same time on both machines: what is left is the GPU. The fast host had little to
# gain, because it already kept ahead of the GPU. Two larger models on the fast host:

# %% tags=["gpu-result", "results:h100-gpt2", "results:h100-resnet50", "fold"]
rows = []
for name in ("h100-gpt2", "h100-resnet50"):
    for how, mode in (("compiled", "minicompile"), ("graph replayed", "minicompile:reduce-overhead")):
        run = measured(name)[mode]
        rows.append((name[5:], how, f"{run['ms']:.2f}", f"{run['peak_memory_mb'] / 1000:.2f}"))
Table(["work, bf16", "how", "ms per step", "peak GB"], rows)

# %% [markdown]
# ResNet-50 has hundreds of short kernels and still gains. GPT-2 has kernels long enough to hide the host: a replay
# gains nothing, the copies cost time, and the graphs' pool costs memory. (The pool is the memory that all graphs of
# one function share.)
#
# ### What a copy costs
#
# Copying results and gradients out has a price that can be computed. The gradients of GPT-2 are half a
# gigabyte in float32. To read and write it once takes 0.3 ms on an H100, one percent of the step. That buys a
# promise: no result is ever overwritten, whatever the caller does with it.
#
# What is left of a compiled call when its kernels are taken away? The table has graphs that do nothing, called on a
# machine with the same GPU. In its first row, `two lines` is a function of an addition and a ReLU. In its last row a
# GPT of twelve layers writes to itself: at each call it stores its loss and the number of its calls in its own
# attributes. A model brings guards on hundreds of parameters with it. Without the C memo ([chapter 2](chapter:02))
# these alone would cost more than the whole call does now.

# %% tags=["gpu-result", "results:h100-overhead", "fold"]
calls = results("h100-overhead")["call_us"]
Table(
    ["one call without kernels", "minicompile", "torch.compile"],
    [(work, *(f"{row[c]['median']:.1f} us" for c in ("minicompile", "torch"))) for work, row in calls.items()],
)

# %% [markdown]
# ## What torch.compile does differently
#
# Inductor generates the same kind of wrapper, in Python or C++ (`cpp_wrapper`, and AOTInductor for a
# library without Python). Its CUDA graph trees record a *tree* of graphs that share one memory pool and
# track which outputs are still alive, so that it need not copy them; in exchange outputs are valid until
# the next run, and the user has to mark steps or clone. We copy, and nobody has to know.
#
# ## Exercises
#
# <!-- exercises -->
#
# ## Further reading
#
# - A. Gray, *Getting Started with CUDA Graphs* (NVIDIA developer blog, 2019).
# - *CUDAGraph Trees*, in PyTorch's documentation of torch.compile.
# - B. Steiner and others, *MODeL: Memory Optimizations for Deep Learning* (2023), on memory planning as a
#   search problem.
# - E. Yang, on the cost of Python and of the dispatcher in PyTorch (PyTorch developer podcast).
