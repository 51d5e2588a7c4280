import torch
W = (torch.eye(3) * 2).requires_grad_()

def entry(a0, b0):
    a0 += 1
    b0 += W
    y = a0 @ W + b0 @ W
    print(a0.shape[0])
    a0.add_(1)
    return y

def second(a0, b0):
    b0 += W
    y = b0 @ W
    z = W * 2
    print(a0.shape[0])
    b0.add_(1)
    return y, z

def third(a0, b0):
    b0 += W
    a0 += 1
    y = b0 @ W + a0.data @ W
    a0.mul_(2)
    print(b0.shape[0])
    a0 += 1
    return y, a0

def drive(compile_, call):
    for f in (entry, second, third):
        fn = compile_(f)
        call(fn, torch.ones(2, 3), torch.ones(3, 3))
