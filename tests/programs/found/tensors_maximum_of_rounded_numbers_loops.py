import torch

leaves = []


def entry(e):
    s = e.sin()
    return s.sigmoid().amax(-1), s * 2


def drive(compile_, call):
    fast = compile_(entry)
    for seed in range(3):
        x = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(seed)).half()
        leaves.append(x.requires_grad_())
        call(fast, x * 1.5)
