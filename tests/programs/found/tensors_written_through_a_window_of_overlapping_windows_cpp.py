import torch

def inputs(seed, B):
    generator = torch.Generator().manual_seed(seed)

    def randn(*size):
        return torch.randn(size, generator=generator).to()
    a = randn
    b = a
    c = randn
    d = randn(3, 3).to()
    e = randn
    return (a, b, c, d, e)

def entry(a, b, c, d, e):
    v0 = d.unfold(0, 2, 1)
    v0.diagonal().fill_(1.5)
    v7 = d.reshape(-1)
    v11 = v7
    return v11

def drive(compile_, call):
    fast = compile_(entry)
    for seed, B in [(1, 4)]:
        call(fast, *inputs(seed, B))