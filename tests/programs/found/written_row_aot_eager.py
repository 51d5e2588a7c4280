import torch

def entry(a0, a1):
    for row in (a0 + 0.5).unsqueeze(1):
        a0 = row
    a0.copy_(torch.stack([part for part in a1.split(1, dim=0)[0].unbind()]))
    return row

def drive(compile_, call):
    fn = compile_(entry)
    call(fn, torch.arange(3.0 * 2).reshape(2, 3), torch.arange(3.0 * 2).reshape(2, 3))
