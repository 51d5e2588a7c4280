import torch


def inputs(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 16, generator=generator), torch.randn(6, 4, generator=generator).permute(1, 0)


def entry(a, b):
    diagonal = (-a).diagonal().reshape(-1)
    diagonal[0] = 3
    row = b.sigmoid()[2, 1:]
    row.lerp_(row, 0.5)
    return diagonal, row.detach()


def drive(compile_, call):
    fast = compile_(entry)
    for seed in (0, 1):
        call(fast, *inputs(seed))
