"""Random programs for chapters/tiny.py, and what changes between their calls: `python -m tests.programs.tiny [FIRST SEED] [COUNT]`.

A program is text: a function made in another one, which reads its arguments, defaults, cells, globals, attributes, lists and dictionaries
and calls other functions. Between its calls one of them changes: a value, its type, a tensor's shape, layout, dtype or whether it requires
a gradient, which of two names lead to one object, the default of a function. After each change the compiled function has to do
what Python does: give the same results or exception, write the same, and let the same gradients flow.

Another kind of program is arithmetic alone, on small tensors of numbers and truth values, so that the generated kernels have to compute
what eager computes."""
from __future__ import annotations

import random
import sys
import types

import torch
import torch.nn.functional as F

from chapters import tiny

WORLD = """
import collections
import enum
import functools
import torch
import torch.nn.functional as F

G, H = 2, torch.ones(3)
items, table, log = [1, 2.0], {'a': 3, 'b': H}, []


class Base:
    shared = 4

    def scaled(self, x, by=2, *, more=0):
        return x * by + self.own + more

    @property
    def twice(self):
        return self.own * 2

    @classmethod
    def built(cls, x):
        return x * cls.shared

    @staticmethod
    def plain(x, by=3):
        return x * 3 + by

    def __call__(self, x):
        return x + self.shared


class Sub(Base):
    def scaled(self, x, by=5, **more):
        return super().scaled(x, by) * len(more)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.k = torch.nn.Parameter(torch.ones(3)), 1.5
        self.register_buffer('offset', torch.zeros(3))

    def forward(self, x, by=1):
        return x * self.weight * by + self.offset + self.k if self.training else x * 2 + self.k


box, layer = Base(), Layer()
box.own, box.inner = 5, Base()
box.inner.own = 6


def helper(x, by=2, *rest, more=1.0, **named):
    return x * by + more + G + len(rest) * 5 + len(named)


def counted(x, times=2):
    return sum([x * i for i in range(times)])


def wrapper(*args, **kwargs):
    return helper(*args, **kwargs) * 2


wrapper.__wrapped__ = helper
adders = [lambda x, k=k: x + k for k in (1, 2.5)]
keyed = [lambda x, *, k=k: x * k for k in (1, 2.5)]


class Silent(int):
    def __repr__(self):
        return '2'


class Mode(enum.IntEnum):
    LOW = 2
    HIGH = 3


class Asked:
    def __init__(self):
        self.answers = {'own': 1}

    def __getattr__(self, name):
        return self.answers[name]

    @functools.cached_property
    def cached(self):
        return self.answers['own'] * 2


class Slots:
    __slots__ = ('own',)


Pair = collections.namedtuple('Pair', 'a b')
ordered, stack, queue, pair = collections.OrderedDict(a=1, b=2.0), type('Stack', (list,), {})([1, 2]), collections.deque([1, 2]), Pair(1, 2)
asked, slots, mode, silent = Asked(), Slots(), Mode.LOW, Silent(3)
slots.own, nested = 2, {'p': [1, {'q': 2.0}], 1: (3, [4])}
stages = torch.nn.Sequential(torch.nn.Identity(), Layer())
parts = torch.nn.ModuleDict({'one': Layer()})


def maker(k):
    return lambda x: x * k


made = [maker(3), maker(4.5)]
"""
ATOMS = ("y k c d G H box.own box.inner.own box.shared box.twice items[0] items[-1] table['a'] table['b'] len(items) layer.weight "
         "layer.k layer.offset x.shape[0] x.dim() n m 3 0.5 ordered['a'] stack[0] queue[0] pair.a pair[1] asked.own asked.cached slots.own "
         "mode silent mode.value nested['p'][1]['q'] nested[1][1][0] stages[1].k parts['one'].k sum(stack) sum(ordered.values()) "
         "max(items[:1]) "
         "x.is_leaf table.get('z',1) min(n,2) float(n) nested['p'][0] sum(pair) len(stages) len(queue) max(2,n)").split()
CALLS = ["helper({0})", "helper({0}, {1})", "helper({0}, more={1})", "helper({0}, {1}, 7, other=8)", "counted({0})", "counted({0}, 3)",
         "wrapper({0})", "wrapper({0}, more={1})", "box.scaled({0})", "box.scaled({0}, {1})", "box.scaled({0}, more={1})", "box.built({0})",
         "box.plain({0})", "Base.plain({0}, {1})", "box({0})", "layer({0})", "layer({0}, by={1})", "adders[0]({0})", "adders[1]({0})",
         "keyed[0]({0})", "keyed[1]({0}, k={1})", "made[0]({0})", "made[1]({0})", "g({0})", "torch.sin({0} * 1.0)", "F.relu({0} + -1.0)",
         "bound({0})", "inner({0})", "inner({0}, {1})", "inner({0}, b={1})", "({0} + torch.ones(3))", "stages({0})",
         "parts['one']({0})", "({0} + torch.tensor(2.5))", "({0} * torch.full((1,), 3)).reshape(-1)",
         "torch.stack([{0} * 1, {0} * 2]).sum(0)",
         "{0}.to(torch.float64)", "{0}.sum(-1, keepdim=True)", "{0}[..., :1]", "torch.where({0} > 1, {0} * 1, {1})"]
CONDITIONS = ["{0} is {1}", "isinstance({0}, torch.Tensor)", "isinstance({0}, int)", "isinstance({0}, bool)", "type({0}) is float",
              "x.requires_grad", "x.dtype is torch.float32", "x.is_contiguous()", "y is None", "{0} is not None", "'a' in table", "items",
              "len(items) > 2", "c", "n > 2", "not layer.training", "box.own == 5", "isinstance(box, Sub)", "hasattr(box, 'own')",
              "x.shape == (3,)", "callable(g)", "x.stride(0) == 1", "type(x) is torch.Tensor",
              "isinstance(x, torch.nn.Parameter)", "isinstance(x, (int, torch.Tensor))", "x.grad is None", "x.grad_fn is None", "x.is_leaf",
              "mode is Mode.LOW", "mode == 2", "silent == 3", "1 in stack", "queue", "stack", "2 in pair", "'a' in ordered", "asked.own",
              "isinstance(stages, torch.nn.Sequential)", "type(stages) is torch.nn.Sequential", "type(layer.weight) is torch.nn.Parameter",
              "[*ordered] == ['a', 'b']", "str(y) == '1'", "f'{{n}}' == '2'", "any(e is None for e in items)", "sorted([n, 1])[0] == 1",
              "{0} is table['a']", "box is box.inner", "items is stack", "{0} == 2", "table == {{'a': 3}}", "None in (y, n)",
              "torch.is_grad_enabled()"]


def expression(rng, names, depth=0):
    if depth == 2 or rng.random() < 0.25:
        return rng.choice(names)
    left, right = (expression(rng, names, depth + 1) for _ in range(2))
    kind = rng.random()
    if kind < 0.3:
        return f"({left} {rng.choice('+*')} {rng.choice([*names, *ATOMS])})"
    if kind < 0.8:
        return rng.choice(CALLS).format(left, rng.choice(ATOMS))
    if kind < 0.9:
        return f"({left} if {condition(rng)} else {right})"
    return f"[e * {rng.choice(ATOMS)} for e in [{left}, {right}]][{rng.choice([0, 1, -1])}]"


def condition(rng):
    return rng.choice(CONDITIONS).format(*rng.choices(ATOMS, k=2))


def program(rng):
    """The text of a program: `make(c, d)` returns the function to compile."""
    names, lines = ["x"], [f"def inner(a, b={rng.choice(ATOMS[:12])}): return a * b + {rng.choice(['c', 'k', 'x', 'G'])}"]
    for n in range(rng.randrange(1, 5)):
        kind, value = rng.random(), expression(rng, names)
        if kind < 0.55:
            lines.append(f"v{n} = {value}")
        elif kind < 0.7:
            lines.append(f"v{n} = {value}\n        if {condition(rng)}:\n            v{n} = v{n} + {rng.choice(ATOMS)}")
        elif kind < 0.8:
            over = rng.choice(["items", "table.values()", "(x, y)", "enumerate(items)", "zip(items, (x, k))", "range(n)", "stack", "queue",
                               "ordered.values()", "pair", "reversed(items)", "list(table.values())[:1]", "nested[1][1]",
                               "[layer.k, *items]"])
            lines.append(f"v{n} = {rng.choice(names)}\n        for e in {over}:\n            v{n} = v{n} + "
                         + ("e[0] * e[1]" if over[0] in "ez" else "e"))
        elif kind < 0.9:
            effect = rng.choice(["log.append(n)", "print(end='')", "box.own = box.own + 1", "items.append(n)", "table['c'] = n",
                                 "log.append(float(x.sum()))", "x.sum().item()", "G = 7"])
            lines.append(f"v{n} = {value}\n        {effect}")
        else:
            lines.append(f"v{n} = (lambda q, p={rng.choice(ATOMS[:12])}: q * p)({value})")
        names.append(f"v{n}")
    result = ", ".join(rng.sample(names, min(len(names), 2))) + rng.choice(["", ", [x, y]", ", {'y': y, 'k': k}", ", box.own", ", inner"])
    scope = "        global G\n" if any("G = 7" in line for line in lines) else ""
    body = "".join(f"        {line}\n" for line in [*lines, f"return {result}"])
    return f"{WORLD}\ndef make(c, d):\n    def f(x, y=1, n=2, *, k=3.0, g=helper, bound=box.scaled, m=0):\n{scope}{body}    return f\n"




def with_gradient():
    t = torch.ones(3).requires_grad_()
    (t * 3).sum().backward()
    return t


TENSORS = [lambda: torch.arange(3.0), lambda: torch.arange(3.0), lambda: torch.arange(3), lambda: torch.arange(3.0).double(),
           lambda: torch.arange(3.0).requires_grad_(), lambda: torch.arange(6.0)[::2], lambda: torch.ones(2, 3), lambda: torch.tensor(2.0),
           lambda: torch.ones(3, dtype=torch.bool), lambda: torch.ones(1), lambda: torch.nn.Parameter(torch.ones(3)),
           lambda: torch.ones(3).requires_grad_() * 2, with_gradient, lambda: torch.ones(3, dtype=torch.bfloat16)]
SCALARS = [0, 1, 2, 3, 1.0, 2.0, -0.0, 0.0, True, False, None, float("nan"), "text", 2**70, 1j]


def some_value(rng, w):
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(SCALARS[:10] if kind < 0.4 else SCALARS)
    return rng.choice([*w["pool"], w["box"].own, w["items"][0] if w["items"] else 0, w["G"], w["H"]])


def cell(f, name, value):
    if name in f.__code__.co_freevars:
        f.__closure__[f.__code__.co_freevars.index(name)].cell_contents = value


def change(rng, w):
    """Change one thing of the world `w`, or of the arguments of the next call."""
    value, f = some_value(rng, w), w["f"]
    function = rng.choice([w["helper"], w["counted"], *w["adders"], w["Base"].scaled, w["Base"].plain, w["Layer"].forward])
    sub = w["Sub"]()
    sub.own = value
    number = rng.choice([v for v in SCALARS[:8]])
    module = w["Layer"]()
    module.k = number
    rng.choice([
        lambda: w.update(G=value), lambda: w.update(H=value), lambda: setattr(w["box"], "own", value),
        lambda: setattr(w["box"].inner, "own", value), lambda: setattr(w["Base"], "shared", value),
        lambda: w["box"].__dict__.update(shared=value), lambda: w["box"].__dict__.pop("shared", None),
        lambda: w["items"].__setitem__(slice(0, 1), [value]), lambda: w["items"].append(value), lambda: w["items"].pop(),
        lambda: w["items"].reverse(), lambda: w["table"].update(a=value), lambda: w["table"].update(z=value),
        lambda: w["table"].update(b=w["table"].pop("b")), lambda: w.update(box=sub), lambda: w.update(box=w["box"].inner),
        lambda: setattr(function, "__defaults__", (value,)), lambda: w["helper"].__kwdefaults__.update(more=value),
        lambda: setattr(w["keyed"][0], "__kwdefaults__", {"k": value}), lambda: w["adders"].reverse(), lambda: w["keyed"].reverse(),
        lambda: w["made"].reverse(), lambda: cell(w["made"][0], "k", value), lambda: cell(f, "c", value), lambda: cell(f, "d", value),
        lambda: setattr(w["layer"], "k", value), lambda: setattr(w["layer"], "training", not w["layer"].training),
        lambda: setattr(w["layer"], "weight", torch.nn.Parameter(torch.ones(3) * 2)), lambda: w.update(layer=module),
        lambda: w["layer"].weight.requires_grad_(not w["layer"].weight.requires_grad),
        lambda: setattr(f, "__defaults__", (value, 2)), lambda: f.__kwdefaults__.update(k=value),
        lambda: f.__kwdefaults__.update(g=rng.choice([*w["adders"], *w["keyed"], *w["made"],
                                                      *(w[name] for name in ("helper", "box", "layer", "wrapper"))])),
        lambda: f.__kwdefaults__.update(bound=rng.choice([w["box"].scaled, w["box"].inner.scaled, sub.scaled, w["Base"].plain,
                                                          types.MethodType(w["helper"], value), w["layer"].forward, w["Base"].built])),
        lambda: w.update(helper=rng.choice([w["counted"], w["adders"][0], w["made"][0], w["other"]["helper"]])),
        lambda: w["ordered"].update(a=value), lambda: w["ordered"].move_to_end("a"), lambda: w["stack"].__setitem__(0, value),
        lambda: w["queue"].__setitem__(0, value), lambda: w["queue"].append(value), lambda: w.update(pair=w["Pair"](value, value)),
        lambda: w["asked"].answers.update(own=value), lambda: w["asked"].__dict__.pop("cached"), lambda: setattr(w["slots"], "own", value),
        lambda: w.update(mode=w["Mode"].HIGH), lambda: w.update(mode=2), lambda: w.update(silent=w["Silent"](rng.randrange(9))),
        lambda: w.update(silent=2), lambda: w["nested"]["p"][1].update(q=value), lambda: w["nested"].update({1: (3, [value])}),
        lambda: w.update(nested={"p": [1, {"q": 2.0}], True: (3, [4])}), lambda: w.update(G=w["silent"]), lambda: w.update(H=w["silent"]),
        lambda: setattr(w["stages"][1], "k", value), lambda: w["stages"].append(w["layer"]), lambda: w["parts"].update({"one": module}),
        lambda: torch.set_default_dtype(rng.choice([torch.float32, torch.float64])), lambda: w["layer"].eval(),
        lambda: w["layer"].register_forward_hook(lambda layer, given, made: made * 2),
        lambda: setattr(w["layer"], "forward", w["adders"][0]),
        lambda: setattr(w["layer"], "offset", rng.choice(w["pool"][:2])), lambda: w["layer"].weight.data.mul_(2), lambda: w["H"].add_(1),
        lambda: w["items"].clear(), lambda: w["items"].extend([value, value]),
        lambda: w.update(arguments=[rng.choice(w["pool"]), *([value] * (rng.random() < 0.5))]),
        lambda: w.update(arguments=[rng.choice(w["pool"])] * 2), lambda: w.update(named={"m": value, "n": number}),
        lambda: w.update(named={})])()


def outcome(f, w):
    """What a call does, as data: its result or exception, gradients, and what it wrote."""
    w["log"].clear()
    try:
        result = f(*w["arguments"], **w["named"])
    except Exception as error:
        return type(error).__name__
    leaves, known = [], {id(t): k for k, t in enumerate(w["pool"])}

    def plain(x):
        if isinstance(x, torch.Tensor):
            leaves.append(x)
            return (x.dtype, tuple(x.shape), x.requires_grad, known.get(id(x)), repr(x.detach().tolist()))
        if isinstance(x, types.FunctionType):
            return x.__name__, plain(x.__defaults__), plain(x.__kwdefaults__)
        if isinstance(x, (list, tuple)):
            return type(x), [plain(e) for e in x]
        return (dict, [(k, plain(v)) for k, v in x.items()]) if isinstance(x, dict) else (type(x), repr(x))
    gradients = []
    shown = plain(result)
    wanted = [t for t in [*w["pool"], w["layer"].weight, w["H"]] if isinstance(t, torch.Tensor) and t.requires_grad]
    for t in leaves:
        if t.requires_grad and wanted:
            found = torch.autograd.grad(t.abs().sum(), wanted, allow_unused=True, retain_graph=True)
            gradients.append([None if g is None else g.tolist() for g in found])
    seen = [repr(w["log"]), plain(w["items"]), plain(w["table"]), plain(w["box"].__dict__.get("own")), plain(w["G"])]
    return shown, repr(gradients), seen


def state(w):
    """[(list or dictionary that a program writes to, what is in it)]."""
    objects = [vars(x) for x in (w["box"], w["box"].inner)]
    return [(place, place.copy()) for place in (w["items"], w["table"], *objects)] + [(w, {"G": w["G"]})]


def restore(kept):
    for place, before in kept:
        if isinstance(place, list):
            place[:] = before
        else:
            if "G" not in before:
                place.clear()
            place.update(before)


def difference(seed, calls=12, backend=tiny.eager):
    """None, or (the text of the program, the call's number, what Python did, what tiny did)."""
    before = torch.get_default_dtype()
    try:
        return first_difference(seed, calls, backend)
    finally:
        torch.set_default_dtype(before)


def first_difference(seed, calls, backend):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    text, w, other = program(rng), {"__name__": "world"}, {"__name__": "other"}
    exec(compile(text, f"<program {seed}>", "exec"), w)
    exec(compile(text, f"<program {seed}>", "exec"), other)
    w["Base"].inner = w["box"].inner
    w["Base"].own = 9
    w["other"], other["G"] = other, 11
    w["pool"] = [make() for make in TENSORS]
    w["f"] = f = w["make"](rng.choice(SCALARS[:8]), rng.choice(w["pool"]))
    w["arguments"], w["named"] = [w["pool"][0]], {}
    compiled = tiny.compile(f, backend)
    torch.set_default_dtype(torch.float32)
    for n in range(calls):
        kept = state(w)
        right = outcome(f, w)
        restore(kept)
        ours = outcome(compiled, w)
        restore(kept)
        if ours != right:
            return text[len(WORLD):], n, right, ours
        for _ in range(rng.choice([0, 1, 1, 2])):
            try:
                change(rng, w)
            except (RuntimeError, ValueError, AttributeError, IndexError, KeyError, TypeError):
                pass
    return None


# ---- generated kernels: elementwise operations, reductions and views of numbers and truth values ------------------------

EXACT = ["{x} + {y}", "{x} - {y}", "{x} * {s}", "{x} + {s}", "{s} - {x}", "-{x}", "torch.abs({x})", "torch.relu({x})",
         "torch.maximum({x}, {y})", "torch.where({x}, {y}, {z})", "{x}.masked_fill({y}, {s})",
         "torch.where({x}, {y}, {s})", "{x} & {y}", "{x} | {y}", "{x} & {s}",
         "torch.logical_not({x})", "~{x}", "{x}.to(torch.bool)", "{x}.to(torch.float32)", "{x}.clone()", "{x}.t()", "{x}.transpose(0, {d})",
         "{x}.reshape(-1)", "{x}[None]", "{x}[1:]", "{x}[..., ::2]", "{x}[..., -1]", "{x}.unsqueeze({d})", "{x}.expand(2, *{x}.shape)",
         "{x}.flip(0)", "{x}.sum({d})", "{x}.sum()", "{x}.amax({d}, keepdim=True)", "{x}.sum(({d}, {e}))", "{x} * {y}", "{x}.detach()",
         "torch.ones_like({x})", "torch.cat([{x}, {y}])", "{x}.view(torch.int32)", "{x}.any()", "{x}.contiguous()"]
COMPARISONS = ["{x} > {y}", "{x} <= {y}", "{x} == {y}", "{x} != {y}", "{x} >= {s}", "{x} < {s}", "{x} == {s}"]
ROUNDED = [*COMPARISONS, "torch.exp(-torch.abs({x}))", "torch.sin({x})", "torch.cos({x})", "torch.tanh({x})", "torch.erf({x})",
           "torch.sigmoid({x})", "torch.sqrt(torch.abs({x}) + 0.5)", "torch.rsqrt(torch.abs({x}) + 1)", "torch.log(torch.abs({x}) + 1)",
           "{x} / (torch.abs({y}) + 1)", "{x} / 3", "{y} / ({x} | True)", "torch.reciprocal(torch.abs({x}) + 2)", "torch.softmax({x}, {d})",
           "F.gelu({x})", "F.layer_norm({x}, {x}.shape[-1:])", "{x}.mean({d})", "{x}.var({d})", "{x} ** 2", "{x} ** 1.5", "{x} @ {x}.t()",
           "torch.exp({x} | {y})", "torch.reciprocal({x} | True)", "F.dropout({x}, 0.0)", "F.silu({x})"]
NUMBERS = [2, -3, 0.5, 0, 1, True, False, 2**40, 1e-3, -0.25]


def kernel_program(rng):
    """(text of a function of tensors, its arguments)."""
    shape = rng.choice([(4, 6), (6, 4), (3, 1), (1, 5), (8,), (2, 3, 4), (17, 33), (5, 40), (1,), (), (2, 0)])
    given = {"a": torch.randint(-8, 9, shape) / 4, "b": torch.randint(-8, 9, shape[rng.randrange(len(shape) + 1):]) / 4,
             "m": torch.rand(shape) > 0.5, "n": torch.rand(shape) > 0.3, "i": torch.randint(-3, 4, shape)}
    for name in "ab":
        given[name].requires_grad_(rng.random() < 0.5)
    known, exact, lines = dict(given), set(given), []
    for k in range(rng.randrange(2, 9)):
        form, names = rng.choice(EXACT + ROUNDED), rng.choices(list(known), k=3)
        used = {name for name, place in zip(names, "xyz") if f"{{{place}}}" in form}
        if form in COMPARISONS and not used <= exact:               # rounding would decide
            continue
        text = form.format(**dict(zip("xyz", names)), s=rng.choice(NUMBERS), d=rng.randrange(-1, 3), e=rng.randrange(3))
        try:
            value = eval(text, {"torch": torch, "F": F}, known)
        except (RuntimeError, IndexError, TypeError):               # eager refuses it
            continue
        if value.numel() < 20000 and not (value.dtype.is_floating_point and value.numel() and value.detach().abs().amax() > 1e15):
            known[f"v{k}"] = value
            lines.append(f"    v{k} = {text}\n")
            exact |= {f"v{k}"} if form in EXACT and used <= exact else set()
    made = [name for name in known if name not in given] or ["a"]
    return f"def f({', '.join(given)}):\n{''.join(lines)}    return [{', '.join(rng.sample(made, min(3, len(made))))}]\n", given


def kernel_difference(seed, backend=tiny.loops):
    """None, or (the text of the program, what differs)."""
    torch.manual_seed(seed)
    text, given = kernel_program(random.Random(seed))
    space = {"torch": torch, "F": F}
    exec(compile(text, f"<kernels {seed}>", "exec"), space)
    wanted = [t for t in given.values() if t.requires_grad]
    found = []
    for f in (space["f"], tiny.compile(space["f"], backend)):
        results = f(**given)
        ends = [r for r in results if r.requires_grad]
        found.append([*results, *(torch.autograd.grad([r.sum() for r in ends], wanted, allow_unused=True) if ends else ())])
    for k, (right, ours) in enumerate(zip(*found, strict=True)):
        right, ours = [torch.zeros(()) if t is None else t.detach() for t in (right, ours)]
        if (right.dtype, right.shape, right.stride()) != (ours.dtype, ours.shape, ours.stride()) and right.numel() > 1 and (
                right.dtype, right.shape) != (ours.dtype, ours.shape):
            return text, f"value {k}: {right.dtype} {list(right.shape)}, tiny {ours.dtype} {list(ours.shape)}"
        size = float(right.double().abs().nan_to_num(0, 0, 0).amax()) if right.numel() else 0
        if not torch.allclose(right.double(), ours.double(), rtol=1e-4, atol=1e-5 * (1 + size), equal_nan=True):
            return text, f"value {k}: {right.tolist()}, tiny {ours.tolist()}"
    return None


def main(first=0, count=1000):
    found = 0
    for seed in range(int(first), int(first) + int(count)):
        if problem := difference(seed):
            text, n, right, ours = problem
            print(f"seed {seed}, call {n}\n{text}\nPython: {right}\ntiny:   {ours}\n", flush=True)
            found += 1
        if problem := kernel_difference(seed):
            print(f"seed {seed}", *problem, sep="\n", end="\n\n", flush=True)
            found += 1
    print(f"{found} of {2 * int(count)} programs differ")


if __name__ == "__main__":
    main(*sys.argv[1:])
