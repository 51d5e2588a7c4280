# %% [markdown]
# # Tensors that leave after a `backward()`
#
# A tensor whose autograd graph was used up by a `backward()` in the trace still says that it requires a
# gradient, and asking for one is an error, the one that eager raises.
# Where a history is not used up, a later `backward()` comes through it without the hooks that the trace has seen, and the graph
# ends before the hook is made.

# %%
import torch

from ..ch01_graphs.graph import known_history
from ..ch03_capture.epilogue import HISTORIES, leaves_in, output_text, pool, refuse_to_leave
from ..ch03_capture.tensors import finish_node


def spent_text(ep, value) -> str | None:
    effects = ep.tx.effects
    if effects.consumed and is_consumed(ep.tx, value.fake):
        node = ep.tx.graph.call_method("detach", (value.node,))
        finish_node(ep.tx, node, value.fake.detach())
        return f"{pool(ep, with_spent_history)}({output_text(ep, node)}, {value in effects.retained})"
    if effects.points or effects.hooks or effects.retained:
        refuse_hooks(ep, value)


HISTORIES.append(spent_text)


def is_consumed(tx, fake) -> bool:
    """Whether a backward pass in the trace has freed what the derivative of `fake` needs."""
    return not tx.effects.consumed.isdisjoint(known_history(fake))


class Spent(torch.autograd.Function):
    """The identity, whose derivative is what a second `backward()` is in eager."""

    @staticmethod
    def forward(ctx, anchor, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("Trying to backward through the graph a second time (or directly access saved tensors after they "
                           "have already been freed). The compiled function has called backward() on it; specify "
                           "retain_graph=True there.")


def with_spent_history(tensor, retains_grad):
    with torch.enable_grad():
        spent = Spent.apply(torch.empty(0, requires_grad=True), tensor)
        if retains_grad:
            spent.retain_grad()
        return spent


def refuse_hooks(ep, value):
    effects, history = ep.tx.effects, known_history(value.fake)
    leaves = leaves_in(history)
    hooks = [h for node, point in effects.points.items() if node in history for h in point.hooks]
    hooks += [h for leaf, found in effects.hooks.items() if leaf.source is None and id(leaf.fake) in leaves for h in found]
    hooks += [h for tensor, h in effects.retained.items() if tensor is value]
    if hooks:
        refuse_to_leave(ep, "a tensor on which a hook waits, or that depends on one,", hooks[0])
