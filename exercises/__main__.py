"""Command line: `python -m exercises list`, `start ID`, `watch ID`, `grade`, `run nanogpt --mine`."""
from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from typing import Annotated, Optional

os.environ.setdefault("OMP_NUM_THREADS", "1")

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from minicompile.errors import MinicompileError

from . import TRACK, ExerciseError, reports
from .grade import Result, grade as grade_text, solution as solution_text
from .sandbox import leave
from .source import appended, begun_again, find_task, in_file, load_tasks, original, runs_here, starter, track

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
                  help="Exercises: write parts of the compiler yourself, and run it with them.")
console = Console(soft_wrap=True)
Folder = Annotated[pathlib.Path, typer.Option("--dir", help="the folder of your files")]
MY = pathlib.Path("my")


def path_of(folder: pathlib.Path, id: str) -> pathlib.Path:
    if not runs_here(find_task(id)):
        raise ExerciseError(f"The build track needs Python 3.11 or 3.12, whose bytecode tiny knows; this is {sys.version.split()[0]}.")
    return folder / find_task(id).file


def read(path: pathlib.Path, id: str) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        raise ExerciseError(f"{path} does not exist. `python -m exercises start {id}` writes it.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ExerciseError(f"{path} cannot be read: {error}") from None


def progress(folder: pathlib.Path) -> dict:
    try:
        return json.loads((folder / ".progress.json").read_text())
    except (OSError, ValueError):
        return {}


def note(folder: pathlib.Path, id: str, **facts) -> None:
    known = progress(folder)
    known.setdefault(id, {}).update(facts)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / ".progress.tmp"
    temporary.write_text(json.dumps(known, indent=1))
    temporary.replace(folder / ".progress.json")


def note_result(folder: pathlib.Path, r: Result) -> None:
    best = max(r.earned, progress(folder).get(r.id, {}).get("best", 0))
    note(folder, r.id, best=best, **({"passed": True} if r.passed else {}))


@app.command("list")
def list_(folder: Folder = MY):
    """All exercises in the order of the book."""
    table, known = Table("exercise", "chapter", "title", "kind", "minutes", "points"), progress(folder)
    for t in load_tasks().values():
        table.add_row(t.id, t.chapter, escape(t.title), t.kind, str(t.minutes), f"{known.get(t.id, {}).get('best', 0)}/{t.points}")
    Console(width=max(console.width, 110)).print(table)


@app.command()
def start(id: str, folder: Folder = MY):
    """Write the starter of an exercise into your folder."""
    path, task = path_of(folder, id), find_task(id)
    if path.exists() and task.chapter != TRACK:
        raise ExerciseError(f"{path} is there already and stays as it is. `python -m exercises reset {id}` begins again.")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(appended(read(path, id), task) if path.exists() else starter(task))
    print(f"{path} is yours to edit. `python -m exercises watch {id}` checks it whenever you save.")


@app.command()
def watch(id: str, folder: Folder = MY, once: Annotated[bool, typer.Option(help="check once and stop")] = False):
    """Check an exercise whenever its file is saved, until it passes."""
    path, seen = path_of(folder, id), None
    read(path, id)
    while True:
        try:
            now = path.stat().st_mtime_ns
        except FileNotFoundError:
            now = 0
        if now != seen:
            seen = now
            print(f"\n{time.strftime('%H:%M:%S')}, checking {path} ...", flush=True)
            try:
                result = grade_text(id, read(path, id), 0, str(path))
                note_result(folder, result)
                print(f"... in {result.seconds:.2f} s", reports.text([result]), sep="\n", flush=True)
            except ExerciseError as error:
                print(error, flush=True)
                result = None
            if result and result.passed:
                print(f"Passed. `python -m exercises solution {id}` shows the book's own.")
                if find_task(id).chapter == TRACK:
                    print(f"`python -m exercises run {id}` shows it at work." + "".join(
                        f" Next: `python -m exercises start {after.id}`" for before, after in zip(track(), track()[1:]) if before.id == id))
                return
        if once:
            raise typer.Exit(1)
        time.sleep(0.1)


@app.command()
def hint(id: str, folder: Folder = MY,
         level: Annotated[Optional[int], typer.Option(min=1, max=3, help="1 to 3; default: the next")] = None):
    """The next of three hints."""
    task = find_task(id)
    level = level or min(progress(folder).get(id, {}).get("hints", 0) + 1, 3)
    if not progress(folder).get(id, {}).get("passed"):
        note(folder, id, hints=max(level, progress(folder).get(id, {}).get("hints", 0)))
    print(f"Hint {level} of 3: {task.hints[level - 1]}")


@app.command()
def reset(id: str, folder: Folder = MY):
    """Begin again; your file is kept in the folder `backup`."""
    path, task = path_of(folder, id), find_task(id)
    text = begun_again(read(path, id), task) if task.chapter == TRACK and path.exists() else starter(task)
    if path.exists():
        (folder / "backup").mkdir(exist_ok=True)
        stamp, n = time.strftime("%Y%m%d-%H%M%S"), 0
        while (kept := folder / "backup" / f"{id}-{stamp}{f'-{n}' if n else ''}.py").exists():
            n += 1
        path.rename(kept)
        print(f"Your file is now {kept}.")                  # a file of the build track keeps its other functions
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(f"{path} is the starter again.")


@app.command()
def status(folder: Folder = MY):
    """Your progress, chapter by chapter."""
    known, table = progress(folder), Table("chapter", "exercises passed", "points", "hints taken")
    tasks = load_tasks().values()
    for chapter in dict.fromkeys(t.chapter for t in tasks):
        mine = [(t, known.get(t.id, {})) for t in tasks if t.chapter == chapter]
        table.add_row(chapter, f"{sum(k.get('passed', False) for _, k in mine)} of {len(mine)}",
                      f"{sum(k.get('best', 0) for _, k in mine)} of {sum(t.points for t, _ in mine)}",
                      str(sum(k.get("hints", 0) for _, k in mine)))
    console.print(table)


@app.command()
def solution(id: str, folder: Folder = MY, give_up: Annotated[bool, typer.Option(help="show it although you have not passed")] = False):
    """The book's own solution, after you passed or gave up."""
    task, known = find_task(id), progress(folder).get(id, {})
    if not (known.get("passed") or known.get("gave_up") or give_up):
        raise ExerciseError(f"You have not passed {id} yet. Take a hint, or ask with --give-up.")
    if give_up:
        note(folder, id, gave_up=True)
    print(solution_text(task))


def begun(folder: pathlib.Path, task) -> bool:
    """Whether there is a file for an exercise; in that of the build track its function has to be there."""
    path = folder / task.file
    return path.exists() and (task.chapter != TRACK or original(task).name in in_file(read(path, task.id)))


@app.command()
def grade(
    ids: Annotated[Optional[list[str]], typer.Argument(help="exercises; default: every file in the folder")] = None, folder: Folder = MY,
    format: Annotated[str, typer.Option(help=", ".join(reports.FORMATS))] = "text",
    out: Annotated[Optional[pathlib.Path], typer.Option(help="write the report to this file")] = None,
    seed: Annotated[Optional[int], typer.Option(help="of the hidden inputs; default: drawn anew")] = None,
    all: Annotated[bool, typer.Option("--all", help="count exercises without a file, too")] = False,
):
    """Grade with hidden inputs. Where marks depend on it, do so in a container."""
    if format not in reports.FORMATS:
        raise ExerciseError(f"There is no format {format!r}. Choose from {', '.join(reports.FORMATS)}.")
    tasks = load_tasks()
    chosen = ids or [id for id, t in tasks.items() if (all and runs_here(t)) or begun(folder, t)]
    if not chosen:
        raise ExerciseError(f"There is nothing to grade in {folder}/.")
    results = []
    for id in dict.fromkeys(chosen):
        path = path_of(folder, id)
        source = starter(tasks[id]) if all and not begun(folder, tasks[id]) else read(path, id)
        results.append(grade_text(id, source, seed, str(path)))
        if path.exists():
            note_result(folder, results[-1])
    report = reports.FORMATS[format](results)
    out.write_text(report + "\n") if out else print(report)
    if sum(r.passed for r in results) < len(results):
        raise typer.Exit(1)


@app.command()
def run(what: Annotated[str, typer.Argument(help="nanogpt, tiny, or an exercise of the build track")], folder: Folder = MY,
        mine: Annotated[bool, typer.Option("--mine", help="with your functions in the compiler")] = False,
        steps: Annotated[int, typer.Option(min=6)] = 20, device: Optional[str] = None):
    """Train a small GPT eagerly and compiled, and compare; or show what your part of tiny does."""
    if what in [t.id for t in track()[:-1]]:
        return demonstrate(what, folder)
    what, mine = (TRACK, True) if what == track()[-1].id else (what, mine)
    if what == TRACK:
        path = path_of(folder, track()[-1].id)
        return train_tiny(path if mine else None, steps, device)
    if what != "nanogpt":
        raise ExerciseError(f"There is no program {what!r}. Choose nanogpt, tiny, or an exercise of the build track.")
    from .mine import run as train
    from .sandbox import target
    files = {}
    if mine:
        known = progress(folder)
        files = {id: folder / f"{id}.py" for id, t in load_tasks().items() if t.kind != "predict" and t.chapter != TRACK
                 and known.get(id, {}).get("passed") and (folder / f"{id}.py").exists() and target(id)}
        if not files:
            raise ExerciseError(f"No exercise in {folder}/ has passed yet.")
        print("In the compiler now, written by you:", ", ".join(files), flush=True)
    results = train(files, steps, device)
    for name, r in results.items():
        if "error" in r:
            raise ExerciseError(f"{name}: {r['error']}")
    eager, ours = results["eager"], results["minicompile"]
    apart = max(abs(a - b) for a, b in zip(eager["losses"], ours["losses"]))
    print(f"loss after {steps} steps: eager {eager['losses'][-1]:.4f}, compiled {ours['losses'][-1]:.4f}, at most {apart:.2g} apart")
    print(f"milliseconds a step: eager {eager['ms']:.1f}, compiled {ours['ms']:.1f} ({eager['ms'] / ours['ms']:.2f}x), "
          f"compiling took {ours['cold_seconds']:.1f} s")
    print(f"graphs: {ours['graphs']}, kernels: {ours['kernels']}")


def demonstrate(id: str, folder: pathlib.Path) -> None:
    from .track import demonstrate as at_work
    read(path_of(folder, id), id)
    if problem := at_work(find_task(id), path_of(folder, id)).get("error"):
        raise ExerciseError(problem)


def train_tiny(path: pathlib.Path | None, steps: int, device: str | None) -> None:
    from .sandbox import done
    from .track import trained
    if path:
        sys.stdout.flush()
        from . import sandbox
        sandbox.warm()
        load_tasks()
        if not (parts := done(read(path, track()[0].id))):
            raise ExerciseError(f"No exercise in {path} is done yet.")
        print("In tiny now, written by you:", ", ".join(t.id for t in parts), flush=True)
    results = trained(path, steps, device)
    for name, r in results.items():
        if "error" in r:
            raise ExerciseError(f"{name}: {r['error']}")
    print("step", *[f"{name:>9}" for name in results])
    for n in sorted({*range(0, steps, max(steps // 8, 1)), steps - 1}):
        print(f"{n:4}", *[f"{r['losses'][n]:9.4f}" for r in results.values()])
    print("  ms", *[f"{r['ms']:9.2f}" for r in results.values()])


def main() -> int:
    try:
        app()
    except (ExerciseError, MinicompileError, OSError) as error:
        print(f"exercises: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except SystemExit as ended:
        return ended.code
    return 0


if __name__ == "__main__":
    leave(main())
