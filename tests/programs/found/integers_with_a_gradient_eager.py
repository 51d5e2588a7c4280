import torch
import torch.nn as nn

class Model(nn.Module):

    def __init__(self, n=3):
        super().__init__()
        self.weight = nn.Parameter()
G_MODEL = Model()

def entry(a0, a1, a2, d0=3):
    a1[1] = G_MODEL.weight.sum().sum()
    print(sep='/')
    v13 = a0
    a1[v13 > 1] = 0

def drive(compile_, call):
    fn = compile_(entry)
    x0 = torch.zeros(2, 3).long()
    x1 = torch.zeros(2, 3)
    call(fn, x0, x1, 0)
    call(fn, x0, x0[:], 1)