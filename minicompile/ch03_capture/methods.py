# %% [markdown]
# # Methods that are written in C
#
# `names.append(x)`, `x.mul(2)`, `"a b".split()`: attribute and call, and at the end of it a function of CPython or PyTorch that
# has no bytecode to inline. Somebody must know what it does to values, and who that is depends on the kind of value that it belongs to:
#
# | value | method | what is done |
# |---|---|---|
# | any | `x.__len__()`, `x.__eq__(y)` | what `len(x)` and `x == y` do (`OPERATORS`) |
# | list, dict, set, ... | `names.append(v)` | the row for this kind and name in `METHODS`, most of them in `library/containers.py` |
# | tensor | `x.mul(2)` | a node (`tensors.py`) |
# | constant | `"a b".split()` | the method itself is called, now (`fold`): it only computes |
#
# All four at work:
#
#     def labelled(x, names):
#         names.append("{}_{}".format(names[0], 2))
#         return x.mul(2).add_(names.__len__())
#
# The list of the program had one item and is not touched; its value in the trace has two when `__len__` is called. Hence the
# guard on the length,
#
#     names is a list
#     names has 1 element
#     names[0] is a str
#
# the statement after the graph that makes the change,
#
#     __t2 = names[0]
#     __t3 = __K[0]('{}_{}', __t2, 2, )
#     names.extend([__t3, ])
#
# and the 2 in the graph:
#
#     x: f32[3] = input
#     mul: f32[3] = x.mul(2)
#     add_: f32[3] = mul.add_(2)
#     return (mul,)
#
# `__K[0]` is `str.format`: nobody in the trace has read the text, so any first name will do, and the text is made at each call
# (`operations.py`).
#
# To teach capture another method, add a row: `@method(ListVal, "name")` above a function of the trace, the value and the
# arguments, all of them values. It need not take every argument that the real method takes. If a call does not fit
# its signature, that is no error of the program, and `call_handler` makes a graph break of it.

# %%
import inspect
import types
from typing import Callable

from .iterate import iterate, length, sequence
from .comparisons import equal_in_c
from .operations import BINARY, fold_unknown
from .protocol import METHODS
from .subscripts import contains, delete_item, get_item, set_item
from .tensors import call_tensor_method
from .tracer import Tracer, unsupported
from .values import AbstractValue, Const, NONE, NotConstant, ObjVal, SetVal, SliceVal, SymVal, TensorVal, TupleVal, boolean, describe

FOLDABLE = (Const, SymVal, TupleVal, SetVal, SliceVal, ObjVal)      # of these, methods of constants are called now
OPERATORS = {"__len__": length, "__iter__": iterate, "__getitem__": get_item, "__setitem__": set_item, "__delitem__": delete_item,
             "__contains__": lambda tx, self, item: boolean(contains(tx, self, item)),
             "__eq__": equal_in_c}
REFUSABLE = {f"__{side}{name}__" for side in ("", "r", "i") for name in BINARY.values()} | {
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}


def call_method(tx: Tracer, value: AbstractValue, name: str, args, kwargs=None) -> AbstractValue:
    """value.name(*args, **kwargs) for a value whose methods are written in C."""
    kwargs = kwargs or {}
    function = OPERATORS.get(name) or METHODS.get((type(value), name))
    if function is None and type(value) is TensorVal:
        return call_tensor_method(tx, value, name, args, kwargs)
    if function is not None:
        made = call_handler(tx, lambda: f"{describe(value)}.{name}", function, [value, *args], kwargs)
        if made is not NONE or name not in REFUSABLE:
            return made
        if type(value) is not Const:                     # NotImplemented or a TypeError, as Python knows
            unsupported(tx, f"{describe(value)}.{name}() of {describe(*args)}")
    return method_of_constant(tx, value, name, args, kwargs)


def method_of_constant(tx: Tracer, value: AbstractValue, name: str, args, kwargs) -> AbstractValue:
    """A method without a row: called now if the value is a constant, or made of constants."""
    reason = f"the method {name} of {describe(value)}"
    if type(value) not in FOLDABLE or name in ("__enter__", "__exit__", "__call__"):
        unsupported(tx, reason)
    if type(value) is Const and value.cls is str and name == "join":
        args = [TupleVal(items=sequence(tx, args[0]))]
    of_class = getattr(value.cls, name, None) if type(value) in (Const, SymVal) else None
    method = of_class if isinstance(of_class, (types.MethodDescriptorType, types.WrapperDescriptorType)) else \
        lambda self, /, *args, **kwargs: getattr(self, name)(*args, **kwargs)
    return fold_unknown(tx, method, [value, *args], kwargs, reason)


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
