# %% [markdown]
# # Activations
#
# Each is a line of arithmetic in the order in which eager's kernel does it, and its gradient another. They
# matter far more than their length suggests: a GELU in eager is one pass over memory, and so is the bias
# before it and the dropout after it. Opened up into arithmetic, all three become one pass.
#
# Comparisons decide what a NaN does. `where(x > 0, x, 0)` turns NaN into 0, `where(x <= 0, 0, x)` keeps it;
# eager's kernels are of the second kind, so these are too.

# %%
from __future__ import annotations

import math

import torch

from ..table import aten, constant, decomposition, real, widen


@decomposition("relu")
def relu(x):
    return torch.maximum(x, constant(0, x))


@decomposition("threshold")
def threshold(x, threshold, value):
    return torch.where(_unrounded(x) <= threshold, value, x).to(x.dtype)


@decomposition("threshold_backward")
def threshold_backward(grad, x, threshold):
    return torch.where(_unrounded(x) <= threshold, constant(0, grad), grad)


def _unrounded(x):
    """What is compared with a number. On a CPU a half-precision kernel does not round the number."""
    return widen(x) if x.device.type == "cpu" else x


@decomposition("leaky_relu", float32=True)
def leaky_relu(x, slope=0.01):
    return torch.where(x > 0, x, x * slope)


@decomposition("leaky_relu_backward", float32=True)
def leaky_relu_backward(grad, x, slope, x_is_result):
    return torch.where(x > 0, grad, grad * slope)


@decomposition("_prelu_kernel", float32=True)
def prelu(x, weight):
    return torch.where(x > 0, x, weight * x)


@decomposition("_prelu_kernel_backward", float32=True)
def prelu_backward(grad, x, weight):
    return torch.where(x > 0, grad, weight * grad), torch.where(x > 0, constant(0, x), x * grad)


# %% [markdown]
# ## GELU
#
# x times the probability that a standard normal number is below x; the derivative adds x times the density.

# %%
@decomposition("gelu", float32=True)
def gelu(x, approximate="none"):
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))
        return 0.5 * x * (1 + torch.tanh(inner))
    return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))


# %% tags=["exercise:gelu-backward"]
@decomposition("gelu_backward", float32=True)
def gelu_backward(grad, x, approximate="none"):
    """grad times the derivative of `gelu(x, approximate)`, in torch calls. `grad` and `x` are float32 or
    float64 here (`float32=True` takes care of half types)."""
    if approximate == "tanh":
        scale = math.sqrt(2 / math.pi)
        t = torch.tanh(scale * (x + 0.044715 * (x * x * x)))
        slope = scale * (1 + 3 * 0.044715 * (x * x))
        return grad * (0.5 * (1 + t) + 0.5 * x * ((1 - t * t) * slope))
    cdf = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
    pdf = torch.exp(-0.5 * (x * x)) * (1 / math.sqrt(2 * math.pi))
    return grad * (cdf + x * pdf)


# %% [markdown]
# ## Sigmoid and its relatives
#
# The derivative of a sigmoid is `y * (1 - y)` with its result y, which is why its backward operator is handed
# the result. SiLU is x times its sigmoid; softplus is the logarithm of `1 + exp(x)`, computed as x itself
# where the exponential would overflow.

# %%
@decomposition("sigmoid_backward", float32=True)
def sigmoid_backward(grad, y):
    return grad * (1 - y) * y


@decomposition("tanh_backward", float32=True)
def tanh_backward(grad, y):
    return grad * (1 - y * y)


@decomposition("silu", float32=True)
def silu(x):
    return x * torch.sigmoid(x)


@decomposition("silu_backward", float32=True)
def silu_backward(grad, x):
    s = torch.sigmoid(x)
    return grad * s * (1 + x * (1 - s))


@decomposition("mish", float32=True)
def mish(x):
    return x * torch.tanh(torch.log1p(torch.exp(x)))


@decomposition("mish_backward", float32=True)
def mish_backward(grad, x):
    t = torch.tanh(torch.log1p(torch.exp(x)))
    return grad * (t + x * torch.sigmoid(x) * (1 - t * t))


@decomposition("log_sigmoid_forward", float32=True)
def log_sigmoid_forward(x):
    x = x.contiguous() if x.device.type == "cpu" else x
    z = torch.exp(-torch.abs(x))
    out = torch.minimum(x, constant(0, x)) - torch.log1p(z)
    return out, z if x.device.type == "cpu" else x.new_empty(0)


@decomposition("log_sigmoid_backward", float32=True)
def log_sigmoid_backward(grad, x, buffer):
    return grad * torch.sigmoid(-x)


@decomposition("glu", float32=True)
def glu(x, dim=-1):
    a, b = x.chunk(2, dim)
    return a * torch.sigmoid(b)


@decomposition("glu_backward", float32=True)
def glu_backward(grad, x, dim):
    a, b = x.chunk(2, dim)
    s = torch.sigmoid(b)
    return torch.cat([grad * s, grad * s * (1 - s) * a], dim)


@decomposition("logit", float32=True)
def logit(x, eps=None):
    x = real(x)
    if eps is not None:
        x = torch.clamp(x, eps, 1 - eps)
    return torch.log(x / (1 - x))


@decomposition("logit_backward", float32=True)
def logit_backward(grad, x, eps=None):
    low, outside = (0.0, math.nan) if eps is None else (eps, 0.0)
    inside = (x >= low) & (x <= 1 - low)
    slope = (torch.abs(x) if eps is None else x) * (1 - x)      # at -0.0 the answer is +inf
    return torch.where(inside, grad / slope, outside)


# %% [markdown]
# ## Exponential and piecewise linear units
#
# These are functions with a corner: one formula on each side, and `where` between them. Where the corner
# itself belongs is eager's choice, and matters for gradients.

# %%
@decomposition("elu", float32=True)
def elu(x, alpha=1.0, scale=1.0, input_scale=1.0):
    return torch.where(x > 0, x * scale, torch.expm1(x * input_scale) * (alpha * scale))


@decomposition("elu_backward", float32=True)
def elu_backward(grad, alpha, scale, input_scale, is_result, x):
    slope = (x + alpha * scale) if is_result else alpha * scale * torch.exp(x * input_scale)
    return torch.where(x <= 0, grad * input_scale * slope, grad * scale)


@decomposition("celu")
def celu(x, alpha=1.0):
    return aten.elu.default(x, alpha, 1.0, 1.0 / alpha)


@decomposition("softplus", float32=True)
def softplus(x, beta=1, threshold=20):
    return torch.where(x * beta > threshold, x, torch.log1p(torch.exp(x * beta)) / beta)


@decomposition("softplus_backward", float32=True)
def softplus_backward(grad, x, beta, threshold):
    z = torch.exp(x * beta)
    return torch.where(x * beta > threshold, grad, grad * z / (z + 1))


@decomposition("hardtanh")
def hardtanh(x, low=-1, high=1):
    return torch.clamp(x, low, high) if x.is_floating_point() else NotImplemented


@decomposition("hardtanh_backward")
def hardtanh_backward(grad, x, low, high):
    return torch.where((x <= low) | (x >= high), constant(0, grad), grad)


@decomposition("hardsigmoid", float32=True)
def hardsigmoid(x):
    return torch.clamp(x + 3, 0, 6) / 6


SIXTH = 0.16666667163372040             # in float32 also where eager's kernel computes in float64


@decomposition("hardsigmoid_backward", float32=True)
def hardsigmoid_backward(grad, x):
    return torch.where((x > -3) & (x < 3), grad * SIXTH, constant(0, grad))


@decomposition("hardswish", float32=True)
def hardswish(x):
    return x * torch.clamp(x + 3, 0, 6) / 6


@decomposition("hardswish_backward", float32=True)
def hardswish_backward(grad, x):
    middle = torch.where(x < 3, grad * (x / 3 + 0.5), grad)
    return torch.where(x <= -3, constant(0, grad), middle)


@decomposition("hardshrink")
def hardshrink(x, lambd=0.5):
    return torch.where((x >= -lambd) & (x <= lambd), constant(0, x), x)


@decomposition("hardshrink_backward", "softshrink_backward")
def shrink_backward(grad, x, lambd):
    return torch.where((x >= -lambd) & (x <= lambd), constant(0, grad), grad)


@decomposition("softshrink", float32=True)
def softshrink(x, lambd=0.5):
    return torch.where(x > lambd, x - lambd, torch.where(x < -lambd, x + lambd, x * 0))


# %% [markdown]
# ## Dropout
#
# On a GPU `native_dropout` stays whole: its random numbers are drawn in the layout of eager's kernel, or
# not at all. On CPU it is a Bernoulli mask and a multiplication, and only the mask is a library call.

# %%
@decomposition("native_dropout")
def native_dropout(x, p, train):
    if train is not None and not train:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if x.device.type != "cpu" or not 0 < p < 1:
        return NotImplemented
    mask = aten.bernoulli.p(torch.empty_like(x, dtype=torch.bool), 1 - p)
    return x * mask * (1 / (1 - p)), mask


@decomposition("native_dropout_backward", float32=True)
def native_dropout_backward(grad, mask, scale):
    return grad * mask * scale
