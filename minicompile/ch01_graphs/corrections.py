# %% [markdown]
# # Where meta kernels are wrong
#
# A generated kernel writes its result where the fake says, so the fake's strides have to be eager's, or a
# later `view` works in one and fails in the other. That includes the strides of dims of size 1, which address nothing: the next
# operator may ask them for an order. What elementwise kernels and copies have in common is here; rules for single operators are
# in `rules/forms.py`.

# %%
import contextlib
import functools

import torch

from ..tables import Table
from .layouts import contiguous_strides, copied_strides, elementwise_strides, present


@contextlib.contextmanager
def outside():
    """PyTorch as it is outside of every trace."""
    with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
        yield


# %% [markdown]
# Meta kernels, many of them in Python, renew the strides of dims of size 1, and go their own way where an operand is expanded. The rule of
# the kernels is in `layouts.py`, so an operator need only say which operands take part: all tensors, and a number where the kernel makes
# a tensor without dims of it. On a CPU a tensor of another dtype than that of the computation is copied first.

# %%
def restrided(out, strides):
    """`out`, lying so."""
    same = tuple(map(present, out.stride())) == tuple(map(present, strides))
    return out if same else torch.empty_strided(out.shape, strides, dtype=out.dtype, device="meta")


def row_by_row(out, *_):
    return restrided(out, contiguous_strides(out.shape))


def like_a_copy(out, x, *_):
    """As a copy of `x`; what is reduced has another shape."""
    return restrided(out, copied_strides(x.shape, x.stride())) if out.shape == x.shape else out


def elementwise(out, *operands):
    """As by a kernel for these tensors and numbers."""
    if not isinstance(out, torch.Tensor) or out.dim() == 0:
        return out
    forms = [(x.shape, x.stride()) if isinstance(x, torch.Tensor) else ((), ()) for x in operands]
    return restrided(out, elementwise_strides(out.shape, forms))


def as_promoted(operands, dtype) -> list:
    """The operands, as they are copied before they are read."""
    return [torch.empty_strided(x.shape, copied_strides(x.shape, x.stride()), dtype=dtype, device="meta")
            if isinstance(x, torch.Tensor) and x.dtype != dtype and x.dim() else x for x in operands]


def _promoted_together(out, operands) -> list:
    """The same on a CPU, unless real numbers become complex ones or the other way round."""
    dtypes = [x.dtype for x in operands if isinstance(x, torch.Tensor)]
    dtype = functools.reduce(torch.promote_types, dtypes) if out.dtype is torch.bool else out.dtype
    return as_promoted(operands, dtype) if any(d.is_complex is dtype.is_complex for d in dtypes) else operands


OPERANDS = Table()                      # the places of what takes part, where tag and schema do not tell (`rules/forms.py`)
COPYING: set = set()                    # copies of the first operand, of which some elements are written then


@functools.cache
def _takes_part(func) -> list[int] | None:
    """The places of the operands of an elementwise kernel, in the order in which it asks them."""
    if func in OPERANDS or func._schema.is_mutable or torch.Tag.pointwise not in func.tags:
        return OPERANDS.get(func)
    kinds = "Tensor", "Optional[Tensor]", *["number"] * ("calar" in func._schema.overload_name)
    return [i for i, a in enumerate(func._schema.arguments) if str(a.type) in kinds and not a.kwarg_only]


# %% [markdown]
# The other corrections are rules for single operators, which take the meta kernel's answer and the operands, and return the
# answer of the real kernel.

# %%
FORMS, CPU_FORMS = Table(), Table()      # operator -> function(out, *operands): on all devices, and on a CPU (`rules/forms.py`)


def true_form(func, out, operands, kwargs, device):
    """`out`, the answer of a meta kernel, as the kernel of the device would give it."""
    if (form := device.type == "cpu" and CPU_FORMS.get(func) or FORMS.get(func)) is not None:
        return form(out, *operands)
    if func in COPYING:
        return like_a_copy(out, operands[0]) if kwargs.get("memory_format") in (None, torch.preserve_format) else out
    if (places := _takes_part(func)) is not None:
        taken = [operands[i] for i in places if i < len(operands) and operands[i] is not None]
        return elementwise(out, *(_promoted_together(out, taken) if device.type == "cpu" else taken))
    return out
