# %% [markdown]
# # NumPy
#
# A call of NumPy is made at compile time if its arguments are constants and it gives a number. Any other call breaks the graph.

# %%
import numpy

from ..builders import as_python
from ..operations import emit_float, scalar_of
from ..tracer import unsupported
from ..values import AbstractValue, SymVal, const


def call_numpy(tx, function, args, kwargs) -> AbstractValue:
    """Only numbers are kept, as an array could be changed later. A square root is rounded correctly, by NumPy as by Python."""
    if function is numpy.sqrt and [type(a) for a in (*args, *kwargs.values())] == [SymVal] and args[0].cls in (float, numpy.float64) and \
            args[0].sym > 0:
        return scalar_of(emit_float(tx, "sqrt", args), numpy.float64)
    try:
        python = [as_python(tx, a) for a in args], {k: as_python(tx, v) for k, v in kwargs.items()}
        result = function(*python[0], **python[1])
    except Exception:                            # raise it, or call it, at run time
        result = None
    if not isinstance(result, (numpy.generic, int, float, numpy.dtype)):
        unsupported(tx, f"a call of NumPy's {getattr(function, '__name__', function)}")
    return const(result)
