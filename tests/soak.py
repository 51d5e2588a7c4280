"""`make soak MINUTES=30`: everything that looks for differences by itself, for a given time, each time on other seeds.

Random programs of Python, of tensors, of expressions, of training steps and of derivatives of derivatives, programs of the language
each in a process of its own, objects that live shortly, small models of the zoo, and fresh functions that threads compile, call and drop
while the process must not grow. A line per part and round; one verdict; the exit status is 1 after any difference, crash or growth."""
from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parents[1]
RUNGS = ("cpp", "default", "cpp", "default", "triton", "loops", "decomposed", "aot_eager", "eager")
MODELS = ("plain/*", "hf/bert,hf/gpt2,hf/llama,hf/t5,hf/mamba", "timm/resnet18,timm/vit_tiny*,timm/mobilenetv3*,timm/levit*",
          "hf/funnel,hf/longformer,hf/whisper,hf/swin", "torchvision/mobilenet_v3_small,torchvision/squeezenet*,torchvision/googlenet")
WARM = 100                    # functions before memory is looked at; with fewer it is not judged
SLACK_MB = 24                 # a process may grow by so much in the second half of its time


@dataclass
class Found:
    """What a part did: a line of words, and what is wrong ("" if nothing)."""
    words: str
    wrong: str = ""


def process(command: list, seconds: float, **env) -> tuple[int | None, str]:
    """(exit status, or None if it was still running after `seconds` and was ended; what it printed)"""
    with tempfile.TemporaryFile("w+") as said:
        child = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
                                 env=dict(os.environ, OMP_NUM_THREADS="1", **env))
        try:
            status = child.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        said.seek(0)
        return status, said.read()


def tail(text: str, lines: int = 30) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])


# ---- the parts: part(seconds, seed, jobs, number of the round) -> Found -----------------------------------

def programs(kind: str, rung: str | None, seconds: float, seed: int, jobs: int, number: int = 0) -> Found:
    """number: of the round; in two of three, graphs end at random instructions as well."""
    env = {"TRITON_INTERPRET": "1"} if rung == "triton" else {}
    status, said = process(["-m", "tests.programs", "--kind", kind, "--first", str(seed), "--count", str(10**6), "--seconds", str(seconds),
                            "--jobs", str(jobs), "--shrink", "10", "--cuts", str((0, 20, 150)[number % 3]),
                            *(["--backend", rung] if rung else [])], 2 * seconds + 180, **env)
    counted = re.search(r"(\d+) of (\d+) programs differ", said)
    name = f"{kind} programs" + (f" on {rung}" if rung else "")
    if counted is None:
        return Found(f"{name}: no result", tail(said) or "it did not end")
    words = f"{counted[2]} {name} from seed {seed}, {counted[1]} differ"
    return Found(words, "" if status == 0 else tail(said, 60))


def python_programs(seconds, seed, jobs, number) -> Found:
    return programs("python", None, seconds, seed, jobs, number)


def tensor_programs(seconds, seed, jobs, number) -> Found:
    return programs("tensors", RUNGS[number % len(RUNGS)], seconds, seed, jobs)


def expressions(seconds, seed, jobs, number) -> Found:
    return programs("expressions", "triton" if number % 4 == 3 else "cpp", seconds, seed, jobs)


def training_steps(seconds, seed, jobs, number) -> Found:
    return programs("training", None, seconds, seed, jobs, number)


def second_derivatives(seconds, seed, jobs, number) -> Found:
    return programs("derivatives", None, seconds, seed, jobs, number)


def zoo(seconds, seed, jobs, number) -> Found:
    """As many of a group of models as there is time for."""
    with tempfile.TemporaryDirectory(prefix="soak-zoo-") as folder:
        status, said = process(["-m", "minicompile", "bench", "zoo", "--compilers", "minicompile", "--models", MODELS[number % len(MODELS)],
                                "--device", "cpu", "--seconds", "0", "--sizes", "2", "--jobs", str(jobs), "--out", folder], seconds)
        rows = [json.loads(line) for path in pathlib.Path(folder).rglob("results.jsonl") for line in path.read_text().splitlines()]
    rows = [r for r in rows if "verdict" in r]
    bad = [r for r in rows if r["verdict"] in ("wrong", "error", "crash", "timeout")]
    words = f"{len(rows)} works of models {MODELS[number % len(MODELS)]}, {len(bad)} not right"
    if status not in (0, None) and not bad:
        return Found(words, tail(said))
    return Found(words, "\n".join(f"{r['model']} {r['work']}: {r['verdict']}: {r.get('error', '')}" for r in bad))


def threads(seconds, seed, jobs, number) -> Found:
    status, said = process(["-m", "tests.soak", "--threads", str(seconds), "--seed", str(seed)], 2 * seconds + 120)
    line = re.search(r"^\{.*\}$", said, re.M)
    if line is None:
        return Found("threads: no result", f"ended with {status}\n{tail(said)}")
    got = json.loads(line[0])
    words = f"{got['functions']} functions compiled and dropped by threads, {got['calls']} calls, {got['growth_mb']:+.1f} MB"
    wrong = list(got["wrong"])
    if got["growth_mb"] > SLACK_MB:
        wrong.append(f"the process grew by {got['growth_mb']} MB over its last {got['late']} functions")
    return Found(words, "\n".join(wrong))


def histories(module, what, seconds, seed) -> Found:
    """Of objects, each call compared with eager: `python -m MODULE`."""
    status, said = process(["-W", "ignore", "-m", module, "--seconds", str(seconds), "--seed", str(seed)], 2 * seconds + 120)
    return Found(f"{what} from seed {seed}: {tail(said, 1)}", "" if status == 0 else f"ended with {status}\n{tail(said)}")


def short_lived(seconds, seed, jobs, number) -> Found:
    return histories("tests.soak_guards", "objects that live shortly", seconds, seed)


def dictionaries(seconds, seed, jobs, number) -> Found:
    return histories("tests.soak_keys", "histories of dictionaries", seconds, seed)


def programs_alone(seconds, seed, jobs, number) -> Found:
    """The tests of Python's language, each in a process of its own: a fault of the first call hides behind what ran before."""
    end = time.monotonic() + seconds
    _, listed = process(["-m", "pytest", "--collect-only", "-q", "tests/ch03_capture/test_language.py"], 120)
    names = re.findall(r"^tests/\S+::\S+\]$", listed, re.M)
    random.Random(seed).shuffle(names)

    def run(name):
        if time.monotonic() > end:
            return None
        status, said = process(["-m", "pytest", "-q", name], 180)
        return "" if status == 0 else f"{name} alone ended with {status}\n{tail(said)}"
    with ThreadPoolExecutor(jobs) as pool:
        ran = [found for found in pool.map(run, names) if found is not None]
    bad = [found for found in ran if found]
    return Found(f"{len(ran)} programs of the language alone, {len(bad)} fail", "\n".join(bad) if ran else tail(listed) or "none ran")


PARTS = {python_programs: 0.2, tensor_programs: 0.25, expressions: 0.1, training_steps: 0.1, second_derivatives: 0.1, programs_alone: 0.1,
         threads: 0.1, short_lived: 0.1, dictionaries: 0.1, zoo: 0.25}                                   # shares of a round


# ---- threads, in the child ---------------------------------------------------------------------------------

SOURCES = (
    "def f(x, w):\n    h = torch.relu(x @ w)\n    return (torch.softmax(h, -1) * K).sum(0), h.mean()",
    "def f(x, w):\n    y = x * K\n    if y.sum() > 0:\n        y = y + w[0]\n    return y.cos(), [y.max().item(), K]",
    "def f(x, w):\n    y = x.clone()\n    y[0] += K\n    y.t().mul_(2)\n    return y @ w, {'n': x.shape[0]}",
    "class C:\n    def __init__(self, k):\n        self.k = k\nc = C(K)\n"
    "def f(x, w):\n    c.k += 1\n    return torch.nn.functional.gelu(x + c.k) @ w.detach()",
    "def g(n):\n    for i in range(3):\n        yield n * i\n"
    "def f(x, w):\n    out = [x * v for v in g(K)]\n    print(end='')\n    return torch.stack(out).sum(0) + w[0]",
    "def f(x, w):\n    try:\n        if x.shape[0] % 2:\n            raise KeyError(K)\n        return x.view(2, -1).sum(1)\n"
    "    except KeyError as e:\n        return x.sin() * e.args[0]",
)
BACKENDS = ("eager", "eager", "aot_eager")


def one_function(generator: random.Random) -> int:
    """Compile a fresh function, call it some times, and compare. Returns the number of calls."""
    import torch

    import minicompile
    source, k = generator.choice(SOURCES), generator.choice([1, 2, 3, 0.5])
    spaces = [{"torch": torch, "K": k} for _ in range(2)]
    for space in spaces:
        exec(source, space)
    plain, fast = spaces[0]["f"], minicompile.compile(spaces[1]["f"], backend=generator.choice(BACKENDS))
    for n in generator.sample(range(2, 9), 3):
        x, w, results = torch.randn(n, 4), torch.randn(4, 4), []
        for f in (plain, fast):
            a, b = (t.clone().requires_grad_() for t in (x, w))
            out = f(a, b)
            loss = out[0] if isinstance(out, tuple) else out
            if loss.requires_grad:
                loss.sum().backward()
            results.append((out, a.grad, b.grad))
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    return 3


def resident_mb() -> float:
    import ctypes
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def run_threads(seconds: float, seed: int) -> dict:
    import torch
    torch.set_num_threads(1)
    start, wrong = time.monotonic(), []
    calls, stop = [], threading.Event()

    def work(number):
        generator = random.Random(seed + number)
        while not stop.is_set():
            try:
                calls.append(one_function(generator))
            except Exception as error:
                wrong.append(f"{type(error).__name__}: {error}"[:600])
                stop.set()
    sys.setswitchinterval(1e-3)
    early = None
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(work, number) for number in range(4)]
        while not stop.wait(0.2) and time.monotonic() < start + seconds:
            if early is None and time.monotonic() > start + seconds / 2 and len(calls) >= WARM:
                early = resident_mb(), len(calls)
        stop.set()
        for r in running:
            r.result()
    functions = len(calls)
    growth = resident_mb() - early[0] if early else 0.0
    return {"functions": functions, "calls": sum(calls), "growth_mb": round(growth, 1), "late": functions - early[1] if early else 0,
            "wrong": wrong}


# ---- the run -----------------------------------------------------------------------------------------------

def soak(minutes: float, seed: int, jobs: int, parts=PARTS, say=print) -> bool:
    """Whether nothing was wrong. Rounds of about six minutes; the last one fills the time."""
    start, bad, number = time.monotonic(), [], 0
    end = start + 60 * minutes
    rounds = max(1, round(minutes / 6))
    while number < rounds:
        share = (end - time.monotonic()) / (rounds - number)
        for part, weight in parts.items():
            began = time.monotonic()
            found = part(max(5.0, weight / sum(parts.values()) * share), seed + 10**6 * number, jobs, number)
            say(f"[{(time.monotonic() - start) / 60:5.1f} min] {'WRONG  ' if found.wrong else ''}{found.words} "
                f"({time.monotonic() - began:.0f} s)")
            if found.wrong:
                say(found.wrong)
                bad.append(found.words)
        number += 1
        if time.monotonic() > end:
            break
    took = (time.monotonic() - start) / 60
    say(f"soak of {took:.1f} minutes from seed {seed}: "
        + (f"{len(bad)} parts found something: " + "; ".join(bad) if bad else "nothing wrong"))
    return not bad


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=int(time.time()) * 1000, help="of the first round; default: the time")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--threads", type=float, metavar="SECONDS", help="the part with threads only, in this process")
    options = parser.parse_args()
    if options.threads:
        print(json.dumps(run_threads(options.threads, options.seed)))
        return 0
    return 0 if soak(options.minutes, options.seed, options.jobs, say=lambda text: print(text, flush=True)) else 1


if __name__ == "__main__":
    sys.exit(main())
