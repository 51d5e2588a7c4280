"""Generated kernels on a real GPU against eager: every kernel form, awkward shapes, special values."""
import itertools

import pytest
import torch
import torch.nn.functional as F

import minicompile
from minicompile.ch01_graphs.fake import FakeMode
from minicompile.ch01_graphs.trace import trace
from minicompile.ch06_decompositions.decompose import decompose
from minicompile.ch07_loops.lower import lower
from minicompile.ch07_loops.rules.random import eager_layout
from minicompile.ch08_fusion.fuse import fuse
from minicompile.ch08_fusion.groups import FusionOptions
from minicompile.ch11_runtime.host import compile_schedule

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
BF16, F32 = torch.bfloat16, torch.float32


def compiled(fn, *inputs):
    """`fn` through trace, decompose, lower, fuse and Triton, without capture or autograd."""
    def flat(*args):
        out = fn(*args)
        return list(out) if isinstance(out, (tuple, list)) else [out]
    mode = FakeMode()
    program = compile_schedule(fuse(lower(decompose(trace(flat, [mode.from_real(t) for t in inputs]))), FusionOptions()), "triton")
    return lambda *args: program(list(args))


def check(fn, *inputs, rtol=None, atol=None, exact=None):
    """Compare with eager; `exact` computes the reference instead of `fn` (in higher precision)."""
    want = (exact or fn)(*inputs)
    want = list(want) if isinstance(want, (tuple, list)) else [want]
    run = compiled(fn, *inputs)
    for _ in range(2):
        got = run(*inputs)
        for g, w in zip(got, want):
            torch.testing.assert_close(g, w.to(g.dtype), rtol=rtol, atol=atol, equal_nan=True)


def r(*shape, dtype=F32):
    return torch.randn(*shape, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16, torch.float64])
@pytest.mark.parametrize("n", [1, 31, 1024, 100003])
def test_pointwise(n, dtype):
    check(lambda x, y: torch.tanh(x) * y + torch.erf(x) - 0.5, r(n, dtype=dtype), r(n, dtype=dtype), rtol=2e-2 if dtype in (BF16,
        torch.float16) else 1e-5,
          atol=2e-2 if dtype in (BF16, torch.float16) else 1e-5)


@pytest.mark.parametrize("rows", range(1, 9))
@pytest.mark.parametrize("n", range(2, 12))
def test_a_sum_and_a_transposed_read_in_one_kernel(rows, n):
    """Indices of so few elements have 16 bits, and are added in pairs."""
    check(lambda x: x.sum() / x.numel() + x.mT / 0.1, r(rows, n, n), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(30, 24), (3, 5000), (5000, 3), (64, 2048)])
def test_extremes_of_negated_integers(shape, dtype):
    """`ptxas` forgets a minus in a maximum of three."""
    x = torch.randint(-90, 100, shape, device="cuda").to(dtype)
    for extreme in (torch.amax, torch.amin):
        for dim in (0, 1, (0, 1)):
            check(lambda x: extreme(-x, dim), x)
    check(lambda x: (-x).argmax(1), x)
    check(lambda x: torch.where(x > 2, -x, x).argmin(0), x)
    check(lambda x: torch.fmod(-7 // (x.abs() + 1), -5).argmax(), x)
    for extreme in (torch.maximum, torch.minimum):
        for signs in itertools.product((1, -1), repeat=3):
            check(lambda x: extreme(extreme(signs[0] * x, signs[1] * x.flip(0)), signs[2] * x.flip(1)), x)


def test_the_smallest_integers_are_their_own_negatives():
    """Also where they are made wider."""
    for dtype, wide in (torch.int8, torch.int16), (torch.int16, torch.int32), (torch.int32, torch.int64):
        x = torch.full((300,), torch.iinfo(dtype).min, dtype=dtype, device="cuda")
        for change in (torch.neg, torch.abs, lambda x: torch.where(x < 0, -x, x)):
            check(lambda x: (change(x).to(wide), change(x) < 0, change(x).float(), change(x).to(wide) * 3), x)


def test_functions_of_the_library_keep_subnormal_numbers():
    x = torch.tensor([1e-45, -1e-45, 1e-39, -3e-42, 0.0], device="cuda")
    check(lambda x: (x // -0.7, torch.remainder(x, 0.7), torch.fmod(x, 0.7), torch.hypot(x, x), torch.expm1(x)), x, rtol=0, atol=0)


UNARY = ["exp", "expm1", "log1p", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asinh", "atan", "erf", "erfc", "lgamma", "digamma",
         "sigmoid",
         "floor", "ceil", "trunc", "round", "sign", "sqrt", "rsqrt", "log", "reciprocal", "signbit"]


@pytest.mark.parametrize("dtype", [F32, torch.bool])
@pytest.mark.parametrize("op", UNARY)
def test_unary_of_one_element_in_a_kernel_with_rows(op, dtype):
    """What is loaded once is a scalar, and so is all that is computed from it until it is stored."""
    if dtype is torch.bool and op in ("floor", "ceil", "trunc", "round"):
        return
    x = (r(1, 1).abs() + 1).to(dtype)
    check(lambda x, y: (getattr(torch, op)(x), (getattr(torch, op)(x) * y).sum(-1, keepdim=True)), x, r(1, 70), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op", UNARY)
def test_unary_special_values(op):
    x = torch.cat([r(1000) * 5, torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, 2.5, float("inf"), -float("inf"), float("nan"), 1e-30, 3e38,
                                              -1e30], device="cuda")])
    check(getattr(torch, op), x, rtol=2e-4 if op == "digamma" else 2e-5, atol=2e-4 if op == "digamma" else 1e-6)


@pytest.mark.parametrize("fn", [torch.floor_divide, torch.remainder, torch.fmod, torch.pow, torch.maximum, torch.minimum, torch.atan2,
                                torch.true_divide,
                                torch.hypot, torch.copysign, torch.nextafter], ids=lambda f: f.__name__)
def test_binary_float(fn):
    a, b = r(5000) * 4, (r(5000) * 3).round()
    a[:3] = torch.tensor([float("nan"), 0.0, 6.0])
    b[:3] = torch.tensor([1.0, -3.0, 3.0])
    check(fn, a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_integers(dtype):
    a, b = torch.randint(-40, 40, (999,), device="cuda").to(dtype), torch.randint(1, 9, (999,), device="cuda").to(dtype)
    if dtype == torch.bool:
        return check(lambda a, b: (a & b, a | b, a ^ b, ~a, a.float() + b, a.sum(), a.any(), b.all()), a, b)
    check(lambda a, b: (a // b, a % b, a + b, a * b, a & b, torch.fmod(a, b), a.sum(), torch.div(a, b, rounding_mode="trunc"), a.amax()), a,
          b)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_shifts_by_all_bits(dtype):
    bits = torch.iinfo(dtype).bits
    a = torch.tensor([torch.iinfo(dtype).min, torch.iinfo(dtype).max, 5, 1], device="cuda").to(dtype)[:, None]
    s = torch.tensor([0, 1, bits - 2, bits - 1, bits, bits + 1, -1], device="cuda").to(dtype)
    check(lambda a, s: (a << s, a >> s, torch.bitwise_right_shift(a, bits), torch.bitwise_left_shift(a, bits)), a, s)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool])
@pytest.mark.parametrize("source", [F32, torch.float64, torch.float16])
def test_casts_of_what_does_not_fit(source, dtype):
    """Undefined in C++ and Python alike; the answer is eager's on this GPU."""
    numbers = [0.0, -0.0, 1.9, -1.9, 300.0, -300.0, 40000.0, 3e9, -3e9, 1e30, -1e30, float("inf"), -float("inf"), float("nan")]
    x = torch.tensor(numbers, device="cuda").repeat(20).to(source)
    run = compiled(lambda x: (x * 1).to(dtype), x)
    assert run(x)[0].tolist() == x.to(dtype).tolist()


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_floats_that_vary(mode):
    import minicompile
    from minicompile import driver
    minicompile.reset()
    before = driver.counters.graphs

    def f(x, w, s):
        return (x * s + w / (s + 2)).tanh().sum(-1) * s
    run = minicompile.compile(f, mode=mode)
    for s in (0.5, 0.25, 0.125, -3.75, 1e-3, 7.5, 0.1):
        x, w = r(64, 33).requires_grad_(), r(64, 33)
        got, want = run(x, w, s), f(x, w, s)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        for a, b in zip(torch.autograd.grad(got.sum(), x), torch.autograd.grad(want.sum(), x)):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * max(1, s * s))           # s^2 times 1 - tanh^2, whose error is tanh's
    assert driver.counters.graphs - before <= 2
    minicompile.reset()


@pytest.mark.parametrize("shape", [(96, 200), (1000, 1000), (33, 65)])
def test_transposes(shape):
    x, y = r(*shape), r(*reversed(shape))
    check(lambda x, y: x.t() + y, x, y)
    check(lambda x, y: (x.t() * 2).contiguous(), x, y)


def test_layout_changes():
    x = r(4, 64, 28, 28, dtype=BF16)
    check(lambda x: (x * 2).contiguous(memory_format=torch.channels_last), x)
    check(lambda x: (x * 2).contiguous(), x.to(memory_format=torch.channels_last))
    check(lambda x, w: F.relu(x * w.view(1, -1, 1, 1) + 1), x.to(memory_format=torch.channels_last), r(64, dtype=BF16), rtol=2e-2,
          atol=2e-2)


SHAPES = [(1, 7), (5, 64), (1000, 33), (3, 1000), (4096, 384), (512, 768), (7, 5000), (16, 50304), (1, 1 << 20)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_row_reductions(shape):
    x = r(*shape)
    check(lambda x: (x.sum(1), x.amax(1), x.amin(1), x.mean(1)), x, rtol=1e-4, atol=1e-3)
    check(lambda x: torch.var_mean(x, 1, correction=0), x * 3 + 100, rtol=1e-3, atol=1e-3,
          exact=lambda x: [t.float() for t in torch.var_mean(x.double(), 1, correction=0)])
    check(lambda x: x.argmax(1), x)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_column_reductions(shape):
    x = r(*reversed(shape), dtype=BF16)
    check(lambda x: x.float().sum(0), x, rtol=1e-4, atol=1e-2)
    check(lambda x: torch.var_mean(x.float(), 0), x, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("columns", [10, 64, 1000, 1024, 4097, 50304])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_softmax(columns, dtype):
    x = r(65, columns, dtype=dtype) * 3
    x[1, ::2] = -float("inf")
    x[2] = -float("inf")
    x[3, 4] = float("nan")
    tolerance = dict(rtol=2e-2, atol=1e-3) if dtype == BF16 else dict(rtol=1e-5, atol=1e-7)
    check(lambda x: F.softmax(x, -1), x, **tolerance)
    check(lambda x: F.log_softmax(x.float(), -1), x, rtol=1e-5, atol=1e-4)
    check(lambda x: x.float().logsumexp(-1), x[:2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("columns", [16, 384, 768, 1600, 12000])
def test_layer_norm(columns):
    x, w, b = r(300, columns, dtype=BF16), r(columns, dtype=BF16), r(columns, dtype=BF16)
    check(lambda x, w, b: F.layer_norm(x, (columns,), w, b), x, w, b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("size", [(64, 256, 384), (12, 1024, 768), (8192, 5), (65536, 33), (16384, 2048), (16384, 2049), (100, 40)])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_layer_norm_backward(size, dtype):
    """The large ones in one kernel, but for the last step of the column sums."""
    x, weight = r(*size), r(size[-1])
    _, mean, rstd = torch.native_layer_norm(x, size[-1:], weight, weight, 1e-5)

    def gradients(g, x, mean, rstd, weight, residual):
        dx, dw, db = torch.ops.aten.native_layer_norm_backward(g.float(), x, size[-1:], mean, rstd, weight, weight, [True] * 3)
        return dx + residual, dw, db
    check(gradients, r(*size, dtype=dtype), x, mean, rstd, weight, r(*size), rtol=2e-3, atol=2e-2)


def test_extremes_take_the_first_index_and_nan():
    x = torch.randint(0, 3, (200, 3000), device="cuda").float()
    x[5, 100] = x[5, 7] = float("nan")
    x[6] = -float("inf")
    first = lambda x: (x.isnan() | (x == x.nan_to_num(-9).amax(1, keepdim=True)) & ~x.isnan().any(1, keepdim=True)).int()
    index = compiled(lambda x: x.argmax(1), x)(x)[0]
    mask = first(x)
    mask[6] = 1
    want = torch.where(mask == 1, torch.arange(3000, device="cuda"), 3000).amin(1)
    assert torch.equal(index, want)
    check(lambda x: (x.amax(1), x.amin(1)), x)


def test_gather_scatter_embedding():
    table, index = r(50, 128), torch.randint(0, 50, (300,), device="cuda")
    check(lambda t, i: F.embedding(i, t) * 2, table, index)
    check(lambda t, i: t[i].sum(0), table, index, rtol=1e-4, atol=1e-3)
    check(lambda t, i: torch.zeros(50, 128, device="cuda").index_add(0, i, t[i]), table, index, rtol=1e-4, atol=1e-4)
    check(lambda t, i: torch.zeros(50, 128, device="cuda", dtype=BF16).index_add(0, i, t[i].to(BF16)), table, index, rtol=5e-2, atol=1e-1)


@pytest.mark.parametrize("here, there", [("cuda", "cpu"), ("cpu", "cuda")])
def test_numbers_and_positions_of_another_device(here, there):
    def put(x, i, v):
        x = x * 2
        x[i] = v.to(x.dtype)
        return x.index_fill(0, i.to(x.device) + 1, v.to(x.dtype)).index_put([i], v.to(x.dtype), accumulate=True)

    for dtype in (torch.float32, torch.int64):
        x, i, v = torch.arange(24, dtype=dtype, device=here).view(8, 3), torch.tensor([0, 3], device=there), torch.tensor(7, device=there)
        assert torch.equal(minicompile.compile(put, fullgraph=True)(x, i, v), put(x, i, v))


def test_rows_that_go_to_one_place_are_added_up_in_the_tile():
    index = torch.randint(0, 50, (16384,), device="cuda")
    index[3000:] = 7
    for table in (r(50, 128), r(50, 192) * 1e30):
        got, = compiled(lambda t, i: torch.zeros_like(t).index_add(0, i, t[i].cos() + t[i]), table, index)(table, index)
        rows = (table.cos() + table)[index].double()
        want, amount = (torch.zeros(table.shape, device="cuda", dtype=torch.float64).index_add(0, index, x) for x in (rows, rows.abs()))
        assert bool(((got - want).abs() <= 1e-5 * amount).all())


def test_misaligned_views_use_narrower_loads():
    base = r(4097)
    run = compiled(lambda x: x * 2, base[:4096])
    for start in (0, 1, 0):
        x = base[start:start + 4096]
        torch.testing.assert_close(run(x)[0], x * 2)


def test_current_stream_is_used():
    x = r(1 << 22)
    run = compiled(lambda x: x.sin(), x)
    run(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        y = run(x)[0]
        event = stream.record_event()
    assert not event.query()
    event.synchronize()
    torch.testing.assert_close(y, x.sin())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z = run(x)[0]
    x.add_(1)
    graph.replay()
    torch.testing.assert_close(z, x.sin())


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fused_dropout_draws_eagers_numbers_in_eagers_order(mode, dtype):
    """With an operator between that draws by itself, and a seed that needs all 64 bits; the generator is then where eager leaves it."""
    def net(x, q):
        a = F.dropout(x * 1, 0.2)
        s = F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
        return a, s, F.dropout(x + 1, 0.5), F.dropout(x + 2, 0.3), torch.rand(5, device="cuda")

    torch.cuda.init()
    compiled, generator = minicompile.compile(net, mode=mode, fullgraph=True), torch.cuda.default_generators[0]
    x, q = torch.ones(64, 128, 384, device="cuda", dtype=dtype), torch.randn(2, 2, 64, 64, device="cuda", dtype=torch.bfloat16)
    for seed in (1, 2**63 + 5, 3, 4):
        runs = []
        for f in (net, compiled):
            torch.manual_seed(seed)
            torch.rand(3, device="cuda")
            runs.append(([o.clone() for o in f(x, q)], generator.get_offset()))
        (want, place), (got, same) = runs
        assert place == same and all(torch.equal(g, w) for g, w in zip(got, want))
    assert eager_layout(dtype, x.device) is not None, "no fused dropout on this machine"


def test_what_cancels_in_eager_cancels():
    """With one rounding for a product and a sum, these would be the rounding errors of the products."""
    check(lambda x, y: x * y - y * x, r(1000), r(1000), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [F32, BF16, torch.float64])
def test_a_bound_that_is_nan(dtype):
    nan = float("nan")
    check(lambda x: (x.clamp(max=nan), x.clamp(min=nan), x.clamp(0, nan), torch.clamp_max(x, nan), torch.clamp_min(x, nan)),
          r(9, dtype=dtype))


@pytest.mark.parametrize("source", [BF16, torch.float16, F32])
@pytest.mark.parametrize("target", [BF16, torch.float16, F32])
def test_truth_values_keep_their_signs_as_floats(source, target):
    x = torch.randn(1 << 16, device="cuda").to(source)
    check(lambda x: [torch.sign(x).to(target), torch.where(x < 0, -1, 0).to(target), ((x < 0).int() - 1).to(target),
                     (-(x < 0).long()).to(target), torch.where(x < 0, -2 ** 31, 7).to(target)], x, rtol=0, atol=0)
    leaf = x.clone().requires_grad_()
    loss = minicompile.compile(lambda leaf: (leaf[::2] * 1.5).abs().to(target).sum())(leaf)
    assert torch.equal(torch.autograd.grad(loss, leaf)[0][::2], (x[::2].sign() * 1.5).to(source))


def test_what_is_discrete_is_eagers():
    """Floor division, and the remainder of the smallest integer, which is its own `abs`."""
    generator = torch.Generator("cuda").manual_seed(0)
    x, y = (torch.randn(1 << 16, device="cuda", generator=generator) * 10.0 ** k for k in (4, -3))
    for dtype in (F32, torch.float64):
        a, b = x.to(dtype), y.to(dtype)
        for f in (lambda a, b: a // b, lambda a, b: a // 0.0123, lambda a, b: 12345.678 // b, lambda a, b: a % b):
            assert torch.equal(compiled(f, a, b)(a, b)[0], f(a, b))
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        info = torch.iinfo(dtype)
        a = torch.tensor([info.min, info.min + 1, info.max, -1, 5], dtype=dtype, device="cuda")
        for f in (lambda a: a.abs() % 9, lambda a: a.abs() // 7, lambda a: a.abs() < 0, lambda a: a.abs().double(),
                  lambda a: a.abs().long()):
            assert torch.equal(compiled(f, a)(a)[0], f(a)), dtype


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32])
def test_of_two_minima_one_stays_negative(dtype):
    a, b, c, d = (torch.randint(-100, 100, (1000,), device="cuda").to(dtype) for _ in range(4))
    for f in (lambda a, b, c, d: (torch.minimum(a, b).relu(), torch.minimum(c, d)),
              lambda a, b, c, d: (torch.maximum(a, b).relu(), torch.maximum(c, d)),
              lambda a, b, c, d: torch.minimum(torch.minimum(a, b).relu(), torch.minimum(torch.minimum(c, d), c + b) // -3)):
        want, got = f(a, b, c, d), minicompile.compile(f)(a, b, c, d)
        for x, y in zip(want, got):
            assert torch.equal(x, y)


def test_a_nan_compares_as_in_eager():
    x = torch.tensor([float("nan"), 1.0, -2.0, 0.0, float("inf")], device="cuda")
    for f in (lambda x: x.abs() >= 0, lambda x: x * x >= 0, lambda x: x.exp() > -1, lambda x: x.square() + 1 >= 1, lambda x: 0 <= x.abs(),
              lambda x: torch.where(x * x >= 0, x, 7.0), lambda x: (x.abs() >= 0).sum()):
        for dtype in (F32, BF16, torch.float16, torch.float64):
            expected, found = f(x.to(dtype)), compiled(f, x.to(dtype))(x.to(dtype))[0]
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_the_mean_loss_of_an_ignored_sample_without_a_batch():
    x = torch.linspace(0, 1, 7, device="cuda", requires_grad=True)
    for target in (-1, 2):
        found = []
        for f in (F.cross_entropy, minicompile.compile(F.cross_entropy)):
            loss = f(x, torch.tensor(target, device="cuda"), ignore_index=-1)
            found.append((loss, *torch.autograd.grad(loss, x)))
        torch.testing.assert_close(*found)
