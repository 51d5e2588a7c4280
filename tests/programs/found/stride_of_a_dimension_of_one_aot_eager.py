import torch

def entry(x):
    x -= x
    return x + 0.0

def drive(compile_, call):
    call(compile_(entry), torch.arange(3.0).reshape(3, 1).t())
