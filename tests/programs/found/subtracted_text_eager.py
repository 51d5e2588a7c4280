import torch


def entry(a0, *, kw=2):
    try:
        kw -= 'abc'
    except TypeError as error:
        kw = error
    a0[1] = 1
    return kw


def drive(compile_, call):
    fn = compile_(entry)
    x0 = torch.zeros(3).long()
    call(fn, x0)
    call(fn, x0, kw=3)
    call(fn, x0, kw=4.5)
    call(fn, x0, kw=5.5)
