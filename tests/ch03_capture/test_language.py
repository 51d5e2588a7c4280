"""Every construct of the language: a table of programs, each compared with itself uncompiled.

Compared are the value or the exception, what was printed and warned, and what happened to the arguments, over several calls. A program that
is not marked `breaks` must also be one graph."""
import collections
import contextlib
import enum
import io
import types
import warnings

import language_corners  # noqa: F401  (registers its programs)
import language_functions  # noqa: F401  (likewise)
import numpy as np
import pytest
import torch
from language_classes import PROGRAMS
from recorders import Recorder

import minicompile
from minicompile.ch03_capture import capture
from minicompile.errors import Unsupported

pytestmark = pytest.mark.usefixtures("fresh")


def state(value, seen=None):
    """A plain picture of an object graph, in which two programs' results can be compared with ==."""
    seen = {} if seen is None else seen
    kind = type(value)
    if value is None or kind in (bool, int, str, bytes, complex, range, torch.dtype, torch.device, torch.layout) or isinstance(
            value, (type, enum.Enum, types.BuiltinFunctionType, types.ModuleType)):
        return kind.__name__, value
    if kind is float:
        return "float", repr(value)
    if id(value) in seen:
        return "again", seen[id(value)]
    if kind not in (tuple, frozenset):           # of equal constant tuples Python makes one or many as it likes
        seen[id(value)] = len(seen)
    keep.append(value)
    if isinstance(value, torch.Tensor):
        return kind.__name__, value.requires_grad, value.dtype, value.detach().tolist()
    if isinstance(value, (np.ndarray, np.generic)):
        return kind.__name__, str(value.dtype), value.tolist()
    if isinstance(value, (types.FunctionType, types.MethodType)):
        return "function", value.__name__
    result = [kind.__name__]
    if isinstance(value, dict):
        result += [(state(k, seen), state(v, seen)) for k,
                   v in (value.items() if isinstance(value, collections.OrderedDict) else dict.items(value))]
        result.append(state(getattr(value, "default_factory", None), seen))
    elif isinstance(value, (set, frozenset)):
        result += sorted(repr(state(v, seen)) for v in value)
    elif isinstance(value, (list, tuple)) or kind.__name__ in ITERABLE:
        result += [state(v, seen) for v in value]
        result.append(getattr(value, "maxlen", None))
    elif isinstance(value, BaseException):
        result += [state(value.args, seen), str(value)]
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and not name.startswith("_") and hasattr(value, name):
                result.append((name, state(getattr(value, name), seen)))
    result += [(k, state(v, seen)) for k, v in getattr(value, "__dict__", {}).items()]
    return result


keep = []
ITERABLE = ("deque", "zip", "map", "filter", "enumerate", "reversed", "list_iterator", "list_reverseiterator", "generator", "dict_keys",
            "dict_values", "dict_items")


def outcome(function, x, args):
    """What one call does, in a form that can be compared."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = "returns", state(function(x, *args))
        except Exception as error:
            result = "raises", type(error), str(error), repr(error.__cause__)
    return result, printed.getvalue(), [str(w.message) for w in caught if "minicompile" not in str(w.message)], state(args)


@pytest.mark.parametrize("function, breaks, make", PROGRAMS, ids=[p[0].__name__ for p in PROGRAMS])
def test_program(function, breaks, make, monkeypatch):
    backend, inputs = Recorder(), [torch.randn(2, 3) for _ in range(3)]
    restore = set_aside(function)
    expected, args = [], make()
    for x in inputs:
        expected.append(outcome(function, x, args))
    restore()
    args = make()
    raising = any(e[0][0] == "raises" for e in expected)
    compiled = minicompile.compile(function, backend=backend, fullgraph=not breaks and not raising)
    refused = watch(monkeypatch, function)
    for x, wanted in zip(inputs, expected):
        assert outcome(compiled, x, args) == wanted
    restore()
    assert breaks or raising or not refused


def watch(monkeypatch, function) -> list:
    """The reasons for which the frame of `function` could not be captured whole, as they come."""
    refused, real = [], capture.capture

    def watched(frame, *args, **kwargs):
        try:
            return real(frame, *args, **kwargs)
        except Unsupported as error:
            if frame.__code__ is function.__code__:
                refused.append(error.reason)
            raise
    monkeypatch.setattr(capture, "capture", watched)
    return refused


class Log:
    def __init__(self):
        self.lines, self.last = [], None


def test_growing_list_does_not_recompile():
    def step(x, log):
        log.lines.append(x.sum())
        log.lines += ["next"]
        log.last = log.lines[-1]
        return x * 2
    backend, log = Recorder(), Log()
    compiled = minicompile.compile(step, backend=backend, fullgraph=True)
    for i in range(20):
        compiled(torch.ones(2) * i, log)
    assert len(backend.graphs) == 1 and len(log.lines) == 40 and log.lines[38] == 38 and log.last == "next"


def test_list_whose_length_matters_recompiles():
    def step(x, items):
        items.append(x)
        return x * len(items)
    compiled, items = minicompile.compile(step, backend="eager"), []
    for i in range(4):
        assert compiled(torch.ones(()), items) == i + 1
    assert len(items) == 4


def set_aside(function):
    """A function that restores the globals and the class attributes which `function` may write."""
    saved = {k: v for k, v in function.__globals__.items() if type(v) in (int, torch.Tensor)}
    counted = function.__globals__.get("Counted")

    def restore():
        function.__globals__.update(saved)
        if counted is not None:
            counted.n = 0
        defaults = function.__globals__.get("counting")
        if defaults is not None:
            defaults.__defaults__[0]["n"] = 0
    return restore
