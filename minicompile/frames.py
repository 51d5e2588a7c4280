# %% [markdown]
# # From a frame to a compiled call
#
# The frame hook reports a frame, capture turns it into a graph, guards and Python text, the driver compiles
# the graph. This module is the loop that connects them, once per function and per set of compile options:
#
#     first call     capture -> compile -> entry; run the entry
#     later calls    the hook calls the newest entry directly; nothing of this module runs
#     guards fail    the chain of entries ends here again: say why, capture another version
#     cannot         evaluate the frame as it is, and remember to
#
# Whatever goes wrong inside the compiler, the user's program must get its result. So every path ends in an
# entry that runs or in `EVALUATE`.

# %%
from __future__ import annotations

import atexit
import contextlib
import dis
import functools
import inspect
import os
import sys
import threading
import traceback
import types
import weakref
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils._device import DeviceContext

from . import advice, logs, marks
from .backends import add_size_inputs, compile_graph
from .ch01_graphs.graph import print_graph
from .ch02_guards import cache as entries, codegen
from .ch02_guards.guards import GuardSet, in_words
from .ch02_guards.sources import ModuleAttrSource
from .ch03_capture import hook
from .ch03_capture.hook import EVALUATE
from .config import config
from .errors import GraphBreakError, InternalError, MarkError, MinicompileError, RecompileError, SkipFrame, StrictError, Unsupported


@dataclass(frozen=True, eq=False)
class Context:
    """The settings of one `compile`. Equal settings give the same object, so that compiled code is shared."""
    backend: Any                       # a name or a callable(gm, example_inputs)
    options: tuple                     # sorted items of the resolved options
    dynamic: bool | None
    fullgraph: bool
    unseen: Context | None = None      # the context that this one repeats, with `is_compiling()` False

    @property
    def backend_name(self) -> str:
        return self.backend if isinstance(self.backend, str) else getattr(self.backend, "__name__", "custom")


_contexts: weakref.WeakValueDictionary = weakref.WeakValueDictionary()     # wrappers and compiled code hold them
_lock = threading.RLock()


_apart = threading.local()             # .made: contexts made for one `explain`, or absent


@contextlib.contextmanager
def fresh_contexts():
    """Inside, in this thread, every `compile` gets a context of its own. Yields the list of them."""
    _apart.made = []
    try:
        yield _apart.made
    finally:
        del _apart.made


def context_for(backend, options: dict, dynamic, fullgraph) -> Context:
    key = (backend, tuple(sorted(options.items())), dynamic, bool(fullgraph))
    if hasattr(_apart, "made"):
        _apart.made.append(Context(*key))
        return _apart.made[-1]
    try:
        return _contexts.setdefault(key, Context(*key))
    except TypeError:                  # a callable that cannot be hashed
        return Context(*key)


# %% [markdown]
# ## Stances
#
# A stance changes what compiled functions do, without touching the code that compiles them: run everything
# eagerly while looking for a bug, or fail loudly when a recompile sneaks into a benchmark. The last two
# compile nothing, the first version of a function included: a call that no compiled version fits runs
# eagerly, or raises.

# %%
STANCES = ("default", "force_eager", "eager_on_recompile", "fail_on_recompile")


@dataclass
class Stance:
    name: str = "default"


stance = Stance()


# %% [markdown]
# ## The callback: first sight of a code object
#
# Functions that a user compiled explicitly are captured even if they belong to a library, such as
# `torch.nn.Sequential.forward` or the `step` of an optimizer: their code is `allowed`.

# %%
def allow(function) -> None:
    """Capture frames of this function, and of those it wraps, whatever file they are from."""
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None and "allowed" not in (known := hook.record(code)):
            known["allowed"] = True
            if hook.is_library_file(code.co_filename):
                hook.forget_code(code)          # it may have been met, and skipped, as a part of another
        function = getattr(function, "__wrapped__", None) or getattr(function, "__func__", None)


SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def check_code(target, context: Context) -> None:
    """Under fullgraph, what never becomes a frame that can be captured is refused at once."""
    code = getattr(target, "__code__", None)
    if context.fullgraph and (code is None or code.co_flags & SUSPENDS):
        name = getattr(target, "__qualname__", None) or type(target).__name__
        what = "has no Python code" if code is None else "is a generator or a coroutine, which runs in pieces"
        raise GraphBreakError(f"fullgraph=True, but {name} {what}. Compile a function that calls it, or allow it to "
                              "run eagerly with fullgraph=False.")


@dataclass(eq=False)
class FrameState:
    """All that is known about one code object in one context. Its entries are attached to the code, which they
    must not keep alive (`hook.py`), so the code is referred to weakly: there is one whenever it is asked for."""
    weak_code: weakref.ref
    context: Context
    cache: entries.EntryCache = None
    dynamic: dict = field(default_factory=dict)     # source -> symbolic dimensions (True for a number)
    given_up: bool = False                          # nothing more is compiled
    full: bool = False                              # the recompile limit was reached at least once
    raised: int = 0                                 # calls that were seen to end in the program's own exception
    unseen: Any = None                              # runs a call as if nothing were compiled, or None (`unseen`)

    @property
    def code(self) -> types.CodeType:
        return self.weak_code()

    def publish(self, target) -> None:
        """Tell the hook whom to call, unless all was forgotten meanwhile."""
        if self.is_known():
            hook.set_target(self.code, self.context, target)

    def is_known(self) -> bool:
        return self.code is not None and hook.record(self.code).get(states, {}).get(self.context) is self


def states(code) -> dict:
    """The states of a code object by context; at first none."""
    return {}


def warned(code) -> set:
    """What the user was told about a code object; at first nothing."""
    return set()


# Guards read attributes, so these run while guards are checked: compiling them would not end. And what is
# called for every operator would be compiled for every operator.
EVALUATED = ("<module>", "__getattribute__", "__getattr__", "__torch_function__", "__torch_dispatch__")


def on_new_code(function, code, context):
    """Called by the hook. Answers the target for this code: False = never, None = as it is, or a callable."""
    try:
        return target_for(function, code, context)
    except Exception as error:
        internal_error(code, context, error)
        return None


CHECKPOINT = inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__


def arguments_of(code, values) -> tuple[tuple, dict]:
    """(args, kwargs) that bind to these values of the parameters of `code`, which are in the frame's order."""
    positional = code.co_argcount
    named = code.co_varnames[positional:positional + code.co_kwonlyargcount]
    rest = list(values[positional + len(named):])
    args = (*values[:positional], *(rest.pop(0) if code.co_flags & inspect.CO_VARARGS else ()))
    return args, {**dict(zip(named, values[positional:])), **(rest[0] if rest else {})}


def checkpoint_uncompiled(function, *values):
    """`checkpoint(inner, ...)` that capture could not have as part of a graph. It runs `inner` now and again
    in backward, and compares what autograd saves: compiled now and not compiled then is an error."""
    (inner, *args), kwargs = arguments_of(function.__code__, values)
    return hook.run(None, function, functools.partial(hook.run, None, inner), *args, **kwargs)


exporting = torch.compiler.is_compiling        # True while another compiler runs the program to see what it does

# Other compilers and tracers see the program as it is: inside of them, nothing is captured. Nor is what runs
# because of an `import`, which happens once
TRACERS = ("<frozen importlib", *(os.path.join(os.path.dirname(torch.__file__), name) + os.sep
                                  for name in ("_dynamo", "_export", "export", "fx", "jit", "onnx")))


def outside(function, *values):
    """Call `function` outside of the region."""
    args, kwargs = arguments_of(function.__code__, values)
    return hook.run(None, function, *args, **kwargs)


def cond_uncompiled(function, *values):
    """`torch.cond` on the value of a tensor. Its own implementation calls torch.compile; here the branch that is
    taken is a frame like any other."""
    pred, true_fn, false_fn, operands = values
    return (true_fn if pred else false_fn)(*operands)


INSTEAD = {CHECKPOINT: checkpoint_uncompiled, inspect.unwrap(torch.cond).__code__: cond_uncompiled}


def target_for(function, code, context):
    if code in INSTEAD:
        return INSTEAD[code]
    if code.co_filename.startswith(TRACERS) and "allowed" not in hook.record(code):
        return outside
    from .ch04_breaks.resume import original_code
    if "allowed" not in hook.record(original_code(code)) and hook.is_library_file(file_of(function, code)):
        return False
    if marks.is_disabled(function) or code.co_name in EVALUATED:
        return None
    state = hook.kept(states, code)[context] = FrameState(weakref.ref(code), context)
    state.cache = entries.EntryCache(code.co_name, partial_of(state, on_miss), partial_of(state, FrameState.publish))
    return state.cache.tail


def partial_of(state: FrameState, function):
    """function(state, *args), which does not keep the state: its code does, until all is forgotten."""
    def call(*args, weak=weakref.ref(state)):
        state = weak()
        return EVALUATE if state is None else function(state, *args)
    return call


def file_of(function, code) -> str:
    """Where a function is from. What `dataclass` and `namedtuple` write has no file: that of their module."""
    found = code.co_filename
    return found if found != "<string>" else function.__globals__.get("__file__") or found


# %% [markdown]
# ## On a miss

# %%
def on_miss(state: FrameState, function, *args):
    """No entry fits this call: compile one and run it, or decline. The tail of every chain."""
    if stance.name in ("force_eager", "eager_on_recompile") or exporting():
        return EVALUATE
    if state.given_up:
        return EVALUATE if state.unseen is None else state.unseen(function, *args)
    if (obstacle := why_not_here()) is not None:
        if state.context.fullgraph:
            raise GraphBreakError(f"fullgraph=True, but {describe(state.code)} cannot be compiled here: {obstacle}, "
                                  "or allow it to run eagerly with fullgraph=False.")
        return EVALUATE
    if state.full and stance.name == "default" and over_limit(state, args):
        return EVALUATE
    grad, depth = torch.is_grad_enabled(), torch._C._len_torch_function_stack()
    try:
        with hook.outside_region(), without_saved_tensor_hooks(), _lock:
            entry = new_entry(state, function, args)
    finally:
        restore_modes(grad, depth)
    return EVALUATE if entry is None else entry.function(function, *args)


def why_not_here() -> str | None:
    """Why nothing can be compiled at this point of the program, and what to do about it; None if it can."""
    if torch._C._len_torch_dispatch_stack() or watched():
        return "a mode of the program wants to see every operation. Leave the mode before the call"
    if torch.autograd.forward_ad._current_level >= 0:
        return "it runs under forward-mode differentiation. Leave the dual level before the call"
    if torch._C._are_functorch_transforms_active():
        return ("it runs under torch.func.vmap, grad or another transform. Compile the function that applies "
                "the transform")
    if is_deep():
        return ("the program has used up half of its recursion limit, and compiling needs the other half. "
                "Raise it with sys.setrecursionlimit")
    return None


def without_saved_tensor_hooks():
    """The user's hooks are for the tensors that the program saves, not for the fakes of a compilation."""
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


def watched() -> bool:
    """Is there a TorchFunctionMode other than the default device?"""
    return bool(torch._C._len_torch_function_stack()) and any(
        type(m) is not DeviceContext for m in torch.overrides._get_current_function_mode_stack())


def restore_modes(grad: bool, depth: int) -> None:
    """An interrupt, or the recursion limit, can strike while a mode of the tracer is being left, and leave it
    on; none was before."""
    while torch._C._len_torch_dispatch_stack():
        torch._C._pop_torch_dispatch_stack(None)
    while torch._C._len_torch_function_stack() > depth:
        torch._C._pop_torch_function_stack()
    if torch.is_grad_enabled() != grad:
        torch._C._set_grad_enabled(grad)


def new_entry(state: FrameState, function, args):
    """Compile for these arguments: an Entry whose guards hold for them, or None to evaluate the frame. What was
    asked for strictly raises."""
    fullgraph = state.context.fullgraph
    try:
        why = explain_miss(state, function, args) if state.cache.entries else None
        if stance.name == "fail_on_recompile":
            raise RecompileError(f"{describe(state.code)} would be compiled{f' again: {why}' if why else ''}. "
                                 "Set the stance to 'default' to allow it.")
        if why is not None:
            if over_limit(state, args):
                reach_limit(state)
                return None
            version = state.cache.created + 1
            logs.log("recompiles", "%s: version %d because %s\n  -> %s", describe(state.code), version, why,
                     advice.for_recompile(why))
            logs.tell("recompile", state=state, version=version, why=why)
        return compile_frame(state, function, args)
    except SkipFrame as skip:
        if getattr(skip, "told", False):
            state.unseen = state.unseen or unseen(state.context)
        skip_frame(state, skip)
        return state.unseen and entries.Entry(state.unseen, [], GuardSet())
    except Unsupported as unsupported:
        if fullgraph:
            from .ch04_breaks.breaks import fullgraph_message
            raise GraphBreakError(fullgraph_message(function, unsupported)) from None
        skip_frame(state, unsupported)
    except StrictError:
        raise
    except MinicompileError as error:
        if fullgraph or config.raise_on_internal_error:
            raise
        logs.warn_once((state.context.backend_name, str(error)),
                       f"minicompile: {error} Until then, what was compiled runs eagerly.")
        skip_frame(state)
    except Exception as error:
        internal_error(state.code, state.context, error, lambda: skip_frame(state))
    return None


def is_deep() -> bool:
    """Whether the program itself has used up most of its recursion limit, before the compiler came."""
    try:
        return sys._getframe(sys.getrecursionlimit() // 2) is not None
    except ValueError:
        return False


def internal_error(code, context: Context, error: Exception, give_up=lambda: None, words="{} runs eagerly") -> None:
    """Call this while handling `error`. The frame runs eagerly from now on (`give_up` sees to it), with one
    warning; under fullgraph it is an InternalError."""
    if config.raise_on_internal_error:
        raise
    trace = traceback.extract_tb(error.__traceback__)
    where = f" at {os.path.basename(trace[-1].filename)}:{trace[-1].lineno}" if trace else ""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    what = f"an internal error{where}: {type(error).__name__}: {error}{notes}."
    report = ("To report it, set minicompile.config.raise_on_internal_error = True, run it again, and send "
              "that traceback with the function's source.")
    if context.fullgraph:
        raise InternalError(f"fullgraph=True, but compiling {describe(code)} failed with {what} {report}") from error
    give_up()
    logs.warn_once("internal", f"minicompile: {words.format(describe(code))} because of {what} Its results are "
                   f"right, only not faster. {report}", hook.kept(warned, code))


compiling: ContextVar[tuple] = ContextVar("compiling")      # (weak reference to its code, Context) of a frame


def late_error(error: Exception) -> None:
    """The same for a backward graph that is compiled when it is needed, from within `backward()`."""
    weak_code, context = compiling.get()
    code = weak_code() or late_error.__code__       # the function may be gone, and only its result left
    internal_error(code, context, error, lambda: None, "the backward of {} runs operator by operator")


def root_module(args):
    """The module whose method this is. Two models of one class share code, but not the limit."""
    return args[0] if args and isinstance(args[0], torch.nn.Module) else None


def root_of(entry):
    return entry.extra["root"] and entry.extra["root"]()


def over_limit(state: FrameState, args) -> bool:
    root, made = root_module(args), state.cache.entries
    same = [e for e in made if root_of(e) is root]
    return len(same) >= config.recompile_limit or len(made) >= 8 * config.recompile_limit


def skip_frame(state: FrameState, why: Unsupported | None = None) -> None:
    """Evaluate this code as it is, unless an entry fits. Calls inside it may still be compiled. A call that
    ends in the program's own exception says little about the next one."""
    if why is not None and not getattr(why, "quiet", False):
        logs.log("graph_breaks", "%s runs as it is: %s\n  -> %s", describe(state.code), why,
                 advice.for_break(why.reason))
        logs.tell("skipped", state=state, reason=why)
    if getattr(why, "raises", False):
        state.raised += 1
        if state.context.fullgraph or state.raised < config.recompile_limit:
            return
    state.given_up = True
    if not state.cache.entries:
        state.publish(state.unseen)


# %% [markdown]
# **A program that is told that it is compiled** (`torch.compiler.is_compiling()`) may choose another path: one
# without questions about values, which no graph can answer. If that path ends in an exception, the program
# might be right all the same, on the path that it takes in eager. So what raises after it was told is captured
# once more, in a context in which nobody is told.

# %%
def unseen(context: Context):
    """A target that runs a frame, and all that it calls, in such a context."""
    other = replace(context, unseen=context)

    def run_unseen(function, *values):
        args, kwargs = arguments_of(function.__code__, values)
        return hook.run(other, function, *args, **kwargs)
    return run_unseen


def reach_limit(state: FrameState) -> None:
    """There are as many versions as the recompile limit allows: a warning, under fullgraph an error."""
    full = f"{describe(state.code)} was compiled {state.cache.created} times (config.recompile_limit)"
    worst = f"The guard that failed most: {entries.worst_guard(state.cache)}"
    if state.context.fullgraph:
        raise RecompileError(f"fullgraph=True, but {full}, and no version fits this call. {worst}. "
                             f"{advice.for_recompile(worst)} Or raise minicompile.config.recompile_limit.")
    state.full = True
    logs.warn_once("limit", f"minicompile: {full}; other calls run eagerly from now on. {worst}. "
                   "Set MINICOMPILE_LOGS=recompiles to see all.", hook.kept(warned, state.code))


def describe(code) -> str:
    name, _, resumed = code.co_name.partition("__resume_at_")
    return f"{'the rest of ' if resumed else ''}{name} ({code.co_filename}:{code.co_firstlineno})"


# %% [markdown]
# **Why, and what to learn from it.** The failing guard of the most recent entry explains the recompile. If
# it was the size of a tensor or the value of an integer, the next version treats that size as a symbol, so
# that the third size does not compile a third version.

# %%
def explain_miss(state: FrameState, function, args) -> str:
    explanation = None
    for entry in state.cache.entries:
        found = list(codegen.failing_guards(entry.guards, state.code, function, args, entry.constants))
        if not found:
            continue
        guard, why = found[0]
        if config.automatic_dynamic and state.context.dynamic is None and root_of(entry) is root_module(args):
            for failing, _ in found:
                learn_dynamic(state, failing, function, args, entry)
        explanation = explanation or (why if guard.location is None else f"{why}  # {guard.location}")
    explanation = explanation or "a value changed while it was being checked"
    state.cache.failures[explanation.split(": expected")[0]] += 1
    return explanation


def learn_dynamic(state: FrameState, guard, function, args, entry) -> None:
    if isinstance(guard.source, ModuleAttrSource):
        return                         # parameters change size when the model changes: another program
    expected = guard.expected
    value = codegen.read_source(guard.source, state.code, function, args, entry.constants)
    is_tensor = guard.kind == "TENSOR_MATCH" and isinstance(value, torch.Tensor)
    if is_tensor and value.dim() == len(expected.shape):
        dims = {d for d, (old, new) in enumerate(zip(expected.shape, value.shape))
                if old != new and new > 1 and (d in expected.dynamic_dims or old > 1)}
        if dims:
            known = state.dynamic.get(guard.source, frozenset())
            # True: it was a number then
            state.dynamic[guard.source] = dims if known is True else known | dims
    elif guard.kind == "CONSTANT_MATCH" and type(value) in (int, float) and type(expected) is type(value):
        state.dynamic[guard.source] = True


# %% [markdown]
# ## Compiling a frame
#
# A symbolic size is a wish, not a need: if capture cannot do it, the version is specialised to the sizes at
# hand.

# %%
def compile_frame(state: FrameState, function, args):
    try:
        entry = compile_version(state, function, args)
    except (SkipFrame, StrictError):
        raise
    except Exception as error:
        if config.raise_on_internal_error:
            raise
        why = f"{type(error).__name__}: {error}"
        logs.log("recompiles", "%s: compiled for fixed sizes because of %s", describe(state.code), why)
        entry = compile_version(state, function, args, fixed=why)
    entries.add_entry(state.cache, entry)
    return entry


def compile_version(state: FrameState, function, args, fixed: str = ""):
    """Capture, compile and write an entry for these arguments. fixed: why nothing may be a symbol, or ""."""
    from .ch04_breaks.breaks import place_of_break
    from .driver import timed
    local_values = dict(zip(state.code.co_varnames, args))
    with config.options(dict(state.context.options)), timed("capture"):
        captured = capture_best(state, function, local_values, fixed)
    for reason in captured.breaks:
        logs.log("graph_breaks", "%s: %s\n%s\n  -> %s", describe(state.code), reason.reason,
                 "\n".join(place_of_break(reason)), reason.hint)
    logs.tell("captured", state=state, captured=captured)
    return build_entry(state, function, args, captured)


def capture_best(state: FrameState, function, local_values: dict, fixed: str):
    """Capture with symbols for what varies; if that breaks the graph earlier, for the values at hand."""
    from .ch03_capture.capture import CaptureOptions
    from .ch04_breaks.breaks import capture_frame
    fullgraph, found = state.context.fullgraph, None
    options = CaptureOptions(fullgraph, state.dynamic, fixed, everything=state.context.dynamic is True,
                             unseen=state.context.unseen is not None)
    try:
        found = capture_frame(function, local_values, options)
    except (Unsupported, GraphBreakError) as error:
        if not options.used:
            raise
        why = getattr(error, "reason", "the graph breaks")
    if found is not None:
        if not (found.breaks and options.used):
            return found
        why = found.breaks[0].reason
    static = capture_frame(function, local_values, CaptureOptions(fullgraph, fixed=why, unseen=state.context.unseen is not None))
    return found if found is not None and len(found.breaks) <= len(static.breaks) else static


def build_entry(state: FrameState, function, args, captured):
    body = captured.body
    namespace = {"__K": captured.constants}
    if captured.gm is None and not captured.breaks:
        body = "return __EVALUATE"     # nothing for the compiler here, as long as the guards hold
        namespace["__EVALUATE"] = EVALUATE
    elif captured.gm is not None:
        add_size_inputs(captured)
        if logs.on("graph"):
            logs.log("graph", "%s\n%s", describe(state.code), print_graph(captured.gm))
        logs.tell("graph", state=state, captured=captured)
        token = compiling.set((state.weak_code, state.context))
        try:
            namespace["__graph"] = compile_graph(captured, state.context)
        finally:
            compiling.reset(token)
        if not callable(state.context.backend):
            namespace["__EVALUATE"] = EVALUATE
            gm = captured.gm if captured.traceless else None
            eager = state.context.backend == "eager"
            namespace["__refused"] = functools.partial(
                hook.run, None, refused, gm, eager, torch.is_grad_enabled())
            body = body.replace(CALL_OF_GRAPH, WATCHED_CALL, 1)
    for problem in captured.close():
        if state.context.fullgraph:
            raise MarkError(problem)
        logs.warn_once(problem, f"minicompile: {problem}", hook.kept(warned, state.code))
    inputs = captured.inputs if captured.gm is not None else []
    namespace["__next"] = [entries.missed]
    compiled = codegen.build_entry(captured.guards, inputs, state.code, body, namespace, captured.written,
                                   captured.weak)
    hook.skip_code(compiled.__code__)
    log_entry(state, captured, compiled)
    failing = codegen.failing_guard(captured.guards, state.code, function, args, captured.constants)
    if failing is not None:
        raise RuntimeError(f"a guard fails right after compiling: {failing[1]} ({failing[0]})")
    root = root_module(args)
    return entries.Entry(compiled, namespace["__next"], captured.guards, captured.constants,
                         extra={"breaks": captured.breaks, "gm": captured.gm,
                                "root": None if root is None else weakref.ref(root)})


# %% [markdown]
# **When the graph itself raises.** An index out of range or a singular matrix is not known when compiling.
# Eager would raise in the middle of the frame, after its earlier side effects and perhaps inside a `try`; the
# graph raises before all side effects that the entry applies. So a graph that has left no trace is forgotten,
# and the frame evaluated as it is. That would hide a faulty kernel, so the graph as it was captured has to
# fail, too.

# %%
CALL_OF_GRAPH = "__out = __graph(*__inputs)\n"
WATCHED_CALL = f"""try:
    {CALL_OF_GRAPH}except Exception:
    if __refused(*__inputs):
        return __EVALUATE
    raise
"""


def refused(gm, eager: bool, grad: bool, *inputs) -> bool:
    """Whether the frame is to be evaluated after its graph has raised. gm: the captured graph, or None if it
    leaves traces. eager: whether it was this graph that ran. grad: the grad mode when it began."""
    torch._C._set_grad_enabled(grad)
    if gm is None:
        return False
    if eager:
        return True
    try:
        gm.forward(*inputs)
    except Exception:
        return True
    finally:
        torch._C._set_grad_enabled(grad)
    return False


def log_entry(state: FrameState, captured, compiled) -> None:
    """The guards in words and what was generated, for those who asked."""
    if logs.on("guards"):
        words = [f"  {in_words(g)}{f'  # {g.location}' if g.location else ''}" for g in captured.guards]
        logs.log("guards", "%s: a call for which one of these does not hold is compiled again\n%s\n"
                 "checked by\n%s", describe(state.code), "\n".join(words), compiled.source_text)
    if logs.on("bytecode"):
        logs.log("bytecode", "%s\n%s\nis replaced by\n%s", describe(state.code),
                 dis.Bytecode(state.code).dis(), compiled.source_text)


# %% [markdown]
# ## After a fork
#
# The child of `os.fork` has one thread, and every lock in the state it had at that moment. If another thread
# was compiling, its lock would never be released, and its compile jobs never done.

# %%
def after_fork() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=after_fork)


# %% [markdown]
# ## Forgetting

# %%
def forget(state: FrameState) -> None:
    """Drop the entries of one code object in one context, for good."""
    state.given_up = True
    state.cache.entries.clear()
    state.publish(None)


def reset() -> None:
    """Drop every compiled entry and every decision."""
    hook.reset()
    _contexts.clear()
    logs._warned.clear()


hook.set_callback(on_new_code, entries.MISSED)
# What destructors call while Python takes its modules apart finds a compiler without globals: run that as it
# is
atexit.register(setattr, stance, "name", "force_eager")
