"""An index that is data but the same for all elements; truth values of which one is the same for all elements."""
import torch
import torch.nn.functional as F


def add_there(x):
    first = x.softmax(-1).argmax(keepdim=True)
    return first.index_add(0, torch.tensor(0), first)


def put_there(x):
    y = x[:1].unsqueeze(0)
    return torch.zeros_like(y).scatter(1, (torch.tensor([0]) % 1).view(1, -1).expand_as(y), 3)


def largest(x):
    return F.relu6(x).tile(2).max().contiguous()


def either(x):
    y = x.sum()
    return torch.logical_xor(y.relu(), y.cummin(-1).indices)


def drive(compile_, call):
    for function in (add_there, put_there, largest, either):
        call(compile_(function), torch.linspace(-1, 2, 5).requires_grad_())
