import torch

def entry(x):
    v = torch._neg_view(x)
    return v.is_neg() + x, v.resolve_neg().add_(1), x.is_neg() + x

def drive(compile_, call):
    fast = compile_(entry)
    call(fast, torch.arange(3.0))
    call(fast, torch.tensor(2.0))
