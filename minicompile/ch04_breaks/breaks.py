# %% [markdown]
# # Graph breaks
#
# `print(x)`, `x.item()`, `if x.sum() > 0`: some instructions cannot be part of a graph. The naive answer is
# to give up on the function. The better one is to cut it there: a graph for what comes before, the
# instruction itself in plain Python, and a *resume function* for the rest (`resume.py`), which is captured
# in turn when it runs.
#
#     def f(x):                  def compiled_f(x):
#         y = x.relu()               __out = __graph(x)               # x.relu()
#         print(y)          ->       __r = print(__out[0])
#         return y + 1               return resume_in_f(__out[0])     # return y + 1
#
# Where to cut is not known in advance: it is wherever the trace fails. By then the trace may be deep inside
# a callee, with half of the callee's side effects recorded. Instead of rolling back, the frame is traced a
# second time and told to stop before the instruction of the *outermost* frame under which it failed. If
# that is a call, the callee runs as a frame of its own, is captured on its own, and breaks in its own body.

# %%
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


from ..ch03_capture import capture as cap
from ..ch03_capture.contexts import ContextExit
from ..ch03_capture.epilogue import Epilogue, expression, pool
from ..ch03_capture.interpreter import PYTHON, decode
from ..ch03_capture.opcodes import CONVERSIONS
from ..ch03_capture.opcodes_calls import split_callable
from ..ch03_capture.operations import as_python
from ..ch03_capture.values import CellVal, NULL, NotConstant, Value
from ..errors import GraphBreakError, SkipFrame, Unsupported
from . import bytecode, resume


def capture_frame(func, args: dict, options: cap.CaptureOptions | None = None) -> cap.Captured:
    """Capture `func(**args)`: whole, or up to its first graph break. args: name -> object in localsplus order.

    Raises SkipFrame when the frame must be evaluated as it is, and GraphBreakError for a break under fullgraph."""
    options = options or cap.CaptureOptions()
    try:
        return cap.capture(func, args, options)
    except Unsupported as error:
        raises = getattr(error, "raises", False) or getattr(error, "quiet", False)
        if options.fullgraph and not raises:
            raise GraphBreakError(fullgraph_message(func, error)) from None
        if isinstance(error, SkipFrame):
            raise
        if raises or not hasattr(error, "step"):
            raise SkipFrame(error.reason, error.location) from None
        return capture_until(func, args, options, error)


def fullgraph_message(func, error) -> str:
    lines = [f"fullgraph=True, but the graph of {func.__qualname__} breaks: {error.reason}."]
    if error.location is not None:
        lines.append(f"  {error.location}: {getattr(error.location, 'source', '')}".rstrip(": "))
    chain = getattr(error, "chain", None) or []
    lines += [f"  called from {line}" for line in reversed(chain[:-1])]
    lines.append("Change that line, or allow graph breaks with fullgraph=False.")
    return "\n".join(lines)


# %% [markdown]
# ## The second trace
#
# It ends with the frame exactly as Python would have it before the breaking instruction: locals, stack,
# active contexts. What may not be cut is said here. Inside a loop, a resume function per round would nest
# without bound. Inside a `try`, the instruction would run outside of the handler that was meant to protect
# it. Then the frame runs as plain Python, and its callees are still compiled.

# %%
@dataclass(eq=False)
class Break:
    """The state at the break. `before` are statements that need the operands, `after` runs inside the contexts."""
    ep: Epilogue
    frame: Any
    instruction: Any
    following: int
    lines: list = field(default_factory=list)
    ends: list = field(default_factory=list)


@dataclass(eq=False)
class Text(Value):
    """A value that exists only in the generated text: the result of the breaking instruction."""
    text: str = ""


def capture_until(func, args, options, error) -> cap.Captured:
    """The first part of a broken frame: graph, side effects, the instruction, a call of the resume function."""
    done = cap.trace(func, args, options, stop_at=error.step - 1)
    tx, frame = done.tx, done.frame
    if done.result is not None:
        raise SkipFrame(f"the second trace did not stop where the first broke: {error.reason}", error.location)
    instruction = frame.instructions[frame.ip][1]
    emit = BREAKS.get(instruction.opname)
    if emit is None:
        raise SkipFrame(f"{error.reason} (at the instruction {instruction.opname})", error.location)
    check_place(tx, frame, instruction, error)
    following = frame.instructions[frame.ip + 1][1].offset if frame.ip + 1 < len(frame.instructions) else -1
    br = Break(Epilogue(tx), frame, instruction, following)
    try:
        lines = write_break(br, emit)
    except NotConstant:
        raise SkipFrame(error.reason, error.location) from None
    except Unsupported as inner:
        raise SkipFrame(f"{error.reason}; and {inner.reason}", error.location) from None
    reason = cap.BreakReason(error.reason, error.location, getattr(error, "chain", []))
    return cap.assemble(br.ep, lines, [reason])


def check_place(tx, frame, instruction, error):
    for _, other in frame.instructions:
        if "JUMP" in other.opname and other.offset >= instruction.offset and isinstance(other.argval, int) \
                and other.argval <= instruction.offset and "BACKWARD" in other.opname:
            raise SkipFrame(f"graph break inside a loop: {error.reason}", error.location)
    withs = 0
    decoded = decode(frame.code)
    for start, end, target in reachable_handlers(decoded, instruction.offset):
        kinds = [i.opname for _, i in decoded.instructions[decoded.index[target]:][:2]]
        if kinds == ["PUSH_EXC_INFO", "WITH_EXCEPT_START"]:
            withs += 1
        else:
            raise SkipFrame(f"graph break inside a try block: {error.reason}", error.location)
    on_stack = [v.context for v in frame.stack if isinstance(v, ContextExit)]
    if withs != len(on_stack) or any(a is not b for a, b in zip(on_stack, tx.active)) or len(on_stack) != len(tx.active):
        raise SkipFrame(f"graph break inside a with block: {error.reason}", error.location)


def reachable_handlers(decoded, offset):
    """The handlers that protect an instruction, innermost first. A table entry names only the innermost; the next one
    protects the handler itself."""
    found = []
    while True:
        entry = next((e for e in decoded.table if e.start <= offset < e.end), None)
        if entry is None or entry.target in [t for _, _, t in found]:
            return found
        target = decoded.instructions[decoded.index[entry.target]]
        if target[1].opname == "PUSH_EXC_INFO":
            found.append((entry.start, entry.end, entry.target))
        offset = entry.target


# %% [markdown]
# ## Writing it down
#
# The order matters. First the operands, locals and stack are read, then side effects are written, then the
# instruction runs, inside the contexts that were active, then the resume function takes over.

# %%
def write_break(br: Break, emit) -> list:
    emit(br)
    consume_result(br)
    contexts = [expression(br.ep, v.context) for v in br.frame.stack if isinstance(v, ContextExit)]
    tails = [(condition, continue_at(br, offset, stack)) for condition, offset, stack in br.ends] or \
        [(None, continue_at(br, br.following, br.frame.stack))]
    lines = cap.finish(br.ep)
    if contexts and br.lines:
        lines.append(f"with {', '.join(contexts)}:")
        lines += ["    " + line for line in br.lines]
    else:
        lines += br.lines
    for condition, tail in tails:
        lines.append(f"return {tail}" if condition is None else f"if {condition}: return {tail}")
    return lines


def consume_result(br: Break):
    """`print(x)` throws its result away and `n = x.item()` only stores it. Doing that here, and not in the resume
    function, keeps the result off its stack, where it would have to be looked at and guarded."""
    stack = br.frame.stack
    while br.following >= 0 and not br.ends and stack and type(stack[-1]) is Text:
        position = decode(br.frame.code).index[br.following]
        instruction = br.frame.instructions[position][1]
        if instruction.opname == "STORE_FAST" and type(br.frame.locals.get(instruction.argval)) is not CellVal:
            br.frame.locals[instruction.argval] = stack.pop()
        elif instruction.opname == "POP_TOP":
            stack.pop()
        else:
            return
        br.following = br.frame.instructions[position + 1][1].offset


def continue_at(br: Break, offset: int, stack: list) -> str:
    """The call of the resume function for `offset`, with the values it needs."""
    frame, ep = br.frame, br.ep
    kinds, slots = [], []
    for value in stack:
        if value is NULL:
            kinds.append(resume.NULL)
        elif isinstance(value, ContextExit):
            kinds.append(resume.CONTEXT)
            slots.append(expression(ep, value.context))
        else:
            kinds.append(resume.VALUE)
            slots.append(text_of(ep, value))
    code, position = resume.original_position(frame.code, offset)
    needed = bytecode.live_locals(code, position)
    if "__class__" in code.co_freevars and code.co_argcount:
        needed = needed | {code.co_varnames[0]}
    locals_, cells = {}, {}
    for name, value in frame.locals.items():
        if type(value) is CellVal:
            if value.source is None:
                cells[name] = expression(ep, value)
        elif name in needed:
            locals_[name] = text_of(ep, value)
    point = resume.make_resume(frame.code, offset, set(locals_), tuple(kinds), br.ep.tx.root_globals)
    return point.call_text(pool(ep, point.target), locals_, slots, cells, frame.code)


def text_of(ep, value) -> str:
    return value.text if type(value) is Text else expression(ep, value)


# %% [markdown]
# ## The instructions
#
# Each handler pops its operands, adds the statement, and pushes what Python would have pushed. They read
# like the bytecode's own documentation.

# %%
BREAKS: dict = {}


def breaks(*names):
    def register(function):
        for name in names:
            BREAKS[name] = function
        return function
    return register


def pop(br, count=1) -> list:
    """Expressions for the top `count` values of the stack, deepest first; they are removed."""
    values = br.frame.stack[-count:]
    del br.frame.stack[-count:]
    return [text_of(br.ep, v) for v in values]


def push(br, text: str):
    """The instruction's result: computed when it runs, then a name."""
    name = f"__r{len(br.lines)}"
    br.lines.append(f"{name} = {text}")
    br.frame.stack.append(Text(text=name))


@breaks("CALL", "CALL_KW")
def break_call(br):
    frame, ep, count = br.frame, br.ep, br.instruction.arg
    names = frame.kw_names
    if br.instruction.opname == "CALL_KW":
        names = as_python(ep.tx, frame.stack.pop())
    frame.kw_names = ()
    args = frame.stack[len(frame.stack) - count:]
    function, extra = split_callable(frame.stack, count)
    if getattr(function, "real", None) in (locals, globals, eval, exec):
        raise Unsupported("a builtin that looks at its caller's frame")
    texts = [text_of(ep, v) for v in extra + args[:count - len(names)]]
    texts += [f"{k}={text_of(ep, v)}" for k, v in zip(names, args[count - len(names):])]
    called = text_of(ep, function)
    del frame.stack[-count - 2:]
    push(br, f"{called}({', '.join(texts)})")


@breaks("CALL_FUNCTION_EX")
def break_call_ex(br):
    stack = br.frame.stack
    kwargs = "**" + pop(br)[0] if br.instruction.arg & 1 else ""
    args = pop(br)[0]
    if PYTHON >= (3, 13):
        stack.pop()
        function = pop(br)[0]
    else:
        function = pop(br)[0]
        stack.pop()
    push(br, f"{function}(*{args}, {kwargs})")


@breaks("BINARY_OP")
def break_binary(br):
    a, b = pop(br, 2)
    symbol = br.instruction.argrepr
    if symbol.endswith("="):
        push(br, a)
        br.lines.append(f"{br.frame.stack[-1].text} {symbol} {b}")
    else:
        push(br, f"{a} {symbol} {b}")


@breaks("COMPARE_OP", "IS_OP", "CONTAINS_OP")
def break_compare(br):
    a, b = pop(br, 2)
    i = br.instruction
    symbol = {"IS_OP": ("is", "is not"), "CONTAINS_OP": ("in", "not in")}.get(i.opname)
    text = f"{a} {symbol[i.arg] if symbol else i.argval} {b}"
    push(br, f"bool({text})" if i.opname == "COMPARE_OP" and PYTHON >= (3, 13) and i.arg & 16 else text)


@breaks("UNARY_NEGATIVE", "UNARY_POSITIVE", "UNARY_INVERT", "UNARY_NOT", "TO_BOOL", "GET_ITER")
def break_unary(br):
    word = {"UNARY_NEGATIVE": "-{}", "UNARY_POSITIVE": "+{}", "UNARY_INVERT": "~{}", "UNARY_NOT": "not {}",
            "TO_BOOL": "bool({})", "GET_ITER": "iter({})"}[br.instruction.opname]
    push(br, word.format(pop(br)[0]))


@breaks("BINARY_SUBSCR")
def break_subscript(br):
    container, key = pop(br, 2)
    push(br, f"{container}[{key}]")


@breaks("BINARY_SLICE")
def break_slice(br):
    container, start, stop = pop(br, 3)
    push(br, f"{container}[{start}:{stop}]")


@breaks("STORE_SUBSCR")
def break_store_subscript(br):
    value, container, key = pop(br, 3)
    br.lines.append(f"{container}[{key}] = {value}")


@breaks("STORE_SLICE")
def break_store_slice(br):
    value, container, start, stop = pop(br, 4)
    br.lines.append(f"{container}[{start}:{stop}] = {value}")


@breaks("DELETE_SUBSCR")
def break_delete_subscript(br):
    container, key = pop(br, 2)
    br.lines.append(f"del {container}[{key}]")


@breaks("STORE_ATTR")
def break_store_attribute(br):
    value, owner = pop(br, 2)
    br.lines.append(f"{owner}.{br.instruction.argval} = {value}")


@breaks("DELETE_ATTR")
def break_delete_attribute(br):
    br.lines.append(f"del {pop(br)[0]}.{br.instruction.argval}")


@breaks("LOAD_ATTR", "LOAD_METHOD")
def break_load_attribute(br):
    i, stack = br.instruction, br.frame.stack
    push(br, f"{pop(br)[0]}.{i.argval}")
    if i.opname == "LOAD_METHOD" or PYTHON >= (3, 12) and i.arg & 1:
        stack.insert(len(stack) - (PYTHON < (3, 13)), NULL)


@breaks("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_DEREF", "LOAD_CLOSURE")
def break_load_local(br):
    value = br.frame.locals[br.instruction.argval]
    if type(value) is CellVal:
        push(br, f"{expression(br.ep, value)}.cell_contents")
    else:
        push(br, text_of(br.ep, value))


@breaks("LOAD_GLOBAL")
def break_load_global(br):
    i, stack = br.instruction, br.frame.stack
    push(br, f"__G[{i.argval!r}]")
    if i.arg & 1:
        stack.insert(len(stack) - (PYTHON < (3, 13)), NULL)


@breaks("FORMAT_VALUE")
def break_format(br):
    spec = pop(br)[0] if br.instruction.arg & 4 else "''"
    value = pop(br)[0]
    conversion = CONVERSIONS[br.instruction.arg & 3]
    push(br, f"format({conversion.__name__}({value}), {spec})" if conversion else f"format({value}, {spec})")


@breaks("FORMAT_SIMPLE")
def break_format_simple(br):
    push(br, f"format({pop(br)[0]}, '')")


@breaks("FORMAT_WITH_SPEC")
def break_format_spec(br):
    value, spec = pop(br, 2)
    push(br, f"format({value}, {spec})")


@breaks("CONVERT_VALUE")
def break_convert(br):
    push(br, f"{CONVERSIONS[br.instruction.arg].__name__}({pop(br)[0]})")


@breaks("UNPACK_SEQUENCE")
def break_unpack(br):
    names = [f"__u{n}" for n in range(br.instruction.arg)]
    br.lines.append(f"{''.join(n + ', ' for n in names)} = {pop(br)[0]}")
    br.frame.stack.extend(Text(text=n) for n in reversed(names))


@breaks("IMPORT_NAME")
def break_import(br):
    level, names = pop(br, 2)
    push(br, f"__import__({br.instruction.argval!r}, __G, None, {names}, {level})")


# %% [markdown]
# A branch on the values of a tensor has two ways on, hence two resume functions.

# %%
def break_jump(test: str, keep: bool = False):
    def handler(br):
        kept = list(br.frame.stack)
        condition = test.format(pop(br)[0])
        popped = br.frame.stack
        br.lines.append(f"__cond = {condition}")
        br.ends = [("__cond", br.instruction.argval, kept if keep else popped), (None, br.following, popped)]
    return handler


for _infix in ("", "FORWARD_", "BACKWARD_"):
    BREAKS[f"POP_JUMP_{_infix}IF_TRUE"] = break_jump("bool({})")
    BREAKS[f"POP_JUMP_{_infix}IF_FALSE"] = break_jump("not {}")
BREAKS["JUMP_IF_TRUE_OR_POP"] = break_jump("bool({})", keep=True)
BREAKS["JUMP_IF_FALSE_OR_POP"] = break_jump("not {}", keep=True)
