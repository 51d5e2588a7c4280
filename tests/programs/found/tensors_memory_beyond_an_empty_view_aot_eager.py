import torch


def entry(a):
    a.data.add_(0.5)
    return a.as_strided((2, 2), (1, 1))


def drive(compile_, call):
    call(compile_(entry), torch.arange(24.0).reshape(4, 6)[1:1])
