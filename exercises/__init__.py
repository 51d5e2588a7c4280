"""The book's exercises: `python -m exercises`.

One source. An exercise is a top-level function of the compiler whose cell is tagged `# %% tags=["exercise:ID"]`.
The starter is that function without its body, so the solution is the book's own code. What it asks and how it
is graded stands in `exercises/tasks/chNN.py`:

    task("last-uses", title="When is a value dead?", minutes=15, kind="write", hints=["...", "...", "..."],
         about="What to write and why, a paragraph or two: it becomes the comment on top of the starter.")

    def graphs(rng):                      # hidden inputs: any Python objects, small ones first
        return [random_graph(rng, size) for size in (2, 3, 5, 8)]

    @behaviour("last-uses", points=3, name="every value dies once", cases=graphs, show=print_graph)
    def dies_once(function, case):        # what is observed of `function`: plain data
        return {str(node): sorted(map(str, dead)) for node, dead in function(case.graph).items()}

**How it is graded.** A behaviour runs twice, on the same cases: in one process with the learner's function standing in
the compiler, in another with the original. Only what it returns leaves either process, as plain data (None, bool, int, float,
str, tuple, list, dict, set, tensors, dtypes, devices), and a third process compares the two. So a behaviour never says
what is right, the expected values never are in the learner's process, and nothing is stored. The first difference is
reported by its path: return a dict whose keys are stages, kernels or nodes, in order, and the report names the
first that differs. `function` is the real attribute of the real module; a behaviour may as well ignore it and compile something.
Make observations that cannot be guessed: values and texts, not booleans.

`behaviour(ID, points=, name=, cases=, show=, tolerance=, check=, then=, gpu=)`:

- `cases(rng)` -> list, `rng` a `random.Random`. Called in each process with the same seed. Default: one case, None.
- `show(case)` -> str for the report; default: `describe`. Keep it short.
- `tolerance`: relative and absolute, for floats and tensors; default 0.
- `check(case, got, expected)` replaces the comparison where several answers are right. It runs in the grading process on
  decoded plain data. Return None if `got` is right, a sentence if not.
- `then(case, value)` goes on in another process, where no learner's code is, with what `observe` returned: it compiles
  a text, runs a graph, counts kernels. Use it where the observation alone could be claimed without the work.
- `gpu`: needs a CUDA device.

`task(ID, title, minutes, kind, hints, about=, function=, plant=, starter=, demo=, seconds=, memory=)`:

- kind "write": the starter's body raises NotDone. `function` names the function if the tagged cell defines several.
- kind "bug": the starter is the original with `plant`, a list of (old text, new text), applied: each old text must occur
  once in the function's source. Graded like "write".
- kind "target": like "write", but the starter is `starter`, the whole text of the file: slow or naive code that works. Its behaviours
  have a `check` on what was counted. The file must define `function`. Without a tagged cell, `exercises/solutions/ID.py` is a file
  that earns all points.
- kind "predict": no function; `starter` is text that shows the programs and asks, with one assignment `NAME = ...` per
  question. Answers are literals. `@behaviour(ID, points, name, answer="NAME")` on a function of no arguments that
  returns the true answer, computed by the compiler, and its record, lines that say why: whoever is wrong reads them. No tag in
  the package is needed.
- `demo`: a short program that prints, for exercises of the build track: `run ID` executes it in the names of `chapters/tiny.py`.
- `seconds` (of one behaviour, default 10; a fifth of it after one ran out of time) and `memory` (MiB beyond torch,
  default 2048) limit a run.

**The build track** (`exercises/tasks/tiny.py`) replaces functions of `chapters/tiny.py`, whose cells have tags like those of the package.
All its exercises share one file of the learner, `tiny.py`: `start` appends to it. Where an exercise is graded or run, the functions of
the file that belong to earlier exercises stand in tiny as well, so the learner's compiler grows; what the file lacks is tiny's own.

Wrong and right variants for CI: `exercises/variants/ID.py` (underscores for dashes) defines functions `wrong_*` (five or
more for "write", two for "bug" and "target") and `right_*` (one or more; not the original's text), with the imports that they
need. Each in turn is given the function's name and graded. A list of (old text, new text) instead of a function changes the
original. For "predict":
`wrong_NAME = value`, one for each question; it stands among true answers, and has to cost that question's points.

`python -m exercises.validate [ID ...]` checks all this; tests use `exercises.grade.grade(ID, source, seed)`.
"""
from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Callable

KINDS = ("write", "predict", "bug", "target")
TRACK = "tiny"           # the task file whose exercises are done in order, in one file


class NotDone(Exception):
    """The body of a starter raises this: the exercise has not been begun."""

    raised = False

    def __init__(self, *args):
        NotDone.raised = True          # even where the compiler catches it and falls back
        super().__init__(*args)


class ExerciseError(Exception):
    """Wrong use of this package; the message is one line for the learner."""


@dataclass
class Behaviour:
    name: str
    points: int
    observe: Callable
    cases: Callable = lambda rng: [None]
    show: Callable | None = None
    tolerance: float = 0.0
    check: Callable | None = None
    then: Callable | None = None
    gpu: bool = False
    answer: str = ""


@dataclass
class Task:
    id: str
    title: str
    minutes: int
    kind: str
    hints: list[str]
    about: str = ""
    function: str = ""
    plant: list[tuple[str, str]] = field(default_factory=list)
    starter: str = ""
    demo: str = ""
    seconds: float = 10.0
    memory: int = 2048
    chapter: str = ""
    behaviours: list[Behaviour] = field(default_factory=list)

    @property
    def points(self) -> int:
        return sum(b.points for b in self.behaviours)

    @property
    def file(self) -> str:
        """The learner's file."""
        return f"{TRACK if self.chapter == TRACK else self.id}.py"


TASKS: dict[str, Task] = {}


def task(id: str, *, title: str, minutes: int, kind: str = "write", hints: list[str], **settings) -> Task:
    """Register an exercise; see the module's docstring."""
    if id in TASKS:
        raise ExerciseError(f"Two tasks are called {id!r}.")
    if kind not in KINDS or len(hints) != 3:
        raise ExerciseError(f"Task {id!r}: kind is one of {', '.join(KINDS)}, and there are three hints.")
    chapter = sys._getframe(1).f_globals["__name__"].rpartition(".")[2]           # the task file's: ch05
    TASKS[id] = Task(id, title, minutes, kind, hints, chapter=chapter, **settings)
    return TASKS[id]


def behaviour(id: str, *, points: int, name: str, **settings):
    """Register a graded behaviour of the task `id`; see the module's docstring."""
    def register(observe):
        TASKS[id].behaviours.append(Behaviour(name, points, observe, **settings))
        return observe
    return register
