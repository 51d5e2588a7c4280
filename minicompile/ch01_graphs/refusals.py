# %% [markdown]
# # What only the kernel refuses
#
# A program that eager would end with an exception must end so when compiled, and at the same line. Meta
# kernels check shapes, though not all of them. They do not check everything else: `torch.mm` of two dtypes, a float as an index, a
# softmax of integers, a copy onto overlapping memory all pass. Some of these rules are written down here.
#
# The rest only the kernel knows, so it is asked: once for each operator, dtypes and flags, for some operators each shape (`SHAPED`),
# and whenever something is written that shares memory with another argument, it runs on zeros that lie as the tensors would. That
# costs microseconds; beyond `TRIED_BYTES`, where it would not, the call itself will find out. Of numbers only the type counts, and
# into which dtypes they fit: 1e300 overflows where 1.0 does not.

# %%
import math
import re

import torch
from torch.utils import _pytree as pytree

from ..errors import Unsupported
from ..tables import Table
from .corrections import outside
from .fake import FakeTensor, form_of, length_of, storage_key
from .layouts import present

aten = torch.ops.aten

STRIDED = {aten.as_strided, aten.as_strided_, aten.as_strided_copy}
IN_PLACE_VIEWS = {                      # `x.t_()` writes no data: the tensor object becomes a view of what it was
    aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.unsqueeze_.default: aten.unsqueeze.default,
    aten.as_strided_.default: aten.as_strided.default,
}
SCATTERED = {                           # the part of their first operand that is replaced by the second
    aten.select_scatter.default: aten.select.int,
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.diagonal_scatter.default: aten.diagonal.default,
    aten.as_strided_scatter.default: aten.as_strided.default,
}

# %% [markdown]
# `REFUSALS` is the table of what is written down: for an operator a function of its arguments that raises what the kernel would.

# %%
REFUSALS = Table()


def overloads(*packets) -> list:
    return [getattr(packet, name) for packet in packets for name in packet.overloads()]


@REFUSALS.of(*(packet.default for packet in (
    aten.mm, aten.bmm, aten.baddbmm, aten.addbmm, aten.mv, aten.dot, aten.vdot)))
def check_dtypes(func, *args, **kwargs) -> None:
    dtypes = [str(t.dtype) for t in args if isinstance(t, torch.Tensor)]
    if len(set(dtypes)) > 1:
        raise RuntimeError(f"expected operands of one dtype, got {', '.join(dtypes)}")


@REFUSALS.of(*(packet.default for packet in (aten.addmm, aten.addmm_, aten.addmv, aten.addmv_)))
def check_added(func, x, a, b, **kwargs) -> None:
    check_dtypes(func, x, a, b)
    if x.dim() > a.dim() + b.dim() - 2:
        raise RuntimeError(f"a product of {a.dim() + b.dim() - 2} dimensions is added to a tensor of {x.dim()}")


@REFUSALS.of(aten._softmax.default)
def check_dimension(func, x, dim, *args) -> None:
    if x.dim() == 0 and dim not in (-1, 0):               # of more dimensions the meta kernel says so
        raise IndexError(f"Dimension out of range (expected to be in range of [-1, 0], but got {dim})")


@REFUSALS.of(aten.convolution.default)
def check_convolved(func, x, weight, bias, stride, padding, dilation, transposed, output_padding, groups) -> None:
    """The channels, also of other sizes than today's; and for a transposed convolution on a CPU how much its output is padded."""
    expected = weight.shape[0] if transposed else weight.shape[1] * groups
    if x.dim() == weight.dim() and x.shape[1] != expected:
        raise RuntimeError(f"expected an input of {expected} channels for a weight of size {list(weight.shape)}, got {list(x.shape)}")
    if transposed and x.device.type == "cpu" and any(map(lambda p, s, d: p >= max(s, d), output_padding, stride, dilation)):
        raise RuntimeError(f"output padding {output_padding} must be smaller than stride {stride} or dilation {dilation}")


@REFUSALS.of(aten.full.default, aten.scalar_tensor.default)
def check_fill(func, *args, dtype=None, **kwargs) -> None:
    """The number may not fit; of one element another kernel says so."""
    if type(args[-1]) in (int, float, complex):
        with outside():
            torch.full((min(math.prod(map(present, *args[:-1])), 2),) if args[:-1] else (), args[-1], dtype=dtype)


@REFUSALS.of(*SCATTERED)
def check_scattered(func, x, source, *args, **kwargs) -> None:
    part = FakeTensor.run(SCATTERED[func], (x, *args), kwargs)
    if source.device != x.device:
        raise Unsupported(f"{func} of a source on another device, which it copies")
    if part.shape != source.shape:
        raise RuntimeError(f"expected a source of size {list(part.shape)}, got {list(source.shape)}")
    if func is aten.as_strided_scatter.default and any(step == 0 and size > 1 for size, step in zip(part.shape, part.stride())):
        raise RuntimeError("unsupported operation: more than one element of the written-to tensor refers to a single memory location")


@REFUSALS.of(*overloads(aten.quantize_per_tensor, aten.quantize_per_tensor_dynamic, aten.quantize_per_channel))
def refuse_quantized(func, *args, **kwargs) -> None:
    raise Unsupported(f"{func} gives a quantized tensor")              # its meta kernel, a plain one


@REFUSALS.of(aten.nll_loss2d_forward.default)
def check_deterministic(func, x, *args, **kwargs) -> None:
    """The loops of a compiled loss would be, and eager's kernel for a GPU says that it is not."""
    if x.device.type == "cuda" and torch.are_deterministic_algorithms_enabled():
        raise Unsupported(f"{func} has no deterministic kernel on a GPU, of which eager complains")


@REFUSALS.of(*IN_PLACE_VIEWS)
def check_unviewed(func, x, *args, **kwargs) -> None:
    if is_viewed(x):
        raise Unsupported("a tensor of which there are views changes its shape in place")
    if func is aten.as_strided_.default:
        check_storage(func, x, *args, **kwargs)


def is_viewed(t: torch.Tensor) -> bool:
    """Whether other tensors that are alive are views of `t`. After a write PyTorch derives the history of a view from that of its base
    anew: on real tensors by `as_strided`, on fakes by taking the view again, which is another part of memory if `t` has another shape."""
    if not isinstance(t, FakeTensor) or t._base is not None:
        return False
    memory = t.meta.untyped_storage()
    return torch._C._storage_Use_Count(memory._cdata) > 2 + t.formers       # this Python object, and the meta tensor of `t`


@REFUSALS.of(*overloads(aten.as_strided, aten.as_strided_copy))
def check_storage(func, t: FakeTensor, sizes, strides, offset=None, **kwargs) -> None:
    """`as_strided` beyond the memory that there is, which a meta tensor does not have."""
    form = [tuple(sizes), tuple(strides), t.storage_offset() if offset is None else offset]
    there = t.meta.untyped_storage().nbytes()
    if not any(n == 0 for n in sizes) and (needed := length_of(form) * t.dtype.itemsize) > there:
        raise RuntimeError(f"setStorage: sizes {list(form[0])}, strides {list(form[1])}, storage offset {form[2]} "
                           f"require {needed} bytes, out of bounds for storage of size {there}")


def check_devices(tensor, others) -> None:
    if any(isinstance(t, torch.Tensor) and t.device != tensor.device for t in others):
        raise RuntimeError("expected tensors on the device of the indexed tensor")


@REFUSALS.of(*overloads(aten.index_fill, aten.index_fill_))
def check_filled(func, tensor, dim, index, value) -> None:
    check_devices(tensor, [index])


@REFUSALS.of(aten.index.Tensor, *overloads(aten.index_put, aten.index_put_, aten._index_put_impl_))
def check_indices(func, tensor, indices, *args, **kwargs) -> None:
    """What the kernel of an `index_put` refuses and its meta kernel does not look at: floats, masks of another shape, and devices."""
    check_devices(tensor, [t for t in args[:1] if t.dim()] if args else indices if tensor.device.type == "cpu" else [])
    d = 0
    for index in indices:
        if isinstance(index, torch.Tensor) and (index.is_floating_point() or index.is_complex()):
            raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
        width = index.dim() if index is not None and index.dtype in (torch.bool, torch.uint8) else 1
        if index is not None and index.dtype is torch.bool and index.shape != tensor.shape[d:d + width]:
            raise IndexError(f"the shape of the mask {list(index.shape)} does not match that of the indexed "
                             f"tensor {list(tensor.shape)} at dimension {d}")
        d += width


# %% [markdown]
# `check_with_kernel` finds out whether the kernel has to be asked. It does not ask for operators whose
# result is random, for those that would trust numbers that are zeros here, and for derivatives, which no user
# calls. Then it looks whether a call of this kind has been accepted before. Two tensors that share memory are
# a case of their own: whether a kernel minds depends on how they overlap, so it is asked each time.
#
# The operators in `SHAPED` have meta kernels that let sizes pass which the kernel refuses: a `put` of three numbers at two
# positions, the largest element of nothing. Kernels of all devices look at sizes alike, so the CPU's is asked for tensors of a GPU, too,
# and its word counts unless it is about a dtype that another device may support. A position of 0 is valid wherever one is, so zeros
# do for the indices.
#
# `_kernel_refuses` builds the tensors: a block of zeros for each storage, and on each a tensor with the
# sizes, strides and offset of the fake.

# %%
# Words of refusals that are about dtypes and memory, not about the numbers in the tensors, which are zeros here
KINDS = re.compile("not implemented for|unsupported operation|for input.numel|support|dtype|scalar type|boolean|[Bb]ool"
                   "|same (data ?)?type|can't be cast|inputs to be|should be the same|long tensor|without overflow|destination dtypes")
SHAPED = set(overloads(
    aten.put, aten.put_, aten.index_add, aten.index_add_, aten.index_reduce, aten.index_reduce_, aten.index_copy, aten.index_copy_,
    aten.index_fill, aten.index_fill_, aten.index, aten.index_select, aten.embedding, aten.gather,
    aten.scatter, aten.scatter_, aten.scatter_add, aten.scatter_add_, aten.scatter_reduce, aten.scatter_reduce_, aten.masked_scatter,
    aten.masked_scatter_, aten.index_put, aten.index_put_, aten._index_put_impl_, aten.searchsorted, aten.bucketize,
    aten.nll_loss_forward, aten.nll_loss2d_forward, aten.soft_margin_loss, aten.max, aten.min, aten.median, aten.nanmedian, aten.mode))
TRIED_BYTES = 1 << 20
_ACCEPTED: set = set()                  # calls, up to shapes and numbers, that a kernel has not refused
LIMITS = [(info.min, info.max) for info in (*map(torch.iinfo, (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)),
                                            *map(torch.finfo, (torch.float16, torch.bfloat16, torch.float32)))]


def check_with_kernel(func, kwargs, flat, spec) -> None:
    fakes = [x for x in flat if isinstance(x, FakeTensor)]
    shaped, on_cpu = func in SHAPED, all(t.device.type == "cpu" for t in fakes)
    if not fakes or func.namespace != "aten" or not (on_cpu or shaped) \
            or torch.Tag.nondeterministic_seeded in func.tags or _trusts_positions(func) or _is_derivative(func):
        return
    forms = [form_of(t) for t in fakes]
    shared = func._schema.is_mutable and (
        len({storage_key(t) for t in fakes}) < len(set(map(id, fakes))) or any(
            stride == 0 and size > 1 for sizes, strides, _ in forms for size, stride in zip(sizes, strides)))
    empty = [0 in sizes for sizes, _, _ in forms]
    kinds = [x if shaped and type(x) is int else _kind_of(x) for x in flat]
    key = (func, tuple(kwargs), tuple(kinds), on_cpu, torch.are_deterministic_algorithms_enabled(),
           tuple([sizes for sizes, _, _ in forms] if shaped else empty))
    if not shared and key in _ACCEPTED:
        return
    if sum(length_of(form) * t.dtype.itemsize for t, form in zip(fakes, forms)) > TRIED_BYTES:
        return
    error = _kernel_refuses(func, flat, spec)
    if error is not None and (on_cpu if KINDS.search(str(error)) else shaped):
        raise type(error)(*error.args)  # asked again the next time: it may be about the numbers or the shapes of this call
    if not shared:
        _ACCEPTED.add(key)


def _trusts_positions(func) -> bool:
    """LAPACK's solvers count pivots from 1 and do not check them: with zeros they write outside of their memory."""
    return any("pivots" in a.name for a in func._schema.arguments)


def _is_derivative(func) -> bool:
    """The autograd engine calls it, with what forward returned: no program is to be refused. And the dtypes may not be
    eager's: the statistics of a layer norm are float32 on fakes, and of its operand's dtype in a CPU kernel."""
    return func._schema.name.endswith("_backward")


def _kind_of(x):
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
