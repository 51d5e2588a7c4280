"""Ends graphs at random instructions. A program with the line `CUTS = (SEED, PERMILLE)` is captured by an interpreter that cannot do so
many of a thousand instructions, of its own code and of the libraries' that it calls: there the graph breaks, as it would at an operator
that nothing knows of, at once or when it comes there for the second or third time.

The line is a statement of the program, so it stays in one that is kept, and the reducer takes it away where the cuts are not needed. Which
instructions are cut depends on their name, their columns from the beginning of their line's code and their number among those that have the
same: not on the lines around, nor on how deep they are indented, so that a reduced program is cut where it was."""
from __future__ import annotations

import ast
import collections
import contextlib
import re
import types
import weakref
import zlib

from minicompile.ch03_capture import interpreter
from minicompile.ch03_capture.tracer import unsupported
from minicompile.ch04_breaks import resume

MARK = re.compile(r"^CUTS = \((\d+), (\d+)\)$", re.MULTILINE)
# Nothing breaks here: these set a frame up, prepare a call or a function, and do nothing of the program.
NEVER = {"RESUME", "MAKE_CELL", "COPY_FREE_VARS", "RETURN_GENERATOR", "KW_NAMES", "PRECALL", "LOAD_CLOSURE", "MAKE_FUNCTION",
         "SET_FUNCTION_ATTRIBUTE"}


def mark(text: str, seed: int, permille: int = 0) -> str:
    """The program with cuts, written as the reducer writes it."""
    return text if not permille else ast.unparse(ast.parse(f"CUTS = ({seed}, {permille})\n{text}"))


@contextlib.contextmanager
def cutting(text: str):
    """Inside, what is captured is cut as the program with this text says."""
    found, decode = MARK.search(text), interpreter.decode

    def decode_with_cuts(code):
        decoded, cuts = decode(code), cuts_of(decode, code, *map(int, found.groups()))
        decoded.steps = [(cut(handler, cuts[i.offset]), pops, i) if i.offset in cuts else (handler, pops, i)
                         for handler, pops, i in decoded.steps]
        return decoded

    if found is not None:
        interpreter.decode = decode_with_cuts
    try:
        yield
    finally:
        interpreter.decode = decode


def cut(handler, turn: int):
    """The handler of an instruction that a trace can do so many times: in a loop, the trace ends with the loop under way."""
    done = weakref.WeakKeyDictionary()

    def limited(tx, frame, i, *operands):
        done[tx] = done.get(tx, 0) + 1
        if done[tx] > turn:
            unsupported(tx, f"a cut at {i.opname}")
        return handler(tx, frame, i, *operands)
    return limited


def cuts_of(decode, code, seed: int, permille: int) -> dict[int, int]:
    """Where in `code` graphs end, and after how many turns; in the rest of a function behind a break, at the same instructions of it."""
    origin = resume.origin_of(code)
    if origin is not None:
        there = cuts_of(decode, resume.original_code(code), seed, permille)
        return {offset: there[before] for offset, before in origin.offsets.items() if before in there}
    instructions, begins, seen, found = decode(code).instructions, {}, collections.Counter(), {}
    for i in instructions:
        line, column, _ = place_of(i)
        begins[line] = min(column, begins.get(line, column))
    for i in instructions:
        line, begin, end = place_of(i)
        place = i.opname, begin - begins[line], end - begins[line]
        seen[line, place] += 1
        drawn = zlib.crc32(repr((seed, place, seen[line, place])).encode())
        if drawn % 1000 < permille and i.opname not in NEVER:
            found[i.offset] = (0, 0, 1, 2)[drawn // 1000 % 4]
    return {offset: turn for offset, turn in found.items() if offset not in closures(instructions)}


def place_of(i) -> tuple[int, int, int]:
    """Line, and columns from where to where; zeros for what no line stands for, as the end of an `except`."""
    at = i.positions
    return (0, 0, 0) if at is None or at.lineno is None or at.col_offset is None else (at.lineno, at.col_offset, at.end_col_offset)


def closures(instructions) -> set[int]:
    """Where the cells and the code of a function are on their way to the stack."""
    found = set()
    for n, i in enumerate(instructions):
        if isinstance(i.argval, types.CodeType):
            before = instructions[n - 1]
            found |= {j.offset for j in instructions[n - 1 - before.arg if before.opname == "BUILD_TUPLE" else n:n + 1]}
    return found
