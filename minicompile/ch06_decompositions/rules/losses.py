# %% [markdown]
# # Losses
#
# A loss is a pointwise function and a reduction, so each of these is written as the function, then
# `reduced`. The one that deserves thought is cross-entropy: for a language model its input, the logits, is
# the largest tensor of the whole program.

# %%
import functools
import math

import torch

from ...ch01_graphs.corrections import outside
from ..table import aten, constant, decomposition, formulas, iota, reduced_size, widen
from .activations import log_sigmoid_forward

NONE, MEAN, SUM = 0, 1, 2


def reduced(loss, reduction):
    """Apply eager's `reduction` code: 0 none, 1 mean, 2 sum."""
    if reduction == NONE:
        return loss
    total = torch.sum(loss)
    if reduction == SUM:
        return total
    return total / reduced_size(loss, list(range(loss.dim()))) if 0 not in loss.shape else total * math.nan


def spread(grad, x, reduction):
    """The gradient of `reduced`: the incoming gradient of each element of x."""
    if reduction != MEAN or 0 in x.shape:             # a mean over nothing has nobody to give its gradient to
        return grad
    return grad / reduced_size(x, list(range(x.dim())))


# %% [markdown]
# ## Negative log-likelihood
#
# Of each row of log-probabilities only one number is wanted, that of the target. Written as a `gather` the
# loop stage can evaluate `log_softmax` at that one place, and the table of log-probabilities is never
# stored. The gradient is nonzero at one place per row: eager scatters into zeros; a comparison of a column
# number with the target says the same without a scatter, and fuses with the softmax gradient around it.
#
# A target may be marked to be ignored. Then it contributes neither to the sum nor to the weight that a mean
# divides by, and its index may be out of range, so it is replaced by 0 before anything is read with it. The mean of nothing
# is NaN, except for the only target of one sample without a batch on a GPU, whose kernel says 0.

# %%
def _class_dim(x) -> int:
    return 0 if x.dim() == 1 else 1


def _class_weights(weight, safe_target):
    """weight[target], shaped like target."""
    return torch.index_select(widen(weight), 0, safe_target.reshape(-1)).view(safe_target.shape)


@decomposition("nll_loss_forward", "nll_loss2d_forward")
def nll_loss_forward(x, target, weight, reduction, ignore_index):
    """(loss, total weight)."""
    dim = _class_dim(x)
    kept = target != ignore_index
    safe_target = torch.where(kept, target, 0)
    picked = torch.gather(widen(x), dim, safe_target.unsqueeze(dim)).squeeze(dim)
    zero = constant(0, picked)
    if weight is None:
        weights, loss = kept.to(picked.dtype), torch.where(kept, -picked, zero)
    else:
        weights = torch.where(kept, _class_weights(weight, safe_target), zero)
        loss = torch.where(kept, -picked * weights, zero)
    if reduction == NONE:
        return loss.to(x.dtype), constant(0, x)
    total_weight, loss = torch.sum(weights), torch.sum(loss)
    if reduction == MEAN:
        loss = torch.where(kept, loss / total_weight, zero) if x.dim() == 1 and x.device.type == "cuda" else loss / total_weight
    return loss.to(x.dtype), total_weight.to(x.dtype)


@decomposition("nll_loss_backward", "nll_loss2d_backward")
def nll_loss_backward(grad, x, target, weight, reduction, ignore_index, total_weight):
    dim = _class_dim(x)
    kept = target != ignore_index
    grad = widen(grad)
    if reduction == MEAN:
        grad = grad / widen(total_weight)
    if weight is not None:
        grad = grad * _class_weights(weight, torch.where(kept, target, 0))
    row = torch.where(kept, -grad, constant(0, grad)).unsqueeze(dim)
    column = iota(x.shape[dim], x, dim, x.dim())
    return torch.where(column == target.unsqueeze(dim), row, constant(0, row)).to(x.dtype)


# %% [markdown]
# ## Regression
#
# Each loss has a function of the difference of input and target, and a gradient that is the derivative of
# this function times the gradient that arrives, divided by the number of elements if the reduction was a
# mean.

# %%
@decomposition("mse_loss", float32=True)
def mse_loss(x, target, reduction=MEAN):
    d = x - target
    return reduced(d * d, reduction)


@decomposition("mse_loss_backward", float32=True)
def mse_loss_backward(grad, x, target, reduction):
    return 2.0 * (x - target) * spread(grad, x, reduction)


@decomposition("smooth_l1_loss", float32=True)
def smooth_l1_loss(x, target, reduction=MEAN, beta=1.0):
    d = torch.abs(x - target)
    return reduced(d if beta == 0 else torch.where(d < beta, 0.5 * d * d / beta, d - 0.5 * beta), reduction)


@decomposition("smooth_l1_loss_backward", float32=True)
def smooth_l1_loss_backward(grad, x, target, reduction, beta):
    d = x - target
    grad = spread(grad, x, reduction)
    outside = torch.sign(d) * grad
    return outside if beta == 0 else torch.where(torch.abs(d) >= beta, outside, d / beta * grad)


@decomposition("huber_loss", float32=True)
def huber_loss(x, target, reduction=MEAN, delta=1.0):
    d = torch.abs(x - target)
    return reduced(torch.where(d <= delta, 0.5 * d * d, delta * (d - 0.5 * delta)), reduction)


@decomposition("huber_loss_backward", float32=True)
def huber_loss_backward(grad, x, target, reduction, delta):
    d = x - target
    grad = spread(grad, x, reduction)
    return torch.where(torch.abs(d) > delta, torch.sign(d) * delta * grad, d * grad)


# %% [markdown]
# ## Classification by probabilities and by margins
#
# Eager's kernel for a CPU raises for an input that is no probability, and in later versions of PyTorch for a target that is none. Such
# a check is an operator of the graph of primitives, too; which are needed is found out by asking the kernel.

# %%
@functools.cache
def targets_are_checked() -> bool:
    with outside():
        try:
            aten.binary_cross_entropy(torch.ones(1), torch.full((1,), 2.0))
        except RuntimeError:
            return True
    return False


@decomposition("binary_cross_entropy", float32=True)
def binary_cross_entropy(x, target, weight=None, reduction=MEAN):
    for name, t in (("input", x), ("target", target)) if x.device.type == "cpu" else ():
        if name == "input" or targets_are_checked():
            probable = torch.logical_and(t >= 0, t <= 1)
            aten._assert_async.msg(torch.all(probable), f"all elements of {name} should be between 0 and 1")
    floor = constant(-100, x)
    log_p, log_not_p = torch.maximum(torch.log(x), floor), torch.maximum(torch.log1p(-x), floor)
    loss = -(target * log_p + (1 - target) * log_not_p)
    return reduced(loss if weight is None else loss * weight, reduction)


@decomposition("binary_cross_entropy_backward", float32=True)
def binary_cross_entropy_backward(grad, x, target, weight=None, reduction=MEAN):
    out = spread(grad, x, reduction) * (x - target) / torch.clamp((1 - x) * x, min=1e-12)
    return out if weight is None else out * weight


formulas({
    "soft_margin_loss": lambda x, target, reduction=MEAN: reduced(torch.log1p(torch.exp(-target * x)), reduction),
    "soft_margin_loss_backward": lambda grad, x, target, reduction: -target * torch.sigmoid(-target * x) * spread(grad, x, reduction),
}, float32=True)


@decomposition("binary_cross_entropy_with_logits", float32=True)
def binary_cross_entropy_with_logits(x, target, weight=None, pos_weight=None, reduction=MEAN):
    log_p = log_sigmoid_forward(x)[0]
    if pos_weight is not None:
        log_p = log_p * ((pos_weight - 1) * target + 1)
    loss = (1 - target) * x - log_p
    return reduced(loss if weight is None else loss * weight, reduction)
