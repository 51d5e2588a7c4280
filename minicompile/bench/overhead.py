"""What compiling costs apart from kernels: `python -m minicompile.bench.overhead [--out FILE] [NAMES...]`.

Three costs, each measured in turns with torch.compile in one process, so that a busy machine disturbs both
alike:

- a call of a compiled function, guards and entry only: the backend of both returns a constant tuple;
- capture, from the first call to its result, with `backend="eager"` for both;
- the frame hook, on a call-heavy Python loop that is not compiled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time

import torch

import minicompile
from minicompile.ch03_capture import hook

from .models import GPT, GPTConfig, Llama, LlamaConfig, ResNet50
from .run import environment


def two_lines(x, y):
    z = x + y
    return z.relu()


class Counting(GPT):
    """A GPT that keeps its last loss and counts its calls."""
    calls = 0

    def forward(self, tokens, targets):
        logits, self.last_loss = super().forward(tokens, targets)
        self.calls += 1
        return logits, self.last_loss


def cases() -> dict:
    """name -> (function or module, arguments). Widths are small: no kernel runs in what is measured."""
    tokens = torch.randint(0, 100, (2, 16))
    return {"two lines": (two_lines, (torch.randn(4), torch.randn(4))),
            "GPT, 12 layers": (GPT(GPTConfig(100, 32, 12, 2, 16)), (tokens, tokens)),
            "ResNet-50": (ResNet50(), (torch.randn(2, 3, 32, 32), torch.randint(0, 10, (2,)))),
            "Llama, 16 layers": (Llama(LlamaConfig()), (tokens, tokens)),
            "it writes to itself": (Counting(GPTConfig(100, 32, 12, 2, 16)), (tokens, tokens))}


def constant_backend(gm, example_inputs):
    """A compiled graph that does nothing: it returns the same tuple always."""
    (output,) = (n for n in gm.graph.nodes if n.op == "output")
    result = tuple(torch.zeros(1) for _ in output.args[0])
    return lambda *inputs: result


COMPILERS = {"minicompile": (minicompile.compile, minicompile.reset),
             "torch": (torch.compile, torch.compiler.reset)}


def summary(seconds: list, unit: float) -> dict:
    """Median, fastest and slowest, in the unit given in seconds."""
    facts = {"median": statistics.median(seconds), "low": min(seconds), "high": max(seconds)}
    return {name: value / unit for name, value in facts.items()}


def call_costs(function, arguments, rounds: int) -> dict:
    """Microseconds per call for each compiler. Rounds take turns."""
    compiled, times = {}, {}
    for name, (compile, reset) in COMPILERS.items():
        reset()
        compiled[name] = compile(function, backend=constant_backend)
        for _ in range(3):
            compiled[name](*arguments)
        times[name] = []
    start = time.perf_counter()
    for _ in range(10):
        compiled["torch"](*arguments)
    repeats = max(20, int(0.02 / ((time.perf_counter() - start) / 10)))
    for _ in range(rounds):
        for name, run in compiled.items():
            start = time.perf_counter()
            for _ in range(repeats):
                run(*arguments)
            times[name].append((time.perf_counter() - start) / repeats)
    return {name: summary(values, 1e-6) for name, values in times.items()}


def capture_costs(function, arguments, rounds: int) -> dict:
    """Milliseconds of the first call with `backend="eager"`, less those of a later one (the graph's run)."""
    times = {name: [] for name in COMPILERS}
    for turn in range(rounds + 1):
        for name, (compile, reset) in COMPILERS.items():
            reset()
            compiled = compile(function, backend="eager")
            start = time.perf_counter()
            compiled(*arguments)
            first = time.perf_counter()
            compiled(*arguments)
            if turn:                       # the first turn pays for imports
                times[name].append(first - start - (time.perf_counter() - first))
        for compile, reset in COMPILERS.values():
            reset()
    return {name: summary(values, 1e-3) for name, values in times.items()}


def increment(n):
    return n + 1


def call_loop(calls: int):
    n = 0
    for _ in range(calls):
        n = increment(n)
    return n


def hook_costs(rounds: int, calls: int = 20_000) -> dict:
    """Nanoseconds per Python call: before anything is compiled, after, after `reset`, and while another
    thread is inside a compiled function (only then is the hook installed)."""
    def measure():
        start = time.perf_counter()
        call_loop(calls)
        return (time.perf_counter() - start) / calls

    minicompile.reset()
    times = {"before": [], "after compiling": [], "after reset": [], "installed by another thread": []}
    function, arguments = cases()["two lines"]
    for _ in range(rounds):
        minicompile.reset()
        times["before"].append(measure())
        minicompile.compile(function, backend="eager")(*arguments)
        times["after compiling"].append(measure())
        minicompile.reset()
        times["after reset"].append(measure())
        inside, leave = threading.Event(), threading.Event()

        def stay():
            inside.set()
            leave.wait()

        hook.skip_code(stay.__code__)
        thread = threading.Thread(target=hook.run, args=(object(), stay))
        thread.start()
        inside.wait()
        times["installed by another thread"].append(measure())
        leave.set()
        thread.join()
    return {name: summary(values, 1e-9) for name, values in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(cases())}; default: all")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--captures", type=int, default=5)
    parser.add_argument("--out", default="overhead.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    record = {"benchmark": "overhead", **environment("minicompile.bench.overhead"),
              "hook_ns": hook_costs(args.rounds), "call_us": {}, "capture_ms": {}}
    for name, (function, arguments) in cases().items():
        if not args.names or name in args.names:
            record["call_us"][name] = call_costs(function, arguments, args.rounds)
            if args.captures:
                record["capture_ms"][name] = capture_costs(function, arguments, args.captures)
    for kind, unit in (("call_us", "microseconds a call"), ("capture_ms", "milliseconds of capture")):
        print(f"{unit + ', median':34} {'minicompile':>11} {'torch':>9} {'ratio':>6}")
        for name, costs in record[kind].items():
            ours, peer = (costs[c]["median"] for c in COMPILERS)
            print(f"  {name:32} {ours:11.1f} {peer:9.1f} {ours / peer:6.2f}")
    print("nanoseconds of an uncompiled Python call")
    for name, cost in record["hook_ns"].items():
        print(f"  {name:32} {cost['median']:11.1f}")
    with open(args.out, "w") as file:
        json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
