# %% [markdown]
# # What kernels refuse, written down
#
# A rule gets the operator and its arguments, and raises what the kernel would: where the meta kernel lets something pass that the kernel of
# the device refuses, as products of two dtypes. Where a rule raises an error of its own, the words are ours, and the type is eager's,
# because a program catches types. Where a GPU's kernel takes what a CPU's refuses, `Unsupported` leaves the call to eager.

# %%
import math

import torch

from ...errors import Unsupported
from ..corrections import outside
from ..fake import FakeTensor
from ..layouts import each_has_its_place, length_of, present
from ..refusals import REFUSALS, check_devices
from .forms import lies_channels_last
from .operators import IN_PLACE_VIEWS, SCATTERED, overloads

aten = torch.ops.aten


@REFUSALS.of(*(packet.default for packet in (
    aten.mm, aten.bmm, aten.baddbmm, aten.addbmm, aten.mv, aten.dot, aten.vdot, aten.heaviside, aten.heaviside_)))
def check_dtypes(func, *args, **kwargs) -> None:
    dtypes = [str(t.dtype) for t in args if isinstance(t, torch.Tensor)]
    if len(set(dtypes)) > 1:
        raise RuntimeError(f"expected operands of one dtype, got {', '.join(dtypes)}")


@REFUSALS.of(*(packet.default for packet in (aten.addmm, aten.addmm_, aten.addmv, aten.addmv_)))
def check_added(func, x, a, b, **kwargs) -> None:
    if x.device.type == "cuda" and func in (aten.addmv.default, aten.addmv_.default) and x.dtype != a.dtype:
        raise Unsupported(f"{func} of two dtypes, which a GPU takes")
    check_dtypes(func, x, a, b)
    if x.dim() > a.dim() + b.dim() - 2:
        raise RuntimeError(f"a product of {a.dim() + b.dim() - 2} dimensions is added to a tensor of {x.dim()}")
    if b.dim() == 1 and b.shape[0] == 0 and x.shape != a.shape[:1]:
        raise Unsupported(f"{func} of an empty vector, which gives what is added in its own size")


@REFUSALS.of(aten._softmax.default)
def check_dimension(func, x, dim, *args) -> None:
    if x.dim() == 0 and dim not in (-1, 0):               # of more dimensions the meta kernel says so
        raise IndexError(f"Dimension out of range (expected to be in range of [-1, 0], but got {dim})")


@REFUSALS.of(aten.convolution.default)
def check_convolved(func, x, weight, bias, stride, padding, dilation, transposed, output_padding, groups) -> None:
    """The channels, also of other sizes than today's; that the kernel fits into the padded input, which PyTorch 2.11 does not ask of a
    fake; for a transposed convolution that something is left of its output, and on a CPU how much that is padded."""
    expected = weight.shape[0] if transposed else weight.shape[1] * groups
    check_dtypes(func, x, weight)
    if any(step < 1 for step in dilation):
        raise RuntimeError("dilation should be greater than zero")
    if any(pad < 0 for pad in padding):
        raise RuntimeError("negative padding is not supported")
    if x.dim() == weight.dim() and x.shape[1] != expected:
        raise RuntimeError(f"expected an input of {expected} channels for a weight of size {list(weight.shape)}, got {list(x.shape)}")
    if x.dim() == weight.dim():
        for size, kernel, pad, step, jump, more in zip(x.shape[2:], weight.shape[2:], padding, dilation, stride, output_padding):
            if transposed and (size - 1) * jump + step * (kernel - 1) + more < 2 * pad:
                raise RuntimeError(f"nothing is left of the {size} positions of an input, transposed, without {pad} at either end")
            if not transposed and size + 2 * pad < step * (kernel - 1) + 1:
                raise RuntimeError(f"a kernel of size {kernel}, dilated by {step}, is larger than an input of size {size}, padded by {pad}")
    if transposed and x.device.type == "cpu" and any(map(lambda p, s, d: p >= max(s, d), output_padding, stride, dilation)):
        raise RuntimeError(f"output padding {output_padding} must be smaller than stride {stride} or dilation {dilation}")


@REFUSALS.of(aten.huber_loss_backward.default)
def check_slope(func, grad, x, target, *args) -> None:
    check_dtypes(func, x, target)


@REFUSALS.of(aten.masked_scatter.default, aten.masked_scatter_.default)
def check_mask(func, x, mask, source) -> None:
    if x.device.type == "cuda" and mask.dtype != torch.bool:            # a CPU takes bytes, with a warning
        raise RuntimeError(f"masked_scatter on a GPU takes a mask of bools, got {mask.dtype}")


@REFUSALS.of(*overloads(aten.median, aten.nanmedian))
def check_dims(func, x, *args, **kwargs) -> None:
    if x.device.type == "cuda" and x.dim() >= 25:
        raise RuntimeError(f"a median of {x.dim()} dimensions on a GPU")


@REFUSALS.of(aten.avg_pool3d.default)
def check_divisor(func, x, *args, divisor_override=None) -> None:
    if (args[5] if len(args) > 5 else divisor_override) == 0:
        raise RuntimeError("divisor must be not zero")


@REFUSALS.of(aten.max_pool3d_with_indices.default)
def check_pooled(func, x, *args, **kwargs) -> None:
    """Without a dim for the samples of a batch, a CPU takes strides in which the depth varies fastest for a form that it does not have."""
    if x.device.type == "cpu" and x.dim() == 4 and lies_channels_last(x):
        raise RuntimeError("a three-dimensional pool of one sample whose depth varies fastest in memory")


# %% [markdown]
# Others refuse a number of Python that the dtype of their result does not hold. What holds it is asked of `torch.full`, whose kernel
# on a CPU converts numbers as those of all devices do. One element is filled by another kernel, which takes more, so two are made.

# %%
@REFUSALS.of(aten.full.default, aten.scalar_tensor.default)
def check_fill(func, *args, dtype=None, **kwargs) -> None:
    """The number may not fit; of one element another kernel says so."""
    if type(args[-1]) in (int, float, complex):
        with outside():
            torch.full((min(math.prod(map(present, *args[:-1])), 2),) if args[:-1] else (), args[-1], dtype=dtype)


@REFUSALS.of(aten.linspace.default)
def check_ends(func, start, end, steps, *, dtype=None, **kwargs) -> None:
    """Nor may the ends fit; two elements say so, and one says it of the first end."""
    with outside():
        torch.linspace(present(start), present(end), min(present(steps), 2), dtype=dtype)


@REFUSALS.of(aten.ldexp.Tensor)
def check_exponents(func, x, exponents) -> None:
    """The kernel for floats and whole exponents takes no number of a CPU; others are scaled by a product with a power."""
    if x.is_floating_point() and not exponents.is_floating_point():
        check_devices(x.device, [exponents])


@REFUSALS.of(aten.pow.Tensor_Scalar, aten.pow_.Scalar)
def check_exponent(func, x, exponent) -> None:
    """A kernel on a GPU converts the exponent to the dtype of the result, as one on a CPU that fills does, which is asked."""
    if x.device.type != "cuda" or type(exponent) not in (int, float):
        return
    dtype = torch.result_type(x.meta, exponent)
    if exponent < 0 and not (dtype.is_floating_point or dtype.is_complex):
        raise RuntimeError("Integers to negative integer powers are not allowed.")
    with outside():
        torch.full((2,), exponent, dtype=dtype)


@REFUSALS.of(*overloads(aten.celu, aten.celu_))
def check_celu(func, x, alpha=1.0) -> None:
    if present(alpha) == 0:
        with outside():
            func(torch.zeros(1), 0.0)


# %% [markdown]
# Operators that draw are not asked in general, since that would draw from the program's generator. Those below
# take bounds or a probability, and their meta kernels take any. What is refused for numbers in tensors (negative weights), the
# kernel says in the call, as of indices.

# %%
@REFUSALS.of(aten.bernoulli.p, aten.bernoulli_.float, *overloads(aten.uniform_, aten.random_, aten.randint, aten.randint_like))
def check_drawn(func, *args, dtype=None, device=None, **kwargs) -> None:
    """Bounds and a probability: the kernel is asked for two numbers, of a generator of its own."""
    x = args[0] if isinstance(args[0], torch.Tensor) else None
    numbers = [present(n) for n in args if isinstance(n, (int, float, torch.SymInt, torch.SymFloat))]
    with outside():
        two, generator = torch.zeros(2, dtype=dtype or (torch.long if x is None else x.dtype)), torch.Generator()
        try:
            if "randint" in func._schema.name:
                two.random_(*[0] * (len(numbers) == 1), *numbers, generator=generator)
            else:
                func(two, *numbers, generator=generator)
        except NotImplementedError:                         # another device may know the dtype
            if torch.device((x.device if device is None and x is not None else device) or "cpu").type == "cpu":
                raise


@REFUSALS.of(aten.multinomial.default)
def check_samples(func, x, samples, replacement=False, **kwargs) -> None:
    if x.dim() and not replacement and present(samples) > present(x.shape[-1]):
        raise RuntimeError(f"{samples} samples without replacement are drawn from {x.shape[-1]}")


@REFUSALS.of(aten.histc.default)
def check_counted(func, x, *args, **kwargs) -> None:
    """A kernel on a GPU knows few dtypes; if nobody used the result, nobody would ask it."""
    if x.device.type == "cuda" and x.dtype in (torch.float16, torch.bfloat16, torch.bool):
        raise Unsupported(f"{func} of {x.dtype} on a GPU, which it may refuse")


# %% [markdown]
# A scatter into a view is asked for the view of a fake, which knows its size. Quantized
# tensors are refused by us: the meta kernels give plain ones.

# %%
@REFUSALS.of(*SCATTERED)
def check_scattered(func, x, source, *args, **kwargs) -> None:
    part = FakeTensor.run(SCATTERED[func], (x, *args), kwargs)
    if source.device != x.device:
        raise Unsupported(f"{func} of a source on another device, which it copies")
    if part.shape != source.shape:
        raise RuntimeError(f"expected a source of size {list(part.shape)}, got {list(source.shape)}")
    if not each_has_its_place(x) and all(present(step) for size, step in zip(x.shape, x.stride()) if present(size) != 1):
        raise Unsupported(f"{func} of overlapping windows, which overlap in its result as well")       # repeated elements come apart
    if func is aten.as_strided_scatter.default and any(step == 0 and size > 1 for size, step in zip(part.shape, part.stride())):
        raise RuntimeError("unsupported operation: more than one element of the written-to tensor refers to a single memory location")


@REFUSALS.of(*overloads(aten.quantize_per_tensor, aten.quantize_per_tensor_dynamic, aten.quantize_per_channel))
def refuse_quantized(func, *args, **kwargs) -> None:
    raise Unsupported(f"{func} gives a quantized tensor")              # its meta kernel, a plain one


@REFUSALS.of(aten._fused_moving_avg_obs_fq_helper.default)
def check_observed(func, x, observing, quantizing, *args) -> None:
    """What has been observed of each channel is empty before the first call, and gets its size there."""
    kept, (axis, by_channel) = args[:4], (*args[7:], False)[:2]
    if by_channel and any(present(t.numel()) != present(x.shape[axis]) for t in kept):
        raise Unsupported(f"{func} changes the size of what it has observed of the channels")


@REFUSALS.of(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def check_class_weights(func, x, target, weight, *args) -> None:
    check_dtypes(func, x, weight)
    if func is aten.nll_loss2d_forward.default:
        check_deterministic(func, x)


@REFUSALS.of(*overloads(aten.index_reduce, aten.index_reduce_), aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def check_deterministic(func, x, *args, **kwargs) -> None:
    """What eager says of a kernel for a GPU, it says also where nobody reads the result, where the loops of a compiled loss would be
    deterministic, and where, of a grid, cuDNN has a kernel that is."""
    if x.device.type == "cuda" and torch.are_deterministic_algorithms_enabled():
        raise Unsupported(f"{func} has no deterministic kernel on a GPU, of which eager complains")


@REFUSALS.of(*overloads(aten.put, aten.put_))
def check_deterministic_put(func, x, index, source, accumulate=False) -> None:
    """What is added has a deterministic kernel; which of two numbers for one place stays is left open."""
    if not accumulate:
        check_deterministic(func, x)


# %% [markdown]
# Two more are left to eager on a GPU, whose kernels may refuse what those of a CPU take: a reduction into places under
# `use_deterministic_algorithms`, and a complex number for real ones.

# %%
@REFUSALS.of(*overloads(aten.scatter_reduce, aten.scatter_reduce_))
def check_deterministic_scatter(func, x, dim, index, source, reduce, **kwargs) -> None:
    """The deterministic form of it on a GPU counts by a scatter of its own, which does not take every shape. Of products there is none."""
    if reduce == "prod" or x.dim() == 0 or any(present(n) != present(m) for n, m in zip(index.shape, x.shape)):
        check_deterministic(func, x)


@REFUSALS.of(*overloads(aten.fill, aten.fill_))
def check_filled_by(func, x, value) -> None:
    """A GPU takes a number of the CPU as it takes one of Python, and looks whether it fits; a CPU drops the imaginary part."""
    if isinstance(value, torch.Tensor) and value.is_complex() and not x.is_complex() and value.device != x.device:
        raise Unsupported(f"{func} of a complex number that may not fit into {x.dtype}")
    if type(value) in (int, float, complex) and x.device.type == "cuda" and present(x.numel()):
        check_fill(func, [2], value, dtype=x.dtype)


# %% [markdown]
# What changes the shape of a tensor object in place is recorded for a tensor of which there are no views. If it is a view itself, its
# memory may not be written afterwards (`reshaped`).

# %%
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


@REFUSALS.of(aten.view.default)
def check_viewed(func, t: FakeTensor, sizes) -> None:
    """Where sizes vary, the meta kernel does not compare the strides of two dims with a dim of size 1 between them."""
    if any(isinstance(n, torch.SymInt) for n in (*t.shape, *t.stride(), *sizes)):
        form = tuple(map(present, t.shape)), tuple(map(present, t.stride()))
        with outside():
            torch.empty_strided(*form, device="meta").view(tuple(map(present, sizes)))


@REFUSALS.of(*overloads(aten.as_strided, aten.as_strided_copy))
def check_storage(func, t: FakeTensor, sizes, strides, offset=None, **kwargs) -> None:
    """`as_strided` beyond the memory that there is, which a meta tensor does not have."""
    form = [tuple(sizes), tuple(strides), t.storage_offset() if offset is None else offset]
    there = t.meta.untyped_storage().nbytes()
    if (needed := length_of(form) * t.dtype.itemsize) > there:
        raise RuntimeError(f"setStorage: sizes {list(form[0])}, strides {list(form[1])}, storage offset {form[2]} "
                           f"require {needed} bytes, out of bounds for storage of size {there}")


@REFUSALS.of(aten.binary_cross_entropy_with_logits.default)
def check_weights(func, x, target, weight=None, pos_weight=None, reduction=1) -> None:
    """Eager's kernel computes in a tensor that is as large as the target. Our decomposition would broadcast it."""
    for other in (x, pos_weight, weight):
        if other is not None and (shape := torch.broadcast_shapes(target.shape, other.shape)) != target.shape:
            raise RuntimeError(f"output with shape {[*target.shape]} doesn't match the broadcast shape {[*shape]}")


@REFUSALS.of(*overloads(aten.index_fill, aten.index_fill_))
def check_filled(func, tensor, dim, index, value) -> None:
    check_devices(tensor.device, [index])


@REFUSALS.of(aten.index.Tensor, *overloads(aten.index_put, aten.index_put_, aten._index_put_impl_))
def check_indices(func, tensor, indices, *args, **kwargs) -> None:
    """What the kernel of an `index_put` refuses and its meta kernel does not look at: floats, masks of another shape, and devices."""
    check_devices(tensor.device, [t for t in args[:1] if t.dim()] if args else indices if tensor.device.type == "cpu" else [])
    d = 0
    for index in indices:
        if isinstance(index, torch.Tensor) and (index.is_floating_point() or index.is_complex()):
            raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
        width = index.dim() if index is not None and index.dtype in (torch.bool, torch.uint8) else 1
        if index is not None and index.dtype is torch.bool and index.shape != tensor.shape[d:d + width]:
            raise IndexError(f"the shape of the mask {list(index.shape)} does not match that of the indexed "
                             f"tensor {list(tensor.shape)} at dimension {d}")
        d += width
