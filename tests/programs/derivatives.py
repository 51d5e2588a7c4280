"""Random functions of float64 tensors, with views, writes, graph breaks, checkpoints, hooks and autograd functions, and a program around
that differentiates the compiled function, and then the derivative, in each of the ways that PyTorch has."""
from __future__ import annotations

import random
import re

HEAD = '''import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd import functional, grad
from torch.utils.checkpoint import checkpoint
KEPT = []

class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x ** 3
    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        return 3 * x * x * g

class Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k):
        y = torch.tanh(x) * k
        ctx.save_for_backward(y)
        ctx.k = k
        return y
    @staticmethod
    def backward(ctx, g):
        y, = ctx.saved_tensors
        return g * (1 - (y / ctx.k) ** 2) * ctx.k, None

def cut():
    print(end="")

def no_history(f, x):
    with torch.no_grad():
        return f(x)

def hooked(t, hook):
    t = t.clone()
    if t.requires_grad: t.register_hook(lambda g: g if g is None else hook(g))
    return t

def ramp(t):
    return torch.linspace(0.5, 1.5, t.numel(), dtype=t.dtype).view(t.shape)

def total(results):
    results = results if isinstance(results, (tuple, list)) else [results]
    return sum([parameter.sum() * 0] + [(r * ramp(r)).sum() + r.square().mean() for r in results if r is not None and r.requires_grad])

def inputs(seed, rows):
    generator = torch.Generator().manual_seed(seed)
    x, w, b = (torch.randn(size, generator=generator, dtype=torch.double) * 0.7 for size in ((rows, 3), (3, 3), (3,)))
    return x.requires_grad_(), w.requires_grad_(), b.requires_grad_(seed % 3 != 0)

parameter = nn.Parameter(torch.linspace(-1, 1, 9).double().view(3, 3))
shift = torch.linspace(0, 1, 3).double()

'''

# Not written, because a difference would be one of the limits in the README, or a question that eager leaves open:
# - hooks on what an operator has computed that saves its result, or that was used before: `hooked` makes a copy first;
# - gradients for what the function has written, and hooks on it (`program`): a graph is one node, and they are for what it was called
#   with;
# - writes, and other effects, in a function under a checkpoint: how often, and how far, it is run again is for what is saved to say, and
#   eager differentiates with what it wrote over a saved value;
# - random numbers under a checkpoint where tangents are a batch: eager refuses these (`program`);
# - a write to what an earlier call has returned, of which a graph may save, and differentiate, more than eager: calls get copies;
# - transposed memory: in which order a derivative of a derivative lies is for the order of the engine's sums to say, and of a batch of
#   them for the operators that the batch came through (`program`);
# - derivatives of results after others have freed their history, and writes to what the function before has saved: the engine walks
#   through the history of all inputs of a graph.
#
# {m}: a matrix of one row for each of x; {w}: of three rows; {r}: a row
MATRICES = ["{m}.sin()", "{m} * {m}", "{m} + {r}", "{m} @ {w}", "{m} * {r}", "torch.tanh({m})", "{m}.exp() * 0.1", "{m}.softmax(1)",
            "{m} / ({m}.square() + 1)", "F.layer_norm({m}, (3,))", "torch.where({m} > 0, {m}, {m} * 0.1)", "{m}.cumsum(1)",
            "F.dropout({m}, 0.3)", "Cube.apply({m})", "Tanh.apply({m}, 2)",
            "checkpoint(lambda a: (a * {r}).sin(), {m}, use_reentrant=False)",
            "torch.stack([{r}, {r} * 2, {r}])[:1] * {m}", "{m} * {m}.detach()", "F.linear({m}, {w}, {r})", "F.gelu({m})",
            "hooked({m}, torch.neg)", "hooked({m}, torch.sin)", "hooked({m}, lambda g: g * 2)",
            "torch.cat([{m}[:, :1], {m}[:, 1:] * 2], 1)", "{m} * shift", "{m} @ parameter", "{m} - {m}.mean(0)",
            "{m}[:, [2, 0, 1]]", "{m}.clamp(-1, 1)", "{m} * {m}.norm()", "{m} + 0", "F.softplus({m})", "{m}.prod(1, keepdim=True) * {m}",
            "{m}.view(-1).view_as({m})", "{m}[:]", "{m}.expand_as({m})", "no_history(lambda a: a * 2, {m}) * {m}",
            "checkpoint(lambda a: F.dropout(a, 0.4) * a, {m}, use_reentrant=False)", "{m}.clone()"]
ROWS = ["{r}.sin()", "{m}.sum(0)", "{m}[0]", "{m}[-1].tanh()", "{r} * {r}", "{m}.amax(0)", "{w}.diagonal()", "{w} @ {r}",
            "{m}.mean(0).exp()", "{r}.flip(0)", "{m}.logsumexp(0)", "{w}[:, 1]", "{r}.clone()", "{r}.detach() * {r}",
            "no_history(lambda a: a[0], {m})", "hooked({r}, torch.sin)"]
SQUARES = ["{w}.t()", "{w} @ {w}", "{w}.sin()", "{m}.t() @ {m}", "parameter * {w}", "{w}.tril()", "{w} * {r}"]
WRITES = ["{m}.mul_({r})", "{m}.add_(1)", "{m}[0] = {r}", "{m}[:, 1].mul_({m}[:, 0].clone())", "{m}.relu_()", "{m}.sin_()",
            "{r}.add_({w}[0])", "{m}.copy_({m} * 2)", "{m}[:, 0].zero_()", "{m}.masked_fill_({m} > 1, 0.5)",
            "no_history(lambda a: a.mul_(0.5), {m}.detach())", "{m}[:1].exp_()", "shift.add_(0.1)", "{w}.diagonal().mul_(2)", "{r}.mul_(2)"]
WRITE = r"_\(|^\w+\[.*\] = "
OTHERS = ["cut()", "cut()", "if x.requires_grad: x.register_hook(lambda g: g if g is None else g * 2)",
          "if b.requires_grad: b.register_hook(lambda g: g if g is None else -g)", "if {m}.sum() > 0: cut()", "KEPT.append({m}.shape)"]

# Each differentiates `f(x, w, b)`
DRIVERS = ['''
def derive(f, x, w, b):
    y = f(x * 1, w, b)
    for order in range({orders}):
        y = grad(total(y), {wanted}, create_graph=True, allow_unused=True)
        {between}
    return y
''', '''
def derive(f, x, w, b):
    y = f({x}, w * 1, b * 1)
    g, = grad(total(y), x, create_graph=True)
    z = f(g.tanh() * 1, w * 1, b * 1)
    h = grad(total(z) + total(y), {wanted}, create_graph=True, allow_unused=True, retain_graph=True)
    {between}
    return h, g
''', '''
def derive(f, x, w, b):
    total(f(x * 2, w, b)).backward(create_graph=True)
    {between}
    g = [p.grad for p in {wanted} if p.grad is not None]
    for p in (x, w, b, parameter):
        p.grad = None
    h = grad(total(g), {wanted}, allow_unused=True, create_graph={create})
    return h
''', '''
def derive(f, x, w, b):
    return functional.hessian(lambda a, c: total(f(a * 1, c * 1, b)), (x, w), create_graph={create}, vectorize={vectorize})
''', '''
def derive(f, x, w, b):
    return functional.jvp(lambda a: total(f(a * 1, w, b)), x, torch.ones_like(x), create_graph={create})
''', '''
def derive(f, x, w, b):
    which = functional.{product}
    return which(lambda a, c: total(f(a * 1, c * 1, b)), (x, w), (torch.ones_like(x), w.detach().cos()), create_graph={create})
''', '''
def derive(f, x, w, b):
    jacobian = functional.jacobian(lambda a: [t for t in [f(a * 1, w, b)] for t in (t if isinstance(t, tuple) else [t])][0], x,
                                   create_graph=True, vectorize={vectorize})
    return grad(total(jacobian), {wanted}, allow_unused=True)
''', '''
def derive(f, x, w, b):
    y = total(f(x * 1, w, b))
    g, = grad(y, x, create_graph=True)
    rows = torch.eye(g.numel(), dtype=g.dtype).view(-1, *g.shape)
    {between}
    return grad(g, {wanted}, rows, is_grads_batched=True, allow_unused=True, create_graph={create})
''', '''
def derive(f, x, w, b):
    y = checkpoint(lambda *args: f(*[t * 1 for t in args]), x, w, b, use_reentrant=False)
    g = grad(total(y), {wanted}, create_graph=True, allow_unused=True)
    {between}
    return grad(total(g), {wanted}, create_graph=True, allow_unused=True)
''', '''
def derive(f, x, w, b):
    weights = [x, w]
    for step in range(2):
        y = f(weights[0] * 1, weights[1] * 1, b * 1)
        slopes = grad(total(y), weights, create_graph=True, allow_unused=True)
        weights = [p if s is None else p - 0.1 * s.tanh() for p, s in zip(weights, slopes)]
    {between}
    return grad(total(weights), {wanted}, allow_unused=True, retain_graph=True), weights
''', '''
def derive(f, x, w, b):
    y = f(x * 1, w, b)
    first = grad(total(y), {wanted}, create_graph=True, allow_unused=True)
    again = grad(total(y), {wanted}, create_graph=True, allow_unused=True)
    {between}
    return grad(total(first), {wanted}, retain_graph={create}, allow_unused=True), grad(total(again), {wanted}, allow_unused=True)
''', '''
def derive(f, x, w, b):
    return torch.func.{transform}(lambda a: total(f(a * 1, w.detach(), b.detach())))(x.detach())
''', '''
def derive(f, x, w, b):
    v = torch.ones((), dtype=x.dtype, requires_grad=True)
    y = f(x * 1, w, b)
    g = grad(total(y) * v, {wanted}, create_graph=True, allow_unused=True)
    h = grad(total(g), v, create_graph=True, allow_unused=True)
    {between}
    return h, grad(total([*h, *g]), {wanted}, allow_unused=True)
''']
WANTED = ["(x, w)", "(x, w)", "(x,)", "(w,)", "(x, w, parameter)", "(w, parameter)", "[t for t in (x, b) if t.is_leaf and t.requires_grad]"]
BETWEEN = [*["pass"] * 6, "with torch.no_grad(): b.add_(0.1)", "shift.mul_(0.9)", "torch.rand(2)", "del y",
           "with torch.no_grad(): x.mul_(1.1)",
            "with torch.no_grad(): parameter.mul_(0.9)", "with torch.no_grad(): w.add_(0.1)"]
CHOICES = {"orders": [2, 2, 3], "wanted": WANTED, "between": BETWEEN, "x": ["x", "x * 1"], "create": [True, False],
           "vectorize": [True, False], "product": ["hvp", "vhp", "vjp"], "transform": ["grad", "hessian", "jacrev", "jacfwd"]}


def body(rng: random.Random) -> list[str]:
    names = {"m": ["x"], "w": ["w"], "r": ["b"]}

    def fill(form):
        for kind, known in names.items():
            while "{%s}" % kind in form:
                form = form.replace("{%s}" % kind, rng.choice(known[-4:]), 1)
        return form
    lines = []
    for number in range(rng.randint(2, 9)):
        chance = rng.random()
        if chance < 0.7:
            kind, forms = rng.choices([("m", MATRICES), ("r", ROWS), ("w", SQUARES)], [6, 2, 1])[0]
            lines.append(f"{kind}{number} = {fill(rng.choice(forms))}")
            names[kind].append(f"{kind}{number}")
        else:
            lines.append(fill(rng.choice(WRITES if chance < 0.85 else OTHERS)))
    made = [name for known in names.values() for name in known]
    last = names["m"][-1]
    results = [last] + rng.sample(made, rng.choice([0, 0, 1, 2]) % len(made))
    results = [name + rng.choice(["", "", "", "[0]", "[1:]" if name[0] in "mwx" else ""]) for name in results]
    return [*lines, f"return {', '.join(results)}" if len(results) > 1 or rng.random() < 0.7 else f"return {last}.sin().sum()"]


def program(seed: int) -> str:
    rng = random.Random(seed)
    lines = body(rng)
    written = next((i for i, line in enumerate(lines) if re.search(WRITE, line)), len(lines))
    lines = [line for i, line in enumerate(lines) if i < written or "register_hook" not in line]
    calls = around = ""
    drivers = rng.sample(DRIVERS, rng.randint(1, 2))
    for number, form in enumerate(drivers):
        for key, values in CHOICES.items():
            form = form.replace("{" + key + "}", str(rng.choice(values)))
        around += form.replace("derive", f"derive{number}")
    if "checkpoint(" in around:
        lines = [line for line in lines if not re.search(rf"{WRITE}|^KEPT", line)]
    text = "".join(f"    {line}\n" for line in lines)
    if "batched" in around or "vectorize=True" in around:
        text = re.sub(r"= (\w+)\.t\(\)\n", r"= \1.flip(0)\n", text.replace("F.dropout(a, 0.4)", "a.cos()"))
    for number in range(rng.randint(3, 7)):
        which = rng.randrange(len(drivers))
        calls += f"    call(lambda *args: derive{which}(fast, *args), *inputs({number}, {rng.choice([3, 3, 3, 3, 4, 5])}))\n"
    return f"{HEAD}def entry(x, w, b):\n{text}{around}\ndef drive(compile_, call):\n    fast = compile_(entry)\n{calls}"
