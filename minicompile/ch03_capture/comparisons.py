# %% [markdown]
# # Truth, identity, comparison
#
# Bytecode asks these three questions all the time, mostly in front of a jump. The trace can only go one
# way, so each must be answered at once.
#
# `truth` follows Python's `bool()`. A constant knows its truth. A symbolic number answers with its present
# value, and the answer becomes a guard. A container is true if it is not empty, which guards its length. An
# object is asked for `__bool__`, and then for `__len__`. A tensor knows its truth only when the program
# runs, so here the graph ends, with two exceptions.

# %%
import array
import collections
import contextlib
import decimal
import dis
import itertools
import math
import operator
import types
from dataclasses import dataclass

import numpy
import torch

from ..errors import Unsupported
from .attributes import get_attribute
from .builders import as_python, contents_of
from .constants import as_item
from .exceptions import INTERPRETING, user_errors
from .iterate import length, unpack
from .keys import entries, key_in, objects_in_key
from .lookup import MISSING, captures, lookup
from .operations import GRAPH_KINDS, answers_itself, ask, fold, raise_as_python
from .protocol import as_dict, method, special
from .tensors import call_tensor_method, emit
from .tracer import Tracer, call, location, unsupported
from .values import (
    AbstractValue, BIRTHS, CellVal, Const, DictVal, ExcVal, Lazy, ListVal, MAY_BE_NAN, MethodName, MethodVal, NONE, NUMPY_SCALARS,
    NotConstant, ObjVal, SetVal, SymVal, TRUE, TensorVal, TupleVal, ViewVal, boolean, const, describe, is_identity, specialize)
from .varying import varies_in
from .wrap import realize, wrap

COMPARE = {"<": "lt", "<=": "le", "==": "eq", "!=": "ne", ">": "gt", ">=": "ge"}
MIRROR = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}
ORDERINGS = frozenset((operator.lt, operator.le, operator.gt, operator.ge))
BRANCH_ON_VALUES = "a branch on the values of a tensor"


def truth(tx: Tracer, value: AbstractValue, jump=None) -> bool:
    """bool(value). jump: where a conditional jump asks for it, the frame and the index of that instruction."""
    value = as_item(value)
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
    if kind is ExcVal or kind is ObjVal and type(value.real) not in (type, types.ModuleType):
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
# **Whatever is drawn.** Transformers drop layers at random with `if torch.rand([]) < self.layerdrop`,
# and mostly with a rate of 0. Whatever is drawn from [0, 1), the answer is no. `either_way` puts both ends of that range in
# the number's place. If the answers agree, they agree for all in between. The number is drawn nevertheless: it moves the
# generator on.

# %%
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


# %% [markdown]
# **What is not expected.** `assert (x > 0).all()`, and what `torch.distributions` does with each parameter: a jump on a tensor one side of
# which ends in a `raise`. For
#
#     def checked(x):
#         if x.min() < 0:
#             raise ValueError("negative")
#         return x.sqrt()
#
# there is one graph, with one more result:
#
#     min_1: f32[] = x.min()
#     lt: b8[] = lt(min_1, 0)
#     eq: b8[] = eq(lt, 0)
#     reshape: b8[] = eq.reshape(())
#     sqrt: f32[3] = x.sqrt()
#     return (sqrt, reshape)
#
# The program does not expect to raise, so the trace goes the other way, and the graph computes one
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


# %% [markdown]
# `assert lengths.max().item() <= n` asks the same of a number. `decides` looks ahead: if nothing but such a jump asks for what `item()`
# gives, or `bool()`, `float()`, or `int()` of an integer, at most behind a comparison with a number, it may as well stay a tensor, of a
# dtype that holds whatever Python's number does. What stands on the other side of the comparison is looked at before it is traced, so it is
# a constant, a variable, or what lies in the dictionary of an object where neither the trace nor a property has another answer; and a
# number that floats and ints both hold.

# %%
READS = ("LOAD_CONST", "LOAD_SMALL_INT", "LOAD_FAST", "LOAD_GLOBAL", "LOAD_ATTR")


def number_read(tx: Tracer, frame, instructions):
    """What these instructions read by name, before they are traced: the value of a variable or constant, or the object that an attribute
    or a global is, unless the trace or the class may give another."""
    first, *attributes = instructions
    names = [i.argval for i in instructions if i.opname.startswith(("LOAD_GLOBAL", "LOAD_ATTR"))]
    written = [value for value, _ in tx.effects.changed.values() if type(value) in (ObjVal, DictVal)]
    if any(name in value.attrs or type(value) is DictVal and name in value.items for name in names for value in written):
        return None
    if not first.opname.startswith(("LOAD_FAST", "LOAD_GLOBAL")):
        return const(first.argval)
    value = (frame.globals if first.opname == "LOAD_GLOBAL" else frame.locals).get(first.argval)
    if type(value) is Lazy:
        value = realize(tx, value)
    if attributes and isinstance(value, AbstractValue):
        value = getattr(value, "real", None)
    for i in attributes:
        cls = type(value)
        plain = i.opname == "LOAD_ATTR" and isinstance(cls.__getattribute__, types.WrapperDescriptorType)
        value = getattr(value, "__dict__", {}).get(i.argval) if plain and lookup(cls, i.argval) is MISSING else None
    return value


EXACT_TO = 2**53                        # up to here, a comparison is exact whichever of an int and a float is made the other


def kind_of_number(value, dtype) -> type | None:
    """int, float or bool, where a tensor can be compared with this number as exactly as Python compares."""
    kind = value.cls if isinstance(value, AbstractValue) else type(value)
    if kind not in (bool, int, float) or kind is float and dtype is torch.int64 and type(value) is SymVal:
        return None
    number = 0 if type(value) is SymVal else value.value if type(value) is Const else value
    return None if EXACT_TO <= abs(number) < math.inf else kind


def is_call_of(frame, name: str) -> bool:
    """Whether the present instruction calls a method of this name, or what a builtin of this name was loaded for."""
    instructions, at = frame.decoded.instructions, frame.ip - 1
    if instructions[at].opname != "CALL":
        return False
    at -= instructions[at - 1].opname == "PRECALL"
    if instructions[at - 1].opname in ("LOAD_ATTR", "LOAD_METHOD"):
        return instructions[at - 1].argval == name
    above = instructions[at].arg + 2                   # what lies on the stack from the function on
    while at and above > 0 and "JUMP" not in instructions[at - 1].opname:
        at -= 1
        above -= dis.stack_effect(instructions[at].opcode, instructions[at].arg, jump=False)
    return above == 0 and instructions[at].opname == "LOAD_GLOBAL" and instructions[at].argval == name


def decides(tx: Tracer, frame, dtype):
    """What the number that the present call gives is compared with, before a jump that decides whether to raise: int, float, or bool
    for a jump on the result itself. None if anything else asks for it."""
    instructions, at = frame.decoded.instructions, frame.ip
    end = next(k for k in range(at, len(instructions)) if not instructions[k].opname.startswith(READS))
    compares = instructions[end].opname == "COMPARE_OP"
    jump = end + compares + (instructions[end + compares].opname == "TO_BOOL")
    i = instructions[jump]
    if end > at and not compares or not i.opname.startswith("POP_JUMP") or not i.opname.endswith(("IF_TRUE", "IF_FALSE")) \
            or ends_in_raise(frame, frame.decoded.index[i.argval]) == ends_in_raise(frame, jump + 1):
        return None
    return kind_of_number(number_read(tx, frame, instructions[at:end]) if end > at else frame.stack[-1], dtype) if compares else bool


WHOLE_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def number_left_open(tx, tensor: TensorVal, name: str) -> TensorVal | None:
    """A tensor in the place of what the present call of `item`, `int`, `float` or `bool` gives; None where the number is needed."""
    dtype, single = tensor.fake.dtype, all(type(size) is int and size == 1 for size in tensor.fake.shape)
    plain = dtype in WHOLE_DTYPES or dtype.is_floating_point and name != "int"
    if not (tx.options.trusting and tx.outer is None and single and plain and is_call_of(tx.frames[-1], name)):
        return None
    kind = decides(tx, tx.frames[-1], torch.float64 if name == "float" else dtype)
    if kind is None:
        return None
    number = emit(tx, "reshape", [tensor, TupleVal(items=[])])
    if name == "bool":
        number, dtype = emit(tx, operator.ne, [number, const(0)]), torch.bool
    wide = torch.float64 if dtype.is_floating_point or kind is float or name == "float" else torch.int64
    return number if dtype is torch.bool and kind is bool else emit(tx, "to", [number, wrap(tx, wide)])


@method(TensorVal, "item")
def item_or_tensor(tx, self, *args, **kwargs):
    open_ = None if type(as_item(self)) is Const or args or kwargs else number_left_open(tx, self, "item")
    return call_tensor_method(tx, self, "item", args, kwargs) if open_ is None else open_


# %% [markdown]
# `identical` is Python's `is`. One value stands for one object, so a value is itself. Two constants may be
# one object too: Python keeps one of each small integer and of each short string, and they are taken for
# one if type and value agree, and so are numbers that vary. Where two objects of one class are found to be different, the trace has
# learnt something that the next call may contradict by passing the same object twice. `told_apart` collects
# such classes, and capture guards that their objects are different ones.
#
# Numbers that are equal may be taken for one, as containers ask for the one or the other. Only a NaN is not equal to itself: whether two
# that came in are one object is for Python to see, and that a number is none is asked where it is found to be another than one beside it.

# %%
def refuse_nans(a: AbstractValue, b: AbstractValue) -> None:
    came_in = all(type(v) is Const or type(v) is SymVal and v.source is not None for v in (a, b))
    if came_in and a.cls is b.cls and issubclass(a.cls, MAY_BE_NAN):
        left, right = (v.sym if type(v) is SymVal else v.value for v in (a, b))
        if not left == right and left != left and right != right:
            raise Unsupported("whether two NaNs are one object")


def identical(a: AbstractValue, b: AbstractValue) -> bool:
    """a is b"""
    if a is b:
        return True
    refuse_nans(a, b)
    if type(a) is Const and type(b) is Const:
        return a.value is b.value or type(a.value) is type(b.value) and type(a.value) in (int, str, bool) \
            and a.value == b.value
    if SymVal in (type(a), type(b)) and {type(a), type(b)} <= {Const, SymVal} and a.cls is b.cls:
        left, right = (v.sym if type(v) is SymVal else v.value for v in (a, b))
        return bool(left == right)
    if type(a) is ObjVal and type(b) is ObjVal and a.real is b.real and a.real is not None:
        return True
    if type(a) is type(b) is TupleVal and a.cls is b.cls is tuple and not a.items and not b.items:       # Python has one
        return True
    if a.cls is b.cls:
        captures[-1].told_apart.add(a.cls)
    return False


def equal(tx: Tracer, a: AbstractValue, b: AbstractValue) -> bool:
    """a is b or a == b, which is how containers compare their items."""
    if a is b:
        return True
    refuse_nans(a, b)
    return not (varies_in(a) or varies_in(b)) and identical(a, b) or truth(tx, compare(tx, "==", a, b))


# %% [markdown]
# Python compares in an order that `compare` repeats. Numbers and tensors come first (`compare_plain`),
# because most comparisons are of numbers, and a comparison with a tensor is an operation of the graph. Then
# both operands are asked for their methods: the left one for `__lt__`, the right one for the mirror image
# `__gt__`, and the right one first if its class is derived from the left one's. Whoever comes behind a method that is C and knows the
# other operand is not asked: a class derived from `int` with a `__lt__` only has its `>` from `int`. `!=` without
# a `__ne__` of the program's is the opposite of `==` (`own_comparison`). Lists and tuples are compared by
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
    if kinds <= GRAPH_KINDS:
        return compare_plain(tx, symbol, function, a, b)
    methods, (left, right) = [(a, f"__{COMPARE[symbol]}__", b), (b, f"__{COMPARE[MIRROR[symbol]]}__", a)], (a.cls, b.cls)
    if right is not left and issubclass(right, left):                    # then the right one is asked first
        methods.reverse()
    asked = list(itertools.takewhile(lambda m: not answers_itself(m[0], m[1], m[2].cls), methods))
    result = ask(tx, asked, own_comparison)
    if result is not None:
        return result
    if ObjVal in kinds:
        # A dict or list subclass whose own method, if any, was asked and left the answer to dict or list, as Counter does
        inner = [contents_of(tx, v) or v if type(v) is ObjVal else v for v in (a, b)]
        if (of := {type(v) for v in inner}) == {ListVal} or of == {DictVal} and symbol in ("==", "!="):
            return compare(tx, symbol, *inner)
    if kinds in ({TupleVal}, {ListVal}):
        return compare_sequences(tx, function, a, b)
    if kinds == {CellVal}:
        unsupported(tx, "a comparison of cells, which compares what they hold")
    if kinds != {DictVal}:                   # Python would take two NaNs in them for one or not, as they are one now
        with contextlib.suppress(NotConstant):
            return fold(tx, function, [a, b])
    if symbol in ("==", "!=") and TensorVal not in kinds:
        return boolean(same(tx, a, b) == (symbol == "=="))
    if TensorVal not in kinds and asked == methods:
        raise_as_python(tx, function, COMPARE[symbol], a, b)
    unsupported(tx, f"{describe(a)} {symbol} {describe(b)}")


def own_comparison(tx, owner, name, other) -> AbstractValue | None:
    if name != "__ne__" or lookup(owner.cls, name) is not object.__ne__:
        return special(tx, owner, name, other)
    return opposite(tx, special(tx, owner, "__eq__", other))


def opposite(tx, answer: AbstractValue | None) -> AbstractValue | None:
    """What `object.__ne__` makes of an answer of `__eq__`."""
    return answer if answer is None or answer.cls is types.NotImplementedType else boolean(not truth(tx, answer))


def equal_as_objects(tx, self, other) -> AbstractValue:
    """`object.__eq__`, which knows an object itself and leaves all others to the other operand."""
    return TRUE if identical(self, other) else const(NotImplemented)


def unequal_as_objects(tx, self, other) -> AbstractValue:
    """`object.__ne__`"""
    if lookup(self.cls, "__eq__") is object.__eq__:
        return opposite(tx, equal_as_objects(tx, self, other))
    return opposite(tx, special(tx, self, "__eq__", other)) or unsupported(tx, f"object.__ne__ of {describe(self)}")


def equal_in_c(tx, self, other) -> AbstractValue | None:
    """What the `__eq__` of a class written in C says of its object, whose own class may have another; None if that is not clear."""
    if type(self) is Const and (type(other) is Const or isinstance(lookup(self.cls, "__eq__"), types.FunctionType)):
        return None                                      # then it is called (`method_of_constant`)
    if not may_know(self, other) or type(self) is Const and type(other) is TensorVal:
        return equal_as_objects(tx, self, other)
    other = contents_of(tx, other) or other if type(other) is ObjVal else other
    kinds = {type(self), type(other)}
    if kinds in ({TupleVal}, {ListVal}):
        return compare_sequences(tx, operator.eq, self, other)
    if kinds == {DictVal}:
        return boolean(same_dict(tx, self, other))
    related = issubclass(self.cls, other.cls) or issubclass(other.cls, self.cls)
    return compare(tx, "==", self, other) if TensorVal in kinds or related else None


# class in C -> whose objects its `__eq__` compares with its own. That of None, which it has from Python 3.12 on, knows None only.
KNOWN_TO_EQ = {object: (), types.NoneType: (), list: list, tuple: tuple, dict: dict, collections.OrderedDict: dict,
               collections.deque: collections.deque, set: (set, frozenset), frozenset: (set, frozenset), str: str, bytes: bytes,
               int: int, float: (int, float)}


def may_know(value, other) -> bool:
    """Whether the `__eq__` that is in C among those of the value's class may compare it with the other, and not leave that to the other."""
    in_c = next(c for c in value.cls.__mro__ if not isinstance(vars(c).get("__eq__"), (types.NoneType, types.FunctionType)))
    return issubclass(other.cls, KNOWN_TO_EQ.get(in_c, object))


def same(tx, a, b) -> bool:
    """a == b, where neither has a method that knows."""
    if type(a) is type(b) is DictVal:
        return same_dict(tx, a, b)
    if type(a) is type(b) is MethodVal:
        return identical(a.func, b.func) and identical(a.self, b.self)
    if type(a) is type(b) is MethodName:
        return a.name == b.name and identical(a.self, b.self)
    if all(issubclass(v.cls, types.SimpleNamespace) for v in (a, b)) and \
            any(lookup(v.cls, "__eq__") is types.SimpleNamespace.__eq__ for v in (a, b)):
        return equal(tx, *(get_attribute(tx, v, "__dict__") for v in (a, b)))
    if issubclass(a.cls, BUILTIN_DATA) | issubclass(b.cls, BUILTIN_DATA) and not may_know(a, b) and not may_know(b, a):
        return identical(a, b)
    if issubclass(a.cls, NEED_NOT_EQUAL_THEMSELVES) or not identical(a, b) and not all(compares_by_identity(v) for v in (a, b)):
        unsupported(tx, f"{describe(a)} == {describe(b)}")
    return identical(a, b)


# An array answers with an array, and a NaN is not equal to itself
NEED_NOT_EQUAL_THEMSELVES = (float, complex, numpy.ndarray, decimal.Decimal, array.array, memoryview)


def same_dict(tx, a, b) -> bool:
    for one, other in ((a, b), (b, a)):
        for known in [known for key, (known, _) in one.items.items() if objects_in_key(key)]:
            key_in(tx, other, realize(tx, known))           # which key an object is, or that it is none, is a question for later calls
    left, right = entries(tx, a), entries(tx, b)
    return len(left) == len(right) and all(
        key in right and equal(tx, realize(tx, item), realize(tx, right[key][1])) for key, (_, item) in left.items()) and (
        {a.cls, b.cls} != {collections.OrderedDict} or list(left) == list(right))


BUILTIN_DATA = (int, float, complex, str, bytes, tuple, list, dict, set, frozenset)
EQ_OF_BUILTINS = [c.__dict__["__eq__"] for c in (object, *BUILTIN_DATA, range, slice, types.SimpleNamespace)]
LIKE_BUILTINS = (*BUILTIN_DATA, collections.UserDict, collections.UserList, collections.UserString)


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
    if decimal.Decimal in (a.cls, b.cls):                    # which equals numbers, and is none that a symbol knows
        return fold(tx, function, [specialize(a), specialize(b)])
    if not in_floats(a) or not in_floats(b) or rounds_other(a, b) or rounds_other(b, a):
        return fold(tx, function, [a, b])
    try:
        answer = function(*(v.sym if type(v) is SymVal else v.value for v in (a, b)))
        return const(numpy.bool_(bool(answer))) if a.cls in NUMPY_SCALARS or b.cls in NUMPY_SCALARS else boolean(answer)
    except TypeError:                                        # whose words name the class of the symbol
        with user_errors():
            function(*(v.cls(1) if type(v) is SymVal else v.value for v in (a, b)))
        raise


def in_floats(value) -> bool:
    """Whether a float may stand for it in a comparison. Python compares a float and a large int exactly, where symbols would round."""
    return type(value) is not Const or not isinstance(value.value, int) or abs(value.value) <= 2**53


def rounds_other(scalar, value) -> bool:
    """Whether NumPy rounds a number to the class of a scalar before it compares them: `np.float32(0.1) == 0.1`."""
    return scalar.cls in (numpy.float16, numpy.float32) and value.cls in (int, float)


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
