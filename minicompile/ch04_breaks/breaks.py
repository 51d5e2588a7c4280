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
from ..ch03_capture.interpreter import PYTHON, pop_many
from ..ch03_capture.opcodes import CONVERSIONS, callable_pair
from ..ch03_capture.opcodes_calls import split_callable
from ..ch03_capture.operations import as_python
from ..ch03_capture.values import CellVal, NULL, NotConstant, Table, Value
from ..errors import GraphBreakError, SkipFrame, Unsupported
from . import bytecode, resume


def capture_frame(func, args: dict, options: cap.CaptureOptions | None = None) -> cap.Captured:
    """Capture `func(**args)`: whole, or up to its first graph break. args: name -> object in localsplus
    order.

    Raises SkipFrame when the frame must be evaluated as it is, and GraphBreakError for a break under
    fullgraph."""
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
    """The state at the break. lines: the breaking instruction as text, which runs inside the active
    contexts. ends: for a branch, (condition, offset, stack) of each way on; otherwise it goes on at the
    offset `following`."""
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
    """The first part of a broken frame: graph, side effects, the instruction, a call of the resume
    function."""
    done = cap.trace(func, args, options, stop_at=error.step - 1)
    tx, frame = done.tx, done.frame
    if done.result is not None:
        raise SkipFrame(f"the second trace did not stop where the first broke: {error.reason}",
                        error.location)
    upcoming = frame.decoded.instructions[frame.ip:frame.ip + 2]
    instruction = upcoming[0]
    if instruction.opname not in BREAKS:
        raise SkipFrame(f"{error.reason} (at the instruction {instruction.opname})", error.location)
    check_place(tx, frame, instruction, error)
    br = Break(Epilogue(tx), frame, instruction, upcoming[1].offset if len(upcoming) == 2 else -1)
    try:
        lines = write_break(br)
    except NotConstant:
        raise SkipFrame(error.reason, error.location) from None
    except Unsupported as inner:
        raise SkipFrame(f"{error.reason}; and {inner.reason}", error.location) from None
    reason = cap.BreakReason(error.reason, error.location, getattr(error, "chain", []))
    return cap.assemble(br.ep, lines, [reason])


def check_place(tx, frame, instruction, error):
    here = instruction.offset
    if any("BACKWARD" in i.opname and i.argval <= here <= i.offset for i in frame.decoded.instructions):
        raise SkipFrame(f"graph break inside a loop: {error.reason}", error.location)
    targets = handlers_of(frame.decoded, here)
    if not all(is_with_handler(frame.decoded, target) for target in targets):
        raise SkipFrame(f"graph break inside a try block: {error.reason}", error.location)
    on_stack = [v.context for v in frame.stack if isinstance(v, ContextExit)]
    if len(targets) != len(on_stack) or on_stack != tx.active:
        raise SkipFrame(f"graph break inside a with block: {error.reason}", error.location)


def handlers_of(decoded, offset) -> list:
    """Offsets of the handlers that protect an instruction, innermost first. A table entry names only the
    innermost; the next one protects the handler itself."""
    seen, found = set(), []
    while True:
        entry = next((e for e in decoded.table if e.start <= offset < e.end), None)
        if entry is None or entry.target in seen:
            return found
        seen.add(entry.target)
        if decoded.instructions[decoded.index[entry.target]].opname == "PUSH_EXC_INFO":
            found.append(entry.target)
        offset = entry.target


def is_with_handler(decoded, target) -> bool:
    position = decoded.index[target]
    return [i.opname for i in decoded.instructions[position:position + 2]] == ["PUSH_EXC_INFO",
                                                                               "WITH_EXCEPT_START"]


# %% [markdown]
# ## Writing it down
#
# The order matters. First the operands, locals and stack are read, then side effects are written, then the
# instruction runs, inside the contexts that were active, then the resume function takes over.

# %%
def write_break(br: Break) -> list:
    BREAKS[br.instruction.opname](br, br.instruction)
    consume_result(br)
    contexts = [expression(br.ep, v.context) for v in br.frame.stack if isinstance(v, ContextExit)]
    ends = br.ends or [(None, br.following, br.frame.stack)]
    tails = [(condition, continue_at(br, offset, stack)) for condition, offset, stack in ends]
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
    """`print(x)` throws its result away and `n = x.item()` only stores it. Doing that here, and not in the
    resume function, keeps the result off its stack, where it would have to be looked at and guarded."""
    stack, decoded = br.frame.stack, br.frame.decoded
    while br.following >= 0 and not br.ends and stack and type(stack[-1]) is Text:
        position = decoded.index[br.following]
        instruction = decoded.instructions[position]
        name, variables = instruction.argval, br.frame.locals
        if instruction.opname == "STORE_FAST" and type(variables.get(name)) is not CellVal:
            variables[name] = stack.pop()
        elif instruction.opname == "POP_TOP":
            stack.pop()
        else:
            return
        br.following = decoded.instructions[position + 1].offset


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
# Each instruction that may break is written as what it means in Python. For most that is a template for the
# operands, deepest first: an expression, whose value is pushed, or a statement.

# %%
BREAKS = Table()
EXPRESSIONS = {                                  # opcode -> (operands, template)
    "UNARY_NEGATIVE": (1, "-{0}"), "UNARY_POSITIVE": (1, "+{0}"), "UNARY_INVERT": (1, "~{0}"),
    "UNARY_NOT": (1, "not {0}"), "TO_BOOL": (1, "bool({0})"), "GET_ITER": (1, "iter({0})"),
    "BINARY_SUBSCR": (2, "{0}[{1}]"), "BINARY_SLICE": (3, "{0}[{1}:{2}]"),
    "LOAD_GLOBAL": (0, "__G[{i.argval!r}]"),
    "LOAD_ATTR": (1, "{0}.{i.argval}"), "LOAD_METHOD": (1, "{0}.{i.argval}"),
    "FORMAT_SIMPLE": (1, "format({0}, '')"), "FORMAT_WITH_SPEC": (2, "format({0}, {1})"),
    "IMPORT_NAME": (2, "__import__({i.argval!r}, __G, None, {1}, {0})"),
}
STATEMENTS = {
    "STORE_SUBSCR": (3, "{1}[{2}] = {0}"), "STORE_SLICE": (4, "{1}[{2}:{3}] = {0}"),
    "DELETE_SUBSCR": (2, "del {0}[{1}]"), "STORE_ATTR": (2, "{1}.{i.argval} = {0}"),
    "DELETE_ATTR": (1, "del {0}.{i.argval}"),
}


@BREAKS.of(*EXPRESSIONS)
def break_expression(br, i):
    count, template = EXPRESSIONS[i.opname]
    push(br, template.format(*pop(br, count), i=i))
    if i.opname == "LOAD_METHOD" or i.arg and i.arg & 1 and (
            i.opname == "LOAD_GLOBAL" or i.opname == "LOAD_ATTR" and PYTHON >= (3, 12)):
        br.frame.stack += callable_pair(br.frame.stack.pop())


@BREAKS.of(*STATEMENTS)
def break_statement(br, i):
    count, template = STATEMENTS[i.opname]
    br.lines.append(template.format(*pop(br, count), i=i))


def pop(br, count=1) -> list:
    """Texts of the top `count` values of the stack, deepest first; they are removed."""
    return [text_of(br.ep, v) for v in pop_many(br.frame, count)]


def push(br, text: str):
    """The instruction's result: computed when it runs, then a name."""
    name = f"__r{len(br.lines)}"
    br.lines.append(f"{name} = {text}")
    br.frame.stack.append(Text(text=name))


# %% [markdown]
# Calls, and the few whose meaning depends on their argument.

# %%
@BREAKS.of("CALL", "CALL_KW")
def break_call(br, i):
    frame = br.frame
    names = as_python(br.ep.tx, frame.stack.pop()) if i.opname == "CALL_KW" else frame.kw_names
    first, second, *args = pop_many(frame, i.arg + 2)
    function, extra = split_callable(first, second)
    if getattr(function, "real", None) in (locals, globals, eval, exec):
        raise Unsupported("a builtin that looks at its caller's frame")
    texts = [text_of(br.ep, v) for v in [*extra, *args]]
    positional = len(texts) - len(names)
    texts[positional:] = [f"{name}={text}" for name, text in zip(names, texts[positional:])]
    push(br, f"{text_of(br.ep, function)}({', '.join(texts)})")


@BREAKS.of("CALL_FUNCTION_EX")
def break_call_ex(br, i):
    kwargs = "**" + pop(br)[0] if i.arg & 1 else ""
    first, second, args = pop_many(br.frame, 3)
    args = text_of(br.ep, args)
    push(br, f"{text_of(br.ep, split_callable(first, second)[0])}(*{args}, {kwargs})")


@BREAKS.of("BINARY_OP")
def break_binary(br, i):
    a, b = pop(br, 2)
    if i.argrepr.endswith("="):
        push(br, a)
        br.lines.append(f"{br.frame.stack[-1].text} {i.argrepr} {b}")
    else:
        push(br, f"{a} {i.argrepr} {b}")


@BREAKS.of("COMPARE_OP", "IS_OP", "CONTAINS_OP")
def break_compare(br, i):
    a, b = pop(br, 2)
    words = {"IS_OP": ("is", "is not"), "CONTAINS_OP": ("in", "not in")}.get(i.opname)
    text = f"{a} {words[i.arg] if words else i.argval} {b}"
    push(br, f"bool({text})" if i.opname == "COMPARE_OP" and PYTHON >= (3, 13) and i.arg & 16 else text)


@BREAKS.of("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_DEREF", "LOAD_CLOSURE")
def break_load_local(br, i):
    value = br.frame.locals[i.argval]
    push(br, f"{expression(br.ep, value)}.cell_contents" if type(value) is CellVal else text_of(br.ep, value))


@BREAKS.of("FORMAT_VALUE")
def break_format(br, i):
    spec = pop(br)[0] if i.arg & 4 else "''"
    value = pop(br)[0]
    conversion = CONVERSIONS[i.arg & 3]
    push(br, f"format({conversion.__name__}({value}), {spec})" if conversion else f"format({value}, {spec})")


@BREAKS.of("CONVERT_VALUE")
def break_convert(br, i):
    push(br, f"{CONVERSIONS[i.arg].__name__}({pop(br)[0]})")


@BREAKS.of("UNPACK_SEQUENCE")
def break_unpack(br, i):
    names = [f"__u{n}" for n in range(i.arg)]
    br.lines.append(f"{''.join(n + ', ' for n in names)} = {pop(br)[0]}")
    br.frame.stack.extend(Text(text=n) for n in reversed(names))


# %% [markdown]
# A branch on the values of a tensor has two ways on, hence two resume functions.

# %%
def register_jump(name: str, test: str):
    def break_jump(br, i):
        before = list(br.frame.stack)
        br.lines.append(f"__cond = {test.format(pop(br)[0])}")
        after = br.frame.stack
        br.ends = [("__cond", i.argval, before if "OR_POP" in i.opname else after),
                   (None, br.following, after)]
    names = [f"POP_JUMP_IF_{name}", f"POP_JUMP_FORWARD_IF_{name}", f"POP_JUMP_BACKWARD_IF_{name}",
             f"JUMP_IF_{name}_OR_POP"]
    BREAKS.of(*names)(break_jump)


register_jump("TRUE", "bool({})")
register_jump("FALSE", "not {}")
