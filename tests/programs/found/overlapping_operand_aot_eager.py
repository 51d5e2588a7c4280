import torch

def entry(a0):
    a0 -= a0.reshape(3, -1).t().reshape(a0.shape)

def drive(compile_, call):
    fn = compile_(entry)
    call(fn, torch.full((2, 3), 2.0))
    call(fn, torch.arange(3.0 * 2).reshape(3, 2).t())
