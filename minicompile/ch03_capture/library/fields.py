# %% [markdown]
# # Attributes, continued: values of the trace
#
# Most of what stands for an object of a builtin class has methods in a table (`library/containers.py`); a bound
# method is then only a name. Fields are read by one function each.
#
# The table maps a kind of value and a field to the function that reads it. A bound method knows its
# function and its first argument, a partial its arguments, a function its name, its defaults and its code,
# an exception what it was raised with. What is not in the table is decided by `plain_attribute`. If the
# class has such an attribute, it must be a method, and a `MethodName` is returned, which waits to be
# called. If the class has none, an AttributeError is raised, and the program may catch it.
#
# Three kinds of values can have attributes of their own besides: functions, partials and exceptions. Those
# come first. An exception is the most delicate. Some of its fields are set only when Python raises it
# (`__traceback__`), and whether its `__init__` was run is not always known. Where the answer is not
# certain, the graph ends.

# %%
import collections
import types

from ...ch02_guards.guards import class_lookup
from ...ch02_guards.sources import AttrSource
from ..attributes import GETATTR, SETATTR, get_attribute
from ..builders import hung_on
from ..class_attributes import C_DESCRIPTORS
from ..descriptors import bind_attribute, bind_to_class, no_attribute
from ..effects import changed
from ..exceptions import user_error
from ..interpreter import is_empty
from ..lookup import MISSING, class_in_c, lookup, python_method, says_its_class
from ..operations import scalar_of
from ..tracer import bases, guard, unsupported
from ..values import (
    BuiltinVal, CellVal, Const, DictVal, ExcVal, FuncVal, GenVal, IterVal, ListVal, MethodName, MethodVal, NONE, PartialVal,
    SetVal, SliceVal, SuperVal, SymVal, TracebackVal, TupleVal, ViewVal, boolean, const, describe, dict_of, is_class, specialize)
from ..varying import computed
from ..wrap import realize, wrap

FIELDS = {
    (SliceVal, "start"): lambda v: v.start,
    (SliceVal, "stop"): lambda v: v.stop,
    (SliceVal, "step"): lambda v: v.step,
    (MethodVal, "__func__"): lambda v: v.func,
    (MethodVal, "__self__"): lambda v: v.self,
    (MethodName, "__self__"): lambda v: v.self,
    (MethodName, "__name__"): lambda v: const(v.name),
    (PartialVal, "func"): lambda v: v.func,
    (PartialVal, "args"): lambda v: TupleVal(items=list(v.args)),
    (PartialVal, "keywords"): lambda v: v.keywords,
    (FuncVal, "__name__"): lambda v: const(v.name),
    (FuncVal, "__qualname__"): lambda v: const(v.code.co_qualname),
    (FuncVal, "__module__"): lambda v: const(v.globals.get("__name__")),
    (FuncVal, "__doc__"): lambda v: const(docstring(v.code)),
    (FuncVal, "__dict__"): lambda v: dict_of(
        {k: a for k, a in v.attrs.items() if k not in ("__annotations__", "__doc__")}, owner=NONE),
    (FuncVal, "__type_params__"): lambda v: TupleVal(),
    (FuncVal, "__code__"): lambda v: const(v.code),
    (FuncVal, "__kwdefaults__"): lambda v: dict_of(v.kwdefaults) if v.kwdefaults else NONE,
    (FuncVal, "__annotations__"): lambda v: v.attrs.setdefault("__annotations__", DictVal()),
    (FuncVal, "__defaults__"): lambda v: TupleVal(items=list(v.defaults)) if v.defaults else NONE,
    (ViewVal, "mapping"): lambda v: v.of,
    (ExcVal, "args"): lambda v: TupleVal(items=list(v.args)),
    (ExcVal, "__cause__"): lambda v: v.cause or NONE,
    (ExcVal, "__context__"): lambda v: v.context or NONE,
    (ExcVal, "__suppress_context__"): lambda v: boolean(v.cause is not None),
    (ExcVal, "__traceback__"): lambda v: v.traceback if v.seen else NONE,
    (ExcVal, "with_traceback"): lambda v: BuiltinVal(call=lambda tx, args, kwargs: with_traceback(tx, v, *args)),
    (ExcVal, "add_note"): lambda v: BuiltinVal(call=lambda tx, args, kwargs: add_note(v, *args)),
    (ExcVal, "__dict__"): lambda v: dict_of(v.attrs, owner=NONE),
}


def with_traceback(tx, exc, traceback):
    if type(traceback) is not TracebackVal and traceback is not NONE:
        unsupported(tx, "the traceback of an exception from outside of the trace")
    exc.traceback, exc.seen = traceback, True
    return exc


def add_note(exc, note):
    exc.attrs.setdefault("__notes__", ListVal()).items.append(note)
    return NONE


def docstring(code):
    first = code.co_consts[0] if code.co_consts else None
    return first if isinstance(first, str) else None


IN_C = types.MethodDescriptorType, types.WrapperDescriptorType


@GETATTR.of(Const, ListVal, SetVal, ViewVal, IterVal, GenVal, SliceVal, MethodName)
def plain_attribute(tx, value, name):
    cls = value.cls
    if (type(value), name) in FIELDS:
        return FIELDS[type(value), name](value)
    if name == "__class__":
        if says_its_class(cls):
            unsupported(tx, f"the __class__ that {describe(value)} says it is of")
        return wrap(tx, cls)
    if name == "maxlen" and type(value) is ListVal and isinstance(value.items, collections.deque):
        return const(value.items.maxlen)
    if type(value) is Const and not isinstance(lookup(cls, name), IN_C):
        if (made := computed(tx, getattr, [value, const(name)], {})) is not None:
            return made
        if hasattr(value.value, name) and not callable(getattr(value.value, name)):
            return wrap(tx, getattr(value.value, name))
    # Whether the `__init__` of an exception was run, or Python has raised it, is not known
    if lookup(cls, name) is MISSING and not (type(value) is ExcVal and python_method(cls, "__init__")):
        no_attribute(cls, name)
    if type(value) in (ExcVal, MethodName):
        unsupported(tx, f"the attribute {name} of {describe(value)}")
    return method_in_c(tx, value, name, lookup(cls, name))


def method_in_c(tx, value, name, found):
    """The method `found` of a value; what is computed when it is read, as `__dict__`, is none, and what is no descriptor, as the
    `__hash__` of a list, is what it is."""
    if not hasattr(type(found), "__get__"):
        return wrap(tx, found)
    if isinstance(found, (types.GetSetDescriptorType, types.MemberDescriptorType)):
        unsupported(tx, f"the attribute {name} of {describe(value)}")
    return MethodName(self=value, name=name)


def no_attributes_of_its_own(tx, value, name):
    """An OrderedDict, and an object of a class derived from a named tuple, has a dictionary of attributes. It is empty,
    and a guard says so, or the graph breaks."""
    if value.cls.__dictoffset__ and value.source is not None:
        if vars(value.real):
            unsupported(tx, f"the attribute {name} of a {value.cls.__name__} that was given attributes")
        guard(tx, AttrSource(value.source, "__dict__"), "LENGTH", 0)


@GETATTR.of(DictVal)
def dict_attribute(tx, value, name):
    if name == "default_factory" and value.factory is not None:
        return realize(tx, value.factory)
    if name in value.attrs:
        return value.attrs[name]
    no_attributes_of_its_own(tx, value, name)
    return plain_attribute(tx, value, name)


@GETATTR.of(FuncVal)
def function_attribute(tx, value, name):
    return realize(tx, value.attrs[name]) if name in value.attrs else plain_attribute(tx, value, name)


@GETATTR.of(PartialVal)
def partial_attribute(tx, value, name):
    attrs = {} if (PartialVal, name) in FIELDS else hung_on(tx, value) or {}
    return realize(tx, attrs[name]) if name in attrs else plain_attribute(tx, value, name)


NAMING = (AttributeError, ImportError, NameError)


@GETATTR.of(ExcVal)
def exception_attribute(tx, value, name):
    found = lookup(value.cls, name)
    if python_method(value.cls, "__getattribute__"):
        unsupported(tx, f"the attribute {name} of an exception with a __getattribute__ of its own")
    own = is_of_program(value.cls, name, found)
    if name in value.attrs and not (own and hasattr(type(found), "__set__")):
        return value.attrs[name]
    if own:
        return unsupported(tx, f"the attribute {name} of an exception") if isinstance(found, C_DESCRIPTORS) else \
            bind_attribute(tx, value, name, found)
    if name == "value" and issubclass(value.cls, StopIteration):
        return value.args[0] if value.args else NONE
    if name in ("message", "exceptions") and issubclass(value.cls, BaseExceptionGroup):
        return value.args[0] if name == "message" else TupleVal(items=list(value.args[1].items))
    if (ExcVal, name) in FIELDS or name == "__class__" or found is MISSING and lookup(value.cls, "__getattr__") is MISSING:
        return plain_attribute(tx, value, name)
    if isinstance(found, types.MemberDescriptorType) and issubclass(value.cls, NAMING):
        if name == "msg" and len(value.args) == 1:
            return value.args[0]
        return NONE                              # `name`, `obj`, `path`: only Python itself sets them
    if isinstance(found, (*C_DESCRIPTORS, types.ClassMethodDescriptorType)) or found is MISSING:
        unsupported(tx, f"the attribute {name} of an exception")
    return bind_attribute(tx, value, name, found)


def is_of_program(cls, name, found) -> bool:
    """Whether a class of the program has its own attribute of this name, in place of Python's."""
    return found is not MISSING and name != "__dict__" and found is not class_lookup(class_in_c(cls), name)


# %% [markdown]
# Writing. What a function is made of cannot be set, but a program may hang anything on it, and on a partial; `state_dict()` hangs
# something on its OrderedDict. Of an exception Python itself sets some fields.

# %%
FIXED_FUNCTION = ("__code__", "__defaults__", "__kwdefaults__", "__dict__", "__closure__", "__globals__")


@SETATTR.of(FuncVal, PartialVal)
def set_function_attribute(tx, function, name, value):
    if function.source is not None or value is None or type(function) is FuncVal and name in FIXED_FUNCTION:
        return NotImplemented
    function.attrs[name] = value


@SETATTR.of(DictVal)
def set_dict_attribute(tx, whole, name, value):
    if whole.cls is not collections.OrderedDict or whole.real is not None or value is None or class_lookup(whole.cls, name) is not MISSING:
        return NotImplemented
    whole.attrs[name] = value


@SETATTR.of(ExcVal)
def set_exception_attribute(tx, exc, name, value):
    found = lookup(exc.cls, name)
    if value is None:
        return NotImplemented
    if python_method(exc.cls, "__setattr__") or is_of_program(exc.cls, name, found) and hasattr(type(found), "__set__"):
        unsupported(tx, f"setting {name} of an exception")
    if name in ("__cause__", "__context__") and (value is NONE or type(value) is ExcVal):
        setattr(exc, name.strip("_"), None if value is NONE else value)
    elif name == "__traceback__" and (value is NONE or type(value) is TracebackVal):
        exc.traceback, exc.seen = value, True
    elif name.startswith("__") or name == "args" or hasattr(type(found), "__set__"):
        unsupported(tx, f"setting {name} of an exception")
    else:
        exc.attrs[name] = value


# %% [markdown]
# Methods and cells.

# %%
@GETATTR.of(MethodVal)
def method_attribute(tx, value, name):
    if (MethodVal, name) in FIELDS:
        return FIELDS[MethodVal, name](value)
    return get_attribute(tx, value.func, name)


@GETATTR.of(CellVal)
def cell_attribute(tx, value, name):
    if name != "cell_contents":
        no_attribute(types.CellType, name)
    if is_empty(tx, value):
        user_error(ValueError, "Cell is empty")
    return realize(tx, value.content)


# %% [markdown]
# A symbolic number is its own real part, and an integer its own `__index__`. `item()` of a scalar of NumPy is the same number as one of
# Python, and its `dtype` that of any of its class. The other attributes but `__class__` (`functools.singledispatch` asks for it) are those
# of the present number, which is guarded then.

# %%
ITSELF = ("conjugate", "__index__", "__int__", "__trunc__", "__floor__", "__ceil__", "__pos__")          # methods of an integer
OF_EACH_SCALAR = ("dtype", "shape", "ndim", "size", "itemsize", "nbytes", "strides")


@GETATTR.of(SymVal)
def number_attribute(tx, value, name):
    if name == "item" and value.scalar is not None:
        return BuiltinVal(name=name, call=lambda tx, args, kwargs: scalar_of(value, None))
    if name in OF_EACH_SCALAR and value.scalar is not None:
        return wrap(tx, getattr(value.scalar(), name))
    if name == "real" and value.scalar is None or name == "numerator" and value.cls is int:
        return value
    if name in ("denominator", "imag") and value.cls is int:
        return const(int(name == "denominator"))
    if name in ITSELF and value.cls is int:
        return BuiltinVal(name=name, call=lambda tx, args, kwargs: value)
    found = lookup(value.cls, name)
    if isinstance(found, IN_C):
        return MethodName(self=value, name=name)
    return plain_attribute(tx, value if name == "__class__" or found is MISSING else specialize(value), name)


# %% [markdown]
# Named tuples are tuples with names, and the results of `torch.max(x, 0)` are tuples whose names are written
# in C (`n_sequence_fields`). A class that is derived from one may give its objects a dictionary besides. Mostly it is
# empty, and whoever asks for another attribute than the fields wants it to stay so.

# %%
FIELD = type(collections.namedtuple("Named", "field").field)       # the descriptor of a field, which knows its index


@GETATTR.of(TupleVal)
def tuple_attribute(tx, value, name):
    cls, found = value.cls, lookup(value.cls, name)
    if type(found) is FIELD:
        return realize(tx, value.items[found.__reduce__()[1][0]])
    if hasattr(cls, "n_sequence_fields") and isinstance(found, types.MemberDescriptorType):
        try:
            index = getattr(cls(range(cls.n_sequence_fields)), name)
        except TypeError:                        # nobody can make one, of which all fields have names: `sys.version_info`
            index = [key for key, field in vars(cls).items() if type(field) is types.MemberDescriptorType].index(name)
        return realize(tx, value.items[index])
    no_attributes_of_its_own(tx, value, name)
    if found is MISSING or name == "__class__" or isinstance(found, C_DESCRIPTORS):
        return plain_attribute(tx, value, name)
    return bind_attribute(tx, value, name, found)


# %% [markdown]
# ## super()
#
# `super().forward(x)` continues the search behind the class in which the calling method was defined.

# %%
SUPER_FIELDS = {
    "__class__": lambda tx, value: wrap(tx, super),
    "__self__": lambda tx, value: value.self,
    "__thisclass__": lambda tx, value: wrap(tx, value.after),
    "__self_class__": lambda tx, value: value.self if is_class(value.self) and issubclass(value.self.real, value.after)
    else wrap(tx, value.self.cls)}


@GETATTR.of(SuperVal)
def super_attribute(tx, value, name):
    obj = value.self
    if name in SUPER_FIELDS:
        return SUPER_FIELDS[name](tx, value)
    on_class = is_class(obj) and issubclass(obj.real, value.after)
    order = bases(tx, obj.real if on_class else obj.cls)
    owner = next((base for base in order[order.index(value.after) + 1:] if lookup(base, name) is not MISSING and name in vars(base)), None)
    found = MISSING if owner is None else vars(owner)[name]
    if owner is not None and changed(tx, owner) is not None:
        unsupported(tx, f"super() and the class {owner.__name__}, which the trace has written to")
    if found is MISSING:
        user_error(AttributeError, f"'super' object has no attribute '{name}'")
    if on_class and isinstance(found, types.ClassMethodDescriptorType):
        nothing = name == "__init_subclass__"        # object's own
        return BuiltinVal(name=name, call=lambda tx, args, kwargs: NONE if nothing and not (args or kwargs)
                          else unsupported(tx, f"{found.__objclass__.__name__}.{name}"))
    if on_class or name == "__new__":
        return bind_to_class(tx, obj, found, owner, name)
    if type(obj) is TupleVal and type(found) is FIELD:
        return realize(tx, obj.items[found.__reduce__()[1][0]])
    if isinstance(obj, (DictVal, ListVal, TupleVal)) and not isinstance(found, types.FunctionType):
        return method_in_c(tx, obj, name, found)
    return bind_attribute(tx, obj, name, found, owner=owner)
