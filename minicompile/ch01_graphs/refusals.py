# %% [markdown]
# # What only the kernel refuses
#
# A program that eager would end with an exception must end so when compiled, and at the same line. Meta
# kernels check shapes, though not all of them. They do not check everything else: `torch.mm` of two dtypes, a float as an index, a
# softmax of integers, a copy onto overlapping memory all pass. Some of these rules are written down in `rules/refused.py`.
#
# The rest only the kernel knows, so it is asked: once for each operator, dtypes and flags, for some operators each shape (`SHAPED`),
# and whenever something is written that shares memory with another argument, it runs on zeros that lie as the tensors would. That
# costs microseconds; beyond `TRIED_BYTES`, where it would not, the call itself will find out, except for floats of two dtypes, which
# loops of ours would take as they are. Of numbers only the type counts, and into which dtypes they fit: 1e300 overflows where 1.0 does
# not.

# %%
import re

import torch
from torch.utils import _pytree as pytree

from ..errors import Unsupported
from ..tables import Table
from .corrections import outside
from .fake import FakeTensor, form_of, storage_key
from .layouts import length_of, present
from .rules.operators import SHAPED

# %% [markdown]
# `REFUSALS` is the table of what is written down: for an operator a function of its arguments that raises what the kernel would.

# %%
REFUSALS = Table()


def check_devices(device: torch.device, operands) -> None:
    """That the tensors among the operands are on this device."""
    for t in operands:
        if isinstance(t, torch.Tensor) and t.device != device:
            raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two devices, {device} and {t.device}!")


# %% [markdown]
# `check_with_kernel` finds out whether the kernel has to be asked. It does not ask for operators whose
# result is random, for those that would trust numbers that are zeros here, and for derivatives, which no user
# calls. Then it looks whether a call of this kind has been accepted before. Two tensors that share memory are
# a case of their own: whether a kernel minds depends on how they overlap, so it is asked each time.
#
# The operators in `SHAPED` have meta kernels that let sizes pass which the kernel refuses: a `put` of three numbers at two
# positions, the largest element of nothing. Kernels of all devices look at sizes alike, so the CPU's is asked for tensors of a GPU, too,
# and its word counts unless it is about a dtype that another device may support. That two operands have to be of one dtype is said to
# all devices by the same code (`ABOUT_BOTH`), or by a kernel for each device: a layer norm of halves by float32 weights is refused on a GPU
# only, other pairs on both. What a CPU refuses for this reason is left to eager on a GPU. A position of 0 is valid wherever one is, so
# zeros do for the indices.
#
# `_kernel_refuses` builds the tensors: a block of zeros for each storage, and on each a tensor with the
# sizes, strides and offset of the fake.

# %%
# Words of refusals that are about dtypes and memory, not about the numbers in the tensors, which are zeros here
ABOUT_KINDS = re.compile("not implemented for|unsupported operation|for input.numel|support|dtype|scalar type|boolean|[Bb]ool"
                   "|same (data ?)?type|can't be cast|inputs to be|should be the same|long tensor|without overflow|destination dtypes"
                   "|negative integer powers|argument alpha")
ABOUT_BOTH = re.compile("expected to have the same dtype|must have the same scalar type|with different dtypes|Found dtype"
                        "|destination dtypes")
ABOUT_TWO = re.compile("scalar type|same (data ?)?type|types to match")
TRIED_BYTES, TRIED_BYTES_OF_TWO_DTYPES = 1 << 20, 1 << 28
_ACCEPTED: set = set()                  # calls, up to shapes and numbers, that a kernel has not refused
LIMITS = [(info.min, info.max) for info in (*map(torch.iinfo, (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)),
                                            *map(torch.finfo, (torch.float16, torch.bfloat16, torch.float32)))]


def check_with_kernel(func, kwargs, flat, spec) -> None:
    fakes = [x for x in flat if isinstance(x, FakeTensor)]
    shaped, on_cpu = func in SHAPED, all(t.device.type == "cpu" for t in fakes)
    mixed = torch.Tag.pointwise not in func.tags and len({t.dtype for t in fakes if t.is_floating_point()}) > 1
    if not fakes or func.namespace != "aten" or not (on_cpu or shaped or mixed) \
            or torch.Tag.nondeterministic_seeded in func.tags or _trusts_positions(func) or _is_derivative(func):
        return
    forms = [form_of(t) for t in fakes]
    shared = func._schema.is_mutable and (
        len({storage_key(t) for t in fakes}) < len(set(map(id, fakes))) or any(
            stride == 0 and size > 1 for sizes, strides, _ in forms for size, stride in zip(sizes, strides)))
    empty = [0 in sizes for sizes, _, _ in forms]
    kinds = [x if shaped and type(x) is int else what_kernels_see(x) for x in flat]
    key = (func, tuple(kwargs), tuple(kinds), on_cpu, torch.are_deterministic_algorithms_enabled(),
           tuple([sizes for sizes, _, _ in forms] if shaped else empty))
    if not shared and key in _ACCEPTED:
        return
    if sum(length_of(form) * t.dtype.itemsize for t, form in zip(fakes, forms)) > (TRIED_BYTES_OF_TWO_DTYPES if mixed else TRIED_BYTES):
        return
    error = _kernel_refuses(func, flat, spec)
    counts = error is not None and (on_cpu or ABOUT_BOTH.search(str(error)) if ABOUT_KINDS.search(str(error)) else shaped)
    if counts:
        raise type(error)(*error.args)  # asked again the next time: it may be about the numbers or the shapes of this call
    if error is not None and mixed and not on_cpu and ABOUT_TWO.search(str(error)):
        raise Unsupported(f"{func} of these dtypes, which a CPU refuses, as a GPU may")
    if error is None and not shared:            # else it was about something of this call, and dtypes may not have been looked at
        _ACCEPTED.add(key)


def _trusts_positions(func) -> bool:
    """LAPACK's solvers count pivots from 1 and do not check them: with zeros they write outside of their memory."""
    return any("pivots" in a.name for a in func._schema.arguments)


def _is_derivative(func) -> bool:
    """The autograd engine calls it, with what forward returned: no program is to be refused. And the dtypes may not be
    eager's: the statistics of a layer norm are float32 on fakes, and of its operand's dtype in a CPU kernel."""
    return func._schema.name.endswith("_backward")


def what_kernels_see(x):
    """What a refusal can depend on: of a tensor its dtype, of a number its type and into what it fits, of anything else (flags, names)
    all of it."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.dim() == 0
    if type(x) in (int, float):
        return type(x), 0 <= x <= 127 or (x - x == 0, *[low <= x <= high for low, high in LIMITS])
    return type(x) if isinstance(x, (complex, torch.SymInt, torch.SymFloat)) else x


def _kernel_refuses(func, flat, spec):
    """The exception with which a kernel refuses tensors like these (perhaps for the zeros in them), or None."""
    blank: dict = {}                    # storage -> zeros

    def real(x):
        if not isinstance(x, FakeTensor):
            return present(x)
        sizes, strides, offset = form = form_of(x)
        memory = blank.setdefault(storage_key(x), torch.UntypedStorage(0))
        if memory.nbytes() < length_of(form) * x.dtype.itemsize:
            memory.resize_(length_of(form) * x.dtype.itemsize)
        return torch.empty(0, dtype=x.dtype).set_(memory, offset, sizes, strides)

    with outside():
        args, kwargs = pytree.tree_unflatten([real(x) for x in flat], spec)
        for memory in blank.values():
            memory.fill_(0)
        try:
            func(*args, **kwargs)
        except Exception as error:
            return type(error)(*error.args)     # without its traceback, whose frames would hold the error: a cycle
    return None
