"""PyTorch's own operator samples through the autograd stage: outputs and gradients, against eager."""
import pytest
import torch
from helpers import check
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from minicompile.errors import Unsupported

# Samples of random operators seed the generator inside of the call; here the caller seeds, so that the stream is compared.
common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)

NAMES = sorted({op.name for op in op_db if torch.float32 in op.supported_dtypes("cpu")})
GROUPS = 24


def sample_cases(op, limit):
    seen = 0
    for sample in op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd):
        if seen == limit:
            return
        seen += 1
        yield sample


def run_sample(op, sample):
    """True if checked, False if eager gives nothing that can be compared."""
    flat, spec = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
    positions = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)]
    if not positions or any(flat[i].layout != torch.strided for i in positions):
        return False

    def fn(*tensors):
        values = list(flat)
        for i, t in zip(positions, tensors):
            values[i] = t
        args, kwargs = pytree.tree_unflatten(values, spec)
        out = pytree.tree_leaves(op.op(*args, **kwargs))
        return tuple(out)

    check(fn, *[flat[i].detach().requires_grad_(flat[i].requires_grad) for i in positions])
    return True


# Results that differ from one eager call to the next, or that hold uninitialised memory.
NOT_COMPARABLE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "resize_",
                  "resize_as_", "nn.functional.fractional_max_pool2d"} | {n for n in NAMES if n.startswith("jiterator")}


@pytest.mark.parametrize("group", range(GROUPS))
def test_samples(group):
    torch.manual_seed(0)
    problems = []
    for op in op_db:
        if op.name not in NAMES or NAMES.index(op.name) % GROUPS != group or op.name in NOT_COMPARABLE:
            continue
        try:
            for sample in sample_cases(op, 2):
                try:
                    run_sample(op, sample)
                except Unsupported:
                    break
        except Exception as error:
            problems.append(f"{op.name} {op.variant_test_name}: {type(error).__name__}: {str(error)[:400]}")
    assert not problems, "\n".join(problems)
