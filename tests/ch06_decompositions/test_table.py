"""Decompositions that the sample database does not reach, special values, and the driver."""
import itertools
import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import minicompile
from minicompile import logs
from minicompile.ch01_graphs.fake import FakeMode, storage_key
from minicompile.ch01_graphs.graph import Location, interpret
from minicompile.ch01_graphs.trace import trace
from minicompile.ch06_decompositions import PRIMITIVES, TABLE, Decomposed, decompose, is_primitive, violations
from minicompile.ch06_decompositions.table import ABSENT

aten = torch.ops.aten


def fallbacks(gm) -> dict:
    """Operator -> number of calls, for calls that are not primitives."""
    targets = [node.target for node in gm.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return {op: targets.count(op) for op in targets if not is_primitive(op)}


def check(fn, *args, rtol=1e-5, atol=1e-6):
    """fn gives the same with the table as without; returns the mode."""
    torch.manual_seed(0)
    want = fn(*args)
    torch.manual_seed(0)
    with Decomposed() as mode:
        got = fn(*args)
    compare(got, want, rtol, atol)
    return mode


def compare(got, want, rtol=1e-5, atol=1e-6):
    if want is None or isinstance(want, torch.Tensor):
        assert (got is None) == (want is None)
        if want is not None:
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True)
        return
    assert len(got) == len(want)
    for g, w in zip(got, want):
        compare(g, w, rtol, atol)


# ---- special values

SPECIAL = [-math.inf, -1e30, -100.0, -3.0, -1.0, -0.5, -1e-30, -0.0, 0.0, 1e-30, 0.5,
           1.0, 3.0, 6.0, 20.0, 100.0, 1e30, math.inf, math.nan]
UNARY = """
relu leaky_relu gelu silu mish elu celu softplus logsigmoid hardtanh hardsigmoid hardswish hardshrink
softshrink tanhshrink selu relu6 softsign""".split()


@pytest.mark.parametrize("name", UNARY)
def test_activation_on_special_values(name):
    # Eager on CPU answers gelu(inf) = NaN; elsewhere it is inf.
    special = SPECIAL if name != "gelu" else [v for v in SPECIAL if v != math.inf]
    x = torch.tensor(special, requires_grad=True)

    def fn(x):
        y = getattr(F, name)(x)
        return y, torch.autograd.grad(y.sum(), x)[0]

    check(fn, x)


@pytest.mark.parametrize("slope", [math.inf, -math.inf, -1.0])
def test_the_corner_of_an_elu_whose_lower_piece_is_infinite_or_falls(slope):
    x = torch.tensor([-0.0, 0.0, 1.0, -1.0, math.nan])
    check(lambda x: (y := F.elu(x, slope), y.signbit()), x)
    check(lambda x: F.celu(x, slope), x)


@pytest.mark.parametrize("name", "sgn frac nan_to_num isinf isnan isposinf isneginf isfinite sinc "
                                 "special.entr logit deg2rad square rad2deg".split())
def test_unary_on_special_values(name):
    fn = torch.special.entr if name == "special.entr" else getattr(torch, name)
    check(fn, torch.tensor(SPECIAL), rtol=1e-4)


@pytest.mark.parametrize("name", "clamp_min fmax fmin maximum logaddexp logaddexp2 xlogy copysign heaviside "
                                 "remainder fmod floor_divide".split())
def test_binary_on_special_values(name):
    x = torch.tensor(SPECIAL)
    a, b = (t.reshape(-1) for t in torch.broadcast_tensors(x[:, None], x))
    check(getattr(torch, name), a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("whole", [torch.int64, torch.int16])
def test_ldexp_whose_power_of_two_its_dtype_does_not_have(dtype, whole):
    tiny = torch.finfo(dtype).tiny
    x = torch.tensor([*SPECIAL, 1.7, tiny, tiny * 1.3, tiny / 4, 5e-324, 1e-310, 1e300], dtype=torch.float64).to(dtype)
    exponents = [0, 1, -1, 126, 128, 140, -126, -140, -149, 200, -200, 1023, 1024, -1023, -1074, 2098, -2098]
    wide = [2**31 - 1, 2**31, 2**32 + 3, -2**31 - 1, 42561581212] if whole is torch.int64 else []
    check(torch.ldexp, x[:, None].repeat(1, len(exponents + wide)), torch.tensor(exponents + wide, dtype=whole), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.bool, torch.float16, torch.float64])
@pytest.mark.parametrize("other", [torch.int64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_promotion(dtype, other, shape):
    a, b = torch.ones(3, dtype=dtype), torch.full(shape, 2, dtype=other)
    for fn in (torch.add, torch.mul, torch.div, torch.maximum, torch.eq, torch.lt, torch.pow, torch.atan2,
               torch.remainder, lambda x, y: torch.where(x > 0, x, y),
               lambda x, y: torch.clamp(x, min=y), torch.logical_and,
               lambda x, y: torch.add(x, 3), lambda x, y: x * 2.5, lambda x, y: x / 2,
               lambda x, y: torch.cat([x, y.reshape(-1)])):
        try:
            fn(a, b)
        except RuntimeError:
            continue
        check(fn, a, b)


FLOATING = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("name", ["addcmul", "addcdiv", "xlogy", "special.xlog1py", "ldexp", "lerp", "hypot", "atan2", "logaddexp",
                                  "copysign", "fmod"])
def test_operands_of_several_dtypes_are_converted_before_anything_is_computed(name):
    fn = getattr(torch.special if "." in name else torch, name.split(".")[-1])
    count = 3 if name in ("addcmul", "addcdiv", "lerp") else 2
    accepted = 0
    for dtypes in itertools.product(FLOATING, repeat=count):
        for shapes in itertools.product([(), (40,)], repeat=count):
            args = [torch.rand(shape, generator=torch.Generator().manual_seed(i)).add(0.1).to(dtype)
                    for i, (shape, dtype) in enumerate(zip(shapes, dtypes))]
            try:
                wanted = fn(*args).dtype
            except RuntimeError:
                continue
            accepted += 1
            check(fn, *args, rtol=4 * torch.finfo(wanted).eps, atol=torch.finfo(wanted).eps)
    assert accepted >= 10


@pytest.mark.parametrize("mode", ["trunc", "floor"])
@pytest.mark.parametrize("dtype", FLOATING[1:])
def test_rounded_quotients(dtype, mode):
    """A number is not rounded to half precision before it divides, nor is a tensor of one element on a CPU; a quotient of
    two others is rounded before it is truncated."""
    x = torch.cat([torch.linspace(-4, 4, 3000), torch.tensor([0.7, -0.7, 0.3])]).to(dtype).unique()
    for divisor in (0.7, 0.3, -1.7, torch.tensor(0.7), torch.tensor(0.3, dtype=torch.float64), x.roll(77), x[:3].sum(), x[5:6]):
        check(lambda x: torch.div(x, divisor, rounding_mode=mode), x, rtol=0, atol=0)
    for limit in (0.7, 0.3, -1.7):
        check(lambda x: F.threshold(x, limit, 20), x, rtol=0, atol=0)


def test_softmax_of_masked_rows_and_extremes():
    x = torch.tensor([[-math.inf, -math.inf], [1e4, -1e4], [math.inf, 0.0], [math.nan, 0.0]])
    for fn in (torch.softmax, torch.log_softmax, torch._safe_softmax, torch.logsumexp):
        check(fn, x, 1)


@pytest.mark.parametrize("fn", [lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
                                lambda x: F.interpolate(x, scale_factor=2), lambda x: F.interpolate(x, 7, mode="nearest-exact")])
def test_what_a_rule_looks_up_goes_if_nobody_reads_it(fn, monkeypatch):
    """`x[i]` raises for some `i`, and stays. A padding does not raise, whatever its rule makes of it."""
    def f(x, i):
        x[i]
        return torch.autograd.grad(fn(x).sum(), x)[0] * 2
    x, graphs = torch.randn(2, 3, 4, 4, requires_grad=True), []

    def listen(kind, **data):
        if kind == "stage" and data["name"] == "forward":
            graphs.append([n.target for n in data["gm"].graph.nodes])
    monkeypatch.setattr(logs, "watchers", [listen])
    result = minicompile.compile(f, backend="decomposed")(x, torch.tensor([1]))
    torch.testing.assert_close(result, f(x, torch.tensor([1])))
    assert [targets.count(aten.index.Tensor) for targets in graphs] == [1]


def test_softmax_of_no_integers():
    """Softmax has no kernel for integers and bools, and nobody notices where there are none."""
    for dtype in (torch.bool, torch.int64):
        check(lambda x: aten._softmax(x, 0, False), torch.ones(4, 0, dtype=dtype))


def test_empty_and_zero_dim_tensors():
    empty, scalar = torch.empty(0, 3), torch.tensor(2.0)
    for fn in (torch.sum, torch.mean, F.gelu, F.relu, torch.count_nonzero, lambda x: torch.softmax(x, -1),
               torch.prod, lambda x: torch.sum(x, -1), torch.any, torch.all,
               lambda x: torch.amax(x, -1) if x.dim() else x):
        check(fn, empty)
        check(fn, scalar)
    check(lambda x: torch.max(x, 0), scalar)
    check(torch.argmax, scalar)


def test_a_bound_that_is_no_number():
    x, nan = torch.tensor([-1.0, 2.0, math.nan]), math.nan

    def clamped():
        return [torch.clamp(x, max=nan), torch.clamp(x, nan), torch.clamp(x, nan, 1.0), torch.clamp(x, 0.0, nan),
                torch.clamp_max(x, nan), torch.clamp_min(x, nan)]
    with Decomposed():
        found = clamped()
    compare(found, clamped(), rtol=0, atol=0)


@pytest.mark.parametrize("ord", [0, 1, 2, 3, 0.5, -1, math.inf])
def test_a_norm_of_one_number_is_the_number(ord):
    """Whose square may overflow, or be nothing."""
    x = torch.tensor([[1e32], [-1e-30], [0.0], [-math.inf], [math.nan]])
    def norms():
        return [torch.linalg.vector_norm(x, ord, 1), torch.linalg.vector_norm(x[0], ord, keepdim=True),
                torch.linalg.vector_norm(x[1, 0], ord)]
    with Decomposed():
        found = norms()
    compare(found, norms(), rtol=0, atol=0)


# ---- normalization

@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype,stats", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5), (2, 3, 4, 4)])
def test_batch_norm(training, dtype, stats, shape):
    x, w, b = torch.randn(shape, dtype=dtype), torch.rand(3, dtype=stats), torch.randn(3, dtype=stats)
    mean, var = torch.randn(3, dtype=stats), torch.rand(3, dtype=stats) + 0.5
    grad = torch.randn(shape, dtype=dtype)
    want_mean, want_var = mean.clone(), var.clone()
    want = aten.native_batch_norm(x, w, b, want_mean, want_var, training, 0.1, 1e-5)
    with Decomposed():
        got = aten._native_batch_norm_legit_functional(x, w, b, mean, var, training, 0.1, 1e-5)
    tolerance = dict(rtol=2e-5, atol=2e-6) if dtype is torch.float32 else dict(rtol=2 ** -7, atol=1e-3)
    compare(got[:3], want, **tolerance)
    compare(got[3:], [want_mean, want_var], **tolerance)
    mask = [True] * 3
    check(lambda: aten.native_batch_norm_backward(grad, x, w, mean, var, *want[1:], training, 1e-5, mask),
          rtol=tolerance["rtol"], atol=10 * tolerance["atol"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("running", [torch.float32, None])
def test_saved_statistics_of_halves_have_the_dtype_of_running_ones(dtype, running):
    x = torch.randn(8, 4, 3, 3, dtype=dtype)
    statistics = lambda: (torch.zeros(4, dtype=running or dtype), torch.ones(4, dtype=running or dtype))
    want = aten.native_batch_norm(x, None, None, *statistics(), True, 0.1, 1e-5)
    with Decomposed():
        got = aten._native_batch_norm_legit_functional(x, None, None, *statistics(), True, 0.1, 1e-5)
    compare(got[1:3], want[1:], rtol=2e-6 if running else 2 ** -7, atol=1e-7)


def test_fused_rms_norm():
    x, w, grad = torch.randn(4, 6, requires_grad=True), torch.rand(6, requires_grad=True), torch.randn(4, 6)
    want = F.rms_norm(x, (6,), w, 1e-5)
    with torch.no_grad(), Decomposed():
        out, rstd = aten._fused_rms_norm(x, [6], w, 1e-5)
        grads = aten._fused_rms_norm_backward(grad, x, [6], rstd, w, [True, True])
    compare([out, *grads], [want, *torch.autograd.grad(want, [x, w], grad)])


def test_update_in_place_is_declined():
    with Decomposed() as mode:
        aten.native_batch_norm(torch.randn(4, 3), None, None, torch.zeros(3), torch.ones(3), True, 0.1, 1e-5)
    assert aten.native_batch_norm.default in mode.leaves


# ---- losses, pooling, dropout

@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("shape", [(5, 7), (7,), (2, 7, 3, 3)])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_with_ignored_targets(reduction, shape, weighted):
    x = torch.randn(shape, requires_grad=True)
    target = torch.randint(0, 7, shape[:1] + shape[2:] if len(shape) > 1 else ())
    if target.dim():
        target.view(-1)[0] = -100
    weight = torch.rand(7) if weighted else None

    def fn(x):
        loss = F.cross_entropy(x, target, weight=weight, reduction=reduction)
        return loss, torch.autograd.grad(loss.sum(), x)[0]

    mode = check(fn, x)
    assert not any("nll" in str(op) or "scatter" in str(op) for op in mode.leaves)


@pytest.mark.parametrize("kernel,stride,padding,dilation,ceil", [
    (3, 2, 1, 1, False), (2, 2, 0, 1, False), (3, 1, 1, 1, False), (3, 2, 1, 1, True), (2, 3, 1, 2, False),
    (3, 2, 0, 2, True), (1, 1, 0, 1, False)])
@pytest.mark.parametrize("ties", [False, True])
def test_max_pool(kernel, stride, padding, dilation, ceil, ties):
    x = torch.randn(2, 3, 11, 9)
    if ties:
        x = x.round().clamp(-1, 1)
        x[0, 0, 3, 3] = math.nan
        x[1, 2] = -math.inf
    x = x.to(memory_format=torch.channels_last).requires_grad_()

    def fn(x):
        y, index = F.max_pool2d(x, kernel, stride, padding, dilation, ceil, True)
        finite = y.clamp(-9, 9).nan_to_num()
        return y, index, torch.autograd.grad((finite * finite + 2 * finite).sum(), x)[0]

    mode = check(fn, x, rtol=1e-4)
    assert aten.max_pool2d_with_indices_backward.default in mode.used


@pytest.mark.parametrize("mode, n", [(mode, n) for mode in ("nearest", "nearest-exact") for n in (1, 2, 3)])
def test_resizing_by_a_scale_that_sizes_do_not_tell(mode, n):
    """Kernels have ways of their own for sizes that stay or double, whatever the scale is."""
    for size, scale in itertools.product((1, 2, 3, 5, 10), (0.7, 1.0, 1.1, 1.3, 1.9, 2.0, 2.1, 2.3, 3.3)):
        if int(size * scale):
            x = torch.arange(float(size ** n)).view(1, 1, *[size] * n)
            check(lambda x: F.interpolate(x, scale_factor=scale, mode=mode), x)


def test_dropout_draws_the_numbers_of_eager():
    x = torch.randn(100, requires_grad=True)
    check(lambda x: torch.autograd.grad(F.dropout(x, 0.3).sum(), x)[0], x)
    check(lambda x: torch.native_dropout(x, 0.3, True), x.detach())
    check(lambda x: torch.native_dropout(x, 0.3, False), x.detach())


# ---- lists of tensors

def tensors(n=3, dtype=torch.float32):
    return [torch.rand(i + 1, 2, dtype=dtype) + 0.1 for i in range(n)]


def test_foreach():
    a, b, c = tensors(), tensors(), tensors()
    scalars = [0.5, 1.5, 2.0]
    for name in "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p " \
                "log2 neg reciprocal round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc norm max".split():
        mode = check(getattr(torch, "_foreach_" + name), a)
        assert any("foreach" in str(op) for op in mode.used), name
    for name in "add sub mul div maximum minimum clamp_min clamp_max pow".split():
        for other in (b, 2.0, scalars):
            check(getattr(torch, "_foreach_" + name), a, other)
    for name in "add mul div".split():
        check(getattr(torch, "_foreach_" + name), a, torch.tensor(3.0))
    check(lambda: torch._foreach_add(a, b, alpha=0.3))
    check(torch._foreach_pow, 2.0, a)
    for weight in (0.2, 0.9, c):
        check(torch._foreach_lerp, a, b, weight)
    for name in "addcmul addcdiv".split():
        for value in (0.5, scalars, torch.tensor(scalars)):
            check(getattr(torch, "_foreach_" + name), a, b, c, value)
    check(lambda: aten._foreach_copy(a, b))
    check(lambda: aten._foreach_zero(a))


@pytest.mark.parametrize("name", ["_fused_adam", "_fused_adamw"])
@pytest.mark.parametrize("amsgrad,maximize,weight_decay", [(False, False, 0.1), (True, True, 0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_fused_adam(name, amsgrad, maximize, weight_decay, dtype):
    p, g, m, v, top = (tensors(dtype=dtype) for _ in range(5))
    steps = [torch.tensor(3.0) for _ in p]
    options = dict(lr=0.01, beta1=0.9, beta2=0.99, weight_decay=weight_decay, eps=1e-8, amsgrad=amsgrad,
                   maximize=maximize)
    lists = (p, g, m, v, top if amsgrad else [], steps)
    digits = {torch.float32: {}, torch.bfloat16: dict(rtol=2 ** -6, atol=1e-2), torch.float64: dict(rtol=1e-13, atol=0)}[dtype]
    check(lambda: getattr(aten, name)(*lists, **options), **digits)
    check(lambda: getattr(aten, name)(*lists, **options | {"lr": torch.tensor(0.01)}), **digits)
    if dtype is torch.float32:
        one, two = torch.tensor(1.0), torch.tensor(2.0)
        check(lambda: getattr(aten, name)(*lists, **options, grad_scale=two, found_inf=one * 0))
        check(lambda: getattr(aten, name)(*lists, **options, found_inf=one))


@pytest.mark.parametrize("momentum,nesterov,first",
                         [(0.0, False, False), (0.9, False, True), (0.9, True, False)])
def test_fused_sgd(momentum, nesterov, first):
    p, g, buffers = tensors(), tensors(), tensors()
    check(lambda: aten._fused_sgd(p, g, buffers if momentum else [], weight_decay=0.1, momentum=momentum,
                                  lr=0.1, dampening=0.0, nesterov=nesterov, maximize=False,
                                  is_first_step=first))


# ---- the driver

def traced(fn, *args):
    mode = FakeMode()
    gm = trace(fn, [mode.from_real(a) for a in args])
    for i, node in enumerate(n for n in gm.graph.nodes if n.op == "call_function"):
        node.meta["location"] = Location("program.py", i, "fn")
    return gm


def block(x, table, wq, wo, gain, shift, w1, b1, w2, head, target):
    h = F.embedding(x, table)
    B, T, C = h.shape
    qkv = F.layer_norm(h, (C,), gain, shift) @ wq
    q, k, v = (t.view(B, T, 4, C // 4).transpose(1, 2) for t in qkv.split(C, dim=2))
    h = h + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C) @ wo
    h = h + F.linear(F.gelu(F.linear(F.layer_norm(h, (C,), gain, shift), w1, b1)), w2)
    loss = F.cross_entropy((h @ head).view(B * T, -1), target.view(-1))
    return (loss, *torch.autograd.grad(loss, [table, wq, wo, gain, shift, w1, b1, w2, head]))


def block_inputs(dtype=torch.float32, B=2, T=8, C=16, V=32):
    def weight(*shape):
        return (torch.randn(*shape) * 0.3).to(dtype).requires_grad_()
    tokens = torch.randint(0, V, (2, B, T))
    return (tokens[0], weight(V, C), weight(C, 3 * C), weight(C, C), weight(C), weight(C), weight(4 * C, C),
            weight(4 * C), weight(C, 4 * C), weight(C, V), tokens[1])


def conv_net(x, w, gain, shift, mean, var):
    y = F.conv2d(x, w, stride=2, padding=3)
    y, _, _, mean, var = aten._native_batch_norm_legit_functional(y, gain, shift, mean, var, True, 0.1, 1e-5)
    y = F.max_pool2d(F.relu(y), 3, 2, 1).mean((2, 3))
    loss = (y * y).sum()
    return (loss, mean, var, *torch.autograd.grad(loss, [w, gain, shift]))


def conv_inputs(memory_format):
    def place(t):
        return t.to(memory_format=memory_format).requires_grad_(t.shape[0] == 8)
    return (place(torch.randn(2, 3, 32, 32)), place(torch.randn(8, 3, 7, 7)), torch.rand(8).requires_grad_(),
            torch.randn(8).requires_grad_(), torch.randn(8), torch.rand(8))


@pytest.mark.parametrize("fn,args", [(block, block_inputs()), (block, block_inputs(torch.bfloat16)),
                                     (conv_net, conv_inputs(torch.contiguous_format)),
                                     (conv_net, conv_inputs(torch.channels_last))],
                         ids=["gpt", "gpt-bf16", "conv", "conv-channels-last"])
def test_graphs_in_primitives_only(fn, args):
    gm = traced(fn, *args)
    before = [n.format_node() for n in gm.graph.nodes]
    result = decompose(gm)
    assert [n.format_node() for n in gm.graph.nodes] == before
    result.graph.lint()
    by_rows = fn is conv_net and args[0].is_contiguous()
    assert fallbacks(result) == ({aten.max_pool2d_with_indices_backward.default: 1} if by_rows else {})
    assert violations(result) == []
    names = {n.name for n in gm.graph.nodes}
    for node in result.graph.nodes:
        if node.op == "call_function":
            assert set(node.meta["origins"]) <= names and node.meta["origins"]
            assert node.meta["location"].filename == "program.py"
    want = fn(*args)
    with torch.no_grad():
        got = interpret(result, args)
    for g, w in zip(got, want, strict=True):
        assert g.stride() == w.stride()
    bf16 = want[0].dtype is torch.bfloat16
    for g, w in zip(got, want):
        rtol, atol = (0.05, 0.05 * w.abs().max().item()) if bf16 else (1e-4, 1e-4)
        torch.testing.assert_close(g, w, rtol=rtol, atol=atol)


def test_cross_entropy_has_no_scatter_and_one_exp_per_direction():
    def fn(x, t):
        x.requires_grad_()
        loss = F.cross_entropy(x, t)
        return loss, torch.autograd.grad(loss, x)[0]

    targets = [n.target for n in decompose(traced(fn, torch.randn(4, 9), torch.randint(9, (4,)))).graph.nodes]
    assert targets.count(aten.exp.default) == 2
    assert not any("scatter" in str(t) or "index_put" in str(t) for t in targets)


def test_decomposing_twice_changes_nothing():
    once = decompose(traced(block, *block_inputs()))
    calls = [[n.target for n in gm.graph.nodes if n.op == "call_function"] for gm in (once, decompose(once))]
    assert calls[0] == calls[1]


def test_equal_work_is_done_once_but_random_numbers_stay_apart():
    def fn(x):
        torch.bernoulli(x)                                     # unused, but it advances the random stream
        draws = torch.bernoulli(x, 0.5) + torch.bernoulli(x, 0.5)
        return torch.exp(x) + torch.exp(x), draws

    result = decompose(traced(fn, torch.rand(3)))
    targets = [n.target for n in result.graph.nodes]
    assert targets.count(aten.exp.default) == 1
    assert targets.count(aten.bernoulli.p) == 2 and targets.count(aten.bernoulli.default) == 1


def repeated(x, y, n):
    """The same questions of other operands, and questions that look alike and are not the same."""
    out = []
    for a, b in ((x, y), (y, x), (x, x), (x, x.view(4, 6)), (x.detach(), x), (x[:2], y[:2]), (x[2:], y[2:]), (x.T, y.T)):
        out += [torch.addcmul(a, a, b, value=2.0), torch.lerp(a, b, 0.3), torch.add(a, n, alpha=3)]
    for a in (x, y):
        out += [torch.clamp(a, 0.0), torch.clamp(a, -0.0), torch.add(a, 1, alpha=1), torch.add(a, 1.0, alpha=1), torch.add(a, True)]
        out += [*F.gelu(a).chunk(2), *torch.native_layer_norm(a, (6,), None, None, 1e-5), F.softmax(a, 1), F.softmax(a, 0)]
        out += [aten.expand_copy.default(a, (4, 6)), torch.std(a, 1), F.dropout(a, 0.5), torch.special.xlogy(a, a)]
    lists = [x, y, x[:2], x.T], [y, x, y[:2], y.T]
    for found in (torch._foreach_norm(lists[0]), torch._foreach_addcmul(*lists, lists[0], 2.0), torch._foreach_lerp(*lists, 0.3),
                  torch._foreach_mul(*lists), torch._foreach_mul(lists[0], [0.0, -0.0, 1.0, 0.0]), torch._foreach_add(lists[0], 1)):
        out += found
    return out


def test_a_fused_optimizer_asks_once_for_equal_parameters(monkeypatch):
    from minicompile.ch06_decompositions.rules import foreach_optimizers as rules
    module, asked, made = sys.modules["minicompile.ch06_decompositions.decompose"], [], []
    for name in ("_adam_update", "_sgd_update"):
        rule = getattr(rules, name)
        monkeypatch.setattr(rules, name, lambda *args, rule=rule, **options: asked.append(rule) or rule(*args, **options))
    monkeypatch.setattr(module, "Pattern", lambda *args, pattern=module.Pattern: made.append(args) or pattern(*args))

    def update(params, grads, ms, vs, steps):
        torch._fused_adamw_(params, grads, ms, vs, [], steps, lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8, amsgrad=False,
                            maximize=False)
        torch._fused_sgd_(params, grads, ms, weight_decay=0.1, momentum=0.9, lr=0.1, dampening=0.0, nesterov=False, maximize=False,
                          is_first_step=False)

    forms = [(3, 4), (3, 4), (5,), (3, 4), (5,)]
    given = [[torch.rand(form) for form in forms] for _ in range(4)] + [[torch.tensor(3.0) for _ in forms]]
    expected = [[t.clone() for t in ts] for ts in given]
    update(*expected)
    minicompile.compile(update, backend="decomposed", fullgraph=True)(*given)
    torch.testing.assert_close(given, expected)
    assert len(asked) == 4                                  # two forms, two optimizers
    assert len(made) == 4                                   # and none of a whole list


def test_patterns_write_what_the_rules_write(monkeypatch):
    from minicompile.ch01_graphs.graph import print_graph
    module, used = sys.modules["minicompile.ch06_decompositions.decompose"], []
    again = module.Pattern.again
    monkeypatch.setattr(module.Pattern, "again", lambda self, *args: used.append(self) or again(self, *args))
    mode = FakeMode()
    x, y, n = torch.randn(4, 6), torch.randn(4, 6), torch.tensor(2)
    gm = trace(repeated, [mode.from_real(t) for t in (x, y, n)])
    with_patterns = decompose(gm)
    assert len(used) > 20
    monkeypatch.setattr(module, "question", lambda *args: None)
    without = decompose(gm)
    assert print_graph(with_patterns) == print_graph(without)
    for a, b in zip(with_patterns.graph.nodes, without.graph.nodes):
        assert {k: v for k, v in a.meta.items() if k != "val"} == {k: v for k, v in b.meta.items() if k != "val"}
        if isinstance(a.meta.get("val"), torch.Tensor):
            assert a.meta["val"].stride() == b.meta["val"].stride()
    memory = lambda g: [storage_key(v) for v in (m.meta.get("val") for m in g.graph.nodes) if isinstance(v, torch.Tensor)]
    first, second = memory(with_patterns), memory(without)
    assert [first.index(k) for k in first] == [second.index(k) for k in second]
    torch.manual_seed(0)
    got = interpret(with_patterns, [x, y, n])
    torch.manual_seed(0)
    compare(got, repeated(x, y, n))


def test_equal_results_are_separate_tensors():
    def fn(x):
        return torch.zeros_like(x), torch.zeros_like(x), F.gelu(x), F.gelu(x)

    results = minicompile.compile(fn, backend="decomposed", fullgraph=True)(torch.randn(3))
    assert len({t.data_ptr() for t in results}) == 4


def test_every_name_in_the_tables_exists():
    assert ABSENT == set() or not torch.__version__.startswith("2.13")


def test_a_wrong_decomposition_is_not_used(monkeypatch):
    monkeypatch.setitem(TABLE, aten.gelu.default, lambda x, approximate="none": torch.exp(x).double())
    result = decompose(traced(lambda x: (F.gelu(x),), torch.randn(3)))
    assert fallbacks(result) == {aten.gelu.default: 1}
    assert aten.exp.default not in [n.target for n in result.graph.nodes]


def test_unknown_operators_and_mutations_at_the_end_stay():
    def fn(x, y):
        z = torch.special.airy_ai(x)
        y.copy_(z * 2)
        return (z,)

    result = decompose(traced(fn, torch.rand(3), torch.rand(3)))
    assert fallbacks(result) == {aten.special_airy_ai.default: 1, aten.copy_.default: 1}
    x, y = torch.rand(3), torch.zeros(3)
    (z,) = interpret(result, [x, y])
    torch.testing.assert_close(y, z * 2)


def test_notes_of_earlier_stages_are_kept():
    gm = traced(lambda x: (F.gelu(x),), torch.randn(3))
    for node in gm.graph.nodes:
        node.meta["side"] = "backward"
    assert all(n.meta["side"] == "backward" for n in decompose(gm).graph.nodes if n.op == "call_function")


# ---- the dialect

def test_primitives_are_few_and_described():
    assert 120 <= len(PRIMITIVES) <= 150
    assert all(p.meaning and p.op in PRIMITIVES and is_primitive(p.op) for p in PRIMITIVES.values())
    assert len([op for op in TABLE if op not in PRIMITIVES]) > 300


@pytest.mark.processes
def test_the_table_prints():
    command = [sys.executable, "-m", "minicompile.ch06_decompositions"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"{len(PRIMITIVES)} primitives" in out and "var_mean.correction" in out
