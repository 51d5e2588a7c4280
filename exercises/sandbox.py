"""One graded behaviour in a process of its own: a fork of a process that has torch and the compiler imported.

In the fork every function object of the original gets, in place of its code, a call of the learner's function: module attributes, tables,
closures and wrappers keep their references, and no code of the original is left in memory. Files cannot be opened any more (the limit on
descriptors is in use already), processes not started, and time and memory are limited.
"""
from __future__ import annotations

import ast
import functools
import gc
import importlib
import json
import linecache
import os
import pkgutil
import random
import resource
import select
import signal
import sys
import time
import types

import minicompile
import torch

from . import TASKS, Behaviour, ExerciseError, NotDone, Task
from .data import NotPlain, encode, short
from .source import original

FORBIDDEN = ("subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.kill", "ctypes.", "socket.", "os.spawn",
             "os.remove", "os.rename", "shutil.", "os.symlink", "os.link", "os.mkdir", "os.rmdir", "os.chmod", "os.truncate")
KEPT: list[dict] = []          # caches of expected values, emptied in every fork


def leave(status: int) -> None:
    """End the process without tearing down the compiler, whose libraries then complain of leaks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


@functools.cache
def warm() -> None:
    """Import the whole compiler, once."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    for m in pkgutil.walk_packages(minicompile.__path__, "minicompile."):
        if not any(part in m.name for part in ("__main__", ".bench", ".worker", "interpreted", ".no_hook")):
            importlib.import_module(m.name)
    gc.collect()
    gc.freeze()


@functools.cache
def target(task_id: str):
    """(module, name, function objects) of a task's original; None if it has none in the package."""
    o = original(TASKS[task_id])
    if o is None:
        return None
    module = importlib.import_module(o.module)
    gc.unfreeze()
    functions = [f for f in gc.get_objects() if type(f) is types.FunctionType and f.__code__.co_filename == str(o.path)
                 and f.__code__.co_qualname == o.name]
    gc.freeze()
    if not functions:
        raise ExerciseError(f"{o.module} has no function {o.name}.")
    return o.module, o.name, module, functions


def _forward(*args, **kwargs):
    learners = 6102938471
    return learners(*args, **kwargs)


def redirect(functions, replacement) -> None:
    """Make every one of these function objects call `replacement`."""
    code = _forward.__code__
    consts = tuple(replacement if c == 6102938471 else c for c in code.co_consts)
    for f in functions:
        f.__code__ = code.replace(co_consts=consts, co_name=f.__name__)
        f.__defaults__ = f.__kwdefaults__ = None


def absent(*args, **kwargs):
    raise NotDone("the original is not here")


def install(task: Task, source: str, filename: str):
    """Run the learner's file and put its function into the compiler. Returns what behaviours get as `function`."""
    found = target(task.id)
    name = found[1] if found else task.function
    if found:
        redirect(found[3], absent)
    module = types.ModuleType("learner")
    module.__file__ = filename
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    exec(compile(source, filename, "exec"), module.__dict__)
    learners = module.__dict__.get(name)
    if not callable(learners):
        raise ExerciseError(f"{filename} does not define the function {name}.")
    if not found:
        return learners
    redirect(found[3], learners)
    attribute = getattr(found[2], name)
    getattr(attribute, "cache_clear", lambda: None)()
    return attribute


def wanted_imports(source: str) -> None:
    """Import, before files are out of reach, what the learner's file imports from the standard library and the compiler."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            if name.split(".")[0] in {*sys.stdlib_module_names, "torch", "minicompile", "numpy"} - {"antigravity", "this"}:
                try:
                    importlib.import_module(name)
                except ImportError:
                    pass


def address_space() -> int:
    """Bytes of addresses in use."""
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()


def restrict(task: Task, seconds: float) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + task.memory * 2**20,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 2,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not task.compiler:
        os.closerange(4, 4096)
        resource.setrlimit(resource.RLIMIT_NOFILE, (4, 4))
    package = os.path.dirname(minicompile.__file__)
    own = (package, os.path.dirname(__file__))

    def audit(event, args):
        if event == "open" and isinstance(args[0], str) and args[0].startswith(own) and not args[0].endswith((".so", ".h")):
            raise PermissionError("graded code may not read the compiler's sources")
        if not task.compiler and event.startswith(FORBIDDEN):
            raise PermissionError(f"graded code may not call {event}")
    sys.addaudithook(audit)


def forget(task: Task) -> None:
    """Drop what a fork of the grader remembers and a learner may not see."""
    for kept in KEPT:
        kept.clear()
    texts = {t.solution for t in TASKS.values() if t.solution}
    for t in TASKS.values():
        t.solution = ""
    for name, module in list(sys.modules.items()):
        if name.startswith("exercises.tasks."):
            for key in [k for k, v in vars(module).items() if type(v) is str and v in texts]:
                setattr(module, key, "")
    for filename in [f for f in linecache.cache if "minicompile" in f]:
        del linecache.cache[filename]


def child(pipe: int, task: Task, behaviour: Behaviour, source: str | None, seed: int, filename: str, limited: bool) -> None:
    """The life of a fork. `source` None observes the original."""
    def say(**message):
        os.write(3, (json.dumps(message) + "\n").encode())

    null = os.open("/dev/null", os.O_RDWR)
    if pipe != 3:
        os.dup2(pipe, 3)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    modules = set(sys.modules)
    NotDone.raised = False
    line = None
    try:
        minicompile.config.raise_on_internal_error = True
        torch.manual_seed(seed)
        random.seed(seed)
        if source is None:
            if limited:
                restrict(task, task.seconds)
            found = target(task.id)
            function = getattr(found[2], found[1]) if found else None
            if not found and task.solution:
                space: dict = {}
                exec(compile(task.solution, "<solution>", "exec"), space)
                function = space[task.function]
        else:
            wanted_imports(source)
            forget(task)
            target(task.id)
            restrict(task, task.seconds)
            function = install(task, source, filename)
        cases = [None] if behaviour.answer else behaviour.cases(random.Random(seed))
        for i, case in enumerate(cases):
            shown = "" if source is not None else show(behaviour, case)
            value = behaviour.observe() if behaviour.answer else behaviour.observe(function, case)
            if NotDone.raised:
                raise NotDone(task.id)
            say(case=i, value=encode(value), shown=shown)
        say(done=True, imports=sorted(set(sys.modules) - modules) if not limited else [])
    except SyntaxError as error:
        where = f"line {error.lineno}: " if error.lineno and error.filename == filename else ""
        say(error="syntax", text=f"syntax error in {where}{error.msg}")
    except NotPlain as error:
        say(error="error", text=str(error))
    except ExerciseError as error:
        say(error="error", text=str(error))
    except BaseException as error:
        text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip(": ")
        trace = error.__traceback__
        while trace:
            if trace.tb_frame.f_code.co_filename == filename:
                line = trace.tb_lineno
            trace = trace.tb_next
        if line and source:
            text += f" (line {line}: {source.splitlines()[line - 1].strip()})"
        memory = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
        kind = "not done" if NotDone.raised else "memory" if memory else "error"
        say(error=kind, text="not done yet" if kind == "not done" else f"needs more than {task.memory} MiB" if memory else text[:400])


def show(behaviour: Behaviour, case) -> str:
    if case is None:
        return ""
    return behaviour.show(case) if behaviour.show else short(case)


def in_fork(body, seconds: float) -> tuple[bytes, bool, int]:
    """Call body(pipe) in a fork. Returns what it wrote to the pipe, whether it ended within `seconds`, and its exit status."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            body(write)
        finally:
            os._exit(0)
    os.close(write)
    deadline, data, ended = time.monotonic() + seconds, b"", False
    try:
        while not ended and len(data) < 64 << 20:
            ready, _, _ = select.select([read], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            piece = os.read(read, 1 << 16)
            ended, data = not piece, data + piece
    finally:
        os.close(read)
        for kill in (os.killpg, os.kill):
            try:
                kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        _, status = os.waitpid(pid, 0)
    return data, ended, status


def run(task: Task, behaviour: Behaviour, source: str | None, seed: int, filename: str = "", limited: bool = True) -> list[dict]:
    """Run one behaviour in a fork and return its messages; the last has `done` or `error`."""
    warm()
    target(task.id)
    seconds = task.seconds * (1 if source is not None else 3)
    data, ended, status = in_fork(lambda pipe: child(pipe, task, behaviour, source, seed, filename, limited), seconds)
    messages = []
    for text in data.splitlines():
        try:
            message = json.loads(text)
            messages.append(message if isinstance(message, dict) else {})
        except ValueError:
            pass
    if not messages or not ({"done", "error"} & set(messages[-1])):
        crash = os.WIFSIGNALED(status) and ended
        messages.append({"error": "timeout" if not ended else "error", "text": f"not finished after {seconds:g} s: an endless loop?"
                         if not ended else f"the process was ended by signal {os.WTERMSIG(status)}" if crash else
                         "the process ended before it gave a result"})
    return messages
