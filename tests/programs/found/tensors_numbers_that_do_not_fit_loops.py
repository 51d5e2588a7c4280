import torch

def entry(x):
    n = x.to(torch.int8)
    return (x // 1e300, 1e300 // x, x % 1e300, torch.div(x, -1e300, rounding_mode="trunc"), torch.fmod(x, 1e300), torch.xlogy(x, 1e300),
            torch.nan_to_num(x / 0, 1e300, -1e300, 2), (x.double() / 0).nan_to_num(), torch.remainder(300, n), n // 300, n % 1000, x == 1j,
            x != 1j, n == 2j)

def drive(compile_, call):
    call(compile_(entry), torch.tensor([1.0, -2.0, 0.5, 7.0]))
