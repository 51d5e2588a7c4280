# %% [markdown]
# # The instructions
#
# One handler per bytecode instruction, mostly of one to five lines. CPython changes its bytecode in every
# release:
#
# | | 3.11 | 3.12 | 3.13 |
# |---|---|---|---|
# | `o.m()` | `LOAD_METHOD` | `LOAD_ATTR`, lowest bit of its argument set | |
# | `super().m()` | a call of `super`, `LOAD_METHOD` | `LOAD_SUPER_ATTR` | |
# | stack of a call | NULL, callable, arguments | | callable, NULL, arguments |
# | `f(k=1)` | `KW_NAMES`, `CALL` | | `CALL_KW` |
# | comprehension | a function of its own | inlined: `LOAD_FAST_AND_CLEAR` | |
# | end of a loop | `FOR_ITER` jumps behind it | to an `END_FOR` | to `END_FOR`, `POP_TOP` |
# | `return 1` | `LOAD_CONST`, `RETURN_VALUE` | `RETURN_CONST` | |
# | `x[a:b]` | `BUILD_SLICE`, `BINARY_SUBSCR` | `BINARY_SLICE` | |
# | two locals | two instructions | | `LOAD_FAST_LOAD_FAST` and its like: two, once decoded |
# | `if x` | `POP_JUMP_FORWARD_IF_TRUE` | `POP_JUMP_IF_TRUE` | `TO_BOOL` before it |
# | `f"{x!r}"` | `FORMAT_VALUE` | | `CONVERT_VALUE`, `FORMAT_SIMPLE` |
# | extras of a `def` | on the stack of `MAKE_FUNCTION` | | `SET_FUNCTION_ATTRIBUTE` |
#
# (An empty field: as before.) Names that exist in one release only are simply handlers that the others never
# meet; where one name means different things, the handler asks `PYTHON`.

# %%
import builtins
import itertools

from ..ch02_guards.sources import DictGetSource, GlobalsSource, InstanceDictSource, ItemSource, Source
from .attributes import get_attribute, set_attribute
from .comparisons import compare, identical, truth
from .effects import touch
from .exceptions import user_error
from .interpreter import instructions, jump, let_go, opcode, pop_many, read_cell, read_local, store_local
from .iterate import begun_before, iterate, next_value, rest_of, unpack
from .keys import key_of
from .methods import call_method
from .operations import binary, fold, joined, later, unary
from .subscripts import contains, delete_item, get_item, set_item
from .tracer import PYTHON, call, globals_of, is_library, location, read_once, unsupported, writable_globals, written_global
from .values import (
    AbstractValue, CellVal, Const, DELETED, DictVal, HandlingVal, LASTI, ListVal, NONE, NULL, SetVal, SliceVal, TupleVal, boolean, const,
    describe)
from .wrap import wrap, wrap_constant


# %% [markdown]
# ## The stack
#
# What only moves values about. `RESUME`, `NOP` and `PRECALL` are there for CPython's own sake, and `NULL` is the empty slot
# that it keeps below a callable which is no method.

# %%
instructions({
    "RESUME NOP PRECALL": lambda tx, frame, i: None,
    "POP_TOP END_FOR": lambda tx, frame, i: let_go(tx, list.pop(frame.stack)),               # nobody looks at it
    "PUSH_NULL": lambda tx, frame, i: NULL,
    "COPY": lambda tx, frame, i: copy_slot(frame.stack, i.arg),
})


def copy_slot(stack, depth):
    """A copy of a slot. CPython copies that of a running handler where an exception leaves it, and pops the copy: the handler is over
    then, and a graph that ends behind that must not begin it again, so the slot itself keeps nothing."""
    value = stack[-depth]
    if type(value) is HandlingVal:
        stack[-depth] = LASTI
    return value


@opcode("SWAP")
def swap(tx, frame, i):
    stack = frame.stack
    stack[-i.arg], stack[-1] = stack[-1], stack[-i.arg]


# %% [markdown]
# ## Variables
#
# `frame.locals` is a dictionary of values by name. Reading a variable that is not there is the program's own
# error, `UnboundLocalError`, which `read_local` raises. 3.13 packs two accesses into one instruction, whose
# argument is a pair of names. `LOAD_FAST_AND_CLEAR` comes from comprehensions that are inlined: it saves a
# variable of the function that has the name of the comprehension's, and empties it.

# %%
instructions({
    "LOAD_FAST LOAD_FAST_CHECK": lambda tx, frame, i: read_local(tx, frame, i.argval),
    "LOAD_CLOSURE": lambda tx, frame, i: frame.locals[i.argval],
    "LOAD_FAST_AND_CLEAR": lambda tx, frame, i: frame.locals.pop(i.argval, NULL),
    "STORE_FAST": lambda tx, frame, i, value: store_local(tx, frame, i.argval, value),
    "LOAD_CONST": lambda tx, frame, i: constant_value(tx, i.argval),
})


@opcode("DELETE_FAST")
def delete_fast(tx, frame, i):
    if i.argval not in frame.locals:
        read_local(tx, frame, i.argval)              # raises
    if not i.argval.startswith("__stack"):              # that has only been moved
        let_go(tx, frame.locals[i.argval])
    del frame.locals[i.argval]


def constant_value(tx, value):
    return wrap_constant(tx, value) if type(value) in (tuple, frozenset) else const(value)


# %% [markdown]
# Cells.
#
# A variable that an inner function uses as well lies in a *cell*, an object with one slot, which both functions
# have. A cell that existed before the call is a real object, and writing to it is a side effect, so it is touched
# first. The cells that a function gets from outside are its `closure`. One that has no value yet may have one at the next call, so who
# finds it empty gets a guard (`is_empty`).

# %%
@opcode("MAKE_CELL")
def make_cell(tx, frame, i):
    content = frame.locals.get(i.argval)
    if type(content) is not CellVal:
        frame.locals[i.argval] = CellVal(content=content)


instructions({
    "COPY_FREE_VARS": lambda tx, frame, i: frame.locals.update(zip(frame.code.co_freevars, frame.closure)),
    "LOAD_DEREF": lambda tx, frame, i: read_cell(tx, frame.locals[i.argval], i.argval),
})


@opcode("STORE_DEREF")
def store_deref(tx, frame, i, value):
    cell = frame.locals[i.argval]
    touch(tx, cell)
    cell.content = value


@opcode("DELETE_DEREF")
def delete_deref(tx, frame, i):
    cell = frame.locals[i.argval]
    read_cell(tx, cell, i.argval)
    if cell.real is not None:
        unsupported(tx, "deleting a variable of an enclosing function")
    cell.content = None


# %% [markdown]
# Globals. A name that is not in the globals is a builtin; a later call is guarded against somebody
# shadowing it.
#
# The order in `read_global` is Python's: what the trace itself has written to the globals, the globals of the
# frame's module, the builtins. Each answer comes with the guard that makes it true at the next call, and that a
# name is *not* among the globals is one of them.

# %%
def global_source(tx, namespace: dict, name: str) -> Source:
    at = GlobalsSource() if namespace is tx.globals.root else globals_of(tx, namespace)
    return (ItemSource if isinstance(at, (GlobalsSource, InstanceDictSource)) else DictGetSource)(at, name)


def read_global(tx, frame, name) -> AbstractValue:
    written = written_global(tx, frame.globals, name)
    if written is DELETED:
        return find_global(tx, frame, name, True)
    return written if written is not None else read_once(tx, frame.globals, name, lambda: find_global(tx, frame, name, False))


def find_global(tx, frame, name, deleted: bool) -> AbstractValue:
    if name in frame.globals and not deleted:
        return wrap(tx, frame.globals[name], global_source(tx, frame.globals, name))
    namespace = frame.globals.get("__builtins__", builtins)
    namespace = namespace if isinstance(namespace, dict) else vars(namespace)
    if name not in namespace:
        if name not in frame.globals:
            guard_global_missing(tx, frame, name)
        user_error(NameError, f"name '{name}' is not defined", name=const(name))
    if not deleted:
        guard_global_missing(tx, frame, name)
    return wrap(tx, namespace[name], global_source(tx, namespace, name))


def guard_global_missing(tx, frame, name):
    tx.guards.add(globals_of(tx, frame.globals), "NO_KEY", name, location(tx))


def callable_pair(callable_) -> list:
    """What a call expects on the stack: a callable and NULL, in the order of the release."""
    return [callable_, NULL] if PYTHON >= (3, 13) else [NULL, callable_]


@opcode("LOAD_GLOBAL")
def load_global(tx, frame, i):
    value = read_global(tx, frame, i.argval)
    return callable_pair(value) if i.arg & 1 else value


# %% [markdown]
# The body of a class is a function whose variables are the entries of a dictionary, the namespace.

# %%
def in_namespace(frame, name) -> AbstractValue | None:
    entry = frame.namespace.items.get(name) if frame.namespace is not None else None
    return entry and entry[1]


# %% [markdown]
# Until a name is stored there, reading it goes on to the cells and globals around the class. At the end the
# namespace is what the class is made of (`library/classes.py`).
#
# A write to a global goes into `attrs` of the record that stands for the module's namespace, in front of the real one, and is
# made for real at the end (`effects.py`). Reading it first, as `del` does, adds the guard that there is one.

# %%
@opcode("LOAD_NAME")
def load_name(tx, frame, i):
    return in_namespace(frame, i.argval) or read_global(tx, frame, i.argval)


instructions({
    "STORE_NAME": lambda tx, frame, i, value: set_item(tx, frame.namespace, const(i.argval), value),
    "DELETE_NAME": lambda tx, frame, i: delete_item(tx, frame.namespace, const(i.argval)),
    "LOAD_LOCALS": lambda tx, frame, i: frame.namespace,
    "LOAD_BUILD_CLASS": lambda tx, frame, i: wrap(tx, builtins.__build_class__),
    "LOAD_FROM_DICT_OR_DEREF": lambda tx, frame, i, namespace: load_classderef(tx, frame, i),
    "LOAD_FROM_DICT_OR_GLOBALS": lambda tx, frame, i, namespace: load_name(tx, frame, i),
})


@opcode("SETUP_ANNOTATIONS")
def setup_annotations(tx, frame, i):
    frame.namespace.items.setdefault("__annotations__", (const("__annotations__"), DictVal()))


@opcode("LOAD_CLASSDEREF")
def load_classderef(tx, frame, i):
    return in_namespace(frame, i.argval) or read_cell(tx, frame.locals[i.argval], i.argval)


@opcode("STORE_GLOBAL")
def store_global(tx, frame, i, value):
    if is_library(frame.code.co_filename):
        unsupported(tx, "writing to a global variable of a library")
    namespace = writable_globals(tx, frame.globals)
    touch(tx, namespace)
    namespace.attrs[i.argval] = value


@opcode("DELETE_GLOBAL")
def delete_global(tx, frame, i):
    written = written_global(tx, frame.globals, i.argval)
    if i.argval not in frame.globals if written is None else written is DELETED:
        user_error(NameError, f"name '{i.argval}' is not defined", name=const(i.argval))
    read_global(tx, frame, i.argval)                  # a guard says that there is one to delete
    store_global(tx, frame, i, DELETED)


# %% [markdown]
# ## Attributes
#
# `o.m()` does not make a bound method only to call it: the instruction pushes two values, the function and `o`, or a callable
# and NULL (`callable_pair`). `super().m` has an instruction of its own from 3.12 on, which does the same.

# %%
@opcode("LOAD_ATTR")
def load_attr(tx, frame, i, owner):
    value = get_attribute(tx, owner, i.argval)
    return callable_pair(value) if PYTHON >= (3, 12) and i.arg & 1 else value


instructions({
    "LOAD_METHOD": lambda tx, frame, i, owner: callable_pair(get_attribute(tx, owner, i.argval)),
    "STORE_ATTR": lambda tx, frame, i, value, owner: set_attribute(tx, owner, i.argval, value),
    "DELETE_ATTR": lambda tx, frame, i, owner: set_attribute(tx, owner, i.argval, None),
})


@opcode("LOAD_SUPER_ATTR")
def load_super_attr(tx, frame, i, super_, cls, self):
    value = get_attribute(tx, call(tx, super_, [cls, self]), i.argval)
    return callable_pair(value) if i.arg & 1 else value


# %% [markdown]
# ## Operators
#
# Instructions that only compute need no more than the function that does it.

# %%
instructions({
    "BINARY_SUBSCR": lambda tx, frame, i, container, key: get_item(tx, container, key),
    "STORE_SUBSCR": lambda tx, frame, i, value, container, key: set_item(tx, container, key, value),
    "DELETE_SUBSCR": lambda tx, frame, i, container, key: delete_item(tx, container, key),
    "BINARY_SLICE": lambda tx, frame, i, container, start, stop: get_item(tx, container, SliceVal(start, stop, NONE)),
    "STORE_SLICE": lambda tx, frame, i, value, container, start, stop: set_item(tx, container, SliceVal(start, stop, NONE), value),
    "UNARY_NEGATIVE": lambda tx, frame, i, value: unary(tx, "neg", value),
    "UNARY_POSITIVE": lambda tx, frame, i, value: unary(tx, "pos", value),
    "UNARY_INVERT": lambda tx, frame, i, value: unary(tx, "invert", value),
    "UNARY_NOT": lambda tx, frame, i, value: boolean(not truth(tx, value)),
    "TO_BOOL": lambda tx, frame, i, value: boolean(truth_before_jump(tx, frame, value)),
    "GET_ITER GET_YIELD_FROM_ITER": lambda tx, frame, i, value: iterate(tx, value),
    "LIST_TO_TUPLE": lambda tx, frame, i, items: TupleVal(items=unpack(tx, items)),
    "IS_OP": lambda tx, frame, i, a, b: boolean(identical(a, b) != bool(i.arg)),
    "CONTAINS_OP": lambda tx, frame, i, item, container: boolean(contains(tx, container, item) != bool(i.arg)),
})


@opcode("BINARY_OP")
def binary_op(tx, frame, i, a, b):
    return binary(tx, i.argrepr.removesuffix("="), a, b, inplace=i.argrepr.endswith("="))


# %% [markdown]
# From 3.13 on a value becomes a truth value in an instruction of its own, or in the comparison, and the jump that
# asks for it comes next. Whether a tensor may answer depends on the jump, so it is looked at one instruction early.

# %%
@opcode("COMPARE_OP")
def compare_op(tx, frame, i, a, b):
    result = compare(tx, i.argval, a, b)
    return boolean(truth_before_jump(tx, frame, result)) if PYTHON >= (3, 13) and i.arg & 16 else result


def truth_before_jump(tx, frame, value):
    """bool(value); from 3.13 on the jump that asks for it comes next."""
    following = frame.decoded.instructions[frame.ip].opname
    return truth(tx, value, (frame, frame.ip) if following.startswith("POP_JUMP_IF_") else None)


# %% [markdown]
# ## Jumps
#
# The trace goes one way. `truth` says which (`comparisons.py`), and leaves the guard that makes it the way of the next call,
# too; it is given the place of the jump, since a jump that only decides whether to raise is treated in another way there. The
# jumps of `x is None` need no guard of their own, as what `x` is has been guarded when it was read. The last jump is that of a
# loop.

# %%
instructions({"JUMP_FORWARD JUMP_BACKWARD JUMP_BACKWARD_NO_INTERRUPT": lambda tx, frame, i: jump(frame, i.argval)})


def conditional_jump(name, condition):
    @opcode(f"POP_JUMP_IF_{name}", f"POP_JUMP_FORWARD_IF_{name}", f"POP_JUMP_BACKWARD_IF_{name}", f"JUMP_IF_{name}_OR_POP")
    def jump_if(tx, frame, i, value):
        if condition(tx, frame, value):
            jump(frame, i.argval)
            return value if i.opname.endswith("_OR_POP") else None


conditional_jump("TRUE", lambda tx, frame, value: truth(tx, value, (frame, frame.ip - 1)))
conditional_jump("FALSE", lambda tx, frame, value: not truth(tx, value, (frame, frame.ip - 1)))
conditional_jump("NONE", lambda tx, frame, value: value is NONE)
conditional_jump("NOT_NONE", lambda tx, frame, value: value is not NONE)


# %% tags=["exercise:for-iter"]
@opcode("FOR_ITER")
def for_iter(tx, frame, i, iterator):
    """The iterator is popped. If it has a next value, returns what is pushed: the iterator again, and the value on top. If not, goes on at
    the offset `i.argval`, behind the instructions that clean up there: CPython executes none of them after a loop that has ended
    (END_FOR in 3.12, END_FOR and POP_TOP in 3.13)."""
    iterator = begun_before(tx, iterator)
    value = next_value(tx, iterator)
    if value is not None:
        return [iterator, value]
    jump(frame, i.argval)
    if PYTHON >= (3, 12):
        frame.ip += 1 if PYTHON < (3, 13) else 2


# %% [markdown]
# ## Building containers and strings
#
# A display such as `[a, b]` or `{k: v}` leaves its parts on the stack, followed by an instruction that says
# how many there are. The new container belongs to the trace: nobody else has seen it, so no write to it is
# a side effect.
#
# A comprehension fills its container item by item, with instructions such as LIST_APPEND. Their argument
# says how deep in the stack the container lies, below the iterator and whatever the loop has pushed. Each
# does what a method of the container does, so `grows` looks the method up. The same instructions serve
# `[*a, *b]` and `{**a, **b}`, where Python has one more thing to check, namely that what stands behind the
# star can be iterated over at all.
#
# An f-string is a sequence of conversions and formats, joined in the end: now, or by the generated code where a number in
# it varies (`later` in `operations.py`). A format of a tensor's number ends the graph.

# %%
instructions({
    "BUILD_TUPLE": lambda tx, frame, i, *items: TupleVal(items=list(items)),
    "BUILD_LIST": lambda tx, frame, i, *items: ListVal(items=list(items)),
    "BUILD_SET": lambda tx, frame, i, *items: SetVal(keys={key_of(tx, item) for item in items}),
    "BUILD_SLICE": lambda tx, frame, i, *parts: SliceVal(*(*parts, NONE)[:3]),
    "BUILD_STRING": lambda tx, frame, i, *parts: later(tx, str, joined, parts) or fold(tx, joined, parts),
})


@opcode("BUILD_MAP")
def build_map(tx, frame, i):
    flat = pop_many(frame, 2 * i.arg)
    return dict_from(tx, flat[::2], flat[1::2])


@opcode("BUILD_CONST_KEY_MAP")
def build_const_key_map(tx, frame, i, keys):
    return dict_from(tx, unpack(tx, keys), pop_many(frame, i.arg))


def dict_from(tx, keys, values) -> DictVal:
    result = DictVal()
    for key, value in zip(keys, values):
        set_item(tx, result, key, value)
    return result


CONVERSIONS = {0: None, 1: str, 2: repr, 3: ascii}
NO_SPEC = const("")


@opcode("FORMAT_VALUE")
def format_value(tx, frame, i):
    spec = frame.stack.pop() if i.arg & 4 else NO_SPEC
    value = frame.stack.pop()
    if i.arg & 3:
        value = call(tx, wrap(tx, CONVERSIONS[i.arg & 3]), [value])
    return format_with_spec(tx, frame, i, value, spec)


@opcode("FORMAT_WITH_SPEC")
def format_with_spec(tx, frame, i, value, spec):
    return call(tx, wrap(tx, format), [value, spec])


instructions({
    "CONVERT_VALUE": lambda tx, frame, i, value: call(tx, wrap(tx, CONVERSIONS[i.arg]), [value]),
    "FORMAT_SIMPLE": lambda tx, frame, i, value: format_with_spec(tx, frame, i, value, NO_SPEC),
})


ITERABLE, MAPPING = ("__iter__", "__getitem__"), ("keys",)


def check_spread(tx, item, names=MAPPING):
    """What `*` or `**` takes has one of these. Of anything else Python complains in other words than the method does, or the method would
    take it."""
    if not any(hasattr(item.cls, name) for name in names):
        unsupported(tx, f"* or ** of {describe(item)}")


def grows(name, method, spread=()):
    """An instruction by which a comprehension or a display fills a container: it does what a method does. spread: see `check_spread`."""
    @opcode(name)
    def grow(tx, frame, i, item):
        if spread:
            check_spread(tx, item, spread)
        call_method(tx, frame.stack[-i.arg], method, [item])


for _row in (("LIST_APPEND", "append"), ("SET_ADD", "add"), ("LIST_EXTEND", "extend", ITERABLE),
             ("SET_UPDATE", "update", ITERABLE), ("DICT_UPDATE", "update", MAPPING)):
    grows(*_row)


instructions({"MAP_ADD": lambda tx, frame, i, key, value: set_item(tx, frame.stack[-i.arg], key, value)})


@opcode("DICT_MERGE")
def dict_merge(tx, frame, i, other):
    check_spread(tx, other)
    target, named = frame.stack[-i.arg], DictVal()
    call_method(tx, named, "update", [other])
    if named.items.keys() & target.items.keys():
        unsupported(tx, "a call with a keyword argument that is given twice")
    call_method(tx, target, "update", [named])


def to_unpack(tx, sequence, before: int, starred: bool) -> list:
    """The first values, and if there are so many, one more, which is too many, or for a star the list that CPython makes of the rest."""
    iterator = iterate(tx, sequence)
    first = list(itertools.islice(rest_of(tx, iterator), before if starred else before + 1))
    return first + (unpack(tx, iterator) if starred and len(first) == before else [])


@opcode("UNPACK_SEQUENCE", "UNPACK_EX")
def unpack_values(tx, frame, i, sequence):
    """`a, b = sequence`, or with a star: the `before` names, a list, the `after` names."""
    if type(sequence) is Const and not hasattr(sequence.value, "__iter__"):
        user_error(TypeError, f"cannot unpack non-iterable {type(sequence.value).__name__} object")
    starred = i.opname == "UNPACK_EX"
    before, after = (i.arg & 0xFF, i.arg >> 8) if starred else (i.arg, 0)
    items = unpack(tx, sequence) if type(sequence) in (TupleVal, ListVal) else to_unpack(tx, sequence, before, starred)
    end = len(items) - after
    if end < before:
        user_error(ValueError, f"not enough values to unpack (expected {'at least ' * starred}{before + after}, got {len(items)})")
    if end > before and not starred:
        user_error(ValueError, f"too many values to unpack (expected {before})")
    between = [ListVal(items=items[before:end])] if starred else []
    return [*items[:before], *between, *items[end:]][::-1]
