import torch

def entry(x, items):
    x, found = x + 1, []
    for source in (items, tuple(items), {1: 2}, {1: 2}.items(), 'k', {5}):
        it = iter(source)
        for item in it:
            pass
        found.append(it)
    items.append(3)
    return x, found, [next(it, 'end') for it in found]

def drive(compile_, call):
    call(compile_(entry), torch.ones(2), [])
    call(compile_(entry), torch.ones(2), [1])
