"""Hand-built kernels: what the lowering and fusion stages hand to the C++ backend, written out."""
import torch

from minicompile.ch01_graphs.symbolic import Symbol
from minicompile.ch07_loops.ir import Buffer, Layout, Loop, Value, Values
from minicompile.ch08_fusion.kernel import Kernel
from minicompile.ch10_cpp.build import load_cpp
from minicompile.ch10_cpp.emit import emit_cpp

HALF = (torch.float16, torch.bfloat16)


class Body(Values):
    """Builds a loop body: `b.add(x, y)` is the value of that."""

    def emit(self, op, *args, dtype=None):
        return self.make(op, args, dtype)

    def load(self, buffer, index, dtype, mask=None):
        x = self.emit("load", buffer, index, mask, dtype=dtype)
        return self.emit("to_dtype", x, dtype=torch.float32) if dtype in HALF else x

    def store(self, buffer, index, value, mode=None):
        return self.write(buffer, index, None, value, mode)

    def indirect(self, value, size):
        return self.position(value, size).args[1]

    def reduce(self, kind, value, index=None, dtype=None):
        return self.emit("reduce", kind, value, index, dtype=dtype or value.dtype)

    def __getattr__(self, op):
        return lambda *args, dtype=None: self.emit(op, *args, dtype=dtype
                                                   or next(a for a in args if type(a) is Value).dtype)


def variables(prefix, *sizes):
    return tuple(Symbol(f"{prefix}{i}", s) for i, s in enumerate(sizes))


def buffer(name, t):
    return Buffer(name, t.dtype, t.device, Layout(tuple(t.shape), tuple(t.stride())))


def flat(vars, strides):
    out = 0
    for v, s in zip(vars, strides):
        out = out + v.expr * s
    return out


def kernel(vars, rvars, loops, inputs, outputs, local=(), name="kernel0", symbols=()):
    """loops: list of (vars, reduction_vars, Body); inputs/outputs/local: dict name -> tensor."""
    made = [Loop(f"loop{i}", tuple(v), tuple(r), tuple(b.stores)) for i, (v, r, b) in enumerate(loops)]
    local = dict(local)
    buffers = {n: buffer(n, t) for d in (inputs, outputs, local) for n, t in d.items()}
    return Kernel(name, torch.device("cpu"), tuple(vars), tuple(rvars), made, frozenset(local), buffers,
                  tuple(inputs), tuple(outputs), tuple(symbols))


def run(k, inputs, outputs, sizes=()):
    source = emit_cpp(k)
    f, = load_cpp([source])
    f(*inputs.values(), *outputs.values(), *sizes)
    return source
