import torch
import torch.nn.functional as F
DEVICE = 'cpu'

def inputs(seed, B):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(17, B, 2, generator=generator).to(DEVICE),)

def entry(a):
    return F.interpolate(a.transpose(0, 1), scale_factor=(1.3,), mode='nearest-exact')

def drive(compile_, call):
    fast = compile_(entry)
    for seed, B in [(0, 3), (1, 3), (2, 5)]:
        call(fast, *inputs(seed, B))
