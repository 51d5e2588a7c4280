import torch
W = (torch.eye(3) * 2).requires_grad_()

class Half:
    def __int__(self):
        return 0.5
    def __len__(self):
        return True
    def __bool__(self):
        return 1
    def __str__(self):
        return 1

def entry(a0, h):
    found = []
    for f in (int, len, bool, str):
        try:
            found.append(f(h))
        except TypeError as error:
            found.append(str(error))
    return a0 + 1, found

def drive(compile_, call):
    fn = compile_(entry)
    call(fn, torch.zeros(2, 3), Half())
