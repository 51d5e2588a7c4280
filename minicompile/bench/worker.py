"""One training run under one compiler, in a process of its own: `python -m minicompile.bench.worker JSON`.

A fresh process per compiler makes the comparison fair: empty caches, its own memory peak, and no state left
by another. Progress and the result are JSON lines on standard output.
"""

from __future__ import annotations

import importlib
import json
import resource
import sys
import time
import warnings
from dataclasses import asdict, dataclass, field

import torch

from .data import CaptionBatches, ImageBatches, TextBatches, load_text
from .models import GPT, Captioner, GPTConfig, ResNet50

PEAK_FLOPS = {"H100": {"bf16": 989e12, "tf32": 494.7e12}, "H200": {"bf16": 989e12, "tf32": 494.7e12},
              "A100": {"bf16": 312e12, "tf32": 156e12}}  # dense, from NVIDIA's datasheets


@dataclass
class Task:
    """What to train and how: a row of the benchmark's configuration."""

    work: str                    # "nanogpt", "gpt2", "resnet50" or "captions"
    compiler: str                # "eager", or "minicompile" or "torch" with settings: see `settings_of`
    device: str
    dtype: str                   # "fp32", "tf32" or "bf16"
    steps: int
    batch: int
    model: dict = field(default_factory=dict)
    channels_last: bool = False
    data: str | None = None
    seed: int = 1337
    profile: bool = False


MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
EXTENTS = ("optimizer", "step")         # what is compiled besides the model: optimizer.step, or all of the training step as one function


def settings_of(compiler: str) -> tuple[str, str, str]:
    """(name, mode, extent) of a compiler such as "torch:reduce-overhead+optimizer"; "" for what it does not name.

    Raises ValueError for a setting that there is not, or that is given twice."""
    name, colon, text = compiler.partition(":")
    mode = extent = ""
    for setting in text.split("+") if colon else ():
        if setting in MODES and not mode:
            mode = setting
        elif setting in EXTENTS and not extent:
            extent = setting
        else:
            raise ValueError(setting)
    return name, mode, extent


def build(task: Task):
    """(model, optimizer, list of batches, floating-point operations per step)."""
    torch.manual_seed(task.seed)
    implementation = dict(fused=True) if task.device == "cuda" else {}
    if task.device == "cuda" and settings_of(task.compiler)[::2] == ("torch", "optimizer"):
        # A fused kernel is opaque to torch.compile. From lists of tensors it generates kernels, and with its counters
        # on the GPU an optimizer can be replayed as a CUDA graph.
        implementation = dict(foreach=True) if task.work == "resnet50" else dict(foreach=True, capturable=True)
    if task.work == "resnet50":
        model = ResNet50().to(task.device)
        if task.channels_last:
            model = model.to(memory_format=torch.channels_last)
        source = ImageBatches(task.batch, task.model["size"], task.device, task.channels_last, task.seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4, **implementation)
        flops = model.flops_per_step(task.batch, task.model["size"])
    elif task.work == "captions":
        model = Captioner(task.model["vit"], task.model["gpt2"]).to(task.device)
        encoder, decoder = model.model.encoder.config, model.model.decoder.config
        source = CaptionBatches(task.batch, encoder.image_size, task.model["block"], decoder.vocab_size, task.device, task.seed)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, **implementation)
        flops = model.flops_per_step(task.batch, task.model["block"])
    else:
        text, _ = load_text(task.data)
        sizes = dict(task.model)
        source = TextBatches(text, task.batch, sizes["block_size"], task.device, task.seed,
                             sizes.pop("vocab_size", None))
        model = GPT(GPTConfig(vocab_size=source.vocab_size, **sizes)).to(task.device)
        parameters = [{"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
                      {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(parameters, lr=1e-3 if task.work == "nanogpt" else 6e-4,
                                      betas=(0.9, 0.95), **implementation)
        flops = model.flops_per_step(task.batch)
    return model, optimizer, [source.batch() for _ in range(task.steps)], flops


def compiled(function, compiler: str):
    """`function`, or a model, under the named compiler in its mode."""
    name, mode, _ = settings_of(compiler)
    if name == "minicompile":
        import minicompile
        return minicompile.compile(function, mode=mode or None)
    if name == "torch":
        return torch.compile(function, mode=mode or None)
    return function


def counts(compiler: str) -> dict:
    """Number of graphs and generated kernels, from each compiler's own counters."""
    name = compiler.partition(":")[0]
    if name == "minicompile":
        from minicompile.driver import counters
        return {"graphs": counters.graphs, "kernels": counters.kernels}
    if name == "torch":
        dynamo = importlib.import_module("torch._dynamo.utils").counters
        inductor = importlib.import_module("torch._inductor.metrics")
        return {"graphs": dynamo["stats"]["unique_graphs"], "kernels": inductor.generated_kernel_count}
    return {"graphs": 0, "kernels": 0}


def synchronize(device: str):
    if device == "cuda":
        torch.cuda.synchronize()


def profile_step(step, batch, device: str) -> dict:
    """Kernel launches of one step, and the kernels that take the most time (name, microseconds, calls)."""
    from torch.profiler import ProfilerActivity, profile
    with profile(activities=[ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU]) as run:
        step(*batch)
        synchronize(device)
    rows = [e for e in run.key_averages() if e.device_type.name == "CUDA" and e.device_time_total > 0]
    rows.sort(key=lambda e: -e.device_time_total)
    return {"launches_per_step": sum(e.count for e in rows),
            "busy_us": sum(e.device_time_total for e in rows),
            "top": [(e.key[:110], round(e.device_time_total, 1), e.count) for e in rows[:60]]}


def train(task: Task, say=lambda **event: None) -> dict:
    """Train and measure. Times are milliseconds of whole training steps: forward, backward, gradient clipping
    (GPTs), optimizer."""
    if task.dtype == "tf32":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    model, optimizer, batches, flops = build(task)
    model.train()
    extent = settings_of(task.compiler)[2]
    run = model if extent == "step" else compiled(model, task.compiler)
    update = compiled(optimizer.step, task.compiler) if extent == "optimizer" else optimizer.step
    clip = list(model.parameters()) if task.work in ("nanogpt", "gpt2") else None
    autocast = torch.autocast(task.device, torch.bfloat16, enabled=task.dtype == "bf16")

    def step(*batch):
        with autocast:
            _, loss = run(*batch)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(clip, 1.0)
        update()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach().clone()

    step = compiled(step, task.compiler) if extent == "step" else step
    cuda = task.device == "cuda"
    losses, marks = [], []
    synchronize(task.device)
    began = time.perf_counter()
    cold = None
    for n, batch in enumerate(batches):
        if task.compiler.startswith("torch:"):
            torch.compiler.cudagraph_mark_step_begin()
        start = time.perf_counter()
        losses.append(step(*batch))
        if n == 1:
            synchronize(task.device)
            cold = time.perf_counter() - began
        if cuda:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
            marks.append(mark)
        else:
            marks.append(1e3 * (time.perf_counter() - start))
        if n < 3 or n % 10 == 9:
            say(event="step", step=n + 1, loss=float(losses[-1]) if not cuda or n < 3 else None)
    synchronize(task.device)
    warm = min(10, task.steps // 2)
    times = [a.elapsed_time(b) for a, b in zip(marks[warm:], marks[warm + 1:])] if cuda else marks[warm:]
    times.sort()
    median = times[len(times) // 2]
    result = {"task": asdict(task), "ms": median, "ms_low": times[len(times) // 10],
              "ms_high": times[-1 - len(times) // 10], "times": times,
              "losses": [float(v) for v in losses], "cold_seconds": cold,
              "peak_memory_mb": (torch.cuda.max_memory_allocated() / 2**20 if cuda
                                 else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
              "mfu": None, **counts(task.compiler)}
    if cuda:
        device = torch.cuda.get_device_name()
        peak = next((p for name, p in PEAK_FLOPS.items() if name in device), {}).get(task.dtype)
        result["mfu"] = flops / (median * 1e-3) / peak if peak else None
        result["profile"] = profile_step(step, batches[-1], task.device) if task.profile else None
    return result


def main():
    task = Task(**json.loads(sys.argv[1]))
    say = lambda **event: print(json.dumps(event), flush=True)
    # A function that runs eagerly after an internal error must not be measured as a compiled one.
    warnings.filterwarnings("error", message="minicompile: ")
    try:
        say(event="result", **train(task, say))
    except Exception as error:
        import traceback
        say(event="error", message=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
        sys.exit(1)


if __name__ == "__main__":
    main()
