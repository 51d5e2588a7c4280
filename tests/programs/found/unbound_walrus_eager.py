import torch

def entry(x, items):
    kept = [v for v in items if (last := v)]
    return x, kept, lambda: last, last

def drive(compile_, call):
    fn = compile_(entry)
    call(fn, torch.ones(2), [1])
    call(fn, torch.ones(2), [])
