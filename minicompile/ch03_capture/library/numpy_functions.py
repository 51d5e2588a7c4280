# %% [markdown]
# # NumPy
#
# A call of NumPy is made at compile time if its arguments are constants and it gives a number without a warning. Of numbers that vary it is
# made by the entry (`computed`), but for what is arithmetic: a square root, which is rounded correctly by NumPy as by Python, and the
# product of sizes, which a view has to know. Of a tensor NumPy asks what the tensor knows of its shape. Any other call breaks the graph.

# %%
import functools

import numpy

from ...ch01_graphs.floats import numpy_warnings
from ..builders import as_python
from ..keys import entries
from ..operations import binary, emit_float, scalar_of
from ..tensors import tensor_attribute
from ..tracer import unsupported
from ..values import AbstractValue, ListVal, SymVal, TensorVal, TupleVal, const
from ..varying import computed, varies_in
from ..wrap import realize


def call_numpy(tx, function, args, kwargs) -> AbstractValue:
    """Only numbers are kept, as an array could be changed later."""
    known = arithmetic(tx, function, *args) if len(args) == 1 and not kwargs else None
    if known is None:
        known = computed(tx, function, args, kwargs)
    if known is not None:
        return known
    try:
        python = [as_python(tx, a) for a in args], {k: as_python(tx, v) for k, v in kwargs.items()}
        with numpy_warnings("raise"):
            result = function(*python[0], **python[1])
    except Exception:                            # raise it, warn, or call it, at run time
        result = None
    if not isinstance(result, (numpy.generic, int, float, numpy.dtype)):
        unsupported(tx, f"a call of NumPy's {getattr(function, '__name__', function)}")
    return const(result)


def arithmetic(tx, function, value) -> AbstractValue | None:
    """function(value), where it is an expression of numbers that vary, or a question for the shape of a tensor."""
    if type(value) is TensorVal and function in (numpy.shape, numpy.ndim):
        return tensor_attribute(tx, value, function.__name__)
    if function is numpy.sqrt and type(value) is SymVal and value.cls in (float, numpy.float64) and value.sym > 0:
        return scalar_of(emit_float(tx, "sqrt", [value]), numpy.float64)
    if function is numpy.prod and type(value) in (TupleVal, ListVal) and varies_in(value):
        numbers = [realize(tx, v) for v in entries(tx, value)]
        if {n.cls for n in numbers} <= {int, numpy.int64}:
            product = functools.reduce(lambda a, b: binary(tx, "*", a, b), [scalar_of(n, None) for n in numbers])
            return scalar_of(product, numpy.int64) if type(product) is SymVal and abs(product.sym) < 2**63 else None
    return None
