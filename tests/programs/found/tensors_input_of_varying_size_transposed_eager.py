import torch


def transposed(a):
    a.t_()
    return a.new_zeros(a.shape[0] * 10 + a.shape[1])


def one_more(a):
    a.unsqueeze_(0)
    return a.new_zeros(a.shape[1])


def drive(compile_, call):
    for function in (transposed, one_more):
        fast = compile_(function)
        for size in (3, 4, 6):
            call(fast, torch.ones(*[size, size + 2][:1 + (function is transposed)]))
