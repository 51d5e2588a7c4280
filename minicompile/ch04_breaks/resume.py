# %% [markdown]
# # Resume functions
#
# A graph break cuts a function in two: a compiled part, one instruction that Python must execute itself,
# and the rest. The rest should be compiled too. But it begins in the middle: with local variables already
# set, perhaps with half an expression on the interpreter's stack (`f(x) + g(print(y))` breaks with `f(x)`
# waiting), perhaps inside a loop or a `with` block.
#
# So the rest becomes a function of its own. Its code is the *original* code with a new beginning:
#
#     def resume_in_f_at_42(x, n, stack0, stack1):     # the live locals, then the values on the stack
#         push stack0; push stack1
#         jump to instruction 42 of f
#
# To everything else it is an ordinary function. The frame hook sees its frame like any other, capture
# traces it, guards protect it, and if it breaks again, there is another resume function. torch.compile does
# the same, and adds code generation for the part before the break as bytecode; here that part is Python
# text (see chapter 3), so this is the only place in the book where bytecode is written.
#
# Resume functions are always cut from the original code, even when the break happens inside a resume
# function. A loop that breaks in each round therefore has one resume function and not one per round.

# %%
from __future__ import annotations

import types
from dataclasses import dataclass, field

from ..errors import Unsupported
from . import bytecode as bc

VALUE, NULL, CONTEXT = "value", "null", "context"
REFUSED_FLAGS = 0x20 | 0x80 | 0x200                  # generators, coroutines, asynchronous generators


# %% [markdown]
# ## What is on the stack
#
# Three kinds of things can wait on the stack of an ordinary function at a break:
#
# - `VALUE`: any object, passed as an argument and pushed. Loop iterators are values.
# - `NULL`: an empty slot. CPython reserves one below a callable that is not a bound method.
# - `CONTEXT`: the `__exit__` method of an active `with` block. A resume function gets the context manager
#   itself and enters it again, with the same instruction that the user's `with` used; this leaves the new
#   `__exit__` in the slot, where the original exception table expects it. The part before the break has
#   left the context, so that enters and exits stay paired.

# %%
@dataclass(eq=False)
class ResumePoint:
    """A resume function. `code` takes `locals` then one argument per VALUE or CONTEXT in `stack`, then has
    `cells` as free variables. `target` is what generated text names: the function, or function_of(closure)
    if there are cells."""
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
        """Python text that continues there. variable: the name that `target` has in the generated function.

        locals: text of each live local. stack: text of each VALUE and CONTEXT slot, bottom first. cells:
        text of a *cell object* for each own cell that exists (3.12 creates those of comprehensions late);
        free variables of `current_code` (the frame being left) are found in its closure. """
        free = {} if current_code is None else {name: f"__F.__closure__[{i}]"
                                                for i, name in enumerate(current_code.co_freevars)}
        closure = ", ".join({**free, **cells}.get(name, "__new_cell()") for name in self.cells)
        arguments = ", ".join([*(locals[name] for name in self.locals), *stack])
        return f"{variable}({closure})({arguments})" if self.cells else f"{variable}({arguments})"


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
CACHE: dict[tuple, ResumePoint] = {}


def original_position(code, offset: int):
    """(original code, offset in it) for a position that may be inside a resume function."""
    if id(code) not in ORIGINS:
        return code, offset
    origin = ORIGINS[id(code)][1]
    if offset not in origin.offsets:
        raise Unsupported("graph break while the state of a resumed function is being restored")
    return origin.code, origin.offsets[offset]


def make_resume(code, offset: int, live: set | frozenset | None, stack: tuple,
                func_globals: dict) -> ResumePoint:
    """The function that continues `code` before the instruction at byte `offset`.

    live: names of the locals that are set and passed on (default: all that the rest may read; then all must
    be set). stack: kinds of the stack slots, bottom first. Raises Unsupported for generators and for
    unknown slots. """
    code, offset = original_position(code, offset)
    if code.co_flags & REFUSED_FLAGS:
        raise Unsupported("graph break inside a generator or coroutine")
    own_cells = set(code.co_cellvars) | set(code.co_freevars)
    live = bc.live_locals(code, offset) if live is None else set(live)
    if "__class__" in code.co_freevars and code.co_argcount:
        if code.co_varnames[0] in own_cells:
            raise Unsupported("graph break in a method with super() whose self is captured by a closure")
        # Super() looks for self in the first argument of the frame
        live.add(code.co_varnames[0])
    parameters = tuple(name for name in code.co_varnames if name in live and name not in own_cells)
    key = (id(code), offset, parameters, tuple(stack), id(func_globals))
    if key not in CACHE:
        CACHE[key] = build_resume(code, offset, parameters, tuple(stack), func_globals)
    return CACHE[key]


# %%
def build_resume(code, offset, parameters, stack, func_globals) -> ResumePoint:
    instructions, handlers = bc.decode(code)
    instructions = bc.split_pairs(instructions, handlers)
    start = next((i for i in instructions if i.offset == offset), None)
    if start is None:
        raise Unsupported(f"no instruction at offset {offset} of {code.co_name}")
    begin = next(n for n, i in enumerate(instructions) if i.name == "RESUME") + 1
    instructions = instructions[begin:]              # cells and free variables are set up differently below
    cells = (*code.co_cellvars, *code.co_freevars)
    stack_names = tuple(f"__stack{n}" for n, kind in enumerate(stack) if kind != NULL)
    others = tuple(n for n in code.co_varnames if n not in parameters and n not in cells)
    varnames = (*parameters, *stack_names, *others)
    slot = {name: index for index, name in enumerate((*varnames, *cells))}
    bc.relocate(instructions, {index: slot[name] for index, name in enumerate(bc.localsplus_names(code))})
    prologue = restore_stack(stack, slot, start.position)
    if cells:
        prologue.insert(0, bc.new("COPY_FREE_VARS", len(cells), position=start.position))
    prologue.append(bc.new("JUMP_FORWARD", target=start, position=start.position))
    instructions = prologue + instructions
    co_code, exception_table, line_table = bc.encode(instructions, handlers, code.co_firstlineno)
    name = f"{code.co_name}__resume_at_{offset}"
    resumed = code.replace(
        co_code=co_code, co_exceptiontable=exception_table, co_linetable=line_table, co_name=name,
        co_qualname=f"{code.co_qualname}__resume_at_{offset}", co_argcount=len(parameters) + len(stack_names),
        co_posonlyargcount=0, co_kwonlyargcount=0, co_nlocals=len(varnames), co_varnames=varnames,
        co_cellvars=(),
        co_freevars=cells, co_flags=code.co_flags & ~0x0C, co_stacksize=max(code.co_stacksize,
                                                                            len(stack) + 2))
    ORIGINS[id(resumed)] = resumed, Origin(code, new_offsets(resumed, instructions))
    return ResumePoint(name, resumed, parameters, stack, cells, func_globals)


def restore_stack(stack, slot, position) -> list:
    """RESUME, then push every slot; an argument is deleted after it was pushed, so that it lives no longer
    than it would have lived on the stack."""
    result = [bc.new("RESUME", 0, position=position)]
    for n, kind in enumerate(stack):
        if kind == NULL:
            result.append(bc.new("PUSH_NULL", position=position))
            continue
        if kind not in (VALUE, CONTEXT):
            raise Unsupported(f"graph break with {kind} on the stack")
        index = slot[f"__stack{n}"]
        result.append(bc.new("LOAD_FAST", index, position=position))
        result.append(bc.new("DELETE_FAST", index, position=position))
        if kind == CONTEXT:
            result.append(bc.new("BEFORE_WITH", position=position))
            result.append(bc.new("POP_TOP", position=position))
    return result


def new_offsets(resumed, instructions) -> dict[int, int]:
    """Offset in the encoded code -> offset in the original, for every instruction that came from there."""
    decoded, _ = bc.decode(resumed)
    return {new.offset: old.offset for new, old in zip(decoded, instructions, strict=True) if old.offset >= 0}


def reset() -> None:
    ORIGINS.clear()
    CACHE.clear()
