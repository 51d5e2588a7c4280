"""Percent files: cells with their real line numbers, and chapters as notebooks."""
from __future__ import annotations

import ast
import re
from dataclasses import dataclass

MARKER = re.compile(r"# %%(?P<rest>.*)$")
TAGS = re.compile(r'tags=\[([^\]]*)\]')


@dataclass(frozen=True)
class Cell:
    """kind: "markdown" or "code". line: where the first line of `source` stands in the file, counted from 1. `source` of a
    markdown cell is without the leading `# `."""
    kind: str
    source: str
    line: int
    tags: tuple[str, ...] = ()


def split(text: str) -> list[Cell]:
    """The cells of a percent file; what comes before the first marker is a code cell, if anything is there."""
    lines, starts = text.splitlines(), []
    for number, line in enumerate(lines):
        if found := MARKER.match(line):
            starts.append((number, found["rest"]))
    cells = [("", 0, starts[0][0] if starts else len(lines))] if not starts or starts[0][0] else []
    for (number, rest), (end, _) in zip(starts, [*starts[1:], (len(lines), "")]):
        cells.append((rest, number + 1, end))
    made = [make(rest, lines, begin, end) for rest, begin, end in cells]
    return [cell for cell in made if cell.source.strip()]


def make(rest: str, lines: list[str], begin: int, end: int) -> Cell:
    while begin < end and not lines[begin].strip():
        begin += 1
    while begin < end and not lines[end - 1].strip():
        end -= 1
    tags = tuple(re.findall(r'"([^"]+)"', found[1])) if (found := TAGS.search(rest)) else ()
    body = lines[begin:end]
    if "[markdown]" in rest:
        return Cell("markdown", "\n".join(re.sub(r"^# ?", "", line) for line in body), begin + 1, tags)
    return Cell("code", "\n".join(body), begin + 1, tags)


def import_lines(cell: Cell) -> int:
    """How many lines at the beginning of a cell of code only import."""
    body = ast.parse(cell.source).body
    imports = next((n for n, s in enumerate(body) if not isinstance(s, (ast.Import, ast.ImportFrom))), len(body))
    return len(cell.source.split("\n")) if imports == len(body) else body[imports - 1].end_lineno if imports else 0


def title(cells: list[Cell], otherwise: str) -> str:
    """The first heading of a page, as plain text: it also stands in the navigation and in the head of the window."""
    for cell in cells:
        if cell.kind == "markdown" and (found := re.match(r"# (.+)", cell.source)):
            return found[1].strip().replace("`", "")
    return otherwise


def first_paragraph(cells: list[Cell]) -> str:
    for cell in cells:
        if cell.kind == "markdown":
            for part in re.split(r"\n\s*\n", cell.source):
                if part.strip() and not part.startswith(("#", "    ", "|", "- ", "!")):
                    return " ".join(part.split())
    return ""
