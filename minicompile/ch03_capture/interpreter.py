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
# State is in two records. `Tracer` (`tracer.py`) is one capture: the graph, the guards, the objects seen. `Frame`
# is one activation: the instruction pointer, the locals, the stack.

# %%
import dis
import inspect
import types
from dataclasses import dataclass, field


from ..ch02_guards.guards import holds_others, runs_code_at_death
from ..ch02_guards.identity import module_name
from ..ch02_guards.sources import LocalSource
from ..errors import SkipFrame, Unsupported
from .binding import bind
from .exceptions import UserError, user_error
from .hook import kept, record
from .tracer import Tracer, guard, location, say_where, unsupported
from .values import (
    AbstractValue, BIRTHS, DictVal, ExcVal, GenVal, IterVal, LASTI, Lazy, NONE, NULL, NotConstant, ObjVal, TracebackVal, TupleVal,
    const, dict_of)
from .wrap import realize

@dataclass(eq=False)
class Frame:
    code: types.CodeType
    globals: dict
    locals: dict = field(default_factory=dict)
    closure: list = field(default_factory=list)
    stack: list = field(default_factory=list)
    ip: int = 0
    kw_names: tuple = ()
    handling: AbstractValue = NONE
    namespace: DictVal | None = None             # of a class body
    place: tuple | None = None                   # `ip`, and the location there

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
# value, or a list of values. A `Leave` ends the frame. A handler that is one expression is a row of a table (`instructions`).

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


def instructions(handlers: dict):
    """Register handlers that are one expression each: {names of instructions: handler}."""
    for names, function in handlers.items():
        opcode(*names.split())(function)


@dataclass(eq=False)
class Leave:
    """The end of a frame's run: it returns a value, or yields one and can go on."""
    value: AbstractValue
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
    """steps: per instruction (handler, number of operands it pops, instruction)."""
    instructions: list
    steps: list
    index: dict
    table: list
    lines: list


def decode(code: types.CodeType) -> Decoded:
    instructions = [single for i in dis.get_instructions(code) if i.opname not in ("CACHE", "EXTENDED_ARG") for single in singles(i)]
    index, position = {}, 0
    for offset in range(len(code.co_code) + 2):            # a jump may aim at an EXTENDED_ARG prefix
        while position < len(instructions) and instructions[position].offset < offset:
            position += 1
        index[offset] = position
    steps, lines, line = [], [], code.co_firstlineno
    for i in instructions:
        line = (i.positions.lineno if i.positions else None) or line
        lines.append(line)
        if "_FAST" in i.opname and not code.co_flags & inspect.CO_OPTIMIZED:
            i = i._replace(argval=second_of_name(code, i.argval, i.arg))
        handler, pops, variadic = HANDLERS.get(i.opname, (refuse_instruction, 0, False))
        steps.append((handler, pops + i.arg if variadic else pops, i))
    return Decoded(instructions, steps, index, dis._parse_exception_table(code), lines)


def refuse_instruction(tx, frame, i):
    unsupported(tx, f"the instruction {i.opname}")


def singles(i) -> list:
    """3.13 has instructions for two locals, LOAD_FAST_LOAD_FAST and its like, with two indices in one argument: they become two, at
    the two bytes, so that each has an offset of its own."""
    first, _, second = i.opname.partition("_FAST_")
    return [i] if second not in ("LOAD_FAST", "STORE_FAST") else [
        i._replace(opname=name, opcode=dis.opmap[name], arg=arg, argval=value, offset=offset)
        for name, arg, value, offset in zip((f"{first}_FAST", second), (i.arg >> 4, i.arg & 15), i.argval, (i.offset, i.offset + 1))]


def second_of_name(code, name, index):
    """The key of a variable of a comprehension in a class body, where a cell may have the same name. (3.13
    loads a cell with LOAD_FAST, too: its index is above those of variables.)"""
    return f".{name}" if name in code.co_freevars and index < code.co_nlocals else name


# %% [markdown]
# ## The loop
#
# Exceptions come in two kinds. `UserError` belongs to the traced program: look for a handler in the exception
# table, as CPython does. `Unsupported` is ours and passes through to `capture`.

# %%
class StopTrace(Exception):
    """The outermost frame has reached the instruction at which the graph breaks."""


# %% [markdown]
# One round of the loop takes the next step: a handler, how many values it takes from the stack, and the
# instruction. It pops the values and calls the handler. What the handler returns is pushed: one value, a list of
# several, nothing, or `Leave`, with which the frame ends. `ip` points to the following instruction before the
# handler runs, so that a jump is an assignment to it.
#
# Only the outermost frame counts its steps. If the trace before this one ended in a break at step `stop_at`, this
# trace stops there (`StopTrace`), with the stack and the variables as they are in front of the instruction.
#
# The `except` clauses sort what may go wrong in a handler. A `UserError` carries an exception that the *program*
# raises. As in CPython, it is linked to the exception that is being handled at the moment (`note_raise`), and `unwind` looks for
# a handler of the program in the frame's table; without one the error goes on to the calling frame. `NotConstant`
# and `Unsupported` are breaks, and note the place. The last test ends traces that would never end, such as a loop
# of a million rounds that is being unrolled.

# %%
def run_instructions(tx: Tracer, frame: Frame, thrown: ExcVal | None = None) -> Leave:
    """Execute `frame` until it returns or yields. thrown: an exception that is raised where it stands."""
    if len(tx.frames) >= 180:
        raise Unsupported("calls nested more than 180 deep", location(tx))
    outermost, steps, stack = not tx.frames and not tx.path, frame.decoded.steps, frame.stack
    if thrown is not None:
        at = steps[max(frame.ip - 1, 0)][2]
        note_passage(frame, at, thrown)
        chain(thrown, frame.handling)
        if not unwind(frame, at.offset, thrown):
            raise UserError(thrown)
    tx.frames.append(frame)
    try:
        while True:
            if outermost:
                if len(tx.path) == tx.stop_at:
                    raise StopTrace
                tx.path.append((frame.ip, next(BIRTHS)))
            handler, pops, instruction = steps[frame.ip]
            frame.ip += 1
            tx.ops += 1
            if tx.ops > tx.options.max_ops:
                raise SkipFrame(f"more than {tx.options.max_ops} instructions to trace", location(tx))
            try:
                operands = stack[len(stack) - pops:]
                del stack[len(stack) - pops:]
                pushed = handler(tx, frame, instruction, *operands)
            except UserError as error:
                note_raise(tx, frame, instruction, error.exc)
                entry = covering(frame, instruction.offset)
                for value in stack[entry.depth:] if entry else ():
                    let_go(tx, value)
                if not unwind(frame, instruction.offset, error.exc):
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
    finally:
        tx.frames.pop()


# %% [markdown]
# Helpers around exceptions. The first notes what CPython notes on an exception when an instruction raises it: what was being
# handled then (`chain`), and, by `note_passage`, an entry of the traceback that the exception will have if it ever leaves the
# trace. There is one for each frame that it comes through, but not where it is raised again as it was. An exception that is thrown
# into a generator is chained to what *that* is handling, not to what its caller is. The last lets a
# handler try something that may raise in the traced program, for example `next()` at the end of an iterator.

# %%
def note_raise(tx: Tracer, frame: Frame, instruction, exc: ExcVal) -> None:
    raises, reraises = (instruction.opname == name for name in ("RAISE_VARARGS", "RERAISE"))
    if not reraises and not (raises and instruction.arg == 0):
        note_passage(frame, instruction, exc)
    handled = handled_exception(tx)
    if raises or not (exc.seen or reraises):
        chain(exc, handled)
    exc.seen = True


def chain(exc: ExcVal, handled: AbstractValue) -> None:
    """`exc` is raised while `handled` is being handled. Where that one came from `exc` itself, its own chain is cut."""
    if handled not in (NONE, exc):
        link, met = handled, set()
        while type(link) is ExcVal and id(link) not in met:
            met.add(id(link))
            link.context = None if link.context is exc else link.context
            link = link.context
        exc.context = handled


def note_passage(frame: Frame, instruction, exc: ExcVal) -> None:
    """`exc` has come out of an instruction of `frame`."""
    before = TracebackVal() if exc.traceback is NONE else exc.traceback
    if type(before) is TracebackVal and not module_name(frame.globals).startswith("minicompile."):
        line = frame.decoded.lines[frame.decoded.index[instruction.offset]]
        passed = frame.code, frame.globals, instruction.offset & ~1, line
        exc.traceback = TracebackVal(passed=(*before.passed, passed))


def handled_exception(tx: Tracer) -> AbstractValue:
    """What `sys.exception()` is: the exception in whose handler the program is."""
    return next((f.handling for f in reversed(tx.frames) if f.handling is not NONE), NONE)


def unless_raised(cls, function):
    """function(), or None when the traced program raises a `cls` in it."""
    try:
        return function()
    except UserError as error:
        if issubclass(error.exc.cls, cls):
            return None
        raise


# %% [markdown]
# CPython has a table of which instructions are covered by which `try`. `unwind` finds the entry for the
# instruction that has raised, cuts the stack to the depth that it had at the `try`, pushes the exception, and
# jumps to the handler's first instruction.

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


def covering(frame: Frame, offset: int):
    """The entry of the table that says who handles an exception of the instruction at `offset`, or None."""
    return next((entry for entry in frame.decoded.table if entry.start <= offset < entry.end), None)


def jump(frame: Frame, offset: int):
    frame.ip = frame.decoded.index[offset]


# %% [markdown]
# ## Variables
#
# Locals and cells share one dictionary, as they share one array in CPython: a captured variable's entry is
# a `CellVal`.

# %%
UNBOUND = "cannot access local variable '{}' where it is not associated with a value"


def read_local(tx, frame, name):
    value = frame.locals.get(name)
    if value is None:
        user_error(UnboundLocalError, UNBOUND.format(name))
    return realize(tx, value)


def store_local(tx, frame, name, value):
    if value is NULL:
        frame.locals.pop(name, None)
    elif name in frame.code.co_freevars:             # the cell that an inlined comprehension has hidden
        frame.locals[name] = realize(tx, value)
    else:
        frame.locals[name] = value


def is_empty(tx, cell) -> bool:
    if cell.content is None and cell.source is not None:
        guard(tx, cell.source, "EMPTY_CELL")
    return cell.content is None


def read_cell(tx, cell, name):
    if is_empty(tx, cell) and name in tx.frames[-1].code.co_cellvars:
        user_error(UnboundLocalError, UNBOUND.format(name))
    if cell.content is None:
        user_error(NameError, f"cannot access free variable '{name}' where it is not associated with a value"
                              " in enclosing scope", name=const(name))
    return realize(tx, cell.content)


# %% [markdown]
# ## Python functions
#
# To call a function of the program is to run its bytecode in a new frame of the same trace. Nothing is
# written to the graph for the call itself, so a model of a hundred modules becomes one flat graph. `bind`
# sorts the arguments as CPython would, and raises its TypeError if they do not fit; defaults are read, and
# guarded, only where the caller has left something out.

# %%
REFUSED_FLAGS = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def inline(tx, code, name, globals_, closure, defaults, kwdefaults, args, kwargs, namespace=None):
    """Run a Python function's bytecode as a frame of this trace and return its result. defaults, kwdefaults:
    functions that give a value. namespace: of a class body."""
    if code.co_flags & REFUSED_FLAGS:
        unsupported(tx, f"the coroutine {name}")
    frame = Frame(code, globals_, closure=closure, namespace=namespace)
    try:
        bound = bind(code, tuple(defaults), kwdefaults, [realize(tx, a) for a in args], kwargs, name)
    except TypeError as error:
        user_error(TypeError, *error.args)
    frame.locals = {name: as_local(value) for name, value in zip(code.co_varnames, bound)}
    return GenVal(frame=frame) if code.co_flags & inspect.CO_GENERATOR else run_instructions(tx, frame).value


def as_local(bound) -> AbstractValue:
    """One bound parameter: a value, the arguments of `*args` or `**kwargs`, or a default."""
    if isinstance(bound, AbstractValue):
        return bound
    if type(bound) is tuple:
        return TupleVal(items=list(bound))
    return dict_of(bound) if type(bound) is dict else bound()


# %% [markdown]
# ## Generators
#
# A generator function returns at once, with a frame that has not begun. `advance` runs this frame until it
# yields, and puts it aside with its stack. So a generator costs a loop nothing, and several of them can be in
# progress at a time.
#
# ```python
# def running(x, n):
#     def sums():
#         total = x * 0
#         while True:
#             total = total + (yield total)
#     it = sums()
#     next(it)
#     return it.send(x), it.send(x * n)
# ```
#
# With `n` 4 the graph has what the generator has computed up to its third `yield`, among what its caller has:
#
# ```python
# mul: f32[3] = mul(x, 0)
# add: f32[3] = add(mul, x)
# mul_1: f32[3] = mul(x, 4)
# add_1: f32[3] = add(add, mul_1)
# return (add, add_1)
# ```
#
# The many cases are those of the protocol: a value that is sent in appears on the stack of the suspended frame, an
# exception is raised there, and a generator that ends has a result, which `yield from` wants.

# %%
def advance(tx, generator: GenVal, sent: AbstractValue = NONE, thrown: ExcVal | None = None):
    """next(generator): the yielded value, or None when it has returned (its result is in
    `generator.result`). thrown: an exception to raise inside instead."""
    frame = generator.frame
    if frame in tx.frames:
        user_error(ValueError, "generator already executing")
    if thrown is not None:
        thrown.seen = True                           # so what whoever throws is handling is not its context
    if thrown is not None and (generator.done or not generator.started):
        if not generator.done:
            note_passage(frame, frame.decoded.instructions[0], thrown)
        generator.done = True
        raise UserError(thrown)
    if generator.done:
        generator.result = NONE
        return None
    if not generator.started and sent is not NONE:
        user_error(TypeError, "can't send non-None value to a just-started generator")
    if generator.started and thrown is None:
        frame.stack.append(sent)
    elif thrown is not None and delegates(frame):
        unsupported(tx, "throwing into a generator that delegates to another")
    if not generator.started:
        tx.effects.generators.append(generator)
    generator.started = generator.done = True        # done, should the run fail
    try:
        left = run_instructions(tx, frame, thrown)
    except UserError as error:
        if not issubclass(error.exc.cls, StopIteration):
            raise
        left = ExcVal(cls=RuntimeError, args=[const("generator raised StopIteration")], cause=error.exc,
                      context=error.exc)                    # PEP 479
        raise UserError(left) from None
    if left.yielded:
        generator.done = False
        return left.value
    generator.result = left.value
    return None


# %% [markdown]
# A generator that is dropped half-way, as by a `break` out of its loop, is closed by CPython when
# the last reference goes, which runs its `finally` clauses. The trace does not see when that is; if there is
# anything to run, the outermost frame stays plain Python (`has_cleanup`, asked at the end of capture).

# %%
NO_CLEANUP = set("PUSH_EXC_INFO LOAD_GLOBAL LOAD_NAME LOAD_FAST LOAD_DEREF LOAD_ATTR LOAD_CONST BUILD_TUPLE CHECK_EXC_MATCH COPY "
                 "POP_EXCEPT STORE_FAST DELETE_FAST CALL_INTRINSIC_1".split())


def has_cleanup(frame: Frame) -> bool:
    """Whether dropping this suspended generator runs code of the program: a `finally`, a `with`, or an `except` that takes
    GeneratorExit. Its handlers are followed on the way of an exception that no `except` wants."""
    instructions, index = frame.decoded.instructions, frame.decoded.index
    offset = instructions[frame.ip - 1].offset
    while (entry := covering(frame, offset)) is not None:
        at = instructions[index[entry.target]]
        while at.opname not in ("RERAISE", "CLEANUP_THROW"):
            leads = at.opname.startswith("POP_JUMP") and at.opname.endswith("IF_FALSE")
            if not leads and at.opname not in NO_CLEANUP or at.argval in ("GeneratorExit", "BaseException"):
                return True
            at = instructions[index[at.argval] if leads else index[at.offset] + 1]
        offset = at.offset
    return False


# %% [markdown]
# A generator that a loop behind a graph break takes its items from is a real one, which waits on the stack. When the loop is left
# by `break`, `return` or an exception, or the program deletes it, Python closes it at once. So the graph breaks there (`let_go`), and a
# step does it. That goes for iterators over a generator, such as `enumerate` makes, and for objects with a `__del__`, too.

# %%
def let_go(tx: Tracer, value) -> None:
    """The program drops `value`; if a resume function was given it, there may be nobody else who holds it."""
    if type(value) in (Lazy, ObjVal) and type(value.source) is LocalSource and "origin" in record(tx.frames[0].code):
        guard(tx, value.source, "TYPE_MATCH", type(value.real))
        if runs_code_at_death(value.real):
            unsupported(tx, f"a {type(value.real).__qualname__} is dropped, which runs code")
        if holds_others(value.real):
            guard(tx, value.source, "DIES_QUIETLY", None)


# %%
def delegates(frame: Frame) -> bool:
    """Whether a suspended generator stands in a `yield from`."""
    following, on_top = frame.decoded.instructions[frame.ip], frame.stack[-1:]
    inside = bool(on_top) and type(on_top[0]) in (GenVal, IterVal)
    return inside and following.opname == "RESUME" and following.arg & 3 == 2
