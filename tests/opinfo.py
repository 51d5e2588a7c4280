"""PyTorch's operator samples as programs, for tests/test_opinfo.py.

Each operator becomes one function of tensors that calls it on several samples, written as ordinary Python text. That is what a
user would write, and it costs one compilation instead of several. `check_operator` runs it compiled and in eager mode and compares
everything that can be observed."""

import itertools
import re
import warnings
from dataclasses import dataclass, field

import torch
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, SampleInput, UnaryUfuncInfo
from torch.utils import _pytree as pytree

import minicompile
from minicompile import driver
from minicompile.errors import GraphBreakError

# Samples of random operators seed the generator inside of the call; here the caller seeds, so that the stream is compared.
common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)

# Results of any value, or that differ from one eager call to the next.
NO_ANSWER = {"empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "empty_permuted", "resize_", "resize_as_",
             "nn.functional.fractional_max_pool2d"}
OPERATORS = [op for op in op_db if op.name not in NO_ANSWER and not op.name.startswith("jiterator")]
EXACT = (torch.int64, torch.bool, torch.int32)


def dtypes_of(op) -> list[torch.dtype]:
    """float32, and one integer or bool type."""
    supported = op.supported_dtypes("cpu")
    return [d for d in (torch.float32,) if d in supported] + [d for d in EXACT if d in supported][:1]


# %% The samples

def tensors_of(sample) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(t, torch.Tensor)]


def features(sample) -> set[str]:
    """What makes a sample different from the plain one."""
    tensors, found = tensors_of(sample), set()
    shapes = {tuple(t.shape) for t in tensors}
    found |= {"broadcast"} if len(shapes) > 1 else set()
    for t in tensors:
        found |= {"empty"} if t.numel() == 0 else {"one"} if 1 in t.shape else set()
        found |= {"scalar"} if t.dim() == 0 else set()
        found |= {"strided"} if not t.is_contiguous() else set()
        found |= {"special"} if t.is_floating_point() and not t.isfinite().all() else set()
    return found | {f"rank{sample.input.dim()}"} if isinstance(sample.input, torch.Tensor) else found


def samples_of(op, dtype, count: int, look: int = 16) -> list:
    """Up to `count` of the first `look` samples: the first one, then those that add the most features."""
    grad = op.supports_autograd and dtype.is_floating_point
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            pool = [s for s in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=grad), look)]
        except (RuntimeError, ImportError):                 # the database needs a library that is not there
            return []
    pool += list(variations(op, pool, grad))
    pool = [s for s in pool if tensors_of(s) and all(t.layout == torch.strided and t.numel() < 20000 for t in tensors_of(s))]
    chosen, seen = [], set()
    while pool and len(chosen) < count:
        best = max(pool, key=lambda s: len(features(s) - seen)) if chosen else pool[0]
        pool.remove(best)
        chosen.append(best)
        seen |= features(best)
    return chosen


SPECIAL = [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -2.5, 1e4, -1e-30, 88.0, 7.0, -7.0]


def variations(op, pool, grad: bool):
    """More samples for elementwise operators, whose own are few: transposed, size one, empty, and numbers at the edges."""
    if not pool or not isinstance(op, (UnaryUfuncInfo, BinaryUfuncInfo)):
        return
    first = pool[0]
    if isinstance(op, UnaryUfuncInfo):
        flat = first.input.detach().flatten().repeat(18)
        for t in (flat[:18].reshape(3, 6).t(), flat[:1].reshape(1, 1), flat[:0], flat[0], torch.tensor(SPECIAL) if grad else flat):
            yield SampleInput(t.clone().requires_grad_(grad), args=first.args, kwargs=first.kwargs)
    elif grad:
        count = len(SPECIAL)
        yield SampleInput(torch.tensor(SPECIAL * count).requires_grad_(),
                          args=(torch.tensor(SPECIAL).repeat_interleave(count).requires_grad_(), *first.args[1:]), kwargs=first.kwargs)


# %% From samples to a program

@dataclass
class Program:
    """Python text of a function of `inputs`; `constants` are its globals."""
    inputs: list[torch.Tensor]
    text: str
    constants: dict
    function: object = None


def program_of(op, samples, variant=None) -> Program:
    """One function that calls `op` on each of `samples` and returns the list of all results. variant: "inplace" calls
    the in-place method on copies, "method" the method."""
    program = Program([], "", {"torch": torch, "op": op.inplace_variant if variant == "inplace" else
                               op.method_variant if variant == "method" else op.op})

    def spell(value) -> str:
        if isinstance(value, torch.Tensor):
            program.inputs.append(value)
            return f"t{len(program.inputs) - 1}"
        if type(value) is list:
            return "[" + ", ".join(map(spell, value)) + "]"
        if type(value) is tuple:
            return "(" + "".join(spell(v) + ", " for v in value) + ")"
        if value is None or type(value) in (bool, int, str) or type(value) is float and repr(value)[-1].isdigit():
            return repr(value)
        if type(value) is slice:
            return f"slice({spell(value.start)}, {spell(value.stop)}, {spell(value.step)})"
        name = f"c{len(program.constants)}"
        program.constants[name] = value
        return name

    lines = []
    for number, sample in enumerate(samples):
        first = spell(sample.input)
        if variant == "inplace":
            first += ".clone()"
        rest = [spell(a) for a in sample.args] + [f"{k}={spell(v)}" for k, v in sample.kwargs.items()]
        lines.append(f"    r{number} = op({', '.join([first, *rest])})")
    names = ", ".join(f"t{i}" for i in range(len(program.inputs)))
    results = ", ".join(f"r{i}" for i in range(len(samples)))
    program.text = "\n".join([f"def {re.sub(r'[^a-zA-Z0-9]', '_', op.formatted_name)}({names}):", *lines, f"    return [{results}]", ""])
    namespace = dict(program.constants)
    exec(compile(program.text, f"<{op.formatted_name}>", "exec"), namespace)
    program.function = next(v for k, v in namespace.items() if k == re.sub(r"[^a-zA-Z0-9]", "_", op.formatted_name))
    return program


# %% Running and comparing

def twin(t: torch.Tensor) -> torch.Tensor:
    """A leaf with the same values, strides and need of a gradient."""
    if t.numel() == 0 or all(s > 0 or n == 1 for s, n in zip(t.stride(), t.shape)):
        new = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
        new.copy_(t.detach())
    else:
        new = t.detach().clone()
    return new.requires_grad_(t.requires_grad)


@dataclass
class Observed:
    outputs: list = field(default_factory=list)
    gradients: list = field(default_factory=list)
    inputs: list = field(default_factory=list)
    aliases: list = field(default_factory=list)             # for each output, the inputs whose memory it shares


def observe(function, inputs, change_seed=lambda seed: seed) -> Observed:
    """change_seed: to be applied to the incoming gradients."""
    leaves = [twin(t) for t in inputs]
    torch.manual_seed(7)
    result = pytree.tree_leaves(function(*leaves))
    out = Observed(result, inputs=leaves)
    storages = [t.untyped_storage().data_ptr() for t in leaves]
    for r in result:
        shared = isinstance(r, torch.Tensor) and r.layout == torch.strided and r.numel()
        out.aliases.append([i for i, s in enumerate(storages) if shared and r.untyped_storage().data_ptr() == s])
    roots = [r for r in result if isinstance(r, torch.Tensor) and r.requires_grad]
    wanted = [t for t in leaves if t.requires_grad]
    if roots and wanted:
        generator = torch.Generator().manual_seed(1)
        seeds = [change_seed(torch.randn(r.shape, dtype=torch.float64, generator=generator).to(r.dtype)) for r in roots]
        out.gradients = list(torch.autograd.grad(roots, wanted, seeds, allow_unused=True))
    return out


def difference(got, want, rtol: float, atol: float, strides: bool) -> str | None:
    """What differs between two results, in words."""
    if not isinstance(want, torch.Tensor):
        same = type(got) is type(want) and (got == want or got != got and want != want)
        return None if same else f"{got!r} instead of {want!r}"
    if not isinstance(got, torch.Tensor):
        return f"{got!r} instead of a tensor"
    for what in ("dtype", "shape", "layout", "requires_grad"):
        if getattr(got, what) != getattr(want, what):
            return f"{what} {getattr(got, what)} instead of {getattr(want, what)}"
    if want.layout != torch.strided:
        return None
    order = [[s for n, s in zip(t.shape, t.stride()) if n > 1] for t in (got, want)]
    if strides and want.numel() and order[0] != order[1]:
        return f"strides {got.stride()} instead of {want.stride()} (shape {tuple(want.shape)})"
    exact = not (want.is_floating_point() or want.is_complex())
    try:
        torch.testing.assert_close(got, want, rtol=0 if exact else rtol, atol=0 if exact else atol, equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split())[:300]
    return None


def compare(got: Observed, want: Observed, rtol=1e-4, atol=2e-5, strides=True) -> list[str]:
    """All differences. The strides of gradients are free: whoever accumulates them chooses."""
    problems = []
    if got.aliases != want.aliases:
        problems.append(f"outputs share memory with inputs {got.aliases} instead of {want.aliases}")
    for what in ("outputs", "gradients", "inputs"):
        g, w = getattr(got, what), getattr(want, what)
        if len(g) != len(w):
            problems.append(f"{len(g)} {what} instead of {len(w)}")
        for i, (a, b) in enumerate(zip(g, w)):
            if (why := difference(a, b, rtol, atol, strides and what == "outputs")) is not None:
                problems.append(f"{what[:-1]} {i}: {why}")
    return problems


@dataclass
class Outcome:
    """state: "compiled" (one graph), "broke" (graph breaks or eager), "no sample"."""
    state: str
    reason: str = ""
    problems: list = field(default_factory=list)
    kernels: int = 0


def check_program(program: Program, backend: str, **tolerances) -> Outcome:
    try:
        want = observe(program.function, program.inputs)
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        return Outcome("no sample", f"eager raises: {error}")
    minicompile.reset()
    driver.counters.clear()
    outcome = Outcome("compiled")
    with minicompile.config.patch(raise_on_internal_error=True):
        try:
            got = observe(minicompile.compile(program.function, backend=backend, fullgraph=True), program.inputs)
        except GraphBreakError as error:
            outcome = Outcome("broke", str(error).splitlines()[0].split(" breaks: ")[-1])
            minicompile.reset()
            got = observe(minicompile.compile(program.function, backend=backend), program.inputs)
    outcome.kernels = driver.counters.kernels
    if driver.counters.graphs == 0 and backend != "eager":
        outcome.state, outcome.reason = "broke", outcome.reason or "no graph"
    outcome.problems = compare(got, want, **tolerances)
    return outcome


# %% Numbers that are not finite

def spoiled(t, values=(float("nan"), float("inf"), float("-inf"))):
    """`t` with every third element replaced by one of `values`, in turn."""
    if not isinstance(t, torch.Tensor) or not t.is_floating_point():
        return t
    new, place = twin(t), torch.arange(t.numel()).reshape(t.shape)
    with torch.no_grad():
        for i, value in enumerate(values):
            new[place % (3 * len(values)) == 3 * i] = value
    return new


def spoil(sample) -> SampleInput:
    first, args, kwargs = (pytree.tree_map(spoiled, part) for part in (sample.input, sample.args, sample.kwargs))
    return SampleInput(first, args=args, kwargs=kwargs)


def with_gaps(t):
    """The same numbers in every second place of a larger memory, for which kernels take numbers one by one."""
    return torch.stack([t.detach(), t.detach()], -1)[..., 0].requires_grad_(t.requires_grad)


def differences_of_spoiled(program: Program, backend: str, change_seed) -> list[str]:
    """Eager kernels that take several numbers at once treat a NaN otherwise than those that take one. What the two give is compared
    where it is the same."""
    try:
        want, again = observe(program.function, program.inputs, change_seed), observe(program.function, program.inputs, change_seed)
        single = observe(program.function, list(map(with_gaps, program.inputs)), lambda seed: with_gaps(change_seed(seed)))
    except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError):
        return []
    if compare(again, want):
        return []
    minicompile.reset()
    with minicompile.config.patch(raise_on_internal_error=True):
        got = observe(minicompile.compile(program.function, backend=backend), program.inputs, change_seed)
    for ours, theirs, others in zip(*((o.outputs, o.gradients) for o in (got, want, single))):
        for i, (a, b, other) in enumerate(zip(ours, theirs, others)):
            if not all(isinstance(t, torch.Tensor) and t.layout is torch.strided and t.shape == b.shape for t in (b, a, other)):
                continue
            if b.is_floating_point():
                apart = (b - other).detach().abs() > 1e-3 * (1 + b.detach().abs())
                undecided = (b.isnan() != other.isnan()) | (b.isinf() != other.isinf()) | apart
                ours[i], theirs[i] = (torch.where(undecided, 0, t.detach()).requires_grad_(t.requires_grad) for t in (a, b))
    return compare(got, want, strides=False)


# %% Tolerances

NOT_CLOSE = {
    # Samples that normalise one element: the exact gradient is zero, and both answers are what rounding left.
    "nn.functional.layer_norm": dict(atol=5e-4), "native_layer_norm": dict(atol=5e-4),
    # The functional variant of the eager kernel orders its result like the operand, the kernel itself does not.
    "nn.functional.rrelu": dict(strides=False),
}
