"""What a program answers, on a rung of the ladder or in eager, and how two answers differ.

A rung starts from the same memory as eager: arguments, parameters, random state. Its answers are everything that the
program gives or changes: results, arguments and modules afterwards, gradients, exceptions; a crash is an answer, too.
`bisect` and the explorer compare them.
"""
import collections.abc
import contextlib
import dataclasses
import functools
import inspect
import os
import re
import types
from dataclasses import dataclass, field
from typing import Any, Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .. import logs, marks
from ..config import OPTIONS, config, resolve_options
from . import apart
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


def answers_of(run: Run, rung: str | None, how: str = "plain") -> Answers:
    """The answers of a program, on a rung or uncompiled (None). Changes this process: to be run apart.

    how: "plain"; "double": in float64; "moved": with inputs that are moved by one rounding."""
    from .. import stances, versions
    from ..api import compile
    function, args, kwargs = run.load()
    function = marks.uncompiled(function)
    calls = [(args, kwargs)] * run.calls + [(more, {}) for more in run.then]
    roots = {"function": function_state(function), "arguments": [*args, *kwargs.values(), *run.then]}
    change_inputs(roots, how)
    torch.manual_seed(torch.initial_seed())
    found, dtypes, graphs = Answers({}), Dtypes(), []
    target = function
    if rung is not None:
        stances.set_stance("default")
        config.raise_on_internal_error = run.strict
        logs.watchers.append(lambda kind, error=None, **data: found.internal.append(str(error)) if kind == "internal_error" else None)
        versions.call_backend = functools.partial(pick_rung, versions.call_backend, run.only, graphs)
        with stances.fresh_contexts():
            target = compile(function, backend=None if rung == "default" else rung, **run.settings)
    before = random_state()
    for number, (given, named) in enumerate(calls, 1):
        with dtypes if how == "moved" else contextlib.nullcontext():
            one_call(found.values, f"call {number}", target, given, named, roots, run.weighted)
    found.draws, found.lowest, found.graphs = random_state() != before, dtypes.lowest, graphs
    return found


def pick_rung(real, only, graphs: list, captured, context, *late_error):
    """`call_backend`, for the graphs in `only`; the others run as they were captured."""
    number = len(graphs)
    places = [n.meta.get("location") for n in captured.gm.graph.nodes if n.meta.get("location")]
    graphs.append(f"{os.path.basename(places[0].filename)}:{places[0].lineno} in {places[0].function}" if places else "")
    if only is not None and number not in only:
        context = dataclasses.replace(context, backend="eager")
    return real(captured, context, *late_error)


def one_call(values: dict, name: str, target, args, kwargs, roots, weighted: bool) -> None:
    try:
        result = target(*args, **kwargs)
        see(values, f"{name}: result", result, layout=True)
        backward_of(result, weighted)
    except Exception as error:
        values[f"{name}: exception"] = Seen("raised", (type(error).__name__,), first_line(error))
    see(values, f"{name}: after", roots)


def backward_of(result, weighted: bool) -> None:
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
    generator, memories = torch.Generator().manual_seed(0), Memories()
    if how == "double":
        torch.set_default_dtype(torch.float64)

    def change(flat):
        if how == "double":
            return flat.to(torch.complex128 if flat.is_complex() else torch.float64)
        signs = torch.randint(0, 2, flat.shape, generator=generator).to(flat.device) * 2 - 1
        with torch.no_grad():
            return flat.add_(flat * signs * torch.finfo(flat.dtype).eps)
    for t in tensors.values():
        if t.dtype in FLOORS and plain_tensor(t):
            changed = memories.view(t, change)
            if how == "double":
                t.data = changed


class Memories(dict):
    """(memory, dtype) -> a flat tensor made of all of it: what shares memory shares what is made of it."""

    def view(self, t, make):
        """A tensor that lies in make(flat) as `t` lies in its memory."""
        key = t.untyped_storage()._cdata, t.dtype
        if key not in self:
            self[key] = make(torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage()))
        return self[key].as_strided(t.shape, t.stride(), t.storage_offset())


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
            with contextlib.suppress(ValueError):
                state[name] = cell.cell_contents
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

    @property
    def needs_this_process(self) -> bool:
        """Whether the program did in a fork what no fork can do."""
        return any(NOT_FORKED.search(str(seen.data)) for seen in self.plain.values.values())


def references(run: Run, seconds: float) -> References | str:
    """Eager's answers, those of a float64 evaluation and those on moved inputs, or how eager ended."""
    plain = apart.run(answers_of, run, None, seconds=seconds)
    if plain.error:
        return plain.error
    moved = apart.run(answers_of, run, None, "moved", seconds=seconds)
    double = None if plain.value.draws else apart.run(answers_of, run, None, "double", seconds=seconds).value
    return References(plain.value, double, moved.value)


def find_differences(outcome: apart.Outcome, refs: References) -> list[Difference]:
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
            found.append(Difference(name, "form", f"{form_text(a)} where eager has {form_text(b)}"))
        elif a.data is not None:
            others = [ref.values[name].data if ref is not None and name in ref.values else None
                      for ref in (refs.double, refs.moved)]
            found += numbers(name, a.data, b.data, *others, refs.floor)
    return sorted(found, key=lambda d: (("crash", "exception", "form", "value").index(d.kind),
                                        -d.amount / max(d.allowed, 1e-30)))


def said(seen: Seen | None, who: str) -> str:
    return f"{who} raises nothing" if seen is None else f"{who} raises {seen.about[0]}: {seen.data}"


def form_text(seen: Seen | None) -> str:
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


# ---- processes, rungs ---------------------------------------------------------------------------------------

# What a fork cannot do where there is a GPU: use it after this process has looked for it, or run a backward pass
# after this process has.
NOT_FORKED = re.compile("re-initialize CUDA|fork-based multiprocessing")


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


@contextlib.contextmanager
def undone(run: Run):
    """Afterwards what the program reaches, random state, settings and compiled code are as they were (`restore.py`)."""
    from .. import frames, stances, versions
    function, args, kwargs = run.load()
    states = []
    keep, watchers = (versions.call_backend, stances.current.name, config.raise_on_internal_error), logs.watchers[:]
    watch = lambda kind, state=None, **data: states.append(state) if state is not None else None     # noqa: E731
    logs.watchers.append(watch)
    try:
        with restored([function, args, kwargs, run.then]):
            yield
    finally:
        logs.watchers[:] = watchers
        versions.call_backend, stances.current.name, config.raise_on_internal_error = keep
        for state in {id(s): s for s in states}.values():
            frames.forget(state)
