# %% [markdown]
# # Operators
#
# `a + b`, `a < b`, `a[i]`, `if a`: one function each. Three cases repeat. With a tensor among the operands
# the operation becomes a node. With constants it is computed on the spot, by Python itself. Containers and
# objects follow Python's protocol: the containers' operations are written out, a class's own `__add__` is
# inlined.

# %%
from __future__ import annotations

import operator
import types

import torch

from .attributes import MISSING, call, class_of, lookup
from .interpreter import Tracer, unsupported
from .iterate import unpack, values_of
from .tensors import emit
from .values import (
    Const, DictVal, ExcVal, ListVal, NEW, NotConstant, ObjVal, SetVal, SliceVal, SymVal, TensorVal,
    TupleVal, UserError, Value, describe, user_error)
from .wrap import dict_contents, guard_keys, guard_missing, key_of, realize, wrap

BINARY = {"+": ("add", operator.add), "-": ("sub", operator.sub), "*": ("mul", operator.mul),
          "/": ("truediv", operator.truediv), "//": ("floordiv", operator.floordiv), "%": ("mod", operator.mod),
          "**": ("pow", operator.pow), "@": ("matmul", operator.matmul), "&": ("and", operator.and_),
          "|": ("or", operator.or_), "^": ("xor", operator.xor), "<<": ("lshift", operator.lshift),
          ">>": ("rshift", operator.rshift)}
INPLACE = {s: getattr(operator, "i" + name) for s, (name, _) in BINARY.items()}
COMPARE = {"<": ("lt", operator.lt), "<=": ("le", operator.le), "==": ("eq", operator.eq), "!=": ("ne", operator.ne),
           ">": ("gt", operator.gt), ">=": ("ge", operator.ge)}
MIRROR = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}
SYMBOLIC = (TensorVal, SymVal)


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
            return items if value.cls is list else value.cls(items, value.maxlen)
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
    if kind is ObjVal and value.real is not NEW and not value.attrs and is_fixed(value.real):
        return value.real
    raise NotConstant


FIXED = (type, types.BuiltinFunctionType, types.ModuleType, torch.finfo, torch.iinfo, types.GenericAlias)


def is_fixed(real) -> bool:
    import enum
    return isinstance(real, (*FIXED, enum.Enum))


def fold(tx: Tracer, function, args, kwargs=None) -> Value:
    """Call a real function on constants now; what it raises, the traced program raises."""
    python_args = [as_python(tx, a) for a in args]
    python_kwargs = {k: as_python(tx, v) for k, v in (kwargs or {}).items()}
    try:
        result = function(*python_args, **python_kwargs)
    except Exception as error:
        raise UserError(ExcVal(cls=type(error), args=[Const(value=a) for a in error.args])) from None
    return wrap_constant(tx, result)


def wrap_constant(tx, result) -> Value:
    """A value for a fresh object made of constants: containers become new, untracked containers."""
    kind = type(result)
    if kind in (tuple, torch.Size) or kind.__base__ is tuple and hasattr(kind, "_fields"):
        return TupleVal(items=[wrap_constant(tx, r) for r in result], cls=kind)
    if kind is list:
        return ListVal(items=[wrap_constant(tx, r) for r in result])
    if kind is dict:
        return DictVal(items={k: [wrap_constant(tx, k), wrap_constant(tx, v)] for k, v in result.items()})
    if kind in (set, frozenset):
        return SetVal(items={r: wrap_constant(tx, r) for r in result}, cls=kind)
    if kind is slice:
        return SliceVal(*(Const(value=v) for v in (result.start, result.stop, result.step)))
    return wrap(tx, result)


# %% [markdown]
# ## Binary operators

# %%
def binary(tx: Tracer, symbol: str, a: Value, b: Value, inplace: bool = False) -> Value:
    """a <symbol> b, or a <symbol>= b when inplace."""
    name, function = BINARY[symbol]
    if type(a) is SymVal and type(b) is not TensorVal or type(b) is SymVal and type(a) is not TensorVal:
        integer = all(type(v) is SymVal or type(v) is Const and type(v.value) is int for v in (a, b))
        if not integer or symbol not in ("+", "-", "*", "//", "%"):
            return binary(tx, symbol, specialize(a), specialize(b), inplace)
    if isinstance(a, SYMBOLIC) or isinstance(b, SYMBOLIC):
        others_plain = all(type(v) in (Const, TensorVal, SymVal) for v in (a, b))
        if others_plain:
            use_inplace = inplace and type(a) is TensorVal
            return emit(tx, "call_function", INPLACE[symbol] if use_inplace else function, [a, b], {})
    if type(a) is Const and type(b) is Const:
        return fold(tx, function, [a, b])
    if inplace and type(a) in (ListVal, DictVal, SetVal):
        if (result := inplace_container(tx, symbol, a, b)) is not None:
            return result
    result = container_operator(tx, symbol, a, b)
    if result is not None:
        return result
    names = [(a, f"__{name}__", b), (b, f"__r{name}__", a)]
    if inplace:
        names.insert(0, (a, f"__i{name}__", b))
    result = dunder(tx, names)
    if result is not None:
        return result
    try:
        return fold(tx, function, [a, b])
    except NotConstant:
        unsupported(tx, f"{describe(a)} {symbol} {describe(b)}")


def specialize(value: Value) -> Value:
    """A symbolic size fixed to its present value, by a guard."""
    return Const(value=int(value.sym)) if type(value) is SymVal else value


def dunder(tx, candidates):
    """Try methods written in Python, in order, until one does not answer NotImplemented."""
    for owner, method, other in candidates:
        found = lookup(class_of(owner), method) if type(owner) is ObjVal else MISSING
        if isinstance(found, types.FunctionType):
            result = call(tx, wrap(tx, found), [owner, other])
            if not (type(result) is Const and result.value is NotImplemented):
                return result
    return None


def container_operator(tx, symbol, a, b):
    ka, kb = type(a), type(b)
    if symbol == "+" and ka is kb and ka in (ListVal, TupleVal) and (ka is TupleVal or a.cls is b.cls is list):
        items = unpack(tx, a) + unpack(tx, b)
        if ka is ListVal:
            return ListVal(items=items)
        return TupleVal(items=items, cls=torch.Size if a.cls is b.cls is torch.Size else tuple)
    if symbol == "*" and SymVal in (ka, kb):
        return binary(tx, symbol, specialize(a), specialize(b))
    if symbol == "*" and {ka, kb} & {ListVal, TupleVal} and {ka, kb} & {Const}:
        sequence, count = (b, a) if ka is Const else (a, b)
        if type(count.value) in (int, bool):
            items = unpack(tx, sequence) * count.value
            return ListVal(items=items) if type(sequence) is ListVal else TupleVal(items=items)
    if symbol == "|" and ka is kb is DictVal:
        guard_keys(tx, a), guard_keys(tx, b)
        merged = {k: list(v) for k, v in a.items.items()}
        for k, v in b.items.items():
            merged[k] = [merged[k][0] if k in merged else v[0], v[1]]
        return DictVal(items=merged, cls=a.cls)
    if ka is kb is SetVal and symbol in "|&-^":
        keys = BINARY[symbol][1](set(a.items), set(b.items))
        both = {**a.items, **b.items}
        return SetVal(items={k: v for k, v in both.items() if k in keys}, cls=a.cls if a.cls is frozenset else set)
    return None


def inplace_container(tx, symbol, a, b):
    from .methods import touch
    if type(a) is ListVal and symbol == "+":
        items = unpack(tx, b)
        touch(tx, a)
        a.items.extend(items)
        return a
    if type(a) is ListVal and symbol == "*" and type(b) is Const:
        touch(tx, a)
        a.items[:] = a.items * b.value
        return a
    if type(a) is DictVal and symbol == "|":
        from .methods import call_method
        call_method(tx, a, "update", [b], {})
        return a
    if type(a) is SetVal and a.cls is set and type(b) is SetVal:
        result = container_operator(tx, symbol, a, b)
        touch(tx, a)
        a.items = result.items
        return a
    return None


def unary(tx: Tracer, name: str, a: Value) -> Value:
    """name: 'neg', 'pos', 'invert' or 'not'."""
    if name == "not":
        return Const(value=not truth(tx, a))
    function = getattr(operator, name)
    if isinstance(a, SYMBOLIC):
        return emit(tx, "call_function", function, [a], {})
    if (result := dunder_unary(tx, a, f"__{name}__")) is not None:
        return result
    try:
        return fold(tx, function, [a])
    except NotConstant:
        unsupported(tx, f"{name} of {describe(a)}")


def dunder_unary(tx, a, method):
    found = lookup(class_of(a), method) if type(a) is ObjVal else MISSING
    return call(tx, wrap(tx, found), [a]) if isinstance(found, types.FunctionType) else None


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
            found = lookup(value.cls, method)
            if isinstance(found, types.FunctionType):
                return truth(tx, call(tx, wrap(tx, found), [value]))
            if found is not MISSING:
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


def compare(tx: Tracer, symbol: str, a: Value, b: Value) -> Value:
    name, function = COMPARE[symbol]
    if isinstance(a, SYMBOLIC) or isinstance(b, SYMBOLIC):
        if all(type(v) in (Const, TensorVal, SymVal) for v in (a, b)):
            if any(type(v) is Const and type(v.value) is float for v in (a, b)):
                a, b = specialize(a), specialize(b)
                if type(a) is type(b) is Const:
                    return fold(tx, function, [a, b])
            if symbol in ("==", "!=") and any(type(v) is Const and v.value is None for v in (a, b)):
                return Const(value=symbol == "!=")
            if TensorVal not in (type(a), type(b)):
                return symbolic_compare(tx, function, a, b)
            return emit(tx, "call_function", function, [a, b], {})
    if type(a) is Const and type(b) is Const:
        return fold(tx, function, [a, b])
    result = dunder(tx, [(a, f"__{name}__", b), (b, f"__{COMPARE[MIRROR[symbol]][0]}__", a)])
    if result is not None:
        return result
    if type(a) is type(b) and type(a) in (TupleVal, ListVal):
        return compare_sequences(tx, symbol, a, b)
    try:
        return fold(tx, function, [a, b])
    except NotConstant:
        pass
    if type(a) is type(b) is DictVal and symbol in ("==", "!="):
        guard_keys(tx, a), guard_keys(tx, b)
        equal = a.items.keys() == b.items.keys() and all(
            truth(tx, compare(tx, "==", realize(tx, a.items[k][1]), realize(tx, b.items[k][1]))) for k in a.items)
        return Const(value=equal == (symbol == "=="))
    if symbol == "!=" and type(a) is ObjVal and isinstance(lookup(a.cls, "__eq__"), types.FunctionType):
        return Const(value=not truth(tx, compare(tx, "==", a, b)))
    if symbol in ("==", "!=") and TensorVal not in (type(a), type(b)):
        return Const(value=identical(a, b) == (symbol == "=="))
    unsupported(tx, f"{describe(a)} {symbol} {describe(b)}")


def symbolic_compare(tx, function, a, b):
    sides = [v.sym if type(v) is SymVal else v.value for v in (a, b)]
    try:
        return Const(value=bool(function(*sides)))
    except TypeError as error:
        user_error(TypeError, str(error))


def compare_sequences(tx, symbol, a, b):
    left, right = unpack(tx, a), unpack(tx, b)
    for x, y in zip(left, right):
        if identical(x, y):
            continue
        if not truth(tx, compare(tx, "==", x, y)):
            if symbol in ("==", "!="):
                return Const(value=symbol == "!=")
            return compare(tx, symbol, x, y)
    return Const(value=COMPARE[symbol][1](len(left), len(right)))


def contains(tx: Tracer, container: Value, item: Value) -> bool:
    """item in container"""
    container = as_dict(tx, container, "__contains__")
    kind = type(container)
    if kind is DictVal:
        key = key_of(tx, item)
        if key in container.items:
            if container.source is not None and not container.keys_guarded and container.real is not None:
                guard_keys(tx, container)
            return True
        guard_missing(tx, container, key)
        return False
    if kind is SetVal:
        return key_of(tx, item) in container.items
    if kind is Const:
        return truth(tx, fold(tx, operator.contains, [container, item]))
    found = lookup(class_of(container), "__contains__")
    if kind is ObjVal and isinstance(found, types.FunctionType):
        return truth(tx, call(tx, wrap(tx, found), [container, item]))
    if kind is TensorVal:
        unsupported(tx, "`in` of a tensor")
    if kind is ObjVal and isinstance(container.real, type):
        return truth(tx, fold(tx, operator.contains, [container, item]))
    return any(identical(v, item) or truth(tx, compare(tx, "==", v, item)) for v in values_of(tx, container))


# %% [markdown]
# ## Subscripts

# %%
def index_of(tx, key: Value):
    """A sequence index as an int or slice."""
    if type(key) is TensorVal:
        unsupported(tx, "a list index that is not a Python constant")
    try:
        index = as_python(tx, key)
    except NotConstant:
        found = dunder_unary(tx, key, "__index__")
        if found is None:
            unsupported(tx, f"{describe(key)} as an index")
        index = found.value
    return index


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
    found = lookup(container.cls, "__getitem__") if kind is ObjVal else MISSING
    if isinstance(found, types.FunctionType):
        return call(tx, wrap(tx, found), [container, key])
    if kind is ObjVal and isinstance(container.real, type):
        if isinstance(lookup(type(container.real), "__getitem__"), types.FunctionType) or \
                isinstance(lookup(container.real, "__class_getitem__"), (classmethod, types.ClassMethodDescriptorType)):
            return fold(tx, operator.getitem, [container, key])
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
        user_error(TypeError, f"{container.cls.__name__} indices must be integers or slices, not {type(index).__name__}")
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
        from .methods import touch
        touch(tx, container)
        k = key_of(tx, key)
        container.items[k] = [container.items[k][0] if k in container.items else key, value]
        container.written[k] = None
    elif kind is ListVal:
        from .methods import touch
        index = index_of(tx, key)
        touch(tx, container)
        if isinstance(index, slice):
            container.items[index] = unpack(tx, value)
        elif not -len(container.items) <= index < len(container.items):
            user_error(IndexError, "list assignment index out of range")
        else:
            container.items[index] = value
    else:
        found = lookup(class_of(container), "__setitem__")
        if kind is not ObjVal or not isinstance(found, types.FunctionType):
            unsupported(tx, f"assigning to a subscript of {describe(container)}")
        call(tx, wrap(tx, found), [container, key, value])


def delete_item(tx: Tracer, container: Value, key: Value):
    """del container[key]"""
    container = as_dict(tx, container, "__delitem__")
    from .methods import touch
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
        try:
            del container.items[index]
        except IndexError:
            user_error(IndexError, "list assignment index out of range")
    else:
        found = lookup(class_of(container), "__delitem__")
        if type(container) is not ObjVal or not isinstance(found, types.FunctionType):
            unsupported(tx, f"deleting a subscript of {describe(container)}")
        call(tx, wrap(tx, found), [container, key])
