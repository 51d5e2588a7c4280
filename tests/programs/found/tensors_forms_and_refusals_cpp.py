import torch

def forms(a, b):
    return (True + a).angle(), torch.block_diag(b, b[:1], torch.tensor(2.0, dtype=torch.float64))

def outside(a):
    return (a & a).as_strided((2, 2), (1, 1)).sum()

def number(a):
    a.add_(1)
    return torch.full((2,), 1j, dtype=torch.float32)

def bits(a):
    view, other = a.view(torch.int32), a.mT
    other.copy_(other.roll(1, 0))
    view.clamp_(-1, 1)

def half_an_element(a):
    part = torch.view_as_complex(a.unfold(-1, 2, 2)).split_with_sizes([1, 1])[1]
    part.sub_(1)
    rows = torch.view_as_complex(a.unfold(-1, 2, 2)).conj().unfold(0, 2, 2)
    rows[0].add_(2j)

def drive(compile_, call):
    call(compile_(forms), torch.complex(torch.arange(8.0).view(4, 2).mT, torch.ones(2, 4)), torch.ones(3, 2, dtype=torch.bfloat16))
    fast = compile_(outside)
    for size in (4, 5, 2):
        call(fast, torch.arange(size))
    call(compile_(number), torch.ones(4))
    call(compile_(bits), torch.arange(8.0).view(1, 2, 1, 4).to(torch.bfloat16))
    call(compile_(half_an_element), torch.arange(5.0))
