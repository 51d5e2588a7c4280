"""Narratives: executed cells as Markdown, `%show` of the package's source, and the download as a notebook."""
from __future__ import annotations

import ast
import dataclasses
import html
import pathlib
import re

from . import cells, code_pages, execute, highlight, links, names
from .page import HOLE, Page

SHOW = re.compile(r"^%show +(\S+) *$", re.M)


def sources(root: pathlib.Path) -> list[pathlib.Path]:
    return sorted((root / "chapters").glob("[0-9][0-9]_*.py"))


def chapter_page(book: links.Book, path: pathlib.Path, stage: str, root: pathlib.Path) -> Page:
    """The page with holes where outputs go; `fill` closes them."""
    found = cells.split(path.read_text())
    where = path.relative_to(root).as_posix()
    page = Page(f"chapters/{path.stem}", cells.title(found, path.stem), stage)
    for cell in found:
        if cell.kind == "markdown":
            prose(book, page, cell, where)
            continue
        if heading := re.search(r"^# #+ ", cell.source, re.M):
            book.findings.append(f"{where}:{cell.line + cell.source[:heading.start()].count(chr(10))}: a heading in a code cell: # %% [markdown] is missing")
        page.block(f'<div class="mc-cell">{shown_code(cell)}{HOLE}</div>')
    footer(book, page, path, stage)
    return page


def shown_code(cell: cells.Cell) -> str:
    """The code of a cell; what a reader may skip, imports and cells tagged `fold`, behind a line that opens it."""
    code = highlight.plain(cell.source)
    imports = all(isinstance(s, (ast.Import, ast.ImportFrom)) for s in ast.parse(cell.source).body)
    if imports or "fold" in cell.tags:
        return f'<details class="mc-fold"><summary>{"Imports" if imports else "The code of this cell"}</summary>{code}</details>'
    return code


def fill(book: links.Book, page: Page, path: pathlib.Path, outputs: list, root: pathlib.Path):
    """outputs: one list per code cell, None where recorded results are shown."""
    shown, where = [], path.relative_to(root).as_posix()
    for cell, output in zip((c for c in cells.split(path.read_text()) if c.kind == "code"), outputs):
        note = ""
        if "gpu-result" in cell.tags and execute.measurements(cell):
            try:
                note = execute.measured_note(cell, root)
            except KeyError as error:
                book.findings.append(f"{where}:{cell.line}: no measurement on a GPU that this cell reads, or it lacks a field: {error}")
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
            page.block(source_of(book, page.address, found[1]))
        except KeyError:
            book.findings.append(f"{where}:{cell.line + cell.source[:found.start()].count(chr(10))}: no such name to show: {found[1]}")
    page.prose(links.rewrite(book, page.address, cell.source[position:], f"{where}:{cell.line + cell.source[:position].count(chr(10))}"))


def exercise_list(book: links.Book, number: str) -> str:
    """The exercises of a chapter as a Markdown list, the shortest first; page 00 has none."""
    found = [(e.get("minutes") or 0, e.get("title") or name, name, e.get("kind")) for name, e in book.exercises.items()
             if e.get("chapter", "").startswith(f"ch{number}")]
    kinds = {"write": "write the function", "predict": "predict", "bug": "find the bug", "target": "reach a target"}
    return "\n".join(f"- [{title}](exercise:{name}): {kinds.get(kind, 'write the function')}"
                     f"{f', about {minutes} minutes' if minutes else ''}" for minutes, title, name, kind in sorted(found, key=lambda f: f[:3]))


def source_of(book: links.Book, page: str, dotted: str) -> str:
    module, definition = names.find(book.modules, dotted)
    if definition is None:
        raise KeyError(dotted)
    lines = highlight.part_of(module.source, definition.first, definition.end)
    address = links.href(page, module.page, anchor=f"L{definition.line}")
    return (f'<div class="mc-shown"><p class="mc-path"><a href="{address}"><code>{module.path}</code>, lines {definition.first} to '
            f'{definition.end}</a></p>{code_pages.shown(book, module, page, lines, definition.first, definition.end, anchors=False)}</div>')


def footer(book: links.Book, page: Page, path: pathlib.Path, stage: str):
    """The code of the chapter, its exercises, and the page as a notebook."""
    modules = names.reading_order([m for m in book.modules.values() if m.chapter == stage]) if stage else []
    if modules:
        page.prose("## The code of this chapter")
        page.prose("\n".join(f"- [{m.title}]({links.href(page.address, m.page)}) (`{m.path.rpartition('/')[2]}`, "
                             f"{len(m.source.splitlines())} lines)" for m in modules))
    page.prose(f"This page is a program: [download it as a notebook]({path.stem}.ipynb){{ download }} that runs where minicompile is installed (`make install`).")


def bare_page(book: links.Book, chapter: str, words: str) -> Page:
    """A chapter whose narrative is not written yet: its modules, in reading order."""
    page = Page(f"chapters/{chapter}", words, chapter)
    page.prose(f"# {words}\n\nThis chapter has no narrative yet. Its code, in reading order:")
    for module in names.reading_order([m for m in book.modules.values() if m.chapter == chapter]):
        first = links.link_files(book, module, cells.first_paragraph(module.cells)).replace("](", "](") if module.cells else ""
        page.prose(f"## [{module.title}]({links.href(page.address, module.page)})\n\n" + re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", first))
    return page


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
            source = SHOW.sub(lambda f: fenced(book, f[1]), source.replace("<!-- exercises -->", exercise_list(book, path.stem[:2])))
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


def fenced(book: links.Book, dotted: str) -> str:
    try:
        module, definition = names.find(book.modules, dotted)
    except KeyError:
        return ""
    lines = ["```python", *module.source.splitlines()[definition.first - 1:definition.end], "```"]
    if exercise := links.solution(book, module, dotted.removeprefix(f"{module.name}.")):
        lines = [f"<details><summary>The book's own version: solves exercise {exercise}</summary>", "", *lines, "", "</details>"]
    return "\n".join([f"`{module.path}`:", "", *lines])
