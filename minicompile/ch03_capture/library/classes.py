# %% [markdown]
# # Classes made by the trace
#
# A `class` statement calls `__build_class__` with a function that fills the namespace. That function is
# inlined, and what it leaves behind is values, from which a class has to be made *now*: everything that the
# interpreter knows about classes (`lookup`, the method resolution order, `isinstance`) reads real ones.
#
# So a real class is made, one that only the trace sees. Its namespace holds stand-ins: for a function of the
# trace an empty function, for a tensor an empty object. The table `tracked` knows which value each of them
# stands for, and as every attribute that is read goes through `wrap`, the stand-ins are replaced as they are
# looked up. The class, and objects of it, do not leave the graph.
#
# Making a class runs code: the metaclass, `__init_subclass__`, `__set_name__`. `type`, `ABCMeta` and those of the standard
# library for Enums, named tuples and typed dictionaries do nothing that can be seen from outside, and run now; with any other
# metaclass the graph breaks.

# %%
import abc
import collections
import dataclasses
import enum
import functools
import types
import typing

from ...ch02_guards.identity import module_name
from ..attributes import GETATTR, SETATTR
from ..builders import as_python
from ..calls import HANDLED, handles
from ..exceptions import user_error, user_errors
from ..interpreter import inline
from ..iterate import unpack
from ..keys import stand_for
from ..lookup import MISSING, lookup, python_method
from ..opcodes_calls import named_values
from ..protocol import METHODS
from ..tracer import constant_source, unsupported
from ..values import (
    AbstractValue, BuiltinVal, CellVal, Const, DictVal, FuncVal, NONE, ObjVal, TupleVal, const, describe,
    is_class)
from ..wrap import wrap

METACLASSES = (type, abc.ABCMeta)
METACLASSES_OF_LIBRARY = (enum.EnumMeta, type(typing.TypedDict("_", {})), typing.NamedTupleMeta)
SPECIAL = ("__classcell__", "__annotations__")


class StandIn:
    """An object that stands for a value in the namespace of a class."""


REAL = (type, types.FunctionType, types.BuiltinFunctionType, StandIn)     # may be in a namespace as they are


HOLDERS = (property, staticmethod, classmethod, dataclasses.Field)


def empty_function(value: FuncVal | BuiltinVal):
    def function(*args, **kwargs):
        raise AssertionError("a stand-in is never called")
    function.__name__, function.__qualname__ = value.name, value.code.co_qualname if type(value) is FuncVal else value.name
    if type(value) is FuncVal and "__isabstractmethod__" in value.attrs:
        function.__isabstractmethod__ = True
    return function


def stand_in(tx, value: AbstractValue):
    """A real object for `value`; `wrap` gives the value back."""
    if type(value) is Const:
        return value.value
    if type(value) is ObjVal and isinstance(value.real, REAL):
        return value.real
    if type(value) is BuiltinVal and isinstance(value.stands_for, HOLDERS):
        return value.stands_for
    if type(value) is ObjVal and value.cls is enum.auto:
        return enum.auto()
    if type(value) is TupleVal and value.cls is tuple:
        return tuple(stand_in(tx, v) for v in unpack(tx, value))
    real = empty_function(value) if type(value) is FuncVal or type(value) is BuiltinVal and value.binds else StandIn()
    if isinstance(value, ObjVal) and any(lookup(value.cls, n) is not MISSING for n in (
            "__get__", "__set__", "__set_name__")):
        unsupported(tx, "a descriptor in a class of the trace")
    return stand_for(tx, real, value)


# %% [markdown]
# `build_class` is the `class` statement. CPython calls the body as a function whose variables land in a namespace,
# and so does the trace: the body is inlined with a dictionary of the trace for its namespace. `make_class` then
# makes a *real* class, because so much of Python asks classes for what they are (`isinstance`, the order of bases,
# `super()`). Its attributes are stand-ins, empty functions under whose identity the trace finds the values.
# `tx.classes.made` remembers the class, and nothing that is an instance of it may leave the trace. A metaclass, slots
# or `__init_subclass__` would run code in the middle of this, and break the graph.

# %%
@handles(__build_class__)
def build_class(tx, body, name, *bases, metaclass=None, **keywords):
    namespace = DictVal()
    if type(body) is not FuncVal:
        unsupported(tx, "a class statement")
    cell = inline(tx, body.code, name.value, body.globals, body.closure, (), {}, (), {}, namespace)
    return make_class(tx, name, bases, namespace, metaclass, keywords, cell)


def make_class(tx, name, bases, namespace, metaclass, keywords, cell=None):
    named = (typing.NamedTuple, typing.TypedDict)
    if any(not is_class(b) and (type(b) is not ObjVal or b.real not in named) for b in bases):
        unsupported(tx, "a class with a base that is no class")
    if metaclass is not None and not is_class(metaclass):
        unsupported(tx, "a class with a metaclass that is no class")
    reals = types.resolve_bases(tuple(b.real for b in bases))
    metas = {type(b) for b in reals} | ({metaclass.real} if metaclass is not None else set())
    if metaclass is None and type(reals[-1] if reals else None) in METACLASSES_OF_LIBRARY and not keywords:
        return made_by_library(tx, name.value, reals, attributes_of_class(tx, namespace))
    if keywords or not metas <= set(METACLASSES) or not all(plain_base(b) for b in reals):
        unsupported(tx, f"making the class {name.value}")
    attributes = attributes_of_class(tx, namespace)
    if any(hasattr(type(v), "__set_name__") and type(v) not in HOLDERS for v in attributes.values()):
        unsupported(tx, f"making the class {name.value} with descriptors")
    with user_errors():
        real = (abc.ABCMeta if abc.ABCMeta in metas else type)(name.value, reals, attributes)
    made = made_class(tx, real)
    if type(cell) is CellVal:                    # `__class__`, which the body returns if a method uses it
        cell.content = made
    return made


def attributes_of_class(tx, namespace) -> dict:
    attributes = {key: as_python(tx, value) if key == "__slots__" else stand_in(tx, value)
                  for key, value in named_values(tx, namespace).items() if key not in SPECIAL}
    if "__annotations__" in namespace.items:
        notes = named_values(tx, namespace.items["__annotations__"][1])
        attributes["__annotations__"] = {key: stand_in(tx, value) for key, value in notes.items()}
    return attributes


CALLED_BY_ENUM = ("__new__", "__init__", "_generate_next_value_", "_missing_", "__init_subclass__", "__set_name__")


def made_by_library(tx, name: str, bases: tuple, attributes: dict) -> AbstractValue:
    """A class whose metaclass makes more than a class. It looks at the attributes, and an Enum calls some of them (`CALLED_BY_ENUM`)."""
    kind, refused = type(bases[-1]), f"making the class {name}"
    values = (*attributes.values(), *attributes.get("__annotations__", {}).values())
    users = [base for base in bases if module_name(base) != "enum"]
    own = kind is enum.EnumMeta and (attributes.keys() & set(CALLED_BY_ENUM) or any(
        python_method(base, method) not in (None, python_method(enum.Enum, method)) for base in users for method in CALLED_BY_ENUM))
    if own or any(isinstance(value, StandIn) for value in values):
        unsupported(tx, refused)
    try:
        _, namespace, _ = types.prepare_class(name, bases)
        for key, value in attributes.items():
            namespace[key] = value
        real = kind(name, bases, namespace)
    except Exception:                            # to be raised by the program itself
        unsupported(tx, refused)
    return made_named_tuple(tx, real) if kind is typing.NamedTupleMeta else made_class(tx, real)


def made_class(tx, real) -> AbstractValue:
    tx.classes.made.add(real)
    return wrap(tx, real)


def made_named_tuple(tx, real) -> AbstractValue:
    namespace = real.__new__.__globals__         # of its own; the entry has it, when the class is gone
    tx.globals.sources[id(namespace)] = constant_source(tx, namespace)
    return made_class(tx, real)


def plain_base(cls) -> bool:
    """Whether deriving from a class runs no code of the program."""
    default = lookup(cls, "__init_subclass__") is object.__dict__["__init_subclass__"]
    return default and module_name(cls) not in ("torch.nn.modules.module", "enum")


# %% [markdown]
# `property`, `staticmethod` and `classmethod` hold functions, and so does the `field` of a dataclass. In a class of the trace they
# hold stand-ins (`made_holder`).

# %%
def holding(cls):
    @handles(cls)
    def make(tx, *functions, **named):
        with user_errors():
            return made_holder(tx, cls(*(stand_in(tx, f) for f in functions), **{k: stand_in(tx, v) for k, v in named.items()}))


def made_holder(tx, real):
    name = type(real).__name__
    tx.objects.keep.append(real)
    return BuiltinVal(name=name, stands_for=real, call=lambda tx, args, kwargs: unsupported(tx, f"a call of a {name}"))


@GETATTR.of(BuiltinVal)
def attribute_of_builtin(tx, value, name):
    """`@name.setter` and its like make another property."""
    if type(value.stands_for) is not property or name not in ("getter", "setter", "deleter"):
        unsupported(tx, f"the attribute {name} of {describe(value)}")
    return BuiltinVal(name=name, call=lambda tx, args, kwargs: made_holder(tx, getattr(value.stands_for, name)(stand_in(tx, *args))))


for _cls in (property, staticmethod, classmethod, dataclasses.field):
    holding(_cls)


# %% [markdown]
# `@dataclass` writes the source of `__init__` and runs it; on a class of the trace it may do so now.

# %%
@handles(dataclasses.dataclass)
def make_dataclass(tx, cls=None, **options):
    if cls is None or cls is NONE:
        return BuiltinVal(name="dataclass", call=lambda tx, args, _: make_dataclass(tx, *args, **options))
    stands_in = any(isinstance(v, StandIn) for v in vars(cls.real).values())
    if cls.real not in tx.classes.made or stands_in or "slots" in options and as_python(tx, options["slots"]):
        unsupported(tx, "dataclass() of this class")
    with user_errors():
        return wrap(tx, dataclasses.dataclass(cls.real, **{k: as_python(tx, v) for k, v in options.items()}))


@handles(functools.total_ordering)
def make_total_ordering(tx, cls):
    if getattr(cls, "real", None) not in tx.classes.made:
        unsupported(tx, "total_ordering() of a class that existed before")
    with user_errors():
        return wrap(tx, functools.total_ordering(cls.real))


@handles(collections.namedtuple)
def make_namedtuple(tx, *args, **named):
    named.setdefault("module", const(tx.frames[-1].globals.get("__name__", "__main__")))
    with user_errors():
        real = collections.namedtuple(*(as_python(tx, a) for a in args), **{k: as_python(tx, v) for k, v in named.items()})
    return made_named_tuple(tx, real)


HANDLED[type.__prepare__] = lambda tx, *bases, **keywords: DictVal()


@handles(type)
def type_call(tx, value, bases=None, namespace=None, /, **keywords):
    if bases is None:
        return wrap(tx, value.cls)
    if namespace is None:
        user_error(TypeError, "type() takes 1 or 3 arguments")
    names = tx.frames[-1].globals
    whole = DictVal()
    METHODS[DictVal, "update"](tx, whole, namespace)
    if "__name__" in names:
        METHODS[DictVal, "setdefault"](tx, whole, const("__module__"), const(names["__name__"]))
    return make_class(tx, value, unpack(tx, bases) or [wrap(tx, object)], whole, None, keywords)


@SETATTR.of(type)
def set_class_attribute(tx, cls: ObjVal, name: str, value: AbstractValue | None):
    """cls.name = value for a class of the trace."""
    new = None if value is None else stand_in(tx, value)
    with user_errors():
        delattr(cls.real, name) if value is None else setattr(cls.real, name, new)
