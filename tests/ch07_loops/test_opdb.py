"""Every operator of PyTorch's own sample database through trace, decompose, lower and the slow loops, against eager."""
import warnings
from itertools import islice

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, ReductionOpInfo, UnaryUfuncInfo
from torch.utils._pytree import tree_flatten, tree_unflatten

from minicompile.ch01_graphs.fake import FakeMode
from minicompile.ch01_graphs.trace import trace
from minicompile.ch06_decompositions.decompose import decompose
from minicompile.ch07_loops.lower import lower
from minicompile.ch07_loops.verify import verify
from minicompile.errors import Unsupported

from .helpers import run_program

# The answer is random or uninitialised memory, or the meta kernel's dtypes or sizes differ from those of eager's CPU kernel.
NO_ANSWER = {"normal", "native_batch_norm", "native_layer_norm", "linalg.eig"}
RANDOM = ("rand", "bernoulli", "multinomial", "normal", "exponential", "cauchy", "geometric", "dropout", "empty", "uniform", "rrelu")
DTYPES = {torch.float32: 1e-4, torch.int64: 1e-4, torch.bfloat16: 2e-2}
PER_DTYPE = {torch.float32: 2, torch.int64: 1, torch.bfloat16: 1}
ARITHMETIC = (BinaryUfuncInfo, ReductionOpInfo, UnaryUfuncInfo)      # where the dtype decides what is computed
COVERED: set = set()
VISITED: set = set()


def samples(op, dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(islice(op.sample_inputs("cpu", dtype), PER_DTYPE[dtype]))


def graph_of(op, sample):
    """(function of the sample's tensors, those tensors, decomposed graph), or None where eager itself
    cannot be traced."""
    flat, spec = tree_flatten(((sample.input, *sample.args), sample.kwargs))
    where = [i for i, v in enumerate(flat) if isinstance(v, torch.Tensor)]
    tensors = [flat[i].detach() for i in where]
    if any(t.layout != torch.strided for t in tensors):
        return None

    def fn(*values):
        leaves = list(flat)
        for i, v in zip(where, values):
            leaves[i] = v
        args, kwargs = tree_unflatten(leaves, spec)
        return [o for o in tree_flatten(op.op(*args, **kwargs))[0] if isinstance(o, torch.Tensor)]

    mode = FakeMode()
    try:
        graph = trace(fn, [mode.from_real(t) for t in tensors])
    except (RuntimeError, Unsupported, ValueError, AssertionError, TypeError, NotImplementedError):
        return None
    if any(isinstance(n.target, torch._ops.OpOverload) and (n.target._schema.is_mutable or any(
            word in n.target._schema.name for word in RANDOM)) for n in graph.graph.nodes):
        return None
    return fn, tensors, decompose(graph)


@pytest.mark.parametrize("op", [op for op in op_db if op.name not in NO_ANSWER], ids=lambda op: op.formatted_name)
@pytest.mark.filterwarnings("ignore")
def test_operator(op):
    VISITED.add(op.name)
    for dtype, tolerance in DTYPES.items():
        if dtype not in op.dtypes or dtype is not torch.float32 and not isinstance(op, ARITHMETIC):
            continue
        for sample in samples(op, dtype):
            found = graph_of(op, sample)
            if found is None:
                continue
            fn, tensors, graph = found
            program = lower(graph)
            verify(program)
            for got, want in zip(run_program(program, tensors), fn(*tensors), strict=True):
                torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)
            COVERED.add(op.name)


def test_coverage():
    """The loop above did not skip its way to success."""
    if len(VISITED) > 50:               # a worker of a parallel run sees a part of the operators
        assert len(COVERED) > 0.6 * len(VISITED)
