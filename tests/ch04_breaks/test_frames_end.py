"""When a compiled call is over, nothing keeps the frames of its callers: exceptions and frames that hold each other would,
until the collector comes, with every tensor in them and every context that is entered there."""
import contextlib
import gc
import warnings
import weakref

import pytest
import torch
import torch.utils.checkpoint

import minicompile

pytestmark = pytest.mark.usefixtures("fresh")


class Token:
    pass


def prints(x): print(end=""); return x * 2
def asks(x): return x * x.sum().item()
def branches(x): return x + 1 if x.sum() > 0 else x - 1
def fails(x): return x.view(7, 11)
def wrong_call(x): return x.argsort(0, 1, 2)
def raises(x): raise ValueError("for the caller")
def catches(x):
    try:
        raise ValueError
    except ValueError as error:
        print(end="")
        return x * len(error.args)
def catches_an_operators(x):
    try:
        x.view(7, 11)
    except RuntimeError:
        return x * 3
def enters(x):
    with contextlib.suppress(ValueError), torch.no_grad():
        print(end="")
        raise ValueError
    return x
def leaves(x): return x, Token(), open
def loops(x):
    for i in range(3):
        x = x + i
        print(end="")
    return x
def generates(x): return sum(a for a in (x, x.sin(), next(iter([x])))) + max([1], key=lambda a: print(end="") or a)
def sorts(x): return x.nonzero().shape[0] * x
def warns(x): warnings.warn("once more"); return x + 1
def subclass(x): return torch.nn.Parameter(x) * 2
def backward(x):
    x.detach().clone().requires_grad_().sin().sum().backward()
    return x.cos()
def overwrites(x):
    y = x.exp()
    y.detach().zero_()
    return y
def converts(x): return x * int("many")
def checkpoint(x): return torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False)


PROGRAMS = [prints, asks, branches, fails, wrong_call, raises, catches, catches_an_operators, enters, leaves, loops, generates, sorts,
            warns, subclass, backward, overwrites, converts, checkpoint]


def caller(f, x):
    token = Token()
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = f(x)
        torch.autograd.grad(result.sum(), x)
    return weakref.ref(token)


@pytest.mark.parametrize("options", [dict(backend="eager"), dict(), dict(fullgraph=True), dict(dynamic=True)], ids=str)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_callers_frames_end(program, options):
    minicompile.compile(lambda x: x.clamp(0) + 1, **options)(torch.ones(2))          # what is imported once
    caller(program, torch.randn(3, requires_grad=True))
    compiled = minicompile.compile(program, **options)
    gc.collect()
    gc.disable()
    try:
        for size in (3, 3, 4, 0):
            assert caller(program, torch.randn(size, requires_grad=True))() is None, "eager keeps it, too"
            assert caller(compiled, torch.randn(size, requires_grad=True))() is None
    finally:
        gc.enable()
