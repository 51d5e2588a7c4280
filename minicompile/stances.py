# %% [markdown]
# # Settings of one `compile`, and of the moment
#
# What a compiled function does is decided twice: by the settings that it was compiled with, its **context**, and by
# the **stance** of the moment.
#
# One function can be compiled with several settings, `compile(f)` here and `compile(f, fullgraph=True)` there. Their compiled versions
# must not be mixed up, since one may have a graph break where the other has to raise. So the versions of a function are kept
# under a key, and the key is the context. It is compared by identity at every call, by C code. So equal settings have to give one object:
# `context_for` looks among the contexts that are in use, and a function that is compiled in two places with the same settings is compiled
# once. Nobody else keeps a context: when the last function with these settings is gone, it goes as well.
#
# `explain` wants to see a function compiled from the start, even if it has been compiled before. Inside of `fresh_contexts` every context
# is a new one, under which nothing is kept yet.
#
# A context with `unseen` is for a second attempt: a program that takes another path when it is told that it is compiled, and fails there,
# is captured once more as if nobody had compiled it (`frames.run_unseen`).

# %%
from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from dataclasses import dataclass
from typing import Any

from .config import did_you_mean
from .errors import MinicompileError


@dataclass(frozen=True, eq=False)
class Context:
    """The settings of one `compile`. Equal settings give the same object, so that compiled code is shared."""
    backend: Any                       # a name or a callable(gm, example_inputs)
    options: tuple                     # sorted items of the resolved options
    dynamic: bool | None
    fullgraph: bool
    unseen: Context | None = None      # the context that this one repeats, with `is_compiling()` False
    because: str = ""                  # why: what the program did where it is True

    @property
    def backend_name(self) -> str:
        return self.backend if isinstance(self.backend, str) else getattr(self.backend, "__name__", "custom")


contexts: weakref.WeakValueDictionary = weakref.WeakValueDictionary()     # wrappers and compiled code hold them
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
        return contexts.setdefault(key, Context(*key))
    except TypeError:                  # a callable that cannot be hashed
        return Context(*key)


# %% [markdown]
# ## Stances
#
# A stance changes what compiled functions do, without touching the code that compiles them: run everything
# eagerly while looking for a bug, or fail loudly when a recompile sneaks into a benchmark. Take `f(x) = x + 1`, compiled and
# called once with float32 numbers. What it does under each stance when it is called with such numbers again, and then with float64:
#
#     default              runs what is compiled   compiles
#     force_eager          runs eagerly            runs eagerly
#     eager_on_recompile   runs what is compiled   runs eagerly
#     fail_on_recompile    runs what is compiled   RecompileError
#
# The last two compile nothing, the first version of a function included. The stance is read where a call begins, and where no version
# fits; what the two read is the one object `current`, whose name is changed in place.
#
# `set_stance` can be used in three ways, and cannot know in which when it is made. So it takes effect at once, as a call would, and
# remembers what was before. A `with` block puts that back at its end. As a decorator it puts it back at once, and takes effect
# during each call of the function.

# %%
STANCES = ("default", "force_eager", "eager_on_recompile", "fail_on_recompile")


@dataclass
class Stance:
    name: str = "default"


current = Stance()


class set_stance:
    """set_stance("force_eager"), as a call, in a `with` block, or as a decorator. What compiled functions do
    from then on:

    default: compile where no compiled version fits the call.
    force_eager: run as if nothing were compiled, `fullgraph=True` or not.
    eager_on_recompile: compiled versions that fit are used; any other call, also the first, runs eagerly.
    fail_on_recompile: compiled versions that fit are used; any other call, also the first, raises RecompileError.
        What was found not to be compilable runs as it is.
    """

    def __init__(self, stance: str = "default"):
        if stance not in STANCES:
            raise MinicompileError(f"Unknown stance {stance!r}.{did_you_mean(stance, STANCES)}")
        self._old, self._new = current.name, stance
        current.name = stance

    def __enter__(self):
        current.name = self._new
        return self

    def __exit__(self, *error):
        current.name = self._old

    def __call__(self, function):
        current.name = self._old          # only the function's calls are meant

        @functools.wraps(function)
        def under_stance(*args, **kwargs):
            with set_stance(self._new):
                return function(*args, **kwargs)
        return under_stance
