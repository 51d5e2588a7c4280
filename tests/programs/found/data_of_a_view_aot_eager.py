import torch

def entry(a0, a2):
    a2.data.add_(1)
    return {'a2': a2}

def drive(compile_, call):
    fn = compile_(entry)
    x0 = torch.arange(3.0 * 2).reshape(2, 3).requires_grad_()
    call(fn, x0, x0[1])
    x0 = torch.arange(3.0 * 2).reshape(2, 3).requires_grad_()
    call(fn, x0, x0[:, 1])
