"""Where prose points, and whether it is there.

In a chapter: `[text](ref:minicompile.ch05_autograd.partition.choose_saved)` (a name of the package), `(chapter:05)`,
`(code:minicompile/driver.py)`, `(exercise:ID)`. `check_site` looks at the finished HTML once more: every address, every anchor, every size.
"""
from __future__ import annotations

import html
import os.path
import pathlib
import posixpath
import re
import urllib.parse
from dataclasses import dataclass, field

from . import names

LINK = re.compile(r"\[(?P<text>[^\]\n]*(?:\n[^\]\n]+)?)\]\((?P<kind>ref|chapter|code|exercise):(?P<target>[^)\s]+)\)")
FILE = re.compile(r"(?<![\[`])`(?P<path>[\w/]+\.py)`(?!\])")
BUDGET, EXPLORER = 200_000, 2_000_000       # bytes of a page


@dataclass
class Book:
    """Everything that can be pointed at. pages: address without ending -> title; chapters: number -> page; findings: what was wrong."""
    modules: dict
    chapters: dict = field(default_factory=dict)
    exercises: dict = field(default_factory=dict)
    findings: list = field(default_factory=list)


def href(page: str, target: str, ending: str = ".html", anchor: str = "") -> str:
    """The relative address of page `target` as written on page `page`, both without ending."""
    return posixpath.relpath(target + ending, posixpath.dirname(page) or ".") + (f"#{anchor}" if anchor else "")


def solution(book: Book, module, name: str) -> str:
    """The exercise whose answer is the body of this function of a module, or ""."""
    definition = module.definitions[name]
    for cell in module.cells:
        if cell.line <= definition.line < cell.line + len(cell.source.splitlines()):
            exercise = next((tag.partition(":")[2] for tag in cell.tags if tag.startswith("exercise:")), "")
            known = book.exercises.get(exercise, {}).get("function") or name
            return exercise if known == name and definition.kind == "function" else ""
    return ""


def resolve(book: Book, page: str, kind: str, target: str, ending: str = ".html") -> tuple[str, str]:
    """(address, words for an empty text); KeyError for a target that does not exist."""
    if kind == "ref":
        module, definition = names.find(book.modules, target)
        return href(page, module.page, ending, f"L{definition.line}" if definition else ""), f"`{target.rpartition('.')[2]}`"
    if kind == "chapter" and target.startswith("tiny"):                   # tiny.3 is its third part, on the page after the first
        part = int(target.partition(".")[2] or 0)
        return href(page, book.chapters["ti"] + f"_{part + 1}" * (part > 0), ending), f"tiny, part {part}" if part else "tiny"
    if kind == "chapter":
        number = f"{int(target):02d}" if target.isdigit() else next(n for n, p in book.chapters.items() if target in p)
        return href(page, book.chapters[number], ending), f"chapter {int(number)}"
    if kind == "code":
        path, _, anchor = target.partition("#")
        module = next((m for m in book.modules.values() if m.path == path), None)
        if module is None or anchor and not 0 < int(anchor.lstrip("L")) <= len(module.source.splitlines()):
            raise KeyError(target)
        return href(page, module.page, ending, anchor), f"`{path}`"
    if target not in book.exercises:
        raise KeyError(target)
    return href(page, "exercises", ending, target), f"exercise {target}"


def rewrite(book: Book, page: str, text: str, where: str) -> str:
    """Markdown with addresses in place of targets. Unknown ones are noted in `book.findings` with `where` they stand."""
    def link(found):
        try:
            address, words = resolve(book, page, found["kind"], found["target"])
        except (KeyError, StopIteration, ValueError):
            line = text[:found.start()].count("\n")
            path, _, first = where.partition(":")
            book.findings.append(f"{path}:{int(first or 1) + line}: no such {found['kind']}: {found['target']}")
            return found["text"]
        return f"[{found['text'] or words}]({address})"

    return LINK.sub(link, text)


def link_files(book: Book, module, text: str) -> str:
    """Names of modules in a module's own prose, `partition.py` or `ch13_tuning/layouts.py`, become links."""
    paths = {m.path: m for m in book.modules.values()}

    def link(found):
        here = posixpath.dirname(module.path)
        for path in (f"{here}/{found['path']}", f"{posixpath.dirname(here)}/{found['path']}", f"{names.PACKAGE}/{found['path']}"):
            if path in paths and path != module.path:
                return f"[`{found['path']}`]({href(module.page, paths[path].page)})"
        return found[0]

    return "\n".join(line if line.startswith("    ") else FILE.sub(link, line) for line in text.split("\n"))


ID = re.compile(r"""\sid=["']?([^"'\s>]+)""")
ADDRESS = re.compile(r"""<(?P<tag>\w+)\s[^>]*?(?P<attribute>href|src)=(?:"(?P<quoted>[^"]*)"|(?P<bare>[^\s">]+))""")


def read_html(path: pathlib.Path) -> tuple[set, set]:
    """The anchors of a page and the (tag, address) pairs in it."""
    text = path.read_text()
    return {html.unescape(i) for i in ID.findall(text)}, {
        (m["tag"], html.unescape(m["quoted"] if m["quoted"] is not None else m["bare"])) for m in ADDRESS.finditer(text)}


def check_site(site: pathlib.Path, known: dict | None = None) -> list[str]:
    """Broken addresses and anchors, outside requests and pages over the budget, one line each. known: what `read_html` found in which
    state of which file, for the next time."""
    known, pages = {} if known is None else known, {}
    for path in sorted(site.rglob("*.html")):
        state = path.stat().st_size, path.stat().st_mtime_ns
        if known.get(str(path), ((),))[0] != state:
            known[str(path)] = state, *read_html(path)
        pages[path] = known[str(path)]
    found, exists = [], {}
    for path, ((length, _), _, addresses) in pages.items():
        name, folder = path.relative_to(site).as_posix(), str(path.parent)
        if length > (EXPLORER if path.parent == site / "explore" else BUDGET):
            found.append(f"{name}: {length // 1000} kB of HTML, which is too much")
        for tag, address in addresses:
            if re.match(r"[a-z][a-z+.-]*:|//", address):
                if tag != "a" and not address.startswith("data:"):
                    found.append(f"{name}: <{tag}> loads {address}")
                continue
            file, _, anchor = address.partition("#")
            anchor = re.sub(r"^at=([\w-]+).*", r"\1", anchor)           # a line of an explorer, and the panes that are to be shown
            target = pathlib.Path(os.path.normpath(os.path.join(folder, urllib.parse.unquote(file)))) if file else path
            if name == "404.html":
                continue
            if target not in exists:
                exists[target] = target in pages or target.exists()
            if not exists[target]:
                found.append(f"{name}: no such page: {address}")
            elif anchor and target in pages and urllib.parse.unquote(anchor) not in pages[target][1] and not anchor.startswith("__"):
                found.append(f"{name}: no such anchor: {address}")
    return found
