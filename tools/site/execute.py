"""Chapters run: each page in a process of its own, forked from one that has imported torch and the package."""
from __future__ import annotations

import ast
import contextlib
import dataclasses
import html
import io
import json
import linecache
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import re
import signal
import sys
import time
import traceback
import types

from . import ROOT, cells, listings, names

LIMIT = 170                     # seconds for one page
SHOWN = 24_000                  # characters of text that one cell may show
SOURCES = (f"{names.PACKAGE}/", "chapters/", "exercises/", "results/", names.PACKAGE, "chapters", "exercises", "results")
RESULTS = "gpu_results"         # folder beside the chapters: results of cells that need a GPU


def device() -> str:
    """Pages are executed without a GPU unless MINICOMPILE_SITE_GPU is set, so that every machine builds the same book."""
    return "gpu" if os.environ.get("MINICOMPILE_SITE_GPU") else "cpu"


def versions() -> str:
    """What outputs depend on beside the sources. Read from metadata: importing torch takes seconds."""
    from importlib import metadata
    found = [sys.version.split()[0]]
    for package in ("torch", "triton", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{package} {metadata.version(package)}")
    return ", ".join(found)


def prepare(root: pathlib.Path = ROOT):
    """Import what every page needs, once, before forking."""
    if device() == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for folder in (root / "chapters", root):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    import torch

    from minicompile.ch01_graphs.fake import FakeMode
    torch.set_num_threads(1)
    before = os.environ.get("TRITON_INTERPRET")
    if device() == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"        # what Triton defines when it is imported has to suit chapter 9
    x = FakeMode().from_real(torch.ones(2, 2))
    torch.nn.functional.gelu(x @ x)                 # for its first fake torch imports 900 modules, Triton among them, in a second
    if before is None:
        os.environ.pop("TRITON_INTERPRET", None)


def show(value) -> list[dict]:
    """The outputs of a last expression: HTML or SVG where the object has it, else its repr."""
    if value is None:
        return []
    for method in ("_repr_html_", "_repr_svg_"):
        if callable(made := getattr(type(value), method, None)) and (text := made(value)):
            return [{"kind": "html", "text": text}]
    return [{"kind": "text", "text": repr(value)}]


def clean(text: str) -> str:
    """Without terminal colours and places of this machine."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text).replace(f"{ROOT}/", "").replace(f"{pathlib.Path.home()}/", "~/")
    text = re.sub(r"(?<=[\"' (\n])/\S*?/(?:site|dist)-packages/", "", text)
    return text if len(text) <= SHOWN else text[:SHOWN] + f"\n... {len(text) - SHOWN:,} more characters"


def run_cell(cell: cells.Cell, namespace: dict, path: str) -> list[dict]:
    """Execute one cell at its real place in its file, so that tracebacks and `inspect` show the right lines."""
    tree = ast.parse("\n" * (cell.line - 1) + cell.source, path)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(tree, path, "exec"), namespace)
        value = eval(compile(ast.Expression(last.value), path, "eval"), namespace) if last is not None else None
        shown = show(value)
    printed = [{"kind": "text", "text": said.getvalue().rstrip("\n")}] if said.getvalue().strip() else []
    if not printed and prints(tree):
        raise ValueError("this cell prints, and nothing came out: does it still find what it looks for?")
    return [{**output, "text": clean(output["text"]) if output["kind"] == "text" else output["text"].replace(f"{ROOT}/", "")}
            for output in [*printed, *shown]]


def prints(tree: ast.AST) -> bool:
    """Whether executing it is bound to call `print`, but for loops over nothing."""
    later = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda | ast.If | ast.Try
    return any(isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "print" or not isinstance(n, later) and prints(n)
               for n in ast.iter_child_nodes(tree))


def run_page(path: pathlib.Path, root: pathlib.Path = ROOT, only_recorded: bool = True) -> list:
    """Outputs per code cell of a page, None for cells that show recorded results. Raises what a cell raises."""
    found, shown = cells.split(path.read_text()), str(path)
    module = types.ModuleType("chapter_" + path.stem)
    module.__file__ = shown
    sys.modules[module.__name__] = module
    if not path.stem[0].isdigit():                   # a page that is also a module shows what it shows as a program
        module.__name__ = "__main__"
    linecache.checkcache(shown)
    results, asked = [], {}
    with listings.listening() as compiled:
        for cell in found:
            if cell.kind == "code":
                recorded = "gpu-result" in cell.tags and not measurements(cell) and only_recorded
                with listings.unheard() if "unheard" in cell.tags else contextlib.nullcontext():
                    results.append(None if recorded else run_cell(cell, module.__dict__, shown))
                for call in (tag.partition(":")[2] for tag in cell.tags if tag.startswith("explore:")):
                    asked[len(results) - 1] = listings.graph_of(compiled, call, module.__dict__)
    return listings.with_explorers(compiled, results, path.stem, asked) if only_recorded else results


# ---- what an answer depends on ----------------------------------------------------------------------------
#
# An answer is used again while its key is the same and everything it needs is. A page needs the code of the modules that are loaded when
# it ends (without comments and prose, which do not run), the text of the files that it opened, among them those whose source it shows,
# and the text of each file that its outputs name, because line numbers may stand behind the name.

@dataclasses.dataclass
class Job:
    """Work that runs in a process of its own and answers with plain data. key: what `needs` cannot see. path: the page, if it is one."""
    name: str
    work: object
    key: str
    path: pathlib.Path | None = None


def page_job(path: pathlib.Path, root: pathlib.Path = ROOT) -> Job:
    code = [cell for cell in cells.split(path.read_text()) if cell.kind == "code"]
    return Job(path.stem, lambda: run_page(path, root), names.digest(*(f"{c.tags} {c.source}" for c in code), versions(), device(),
                                                                     pathlib.Path(__file__), pathlib.Path(cells.__file__)), path)


def notice(opened: set):
    """Add to `opened` the files that this process and its children read and the folders that they list, but for Python's own imports."""
    def hook(event, args):
        if event in ("open", "os.listdir", "os.scandir") and isinstance(args[0], (str, os.PathLike)):
            caller = sys._getframe(1).f_code.co_filename
            if not caller.startswith("<frozen importlib") and not (event == "open" and isinstance(args[1], str) and args[1][:1] in "wax"):
                opened.add(os.path.abspath(args[0]))

    sys.addaudithook(hook)


def inside(path: str, root: pathlib.Path) -> str:
    """`path` from the root; "" for what is not one of the book's sources."""
    short = os.path.relpath(path, root)
    return short if short.startswith(SOURCES) and "__pycache__" not in short and not short.endswith(".so") else ""


def needs(job: Job, answer, opened: set, root: pathlib.Path, now: "Now") -> dict:
    said, own = json.dumps(answer), os.path.relpath(job.path, root) if job.path else ""
    loaded = {inside(file, root) for m in list(sys.modules.values()) if isinstance(file := getattr(m, "__file__", None), str)} - {"", own}
    somewhere = re.search(r"\blines? \d", said) is not None                  # of which file?
    exact = {f for f in loaded if somewhere or re.search(rf"\b{re.escape(os.path.basename(f))}\b", said)}
    exact |= {inside(f, root) for f in opened} - {"", own} | {inside(str(f), root) for f in names.package_files(root) if f.suffix != ".py"}
    found = [f"code:{f}" for f in loaded - exact] + [f"file:{f}" for f in exact] + [f"file:{names.PACKAGE}"]
    if own and (somewhere or job.path.stem in said):
        found.append(f"places:{own}")
    return {need: "" if now.edited(need) else now(need) for need in sorted(found)}


class Now:
    """What a need is at present: `now("file:results/h100.json")`. codes: path -> hash of the code, where it is known already."""

    def __init__(self, root: pathlib.Path, codes: dict | None = None):
        self.root, self.codes, self.found, self.began = root, codes or {}, {}, time.time()

    def edited(self, need: str) -> bool:
        """Whether its file is newer than this object, so that it may have been read in another state."""
        path = self.root / need.partition(":")[2]
        return path.is_file() and path.stat().st_mtime > self.began and need.removeprefix("code:") not in self.codes

    def __call__(self, need: str) -> str:
        if need not in self.found:
            kind, _, short = need.partition(":")
            path = self.root / short
            if not path.exists():
                self.found[need] = "gone"
            elif kind == "places":
                self.found[need] = names.digest(*(cell.line for cell in cells.split(path.read_text()) if cell.kind == "code"))
            elif kind == "code":
                self.found[need] = self.codes.get(short) or names.code_digest(ast.parse(path.read_text()))
            else:
                self.found[need] = names.digest(path) if path.is_file() else names.digest(*sorted(
                    name for name in os.listdir(path) if name[0] not in "._" or name.endswith(".py")))
        return self.found[need]


# ---- processes --------------------------------------------------------------------------------------------

def child(job: Job, root: pathlib.Path, out: pathlib.Path, opened: set, now: Now):
    os.chdir(root)
    start, answer = time.perf_counter(), {"key": job.key}
    try:
        answer["outputs"] = job.work()
        answer["needs"] = needs(job, answer["outputs"], opened, root, now)
        answer["seconds"] = time.perf_counter() - start
    except BaseException as error:
        own = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(job.path)]
        where = f"{job.path.relative_to(root)}:{own[-1].lineno if own else 1}" if job.path else job.name
        answer = {"error": f"{where}: {type(error).__name__}: {error}", "trace": traceback.format_exc()}
    new = out.with_suffix(".new")
    new.write_text(json.dumps(answer))
    new.replace(out)
    os._exit(0)


def run_jobs(jobs: list, root: pathlib.Path, now: Now, say, sent):
    """In a process of its own: import once, run (job, file for its answer) side by side, send one line per failure."""
    os.setsid()
    parent = os.getppid()
    opened: set = set()
    notice(opened)
    try:
        prepare(root)
    except BaseException as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if inside(f.filename, root)]
        say(traceback.format_exc())
        where = f"{inside(frames[-1].filename, root)}:{frames[-1].lineno}: " if frames else ""
        sent.send([f"{where}{type(error).__name__}: {error}"])
        os._exit(0)
    at_once = min(8, max(2, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2))
    fork, waiting, running, failures = multiprocessing.get_context("fork"), list(jobs), [], []
    while waiting or running:
        while waiting and len(running) < at_once:
            job, out = waiting.pop(0)
            out.unlink(missing_ok=True)
            process = fork.Process(target=child, args=(job, root, out, opened, now))
            process.start()
            running.append((process, job, out, time.perf_counter()))
        if os.getppid() != parent:                              # nobody waits for this any more
            os.killpg(0, signal.SIGKILL)
        multiprocessing.connection.wait([entry[0].sentinel for entry in running], timeout=1)
        for entry in list(running):
            process, job, out, start = entry
            late = time.perf_counter() - start > LIMIT
            if process.is_alive() and not late:
                continue
            if late:
                process.kill()
            process.join()
            running.remove(entry)
            say(f"  ran {job.path.name if job.path else job.name} in {time.perf_counter() - start:.1f} s")
            answer = json.loads(out.read_text()) if out.exists() else {
                "error": f"{job.path.relative_to(root) if job.path else job.name}:1: " + (
                f"took longer than {LIMIT} s" if late else f"the process died (exit code {process.exitcode})")}
            if "error" in answer:
                failures.append(answer["error"])
                say(answer.get("trace", ""))
                out.unlink(missing_ok=True)
    sent.send(failures)
    os._exit(0)


class Execution:
    """Jobs whose stored answer does not hold any more run while the caller does something else. `wait` gives (answers by name,
    failures)."""

    def __init__(self, jobs: list[Job], cache: pathlib.Path, root: pathlib.Path = ROOT, say=lambda line: None, codes: dict | None = None):
        cache.mkdir(parents=True, exist_ok=True)
        self.files, self.process, now = {job.name: cache / f"{job.name}.json" for job in jobs}, None, Now(root, codes)
        stored = {job.name: json.loads(file.read_text()) if (file := self.files[job.name]).exists() else {} for job in jobs}
        stale = [job for job in jobs if not holds(stored[job.name], job, now)]
        if stale:
            stale.sort(key=lambda job: -stored[job.name].get("seconds", 0))         # the slowest first: the last ones fill the gaps
            self.received, sent = multiprocessing.Pipe(False)
            sys.stdout.flush()
            self.process = multiprocessing.get_context("fork").Process(
                target=run_jobs, args=([(job, self.files[job.name]) for job in stale], root, now, say, sent))
            self.process.start()
            sent.close()

    def wait(self) -> tuple[dict, list[str]]:
        failures = []
        if self.process:
            try:
                failures = self.received.recv()
            except EOFError:
                failures = ["the process that runs the chapters died"]
            self.process.join()
        return {name: json.loads(file.read_text())["outputs"] for name, file in self.files.items() if file.exists()}, failures

    def stop(self):
        """End what still runs."""
        if self.process and self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.join()


def holds(stored: dict, job: Job, now: Now) -> bool:
    return stored.get("key") == job.key and all(now(need) == value for need, value in stored["needs"].items())


def outputs(paths: list[pathlib.Path], cache: pathlib.Path, root: pathlib.Path = ROOT, say=lambda line: None) -> tuple[dict, list[str]]:
    """({page name: outputs per code cell}, failures)."""
    return Execution([page_job(path, root) for path in paths], cache, root, say).wait()


# ---- results of a GPU -------------------------------------------------------------------------------------

#
# A `gpu-result` cell shows what it showed on a GPU, from the record beside the chapters. One that is also tagged `results:NAME` runs
# everywhere, since it only reads the committed measurements `results/NAME.json`; they say where they were made.

def measurements(cell: cells.Cell) -> list[str]:
    return [tag.partition(":")[2] for tag in cell.tags if tag.startswith("results:")]


def measured_note(cell: cells.Cell, root: pathlib.Path) -> str:
    """Hardware, versions and commits of the measurements that a cell shows; KeyError for one that is not there, does not say, or is
    not read by the cell."""
    places: dict[str, list] = {}
    for name in measurements(cell):
        file = root / "results" / f"{name}.json"
        if not file.exists() or f'"{name}"' not in cell.source:
            raise KeyError(name)
        data = json.loads(file.read_text())
        versions = ", ".join(f"{k} {v}" for k, v in data["versions"].items())
        hardware = data["hardware"]
        places.setdefault(f"{hardware['gpu'] or hardware['cpu']}, {versions}", []).append(f"{name} at commit {data['commit']}")
    return "; ".join(f"{place}: {', '.join(which)}" for place, which in places.items())


def recorded(path: pathlib.Path, cell: cells.Cell) -> tuple[list[dict], str]:
    """The committed outputs of a `gpu-result` cell and a line that says where they were made; KeyError when the cell has changed
    since, or was never run."""
    file = path.parent / RESULTS / f"{path.stem}.json"
    data = json.loads(file.read_text()) if file.exists() else {"cells": {}}
    outputs = data["cells"][names.digest(cell.source)]
    return outputs, f"{data['hardware']}, {data['versions']}, commit {data['commit']}"


def record(path: pathlib.Path, root: pathlib.Path = ROOT) -> pathlib.Path:
    """Run a page on a machine with a GPU and write the outputs of its `gpu-result` cells beside it."""
    import subprocess

    import torch
    results = run_page(path, root, only_recorded=False)
    code = [cell for cell in cells.split(path.read_text()) if cell.kind == "code"]
    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=root, capture_output=True, text=True).stdout.strip()
    data = {"commit": commit, "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU", "versions": versions(),
            "cells": {names.digest(c.source): out for c, out in zip(code, results) if "gpu-result" in c.tags}}
    file = path.parent / RESULTS / f"{path.stem}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(data, indent=1) + "\n")
    return file


LONG = 60               # lines of an output; what is longer scrolls in a window of its own


def output_html(outputs: list[dict], note: str = "") -> str:
    """What a cell showed, as one block."""
    parts = [f'<pre class="mc-out{" mc-long" if o["text"].count(chr(10)) > LONG else ""}" tabindex="0"><code>'
             f'{html.escape(o["text"], False)}</code></pre>' if o["kind"] == "text" else
             f'<div class="mc-rich" tabindex="0">{o["text"]}</div>' for o in outputs]
    parts = [part + (f'<p class="mc-opens"><a href="../{o["explorer"]}">Open in the explorer</a></p>' if "explorer" in o else "")
             for part, o in zip(parts, outputs)]
    return "".join(parts) + (f'<p class="mc-note">Measured on {html.escape(note)}</p>' if note else "")
