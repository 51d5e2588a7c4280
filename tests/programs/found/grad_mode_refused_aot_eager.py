from typing import NamedTuple
import torch

class Base:
    created = 0

    @classmethod
    def make(cls, n):
        cls.created += 1

class Child(Base):

    def __init__(self, n, name='child'):
        super

class Pair(NamedTuple):
    a: int

def entry(a0, a1, d0=3):
    for v5 in a0.unsqueeze(1):
        pass
    for v8, v9 in enumerate([1]):
        with torch.set_grad_enabled(Child.make(v9)):
            a0 -= v5

def drive(compile_, call):
    fn = compile_(entry)
    x0 = torch.arange(3.0 * 2).reshape(2, 3).double()
    call(fn, x0, Pair)