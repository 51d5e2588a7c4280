# %% [markdown]
# # Methods that are written in C
#
# There is no bytecode to inline. The methods of containers are in a table, one by one (`library/containers.py`). Whoever calls
# `x.__len__()` means `len(x)` (`OPERATORS`). Methods of constants (`"{}_{}".format(...)`, `name.split(".")`) need nothing at
# all: they are called, now.
#
# `call_method` asks these tables in this order. A handler need not know every argument that the real method takes. If a call does not fit
# its signature, that is no error of the program, and `call_handler` makes a graph break of it.

# %%
import inspect
import types
from typing import Callable

from .iterate import iterate, length, unpack
from .comparisons import compare
from .operations import fold
from .protocol import METHODS
from .subscripts import contains, delete_item, get_item, set_item
from .tensors import call_tensor_method
from .tracer import Tracer, unsupported
from .values import AbstractValue, Const, NONE, NotConstant, ObjVal, SetVal, SliceVal, SymVal, TensorVal, TupleVal, boolean, describe

FOLDABLE = (Const, SymVal, TupleVal, SetVal, SliceVal, ObjVal)      # of these, methods of constants are called now
OPERATORS = {"__len__": length, "__iter__": iterate, "__getitem__": get_item, "__setitem__": set_item, "__delitem__": delete_item,
             "__contains__": lambda tx, self, item: boolean(contains(tx, self, item)),
             "__eq__": lambda tx, self, other: compare(tx, "==", self, other)}


def call_method(tx: Tracer, value: AbstractValue, name: str, args, kwargs=None) -> AbstractValue:
    """value.name(*args, **kwargs) for a value whose methods are written in C."""
    kwargs = kwargs or {}
    function = OPERATORS.get(name) or METHODS.get((type(value), name))
    if function is None and type(value) is TensorVal:
        return call_tensor_method(tx, value, name, args, kwargs)
    if function is not None:
        return call_handler(tx, lambda: f"{describe(value)}.{name}", function, [value, *args], kwargs)
    reason = f"the method {name} of {describe(value)}"
    if type(value) not in FOLDABLE or name in ("__enter__", "__exit__", "__call__"):
        unsupported(tx, reason)
    if type(value) is Const and value.cls is str and name == "join":
        args = [TupleVal(items=unpack(tx, args[0]))]
    of_class = getattr(value.cls, name, None) if type(value) in (Const, SymVal) else None
    method = of_class if isinstance(of_class, (types.MethodDescriptorType, types.WrapperDescriptorType)) else \
        lambda self, /, *args, **kwargs: getattr(self, name)(*args, **kwargs)
    return fold(tx, method, [value, *args], kwargs, reason)


def call_handler(tx, name: Callable[[], str], handler, args, kwargs):
    """handler(tx, *args, **kwargs). A handler need not take every argument that the real function takes: its signature
    says which. Any other TypeError is ours."""
    try:
        return handler(tx, *args, **kwargs) or NONE
    except TypeError:
        try:
            inspect.signature(handler).bind(tx, *args, **kwargs)
        except TypeError as error:
            unsupported(tx, f"this call of {name()}: {error}")
        raise
    except NotConstant:
        unsupported(tx, f"{name()} of something that is no constant")
