import torch
import torch.nn.functional as F


def entry(x):
    return F.hardsigmoid(x) * 1e3


def drive(compile_, call):
    call(compile_(entry), torch.linspace(-4, 4, 9, dtype=torch.float64).requires_grad_())
