# %% [markdown]
# # Operators
#
# `a + b`, `a += b`, `-a`: one function each. Three cases repeat. With a tensor among the operands
# the operation becomes a node. With constants it is computed on the spot, by Python itself. Containers and
# objects follow Python's protocol: the containers' operations are written out, a class's own `__add__` is
# inlined. (`a < b`, `a is b`, `if a`: `comparisons.py`.) In
#
#     def totalled(x, names, price):
#         names += ["y"]
#         return x * (2 ** 3) + price
#
# with a `price` whose class has `def __radd__(self, other): return other + self.n`, all three occur. The object is guarded by what
# `__radd__` has read, and the list grows after the graph has run:
#
#     price.n == 5
#
#     names.extend(['y', ])
#     return __out[0]
#
# Nothing is left in the graph of `2 ** 3` but its result, and of the object but the number:
#
#     x: f32[3] = input
#     mul: f32[3] = mul(x, 8)
#     add: f32[3] = add(mul, 5)
#     return (add,)
#
# `fold` is for constants, and asks first whether what varies among the operands can be computed at each call (`varying.py`).

# %%
import contextlib
import decimal
import enum
import operator
import types
import weakref

import numpy

from ..ch01_graphs.floats import OPERATIONS, numpy_warnings
from ..ch01_graphs.shapes import float_function
from ..ch02_guards.identity import is_a
from ..ch02_guards.torch_guards import METHODS_OF_TENSORS
from .builders import as_python
from .exceptions import UserError, user_errors
from .lookup import MISSING, lookup, python_method
from .protocol import METHODS, as_dict, special
from .tensors import emit, to_arg, wrap_result
from .tracer import Tracer, answer, call, names_its_own, unsupported
from .values import (
    AbstractValue, Const, DictVal, ListVal, NUMBERS, NUMPY_SCALARS, NotConstant, ObjVal, SetVal, SymVal, TensorVal, TupleVal, const,
    describe, is_unseen, specialize, unseen)
from .varying import REFUSALS_OF_VALUES, computed
from .wrap import wrap, wrap_constant

BINARY = {"+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "**": "pow",
          "@": "matmul",
          "&": "and", "|": "or", "^": "xor", "<<": "lshift", ">>": "rshift"}
GRAPH_KINDS = {Const, TensorVal, SymVal}            # kinds that can stand in the graph


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
    decimals = function is decimal.Decimal or decimal.Decimal in map(type, python_args)
    scalars = any(isinstance(a, numpy.generic) for a in python_args)
    try:
        with user_errors(), noted_signals(tx) if decimals else numpy_warnings("raise") if scalars else contextlib.nullcontext():
            result = function(*python_args, **python_kwargs)
    except UserError as error:
        if not scalars or error.exc.cls is not FloatingPointError:
            raise
        unsupported(tx, "arithmetic of which NumPy warns")
    return wrap_constant(tx, result)


def fold_unknown(tx: Tracer, function, args, kwargs, reason: str) -> AbstractValue:
    """fold() for a function of which nothing else is known. What it makes is new in each call of the program, so it must
    be something that cannot change, or that capture makes anew: an iterator over matches is neither."""
    made = fold(tx, function, args, kwargs, reason)
    if type(made) is ObjVal and not isinstance(made.real, type) and type(made.real).__hash__ is object.__hash__:
        unsupported(tx, reason)
    return made


def decimal_context() -> tuple:
    """What the arithmetic of decimal numbers depends on."""
    now = decimal.getcontext()
    return now.prec, now.rounding, now.Emin, now.Emax, now.capitals, now.clamp, *now.traps.values()


def has_signalled(*signals) -> bool:
    return all(decimal.getcontext().flags[signal] for signal in signals)


@contextlib.contextmanager
def noted_signals(tx: Tracer):
    """Arithmetic of decimal numbers reads the context and raises flags there. A flag stays raised until the program lowers it, so a
    guard that it is raised is all that a later call needs."""
    flags = decimal.getcontext().flags
    before = dict(flags)
    flags.update(dict.fromkeys(flags, False))
    try:
        yield
    finally:
        answer(tx, decimal_context)
        if raised := [signal for signal, flag in flags.items() if flag]:
            answer(tx, has_signalled, *raised)
        flags.update({signal: True for signal, flag in before.items() if flag})


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
    except REFUSALS_OF_VALUES:
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
# `binary` looks at the kinds of the operands, and there are three cases, each a function. One operand is a number that varies, and none a
# tensor (`of_symbols`). All can stand in the graph, that is, are constants, symbols or tensors. Or one is something else, and has methods:
# those of the program's classes, or ours for containers (`by_methods`).

# %%
# Methods of tensors in Python, which call what has its name: `2 ** x` is a call of `torch.pow`.
NAMING_OTHERS = ("__floordiv__", "__rfloordiv__", "__rlshift__", "__rmod__", "__rpow__", "__rrshift__")


def binary(tx: Tracer, symbol: str, a: AbstractValue, b: AbstractValue, inplace: bool = False) -> AbstractValue:
    """a <symbol> b, or a <symbol>= b when inplace."""
    name = BINARY[symbol]
    a, b = (enum_number(v, name) for v in (a, b))
    kinds = {type(a), type(b)}
    if SymVal in kinds and TensorVal not in kinds and (result := of_symbols(tx, symbol, a, b, inplace)) is not None:
        return result
    if not kinds <= GRAPH_KINDS:
        return by_methods(tx, symbol, a, b, inplace)
    if TensorVal in kinds and type(a) is Const and type(a.value) in (str, bytes):
        unsupported(tx, f"{describe(a)} {symbol} {describe(b)}, which is not for PyTorch to do")
    function = python_operator("i" + name if inplace and (type(a) is TensorVal or kinds == {Const}) else name)
    if kinds == {Const}:
        return symbol == "+" and a.cls is b.cls is str and later(tx, str, joined, [a, b]) or fold(tx, function, [a, b])
    asked, other = (a, b) if type(a) is TensorVal else (b, a)
    own = f"__{name}__" if asked is a else f"__r{name}__"
    if own in NAMING_OTHERS and not names_its_own(tx, METHODS_OF_TENSORS[own]):
        return call(tx, wrap(tx, METHODS_OF_TENSORS[own]), [asked, other])
    return emit(tx, function, [a, b])


# %% [markdown]
# Say that `n` varies, as the second call with another number has shown. `n + 1` is an expression, and stays one: the graph
# has a size `n + 1`, and one version serves all. `n / 2` is a float, which a node of the graph computes. `n << 2` is `n * 4`,
# and so an expression again; `n ^ 3` is none, but the entry can compute it before the graph runs and hand it in as another
# number that varies (`computed`, in `varying.py`). `"%d" % n` is a text that waits. What none of this fits, such as
# `[0] * n`, fixes `n` to its present value (`specialize`), with a guard, and starts again with a constant. Beside an object of a class with
# operators of its own, these are asked first (`of_objects`), and given `n` as it is.

# %%
def of_symbols(tx: Tracer, symbol: str, a: AbstractValue, b: AbstractValue, inplace: bool) -> AbstractValue | None:
    """`binary` of numbers of which some vary; None for sizes, whose expression the graph has."""
    if (result := of_objects(tx, symbol, a, b, inplace)) is not None:
        return result
    if (result := of_scalars(tx, symbol, a, b)) is not None:
        return result
    if {a.cls, b.cls} <= NUMBERS and not {a.cls, b.cls} <= {int, float} and \
            (result := computed(tx, python_operator(BINARY[symbol]), [a, b], {})) is not None:
        return result
    name, kinds, classes = BINARY[symbol], {type(a), type(b)}, {a.cls, b.cls}
    if classes <= {int, float} and symbol in FLOAT_OPERATORS and (float in classes or symbol == "/"):
        return emit_float(tx, name, [a, b])
    if classes == {int} and type(b) is Const and b.value >= 0 and (power := of_bits(symbol, b.value)):
        return binary(tx, power[0], a, const(power[1]))
    small = symbol == "**" and type(b) is Const and type(b.value) is int and 0 <= b.value < 8
    if classes == {int} and symbol in BIT_OPERATORS and not small:
        return fold(tx, getattr(int, f"__{name}__"), [a, b])
    if kinds == {Const, SymVal} and (symbol == "*" and str in classes or symbol == "%" and a.cls is str):
        return symbol == "%" and ask(tx, [(a, "__mod__", b)]) or fold(tx, python_operator(name), [a, b])
    fits = classes == {int} and (symbol in SIZE_OPERATORS or small)
    return None if fits else binary(tx, symbol, specialize(a), specialize(b), inplace)


def of_objects(tx: Tracer, symbol: str, a: AbstractValue, b: AbstractValue, inplace: bool) -> AbstractValue | None:
    """A number that varies beside an object of the program, whose methods take it as it is; None if it has none."""
    name, other = BINARY[symbol], b if type(a) is SymVal else a
    if type(other) is not ObjVal or issubclass(other.cls, (int, float, complex, numpy.generic)):
        return None
    methods = [f"__r{name}__"] if other is b else [f"__i{name}__"] * inplace + [f"__{name}__"]
    if not any(python_method(other.cls, method) for method in methods) or other is b and asks_by_elements(a.cls, b.cls):
        return None
    result = ask(tx, [(other, method, a if other is b else b) for method in methods])
    if result is None:                                   # they are not to be asked twice
        raise_as_python(tx, python_operator("i" + name if inplace else name), name, a, b)
        unsupported(tx, f"{describe(a)} {symbol} {describe(b)}")
    return result


# %% [markdown]
# `candidates` is the order in which Python asks the methods. A subclass with a reflected method of its own is asked
# before its base. A number of a builtin class or of NumPy, or a tensor, on the left takes whatever is a number (`answers_itself`): in
# `2.0 * n` nobody asks the `__rmul__` that the class of `n`, derived from `int`, may have. If none answers, a list may be multiplied by an
# object that counts as an integer, and an operator on what is constant as a whole is Python's (`fold`). So is the error, if there
# is to be one.
#
# A list itself is asked last: `items += b` asks the `__radd__` of `b` before it extends. A class that derives from list, set or dict and
# has an `__add__` of its own beside an `__iadd__` in C has CPython's slots of both, in an order that depends on the builtin class. So it
# has beside a `b` with an `__radd__`. That is left to CPython (`mix_languages`).

# %%
def by_methods(tx: Tracer, symbol: str, a: AbstractValue, b: AbstractValue, inplace: bool) -> AbstractValue:
    """`binary` where an operand is neither a number nor a tensor."""
    name, (left, right) = BINARY[symbol], (a.cls, b.cls)
    candidates = [(a, f"__{name}__", b)]
    if issubclass(left, numpy.generic) and type(b) is ObjVal and asks_by_elements(left, right) and python_method(right, f"__r{name}__"):
        unsupported(tx, f"{describe(a)} {symbol} {describe(b)}, which NumPy makes an array of")
    derived = left is not right and issubclass(right, left)
    if left is not right and (derived or not answers_itself(a, f"__{name}__", right)):
        own = derived and python_method(right, f"__r{name}__") not in (None, lookup(left, f"__r{name}__"))
        candidates.insert(0 if own else 1, (b, f"__r{name}__", a))
    if inplace and type(a) is ListVal:
        candidates = [c for c in candidates if c[0] is b] + [(a, f"__i{name}__", b)]
    elif inplace:
        candidates.insert(0, (a, f"__i{name}__", b))
    asked = [(left, f"__{name}__"), (left, f"__r{name}__")]
    if inplace:
        asked = [(left, f"__i{name}__"), *asked, (right, f"__r{name}__")]
    if type(a) is ObjVal and not issubclass(left, (int, float, complex)) and mix_languages([lookup(*method) for method in asked]):
        unsupported(tx, f"{describe(a)} {symbol}{'=' * inplace} {describe(b)}, of which a method in C is asked first")
    result = ask(tx, candidates) or of_lists(tx, symbol, name, a, b, inplace)
    if result is not None:
        return result
    for times, items in (a, b), (b, a):
        repeats = symbol == "*" and type(times) is ObjVal and (type(items) in (ListVal, TupleVal) or items.cls in (str, bytes))
        if repeats and (count := special(tx, times, "__index__")) is not None:
            return binary(tx, symbol, items, count, inplace and items is a)
    function = python_operator("i" + name if inplace else name)          # their errors name the operator
    with contextlib.suppress(NotConstant):
        folded = fold(tx, function, [a, b])
        if not (inplace and type(a) in (ListVal, DictVal, SetVal)):      # a copy has changed
            return folded
        unsupported(tx, f"{describe(a)} {symbol}= {describe(b)}")
    if type(a) is not TensorVal and type(b) is not TensorVal:
        raise_as_python(tx, function, name, a, b)
    unsupported(tx, f"{describe(a)} {symbol} {describe(b)}")


def mix_languages(methods) -> bool:
    """Whether the first of these methods is written in C, and another one in Python."""
    in_python = [isinstance(method, types.FunctionType) for method in methods if method is not MISSING]
    return any(in_python) and not in_python[0]


def asks_by_elements(left: type, right: type) -> bool:
    """Whether NumPy makes an array of the operand on the right and asks its elements; beside a scalar, with the number of Python."""
    takes_all = lookup(right, "__array_ufunc__") is lookup(right, "__array_priority__") is MISSING
    return issubclass(left, (numpy.generic, numpy.ndarray)) and takes_all


def answers_itself(a: AbstractValue, method: str, right: type) -> bool:
    """Whether the operator of `a` is written in C and takes operands of the class `right`. A class may have it from a builtin one."""
    base = next((n for n in (int, float, complex) if issubclass(right, n)), None)
    home = getattr(lookup(a.cls, method), "__objclass__", None)
    if a.cls is numpy.ndarray and asks_by_elements(a.cls, right):
        return True                                       # each with the operand
    if issubclass(a.cls, (numpy.generic, numpy.ndarray)):
        return base is not None or issubclass(right, numpy.generic)
    if home in (bool, int, float, complex):
        return base is not None and getattr(home(1), method)(base(1)) is not NotImplemented
    if home in (str, bytes, tuple, list) and method[2:-2] in ("lt", "le", "gt", "ge", "eq", "ne"):
        return issubclass(right, home)
    return type(a) is TensorVal and base is not None or a.cls is bytes and method == "__mod__"


def of_lists(tx, symbol: str, name: str, a, b, inplace: bool) -> AbstractValue | None:
    """a + b or a * b where one is a list of a derived class; this gives a plain list, or `a` when inplace."""
    if symbol not in ("+", "*"):
        return None
    left, right = (as_dict(tx, v, f"__{side}{name}__") for v, side in ((a, ""), (b, "r")))
    lists = ListVal in (type(left), type(right)) and not (left is a and right is b)
    if inplace and type(left) is ListVal:
        return ask(tx, [(left, f"__i{name}__", right)]) and a
    return ask(tx, [(left, f"__{name}__", right), (right, f"__r{name}__", left)]) if lists else None


def of_bits(symbol: str, bits: int) -> tuple | None:
    """Arithmetic for a shift, or a mask of the lowest bits: (symbol, number)."""
    if symbol in ("<<", ">>") and bits < 32:
        return "*" if symbol == "<<" else "//", 1 << bits
    return ("%", bits + 1) if symbol == "&" and bits & bits + 1 == 0 else None


# %% [markdown]
# Scalars of NumPy leave operators with tensors to the tensor, which takes them for numbers of Python. Among each other
# they have rules of their own: `np.float64` divides by zero, a negative one has a power with a warning, and `np.float32` rounds.
# Where those do not show, the arithmetic of `np.float64` is that of floats, and the graph has it; elsewhere the entry computes it.

# %%
def of_scalars(tx, symbol: str, a: AbstractValue, b: AbstractValue) -> SymVal | None:
    """a <symbol> b for symbolic numbers of which one is an `np.float64` or `np.int64`; None where that is not the arithmetic of Python."""
    if numpy.int64 in (a.cls, b.cls) and {a.cls, b.cls} <= {numpy.int64, int} and (
            symbol in ("+", "-") or symbol in ("//", "%") and type(b) is Const and b.value > 0):
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
# The helpers: `enum_number` gives the number that a member of an IntEnum is in arithmetic, and `ask` calls
# the methods of `candidates` in their order until one gives an answer.

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
    number = is_a(real, enum.Enum) and isinstance(real, (int, float))
    if number and not python_method(value.cls, f"__{name}__"):
        return const(value.real.value)
    return value


def has_method(cls, name) -> bool:
    """Whether a class may take part in an operator by a method in C, its own or one that the program's could not answer for."""
    methods = [vars(kind).get(f"__{prefix}{name}__", MISSING) for kind in cls.__mro__ if kind is not object for prefix in ("", "r", "i")]
    return not all(m is MISSING or isinstance(m, types.FunctionType) for m in methods)


def ask(tx, candidates, of_program=special) -> AbstractValue | None:
    """The first answer of the methods (owner, name, argument) that is not NotImplemented. of_program: calls a method of the program's."""
    for owner, name, argument in candidates:
        result, function = of_program(tx, owner, name, argument), METHODS.get((type(owner), name))
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
