import torch

def entry(a0):
    v1 = a0 * 3
    v2 = torch.tanh(v1[:, [2, 1, 0]])
    print(a0.shape[0])
    v2[a0 > 1] = 0
    return (v1, v1, v2)

def drive(compile_, call):
    fn = compile_(entry)
    call(fn, torch.arange(3.0 * 4).reshape(4, 3))
    call(fn, torch.arange(3.0 * 4).reshape(4, 3).requires_grad_())
    call(fn, torch.arange(3.0 * 5).reshape(5, 3).requires_grad_())
