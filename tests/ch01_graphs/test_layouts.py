"""Strides of fakes against those of the CPU kernels."""
import itertools
import random

import pytest
import torch
from torch.utils import _pytree as pytree

import minicompile
from minicompile.ch01_graphs.corrections import COPYING, FORMS
from minicompile.ch01_graphs.fake import FakeMode
from minicompile.ch01_graphs.shapes import ShapeEnv, expr_of
from minicompile.ch01_graphs.symbolic import evaluate
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


@pytest.mark.parametrize("op", [aten.copysign.Tensor, aten.logical_and.default, aten.xlogy.Tensor, aten.special_xlog1py.default,
                                aten.floor_divide.default, aten.logaddexp.default, aten.heaviside.default])
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


@pytest.mark.parametrize("op", [getattr(getattr(aten, name), kind) for kind, names in {
    "Tensor": "add sub mul div", "Scalar": "add sub mul div rsub remainder fmod floor_divide copysign eq ne lt le gt ge bitwise_and "
    "bitwise_or bitwise_xor"}.items() for name in names.split()])
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


def test_dims_of_size_1_of_a_view_have_eagers_strides_where_sizes_vary():
    choose, viewed = random.Random(0), 0
    for _ in range(300):
        sizes = choose.choices([1, 1, 3, 4, 6], k=choose.randint(1, 4))
        order = choose.sample(range(len(sizes)), len(sizes))
        real, env, mode = torch.empty(sizes).permute(order), ShapeEnv(), FakeMode()
        shape = [n for n in real.shape if n > 1 or choose.random() < 0.5]
        for _ in range(choose.randint(0, 2)):
            shape.insert(choose.randint(0, len(shape)), 1)
        made = {n: env.create(n) for n in {3, 4, 6}} | {1: 1}
        with mode:
            fake = torch.empty([made[n] for n in sizes]).permute(order)
            view = fake.view([made[n] for n in shape])
        assert [evaluate(expr_of(s), env.hints) for s in view.stride()] == list(real.view(shape).stride()), (sizes, order, shape)
        viewed += view.shape != fake.shape
    assert viewed > 100


def form(choose, sizes):
    """Strides: in any order, with gaps, expanded; those of dims of size 1 are whatever they like."""
    dims, strides, step, kind = list(range(len(sizes))), [0] * len(sizes), 1, choose.choice(["rows", "dense", "gaps", "expanded", "last"])
    if kind != "rows":
        choose.shuffle(dims)
    for d in (1, 3, 2, 0) if kind == "last" and len(sizes) == 4 else dims[::-1]:
        strides[d], step = step, step * max(sizes[d], 1) * (choose.choice([1, 2]) if kind == "gaps" else 1)
        if sizes[d] == 1 and choose.random() < 0.4:
            strides[d] = choose.choice([0, 1, 2, 7, 100])
        elif kind == "expanded" and choose.random() < 0.4:
            strides[d] = 0
    return tuple(sizes), tuple(strides)


def forms(choose, count):
    """Of operands that can be broadcast."""
    first = form(choose, [choose.choice([0, 1, 1, 1, 2, 2, 3]) for _ in range(choose.randint(1, 4))])

    def other():
        sizes = [n if choose.random() < 0.75 else 1 for n in first[0]]
        return choose.choice([first, form(choose, first[0]), form(choose, sizes), form(choose, sizes[len(sizes) > 1:])])
    return [first, *(other() for _ in range(count - 1))]


def argument(a, tensors, dtype):
    kind = str(a.type)
    if kind == "Tensor":
        return tensors.pop(0)
    if kind in ("number", "float", "Optional[number]", "Optional[float]"):
        return 0.5 if dtype.is_floating_point else 2
    return {"bool": False, "int": 0, "List[int]": [0], "Optional[str]": "trunc", "str": "none"}.get(kind)


def stride_differences(op, choose, count=10, mixed=()):
    """(number of comparisons, those that differ) of an operator on random forms. mixed: dtypes of its later operands."""
    differ, compared, kinds = [], 0, [str(a.type) for a in op._schema.arguments]
    if torch.Tag.nondeterministic_seeded in op.tags or any(k in ("List[Tensor]", "Device", "Generator") for k in kinds):
        return 0, []
    for dtype in (torch.float32, torch.int64, torch.bool):
        for _ in range(count):
            tensors = [torch.ones(1000, dtype=choose.choice(mixed) if i and mixed else dtype).as_strided(*form)
                       for i, form in enumerate(forms(choose, kinds.count("Tensor") or 1))]
            pool = list(tensors)
            args = [argument(a, pool, dtype) for a in op._schema.arguments if not a.kwarg_only]
            mode = FakeMode()
            try:
                wanted = pytree.tree_leaves(op(*args))
                with mode:
                    got = pytree.tree_leaves(op(*[mode.from_real(a) if isinstance(a, torch.Tensor) else a for a in args]))
            except (RuntimeError, IndexError, NotImplementedError, TypeError, Unsupported):
                continue
            compared += 1
            for x, y in zip(wanted, got):
                if isinstance(x, torch.Tensor) and x.stride() != y.stride():
                    differ.append(([(t.shape, t.stride(), t.dtype) for t in tensors], x.stride(), y.stride()))
        if compared:
            break
    return compared, differ


def operators_of_strides():
    """Elementwise operators, and those of which corrections say where their results lie; but those that consist of a few others."""
    composed = aten.mvlgamma.default, aten.linalg_vector_norm.default, aten.ldexp.Tensor, aten.native_dropout_backward.default, \
        aten.binary_cross_entropy_backward.default
    names = sorted({schema.name.removeprefix("aten::") for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("aten::")})
    packets = [getattr(aten, name) for name in names if not name.startswith("__") or name.endswith("shift__")]
    every = [getattr(packet, name) for packet in packets if hasattr(packet, "overloads") for name in packet.overloads()]
    return [op for op in every if (torch.Tag.pointwise in op.tags or op in FORMS or op in COPYING) and op not in composed
            and not op._schema.is_mutable and not any(a.is_out for a in op._schema.arguments)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mixed", [(), (torch.float64, torch.bfloat16, torch.int32)])
def test_strides_of_results_where_sizes_are_0_and_1(mixed, count=8):
    """The strides of such dims address nothing, and decide how later results lie and which views there are. To search
    longer: `python -c "from tests.ch01_graphs.test_layouts import *; test_strides_of_results_where_sizes_are_0_and_1((), 500)"`."""
    found, compared = {}, 0
    for op in operators_of_strides():
        number, differ = stride_differences(op, random.Random(str(op)), count, mixed)
        compared += number
        if differ:
            found[str(op)] = differ[0]
    assert not found and compared > 150 * count, (compared, found)


FORMATS = [torch.preserve_format, torch.contiguous_format, torch.channels_last]
COPIES = {"clone": lambda x, form: x.clone(memory_format=form), "to": lambda x, form: x.to(torch.float64, memory_format=form),
          "like": lambda x, form: torch.empty_like(x, memory_format=form),
          "copy": lambda x, form: x.to(x.dtype, copy=True, memory_format=form),
          "rot90": lambda x, form: torch.rot90(x, FORMATS.index(form), (1, 2)), "in place": lambda x, form: x.clone().add_(1).sub(x),
          "diag_embed": lambda x, form: torch.diag_embed(x, FORMATS.index(form)), "roll": lambda x, form: x.roll(FORMATS.index(form), 1),
          "empty shuffle": lambda x, form: torch.pixel_unshuffle(x[..., :1, :0].repeat(1, 1, 6, 1), 1 + FORMATS.index(form)),
          "masked_fill": lambda x, form: x.masked_fill(x > 0, 1.0), "where": lambda x, form: torch.where(x > 0, x, 1.0),
          "index_put": lambda x, form: x.index_put((torch.arange(0),), x[:0]), "renorm": lambda x, form: x.renorm(2, 0, 1.0),
          "slice_scatter": lambda x, form: x.expand(2, *x.shape).slice_scatter(x[None], 0, 0, 1),
          "diagonal_scatter": lambda x, form: x.diagonal_scatter(x.diagonal(FORMATS.index(form), 1, 2), FORMATS.index(form), 1, 2)}


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.float32, torch.bfloat16), (torch.int64, torch.float32)])
@pytest.mark.parametrize("op", [aten.where.self, aten.masked_fill.Tensor])
def test_a_condition_is_asked_as_it_is(op, dtypes):
    """And choices of two dtypes as they are copied."""
    choose = random.Random(0)
    for _ in range(200):
        condition, x, y = (torch.ones(1000, dtype=dtype).as_strided(*form) for form, dtype in zip(forms(choose, 3), (torch.bool, *dtypes)))
        check(op, *((condition, x, y) if op is aten.where.self else (x, condition, torch.tensor(1.0).to(x.dtype))))


@pytest.mark.parametrize("name", COPIES)
def test_strides_of_copies(name):
    choose, mode = random.Random(name), FakeMode()
    for memory_format, _ in itertools.product(FORMATS, range(25)):
        x = torch.ones(1000).as_strided(*form(choose, [choose.choice([0, 1, 1, 2, 3]) for _ in range(4)]))
        wanted = COPIES[name](x, memory_format)
        with mode:
            got = COPIES[name](mode.from_real(x), memory_format)
        assert (got.shape, got.stride()) == (wanted.shape, wanted.stride()), (x.shape, x.stride(), memory_format)


ALONG = """
x.sum(d, keepdim=True) | x.sum(d) | x.mean(d, keepdim=True) | x.var(d, keepdim=True) | x.std(d) | torch.var_mean(x, d, keepdim=True)
torch.std_mean(x, d, keepdim=True) | x.any(d, keepdim=True) | x.prod(d, keepdim=True) | x.amax(d, keepdim=True)
x.amin(d, keepdim=True) | torch.aminmax(x, dim=d, keepdim=True) | x.max(d, keepdim=True) | x.argmax(d, keepdim=True)
x.logsumexp(d, keepdim=True) | torch.linalg.vector_norm(x, 2, d, keepdim=True) | torch.linalg.vector_norm(x, 0, d, keepdim=True)
torch.linalg.vector_norm(x, 3, d) | x.nansum(d, keepdim=True) | x.median(d, keepdim=True) | x.mode(d, keepdim=True)
x.kthvalue(1, d, keepdim=True) | x.cumsum(d) | x.cummax(d) | x.logcumsumexp(d) | x.softmax(d) | x.sort(d) | x.topk(1, d) | x.diff(dim=d)
torch.cat([x, x], d) | torch.stack([x, x], d) | x.repeat_interleave(2, d) | x.roll(1) | x.roll(1, d) | x.flip(d)
F.interpolate(x, size=(3, 2), mode="bilinear") | F.interpolate(x, size=(3, 2)) | F.interpolate(x, size=(3, 2), mode="bicubic")
F.interpolate(x, size=(3, 2), mode="nearest-exact") | x[..., :1].mT[..., :1].matrix_exp()
F.binary_cross_entropy_with_logits(x, x, reduction="none") | F.binary_cross_entropy_with_logits(x.double(), x)
aten._scaled_dot_product_flash_attention_for_cpu(*[x.double().reshape(1, 1, 1, -1)] * 3) | F.group_norm(x, 1)
torch.nonzero_static(x, size=2) | F.max_pool2d(x, 1)
x.index_add(d, NONE, x.narrow(d, 0, 0)) | x.index_copy(d, NONE, x.narrow(d, 0, 0)) | x.slice_scatter(x.narrow(d, 0, 0), d, 0, 0)
x.view(-1) | x.unfold(d, 1, 1) | x.split(1, d) | x.reshape(-1) | x.flatten(0, d) | x.squeeze() | x.squeeze(d) | x.unsqueeze(d)
x.expand(2, *x.shape) | x.mT | x.narrow(d, 0, 1) | x[::2] | x.unflatten(d, (-1, 1)) | x.view(*x.shape, 1) | x.view(1, *x.shape)
F.scaled_dot_product_attention(some(x), y, y) | F.scaled_dot_product_attention(some(x), x, y, is_causal=True) | torch.mvlgamma(x, 2)
F.nll_loss(x, torch.zeros(x.sum(1).shape, dtype=torch.long), reduction="none") | F.unfold(x, (1, 2), 1, 1, 2) | torch.ldexp(x, y.long())
torch.ldexp(x[:1], y.long()) | torch.ldexp(x.long(), y) | torch.rand_like(x) | torch.randn_like(x) | torch.randint_like(x, 3)
F.prelu(x, torch.ones(())) | F.prelu(x, torch.ones(1)) | F.batch_norm(x, MANY[:x.shape[1]], MANY[:x.shape[1]])
F.batch_norm(x, MANY[:x.shape[1]], MANY[:x.shape[1]], training=True) | F.interpolate(x, scale_factor=2, mode="linear")
F.grid_sample(x, torch.zeros(x.shape[0], 2, 3, 2))
torch.native_batch_norm(x, None, None, MANY[:x.shape[1]], MANY[:x.shape[1]], False, 0.1, 1e-5)
aten.binary_cross_entropy_backward(x, y, y, None, 0) | aten._prelu_kernel_backward(x, y, torch.ones(()).expand(x.shape))
aten.native_layer_norm_backward(x, y, x.shape, x.sum(), x.sum(), y, y, [True] * 3) | aten._log_softmax_backward_data(x, y, d, x.dtype)
aten._softmax_backward_data(x, y, d, x.dtype) | aten.log_sigmoid_backward(x, y, x) | aten.hardtanh_backward(x, y, 0.0, 0.5)
aten.smooth_l1_loss_backward(x, y, x, 0, 1.0) | aten.mse_loss_backward(x, y, y, 0) | aten.huber_loss_backward(x, y, y, 0, 1.0)
aten.elu_backward(x, 1.0, 1.0, 1.0, False, y) | aten.mish_backward(x, y) | aten.hardswish_backward(x, y) | aten.hardsigmoid_backward(x, y)
aten.leaky_relu_backward(x, y, 0.1, False) | aten.softplus_backward(x, y, 1.0, 20.0)
aten.view_copy(x, (-1,)) | aten._reshape_copy(x, (-1,)) | aten.unfold_copy(x, d, 1, 1) | aten.expand_copy(x, (2, *x.shape)) | aten.t_copy(x)
aten.transpose_copy(x, 0, d) | aten.squeeze_copy(x, d) | aten.unsqueeze_copy(x, d) | aten.diagonal_copy(x, 0, 0, d)
aten.select_copy(x, d, 0)
aten.slice_copy(x, d, 0, 1) | aten.split_copy(x, 1, d) | aten.unbind_copy(x, d) | aten.alias_copy(x) | aten.detach_copy(x)
x.view(torch.int32) | x.view(torch.int16) | x.chunk(2, d) | x.tensor_split(2, d) | x.movedim(0, d) | x.diagonal(0, 0, d)"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("text", [text.strip() for line in ALONG.split("\n") for text in line.split("|") if text])
def test_reductions_and_views_where_sizes_are_0_and_1(text, count=60):
    if "slice_scatter" in text and torch.__version__.startswith("2.11"):
        pytest.skip("PyTorch 2.11 copies what overlaps row by row, later ones as it lies")
    choose, compared = random.Random(text), 0

    def some(x):                            # of no elements, attention ends the process on torch 2.11
        if x.numel() == 0:
            raise NotImplementedError
        return x
    call = eval(f"lambda x, y, d: {text}", {"some": some, "torch": torch, "F": torch.nn.functional, "aten": aten, "NONE": torch.arange(0),
                                            "MANY": torch.ones(9)})

    def tried(*args):
        try:
            return call(*args)
        except (RuntimeError, IndexError, ValueError, NotImplementedError, Unsupported) as error:
            return error
    for _ in range(count):
        shape = [choose.choice([0, 1, 1, 2, 3]) for _ in range(choose.choice([1, 2, 3, 4, 4]))]
        x, y = (torch.ones(1000).as_strided(*form(choose, shape)) for _ in range(2))
        d, mode = choose.randrange(x.dim()), FakeMode()
        wanted = tried(x, y, d)
        with mode:
            got = tried(mode.from_real(x), mode.from_real(y), d)
        if isinstance(got, Unsupported):
            continue
        assert isinstance(wanted, Exception) == isinstance(got, Exception), (x.shape, x.stride(), d, wanted, got)
        if isinstance(wanted, Exception):
            continue
        compared += 1
        for a, b in zip(wanted, got, strict=True) if isinstance(wanted, (tuple, list)) else [(wanted, got)]:
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype), (x.shape, x.stride(), d)
    assert compared


def test_index():
    for order in itertools.permutations(range(3)):
        x, i = strided((3, 4, 6), order), torch.zeros(5, 2, dtype=torch.long)
        for index in (i, i.t().contiguous().t(), i[:, 0]):
            for places in ([index], [None, index], [index, index], [None, index, index], [index, None, index]):
                check(aten.index.Tensor, x, places)
    check(aten.index.Tensor, torch.ones(33, 17).diagonal(), [torch.zeros(17, 33, dtype=torch.long).t()])


def test_index_where_sizes_are_1():
    choose = random.Random(0)
    for _ in range(1500):
        x = torch.ones(1000).as_strided(*form(choose, [choose.choice([1, 1, 2, 3]) for _ in range(choose.randint(1, 4))]))
        index = [torch.zeros(1000, dtype=torch.long).as_strided(*f) for f in forms(choose, 2) if 0 not in f[0]]
        places = [choose.choice([None, *index]) for _ in range(choose.randint(1, x.dim()))]
        if any(i is not None for i in places):
            check(aten.index.Tensor, x, places)


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


def test_pools_of_one_sample_answer_channels_last_or_refuse():
    def outcome(x):
        try:
            return [t.stride() for t in torch.nn.functional.max_pool3d(x, 1, return_indices=True)]
        except RuntimeError:
            return "refused"
    seen = []
    for shape in ((3, 4, 2, 5), (3, 4, 1, 2), (1, 4, 3, 2), (3, 1, 1, 1)):
        for order in itertools.permutations(range(4)):
            for x in (strided(shape, order), strided([2 * n for n in shape], order)[tuple(slice(n) for n in shape)]):
                seen.append(outcome(x))
                assert outcome(FakeMode().from_real(x)) == seen[-1]
    assert "refused" in seen and any(s != "refused" and s[0][0] == 1 for s in seen)


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


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "cpp"])
def test_a_pooling_along_one_dim_lies_row_by_row(backend):
    """Where a gradient is wanted it is a pooling over two dims, and else a kernel of its own."""
    for shape in ((1, 2, 3), (2, 2, 3), (2, 3)):
        for x in (torch.randn(*shape[:-2], shape[-1], shape[-2]).mT, torch.randn(shape)):
            for size, needed in itertools.product((1, 2, 3), (False, True)):
                x = x.detach().requires_grad_(needed)
                got = minicompile.compile(torch.nn.functional.max_pool1d, backend=backend)(x, size, 2)
                want = torch.nn.functional.max_pool1d(x, size, 2)
                assert got.stride() == want.stride() and got.equal(want), (x.shape, x.stride(), size, needed)


@pytest.mark.parametrize("backend", ["aot_eager", "cpp"])
def test_a_product_with_an_empty_vector_has_the_size_of_what_is_added(backend):
    for shape in ((), (1,), (3,)):
        x = torch.ones(shape)
        assert minicompile.compile(torch.addmv, backend=backend)(x, torch.ones(3, 0), torch.ones(0)).shape == x.shape


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "decomposed", "loops", "cpp"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_copied_view_need_not_be_a_view(backend, dynamic):
    for op in (aten.view_copy.default, aten._reshape_copy.default):
        compiled = minicompile.compile(lambda x, op=op: op(x.sin().mT, (-1,)) * 2, backend=backend, dynamic=dynamic)
        for x in (torch.randn(2, 3), torch.randn(4, 5, 3), torch.randn(2, 3).mT):
            torch.testing.assert_close(compiled(x), op(x.sin().mT, (-1,)) * 2)
