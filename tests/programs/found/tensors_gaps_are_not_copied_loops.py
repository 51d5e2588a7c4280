import torch


def entry(a, b):
    a[0] = 2
    a.unfold(0, 2, 2).mul_(2)
    c = b.reshape(3, 1)
    c.swapaxes(0, -1).copy_(b)
    return c.view(torch.int32)


def drive(compile_, call):
    call(compile_(entry), torch.arange(33.0)[::2], torch.arange(3.0).double().unsqueeze(0))
