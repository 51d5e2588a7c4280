import torch
DEVICE = 'cpu'
leaves = 1

def inputs(seed, B):
    generator = torch.Generator().manual_seed(seed)

    def ints(low, high, *size):
        return torch.randint(low, high, size, generator=generator).to(DEVICE)
    a = ints(0, 2, 4).bool()
    return (a,)

def entry(a):
    v0 = a
    v1 = v0.unfold(-1, 2, 1).flip(1)
    v5 = v1.to()
    v8 = v5.float().mT.unfold(-1, 2, 1).movedim(1, 0)
    v8.transpose(0, -3)[0].sub_(-1.5)
    v13 = v8
    v15 = torch.var_mean(v13, 1)[1]
    v21 = v15.square()
    return v21

def drive(compile_, call):
    fast = compile_(entry)
    for seed, B in [(0, 4), (1, 4)]:
        call(fast, *inputs(seed, B))