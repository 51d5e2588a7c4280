"""Hand-built kernels: a few lines of loop IR, as fusion would hand them over."""
import torch

from minicompile.ch01_graphs.symbolic import Symbol
from minicompile.ch07_loops.ir import Buffer, Inst, Layout, Loop, Ref
from minicompile.ch08_fusion.kernel import Kernel

F32 = torch.float32


def contiguous(size):
    stride, out = 1, []
    for s in reversed(size):
        out.append(stride)
        stride = stride * s
    return tuple(reversed(out))


def buffer(name, size, dtype=F32, stride=None, alias_of=None):
    return Buffer(name, dtype, torch.device("cpu"), Layout(tuple(size), tuple(stride or contiguous(size))), alias_of)


class Body:
    """Appends instructions; `b.exp(x)` for any operation, dtype of the first operand unless told."""

    def __init__(self):
        self.insts = []

    def emit(self, op, *args, dtype=F32):
        self.insts.append(Inst(op, args, dtype))
        return Ref(len(self.insts) - 1)

    def __getattr__(self, op):
        return lambda *args, dtype=None: self.emit(op, *args, dtype=dtype or self._dtype(args))

    def _dtype(self, args):
        refs = [a for a in args if isinstance(a, Ref)]
        return self.insts[refs[-1].id].dtype if refs else F32

    def load(self, name, index, mask=None, dtype=F32):
        x = self.emit("load", name, index, mask, dtype=dtype)
        return self.emit("to_dtype", x, dtype=F32) if dtype in (torch.float16, torch.bfloat16) else x

    def store(self, name, index, value, mode=None):
        return self.emit("store", name, index, value, mode, dtype=None)

    def loop(self, vars, rvars=(), outputs=(), location=None, name="loop"):
        return Loop(name, tuple(vars), tuple(rvars), tuple(self.insts), tuple(outputs), location)


def kernel(loops, buffers, inputs, outputs, vars, rvars=(), local=(), symbols=(), name="kernel"):
    return Kernel(name, torch.device("cpu"), tuple(vars), tuple(rvars), loops, frozenset(local),
                  {b.name: b for b in buffers}, tuple(inputs), tuple(outputs), tuple(symbols))


def sym(name, size):
    return Symbol(name, size)
