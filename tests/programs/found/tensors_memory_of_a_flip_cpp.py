import torch
DEVICE = 'cpu'
leaves = []

def inputs(seed, B):
    generator = torch.Generator().manual_seed(seed)

    def randn(*size):
        return torch.randn(size, generator=generator).to(DEVICE)
    a = randn(B, 8).permute([1, 0])
    return (a,)

def entry(a):
    v1 = a.rot90(1, (0, -1))
    v7 = v1.as_strided((2, 2), (1, 1))
    v14 = v7 % 1.5
    v20 = torch.logaddexp(v14, v7)
    v34 = v20.sinc()
    return v34

def drive(compile_, call):
    fast = compile_(entry)
    for seed, B in [(0, 3), (1, 3)]:
        call(fast, *inputs(seed, B))