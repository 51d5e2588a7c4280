import torch

def entry(x):
    s = x * 1
    torch._neg_view(s).copy_(x)
    torch._neg_view(s)[..., 1:].add_(1)
    torch._neg_view(x).mul_(2)
    return s, x * 1

def drive(compile_, call):
    fast = compile_(entry)
    call(fast, torch.arange(6.0).view(2, 3))
    call(fast, torch.arange(6.0).view(2, 3).requires_grad_() * 1)
