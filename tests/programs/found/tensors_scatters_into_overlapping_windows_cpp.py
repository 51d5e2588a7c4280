import torch


def entry(a):
    x = a.as_strided((2, 2), (1, 1))
    y = x.diagonal_scatter(torch.ones(2))
    z = y[:, 0].contiguous().as_strided_scatter(torch.ones(1), [1], (1,))
    return y, z.as_strided((2, 2), (1, 1)), x.select_scatter(torch.ones(2), 0, 0), x.slice_scatter(torch.ones(1, 2), 0, 0, 1), \
        x.as_strided_scatter(torch.ones(2), (2,), (1,)), a[:1].expand(2).select_scatter(torch.ones(()), 0, 0)


def drive(compile_, call):
    fast = compile_(entry)
    for size in (4, 5, 6):
        call(fast, torch.arange(size) * 2.0)
