"""Grading: the learner's observations against the original's, behaviour by behaviour."""
from __future__ import annotations

import ast
import importlib
import os
import random
import time
from dataclasses import asdict, dataclass, field

import torch

from . import Behaviour, ExerciseError, Task, sandbox
from .data import NOTHING, decode, difference, encode, short, where
from .source import find_task, original_text


@dataclass
class Outcome:
    """One behaviour. status: passed, wrong, not done, error, syntax, timeout, memory, skipped."""
    name: str
    points: int
    status: str
    message: str = ""
    input: str = ""
    expected: str = ""
    got: str = ""
    where: str = ""
    seconds: float = 0.0
    predicted: bool = False

    @property
    def earned(self) -> int:
        return self.points if self.status == "passed" else 0


@dataclass
class Result:
    id: str
    title: str
    chapter: str
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def earned(self):
        return sum(o.earned for o in self.outcomes)

    @property
    def points(self):
        return sum(o.points for o in self.outcomes)

    @property
    def passed(self):
        return bool(self.outcomes) and self.earned == self.points

    def as_dict(self):
        return {**asdict(self), "earned": self.earned, "points": self.points, "passed": self.passed}


def expected_of(task: Task, behaviour: Behaviour, seed: int) -> list[dict]:
    """The original's messages, computed in a process of its own."""
    key = task.id, behaviour.observe, behaviour.cases, seed
    if key not in sandbox.EXPECTED:
        messages = sandbox.run(task, behaviour, None, seed)
        if "done" not in messages[-1] or len(messages) == 1:
            raise ExerciseError(f"{task.id}, {behaviour.name}: the original itself fails: {messages[-1].get('text', 'no cases')}")
        for name in messages[-1]["imports"]:
            try:
                importlib.import_module(name)      # what PyTorch imports late has to be there before files are out of reach
            except Exception:
                pass
        sandbox.EXPECTED[key] = messages
    return sandbox.EXPECTED[key]


def computed_answers(task: Task) -> str:
    """A prediction's file with the true answers, computed by the compiler."""
    return "".join(f"{b.answer} = {decode(expected_of(task, b, 0)[0]['value'])!r}\n" for b in task.behaviours)


def solution(task: Task) -> str:
    """A file that earns all points."""
    return computed_answers(task) if task.kind == "predict" else original_text(task)


def literal_answers(source: str) -> dict:
    """NAME -> value of the assignments of literals in a prediction's file; Ellipsis where nothing is answered."""
    answers = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                answers[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                pass
    return answers


def grade_behaviour(task: Task, b: Behaviour, source: str, seed: int, filename: str, observed: dict, seconds: float) -> Outcome:
    """observed: what the file showed to earlier behaviours, by what they looked at; the same is not looked at again."""
    if b.gpu and not torch.cuda.is_available():
        return Outcome(b.name, b.points, "skipped", "needs a CUDA device")
    started = time.perf_counter()
    expected_of(task, b, seed)             # kept, but not on the stack, which a learner's code inherits
    if b.answer:
        answers = literal_answers(source)
        got = answers.get(b.answer, NOTHING)
        if got is ... or got is NOTHING:
            return Outcome(b.name, b.points, "not done", "not done yet" if got is ... else f"{b.answer} is not assigned a literal")
        messages = [{"case": 0, "value": encode(got)}, {"done": True}]
    else:
        key = b.observe, b.cases
        if key not in observed:
            observed[key] = sandbox.run(task, b, source, seed, filename, seconds)
        messages = observed[key]
    outcome = compare(b, expected_of(task, b, seed), messages, seed, bool(b.answer))
    outcome.seconds = round(time.perf_counter() - started, 3)
    return outcome


def compare(b: Behaviour, expected: list[dict], messages: list[dict], seed: int, predicted: bool) -> Outcome:
    out = Outcome(b.name, b.points, "passed", predicted=predicted)
    for i, truth in enumerate(expected[:-1]):
        m = messages[min(i, len(messages) - 1)]
        out.input = "" if predicted else truth["shown"]
        if "error" in m:
            out.status, out.message = str(m["error"]), str(m.get("text", ""))
            out.input = "" if out.status == "not done" else out.input
            return out
        if m.get("case") != i or "value" not in m:
            out.status, out.message = "error", "the process gave fewer results than there are cases"
            return out
        try:
            right, got = decode(truth["value"]), decode(m["value"])
        except Exception:
            out.status, out.message = "error", "the result cannot be read"
            return out
        try:
            if b.check is not None:
                problem = b.check(b.cases(random.Random(seed))[i], got, right)
                found = problem and ((), None, None)
            else:
                problem, found = "", difference(right, got, b.tolerance)
        except Exception as error:          # a result of a form that the check does not expect
            problem, found = f"the result has another form than expected ({error})", ((), None, None)
        if found:
            path, e, g = found
            out.status, out.message, out.where = "wrong", problem or "", where(path)
            if predicted:
                out.message = f"{b.answer} = {short(g)} is not what the compiler finds. {truth['shown']}"
            elif e is not None or g is not None:
                out.expected, out.got = short(e), short(g)
            return out
    if "done" not in messages[-1]:
        out.status, out.message = str(messages[-1].get("error", "error")), str(messages[-1].get("text", ""))
    out.input = "" if out.status == "passed" else out.input
    return out


def grade(id: str, source: str, seed: int | None = None, filename: str | None = None) -> Result:
    """Grade the text of a learner's file. seed: None for hidden inputs drawn anew."""
    task = find_task(id)
    if not task.behaviours:
        raise ExerciseError(f"Task {id!r} has no behaviours.")
    seed = int.from_bytes(os.urandom(4), "big") if seed is None else seed
    filename = filename or f"{id}.py"
    result, started = Result(id, task.title, task.chapter), time.perf_counter()
    try:
        if len(source) > 1 << 20:
            raise ValueError("file of more than a megabyte")
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f"line {error.lineno}: " if getattr(error, "lineno", None) else ""
        text = f"syntax error in {line}{getattr(error, 'msg', error)}"
        result.outcomes = [Outcome(b.name, b.points, "syntax", text) for b in task.behaviours]
        return result
    observed, seconds = {}, task.seconds
    for b in task.behaviours:
        result.outcomes.append(grade_behaviour(task, b, source, seed, filename, observed, seconds))
        if result.outcomes[-1].status == "timeout":
            seconds = task.seconds / 5             # it is probably the same loop again: do not keep the learner waiting
        if any("unloaded" in messages[-1] for messages in observed.values()):       # the next one would end at the same line
            last = result.outcomes[-1]
            result.outcomes += [Outcome(b.name, b.points, last.status, last.message) for b in task.behaviours[len(result.outcomes):]]
            break
    result.seconds = round(time.perf_counter() - started, 3)
    return result
