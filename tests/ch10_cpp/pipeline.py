"""Runs a function through trace, decompose, lower, fuse and the C++ backend, without capture or autograd."""

from minicompile.ch01_graphs.fake import FakeMode
from minicompile.ch01_graphs.trace import trace
from minicompile.ch06_decompositions.decompose import decompose
from minicompile.ch07_loops.lower import lower
from minicompile.ch08_fusion.fuse import fuse
from minicompile.ch08_fusion.groups import FusionOptions
from minicompile.ch08_fusion.kernel import Kernel
from minicompile.ch10_cpp.build import load_cpp
from minicompile.ch10_cpp.emit import emit_cpp
from minicompile.ch11_runtime.host import generate_host


def compile_cpp(fn, *inputs, fusion=True):
    """A callable like `fn` (tensors in, list of tensors out), and its kernel sources."""
    mode = FakeMode()
    fakes = [mode.from_real(t) for t in inputs]

    def flat(*args):
        out = fn(*args)
        return list(out) if isinstance(out, (tuple, list)) else [out]
    schedule = fuse(lower(decompose(trace(flat, fakes))), FusionOptions(enabled=fusion))
    kernels = [s for s in schedule.steps if isinstance(s, Kernel)]
    sources = [emit_cpp(k) for k in kernels]
    loaded = [f.resolve() for f in load_cpp(sources)]
    calls = {id(k): (f, k.args) for k, f in zip(kernels, loaded)}
    text, names = generate_host(schedule, [calls.get(id(s)) for s in schedule.steps])
    exec(compile(text, "<host>", "exec"), names)
    return (lambda *args: names["call"](list(args))), sources
