import torch
W = (torch.eye(3) * 2).requires_grad_()

def entry(a0):
    try:
        a0[:, 1] = W.sum()
        a0 += 1
    except RuntimeError:
        a0 = a0.detach()
        a0 += 2
    return a0 + 1

def drive(compile_, call):
    fn = compile_(entry)
    call(fn, torch.zeros(2, 3))
    call(fn, torch.arange(6.).reshape(2, 3))
    call(fn, torch.zeros(2, 3))
