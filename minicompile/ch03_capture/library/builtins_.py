# %% [markdown]
# # Builtin functions
#
# `len`, `zip`, `isinstance`, `getattr`: the small change of Python. Each handler says what the builtin does
# to values. Most are one call of something that the interpreter knows anyway. Iterators stay lazy, so
# `zip(self.layers, itertools.count())` ends.

# %%
import collections
import abc
import contextlib
import functools
import inspect
import itertools
import math
import operator
import pdb
import re
import sys
import types

import torch

from ...ch02_guards.identity import is_a, is_long_lived, module_name
from ...errors import SkipFrame, Unsupported
from ..attributes import get_attribute, has_attribute, set_attribute
from ..builders import as_python, hung_on
from ..calls import HANDLED, guard_function, handles, keywords_of
from ..comparisons import Deputy, identical, truth
from ..constants import as_number
from ..descriptors import in_library, is_library_class
from ..exceptions import user_error, user_errors
from ..interpreter import is_empty, read_cell, read_local, unless_raised
from ..iterate import Later, iterate, length, natively, next_value, rest_of, unpack, values_of
from ..keys import guard_keys
from ..lookup import MISSING, is_plain_tuple, lookup, python_method, says_its_class
from ..operations import binary, fold, later, printed
from ..protocol import METHODS, method, special
from ..tracer import answer, bases, call, location, plain_python, unsupported
from ..values import (
    AbstractValue, Const, DictVal, ExcVal, FALSE, FuncVal, IterVal, ListVal, MethodVal, NONE, NotConstant, ObjVal, PartialVal,
    SliceVal, SuperVal, SymVal, TRUE, TensorVal, TupleVal, boolean, const, describe, dict_of, is_class, is_unseen, specialize)
from ..varying import computed
from ..wrap import is_made_per_call, wrap
from .containers import dict_update, result_of, set_of, sort_values, stop_iteration
from .numbers import ONE, ZERO

EMPTY = TupleVal()


# %% [markdown]
# ## Making containers
#
# The interpreter's own containers hold values, so a constructor is a line that makes one of them from the items of
# its argument. `unpack` gives these items for everything that can be iterated over. What fills a dictionary goes
# through `dict_update`, as in Python.

# %%
def filled(tx, dictionary, other, kwargs=None):
    dict_update(tx, dictionary, other, **(kwargs or {}))
    return dictionary


def from_keys(cls, tx, keys, value=NONE):
    return filled(tx, DictVal(cls=cls), ListVal(items=[TupleVal(items=[key, value]) for key in values_of(tx, keys)]))


def torch_size(tx, items) -> TupleVal:
    """A torch.Size, which has whole numbers only."""
    for i, item in enumerate(items):
        if type(item) is TensorVal and (item.fake.is_floating_point() or item.fake.is_complex() or item.fake.dim()):
            items[i] = None
        elif type(item) is not SymVal or item.cls is not int:
            items[i] = unless_raised(TypeError, lambda: HANDLED[operator.index](tx, item))
        if items[i] is None:
            user_error(TypeError, f"torch.Size() takes an iterable of 'int' (item {i} is '{item.cls.__name__}')")
    return TupleVal(items=items, cls=torch.Size)


# %% [markdown]
# A row is called with the trace and the values of the arguments, so its parameters are those of the constructor in Python. What
# is no container but stands for one, as a `deque` does for a list, is told by its class.

# %%
HANDLED.update({
    list: lambda tx, items=EMPTY: ListVal(items=unpack(tx, items)),
    torch.Size: lambda tx, items=EMPTY: torch_size(tx, unpack(tx, items)),
    tuple.__new__: lambda tx, cls, items=EMPTY: TupleVal(items=unpack(tx, items), cls=cls.real) if is_plain_tuple(cls.real) else
        unsupported(tx, f"making a {cls.real.__name__}, a tuple that is looked at in ways of its own"),
    set: lambda tx, items=EMPTY: set_of(tx, items),
    frozenset: lambda tx, items=EMPTY: items if items.cls is frozenset else set_of(tx, items, frozenset),
    collections.deque: lambda tx, items=EMPTY, maxlen=NONE: ListVal(
        items=collections.deque(values_of(tx, items), maxlen.value), cls=collections.deque),
    slice: lambda tx, start, stop=None, step=NONE, /: SliceVal(NONE, start, NONE) if stop is None else SliceVal(start, stop, step),
    dict: lambda tx, other=None, /, **kwargs: filled(tx, DictVal(), other, kwargs),
    **{cls.fromkeys: functools.partial(from_keys, cls) for cls in (dict, collections.OrderedDict, collections.defaultdict)},
    collections.defaultdict: lambda tx, factory=NONE, other=None, /, **kwargs: filled(
        tx, DictVal(cls=collections.defaultdict, factory=None if factory is NONE else factory), other, kwargs),
    collections.OrderedDict: lambda tx, other=None, /, **kwargs: filled(tx, DictVal(cls=collections.OrderedDict), other, kwargs),
})


METHODS.update({(kind, "__call__"): lambda tx, self, /, *args, **kwargs: call(tx, self, args, kwargs) for kind in (FuncVal, PartialVal)})


@handles(tuple)
def make_tuple(tx, items=EMPTY):
    if type(items) is TupleVal and items.cls is tuple:
        return items
    return TupleVal(items=unpack(tx, items))


@handles(range)
def make_range(tx, *args):
    args = list(map(as_number, args))
    if any(type(a) is TensorVal for a in args):
        unsupported(tx, "range() of a tensor")
    plain = {a.cls for a in args} == {int} and all(type(step) is Const and step.value for step in args[2:])
    made = later(tx, range, range, args) if plain else None
    return made or fold(tx, range, [specialize(a) for a in args])


# %% [markdown]
# ## Texts
#
# `str(x)` of an object asks its class for a method written in Python, and traces it. Containers are harder, since
# `str([a, b])` calls `repr` of each item from inside of C. So the real function is called, on a container in which
# what has a text of its own is a deputy. `printable` builds that container, item by item.

# %%
def text_handler(function, methods):
    """str, repr and their like: the program's own method if it has one, else the text of a constant."""
    def handler(tx, *args, **kwargs):
        value = args[0] if args else None
        if type(value) is TensorVal:
            unsupported(tx, "the text of a tensor")
        if type(value) is ExcVal and len(args) == 1 and function in (str, repr):
            return text_of_exception(tx, function, value)
        if type(value) in (ObjVal, TupleVal) and (not is_class(value) or any(python_method(value.cls, m) for m in methods)):
            for method in methods:
                text = special(tx, value, method)
                if text is not None:
                    return text
                if lookup(value.cls, method) is not getattr(object, method):         # written in C
                    break
        if len(args) == 1 and (type(value) in (ListVal, TupleVal, DictVal) or is_named(value)):
            return fold_text(tx, function, args, kwargs)
        return text_later(tx, function, args, kwargs) or fold(tx, function, args, kwargs)
    return handler


# %% [markdown]
# The text of a number that varies is made `later`, by the generated code, but for texts that only some numbers have: of a character by its
# number, which may be out of range, of an item, or of a width that varies. Tuples of constants, such as shapes, count as constants there.

# %%
RISKY = {format: r"c$", printed: r"%[^a-zA-Z%]*[c*]", str.format: r"\{[^{}]*([{[]|c\})"}


def text_later(tx, function, args, kwargs=None):
    texts = [a.value for a in args if type(a) is Const and not is_unseen(a) and type(a.value) is str] if function in RISKY else []
    return None if any(re.search(RISKY[function], text) for text in texts) else later(tx, str, function, args, kwargs)


def as_constant(tx, value):
    """A tuple of constants, such as a shape, as one; any other value as it is."""
    if type(value) is TupleVal:
        with contextlib.suppress(NotConstant):
            return const(as_python(tx, value))
    return value


def is_named(value) -> bool:
    """Whether it is a class or a Python module, whose text is made of its name."""
    return is_a(getattr(value, "real", None), (type, types.ModuleType))


def printable(tx, value, inside=False):
    """as_python(value) for printing: what has a text of its own is a deputy, and the text of a class is asked for again in each call.
    inside: attributes and items of it are printed, too, or the number that it is, which a deputy has not."""
    def instead(v):
        if type(v) in (ObjVal, TupleVal, ExcVal) and any(python_method(v.cls, m) for m in ("__repr__", "__str__", "__format__")):
            if inside:
                raise NotConstant
            return Deputy(tx, v)
        if is_named(v) and v.real not in tx.classes.made and not is_long_lived(v.real):
            answer(tx, texts, v.real)
    return as_python(tx, value, instead)


def texts(named) -> tuple:
    return repr(named), str(named)


def fold_text(tx, function, args, kwargs=None, inside=False):
    """fold() for functions that only print their arguments."""
    if (made := computed(tx, function, args, kwargs or {})) is not None:
        return made
    with user_errors():
        return const(function(*[printable(tx, a, inside) for a in args], **{
            k: printable(tx, v, inside) for k, v in (kwargs or {}).items()}))


@METHODS.of((Const, "format"))
def format_method(tx, text, /, *args, **kwargs):
    inside = re.search(r"\{[^{}:!]*[.[]", text.value) is not None
    return text_later(tx, str.format, [const(text.value), *args], kwargs) or fold_text(tx, text.value.format, args, kwargs, inside)


@METHODS.of((Const, "__mod__"))
def printf(tx, text, value):
    if type(text.value) is not str:
        return None
    operands = [as_constant(tx, v) for v in (unpack(tx, value) if type(value) is TupleVal and value.cls is tuple else [value])]
    if (made := text_later(tx, printed, [const(text.value), *operands])) is not None:
        return made
    inside = re.search(r"%(\(.*?\))?[-#0 +.*\d]*[hlL]?[^\W\dsrahlL]", text.value) is not None
    if type(value) is not TupleVal:
        mapping = type(value) is ObjVal and lookup(value.cls, "__getitem__") is not MISSING
        return fold_text(tx, text.value.__mod__, [value], inside=inside or mapping)
    with user_errors():
        return const(text.value % tuple(printable(tx, v, inside) for v in unpack(tx, value)))


# %% [markdown]
# The text of an exception is made of its arguments, which the trace knows: of none it is empty, of one it is that
# one's text, of several the text of a tuple.

# %%
def text_of_exception(tx, function, value):
    """str() or repr() of an exception: by a method of the program, or as BaseException and KeyError do it."""
    own = lookup(value.cls, f"__{function.__name__}__")
    if isinstance(own, types.FunctionType):
        return call(tx, wrap(tx, own), [value])
    if own is BaseException.__str__ and len(value.args) == 1:
        return HANDLED[str](tx, value.args[0])
    if own not in (BaseException.__str__, KeyError.__str__, BaseException.__repr__):
        return fold(tx, function, [value])
    alike = type(value.cls.__name__, (KeyError if own is KeyError.__str__ else BaseException,), {})
    with user_errors():
        return const(function(alike(*(printable(tx, a) for a in value.args))))


for _function, _methods in {str: ("__str__", "__repr__"), repr: ("__repr__",), ascii: ()}.items():
    HANDLED[_function] = text_handler(_function, _methods)


@handles(format)
def to_format(tx, value, spec=const("")):
    if identical(spec, const("")) and lookup(value.cls, "__format__") is vars(object)["__format__"]:
        return HANDLED[str](tx, value)
    if type(value) is not ObjVal:
        return text_handler(format, ())(tx, value, spec)
    return special(tx, value, "__format__", spec) or fold(tx, format, [value, spec], reason="format() of an object")


# %% [markdown]
# A function that only computes, such as `hex`, is called at compile time if all of its arguments are constants
# (`folded`).

# %%
def folded(function):
    """The handler of a pure function: constants only."""
    return lambda tx, *args, **kwargs: fold(tx, function, args, kwargs)


for _function in (ord, chr, hex, bin, oct, int.from_bytes, str.maketrans):
    HANDLED[_function] = folded(_function)


# %% [markdown]
# What asks for all items is written with the operators of `operations.py` and `comparisons.py`, item by item, so that each step
# may be on tensors, symbols or objects. `max` is Python's own, with deputies for keys: over symbolic numbers it asks a question for
# each comparison, and each answer is a guard. Of a symbol and a number that are equal it takes the symbol. Of three symbols and more,
# such as the lengths of texts to be padded, any may be the largest; then the entry asks Python.

# %%
@handles(sum)
def total(tx, items, start=ZERO):
    if start.cls in (str, bytes, bytearray):
        unsupported(tx, "sum() of strings")
    if items.cls is range and (made := computed(tx, sum, [items, start], {})) is not None:
        return made
    return functools.reduce(lambda a, b: binary(tx, "+", a, b), values_of(tx, items), start)


@method(TupleVal, "numel")
@handles(math.prod)
def product(tx, items, *, start=ONE):
    return functools.reduce(lambda a, b: binary(tx, "*", a, b), values_of(tx, items), start)


def leading_numbers(values) -> tuple:
    """The numbers that values begin with, which can be compared in any order, and an iterator over the rest, or None where that is all."""
    values, numbers = iter(values), []
    for value in values:
        if type(value) not in (Const, SymVal) or value.cls not in (int, float):
            return numbers, itertools.chain([value], values)
        numbers.append(value)
    return numbers, None


def max_or_min(function):
    def handler(tx, *args, key=NONE, **default):
        first = args[0] if len(args) == 1 else TupleVal(items=list(args))
        known = unpack(tx, first) if type(first) in (TupleVal, ListVal) else []
        if {type(v) for v in known} == {SymVal, Const} and {v.cls for v in known} == {int}:
            first = TupleVal(items=sorted(known, key=lambda v: type(v) is Const))
        measure, items = function_of(tx, key, lambda v: v), values_of(tx, first)
        with user_errors():
            if key is NONE and not default:
                numbers, items = leading_numbers(items)
                many = items is None and len({str(v.sym) for v in numbers if type(v) is SymVal}) > 2 and len({v.cls for v in numbers}) == 1
                if many and (made := computed(tx, function, [TupleVal(items=numbers)], {})) is not None:
                    return made
                items = numbers if items is None else itertools.chain(numbers, items)
            return function(*([items] if len(args) == 1 else items), key=lambda v: Deputy(tx, measure(v)), **default)
    return handler


HANDLED.update({
    any: lambda tx, items: boolean(any(truth(tx, v) for v in values_of(tx, items))),
    all: lambda tx, items: boolean(all(truth(tx, v) for v in values_of(tx, items))),
    min: max_or_min(min),
    max: max_or_min(max),
})


# %% [markdown]
# ## Iterators
#
# `itertools` is written in C, but it does not care what it iterates over: values will do. So the real function is called, and is as
# lazy as it is in the program: a value is made when somebody asks for it. `TAKES` says, argument by argument, what stands for a value
# there: a Python iterator over the *values* of an iterable, which is asked for its iterator now (`ITERATED`) or, as by `chain`, `later`,
# all of its values (`pool`), a Python function that calls a traced one (`function_of`), a number. `as_value` is the way back, for an
# iterator item by item. What it was `made` by is kept, for the epilogue.

# %%
def function_of(tx, function, default=None):
    """The traced function as a Python function of values; `default` stands for None, if None may be given."""
    return default if function is NONE and default is not None else lambda *args: call(tx, function, list(args))


def test_of(tx, function):
    keep = function_of(tx, function, lambda v: v)
    return lambda v: truth(tx, keep(v))


def as_value(tx, made) -> AbstractValue:
    """What Python made of values."""
    if isinstance(made, (AbstractValue, Deputy)):
        return made.value if type(made) is Deputy else made
    if type(made) is tuple:
        return TupleVal(items=[as_value(tx, part) for part in made])
    if not hasattr(made, "__next__"):
        return const(made)
    return IterVal(it=natively(map(functools.partial(as_value, tx), made)), kind=type(made))


ITERATED = {"iterable": rest_of, "tests": lambda tx, v: map(functools.partial(truth, tx), rest_of(tx, v)),
            "rows": lambda tx, v: map(functools.partial(unpack, tx), rest_of(tx, v)),
            "iterables": lambda tx, v: map(functools.partial(Later, tx), rest_of(tx, v))}
TAKES = {**ITERATED, "later": Later, "pool": lambda tx, v: v.items, "function": function_of, "test": test_of, "value": lambda tx, v: v,
         "number": lambda tx, v: v.value}


def on_values(function, takes):
    """The handler of a function that may run on values. takes: what its arguments are; the last word is for the rest of them, too."""
    words = takes.split()

    def handler(tx, *args, **named):
        asked = [(w, iterate(tx, a) if w in ITERATED else TupleVal(items=unpack(tx, a)) if w == "pool" else a)
                 for w, a in zip(itertools.chain(words, itertools.repeat(words[-1])), args)]
        with user_errors():
            result = as_value(tx, function(*[TAKES[word](tx, a) for word, a in asked],
                                           **{k: v if k == "fillvalue" else v.value for k, v in named.items()}))
        if type(result) is IterVal:
            result.made = function, [a for _, a in asked], named
        return result
    return handler


HANDLED.update({function: on_values(function, takes) for function, takes in {
    zip: "iterable", map: "function iterable", filter: "test iterable", itertools.filterfalse: "test iterable",
    itertools.takewhile: "test iterable", itertools.dropwhile: "test iterable", itertools.starmap: "function rows",
    itertools.chain: "later", itertools.chain.from_iterable: "iterables", itertools.cycle: "iterable", itertools.pairwise: "iterable",
    itertools.zip_longest: "iterable", itertools.product: "pool", itertools.compress: "iterable tests",
    itertools.count: "number", itertools.repeat: "value number", itertools.islice: "iterable number", itertools.tee: "iterable number",
    itertools.combinations: "pool number", itertools.permutations: "pool number",
    itertools.combinations_with_replacement: "pool number"}.items()})


# %% [markdown]
# `accumulate` adds by the operator of the program, `groupby` compares keys by its `==`, so these are deputies.

# %%
@handles(itertools.accumulate)
def accumulated(tx, iterable, func=NONE, *, initial=NONE):
    add = function_of(tx, func, lambda a, b: binary(tx, "+", a, b))
    items = rest_of(tx, iterate(tx, iterable))
    return as_value(tx, itertools.accumulate(items, add, initial=None if initial is NONE else initial))


@handles(itertools.groupby)
def grouped(tx, iterable, key=NONE):
    measure = function_of(tx, key, lambda v: v)
    return as_value(tx, itertools.groupby(rest_of(tx, iterate(tx, iterable)), lambda v: Deputy(tx, measure(v))))


@handles(next)
def take_next(tx, iterator, default=None):
    return next_value(tx, iterator) or default or stop_iteration(*result_of(iterator))


@handles(enumerate)
def enumerated(tx, iterable, start=ZERO):
    start, iterator = HANDLED[operator.index](tx, start), iterate(tx, iterable)
    pairs = map(lambda v, i: TupleVal(items=[binary(tx, "+", start, const(i)), v]), rest_of(tx, iterator), itertools.count())
    return IterVal(it=natively(pairs), kind=enumerate, made=(enumerate, [iterator, start], {}))


HANDLED.update({
    len: length,
    sorted: lambda tx, items, *, key=NONE, reverse=FALSE: ListVal(
        items=sort_values(tx, unpack(tx, items), key, reverse)),
})


# %% [markdown]
# ## Classes and attributes
#
# `isinstance` asks about classes, which are known for every value, and guards the bases of the program's. A class may answer by
# itself, by a metaclass with an `__instancecheck__` (for `issubclass`, a `__subclasscheck__`), which is traced if it is the program's.
# And an object may give out another class than its own as its `__class__`, by a property: a mock does, to pass for what it stands for.

# %%
@handles(isinstance)
def is_instance(tx, value, classes):
    if type(classes) is TupleVal:
        return boolean(any(is_instance(tx, value, cls) is TRUE for cls in unpack(tx, classes)))
    classes = as_python(tx, classes)
    own, real = own_check(classes, "__instancecheck__"), getattr(value, "real", None)
    if own and value.cls is not classes:
        return boolean(truth(tx, call(tx, wrap(tx, own), [wrap(tx, classes), value])))
    given = class_given_out(tx, value, classes)
    try:
        if is_protocol := getattr(classes, "_is_protocol", False):
            for name in {name for base in classes.__mro__ for name in vars(base)}:
                lookup(value.cls, name)
        for cls in (value.cls,) if given is None else (value.cls, given):
            if asks(classes) and not is_protocol and cls not in tx.classes.made:
                answer(tx, issubclass, cls, classes)
            bases(tx, cls)
        if given is not None:
            return boolean(issubclass(value.cls, classes) or issubclass(given, classes))
        if type(value) in (TensorVal, ObjVal) and real is not None:
            return boolean(isinstance(real, classes))
        return boolean(issubclass(value.cls, classes))
    except Unsupported:
        raise
    except Exception:
        unsupported(tx, "isinstance() with a second argument that does not tell")


def class_given_out(tx, value, classes):
    """The `__class__` for which `isinstance` asks if the type is not derived from `classes`; None if nothing but the type counts."""
    cls = value.cls
    if cls is classes or type(classes) is type and issubclass(cls, classes) or not (
            says_its_class(cls) or python_method(cls, "__getattribute__")):
        return None
    if any(getattr(c, "_is_protocol", False) for c in (classes.__args__ if type(classes) is types.UnionType else (classes,))):
        unsupported(tx, f"isinstance() of {describe(value)}, which may give out another class, and a protocol, which looks at the object")
    found = unless_raised(AttributeError, lambda: get_attribute(tx, value, "__class__"))
    if found is not None and is_class(found):
        return found.real
    if type(classes) is not type:                            # an abstract class does not take no for an answer
        unsupported(tx, f"isinstance() of {describe(value)}, which gives out no class")
    return cls


def own_check(cls, name: str):
    """The `__instancecheck__` or `__subclasscheck__` that the program has written for a class, or None."""
    own = python_method(type(cls), name)
    return own and not ((name := module_name(own)) in sys.modules and in_library(sys.modules[name])) and own or None


# %% [markdown]
# An abstract class of the program may be told of further classes (`register`), so it is asked again in each call. What a protocol asks for
# are the names that it has, each of which is a search in a class.

# %%
def asks(cls) -> bool:
    """Whether a class of the program may take another class for derived from it later."""
    return isinstance(cls, abc.ABCMeta) and not is_library_class(cls)


@handles(issubclass)
def is_subclass(tx, cls, classes):
    if type(classes) is TupleVal:
        return boolean(any(is_subclass(tx, cls, one) is TRUE for one in unpack(tx, classes)))
    real, answers = as_python(tx, cls), as_python(tx, classes)
    if own := own_check(answers, "__subclasscheck__"):
        return boolean(truth(tx, call(tx, wrap(tx, own), [classes, cls])))
    if isinstance(real, type):
        bases(tx, real)
    if asks(answers) and isinstance(real, type) and real not in tx.classes.made:
        try:
            return boolean(answer(tx, issubclass, real, answers))
        except Exception:
            unsupported(tx, "issubclass() that raises")
    return fold(tx, issubclass, [cls, classes])


# %% [markdown]
# Attributes by name.

# %%
@handles(getattr)
def get_attr(tx, value, name, default=None):
    name = attribute_name(name)
    if default is None:
        return get_attribute(tx, value, name)
    return unless_raised(AttributeError, lambda: get_attribute(tx, value, name)) or default


def attribute_name(name) -> str:
    if type(name.value) is not str:
        user_error(TypeError, f"attribute name must be string, not '{name.cls.__name__}'")
    return name.value


# %% [markdown]
# `super()` without arguments finds its class in a cell that the compiler has made for it, `__class__`, and its
# object in the first argument of the method. The other functions of this part are other names for what
# `attributes.py` does.

# %%
@handles(super)
def make_super(tx, cls=None, obj=None, /, **named):
    if named:
        user_error(TypeError, "super() takes no keyword arguments")
    if cls is None:
        frame = tx.frames[-1]
        if not frame.code.co_argcount:
            user_error(RuntimeError, "super(): no arguments")
        first = frame.code.co_varnames[0]
        obj = read_local(tx, frame, first) if first in frame.locals else None
        if first in frame.code.co_cellvars:
            obj = None if is_empty(tx, obj) else read_cell(tx, obj, first)
        if obj is None:
            user_error(RuntimeError, "super(): arg[0] deleted")
        if "__class__" not in frame.code.co_freevars:
            user_error(RuntimeError, "super(): __class__ cell not found")
        cls = read_cell(tx, frame.locals["__class__"], "__class__")
    if not is_class(cls):
        user_error(TypeError, f"super() argument 1 must be a type, not {cls.cls.__name__}")
    fits = obj is not None and (issubclass(obj.cls, cls.real) or is_class(obj) and issubclass(
        obj.real, cls.real))
    if not fits:
        unsupported(tx, "super() without an object of its class")
    return SuperVal(after=cls.real, self=obj)


@handles(functools.partial)
def make_partial(tx, function, /, *args, **kwargs):
    """One of a partial is one of that one's function, unless that one has a `__dict__`."""
    if type(function) is PartialVal and hung_on(tx, function) is None:
        function, args, kwargs = function.func, (*function.args, *args), {**keywords_of(tx, function), **kwargs}
    elif type(function) is ObjVal and issubclass(function.cls, functools.partial):
        unsupported(tx, "a partial of a partial")
    partial = PartialVal(func=function, args=list(args))
    partial.keywords = dict_of(kwargs, owner=partial)
    return partial


@handles(types.MappingProxyType)
def make_mapping_proxy(tx, mapping):
    if type(mapping) is not DictVal:
        unsupported(tx, "a MappingProxyType of this mapping")
    METHODS[DictVal, "keys"](tx, mapping)
    guard_keys(tx, mapping)
    return DictVal(items=mapping.items, cls=types.MappingProxyType)


HANDLED.update({
    callable: lambda tx, value: boolean(lookup(value.cls, "__call__") is not MISSING),
    hasattr: lambda tx, value, name: boolean(has_attribute(tx, value, attribute_name(name))),
    setattr: lambda tx, value, name, new: set_attribute(tx, value, attribute_name(name), new),
    delattr: lambda tx, value, name: set_attribute(tx, value, attribute_name(name), None),
    vars: lambda tx, value: unless_raised(AttributeError, lambda: get_attribute(
        tx, value, "__dict__")) or unsupported(tx, "vars() of what has no __dict__"),
    object: lambda tx: ObjVal(cls=object),
    types.MethodType: lambda tx, function, self: MethodVal(func=function, self=self),
    types.SimpleNamespace: lambda tx, /, **attributes: ObjVal(
        cls=types.SimpleNamespace, attrs=attributes),
})


# %% [markdown]
# ## Functions of functions

# %%
@handles(inspect.signature)
def signature(tx, function):
    """The signature of a function or a method, which only its code and its defaults decide, or those of the function that it wraps."""
    method = type(function) is MethodVal
    inner = function.func if method else function
    real = getattr(inner, "real", None)
    while True:
        found = getattr(inner, "real", None)
        if type(found) is not types.FunctionType or is_made_per_call(found) and (found.__defaults__ or found.__kwdefaults__) or \
                has_attribute(tx, inner, "__signature__"):
            unsupported(tx, f"inspect.signature() of {describe(function)}")
        if not is_made_per_call(found):
            guard_function(tx, found)
        if not has_attribute(tx, inner, "__wrapped__"):
            break
        inner = get_attribute(tx, inner, "__wrapped__")
    return wrap(tx, inspect.signature(types.MethodType(real, tx) if method else real))


# %% [markdown]
# What looks at the program itself, or talks to the world, ends the graph.

# %%
def refused(reason):
    return lambda tx, *args, **kwargs: unsupported(tx, reason)


HANDLED[print] = refused("print()")
for _function in (open, input):
    HANDLED[_function] = refused(f"{_function.__name__}(), which reads a file")
for _function in (globals, eval, compile):
    HANDLED[_function] = refused("a builtin that looks at or runs the program itself")


@handles(exec)
def run_text(tx, text, *namespaces, **named):
    """Without a namespace, what it makes is kept in the frame that calls it, for `eval` and `locals` to find."""
    refuse = unsupported if namespaces or named else plain_python
    refuse(tx, "a builtin that looks at or runs the program itself")


def needs_frame(function):
    """A debugger shows the frame it is called from, so that frame must be the user's own. Who reads `f_locals` may mean those of
    any caller, whose variables are all in place only where that caller runs as it is."""
    def refuse(tx, *args, **kwargs):
        reason = f"{function.__name__}() needs the frame of its caller"
        if any(mentions(frame.code, "f_locals") for frame in tx.frames):
            raise SkipFrame(reason, location(tx))
        plain_python(tx, reason)
    HANDLED[function] = refuse


def mentions(code: types.CodeType, name: str) -> bool:
    return name in code.co_names or any(mentions(c, name) for c in code.co_consts if type(c) is types.CodeType)


for _function in (breakpoint, pdb.set_trace, sys._getframe, inspect.currentframe, inspect.stack):
    needs_frame(_function)


# %% [markdown]
# From CPython 3.12 on, `dataclasses` and `typing` ask for no frame, but only for the name of the module that called, so that a class
# that they make can say where it was made. The frames of the trace know theirs.

# %%
@handles(*filter(None, [getattr(sys, "_getframemodulename", None)]))
def module_of_a_caller(tx, depth=const(0)):
    if not isinstance(depth, Const) or depth.value not in range(len(tx.frames)):
        plain_python(tx, "the module of a frame outside of what is compiled")
    return const(tx.frames[-1 - depth.value].globals.get("__name__"))
