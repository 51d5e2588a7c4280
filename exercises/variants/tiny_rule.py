import torch


def _soft(x, dim, shift=True, over=None, keep=True):
    over = dim if over is None else over
    e = torch.exp(x - x.amax(over, keepdim=True)) if shift else torch.exp(x)
    return e / e.sum(dim, keepdim=keep)


def wrong_overflows(x, dim, half_to_float):
    return _soft(x, dim, shift=False)


def wrong_last_dimension(x, dim, half_to_float):
    return _soft(x, -1)


def wrong_largest_of_all(x, dim, half_to_float):
    return _soft(x, dim, over=tuple(range(x.dim())))


def wrong_logarithm(x, dim, half_to_float):
    return torch.log(_soft(x, dim))


def wrong_no_sum(x, dim, half_to_float):
    return torch.exp(x - x.amax(dim, keepdim=True))


def wrong_other_operators(x, dim, half_to_float):
    return torch.exp(x - torch.logsumexp(x, dim, keepdim=True))


def right_reciprocal(x, dim, half_to_float):
    largest = x.amax(dim, keepdim=True)
    powers = (x - largest).exp()
    return powers * powers.sum([dim], keepdim=True).reciprocal()
