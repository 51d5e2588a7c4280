import torch

class A:
    pass

class B(A):
    def __call__(self):
        return 1

def entry(x, a):
    return x * sum([callable(1), callable(x), callable(a), callable(B()), callable(A), callable(len), callable('s')])

def drive(compile_, call):
    fn = compile_(entry)
    call(fn, torch.ones(2), A())
    call(fn, torch.ones(2), B())
