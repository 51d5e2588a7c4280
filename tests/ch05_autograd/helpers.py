"""Capture for tests: one placeholder per input and one node that calls the whole function. The joint trace sees what it does."""
import torch
from torch import fx

from minicompile.ch01_graphs.fake import FakeMode
from minicompile.ch05_autograd.callables import interpret_aten
from minicompile.ch05_autograd.runtime import compile_training


def compile_function(fn, inputs, compile_aten=interpret_aten, stage=compile_training):
    """`fn(*tensors) -> tensor or flat tuple` through the autograd stage."""
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{i}") for i in range(len(inputs))]
    call = graph.call_function(lambda *a: _flat(fn(*a)), tuple(nodes))
    graph.output(call)
    gm = fx.GraphModule(torch.nn.Module(), graph)
    mode = FakeMode()
    fakes = [mode.from_real(t) if isinstance(t, torch.Tensor) else t for t in inputs]
    return stage(gm, fakes, compile_aten)


def _flat(out):
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def copies(inputs):
    """Fresh inputs with the same strides, and whether each is a leaf."""
    out = []
    for t in inputs:
        if not isinstance(t, torch.Tensor):
            out.append(t)
            continue
        new = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
        with torch.no_grad():
            new.copy_(t)
        out.append(new.requires_grad_(t.requires_grad))
    return out


def same(a, b, exact=True, what=""):
    if isinstance(a, torch.Tensor):
        assert a.shape == b.shape and a.dtype == b.dtype, (what, a, b)
        assert a.requires_grad == b.requires_grad, f"{what}: requires_grad {a.requires_grad} vs {b.requires_grad}"
        assert all(s == t or n <= 1 for s, t, n in zip(a.stride(), b.stride(), a.shape)) or a.numel() == 0, \
            (what, a.shape, a.stride(), b.stride())
        torch.testing.assert_close(b, a, equal_nan=True, msg=lambda m: f"{what}: {m}",
                                   **(dict(rtol=1e-5, atol=1e-6) if exact else dict(rtol=1e-4, atol=1e-4)))
    else:
        assert a == b and type(a) is type(b), (what, a, b)


def run_and_grads(f, inputs, nonleaf=False, seed=0):
    """Outputs, the inputs afterwards, and gradients of a fixed scalar made from the differentiable outputs."""
    leaves = copies(inputs)
    given = [t.clone(memory_format=torch.preserve_format) if nonleaf and isinstance(t, torch.Tensor) and t.requires_grad else t
             for t in leaves]
    versions = [t._version if isinstance(t, torch.Tensor) else None for t in given]
    torch.manual_seed(seed)
    outputs = _flat(f(*given))
    loss = 0
    changed = [t for t, v in zip(given, versions) if isinstance(t, torch.Tensor) and t._version != v]
    for i, o in enumerate([*outputs, *changed]):
        if isinstance(o, torch.Tensor) and o.requires_grad and (o.is_floating_point() or o.is_complex()):
            weight = torch.linspace(0.5, 1.5, max(o.numel(), 1), dtype=torch.float64)[:o.numel()].reshape(o.shape)
            loss = loss + ((o.abs() if o.is_complex() else o).double() * weight).sum() * (i + 1)
    wanted = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
    if isinstance(loss, torch.Tensor) and loss.requires_grad and wanted:
        loss.backward()
    grads = [t.grad if t.is_leaf else None for t in wanted]
    return outputs, given, grads


def check(fn, *inputs, nonleaf=False, exact=True):
    """Everything observable of `fn` is equal to eager's. Returns the compiled function."""
    compiled = compile_function(fn, copies(inputs))
    for attempt in range(2):
        eager = run_and_grads(fn, inputs, nonleaf, attempt)
        ours = run_and_grads(compiled, inputs, nonleaf, attempt)
        for what, a, b in zip(("output", "input", "gradient"), eager, ours):
            assert len(a) == len(b)
            for i, (x, y) in enumerate(zip(a, b)):
                assert (x is None) == (y is None), f"{what} {i}: {x} {y}"
                same(x, y, exact, f"{what} {i}")
    return compiled
