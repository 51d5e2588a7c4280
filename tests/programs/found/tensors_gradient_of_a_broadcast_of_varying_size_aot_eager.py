import torch


def entry(a):
    cubes = a ** 3
    windows = a.sin().unfold(0, a.shape[0] - 2, 2)
    return torch.broadcast_to(cubes, (2, *cubes.shape)), windows


def drive(compile_, call):
    fast = compile_(entry)
    for size in (5, 4, 9):
        call(fast, torch.linspace(-1, 2, size).requires_grad_())
