# %% [markdown]
# # The pipeline
#
# The whole compiler, in the order in which a program passes through it:
#
#     guard -> capture -> differentiate -> decompose -> lower -> fuse -> emit -> run
#
# The first two happen per call and per frame (`frames.py`). This module is the rest: it takes one captured
# graph and returns a callable with the same meaning. Each stage is one function call; stopping after any of
# them and *running what is there* gives a backend. The backends form a ladder, and the first rung whose
# answer differs from eager's names the stage that is wrong:
#
# | backend | runs |
# |---|---|
# | `eager` | the captured graph |
# | `aot_eager` | the ATen graphs after differentiation and partitioning |
# | `decomposed` | those graphs in primitives only |
# | `loops` | the fused loop IR, by a slow interpreter |
# | `triton`, `cpp` | generated kernels |
# | `cudagraphs` | `aot_eager`, replayed as CUDA graphs |

# %%
import operator
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Callable

import torch
from torch import fx
from torch.utils import _pytree as pytree

from . import logs
from .ch01_graphs.graph import eager_callable
from .ch01_graphs.symbolic import Expr, present, product, symbols
from .ch05_autograd.callables import interpret_aten
from .ch05_autograd.joint import Joint
from .ch05_autograd.output_plan import computes
from .ch05_autograd.runtime import compile_training
from .ch06_decompositions.decompose import decompose
from .ch07_loops.ir import Extern
from .ch07_loops.lower import lower
from .ch07_loops.verify import verify, verify_devices
from .ch08_fusion.fuse import fuse
from .ch08_fusion.groups import FusionOptions
from .ch08_fusion.kernel import Kernel
from .ch08_fusion.reference import verify_schedule
from .ch09_triton.launch import start_workers
from .ch09_triton.passes import verify_in_place
from .ch11_runtime.collector import without_collection
from .ch11_runtime.cudagraphs import GraphSet, graphed, outputs_that_leave
from .ch11_runtime.host import HostProgram, compile_apart, compile_schedule
from .ch11_runtime.numbers import Apart
from .ch12_training.memory import recompute_in_backward
from .ch13_tuning.layouts import convolutions_to_channels_last, keep_layouts, reads_many_channels
from .config import config
from .errors import Unsupported


@dataclass
class Counters:
    """What has been compiled in this process since the last `reset`; times in seconds."""

    graphs: int = 0
    kernels: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def clear(self):
        self.graphs = self.kernels = 0
        self.seconds.clear()


counters = Counters()


class timed:
    """Adds the time spent inside to `counters.seconds[stage]`."""

    def __init__(self, stage: str):
        self.stage = stage

    def __enter__(self):
        self.start = time.perf_counter()

    def __exit__(self, *exc):
        took = time.perf_counter() - self.start
        counters.seconds[self.stage] = counters.seconds.get(self.stage, 0.0) + took

# %% [markdown]
# ## The lower half: from ATen graph to callable
#
# The autograd stage calls this for the forward and for the backward graph. A stage that cannot do its part
# raises `Unsupported`, and the graph then runs on the rung below that stage: slower, and right.

# %%
def compile_aten(gm: fx.GraphModule, *, rung: str, is_backward: bool = False, recorded: bool = False) -> Callable[[list], list]:
    """Compile one functional ATen graph of primitives. Returns a callable from a list of inputs, which it
    empties, to a list of outputs. recorded: as a CUDA graph."""
    which = "backward" if is_backward else "forward"
    logs.tell("stage", name=which, gm=gm)
    if rung in ("aot_eager", "decomposed"):
        return interpret_aten(gm)
    try:
        with timed("lower"):
            program = lower(gm)
            verify_devices(program)
        with timed("fuse"):
            schedule = fuse(program, FusionOptions(mixed_lists=rung != "triton"))
        if config.check_passes:
            verify(program)
            verify_schedule(schedule)
            verify_in_place(schedule)
        with timed("emit"):
            compiled = recorded and compile_apart(schedule, rung) or compile_schedule(schedule, rung)
    except Unsupported as reason:
        logs.tell("fallback", which=which, reason=reason)
        return interpret_aten(gm)
    for part in [p for p in (compiled.host, compiled.device) if p.schedule.steps] if isinstance(compiled, Apart) else [compiled]:
        told = program if part is compiled else part.schedule.program
        logs.tell("schedule", which=which, program=told, schedule=part.schedule, compiled=part)
    counters.kernels += sum(isinstance(step, Kernel) for step in schedule.steps)
    return compiled

# %% [markdown]
# ## The upper half: from captured graph to callable
#
# Passes on the captured graph come first, then differentiation, which calls the lower half twice. The
# autograd stage is given the decompositions to apply before it decides what the backward pass saves: a
# decision that is better made on primitives, where a softmax is visibly a reduction to save and an
# exponential to recompute.

# %%
def note_missing_gpu(backend: str) -> None:
    """Say once that what was asked for needs a GPU, and what runs instead."""
    if backend == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        logs.warn_once("triton", 'backend="triton" generates GPU kernels, and there is no GPU here: C++ '
                       "kernels run instead (TRITON_INTERPRET=1 runs Triton's own on the CPU, slowly).")
    elif backend == "cudagraphs":
        logs.warn_once("cudagraphs", 'backend="cudagraphs" needs a GPU, and there is none here: the graphs '
                       'run operator by operator. Leave backend out for C++ kernels.')
    elif config.cudagraphs:
        logs.warn_once("graphs", "CUDA graphs (mode reduce-overhead or max-autotune) need a GPU, and there "
                       "is none here: kernels are called one by one, as in the default mode.")


# %% [markdown]
# ## Regions that gain nothing
#
# Everything above pays off where operators become kernels: they fuse, and backward computes again what is cheap. A region of one
# matrix product has nothing to fuse. It calls the library that eager calls, by way of an `autograd.Function` whose forward and
# backward are Python, and for a product of 64 by 64 this takes twice as long as eager does. So when both halves are lowered, the
# question is what they have gained. If neither has a kernel, and forward makes no fewer calls than the captured graph does, the
# answer is nothing. Then the captured graph is what runs, and eager's own autograd differentiates it: views, versions, hooks and
# second derivatives are eager's.
#
# A kernel that stands for one operator, as for `relu` or a layer norm, may be faster than eager's or not. Where it has little to
# compute, that does not matter: the node costs twenty microseconds, which is more than eager's `relu` takes in all. So a region of small
# kernels on a CPU is left to eager, too, if the halves launch no less than eager makes calls (`joint.calls`), or not so many less that
# they make up for the node (`NODE`). What the library computes takes as long in both, unless calls of it were merged. The calls are
# counted as primitives, because what eager does in one call may be much: a `gelu` costs it as much as ten additions. `F.normalize` has
# eighteen, forward and backward, which become two kernels, and those are faster at any size. A layer of an `nn.Linear` and a `relu` gains
# two, so networks of up to two such layers are eager's. Without gradients there is no such node, and the kernel is what runs, unless
# eager makes fewer calls and one of ours is the library's: a product and a kernel that adds take twice as long as a small `torch.addmm`.
#
# Not all of eager's kernels on a CPU are good: average pooling takes twice as long as ours, `masked_fill` four times. But what a softmax,
# a layer norm, a sum or a copy does is done there as fast as memory allows (`AS_FAST`). Where eager makes one such call for each of
# our launches, a kernel is small up to a million elements: at a quarter of that, the node is still a tenth of the time. And where its calls
# are few (`FEW_CALLS`), how many launches we make does not matter: the four of a cross entropy of 64 rows of 100, forward and backward,
# take two thirds of the time that three kernels and the node take. At 32,000 elements they are equal.
#
# Where sizes vary, those at hand are asked. A region that is left to eager has a guard that says up to which size, and the first call
# beyond it gets a version with kernels. So a region with a size that the program has marked is compiled: a mark promises one version. The
# other way needs no guard: what was compiled for large sizes is right for small ones, too.
#
# A region that only takes views is eager's as well, with and without gradients: compiled, `x.t()` takes half as long again.
#
# What would lose is compiled. A larger graph of which calls were merged or left out, or whose views have become arguments of calls,
# makes fewer calls compiled. CUDA graphs take the host's time away altogether. A checkpoint keeps less than eager's formulas do, a
# `backward()` inside of the graph is planned as a whole, and of who writes to an input more is promised than its calls keep. The
# other rungs of the ladder run what they are there to run.
#
# A region on a CPU also runs as it was captured where a second derivative of it is expected (`second.py`).

# %%
NODE = 5            # as many small primitives cost about what a node of autograd does
FEW_CALLS = 6       # that eager makes faster than we call a node, if its kernels are as fast
AS_FAST = {getattr(torch.ops.aten, name).default for name in (
    "relu threshold_backward leaky_relu leaky_relu_backward hardswish hardswish_backward sigmoid sigmoid_backward silu silu_backward "
    "_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data nll_loss_forward nll_loss_backward native_layer_norm "
    "native_layer_norm_backward sum cumsum "
    "clone cat roll flip constant_pad_nd").split()} | {torch.ops.aten.sum.dim_IntList, torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor}


def as_captured(gm: fx.GraphModule, joint: Joint, halves: list[Callable]) -> str | None:
    """Why the captured graph may run in the place of its compiled `halves`, forward first; None if it is not to."""
    if joint.mutated or not all(isinstance(half, HostProgram) for half in halves):
        return None
    launched = [step for half in halves for step in half.schedule.steps]
    kernels = any(isinstance(step, Kernel) for step in launched)
    primitives = sum(computes(n) and bool(n.all_input_nodes) for n in joint.gm.graph.nodes)
    libraries = Counter(step.op for step in launched if isinstance(step, Extern))
    as_fast = all(op in AS_FAST or op in libraries for op in joint.calls)
    if joint.gradients:
        few = min(joint.calls.total(), primitives - NODE) <= len(launched) or as_fast and joint.calls.total() <= FEW_CALLS
    else:
        few = libraries and joint.calls.total() < len(launched)
    alike = joint.calls.total() <= len(launched) and as_fast
    buffers = [k.buffers[name] for k in launched if isinstance(k, Kernel) for name in k.tensors]
    limit, largest = 1 << 20 if alike else 1 << 14, max((product(b.layout.size) for b in buffers), key=present, default=0)
    small = few and all(joint.calls[op] <= count for op, count in libraries.items()) and \
        present(largest) <= limit and all(b.device.type == "cpu" for b in buffers)
    if kernels and not small:
        return None
    if not of_operators(gm):
        return None
    calls, compiled = sum(not takes_item(n) for n in calls_of(gm)), len(halves[0].schedule.steps)
    only_views = not (launched or joint.calls)
    if not calls or calls > compiled and not (small or only_views):
        return None
    if only_views:
        return "it only takes views"
    if kernels and isinstance(largest, Expr):           # what is larger is compiled
        inputs = [x.meta["val"] for x in gm.graph.find_nodes(op="placeholder")]
        envs = [n.node.env for x in inputs for n in (x, *getattr(x, "shape", ())) if type(n) is torch.SymInt]
        if not envs or envs[0].promised & symbols(largest):
            return None
        envs[0].decide("le", largest, limit)
    if kernels or calls > compiled:
        node = ", and a node of autograd" if joint.gradients else ""
        return f"its kernels are small, and eager's {logs.count(joint.calls.total(), 'call')} would be {len(launched)} compiled{node}"
    return f"no kernel is generated for it, and its {logs.count(calls, 'call')} would be {logs.count(compiled, 'library call')} compiled"


def calls_of(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.op in ("call_function", "call_method")]


def of_operators(gm: fx.GraphModule) -> bool:
    """Can PyTorch run the captured graph as it would run the program?"""
    return all(is_operator(n) and not n.meta.keys() & {"recompute", "backward"} for n in calls_of(gm))


def is_operator(node: fx.Node) -> bool:
    """Does PyTorch compute a tensor here, or several? Not a switch of a mode, nor a function that capture has made."""
    ours = (getattr(node.target, "__module__", None) or "").startswith(__package__)
    return not ours and all(isinstance(v, torch.Tensor) for v in pytree.tree_leaves(node.meta["val"]))


def takes_item(node: fx.Node) -> bool:
    return node.target is operator.getitem and not isinstance(node.args[0].meta["val"], torch.Tensor)


# %%
def compile_graph(gm: fx.GraphModule, fakes: list, backend: str, late_error: Callable) -> Callable:
    """Compile a captured graph: flat inputs in, tuple of outputs out. `backend` is a rung or "default"; the
    options of the compilation are in `config`. late_error(error) is told why a backward graph could not be compiled
    when it was needed; it may raise."""
    counters.graphs += 1
    if config.max_autotune:
        logs.warn_once("max_autotune", "max_autotune: kernels are not tuned by measuring yet. They get the same "
                       "configurations as without it; mode max-autotune is reduce-overhead, and "
                       "max-autotune-no-cudagraphs is default.")
    device = "cuda" if any(isinstance(f, torch.Tensor) and f.is_cuda for f in fakes) else "cpu"
    if device == "cuda":
        start_workers()
    elif not torch.cuda.is_available():
        note_missing_gpu(backend)
    if backend != "cudagraphs" and reads_many_channels(gm):
        keep_layouts(convolutions_to_channels_last(gm), fakes)
    rung = "aot_eager" if backend == "cudagraphs" else backend
    prepare = None if rung == "aot_eager" else decompose
    run, halves = None, []
    wants_graphs = backend == "cudagraphs" or config.cudagraphs
    graphs = GraphSet() if device == "cuda" and wants_graphs else None

    def lower_half(gm, *, is_backward):
        try:
            with without_collection():          # again, for a backward graph that is compiled when it is needed
                gm = gm if is_backward else recompute_in_backward(gm)
                compiled = compile_aten(gm, rung=rung, is_backward=is_backward, recorded=graphs is not None)
        except Exception as error:
            if run is None or isinstance(error, RecursionError):
                raise                   # and the frame runs eagerly, or this call of its backward
            late_error(error)           # the forward has run: its backward is a graph that can be interpreted
            return interpret_aten(gm)
        if run is None:
            halves.append(compiled)
        return compiled

    if graphs is not None:
        lower_half = graphed(graphs, lower_half)
    with timed("total"):
        run = compile_training(gm, fakes, lower_half, prepare)
    if graphs is not None:
        outputs_that_leave(graphs, run.joint.results + len(run.joint.written))
    elif backend == "default" and (why := as_captured(gm, run.joint, halves)):
        logs.tell("as_captured", why=why)
        return eager_callable(gm)
    elif backend == "default" and device == "cpu" and run.second and not run.joint.mutated and of_operators(gm):
        run.second.captured = eager_callable(gm)
    return run
