"""Chapters run: each page in a process of its own, forked from one that has imported torch and the package."""
from __future__ import annotations

import ast
import contextlib
import html
import io
import json
import linecache
import multiprocessing
import os
import pathlib
import re
import sys
import time
import traceback
import types

from . import ROOT, cells, names

LIMIT = 170                     # seconds for one page
SHOWN = 24_000                  # characters of text that one cell may show
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
    import minicompile  # noqa: F401
    torch.set_num_threads(1)


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
    return [{**output, "text": clean(output["text"])} if output["kind"] == "text" else output for output in [*printed, *shown]]


def run_page(path: pathlib.Path, root: pathlib.Path = ROOT, only_recorded: bool = True) -> list:
    """Outputs per code cell of a page, None for cells that show recorded results. Raises what a cell raises."""
    found, shown = cells.split(path.read_text()), str(path)
    module = types.ModuleType("chapter_" + path.stem)
    module.__file__ = shown
    sys.modules[module.__name__] = module
    linecache.checkcache(shown)
    results = []
    for cell in found:
        if cell.kind == "code":
            recorded = "gpu-result" in cell.tags and only_recorded
            results.append(None if recorded else run_cell(cell, module.__dict__, shown))
    return results


def child(path: pathlib.Path, root: pathlib.Path, out: pathlib.Path):
    os.chdir(root)
    answer = {}
    try:
        answer["outputs"] = run_page(path, root)
    except BaseException as error:
        own = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
        answer["error"] = f"{path.relative_to(root)}:{own[-1].lineno if own else 1}: {type(error).__name__}: {error}"
        answer["trace"] = traceback.format_exc()
    out.write_text(json.dumps(answer))
    os._exit(0)


def run_pages(jobs: list, root: pathlib.Path = ROOT, at_once: int = 2, say=lambda line: None) -> list[str]:
    """Run pages, `at_once` side by side. jobs: (source, file for the answer). Returns one line per failure."""
    fork, waiting, running, failures = multiprocessing.get_context("fork"), list(jobs), [], []
    while waiting or running:
        while waiting and len(running) < at_once:
            path, out = waiting.pop(0)
            process = fork.Process(target=child, args=(path, root, out))
            process.start()
            running.append((process, path, out, time.perf_counter()))
        time.sleep(0.02)
        for job in list(running):
            process, path, out, start = job
            late = time.perf_counter() - start > LIMIT
            if process.is_alive() and not late:
                continue
            if late:
                process.kill()
            process.join()
            running.remove(job)
            say(f"  ran {path.name} in {time.perf_counter() - start:.1f} s")
            answer = json.loads(out.read_text()) if out.exists() else {"error": f"{path.relative_to(root)}:1: " + (
                f"took longer than {LIMIT} s" if late else f"the process died (exit code {process.exitcode})")}
            if "error" in answer:
                failures.append(answer["error"])
                say(answer.get("trace", ""))
                out.unlink(missing_ok=True)
    return failures


def outputs(paths: list[pathlib.Path], cache: pathlib.Path, root: pathlib.Path = ROOT, say=lambda line: None) -> tuple[dict, list[str]]:
    """({page name: outputs per code cell}, failures). What is in the cache under the hash of the page, the package, the versions
    and the device is not run again."""
    cache.mkdir(parents=True, exist_ok=True)
    ground = names.digest(*names.package_files(root), *sorted((root / "chapters").glob("_*.py")), pathlib.Path(__file__),
                          *sorted((root / "results").glob("*.json")), versions(), device())
    keys = {path: cache / f"{path.stem}-{names.digest(ground, path)}.json" for path in paths}
    stale = [(path, out) for path, out in keys.items() if not out.exists()]
    failures = []
    if stale:
        prepare(root)
        failures = run_pages(stale, root, say=say)
    for path, out in keys.items():
        for old in cache.glob(f"{path.stem}-*.json"):
            if old != out:
                old.unlink()
    return {path.stem: json.loads(out.read_text())["outputs"] for path, out in keys.items() if out.exists()}, failures


# ---- results of a GPU -------------------------------------------------------------------------------------

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


def output_html(outputs: list[dict], note: str = "") -> str:
    """What a cell showed, as one block."""
    parts = [f'<pre class="mc-out" tabindex="0"><code>{html.escape(o["text"], False)}</code></pre>' if o["kind"] == "text"
             else f'<div class="mc-rich" tabindex="0">{o["text"]}</div>' for o in outputs]
    return "".join(parts) + (f'<p class="mc-note">Measured on {html.escape(note)}</p>' if note else "")
