# %% [markdown]
# # Calls
#
# A call is decided by what is called. Python functions are inlined: their bytecode runs in a frame of this
# trace. Torch functions become nodes. Builtins have handlers (`library/builtins_.py`), and pure functions of
# constants are simply called. Calling a class makes an object of the trace and inlines `__init__`. What is
# left, a C function that we know nothing about, ends the graph: it may do anything.

# %%
import collections
import enum
import functools
import math
import types
import typing
import weakref

import numpy
import torch

from .. import marks
from ..ch01_graphs.floats import MATH
from ..ch02_guards.identity import HEAP_TYPE, is_a, module_name
from ..ch02_guards.torch_guards import METHODS_OF_TENSORS
from ..ch02_guards.sources import AttrSource, CallSource, ItemSource
from ..errors import SkipFrame
from .attributes import get_attribute, get_plainly, store_attribute
from .builders import as_python, contents_of
from .comparisons import equal_as_objects, unequal_as_objects
from .descriptors import is_library_class, is_patched
from .effects import changed
from .exceptions import UserError, user_error, user_errors
from .interpreter import inline
from .keys import entries, guard_keys
from .library.fields import NAMING
from .library.graph_functions import call_graph_function, is_graph_function
from .library.numpy_functions import call_numpy
from .lookup import MISSING, class_in_c, lookup, python_method
from .methods import call_handler, call_method
from .operations import emit_float, fold, fold_unknown
from .protocol import method
from .tracer import (
    CALLS, Tracer, answer, call, constant_source, enter_namespace, guard_thing, is_library, location, names_its_own, plain_python,
    unsupported)
from .values import (
    AbstractValue, BuiltinVal, CONSTANT_TYPES, Const, DictVal, ExcVal, FuncVal, IMMUTABLE, ListVal, MethodName,
    MethodVal, NONE, ObjVal, PartialVal, SymVal, Table, TensorVal, TupleVal, describe)
from .wrap import is_made_per_call, part, realize, wrap


# %%
CALLS.update({
    MethodVal: lambda tx, method, args, kwargs: call(tx, method.func, [method.self, *args], kwargs),
    MethodName: lambda tx, method, args, kwargs: call_method(tx, method.self, method.name, args, kwargs),
    PartialVal: lambda tx, partial, args, kwargs: call(tx, partial.func, [*partial.args, *args], {**keywords_of(tx, partial), **kwargs}),
    BuiltinVal: lambda tx, builtin, args, kwargs: builtin.call(tx, args, kwargs),
})


def keywords_of(tx, partial: PartialVal) -> dict:
    named = {key: realize(tx, v) for key, (_, v) in entries(tx, partial.keywords).items()}
    if not all(type(key) is str for key in named):
        user_error(TypeError, "keywords must be strings")
    return named


@CALLS.of(FuncVal)
def call_new_function(tx, function, args, kwargs):
    defaults = [lambda v=v: v for v in function.defaults]
    kwdefaults = {k: lambda v=v: v for k, v in function.kwdefaults.items()}
    return inline(tx, function.code, function.code.co_qualname, function.globals, function.closure,
                  defaults, kwdefaults, args, kwargs)


# %% [markdown]
# ## Objects that existed before
#
# First the table of functions with a handler, then what the type of the callee says.

# %%
# A real function or class, or (module, name) of a function that is not imported here -> handler(tx, *args, **kwargs),
# values in, a value out
HANDLED = Table()
handles = HANDLED.of
HANDLED_KINDS = (type, types.FunctionType, types.BuiltinFunctionType, functools._lru_cache_wrapper, types.MethodDescriptorType,
                 types.WrapperDescriptorType)
# A functional given one of these, or `out=`, is inlined instead
NO_ARGUMENT = (ObjVal, FuncVal, MethodVal, PartialVal)


# %% [markdown]
# In order: a Python function of PyTorch that calls what the program has put in the place of others is inlined like any, and finds it. A
# function with a handler is handled, and so is a class, unless the program has patched it. A class is instantiated. A Python function that
# is a method of tensors, as in `torch.Tensor.backward(loss)` or in a bound `loss.backward` that came in, is called as that method. A
# function that belongs into the graph, which is what most of torch's functions are, becomes a node, unless one of its arguments is
# something that a node cannot have, a function of the trace for example; then it is inlined like any Python function. Then the type of the
# callable decides: Python functions, methods of C classes. An object is called by the `__call__` of its class; that of PyTorch's modules
# has a handler (`library/modules.py`), and so has that of partials. What is left breaks the graph.

# %%
@CALLS.of(ObjVal)
def call_object(tx: Tracer, function: ObjVal, args, kwargs) -> AbstractValue:
    real, kind = function.real, type(function.real)
    handler = HANDLED.get(real) if is_a(real, HANDLED_KINDS) else None
    if handler is None and kind is types.FunctionType:
        handler = HANDLED.get((module_name(real), real.__name__))
    if kind is types.FunctionType and not names_its_own(tx, real):
        return inline_function(tx, function, args, kwargs)
    if handler is not None and not (is_a(real, type) and is_patched(real)):
        return call_handler(tx, lambda: describe(function), handler, args, kwargs)
    if is_a(real, type):
        return call_class(tx, function, args, kwargs)
    if kind is types.FunctionType and args and type(args[0]) is TensorVal:
        if lookup(args[0].cls, real.__name__) is real:
            return call_method(tx, args[0], real.__name__, args[1:], kwargs)
        if real.__name__ in tx.tensors.replaced and METHODS_OF_TENSORS[real.__name__] is real:
            unsupported(tx, f"PyTorch's Tensor.{real.__name__}, which the program has replaced")
    if is_graph_function(real) and not (kind is types.FunctionType and (
            isinstance(kwargs.get("out"), TensorVal)
            or any(type(v) in NO_ARGUMENT for v in (*args, *kwargs.values())))):
        if kind is types.FunctionType:
            guard_function(tx, real)
        return call_graph_function(tx, real, args, kwargs)
    if kind in REAL_CALLS:
        return REAL_CALLS[kind](tx, function, args, kwargs)
    if method := python_method(function.cls, "__call__"):
        return call(tx, wrap(tx, method), [function, *args], kwargs)
    if lookup(function.cls, "__call__") is functools.partial.__call__:
        return call_derived_partial(tx, function, *args, **kwargs)
    if (module_name(real) or module_name(kind)).split(".")[0] == "numpy" and real is not None:
        return call_numpy(tx, real, args, kwargs)
    if lookup(function.cls, "__call__") is MISSING:
        user_error(TypeError, f"'{function.cls.__name__}' object is not callable")
    unsupported(tx, f"a call of {describe(function)}")


@handles(functools.partial.__call__)
def call_derived_partial(tx, function, /, *args, **kwargs):
    """A call of a partial, or as `super().__call__` in a class derived from it, which may hide the parts that are read here."""
    if type(function) is ObjVal:
        if function.real is None or not issubclass(function.cls, functools.partial):
            unsupported(tx, f"a call of {describe(function)}")
        fields = [vars(functools.partial)[name] for name in ("func", "args", "keywords")]
        func, given, keywords = (wrap(tx, f.__get__(function.real), function.source and CallSource(
            constant_source(tx, f), "__get__", (function.source,))) for f in fields)
        function = PartialVal(func=func, args=[realize(tx, a) for a in given.items], keywords=keywords)
    return call(tx, function, args, kwargs)


REAL_CALLS = Table()                 # class of a real callable -> function(tx, callee, args, kwargs)


# %% [markdown]
# ## Python functions
#
# Globals and cells of an inlined function are read with sources of their own, and guarded. The Python module
# that has the globals is an object that the entry can own, so the source is short:
# `__K[3].__dict__['scale']`. The code, the defaults and the cells of a function are guarded too. Of one that
# belongs to torch or the standard library the cells are not: nobody changes those from inside.
#
# This is the longest decision of the chapter. `inline_function` looks for reasons not to inline: a
# function that is compiled already (its original is inlined), disabled, marked as constant, has a handler under
# its name or its code, or belongs to a module whose functions no graph can do (`REFUSED_ROOTS`).
#
# `inline_code` begins with guards. `is_made_per_call` (in `wrap.py`) tells the two kinds of functions apart. A function
# that is made anew at each call may come with other defaults and cells, so these are read through its source and
# guarded one by one. A function of a file stays the same object, so one guard, `FUNCTION`, says that nobody has
# exchanged its code or its defaults. A library's function gets it, too.
#
# Then it collects what the frame needs: for each default a function that wraps it when it is used, and the
# cells of the closure with their sources.

# %%
@REAL_CALLS.of(types.FunctionType)
def inline_function(tx: Tracer, function: ObjVal, args, kwargs) -> AbstractValue:
    """What is to be done in the place of a function; most are inlined."""
    real = function.real
    code = real.__code__
    if (compiled := marks.compiled_by_torch(real) or marks.original(real)) is not real:
        return call(tx, wrap(tx, compiled), args, kwargs)
    if marks.is_disabled(real):
        because = marks.own_mark(real, marks.DISABLED)
        why = f": {because}" if because else ""
        unsupported(tx, f"{real.__qualname__} is disabled for compilation{why}")
    if getattr(real, marks.CONSTANT, False) is True:
        return call_handler(tx, lambda: describe(function), lambda tx, *args, **kwargs: fold(tx, real, args, kwargs),
                            args, kwargs)
    if real.__module__ == "torch._dynamo.mutation_guard":
        # `Module.__init__`, once torch.compile has run: it counts modules
        return call(tx, wrap(tx, real.__closure__[0].cell_contents), args, kwargs)
    if handler := BY_CODE.get(DISABLED_BY_TORCH if DISABLED_BY_TORCH in vars(real) else code):
        return handler(tx, function, *args, **kwargs)
    if is_refused_module(module_name(real)):
        unsupported(tx, f"a call of {real.__module__}.{real.__qualname__}")
    return inline_code(tx, function, args, kwargs)


def inline_code(tx: Tracer, function: ObjVal, args, kwargs) -> AbstractValue:
    """The function's bytecode as a frame of this trace. What else it is made of, defaults and cells, is guarded or read again."""
    real, source = function.real, function.source
    code, library = real.__code__, is_library(real.__code__.co_filename)
    if changed(tx, real.__kwdefaults__):
        unsupported(tx, f"a call of {describe(function)}, whose keyword defaults have just been changed")
    reread = source if is_made_per_call(real) else None        # where defaults are read from again
    enter_namespace(tx, real, reread)
    if reread is not None and not library:      # the next call may bring another function of the same code
        wrap(tx, real.__defaults__, part(AttrSource, reread, "__defaults__"))
        names = wrap(tx, real.__kwdefaults__, part(AttrSource, reread, "__kwdefaults__"))
        if type(names) is DictVal:
            guard_keys(tx, names)
    else:
        guard_function(tx, real)
    if reread is None and not library and not plain_defaults(real) and not goes_with_class(tx, real):
        reread = constant_source(tx, real)
    positional, named = part(AttrSource, reread, "__defaults__"), part(AttrSource, reread, "__kwdefaults__")
    defaults = [functools.partial(wrap, tx, value, part(ItemSource, positional, i))
                for i, value in enumerate(real.__defaults__ or ())]
    kwdefaults = {k: functools.partial(wrap, tx, value, part(ItemSource, named, k))
                  for k, value in (real.__kwdefaults__ or {}).items()}
    closure = []
    for i, cell in enumerate(real.__closure__ or ()):
        at = part(ItemSource, part(AttrSource, source, "__closure__"), i)
        if source is None and not library and code.co_freevars[i] != "__class__":
            at = constant_source(tx, cell)
        closure.append(wrap(tx, cell, at))
    return inline(tx, code, real.__qualname__, real.__globals__, closure, defaults, kwdefaults, args,
                  kwargs)


def goes_with_class(tx: Tracer, real: types.FunctionType) -> bool:
    """Whether `@dataclass` or `namedtuple` wrote it for a class of the trace, with which it goes."""
    written = [getattr(f, "__func__", f) for cls in tx.classes.made for f in vars(cls).values()]
    return any(real is f or real is getattr(f, "__wrapped__", None) for f in written)


def guard_function(tx: Tracer, real: types.FunctionType):
    """The function keeps its code and its defaults."""
    if not goes_with_class(tx, real):
        guard_thing(tx, "FUNCTION", real, real.__code__, real.__defaults__, tuple((real.__kwdefaults__ or {}).items()))


# %% [markdown]
# Decorators make functions that all have one code object. So a handler can be registered for that code, and
# applies to whatever the decorator was put around.

# %%
BY_CODE = Table()                    # code of the functions that a decorator makes -> handler, given the function, too
DISABLED_BY_TORCH = "_torchdynamo_disable"    # in the place of a code: what torch.compile has put around functions of PyTorch


# %% [markdown]
# Two questions remain: whether defaults could be changed in place, and which modules are never entered.

# %%
def plain_defaults(real) -> bool:
    """Whether all defaults are immutable, so that only rebinding `__defaults__` could change them."""
    return all(type(v) in CONSTANT_TYPES or isinstance(v, (type, types.FunctionType))
               for v in (*(real.__defaults__ or ()), *(real.__kwdefaults__ or {}).values()))


REFUSED_ROOTS = frozenset((
    "numpy", "random", "threading", "multiprocessing", "subprocess", "socket", "importlib",
    "pickle", "json", "tempfile", "shutil", "pathlib", "time"))
REFUSED_PREFIXES = (
    "torch._dynamo", "torch._inductor", "torch.distributed", "torch.autograd", "torch.cuda",
    "torch.utils.data",
    "torch.utils.checkpoint", "torch.jit", "torch.profiler", "torch._utils",
    "torch.serialization",
    "torch.random")
NOT_REFUSED = ("torch.autograd.function", "torch.autograd.grad_mode", "torch.cuda.amp.autocast_mode")


def is_refused_module(name: str) -> bool:
    """Modules whose functions do what a graph cannot: input and output, threads, random state, other compilers. What an autograd
    function calls on its `ctx` only notes its arguments there, and context managers come down to what is handled."""
    return name.split(".")[0] in REFUSED_ROOTS or name.startswith(REFUSED_PREFIXES) and name not in NOT_REFUSED


# %% [markdown]
# ## C functions
#
# A function that is written in C has no bytecode to follow. What can be done depends on what is known about
# it. If it computes the same from the same arguments and changes nothing, as all of `math` does, it is
# called now, on constants (`fold`). With a number that varies among its arguments it becomes a node of the graph, if it
# is one of those that symbolic floats have, or the entry calls it (`varying.py`). If it is a method of an object that the
# trace knows, the tables of methods have it. Which subclasses a class has is asked, and asked again in each call. Otherwise the graph
# ends: nobody can say what it would do.

# %%
PURE_MODULES = frozenset(("math", "cmath", "_struct", "unicodedata", "_string"))
PURE_CLASSES = (dict, int, float, bytes, str)


@REAL_CALLS.of(types.BuiltinFunctionType)
def call_builtin(tx: Tracer, function: ObjVal, args, kwargs) -> AbstractValue:
    real = function.real
    owner = real.__self__                        # the module of a function, the object of a bound method
    if isinstance(owner, types.ModuleType):
        pure = module_name(vars(owner)) in PURE_MODULES
    elif isinstance(owner, type):
        if real.__name__ == "__subclasses__" and not args and not any(owner in cls.__mro__ for cls in tx.classes.made):
            guard_thing(tx, "SUBCLASSES", owner, found := type.__subclasses__(owner))
            return ListVal([wrap(tx, cls, constant_source(tx, cls)) for cls in found])
        pure = owner in PURE_CLASSES
    elif id(owner) in tx.objects.tracked:
        return call_method(tx, tx.objects.tracked[id(owner)], real.__name__, args, kwargs)
    else:
        pure = module_name(real) in PURE_MODULES
    if pure and owner is math and real.__name__ in MATH and args and not kwargs and \
            any(type(a) is SymVal for a in args) and {a.cls for a in args} <= {int, float}:
        return emit_float(tx, MATH[real.__name__], args)
    reason = f"a call of the C function {real.__module__ or ''}.{real.__qualname__}"
    return fold_unknown(tx, real, args, kwargs, reason) if pure else unsupported(tx, reason)

# %% [markdown]
# The same method can be reached from the class: `list.append(l, 1)`, or `object.__setattr__(self, "x", v)`
# in a class whose own `__setattr__` does something besides. Then the first argument is the object. The
# methods of `object` itself are the ends of all chains of `super()`, and have handlers.
#
# Some methods of an `OrderedDict` reach the items of an object of a derived class through what that class has
# written for them. Those of a dict do not, but for one: `copy` looks whether there is another `__iter__`.

# %%
BY_ITEMS = ("__init__", "update", "setdefault", "pop", "popitem", "__or__", "__ror__", "__ior__", "__reduce__")


def asks_its_class(cls, owner, name) -> bool:
    """Whether a method of dict or of a class like it, on an object of class `cls`, runs the program's code or makes another such object."""
    if owner is collections.OrderedDict:
        items = ("__contains__", "__getitem__", "__setitem__", "__delitem__") if name in BY_ITEMS else ()
        return name == "copy" or any(python_method(cls, item) for item in items)
    return name == "copy" and python_method(cls, "__iter__") is not None


@REAL_CALLS.of(types.MethodDescriptorType, types.WrapperDescriptorType)
def call_descriptor(tx: Tracer, function: ObjVal, args, kwargs) -> AbstractValue:
    """An unbound C method: `torch.Tensor.add(x, y)`, `list.append(l, 1)`, `object.__setattr__(o, n, v)`."""
    real = function.real
    if not args:
        unsupported(tx, f"{describe(function)}() without an object")
    owner, name, self = real.__objclass__, real.__name__, args[0]
    if owner is object:
        unsupported(tx, f"object.{name}")
    if type(self) is ObjVal and issubclass(owner, (dict, list)) and (contents := contents_of(tx, self)) is not None:
        if asks_its_class(self.cls, owner, name):
            unsupported(tx, f"{owner.__name__}.{name} of {describe(self)}, whose class has a say in it")
        result = call_method(tx, contents, name, args[1:], kwargs)
        return self if result is contents else result
    if not issubclass(self.cls, owner) or type(self) is ObjVal and python_method(self.cls, name):       # which is not the one that is asked
        unsupported(tx, f"{owner.__name__}.{name} of {describe(self)}")
    return call_method(tx, self, name, args[1:], kwargs)


@handles(object.__new__)
def new_object(tx, cls, *args, **kwargs):
    """Arguments are for an `__init__`: one that has its own `__new__` has to keep them to itself."""
    if (args or kwargs) and lookup(cls.real, "__new__") is not object.__new__:
        user_error(TypeError, "object.__new__() takes exactly one argument (the type to instantiate)")
    if (args or kwargs) and lookup(cls.real, "__init__") is object.__init__:
        user_error(TypeError, f"{cls.real.__name__}() takes no arguments")
    refuse_finalizer(tx, cls.real)
    return ObjVal(cls=cls.real)


@handles(object.__init__)
def init_object(tx, self, *args, **kwargs):
    own = lookup(self.cls, "__init__") is not object.__init__
    if (args or kwargs) and (own or lookup(self.cls, "__new__") is object.__new__):
        owner = "object" if own else self.cls.__name__
        user_error(TypeError, f"{owner}.__init__() takes exactly one argument (the instance to initialize)")
    return NONE


HANDLED.update({
    object.__setattr__: lambda tx, self, name, value: store_attribute(tx, self, name.value, value),
    object.__delattr__: lambda tx, self, name: store_attribute(tx, self, name.value, None),
    object.__getattribute__: lambda tx, self, name: get_plainly(tx, self, name.value),
    object.__eq__: equal_as_objects,
    object.__ne__: unequal_as_objects,
    type.__call__: lambda tx, cls, *args, **kwargs: make_instance(tx, cls, args, kwargs),
})


# %% [markdown]
# ## Classes
#
# An object made while tracing exists only in the trace, until it escapes (is returned, or stored somewhere
# that outlives the call). Only then is it built for real, without running `__init__` again: its attributes
# are known.

# %%
FOLDED_CLASSES = (torch.device, torch.finfo, torch.iinfo, numpy.finfo, numpy.iinfo, complex, bytes, type)
REFUSED_CLASSES = (torch.Tensor, torch.autograd.Function)


def call_class(tx: Tracer, function: ObjVal, args, kwargs) -> AbstractValue:
    of_metaclass = python_method(type(function.real), "__call__")
    if of_metaclass is not None and not isinstance(function.real, enum.EnumMeta):
        return call(tx, wrap(tx, of_metaclass), [function, *args], kwargs)
    return make_instance(tx, function, args, kwargs)


# %% [markdown]
# `make_instance` is what `type.__call__` does: `__new__` makes the object, `__init__` fills it. Before that come
# the classes that the trace treats in its own way: context managers, exceptions, and immutable ones such as
# `torch.device`, whose constructor is called at once if its arguments are constants. A class that derives from
# `dict` gets a dictionary as its content. A class with a `__new__` in Python is asked, by tracing it. In the plain
# case, at the end, the object is an `ObjVal` without a real object, and `__init__` is traced with it as
# `self`. What this writes are attributes of the value. A class that is made in C, or has no `__dict__`, could hold
# state that the trace would not see, so it breaks the graph.
#
# `Color("RED")`: an Enum whose members do not have that value asks its `_missing_`. One that the program has written is traced.

# %%
def is_by_missing(tx: Tracer, cls, args, kwargs) -> bool:
    """Whether `cls(*args, **kwargs)` asks a `_missing_` of the program. (A Flag makes members as they are needed.)"""
    own = getattr(cls, "_missing_", None)
    own = getattr(own, "__func__", own)                    # of a classmethod
    if not isinstance(own, types.FunctionType) or own.__module__ == "enum" or issubclass(cls, enum.Flag) or len(args) != 1 or kwargs:
        return False
    value = as_python(tx, args[0])
    return len(cls) > 0 and not is_library_class(cls) and not any(value is member or value == member.value for member in cls)


def by_missing(tx: Tracer, function: ObjVal, value) -> AbstractValue:
    cls = function.real
    try:
        found = call(tx, get_attribute(tx, function, "_missing_"), [value])
    except UserError:
        unsupported(tx, f"an error in {cls.__qualname__}._missing_")
    if found is NONE:
        user_error(ValueError, f"{as_python(tx, value)!r} is not a valid {cls.__qualname__}")
    if not isinstance(getattr(found, "real", None), cls):
        unsupported(tx, f"{cls.__qualname__}._missing_ gives something else than a member")
    return found


# %% [markdown]
# One thing the trace cannot follow at all: *when* an object dies. CPython calls `__del__`, and the callbacks of weak
# references, the moment the last reference is gone, be it by `del`, by an assignment, or at the end of a call. The trace
# counts no references, and an object that nobody sees afterwards is never made. So a frame that makes an object with a
# `__del__` stays plain Python, and the outermost frame does where a weak reference is made to an object of the trace.

# %%
def refuse_finalizer(tx: Tracer, cls):
    if python_method(cls, "__del__") is not None:
        plain_python(tx, f"a {cls.__qualname__}, whose __del__ is called when its last reference goes")


def refuse_weak(tx: Tracer, *referents):
    made = [value.self if type(value) is MethodVal else value for value in referents]
    if any(type(value) is ObjVal and value.real is None for value in made):
        raise SkipFrame("a weak reference to an object that was made here", location(tx))


def make_instance(tx: Tracer, function: ObjVal, args, kwargs) -> AbstractValue:
    """type.__call__(cls, *args): `__new__`, then `__init__`."""
    cls = function.real
    refuse_finalizer(tx, cls)
    if issubclass(cls, weakref.ReferenceType):
        refuse_weak(tx, *args)
    if issubclass(cls, BaseException):
        return make_exception(tx, cls, args, kwargs)
    if cls in FOLDED_CLASSES or cls in IMMUTABLE or isinstance(cls, enum.EnumMeta):
        if is_by_missing(tx, cls, args, kwargs):
            return by_missing(tx, function, args[0])
        by_value = isinstance(cls, enum.EnumMeta) and len(cls) and not kwargs and not is_library_class(cls) and cls not in tx.classes.made
        make = functools.partial(answer, tx, cls) if by_value else cls
        return fold(tx, make, args, kwargs, f"{cls.__name__}() of something that is no constant")
    if issubclass(cls, property) and is_library_class(cls) and not kwargs and all(
            isinstance(getattr(a, "real", None), types.FunctionType) for a in args):
        return wrap(tx, cls(*(a.real for a in args)))
    new, init = lookup(cls, "__new__"), python_method(cls, "__init__")
    if typing.is_typeddict(cls):
        return HANDLED[dict](tx, *args, **kwargs)
    if issubclass(cls, dict) and new is dict.__new__ or issubclass(cls, list) and new is list.__new__:
        base = collections.OrderedDict if issubclass(cls, collections.OrderedDict) else dict
        obj = ObjVal(cls=cls, contents=ListVal() if issubclass(cls, list) else DictVal(cls=base))
        call(tx, get_attribute(tx, obj, "__init__"), args, kwargs)
        return obj
    own_new = new.__func__ if type(new) is staticmethod else None
    refused = issubclass(cls, REFUSED_CLASSES)
    if isinstance(own_new, types.FunctionType) and not refused or own_new and cls in tx.classes.made:
        made = call(tx, wrap(tx, own_new), [function, *args], kwargs)
        if issubclass(made.cls, cls) and init is not None:
            call(tx, wrap(tx, init), [made, *args], kwargs)
        return made
    if issubclass(cls, REFUSED_CLASSES) or new is not object.__new__ or not cls.__flags__ & HEAP_TYPE \
            or not hasattr(cls, "__dict__"):
        unsupported(tx, f"creating a {cls.__qualname__} inside a compiled function")
    if cls.__dict__.get("__abstractmethods__"):
        with user_errors():
            object.__new__(cls)                  # raises TypeError, in Python's words
    obj = ObjVal(cls=cls)
    if init is not None:
        call(tx, wrap(tx, init), [obj, *args], kwargs)
    elif args or kwargs:
        user_error(TypeError, f"{cls.__name__}() takes no arguments")
    return obj


# %% [markdown]
# Exceptions are made by the trace for `raise` and `except`. Their arguments are kept, and the class is only
# instantiated for real if the exception leaves the compiled function. Few classes look at their arguments before that (`CHECKING`, and
# those that take arguments by name): one of them is made at once, and what it says of the arguments is raised in the program.

# %%
def make_exception(tx, cls, args, kwargs):
    """`BaseException.__new__` keeps the arguments, whatever a class's own `__init__` does with them."""
    new, init = lookup(cls, "__new__"), python_method(cls, "__init__")
    group = issubclass(cls, BaseExceptionGroup) and not (cls is ExceptionGroup and is_group(tx, *args))
    if isinstance(new, (staticmethod, types.FunctionType)) or group:
        unsupported(tx, f"creating a {cls.__qualname__} inside a compiled function")
    if issubclass(cls, OSError) and len(args) > 1 and init is None:
        if len(args) > 2:
            unsupported(tx, f"creating a {cls.__qualname__} that names a file")
        cls = type(OSError(as_python(tx, args[0]), None)) if cls is OSError else cls        # `OSError(2, "gone")` is a FileNotFoundError
    exc = ExcVal(cls=cls, args=list(args))
    if init is not None:
        call(tx, wrap(tx, init), [exc, *args], kwargs)
    else:
        fill_exception(tx, exc, *args, **kwargs)
    return exc


CHECKING = UnicodeEncodeError, UnicodeDecodeError, UnicodeTranslateError, SyntaxError          # which arguments they get


@method(ExcVal, "__init__")
def fill_exception(tx, exc, *args, **named):
    """The `__init__` of the classes in C."""
    if named and not issubclass(exc.cls, NAMING):
        user_error(TypeError, f"{exc.cls.__name__}() takes no keyword arguments")
    checks = issubclass(exc.cls, CHECKING)
    if named or checks:
        checked = [as_python(tx, a) for a in args] if checks else []
        with user_errors():
            class_in_c(exc.cls)(*checked, **dict.fromkeys(named))
    exc.args = list(args)
    exc.attrs.update(named)


def is_group(tx, message=None, members=None, *more) -> bool:
    """Whether these are the arguments of an ExceptionGroup of exceptions that the trace has made."""
    listed = not more and type(members) in (ListVal, TupleVal) and entries(tx, members)
    return bool(listed) and type(message) is Const and type(message.value) is str and all(
        type(e) is ExcVal and issubclass(e.cls, Exception) for e in members.items)
