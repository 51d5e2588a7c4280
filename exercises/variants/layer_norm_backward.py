from functools import partial

import torch

from minicompile.ch06_decompositions.rules.normalization import _affine, _folded, _inner, _input_gradient
from minicompile.ch06_decompositions.table import widen


def _backward(grad, x, normalized_shape, mean, rstd, weight, bias, output_mask, *, use_weight=True, centered=True, masks=True, wide=True,
              last_only=False,
              folded=True, with_n=True):
    inner = [x.dim() - 1] if last_only else _inner(x, normalized_shape)
    outer = list(range(x.dim() - len(normalized_shape)))
    raise_ = widen if wide else lambda t: t
    n = (raise_(x) - raise_(mean)) * raise_(rstd)
    g = raise_(grad)
    dx = dw = db = None
    if output_mask[0] or not masks:
        dx = _input_gradient(_affine(g, weight if use_weight else None, None, raise_), n, raise_(rstd), inner, centered).to(x.dtype)
    if (output_mask[1] or not masks) and weight is not None:
        dw = (_folded(g * n if with_n else g, outer) if folded else torch.sum(g * n, outer, True)).to(weight.dtype)
    if (output_mask[2] or not masks) and bias is not None:
        db = _folded(g, outer).to(bias.dtype)
    return dx, dw, db


wrong_without_weight = partial(_backward, use_weight=False)
wrong_without_mean = partial(_backward, centered=False)
wrong_ignores_mask = partial(_backward, masks=False)
wrong_only_last_dim = partial(_backward, last_only=True)
wrong_keeps_dims = partial(_backward, folded=False)
wrong_gradient_of_weight = partial(_backward, with_n=False)


def wrong_float32_results(grad, x, normalized_shape, mean, rstd, weight, bias, output_mask):
    return tuple(None if t is None else t.float() for t in _backward(grad, x, normalized_shape, mean, rstd, weight, bias, output_mask))


def right_flattened(grad, x, normalized_shape, mean, rstd, weight, bias, output_mask):
    count = 1
    for size in normalized_shape:
        count *= size
    def rows(t):
        return widen(t).reshape(-1, count)
    g, n, r = rows(grad), (rows(x) - widen(mean).reshape(-1, 1)) * widen(rstd).reshape(-1, 1), widen(rstd).reshape(-1, 1)
    dx = dw = db = None
    if output_mask[0]:
        h = g if weight is None else g * widen(weight).reshape(1, -1)
        dx = (r / count * (count * h - h.sum(1, True) - n * (h * n).sum(1, True))).reshape(x.shape).to(x.dtype)
    if output_mask[1] and weight is not None:
        dw = (g * n).sum(0).reshape(normalized_shape).to(weight.dtype)
    if output_mask[2] and bias is not None:
        db = g.sum(0).reshape(normalized_shape).to(bias.dtype)
    return dx, dw, db


def wrong_calls_the_operator(*args):
    return torch.ops.aten.native_layer_norm_backward.default(*args)
