# %% [markdown]
# # Derivatives of derivatives
#
# A gradient penalty is a loss that contains a gradient: `torch.autograd.grad(critic(x).sum(), x, create_graph=True)`. In
# eager this works because the engine, when it is asked to, notes what a backward pass computes, as it notes a
# forward pass. A compiled backward is a kernel, in which there is nothing to note.
#
# But there is a function that computes the same gradients, and it is made of what the compiler can compile: the captured program,
# followed by a call of the engine.
#
#     def gradients(x, w, tangent):
#         y = region(x, w)
#         return torch.autograd.grad(y, (x, w), tangent, create_graph=True)
#
# So a second derivative needs nothing new. This program goes through the same stage as any other, which
# gives it a forward (the gradients) and a backward (their derivative). That backward may be asked for
# its own derivative, in the same way, and so on.
#
# It is compiled when a second derivative is asked for. Until then gradients come from the compiled backward, which
# leaves behind a node of autograd that remembers the inputs of the region. They have to be as they were. What the
# region has saved, the engine watches. Parameters that it did not save can be had from the nodes of the engine. Of the other
# inputs small ones are kept, and large ones only as long as a second derivative is likely: to keep these alive would cost memory in every
# training, for the sake of a few. If an input is gone, or was written, there is an error. A region that draws random numbers
# draws the same ones again: its forward notes the state of the generators, and the program begins there (`drawing_again`).
#
# All this computes the region twice, while eager differentiates what it has computed already: a training step with a gradient
# penalty takes about twice as long. On a CPU, where operators cost little more than their work, such a step is best left to eager.
# But eager must then have run the forward pass, too, when nobody knows yet whether a second derivative follows. So
# it is predicted from the calls before (`expect`). Not under a checkpoint, which runs the region again and asks that both save as much.

# %%
import contextlib
import contextvars
import functools
import operator
import threading
import weakref
from typing import Callable, Sequence

import torch
from torch import fx, is_grad_enabled
from torch.autograd import grad
from torch.utils import _pytree as pytree

from ..ch01_graphs.fake import fake_like, has_memory, is_lazy, version_of
from ..ch01_graphs.generators import generator_of, set_states, states_of
from ..ch01_graphs.graph import call_node, graph_module, interpret, raise_kept_errors
from ..ch01_graphs.layouts import contiguous_strides, copy_with_layout, is_dense
from ..ch01_graphs.trace import backward_pass, backward_state
from ..ch03_capture import hook
from ..errors import MinicompileError, Unsupported
from ..interrupts import as_compiler
from .cleanup import is_random
from .joint import Joint, placeholders_leading
from .undefined import without_tangents

aten = torch.ops.aten

# %% [markdown]
# ## The program
#
# The captured graph is copied, the tangents become further inputs, and the output is one call. The tangents belong to
# results of the region, and the call has to name these. Most are outputs of the program. Where the program returns views of a result,
# the result is what they are views of, their `_base`, and for what is written to an input it is that input at the end (`joint.places`).
# An input that the program writes is copied first, for it is not to be written again.

# %%
Missing = tuple[frozenset, frozenset]       # the tangents that are absent, and the gradients that nobody asks for, by their positions


def engine(outputs, inputs, tangents):
    """One call of the autograd engine, whose results it can differentiate again."""
    with backward_pass(), backward_state(), torch.enable_grad():
        return grad(outputs, inputs, tangents, create_graph=True, allow_unused=True)


def copied(x: torch.Tensor) -> torch.Tensor:
    """`x` as it is now, with its history."""
    with torch.enable_grad():
        return x.clone() if is_dense(x) else copy_with_layout(x, x.shape, x.stride(), x.dtype, x.device)


def base_of(view: torch.Tensor) -> torch.Tensor:
    return view._base


def gradient_program(gm: fx.GraphModule, joint: Joint, missing: Missing) -> fx.GraphModule:
    """The captured graph `gm`, followed by a call of the engine: (inputs, present tangents) -> gradients, None where nobody
    asks for one."""
    absent, unasked = missing
    graph, env = fx.Graph(), {}
    inputs = gm.graph.find_nodes(op="placeholder")
    given = [graph.placeholder(node.name) for node in inputs]
    present = [i for k, i in enumerate(joint.differentiable) if k not in absent]
    tangents = tuple([graph.placeholder(f"given{i}") for i in present])
    for node, x in zip(inputs, given):
        env[node] = graph.call_function(copied, (x,)) if node.name in joint.mutated else x
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "output"):
            env[node] = graph.node_copy(node, env.__getitem__)
    outputs, = gm.graph.output_node().args

    def result(i):
        if i >= joint.results:
            return env[inputs[joint.written[i - joint.results]]]
        place, is_view = joint.places[i]
        whole = isinstance(outputs, fx.Node)            # the program is one call
        found = graph.call_function(operator.getitem, (env[outputs], place)) if whole else env[outputs[place]]
        return graph.call_function(base_of, (found,)) if is_view else found
    asked = [k for k in range(len(joint.gradients)) if k not in unasked]
    call = graph.call_function(engine, ([*map(result, present)], [given[joint.gradients[k]] for k in asked], tangents))
    gradients = {k: graph.call_function(operator.getitem, (call, place)) for place, k in enumerate(asked)}
    graph.output(tuple([gradients.get(k) for k in range(len(joint.gradients))]))
    return graph_module(gm, graph)


# %% [markdown]
# `behind_gradients` follows the gradients back through the graph, to all that they are computed from. The running statistics of a batch
# norm in training are not among them, also where it is still one operator (`read_by`), so such an input may hold anything by now. Nor is
# what is read only where an absent tangent leads.

# %%
def behind_gradients(joint: Joint, absent: frozenset) -> list[int]:
    """For each gradient of a region, without the tangents at the positions `absent`, the placeholders, inputs and then tangents, that it
    depends on: a sum of `1 << position`."""
    placeholders = joint.gm.graph.find_nodes(op="placeholder")
    tangents, gm = [n.name for n in placeholders if "tangent" in n.meta], joint.gm
    if absent:
        gm = without_tangents(gm, {tangents[k] for k in absent})
    bits, behind = {node.name: 1 << i for i, node in enumerate(placeholders)}, {None: 0}
    for node in gm.graph.nodes:
        behind[node] = bits.get(node.name) or functools.reduce(operator.or_, [behind[a] for a in read_by(node)], 0)
    return [behind[g] for g in gm.graph.output_node().args[0][-len(joint.gradients):]]


def read_by(node: fx.Node) -> Sequence[fx.Node]:
    """The nodes that `node` is computed from. Of a batch norm in training only two results depend on the running statistics."""
    source = node.args[0] if node.target is operator.getitem else node
    if source.target is not aten._native_batch_norm_legit_functional.default or not source.args[5]:
        return node.all_input_nodes
    statistics = source.args[3:5]
    if source is not node:
        return [source, *statistics] if node.args[1] in (3, 4) else [source]
    return [a for a in node.all_input_nodes if a not in statistics]


# %% [markdown]
# The region runs again, so it draws again, and must draw the same numbers: dropout has to hide what it hid the first time. The states of
# the generators are noted before the region runs. While a CUDA graph is recorded a generator does not tell its state.

# %%
def generators_of(joint: Joint) -> list[torch.Generator]:
    """The default generators that a region draws from. (One of the program's own breaks the graph.)"""
    drawn = [v for node in joint.gm.graph.nodes if is_random(node) for v in pytree.tree_leaves(node.meta["val"])]
    return [*map(generator_of, {v.device for v in drawn if isinstance(v, torch.Tensor)})]


def is_recorded() -> bool:
    """Is what is launched now recorded for a CUDA graph, by whoever?"""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def states_before(generators: list) -> list | None:
    """The states from which a region will draw; None while a CUDA graph is captured, when a generator does not tell."""
    if not generators:
        return []
    return None if is_recorded() else states_of(generators)


@contextlib.contextmanager
def drawing_again(states: Sequence):
    """Random numbers are those that came after these states; afterwards the generators are where they were."""
    before = states_of(generator for generator, _ in states)
    try:
        set_states(states)
        yield
    finally:
        set_states(before)


# %% [markdown]
# ## The region again
#
# `Again` belongs to a region. It remembers how the region was compiled, and compiles one program for each set of absent
# tangents and of gradients that nobody asks for (`missing`), and of the strides that the other tangents have. The program is recorded as
# the region was, under the autocast of that time,
# and not of the backward pass. The fakes of the inputs are those of the region. If sizes vary, they are made from the present
# inputs, one program for each set of sizes, since it is too late for new guards. What cannot be compiled, and what comes after `MOST`
# programs, runs operator by operator, in eager.
#
# A region that may run as it was captured (the driver sets `captured`) does so for the next calls when a second derivative was
# taken: for one call, then for two, then for four. In between, one compiled call shows whether there still are second
# derivatives. Its program is not worth compiling. Where fewer than one compiled call in `RARE` is differentiated twice,
# as with a penalty at every sixteenth step, the region stays compiled.

# %%
MOST, RARE, FARTHEST = 8, 4, 256


@functools.cache
def transforms() -> torch._C.DispatchKeySet:
    """What of PyTorch sees each operator under `vmap`, and refuses those that draw random numbers."""
    names = "FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode", "FuncTorchVmapMode", "VmapMode"
    return functools.reduce(operator.or_, [torch._C.DispatchKeySet(torch._C._parse_dispatch_key(name)) for name in names])


class Derived:
    """What is known of the gradients of a region without what is `missing`. behind: as `behind_gradients` gives it; needed: the inputs that
    they depend on; history: what `Again.history` has found."""

    def __init__(self, gm, joint: Joint, count: int, missing: Missing):
        self.make = functools.partial(gradient_program, gm, joint, missing)
        self.behind, self.history = behind_gradients(joint, missing[0]), None
        together = functools.reduce(operator.or_, [bits for k, bits in enumerate(self.behind) if k not in missing[1]], 0)
        self.needed = {i for i in range(count) if together >> i & 1}

    @functools.cached_property
    def program(self) -> fx.GraphModule:
        return self.make()


class Again:
    """The gradients of a region, as a function that can be differentiated: `again(missing, inputs, tangents)`. stage: `compile_training`.
    parameters: inputs that are leaves and have gradients, so that the engine has a node for them; apart: those that have none, which
    come detached; last: whether this is one of the programs above, whose inputs are all kept."""

    def __init__(self, gm, fakes, joint: Joint, stage: Callable, compile_aten, prepare, parameters: set[int], apart: set[int], last: bool):
        self.fakes, self.arguments = fakes, (getattr(compile_aten, "__wrapped__", compile_aten), prepare)
        self.parameters, self.apart, self.last = parameters, apart, last
        self.inputs = sum("tangent" not in n.meta for n in joint.gm.graph.find_nodes(op="placeholder"))
        self.derived = functools.lru_cache(64)(functools.partial(Derived, gm, joint, self.inputs))
        names, self.whole = [node.name for node in gm.graph.find_nodes(op="placeholder")], self.derived((frozenset(), frozenset()))
        self.overwritten = {i for i in self.whole.needed if names[i] in joint.mutated}
        self.exposed = {i for i, name in enumerate(names) if name in joint.exposed}
        self.generators = generators_of(joint)
        self.stage, self.known, self.lock, self.context = stage, {}, threading.Lock(), contextvars.copy_context()
        self.autocast = [(d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in ("cpu", "cuda")]
        self.vary = any(type(x) in (torch.SymInt, torch.SymFloat) for f in fakes
                        for x in ([*f.shape, *f.stride()] if isinstance(f, torch.Tensor) else [f]))
        self.captured: Callable | None = None           # the captured graph, if it may run in the place of the region,
        self.ahead, self.next, self.calls = 0, 1, 0     # for how many calls, and the next time; compiled calls since a second derivative
        self.expected = False                           # has there been one?

    def expect(self) -> None:
        """A second derivative was taken: of how many of the next calls is there one?"""
        self.expected = True
        if self.captured is not None and self.calls:
            self.ahead, self.next = (self.next, min(2 * self.next, FARTHEST)) if self.calls <= RARE else (0, 1)
            self.calls = 0

    def as_captured(self, *inputs):
        self.ahead -= 1
        return self.captured(*inputs)

    def __call__(self, missing: Missing, inputs: Sequence, tangents: Sequence):
        if self.captured is not None:
            return self.in_eager(missing)(*inputs, *tangents)
        sizes = tuple([tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in inputs]) if self.vary else ()
        key = missing, sizes, tuple([(t.requires_grad, t.stride()) for t in tangents])
        with self.lock:
            run = self.known.get(key)
            if run is None and len(self.known) < MOST:
                run = self.known[key] = as_compiler(self.context.copy().run, self.build, missing, inputs, tangents)
        return (run or self.in_eager(missing))(*inputs, *tangents)

    @contextlib.contextmanager
    def as_recorded(self):
        with torch.enable_grad(), torch.autocast("cpu", *self.autocast[0][1:]), torch.autocast("cuda", *self.autocast[1][1:]):
            yield

    def models(self, inputs: Sequence) -> list:
        """Fakes to record a program with."""
        models = inputs if self.vary else self.fakes
        return [fake_like(x, f.requires_grad) if isinstance(x, torch.Tensor) else x for x, f in zip(models, self.fakes)]

    def build(self, missing, inputs, tangents) -> Callable:
        given = self.models(inputs) + [fake_like(t, t.requires_grad) for t in tangents]
        try:
            with self.as_recorded():
                return self.stage(self.derived(missing).program, given, *self.arguments, last=True)
        except Unsupported:
            return self.in_eager(missing)

    def history(self, missing: Missing, inputs: Sequence | str, tangents: Sequence) -> list[int]:
        """For each gradient the inputs, and then the present tangents, for which it can be differentiated: a sum of `1 << position`. If the
        inputs cannot be had, and none of the program was recorded before, all that the gradient depends on."""
        derived = self.derived(missing)
        if self.vary and isinstance(inputs, str):
            return derived.history or derived.behind
        with self.lock:
            if derived.history is None:
                derived.history = as_compiler(self.context.copy().run, self.record, missing, inputs, tangents)
        return derived.history

    def record(self, missing, inputs, tangents) -> list[int]:
        given = self.models(inputs) + [fake_like(t, True) for t in tangents]
        absent, places = missing[0], [*range(self.inputs)]
        places += [self.inputs + k for k in range(len(tangents) + len(absent)) if k not in absent]
        try:
            with self.as_recorded():
                leading = placeholders_leading(self.derived(missing).program, given)
        except Unsupported:
            return self.derived(missing).behind
        return [sum(1 << places[i] for i in found) for found in leading]

    def in_eager(self, missing, many: bool = False) -> Callable:
        """many: under `vmap`, where each tangent stands for many, and the region is computed once, as before."""
        program = self.derived(missing).program

        def on_node(node, args, kwargs):
            with contextlib.nullcontext() if node.target is engine else torch._C._ExcludeDispatchKeyGuard(transforms()):
                return call_node(program, node, args, kwargs)
        asks = [isinstance(f, torch.Tensor) and f.requires_grad for f in self.fakes]

        def run(*inputs):       # what comes detached required a gradient when the program was made
            given = [x.detach().requires_grad_() if asked and not x.requires_grad else x for x, asked in zip(inputs, asks)]
            with self.as_recorded():
                return interpret(program, [*given, *inputs[len(given):]], on_node if many else None)
        return run


def resolved(t: torch.Tensor) -> torch.Tensor:
    """`t`, whose negation or conjugation may be pending, as a generated kernel reads it."""
    return copy_with_layout(t, t.shape, contiguous_strides(t.shape), t.dtype, t.device) if is_lazy(t) else t


# %% [markdown]
# ## What a call remembers
#
# An input of at most a megabyte is kept, and so is every input of the programs above, which `derive_again` makes for one
# call. A parameter that is a leaf has a node of the engine, `AccumulateGrad`, which knows its `variable`; one with no gradient
# comes detached, and is kept, since its memory is the model's. Large ones are weak. But most programs that take second derivatives do
# so from their first step on. So the first calls of a region keep large inputs, too, and copy those small ones which eager does not save,
# so that the program may write to them later. Where second derivatives have been taken, this goes on.
# What the region itself overwrites, and needs, is copied in all these cases.
#
# `Inputs` knows, for a region, where its backward finds each input: among the saved values, at a node of the engine, or in
# what `note` has kept of the call. `note` runs before every forward, and so does little. `find` runs where gradients are asked
# for with `create_graph=True`.

# %%
LARGE, FIRST = 1 << 20, 4
WRITTEN_SINCE = "one of its inputs was modified in place since"


def empty_with_history(x: torch.Tensor) -> torch.Tensor:
    """Leads where `x` came from, and keeps none of its memory."""
    with torch.enable_grad():
        return x.narrow(0, 0, 0).clone()


class Inputs:
    """Where the inputs of a region are found at backward. vals: the fakes of all inputs; saved: for each saved value the input that it is,
    or None. leaves: inputs that the engine has a node for; others: those that have to be remembered."""

    def __init__(self, vals: Sequence, saved: Sequence, again: Again):
        tensors = [i for i, val in enumerate(vals) if isinstance(val, torch.Tensor)]
        self.again, self.count, self.saved = again, len(vals), {i: place for place, i in enumerate(saved) if i is not None}
        unsaved = [i for i in range(self.count) if i not in self.saved]
        self.leaves = [(i, tensors.index(i)) for i in unsaved if i in again.parameters - again.overwritten]
        self.numbers = [i for i in unsaved if i not in tensors]
        self.others = [i for i in unsaved if i in tensors and i not in dict(self.leaves)]
        self.all_saved = not unsaved

    def note(self, inputs: Sequence) -> tuple[list, list, list]:
        if self.all_saved:
            return [], [], []
        held = [self.hold(i, inputs[i]) for i in self.others]
        return held, [inputs[i] for i in self.numbers], [version_of(inputs[i]) for i, _ in self.leaves]

    def hold(self, i: int, x: torch.Tensor) -> tuple[torch.Tensor | Callable | None, int, torch.Tensor | None]:
        """(input `i`, a copy of it, a weak reference, or None; its version; a tensor with its history, where that has no node which
        knows its tensor)."""
        again, small = self.again, x.nbytes <= LARGE
        likely = again.expected or again.calls <= FIRST
        if not (small or likely or again.last):
            kept = None if i in again.overwritten else weakref.ref(x)
            return kept, version_of(x), empty_with_history(x) if x.requires_grad and not x.is_leaf else None
        if i in again.overwritten or small and likely and i in again.exposed and not again.last:
            x = copied(x)
        return x, version_of(x), x

    def find(self, ctx, noted, saved: Sequence, needed: set[int]) -> list | str:
        """The inputs, or why they cannot be had. needed: those that have to be as they were."""
        others, numbers, versions = noted
        found = {i: saved[place] for i, place in self.saved.items()} | dict(zip(self.numbers, numbers))
        watched = {i: (getattr(ctx.next_functions[k][0], "variable", None), version) for (i, k), version in zip(self.leaves, versions)}
        watched |= {i: (held() if type(held) is weakref.ref else held, version) for i, (held, version, _) in zip(self.others, others)}
        for i, (x, version) in watched.items():
            if x is None:
                lost = i in self.again.overwritten
                return "it overwrites a large input that its gradients depend on" if lost else "one of its inputs is not alive any more"
            if i in needed and version_of(x) != version:
                return WRITTEN_SINCE
            found[i] = x
        return [self.as_it_stays(i, found[i]) for i in range(self.count)]

    def as_it_stays(self, i: int, x):
        """Input `i` as `Derivative` saves it. What the program may go on to write is copied: eager's formulas save less."""
        if not isinstance(x, torch.Tensor):
            return x
        again = self.again
        small = x.nbytes <= LARGE and not (again.last or i in again.parameters or i in again.apart)
        return copied(x) if small or x.is_inference() else x


# %% [markdown]
# ## The node
#
# `Derivative` hands the gradients through, and saves the inputs and the tangents, so that from here on the engine notices if
# one is written. Its backward runs the program on them, and asks the engine for the gradients of what came out. If these are to have
# a history, they are computed from the inputs with theirs. Otherwise copies without a history will do, which keeps the engine from
# walking on.
#
# A gradient that depends on nothing with a history, as that of a sum does if its tangent is a number, has none either. That of a maximum
# depends on the input, but cannot be differentiated for it. What eager would say, a recording of the program knows (`history`).
#
# If the inputs could not be found, the node saves what leads to them, so that whoever asks for the second derivative reaches it, and gets
# an error.

# %%
class Derivative(torch.autograd.Function):
    """Identity on the first `count` tensors, whose derivative is `derive(the other tensors, gradients)`. plain: which have none."""

    @staticmethod
    def forward(ctx, derive, count, plain, *tensors):
        ctx.derive, ctx.count = derive, count
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[count:])
        results = tuple([g.detach() if has_memory(g) else g.view_as(g) for g in tensors[:count]])
        ctx.mark_non_differentiable(*[results[k] for k in plain])
        return results

    @staticmethod
    def backward(ctx, *seconds):
        return None, None, None, *[None] * ctx.count, *hook.run(None, ctx.derive, ctx.saved_tensors, seconds)


def refuse(reason: str, tensors, seconds):
    raise MinicompileError(f"A compiled region was differentiated twice (create_graph=True), and {reason}. Run the function that needs the "
                           "second derivative with minicompile.disable, or compile it whole, with its call of torch.autograd.grad.")


def separate(x):
    """`x` as a tensor of its own, so that a gradient for it leaves out what other inputs were computed from it."""
    return x.view_as(x) if isinstance(x, torch.Tensor) and x.requires_grad else x


def derive_again(again: Again, missing: Missing, template: list, states: list, tensors, seconds) -> list:
    """Gradients for `tensors`, inputs and tangents, of what `again` computes from them. template: its arguments, without tensors;
    states: of the generators, before the region drew from them."""
    create = is_grad_enabled()
    again.expect()
    with torch.enable_grad():
        tensors = [separate(t) if create or not t.requires_grad else t.detach().requires_grad_() for t in tensors]
        rest = iter(tensors)
        inputs = [next(rest) if x is torch.Tensor else x for x in template]
        many = not all(has_memory(s) for s in seconds if s is not None)
        with drawing_again(states), torch._C._ExcludeDispatchKeyGuard(transforms()) if many else contextlib.nullcontext():
            computed = again(missing, inputs, [resolved(t) for t in rest])
        pairs = [(g, s) for g, s in zip([g for g in computed if g is not None], seconds, strict=True) if s is not None and g.requires_grad]
        wanted = [t for t in tensors if t.requires_grad]
        if not pairs or not wanted:
            return [None] * len(tensors)
        results, seconds = zip(*pairs)
        raise_kept_errors(results)
        found = iter(grad(results, wanted, seconds, create_graph=create, allow_unused=True))
    return [next(found) if t.requires_grad else None for t in tensors]
