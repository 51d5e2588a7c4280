import torch

def row(a):
    row = a[None]
    with torch.no_grad():
        row.add_(1)
    return (a - row).sum()

def bits(a):
    row = a[1:]
    bits = row.view(torch.int32)
    bits.fill_(row.mean())
    return row

def start(a):
    start = a.as_strided((3,), (1,))
    start.clamp_(-1, 1)
    return a.sum()

def drive(compile_, call):
    for f in (row, bits):
        call(compile_(f), torch.arange(6.0)[::2].requires_grad_())
    leaf = torch.linspace(-4, 4, 12).view(3, 4).requires_grad_()
    call(compile_(start), leaf.mT * 1.5)
    call(compile_(lambda: leaf.grad))
