"""`run nanogpt --mine`: the small GPT of the benchmark, trained through the learner's functions in the real compiler."""
from __future__ import annotations

import json
import os
import pathlib
import resource
import sys
import threading
import time
import warnings
from dataclasses import replace

from minicompile.bench.run import default_tasks, resolve_device
from minicompile.bench.worker import train

from . import TASKS, NotDone, sandbox
from .source import load_tasks

PATIENCE = 20.0          # seconds that one call of a learner's function may take
MEMORY = 8192            # MiB beyond PyTorch


def run(files: dict[str, pathlib.Path], steps: int, device: str | None, seconds: float = 900.0) -> dict:
    """Train eagerly and compiled, each in a fork. files: exercise -> the learner's file. Returns both results by compiler."""
    sandbox.warm()
    load_tasks()
    first = replace(default_tasks("nanogpt", resolve_device(device), None)[0], steps=steps)
    for id in files:
        sandbox.target(id)
    return {name: in_fork(replace(first, compiler=name), files if name == "minicompile" else {}, seconds)
            for name in ("eager", "minicompile")}


def in_fork(task, files: dict[str, pathlib.Path], seconds: float) -> dict:
    """The result of one training in a process of its own, or {"error": why there is none}."""
    data, ended, _ = sandbox.in_fork(lambda pipe: os.write(pipe, json.dumps(body(task, files, pipe)).encode()), seconds)
    if data:
        return json.loads(data)
    return {"error": "the process ended without a result" if ended else f"training did not end within {seconds:g} s"}


def body(task, files: dict[str, pathlib.Path], pipe: int) -> dict:
    import minicompile
    minicompile.reset()                     # what the process before the fork compiled
    warnings.filterwarnings("error", message="minicompile: ")
    minicompile.config.raise_on_internal_error = True
    try:
        if task.device == "cpu":            # CUDA reserves addresses without end
            resource.setrlimit(resource.RLIMIT_AS, (sandbox.address_space() + MEMORY * 2**20,) * 2)
        threading.Thread(target=watch, args=({str(p) for p in files.values()}, pipe), daemon=True).start()
        for id, path in files.items():
            NotDone.raised = False
            sandbox.install([TASKS[id]], path.read_text(), str(path))
        return train(task)
    except BaseException as error:
        if NotDone.raised:
            return {"error": "an exercise is not done yet"}
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            return {"error": f"needs more than {MEMORY} MiB"}
        return {"error": " ".join(f"{type(error).__name__}: {error}"[:300].split())}


def watch(filenames: set[str], pipe: int) -> None:
    """End the process if a call of a learner's function does not return."""
    began: dict = {}
    while True:
        time.sleep(0.5)
        running = {}
        for frame in sys._current_frames().values():
            while frame:
                if frame.f_code.co_filename in filenames:
                    running[frame] = began.get(frame, time.monotonic())
                frame = frame.f_back
        began = running
        for frame, since in began.items():
            if time.monotonic() - since > PATIENCE:
                where = f"{frame.f_code.co_filename}, line {frame.f_lineno}"
                os.write(pipe, json.dumps({"error": f"{where}: not finished after {PATIENCE:g} s: an endless loop?"}).encode())
                os._exit(1)
