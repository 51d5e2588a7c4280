import itertools
import torch

def entry(x, n):
    for i in itertools.islice(itertools.count(n), 3):
        x = x + i
    return (x, range(n), [1, 2, 3][:n], 'abc'[n:], list(enumerate('ab', n)), [0] * n, 2 ** n, n in (1, 2), {n: 1},
            list(itertools.repeat(1, n)), sorted([3, n]))

def drive(compile_, call):
    fn = compile_(entry)
    for n in (2, 7, 8, 0):
        call(fn, torch.ones(2, 3), n)
