import torch

def entry(x):
    return torch.linspace(0, True, 4) * x, torch.linspace(False, 2, 5) + x

def drive(compile_, call):
    call(compile_(entry), torch.ones(1))
