# %% [markdown]
# # Functions of floats that vary
#
# A probability of dropout, the width of some noise, the momentum of statistics, the margin of a loss: a schedule changes them at each step.
# PyTorch asks for such a number in three places, and would fix it there. The parser of a function whose schema says `float`, and not
# `Scalar`, asks at once; derivatives written in C++ ask in backward (`lerp`, `pow`); and a composition in C++ asks before it comes apart.
#
# So a call with a symbolic float is made here first. `FLOAT_RULES` has what eager composes the function of, in operators that take the
# number as data, or with a derivative in Python. A rule may look at the number, which is a guard, and gives `NotImplemented` where the
# function is to be asked itself: with a probability of 0 or 1, say, or one that is an error.

# %%
import inspect
import math
import operator
import types

import torch
import torch.nn.functional as F
from torch import is_grad_enabled
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

from ..fake import FakeTensor
from ..shapes import float_function
from .operators import FLOATS_ARE_DATA, overload_named

aten = torch.ops.aten
FLOAT_RULES: dict = {}                # a function, or the name of a method -> what to call in its place


def rule(*functions):
    def register(function):
        FLOAT_RULES.update(dict.fromkeys(functions, function))
        return function
    return register


def with_floats(function, args: tuple, kwargs: dict):
    """function(*args, **kwargs), if a float among the arguments is symbolic and need not be known; else NotImplemented."""
    if not any(type(x) is torch.SymFloat for x in (*args, *kwargs.values())):
        return NotImplemented
    if isinstance(function, torch._ops.OpOverload):
        return below_parser(function, *args, **kwargs) if function in ASKED_BY_PARSER else NotImplemented
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.Tensor):
        function, args = function.__name__, (owner, *args)
    if function not in FLOAT_RULES:
        return NotImplemented
    try:
        args, kwargs = by_position(function, args, kwargs)
        inspect.signature(FLOAT_RULES[function]).bind(*args, **kwargs)
    except TypeError:                   # by other names than the rule has, or wrong
        return NotImplemented
    return FLOAT_RULES[function](*args, **kwargs)


def by_position(function, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments by position, where the function is written in Python: a rule has other names for them."""
    if type(function) is not types.FunctionType:
        return args, kwargs
    call = inspect.signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    return call.args, call.kwargs


# %% [markdown]
# ## Random numbers
#
# The operators that draw say `float`, and no derivative is lost if they are not seen by autograd. So the mode that listens is told of the
# operator without PyTorch's parser in between, and versions are counted here.

# %%
DRAWS = {"bernoulli_": "bernoulli_.float", "uniform_": "uniform_", "normal_": "normal_", "exponential_": "exponential_",
         "cauchy_": "cauchy_", "log_normal_": "log_normal_", "geometric_": "geometric_", "bernoulli": "bernoulli.p"}
ASKED_BY_PARSER = {op for op in FLOATS_ARE_DATA if any(str(a.type) == "float" for a in op._schema.arguments)}


def below_parser(op, *args, **kwargs):
    """An operator on fakes, of which autograd need not know."""
    with torch._C._AutoDispatchBelowAutograd():
        if _get_current_dispatch_mode() is None:
            out = FakeTensor.run(op, args, kwargs)
        else:
            with _pop_mode_temporarily() as mode:
                out = mode.__torch_dispatch__(op, (), args, kwargs)
    if op._schema.is_mutable:
        torch.autograd.graph.increment_version(args[0])
    return out


def drawing(op):
    def draw(x, *args, **kwargs):
        if x.requires_grad and is_grad_enabled() or "out" in kwargs or not isinstance(x, FakeTensor):
            return NotImplemented
        return below_parser(op, x, *args, **kwargs)
    return draw


FLOAT_RULES.update({name: drawing(overload_named(op)) for name, op in DRAWS.items()})
FLOAT_RULES[torch.bernoulli] = FLOAT_RULES["bernoulli"]


@rule(torch.normal)
def normal(mean, std=1.0, size=None, *, generator=None, **options):
    if "out" in options or isinstance(mean, torch.Tensor) or isinstance(std, torch.Tensor) or size is None:
        return NotImplemented
    return with_floats(torch.empty(size, **options).normal_, (mean, std), {"generator": generator})


# %% [markdown]
# A dropout is a mask of drawn numbers. The variants keep or drop a channel as a whole, or keep the mean and the variance of what they are
# given. (On a GPU it is one kernel, with random numbers of its own.)

# %%
LOWEST = 1.7580993408473766             # what SELU tends to is minus this, and its dropout writes that


def dropped(x, p, training, inplace=False, whole=False, alpha=False):
    if not training and 0 <= p <= 1:
        return x
    if x.device.type != "cpu" or not 0 < p < 1 or not x.numel() or whole and x.dim() < 2:
        return NotImplemented
    noise = x.new_empty((*x.shape[:2], *[1] * (x.dim() - 2))) if whole else torch.empty_like(x, requires_grad=False)
    below_parser(aten.bernoulli_.float, noise, 1 - p)
    scaled = x.mul_ if inplace else x.mul
    if not alpha:
        return scaled(noise.div_(1 - p))
    a = 1 / float_function("sqrt")((LOWEST * LOWEST * p + 1) * (1 - p))
    lowest = noise.add(-1).mul_(LOWEST * a).add_(LOWEST * a * p)
    return scaled(noise.mul_(a)).add_(lowest)


def dropped_batch(dims: int):
    """The dropout of channels with so many dims of a batch; of one sample a dim is made for that."""
    def dropout(x, p=0.5, training=True, inplace=False):
        if x.dim() == dims:
            return dropped(x, p, training, inplace, whole=True)
        out = NotImplemented if inplace else dropped(x.unsqueeze(0), p, training, whole=True)
        return out if out is NotImplemented else out.squeeze(0)
    return dropout


@rule(F.dropout, torch.dropout)
def dropout(x, p=0.5, training=True, inplace=False):
    return dropped(x, p, training, inplace)


@rule(F.dropout2d, torch.feature_dropout)
def feature_dropout(x, p=0.5, training=True, inplace=False):
    return dropped(x, p, training, inplace, whole=True)


@rule(F.alpha_dropout, torch.alpha_dropout)
def alpha_dropout(x, p=0.5, training=False, inplace=False):
    return dropped(x, p, training, inplace, alpha=True)


@rule(F.feature_alpha_dropout, torch.feature_alpha_dropout)
def feature_alpha_dropout(x, p=0.5, training=False, inplace=False):
    return dropped(x, p, training, inplace, whole=True, alpha=True)


FLOAT_RULES.update({F.dropout1d: dropped_batch(3), F.dropout3d: dropped_batch(5)})

# %% [markdown]
# ## Derivatives
#
# The derivative of an interpolation is the weight and what is left of 1; that of a power asks in C++ whether the exponent is 0, and
# that of an exponential whether the base is. So each of the three is a `Function` of its own, whose derivative is written in tensors
# and symbols, and can be differentiated again. Without gradients PyTorch's own function takes the number as data, and is asked.

# %%
class Lerp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, start, end, weight):
        ctx.weight = weight
        return torch.lerp(start, end, weight)

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 - ctx.weight), grad * ctx.weight, None


class Power(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, exponent):
        ctx.save_for_backward(x)
        ctx.exponent = exponent
        return torch.pow(x, exponent)

    @staticmethod
    def backward(ctx, grad):
        [x] = ctx.saved_tensors
        slope = power(x, ctx.exponent - 1)
        return grad * (ctx.exponent * (torch.pow(x, ctx.exponent - 1) if slope is NotImplemented else slope)), None


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx, base, x):
        result = torch.pow(base, x)
        ctx.save_for_backward(result)
        ctx.base = base
        return result

    @staticmethod
    def backward(ctx, grad):
        [result] = ctx.saved_tensors
        return None, grad * (result * float_function("log")(ctx.base))


def is_differentiated(*tensors) -> bool:
    """Whether autograd sees it; all are of floats and autocast is off, or the function is to be asked."""
    return is_grad_enabled() and not torch._C._is_any_autocast_enabled() and any(t.requires_grad for t in tensors) and \
        all(t.is_floating_point() for t in tensors)


@rule(torch.lerp, "lerp")
def lerp(start, end, weight, **options):
    return Lerp.apply(start, end, weight) if type(weight) is torch.SymFloat and not options and is_differentiated(start, end) \
        else NotImplemented


@rule(torch.pow, operator.pow, "pow", "__pow__", "__rpow__")
def power(x, exponent, **options):
    if options or isinstance(x, torch.Tensor) == isinstance(exponent, torch.Tensor):
        return NotImplemented
    if isinstance(exponent, torch.Tensor):
        return Exponential.apply(x, exponent) if is_differentiated(exponent) and x > 0 else NotImplemented
    return Power.apply(x, exponent) if is_differentiated(x) and exponent != 0 else NotImplemented


def power_of(x, exponent):
    """x ** exponent of a tensor, also where the exponent need not be known."""
    out = power(x, exponent)
    return torch.pow(x, exponent) if out is NotImplemented else out


TINY = 1e-30                            # what is divided by a number below this may be infinite in float32, and is not in a kernel


@rule(F.celu, torch.celu)
def celu(x, alpha=1.0, inplace=False):
    return NotImplemented if inplace or not abs(alpha) > TINY else torch._C._nn.elu(x, alpha, 1.0, 1 / alpha)

# %% [markdown]
# ## Attention
#
# Attention may have two such numbers. A scale can be multiplied into the queries. A probability of dropout is for the weights; on a CPU
# eager then computes attention step by step, with the square root of the scale for queries and for keys.

# %%
@rule(F.scaled_dot_product_attention)
def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Without dropout the factor is that of the queries; with it, eager computes on a CPU what is written here."""
    q, k, v, mask = query, key, value, attn_mask
    if enable_gqa or torch._C._is_any_autocast_enabled() or q.dtype not in (torch.float32, torch.float64):
        return NotImplemented
    if type(dropout_p) is not torch.SymFloat:
        return F.scaled_dot_product_attention(q * scale, k, v, mask, dropout_p, is_causal, scale=1.0)
    if q.device.type != "cpu" or not 0 < dropout_p < 1 or is_causal and mask is not None:
        return NotImplemented
    root = q.shape[-1] ** -0.25 if scale is None else scale ** 0.5 if type(scale) is float and scale > 0 else NotImplemented
    if root is NotImplemented:
        return NotImplemented
    scores = (q * root) @ (k * root).transpose(-2, -1)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores + (mask if mask.is_floating_point() else torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf))
    return dropped(scores.softmax(-1), dropout_p, True) @ v

# %% [markdown]
# ## Statistics
#
# What a norm adds to a variance is data to the formula that its kernel computes, and the rules write that. Halves, which kernels widen,
# are asked, and so is what PyTorch may refuse. The momentum of a batch norm matters to the running statistics alone; eager writes them
# without a word to autograd.

# %%
def are_plain(x, *others) -> bool:
    """Whether all are of one dtype that kernels compute in, nothing is cast, and each kernel gives the layout that arithmetic gives."""
    return x.dtype in (torch.float32, torch.float64) and all(t is None or t.dtype is x.dtype for t in others) and \
        not torch._C._is_any_autocast_enabled() and x.numel() > 0 and x.is_contiguous()


def scaled(x, weight, bias):
    """x * weight + bias, where both are there."""
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def normalized(x, dims, eps):
    var, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    return (x - mean) * (var + eps).rsqrt()


def of_channels(x, t):
    """A tensor of channels, to be broadcast to an image."""
    return None if t is None else t.view(1, -1, *[1] * (x.dim() - 2))


@rule(F.layer_norm, torch.layer_norm)
def layer_norm(x, shape, weight=None, bias=None, eps=1e-5, *_):
    if not are_plain(x, weight, bias) or not 0 < len(shape) <= x.dim() or tuple(x.shape[-len(shape):]) != tuple(shape) or \
            any(t is not None and tuple(t.shape) != tuple(shape) for t in (weight, bias)):
        return NotImplemented
    return scaled(normalized(x, list(range(-len(shape), 0)), eps), weight, bias)


@rule(F.rms_norm, torch.rms_norm)
def rms_norm(x, shape, weight=None, eps=None):
    if not are_plain(x, weight) or not 0 < len(shape) <= x.dim() or tuple(x.shape[-len(shape):]) != tuple(shape) or \
            weight is not None and tuple(weight.shape) != tuple(shape):
        return NotImplemented
    return scaled(x * (x.square().mean(list(range(-len(shape), 0)), keepdim=True) + eps).rsqrt(), weight, None)


@rule(F.group_norm)
def group_norm(x, groups, weight=None, bias=None, eps=1e-5):
    if not are_plain(x, weight, bias) or x.dim() < 2 or groups < 1 or x.shape[1] % groups or x.numel() == x.shape[1] == groups or \
            any(t is not None and tuple(t.shape) != (x.shape[1],) for t in (weight, bias)):
        return NotImplemented
    parts = normalized(x.reshape(x.shape[0], groups, -1), [-1], eps)
    return scaled(parts.reshape(x.shape), of_channels(x, weight), of_channels(x, bias))


@rule(F.instance_norm)
def instance_norm(x, mean=None, var=None, weight=None, bias=None, of_input=True, momentum=0.1, eps=1e-5):
    if mean is not None or var is not None or not of_input or not are_plain(x, weight, bias) or x.dim() < 3 or \
            x.numel() == x.shape[0] * x.shape[1] or any(t is not None and tuple(t.shape) != (x.shape[1],) for t in (weight, bias)):
        return NotImplemented
    return scaled(normalized(x, list(range(2, x.dim())), eps), of_channels(x, weight), of_channels(x, bias))


@rule(F.batch_norm)
def batch_norm(x, mean, var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
    dims = [d for d in range(x.dim()) if d != 1]
    if type(eps) is torch.SymFloat and (not are_plain(x, mean, var, weight, bias) or x.dim() < 2 or x.numel() == x.shape[1]
                                        or any(t is not None and tuple(t.shape) != (x.shape[1],) for t in (mean, var, weight, bias))
                                        or not (eps > 0 if training else eps >= 0)):
        return NotImplemented
    if not training:
        if mean is None or var is None or type(eps) is not torch.SymFloat:
            return NotImplemented
        mean, var = of_channels(x, mean), of_channels(x, var)
        return scaled((x - mean) * (var + eps).rsqrt(), of_channels(x, weight), of_channels(x, bias))
    kept = mean is not None and var is not None
    if not x.numel() or not kept and (mean is not var or type(eps) is not torch.SymFloat) or kept and (
            mean.is_inference() or var.is_inference() or mean.dtype not in (x.dtype, torch.float32)
            or x.dtype is torch.float64 and mean.dtype is not x.dtype):
        return NotImplemented
    if type(eps) is torch.SymFloat:
        out = scaled(normalized(x, dims, eps), of_channels(x, weight), of_channels(x, bias))
    else:
        out = F.batch_norm(x, None, None, weight, bias, True, 0.0, eps)
    if kept:
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter((mean, var)):
            now = torch.var_mean(x.detach().to(mean.dtype), dims)
            for old, new in zip((var, mean), now):
                old.mul_(1 - momentum).add_(new, alpha=momentum)
    return out


# %% [markdown]
# ## Numbers put in
#
# Neither the border of an image nor what stands for NaN and infinity has a derivative.

# %%
@rule(F.pad)
def pad(x, sizes, mode="constant", value=None):
    return torch.constant_pad_nd(x, sizes, value) if mode == "constant" and x.is_floating_point() else NotImplemented


@rule(torch.nan_to_num, "nan_to_num")
def nan_to_num(x, nan=None, posinf=None, neginf=None):
    if not x.is_floating_point():
        return NotImplemented
    info = torch.finfo(x.dtype)
    low, high = info.min if neginf is None else neginf, info.max if posinf is None else posinf
    finite = torch.where(x == torch.inf, high, torch.where(x == -torch.inf, low, x))
    return torch.where(x.isnan(), 0.0 if nan is None else nan, finite)

# %% [markdown]
# ## Quantiles
#
# Which part lies below is a number or a tensor; the function makes a tensor of the number.

# %%
def quantile_by(function):
    def quantile(x, q, *args, **kwargs):
        if type(q) is not torch.SymFloat or "out" in kwargs or not isinstance(x, torch.Tensor) or not 0 <= q <= 1:
            return NotImplemented
        return function(x, torch.full((), q, dtype=x.dtype, device=x.device), *args, **kwargs)
    return quantile


for _function in (torch.quantile, torch.nanquantile):
    rule(_function, _function.__name__)(quantile_by(_function))

# %% [markdown]
# ## Losses
#
# Most of these are compositions in eager, too; the Huber loss and the smooth L1 loss are one kernel for what is written here. A smoothed
# label is mostly itself, and a bit of each class: the loss is the usual one, and a bit of the mean of all logarithms. The margins
# are distances beyond which nothing is to be learned, so they stand in a `clamp_min(0)`. What PyTorch warns of (shapes that differ, old
# names of reductions) or refuses is left to it.

# %%
def loss(of):
    """A rule for a loss of tensors of one dtype. Under autocast the function as a whole is cast for, so it is asked."""
    names = list(inspect.signature(of).parameters)

    def register(function):
        @rule(of)
        def asked(*args):
            given = dict(zip(names, args))
            olds = [given.pop(name, None) for name in ("size_average", "reduce")]
            dtypes = {t.dtype for t in args if isinstance(t, torch.Tensor) and t.is_floating_point()}
            if torch._C._is_any_autocast_enabled() or olds != [None, None] or len(dtypes) != 1:
                return NotImplemented
            return function(*given.values())
        return function
    return register


def by_reduction(x, reduction: str):
    return {"mean": torch.mean, "sum": torch.sum}[reduction](x) if reduction != "none" else x


@loss(F.cross_entropy)
def cross_entropy(x, target, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0):
    if not 0 < label_smoothing <= 1 or reduction not in ("mean", "sum", "none") or x.dim() == 0:
        return NotImplemented
    dim = 0 if x.dim() == 1 else 1
    each = label_smoothing / x.shape[dim]
    if target.is_floating_point():
        return F.cross_entropy(x, target * (1 - label_smoothing) + each, weight, reduction=reduction)
    logs, kept = F.log_softmax(x, dim), target != ignore_index
    hard = F.nll_loss(logs, target, weight, ignore_index=ignore_index, reduction=reduction)
    shares = logs if weight is None else logs * weight.view([-1 if d == dim else 1 for d in range(x.dim())])
    smooth = torch.where(kept, -shares.sum(dim), 0)
    if reduction == "mean":
        smooth = smooth.sum() / (kept if weight is None else torch.where(kept, weight[torch.where(kept, target, 0)], 0)).sum()
    elif reduction == "sum":
        smooth = smooth.sum()
    return hard * (1 - label_smoothing) + smooth * each


@loss(F.huber_loss)
def huber_loss(x, target, reduction="mean", delta=1.0, weight=None):
    if weight is not None or not 0 < delta < 1 / TINY or x.shape != target.shape:
        return NotImplemented
    z = (x - target).abs()
    near = torch.where(z > delta, delta, z)             # else an infinite z would make 0 times infinity in backward
    return by_reduction(torch.where(z < delta, 0.5 * near * near, delta * (z - 0.5 * delta)), reduction)


@loss(F.smooth_l1_loss)
def smooth_l1_loss(x, target, reduction="mean", beta=1.0):
    if not beta > TINY or x.shape != target.shape:
        return NotImplemented
    z = (x - target).abs()
    near = torch.where(z > beta, beta, z)
    return by_reduction(torch.where(z < beta, 0.5 * near * near / beta, z - 0.5 * beta), reduction)


@loss(F.margin_ranking_loss)
def margin_ranking_loss(x, y, target, margin=0.0, reduction="mean"):
    if not x.dim() == y.dim() == target.dim():
        return NotImplemented
    return by_reduction((-target * (x - y) + margin).clamp_min(0), reduction)


@loss(F.hinge_embedding_loss)
def hinge_embedding_loss(x, target, margin=1.0, reduction="mean"):
    far, near = torch.where(target != 1, (margin - x).clamp_min(0), 0), torch.where(target != -1, x, 0)
    return by_reduction(far + near, reduction)


@loss(F.cosine_embedding_loss)
def cosine_embedding_loss(x, y, target, margin=0.0, reduction="mean"):
    if x.dim() != y.dim() or x.dim() != target.dim() + 1:
        return NotImplemented
    squares = [(a * a).sum(-1) + 1e-12 for a in (x, y)]
    cosine = (x * y).sum(-1) / (squares[0] * squares[1]).sqrt()
    near, far = torch.where(target == 1, 1 - cosine, 0), torch.where(target == -1, (cosine - margin).clamp_min(0), 0)
    return by_reduction(near + far, reduction)


@loss(F.triplet_margin_loss)
def triplet_margin_loss(anchor, positive, negative, margin=1.0, p=2, eps=1e-6, swap=False, reduction="mean"):
    if type(p) is torch.SymFloat or type(eps) is torch.SymFloat or not margin > 0 or not anchor.dim() == positive.dim() == negative.dim():
        return NotImplemented
    near, far = (F.pairwise_distance(anchor, other, p, eps) for other in (positive, negative))
    far = torch.minimum(far, F.pairwise_distance(positive, negative, p, eps)) if swap else far
    return by_reduction((margin + near - far).clamp_min(0), reduction)


@loss(F.poisson_nll_loss)
def poisson_nll_loss(x, target, log_input=True, full=False, eps=1e-8, reduction="mean"):
    if reduction not in ("mean", "sum", "none") or x.shape != target.shape:
        return NotImplemented
    each = x.exp() - target * x if log_input else x - target * (x + eps).log()
    if full:
        stirling = target * target.log() - target + 0.5 * (2 * math.pi * target).log()
        each = each + stirling.masked_fill(target <= 1, 0)
    return by_reduction(each, reduction)
