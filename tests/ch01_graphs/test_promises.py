"""What fakes say of a result is what the kernel returns: of each operator that PyTorch's samples call, forward and backward. A kernel that
is generated for another dtype or shape reads beyond the memory of the result."""
import itertools

import pytest
import torch
from torch.utils import _pytree as pytree

from minicompile.ch01_graphs.fake import DispatchMode, FakeMode, FakeTensor
from minicompile.ch01_graphs.operators import run_on_fakes
from minicompile.errors import Unsupported
from tests.opinfo import OPERATORS, tensors_of

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
# Statistics of a CPU kernel have other dtypes and sizes. They are decomposed, so no kernel returns them.
ONLY_THE_FIRST = ("aten::native_layer_norm", "aten::native_batch_norm", "aten::_native_batch_norm_legit")


def as_fake(x):
    if not isinstance(x, torch.Tensor):
        return x
    memory = torch.empty(x.untyped_storage().nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
    return FakeTensor(torch.empty(0, dtype=x.dtype, device="meta").set_(memory, x.storage_offset(), x.shape, x.stride()), x.device)


class Compared(DispatchMode):
    """Asks fakes what each operator returns that runs, and keeps what differs. Operators that write return their operands."""

    def __init__(self):
        super().__init__()
        self.differences, self.questions, self.asked = {}, 0, set()
        FakeMode()                                   # loads meta kernels

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out, (flat, spec) = func(*args, **(kwargs or {})), pytree.tree_flatten((args, kwargs or {}))
        form = func, str([(x.dtype, x.shape, x.stride()) if isinstance(x, torch.Tensor) else x for x in flat])
        strided = all(x.layout is torch.strided for x in pytree.tree_leaves((flat, out)) if isinstance(x, torch.Tensor))
        if strided and not func._schema.is_mutable and form not in self.asked:
            self.asked.add(form)
            self.compare(func, out, *pytree.tree_unflatten(list(map(as_fake, flat)), spec))
        return out

    def compare(self, func, out, args, kwargs):
        try:
            fakes = run_on_fakes(func, args, kwargs)
        except (Unsupported, RuntimeError):
            return
        self.questions += 1
        count = 1 if func.name().startswith(ONLY_THE_FIRST) else None
        for i, (real, fake) in enumerate(itertools.islice(itertools.zip_longest(*map(pytree.tree_leaves, (out, fakes))), count)):
            said, true = ([t.dtype, *t.shape] if isinstance(t, torch.Tensor) else type(t) for t in (fake, real))
            if said != true:
                self.differences.setdefault(f"result {i} of {func}", (said, true))


@pytest.mark.filterwarnings("ignore")
def test_dtypes_and_shapes_of_results():
    compared = Compared()
    for op, dtype in itertools.product(OPERATORS, DTYPES):
        grad = op.supports_autograd and dtype.is_floating_point
        samples = op.sample_inputs("cpu", dtype, requires_grad=grad) if dtype in op.supported_dtypes("cpu") else ()
        try:
            for sample in itertools.islice(samples, 3 if dtype == torch.float32 else 1):
                with compared:
                    out = op.op(sample.input, *sample.args, **sample.kwargs)
                    outs, inputs = ([t for t in ts if isinstance(t, torch.Tensor) and t.requires_grad]
                                    for ts in (pytree.tree_leaves(out), tensors_of(sample)))
                    if outs and inputs:
                        torch.autograd.grad(outs, inputs, list(map(torch.ones_like, outs)), allow_unused=True)
        except (RuntimeError, ImportError, NotImplementedError):             # the database needs a library that is not there
            continue
    assert compared.questions > 3000 and not compared.differences, compared.differences
