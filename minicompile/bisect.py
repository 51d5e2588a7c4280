"""`minicompile.bisect(f)(*args)`: which stage changes an answer, on which graph, shown by a few lines.

The backends are a ladder, and each rung runs what the stage before it made. So the first rung whose answer is
not eager's names the stage that is wrong. Every rung runs in a process of its own (`apart.py`) and starts from
the same memory: arguments, parameters, random state. Crashes are answers, too. Where the rung is found, so is
the graph, by compiling one graph of the program there and running the others as they were captured; then that
graph is written as Python and made small (`shrink.py`).
"""
from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import functools
import importlib
import inspect
import os
import re
import sys
import types
from dataclasses import dataclass, field
from typing import Any, Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import apart, logs, marks
from .config import OPTIONS, config, resolve_options
from .errors import MinicompileError
from .restore import restored

FLOORS = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 1e-5, torch.complex64: 1e-5,
          torch.float16: 2e-3, torch.complex32: 2e-3, torch.bfloat16: 2e-2}
COARSEST = 0.2                         # of eight-bit floats


# ---- running a program and photographing what it did ------------------------------------------------------

@dataclass
class Run:
    """How a program is run. load: makes (function, args, kwargs). then: arguments of further calls.
    only: the graphs (numbers in order of compilation) that the rung gets, the others being run as captured;
    None: all. strict: internal errors are raised."""
    load: Callable
    settings: dict = field(default_factory=dict)
    calls: int = 2
    then: tuple = ()
    only: frozenset | None = None
    strict: bool = False
    weighted: bool = True


@dataclass
class Answers:
    """values: name -> what was seen there. draws: the program draws random numbers; lowest: the floor of the
    coarsest dtype it computes in; internal: errors that were softened to an eager run."""
    values: dict
    draws: bool = False
    lowest: float = 0.0
    graphs: list = field(default_factory=list)
    internal: list = field(default_factory=list)


@dataclass(frozen=True)
class Seen:
    """One value. kind: tensor, value or raised; about: what has to be equal; data: numbers to be compared."""
    kind: str
    about: tuple
    data: Any = None


def evaluate(run: Run, rung: str | None, how: str = "plain") -> Answers:
    """The answers of a program, on a rung or uncompiled (None). Changes this process: to be run apart.

    how: "plain"; "double": in float64; "moved": with inputs that are moved by one rounding."""
    from . import compile, frames, set_stance, stances, versions
    function, args, kwargs = run.load()
    function = getattr(marks.original(function), "_orig_mod", marks.original(function))
    calls = [(args, kwargs)] * run.calls + [(more, {}) for more in run.then]
    roots = {"function": function_state(function), "arguments": [*args, *kwargs.values(), *run.then]}
    change_inputs(roots, how)
    torch.manual_seed(torch.initial_seed())
    found, dtypes, graphs = Answers({}), Dtypes(), []
    target = function
    if rung is not None:
        set_stance("default")
        config.raise_on_internal_error = run.strict
        frames.internal_error = functools.partial(note_error, frames.internal_error, found.internal)
        versions.compile_graph = functools.partial(pick_rung, versions.compile_graph, run.only, graphs)
        with stances.fresh_contexts():
            target = compile(function, backend=None if rung == "default" else rung, **run.settings)
    before = random_state()
    for number, (given, named) in enumerate(calls, 1):
        with dtypes if how == "moved" else contextlib.nullcontext():
            one_call(found.values, f"call {number}", target, given, named, roots, run.weighted)
    found.draws, found.lowest, found.graphs = random_state() != before, dtypes.lowest, graphs
    return found


def note_error(real, internal: list, code, context, error, *give_up):
    """`internal_error`, noted."""
    internal.append(str(error))
    return real(code, context, error, *give_up)


def pick_rung(real, only, graphs: list, captured, context):
    """`compile_graph`, for the graphs in `only`; the others run as they were captured."""
    number = len(graphs)
    places = [n.meta.get("location") for n in captured.gm.graph.nodes if n.meta.get("location")]
    graphs.append(f"{os.path.basename(places[0].filename)}:{places[0].lineno} in {places[0].function}" if places else "")
    if only is not None and number not in only:
        context = dataclasses.replace(context, backend="eager")
    return real(captured, context)


def one_call(values: dict, name: str, target, args, kwargs, roots, weighted: bool) -> None:
    try:
        result = target(*args, **kwargs)
        see(values, f"{name}: result", result, layout=True)
        differentiate(result, weighted)
    except Exception as error:
        values[f"{name}: exception"] = Seen("raised", (type(error).__name__,), first_line(error))
    see(values, f"{name}: after", roots)


def differentiate(result, weighted: bool) -> None:
    """Backward from everything in a result that needs it. weighted: a gradient of different numbers for
    different elements; otherwise ones, which arrive expanded."""
    tensors: list = []
    walk(result, lambda name, t: tensors.append(t))
    loss = [scalar(t, weighted) for t in tensors if t.requires_grad and (t.is_floating_point() or t.is_complex())]
    if loss:
        torch.stack([part.to(loss[0].device, torch.float64) for part in loss]).sum().backward()


def scalar(t, weighted: bool):
    t = torch.view_as_real(t) if t.is_complex() else t
    if not weighted:
        return t.sum()
    weights = torch.linspace(0.5, 1.5, t.numel(), dtype=torch.float32, device=t.device).reshape(t.shape)
    return (t * weights.to(t.dtype)).sum()


def random_state() -> list:
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]
    return [bytes(s.numpy()) for s in states]


class Dtypes(TorchDispatchMode):
    """Notes the coarsest dtype that anything is computed in."""
    lowest = 0.0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex()):
                self.lowest = max(self.lowest, FLOORS.get(t.dtype, COARSEST))
        return out


def change_inputs(roots, how: str) -> None:
    """Every floating tensor within reach, in place. Tensors that share memory are changed together."""
    if how == "plain":
        return
    tensors: dict = {}
    walk(roots, lambda name, t: tensors.setdefault(id(t), t))
    generator, bases = torch.Generator().manual_seed(0), {}
    if how == "double":
        torch.set_default_dtype(torch.float64)
    for t in tensors.values():
        if t.dtype not in FLOORS or not plain_tensor(t):
            continue
        key = t.untyped_storage()._cdata, t.dtype
        if key not in bases:
            flat = torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage())
            if how == "moved":
                signs = torch.randint(0, 2, flat.shape, generator=generator).to(flat.device) * 2 - 1
                with torch.no_grad():
                    flat.add_(flat * signs * torch.finfo(t.dtype).eps)
            bases[key] = flat if how == "moved" else flat.to(torch.complex128 if t.is_complex() else torch.float64)
        if how == "double":
            t.data = bases[key].as_strided(t.shape, t.stride(), t.storage_offset())


def plain_tensor(t) -> bool:
    return type(t) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and t.layout is torch.strided and \
        not t.is_inference()


def function_state(function) -> dict:
    """What a function reaches besides its arguments: its module, closure and the globals that it names."""
    if isinstance(function, torch.nn.Module):
        return {"module": function}
    if isinstance(function, functools.partial):
        return {"function": function_state(function.func), "arguments": [*function.args, *function.keywords.values()]}
    state = {"self": getattr(function, "__self__", None)}
    function = inspect.unwrap(getattr(function, "__func__", function))
    if isinstance(function, types.FunctionType):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            try:
                state[name] = cell.cell_contents
            except ValueError:
                pass
        state |= {n: function.__globals__[n] for n in function.__code__.co_names if n in function.__globals__}
    elif hasattr(function, "__dict__"):
        state["object"] = function
    return {n: function_state(v) if isinstance(v, types.FunctionType) and v is not function else v
            for n, v in state.items()}


ATOMS = (type(None), bool, int, str, bytes, torch.dtype, torch.device, torch.Size)
CLOSED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.GeneratorType)


def walk(value, on_tensor, on_value=lambda name, value: None, name="", seen=None, depth=0) -> None:
    """Every tensor and every plain value within reach, by name."""
    seen = {} if seen is None else seen
    kind = type(value)
    if kind in ATOMS or kind is float or kind is complex:
        return on_value(name, value)
    if id(value) in seen or depth > 12 or isinstance(value, CLOSED):
        return None
    seen[id(value)] = value
    if isinstance(value, torch.Tensor):
        return on_tensor(name, value)
    parts: dict = {}
    if isinstance(value, collections.abc.Mapping):
        parts = {f"[{k!r}]": v for k, v in value.items() if type(k) in ATOMS}
    elif isinstance(value, (list, tuple, collections.deque)):
        parts = {f"[{i}]": v for i, v in enumerate(value)}
    if isinstance(value, torch.nn.Module):
        parts = {f".{k}": v for group in (value._parameters, value._buffers, value._modules) for k, v in group.items()}
        parts |= {f".{k}": v for k, v in vars(value).items() if not k.startswith("_")}
    elif getattr(value, "__dict__", None) and kind.__module__ != "torch":
        parts |= {f".{k}": v for k, v in vars(value).items()}
    for label, part in parts.items():
        walk(part, on_tensor, on_value, name + label, seen, depth + 1)
    return None


def see(values: dict, name: str, value, layout: bool = False) -> None:
    """Photograph a value. layout: strides count."""
    def tensor(path, t):
        values[name + path] = photograph(t, layout)
        if t.is_leaf and t.grad is not None:
            values[name + path + ".grad"] = photograph(t.grad, False)

    def plain(path, x):
        values[name + path] = Seen("tensor", ("number",), torch.tensor(x, dtype=torch.float64)) \
            if type(x) is float else Seen("value", (repr(x)[:500],))
    walk(value, tensor, plain)


def photograph(t: torch.Tensor, layout: bool) -> Seen:
    if not plain_tensor(t) and not (t.layout is torch.strided and type(t).__torch_dispatch__ is torch.Tensor.__torch_dispatch__):
        return Seen("value", (type(t).__name__, tuple(t.shape)))
    strides = tuple(s for s, n in zip(t.stride(), t.shape) if n > 1) if layout and t.numel() else None
    about = tuple(t.shape), str(t.dtype), t.device.type, t.requires_grad, strides
    return Seen("tensor", about, t.detach().resolve_conj().resolve_neg().cpu().clone())


def first_line(error) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


# ---- comparing --------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Difference:
    """Where a rung differs from eager. kind: crash, exception, value, or form (shape, dtype, strides, a value
    that is no tensor). amount: the largest difference; own: eager's own error there; allowed: what would
    pass."""
    where: str
    kind: str
    text: str
    amount: float = float("inf")
    own: float = 0.0
    allowed: float = 0.0

    def __str__(self):
        return f"{self.where}: {self.text}"


@dataclass
class References:
    plain: Answers
    double: Answers | None
    moved: Answers | None

    @property
    def floor(self) -> float:
        return self.moved.lowest if self.moved else COARSEST


def references(run: Run, seconds: float) -> References | str:
    """Eager's answers, those of a float64 evaluation and those on moved inputs, or how eager ended."""
    plain = apart.run(evaluate, run, None, seconds=seconds)
    if plain.error:
        return plain.error
    moved = apart.run(evaluate, run, None, "moved", seconds=seconds)
    double = None if plain.value.draws else apart.run(evaluate, run, None, "double", seconds=seconds).value
    return References(plain.value, double, moved.value)


def compare(outcome: apart.Outcome, refs: References) -> list[Difference]:
    """All differences, the largest (in terms of what is allowed) first."""
    if outcome.error:
        return [Difference("the whole program", "crash", outcome.error)]
    got, want, found = outcome.value.values, refs.plain.values, []
    for name in dict.fromkeys([*want, *got]):
        a, b = got.get(name), want.get(name)
        raised = next((s for s in (a, b) if s is not None and s.kind == "raised"), None)
        if raised is not None:
            if a is None or b is None or a.about != b.about:
                found.append(Difference(name, "exception", f"{said(a, 'compiled')}, {said(b, 'eager')}"))
        elif a is None or b is None or (a.kind, a.about) != (b.kind, b.about):
            found.append(Difference(name, "form", f"{form(a)} where eager has {form(b)}"))
        elif a.data is not None:
            others = [ref.values[name].data if ref is not None and name in ref.values else None
                      for ref in (refs.double, refs.moved)]
            found += numbers(name, a.data, b.data, *others, refs.floor)
    return sorted(found, key=lambda d: (("crash", "exception", "form", "value").index(d.kind),
                                        -d.amount / max(d.allowed, 1e-30)))


def said(seen: Seen | None, who: str) -> str:
    return f"{who} raises nothing" if seen is None else f"{who} raises {seen.about[0]}: {seen.data}"


def form(seen: Seen | None) -> str:
    if seen is None:
        return "nothing"
    if seen.kind != "tensor" or seen.about == ("number",):
        return " ".join(map(str, seen.about))
    shape, dtype, device, grad, strides = seen.about
    return f"{dtype} {list(shape)} on {device}" + (f" with strides {strides}" if strides else "") + \
        (" that requires grad" if grad else "")


def numbers(name, got, want, double, moved, floor: float) -> list[Difference]:
    """Compare the numbers of two tensors. No further from a float64 evaluation than four times eager's own
    error, also on moved inputs, plus a floor by dtype. Where those disagree with eager about integers, NaN or
    infinity, rounding decides, and nothing is compared."""
    def wide(t):
        if t is None or t.shape != want.shape:
            return None
        t = torch.view_as_real(t) if t.is_complex() else t
        return t.to(torch.float64)
    exact = not (want.is_floating_point() or want.is_complex())
    got, want, double, moved = (wide(t) for t in (got, want, double, moved))
    others = [t for t in (double, moved) if t is not None]
    decided = torch.ones_like(want, dtype=torch.bool)
    for other in others:
        decided &= (other == want) if exact else (other.isfinite() == want.isfinite())
    reference = want if double is None or exact else double
    finite = want.isfinite() & decided & reference.isfinite()
    wrong = decided & ~finite & ~((got == want) | (got.isnan() & want.isnan())) | finite & ~got.isfinite()
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        return [Difference(name, "value", f"{got[at].item()} where eager has {want[at].item()}, at {list(at)}")]
    if not finite.any():
        return []

    def error(a, b):
        apart_by = (a - b).abs()[finite]
        return apart_by[apart_by.isfinite()].max().item() if apart_by.isfinite().any() else 0.0
    own = 0.0 if exact else max([error(want, reference), *(error(t, want) for t in others if t is moved)])
    allowed = 4 * own + (0.0 if exact else floor * (reference.abs() + 1e-2))
    beyond = (((got - reference).abs() - allowed).where(finite, torch.tensor(-1.0, dtype=torch.float64)))
    if not (beyond > 0).any():
        return []
    at = tuple(beyond.nonzero()[0].tolist()) if beyond.dim() == 0 else \
        tuple(int(i) for i in torch.unravel_index(beyond.argmax(), beyond.shape))
    limit = allowed[at].item() if isinstance(allowed, torch.Tensor) else allowed
    return [Difference(name, "value", f"{got[at].item():.9g} where eager has {want[at].item():.9g}"
                       f"{f', at {list(at)}' if at else ''}", error(got, reference), own, limit)]


@functools.cache
def warm() -> None:
    """Import what the first compilation imports, once for all processes to come. One of them says what that is:
    to compile anything here would start the threads of the autograd engine, which no fork survives."""
    for name in apart.forked(imported_by_compiling, (), 120.0).value or ():
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def imported_by_compiling() -> list[str]:
    from . import compile
    before = set(sys.modules)
    compile(lambda x: x * 2 + x.sum())(torch.ones(4, requires_grad=True)).sum().backward()
    return [name for name in sys.modules if name not in before]


# ---- the ladder -------------------------------------------------------------------------------------------

@dataclass
class Bisection:
    """What `bisect` found. rung: the first that differs, or None; before: the rung below it ("uncompiled"
    under the first). graph: number of the graph (from 1) and the place where it begins, or None. code: the
    reduced graph as a function. nodes: how many operations it has. path: a script that shows the difference.
    largest: the largest Difference at that rung; differences: all. notes: what else there is to say."""
    name: str
    rung: str | None = None
    before: str | None = None
    graph: tuple | None = None
    code: str | None = None
    nodes: int | None = None
    path: str | None = None
    largest: Difference | None = None
    differences: list = field(default_factory=list)
    notes: list = field(default_factory=list)
    tried: list = field(default_factory=list)

    def __str__(self):
        return as_text(self)

    __repr__ = __str__


def as_text(b: Bisection) -> str:
    lines = [f"{b.name}: no difference" + (f" ({', '.join(b.tried)})" if b.tried else "")]
    if b.largest is not None:
        lines = [f"{b.name}: {b.rung or 'uncompiled'} differs from eager" if b.rung else f"{b.name}: not compared", f"  {b.largest}"]
        if b.largest.kind == "value" and b.largest.amount != float("inf"):
            lines.append(f"  by {b.largest.amount:.3g}; eager's own error is {b.largest.own:.3g}")
        lines += [f"  also {d}" for d in b.differences[1:4]]
        if len(b.differences) > 4:
            lines.append(f"  and {len(b.differences) - 4} more")
    if b.rung and b.before:
        lines.append(f"  {b.before} does not")
    if b.graph:
        lines.append(f"Graph {b.graph[0]}" + (f", from {b.graph[1]}" if b.graph[1] else ""))
    if b.code:
        lines += [f"reduced to {b.nodes} operation{'s' * (b.nodes != 1)}:", "", *("    " + line for line in b.code.splitlines()), ""]
    if b.path:
        lines.append(f"Shown by {b.path}")
    return "\n".join(lines + b.notes)


def rungs_for(answers: Answers, settings: dict) -> list[str]:
    devices = {seen.about[2] for seen in answers.values.values() if seen.kind == "tensor" and len(seen.about) > 2}
    rungs = ["eager", "aot_eager", "decomposed", "loops"]
    if "cuda" in devices:
        rungs += ["triton", "cudagraphs"]
    else:
        rungs += ["cpp", *(["triton"] if os.environ.get("TRITON_INTERPRET") == "1" else [])]
    options = resolve_options(settings.get("mode"), settings.get("options"))
    return rungs + ["default"] * bool(options.get("cudagraphs"))


def settings_of(rung: str, settings: dict) -> dict:
    """The settings of one rung: those of the user, on the lower rungs without CUDA graphs."""
    if rung == "default":
        return settings
    options = resolve_options(settings.get("mode"), settings.get("options"))
    rest = {k: v for k, v in settings.items() if k not in ("mode", "options")}
    return rest | {"options": {k: v for k, v in options.items() if k != "cudagraphs" and k in OPTIONS}}


def bisect(function, *, then=(), calls: int | None = None, seconds: float = 120.0, out: str = "bisect-results",
           **settings):
    """bisect(f)(*args, **kwargs): find the first rung of the ladder of backends whose answer differs from
    eager's, reduce the graph on which it does, and write a script that shows it. Returns a `Bisection`.

    Compared are results, arguments and modules afterwards, gradients and exceptions; a crash is a difference,
    too. Numbers may be no further from a float64 evaluation than four times eager's own error (measured also
    on inputs moved by one rounding) plus a floor by dtype.

    then: positional arguments of further calls, `then=[(torch.randn(7),)]`. calls: how often the first
    arguments are used (default 2, with CUDA graphs 4). seconds: the limit for one rung, and for reducing.
    out: folder of the script. settings: of `compile` (dynamic, mode, options, fullgraph). Without `dynamic`,
    a program without a difference is tried once more with dynamic=True."""
    if unknown := set(settings) - {"dynamic", "mode", "options", "fullgraph"}:
        raise MinicompileError(f"bisect takes the settings dynamic, mode, options and fullgraph of compile, not {min(unknown)!r}.")
    resolve_options(settings.get("mode"), settings.get("options"))

    def run(*args, **kwargs):
        plain = marks.original(function)
        plain = getattr(plain, "_orig_mod", plain)
        name = getattr(plain, "__qualname__", None) or type(plain).__name__
        found = Bisection(name)
        case = Run(lambda: (function, args, kwargs), settings, calls or 2, tuple(then))
        return search(found, case, calls, seconds, out)
    return run


@contextlib.contextmanager
def undone(run: Run):
    """Afterwards what the program reaches, random state, settings and compiled code are as they were (`restore.py`)."""
    from . import frames, stances, versions
    function, args, kwargs = run.load()
    states = []
    keep = versions.compile_graph, frames.internal_error, stances.current.name, config.raise_on_internal_error
    watch = lambda kind, state=None, **data: states.append(state) if state is not None else None     # noqa: E731
    logs.watchers.append(watch)
    try:
        with restored([function, args, kwargs, run.then]):
            yield
    finally:
        logs.watchers.remove(watch)
        versions.compile_graph, frames.internal_error, stances.current.name, config.raise_on_internal_error = keep
        for state in {id(s): s for s in states}.values():
            frames.forget(state)


def search_recorded(found: Bisection, case: Run, calls: int | None, seconds: float, out: str) -> Bisection:
    """In a process that has used a GPU, which cannot be forked: the graphs are captured here, and the rungs
    above run them apart, with the inputs that they had."""
    from . import shrink
    with undone(case):
        refs = References(evaluate(case, None), None, None)
    rungs = rungs_for(refs.plain, case.settings)
    with undone(case):
        answers, programs = shrink.record(case)
    found.tried.append("eager")
    if differences := compare(apart.Outcome(answers), refs):
        found.rung, found.before, found.largest, found.differences = "eager", "uncompiled", differences[0], differences
        return found
    written = {n: p for n, p in programs.items() if isinstance(p, list) and p}
    found.notes += [f"Graph {n + 1} was not compared: {p or 'it was not called'}." for n, p in programs.items() if n not in written]
    known: dict = {}
    repeat = calls or (4 if {"cudagraphs", "default"} & set(rungs) else 2)
    for number, recorded in list(written.items()):
        for i, program in enumerate(recorded):
            known[number, i] = apart.run(shrink.references_of, dataclasses.replace(program, calls=repeat), seconds=seconds)
            if known[number, i].error:
                found.notes.append(f"Graph {number + 1} was not compared: {known[number, i].error.splitlines()[0]}")
                written.pop(number, None)
                break
    for below, rung in zip(rungs, rungs[1:] if written or not programs else []):
        found.tried.append(rung)
        for number, recorded in written.items():
            for i, program in enumerate(recorded):
                program = dataclasses.replace(program, calls=repeat, settings=settings_of(rung, program.settings))
                outcome = apart.run(evaluate, program.run(), rung, seconds=seconds)
                if differences := compare(outcome, known[number, i].value):
                    found.rung, found.before, found.largest, found.differences = rung, below, differences[0], differences
                    found.graph = number + 1, answers.graphs[number]
                    shrink.reduce(found, [program], rung, seconds, out)
                    return found
    return found


def bisect_file(what: str, arguments: list[str], *, seconds: float, out: str, **settings) -> Bisection:
    """The same for FILE:FUNCTION and expressions for its arguments (`target.py`). The file is imported in the
    processes apart only, so that each of them may use a GPU."""
    from .target import load
    os.environ.update(apart.ASK_NVML)
    settings = {k: v for k, v in settings.items() if v is not None}
    found = search(Bisection(what.rpartition(":")[2]), Run(functools.partial(load, what, arguments), settings), None,
                   seconds, out)
    if not found.rung and found.largest and found.largest.text.startswith("MinicompileError: "):
        raise MinicompileError(found.largest.text.removeprefix("MinicompileError: "))
    return found


# What a fork cannot do where there is a GPU: use it after this process has looked for it, or run a backward pass
# after this process has.
NOT_FORKED = re.compile("re-initialize CUDA|fork-based multiprocessing")


def search(found: Bisection, case: Run, calls: int | None, seconds: float, out: str) -> Bisection:
    warm()
    if torch.cuda.is_initialized():
        return search_recorded(found, case, calls, seconds, out)
    refs = references(case, seconds)
    if not isinstance(refs, str) and any(NOT_FORKED.search(str(s.data)) for s in refs.plain.values.values()):
        return search_recorded(found, case, calls, seconds, out)
    if isinstance(refs, str):
        found.largest = Difference("uncompiled", "crash", refs)
        found.notes.append("The program ends like this without minicompile.")
        return found
    rungs = rungs_for(refs.plain, case.settings)
    if calls is None and {"cudagraphs", "default"} & set(rungs):
        case.calls = 4                 # plain, recorded, replayed, and replayed over what was kept
        refs = references(case, seconds)
    variants = [case.settings] + [case.settings | {"dynamic": True}] * (case.settings.get("dynamic") is None)
    internal = None
    for settings in variants:
        for below, rung in zip(["uncompiled", *rungs], rungs):
            attempt = dataclasses.replace(case, settings=settings_of(rung, settings))
            outcome = apart.run(evaluate, attempt, rung, seconds=seconds)
            found.tried.append(rung + " with dynamic shapes" * (settings.get("dynamic") is True))
            if outcome.error and outcome.error.startswith("not finished"):
                found.notes.append(f"{rung}: {outcome.error}; not compared.")
                continue
            if outcome.value is not None and outcome.value.internal and internal is None:
                internal = below, rung, attempt
            if differences := compare(outcome, refs):
                return describe(found, attempt, refs, below, rung, differences, seconds, out)
    if internal is not None:           # right answers, by running eagerly
        below, rung, attempt = internal
        attempt.strict = True
        if differences := compare(apart.run(evaluate, attempt, rung, seconds=seconds), refs):
            found.notes.append("Outside of bisect the program runs eagerly there, with a warning.")
            return describe(found, attempt, refs, below, rung, differences, seconds, out)
    return found


def describe(found: Bisection, case: Run, refs, below, rung, differences, seconds, out) -> Bisection:
    """The rung is known: find the graph, and reduce it."""
    from . import shrink
    found.rung, found.before, found.largest, found.differences = rung, below, differences[0], differences
    again = apart.run(evaluate, dataclasses.replace(case), None, seconds=seconds)
    if any(d.kind != "crash" for d in compare(again, refs)):
        found.notes.append("Eager differs from itself when it is run again: the program is not deterministic.")
        return found
    if rung == "eager":
        found.notes.append("The captured graph, its guards or its side effects are wrong; explain(f)(*args) shows them.")
        return found
    graph = find_graph(case, rung, refs, seconds)
    if graph is None:
        found.notes.append("No graph by itself makes the difference.")
        return found
    number, place = graph
    found.graph = number + 1, place
    recorded = apart.run(shrink.record, case, number, seconds=seconds)
    programs = recorded.value[1].get(number) if recorded.value else recorded.error
    if isinstance(programs, list) and programs:
        shrink.reduce(found, programs, rung, seconds, out)
    else:
        found.notes.append(f"The graph was not reduced: {programs or 'it was not called'}.")
    return found


def find_graph(case: Run, rung: str, refs, seconds) -> tuple[int, str] | None:
    """(number, place) of the graph that differs on this rung while all others run as captured."""
    def differs(only):
        outcome = apart.run(evaluate, dataclasses.replace(case, only=frozenset(only)), rung, seconds=seconds)
        return bool(compare(outcome, refs)), outcome
    wrong, outcome = differs([])
    graphs = outcome.value.graphs if outcome.value else []
    low, high = 0, len(graphs)         # the first `low` graphs make no difference, the first `high` do
    if wrong or not graphs or not differs(range(high))[0]:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if differs(range(middle))[0] else (middle, high)
    return (low, graphs[low]) if differs([low])[0] else None
