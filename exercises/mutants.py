"""`python -m exercises.mutants [ID ...]`: plausible mistakes, made by machine, that a grader does not notice.

Every exercise's own solution is changed at one place: a condition is left out, a comparison is off by one, a part of a key, a keyword or
a statement is missing. Each such file is graded. One that earns all points is a hole in the grader, or computes the same as the original.
The first gets a case that shows the difference, and a `wrong_` variant; the second stands in `exercises/variants/ID.py` in the list
`SAME`, by the changed lines. Where a function is given with a bug in it, mistakes are made in the lines of the bug. A target is its own
definition of what is right, so there are none. What depends on the release of Python shows on that release alone, and stays as it is."""
from __future__ import annotations

import ast
import copy
import difflib
import sys
from typing import Iterator

from . import ExerciseError, Task, sandbox
from .grade import grade_behaviour, solution
from .source import find_task, load_tasks, runs_here
from .validate import VARIANTS

SECONDS = 4.0             # that a behaviour may take
NEAR = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot,
        ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}


def without(items: list) -> Iterator[list]:
    for n in range(len(items)):
        yield items[:n] + items[n + 1:]


def changed(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that could stand in the place of this one after a mistake."""
    match node:
        case ast.BoolOp(op, values):
            for rest in without(values):
                yield ast.BoolOp(op, rest) if len(rest) > 1 else rest[0]
        case ast.BinOp(left, _, right):
            yield left
            yield right
        case ast.Compare(left, [op], [right]):
            yield ast.Compare(left, [NEAR[type(op)]()], [right])
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.IfExp(_, body, orelse):
            yield body
            yield orelse
        case ast.Constant(value) if type(value) is bool:
            yield ast.Constant(not value)
        case ast.Constant(value) if type(value) is int:
            yield ast.Constant(value + 1)
        case ast.Tuple(elements, ast.Load()) | ast.List(elements, ast.Load()) | ast.Set(elements) if len(elements) > 1:
            for rest in without(elements):
                yield type(node)(rest, ast.Load()) if not isinstance(node, ast.Set) else ast.Set(rest)
        case ast.Call(f, args, keywords) if keywords:
            for rest in without(keywords):
                yield ast.Call(f, args, rest)
        case ast.comprehension(target, iterated, conditions, is_async) if conditions:
            for rest in without(conditions):
                yield ast.comprehension(target, iterated, rest, is_async)
        case ast.Slice(lower, upper, step):
            yield from [ast.Slice(None, upper, step)] * bool(lower) + [ast.Slice(lower, None, step)] * bool(upper)
        case ast.If(_, body, orelse):
            yield ast.If(ast.Constant(True), body, [])
            yield ast.If(ast.Constant(True), orelse or [ast.Pass()], [])
        case ast.Expr() | ast.AugAssign() | ast.Continue() | ast.Break() | ast.Raise() | ast.Assert():
            yield ast.Pass()


def parts(node: ast.AST) -> Iterator[tuple[ast.AST, str, list, int]]:
    """(parent, field, the field's nodes, place) of all below a node that can be wrong: no docstrings, types, texts of errors."""
    for field, value in ast.iter_fields(node):
        nodes = value if isinstance(value, list) else [value]
        for k, child in enumerate(nodes):
            docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if isinstance(child, ast.AST) and not docstring and field not in ("annotation", "returns"):
                yield node, field, nodes, k
                if not isinstance(child, ast.Raise):
                    yield from parts(child)


def mutants(text: str, plant: list = ()) -> Iterator[tuple[str, str]]:
    """(the lines that differ, text of a file with one mistake). plant: the bug of an exercise, as (old text, new text)."""
    lines = {n for n, line in enumerate(text.splitlines(), 1) if "PYTHON" not in line and (
        not plant or any(old.split("\n")[0] in line for old, _ in plant))}
    tree = ast.parse(text)
    before = ast.unparse(tree).splitlines()
    for parent, field, nodes, k in [p for f in tree.body if isinstance(f, ast.FunctionDef) for p in parts(f)]:
        value = getattr(parent, field)
        if getattr(nodes[k], "lineno", getattr(parent, "lineno", 0)) not in lines:
            continue
        for other in changed(nodes[k]):
            setattr(parent, field, [*nodes[:k], other, *nodes[k + 1:]] if isinstance(value, list) else other)
            after = ast.unparse(ast.fix_missing_locations(copy.deepcopy(tree)))
            setattr(parent, field, value)
            if differing := [d for d in difflib.ndiff(before, after.splitlines()) if d[0] in "-+"]:
                yield "\n".join(f"{d[0]} {d[1:].strip()}" for d in differing), after + "\n"


def same(task: Task) -> set[str]:
    """The mistakes that are none."""
    path = VARIANTS / f"{task.id.replace('-', '_')}.py"
    for node in ast.parse(path.read_text()).body if path.exists() else ():
        if isinstance(node, ast.Assign) and node.targets[0].id == "SAME":
            return set(ast.literal_eval(node.value))
    return set()


def survivors(task: Task, seed: int = 7) -> tuple[int, list[str]]:
    """How many mutants there were, and which earn all points and are not known to be right."""
    made, known, found = dict(mutants(solution(task), task.plant)), same(task), []
    for what, text in made.items():
        if what not in known and all(grade_behaviour(task, b, text, seed, f"{task.id}.py", {}, SECONDS).status in ("passed", "skipped")
                                     for b in task.behaviours):
            found.append(what)
    return len(made) - len(known), found + [f"no longer made: {what}" for what in known - set(made)]


def main(ids: list[str]) -> int:
    sandbox.warm()
    total = left = 0
    for task in [find_task(id) for id in ids] or load_tasks().values():
        if task.kind not in ("predict", "target") and runs_here(task):
            count, found = survivors(task)
            total, left = total + count, left + len(found)
            print(f"{task.id}: {count - len(found)} of {count} noticed", *found, sep="\n\n", end="\n\n" * bool(found) or "\n", flush=True)
    print(f"{total - left} of {total} mutants noticed")
    return int(left > 0)


if __name__ == "__main__":
    try:
        sandbox.leave(main(sys.argv[1:]))
    except ExerciseError as error:
        sys.exit(str(error))
