import torch
g_count = 1
def entry(x, mask):
    global g_count
    y = torch.zeros(2, 3)
    g_count += 1
    y[mask > 1] = 0
    return y + x
def drive(compile_, call):
    fn = compile_(entry)
    call(fn, torch.ones(2, 3), torch.ones(2, 3))
    call(fn, torch.ones(2, 3), torch.ones(1, 3))
