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

import contextlib
import functools
import threading
import types
import weakref
from dataclasses import dataclass, field
from typing import Any, Callable

import torch

from . import logs, marks
from .ch02_guards import cache as entries
from .ch02_guards import codegen
from .ch02_guards.guards import weak_identities
from .ch02_guards.sources import CallSource, LocalSource, ModuleAttrSource
from .ch03_capture import hook
from .ch03_capture.hook import EVALUATE
from .config import config
from .errors import GraphBreakError, MinicompileError, RecompileError, SkipFrame, Unsupported


@dataclass(frozen=True, eq=False)
class Context:
    """The settings of one `compile`. Equal settings give the same object, so that compiled code is shared."""
    backend: Any                       # a name or a callable(gm, example_inputs)
    options: tuple                     # sorted items of the resolved options
    dynamic: bool | None
    fullgraph: bool

    @property
    def backend_name(self) -> str:
        return self.backend if isinstance(self.backend, str) else getattr(self.backend, "__name__", "custom")


_contexts: dict = {}
_lock = threading.RLock()


def context_for(backend, options: dict, dynamic, fullgraph) -> Context:
    key = (backend, tuple(sorted(options.items())), dynamic, bool(fullgraph))
    try:
        return _contexts.setdefault(key, Context(*key))
    except TypeError:                  # a callable that cannot be hashed
        return Context(*key)


# %% [markdown]
# ## Stances
#
# A stance changes what compiled functions do, without touching the code that compiles them: run everything
# eagerly while looking for a bug, or fail loudly when a recompile sneaks into a benchmark.

# %%
STANCES = ("default", "force_eager", "eager_on_recompile", "fail_on_recompile")


@dataclass
class Stance:
    name: str = "default"


stance = Stance()


# %% [markdown]
# ## The callback: first sight of a code object
#
# `ALLOWED` are functions that a user compiled explicitly. They are captured even if they belong to a
# library, such as `torch.nn.Sequential.forward` or the `step` of an optimizer.

# %%
ALLOWED: set = set()                   # ids of code objects, kept alive by ALLOWED_CODES
ALLOWED_CODES: list = []


def allow(function) -> None:
    """Capture frames of this function, and of those it wraps, whatever file they are from."""
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None and id(code) not in ALLOWED:
            ALLOWED.add(id(code))
            ALLOWED_CODES.append(code)
        function = getattr(function, "__wrapped__", None) or getattr(function, "__func__", None)


@dataclass(eq=False)
class FrameState:
    """All that is known about one code object in one context."""
    code: types.CodeType
    globals: dict
    context: Context
    cache: entries.EntryCache = None
    dynamic: dict = field(default_factory=dict)     # source -> symbolic dimensions (True for a number)
    given_up: bool = False                          # nothing more is compiled
    full: bool = False                              # the recompile limit was reached at least once


def on_new_code(function, code, context):
    """Called by the hook. Answers the target for this code: False = never, else a callable."""
    if id(code) not in ALLOWED and hook.is_library_file(code.co_filename):
        return False
    if marks.is_disabled(function) or code.co_name == "<module>":
        return None
    hook.remember(code)
    state = FrameState(code, function.__globals__, context)
    state.cache = entries.EntryCache(
        code.co_name, lambda function, *args: on_miss(state, function, args),
        lambda head: hook.set_target(code, context, state.globals, head))
    return state.cache.tail


# %% [markdown]
# ## On a miss

# %%
def on_miss(state: FrameState, function, args):
    """No entry fits this call: compile one and run it, or decline. The tail of every chain."""
    if stance.name == "force_eager" or state.given_up or (state.full and over_limit(state, args)):
        return EVALUATE
    with hook.outside_region(), without_saved_tensor_hooks():
        with _lock:
            entry = new_entry(state, function, args)
    return EVALUATE if entry is None else entry.function(function, *args)


def without_saved_tensor_hooks():
    """The user's hooks are for the tensors that the program saves, not for the fakes of a compilation."""
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


def new_entry(state: FrameState, function, args):
    """Compile for these arguments: an Entry whose guards hold for them, or None to evaluate the frame."""
    if state.cache.entries:
        why = explain_miss(state, function, args)
        if stance.name == "eager_on_recompile":
            return None
        if stance.name == "fail_on_recompile":
            raise RecompileError(f"{describe(state.code)} would be compiled again: {why}. "
                                 "Set the stance to 'default' to allow it.")
        version = state.cache.created + 1
        logs.log("recompiles", "%s: version %d because %s", describe(state.code), version, why)
        if over_limit(state, args):
            give_up(state)
            return None
    try:
        return compile_frame(state, function, args)
    except SkipFrame as skip:
        logs.log("graph_breaks", "%s runs as it is: %s", describe(state.code), skip)
        skip_frame(state)
    except Unsupported as unsupported:
        if state.context.fullgraph:
            raise fullgraph_error(state.code, unsupported) from None
        logs.log("graph_breaks", "%s runs as it is: %s", describe(state.code), unsupported)
        skip_frame(state)
    except (RecompileError, GraphBreakError):
        raise
    except MinicompileError as error:
        if config.raise_on_internal_error:
            raise
        logs.warn_once((state.context, str(error)),
                       f"minicompile: {error} Until then, what was compiled runs eagerly.")
        skip_frame(state)
    except Exception as error:
        if config.raise_on_internal_error:
            raise
        logs.warn_once((id(state.code), "internal"),
                       f"minicompile: {describe(state.code)} runs eagerly because of an internal error: "
                       f"{type(error).__name__}: {error}. "
                       "(minicompile.config.raise_on_internal_error = True shows where.)")
        skip_frame(state)
    return None


def root_module(args):
    """The module whose method this is. Two models of one class share code, but not the limit."""
    return args[0] if args and isinstance(args[0], torch.nn.Module) else None


def root_of(entry):
    return entry.extra["root"] and entry.extra["root"]()


def over_limit(state: FrameState, args) -> bool:
    root, made = root_module(args), state.cache.entries
    same = [e for e in made if root_of(e) is root]
    return len(same) >= config.recompile_limit or len(made) >= 8 * config.recompile_limit


def skip_frame(state: FrameState) -> None:
    """Evaluate this code as it is, unless an entry fits. Calls inside it may still be compiled."""
    state.given_up = True
    if not state.cache.entries:
        hook.set_target(state.code, state.context, state.globals, None)


def give_up(state: FrameState) -> None:
    state.full = True
    logs.warn_once((id(state.code), "limit"),
                   f"minicompile: {describe(state.code)} was compiled {state.cache.created} times "
                   "(config.recompile_limit); other calls run eagerly from now on. "
                   f"The guard that failed most: {entries.worst_guard(state.cache)}. "
                   "Set MINICOMPILE_LOGS=recompiles to see all.")


def describe(code) -> str:
    return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"


def fullgraph_error(code, unsupported) -> GraphBreakError:
    where = f" at {unsupported.location}" if unsupported.location is not None else ""
    return GraphBreakError(f"fullgraph=True, but {describe(code)} cannot be one graph: {unsupported.reason}"
                           f"{where}. Change that line, or drop fullgraph to allow a graph break.")


# %% [markdown]
# **Why, and what to learn from it.** The failing guard of the most recent entry explains the recompile. If
# it was the size of a tensor or the value of an integer, the next version treats that size as a symbol, so
# that the third size does not compile a third version.

# %%
def explain_miss(state: FrameState, function, args) -> str:
    explanation = None
    for entry in state.cache.entries:
        found = codegen.failing_guard(entry.guards, state.code, function, args, entry.constants)
        if found is None:
            continue
        guard, why = found
        if config.automatic_dynamic and state.context.dynamic is None and root_of(entry) is root_module(args):
            learn_dynamic(state, guard, function, args, entry)
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
            state.dynamic[guard.source] = frozenset(state.dynamic.get(guard.source) or ()) | dims
    elif guard.kind == "CONSTANT_MATCH" and type(value) in (int, float) and type(expected) is type(value):
        state.dynamic[guard.source] = True


def first_dynamic(state: FrameState, args) -> dict:
    """Dimensions that are symbols from the first call: marked by the user, or all with dynamic=True."""
    result = {}
    names = state.code.co_varnames[:len(args)]
    for name, value in zip(names, args):
        if isinstance(value, torch.Tensor) and state.context.dynamic is not False:
            dims = set(getattr(value, marks.DYNAMIC, ()))
            if state.context.dynamic:
                dims |= {d for d in range(value.dim()) if value.shape[d] > 1}
            if dims:
                result[LocalSource(name)] = frozenset(dims)
        elif type(value) is int and state.context.dynamic and value > 1:
            result[LocalSource(name)] = True
    return result


# %% [markdown]
# ## Compiling a frame
#
# A symbolic size is a wish, not a need: if capture cannot do it, the version is specialised to the sizes at
# hand.

# %%
observers: list[Callable] = []         # called with (state, captured) after each capture; `explain` uses it


def compile_frame(state: FrameState, function, args):
    dynamic = {**first_dynamic(state, args), **state.dynamic}
    try:
        entry = compile_version(state, function, args, dynamic)
    except (SkipFrame, GraphBreakError):
        raise
    except Exception as error:
        if not dynamic or config.raise_on_internal_error:
            raise
        logs.log("recompiles", "%s: compiled for fixed sizes because of %s: %s", describe(state.code),
                 type(error).__name__, error)
        entry = compile_version(state, function, args, {})
    entries.add_entry(state.cache, entry)
    return entry


def compile_version(state: FrameState, function, args, dynamic: dict):
    """Capture, compile and write an entry for these arguments, with symbols for the sizes in `dynamic`."""
    from .driver import timed
    local_values = dict(zip(state.code.co_varnames, args))
    with config.options(dict(state.context.options)), timed("capture"):
        captured = capture_best(function, local_values, dynamic, state.context.fullgraph)
    for reason in captured.breaks:
        logs.log("graph_breaks", "%s: %s", describe(state.code), reason)
    for observe in observers:
        observe(state, captured)
    return build_entry(state, function, args, captured)


def capture_best(function, local_values: dict, dynamic: dict, fullgraph: bool):
    """Capture with symbols for the dynamic sizes; if that breaks the graph, capture for the sizes at hand."""
    from .ch03_capture.capture import CaptureOptions
    from .ch04_breaks.breaks import capture_frame
    symbolic = None
    if dynamic:
        try:
            options = CaptureOptions(dynamic=dynamic, fullgraph=fullgraph)
            symbolic = capture_frame(function, local_values, options)
        except (Unsupported, GraphBreakError):
            pass
        if symbolic is not None and not symbolic.breaks:
            return symbolic
    static = capture_frame(function, local_values, CaptureOptions(fullgraph=fullgraph))
    return symbolic if symbolic is not None and len(symbolic.breaks) <= len(static.breaks) else static


def build_entry(state: FrameState, function, args, captured):
    body = captured.body
    namespace = {"__K": captured.constants, **(getattr(captured, "namespace", None) or {})}
    if captured.gm is None and not captured.breaks:
        body = "return __EVALUATE"     # nothing for the compiler here, as long as the guards hold
        namespace["__EVALUATE"] = EVALUATE
    elif captured.gm is not None:
        add_size_inputs(captured)
        logs.log("graph", "%s\n%s", describe(state.code), captured.gm.graph)
        namespace["__graph"] = compile_graph(captured, state.context)
    inputs = captured.inputs if captured.gm is not None else []
    namespace["__next"] = [entries.missed]
    compiled = codegen.build_entry(captured.guards, inputs, state.code, state.globals, body, namespace)
    hook.skip_code(compiled.__code__)
    logs.log("guards", "%s\n%s", describe(state.code), compiled.source_text)
    failing = codegen.failing_guard(captured.guards, state.code, function, args, captured.constants)
    if failing is not None:
        raise RuntimeError(f"a guard fails right after compiling: {failing[1]} ({failing[0]})")
    root = root_module(args)
    return entries.Entry(compiled, namespace["__next"], weak_identities(captured.guards), captured.constants,
                         extra={"breaks": captured.breaks, "gm": captured.gm,
                                "root": None if root is None else weakref.ref(root)})


def compile_graph(captured, context: Context) -> Callable:
    """The captured graph as a callable of its flat inputs, returning a tuple. It runs outside of the region:
    whatever Python a backend leaves to be run at call time is not the user's, and is not to be captured."""
    with config.options(dict(context.options)):
        if callable(context.backend):
            compiled = flat_result(context.backend(captured.gm, list(captured.example_inputs)))
        elif context.backend == "eager":
            compiled = eager_callable(captured.gm)
        else:
            from .driver import compile_graph as compile_with_driver
            fakes = [n.meta["val"] for n in placeholders_of(captured.gm)]
            compiled = compile_with_driver(captured.gm, fakes, context.backend, dict(context.options))
            compiled = watch_overlaps(captured, compiled)
    return functools.partial(hook.run, None, compiled)


def watch_overlaps(captured, compiled) -> Callable:
    """A graph that writes to an input was made functional as if no other input shared its memory. Different
    tensors may: `f(buffer[:2], buffer[1:])`. Such calls run the captured graph as it is. Tensors of modules
    are left out."""
    written = getattr(getattr(compiled, "joint", None), "mutated", ())
    inputs = enumerate(zip(placeholders_of(captured.gm), captured.inputs))
    loose = [(i, n.name in written) for i, (n, source) in inputs
             if isinstance(n.meta["val"], torch.Tensor) and not isinstance(source, ModuleAttrSource)]
    if len(loose) < 2 or not any(is_written for _, is_written in loose):
        return compiled
    eager = eager_callable(captured.gm)

    def call(*inputs):
        ranges = [(*memory_range(inputs[i]), is_written) for i, is_written in loose]
        for n, (start, end, is_written) in enumerate(ranges):
            for other_start, other_end, other_written in ranges[:n]:
                if start < other_end and other_start < end and (is_written or other_written):
                    return eager(*inputs)
        return compiled(*inputs)
    return call


def placeholders_of(gm) -> list:
    return [n for n in gm.graph.nodes if n.op == "placeholder"]


def memory_range(t) -> tuple[int, int]:
    """First byte of a strided tensor and the one after its last."""
    start = t.data_ptr()
    if t.numel() == 0:
        return start, start
    return start, start + (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride()))) * t.element_size()


def add_size_inputs(captured) -> None:
    """Give every size symbol a placeholder of its own. Later stages then find the value of a symbol among the
    inputs, and never have to ask a tensor for it."""
    graph, placeholders = captured.gm.graph, placeholders_of(captured.gm)
    of_symbol = {str(n.meta["val"]): n for n in placeholders if isinstance(n.meta["val"], torch.SymInt)}
    last = placeholders[-1] if placeholders else None
    for node, source, example in list(zip(placeholders, captured.inputs, captured.example_inputs)):
        for d, size in enumerate(getattr(node.meta["val"], "shape", ())):
            name = str(size)
            if isinstance(size, torch.SymInt) and name.isidentifier() and name not in of_symbol:
                with graph.inserting_after(last):
                    of_symbol[name] = last = graph.placeholder(name)
                last.meta.update(val=size, location=node.meta.get("location"), origins=())
                captured.inputs.append(CallSource(source, "size", (d,)))
                captured.example_inputs.append(example.shape[d])
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.sym_size.int and str(node.meta["val"]) in of_symbol:
            node.replace_all_uses_with(of_symbol[str(node.meta["val"])])
            graph.erase_node(node)
    captured.gm.recompile()


def eager_callable(gm) -> Callable:
    """Backend `eager`: the graph's own Python code."""
    return gm.forward


def flat_result(compiled) -> Callable:
    if not callable(compiled):
        raise TypeError(f"the backend returned {type(compiled).__name__}, not a callable")

    def call(*inputs):
        result = compiled(*inputs)
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)
    return call


# %% [markdown]
# ## Forgetting

# %%
def reset() -> None:
    """Drop every compiled entry and every decision."""
    from .ch04_breaks import resume
    hook.reset()
    resume.reset()
    _contexts.clear()
    logs._warned.clear()


hook.set_callback(on_new_code, entries.MISSED)
