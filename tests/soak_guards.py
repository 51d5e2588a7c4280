"""Guards on objects that live shortly: `python -m tests.soak_guards [--seconds 60] [--seed 0]`.

Roots of every kind are made, changed at random, dropped, and made again, often at the address of the one before, and each compiled call is
compared with eager. `make sanitize` runs it where memory that was freed is used again at once and a read of it ends the process.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import gc
import random
import time
import types

import torch
import torch.nn as nn

import minicompile
from minicompile.ch02_guards import codegen

FIELDS = ("k", "cfg", "pair", "layer", "act", "other", "names", "numbers", "table", "state", "weight")
X = torch.ones(2, 2)
KEYS = [torch.zeros(1), torch.zeros(1)]


# ---- roots ---------------------------------------------------------------------------------------------------

class Output(collections.OrderedDict):
    """Fields are attributes and items, as in the outputs of transformers."""

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        self[name] = value


class Computing:
    """What it does not have it computes."""

    def __getattr__(self, name):
        if name == "fallback":
            return 5.0
        raise AttributeError(name)


class Finalised:
    """Garbage in a cycle, whose finaliser runs wherever memory is allocated: it calls, changes and forgets."""

    def __init__(self, soak):
        self.me, self.soak = self, soak

    def __del__(self):
        with contextlib.suppress(Exception):
            self.soak.disturb()


MEMBERS = {"scale": 1.0, "twice": lambda self, x: x * 2}
SLOTS = (*FIELDS, "seen", "fallback")


def subclass(*bases, **members):
    return lambda: type("Made", bases, {**MEMBERS, **members})


def with_fields(cls):
    return dataclasses.make_dataclass("Made", FIELDS, bases=(cls,), namespace=dict(MEMBERS), eq=False)


def named_tuple():
    return type("Made", (collections.namedtuple("Made", FIELDS),), dict(MEMBERS))


KINDS = {
    "object": subclass(object), "getattr": subclass(Computing), "no weak references": subclass(object, __slots__=("__dict__",)),
    "slots": subclass(object, __slots__=SLOTS), "dict": subclass(dict), "list": subclass(list), "set": subclass(set),
    "dict with slots": subclass(dict, __slots__=SLOTS), "OrderedDict": subclass(collections.OrderedDict),
    "the OrderedDict": lambda: collections.OrderedDict, "defaultdict": subclass(collections.defaultdict),
    "deque": subclass(collections.deque), "Output": lambda: Output, "made Output": subclass(Output), "tuple": subclass(tuple),
    "float": subclass(float), "str": subclass(str), "frozenset": subclass(frozenset), "Exception": subclass(Exception),
    "SimpleNamespace": lambda: types.SimpleNamespace, "made SimpleNamespace": subclass(types.SimpleNamespace),
    "module": subclass(nn.Module), "Sequential": subclass(nn.Sequential), "dataclass": lambda: with_fields(object),
    "Python module": lambda: lambda: types.ModuleType("made"), "namedtuple": named_tuple,
    "function": lambda: lambda: types.FunctionType((lambda: 0).__code__, {}), "Output with fields": lambda: with_fields(Output),
}


def activation(factor):
    return lambda x, more=2.0: x * factor * more


class Soak:
    """One function, one kind of root, some calls."""

    def __init__(self, rng):
        self.rng = rng
        self.kind, self.inner = rng.choice([*KINDS]), rng.choice([*KINDS])
        self.classes = {kind: [KINDS[kind]() for _ in range(2)] for kind in (self.kind, self.inner)}
        self.name, self.function = rng.choice([*PROGRAMS.items()])
        dynamic = rng.choice([None, False])
        self.compiled = minicompile.compile(self.function, backend="eager", dynamic=dynamic)
        self.roots, self.busy = [], False

    def value(self):
        return self.rng.choice([2.0, 3.0, 2, True])

    def field(self, name, depth=1):
        rng = self.rng
        if name == "cfg":
            return self.make(self.inner, depth - 1) if depth else None
        made = {"k": self.value, "other": lambda: rng.choice([None, self]), "names": lambda: ["a"] * rng.randint(0, 2),
                "act": lambda: rng.choice([torch.relu, torch.tanh, activation(3.0), activation(4.0)]),
                "pair": lambda: (self.value(), rng.choice([types.SimpleNamespace(k=self.value()), None, "b"])),
                "numbers": lambda: [self.value() for _ in range(rng.randint(1, 3))],
                "table": lambda: rng.choice([dict, collections.OrderedDict])(k=self.value(), o=types.SimpleNamespace(k=self.value())),
                "state": lambda: collections.defaultdict(dict, {key: {"k": self.value(), "t": torch.ones(2)} for key in KEYS}),
                "weight": lambda: nn.Parameter(torch.ones(2, 2)),
                "layer": lambda: nn.Linear(2, 2, bias=rng.random() < .5) if rng.random() < .7 else nn.ReLU()}
        return made[name]()

    def make(self, kind, depth=1):
        cls = self.rng.choice(self.classes[kind])
        if dataclasses.is_dataclass(cls) or hasattr(cls, "_fields"):
            return cls(*(self.field(name, depth) for name in FIELDS))
        made = cls()
        for name in self.rng.sample(FIELDS, len(FIELDS)):
            setattr(made, name, self.field(name, depth))
        return made

    def change(self, o):
        """Write to a root, or to something it holds."""
        rng = self.rng
        target = rng.choice([o, vars(o).get("cfg", o) if hasattr(o, "__dict__") else o.cfg])
        kind = self.inner if target is not o else self.kind
        actions = {
            "set": lambda: setattr(target, name, self.field(name)) if (name := rng.choice(FIELDS)) else None,
            "noise": lambda: setattr(target, "noise", rng.random()), "shadow": lambda: setattr(target, "scale", self.value()),
            "delete": lambda: delattr(target, rng.choice(["noise", "scale", "k", "fallback"])),
            "fallback": lambda: setattr(target, "fallback", self.value()),
            "class": lambda: setattr(target, "__class__", rng.choice(self.classes[kind])),
            "dict": lambda: setattr(target, "__dict__", dict(target.__dict__)),
            "dict of another": lambda: setattr(target, "__dict__", rng.choice(self.roots).__dict__),
            "dict made again": lambda: remake(target), "of the class": lambda: setattr(type(target), "scale", self.value()),
            "method": lambda: setattr(type(target), "twice", rng.choice([lambda self, x: x * 3, lambda self, x: x + 1])),
            "strange key": lambda: target.__dict__.update({Strange(rng.choice(FIELDS), self): 1}),
            "item": lambda: target.__setitem__(rng.choice(FIELDS), self.value()), "append": lambda: target.names.append("a"),
            "hidden": lambda: target.__dict__.update({rng.choice(FIELDS): self.value()}),
            "parameter": lambda: setattr(target.layer, "weight", nn.Parameter(torch.ones(rng.choice([2, 3]), 2))),
            "data": lambda: setattr(target.layer.weight, "data", torch.ones(rng.choice([2, 3]), 2)),
            "dtype": lambda: setattr(target.layer.weight, "data", torch.ones(2, 2, dtype=rng.choice([torch.half, X.dtype]))),
            "hook": lambda: target.layer.register_forward_hook(lambda m, a, y: y * 2),
            "children": lambda: setattr(target, "_modules", collections.OrderedDict(target._modules)),
            "child": lambda: target._modules.update(layer=self.field("layer")),
            "defaults": lambda: setattr(target.act, "__defaults__", (float(rng.randint(2, 4)),)),
            "no defaults": lambda: setattr(target.act, "__defaults__", None),
            "value": lambda: target.numbers.__setitem__(rng.randint(-1, 1), self.value()), "no value": lambda: target.numbers.pop(),
            "numbers": lambda: target.numbers.__setitem__(slice(None), [self.value() for _ in target.numbers]),
            "in table": lambda: target.table.update({rng.choice("kol"): self.value()}),
            "order": lambda: target.table.update(k=target.table.pop("k")),
            "in state": lambda: target.state[rng.choice(KEYS)].update(k=self.value(), t=torch.ones(rng.choice([1, 2]))),
            "state": lambda: target.state.update({rng.choice(KEYS): self.field("state")[KEYS[0]]}),
            "no state": lambda: target.state.pop(rng.choice(KEYS)), "gradient": lambda: setattr(target.weight, "grad", torch.ones(2, 2)),
            "no gradient": lambda: setattr(target.weight, "grad", None),
            "other weight": lambda: setattr(target.weight, "data", torch.ones(2, 2)),
            "hook on gradient": lambda: target.weight.register_hook(lambda g: g * 2),
            "hooks on gradient": lambda: target.weight._backward_hooks.clear(),
        }
        with contextlib.suppress(Exception):
            actions[rng.choice([*actions])]()

    def disturb(self):
        """In a finaliser, or in a comparison of keys: anything may happen anywhere."""
        if self.busy:
            return
        self.busy = True
        try:
            action = self.rng.randrange(4)
            if action == 0 and self.roots:
                self.change(self.rng.choice(self.roots))
            elif action == 1:
                self.compiled(self.make(self.kind), X)
            elif action == 2 and self.roots:
                self.compiled(self.rng.choice(self.roots), X)
            else:
                self.roots[:] = self.roots[-1:]
        finally:
            self.busy = False

    def run(self, calls: int):
        """Raises AssertionError at a difference."""
        rng, disturbed = self.rng, self.rng.random() < .3
        threshold, enough = gc.get_threshold(), codegen.ENOUGH
        codegen.ENOUGH = rng.choice([0, enough])
        gc.freeze()                              # collections look at the young only, and there are many
        gc.set_threshold(rng.choice([1, 3, 10]) if disturbed else threshold[0])
        try:
            for step in range(calls):
                if not self.roots or rng.random() < .3:
                    if rng.random() < .7:
                        self.roots.clear()
                    self.roots.append(self.make(self.kind))
                    del self.roots[:-3]
                o = rng.choice(self.roots)
                for _ in range(rng.randint(0, 3)):
                    self.change(o)
                if disturbed and rng.random() < .3:
                    Finalised(self)
                self.compare(o, step)
        finally:
            self.busy, codegen.ENOUGH = True, enough
            gc.set_threshold(*threshold)
            gc.unfreeze()

    def compare(self, o, step):
        for _ in range(self.rng.randint(1, 4)):
            before = self.rng.getstate()
            got, expected = outcome(self.compiled, o), outcome(self.function, o)
            if self.rng.getstate() == before:        # no finaliser has changed something in between
                assert same(got, expected), \
                    f"{self.name}, {self.kind} that holds {self.inner}, call {step}: {got} instead of {expected}"


class Strange:
    """A key that is no string, and yet collides with one: comparing it runs the program's code."""

    def __init__(self, name, soak):
        self.name, self.soak = name, soak

    def __hash__(self):
        return hash(self.name)

    def __eq__(self, other):
        with contextlib.suppress(Exception):
            self.soak.disturb()
        return False


def remake(o):
    items = dict(vars(o))
    o.__dict__ = {}
    o.__dict__ = items


def outcome(function, o):
    try:
        return function(o, X)
    except Exception as error:
        return type(error)


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return a is b


# ---- programs ------------------------------------------------------------------------------------------------

def writes(o, x):
    o.seen = x
    return x * o.k + o.seen


def counts(o, x):
    o.count = getattr(o, "count", 0) + 1
    return o.layer(x) + o.count * 0


def names(o, x):
    for _ in o.names:
        x = x + o.cfg.k
    return x


def backward(o, x):
    before, o.weight.grad = o.weight.grad, None
    (o.weight * x).sum().backward()
    found, o.weight.grad = o.weight.grad, before
    return found if before is None else found * 3


def keys(o, x):
    for name in o.table:
        x = x * 2 + len(name) if name == "k" else x - 1
    return x


PROGRAMS = {
    "value": lambda o, x: x * o.numbers[0] + len(o.numbers), "nested value": lambda o, x: x * sum(o.cfg.numbers), "keys": keys,
    "table": lambda o, x: x * o.table["k"] + o.cfg.table["o"].k, "state": lambda o, x: x * o.state[KEYS[0]]["k"] + o.state[KEYS[1]]["t"],
    "nested state": lambda o, x: x * o.cfg.state[KEYS[0]]["t"] if KEYS[1] in o.cfg.state else x, "backward": backward,
    "gradient": lambda o, x: x * 2 if o.weight.grad is None else x + o.weight.grad,
    "number": lambda o, x: x * o.k, "nested": lambda o, x: x * o.cfg.k + o.k, "layer": lambda o, x: o.layer(x) + o.k,
    "nested layer": lambda o, x: o.cfg.layer(x), "one": lambda o, x: x * (2 if o.other is None else 3),
    "pair": lambda o, x: x * o.pair[0] + (o.pair[1].k if hasattr(o.pair[1], "k") else 1),
    "nested pair": lambda o, x: x * o.cfg.pair[0] if o.cfg.pair[1] is not None else x, "act": lambda o, x: o.act(x) * o.scale,
    "nested act": lambda o, x: o.cfg.act(x) * o.cfg.scale, "method": lambda o, x: o.twice(x) + o.k,
    "nested method": lambda o, x: o.cfg.twice(x), "is": lambda o, x: x * 2 if o.cfg is o.other else x,
    "absent": lambda o, x: x * getattr(o, "fallback", 4.0) * getattr(o.cfg, "noise", 2.0), "item": lambda o, x: x * o["k"],
    "nested item": lambda o, x: x * o.cfg["k"], "length": lambda o, x: x * len(o.cfg) + len(o.names),
    "type": lambda o, x: x * (2.0 if isinstance(o.k, float) else 3.0), "names": names, "writes": writes, "counts": counts,
}


def soak(made, name: str, calls: int, seed: int, seconds: float) -> int:
    """What `made` makes of random numbers, run with so many calls until the time is over; how many there were. name: of one of them."""
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        minicompile.reset()
        try:
            made(random.Random(seed * 1_000_003 + number)).run(calls)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {name} {number}: {error}") from None
        number += 1
    return number


def main(about: str, made, name: str, names: str, calls: int):
    """The command that soaks. about: the docstring of its module."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"{soak(made, name, calls, options.seed, options.seconds)} {names} without a difference")


if __name__ == "__main__":
    main(__doc__, Soak, "episode", "episodes", 40)
