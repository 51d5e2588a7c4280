"""Random programs dense in expressions: a function of tensors of all dtypes returns dozens of trees of pointwise operators, some with a
reduction on top.

Faults of what prints kernels, and of the compilers below it, lie in how two or three scalar operations meet on values at the ends of a
dtype. So one program, which is compiled once, has hundreds of operations, and is called with extremes of integers, zeros of both
signs, NaN, infinities, subnormal numbers, and numbers that lie in the middle between two halves.

All operators here are exactly rounded, and what eager leaves open is kept out of reach, so that compiled answers must be eager's to the
last bit (`EXACT`; `compare.py`). What is kept out: a conversion to an integer that does not hold the number, a divisor 0, or -1 below
the least integer, which ends a process; the sign of a NaN; the sign of the zero that is the larger of two; `sqrt`, which eager's vectors
do not round exactly on a CPU; and halves that were computed and not rounded yet, except as operands of what a compiler has to round
for; some programs ask for rounding everywhere (`OPTIONS`). A tree is written by running it, so eager says which operators a dtype has."""
from __future__ import annotations

import random
import re
import warnings
from typing import NamedTuple

import torch

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
HALVES = [torch.float16, torch.bfloat16]
FLOATS = [*HALVES, torch.float32, torch.float64]
DTYPES = [torch.bool, *INTEGERS, *FLOATS]
IN_HALVES = [torch.bool, torch.uint8, torch.int8]       # whose numbers are all halves
COLUMNS = [1, 3, 7, 8, 15, 16, 17, 31, 32, 33, 47, 64, 100]

HEAD = '''import torch
DEVICE = {device!r}
EXACT = True
OPTIONS = {options!r}

def inside(x, low, high, other):
    return torch.where((x > low) & (x < high), x, other)

def divisor(n, other):
    return torch.where((n == 0) | (n == -1), other, n)

def special(dtype):
    if dtype is torch.bool:
        return torch.tensor([False, True])
    if not dtype.is_floating_point:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        near = [n for k in range(64) for n in (2**k - 1, 2**k, -2**k, 1 - 2**k) if low <= n <= high]
        return torch.tensor([low, low + 1, high, high - 1] * 6 + near, dtype=dtype)
    f = torch.finfo(dtype)
    ties = [2049.0, 2051.0, 257.0, 259.0, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 65519.0, 65520.0, 2.0**-25, 3 * 2.0**-25]
    limits = [2.0**k for k in (7, 8, 15, 16, 31, 32, 63)]
    limits += [2.0**24 + 1, 127.0, 127.5, 255.0, 255.5, 32767.0, 65504.0, 2.0**31 - 1, 2.0**53 - 1]
    small = [f.tiny, f.tiny * f.eps, f.tiny * 0.75, torch.finfo(torch.float16).tiny / 3]
    near = [0.0] * 4 + [0.5, 1.5, 2.5, 1.0, 1 + f.eps, 1 - f.eps / 2, f.max, f.max / 2, float("inf"), float("nan")] + ties + limits + small
    return torch.tensor([x for y in near for x in (y, -y)], dtype=torch.float64).to(dtype)

def inputs(seed, R, C):
    generator = torch.Generator().manual_seed(seed)
    def values(dtype, *size):
        def some(low, high):
            return torch.randint(low, high, size, generator=generator)
        table, kind = special(dtype), some(0, 10)
        plain = some(0, 2) if dtype is torch.bool else some(-9, 10)
        if dtype.is_floating_point:
            plain = plain / 4
            wide = torch.randn(size, generator=generator, dtype=torch.float64) * 2.0 ** some(-16, 20)
        else:
            wide = some(-2**62, 2**62) * 3 >> some(0, 60)
        return torch.where(kind < 4, table[some(0, len(table))], torch.where(kind < 7, plain.to(dtype), wide.to(dtype))).to(DEVICE)
'''


class Refused(Exception):
    """No operand fits, or eager does not take it."""


class Node(NamedTuple):
    text: str
    value: torch.Tensor                 # for the inputs of the first call
    rounded: bool = True                # a compiler has the number that eager has, or a half that it is still to round
    signed: bool = True                 # the sign of a zero is known


# ---- operators
#
# Operands: {d} of the dtype that is wanted, {b} bool, {i} some integer, {x} some float, {e} and {f} two of one dtype, {a} any;
# {by} an integer divisor; {z} of the dtype, with the signs of its zeros, {s} so and without NaN. Numbers: {c}, {k} of bits. {t} the dtype.

FORMS: dict = {"bool": [], "int": [], "float": []}      # kind of the result -> (weight, form, what it does to halves and zeros)


def forms(kinds: str, weight: float, effect: str, *texts: str) -> None:
    """effect: "moves" operands, "rounds" what it computes, is "sharp" where that jumps, so that a compiler rounds first; "unsigned" where
    the sign of a zero is not known."""
    for kind in kinds.split():
        FORMS[kind].extend((weight, text, effect) for text in texts)


forms("bool", 1.5, "sharp", "({e} < {f})", "({e} <= {f})", "({e} == {f})", "({e} != {f})", "({e} > {f})", "({e} >= {f})")
forms("bool", 0.5, "sharp", "({a} < {c})", "({a} >= {c})", "({a} == {c})", "({a} != {c})", "{a}.to(torch.bool)", "({e} > {a})",
      "({e} <= {a})")
forms("bool", 0.7, "sharp", "({b} & {b})", "({b} | {b})", "({b} ^ {b})", "(~{b})", "torch.logical_and({a}, {a})",
      "torch.logical_or({e}, {b})", "torch.logical_xor({a}, {b})", "{a}.logical_not()", "{x}.isnan()", "{x}.isinf()", "{x}.isfinite()",
      "{i}.signbit()", "{s}.signbit()", "({b} + {b})", "({b} * {b})", "torch.where({b}, {b}, {b})", "torch.maximum({b}, {b})",
      "torch.minimum({b}, {b})", "torch.isposinf({x})")
forms("int", 1.2, "moves", "({d} + {d})", "({d} - {d})", "({d} * {d})", "(-{d})", "{d}.abs()", "torch.maximum({d}, {d})",
      "torch.minimum({d}, {d})", "torch.where({b}, {d}, {d})", "convert")
forms("int", 0.7, "moves", "({d} // {by})", "({d} % {by})", "torch.div({d}, {by}, rounding_mode='trunc')", "torch.fmod({d}, {by})",
      "({d} & {d})", "({d} | {d})", "({d} ^ {d})", "(~{d})", "({d} << {k})", "({d} >> {k})", "({d} + {c})", "({c} - {d})", "({d} * {c})",
      "{d}.sign()", "torch.clamp({d}, {c}, {c})", "{d}.clamp({d}, {d})", "{d}.clamp(min={c})", "{d}.clamp(max={c})",
      "torch.where({b}, {d}, {c})", "torch.where({b}, {c}, {d})", "{d}.masked_fill({b}, {c})", "({d} + {b})", "({d} * {b})", "({b} - {d})")
forms("int", 0.4, "moves", "({d} << ({d} & {k}))", "({d} >> ({d} & {k}))", "({d} << {d})", "({d} >> {d})", "({d} // {c})", "({d} % {c})",
      "torch.div({d}, {c}, rounding_mode='trunc')", "torch.fmod({d}, {c})", "({d} & {c})", "({d} | {c})", "({d} ^ {c})", "{d}.square()",
      "({d} ** 3)", "torch.sub({d}, {d}, alpha=3)", "torch.add({d}, {d}, alpha=-2)",
      "torch.bitwise_not({d})", "torch.clamp({d}, max={d})", "torch.relu({d})", "bits")
forms("float", 1.2, "rounds", "({d} + {d})", "({d} - {d})", "({d} * {d})", "({d} / {z})", "({d} + {c})", "({d} * {c})", "({c} - {d})")
forms("float", 1.0, "moves", "(-{d})", "convert", "convert", "torch.where({b}, {d}, {d})", "{d}.nan_to_num({c})")
forms("float", 0.5, "moves", "torch.where({b}, {d}, {c})", "{d}.masked_fill({b}, {c})", "{d}.nan_to_num({c}, {c}, {c})", "{d}.abs()")
forms("float", 0.8, "moves unsigned", "torch.maximum({d}, {d})", "torch.minimum({d}, {d})", "torch.clamp({d}, {c}, {c})")
forms("float", 0.4, "moves unsigned", "torch.fmax({d}, {d})", "torch.fmin({d}, {d})", "{d}.clamp(min={c})", "{d}.clamp(max={c})",
      "{d}.clamp({d}, {d})", "torch.relu({d})", "torch.heaviside({d}, {d})",
      "torch.nn.functional.hardtanh({d})", "torch.nn.functional.relu6({d})")
forms("float", 0.5, "sharp", "{d}.floor()", "{d}.ceil()", "{d}.trunc()", "{d}.round()")
forms("float", 0.3, "sharp unsigned", "{d}.sign()")
forms("float", 0.3, "rounds", "torch.fmod({d}, {d})", "torch.remainder({d}, {d})", "({d} // {z})", "{d}.square()",
      "torch.div({d}, {z}, rounding_mode='trunc')", "{d}.frac()", "{z}.reciprocal()", "({d} % {c})", "torch.fmod({d}, {c})")
forms("float", 0.3, "moves", "torch.copysign({d}, {s})", "torch.copysign({d}, {c})")
forms("float", 0.2, "rounds", "({i} / {i})", "({i} * {c})", "({i} - {c})", "torch.where({b}, {i}, {x})")
forms("int float", 0.2, "moves unsigned", "{d}.amax({dim}, keepdim=True)", "{d}.amin({dim}, keepdim=True)", "{d}.flip({dim})",
      "{d}[..., :1]")
forms("int", 0.2, "moves", "{i}.sum({dim}, keepdim=True)", "{b}.sum({dim}, keepdim=True)", "{a}.argmax({dim}, keepdim=True)")
forms("bool", 0.1, "sharp", "{b}.any({dim}, keepdim=True)", "{a}.all({dim}, keepdim=True)")

NARROWING = ["inside({x}, {low}, {high}, {c}).to({t})", "{x}.clamp({least}, {most}).nan_to_num({c}).to({t})",
             "{x}.nan_to_num({c}, {most}, {least}).clamp({least}, {most}).to({t})", "inside({x}.round(), {low}, {high}, {c}).to({t})"]
REDUCTIONS = ["{a}.amax({dim})", "{a}.amin({dim})", "{a}.argmax({dim})", "{a}.argmin({dim})", "{a}.any({dim})", "{a}.all({dim})",
              "{i}.sum({dim})", "{i}.prod({dim})", "{b}.sum({dim})", "{a}.count_nonzero({dim})", "{i}.cumsum({dim})",
              "({e} - {e}.amax({dim}, keepdim=True))",
              "({e} >= {e}.amin({dim}, keepdim=True))", "{i}.sum({dim}, dtype=torch.int32)", "{a}.flip({dim})", "{a}.amax()", "{i}.sum()"]
SMALL = ["0", "1", "2", "3", "-1", "-2", "5", "7", "-3"]
LARGE = ["10", "127", "128", "255", "-128", "100", "32767", "-32768", "65535", "2**31 - 1", "-2**31", "2**62", "16"]
REAL = ["0.0", "-0.0", "0.5", "1.0", "-1.5", "2.0", "3.0", "0.1", "-2.5", "100.0", "65504.0", "1e-7", "float('inf')", "1e30"]
POWERS = ["2.0", "0.5", "-4.0"]         # by another number eager divides on a CPU, and multiplies with its reciprocal on a GPU
INEXACT = {"0.1", "1e-7", "1e30"}


def kind_of(dtype: torch.dtype) -> str:
    return "bool" if dtype is torch.bool else "float" if dtype.is_floating_point else "int"


def limits(source: torch.dtype, target: torch.dtype) -> dict:
    """What of a float is inside of an integer: beyond `low` and below `high`, or from `least` to `most`."""
    info, largest = torch.iinfo(target), torch.finfo(source).max
    low, high = float(max(info.min - 1, -2**63)), min(float(info.max + 1), largest)
    most = torch.tensor(min(float(info.max), largest), dtype=torch.float64).to(source)
    while int(most.item()) > info.max:
        most = (most.double() * (1 - torch.finfo(source).eps / 2)).to(source)
    return {"low": repr(max(low, -largest)), "high": repr(high), "least": repr(max(float(info.min), -largest)), "most": repr(most.item())}


class Writer:
    def __init__(self, seed: int, device: str):
        self.rng = random.Random(seed)
        self.on_gpu = device == "cuda"
        self.casts = self.rng.random() < 0.3        # a compiler rounds halves wherever eager does
        self.space: dict = {}
        self.leaves: dict = {}          # dtype -> nodes of inputs
        self.known: dict = {}           # dtype -> nodes that were written before

    def number(self, dtype: torch.dtype, form: str) -> str:
        kind = kind_of(dtype)
        if kind == "float":
            if re.search(r"// \{c\}|/ \{c\}", form):
                return self.rng.choice(POWERS)
            refused = ["1e30"] if self.on_gpu and form.startswith("torch.where") else []        # by eager, of halves
            return self.rng.choice([c for c in REAL + SMALL if c not in refused])
        if re.search(r"(//|%|div\(\{d\},|fmod\(\{d\},) ?\{c\}", form):
            size = 2 ** torch.iinfo(dtype).bits             # neither 0 nor -1, as the dtype has them
            return self.rng.choice([c for c in SMALL + LARGE if 0 < eval(c) % size < size - 1])
        return self.rng.choice(SMALL + SMALL + LARGE)

    def leaf(self, dtype: torch.dtype) -> Node:
        if dtype in self.leaves and (dtype not in self.known or self.rng.random() < 0.8):
            return self.rng.choice(self.leaves[dtype])
        if dtype in self.known and self.rng.random() < 0.5:
            return self.rng.choice(self.known[dtype])
        return self.converted(dtype, 0)

    def tree(self, dtype: torch.dtype, budget: int) -> Node:
        """Of about so many operators."""
        if budget <= 0:
            return self.leaf(dtype)
        table = FORMS[kind_of(dtype)]
        for _ in range(30):
            _, form, effect = self.rng.choices(table, [weight for weight, *_ in table])[0]
            try:
                if form == "convert":
                    return self.converted(dtype, budget - 1)
                node = self.bits(dtype, budget - 1) if form == "bits" else self.filled(form, effect, dtype, budget - 1)
            except Refused:
                continue
            if node.value.dtype is dtype:
                if len(node.text) < 120:
                    self.known.setdefault(dtype, []).append(node)
                return node
        return self.leaf(dtype)

    def operand(self, letter: str, dtype: torch.dtype, other: torch.dtype, budget: int) -> Node:
        rng = self.rng
        if letter in ("d", "z", "s"):
            of = dtype if dtype.is_floating_point or letter == "d" else rng.choice(FLOATS)
            if letter == "d" and rng.random() < 0.15:       # promoted
                of = rng.choice([t for t in (IN_HALVES if dtype in HALVES else DTYPES) if torch.promote_types(t, dtype) is dtype])
            node = self.tree(of, budget)
            if letter == "s":
                node = self.made("{0}.nan_to_num(1.0)", [node], node.rounded, node.signed)
            return node if letter == "d" or node.signed else self.made("{0}.abs()", [node], node.rounded)
        if letter == "by":
            node = self.tree(dtype, budget)
            if not dtype.is_signed:
                return self.made("({0} | 1)", [node])
            return self.made(rng.choice(["({0}.abs() + 2)", "divisor({0}, 3)", "divisor({0}, -5)", "(({0} & 15) + 1)"]), [node])
        of = {"b": torch.bool, "i": rng.choice(INTEGERS), "x": rng.choice(FLOATS), "e": other, "f": other, "a": rng.choice(DTYPES)}[letter]
        return self.tree(of, budget)

    def filled(self, form: str, effect: str, dtype: torch.dtype, budget: int) -> Node:
        """An operator with new operands."""
        rng = self.rng
        other = rng.choice([*self.leaves, *DTYPES])
        holes = re.findall(r"\{(\w+)\}", form)
        letters = [h for h in holes if h in ("d", "z", "s", "by", "b", "i", "x", "e", "f", "a")]
        shares = [rng.random() + 0.05 for _ in letters]
        operands = []
        for letter, share in zip(letters, shares):
            node = self.operand(letter, dtype, other, int(budget * share / sum(shares) + rng.random() * 0.9))
            operands.append(node if node.rounded or "rounds" not in effect or self.casts else self.rounded(node))
        exact, text, places = True, form, iter(range(len(operands)))
        for hole in holes:
            if hole in letters:
                put = "<%d>" % next(places)
            elif hole == "c":
                put = self.number(dtype if "{d}" in form or not operands else operands[0].value.dtype, form)
                exact = exact and put not in INEXACT
            elif hole == "dim":
                put = rng.choice(["0", "-1"])
            else:
                put = str(rng.choice([0, 1, 2, 3, 7, 8, 15, 16, 31, 63]))
            text = text.replace("{" + hole + "}", put, 1)
        text = re.sub(r"<(\d+)>", r"{\1}", text)
        halves = [n for n in operands if n.value.dtype in HALVES]
        rounded = "sharp" in effect or "moves" in effect and exact and all(n.rounded for n in halves)
        signed = "unsigned" not in effect and all(n.signed for n in operands)
        node = self.made(text, operands, rounded, signed)
        if node.value.dtype in HALVES and (self.on_gpu or not self.casts) and any(
                n.value.dtype is not node.value.dtype and n.value.dtype not in IN_HALVES and n.value.dtype in INTEGERS for n in operands):
            raise Refused                                   # eager rounds these operands; to float32 first, which MLIR leaves out
        if node.value.dtype not in HALVES:
            node = node._replace(rounded=True)
        return node._replace(signed=True) if not node.value.is_floating_point() or text.endswith(".abs()") else node

    def made(self, form: str, operands: list, rounded: bool = True, signed: bool = True) -> Node:
        names = {f"a{i}": node.value for i, node in enumerate(operands)}
        try:
            value = eval(form.format(*names), {**self.space, **names})
        except Exception as error:
            raise Refused from error
        return Node(form.format(*[node.text for node in operands]), value, rounded, signed)

    def rounded(self, node: Node) -> Node:
        return self.made(f"{{0}}.float().to({node.value.dtype})", [node], True, node.signed)

    def converted(self, dtype: torch.dtype, budget: int) -> Node:
        """From another dtype, for an integer of what it holds."""
        source = self.rng.choice([*self.leaves, *DTYPES])
        node = self.tree(source, budget) if budget > 0 or source not in self.leaves else self.rng.choice(self.leaves[source])
        t = str(dtype)
        if self.on_gpu and dtype in HALVES and source in (torch.int32, torch.int64):
            raise Refused                   # MLIR rounds once, eager twice; LLVM forgets that a half made of an int32 may be infinite
        if source.is_floating_point and kind_of(dtype) == "int":
            values = limits(source, dtype)
            if self.rng.random() < 0.3:
                values.update(low="-1.0", high="100.5", least="0", most="100")
            form = self.rng.choice(NARROWING)
            for name, text in {**values, "t": t, "c": self.rng.choice(["0", "1", "3"]), "x": "{0}"}.items():
                form = form.replace("{" + name + "}", text)
            return self.made(form, [node])
        wide = dtype in HALVES and source is not dtype and source not in IN_HALVES
        signed = node.signed or not source.is_floating_point
        return self.made(f"{{0}}.to({t})", [node], not wide and (source is not dtype or node.rounded), signed)

    def bits(self, dtype: torch.dtype, budget: int) -> Node:
        """Of a float."""
        source = {torch.int16: self.rng.choice(HALVES), torch.int32: torch.float32, torch.int64: torch.float64}.get(dtype)
        if source is None:
            raise Refused
        return self.made(f"{{0}}.view({dtype})", [self.operand("s", source, source, budget)])

    def result(self, dtypes: list) -> Node:
        rng = self.rng
        budget = rng.choice([2, 3, 4, 5, 6, 8, 10, 14, 20])
        if rng.random() < 0.12:
            for _ in range(20):
                form = rng.choice(REDUCTIONS).replace("{dim}", rng.choice(["0", "1", "-1", "(0, 1)"]))
                repeated = form.count("{e}") == 2
                try:
                    return self.filled(form.replace("{e}", "{a}", 1).replace("{e}", "{a}") if not repeated else form,
                                       "rounds", rng.choice(dtypes), min(budget, 8))
                except Refused:
                    continue
        return self.tree(rng.choice(dtypes), budget)


def turned(rng, size: str) -> str:
    """How some matrices lie in memory."""
    forms = ".t().contiguous().t()", ".flip(0)", ".repeat(1, 2)[:, ::2]", ".repeat(1, 2)[:, 1::2]"
    return rng.choice(forms) if size == "R, C" and rng.random() < 0.25 else ""


def program(seed: int, device: str = "cpu") -> str:
    """The text of a module with `entry`, `inputs` and `drive`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _program(Writer(seed, device), device)


def _program(w: Writer, device: str) -> str:
    rng = w.rng
    dtypes = rng.sample(DTYPES, rng.choice([2, 3, 4, 6, 10]))
    given = [(dtype, "R, C") for dtype in dtypes] + [(rng.choice(dtypes), "R, C")]
    given += [(rng.choice(dtypes), rng.choice(["C", "R, 1", "1, C", ""])) for _ in range(rng.choice([0, 1, 2]))]
    names = [f"x{i}" for i in range(len(given))]
    made = "".join(f"    {name} = values({', '.join(filter(None, [str(dtype), size]))}){turned(rng, size)}\n"
                   for name, (dtype, size) in zip(names, given))
    head = HEAD + made + f"    return ({', '.join(names)},)\n"
    exec(head.format(device="cpu", options={}), w.space)
    R, C = rng.choice([1, 2, 3, 5, 9]), rng.choice(COLUMNS)
    for name, value in zip(names, w.space["inputs"](0, R, C)):
        w.leaves.setdefault(value.dtype, []).append(Node(name, value))
    results = [w.result(dtypes).text for _ in range(rng.randint(30, 60))]
    calls = [(seed, R, C) for seed in range(3)]
    calls += [(3, R + 2, C + 1)] * (rng.random() < 0.2)
    body = "".join(f"        {text},\n" for text in results)
    options = {"emulate_precision_casts": True} if w.casts else {}
    return (head.format(device=device, options=options) + f"\ndef entry({', '.join(names)}):\n    return (\n{body}    )\n\n"
            f"def drive(compile_, call):\n    fast = compile_(entry)\n    for seed, R, C in {calls}:\n"
            f"        call(fast, *inputs(seed, R, C))\n")
