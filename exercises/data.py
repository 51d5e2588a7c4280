"""What leaves a graded process: plain data as JSON. Reading it runs no code, and nothing in it can pretend to be equal."""
from __future__ import annotations

import math

import torch

NOTHING = type("Nothing", (), {"__repr__": lambda self: "nothing"})()
TEXTS = (torch.dtype, torch.device, torch.layout, bytes)


class NotPlain(Exception):
    pass


def encode(value):
    """Plain data as a JSON value. Exact types only: a subclass could lie about its contents."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return {"f": repr(value)}
    if kind in (list, tuple, torch.Size):
        return {"l" if kind is list else "u": [encode(v) for v in value]}
    if kind is dict:
        return {"d": [[encode(k), encode(v)] for k, v in value.items()]}
    if kind in (set, frozenset):
        return {"s": sorted((encode(v) for v in value), key=repr)}
    if kind in (torch.Tensor, torch.nn.Parameter):
        t = value.detach().cpu()
        t = torch.view_as_real(t) if t.is_complex() else t
        flat = t.reshape(-1).tolist() if t.dtype in INTEGERS else list(map(repr, t.reshape(-1).double().tolist()))
        return {"t": [str(value.dtype)[6:], list(value.shape), flat]}
    if kind in TEXTS:
        return {"x": str(value)}
    raise NotPlain(f"a {kind.__name__} came back where plain data was expected")


INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def decode(data):
    """The inverse of `encode`, but for dtypes and devices, which stay texts."""
    if not isinstance(data, dict):
        return data
    (kind, v), = data.items()
    if kind == "f":
        return float(v)
    if kind in "lu":
        items = [decode(x) for x in v]
        return items if kind == "l" else tuple(items)
    if kind == "d":
        return {decode(k): decode(x) for k, x in v}
    if kind == "s":
        return {decode(x) for x in v}
    if kind == "t":
        dtype, shape, flat = v
        dtype = getattr(torch, dtype)
        values = torch.tensor([float(x) if isinstance(x, str) else x for x in flat],
                              dtype=dtype if dtype in INTEGERS else torch.float64)
        if dtype.is_complex:
            return torch.view_as_complex(values.reshape(*shape, 2)).to(dtype)
        return values.reshape(shape).to(dtype)
    return v


def difference(expected, got, tolerance: float = 0.0, path: tuple = ()):
    """The first place, in the order of `expected`, where the two differ: (path, expected there, got there), or None."""
    def differs():
        return path, expected, got

    if isinstance(expected, dict) and isinstance(got, dict):
        for k in [*expected, *(k for k in got if k not in expected)]:
            found = difference(expected.get(k, NOTHING), got.get(k, NOTHING), tolerance, (*path, k))
            if found:
                return found
        return None
    if type(expected) is not type(got):
        return differs()
    if isinstance(expected, (list, tuple)):
        if len(expected) != len(got) and len(expected) + len(got) < 12:
            return differs()
        for i in range(max(len(expected), len(got))):
            e, g = (x[i] if i < len(x) else NOTHING for x in (expected, got))
            found = difference(e, g, tolerance, (*path, i))
            if found:
                return found
        return None
    if isinstance(expected, torch.Tensor):
        if expected.dtype != got.dtype or expected.shape != got.shape:
            return path, f"{expected.dtype} {list(expected.shape)}", f"{got.dtype} {list(got.shape)}"
        same = torch.equal(expected, got) if expected.dtype in INTEGERS or not tolerance and not expected.isnan().any() \
            else torch.allclose(expected, got, rtol=tolerance, atol=tolerance, equal_nan=True)
        return None if same else differs()
    if isinstance(expected, float):
        if expected == got or math.isnan(expected) and math.isnan(got):
            return None
        return None if math.isfinite(expected) and abs(expected - got) <= tolerance * (1 + abs(expected)) else differs()
    return None if expected == got else differs()


def where(path: tuple) -> str:
    """A path as text: the stage or node, then positions."""
    return "".join(f"[{p}]" if isinstance(p, int) else f"{' > ' if i else ''}{p}" for i, p in enumerate(path))


def short(value, limit: int = 300) -> str:
    """A value for a report."""
    if isinstance(value, torch.Tensor):
        data = value.tolist() if value.numel() <= 16 else f"{value.flatten()[:8].tolist()}..."
        return f"{str(value.dtype)[6:]}{list(value.shape)} {data}"
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else (text[:limit].rpartition(" ")[0] or text[:limit]) + " ..."
