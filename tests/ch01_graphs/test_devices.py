"""Which operands may be on a CPU where others are on a GPU: what fakes say, and on a GPU what eager says."""
import itertools
import warnings

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from minicompile.ch01_graphs.fake import FakeTensor
from minicompile.ch01_graphs.operators import of_one_device, run_on_fakes
from minicompile.errors import Unsupported
from tests.opinfo import samples_of

aten = torch.ops.aten
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def outcome(call, op, args, kwargs) -> str:
    """"refused", or the kind of device of the first result, or nothing where there is none to compare."""
    try:
        results = [t for t in pytree.tree_leaves(call(op, args, kwargs)) if isinstance(t, torch.Tensor)]
    except Unsupported:
        return ""
    except (RuntimeError, TypeError, IndexError) as error:
        return "refused" if "device" in str(error) or "CPU" in str(error) else ""
    return results[0].device.type if results else ""


def placed(flat, spec, devices, place):
    remaining = iter(devices)
    return pytree.tree_unflatten([place(x, next(remaining)) if isinstance(x, torch.Tensor) else x for x in flat], spec)


def fake(t, device):
    return FakeTensor(t.detach().to("meta"), device)


# Measured on an H100. "c" and "g": dimensions of an operand on a CPU or a GPU
@pytest.mark.parametrize("op, operands, expected", [
    (aten.add.Tensor, "g2 c0", "cuda"), (aten.add.Tensor, "c0 g2", "cuda"), (aten.add.Tensor, "c1 g0", "refused"),
    (aten.add_.Tensor, "g2 c0", "cuda"), (aten.add_.Tensor, "c0 g0", "refused"), (aten.maximum.default, "g2 c0", "cuda"),
    (aten.clamp_min.Tensor, "g2 c0", "refused"), (aten.nextafter.default, "g2 c0", "refused"), (aten.mse_loss.default, "g2 c0", "refused"),
    (aten.logical_and.default, "g2 c0", "cuda"), (aten.logical_and.default, "c0 g2", "refused"), (aten.complex.default, "g2 c0", "refused"),
    (aten.addcmul.default, "g2 g2 c0", "cuda"), (aten.addcmul.default, "g2 c0 g2", "refused"),
    (aten.addcdiv.default, "g2 g2 c0", "refused"), (aten.lerp.Tensor, "g2 g2 c0", "cuda"), (aten.lerp_.Tensor, "g2 c0 g2", "refused"),
    (aten.copy_.default, "c2 g2", "cpu"), (aten.fill_.Tensor, "c2 g0", "cpu"), (aten.polar.default, "g2 c0", "refused"),
    (aten.bucketize.Tensor, "c0 g1", "refused"), (aten.mm.default, "g2 c2", "refused"), (aten.silu_backward.default, "g2 c0", "refused")])
def test_where_a_fake_may_be(op, operands, expected):
    args = [fake(torch.ones((2,) * int(dims)), GPU if kind == "g" else CPU) for kind, dims in operands.split()]
    assert outcome(run_on_fakes, op, args, {}) == expected


def test_a_number_is_one_at_each_of_its_places():
    x, condition, number = (fake(torch.ones(shape, dtype=dtype), device) for shape, dtype, device in (
        (2, torch.float, GPU), (2, torch.bool, GPU), ((), torch.float, CPU)))
    assert outcome(run_on_fakes, aten.addcmul_.default, (x, number, number), {}) == "refused"
    assert outcome(run_on_fakes, aten.where.self, (condition, number, number), {}) == "cuda"


@pytest.mark.parametrize("op", [aten.pow.Tensor_Scalar, aten.pow_.Scalar])
def test_exponents_are_refused_as_on_a_cpu(op):
    dtypes = torch.int8, torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.float32
    for dtype, exponent in itertools.product(dtypes, (-1, 0, 2, 200, 70000, 2 ** 40, 0.5, -1.5, 1e30, 1e300, float("inf"))):
        outcomes = []
        for device in (CPU, GPU):
            try:
                outcomes.append(op(fake(torch.ones(3, dtype=dtype), device), exponent).dtype)
            except RuntimeError:
                outcomes.append("refused")
        on_a_gpu = "refused" if exponent == 1e300 else outcomes[0]          # a CPU's kernel converts it to float64
        assert outcomes[1] == on_a_gpu, (dtype, exponent)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bool])
def test_an_operator_that_may_refuse_a_dtype_is_not_forgotten(dtype):
    with pytest.raises(Unsupported, match="histc"):
        aten.histc.default(fake(torch.ones(3, dtype=dtype), GPU), 3)
    aten.histc.default(fake(torch.ones(3), GPU), 3)


def test_the_devices_of_indices():
    x, i, m = torch.ones(3, 3), torch.tensor([1, 2]), torch.ones(3, 3, dtype=torch.bool)
    for op, devices, args, expected in [
            (aten.index.Tensor, "gc", (x, [i]), "cuda"), (aten.index.Tensor, "cg", (x, [i]), "refused"),
            (aten.index_put.default, "ggc", (x, [i], x[0, 0]), "cuda"), (aten.index_put.default, "gcc", (x, [i], x[0]), "refused"),
            (aten.index_put.default, "cgc", (x, [i], x[0]), "cpu"), (aten.index_fill.int_Scalar, "gc", (x, 0, i, 2.0), "refused"),
            (aten.index_fill.int_Tensor, "ccg", (x, 0, i, x[0, 0]), "cpu"), (aten.masked_fill.Tensor, "ggc", (x, m, x[0, 0]), "cuda"),
            (aten.masked_fill.Scalar, "gc", (x, m[0, 0], 2.0), "refused"), (aten.ldexp.Tensor, "gc", (x, i[0]), "refused"),
            (aten.ldexp.Tensor, "cg", (x[0, 0], i), "refused"), (aten.ldexp.Tensor, "cg", (x[0, 0], x), "cuda"),
            (aten.ldexp.Tensor, "gc", (i, i[0]), "cuda"), (aten.select_scatter.default, "gc", (x, x[0], 0, 1), "")]:
        flat, spec = pytree.tree_flatten(args)
        given = placed(flat, spec, [GPU if d == "g" else CPU for d in devices], fake)
        assert outcome(run_on_fakes, op, given, {}) == expected, (op, devices)


@pytest.mark.parametrize("device", ["pretended", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("op, args", [
    (aten.heaviside.default, "xn"), (aten.index_add.default, "x0in"), (aten.index_copy.default, "x0in"), (aten.put.default, "xin"),
    (aten.index_reduce.default, "x0inp"), (aten.binary_cross_entropy.default, "xn"), (aten.index_put.default, "xIn")])
def test_operands_that_have_to_be_of_one_dtype(op, args, device):
    values = {"x": torch.full((3, 2), 0.5), "n": torch.full((3, 2), 0.5).half(), "i": torch.tensor([0, 1, 2]), "0": 0, "p": "prod"}
    if op is aten.put.default:
        values["i"] = torch.arange(6).view(3, 2)
    if op is aten.index_put.default:
        values["I"] = [fake(values["i"], GPU) if device != "cuda" else values["i"].cuda()]
    for narrow, refused in (("n", True), ("x", False)):
        given = [values[narrow if name == "n" else name] for name in args]
        given = [g if not isinstance(g, torch.Tensor) else g.cuda() if device == "cuda" else fake(g, GPU) for g in given]
        try:
            op(*given)
            assert not refused
        except RuntimeError as error:
            assert refused and "type" in str(error)


@pytest.mark.parametrize("device", [CPU, GPU])
def test_weights_of_another_dtype_are_refused(device):
    x, weight, row, classes = torch.ones(1, 2, 4, 4), torch.ones(2, 2, 2, 2).half(), torch.ones(3, 2), torch.zeros(3).long()
    for op, tensors, rest in ((aten.convolution.default, (x, weight), (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)),
                              (aten.nll_loss_forward.default, (row, classes, weight[0, 0, 0]), (1, -100)),
                              (aten.nll_loss2d_forward.default, (x, x[:, 0].long(), weight[0, 0, 0]), (1, -100)),
                              (aten.huber_loss_backward.default, (x, x, x.double()), (1, 1.0))):
        with pytest.raises(RuntimeError, match="dtype|scalar type"):
            run_on_fakes(op, (*(fake(t, device) for t in tensors), *rest), {})


@pytest.mark.parametrize("rows", [2, 1024])
@pytest.mark.parametrize("device", ["pretended", pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def test_a_normalization_of_two_dtypes(rows, device):
    """Eager refuses it, and on a GPU decides. Beyond a megabyte a kernel is asked for two dtypes only."""
    def place(t):
        return t.cuda() if device == "cuda" else fake(t, GPU if device == "pretended" else CPU)

    x, means, weight, wide = map(place, (torch.ones(rows, 512), torch.ones(512), torch.ones(512), torch.ones(512).double()))
    for normalize in (lambda w: aten.native_layer_norm.default(x, [512], w, None, 1e-5),
                      lambda w: aten.native_batch_norm.default(x, w, None, means, means, False, 0.1, 1e-5)):
        assert normalize(weight)[0].shape == x.shape
        with pytest.raises(Unsupported if device == "pretended" else RuntimeError):
            normalize(wide)


def test_a_vector_of_another_dtype_is_added_on_a_gpu_only():
    v, m, r = torch.ones(2).double(), torch.ones(2, 3), torch.ones(3)
    for device, error in (CPU, RuntimeError), (GPU, Unsupported):
        with pytest.raises(error, match="dtype"):
            run_on_fakes(aten.addmv.default, tuple(fake(t, device) for t in (v, m, r)), {})


def test_what_only_kernels_of_a_gpu_do(monkeypatch):
    x, target = fake(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last), GPU), fake(torch.zeros(2, 4, 4, dtype=torch.long), GPU)
    assert run_on_fakes(aten.pow.Scalar, (2.0, x), {}).is_contiguous()
    loss = aten.nll_loss2d_forward.default, (x, target, None, 1, -100), {}
    assert run_on_fakes(*loss)[0].device == GPU
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with pytest.raises(Unsupported, match="deterministic"):
        run_on_fakes(*loss)
    for x, index in (torch.ones(2, 3), torch.zeros(2, 2)), (torch.ones(()), torch.zeros(())):
        with pytest.raises(Unsupported, match="deterministic"):
            run_on_fakes(aten.scatter_reduce.two, (fake(x, GPU), 0, fake(index.long(), GPU), fake(x, GPU), "mean"), {})
    index = torch.zeros(2, 3, dtype=torch.long)
    x = fake(torch.ones(2, 3), GPU)
    with pytest.raises(Unsupported, match="deterministic"):
        run_on_fakes(aten.put_.default, (x, fake(index, GPU), x), {})
    assert run_on_fakes(aten.put_.default, (x, fake(index, GPU), x, True), {}) is not None
    assert run_on_fakes(aten.scatter_reduce.two, (x, 0, fake(index, GPU), x, "mean"), {}).device == GPU
    with pytest.raises(Unsupported, match="deterministic"):
        run_on_fakes(aten.index_reduce.default, (x, 0, fake(index[:, 0], GPU), x, "amax"), {})
    images, grid = fake(torch.ones(1, 2, 3, 3), GPU), fake(torch.zeros(1, 2, 2, 2), GPU)
    with pytest.raises(Unsupported, match="deterministic"):
        run_on_fakes(aten.grid_sampler_2d.default, (images, grid, 0, 0, False), {})


def test_a_gpu_looks_whether_a_number_of_the_cpu_fits():
    number = fake(torch.tensor(1j), CPU)
    with pytest.raises(Unsupported, match="may not fit"):
        run_on_fakes(aten.fill_.Tensor, (fake(torch.ones(2), GPU), number), {})
    for x in fake(torch.ones(2), CPU), fake(torch.ones(2, dtype=torch.complex64), GPU):
        assert run_on_fakes(aten.fill_.Tensor, (x, number), {}) is not None


@pytest.mark.parametrize("dtype,number", [(torch.int64, 1e300), (torch.int16, 70000), (torch.int32, float("nan"))])
def test_a_gpu_looks_whether_a_number_of_python_fits(dtype, number):
    for shape in ((2,), ()):
        with pytest.raises(RuntimeError, match="without overflow"):
            run_on_fakes(aten.fill_.Scalar, (fake(torch.ones(shape, dtype=dtype), GPU), number), {})
    assert run_on_fakes(aten.fill_.Scalar, (fake(torch.ones(0, dtype=dtype), GPU), number), {}) is not None
    assert run_on_fakes(aten.fill_.Scalar, (fake(torch.ones(2, dtype=dtype), GPU), 7.0), {}) is not None


def test_the_table_of_operators_is_there():
    assert {"aten::mm", "aten::clamp.Tensor", "aten::gather"} <= of_one_device()
    assert not {"aten::add.Tensor", "aten::where.self", "aten::copy_"} & of_one_device()


class Calls(TorchDispatchMode):
    """The calls of operators with two tensors or three."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        flat, spec = pytree.tree_flatten((args, kwargs or {}))
        if 1 < sum(isinstance(x, torch.Tensor) for x in flat) < 4 and not any(isinstance(x, torch.device) for x in flat):
            self.found.append((func, [x.clone() if isinstance(x, torch.Tensor) else x for x in flat], spec))
        return func(*args, **(kwargs or {}))


# With indices that may be out of range, which on a GPU is the end of the process; and what says of the devices only what its parts say
LEFT = ("jiterator take put gather scatter index_ embedding one_hot segment mode margin_loss unpool nll_loss cross_entropy ctc rrelu "
        "sparse pinv lstsq linspace logspace")


@pytest.mark.gpu
@pytest.mark.parametrize("op", [op for op in op_db if not any(word in op.name for word in LEFT.split())], ids=lambda op: op.formatted_name)
def test_fakes_are_where_eager_is(op):
    calls, wrong, asked = Calls(), [], set()
    with calls, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for sample in samples_of(op, torch.float32, 6) if torch.float32 in op.supported_dtypes("cpu") else []:
            op.op(sample.input.detach() if isinstance(sample.input, torch.Tensor) else sample.input, *sample.args, **sample.kwargs)
    for func, flat, spec in calls.found:
        tensors = [x for x in flat if isinstance(x, torch.Tensor)]
        for number, devices in itertools.product((None, *range(len(tensors))), itertools.product((CPU, GPU), repeat=len(tensors))):
            form = [x.flatten()[0] if number is not None and x is tensors[number] and x.numel() else x for x in flat]
            key = func, devices, tuple(x.dim() for x in form if isinstance(x, torch.Tensor))
            if len(set(devices)) == 1 or key in asked:
                continue
            asked.add(key)
            everywhere = outcome(lambda f, a, k: f(*a, **k), func, *placed(form, spec, [GPU] * len(tensors), torch.Tensor.to))
            real = outcome(lambda f, a, k: f(*a, **k), func, *placed(form, spec, devices, torch.Tensor.to))
            said = outcome(run_on_fakes, func, *placed(form, spec, devices, fake))
            if everywhere == "cuda" and real and said and real != said:
                wrong.append((str(func), *key[1:], real, said))
    assert not wrong
