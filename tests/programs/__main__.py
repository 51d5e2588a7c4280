"""Random programs, plain and compiled: `python -m tests.programs --count 20000 --jobs 2`, `python -m tests.programs --seed 17`.

Each difference is reduced to a small program and printed, as a module that can be run by `--file`."""
from __future__ import annotations

import argparse
import collections
import multiprocessing
import sys
import time

from .compare import check
from .generate import program
from .run import job, setup


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__)
    parser.add_argument("--seed", type=int, help="this program only")
    parser.add_argument("--file", help="check the module in this file")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--backend")
    parser.add_argument("--shrink", type=float, default=20.0, help="seconds for reducing one program; 0: not at all")
    parser.add_argument("--keep", help="write failing programs to this folder")
    parser.add_argument("--show", action="store_true", help="print the program of --seed")
    options = parser.parse_args()
    if options.file:
        setup()
        found = check(open(options.file).read(), options.backend or "eager")
        print(found or "no difference")
        return int(found is not None)
    if options.seed is not None:
        if options.show:
            print(program(options.seed))
        options.first, options.count = options.seed, 1
    start, last = time.time(), options.first + options.count
    chunk = min(100, -(-options.count // options.jobs))
    work = [(first, min(first + chunk, last), options.backend, options.shrink, options.keep) for first in range(options.first, last, chunk)]
    failures, features = [], collections.Counter()
    if options.jobs == 1:
        results = map(job, work)
    else:
        pool = multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=4)
        results = pool.imap_unordered(job, work)
    for failed, counted in results:
        failures += failed
        features += counted
        print(f"{features['programs']} of {options.count} programs, {len(failures)} differ", file=sys.stderr, flush=True)
    seconds = time.time() - start
    print(f"{len(failures)} of {features['programs']} programs differ; {seconds:.0f} s, {features['programs'] / seconds:.1f} programs/s")
    for kind, number in collections.Counter(f[2] for f in failures).most_common():
        print(f"{number:5} {kind}   seeds {[f[0] for f in failures if f[2] == kind][:8]}")
    print(dict(features))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
