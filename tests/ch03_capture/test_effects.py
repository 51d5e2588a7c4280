"""Side effects: what changed is found by comparing, and written as statements."""
import collections
import importlib
import random
import string
import sys
import types

import pytest
import torch

import minicompile
from minicompile.ch03_capture.capture import CaptureOptions, capture
from minicompile.ch03_capture.effects import difference_of_dicts, difference_of_lists
from minicompile.ch03_capture.values import Lazy

pytestmark = pytest.mark.usefixtures("fresh")


def test_difference_of_lists():
    rng = random.Random(3)
    for _ in range(500):
        before = [Lazy(None, None) for _ in range(rng.randrange(6))]
        after = before.copy()
        for _ in range(rng.randrange(4)):
            place = rng.randrange(len(after) + 1)
            after[place:place + rng.randrange(3)] = [object()] * rng.randrange(3)
        start, stop, items = difference_of_lists(before, after)
        written = before.copy()
        written[start:stop] = items
        assert written == after
        if after == before:
            assert start == stop


def test_difference_of_dicts():
    rng = random.Random(4)
    for _ in range(500):
        before = {key: (key, Lazy(None, None)) for key in range(rng.randrange(6))}
        after = before.copy()
        for _ in range(rng.randrange(5)):
            key = rng.randrange(8)
            if after.pop(key, None) is None or rng.random() < 0.5:
                after[key] = key, object()
        gone, written = difference_of_dicts(before, after)
        made = {key: item for key, item in before.items() if key not in gone}
        made.update({pair[0]: pair for pair in written})
        assert list(made.items()) == list(after.items())
        if after == before:
            assert not gone and not written


def test_what_was_read_is_compared_as_what_it_has_become():
    lazy = Lazy(7, None, object())
    assert difference_of_lists([lazy], [lazy.value]) == (1, 1, [])
    assert difference_of_dicts({0: (0, lazy)}, {0: (0, lazy.value)}) == ([], [])


def append(x, c):
    c.append(x)


def append_and_pop(x, c):
    c.append(x)
    c.pop()


def write_one(x, c):
    c[1] = x


def swap(x, c):
    c[0], c[-1] = c[-1], c[0]


def write_what_was_there(x, c):
    c[0] = c[0]


def shorten(x, c):
    del c[1:3]


def lines_of(function, container) -> list:
    body = capture(function, {"x": torch.ones(2), "c": container}, CaptureOptions()).body
    return [line for line in body.splitlines() if "c" in line.split("=")[0].split("(")[0]]


@pytest.mark.parametrize("function, expected", [
    (append, ["c.extend(["]), (append_and_pop, []), (write_one, ["c[1:2] = ["]), (swap, ["c[0:4] = ["]), (write_what_was_there, []),
    (shorten, ["c[1:3] = []"])])
def test_statements(function, expected):
    lines = lines_of(function, ["a", "b", "c", "d"])
    assert [line[:len(start)] for line, start in zip(lines, expected)] == expected and len(lines) == len(expected)


def reinsert(d):
    value = d.pop("a")
    d["z"] = 1
    d["a"] = value


def restore(d):
    d["a"] = d.pop("a")


def drop_new(d):
    d["new"] = 1
    d["b"] += 1
    del d["new"]


def to_front(d):
    d.move_to_end("c", last=False)


def all_new(d):
    d.clear()
    d.update(c=1, a=2)


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
@pytest.mark.parametrize("change", [reinsert, restore, drop_new, to_front, all_new])
def test_order_of_keys(change, kind):
    if change is to_front and kind is dict:
        return

    def f(x, d):
        change(d)
        return x + len(d)

    compiled = minicompile.compile(f, backend="eager", fullgraph=True)
    for start in ("abc", "cab", "abc", "abcd"):
        ours, theirs = (kind(zip(start, range(9))) for _ in range(2))
        assert torch.equal(compiled(torch.ones(2), ours), f(torch.ones(2), theirs))
        assert list(ours.items()) == list(theirs.items())


COUNT = 0


def count():
    global COUNT
    COUNT += 1


@pytest.mark.parametrize("write", [
    "del o.a", "type(o).a = 9; del o.a", "vars(o).pop('a')", "vars(o).clear()", "type(o).b = 4", "del COUNT"])
@pytest.mark.parametrize("look", ["getattr(o, 'a', None)", "hasattr(o, 'b')", "type(o).__dict__.get('b')", "globals().get('COUNT')"])
@pytest.mark.parametrize("body", ["a = 1", "pass", "__slots__ = 'a', 'c'"], ids=["a default", "no default", "slots"])
def test_what_is_behind_an_attribute_or_a_global_that_goes(write, look, body):
    """At the second call there is nothing to delete, which is an error."""
    def answers(compile):
        space = {"COUNT": 5}
        exec(f"class C:\n  {body}\ndef f(o, x):\n  global COUNT\n  {write}\n  return {look}, x + 1", space)
        o, f, found = space["C"](), compile(space["f"]), []
        o.a = 2
        for _ in range(2):
            try:
                found.append(f(o, torch.ones(()))[0])
            except (AttributeError, KeyError, NameError, TypeError) as error:
                found.append(type(error))
        return found

    assert answers(minicompile.compile) == answers(lambda f: f)


def test_a_global_that_was_written_is_read_through_its_module():
    here = sys.modules[__name__]

    def f(x):
        count()
        return x * here.COUNT, here.COUNT

    compiled = minicompile.compile(f, backend="eager", fullgraph=True)
    before = COUNT
    assert [compiled(torch.ones(1))[1] for _ in range(3)] == [before + 1, before + 2, before + 3]
    assert COUNT == before + 3


def test_a_write_to_an_attribute_of_a_python_module(tmp_path, monkeypatch):
    """It is one to a global variable, for the module's own functions too, and in order with what is raised and with breaks."""
    (tmp_path / "written_module.py").write_text("COUNT, LAST = 0, None\ndef shown(): return COUNT, LAST\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("written_module")

    def f(x, kind):
        module.COUNT += 1
        setattr(module, "LAST", x * module.COUNT)
        if kind == "raises":
            raise ValueError(module.COUNT)
        if kind == "breaks":
            print(end="", flush=True)
            module.COUNT += 1
        return module.shown()

    def called(function):
        module.COUNT, found = 0, []
        for kind in ("plain", "raises", "breaks", "plain"):
            try:
                count, last = function(torch.ones(2), kind)
                assert last is module.LAST
            except ValueError as error:
                count = error.args
            found.append((count, module.COUNT, module.LAST.tolist()))
        return found

    assert called(minicompile.compile(f, backend="eager")) == called(f)
    minicompile.compile(f, backend="eager", fullgraph=True)(torch.ones(2), "plain")
    monkeypatch.delitem(sys.modules, "written_module")


def test_a_write_to_a_module_of_the_function_of_one_code_with_two_namespaces():
    here = sys.modules[__name__]
    code = compile("def f(x):\n  here.COUNT = 70\n  return x + 1", "two.py", "exec")
    spaces = [vars(here), {"here": here, "COUNT": 5}]
    functions = []
    for space in spaces:
        exec(code, space, made := {})
        functions.append(made["f"])
    vars(here)["here"], kept = here, COUNT
    functions[1] = types.FunctionType(functions[0].__code__, spaces[1])
    try:
        for function in map(minicompile.compile, functions):
            here.COUNT = 1
            function(torch.ones(2))
            assert here.COUNT == 70 and spaces[1]["COUNT"] == 5
    finally:
        del here.here
        here.COUNT = kept


def test_a_write_to_a_module_of_a_library_ends_the_graph():
    def f(x):
        string.digits = "01"
        return x + len(string.digits)

    kept = string.digits
    try:
        with pytest.raises(minicompile.GraphBreakError, match="setting the attribute digits of string"):
            minicompile.compile(f, backend="eager", fullgraph=True)(torch.ones(2))
        assert torch.equal(minicompile.compile(f)(torch.ones(2)), torch.full((2,), 3.0))
    finally:
        string.digits = kept


def double(x):
    return x * 2


def add_one(x):
    return x + 1


CURRENT = double


def test_a_function_among_the_globals_that_is_read_in_a_loop():
    here = sys.modules[__name__]

    def f(x, replace):
        global CURRENT
        for _ in range(3):
            x = CURRENT(here.double(x))
            if replace:
                CURRENT = add_one if CURRENT is double else double
        return x

    compiled = minicompile.compile(f, backend="eager", fullgraph=True)
    for replace in (False, True, False, True, False):
        before = CURRENT
        expected, after = f(torch.ones(2), replace), CURRENT
        here.CURRENT = before
        assert torch.equal(compiled(torch.ones(2), replace), expected) and CURRENT is after
    here.CURRENT, kept, here.double = double, double, add_one           # by name, and as an attribute of the module
    try:
        assert torch.equal(compiled(torch.ones(2), False), f(torch.ones(2), False))
    finally:
        here.double = kept


def test_a_list_that_is_only_appended_to_may_have_any_length():
    def f(x, log):
        log.append(x)
        log += [x + 1, x + 2]
        return log[-1] * 2

    compiled, log = minicompile.compile(f, backend="eager", fullgraph=True), []
    compiled(torch.ones(1), log)
    with minicompile.set_stance("fail_on_recompile"):
        for _ in range(4):
            assert torch.equal(compiled(torch.ones(1), log), torch.full((1,), 6.0))
    assert len(log) == 15
