# %% [markdown]
# # Marks
#
# Some of what the compiler has to know of a function or a tensor only the user can say: do not capture this one, that dimension will
# vary. Other things it has to remember itself: this function is what `compile` returned for that one. All of these are *marks*,
# attributes of the object, which capture reads. They stand below the chapters, so that every chapter may import them.

# %%
import contextlib
import functools
import types

import torch

from .errors import MinicompileError

DISABLED = "_minicompile_disabled"      # on a function: never capture it; calling it breaks the graph
ORIGINAL = "_minicompile_original"      # on what `compile` returned: the function it was given
DYNAMIC = "_minicompile_dynamic_dims"   # on a tensor: dimension to treat as a symbol -> (least, largest or None)
CONSTANT = "_dynamo_marked_constant"    # by torch.compiler.assume_constant_result: call it while tracing


def is_compiling() -> bool:
    """False when Python runs it; capture knows this function and takes it for True."""
    return False


# %% [markdown]
# ## Frames that nobody counts
#
# `warnings.warn("...", stacklevel=2)` points at the caller of the function that warns. A compiled function has a wrapper around
# it, whose frame would be that caller. Python itself has the same problem with `import`, and passes over frames whose file name
# contains two certain words. So `passed_over` gives the code of our wrappers such a file name.

# %%
@functools.cache
def _as_passed_over(code):
    return code.replace(co_filename=PASSED_OVER.format(code.co_qualname))


def passed_over(function):
    """`function`, whose frames neither `warnings.warn(stacklevel=...)` nor `logging` counts: the caller of a compiled function is
    who called it. Both pass over the frames of the import system, which they know by these two words in the name of a file."""
    function.__code__ = _as_passed_over(function.__code__)
    return function


PASSED_OVER = "<minicompile {}, like importlib._bootstrap>"


# %% [markdown]
# ## Marks on functions
#
# A mark on a function could be a plain attribute, but for decorators. `functools.wraps` copies all attributes of the inner function to
# the wrapper. Take a compiled function with a decorator around it that prints: the wrapper would carry the mark "this is the compiled
# form of f", capture would go to `f` directly, and nothing would be printed. So a mark is kept together with the code object of the
# function that it was put on (`put_mark`), and `own_mark` returns it only if that is the code of the function that is asked.

# %%
def is_disabled(function) -> bool:
    return own_mark(function, DISABLED) is not None


def original(function):
    """The function inside a compiled one, or the function itself."""
    if isinstance(function, types.MethodType):
        inner = original(function.__func__)
        return function if inner is function.__func__ else types.MethodType(inner, function.__self__)
    found = own_mark(function, ORIGINAL)
    return function if found is None else found


def uncompiled(function):
    """The function or module inside of what `compile` returned, or the object itself."""
    function = original(function)
    return getattr(function, "_orig_mod", function)


def compiled_by_torch(function):
    """The function inside of what torch.compile returned for one, or None."""
    module = function.__globals__.get("__name__")
    inner = getattr(function, "_torchdynamo_orig_callable", None) if module == "torch._dynamo.eval_frame" else None
    return inner if getattr(function, "_torchdynamo_inline", None) is inner else None


def own_mark(function, name):
    """A mark that was put on this very function; None if there is none. `functools.wraps` copies attributes,
    so a decorator around a compiled function carries its marks: they say which code they belong to."""
    code, value = getattr(function, name, (None, None))
    return value if code is not None and code is getattr(function, "__code__", None) else None


def look_like(wrapper, function):
    """`wrapper` with the name and the attributes of `function`, as far as that has them and they can be read."""
    with contextlib.suppress(AttributeError):
        functools.update_wrapper(wrapper, function)
    return wrapper


def put_mark(function, name, value) -> None:
    setattr(function, name, (function.__code__, value))


# %% [markdown]
# ## What users mark

# %%
IN_GRAPH: dict = {}                     # id -> function whose calls are single operations of a graph


def allow_in_graph(function):
    """Calls of this function become one operation of the graph; capture does not look inside. It must take
    and return tensors, numbers, and lists or tuples of them, depend on nothing else, and have no side
    effects. Also a decorator; takes lists of functions, too."""
    if isinstance(function, (list, tuple)):
        return [allow_in_graph(f) for f in function]
    if not callable(function) or isinstance(function, type):
        raise MinicompileError(f"allow_in_graph needs a function, not {function!r}.")
    IN_GRAPH[id(function)] = function
    return function


def mark_dynamic(tensor, dim, *, min=None, max=None) -> None:
    """Treat dimension `dim` (an int or several) of this tensor as a symbol: other sizes, from `min` to `max` if
    these are given, do not recompile. If the program fixes the size all the same, that is a MarkError, which
    says where; if the compiler cannot vary it, a warning, and under fullgraph=True a MarkError."""
    if not isinstance(tensor, torch.Tensor):
        raise MinicompileError(f"mark_dynamic needs a tensor, not {tensor!r}.")
    dims = dim if isinstance(dim, (list, tuple)) else [dim]
    if not all(type(n) is int for n in (*dims, *(b for b in (min, max) if b is not None))):
        raise MinicompileError("mark_dynamic needs integers for the dimension, min and max, "
                               f"not {dim!r}, {min!r} and {max!r}.")
    for d in dims:
        if not -tensor.dim() <= d < tensor.dim():
            raise IndexError(f"mark_dynamic: dimension {d} of a tensor with {tensor.dim()} dimensions")
        size = tensor.shape[d]
        if (min is not None and size < min) or (max is not None and size > max):
            raise MinicompileError(f"mark_dynamic: dimension {d} has size {size}, which is not in the range from "
                                   f"{min} to {max}.")
    bounds = (2 if min is None else min, max)
    setattr(tensor, DYNAMIC, {**getattr(tensor, DYNAMIC, {}), **{d % tensor.dim(): bounds for d in dims}})


def mark_disabled(function, run_disabled, reason):
    """A wrapper that calls `function` through `run_disabled` and carries the mark, with a reason."""
    @passed_over
    def disabled(*args, **kwargs):
        return run_disabled(function, *args, **kwargs)
    look_like(disabled, function)
    put_mark(disabled, DISABLED, reason or "")
    return disabled
