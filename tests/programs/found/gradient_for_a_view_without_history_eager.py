import torch


def slope(x, b):
    return torch.autograd.grad((x * x).sum() + (b * b).sum(), (b, x), allow_unused=True)


def used(x, b):
    return torch.autograd.grad((x * x).sum() + (b * b).sum(), x)[0]


def step(x, b):
    x.register_hook(lambda g: g * 2)
    (x * x).sum().backward()
    return x.grad


def broken(b):
    v = b[:1]
    with torch.enable_grad():
        x = v if v.requires_grad else v.detach().requires_grad_()
        return torch.autograd.grad((x * x).sum(), x)[0]


def leaf():
    return torch.arange(3.0).requires_grad_()


def drive(compile_, call):
    for f in slope, used, step:
        fn = compile_(f)
        call(fn, leaf(), leaf())
        b = leaf()
        call(fn, b.view(3), b)
        with torch.no_grad():
            views = b.view(3), *b.split(2), b.expand(2, 3)
        for v in views:
            call(fn, v, b)
        call(fn, torch.arange(3.0)[:].requires_grad_(), b)
    fn = compile_(broken)
    call(fn, leaf())
    with torch.no_grad():
        call(fn, leaf())
