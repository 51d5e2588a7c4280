import torch

leaves = []


def entry(e):
    turned = e.transpose(0, -1)
    steps = turned.diff(dim=0).roll(0, 1)
    turned.sin_()
    e[1:].mul_(0.5)
    return steps


def drive(compile_, call):
    fast = compile_(entry)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    x.view(-1)[::5] = float("inf")
    leaves.append(x.requires_grad_())
    call(fast, x * 1.5)
