# %% [markdown]
# # Views undone
#
# A rule is a function of the builder, the step that made the view, and the nodes of the parent and of the view.

# %%
import torch
from torch import fx

from ...ch01_graphs.layouts import inverse, is_dense
from ...ch01_graphs.shapes import expr_of
from ...errors import Unsupported
from ..aliases import UNDO, append_call

aten = torch.ops.aten

UNDO.update({op: lambda b, step, parent, new: new for op in (aten.alias.default, aten.detach.default, aten.lift_fresh.default)})
UNDO.update({op: lambda b, step, parent, new: append_call(b, step.target, (new, *step.args))
             for op in (aten.t.default, aten.transpose.int)})


@UNDO.of(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_alias.default,
        aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default,
        aten.expand.default)
def undo_reshape(b, step, parent, new):
    if new.meta["val"].numel() != parent.meta["val"].numel():
        raise Unsupported("writing through an expanded tensor")
    if not new.meta["val"].is_contiguous():
        new = append_call(b, aten.clone.default, (new,), {"memory_format": torch.contiguous_format})
    return append_call(b, aten.view.default, (new, [expr_of(s) for s in parent.meta["val"].shape]))


@UNDO.of(aten.permute.default)
def undo_permute(b, step, parent, new):
    dims = new.meta["val"].dim()
    return append_call(b, aten.permute.default, (new, inverse([d % dims for d in step.args[0]])))

# %% [markdown]
# The views that drop elements. `unbind` and `split` give several; `step.index` says which one this is.

# %%
SCATTER = {aten.select.int: aten.select_scatter.default, aten.slice.Tensor: aten.slice_scatter.default,
           aten.diagonal.default: aten.diagonal_scatter.default}


def scatter(b, op, parent, *args, **kwargs) -> fx.Node:
    """The kernels copy all of the memory around `parent`, in units of its dtype, of which there may be no whole number."""
    val = parent.meta["val"]
    if val.meta.untyped_storage().nbytes() % val.element_size() != 0:
        if op is aten.as_strided_scatter.default and (not is_dense(val) or val.storage_offset() != 0):
            raise Unsupported("as_strided of memory that holds no whole number of elements")
        parent = append_call(b, aten.clone.default, (parent,))
    return append_call(b, op, (parent, *args), kwargs)


@UNDO.of(*SCATTER)
def undo_window(b, step, parent, new):
    return scatter(b, SCATTER[step.target], parent, new, *step.args, **step.kwargs)


@UNDO.of(aten.unbind.int)
def undo_unbind(b, step, parent, new):
    return scatter(b, aten.select_scatter.default, parent, new, step.args[0] if step.args else 0, step.index)


@UNDO.of(aten.split.Tensor, aten.split_with_sizes.default)
def undo_split(b, step, parent, new):
    dim = step.args[1] if len(step.args) > 1 else step.kwargs.get("dim", 0)
    sizes = step.args[0] if isinstance(step.args[0], (list, tuple)) else [step.args[0]] * step.index
    start, length = sum(sizes[:step.index]), expr_of(new.meta["val"].shape[dim])
    return scatter(b, aten.slice_scatter.default, parent, new, dim, start, start + length)

# %% [markdown]
# Views of the same memory as another dtype, and last what fits any view: `as_strided_scatter`, which states
# positions in memory.

# %%
UNDO.update({
    aten.view_as_real.default: lambda b, step, parent, new: append_call(
        b, aten.view_as_complex.default, (append_call(b, aten.clone.default, (new,), {"memory_format": torch.contiguous_format}),)),
    aten.view_as_complex.default: lambda b, step, parent, new: append_call(b, aten.view_as_real.default, (new,)),
    aten._conj.default: lambda b, step, parent, new: append_call(b, aten.conj_physical.default, (new,)),
    aten._neg_view.default: lambda b, step, parent, new: append_call(b, aten.neg.default, (new,)),
})


@UNDO.of(aten.as_strided.default)
def undo_as_strided(b, step, parent, new):
    try:
        return scatter(b, aten.as_strided_scatter.default, parent, new, *step.args)
    except RuntimeError as error:       # the meta kernel for symbolic sizes knows dense parents only
        raise Unsupported(f"writing through {step.target}") from error


@UNDO.of(aten.view.dtype)
def undo_view_as_dtype(b, step, parent, new):
    if parent.meta["val"].element_size() != new.meta["val"].element_size():
        raise Unsupported(f"writing through {step.target}")
    return append_call(b, aten.view.dtype, (new, parent.meta["val"].dtype))
