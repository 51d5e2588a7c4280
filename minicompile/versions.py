# %% [markdown]
# # Versions of one function
#
# A code object that was called under one set of compile options (a *context*) has a state: what is known about it, and the
# versions that were made of it. This module makes a version: an entry, which is guards and body in one Python
# function. `frames.py` decides when.

# %%
import dis
import functools
import inspect
import os
import sys
import traceback
import types
import weakref
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import is_grad_enabled

from . import logs
from .backends import add_size_inputs, call_backend
from .ch01_graphs.graph import eager_callable
from .ch01_graphs.recipes import RECIPES
from .ch02_guards import cache as entries, codegen
from .ch02_guards.identity import full_name, is_a, weakly
from .ch02_guards.sources import LocalSource, TupleItemSource
from .ch03_capture import hook
from .ch03_capture.capture import CaptureOptions
from .ch03_capture.hook import EVALUATE, EVALUATE_ALL
from .ch04_breaks.breaks import capture_frame
from .ch04_breaks.resume import TailCall, is_resume
from .ch04_breaks.steps import make_raise
from .ch09_triton.launch import start_workers
from .ch11_runtime.collector import without_collection
from .config import config
from .driver import timed
from .errors import GraphBreakError, InternalError, MarkError, MinicompileError, SkipFrame, StrictError, Unsupported, interrupts
from .interrupts import restore_gradients, without_saved_tensor_hooks
from .stances import Context


@dataclass(eq=False)
class FrameState:
    """All that is known about one code object in one context. Its entries are attached to the code, which they
    must not keep alive (`hook.py`), so the code is referred to weakly: there is one whenever it is asked for."""
    weak_code: weakref.ref
    context: Context
    cache: entries.EntryCache = None
    dynamic: dict = field(default_factory=dict)     # source -> what varies there, as `CaptureOptions` has it
    given_up: bool = False                          # nothing more is compiled
    full: list = field(default_factory=list)        # for whom the recompile limit was reached, as `over_limit` tells
    missed: int = 0                                 # calls that no version fits, beyond the recompile limit
    refuted: int = 0                                # calls in which a jump went the other way than its graph assumed
    raised: int = 0                                 # calls that were seen to end in the program's own exception
    unseen: Any = None                              # runs a call as if nothing were compiled, or None (`unseen`)
    undo: list = field(default_factory=list)        # what the traces of the call at hand have done ahead

    @property
    def code(self) -> types.CodeType:
        return self.weak_code()

    def publish(self, target) -> None:
        """Tell the hook whom to call, unless all was forgotten meanwhile."""
        if self.is_known():
            hook.set_target(self.code, self.context, target)

    def is_known(self) -> bool:
        return self.code is not None and hook.record(self.code).get(states, {}).get(self.context) is self


# %% [markdown]
# States hang on the record of their code (`hook.kept`), a dictionary from contexts to states, and so does what the user has been warned of:
# both go when the code goes.

# %%
def states(code) -> dict:
    """The states of a code object by context; at first none."""
    return {}


def warned(code) -> set:
    """What the user was told about a code object; at first nothing."""
    return set()


def name_of_code(code) -> str:
    return f"{'the rest of ' if is_resume(code) else ''}{code.co_name} ({code.co_filename}:{code.co_firstlineno})"


def model_of(args):
    """The module whose method this is. Two models of one class share code, but not the limit."""
    return args[0] if args and is_a(args[0], torch.nn.Module) else None


def kind_of(model) -> tuple:
    """The class of a model, held weakly, and its name; () if there is none."""
    return () if model is None else (weakly(type(model)), full_name(type(model)))


# %% [markdown]
# **When the compiler is wrong.** An exception that none of its stages has raised on purpose is a mistake of ours, and no reason for the
# program to fail. The frame runs eagerly, and the user is told once, with the file and the line of the mistake and what to send.

# %%
def internal_error(code, context: Context, error: Exception, give_up=lambda: None, words="{} runs eagerly") -> None:
    """Call this while handling `error`. The frame runs eagerly from now on (`give_up` sees to it), with one
    warning; under fullgraph it is an InternalError."""
    logs.tell("internal_error", error=error)
    if config.raise_on_internal_error:
        raise
    trace = error.__traceback__                  # walked by hand: the program may have replaced what `traceback` calls
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" at {os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}" if trace is not None else ""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    what = f"an internal error{where}: {type(error).__name__}: {error}{notes}."
    report = ("To report it, set minicompile.config.raise_on_internal_error = True, run it again, and send "
              "that traceback with the function's source.")
    if context.fullgraph:
        raise InternalError(f"fullgraph=True, but compiling {name_of_code(code)} failed with {what} {report}") from error
    give_up()
    logs.warn_once("internal", f"minicompile: {words.format(name_of_code(code))} because of {what} Its results are "
                   f"right, only not faster. {report}", hook.kept(warned, code))


def late_error(weak_code, context: Context, error: Exception) -> None:
    """The same for a backward graph that is compiled when it is needed, from within `backward()`."""
    code = weak_code() or late_error.__code__       # the function may be gone, and only its result left
    internal_error(code, context, error, words="the backward of {} runs operator by operator")


# %% [markdown]
# ## Compiling a frame
#
# A symbolic size is a wish, not a need: if capture cannot do it, the version is specialised to the sizes at
# hand. And while a frame is compiled the program may go on: in other threads, and in finalisers, which run wherever
# memory is allocated. What they change is seen when the finished guards are checked for the call at hand: one
# fails. Then the frame is compiled once more. Guards that fail again have another cause, one of ours.

# %%
class GuardFails(RuntimeError):
    """A guard fails right after compiling."""


def compile_frame(state: FrameState, function, args):
    try:
        with without_collection():
            entry = compile_until_it_holds(state, function, args)
    finally:
        RECIPES.clear()
    entries.add_entry(state.cache, entry)
    return entry


def compile_until_it_holds(state: FrameState, function, args):
    try:
        try:
            return compile_version(state, function, args)
        except GuardFails as error:
            logs.tell("again", state=state, why=error)
            return compile_version(state, function, args)
    except (SkipFrame, StrictError, GuardFails):
        raise
    except Exception as error:
        if config.raise_on_internal_error:
            raise
        why = f"{type(error).__name__}: {error}"
        logs.tell("specialized", state=state, why=why)
        return compile_version(state, function, args, fixed=why)


# %% [markdown]
# `compile_version` is the way from a call to an entry: capture, the graph through the backend, and then guards and body as one function.
# `capture_best` captures with symbols first. If that fails, or breaks the graph where the numbers at hand might not,
# the frame is captured a second time without symbols, and the version with fewer breaks wins. In a program that has used a GPU, the
# processes that will compile kernels start before that: importing Triton takes them longer than a first capture takes.

# %%
def compile_version(state: FrameState, function, args, fixed: str = ""):
    """Capture, compile and write an entry for these arguments. fixed: why nothing may be a symbol, or ""."""
    if state.context.backend in ("default", "triton") and torch.cuda.is_initialized():
        start_workers()
    local_values = dict(zip(state.code.co_varnames, args))
    with config.options(dict(state.context.options)), timed("capture"):
        captured = capture_best(state, function, local_values, fixed)
    logs.tell("captured", state=state, captured=captured)
    return make_entry(state, function, args, captured)


def capture_best(state: FrameState, function, local_values: dict, fixed: str):
    """Capture with symbols for what varies; if that breaks the graph earlier, for the values at hand."""
    fullgraph, found = state.context.fullgraph, None
    options = CaptureOptions(fullgraph, state.dynamic, fixed, everything=state.context.dynamic is True,
                             unseen=state.context.because, undo=state.undo,
                             trusting=fullgraph or state.refuted < TRUST)
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
    static = capture_frame(function, local_values, replace(options, dynamic={}, fixed=why, everything=False))
    return found if found is not None and len(found.breaks) <= len(static.breaks) else static


# %% [markdown]
# `make_entry` writes the function. `namespace` has all that its text names and Python does not know: the constants, the graph, and in
# `__next` the next version of the chain. At the end all guards are evaluated one by one for this very call. They
# hold, unless the program went on meanwhile, so a guard that was written down wrongly is found here and not at the next call.

# %%
def make_entry(state: FrameState, function, args, captured):
    body, inputs = captured.body, []
    namespace = {"__K": captured.constants, "__EVALUATE": EVALUATE, "__EVALUATE_ALL": EVALUATE_ALL, "__next": [entries.missed],
                 "__refuted": functools.partial(hook.run, None, refuted, weakref.ref(state))}
    if captured.gm is not None:
        body, inputs = call_of_graph(state, captured, namespace) + body, captured.inputs
    body = captured.before + body
    alone = captured.gm is None or is_all_library(captured, namespace["__graph"], function.__code__)
    if alone and not (captured.breaks or state.context.fullgraph):
        body, inputs = "return __EVALUATE_ALL", []      # nothing for the compiler here, nor in what it calls, as long as the guards hold
    for problem, of_the_program in captured.close():
        if of_the_program or state.context.fullgraph:
            raise MarkError(problem)
        logs.warn_once(problem, f"minicompile: {problem}", hook.kept(warned, state.code))
    compiled = codegen.build_entry(captured.guards, inputs, state.code, body, namespace, captured.written,
                                   captured.weak)
    hook.skip_code(compiled.__code__)
    logs.tell("entry", state=state, captured=captured, compiled=compiled)
    failing = codegen.failing_guard(captured.guards, state.code, function, args, captured.constants)
    if failing is not None:
        raise GuardFails(f"a guard fails right after compiling: {failing[1]} ({failing[0]})")
    return entries.Entry(compiled, namespace["__next"], captured.guards, captured.constants,
                         weakly(model := model_of(args)), kind_of(model), ahead=captured.ahead)


# %% [markdown]
# A frame may be evaluated as it is: if nothing was captured, and also if what was captured gains nothing (`as_captured` in `driver.py`) and
# is nearly all that the frame does, as in `return x.sort()`. Then CPython does in a tenth of a microsecond what takes the body half of
# one: to call the graph, and to take the results apart. Behind many instructions, or with tensors that attributes lead to, as those of
# modules do, the body is shorter. So it is where the frame calls what is not in the graph: `sorted(values)` was computed in the trace.

# %%
FEW_INSTRUCTIONS = 30            # instructions


def is_all_library(captured, graph, code: types.CodeType) -> bool:
    """Is it as quick to let CPython evaluate the frame as to call the graph?"""
    if not getattr(graph, "as_captured", False) or captured.instructions > FEW_INSTRUCTIONS or captured.ahead:
        return False
    calls = sum(i.opname in ("CALL", "CALL_FUNCTION_EX", "CALL_KW") for i in dis.get_instructions(code))
    called = sum(n.op == "call_method" or n.op == "call_function" and n.target.__module__ != "_operator" for n in captured.gm.graph.nodes)
    handed = zip(captured.inputs, captured.example_inputs)
    return calls <= called and all(type(source) in (LocalSource, TupleItemSource) or type(example) is int for source, example in handed)


# %% [markdown]
# On a CPU a jump that only decides whether to raise is assumed not to (`assume` in chapter 3). A graph that finds the assumption wrong ends
# in `__refuted`, and the call is evaluated as it is. That is forgiven `TRUST` times; then the versions are dropped, and the next ones break
# at the jump instead.

# %%
TRUST = 8


def refuted(weak_state) -> None:
    """A graph assumed that the program does not raise. At the last time that is forgiven, the program's entries are dropped."""
    state = weak_state()
    if state is not None:
        state.refuted += 1
        if state.refuted == TRUST and not state.context.fullgraph:
            entries.drop_entries(state.cache, list(state.cache.entries))


def call_of_graph(state: FrameState, captured, namespace: dict) -> str:
    """Compile the graph. Returns the statement that calls it; `namespace` gets what that names."""
    add_size_inputs(captured)
    logs.tell("graph", state=state, captured=captured)
    namespace["__graph"] = call_backend(captured, state.context, functools.partial(late_error, state.weak_code, state.context))
    gm = captured.gm if captured.traceless and not callable(state.context.backend) else None
    namespace["__refused"] = functools.partial(hook.run, None, graph_refused, gm, state.context.backend == "eager",
                                               is_grad_enabled())
    return watched_call(gm and captured.retreat)


# %% [markdown]
# **When the graph itself raises.** An index out of range or a singular matrix is not known when compiling.
# Eager would raise in the middle of the frame, after its earlier side effects and perhaps inside a `try`; the
# graph raises before all side effects that the entry applies. So a graph that has left no trace is forgotten,
# and the frame evaluated as it is. That would hide a faulty kernel, so the graph as it was captured has to
# fail, too.
#
# What a saved-tensor hook of the program raises is another matter: the graph has run, and the exception is a message to
# whoever set the hook. Checkpointing stops its second forward pass in this way. Such an exception is raised where the frame begins. For
# a resume function that is inside of the blocks that were entered before the break
# ([`make_raise`](ref:minicompile.ch04_breaks.steps.make_raise)). So is that of a graph that has left traces. (A kernel that has raised may
# have written to an input or not, and a handler goes on with whichever it is; but a lock has to be given back.) And so is what interrupts
# the program, as KeyboardInterrupt or the limit of recursion, be it in the graph, in guards or in the compiler: its `finally` has to run,
# and `with` to leave, say, `torch.no_grad()`. The frame hook sees that a target has raised, and `go_on_in_handlers` answers; for that
# the hook lets it go deeper than the limit.

# %%
def watched_call(retreat: str | None) -> str:
    """retreat: what to return so that the frame is evaluated, if anything. It may put back generators of random numbers, and then also does
    so before the trial, which is to draw the numbers that the graph drew. `__refused` also sees to it that gradients and autocast are on
    or off as before: parts of the graph may have changed that."""
    refused = f"""if {"" if retreat == "__EVALUATE" else f"{retreat} is __EVALUATE and "}__refused(*__inputs):
        return {retreat}"""
    return f"""try:
    __out = __graph(*__inputs)
except BaseException:
    {refused if retreat else "__refused(*__inputs)"}
    raise
"""


def go_on_in_handlers(function, arguments, error: BaseException):
    """Called by the hook for what has been raised before the resume function `function` has begun: by its graph, in its guards, or by the
    compiler. Returns the call that raises it in the handlers that wait where that begins; None if nobody waits."""
    interrupted, code = isinstance(error, (MinicompileError, RecursionError)) or interrupts(error), function.__code__
    if (point := make_raise(code, interrupted)) is None or any(frame.f_code is code for frame, _ in traceback.walk_tb(error.__traceback__)):
        return None
    hook.skip_code(point.code)
    return TailCall((point.function(function.__globals__, *(function.__closure__ or ())), (*arguments, error)))


hook.set_on_error(go_on_in_handlers)


def raised_by_hook(error) -> bool:
    """Whether it comes from the saved-tensor hook that is in force."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    code = hooks and getattr(inspect.unwrap(hooks[0]), "__code__", None)
    return code is not None and any(frame.f_code is code for frame, _ in traceback.walk_tb(error.__traceback__))


def leave_modes(grad: bool, error: BaseException) -> None:
    """Undo what a captured graph that has raised has switched on or off: gradients, and each `torch.autocast` that one of its variables
    still holds."""
    restore_gradients(grad)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename.startswith("<eval_with_key")]
    held = frames[0].f_locals.values() if frames else ()
    for entered in [value for value in held if isinstance(value, torch.autocast)][::-1]:
        entered.__exit__(None, None, None)


def graph_refused(gm, eager: bool, grad: bool, *inputs) -> bool:
    """Whether the frame is to be evaluated after its graph has raised. gm: the captured graph, or None if it
    leaves traces. eager: whether it was this graph that ran. grad: the grad mode when it began."""
    leave_modes(grad, sys.exception())
    if gm is None or interrupts(sys.exception()) or raised_by_hook(sys.exception()):
        return False
    if eager:
        return True
    try:
        with without_saved_tensor_hooks():
            eager_callable(gm)(*inputs)
    except Exception as error:
        leave_modes(grad, error)
        return True
    finally:
        restore_gradients(grad)
    return False
