"""Ends graphs at random instructions. A program with the line `CUTS = (SEED, PERMILLE)` is captured by an interpreter that cannot do so
many of a thousand instructions, of its own code and of the libraries' that it calls: there the graph breaks, as it would at an operator
that nothing knows of.

The line is a statement of the program, so it stays in one that is kept, and the reducer takes it away where the cuts are not needed. Which
instructions are cut depends on their name, their columns from the beginning of their line's code and their number among those that have the
same: not on the lines around, nor on how deep they are indented, so that a reduced program is cut where it was."""
from __future__ import annotations

import ast
import collections
import contextlib
import re
import types
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
    if found is not None:
        interpreter.decode = lambda code: with_cuts(decode(code), cut_offsets(decode, code, *map(int, found.groups())))
    try:
        yield
    finally:
        interpreter.decode = decode


def with_cuts(decoded, offsets):
    decoded.steps = [(cut, pops, i) if i.offset in offsets else (handler, pops, i) for handler, pops, i in decoded.steps]
    return decoded


def cut(tx, frame, i, *operands):
    unsupported(tx, f"a cut at {i.opname}")


def cut_offsets(decode, code, seed: int, permille: int) -> set[int]:
    """Where in `code` graphs end; in the rest of a function behind a break, at the same instructions of the function."""
    origin = resume.origin_of(code)
    if origin is not None:
        there = cut_offsets(decode, resume.original_code(code), seed, permille)
        return {offset for offset, before in origin.offsets.items() if before in there}
    instructions = [i for i in decode(code).instructions if i.positions and i.positions.col_offset is not None]
    begins, seen, found = {}, collections.Counter(), set()
    for i in instructions:
        line, column = i.positions.lineno, i.positions.col_offset
        begins[line] = min(column, begins.get(line, column))
    for i in instructions:
        line, name, *columns = i.positions.lineno, i.opname, i.positions.col_offset, i.positions.end_col_offset
        place = name, *(column - begins[line] for column in columns)
        seen[line, place] += 1
        if zlib.crc32(repr((seed, place, seen[line, place])).encode()) % 1000 < permille and name not in NEVER:
            found.add(i.offset)
    return found - closures(instructions)


def closures(instructions) -> set[int]:
    """Where the cells and the code of a function are on their way to the stack."""
    found = set()
    for n, i in enumerate(instructions):
        if isinstance(i.argval, types.CodeType):
            before = instructions[n - 1]
            found |= {j.offset for j in instructions[n - 1 - before.arg if before.opname == "BUILD_TUPLE" else n:n + 1]}
    return found
