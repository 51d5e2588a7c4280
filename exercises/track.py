"""`run ID` and `run tiny`: tiny with the learner's parts in it, at work."""
from __future__ import annotations

import json
import os
import pathlib
import sys

from . import NotDone, Task, sandbox
from .source import track

STEPS = 40


def in_fork(body, source: str | None, filename: str, upto: Task | None = None, seconds: float = 600.0) -> dict:
    """What body(tiny) returns in a process where the learner's parts stand in tiny: all, or those up to one exercise. Or {"error": ...}."""
    sandbox.warm()
    for t in track():
        sandbox.target(t.id)

    def child(pipe: int) -> None:
        from chapters import tiny
        try:
            if source is not None:
                sandbox.install(sandbox.parts(upto, source) if upto else sandbox.done(source), source, filename)
            found = body(tiny)
            if NotDone.raised:                  # tiny took it for a graph break, and went on
                found = {"error": "an exercise is not done yet"}
        except BaseException as error:
            text = " ".join(f"{type(error).__name__}: {error}"[:300].split())
            found = {"error": "an exercise is not done yet" if NotDone.raised else text}
        sys.stdout.flush()
        os.write(pipe, json.dumps(found).encode())
    data, ended, _ = sandbox.in_fork(child, seconds)
    return json.loads(data) if data else {"error": "the process ended without a result" if ended else f"not finished after {seconds:g} s"}


def demonstrate(task: Task, path: pathlib.Path) -> dict:
    """Show the exercise's demonstration and run it; what it prints goes to standard output."""
    def body(tiny):
        print(task.demo.strip(), end="\n\n", flush=True)
        exec(compile(task.demo, f"<{task.id}>", "exec"), vars(tiny))
        return {}
    sys.stdout.flush()
    return in_fork(body, path.read_text(), str(path), task)


def trained(path: pathlib.Path | None, steps: int = STEPS, device: str | None = None) -> dict:
    """compiler -> losses and milliseconds of tiny's GPT, trained eagerly, with tiny, and with the learner's tiny."""
    import torch
    gpu = torch.cuda.is_available() if device is None else device.startswith("cuda")
    sizes = dict(layers=6, width=384, heads=6, length=256, batch=64) if gpu else dict(layers=2, width=64, length=64, batch=8)

    def body(compiled):
        def train(tiny):
            wrap = tiny.compile if compiled else lambda model: model
            losses, seconds = tiny.train(wrap, steps, device or ("cuda" if gpu else "cpu"), **sizes)
            return {"losses": losses, "ms": 1e3 * seconds}
        return train
    found = {"eager": in_fork(body(False), None, ""), "tiny": in_fork(body(True), None, "")}
    return found | ({"yours": in_fork(body(True), path.read_text(), str(path))} if path else {})
