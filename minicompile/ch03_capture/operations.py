# %% [markdown]
# # Operators
#
# `a + b`, `a < b`, `a is b`, `if a`: one function each. Three cases repeat. With a tensor among the operands
# the operation becomes a node. With constants it is computed on the spot, by Python itself. Containers and
# objects follow Python's protocol: the containers' operations are written out, a class's own `__add__` is
# inlined.

# %%
import collections
import contextlib
import decimal
import enum
import math
import operator
import types
import weakref
from dataclasses import dataclass

import numpy
import torch

from ..ch01_graphs.floats import OPERATIONS
from ..ch01_graphs.shapes import float_function
from .exceptions import INTERPRETING, user_error, user_errors
from .iterate import length, unpack
from .lookup import MISSING, captures, lookup, python_method
from .protocol import METHODS, as_dict, special
from .tensors import emit, to_arg, wrap_result
from .tracer import Tracer, answer, call, location, unsupported
from .values import (
    AbstractValue, BIRTHS, Const, DictVal, ListVal, MethodVal, NONE, NUMBERS, NUMPY_SCALARS, NotConstant, ObjVal,
    SetVal, SymVal, TensorVal, TupleVal, ViewVal, as_number, boolean, const, describe, is_identity, is_unseen, unseen)
from .varying import computed, varies_in
from .wrap import as_python, dict_contents, entries, realize, wrap, wrap_constant

BINARY = {"+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "**": "pow",
          "@": "matmul",
          "&": "and", "|": "or", "^": "xor", "<<": "lshift", ">>": "rshift"}
COMPARE = {"<": "lt", "<=": "le", "==": "eq", "!=": "ne", ">": "gt", ">=": "ge"}
MIRROR = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}
PLAIN = {Const, TensorVal, SymVal}            # kinds that can stand in the graph


def python_operator(name: str):
    """The function of the operator module: `add`, `and_`, `iadd`."""
    return getattr(operator, f"{name}_", None) or getattr(operator, name)


def fold(tx: Tracer, function, args, kwargs=None, reason: str | None = None) -> AbstractValue:
    """Call a real function, which only computes, on constants now; what it raises, the traced program raises. If some
    argument is no constant, the graph breaks for this reason; without one, NotConstant is raised."""
    if (made := computed(tx, function, args, kwargs or {})) is not None:
        return made
    try:
        python_args = [as_python(tx, a) for a in args]
        python_kwargs = {k: as_python(tx, v) for k, v in (kwargs or {}).items()}
    except NotConstant:
        if reason is None:
            raise
        unsupported(tx, reason)
    with user_errors():
        result = function(*python_args, **python_kwargs)
    if decimal.Decimal in map(type, python_args):
        answer(tx, decimal_context)
    return wrap_constant(tx, result)


def decimal_context() -> tuple:
    """What the arithmetic of decimal numbers depends on."""
    now = decimal.getcontext()
    return now.prec, now.rounding, now.Emin, now.Emax, now.capitals, now.clamp, *now.traps.values()


# %% [markdown]
# `f"step {i}"`, `name + ".pt"`, `round(loss, 4)`: a text for a log, in which a number stands that is another one in each call. Mostly
# nobody in the trace reads it. So it waits (`unseen`), and the generated code makes it. That is for functions that fail for no value of
# these classes, or for every value; so they are tried on a `sample`.

# %%
SAMPLES = {str: "a", **{kind: kind(7) for kind in NUMBERS}}


def sample(value: AbstractValue):
    """A Python object like the one that the value stands for; raises KeyError where there is none."""
    return SAMPLES[value.cls] if type(value) is SymVal or is_unseen(value) else value.value


def later(tx: Tracer, kind: type, function, args, named=None) -> AbstractValue | None:
    """function(*args, **named), of class `kind`, for the generated code to compute; None if all is known, or it may fail."""
    values, named = [*args, *(named or {}).values()], named or {}
    if not any(type(v) is SymVal or is_unseen(v) for v in values) or not all(type(v) in (Const, SymVal) for v in values):
        return None
    try:
        if type(function(*map(sample, args), **{k: sample(v) for k, v in named.items()})) is not kind:
            return None
    except Exception:
        return None
    return unseen(kind, lambda trace=weakref.ref(tx): fold(trace(), function, args, named).value, recipe=(function, args, named))


def joined(*parts) -> str:
    return "".join(parts)


def printed(text: str, *values) -> str:
    return text % values


# %% [markdown]
# ## Arithmetic
#
# `a + b` on objects is `type(a).__add__(a, b)`, then `type(b).__radd__(b, a)`; `a += b` tries `__iadd__`
# before. A method may be the program's own, or one that `library/containers.py` defines; the answer
# NotImplemented (None from our own) means that the next candidate is asked.

# %%
SIZE_OPERATORS = ("+", "-", "*", "//", "%")
FLOAT_OPERATORS = (*SIZE_OPERATORS, "/", "**")
BIT_OPERATORS = ("&", "|", "^", "<<", ">>", "**")            # of integers, which the entry computes


# %% [markdown]
# `binary` looks at the kinds of the operands. Symbolic numbers stay symbolic where the result is an expression
# that sizes or floats can have, are computed by the entry where bits count (`computed`, in `varying.py`), and are fixed to
# their value otherwise (`specialize`). If both operands are plain,
# that is, constants, symbols or tensors, the operator is computed at once for two constants, and becomes a node
# for anything else. All other operands have methods: those of the program's classes, or ours for containers.
# `candidates` is the order in which Python asks them. A subclass with a reflected method of its own is asked
# before its base.

# %%
def binary(tx: Tracer, symbol: str, a: AbstractValue, b: AbstractValue, inplace: bool = False) -> AbstractValue:
    """a <symbol> b, or a <symbol>= b when inplace."""
    name = BINARY[symbol]
    a, b = (enum_number(v, name) for v in (a, b))
    kinds = {type(a), type(b)}
    if SymVal in kinds and TensorVal not in kinds and (result := of_scalars(tx, symbol, a, b)) is not None:
        return result
    if SymVal in kinds and TensorVal not in kinds:
        classes = {a.cls, b.cls}
        if classes <= {int, float} and symbol in FLOAT_OPERATORS and (float in classes or symbol == "/"):
            return emit_float(tx, name, [a, b])
        if classes == {int} and type(b) is Const and b.value >= 0 and (power := of_bits(symbol, b.value)):
            return binary(tx, power[0], a, const(power[1]))
        small = symbol == "**" and type(b) is Const and type(b.value) is int and 0 <= b.value < 8
        if classes == {int} and symbol in BIT_OPERATORS and not small:
            return fold(tx, getattr(int, f"__{name}__"), [a, b])
        if kinds == {Const, SymVal} and (symbol == "*" and str in classes or symbol == "%" and a.cls is str):
            return symbol == "%" and ask(tx, [(a, "__mod__", b)]) or fold(tx, python_operator(name), [a, b])
        if classes != {int} or symbol not in SIZE_OPERATORS and not small:
            return binary(tx, symbol, specialize(a), specialize(b), inplace)
    if kinds <= PLAIN:
        if TensorVal in kinds and type(a) is Const and type(a.value) in (str, bytes):
            unsupported(tx, f"{describe(a)} {symbol} {describe(b)}, which is not for PyTorch to do")
        function = python_operator("i" + name if inplace and (type(a) is TensorVal or kinds == {Const}) else name)
        if kinds == {Const}:
            return symbol == "+" and a.cls is b.cls is str and later(tx, str, joined, [a, b]) or fold(tx, function, [a, b])
        return emit(tx, function, [a, b])
    candidates, (left, right) = [(a, f"__{name}__", b)], (a.cls, b.cls)
    if left is not right:
        own = issubclass(right, left) and python_method(right, f"__r{name}__") not in (
            None, lookup(left, f"__r{name}__"))
        candidates.insert(0 if own else 1, (b, f"__r{name}__", a))
    if inplace:
        candidates.insert(0, (a, f"__i{name}__", b))
    result = ask(tx, candidates)
    if result is not None:
        return result
    for times, items in (a, b), (b, a):
        repeats = symbol == "*" and type(times) is ObjVal and (type(items) in (ListVal, TupleVal) or items.cls in (str, bytes))
        if repeats and (count := special(tx, times, "__index__")) is not None:
            return binary(tx, symbol, items, count, inplace and items is a)
    function = python_operator("i" + name if inplace else name)          # their errors name the operator
    with contextlib.suppress(NotConstant):
        return fold(tx, function, [a, b])
    if type(a) is not TensorVal and type(b) is not TensorVal:
        raise_as_python(tx, function, name, a, b)
    unsupported(tx, f"{describe(a)} {symbol} {describe(b)}")


def of_bits(symbol: str, bits: int) -> tuple | None:
    """Arithmetic for a shift, or a mask of the lowest bits: (symbol, number)."""
    if symbol in ("<<", ">>") and bits < 32:
        return "*" if symbol == "<<" else "//", 1 << bits
    return ("%", bits + 1) if symbol == "&" and bits & bits + 1 == 0 else None


# %% [markdown]
# Scalars of NumPy leave operators with tensors to the tensor, which takes them for numbers of Python. Among each other
# they have rules of their own: `np.float64` divides by zero, and a negative one has a power with a warning. Where those do not show,
# the arithmetic of `np.float64` is that of floats.

# %%
def of_scalars(tx, symbol: str, a: AbstractValue, b: AbstractValue) -> SymVal | None:
    """a <symbol> b for symbolic numbers of which one is an `np.float64` or `np.int64`; None where that is not the arithmetic of Python."""
    exact = symbol in ("+", "-") or symbol in ("//", "%") and type(b) is Const and b.value > 0
    if numpy.int64 in (a.cls, b.cls) and {a.cls, b.cls} <= {numpy.int64, int} and exact:
        return scalar_of(binary(tx, symbol, *(scalar_of(v, None) for v in (a, b))), numpy.int64)
    if numpy.float64 not in (a.cls, b.cls) or not {a.cls, b.cls} <= {numpy.float64, float, int} or symbol not in ("+", "-", "*", "/", "**"):
        return None
    left, right = (v.sym if type(v) is SymVal else v.value for v in (a, b))
    if symbol == "/" and not right != 0 or symbol == "**" and not (left > 0 and right > 0):
        return None
    return scalar_of(emit_float(tx, BINARY[symbol], [scalar_of(v, None) for v in (a, b)]), numpy.float64)


def scalar_of(value: AbstractValue, scalar: type | None) -> AbstractValue:
    """A number, known or symbolic, as one of this class of NumPy (None: as Python's)."""
    if type(value) is SymVal:
        return SymVal(node=value.node, sym=value.sym, scalar=scalar)
    python = value.value.item() if value.cls in NUMPY_SCALARS else value.value
    return const(scalar(python) if scalar else python)


# %% [markdown]
# If nobody answers, the program gets a TypeError, in the words that Python would use. The words depend on the
# operands' classes, so the operator is applied to empty objects whose classes have the same names.
#
# Below are helpers of the above.

# %%
def raise_as_python(tx, function, name, *operands):
    """An operator that no operand knows: let Python say so, of an empty object with the same class name."""
    reals = []
    for value in operands:
        try:
            reals.append(as_python(tx, value))
        except NotConstant:
            if type(value) is not ObjVal or has_method(value.cls, name):
                return
            reals.append(type(value.cls.__name__, (), {})())
    with user_errors():
        function(*reals)


def enum_number(value, name) -> AbstractValue:
    """A member of an IntEnum as the int that it is in arithmetic."""
    real = value.real if type(value) is ObjVal else None
    number = isinstance(real, enum.Enum) and isinstance(real, (int, float))
    if number and not python_method(value.cls, f"__{name}__"):
        return const(value.real.value)
    return value


def has_method(cls, name) -> bool:
    """Whether a class may take part in an operator: not when its only methods are the program's, which were
    asked."""
    methods = [lookup(cls, f"__{prefix}{name}__") for prefix in ("", "r", "i")]
    absent = (MISSING, object.__dict__.get(f"__{name}__"))
    return not all(m in absent or isinstance(m, types.FunctionType) for m in methods)


def specialize(value: AbstractValue) -> AbstractValue:
    """A symbolic number fixed to its present value, by a guard."""
    return const(value.value) if type(value) is SymVal else value


def ask(tx, candidates) -> AbstractValue | None:
    """The first answer of the methods (owner, name, argument) that is not NotImplemented."""
    for owner, name, argument in candidates:
        result, function = special(tx, owner, name, argument), METHODS.get((type(owner), name))
        if result is None and name == "__ne__" and lookup(owner.cls, name) is object.__ne__:         # the opposite of what `__eq__` says
            equal = special(tx, owner, "__eq__", argument)
            result = equal if equal is None or equal.cls is types.NotImplementedType else boolean(not truth(tx, equal))
        if result is None and function is not None:
            result = function(tx, owner, argument)
        if result is not None and result.cls is not types.NotImplementedType:
            return result
    return None


# %% [markdown]
# The others are simpler. An operation on symbolic floats is one node, and the same operation on the same operands is
# emitted only once: an optimizer divides by the same correction for each of its parameters.

# %%
def unary(tx: Tracer, name: str, a: AbstractValue) -> AbstractValue:
    """name: 'neg', 'pos', 'abs' or 'invert'."""
    if type(a) is TensorVal:
        return emit(tx, getattr(operator, name), [a])
    if type(a) is SymVal and a.scalar is not None:
        negative = name == "neg" and a.scalar is numpy.float64
        return scalar_of(emit_float(tx, name, [a]), a.scalar) if negative else fold(tx, getattr(operator, name), [a])
    if type(a) is SymVal and name == "invert" and a.cls is int:
        return binary(tx, "-", unary(tx, "neg", a), const(1))
    if type(a) is SymVal:
        known, key = tx.symbols.results, (name, to_arg(tx, a))
        if key not in known:
            known[key] = emit(tx, getattr(operator, name), [a])
        return known[key]
    return special(tx, a, f"__{name}__") or fold(
        tx, getattr(operator, name), [a], reason=f"{name} of {describe(a)}")


def emit_float(tx: Tracer, op: str, args) -> AbstractValue:
    """An operation of Python that gives a float, on numbers of which some are symbolic."""
    operands = tuple([to_arg(tx, a) for a in args])
    known, key = tx.symbols.results, (op, *[repr(a) if type(a) is float else a for a in operands])      # -0.0 is not 0.0
    if key not in known:
        function = float_function(op)
        try:
            result = function(*[a.sym if type(a) is SymVal else a.value for a in args])
        except (ArithmeticError, ValueError, TypeError):        # for these very numbers
            return fold(tx, OPERATIONS[op], args)
        known[key] = wrap_result(tx, tx.graph.call_function(function, operands), result)
    return known[key]


# %% [markdown]
# ## Truth, identity, comparison
#
# Bytecode asks these three questions all the time, mostly in front of a jump. The trace can only go one
# way, so each must be answered at once.
#
# `truth` follows Python's `bool()`. A constant knows its truth. A symbolic number answers with its present
# value, and the answer becomes a guard. A container is true if it is not empty, which guards its length. An
# object is asked for `__bool__`, and then for `__len__`. A tensor knows its truth only when the program
# runs, so here the graph ends, with one exception. Transformers drop layers at random with `if torch.rand([]) < self.layerdrop`,
# and mostly with a rate of 0. Whatever is drawn from [0, 1), the answer is no. `either_way` puts both ends of that range in
# the number's place. If the answers agree, they agree for all in between. The number is drawn nevertheless: it moves the
# generator on.
#
# `identical` is Python's `is`. One value stands for one object, so a value is itself. Two constants may be
# one object too: Python keeps one of each small integer and of each short string, and they are taken for
# one if type and value agree, and so are numbers that vary. Where two objects of one class are found to be different, the trace has
# learnt something that the next call may contradict by passing the same object twice. `told_apart` collects
# such classes, and capture guards that their objects are different ones.

# %%
ORDERINGS = frozenset((operator.lt, operator.le, operator.gt, operator.ge))


def either_way(value: TensorVal) -> bool | None:
    """The truth of a tensor that compares a uniform random number with one that is not in its range; None for others."""
    node = value.node
    if node.target in ORDERINGS and not value.fake._version and tuple(value.fake.shape) in ((), (1,)):
        drawn = [a for a in node.args if isinstance(a, torch.fx.Node) and a.target is torch.rand and not a.meta["val"]._version]
        if len(drawn) == 1 and all(a is drawn[0] or type(a) in (int, float) for a in node.args):
            low, high = (node.target(*(end if a is drawn[0] else a for a in node.args)) for end in (0.0, math.nextafter(1.0, 0.0)))
            if low == high:
                return low
    return None


BRANCH_ON_VALUES = "a branch on the values of a tensor"


def truth(tx: Tracer, value: AbstractValue, jump=None) -> bool:
    """bool(value). jump: where a conditional jump asks for it, the frame and the index of that instruction."""
    value = as_number(value)
    kind = type(value)
    if kind is Const:
        return bool(value.value)
    if kind is TensorVal:
        answer = either_way(value)
        if answer is None and jump is not None:
            answer = unless_it_raises(tx, value, *jump)
        return unsupported(tx, BRANCH_ON_VALUES) if answer is None else answer
    if kind is SymVal:
        return bool(value.sym)
    if kind is ObjVal and not isinstance(value.real, (type, types.ModuleType)):
        result = special(tx, value, "__bool__") or special(tx, value, "__len__")
        if result is not None:
            return truth(tx, result)
        value = as_dict(tx, value, "__len__")
    if type(value) in (TupleVal, ListVal, SetVal, DictVal, ViewVal):
        return length(tx, value).value > 0
    if type(value) is ObjVal and any(lookup(value.cls, m) is not MISSING for m in ("__bool__", "__len__")):
        return fold(tx, bool, [value], reason=f"bool() of {describe(value)}").value
    return True


# %% [markdown]
# `assert (x > 0).all()`, and what `torch.distributions` does with each parameter: a jump on a tensor one side of which
# ends in a `raise`. The program does not expect to raise, so the trace goes the other way, and the graph computes one
# more number, whether it was right. If it was not, the call has left no trace yet, and the frame is evaluated from its
# beginning: CPython raises, in the right place and after the right side effects. Capture sees at the end whether that is
# so (`finish_capture`), and otherwise breaks the graph at the jump as at any other. Graphs on a GPU always break: there an
# index out of range, behind a check that did not hold, is no exception; it costs the process the device. The same jump
# again and again in one frame may be a loop that an exception ends, so patience has a limit. A program that often expects
# the exception would pay for a graph and for the frame each time: after some refutations it is compiled anew, with a break
# at the jump (`versions.refuted`).

# %%
PATIENCE = 16
LEAVING = ("JUMP", "RETURN", "YIELD", "SEND", "FOR_ITER")


def ends_in_raise(frame, index: int) -> bool:
    """Whether the instructions from here on lead to a `raise` without a jump."""
    for i in frame.decoded.instructions[index:]:
        if i.opname == "RAISE_VARARGS":
            return True
        if any(word in i.opname for word in LEAVING):
            return False
    return False


def unless_it_raises(tx: Tracer, value: TensorVal, frame, index: int) -> bool | None:
    """The truth of a tensor for which the jump at this index does not lead to a `raise`; None if both sides do, or neither."""
    i = frame.decoded.instructions[index]
    there, here = ends_in_raise(frame, frame.decoded.index[i.argval]), ends_in_raise(frame, index + 1)
    single = all(type(size) is int and size == 1 for size in value.fake.shape)
    if not tx.options.trusting or tx.outer is not None or there == here or not single or not i.opname.endswith(("IF_TRUE", "IF_FALSE")):
        return None
    return assume(tx, value, i.opname.endswith("IF_TRUE") == here, (id(frame), index))


def assume(tx: Tracer, value: TensorVal, answer: bool, jump) -> bool:
    """Take this answer to bool(value), and let the graph compute whether it is right."""
    before, here = tx.symbols.assumptions, (location(tx), next(BIRTHS), jump)
    if sum(a[-1] == jump for a in before) >= PATIENCE:
        unsupported(tx, BRANCH_ON_VALUES)
    right = emit(tx, operator.ne if answer else operator.eq, [value, const(0)])
    right = emit(tx, "reshape", [right, TupleVal(items=[])])
    before.append((emit(tx, operator.and_, [before[-1][0], right]) if before else right, *here))
    return answer


def identical(a: AbstractValue, b: AbstractValue) -> bool:
    """a is b"""
    if a is b:
        return True
    if type(a) is Const and type(b) is Const:
        return a.value is b.value or type(a.value) is type(b.value) and type(a.value) in (int, str, bool) \
            and a.value == b.value
    if SymVal in (type(a), type(b)) and {type(a), type(b)} <= {Const, SymVal} and a.cls is b.cls:
        left, right = (v.sym if type(v) is SymVal else v.value for v in (a, b))
        return bool(left == right)
    if type(a) is ObjVal and type(b) is ObjVal and a.real is b.real and a.real is not None:
        return True
    if a.cls is b.cls:
        captures[-1].told_apart.add(a.cls)
    return False


def equal(tx: Tracer, a: AbstractValue, b: AbstractValue) -> bool:
    """a is b or a == b, which is how containers compare their items."""
    return a is b or not (varies_in(a) or varies_in(b)) and identical(a, b) or truth(tx, compare(tx, "==", a, b))

# %% [markdown]
# Python compares in an order that `compare` repeats. Numbers and tensors come first (`compare_plain`),
# because most comparisons are of numbers, and a comparison with a tensor is an operation of the graph. Then
# both operands are asked for their methods: the left one for `__lt__`, the right one for the mirror image
# `__gt__`, and the right one first if its class is derived from the left one's. `!=` without
# a `__ne__` of the program's is the opposite of `==`. Lists and tuples are compared by
# Python, as the next part says. What is left are objects whose classes say
# nothing. `==` of such objects is identity, and any other comparison is a TypeError, which Python itself
# words (`raise_as_python`).
#
# One case must not be answered. A class that is written in C may compare by value, in a way that the trace
# cannot see. `compares_by_identity` lists the ways that it knows; for all others the graph ends.

# %%
def compare(tx: Tracer, symbol: str, a: AbstractValue, b: AbstractValue) -> AbstractValue:
    """a <symbol> b for one of the six comparisons."""
    function, kinds = getattr(operator, COMPARE[symbol]), {type(a), type(b)}
    if kinds == {Const} and is_identity(a) and is_identity(b) and symbol in ("==", "!="):
        return boolean(function(a.value, b.value))
    if kinds <= PLAIN:
        return compare_plain(tx, symbol, function, a, b)
    candidates, (left, right) = [(a, f"__{COMPARE[symbol]}__", b)], (a.cls, b.cls)
    derived = right is not left and issubclass(right, left)              # then the right one is asked first
    candidates.insert(0 if derived else 1, (b, f"__{COMPARE[MIRROR[symbol]]}__", a))
    result = ask(tx, candidates)
    if result is not None:
        return result
    if ObjVal in kinds and symbol in ("==", "!="):
        # A dict or list subclass whose own `__eq__`, if any, was asked and left the answer to dict, as Counter does
        inner = [dict_contents(tx, v) or v if type(v) is ObjVal else v for v in (a, b)]
        if {type(v) for v in inner} in ({DictVal}, {ListVal}):
            return compare(tx, symbol, *inner)
    if kinds in ({TupleVal}, {ListVal}):
        return compare_sequences(tx, function, a, b)
    with contextlib.suppress(NotConstant):
        return fold(tx, function, [a, b])
    if symbol in ("==", "!=") and TensorVal not in kinds:
        return boolean(same(tx, a, b) == (symbol == "=="))
    if TensorVal not in kinds:
        raise_as_python(tx, function, COMPARE[symbol], a, b)
    unsupported(tx, f"{describe(a)} {symbol} {describe(b)}")


def same(tx, a, b) -> bool:
    """a == b, where neither has a method that knows."""
    if type(a) is type(b) is DictVal:
        return same_dict(tx, a, b)
    if type(a) is type(b) is MethodVal:
        return identical(a.func, b.func) and identical(a.self, b.self)
    if not identical(a, b) and not all(compares_by_identity(v) for v in (a, b)):
        unsupported(tx, f"{describe(a)} == {describe(b)}")
    return identical(a, b)


def same_dict(tx, a, b) -> bool:
    kind = list if {a.cls, b.cls} == {collections.OrderedDict} else dict.keys
    return kind(entries(tx, a)) == kind(entries(tx, b)) and all(
        equal(tx, realize(tx, a.items[k][1]), realize(tx, b.items[k][1])) for k in a.items)


DATA = (int, float, complex, str, bytes, tuple, list, dict, set, frozenset)
EQ_OF_BUILTINS = [c.__dict__["__eq__"] for c in (object, *DATA, type({}.keys()), range, slice)]
LIKE_BUILTINS = (*DATA, collections.UserDict, collections.UserList, collections.UserString)


def compares_by_identity(value) -> bool:
    """Whether the `__eq__` of an object is that of `object`, of the program (which was asked), or of a
    builtin, which knows its own kind only."""
    if type(value) is not ObjVal:
        return True
    own = lookup(value.cls, "__eq__")
    known = isinstance(own, types.FunctionType) or own in EQ_OF_BUILTINS
    return known and not issubclass(value.cls, LIKE_BUILTINS)


def compare_plain(tx, symbol, function, a, b):
    """Numbers, known or symbolic, and tensors."""
    if type(a) is type(b) is Const:
        return fold(tx, function, [a, b], reason="comparing the id() of an object with a number")
    if symbol in ("==", "!=") and NONE in (a, b):
        return boolean(symbol == "!=")
    if TensorVal in (type(a), type(b)):
        return emit(tx, function, [a, b])
    try:
        answer = function(*(v.sym if type(v) is SymVal else v.value for v in (a, b)))
        return const(numpy.bool_(bool(answer))) if a.cls in NUMPY_SCALARS or b.cls in NUMPY_SCALARS else boolean(answer)
    except TypeError as error:
        user_error(TypeError, str(error))


def compare_sequences(tx, function, a, b):
    with user_errors():
        result = function(deputies(tx, a), deputies(tx, b))
    return result.value if type(result) is Deputy else boolean(result)

# %% [markdown]
# ## Python's own C code, on values
#
# `[a, b] < [c, d]`, `sorted(items)`, `items.index(a)`, `str(items)`: C code that at some point asks the items something. Which items it
# asks, in which order, when it has seen enough, and in which words it complains, a program may notice; rules of ours would have to
# repeat all that. So the C code itself runs, on **deputies**. A `Deputy` is an object that passes what it is asked on to the interpreter,
# which traces the answer. Answers to `<` and `>` are deputies as well: Python takes their truth where it needs it, and otherwise
# hands them out.
#
# (The iterators of `itertools` ask nothing of items, and need no deputies: they run on the values themselves.)

# %%
@dataclass(eq=False, repr=False)
class Deputy:
    """A value as an object for Python's C code."""
    tx: Tracer
    value: AbstractValue
    __hash__ = object.__hash__

    def __eq__(self, other): return equal(self.tx, self.value, other.value)
    def __lt__(self, other): return Deputy(self.tx, compare(self.tx, "<", self.value, other.value))
    def __gt__(self, other): return Deputy(self.tx, compare(self.tx, ">", self.value, other.value))
    def __le__(self, other): return Deputy(self.tx, compare(self.tx, "<=", self.value, other.value))
    def __ge__(self, other): return Deputy(self.tx, compare(self.tx, ">=", self.value, other.value))
    def __bool__(self): return truth(self.tx, self.value)
    def __repr__(self): return self.ask(repr)
    def __str__(self): return self.ask(str)
    def __format__(self, spec): return self.ask(format, const(spec))

    def ask(self, function, *args):
        return as_python(self.tx, call(self.tx, wrap(self.tx, function), [self.value, *args]))


INTERPRETING.update(f.__code__ for f in vars(Deputy).values() if isinstance(f, types.FunctionType))


def deputies(tx: Tracer, sequence: AbstractValue):
    """The list, tuple or deque of the deputies of its items."""
    items = [Deputy(tx, v) for v in unpack(tx, sequence)]
    return tuple(items) if type(sequence) is TupleVal else sequence.cls(items)
