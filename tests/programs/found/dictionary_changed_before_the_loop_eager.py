from collections import OrderedDict
import torch

D = {'a': 1, 'k': 0}

def entry(x):
    D['m'] = 2
    total = 0
    for key, value in D.items():
        total += int(x.amax()) + value
        D[key] = total
    return x + total

def moved(x, d):
    x, seen = x + 1, []
    for key in d:
        seen.append(key)
        d[key] = d.pop(key)
    return x, seen

def drive(compile_, call):
    call(compile_(entry), torch.ones(2))
    call(compile_(moved), torch.ones(2), dict(a=1, b=2))
    call(compile_(moved), torch.ones(2), OrderedDict(a=1, b=2))
    call(compile_(moved), torch.ones(2), OrderedDict(a=1))
