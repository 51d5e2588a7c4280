# %% [markdown]
# # The instructions, continued: calls, generators, exceptions
#
# The instructions that leave a frame or enter another one: calls and function definitions, `yield`, the
# exception machinery that `try` and `with` compile to, imports, and pattern matching.

# %%
import importlib.util
import sys
import types

from ..ch02_guards.sources import ItemSource
from .attributes import get_attribute
from .builders import as_python
from .comparisons import truth
from .exceptions import UserError, user_error
from .interpreter import Leave, advance, handled_exception, instructions, jump, opcode, pop_many, unless_raised
from .iterate import length, next_value, unpack
from .keys import guard_keys
from .lookup import MISSING, lookup
from .methods import call_method
from .opcodes import check_spread, constant_value
from .operations import unary
from .tracer import PYTHON, answer, call, constant_source, plain_python, unsupported
from .values import (
    Const, DictVal, ExcVal, FuncVal, GenVal, HandlingVal, ListVal, NONE, NULL, ObjVal, TupleVal, boolean, const, dict_of,
    is_class)
from .wrap import realize, wrap


# %% [markdown]
# ## Calls and functions
#
# A call is spread over several instructions, which push what it needs. Here are two of them, the first in the second's arguments:
#
#     def applied(f, x):
#         return f(x.mean(1), factor=2)
#
# is, in Python 3.11,
#
#     PUSH_NULL
#     LOAD_FAST f
#     LOAD_FAST x
#     LOAD_METHOD mean
#     LOAD_CONST 1
#     PRECALL
#     CALL
#     LOAD_CONST 2
#     KW_NAMES
#     PRECALL
#     CALL
#
# At the first `CALL` the top of the stack is `mean, x, 1`: a method, its `self`, one argument. At the second it is `NULL, f, mean of x, 2`:
# nothing, a callable, two arguments, of which the last has the name that `KW_NAMES` has announced. So in front of the arguments lie two
# slots, `NULL, callable` or `method, self`, in one of which may be nothing (`split_callable`); since 3.13 the callable comes first.
#
# The names of keyword arguments are a constant of the code. Before 3.13 the frame remembers the names between the two
# instructions; since 3.13 they lie on top of the stack (`CALL_KW`). A call with
# `*args` or `**kwargs` is an instruction of its own, for which the trace has to know how many items there are: so
# a dictionary that came from outside is guarded by its keys.

# %%
@opcode("KW_NAMES")
def kw_names(tx, frame, i):
    frame.kw_names = frame.code.co_consts[i.arg]


def split_callable(first, second):
    """(callable, extra leading arguments) from the two slots below the arguments."""
    if PYTHON >= (3, 13):
        return first, [] if second is NULL else [second]
    return (second, []) if first is NULL else (first, [second])


def call_with_names(tx, names, first, second, args):
    function, extra = split_callable(first, second)
    positional = len(args) - len(names)
    return call(tx, function, [*extra, *args[:positional]], dict(zip(names, args[positional:])))


@opcode("CALL")
def call_(tx, frame, i, first, second, *args):
    names, frame.kw_names = frame.kw_names, ()
    return call_with_names(tx, names, first, second, args)


@opcode("CALL_KW")
def call_kw(tx, frame, i, names):
    first, second, *args = pop_many(frame, i.arg + 2)
    return call_with_names(tx, as_python(tx, names), first, second, args)


@opcode("CALL_FUNCTION_EX")
def call_function_ex(tx, frame, i):
    kwargs = frame.stack.pop() if i.arg & 1 else DictVal()
    first, second, args = pop_many(frame, 3)
    if type(args) is Const and not hasattr(args.value, "__iter__") or type(kwargs) is Const:
        unsupported(tx, "a call with * or ** of something else")
    if type(kwargs) is not DictVal:
        check_spread(tx, kwargs)
        mapping, kwargs = kwargs, DictVal()
        call_method(tx, kwargs, "update", [mapping])
    function, _ = split_callable(first, second)
    return call(tx, function, unpack(tx, args), named_values(tx, kwargs))


def named_values(tx, dictionary) -> dict:
    """Keyword arguments from a dictionary value."""
    guard_keys(tx, dictionary)
    return {name: realize(tx, value) for name, (_, value) in dictionary.items.items()}


# %% [markdown]
# What `call` does with a callable is the matter of `calls.py`. If it is a function of the program, a frame for it is put on top of
# `tx.frames`, and its own instructions are next.
#
# A `def` inside of the traced program makes a function of the trace, a `FuncVal`. What the statement brings along,
# the closure, annotations and defaults, lies on the stack. Up to 3.12 the bits of the argument say which of these
# there are; since 3.13 each has an instruction of its own.

# %%
@opcode("MAKE_FUNCTION")
def make_function(tx, frame, i, code):
    function = FuncVal(code=code.value, globals=frame.globals, name=code.value.co_name)
    for flag in (8, 4, 2, 1):
        if PYTHON < (3, 13) and i.arg & flag:
            attach(tx, function, flag, frame.stack.pop())
    return function


@opcode("SET_FUNCTION_ATTRIBUTE")
def set_function_attribute(tx, frame, i, value, function):
    attach(tx, function, i.arg, value)
    return function


def attach(tx, function, flag, value):
    """One of the extras of a `def`: its closure, annotations, keyword defaults or defaults."""
    if flag == 8:
        function.closure = list(value.items)
    elif flag == 4:
        pairs = unpack(tx, value)
        function.attrs["__annotations__"] = dict_of({k.value: v for k, v in zip(pairs[::2], pairs[1::2])})
    elif flag == 2:
        function.kwdefaults = named_values(tx, value)
    elif flag == 1:
        function.defaults = unpack(tx, value)


instructions({
    "RETURN_VALUE": lambda tx, frame, i, value: Leave(value),
    "RETURN_CONST": lambda tx, frame, i: Leave(constant_value(tx, i.argval)),
})


# %% [markdown]
# ## Generators
#
# `YIELD_VALUE` ends the turn of a generator's frame: `Leave(yielded=True)` keeps its stack, and `advance` (`interpreter.py`)
# goes on there. `SEND` is one turn of `yield from`: the inner generator gives a value, which goes on outwards, or it has ended,
# and its result is that of the expression.

# %%
instructions({
    "RETURN_GENERATOR": lambda tx, frame, i: NONE,       # the frame is already suspended; this is what the first `send` sends
    "YIELD_VALUE": lambda tx, frame, i, value: Leave(value, yielded=True),
    "END_SEND": lambda tx, frame, i, iterator, value: value,
})


@opcode("SEND")
def send(tx, frame, i, iterator, sent):
    value = advance(tx, iterator, sent) if type(iterator) is GenVal else next_value(tx, iterator)
    if value is not None:
        return [iterator, value]
    jump(frame, i.argval)
    last = iterator.result if type(iterator) is GenVal else NONE
    return last if PYTHON < (3, 12) else [iterator, last]


# %% [markdown]
# ## Exceptions and `with`
#
# In front of a handler CPython puts aside the exception that was being handled before (`PUSH_EXC_INFO`), and takes it back
# behind it (`POP_EXCEPT`). A frame of the trace keeps the present one in `handling`, for a bare `raise` and for
# `sys.exc_info()`.

# %%
instructions({
    "CHECK_EXC_MATCH": lambda tx, frame, i, exc, classes: [exc, boolean(catches(as_python(tx, classes), exc.cls))],
    "LOAD_ASSERTION_ERROR": lambda tx, frame, i: wrap(tx, AssertionError),
})


def catches(classes, cls) -> bool:
    """Whether `except classes` takes an exception of class `cls`. No `__subclasscheck__` is asked."""
    classes = classes if isinstance(classes, tuple) else (classes,)
    if not all(BaseException in getattr(one, "__mro__", ()) for one in classes):
        user_error(TypeError, "catching classes that do not inherit from BaseException is not allowed")
    return any(one in cls.__mro__ for one in classes)


@opcode("PUSH_EXC_INFO")
def push_exc_info(tx, frame, i, exc):
    previous, frame.handling = frame.handling, exc
    return [HandlingVal(previous=previous, current=exc), exc]


@opcode("POP_EXCEPT")
def pop_except(tx, frame, i, handling):
    frame.handling = handling.previous


# %% [markdown]
# `except*` takes an ExceptionGroup apart: the members of the given classes are in a group of their own, which
# is then what is being handled, and the clause after it sees the rest.
#
# A group may hold groups, so `split_group` calls itself, and gives two values: the part that matches and the rest, each a group of the
# same shape (`derived_group`), or nothing. An exception that is no group is put into one before the clause sees it. At the end CPython
# puts together what no clause has taken and what the clauses have raised; if there is any of it, the frame stays plain Python.

# %%
@opcode("CHECK_EG_MATCH")
def check_eg_match(tx, frame, i, exc, classes):
    classes = as_python(tx, classes)
    if exc is NONE:
        return [NONE, NONE]
    if type(exc) is not ExcVal or any(issubclass(c, BaseExceptionGroup) for c in
                                      (classes if type(classes) is tuple else (classes,))):
        unsupported(tx, "a group of exceptions that existed before the trace")
    match, rest = split_group(tx, exc, classes)
    if match is not NONE:
        if match is exc and not issubclass(exc.cls, BaseExceptionGroup):
            match = ExcVal(cls=ExceptionGroup, args=[const(""), TupleVal(items=[exc])], seen=True)
        frame.handling = match
        next(v for v in reversed(frame.stack) if type(v) is HandlingVal).current = match
    return [rest, match]


def split_group(tx, exc, classes) -> tuple:
    """(the part of an exception that is of these classes, the other part); NONE where there is none."""
    if issubclass(exc.cls, classes):
        return exc, NONE
    if not issubclass(exc.cls, BaseExceptionGroup):
        return NONE, exc
    return tuple(derived_group(tx, exc, [part for part in parts if part is not NONE])
                 for parts in zip(*(split_group(tx, member, classes) for member in exc.args[1].items)))


def derived_group(tx, exc, members):
    if not members:
        return NONE
    attrs = {name: ListVal(items=unpack(tx, v)) for name, v in exc.attrs.items() if name == "__notes__"}
    return ExcVal(cls=ExceptionGroup, args=[exc.args[0], ListVal(items=members)], cause=exc.cause,
                  context=exc.context, seen=exc.seen, attrs=attrs)


@opcode("PREP_RERAISE_STAR")
def prep_reraise_star(tx, frame, i, exc, left):
    if not all(v is NONE for v in unpack(tx, left)):
        plain_python(tx, "exceptions that except* does not handle or raises")
    return NONE


@opcode("CALL_INTRINSIC_2")
def call_intrinsic_2(tx, frame, i, first, second):
    if i.arg != 1:
        unsupported(tx, f"the intrinsic {i.argrepr}")
    return prep_reraise_star(tx, frame, i, first, second)


# %% [markdown]
# Raising in the trace is raising a Python exception in the compiler, `UserError`, that carries the value of the
# program's exception. The loop of the interpreter catches it there, and looks for a handler of the program.

# %%
@opcode("RERAISE")
def reraise(tx, frame, i, exc):
    raise made_here(tx, exc)


def made_here(tx, exc) -> UserError:
    """What raises an exception of the trace. One that existed before, as in a resumed handler, is for Python
    to raise: it has a traceback and a context, which raising it changes."""
    if type(exc) is not ExcVal:
        unsupported(tx, "raising an exception that existed before the trace")
    return UserError(exc)


@opcode("RAISE_VARARGS")
def raise_varargs(tx, frame, i, *operands):
    exc, cause = (*operands, None, None)[:2]
    if exc is None:                              # a bare `raise`
        raise made_here(tx, handled_exception(tx))
    if is_class(exc):
        exc = call(tx, exc, [])
    if not issubclass(exc.cls, BaseException):
        user_error(TypeError, "exceptions must derive from BaseException")
    made_here(tx, exc)                           # or a break
    if cause is not None:
        if is_class(cause) and issubclass(cause.real, BaseException):
            cause = call(tx, cause, [])
        if not issubclass(cause.cls, (BaseException, types.NoneType)):
            user_error(TypeError, "exception causes must derive from BaseException")
        exc.cause = cause
    raise made_here(tx, exc)


# %% [markdown]
# `with` looks up both methods first and then calls `__enter__`, as Python does: an object without `__exit__` is
# never entered. If the body raises, `__exit__` is called with the exception, and its answer says whether the
# exception is over.

# %%
@opcode("BEFORE_WITH")
def before_with(tx, frame, i, context):
    enter = get_special(tx, context, "__enter__")
    leave = get_special(tx, context, "__exit__", " (missed __exit__ method)")
    return [leave, call(tx, enter, [])]


def get_special(tx, value, name, more=""):
    cls = value.cls
    if lookup(cls, name) is MISSING:
        user_error(TypeError, f"'{cls.__name__}' object does not support the context manager protocol{more}")
    return get_attribute(tx, value, name)


@opcode("WITH_EXCEPT_START")
def with_except_start(tx, frame, i):
    leave, exc = frame.stack[-4], frame.stack[-1]
    traceback = exc.traceback if type(exc) is ExcVal else get_attribute(tx, exc, "__traceback__")
    return call(tx, leave, [wrap(tx, exc.cls), exc, traceback])


# %% [markdown]
# ## Imports and intrinsics
#
# A module that the program has imported before is found in `sys.modules`. A first import runs the module's
# code, which is not for capture to do, and `from package import name` may be one. If a module has no such name, Python says so. What is
# not installed is looked for in each call, as in eager.

# %%
def is_absent(module: str) -> bool:
    return module not in sys.modules and importlib.util.find_spec(module) is None


@opcode("IMPORT_NAME")
def import_name(tx, frame, i, level, names):
    full = i.argval
    if level.value:
        package = frame.globals.get("__package__")
        if not package or not isinstance(package, str) or package.count(".") < level.value - 1:
            unsupported(tx, "a relative import outside of a package")
        full = importlib.util.resolve_name("." * level.value + full, package)
    if sys.modules.get(full) is None:
        top = full.partition(".")[0]
        if top not in sys.modules and answer(tx, is_absent, top):
            user_error(ModuleNotFoundError, f"No module named {top!r}", name=const(top))
        unsupported(tx, f"importing {full} for the first time")
    package = sys.modules[full] if names is not NONE and hasattr(sys.modules[full], "__path__") else None
    if package and not all(name == "*" or hasattr(package, name) for name in as_python(tx, names)):
        unsupported(tx, f"importing a part of {full} for the first time")
    if not level.value and names is NONE:           # `import a.b` binds a
        full = full.split(".")[0]
    return wrap(tx, sys.modules[full], ItemSource(constant_source(tx, sys.modules), full))


@opcode("IMPORT_FROM")
def import_from(tx, frame, i):
    module = frame.stack[-1]
    if (found := unless_raised(AttributeError, lambda: get_attribute(tx, module, i.argval))) is not None:
        return found
    try:
        exec(f"from module import {i.argval}", {"__builtins__": {"__import__": lambda *_: module.real}})
    except ImportError as error:
        named = {key: const(value) for key in ("name", "path", "name_from") if (value := getattr(error, key, None)) is not None}
        user_error(ImportError, *error.args, **named)
    unsupported(tx, f"importing {i.argval}, which the function has deleted")


@opcode("CALL_INTRINSIC_1")
def call_intrinsic_1(tx, frame, i, value):
    if i.arg not in INTRINSICS:
        unsupported(tx, f"the intrinsic {i.argrepr}")
    return INTRINSICS[i.arg](tx, value)


# 3 turns the StopIteration that leaves a generator's body into a RuntimeError: `advance` does it
INTRINSICS = {3: lambda tx, exc: exc, 5: lambda tx, value: unary(tx, "pos", value),
              6: lambda tx, value: TupleVal(items=unpack(tx, value))}


# %% [markdown]
# ## Pattern matching
#
# A `match` statement is compiled to questions about its subject: is it a sequence or a mapping, which is a flag of
# its class; has it these keys; is it an instance of this class, with these attributes? An answer is a tuple of what
# was found, or None. For positions in a class pattern the class has `__match_args__`, and a few built-in types stand
# for themselves.

# %%
# CPython's flags of classes, for patterns
IS_SEQUENCE, IS_MAPPING, MATCHES_ITSELF = 1 << 5, 1 << 6, 1 << 22


instructions({
    "GET_LEN": lambda tx, frame, i: length(tx, frame.stack[-1]),
    "MATCH_SEQUENCE": lambda tx, frame, i: boolean(frame.stack[-1].cls.__flags__ & IS_SEQUENCE),
    "MATCH_MAPPING": lambda tx, frame, i: boolean(frame.stack[-1].cls.__flags__ & IS_MAPPING),
})


@opcode("MATCH_KEYS")
def match_keys(tx, frame, i):
    subject, absent = frame.stack[-2], ObjVal()
    get = get_attribute(tx, subject, "get")
    found = [call(tx, get, [key, absent]) for key in unpack(tx, frame.stack[-1])]
    return NONE if absent in found else TupleVal(items=found)


@opcode("MATCH_CLASS")
def match_class(tx, frame, i, subject, cls, names):
    if not is_class(cls):
        unsupported(tx, "a class pattern without a class")
    if not truth(tx, call(tx, wrap(tx, isinstance), [subject, cls])):
        return NONE
    order, wanted = lookup(cls.real, "__match_args__"), as_python(tx, names)
    itself = order is MISSING and i.arg == 1 and cls.real.__flags__ & MATCHES_ITSELF       # int(x), str(x)
    if i.arg and not itself:
        named = order[:i.arg] if type(order) is tuple else ()
        wanted = (*named, *wanted)
        if len(named) < i.arg or {type(n) for n in wanted} != {str} or len(set(wanted)) < len(wanted):
            unsupported(tx, f"a pattern that does not fit the class {cls.real.__name__}")
    found = [subject] if itself else []
    for name in wanted:
        value = unless_raised(AttributeError, lambda: get_attribute(tx, subject, name))
        if value is None:
            return NONE
        found.append(value)
    return TupleVal(items=found)
