"""Hand-built kernels: a few lines of loop IR, as fusion would hand them over."""
import torch

from minicompile.ch01_graphs.symbolic import Symbol
from minicompile.ch07_loops.ir import Buffer, Layout, Loop, Value, Values
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


class Body(Values):
    """A loop body; `b.exp(x)` for any operation, dtype of the last operand unless told."""

    def emit(self, op, *args, dtype=F32):
        return self.make(op, args, dtype)

    def __getattr__(self, op):
        return lambda *args, dtype=None: self.emit(op, *args, dtype=dtype or self._dtype(args))

    def _dtype(self, args):
        values = [a for a in args if isinstance(a, Value)]
        return values[-1].dtype if values else F32

    def load(self, name, index, mask=None, dtype=F32):
        x = self.emit("load", name, index, mask, dtype=dtype)
        return self.emit("to_dtype", x, dtype=F32) if dtype in (torch.float16, torch.bfloat16) else x

    def store(self, name, index, value, mode=None):
        return self.write(name, index, None, value, mode)

    def indirect(self, value, size):
        return self.position(value, size).args[1]

    def loop(self, vars, rvars=(), location=None, name="loop"):
        return Loop(name, tuple(vars), tuple(rvars), tuple(self.stores), location)


def kernel(loops, buffers, inputs, outputs, vars, rvars=(), local=(), symbols=(), name="kernel"):
    return Kernel(name, torch.device("cpu"), tuple(vars), tuple(rvars), loops, frozenset(local),
                  {b.name: b for b in buffers}, tuple(inputs), tuple(outputs), tuple(symbols))


def sym(name, size):
    return Symbol(name, size)
