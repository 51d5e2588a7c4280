# %% [markdown]
# # Softmax and the normalizations
#
# These are the operators a compiler lives from: memory bound, several passes each in a naive form, and
# surrounded by other memory-bound work. Written over the primitives each is one or two reductions over the
# same dims with arithmetic between them, which is the shape that the fusion stage turns into a single
# kernel holding a row in registers.

# %%
import functools
import math

import torch

from ...ch01_graphs.rules.forms import statistics_dtype
from ..table import HALF, decomposition, reduced_size, widen
from .reductions import moments

# %% [markdown]
# ## Softmax
#
# The largest element is subtracted first, or `exp` overflows. A row of only -inf gives NaN, as eager does:
# (-inf) - (-inf). `_safe_softmax` gives 0 instead, for attention rows that are masked out entirely.

# %%
def _exponentials(x, dim):
    """exp(x - largest), and what has to be divided by."""
    e = torch.exp(x - torch.amax(x, dim, True))
    return e, torch.sum(e, dim, True)


def _is_empty(x, dim) -> bool:
    """Nothing to normalise, or nothing that can be: the kernels accept integers as long as there are none, and refuse a dim that is not
    there, of which the meta kernel of `_softmax` says nothing."""
    return not (x.is_floating_point() or x.is_complex()) or x.dim() > 0 and (not -x.dim() <= dim < x.dim() or x.shape[dim] == 0)


@decomposition("_softmax")
def softmax(x, dim, half_to_float):
    if _is_empty(x, dim):
        return NotImplemented
    e, total = _exponentials(widen(x), dim)
    return (e / total).to(torch.float32 if half_to_float else x.dtype)


@decomposition("_safe_softmax")
def safe_softmax(x, dim, dtype=None):
    dtype = dtype or x.dtype
    if not dtype.is_floating_point or _is_empty(x.to(dtype), dim):
        return NotImplemented
    x = widen(x.to(dtype))
    e, total = _exponentials(x, dim)
    return torch.where(torch.amax(x, dim, True) == -math.inf, 0.0, e / total).to(dtype)


@decomposition("_log_softmax")
def log_softmax(x, dim, half_to_float):
    if _is_empty(x, dim):
        return NotImplemented
    shifted = widen(x) - torch.amax(widen(x), dim, True)
    out = shifted - torch.log(torch.sum(torch.exp(shifted), dim, True))
    return out.to(torch.float32 if half_to_float else x.dtype)


# %%
@decomposition("_softmax_backward_data")
def softmax_backward(grad, y, dim, input_dtype):
    """The gradient of x for `y = softmax(x, dim)`, as `input_dtype`, given y and the gradient of y: `y *
    (grad - sum(grad * y))`, computed at least in float32. NotImplemented where `_is_empty(y, dim)`."""
    if _is_empty(y, dim):
        return NotImplemented
    weighted = widen(grad) * widen(y)
    return (weighted - widen(y) * torch.sum(weighted, dim, True)).to(input_dtype)


# %%
@decomposition("_log_softmax_backward_data")
def log_softmax_backward(grad, y, dim, input_dtype):
    if _is_empty(y, dim):
        return NotImplemented
    grad = widen(grad)
    return (grad - torch.exp(widen(y)) * torch.sum(grad, dim, True)).to(input_dtype)


# %% [markdown]
# ## Layer norm
#
# Eager keeps mean and 1/std for the gradient: in float32 on a GPU, in the dtype of the parameters on CPU.

# %%
def _stats_dtype(x, *parameters):
    """The dtype in which eager returns saved statistics."""
    if x.dtype not in HALF:
        return x.dtype
    return statistics_dtype(x, *parameters) if x.device.type == "cpu" else torch.float32


def _affine(n, weight, bias, place=widen):
    """n * weight + bias, where each is optional; `place` gives them the shape to broadcast."""
    if weight is not None:
        n = n * place(weight)
    return n if bias is None else n + place(bias)


@decomposition("native_layer_norm")
def native_layer_norm(x, normalized_shape, weight, bias, eps):
    inner = _inner(x, normalized_shape)
    var, mean = moments(x, inner, 0, True)
    rstd = torch.rsqrt(var + eps)
    out = _affine((widen(x) - mean) * rstd, weight, bias)
    dtype = _stats_dtype(x, weight, bias)
    return out.to(x.dtype), mean.to(dtype), rstd.to(dtype)


def _inner(x, normalized_shape) -> list[int]:
    return list(range(x.dim() - len(normalized_shape), x.dim()))


# %% [markdown]
# With `n = (x - mean) * rstd` and `g = grad * weight`, the input's gradient is `rstd * (g - mean(g) - n *
# mean(g * n))`: two row sums, then arithmetic. The parameters' gradients are column sums of `grad * n` and
# `grad`. RMS norm does not subtract the mean, and the gradient has no such term either.

# %%
def _input_gradient(g, n, rstd, dims, centered=True):
    size = reduced_size(n, dims)
    dx = g - torch.sum(g, dims, True) / size if centered else g
    return (dx - n * (torch.sum(g * n, dims, True) / size)) * rstd


# %% tags=["exercise:layer-norm-backward"]
@decomposition("native_layer_norm_backward")
def native_layer_norm_backward(grad, x, normalized_shape, mean, rstd, weight, bias, output_mask):
    """(gradient of x, of weight, of bias); each is None where `output_mask` is False, or where there is no
    such parameter. mean, rstd: saved by the forward pass, of x's shape with the normalized dims of size 1.
    Half types are widened; each gradient has the dtype of what it is the gradient of."""
    inner = _inner(x, normalized_shape)
    outer = list(range(inner[0]))
    grad, n, rstd = widen(grad), (widen(x) - widen(mean)) * widen(rstd), widen(rstd)
    dx = dw = db = None
    if output_mask[0]:
        dx = _input_gradient(_affine(grad, weight, None), n, rstd, inner).to(x.dtype)
    if output_mask[1] and weight is not None:
        dw = _folded(grad * n, outer).to(weight.dtype)
    if output_mask[2] and bias is not None:
        db = _folded(grad, outer).to(bias.dtype)
    return dx, dw, db


# %%
def _folded(x, dims):
    return torch.sum(x, dims) if dims else x.clone()


@decomposition("_fused_rms_norm")
def fused_rms_norm(x, normalized_shape, weight, eps):
    dims, x32 = _inner(x, normalized_shape), widen(x)
    eps = torch.finfo(x32.dtype).eps if eps is None else eps
    rstd = torch.rsqrt(torch.sum(x32 * x32, dims, True) / reduced_size(x, dims) + eps)
    return _affine(x32 * rstd, weight, None).to(x.dtype), rstd


@decomposition("_fused_rms_norm_backward")
def fused_rms_norm_backward(grad, x, normalized_shape, rstd, weight, output_mask):
    inner = _inner(x, normalized_shape)
    grad, n, rstd = widen(grad), widen(x) * widen(rstd), widen(rstd)
    dx = dw = None
    if output_mask[0]:
        dx = _input_gradient(_affine(grad, weight, None), n, rstd, inner, centered=False).to(x.dtype)
    if output_mask[1] and weight is not None:
        dw = _folded(grad * n, list(range(inner[0]))).to(weight.dtype)
    return dx, dw


# %% [markdown]
# ## Batch norm
#
# One formula under many operator names (one per library that has ever implemented it): in training the
# statistics are those of the batch, otherwise the running ones. The in-place update of the running statistics
# is an explicit result of the `functional` variants. A plain `native_batch_norm` that would update buffers in
# place cannot occur in a functional graph; it is declined here.
#
# In the first function below, `dims` are all dimensions except that of the channels. `_channels` brings a
# vector with one number for each channel into a shape that broadcasts against the images. The running
# statistics move a little toward those of the batch; the variance that is kept divides by n - 1, the one that
# normalises by n. What follows are the other operators with the same formula: they differ in the results they
# return.

# %%
def _channels(x, per_channel):
    """A vector of C numbers as [1, C, 1, ...]."""
    return widen(per_channel).view([-1 if d == 1 else 1 for d in range(max(x.dim(), 2))])


@decomposition("_native_batch_norm_legit_functional")
def batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps):
    """(out, saved mean, saved 1/std, new running mean, new running variance)."""
    x32 = widen(x)
    new_mean, new_var = running_mean, running_var
    if training:
        dims = [d for d in range(x.dim()) if d != 1]
        var, mean = moments(x32, dims, 0, False)
        size = reduced_size(x, dims)
        if running_mean is not None:
            new_mean = _moved(running_mean, mean, momentum)
        if running_var is not None:
            new_var = _moved(running_var, var * size / (size - 1), momentum)
    else:
        mean, var = widen(running_mean), widen(running_var)
    rstd = torch.rsqrt(var + eps)
    out = _affine((x32 - _channels(x, mean)) * _channels(x, rstd), weight, bias, lambda p: _channels(x, p))
    dtype = _stats_dtype(x, weight, bias, running_mean)
    if not training and x.device.type == "cpu":
        mean = rstd = x.new_empty(0, dtype=dtype)
    return out.to(x.dtype), mean.to(dtype), rstd.to(dtype), new_mean, new_var


def _moved(running, batch, momentum):
    return (momentum * batch + (1 - momentum) * widen(running)).to(running.dtype)


def _reserve(x):
    """The workspace that cuDNN would hand to backward."""
    return x.new_empty(0, dtype=torch.uint8)


@decomposition("_batch_norm_with_update_functional")
def batch_norm_with_update_functional(x, weight, bias, running_mean, running_var, momentum, eps):
    results = batch_norm(x, weight, bias, running_mean, running_var, True, momentum, eps)
    return *results[:3], _reserve(x), *results[3:]


@decomposition("native_batch_norm", "_native_batch_norm_legit")
def batch_norm_without_update(x, weight, bias, running_mean, running_var, training, momentum, eps):
    if training and (running_mean is not None or running_var is not None):
        return NotImplemented
    return batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)[:3]


@decomposition("cudnn_batch_norm")
def cudnn_batch_norm(x, *args):
    out = batch_norm_without_update(x, *args)
    return out if out is NotImplemented else (*out, _reserve(x))


@decomposition("_native_batch_norm_legit.no_stats")
def batch_norm_no_stats(x, weight, bias, training, momentum, eps):
    return batch_norm(x, weight, bias, None, None, training, momentum, eps)[:3]


@decomposition("_batch_norm_no_update")
def batch_norm_no_update(x, weight, bias, running_mean, running_var, momentum, eps):
    out = batch_norm(x, weight, bias, running_mean, running_var, running_mean is None, momentum, eps)
    return *out[:3], _reserve(x)


# %% [markdown]
# Backward needs two sums over the batch, `sum(grad)` and `sum(grad * (x - mean))`; they are the gradients
# of bias and weight up to a factor, so nothing is computed for the parameters alone. In evaluation the
# statistics are constants and the two mean terms vanish.

# %%
@decomposition("native_batch_norm_backward", "batch_norm_backward")
def batch_norm_backward(grad, x, weight, running_mean, running_var, mean, rstd, training, eps, output_mask,
                        reserve=None):
    """(dx, dweight, dbias), None where not asked for."""
    dims = [d for d in range(x.dim()) if d != 1]
    if not training:
        mean, rstd = widen(running_mean), torch.rsqrt(widen(running_var) + eps)
    grad, mean, rstd = widen(grad), widen(mean), widen(rstd)
    centered = widen(x) - _channels(x, mean)
    needs_sums = training and output_mask[0]
    total = torch.sum(grad, dims) if needs_sums or output_mask[2] else None
    dot = torch.sum(grad * centered, dims) if needs_sums or output_mask[1] else None
    dx = dw = db = None
    if output_mask[0]:
        dx = grad
        if training:
            size = reduced_size(x, dims)
            dx = dx - _channels(x, total / size) - centered * _channels(x, dot / size * rstd * rstd)
        dx = (dx * _channels(x, rstd if weight is None else rstd * widen(weight))).to(x.dtype)
    dtype = _stats_dtype(x) if weight is None else weight.dtype
    if output_mask[1]:
        dw = (dot * rstd).to(dtype)
    if output_mask[2]:
        db = total.to(dtype)
    return dx, dw, db


@decomposition("cudnn_batch_norm_backward")
def cudnn_batch_norm_backward(x, grad, weight, running_mean, running_var, mean, rstd, eps, reserve):
    mask = [True, True, True]
    return batch_norm_backward(grad, x, weight, running_mean, running_var, mean, rstd, True, eps, mask)


# %% [markdown]
# ## Group norm
#
# A layer norm over the channels of a group and all positions, then a scale and shift per channel. `_grouped` cuts the dimension of the
# channels in two and leaves the positions as they are, which is a view of any memory.
#
# Where channels are innermost in memory, those of a group are a few numbers side by side, and the next ones lie far away. A CPU folds
# such images in two steps: the positions of all channels at once, then the channels of each group. The variance of a group
# is the mean of those of its channels and the variance of their means. All that follows is computed for groups and their channels as well,
# casts included: as dims of one kernel they keep what belongs to a group out of the loop over its channels.

# %%
def _grouped(x, group):
    """(x with its channels as [groups, channels of a group], the dims of the positions)."""
    x = widen(x).view([x.shape[0], group, x.shape[1] // group, *x.shape[2:]])
    return x, list(range(3, x.dim()))


def _group_moments(x, positions):
    if not positions or x.device.type != "cpu" or x.stride(2) != 1:
        return moments(x, [2, *positions], 0, True)
    var, mean = moments(x, positions, 0, True)
    within = torch.sum(var, [2], True) / x.shape[2]
    between, mean = moments(mean, [2], 0, True)
    return within + between, mean


@decomposition("native_group_norm")
def native_group_norm(x, weight, bias, N, C, HxW, group, eps):
    grouped, positions = _grouped(x, group)
    var, mean = _group_moments(grouped, positions)
    rstd = torch.rsqrt(var + eps)
    ones = [1] * len(positions)
    out = _affine((grouped - mean) * rstd, weight, bias, lambda p: widen(p).view([1, group, C // group, *ones]))
    dtype = _stats_dtype(x, weight, bias)
    return out.to(x.dtype).reshape(x.shape), mean.view([N, group]).to(dtype), rstd.view([N, group]).to(dtype)


# %% [markdown]
# Backward has two sums for each channel. Over the batch they are the gradients of the parameters; weighted and over the channels of a
# group, the row sums of the input's gradient. A CPU computes those of the positions once for both.

# %%
@decomposition("native_group_norm_backward")
def native_group_norm_backward(grad, x, mean, rstd, weight, N, C, HxW, group, output_mask):
    (grad, positions), dtype = _grouped(grad, group), x.dtype
    ones = [1] * len(positions)
    mean, rstd = (widen(s).view([N, group, 1, *ones]) for s in (mean, rstd))
    n = (_grouped(x, group)[0] - mean) * rstd
    weigh = functools.partial(_affine, weight=weight, bias=None, place=lambda p: widen(p).view([1, group, C // group, *ones]))
    sums = [torch.sum(t, positions, True) if positions and x.device.type == "cpu" else t for t in (grad, grad * n)]
    dx = dw = db = None
    if output_mask[0]:
        total, dot = (torch.sum(weigh(s), [2, *positions], True) / (C // group * HxW) for s in sums)
        dx = ((weigh(grad) - total - n * dot) * rstd).reshape(x.shape).to(dtype)
    dtype = dtype if weight is None else weight.dtype
    if output_mask[1]:
        dw = torch.sum(sums[1], [0, *positions]).view([C]).to(dtype)
    if output_mask[2]:
        db = torch.sum(sums[0], [0, *positions]).view([C]).to(dtype)
    return dx, dw, db
