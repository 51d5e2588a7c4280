import torch

class Base:

    def __init__(self, n, name='base'):
        self.n = n

class Child(Base):

    def __setattr__(self, name, value):
        value

def entry(a0, a1, a2, *rest, kw=2):
    v10 = Child(kw, name='a')
    match 'b':
        case str():
            v10.extra = 1
            v10.extra = a0

def drive(compile_, call):
    fn = compile_(entry)
    x0 = torch.zeros(3)
    call(fn, x0, 1, 3)