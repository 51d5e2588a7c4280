import torch

def entry(b):
    v1 = b.abs().sign()
    v3 = (b - v1.roll(-1, 0), v1.mul_(b))[0]
    v3[[0]] += 1
    return v3

def drive(compile_, call):
    call(compile_(entry), torch.ones(2).to(torch.bfloat16))
