"""Run a function in a process of its own, so that whatever it does (crash, hang, write to anything) ends there.

A fork is the cheapest and the most faithful: the child has everything that the parent has, closures and
monkeypatches included, and what it changes nobody else sees. Two things do not survive a fork. CUDA is one: a
process that has used a GPU needs a fresh interpreter, which then forks per job, before it uses the GPU itself;
jobs for it must be picklable. The other are OpenMP's threads: a child of this process has one.
"""
import atexit
import contextlib
import faulthandler
import functools
import importlib
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch

from ..api import compile

# How torch.cuda.is_available() asks. The usual way is one that a fork does not survive.
ASK_NVML = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


@dataclass
class Outcome:
    """What became of a job. `value`: what it returned, if `error` is None. `error`: how it ended instead: a
    signal, an exception of the job itself, or the time limit."""
    value: Any = None
    error: str | None = None


def run(function, *args, seconds: float = 120.0) -> Outcome:
    """function(*args) in a process of its own. The result has to be picklable."""
    if torch.cuda.is_initialized():
        return server().run(function, args, seconds)
    return forked(function, args, seconds)


def forked(function, args, seconds: float, threads: int = 1) -> Outcome:
    """In a fork of this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as result, tempfile.TemporaryFile() as said:
        pid = os.fork()
        if pid == 0:
            os._exit(_child(function, args, result, said, threads))
        ended = _wait(pid, seconds)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)          # and the compilers that it started
        status = os.waitpid(pid, 0)[1]
        if not ended:
            return Outcome(error=f"not finished after {seconds:g} s")
        result.seek(0)
        try:
            return pickle.load(result)
        except (EOFError, pickle.UnpicklingError):
            said.seek(0)
            last = said.read().decode(errors="replace").strip().splitlines()[-1:]
            code = os.waitstatus_to_exitcode(status)
            how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            return Outcome(error=": ".join([f"ended by {how}", *last]))


def _wait(pid: int, seconds: float) -> bool:
    """Whether the child ended in time. It is left to be reaped."""
    deadline, pause = time.monotonic() + seconds, 0.001
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
    return True


def _child(function, args, result, said, threads: int) -> int:
    try:
        import resource
        faulthandler.disable()
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for number in (1, 2):
            os.dup2(said.fileno(), number)
        torch.set_num_threads(threads)
        try:
            outcome = Outcome(function(*args))
        except BaseException as error:
            outcome = Outcome(error=f"{type(error).__name__}: {error}")
        pickle.dump(outcome, result)
        result.flush()
        return 0
    except BaseException:
        return 1


@functools.cache
def warm() -> None:
    """Import what the first compilation imports, once for all processes to come. One of them says what that is:
    to compile anything here would start the threads of the autograd engine, which no fork survives."""
    for name in forked(imported_by_compiling, (), 120.0).value or ():
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def imported_by_compiling() -> list[str]:
    before = set(sys.modules)
    compile(lambda x: x * 2 + x.sum())(torch.ones(4, requires_grad=True)).sum().backward()
    return [name for name in sys.modules if name not in before]


# ---- a server that never uses the GPU itself --------------------------------------------------------------

class Server:
    """A fresh interpreter that forks per job."""

    def __init__(self):
        paths = [str(pathlib.Path(__file__).parents[2]), *sys.path]
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from minicompile.tools import apart; apart.serve_jobs()"], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, env=dict(os.environ, **ASK_NVML, PYTHONPATH=os.pathsep.join(filter(None, paths))))
        self.threads = torch.get_num_threads()

    def run(self, function, args, seconds: float) -> Outcome:
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "job"), "wb") as file:
                pickle.dump((function, args, seconds, self.threads), file)
            self.process.stdin.write(folder.encode() + b"\n")
            self.process.stdin.flush()
            if not self.process.stdout.readline():
                return Outcome(error="the process that starts the others has ended")
            with open(os.path.join(folder, "outcome"), "rb") as file:
                return pickle.load(file)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(10)


_server: Server | None = None


def server() -> Server:
    global _server
    if _server is None or _server.process.poll() is not None:
        _server = Server()
        atexit.register(_server.close)
    return _server


def serve_jobs() -> None:
    """The server's loop: folders on standard input, each with a job; a line on standard output when the
    outcome is there."""
    warm()
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)                      # what jobs print must not look like an answer
    for line in sys.stdin.buffer:
        folder = line.decode().rstrip("\n")
        with open(os.path.join(folder, "job"), "rb") as file:
            function, args, seconds, threads = pickle.load(file)
        outcome = forked(function, args, seconds, threads)
        with open(os.path.join(folder, "outcome"), "wb") as file:
            pickle.dump(outcome, file)
        answers.write(b"\n")
