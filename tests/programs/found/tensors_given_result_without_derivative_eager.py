import torch

def softmax(x, y):
    return torch.softmax(x * 2, -1, out=y)

def floor_divide(x, y):
    return torch.floor_divide(x, 0.3, out=y)

def norm(x, y):
    return torch.norm(x, 2, 1, out=y[0])

def drive(compile_, call):
    for f in (softmax, floor_divide, norm):
        call(compile_(f), torch.linspace(-1, 1, 9).view(3, 3).requires_grad_(), torch.empty(3, 3))
