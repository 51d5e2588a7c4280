# %% [markdown]
# # Functions with gradients of their own, and checkpoints
#
# Two things in torch change what *differentiating* a piece of code means. A `torch.autograd.Function` says:
# do not differentiate my forward, call my backward. `torch.utils.checkpoint` says: differentiate as usual,
# but keep nothing, compute it again. Both are captured without leaving the graph.
#
#     class Cube(torch.autograd.Function):                 set_grad_enabled(False)
#         def forward(ctx, x):                             pow_1 = pow(x, 3)
#             ctx.save_for_backward(x)           ->        set_grad_enabled(True)
#             return x ** 3                                y, = Cube(pow_1, x)
#         def backward(ctx, grad):
#             x, = ctx.saved_tensors                       where Cube holds a second graph:
#             return 3 * grad * x ** 2                         pow_2 = pow(x, 2) ...
#
# The forward is inlined like any function, with gradients off, as autograd calls it. The backward is traced
# into a small graph of its own. The node that joins them passes its first operands through, and tells
# autograd that their gradient is that graph. To the rest of the compiler it is one more function of tensors:
# the autograd stage records what it does on fakes, forward and backward, and knows nothing of it. The real
# torch.compile has a higher-order operator for the same purpose, which each later stage has to learn.

# %%
import itertools
from dataclasses import dataclass

import torch
from torch import is_grad_enabled
from torch.autograd.function import FunctionCtx, _SingleLevelFunction, once_differentiable
from torch.utils import checkpoint as checkpoints

from ...ch01_graphs.fake import storage_key
from ...ch01_graphs.graph import Graph, graph_module
from ..attributes import get_attribute
from ..calls import handles, inline_code
from .contexts import set_grad
from ..effects import effect_free
from ..exceptions import UserError
from ..tensors import emit, rename_tensor, run_fake, to_arg
from ..tracer import Tracer, call, unsupported
from ..values import NONE, ObjVal, TensorVal, TupleVal, AbstractValue, const, describe
from ..wrap import wrap

# %% [markdown]
# ## The context object
#
# `ctx` is an ordinary object of the trace: whatever the forward sets on it, by itself or by `save_for_backward` and its like, the backward
# finds there. The tensors among that may be anything of the outer graph. When the backward reads one, it becomes an input of
# the backward's graph (`node_here` in `tensors.py`), and an operand of the joining node.

# %%
class TracedContext(FunctionCtx):
    """Stands for the `ctx` of a captured autograd function."""


def noted(ctx: ObjVal, field: str) -> list:
    found = ctx.attrs.get(field)
    return list(found.items) if found is not None else []


@handles(torch.autograd.Function.apply.__func__)
def apply_function(tx: Tracer, function: ObjVal, *args) -> AbstractValue:
    """Function.apply(*args) on values."""
    cls, mode = function.real, is_grad_enabled()
    two_steps = cls.setup_context is not _SingleLevelFunction.setup_context
    needs = [type(a) is TensorVal and a.fake.requires_grad for a in args]
    ctx = ObjVal(cls=TracedContext)
    ctx.attrs["needs_input_grad"] = TupleVal(items=[const(n) for n in needs])
    set_grad(tx, False)
    try:
        output = call(tx, get_attribute(tx, function, "forward"), list(args) if two_steps else [ctx, *args])
        if two_steps:
            call(tx, get_attribute(tx, function, "setup_context"), [ctx, TupleVal(items=list(args)), output])
        outputs = list(output.items) if type(output) is TupleVal else [output]
        joined = mode and any(needs) and any(type(o) is TensorVal for o in outputs)
        dirty = noted(ctx, "dirty_tensors")
        if any(d not in outputs or joined and not can_be_dirty(tx, d) for d in dirty):
            unsupported(tx, f"{cls.__name__} marks an input as dirty")
        if two_steps and any(o is a and a in noted(ctx, "to_save") for o in outputs for a in args):
            unsupported(tx, f"{cls.__name__} saves an input that it also returns")      # eager raises
        raw = [(emit(tx, "clone", [o]) if joined else o) if o in dirty else alias_of_input(tx, o, args) for o in outputs]
    finally:
        set_grad(tx, mode)
    tensors = [o for o in raw if type(o) is TensorVal]
    if tx.outer is not None:
        unsupported(tx, f"{cls.__name__} inside of the backward of another function")
    if len(set(map(id, tensors))) < len(tensors) or any(
            t.fake.requires_grad and not (joined and shares_memory(t, args)) for t in tensors):
        unsupported(tx, f"the outputs of {cls.__name__}")
    if joined:
        fixed = {id(v) for v in noted(ctx, "non_differentiable")}
        written = {o.node: r for o, r in zip(outputs, raw) if o in dirty}
        joined = join(tx, function, ctx, args, needs, raw, [id(o) in fixed for o in outputs], written)
        for r in written.values():
            del tx.tensors.of_fake[id(r.fake)]
        raw = [next(joined) if type(o) is TensorVal else o for o in raw]
        for o, r in zip(outputs, raw):
            if o in dirty:
                rename_tensor(tx, o, r)
        raw = [o if o in dirty else r for o, r in zip(outputs, raw)]
    return TupleVal(items=raw) if type(output) is TupleVal else raw[0]


def alias_of_input(tx, output, args):
    """Autograd never returns the very tensor it was given."""
    return emit(tx, "view_as", [output, output]) if any(output is a for a in args if type(a) is TensorVal) else output


# %% [markdown]
# An input that the forward has written to, and marked as dirty, is different: it is returned itself, with the function as its history.
# What stands for it gets other memory, with the same numbers, where nobody else can see the one that it had.

# %%
def can_be_dirty(tx, tensor) -> bool:
    """Whether the trace has made it, alone in its memory."""
    return type(tensor) is TensorVal and tensor.real is None and not tx.effects.pure_since and \
        not tensor.fake._is_view() and not (tensor.fake.is_leaf and tensor.fake.requires_grad) and \
        sum(storage_key(v.fake) == storage_key(tensor.fake) for v in tx.tensors.of_fake.values()) == 1


def shares_memory(tensor: TensorVal, args) -> bool:
    key = storage_key(tensor.fake)
    return any(type(a) is TensorVal and storage_key(a.fake) == key for a in args)


# %% [markdown]
# ## The second graph
#
# While the backward is traced, `tx.graph` is its own graph, and `tx.outer` the one around it. With
# `set_materialize_grads(False)` the backward is told, by None, which outputs nobody used; then each case is a
# program of its own, and all cases are traced. What a backward reads from outside, such as a global, is read
# and guarded when the forward is called; eager reads it later. One that raises does so later, too, or never, and not where the forward is
# called, so it is left to eager.

# %%
def join(tx: Tracer, function, ctx, args, needs, raw, fixed, written):
    """Emit the node that gives the outputs `raw` the backward of `function`; yields its tensors. written: node of a dirty input -> the
    output that it is."""
    name = function.real.__name__
    tensors = [o for o in raw if type(o) is TensorVal]
    inputs = [a for a in args if type(a) is TensorVal]
    frozen = [f for o, f in zip(raw, fixed) if type(o) is TensorVal]
    flag = ctx.attrs.get("materialize_grads")
    materialize = flag is None or flag.value
    live = [i for i, f in enumerate(frozen) if not f and tensors[i].fake.dtype.is_floating_point]
    if not materialize and len(live) > 3:
        unsupported(tx, f"{name} has {len(live)} outputs whose gradients may be absent")
    cases = [(True,) * len(tensors)] if materialize else [
        tuple(i in chosen for i in range(len(tensors)))
        for count in range(1, len(live) + 1) for chosen in itertools.combinations(live, count)]
    lifted: dict = {}
    graphs = {case: trace_backward(tx, function, ctx, args, needs, raw, case, lifted) for case in cases}
    own = {v.node: i for i, v in reversed(list(enumerate((*tensors, *inputs))))}
    own.update({n: tensors.index(o) for n, o in written.items()})
    others = [n for n in lifted if n not in own]
    place = {**own, **{n: len(tensors) + len(inputs) + i for i, n in enumerate(others)}}
    saved = {v.node for v in noted(ctx, "to_save") if type(v) is TensorVal}
    spec = Joined(name, len(tensors), len(inputs), frozen, materialize,
                  [shares_memory(t, inputs) for t in tensors],
                  {n: (place[n], n in saved) for n in lifted}, graphs,
                  getattr(function.real.backward, "__code__", None) is once_differentiable(join).__code__)
    values = [*tensors, *inputs, *(Lifted(node=n) for n in others)]
    return iter(emit(tx, joined_function(spec), values).items)


@dataclass(eq=False)
class Lifted(TensorVal):
    """A node of the outer graph, as an operand."""


def trace_backward(tx, function, ctx, args, needs, raw, case, lifted) -> tuple:
    """The graph of `function.backward` for the tangents present in `case`, and the outer nodes it reads."""
    graph, name = Graph(), function.real.__name__
    mode, inner = is_grad_enabled(), {}
    tx.outer, tx.graph, tx.lifted = tx.graph, graph, inner
    torch._C._set_grad_enabled(False)
    try:
        with effect_free(tx, f"the backward of {name}"), torch._C._DisableAutocast():
            tangents = [tangent_for(tx, graph, o) for o in raw if type(o) is TensorVal]
            present = iter(zip(tangents, case))
            given = [t if here else NONE for t, here in
                     (next(present) if type(o) is TensorVal else (None, False) for o in raw)]
            again = ObjVal(cls=TracedContext, attrs=dict(ctx.attrs))
            again.attrs["saved_tensors"] = TupleVal(items=noted(ctx, "to_save"))
            result = call(tx, get_attribute(tx, function, "backward"), [again, *given])
            gradients = list(result.items) if type(result) is TupleVal else [result]
            if len(gradients) < len(args) or any(g is not NONE and type(g) is not TensorVal for g in gradients):
                unsupported(tx, f"what the backward of {name} returns")
            if any(type(g) is TensorVal and type(a) is not TensorVal
                   for g, a in itertools.zip_longest(gradients, args)):
                unsupported(tx, f"a gradient for an argument of {name} that is no tensor")
            graph.output(tuple(to_arg(tx, g) if type(g) is TensorVal and n else None
                               for g, a, n in zip(gradients, args, needs) if type(a) is TensorVal))
            if any(t.fake._version for t in tangents):
                unsupported(tx, f"the backward of {name} writes to a gradient")
    except UserError as error:
        unsupported(tx, f"the backward of {name} raises {error.exc.cls.__name__}")
    finally:
        tx.graph, tx.outer = tx.outer, None
        torch._C._set_grad_enabled(mode)
    lifted.update(dict.fromkeys(inner))
    for placeholder in reversed(list(inner.values())):
        next(iter(graph.nodes)).prepend(placeholder)
    return graph_module(torch.nn.Module(), graph), list(inner)


def tangent_for(tx, graph, output: TensorVal) -> TensorVal:
    fake = run_fake(tx, torch.empty_like, (output.fake,), {})
    node = graph.placeholder(f"grad_{len(graph.nodes)}")
    node.meta.update(val=fake, location=None, origins=())
    return tx.tensors.of_fake.setdefault(id(fake), TensorVal(node=node, fake=fake))


# %% [markdown]
# ## The joining node
#
# At run time it is an autograd function again, whose backward is the traced graph. What the program saved
# with `save_for_backward` is saved so (autograd then notices if it is overwritten, and a second derivative
# flows through it); what it hung on `ctx` is hung on `ctx`.
#
# Autograd sees a tensor within a tuple as no operand: what else the backward reads is handed on so, for no gradient goes there.
#
# The outputs have been computed already. `detach` makes fresh tensor objects of them, as a forward would
# return. One that shares memory with an input is passed as it is: autograd then marks it as a view that must
# not be modified in place, as it would for the program.

# %%
@dataclass(eq=False)
class Joined:
    """frozen: outputs without a gradient; aliases: those that share memory with an input; sources: for each
    lifted node its position among the operands, and whether autograd saves it; graphs: case -> (graph, its
    lifted nodes); once: is the backward a `once_differentiable`?"""
    name: str
    outputs: int
    inputs: int
    frozen: list
    materialize: bool
    aliases: list
    sources: dict
    graphs: dict
    once: bool


# %% [markdown]
# `joined_function` makes the `autograd.Function` that the recording will meet. Its forward computes nothing: the
# operators of the program's forward are in the graph already, and it hands on what they have computed, with a node
# of its own as the history. Its backward runs the graph that was captured of the program's backward. Which graph
# depends on which tangents there are, because the program may have asked for `None`.

# %% tags=["exercise:own-backward"]
def joined_function(spec: Joined):
    """The target of the node: `f(*outputs, *inputs, *others) -> tuple of outputs`, which autograd differentiates by
    `spec.graphs`.

    The outputs are the first `spec.outputs` operands: as they are where the list `spec.aliases` says so, else detached; where the list
    `spec.frozen` says so they have no gradient. `spec.materialize`: does the backward see zeros for tangents that are absent, or None?
    `spec.sources` maps each value that the backward reads, in order, to its place among outputs and operands, and to whether autograd
    saves it (else it hangs on `ctx`). `spec.graphs` maps a tuple, for each output whether its tangent is present, to a graph and the
    values that it reads, keys of `spec.sources`: `graph(*values, *tangents)`, with all tangents, gives a tuple of the gradients of the
    inputs. Nothing else has a gradient, and where no tangent is present, nothing at all. The class and `f` have the name `spec.name`;
    `f.joined` is `spec`."""
    count, order = spec.outputs, list(spec.sources)

    def forward(ctx, others, *operands):
        outputs = [t if alias else t.detach() for t, alias in zip(operands, spec.aliases)]
        pool = [*outputs, *operands[count:], *others]
        kept = [pool[spec.sources[n][0]] for n in order]
        ctx.save_for_backward(*[t for t, n in zip(kept, order) if spec.sources[n][1]])
        ctx.kept = [None if spec.sources[n][1] else t for t, n in zip(kept, order)]
        ctx.mark_non_differentiable(*[t for t, frozen in zip(outputs, spec.frozen) if frozen])
        ctx.set_materialize_grads(spec.materialize)
        return tuple(outputs)

    def backward(ctx, *tangents):
        saved = iter(ctx.saved_tensors if any(own for _, own in spec.sources.values()) else ())     # freed, none raise, too
        values = {n: next(saved) if spec.sources[n][1] else t for n, t in zip(order, ctx.kept)}
        present = tuple([t is not None for t in tangents])
        if not any(present):                    # what came after gave no gradient, and there is none
            return (None,) * (1 + count + spec.inputs)
        graph, lifted = spec.graphs[present]
        gradients = graph(*[values[n] for n in lifted], *tangents)
        return (None,) * (1 + count) + gradients

    cls = type(spec.name, (torch.autograd.Function,),
               {"forward": staticmethod(forward), "backward": staticmethod(once_differentiable(backward) if spec.once else backward)})

    def joined(*operands):
        return cls.apply(operands[count + spec.inputs:], *operands[:count + spec.inputs])
    joined.__name__ = joined.__qualname__ = spec.name
    joined.joined = spec
    return joined


# %% [markdown]
# ## Checkpoints
#
# A checkpointed function is inlined, and its nodes are marked: the stage that divides forward from backward
# will save none of them. Random numbers it saves nevertheless, which gives what eager gets by restoring the
# random state. The reentrant kind differs where no argument requires a gradient, or an output does not;
# eager does those.

# %%
_regions = itertools.count(1)


@handles(checkpoints.checkpoint)
def checkpoint(tx: Tracer, function, *args, use_reentrant=NONE, preserve_rng_state=None,
               determinism_check=None, early_stop=None, **kwargs):
    if use_reentrant is NONE or {"context_fn", "debug"} & set(kwargs):
        unsupported(tx, "checkpoint() with these options")
    reentrant = use_reentrant.value
    if reentrant and not (is_grad_enabled() and any(
            type(a) is TensorVal and a.fake.requires_grad for a in args)):
        unsupported(tx, "a reentrant checkpoint of tensors that need no gradient")
    region, tx.effects.region = tx.effects.region, tx.effects.region or next(_regions)      # an inner checkpoint is part of the outer
    try:
        with effect_free(tx, f"checkpoint of {describe(function)}"):
            result = call(tx, function, args, kwargs)
    finally:
        tx.effects.region = region
    outputs = result.items if type(result) is TupleVal else [result]
    if reentrant and any(type(o) is TensorVal and not o.fake.requires_grad and o.fake.dtype.is_floating_point
                         for o in outputs):
        unsupported(tx, "a reentrant checkpoint with an output that needs no gradient")
    return result


@handles(checkpoints.checkpoint_sequential)
def checkpoint_sequential(tx: Tracer, *args, **kwargs):
    """A loop over checkpoints, in a module that is not entered otherwise."""
    return inline_code(tx, wrap(tx, checkpoints.checkpoint_sequential), args, kwargs)
