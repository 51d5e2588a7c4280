# %% [markdown]
# # Run time: the program around the kernels
#
# Kernels do not call themselves. Somebody allocates memory, launches them in order, calls the libraries,
# frees what is no longer needed. On a GPU a small kernel takes two microseconds, and Python can spend more
# than that on the way to it. So this last stage is about not doing things: every decision that can be made
# before is made before.

# %%
import torch

import minicompile
from chapters._lib import Table, bars, best_time, check_of, example, head, measured, results, watch
from minicompile.ch08_fusion.fuse import FusionOptions, fuse
from minicompile.ch08_fusion.kernel import Kernel
from minicompile.ch10_cpp.build import load_cpp
from minicompile.ch10_cpp.emit import emit_cpp
from minicompile.ch11_runtime.host import compile_schedule

# %% [markdown]
# ## The naive version: a loop over steps
#
# A schedule is a list of kernels and library calls with names for their buffers. An interpreter for it is a
# dictionary and a loop.


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
arguments = [emit_cpp(k).args for k in schedule.steps]


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
# Besides the time there is a second fault. `values` keeps every buffer alive until the end. Freeing would
# need a count of remaining readers for each name, at run time.
#
# ## The idea: generate the host program
#
# All the loop decides is the same in every call: which function, which buffers, which sizes, when each name
# dies. So write it out, as Python with one line per step:

# %%
print(compiled.source)

# %% [markdown]
# Names are local variables, which CPython keeps in an array. Sizes are constants. `del` stands where the
# memory plan of [chapter 8](chapter:08) says that a value dies. `args.clear()` drops the caller's
# references, so that inputs can die, too. The generator has one function for each kind of line:
#
# %show minicompile.ch11_runtime.host.generate_host
#
# ## The running example
#
# The backward pass of the GPT block. Its inputs are the saved activations and the gradient; it is the only
# owner of both.

# %%
block, x = example()
seen = watch(block, x)
seen.result.sum().backward()
head(seen.half("backward")["compiled"].source, 45)

# %% [markdown]
# Lines that end in *takes over its memory* write a result over a value that has just died. Equal kernels
# are one: before a kernel is printed its buffers get neutral names, so twelve blocks of a model share the
# code of one.
#
# %show minicompile.ch11_runtime.host.canonical

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
# From the outside in: the frame hook and the guards, autograd's node, the host program, the kernels and
# libraries.

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
# ## CUDA graphs
#
# On a GPU the next step is to have no host program at all. A CUDA graph is a recording of all launches,
# replayed with one call. It is the largest gain there is for models of many small kernels, and it comes
# with a trap: the recording contains *addresses*. A class that behaves like one, on the CPU:


# %%
class Recording:
    """Runs a function once; a replay writes into the same memory again."""

    def __init__(self, function, x):
        self.function, self.x = function, x.clone()
        self.out = function(self.x)

    def replay(self, x):
        self.x.copy_(x)
        self.out.copy_(self.function(self.x))
        return self.out


graph = Recording(lambda t: t * 10, torch.zeros(2))
first = graph.replay(torch.tensor([1.0, 2.0]))
print("first result:                    ", first.tolist())
graph.replay(torch.tensor([3.0, 4.0]))
print("the same tensor after a second call:", first.tolist())

# %% [markdown]
# The user kept a result, and the next call overwrote it. Two more of the kind: an input that has moved is
# read at its old address, and activations saved by one forward pass are overwritten by a second forward
# pass before the first backward has run. So whatever leaves the region is copied out, inputs are checked
# for their address or copied in, and while a backward is pending the next forward runs without the graph:
#
# %show minicompile.ch11_runtime.cudagraphs.run_recording
#
# What it brings depends on the host. Here is one training step of the small GPT on two machines that have the
# same GPU and different processors:

# %% tags=["gpu-result", "results:h100-nanogpt-slow-host", "results:h100-nanogpt"]
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

# %% tags=["gpu-result", "results:h100-gpt2", "results:h100-resnet50"]
rows = []
for name in ("h100-gpt2", "h100-resnet50"):
    for how, mode in (("compiled", "minicompile"), ("graph replayed", "minicompile:reduce-overhead")):
        run = measured(name)[mode]
        rows.append((name[5:], how, f"{run['ms']:.2f}", f"{run['peak_memory_mb'] / 1000:.2f}"))
Table(["work, bf16", "how", "ms per step", "peak GB"], rows)

# %% [markdown]
# ResNet-50 has hundreds of short kernels and still gains. GPT-2 has kernels long enough to hide the host:
# a replay gains nothing, the copies cost time, and the graphs' pool costs memory.
#
# What is left of a compiled call when its kernels are taken away: a graph that does nothing, called on
# that host. Guards on hundreds of parameters are in there; without the C memo ([chapter 2](chapter:02))
# they alone would cost more.

# %% tags=["gpu-result", "results:h100-overhead"]
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
