"""Exceptions shared by every stage, and those that are none of them.

`Unsupported` and `SkipFrame` are internal: the driver catches them and runs the code eagerly instead.
`MinicompileError` is for people: one sentence saying what is wrong and one saying what to do about it. `OutOfRange` is the program's own.
"""

import _signal  # `signal.getsignal` makes an enum of each handler, which takes a hundred times as long
import traceback


class MinicompileError(RuntimeError):
    """Wrong use, or an environment that cannot do what was asked. The text names the way out."""


class Unsupported(Exception):
    """A stage cannot handle something; the caller falls back to a simpler way of running it.

    reason: one line for people. location: the user's line that needed it (ch01 Location), or None. born: the place of what is in
    the way in the order in which the trace made things (`step_of` finds the instruction), or 0. Whoever raises one keeps no name for
    it: a frame that holds an exception which holds the frame stays, with all that its callers hold, until the collector comes.
    """

    def __init__(self, reason, location=None, born=0):
        super().__init__(reason)
        self.reason = reason
        self.location = location
        self.born = born

    def __str__(self):
        return f"{self.reason} ({self.location})" if self.location is not None else self.reason


def marked(error: Exception, **facts) -> Exception:
    """The error with these attributes, to be raised at once."""
    vars(error).update(facts)
    return error


class SkipFrame(Unsupported):
    """Nothing in this frame is worth compiling, or nothing can be: evaluate it as it is from now on."""


class StrictError(MinicompileError):
    """What the user asked to fail rather than to run some other way."""


class RecompileError(StrictError):
    """A function would have to be compiled (again) under the stance `fail_on_recompile`, or beyond the recompile
    limit under `fullgraph=True`."""


class BackendError(StrictError):
    """A backend given to `compile` raises (that exception is the cause), or does not do what a backend must do."""


class GraphBreakError(StrictError):
    """`fullgraph=True` was asked for, and the function does not fit in one graph."""


class MarkError(StrictError):
    """The program fixes a size that `mark_dynamic` says varies."""


class InternalError(StrictError):
    """The compiler itself failed under `fullgraph=True`; the cause is its exception."""


class OutOfRange(IndexError, RuntimeError):
    """A kernel was given an index that is not there. Of eager's operators `x[i]` raises an IndexError for it and `gather` a RuntimeError,
    and a kernel of several does not know whose index it was: whoever catches the one or the other catches this."""


def words_of(error: BaseException) -> str:
    """What an exception says, or where it says nothing, as MemoryError does, what it is called."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def interrupts(error: BaseException) -> bool:
    """Whether this is nothing that compiled code has raised, but comes from a handler of signals, as KeyboardInterrupt and TimeoutError."""
    if not isinstance(error, Exception):
        return True
    if error.__traceback__ is not None and error.__traceback__.tb_next is None:     # where it was caught: a handler has a frame of its own
        return False
    handlers = handlers_of_signals()
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


def handlers_of_signals() -> set:
    handlers = map(_signal.getsignal, range(1, _signal.NSIG))
    return {called_by(handler) for handler in handlers if handler is not None and type(handler) is not int}


def called_by(callback):
    """The code that runs when this is called; None if that is not Python's."""
    callback = getattr(callback, "func", callback)                                  # of a `partial`
    found = getattr(callback, "__func__", callback)
    return getattr(found if hasattr(found, "__code__") else getattr(type(found), "__call__", None), "__code__", None)
