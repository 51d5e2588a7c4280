"""From the sources of the book to `site/`, in order: read, execute, write Markdown, run mkdocs, check the result."""
from __future__ import annotations

import json
import multiprocessing
import os
import pathlib
import pickle
import re
import shutil
import subprocess
import sys
import time

from . import ROOT, SiteError, chapter_pages, code_pages, execute, links, names, pages, pipeline, stepper
from .page import Page, write

WORK, SITE = ".site", "site"
OWN = pathlib.Path(__file__).parent


def read_book(root: pathlib.Path) -> links.Book:
    """The package's names and where every page will be."""
    cache = root / WORK / "cache" / "names.pickle"
    key = names.digest(*names.package_files(root), OWN / "names.py", OWN / "cells.py", sys.version)
    modules = None
    if cache.exists():
        stored = pickle.loads(cache.read_bytes())
        modules = stored[1] if stored[0] == key else None
    if modules is None:
        modules = names.read_package(root)
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.write_bytes(pickle.dumps((key, modules)))
    book = links.Book(modules)
    for path in chapter_pages.sources(root):
        book.chapters[path.stem[:2]] = f"chapters/{path.stem}"
    for chapter in names.chapter_names(modules):
        book.chapters.setdefault(chapter[2:4], f"chapters/{chapter}")
    book.exercises = pages.read_exercises(modules, root)
    return book


def in_child(work, out: pathlib.Path):
    """Call `work()` in a forked process and return what it answers, through a JSON file. SiteError if it fails."""
    process = multiprocessing.get_context("fork").Process(target=lambda: out.write_text(json.dumps(work())))
    process.start()
    process.join(execute.LIMIT)
    if process.is_alive():
        process.kill()
        process.join()
    if process.exitcode:
        raise SiteError(f"{getattr(work, '__module__', '')}.{work.__name__} failed")
    return json.loads(out.read_text())


def installed() -> list[str]:
    """Shown = installed: every module imports from the file that is shown, and has the names that its source defines."""
    import importlib
    found = []
    for module in names.read_package().values():
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
    return found


def remembered(work, name: str, root: pathlib.Path):
    """The answer of `work()` for this package and these versions."""
    key = names.digest(*names.package_files(root), OWN / "stepper.py", OWN / "build.py", execute.versions())
    out = root / WORK / "cache" / f"{name}-{key}.json"
    if not out.exists():
        for old in out.parent.glob(f"{name}-*.json"):
            old.unlink()
        execute.prepare(root)
        try:
            return in_child(work, out)
        except BaseException:
            out.unlink(missing_ok=True)
            raise
    return json.loads(out.read_text())


def titles(book: links.Book, chapters: list[str], made: dict) -> dict:
    return {c: made[book.chapters[c[2:4]]].title for c in chapters}


def narratives(book: links.Book, chapters: list[str], root: pathlib.Path, say) -> list[Page]:
    sources = chapter_pages.sources(root)
    outputs, failures = execute.outputs(sources, root / WORK / "cache" / "cells", root, say)
    book.findings += failures
    made = []
    for path in sources:
        stage = next((c for c in chapters if c[2:4] == path.stem[:2]), "")
        made.append(chapter_pages.chapter_page(book, path, outputs.get(path.stem, []), stage, root))
        target, key = root / WORK / "docs" / "chapters" / f"{path.stem}.ipynb", names.digest(path, *names.package_files(root), OWN / "chapter_pages.py")
        mark = root / WORK / "cache" / "notebooks" / f"{path.stem}.key"
        if not (target.exists() and mark.exists() and mark.read_text() == key):
            write(target, chapter_pages.notebook(book, path, root))
            write(mark, key)
    written = {path.stem[:2] for path in sources}
    made += [chapter_pages.bare_page(book, c, f"{int(c[2:4])}. {pipeline.label(c).capitalize()}") for c in chapters if c[2:4] not in written]
    for extra in ("glossary", "internals_map"):
        path = root / "chapters" / f"{extra}.md"
        if path.exists():
            text = path.read_text()
            page = Page(extra, re.match(r"# (.+)", text)[1] if text.startswith("# ") else extra.replace("_", " ").capitalize())
            page.prose(links.rewrite(book, page.address, text, f"chapters/{extra}.md:1"))
            made.append(page)
    return made


def code(book: links.Book, chapters: list[str], root: pathlib.Path) -> list[Page]:
    """Code pages; a module that links to nothing that moved is taken from the cache."""
    cache = root / WORK / "cache" / "code.pickle"
    key = names.digest(*names.package_files(root), *sorted(OWN.glob("*.py")), *book.chapters.values(), *book.exercises)
    if cache.exists():
        stored, made, findings = pickle.loads(cache.read_bytes())
        if stored == key:
            book.findings += findings
            return made
    before = len(book.findings)
    made = [code_pages.module_page(book, m, "") for m in book.modules.values()]
    cache.write_bytes(pickle.dumps((key, made, book.findings[before:])))
    return made


def navigation(book: links.Book, chapters: list[str], made: dict) -> list:
    """mkdocs' nav: chapters in the order of `minicompile.CHAPTERS`, each with its code pages in reading order."""
    def listed(chapter):
        return [{m.title: f"{m.page}.md"} for m in names.reading_order([m for m in book.modules.values() if m.chapter == chapter])]

    nav = [{"The map": "index.md"}]
    if "00" in book.chapters:
        nav.append({short(made[book.chapters["00"]].title): f"{book.chapters['00']}.md"})
    for chapter in chapters:
        address = book.chapters[chapter[2:4]]
        title = short(made[address].title)
        title = title if title[:1].isdigit() else f"{int(chapter[2:4])}. {title}"
        nav.append({title: [f"{address}.md", *listed(chapter)]})
    rest = [m for m in book.modules.values() if m.chapter not in chapters]
    nav.append({"Around the chapters": [{m.title: f"{m.page}.md"} for m in sorted(rest, key=lambda m: (m.chapter, m.name))]})
    for address, title in (("exercises", "Exercises"), ("stepper", "The stepper"), ("results", "Measured results"), ("glossary", "Glossary"),
                           ("internals_map", "From torch.compile's internals")):
        if address in made:
            nav.append({title: f"{address}.md"})
    nav.append({"API": ["api/index.md", *({pipeline.label(c): f"api/{c}.md"} for c in chapters)]})
    return nav


def short(title: str) -> str:
    """The part of a title that fits into a list."""
    head = re.split(r": ", title, maxsplit=1)
    return (head[1] if re.fullmatch(r"(Chapter )?\d+", head[0]) and len(head) > 1 else head[0]).replace("`", "")


def build(root: pathlib.Path = ROOT, say=print) -> pathlib.Path:
    """Build the book and return the folder of its HTML; SiteError with every finding when something is wrong."""
    start, docs = time.perf_counter(), root / WORK / "docs"
    book = read_book(root)
    chapters = names.chapter_names(book.modules)
    listed = narratives(book, chapters, root, say)
    book.findings += remembered(installed, "installed", root)
    listed += code(book, chapters, root) + pages.api(book, chapters)
    listed += [pages.exercises(book, chapters), pages.results(root), stepper.page(remembered(stepper.record, "stepper", root))]
    addresses = {c: book.chapters[c[2:4]] for c in chapters}
    listed.append(pages.front(book, chapters, addresses, root))
    if book.findings:
        raise SiteError(book.findings)
    made = {page.address: page for page in listed}
    for page in listed:
        page.write(docs)
    for old in docs.rglob("*.md"):
        if old.relative_to(docs).with_suffix("").as_posix() not in made:
            old.unlink()
    for asset in (OWN / "assets").iterdir():
        write(docs / "assets" / asset.name, asset.read_text())
    write(root / WORK / "strip.json", json.dumps({c: pipeline.strip(chapters, addresses, c) for c in ["", *chapters]}))
    say(f"rendered {len(made)} pages in {time.perf_counter() - start:.1f} s")
    make_html(root, navigation(book, chapters, made), say)
    return root / SITE


def make_html(root: pathlib.Path, nav: list, say):
    """Run mkdocs where something has changed since the last time, then check what it made."""
    work, site, start = root / WORK, root / SITE, time.perf_counter()
    write(work / "mkdocs.yml", "INHERIT: ../mkdocs.yml\ndocs_dir: docs\nsite_dir: ../site\nhooks: [../tools/site/hooks.py]\nnav: " + json.dumps(nav) + "\n")
    inputs = [p for folder in (work / "docs", work / "blocks") for p in sorted(folder.rglob("*")) if p.is_file()]
    key = names.digest(root / "mkdocs.yml", work / "mkdocs.yml", work / "strip.json", OWN / "hooks.py", OWN / "links.py",
                       *(f"{p.relative_to(root)} {p.stat().st_size} {p.stat().st_mtime_ns}" for p in inputs))
    done = site / ".built"
    if done.exists() and done.read_text() == key:
        say("nothing has changed")
        return
    done.unlink(missing_ok=True)
    ran = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(work / "mkdocs.yml")],
                         capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"})
    if ran.returncode:
        raise SiteError([line for line in (ran.stdout + ran.stderr).splitlines() if line.strip()])
    say(f"mkdocs took {time.perf_counter() - start:.1f} s")
    if found := links.check_site(site):
        raise SiteError(found)
    done.write_text(key)


def clean(root: pathlib.Path = ROOT):
    for folder in (WORK, SITE):
        shutil.rmtree(root / folder, ignore_errors=True)
