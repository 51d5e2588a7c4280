import collections, contextlib, copy, dataclasses, enum, functools, itertools, math, operator
import torch

class Slots:

    def __init__(self, n):
        self.n = n

def entry(a0, a1, a2, a3, d0=3):

    class v7:
        k = d0

    class v9:
        k = d0
    v12 = {}
    for v13, v14 in itertools.groupby([*a2], key=lambda v15: v15):
        v12[str] = len

def drive(compile_, call):
    fn = compile_(entry)
    h_a1 = 'k'
    h_a3 = Slots
    x0 = torch
    call(fn, x0, h_a1, (1, 1), h_a3, 2)
    call(fn, x0, h_a1, (1, 3), h_a3)