# %% [markdown]
# # Lists of tensors, and optimizers
#
# An optimizer updates hundreds of small tensors, and eager would spend its time launching kernels.
# PyTorch's answer are operators on lists: `_foreach_add` adds lists of tensors in few launches. A compiler
# has a better one. Taken apart into one pointwise operator per tensor, the fifteen `_foreach` calls of an
# AdamW step become a chain per parameter; fusion turns the chain into one pass over memory, and the
# horizontal kind puts the parameters side by side in one kernel.

# %%
import functools
import math

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..table import aten, decomposition, in_float32
from . import arithmetic, reductions


def each(fn, lists: int = 1):
    """`fn` mapped over lists: the first `lists` arguments are lists, a later one is a list or one value
    for all. Most elements ask what another one has asked, so the decomposer may write again what that was expanded to."""

    def run(*args, **kwargs):
        n = len(args[0])
        rows = [a if isinstance(a, (list, tuple)) or i < lists else [a] * n for i, a in enumerate(args)]
        mode = _get_current_dispatch_mode()
        repeat = getattr(mode, "repeat", lambda rule, args, kwargs, expand: expand())
        return [repeat(fn, row, kwargs, functools.partial(fn, *row, **kwargs)) for row in zip(*rows)]

    return run


def foreach(name: str, fn) -> None:
    """`fn` for every overload of `_foreach_name` that returns its results."""
    kinds = [kind for kind in getattr(aten, f"_foreach_{name}").overloads() if "out" not in kind]
    decomposition(*(f"_foreach_{name}.{kind}" for kind in kinds))(fn)


for _name in ("abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 "
              "max neg reciprocal round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc").split():
    foreach(_name, each(getattr(torch, _name)))
for _name, _fn in (("add", torch.add), ("sub", torch.sub), ("mul", torch.mul), ("div", torch.div),
                   ("maximum", arithmetic.clamp_min), ("minimum", arithmetic.clamp_max),
                   ("clamp_min", arithmetic.clamp_min), ("clamp_max", arithmetic.clamp_max),
                   ("copy", aten.copy.default), ("zero", torch.zeros_like), ("norm", reductions.vector_norm)):
    foreach(_name, each(_fn))
foreach("lerp", each(arithmetic.lerp, 2))


def _power(base, exponents):
    """One base for all exponents, or the other way round."""
    return each(torch.pow)(base, exponents) if isinstance(base, (list, tuple)) else \
        [torch.pow(base, e) for e in exponents]


foreach("pow", _power)


def _ternary(name: str, fn) -> None:
    def run(xs, tensors1, tensors2, values=1):
        if isinstance(values, torch.Tensor):
            values = values.unbind() if values.dim() else values
        return each(lambda x, a, b, v: fn(x, a, b, value=v), 3)(xs, tensors1, tensors2, values)

    foreach(name, run)


_ternary("addcmul", arithmetic.addcmul)
_ternary("addcdiv", arithmetic.addcdiv)


# %% [markdown]
# ## Fused optimizers
#
# `torch.optim.AdamW(fused=True)` calls one operator with all parameters. Its functional form returns the
# new parameters, gradients and moments. The kernel computes in float32, or in float64 for parameters of it, and each tensor is rounded to
# its own dtype.
#
# `_adam_update` is the update of one parameter, as the formula stands in the paper, with the variants that options select. The number of
# the step is a float32 for parameters of float64, too, and so may the learning rate be: what is computed from them has the digits of the
# parameter. `_adam_step` puts gradient scaling around it: if a scaler has found an infinity, every result is what it was before. It is
# called for `each` parameter, and what it returns goes into the lists that the operator returns.

# %%
def _bias_correction(beta, step):
    """1 - beta ** step. PyTorch's kernel takes the power in float64; in float32 most digits of the difference would cancel, but not
    those of `expm1`."""
    return -torch.expm1(step * math.log(beta)) if type(beta) is float and beta > 0 else 1 - torch.pow(beta, step)


@in_float32
def _adam_update(param, grad, m, v, top, step, *, lr, beta1, beta2, weight_decay, eps, maximize, decoupled):
    step, lr = (n.to(param.dtype) if isinstance(n, torch.Tensor) else n for n in (step, lr))
    if maximize:
        grad = -grad
    if weight_decay != 0 and decoupled:
        param = param - lr * weight_decay * param
    elif weight_decay != 0:
        grad = grad + param * weight_decay
    m = beta1 * m + (1 - beta1) * grad
    v = beta2 * v + (1 - beta2) * grad * grad
    top = None if top is None else torch.maximum(top, v)
    correction1, correction2 = _bias_correction(beta1, step), _bias_correction(beta2, step)
    denominator = torch.sqrt(v if top is None else top) / torch.sqrt(correction2) + eps
    return param - lr / correction1 * m / denominator, m, v, top


def _select(found_inf, old, new):
    new = new.to(old.dtype)
    return new if found_inf is None else torch.where(found_inf == 1, old, new)


def _adam_step(param, grad, m, v, top, step, *, grad_scale=None, found_inf=None, **options):
    grad = grad if grad_scale is None else (grad / grad_scale).to(grad.dtype)
    new_param, *new = _adam_update(param, grad, m, v, top, step, **options)
    m, v, top = (None if o is None else _select(found_inf, o, n) for o, n in zip((m, v, top), new))
    return _select(found_inf, param, new_param), grad, m, v, top


def _fused_adam(decoupled, params, grads, ms, vs, tops, steps, *, amsgrad, **options):
    tops = tops if amsgrad else [None] * len(params)
    return _columns(5, each(_adam_step, 6)(params, grads, ms, vs, tops, steps, decoupled=decoupled, **options))


def _columns(count: int, rows) -> list[list]:
    """Of rows of so many results the lists of the first, the second, ..., each without None."""
    return [[row[i] for row in rows if row[i] is not None] for i in range(count)]


for _name, _decoupled in (("_fused_adam", False), ("_fused_adamw", True)):
    decomposition(_name, _name + ".tensor_lr")(functools.partial(_fused_adam, _decoupled))


@decomposition("_fused_sgd", "_fused_sgd.tensor_lr")
def fused_sgd(params, grads, momenta, *, momentum, **options):
    momenta = momenta if momentum != 0 else [None] * len(params)
    return _columns(3, each(_sgd_step, 3)(params, grads, momenta, momentum=momentum, **options))


def _sgd_step(param, grad, buffer, *, grad_scale=None, found_inf=None, **options):
    grad = grad if grad_scale is None else (grad / grad_scale).to(grad.dtype)
    new_param, new_buffer = _sgd_update(param, grad, buffer, **options)
    return _select(found_inf, param, new_param), grad, None if buffer is None else _select(found_inf, buffer, new_buffer)


@in_float32
def _sgd_update(param, grad, buffer, *, weight_decay, momentum, lr, dampening, nesterov, maximize, is_first_step):
    if maximize:
        grad = -grad
    if weight_decay != 0:
        grad = grad + param * weight_decay
    if buffer is not None:
        buffer = grad if is_first_step else buffer * momentum + grad * (1 - dampening)
        grad = grad + buffer * momentum if nesterov else buffer
    return param - lr * grad, buffer


# %% [markdown]
# ## Scaled gradients
#
# A `GradScaler` multiplies the loss, so that small gradients of float16 are not lost, and divides the gradients again before they are
# used. If one is infinite then, the fused operators above skip the update, and the scale is lowered; after `interval` steps
# without such an accident it grows.

# %%
@decomposition("_amp_foreach_non_finite_check_and_unscale")
def unscale(grads, found_inf, inv_scale):
    bad = torch.stack([g.isfinite().logical_not().any() for g in grads]).any()
    return [in_float32(torch.mul)(g, inv_scale).to(g.dtype) for g in grads], torch.where(bad, torch.ones_like(found_inf), found_inf)


@decomposition("_amp_update_scale")
def update_scale(scale, tracker, found_inf, growth, backoff, interval):
    bad, count, bigger = found_inf != 0, tracker + 1, scale * growth
    full = count == interval
    grown = torch.where(full & bigger.isfinite(), bigger, scale)
    return torch.where(bad, scale * backoff, grown), torch.where(bad | full, torch.zeros_like(count), count)
