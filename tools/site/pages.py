"""The pages that are neither chapter nor code: front page, exercises, measured results, API, the stepper."""
from __future__ import annotations

import ast
import html
import json
import pathlib
import sys

from . import ROOT, highlight, links, names, pipeline
from .page import Page


def front(book: links.Book, chapters: list[str], addresses: dict, root: pathlib.Path) -> Page:
    page = Page("index", "minicompile")
    page.prose("# minicompile\n\nA `torch.compile` written from scratch, as a book whose chapters are the compiler. The code you read is the "
               "code that is installed, and every output was made when this page was.")
    if "00" in book.chapters:
        page.prose(f"Start with the [tour]({book.chapters['00']}.html): one function goes through all stages on one page. Or follow a "
                   "program down the map.")
    page.block(pipeline.full_map(chapters, addresses))
    page.prose("## Use it")
    page.block(highlight.plain("import minicompile\n\nfast = minicompile.compile(model)      # or @minicompile.compile on a function\n"
                               "loss = fast(x).square().mean()\nloss.backward()"))
    lines = sum(len(m.source.splitlines()) for m in book.modules.values())
    page.prose(f"- [Exercises](exercises.html): your functions replace the compiler's, and the compiler runs with them.\n"
               f"- [The stepper](stepper.html): capture, one bytecode instruction at a time.\n"
               f"- [Measured results](results.html) on real models.\n"
               f"- [API](api/index.html), and all {lines:,} lines of the code: each chapter lists its modules.")
    return page


# ---- exercises --------------------------------------------------------------------------------------------

def read_exercises(modules: dict, root: pathlib.Path) -> dict:
    """identifier -> what is known about it: from tags in the package, and from `@task("ID", title=...)` in exercises/tasks/."""
    found = {}
    for module in modules.values():
        for identifier, line in module.exercises.items():
            found[identifier] = {"chapter": module.chapter, "module": module, "line": line}
    for path in sorted((root / "exercises" / "tasks").glob("ch*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "task" and node.args:
                identifier, values = names.literal(node.args[0]), {k.arg: names.literal(k.value) for k in node.keywords}
                if isinstance(identifier, str):
                    known = {k: v for k, v in values.items() if v is not None and k in ("title", "minutes", "kind", "function")}
                    entry = found.setdefault(identifier, {})
                    entry.update(known)
                    entry.setdefault("chapter", next((c for c in {m.chapter for m in modules.values()} if c.startswith(path.stem)), path.stem))
    return found


KINDS = {"write": "write the function", "predict": "predict", "bug": "find the bug", "target": "reach a target"}


def commands(book: links.Book, chapters: list[str]) -> list[tuple[str, str]]:
    """(command, what it does), with the name of the shortest exercise of the first chapter that has one."""
    first = min(((chapters.index(e["chapter"]), e.get("minutes", 0), i) for i, e in book.exercises.items() if e["chapter"] in chapters), default=(0, 0, "ID"))[2]
    return [(f"python -m exercises start {first}", f"writes my/{first}.py: the function without its body"),
            (f"python -m exercises watch {first}", "grades it at every save, until it passes"),
            (f"python -m exercises hint {first}", "the next of three hints"),
            (f"python -m exercises solution {first}", "the book's own, once you have passed"),
            ("python -m exercises status", "your progress"),
            ("python -m exercises grade", "grades all your files, with hidden inputs"),
            ("python -m exercises run nanogpt --mine", "trains a small GPT through what has passed")]


def exercises(book: links.Book, chapters: list[str]) -> Page:
    page = Page("exercises", "Exercises")
    page.prose("# Exercises\n\nYour function replaces the book's inside the real compiler, and the compiler runs with it. Start at any "
               "name below; this is the first one, in a checkout after `make install` (`source .venv/bin/activate` makes `python` the right one):")
    page.block(highlight.plain("\n".join(f"{command:<42}# {what}" for command, what in commands(book, chapters))))
    for chapter in dict.fromkeys([*chapters, *(e["chapter"] for e in book.exercises.values())]):
        listed = {i: e for i, e in book.exercises.items() if e["chapter"] == chapter}
        if not listed:
            continue
        number = chapter[2:4]
        page.prose(f"## [Chapter {int(number)}: {pipeline.label(chapter)}]({book.chapters.get(number, '')}.html)"
                   if number in book.chapters else f"## {chapter}")
        rows = "".join(
            f'<tr id="{html.escape(i)}"><td><code>{html.escape(i)}</code></td><td>{html.escape(str(e.get("title", "")))}</td>'
            f'<td>{KINDS.get(e.get("kind", "write"), "")}</td><td class="num">{e.get("minutes", "")}</td><td>{place(e)}</td></tr>'
            for i, e in sorted(listed.items(), key=lambda item: item[1].get("minutes", 0)))
        page.block('<div class="mc-wide" tabindex="0"><table class="mc-table mc-exercises"><thead><tr><th scope="col">name</th><th scope="col">task</th><th scope="col">kind</th>'
                   f'<th scope="col">minutes</th><th scope="col">in</th></tr></thead><tbody>{rows}</tbody></table></div>', search=True)
    return page


def place(entry: dict) -> str:
    if "module" not in entry:
        return ""
    return f'<a href="{links.href("exercises", entry["module"].page, anchor="L" + str(entry["line"]))}"><code>{entry["module"].path.rpartition("/")[2]}</code></a>'


# ---- results ----------------------------------------------------------------------------------------------

WORKS = {"gpt2": "GPT-2 124M", "nanogpt": "nanoGPT, characters", "resnet50": "ResNet-50", "overhead": "What surrounds the kernels", "chains": "Fused chains",
         "transformers": "Hugging Face transformers", "random-programs": "Random programs"}


def results(root: pathlib.Path) -> Page:
    """Every committed measurement as a plot of speedups and as a table, with where it was made; those on a GPU first."""
    page = Page("results", "Measured results")
    page.prose("# Measured results\n\nEach section is one file under `results/`, committed with its command, hardware and versions. Figures are "
               "medians. \"Over eager\" is eager's time divided by this one: more than 1 is faster. The first step includes compilation. A name with "
               "`reduce-overhead` replays CUDA graphs ([chapter 11](chapters/11_runtime.html)).")
    for path in sorted((root / "results").glob("*.json"), key=lambda p: (not p.stem.startswith("h100"), p.stem)):
        data = json.loads(path.read_text())
        work = next((words for key, words in WORKS.items() if key in path.stem), path.stem)
        place = "an H100" if path.stem.startswith("h100") else "a CPU" if path.stem.startswith("cpu") else ""
        note = f" {data['note'][:1].upper()}{data['note'][1:].rstrip('.')}." if data.get("note") else ""
        page.prose(f"## {work}{f' on {place}' if place else ''}{', slower host' if 'slow' in path.stem else ''}\n\n`{path.name}`: {described(data, note)}")
        if rows := training_rows(data):
            page.block(bars(rows, path.stem))
            page.prose(table(["compiler", "numbers", "ms per step", "over eager", "first step s", "peak GB"],
                             [[r["name"], r["dtype"], f"{r['ms']:.2f}", f"{r['speedup']:.2f}x" if r["speedup"] else "-",
                               f"{r['cold']:.1f}" if r["cold"] else "-", f"{r['peak']:.2f}" if r["peak"] else "-"] for r in rows]))
        elif isinstance(data.get("ms"), dict):
            page.prose(table(["milliseconds", "eager", "torch.compile", "minicompile", "over eager"],
                             [[k, *(f"{v[n]:.1f}" if n in v else "-" for n in ("eager", "torch", "minicompile")), f"{v['eager'] / v['minicompile']:.2f}x"]
                              for k, v in data["ms"].items()]))
        elif "call_us" in data:
            page.prose(table(["apart from kernels", "torch.compile", "minicompile"],
                             [[f"{work}: {what}", *(f"{row[n]['median']:,.1f}" for n in ("torch", "minicompile"))]
                              for key, what in (("call_us", "one call, microseconds"), ("capture_ms", "capture, milliseconds"))
                              for work, row in data.get(key, {}).items()]))
        elif "seeds that differ" in data:
            page.prose(f"{data['programs']:,} programs made {data['graphs']:,} graphs; {data['differ']} of them behave differently when compiled.")
        elif "rows" in data and "ok" in data:
            page.prose(f"{data['ok']} of {data.get('architectures', len(data['rows']))} architectures run, {data.get('one graph', '?')} of them as one graph. "
                       "These have breaks:")
            page.prose(table(["architecture", "graphs", "first break"], [[r["architecture"], str(r.get("graphs", "")),
                              (r.get("breaks") or [""])[0][:90].replace("|", "/")] for r in data["rows"] if r.get("breaks")]))
    return page


def described(data: dict, note: str = "") -> str:
    hardware, versions = data.get("hardware", {}), data.get("versions", {})
    parts = [hardware.get("gpu") or hardware.get("cpu"), *(f"{k} {v}" for k, v in versions.items()),
             *(f"{k} {data[k]}" for k in ("python", "torch", "transformers") if k in data and not versions),
             f"commit `{data['commit']}`" if "commit" in data else None, data.get("date")]
    command = f"\n\n`{data['command']}`" if "command" in data else ""
    return ", ".join(str(p) for p in parts if p) + "." + note + command


def training_rows(data: dict) -> list[dict]:
    found = [r for r in data.get("results", []) if isinstance(r, dict) and "ms" in r and isinstance(r.get("task"), dict)]
    eager = {r["task"].get("dtype"): r["ms"] for r in found if r["task"].get("compiler") == "eager"}
    return [{"name": r["task"]["compiler"].replace("torch", "torch.compile"), "dtype": r["task"].get("dtype", ""), "ms": r["ms"],
             "speedup": eager.get(r["task"].get("dtype"), 0) / r["ms"], "cold": r.get("cold_seconds"),
             "peak": r.get("peak_memory_mb", 0) / 1000} for r in found]


def table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *rows])


def bars(rows: list[dict], name: str) -> str:
    """Speedups over eager as horizontal bars."""
    most = max([r["speedup"] for r in rows] + [1])
    words = f"{name}: " + ", ".join(f"{r['name']} {r['dtype']} {r['speedup']:.2f} times eager" for r in rows)
    out = "".join(f'<div><span>{html.escape(r["name"])} {html.escape(r["dtype"])}</span><span><i class="{"ours" if r["name"].startswith("mini") else "other"}" '
                  f'style="width:{r["speedup"] / most:.1%}"></i>{r["speedup"]:.2f}x</span></div>' for r in rows)
    return f'<div class="mc-bars" role="img" aria-label="{html.escape(words)}">{out}</div>'


# ---- API --------------------------------------------------------------------------------------------------

def api(book: links.Book, chapters: list[str]) -> list[Page]:
    """The public names, and one page per chapter with every function and class that has a docstring."""
    package = book.modules[names.PACKAGE]
    index = Page("api/index", "API")
    index.prose("# API\n\nWhat `import minicompile` offers. It mirrors `torch.compile`.")
    for name in package.public:
        try:
            module, definition = names.find(book.modules, f"{names.PACKAGE}.{name}")
        except KeyError:
            book.findings.append(f"{package.path}:1: __all__ lists {name}, which is not defined")
            continue
        entry(index, name, f"{names.PACKAGE}.{name}", module, definition)
    made = [index]
    for chapter in chapters:
        page = Page(f"api/{chapter}", f"API: {pipeline.label(chapter)}", chapter)
        page.prose(f"# API of chapter {int(chapter[2:4])}: {pipeline.label(chapter)}")
        for module in names.reading_order([m for m in book.modules.values() if m.chapter == chapter]):
            listed = [(n, d) for n, d in module.definitions.items() if d.doc and d.kind in ("function", "class") and not n.startswith("_")]
            if listed:
                page.prose(f"## {module.name.removeprefix(names.PACKAGE + '.')}")
            for name, definition in listed:
                entry(page, name, f"{module.name}.{name}", module, definition, level="###")
        made.append(page)
    index.prose("## By chapter\n\n" + "\n".join(f"- [{pipeline.label(c)}]({c}.html)" for c in chapters))
    return made


def entry(page: Page, name: str, dotted: str, module: names.Module, definition, level: str = "##"):
    address = links.href(page.address, module.page, anchor=f"L{definition.line}" if definition else "")
    if level == "##":
        page.prose(f"## `{name}` {{ #{dotted} }}")
        place = f'<p class="mc-path"><a href="{address}"><code>{module.path}</code></a></p>'
    else:                                       # no entry in the table of contents: a chapter has hundreds of names
        page.block(f'<h3 id="{dotted}"><a href="{address}"><code>{html.escape(name)}</code></a></h3>', search=True)
        place = ""
    signature = f"{name}{definition.signature}" if definition and definition.kind != "value" else name
    doc = definition.doc if definition else module.doc
    page.block(f'<pre class="mc-code mc-signature" tabindex="0"><code>{html.escape(wrapped(signature), False)}</code></pre>{place}')
    if doc:
        page.block(f'<p class="mc-doc">{html.escape(doc, False)}</p>', search=True)


def wrapped(signature: str) -> str:
    """A long signature over several lines."""
    if len(signature) < 100:
        return signature
    import textwrap
    return "\n".join(textwrap.wrap(signature, 96, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False))
