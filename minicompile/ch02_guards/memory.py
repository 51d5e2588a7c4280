# %% [markdown]
# # Where tensors lie
#
# A compiled call asks every tensor that it gets for its address, sometimes twice: to see whether one that the graph
# writes overlaps another (`backends.py`), and whether what a CUDA graph reads in place is where it was (chapter 11).
# A training step has six hundred of them: parameters, and what the optimizer keeps for each. Asked one by one from
# Python they take 0.1 microseconds each, which is longer than many a kernel runs. The extension of the memos knows
# what a tensor is and asks all of them in one call, a few nanoseconds each. So it does for other things that are
# done to many tensors: raising a version, reading a counter.

# %%
import ctypes
import functools
from typing import Callable

import torch

from .stable import unchanged

size_of = unchanged.size_of if unchanged is not None else torch.Tensor.size
Spans = unchanged and unchanged.Spans          # `backends.harm_each_other`, for the same arguments call after call


def raise_versions(*tensors: torch.Tensor) -> None:
    """Tell autograd that these were written to. Those of inference mode have no version, and are left out."""
    if unchanged is None or not unchanged.raise_versions(*tensors):
        torch.autograd.graph.increment_version(tensors)


def lie_at(tensors: list, positions: list[int], addresses: list[int]) -> bool:
    """Whether the tensors at these positions are at these addresses."""
    if unchanged is None:
        return [tensors[i].data_ptr() for i in positions] == addresses
    return unchanged.lie_at(tensors, positions, addresses)


# %% [markdown]
# ## Who holds a tensor
#
# Memory may be written again when nobody can read it any more. For a tensor that was handed out this means: no Python
# object refers to it but ours, no other tensor is a view of its memory, nothing in C++ keeps either. CPython and PyTorch
# count all of these. The counts of PyTorch have no function in its C interface. They follow the first word of both kinds
# of objects, and whether they do is checked with tensors whose counts Python tells.
#
# What is compared is the state of now and that of a moment at which nobody else had the tensor yet: if the
# counts are equal, nobody else has it now. A weak reference or an attribute keeps nothing alive, but whoever made it
# would notice that the object lives on, so these count, too.

# %%
def find_holders() -> bool:
    """Tell the extension where counts are; False when that cannot be found out."""
    one, two = torch.zeros(3, device="cpu"), torch.zeros(2, 2, device="cpu")
    kept = [two.view(-1), two.detach(), two[0]]          # views keep the tensor, all of them its memory
    storages = [t.untyped_storage() for t in (one, two, kept[0])]
    return unchanged.setup_holders([(t._cdata, t._use_count(), s._cdata, torch._C._storage_Use_Count(s._cdata))
                                    for t, s in zip((one, two, kept[0]), storages)])


if unchanged is not None:
    find_holders()


def holders(tensors: list[torch.Tensor]) -> bytes | None:
    """Something that stays equal as long as nobody else takes hold of one of these, or changes what it is. None: not known, or the
    memory of one has another holder already."""
    return unchanged and unchanged.holders(tensors)


def storage_of(tensor: torch.Tensor) -> int:
    """A number for the memory of a tensor, which no other memory has meanwhile; where possible without a Python object for it."""
    return unchanged and unchanged.storage_of(tensor) or tensor.untyped_storage()._cdata


# %%
def counters_agree(*tensors: torch.Tensor) -> bool:
    """Whether 0-d tensors hold one number, each in memory of its own."""
    number = unchanged and unchanged.common_number(*tensors)
    if number is None:
        return len({t.item() for t in tensors}) == 1 and len({t.data_ptr() for t in tensors}) == len(tensors)
    return number == number


# %% [markdown]
# ## New tensors
#
# `torch.empty_strided` takes a microsecond, and half of it goes into reading the arguments. That is much for a program whose kernel takes a
# fifth of one. PyTorch's C interface makes a tensor on the CPU from numbers that the extension reads itself, and a window on the memory
# of another, which is `as_strided` but for autograd: it knows nothing of it. Whether results agree is tried when the function is
# made. Where numbers are not plain, or memory is short, the function of Python is called, and raises its error.

# %%
MAKERS = ("aoti_torch_empty_strided", "aoti_torch__reinterpret_tensor", "aoti_torch_delete_tensor_object",
          "_Z16THPVariable_WrapRKN2at10TensorBaseE")             # THPVariable_Wrap(const at::TensorBase&)


def find_makers() -> bool:
    """Tell the extension how tensors are made; False when that cannot be found out."""
    try:
        library = ctypes.CDLL(torch._C.__file__)
        unchanged.setup_makers(*(ctypes.cast(library[name], ctypes.c_void_p).value for name in MAKERS))
    except (OSError, AttributeError):
        return False
    return True


def facts(t: torch.Tensor) -> tuple:
    return type(t), t.shape, t.stride(), t.storage_offset(), t.dtype, t.device, t.requires_grad, torch._C._dispatch_keys(t).raw_repr()


@functools.cache
def empty_on_cpu(dtype: torch.dtype) -> Callable:
    """`empty(size, stride)` -> a new tensor of that dtype on the CPU."""
    in_python = functools.partial(torch.empty_strided, dtype=dtype, device=torch.device("cpu"))
    if not has_makers:
        return in_python
    empty = unchanged.Maker(in_python, in_python((), ()))
    return empty if facts(empty((2, 3), (1, 2))) == facts(in_python((2, 3), (1, 2))) else in_python


def view(tensor: torch.Tensor, size, stride, offset) -> torch.Tensor:
    """A window that starts `offset` elements after the first element of `tensor`."""
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


def view_apart(tensor: torch.Tensor, size, stride, offset) -> torch.Tensor:
    """The same, which autograd does not know for a view."""
    return view(tensor, size, stride, offset).detach()


has_makers = unchanged is not None and find_makers()
window = unchanged.Maker(view_apart) if has_makers else view_apart
if has_makers and facts(window(torch.empty(9, device="cpu")[1:], (2, 3), (3, 1), 2)) != facts(
        view_apart(torch.empty(9, device="cpu")[1:], (2, 3), (3, 1), 2)):
    window = view_apart
