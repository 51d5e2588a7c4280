import torch

class A:
    def __init__(self, n):
        self.n = n

def entry(x, a):
    fields = a.__dict__
    fields['n'] = 5
    vars(a)['m'] = x + 1
    a.n += 1
    b = A(1)
    b.__dict__.update(k=2, n=7)
    del vars(b)['k']
    return fields['n'], x * a.n, fields is vars(a), b, hasattr(b, 'k'), sorted(fields), fields

def drive(compile_, call):
    fn = compile_(entry)
    a = A(2)
    call(fn, torch.ones(2), a)
    call(fn, torch.ones(2), a)
