"""How fast generated Triton kernels move memory: `python -m minicompile.bench.kernels [NAME...]`.

For each kernel form: microseconds and achieved GB/s (bytes of the inputs and outputs over the time), ours and
torch.compile's, and the cost of launching. Needs a GPU. With --alternatives, single-kernel programs are also
timed with other block sizes. With --curves FILE, only the two curves of chapter 9 are measured: bandwidth by
elements per program, and by the length of a row that is held in registers or walked.
"""
import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from ..ch01_graphs.fake import FakeMode
from ..ch01_graphs.trace import trace
from ..ch06_decompositions.decompose import decompose
from ..ch07_loops.lower import lower
from ..ch08_fusion.fuse import fuse
from ..ch08_fusion.groups import FusionOptions
from ..ch08_fusion.kernel import Kernel
from ..ch08_fusion.values import link
from ..ch09_triton.emit import emit_triton
from ..ch09_triton.heuristics import Config
from ..ch09_triton.passes import with_online_softmax
from ..ch09_triton.plan import plan
from ..ch11_runtime.host import compile_schedule
from ..errors import MinicompileError
from .run import environment

BF16 = torch.bfloat16


def layer_norm_backward(g, x, mean, rstd, w, b):
    wanted = [True, True, True]
    return torch.ops.aten.native_layer_norm_backward(g, x, [x.shape[-1]], mean, rstd, w, b, wanted)


def adamw(p, g, m, v):
    m = m * 0.9 + g * 0.1
    v = v * 0.99 + g * g * 0.01
    return p * 0.9999 - 1e-3 * m / (v.sqrt() + 1e-8), m, v


def cases(device="cuda"):
    """name -> (function, inputs)"""
    def r(*shape, dtype=BF16):
        return torch.randn(*shape, device=device).to(dtype)

    def tokens(count):
        return torch.randint(0, 50304, (count,), device=device)

    def batch_norm(x, w, b):
        return F.relu(F.batch_norm(x, None, None, w, b, True))

    last = torch.channels_last
    f32 = torch.float32
    weights = [r(256, dtype=f32), r(256, dtype=f32)]
    return {
        "bias_gelu": (lambda x, b: F.gelu(x + b), [r(12288, 3072), r(3072)]),
        "residual_add_f32": (lambda x, y: x + y, [r(12288, 3072, dtype=f32), r(12288, 3072)]),
        "adamw": (adamw, [r(1 << 24, dtype=f32) for _ in range(3)] + [r(1 << 24, dtype=f32).abs()]),
        "layer_norm_384": (lambda x, w: F.layer_norm(x, (384,), w), [r(65536, 384), r(384)]),
        "layer_norm_768": (lambda x, w: F.layer_norm(x, (768,), w), [r(49152, 768), r(768)]),
        "layer_norm_768_f32": (lambda x, w: F.layer_norm(x, (768,), w),
                               [r(49152, 768, dtype=f32), r(768, dtype=f32)]),
        "layer_norm_backward": (layer_norm_backward, [r(49152, 768), r(49152, 768), r(49152, 1, dtype=f32),
                                                      r(49152, 1, dtype=f32), r(768), r(768)]),
        "softmax_1024": (lambda x: F.softmax(x * 0.5, -1), [r(49152, 1024)]),
        "log_softmax_50304": (lambda x: F.log_softmax(x.float(), -1).to(BF16), [r(4096, 50304)]),
        "cross_entropy_50304": (lambda x, t: F.cross_entropy(x.float(), t), [r(4096, 50304), tokens(4096)]),
        "column_sum": (lambda x: x.float().sum(0), [r(98304, 768)]),
        "full_sum": (lambda x: x.float().sum(), [r(1 << 26)]),
        "transpose": (lambda x, y: x.transpose(1, 2) + y, [r(32, 1024, 1024), r(32, 1024, 1024)]),
        "nchw_to_nhwc": (lambda x: (x * 2).contiguous(memory_format=last), [r(128, 256, 56, 56)]),
        "batch_norm_nhwc": (batch_norm, [r(128, 256, 56, 56).to(memory_format=last), *weights]),
        "batch_norm_nchw": (batch_norm, [r(128, 256, 56, 56, dtype=f32), *weights]),
        "max_pool_nhwc": (lambda x: F.max_pool2d(x, 3, 2, 1), [r(128, 64, 112, 112).to(memory_format=last)]),
        "embedding": (lambda i, t: F.embedding(i, t), [tokens(98304), r(50304, 768)]),
        "small": (lambda x: x.sin() + 1, [r(1000)]),
    }


def flat(fn):
    def call(*args):
        out = fn(*args)
        return list(out) if isinstance(out, (tuple, list)) else [out]
    return call


def schedule_of(fn, inputs):
    mode = FakeMode()
    return fuse(lower(decompose(trace(flat(fn), [mode.from_real(t) for t in inputs]))), FusionOptions())


def microseconds(run, repeat=30):
    """Median time on the GPU of one call."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeat):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(200_000)          # the host gets ahead, so gaps between launches are not counted
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return sorted(times)[repeat // 2]


def host_microseconds(run):
    """Time on the CPU of one call, while the GPU has nothing heavy to do."""
    for _ in range(100):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(2000):
        run()
    took = (time.perf_counter() - start) / 2000 * 1e6
    torch.cuda.synchronize()
    return took


def default_config(kernel):
    return plan(with_online_softmax(link(kernel)))[1]


def bandwidth(fn, inputs, config) -> float:
    """GB/s that a program of one kernel moves with this configuration."""
    program = compile_schedule(schedule_of(fn, inputs), lambda k: emit_triton(k, config))
    size = sum(t.numel() * t.element_size() for t in [*inputs, *program(list(inputs))])
    return size / microseconds(lambda: program(list(inputs))) / 1000


def curves() -> dict:
    """{"pointwise": [{block, warps, gbs}], "softmax": [{row, persistent, looped}]}, in GB/s, of float32 tensors of 2^26 elements."""
    x, y = (torch.randn(1 << 26, device="cuda") for _ in range(2))
    found = {"pointwise": [], "softmax": []}
    for block in (1, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192):
        for warps in sorted({max(1, min(16, block // (32 * each))) for each in (1, 8)}):
            found["pointwise"].append(dict(block=block, warps=warps, gbs=bandwidth(
                lambda x, y: x * 2 + y, [x, y], Config({"x": block}, warps))))
    for row in (256, 1024, 4096, 8192, 16384, 32768):
        rows = x.view(-1, row)
        held = Config({"x": max(1, 1024 // row), "r": row}, max(1, min(16, row // 256)), persistent=True)
        walked = Config({"x": 1, "r": min(row, 2048)}, 8)
        found["softmax"].append(dict(row=row, **{name: bandwidth(lambda x: F.softmax(x, -1), [rows], config)
                                                 for name, config in (("persistent", held), ("looped", walked))}))
    return found


def alternatives(config: Config) -> list[Config]:
    """The default and its neighbours: the same tile with other numbers of warps, and other tiles."""
    found = [config]
    for warps in (config.num_warps // 2, config.num_warps * 2):
        if 1 <= warps <= 16:
            found.append(Config(dict(config.blocks), warps, config.persistent))
    for factor in (2, 4):
        blocks = dict(config.blocks)
        if "r" not in blocks:
            found.append(Config(blocks | {"x": blocks["x"] * factor}, config.num_warps))
        else:
            axis, warps = "x" if config.persistent else "r", min(16, config.num_warps * factor)
            found.append(Config(blocks | {axis: blocks[axis] * factor}, warps, persistent=config.persistent))
    return list(dict.fromkeys(found))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--alternatives", action="store_true")
    parser.add_argument("--no-peer", action="store_true", help="do not time torch.compile")
    parser.add_argument("--curves", metavar="FILE", help="write the curves of chapter 9 as JSON, and stop")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise MinicompileError("This benchmark measures GPU kernels and no CUDA GPU is here. "
                               "Run it on a machine with one.")
    if args.curves:
        measured = {"benchmark": "curves", **environment("minicompile.bench.kernels"), **curves()}
        Path(args.curves).write_text(json.dumps(measured, indent=1) + "\n")
        return
    print(f"{'program':22} {'kernels':>7} {'compile s':>9} {'us':>9} {'GB/s':>7} "
          f"{'peer us':>9} {'ours/peer':>9}")
    ratios = []
    for name, (fn, inputs) in cases().items():
        if args.names and name not in args.names:
            continue
        try:
            began = time.perf_counter()
            schedule = schedule_of(fn, inputs)
            program = compile_schedule(schedule, "triton")
            out = program(list(inputs))
            torch.cuda.synchronize()
            took = time.perf_counter() - began
            size = sum(t.numel() * t.element_size() for t in [*inputs, *out] if isinstance(t, torch.Tensor))
            us = microseconds(lambda: program(list(inputs)))
        except Exception as error:
            print(f"{name:22} failed: {type(error).__name__}: {str(error)[:300]}")
            continue
        peer = float("nan")
        if not args.no_peer:
            torch.compiler.reset()
            compiled = torch.compile(flat(fn))
            for want, got in zip(compiled(*inputs), out):
                if want is None:
                    continue
                want, got = want.float(), got.float()
                if not torch.allclose(want, got, rtol=3e-2, atol=3e-2, equal_nan=True):
                    print(f"{name:22} DIFFERS by {(want - got).abs().max().item()}")
            peer = microseconds(lambda: compiled(*inputs))
            ratios.append(us / peer)
        print(f"{name:22} {len(program.sources):7} {took:9.2f} {us:9.1f} {size / us / 1000:7.0f} "
              f"{peer:9.1f} {us / peer:9.2f}", flush=True)
        kernels = [s for s in schedule.steps if isinstance(s, Kernel)]
        if args.alternatives and len(kernels) == 1 and len(schedule.steps) == 1:
            for config in alternatives(default_config(kernels[0])):
                try:
                    other = compile_schedule(schedule, lambda k: emit_triton(k, config))
                    best = microseconds(lambda: other(list(inputs)))
                    print(f"    {str(config.blocks):28} warps {config.num_warps:2}  {best:9.1f} us "
                          f"{size / best / 1000:7.0f} GB/s", flush=True)
                except Exception as error:
                    print(f"    {config.blocks} warps {config.num_warps}: {str(error)[:100]}")
    x = torch.randn(1000, device="cuda")
    schedule = schedule_of(lambda x: x.sin() + 1, [x])
    program = compile_schedule(schedule, "triton")
    from ..ch09_triton.launch import load_triton
    kernel = load_triton(program.sources)[0]
    out = torch.empty_like(x)
    kernel(x, out)
    resolved = getattr(kernel, "resolve", lambda: kernel)()
    print(f"launch: bare kernel {host_microseconds(lambda: kernel(x, out)):.2f} us, "
          f"resolved {host_microseconds(lambda: resolved(x, out)):.2f} us, "
          f"host program {host_microseconds(lambda: program([x])):.2f} us, "
          f"eager add {host_microseconds(lambda: torch.add(x, x, out=out)):.2f} us")
    if ratios:
        print(f"geometric mean of ours/peer: {torch.tensor(ratios).log().mean().exp().item():.3f}")


if __name__ == "__main__":
    main()
