# %% [markdown]
# # Another memory for a tensor
#
# `x.data = value` takes the memory of a tensor away and gives it that of another one. Teachers that follow a student do it after
# each step (`k.data = k.data * m + q.data * (1 - m)`), and so do optimizers that go back to where they were. To the graph it is a
# change of names. The value that stands for `x` names another node from here on, an alias of `value`, and the end of the compiled
# function makes the assignment. What `x` was before, its *former* self, stays where it is: views that were taken of it keep its numbers.
#
# Two things of a tensor survive the assignment, which is why it is taken only where they do not matter. A view stays a view of
# its base, and what has a history keeps it; these, and memory of another form, are graph breaks. A view of what the tensor was gets
# a history if the tensor gets one later: that is left to eager (`refuse_former`). And a derivative that has saved the tensor itself
# finds the new numbers there, as eager's does, while a graph computes with the old ones (`refuse_former`; where the assignment is a
# break, no graph is left that could: `is_saved`).
#
# Often nothing is taken away: a masked layer does `weight.data *= mask`, and Python ends that line by assigning what it has read
# from `weight.data` (`show_the_same`).

# %%
from dataclasses import dataclass, field

import torch

from ..ch01_graphs.fake import storage_key
from ..ch01_graphs.graph import known_history
from ..ch02_guards.sources import CallSource
from ..ch03_capture.epilogue import AHEAD, ENDINGS, expression, output_text, pool, refuse_to_leave
from ..ch03_capture.storage import views_of
from ..ch03_capture.tensors import TENSOR_ATTRIBUTES, emit, rename_tensor
from ..ch03_capture.tracer import Tracer, call, location, notes_of, unsupported
from ..ch03_capture.values import AbstractValue, MethodName, TensorVal, const, describe
from ..ch05_autograd.joint import saved_by
from ..errors import SkipFrame
from .slots import SETTERS, guard_apart


@dataclass(eq=False)
class Memories:
    """given: tensor -> the node whose memory it has got; former: id of a fake -> the tensor that had it, and what it was then."""
    given: dict = field(default_factory=dict)
    former: dict = field(default_factory=dict)


def obstacle(tx: Tracer, tensor: TensorVal, value: TensorVal) -> str | None:
    """Why the assignment cannot be part of the graph."""
    old, new, real = tensor.fake, value.fake, tensor.real
    if any(getattr(old, fact) != getattr(new, fact) for fact in ("shape", "dtype", "device")) or old.stride() != new.stride():
        return "the new memory has another form"
    if old.is_complex() or new.meta.is_neg():
        return "a conjugation or a negation may be pending"
    if tx.effects.pure_since or tx.outer is not None:
        return "the code is not run exactly once"
    if not tensor.is_leaf or old._is_view() or real is not None and (real._is_view() or real.is_inference()):
        return "it is a view, or has a history"
    return None


def is_saved(tx: Tracer, tensor: TensorVal) -> bool:
    """Has a derivative of this trace saved the tensor itself, and not a view of it?"""
    history = set().union(*[known_history(value.fake) for value in tx.tensors.of_fake.values()])
    return any(fake is tensor.fake for node in history for fake in saved_by(node))


def show_the_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two fakes are the same memory, in the same order and with the same meaning."""
    return storage_key(one) == storage_key(other) and all(
        fact(one.meta) == fact(other.meta) for fact in (torch.Tensor.size, torch.Tensor.stride, torch.Tensor.storage_offset,
                                                        torch.Tensor.is_conj, torch.Tensor.is_neg, lambda t: t.dtype))


@SETTERS.of("data")
def set_data(tx: Tracer, tensor: TensorVal, value: AbstractValue | None):
    """tensor.data = value"""
    if type(value) is not TensorVal:
        return NotImplemented
    if show_the_same(tensor.fake, value.fake):
        return
    if reason := obstacle(tx, tensor, value):
        reason = f"setting the attribute data of {describe(tensor)}: {reason}"
        if is_saved(tx, tensor):
            raise SkipFrame(f"{reason}, and a derivative has saved it", location(tx))
        unsupported(tx, reason)
    notes, given = notes_of(tx, Memories), TENSOR_ATTRIBUTES["data"](tx, value)
    now = call(tx, MethodName(self=emit(tx, getattr, [given, const("data")]), name="requires_grad_"), []) \
        if tensor.fake.requires_grad else given
    former = rename_tensor(tx, tensor, now)
    tensor.version, tensor.updates = tensor.fake._version, ((), -1)
    around = tx.tensors.in_memory.get(storage_key(former.fake), [])
    around[:] = [former if t is tensor else t for t in around]
    notes.former[id(former.fake)] = tensor, former
    notes.given[tensor] = given.node


# %% [markdown]
# A gradient for a tensor that requires one goes to the same slot as before, but comes from another leaf of the trace, one that it has made
# (`epilogue.py`). What depends on the former self, and is differentiated after the assignment, inside or outside, is the case
# for eager.

# %%
def on_former(tx: Tracer, history) -> TensorVal | None:
    """A tensor that has other memory by now, if a node of `history` accumulates into its former self. If one has saved that: SkipFrame."""
    former, found = notes_of(tx, Memories).former, None
    for node in history if former else ():
        if type(node).__name__ == "AccumulateGrad" and id(node.variable) in former:
            found = former[id(node.variable)][0]
        for tensor, _ in [former[id(fake)] for fake in saved_by(node) if id(fake) in former]:
            raise SkipFrame(f"a derivative has saved {describe(tensor)}, whose attribute data was set since", location(tx))
    return found


def refuse_former(ep) -> list[str]:
    """A graph that leaves a history may have saved an input. So it gets one that keeps its memory. And an assignment brings no history."""
    tx, notes = ep.tx, notes_of(ep.tx, Memories)
    for tensor, former in notes.former.values():
        if tensor.fake.grad_fn is not None and views_of(tx, former):
            raise SkipFrame(f"{describe(tensor)}, whose attribute data was set, got a history, and with it views of it", location(tx))
    for tensor in notes.given:
        if tensor.source is not None and tensor.fake.grad_fn is not None:
            refuse_to_leave(ep, "a tensor whose attribute data was set, and that has a history since", tensor)
    for value in ep.unspent if notes.former else ():
        if tensor := on_former(tx, known_history(value.fake)):
            refuse_to_leave(ep, "a tensor that depends on one whose attribute data was set since", tensor)
    for _, former in notes.former.values() if ep.unspent else ():
        if former.node in tx.tensors.inputs and former.source is not None:
            alias = CallSource(former.source, "detach")
            former.node.meta["source"] = CallSource(alias, "requires_grad_") if former.fake.requires_grad else alias
    return []


AHEAD.append(refuse_former)


# %% [markdown]
# The assignment does not count as a write, but what was written to the new memory by way of the tensor does.

# %%
def write_data(ep) -> None:
    tx, given = ep.tx, notes_of(ep.tx, Memories).given
    for tensor, node in given.items():
        if tensor.source is not None:
            target = expression(ep, tensor)
            ep.writes.append(f"{target}.data = {output_text(ep, node)}")
            if tensor.fake._version != tensor.version:
                ep.writes.append(f"{pool(ep, torch.autograd.graph.increment_version)}({target})")
    kinds = {(t.cls, t.fake.dtype, t.fake.dim()) for t in given}
    guard_apart(tx, [t for t in tx.objects.tracked.values()
                     if type(t) is TensorVal and (t.cls, t.fake.dtype, t.fake.dim()) in kinds])


ENDINGS.append(write_data)
