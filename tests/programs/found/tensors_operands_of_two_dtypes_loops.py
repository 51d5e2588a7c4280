"""Factors in float32 of a sum in float64; a bfloat16 tensor divided by a number that is none of bfloat16's."""
import torch


def entry(a, b):
    return torch.addcmul(a, b, b, value=0.5), torch.addcdiv(a, b, b), torch.xlogy(a, b), torch.div(b.bfloat16(), 0.7, rounding_mode="trunc")


def drive(compile_, call):
    call(compile_(entry), torch.linspace(1, 2, 9).double(), torch.arange(1, 10).mul(0.7))
