# %% [markdown]
# # CUDA graphs that are safe to use
#
# A CUDA graph is a recording of everything that was launched on a stream, replayed with a single call. For
# models of many small kernels it is the largest gain there is: a step of nanoGPT issues hundreds of launches from
# Python, microseconds each, and the GPU waits.
#
# The price: a recording contains *addresses*. The kernels read their inputs where those were at recording
# time and write their outputs where those were at recording time. Three kinds of bug follow, and users of
# torch.compile's `reduce-overhead` meet all of them:
#
# - inputs that moved: the graph reads stale memory;
# - outputs that the user kept: the next replay overwrites them;
# - activations saved by one forward pass, overwritten by a second forward pass before the first backward
#   ran.
#
# A fourth comes with threads: a recording has one set of placeholders, and two calls at the same time would
# both write to it.
#
# The rules of this module, in the same order (`recorder.py` is what records):
#
# - an input that is the same memory at the same address in two consecutive calls (a parameter) is *static*:
#   its address is checked at every call. Anything else is copied into a placeholder that never moves;
# - whatever leaves (results, gradients) is copied out of the graph's memory into fresh tensors, all in a few
#   launches. What the caller has dropped before the next call, as a step that begins with `zero_grad()` does with its
#   gradients, is *lent* instead: the graph's own tensor is handed out, and before each replay it is made sure
#   that nobody has kept it;
# - what stays inside (activations for backward) is handed out as throw-away aliases. While one of them is
#   alive a backward pass is *pending*, and a second forward pass runs without the graph. So does its
#   backward, because its saved tensors are at other addresses;
# - the memory of an activation is free for reuse after its last use in the recorded backward. Otherwise a
#   training step would hold all activations and all that backward computes at the same time. So a backward
#   pass that must leave the activations as they are (`retain_graph`) runs without the graph;
# - the program may record a graph of its own around a call. A graph is not recorded or replayed while another is recorded, so
#   such a call runs without ours, and its kernels become a part of the program's graph;
# - calls take turns. A lock is enough for the host, and says nothing of the GPU, where a replay may still run
#   when its call has returned: on the same stream the next one queues behind it, and a call on another stream
#   first makes its stream wait for the one before.
#
# torch.compile instead tracks the liveness of each output and re-records trees of graphs; outputs are valid
# only until the next run. Copying out costs device bandwidth (the gradients of a 124M model are half a gigabyte, read and
# written once: 0.3 ms on an H100). It buys that nobody has to know.

# %%
import contextlib
import functools
import threading
import weakref
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .. import logs
from ..ch02_guards.memory import holders, lie_at, raise_versions, storage_of
from ..ch05_autograd.region import hooks_see
from ..ch05_autograd.second import is_recorded
from ..errors import words_of
from .numbers import Apart, picker
from .recorder import CudaRecorder

MAX_RECORDINGS = 8        # per callable: different sizes, moved parameters
MAX_KEYS = 64             # combinations of integers and floats; beyond, they change at every call
COPY = torch.ops.aten.copy_.default
OFF = "CUDA graphs are off for one graph: %s"

# %% [markdown]
# ## One recording
#
# A `Recording` is what a replay has to know: which inputs must lie where they lay, which are copied into placeholders, and what
# becomes of each output.

# %%
@dataclass
class Recording:
    """`static`: positions and addresses of inputs read in place; `copied`: positions of inputs copied into
    `placeholders`. `recipes`: for each output, how to hand it out."""

    replay: Callable[[], None]
    static: list[int]
    addresses: list[int]
    copied: list[int]
    placeholders: list[torch.Tensor]
    written: list[tuple[int, torch.Tensor]]      # placeholders that the graph writes, to be copied back
    recipes: list[tuple]
    leaving: list[torch.Tensor]                  # outputs to be copied out
    lent: list[torch.Tensor] = field(default_factory=list)      # outputs that are handed out themselves
    unshared: bytes | None = None                # the holders of those before any was handed out


# %% [markdown]
# Forward and backward of one compiled function belong together. Forward leaves activations in the pool, and
# backward finds them there at known addresses. `GraphSet` knows these addresses, and holds weak references to all
# activations that were handed out (`inside`): as long as one of them is alive, a backward pass is still to come.
#
# It also knows what is with the caller. `out` are recordings whose lent results may still be held; before the pool is used
# again, `was_returned` asks for the counts of references, and if one is not what it was, all recordings of the set are made
# anew in another pool.

# %%
@dataclass
class GraphSet:
    """What the graphs of one compiled function share: the pool, and whether a backward pass is pending."""

    recorder: Any = None
    inside: list[weakref.ref] = field(default_factory=list)
    members: list[Any] = field(default_factory=list)
    addresses: set[int] = field(default_factory=set)      # static inputs of forward
    stays: dict[int, Any] = field(default_factory=dict)   # address -> activation, until backward is recorded
    lock: Any = field(default_factory=threading.RLock)
    busy: bool = False                                    # whether the thread that has the lock is using the pool
    stream: Any = None                                    # of the last call that used the pool
    on_device: Any = field(default_factory=contextlib.nullcontext)      # its GPU is the current one, where there are several
    lends: bool = True                                    # whether outputs may be lent
    out: list[Recording] = field(default_factory=list)    # those whose outputs may be with the caller

    def __post_init__(self):
        self.recorder = self.recorder or CudaRecorder()

    @property
    def pending(self) -> bool:
        """Does anybody still hold activations that live in the pool?"""
        self.inside = [r for r in self.inside if r() is not None]
        return bool(self.inside)

    def is_fixed(self, address: int) -> bool:
        """Is this where forward finds a static input or leaves an activation?"""
        return address in self.addresses or address in self.stays

    def was_returned(self) -> bool:
        """Is all that was lent back? If something is not, its memory belongs to who keeps it from now on: recordings begin anew in
        other memory, and lend nothing."""
        if all(holders(r.lent) == r.unshared for r in self.out):
            self.out = []
            return True
        self.lends, self.out = False, []
        self.recorder.leave_pool()
        for member in self.members:
            member.recordings.clear()
        return False

    def wrap(self, fn: Callable[[list], list], *, is_backward: bool = False, results: int | None = None,
             mutated: Sequence[int] = ()) -> "GraphedCallable":
        """`fn` as a recorded callable. results: how many leading outputs leave the compiled region (None:
        all); the rest are saved for backward. mutated: positions of the inputs that `fn` writes."""
        self.lends = self.lends and not is_backward          # a backward pass runs while the caller has the results
        self.members.append(GraphedCallable(self, fn, is_backward, results, frozenset(mutated)))
        return self.members[-1]

# %% [markdown]
# ## A call
#
# A `GraphedCallable` stands where the host program stood. The first call runs normally: kernels are still being compiled and
# tuned, libraries allocate workspaces. The second is recorded, and from the third on the recording is replayed. Here one computes
# `x * w + n`, and the table says what it did in each call, and how many of its inputs the recording finds in place:
#
#     x, w, 1                          plain
#     another x, w, 1                  recorded   reads 1 in place, copies 1
#     another x, w, 1                  replayed   reads 1 in place, copies 1
#     x, w, 2                          plain
#     x, w, 2                          recorded   reads 2 in place, copies 0
#     another w                        plain
#
# In the second call `w` came in the memory of the first, so it is *static*, and `x` did not. A number is baked into a recording, as
# sizes are that vary, so each combination has a recording of its own. It is found by its `key`: the arguments that are no tensors,
# floats as text, since 0.0 equals -0.0, and nan differs from itself. In the fifth call `x` has been the same twice.
#
# `__call__` sees to it that calls take turns; a finaliser or a signal handler that comes in between has the lock already, and runs
# plainly. `with_graph` then asks the questions in their order. Is there a recording for these numbers? Would a
# replay disturb activations that somebody still needs (`must_run_plainly`)? Is all that was lent back? Do all inputs that are read in
# place lie where they lay? If all answers are right, the recording is replayed, behind whatever the last call left in its stream.

# %%
class GraphedCallable:
    """A callable from a list of inputs to a list of outputs that replays a CUDA graph whenever that is
    safe."""

    def __init__(self, group: GraphSet, fn: Callable, is_backward: bool, results: int | None,
                 mutated: frozenset):
        self.group, self.fn, self.is_backward = group, fn, is_backward
        self.results, self.mutated, self.pick_mutated = results, mutated, picker(sorted(mutated))
        self.outputs: list[int] | None = None                   # their positions, where they are a part of what there is
        self.numbers: list[int] | None = None                   # positions of the arguments that are no tensors, at each call
        self.seen: dict[tuple, list] = {}
        self.given: dict[tuple, list] = {}                      # the memory of the outputs of the first call of these sizes
        self.devices: list | None = None                        # of the outputs, when there is no recording
        self.recordings: dict[tuple, Recording] = {}
        self.made = 0
        self.moves: Counter[int] = Counter()                    # how often an input was no more where it was
        self.counts = {"plain": 0, "recorded": 0, "replayed": 0}
        self.disabled: str | None = None
        self.overwritten = getattr(fn, "overwritten", ())       # positions of inputs whose memory `fn` reuses

    def __call__(self, args: list) -> list:
        group = self.group
        if self.disabled is None:
            with group.lock:
                if not group.busy:     # else a finaliser or a signal handler has come in between
                    group.busy = True
                    try:
                        with group.on_device:
                            out = self.with_graph(args)
                    finally:
                        group.busy = False
                    if out is not None:
                        return out
        return self.plain(args)

    def with_graph(self, args: list) -> list | None:
        """The outputs, or None if this call is to run without the graph. The first call of its sizes runs
        here, too, so that none is recorded before another has finished it."""
        if self.numbers is None:
            self.numbers = [i for i, a in enumerate(args) if not isinstance(a, torch.Tensor)]
        key = tuple([a.hex() if type(a := args[i]) is float else a for i in self.numbers])
        recording = self.recordings.get(key)
        if recording is None:
            return run_or_record(self, key, args)
        if self.must_run_plainly(args):
            return None
        if self.group.out and not self.group.was_returned():
            return run_or_record(self, key, args)
        if not lie_at(args, recording.static, recording.addresses):
            return after_a_move(self, key, args, recording)
        return self.replay(recording, args)

    def replay(self, recording: Recording, args: list) -> list:
        self.group.stream = self.group.recorder.queue_behind(self.group.stream)
        if recording.lent:
            self.group.out.append(recording)
        return run_recording(self, recording, args)

    def must_run_plainly(self, args: list) -> bool:
        """Would a replay disturb activations that somebody needs? A forward pass: those that wait for their
        backward, and those that saved-tensor hooks may keep. A backward pass: its own, if they are retained,
        and those of another forward pass. Or is the caller recording a graph, which can hold no other?"""
        if is_recorded():
            return True
        if not self.is_backward:
            return hooks_see() or self.group.pending
        if torch._C._autograd._get_current_graph_task_keep_graph():
            return True
        own = any(isinstance(a, torch.Tensor) and a.data_ptr() in self.group.stays for a in args)
        return not own and self.group.pending

    def plain(self, args: list) -> list:
        self.counts["plain"] += 1
        return self.fn(args)

    def disable(self, reason: str) -> None:
        self.disabled = reason
        logs.log("perf_hints", OFF, reason)

# %% [markdown]
# ## When to record
#
# Where there is no recording, `run_or_record` runs the function the first time, and records it the second. The first call notes where
# each argument lies and which memory each result has (`first_call`). From this the second knows two things: which inputs are static, and
# which results the caller has dropped in the meantime, so that they can be lent.
#
# An input is static if the same memory came in two calls in a row (`is_static`). For a backward graph the question is
# another one: does its input lie in memory that the forward graph owns, or has found static?
#
# A static input that lies elsewhere in a later call (`after_a_move`) has one of three reasons. The forward pass of this backward pass
# may have run without the graph; then backward does, too. A parameter was replaced, as by loading a state, which is the last call of
# the table above: everything begins anew for these numbers. Or it comes from elsewhere each time; then it is recorded again, and
# copied from now on.
#
# And there are limits to everything, beyond which the graph is disabled with a reason: combinations of sizes, and recordings in all,
# because each of them holds memory.

# %%
def run_or_record(g: GraphedCallable, key: tuple, args: list) -> list | None:
    """First call of these sizes: run. Second: record."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if not g.group.recorder.usable(tensors):
        return g.disable("not all inputs are on one GPU")
    if torch.cuda.device_count() > 1 and any(t.is_cuda for t in tensors):
        g.group.on_device = torch.cuda.device(tensors[0].device)
    if g.must_run_plainly(args):
        return None
    if key not in g.seen:
        return first_call(g, key, args)
    if g.made >= MAX_RECORDINGS:
        reason = f"{MAX_RECORDINGS} recordings were not enough for its sizes and addresses"
        return g.disable(reason)
    static = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and g.moves[i] < 2 and
              is_static(g, a, g.seen[key][i])]
    if g.is_backward and any(g.group.stays.get(args[i].data_ptr(), 0) is None for i in static):
        return None                       # another backward graph was recorded over these activations
    if g.group.out and not g.group.was_returned():
        return run_or_record(g, key, args)
    dropped = {k for k, memory in enumerate(g.given.pop(key, ())) if memory and memory.expired()}
    try:
        g.recordings[key] = make_recording(g, args, static, dropped)
    except RuntimeError as error:
        return g.disable(f"recording failed: {words_of(error)}")
    g.made += 1
    g.counts["recorded"] += 1
    return g.replay(g.recordings[key], args)


def first_call(g: GraphedCallable, key: tuple, args: list) -> list | None:
    """Run as without a graph, and note where the arguments and the results lie."""
    if len(g.seen) >= MAX_KEYS:
        return g.disable(f"more than {MAX_KEYS} combinations of sizes and numbers")
    g.seen[key] = [(StorageWeakRef(a.untyped_storage()), a.data_ptr()) if isinstance(a, torch.Tensor) else None for a in args]
    found = g.plain(args)
    g.devices = devices_of(found)
    g.given[key] = [isinstance(o, torch.Tensor) and o.layout is torch.strided and StorageWeakRef(o.untyped_storage()) for o in found]
    return found


def is_static(g: GraphedCallable, tensor: torch.Tensor, before: tuple[StorageWeakRef, int]) -> bool:
    """Will the next call pass the same memory? For a backward graph: memory that the forward graph owns
    or found static. For others: what has been passed before and was not freed since, though maybe by another tensor
    (statistics of a batch norm come as `x.data`, which is a new one each time)."""
    if g.is_backward:
        return g.group.is_fixed(tensor.data_ptr())
    memory, address = before or (None, None)
    return address == tensor.data_ptr() and memory.cdata == storage_of(tensor) and not memory.expired()


def after_a_move(g: GraphedCallable, key: tuple, args: list, recording: Recording) -> list | None:
    """Some static input is elsewhere. A backward pass of a forward that ran without the graph: run it the
    same way. A parameter that was replaced, as by loading a state: begin anew. If it moves again, record again, and
    copy that input from now on."""
    moved = [i for i, old in zip(recording.static, recording.addresses) if args[i].data_ptr() != old]
    if g.is_backward and not all(g.group.is_fixed(args[i].data_ptr()) for i in moved):
        return None
    del g.recordings[key]
    if not g.is_backward:
        g.moves.update(moved)
        if any(g.moves[i] == 1 for i in moved):
            del g.seen[key]
    return run_or_record(g, key, args)

# %% [markdown]
# ## Making and running a recording
#
# A recording reads from fixed addresses. `static` inputs are there already. All others get a placeholder, memory
# of the same layout into which the input is copied before each replay. Then the function is recorded, and each
# output gets a *recipe*, which says how to hand it out after a replay: a constant as it is; an output that is an
# input, as this input; a result is copied out of the pool, since the next replay will overwrite it; what is saved
# for backward stays where it is.
#
# What an operator gives may itself depend on whether it is recorded. One kind of attention hands its place in the random stream
# to its backward pass as numbers on the CPU, and when it is recorded, when there are no numbers yet, as memory of the GPU. A
# backward pass that is not recorded reads the one as the other, which ends the process. So what comes back has to be on the
# devices that it was on without a recording (`devices_of`).
#
# A result that nobody had kept when the second call came is likely to be dropped before each call. It is lent. Its
# recipe is that of a constant, for it is the same tensor each time, with what the last replay has written. `holders`
# (chapter 2) notes who holds these tensors before the first is handed out, which is this module alone. A later call of any
# graph in the pool compares (`was_returned`). If the caller has kept one, that one is theirs for ever: everything is
# recorded once more, in a new pool, and from then on copied out. (Who hands one to another stream must wait for that stream
# before the next call, or keep the tensor: `record_stream` alone tells the allocator, and nobody else.)

# %%
def devices_of(tensors: list) -> list[torch.device | None]:
    return [t.device if isinstance(t, torch.Tensor) else None for t in tensors]


def make_recording(g: GraphedCallable, args: list, static: list[int], dropped) -> Recording:
    """Record `g.fn` on `args`, with placeholders for every tensor that is not static. Nothing has been
    computed when it returns. dropped: the positions of outputs that nobody has kept until this call; they are lent."""
    fixed = set(static)
    copied = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and i not in fixed]
    inputs = list(args)
    for i in copied:
        a = args[i].detach()
        inputs[i] = torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=a.device).copy_(a)
    inputs = [a.detach() if isinstance(a, torch.Tensor) else a for a in inputs]
    placeholders = [inputs[i] for i in copied]
    written = [(i, inputs[i]) for i in copied if i in g.mutated]
    storages = {storage_of(a): i for i, a in enumerate(inputs)
                if isinstance(a, torch.Tensor) and i not in g.overwritten}
    for i in static if g.is_backward else ():
        address = inputs[i].data_ptr()
        if g.group.stays.get(address) is not None:
            inputs[i], g.group.stays[address] = g.group.stays[address], None
    replay, outputs = g.group.recorder.record(g.fn, inputs)
    if devices_of(outputs) != g.devices:
        raise RuntimeError("a result is on another device than without a recording")
    results = len(outputs) if g.results is None else g.results
    recipes, leaving, lent = [], [], []
    for k, out in enumerate(outputs):
        if not isinstance(out, torch.Tensor):
            recipes.append(("constant", out))
        elif storage_of(out) in storages:
            source = storages[storage_of(out)]
            recipes.append(("input", source, out.shape, out.stride(), out.storage_offset()))
        elif k < results and g.group.lends and k in dropped and holders([out]) is not None:
            recipes.append(("constant", out))
            out.__dict__ = {}                                    # what is written to a `__dict__` that there is can be counted
            lent.append(out)
        elif k < results:
            recipes.append(("leaves", len(leaving)))
            leaving.append(out)
        else:
            recipes.append(("stays", g.group.recorder.borrow(out)))
            g.group.stays[out.data_ptr()] = out
    addresses = [args[i].data_ptr() for i in static]
    if not g.is_backward:
        g.group.addresses.update(addresses)
    out = outputs = None
    return Recording(replay, static, addresses, copied, placeholders, written, recipes, leaving, lent, holders(lent))


# %% [markdown]
# A replay copies in, starts the graph, and copies out. The memory for the results is taken first: if there is none
# left, that has to be known before anything is written. What happens to each result was decided when the graph was
# recorded, and stands in its recipe.

# %% tags=["exercise:run-recording"]
def run_recording(g: GraphedCallable, r: Recording, args: list) -> list:
    """Copy in, replay, copy out. Returns the outputs of `g.fn(args)`, one for each of `r.recipes`, and
    empties `args`.

    The arguments at the positions `r.copied` are copied to `r.placeholders`, `r.replay()` replays the graph, and what it wrote
    into placeholders goes back into the arguments: `r.written` has pairs (position, placeholder). `raise_versions(*tensors)`
    tells autograd which arguments have changed, those at the positions `g.mutated`. `g.counts["replayed"]` counts replays.
    Recipes: ("leaves", k) is a fresh copy of `r.leaving[k]`, with its strides; ("stays",
    tensor) a new alias of it, of which `g.group.inside` gets a weak reference; ("input", i, shape, stride,
    offset) is `_alias_of_input` of argument i; ("constant", value) the value."""
    with torch._C._AutoDispatchBelowAutograd():           # memory may run out: before anything is written
        fresh = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in r.leaving]
        if r.copied:
            torch._foreach_copy_(r.placeholders, [args[i] for i in r.copied])
        r.replay()
        for i, placeholder in r.written:
            args[i].copy_(placeholder)
        if g.mutated:
            raise_versions(*g.pick_mutated(args))
        if fresh:
            torch._foreach_copy_(fresh, r.leaving)
        out = []
        for recipe in r.recipes:
            kind = recipe[0]
            if kind == "leaves":
                out.append(fresh[recipe[1]])
            elif kind == "stays":
                alias = recipe[1].as_strided(recipe[1].shape, recipe[1].stride())
                g.group.inside.append(weakref.ref(alias))
                out.append(alias)
            elif kind == "input":
                out.append(_alias_of_input(args[recipe[1]], *recipe[2:]))
            else:
                out.append(recipe[1])
    args.clear()
    g.counts["replayed"] += 1
    return out


# %%
def _alias_of_input(tensor: torch.Tensor, shape, stride, offset):
    if tensor.shape == shape and tensor.stride() == stride:
        return tensor
    return tensor.as_strided(shape, stride, tensor.storage_offset() + offset)

# %% [markdown]
# ## In the pipeline
#
# The driver asks a `GraphSet` for a version of its lower half that wraps what it compiles, and tells the
# set afterwards how many of the forward's outputs leave the region: results and values to be written back.
# The `copy_` nodes at the end of a functional graph say which inputs it writes. A program with a step on the
# CPU is not recorded: a replay would not run it.

# %%
def graphed(graphs: GraphSet, compile_aten: Callable) -> Callable:
    """`compile_aten(gm, is_backward=...)` whose results are recorded as CUDA graphs of one set."""
    @functools.wraps(compile_aten)
    def compile_graph(gm, *, is_backward: bool = False):
        inputs = gm.graph.find_nodes(op="placeholder")
        mutated = [inputs.index(n.args[0]) for n in gm.graph.find_nodes(op="call_function", target=COPY)]
        compiled = compile_aten(gm, is_backward=is_backward)
        parts = compiled.parts if isinstance(compiled, Apart) else None
        device = compiled.device if parts else compiled
        reason = graphs.recorder.objection(device)
        if reason is not None:
            logs.log("perf_hints", OFF, reason)
            return compiled
        if parts:
            mutated = [k for k, i in enumerate(parts.device_inputs) if i in mutated]
        member = graphs.wrap(device, is_backward=is_backward, mutated=mutated)
        member.outputs = parts and parts.device_outputs
        return replace(compiled, device=member) if parts else member
    return compile_graph


def outputs_that_leave(graphs: GraphSet, count: int) -> None:
    """The first `count` outputs of the forward graph leave the compiled region; the others are saved for its
    backward."""
    if any(m.is_backward for m in graphs.members):
        for m in graphs.members:
            if not m.is_backward:
                m.results = count if m.outputs is None else sum(k < count for k in m.outputs)
