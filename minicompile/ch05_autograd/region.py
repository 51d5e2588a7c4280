# %% [markdown]
# # At run time
#
# One `torch.autograd.Function` joins the two compiled graphs to the autograd engine: its forward calls the
# compiled forward and saves what the partitioner chose, its backward calls the compiled backward. To the
# engine the whole region is a single node.
#
# What surrounds it keeps the promises that a function makes to its caller in eager: inputs that it modifies
# are modified, outputs that alias inputs or each other do so, flags and strides are the same. All of it is
# decided at compile time; a call pays only for what it uses.

# %%
import contextvars
import functools
import threading
from collections import Counter
from typing import Callable, Sequence

import torch
from torch import fx, is_grad_enabled

from ..ch01_graphs.fake import has_memory, is_lazy, version_of
from ..ch01_graphs.layouts import contiguous_strides, copy_with_layout, same_strides
from ..ch03_capture import hook
from .callables import Compile, call_compiled, interpret_aten, picker, with_grad_mode
from .joint import Joint
from .outputs import as_new, complex_results, has_base
from .partition import Partition
from .second import WRITTEN_SINCE, Again, Derivative, Inputs, Missing, derive_again, drawing_again, refuse, separate, states_before
from .undefined import without_tangents

# %% [markdown]
# ## Tangents
#
# The backward graph was compiled for tangents with the strides of the outputs, or, where an output overlaps itself,
# for row-major ones. The engine may deliver
# others (an expanded scalar, after `sum`), or none, where the caller did not use an output. Each set of
# missing tangents has a backward graph of its own, compiled when it first occurs. The set that is compiled in
# advance, together with forward, is a guess: if one of the outputs is a scalar, it is a loss, and only losses
# are differentiated.

# %%
def match_tangent(tangent, shape, stride, dtype, device):
    """`tangent` as the compiled backward expects it."""
    if (tangent.stride() == stride or same_strides(shape, tangent.stride(), stride)) and not is_lazy(tangent):
        return tangent
    return copy_with_layout(tangent, shape, stride, dtype, device)


def hooks_see(top=torch._C._autograd._top_saved_tensors_default_hooks) -> bool:
    """Do saved-tensor hooks, such as those of a checkpoint, see what is saved now?"""
    return top(False) is not None


def as_saved(t: torch.Tensor, shape, stride, dtype, device) -> torch.Tensor:
    """What saved-tensor hooks gave back, as it was saved: a copy of theirs may lie otherwise, or be rounded."""
    if tuple(t.shape) != shape:
        raise RuntimeError(f"a saved-tensor hook gave back a tensor of shape {tuple(t.shape)}, not {shape}")
    if t.dtype is dtype and t.device == device:
        return match_tangent(t, shape, stride, dtype, device)
    return copy_with_layout(t, shape, stride, dtype, device)


def expected_absent(joint: Joint) -> frozenset[int]:
    """The guess: positions (among the differentiable outputs) of tangents that will be None."""
    tangents = _tangents(joint)
    scalars = {k for k, t in enumerate(tangents) if t.dim() == 0}
    return frozenset(range(len(tangents))) - scalars if scalars else frozenset()


def _tangents(joint: Joint) -> list[torch.Tensor]:
    return [n.meta["val"] for n in joint.gm.graph.nodes if "tangent" in n.meta]


Backward = Callable[..., tuple[Callable, set[int]]]
MOST_UNASKED = 4


def backward_versions(halves: Partition, compile_aten: Compile) -> Backward:
    """`version(absent, unasked)` is the compiled backward without those tangents and those gradients, and the positions of the saved
    values that it reads; `version.reads` gives only those, and `version.interpreted` runs it operator by operator."""
    tangents = [n.name for n in halves.backward.graph.nodes if n.op == "placeholder"][len(halves.saved):]
    context, lock, known, asked_once = contextvars.copy_context(), threading.Lock(), {}, set()

    @functools.cache
    def graph(absent: frozenset, unasked: frozenset = frozenset()) -> tuple[fx.GraphModule, set[int]]:
        lost = {i for i, behind in enumerate(halves.reached) if i in unasked or behind and behind <= absent}
        gm = without_tangents(halves.backward, {tangents[k] for k in absent}, lost) if absent or unasked else halves.backward
        inputs = gm.graph.find_nodes(op="placeholder")
        return gm, {i for i, node in enumerate(inputs[:len(halves.saved)]) if node.users}

    def version(absent: frozenset, unasked: frozenset = frozenset()) -> tuple[Callable, set[int]]:
        key = absent, unasked
        found = known.get(key)
        if found is None:
            with lock:
                if key not in known:
                    gm, reads = graph(*key)
                    try:
                        compiled = with_grad_mode(False, context.copy().run, functools.partial(compile_aten, gm, is_backward=True))
                    except RecursionError:                  # where the program is now; the next call may come from less deep
                        return interpret_aten(gm), reads
                    known[key] = compiled, reads
                found = known[key]
        return found

    def pays(absent: frozenset, unasked: frozenset) -> bool:
        """Whether to leave gradients out that nobody asks for: from the second time on, and of a few sets."""
        key = absent, unasked
        if key in asked_once or len(asked_once) == MOST_UNASKED:
            return key in asked_once
        asked_once.add(key)
        return False

    version.pays = pays
    version.reads = lambda *key: graph(*key)[1]
    version.interpreted = lambda *key: interpret_aten(graph(*key)[0])
    return version


def _tangent_layouts(joint: Joint) -> list[tuple | None]:
    """(shape, strides, dtype, device) of each tangent; None where it has symbolic sizes."""
    layouts = []
    for val in _tangents(joint):
        static = not any(isinstance(s, torch.SymInt) for s in (*val.shape, *val.stride()))
        layouts.append(layout_of(val) if static else None)
    return layouts


def layout_of(t: torch.Tensor, form="of the output") -> tuple:
    return tuple(t.shape), t.stride() if form == "of the output" else contiguous_strides(t.shape), t.dtype, t.device

# %% [markdown]
# ## The function
#
# Everything goes through `save_for_backward`: inputs, because the engine then notices if one was modified
# in between, as it does in eager; intermediates, because they are freed after the backward pass, kept with
# `retain_graph=True`, and seen by saved-tensor hooks.
#
# For eager, "after the backward pass" means after the backward of one operator. Here one node spans the
# whole region, so backward clears the saved tensors itself as it begins (unless the graph is retained), and
# the list of arguments that the compiled code receives, and empties, holds the last references. Otherwise
# all activations would stay alive until the last gradient is computed.
#
# The compiled backward goes one step further, and writes gradients over activations that it has no more use
# for (`overwritten`). That must not be seen: not by a second backward pass over a retained graph, nor by
# saved-tensor hooks, which may have kept the tensor. Those calls get copies. And what a hook gives back may lie otherwise than
# what it was given (`as_saved`).
#
# `torch.autograd.grad(loss, x)` asks for one gradient of many, as an attack on a model does, guided sampling, or an equation that is
# solved by training. Eager does not run the nodes that lead to the weights only, which saves a third of a step of matrix products. Here
# such a pass gets a version of the backward without the gradients that nobody asks for, compiled when the same set comes for the second
# time (`pays`), and no more than `MOST_UNASKED` of them: a program may go through its parameters one by one.
#
# The engine refuses to hand out the saved tensors if one of them was modified. That may be one that eager's backward would not have
# asked for: where tangents are absent, or where nobody asks for the gradient that reads it, as `torch.autograd.grad(y, x)` asks for that
# of `x` only. Then the tensors are taken without the engine's check, their versions are compared here, and what runs is a version of our
# backward that does not read it (`version_for`). The versions of the inputs that are watched (`saved_after_writing`) are compared, too,
# by way of an alias.
#
# `x.data = other` is no write: it takes the memory of `x` away. A formula that has saved `x` itself finds the new memory there, and one
# that has saved a view of it, as a product of `x.t()` does, the old. So where eager saves views of an input only, an alias of it is saved
# here (`alias_of`). Parameters are many, and are saved as they are.
#
# One region may hold what are several graphs in eager: `d_loss.backward()` frees one of them, and then comes
# `g_loss.backward()`. What is needed for outputs whose graphs were not touched (`overlapping`) is kept. A product saves its
# factors for eager's backward, also where one is a number that is a part of our kernel. Then a second backward raises, and so
# must that of a region that has nothing to save. And `torch.autograd.grad(d_loss, x)` for an `x` that only the other loss reads comes
# here, where in eager it does nothing: all is kept then (`somebody_asks`).
#
# With `create_graph=True` the gradients that leave here depend, by way of the saved tensors, on all inputs of the region, and
# whoever asks for that derivative gets it from [`second.py`](code:minicompile/ch05_autograd/second.py), or an error that says
# why not.

# %%
def saved_tensors(region, ctx, absent: frozenset) -> tuple[list[torch.Tensor], set[int]]:
    """The saved tensors, and which of the saved values were written since (`ctx.modified` says then what the engine said). Otherwise
    RuntimeError, as the engine raises it. ctx.versions: of the tensors when they were saved; None where the engine's check is enough.
    ctx.left: those that a backward of others has left, by position, or None. ctx.alive: the tangents whose graphs are, in eager."""
    order, present = region.order, region.every - absent
    if not order:
        if not present <= ctx.alive:
            raise RuntimeError(TWICE)
        return [], set()
    try:
        return list(ctx.saved_tensors), set()
    except RuntimeError as error:
        left = ctx.left is not None and present <= ctx.alive and not is_grad_enabled()
        if not left and (ctx.versions is None or ctx.left is not None):
            raise
        ctx.modified = MODIFIED if left else str(error)
    tensors = [ctx.left.get(place) for place in range(len(order))] if left else [saved.data for saved in ctx._raw_saved_tensors]
    if ctx.versions is None:            # hooks have given these back, and know no versions
        return tensors, set()
    return tensors, {i for i, place in order.items() if tensors[place] is not None and tensors[place]._version != ctx.versions[place]}


def version_for(region, ctx, absent: frozenset, unasked: frozenset, written: set[int]) -> tuple[Callable, frozenset]:
    """The compiled backward, and the gradients that it leaves out: those that nobody asks for, if that saves time at many calls, or if
    they read what was `written` since. unasked: those of a pass that does not go to all leaves."""
    if not (unasked and region.backward.pays(absent, unasked)):
        compiled, reads = region.backward(absent)
        if not written & reads:
            return compiled, frozenset()
        unasked = unasked or gradients_unasked(region, ctx)
    compiled, reads = region.backward(absent, unasked)
    if written & reads:
        raise RuntimeError(ctx.modified)
    return compiled, unasked


def gradients_unasked(region, ctx) -> frozenset[int]:
    """The gradients that the running pass of the engine has no use for."""
    nodes = [ctx.next_functions[place][0] for place in region.edges]
    return frozenset([k for k, node in enumerate(nodes) if node is None or not will_execute(node)])


def somebody_asks(region, absent: frozenset, unasked: frozenset) -> bool:
    """Whether somebody asks for a gradient to which, in eager, a tangent leads that is there."""
    return any(k not in unasked and not (behind and behind <= absent) for k, behind in enumerate(region.reached))


def will_execute(node) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:            # the engine does not say it of a leaf whose gradient `torch.autograd.grad` gives
        return True


# Does the running pass of the engine go to all leaves, as `backward()` does? `torch.autograd.grad` and `inputs=` ask for some gradients.
# The engine says it of checkpoints, of which some need the first.
wants_all = torch.autograd.Variable._execution_engine.is_checkpoint_valid

TWICE = ("Trying to backward through the graph a second time (or directly access saved tensors after they have already been freed). "
         "Specify retain_graph=True if you need to.")
MODIFIED = ("one of the variables needed for gradient computation has been modified by an inplace operation: "
            "a tensor that the compiled region saved")


def check_watched(watched: list, absent: frozenset) -> None:
    """watched: (alias of an input, the version that it should be at, the tangents for which that matters)."""
    for alias, version, tangents in watched:
        if version_of(alias) != version and not tangents <= absent:
            raise RuntimeError("one of the variables needed for gradient computation has been modified by an "
                               f"inplace operation: a tensor of shape {tuple(alias.shape)} that the compiled "
                               f"region wrote is at version {alias._version}; expected version {version}")


def alias_of(x: torch.Tensor) -> torch.Tensor:
    """`x` with its memory of now, its history and its version counter."""
    return with_grad_mode(True, x.view_as, x) if x.requires_grad else x.detach()


def sharing_memory(saved: list, others: list) -> set[int]:
    """Positions of the saved tensors that share memory with one another or with one of `others`."""
    keys = [t.untyped_storage()._cdata if isinstance(t, torch.Tensor) else None for t in [*saved, *others]]
    times = Counter(keys)
    return {i for i, key in enumerate(keys[:len(saved)]) if times[key] > 1}


# %% [markdown]
# A `Region` holds what is known before any call: how many results there are, which of them have no gradient, which
# layout is expected of each tangent, which saved values are numbers. `shared` is found out
# at the first call: the positions of saved tensors that share memory with others, and that the backward graph must
# therefore not overwrite.

# %%
class Region:
    """A partitioned graph as one node of the engine: what of it is known at compile time."""

    def __init__(self, joint: Joint, halves: Partition, forward: Callable, backward: Backward, again: Again):
        self.joint, self.forward, self.backward, self.reached = joint, forward, backward, halves.reached
        self.results = joint.results + len(joint.written)            # how many, with what is written to inputs
        self.plain = [i for i in range(self.results) if i not in joint.differentiable]
        self.given = picker(joint.differentiable)               # of the tangents of all results
        arity, places = sum(n.op == "placeholder" for n in halves.forward.graph.nodes), {i: k for k, i in enumerate(joint.gradients)}
        self.spread = picker([places.get(i, -1) for i in range(arity)])      # of all gradients and None: one for each input
        inputs = [n.meta["val"] for n in joint.gm.graph.find_nodes(op="placeholder") if "tangent" not in n.meta]
        tensors = [i for i, val in enumerate(inputs) if isinstance(val, torch.Tensor)]
        self.edges = [tensors.index(i) for i in joint.gradients]        # the place of each gradient among the edges of the node
        self.layouts = _tangent_layouts(joint)
        forms = [n.meta["tangent"] for n in joint.gm.graph.nodes if "tangent" in n.meta]
        self.sizes_of = [(i, form) for i, form, layout in zip(joint.differentiable, forms, self.layouts) if layout is None]
        self.every = frozenset(range(len(joint.differentiable)))
        self.several = len(self.every) > 1 or len(joint.gradients) > 1      # may somebody ask for a part of the gradients?
        self.complex = complex_results(joint)
        outputs, saved = len(halves.forward.graph.output_node().args[0]), halves.saved_inputs
        extra = iter(range(self.results, outputs))
        self.saved = picker([next(extra) if i is None else outputs + i for i in saved])      # of all outputs and inputs
        vals = [n.meta["val"] for n in halves.backward.graph.find_nodes(op="placeholder")[:len(saved)]]
        self.numbers = [i for i, val in enumerate(vals) if not isinstance(val, torch.Tensor)]
        self.order = {i: place for place, i in enumerate(i for i in range(len(saved)) if i not in self.numbers)}
        self.shared: set[int] | None = None      # saved values with memory in common; the first call knows
        self.new = False                         # and whether results are as an operator has made them
        self.inference: list[int] = []           # saved values that are inference tensors, as guards say of all calls
        self.aliased = [k for k, i in enumerate(saved) if i in joint.viewed]
        usual = len(self.every) == 1 and self.order and not self.numbers
        self.only = joint.differentiable[0] if usual else None      # the one result with a gradient
        self.again = again
        self.inputs = Inputs(inputs, saved, again)

    def layouts_of(self, ctx, absent: frozenset) -> list:
        """The layout of each tangent that is not absent."""
        if not (self.sizes_of or absent):
            return self.layouts
        dynamic = iter(ctx.layouts if self.sizes_of else ())
        layouts = [layout or next(dynamic) for layout in self.layouts]
        return [layout for k, layout in enumerate(layouts) if k not in absent]


# %% [markdown]
# `run_forward` is what the engine sees as this node's forward. It calls the compiled graph, whose first outputs
# are results and whose further ones are saved. A saved value that is an input is taken from the inputs. Tensors go
# through `save_for_backward`, so that hooks see them and the engine frees them; numbers lie on `ctx`. The versions
# of what was saved are noted where backward may run several times. At the end those results that have no gradient are marked.

# %%
def run_forward(region: Region, ctx, *inputs):
    joint, count = region.joint, region.results
    if region.again.generators:
        ctx.states = states_before(region.again.generators)
    ctx.noted = region.inputs.note(inputs)
    outputs = call_compiled(region.forward, [*inputs])
    saved = region.saved((*outputs, *inputs))
    if region.shared is None:
        region.shared = sharing_memory(saved, [*inputs, *outputs[:count]])
        region.inference = [i for i, s in enumerate(saved) if isinstance(s, torch.Tensor) and s.is_inference()]
        region.new = not (region.complex or getattr(region.forward, "leaves_history", True) or any(map(has_base, outputs[:count])))
    if region.inference:                        # autograd does not save these: in eager, it is what was made of them that is saved
        saved = [s.clone() if i in region.inference else s for i, s in enumerate(saved)]
    if region.aliased:
        saved = [alias_of(s) if i in region.aliased else s for i, s in enumerate(saved)]
    tensors = saved
    if region.numbers:
        ctx.numbers = [saved[i] for i in region.numbers]
        tensors = [saved[i] for i in region.order]
    ctx.save_for_backward(*tensors)
    if hooks_see():
        ctx.hooked, ctx.saved_layouts = True, [layout_of(t) for t in tensors]
    elif joint.watched:                 # with hooks the engine does not check; `finish` writes once more
        ctx.watched = [(inputs[i].detach(), version_of(inputs[i]) + (i in joint.written), t) for i, t in joint.watched.items()]
    if region.several and not ctx.hooked:
        ctx.versions = [t._version for t in tensors]
    ctx.set_materialize_grads(False)
    results = tuple(outputs[:count]) if region.new else as_new(outputs[:count], region.complex)
    if region.sizes_of:                 # where an input is written, its tangent lies as the input, in which there may be gaps
        shown = [*results[:joint.results], *(inputs[i] for i in joint.written)]
        ctx.layouts = [layout_of(shown[i], form) for i, form in region.sizes_of]
    if region.plain:
        ctx.mark_non_differentiable(*[results[i] for i in region.plain])
    return results


# %% [markdown]
# `run_backward` goes in three steps: take what was saved (`take_saved`), add the tangents as the compiled code
# expects them, and call it. `kept` are the positions of what a later backward of other outputs will need.
#
# Under `vmap`, which is also what `torch.autograd.grad(..., is_grads_batched=True)` does, a tangent stands for many, and has
# no memory of its own. Each operator knows what to do with it, a compiled kernel does not: then the graph is interpreted. If
# somebody may differentiate the result, it is the program of `second.py` that is interpreted, by PyTorch.
#
# Most regions have one result with a gradient, as a loss is, and one backward, which nobody will differentiate, and no hooks. For these
# all the questions of the general case have one answer, and `run_once` does not ask them. They take a few microseconds, and
# after a kernel that has filled the caches ten: half as long as a small kernel.

# %%
def run_backward(region: Region, ctx, *tangents):
    joint, retained = region.joint, torch._C._autograd._get_current_graph_task_keep_graph()
    if region.only is not None and not (retained or ctx.hooked or ctx.watched or is_grad_enabled()):
        tangent = tangents[region.only]
        if tangent is not None and has_memory(tangent) and (len(joint.gradients) == 1 or wants_all()):
            try:
                arguments = [*ctx.saved_tensors]
            except RuntimeError:        # of what nobody needs, it may be
                pass
            else:
                return run_once(region, ctx, arguments, tangent)
    given = region.given(tangents)
    absent = frozenset([k for k, t in enumerate(given) if t is None] if type(None) in map(type, given) else ())
    if len(absent) == len(given):       # a graph was on the way here that in eager is none: what was saved may be written
        return region.spread([None] * (len(joint.gradients) + 1))
    if ctx.watched:
        check_watched(ctx.watched, absent)
    tensors, written = saved_tensors(region, ctx, absent)
    unasked = frozenset() if wants_all() else gradients_unasked(region, ctx)
    if absent and not (retained or ctx.hooked or somebody_asks(region, absent, unasked)):        # eager's engine does not come here
        ctx.left = {place: t.detach() for place, t in enumerate(tensors) if t is not None}
        return region.spread([None] * (len(joint.gradients) + 1))
    compiled, left_out = version_for(region, ctx, absent, unasked, written)
    again = is_grad_enabled()                 # may somebody differentiate what is computed here?
    missing = absent, left_out or unasked or gradients_unasked(region, ctx) if again else left_out
    arguments, kept, leading = take_saved(region, ctx, tensors, absent, retained, again)
    found = inputs_again(region, ctx, missing, arguments, written) if again else "nobody may ask"
    leading += arguments if again else []
    present = [t for t in given if t is not None] if absent else [*given]
    many = not all(map(has_memory, present))
    if many and type(found) is list:
        with drawing_again(ctx.states):
            return region.spread((*region.again.in_eager(missing, many)(*map(separate, found), *present), None))
    copied = getattr(compiled, "overwritten", ())
    if copied and not (ctx.hooked or retained):
        copied = (region.shared | kept).intersection(copied)
    if many:
        compiled = region.backward.interpreted(absent, left_out)
    gradients = with_grad_mode(False, call_backward, compiled, arguments, copied, present, None if many else region.layouts_of(ctx, absent))
    if again:
        gradients = with_history(region, ctx, missing, found, gradients, present, leading)
    return region.spread((*gradients, None))


def run_once(region: Region, ctx, arguments: list, tangent: torch.Tensor):
    """`run_backward` of the one tangent on what was saved, where nothing is needed after it."""
    compiled, _ = region.backward(frozenset())
    ctx.maybe_clear_saved_tensors()
    ctx.noted = None
    copied = getattr(compiled, "overwritten", ())
    copied = region.shared.intersection(copied) if copied else ()
    return region.spread((*call_backward(compiled, arguments, copied, [tangent], region.layouts_of(ctx, frozenset())), None))


def call_backward(compiled: Callable, arguments: list, copied, tangents: list, layouts) -> Sequence:
    """`compiled` on the saved `arguments`, of which those at `copied` must stay as they are, and the tangents.
    layouts: what it expects of these; None where each stands for many."""
    for i in copied:
        arguments[i] = copy_with_layout(arguments[i], *layout_of(arguments[i]))
    if layouts is None:
        arguments += [t.contiguous() for t in tangents]
    else:
        arguments += [match_tangent(t, *layout) for t, layout in zip(tangents, layouts)]
    return call_compiled(compiled, arguments)


def inputs_again(region: Region, ctx, missing: Missing, saved: list, written: set[int]) -> list | str:
    """The inputs of the region, or why nothing can be computed from them again. written: which of the `saved` were, since."""
    if ctx.states is None:
        return "it drew random numbers while a CUDA graph was captured"
    needed = region.again.derived(missing).needed
    if any(i in needed and place in written for i, place in region.inputs.saved.items()):
        return WRITTEN_SINCE
    return region.inputs.find(ctx, ctx.noted, saved, needed)


def with_history(region: Region, ctx, missing: Missing, found: list | str, gradients, present: list, leading: list) -> list:
    """The gradients, with a derivative, or an error in its place. missing: the tangents that are absent, and the gradients that nobody
    asks for; present: the other tangents; leading: tensors that lead back to the inputs."""
    absent, unasked = missing
    gradients = [None if k in unasked else g for k, g in enumerate(gradients)]
    if isinstance(found, str):
        derive, causes = functools.partial(refuse, found), present + leading
    else:
        needed = region.again.derived(missing).needed
        template = [torch.Tensor if isinstance(x, torch.Tensor) and (x.requires_grad or i in needed) else x
                    for i, x in enumerate(found)]
        derive = functools.partial(derive_again, region.again, missing, template, ctx.states)
        causes = [x for x, form in zip(found, template) if form is torch.Tensor] + present
    causes = [t for t in causes if isinstance(t, torch.Tensor)]
    if not any(t.requires_grad for t in causes):
        return gradients
    inputs = region.joint.gradients if isinstance(found, str) else \
        [i for i, x in enumerate(found) if isinstance(x, torch.Tensor) and x.requires_grad]
    tangents = [k for k in range(len(region.joint.differentiable)) if k not in absent]
    live = sum([1 << i for i in inputs] + [1 << region.inputs.count + k for k, t in zip(tangents, present) if t.requires_grad])
    known = [(g, behind & live) for g, behind in zip(gradients, region.again.history(missing, found, present)) if g is not None]
    plain = [k for k, (_, history) in enumerate(known) if not history]
    known = iter(Derivative.apply(derive, len(known), plain, *[g for g, _ in known], *causes))
    return [g if g is None else next(known) for g in gradients]


# %% [markdown]
# `take_saved` also decides what may be freed. If several outputs have gradients, the program can call `backward()`
# on one after the other. Those that are still possible are `alive`, and what they will read is kept.
#
# Read it in this order. If somebody will differentiate the gradients (`again`), something must
# lead to the inputs, or an error would not reach whoever asks for their derivative: parameters are at the engine's nodes, and what `note`
# has kept of other inputs has their history. What other outputs may still need is noted in `kept` and stays
# on `ctx`. Tensors that a hook has given back are brought into their layout. Numbers go to their places among them. The engine may
# then let go of everything.

# %%
def take_saved(region: Region, ctx, tensors: list, absent: frozenset, retained: bool, again: bool) -> tuple[list, set[int], list]:
    """(the saved values, `kept`, and, if somebody may differentiate `again`, tensors that depend on the inputs of the region as its
    gradients do); what nobody will need again is let go of. tensors: what was saved; the engine is asked once, since a checkpoint gives
    each tensor back once."""
    joint, order, every = region.joint, region.order, region.every
    leading = []
    if again:
        leading = [node.variable for node, _ in ctx.next_functions if hasattr(node, "variable")] + [lead for _, _, lead in ctx.noted[0]]
    kept: set[int] = set()
    if (len(every) > 1 or not order) and not retained:
        ctx.alive = frozenset([k for k in ctx.alive if joint.overlaps[k] <= absent])
        kept = region.backward.reads(every - ctx.alive) if ctx.alive else kept
        ctx.left = {order[i]: tensors[order[i]].detach() for i in kept if i in order}
    if ctx.hooked:
        tensors = [t if t is None else as_saved(t, *layout) for t, layout in zip(tensors, ctx.saved_layouts)]
    if region.numbers:
        for i, number in zip(region.numbers, ctx.numbers):
            tensors.insert(i, number)
    ctx.maybe_clear_saved_tensors()
    if (order or not ctx.alive) and not (retained or kept or again):      # there is no other backward pass
        ctx.noted = None
    return tensors, kept, leading


# %% [markdown]
# What most calls have in common is not written to each `ctx`: it is an attribute of its class.

# %%
def build_function(joint: Joint, halves: Partition, forward: Callable, backward: Backward, again: Again) -> type[torch.autograd.Function]:
    """The autograd.Function of a partitioned graph. `apply(*inputs)` gives results and written values."""
    region = Region(joint, halves, forward, backward, again)
    backward = functools.partial(hook.run, None, run_backward, region)      # a program may call it; it is not captured
    function = type("CompiledRegion", (torch.autograd.Function,),
                    {"forward": staticmethod(functools.partial(run_forward, region)), "backward": staticmethod(backward)})
    usual = {"states": [], "hooked": False, "saved_layouts": None, "watched": (), "versions": None, "modified": None, "left": None,
             "alive": region.every}
    for name, value in usual.items():
        setattr(function._backward_cls, name, value)
    return function
