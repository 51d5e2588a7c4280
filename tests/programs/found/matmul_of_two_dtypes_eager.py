import torch
import torch.nn.functional as F

G = 0

def entry(x, bias):
    global G
    G += 1
    y = F.linear(x, torch.eye(3), bias)
    G += 1
    return y @ torch.ones(3, 3)

def drive(compile_, call):
    fn = compile_(entry)
    call(fn, torch.ones(2, 3), torch.ones(3))
    call(fn, torch.ones(2, 3), torch.ones(3, dtype=torch.float64))
    call(fn, torch.ones(2, 3).double(), torch.ones(3, dtype=torch.float64))
