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
    started = {line: exercise for exercise, line in module.exercises.items()}
    for n, cell in enumerate(module.cells):
        if cell.kind == "markdown":
            page.prose(links.rewrite(book, module.page, links.link_files(book, module, cell.source), f"{module.path}:{cell.line}"))
        else:
            if exercise := started.get(cell.line):
                page.block(f'<p class="mc-exercise"><a href="{links.href(module.page, "exercises", anchor=exercise)}">Exercise '
                           f'{html.escape(exercise)}</a>: write this yourself before you read it.</p>')
            last = cell.line + len(cell.source.splitlines()) - 1
            page.block(highlight.numbered(coloured[cell.line - 1:last], cell.line))
        if n == 0:
            page.block(header(module, chapter_title))
    if not module.cells:
        page.block(highlight.numbered(coloured, 1))
    return page


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
