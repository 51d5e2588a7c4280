"""Checks a range of seeds; one job of the command in `__main__.py`."""
from __future__ import annotations

import collections
import functools
import logging
import os
import pathlib
import re
import subprocess
import sys
import time
import warnings

import torch

import minicompile
from minicompile.tools import apart

from . import derivatives, expressions, generate, tensors, training
from .compare import OUTSIDE, REFUSED, check
from .cuts import mark
from .reduce import reduce

KINDS = {"python": generate.program, "tensors": tensors.program, "training": training.program,
         "derivatives": derivatives.program, "expressions": expressions.program,
         **{f"tensors/{name}": functools.partial(tensors.program, favourite=name) for name in tensors.FAMILIES}}


def takes_device(kind: str) -> bool:
    """Whether programs of this kind are written for a device."""
    return kind.startswith(("tensors", "expressions"))


def backend_of(seed: int, kind: str, device: str) -> str:
    """The rung for a seed where none was asked for."""
    if takes_device(kind):                                  # of expressions, the printed kernels are looked at
        return "triton" if device == "cuda" else "default" if kind.startswith("tensors") else "cpp"
    if kind in ("training", "derivatives"):
        return ["eager", "aot_eager", "cpp", "default"][seed % 4]
    return "aot_eager" if seed % 10 == 9 else "eager"


def setup():
    torch.set_num_threads(1)
    if torch.cuda.is_available():                           # float32 means float32, for both sides
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.deterministic = True
    minicompile.config.raise_on_internal_error = minicompile.config.check_passes = True
    logging.disable(logging.CRITICAL)
    warnings.filterwarnings("ignore", category=SyntaxWarning)        # of what reducing makes, such as a call of 1


def refuses_values(text: str, words: tuple[str, ...]) -> bool:
    """Whether a program has an error of a CPU's kernel with one of these words, such as an index out of range. On a GPU that ends the
    process, in eager too."""
    found, names = [], {}

    def call(function, *args):
        try:
            function(*args)
        except Exception as error:
            found.append(any(word in str(error) for word in words))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(text, "<program>", "exec"), names)
        names["drive"](lambda function: function, call)
    return any(found)


def job(args):
    """`run_seeds` in a process of its own, which a program may end: then this says so, in place of what it had found. What ends it in
    eager, while its statements are tried, is no difference: the programs around it are run."""
    apart.warm()
    outcome = apart.forked(alone, (args,), 3600)
    if outcome.error is None:
        return outcome.value
    kind, device, first, last, backend, *_ = args
    if written := re.search(r"writing (\d+)\W*$", outcome.error):
        parts = [job((kind, device, *part, *args[4:])) for part in ((first, int(written[1])), (int(written[1]) + 1, last))]
        return sum((failed for failed, _ in parts), []), sum((features for _, features in parts), collections.Counter())
    return [(first, backend or backend_of(first, kind, device), "crash", f"a program of {first} to {last - 1}: {outcome.error}", None)], {}


def alone(args):
    setup()
    return run_seeds(args)


def run_seeds(args):
    """Checks seeds. args: kind, device, first, last (exclusive), backend or None, seconds for reducing, folder for failing programs, time
    at which to stop, and the permille of instructions at which graphs end (`cuts.py`), or nothing."""
    kind, device, first, last, backend, shrink, keep, deadline, *permille = args
    failures, features = [], collections.Counter()
    reduced = set()
    for seed in range(first, last):
        os.write(2, f"writing {seed}\n".encode())            # the last line of a process that a program has ended
        if time.time() > deadline:
            break
        statistics, used = {}, backend or backend_of(seed, kind, device)
        text = KINDS[kind](seed, device) if takes_device(kind) else KINDS[kind](seed)
        text = mark(text, seed, *permille)
        os.write(2, f"seed {seed}\n".encode())
        kernels = OUTSIDE if device == "cuda" else REFUSED if used == "triton" else ()        # an interpreted one divides by zero
        if kernels and refuses_values(text.replace("DEVICE = 'cuda'", "DEVICE = 'cpu'"), kernels):
            continue
        began = time.process_time()
        try:
            problem = check(text, used, statistics)
            if device == "cuda":
                torch.cuda.synchronize()                    # an error belongs to the program that caused it
        except torch.AcceleratorError as error:             # this process is of no use any more
            failures.append((seed, used, "device", str(error)[:200], None))
            break
        except SyntaxError as error:
            problem = "syntax", str(error)
        except Exception as error:
            problem = f"plain {type(error).__name__}", str(error)[:200]
        features["programs"] += 1
        features["with a graph"] += statistics.get("graphs", 0) > 0
        features["graphs"] += statistics.get("graphs", 0)
        features["breaks"] += len(statistics.get("breaks", ()))
        features["calls that returned"] += statistics.get("calls", 0)
        features["calls that raised"] += statistics.get("raised", 0)
        if problem is not None:
            small = None
            if shrink and problem[0] not in reduced and not problem[0].startswith(("plain", "syntax", "too long")):
                reduced.add(problem[0])
                took = time.process_time() - began
                shorter = functools.partial(reduce, text, lambda t: check(t, used, seconds=2 + took), problem[0], seconds=shrink)
                # A check that is ended by its time limit, anywhere, leaves a process in which others may fail.
                small = shorter() if device == "cuda" else apart.forked(shorter, (), 60 + 20 * shrink).value
            if keep:
                os.makedirs(keep, exist_ok=True)
                with open(f"{keep}/{seed}_{used}.py", "w") as file:
                    file.write(small or text)
            failures.append((seed, used, *problem, small))
    return failures, features




def differ_interpreted(kind: str, count: int, found: list) -> str:
    """What differs in Triton's interpreter, of so many programs and of those in files; nothing where none does. Triton decides at import
    whether it interprets, so they run in a process of their own."""
    run = subprocess.run([sys.executable, "-c", f"""
from tests.programs.compare import check
from tests.programs.run import run_seeds, setup
setup()
failures, _ = run_seeds(("{kind}", "cpu", 0, {count}, "triton", 0, None, float("inf")))
for path in {[str(p) for p in found]}:
    found = check(open(path).read(), "triton")
    failures += [(path, found)] if found else []
assert not failures, failures
"""], env=dict(os.environ, TRITON_INTERPRET="1"), cwd=pathlib.Path(__file__).parents[2], capture_output=True, text=True)
    return run.stderr[-3000:] or f"exit status {run.returncode}" if run.returncode else ""
