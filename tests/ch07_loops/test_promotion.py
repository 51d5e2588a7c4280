"""Operators of two tensors with two dtypes: what becomes of each operand before anything is computed is as in eager."""
import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.common_methods_invocations import binary_ufuncs

import minicompile

DTYPES = [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32]
OPERATORS = {info.name: info.op for info in reversed(binary_ufuncs) if not re.search("shift|jiterator|_refs", info.name)}
TOLERANCE = {torch.bfloat16: dict(rtol=1.6e-2, atol=1e-2)}


def operand(dtype, dims):
    size = (9,) if dims else ()
    if dtype.is_floating_point:
        return (torch.randn(size) * 5).to(dtype)
    low, high = {torch.bool: (0, 2), torch.uint8: (0, 256), torch.int64: (-3000, 3000)}[dtype]
    return torch.randint(low, high, size).to(dtype)


def accepted(operator, a, b) -> bool:
    try:
        return isinstance(operator(a, b), torch.Tensor)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dims", [(1, 1), (1, 0), (0, 1)], ids=["two vectors", "a vector and a scalar", "a scalar and a vector"])
def test_two_dtypes(dims, fresh):
    torch.manual_seed(0)
    for one, other in itertools.product(DTYPES, DTYPES):
        a, b = operand(one, dims[0]), operand(other, dims[1])
        names = [name for name, operator in OPERATORS.items() if accepted(operator, a, b)]

        def f(a, b):
            return [OPERATORS[name](a, b) for name in names]
        minicompile.reset()
        for name, found, expected in zip(names, minicompile.compile(f, backend="loops", fullgraph=True)(a, b), f(a, b)):
            torch.testing.assert_close(found, expected, equal_nan=True, **TOLERANCE.get(expected.dtype, {}),
                                       msg=lambda m: f"{name} of {one} and {other}: {m}")


SEVERAL = {"block_diag": lambda a, b: torch.block_diag(a, a, b), "huber_loss": lambda a, b: F.huber_loss(a, b, reduction="none"),
           "ldexp": torch.ldexp, "addcmul": lambda a, b: torch.addcmul(a, b, b), "hstack": lambda a, b: torch.hstack([a, b]),
           "where": lambda a, b: torch.where(a > 1, a, b), "lerp": lambda a, b: torch.lerp(a, a, b)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SEVERAL)
def test_what_is_computed_from_the_result_of_two_dtypes(name, fresh):
    """A kernel that takes the result for one of another dtype reads beyond its memory."""
    for (one, other), dims in itertools.product(itertools.product(DTYPES, DTYPES), [(1, 1), (1, 0), (0, 1)]):
        a, b = operand(one, dims[0]).clamp(max=3), operand(other, dims[1]).clamp(max=3)
        if not accepted(SEVERAL[name], a, b):
            continue

        def f(a, b):
            return SEVERAL[name](a, b) * 2
        minicompile.reset()
        torch.testing.assert_close(minicompile.compile(f, backend="loops")(a, b), f(a, b), equal_nan=True, rtol=1.6e-2, atol=1e-2,
                                   msg=lambda m: f"{one} and {other}: {m}")
