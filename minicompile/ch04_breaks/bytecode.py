# %% [markdown]
# # Bytecode as data
#
# To continue a function in the middle we need a code object whose first instructions restore the state and
# then jump there. CPython has no supported way to edit a code object, but its format is documented well
# enough to take one apart and put it together again. Four parts refer to positions and must move together:
# the instructions, the jumps among them, the exception table, and the table of source positions.
#
# The trick that keeps this short: disassemble into a list of `Instruction` objects in which every jump points to
# *another object*, not to an offset. Then inserting, dropping and widening need no arithmetic at all, until
# the very end.
#
# Versions differ less than their release notes suggest. 3.11, 3.12 and 3.13 all use two-byte units (opcode,
# argument), `EXTENDED_ARG` prefixes for large arguments, and `CACHE` units after some opcodes, in which the
# interpreter keeps what it has learned. How many belong to an opcode, `dis` knows.

# %%
import dis
from dataclasses import dataclass

from ..ch03_capture import interpreter
from ..ch03_capture.hook import kept
from ..errors import Unsupported

OPCODES = dis.opmap
EXTENDED_ARG = OPCODES["EXTENDED_ARG"]
JUMPS = frozenset(dis.hasjrel)
LOCAL_OPS = frozenset(dis.haslocal) | frozenset(dis.hasfree)      # their argument is an index into localsplus
NO_INDEX = {OPCODES["COPY_FREE_VARS"]}


@dataclass(eq=False)
class Instruction:
    """One instruction. `arg` is the raw argument, except that a jump has `target` instead."""
    op: int
    arg: int = 0
    target: "Instruction | None" = None
    caches: int = 0
    position: tuple = (None, None, None, None)      # line, end line, column, end column
    offset: int = -1                                # in the code it was decoded from, behind prefixes; -1 for new ones

    @property
    def name(self) -> str:
        return dis.opname[self.op]


@dataclass(eq=False)
class Handler:
    """An entry of the exception table: an exception raised in first..last (inclusive) goes to target."""
    first: Instruction
    last: Instruction
    target: Instruction
    depth: int
    lasti: bool


def new(name: str, arg: int = 0, target: Instruction | None = None, position=(None,) * 4) -> Instruction:
    return Instruction(OPCODES[name], arg, target, cache_count(name), position)


def cache_count(name: str) -> int:
    """How many cache units follow an instruction."""
    counts = dis._inline_cache_entries
    return counts.get(name, 0) if isinstance(counts, dict) else counts[OPCODES[name]]


# %% [markdown]
# ## Taking apart
#
# Capture has read the code object already ([chapter 3](ref:minicompile.ch03_capture.interpreter.decode)): prefixes
# `EXTENDED_ARG` are part of the instruction that follows, and cache units are dropped. What remains is to turn each
# jump's offset into the instruction that stands there, and each entry of the exception table into a `Handler` that
# names its first and last instruction.

# %%
def disassemble(code) -> tuple[list[Instruction], list[Handler]]:
    """The instructions of a code object with resolved jumps, and its exception handlers."""
    known = kept(interpreter.decode, code)
    instructions = [Instruction(i.opcode, i.arg or 0, None, cache_count(i.opname), tuple(i.positions or (None,) * 4), i.offset)
                    for i in known.instructions]
    for made, i in zip(instructions, known.instructions):
        if i.opcode in JUMPS:
            made.target = instructions[known.index[i.argval]]
    handlers = []
    for entry in known.table:
        covered = [i for i in instructions if entry.start <= i.offset < entry.end]
        if covered:
            handlers.append(Handler(covered[0], covered[-1], instructions[known.index[entry.target]], entry.depth, entry.lasti))
    return instructions, handlers


# %% [markdown]
# ## Putting together
#
# The length of an instruction depends on its argument, the argument of a jump depends on the lengths in
# between. Start with no prefixes at all and grow what does not fit, until nothing changes; lengths never
# shrink, so this ends.
#
# The function has three parts: the loop that finds lengths and distances, the loop that writes code and
# source positions, and the exception table, whose numbers count code units of two bytes.

# %%
def encode(instructions: list[Instruction], handlers: list[Handler], first_line: int) -> tuple[bytes, bytes,
                                                                                               bytes]:
    """(co_code, co_exceptiontable, co_linetable)."""
    prefixes = {i: 0 for i in instructions}
    while True:
        start, offset = {}, 0
        for i in instructions:
            start[i] = offset
            offset += 2 * (prefixes[i] + 1 + i.caches)
        grown = False
        for i in instructions:
            if i.target is not None:
                distance = (start[i.target] - start[i]) // 2 - (prefixes[i] + 1 + i.caches)
                backward = "BACKWARD" in i.name
                if (distance < 0) != backward and distance != 0:
                    raise Unsupported(f"{i.name} would change its direction")
                i.arg = abs(distance)
            needed = (max(i.arg.bit_length(), 1) - 1) // 8
            if needed > prefixes[i]:
                prefixes[i], grown = needed, True
        if not grown:
            break
    out, lines, previous = bytearray(), bytearray(), first_line
    for i in instructions:
        for shift in range(8 * prefixes[i], 0, -8):
            out += bytes((EXTENDED_ARG, (i.arg >> shift) & 0xFF))
        out += bytes((i.op, i.arg & 0xFF)) + bytes(2 * i.caches)
        previous = encode_position(lines, i.position, prefixes[i] + 1 + i.caches, previous)
    length = {i: 2 * (prefixes[i] + 1 + i.caches) for i in instructions}
    table = bytearray()
    for h in handlers:
        first, end = start[h.first], start[h.last] + length[h.last]
        numbers = (first // 2, (end - first) // 2, start[h.target] // 2, h.depth << 1 | h.lasti)
        for k, number in enumerate(numbers):
            chunk = varint(number, big_endian=True)
            table += bytes([chunk[0] | (0x80 if k == 0 else 0)]) + chunk[1:]
    return bytes(out), bytes(table), bytes(lines)


# %% [markdown]
# Both tables store numbers in groups of six bits with bit 6 meaning "more follows"; the exception table
# starts with the high group, the position table with the low one. A position entry begins with a byte `1
# kkkk lll`: kind and number of code units. Three of its sixteen kinds are enough: 15 no position, 13 line
# only, 14 everything.

# %% tags=["exercise:varint"]
def varint(value: int, big_endian: bool = False) -> bytes:
    """`value` >= 0 in groups of six bits, one byte a group, at least one byte. Bit 6 (0x40) of a byte says
    that another follows; bit 7 stays clear. The lowest group comes first, or with `big_endian` the
    highest."""
    groups = [value & 0x3F]
    while value := value >> 6:
        groups.append(value & 0x3F)
    if big_endian:
        groups.reverse()
    return bytes(g | 0x40 for g in groups[:-1]) + bytes(groups[-1:])


# %% [markdown]
# An entry covers eight code units at most, so a longer instruction has several. Its first number is the distance from the line
# before, with the sign in the lowest bit.

# %%
def encode_position(out: bytearray, position, units: int, previous: int) -> int:
    """Append entries for `units` code units; returns the line that the next delta is relative to."""
    line, end_line, column, end_column = position
    while units > 0:
        count = min(units, 8)
        units -= count
        kind = 15 if line is None else 13 if None in (end_line, column, end_column) else 14
        out.append(0x80 | kind << 3 | count - 1)
        if kind != 15:
            delta = line - previous
            out += varint(-delta << 1 | 1 if delta < 0 else delta << 1)
            previous = line
        if kind == 14:
            out += varint(end_line - line) + varint(column + 1) + varint(end_column + 1)
    return previous


# %% [markdown]
# ## Moving local variables
#
# In CPython 3.11 and later, arguments, locals, cells and free variables live in one array, `localsplus`,
# and the instructions name them by index. Adding a parameter shifts the rest, so every index is translated.
# (3.13 packs two indices below 16 into one argument, and after a shift they might not fit any more. Such pairs were
# taken apart by `decode`, and each half has the offset of one of the two bytes.)

# %%
def localsplus_names(code) -> list[str]:
    """Variable names in the order of the frame's array: locals, cells that are not arguments, free
    variables."""
    cells = [name for name in code.co_cellvars if name not in code.co_varnames]
    return [*code.co_varnames, *cells, *code.co_freevars]


# %% [markdown]
# ## Liveness
#
# A resume function takes the locals that the rest of the code may still read. Passing all of them would be
# correct and costly: a dead intermediate tensor would become an output of the graph before the break, would
# have to be written to memory, and would stay alive through the rest of the function.
#
# A local is *live* at an instruction if some path from there reads it before writing it. The textbook
# backward iteration: live(i) = reads(i) + (live(successors) - writes(i)), until nothing changes.

# %%
def successors(instructions: list[Instruction], handlers: list[Handler]) -> dict[int, list[int]]:
    position = {id(i): n for n, i in enumerate(instructions)}
    result = {}
    for n, i in enumerate(instructions):
        ends = i.name in ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD",
                          "JUMP_BACKWARD",
                          "JUMP_BACKWARD_NO_INTERRUPT")
        result[n] = [] if ends or n + 1 == len(instructions) else [n + 1]
        if i.target is not None:
            result[n].append(position[id(i.target)])
    for h in handlers:
        for n in range(position[id(h.first)], position[id(h.last)] + 1):
            result[n].append(position[id(h.target)])
    return result


# %% tags=["exercise:liveness"]
def live_table(code) -> dict[int, frozenset]:
    """Offset of each instruction -> the localsplus indices that are live before it: {offset: frozenset}.

    Take the instructions and handlers of `disassemble`, and the edges of `successors`. An instruction with
    an op in LOCAL_OPS and not in NO_INDEX names the variable `arg`: STORE_FAST writes it, MAKE_CELL neither
    reads nor writes it, every other one reads it."""
    instructions, handlers = disassemble(code)
    follow = successors(instructions, handlers)
    live = [frozenset()] * len(instructions)
    changed = True
    while changed:
        changed = False
        for n in range(len(instructions) - 1, -1, -1):
            i = instructions[n]
            after = frozenset().union(*(live[m] for m in follow[n]))
            if i.op in LOCAL_OPS and i.op not in NO_INDEX:
                if i.name == "STORE_FAST":
                    after = after - {i.arg}
                elif i.name != "MAKE_CELL":
                    after = after | {i.arg}
            if after != live[n]:
                live[n], changed = after, True
    return {i.offset: indices for i, indices in zip(instructions, live)}


# %%
def live_locals(code, offset: int) -> set[str]:
    """Names of locals and own cells that the code from byte `offset` on may read before it writes them."""
    names = localsplus_names(code)
    own = set(names) - set(code.co_freevars)
    if {"locals", "eval", "exec", "vars", "dir", "_getframe"} & set(code.co_names):
        return own
    return {names[index] for index in kept(live_table, code).get(offset, ())} & own
