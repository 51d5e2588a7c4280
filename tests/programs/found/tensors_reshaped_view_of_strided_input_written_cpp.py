import torch


def entry(d):
    view, other = d.T, d.reshape(-1)
    view.zero_()
    return other.sum(), other + 1


def drive(compile_, call):
    call(compile_(entry), torch.randn(3, 14)[..., ::2])
