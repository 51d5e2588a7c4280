"""`run nanogpt --mine`: the small GPT of the benchmark, trained through the learner's functions in the real compiler."""
from __future__ import annotations

import json
import os
import pathlib
import select
import signal
import warnings
from dataclasses import replace

from minicompile.bench.run import default_tasks, resolve_device
from minicompile.bench.worker import train

from . import NotDone, sandbox
from .source import load_tasks


def run(files: dict[str, pathlib.Path], steps: int, device: str | None, seconds: float = 600.0) -> dict:
    """Train eagerly and compiled, each in a fork. files: exercise -> the learner's file. Returns both results by compiler."""
    sandbox.warm()
    load_tasks()
    first = default_tasks("nanogpt", resolve_device(device), None)[0]
    return {name: in_fork(replace(first, compiler=name, steps=steps), files if name == "minicompile" else {}, seconds)
            for name in ("eager", "minicompile")}


def in_fork(task, files, seconds) -> dict:
    for id in files:
        sandbox.target(id)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        try:
            result = body(task, files)
        except BaseException as error:
            result = {"error": "an exercise is not done yet" if NotDone.raised else f"{type(error).__name__}: {str(error)[:300]}"}
        try:
            with os.fdopen(write, "w") as out:
                json.dump(result, out)
        finally:
            os._exit(0)
    os.close(write)
    data, piece = b"", b"x"
    with os.fdopen(read, "rb", buffering=0) as out:
        while piece and select.select([out], [], [], seconds)[0]:
            piece = out.read(1 << 16)
            data += piece
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    os.waitpid(pid, 0)
    return json.loads(data) if data else {"error": "it ended or hung without a result"}


def body(task, files) -> dict:
    from . import TASKS
    warnings.filterwarnings("error", message="minicompile: ")
    import minicompile
    minicompile.config.raise_on_internal_error = True
    for id, path in files.items():
        NotDone.raised = False
        sandbox.install(TASKS[id], path.read_text(), str(path))
    return train(task)
