"""The modules of the package as pages: prose as prose, code with its real line numbers."""
from __future__ import annotations

import html

from . import highlight, links, names
from .page import Page


def module_page(book: links.Book, module: names.Module, chapter_title: str) -> Page:
    page = Page(module.page, module.title, stage=module.chapter)
    addresses = targets(book, module)
    coloured = highlight.lines_of(module.source, addresses)
    prose_first = module.cells and module.cells[0].kind == "markdown" and module.cells[0].source.startswith("# ")
    if not prose_first:
        page.prose(f"# {module.title}\n\n" + links.link_files(book, module, (module_doc(module))))
    for n, cell in enumerate(module.cells):
        if cell.kind == "markdown":
            page.prose(links.rewrite(book, module.page, links.link_files(book, module, cell.source), f"{module.path}:{cell.line}"))
        else:
            last = cell.line + len(cell.source.splitlines()) - 1
            page.block(shown(book, module, module.page, coloured, cell.line, last))
        if n == 0:
            page.block(header(module, chapter_title))
    if not module.cells:
        page.block(highlight.numbered(coloured, 1))
    return page


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


def module_doc(module: names.Module) -> str:
    import ast
    doc = ast.get_docstring(module.tree) or ""
    return doc.split("\n\n")[0] if doc else ""


def header(module: names.Module, chapter_title: str) -> str:
    """Where the module stands, and its names, which the search finds."""
    listed = [f'<a href="#L{d.line}"><code>{html.escape(name)}</code></a>' for name, d in module.definitions.items()
              if d.kind in ("function", "class") and not name.startswith("_")]
    defines = f'<details class="mc-names"><summary>{len(listed)} names</summary><p>{", ".join(listed)}</p></details>' if listed else ""
    return f'<p class="mc-path"><code>{module.path}</code></p>{defines}'


def targets(book: links.Book, module: names.Module) -> dict:
    """(line, column) -> (length, address) for names that the package defines."""
    known = {}
    for name, (origin, original) in module.imports.items():
        try:
            where, definition = names.find(book.modules, f"{origin}.{original}")
        except KeyError:
            continue
        known[name] = links.href(module.page, where.page, anchor=f"L{definition.line}" if definition else "")
    for name, definition in module.definitions.items():
        if definition.kind in ("function", "class"):
            known[name] = f"#L{definition.line}"
    return {(line, column): (len(name), known[name]) for line, column, name in highlight.uses(module.tree, set(known))
            if module.source.splitlines()[line - 1][column:column + len(name)] == name}
