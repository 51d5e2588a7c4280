"""`python -m exercises.validate [ID ...]`: starters fail, originals pass, wrong variants and cheats earn nothing they should not."""
from __future__ import annotations

import ast
import pathlib
import sys

from . import ExerciseError, Task
from .cheats import CHEATS
from .grade import grade
from .source import find_task, load_tasks, original, solution, starter

VARIANTS = pathlib.Path(__file__).parent / "variants"


def variants(task: Task) -> dict[str, str]:
    """name -> text of a learner's file in which that variant stands as the exercise's function."""
    path = VARIANTS / f"{task.id.replace('-', '_')}.py"
    if not path.exists():
        return {}
    text, o = path.read_text(), original(task)
    name = o.name if o else task.function
    names = [n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name.startswith(("wrong_", "right_"))]
    before = f"from __future__ import annotations\n{o.imports if o else ''}\n"
    return {n: f"{before}{text}\n\n{name} = {n}\n" for n in names}


def problems(task: Task, seed: int = 7, cheats: bool = True):
    """What is wrong with one exercise, sentence by sentence."""
    if not task.behaviours:
        yield "no behaviours"
        return
    begun = grade(task.id, starter(task), seed)
    for o in begun.outcomes:
        intended = ("not done",) if task.kind in ("write", "predict") else ("not done", "wrong", "error")
        if o.status not in (*intended, "skipped") and not (task.kind == "bug" and begun.earned < begun.points):
            yield f"the starter's {o.name!r} is {o.status} ({o.message})"
    if task.kind == "predict":
        return
    right = grade(task.id, solution(task), seed)
    for o in right.outcomes:
        if o.status not in ("passed", "skipped"):
            yield f"the original's {o.name!r} is {o.status}: {o.message} {o.where} expected {o.expected} got {o.got}"
    files = variants(task)
    wrong = [n for n in files if n.startswith("wrong_")]
    if task.kind == "write" and (len(wrong) < 5 or len(wrong) == len(files)):
        yield f"{len(wrong)} wrong and {len(files) - len(wrong)} right variants; needed: 5 and 1"
    for name, text in files.items():
        result = grade(task.id, text, seed)
        if result.passed != name.startswith("right_"):
            bad = next((o for o in result.outcomes if o.status != "passed"), None)
            yield f"variant {name} earns {result.earned} of {result.points} {bad or ''}"
    o = original(task)
    if cheats and o:
        for name, text in CHEATS.items():
            result = grade(task.id, text.format(module=o.module, name=o.name, path=str(o.path)), seed)
            if result.earned:
                yield f"cheat {name!r} earns {result.earned} points"


def main(ids: list[str]) -> int:
    tasks = [find_task(i) for i in ids] if ids else list(load_tasks().values())
    every = [b for t in tasks for b in t.behaviours]
    if not every:
        print("no behaviours were collected")
        return 1
    bad = 0
    without = sum(b.points for b in every if not b.gpu) / sum(b.points for b in every)
    if without < 0.9:
        print(f"only {without:.0%} of the points can be earned without a GPU")
        bad += 1
    for task in tasks:
        try:
            found = list(problems(task))
        except ExerciseError as error:
            found = [str(error)]
        bad += len(found)
        print(f"{task.id}: {'ok' if not found else ''}", *found, sep="\n  " if found else "", flush=True)
    print(f"{len(tasks)} exercises, {sum(t.points for t in tasks)} points, {without:.0%} without a GPU, {bad} problems")
    return bool(bad)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ExerciseError as error:
        sys.exit(str(error))
