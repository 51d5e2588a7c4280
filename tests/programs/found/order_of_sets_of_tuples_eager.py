import torch

def entry(x):
    s = {(1, 2), (3, 4)}
    s.update([(5, 6), (7, 8)])
    return x + 1, s

def drive(compile_, call):
    result, s = compile_(entry)(torch.ones(2))
    call(list, s)
