"""One graded behaviour in a process of its own: a fork of a process that has torch and the compiler imported.

In the fork every function object of the original gets, in place of its code, a call of the learner's function: module attributes, tables,
closures and wrappers keep their references, and no code of the original is left in memory. No file can be opened any more (the limit on
descriptors is zero), no process started, and time and memory are limited. What is right is never in this process: it is computed in another
fork, after this one, and compared in the parent.

A learner's code shares this process with what observes it, and so could send a report of its own. Only lines that begin with a key
are read; the stack, on which the key stands, and the garbage collector's lists are out of reach; and nothing counts if a function of the
compiler or of the grader is another one than before. That stops simple forgeries, not somebody who knows CPython's memory: where
grades matter, run `grade` in a container that has neither the book's sources nor a network, and read what was handed in.
"""
from __future__ import annotations

import ast
import ctypes
import functools
import gc
import importlib
import inspect
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

import torch

import minicompile
from minicompile.ch03_capture import hook

from . import TASKS, TRACK, Behaviour, ExerciseError, NotDone, Task
from .data import NotPlain, decode, encode, short
from .source import in_file, original, original_text

FORBIDDEN = ("open", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.kill", "ctypes.", "socket.", "os.spawn",
             "os.remove", "os.rename", "shutil.", "os.symlink", "os.link", "os.mkdir", "os.rmdir", "os.chmod", "os.truncate", "resource.",
             "gc.get_", "sys.settrace", "sys.setprofile", "sys._current_frames", "sys._current_exceptions")
EXPECTED: dict = {}              # what originals showed; emptied in every fork that runs a learner's code
FRAMES = {"tb_frame", "gi_frame", "cr_frame", "ag_frame"}           # attributes that lead to the stack


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
        if not any(part in m.name for part in ("__main__", ".bench", ".worker", "interpreted")):
            importlib.import_module(m.name)
    hook.is_library_file("")            # lists folders, once
    gc.collect()
    gc.freeze()


@functools.cache
def target(task_id: str):
    """(name, module, function objects) of a task's original; None if it has none in the package."""
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
    return o.name, module, functions


def _forward(*args, **kwargs):
    learners = 6102938471
    return learners(*args, **kwargs)


def redirect(functions, replacement) -> None:
    """Make every one of these function objects call `replacement`."""
    code = _forward.__code__
    consts = tuple(replacement if c == 6102938471 else c for c in code.co_consts)
    for f in functions:         # the file stays: the frame hook leaves the compiler's own files alone
        f.__code__ = code.replace(co_consts=consts, co_name=f.__name__, co_filename=f.__code__.co_filename)
        f.__defaults__ = f.__kwdefaults__ = None


def absent(*args, **kwargs):
    raise NotDone("the original is not here")


def done(source: str) -> list[Task]:
    """The exercises of the build track that a learner's file has done, in order."""
    names = {name for name, node in in_file(source).items() if "NotDone" not in ast.unparse(node)}
    return [t for t in TASKS.values() if t.chapter == TRACK and target(t.id)[0] in names]


def parts(task: Task, source: str) -> list[Task]:
    """This exercise, and before it those of the build track on which it stands."""
    if task.chapter != TRACK:
        return [task]
    order = list(TASKS)
    return [*(t for t in done(source) if order.index(t.id) < order.index(task.id)), task]


def install(tasks: list[Task], source: str, filename: str):
    """Run the learner's file and put its functions for these exercises into the compiler. Returns what behaviours of the last one get as
    `function`."""
    targets = [target(t.id) or (t.function, None, ()) for t in tasks]
    for _, _, functions in targets:
        redirect(functions, absent)
    hook.never_capture(filename)
    module = types.ModuleType("learner")
    module.__file__ = filename
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    exec(compile(source, filename, "exec", dont_inherit=True), module.__dict__)
    for name, home, functions in targets:
        learners = module.__dict__.get(name)
        if not callable(learners) or learners in functions:
            raise ExerciseError(f"{filename} does not define the function {name}.")
        redirect(functions, learners)
        found = getattr(home, name) if home else learners
        getattr(found, "cache_clear", lambda: None)()
    return found


def wanted_imports(source: str) -> None:
    """Import, before files are out of reach, what the learner's file imports from the standard library and the compiler."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""] if isinstance(node,
            ast.ImportFrom) else []
        for name in names:
            if name.split(".")[0] in {*sys.stdlib_module_names, "torch", "minicompile", "chapters", "numpy"} - {"antigravity", "this"}:
                try:
                    importlib.import_module(name)
                except ImportError:
                    pass


def address_space() -> int:
    """Bytes of addresses in use."""
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()


def restrict(filename: str) -> None:
    """Take away what a learner's code does not need."""
    os.closerange(4, 4096)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    within = []

    def audit(event, args):
        if event.startswith(FORBIDDEN):
            raise PermissionError(f"graded code may not call {event}")
        if not within and (event == "sys._getframe" or event == "object.__getattr__" and args[1] in FRAMES):
            within.append(event)            # asking who calls is such an event itself
            caller = sys._getframe(1)
            while caller.f_code.co_filename == inspect.__file__:
                caller = caller.f_back
            within.clear()
            if caller.f_code.co_filename in (filename, "<string>"):
                raise PermissionError("graded code may not look at the stack")
    sys.addaudithook(audit)


def functions_now() -> list:
    """(dictionary, key, value, code) of the functions and classes of the compiler and the grader."""
    return [(vars(module), key, value, getattr(value, "__code__", None)) for name, module in list(sys.modules.items())
            if module and name.startswith(("minicompile", "exercises", "chapters")) for key,
            value in vars(module).items() if type(value) in (types.FunctionType, type)]


def child(pipe: int, say_key: str, task: Task, behaviour: Behaviour, source: str | None, seed: int, filename: str,
          given: list | None) -> None:
    """The life of a fork. `source` None observes the original; with `given` it goes on with what another fork has observed."""
    write, dumps = os.write, json.dumps

    def say(**message):
        write(3, f"{say_key}{dumps(message)}\n".encode())

    null = os.open("/dev/null", os.O_RDWR)
    if pipe != 3:
        os.dup2(pipe, 3)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    modules, before = set(sys.modules) if source is None else (), []
    NotDone.raised = False
    line = function = None
    try:
        minicompile.config.raise_on_internal_error = True
        torch.manual_seed(seed)
        random.seed(seed)
        found = target(task.id) or (task.function, None, ())
        resource.setrlimit(resource.RLIMIT_AS, (address_space() + task.memory * 2**20,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (int(task.seconds * (1 if source is not None else 3)) + 2,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if source is not None:
            wanted_imports(source)
            EXPECTED.clear()
            for name in [f for f in linecache.cache if "minicompile" in f or "chapters" in f]:
                del linecache.cache[name]
            before = functions_now()
            replaced = [f for t in parts(task, source) for f in (target(t.id) or (0, 0, ()))[2]]
            restrict(filename)
            function = install(parts(task, source), source, filename)
        elif found[1]:
            function = getattr(found[1], found[0])
        elif not behaviour.answer:
            space: dict = {}
            exec(compile(original_text(task), "<solution>", "exec"), space)
            function = space[task.function]
        say(loaded=True)
        cases = [None] if behaviour.answer else behaviour.cases(random.Random(seed))
        for i, case in enumerate(cases if given is None else cases[:len(given)]):
            shown = "" if source is not None or behaviour.answer else show(behaviour, case)
            if behaviour.answer:
                value, shown = behaviour.observe()
            else:
                value = behaviour.observe(function, case) if given is None else behaviour.then(case, decode(given[i]))
            if NotDone.raised:
                raise NotDone(task.id)
            say(case=i, value=encode(value), shown=shown)
        for space, key, value, code in before:
            if space.get(key) is not value or getattr(value, "__code__", None) is not code and value not in replaced:
                raise ExerciseError(f"{filename} changes {key} in {space['__name__']}; only the exercise's own function may differ")
        say(done=True, imports=sorted(set(sys.modules) - modules) if source is None else [])
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


def end_with(parent: int) -> None:
    """The kernel ends this process when its parent ends, however that does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)              # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def in_fork(body, seconds: float) -> tuple[bytes, bool, int]:
    """Call body(pipe) in a fork. Returns what it wrote to the pipe, whether it ended within `seconds`, and its exit status."""
    parent, (read, write) = os.getpid(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            end_with(parent)
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


def talk(task: Task, behaviour: Behaviour, source: str | None, seed: int, filename: str, seconds: float,
         given: list | None = None) -> list[dict]:
    """One fork's messages; the last has `done` or `error`."""
    key = os.urandom(16).hex()
    data, ended, status = in_fork(lambda pipe: child(pipe, key, task, behaviour, source, seed, filename, given), seconds)
    *lines, rest = data.split(b"\n")
    if not all(text.startswith(key.encode()) for text in lines):
        return [{"error": "error", "text": "something besides the grader wrote to the grader's pipe"}]
    messages = [json.loads(text[len(key):]) for text in lines]
    loaded = messages[:1] == [{"loaded": True}]
    messages = messages[loaded:]
    if not messages or not ({"done", "error"} & set(messages[-1])):
        crash = os.WIFSIGNALED(status) and ended
        messages.append({"error": "timeout" if not ended else "error", "text": f"not finished after {seconds:g} s: an endless loop?"
                         if not ended else f"the process was ended by signal {os.WTERMSIG(status)}" if crash else
                         "the process ended before it gave a result"})
    return messages if loaded else [{**messages[-1], "unloaded": True}]


def run(task: Task, behaviour: Behaviour, source: str | None, seed: int, filename: str = "", seconds: float = 0) -> list[dict]:
    """Run one behaviour in a fork, and its `then` on what that observed in another one, without the learner's code."""
    warm()
    for t in TASKS.values() if task.chapter == TRACK else [task]:
        if t.chapter in (TRACK, task.chapter):
            target(t.id)
    messages = talk(task, behaviour, source, seed, filename, seconds or 3 * task.seconds)
    if behaviour.then and "value" in messages[0]:
        further = talk(task, behaviour, None, seed, filename, 3 * task.seconds, [m["value"] for m in messages[:-1]])
        messages = further[:-1] + ([messages[-1]] if "done" in further[-1] else [further[-1]])
    return messages
