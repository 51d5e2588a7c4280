import torch


class Child:

    def __init__(self, n):
        self.n = n


def entry(a0, a2):
    for v21 in a0.unsqueeze(1):
        break
    a2.extra = v21
    del a2.extra


def drive(compile_, call):
    fn = compile_(entry)
    h_a2 = Child(0)
    x0 = torch.arange(3.0 * 2).reshape(2, 3)
    call(fn, x0, h_a2)
    h_a2.extra = 0
    call(fn, x0, h_a2)
    call(fn, x0, h_a2)
