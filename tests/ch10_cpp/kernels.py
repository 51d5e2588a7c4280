"""Hand-built kernels: what the lowering and fusion stages hand to the C++ backend, written out."""
import torch

from minicompile.ch01_graphs.symbolic import Symbol
from minicompile.ch07_loops.ir import Buffer, Inst, Layout, Loop, Ref
from minicompile.ch08_fusion.kernel import Kernel
from minicompile.ch10_cpp.build import load_cpp
from minicompile.ch10_cpp.emit import emit_cpp

HALF = (torch.float16, torch.bfloat16)


class Body:
    """Builds a loop body: `b.add(x, y)` appends an instruction and returns its Ref."""

    def __init__(self):
        self.insts = []

    def emit(self, op, *args, dtype=None):
        self.insts.append(Inst(op, tuple(args), dtype))
        return Ref(len(self.insts) - 1)

    def dtype(self, ref):
        return self.insts[ref.id].dtype

    def load(self, buffer, index, dtype, mask=None):
        x = self.emit("load", buffer, index, mask, dtype=dtype)
        return self.emit("to_dtype", x, dtype=torch.float32) if dtype in HALF else x

    def store(self, buffer, index, value, mode=None):
        return self.emit("store", buffer, index, value, mode)

    def reduce(self, kind, value, index=None, dtype=None):
        return self.emit("reduce", kind, value, index, dtype=dtype or self.dtype(value))

    def __getattr__(self, op):
        return lambda *args, dtype=None: self.emit(op, *args, dtype=dtype
                                                   or self.dtype(next(a for a in args if type(a) is Ref)))


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
    """loops: list of (vars, reduction_vars, Body, output names); inputs/outputs/local: dict name ->
    tensor."""
    made = [Loop(f"loop{i}", tuple(v), tuple(r), tuple(b.insts), tuple(o)) for i,
            (v, r, b, o) in enumerate(loops)]
    local = dict(local)
    buffers = {n: buffer(n, t) for d in (inputs, outputs, local) for n, t in d.items()}
    return Kernel(name, torch.device("cpu"), tuple(vars), tuple(rvars), made, frozenset(local), buffers,
                  tuple(inputs), tuple(outputs), tuple(symbols))


def run(k, inputs, outputs, sizes=()):
    source = emit_cpp(k)
    f, = load_cpp([source])
    f(*inputs.values(), *outputs.values(), *sizes)
    return source
