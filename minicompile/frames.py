# %% [markdown]
# # From a frame to a compiled call
#
# The frame hook reports a frame, capture turns it into a graph, guards and Python text, the driver compiles
# the graph. This module is the loop that connects them, once per function and per set of compile options
# (`versions.py` makes one version, `learning.py` says what is to vary in the next, `limits.py` when there are enough):
#
#     first call     capture -> compile -> entry; run the entry
#     later calls    the hook calls the newest entry directly; nothing of this module runs
#     guards fail    the chain of entries ends here again: say why, capture another version
#     cannot         evaluate the frame as it is, and remember to
#
# Whatever goes wrong inside the compiler, the user's program must get its result. So every path ends in an
# entry that runs or in `EVALUATE`.

# %%
import atexit
import contextlib
import functools
import inspect
import os
import sys
import threading
import time
import weakref
from dataclasses import replace

import torch
import torch.utils.checkpoint
from torch.utils._device import DeviceContext

from . import advice, ch12_training, logs, marks, topics  # noqa: F401 (chapter 12 fills tables of chapter 3, topics one of logs)
from .ch01_graphs.floats import numpy_warnings
from .ch02_guards import cache as entries, codegen
from .ch02_guards.guards import GuardSet
from .ch02_guards.identity import strongly
from .ch02_guards.sources import LocalSource
from .ch02_guards.torch_guards import is_transforming
from .ch03_capture import hook
from .ch03_capture.binding import SUSPENDS
from .ch03_capture.hook import EVALUATE, EVALUATE_ALL
from .ch04_breaks.breaks import fullgraph_message
from .ch04_breaks.resume import TailCall, finish, origin_of, original_code
from .config import config
from .errors import GraphBreakError, MinicompileError, RecompileError, SkipFrame, StrictError, Unsupported, interrupts, marked
from .interrupts import COMPILING, FINALIZE, ThreadState, comes_unasked, compiling, interrupted, target_in_compiler
from .learning import explain_miss, look_again, question_about
from .limits import is_full, is_one_of_many, over_limit
from .stances import Context, current
from .versions import FrameState, compile_frame, internal_error, model_of, name_of_code, states, warned

_lock = threading.RLock()


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


# %% [markdown]
# What cannot have a frame that is seen as a whole is refused before anything runs, if `fullgraph` was asked for.

# %%
def check_code(target, context: Context) -> None:
    """Under fullgraph, what never becomes a frame that can be captured is refused at once."""
    code = getattr(target, "__code__", None)
    if context.fullgraph and (code is None or code.co_flags & SUSPENDS):
        name = getattr(target, "__qualname__", None) or type(target).__name__
        what = "has no Python code" if code is None else "is a generator or a coroutine, which runs in pieces"
        raise GraphBreakError(f"fullgraph=True, but {name} {what}. Compile a function that calls it, or allow it to "
                              "run eagerly with fullgraph=False.")


# %% [markdown]
# The hook asks once for each code object, by `on_new_code`, and keeps the answer. `target_for` (below) gives it: False for library code
# that nobody compiled explicitly, None for what has to run as it is, a substitute for two functions of PyTorch whose own code would call
# torch.compile or compare what two runs have saved (`INSTEAD`), and for anything else the tail of an empty chain of versions. The first
# call of that misses, and there the work begins.

# %%
# Guards read attributes, so these run while guards are checked: compiling them would not end. And what is
# called for every operator would be compiled for every operator. `__create_fn__` is how a dataclass makes its methods.
EVALUATED = ("<module>", "__create_fn__", "__getattribute__", "__getattr__", "__torch_function__", "__torch_dispatch__")


def on_new_code(function, code, context):
    """Called by the hook. Answers the target for this code: False = never, None = as it is, or a callable."""
    if context is COMPILING:
        return target_in_compiler(code)
    try:
        return target_for(function, code, context)
    except Exception as error:
        if interrupts(error):
            raise
        internal_error(code, context, error)
        return None


CHECKPOINT = inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__


@marks.passed_over
def checkpoint_uncompiled(function, *values):
    """`checkpoint(inner, ...)` that capture could not have as part of a graph. It runs `inner` now and again
    in backward, and compares what autograd saves: compiled now and not compiled then is an error."""
    (inner, *args), kwargs = hook.arguments_of(function.__code__, values)
    return hook.run(None, function, functools.partial(hook.run, None, inner), *args, **kwargs)


exporting = torch.compiler.is_compiling        # True while another compiler runs the program to see what it does

# Other compilers and tracers see the program as it is: inside of them, nothing is captured. Nor is what runs
# because of an `import`, which happens once
TRACERS = ("<frozen importlib", *(os.path.join(os.path.dirname(torch.__file__), name) + os.sep
                                  for name in ("_dynamo", "_export", "export", "fx", "jit", "onnx")))


def running_in(context: Context | None):
    """A target that runs a frame, and all that it calls, in this context, or outside of the region. The pieces
    behind a graph break belong to the frame."""
    @marks.passed_over
    def run(function, *values):
        args, kwargs = hook.arguments_of(function.__code__, values)
        result = hook.run(context, function, *args, **kwargs)
        return hook.run(context, finish, result) if type(result) is TailCall else result
    return run


run_outside = running_in(None)


@marks.passed_over
def cond_uncompiled(function, *values):
    """`torch.cond` on the value of a tensor. Its own implementation calls torch.compile; here the branch that is
    taken is a frame like any other."""
    pred, true_fn, false_fn, operands = values
    return (true_fn if pred else false_fn)(*operands)


INSTEAD = {CHECKPOINT: checkpoint_uncompiled, inspect.unwrap(torch.cond).__code__: cond_uncompiled, FINALIZE: run_outside}


# %% [markdown]
# The answers in order. The tail that is returned at the end does not hold the state, and no entry does: a state hangs on its code, and what
# hangs on code must not lead back to it (`partial_of`).

# %%
def target_for(function, code, context):
    if code in INSTEAD:
        return INSTEAD[code]
    if "allowed" not in hook.record(code) and (code.co_filename.startswith(TRACERS) or comes_unasked(code)):
        return run_outside
    if "allowed" not in hook.record(original_code(code)) and hook.is_library_file(file_of(function, code)):
        return False
    if marks.is_disabled(function) or code.co_name in EVALUATED:
        return None
    state = hook.kept(states, code)[context] = FrameState(weakref.ref(code), context)
    state.cache = entries.EntryCache(code.co_name, partial_of(state, on_miss), partial_of(state, FrameState.publish),
                                     ask=partial_of(state, question_or_all, gone=None))
    if config.automatic_dynamic and context.dynamic is None and (origin := origin_of(code)) is not None:
        state.dynamic.update((LocalSource(name), how) for name, how in origin.varying.items())
    return state.cache.tail


def partial_of(state: FrameState, function, gone=EVALUATE):
    """function(state, *args), which does not keep the state: its code does, until all is forgotten. gone: the answer after that."""
    @marks.passed_over
    def call(*args, weak=weakref.ref(state)):
        state = weak()
        return gone if state is None else function(state, *args)
    return call


def file_of(function, code) -> str:
    """Where a function is from. What `dataclass` and `namedtuple` write has no file: that of their module."""
    found = code.co_filename
    return found if found != "<string>" else function.__globals__.get("__file__") or found


# %% [markdown]
# ## On a miss
#
# `on_miss` first looks for reasons to let CPython evaluate the frame: the stance of the moment, that this code was given up, or that
# nothing may be compiled at this point of the program (`why_not_here`). Otherwise it waits for its turn, since one thread compiles
# at a time, and takes the version that another thread has made meanwhile, or one that lacks only what its trace did ahead of the graph
# (`done_ahead`), or makes one. If in the end nothing has run, what was done ahead is taken back (`undo`).
#
# A function that has as many versions as it may have (`full`, below) is not compiled again. From then on a miss should at least be cheap:
# each entry asks first for the guard that has told such calls apart (`ask_first`). A few times that guard is chosen anew (`look_again`),
# because the calls may differ in something else by then. And where no entry has served `PATIENCE` calls in succession, entries are asked
# about every `REST`-th call only, until one serves it (`rest`): of small functions, to ask eight entries takes longer than to run.
#
# Everything between the miss and the entry runs in the region `COMPILING` (`interrupts.py`): the compiler is Python, too, and must not
# compile itself.

# %%
PATIENCE, REST = 64, 61
LOOKS = (64, 512, 4096)          # beyond the recompile limit: numbers of calls at which it is looked again where they differ


@marks.passed_over
def on_miss(state: FrameState, function, *args):
    """No entry fits this call: compile one and run it, or decline. The tail of every chain."""
    if current.name in ("force_eager", "eager_on_recompile") or exporting():
        return EVALUATE
    if state.given_up:
        return EVALUATE if state.unseen is None else state.unseen(function, *args)
    if state.full and current.name == "default" and is_full(state, model_of(args)):
        state.missed += 1
        if state.missed in LOOKS and why_not_here() is None:
            with compiling(), _lock, contextlib.suppress(Exception):
                look_again(state, function, args)
        rest(state)
        return EVALUATE
    if (obstacle := why_not_here()) is not None:
        if state.context.fullgraph:
            raise GraphBreakError(f"fullgraph=True, but {name_of_code(state.code)} cannot be compiled here: {obstacle}, "
                                  "or allow it to run eagerly with fullgraph=False.")
        return EVALUATE
    before, created, undo, result = ThreadState(), state.cache.created, [], EVALUATE
    try:
        try:
            with compiling(before), _lock:
                state.undo = undo
                entry = made_meanwhile(state, created, function, args) or done_ahead(state, function, args) or \
                    new_entry(state, function, args)
        finally:
            before.restore()
        if entry is not None:
            result = entry.function(function, *args)
        return result
    finally:
        if result is EVALUATE or result is EVALUATE_ALL:     # nothing has run, or it has raised
            for take_back in reversed(undo):
                take_back()
        undo.clear()                              # it holds objects of the program


def rest(state: FrameState) -> None:
    """A call that no entry fits, and none will be made for: after many in succession, some are not asked about."""
    cache = state.cache
    if not cache.entries:                            # then nothing searches, and of one entry it is not seen whether it has served
        cache.unserved += 1
    elif len(cache.entries) == 1 and cache.passed < entries.MOST_MISSES:
        entries.note_miss(cache)
    if cache.unserved < PATIENCE:
        return
    turns = iter(range(1, REST))

    @marks.passed_over
    def resting(state, function, *args):
        if current.name == "default" and is_full(state, model_of(args)):
            if next(turns, None) is not None:
                return EVALUATE
            entries.connect_all(state.cache)
        return entries.search(state.cache, (function, *args), 0)
    state.publish(partial_of(state, resting))


@marks.passed_over
def question_or_all(state: FrameState, made: list, answers: list):
    """What tells which of these entries may fit a call (`question_about`). Without it all are tried."""
    with compiling(), contextlib.suppress(Exception):
        return question_about(state, made, answers)
    return lambda *args: answers


def fits(entry, state: FrameState, function, args) -> bool:
    """Whether all guards of the entry hold: asked by one function, since a program that makes its optimizers anew comes here often."""
    if entry.check is None:
        entry.check = question_about(state, [entry], [True], every=True)
    return bool(entry.check(function, *args))


def made_meanwhile(state: FrameState, created: int, function, args):
    """An entry for this call that another thread has made while this one waited for its turn: ten threads that
    begin to serve one model need two versions, not ten."""
    made = [] if state.cache.created == created else list(state.cache.entries)
    return next((entry for entry in made if fits(entry, state, function, args)), None)


def done_ahead(state: FrameState, function, args):
    """An entry that fits this call once what its trace did ahead of the graph is done for the objects of this call, too."""
    for entry in list(state.cache.entries):
        undo = []
        try:
            for source, again in entry.ahead:
                undo += again(codegen.read_source(source, state.code, function, args, entry.constants))
            if undo and fits(entry, state, function, args):
                state.undo += undo
                return entry
        except Exception:                            # objects of another make, which the program will meet
            pass
        for take_back in reversed(undo):
            take_back()
    return None


# %% [markdown]
# **Where nothing can be compiled.** Capture runs operators on tensors without data, and a graph computes several operations at once. Both
# are wrong where somebody watches single operations: a mode of the program, or a transformation such as `vmap` that is at work. Nor can a
# thread compile that is compiling already. That happens: a signal handler or a destructor can run between any two instructions, those of
# the compiler included. And capture calls itself for each call that it follows, so it needs room on the stack of Python. Each obstacle is
# told with a way around it.

# %%
def why_not_here() -> str | None:
    """Why nothing can be compiled at this point of the program, and what to do about it; None if it can."""
    if torch._C._len_torch_dispatch_stack() or watched():
        return "a mode of the program wants to see every operation. Leave the mode before the call"
    if torch.autograd.forward_ad._current_level >= 0:
        return "it runs under forward-mode differentiation. Leave the dual level before the call"
    if is_transforming():
        return ("it runs under torch.func.vmap, grad or another transform. Compile the function that applies "
                "the transform")
    if _lock._is_owned():
        return "this thread is compiling, and was interrupted by a signal handler or a finaliser. Call what is not compiled there"
    if is_deep():
        return ("the program has used up half of its recursion limit, and compiling needs the other half. "
                "Raise it with sys.setrecursionlimit")
    return None


def watched() -> bool:
    """Is there a TorchFunctionMode other than the default device?"""
    return torch._C._is_torch_function_mode_enabled() and any(
        type(m) is not DeviceContext for m in torch.overrides._get_current_function_mode_stack())


# %% [markdown]
# **One attempt.** `new_entry` says why this version is needed, asks whether it may be made, makes it, and sorts out how that can
# end. The ways, from the harmless to the worst:
#
# | what comes | what it means | what follows |
# |---|---|---|
# | `SkipFrame` | not worth compiling, or impossible as a whole | the frame runs as it is |
# | `Unsupported` | not even a part before a break could be compiled | the same; under `fullgraph` an error |
# | `StrictError` | what the user has asked to fail | it goes to the user |
# | `MinicompileError` | something is missing, such as a C++ compiler | one warning, then eager; under `fullgraph` it goes to the user |
# | any other | a bug in the compiler | one warning that says how to report it, then eager |
#
# The order of the clauses matters: `SkipFrame` is a kind of `Unsupported`, and `StrictError` one of `MinicompileError`. A `SkipFrame` of
# a program that was told that it is compiled (`told`) is not the end: it is captured once more, untold (`run_unseen`, below).

# %%
def new_entry(state: FrameState, function, args):
    """Compile for these arguments: an Entry whose guards hold for them, or None to evaluate the frame. What was
    asked for strictly raises."""
    fullgraph = state.context.fullgraph
    try:
        with numpy_warnings("ignore"):
            why = explain_miss(state, function, args) if state.cache.entries or state.cache.gone else None
        if current.name == "fail_on_recompile":
            raise RecompileError(f"{name_of_code(state.code)} would be compiled{f' again: {why}' if why else ''}. "
                                 "Set the stance to 'default' to allow it.")
        if why is not None:
            if (who := over_limit(state, function, args)) != ():
                reach_limit(state, who)
                return None
            logs.tell("recompile", state=state, version=state.cache.created + 1, why=why)
        elif not fullgraph and is_one_of_many(state.code):
            return skip_frame(state)
        began = time.monotonic()
        entry = compile_frame(state, function, args)
        entry.seconds = time.monotonic() - began
        return entry
    except SkipFrame as skip:
        if getattr(skip, "told", False):
            state.unseen = state.unseen or run_unseen(state.context, skip)
        skip_frame(state, skip)
        return state.unseen and entries.Entry(state.unseen, [], GuardSet())
    except Unsupported as unsupported:
        if fullgraph:
            raise GraphBreakError(fullgraph_message(function, unsupported, state.context.because)) from None
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
        if interrupted():
            raise
        why = marked(SkipFrame("an internal error"), quiet=True, passing=isinstance(error, RecursionError))
        internal_error(state.code, state.context, error, lambda: skip_frame(state, why))
    return None


def is_deep() -> bool:
    """Whether the program itself has used up most of its recursion limit, before the compiler came."""
    try:
        return sys._getframe(sys.getrecursionlimit() // 2) is not None
    except ValueError:
        return False


# %% [markdown]
# ## Giving up
#
# A frame that cannot be compiled is remembered (`given_up`), since the next attempt would cost as much and end the same way. Not at
# once, where the reason is of this one call: the program has raised an exception of its own, or its calls were nested too deeply.

# %%
def skip_frame(state: FrameState, why: Unsupported | None = None) -> None:
    """Evaluate this code as it is, unless an entry fits. Calls inside it may still be compiled. A call that
    ends in the program's own exception, or that is nested too deeply, says little about the next one."""
    if why is not None and not getattr(why, "quiet", False):
        logs.tell("skipped", state=state, reason=why)
    if getattr(why, "raises", False) or getattr(why, "passing", False):
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
def run_unseen(context: Context, told: SkipFrame):
    return running_in(replace(context, unseen=context, because=f"{told.reason} ({told.location})"))


def reach_limit(state: FrameState, who) -> None:
    """There are as many versions as the recompile limit allows: a warning, under fullgraph an error."""
    full = f"{name_of_code(state.code)} was compiled {state.cache.created} times (config.recompile_limit)"
    worst = f"The guard that failed most: {entries.worst_guard(state.cache)}"
    if state.context.fullgraph:
        raise RecompileError(f"fullgraph=True, but {full}, and no version fits this call. {worst}. "
                             f"{advice.for_recompile(worst)} Or raise minicompile.config.recompile_limit.")
    state.full = [*(other for other in state.full if other is None or strongly(other) is not None), who]
    logs.warn_once("limit", f"minicompile: {full}; other calls run eagerly from now on. {worst}. "
                   "Set MINICOMPILE_LOGS=recompiles to see all.", hook.kept(warned, state.code))


# %% [markdown]
# ## After a fork
#
# The child of `os.fork` has one thread, and all else in the state it had at that moment. What another thread was
# doing then is never done: locks stay locked (those of imports too), the collector stays off. So a fork waits until
# nobody is compiling. Not for ever: what is compiled may itself wait for the child.

# %%
_waited: list[bool] = []                          # one item for each fork under way: is the lock ours?


def _after_fork(child: bool) -> None:
    if _waited.pop():
        _lock.release()
    elif child:
        _lock._at_fork_reinit()


os.register_at_fork(before=lambda: _waited.append(_lock.acquire(timeout=5)),
                    after_in_parent=lambda: _after_fork(False), after_in_child=lambda: _after_fork(True))


# %% [markdown]
# ## Forgetting
#
# A report (`explain`) compiles a function for itself, in a context of its own. What it has compiled there is of no use afterwards.

# %%
def forget(state: FrameState) -> None:
    """Drop the entries of one code object in one context, for good."""
    state.given_up = True
    entries.drop_entries(state.cache, list(state.cache.entries))
    state.publish(None)


hook.set_callback(on_new_code, entries.MISSED)
# What destructors call while Python takes its modules apart finds a compiler without globals: run that as it
# is
atexit.register(setattr, current, "name", "force_eager")
