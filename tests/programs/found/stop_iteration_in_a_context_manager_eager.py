import contextlib
import torch

G_LIST = []


@contextlib.contextmanager
def managed(k):
    try:
        yield k
    finally:
        G_LIST.append(k)


def entry(x):
    with managed(5):
        try:
            raise StopIteration
        except KeyError:
            pass
    return x + 1


def drive(compile_, call):
    fn = compile_(entry)
    call(fn, torch.ones(2, 3))
