"""Strides of fakes against those of the CPU kernels."""
import itertools
import random

import pytest
import torch

import minicompile
from minicompile.ch01_graphs.fake import FakeMode
from minicompile.ch01_graphs.rules.forms import POINTWISE, WITH_NUMBER
from minicompile.errors import Unsupported

aten = torch.ops.aten


def strided(shape, order, dtype=torch.float32):
    """A tensor whose dims lie in memory in `order`, outermost first."""
    t = torch.ones([shape[d] for d in order], dtype=dtype)
    return t.permute([order.index(d) for d in range(len(shape))])


def check(op, *args):
    want, mode = op(*args), FakeMode()

    def fake(x):
        return mode.from_real(x) if isinstance(x, torch.Tensor) else [i if i is None else mode.from_real(i) for i in x]
    got = op(*(fake(a) if isinstance(a, (torch.Tensor, list)) else a for a in args))
    assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype), (op, args)


@pytest.mark.parametrize("op", sorted(POINTWISE - {aten.div.Tensor_mode, aten.native_dropout_backward.default}, key=str))
def test_pointwise(op):
    for order in itertools.permutations(range(3)):
        a, same, flat = strided((3, 4, 6), order), torch.ones(3, 4, 6), strided((4, 6), (1, 0))
        for x, y in ((a, same), (same, a), (a, flat), (flat, a), (torch.ones(3, 1, 6), flat), (a, torch.tensor(2.0))):
            check(op, x, y)
        if op not in (aten.heaviside.default,):
            check(op, a, same.long())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_expanded_operands(dtype):
    """Meta kernels in Python copy an expanded operand of half precision before they ask it for its order."""
    one, row = torch.ones((), dtype=dtype).expand(4, 6), torch.ones(6, dtype=dtype).expand(4, 6)
    for order in itertools.permutations(range(2)):
        x = strided((4, 6), order, dtype)
        for a, b in itertools.permutations((one, row, x), 2):
            for op in (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.pow.Tensor_Tensor, aten.maximum.default, aten.atan2.default,
                       aten.fmod.Tensor, aten.eq.Tensor, aten.lt.Tensor):
                check(op, a, b)
            check(aten.where.self, a > 0, b, x)
            check(aten.addcmul.default, a, b, x)
    square = torch.ones(7, 7, 5, dtype=dtype).diagonal()
    for form in (torch.contiguous_format, torch.preserve_format):
        check(lambda x: aten.clone.default(x.expand(2, 5, 7), memory_format=form), square)
    check(lambda x: x.tile(2), square)


@pytest.mark.parametrize("op", sorted(WITH_NUMBER, key=str))
def test_a_tensor_with_dims_of_size_one_and_a_number(op):
    """Such dims may have any stride, and kernels differ in what they make of it."""
    choose, differ = random.Random(0), 0
    for _ in range(60):
        shape = [choose.choice([1, 1, 2, 3, 4]) for _ in range(choose.randint(1, 5))]
        x = strided(shape, choose.sample(range(len(shape)), len(shape)), torch.long if "bitwise" in str(op) else torch.float32)
        x = x.as_strided(shape, [choose.choice([s, 1, 2, 8, 64]) if n == 1 else s for n, s in zip(shape, x.stride())])
        check(op, x, 2)
        check(op, x, torch.tensor(2)) if op._overloadname == "Tensor" else None
        differ += op(x, 2).stride() != op(x.to("meta").as_strided(shape, x.stride()), 2).stride()
    assert differ                                   # else the meta kernel is right, and nothing is needed here


def test_index():
    for order in itertools.permutations(range(3)):
        x, i = strided((3, 4, 6), order), torch.zeros(5, 2, dtype=torch.long)
        for index in (i, i.t().contiguous().t(), i[:, 0]):
            for places in ([index], [None, index], [index, index], [None, index, index], [index, None, index]):
                check(aten.index.Tensor, x, places)
    check(aten.index.Tensor, torch.ones(33, 17).diagonal(), [torch.zeros(17, 33, dtype=torch.long).t()])


def test_integers_that_require_gradients():
    z = torch.ones(3, 2, dtype=torch.long)
    z[0] = torch.ones(2, requires_grad=True).sum()
    assert z.requires_grad
    with pytest.raises(Unsupported, match="integers"):
        FakeMode().from_real(z)


def test_kernels_whose_meta_kernels_have_other_strides():
    for order in itertools.permutations(range(4)):
        x = strided((2, 3, 4, 6), order)
        check(aten.pow.Scalar, 2.0, x)
        check(torch.nn.functional.rrelu, x)
        check(lambda x: torch.roll(x, 1, -1), x)
        check(lambda x: torch.isin(x, x[0, 0, 0, :2]), x)
        check(lambda x: torch.isin(x, 0.5), x)
        check(lambda x: torch.normal(x, 1.0), x)
        check(lambda x: torch.normal(0.0, x.abs()), x)
        check(torch.poisson, x)
        check(lambda x: x[:, ::2].index_fill(1, torch.tensor(0), 1.0), x)


def test_kernels_that_answer_channels_last():
    pad = torch.nn.functional.pad
    for shape, ops in (((2, 8, 4, 6), (lambda x: torch.pixel_shuffle(x, 2), lambda x: torch.pixel_unshuffle(x, 2))), ((2, 4, 3, 4, 6), ())):
        for order in [*itertools.permutations(range(len(shape)))][::len(shape) - 3] + [(0, *range(2, len(shape)), 1)]:
            for op in (*ops, lambda x: torch.channel_shuffle(x, 2), lambda x: torch.roll(x, 1, 1), *(
                    lambda x, mode=mode: pad(x, (1,) * (2 * x.dim() - 4), mode) for mode in ("reflect", "replicate"))):
                check(op, strided(shape, order))


def test_batch_norm():
    """Channels last only where the operand lies so without gaps."""
    forms = set()
    for shape in ((4, 3), (2, 3, 4), (2, 3, 4, 6), (2, 3, 4, 5, 6)):
        statistics, orders = [torch.ones(3), torch.ones(3)], list(itertools.permutations(range(len(shape))))
        for order in [*orders[::1 if len(shape) < 5 else 9], (0, *range(2, len(shape)), 1)]:
            for x in (strided(shape, order), strided([2 * n for n in shape], order)[tuple(slice(n) for n in shape)]):
                for training in (True, False):
                    op, rest = aten.native_batch_norm.default, (None, None, *statistics, training, 0.1, 1e-5)
                    forms.add(op(x, *rest)[0].is_contiguous())
                    check(lambda x, *s: op(x, None, None, *s, training, 0.1, 1e-5)[0], x, *statistics)
                    check(lambda g, x, *s: aten.native_batch_norm_backward(g, x, None, *s, *s, training, 1e-5, [True] * 3)[0],
                          strided(shape, order[::-1]), x, *statistics)
    assert forms == {True, False}


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "cpp"])
def test_one_hot_fills_in_a_new_tensor(backend):
    def f(x, n=5):
        return torch.nn.functional.one_hot(x, n), torch.nn.functional.one_hot(x, num_classes=n)
    x = torch.arange(24).reshape(4, 6).t() % 5
    for got, want in zip(minicompile.compile(f, backend=backend, fullgraph=True)(x), f(x)):
        assert got.stride() == want.stride() and got.equal(want)


def test_a_kernel_that_refuses_empty_tensors_is_asked():
    for op in (aten.min.default, aten.argmax.default):
        with pytest.raises((RuntimeError, IndexError), match="empty|numel"):
            op(FakeMode().from_real(torch.ones(0, 3)))


@pytest.mark.parametrize("backend", ["aot_eager", "loops", "cpp"])
def test_convolutions_of_symbolic_sizes_answer_channels_last(backend):
    """They were taken for row-major, and copied into that form at every call."""
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(4, 5, 3, stride=2))
    compiled = minicompile.compile(net, backend=backend)
    for n, size, form in ((2, 6, torch.contiguous_format), (3, 8, torch.channels_last), (1, 8, torch.channels_last),
                          (5, 9, torch.channels_last), (4, 7, torch.contiguous_format)):
        x = torch.randn(n, 3, size, size).to(memory_format=form)
        got, want = compiled(x), net(x)
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride(), (n, size, form)
