# %% [markdown]
# # Results as kernels give them
#
# Convolutions and batch norms prefer channels last, LAPACK and the Fourier transforms have orders of their own. Each function below says it
# for one family: it is given the meta kernel's answer and the operands, and gives back an answer that lies as the kernel's does. Symbolic
# sizes and strides count as they are in the present call.

# %%
import contextlib
import functools

import torch
from torch import get_default_dtype

from ..corrections import COPYING, CPU_FORMS, FORMS, OPERANDS, as_promoted, elementwise, like_a_copy, outside, restrided, row_by_row
from ..layouts import copied_strides, each_has_its_place, memory_order, strides_in_order
from ..shapes import expr_of
from ..symbolic import present
from .operators import by_overload, named, overload_named, overloads

aten = torch.ops.aten


def lies_channels_last(t: torch.Tensor) -> bool:
    """Do the strides say that channels vary fastest? Strides that could mean either count as row-major. Symbolic
    ones are asked as they are in the present call: their order is a guard."""
    if t.dim() not in (4, 5) or present(t.stride(1)) == 0:
        return False
    sizes, strides = tuple(map(present, t.shape)), tuple(map(present, t.stride()))
    smallest = 0
    for d in (1, *range(t.dim() - 1, 1, -1), 0):
        if sizes[d] == 0 or strides[d] < smallest or d == 0 and smallest == strides[1]:
            return False
        smallest = strides[d] * max(sizes[d], 1)
    return True


def _convolution_layout(out, x, weight, *_):
    """cuDNN and oneDNN answer in channels_last if input or weight is; the meta kernel does not know. They see a single dim as the
    last of two, and `x` row by row then: its strides may mean either where sizes are 1."""
    if out.dim() == 3:
        return _convolution_layout(*(t.unsqueeze(2) for t in (out, x.contiguous(), weight))).squeeze(2)
    if not (lies_channels_last(x) or lies_channels_last(weight)):
        return out
    form = torch.channels_last if out.dim() == 4 else torch.channels_last_3d
    return torch.empty(out.shape, dtype=out.dtype, device="meta", memory_format=form)


def _in_channels_last(out):
    return restrided(out, strides_in_order(out.shape, (1, *range(out.dim() - 1, 1, -1), 0)))


def _rows_or_channels_last(out, x, *_):
    """Channels last if `x` lies so, and otherwise row by row; meta kernels keep the order of `x`, whatever it is."""
    return _in_channels_last(out) if lies_channels_last(x) else row_by_row(out)


def _of_one_sample(out, x, *_):
    """Channels last without a dim for the samples of a batch, too, where the meta kernel answers row by row."""
    last = x.dim() == 4 and not x.is_contiguous() and x[None].is_contiguous(memory_format=torch.channels_last_3d)
    return _in_channels_last(out[None])[0] if last else out


def _column_major(out, position):
    """LAPACK answers column by column where cuSOLVER, which the meta kernels describe, answers row by row."""
    parts = list(out)
    if parts[position].dim() > 1:
        parts[position] = torch.empty_like(parts[position].mT, memory_format=torch.contiguous_format).mT
    return tuple(parts)


def _ask_the_kernel(op, device):
    """A Fourier transform orders its result by the strides of its operand, dimension by dimension, in a way
    that is quicker tried than told; on a GPU in another one, of which the meta kernel leaves out that dims are sorted."""
    def layout(out, x, *args):
        if device == "cuda" and not torch.cuda.is_available():
            return out
        sizes, strides, given = (tuple(map(present, s)) for s in (x.shape, x.stride(), args))
        with outside():
            real = op(torch.empty_strided(sizes, strides, dtype=x.dtype, device=device).zero_(), *given)
        fixed = not any(isinstance(s, torch.SymInt) for s in out.shape)
        return restrided(out, real.stride() if fixed else strides_in_order(out.shape, memory_order(real.shape, real.stride())[::-1]))
    return layout


# %% [markdown]
# What is peculiar to elementwise operators and to copies.

# %%
OPERANDS.update(by_overload({
    "hardswish": [0],
    "complex polar floor_divide floor_divide.Scalar mse_loss smooth_l1_loss lerp.Scalar hardtanh_backward mish_backward hardswish_backward "
    "hardsigmoid_backward softplus_backward": [0, 1],
    "threshold_backward rsub.Tensor leaky_relu_backward": [1, 0],
    "elu_backward": [0, 5],
}))
COPYING.update(named(
    "clone _to_copy empty_like full_like zeros_like ones_like zero fill.Scalar fill.Tensor conj_physical deg2rad rad2deg hardtanh "
    "_conj_physical nan_to_num flip index_fill.int_Scalar index_fill.int_Tensor index_put binary_cross_entropy "
    "_unsafe_masked_index_put_accumulate _prelu_kernel rand_like randn_like randint_like randint_like.low_dtype log_sigmoid_backward"))


# %% [markdown]
# `x[indices]` is elementwise in disguise. Its kernel runs over the shape of the *result*, and reads `x` and the
# index tensors as if they had that shape. The function builds just these operands: a tensor with the strides of
# `x` in the dimensions that are not indexed, and 0, the stride of a broadcast dimension, where the indices'
# dimensions are. The index tensors get dimensions of size 1 around their own.

# %%
def _indexed(out, x, indices):
    """`x[indices]` is an elementwise kernel over the shape of its result: `x` is broadcast along the indices,
    and they along the other dims. Indexed dims that are not neighbours move to the front."""
    places = [d for d, index in enumerate(indices) if index is not None]
    if not places:
        return out
    kept = [d for d in range(x.dim()) if d not in places]
    first = places[0] if places[-1] - places[0] < len(places) else 0
    count = out.dim() - len(kept)
    strides = [x.stride(d) for d in kept]
    symbolic = any(isinstance(s, torch.SymInt) for t in (out, x, *indices) if t is not None for s in (*t.shape, *t.stride()))
    with torch._C._EnablePythonDispatcher() if symbolic else outside():
        strides[first:first] = [0] * count
        broadcast = torch.empty(0, device="meta").as_strided(out.shape, strides)
        before, after = (1,) * first, (1,) * (len(kept) - first)
        spread = torch.broadcast_tensors(*(i for i in indices if i is not None))
        return elementwise(out, broadcast, *(i.reshape((*before, *i.shape, *after)) for i in spread))


# %% [markdown]
# A norm returns the mean and 1/std as well, which backward needs. Of halves they are float32 on a GPU, and on a CPU they have the dtype of
# the parameters, where the meta kernels give float32, or x's.

# %%
def _batch_norm_layout(out, x, *_):
    """As `_rows_or_channels_last`, but where sizes of 1 leave it open how an operand without gaps lies, row by row if it can be."""
    if out[0] is None:
        return out
    form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    last = form and not x.is_contiguous() and (lies_channels_last(x) or x.is_contiguous(memory_format=form))
    return (_in_channels_last(out[0]) if last else row_by_row(out[0])), *out[1:]


def statistics_dtype(x, *parameters) -> torch.dtype:
    """In which a norm on a CPU returns mean and 1/std: that of the first parameter there is, or x's."""
    return next((p.dtype for p in parameters if p is not None), x.dtype)


def _with_statistics(out, x, *parameters):
    dtype = statistics_dtype(x, *parameters)
    return out[0], *(t.to(dtype) for t in out[1:3]), *out[3:]


def _batch_norm_updated(out, x, weight, bias, mean=None, *_):
    return _with_statistics(_batch_norm_layout(out, x), x, weight, bias, mean if isinstance(mean, torch.Tensor) else None)


def _batch_norm(out, x, weight, bias, mean, var, training, *_):
    """Without training there are no statistics to save."""
    out = _batch_norm_updated(out, x, weight, bias, mean)
    return out if training else (out[0], *(t.new_empty(0) for t in out[1:3]), *out[3:])


def _group_norm(out, x, weight, bias, *_):
    return _with_statistics((_rows_or_channels_last(out[0], x), *out[1:]), x, weight, bias)


def _group_norm_backward_dtypes(out, grad, x, *_):
    """The gradient of x has x's dtype; the meta kernel gives it the weight's."""
    return (out[0] if out[0] is None else out[0].to(x.dtype), *out[1:])

# %% [markdown]
# What is left are single operators whose meta kernel is wrong about a dtype or about the order of dimensions. They
# stand in one table by operator, and each entry takes the meta kernel's answer and the operands, and returns the
# answer of the real kernel.

# %%
def _of_one_row(out, x, target, *_):
    """The loss of a single row without a batch is a number; the meta kernels give a vector of one."""
    loss, *rest = out if isinstance(out, tuple) else (out,)
    loss = loss.reshape(()) if x.dim() <= 1 and target.dim() <= (1 if rest else 0) else loss
    return (loss, *rest) if rest else loss


def _of_one_block(out, tensors):
    """Tensors without dims count among themselves, and for the dtype of the others only if they are of a higher kind; the meta kernel
    takes them for others."""
    ranks = [[torch.empty((0,) if t.dim() else (), dtype=t.dtype, device="meta") for t in tensors if bool(t.dim()) is dims]
             for dims in (True, False)]
    return out.to(functools.reduce(torch.add, [functools.reduce(torch.add, rank) for rank in ranks if rank]).dtype)


def _embedding_bag_sizes(only, out, weight, indices, offsets, scale=False, mode=0, sparse=False, per_sample=None, last=False, padding=-1):
    """On a CPU there are as many maxima as sizes of bags where none are asked for, and no index has a bag where FBGEMM sums.
    only: forward only, where sums count the last offset."""
    bags = offsets.shape if only and mode == 0 else out[0].shape[:1]
    quick = mode == 0 and padding < 0 and weight.dtype != torch.float64 and weight.stride(1) == 1
    return out[0], out[1][:0] if quick else out[1], out[2].new_empty(bags), out[3] if mode == 2 else out[3].new_empty(bags)


# %% [markdown]
# Copies and rearrangements follow their operand where it is whole, and go row by row where it is empty or nothing is moved. Which of the
# two holds can depend on the sizes, so these functions look at the present ones.

# %%
def _is_infinite(out, x):
    """Integers are never asked."""
    return elementwise(out, elementwise(out, x), 0.0) if x.is_floating_point() or x.is_complex() else like_a_copy(out, x)


def _rotated(out, x, count=1, dims=(0, 1)):
    """Copied, as a flip does it, and turned."""
    if count % 4 == 0:
        return row_by_row(out)
    copy = torch.empty_strided(x.shape, copied_strides(x.shape, x.stride()), device="meta")
    return restrided(out, (copy.transpose(*dims) if count % 2 else copy).stride())


def _rolled(out, x, shifts, dims=()):
    """Two parts, joined: also if one is empty, which is never channels last."""
    if 0 in (sizes := tuple(map(present, x.shape))) and (dims or len(sizes) == 1):
        return like_a_copy(out, x)
    whole = not dims or any(present(shift) % sizes[d] == 0 for shift, d in zip(shifts, dims))
    return row_by_row(out) if whole else _rows_or_channels_last(out, x)


def _shuffled(out, x, *_):
    """What is empty is copied as it is, whatever the sizes of the result would be."""
    empty = 0 in map(present, x.shape)
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if empty else _rows_or_channels_last(out, x)


def _shuffled_by_views(out, x, groups):
    """On a GPU: of one group, or of groups of one channel, and row by row, `x` itself; else a copy."""
    if 0 in map(present, x.shape):
        return _shuffled(out, x)
    apart = x.reshape(x.shape[0], groups, x.shape[1] // groups, -1).transpose(1, 2)
    return apart.contiguous().reshape(x.shape)


def _viewed(out, x, *_):
    """A dim of size 1 goes on from the dim behind it, as a longer one would; of the last dims it has the stride of the last dim of `x`."""
    ones = [d for d, n in enumerate(out.shape) if isinstance(n, int) and n == 1]
    if not ones or not x.dim() or 0 in map(present, out.shape):
        return out
    strides = [*out.stride(), x.stride(-1)]
    for d in reversed(ones):
        strides[d] = strides[d + 1] * out.shape[d + 1] if d + 1 < out.dim() else strides[-1]
    same = list(map(expr_of, strides[:-1])) == list(map(expr_of, out.stride()))
    return out if same else out.as_strided(out.shape, strides[:-1], out.storage_offset())


def _reduced(out, *_):
    """What is empty, row by row."""
    return row_by_row(out) if 0 in map(present, out.shape) else out


def _exponential(out, x):
    """Of matrices of one number it is elementwise."""
    size = present(x.shape[-1])
    return elementwise(out, x) if size == 1 else like_a_copy(out, x) if size == 0 else _reduced(out)


# %% [markdown]
# Composed kernels show how they are made: a norm is laid out as the sum inside of it, a scaled float as the copy that it is written to.

# %%
def _norm(out, x, ord=2, dim=None, keepdim=False, *_):
    """A reduction also of dims of size 1, of which PyTorch 2.11 does not drop those that are counted from the end."""
    symbolic = any(isinstance(n, torch.SymInt) for n in (*x.shape, *x.stride()))
    with torch._C._EnablePythonDispatcher() if symbolic else contextlib.nullcontext():
        total = x.sum(dim, keepdim)
    return _reduced(restrided(out.reshape(total.shape), total.stride()))


def _spaced(out, start, end, *_):
    """Between ends one of which is complex, complex numbers; the meta kernel does not look at the dtypes of tensors."""
    ends = any(isinstance(x, complex) or isinstance(x, torch.Tensor) and x.is_complex() for x in (start, end))
    return out.to(get_default_dtype().to_complex()) if ends and not out.is_complex() else out


def _scaled_by_power(out, x, other):
    """Floats are scaled by integers in a copy, which is resized where it is too small. Anything else is a product with a power, of
    integers in the default dtype."""
    if x.is_floating_point() and not other.is_floating_point():
        return like_a_copy(out, x) if out.shape == x.shape else elementwise(out, x, other)
    whole = not (x.is_floating_point() or x.is_complex())
    power = other.dtype if other.is_floating_point() or other.is_complex() else get_default_dtype()
    return elementwise(out.to(power) if whole else out, x, row_by_row(other))


def _to_a_power(out, x, exponent):
    """A bool to the power of a bool is one; of int64, says the meta kernel."""
    return elementwise(out.to(torch.bool) if x.dtype is torch.bool and isinstance(exponent, bool) else out, x)


def _copied_apart(out, x, *_):
    """A scatter into a view copies its operand, and elements that share memory come apart; PyTorch 2.11's meta kernels leave them there."""
    return out if each_has_its_place(x) else like_a_copy(out, x)


def _each(form):
    return lambda out, *operands: tuple(form(t, *operands) for t in out)


# %% [markdown]
# The tables: kernels whose results have other shapes, strides or dtypes than their meta kernels say. `FORMS` holds on all devices, and
# `CPU_FORMS` goes before it on a CPU. Rows of many operators name a rule of `corrections.py`: results lie row by row, as a copy of
# the first operand, or as elementwise kernels leave them. A lambda picks the operands that a rule is about.

# %%
TRANSFORMS = "_fft_r2c", "_fft_c2c", "_fft_c2r"

FORMS.update(by_overload({
    "channel_shuffle": _shuffled_by_views,
    "view": _viewed,
    "convolution": lambda out, x, *rest: out if x.dtype == torch.float64 else _convolution_layout(out, x, *rest),
    # weights that nobody wants: an empty tensor, really None
    "_native_multi_head_attention": lambda out, *_: (out[0], out[1] if out[1].dim() > 1 else None),
    "linalg_vector_norm": _norm,
    "multi_margin_loss multilabel_margin_loss_forward": _of_one_row,
    "isin.Tensor_Tensor isin.Tensor_Scalar isin.Scalar_Tensor pow.Scalar masked_fill.Scalar masked_fill.Tensor renorm tril triu _softmax "
    "_log_softmax _softmax_backward_data _log_softmax_backward_data diag_embed normal.Tensor_float normal.float_Tensor "
    "normal.Tensor_Tensor poisson mvlgamma im2col": row_by_row,
    "smooth_l1_loss_backward mse_loss_backward huber_loss_backward":
        lambda out, grad, x, target, *_: row_by_row(out) if out.shape == x.shape else elementwise(out, x, target, grad),
    "nll_loss2d_forward native_layer_norm": lambda out, *_: (row_by_row(out[0]), *out[1:]),
    "binary_cross_entropy_backward": lambda out, grad, x, *_: like_a_copy(out, x),
    "_prelu_kernel_backward": lambda out, grad, x, weight: tuple(elementwise(t, x, weight, grad) for t in out),
    "native_layer_norm_backward": lambda out, *_: tuple(t if t is None else row_by_row(t) for t in out),
    "block_diag": _of_one_block,
    "ldexp.Tensor": _scaled_by_power,
    "pow.Tensor_Scalar": _to_a_power,
    "_foreach_pow.Scalar": lambda out, xs, exponent: [_to_a_power(t, x, exponent) for t, x in zip(out, xs)],
    "soft_margin_loss": lambda out, x, *_: elementwise(out.to(x.dtype), x),
    "huber_loss binary_cross_entropy": lambda out, x, *_: like_a_copy(out.to(x.dtype), x),
    "angle": lambda out, x: row_by_row(out) if x.is_complex() else elementwise(out, x),
    "isinf": _is_infinite,
    "sort sort.stable frexp.Tensor": _each(like_a_copy),
    "max_pool3d_with_indices": _each(_of_one_sample),
    "index.Tensor _unsafe_index.Tensor": _indexed,
    "where.self": lambda out, condition, *choices: elementwise(out, condition, *as_promoted(choices, out.dtype)),
    "rot90": _rotated,
    "select_scatter slice_scatter diagonal_scatter": _copied_apart,
    "sum.dim_IntList var.correction std.correction prod.dim_int amax amin": _reduced,
    "var_mean.correction std_mean.correction aminmax": _each(_reduced),
    "linalg_matrix_exp": _exponential,
    "binary_cross_entropy_with_logits": lambda out, x, target, *_: like_a_copy(out.to(target.dtype), target),
    **{name: _ask_the_kernel(overload_named(name), "cuda") for name in TRANSFORMS},
}) | dict.fromkeys(overloads(aten.linspace, aten.logspace), _spaced))
CPU_FORMS.update(by_overload({
    "convolution": _convolution_layout,
    "_embedding_bag": functools.partial(_embedding_bag_sizes, False),
    "_embedding_bag_forward_only": functools.partial(_embedding_bag_sizes, True),
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional": _batch_norm,
    "_native_batch_norm_legit.no_stats _batch_norm_with_update _batch_norm_with_update_functional": _batch_norm_updated,
    "native_layer_norm": lambda out, x, shape, *parameters: _with_statistics((row_by_row(out[0]), *out[1:]), x, *parameters[:2]),
    "_scaled_dot_product_flash_attention_for_cpu":
        lambda out, q, *_: (like_a_copy(out[0], q), *(t.to(torch.promote_types(q.dtype, torch.float32)) for t in out[1:])),
    "reflection_pad2d_backward replication_pad2d_backward reflection_pad3d_backward replication_pad3d_backward":
        lambda out, grad, x, *_: _rows_or_channels_last(out, x),
    "native_batch_norm_backward": lambda out, grad, x, *_: _batch_norm_layout(out, x),
    **{name: _ask_the_kernel(overload_named(name), "cpu") for name in TRANSFORMS},
    "_linalg_svd": lambda out, *_: _column_major(out, 2),
    "linalg_eig": lambda out, *_: _column_major(out, 1),
    "log_sigmoid_forward": _each(row_by_row),
    "native_dropout_backward":
        lambda out, grad, mask, scale: elementwise(out, grad, elementwise(mask, *as_promoted([mask], grad.dtype), scale)),
    "roll": _rolled,
    "pixel_unshuffle channel_shuffle": _shuffled,
    "upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d max_unpool2d pixel_shuffle reflection_pad2d "
    "replication_pad2d reflection_pad3d replication_pad3d": _rows_or_channels_last,
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward_dtypes,
    "rrelu_with_noise nonzero_static index_add index_copy": row_by_row,
}))
