# %% [markdown]
# # The instructions
#
# One handler per bytecode instruction, three to ten lines each. CPython changes its bytecode in every release: 3.12
# fused `LOAD_METHOD` into `LOAD_ATTR` and inlined comprehensions, 3.13 fused pairs of loads and moved the NULL of a
# call. Names that exist in one release only are simply handlers that the others never meet; where one name means
# different things, the handler asks `PYTHON`.
#
# Locals and cells share one dictionary, as they share one array in CPython: a captured variable's entry is a `CellVal`.

# %%
from __future__ import annotations

import builtins
import types

from ..ch02_guards.sources import BuiltinSource, ConstantSource, DictGetSource, GlobalSource
from .attributes import MISSING, call, class_of, get_attribute, lookup, set_attribute
from .calls import call_value
from .interpreter import (
    PYTHON, Tracer, Yielded, advance, guard, is_library, jump, mark_dirty, opcode, unsupported)
from .iterate import iterate, next_value, unpack
from .methods import call_method, dict_update, touch
from .operations import (
    NotConstant, as_python, binary, compare, contains, delete_item, fold, get_item, identical, set_item, truth, unary)
from .values import (
    CellVal, Const, DictVal, ExcVal, FuncVal, GenVal, IterVal, Lazy, ListVal, MethodName, MethodVal, NONE, NULL,
    ObjVal, SetVal, SliceVal, SuperVal, TensorVal, TupleVal, UserError, Value, describe, user_error)
from .wrap import guard_missing, key_of, realize, wrap


def pop_many(frame, count: int) -> list:
    if count == 0:
        return []
    items = frame.stack[-count:]
    del frame.stack[-count:]
    return items


# %% [markdown]
# ## Nothing to do

# %%
@opcode("RESUME", "NOP", "PRECALL", "MAKE_CELL_DONE", "EXTENDED_ARG", "CACHE", "END_SEND_NOP", "GEN_START")
def nop(tx, frame, i):
    pass


@opcode("POP_TOP", "END_FOR")
def pop_top(tx, frame, i):
    frame.stack.pop()


@opcode("PUSH_NULL")
def push_null(tx, frame, i):
    frame.stack.append(NULL)


@opcode("COPY")
def copy_(tx, frame, i):
    frame.stack.append(frame.stack[-i.arg])


@opcode("SWAP")
def swap(tx, frame, i):
    stack = frame.stack
    stack[-i.arg], stack[-1] = stack[-1], stack[-i.arg]


# %% [markdown]
# ## Variables

# %%
def read_local(tx, frame, name):
    value = frame.locals.get(name)
    if value is None:
        user_error(UnboundLocalError, f"cannot access local variable '{name}' where it is not associated with a value")
    if type(value) is Lazy:
        value = frame.locals[name] = realize(tx, value)
    return value


@opcode("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_CLOSURE")
def load_fast(tx, frame, i):
    frame.stack.append(read_local(tx, frame, i.argval))


@opcode("LOAD_FAST_LOAD_FAST")
def load_fast_load_fast(tx, frame, i):
    for name in i.argval:
        frame.stack.append(read_local(tx, frame, name))


@opcode("LOAD_FAST_AND_CLEAR")
def load_fast_and_clear(tx, frame, i):
    frame.stack.append(frame.locals.pop(i.argval, NULL))


@opcode("STORE_FAST")
def store_fast(tx, frame, i):
    store_local(frame, i.argval, frame.stack.pop())


def store_local(frame, name, value):
    if value is NULL:
        frame.locals.pop(name, None)
    else:
        frame.locals[name] = value


@opcode("STORE_FAST_STORE_FAST")
def store_fast_store_fast(tx, frame, i):
    for name in i.argval:
        store_local(frame, name, frame.stack.pop())


@opcode("STORE_FAST_LOAD_FAST")
def store_fast_load_fast(tx, frame, i):
    store_local(frame, i.argval[0], frame.stack.pop())
    frame.stack.append(read_local(tx, frame, i.argval[1]))


@opcode("DELETE_FAST")
def delete_fast(tx, frame, i):
    read_local(tx, frame, i.argval)
    del frame.locals[i.argval]


@opcode("LOAD_CONST")
def load_const(tx, frame, i):
    frame.stack.append(constant_value(tx, i.argval))


def constant_value(tx, value):
    if type(value) in (tuple, frozenset):
        from .operations import wrap_constant
        return wrap_constant(tx, value)
    return Const(value=value)


# %% [markdown]
# Cells.

# %%
@opcode("MAKE_CELL")
def make_cell(tx, frame, i):
    content = frame.locals.get(i.argval)
    if type(content) is not CellVal:
        frame.locals[i.argval] = CellVal(content=content)


@opcode("COPY_FREE_VARS")
def copy_free_vars(tx, frame, i):
    for name, cell in zip(frame.code.co_freevars, frame.closure):
        frame.locals[name] = cell


def read_cell(tx, cell, name):
    if type(cell.content) is Lazy:
        cell.content = realize(tx, cell.content)
    if cell.content is None:
        user_error(NameError, f"cannot access free variable '{name}' where it is not associated with a value")
    return cell.content


@opcode("LOAD_DEREF", "LOAD_CLASSDEREF")
def load_deref(tx, frame, i):
    frame.stack.append(read_cell(tx, frame.locals[i.argval], i.argval))


@opcode("STORE_DEREF")
def store_deref(tx, frame, i):
    cell = frame.locals[i.argval]
    cell.content = frame.stack.pop()
    if cell.real is not None:
        if cell.source is None:
            unsupported(tx, "writing to a variable captured by a library function")
        cell.mutated = True
        mark_dirty(tx, cell)


@opcode("DELETE_DEREF")
def delete_deref(tx, frame, i):
    unsupported(tx, "deleting a captured variable")


# %% [markdown]
# Globals. A name that is not in the globals is a builtin; a later call is guarded against somebody shadowing it.

# %%
def global_source(tx, frame, name):
    if frame.globals is tx.root_globals:
        return GlobalSource(name)
    return None if frame.globals_source is None else DictGetSource(frame.globals_source, name)


def read_global(tx, frame, name) -> Value:
    written = tx.global_writes.get((id(frame.globals), name))
    if written is not None:
        if written[1] is None:
            user_error(NameError, f"name '{name}' is not defined")
        return written[1]
    if name in frame.globals:
        return wrap(tx, frame.globals[name], global_source(tx, frame, name))
    namespace = frame.globals.get("__builtins__", builtins)
    namespace = namespace if isinstance(namespace, dict) else vars(namespace)
    if name not in namespace:
        user_error(NameError, f"name '{name}' is not defined")
    return wrap(tx, namespace[name])


@opcode("LOAD_GLOBAL")
def load_global(tx, frame, i):
    value = read_global(tx, frame, i.argval)
    if i.arg & 1 and PYTHON < (3, 13):
        frame.stack.append(NULL)
    frame.stack.append(value)
    if i.arg & 1 and PYTHON >= (3, 13):
        frame.stack.append(NULL)


@opcode("LOAD_NAME")
def load_name(tx, frame, i):
    frame.stack.append(read_global(tx, frame, i.argval))


@opcode("STORE_GLOBAL")
def store_global(tx, frame, i):
    write_global(tx, frame, i.argval, frame.stack.pop())


@opcode("DELETE_GLOBAL")
def delete_global(tx, frame, i):
    unsupported(tx, "deleting a global variable")


def write_global(tx, frame, name, value):
    if frame.globals is not tx.root_globals and frame.globals_source is None:
        unsupported(tx, "writing to a global variable of a library")
    tx.global_writes[id(frame.globals), name] = (global_source(tx, frame, name), value, frame.globals)


# %% [markdown]
# ## Attributes and subscripts

# %%
@opcode("LOAD_ATTR")
def load_attr(tx, frame, i):
    owner = frame.stack[-1]
    value = get_attribute(tx, owner, i.argval)
    frame.stack.pop()
    if PYTHON >= (3, 12) and i.arg & 1:
        push_method(frame, value)
    else:
        frame.stack.append(value)


def push_method(frame, value):
    """The pair that a call expects: (NULL, callable), in the order of the release."""
    frame.stack.extend((value, NULL) if PYTHON >= (3, 13) else (NULL, value))


@opcode("LOAD_METHOD")
def load_method(tx, frame, i):
    value = get_attribute(tx, frame.stack[-1], i.argval)
    frame.stack.pop()
    push_method(frame, value)


@opcode("LOAD_SUPER_ATTR")
def load_super_attr(tx, frame, i):
    _, cls, obj = pop_many(frame, 3)
    value = get_attribute(tx, SuperVal(cls=cls.real, self=obj), i.argval)
    if i.arg & 1:
        push_method(frame, value)
    else:
        frame.stack.append(value)


@opcode("STORE_ATTR")
def store_attr(tx, frame, i):
    value, owner = pop_many(frame, 2)
    set_attribute(tx, owner, i.argval, value)


@opcode("DELETE_ATTR")
def delete_attr(tx, frame, i):
    set_attribute(tx, frame.stack.pop(), i.argval, None)


@opcode("BINARY_SUBSCR")
def binary_subscr(tx, frame, i):
    container, key = pop_many(frame, 2)
    frame.stack.append(get_item(tx, container, key))


@opcode("STORE_SUBSCR")
def store_subscr(tx, frame, i):
    value, container, key = pop_many(frame, 3)
    set_item(tx, container, key, value)


@opcode("DELETE_SUBSCR")
def delete_subscr(tx, frame, i):
    container, key = pop_many(frame, 2)
    delete_item(tx, container, key)


@opcode("BINARY_SLICE")
def binary_slice(tx, frame, i):
    container, start, stop = pop_many(frame, 3)
    frame.stack.append(get_item(tx, container, SliceVal(start, stop, NONE)))


@opcode("STORE_SLICE")
def store_slice(tx, frame, i):
    value, container, start, stop = pop_many(frame, 4)
    set_item(tx, container, SliceVal(start, stop, NONE), value)


# %% [markdown]
# ## Operators

# %%
@opcode("BINARY_OP")
def binary_op(tx, frame, i):
    a, b = pop_many(frame, 2)
    symbol = i.argrepr
    inplace = symbol.endswith("=")
    frame.stack.append(binary(tx, symbol.removesuffix("=") if inplace else symbol, a, b, inplace))


@opcode("COMPARE_OP")
def compare_op(tx, frame, i):
    a, b = pop_many(frame, 2)
    result = compare(tx, i.argval if isinstance(i.argval, str) else str(i.argrepr), a, b)
    if PYTHON >= (3, 13) and i.arg & 16:
        result = Const(value=truth(tx, result))
    frame.stack.append(result)


@opcode("IS_OP")
def is_op(tx, frame, i):
    a, b = pop_many(frame, 2)
    same = identical(a, b)
    if not same and a.source is not None and b.source is not None:
        guard(tx, a.source, "NOT_ALIASED", b.source)
    frame.stack.append(Const(value=same != bool(i.arg)))


@opcode("CONTAINS_OP")
def contains_op(tx, frame, i):
    item, container = pop_many(frame, 2)
    frame.stack.append(Const(value=contains(tx, container, item) != bool(i.arg)))


def unary_opcode(name, function):
    @opcode(name)
    def handler(tx, frame, i):
        frame.stack.append(unary(tx, function, frame.stack.pop()))


for _opname, _function in (("UNARY_NEGATIVE", "neg"), ("UNARY_POSITIVE", "pos"), ("UNARY_INVERT", "invert"),
                           ("UNARY_NOT", "not")):
    unary_opcode(_opname, _function)


@opcode("TO_BOOL")
def to_bool(tx, frame, i):
    frame.stack.append(Const(value=truth(tx, frame.stack.pop())))


# %% [markdown]
# ## Jumps

# %%
@opcode("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE")
def jump_(tx, frame, i):
    jump(frame, i.argval)


def jump_opcodes(names, condition, keep=False):
    @opcode(*names)
    def handler(tx, frame, i):
        if condition(tx, frame.stack[-1]):
            if not keep:
                frame.stack.pop()
            jump(frame, i.argval)
        else:
            frame.stack.pop()


def is_none(tx, value):
    return identical(value, NONE)


jump_opcodes(("POP_JUMP_IF_TRUE", "POP_JUMP_FORWARD_IF_TRUE", "POP_JUMP_BACKWARD_IF_TRUE"), truth)
jump_opcodes(("POP_JUMP_IF_FALSE", "POP_JUMP_FORWARD_IF_FALSE", "POP_JUMP_BACKWARD_IF_FALSE"),
             lambda tx, v: not truth(tx, v))
jump_opcodes(("POP_JUMP_IF_NONE", "POP_JUMP_FORWARD_IF_NONE", "POP_JUMP_BACKWARD_IF_NONE"), is_none)
jump_opcodes(("POP_JUMP_IF_NOT_NONE", "POP_JUMP_FORWARD_IF_NOT_NONE", "POP_JUMP_BACKWARD_IF_NOT_NONE"),
             lambda tx, v: not is_none(tx, v))
jump_opcodes(("JUMP_IF_TRUE_OR_POP",), truth, keep=True)
jump_opcodes(("JUMP_IF_FALSE_OR_POP",), lambda tx, v: not truth(tx, v), keep=True)


@opcode("GET_ITER")
def get_iter(tx, frame, i):
    frame.stack[-1] = iterate(tx, frame.stack[-1])


@opcode("FOR_ITER")
def for_iter(tx, frame, i):
    value = next_value(tx, frame.stack[-1])
    if value is not None:
        frame.stack.append(value)
        return
    frame.stack.pop()
    jump(frame, i.argval)
    if PYTHON >= (3, 12):                        # 3.12: skip END_FOR; 3.13: skip END_FOR and the POP_TOP behind it
        frame.ip += 1 if PYTHON < (3, 13) else 2


# %% [markdown]
# ## Building containers and strings

# %%
@opcode("BUILD_TUPLE")
def build_tuple(tx, frame, i):
    frame.stack.append(TupleVal(items=pop_many(frame, i.arg)))


@opcode("BUILD_LIST")
def build_list(tx, frame, i):
    frame.stack.append(ListVal(items=pop_many(frame, i.arg)))


@opcode("BUILD_SET")
def build_set(tx, frame, i):
    frame.stack.append(SetVal(items={key_of(tx, v): v for v in pop_many(frame, i.arg)}))


@opcode("BUILD_MAP")
def build_map(tx, frame, i):
    flat = pop_many(frame, 2 * i.arg)
    result = DictVal()
    for k, v in zip(flat[::2], flat[1::2]):
        set_item(tx, result, k, v)
    frame.stack.append(result)


@opcode("BUILD_CONST_KEY_MAP")
def build_const_key_map(tx, frame, i):
    keys = unpack(tx, frame.stack.pop())
    frame.stack.append(DictVal(items={key_of(tx, k): [k, v] for k, v in zip(keys, pop_many(frame, i.arg))}))


@opcode("BUILD_SLICE")
def build_slice(tx, frame, i):
    parts = pop_many(frame, i.arg)
    frame.stack.append(SliceVal(*parts, *([NONE] if i.arg == 2 else [])))


@opcode("BUILD_STRING")
def build_string(tx, frame, i):
    parts = pop_many(frame, i.arg)
    frame.stack.append(Const(value="".join(as_python(tx, p) for p in parts)))


CONVERSIONS = {0: None, 1: str, 2: repr, 3: ascii}


@opcode("FORMAT_VALUE")
def format_value(tx, frame, i):
    spec = frame.stack.pop() if i.arg & 4 else Const(value="")
    format_one(tx, frame, CONVERSIONS[i.arg & 3], spec)


def format_one(tx, frame, conversion, spec):
    value = frame.stack.pop()
    if conversion is not None:
        value = call_value(tx, wrap(tx, conversion), [value], {})
    if type(value) is not Const:
        value = call_value(tx, wrap(tx, format if spec.value else str), [value, spec] if spec.value else [value], {})
        frame.stack.append(value)
    else:
        frame.stack.append(fold(tx, format, [value, spec]))


@opcode("CONVERT_VALUE")
def convert_value(tx, frame, i):
    frame.stack.append(call_value(tx, wrap(tx, CONVERSIONS[i.arg]), [frame.stack.pop()], {}))


@opcode("FORMAT_SIMPLE")
def format_simple(tx, frame, i):
    format_one(tx, frame, None, Const(value=""))


@opcode("FORMAT_WITH_SPEC")
def format_with_spec(tx, frame, i):
    spec = frame.stack.pop()
    format_one(tx, frame, None, spec)


@opcode("LIST_APPEND")
def list_append(tx, frame, i):
    item = frame.stack.pop()
    frame.stack[-i.arg].items.append(item)


@opcode("SET_ADD")
def set_add(tx, frame, i):
    item = frame.stack.pop()
    frame.stack[-i.arg].items.setdefault(key_of(tx, item), item)


@opcode("MAP_ADD")
def map_add(tx, frame, i):
    key, value = pop_many(frame, 2)
    set_item(tx, frame.stack[-i.arg], key, value)


@opcode("LIST_EXTEND")
def list_extend(tx, frame, i):
    items = frame.stack.pop()
    frame.stack[-i.arg].items.extend(unpack(tx, items))


@opcode("SET_UPDATE")
def set_update(tx, frame, i):
    items = frame.stack.pop()
    for item in unpack(tx, items):
        frame.stack[-i.arg].items.setdefault(key_of(tx, item), item)


@opcode("DICT_UPDATE", "DICT_MERGE")
def dict_merge(tx, frame, i):
    other = frame.stack.pop()
    target = frame.stack[-i.arg]
    if i.opname == "DICT_MERGE" and type(other) is DictVal:
        for key in other.items:
            if key in target.items:
                user_error(TypeError, f"got multiple values for keyword argument {key!r}")
    dict_update(tx, target, other)


@opcode("LIST_TO_TUPLE")
def list_to_tuple(tx, frame, i):
    frame.stack.append(TupleVal(items=unpack(tx, frame.stack.pop())))


@opcode("UNPACK_SEQUENCE")
def unpack_sequence(tx, frame, i):
    items = unpack(tx, frame.stack[-1])
    if len(items) != i.arg:
        words = f"not enough values to unpack (expected {i.arg}, got {len(items)})" if len(items) < i.arg else \
            f"too many values to unpack (expected {i.arg})"
        user_error(ValueError, words)
    frame.stack.pop()
    frame.stack.extend(reversed(items))


@opcode("UNPACK_EX")
def unpack_ex(tx, frame, i):
    before, after = i.arg & 0xFF, i.arg >> 8
    items = unpack(tx, frame.stack.pop())
    if len(items) < before + after:
        user_error(ValueError, f"not enough values to unpack (expected at least {before + after}, got {len(items)})")
    tail = items[len(items) - after:]
    middle = ListVal(items=items[before:len(items) - after])
    frame.stack.extend(reversed([*items[:before], middle, *tail]))


# %% [markdown]
# ## Calls and functions
#
# Before 3.13 the stack of a call is `NULL, callable, args` or `method, self, args`; since 3.13 the first two have
# changed places.

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
    from .wrap import guard_keys
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
    from .iterate import length
    frame.stack.append(length(tx, frame.stack[-1]))
