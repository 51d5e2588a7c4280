"""Marks that a user puts on functions and tensors, and that capture reads. Every chapter may import this."""
import functools

DISABLED = "_minicompile_disabled"      # on a function: never capture it; calling it breaks the graph
ORIGINAL = "_minicompile_original"      # on what `compile` returned: the function it was given
DYNAMIC = "_minicompile_dynamic_dims"   # on a tensor: dimensions to treat as symbols from the first call


def is_compiling() -> bool:
    """False when Python runs it; capture knows this function and takes it for True."""
    return False


def is_disabled(function) -> bool:
    return getattr(function, DISABLED, False) is True


def original(function):
    """The function inside a compiled one, or the function itself."""
    return getattr(function, ORIGINAL, function)


def mark_dynamic(tensor, dim) -> None:
    """Treat dimension `dim` (an int or several) of this tensor as a symbol: other sizes do not recompile."""
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    for d in dims:
        if not -tensor.dim() <= d < tensor.dim():
            raise IndexError(f"mark_dynamic: dimension {d} of a tensor with {tensor.dim()} dimensions")
    known = getattr(tensor, DYNAMIC, frozenset())
    setattr(tensor, DYNAMIC, known | {d % tensor.dim() for d in dims})


def mark_disabled(function, run_disabled):
    """A wrapper that calls `function` through `run_disabled` and carries the mark."""
    @functools.wraps(function)
    def disabled(*args, **kwargs):
        return run_disabled(function, *args, **kwargs)
    setattr(disabled, DISABLED, True)
    return disabled
