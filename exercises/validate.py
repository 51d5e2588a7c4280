"""`python -m exercises.validate [ID ...]`: starters fail, originals pass, wrong variants, constants and cheats earn nothing they
should not, and a small GPT trains with every solution in the compiler, each alone and all together."""
from __future__ import annotations

import ast
import collections
import multiprocessing
import os
import pathlib
import sys
import tempfile
import time
from dataclasses import replace

import minicompile

from . import TRACK, ExerciseError, Task, mine, sandbox, tasks as task_files, track as tiny_track
from .cheats import CHEATS
from .grade import grade, solution
from .source import BEGIN, edited, find_task, load_tasks, original, runs_here, solution_path, starter, tags, track

VARIANTS = pathlib.Path(__file__).parent / "variants"
WANTED = {"write": (5, 1), "bug": (2, 1), "target": (2, 1)}            # wrong and right variants
TRAINING = 60.0          # seconds for one short training
CONSTANTS = ("None", "True", "False", "0", "1", "()", "set()", "args[0] if args else None")


def variants(task: Task) -> dict[str, str]:
    """name -> text of a learner's file in which that variant stands as the exercise's function, or as one answer among true ones."""
    path = VARIANTS / f"{task.id.replace('-', '_')}.py"
    if not path.exists():
        return {}
    text, o, found = path.read_text(), original(task), {}
    before = f"from __future__ import annotations\n{o.imports if o else ''}\n"
    for node in ast.parse(text).body:
        name = node.name if isinstance(node, ast.FunctionDef) else node.targets[0].id if isinstance(node, ast.Assign) else ""
        if not name.startswith(("wrong_", "right_")):
            continue
        if task.kind == "predict":
            found[name] = f"{solution(task)}{name.partition('_')[2]} = {ast.unparse(node.value)}\n"
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.List):
            found[name] = edited(solution(task), ast.literal_eval(node.value))
        else:
            found[name] = f"{before}{text}\n\n{o.name if o else task.function} = {name}\n"
    return found


def told(task: Task):
    """Statements of the solution that stand in a hint: the third one is a sketch, not the code."""
    hints = ["".join(h.split()) for h in task.hints]
    for node in ast.walk(ast.parse(solution(task))):
        text = ast.unparse(node) if isinstance(node, (ast.Assign, ast.AugAssign, ast.Return, ast.Expr)) else ""
        if len(text) > 20 and any("".join(text.split()) in h for h in hints):
            yield text


def problems(task: Task, seed: int = 7):
    """What is wrong with one exercise, sentence by sentence."""
    if not task.behaviours:
        yield "no behaviours"
        return
    yield from (f"a hint has the line {text!r} of the solution" for text in told(task))
    for o in grade(task.id, starter(task), seed).outcomes:
        if o.status not in (("not done",) if task.kind in ("write", "predict") else ("wrong", "error")) + ("skipped",):
            yield f"the starter's {o.name!r} is {o.status} ({o.message})"
    for o in grade(task.id, solution(task), seed).outcomes:
        if o.status not in ("passed", "skipped"):
            yield f"the original's {o.name!r} is {o.status}: {o.message} {o.where} expected {o.expected} got {o.got}"
    files = variants(task)
    wrong = [n for n in files if n.startswith("wrong_")]
    if task.kind == "predict":
        missing = {b.answer for b in task.behaviours} - {n.partition("_")[2] for n in wrong}
        if missing:
            yield f"no wrong variant for {', '.join(sorted(missing))}"
    elif len(wrong) < WANTED[task.kind][0] or len(files) - len(wrong) < WANTED[task.kind][1]:
        yield f"{len(wrong)} wrong and {len(files) - len(wrong)} right variants; needed: {WANTED[task.kind]}"
    for name, text in files.items():
        result = grade(task.id, text, seed)
        bad = [o for o in result.outcomes if o.status not in ("passed", "skipped")]
        if bool(bad) == name.startswith("right_"):
            yield f"variant {name} earns {result.earned} of {result.points} {' '.join(str(bad[:1]).split())}"
        if task.kind == "predict" and [o.name for o in bad] != [b.name for b in task.behaviours if b.answer == name.partition("_")[2]]:
            yield f"variant {name} fails {', '.join(o.name for o in bad) or 'nothing'}"
    o = original(task)
    place = {"module": o.module, "name": o.name, "path": str(o.path)} if o else \
        {"module": f"{task_files.__name__}.{task.chapter[:4]}", "name": task.function or "answers", "path": str(solution_path(task))}
    ways = {f"cheat {name!r}": text.format(**place) for name, text in CHEATS.items()}
    ways |= {f"a function that returns {c}": f"def {place['name']}(*args, **kwargs):\n    return {c}\n" for c in CONSTANTS}
    for name, text in ways.items():
        for earned in (o for o in grade(task.id, text, seed).outcomes if o.earned):
            yield f"{name} earns {earned.points} points for {earned.name!r}"


def check(id: str) -> tuple[str, float, list[str]]:
    began, task = time.perf_counter(), find_task(id)
    try:
        found = list(problems(task))
    except ExerciseError as error:
        found = [str(error)]
    return id, time.perf_counter() - began, found


def of_the_whole(tasks: list[Task]):
    """What is wrong with all exercises together."""
    every = [b for t in tasks for b in t.behaviours]
    if not every:
        yield "no behaviours were collected"
        return
    without = sum(b.points for b in every if not b.gpu) / sum(b.points for b in every)
    if without < 0.9:
        yield f"only {without:.0%} of the points can be earned without a GPU"
    for id in sorted(set(tags()) - {t.id for t in tasks} - {t.id for t in track() if not runs_here(t)}):
        yield f"the package has a cell with the tag exercise:{id}, and no task has that name"
    counts = collections.Counter(t.chapter for t in tasks)
    for chapter in minicompile.CHAPTERS[:11]:
        if counts[chapter] < 2:
            yield f"{chapter} has {counts[chapter]} exercises; needed: 2"


def train_with(job: tuple) -> tuple[tuple, dict]:
    """job: (compiler, ids of exercises whose solutions stand in it)."""
    compiler, ids = job
    task = mine.default_tasks("nanogpt", "cpu", None)[0]
    task = replace(task, compiler=compiler, steps=4, batch=4, model={**task.model, "layers": 2})
    with tempfile.TemporaryDirectory() as folder:
        files = {id: pathlib.Path(folder, f"{id}.py") for id in ids}
        for id, path in files.items():
            path.write_text(solution(find_task(id)))
        return job, mine.in_fork(task, files, TRAINING)


def training_problems(tasks: list[Task], pool):
    """Training with solutions in the compiler has to give the losses, graphs and kernels of the compiler as it is."""
    inside = tuple(t.id for t in tasks if t.kind != "predict" and t.chapter != TRACK and original(t))
    jobs = [("eager", ()), ("minicompile", ()), *(("minicompile", (id,)) for id in inside), ("minicompile", inside)]
    results = dict(pool.imap_unordered(train_with, dict.fromkeys(jobs), chunksize=1))
    eager, plain = results.pop(jobs[0]), results[jobs[1]]
    for (_, ids), r in results.items():
        who = "the compiler as it is" if not ids else f"the solution of {ids[0]}" if len(ids) == 1 else "all solutions together"
        if problem := r.get("error") or plain.get("error") or eager.get("error"):
            yield f"training with {who}: {problem}"
        elif max(abs(a - b) for a, b in zip(r["losses"], eager["losses"], strict=True)) > 1e-3:
            yield f"training with {who}: losses {r['losses']}, eager's {eager['losses']}"
        elif (r["graphs"], r["kernels"]) != (plain["graphs"], plain["kernels"]) or not r["kernels"]:
            yield f"training with {who}: {r['graphs']} graphs and {r['kernels']} kernels, not {plain['graphs']} and {plain['kernels']}"


def track_problems():
    """tiny's GPT has to train with all solutions of the build track in one file, and each demonstration has to run with it."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "tiny.py")
        path.write_text("\n\n\n".join([BEGIN, *(original(t).text for t in track())]) + "\n")
        results = tiny_track.trained(path, 6, "cpu")
        for t in track():
            results[t.id] = tiny_track.demonstrate(t, path)
    for who, r in results.items():
        if "error" in r:
            yield f"{who}: {r['error']}"
        elif "losses" in r and max(abs(a - b) for a, b in zip(r["losses"], results["eager"].get("losses", ()), strict=True)) > 1e-3:
            yield f"tiny, trained by {who}: losses {r['losses']}, eager's {results['eager']}"


def main(ids: list[str]) -> int:
    tasks = [find_task(i) for i in ids] if ids else [t for t in load_tasks().values() if runs_here(t)]
    general = list(of_the_whole(tasks)) if not (ids and tasks) else []
    print(*(f"all: {text}" for text in general), sep="\n", end="\n" * bool(general))
    bad = len(general)
    if tasks:
        sandbox.warm()
        for t in tasks:
            sandbox.target(t.id)
        with multiprocessing.get_context("fork").Pool(min(2, os.cpu_count() or 1)) as pool:
            for id, seconds, found in pool.imap_unordered(check, sorted((t.id for t in tasks), key=lambda id: id not in SLOW), chunksize=1):
                bad += len(found)
                print(f"{id}: {'ok' if not found else f'{len(found)} problems'} ({seconds:.1f} s)", *found, sep="\n  ", flush=True)
            began, found = time.perf_counter(), list(training_problems(tasks, pool))
            bad += len(found)
            print(f"training: {'ok' if not found else f'{len(found)} problems'} ({time.perf_counter() - began:.1f} s)", *found, sep="\n  ")
        if any(t.chapter == TRACK for t in tasks):
            began, found = time.perf_counter(), list(track_problems())
            bad += len(found)
            print(f"build track: {'ok' if not found else len(found)} ({time.perf_counter() - began:.1f} s)", *found, sep="\n  ")
    print(f"{len(tasks)} exercises, {sum(t.points for t in tasks)} points, {bad} problems")
    return int(bad > 0)


SLOW = ("choose-saved", "no-breaks", "cpp-cast")           # first, so that one process does not end long after the other


if __name__ == "__main__":
    try:
        sandbox.leave(main(sys.argv[1:]))
    except ExerciseError as error:
        sys.exit(str(error))
