"""Programs in long loops: what makes no new version. Each runs many times on fresh objects, with eager's answers, in a few versions."""
import datetime
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

import minicompile
from tests.recorders import Captures


@pytest.fixture(autouse=True)
def strict(reset, monkeypatch):
    monkeypatch.setattr(minicompile.config, "raise_on_internal_error", True)


def plain(value):
    """What two results are compared as."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return [(k, plain(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [plain(v) for v in value]
    return (type(value), plain(vars(value))) if hasattr(value, "__dict__") and not isinstance(value, type) else (type(value), repr(value))


def count(make, graphs: int, breaks: int = 0, calls: int = 24):
    """make() -> (function, arguments of the i-th call); equal to eager in every call, with so many graphs."""
    (function, arguments), (expected, same) = make(), make()
    compiled = minicompile.compile(function, backend="eager")
    with Captures() as seen:
        for i in range(calls):
            assert plain(compiled(*arguments(i))) == plain(expected(*same(i))), i
    assert (len(seen.graphs), len(seen.breaks)) == (graphs, breaks), [str(b) for b in seen.breaks]


# ------------------------------------------------------------------ constants that are only handed on
@dataclass
class Output:
    loss: torch.Tensor
    name: str
    index: int = 0


def batch(i):
    return {"x": torch.full((3,), float(i)), "name": [f"n{i}", b"%d" % i], "index": i, "when": datetime.datetime.fromtimestamp(i), "size": i / 7}


def returned():
    return lambda b: (b["x"].sum(), b["name"][0], b["name"][1], {"index": b["index"], "size": b["size"]}), lambda i: (batch(i),)


def stored():
    log, seen, holder = [], {}, SimpleNamespace(last="")

    def f(b):
        log.append(b["name"][0])
        seen["when"], holder.last = b["when"], b["index"]
        b["name"][0], b["index"] = "written", b["name"][0]
        return Output(b["x"] * 2, b["name"][1], index=b["index"]), log, seen, holder, b
    return f, lambda i: (batch(i),)


def carried_over_a_break():
    def f(x, name, step):
        y = x * 2
        print(end="")
        return y + 1, [name], step
    return f, lambda i: (torch.ones(2), f"n{i}", i)


@pytest.mark.parametrize("make, graphs, breaks", [(returned, 1, 0), (stored, 1, 0), (carried_over_a_break, 2, 1)])
def test_what_is_only_handed_on(make, graphs, breaks):
    count(make, graphs, breaks)


def looked_at_in_one_way():
    return lambda x, name: (x + 1 if name == "a" else x - 1, name), lambda i: (torch.ones(2), "ab"[i % 2])


def looked_at_later():
    """The second use is behind the first, which only hands it on."""
    def f(x, names):
        kept = list(names)
        return x * len(names[0]), kept
    return f, lambda i: (torch.ones(2), ["a" * (i % 3)])


@pytest.mark.parametrize("make, graphs", [(looked_at_in_one_way, 2), (looked_at_later, 3)])
def test_what_is_looked_at_is_guarded_by_value(make, graphs):
    count(make, graphs)


def test_the_type_of_what_is_handed_on_is_guarded():
    f = minicompile.compile(lambda x, name: (x + 1, name, isinstance(name, str)), backend="eager")
    answers = [f(torch.ones(1), name)[1:] for name in ("a", 2, "b", 3.0, b"c", None)]
    assert answers == [("a", True), (2, False), ("b", True), (3.0, False), (b"c", False), (None, False)]
