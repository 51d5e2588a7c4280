# %% [markdown]
# # Operators
#
# `a + b`, `a < b`, `a[i]`, `if a`: one function each. Three cases repeat. With a tensor among the operands
# the operation becomes a node. With constants it is computed on the spot, by Python itself. Containers and
# objects follow Python's protocol: the containers' operations are written out, a class's own `__add__` is
# inlined.

# %%
from __future__ import annotations

import contextlib
import enum
import operator
import types

import torch

from ..errors import Unsupported
from .attributes import special
from .interpreter import Tracer, call, touch, unsupported
from .iterate import unpack, values_of
from .tensors import emit
from .values import (
    Const, DictVal, ExcVal, ListVal, MISSING, NEW, NotConstant, ObjVal, SetVal, SliceVal, SymVal, Table,
    TensorVal, TupleVal, UserError, Value, boolean, class_of, describe, lookup, user_error)
from .wrap import dict_contents, guard_keys, guard_missing, key_of, realize, wrap, wrap_constant

BINARY = {"+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "**": "pow",
          "@": "matmul",
          "&": "and", "|": "or", "^": "xor", "<<": "lshift", ">>": "rshift"}
COMPARE = {"<": "lt", "<=": "le", "==": "eq", "!=": "ne", ">": "gt", ">=": "ge"}
MIRROR = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}
PLAIN = {Const, TensorVal, SymVal}            # kinds that can stand in the graph
# (kind of value, name) -> function(tx, self, *args); see methods.py
METHODS = Table()


def python_operator(name: str):
    """The function of the operator module: `add`, `and_`, `iadd`."""
    return getattr(operator, f"{name}_", None) or getattr(operator, name)


def as_python(tx: Tracer, value: Value):
    """The Python object that a value made of constants stands for; raises NotConstant."""
    kind = type(value)
    if kind is Const:
        return value.value
    if kind is SymVal:
        return int(value.sym)                    # from here on the trace is for this size: a guard says so
    if kind in (TupleVal, ListVal):
        items = [as_python(tx, realize(tx, item)) for item in value.items]
        if kind is ListVal:
            return items if value.cls is list else value.cls(items, value.items.maxlen)
        return value.cls(*items) if hasattr(value.cls, "_fields") else value.cls(items)
    if kind is SetVal:
        return value.cls(as_python(tx, item) for item in value.items.values())
    if kind is DictVal:
        guard_keys(tx, value)
        if value.cls is not dict:
            raise NotConstant
        return {as_python(tx, realize(tx, k)): as_python(tx, realize(tx, v)) for k, v in value.items.values()}
    if kind is SliceVal:
        return slice(*(as_python(tx, v) for v in (value.start, value.stop, value.step)))
    if kind is ObjVal and value.real is not NEW and not value.attrs and isinstance(value.real, FIXED):
        return value.real
    raise NotConstant


FIXED = (type, types.BuiltinFunctionType, types.ModuleType, torch.finfo, torch.iinfo, types.GenericAlias,
         enum.Enum)


@contextlib.contextmanager
def user_errors():
    """What Python raises inside, the traced program raises."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (Unsupported, UserError, NotConstant)):
            raise
        user_error(type(error), *error.args)


def fold(tx: Tracer, function, args, kwargs=None) -> Value:
    """Call a real function on constants now; what it raises, the traced program raises."""
    python_args = [as_python(tx, a) for a in args]
    python_kwargs = {k: as_python(tx, v) for k, v in (kwargs or {}).items()}
    with user_errors():
        result = function(*python_args, **python_kwargs)
    return wrap_constant(tx, result)


# %% [markdown]
# ## Arithmetic
#
# `a + b` on objects is `type(a).__add__(a, b)`, then `type(b).__radd__(b, a)`; `a += b` tries `__iadd__`
# before. A method may be the program's own, or one that `methods.py` defines for a container; the answer
# NotImplemented (None from our own) means that the next candidate is asked.

# %%
SIZE_OPERATORS = ("+", "-", "*", "//", "%")


def binary(tx: Tracer, symbol: str, a: Value, b: Value, inplace: bool = False) -> Value:
    """a <symbol> b, or a <symbol>= b when inplace."""
    name, kinds = BINARY[symbol], {type(a), type(b)}
    if SymVal in kinds and TensorVal not in kinds:
        integers = all(type(v) is SymVal or type(v) is Const and type(v.value) is int for v in (a, b))
        if not integers or symbol not in SIZE_OPERATORS:
            return binary(tx, symbol, specialize(a), specialize(b), inplace)
    if kinds <= PLAIN:
        function = python_operator("i" + name if inplace and type(a) is TensorVal else name)
        if kinds == {Const}:
            return fold(tx, function, [a, b])
        return emit(tx, "call_function", function, [a, b], {})
    candidates = [(a, f"__{name}__", b), (b, f"__r{name}__", a)]
    if inplace:
        candidates.insert(0, (a, f"__i{name}__", b))
    result = ask(tx, candidates)
    if result is not None:
        return result
    try:
        return fold(tx, python_operator(name), [a, b])
    except NotConstant:
        unsupported(tx, f"{describe(a)} {symbol} {describe(b)}")


def specialize(value: Value) -> Value:
    """A symbolic size fixed to its present value, by a guard."""
    return Const(value=int(value.sym)) if type(value) is SymVal else value


def ask(tx, candidates) -> Value | None:
    """The first answer of the methods (owner, name, argument) that is not NotImplemented."""
    for owner, name, argument in candidates:
        function = METHODS.get((type(owner), name))
        result = function(tx, owner, argument) if function is not None else special(tx, owner, name, argument)
        if result is not None and not (type(result) is Const and result.value is NotImplemented):
            return result
    return None


def unary(tx: Tracer, name: str, a: Value) -> Value:
    """name: 'neg', 'pos', 'abs' or 'invert'."""
    if type(a) is TensorVal or type(a) is SymVal:
        return emit(tx, "call_function", getattr(operator, name), [a], {})
    result = special(tx, a, f"__{name}__")
    if result is not None:
        return result
    try:
        return fold(tx, getattr(operator, name), [a])
    except NotConstant:
        unsupported(tx, f"{name} of {describe(a)}")


# %% [markdown]
# ## Truth, identity, comparison

# %%
def truth(tx: Tracer, value: Value) -> bool:
    """bool(value)"""
    kind = type(value)
    if kind is Const:
        return bool(value.value)
    if kind in (TupleVal, ListVal, SetVal):
        return len(value.items) > 0
    if kind is DictVal:
        guard_keys(tx, value)
        return len(value.items) > 0
    if kind is TensorVal:
        unsupported(tx, "a branch on the values of a tensor")
    if kind is SymVal:
        return bool(value.sym)
    if kind is ObjVal and not isinstance(value.real, (type, types.ModuleType)):
        for method in ("__bool__", "__len__"):
            result = special(tx, value, method)
            if result is not None:
                return truth(tx, result)
            if lookup(value.cls, method) is not MISSING:
                try:
                    return bool(as_python(tx, value))
                except NotConstant:
                    unsupported(tx, f"bool() of {describe(value)}")
    return True


def identical(a: Value, b: Value) -> bool:
    """a is b"""
    if a is b:
        return True
    if type(a) is Const and type(b) is Const:
        return a.value is b.value or type(a.value) is type(b.value) and type(a.value) in (int, str, bool) \
            and a.value == b.value
    if type(a) is ObjVal and type(b) is ObjVal:
        return a.real is b.real and a.real is not NEW
    return False


def equal(tx: Tracer, a: Value, b: Value) -> bool:
    """a is b or a == b, which is how containers compare their items."""
    return identical(a, b) or truth(tx, compare(tx, "==", a, b))


def compare(tx: Tracer, symbol: str, a: Value, b: Value) -> Value:
    """a <symbol> b for one of the six comparisons."""
    function, kinds = getattr(operator, COMPARE[symbol]), {type(a), type(b)}
    if kinds <= PLAIN:
        return compare_plain(tx, symbol, function, a, b)
    result = ask(tx, [(a, f"__{COMPARE[symbol]}__", b), (b, f"__{COMPARE[MIRROR[symbol]]}__", a)])
    if result is not None:
        return result
    if kinds in ({TupleVal}, {ListVal}):
        return compare_sequences(tx, symbol, a, b)
    try:
        return fold(tx, function, [a, b])
    except NotConstant:
        pass
    if symbol not in ("==", "!=") or TensorVal in kinds:
        unsupported(tx, f"{describe(a)} {symbol} {describe(b)}")
    if kinds == {DictVal}:
        return boolean(same_dict(tx, a, b) == (symbol == "=="))
    if symbol == "!=" and isinstance(lookup(class_of(a), "__eq__"), types.FunctionType):
        return boolean(not truth(tx, compare(tx, "==", a, b)))
    return boolean(identical(a, b) == (symbol == "=="))


def compare_plain(tx, symbol, function, a, b):
    """Numbers, tensors and sizes. A size is compared with whole numbers only: with a float it is made a
    number."""
    values = [v.value if type(v) is Const else None for v in (a, b)]
    if any(type(v) is float for v in values):
        a, b = specialize(a), specialize(b)
    if type(a) is type(b) is Const:
        return fold(tx, function, [a, b])
    if symbol in ("==", "!=") and any(type(v) is Const and v.value is None for v in (a, b)):
        return boolean(symbol == "!=")
    if TensorVal in (type(a), type(b)):
        return emit(tx, "call_function", function, [a, b], {})
    try:
        return boolean(function(*(v.sym if type(v) is SymVal else v.value for v in (a, b))))
    except TypeError as error:
        user_error(TypeError, str(error))


def compare_sequences(tx, symbol, a, b):
    left, right = unpack(tx, a), unpack(tx, b)
    for x, y in zip(left, right):
        if not equal(tx, x, y):
            return boolean(symbol == "!=") if symbol in ("==", "!=") else compare(tx, symbol, x, y)
    return boolean(getattr(operator, COMPARE[symbol])(len(left), len(right)))


def same_dict(tx, a, b) -> bool:
    guard_keys(tx, a)
    guard_keys(tx, b)
    return a.items.keys() == b.items.keys() and all(
        equal(tx, realize(tx, a.items[k][1]), realize(tx, b.items[k][1])) for k in a.items)


def contains(tx: Tracer, container: Value, item: Value) -> bool:
    """item in container"""
    container = as_dict(tx, container, "__contains__")
    kind = type(container)
    if kind is DictVal:
        key = key_of(tx, item)
        if key in container.items:
            guard_keys(tx, container)
        else:
            guard_missing(tx, container, key)
        return key in container.items
    if kind is SetVal:
        return key_of(tx, item) in container.items
    if kind is Const or kind is ObjVal and isinstance(container.real, type):
        return truth(tx, fold(tx, operator.contains, [container, item]))
    if kind is TensorVal:
        unsupported(tx, "`in` of a tensor")
    result = special(tx, container, "__contains__", item)
    if result is not None:
        return truth(tx, result)
    return any(equal(tx, v, item) for v in values_of(tx, container))


# %% [markdown]
# ## Subscripts

# %%
def index_of(tx, key: Value):
    """A sequence index as an int or slice."""
    if type(key) is TensorVal:
        unsupported(tx, "a list index that is not a Python constant")
    try:
        return as_python(tx, key)
    except NotConstant:
        index = special(tx, key, "__index__") or unsupported(tx, f"{describe(key)} as an index")
        return index.value


def as_dict(tx, container: Value, method: str) -> Value:
    """The dictionary inside an object whose class derives from dict and does not override `method`."""
    if type(container) is ObjVal and issubclass(container.cls, dict) and \
            not isinstance(lookup(container.cls, method), types.FunctionType):
        return dict_contents(tx, container) or container
    return container


def get_item(tx: Tracer, container: Value, key: Value) -> Value:
    """container[key]"""
    container = as_dict(tx, container, "__getitem__")
    kind = type(container)
    if kind is TensorVal:
        return emit(tx, "call_function", operator.getitem, [container, key], {})
    if kind in (TupleVal, ListVal):
        return get_from_sequence(tx, container, index_of(tx, key))
    if kind is DictVal:
        return get_from_dict(tx, container, key)
    result = special(tx, container, "__getitem__", key)
    if result is not None:
        return result
    try:
        return fold(tx, operator.getitem, [container, key])
    except NotConstant:
        unsupported(tx, f"a subscript of {describe(container)}")


def get_from_sequence(tx, container, index):
    if isinstance(index, slice):
        items = [realize(tx, item) for item in container.items[index]]
        if type(container) is ListVal:
            return ListVal(items=items)
        return TupleVal(items=items, cls=torch.Size if container.cls is torch.Size else tuple)
    if type(index) not in (int, bool):
        user_error(TypeError, f"{container.cls.__name__} indices must be integers or slices, "
                              f"not {type(index).__name__}")
    if not -len(container.items) <= index < len(container.items):
        user_error(IndexError, f"{container.cls.__name__} index out of range")
    container.items[index] = item = realize(tx, container.items[index])
    return item


def get_from_dict(tx, container, key):
    k = key_of(tx, key)
    entry = container.items.get(k)
    if entry is None:
        guard_missing(tx, container, k)
        if container.factory is not None:
            value = call(tx, realize(tx, container.factory), [])
            set_item(tx, container, key, value)
            return value
        raise UserError(ExcVal(cls=KeyError, args=[key]))
    entry[1] = value = realize(tx, entry[1])
    return value


def set_item(tx: Tracer, container: Value, key: Value, value: Value):
    """container[key] = value"""
    container = as_dict(tx, container, "__setitem__")
    kind = type(container)
    if kind is TensorVal:
        emit(tx, "call_function", operator.setitem, [container, key, value], {})
    elif kind is DictVal:
        touch(tx, container)
        k = key_of(tx, key)
        container.items[k] = [container.items[k][0] if k in container.items else key, value]
        container.written[k] = None
    elif kind is ListVal:
        index = index_of(tx, key)
        new = unpack(tx, value) if isinstance(index, slice) else value
        touch(tx, container)
        with user_errors():
            container.items[index] = new
    elif special(tx, container, "__setitem__", key, value) is None:
        unsupported(tx, f"assigning to a subscript of {describe(container)}")


def delete_item(tx: Tracer, container: Value, key: Value):
    """del container[key]"""
    container = as_dict(tx, container, "__delitem__")
    if type(container) is DictVal:
        k = key_of(tx, key)
        if k not in container.items:
            guard_missing(tx, container, k)
            raise UserError(ExcVal(cls=KeyError, args=[key]))
        guard_keys(tx, container)
        touch(tx, container)
        del container.items[k]
        container.removed.add(k)
        container.written.pop(k, None)
    elif type(container) is ListVal:
        index = index_of(tx, key)
        touch(tx, container)
        with user_errors():
            del container.items[index]
    elif special(tx, container, "__delitem__", key) is None:
        unsupported(tx, f"deleting a subscript of {describe(container)}")
