import torch


def entry(a):
    return torch.fft.irfft(a, dim=-1), torch.fft.rfft(a, dim=0), torch.fft.fft2(a).abs(), torch.fft.irfft(a, dim=0) * 2


def filled(c, n):
    y = c / 3 + n
    parts = y.unfold(0, 3, 3)
    y.fill_(y.mean())
    return parts * 2


def drive(compile_, call):
    fast = compile_(entry)
    for size in (7, 9, 8):
        call(fast, torch.arange(14.0 * size).view(2, 7, size).sin().permute(2, 1, 0))
    fast = compile_(filled)
    for size in (5, 6, 8):
        call(fast, torch.arange(1.0 * size).view(1, 1, size).permute(2, 1, 0), torch.ones(size, 1))
