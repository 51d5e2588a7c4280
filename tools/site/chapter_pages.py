"""Narratives: executed cells as Markdown, `%show` of the package's source, and the download as a notebook.

`%show NAME` shows a definition. `%show NAME "words"` shows it from the first line that begins with these words, `%show NAME
"words" to "others"` up to the next line that begins with the others, and `%show NAME "words" to "words"` that one line."""
from __future__ import annotations

import ast
import dataclasses
import functools
import pathlib
import re
import textwrap

from . import cells, code_pages, execute, highlight, links, names
from .page import HOLE, Page

SHOW = re.compile(r'^%show +(\S+)(?: +"(.+?)"(?: +to +"(.+?)")?)? *$', re.M)


def sources(root: pathlib.Path) -> list[pathlib.Path]:
    """The chapters in order, and then tiny, the compiler in one file."""
    return sorted((root / "chapters").glob("[0-9][0-9]_*.py")) + sorted((root / "chapters").glob("tiny.py"))


def chapter_page(book: links.Book, path: pathlib.Path, stage: str, root: pathlib.Path) -> Page:
    """The page with holes where outputs go; `fill` closes them. A text cell tagged `page` begins a further page, in `rest`."""
    found = cells.split(path.read_text())
    where = path.relative_to(root).as_posix()
    first = page = Page(f"chapters/{path.stem}", cells.title(found, path.stem), stage)
    promoted = False                # in the section that became a page its headings stand one level higher
    for cell in found:
        if cell.kind == "markdown":
            if "page" in cell.tags:
                page, promoted = further_page(book, first, cell, where), True
                cell = dataclasses.replace(cell, source=re.sub(r"## .+", "", cell.source, count=1))
            if promoted:
                section, heading, rest = cell.source.partition("\n## ") if not cell.source.startswith("## ") else ("", "", cell.source)
                promoted = not (heading or rest)
                cell = dataclasses.replace(cell, source=re.sub(r"^##(#+ )", r"#\1", section, flags=re.M) + heading + rest)
            prose(book, page, cell, where)
            continue
        if heading := re.search(r"^# #+ ", cell.source, re.M):
            book.findings.append(f"{where}:{cell.line + cell.source[:heading.start()].count(chr(10))}: a heading in a code cell: # %% "
                                 f"[markdown] is missing")
        page.block(f'<div class="mc-cell">{answer(book, page, cell, solved_by(cell, root))}</div>')
    footer(book, page, path, stage)
    return first


def further_page(book: links.Book, first: Page, cell: cells.Cell, where: str) -> Page:
    """The next page of a long chapter. Its cell begins with a heading `## ...`, which is the page's title."""
    heading = re.match(r"## (.+)", cell.source)
    if heading is None:
        book.findings.append(f"{where}:{cell.line}: a cell tagged page begins with a heading ## ...")
    title = heading[1].strip() if heading else first.title
    page = Page(f"{first.address}_{len(first.rest) + 2}", title, first.stage)
    page.prose(f"# {title}\n\n[{first.title}]({first.address.rpartition('/')[2]}.html), page {len(first.rest) + 2}")
    first.rest.append(page)
    return page


@functools.cache
def functions_of_tiny(root: pathlib.Path) -> dict[str, str]:
    """name -> exercise, for the functions of tiny that answer one."""
    found = {}
    for cell in cells.split((root / "chapters" / "tiny.py").read_text()):
        for tag in cell.tags:
            if tag.startswith("exercise:"):
                found |= {d.name: tag.partition(":")[2] for d in ast.parse(cell.source).body if isinstance(d, ast.FunctionDef)}
    return found


def solved_by(cell: cells.Cell, root: pathlib.Path) -> str:
    """The exercise that a cell answers, by its tag or because it prints the function of tiny that does; or ""."""
    printed = re.search(r"getsource\(tiny\.(\w+)\)", cell.source)
    tagged = next((tag.partition(":")[2] for tag in cell.tags if tag.startswith("exercise:")), "")
    return tagged or (functions_of_tiny(root).get(printed[1], "") if printed else "")


def answer(book: links.Book, page: Page, cell: cells.Cell, exercise: str) -> str:
    """The code of a cell and the hole for its output, folded away if it answers an exercise."""
    code = shown_code(cell) + HOLE
    if exercise not in book.exercises:
        return code
    address = links.href(page.address, "exercises", anchor=exercise)
    return (f'<p class="mc-exercise"><a href="{address}">Exercise {exercise}</a>: write this yourself before you read it.</p>'
            f'<details class="mc-solution"><summary>The book\'s own version: solves exercise {exercise}'
            f'</summary>{code}</details>')


def shown_code(cell: cells.Cell) -> str:
    """The code of a cell; what a reader may skip, imports and cells tagged `fold`, behind a line that opens it."""
    lines = cell.source.split("\n")
    if "fold" in cell.tags:
        return folded("The code of this cell", lines)
    begin, end = visible(cell)
    return (folded("Imports", lines[:begin]) + (highlight.plain("\n".join(lines[begin:end]).strip("\n")) if begin < end else "")
            + folded("The code that draws this", lines[end:]))


def visible(cell: cells.Cell) -> tuple[int, int]:
    """Which lines of a cell of code are not folded: from the first, counted from 0, up to the second."""
    lines, body, begin = cell.source.split("\n"), ast.parse(cell.source).body, cells.import_lines(cell)
    if begin == len(lines) or "fold" in cell.tags:
        return len(lines), len(lines)
    drawing = next(n for n in range(len(body), -1, -1) if n == 0 or not draws(body[n - 1]))
    end = body[drawing].lineno - 1 if drawing < len(body) else len(lines)
    return begin if begin >= 3 else 0, end if len(lines) - end >= 3 else len(lines)


DRAWING = {"Listings", "Table", "Walk", "bars", "draw_fusion", "draw_fx", "drawing", "lines", "pipes", "row_of_boxes", "timeline"}


def draws(statement: ast.stmt) -> bool:
    """Whether a statement is nothing but a picture or a table of what is there already."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in DRAWING


def folded(words: str, lines: list[str]) -> str:
    if not any(line.strip() for line in lines):
        return ""
    code = highlight.plain("\n".join(lines).strip("\n"))
    return f'<details class="mc-fold"><summary>{words}</summary>{code}</details>'


def fill(book: links.Book, page: Page, path: pathlib.Path, outputs: list, root: pathlib.Path):
    """outputs: one list per code cell, None where recorded results are shown."""
    shown, where = [], path.relative_to(root).as_posix()
    for cell, output in zip((c for c in cells.split(path.read_text()) if c.kind == "code"), outputs):
        note = ""
        if "gpu-result" in cell.tags and execute.measurements(cell):
            try:
                note = execute.measured_note(cell, root)
            except KeyError as error:
                book.findings.append(f"{where}:{cell.line}: no measurement that this cell reads, or it lacks a field: {error}")
        elif "gpu-result" in cell.tags:
            try:
                output, note = execute.recorded(path, cell)
            except KeyError:
                book.findings.append(f"{where}:{cell.line}: no recorded result of this cell; run `python -m tools.site gpu "
                                     f"{where}` on a machine with a GPU")
        shown.append(execute.output_html(output or [], note))
    page.fill(shown)


def prose(book: links.Book, page: Page, cell: cells.Cell, where: str):
    """Markdown with links resolved; a line `%show NAME` becomes the source of that name."""
    position, listed = 0, exercise_list(book, page.address.rpartition("/")[2][:2])
    cell = dataclasses.replace(cell, source=cell.source.replace("<!-- exercises -->", listed))
    for found in SHOW.finditer(cell.source):
        page.prose(links.rewrite(book, page.address, cell.source[position:found.start()], f"{where}:{cell.line}"))
        position = found.end()
        try:
            page.block(source_of(book, page.address, *found.groups()))
        except KeyError as missing:
            book.findings.append(f"{where}:{cell.line + cell.source[:found.start()].count(chr(10))}: no such name to show: "
                                 f"{missing.args[0]}")
    page.prose(links.rewrite(book, page.address, cell.source[position:], f"{where}:{cell.line + cell.source[:position].count(chr(10))}"))


def exercise_list(book: links.Book, number: str) -> str:
    """The exercises of a chapter as a Markdown list, the shortest first; page 00 has none."""
    found = [(e.get("minutes") or 0, e.get("title") or name, name, e.get("kind")) for name, e in book.exercises.items()
             if e.get("chapter", "").startswith(f"ch{number}")]
    kinds = {"write": "write the function", "predict": "predict", "bug": "find the bug", "target": "reach a target"}
    return "\n".join(f"- [{title}](exercise:{name}): {kinds.get(kind, 'write the function')}"
                     f"{f', about {minutes} minutes' if minutes else ''}" for minutes, title, name,
                     kind in sorted(found, key=lambda f: f[:3]))


def place_of(book: links.Book, dotted: str, begin: str | None, end: str | None) -> tuple[names.Module, int, int]:
    """The module and the lines, from and to, that `%show` names. KeyError says what is not there."""
    module, definition = names.find(book.modules, dotted)
    if definition is None:
        raise KeyError(dotted)
    first, last = definition.first, definition.end
    lines = {n: line.strip() for n, line in enumerate(module.source.splitlines(), 1) if first <= n <= last}

    def line_of(words: str) -> int:
        found = next((n for n in lines if n >= first and lines[n].startswith(words)), None)
        if found is None:
            raise KeyError(f'{dotted} "{words}"')
        return found

    first = line_of(begin) if begin else first
    return module, first, line_of(end) if end else last


def source_of(book: links.Book, page: str, dotted: str, begin: str | None = None, end: str | None = None) -> str:
    module, first, last = place_of(book, dotted, begin, end)
    lines = highlight.part_of(module.source, first, last)
    address = links.href(page, module.page, anchor=f"L{first}")
    code = code_pages.shown(book, module, page, lines, first, last, anchors=False)
    if begin and (exercise := links.solution(book, module, dotted.removeprefix(f"{module.name}."))):
        code = (f'<details class="mc-solution"><summary>A part of the book\'s version, which solves exercise {exercise}</summary>'
                f'{code}</details>')
    return (f'<div class="mc-shown"><p class="mc-path"><a href="{address}"><code>{module.path}</code>, '
            f'{f"lines {first} to {last}" if first < last else f"line {first}"}</a></p>{code}</div>')


def footer(book: links.Book, page: Page, path: pathlib.Path, stage: str):
    """The code of the chapter, its exercises, and the page as a notebook."""
    modules = names.reading_order([m for m in book.modules.values() if m.chapter == stage]) if stage else []
    if modules:
        page.prose("## The code of this chapter")
        parts = {covers: [f"- [{m.title}]({links.href(page.address, m.page)}) (`{m.path.rpartition('/')[2]}`, "
                          f"{len(m.source.splitlines())} lines)" for m in modules if m.is_coverage is covers] for covers in (False, True)}
        page.prose("\n".join(parts[False]))
        if parts[True]:
            page.prose("Coverage, which is registered with it item by item; read one of these for an example:\n\n" + "\n".join(parts[True]))
    page.prose(f"This page is a program: [download it as a notebook]({path.stem}.ipynb){{ download }} that runs where minicompile is "
               f"installed (`make install`).")


def notebook(book: links.Book, path: pathlib.Path, root: pathlib.Path) -> str:
    """The page as .ipynb."""
    import jupytext
    made = jupytext.reads(notebook_text(book, path), fmt="py:percent")
    made["metadata"]["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    for n, cell in enumerate(made["cells"]):
        cell["id"] = f"cell-{n}"
    return jupytext.writes(made, fmt="ipynb")


def notebook_text(book: links.Book, path: pathlib.Path) -> str:
    """The notebook in percent format: `%show` lines become the source, links to the book become plain words, the exercises a list, and a
    first code cell finds the chapters' helper."""
    text = []
    for cell in cells.split(path.read_text()):
        source = cell.source
        if cell.kind == "markdown":
            source = SHOW.sub(lambda f: fenced(book, *f.groups()), source.replace("<!-- exercises -->", exercise_list(book, path.stem[:2])))
            source = links.LINK.sub(lambda f: f["text"] or f"`{f['target']}`", source)
            text.append("# %% [markdown]\n" + "\n".join(f"# {line}".rstrip() for line in source.split("\n")))
        else:
            text.append("# %%\n" + source)
    if re.search(r"\b_lib\b", path.read_text()):
        text.insert(1, "# %%\n" + SETUP)
    return "\n\n".join(text) + "\n"


SETUP = """# The book's helper and its measured results are in the checkout from which minicompile was installed.
import pathlib, sys, minicompile
sys.path.insert(0, str(pathlib.Path(minicompile.__file__).parents[1]))"""


def fenced(book: links.Book, dotted: str, begin: str | None = None, end: str | None = None) -> str:
    try:
        module, first, last = place_of(book, dotted, begin, end)
    except KeyError:
        return ""
    lines = ["```python", *textwrap.dedent("\n".join(module.source.splitlines()[first - 1:last])).splitlines(), "```"]
    if exercise := links.solution(book, module, dotted.removeprefix(f"{module.name}.")):
        lines = [f"<details><summary>The book's own version: solves exercise {exercise}</summary>", "", *lines, "", "</details>"]
    return "\n".join([f"`{module.path}`:", "", *lines])
