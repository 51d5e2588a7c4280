import torch

def add(x, w): return x + w

def product(x, w): return x * w

def part(x, w): return x.sin(), w * 2

def recomputed(x, w): return (x.relu() + 1).tanh().detach() * w

def write(x, w): return x.add_(1)

def write_a_view(x, w):
    x[1:].mul_(2)
    return x

def inside(x, w):
    with torch.inference_mode():
        y = w * 2
        y.add_(1)
    return y.clone() + w, y

def made(inference):
    with torch.inference_mode(inference):
        return torch.linspace(-1, 1, 9).view(3, 3)

def drive(compile_, call):
    for f in (add, product, part, recomputed, write, write_a_view, inside):
        compiled = compile_(f)
        for inference in (False, True, True):
            w = torch.linspace(-1, 2, 9).view(3, 3).requires_grad_()
            call(compiled, made(inference), w)
            call(compiled, made(inference), w.detach())
