# %% [markdown]
# # The instructions, continued: calls, generators, exceptions
#
# The instructions that leave a frame or enter another one: calls and function definitions, `yield`, the
# exception machinery that `try` and `with` compile to, imports, and pattern matching.

# %%
from __future__ import annotations


from .attributes import MISSING, get_attribute, lookup
from .calls import call_value
from .interpreter import PYTHON, Yielded, advance, jump, opcode, unsupported
from .iterate import iterate, next_value, unpack
from .methods import dict_update
from .operations import as_python, contains, get_item, identical, truth, unary
from .values import (
    Const, DictVal, ExcVal, FuncVal, GenVal, ListVal, NONE, NULL, ObjVal, TupleVal, UserError, user_error)
from .wrap import realize, wrap
from .iterate import length
from .opcodes import constant_value, pop_many
from .wrap import guard_keys


# %% [markdown]
# ## Calls and functions
#
# Before 3.13 the stack of a call is `NULL, callable, args` or `method, self, args`; since 3.13 the first
# two have changed places.

# %%
@opcode("KW_NAMES")
def kw_names(tx, frame, i):
    frame.kw_names = frame.code.co_consts[i.arg]


def split_callable(stack, count):
    """(callable, extra leading arguments) below `count` arguments on the stack."""
    first, second = stack[-count - 2], stack[-count - 1]
    if PYTHON >= (3, 13):
        return first, [] if second is NULL else [second]
    return (second, []) if first is NULL else (first, [second])


def finish_call(tx, frame, count, names):
    args = frame.stack[len(frame.stack) - count:]
    function, extra = split_callable(frame.stack, count)
    positional = count - len(names)
    result = call_value(tx, function, extra + args[:positional], dict(zip(names, args[positional:])))
    del frame.stack[-count - 2:]
    frame.stack.append(result)


@opcode("CALL")
def call_(tx, frame, i):
    names, frame.kw_names = frame.kw_names, ()
    finish_call(tx, frame, i.arg, names)


@opcode("CALL_KW")
def call_kw(tx, frame, i):
    names = tuple(v.value for v in unpack(tx, frame.stack.pop()))
    finish_call(tx, frame, i.arg, names)


@opcode("CALL_FUNCTION_EX")
def call_function_ex(tx, frame, i):
    kwargs = frame.stack.pop() if i.arg & 1 else DictVal()
    args = frame.stack.pop()
    if PYTHON >= (3, 13):
        frame.stack.pop()
        function = frame.stack.pop()
    else:
        function = frame.stack.pop()
        frame.stack.pop()
    if type(kwargs) is not DictVal:
        merged = DictVal()
        dict_update(tx, merged, kwargs)
        kwargs = merged
    guard_keys(tx, kwargs)
    named = {k: realize(tx, v) for k, (_, v) in kwargs.items.items()}
    frame.stack.append(call_value(tx, function, unpack(tx, args), named))


@opcode("MAKE_FUNCTION")
def make_function(tx, frame, i):
    if PYTHON >= (3, 13):
        code = frame.stack.pop().value
        frame.stack.append(new_function(frame, code, code.co_qualname))
        return
    code = frame.stack.pop().value
    function = new_function(frame, code, code.co_qualname)
    for flag in (8, 4, 2, 1):
        if i.arg & flag:
            attach(tx, function, flag, frame.stack.pop())
    frame.stack.append(function)


def new_function(frame, code, name):
    return FuncVal(code=code, globals=frame.globals, globals_source=frame.globals_source, name=name.split(".")[-1])


def attach(tx, function, flag, value):
    if flag == 8:
        function.closure = list(value.items)
    elif flag == 2:
        function.kwdefaults = {k: realize(tx, v) for k, (_, v) in value.items.items()}
    elif flag == 1:
        function.defaults = unpack(tx, value)


@opcode("SET_FUNCTION_ATTRIBUTE")
def set_function_attribute(tx, frame, i):
    function = frame.stack.pop()
    attach(tx, function, i.arg, frame.stack.pop())
    frame.stack.append(function)


@opcode("RETURN_VALUE")
def return_value(tx, frame, i):
    return frame.stack.pop()


@opcode("RETURN_CONST")
def return_const(tx, frame, i):
    return constant_value(tx, i.argval)


# %% [markdown]
# ## Generators

# %%
@opcode("RETURN_GENERATOR")
def return_generator(tx, frame, i):
    frame.stack.append(NONE)                     # the frame is already suspended; this is what the first `send` sends


@opcode("YIELD_VALUE")
def yield_value(tx, frame, i):
    return Yielded(frame.stack.pop())


@opcode("GET_YIELD_FROM_ITER")
def get_yield_from_iter(tx, frame, i):
    frame.stack[-1] = iterate(tx, frame.stack[-1])


@opcode("SEND")
def send(tx, frame, i):
    sent = frame.stack.pop()
    iterator = frame.stack[-1]
    if type(iterator) is GenVal:
        value = advance(tx, iterator, sent)
        last = None if value is not None else iterator.result
    else:
        value, last = next_value(tx, iterator), NONE
    if value is not None:
        frame.stack.append(value)
        return
    if PYTHON < (3, 12):
        frame.stack[-1] = last
    else:
        frame.stack.append(last)
    jump(frame, i.argval)


@opcode("END_SEND")
def end_send(tx, frame, i):
    del frame.stack[-2]


# %% [markdown]
# ## Exceptions and `with`

# %%
@opcode("PUSH_EXC_INFO")
def push_exc_info(tx, frame, i):
    exc = frame.stack.pop()
    frame.stack.extend((frame.handling, exc))
    frame.handling = exc


@opcode("POP_EXCEPT")
def pop_except(tx, frame, i):
    frame.handling = frame.stack.pop()


@opcode("CHECK_EXC_MATCH")
def check_exc_match(tx, frame, i):
    classes = as_python(tx, frame.stack.pop())
    frame.stack.append(Const(value=issubclass(frame.stack[-1].cls, classes)))


@opcode("RERAISE")
def reraise(tx, frame, i):
    raise UserError(frame.stack.pop())


@opcode("RAISE_VARARGS")
def raise_varargs(tx, frame, i):
    if i.arg == 0:
        for f in reversed(tx.frames):
            if type(f.handling) is ExcVal:
                raise UserError(f.handling)
        user_error(RuntimeError, "No active exception to reraise")
    cause = frame.stack.pop() if i.arg == 2 else None
    exc = frame.stack.pop()
    if type(exc) is ObjVal and isinstance(exc.real, type):
        exc = call_value(tx, exc, [], {})
    if type(exc) is ObjVal and isinstance(exc.real, BaseException):
        exc = ExcVal(cls=exc.cls, args=[wrap(tx, a) for a in exc.real.args], real=exc.real, source=exc.source)
    if type(exc) is not ExcVal:
        user_error(TypeError, "exceptions must derive from BaseException")
    exc.cause = cause
    raise UserError(exc)


@opcode("LOAD_ASSERTION_ERROR")
def load_assertion_error(tx, frame, i):
    frame.stack.append(wrap(tx, AssertionError))


@opcode("BEFORE_WITH")
def before_with(tx, frame, i):
    context = frame.stack[-1]
    leave, enter = get_special(tx, context, "__exit__"), get_special(tx, context, "__enter__")
    entered = call_value(tx, enter, [], {})
    frame.stack[-1] = leave
    frame.stack.append(entered)


def get_special(tx, value, name):
    if type(value) is ObjVal and lookup(value.cls, name) is MISSING:
        user_error(TypeError, f"'{value.cls.__name__}' object does not support the context manager protocol")
    return get_attribute(tx, value, name)


@opcode("WITH_EXCEPT_START")
def with_except_start(tx, frame, i):
    exc = frame.stack[-1]
    leave = frame.stack[-4]
    frame.stack.append(call_value(tx, leave, [wrap(tx, exc.cls), exc, NONE], {}))


# %% [markdown]
# ## Imports and intrinsics

# %%
@opcode("IMPORT_NAME")
def import_name(tx, frame, i):
    import sys
    level, names = frame.stack[-2].value, frame.stack[-1]
    if level:
        import importlib.util
        package = frame.globals.get("__package__") or frame.globals.get("__name__", "").rpartition(".")[0]
        full = importlib.util.resolve_name("." * level + (i.argval or ""), package)
    else:
        full = i.argval
    if full not in sys.modules:
        unsupported(tx, f"importing {full} for the first time")
    del frame.stack[-2:]
    module = sys.modules[full] if names is not NONE and not identical(names, NONE) or level else \
        sys.modules[full.split(".")[0]]
    frame.stack.append(wrap(tx, module))


@opcode("IMPORT_FROM")
def import_from(tx, frame, i):
    frame.stack.append(get_attribute(tx, frame.stack[-1], i.argval))


@opcode("CALL_INTRINSIC_1")
def call_intrinsic_1(tx, frame, i):
    value = frame.stack.pop()
    if i.arg == 5:                               # unary plus
        frame.stack.append(unary(tx, "pos", value))
    elif i.arg == 6:                             # list to tuple
        frame.stack.append(TupleVal(items=unpack(tx, value)))
    elif i.arg == 3:                             # StopIteration inside a generator
        if type(value) is ExcVal and issubclass(value.cls, StopIteration):
            user_error(RuntimeError, "generator raised StopIteration")
        frame.stack.append(value)
    else:
        unsupported(tx, f"the intrinsic {i.argrepr}")


@opcode("GET_LEN")
def get_len(tx, frame, i):
    frame.stack.append(length(tx, frame.stack[-1]))


# %% [markdown]
# ## Pattern matching

# %%
@opcode("MATCH_SEQUENCE")
def match_sequence(tx, frame, i):
    frame.stack.append(Const(value=type(frame.stack[-1]) in (TupleVal, ListVal)))


@opcode("MATCH_MAPPING")
def match_mapping(tx, frame, i):
    frame.stack.append(Const(value=type(frame.stack[-1]) is DictVal))


@opcode("MATCH_KEYS")
def match_keys(tx, frame, i):
    subject, keys = frame.stack[-2], unpack(tx, frame.stack[-1])
    if all(contains(tx, subject, k) for k in keys):
        frame.stack.append(TupleVal(items=[get_item(tx, subject, k) for k in keys]))
    else:
        frame.stack.append(NONE)


@opcode("MATCH_CLASS")
def match_class(tx, frame, i):
    subject, cls, names = pop_many(frame, 3)
    names = [n.value for n in unpack(tx, names)]
    if not truth(tx, call_value(tx, wrap(tx, isinstance), [subject, cls], {})):
        frame.stack.append(NONE)
        return
    if i.arg and not hasattr(cls.real, "__match_args__"):        # int(x), str(x): the subject itself
        found = [subject]
    else:
        found = [get_attribute(tx, subject, n) for n in getattr(cls.real, "__match_args__", ())[:i.arg]]
    frame.stack.append(TupleVal(items=found + [get_attribute(tx, subject, n) for n in names]))
