import torch


def entry(a):
    return a.fill_(0.1).norm(p=1, dim=-1) % 0.5


def drive(compile_, call):
    call(compile_(entry), torch.zeros(136))
