import torch

def entry(a):
    return a + a.shape[0]

def drive(compile_, call):
    fn = compile_(entry)
    for n in (2, 4, 1, 0, 5):
        call(fn, torch.ones(n, 3))
