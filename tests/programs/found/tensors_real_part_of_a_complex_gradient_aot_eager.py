import torch


def slope(f, x):
    return torch.autograd.grad(f(x).sum(), x)[0]


def entry(z, x):
    a = z.abs()
    print(end="")
    b = (a * z).abs().sum()
    print(end="")
    return torch.autograd.grad(b, a, create_graph=z.is_contiguous())[0], slope(lambda x: torch.complex(x, x + 1).abs(), x)


def drive(compile_, call):
    fast = compile_(entry)
    for size in (5, 5, 6):
        z = torch.arange(2.0 * size).view(size, 2).sin()
        call(fast, torch.view_as_complex(z).requires_grad_(), torch.ones(size, requires_grad=True))
        call(fast, torch.view_as_complex(z).requires_grad_() * 2, torch.ones(size).requires_grad_() * 2)
