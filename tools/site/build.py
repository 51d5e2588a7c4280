"""From the sources of the book to `site/`: read, write Markdown, run mkdocs while the chapters are executed, put both together, check.

Each step keeps what it made last and makes again what has changed. mkdocs sees prose only; code and outputs are finished HTML that takes
its place afterwards, so a changed output or a changed line of code does not run mkdocs.
"""
from __future__ import annotations

import contextlib
import json
import os
import pathlib
import pickle
import re
import shutil
import subprocess
import sys
import time

from . import ROOT, SiteError, chapter_pages, code_pages, execute, explorers, links, names, pages, pipeline, stepper
from .page import PLACE, Page, write

WORK, SITE = ".site", "site"
OWN = pathlib.Path(__file__).parent


class Stored:
    """A pickled value beside a key: `value` is None when the key is another one than last time."""

    def __init__(self, root: pathlib.Path, name: str, *key):
        self.path, self.key, self.value = root / WORK / "cache" / f"{name}.pickle", names.digest(sys.version, *key), None
        with contextlib.suppress(Exception):                  # not there, half written or from another version: made again
            key, value = pickle.loads(self.path.read_bytes())
            self.value = value if key == self.key else None

    def keep(self, value):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(pickle.dumps((self.key, value)))


def read_book(root: pathlib.Path) -> links.Book:
    """The package's names and where every page will be."""
    stored = Stored(root, "names", OWN / "names.py", OWN / "cells.py", OWN / "highlight.py")
    known = stored.value or {}
    modules = names.read_package(root, known)
    now = {m.path: m for m in modules.values()}
    if len(now) != len(known) or any(known.get(path) is not m for path, m in now.items()):
        stored.keep(now)
    book = links.Book(modules)
    for path in chapter_pages.sources(root):
        book.chapters[path.stem[:2]] = f"chapters/{path.stem}"
    book.exercises = pages.read_exercises(modules, root)
    return book


def installed(modules: list) -> list[str]:
    """Shown = installed: every module imports from the file that is shown, and has the names that its source defines. SiteError if not."""
    import importlib
    found = []
    for module in modules:
        if module.path.endswith("__main__.py"):
            continue
        try:
            there = importlib.import_module(module.name)
        except Exception as error:
            found.append(f"{module.path}:1: cannot be imported: {type(error).__name__}: {error}")
            continue
        if pathlib.Path(there.__file__).resolve() != (ROOT / module.path).resolve():
            found.append(f"{module.path}:1: {there.__file__} is installed instead")
        found += [f"{module.path}:{d.line}: {n} is not in the imported module" for n, d in module.definitions.items()
                  if d.kind in ("function", "class") and not hasattr(there, n)]
    if found:
        raise SiteError(found)
    return found


def jobs(book: links.Book, root: pathlib.Path) -> list[execute.Job]:
    modules, key = list(book.modules.values()), (OWN / "execute.py", execute.versions(), execute.device())
    code = sorted(f"{m.path} {m.code}" for m in modules)
    return [*(execute.page_job(path, root) for path in chapter_pages.sources(root)), *explorers.jobs(),
            execute.Job("installed", lambda: installed(modules), names.digest(OWN / "build.py", *code, *key)),
            execute.Job("stepper", stepper.record, names.digest(OWN / "stepper.py", *key))]


def narratives(book: links.Book, chapters: list[str], root: pathlib.Path) -> list[Page]:
    """The chapters, still without outputs, and their notebooks."""
    sources, made = chapter_pages.sources(root), []
    for path in sources:
        stage = next((c for c in chapters if c[2:4] == path.stem[:2]), "")
        made.append(chapter_pages.chapter_page(book, path, stage, root))
        target, key = root / WORK / "files" / "chapters" / f"{path.stem}.ipynb", names.digest(chapter_pages.notebook_text(book, path),
                                                                                              OWN / "chapter_pages.py")
        mark = root / WORK / "cache" / "notebooks" / f"{path.stem}.key"
        if not (target.exists() and mark.exists() and mark.read_text() == key):
            write(target, chapter_pages.notebook(book, path, root))
            write(mark, key)
    made += [further for page in made for further in page.rest]
    for extra in ("glossary", "internals_map"):
        path = root / "chapters" / f"{extra}.md"
        if path.exists():
            text = path.read_text()
            page = Page(extra, re.match(r"# (.+)", text)[1] if text.startswith("# ") else extra.replace("_", " ").capitalize())
            page.prose(links.rewrite(book, page.address, text, f"chapters/{extra}.md:1"))
            made.append(page)
    return made


def code(book: links.Book, root: pathlib.Path) -> list[Page]:
    """Code pages; the blocks of a module that has not changed and links to nothing that moved are taken from the cache."""
    stored = Stored(root, "code", OWN / "code_pages.py", OWN / "highlight.py", OWN / "links.py", OWN / "page.py")
    known = stored.value or {}
    made = {m.page: code_pages.module_page(book, m, known.get(m.page, ("", []))) for m in book.modules.values()}
    if {page: key for page, (_, (key, _)) in made.items()} != {page: key for page, (key, _) in known.items()}:
        stored.keep({page: entry for page, (_, entry) in made.items()})
    return [page for page, _ in made.values()]


def navigation(book: links.Book, chapters: list[str], made: dict) -> list:
    """mkdocs' nav: chapters in the order of `minicompile.CHAPTERS`, each with its code pages in reading order."""
    def listed(chapter):
        modules = names.reading_order([m for m in book.modules.values() if m.chapter == chapter])
        pages, coverage = ([{m.title: f"{m.page}.md"} for m in modules if m.is_coverage is covers] for covers in (False, True))
        return [*pages, *([{"Coverage": coverage}] if coverage else [])]

    nav = [{"Home": "index.md"}]
    if "00" in book.chapters:
        nav.append({short(made[book.chapters["00"]].title): f"{book.chapters['00']}.md"})
    if "ti" in book.chapters:
        page = made[book.chapters["ti"]]
        nav.append({"tiny, the compiler in one file": [f"{page.address}.md", *({p.title: f"{p.address}.md"} for p in page.rest)]})
    for chapter in chapters:
        address = book.chapters[chapter[2:4]]
        title = short(made[address].title)
        title = title if title[:1].isdigit() else f"{int(chapter[2:4])}. {title}"
        nav.append({title: [f"{address}.md", *({short(p.title): f"{p.address}.md"} for p in made[address].rest), *listed(chapter)]})
    others = sorted(set(book.chapters) - {"00", "ti"} - {chapter[2:4] for chapter in chapters})
    nav += [{short(made[book.chapters[n]].title): f"{book.chapters[n]}.md"} for n in others]
    rest = [m for m in book.modules.values() if m.chapter not in chapters]
    nav.append({"Around the chapters": [{m.title: f"{m.page}.md"} for m in sorted(rest, key=lambda m: (m.chapter, m.name))]})
    for address, title in (("explorer", "The explorer"), ("exercises", "Exercises"), ("stepper", "The stepper"),
                           ("results", "Measured results"), ("glossary", "Glossary"),
                           ("internals_map", "From torch.compile's internals")):
        if address in made:
            nav.append({title: f"{address}.md"})
    nav.append({"API": ["api/index.md", *({made[a].title.removeprefix("API: "): f"{a}.md"} for a in made
                                          if a.startswith("api/") and a != "api/index")]})
    return nav


def neighbours(book: links.Book, chapters: list[str], made: dict) -> dict:
    """address -> (previous, next): chapters follow one another, each with its further pages; code pages hang below their chapter."""
    def pages(number):
        return [p.address for p in (made[book.chapters[number]], *made[book.chapters[number]].rest)]

    line = ["index", *(p for number in sorted(book.chapters) for p in pages(number)), *(["exercises"] if "exercises" in made else [])]
    around = {here: (before, after) for before, here, after in zip(["", *line], line, [*line[1:], ""])}
    for chapter in chapters:
        last = pages(chapter[2:4])[-1]
        code = [m.page for m in names.reading_order([m for m in book.modules.values() if m.chapter == chapter])]
        around |= {here: (before, after) for before, here, after in zip([last, *code], code, [*code[1:], around[last][1]])}
    return around


def short(title: str) -> str:
    """The part of a title that fits into a list."""
    head = re.split(r": ", title, maxsplit=1)
    return (head[1] if re.fullmatch(r"(Chapter )?\d+", head[0]) and len(head) > 1 else head[0]).replace("`", "")


def build(root: pathlib.Path = ROOT, say=print) -> pathlib.Path:
    """Build the book and return the folder of its HTML; SiteError with every finding when something is wrong."""
    start, mkdocs = time.perf_counter(), None
    book = read_book(root)
    running = execute.Execution(jobs(book, root), root / WORK / "cache" / "cells", root, say,
                                {m.path: m.code for m in book.modules.values()})
    try:
        chapters = [c for c in names.chapter_names(book.modules) if c[2:4] in book.chapters]    # no page for one that is not written
        listed = narratives(book, chapters, root)
        narrated = {page.address: page for page in listed}
        steps, recorded, addresses = stepper.page(), explorers.page(book, {}), {c: book.chapters[c[2:4]] for c in chapters}
        listed += [*code(book, root), *pages.api(book, chapters), pages.exercises(book, chapters), pages.results(root), steps, recorded,
                   pages.front(book, chapters, addresses, root)]
        made = {page.address: page for page in listed}
        if not book.findings:
            mkdocs = start_mkdocs(root, write_docs(root, book, chapters, made, addresses))
        outputs, failures = running.wait()
        book.findings += failures
        for path in chapter_pages.sources(root):
            chapter_pages.fill(book, narrated[f"chapters/{path.stem}"], path, outputs.get(path.stem, []), root)
        if book.findings:
            raise SiteError(book.findings)
        steps.blocks = stepper.page(outputs["stepper"]).blocks
        recorded.blocks = explorers.page(book, outputs).blocks
        explorers.write_all(outputs, root / WORK / "files")
        if mkdocs:
            said, _ = mkdocs.communicate()
            if mkdocs.returncode:
                raise SiteError([line for line in said.splitlines() if line.strip()])
            write(root / WORK / "html.key", mkdocs.key)
        say(f"rendered {len(made)} pages in {time.perf_counter() - start:.1f} s")
        publish(root, made, say)
    finally:
        running.stop()
        if mkdocs and mkdocs.poll() is None:
            mkdocs.kill()
    return root / SITE


def write_docs(root: pathlib.Path, book: links.Book, chapters: list[str], made: dict, addresses: dict) -> str:
    """Everything that mkdocs reads; returns its key."""
    work, docs = root / WORK, root / WORK / "docs"
    for page in made.values():
        page.write(docs)
    for asset in (OWN / "assets").iterdir():
        write(docs / "assets" / asset.name, asset.read_text())
    wanted = {docs / f"{address}.md" for address in made} | {docs / "assets" / asset.name for asset in (OWN / "assets").iterdir()} | {
        work / "found" / f"{page.address}.json" for page in made.values() if page.found}
    for old in [*docs.rglob("*"), *(work / "found").rglob("*")]:
        if old.is_file() and old not in wanted:
            old.unlink()
    write(work / "strip.json", json.dumps({c: pipeline.strip(chapters, addresses, c) for c in ["", *chapters]}))
    write(work / "neighbours.json", json.dumps(neighbours(book, chapters, made)))
    write(work / "mkdocs.yml", "INHERIT: ../mkdocs.yml\ndocs_dir: docs\nsite_dir: html\nhooks: [../tools/site/hooks.py]\nnav: "
          + json.dumps(navigation(book, chapters, made)) + "\n")
    inputs = [p for folder in (docs, work / "found") for p in sorted(folder.rglob("*")) if p.is_file()]
    return names.digest(root / "mkdocs.yml", *(work / f for f in ("mkdocs.yml", "strip.json", "neighbours.json")), OWN / "hooks.py",
                        execute.versions(), *(
        f"{p.relative_to(root)} {p.stat().st_size} {p.stat().st_mtime_ns}" for p in inputs))


def start_mkdocs(root: pathlib.Path, key: str):
    """The process of mkdocs, which writes .site/html; None where nothing that it reads has changed."""
    done = root / WORK / "html.key"
    if done.exists() and done.read_text() == key:
        return None
    done.unlink(missing_ok=True)
    process = subprocess.Popen([sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(root / WORK / "mkdocs.yml")],
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"})
    process.key = key
    return process


def publish(root: pathlib.Path, made: dict, say):
    """What mkdocs made, with all blocks in their places, and the notebooks into site/; then look for what is broken in it."""
    html, site = root / WORK / "html", root / SITE
    before, now, changed = Stored(root, "published", pathlib.Path(__file__), OWN / "page.py"), {}, 0
    for path, short in sorted((p, p.relative_to(folder).as_posix()) for folder in (html,
        root / WORK / "files") for p in folder.rglob("*") if p.is_file()):
        target = site / short
        data, page = path.read_bytes(), made.get(short.removesuffix(".html"))
        now[short] = names.digest(path.suffix, data.decode("latin-1"), *(page.blocks if page else []))
        if (before.value or {}).get(short, ("", None)) == (now[short], target.stat().st_mtime_ns if target.exists() else None):
            now[short] = before.value[short]
            continue
        if path.suffix == ".html":
            data = finished(data.decode(), page.blocks if page else []).encode()
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        now[short], changed = (now[short], target.stat().st_mtime_ns), changed + 1
    for old in sorted(p for p in site.rglob("*") if p.is_file()):
        if old.relative_to(site).as_posix() not in now:
            old.unlink()
    before.keep(now)
    say(f"{changed} file{'s' * (changed != 1)} {'have' if changed != 1 else 'has'} changed" if changed else "nothing has changed")
    stored = Stored(root, "links", OWN / "links.py")
    known = dict(stored.value or {})
    if found := links.check_site(site, known):
        raise SiteError(found)
    if changed:
        stored.keep(known)


def finished(text: str, blocks: list[str]) -> str:
    """A page with its blocks, and with what the theme leaves out for screen readers and the keyboard."""
    for number, block in enumerate(blocks):
        text = text.replace(PLACE.format(number), block, 1)
    text = text.replace('data-md-component="search" role="dialog"', 'data-md-component="search" role="dialog" aria-label="Search"')
    text = text.replace("<th></th>", "<td></td>").replace('<th scope="col"></th>', "<td></td>")
    return re.sub(r"<pre>(<span></span>)?<code>", r'<pre class="mc-code" tabindex="0">\1<code>', text)


def clean(root: pathlib.Path = ROOT):
    for folder in (WORK, SITE):
        shutil.rmtree(root / folder, ignore_errors=True)
