# %% [markdown]
# # Fused chains
#
# Five pieces of real models that are limited by memory traffic, on tensors larger than the last-level cache:
# what fusion alone is worth, with no matrix product to hide behind. A sixth is limited by calls: an optimizer
# that updates many small tensors. Each runs forward and backward in eager, minicompile and `torch.compile`,
# taking turns within one process, so that a busy machine disturbs all three alike.
#
#     python -m minicompile.bench.chains [--elements 16777216] [--rounds 15] [--only NAME ...] [--out FILE]

# %%
from __future__ import annotations

import argparse
import json
import math
import statistics
import time

import torch
import torch.nn.functional as F

import minicompile

from .models import GPT, GPTConfig
from .run import environment


def bias_gelu_dropout_residual(x, bias, residual):
    return F.dropout(F.gelu(x + bias), 0.1) + residual


def residual_layer_norm(x, residual, weight, bias):
    return F.layer_norm(x + residual, weight.shape, weight, bias)


def masked_scaled_softmax(x, mask):
    return (x * 0.125).masked_fill(mask, float("-inf")).softmax(-1)


def batch_norm_relu_add(x, residual, weight, bias, mean, variance):
    return F.relu(F.batch_norm(x, mean, variance, weight, bias, training=True)) + residual


@torch.no_grad()
def adamw(p, g, m, v, lr, step):
    m.lerp_(g, 0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    p.mul_(1 - lr * 0.01)
    p.addcdiv_(m / (1 - 0.9 ** step), (v / (1 - 0.999 ** step)).sqrt() + 1e-8, value=-lr)

# %% [markdown]
# ## Inputs
#
# Rows of 1,024 for the chains of a transformer, images of 56 x 56 with 64 channels for batch norm; the parameters
# of a narrow GPT with 12 layers, 148 tensors, for the optimizer.

# %%
def optimizer_step(device: str, dtype: torch.dtype):
    """The `step` of AdamW over parameters that have gradients."""
    model = GPT(GPTConfig(100, 32, layers=12, heads=2, width=64, bias=True)).to(device, dtype)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return torch.optim.AdamW(model.parameters(), lr=1e-5).step


def cases(elements: int, device: str, dtype: torch.dtype) -> dict:
    """Name -> (function, inputs, whether there is a backward pass)."""
    rows = elements // 1024
    images = max(1, elements // (64 * 56 * 56))

    def rand(*shape, grad=True):
        return torch.randn(*shape, device=device, dtype=dtype).requires_grad_(grad)

    def plain(*shape):
        return torch.randn(*shape, device=device)
    mask = torch.rand(rows, 1024, device=device) < 0.3
    return {
        "bias-GELU-dropout-residual": (bias_gelu_dropout_residual, (rand(rows, 1024), rand(1024),
                                                                    rand(rows, 1024)), True),
        "residual-LayerNorm": (residual_layer_norm, (rand(rows, 1024), rand(rows, 1024), rand(1024),
                                                     rand(1024)), True),
        "masked scaled softmax": (masked_scaled_softmax, (rand(rows, 1024), mask), True),
        "BatchNorm-ReLU-add": (batch_norm_relu_add, (rand(images, 64, 56, 56), rand(images, 64, 56, 56),
                                                     rand(64), rand(64),
                                                     torch.zeros(64, device=device),
                                                     torch.ones(64, device=device)), True),
        "AdamW-like update": (adamw, (plain(elements), plain(elements), plain(elements),
                                      plain(elements).abs(), 1e-3, 10), False),
        "AdamW, 148 small tensors": (optimizer_step(device, dtype), (), False),
    }

# %% [markdown]
# ## The race

# %%
def runner(fn, inputs, backward: bool):
    """A function that runs one forward (and backward) pass and leaves no gradients behind."""
    leaves = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
    with torch.no_grad():
        seed = None if not backward else torch.randn_like(next(t for t in inputs if t.requires_grad))

    def run():
        out = fn(*inputs)
        if backward:
            torch.autograd.grad(out, leaves, seed)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return run


def race(runs: dict, rounds: int) -> dict[str, float]:
    """Median milliseconds of each entry, taking turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for name, run in runs.items():
        run(), run()
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(t) for name, t in times.items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m minicompile.bench.chains", description=__doc__)
    parser.add_argument("--elements", type=int, default=1 << 24, help="elements of each large tensor")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="*", default=[],
                        help="run only the chains whose name contains one of these words")
    parser.add_argument("--out", help="also write the medians to this JSON file")
    parser.add_argument("--no-torch", action="store_true", help="leave torch.compile out")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    print(f"{'':28}{'eager ms':>10}{'minicompile':>12}{'torch':>10}{'vs eager':>10}{'of torch':>10}")
    gains, shares, record = [], [], {}
    for name, (fn, inputs, backward) in cases(options.elements, options.device,
                                              getattr(torch, options.dtype)).items():
        if options.only and not any(word in name for word in options.only):
            continue
        functions = {"eager": fn, "minicompile": minicompile.compile(fn)}
        if not options.no_torch:
            functions["torch"] = torch.compile(fn)
        ms = race({k: runner(f, inputs, backward) for k, f in functions.items()}, options.rounds)
        record[name] = ms
        gain, share = ms["eager"] / ms["minicompile"], ms["minicompile"] / ms.get("torch", math.nan)
        gains.append(gain)
        shares.append(share)
        print(f"{name:28}{ms['eager']:10.1f}{ms['minicompile']:12.1f}{ms.get('torch', math.nan):10.1f}"
              f"{gain:9.2f}x{share:10.2f}", flush=True)
    if gains:
        print(f"{'geometric mean':28}{'':32}{statistics.geometric_mean(gains):9.2f}x"
              f"{statistics.geometric_mean(shares):10.2f}")
    if options.out:
        with open(options.out, "w") as file:
            record = {"benchmark": "chains", **environment("minicompile.bench.chains"), "ms": record}
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
