import torch

LOG = []

def entry(x):
    LOG.append(0)
    for row in x.unsqueeze(1):
        last = row
    try:
        x.copy_(last)
    except RuntimeError as error:
        LOG.append(str(error)[:40])
    y = x.view(-1, 3)
    LOG.append(1)
    y.sub_(x.reshape(3, -1).t())
    return y

def drive(compile_, call):
    call(compile_(entry), torch.arange(6.0).reshape(2, 3))
    call(compile_(entry), torch.arange(3.0).expand(2, 3))
    call(compile_(entry), torch.arange(9.0).reshape(3, 3))
