"""One thing, reached in many ways: whichever way a program takes to an object, what it reads there may be another by the next call.

A case is drawn: a kind of thing, a way to it, perhaps another way before, a use, and a write to the thing between calls."""
import contextvars
import random
import warnings

import doors
import pytest
import torch

import minicompile

SETTING = """
import collections, functools, sys, types
class Base:
    a = 1
    def go(self, x):
        return x
class Cls(Base):
    def go(self, x):
        return super().go(x)
class Box:
    pass
def named():
    pass
thing = {thing}
alias, box, lst, dct, tup = thing, Box(), [thing], {{"k": thing}}, (0, thing)
box.thing = thing
def default(t=thing):
    return t
def kwdefault(*, t=thing):
    return t
def closure(c):
    return lambda: c
clo, part = closure(thing), functools.partial(lambda t: t, thing)
def func():
    return thing
func.thing = thing
class Holder:
    thing = thing
    @property
    def prop(self):
        return self._t
    @staticmethod
    def st():
        return thing
    @classmethod
    def cm(cls):
        return cls.thing
    def __getattr__(self, name):
        return thing
    def __getitem__(self, i):
        return thing
    def __call__(self):
        return self.thing
    def __iter__(self):
        yield thing
holder = Holder()
holder._t = thing
outer = types.ModuleType("outer")
outer.thing = thing
nt, ns = collections.namedtuple("NT", "t")(thing), types.SimpleNamespace(t=thing)
"""
ATTRIBUTES = """
T.a, T.li, T.di, T.st, T.fn, T.ne = 1, [1], {'k': 1}, 'x', lambda v: v, type('Ne', (), {})()
T.ne.a = 1
"""
WAYS = ("thing", "alias", "box.thing", "lst[0]", "dct['k']", "tup[1]", "default()", "kwdefault()", "clo()", "part()", "func()",
        "func.thing", "Holder.thing", "holder.thing", "holder.prop", "Holder.st()", "Holder.cm()", "holder.cm()", "holder.dynamic",
        "holder[0]", "holder()", "next(iter(holder))", "outer.thing", "nt.t", "ns.t", "next(t for t in lst)", "globals()['thing']",
        "getattr(box, 'thing')", "vars(box)['thing']", "(lambda t: t)(thing)", "{**dct}['k']", "[*lst][0]", "type(holder).thing",
        "(thing if True else 0)", "arg", "args[0]", "kw['t']", "max([thing], key=id)", "dict(k=thing)['k']", "list(dct.values())[0]",
        "(lambda: thing)()", "functools.reduce(lambda p, q: q, [0, thing])", "list(map(lambda t: t, lst))[0]", "dct.get('k')",
        "object.__getattribute__(box, 'thing')")
OF_ATTRIBUTES = [("r.a", "T.a = V"), ("getattr(r, 'zz', 0)", "T.zz = V"), ("len(r.li)", "T.li.append(0)"), ("len(r.li)", "T.li = [0] * V"),
                 ("r.di.get('k', 0)", "T.di['k'] = V"), ("len(r.st)", "T.st = 'x' * V"), ("r.fn(1)", "T.fn = lambda v: v + V"),
                 ("r.ne.a", "T.ne.a = V"), ("len(vars(r))", "T.q1 = V"), ("int(hasattr(r, 'q2'))", "T.q2 = V")]
OF_SEQUENCES = [("len(r)", "T.append(V)"), ("r[0]", "T[0] = V"), ("sum(r)", "T.append(V)"), ("sum(r)", "T[0] = V")]
OF_DICTS = [("len(r)", "T[V] = 1"), ("r['a']", "T['a'] = V"), ("sum(r.values())", "T['a'] = V"), ("int('z' in r)", "T['z'] = V")]
THINGS = {"Cls": OF_ATTRIBUTES, "Cls()": OF_ATTRIBUTES, "Box()": OF_ATTRIBUTES, "types.ModuleType('inner')": OF_ATTRIBUTES,
          "(lambda: None)": OF_ATTRIBUTES, "named": OF_ATTRIBUTES, "types.SimpleNamespace()": OF_ATTRIBUTES,
          "__import__('torch').nn.Linear(2, 2)": OF_ATTRIBUTES, "functools.partial(len)": OF_ATTRIBUTES, "[1]": OF_SEQUENCES,
          "collections.deque([1])": OF_SEQUENCES, "{'a': 1}": OF_DICTS, "collections.OrderedDict(a=1)": OF_DICTS,
          "collections.defaultdict(int, a=1)": OF_DICTS, "{1}": [("len(r)", "T.add(V)"), ("int(9 in r)", "T.add(9)")]}


def outcomes(thing: str, program: str, write: str, compile_) -> list:
    namespace = {"__name__": __name__}
    exec(SETTING.format(thing=thing), namespace)
    reached, results = namespace["thing"], []
    if THINGS[thing] is OF_ATTRIBUTES:
        exec(ATTRIBUTES, {"T": reached})
        if thing == "Cls":
            del reached.a                                     # that of its base
    exec(program, namespace)
    f = compile_(namespace["f"])
    for value in (None, None, 3, None, 4, 5, 5, None):
        if value is not None:
            exec(write, {"T": reached, "V": value})
        results.append(f(torch.ones(2), reached, reached, t=reached)[0].item())
    return results


@pytest.mark.parametrize("thing", THINGS)
def test_what_is_read_is_what_is_there(thing):
    draw = random.Random(thing)
    for _ in range(16):
        use, write = draw.choice(THINGS[thing])
        before = draw.choice(["", "o = Cls().go(x); ", f"w = {draw.choice(WAYS)}; "])
        program = f"def f(x, arg, *args, **kw):\n    {before}r = {draw.choice(WAYS)}\n    return x * ({use})\n"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled = outcomes(thing, program, write, lambda f: minicompile.compile(f, backend="eager"))
        assert compiled == outcomes(thing, program, write, lambda f: f), (program, write)


def through(door: str, write: str, compile_) -> list:
    return contextvars.copy_context().run(results_of, door, write, compile_)


def results_of(door: str, write: str, compile_) -> list:
    namespace, results = {"__name__": __name__}, []
    exec(doors.SETTING, namespace)
    exec(f"def f(x):\n    return x * ({door})\n", namespace)
    f = compile_(namespace["f"])
    for value in (None, None, 3, None, 4, 5, 5, None):
        if value is not None:
            namespace["V"] = value
            exec(write, namespace)
        results.append(f(torch.ones(2))[0].item())
    return results


@pytest.mark.parametrize("door", doors.DOORS)
def test_doors(door):
    """What lies behind many other doors: classes, functions, enums, descriptors, the process."""
    for write in doors.DOORS[door]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            eager = through(door, write, lambda f: f)
            assert len(set(eager)) > 1
            assert through(door, write, lambda f: minicompile.compile(f, backend="eager")) == eager, write
