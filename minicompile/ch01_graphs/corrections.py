# %% [markdown]
# # Where meta kernels are wrong
#
# A generated kernel writes its result where the fake says, so the fake's strides have to be eager's, or a
# later `view` works in one and fails in the other. A few meta kernels are wrong about them. What pointwise kernels have in common
# is here; rules for single operators are in `rules/forms.py`.

# %%
import contextlib
import functools

import torch

from ..tables import Table


@contextlib.contextmanager
def outside():
    """PyTorch as it is outside of every trace."""
    with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
        yield


# %% [markdown]
# Most pointwise kernels share one rule for the order of dims in the result: the operands are asked in turn,
# and one in which a dim is broadcast has no opinion about it. Meta kernels written in Python only approximate
# it.

# %%
def _any_broadcasts(operands) -> bool:
    """Is there an expanded dim, and another operand? Meta kernels in Python first convert halves to float32, and a converted
    tensor is expanded no more: it has an opinion then about the order of dims, which the real kernel does not ask for."""
    tensors = [x for x in operands if isinstance(x, torch.Tensor)]
    return len(tensors) > 1 and any(type(n) is int and n > 1 and stride == 0 for t in tensors for n, stride in zip(t.shape, t.stride()))


# %% [markdown]
# The rule is not written down here. It is asked: meta tensors with the strides of the operands, all of one dtype
# so that no promotion interferes, are added, and the sum has the strides that any pointwise kernel would choose.
# With one operand, `neg` takes the place of `add`, and with three `addcmul`: of three operands the kernel asks the third
# where the first two are both expanded, while the sum of those two would not be expanded. If the shapes differ from
# those of `out`, the operator was no plain pointwise one, and its own answer stays.

# %%
PLAIN_KERNELS = {1: torch.neg, 2: torch.add, 3: torch.addcmul}


def pointwise_layout(out, operands):
    tensors = [x for x in operands if isinstance(x, torch.Tensor)]
    if not tensors:
        return out
    with with_symbols_or_outside(out, *tensors):
        tensors = [torch.empty_strided(t.shape, t.stride(), device="meta") for t in tensors]     # of one dtype
        like = PLAIN_KERNELS[len(tensors)](*tensors) if len(tensors) in PLAIN_KERNELS else functools.reduce(torch.add, tensors)
        if like.shape != out.shape:
            return out
        return torch.empty_strided(out.shape, like.stride(), dtype=out.dtype, device="meta")


def with_symbols_or_outside(*tensors):
    """Sizes that are symbols need the Python dispatcher; numbers need nothing of ours."""
    symbolic = any(isinstance(s, torch.SymInt) for t in tensors for s in (*t.shape, *t.stride()))
    return torch._C._EnablePythonDispatcher() if symbolic else outside()


# %% [markdown]
# The other corrections are rules for single operators, which take the meta kernel's answer and the operands, and return the
# answer of the real kernel.

# %%
FORMS, CPU_FORMS = Table(), Table()      # operator -> function(out, *operands): on all devices, and on a CPU (`rules/forms.py`)


def true_form(func, out, operands, device):
    """`out`, the answer of a meta kernel, as the kernel of the device would give it."""
    if torch.Tag.pointwise in func.tags and not func._schema.is_mutable and _any_broadcasts(operands):
        return pointwise_layout(out, operands)
    form = device.type == "cpu" and CPU_FORMS.get(func) or FORMS.get(func)
    return form(out, *operands) if form else out
