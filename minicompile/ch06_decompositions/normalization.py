# %% [markdown]
# # Softmax and the normalizations
#
# These are the operators a compiler lives from: memory bound, several passes each in a naive form, and
# surrounded by other memory-bound work. Written over the primitives each is one or two reductions over the
# same dims with arithmetic between them, which is the shape that the fusion stage turns into a single
# kernel holding a row in registers.

# %%
from __future__ import annotations

import math

import torch

from .reductions import moments
from .table import HALF, aten, constant, count, decomposition, in_float32, widen

# %% [markdown]
# ## Softmax
#
# The largest element is subtracted first, or `exp` overflows. A row of only -inf gives NaN, as eager does:
# (-inf) - (-inf). `_safe_softmax` gives 0 instead, for attention rows that are masked out entirely.

# %%
def _shifted(x, dim):
    """x minus its largest element along dim."""
    return x - torch.amax(x, dim, True)


def _is_empty(x, dim) -> bool:
    return x.dim() > 0 and x.shape[dim] == 0


@decomposition("_softmax")
def softmax(x, dim, half_to_float):
    if _is_empty(x, dim):
        return NotImplemented
    out_dtype = torch.float32 if half_to_float else x.dtype
    e = torch.exp(_shifted(widen(x), dim))
    return (e / torch.sum(e, dim, True)).to(out_dtype)


@decomposition("_safe_softmax")
def safe_softmax(x, dim, dtype=None):
    out_dtype = dtype or x.dtype
    if _is_empty(x, dim) or not out_dtype.is_floating_point:
        return NotImplemented
    x = widen(x.to(out_dtype))
    masked = torch.amax(x, dim, True) == -math.inf
    e = torch.exp(_shifted(x, dim))
    return torch.where(masked, 0.0, e / torch.sum(e, dim, True)).to(out_dtype)


@decomposition("_log_softmax")
def log_softmax(x, dim, half_to_float):
    if _is_empty(x, dim):
        return NotImplemented
    out_dtype = torch.float32 if half_to_float else x.dtype
    shifted = _shifted(widen(x), dim)
    return (shifted - torch.log(torch.sum(torch.exp(shifted), dim, True))).to(out_dtype)


@decomposition("_softmax_backward_data")
def softmax_backward(grad, y, dim, input_dtype):
    if _is_empty(y, dim):
        return NotImplemented
    weighted = widen(grad) * widen(y)
    return (weighted - widen(y) * torch.sum(weighted, dim, True)).to(input_dtype)


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
def _stats_dtype(x, weight, bias=None):
    """The dtype in which eager returns saved statistics."""
    if x.dtype not in HALF:
        return x.dtype
    if x.device.type != "cpu":
        return torch.float32
    parameter = weight if weight is not None else bias
    return x.dtype if parameter is None else parameter.dtype


@decomposition("native_layer_norm")
def native_layer_norm(x, normalized_shape, weight, bias, eps):
    inner = len(normalized_shape)
    dims = list(range(x.dim() - inner, x.dim()))
    var, mean = moments(x, dims, 0, True)
    rstd = torch.rsqrt(var + eps)
    out = (widen(x) - mean) * rstd
    if weight is not None:
        out = out * widen(weight)
    if bias is not None:
        out = out + widen(bias)
    dtype = _stats_dtype(x, weight, bias)
    return out.to(x.dtype), mean.to(dtype), rstd.to(dtype)


# %% [markdown]
# With `n = (x - mean) * rstd` and `g = grad * weight`, the input's gradient is `rstd * (g - mean(g) - n *
# mean(g * n))`: two row sums, then arithmetic. The parameters' gradients are column sums of `grad * n` and
# `grad`.

# %%
@decomposition("native_layer_norm_backward")
def native_layer_norm_backward(grad, x, normalized_shape, mean, rstd, weight, bias, output_mask):
    inner = list(range(x.dim() - len(normalized_shape), x.dim()))
    outer = list(range(x.dim() - len(normalized_shape)))
    grad32, n = widen(grad), (widen(x) - widen(mean)) * widen(rstd)
    dx = dw = db = None
    if output_mask[0]:
        g = grad32 if weight is None else grad32 * widen(weight)
        size = count(x, inner)
        dx = g - torch.sum(g, inner, True) / size - n * (torch.sum(g * n, inner, True) / size)
        dx = (dx * widen(rstd)).to(x.dtype)
    if output_mask[1] and weight is not None:
        dw = _folded(grad32 * n, outer).to(weight.dtype)
    if output_mask[2] and bias is not None:
        db = _folded(grad32, outer).to(bias.dtype)
    return dx, dw, db


def _folded(x, dims):
    return torch.sum(x, dims) if dims else x.clone()


# %% [markdown]
# ## Batch norm
#
# One formula under many operator names: in training the statistics are those of the batch, otherwise the
# running ones. The in-place update of the running statistics is an explicit result of the `functional`
# variants. A plain `native_batch_norm` that would update buffers in place cannot occur in a functional
# graph; it is declined here.

# %%
def _channels(x, per_channel):
    """A vector of C numbers as [1, C, 1, ...]."""
    return per_channel.view([-1 if d == 1 else 1 for d in range(max(x.dim(), 2))])


def batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps):
    """(out, saved mean, saved 1/std, new running mean, new running variance)."""
    x32 = widen(x)
    new_mean, new_var = running_mean, running_var
    if training:
        dims = [d for d in range(x.dim()) if d != 1]
        var, mean = moments(x32, dims, 0, False)
        size = count(x, dims)
        if running_mean is not None:
            new_mean = _moved(running_mean, mean, momentum)
        if running_var is not None:
            new_var = _moved(running_var, var * size / (size - 1), momentum)
    else:
        mean, var = widen(running_mean), widen(running_var)
    rstd = torch.rsqrt(var + eps)
    out = (x32 - _channels(x, mean)) * _channels(x, rstd)
    if weight is not None:
        out = out * _channels(x, widen(weight))
    if bias is not None:
        out = out + _channels(x, widen(bias))
    dtype = _stats_dtype(x, weight, bias)
    if not training and x.device.type == "cpu":
        mean = rstd = x.new_empty(0, dtype=dtype)
    return out.to(x.dtype), mean.to(dtype), rstd.to(dtype), new_mean, new_var


def _moved(running, batch, momentum):
    return (momentum * batch + (1 - momentum) * widen(running)).to(running.dtype)


@decomposition("_native_batch_norm_legit_functional")
def batch_norm_functional(x, weight, bias, running_mean, running_var, training, momentum, eps):
    return batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)


@decomposition("_batch_norm_with_update_functional")
def batch_norm_with_update_functional(x, weight, bias, running_mean, running_var, momentum, eps):
    results = batch_norm(x, weight, bias, running_mean, running_var, True, momentum, eps)
    return *results[:3], x.new_empty(0, dtype=torch.uint8), *results[3:]


@decomposition("native_batch_norm", "_native_batch_norm_legit", "miopen_batch_norm")
def batch_norm_without_update(x, weight, bias, running_mean, running_var, training, momentum, eps):
    if training and (running_mean is not None or running_var is not None):
        return NotImplemented
    return batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)[:3]


@decomposition("cudnn_batch_norm")
def cudnn_batch_norm(*args):
    out = batch_norm_without_update(*args)
    return out if out is NotImplemented else (*out, args[0].new_empty(0, dtype=torch.uint8))


@decomposition("_native_batch_norm_legit.no_stats")
def batch_norm_no_stats(x, weight, bias, training, momentum, eps):
    return batch_norm(x, weight, bias, None, None, training, momentum, eps)[:3]


@decomposition("_batch_norm_no_update")
def batch_norm_no_update(x, weight, bias, running_mean, running_var, momentum, eps):
    out = batch_norm(x, weight, bias, running_mean, running_var, running_mean is None, momentum, eps)[:3]
    return *out, x.new_empty(0, dtype=torch.uint8)


# %% [markdown]
# Backward needs two sums over the batch, `sum(grad)` and `sum(grad * (x - mean))`; they are the gradients
# of bias and weight up to a factor, so nothing is computed for the parameters alone. In evaluation the
# statistics are constants and the two mean terms vanish.

# %%
def batch_norm_gradients(grad, x, weight, running_mean, running_var, mean, rstd, training, eps, output_mask):
    """(dx, dweight, dbias), None where not asked for."""
    dims = [d for d in range(x.dim()) if d != 1]
    if not training:
        mean, rstd = widen(running_mean), torch.rsqrt(widen(running_var) + eps)
    grad32, mean, rstd = widen(grad), widen(mean), widen(rstd)
    centered = widen(x) - _channels(x, mean)
    needs_sums = training and output_mask[0]
    total = torch.sum(grad32, dims) if needs_sums or output_mask[2] else None
    dot = torch.sum(grad32 * centered, dims) if needs_sums or output_mask[1] else None
    dx = dw = db = None
    if output_mask[0]:
        dx = grad32
        if training:
            size = count(x, dims)
            dx = dx - _channels(x, total / size) - centered * _channels(x, dot / size * rstd * rstd)
        dx = (dx * _channels(x, rstd if weight is None else rstd * widen(weight))).to(x.dtype)
    dtype = _stats_dtype(x, weight) if weight is None else weight.dtype
    if output_mask[1]:
        dw = (dot * rstd).to(dtype)
    if output_mask[2]:
        db = total.to(dtype)
    return dx, dw, db


@decomposition("native_batch_norm_backward")
def native_batch_norm_backward(grad, x, weight, running_mean, running_var, mean, rstd, train, eps, mask):
    return batch_norm_gradients(grad, x, weight, running_mean, running_var, mean, rstd, train, eps, mask)


@decomposition("batch_norm_backward")
def batch_norm_backward(grad, x, weight, running_mean, running_var, mean, rstd, update, eps, mask, reserve):
    return batch_norm_gradients(grad, x, weight, running_mean, running_var, mean, rstd, update, eps, mask)


@decomposition("cudnn_batch_norm_backward")
def cudnn_batch_norm_backward(x, grad, weight, running_mean, running_var, mean, rstd, eps, reserve):
    mask = [True, True, True]
    return batch_norm_gradients(grad, x, weight, running_mean, running_var, mean, rstd, True, eps, mask)


@decomposition("miopen_batch_norm_backward")
def miopen_batch_norm_backward(x, grad, weight, running_mean, running_var, mean, rstd, eps):
    mask = [True, True, True]
    return batch_norm_gradients(grad, x, weight, running_mean, running_var, mean, rstd, True, eps, mask)


# %% [markdown]
# ## Group norm
#
# A layer norm over the channels of a group and all positions, then a scale and shift per channel.

# %%
@decomposition("native_group_norm")
def native_group_norm(x, weight, bias, N, C, HxW, group, eps):
    grouped = widen(x).reshape([N, group, C // group * HxW])
    var, mean = moments(grouped, [2], 0, True)
    rstd = torch.rsqrt(var + eps)
    out = ((grouped - mean) * rstd).view(x.shape)
    if weight is not None:
        out = out * _channels(x, widen(weight))
    if bias is not None:
        out = out + _channels(x, widen(bias))
    dtype = _stats_dtype(x, weight, bias)
    return out.to(x.dtype), mean.view([N, group]).to(dtype), rstd.view([N, group]).to(dtype)


@decomposition("native_group_norm_backward")
def native_group_norm_backward(grad, x, mean, rstd, weight, N, C, HxW, group, output_mask):
    shape, size = [N, group, C // group, HxW], C // group * HxW
    grad32 = widen(grad).reshape(shape)
    mean, rstd = (widen(s).view([N, group, 1, 1]) for s in (mean, rstd))
    n = (widen(x).reshape(shape) - mean) * rstd
    dx = dw = db = None
    dtype = x.dtype if weight is None else weight.dtype
    if output_mask[0]:
        g = grad32 if weight is None else grad32 * widen(weight).view([1, group, C // group, 1])
        dx = g - torch.sum(g, [2, 3], True) / size - n * (torch.sum(g * n, [2, 3], True) / size)
        dx = (dx * rstd).view(x.shape).to(x.dtype)
    if output_mask[1]:
        dw = torch.sum(grad32 * n, [0, 3]).view([C]).to(dtype)
    if output_mask[2]:
        db = torch.sum(grad32, [0, 3]).view([C]).to(dtype)
    return dx, dw, db


@decomposition("_fused_rms_norm")
def fused_rms_norm(x, normalized_shape, weight, eps):
    dims = list(range(x.dim() - len(normalized_shape), x.dim()))
    x32 = widen(x)
    eps = torch.finfo(x32.dtype).eps if eps is None else eps
    rstd = torch.rsqrt(torch.sum(x32 * x32, dims, True) / count(x, dims) + eps)
    out = x32 * rstd
    return (out if weight is None else out * widen(weight)).to(x.dtype), rstd


@decomposition("_fused_rms_norm_backward")
def fused_rms_norm_backward(grad, x, normalized_shape, rstd, weight, output_mask):
    inner = list(range(x.dim() - len(normalized_shape), x.dim()))
    outer = list(range(x.dim() - len(normalized_shape)))
    grad32, n = widen(grad), widen(x) * widen(rstd)
    dx = dw = None
    if output_mask[0]:
        g = grad32 if weight is None else grad32 * widen(weight)
        dx = ((g - n * (torch.sum(g * n, inner, True) / count(x, inner))) * widen(rstd)).to(x.dtype)
    if output_mask[1] and weight is not None:
        dw = _folded(grad32 * n, outer).to(weight.dtype)
    return dx, dw
