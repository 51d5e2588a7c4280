# %% [markdown]
# # Graph breaks
#
# `print(x)`, `x.item()`, `if x.sum() > 0`: some instructions cannot be part of a graph. The naive answer is
# to give up on the function. The better one is to cut it there: a graph for what comes before, the
# instruction itself in plain Python (a *step*, `steps.py`), and a *resume function* for the rest
# (`resume.py`), which is captured in turn when it runs.
#
#     def f(x):                  def compiled_f(x):
#         y = x.relu()               __out = __graph(x)                   # x.relu()
#         print(y)          ->       return finish(step_in_f, y)          # print(y), then:
#         return y + 1                                                    # resume_in_f(y): return y + 1
#
# Where to cut is not known in advance: it is wherever the trace fails. By then the trace may be deep inside
# a callee, with half of the callee's side effects recorded. Instead of rolling back, the frame is traced a
# second time and told to stop before the instruction of the *outermost* frame under which it failed. If
# that is a call, the callee runs as a frame of its own, is captured on its own, and breaks in its own body.

# %%
import itertools
import linecache

import torch

from .. import advice
from ..ch01_graphs.shapes import is_symbolic
from ..ch02_guards.guards import GuardSet
from ..ch02_guards.identity import held
from ..ch02_guards.sources import ClosureCellSource, LocalSource
from ..ch03_capture import capture as cap, hook
from ..ch03_capture.effects import settled
from ..ch03_capture.epilogue import Epilogue, expression, pool
from ..ch03_capture.inputs import FROM_ZERO
from ..ch03_capture.values import LASTI, NULL, CellVal, HandlingVal, Lazy, NotConstant, SymVal, TensorVal
from ..errors import GraphBreakError, SkipFrame, Unsupported, marked
from . import resume, steps

MOST_UNROLLINGS = 4             # of the rest of one loop, for all models together


def capture_frame(func, args: dict, options: cap.CaptureOptions | None = None) -> cap.Captured:
    """Capture `func(**args)`: whole, or up to its first graph break. args: name -> object in localsplus
    order. Of a resume function, first with the rest of a loop that has begun unrolled (`begun_before` in chapter 3).

    Raises SkipFrame when the frame must be evaluated as it is, and GraphBreakError for a break under
    fullgraph."""
    options, origin = options or cap.CaptureOptions(), resume.origin_of(func.__code__)
    if origin is not None and origin.unrollings < MOST_UNROLLINGS:
        options.unrolls, options.unrolled = True, False
        try:
            return capture_or_cut(func, args, options)
        except Unsupported:
            if not options.unrolled:
                raise
        finally:
            origin.unrollings += options.unrolled
            options.unrolls = False
    return capture_or_cut(func, args, options)


def capture_or_cut(func, args: dict, options: cap.CaptureOptions) -> cap.Captured:
    try:
        return cap.capture(func, args, options)
    except Unsupported as error:
        told = getattr(error, "told", False)
        raises = told or getattr(error, "raises", False) or getattr(error, "quiet", False)
        if options.fullgraph and not raises:
            raise GraphBreakError(fullgraph_message(func, error, options.unseen)) from None
        if isinstance(error, SkipFrame):
            raise
        if raises or not hasattr(error, "step"):
            raise marked(SkipFrame(error.reason, error.location), raises=raises, told=told) from None
        return capture_until(func, args, options, error)


# %% [markdown]
# ## Where exactly to cut
#
# The second trace ends with the frame exactly as Python would have it before the breaking instruction:
# locals, stack, active contexts. Not everything in it can be handed over. A generator that is half-way
# through its body, or an iterator of `reversed`, exists in the trace only; a context that a user's `__enter__`
# has switched on would have to be switched on again. But each of them was made by some instruction. So the
# cut moves back to *that* instruction: Python executes it, there is a real generator from then on, and what
# the trace does not know how to advance breaks the graph where it is advanced.
#
# An iterator that is alive where the graph breaks:
#
# ```python
# def backwards(x, y):
#     z = x + y
#     factors = reversed([z, y])
#     print(z.shape)
#     for a in factors:
#         z = z * a
#     return z
# ```
#
# The break is at `print`, and the cut is before it, at the call of `reversed`. The entry makes from the graph's result what that call has
# on the stack, the class and a list, and hands it to the step:
#
# ```python
# __t0 = __K[1].__dict__['reversed']
# __t3 = [__out[0], y, ]
# __next_call = __K[3]((__function(__k2, __G, 'backwards', None, ()), (__out[0], __t0, __t3, )))
# ```
#
# `capture_until` is the loop that moves the cut. The second trace stops at `stop`, and `cut` writes down what it has done. If the frame
# holds something that no text can make at run time, the error says at which instruction that was born, and `stop` goes there. It only
# ever goes back, so the loop ends: where there is no earlier instruction, the whole frame is left to Python.

# %%
def capture_until(func, args, options, error) -> cap.Captured:
    """The first part of a broken frame: graph, side effects, a call of the step."""
    stop = error.step - 1
    while True:
        done = cap.trace_frame(func, args, options, stop_at=stop)
        if done.result is not None:
            raise SkipFrame(f"the second trace did not stop where the first broke: {error.reason}",
                            error.location)
        if done.tx.loop is not None and any(value is done.tx.loop() for value in done.frame.stack):
            raise SkipFrame(f"a loop that was unrolled breaks: {error.reason}", error.location)
        try:
            return cut(done, break_reason(error))
        except NotConstant:
            raise SkipFrame(error.reason, error.location) from None
        except SkipFrame:
            raise
        except Unsupported as inner:
            earlier = cap.step_of(done.tx, inner.born)
            if not 0 <= earlier < stop:
                raise SkipFrame(f"{error.reason}; and {inner.reason}", error.location) from None
            stop = earlier


# %% [markdown]
# `cut` makes the entry of a broken frame, in five parts:
#
# 1. The contexts that are active have to be on the stack, where the step can find them; one that was entered elsewhere moves the cut.
# 2. What is handed over is collected: the values on the stack (`stack_slots`), and those local variables that the rest will
#    read (`needed_locals`), each as the text by which the epilogue of chapter 3 makes it. Cells that closures share are handed over as
#    cells; a comprehension that has taken the place of one for its own variable, as 3.12 and later do, moves the cut to its front
#    (`place_before_comprehension`). Some that it will not read are kept all the same (`kept_locals`, below).
# 3. A frame that has made no graph by now, has written nothing and keeps what it was given needs no entry of its own (`only_step`, below).
#    If it only returns what the break gives, it is evaluated as it is (`nothing_else`).
# 4. The step is made, from the breaking instruction and what prepares it, and told what varies (`hand_on`).
# 5. The last lines of the entry put its call together, and choose who runs it. A resume function returns it to the loop that called
#    it; the function itself runs the loop, and lets go of its results before.

# %%
def cut(done: cap.Trace, reason) -> cap.Captured:
    """What the trace has done so far, then a step from where it stopped."""
    tx, frame = done.tx, done.frame
    on_stack = [c for v in frame.stack for c in done.active if c.left_by(v)]
    if on_stack != done.active:
        raise Unsupported("graph break inside a context that was entered out of sight",
                          born=min((c.born for c in done.active if c not in on_stack), default=0))
    ep = Epilogue(tx)
    kinds, slots = stack_slots(ep, frame.stack, done.active)
    path = [i.offset for i in pending_instructions(frame)]
    code, start = resume.original_position(frame.code, path[0])
    path = [resume.original_position(frame.code, offset)[1] for offset in path]
    needed, locals_, cells = resume.needed_locals(code, start), {}, {}
    for name, value in frame.locals.items():
        if type(value) is CellVal:
            if not isinstance(value.source, ClosureCellSource) and not name.startswith(resume.TAKEN):
                cells[name] = expression(ep, value)
        elif name in (*frame.code.co_cellvars, *frame.code.co_freevars):
            raise Unsupported("graph break in a comprehension whose variable hides one that is shared with a closure",
                              born=place_before_comprehension(tx, frame, name))
        elif name in needed:
            locals_[name] = expression(ep, value)
    lines, stored = cap.closing_lines(ep, done), stored_next(frame)
    found = kept_locals(ep, frame, needed | stored)
    replaced = replaced_locals(found, {*frame.locals, *stored}, code)
    from_before = all(settled(frame.locals[name]).source for name in found)
    kept = ", ".join(f"{name!r}: {text}" for name, text in {**found, **replaced}.items())
    kept, as_it_came = f", {{{kept}}}" if kept else "", from_before and not replaced and not ep.writes and not has_graph(tx)
    if as_it_came and (whole := only_step(done, path, kept)) is not None:
        return cap.Captured(None, [], [], GuardSet(), whole[0], whole[1], [reason], weak=(0,))
    if as_it_came and nothing_else(tx, frame):
        return cap.finish_capture(ep, ["return __EVALUATE"], [reason])
    point = step_for(code, path, set(locals_), kinds)
    hand_on(tx, frame, point)
    items = point.call_text(pool(ep, point.code), locals_, slots, cells, frame.code)
    call = f"{pool(ep, resume.TailCall)}(({items}{kept}))"
    if resume.is_resume(frame.code):
        lines.append(f"return {call}")
    else:                                            # what this call holds on to must not outlive its use
        lines.append(f"__next_call = {call}")
        lines.append(" = ".join(["__out", "__inputs", *(n for n in ep.names.values() if n.startswith("__t"))])
                     + " = None")
        lines.append(f"return {pool(ep, resume.finish)}(__next_call)")
    return cap.finish_capture(ep, lines, [reason])


# %% [markdown]
# `cut` is helped by functions of a few lines each. `hand_on` tells the resume functions behind a step which sizes and numbers are
# symbols already. `pending_instructions` takes `KW_NAMES` along, without which a call of 3.11 or 3.12 would lose the names of its
# arguments. And `stack_slots` sorts what lies on the stack: values, and what only the interpreter can put there.

# %%
def place_before_comprehension(tx, frame, name: str) -> int:
    """The place (`Unsupported.born`) in front of the comprehension that hides the function's variable `name`; 0 where another piece has
    begun it."""
    path = [(frame.decoded.instructions[ip], birth) for ip, birth in tx.path]
    while path and (path[-1][0].opname, path[-1][0].argval) != ("LOAD_FAST_AND_CLEAR", name):
        path.pop()
    while path and path[-1][0].opname in ("LOAD_FAST_AND_CLEAR", "MAKE_CELL"):
        path.pop()
    return path[-1][1] + 1 if path else 0


def step_for(*args):
    point = steps.make_step(*args)
    hook.skip_code(point.code)
    return point


def hand_on(tx, frame, step: resume.ResumePoint) -> None:
    """What varies before a break does so behind it, and need not be learned again by a second version."""
    named = {**frame.locals, **{f"__stack{n}": value for n, value in enumerate(frame.stack)}}
    varying = {name: how for name, value in named.items() if (how := variation(tx, value))}
    for point in step.exits:
        known = resume.origin_of(point.code).varying
        known.update((name, how) for name, how in varying.items() if name not in known)


def variation(tx, value):
    """What of a value of the trace is a symbol, in the way of `CaptureOptions.dynamic`; for one that came in, what has varied before."""
    if type(value) is Lazy:
        return tx.options.dynamic.get(value.source)
    if type(value) is TensorVal:
        return frozenset(d for d, n in enumerate(value.fake.shape) if is_symbolic(n))
    return FROM_ZERO if type(value) is SymVal else None


def has_graph(tx) -> bool:
    return any(n.op != "placeholder" for n in tx.graph.nodes)


def pending_instructions(frame) -> list:
    """The breaking instruction, with those before it that only prepare it: keyword names of a call."""
    instructions, first = frame.decoded.instructions, frame.ip
    while frame.kw_names and instructions[first].opname != "KW_NAMES":
        first -= 1
    return instructions[first:frame.ip + 1]


def stack_slots(ep, stack, active) -> tuple:
    """(kinds of the slots, text of those that are passed on), bottom first. active: the contexts that the graph has left at its end."""
    kinds, slots = [], []
    for value in stack:
        if value is NULL or value is LASTI:
            kinds.append(resume.NULL if value is NULL else resume.LASTI)
            continue
        if any(context.left_by(value) for context in active):
            kind, value = resume.CONTEXT, value.self
        elif type(value) is HandlingVal:
            kind, value = resume.HANDLING, value.current
        else:
            kind = resume.VALUE
        kinds.append(kind)
        slots.append(expression(ep, value))
    return tuple(kinds), slots


# %% [markdown]
# ## What nobody reads again
#
# A tensor that the rest does not read is gone behind a break, earlier than in eager, which saves memory. But a program can see that an
# object is gone, if a weak reference leads to it: the hook of a module that was called for the last time, or the handle that removes
# that hook, finds no module. So such an object comes along in the `TailCall`, and the loop that runs the pieces keeps it, by its name,
# until the function returns or the name has another value (`replaced_locals`). `kept_locals` takes only what costs nothing: objects
# that came in, and those that leave the graph anyway, because the break is a call that is given them.

# %%
NOT_WATCHED = (torch.Tensor, dict, list, tuple, type, BaseException)      # what may be large, or hold frames, and is hardly ever asked for


def kept_locals(ep, frame, needed) -> dict:
    """Locals that the rest does not read and whose object a weak reference may lead to: name -> its text."""
    found = {}
    for name, value in frame.locals.items():
        value = settled(value)
        cls = type(value.real) if type(value) is Lazy else value.cls
        if name not in needed and cls.__weakrefoffset__ and not issubclass(cls, NOT_WATCHED):
            if isinstance(value.source, LocalSource) and resume.is_resume(frame.code):
                found[name] = value.source.text()
            elif value.source is None and value in ep.names:
                found[name] = ep.names[value]
    return found


def names_kept(code) -> set:
    """Names of locals that a piece of this code has kept."""
    return set()


def stored_next(frame) -> set:
    """Locals that the step gives another value at its end, so that nobody keeps the old one."""
    following = frame.decoded.instructions[frame.ip + 1:]
    return {i.argval for i in itertools.takewhile(lambda i: i.opname in ("STORE_FAST", "UNPACK_SEQUENCE"), following)
            if i.opname == "STORE_FAST"}


def replaced_locals(found: dict, names: set, code) -> dict:
    """Those of `names` that a piece may have kept, and that have another value now, which need not be: name -> "None"."""
    known = hook.kept(names_kept, code)
    replaced = {name: "None" for name in sorted(known & names) if name not in found}
    known.update(found)
    return replaced


# %% [markdown]
# ## Nothing but a break
#
# `for layer in layers: x = layer(x)`, where every layer breaks: the resume function at the loop's body
# begins with the next break and has no graph at all. Compiling it anyway would guard on `layer`, in vain,
# and compile again for every layer. Instead the step is made longer: from the beginning of the resume
# function through the break. It needs no guards, because plain Python needs none, and where the program
# leaves the path that the trace took, there is an exit.

# %%
LONGEST_STEP = 100


def only_step(done: cap.Trace, path: list, kept: str):
    """(body, constants) of an entry without graph and guards, or None when that is not possible."""
    code, executed = done.frame.code, [done.frame.decoded.instructions[ip].offset for ip, _ in done.tx.path]
    if not resume.is_resume(code) or len(executed) > LONGEST_STEP:
        return None
    origin = resume.origin_of(code)
    whole = [*(origin.offsets[offset] for offset in executed if offset in origin.offsets), path[-1]]
    try:
        step = step_for(resume.original_code(code), whole, set(origin.locals), origin.stack)
    except Unsupported:
        return None
    slots = [LocalSource(f"__stack{n}").text() for n, kind in enumerate(origin.stack)
             if kind in resume.HAS_ARGUMENT]
    items = step.call_text("__k0", {n: LocalSource(n).text() for n in step.locals}, slots, {}, code)
    return f"return __K[1](({items}{kept}))", (held(step.code), resume.TailCall)


# %% [markdown]
# A function like `return x.nonzero()` ends where its graph breaks. It needs no step and no rest: CPython evaluates the frame, behind guards
# that say that the break is met again, and what the frame calls is compiled as behind a step.

# %%
RETURNS = (["RETURN_VALUE"], ["STORE_FAST", "LOAD_FAST", "RETURN_VALUE"], ["STORE_FAST_LOAD_FAST", "RETURN_VALUE"])


def nothing_else(tx, frame) -> bool:
    """Whether the trace of a frame that came as it is has done next to nothing for the program, and behind the break is only a return."""
    effects, behind = tx.effects, frame.decoded.instructions[frame.ip + 1:frame.ip + 4]
    done = tx.told or effects.changed or effects.calls or effects.calls_before or effects.undo or effects.ahead or effects.generators
    return not done and tx.ops <= LONGEST_STEP and any([i.opname for i in behind[:len(names)]] == names for names in RETURNS)


# %% [markdown]
# ## Saying why
#
# A break is reported with what could not be done, the user's line with a caret under the expression (CPython
# keeps the columns of every instruction), the calls that lead there, and what to do about it.
#
# `break_reason` collects these into one record. The other functions turn it into text. Columns are counted in
# bytes of UTF-8 by CPython, and in characters by the reader, so they are converted.

# %%
def break_reason(error) -> cap.BreakReason:
    return cap.BreakReason(error.reason, error.location, getattr(error, "chain", []),
                           getattr(error, "position", None), advice.for_break(error.reason))


def source_with_caret(location, position) -> list:
    """The source line of a location, and a line with carets under the expression at `position`."""
    line = linecache.getline(location.filename, location.lineno).rstrip("\n")
    text = line.lstrip()
    if not text:
        return []
    lines = [text]
    if position is not None and position.lineno == location.lineno and position.col_offset is not None:
        margin = len(line) - len(text)
        start = len(line.encode()[:position.col_offset].decode(errors="replace")) - margin
        end = len(line) if position.end_lineno != position.lineno else \
            len(line.encode()[:position.end_col_offset].decode(errors="replace"))
        lines.append(" " * start + "^" * max(end - margin - start, 1))
    return lines


def place_of_break(why) -> list:
    """Lines that show where: the location, the source with a caret, the calls."""
    lines = []
    if why.location is not None:
        lines.append(f"  {why.location}")
        lines += ["    " + line for line in source_with_caret(why.location, why.position)]
    return lines + [f"  called from {line}" for line in reversed(why.chain[:-1])]


def fullgraph_message(func, error, before: str = "") -> str:
    """before: what the program did when it was told that it is compiled."""
    why = break_reason(error)
    return "\n".join([f"fullgraph=True, but the graph of {func.__qualname__} breaks: {why.reason}.",
                      *place_of_break(why), f"Hint: {why.hint}",
                      *([f"Before, with torch.compiler.is_compiling() True: {before}."] if before else ()),
                      "Change that line, or allow graph breaks with fullgraph=False."])
