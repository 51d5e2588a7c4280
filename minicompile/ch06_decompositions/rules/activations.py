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
import math

import torch

from ..table import aten, constant, decomposition, formulas, in_float32, real, widen

formulas({
    "relu": lambda x: torch.maximum(x, constant(0, x)),
    "threshold": lambda x, threshold, value: torch.where(at_most(x, threshold), value, x).to(x.dtype),
    "threshold_backward": lambda grad, x, threshold: torch.where(at_most(x, threshold), constant(0, grad), grad),
})
formulas({
    "leaky_relu": lambda x, slope=0.01: torch.where(x > 0, x, x * slope),
    "leaky_relu_backward": lambda grad, x, slope, x_is_result: torch.where(x > 0, grad, grad * slope),
    "_prelu_kernel": lambda x, weight: torch.where(x > 0, x, weight * x),
    "_prelu_kernel_backward": lambda grad, x, weight: (
        torch.where(x > 0, grad, weight * grad), torch.where(x > 0, constant(0, x), x * grad)),
}, float32=True)


def at_most(x, threshold):
    """x <= threshold. A comparison of half values rounds the number, as eager's kernel does on a GPU; on a CPU it compares in float32."""
    return (widen(x) if x.device.type == "cpu" else x) <= threshold


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
formulas({
    "sigmoid_backward": lambda grad, y: grad * (1 - y) * y,
    "tanh_backward": lambda grad, y: grad * (1 - y * y),
    "silu": lambda x: x * torch.sigmoid(x),
    "mish": lambda x: x * torch.tanh(torch.log1p(torch.exp(x))),
    "softplus": lambda x, beta=1, threshold=20: torch.where(x * beta > threshold, x, torch.log1p(torch.exp(x * beta)) / beta),
}, float32=True)


@decomposition("silu_backward", float32=True)
def silu_backward(grad, x):
    s = torch.sigmoid(x)
    return grad * s * (1 + x * (1 - s))


@decomposition("mish_backward", float32=True)
def mish_backward(grad, x):
    t = torch.tanh(torch.log1p(torch.exp(x)))
    return grad * (t + x * torch.sigmoid(x) * (1 - t * t))


@decomposition("softplus_backward", float32=True)
def softplus_backward(grad, x, beta, threshold):
    z = torch.exp(x * beta)
    return torch.where(x * beta > threshold, grad, grad * z / (z + 1))


@decomposition("log_sigmoid_forward", float32=True)
def log_sigmoid_forward(x):
    x = x.contiguous() if x.device.type == "cpu" else x
    z = torch.exp(-torch.abs(x))
    out = torch.minimum(x, constant(0, x)) - torch.log1p(z)
    return out, z if x.device.type == "cpu" else x.new_empty(0)


@decomposition("log_sigmoid_backward", float32=True)
def log_sigmoid_backward(grad, x, buffer):
    """On a CPU only the sign is that of `x`, which may have been written through `.data` since; on a GPU there is nothing in the buffer."""
    if x.device.type != "cpu":
        return grad * torch.sigmoid(-x)
    return grad * (torch.where(x < 0, constant(1, x), buffer) / (buffer + 1))


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


@decomposition("logit_backward")
def logit_backward(grad, x, eps=None):
    """A kernel for a CPU rounds the bounds to a half type, one for a GPU does not."""
    kept = x if x.device.type == "cpu" else widen(x)
    low = constant(0.0 if eps is None else eps, kept)
    outside = (kept < low) | (kept > 1 - low)                   # NaN is not
    return _logit_slope(grad, x, outside, eps)


@in_float32
def _logit_slope(grad, x, outside, eps):
    slope = (torch.abs(x) if eps is None else x) * (1 - x)      # at -0.0 the answer is +inf
    return torch.where(outside, math.nan if eps is None else 0.0, grad / slope)


# %% [markdown]
# ## Exponential and piecewise linear units
#
# These are functions with a corner: one formula on each side, and `where` between them. Where the corner
# itself belongs is eager's choice, and matters for gradients. It matters for an `elu` whose lower piece is infinitely steep, too: zero is
# part of the upper one on a CPU, and of the lower one, which is then NaN, on a GPU. The units with "hard" in their name
# are divided by 6 on a CPU, and multiplied on a GPU, by `SIXTH`.

# %%
def above(x):
    return x > 0 if x.device.type == "cuda" else ~(x < 0)


SIXTH = 0.16666667163372040             # in float32 also where eager's kernel computes in float64


def sixth(x):
    return x * SIXTH if x.device.type == "cuda" else x / 6


formulas({
    "elu": lambda x, alpha=1.0, scale=1.0, input_scale=1.0: torch.where(
        above(x), x * scale, torch.expm1(x * input_scale) * (alpha * scale)),
    "hardsigmoid": lambda x: sixth(torch.clamp(x + 3, 0, 6)),
    "hardsigmoid_backward": lambda grad, x: torch.where((x > -3) & (x < 3), grad * SIXTH, constant(0, grad)),
    "hardswish": lambda x: sixth(x * torch.clamp(x + 3, 0, 6)),
}, float32=True)
formulas({
    "celu": lambda x, alpha=1.0: aten.elu.default(x, alpha, 1.0, 1.0 / alpha),
    "hardtanh": lambda x, low=-1, high=1: torch.clamp(x, low, high) if x.is_floating_point() else NotImplemented,
    "hardtanh_backward": lambda grad, x, low, high: torch.where((widen(x) <= low) | (widen(x) >= high), constant(0, grad), grad),
    "softshrink": lambda x, lambd=0.5: _softshrink(x, constant(lambd, x) if x.device.type == "cuda" else lambd),   # rounded there only
    "hardshrink": lambda x, lambd=0.5: torch.where((x >= -lambd) & (x <= lambd), constant(0, x), x),
    "hardshrink_backward softshrink_backward": lambda grad, x, lambd: torch.where(
        (x >= -lambd) & (x <= lambd), constant(0, grad), grad),
})


@in_float32
def _softshrink(x, lambd):
    return torch.where(x > lambd, x - lambd, torch.where(x < -lambd, x + lambd, x * 0))


@decomposition("elu_backward", float32=True)
def elu_backward(grad, alpha, scale, input_scale, is_result, x):
    slope = (x + alpha * scale) if is_result else alpha * scale * torch.exp(x * input_scale)
    return torch.where(x <= 0, grad * input_scale * slope, grad * scale)


@decomposition("hardswish_backward", float32=True)
def hardswish_backward(grad, x):
    middle = torch.where(x < 3, grad * (x / 3 + 0.5), grad)
    return torch.where(x <= -3, constant(0, grad), middle)


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


formulas({"native_dropout_backward": lambda grad, mask, scale: grad * mask * scale}, float32=True)
