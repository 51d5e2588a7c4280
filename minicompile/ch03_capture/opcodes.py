# %% [markdown]
# # The instructions
#
# One handler per bytecode instruction, three to ten lines each. CPython changes its bytecode in every
# release: 3.12 fused `LOAD_METHOD` into `LOAD_ATTR` and inlined comprehensions, 3.13 fused pairs of loads
# and moved the NULL of a call. Names that exist in one release only are simply handlers that the others
# never meet; where one name means different things, the handler asks `PYTHON`.
#
# Locals and cells share one dictionary, as they share one array in CPython: a captured variable's entry is
# a `CellVal`.

# %%
from __future__ import annotations

import builtins

from ..ch02_guards.sources import DictGetSource, GlobalSource
from .attributes import get_attribute, set_attribute
from .calls import call_value
from .interpreter import PYTHON, constant_source, guard, jump, location, mark_dirty, opcode, unsupported
from .iterate import iterate, next_value, unpack
from .methods import dict_update
from .operations import (
    as_python, binary, compare, contains, delete_item, fold, get_item, identical, set_item, truth, unary)
from .values import (
    CellVal, Const, DictVal, Lazy, ListVal, NONE, NULL, SetVal, SliceVal, SuperVal, TupleVal, Value,
    user_error)
from .wrap import key_of, realize, wrap


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
# Globals. A name that is not in the globals is a builtin; a later call is guarded against somebody
# shadowing it.

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
    if frame.globals is tx.root_globals or frame.globals_source is not None:
        tx.guards.add(constant_source(tx, frame.globals), "NO_KEY", name, location(tx))
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
        value = call_value(tx, wrap(tx, format), [value, spec], {})
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
