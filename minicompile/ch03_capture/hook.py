# %% [markdown]
# # The frame hook
#
# How does a compiler get to see a Python function without asking its author to change it? CPython has an
# official door for this. Since PEP 523 an extension may replace the C function that evaluates a frame. From
# then on every Python call made on the way, also deep inside library code, passes through ours before its
# first instruction runs.
#
# The replacement is `frame_hook.c`, 500 lines, the only C of this chapter. It decides by code object:
#
# | known about the code | what happens |
# |---|---|
# | nothing yet | the callback is asked, once, and the answer remembered |
# | skip | evaluated as it is |
# | a target | `target(function, *arguments)` is called instead of running the frame |
#
# A target is an ordinary Python function; its result becomes the result of the frame. It may still say
# `EVALUATE`: then the untouched frame is evaluated after all. After `EVALUATE_ALL` so are the frames of all that it
# calls: the trace has been through them and has found nothing to compile. So everything complicated (guards, compiling,
# falling back) is Python, and the C code neither copies frames nor interprets anything.
#
# What the frame's owner expects afterwards differs between versions. In 3.11 the caller clears the frame,
# so returning a result is all there is to do. In 3.12 and 3.13 the evaluator clears it, with functions that
# CPython does not export. But the evaluator can be made to do it: enter it with an exception already set,
# and it unwinds the frame before the first instruction. The exception is then dropped and our result
# returned. (torch.compile's hook builds a second frame by hand, from copies of CPython's internal
# functions, one set for each version.)
#
# ## Depth
#
# CPython limits the depth of Python calls (`sys.setrecursionlimit`) and, from 3.12 on, of C calls. With a
# hook installed every Python call is also a C call, and a graph break puts two frames of ours between the
# program's. A recursion that eager Python can do must not fail for that, so the hook takes both out of the
# counts, and looks at the real end of the thread's stack instead: there is a `RecursionError`, not a crash.
#
# ## Regions and contexts
#
# Replacing frames globally would slow down the whole program: CPython's own fast path for Python-to-Python
# calls is off while a hook is installed. So the hook is installed only while some thread runs `run(context,
# f, ...)`, and it acts only in that thread. The context is the compiler's setting (backend, options); a
# function compiled in two ways has two targets. `run(None, f, ...)` leaves the region for the time of the
# call, which is all that `disable` needs.
#
# Where the extension could not be built, `no_hook.py` stands in for it.

# %%
import contextlib
import inspect
import os
import sys
import sysconfig
import warnings
import weakref

from ..cache import cache_dir

try:
    from . import frame_hook as _c
except ImportError:                                   # built without CPython's headers
    from . import no_hook as _c
    warnings.warn(
        "minicompile's frame hook is not built for Python {}.{}, so code after a graph break runs eagerly: "
        "install a C compiler and Python's headers (on Debian and Ubuntu: apt install gcc python3-dev), then "
        "install minicompile again (in a checkout: python setup.py build_ext --inplace).".format(
            *sys.version_info[:2]),
        RuntimeWarning, stacklevel=2)

EVALUATE = _c.EVALUATE
EVALUATE_ALL = getattr(_c, "EVALUATE_ALL", EVALUATE)                               # in Python, no hook sees what is called
run, targets_of, is_installed, forget_code, frame_of = _c.run, _c.targets_of, _c.is_installed, _c.forget_code, _c.frame_of
run_piece = getattr(_c, "run_piece", lambda call: call.pop(0)(*call.pop()))        # in Python, the arguments live until it returns
_known: dict = {}                                     # id(code) -> weak reference, for `forget_all`


@contextlib.contextmanager
def in_region(context):
    """Inside, frames are those of this region. It has to be in another one, or the hook is not installed."""
    context = _c.set_region(context)
    try:
        yield
    finally:
        _c.set_region(context)


def arguments_of(code, values) -> tuple[tuple, dict]:
    """(args, kwargs) that bind to these values of the parameters of `code`, which are in the frame's order."""
    positional = code.co_argcount
    named = code.co_varnames[positional:positional + code.co_kwonlyargcount]
    rest = list(values[positional + len(named):])
    args = (*values[:positional], *(rest.pop(0) if code.co_flags & inspect.CO_VARARGS else ()))
    return args, {**dict(zip(named, values[positional:])), **(rest[0] if rest else {})}


# %% [markdown]
# ## What is remembered, and for how long
#
# Everything that the compiler knows about a code object belongs to the code object. The C side attaches it
# (`PyUnstable_Code_SetExtra`, in 3.11 `_PyCode_SetExtra`): the targets, and a dictionary, the code's **record**, in which every
# chapter keeps what it has worked out about this code. So a lookup is one pointer read, there are no tables to clean up, and
# what was compiled dies with the code. A table with code objects as keys would keep all of them; one with their `id` would give
# a new code object the facts of a dead one that had its address.
#
# The price is a rule. Code objects take no part in garbage collection: the collector cannot see that a code
# object leads to its record, so a path from there back to the code is a cycle that is never freed. What a
# compiled call needs of the program (globals, classes, functions, modules, other code) it reads from the
# function that is being called, or holds weakly (`ch02_guards/identity.py`).
#
# Here are only weak references to all of them, to be able to forget everything in `forget_all`.

# %%
def remember(code) -> None:
    if id(code) not in _known:
        _known[id(code)] = weakref.ref(code, lambda _, key=id(code): _known.pop(key, None))


def record(code) -> dict:
    """What is known about a code object, by name (facts about it, which outlive `forget_all`) or by the function
    that computed it."""
    remember(code)
    return _c.record_of(code)


def kept(compute, code):
    """compute(code), computed once and kept with the code. The result must not lead back to the code."""
    known = record(code)
    if compute not in known:
        known[compute] = compute(code)
    return known[compute]


def skip_code(code) -> None:
    """Never capture frames of this code object, not after `forget_all` either: another thread may be in the middle
    of a function whose next piece it is."""
    record(code)["skipped"] = True
    _c.skip_code(code)


def set_target(code, context, target) -> None:
    """Call target(function, *arguments) for frames of `code` in this context; None = evaluate as they are."""
    remember(code)
    _c.set_target(code, context, target)


def set_callback(callback, missed=None) -> None:
    """callback(function, code, context) -> target | None | False (= skip_code), asked at the first frame of a
    code."""
    _c.set_callback(callback)
    _c.set_missed(missed)


def set_on_error(function) -> None:
    """function(resume function, arguments, exception) -> the result, or None: asked for one that has not begun when this was
    raised. In Python, no resume function has a target."""
    if hasattr(_c, "set_on_error"):
        _c.set_on_error(function)


def forget_all() -> None:
    """Forget all targets, and what was computed."""
    for reference in list(_known.values()):
        code = reference()
        if code is not None:
            known = _c.record_of(code)
            if "skipped" not in known:
                forget_code(code)
            for key in [key for key in known if type(key) is not str]:
                known.pop(key, None)


# %% [markdown]
# ## Frames that are never captured on their own
#
# Functions of torch, of the standard library and of packages that do not know tensors (a shape solver on top
# of sympy calls thousands) may be *inlined* by capture when user code calls them. But as frames of their own
# they are not worth it: the frame of `nn.Module.__call__`, seen after a graph break, holds nothing of the
# user's; it is evaluated as it is, and the user's `forward` that it calls is the next frame that the hook
# sees.

# %%
def library_folders() -> tuple[str, ...]:
    import torch
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    packages = os.path.dirname(os.path.dirname(os.path.abspath(torch.__file__)))
    names = ("torch", "triton", "numpy", "pytest", "_pytest", "pluggy", "hypothesis", "sympy", "mpmath",
             "networkx", "scipy", "sklearn", "pandas", "matplotlib", "PIL", "tqdm", "jinja2", "fsspec")
    own = [os.path.join(here, entry) for entry in sorted(os.listdir(here)) if entry not in ("bench", "__main__.py")]
    others = [os.path.join(packages, name) + os.sep for name in names]
    return (*others, *own, os.path.abspath(cache_dir()) + os.sep)


_libraries: list = []
_standard = tuple({os.path.abspath(sysconfig.get_paths()[k]) + os.sep for k in ("stdlib", "platstdlib")})


def never_capture(filename: str) -> None:
    """Count this file to the compiler's own: a function in it stands in the place of one of the compiler's.
    Compiled code calls the compiler while the hook is installed; its guards, for one. A guard that was compiled
    would be checked by the guard."""
    _libraries[:] = [(*(_libraries[0] if _libraries else library_folders()), os.path.abspath(filename))]


def is_library_file(filename: str) -> bool:
    """Whether code from this file is never captured as a frame of its own."""
    if filename.startswith(("<frozen", "<minicompile", "<eval_with_key", "<__array_function__")):
        return True
    if not _libraries:
        _libraries.append(library_folders())
    path = os.path.abspath(filename)
    if path.startswith(_libraries[0]):
        return True
    return path.startswith(_standard) and "site-packages" not in path and "dist-packages" not in path
