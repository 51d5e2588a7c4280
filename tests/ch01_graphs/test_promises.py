"""What fakes say of a result is what the kernel returns: of each operator that PyTorch's samples call, forward and backward. A kernel that
is generated for another dtype or shape reads beyond the memory of the result."""
import itertools

import pytest
import torch
from torch.utils import _pytree as pytree

import minicompile
from minicompile.ch01_graphs.fake import DispatchMode, FakeMode, FakeTensor, storage_key
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


def shares(result, operands) -> list[int]:
    """The places of the operands whose memory a result lies in."""
    return [i for i, x in enumerate(operands) if isinstance(x, torch.Tensor) and result.numel() and storage_key(x) == storage_key(result)]


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
            self.compare(func, out, flat, *pytree.tree_unflatten(fakes := list(map(as_fake, flat)), spec), fakes)
        return out

    def compare(self, func, out, operands, args, kwargs, operand_fakes):
        try:
            fakes = run_on_fakes(func, args, kwargs)
        except (Unsupported, RuntimeError):
            return
        self.questions += 1
        count = 1 if func.name().startswith(ONLY_THE_FIRST) else None
        for i, (real, fake) in enumerate(itertools.islice(itertools.zip_longest(*map(pytree.tree_leaves, (out, fakes))), count)):
            said, true = ([t.dtype, *t.shape, *shares(t, given)] if isinstance(t, torch.Tensor) else type(t)
                          for t, given in ((fake, operand_fakes), (real, operands)))
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


# Calls with nothing to do, of which some kernels return their operand and some a copy.
IDLE = """x.repeat(1, 1, 1, 1) | x.roll(0, 0) | x.flip(()) | x.rot90(0) | x.repeat_interleave(1, 0) | F.pad(x, [0, 0])
F.pad(x, (0, 0, 0, 0), mode="reflect") | F.pad(x, (0, 0, 0, 0), mode="replicate") | F.pad(x, (0, 0, 0, 0), mode="circular")
x.diff(n=0) | F.interpolate(x, scale_factor=1.0) | F.dropout(x, 0.0) | F.interpolate(x, size=x.shape[2:], mode="bilinear")
F.dropout(x, 0.5, False) | F.feature_alpha_dropout(x, 0.5, False) | torch.native_dropout(x, 0.5, False) | x.to(torch.float32)
x.to("cpu", torch.float32, copy=True) | x.type_as(x) | x.contiguous() | x.contiguous(memory_format=torch.channels_last) | F.rrelu(x)
torch.cat([x]) | torch.hstack([x]) | torch.vstack([x]) | torch.dstack([x]) | torch.atleast_1d(x) | torch.broadcast_tensors(x)
torch.einsum("abcd->abcd", x) | torch.real(x) | x.conj() | x.resolve_conj() | x.resolve_neg() | x.positive() | x.nan_to_num()
x.sum([]) | x.movedim(0, 0) | x.squeeze() | x.reshape(x.shape) | x.flatten(0, 0) | x.ravel() | F.pixel_shuffle(x, 1)
F.pixel_unshuffle(x, 1) | F.channel_shuffle(x, 1) | F.channel_shuffle(x, 4) | x.narrow_copy(0, 0, 2)
x.index_select(0, torch.arange(2)) | x[torch.arange(2)] | torch.fft.fftn(x + 0j, dim=()) | F.max_pool2d(x, 1) | F.avg_pool2d(x, 1)
F.adaptive_avg_pool2d(x, x.shape[2:]) | F.adaptive_max_pool2d(x, x.shape[2:]) | F.unfold(x, 1) | F.fold(x[0].flatten(1), (3, 3), 1)
x.masked_fill(x != x, 0) | x.renorm(2, 0, 1e9) | x.round(decimals=2) | x * 1 | x ** 1 | torch.block_diag(x[0, 0])
torch.cartesian_prod(x.reshape(-1)) | torch.meshgrid(x.reshape(-1), indexing="ij") | torch.linalg.multi_dot([x[0, 0], x[0, 0]])
torch.matrix_power(x, 1) | torch.matrix_power(x, 0) | x.sum_to_size(x.shape) | torch.stack([x]) | torch.asarray(x)
torch.asarray(x, copy=True) | x.detach() | x.data | x.adjoint() | torch.squeeze_copy(x) | aten.alias(x) | aten.lift(x)
aten.lift_fresh(x) | aten._to_copy(x) | aten._unsafe_view(x, x.shape) | x.view(torch.float32) | x.half().float() | x.unsafe_chunk(1)
x.amax([]) | x.logcumsumexp(0) | torch.nn.utils.rnn.pad_sequence([x[0]]) | aten._reshape_alias(x, x.shape, x.stride())
aten.constant_pad_nd(x, []) | aten.slice_copy(x) | x.index_add(0, empty, x[:0]) | x.scatter_add(0, empty.view(0, 1, 1, 1), x)
x.put(empty, x[:0]) | x.index_copy(0, empty, x[:0]) | x.select_scatter(x[0], 0, 0) | x.slice_scatter(x, 0) | x.unique()"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_memory_of_results_where_nothing_is_to_be_done(layout):
    compared, x = Compared(), torch.rand(2, 4, 3, 3).contiguous(memory_format=layout)
    names = {"torch": torch, "aten": torch.ops.aten, "F": torch.nn.functional, "x": x, "empty": torch.empty(0, dtype=torch.int64)}
    for text in IDLE.replace("\n", " | ").split(" | "):
        with compared:
            eval(text, dict(names))
    assert compared.questions > 90 and not compared.differences, compared.differences


def test_shifts_of_and_by_bools_and_in_place_are_in_the_graph():
    """PyTorch's meta kernels refuse a bool, where its kernels do not."""
    def f(n, b, m):
        m <<= b
        m >>= 1
        return n << b, n >> b, b << n, b >> n, b << 2, n << b[0], n << True, m
    args = torch.arange(-2, 4, dtype=torch.int8), torch.tensor([True, False] * 3), torch.arange(6)
    for backend in ("eager", "aot_eager", "cpp"):
        given = *args[:2], args[2].clone()
        for got, want in zip(minicompile.compile(f, backend=backend, fullgraph=True)(*given), f(*args[:2], args[2].clone()), strict=True):
            assert got.dtype is want.dtype and got.tolist() == want.tolist()


def test_a_fake_that_returns_its_operand_is_a_copy():
    """As a function for fakes is often written, for a kernel that must not return its operand."""
    @torch.library.custom_op("mc_promises::same", mutates_args=())
    def same(x: torch.Tensor) -> torch.Tensor:
        return x.clone()
    same.register_fake(lambda x: x)

    def f(x):
        y = same(x)
        y += 1
        return x * 2, y
    for backend in ("eager", "aot_eager", "loops", "cpp"):
        for got, want in zip(minicompile.compile(f, backend=backend, fullgraph=True)(torch.ones(3)), f(torch.ones(3)), strict=True):
            assert torch.equal(got, want)


def test_a_shuffle_on_a_gpu_may_be_its_operand():
    """Without a kernel of its own it is made of views, and copies what does not lie row by row."""
    for x in (torch.randn(1, 4, 4, 8)[..., ::2], torch.randn(2, 4, 3, 3), torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last)):
        for groups in (1, 2, 4):
            fake = FakeTensor(torch.empty_strided(x.shape, x.stride(), device="meta"), torch.device("cuda"))
            said = torch.channel_shuffle(fake, groups)
            moved = x.reshape(x.shape[0], groups, x.shape[1] // groups, -1).transpose(1, 2).contiguous()
            assert (storage_key(said) == storage_key(fake)) is (moved.data_ptr() == x.data_ptr())
            assert said.stride() == moved.reshape(x.shape).stride()


def test_products_into_places_are_left_to_eager_where_a_gpu_has_to_be_deterministic():
    x, index = (FakeTensor(torch.empty(4, dtype=dtype, device="meta"), torch.device("cuda")) for dtype in (torch.float32, torch.int64))
    torch.use_deterministic_algorithms(True)
    try:
        x.scatter_reduce(0, index, x, "amax")
        with pytest.raises(Unsupported, match="no deterministic kernel"):
            x.scatter_reduce(0, index, x, "prod")
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_shuffle_is_computed_by_loops_in_memory_of_its_own(groups):
    for x in (torch.randn(1, 4, 4, 8)[..., ::2], torch.randn(2, 4, 3, 3), torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last)):
        def f(x):
            return torch.channel_shuffle(x, groups), torch.channel_shuffle(x.sin(), groups) * 2
        minicompile.reset()
        for got, want in zip(minicompile.compile(f, backend="loops")(x), f(x)):
            assert got.equal(want) and got.stride() == want.stride()
