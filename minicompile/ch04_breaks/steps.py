# %% [markdown]
# # Steps
#
# A step executes the breaking instruction, and goes on as long as the instructions only put its result
# away: `n = x.item()` stores it, `print(x)` drops it, a branch on it picks a way. The end of a loop body
# belongs to that, too: jump back, `FOR_ITER`, store the loop variable. All that would otherwise be a resume
# function without any tensor operation. If that leads back to where the step began, it is a loop of its own.
#
# So a step is a *path* through the original code, copied, and an exit wherever the program may leave the
# path. The walk keeps track of what is on the stack and which locals are set, because that is the
# signature of the resume function at an exit. In
#
#     def counted(x):
#         for i in range(9):
#             x = x + i
#             print(i)
#         return x
#
# the graph breaks at `print`. The step takes the iterator, NULL, `print` and `i` from its arguments to the stack, and this is all of it:
#
#     step(x, __stack0, __stack2, __stack3)           34 NOP
#       0 RESUME                                      36 PUSH_NULL
#       2 LOAD_CLOSURE    __stack0                    38 LOAD_CONST      TailCall
#       4 DELETE_FAST     __stack0                    40 LOAD_CONST      counted__resume_at_78
#       6 PUSH_NULL                                   42 MAKE_FUNCTION
#       8 LOAD_CLOSURE    __stack2                    44 LOAD_FAST       x
#      10 DELETE_FAST     __stack2                    46 BUILD_TUPLE
#      12 LOAD_CLOSURE    __stack3                    48 BUILD_TUPLE
#      14 DELETE_FAST     __stack3                    50 CALL
#      16 CALL                                        60 RETURN_VALUE
#      26 POP_TOP                                     62 NOP
#      28 FOR_ITER        to 34                       64 STORE_FAST      __exit0
#      30 STORE_FAST      i                           66 PUSH_NULL
#      32 JUMP_FORWARD    to 62                       68 LOAD_CONST      TailCall
#                                                     70 LOAD_CONST      counted__resume_at_36
#                                                     72 MAKE_FUNCTION
#                                                     74 LOAD_FAST       x
#                                                     76 LOAD_FAST       i
#                                                     78 LOAD_FAST       __exit0
#                                                     80 BUILD_TUPLE
#                                                     82 BUILD_TUPLE
#                                                     84 CALL
#                                                     94 RETURN_VALUE
#
# Behind the call stands the end of the loop's body, without its jump back: `FOR_ITER` and the store of the next `i`. So there are two
# exits. If the iterator is exhausted, the program goes on behind the loop (34), with `x` alone. Otherwise it goes on in the body (62),
# with `x`, the next `i` and the iterator, which the exit has taken from the stack.
#
# The body resumes at 36 in every round, with another `i` and the same kind of iterator. `i` is an
# input of the graph there, so the loop needs three graphs, be it nine rounds or a thousand.

# %%
import dis
import sys
from dataclasses import dataclass, field, replace

from ..ch03_capture.hook import kept
from ..ch03_capture.tracer import PYTHON
from ..errors import Unsupported
from . import bytecode as bc
from .resume import (
    CONTEXT, HANDLING, HAS_ARGUMENT, LASTI, NULL, VALUE, Draft, ResumePoint, TailCall, arguments_at,
    assemble, make_resume, origin_of, pieces)


@dataclass(eq=False)
class Walk:
    """Where a step has come to: the position among the instructions, the stack's kinds, the locals set.
    fresh: how many slots on top the step itself has pushed. stored: the locals that it has set. pending: exits to be written, as (label,
    instructions that come first, original offset, kinds, locals, parameters there that the step has computed)."""
    draft: Draft
    at: int
    kinds: list
    bound: set
    fresh: int = 0
    stored: set = field(default_factory=set)
    pending: list = field(default_factory=list)


STORES = frozenset(("POP_TOP", "STORE_FAST", "STORE_DEREF", "LIST_APPEND", "SET_ADD", "MAP_ADD"))
LEAVES = frozenset(("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"))
NO_RESULT = STORES | LEAVES | frozenset((
    "NOP", "PRECALL", "KW_NAMES", "STORE_ATTR", "STORE_SUBSCR", "STORE_SLICE", "STORE_GLOBAL", "STORE_NAME",
    "DELETE_ATTR", "DELETE_SUBSCR", "DELETE_FAST", "DELETE_GLOBAL", "DELETE_DEREF", "DELETE_NAME",
    "LIST_EXTEND", "SET_UPDATE", "DICT_UPDATE", "DICT_MERGE", "END_FOR", "POP_EXCEPT"))
NOT_COPIED = frozenset(("LOAD_FAST_AND_CLEAR", "PUSH_EXC_INFO", "MAKE_CELL", "SEND", "YIELD_VALUE"))


# %% [markdown]
# The sets above sort the opcodes by what the walk has to know. `STORES` put a value away, so a step may go on
# through them. `LEAVES` end the function. `NO_RESULT` push nothing. What is `NOT_COPIED` would do something
# else in a copy.
#
# Two helpers write: `copy_of` copies an instruction together with the handlers that cover it, and `leave_at`
# notes that the program may leave here for a place in the original. The exit itself is written at the end.

# %%
def is_jump(i) -> bool:
    return i.target is not None


def copy_of(w: Walk, i, **changes):
    """A copy of an original instruction in the body, covered by the same handler."""
    made = replace(i, offset=-1, **changes)
    w.draft.body.append(made)
    cover(w.draft, made, i)
    return made


def cover(draft: Draft, made, i) -> None:
    """Let the handlers of the original instruction `i` cover `made`."""
    here = draft.position[id(i)]
    for h in draft.handlers:
        if draft.position[id(h.first)] <= here <= draft.position[id(h.last)]:
            draft.own.append(bc.Handler(made, made, h.target, h.depth, h.lasti))


def leave_at(w: Walk, target, kinds, first=()):
    """A label for leaving the path: the exit itself is written later."""
    label = bc.new("NOP", position=w.draft.start.position)
    results = w.stored.union(f"__stack{n}" for n in range(len(kinds) - w.fresh, len(kinds)))
    w.pending.append((label, first, target.offset, tuple(kinds), frozenset(w.bound), results))
    return first[0] if first else label


# %% [markdown]
# **Executing one instruction** is copying it, and noting what it does to the stack and to the locals, as far as the exits care.
#
# `dis` knows by how many slots an instruction changes the stack, which is enough for most: new slots are values. What is left
# are instructions that push something else than a value, NULL beside a callable, or that only rearrange (`COPY`, `SWAP`), and
# stores, which change which variables are set. The order of callable and NULL was turned around in 3.13.

# %%
CALLABLE = [VALUE, NULL] if PYTHON >= (3, 13) else [NULL, VALUE]            # a callable that is no method


def execute(w: Walk, i):
    """Copy the instruction at `w.at`, which is no jump, and follow its effect."""
    if i.name in NOT_COPIED:
        raise Unsupported(f"a graph break at the instruction {i.name}")
    if is_method_load(i):
        return load_method(w, i)
    copy_of(w, i)
    kinds, top = w.kinds, w.kinds[-1] if w.kinds else None
    if i.name == "COPY":
        kinds.append(kinds[-i.arg])
        if kinds[-1] == HANDLING:                       # an exception leaves the handler, as in `copy_slot`
            kinds[-1 - i.arg] = LASTI
    elif i.name == "SWAP":
        kinds[-i.arg], kinds[-1] = kinds[-1], kinds[-i.arg]
    else:
        change_stack(kinds, stack_effect(i), results(i))
    if i.name == "PUSH_NULL":
        kinds[-1] = NULL
    elif i.name == "LOAD_GLOBAL" and i.arg & 1:
        kinds[-2:] = CALLABLE
    elif i.name in ("STORE_FAST", "DELETE_FAST"):
        variable = w.draft.names[i.arg]
        # At the end of a comprehension 3.12 puts back what it has hidden: NULL if the variable was unbound
        (w.bound.add if i.name == "STORE_FAST" and top != NULL else w.bound.discard)(variable)
        w.stored.add(variable)


def change_stack(kinds: list, effect: int, pushed: int) -> None:
    """effect: by how many slots the stack grows; pushed: how many on top are new."""
    if effect < 0:
        del kinds[effect:]
    else:
        kinds += [VALUE] * effect
    if pushed:
        kinds[-pushed:] = [VALUE] * pushed


# %% [markdown]
# For the call `x.add(1)` CPython has a form of its own, which saves making a bound method: it pushes the function and its `self`. If what
# it finds is no method, it pushes that and a NULL. Which of the two is only known when it runs, and so what an exit between load and call
# would have to hand on. In the copy the attribute is loaded as by `f = x.add`, which gives one value always, and the NULL beside it is
# written down.

# %%
def load_method(w: Walk, i):
    changed = {"op": bc.OPCODES["LOAD_ATTR"], "caches": bc.cache_count("LOAD_ATTR")} if i.name == "LOAD_METHOD" else {"arg": i.arg & ~1}
    made = copy_of(w, i, **changed)
    change_stack(w.kinds, dis.stack_effect(made.op, made.arg), 1)
    w.draft.body.append(bc.new("PUSH_NULL", position=i.position))
    if PYTHON < (3, 13):
        w.draft.body.append(bc.new("SWAP", 2, position=i.position))
    w.kinds[-1:] = CALLABLE


def is_method_load(i) -> bool:
    return i.name == "LOAD_METHOD" or bool(i.arg & 1) and (
        i.name == "LOAD_SUPER_ATTR" or i.name == "LOAD_ATTR" and PYTHON >= (3, 12))


def stack_effect(i, jump=False) -> int:
    if PYTHON < (3, 12) and i.name in ("CALL", "PRECALL"):     # there `dis` shares the effect between the two
        return -(i.arg + 1) if i.name == "CALL" else 0
    return dis.stack_effect(i.op, i.arg if i.op >= dis.HAVE_ARGUMENT else None, jump=jump)


def results(i) -> int:
    """How many slots on top an instruction has filled."""
    if i.name in NO_RESULT or is_jump(i) and i.name != "FOR_ITER":
        return 0
    if i.name == "UNPACK_SEQUENCE":
        return i.arg
    if i.name == "UNPACK_EX":
        return (i.arg & 0xFF) + (i.arg >> 8) + 1
    return 2 if i.name in ("BEFORE_WITH", "CHECK_EXC_MATCH", "CHECK_EG_MATCH") else 1


# %% [markdown]
# **A conditional jump** leaves the path on one side or on both. `sides` says what lies on the stack if it is not taken (`after`) and if
# it is (`jumped`). Most take the condition from the stack in both cases. `FOR_ITER` pushes the next item, or, when the iterator is
# exhausted, drops it and jumps. CPython 3.12 and later jump *past* the `END_FOR` that they name, and 3.13 past another instruction, so
# copies of these (`ends`) must stand at the exit.

# %%
def sides(w: Walk, i) -> tuple[list, list, list, object]:
    """(after, jumped, ends, the instruction at which the program goes on when it jumps)."""
    after, jumped, instructions = list(w.kinds), list(w.kinds), w.draft.instructions
    if i.name == "FOR_ITER":
        del jumped[-1]
        after.append(VALUE)
        skipped = PYTHON[1] - 11 if PYTHON < (3, 13) else 2
        first = instructions.index(i.target)
        return after, jumped, [replace(x, offset=-1) for x in instructions[first:first + skipped]], instructions[first + skipped]
    del after[-1]
    if not i.name.endswith("_OR_POP"):
        del jumped[-1]
    return after, jumped, [], i.target


# %% [markdown]
# `branch` copies a jump. `follow` says on which side the path goes on, and the other side becomes an exit; None makes an exit of both. All
# jumps in a step go forward, since exits stand behind the path. An unconditional jump is followed and leaves no instruction.

# %%
def branch(w: Walk, i, follow: bool | None):
    """Copy a jump. follow: stay on the path by jumping (True), by falling through (False), or leave on both
    sides."""
    if i.name == "SEND":
        raise Unsupported("a graph break at a yield")
    if i.name.startswith("JUMP_") and "_IF_" not in i.name:
        w.at = w.draft.instructions.index(i.target)
        return
    after, jumped, ends, target = sides(w, i)
    op = bc.OPCODES[i.name.replace("BACKWARD", "FORWARD")]
    if follow is True:
        label = bc.new("NOP", position=i.position)
        copy_of(w, i, op=op, target=label)
        w.draft.body += [bc.new("JUMP_FORWARD", target=leave_at(w, w.draft.instructions[w.at + 1], after)), label]
        w.kinds, w.at = jumped, w.draft.instructions.index(target)
        return
    copy_of(w, i, op=op, target=leave_at(w, target, jumped, ends))
    w.kinds, w.at = after, w.at + 1
    if follow is None:
        leave_here(w)


def leave_here(w: Walk):
    label = leave_at(w, w.draft.instructions[w.at], w.kinds)
    w.draft.body.append(bc.new("JUMP_FORWARD", target=label))
    w.at = -1


# %% [markdown]
# ## The walk
#
# `path` are the offsets that the trace has executed and that the step shall execute, too. `make_step` follows them, one by one, lets
# `put_away` go on from there, and writes the exits. `assemble` of the resume functions makes the code object. If a handler
# covers anything, the whole original is copied behind the path, so that the handler is there.

# %%
def make_step(code, path: list, bound: set, stack: tuple) -> ResumePoint:
    """The function that executes the instructions at the byte offsets `path` of `code` (an original), puts
    their result away and returns a TailCall, or the function's result. bound, stack: as for `make_resume`,
    at path[0]."""
    parameters = arguments_at(code, path[0], bound)
    known, key = kept(pieces, code), (tuple(path), parameters, tuple(stack))
    if key in known:
        return known[key]
    draft = Draft(code, path[0], parameters, tuple(stack))
    w = Walk(draft, draft.instructions.index(draft.start), list(stack), set(parameters))
    for n, offset in enumerate(path):
        i = draft.instructions[w.at]
        if i.offset != offset:
            raise Unsupported("a path that an exception has bent")
        if not is_jump(i):
            execute(w, i)
            w.at = -1 if i.name in LEAVES else w.at + 1
        elif n + 1 < len(path):
            branch(w, i, path[n + 1] == i.target.offset)
        else:
            branch(w, i, False if i.name == "FOR_ITER" else None)
    w.fresh = results(i)
    put_away(w)
    exits = write_exits(w)
    covered = bool(draft.own)
    made, _ = assemble(draft, code.co_name, with_original=covered, firm=True)
    known[key] = ResumePoint(code.co_name, made, parameters, tuple(stack), draft.cells, exits)
    return known[key]


# %% [markdown]
# `put_away` goes on by itself, as long as each instruction only consumes what the step has pushed (`fresh` counts that). At each
# instruction it asks, in this order:
#
# 1. Is this where the step began, with the same stack and locals? Then the step is a loop, and jumps to its own beginning.
# 2. Has the step been here? Then it leaves, or it would not end.
# 3. Is it a jump of a loop: back, or `FOR_ITER`? It goes on with the next item.
# 4. Is it a branch on what the step has pushed? It leaves on both sides.
# 5. Does it store such a value, take it apart, or return? It is executed.
# 6. Anything else may compute: it leaves, and the next graph begins here.
#
# In `counted`, what follows the `CALL` of `print` is
#
#     CALL           the path
#     POP_TOP        5
#     JUMP_BACKWARD  3
#     FOR_ITER       3
#     STORE_FAST     5
#     LOAD_FAST      6

# %%
def put_away(w: Walk):
    """Follow the instructions that only consume what the step has produced."""
    instructions, seen = w.draft.instructions, set()
    while w.at >= 0:
        i = instructions[w.at]
        following = instructions[w.at + 1].name if w.at + 1 < len(instructions) else ""
        returns = i.name == "RETURN_CONST" or i.name == "RETURN_VALUE" and w.fresh or \
            i.name in ("LOAD_CONST", "LOAD_FAST") and following == "RETURN_VALUE"
        if i is w.draft.start and w.kinds == list(w.draft.stack) and \
                arguments_at(w.draft.code, i.offset, w.bound) == w.draft.parameters:
            w.draft.body.append(bc.new("JUMP_BACKWARD", target=w.draft.body[0], position=i.position))
            w.at = -1
        elif w.at in seen:
            leave_here(w)
        elif is_jump(i) and (i.name == "FOR_ITER" or "_IF_" not in i.name):
            seen.add(w.at)
            branch(w, i, False)
            w.fresh = results(i)
        elif is_jump(i) and w.fresh:
            branch(w, i, None)
        elif not is_jump(i) and (returns or i.name in ("NOP", "POP_EXCEPT") or w.fresh and (
                i.name in STORES or i.name in ("UNPACK_SEQUENCE", "GET_ITER", "TO_BOOL"))):
            seen.add(w.at)
            before = len(w.kinds)
            execute(w, i)
            w.fresh += len(w.kinds) - before
            w.at = -1 if i.name in LEAVES else w.at + 1
        else:
            leave_here(w)


# %% [markdown]
# ## Exits
#
# An exit empties the stack into variables, from the top: a context is left, a handler's exception is no
# longer the current one. What the resume function takes of it is read again right afterwards; a NULL is stored, too, and then no variable.

# %%
CLOSURE = 8                                              # flag: below the code lies a tuple of cells


@dataclass(eq=False)
class Exit:
    """One exit in the making."""
    draft: Draft
    position: object
    emit: list

    def new(self, name, arg=0):
        self.emit.append(bc.new(name, arg, position=self.position))

    def load_function(self, function):
        for name in ("PUSH_NULL", "LOAD_CONST") if PYTHON < (3, 13) else ("LOAD_CONST", "PUSH_NULL"):
            self.new(name, self.draft.constant(function) if name == "LOAD_CONST" else 0)

    def empty_stack(self, kinds):
        for n in range(len(kinds) - 1, -1, -1):
            if kinds[n] == CONTEXT:
                for _ in range(3):
                    self.new("LOAD_CONST", self.draft.constant(None))
                self.new("CALL", 2)
                self.new("POP_TOP")
                continue
            if kinds[n] == HANDLING:                     # another exception by now, after `except*`
                self.load_function(sys.exception)
                self.new("CALL", 0)
            self.draft.exits = max(self.draft.exits, n + 1)
            self.new("STORE_FAST", f"__exit{n}")
            if kinds[n] == HANDLING:
                self.new("POP_EXCEPT")


# %% [markdown]
# Then it returns a `TailCall`, of a function and its arguments. `MAKE_FUNCTION` gives the resume function the globals of the frame, as a
# nested `def` would have them. A context may stand in another slot than at the beginning (a `return` puts its value below), but contexts
# are left from the innermost outwards, so those that remain are the first ones of the beginning, in their order.
#
# Exits stand behind the path, outside of every handler.

# %%
def return_to(out: Exit, point: ResumePoint, kinds) -> None:
    """Return a TailCall of the resume function at `point`. kinds: of the stack that was emptied."""
    draft, new = out.draft, out.new
    out.load_function(TailCall)
    for cell in point.cells:
        new("LOAD_FAST", cell)
    if point.cells:
        new("BUILD_TUPLE", len(point.cells))
    new("LOAD_CONST", draft.constant(point.code))
    new("MAKE_FUNCTION", CLOSURE if point.cells and PYTHON < (3, 13) else 0)
    if point.cells and PYTHON >= (3, 13):
        new("SET_FUNCTION_ATTRIBUTE", CLOSURE)
    managers = (f"__stack{n}" for n, kind in enumerate(draft.stack) if kind == CONTEXT)
    slots = [next(managers) if kind == CONTEXT else f"__exit{n}"
             for n, kind in enumerate(kinds) if kind in HAS_ARGUMENT]
    for variable in (*point.locals, *slots):
        if variable in point.cells:
            new("LOAD_CONST", draft.constant(None))
        else:
            new("LOAD_FAST", variable)
    new("BUILD_TUPLE", len(point.locals) + len(slots))
    new("BUILD_TUPLE", 2)
    new("CALL", 1)
    new("RETURN_VALUE")


def write_exits(w: Walk) -> list[ResumePoint]:
    """Write them, and return the resume functions to which they lead."""
    points = []
    for label, first, offset, kinds, bound, results in w.pending:
        points.append(point := make_resume(w.draft.code, offset, bound, kinds, results))
        out = Exit(w.draft, label.position, [*first, label])
        out.empty_stack(kinds)
        return_to(out, point, kinds)
        w.draft.body += out.emit
    return points


# %% [markdown]
# ## An exception of the graph
#
# The graph of a resume function may raise: an index is out of range, or a checkpoint stops its second forward pass. The frame hook
# evaluates the frame instead where that is possible, but not if the graph has written to an input already, or if somebody outside has
# noticed. A `finally` or an `except` of the part before the break is waiting for this exception nevertheless. So there is a third kind
# of piece: the state of the resume function, the exception on top of the stack, an instruction that raises it, and behind that the
# original with its handlers.
#
# What interrupts the program, such as `KeyboardInterrupt`, comes while guards or a graph run, or while the compiler is at work. In eager it
# would have come to the line of the break. The last line of a block has its handlers, and what follows has not: there the block is being
# left, and the `__exit__` of a `with` is called. So then (`interrupted`) the handlers of the instruction before count if they are further
# inside, and what they need is still on the stack. For what the graph raises they count if they are of a `with`: the graph may have left
# it, in eager, but its `__exit__` has not been called. An `except` of a block that is over must not have it.

# %%
def raising(code) -> dict:
    """These pieces, of the resume functions that were cut from `code`; None where no handler waits. Start with none."""
    return {}


def make_raise(code, interrupted: bool) -> ResumePoint | None:
    """The function that takes the arguments of the resume function `code`, then an exception, which it raises where that begins."""
    origin = origin_of(code)
    if origin is None or origin.code() is None:
        return None
    known, key = kept(raising, origin.code()), (origin.start, origin.locals, origin.stack, interrupted)
    if key not in known:
        draft = Draft(origin.code(), origin.start, origin.locals, (*origin.stack, VALUE))
        draft.body = [bc.new("RAISE_VARARGS", 1, position=draft.start.position)]
        inside = innermost(draft, len(origin.stack))
        cover(draft, draft.body[0], inside if interrupted or is_in_with(draft, inside) else draft.start)
        made = assemble(draft, draft.code.co_name, with_original=True)[0] if draft.own else None
        known[key] = made and ResumePoint(made.co_name, made, origin.locals, draft.stack, draft.cells)
    return known[key]


def innermost(draft: Draft, depth: int):
    """Of the first instruction and those that lead to it, the one whose handlers are innermost and need no more of the stack.
    depth: how much that is."""
    here = draft.position[id(draft.start)]
    leading = [i for at, i in enumerate(draft.instructions) if i.target is draft.start or
               at == here - 1 and i.name not in LEAVES and not i.name.startswith("JUMP_")]
    return max([draft.start, *leading], key=lambda i: len(handlers_outwards(draft, i, depth)))


def is_in_with(draft: Draft, i) -> bool:
    """Whether the innermost handler of an instruction is that of a `with`."""
    handlers = handlers_outwards(draft, i, len(draft.stack))
    return bool(handlers) and draft.instructions[draft.position[id(handlers[0].target)] + 1].name == "WITH_EXCEPT_START"


def handlers_outwards(draft: Draft, i, depth: int) -> list:
    """The handler of an instruction, that of its first instruction, and so on; none if the first needs more of the stack."""
    found = []
    while True:
        at = draft.position[id(i)]
        h = next((h for h in draft.handlers if draft.position[id(h.first)] <= at <= draft.position[id(h.last)]), None)
        if h is None or h in found or not found and h.depth > depth:
            break
        found.append(h)
        i = h.target
    return found
