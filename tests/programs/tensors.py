"""Random tensor programs: 10 to 40 statements over views, writes, mixed dtypes, reductions, scans, gathers, scatters, products and
convolutions, on inputs that are strided, expanded, channels-last, of size 0 or 1, that hold NaN and infinities, share memory, require
gradients, or do not.

A program is written by running it: a candidate statement is executed on real tensors, and kept if eager accepts it. One in ten programs
ends with a statement that eager refuses, so that refusals are compared, too."""
from __future__ import annotations

import random
import re
import warnings

import torch

from .noise import places

FLOATS = ["torch.float32"] * 6 + ["torch.float64", "torch.bfloat16", "torch.bfloat16", "torch.float16"]
INTEGERS = ["torch.int64", "torch.int64", "torch.int32", "torch.int16", "torch.int8", "torch.uint8"]
LIMIT = 4096                            # elements of a value
LARGEST = 1e3                           # beyond it a floating-point value is mostly not kept

HEAD = '''import contextlib
import math
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
DEVICE = {device!r}
leaves = []

def recurrent(kind, x, units, layers, dropout, ways):
    def weight(*size):
        return (torch.arange(math.prod(size), device=x.device) * 7 % 11 / 11 - 0.5).view(size).to(x.dtype)
    x, given = x.double() if x.device.type == "cuda" else x, x.dtype      # cuDNN's float32 is less exact than ours
    rows = units * {{"lstm": 4, "gru": 3, "rnn_tanh": 1}}[kind]
    sizes = [x.shape[-1]] + [units * ways] * (layers - 1)
    weights = [w for n in sizes for _ in range(ways) for w in (weight(rows, n), weight(rows, units), weight(rows), weight(rows))]
    h = x.new_zeros(layers * ways, x.shape[1], units)
    drop = dropout if x.device.type == "cpu" else 0.0             # cuDNN draws from a state of its own, which no seed sets back
    trains = dropout > 0 or x.device.type != "cpu"                # the only way that cuDNN's has derivatives
    return getattr(torch, kind)(x, (h, h) if kind == "lstm" else h, weights, True, layers, drop, trains, ways == 2, False)[0].to(given)

def hooked(f):
    def run(*args):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            return f(*args)
    return run

def on_cpu(f):
    def run(*args):
        # on a CPU it saves the tensors themselves, and later writes go unnoticed into gradients
        with torch.autograd.graph.save_on_cpu() if DEVICE != "cpu" else torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            return f(*args)
    return run

def checkpointed(f):
    return lambda *args: torch.utils.checkpoint.checkpoint(f, *args, use_reentrant=False)

def autocast(f, *args):
    with torch.autocast(DEVICE, torch.bfloat16):
        return f(*args)

def without_grad(f, *args):
    with torch.no_grad():
        return f(*args)

def with_hook(x):
    x = x.clone()               # a hook on the result of a graph does not see all: see README
    if x.grad_fn is not None:
        x.register_hook(lambda g: None if g is None else g * 0.5)
    return x * 2

def slope(f, x):
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        return torch.autograd.grad(f(x).sum(), x)[0]

def slope_of(f, x):
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        return torch.autograd.grad(f(x).sum(), x, create_graph=True)[0]

def pulled(f, x):
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        y = f(x)
        return torch.autograd.grad(y, x, torch.arange(y.numel(), device=y.device).sin().reshape(y.shape).to(y.dtype))[0]

def curvature(f, x):
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        slope, = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        return torch.autograd.grad((slope * slope).sum(), x)[0]

def penalty(f, x):
    return (slope_of(f, x).norm() - 1) ** 2

def into(f, out, *args):
    return f(*args, out=out)

@contextlib.contextmanager
def during(change, value, before):
    change(value)
    try:
        yield
    finally:
        change(before)

def default(dtype, f, *args):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return f(*args)
    finally:
        torch.set_default_dtype(before)

def deterministic(f, *args, warn_only=True):
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        return f(*args)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])

def inputs(seed, B):
    generator = torch.Generator().manual_seed(seed)
    def randn(*size):
        return torch.randn(size, generator=generator).to(DEVICE)
    def ints(low, high, *size):
        return torch.randint(low, high, size, generator=generator).to(DEVICE)
    def leaf(x):
        leaves.append(x.detach().clone(memory_format=torch.preserve_format).requires_grad_())
        return leaves[-1]
    leaves.clear()
'''


class Refused(Exception):
    """No operand fits."""


EXPRESSIONS: list = []                  # (weight, function of a Writer that returns the text of an expression)
WRITES: list = []                       # the same for statements


def expression(weight: float = 1.0):
    return lambda fn: EXPRESSIONS.append((weight, fn))


def write(weight: float = 1.0):
    return lambda fn: WRITES.append((weight, fn))


FAMILIES: dict = {}                     # name -> (EXPRESSIONS, WRITES), of operators that belong together


def family(name: str, weight: float, *forms: str, write: bool = False):
    """Register forms, or as a decorator a function, in a family."""
    table = FAMILIES.setdefault(name, ([], []))[write]
    table.extend((weight, lambda w, form=form: w.fill(form)) for form in forms)
    return lambda fn: table.append((weight, fn))


def expressions(weight: float, *forms: str) -> None:
    """Forms with operands {x}: floating, {y}: broadcastable with x, {n}: integer, {b}: bool, {z}: complex, {a}: any, {d}: dim of x,
    {c}: number."""
    for form in forms:
        EXPRESSIONS.append((weight, lambda w, form=form: w.fill(form)))


class Writer:
    """The state of a program that is being written. env: name -> tensor, as eager has it now."""

    def __init__(self, seed: int, device: str, favourite: str | None = None):
        self.rng, self.device = random.Random(seed), device
        self.head, self.lines, self.names, self.unused = [HEAD.format(device=device)], [], [], []
        self.space: dict = {}
        exec(HEAD.format(device="cpu"), self.space)
        self.env: dict[str, torch.Tensor] = {}
        self.families = [favourite] if favourite else self.rng.sample(sorted(FAMILIES), 2)
        self.share = 0.6 if favourite else 0.2              # of the statements are of these families
        tables = [table for name in self.families for table in FAMILIES[name]]
        self.forms = {id(table): some_of(table, self.rng) for table in (EXPRESSIONS, WRITES, *tables)}

    def tensor(self, accept=lambda t: True) -> str:
        names = [n for n in self.names if accept(self.env[n])]
        if not names:
            raise Refused
        recent = names[-6:]
        return self.rng.choice(recent if self.rng.random() < 0.7 else names)

    def partner(self, x: str, accept=lambda t: True) -> str:
        """A tensor that broadcasts with x."""
        shape = self.env[x].shape

        def fits(t):
            return accept(t) and all(1 in (a, b) or a == b for a, b in zip(reversed(t.shape), reversed(shape)))
        return self.tensor(fits)

    def number(self) -> str:
        return self.rng.choice(["0.5", "2", "-1.5", "3", "1", "0.1", "-2", "True" if self.rng.random() < 0.2 else "0.25"])

    def dim(self, x: str, extra: int = 0) -> int:
        rank = self.env[x].dim() + extra
        if rank == 0:
            return self.rng.choice([0, -1])
        return self.rng.randrange(-rank, rank)

    def dims(self, x: str) -> str:
        rank = self.env[x].dim()
        return str(sorted(self.rng.sample(range(rank), self.rng.randint(1, rank)))) if rank else "[]"

    def size(self, x: str, d: int) -> int:
        t = self.env[x]
        return t.shape[d] if t.dim() else 1

    def fill(self, form: str) -> str:
        x = ""
        if "{x}" in form:
            x = self.tensor(torch.is_floating_point)
        elif "{n}" in form:
            x = self.tensor(is_integer)
        elif "{a}" in form:
            x = self.tensor()
        elif "{z}" in form:
            x = self.tensor(torch.is_complex)
        elif "{b}" in form:
            x = self.tensor(is_bool)
        values = {"x": x, "n": x, "a": x, "b": x, "z": x, "c": self.number()}
        if "{y}" in form:
            values["y"] = self.partner(x)
        if "{f}" in form:
            values["f"] = self.partner(x, torch.is_floating_point)
        if "{m}" in form:
            values["m"] = self.partner(x, is_bool)
        if "{i}" in form:
            values["i"] = self.partner(x, is_integer)
        if "{d}" in form:
            values["d"] = self.dim(x)
        if "{ds}" in form:
            values["ds"] = self.dims(x)
        if "{k}" in form:
            values["k"] = self.rng.choice([", keepdim=True", ""])
        if "{e}" in form:
            values["e"] = self.rng.choice([0, 1, 2, 3, -1])
        return form.format(**values)


def is_integer(t) -> bool:
    return not t.is_floating_point() and not t.is_complex() and t.dtype is not torch.bool


def is_bool(t) -> bool:
    return t.dtype is torch.bool


def is_leaf(t) -> bool:
    return t.grad_fn is None


def has_dims(*ranks):
    return lambda t: t.dim() in ranks and t.is_floating_point()


# ---- pointwise

for _name in ("sin cos tanh sigmoid relu neg abs floor ceil round trunc sign erf square atan log1p_abs sqrt_abs rsqrt_abs exp_clamp "
              "frac isnan isfinite expm1_clamp asinh nan_to_num sinc logit_eps positive reciprocal_abs erfc exp2_clamp").split():
    _base, _, _guard = _name.partition("_")
    _form = {"abs": f"torch.{_base}({{x}}.abs() + {0 if _base == 'log1p' else 0.25})", "clamp": f"torch.{_base}({{x}}.clamp(-4, 3))",
             "to": "{x}.nan_to_num()", "eps": "{x}.logit(eps=0.1)"}.get(_guard, f"{{x}}.{_base}()")
    expressions(0.5, "{x}.nan_to_num(0.5, 2, -2)" if _name == "nan_to_num" else _form)
expressions(0.5, *(f"F.{name}({{x}})" for name in
                   ("gelu silu softplus leaky_relu elu hardswish mish logsigmoid hardtanh softsign relu6 hardsigmoid celu selu "
                    "tanhshrink").split()))
expressions(1.5, "{x} + {y}", "{x} * {y}", "{x} - {y}", "{a} + {y}", "{a} * {y}", "{x} * {c}", "{x} + {c}", "{c} - {x}", "{a} * {c}")
expressions(0.6, "{x} / {c}", "{x} / ({f}.abs() + 0.5)", "torch.maximum({x}, {f})", "torch.minimum({x}, {y})", "torch.fmax({x}, {f})",
            "{x} ** 2", "{x} ** 3", "{x}.abs() ** 0.5", "torch.atan2({x}, {f})", "torch.remainder({x}, {c})", "{x} % 1.5", "{x} // 0.75",
            "torch.fmod({x}, 1.25)", "torch.where({m}, {x}, {f})", "torch.where({x} > {y}, {x}, {c})", "torch.lerp({x}, {f}, 0.25)",
            "torch.addcmul({x}, {f}, {f}, value=0.5)", "{x}.clamp(-1, {c})", "torch.clamp({x}, min={f})", "torch.copysign({x}, {f})",
            "torch.sub({x}, {y}, alpha=2)", "torch.hypot({x}, {f})", "torch.xlogy({x}, {f}.abs() + 0.5)",
            "torch.add({x}, {y}, alpha=0.5)",
            "torch.rsub({x}, {y})", "torch.heaviside({x}, {f})", "torch.ldexp({x}, torch.tensor(2, device=DEVICE))",
            "{x}.masked_fill({m}, {c})",
            "torch.true_divide({n}, 3)", "torch.div({x}, 0.7, rounding_mode='trunc')", "torch.div({x}, 0.3, rounding_mode='floor')",
            "torch.float_power({x}.abs() + 0.1, 1.5)", "torch.logaddexp({x}, {f})", "torch.addcdiv({x}, {f}, {f}.abs() + 1)",
            "torch.threshold({x}, 0.1, 20)", "torch.isclose({x}, {x} + 0.5)")
expressions(0.6, "{x} > {y}", "{x} == {x}.amax()", "{a} == {y}", "{a} <= {c}", "{a} != {y}", "{b} & {m}", "{b} | {m}", "{b} ^ {m}",
            "~{b}",
            "{n} % 3", "{n} // 4", "torch.div({n}, 5, rounding_mode='trunc')", "{n} & 6", "{n} | {i}", "{n} ^ 5", "{n} << 1",
            "{n} >> 1", "-{n}",
            "{n} * {i}", "{n} - {i}", "{n}.abs()", "{n} + {m}", "{b} + {m}", "{b} * {y}", "torch.fmod({n}, 3)", "{n} % ({i} % 5 + 6)",
            "{n} ** 2",
            "torch.logical_and({a}, {y})", "torch.logical_not({a})", "torch.signbit({x})", "torch.sign({n})", "torch.bitwise_not({n})",
            "{n} * 0.5",
            "torch.gcd({n}, {n})", "torch.maximum({n}, {y})", "torch.clamp({n}, 0, 5)", "{a}.eq({a})", "torch.logical_xor({a}, {y})",
            "{n} / 2")


expressions(0.8, "{x} - {x}.to(torch.bfloat16).to({x}.dtype)",
            "({x} * {y}).to(torch.bfloat16).double()", "{x}.to(torch.float16) > {f}.half()",
            "({x} * 3).to(torch.bfloat16).floor()")


# Signs of divisors and exponents, numbers and 0-d tensors of other dtypes
expressions(0.4, "{n} // -3", "{n} % -5", "torch.div({n}, -4, rounding_mode='floor')", "torch.fmod({n}, -5)", "-7 // ({n}.abs() | 1)",
            "-7 % ({n}.abs() | 1)", "(-2.0) ** {n}.clamp(0, 4)", "2 ** {n}.abs().clamp(0, 5)", "{x} // -0.7", "{x} % -0.7",
            "{n} ** {n}.abs().clamp(0, 2)",
            "torch.where({b}, 1.5, 2)", "torch.where({b}, {b}, 2)", "torch.where({x} > 0, {y}, 2)", "torch.where({n} > 0, {n}, 0.5)",
            "torch.where({x} > 0, torch.tensor(1.5, dtype=torch.float64, device=DEVICE), {y})", "{x}.clamp({i}, 2)", "{n}.clamp(0.5)",
            "{a} + torch.tensor(2.5, dtype=torch.float64, device=DEVICE)", "{a} * torch.tensor(3, device=DEVICE)", "{a}.sum() + {y}",
            "{n} + torch.tensor(True, device=DEVICE)", "True + {n}", "2.5 * {a}", "{b}.sum() * {b}", "{b}.cumsum({d})",
            "{b}.amax({d}{k})")
# Contexts, hooks and gradients in the middle, results written to given tensors
expressions(0.5, "autocast(torch.matmul, {x}, {x}.mT)", "autocast(lambda a: (a @ a.mT).softmax(-1) + a.sum(), {x})",
            "autocast(F.linear, {x}, {x}) + {x}.mean()", "without_grad(lambda a: a[1:], {x})", "without_grad(lambda a: a * 2, {x})",
            "without_grad(torch.Tensor.t, {x}) * {c}", "with_hook({x})", "with_hook({x}[1:])", "slope(torch.sin, {x})",
            "slope(lambda a: a * a.detach(), {x})", "slope(lambda a: a[0] * a.mean(), {x}) + {x}", "{x}.detach().detach()[..., ::2]",
            "into(torch.mul, torch.empty_like({x}), {x}.detach(), {c})", "into(torch.sin, {x}.new_zeros({x}.shape[::-1]).mT, {x}.detach())",
            "into(torch.gt, torch.ones_like({x}, dtype=torch.bool), {x}.detach(), {y}.detach())",
            "into(torch.add, torch.zeros_like({a}, dtype=torch.float64), {a}.detach(), 1)",
            "into(torch.cat, torch.empty(0, device=DEVICE), [{x}.detach().float().reshape(-1), torch.ones(2, device=DEVICE)])",
            "torch.view_as_real(torch.complex({x}.float(), {x}.float().flip(0)) * (2 - 1j))",
            "torch.complex({x}.float(), {x}.float()).abs()",
            "torch.view_as_real(torch.fft.rfft({x}.float()))")


@expression(2.0)
def cast(w):
    x = w.tensor()
    kind = w.rng.choice([w.rng.choice(FLOATS), w.rng.choice(INTEGERS), "torch.bool"])
    if kind in INTEGERS and w.env[x].is_floating_point():
        return f"{x}.nan_to_num(0, 5, -5).clamp({0 if kind == 'torch.uint8' else -90}, 90).to({kind})"
    return f"{x}.to({kind})"


# ---- views

expressions(1.0, "{a}.unsqueeze({d})", "{a}.squeeze()", "{a}.reshape(-1)", "{a}.flip({ds})", "{a}.transpose(0, {d})", "{a}.flatten()",
            "{a}.mT",
            "{a}[..., ::2]", "{a}[1:]", "{a}[..., None]", "{a}.movedim(0, {d})", "{a}.roll({e}, {d})", "{a}.detach()", "{a}.contiguous()",
            "{a}.clone()", "{a}[:, 0]", "{a}[-1]", "{a}[..., -1:]", "{a}.squeeze({d})", "{a}[None]", "{a}.ravel()", "{a}.view_as({a})")
expressions(0.5, "{a}.diagonal({e})", "torch.tril({a}, {e})", "torch.triu({a}, {e})", "{a}.expand(3, *{a}.shape)",
            "{a}.unfold({d}, 2, 1)",
            "{a}.repeat_interleave(2, {d})", "{a}.rot90(1, (0, {d}))", "{a}.swapaxes(0, {d}).reshape(-1)", "torch.atleast_2d({a})",
            "{a}.fliplr()",
            "torch.diag_embed({a})", "{a}.view({a}.shape)", "{a}.t()", "{a}.T", "{a}[::2, 1:]", "{a}.view(-1)",
            "{a}.unflatten({d}, (-1, 1))",
            "{x}.view(torch.int32)", "{x}.view(torch.int16)", "{a}.narrow({d}, 0, 1)", "{a}.reshape({a}.shape[::-1])",
            "{a}.reshape(2, -1)",
            "{a}.as_strided((2, 2), (1, 1))", "{a}.tile(2)", "{a}.expand_as({a})", "torch.broadcast_to({a}, (2, *{a}.shape))",
            "{a}[..., torch.arange({a}.shape[-1], device=DEVICE).flip(0)]", "{a}.T.reshape({a}.shape)",
            "{a}.contiguous(memory_format=torch.channels_last)")


@expression(1.0)
def permute(w):
    x = w.tensor(lambda t: t.dim() > 1)
    return f"{x}.permute({w.rng.sample(range(w.env[x].dim()), w.env[x].dim())})"


@expression(1.5)
def slices(w):
    x = w.tensor(lambda t: t.dim() > 0)
    parts = []
    for size in w.env[x].shape:
        kind = w.rng.random()
        if kind < 0.4:
            parts.append(":")
        elif kind < 0.8:
            low = w.rng.randint(0, max(size - 1, 0))
            parts.append(f"{low}:{w.rng.randint(low, size)}" + w.rng.choice(["", "", ":2"]))
        elif kind < 0.9 and size:
            parts.append(str(w.rng.randrange(-size, size)))
        else:
            parts.append("None, :")
    return f"{x}[{', '.join(parts[:w.rng.randint(1, len(parts))])}]"


@expression(1.0)
def pieces(w):
    x = w.tensor(lambda t: t.dim() > 0)
    d = w.dim(x)
    return f"{x}." + w.rng.choice([f"chunk(2, {d})[-1]", f"unbind({d})[0]", f"split(2, {d})[-1]",
                                   f"split_with_sizes([1, {w.size(x, d) - 1}], {d})[1]",
                                   f"tensor_split(3, {d})[1]", f"select({d}, 0)"])


@expression(1.0)
def reshaped(w):
    x = w.tensor(lambda t: 1 < t.numel() <= LIMIT)
    n, sizes = w.env[x].numel(), []
    while n > 1 and len(sizes) < 4:
        options = [f for f in (2, 3, 4, 5, 6, 7, 8, 12) if n % f == 0] or [n]
        sizes.append(w.rng.choice(options + [n]))
        n //= sizes[-1]
    return f"{x}.reshape({', '.join(map(str, [*sizes, *([n] if n > 1 else [])]))})"


@expression(0.7)
def repeated(w):
    x = w.tensor(lambda t: t.numel() <= 500)
    times = [str(w.rng.randint(1, 3)) for _ in range(w.env[x].dim() + w.rng.randint(0, 1))]
    return f"{x}.{w.rng.choice(['repeat', 'tile'])}({', '.join(times)})"


@expression(1.2)
def joined(w):
    x = w.tensor(lambda t: t.dim() > 0)
    d, shape = w.dim(x), w.env[x].shape
    y = w.tensor(lambda t: t.dim() == len(shape) and all(a == b for i, (a, b) in enumerate(zip(t.shape, shape)) if i != d % len(shape)))
    return w.rng.choice([f"torch.cat([{x}, {y}], {d})", f"torch.cat([{y}, {x}, {x}], {d})", f"torch.stack([{x}, {x}], {d})",
                         f"torch.hstack([{x}, {y}])"])


LINKS = [".flip(0)", ".flip(-1)", ".flip(0, -1)", ".repeat_interleave(3, 0)", ".repeat_interleave(2, -1)", ".tile(2)", ".roll(1, 0)",
         ".roll(-2, -1)",
         ".transpose(0, -1)", ".reshape(-1)", "[::2]", "[..., 1:]", ".unsqueeze(0)", ".repeat(2, *[1] * {k})", ".reshape({n}, -1)",
         ".reshape(-1, {n})",
         ".flatten(0, 1)", ".unfold(-1, 2, 1)", ".unflatten(0, (-1, {n}))", ".movedim(-1, 0)", "[..., :-1]", "[-1]", ".mT", ".rot90()",
         ".tril(1)",
         ".diagonal()", ".squeeze()", ".expand({n}, *[-1] * {k})", ".contiguous()", ".swapaxes(0, 1).reshape(-1)", ".view(-1)", " * 2",
         ".float()"]


@expression(6.0)
def chain(w):
    """Several views of views: their indices meet in one expression."""
    x = w.tensor(lambda t: 0 < t.dim() < 5 and t.numel() <= 400)
    links = "".join(w.rng.choices(LINKS, k=w.rng.randint(2, 4))).format(n=w.rng.choice([2, 3, 4]), k=w.env[x].dim())
    return links.replace(" * 2", "") and f"{x}{links}" if " * 2" not in links else f"({x} * 2){links.replace(' * 2', '')}"


REPEATS = [".tile(2)", ".tile(3)", ".repeat_interleave(3, {d})", ".repeat_interleave(2, 0)", ".repeat(2, *[1] * {k})",
           ".expand(3, *[-1] * {k}).reshape(-1)", ".tile(2).reshape(-1)", ".reshape(-1)", ".roll(1, {d})", ".movedim(0, -1).reshape(-1)"]
TURNS = [".flip(0)", ".flip(-1)", ".flip(0, -1)", ".rot90()", ".rot90(2)", ".roll(-2, 0)"]


@expression(12.0)
def mirrored(w):
    """Remainders of positions that are counted backwards."""
    x = w.tensor(lambda t: 0 < t.dim() < 4 and 1 < t.numel() <= 300)
    more = w.rng.choices(["", *LINKS[:12]], [6] + [1] * 12)[0]
    links = (w.rng.choice(REPEATS) + w.rng.choice(TURNS) + more).format(d=w.dim(x), n=2, k=w.env[x].dim())
    return f"{x}{links}" + w.rng.choice([" + 1", " * 2", ".sum(0)", ".abs()", ""])


# ---- reductions and scans

expressions(1.0, "{x}.sum({ds}{k})", "{x}.mean({ds}{k})", "{x}.amax({ds}{k})", "{x}.amin({ds}{k})", "{x}.sum()", "{x}.mean()",
            "{a}.sum({d}{k})",
            "{x}.softmax({d})", "{x}.cumsum({d})", "{x}.argmax({d}{k})", "{x}.max({d}{k}).values")
expressions(0.5, "{x}.var({ds}{k})", "{x}.std({d}{k})", "{x}.std({ds}, correction=0)", "{x}.log_softmax({d})",
            "{x}.logsumexp({ds}{k})", "{x}.clamp(-1.5, 1.5).prod({d}{k})",
            "{x}.norm()", "{x}.norm(p=1, dim={d}{k})", "{x}.norm(p=float('inf'), dim={d}{k})", "{x}.argmin({d})", "{a}.any({d}{k})",
            "{a}.all({d}{k})", "{a}.any()",
            "{x}.min({d}).indices", "{x}.clamp(-1.2, 1.2).cumprod({d})", "{x}.cummax({d}).values", "{x}.cummin({d}).indices",
            "{x}.logcumsumexp({d})",
            "{x}.sort({d}).values", "{x}.sort({d}, stable=True).indices", "{x}.argsort({d}, descending=True, stable=True)",
            "{x}.topk(1, {d}).values",
            "{x}.median()", "{x}.median({d}).values", "{x}.kthvalue(1, {d}).values", "{x}.nansum({d}{k})", "{x}.diff(dim={d})",
            "{x}.aminmax().max",
            "{a}.count_nonzero({d})", "torch.trace({x})", "{n}.cumsum({d})", "{n}.sum({d}, dtype=torch.int32)", "{n}.amax({d}{k})",
            "{n}.prod({d})", "{n}.argmax()",
            "{a}.sum({d}, dtype=torch.float64)", "torch.dist({x}, {x} * 0.5)", "F.normalize({x}, dim={d})",
            "torch.var_mean({x}, {d})[1]", "{x}.nanmean({d})",
            "{x}.max()", "{x}.abs().amax({ds}, keepdim=True)", "{x}.mean({d}, dtype=torch.float32)", "{b}.sum()",
            "torch.linalg.vector_norm({x}, 2, {d}{k})",
            "torch.bucketize({x}, torch.tensor([-0.5, 0.05, 1.0], device=DEVICE))", "torch.std_mean({x})[0]", "{x}.renorm(2, 0, 1.0)",
            "torch.cross({x}, {x} * 2, dim={d})")


UNARY = ["{}.sin()", "{}.abs()", "{} * 1.7", "{} + 0.3", "{}.tanh()", "{}.relu()", "{} * {y}", "{} - {y}", "{}.sigmoid()", "{} / 3",
         "{} ** 2", "{}.square()"]
JUDGES = ["({q}) == ({q}).amax({d}, keepdim=True)", "({q}).amax({d})", "({q}).norm(p=float('inf'), dim={d})", "({q}).floor()",
          "({q}).argmax({d})",
          "({q}).sum({d})", "({q}).softmax({d})", "({q}).max({d}).values", "({q}) > ({q}).mean({d}, keepdim=True)", "({q}).var({d})",
          "({q}).cumsum({d})",
          "torch.where(({q}) > {y}, {q}, {y})", "({q}).to(torch.float64)", "({q}).float() - ({q})", "({q}).aminmax().max",
          "({q}).sign()", "({q}).trunc()",
          "({q}).sort({d}).values", "({q}).mean()", "({q}).amin({d}, keepdim=True) * {y}", "({q})", "({q})", "({q}).logsumexp({d})",
          "({q}).round()"]


@expression(8.0)
def judged(w):
    """Some arithmetic, and something that looks at the result closely: it is fused into one kernel, and must round as in memory."""
    x = w.tensor(torch.is_floating_point)
    q, y, d = x, w.partner(x, torch.is_floating_point), w.dim(x)
    for form in w.rng.choices(UNARY, k=w.rng.randint(1, 3)):
        q = form.replace("{}", f"({q})" if q != x else x).format(y=y)
    form = w.rng.choice(JUDGES)
    if form.count("({q})") > 1:                              # the same value twice, not a second computation of it
        form = form.replace("({q})", "(q := {q})", 1).replace("({q})", "q").replace(", {q})", ", q)")
    return form.format(q=q, y=y, d=d)


ELSEWHERE = [".roll(1, {d})", ".flip({d})", ".flip(-1)", ".roll(-1, 0)", ".rot90(2)", ".mT", ".sum({d}, keepdim=True)", ".cumsum({d})"]
UPDATES = ["{x}.mul_({y})", "{x}.copy_({x} - {y})", "{x}.add_({y}.sin())", "{x}.copy_({y})", "{x}[..., 1:].mul_({y}[..., 1:])"]


def written_tensor(w) -> str:
    """Mostly memory of the caller, which is written at the end of the graph."""
    def accept(t):
        return t.is_floating_point() and t.dim() > 0 and t.numel() > 1
    owned = [n for n in w.names if len(n) == 1 and accept(w.env[n]) and not (w.env[n].requires_grad and is_leaf(w.env[n]))]
    return w.rng.choice(owned) if owned and w.rng.random() < 0.7 else w.tensor(accept)


@expression(10.0)
def read_elsewhere_and_written(w):
    """A value that reads a tensor at another place than the write that follows: a kernel that does both must not mix them up."""
    x = written_tensor(w)
    y, d = w.partner(x, torch.is_floating_point), w.dim(x)
    moved = x + w.rng.choice(ELSEWHERE).format(d=d)
    value = w.rng.choice(["{m} * {y}", "{y} - {m}", "({m} * {y}).sum({d})", "{m}.sin() + {y}"]).format(m=moved, y=y, d=d)
    return f"({value}, {w.rng.choice(UPDATES).format(x=x, y=y)})[0]"


ALIASES = [*["{v}.unfold({d}, 2, 2)", "{v}.unfold({d}, 2, 1)", "{v}.unfold(0, 3, 3)"] * 2, "{v}.diagonal()", "{v}.diagonal(1)",
           "{v}[..., 1:]", "{v}[::2]", "{v}.T", "{v}.mT", "{v}.unsqueeze({d})", "{v}.squeeze()", "{v}.view(-1)", "{v}.reshape(-1)",
           "{v}.select({d}, -1)", "{v}.narrow({d}, 0, 1)", "{v}.detach()", "{v}.real", "{v}.expand(2, *[-1] * {k})",
           *["{v}.expand(1, *[-1] * {k})"] * 2,
           "{v}.movedim(0, -1)", "{v}.movedim(-1, 0)", "{v}.unflatten({d}, (-1, 1))", "{v}.split(2, {d})[-1]", "{v}.split(1, {d})[0]",
           "{v}.split_with_sizes([1, {v}.shape[{d}] - 1], {d})[1]", "{v}.chunk(2, {d})[0]", "{v}.tensor_split(2, {d})[1]",
           "{v}.unbind({d})[0]", "{v}.unbind({d})[-1]", "{v}.as_strided((2, 2), (1, 1))", "{v}.as_strided((2, 2), (2, 1))",
           "{v}.as_strided((3,), (1,), {v}.storage_offset())", "{v}.view(torch.int32)", "{v}.permute(*range({k})[::-1])",
           "{v}.ravel()[1:]", "torch.view_as_complex({v}.unfold(-1, 2, 2))", "torch.view_as_complex({v}.unfold(-1, 2, 2)).imag",
           "torch.view_as_complex({v}.unfold(-1, 2, 2)).conj()", "{v}.conj()", "{v}.imag", "torch.view_as_real({v})",
           "torch._neg_view({v})"]
CHANGES = ["{v}.mul_({c})", "{v}.add_(1)", "{v}.zero_()", "{v}.copy_({v} * 2)", "{v}.fill_({x}.mean())", "{v}.sub_({v}.flip(0))",
           "{v}.neg_()", "{v}.masked_fill_({v} > 0, {c})", "{v}[0].add_({c})", "{v}.clamp_(-1, 1)", "{v}.add_({s}.sum())",
           "{v}.copy_({v}.roll(1, 0))"]
LOOKS = ["{s} * 2", "{s} + {s}", "{s}.sum()", "{s}.sin()", "{s}.clone()", "{s} - {v}.sum()"]


def alias(w, x: str) -> tuple[str, torch.Tensor]:
    """A view of x in one step or two, as text and as it is now."""
    text, t = x, w.env[x]
    for _ in range(w.rng.choice([1, 1, 2])):
        step = w.rng.choice(ALIASES).format(v=text, d=w.rng.randrange(-t.dim(), t.dim()) if t.dim() else 0, k=t.dim())
        try:
            with torch.no_grad():
                view = eval(step, {**w.space, **w.env})
        except Exception:
            continue
        outside = "as_strided" in step and not places(view) <= places(t)           # which graphs rarely have
        if view.untyped_storage()._cdata == t.untyped_storage()._cdata and (not outside or w.rng.random() < 0.1):
            text, t = step, view
    return text, t


@expression(40.0)
def written_and_seen_elsewhere(w):
    """Writes to a tensor, or to views of it, and then a look at the same memory through another one."""
    x, rng = written_tensor(w), w.rng
    (first, view), (second, other) = alias(w, x), alias(w, x)
    where = {name: places(t) for name, t in (("view", view), ("other", other), (x, w.env[x]))}
    apart = [name for name, t in (("view", view), ("other", other), (x, w.env[x])) if len(where[name]) == t.numel()]
    pairs = [(v, s) for v in apart for s in where if s != v and where[v] & where[s]]
    if not pairs or first == second:
        raise Refused
    chosen = rng.sample(pairs, min(len(pairs), rng.choice([1, 1, 2])))
    changes = ", ".join(rng.choice(CHANGES).format(v=v, s=s, x=x, c=w.number()) for v, s in chosen)
    v, s = chosen[-1]
    return f"(view := {first}, other := {second}, {changes}, {rng.choice(LOOKS).format(v=v, s=s)})[-1]"


# ---- gathers and scatters

def index_into(w, size: int, length: int, distinct: bool = False) -> str:
    """The text of a vector of positions below `size`."""
    if not size:
        raise Refused
    if distinct:
        values = w.rng.sample(range(size), min(size, length))
    else:
        values = [w.rng.randrange(-size, size) if w.rng.random() < 0.3 and not distinct else w.rng.randrange(size) for _ in range(length)]
    return f"torch.tensor({values}, device=DEVICE)"


@expression(1.5)
def picked(w):
    x = w.tensor(lambda t: t.dim() > 0)
    d = w.rng.randrange(w.env[x].dim())
    at = index_into(w, w.size(x, d), w.rng.randint(1, 5))
    positive = f"{at} % {w.size(x, d)}"
    return w.rng.choice([f"{x}[{':, ' * d}{at}]", f"{x}.index_select({d}, {positive})", f"{x}[{':, ' * d}{at}.view(-1, 1)]",
                         f"{x}[..., {index_into(w, w.size(x, -1), 3)}]", f"torch.take({x}, {positive})"])


@expression(1.0)
def gathered(w):
    x = w.tensor(lambda t: t.dim() > 0)
    d, size = w.dim(x), 0
    size = w.size(x, d)
    if not size:
        raise Refused
    return w.rng.choice([f"{x}.gather({d}, {x}.argsort({d}, stable=True))",
                         f"torch.take_along_dim({x}, {x}.argsort({d}, stable=True), {d})",
                         f"{x}.gather({d}, torch.arange({x}.numel(), device=DEVICE).reshape({x}.shape) % {size})",
                         f"{x}.gather({d}, torch.zeros_like({x}, dtype=torch.long))"])


@expression(1.0)
def by_tensor(w):
    x = w.tensor(lambda t: t.dim() > 0 and t.shape[0] > 0)
    n = w.tensor(lambda t: is_integer(t) and t.dim() < 3 and t.numel() < 60)
    return w.rng.choice([f"{x}[{n}.long() % {w.size(x, 0)}]", f"F.embedding({n}.long() % {w.size(x, 0)}, {x})",
                         f"F.one_hot({n}.long() % 5, 5)", f"{x}[{n}.long() % {w.size(x, 0)}].sum(0)"])


@expression(1.2)
def scattered(w):
    x = w.tensor(lambda t: t.dim() > 0 and t.dtype is not torch.bool)
    d = w.rng.randrange(w.env[x].dim())
    at = f"{index_into(w, w.size(x, d), w.size(x, d))} % {w.size(x, d)}"
    once = index_into(w, w.size(x, d), w.rng.randint(1, 4), distinct=True)
    where = f"({at}).view({', '.join('-1' if i == d else '1' for i in range(w.env[x].dim()))}).expand_as({x})"
    return w.rng.choice([f"{x}.index_add({d}, {at}, {x})", f"{x}.scatter_add({d}, {where}, {x})",
                         f"torch.zeros_like({x}).index_add({d}, {at}, {x})",
                         f"{x}.index_fill({d}, {once}, 2)", f"{x}.index_copy({d}, {once}, {x}.index_select({d}, {once}) * 2)",
                         f"{x}.index_put(({at},), {x}[0], accumulate=True)", f"{x}.scatter({d}, {x}.argsort({d}, stable=True), {x})",
                         f"torch.zeros_like({x}).scatter({d}, {where}, 3)", f"{x}.select_scatter({x}.select({d}, 0) * 2, {d}, -1)",
                         f"{x}.slice_scatter({x}.narrow({d}, 0, 1), {d}, 0, 1)", f"{x}.scatter_reduce({d}, {where}, {x}, 'amax')",
                         f"torch.where({x} > 0, {x}, {x}.roll(1, {d}))", f"{x}.masked_scatter({x} > 0, {x}.flip({d}))"])


# ---- products, convolutions, layers

@expression(1.5)
def product(w):
    x = w.tensor(lambda t: t.is_floating_point() and t.dim() > 0)
    last, dtype = w.size(x, -1), w.env[x].dtype
    y = w.tensor(lambda t: t.dtype is dtype and t.dim() > 0 and last in t.shape[-2:])
    options = [f"{x} @ {y}", f"{x} @ {y}.mT", f"F.linear({x}, {y})", f"torch.matmul({x}, {x}.mT)",
               f"torch.einsum('...i,...i->...', {x}, {x})",
               f"torch.einsum('...ij,...kj->...ik', {x}, {y})", f"torch.outer({x}, {y})", f"torch.tensordot({x}, {y}, ([-1], [-1]))",
               f"torch.addmm({x}[:1, :1], {x}, {y}.mT)", f"torch.bmm({x}, {y}.mT)", f"torch.baddbmm({x}[..., :1], {x}, {y}.mT)"]
    return w.rng.choice(options) + w.rng.choice([" * 0.25", ""])


@expression(0.8)
def convolution(w):
    x = w.tensor(has_dims(3, 4))
    t, spatial = w.env[x], w.env[x].dim() - 2
    channels, out = t.shape[1], w.rng.choice([1, 2, 4])
    groups = channels if channels and w.rng.random() < 0.25 else 1
    kernel = [w.rng.choice([1, 2, 3]) for _ in range(spatial)]
    weight = f"torch.linspace(-1, 1, {out * groups * (channels // groups) * _product(kernel)}, dtype={t.dtype}, device=DEVICE)" \
             f".sin().reshape({out * groups}, {channels // groups}, {', '.join(map(str, kernel))})"
    name = f"conv{spatial}d" if w.rng.random() < 0.8 else f"conv_transpose{spatial}d"
    if "transpose" in name:
        weight, groups = weight + ".transpose(0, 1)", 1
    return f"F.{name}({x}, {weight}, stride={w.rng.choice([1, 1, 2])}, padding={w.rng.choice([0, 1])}, groups={groups})"


def _product(sizes) -> int:
    out = 1
    for s in sizes:
        out *= s
    return out


@expression(1.0)
def layer(w):
    x = w.tensor(has_dims(2, 3, 4))
    t = w.env[x]
    options = [f"F.layer_norm({x}, {x}.shape[-1:])", f"F.pad({x}, ({w.rng.choice([1, -1, 0])}, 2))", f"F.dropout({x}, 0.0)",
               f"F.pad({x}, (1, 0, 0, 1), value=0.5)", f"F.batch_norm({x}, None, None, training=True)",
               f"F.rms_norm({x}, {x}.shape[-1:])",
               f"F.group_norm({x}, 1)", f"F.cross_entropy({x}, torch.arange({t.shape[0]}, device=DEVICE) % {max(t.shape[1], 1)})",
               f"F.mse_loss({x}, {x} * 0.5)", f"F.glu({x}, -1)", f"F.smooth_l1_loss({x}, {x}.roll(1, 0))",
               f"F.kl_div({x}, {x}.softmax(-1))",
               f"F.binary_cross_entropy_with_logits({x}, ({x} > 0).to({x}.dtype))", f"F.cosine_similarity({x}, {x} + 0.5, dim=-1)",
               f"F.huber_loss({x}, {x} * 0)"]
    if t.dim() == 4:
        options += [f"F.max_pool2d({x}, 2, 1)", f"F.avg_pool2d({x}, 2, 1)", f"F.adaptive_avg_pool2d({x}, 1)",
                    f"F.interpolate({x}, scale_factor=2)",
                    f"F.max_pool2d({x}, 2, padding=1, stride=2)", f"F.interpolate({x}, size=(3, 3), mode='bilinear')",
                    f"F.pixel_unshuffle({x}, 1)",
                    f"F.avg_pool2d({x}, 3, 2, 1, count_include_pad=False)", f"F.pad({x}, (1, 1, 1, 0), mode='reflect')",
                    f"F.instance_norm({x})",
                    f"F.scaled_dot_product_attention({x}, {x}, {x})", f"F.scaled_dot_product_attention({x}, {x}, {x}, is_causal=True)",
                    f"F.pad({x}, (1, 0, 0, 1), mode='circular')", f"F.unfold({x}, 2)", f"F.pixel_shuffle({x}, 1)",
                    f"F.adaptive_max_pool2d({x}, 1)"]
    if t.dim() == 3:
        options += [f"F.max_pool1d({x}, 2)", f"F.avg_pool1d({x}, 2)", f"F.interpolate({x}, size=4, mode='linear')",
                    f"F.pad({x}, (1, 1), mode='replicate')"]
    return w.rng.choice(options)


@expression(2.0)
def recurrence(w):
    x = w.tensor(lambda t: torch.is_floating_point(t) and t.dim() == 3 and 0 not in t.shape and t.shape[0] <= 4)
    kind, layers = w.rng.choice(["lstm", "gru", "rnn_tanh"]), w.rng.choice([1, 2, 2])
    return f"recurrent({kind!r}, {x}, {w.rng.choice([2, 3])}, {layers}, {w.rng.choice([0.0, 0.5])}, {w.rng.choice([1, 2])})"


# ---- from nothing

expressions(0.4, "torch.zeros_like({a})", "torch.ones({a}.shape, device=DEVICE)", "torch.full_like({x}, {c})",
            "torch.arange(6, device=DEVICE)",
            "torch.arange(6.0, device=DEVICE).view(2, 3)", "torch.eye(3, device=DEVICE)", "{a}.new_zeros(2, 3)",
            "torch.linspace(-1, 1, 5, device=DEVICE)",
            "torch.tensor([[1.0, -2.0], [0.5, 3.0]], device=DEVICE)", "{a}.new_full((3,), 2)", "torch.tensor(2.5, device=DEVICE)",
            "torch.ones_like({a}) * {c}",
            "torch.arange({a}.shape[0], device=DEVICE)", "torch.full(({a}.dim(), 2), 7, device=DEVICE)",
            "torch.tril_indices(3, 3, device=DEVICE)")


# ---- writes

def writes(weight: float, *forms: str) -> None:
    for form in forms:
        WRITES.append((weight, lambda w, form=form: w.fill(form)))


writes(1.0, "{x}.add_({y})", "{x}.mul_({c})", "{x}.sub_({f})", "{x}.copy_({y})", "{x}[0] = {c}", "{x}.t().add_(1)",
       "{x}[1:].mul_(0.5)", "{x} += {y}",
       "{x}[..., -1] = {x}[..., 0] * 2", "{n}.add_({i})", "{n}[0] = 3", "{x}.transpose(0, {d})[0].sub_({c})", "{b}.logical_not_()")
writes(0.5, "{x}.zero_()", "{x}.fill_({c})", "{x}.clamp_(-1, 1)", "{x}.relu_()", "{x}.masked_fill_({m}, {c})", "{x}[{x} > 0.5] = {c}",
       "{x}.sin_()",
       "{x}.view(-1)[::2].add_(1)", "{x}.diagonal().fill_({c})", "{x}[[0]] += 1", "{x}.detach().mul_(0.5)", "{x}.unsqueeze_({d})",
       "{x}.t_()",
       "{x}.squeeze_()", "{x}.cumsum_({d})", "{x}[..., :1].copy_({x}[..., -1:] * 2)", "{n}.bitwise_and_(6)", "{n} *= 3",
       "{x}.unbind(0)[-1].mul_(2)",
       "{x}.flatten()[1:].add_(1)", "{x}.addcmul_({f}, {f})", "{x}.lerp_({f}, 0.5)", "{x}.neg_()", "{x}.pow_(2)", "{x}.div_(1.5)",
       "{x}[:, 0] = {x}[:, -1]",
       "torch.add({x}, {f}, out={x})", "{x}.data.add_(0.5)", "{x}.swapaxes(0, -1).copy_({f})",
       "{x}.index_fill_({d}, torch.tensor([0], device=DEVICE), 1)",
       "{x}.narrow({d}, 0, 1).zero_()", "{x}.expand(2, *{x}.shape).sum(0).mul_(2)", "{x}.view(torch.int32).bitwise_and_(-2)",
       "{b} &= {m}",
       "torch._foreach_mul_([{x}, {f}], 0.5)", "{x}.tril_()", "{x}.copy_({x}.roll(1, 0))", "{x}.unfold(0, 2, 2).mul_(2)",
       "{x}.index_add_(0, torch.tensor([0, 0], device=DEVICE), {x}[:2] * 0.5)",
       "{x}.scatter_(0, torch.zeros_like({x}, dtype=torch.long)[:1], 2)", "{x}.real.add_(1)",
       "{x}.permute(*range({x}.dim())[::-1]).mul_(0.5)",
       "with torch.no_grad(): {x}.add_(1)", "with torch.no_grad(): {x}[0] = {c}", "{x}.masked_scatter_({x} > 0, {x}.clone())",
       "{b}[..., 0] = True", "{b} ^= {m}", "{b}.view(-1)[::2].logical_not_()", "{b}[{b}.clone()] = False", "{b} |= {y} > 0",
       "{b}.copy_({y})",
       "{n} //= -2", "{n} %= -3", "{n}.fill_(2.7)", "{n}[..., -1] = {n}[..., 0] * 2.5", "{x} *= {i}", "{x}[{x} > 0] *= 0.5",
       "{x}.unflatten(0, (-1, 1)).mul_(2)", "{x}.unbind(-1)[0].mul_(0.5)", "{x}.detach().detach()[..., :1].add_(1)",
       "with torch.no_grad(): {x}[1:].t().mul_(0.5)", "into(torch.sub, {x}, {x}, {f})", "into(torch.add, {n}[1:], {n}[1:], 2)",
       "torch.view_as_complex({x}.unflatten(-1, (-1, 2))).mul_(2)", "with torch.no_grad(): {x}.unbind(0)[0].copy_({x}[-1])",
       "{x}.data = {x}.data * 0.5", "{x}.data[..., 0] = 2", "{x}.clamp_(max={f})", "{x}.as_strided((2,), (1,)).mul_(0.5)",
       "{x}[..., 1:].as_strided((2,), (1,), 0).add_(1)",
       "{x}.put_(torch.tensor([0], device=DEVICE), {x}.reshape(-1)[:1] * 2)")


# ---- inputs

SIZES = [1, 1, 2, 3, 4, 5, 6, 7, 8, 16, 17, 33]


def make_input(w: Writer, name: str, B: int) -> list[str]:
    """Lines that define an input."""
    rng = w.rng
    rank = rng.choices([0, 1, 2, 3, 4], [1, 3, 8, 4, 3])[0]
    size = [rng.choice(SIZES if rank < 3 else SIZES[:8]) for _ in range(rank)]
    if rank and rng.random() < 0.05:
        size[rng.randrange(rank)] = 0
    if rank == 2 and rng.random() < 0.04:
        size[rng.randrange(2)] = 1500
    size = ["B" if s == B and rng.random() < 0.7 else str(s) for s in size]
    if rank and "B" not in size and rng.random() < 0.5:
        size[0] = "B"
    shape = ", ".join(size)
    kind = rng.choices(["float", "int", "bool", "related", "host"], [12, 2, 1, 2, 0.5])[0]
    if kind == "host":                                      # a number in a tensor, on the CPU
        return [f"{name} = torch.tensor({rng.choice(['0.5 + seed', '2', 'seed', '-1.5', 'True'])})"
                + rng.choice(["", "", f".to({rng.choice(FLOATS)})", ".float().requires_grad_()"])]
    if kind == "related" and w.names:
        x = w.tensor()
        return [f"{name} = {x}" + rng.choice(["", "", "[1:]", ".detach()", ".t()", ".reshape(-1)", "[..., :1]", ".unsqueeze(0)",
                ".view(-1)[1:]"])]
    if kind == "int":
        lines = [f"{name} = ints(-9, 10, {shape})"]
        cast = rng.choice(INTEGERS)
        return lines if cast == "torch.int64" else [lines[0] + f".to({cast})"]
    if kind == "bool":
        return [f"{name} = ints(0, 2, {shape}).bool()"]
    form = rng.choices(["plain", "transposed", "expanded", "sliced", "channels_last",
                        "stepped"], [8, 3, 2, 2, 2 if rank == 4 else 0, 2])[0]
    text = f"randn({shape})"
    if form == "transposed" and rank > 1:
        text = f"randn({', '.join(reversed(size))}).permute({list(range(rank))[::-1]})"
    elif form == "expanded" and rank:
        d = rng.randrange(rank)
        text = f"randn({', '.join('1' if i == d else s for i, s in enumerate(size))}).expand({shape})"
    elif form == "sliced" and rank:
        text = f"randn({', '.join(f'{s} + 3' for s in size)})[{', '.join(f'1:{s} + 1' for s in size)}]"
    elif form == "stepped" and rank:
        text = f"randn({', '.join([*size[:-1], f'{size[-1]} * 2'])})[..., ::2]"
    elif form == "channels_last" and rank == 4:
        text += ".to(memory_format=torch.channels_last)"
    dtype = rng.choice(FLOATS)
    text += "" if dtype == "torch.float32" else f".to({dtype})"
    lines = [f"{name} = {text}"]
    if form == "plain" and rng.random() < 0.15:
        value = rng.choice(["nan", "inf", "-inf", "-0.0", "0.0"])
        lines.append(f"{name}.view(-1)[::5] = float('{value}')")
    if "complex" in w.families and rng.random() < 0.5:
        lines[0] = f"{name} = torch.complex(({text}).float(), randn({shape}))" + rng.choice(["", "", ".conj()", ".to(torch.complex128)"])
    kind = rng.random()
    if kind < 0.4:
        lines.append(f"{name}.requires_grad_()")
    elif kind < 0.7:
        lines.append(f"{name} = leaf({name}) * 1.5")
    return lines


# ---- a program

def some_of(table, rng):
    """A program uses half of the small forms, so that these meet more often."""
    kept = [form for form in table if form[0] > 5 or rng.random() < 0.5]
    return [fn for _, fn in kept], [weight for weight, _ in kept]


def chosen(w: Writer, write: bool) -> str:
    table = (EXPRESSIONS, WRITES)[write]
    if w.rng.random() < w.share:
        table = FAMILIES[w.rng.choice(w.families)][write] or table
    forms, weights = w.forms[id(table)]
    if not forms:
        raise Refused
    return w.rng.choices(forms, weights)[0](w)


def run(w: Writer, text: str) -> bool:
    """Execute a statement; whether eager accepts it."""
    scope = {**w.space, **w.env}                            # one dictionary: lambdas see the names, too
    try:
        exec(text, scope)
    except Exception:
        return False
    w.env.update((name, value) for name, value in scope.items() if name not in w.space)
    return True


def acceptable(w: Writer, t) -> bool:
    if not isinstance(t, torch.Tensor) or t.numel() > LIMIT or t.dim() > 8 or t.layout is not torch.strided:
        return False
    if (t.is_floating_point() or t.is_complex()) and t.numel():
        values = t.detach().abs().double()
        finite = values.isfinite()
        if (finite.double().mean() < 0.6 or values[finite].amax() > LARGEST) and w.rng.random() < 0.95:
            return False
    return t.numel() > 0 or w.rng.random() < 0.3


def spoiled(w: Writer, name: str | None, written: bool) -> bool:
    """Whether eager will refuse to compute a gradient, because no one has written its formula, or a write has changed what it needs."""
    seen: set = set()
    try:
        if type(getattr(w.env.get(name), "grad_fn", None)).__name__ == "NotImplemented":
            return True
        pending = [t.grad_fn for t in w.env.values() if isinstance(t, torch.Tensor)] if written else []
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            pending.extend(before for before, _ in node.next_functions)
            for saved in SAVED.setdefault(type(node), [n for n in dir(node) if n.startswith("_saved_")]):
                getattr(node, saved)
    except RuntimeError as error:
        return "modified" in str(error)
    return False


SAVED: dict = {}                        # type of a node of autograd's -> names of what it has saved


def versions(w: Writer) -> list:
    return [t._version for t in w.env.values() if isinstance(t, torch.Tensor)]


def statement(w: Writer, refusals: bool) -> str | None:
    """Write one statement that eager accepts (`refusals`: refuses); None if this candidate will not do, "undo" if it has written."""
    try:
        if w.rng.random() < 0.2:
            text, name = chosen(w, True), None
        else:
            text, name = chosen(w, False), f"v{len(w.lines)}"
    except Refused:
        return None
    line, before = text if name is None else f"{name} = {text}", versions(w)
    ran = run(w, line)
    wanted = ran != refusals
    if wanted and ran:
        if name and isinstance(w.env[name], torch.Tensor) and w.env[name]._is_zerotensor():
            line = f"{name} = ({text}).clone()"     # eager copies a gradient known to be zero to any size; that is not to be compared
            run(w, line)
        wanted = acceptable(w, w.env[name]) if name else all(acceptable(w, t) for t in w.env.values())
    written = versions(w)[:len(before)] != before
    if wanted and ran and w.rng.random() < 0.9:
        wanted = not spoiled(w, name, written)
    return line if wanted else "undo" if written or ran and name is None else None


def program(seed: int, device: str = "cpu", favourite: str | None = None) -> str:
    """The text of a module with `entry`, `inputs` and `drive`; most of its statements are of the favourite family, if there is one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _program(Writer(seed, device, favourite), device)


def _program(w: Writer, device: str) -> str:
    rng, length, B = w.rng, 0, w.rng.choice([3, 4, 5, 7])
    made: list[str] = []
    maker = HEAD.format(device="cpu").partition("leaves = []")[2]
    while len(w.names) < 5 and (not w.names or rng.random() < 0.7):
        name = "abcde"[len(w.names)]
        lines = make_input(w, name, B)
        body = "".join(f"    {line}\n" for line in [*made, *lines])
        space = dict(w.space, leaves=[])
        text = maker + body + f"    return ({', '.join([*w.names, name])},)\n"
        try:
            exec(text, space)
            values = space["inputs"](0, B)
        except Exception:
            continue
        made += lines
        w.names.append(name)
        w.env = dict(zip(w.names, values))
    arguments, length = list(w.names), rng.randint(10, 40)
    refuse = rng.random() < (0.7 if "refusals" in w.families else 0.1) and device == "cpu"
    tries = 0
    while len(w.lines) < length and tries < 40 * length:
        tries += 1
        line = statement(w, refuse and len(w.lines) == length - 1)
        if line is None or line == "undo":
            if line == "undo":
                replay(w, maker, made, arguments, B)
                w.names = [n for n in w.names if n in w.env]
            continue
        w.lines.append(line)
        name = line.partition(" = ")[0]
        if name in w.env and name not in w.names:
            w.names.append(name)
        w.env = {n: t for n, t in w.env.items() if n in w.names}
    text = "\n".join(w.lines)
    computed = w.names[len(arguments):]
    unused = [n for n in computed if text.count(n) == 1][-8:]
    results = list(dict.fromkeys([*unused, *rng.sample(w.names, min(2, len(w.names)))]))
    body = "".join(f"    {line}\n" for line in w.lines)
    calls = [(0, B), (1, B)] + ([(2, B + rng.choice([1, 2, -1, -2]))] if rng.random() < 0.3 else [])
    # What a checkpoint runs twice must not write to what it is given: eager stops the second time where it has enough. Nor to what
    # is saved, since then no one notices that gradients are computed from what was written
    versions = [t._version for t in begin(w, maker, made, arguments, B)]
    values = replay(w, maker, made, arguments, B)
    again = [t._version for t in values] == versions and has_gradients([w.env[n] for n in results if n in w.env])
    # ... and what is written behind autograd's back, to `x.data`, is not in the copy that a hook has made, and no version tells of it
    copies = ".data" not in text
    again &= copies and "default(" not in text and "deterministic(" not in text     # where it stops behind a break, no `finally` is run
    again &= not re.search(rf"^ *({'|'.join(arguments)})\.register_hook", body, re.M)        # see README: how often an argument gets it
    around = rng.choices(["", "hooked", "on_cpu", "checkpointed"], [6, 2 * copies, copies, 9 * again])[0]
    context = setting(rng, device)
    if device == "cuda" or "denormal" in context:           # see README: numbers below the normal range, which g++ folds
        body = re.sub("1e-(39|40|42)", "1e-9", body)
    if device == "cuda":
        # One kernel writes both, and they may share memory
        body = re.sub(r"_foreach_mul_\(\[(\w+), (\w+)\]", r"_foreach_mul_([\1, \2.clone()]", body)
    return (HEAD.format(device=device) + "".join(f"    {line}\n" for line in made) + f"    return ({', '.join(arguments)},)\n\n"
            + f"def entry({', '.join(arguments)}):\n{body}    return ({', '.join(results)},)\n\n"
            + f"def drive(compile_, call):\n    fast = compile_(entry)\n    for seed, B in {calls}:\n        given = inputs(seed, B)\n"
            f"        with {context}:\n            call({around}(fast), *given)\n")


SETTINGS = ["torch.set_default_dtype, torch.float64, torch.float32", "torch.set_default_dtype, torch.bfloat16, torch.float32",
            "torch.use_deterministic_algorithms, True, False", "torch.set_flush_denormal, True, False", "torch.set_num_threads, 2, 1",
            "lambda on: torch.use_deterministic_algorithms(on, warn_only=True), True, False",
            "torch._C._set_cudnn_enabled, False, True",
            "torch.set_float32_matmul_precision, 'highest', 'highest'", "torch.set_grad_enabled, False, True",
            "torch.autograd.set_multithreading_enabled, False, True"]


def setting(rng, device: str) -> str:
    """The context of the calls of one in three programs, or of their second and third."""
    if rng.random() < 0.67:
        return "contextlib.nullcontext()"
    settings = [text for text in SETTINGS if device == "cpu" or "denormal" not in text]         # it is about the CPU's numbers
    context = rng.choice([*(f"during({text})" for text in settings), "torch.backends.mkldnn.flags(enabled=False)", "torch.device(DEVICE)"])
    return context + rng.choice(["", " if seed else contextlib.nullcontext()"])


def has_gradients(results: list) -> bool:
    try:
        loss = sum([t.double().sum() for t in results if t.requires_grad and t.grad_fn is not None], torch.ones((), requires_grad=True))
        loss.backward()
        return True
    except RuntimeError:
        return False


def begin(w: Writer, maker: str, made: list[str], arguments: list[str], B: int) -> tuple:
    """The values of the arguments."""
    space = dict(w.space, leaves=[])
    exec(maker + "".join(f"    {line}\n" for line in made) + f"    return ({', '.join(arguments)},)\n", space)
    return space["inputs"](0, B)


def replay(w: Writer, maker: str, made: list[str], arguments: list[str], B: int) -> tuple:
    """The values before the last statement, which wrote what is not wanted; those of the arguments."""
    values = begin(w, maker, made, arguments, B)
    w.env = dict(zip(arguments, values))
    for line in w.lines:
        run(w, line)
    w.env = {n: t for n, t in w.env.items() if n in w.names}
    return values


from . import families, operands  # noqa: E402, F401  they register themselves in the tables above
