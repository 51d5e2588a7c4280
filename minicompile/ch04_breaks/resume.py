# %% [markdown]
# # Resume functions and steps
#
# A graph break cuts a function in three: a compiled part, one instruction that Python must execute itself,
# and the rest. The rest should be compiled too, but it begins in the middle: with local variables already
# set, perhaps with half an expression on the interpreter's stack (`f(x) + g(print(y))` breaks with `f(x)`
# waiting), perhaps inside a loop, a `with` block or an exception handler.
#
# So the rest becomes a function of its own. Its code is the *original* code with a new beginning, which takes the live locals and
# the values on the stack as arguments, puts the latter back on the stack, and jumps to where the rest begins.
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
# Here are both, from CPython 3.11, for
#
#     def shown(x):
#         y = x.relu()
#         print(y.shape)
#         return y + 1
#
# The graph ends before the call of `print`. Then the stack holds NULL (which stands below a callable), `print` and the shape, and
# the only live local is `y`:
#
#     step(y, __stack1, __stack2)                        shown__resume_at_82(y)
#       0 RESUME                                           0 RESUME
#       2 PUSH_NULL                                        2 JUMP_FORWARD    to 84
#       4 LOAD_CLOSURE    __stack1                         4 LOAD_FAST       x
#       6 DELETE_FAST     __stack1                         6 LOAD_METHOD     relu
#       8 LOAD_CLOSURE    __stack2                        28 PRECALL
#      10 DELETE_FAST     __stack2                        32 CALL
#      12 CALL                                            42 STORE_FAST      y
#      22 POP_TOP                                         44 LOAD_GLOBAL     NULL + print
#      24 JUMP_FORWARD    to 26                           56 LOAD_FAST       y
#      26 NOP                                             58 LOAD_ATTR       shape
#      28 PUSH_NULL                                       68 PRECALL
#      30 LOAD_CONST      TailCall                        72 CALL
#      32 LOAD_CONST      shown__resume_at_82             82 POP_TOP
#      34 MAKE_FUNCTION                                   84 LOAD_FAST       y
#      36 LOAD_FAST       y                               86 LOAD_CONST      1
#      38 BUILD_TUPLE                                     88 BINARY_OP       +
#      40 BUILD_TUPLE                                     92 RETURN_VALUE
#      42 CALL
#      52 RETURN_VALUE
#
# The step puts the stack back (NULL is no object, so it cannot be an argument, and is pushed anew), makes the call and drops its result.
# What begins at 26 is the exit: it makes a function of the code on the right, and returns that with its arguments, as a `TailCall`. The
# pair of `LOAD_CLOSURE` and `DELETE_FAST` takes an argument out of its variable: so nobody but the stack holds it, as in the original.
# (`LOAD_CLOSURE` pushes what a variable holds, whatever that is. Later Pythons have one instruction for both.) On the right is the whole
# original behind a jump (82 is where the rest begins in the original; the jump has moved it to 84). What the jump passes over is never
# executed there. It stays because loops jump back, and because handlers may stand anywhere.
#
# torch.compile has resume functions too. It generates the instruction and the part before it as bytecode,
# reconstructs the `with` blocks that it knows, and gives up on the frame when a break happens in a loop or
# a `try`. Bytecode is written in this chapter only; the part before the break is Python text (chapter 3).
#
# In tracebacks a resume function goes by the name of its original. Only its qualified name says where it begins.

# %%
import dis
import types
import weakref
from dataclasses import dataclass, field

from .. import marks
from ..ch03_capture.binding import SUSPENDS
from ..ch03_capture.hook import kept, record, run_piece
from ..ch03_capture.inputs import FROM_ZERO
from ..ch03_capture.tracer import PYTHON
from ..errors import Unsupported
from . import bytecode as bc

VALUE, NULL, CONTEXT, HANDLING, LASTI = "value", "null", "context", "handling", "lasti"
HAS_ARGUMENT = (VALUE, CONTEXT, HANDLING)


# %% [markdown]
# ## What is on the stack
#
# A handful of things can wait on the stack of an ordinary function at a break:
#
# - `VALUE`: any object, passed as an argument and pushed. Loop iterators are values, and so is the
#   `__exit__` of a context manager that Python itself has entered.
# - `NULL`: an empty slot. CPython reserves one below a callable that is not a bound method.
# - `CONTEXT`: the `__exit__` method of a `with` block that the graph implements, such as `torch.autocast`.
#   A graph cannot be left open, so it leaves the context at its end, and a resume function gets the context
#   manager itself and enters it again, with the same instruction that the user's `with` used. A step also
#   leaves it at its exit.
# - `HANDLING`: a handler is running. The slot holds the exception that was current before; the argument is
#   the one that is current now. `PUSH_EXC_INFO` makes it so again, which a bare `raise` and
#   `sys.exc_info()` need, and the exit of a step undoes it with `POP_EXCEPT`, after asking which exception is
#   handled by then: `except*` changes that.
# - `LASTI`: the position at which an exception was raised, only for tracebacks. Any number will do.

# %%
@dataclass(eq=False)
class ResumePoint:
    """A resume function or a step. `code` takes `locals`, then an argument for each VALUE, CONTEXT and
    HANDLING in `stack`, then has `cells` as free variables. exits: of a step, the resume functions that it leads to."""
    name: str
    code: types.CodeType
    locals: tuple[str, ...]
    stack: tuple[str, ...]
    cells: tuple[str, ...]
    exits: "list[ResumePoint]" = field(default_factory=list, repr=False)

    def function(self, func_globals: dict, *closure) -> types.FunctionType:
        return types.FunctionType(self.code, func_globals, self.name, None, closure)

    def call_text(self, variable: str, locals: dict, stack: list, cells: dict, current_code=None) -> str:
        """The items of a TailCall that continues there, as Python text. variable: the name of `code`.

        locals: text of each live local. stack: text of each slot with an argument, bottom first. cells:
        text of a *cell object* for each own cell that exists (3.12 creates those of comprehensions late);
        free variables of `current_code` (the frame being left) are found in its closure. """
        free = {} if current_code is None else {name.removeprefix(TAKEN): f"__F.__closure__[{i}]"
                                                for i, name in enumerate(current_code.co_freevars)}
        closure = "".join({**free, **cells}.get(name, "__new_cell()") + ", " for name in self.cells)
        arguments = "".join(text + ", " for text in [*("None" if name in self.cells else locals[name] for name in self.locals), *stack])
        return f"__function({variable}, __G, {self.name!r}, None, ({closure})), ({arguments})"


# %% [markdown]
# ## The trampoline
#
# Who calls the next piece? If each piece called the next, a loop of a thousand rounds that breaks in every
# round would be a thousand frames deep. So a piece *returns* what to call, a `TailCall`, and the one entry
# that the user's program called, that of the whole function, keeps calling until a real result arrives. It is a list, since
# it is emptied when it is called: what the program deletes in the next piece is to be gone then. What nobody reads any more but a weak
# reference may lead to comes along as a third item, by name, and stays until the function returns or the name has another value.

# %%
class TailCall(list):
    """[function, arguments] of the next piece of a function, and a dict if there is something to keep; never seen by the user's program."""
    __slots__ = ()


@marks.passed_over
def finish(call):
    """Run the pieces of a function that are left, one after the other."""
    kept = {}
    while type(call) is TailCall:
        if len(call) > 2:
            kept.update(call.pop())
        call = run_piece(call)
    return call


# %% [markdown]
# ## Making one
#
# Cells need care. In the original function a captured variable is created by `MAKE_CELL`; the closures made
# before the break already share that cell. The rest must use the same one, so in the resume function every
# cell of the original is a *free* variable, and the function is built per call around the existing cells
# and the globals of the function that broke. But CPython tells by the kind of a variable what to raise where it has no value: a
# `NameError` for a free one, an `UnboundLocalError` for one of the function itself. So a cell that was the original's own is
# moved from the free variable to one of its own in the beginning. The free one has another name (`TAKEN`), and an empty cell from then on:
# under the same name, or with the same cell, `locals()` and a debugger would find the variable twice, and after a comprehension that hides
# it (3.12) with the wrong value. `super()` looks for its object where the frame has its first argument, in a cell if that is shared with a
# closure. So such an argument stays the first one, is given None, and has its cell in its place then.
#
# The code is made once. The record of the original owns its pieces, by what they were made for, and the
# record of a resume function says what it is.
#
# `make_resume` first translates a position in a resume function back to the original, so that all pieces are
# cut from one code object. Then it looks for a piece that was made before for the same offset, the same
# variables and the same kinds of stack slots. Only if there is none does it make a `Draft`, with a single
# jump as its body.

# %%
def pieces(code) -> dict:
    """The resume functions and steps that were cut from `code`, all of them: start with none."""
    return {}


@dataclass(eq=False)
class Origin:
    """What a resume function was cut from: the code, held weakly, its name, where it begins, and where each offset of its own is
    there; its locals and stack are those of its `ResumePoint`; what varies from call to call, as far as that is known beforehand: names of
    parameters, each with what `CaptureOptions.dynamic` has for it; and how often a loop that goes on there was unrolled, or tried to."""
    code: weakref.ref
    name: str
    start: int
    offsets: dict[int, int] = field(repr=False)
    locals: tuple[str, ...]
    stack: tuple[str, ...]
    varying: dict
    unrollings: int = 0


def origin_of(code) -> Origin | None:
    return record(code).get("origin")


def is_resume(code) -> bool:
    return origin_of(code) is not None


def original_code(code):
    """The code that a resume function was cut from; other code is its own."""
    origin = origin_of(code)
    return code if origin is None else origin.code() or code


def original_name(code) -> str:
    """The qualified name of the function that this code is, or is the rest of."""
    origin = origin_of(code)
    return code.co_qualname if origin is None else origin.name


def original_position(code, offset: int):
    """(original code, offset in it) for a position that may be inside a resume function."""
    origin = origin_of(code)
    if origin is None:
        return code, offset
    if offset not in origin.offsets or origin.code() is None:
        raise Unsupported("graph break while the state of a resumed function is being restored")
    return origin.code(), origin.offsets[offset]


def needed_locals(code, offset: int) -> set:
    """Names that the code from `offset` on may read. A `super()` in `def f(*args)` finds no argument, and would find one of these."""
    if "__class__" in code.co_freevars and not code.co_argcount and "super" in code.co_names:
        raise Unsupported("graph break in a function with super() that has no first argument")
    return {*bc.live_locals(code, offset), *asked_by_super(code)}


def asked_by_super(code) -> tuple:
    """The name of the frame's first argument, where `super()` looks for self."""
    return code.co_varnames[:1] if "__class__" in code.co_freevars and code.co_argcount else ()


def make_resume(code, offset: int, bound: set | None, stack: tuple, results=()) -> ResumePoint:
    """The function that continues `code` before the instruction at byte `offset`.

    bound: names of the locals that are set there (default: all that the rest may read). stack: kinds of the
    stack slots, bottom first. results: names of the parameters that a step has computed. Raises Unsupported for generators and for
    unknown slots. """
    code, offset = original_position(code, offset)
    parameters = arguments_at(code, offset, bound)
    known, key = kept(pieces, code), (offset, parameters, tuple(stack))
    if key not in known:
        draft = Draft(code, offset, parameters, tuple(stack))
        draft.body = [bc.new("JUMP_FORWARD", target=draft.start, position=draft.start.position)]
        name, varying = f"{code.co_name}__resume_at_{offset}", counted_in_loops(draft)
        resumed, instructions = assemble(draft, name, with_original=True)
        record(resumed)["origin"] = Origin(weakref.ref(code), code.co_qualname, offset, new_offsets(resumed, instructions), parameters,
                                           tuple(stack), dict.fromkeys(varying, FROM_ZERO))
        known[key] = ResumePoint(name, resumed, parameters, tuple(stack), draft.cells)      # last: a signal may end this anywhere
    origin_of(known[key].code).varying.update(dict.fromkeys(results, FROM_ZERO))
    return known[key]


# %% tags=["exercise:resume-parameters"]
def parameters_at(code, offset, bound) -> tuple:
    """Names of the variables that a function which continues `code` at `offset` takes, in the order of `code.co_varnames`: those that are
    needed from there on and that are set (in `bound`, unless that is None). A variable that is shared with a closure arrives in its
    cell instead. Raises Unsupported where the code cannot be continued: generators and coroutines (SUSPENDS)."""
    if code.co_flags & SUSPENDS:
        raise Unsupported("graph break inside a generator or coroutine")
    live, cells = needed_locals(code, offset), (*code.co_cellvars, *code.co_freevars)
    return tuple(name for name in code.co_varnames
                 if name in live and name not in cells and (bound is None or name in bound))


# %%
def arguments_at(code, offset, bound) -> tuple:
    """The parameters, after one that only keeps the place of self for `super()`, where self is shared with a closure."""
    return (*(name for name in asked_by_super(code) if name in code.co_cellvars), *parameters_at(code, offset, bound))


# %% [markdown]
# **Numbers that will be others.** A resume function is compiled when it is first reached, for the number that a loop has counted to, or
# that `x.item()` has found. That these vary need not be learned by a second version: what the step has computed (`results`), the targets
# of a `for`, and what is changed in place (`n += 1`) are symbols in the first, if they are numbers. So are the numbers and sizes that were
# symbols before the break (`breaks.py`).

# %%
FIRST_IN_PLACE = dis._nb_ops.index(("NB_INPLACE_ADD", "+="))


def counted_in_loops(draft) -> set[str]:
    """Targets, and variables that are changed in place, of the loops around the place where a draft begins."""
    found, varies = set(), False                    # varies: what lies on top of the stack is such a value
    loops = [(i.target.offset, i.offset) for i in draft.instructions
             if i.target is not None and i.target.offset <= draft.offset <= i.offset]
    for i in draft.instructions:
        if varies and i.name == "STORE_FAST" and any(first <= i.offset <= last for first, last in loops):
            found.add(draft.names[i.arg])
        varies = i.name == "FOR_ITER" or i.name == "BINARY_OP" and i.arg >= FIRST_IN_PLACE or \
            varies and i.name in ("STORE_FAST", "UNPACK_SEQUENCE")
    return found


# %% [markdown]
# A `Draft` is a code object in the making. Its variables are the parameters, then one for each slot of the
# stack, then the other locals of the original, then the cells.
#
# `assemble` gives every variable its new place, and rewrites the places in the copied instructions
# accordingly. It puts prologue, body and original one after the other, encodes them, and makes the new code
# object from the old one with `replace`, so that everything that is not named stays as it was. New
# instructions refer to variables by name until then.

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
        self.instructions, self.handlers = bc.disassemble(code)
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
    code = draft.code
    others = tuple(n for n in code.co_varnames if n not in draft.parameters and n not in draft.cells)
    exits = tuple(f"__exit{n}" for n in range(draft.exits))
    varnames = (*draft.parameters, *draft.stack_names, *others, *exits)
    free = tuple(TAKEN + name for name in code.co_cellvars) + code.co_freevars
    slot = {variable: index for index, variable in enumerate(dict.fromkeys((*varnames, *code.co_cellvars, *free)))}
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
    prologue = take_cells(draft, slot) + restore_stack(draft, slot, firm)
    instructions = prologue + draft.body + original
    co_code, exception_table, line_table = bc.encode(instructions, handlers, code.co_firstlineno)
    made = code.replace(
        co_code=co_code, co_exceptiontable=exception_table, co_linetable=line_table,
        co_qualname=code.co_qualname.removesuffix(code.co_name) + name, co_nlocals=len(varnames),
        co_argcount=len(draft.parameters) + len(draft.stack_names), co_posonlyargcount=0, co_kwonlyargcount=0,
        co_varnames=varnames, co_cellvars=code.co_cellvars, co_freevars=free, co_flags=code.co_flags & ~0x0C,
        co_consts=(*code.co_consts, *draft.constants),
        co_stacksize=max(code.co_stacksize, len(draft.stack)) + len(varnames) + len(draft.cells) + 4)
    return made, instructions


# %% [markdown]
# The prologue pushes every slot. An argument is cleared when it was pushed, so that it lives no longer than
# it would have lived on the stack. The two ways to do that are also chosen for what capture makes of them:
# both leave alone what they push, so a value that only waits on the stack is not guarded. A loop that
# breaks in each round has its iterator there. Were its position guarded, each round would be compiled
# again. (It is guarded only where the rest of a loop over modules is unrolled, because nothing in that breaks.)

# %%
PUSH = ("LOAD_CLOSURE", "DELETE_FAST") if PYTHON < (3, 12) else ("LOAD_FAST_AND_CLEAR",)


def restore_stack(draft, slot, firm) -> list:
    """RESUME, then push every slot. firm: what an exit has to pass on stays in its variable, too."""
    position = draft.start.position
    result = [bc.new("RESUME", 0, position=position)]
    for n, kind in enumerate(draft.stack):
        if kind in HAS_ARGUMENT:
            names = ("LOAD_FAST",) if firm and kind == CONTEXT else PUSH
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


TAKEN = "cell of "                                  # no name of a program begins so


def take_cells(draft, slot) -> list:
    """Exchange the cells that the closure has for variables of the function itself for the new ones of these."""
    if not draft.cells:
        return []
    made = [("MAKE_CELL", slot[name]) for name in draft.code.co_cellvars] + [("COPY_FREE_VARS", len(draft.cells))]
    made += [("DELETE_DEREF", slot[name]) for name in draft.parameters if name in draft.cells]
    for own, free in ((slot[name], slot[TAKEN + name]) for name in draft.code.co_cellvars):
        made += [("LOAD_FAST", free), ("LOAD_FAST", own), ("STORE_FAST", free), ("STORE_FAST", own)]
    return [bc.new(name, arg, position=draft.start.position) for name, arg in made]


def new_offsets(resumed, instructions) -> dict[int, int]:
    """Offset in the encoded code -> offset in the original, for every instruction that came from there."""
    decoded, _ = bc.disassemble(resumed)
    return {new.offset: old.offset for new, old in zip(decoded, instructions, strict=True) if old.offset >= 0}

