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
# State is in two records. `Tracer` is one capture: the graph, the guards, the objects seen. `Frame` is one
# activation: the instruction pointer, the locals, the stack.

# %%
from __future__ import annotations

import dis
import inspect
import sys
import types
from dataclasses import dataclass, field
from typing import Any

import torch

from ..ch01_graphs.graph import Location
from ..ch01_graphs.shapes import ShapeEnv
from ..ch02_guards.guards import GuardSet
from ..ch02_guards.sources import ConstantSource, Source
from ..errors import SkipFrame, Unsupported
from .values import (
    Const, DictVal, ExcVal, GenVal, NEW, NONE, NotConstant, ObjVal, Table, TupleVal, UserError, Value,
    class_of, describe, user_error)

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
    grad_after: bool = True
    active: list = field(default_factory=list)
    dynamic: dict = field(default_factory=dict)
    shape_env: ShapeEnv = field(default_factory=ShapeEnv)
    symbols: dict = field(default_factory=dict)
    symbol_sources: dict = field(default_factory=dict)
    dynamic_ints: dict = field(default_factory=dict)
    size_nodes: dict = field(default_factory=dict)
    replays: list = field(default_factory=list)
    steps: int = 0
    ops: int = 0
    limit: int = 2_000_000


@dataclass(eq=False)
class Frame:
    code: types.CodeType
    globals: dict
    globals_source: Source
    locals: dict = field(default_factory=dict)
    closure: list = field(default_factory=list)
    stack: list = field(default_factory=list)
    ip: int = 0
    kw_names: tuple = ()
    handling: Value = NONE

    def __post_init__(self):
        self.decoded = decode(self.code)


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
# decoded once. Jumps carry byte offsets; `index` turns them into positions in the list. The exception table
# says which handler covers a range of offsets and how deep the stack is there: since Python 3.11 a `try`
# costs nothing until it raises.

# %%
@dataclass(eq=False)
class Decoded:
    """steps: per instruction (handler or None, number of operands it pops, instruction)."""
    instructions: list
    steps: list
    index: dict
    table: list
    lines: list


_DECODED: dict = {}


def decode(code: types.CodeType) -> Decoded:
    found = _DECODED.get(code)
    if found is None:
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
            handler, pops, variadic = HANDLERS.get(i.opname, (None, 0, False))
            steps.append((handler, pops + i.arg if variadic else pops, i))
        found = _DECODED[code] = Decoded(instructions, steps, index, dis._parse_exception_table(code), lines)
    return found


# %% [markdown]
# ## The loop
#
# Exceptions come in two kinds. `UserError` belongs to the traced program: look for a handler in the exception
# table, as CPython does. `Unsupported` is ours and passes through to `capture`.

# %%
class StopTrace(Exception):
    """The outermost frame has reached the instruction at which the graph breaks."""


def run(tx: Tracer, frame: Frame) -> Leave:
    """Execute `frame` until it returns or yields."""
    if len(tx.frames) >= 180:
        raise Unsupported("calls nested more than 180 deep", location(tx))
    outermost, steps, stack = not tx.frames, frame.decoded.steps, frame.stack
    tx.frames.append(frame)
    try:
        while True:
            if outermost:
                if tx.steps == tx.stop_at:
                    raise StopTrace
                tx.steps += 1
            handler, pops, instruction = steps[frame.ip]
            frame.ip += 1
            tx.ops += 1
            if handler is None:
                raise Unsupported(f"the instruction {instruction.opname}", location(tx))
            try:
                pushed = handler(tx, frame, instruction, *pop_many(frame, pops))
            except UserError as error:
                if tx.ops > tx.limit or not unwind(frame, instruction.offset, error.exc):
                    raise
                continue
            except NotConstant:
                unsupported(tx, f"{instruction.opname} of something that is no constant")
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


def unwind(frame: Frame, offset: int, exc: ExcVal) -> bool:
    """Jump to the handler that covers `offset`; False when there is none."""
    for entry in frame.decoded.table:
        if entry.start <= offset < entry.end:
            del frame.stack[entry.depth:]
            if entry.lasti:
                frame.stack.append(Const(value=offset))
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


def location(tx: Tracer):
    """The user's innermost line, or None outside any frame."""
    if not tx.frames:
        return None
    frame = next((f for f in reversed(tx.frames) if not is_library(f.code.co_filename)), tx.frames[0])
    return Location(frame.code.co_filename, line_of(frame), frame.code.co_name)


def call_chain(tx: Tracer) -> list:
    """Lines from the outermost frame inwards, for messages."""
    return [f"{f.code.co_filename}:{line_of(f)} in {f.code.co_name}" for f in tx.frames]


def unsupported(tx: Tracer, reason: str):
    """Give up on the current instruction: a graph break."""
    error = Unsupported(reason, location(tx))
    error.chain = call_chain(tx)
    raise error


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
    return ConstantSource(index, real)


def touch(tx: Tracer, value: Value):
    """`value` is about to change. If it existed before the call, its final contents are written back at the
    end."""
    if value.real is None or value.real is NEW:
        return
    if value.source is None and type(value) is not ObjVal:
        unsupported(tx, f"changing {describe(value)} that belongs to a library")
    tx.dirty.setdefault(id(value), value)


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
# ## Binding arguments
#
# Python's calling convention, on values: positional parameters, defaults, `*args`, keyword-only parameters,
# `**kwargs`.

# %%
def bind(tx, code, name, defaults, kwdefaults, args, kwargs) -> dict:
    """Locals of a call, by name. defaults: values of the last positional parameters; kwdefaults: dict of
    values."""
    names, count, keyword_only = code.co_varnames, code.co_argcount, code.co_kwonlyargcount
    positional = names[:count]
    bound = dict(zip(positional, args))
    position = count + keyword_only
    if len(args) > count:
        if not code.co_flags & inspect.CO_VARARGS:
            user_error(TypeError, f"{name}() takes {count} positional arguments but {len(args)} were given")
    if code.co_flags & inspect.CO_VARARGS:
        bound[names[position]] = TupleVal(items=list(args[count:]))
        position += 1
    extra = {}
    acceptable = names[code.co_posonlyargcount:count + keyword_only]
    for key, value in kwargs.items():
        if key not in acceptable:
            extra[key] = value
        elif key in bound:
            user_error(TypeError, f"{name}() got multiple values for argument {key!r}")
        else:
            bound[key] = value
    if code.co_flags & inspect.CO_VARKEYWORDS:
        bound[names[position]] = DictVal(items={k: [Const(value=k), v] for k, v in extra.items()})
    elif extra:
        user_error(TypeError, f"{name}() got an unexpected keyword argument {next(iter(extra))!r}")
    first_default = count - len(defaults)
    for i, parameter in enumerate(positional):
        if parameter not in bound:
            if i < first_default:
                user_error(TypeError, f"{name}() missing required argument: {parameter!r}")
            bound[parameter] = defaults[i - first_default]()
    for parameter in names[count:count + keyword_only]:
        if parameter not in bound:
            if parameter not in kwdefaults:
                user_error(TypeError, f"{name}() missing required keyword-only argument: {parameter!r}")
            bound[parameter] = kwdefaults[parameter]()
    return bound


# %%
REFUSED_FLAGS = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def inline(tx, code, name, globals_, globals_source, closure, defaults, kwdefaults, args, kwargs):
    """Run a Python function's bytecode as a frame of this trace and return its result."""
    if code.co_flags & REFUSED_FLAGS:
        unsupported(tx, f"the coroutine {name}")
    frame = Frame(code, globals_, globals_source, closure=closure)
    frame.locals = bind(tx, code, name, defaults, kwdefaults, args, kwargs)
    return GenVal(frame=frame) if code.co_flags & inspect.CO_GENERATOR else run(tx, frame).value


def advance(tx, generator: GenVal, sent: Value = NONE):
    """next(generator): the yielded value, or None when it has returned (its result is in
    `generator.result`)."""
    frame = generator.frame
    if frame in tx.frames:
        user_error(ValueError, "generator already executing")
    if generator.done:
        generator.result = NONE
        return None
    if generator.started:
        frame.stack.append(sent)
    generator.started = generator.done = True        # done, should the run fail
    left = run(tx, frame)
    if left.yielded:
        generator.done = False
        return left.value
    generator.result = left.value
    return None
