import torch

def entry(x, s, t):
    made = set()
    for n in (9, 1, 16, 40):
        made.add(n)
    s.add(33)
    t |= made
    both = [list(s | made), list(made & {16, 9, 1}), list(t - s), list(s ^ t), list(frozenset([38, 50, 13, 30])), {1} & {True}]
    first = made.pop()
    rounds = []
    for n in s:
        rounds.append(n + int(x.amax()))
    return x + 1, both, first, len(made), list(made), rounds, repr(t), list(s), list(t)

def changed(x, s):
    x = x + 1
    try:
        for n in s:
            s.add(n + 100)
    except RuntimeError as error:
        return x, str(error)

def only_read(x, s):
    return x + 1, [n for n in s]

def drive(compile_, call):
    call(compile_(entry), torch.ones(2), {64, 1, 8}, {0, 8, 16, 24, 32})
    call(compile_(entry), torch.ones(2), {8, 1, 64}, {32, 24, 16, 8, 0})
    call(compile_(changed), torch.ones(2), {8, 1, 64})
    read = compile_(only_read)
    call(read, torch.ones(2), {8, 0, 16})
    call(read, torch.ones(2), {16, 0, 8})
