# %% [markdown]
# # The table of decompositions
#
# A decomposition is a small function from tensors to tensors, registered for one or more ATen overloads and
# written in ordinary torch calls:
#
#     @decomposition("softplus_backward", float32=True)
#     def softplus_backward(grad, x, beta, threshold):
#         z = torch.exp(x * beta)
#         return torch.where(x * beta > threshold, grad, grad * z / (z + 1))
#
# Where it is a single expression, it is a row of a table, beside its like:
#
#     formulas({"silu": lambda x: x * torch.sigmoid(x)}, float32=True)
#
# It may call operators that have decompositions themselves; whoever runs the table applies it again to
# those calls until only primitives are left. The function never looks at data, so it runs as well on real
# tensors (tests do this: the table is its own oracle) as on fake ones (the compiler does that).
#
# A function that meets a case it does not cover returns `NotImplemented`, and the operator stays as it is.

# %%
import functools
import math
from typing import Callable

import torch
from torch import get_default_dtype
from torch.utils._pytree import tree_map

from ..ch01_graphs.corrections import outside
from ..ch01_graphs.operators import leaves
from ..ch01_graphs.rules.operators import overload_named

aten = torch.ops.aten
TABLE: dict[torch._ops.OpOverload, Callable] = {}
ABSENT: set[str] = set()            # names of overloads that this version of torch lacks
HALF = (torch.float16, torch.bfloat16)


def overload(name: str):
    """The ATen overload called `name` ("add.Tensor", "relu"), or None where torch has no such overload."""
    if (op := overload_named(name)) is None:
        ABSENT.add(name)
    return op


def decomposition(*names: str, complex: bool = False, float32: bool = False):
    """Register a function for ATen overloads. Complex tensors are refused unless `complex`. `float32`: the
    function runs under `in_float32`, see below."""

    def register(fn):
        fn = in_float32(fn) if float32 else fn

        @functools.wraps(fn)
        def real_only(*args, **kwargs):
            if any(t.is_complex() for t in leaves(args, kwargs) if isinstance(t, torch.Tensor)):
                return NotImplemented
            return fn(*args, **kwargs)

        TABLE.update((op, fn if complex else real_only) for op in map(overload, names) if op is not None)
        return fn

    return register


def formulas(rules: dict[str, Callable], **options) -> None:
    """Register rules that are one expression each: {names of overloads: function}."""
    for names, fn in rules.items():
        decomposition(*names.split(), **options)(fn)


# %% [markdown]
# ## Rounding once
#
# Eager's kernel for GELU in bfloat16 reads bfloat16, computes in float32, and rounds once at its end.
# Written as six bfloat16 operators the same formula would round six times. `in_float32` states the eager
# behaviour: half operands are widened, the body runs in float32, results are rounded back. In a fused
# kernel the casts are free. (`torch.compile` states it the same way, and rounds nowhere in between unless
# `emulate_precision_casts` asks for it.)
#
# Rounded back to what? To the dtype that eager's result has, and where operands differ, that is a question of type
# *promotion*: `bfloat16 + 2.5` stays bfloat16, `bfloat16 + int64` too, and `bfloat16 + float32` is float32. `promoted`
# answers it.

# %% tags=["exercise:promoted"]
def promoted(*operands) -> torch.dtype:
    """The dtype that eager's type promotion gives a pointwise operator with these tensor or number operands.

    Tensors with dims outrank 0-d tensors, which outrank numbers: a lower rank only counts when its kind
    (bool, integer, float, complex) is higher.
    """
    ranks: dict[int, torch.dtype] = {}
    for x in operands:
        if isinstance(x, torch.Tensor):
            rank, dtype = (0 if x.dim() else 1), x.dtype
        else:
            rank, dtype = 2, number_dtype(x)
        ranks[rank] = _promote(ranks[rank], dtype) if rank in ranks else dtype
    order = [ranks[r] for r in sorted(ranks)]
    dtype = order[0]
    for other in order[1:]:
        if _kind(other) > _kind(dtype):
            dtype = other
    return dtype


# %% [markdown]
# `_kind` puts the dtypes into the four kinds that promotion compares, and `number_dtype` says which dtype a Python
# number stands for. `in_float32` is what `float32=True` means: it does nothing unless an operand is half precision;
# then it widens all of them, runs the rule, and rounds the results to the dtype that eager's promotion gives.

# %%
@functools.cache
def _promote(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    return torch.promote_types(a, b)


def number_dtype(x) -> torch.dtype:
    """The dtype that a Python number stands for."""
    if isinstance(x, (bool, torch.SymBool)):
        return torch.bool
    return torch.int64 if isinstance(x, (int, torch.SymInt)) else get_default_dtype()


def _kind(dtype: torch.dtype) -> int:
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 0 if dtype is torch.bool else 1


def in_float32(fn):
    """Run `fn` with half tensors widened to float32; float32 results are rounded back to the promoted
    dtype."""

    @functools.wraps(fn)
    def widened(*args, **kwargs):
        tensors = [t for t in leaves(args, kwargs) if isinstance(t, torch.Tensor)]
        if not any(t.dtype in HALF for t in tensors):
            return fn(*args, **kwargs)
        dtype = promoted(*(t for t in tensors if t.is_floating_point()))
        out = fn(*tree_map(widen, args), **tree_map(widen, kwargs))
        if out is NotImplemented:
            return out

        def narrow(t):
            return t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t

        return tree_map(narrow, out)

    return widened


def widen(x):
    """float32 for a half tensor, anything else as it is."""
    return x.float() if isinstance(x, torch.Tensor) and x.dtype in HALF else x


def real(x):
    """Integers and bools become the default float dtype, as in eager's `sin(integers)`."""
    return x if x.is_floating_point() or x.is_complex() else x.to(get_default_dtype())


# %% [markdown]
# ## Small helpers
#
# What many rules need: a constant and a range of numbers as tensors, and the dims of a reduction in one spelling. A constant is of the
# dtype of the tensor beside it, also where it does not fit.

# %%
def constant(value, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A 0-d tensor on the device of `like`. The loop stage inlines it. A number that does not fit is cast as a tensor would be: 1e300 to an
    infinity, 300 to a byte."""
    dtype = dtype or like.dtype
    if type(value) in (int, float) and not -128 <= value <= 127 and math.isfinite(value):
        with outside():
            whole = type(value) is int and -2**63 <= value < 2**63
            value = torch.tensor(value, dtype=torch.int64 if whole else torch.float64).to(dtype).item()
    return aten.full.default([], value, dtype=dtype, device=like.device)


def iota(size, like: torch.Tensor, dim: int = 0, ndim: int = 1) -> torch.Tensor:
    """0, 1 .. size-1 as int64, shaped to broadcast along `dim` of `ndim` dims."""
    dim = dim % ndim
    steps = aten.arange.start_step(0, size, 1, dtype=torch.int64, device=like.device)
    return steps.view([size if d == dim else 1 for d in range(ndim)]) if ndim > 1 else steps


def dims_of(dim, ndim: int) -> list[int]:
    """Reduction dims as sorted non-negative integers; None and [] mean all of them."""
    if dim is None or (isinstance(dim, (list, tuple)) and len(dim) == 0):
        return list(range(ndim))
    dim = [dim] if isinstance(dim, int) else dim
    return sorted({d % ndim if ndim else 0 for d in dim}) if ndim else []


def reduced_size(x: torch.Tensor, dims: list[int]):
    """How many elements a reduction over `dims` folds into one."""
    n = 1
    for d in dims:
        n = n * x.shape[d]
    return n
