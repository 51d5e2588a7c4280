from collections import deque
import torch

def entry(x, d):
    try:
        for item in d:
            x = x + item
            d.append(3)
    except RuntimeError as error:
        return x, str(error)
    return x

def breaking(x, d):
    d.append(7)
    for item in d:
        n = int(x.amax())
        x = x + n + item
        if n > 3:
            d.rotate(1)
    return x

def drive(compile_, call):
    call(compile_(entry), torch.ones(2), deque([1, 2], maxlen=2))
    call(compile_(breaking), torch.ones(2), deque([1, 2]))
