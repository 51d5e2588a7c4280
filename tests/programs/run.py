"""Checks a range of seeds; one job of the command in `__main__.py`."""
from __future__ import annotations

import collections
import logging

import torch

import minicompile

from .compare import check
from .generate import program
from .reduce import reduce


def backend_of(seed: int) -> str:
    return "aot_eager" if seed % 10 == 9 else "eager"


def setup():
    torch.set_num_threads(1)
    minicompile.config.raise_on_internal_error = True
    logging.disable(logging.CRITICAL)


def job(args):
    setup()
    return run_seeds(args)


def run_seeds(args):
    """Checks seeds. args: first, last (exclusive), backend or None, seconds for reducing, folder for failing programs."""
    first, last, backend, shrink, keep = args
    failures, features = [], collections.Counter()
    reduced = set()
    for seed in range(first, last):
        statistics, used = {}, backend or backend_of(seed)
        text = program(seed)
        try:
            problem = check(text, used, statistics)
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
                small = reduce(text, lambda t: check(t, used, seconds=2.0), problem[0], seconds=shrink)
            if keep:
                with open(f"{keep}/{seed}_{used}.py", "w") as file:
                    file.write(small or text)
            failures.append((seed, used, *problem, small))
            print(f"seed {seed} ({used}): {problem[0]}: {problem[1]}"[:600], flush=True)
            if small:
                print("    " + small.replace("\n", "\n    "), flush=True)
    return failures, features


