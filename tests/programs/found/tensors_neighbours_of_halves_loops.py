import torch

def entry(a):
    up = torch.nextafter(a, a + 1)
    return up, up > a, torch.nextafter(a * 1.7, torch.zeros_like(a))

def drive(compile_, call):
    call(compile_(entry), torch.tensor([-1.5, 0.0, 0.3, 2.0, 100.0], dtype=torch.bfloat16))
