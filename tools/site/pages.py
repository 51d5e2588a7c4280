"""The pages that are neither chapter nor code: front page, exercises, measured results, API, the stepper."""
from __future__ import annotations

import ast
import html
import json
import pathlib

from . import cells, highlight, links, names, pipeline
from .page import Page


def front(book: links.Book, chapters: list[str], addresses: dict, root: pathlib.Path) -> Page:
    """What this is, what it does, measured, and where to start, in one screen; then the map."""
    page = Page("index", "minicompile", hide="toc")
    page.prose("# minicompile\n\n"
               "A `torch.compile` written from scratch, as a book whose chapters are the compiler: it captures Python bytecode into "
               "graphs, differentiates them ahead of time, fuses loops, and writes Triton and C++ kernels. The code you read is the code "
               "that runs.")
    page.block(measured(root))
    page.block(doors(book, chapters, addresses))
    page.prose("## The way of a program")
    page.block(pipeline.full_map(chapters, addresses))
    lines = sum(len(m.source.splitlines()) for m in book.modules.values())
    page.prose(f"[The stepper](stepper.html) shows capture, one bytecode instruction at a time. All {lines:,} lines of the code are here: "
               "each chapter lists its modules, and names in the code lead to their definitions.")
    return page


SHOWN = {"h100-gpt2": "GPT-2, 124M parameters", "h100-nanogpt": "nanoGPT, characters", "h100-resnet50": "ResNet-50, channels last"}
NAMES = {"eager": "eager", "torch": "torch.compile", "minicompile": "minicompile"}


def measured(root: pathlib.Path) -> str:
    """Time per training step in bf16 under each compiler in its default mode, from the committed results."""
    groups, words, compiling = [], [], ""
    for name, title in SHOWN.items():
        path = root / "results" / f"{name}.json"
        if not path.exists():
            continue
        data = json.loads(path.read_text())
        found = {r["task"]["compiler"]: r for r in data["results"] if r["task"]["dtype"] == "bf16" and "ms" in r}
        most = max(found[c]["ms"] for c in NAMES)
        rows = "".join(f'<dt>{shown}</dt><dd><i class="{"ours" if c == "minicompile" else "other"}" style="width:'
                       f'{found[c]["ms"] / most:.1%}"></i><span>{found[c]["ms"]:.1f} ms</span></dd>' for c, shown in NAMES.items())
        groups.append(f'<div><p>{title}</p><dl>{rows}</dl></div>')
        words.append(f"{title}: " + ", ".join(f"{shown} {found[c]['ms']:.1f}" for c, shown in NAMES.items()))
        compiling = compiling or (f" Compiling {title.partition(',')[0]} took {found['minicompile']['cold_seconds']:.0f} s; torch.compile "
                                  f"took {found['torch']['cold_seconds']:.0f} s.")
        gpu = data["hardware"]["gpu"]
    if not groups:
        return "<div></div>"
    about = f"Time of a training step on one {html.escape(gpu)}, bf16: forward, backward and optimizer; shorter is better."
    return (f'<figure class="mc-bench"><div role="img" aria-label="{about} Milliseconds. {html.escape("; ".join(words))}.">'
            f'{"".join(groups)}</div><figcaption>{about}{compiling} <a href="results.html">All measurements</a>, each with its command.'
            '</figcaption></figure>')


def doors(book: links.Book, chapters: list[str], addresses: dict) -> str:
    """Where to start: for readers, for learners, for users."""
    tour, first = book.chapters.get("00"), addresses[chapters[0]] if chapters else ""
    begin = min(book.exercises, key=lambda i: (book.exercises[i].get("chapter", ""), book.exercises[i].get("minutes") or 0), default="ID")
    cards = [
        ("Read", "How does torch.compile work?",
         (f'<a href="{tour}.html">The tour</a> takes one function through all stages on one page. ' if tour else "")
         + (f'Then <a href="{first}.html">chapter 1</a>: {len(chapters)} chapters, in the order of the compiler. '
            "Every output was made by the code beside it, and each chapter is a notebook, too." if first else ""), ""),
        ("Learn", "Write parts of it yourself.",
         f'<a href="exercises.html">{len(book.exercises)} exercises</a>: your function replaces the book\'s in the real compiler, is '
         'graded there, and trains a small GPT with it.', f"python -m exercises start {begin}"),
        ("Use", "Run your model with it.",
         '<code>minicompile.compile(model)</code> does what torch.compile does: <a href="api/index.html">the API</a>. Scripts run '
         'unmodified with <code>python -m minicompile run</code>, and <a href="explorer.html">the explorer</a> shows what is made of one '
         'function:', 'python -m minicompile explore model.py:step "torch.randn(8, 64)"')]
    return '<div class="mc-doors">' + "".join(
        f"<section><h2>{title}</h2><p><b>{question}</b> {text}</p>" +
        (f'<pre class="mc-code" tabindex="0"><code>{html.escape(command)}</code></pre>' if command else "") + "</section>"
        for title, question, text, command in cards) + "</div>"


# ---- exercises --------------------------------------------------------------------------------------------

def read_exercises(modules: dict, root: pathlib.Path) -> dict:
    """identifier -> what is known about it: from tags in the package, and from `@task("ID", title=...)` in exercises/tasks/."""
    found = {}
    for module in modules.values():
        for identifier, line in module.exercises.items():
            found[identifier] = {"module": module, "line": line}
    tasks = root / "exercises" / "tasks"
    for path in [*sorted(tasks.glob("ch*.py")), *tasks.glob("tiny.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "task" and node.args:
                identifier, values = names.literal(node.args[0]), {k.arg: names.literal(k.value) for k in node.keywords}
                if isinstance(identifier, str):
                    known = {k: v for k, v in values.items() if v is not None and k in ("title", "minutes", "kind", "function")}
                    entry = found.setdefault(identifier, {})
                    entry.update(known)
                    entry["chapter"] = next((c for c in {m.chapter for m in modules.values()} if c.startswith(path.stem)), path.stem)
    if (root / "chapters" / "tiny.py").exists():
        found_cells = cells.split((root / "chapters" / "tiny.py").read_text())
        for n, cell in enumerate(found_cells):
            for tag in cell.tags:
                if tag.partition(":")[2] in found:
                    found[tag.partition(":")[2]]["page"] = 1 + sum("page" in c.tags for c in found_cells[:n])
    for entry in found.values():
        entry.setdefault("chapter", entry["module"].chapter if "module" in entry else "")
    return found


KINDS = {"write": "write the function", "predict": "predict", "bug": "find the bug", "target": "reach a target"}


def commands(book: links.Book, chapters: list[str]) -> list[tuple[str, str]]:
    """(command, what it does), with the name of the shortest exercise of the first chapter that has one."""
    first = min(((chapters.index(e["chapter"]), e.get("minutes", 0), i) for i, e in book.exercises.items() if e["chapter"] in chapters),
                default=(0, 0, "ID"))[2]
    return [(f"python -m exercises start {first}", f"writes my/{first}.py: the function without its body"),
            (f"python -m exercises watch {first}", "grades it at every save, until it passes"),
            (f"python -m exercises hint {first}", "the next of three hints"),
            (f"python -m exercises solution {first}", "the book's own, once you have passed"),
            ("python -m exercises status", "your progress"),
            ("python -m exercises grade", "grades all your files, with hidden inputs"),
            ("python -m exercises run nanogpt --mine", "trains a small GPT through what has passed"),
            ("python -m exercises run tiny --mine", "trains tiny's GPT with your parts of the build track")]


def exercises(book: links.Book, chapters: list[str]) -> Page:
    page = Page("exercises", "Exercises")
    page.prose("# Exercises\n\nYour function replaces the book's inside the real compiler, and the compiler runs with it. Start at any "
               "name below; this is the first one, in a checkout after `make install` (`source .venv/bin/activate` makes `python` the "
               "right one):")
    page.block(highlight.plain("\n".join(f"{command:<42}# {what}" for command, what in commands(book, chapters))))
    for chapter in dict.fromkeys([*chapters, *(e["chapter"] for e in book.exercises.values())]):
        listed = {i: e for i, e in book.exercises.items() if e["chapter"] == chapter}
        if not listed:
            continue
        number = chapter[2:4]
        if chapter == "tiny":
            page.prose(TRACK.format(count=len(listed), first=next(iter(listed))))
        else:
            page.prose(f"## [Chapter {int(number)}: {pipeline.label(chapter)}]({book.chapters.get(number, '')}.html)"
                       if number in book.chapters else f"## Chapter {int(number)}: {pipeline.label(chapter)}")
        rows = "".join(
            f'<tr id="{html.escape(i)}"><td><code>{html.escape(i)}</code></td><td>{html.escape(str(e.get("title", "")))}</td>'
            f'<td>{KINDS.get(e.get("kind", "write"), "")}</td><td class="num">{e.get("minutes", "")}</td><td>{place(e)}</td></tr>'
            for i, e in sorted(listed.items(), key=lambda item: item[1].get("minutes", 0) * (chapter != "tiny")))
        page.block('<div class="mc-wide" tabindex="0"><table class="mc-table mc-exercises"><thead><tr><th scope="col">name</th><th '
                   'scope="col">task</th><th scope="col">kind</th>'
                   f'<th scope="col">minutes</th><th scope="col">in</th></tr></thead><tbody>{rows}</tbody></table></div>', search=True)
    return page


TRACK = """## The build track

{count} exercises, in order, that grow a compiler of your own in one file. [tiny](chapters/tiny.html) is a whole `torch.compile` in 1,200
lines of code, and each exercise takes one of its functions away. The first is the handler of one bytecode instruction; the last two
are a fused reduction in Triton and the training of a GPT. Your file is `my/tiny.py`: `start` adds the next function to it, and what you
have written before stands in tiny, too, when the file is graded or run. `python -m exercises run {first}` shows your part at work, and
`python -m exercises run tiny --mine` trains a small GPT in eager, with tiny, and with yours. No GPU is needed: Triton's interpreter
runs your kernels."""


def place(entry: dict) -> str:
    if "page" in entry:
        return f'<a href="chapters/tiny_{entry["page"]}.html"><code>tiny.py</code></a>'
    if "module" not in entry:
        return ""
    href = links.href("exercises", entry["module"].page, anchor="L" + str(entry["line"]))
    return f'<a href="{href}"><code>{entry["module"].path.rpartition("/")[2]}</code></a>'


# ---- results ----------------------------------------------------------------------------------------------

MACHINES = {"h200": "an H200", "h100": "an H100", "cpu": "a CPU"}           # by the beginnings of names, in the order of the page
WORKS = {"captions": "Captions of images", "gpt2": "GPT-2 124M", "nanogpt": "nanoGPT, characters", "resnet50": "ResNet-50",
         "overhead": "What surrounds the kernels", "chains": "Fused chains", "curves": "Block sizes and lengths of rows",
         "zoo": "A zoo of models", "transformers": "Hugging Face transformers", "random-programs": "Random programs",
         "random-tensor-programs": "Random tensor programs", "random-derivatives": "Random derivatives of derivatives",
         "random-expressions": "Random expressions"}


def results(root: pathlib.Path) -> Page:
    """Every committed measurement as a plot of speedups and as a table, with where it was made; those on a GPU first."""
    page = Page("results", "Measured results")
    page.prose("# Measured results\n\n"
               "Each section is one file under `results/`, committed with its command, hardware and versions. Figures are "
               "medians. \"Over eager\" is eager's time divided by this one: more than 1 is faster. The first step includes compilation. A "
               "name with "
               "`reduce-overhead` replays CUDA graphs ([chapter 11](chapters/11_runtime.html)).")
    machines = list(MACHINES)
    made_on = {p: next((m for m in machines if p.stem.startswith(m)), None) for p in (root / "results").glob("*.json")}
    for path in sorted(made_on, key=lambda p: (machines.index(made_on[p]) if made_on[p] else len(machines), p.stem)):
        data = json.loads(path.read_text())
        work = next((words for key, words in WORKS.items() if key in path.stem), path.stem)
        place = MACHINES.get(made_on[path])
        note = f" {data['note'][:1].upper()}{data['note'][1:].rstrip('.')}." if data.get("note") else ""
        page.prose(f"## {work}{f' on {place}' if place else ''}{', slower host' if 'slow' in path.stem else ''}\n\n"
                   f"`{path.name}`: {described(data, note)}")
        if rows := training_rows(data):
            page.block(bars(rows, path.stem))
            page.prose(table(["compiler", "numbers", "ms per step", "over eager", "first step s", "peak GB"],
                             [[r["name"], r["dtype"], f"{r['ms']:.2f}", f"{r['speedup']:.2f}x" if r["speedup"] else "-",
                               f"{r['cold']:.1f}" if r["cold"] else "-", f"{r['peak']:.2f}" if r["peak"] else "-"] for r in rows]))
        elif isinstance(data.get("ms"), dict):
            page.prose(table(["milliseconds", "eager", "torch.compile", "minicompile", "over eager"],
                             [[k, *(f"{v[n]:.1f}" if n in v else "-" for n in ("eager", "torch", "minicompile")),
                               f"{v['eager'] / v['minicompile']:.2f}x"]
                              for k, v in data["ms"].items()]))
        elif "against_torch" in data:
            zoo(page, data)
        elif "pointwise" in data:
            for key in ("pointwise", "softmax"):
                page.prose(table([f"{key}, {name}" if n == 0 else name for n, name in enumerate(data[key][0])],
                                 [[f"{v:,.0f}" for v in row.values()] for row in data[key]]))
        elif "call_us" in data:
            page.prose(table(["apart from kernels", "torch.compile", "minicompile"],
                             [[f"{work}: {what}", *(f"{row[n]['median']:,.1f}" for n in ("torch", "minicompile"))]
                              for key, what in (("call_us", "one call, microseconds"), ("capture_ms", "capture, milliseconds"))
                              for work, row in data.get(key, {}).items()]))
        elif "seeds that differ" in data:
            page.prose(f"{data['programs']:,} programs made {data['graphs']:,} graphs; {data['differ']} of them behave differently when "
                       f"compiled.")
        elif "rungs" in data:
            page.prose("Programs whose answer differs from eager's, by the rung of the ladder that they were run on. A program counts "
                       "where it was found, also if the compiler has been mended since.")
            page.prose(table(["rung", "programs", "graphs", "differ"], [[rung, *(f"{found[k]:,}" for k in ("programs", "graphs", "differ"))]
                             for rung, found in data["rungs"].items()]))
        elif "rows" in data and "ok" in data:
            page.prose(f"{data['ok']} of {data.get('architectures', len(data['rows']))} architectures run, {data.get('one graph', '?')} of "
                       f"them as one graph. "
                       "These have breaks:")
            page.prose(table(["architecture", "graphs", "first break"], [[r["architecture"], str(r.get("graphs", "")),
                              (r.get("breaks") or [""])[0][:90].replace("|", "/")] for r in data["rows"] if r.get("breaks")]))
    return page


def zoo(page: Page, data: dict) -> None:
    """Totals, and a row per model: times as fast as eager under each compiler, or the verdict."""
    def cell(value, form="{:.2f}"):
        return "-" if value is None else form.format(value) if isinstance(value, float) else str(value)
    page.prose(f"{data['chosen']} models of Hugging Face transformers, timm, torchvision and plain PyTorch, built with random "
               "weights. The answers of each are compared with a run in float64, and may be four times as far from it "
               "as eager's. Each is timed in turns with eager, alone on its GPU.")
    totals = data["summary"]
    first, *names = totals[0]
    page.prose(table([first, *(cell(row[first]) for row in totals)],
                     [[name.replace("_", " "), *(cell(row[name]) for row in totals)] for name in names]))
    found: dict = {}
    for r in data["results"]:
        said = f"{r['speed']:.2f}x" if r["verdict"] == "pass" and "speed" in r else r["verdict"]
        found.setdefault(r["model"], {})[r["work"], r["compiler"]] = said
    columns = sorted({key for row in found.values() for key in row}, reverse=True)
    page.block(wide_table(["model", *(f"{kind}, {compiler.replace('torch', 'torch.compile')}" for kind, compiler in columns)],
                          [[model, *(row.get(key, "-") for key in columns)] for model, row in sorted(found.items())]))


def described(data: dict, note: str = "") -> str:
    if "runs" in data:                               # of several machines and days
        machines = dict.fromkeys(run["hardware"]["gpu"] or run["hardware"]["cpu"] for run in data["runs"])
        days = sorted(run["date"] for run in data["runs"])
        return f"{len(days)} runs on {', '.join(machines)}, {days[0]} to {days[-1]}, whose commands are in the file."
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


def wide_table(header: list[str], rows: list[list[str]]) -> str:
    """A table that may be wider than the page; the keyboard scrolls it."""
    def row(cells, tag):
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag.split()[0]}>" for cell in cells) + "</tr>"
    head, body = row(header, 'th scope="col"'), "".join(row(cells, "td") for cells in rows)
    return f'<div class="mc-wide" tabindex="0"><table class="mc-table"><thead>{head}</thead><tbody>{body}</tbody></table></div>'


def bars(rows: list[dict], name: str) -> str:
    """Speedups over eager as horizontal bars."""
    most = max([r["speedup"] for r in rows] + [1])
    words = f"{name}: " + ", ".join(f"{r['name']} {r['dtype']} {r['speedup']:.2f} times eager" for r in rows)
    out = "".join(f'<div><span>{html.escape(r["name"])} {html.escape(r["dtype"])}</span>'
                  f'<span><i class="{"ours" if r["name"].startswith("mini") else "other"}" '
                  f'style="width:{r["speedup"] / most:.1%}"></i>{r["speedup"]:.2f}x</span></div>' for r in rows)
    return f'<div class="mc-bars" role="img" aria-label="{html.escape(words)}">{out}</div>'


# ---- API --------------------------------------------------------------------------------------------------

ENTRIES = 200                    # about so many are one page, half of what a page may weigh


def api(book: links.Book, chapters: list[str]) -> list[Page]:
    """The public names, and some pages per chapter with every function and class that has a docstring."""
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
        modules = names.reading_order([m for m in book.modules.values() if m.chapter == chapter])
        for part in ("", *sorted({part_of(m) for m in modules} - {""})):
            made += api_of(chapter, part, [m for m in modules if part_of(m) == part])
    listing = [f"- [{page.title.removeprefix('API: ')}]({page.address.removeprefix('api/')}.html)" for page in made[1:]]
    index.prose("## By chapter\n\n" + "\n".join(listing))
    return made


def api_of(chapter: str, part: str, modules: list[names.Module]) -> list[Page]:
    """The pages of a part of a chapter. A module that begins after `ENTRIES` begins another page."""
    made, entries = [], ENTRIES + 1
    for module in modules:
        if entries > ENTRIES:
            parts, entries = [part] * bool(part) + [str(len(made) + 1)] * bool(made), 0
            title = ", ".join([pipeline.label(chapter), *parts])
            made.append(Page("api/" + "_".join([chapter, *parts]), f"API: {title}", chapter))
            made[-1].prose(f"# API of chapter {int(chapter[2:4])}: {title}")
        listed = [(n, d) for n, d in module.definitions.items()
                  if d.doc and d.kind in ("function", "class") and not n.startswith("_")]
        if listed:
            made[-1].prose(f"## {module.name.removeprefix(names.PACKAGE + '.')}")
        for name, definition in listed:
            entry(made[-1], name, f"{module.name}.{name}", module, definition, level="###")
        entries += len(listed)
    return made


def part_of(module: names.Module) -> str:
    """The package inside of a chapter that a module is in, whose many small functions have a page of their own; "" if none."""
    parts = module.name.split(".")
    return parts[2] if len(parts) > 3 else ""


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
