# %% [markdown]
# # The joint graph
#
# To compile a backward pass one needs it as a graph, before anyone calls `backward()`. There is no need to
# write derivative rules for that. PyTorch's autograd engine works on any tensor, also on fakes: run the
# captured program on fakes that require gradients, ask the engine for the gradients of its outputs, and
# record every operator on the way. The recording is the *joint graph*: forward and backward as one straight
# list of ATen calls, in which the backward half reads values of the forward half.
#
# The gradients that will flow in at run time are unknown, so they are inputs of the joint graph: one
# *tangent* per differentiable output, with its shape.
#
#     x, w, tangent                      inputs
#     h = mm(x, w)
#     y = relu(h)                        ---- the output
#     g = threshold_backward(tangent, y, 0)
#     return y, mm(t(x), g)              and the gradient of w

# %%
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Sequence

import torch
from torch import fx, is_grad_enabled
from torch.autograd import grad
from torch.utils._python_dispatch import _disable_current_modes

from .. import logs
from ..ch01_graphs.fake import Enter, FakeTensor, fake_like, storage_key
from ..ch01_graphs.floats import free_names
from ..ch01_graphs.graph import history_of, is_kept_error, raise_kept_errors
from ..ch01_graphs.layouts import each_has_its_place, is_dense, is_window, length_of
from ..ch01_graphs.shapes import expr_of
from ..ch01_graphs.trace import Recorder, backward_state, run_recorded
from ..errors import Unsupported, words_of
from .aliases import GraphBuilder, append_call, emit_step, restride
from .cleanup import clean
from .functionalize import append_mutations, functionalize_with_mutations
from .output_plan import OutputPlan, computes, places_of, view_chain
from .registered import calls_operators_of
from .rules.operators import ZEROS

aten = torch.ops.aten

# %% [markdown]
# ## What a recording is
#
# A `Joint` is the graph, and what one has to know to cut it, to run it and to hand out what it returns. How the outputs of the
# program are made of the graph's results is planned by `output_plan.py`; the fields of which a comment says "see" have a
# function of that name below.

# %%
@dataclass
class Joint:
    """The traced program. `gm` returns, in this order: results, new values of `written` inputs, gradients.
    Inputs are named by their positions."""

    gm: fx.GraphModule
    results: int                    # number of tensors that outputs are made of
    written: list[int]              # inputs that are overwritten under autograd, outside of the graph
    differentiable: list[int]       # positions among results + written that have a tangent
    gradients: list[int]            # inputs that the gradients belong to (a gradient may be None)
    recipes: list                   # how to make each output
    places: dict[int, tuple[int, bool]]     # for each result an output that is it, or (True) a view of it with its history
    owners: list = field(default_factory=list)          # how to make each tensor that is an `Owner`
    mutated: set[str] = field(default_factory=set)      # names of all placeholders that are written
    copied: list[int] = field(default_factory=list)     # the written inputs that the graph itself copies into
    hidden: list[int] = field(default_factory=list)     # of those, the ones written through `.data` only
    symbols: dict[str, int] = field(default_factory=dict)   # the input that each size or float is
    exposed: set[str] = field(default_factory=set)      # placeholders that may be written before backward
    writable: set[int] = field(default_factory=set)      # results that may be written before backward: eager has not saved them
    kept: list[set[str | int]] = field(default_factory=list)    # of each tangent the inputs and results that eager has saved for it
    viewed: set[int] = field(default_factory=set)       # inputs, but for parameters, of which eager's derivatives have saved views only
    windows: set[int] = field(default_factory=set)      # results that are parts of larger memory in eager
    watched: dict[int, set[int]] = field(default_factory=dict)      # see `saved_after_writing`
    overlaps: list[set[int]] = field(default_factory=list)          # see `overlapping`
    reached: list[set[int]] = field(default_factory=list)   # of each gradient the tangents that lead to it in eager
    memories: list = field(default_factory=list)            # of each gradient the memory that it lies in, in eager
    calls: Counter = field(default_factory=Counter)         # of operators, but for views, that eager makes in forward and backward

# %% [markdown]
# ## Tracing
#
# Every input that requires a gradient, but for parameters, is first passed through an identity function. In
# eager it may be a leaf or not (an activation computed before the compiled region); PyTorch forbids in-place
# operators on leaves only, and capture has already met that error if it applies. Behind the identity (which
# the fake of an activation has passed in capture, too) it is a non-leaf. Parameters stay leaves, which autocast asks
# for: it casts each leaf once, however often it is used, and adds up its gradients before it casts them back.
#
# `_tracing` is the state of PyTorch around a recording. cuDNN is off, since its operators hide from the graph what the generic ones
# show. An error in the recording becomes a reason to run the graph operator by
# operator. `record_inputs` makes the placeholders.

# %%
class _tracing:
    """Grad mode is restored afterwards. Batch norm is recorded as the generic operator, not as cuDNN's."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder

    def __enter__(self):
        self.state = is_grad_enabled(), torch._C._get_cudnn_enabled()
        torch._C._set_cudnn_enabled(False)
        self.recorder.__enter__()

    def __exit__(self, kind, error, traceback):
        self.recorder.__exit__(kind, error, traceback)
        grad_mode, cudnn = self.state
        torch._C._set_grad_enabled(grad_mode)
        torch._C._set_cudnn_enabled(cudnn)
        if isinstance(error, (RuntimeError, IndexError)):
            reason = f"recording the operators failed: {words_of(error)}"
            raise Unsupported(reason, self.recorder.provenance[0]) from error


def _layout(entry):
    return (entry.shape, entry.stride(), entry.storage_offset()) if isinstance(entry, torch.Tensor) else None


def record_inputs(recorder: Recorder, gm: fx.GraphModule, fakes: Sequence) -> tuple[list, dict, dict]:
    """What the recording begins with, (entries, leaves, position): a tensor or number for each placeholder of `gm`; those that require
    a gradient, by their index; the index of each placeholder of the recording. A parameter enters as the leaf it is, another leaf
    so that it may be written."""
    leaves, entries, position = {}, [], {}
    for i, (node, entry) in enumerate(zip(gm.graph.find_nodes(op="placeholder"), fakes, strict=True)):
        if isinstance(entry, torch.Tensor):
            needs = entry.requires_grad and (entry.is_leaf or entry.entered)       # when it came in
            entry = FakeTensor(entry.meta.detach(), entry.device, needs)
            if entry.requires_grad:
                leaves[i] = entry
                if not node.meta.get("parameter"):
                    with torch.enable_grad():
                        entry = Enter.apply(entry)
        entries.append(entry)
        position[recorder.placeholder(node.name, entry)] = i
    return entries, leaves, position


# %% [markdown]
# `trace_joint` runs the captured graph on these inputs, and then the engine, under one recorder. In between it asks what is
# only known there. Each node so far was `asked` for by the program, what follows is the engine's. Which inputs have been
# written: those whose history or version has changed. Their final contents are returned besides the results. What eager would
# have saved of the inputs (`kept`; where not the tensor itself, `viewed`), which written inputs a formula has saved (`watched`), which
# outputs share a part of their history (`overlaps`), and whether anything is saved at all (`once`) decides what the region must refuse
# or copy at run time (`region.py`). Last, `_record_backward` asks the engine for the gradients of all leaves, with one tangent for each
# differentiable output.

# %%
def trace_joint(gm: fx.GraphModule, fakes: Sequence) -> Joint:
    """Record forward and backward of a captured graph. fakes: one fake (or SymInt, or int) per placeholder.
    If no output depends on an input that requires a gradient, only the forward is recorded.

    Raises Unsupported for in-place changes of metadata, and for aliased inputs that are written."""
    recorder = Recorder()
    entries, leaves, position = record_inputs(recorder, gm, fakes)
    history = [e.grad_fn if isinstance(e, torch.Tensor) else None for e in entries]
    layouts = [_layout(e) for e in entries]
    versions = [e._version if isinstance(e, torch.Tensor) else None for e in entries]
    with _tracing(recorder):
        outputs = run_recorded(recorder, gm, entries, calls_operators_of(gm))
        for node in recorder.graph.nodes:
            node.meta["asked"] = True
        if layouts != [_layout(e) for e in entries]:
            raise Unsupported("the shape or the strides of an input are changed in place")
        constants = [n.meta["val"] for n in recorder.graph.nodes if n.op == "get_attr"]
        if any(c.requires_grad for c in constants):
            raise Unsupported("a tensor that is not an input of the graph requires a gradient")
        plan = OutputPlan(recorder, outputs, entries, position)
        recipes, results = [plan.recipe(o) for o in outputs], plan.results
        written = [i for i, e in enumerate(entries)
                   if isinstance(e, torch.Tensor) and e.grad_fn is not history[i]]
        returned = results + [entries[i] for i in written]
        raise_kept_errors(returned)
        saved = saved_fakes(returned)
        kept = memory_kept(saved)
        differentiable = [i for i, t in enumerate(returned) if t.requires_grad]
        changed = {i: e for i, e in enumerate(entries) if isinstance(e, torch.Tensor) and
                   e._version != versions[i]}
        watched = saved_after_writing(changed, kept, [returned[i] for i in differentiable])
        overlaps = overlapping([returned[i] for i in differentiable])
        by_tangent = kept_by([returned[i] for i in differentiable])
        gradients = _record_backward(recorder, [returned[i] for i in differentiable], list(leaves.values()))
    recorded = recorder.finish(returned + gradients)
    logs.tell("stage", name="recorded", gm=recorded)
    parameters = {n.name for n in gm.graph.find_nodes(op="placeholder") if n.meta.get("parameter")}
    activations = {n.name: storage_key(e) for n, e in zip(recorder.graph.find_nodes(op="placeholder"), entries)
                   if isinstance(e, torch.Tensor) and n.name not in parameters}
    exposed = {name for name, memory in activations.items() if memory not in kept}
    whole = {id(t) for t in saved}
    viewed = {i for node, i in position.items() if isinstance(entries[i], torch.Tensor) and id(entries[i]) not in whole
              and node.name not in parameters}
    joint = Joint(recorded, len(results), written, differentiable, list(leaves) if gradients else [], recipes,
                  places_of(recipes, outputs), list(plan.owners.values()), symbols=_symbols(entries), exposed=exposed, viewed=viewed,
                  kept=[{name for name, memory in [*activations.items(), *enumerate(map(storage_key, results))] if memory in own}
                        for own in by_tangent],
                  writable={i for i, t in enumerate(results) if storage_key(t) not in kept},
                  watched=watched, overlaps=overlaps, memories=[g if g is None else storage_key(g) for g in gradients],
                  calls=Counter(n.target for n in recorded.graph.nodes if computes(n)))
    joint = _finish(recorded, joint, entries, returned)
    joint.hidden = [i for i in joint.copied if entries[i]._version == versions[i]]
    return joint


# %% [markdown]
# What follows is for programs that end with a call of the engine, the gradients of `second.py`: which of them can be differentiated, and
# for what. The graph does not tell. A maximum is read where its gradient is computed, but only to see where it was.

# %%
def placeholders_leading(gm: fx.GraphModule, fakes: Sequence) -> list[set[int]]:
    """For each output of `gm` the positions of the placeholders that its history leads to; all of them where it ends in an error, to which
    whoever asks has to come. Raises Unsupported."""
    recorder = Recorder()
    entries, leaves, _ = record_inputs(recorder, gm, fakes)
    with _tracing(recorder):
        outputs = run_recorded(recorder, gm, entries, calls_operators_of(gm))
    position = {id(leaf): i for i, leaf in leaves.items()}

    def leading(output) -> set[int]:
        history = history_of([output]) if isinstance(output, torch.Tensor) else ()
        if any(map(is_kept_error, history)):
            return {*leaves}
        return {position[id(node.variable)] for node in history if id(getattr(node, "variable", None)) in position}
    return [leading(output) for output in outputs]


# %% [markdown]
# Between forward and backward the caller may write to what it gave. Eager notices if a derivative formula
# has saved the tensor, and raises; if none has, all is well. Our backward may choose other values to start
# from, and must not fail where eager does not: it needs a copy of an input that eager has not saved. (Not of
# parameters. They change between steps, and copying them would cost.) The same is true of results: the division of
# `y = a @ b / w` saves both operands, and `y` may be written. What eager has saved can be read off the nodes of its autograd graph.
#
# What the program wrote into an input and a formula then saved, eager saves as that input. Our backward has
# values of its own, which nobody can change, and yet must fail where eager does: such inputs are watched.

# %%
def saved_after_writing(changed: dict, kept: dict, outputs: list) -> dict[int, set[int]]:
    """For the written inputs (`changed`: position -> fake) that derivatives have saved as they are in the
    end: which of the differentiable `outputs` they belong to."""
    def saved(fake, memory):
        return fake._version in memory.get(storage_key(fake), ())
    changed = {i: fake for i, fake in changed.items() if saved(fake, kept)}
    memory = [memory_kept(saved_fakes([t])) for t in outputs] if changed else []
    return {i: {k for k, own in enumerate(memory) if saved(fake, own)} for i, fake in changed.items()}


def saved_fakes(outputs: Sequence) -> list[FakeTensor]:
    """The tensors that the derivatives of `outputs` have saved."""
    return [t for node in history_of(outputs) for t in saved_by(node) if isinstance(t, FakeTensor)]


def memory_kept(saved: Sequence) -> dict[int, set[int]]:
    """The storages of all tensors that derivatives have saved, each with the versions that
    these tensors are at (`x.data` counts its versions apart from `x`)."""
    found = {}
    for t in saved:
        found.setdefault(storage_key(t), set()).add(t._version)
    return found


def kept_by(outputs: list) -> list[set[int]]:
    """For each of several outputs the storages that its derivatives have saved: its gradient fails if they are written."""
    if len(outputs) < 2:
        return []
    saved = {node: {storage_key(t) for t in saved_by(node) if isinstance(t, FakeTensor)} for node in history_of(outputs)}
    return [set().union(*(saved[node] for node in history_of([t]))) for t in outputs]


def overlapping(outputs: list) -> list[set[int]]:
    """For each output the others, and itself, whose derivatives share an operator that has saved tensors.
    When eager has differentiated one of them, the other cannot be: those are freed."""
    saving = {n for n in history_of(outputs) if saves_tensors(n)}
    histories = [history_of([t]) & saving for t in outputs]
    return [{k for k, other in enumerate(histories) if own & other} for own in histories]


def saves_tensors(node) -> bool:
    return any(isinstance(s, torch.Tensor) for s in saved_by(node))


def saved_by(node):
    for name in _saved_names(type(node)):
        try:
            values = getattr(node, name)
        except RuntimeError:            # it was modified, and the derivative would fail
            continue
        yield from values if isinstance(values, (list, tuple)) else [values]


_names: weakref.WeakKeyDictionary[type, list] = weakref.WeakKeyDictionary()


def _saved_names(kind: type) -> list[str]:
    # Of tensors only: reading a saved number that varies would make a constant of it
    if kind not in _names:
        raw = [n.removeprefix("_raw") for n in dir(kind) if n.startswith("_raw_saved_")]
        _names[kind] = [n if hasattr(kind, n) else n[1:] for n in raw]
    return _names[kind]


def _record_backward(recorder: Recorder, outputs: list, leaves: list) -> list:
    if not outputs or not leaves:
        return []
    tangents = []
    for i, out in enumerate(outputs):
        layout = "of the output" if each_has_its_place(out) else "row by row"
        with _disable_current_modes():
            tangents.append(fake_like(out) if layout == "of the output" else
                            FakeTensor(torch.empty(out.shape, dtype=out.dtype, device="meta"), out.device))
        recorder.placeholder(f"tangent{i}", tangents[-1]).meta["tangent"] = layout
        for node in history_of([out]) if len(outputs) > 1 else ():
            recorder.tangents_of.setdefault(node, set()).add(i)
    with backward_state():
        return list(grad(outputs, leaves, tangents, allow_unused=True))

# %% [markdown]
# ## After the recording
#
# The recording is functionalized. Inputs written under autograd get their new value from outside
# (`x.copy_(new)`, so that the engine sees it); all other written inputs, such as the running statistics of
# batch norm, are copied into by the graph itself. A gradient has the strides of its input: the engine would
# copy it into that form anyway when it accumulates it into `.grad`. What is a view in eager and not computed in one kernel with what makes
# it stays a view (`stays_view`): the real part of a complex gradient, and what a formula hands on of a tangent, as that of a sum does.

# %%
def _finish(recorded: fx.GraphModule, joint: Joint, entries: list, returned: list) -> Joint:
    gm, mutations = functionalize_with_mutations(recorded)
    names = [n.name for n in recorded.graph.nodes if n.op == "placeholder"]
    joint.mutated = set(mutations)
    inside = {name: new for name, new in mutations.items() if name not in {names[i] for i in joint.written}}
    joint.copied = [names.index(name) for name in inside]
    joint.windows = {i for i, t in enumerate(returned[:joint.results]) if is_window(t)}
    output = next(iter(reversed(gm.graph.nodes)))
    b = GraphBuilder(gm, gm.graph)
    values, count = list(output.args[0]), len(returned)
    with gm.graph.inserting_before(output):
        for i, value in enumerate(values):
            if isinstance(value, fx.Node):
                b.current = value
                target = returned[i] if i < count else entries[joint.gradients[i - count]]
                values[i] = value if i >= count and stays_view(value) else restride(b, value, target)
        output.args = (tuple(values),)
    joint.reached = tangents_behind(gm, values[count:])
    append_mutations(gm, inside)
    save_masks_as_bool(gm)
    joint.gm = gm
    return simplify(joint)


def stays_view(gradient: fx.Node) -> bool:
    """Is it a view of a tangent, or the real part of a complex gradient?"""
    root = view_chain(gradient)[0]
    return "tangent" in root.meta or root.meta["val"].is_complex() and not gradient.meta["val"].is_complex()


# %% tags=["exercise:tangents-behind"]
def tangents_behind(gm: fx.GraphModule, gradients: list) -> list[set[int]]:
    """For each gradient the positions of the tangents that it depends on. To be asked before anything is simplified: the
    gradient of a `floor` is zeros, which depend on the tangent in eager's graph only. Without a tangent there is none. New zeros that
    are made from no tangent, as for the sign in `copysign`, have those that led there as their mark."""
    behind: dict[fx.Node, set[int]] = {}
    tangents = {n: i for i, n in enumerate(n for n in gm.graph.nodes if "tangent" in n.meta)}
    for node in gm.graph.nodes:
        found = {tangents[node]} if node in tangents else set().union(*(behind[a] for a in node.all_input_nodes))
        behind[node] = found or (node.meta.get("tangents", set()) if node.target in ZEROS else found)
    return [behind[g] if isinstance(g, fx.Node) else set() for g in gradients]


# %% [markdown]
# After the tracing come small clean-ups of the joint graph. Compilers remove what is equal, so two results may
# have become one node, while the program expects two tensors that can be written to independently.
# `separate_results` puts a `clone` in front of each result that shares its memory with another one or with an
# input.

# %%
def simplify(joint: Joint, rewrite=None) -> Joint:
    """Clean up the joint graph, or apply a pass (graph -> graph) to it that does."""
    joint.gm = clean(joint.gm) if rewrite is None else rewrite(joint.gm)
    separate_results(joint)
    logs.tell("stage", name="primitives" if rewrite is not None else "joint", gm=joint.gm)
    return joint


def separate_results(joint: Joint) -> None:
    """Results are distinct tensors for the caller, also where the graph computes one value, or an input. One
    that is a window onto a larger memory remains one: the memory is copied. Gradients are distinct among
    themselves: the engine keeps the first gradient of a leaf as its `.grad`, and adds the next in place. What eager's formulas
    hand on of a tangent, as those of a sum of two tensors or of `cat` do, is handed on here, too (`handed_on`)."""
    gm, count = joint.gm, joint.results + len(joint.written)
    output = next(iter(reversed(gm.graph.nodes)))
    values, seen, lent = list(output.args[0]), set(), {}
    b = GraphBuilder(gm, gm.graph)
    end = next((n for n in gm.graph.nodes if n.target is aten.copy_.default), output)     # inputs are written
    with gm.graph.inserting_before(end):
        for i, value in enumerate(values[:count]):
            root, steps = view_chain(value, lent)
            if root in seen or root.op in ("placeholder", "get_attr"):
                b.current, window = value, i in joint.windows
                values[i] = append_call(b, aten.clone.default, (root if window else value,))
                for step in steps if window else ():
                    values[i] = emit_step(b, values[i], step)
            seen.add(root)
        before: dict[fx.Node, list] = {}
        for i, (value, memory) in enumerate(zip(values[count:], joint.memories), count):
            if isinstance(value, fx.Node):
                earlier = before.setdefault(root := view_chain(value, lent)[0], [])
                if not all(memory == other and handed_on(root, value, shown) for shown, other in earlier):
                    b.current = value
                    values[i] = append_call(b, aten.clone.default, (value,))
                else:
                    earlier.append((value, memory))
    output.args = (tuple(values),)


def handed_on(tangent: fx.Node, a: fx.Node, b: fx.Node) -> bool:
    """May two gradients be `a` and `b`, views of one memory? If they are one tensor, the engine counts who holds it, and copies it for
    all but the last; if they are two, they must have no element in common, or gaps: what has gaps it copies before it keeps it or adds to
    it. The memory is that of a tangent, as it is in eager."""
    if "tangent" not in tangent.meta:
        return False
    if a is b:
        return True
    forms = [(t.shape, t.stride(), t.storage_offset()) for t in (a.meta["val"], b.meta["val"])]
    if not all(type(n) is int for size, stride, offset in forms for n in (*size, *stride, offset)):
        return False
    (_, end), (start, _) = sorted((form[-1], length_of(form)) for form in forms)
    return end <= start or not is_dense(a.meta["val"]) and not is_dense(b.meta["val"])


# %% [markdown]
# CPU dropout draws its mask as floats: `empty_like(x).bernoulli_(p)`, 4 bytes for one bit of information.
# Inserting `mask != 0` and back changes no number, and offers the partitioner a value of a quarter of the
# size to save.

# %%
def save_masks_as_bool(gm: fx.GraphModule) -> None:
    b = GraphBuilder(gm, gm.graph)
    for node in list(gm.graph.nodes):
        if node.target is aten.bernoulli.p and node.meta["val"].is_floating_point():
            users = list(node.users)
            b.current = node
            with gm.graph.inserting_before(node.next):
                mask = append_call(b, aten.ne.Scalar, (node, 0))
                mask.meta.pop("recompute", None)         # a checkpoint saves its random numbers, in this form
                back = append_call(b, aten._to_copy.default, (mask,), {"dtype": node.meta["val"].dtype})
            for user in users:
                user.replace_input_with(node, back)

# %% [markdown]
# Symbolic sizes and floats in recipes are evaluated at run time. An output may be a view with a size such as `s0 // 2`, and the number
# behind `s0` is not known before the call. But it is an input of its own, as every symbol is. `_symbols` notes which.

# %%
def _symbols(entries: list) -> dict[str, int]:
    """Which of the inputs each symbol is."""
    numbers = {i: expr_of(e) for i, e in enumerate(entries) if not isinstance(e, torch.Tensor)}
    return {str(e): i for i, e in numbers.items() if free_names(e) == {str(e)}}
