# %% [markdown]
# # Lists of tensors, and optimizers
#
# An optimizer updates hundreds of small tensors, and eager would spend its time launching kernels.
# PyTorch's answer are operators on lists: `_foreach_add` adds lists of tensors in few launches. A compiler
# has a better one. Taken apart into one pointwise operator per tensor, the fifteen `_foreach` calls of an
# AdamW step become a chain per parameter; fusion turns the chain into one pass over memory, and the
# horizontal kind puts the parameters side by side in one kernel.

# %%
from __future__ import annotations

import torch

from . import arithmetic, reductions
from .table import aten, decomposition, in_float32


def each(fn, lists: int = 1):
    """`fn` mapped over lists: the first `lists` arguments are lists, a later one is a list or one value
    for all."""

    def run(*args, **kwargs):
        n = len(args[0])
        rows = [a if isinstance(a, (list, tuple)) or i < lists else [a] * n for i, a in enumerate(args)]
        return [fn(*row, **kwargs) for row in zip(*rows)]

    return run


for _name in ("abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 "
              "neg reciprocal round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc").split():
    decomposition(f"_foreach_{_name}")(each(getattr(torch, _name)))

_BINARY = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "pow": torch.pow,
           "maximum": arithmetic.clamp_min, "minimum": arithmetic.clamp_max,
           "clamp_min": arithmetic.clamp_min, "clamp_max": arithmetic.clamp_max, "copy": aten.copy.default}
for _name, _fn in _BINARY.items():
    _kinds = ("List", "Scalar", "ScalarList", "Tensor", "default")
    decomposition(*(f"_foreach_{_name}.{kind}" for kind in _kinds))(each(_fn))


@decomposition("_foreach_pow.ScalarAndTensor")
def foreach_scalar_pow(base, exponents):
    return [torch.pow(base, e) for e in exponents]


@decomposition("_foreach_lerp.List", "_foreach_lerp.Scalar", "_foreach_lerp.ScalarList")
def foreach_lerp(starts, ends, weights):
    return each(arithmetic.lerp, 2)(starts, ends, weights)


def _ternary(name, fn):
    def run(xs, tensors1, tensors2, values=1):
        if isinstance(values, torch.Tensor):
            values = values.unbind() if values.dim() else values
        return each(lambda x, a, b, v: fn(x, a, b, value=v), 3)(xs, tensors1, tensors2, values)

    decomposition(*(f"_foreach_{name}.{kind}" for kind in ("Scalar", "ScalarList", "Tensor")))(run)


_ternary("addcmul", arithmetic.addcmul)
_ternary("addcdiv", arithmetic.addcdiv)


@decomposition("_foreach_norm.Scalar")
def foreach_norm(tensors, ord=2, dtype=None):
    return [reductions.vector_norm(t, ord, dtype=dtype) for t in tensors]


@decomposition("_foreach_max")
def foreach_max(tensors):
    return [torch.max(t) for t in tensors]


@decomposition("_foreach_zero")
def foreach_zero(tensors):
    return [torch.zeros_like(t) for t in tensors]


# %% [markdown]
# ## Fused optimizers
#
# `torch.optim.AdamW(fused=True)` calls one operator with all parameters. Its functional form returns the
# new parameters, gradients and moments. The kernel computes in float32 whatever the storage types are, and
# each tensor is rounded to its own.

# %%
@in_float32
def _adam_update(param, grad, m, v, top, step, *, lr, beta1, beta2, weight_decay, eps, maximize, decoupled):
    if maximize:
        grad = -grad
    if weight_decay != 0 and decoupled:
        param = param - lr * weight_decay * param
    elif weight_decay != 0:
        grad = grad + param * weight_decay
    m = beta1 * m + (1 - beta1) * grad
    v = beta2 * v + (1 - beta2) * grad * grad
    top = None if top is None else torch.maximum(top, v)
    correction1, correction2 = 1 - torch.pow(beta1, step), 1 - torch.pow(beta2, step)
    denominator = torch.sqrt(v if top is None else top) / torch.sqrt(correction2) + eps
    return param - lr / correction1 * m / denominator, m, v, top


def _select(found_inf, old, new):
    new = new.to(old.dtype)
    return new if found_inf is None else torch.where(found_inf == 1, old, new)


def _fused_adam(decoupled, params, grads, ms, vs, tops, steps, *, lr, beta1, beta2, weight_decay, eps,
                amsgrad, maximize, grad_scale=None, found_inf=None):
    options = dict(lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps, maximize=maximize,
                   decoupled=decoupled)
    out = ([], [], [], [], [])
    for i, (param, grad, m, v, step) in enumerate(zip(params, grads, ms, vs, steps)):
        scaled = grad if grad_scale is None else (grad / grad_scale).to(grad.dtype)
        old = (param, m, v, tops[i] if amsgrad else None)
        new = _adam_update(param, scaled, *old[1:], step, **options)
        param, m, v, top = (None if o is None else _select(found_inf, o, n) for o, n in zip(old, new))
        for results, value in zip(out, (param, scaled, m, v, top)):
            if value is not None:
                results.append(value)
    return out


@decomposition("_fused_adam", "_fused_adam.tensor_lr")
def fused_adam(*args, **kwargs):
    return _fused_adam(False, *args, **kwargs)


@decomposition("_fused_adamw", "_fused_adamw.tensor_lr")
def fused_adamw(*args, **kwargs):
    return _fused_adam(True, *args, **kwargs)


@decomposition("_fused_sgd", "_fused_sgd.tensor_lr")
def fused_sgd(params, grads, momenta, *, weight_decay, momentum, lr, dampening, nesterov, maximize,
              is_first_step, grad_scale=None, found_inf=None):
    out = ([], [], [])
    for i, (param, grad) in enumerate(zip(params, grads)):
        grad = grad if grad_scale is None else (grad / grad_scale).to(grad.dtype)
        buffer = momenta[i] if momentum != 0 else None
        new_param, new_buffer = _sgd_update(param, grad, buffer, weight_decay, momentum, lr, dampening,
                                            nesterov, maximize, is_first_step)
        out[0].append(_select(found_inf, param, new_param))
        out[1].append(grad)
        if buffer is not None:
            out[2].append(_select(found_inf, buffer, new_buffer))
    return out


@in_float32
def _sgd_update(param, grad, buffer, weight_decay, momentum, lr, dampening, nesterov, maximize, first):
    if maximize:
        grad = -grad
    if weight_decay != 0:
        grad = grad + param * weight_decay
    if buffer is not None:
        buffer = grad if first else buffer * momentum + grad * (1 - dampening)
        grad = grad + buffer * momentum if nesterov else buffer
    return param - lr * grad, buffer
