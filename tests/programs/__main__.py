"""Random programs, plain and compiled: `python -m tests.programs --count 20000 --jobs 2`, `python -m tests.programs --seed 17`;
`--kind tensors` for programs of tensors only, on every rung (`--backend`) and device (`--kind tensors/scatters`: most statements of one
family), `--kind expressions` for dozens of small expressions in each; `--kind training` for whole training steps, `--kind derivatives` for
derivatives of derivatives. `--cuts 50` ends graphs at so many of a thousand instructions as well, wherever they are.

Each difference is reduced to a small program and printed, as a module that can be run by `--file`."""
from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import pathlib
import sys
import threading
import time

from minicompile.bench.run import environment

from .compare import check
from .cuts import mark
from .run import KINDS, backend_of, job, setup, takes_device


def record(path: str, options, features, failures, seconds: float) -> None:
    """Add the counts of this run to those of earlier ones in a JSON file."""
    file = pathlib.Path(path)
    known = json.loads(file.read_text()) if file.exists() else {"benchmark": f"random programs: {options.kind}", "rungs": {}, "runs": []}
    rung = options.backend or ", ".join(dict.fromkeys(backend_of(seed, options.kind, options.device) for seed in range(10)))
    rung += " with cuts" if options.cuts else ""
    rung += " on a GPU" if options.device == "cuda" else " in Triton's interpreter" if rung == "triton" else ""
    total = known["rungs"].setdefault(rung, {})
    for name, number in {**features, "differ": len(failures)}.items():
        total[name] = total.get(name, 0) + number
    known["runs"].append({**environment("tests.programs"), "rung": rung, "programs": features["programs"], "seconds": round(seconds),
                          "differ": len(failures), "seeds that differ": [f[0] for f in failures]})
    file.write_text(json.dumps(known, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__)
    parser.add_argument("--seed", type=int, help="this program only")
    parser.add_argument("--file", help="check the module in this file, on the first rung of --kind and --device unless --backend is told")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--kind", choices=KINDS, default="python")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of the tensors")
    parser.add_argument("--backend", help="the rung; of tensor programs default or triton, unless told")
    parser.add_argument("--cuts", type=int, default=0, metavar="PERMILLE", help="of the instructions end the graph (see cuts.py)")
    parser.add_argument("--seconds", type=float, default=1e9, help="no new program after so many")
    parser.add_argument("--record", help="add the counts to this JSON file")
    parser.add_argument("--shrink", type=float, default=20.0, help="seconds for reducing one program; 0: not at all")
    parser.add_argument("--keep", help="write failing programs to this folder")
    parser.add_argument("--show", action="store_true", help="print the program of --seed")
    options = parser.parse_args()
    if options.file:
        setup()
        found = check(open(options.file).read(), options.backend or backend_of(0, options.kind, options.device))
        print(found or "no difference")
        return int(found is not None)
    if options.seed is not None:
        if options.show:
            text = KINDS[options.kind](options.seed, *([options.device] if takes_device(options.kind) else []))
            print(mark(text, options.seed, options.cuts))
        options.first, options.count = options.seed, 1
    start, last = time.time(), options.first + options.count
    chunk = min(100 if options.kind == "python" else 30, -(-options.count // options.jobs))
    work = [(options.kind, options.device, first, min(first + chunk, last), options.backend, options.shrink, options.keep,
             start + options.seconds, options.cuts) for first in range(options.first, last, chunk)]
    failures, features = [], collections.Counter()
    free = threading.Semaphore(options.jobs + 2)    # the pool takes all work at once, and starts processes even for what comes too late

    def in_time():
        for item in work:
            free.acquire()
            if time.time() > start + options.seconds:
                return
            yield item

    if options.jobs == 1:
        results = map(job, in_time())
    else:
        pool = multiprocessing.get_context("spawn").Pool(options.jobs)
        results = pool.imap_unordered(job, in_time())
    for failed, counted in results:
        free.release()
        for seed, rung, problem, text, small in failed:
            print(f"seed {seed} ({rung}): {problem}: {text}"[:600], flush=True)
            if small:
                print("    " + small.replace("\n", "\n    "), flush=True)
        failures += failed
        features.update(counted)
        print(f"{features['programs']} of {options.count} programs, {len(failures)} differ", file=sys.stderr, flush=True)
    seconds = time.time() - start
    print(f"{len(failures)} of {features['programs']} programs differ; {seconds:.0f} s, {features['programs'] / seconds:.1f} programs/s")
    for kind, number in collections.Counter(f[2] for f in failures).most_common():
        print(f"{number:5} {kind}   seeds {[f[0] for f in failures if f[2] == kind][:8]}")
    print(dict(features))
    if options.record:
        record(options.record, options, features, failures, seconds)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
