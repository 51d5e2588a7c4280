import torch

def entry(a, b):
    a.masked_fill_(b > 0, 2)
    norm = a.norm(p=1, dim=0)
    c = torch.fmax(b, a)
    c[c > 0] *= 0.5
    return (a * norm).sum(), a.mul_(norm)

def drive(compile_, call):
    fast = compile_(entry)
    leaf = torch.linspace(-1, 2, 4).requires_grad_()
    def hooked(*args):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            return fast(*args)
    call(hooked, leaf * 1.5, torch.ones(4))
    call(hooked, leaf * 1.5, torch.ones(4))
