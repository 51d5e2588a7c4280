import torch

def entry(a):
    return -a, ~(-a), torch.maximum(a, -a) % 5

def drive(compile_, call):
    call(compile_(entry), torch.tensor([0, 1, 2, 200, 255], dtype=torch.uint8))
