# %% [markdown]
# # What a program sees of a tensor's memory
#
# Operations compute with the elements of a tensor, wherever these lie. So the guard of an input fixes its shape, and its strides as far
# as an operator could tell; not where in its memory it begins, nor what is around it. A program can find that out all the same.
# Where it does, there is a guard more, or a graph break:
#
# - `x.storage_offset()` and `x.stride()` are numbers, fixed by guards as soon as they are read;
# - `as_strided` addresses memory past the tensor that it is called on. Of what is around an input nothing is known;
# - a write to a tensor that has a gradient concerns, in eager's books, the tensor that it is a view of, which may be older than the call.
#
# A tensor that the trace has made may be a view of an input, and then it is the input that is guarded: `inputs_around` finds it.

# %%
import torch

from ..ch01_graphs.fake import storage_key
from ..ch01_graphs.layouts import inside
from ..ch01_graphs.rules.refused import is_viewed
from ..ch01_graphs.shapes import expr_of
from ..ch01_graphs.symbolic import present
from ..ch02_guards.sources import CallSource
from .tracer import Tracer, guard, unsupported
from .wrap import part


def inputs_around(tx: Tracer, fake) -> list:
    """The inputs that share memory with `fake`."""
    return tx.tensors.in_memory.get(storage_key(fake), [])


def guard_place(tx: Tracer, fake) -> None:
    """Where in its memory `fake` begins is part of the program."""
    for other in inputs_around(tx, fake):
        if other.fake._has_symbolic_sizes_strides:
            unsupported(tx, "a place in memory where sizes vary")
        guard(tx, part(CallSource, other.source, "storage_offset"), "CONSTANT_MATCH", other.real.storage_offset())


def guard_strides(tx: Tracer, fake) -> None:
    """The guard of a tensor leaves open the strides of dimensions of size 1, and all strides of an empty one, which no operator looks
    at; a program that reads strides may."""
    for other in inputs_around(tx, fake):
        for dim, size in enumerate(other.real.shape):
            if size == 1 or other.real.numel() == 0:
                if present(expr_of(other.fake.stride(dim))) != other.real.stride(dim):
                    unsupported(tx, "a stride of a dimension of size 1, where sizes vary")
                guard(tx, part(CallSource, other.source, "stride", (dim,)), "CONSTANT_MATCH", other.real.stride(dim))


AS_STRIDED = frozenset(("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter"))


def check_strided(tx: Tracer, name: str, fake, view, absolute: bool) -> None:
    """`as_strided` may show what is around an input, of which a compiled function knows nothing: it may be given a copy, or
    another time a tensor that has nothing around it. absolute: it counts from the start of the memory."""
    for other in inputs_around(tx, fake):
        if other.fake.storage_offset() != 0 if name == "as_strided_scatter" else not inside(view, other.fake):
            unsupported(tx, f"{name} of an input, beyond its elements")
    if absolute:
        guard_place(tx, fake)


# %% [markdown]
# ## Writing
#
# A fake knows the views that the trace has taken, and what is done to the history of a tensor is done to theirs (`views_of`). What a fake
# stands for may be a view itself, of a tensor that the trace has never seen.

# %%
def views_of(tx: Tracer, tensor) -> list:
    return [v for v in tx.tensors.of_fake.values() if v.fake._base is tensor.fake]


def guard_views(tx: Tracer, written) -> None:
    """`written`, a fake, was changed in place. It may be what `detach` made of an input that has a gradient, and that counts its
    versions with it."""
    for fake in [written, *(v.fake for v in inputs_around(tx, written) if v.fake._version != v.version)]:
        if fake.requires_grad:
            guard_not_a_view(tx, fake)


def guard_not_a_view(tx: Tracer, written, reason: str = "a gradient is written to an input that is a view of another tensor"):
    """The contents of `written`, a fake with a gradient, were changed. If it belongs to an input of the graph that is a view of another
    tensor, eager has that tensor to think of, too, and may refuse: it was one of several views that one operator gave, was made with
    gradients off, or shows a leaf. And a leaf that is a view is none any more. The fake does not know: a break."""
    value = tx.tensors.of_fake.get(id(written if written._base is None else written._base))
    if value is None or value.real is None:
        return
    if value.real._is_view():
        unsupported(tx, reason)
    guard(tx, value.source, "NOT_A_VIEW", value.real.is_leaf)


def guard_viewed_leaves(tx: Tracer, written) -> None:
    """`written`, a fake, was changed in place while gradients were off. The history of a view that the program has taken before is then
    derived anew, from the tensor of which it is one. If that was taken from a leaf that is a view itself, it is what the leaf shows."""
    for value in inputs_around(tx, written):
        if value.fake.requires_grad and not isinstance(value.real, torch.nn.Parameter) and is_viewed(value.fake):
            guard_not_a_view(tx, value.fake, "memory of an input with a gradient is written that is a view of another tensor")


def taken_without_gradients(fake) -> bool:
    """Is it a view of a tensor that requires a gradient, taken while gradients were off?"""
    try:
        return fake.requires_grad and fake._is_view() and fake.grad_fn is None
    except RuntimeError:                # a write has invalidated it, of which whoever uses it hears
        return False
