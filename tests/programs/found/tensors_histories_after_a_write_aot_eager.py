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

def hook(d):
    d.mul_(2)
    used = d.abs().sum()
    d.register_hook(lambda g: g * 0.5)
    return used, d * 3

def retain(d):
    d.mul_(2)
    used = d.abs().sum()
    d.retain_grad()
    return used, d * 3

def drive(compile_, call):
    for f in (row, bits):
        call(compile_(f), torch.arange(6.0)[::2].requires_grad_())
    leaf = torch.linspace(-4, 4, 12).view(3, 4).requires_grad_()
    call(compile_(start), leaf.mT * 1.5)
    results = []
    for f in (hook, retain):
        written = leaf * 1.5
        call(compile_(f), written)
        results.append(written.grad)
    call(lambda: (leaf.grad, results))
