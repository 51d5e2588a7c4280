import torch

def entry(x):
    return torch.empty(3).isnan(), torch.empty_like(x), x.new_empty(2, 3, dtype=torch.int16) + 1, torch.empty(2, dtype=torch.bool)

def drive(compile_, call):
    fast = compile_(entry)
    torch.use_deterministic_algorithms(True)
    try:
        call(fast, torch.ones(2, 2))
        call(fast, torch.ones(3, 2).T)
    finally:
        torch.use_deterministic_algorithms(False)
