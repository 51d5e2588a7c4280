"""Histories of dictionaries: `python -m tests.soak_keys [--seconds 60] [--seed 0]`.

A random program of a few statements reads and writes dictionaries that are arguments, globals and attributes. Their keys are objects of one
or of several kinds: what is compared by identity, by a method of its class or by value, and tuples of such. Between the calls, dictionaries
and names get other keys and values, and objects are freed and made again, often at the same address. Each call has to give what eager
gives, and to leave the dictionaries as eager leaves them.
"""
import collections
import enum
import types
from dataclasses import dataclass

import torch

import minicompile
from tests.soak_guards import Strange, main, same as same_tensor

X = torch.ones(2)
NAMES = ("a", "b", "G", "H", "o.key")
PLACES = ("d", "e", "D", "o.table", "n['in']")


class Part:
    pass


@dataclass(frozen=True)
class Numbered:
    number: int


Color = enum.Enum("Color", "RED BLUE")
KINDS = {
    "object": lambda rng: Part(), "function": lambda rng: lambda x: x, "class": lambda rng: type("Made", (), {}),
    "parameter": lambda rng: torch.nn.Parameter(torch.ones(1)), "tensor": lambda rng: torch.ones(1),
    "module": lambda rng: torch.nn.Identity(),
    "equal": lambda rng: Numbered(rng.randrange(3)), "strange": lambda rng: Strange(rng.choice("kl"), None),
    "member": lambda rng: rng.choice([*Color]), "text": lambda rng: rng.choice("kl"), "number": lambda rng: rng.choice([0, 1, 1.0, True]),
}
CLASSES = (dict, collections.OrderedDict, lambda: collections.defaultdict(float), type("Sub", (dict,), {}),
           type("Missing", (dict,), {"__missing__": lambda self, key: 5.0}))
STATEMENTS = (
    "r.append({d}.get({k}, 7.0))", "r.append({k} in {d})", "r.append({d}[{k}])", "r.append(len({d}))", "r.append(list({d}.values()))",
    "r.append([key == {k} for key in {d}])", "r.append([*{d}])", "r.append({d}.pop({k}, 8.0))", "r.append({d}.setdefault({k}, {v}))",
    "{d}[{k}] = {v}", "{d}[{k}] = {v}", "{d}.pop({k}, None)", "del {d}[{k}]", "r.append({d} == {e})", "r.append({d} == {{{k}: {v}}})",
    "{d}.update({{{k}: {v}}})", "r.append({d} | {{{k}: {v}}})", "r.append({{key: v for key, v in {d}.items() if key != {k}}})",
    "r.append({d}.copy())", "if {k} in {d}: x = x * 2", "if {k} not in {d}: {d}[{k}] = {v}", "for key in {d}: x = x * 2 + (key == {k})",
    "r.append({d}.keys() == {e}.keys())", "r.append({d}.keys() & {{{k}}})", "r.append({d}.keys() - {{{k}}})", "r.append({d}.popitem())",
    "r.append({{{k}: 1, {l}: 2}})", "r.append([*reversed({d})])", "r.append({{**{d}, {k}: {v}}})", "{d}.update({e})", "{d}.clear()")


def program(rng) -> str:
    names, places = rng.sample(NAMES, rng.choice([1, 2, 5])), rng.sample(PLACES, rng.choice([1, 2]))

    def key():
        one = rng.choice(names) if rng.random() < .9 else "'k'"
        return one if rng.random() < .8 else f"({one}, {rng.choice(names)})"

    def line():
        value = rng.choice(["1.0", "2.0", "x.sum()"])
        return rng.choice(STATEMENTS).format(d=rng.choice(places), e=rng.choice(places), k=key(), l=key(), v=value)
    return "\n    ".join(["def f(x, o, d, e, n, a, b):", "r = []", *(line() for _ in range(rng.randint(1, 5))), "return x + 1, r\n"])


class History:
    """A program, the objects that may be keys, and what is found at the names and places."""

    def __init__(self, rng):
        self.rng, self.text = rng, program(rng)
        self.functions = [self.made(), self.made()]
        self.compiled = minicompile.compile(self.functions[0], backend="eager", dynamic=rng.choice([None, False]))
        self.kinds = [*KINDS] if rng.random() < .3 else [rng.choice([*KINDS])]
        self.classes = CLASSES if rng.random() < .5 else [dict]
        self.objects = [self.key() for _ in range(rng.choice([2, 3, 5]))]
        self.keys = {name: rng.choice(self.objects) for name in NAMES}
        self.tables = {place: self.table(self.items()) for place in PLACES}

    def made(self):
        namespace = {}
        exec(compile(self.text, "<history>", "exec"), namespace)
        return namespace["f"]

    def key(self):
        rng = self.rng
        key = KINDS[rng.choice(self.kinds)](rng)
        return key if rng.random() < .7 else (key, 1) if rng.random() < .5 else (key, KINDS[rng.choice(self.kinds)](rng))

    def value(self):
        return self.rng.choice([0.0, 1.0, 2.0, 2, X * 2])

    def items(self):
        return [(self.rng.choice([*self.objects, "k"]), self.value()) for _ in range(self.rng.randrange(4))]

    def table(self, items, like=None):
        made = self.rng.choice(self.classes)() if like is None else type(like)()
        if type(made) is collections.defaultdict:
            made.default_factory = float
        for key, value in items:
            dict.__setitem__(made, key, value) if type(made) is dict else made.__setitem__(key, value)
        return made

    def change(self):
        rng = self.rng
        place, name = rng.choice(PLACES), rng.choice(NAMES)
        table = self.tables[place]
        action = rng.randrange(7)
        if action == 0:
            table[rng.choice(self.objects)] = self.value()
        elif action == 1 and table:
            del table[rng.choice([*table])]
        elif action == 2:
            self.tables[place] = self.table(self.items())
        elif action == 3:
            self.tables[place] = self.table([*table.items()][::rng.choice([1, -1])])
        elif action == 4:
            self.keys[name] = rng.choice(self.objects)
        elif action == 5:
            self.replace(rng.randrange(len(self.objects)))
        elif action == 6 and rng.random() < .3:
            self.tables["d"] = self.tables["D"]

    def replace(self, i):
        """Another object for one that may be a key, and takes its place there or not; it may get the address of the old one."""
        old, moved = id(self.objects[i]), self.rng.random() < .5
        known = {place: [(id(key), key, value) for key, value in table.items()] for place, table in self.tables.items()}
        bound = [name for name, key in self.keys.items() if key is self.objects[i]]
        self.keys.update(dict.fromkeys(bound))
        for place, items in known.items():
            self.tables[place].clear()
            known[place] = [(None if number == old else key, number == old, value) for number, key, value in items]
        items = self.objects[i] = None
        new = self.objects[i] = self.key()
        self.keys.update(dict.fromkeys(bound, new))
        for place, items in known.items():
            for key, was_old, value in items:
                if not was_old or moved:
                    self.tables[place][new if was_old else key] = value

    def call(self, function, of, tables):
        of.__globals__.update(D=tables["D"], G=self.keys["G"], H=self.keys["H"])
        o = types.SimpleNamespace(key=self.keys["o.key"], table=tables["o.table"])
        try:
            return function(X, o, tables["d"], tables["e"], {"in": tables["n['in']"]}, self.keys["a"], self.keys["b"])
        except Exception as error:
            return type(error)

    def run(self, calls: int):
        """Raises AssertionError at a difference."""
        for step in range(calls):
            for _ in range(self.rng.choice([0, 0, 1, 1, 2, 3])):
                self.change()
            copies = {id(table): self.table(table.items(), table) for table in self.tables.values()}
            expected = {place: copies[id(table)] for place, table in self.tables.items()}
            answers = self.call(self.compiled, self.functions[0], self.tables), self.call(self.functions[1], self.functions[1], expected)
            for got, wanted in (answers, (self.tables, expected)):
                assert same(got, wanted), f"call {step} of\n{self.text}\ngave {got} instead of {wanted}, the keys being {self.keys}"
            answers = got = wanted = None


def same(a, b) -> bool:
    if a is b or type(a) is not type(b):
        return a is b
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same([*a], [*b]) and same([*a.values()], [*b.values()])
    if isinstance(a, set):
        return a == b
    return same_tensor(a, b) if isinstance(a, torch.Tensor) else isinstance(a, (str, int, float)) and a == b


if __name__ == "__main__":
    main(__doc__, History, "history", "histories", 60)
