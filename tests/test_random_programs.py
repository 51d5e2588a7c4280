"""Random small tensor programs through `cpp` and `loops`, against eager: values, shapes, dtypes, strides, gradients.

A seed makes a program: Python text of a dozen statements over a pool of tensors. Statements that eager refuses are dropped while the program
is made. `MINICOMPILE_RANDOM_PROGRAMS=2000 pytest tests/test_random_programs.py` tries more seeds."""

import os
import random
import re

import pytest
import torch

from opinfo import Program, check_program

pytestmark = [pytest.mark.usefixtures("fresh"), pytest.mark.filterwarnings("ignore")]
COUNT = int(os.environ.get("MINICOMPILE_RANDOM_PROGRAMS", 96))
PER_TEST = 8

SHAPES = [(), (1,), (7,), (4, 6), (4, 1), (1, 6), (6,), (3, 4, 6), (3, 1, 6), (2, 3, 4, 6), (0, 6), (4, 0), (33, 17), (5, 130)]
UNARY = ["torch.sin", "torch.exp", "torch.tanh", "torch.sigmoid", "torch.relu", "torch.neg", "torch.abs", "torch.floor", "torch.sign",
         "torch.nn.functional.gelu", "torch.nn.functional.silu", "torch.isnan", "torch.logical_not", "torch.square", "torch.erf",
         "torch.log1p", "torch.sqrt", "torch.nan_to_num", "torch.clone", "torch.nn.functional.softplus"]
BINARY = ["torch.add", "torch.sub", "torch.mul", "torch.div", "torch.maximum", "torch.minimum", "torch.atan2", "torch.gt", "torch.eq",
          "torch.remainder", "torch.fmod", "torch.logical_and", "torch.bitwise_xor", "torch.floor_divide", "torch.matmul", "torch.copysign"]
REDUCTIONS = ["sum", "mean", "amax", "amin", "prod", "var", "argmax", "any", "all", "logsumexp", "softmax", "log_softmax", "cumsum", "std"]
VIEWS = ["{x}.t()", "{x}.unsqueeze({d})", "{x}.squeeze()", "{x}.reshape(-1)", "{x}.flip({d})", "{x}[{i}]", "{x}[..., ::2]", "{x}[1:]",
         "{x}.transpose(0, {d})", "{x}.expand(3, *{x}.shape)", "{x}.roll(1, {d})", "{x}.narrow({d}, 0, 1)", "{x}[None, ..., None]",
         "{x}.flatten()", "torch.tril({x})", "{x}.diagonal()", "{x}.chunk(2, {d})[-1]", "{x}.unfold({d}, 2, 1)", "{x}.repeat(2, 1)",
         "torch.nn.functional.pad({x}, (1, 2))", "{x}.movedim(0, -1).contiguous()"]
CASTS = ["{x}.float()", "{x}.long()", "{x}.bool()", "{x}.to(torch.int32)", "{x}.double()", "{x}.to(torch.uint8)"]
PAIRS = ["torch.cat([{x}, {y}], {d})", "torch.stack([{x}, {y}], {d})", "torch.where({x} > 0, {x}, {y})", "{x} @ {y}",
         "{x}[{y}.long().abs().clamp(max=0)]", "torch.where({x} > {y}, {c}, {y})", "{x}.masked_fill({y} > 0, {c})",
         "torch.lerp({x}, {y}, 0.25)", "torch.addcmul({x}, {y}, {y}, value=0.5)", "{x}.index_select(0, torch.arange({x}.shape[0] // 2 + 1))",
         "{x}.gather({d}, torch.zeros_like({x}, dtype=torch.long))", "torch.zeros_like({x}).scatter_add(0, torch.zeros_like({x}, dtype=torch.long), {x})",
         "torch.nn.functional.layer_norm({x}, {x}.shape[-1:])", "torch.nn.functional.mse_loss({x}, {y})", "torch.clamp({x}, -1, 1) * {y}.sum()"]
IN_PLACE = ["{z}.add_({x})", "{z}.mul_({c})", "{z}[0] = {x}.sum()", "{z}[..., :1].copy_({z}[..., -1:] * 2)", "{z}.t().sub_(1)",
            "{z}.clamp_(-2, 2)", "{z}[1:].zero_()", "{z}.copy_({x})", "{z}.masked_fill_({z} > 1, {c})"]


def tensor(rng: random.Random, generator: torch.Generator) -> torch.Tensor:
    shape = rng.choice(SHAPES)
    kind = rng.choice(["float", "float", "float", "float", "special", "int", "bool", "double", "strided"])
    if kind in ("int", "bool"):
        return torch.randint(-4, 5, shape, generator=generator) if kind == "int" else torch.rand(shape, generator=generator) > 0.5
    x = torch.randn(shape, generator=generator, dtype=torch.float64 if kind == "double" else torch.float32)
    if kind == "strided" and x.dim() > 1:
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    if kind == "special" and x.numel():
        places = torch.randint(x.numel(), (max(1, x.numel() // 5),), generator=generator)
        x.view(-1)[places] = torch.tensor(rng.choices([float("nan"), float("inf"), float("-inf"), 0.0, -0.0], k=len(places)))
    return x.requires_grad_(rng.random() < 0.6)


def statement(rng: random.Random, names: list[str]) -> str:
    """One line that defines `new`, or changes the fresh copy `z`."""
    x, y = rng.choice(names), rng.choice(names[-4:])
    d, i, c = rng.choice([0, -1, 1]), rng.choice([0, -1]), rng.choice([0.5, 2, -1.5, 3])
    kind = rng.choices(["unary", "binary", "scalar", "reduce", "view", "cast", "pair", "in place"], [4, 5, 2, 3, 5, 1, 4, 2])[0]
    fill = dict(x=x, y=y, d=d, i=i, c=c)
    if kind == "unary":
        return f"new = {rng.choice(UNARY)}({x})"
    if kind == "binary":
        return f"new = {rng.choice(BINARY)}({x}, {y})"
    if kind == "scalar":
        return f"new = {x} {rng.choice(['+', '-', '*', '/', '**', '<', '//', '%'])} {c}"
    if kind == "reduce":
        name = rng.choice(REDUCTIONS)
        everything = name in ("sum", "mean", "prod", "amax", "any", "argmax") and rng.random() < 0.3
        keep = ", keepdim=True" if name not in ("softmax", "log_softmax", "cumsum") and rng.random() < 0.4 else ""
        return f"new = {x}.{name}()" if everything else f"new = {x}.{name}({d}{keep})"
    if kind == "in place":
        return "z = " + rng.choice(["{x}.clone()", "{x} * 1", "torch.sin({x})"]).format(**fill) + "; " \
            + rng.choice(IN_PLACE).format(z="z", **{**fill, "x": y}) + "; new = z"
    return "new = " + rng.choice({"view": VIEWS, "cast": CASTS, "pair": PAIRS}[kind]).format(**fill)


def random_program(seed: int, length: int = 9) -> Program:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    inputs = [tensor(rng, generator) for _ in range(rng.randint(1, 3))]
    names, lines = [f"t{i}" for i in range(len(inputs))], []
    values = dict(zip(names, inputs), torch=torch)
    while len(lines) < length:
        line = statement(rng, names)
        name = f"v{len(lines)}"
        try:
            scratch = dict(values)
            exec(line, scratch)
            if not isinstance(scratch["new"], torch.Tensor) or scratch["new"].numel() > 4000:
                continue
        except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):
            rng.random()
            continue
        values[name] = scratch["new"]
        lines.append("    " + re.sub(r"\bz\b", f"z{len(lines)}", re.sub(r"\bnew\b", name, line)))
        names.append(name)
    results = rng.sample(names[len(inputs):], min(4, length))
    text = "\n".join([f"def program({', '.join(names[:len(inputs)])}):", *lines, f"    return [{', '.join(results)}]", ""])
    namespace = {"torch": torch}
    exec(compile(text, f"<random program {seed}>", "exec"), namespace)
    return Program(inputs, text, {}, namespace["program"])


@pytest.mark.parametrize("first", range(0, COUNT, PER_TEST))
def test_random_programs(first):
    for seed in range(first, min(first + PER_TEST, COUNT)):
        program = random_program(seed)
        for backend in ("cpp",) if seed % 4 else ("loops", "cpp"):
            outcome = check_program(program, backend, rtol=2e-4, atol=2e-4)
            assert not outcome.problems, f"seed {seed}, backend {backend}\n{program.text}" + "\n".join(outcome.problems)
