"""Half-precision values at and beside the number that an operator compares them with: the decision is eager's, whether its kernel rounds
the number to the half type or not."""
import pytest
import torch
import torch.nn.functional as F

import minicompile

NUMBERS = (0.1, 0.3, 0.7, 1.1)
COMPARISONS = {name: getattr(torch, name) for name in ("gt", "ge", "lt", "le", "eq", "ne")}
BY_NUMBER = {                       # of a tensor and a number
    **COMPARISONS, "threshold": lambda x, s: F.threshold(x, s, 20.0), "hardshrink": F.hardshrink, "softshrink": F.softshrink,
    "hardtanh": lambda x, s: F.hardtanh(x, -s, s), "clamp": lambda x, s: x.clamp(-s, s), "clamp_min": torch.clamp_min,
    "logit": lambda x, s: x.logit(min(s, 0.4)), "fmod": torch.fmod, "remainder": torch.remainder,
    "add": torch.add, "rsub": torch.rsub, "full": lambda x, s: x - torch.full_like(x, s), "floor": lambda x, s: x.detach() // s,
    "isclose": lambda x, s: torch.isclose(x, torch.full_like(x, s), 0, 0), "foreach": lambda x, s: torch._foreach_clamp_min([x], s)[0]}
BY_TENSOR = {                       # of a tensor and a number in a 0-d tensor
    **COMPARISONS, "maximum": torch.maximum, "minimum": torch.minimum, "fmax": torch.fmax, "add": torch.add, "sub": torch.sub,
    "rsub": lambda x, s: s - x, "mul": torch.mul, "div": torch.div, "remainder": torch.remainder, "fmod": torch.fmod,
    "clamp": lambda x, s: x.clamp(s, s + 0.5), "where": lambda x, s: torch.where(x > 0.5, x, s) > s}
PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def beside(numbers, dtype, device) -> torch.Tensor:
    """Multiples of the numbers, and the neighbours of these."""
    at = torch.tensor([s * k for s in (*numbers, 1 - 0.4) for k in (1, -1, 2, 0.5)], device=device).to(dtype)
    zero = torch.zeros_like(at)
    return torch.cat([at, torch.nextafter(at, zero), torch.nextafter(at, zero + 9), zero])


def decisions(f, x) -> list[torch.Tensor]:
    """The results that are bools; of others, and of gradients, where they are negative, zero, one half, one and NaN."""
    x = x.clone().requires_grad_()
    found = []
    for y in f(x):
        found.append(y)
        if y.requires_grad:
            found += torch.autograd.grad(y.sum(), [x], retain_graph=True)
    return [t if t.dtype is torch.bool else torch.stack([t < 0, t == 0, t == 0.5, t == 1, t.isnan()]) for t in found]


def same(f, x, backend):
    for i, (got, want) in enumerate(zip(decisions(minicompile.compile(f, backend=backend), x), decisions(f, x), strict=True)):
        wrong = (got != want).reshape(-1, len(x)).any(0)
        assert not wrong.any(), f"result {i} at {x[wrong].tolist()}"


def backends(device) -> list[str]:
    return ["loops", "cpp"] if device == "cpu" else ["loops", "triton"]


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", BY_NUMBER)
def test_numbers(name, dtype, device, fresh):
    for backend in backends(device):
        same(lambda x: [BY_NUMBER[name](x, s) for s in NUMBERS], beside(NUMBERS, dtype, device), backend)


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", BY_TENSOR)
def test_tensors_of_one_number(name, dtype, device, fresh):
    """Made in the graph, and inputs of it, which are a number in memory; on a GPU, on either device."""
    x, f = beside(NUMBERS, dtype, device), BY_TENSOR[name]
    made = [(s, wide, place) for s, wide in zip(NUMBERS, (torch.float32, torch.float64) * 2)
            for place in ({"cpu", device} if name not in ("clamp", "where") else {device})]
    given = [torch.tensor(s, dtype=wide, device=place) for s, wide, place in made]
    for backend in backends(device):
        same(lambda x: [f(x, torch.tensor(s, dtype=wide, device=place)) for s, wide, place in made] + [f(x, s) for s in given], x, backend)
