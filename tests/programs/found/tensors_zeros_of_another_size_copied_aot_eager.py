import torch

def entry(x, y):
    slope, = torch.autograd.grad(x.abs().sum(), x, create_graph=True)
    zeros, = torch.autograd.grad(slope.sum(), x)
    return y.copy_(zeros), y * 2

def drive(compile_, call):
    call(compile_(entry), torch.tensor([1.0, -2.0, 3.0], requires_grad=True), torch.ones(1))
    call(compile_(entry), torch.tensor([1.0, -2.0, 3.0], requires_grad=True), torch.ones(3))
