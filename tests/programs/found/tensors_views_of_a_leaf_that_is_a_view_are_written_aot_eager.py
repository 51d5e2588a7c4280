import torch

def entry(a, b):
    v = b.movedim(0, 1)
    with torch.no_grad():
        b[0] = -2
    return v * a

def drive(compile_, call):
    fast = compile_(entry)
    call(fast, torch.arange(2.0), torch.ones(2, 5)[:, ::2].requires_grad_())
    call(fast, torch.arange(2.0), torch.ones(2, 3).requires_grad_())
    call(fast, torch.arange(2.0), torch.ones(2, 3).requires_grad_() * 2)
    call(fast, torch.arange(2.0), (torch.ones(2, 5).requires_grad_() * 2)[:, ::2])
    call(fast, torch.arange(2.0), torch.ones(2, 5)[:, ::2].requires_grad_())
