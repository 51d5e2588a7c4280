"""What the trace read may change between calls: the second call must see it. Each case is (function, state, changes)."""
import collections
import contextlib
import dataclasses
import enum
import fractions
import functools
import numbers
import operator
import types
import typing
import unittest.mock

import numpy
import pytest
import torch
import torch.nn.functional as F
from recorders import Recorder, same

import minicompile
from minicompile.ch02_guards.guards import same_constant
from minicompile.ch03_capture.library import items as items_module

SCALE, LIST, TABLE = 2, [1, 2], {"k": 1, "f": torch.relu}


def helper(x):
    return x + 1


@dataclasses.dataclass
class Config:
    n: int = 1
    name: str = "a"
    extra: object = None


class Thing:
    factor = 2

    def __init__(self):
        self.config, self.items, self.table, self.t = Config(), [1, Config()], {"a": 1}, torch.ones(3)
        self.part, self.fn, self.pair, self.tags = functools.partial(torch.add, other=1), torch.sin, (1, 2), {1, 2}

    @property
    def prop(self):
        return self.config.n * 10

    def method(self, x):
        return x * self.factor

    @staticmethod
    def static(x):
        return x + 1


def reads_globals(s, x):
    return helper(x * SCALE) + len(LIST) + LIST[0] + TABLE["k"] + TABLE["f"](x) + ("new" in TABLE)


def reads_object(s, x):
    y = s.method(x) + s.config.n + s.prop + s.factor + s.static(x)
    if s.config.name == "a":
        y = y * 2
    if s.config.extra is not None:
        y = y + s.config.extra
    for i in s.items:
        y = y + (i if isinstance(i, int) else i.n)
    for k, v in s.table.items():
        y = y + len(k) * v
    if hasattr(s, "late"):
        y = y + 100
    return s.part(s.fn(y)) + s.t + s.pair[0] + len(s.pair) + len(s.tags) + getattr(s, "maybe", 0)


def reads_closure(s, x):
    return s.closure(x)


def reads_mode(s, x):
    y = x * 2
    return y + (1 if torch.is_grad_enabled() else 2) + torch.ones(1) + (x @ x).float() + (x.requires_grad * 1)


def reads_arguments(s, x):
    return s.call(x)


def make_closure():
    n, f = 1, helper

    def closure(x, k=[1]):
        return f(x) * n + k[0]

    def change(new_n=None, new_f=None):
        nonlocal n, f
        n, f = new_n or n, new_f or f
    return closure, change


def set_global(name, value):
    return lambda s: globals().__setitem__(name, value)


def set_attr(path, value):
    def change(s):
        owner = functools.reduce(getattr, path.split(".")[:-1], s)
        setattr(owner, path.split(".")[-1], value)
    return change


GLOBAL_CHANGES = [set_global("SCALE", 3), set_global("SCALE", 3.0), set_global("SCALE", True), lambda s: LIST.append(4),
                  lambda s: LIST.__setitem__(0, 7), lambda s: TABLE.update(k=5), lambda s: TABLE.update(f=torch.tanh),
                  lambda s: TABLE.update(new=1), set_global("helper", lambda x: x - 1),
                  set_global("len", lambda v: 100), set_global("TABLE", {"k": 0, "f": torch.cos})]
OBJECT_CHANGES = [
    set_attr("config.n", 5), set_attr("config.n", 5.5), set_attr("config.name", "b"), set_attr("config.extra", 3),
    set_attr("config.extra", torch.ones(3)), lambda s: s.items.append(4), lambda s: s.items.__setitem__(0, 9),
    lambda s: setattr(s.items[1], "n", 8), lambda s: s.table.update(bb=2), lambda s: s.table.pop("a"), set_attr("late", 1),
    set_attr("maybe", 3), set_attr("part", functools.partial(torch.add, other=2)), set_attr("fn", torch.cos),
    set_attr("t", torch.zeros(3)), set_attr("t", torch.zeros(1)), set_attr("t", torch.zeros(3, dtype=torch.float64)),
    set_attr("pair", (1, 2, 3)), set_attr("pair", [4, 5]), lambda s: s.tags.add(9), set_attr("config", Config(3)),
    set_attr("method", lambda x: x - 5), set_attr("static", lambda x: x), lambda s: setattr(Thing, "factor", 7),
    set_attr("factor", 9), lambda s: setattr(s, "__class__", type("Sub", (Thing,), {"method": lambda self, x: x / 3}))]
CLOSURE_CHANGES = [lambda s: s.change(2), lambda s: s.change(None, lambda x: x * 5), lambda s: s.closure.__defaults__[0].append(2),
                   lambda s: s.closure.__defaults__[0].__setitem__(0, 9), set_attr("closure", lambda x: x + 50)]
CASES = [("globals", reads_globals, lambda: None, GLOBAL_CHANGES), ("object", reads_object, Thing, OBJECT_CHANGES),
         ("closure", reads_closure, lambda: types.SimpleNamespace(**dict(zip(("closure", "change"), make_closure()))),
          CLOSURE_CHANGES)]


@pytest.fixture(autouse=True)
def globals_restored(fresh):
    kept = {k: (v.copy() if isinstance(v, (list, dict)) else v) for k, v in globals().items() if k in ("SCALE", "LIST", "TABLE")}
    original, factor = helper, Thing.factor
    yield
    globals().update(kept, helper=original)
    globals().pop("len", None)
    Thing.factor = factor


@pytest.mark.parametrize("name, function, state, changes", CASES, ids=[c[0] for c in CASES])
def test_each_change_is_seen(name, function, state, changes):
    x = torch.randn(3)
    for n, change in enumerate(changes):
        minicompile.reset()
        s = state()
        compiled = minicompile.compile(function, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(s, x), function(s, x))
        change(s)
        expected = function(s, x)
        torch.testing.assert_close(compiled(s, x), expected, msg=lambda m: f"{name} change {n}: {m}")


def test_modes_and_metadata():
    compiled = minicompile.compile(reads_mode, backend="eager", fullgraph=True)
    x = torch.randn(3, 3)
    calls = [(contextlib.nullcontext(), x), (torch.no_grad(), x), (torch.autocast("cpu", torch.bfloat16), x),
             (contextlib.nullcontext(), x.double()), (contextlib.nullcontext(), x.clone().requires_grad_()),
             (contextlib.nullcontext(), x.t()), (contextlib.nullcontext(), x[:, :1].expand(3, 3))]
    for context, value in calls * 2:
        with context:
            a, b = compiled(None, value), reads_mode(None, value)
        torch.testing.assert_close(a, b)
        assert a.requires_grad == b.requires_grad
    torch.set_default_dtype(torch.float64)
    try:
        torch.testing.assert_close(compiled(None, x), reads_mode(None, x))
    finally:
        torch.set_default_dtype(torch.float32)


def test_argument_kinds(monkeypatch):
    monkeypatch.setattr(minicompile.config, "recompile_limit", 16)

    def f(a, *args, k=1, **kwargs):
        r = a * k + len(args) + sum(v for v in kwargs.values())
        for key in kwargs:
            r = r * len(key)
        return r if not args or args[0] is None else r + args[0]
    compiled = minicompile.compile(f, backend="eager", fullgraph=True)
    x = torch.ones(2)
    for args, kwargs in [((x,), {}), ((x, 1), {}), ((x, None), {}), ((x, x), {}), ((x, 1.0), {}), ((x,), {"k": 2}), ((x,), {"k": True}),
                         ((x,), {"aa": 1, "b": 2}), ((x,), {"b": 2, "aa": 1}), ((x,), {"aa": 1}), ((3,), {}), ((2.5, x), {})]:
        a, b = compiled(*args, **kwargs), f(*args, **kwargs)
        assert type(a) is type(b) and (a == b if not isinstance(a, torch.Tensor) else torch.equal(a, b) and a.dtype == b.dtype)


def test_identity_of_arguments():
    def f(a, b):
        a.append(1)
        return a is b, len(b), len(a)
    compiled = minicompile.compile(lambda x, a, b: (x + 1, f(a, b))[1], backend="eager", fullgraph=True)
    x, one = torch.ones(1), [0]
    assert compiled(x, [0], [0]) == (False, 1, 2)
    assert compiled(x, one, one) == (True, 2, 2)
    assert compiled(x, [0], [0]) == (False, 1, 2)


def test_arguments_of_an_exception():
    def f(x, error):
        try:
            raise error
        except ValueError as e:
            return x + e.args[0]
    compiled = minicompile.compile(f, backend="eager")
    for n in (1, 2):
        assert torch.equal(compiled(torch.ones(1), ValueError(n)), torch.ones(1) + n)


# ---- Parts of classes, reached through objects that the trace makes ------------------------------------------------------

class Scale:
    """A data descriptor with a state."""

    def __init__(self):
        self.n, self.seen = 2, []

    def __set_name__(self, owner, name):
        self.name = "_" + name

    def __get__(self, obj, owner=None):
        return self if obj is None else obj.__dict__.get(self.name, 1) * self.n

    def __set__(self, obj, value):
        obj.__dict__[self.name] = value
        self.seen.append(value)


def class_parts():
    class Base:
        rows, names, weight = [1, 2], {"a": 1}, torch.ones(3)
        scale, inner = Scale(), types.SimpleNamespace(k=1)

        @classmethod
        def total(cls):
            return sum(cls.rows)

        def __iter__(self):
            return iter(self.rows)

        def times(self, x):
            return x * self.rows[0]

    class Side(Base):
        pass

    class Made(Side):
        made = []

        def __init__(self, n):
            self.made.append(n)
            self.scale = n

        def times(self, x):
            return super().times(x) + 1

    class Kind(enum.Enum):
        A = {"k": 1}

    def f(x):
        one = Made(3)
        y = one.times(x) + one.total() + sum(one) + one.names["a"] + one.weight + one.scale + Made.scale.n + one.inner.k + Kind.A.value["k"]
        return y, len(Made.made), len(Base.scale.seen)

    def replace_times():
        Base.times = lambda self, x: x - 7

    def shadow_times():
        Side.times = lambda self, x: x - 9
    return f, [lambda: Base.rows.append(5), lambda: Base.names.update(a=4), lambda: Base.weight.mul_(3), lambda: setattr(Base.scale, "n",
                                                                                                                         5),
               lambda: setattr(Base.inner, "k", 6), lambda: Kind.A.value.update(k=3), replace_times, shadow_times,
               lambda: delattr(Side, "times"),
               lambda: setattr(Base, "weight", torch.zeros(3)), lambda: setattr(Side, "names", {"a": 8}), lambda: Base.scale.seen.clear()]


def test_parts_of_classes():
    (f, changes), (g, same_changes) = class_parts(), class_parts()
    compiled, x = minicompile.compile(f, backend="eager", fullgraph=True), torch.ones(3)
    with minicompile.config.patch(recompile_limit=32):
        for change, same_change in zip([lambda: None, *changes], [lambda: None, *same_changes]):
            change(), same_change()
            for _ in range(2):
                assert [*map(str, compiled(x))] == [*map(str, g(x))]


def test_python_module_without_a_file():
    module = types.ModuleType("made_by_hand")
    exec("ROWS = [1]\ndef g(x): return x * sum(ROWS)", vars(module))
    compiled, x = minicompile.compile(lambda x: module.g(x), backend="eager", fullgraph=True), torch.ones(3)
    for change in ("", "ROWS.append(4)", "ROWS = [9]", "def g(x): return x - 1"):
        exec(change, vars(module))
        assert torch.equal(compiled(x), module.g(x))


def test_attributes_beside_the_fields_of_a_named_tuple():
    class Point(collections.namedtuple("Point", ("x", "y"))):
        def area(self):
            return self.x * self.y
    programs = [lambda p, t: t * getattr(p, "noise", 2.0) + p.x, lambda p, t: t * (p.noise if hasattr(p, "noise") else 3.0),
                lambda p, t: t * p.area() + len(p) + p[1]]
    for program in programs:
        compiled, p, t = minicompile.compile(program, backend="eager"), Point(2.0, 3.0), torch.ones(2)
        for noise in (None, None, 5.0, 5.0, 7.0):
            if noise is not None:
                p.noise = noise
            assert torch.equal(compiled(p, t), program(p, t))
        assert torch.equal(compiled(Point(4.0, 3.0), t), program(Point(4.0, 3.0), t))


def test_attributes_of_an_ordered_dict():
    def program(d, t):
        return t * getattr(d, "noise", 2.0) + len(d)
    compiled, d, t = minicompile.compile(program, backend="eager"), collections.OrderedDict(a=1), torch.ones(2)
    for noise in (None, None, 5.0, 5.0, 7.0):
        if noise is not None:
            d.noise = noise
        assert torch.equal(compiled(d, t), program(d, t))


def test_attributes_that_are_hung_on_a_function_later():
    def program(thing, t):
        return t * getattr(thing.act, "noise", 2.0)

    def act(x):
        return x
    thing, t = types.SimpleNamespace(act=act), torch.ones(2)
    compiled = minicompile.compile(program, backend="eager")
    for noise in (None, None, 5.0, 7.0, None):
        if noise is not None:
            act.noise = noise
        elif hasattr(act, "noise"):
            del act.noise
        assert torch.equal(compiled(thing, t), program(thing, t))


def test_a_cached_property_is_computed_once():
    class Table:
        @functools.cached_property
        def weight(self):
            computed.append(1)
            return torch.full((2,), 2.0)
    computed, t = [], torch.ones(2)
    compiled, table = minicompile.compile(lambda table, t: table.weight * t, backend="eager", fullgraph=True), Table()
    for _ in range(3):
        assert torch.equal(compiled(table, t), 2 * t)
    assert len(computed) == 1
    table.weight = torch.zeros(2)
    assert torch.equal(compiled(table, t), 0 * t)
    del table.weight
    for known in (table, Table(), table):
        assert torch.equal(compiled(known, t), 2 * t)
    assert len(computed) == 3


class Key:
    pass


def value_of(x, o, d):
    return x * d[o]


def presence(x, o, d):
    return x * 2 if o in d else x * 3


def value_or_default(x, o, d):
    return x * d.get(o, 7.0)


def in_a_copy(x, o, d):
    d = {**d, o: 9.0}
    return x * len(d), x * sum(d.values())


def written(x, o, d):
    d[o] = x.sum()
    return x + sum(d.values())


def met_among_the_keys(x, o, d):
    return [x * v for k, v in d.items() if k is o]


def part_of_a_key(x, o, d):
    return x * {(k, 1): v for k, v in d.items()}.get((o, 1), 7.0)


def part_of_a_known_key(x, o, d, pairs={}):
    for k, v in d.items():
        pairs.setdefault((k, 1), v)
    return x * pairs.get((o, 1), 7.0)


@pytest.mark.parametrize("function", [value_of, presence, value_or_default, in_a_copy, written, met_among_the_keys, part_of_a_key,
                                      part_of_a_known_key])
@pytest.mark.parametrize("make", [Key, lambda: torch.ones(1), lambda: torch.nn.Linear(1, 1), lambda: lambda: 1],
                         ids=["object", "tensor", "module", "function"])
def test_a_key_is_one_object_and_the_next_another(function, make):
    """What was found at an object, or not found, says nothing about the next object."""
    objects, x = [make() for _ in range(4)], torch.ones(2)
    table, same = ({o: float(n) for n, o in enumerate(objects[:2])} for _ in range(2))
    compiled, eager = minicompile.compile(function, backend="eager"), types.FunctionType(
        function.__code__.replace(), globals(), argdefs=({},) if function.__defaults__ else None)
    for o in (objects[0], objects[1], objects[2], objects[0], objects[3], objects[2]):
        answers = []
        for f, d in ((compiled, table), (eager, same)):
            try:
                answers.append(f(x, o, d))
            except KeyError as error:
                answers.append(type(error))
        assert str(answers[0]) == str(answers[1]) and list(table) == list(same)


@pytest.mark.parametrize("make", [Key, lambda: torch.ones(1), lambda: torch.nn.Linear(1, 1)], ids=["object", "tensor", "module"])
def test_dictionaries_that_are_equal_for_some_keys(make):
    a, b, c = make(), make(), make()

    def f(x, d, p, q):
        return x * (2 if d == {p: 2, q: 3} else 3)
    compiled = minicompile.compile(f, backend="eager")
    for d, p, q in (({a: 2, b: 3}, a, b), ({a: 2, b: 3}, b, a), ({a: 2, b: 3}, a, c), ({b: 3, a: 2}, a, b), ({a: 2}, a, a), ({a: 3}, a, a)):
        assert compiled(torch.ones(1), d, p, q) == f(torch.ones(1), d, p, q)


def popped(d, a, b):
    return d.pop(a, 3.0), len(d)


def written_again(d, a, b):
    return d.pop(a, 3.0), d.__setitem__(a, 5.0)


@pytest.mark.parametrize("make", [Key, lambda: torch.ones(1), lambda: torch.nn.Linear(1, 1), lambda: lambda: 1, lambda: Equal(1)],
                         ids=["object", "tensor", "module", "function", "equal"])
@pytest.mark.parametrize("wrap", [lambda key: key, lambda key: (key, 1), lambda key: ((key,), 1)], ids=["alone", "in-tuple", "in-tuples"])
@pytest.mark.parametrize("read", [
    lambda d, a, b: len(d.keys() & {a}), lambda d, a, b: len(d.keys() - {a}), lambda d, a, b: d.keys() == {a, b},
    lambda d, a, b: len({*d} - {a}), lambda d, a, b: (a, 1) in {(key, 1) for key in d}, lambda d, a, b: d.keys().isdisjoint([a]),
    lambda d, a, b: {frozenset(d): 1}.get(frozenset([a])), popped, lambda d, a, b: (d.popitem(), len(d))[1], written_again,
    lambda d, a, b: d.clear(), lambda d, a, b: (d.get(a, 1), d.__setitem__(b, 4.0), d.get(a, 0)),
    lambda d, a, b: (d.get((a, b)), d.get(a))])
def test_keys_of_other_calls(read, wrap, make):
    def f(x, d, a, b):
        return x + 1, read(d, a, b)
    a, b = wrap(make()), wrap(make())
    compiled = minicompile.compile(f, backend="eager")
    for keys, p, q in (([a], a, b), ([a], a, a), ([a], b, a), ([b], a, b), ([b], b, b), ([b, a], a, b), ([(a, b)], a, b), ([a, b], a, b)):
        tables = [{key: float(i) for i, key in enumerate(keys)} for _ in range(2)]
        assert compiled(torch.ones(1), tables[0], p, q)[1] == f(torch.ones(1), tables[1], p, q)[1]
        assert [*tables[0].items()] == [*tables[1].items()]


def test_views_and_methods_are_compared_as_in_eager():
    def views(x, v, w):
        return x + 1, v == w

    def methods(x, v, w):
        return x + 1, v == w, v in (w,), v is w
    first, second = [], []
    m, n = first.append, second.append
    check = minicompile.compile(views, backend="eager")
    for v, w in (({1: 2}.keys(), {1: 2}.keys()), ({1: 2}.keys(), {2: 2}.keys()), ({1: 2}.items(), {1: 2}.items())):
        assert check(torch.ones(1), v, w)[1] == (v == w)
    for calls in ([(m, n), (m, m), (m, first.append), (m, n)], [(m, m), (m, n), (m, first.append), (m, m)]):
        check = minicompile.compile(methods, backend="eager")
        minicompile.reset()
        for v, w in calls:
            assert check(torch.ones(1), v, w)[1:] == (v == w, v in (w,), v is w)


def test_a_key_that_is_written_again_is_the_new_one():
    def f(x, d, key):
        del d[key]
        d[key] = x.sum()
    for key in (1.0, True, Equal(1)):
        tables = {"k": 2, 1: 3} if type(key) is not Equal else {"k": 2, Equal(1): 3}, {}
        tables[1].update(tables[0])
        minicompile.compile(f, backend="eager")(torch.ones(1), tables[0], key)
        f(torch.ones(1), tables[1], key)
        assert [*map(repr, tables[0])] == [*map(repr, tables[1])]


def test_a_written_key_is_compared_with_one_key(monkeypatch):
    def f(x, d):
        for key in keys:
            d[key] = 1
        return x + 1
    keys, compared = [*range(20), *((i, "a") for i in range(20))], []
    monkeypatch.setattr(items_module, "same_constant", lambda a, b: compared.append(a) or same_constant(a, b))
    table = dict.fromkeys([*map(float, keys[:20]), *keys[20:]], 0)
    minicompile.compile(f, backend="eager")(torch.ones(1), table)
    assert [*map(repr, table)] == [*map(repr, map(float, keys[:20])), *map(repr, keys[20:])] and {*table.values()} == {1}
    assert len(compared) <= len(keys)


@pytest.mark.parametrize("cls", [dict, collections.OrderedDict, collections.defaultdict])
def test_keys_are_written_in_the_order_of_the_program(cls):
    def f(x, d, a, b):
        d["k"] = d[a] = x + 1
        d[b], d["k"], d[2.0] = x, x, x
    a, b = Key(), (Key(), 1)
    compiled = minicompile.compile(f, backend="eager")
    for keys in ((2.0, b, a, "k"), (), (2,), ("k",), (b, "k"), (2, 3)):
        tables = [cls() for _ in range(2)]
        for table, function in zip(tables, (compiled, f)):
            table.update(dict.fromkeys(keys, 0))
            function(torch.ones(1), table, a, b)
        assert str([*tables[0].items()]) == str([*tables[1].items()])


@pytest.mark.parametrize("cls", [dict, collections.OrderedDict])
def test_dictionaries_are_compared_item_by_item(cls):
    def f(x, d, e):
        return x + 1, d == e
    check = minicompile.compile(f, backend="eager")
    with pytest.raises(RuntimeError):
        f(torch.ones(1), cls(a=torch.ones(2), b=1), cls(a=torch.ones(2), c=1))
    with pytest.raises(RuntimeError):
        check(torch.ones(1), cls(a=torch.ones(2), b=1), cls(a=torch.ones(2), c=1))
    for d, e in ((cls(a=1, b=2), cls(b=2, a=1)), (cls(a=1), cls(a=1, b=2)), (cls(a=1), cls(b=1)), (cls(a=1, b=2), cls(a=1, b=2))):
        assert check(torch.ones(1), d, e)[1] == (d == e)


def test_objects_that_share_their_state():
    state = {"count": 1}

    class Borg:
        def __init__(self):
            self.__dict__ = state

    def f(x, a, b):
        a.count = b.count + 1
        return x * b.count
    compiled, a, b = minicompile.compile(f, backend="eager"), Borg(), Borg()
    for count in (2, 3, 4):
        assert compiled(torch.ones(1), a, b) == b.count == count


def test_an_object_that_is_new_at_each_call_in_a_dictionary_of_the_trace_is_one_version():
    def f(x, o):
        seen = {o: 1}
        return x * seen[o] if o in seen else x
    compiled = minicompile.compile(f, backend="eager", fullgraph=True)
    with minicompile.config.patch(recompile_limit=1):
        for _ in range(4):
            compiled(torch.ones(2), Key())


def test_a_new_parameter_has_no_state_in_the_optimizer():
    def train(wrap):
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 2)
        opt = torch.optim.Adam(net.parameters(), 0.1)

        def step(x):
            opt.zero_grad()
            net(x).square().sum().backward()
            opt.step()
        step = wrap(step)
        for i in range(6):
            if i == 4:
                net.bias = opt.param_groups[0]["params"][1] = torch.nn.Parameter(torch.zeros(2))
            step(torch.full((2, 3), i + 1.0))
        return net.bias, [state["step"].item() for state in opt.state.values()]
    got, want = train(lambda f: minicompile.compile(f, backend="aot_eager")), train(lambda f: f)
    torch.testing.assert_close(got[0], want[0])
    assert got[1] == want[1] == [6, 4, 2]


# ---- attributes of the object and of its class

class Kept:
    """A descriptor that keeps what it has made in the object."""

    def __get__(self, owner, kind=None):
        READ.append("kept")
        return owner.__dict__.setdefault("kept", 5)


class Owner:
    mode, kept = "class", Kept()

    def __getattr__(self, name):
        READ.append(name)
        return 7

    @functools.cached_property
    def costly(self):
        READ.append("costly")
        return 3


class Watched:
    mode = [1]

    def __getattribute__(self, name):
        if not name.startswith("__"):
            READ.append(name)
        return object.__getattribute__(self, name)

    def method(self, x):
        print(end="")
        return x + self.mode[0]


class Slots:
    __slots__ = "full", "empty", "__dict__"

    def __getattr__(self, name):
        READ.append(name)
        return 5


class Mode:
    mode, other = "class", None


READ = []


def own_attributes(o, x):
    return x + o.kept + o.costly + o.fallback


def deleted_and_written(o, x):
    before = o.mode
    try:
        del o.mode
    except AttributeError:
        before += " again"
    between, o.last, o.mode = o.mode, 1, "own"
    return x + 1, before, between, o.mode, list(vars(o))


def deleted(o, x):
    o.other, o.new = o.mode, 2
    del o.other, o.new, o.mode
    o.new = 3
    return x + 1, o.mode, o.other, vars(o), hasattr(o, "gone")


def invalidated(o, x):
    first = o.costly
    del o.costly
    o.__dict__["more"] = o.costly
    return x + first, vars(o)


def slots(o, x):
    o.more, o.full = 2, o.full + 1
    return x + o.empty, o.other, vars(o)


def watched(o, x):
    return o.method(x), o.mode


def mode_of_its_own(number):
    o = Mode()
    if number % 2:
        o.mode, o.number = "own", number
    return o


def owner(number):
    o = Owner()
    if number == 0:
        o.__dict__.update(kept=1, costly=2, fallback=3)
    return o


def with_slots(number):
    o = Slots()
    o.full = number
    return o


@pytest.mark.parametrize("function, make, whole", [
    (own_attributes, owner, True), (deleted_and_written, mode_of_its_own, True), (deleted, lambda n: mode_of_its_own(1), True),
    (invalidated, owner, True), (watched, lambda n: Watched(), False), (slots, with_slots, False)])
def test_what_an_object_has_of_its_own(function, make, whole):
    """A guard that reads an attribute runs no code of the class, as `obj.name` would where the object has none of its own."""
    compiled = minicompile.compile(function, backend="eager", fullgraph=whole)
    for number in (0, 1, 1, 2, 3, 1):
        answers = []
        for f in (function, compiled):
            READ.clear()
            o = make(number)
            answers.append(repr((f(o, torch.ones(2)), READ, list(o.__dict__.items()))))
        assert answers[0] == answers[1]


@pytest.mark.parametrize("name", ["type", "len", "float", "__v0", "__out", "__next", "__K", "__F", "__argument_type"])
def test_an_argument_has_a_name_that_generated_functions_use(name):
    space = {}
    exec(f"""def f(x, {name}, log, n):
        log.append({name})
        return [(x * n, y) for y in ({name}, *log)] if {name} == "a" else x * {name} / x.shape[0]""", space)
    f, compiled = space["f"], minicompile.compile(space["f"], backend="eager", fullgraph=True)
    for value, n in (("a", 1.5), (2, 2.5), ("a", 3.5), (3, 4.5), (3, 5.5)):
        logs, x = ([0.5], [0.5]), torch.ones(int(n))
        assert repr(compiled(x, value, logs[0], n)) == repr(f(x, value, logs[1], n)) and logs[0] == logs[1]


def test_an_attribute_of_a_module_is_deleted():
    class Net(torch.nn.Module):
        scale = 2.0

        def forward(self, x):
            self.scale = 3.0
            x = x * self.scale
            del self.scale
            return x * self.scale

    net = Net()
    assert minicompile.compile(net, backend="eager", fullgraph=True)(torch.ones(2)).tolist() == [6.0, 6.0] and "scale" not in vars(net)


# ---- an object and its `__dict__`, which are two paths to one state

class AttributesAreItems(dict):
    def __init__(self, **items):
        super().__init__(**items)
        self.__dict__ = self


def through_the_object(o, d, x):
    o.mode = o.mode + "1"
    return x + 1, d.get("mode"), list(d), len(d)


def through_the_dictionary(o, d, x):
    before = o.mode
    d["mode"] = before + "2"
    return x + 1, o.mode


def behind_a_break(o, d, x):
    mine = o.__dict__
    print(end="")
    o.new = 1
    return x + 1, vars(o) is mine, mine["new"]


@pytest.mark.parametrize("function", [through_the_object, through_the_dictionary, behind_a_break])
def test_an_object_and_its_dictionary(function):
    compiled = minicompile.compile(function, backend="eager")
    for make, shared in ((Mode, False), (Mode, True), (Mode, False), (lambda: AttributesAreItems(mode="a"), True)):
        answers = []
        for f in (function, compiled):
            o = make()
            o.mode = "a"
            answers.append((f(o, o.__dict__ if shared else {"mode": "b"}, torch.ones(2)), vars(o)))
        assert repr(answers[0]) == repr(answers[1])


VARIABLE = 1


def through_globals(variables, x):
    globals()["VARIABLE"] = VARIABLE + 1
    return x * VARIABLE, variables.get("VARIABLE")


def through_a_function(variables, x):
    through_a_function.__globals__["VARIABLE"] += 1
    return x * VARIABLE, variables.get("VARIABLE")


def through_the_variable(variables, x):
    global VARIABLE
    VARIABLE = VARIABLE + 1
    return x + 1, variables.get("VARIABLE")


def through_the_argument(variables, x):
    variables["VARIABLE"] = variables.get("VARIABLE", 0) + 1
    return x * VARIABLE


@pytest.mark.parametrize("function", [through_globals, through_a_function, through_the_variable, through_the_argument])
def test_variables_and_the_dictionary_of_them(function, monkeypatch):
    compiled = minicompile.compile(function, backend="eager")
    for variables in ({}, {"VARIABLE": 5}, globals(), {}, globals(), globals()):
        answers = []
        for f in (function, compiled):
            monkeypatch.setitem(globals(), "VARIABLE", 3)
            answers.append((f(variables if variables is globals() else {**variables}, torch.ones(2)), VARIABLE))
        assert repr(answers[0]) == repr(answers[1])


def test_what_is_of_another_class_is_not_asked_for_the_rest():
    """`[*pair]`, the guard of a dictionary, would use up an iterator; `len` and attributes may be code of the program."""
    asked = []

    class Loud:
        __iter__ = lambda self: asked.append("iter") or iter([1, 2])
        __len__ = lambda self: asked.append("len") or 2
        __getattr__ = lambda self, name: asked.append(name) or 2

    def f(pair, x):
        a, b = pair
        return x * a + b, isinstance(pair, Loud) and pair.name

    makers = (lambda: {1: 2, 3: 4}, lambda: {5: 2, 6: 4}, lambda: (k for k in (1, 2)), Loud, lambda: [1, 2], lambda: iter("ab"),
              lambda: (1, 2), Loud)
    compiled = minicompile.compile(lambda pair, x: f(pair, x), backend="eager")
    for make in makers * 2:
        answers = []
        for g in (f, compiled):
            asked.clear()
            try:
                answers.append((g(make(), torch.ones(2)), asked[:]))
            except TypeError as error:
                answers.append(str(error))
        assert repr(answers[0]) == repr(answers[1])


def test_the_words_about_a_recompile_run_no_code_of_the_program(caplog):
    class Loud:
        def __repr__(self):
            READ.append("repr")
            return "loud"

    def f(x, table, key):
        return x + table[key] if key in table else x * len(table)

    compiled = minicompile.compile(f, backend="eager")
    READ.clear()
    for table in ({Loud(): 1}, {}, {Loud(): 1, Loud(): 2}):
        compiled(torch.ones(2), table, next(iter(table), None))
    assert not READ


class Slotted:
    __slots__ = "here"

    def __getattr__(self, name):
        asked.append(name)
        return 7


asked = []


def test_a_slot_that_is_filled_and_emptied():
    """Guards look at the slot: `__getattr__` runs as often as in eager."""
    def f(x, slotted):
        return x * slotted.here
    compiled, slotted = minicompile.compile(f, backend="eager", fullgraph=True), Slotted()
    for write in (lambda: None, lambda: setattr(slotted, "here", 2), lambda: delattr(slotted, "here"), lambda: None):
        write()
        asked.clear()
        results = f(torch.ones(2), slotted), list(asked)
        asked.clear()
        assert (compiled(torch.ones(2), slotted).tolist(), asked) == (results[0].tolist(), results[1])


# ---- classes whose attributes change, come and go ----------------------------------------------------------------

CLASSES = """
class Descriptor:
    def __init__(self, value):
        self.value = value
    def __get__(self, instance, owner):
        return self.value
class Meta(type):
    m = 1
class Base(metaclass=Meta):
    a, t, l, s, f, d = 1, (1, 2), [1], "x", 1.5, Descriptor(1)
    def go(self, x):
        return x
class Mid(Base):
    pass
class Child(Mid):
    def go(self, x):
        return super().go(x)
"""
READS = {"o.a": "a", "type(o).a": "a", "o.__class__.a": "a", "Child.a": "a", "getattr(type(o), 'a')": "a", "len(type(o).t)": "t",
         "len(o.t)": "t", "len(type(o).l)": "l", "len(o.l)": "l", "len(type(o).s)": "s", "len(o.s)": "s", "type(o).f": "f", "o.d": "d",
         "type(o).d": "d", "super(Child, o).a": "a", "super(Child, o).d": "d", "type(o).__mro__[1].a": "a", "type(o).__bases__[0].a": "a",
         "type(o).m": "m", "len([k for k in dir(o) if k[0] != '_'])": "n", "getattr(o, 'n', 0)": "n", "getattr(type(o), 'n', 0)": "n"}
VALUES = {"t": lambda v: (1,) * v, "l": lambda v: [1] * v, "s": lambda v: "x" * v}


@pytest.mark.parametrize("before", ["x", "o.go(x)"])
@pytest.mark.parametrize("place", ["Base", "Mid", "Child"])
def test_a_class_that_is_written_to(place, before):
    """In front of the class that had the attribute, too. `super()` brings the class into the trace by another way than its name."""
    for read, name in READS.items():
        namespace = {"__name__": __name__}
        exec(CLASSES + f"def f(x, o):\n    return {before} * {read}\n", namespace)
        cls, f, o = namespace[place], namespace["f"], namespace["Child"]()
        compiled = minicompile.compile(f, backend="eager")
        for value in (None, None, 3, 4, 4, "gone", 5):
            if value == "gone" and place != "Base":
                delattr(cls, name)
            elif type(value) is int:
                setattr(cls, name, VALUES.get(name, namespace["Descriptor"] if name == "d" else int)(value))
            assert torch.equal(compiled(torch.ones(2), o), f(torch.ones(2), o)), (read, value)


class Equal:
    def __init__(self, v):
        self.v = v

    def __hash__(self):
        return 1

    def __eq__(self, other):
        return self.v == other.v


@pytest.mark.parametrize("make", [dict, collections.OrderedDict, functools.partial(collections.defaultdict, int)])
@pytest.mark.parametrize("kind", [type("Part", (), {}), torch.nn.Identity, lambda: torch.ones(2)])
def test_an_item_is_written_at_the_key_that_was_asked_for(make, kind):
    """Wherever that lies in the dictionary of this call."""
    def step(x, table, a, b):
        table[a] = 5
        table[b] += 1
        return x * table[a]

    fast, x, (a, b, c) = minicompile.compile(step, backend="eager"), torch.ones(2), (kind() for _ in range(3))
    for items in ({a: 2, b: 3}, {b: 3, a: 2}, {c: 1, b: 3, a: 2}, {a: 2, c: 1, b: 3}):
        one, two = make(items), make(items)
        assert torch.equal(fast(x, one, a, b), step(x, two, a, b))
        assert [(id(key), value) for key, value in one.items()] == [(id(key), value) for key, value in two.items()]


@pytest.mark.parametrize("make", [lambda: Equal(1), lambda: (Equal(1), 2), lambda: torch.ones(1), lambda: torch.ones(2)],
                         ids=["object", "tuple", "tensor", "tensors"])
def test_a_key_is_the_one_that_is_there(make):
    """Not one that was equal: of a tensor `==` is no answer."""
    def f(x, d):
        return x * len(d), list(d)

    compiled = minicompile.compile(f, backend="eager")
    for d in ({make(): 1}, {make(): 1}):
        for _ in range(2):
            got, = compiled(torch.ones(1), d)[1]
            there, = d
            assert got is there or got[0] is there[0]


class Numbered:
    """A key whose hash depends on an attribute."""

    def __init__(self, number):
        self.number = number

    def __hash__(self):
        return hash(self.number)

    def __eq__(self, other):
        return self.number == getattr(other, "number", other)


def documented():
    return type("Documented", (), {"field": property(lambda self: 1, doc="old")})


@pytest.mark.parametrize("make, read, write", [
    (documented, lambda s: s.field.__doc__, lambda s: setattr(s.field, "__doc__", "new")),
    (lambda: fractions.Fraction(1, 3), lambda s: (s + 1, s.numerator, str(s)), lambda s: setattr(s, "_numerator", 7)),
    (lambda: torch.nn.Identity(), lambda s: type(s).__name__, lambda s: setattr(torch.nn.Identity, "__name__", "Other")),
    (lambda: {Numbered(1): 1}, lambda s: ([k.number for k in s], Numbered(1) in s), lambda s: setattr([*s][0], "number", 2)),
    (lambda: {Config(): 1}, lambda s: [k.n for k in s], lambda s: setattr([*s][0], "n", 2)),
], ids=["doc of a property", "fraction", "name of a class of torch", "hash of a key", "attribute of a key"])
def test_facts_of_what_seems_fixed(make, read, write, monkeypatch):
    monkeypatch.setattr(Config, "__hash__", object.__hash__)
    things = make(), make()

    def f(s, x):
        return x + 1, read(s)
    compiled = minicompile.compile(f, backend="eager")
    for change in (False, False, True, False):
        seen = []
        for function, thing in zip((f, compiled), things):
            if change:
                write(thing)
            seen.append(function(thing, torch.ones(2))[1])
        torch.nn.Identity.__name__ = "Identity"
        assert seen[0] == seen[1]


def test_a_fraction_is_made_in_each_call():
    """Its fields can be set, and it holds objects whose comparison may raise."""
    class Numerator:
        denominator = 1
        numerator = property(lambda self: self)

        def __lt__(self, other):
            raise AssertionError
        __eq__ = __lt__

    numbers.Rational.register(Numerator)

    def f(x):
        third, strange = fractions.Fraction(1, 3), fractions.Fraction(Numerator())
        print(end="")
        before = third.numerator
        third._numerator = 7
        print(end="")
        return x + before, third, third.numerator, type(strange.numerator)
    compiled = minicompile.compile(f, backend="eager")
    for _ in range(3):
        assert compiled(torch.ones(2))[1:] == f(torch.ones(2))[1:] and compiled(torch.ones(2))[0][0] == 2


def increased(x):
    x = x.clone()
    x += 1
    return x


def relu6(input, inplace=False):
    return input * 7


def with_its_mode(x):
    with torch.no_grad():
        return x * (3 if torch.is_grad_enabled() else 2)


NO_GRAD = torch.no_grad()


def with_a_mode_made_before(x):
    with NO_GRAD:
        return x * (3 if torch.is_grad_enabled() else 2)


def gradient(x):
    y = x.clone().requires_grad_()
    (y * y).sum().backward()
    return y.grad + torch.autograd.grad((y * y * y).sum(), y)[0]


@pytest.mark.parametrize("function, owner, name, new", [
    (lambda x: x + 1, torch.Tensor, "__add__", lambda a, b: a * 7),
    (increased, torch.Tensor, "__iadd__", lambda a, b: a * 7),
    (lambda x: x * len(x), torch.Tensor, "__len__", lambda a: 9),
    (lambda x: x * x.shape[0], torch.Tensor, "shape", property(lambda a: (5,))),
    (lambda x: x.relu(), torch.Tensor, "relu", lambda a: a * 7),
    (lambda x: x.relu() + x.cos(), torch.Tensor, "relu", lambda a, own=torch.Tensor.relu: own(a * 7) * own(a)),
    (lambda x: x.T, torch.Tensor, "T", property(lambda a: a * 7)),
    (lambda x: x.T + 1, torch.Tensor, "T", property(lambda a, own=torch.Tensor.T: own.__get__(a * 7) * 2)),
    (lambda x: x.split(1)[0], torch.Tensor, "split", lambda a, n, own=torch.Tensor.split: own(a * 7, 2 * n)),
    (lambda x: x.norm(), torch.Tensor, "norm", lambda a, own=torch.Tensor.norm: own(a) + 1),
    (gradient, torch.Tensor, "backward", lambda a, own=torch.Tensor.backward: own(a * 7)),
    (gradient, torch.autograd, "grad", lambda *a, own=torch.autograd.grad: [g * 7 for g in own(*a)]),
    (lambda x: x * (2 if torch.is_grad_enabled() else 3), torch, "is_grad_enabled", lambda own=torch.is_grad_enabled: own()),
    (lambda x: x.to(torch.get_default_dtype()), torch, "get_default_dtype", lambda: torch.float64),
    (lambda x: x.sevenfold() if hasattr(x, "sevenfold") else x, torch.Tensor, "sevenfold", lambda a: a * 7),
    (lambda x: torch.nn.Flatten()(x[None]), torch.nn.Flatten.__init__, "__defaults__", (0, -1)),
    (lambda x: torch.nn.functional.leaky_relu(x), torch.nn.functional.leaky_relu, "__defaults__", (0.5, False)),
    (lambda x: torch.nn.functional.relu6(x), torch.nn.functional.relu6, "__code__", relu6.__code__),
    (lambda x: torch.nn.Identity()(x), torch.nn.Module, "_call_impl", lambda self, x: x * 7),
    (with_its_mode, torch.no_grad, "__enter__", lambda self: setattr(self, "prev", True)),
    (with_a_mode_made_before, torch.no_grad, "__enter__", lambda self: setattr(self, "prev", True))],
    ids=lambda v: v if type(v) is str else "")
@pytest.mark.parametrize("first", (False, True), ids=("replaced-later", "replaced-first"))
@pytest.mark.parametrize("backend", ("eager", "aot_eager"))
def test_what_is_replaced_in_the_library(function, owner, name, new, backend, first, monkeypatch, fresh):
    x, compiled = torch.tensor([-1.0, 4.0]), minicompile.compile(function, backend=backend)
    for replaced in (first, not first, first, not first):
        with monkeypatch.context() as patch:
            if replaced:
                patch.setattr(owner, name, new, raising=False)
            expected, got = function(x), compiled(x)
        assert torch.equal(got, expected)


@pytest.mark.parametrize("function, owner, name", [
    (lambda x: torch.relu(x), torch, "relu"), (lambda x: torch.relu(x), F, "relu"), (lambda x: F.relu(x) + 1, F, "relu"),
    (lambda x: F.softmax(x, 0), F, "softmax"), (lambda x: F.linear(x, torch.ones(3, 2)), F, "linear"), (lambda x: F.gelu(x), F, "gelu"),
    (lambda x: F.scaled_dot_product_attention(*[x[None, :, None]] * 3), F, "scaled_dot_product_attention"),
    (lambda x: F.max_pool1d(x[None], 2), F, "max_pool1d"), (lambda x: F.one_hot(x.long() + 1), F, "one_hot"),
    (lambda x: torch.linalg.norm(x), torch.linalg, "norm"), (lambda x: torch.cdist(x[:, None], x[:, None]), torch, "cdist")],
    ids=lambda v: v if type(v) is str else "")
@pytest.mark.parametrize("named_alike", (False, True))
@pytest.mark.parametrize("backend", ("eager", "aot_eager", "cpp"))
def test_what_calls_the_function_in_whose_place_it_is(function, owner, name, named_alike, backend, monkeypatch, fresh):
    """A wrapper that `functools.wraps` has given the name and the module of the library's function, or none of that."""
    own, called, x = getattr(owner, name), [], torch.tensor([-1.0, 4.0])

    def wrapper(*args, **kwargs):
        called.append(name)
        return own(*args, **kwargs) * 3
    wrapper = functools.wraps(own)(wrapper) if named_alike else wrapper
    compiled = minicompile.compile(function, backend=backend)
    for replaced in (False, True, True, False, True):
        with monkeypatch.context() as patch:
            if replaced:
                patch.setattr(owner, name, wrapper)
            expected, before = function(x), called.copy()
            called.clear()
            got = compiled(x)
        assert torch.allclose(got, expected) and called == before
        called.clear()


@pytest.mark.parametrize("function", [
    lambda f, t: f in t, lambda f, t: f is t[0], lambda f, t: t.count(f), lambda f, t: (f, 1) == (t[0], 1), lambda f, t: [f] == t,
    lambda f, t: {"f": f} == {"f": t[0]}, lambda f, t: {t[0]: 5}.get(f), lambda f, t: f in {*t}, lambda f, t: len({(f, 1), (t[0], 1)})])
@pytest.mark.parametrize("number", (float, complex, numpy.float32, numpy.float64), ids=lambda number: number.__name__)
@pytest.mark.parametrize("first", (True, False))
def test_a_nan_is_equal_only_to_itself(function, number, first, fresh):
    """Containers ask whether two things are one object first, and only a NaN is not equal to itself."""
    one, other, ones, twos, threes = map(number, ("nan", "nan", 1, 2, 3))
    compiled = minicompile.compile(lambda x, f, t: (x * f, function(f, t)), backend="eager")
    nans = [(one, [one]), (one, [other]), (one, [one]), (ones, [ones]), (ones, [one])]
    for f, t in [(number(0), [ones]), (twos, [threes])][first:] + nans:
        assert compiled(torch.ones(1), f, t)[1] == function(f, t)


normed = torch.nn.LayerNorm(2)


@pytest.mark.parametrize("function, owner, name", [
    (lambda x: F.relu(x), torch, "relu"), (lambda x: normed(x), torch, "layer_norm"), (lambda x: F.relu6(x), F, "hardtanh"),
    (lambda x: F.mse_loss(x, 2 * x), torch._C._nn, "mse_loss"), (lambda x: F.mse_loss(x, x[None]), torch, "broadcast_tensors"),
    (lambda x: F.softmax(x, 0), torch.Tensor, "softmax"), (lambda x: x.norm(), torch, "norm"),
    (lambda x: torch.norm(x), torch.linalg, "vector_norm"), (lambda x: F.max_pool1d(x[None], 2), torch, "max_pool1d"),
    (lambda x: 2 ** x, torch, "pow"), (lambda x: x // 2, torch, "floor_divide"), (lambda x: 5 % x, torch, "remainder"),
    (torch.cos, torch, "cos"), (F.relu, F, "relu")], ids=lambda v: v if type(v) is str else "")
@pytest.mark.parametrize("first", (False, True), ids=("replaced-later", "replaced-first"))
@pytest.mark.parametrize("backend", ("eager", "aot_eager"))
def test_what_a_function_of_the_library_calls(function, owner, name, first, backend, monkeypatch, fresh):
    """The program has put another in the place of that, of which it need not know."""
    own, called, x = getattr(owner, name), [], torch.tensor([-1.0, 4.0])

    def wrapper(*args, **kwargs):
        called.append(name)
        result = own(*args, **kwargs)
        return result * 3 if isinstance(result, torch.Tensor) else result
    compiled = minicompile.compile(lambda x: function(x) + 1, backend=backend)
    for replaced in (first, not first, True, False, True):
        with monkeypatch.context() as patch:
            if replaced:
                patch.setattr(owner, name, wrapper)
            expected, before = function(x) + 1, called.copy()
            called.clear()
            got = compiled(x)
        assert torch.allclose(got, expected) and called == before
        called.clear()


@pytest.mark.parametrize("name", ["lambda", "class", "layer-1", "w.0", "a b", "\N{LATIN SMALL LIGATURE FI}", "{}", "a{0}", "'", "0", ""])
@pytest.mark.parametrize("owner", [types.SimpleNamespace(), Thing(), type("Other", (), {})], ids=lambda owner: type(owner).__name__)
def test_attributes_whose_names_are_no_identifiers(owner, name, fresh):
    """setattr takes any text: an argument `--lambda` of a command line lies in `args.lambda`."""
    def read_and_write(x):
        setattr(made, name, x * 2)
        if not isinstance(owner, type):
            setattr(owner, name + "w", x * 3)
        return getattr(owner, name) * x + getattr(made, name), functools.partial(dict, **{name: x})

    made = types.SimpleNamespace()
    compiled = minicompile.compile(read_and_write, backend="aot_eager", fullgraph=True)
    for value in (2.0, 5, torch.ones(3), 2.0):
        setattr(owner, name, value)
        for x in (torch.randn(3), torch.randn(4) if type(value) is not torch.Tensor else torch.randn(3)):
            result, made_with = compiled(x)
            got = result, getattr(made, name), getattr(owner, name + "w", None)
            expected = read_and_write(x)[0], getattr(made, name), getattr(owner, name + "w", None)
            assert list(made_with.keywords) == [name] and made_with.keywords[name] is x
            assert all(a is b if a is None else torch.equal(a, b) for a, b in zip(got, expected))


def test_getattr_of_a_module_is_called_as_often_as_in_eager():
    """It may give something else each time (PEP 562)."""
    module, asked = types.ModuleType("asked"), []

    def find(name):
        if name == "missing":
            raise AttributeError(f"there is no {name}")
        asked.append(name)
        return [len(asked)] if name == "made" else len(asked) % 3

    def f(x):
        return x + module.number, module.made, hasattr(module, "missing"), getattr(module, "missing", 4), module.number

    module.__getattr__, x, known = find, torch.ones(3), []
    compiled = minicompile.compile(f, backend="eager", fullgraph=True)
    for _ in range(5):
        asked[:] = known
        expected, after = f(x), list(asked)
        asked[:] = known
        same(compiled(x), expected)
        assert asked == after
        known = after
    module.number = 7                                        # now it is there
    same(compiled(x)[0], x + 7)


def test_getters_that_the_program_keeps():
    """`itemgetter` and its kin are objects in C: they are known by what they were made of, one that was made anew by the same."""
    backend, x, layer = Recorder(), torch.ones(2, 3), torch.nn.Linear(3, 3)

    def made(item="a", attribute="weight.shape", dim=0):
        return (operator.itemgetter(item), operator.attrgetter("bias", attribute), operator.methodcaller("sum", dim),
                operator.methodcaller("sum", dim=dim, keepdim=True))

    def f(x, getters):
        item, attribute, method, named = getters
        rows = sorted([{"a": 3, "b": 1}, {"a": 1, "b": 2}], key=item)
        return item({"a": x + 1, "b": x}), attribute(layer), method(x), named(x), rows, list(map(method, [x, x * 2]))

    compiled = minicompile.compile(f, backend=backend, fullgraph=True)
    for getters in (made(), made()):
        same(compiled(x, getters), f(x, getters))
    assert len(backend.graphs) == 1
    for getters in (made(item="b"), made(attribute="in_features"), made(dim=1)):
        same(compiled(x, getters), f(x, getters))
    assert len(backend.graphs) == 4
    loose = minicompile.compile(f, backend="eager")
    with pytest.raises(KeyError):
        loose(x, made(item="c"))
    with pytest.raises(TypeError, match="itemgetter expected 1 argument, got 0"):
        minicompile.compile(lambda x, get: (x + 1, get()), backend="eager")(x, made()[0])


def test_empty_cell():
    """A variable of an enclosing function that had no value may have one at the next call."""
    backend, x = Recorder(), torch.ones(3)

    def made(value=None):
        def get():
            return shared
        if value is not None:
            shared = value
        return get

    def called(x, get):
        try:
            return x + get()
        except NameError as error:
            return x - 1, str(error)

    def opened(x, get):
        try:
            return x + get.__closure__[0].cell_contents
        except ValueError as error:
            return x - 1, str(error)

    def compared(x, get):
        return x + 1, get.__closure__[0] == alike.__closure__[0]

    alike = made(2)
    for f in (called, opened, compared):
        compiled = minicompile.compile(f, backend=backend, fullgraph=f is not compared)
        for value in (None, 2, None, 3.5):
            same(compiled(x, made(value)), f(x, made(value)))
    assert backend.graphs


def test_class_given_out():
    """The `__class__` of an object may be code of the program, which runs as often as in eager, and may give another answer each time."""
    asked, x = [], torch.ones(3)

    class Poses:
        factor = 2.0

        def __init__(self, kind):
            self.kind, self.factor = kind, 3.0

        @property
        def __class__(self):
            asked.append("class")
            return self.kind

    class Hides:
        factor = 2.0

        def __init__(self, kind):
            self.kind, self.factor = kind, 3.0

        def __getattribute__(self, name):
            asked.append(name)
            return {"factor": 4.0} if name == "__dict__" else object.__getattribute__(self, name)

    class Shows:
        def __init__(self, kind):
            self.factor = 3.0

        @property
        def __dict__(self):
            return {"factor": 4.0}

    def reads(x, s):
        return x * s.factor, s

    def asks(x, s):
        number = isinstance(s, (int, str))
        return (x + 1 if number else x - 1), s.__class__.__name__, type(s).__name__, isinstance(s, type(s))

    def matches(x, s):
        match s:
            case int():
                return x + 1
            case torch.nn.Module():
                return x + 2
        return x * s.factor

    for f in (reads, asks, matches):
        for made in (Poses, Hides, Shows, lambda kind: unittest.mock.MagicMock(spec=kind, factor=2)):
            compiled = minicompile.compile(f, backend="eager")
            for kind in (int, str, int, torch.nn.Module, type):
                s = made(kind)
                asked.clear()
                expected, times = f(x, s), list(asked)
                asked.clear()
                result, times_compiled = compiled(x, s), list(asked)
                same(result, expected)
                assert [name for name in times_compiled if name != "__dict__"] == times, f


def test_class_given_out_and_a_class_that_answers_by_itself():
    """An abstract class asks for the `__class__`, whatever comes of it; a protocol asks the object for its attributes."""
    @typing.runtime_checkable
    class Called(typing.Protocol):
        def called(self): ...

    class Raises:
        @property
        def __class__(self):
            raise AttributeError("no class")

    class Gives:
        @property
        def __class__(self):
            return 5

    def protocol(x, s):
        return x + 1, isinstance(s, Called)

    def union(x, s):
        return x + 1, isinstance(s, int | Called)

    def abstract(x, s):
        return x + 1, isinstance(s, collections.abc.Mapping)

    for f in (protocol, union, abstract):
        for s in (unittest.mock.MagicMock(), unittest.mock.MagicMock(spec=dict), Raises(), Gives()):
            compiled, x = minicompile.compile(f, backend="eager"), torch.ones(3)
            try:
                expected = f(x, s)
            except (AttributeError, TypeError) as error:
                with pytest.raises(type(error), match=str(error).replace("(", ".").replace(")", ".")):
                    compiled(x, s)
            else:
                same(compiled(x, s), expected)
