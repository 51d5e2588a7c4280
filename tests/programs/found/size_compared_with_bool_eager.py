import torch

class Slots:

    def __init__(self, n):
        self.n = n

def entry(a0, a1, a2):
    match True:
        case int(v3):
            v6 = a0.shape[0] > v3

def drive(compile_, call):
    fn = compile_(entry)
    h_a2 = Slots
    x0 = torch.arange(3.0 * 2).reshape(3, 2).t()
    call(fn, x0, torch, h_a2)
    x0 = torch.arange(3.0 * 4).reshape(3, 4).t()
    call(fn, x0, torch, h_a2)