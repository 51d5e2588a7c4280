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

def second(x, items):
    found = [reversed(items), map(abs, items), zip(items, items), enumerate(items), iter(x)]
    for it in found:
        list(it)
    return x + 1, found

def drive(compile_, call):
    call(compile_(second), torch.ones(2), [1])
    call(compile_(entry), torch.ones(2), [])
    call(compile_(entry), torch.ones(2), [1])
