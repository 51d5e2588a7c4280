"""From the compiler's sources to starters and solutions. Sources are read when needed and never kept: the process that runs a
learner's code is a fork of this one."""
from __future__ import annotations

import ast
import builtins
import difflib
import importlib
import pathlib
import pkgutil
import re
import sys
import textwrap
from dataclasses import dataclass

import minicompile

from . import TASKS, TRACK, ExerciseError, Task

PACKAGE = pathlib.Path(minicompile.__file__).parent
TINY = PACKAGE.parent / "chapters" / "tiny.py"
TAG = re.compile(r'^# %%.*"exercise:([\w-]+)"')


def load_tasks() -> dict[str, Task]:
    """All tasks, in the order of the book; the build track is last."""
    from . import tasks
    for module in sorted(m.name for m in pkgutil.iter_modules(tasks.__path__) if m.name.startswith("ch") or m.name == TRACK):
        importlib.import_module(f"{tasks.__name__}.{module}")
    chapters = [*minicompile.CHAPTERS, TRACK]
    for t in TASKS.values():
        t.chapter = next(c for c in chapters if c.startswith(t.chapter))
    order = sorted(TASKS.values(), key=lambda t: chapters.index(t.chapter))
    return {t.id: t for t in order}


def track() -> list[Task]:
    """The build track, in order."""
    return [t for t in load_tasks().values() if t.chapter == TRACK]


def find_task(id: str) -> Task:
    tasks = load_tasks()
    if id not in tasks:
        near = difflib.get_close_matches(id, tasks, 1)
        raise ExerciseError(f"There is no exercise {id!r}. {f'Did you mean {near[0]!r}? ' if near else ''}`python -m exercises list` shows "
                            f"all.")
    return tasks[id]


def runs_here(task: Task) -> bool:
    """Whether an exercise can be graded: tiny knows the bytecode of two releases of Python."""
    return task.chapter != TRACK or sys.version_info < (3, 13)


def tags() -> dict[str, tuple[pathlib.Path, int]]:
    """Where each tagged cell begins: ID -> (file, line)."""
    return {m[1]: (path, n) for path in [*sorted(PACKAGE.rglob("*.py")), TINY] if '"exercise:' in (text := path.read_text())
            for n, line in enumerate(text.splitlines(), 1) if (m := TAG.match(line))}


@dataclass
class Original:
    """A tagged function. `text` is its source without decorators."""
    module: str
    path: pathlib.Path
    name: str
    text: str
    header: str          # signature and docstring
    imports: str         # the import statements it needs, absolute


def solution_path(task: Task) -> pathlib.Path:
    """Where the solution of a target stands that is no function of the package."""
    return pathlib.Path(__file__).parent / "solutions" / f"{task.id.replace('-', '_')}.py"


def original(task: Task) -> Original | None:
    """The function of the package behind a task; None if it has none (predictions, targets of their own)."""
    found = tags().get(task.id)
    if found is None:
        if task.kind == "predict" or solution_path(task).exists():
            return None
        raise ExerciseError(f"No cell of the package has the tag exercise:{task.id}.")
    path, start = found
    text = path.read_text()
    lines = text.splitlines()
    end = next((n for n in range(start, len(lines)) if lines[n].startswith("# %%")), len(lines))
    tree = ast.parse(text)
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef) and start < n.lineno <= end
                 and task.function in ("", n.name)]
    if len(functions) != 1:
        raise ExerciseError(f"The cell of exercise:{task.id} defines {len(functions)} functions: name one with function=.")
    node, = functions
    module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    head = [line for line in lines[node.lineno - 1:node.body[0].lineno - 1] if line.strip() and not line.lstrip().startswith("#")]
    if ast.get_docstring(node):
        head += lines[node.body[0].lineno - 1:node.body[0].end_lineno]
    return Original(module, path, node.name, "\n".join(lines[node.lineno - 1:node.end_lineno]), "\n".join(head),
                    "\n".join(needed_imports(tree, node, module)))


def needed_imports(tree: ast.Module, function: ast.FunctionDef, module: str) -> list[str]:
    """Statements that bind the names the function reads but does not define."""
    names = [n for n in ast.walk(function) if isinstance(n, ast.Name)]
    own = {a.arg for a in ast.walk(function) if isinstance(a, ast.arg)} | {function.name}
    own |= {n.id for n in names if isinstance(n.ctx, ast.Store)}
    used = {n.id for part in (function.args, *function.body, *filter(None, [function.returns]))
            for n in ast.walk(part) if isinstance(n, ast.Name)} - own
    package = module.split(".")[:-1]
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for a in node.names:
                bound[a.asname or a.name.split(".")[0]] = f"import {a.name}" + (f" as {a.asname}" if a.asname else "")
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package[:len(package) - node.level + 1], *filter(None, [node.module])]) if node.level else node.module
            for a in node.names:
                bound[a.asname or a.name] = f"from {base} import {a.name}" + (f" as {a.asname}" if a.asname else "")
    local = {n for node in tree.body for n in defined(node)}
    statements = {bound.get(n) or (f"from {module} import {n}" if n in local else "") for n in used
                  if n in local or n in bound or not hasattr(builtins, n)}
    groups: dict[str, list[str]] = {}
    for s in statements - {""}:
        base, _, name = s.partition(" import ")
        groups.setdefault(base if name else s, []).append(name)
    plain = sorted(base for base, n in groups.items() if n == [""])
    return plain + [import_text(base, ", ".join(sorted(n))) for base, n in sorted(groups.items()) if n != [""]]


def import_text(base: str, names: str, width: int = 110) -> str:
    line = f"{base} import {names}"
    return line if len(line) <= width else textwrap.fill(f"{base} import ({names})", width, subsequent_indent="    ")


def defined(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return []
    return [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]


def introduction(task: Task) -> str:
    about = textwrap.fill(" ".join(task.about.split()), 110, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
    return (f"# {task.id}: {task.title} ({task.points} points, about {task.minutes} minutes)\n#\n{about}\n#\n"
            f"# python -m exercises watch {task.id}      checks this file whenever you save it\n"
            f"# python -m exercises hint {task.id}       three hints, one at a time\n"
            f"# python -m exercises grade {task.id}      grades it, on inputs drawn anew\n"
            + f"# python -m exercises run {task.id}        shows it at work\n" * (task.chapter == TRACK))


BEGIN = """\
# Your own tiny. Each exercise of the build track adds a part, and what is not here is the book's.
# Read the parts as pages of the book (`make site` builds it): there these functions are folded away. In chapters/tiny.py they stand open.
from __future__ import annotations

from chapters.tiny import *
from exercises import NotDone
"""


def stub(task: Task) -> str:
    """The function without its body."""
    return f"{original(task).header}\n    raise NotDone({task.id!r})"


def in_file(source: str) -> dict[str, ast.FunctionDef]:
    """The functions of a learner's file by name."""
    try:
        return {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    except SyntaxError as error:
        raise ExerciseError(f"The file has a syntax error in line {error.lineno}: {error.msg}. Mend it first.") from None


def appended(source: str, task: Task) -> str:
    """A file of the build track with the starter of one more exercise."""
    if original(task).name in in_file(source):
        raise ExerciseError(f"{original(task).name} is in the file already. `python -m exercises reset {task.id}` begins again.")
    return f"{source.rstrip()}\n\n\n{introduction(task)}{stub(task)}\n"


def begun_again(source: str, task: Task) -> str:
    """A file of the build track in which one function is the starter's again."""
    node, lines = in_file(source).get(original(task).name), source.splitlines()
    if node is None:
        return appended(source, task)
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return "\n".join([*lines[:first - 1], stub(task), *lines[node.end_lineno:]]) + "\n"


def starter(task: Task) -> str:
    """The file that a learner begins with."""
    if task.chapter == TRACK:
        return appended(BEGIN, task)
    if task.starter:
        return f"{introduction(task)}\n{task.starter.strip()}\n"
    o = original(task)
    if o is None:
        raise ExerciseError(f"Task {task.id!r} has neither a tagged cell nor a starter.")
    if not task.plant:
        body = stub(task)
        imports = f"{o.imports}\nfrom exercises import NotDone".strip()
    else:
        body, imports = edited(o.text, task.plant), o.imports
    return f"{introduction(task)}from __future__ import annotations\n\n{imports}\n\n\n{body}\n"


def edited(text: str, edits) -> str:
    """`text` after (old, new) replacements, each of a text that occurs once."""
    for old, new in edits:
        if text.count(old) != 1:
            raise ExerciseError(f"{old!r} occurs {text.count(old)} times in what is to be changed.")
        text = text.replace(old, new)
    return text


def original_text(task: Task) -> str:
    """A file with the original, which earns all points."""
    o = original(task)
    if o is None:
        return solution_path(task).read_text()
    return f"from __future__ import annotations\n\n{o.imports}\n\n\n{o.text}\n"
