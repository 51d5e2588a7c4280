# %% [markdown]
# # Resume functions and steps
#
# A graph break cuts a function in three: a compiled part, one instruction that Python must execute itself,
# and the rest. The rest should be compiled too, but it begins in the middle: with local variables already
# set, perhaps with half an expression on the interpreter's stack (`f(x) + g(print(y))` breaks with `f(x)`
# waiting), perhaps inside a loop, a `with` block or an exception handler.
#
# So the rest becomes a function of its own. Its code is the *original* code with a new beginning:
#
#     def resume_in_f_at_42(x, n, stack0, stack1):     # the live locals, then the values on the stack
#         push stack0; push stack1
#         jump to instruction 42 of f
#
# To everything else it is an ordinary function. The frame hook sees its frame like any other, capture
# traces it, guards protect it, and if it breaks again, there is another resume function. Resume functions
# are cut from the original code even when the break happens in a resume function, and two breaks that go on
# at the same instruction with the same variables share one.
#
# The instruction in the middle runs the same way, in a *step*: the same beginning, then a copy of the
# instruction, then an exit that hands the state on to a resume function. Why not write the instruction as
# Python text, `__r = print(y)`? Because of where it may stand. Inside `try`, its exception belongs to the
# user's handler; inside `with`, to some `__exit__` that is only a value on the stack. In a step the copied
# instruction is covered by the original exception table and the handlers follow behind it, so an exception
# finds what it would have found. That frame then goes on as plain Python: right, only slower.
#
# Here are both, from CPython 3.12, for a break at the `print` in `y = x.relu(); print(y.shape); return y + 1`.
# The stack holds NULL, `print` and the shape; the only live local is `y`.
#
#     def step(y, stack1, stack2):             def f__resume_at_66(y):
#         RESUME                                   RESUME
#         PUSH_NULL                                JUMP_FORWARD  (to the arrow)
#         LOAD_FAST_AND_CLEAR  stack1              LOAD_FAST     x
#         LOAD_FAST_AND_CLEAR  stack2              ...           (all of f)
#         CALL                 1                   CALL          1
#         POP_TOP                                  POP_TOP
#         ...  return TailCall(               ->   LOAD_FAST     y
#                (f__resume_at_66, (), (y,)))      LOAD_CONST    1
#                                                  BINARY_OP     +
#                                                  RETURN_VALUE
#
# torch.compile has resume functions too. It generates the instruction and the part before it as bytecode,
# reconstructs the `with` blocks that it knows, and gives up on the frame when a break happens in a loop or
# a `try`. Bytecode is written in this chapter only; the part before the break is Python text (chapter 3).

# %%
from __future__ import annotations

import dis
import sys
import types
from copy import copy
from dataclasses import dataclass, field

from ..errors import Unsupported
from . import bytecode as bc

VALUE, NULL, CONTEXT, HANDLING, LASTI = "value", "null", "context", "handling", "lasti"
HAS_ARGUMENT = (VALUE, CONTEXT, HANDLING)
REFUSED_FLAGS = 0x20 | 0x80 | 0x200                  # generators, coroutines, asynchronous generators
PYTHON = sys.version_info[:2]


# %% [markdown]
# ## What is on the stack
#
# A handful of things can wait on the stack of an ordinary function at a break:
#
# - `VALUE`: any object, passed as an argument and pushed. Loop iterators are values, and so is the
#   `__exit__` of a context manager that Python itself has entered.
# - `NULL`: an empty slot. CPython reserves one below a callable that is not a bound method.
# - `CONTEXT`: the `__exit__` method of a `with` block that the graph implements, such as `torch.no_grad`.
#   A graph cannot be left open, so it leaves the context at its end, and a resume function gets the context
#   manager itself and enters it again, with the same instruction that the user's `with` used. A step also
#   leaves it at its exit.
# - `HANDLING`: a handler is running. The slot holds the exception that was current before; the argument is
#   the one that is current now. `PUSH_EXC_INFO` makes it so again, which a bare `raise` and
#   `sys.exc_info()` need, and the exit of a step undoes it with `POP_EXCEPT`.
# - `LASTI`: the position at which an exception was raised, only for tracebacks. Any number will do.

# %%
@dataclass(eq=False)
class ResumePoint:
    """A resume function or a step. `code` takes `locals`, then an argument for each VALUE, CONTEXT and
    HANDLING in `stack`, then has `cells` as free variables. `target` is what is called: the function, or
    function_of(closure) if there are cells."""
    name: str
    code: types.CodeType
    locals: tuple[str, ...]
    stack: tuple[str, ...]
    cells: tuple[str, ...]
    globals: dict = field(repr=False)
    target: object = None

    def __post_init__(self):
        if self.cells:
            self.target = lambda *closure: types.FunctionType(self.code, self.globals, self.name, None,
                                                              closure)
        else:
            self.target = types.FunctionType(self.code, self.globals, self.name)

    def call_text(self, variable: str, locals: dict, stack: list, cells: dict, current_code=None) -> str:
        """The items of a TailCall that continues there, as Python text. variable: the name of `target`.

        locals: text of each live local. stack: text of each slot with an argument, bottom first. cells:
        text of a *cell object* for each own cell that exists (3.12 creates those of comprehensions late);
        free variables of `current_code` (the frame being left) are found in its closure. """
        free = {} if current_code is None else {name: f"__F.__closure__[{i}]"
                                                for i, name in enumerate(current_code.co_freevars)}
        closure = "".join({**free, **cells}.get(name, "__new_cell()") + ", " for name in self.cells)
        arguments = "".join(text + ", " for text in [*(locals[name] for name in self.locals), *stack])
        return f"{variable}, ({closure}), ({arguments})"


# %% [markdown]
# ## The trampoline
#
# Who calls the next piece? If each piece called the next, a loop of a thousand rounds that breaks in every
# round would be a thousand frames deep. So a piece *returns* what to call, a `TailCall`, and the one entry
# that the user's program called, that of the whole function, keeps calling until a real result arrives.

# %%
class TailCall(tuple):
    """(target, cells, arguments) of the next piece of a function; never seen by the user's program."""
    __slots__ = ()


def finish(call):
    """Run the pieces of a function that are left, one after the other."""
    while type(call) is TailCall:
        target, cells, arguments = call
        call = target(*cells)(*arguments) if cells else target(*arguments)
    return call


# %% [markdown]
# ## Making one
#
# Cells need care. In the original function a captured variable is created by `MAKE_CELL`; the closures made
# before the break already share that cell. The rest must use the same one, so in the resume function every
# cell of the original is a *free* variable, and the function is built per call around the existing cells.

# %%
@dataclass
class Origin:
    """Where a resume function's code comes from."""
    code: types.CodeType
    # Offset in the resume function's code -> offset in the original
    offsets: dict[int, int]


ORIGINS: dict[int, tuple] = {}                       # id(resume code) -> (resume code, Origin)
POINTS: dict[int, ResumePoint] = {}                  # id(resume code) -> its point
CACHE: dict[tuple, ResumePoint] = {}


def is_resume(code) -> bool:
    return id(code) in ORIGINS


def original_code(code):
    """The code that a resume function was cut from; other code is its own."""
    return ORIGINS[id(code)][1].code if id(code) in ORIGINS else code


def original_position(code, offset: int):
    """(original code, offset in it) for a position that may be inside a resume function."""
    if id(code) not in ORIGINS:
        return code, offset
    origin = ORIGINS[id(code)][1]
    if offset not in origin.offsets:
        raise Unsupported("graph break while the state of a resumed function is being restored")
    return origin.code, origin.offsets[offset]


def needed_locals(code, offset: int) -> set:
    """Names that the code from `offset` on may read. `super()` looks for self in the frame's first
    argument."""
    live = set(bc.live_locals(code, offset))
    if "__class__" in code.co_freevars and code.co_argcount:
        if code.co_varnames[0] in (*code.co_cellvars, *code.co_freevars):
            raise Unsupported("graph break in a method with super() whose self is captured by a closure")
        live.add(code.co_varnames[0])
    return live


def make_resume(code, offset: int, bound: set | None, stack: tuple, func_globals: dict) -> ResumePoint:
    """The function that continues `code` before the instruction at byte `offset`.

    bound: names of the locals that are set there (default: all that the rest may read). stack: kinds of the
    stack slots, bottom first. Raises Unsupported for generators and for unknown slots. """
    code, offset = original_position(code, offset)
    parameters = parameters_at(code, offset, bound)
    key = (id(code), offset, parameters, tuple(stack), id(func_globals))
    if key not in CACHE:
        draft = Draft(code, offset, parameters, tuple(stack))
        draft.body = [bc.new("JUMP_FORWARD", target=draft.start, position=draft.start.position)]
        name = f"{code.co_name}__resume_at_{offset}"
        resumed, instructions = assemble(draft, name, with_original=True)
        ORIGINS[id(resumed)] = resumed, Origin(code, new_offsets(resumed, instructions))
        CACHE[key] = ResumePoint(name, resumed, parameters, tuple(stack), draft.cells, func_globals)
        POINTS[id(resumed)] = CACHE[key]
    return CACHE[key]


def parameters_at(code, offset, bound) -> tuple:
    if code.co_flags & REFUSED_FLAGS:
        raise Unsupported("graph break inside a generator or coroutine")
    live, cells = needed_locals(code, offset), (*code.co_cellvars, *code.co_freevars)
    return tuple(name for name in code.co_varnames
                 if name in live and name not in cells and (bound is None or name in bound))


# %% [markdown]
# A `Draft` is a code object in the making. Its variables are the parameters, then one for each slot of the
# stack, then the other locals of the original, then the cells.

# %%
@dataclass(eq=False)
class Draft:
    """body: instructions that follow the restored state. own: handlers that cover them. exits: number of
    variables that the exits of a step need."""
    code: types.CodeType
    offset: int
    parameters: tuple
    stack: tuple
    body: list = field(default_factory=list)
    own: list = field(default_factory=list)
    constants: list = field(default_factory=list)
    exits: int = 0

    def __post_init__(self):
        code = self.code
        self.instructions, self.handlers = bc.decode(code)
        self.instructions = bc.split_pairs(self.instructions, self.handlers)
        self.start = next((i for i in self.instructions if i.offset == self.offset), None)
        if self.start is None:
            raise Unsupported(f"no instruction at offset {self.offset} of {code.co_name}")
        self.position = {id(i): n for n, i in enumerate(self.instructions)}
        self.cells = (*code.co_cellvars, *code.co_freevars)
        self.stack_names = tuple(f"__stack{n}" for n, kind in enumerate(self.stack) if kind in HAS_ARGUMENT)
        self.names = bc.localsplus_names(code)       # what the arguments of `instructions` refer to

    def constant(self, value) -> int:
        """Index of a constant in the new code."""
        for index, known in enumerate(self.constants):
            if known is value:
                break
        else:
            index = len(self.constants)
            self.constants.append(value)
        return len(self.code.co_consts) + index


def assemble(draft: Draft, name: str, with_original: bool, firm: bool = False):
    """(code, its instructions): prologue, body and, if wanted, all of the original."""
    code, position = draft.code, draft.start.position
    others = tuple(n for n in code.co_varnames if n not in draft.parameters and n not in draft.cells)
    exits = tuple(f"__exit{n}" for n in range(draft.exits))
    varnames = (*draft.parameters, *draft.stack_names, *others, *exits)
    slot = {variable: index for index, variable in enumerate((*varnames, *draft.cells))}
    original, handlers = [], list(draft.own)
    if with_original:                                # cells and free variables are set up differently below
        begin = next(n for n, i in enumerate(draft.instructions) if i.name == "RESUME") + 1
        original = draft.instructions[begin:]
        handlers += draft.handlers
    for i in (*draft.body, *original):
        if type(i.arg) is str:                       # new instructions name their variable
            i.arg = slot[i.arg]
        elif i.op in bc.LOCAL_OPS and i.op not in bc.NO_INDEX:
            i.arg = slot[draft.names[i.arg]]
    prologue = restore_stack(draft, slot, firm)
    if draft.cells:
        prologue.insert(0, bc.new("COPY_FREE_VARS", len(draft.cells), position=position))
    instructions = prologue + draft.body + original
    co_code, exception_table, line_table = bc.encode(instructions, handlers, code.co_firstlineno)
    made = code.replace(
        co_code=co_code, co_exceptiontable=exception_table, co_linetable=line_table, co_name=name,
        co_qualname=code.co_qualname.removesuffix(code.co_name) + name, co_nlocals=len(varnames),
        co_argcount=len(draft.parameters) + len(draft.stack_names), co_posonlyargcount=0, co_kwonlyargcount=0,
        co_varnames=varnames, co_cellvars=(), co_freevars=draft.cells, co_flags=code.co_flags & ~0x0C,
        co_consts=(*code.co_consts, *draft.constants),
        co_stacksize=max(code.co_stacksize, len(draft.stack)) + len(varnames) + len(draft.cells) + 4)
    return made, instructions


# %% [markdown]
# The prologue pushes every slot. An argument is cleared when it was pushed, so that it lives no longer than
# it would have lived on the stack. The two ways to do that are also chosen for what capture makes of them:
# both leave alone what they push, so a value that only waits on the stack is not guarded. A loop that
# breaks in each round has its iterator there. Were its position guarded, each round would be compiled
# again.

# %%
PUSH = ("LOAD_CLOSURE", "DELETE_FAST") if PYTHON < (3, 12) else ("LOAD_FAST_AND_CLEAR",)


def restore_stack(draft, slot, firm) -> list:
    """RESUME, then push every slot. firm: what an exit has to pass on stays in its variable, too."""
    position = draft.start.position
    result = [bc.new("RESUME", 0, position=position)]
    for n, kind in enumerate(draft.stack):
        if kind in HAS_ARGUMENT:
            names = ("LOAD_FAST",) if firm and kind != VALUE else PUSH
            names += {CONTEXT: ("BEFORE_WITH",), HANDLING: ("PUSH_EXC_INFO",)}.get(kind, ())
            names += ("POP_TOP",) if kind != VALUE else ()
            result += [bc.new(name, slot[f"__stack{n}"] if name in (*PUSH, "LOAD_FAST") else 0,
                              position=position) for name in names]
        elif kind == NULL:
            result.append(bc.new("PUSH_NULL", position=position))
        elif kind == LASTI:
            result.append(bc.new("LOAD_CONST", draft.constant(0), position=position))
        else:
            raise Unsupported(f"graph break with {kind} on the stack")
    return result


def new_offsets(resumed, instructions) -> dict[int, int]:
    """Offset in the encoded code -> offset in the original, for every instruction that came from there."""
    decoded, _ = bc.decode(resumed)
    return {new.offset: old.offset for new, old in zip(decoded, instructions, strict=True) if old.offset >= 0}


# %% [markdown]
# ## Steps
#
# A step executes the breaking instruction, and goes on as long as the instructions only put its result
# away: `n = x.item()` stores it, `print(x)` drops it, a branch on it picks a way. The end of a loop body
# belongs to that, too: jump back, `FOR_ITER`, store the loop variable. All that would otherwise be a resume
# function without any tensor operation. If that leads back to where the step began, it is a loop of its own.
#
# So a step is a *path* through the original code, copied, and an exit wherever the program may leave the
# path. The walk keeps track of what is on the stack and which locals are set, because that is the
# signature of the resume function at an exit. This is the whole step for `print(i)` at the end of the body of
# `for i in range(9): x = x + i; print(i)`, with the iterator in `stack0` and its two exits:
#
#     LOAD_FAST_AND_CLEAR  stack0          FOR_ITER    (when exhausted, to END_FOR)
#     PUSH_NULL                            STORE_FAST  i
#     LOAD_FAST_AND_CLEAR  stack2          ... return TailCall((resume_in_g_at_30, (), (x, i, iterator)))
#     LOAD_FAST_AND_CLEAR  stack3          END_FOR
#     CALL                 1               ... return TailCall((resume_in_g_at_66, (), (x,)))
#     POP_TOP
#
# The body resumes at 30 in every round, with another `i` and the same kind of iterator. `i` soon becomes an
# input of the graph, so the loop needs three graphs, be it nine rounds or a thousand.

# %%
@dataclass(eq=False)
class Walk:
    """Where a step has come to: the position among the instructions, the stack's kinds, the locals set.
    fresh: how many slots on top the step itself has pushed. pending: exits to be written, as (label,
    instructions that come first, original offset, kinds, locals)."""
    draft: Draft
    at: int
    kinds: list
    bound: set
    fresh: int = 0
    pending: list = field(default_factory=list)


STORES = frozenset(("POP_TOP", "STORE_FAST", "STORE_DEREF", "LIST_APPEND", "SET_ADD", "MAP_ADD"))
LEAVES = frozenset(("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"))
NO_RESULT = STORES | LEAVES | frozenset((
    "NOP", "PRECALL", "KW_NAMES", "STORE_ATTR", "STORE_SUBSCR", "STORE_SLICE", "STORE_GLOBAL", "STORE_NAME",
    "DELETE_ATTR", "DELETE_SUBSCR", "DELETE_FAST", "DELETE_GLOBAL", "DELETE_DEREF", "DELETE_NAME",
    "LIST_EXTEND", "SET_UPDATE", "DICT_UPDATE", "DICT_MERGE", "END_FOR", "POP_EXCEPT"))
NOT_COPIED = frozenset(("LOAD_FAST_AND_CLEAR", "PUSH_EXC_INFO", "MAKE_CELL", "SEND", "YIELD_VALUE"))


def is_jump(i) -> bool:
    return i.target is not None


def copy_of(w: Walk, i, **changes):
    """A copy of an original instruction in the body, covered by the same handler."""
    made = copy(i)
    made.offset = -1
    for name, value in changes.items():
        setattr(made, name, value)
    w.draft.body.append(made)
    position, here = w.draft.position, w.draft.position[id(i)]
    for h in w.draft.handlers:
        if position[id(h.first)] <= here <= position[id(h.last)]:
            w.draft.own.append(bc.Handler(made, made, h.target, h.depth, h.lasti))
    return made


def leave_at(w: Walk, target, kinds, first=()):
    """A label for leaving the path: the exit itself is written later."""
    label = bc.new("NOP", position=w.draft.start.position)
    w.pending.append((label, first, target.offset, tuple(kinds), frozenset(w.bound)))
    return first[0] if first else label


# %% [markdown]
# Executing one instruction: what it does to the stack, as far as the exits care. A method load is special:
# CPython pushes either a function and its `self` or a bound method and a NULL, and which one is only known
# when it runs. Loading the bound method always does the same in one way.

# %%
def execute(w: Walk, i):
    """Copy the instruction at `w.at`, which is no jump, and follow its effect."""
    name, kinds = i.name, w.kinds
    if name in NOT_COPIED:
        raise Unsupported(f"a graph break at the instruction {name}")
    if method_form := is_method_load(i):
        changed = {"op": bc.OPS["LOAD_ATTR"]} if name == "LOAD_METHOD" else {"arg": i.arg & ~1}
        if name == "LOAD_METHOD":
            changed["caches"] = bc.cache_count("LOAD_ATTR")
        i_copy = copy_of(w, i, **changed)
        effect = dis.stack_effect(i_copy.op, i_copy.arg)
    else:
        i_copy = copy_of(w, i)
        effect = stack_effect(i)
    if name in ("COPY", "SWAP"):
        if name == "COPY":
            kinds.append(kinds[-i.arg])
        else:
            kinds[-i.arg], kinds[-1] = kinds[-1], kinds[-i.arg]
        return
    top = kinds[-1] if kinds else None
    if effect < 0:
        del kinds[effect:]
    else:
        kinds += [VALUE] * effect
    pushed = results(i)
    if pushed:
        kinds[-pushed:] = [VALUE] * pushed
    if name == "PUSH_NULL":
        kinds[-1] = NULL
    elif name == "LOAD_GLOBAL" and i.arg & 1:
        kinds[-2:] = [VALUE, NULL] if PYTHON >= (3, 13) else [NULL, VALUE]
    elif method_form:
        w.draft.body.append(bc.new("PUSH_NULL", position=i.position))
        kinds.append(NULL)
        if PYTHON < (3, 13):
            w.draft.body.append(bc.new("SWAP", 2, position=i.position))
            kinds[-2:] = [NULL, VALUE]
    if name in ("STORE_FAST", "DELETE_FAST"):
        variable = w.draft.names[i.arg]
        # At the end of a comprehension 3.12 puts back what it has hidden: NULL if the variable was unbound
        (w.bound.add if name == "STORE_FAST" and top != NULL else w.bound.discard)(variable)


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
# Jumps. A conditional jump leaves the path on one side or on both. When a loop's iterator is exhausted,
# CPython 3.12 and later jump *past* the `END_FOR` that they name, and 3.13 past another instruction, so
# copies of these must stand at the exit.

# %%
def branch(w: Walk, i, follow: bool | None):
    """Copy a jump. follow: stay on the path by jumping (True), by falling through (False), or leave on both
    sides."""
    if i.name == "SEND":
        raise Unsupported("a graph break at a yield")
    if i.name.startswith("JUMP_") and "_IF_" not in i.name:
        w.at = w.draft.instructions.index(i.target)
        return
    after, jumped = list(w.kinds), list(w.kinds)
    if i.name == "FOR_ITER":
        del jumped[-1]
        after.append(VALUE)
        skipped = PYTHON[1] - 11 if PYTHON < (3, 13) else 2
        first = w.draft.instructions.index(i.target)
        ends = [copy(x) for x in w.draft.instructions[first:first + skipped]]
        for x in ends:
            x.offset = -1
        target = w.draft.instructions[first + skipped]
    else:
        del after[-1]
        if not i.name.endswith("_OR_POP"):
            del jumped[-1]
        ends, target = [], i.target
    op = bc.OPS[i.name.replace("BACKWARD", "FORWARD")]
    following = w.draft.instructions[w.at + 1]
    if follow is True:
        label = bc.new("NOP", position=i.position)
        copy_of(w, i, op=op, target=label)
        w.draft.body += [bc.new("JUMP_FORWARD", target=leave_at(w, following, after)), label]
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
# The walk. `path` are the offsets that the trace has executed and that the step shall execute, too; then it
# goes on by itself.

# %%
def make_step(code, path: list, bound: set, stack: tuple, func_globals: dict) -> ResumePoint:
    """The function that executes the instructions at the byte offsets `path` of `code` (an original), puts
    their result away and returns a TailCall, or the function's result. bound, stack: as for `make_resume`,
    at path[0]."""
    parameters = parameters_at(code, path[0], bound)
    key = ("step", id(code), tuple(path), parameters, tuple(stack), id(func_globals))
    if key in CACHE:
        return CACHE[key]
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
    write_exits(w, func_globals)
    covered = bool(draft.own)
    made, _ = assemble(draft, code.co_name, with_original=covered, firm=True)
    CACHE[key] = ResumePoint(code.co_name, made, parameters, tuple(stack), draft.cells, func_globals)
    return CACHE[key]


def put_away(w: Walk):
    """Follow the instructions that only consume what the step has produced."""
    instructions, seen = w.draft.instructions, set()
    while w.at >= 0:
        i = instructions[w.at]
        second_half = w.at > 0 and instructions[w.at - 1].offset == i.offset
        following = instructions[w.at + 1].name if w.at + 1 < len(instructions) else ""
        returns = i.name == "RETURN_CONST" or i.name == "RETURN_VALUE" and w.fresh or \
            i.name in ("LOAD_CONST", "LOAD_FAST") and following == "RETURN_VALUE"
        if i is w.draft.start and w.kinds == list(w.draft.stack) and \
                parameters_at(w.draft.code, i.offset, w.bound) == w.draft.parameters:
            w.draft.body.append(bc.new("JUMP_BACKWARD", target=w.draft.body[0], position=i.position))
            w.at = -1
        elif w.at in seen and not second_half:
            leave_here(w)
        elif is_jump(i) and (i.name == "FOR_ITER" or "_IF_" not in i.name):
            seen.add(w.at)
            branch(w, i, False)
            w.fresh = results(i)
        elif is_jump(i) and w.fresh:
            branch(w, i, None)
        elif not is_jump(i) and (second_half or returns or i.name in ("NOP", "POP_EXCEPT") or w.fresh and (
                i.name in STORES or i.name in ("UNPACK_SEQUENCE", "GET_ITER", "TO_BOOL"))):
            seen.add(w.at)
            before = len(w.kinds)
            execute(w, i)
            w.fresh += len(w.kinds) - before
            w.at = -1 if i.name in LEAVES else w.at + 1
        else:
            leave_here(w)


# %% [markdown]
# An exit empties the stack into variables, from the top: a context is left, a handler's exception is no
# longer the current one. Then it returns a `TailCall`. Exits stand behind the path, outside of every
# handler.

# %%
def write_exits(w: Walk, func_globals):
    draft, body = w.draft, w.draft.body
    for label, first, offset, kinds, bound in w.pending:
        point = make_resume(draft.code, offset, bound, kinds, func_globals)
        emit = [*first, label]

        def new(name, arg=0):
            emit.append(bc.new(name, arg, position=label.position))

        for n in range(len(kinds) - 1, -1, -1):
            if kinds[n] == HANDLING:
                new("POP_EXCEPT")
            elif kinds[n] == CONTEXT:
                for _ in range(3):
                    new("LOAD_CONST", draft.constant(None))
                new("CALL", 2)
                new("POP_TOP")
            else:
                draft.exits = max(draft.exits, n + 1)
                new("STORE_FAST", f"__exit{n}")
        if PYTHON < (3, 13):
            new("PUSH_NULL")
        new("LOAD_CONST", draft.constant(TailCall))
        if PYTHON >= (3, 13):
            new("PUSH_NULL")
        new("LOAD_CONST", draft.constant(point.target))
        for cell in point.cells:
            new("LOAD_FAST", cell)
        new("BUILD_TUPLE", len(point.cells))
        slots = [f"__exit{n}" if kind == VALUE else f"__stack{n}"
                 for n, kind in enumerate(kinds) if kind in HAS_ARGUMENT]
        for variable in (*point.locals, *slots):
            new("LOAD_FAST", variable)
        new("BUILD_TUPLE", len(point.locals) + len(slots))
        new("BUILD_TUPLE", 3)
        new("CALL", 1)
        new("RETURN_VALUE")
        body += emit


def reset() -> None:
    for table in (ORIGINS, POINTS, CACHE):
        table.clear()
