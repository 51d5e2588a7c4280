# %% [markdown]
# # The interpreter: running bytecode on values
#
# CPython compiles a function to bytecode for a stack machine: `x + y` is *push x, push y, pop two and push
# their sum*. This module is a second such machine. Its stack holds values (`values.py`) instead of objects,
# and its `BINARY_OP` on two tensors does not add but writes `add(x, y)` into a graph. Everything else,
# attribute lookups, calls, loops over Python lists, happens at once, at compile time. So a loop over twelve
# layers leaves twelve copies of a layer in the graph and no loop, and a configuration flag leaves only the
# branch that was taken, plus a guard on the flag.
#
# Calls into Python functions run the callee's bytecode on the same machine, one frame deeper: *inlining*.
# That is what turns a tree of `nn.Module`s into one flat graph.
#
# Here is all that happens to
#
#     def f(x, scales):
#         for s in scales:
#             x = x * s
#         return x
#
# when it is called with a tensor and `[2, 0.5]`. On the left is the bytecode (of 3.11), in the order in which
# it is executed; then the stack before each instruction, bottom first; then what grows.
#
#     LOAD_FAST      scales                           guards: scales is a list, its length is 2
#     GET_ITER                a list
#     FOR_ITER       to 22    iterator                guard: scales[0] == 2
#     STORE_FAST     s        iterator, int 2
#     LOAD_FAST      x        iterator                guard: dtype, shape, ... of x; placeholder x
#     LOAD_FAST      s        iterator, x
#     BINARY_OP      *        iterator, x, int 2      node mul = x * 2
#     STORE_FAST     x        iterator, mul
#     JUMP_BACKWARD  to 6     iterator
#     FOR_ITER       to 22    iterator                guard: scales[1] == 0.5
#     ...                                             node mul_1 = mul * 0.5
#     FOR_ITER       to 22    iterator                exhausted: jump
#     LOAD_FAST      x
#     RETURN_VALUE            mul_1                   output mul_1
#
# What remains is the graph `mul = x * 2; mul_1 = mul * 0.5`, five guards beside those of the state of the
# world, and the text `return __out[0]`. No instruction of `f` runs in the next call.
#
# State is in two records. `Tracer` is one capture: the graph, the guards, the objects seen. `Frame` is one
# activation: the instruction pointer, the locals, the stack.

# %%
from __future__ import annotations

import contextlib
import dis
import inspect
import sys
import types
from dataclasses import dataclass, field
from typing import Any

import torch

from ..ch01_graphs.fake import storage_key
from ..ch01_graphs.graph import Location
from ..ch01_graphs.shapes import ShapeEnv
from ..ch02_guards.guards import GuardSet
from ..ch02_guards.sources import (
    AttrSource, ConstantSource, GlobalsSource, InstanceDictSource, Source)
from ..errors import SkipFrame, Unsupported
from .binding import bind
from .hook import kept
from .values import (
    BIRTHS, Const, DictVal, ExcVal, GenVal, IterVal, LASTI, MISSING, NEW, NONE, NotConstant, ObjVal, Table,
    TupleVal, UserError, Value, class_of, describe, dict_of, user_error)

PYTHON = sys.version_info[:2]


@dataclass(eq=False)
class Tracer:
    """One capture. `steps` counts the instructions executed in the outermost frame; `stop_at` ends the
    trace there."""
    graph: torch.fx.Graph
    fake_mode: Any
    guards: GuardSet
    stop_at: int | None = None
    inputs: list = field(default_factory=list)
    example_inputs: list = field(default_factory=list)
    tracked: dict = field(default_factory=dict)
    keep: list = field(default_factory=list)
    constants: list = field(default_factory=list)
    constant_index: dict = field(default_factory=dict)
    dirty: dict = field(default_factory=dict)
    global_writes: dict = field(default_factory=dict)
    tensor_of_fake: dict = field(default_factory=dict)
    frames: list = field(default_factory=list)
    contexts: list = field(default_factory=list)
    root_globals: dict = None
    namespaces: dict = field(default_factory=dict)       # id of a namespace -> its source
    grad_after: bool = True
    active: list = field(default_factory=list)
    options: Any = None                              # CaptureOptions
    marked: list = field(default_factory=list)       # (source, dim, size) of dimensions that the user marked
    told: bool = False                               # the program was told that it is being compiled
    failed: bool = False                             # a tensor operation raised
    shape_env: ShapeEnv = field(default_factory=ShapeEnv)
    symbols: dict = field(default_factory=dict)
    symbol_sources: dict = field(default_factory=dict)
    dynamic_numbers: dict = field(default_factory=dict)
    size_nodes: dict = field(default_factory=dict)
    outer: torch.fx.Graph | None = None
    lifted: dict = field(default_factory=dict)
    pure_since: int = 0
    inference: bool = False
    region: int = 0
    made_classes: dict = field(default_factory=dict)
    told_apart: set = field(default_factory=set)
    identities: dict = field(default_factory=dict)
    replays: list = field(default_factory=list)
    path: list = field(default_factory=list)         # of the outermost frame: (position, births until then)
    steps: int = 0
    ops: int = 0
    limit: int = 2_000_000


@dataclass(eq=False)
class Frame:
    code: types.CodeType
    globals: dict
    locals: dict = field(default_factory=dict)
    closure: list = field(default_factory=list)
    stack: list = field(default_factory=list)
    ip: int = 0
    kw_names: tuple = ()
    handling: Value = NONE
    namespace: DictVal | None = None             # of a class body

    def __post_init__(self):
        self.decoded = kept(decode, self.code)


# %% [markdown]
# ## Instructions
#
# The handler of an instruction says in its signature what the instruction does to the stack. `BINARY_SUBSCR`
# pops a container and a key and pushes one result:
#
#     @opcode("BINARY_SUBSCR")
#     def binary_subscr(tx, frame, i, container, key):
#         return get_item(tx, container, key)
#
# The parameters after the instruction `i` are popped, in the order in which they were pushed; `*items` takes
# as many as the instruction's argument says (`BUILD_LIST 3`). What the handler returns is pushed: nothing, a
# value, or a list of values. A `Leave` ends the frame.

# %%
HANDLERS: dict = {}


def opcode(*names):
    """Register the handler of one or several instructions: `handler(tx, frame, instruction, *operands)`."""
    def register(function):
        operands = list(inspect.signature(function).parameters.values())[3:]
        variadic = any(p.kind is p.VAR_POSITIONAL for p in operands)
        for name in names:
            HANDLERS[name] = function, len(operands) - variadic, variadic
        return function
    return register


def computes(functions: dict):
    """Register instructions that only compute: name -> function(tx, *operands)."""
    for name, function in functions.items():
        HANDLERS[name] = ignoring_place(function), len(inspect.signature(function).parameters) - 1, False


def ignoring_place(function):
    return lambda tx, frame, i, *operands: function(tx, *operands)


@dataclass(eq=False)
class Leave:
    """The end of a frame's run: it returns a value, or yields one and can go on."""
    value: Value
    yielded: bool = False


def pop_many(frame: Frame, count: int) -> list:
    """Remove and return the top `count` values of the stack, deepest first."""
    if count == 0:
        return []
    items = frame.stack[-count:]
    del frame.stack[-count:]
    return items


# %% [markdown]
# ## Decoding
#
# `dis` decodes a code object into instructions. Decoding is slow next to executing, so each code object is
# decoded once, and its record (`hook.py`) keeps the result. Jumps carry byte offsets; `index` turns them into
# positions in the list. The exception table says which handler covers a range of offsets and how deep the
# stack is there: since Python 3.11 a `try` costs nothing until it raises.

# %%
@dataclass(eq=False)
class Decoded:
    """steps: per instruction (handler or None, number of operands it pops, instruction)."""
    instructions: list
    steps: list
    index: dict
    table: list
    lines: list


def decode(code: types.CodeType) -> Decoded:
    instructions = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "EXTENDED_ARG")]
    index, position = {}, 0
    for offset in range(0, len(code.co_code) + 2, 2):      # a jump may aim at an EXTENDED_ARG prefix
        while position < len(instructions) and instructions[position].offset < offset:
            position += 1
        index[offset] = position
    steps, lines, line = [], [], code.co_firstlineno
    for i in instructions:
        line = (i.positions.lineno if i.positions else None) or line
        lines.append(line)
        if "_FAST" in i.opname and not code.co_flags & inspect.CO_OPTIMIZED:
            i = i._replace(argval=second_of_name(code, i.argval, i.arg))
        handler, pops, variadic = HANDLERS.get(i.opname, (None, 0, False))
        steps.append((handler, pops + i.arg if variadic else pops, i))
    return Decoded(instructions, steps, index, dis._parse_exception_table(code), lines)


def second_of_name(code, name, index):
    """The key of a variable of a comprehension in a class body, where a cell may have the same name. (3.13
    loads a cell with LOAD_FAST, too: its index is above those of variables.)"""
    if type(name) is tuple:
        return tuple(map(second_of_name, (code, code), name, (index >> 4, index & 15)))
    return f".{name}" if name in code.co_freevars and index < code.co_nlocals else name


# %% [markdown]
# ## The loop
#
# Exceptions come in two kinds. `UserError` belongs to the traced program: look for a handler in the exception
# table, as CPython does. `Unsupported` is ours and passes through to `capture`.

# %%
class StopTrace(Exception):
    """The outermost frame has reached the instruction at which the graph breaks."""


def run(tx: Tracer, frame: Frame, thrown: ExcVal | None = None) -> Leave:
    """Execute `frame` until it returns or yields. thrown: an exception that is raised where it stands."""
    if len(tx.frames) >= 180:
        raise Unsupported("calls nested more than 180 deep", location(tx))
    outermost, steps, stack = not tx.frames and not tx.steps, frame.decoded.steps, frame.stack
    if thrown is not None and not unwind(frame, steps[max(frame.ip - 1, 0)][2].offset, thrown):
        raise UserError(thrown)
    tx.frames.append(frame)
    try:
        while True:
            if outermost:
                if tx.steps == tx.stop_at:
                    raise StopTrace
                tx.steps += 1
                tx.path.append((frame.ip, next(BIRTHS)))
            handler, pops, instruction = steps[frame.ip]
            frame.ip += 1
            tx.ops += 1
            if handler is None:
                raise Unsupported(f"the instruction {instruction.opname}", location(tx))
            try:
                pushed = handler(tx, frame, instruction, *pop_many(frame, pops))
            except UserError as error:
                exc, raises = error.exc, instruction.opname == "RAISE_VARARGS"
                handled = handled_exception(tx)
                fresh = raises or not exc.seen and instruction.opname != "RERAISE"
                if fresh and handled not in (None, exc):
                    exc.context = handled
                exc.seen = True
                if tx.ops > tx.limit or not unwind(frame, instruction.offset, exc):
                    raise
                continue
            except NotConstant:
                unsupported(tx, f"{instruction.opname} of something that is no constant")
            except Unsupported as error:
                if not hasattr(error, "chain"):
                    say_where(tx, error)
                raise
            if type(pushed) is list:
                stack.extend(pushed)
            elif type(pushed) is Leave:
                return pushed
            elif pushed is not None:
                stack.append(pushed)
            if tx.ops > tx.limit:
                raise SkipFrame(f"more than {tx.limit} instructions to trace", location(tx))
    finally:
        tx.frames.pop()


def handled_exception(tx: Tracer) -> Value | None:
    """What `sys.exception()` is: the exception in whose handler the program is, or None."""
    return next((f.handling for f in reversed(tx.frames) if f.handling is not NONE), None)


def unless_raised(cls, function):
    """function(), or None when the traced program raises a `cls` in it."""
    try:
        return function()
    except UserError as error:
        if issubclass(error.exc.cls, cls):
            return None
        raise


# %% tags=["exercise:unwind"]
def unwind(frame: Frame, offset: int, exc: ExcVal) -> bool:
    """Jump to the handler that covers `offset`; False when there is none."""
    for entry in frame.decoded.table:
        if entry.start <= offset < entry.end:
            del frame.stack[entry.depth:]
            if entry.lasti:
                frame.stack.append(LASTI)
            frame.stack.append(exc)
            jump(frame, entry.target)
            return True
    return False


def jump(frame: Frame, offset: int):
    frame.ip = frame.decoded.index[offset]


# %% [markdown]
# ## Where are we?
#
# Every node of the graph remembers the line of the *user's* program that caused it: the innermost frame
# whose file is not part of torch or of the standard library. `Linear.forward` says nothing to a reader;
# `model.py:94` does.

# %%
_LIBRARY: dict = {}
LIBRARY_ROOTS = (torch.__path__[0] + "/", inspect.__file__.rsplit("/", 1)[0] + "/", "<frozen", "<minicompile")


def is_library(filename: str) -> bool:
    """Whether a file belongs to torch or the standard library."""
    known = _LIBRARY.get(filename)
    if known is None:
        rest = filename.replace(LIBRARY_ROOTS[0], "")
        known = _LIBRARY[filename] = filename.startswith(LIBRARY_ROOTS) and "site-packages" not in rest
    return known


def line_of(frame: Frame) -> int:
    return frame.decoded.lines[max(frame.ip - 1, 0)]


def user_frame(tx: Tracer) -> Frame:
    return next((f for f in reversed(tx.frames) if not is_library(f.code.co_filename)), tx.frames[0])


def location(tx: Tracer):
    """The user's innermost line, or None outside any frame."""
    if not tx.frames:
        return None
    frame = user_frame(tx)
    name, i = frame.code.co_name.split("__resume_at_")[0], frame.decoded.instructions[max(frame.ip - 1, 0)]
    text = (i.positions.end_lineno, i.positions.col_offset, i.positions.end_col_offset) if i.positions else ()
    return Location(frame.code.co_filename, line_of(frame), name, i.offset, *text)


def call_chain(tx: Tracer) -> list:
    """Lines from the outermost frame inwards, for messages."""
    return [f"{f.code.co_filename}:{line_of(f)} in {f.code.co_name}" for f in tx.frames]


def unsupported(tx: Tracer, reason: str):
    """Give up on the current instruction: a graph break."""
    error = Unsupported(reason, location(tx))
    say_where(tx, error)
    raise error


def plain_python(tx: Tracer, reason: str):
    """Give up on the innermost frame. If it is not the outermost one, this is a break like any other; it then
    comes here as a frame of its own."""
    if len(tx.frames) == 1:
        raise SkipFrame(reason, location(tx))
    unsupported(tx, reason)


def say_where(tx: Tracer, error: Unsupported):
    """Note the call chain, and the columns of the expression in the user's innermost line."""
    frame = user_frame(tx)
    error.chain = call_chain(tx)
    error.position = frame.decoded.instructions[max(frame.ip - 1, 0)].positions
    error.location = error.location or location(tx)


# %% [markdown]
# ## Guards and constants
#
# A guard is recorded with the line that needed it, so that a recompile can say why. Objects that the
# generated function must name but cannot spell go to its constant pool `__K`.

# %%
def guard(tx: Tracer, source: Source | None, kind: str, expected=None):
    """Record a guard; no source means that the object is a constant of the trace."""
    if source is not None and not isinstance(source, ConstantSource):
        tx.guards.add(source, kind, expected, location(tx))


def constant_source(tx: Tracer, real) -> ConstantSource:
    index = tx.constant_index.get(id(real))
    if index is None:
        index = tx.constant_index[id(real)] = len(tx.constants)
        tx.constants.append(real)
    return ConstantSource.of(index, real)


# %% [markdown]
# The globals of inlined functions are read from their Python module, or from a function that has them. Those
# of the function that is being called are `__G`. Entries belong to code, and another function of the same code
# may have other globals (`exec` of one code object in two namespaces), so an entry that takes `__G` for the
# globals of something else as well asks whether it still is.

# %%
def module_of(namespace: dict) -> types.ModuleType | None:
    """The Python module whose globals these are, if it is still the one that is imported by this name."""
    module = sys.modules.get(namespace.get("__name__"))
    return module if type(module) is types.ModuleType and vars(module) is namespace else None


def globals_of(tx: Tracer, namespace: dict) -> Source:
    """Where a namespace is read."""
    module = module_of(namespace)
    if namespace is tx.root_globals:
        if module is None:
            return GlobalsSource()
        tx.guards.add(None, "GLOBALS", module, location(tx))
    if module is not None:
        return InstanceDictSource(constant_source(tx, module))
    return tx.namespaces.get(id(namespace)) or constant_source(tx, namespace)


def enter_namespace(tx: Tracer, function: types.FunctionType, source: Source | None):
    """`function` is inlined. source: where it is read if it may be another one next time."""
    namespace = function.__globals__
    if namespace is not tx.root_globals:
        if module_of(namespace) is None:
            at = constant_source(tx, function) if source is None else source
            tx.namespaces[id(namespace)] = AttrSource(at, "__globals__")
    elif source is not None:
        guard(tx, source, "GLOBALS")
    else:
        tx.guards.add(None, "GLOBALS", module_of(namespace) or function, location(tx))


def touch(tx: Tracer, value: Value):
    """`value` is about to change. If it existed before the call, its final contents are written back at the
    end."""
    if tx.pure_since and (value.born < tx.pure_since or value.real is not None and value.real is not NEW):
        unsupported(tx, f"a change of {describe(value)} in code that is not run exactly once")
    if value.real is None or value.real is NEW:
        return
    if value.source is None and type(value) is not ObjVal:
        unsupported(tx, f"changing {describe(value)} that belongs to a library")
    tx.dirty.setdefault(id(value), value)


# %% [markdown]
# ## Code that must not change anything
#
# The backward of an autograd function (`regions.py`) runs later, perhaps never; a checkpointed function runs
# twice; one with an `lru_cache` perhaps not at all. What such code changes outside of itself cannot be part
# of the one epilogue of this call, so there must be nothing. Objects that the trace makes are numbered; a
# change of one that is older than the region ends the graph, and eager does it.

# %%
def written_storages(tx: Tracer, versions: dict | None = None) -> set:
    """Keys of the storages that the trace has written to. versions: id of a value -> its version to begin
    with, where that is not the one it was made with. `x.data` has a version counter of its own, and the
    storage of x."""
    versions = versions or {}
    return {storage_key(v.fake) for v in tx.tensor_of_fake.values()
            if v.fake._version > versions.get(id(v), v.version)}


@contextlib.contextmanager
def effect_free(tx: Tracer, what: str):
    """Code traced inside may change only what it has made."""
    before = len(tx.replays), dict(tx.global_writes)
    known = {id(v): (v, v.fake._version) for v in tx.tensor_of_fake.values()}
    since, tx.pure_since = tx.pure_since, next(BIRTHS)
    try:
        yield
    finally:
        tx.pure_since = since
    outside = {storage_key(v.fake) for v in tx.tensor_of_fake.values()
               if v.real is not None or id(v) in known}
    written = outside & written_storages(tx, {key: version for key, (_, version) in known.items()})
    if written or before != (len(tx.replays), tx.global_writes):
        unsupported(tx, f"{what} with a side effect")


# %% [markdown]
# ## Calls
#
# What a call does depends on the kind of value that is called; `calls.py` fills the table.

# %%
CALLS = Table()                       # kind of value -> function(tx, callee, args, kwargs)


def call(tx: Tracer, callee: Value, args, kwargs=None) -> Value:
    """callee(*args, **kwargs); args: list of values, kwargs: dict of values."""
    if type(callee) not in CALLS:
        user_error(TypeError, f"'{class_of(callee).__name__}' object is not callable")
    return CALLS[type(callee)](tx, callee, args, kwargs or {})


# %% [markdown]
# ## Python functions

# %%
REFUSED_FLAGS = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def inline(tx, code, name, globals_, closure, defaults, kwdefaults, args, kwargs, namespace=None):
    """Run a Python function's bytecode as a frame of this trace and return its result. defaults, kwdefaults:
    functions that give a value. namespace: of a class body."""
    if code.co_flags & REFUSED_FLAGS:
        unsupported(tx, f"the coroutine {name}")
    from .wrap import realize
    frame = Frame(code, globals_, closure=closure, namespace=namespace)
    try:
        bound = bind(code, tuple(defaults), kwdefaults, [realize(tx, a) for a in args], kwargs, name)
    except TypeError as error:
        user_error(TypeError, *error.args)
    frame.locals = {name: as_local(value) for name, value in zip(code.co_varnames, bound)}
    return GenVal(frame=frame) if code.co_flags & inspect.CO_GENERATOR else run(tx, frame).value


def as_local(bound) -> Value:
    """One bound parameter: a value, the arguments of `*args` or `**kwargs`, or a default."""
    if isinstance(bound, Value):
        return bound
    if type(bound) is tuple:
        return TupleVal(items=list(bound))
    return dict_of(bound) if type(bound) is dict else bound()


def advance(tx, generator: GenVal, sent: Value = NONE, thrown: ExcVal | None = None):
    """next(generator): the yielded value, or None when it has returned (its result is in
    `generator.result`). thrown: an exception to raise inside instead."""
    frame = generator.frame
    if frame in tx.frames:
        user_error(ValueError, "generator already executing")
    if thrown is not None and (generator.done or not generator.started):
        generator.done = True
        raise UserError(thrown)
    if generator.done:
        generator.result = NONE
        return None
    if not generator.started and getattr(sent, "value", MISSING) is not None:
        user_error(TypeError, "can't send non-None value to a just-started generator")
    if generator.started and thrown is None:
        frame.stack.append(sent)
    elif thrown is not None and delegates(frame):
        unsupported(tx, "throwing into a generator that delegates to another")
    generator.started = generator.done = True        # done, should the run fail
    try:
        left = run(tx, frame, thrown)
    except UserError as error:
        if not issubclass(error.exc.cls, StopIteration):
            raise
        left = ExcVal(cls=RuntimeError, args=[Const(value="generator raised StopIteration")], cause=error.exc,
                      context=error.exc)                    # PEP 479
        raise UserError(left) from None
    if left.yielded:
        generator.done = False
        return left.value
    generator.result = left.value
    return None


def delegates(frame: Frame) -> bool:
    """Whether a suspended generator stands in a `yield from`."""
    following, on_top = frame.decoded.instructions[frame.ip], frame.stack[-1:]
    inside = bool(on_top) and type(on_top[0]) in (GenVal, IterVal)
    return inside and following.opname == "RESUME" and following.arg & 3 == 2
