"""Trace, decompose, lower, check the program's spec, and run the loops slowly."""
import torch
from torch.utils._pytree import tree_map

from exercises.tasks.kit import run_program
from minicompile.ch01_graphs.fake import FakeMode, FakeTensor
from minicompile.ch01_graphs.trace import trace
from minicompile.ch06_decompositions.decompose import decompose
from minicompile.ch07_loops.ir import Extern, Loop
from minicompile.ch07_loops.lower import lower
from minicompile.ch07_loops.verify import verify


def program_of(fn, tensors, options=None, decomposed=True, device="cpu"):
    """The verified Program of `fn`, which returns a tensor or a sequence of tensors. `device` is what the
    lowering believes."""
    mode = FakeMode()

    def flat(*fakes):
        out = fn(*fakes)
        return [out] if isinstance(out, torch.Tensor) else list(out)

    graph = trace(flat, [mode.from_real(t) for t in tensors])
    graph = decompose(graph) if decomposed else graph
    if device != "cpu":
        for node in graph.graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = tree_map(lambda f: FakeTensor(f.meta, torch.device(device)) if isinstance(f, FakeTensor) else f,
                                            node.meta["val"])
    program = lower(graph, options)
    verify(program)
    return program


def same_strides(got, want):
    return all(g == w for g, w, n in zip(got.stride(), want.stride(), got.shape) if n > 1)


def check(fn, tensors, options=None, rtol=1e-4, atol=1e-5, strides=True, decomposed=True, device="cpu"):
    """Loops give what eager gives; returns the program."""
    program = program_of(fn, tensors, options, decomposed, device)
    want = fn(*[t.clone() for t in tensors])
    want = [want] if isinstance(want, torch.Tensor) else list(want)
    inputs = [t.detach().clone() for t in tensors]
    for g, w in zip(run_program(program, inputs), want, strict=True):
        torch.testing.assert_close(g, w.detach(), rtol=rtol, atol=atol, equal_nan=True)
        assert not strides or same_strides(g, w), (g.stride(), w.stride())
    return program


def loops(program):
    return [n for n in program.nodes if isinstance(n, Loop)]


def externs(program):
    return [n for n in program.nodes if isinstance(n, Extern)]
