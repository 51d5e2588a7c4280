import torch


def entry(a):
    ones = torch.ones(a.shape)
    ones += a
    ones.unsqueeze_(-1)
    return ones


def drive(compile_, call):
    fast = compile_(entry)
    for size in (3, 4, 6):
        call(fast, torch.randn(1, size, size - 1))
