"""Random small tensor programs through `cpp` and `loops`, against eager: values, shapes, dtypes, strides, gradients.

A seed makes a program: Python text of a dozen statements over a pool of tensors. Statements that eager refuses are dropped while
the program is made. `MINICOMPILE_RANDOM_PROGRAMS=2000 pytest tests/test_random_programs.py` tries more seeds.

The second kind of program writes: to its inputs, which share memory with one another, and to views of them. It is called several
times, with sizes that vary, and what is compared then includes who shares memory with whom, the random stream, gradients that
accumulate, and exceptions."""

import os
import random
import re

import pytest
import torch
from opinfo import Program, check_program, difference

import minicompile

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
         "torch.lerp({x}, {y}, 0.25)", "torch.addcmul({x}, {y}, {y}, value=0.5)",
         "{x}.index_select(0, torch.arange({x}.shape[0] // 2 + 1))",
         "{x}.gather({d}, torch.zeros_like({x}, dtype=torch.long))",
         "torch.zeros_like({x}).scatter_add(0, torch.zeros_like({x}, dtype=torch.long), {x})",
         "torch.nn.functional.layer_norm({x}, {x}.shape[-1:])", "torch.nn.functional.mse_loss({x}, {y})",
         "torch.clamp({x}, -1, 1) * {y}.sum()"]
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


# ---- programs that write

INPUTS = ["torch.randn(N, 5)", "torch.randn(N, 5).requires_grad_()", "torch.randn(N, 5).requires_grad_() * 1",
          "torch.randn(5, N).t().detach()",
          "torch.randn(N + 2, 7)[1:-1, 1:-1]", "torch.randn(1, 5).expand(N, 5)", "torch.arange(5 * N).view(N, 5)",
          "torch.randn(N, 5).bfloat16()",
          "torch.randn(2, 3, N, 5).contiguous(memory_format=torch.channels_last).requires_grad_()", "torch.randn(()).double()",
          "torch.randn(N, 5) > 0",
          "torch.tensor([float('nan'), float('inf'), -0.0, 1e30, -2.0])", "torch.randn(0, 5)",
          "(torch.randn(N + 1, 5).requires_grad_() * 1)[1:]"]
RELATED = ["{x}", "{x}.detach()", "{x}[...]", "{x}[1:]", "{x}.unsqueeze(0)", "{x}.reshape(-1)"]
WRITES = ["{x}.add_({y})", "{x}.mul_({c})", "{x}[0] = {y}.sum()", "{x}[..., :1].copy_({x}[..., -1:] * 2)", "{x}.t().sub_(1)",
          "{x}[1:].zero_()",
          "{x}.copy_({y})", "{x}[{x} > 1] = {c}", "{x}.view(-1)[::2].add_(1)", "{x}.diagonal().fill_({c})", "{x}.relu_()", "{x}[[0]] += 1",
          "{x}.index_add_(0, torch.tensor([0, 0]), {x}[:2] * 2)", "{x}.data.add_(1)", "{x}.detach().mul_(2)",
          "{x}.transpose(0, -1)[0].add_({c})",
          "{x}.normal_()", "{x}.uniform_()", "torch.rand({x}.shape)", "{x}.unbind(0)[-1].mul_(3)", "torch._foreach_add_([{x}, {y}], 1)",
          "{x}.unfold(0, 2, 1).mul_(2)", "{x}.unsqueeze_(0)", "{x}.t_()", "torch.nn.functional.dropout({x}, 0.3, inplace=True)",
          "with torch.no_grad(): {x}[0] = 1", "with torch.no_grad(): w = {x}.view({x}.shape)", "{x}.swapaxes(0, -1).copy_({y})",
          "{x}.cumsum_(0)"]


def inputs_of(lines: list[str], n: int) -> list[torch.Tensor]:
    torch.manual_seed(n)
    space = {"torch": torch, "N": n}
    exec("\n".join(lines), space)
    return [space[f"t{i}"] for i in range(len(lines))]


def writing_program(seed: int, length: int = 7) -> tuple[list[str], str, object]:
    """Lines that make the inputs, the text of the program, and the program."""
    rng = random.Random(seed)
    made = [rng.choice(INPUTS) if i == 0 or rng.random() < 0.7 else rng.choice(RELATED).format(x=f"t{rng.randrange(i)}")
            for i in range(rng.randint(1, 4))]
    made = [f"t{i} = {text}" for i, text in enumerate(made)]
    names, lines = [f"t{i}" for i in range(len(made))], []
    function = None
    for _ in range(60):
        if rng.random() < 0.4:
            line, new = rng.choice(WRITES).format(x=rng.choice(names), y=rng.choice(names), c=rng.choice([0.5, 2, -1.5])), None
        else:
            new = f"v{len(lines)}"
            line = re.sub(r"\bz\b", f"z{len(lines)}", re.sub(r"\bnew\b", new, statement(rng, names)))
        results = rng.sample(names, min(len(names), 4)) + [new or names[-1]]
        text = "\n".join([f"def program({', '.join(names[:len(made)])}):", *(f"    {done}" for done in [*lines, line]),
                          f"    return [{', '.join(results)}]", ""])
        space = {"torch": torch}
        try:
            exec(compile(text, f"<random program {seed}>", "exec"), space)
            out = space["program"](*inputs_of(made, 4))
            if not all(isinstance(t, torch.Tensor) and t.numel() <= 4000 for t in out):
                continue
        except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):
            continue
        function, lines, names = space["program"], [*lines, line], names + [new] * (new is not None)
        if len(lines) == length:
            break
    return made, text, function


def seen(tensors: list, storages: dict) -> list:
    """What the caller can tell of tensors: metadata, which are one object, which share memory; and the values."""
    first, found = {}, []
    for i, t in enumerate(tensors):
        storage = storages.setdefault(t.untyped_storage()._cdata, len(storages)) if t.numel() else None
        found.append((t.requires_grad, first.setdefault(id(t), i), storage, t.detach().clone(memory_format=torch.preserve_format)))
    return found


def calls_of(function, made: list[str], sizes, twice: bool) -> list:
    shots = []
    for n in sizes:
        inputs, storages = inputs_of(made, n), {}
        leaves = [t for t in inputs if t.requires_grad and t.is_leaf]
        for _ in range(1 + twice):
            torch.manual_seed(n)
            try:
                out = function(*inputs)
            except (RuntimeError, IndexError) as error:
                shots.append(type(error))
                break
            shots += [seen(inputs, storages), seen(out, storages), torch.rand(2)]
            try:
                roots = list({id(t): t for t in out if t.requires_grad and t.grad_fn is not None}.values())
                sum(((t if t.is_floating_point() else t.abs()).double().nan_to_num(0, 0, 0) * (i + 1)).sum() for i,
                    t in enumerate(roots, 1)).backward()
                shots.append([t.grad if t.grad is None else t.grad.clone() for t in leaves])
            except (RuntimeError, AttributeError):      # eager has saved what was written; the compiled backward may not need it
                shots.append(None)
                break
    return shots


def differing(want, got, path=""):
    """Where two results of `calls_of` differ, in words, or None."""
    if isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor):
        tolerance = 2e-2 if want.dtype is torch.bfloat16 else 2e-4
        why = difference(got, want, tolerance, tolerance, strides=False)
        return why and f"{path}: {why}"
    if isinstance(want, (list, tuple)) and isinstance(got, (list, tuple)):
        pairs = enumerate(zip(want, got))
        return next(filter(None, (differing(a, b, f"{path}.{i}") for i, (a, b) in pairs)), None)
    return None if want is None and path.count(".") == 1 or want == got else f"{path}: {got} instead of {want}"


@pytest.mark.parametrize("first", range(0, COUNT, PER_TEST))
def test_programs_that_write(first):
    for seed in range(first, min(first + PER_TEST, COUNT)):
        made, text, function = writing_program(seed)
        sizes, twice, backend = ((4, 4), (4, 6, 9, 1))[seed % 3 == 0], seed % 5 == 0, ("aot_eager", "loops")[seed % 4 == 0]
        minicompile.reset()
        want, got = (calls_of(run, made, sizes, twice) for run in (function, minicompile.compile(function, backend=backend)))
        why = differing(want, got)
        assert why is None, f"seed {seed}, backend {backend}, sizes {sizes}\n" + "\n".join([*made, text, why])
