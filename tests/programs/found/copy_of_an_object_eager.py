import copy
import torch

class Base:
    def __init__(self, n):
        self.n, self.d = n, {'a': n}

    def __eq__(self, other):
        return self.n == other.n

    def __add__(self, k):
        new = copy.copy(self)
        new.n = self.n + k
        return new

def entry(x, o):
    found = []
    match (o + 7).d:
        case {'a': a, **rest}:
            found.append((a, rest))
    if copy.copy(o) == o:
        found.append('equal')
    return x + (o + 2).n, found

def drive(compile_, call):
    call(compile_(entry), torch.ones(2), Base(3))
