"""The modules of the package as pages: prose as prose, code with its real line numbers."""
from __future__ import annotations

import html
import re

from . import cells, highlight, links, names
from .page import Page


def module_page(book: links.Book, module: names.Module, known: tuple = ("", [])) -> tuple[Page, tuple]:
    """The page, and (key, blocks) to pass next time: they are made again only when the source or an address in the code has changed."""
    page = Page(module.page, module.title, stage=module.chapter)
    addresses = targets(book, module)
    key = names.digest(module.source, sorted(addresses.items()), *(links.solution(book, module, n) for n in module.definitions))
    same = known[0] == key
    coloured = None if same else highlight.lines_of(module.source, addresses)
    prose_first = module.cells and module.cells[0].kind == "markdown" and module.cells[0].source.startswith("# ")
    if not prose_first:
        page.prose(f"# {module.title}\n\n" + links.link_files(book, module, module.doc.split("\n\n")[0]))
    for n, cell in enumerate(module.cells):
        if cell.kind == "markdown":
            page.prose(links.rewrite(book, module.page, links.link_files(book, module, cell.source), f"{module.path}:{cell.line}"))
        else:
            page.block("" if same else code_of(book, module, coloured, cell))
        if n == 0:
            page.block("" if same else header(module))
    if not module.cells:
        page.block("" if same else highlight.numbered(coloured, 1))
    if same:
        page.blocks = known[1]
    return page, (key, page.blocks)


def code_of(book: links.Book, module: names.Module, coloured: list[str], cell: cells.Cell) -> str:
    """A cell of code, with imports of three lines and more behind a line that opens them."""
    lines, imports, first = cell.source.split("\n"), cells.import_lines(cell), cell.line
    last = first + len(lines) - 1
    if imports < 3:
        return shown(book, module, module.page, coloured, first, last)
    while imports < len(lines) and not lines[imports]:
        imports += 1
    rest = shown(book, module, module.page, coloured, first + imports, last) if imports < len(lines) else ""
    text = highlight.numbered(coloured[first - 1:first + imports - 1], first)
    return f'<div class="mc-parts"><details class="mc-fold"><summary>Imports</summary>{text}</details>{rest}</div>'


def shown(book: links.Book, module: names.Module, page: str, coloured: list[str], first: int, last: int, anchors: bool = True) -> str:
    """Lines `first` to `last`; the body of a function that answers an exercise is folded away."""
    parts, at = [], first
    for name, d in sorted(module.definitions.items(), key=lambda item: item[1].line):
        if first <= d.line <= last and (exercise := links.solution(book, module, name)):
            address = links.href(page, "exercises", anchor=exercise)
            parts += [f'<p class="mc-exercise"><a href="{address}">Exercise {html.escape(exercise)}</a>: write this yourself before you '
                      f'read it.</p>{highlight.numbered(coloured[at - 1:d.body - 1], at, anchors)}',
                      f'<details class="mc-solution"><summary>The book\'s own version: solves exercise {html.escape(exercise)}</summary>'
                      f'{highlight.numbered(coloured[d.body - 1:d.end], d.body, anchors)}</details>']
            at = d.end + 1
    if at <= last:
        parts.append(highlight.numbered(coloured[at - 1:last], at, anchors))
    return f'<div class="mc-parts">{"".join(parts)}</div>' if len(parts) > 1 else parts[0]


def header(module: names.Module) -> str:
    """Where the module stands, and its names by section, which the search finds. The table of contents gives its place to the code where
    a window is narrow."""
    listed = {d.line: f'<a href="#L{d.line}"><code>{html.escape(name)}</code></a>' for name, d in module.definitions.items()
              if d.kind in ("function", "class") and not name.startswith("_")}
    sections = [(c.line, c.source.split("\n")[0][3:].strip()) for c in module.cells if c.kind == "markdown" and c.source.startswith("## ")]
    rows = []
    for (first, title), last in zip([(0, ""), *sections], [*(line for line, _ in sections), 10 ** 9]):
        inside = ", ".join(link for line, link in sorted(listed.items()) if first <= line < last)
        heading = f'<a href="#{anchor(title)}">{html.escape(title.replace("`", ""))}</a>' if title else ""
        rows += [": ".join(filter(None, (heading, inside)))] if heading or inside else []
    count = "1 name" if len(listed) == 1 else f"{len(listed)} names"
    defines = f'<details class="mc-names"><summary>{count}</summary><p>{"<br>".join(rows)}</p></details>' if listed else ""
    return f'<p class="mc-path"><code>{module.path}</code></p>{defines}'


def anchor(heading: str) -> str:
    """What mkdocs calls a heading; `links.check_site` would find another."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def targets(book: links.Book, module: names.Module) -> dict:
    """(line, column) -> (length, address) for names that the package defines."""
    known, lines = {}, module.source.splitlines()
    for name, (origin, original) in module.imports.items():
        try:
            where, definition = names.find(book.modules, f"{origin}.{original}")
        except KeyError:
            continue
        known[name] = links.href(module.page, where.page, anchor=f"L{definition.line}" if definition else "")
    for name, definition in module.definitions.items():
        if definition.kind in ("function", "class"):
            known[name] = f"#L{definition.line}"
    return {(line, column): (len(name), known[name]) for line, column, name in module.used
            if name in known and lines[line - 1][column:column + len(name)] == name}
