"""Every operator of PyTorch's sample database, with the table and without: values, dtypes, strides, grads."""
import contextlib
import copy
import warnings
from itertools import islice

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

from minicompile.ch06_decompositions import TABLE, Decomposed

SAMPLES = 2
# Results of any value; in-place writes through `out`; layouts other than strided.
NO_ANSWER = {"empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "empty_permuted",
             "nn.functional.rrelu", "sparse.mm", "sparse.sampled_addmm", "sparse.mm.reduce"}
NO_ANSWER |= {"ormqr"}      # its gradient has the memory order of in-place steps, which are not functional
NO_ANSWER |= {op.name for op in op_db if op.name.startswith("jiterator")}       # GPU only
OPS = [op for op in op_db if op.name not in NO_ANSWER]
EXERCISED: set = set()


def run(op, sample, mode=None, seed_grads=1):
    """(outputs, gradients) of one sample under an optional mode."""
    torch.manual_seed(0)
    with mode or contextlib.nullcontext():
        result = op(sample.input, *sample.args, **sample.kwargs)
        outs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        roots = [t for t in outs if t.requires_grad]
        leaves = [t for t in tree_leaves((sample.input, sample.args, sample.kwargs))
                  if isinstance(t, torch.Tensor) and t.requires_grad]
        if not roots or not leaves:
            return outs, []
        generator = torch.Generator().manual_seed(seed_grads)
        seeds = [torch.randn(t.shape, dtype=torch.float32, generator=generator).to(t.dtype) for t in roots]
        return outs, list(torch.autograd.grad(roots, leaves, seeds, allow_unused=True))


def samples(op, dtype, count=SAMPLES):
    grad = op.supports_autograd and dtype.is_floating_point
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(islice(op.sample_inputs_func(op, "cpu", dtype, grad), count))


def same_form(got, want):
    assert (got is None) == (want is None)
    if want is None or want.layout != torch.strided:
        return False
    assert got.dtype == want.dtype and got.shape == want.shape
    strides = [[s for n, s in zip(t.shape, t.stride()) if n > 1] for t in (got, want)]
    assert strides[0] == strides[1]
    return True


def dtypes_of(op):
    exact = [d for d in (torch.int64, torch.bool) if d in op.dtypes][:1]
    return [d for d in (torch.float32,) if d in op.dtypes] + exact


GROUP = 35                # operators per test
GROUPS = [OPS[i:i + GROUP] for i in range(0, len(OPS), GROUP)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("group", GROUPS, ids=lambda g: g[0].formatted_name)
def test_operators(group):
    failures = {}
    for op in group:
        try:
            check_operator(op)
        except Exception as error:
            failures[op.formatted_name] = f"{type(error).__name__}: {error}"
    assert not failures


def check_operator(op):
    for dtype in dtypes_of(op):
        try:
            cases = samples(op, dtype)
        except (RuntimeError, ImportError):           # the database needs a library that is not there
            continue
        for sample in cases:
            try:
                want = run(op, sample)
            except RuntimeError:                      # eager cannot do it, or it has no gradient
                continue
            mode = Decomposed()
            got = run(op, sample, mode)
            EXERCISED.update(mode.used)
            for g, w in zip(got[0] + got[1], want[0] + want[1], strict=True):
                if same_form(g, w):
                    rtol, atol = (1e-4, 3e-5) if w.is_floating_point() or w.is_complex() else (0, 0)
                    torch.testing.assert_close(g, w, equal_nan=True, rtol=rtol, atol=atol)


@pytest.mark.filterwarnings("ignore")
def test_coverage():
    """Run after the operators of this file: how much of the table the samples reached."""
    for op in OPS if len(EXERCISED) < 225 else ():
        check_operator(op)
    print(f"{len(OPS)} operators; {len(EXERCISED)} of {len(TABLE)} decompositions exercised; "
          f"not: {sorted(str(op) for op in TABLE if op not in EXERCISED)}")
    assert len(EXERCISED) > 225


NEURAL = """
nn.functional.gelu nn.functional.silu nn.functional.relu nn.functional.elu nn.functional.leaky_relu
nn.functional.mish nn.functional.softplus nn.functional.hardswish nn.functional.hardsigmoid
nn.functional.hardtanh nn.functional.logsigmoid nn.functional.glu sigmoid tanh softmax log_softmax
logsumexp nn.functional.layer_norm nn.functional.group_norm nn.functional.batch_norm
nn.functional.cross_entropy nn.functional.nll_loss nn.functional.mse_loss
nn.functional.smooth_l1_loss nn.functional.huber_loss nn.functional.binary_cross_entropy_with_logits
nn.functional.embedding nn.functional.max_pool2d nn.functional.avg_pool2d
nn.functional.adaptive_avg_pool2d nn.functional.rms_norm mean sum var std var_mean addcmul addcdiv
lerp add sub pow""".split()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NEURAL)
def test_half_precision_rounds_once(name):
    """In bfloat16 the table is no farther from the float32 answer than eager is, or than one rounding."""
    for op in (op for op in op_db if op.name == name and not op.variant_test_name):
        assert torch.bfloat16 in op.dtypes
        for sample in samples(op, torch.bfloat16, 5):
            widened = tree_map(lambda t: t.detach().float().requires_grad_(t.requires_grad)
                               if isinstance(t, torch.Tensor) and t.dtype is torch.bfloat16 else t,
                               (sample.input, sample.args, sample.kwargs))
            exact = type(sample)(widened[0], args=widened[1], kwargs=widened[2])
            if torch.bfloat16 in tree_leaves(sample.kwargs):
                continue
            want, got, truth = run(op, sample), run(op, sample, Decomposed()), run(op, exact)
            for g, w, t in zip(got[0], want[0], truth[0], strict=True):
                if same_form(g, w) and g.is_floating_point():
                    error, eager = distance(g, t), distance(w, t)
                    assert (error <= torch.maximum(eager, t.double().abs() * 2 ** -8 + 1e-6)).all(), (g, w, t)
            for g, w, t in zip(got[1], want[1], truth[1], strict=True):
                if same_form(g, w) and w.numel():       # gradients use saved results that were rounded: norms
                    error, eager = distance(g, t).max(), distance(w, t).max()
                    assert error <= max(1.5 * eager, 2 ** -7 * t.abs().max() + 1e-6), (g, w, t)


def distance(x, truth):
    return (x.double() - truth.double()).abs().nan_to_num()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("activation, norm_first", [("relu", False), ("gelu", True)])
def test_the_encoder_layer_of_eager_s_fast_path(dtype, activation, norm_first):
    """One operator in eager. In evaluation with no mask it comes apart; with one the result is the same, too."""
    import minicompile
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation=activation, norm_first=norm_first)
    model, x = torch.nn.TransformerEncoder(layer, 2).eval().to(dtype), torch.randn(2, 8, 32, dtype=dtype)
    mask = torch.zeros(2, 8, dtype=torch.bool)
    mask[0, -2:] = True
    with torch.no_grad():
        found = minicompile.explain(model)(x)
        assert "_transformer_encoder_layer_fwd" in found.operators and found.graph_break_count == 0
        assert not any("encoder_layer" in call for g in found.graphs for half in g.halves for call in half.library_calls)
        compiled, exact = minicompile.compile(model), copy.deepcopy(model).double()(x.double())
        assert (compiled(x) - exact).abs().max() <= 2 * (model(x) - exact).abs().max() + torch.finfo(dtype).eps * 4
        torch.testing.assert_close(compiled(x, src_key_padding_mask=mask), model(x, src_key_padding_mask=mask))


def test_attention_of_eager_s_fast_path_without_weights():
    """The operator gives None for weights that nobody wants; its meta kernel gives an empty tensor."""
    import minicompile
    model = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    compiled = minicompile.compile(model)
    mask = torch.tensor([[False] * 5, [False, False, True, True, True]])
    with torch.no_grad():
        for n, wanted in ((4, False), (4, True), (5, False), (6, False)):
            x = torch.randn(2, n, 8)
            for given in (None, mask) if n == 5 else (None,):
                for got, expected in zip(compiled(x, x, x, given, wanted), model(x, x, x, given, wanted), strict=True):
                    torch.testing.assert_close(got, expected)
