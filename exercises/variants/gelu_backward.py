import math

import torch


def _slope(x, approximate, pdf_scale=math.sqrt(2 * math.pi), density=True, cubic=3.0, sech=True):
    if approximate == "tanh":
        k = math.sqrt(2 / math.pi)
        t = torch.tanh(k * (x + 0.044715 * x * x * x))
        return 0.5 * (1 + t) + 0.5 * x * (1 - t * t if sech else 1 - t) * k * (1 + cubic * 0.044715 * x * x)
    cdf = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    return cdf + (x * torch.exp(-0.5 * x * x) / pdf_scale if density else 0)


def wrong_no_density(grad, x, approximate="none"):
    return grad * _slope(x, approximate, density=False, cubic=0.0)


def wrong_scale_of_density(grad, x, approximate="none"):
    return grad * _slope(x, approximate, pdf_scale=math.sqrt(math.pi))


def wrong_ignores_approximate(grad, x, approximate="none"):
    return grad * _slope(x, "none")


def wrong_always_tanh(grad, x, approximate="none"):
    return grad * _slope(x, "tanh")


def wrong_cubic_term(grad, x, approximate="none"):
    return grad * _slope(x, approximate, cubic=1.0)


def wrong_derivative_of_tanh(grad, x, approximate="none"):
    return grad * _slope(x, approximate, sech=False)


def wrong_forgets_grad(grad, x, approximate="none"):
    return _slope(x, approximate)


def right_other_order(grad, x, approximate="none"):
    if approximate == "none":
        return grad * x * torch.exp(x * x * -0.5) * 0.3989422804014327 + grad * 0.5 * torch.erfc(-x * 0.7071067811865476)
    u = 0.7978845608028654 * x * (1 + 0.044715 * x * x)
    s = torch.sigmoid(2 * u)
    return grad * (s + x * s * (1 - s) * 2 * 0.7978845608028654 * (1 + 0.134145 * x * x))


def wrong_calls_the_operator(grad, x, approximate="none"):
    return torch.ops.aten.gelu_backward.default(grad, x, approximate=approximate)


def wrong_calls_autograd(grad, x, approximate="none"):
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        y = torch.nn.functional.gelu(x, approximate=approximate)
    return torch.autograd.grad(y, x, grad)[0]
