"""Whole ATen programs through trace, decompose, lower, fuse and the C++ backend, against eager."""
import math
import platform
import re
import time

import pytest
import torch
import torch.nn.functional as F

import minicompile
from minicompile import logs
from minicompile.ch10_cpp.lanes import WIDE

from .pipeline import compile_cpp

aten = torch.ops.aten


def agree(fn, *inputs, fusion=True, **tolerance):
    want = fn(*[t.clone() for t in inputs])
    want = list(want) if isinstance(want, (tuple, list)) else [want]
    compiled, sources = compile_cpp(fn, *inputs, fusion=fusion)
    for g, w in zip(compiled(*[t.clone() for t in inputs]), want, strict=True):
        torch.testing.assert_close(g, w, equal_nan=True, **tolerance)
    return sources


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


CHAINS = {
    "bias_gelu_residual": lambda x, y, b: F.gelu(x + b) + y,
    "residual_layer_norm": lambda x, y, b: F.layer_norm(x + y, (x.shape[-1],), b, b),
    "scaled_softmax": lambda x, y, b: (x * 0.125).masked_fill(y > 1, float("-inf")).softmax(-1),
    "log_softmax": lambda x, y, b: F.log_softmax(x, -1),
    "softmax_first_dim": lambda x, y, b: x.softmax(0),
    "rms_norm": lambda x, y, b: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * b,
    "transpose": lambda x, y, b: x.t() * 2 + y.t(),
    "mixed_order": lambda x, y, b: (x.t().contiguous().t() + y) * b,
    "sums": lambda x, y, b: (x.sum(), (x * y).sum(0), (x + b).sum(1), x.mean(), x.std(), x.var(0), x.var(1)),
    "extremes": lambda x, y, b: (x.amax(1), x.amin(0), x.argmax(1), x.argmin(0), x.max(), x.argmax()),
    "logic": lambda x, y, b: ((x > 0).any(1), (x > y).all(0), (x > 0).sum(1), torch.where(x > y, x, b),
                              x.clamp(-1, 1)),
    "cat": lambda x, y, b: torch.cat([x, y * 2], 1),
    "pad": lambda x, y, b: F.pad(x, (1, 2, 3, 4)),
    "flip_roll": lambda x, y, b: (x.flip(0) + y, x[:, ::2], x[1:] - x[:-1]),
    "libm": lambda x, y, b: (x.tan(), x.atan(), torch.atan2(x, y), torch.hypot(x, y), x.abs().pow(y),
                             x.sinh(), x.erfc(), x.lgamma()),
    "rounding": lambda x, y, b: ((x * 4).round(), x.floor(), x.ceil(), x.trunc(), x.sign(), x % y,
                                 torch.fmod(x, y), x // y),
}


@pytest.mark.parametrize("shape", [(1, 1), (40, 301)])
@pytest.mark.parametrize("name", CHAINS)
def test_chain(name, shape):
    agree(CHAINS[name], rand(*shape), rand(*shape, seed=1), rand(shape[1], seed=2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["bias_gelu_residual", "residual_layer_norm", "sums", "extremes", "logic",
                                  "scaled_softmax"])
def test_chain_in_double(name):
    agree(CHAINS[name], rand(9, 65).double(), rand(9, 65, seed=1).double(), rand(65, seed=2).double())


def test_a_distribution_of_a_nan_is_one_whatever_its_sign():
    """That of `inf - inf` is negative, and so is what an instruction makes of several."""
    x = torch.tensor([1.0, math.nan, -math.nan, math.inf, -math.inf, 1e30, -1e30]).repeat(5)
    for fn in (lambda x: 0.5 * (1 + torch.erf(x * 0.7)), lambda x: 1 + torch.erf(-x), lambda x: 1 + torch.erf(x.sigmoid())):
        source, = agree(fn, x, rtol=1e-5, atol=1e-5)
        assert "mc_erf_plus_one(" in source.code


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_rows_of_halves_that_are_written_again_are_walked_along(dtype):
    for length in (9, 17, 24, 31):
        x = rand(40, length).abs().to(dtype)
        for fn in (lambda x: x * torch.rsqrt(x.float().pow(2).mean(1, keepdim=True) + 1e-6).to(dtype),
                   lambda x: x.float() / x.float().sum(1, True)):
            source, = agree(fn, x, rtol=2e-2, atol=1e-3)
            assert not WIDE or "mc_fold<16>" in source.code
        source, = agree(lambda x: (x.float() / x.float().sum(1, True)).t().contiguous(), x, rtol=1e-4, atol=1e-4)     # not side by side
        assert "mc_fold" not in source.code


def test_a_long_row_that_is_only_added_up_has_more_partial_sums():
    for fn, parts in ((lambda x: x.sum(1), 64), (lambda x: (x.sum(1), x.amax(1)), 32)):
        for length in (512, 1001, 5000):
            source, = agree(fn, rand(3, length), rtol=1e-5, atol=1e-4)
            assert not WIDE or f"mc_fold<{parts}>" in source.code


@pytest.mark.parametrize("kind", ["amax", "amin"])
def test_extremes_of_halves_are_taken_by_whole_vectors(kind):
    """Also behind the last whole one, and beside a NaN."""
    for length in (5, 16, 40, 530, 1001):
        x = (-rand(5, length).abs() - 1).to(torch.bfloat16) * (1 if kind == "amax" else -1)
        x[1, length // 2], x[2, -1], x[3] = math.nan, math.nan, math.inf if kind == "amin" else -math.inf
        source, = agree(lambda x: getattr(x * 2, kind)(1), x, rtol=0, atol=0)
        assert not WIDE or f"mc_most_{kind[1:]}<" in source.code


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["bias_gelu_residual", "residual_layer_norm", "scaled_softmax", "rms_norm",
                                  "transpose", "extremes", "cat"])
def test_chain_in_half_precision_is_at_least_as_good_as_eager(name, dtype):
    inputs = [rand(9, 65), rand(9, 65, seed=1), rand(65, seed=2)]
    half = [t.to(dtype) for t in inputs]
    exact = CHAINS[name](*[t.double() for t in half])
    eager = CHAINS[name](*half)
    compiled, _ = compile_cpp(CHAINS[name], *half)
    if not isinstance(exact, tuple):
        exact, eager = [exact], [eager]
    for g, e, x in zip(compiled(*half), eager, exact, strict=True):
        assert g.dtype == e.dtype
        ours, theirs = (g.double() - x.double(), e.double() - x.double())
        assert ours.square().mean() <= theirs.square().mean() * 1.05 + 1e-18     # of all elements: one may be lucky
        assert ours.abs().max() <= theirs.abs().max() * 1.5 + 1e-9


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_numbers_that_are_only_moved_stay_bits(dtype):
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).reshape(256, 256)
    mask, other = torch.rand(256, 256) > 0.5, every.flip(0)

    def moves(x, mask, y):
        return (x.clone(), torch.cat([x, x[:3]]), F.pad(x, (1, 2), value=2.5), torch.where(mask, x, -1.5), x.flip(1),
                torch.where(mask, x, y), torch.full_like(x, 2.1), x.t().contiguous(), -x, x.abs(), torch.where(mask, -x, y.abs()),
                torch.cat([-x[:, 128:], x[:, :128]], 1))

    compiled, sources = compile_cpp(moves, every, mask, other)
    for ours, eager in zip(compiled(every, mask, other), moves(every, mask, other), strict=True):
        assert torch.equal(ours.view(torch.int16), eager.view(torch.int16))         # NaN too keep their bits
    for source in sources:
        assert "mc_from" not in source.code and "mc_to" not in source.code


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_numbers_that_are_moved_and_computed_with(dtype):
    x, y = rand(33, 70).to(dtype), rand(33, 70, seed=1).to(torch.bfloat16 if dtype is torch.float16 else torch.float16)
    agree(lambda x, y: (torch.where(x > 0, x, y), torch.where(x > 0, x, 3.0), torch.where(x > 0, x, 2.0).exp(), x.amax(1),
                        F.pad(x, (1, 1)).sum(1), x.to(y.dtype), x.index_select(0, torch.tensor([3, 1])), x.masked_fill(x > 0, 0.1),
                        x.t().contiguous(), F.pad(x, (1, 1)).t().contiguous()), x, y)


@pytest.mark.parametrize("fn", [lambda x: F.interpolate(x, scale_factor=2), lambda x: F.interpolate(x, size=(13, 31)),
                                lambda x: F.pad(x, (2, 1, 1, 0), mode="reflect"), lambda x: F.pad(x, (0, 3, 2, 1), mode="replicate"),
                                lambda x: F.pad(x, (2, 2, 1, 1), mode="reflect").sum(-1), lambda x: F.pad(x, (0, 0, 2, 1), mode="reflect"),
                                lambda x: F.pad(x, (1, 2, 0, 0, 1, 3), mode="replicate")])
def test_positions_that_every_row_reads_at_are_found_once(fn):
    """In one kernel, in which no loop over the lane checks a position."""
    for x in (rand(4, 5, 9, 20), rand(4, 5, 9, 20).to(memory_format=torch.channels_last)):
        source, = agree(fn, x, rtol=1e-5, atol=1e-5)
        assert not [loop for loop in source.code.split("#pragma omp simd")[1:] if "mc_index" in loop.split("}")[0]]


def test_positions_of_rows_and_columns_are_computed_once_for_images_whose_channels_are_innermost():
    x = rand(2, 16, 9, 8).to(memory_format=torch.channels_last)
    for dtype in (torch.float32, torch.bfloat16):
        (source,) = agree(lambda t: F.interpolate(t, size=(13, 21)), x.to(dtype), rtol=0, atol=0)
        assert "mc_index" not in source.code[source.code.index("for (int64_t i0"):].split("#pragma omp simd")[0]


def test_the_lane_of_a_lookup_is_the_column():
    """A step along the tokens leads anywhere, so a few columns serve better."""
    at = torch.arange(4096).view(8, 512) * 7 % 100
    for dtype in (torch.float32, torch.bfloat16):
        (source,) = agree(lambda t: F.embedding(at, t), rand(100, 8).to(dtype), rtol=0, atol=0)
        assert "lane < 8;" in source.code


@pytest.mark.parametrize("fn", [lambda t, i: F.embedding(i, t).sum(1), lambda t, i: F.embedding(i, t).amax(1),
                                lambda t, i: (F.embedding(i, t) * (i > 3)[..., None]).mean(1)])
def test_rows_that_are_looked_up_are_summed_across(fn):
    """Along the rows each element would be fetched by itself; that their indices lie side by side does not make up for it."""
    at = torch.arange(4096).view(32, 128) * 7 % 100
    for dtype in (torch.float32, torch.bfloat16):
        (source,) = agree(lambda t: fn(t, at), rand(100, 64).to(dtype))
        assert "reduction(" not in source.code and "lane < 64;" in source.code


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", [
    lambda x: F.max_pool1d(x[0], 3, 2, 1), lambda x: F.max_pool2d(x, 3, 2, 1), lambda x: F.max_pool2d(x, 5, 2, 2).relu(),
    lambda x: F.avg_pool2d(x, 3, 2, 1), lambda x: F.pad(x, (2, 1, 1, 0), mode="reflect"),
    lambda x: F.pad(x, (0, 3, 2, 1), mode="replicate"),
    lambda x: F.pad(x[0], (1, 2), mode="replicate") * 2, lambda x: F.pad(x, (1, 1, 1, 1), value=3.0)[..., ::2] * 2,
    lambda x: F.pad(x, (2, 2, 2, 2), mode="reflect")[..., 1::2] + 1])
def test_conditions_and_positions_of_the_inside_of_a_row_are_constant(fn, dtype):
    """In a function for a range of lanes, which is called for the inside and for both ends."""
    for x in (rand(4, 5, 9, 40), rand(4, 5, 30, 33)):
        sources = agree(fn, x.to(dtype), rtol=2e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)
        assert [s for s in sources if "run(begin, end, true)" in s.code and "inside ?" in s.code]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8])
def test_a_long_row_with_short_ends_has_an_inside_where_what_is_loaded_lies_side_by_side(dtype):
    """A mask for each vector costs more, and where numbers are narrower than a float, of any length, g++ makes no vectors of it."""
    for length in (40, 600):
        for pad in (lambda x: F.pad(x, (2, 3)) + 1, lambda x: F.pad(x, (2, 3))):
            sources = agree(pad, (rand(4, 5, length) * 20).to(dtype), rtol=0, atol=0)
            assert any("run(begin, end, true)" in s.code for s in sources) == (length == 600 or dtype is not torch.float32)


@pytest.mark.parametrize("source", [torch.int64, torch.int32, torch.int16, torch.uint8])
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_what_is_stored_is_rounded_once(source, half):
    x = torch.cat([torch.arange(-3000, 3000), torch.tensor([2049, 65519, 65520, 2**24 + 1, 2**31 - 1, 2**62 + 1])]).to(source)
    (stored,) = agree(lambda x: x.to(half), x, rtol=0, atol=0)
    assert "mc_to_" not in stored.code
    for fn in (lambda x: (x.to(half), x.to(half) + 1), lambda x: torch.where(x > 5, x.to(half), x.to(half) * 2)):
        agree(fn, x, rtol=0, atol=0)


@pytest.mark.parametrize("half, lost", [(torch.float16, 13), (torch.bfloat16, 16)])
def test_every_float_is_rounded_to_a_half_in_place_as_in_memory(half, lost):
    """All bits that a half keeps, and of those that it loses the ones around 0, a half and 1. 1 / -0 is not 1 / 0."""
    kept = torch.arange(2**(32 - lost), dtype=torch.int64) << lost
    rest = torch.tensor([0, 1, 2**(lost - 1) - 1, 2**(lost - 1), 2**(lost - 1) + 1, 2**lost - 1])
    x = (kept[:, None] + rest).to(torch.int32).view(torch.float32)
    (source,) = agree(lambda x: (x.to(half).float(), 1 / x.to(half).float()), x, rtol=0, atol=0)
    assert ("mc_round_fp16" if half is torch.float16 else "mc_from_bf16(mc_to_bf16") in source.code


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_that_lies_apart_is_loaded_once(dtype):
    """The passes after the first find it in an array; one that lies side by side is read again."""
    x, tolerance = rand(8, 64, 200).to(dtype), 2e-2 if dtype is torch.bfloat16 else 1e-5
    for apart in (False, True):
        fn = (lambda x: F.layer_norm(x.transpose(1, 2), (64,))) if apart else lambda x: F.layer_norm(x, (200,))
        (source,) = agree(fn, x, rtol=tolerance, atol=tolerance)
        assert ("kept" in source.code) == apart and (source.code.count("in0[") == 1 or not apart)


def test_a_row_without_an_inside_is_one_loop():
    for fn in (lambda x: F.interpolate(x, scale_factor=2), lambda x: F.pad(x[0], (30, 30), mode="reflect"), lambda x: F.pad(x, (1, 1)),
               lambda x: torch.cat([x, x * 2], -1), lambda x: F.max_pool2d(x.to(memory_format=torch.channels_last), 3, 2, 1)):
        assert not [s for s in agree(fn, rand(4, 5, 9, 40), rtol=1e-5, atol=1e-5) if "inside" in s.code]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool])
def test_what_jumps_in_memory_is_read_ahead(dtype):
    """Into blocks, along the variable in which it is contiguous."""
    x, y, z = ((100 * rand(3, *size)).to(dtype) for size in ((64, 100), (100, 64), (64, 33)))
    for fn in (lambda x, y, z: x.mT.contiguous(), lambda x, y, z: x.mT.contiguous().permute(2, 1, 0).contiguous(),
               lambda x, y, z: y + x.mT, lambda x, y, z: y[:, 7:] + x.mT[:, 7:], lambda x, y, z: torch.cat([x, z], 2).mT.contiguous()):
        assert any("block" in source.code for source in agree(fn, x, y, z, rtol=0, atol=0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [(40,), (300,), (3, 70)])
def test_what_jumps_is_read_ahead_where_columns_are_reduced(rows, dtype):
    """A block of rows at a time, of several dimensions those of the last."""
    x = rand(*rows[:-1], 100, rows[-1]).to(dtype).mT                 # the rows are contiguous
    y, z, dims = rand(*rows, 100, seed=1).to(dtype), rand(*rows, 100, seed=2).to(dtype), tuple(range(len(rows)))
    for fn in (lambda x, y, z: (x.float() * y * z).sum(dims), lambda x, y, z: torch.var_mean(x.float() + y - z, dims)[0],
               lambda x, y, z: (x.float() + y * z).amax(dims), lambda x, y, z: z - (x.float() - y).exp().sum(dims) * x):
        assert any("block" in source.code for source in agree(fn, x, y, z, rtol=1e-4, atol=5e-2))
    if rows[1:] == ():
        assert any("block" in source.code for source in agree(lambda x, y, z: (x + y.float() - z).argmax(0), x, y, z))


@pytest.mark.parametrize("size", [(64, 48), (40, 300), (33, 7)])
def test_where_rows_and_columns_are_as_good_columns_read_ahead(size):
    x, y = rand(*size), rand(*size[::-1], seed=1)
    for dim in (0, 1):
        for fn in (lambda x, y: (x + y.t()).amax(dim), lambda x, y: (x * y.t()).sum(dim), lambda x, y: torch.var_mean(x - y.t(), dim),
                   lambda x, y: (x + y.t()).argmin(dim)):
            (source,) = agree(fn, x, y, rtol=1e-4, atol=1e-5)
            assert ("block" in source.code) == (size[dim] >= 32 and size[1 - dim] >= 16)


@pytest.mark.parametrize("length", [2, 7, 10, 16, 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.uint8])
def test_the_lanes_go_across_short_rows_that_leave_much_of_a_vector_over(length, dtype):
    x = (rand(40, length) * 20).to(dtype)
    functions = [lambda x: x.amax(1), lambda x: x.argmin(1), lambda x: (x.float() + 1).prod(1), lambda x: (x > 3).any(1)]
    if dtype.is_floating_point:
        x[3, 1], x[5] = float("nan"), float("-inf")
        functions = [lambda x: x.softmax(1), lambda x: x.log_softmax(1), lambda x: torch.var_mean(x[6:], 1), *functions]
    for k, fn in enumerate(functions):
        (source,) = agree(fn, x, rtol=2e-3 if dtype is torch.float16 else 1e-5, atol=1e-3 if dtype is torch.float16 else 1e-5)
        across = "const int64_t i0 = lane" in source.code
        assert k != 0 or ('asm("")' in source.code) == across, "g++ does not take two of these rows at once"
        assert k != 0 or across == (length % (16 if dtype is torch.float16 else 8) != 0 and dtype is not torch.uint8)


@pytest.mark.parametrize("length", [3, 8, 17, 31, 40, 1500])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_integers_are_reduced_without_a_clause(length, dtype):
    x = (torch.arange(40 * length).view(40, length) * 7919 % 100 % (2 if dtype is torch.bool else 100)).to(dtype)
    x[3] = x[3, 1]
    for fn in (lambda x: x.amax(1), lambda x: (x.int().argmax(1), x.int().argmin(1)), lambda x: (x.int().amin(1), x.int().argmin(1)),
               lambda x: (x.int().prod(1), (x > 3).any(1), (x > 3).sum(1)), lambda x: x.int() - x.int().amax(1, keepdim=True)):
        (source,) = agree(fn, x)
        assert "reduction(" not in source.code or length >= 128 or length >= 16 and dtype.itemsize == 1
    text = agree(lambda x: x.int().argmax(1), x)[0].code
    assert ("mc_column_extreme" in text) == (length < 32) and ("mc_find" in text) == (length >= 32)
    agree(lambda x: (x.int().argmax(), x.int().argmin()), x[:10].t())
    agree(lambda x: (x.float().sum(1), x.float().amax(1), x.float().var(1)), x)


@pytest.mark.parametrize("rows", [2, 50, 65, 1000])
def test_a_variance_of_columns_is_as_exact_where_the_mean_is_large(rows):
    for mean in (0, 1e3, 1e5, -3e6):
        x = (torch.randn(rows, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(rows)) + mean).float()
        compiled, (source,) = compile_cpp(lambda x: torch.var_mean(x, 0, correction=0), x)
        assert "mc_column_welford" in source.code
        for got, exact in zip(compiled(x), torch.var_mean(x.double(), 0, correction=0)):
            torch.testing.assert_close(got.double(), exact, rtol=2e-6, atol=1e-6)
    for row in (0, rows // 2):                                        # nor does one number take the digits of the others
        x = torch.randn(rows, 40, generator=torch.Generator().manual_seed(rows)) + 3
        x[row] = 1e5
        for got, exact in zip(compiled(x), torch.var_mean(x.double(), 0, correction=0)):
            torch.testing.assert_close(got.double(), exact, rtol=2e-6, atol=0)
    for special in (float("inf"), float("nan"), float("-inf")):
        for row in (0, rows // 2, rows - 1):
            x[row] = special
            agree(lambda x: torch.var_mean(x, 0, correction=0), x, rtol=1e-5, atol=0)
            x[row] = 1.0


@pytest.mark.parametrize("dtype, half", [(torch.float16, "fp16"), (torch.bfloat16, "bf16")])
@pytest.mark.parametrize("width", [301, 304])
def test_half_numbers_side_by_side_are_converted_sixteen_at_a_time(dtype, half, width):
    """The lane loop is a function of one step, which changes nothing but the arrays around it."""
    x, y = rand(40, width).to(dtype), rand(40, width, seed=1).to(dtype)
    tolerance = 2e-3 if dtype is torch.float16 else 2e-2
    for fn in (lambda x, y: x + y, lambda x, y: x.softmax(1), lambda x, y: (x * y).sum(0), lambda x, y: x[1:, 3:].exp() * y[:-1, :-3],
               lambda x, y: x.float() * 2, lambda x, y: F.layer_norm(x, (width,)) + y.flip(0), lambda x, y: (x * 2).t() - y.t()[:, :1],
               lambda x, y: F.embedding(torch.arange(39, 0, -3), x) * 2, lambda x, y: (x.float().sum(1), x.amax(1), x.prod(1), x.argmin(1)),
               lambda x, y: (x * 2 > y, (x * 2).long(), (y + 1).double(), (x > 3).any(1))):
        for source in agree(fn, x, y, rtol=tolerance, atol=tolerance):
            assert f"mc_widen_{half}" in source.code and "[&" not in source.code
            assert width % 16 == 0 or re.search(r"run\(done, \d+\)", source.code), "how many are left over is known"
            assert not [loop for loop in source.code.split("#pragma omp simd")[1:] if f"mc_from_{half}(in0[" in loop.split("}")[0]]


@pytest.mark.parametrize("flush", [False, True])
def test_float16_numbers_are_converted_as_in_eager(flush):
    """All of them, and all halfway between two and beside those; subnormal ones too where those of float32 are flushed."""
    convert_all(torch.float16, flush)


def test_bfloat16_numbers_are_converted_as_in_eager():
    convert_all(torch.bfloat16, False)


def test_int64_to_floats_and_back():
    """All lengths, what lies around a tie of either float, and what fits in no int64."""
    at = torch.Generator().manual_seed(0)

    def around(low, bits):
        ties = (torch.randint(low, 2 * low, (999,), generator=at) << bits) + (1 << bits - 1)
        return [ties - 1, ties, ties + 1, 1 - ties, -ties, -1 - ties]
    lengths = torch.randint(-2**63, 2**63 - 1, (9999,), generator=at) >> torch.randint(0, 64, (9999,), generator=at)
    x = torch.cat([lengths, *around(1 << 23, 7), *around(1 << 23, 35), *around(1 << 52, 9),
                   torch.tensor([0, -1, 2**53 + 1, -2**53 - 1, 2**63 - 1, -2**63])])
    source, = agree(lambda x: (x.float(), x.double(), x.half(), x.bfloat16()), x, rtol=0, atol=0)
    assert "mc_float(" in source.code and "mc_double(" in source.code
    y = x.double() / 3 + torch.rand(len(x), generator=at, dtype=torch.float64)
    y = torch.cat([y, torch.tensor([0.5, -0.5, -0.0, -0.999, 2.0**32 - 0.5, -2.0**32 + 0.5, 2.0**62, -2.0**63], dtype=torch.float64)])
    exact = torch.tensor([int(number) for number in y.tolist()])
    compiled, _ = compile_cpp(lambda y: y.long(), y)
    assert torch.equal(compiled(y)[0], exact)
    y = y.float().clamp(-2.0**63, 2.0**62)
    compiled, _ = compile_cpp(lambda y: y.long(), y)
    assert torch.equal(compiled(y)[0], torch.tensor([int(number) for number in y.tolist()]))


def convert_all(dtype, flush):
    half, name = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype), {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    number = half[~half.isnan()].float()
    bits = torch.cat([number, (number + number.roll(-1)) / 2]).view(torch.int32)
    wide = torch.cat([(bits + k).view(torch.float32) for k in (-1, 0, 1)] + [torch.tensor([1e30, -1e30, 1e-30, float("nan")])])
    torch.set_flush_denormal(flush)
    try:
        ways = agree(lambda x, y: (x.float(), y.to(dtype), x[::2].float(), y.to(dtype).float(), x[7:].float(), y[7:].to(dtype)),
                     half, wide, rtol=0, atol=0)
        for way in ("mc_widen", "mc_narrow", "mc_from", "mc_round" if dtype is torch.float16 else "mc_to"):
            assert any(f"{way}_{name}" in source.code for source in ways)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_maximum_with_a_constant_is_one_instruction_and_keeps_zeros_and_nan(dtype):
    def clamps(x):
        found = (F.relu(x), F.relu6(x), x.clamp(min=0.0), x.clamp(min=-0.0), x.clamp(max=0.0), x.clamp(0.0, 0.0),
                 F.hardtanh(x, -1.0, 0.0), x.clamp(-0.5, 0.5))
        return *found, *[1 / y for y in found]         # has the sign of a zero

    x = torch.cat([rand(30), torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf")])]).repeat(3).to(dtype)
    for source in agree(clamps, x, rtol=0, atol=0):
        assert "mc_max" not in source.code and "mc_min" not in source.code


def test_integral_powers_of_negative_numbers():
    """As products, exact to the last rounding: of a vector with such numbers glibc's function takes ten times as long."""
    x = torch.cat([rand(300), torch.tensor([0.0, -0.0, 1e30, -1e30, 1e-30, float("inf"), -float("inf"), float("nan")])])
    powers = (5, 4, -3, -4, 31, 64)
    for source in agree(lambda x: tuple(x ** n for n in powers), x, rtol=2e-6, atol=1e-44):
        assert "builtin_pow" not in source.code
    agree(lambda x: (x ** 5, x ** -3), x.half(), rtol=1e-3, atol=1e-7)


def test_bfloat16_numbers_that_need_no_rounding_are_not_rounded():
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for source in agree(lambda x: (-x, x.abs(), x.relu(), -x.abs(), x.clamp(-1, 1), torch.where(x > 3, -x, x)), every, rtol=0, atol=0):
        assert "mc_to_bf16" not in source.code


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_powers_of_every_sign(dtype):
    """glibc's function for vectors is given no negative base: it takes those one by one, ten times as long."""
    inf = float("inf")
    some = torch.tensor([0.0, 1, 2, 3, 7, 0.5, 1.5, inf, 1e30, 1e-40, 2.0**24, 2.0**24 + 2, float("nan")], dtype=dtype)
    some = torch.cat([some, -some])
    x, y = some[:, None].expand(-1, len(some)).contiguous(), some.expand(len(some), -1).contiguous()
    source, = agree(lambda x, y: (x ** y, (x ** y).signbit() & (x == x) & (y == y)), x, y, rtol=1e-6, atol=0)
    assert "mc_pow<" in source.code


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_a_library_has_for_vectors_is_left_to_it(dtype):
    """C++ has `fmod` and the like for single numbers only."""
    x, y = rand(40, 30).to(dtype), rand(40, 30, seed=1).to(dtype)
    for fn in (lambda x, y: (x % y, x % 3, torch.fmod(x, 0.3), x // y, torch.nextafter(x, y)),
               lambda x, y: (x.lgamma(), x.digamma(), x.erfinv())):
        assert not any("in0" in source.code for source in agree(fn, x, y, rtol=0, atol=0))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_integers(dtype):
    g = torch.Generator().manual_seed(0)
    low = 0 if dtype is torch.uint8 else -100
    a = torch.randint(low, 100, (333,), generator=g, dtype=dtype)
    b = torch.randint(1, 9, (333,), generator=g, dtype=dtype)
    agree(lambda a, b: (a + b, a * b, a - b, a // b, a % b, torch.div(a, b, rounding_mode="trunc"),
                        torch.fmod(a, b), a & b, a | b,
                        a ^ b, ~a, torch.maximum(a, b), a.clamp(3, 50), a.float() / b, a.bool(), a.sum(),
                        a.amax(), a.argmin(), a.prod()), a, b)
    signed = () if dtype is torch.uint8 else (lambda a, b: (a // -b, a % -b, -a, a.abs(), a.sign()),)
    for fn in signed:
        agree(fn, a, b)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_shifts_by_all_bits(dtype):
    bits = torch.iinfo(dtype).bits
    a = torch.tensor([torch.iinfo(dtype).min, torch.iinfo(dtype).max, 5, 1]).to(dtype)[:, None]
    s = torch.tensor([0, 1, bits - 2, bits - 1, bits, bits + 1, -1]).to(dtype)
    agree(lambda a, s: (a << s, a >> s, torch.bitwise_right_shift(a, bits)), a, s)


def test_shifts_and_bool():
    a, s = torch.tensor([1, -5, 2**40, 7]), torch.tensor([0, 3, 63, 2])
    agree(lambda a, s: (a << s, a >> s), a, s)
    p, q = torch.tensor([True, False, True]), torch.tensor([True, True, False])
    agree(lambda p, q: (p & q, p | q, p ^ q, ~p, p.sum(), p.float() * 2, p.to(torch.int64) + q, p.any(),
                        p.all()), p, q)


def test_casts():
    x = torch.tensor([0.0, -0.5, 1.5, 2.5, -3.7, 100.2, float("nan")])
    agree(lambda x: (x.to(torch.bool), x.double(), x.half(), x.bfloat16()), x)
    x = x[:-1]
    agree(lambda x: (x.to(torch.int64), x.to(torch.int32), x.to(torch.int8), x.to(torch.int16)), x)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="another processor has other answers")
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_casts_of_what_no_integer_is(dtype):
    """The compiler sees the NaN in `sin`, `log` and `where`, and must not make up an integer for it."""
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 3e19, -3e19, 2.0**31, -2.0**31, 1.5]).repeat(7)
    agree(lambda x: [y.to(dtype) for y in (x, x.sin(), x.cos() * 2, x.log(), torch.where(x > 0, x, float("nan")))], x)
    agree(lambda x: x.sin().to(dtype).clamp(-1, 1).to(torch.float32).sum(), x)


INDEXING = {
    "embedding": (lambda x, i: F.embedding(i, x), (60,)),
    "embedding_backward": (lambda x, i: aten.embedding_dense_backward(x[i], i, 37, -1, False), (60,)),
    "gather": (lambda x, i: x.gather(1, i), (37, 9)),
    "index_columns": (lambda x, i: x[:, i], (11,)),
    "index_negative": (lambda x, i: x[i - 20], (11,)),
    "scatter_add": (lambda x, i: x.scatter_add(1, i, x[:, :9] * 2), (37, 9)),
    "index_put_accumulate": (lambda x, i: x.index_put((i,), x[i] * 2, accumulate=True), (60,)),
    "index_add_columns": (lambda x, i: x.index_add(1, i, x[:, :60]), (60,)),
}


@pytest.mark.parametrize("name", INDEXING)
def test_indexing(name):
    fn, shape = INDEXING[name]
    i = torch.randint(0, 37, shape, generator=torch.Generator().manual_seed(3))
    agree(fn, rand(37, 129), i, rtol=1e-5, atol=1e-5)


def test_cross_entropy_and_its_gradient():
    x, t = rand(33, 65), torch.randint(0, 65, (33,), generator=torch.Generator().manual_seed(0))
    t[5] = -100
    agree(lambda x, t: F.cross_entropy(x, t), x, t)
    agree(lambda g, x, t, n: aten.nll_loss_backward(g, x, t, None, 1, -100, n), torch.tensor(1.0), x, t,
          torch.tensor(32.0))


@pytest.mark.parametrize("last", [False, True])
def test_images(last):
    x, w = rand(4, 16, 13, 13), rand(16)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    agree(lambda x, w: aten.native_batch_norm(x, w, w, None, None, True, 0.1, 1e-5), x, w)
    agree(lambda x, w: F.relu(aten.native_batch_norm(x, w, w, w * 0, w * w + 1, False, 0.1, 1e-5)[0]) + x, x,
          w)
    agree(lambda x, w: F.max_pool2d(x, 3, 2, 1), x, w)
    agree(lambda x, w: F.avg_pool2d(x, 3, 1, 1), x, w)
    agree(lambda x, w: F.group_norm(x, 4, w, w), x, w)
    agree(lambda x, w: x.mean((2, 3)), x, w)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [(2, 32, 7, 5), (1, 20, 1, 1), (1, 1, 3, 3), (2, 3, 4, 4)])
def test_a_mask_that_is_the_same_for_all_lanes_is_no_branch(size, dtype):
    """It says where they begin to read, and what is read is chosen by bits."""
    x = rand(*size).to(dtype).contiguous(memory_format=torch.channels_last)
    x[0, 0, 0, 0], x[-1, -1, -1, -1] = math.inf, math.nan
    for fn in (lambda x: F.avg_pool2d(x, 3, 1, 1), lambda x: F.pad(x * 2, (1, 2, 1, 0), value=-3.0),
               lambda x: F.pad(x[:, :, ::2] + 1, (1, 0, 0, 3)), lambda x: torch.cat([x, x[:, :, :1] * 2], 2) + 1):
        sources = agree(fn, x, rtol=1e-2, atol=1e-2)
        if size[1] == 32:
            assert not any(re.search(r"\? \(?\w*\(?in\d", s.code) for s in sources)


@pytest.mark.parametrize("length, times", [(30, 1), (50257, 1), (70001, 2)])
def test_the_exponentials_of_a_long_row_are_kept_as_long_as_the_stack_has_room(length, times):
    source, = agree(lambda x: x.softmax(-1), rand(3, length))
    assert source.code.count("mc_exp(") == times


@pytest.mark.parametrize("size, innermost", [((2, 12, 5, 7), True), ((2, 12, 5, 7), False), ((3, 8), False), ((2, 6, 9), False)])
def test_group_norm_divides_no_positions(size, innermost):
    """Channels of a group and positions are not one dimension where channels are innermost in memory."""
    x, g, w = rand(*size) + 3, rand(*size, seed=1), rand(size[1], seed=2)
    if innermost:
        x, g = (t.contiguous(memory_format=torch.channels_last) for t in (x, g))

    def both(g, x, w):
        out, mean, rstd = aten.native_group_norm(x, w, w, size[0], size[1], math.prod(size[2:]), 2, 1e-5)
        return out, mean, rstd, *aten.native_group_norm_backward(g, x, mean, rstd, w, size[0], size[1], math.prod(size[2:]), 2, [True] * 3)

    code = "".join(s.code for s in agree(both, g, x, w))
    assert not re.search(r"[ir]\d\)* [/%]", code)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_group_norm_has_one_root_for_a_group(dtype):
    """None for an element, where channels are innermost in memory."""
    x, w = (rand(2, 64, 5, 7) + 3).to(dtype).contiguous(memory_format=torch.channels_last), rand(64, seed=1).to(dtype)
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5
    for fn in (lambda x, w: F.group_norm(x, 2), lambda x, w: F.group_norm(x, 2, w, w)):
        sources = agree(fn, x, w, rtol=tolerance, atol=tolerance)
        loops = [loop.split("}")[0] for s in sources for loop in s.code.split("#pragma omp simd")[1:]]
        assert not [loop for loop in loops if "sqrt" in loop]


@pytest.mark.parametrize("fusion", [False, True])
def test_backward_formulas(fusion):
    g, x, b = rand(20, 70), rand(20, 70, seed=1), rand(70, seed=2)
    mean, rstd = x.mean(1, keepdim=True), 1 / (x.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    agree(lambda g, x: aten.gelu_backward(g, x), g, x, fusion=fusion)
    agree(lambda g, x: aten._softmax_backward_data(g, x.softmax(-1), -1, torch.float32), g, x, fusion=fusion)
    agree(lambda g, x, m, r, w: aten.native_layer_norm_backward(g, x, [70], m, r, w, w, [True, True, True]),
          g, x, mean, rstd, b,
          fusion=fusion, rtol=1e-5, atol=1e-5)


def test_adamw_step():
    p, g, m, v = (rand(5000, seed=s) for s in range(4))
    agree(lambda p, g, m, v: (lambda m2, v2: (p * (1 - 1e-4) - 1e-3 * m2 / (v2.sqrt() + 1e-8), m2, v2))(
        m.lerp(g, 0.1), v.abs() * 0.999 + g * g * 0.001), p, g, m, v)


def test_zero_dim_and_empty():
    agree(lambda x: x * 2 + 1, torch.tensor(3.0))
    agree(lambda x: (x + 1, x.sum(), x.sum(0)), torch.empty(0, 5))


def test_two_long_column_sums_in_one_kernel():
    """Each long column reduction has its own flush counter."""
    x = torch.randn(700, 48)
    run, sources = compile_cpp(lambda x: (x.sum(0), ((x - x.sum(0)) ** 2).sum(0)), x)
    for got, want in zip(run(x), (x.double().sum(0), ((x - x.sum(0)).double() ** 2).sum(0))):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("shape, dims", [((256, 512), 0), ((300, 511), 0), ((1000, 64), 0), ((40, 512, 8), (0, 2))])
@pytest.mark.parametrize("light", [False, True])
def test_column_sums_are_about_as_far_from_the_exact_ones_as_in_eager(shape, dims, light):
    """The mean distance: 256 numbers in one sum were five times as far."""
    def f(x):
        return x.sum(dims) if light else x.exp().sum(dims)
    x = rand(*shape).abs()
    if shape[2:]:
        x = x.permute(0, 2, 1).contiguous()[:, :7].permute(0, 2, 1)
    run, sources = compile_cpp(f, x)
    far, as_far = ((y.double() - f(x.double())).abs().mean() for y in (run(x)[0], f(x)))
    assert far <= 2.5 * as_far and ("begin" in sources[0].code) == (light and shape[2:] == ())


@pytest.mark.parametrize("shape, merged", [((3, 8, 5, 7), "280"), ((3, 8, 70, 7), "count"), ((2, 64, 3), "192")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_mean_of_a_row_of_several_dimensions_is_taken_at_once_where_they_fit(shape, merged, dtype):
    x = torch.randn(shape).add(100).to(dtype)
    weight = torch.randn(1, shape[1], *[1] * (len(shape) - 2)).to(dtype)

    def f(x, weight):
        dims = tuple(range(1, x.dim()))
        variance, mean = torch.var_mean(x.float() if dtype is torch.bfloat16 else x, dims, keepdim=True)
        return (x - mean) * torch.rsqrt(variance) * weight
    call, sources = compile_cpp(f, x, weight)
    assert [f", {merged}, mean" in s.code for s in sources if "mc_row_welford(t" in s.code] == [True]
    torch.testing.assert_close(call(x, weight)[0], f(x, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(40, 301), (2000, 33), (3, 2, 1000)])
def test_a_softmax_over_columns_computes_each_exponential_once(shape):
    source, = agree(lambda x: x.softmax(0), rand(*shape) * 3, rtol=1e-5, atol=1e-7)
    assert source.code.count("mc_exp(") == 1 + (shape[0] == 2000), "2,000 rows are too many to keep"
    assert " / " not in source.code.replace("(float)1 / ", ""), "the sum is divided by once for a column"
    assert ("double" in source.code) == (shape[0] > 256)


def test_g_plus_plus_may_take_two_rows_of_a_column_sum_at_once():
    (source,) = agree(lambda x: x.sum(0), rand(7, 400))
    assert "asm" not in source.code
    (source,) = agree(lambda x: x.amax(0), rand(7, 400))
    assert 'asm("")' in source.code


@pytest.mark.parametrize("rows, columns", [((7,), 40), ((65,), 3), ((300,), 700), ((3, 70), 50)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool])
def test_accumulators_of_columns_stay_in_registers_while_some_rows_are_walked(rows, columns, dtype):
    y, dims = rand(*rows, columns) * 3, tuple(range(len(rows)))
    y[..., 5 % rows[-1], 1], y[..., 3, 2] = float("nan"), float("-inf")
    x = y.to(dtype) if dtype.is_floating_point else y.nan_to_num(2, neginf=-7).to(dtype)
    close, kept = {"rtol": 1e-3 if dtype is torch.float16 else 1e-5, "atol": 1e-4}, r"part\d+\[step\]"
    source, *_ = agree(lambda x, y: (y.sum(dims), x.sum(dims), (y * 2 - x.float()).sum(dims)), x, y, **close)
    assert (re.search(kept, source.code) is not None) == (rows[-1] >= 8 and dtype is not torch.bool)
    source, *_ = agree(lambda x, y: (x.amax(dims), (y * 2 - x.float()).amin(dims), (x != 0).any(dims)), x, y)
    assert (re.search(kept, source.code) is not None) == (rows[-1] >= 8 and dtype is not torch.float16)
    source, *_ = agree(lambda y: (y.sum(dims), y.amax(dims)), y, **close)
    assert re.search(kept, source.code) is None
    agree(lambda x, y: (y.nan_to_num(1).clamp(0.9, 1.1).prod(0), y.var(dims), (x.float() * x[:, :1]).sum(0)), x, y, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [3, 5, 12, 17, 33, 47, 100, 197])
def test_the_last_step_of_a_row_has_all_lanes(size, dtype):
    """The lanes too many are not seen in any reduction, and are not stored behind the row, where another column is."""
    def rows(x, mask, w):
        z = torch.where(mask, x, -1) - 3
        return (F.silu(x + w) * mask, x.softmax(-1), x.sum(-1), (x - 7).amax(-1), (x + 7).amin(-1), (x / 8 + 1).float().prod(-1),
                z.softmax(-1) * w, (x > 2).any(-1), (x < 4).all(-1), F.layer_norm(x, (size,), w, w), x.var(-1),
                z.argmax(-1), x.reshape(10, 4, -1).sum((1, 2)))

    def written(x, w):
        x.copy_(F.silu(x + w))

    x, w, base = rand(40, size).to(dtype), rand(size, seed=2).to(dtype), rand(40, size + 2, seed=1).to(dtype)
    x[3, size - 1], x[4] = math.nan, 0.0
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    sources = agree(rows, x, rand(40, size, seed=3) > 0, w, **close)
    if size > 32:       # short rows, next to each other in one kernel, have their lanes across
        assert ("step < 16" in "".join(s.code for s in sources)) == (torch.backends.cpu.get_cpu_capability() == "AVX512")
    want, got = base.clone(), base.clone()
    written(want[:, 1:-1], w)
    minicompile.compile(written)(got[:, 1:-1], w)
    torch.testing.assert_close(got, want, **close)
    assert torch.equal(got[:, [0, -1]], base[:, [0, -1]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_of_sizes_that_vary(dtype):
    """Their last steps, what groups of them keep, and tables, for sizes that are not the first one's."""
    def rows(x, w):
        z = x.softmax(-1)
        return (x.log_softmax(-1), z * w, F.silu(x + w), x.logsumexp(-1), F.layer_norm(x, x.shape[-1:]), (x - 7).amax(-1), x.var(-1),
                z.argmax(-1))

    def images(x):
        return (F.interpolate(x, scale_factor=2, mode="bilinear"), F.interpolate(x, scale_factor=3), F.pad(x, (1, 2, 2, 1), mode="reflect"),
                F.instance_norm(x))

    close = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    rows_of, images_of = (minicompile.compile(f, backend="cpp", fullgraph=True, dynamic=True) for f in (rows, images))
    for n, size in ((48, 47), (33, 5), (3, 1100), (64, 64), (37, 2), (2, 9000), (200, 33)):
        x, w = rand(n, size).to(dtype), rand(size, seed=1).to(dtype)
        torch.testing.assert_close(rows_of(x, w), rows(x, w), **close)
    for n, height, width in ((2, 9, 12), (3, 4, 40), (2, 3, 5000), (8, 33, 3)):
        x = rand(n, 3, height, width).to(dtype)
        torch.testing.assert_close(images_of(x), images(x), **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float64])
def test_the_inside_of_rows_whose_sizes_vary(dtype, monkeypatch):
    """It is found when the function runs: for sizes other than the first ones, without an inside, and for rows that there are none of."""
    def padded(x):
        return (F.pad(x, (2, 1, 1, 3)), F.pad(x, (2, 3, 0, 1)) * 2, F.pad(x, (-1, 2, 1, 0)), x.flip(-1)[..., 1:],
                *(f(F.pad(x, (1, 2, 2, 1), mode=mode)) for mode in ("reflect", "replicate") for f in (torch.clone, torch.neg)))

    sources = []
    monkeypatch.setattr(logs, "watchers", [lambda kind, **data: sources.extend(data["compiled"].sources if kind == "schedule" else [])])
    for first in ((2, 3, 9, 600), (2, 3, 20, 30)):
        compiled = minicompile.compile(padded, backend="cpp", fullgraph=True, dynamic=True)
        for shape in (first, (2, 4, 10, 12), (2, 3, 3, 4), (2, 2, 7, 1100), (3, 2, 4, 3), (2, 2, 5, 33), (2, 3, 4, 5000)):
            x = (rand(*shape) * 20).to(dtype)
            for ours, eager in zip(compiled(x), padded(x), strict=True):
                assert torch.equal(ours, eager)
        minicompile.reset()
    assert any("run(begin, end, true)" in s.code and "__builtin_memmove" in s.code and "while (begin" in s.code for s in sources)


def test_views_of_sizes_that_vary_leave_no_division_by_them(monkeypatch):
    """Where dims are split and merged beside others that vary, and where all dims that were split come together again."""
    def shuffled(x):
        n, c, h, w = x.shape
        return (F.pixel_shuffle(x, 2) * 2, x.view(n, c, h * w).view(n, c, h, w) + 1, x.view(n, 2, c // 2, h * w).sum(2),
                x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h * w).exp())

    sources = []
    monkeypatch.setattr(logs, "watchers", [lambda kind, **data: sources.extend(data["compiled"].sources if kind == "schedule" else [])])
    compiled = minicompile.compile(shuffled, backend="cpp", fullgraph=True)
    for n, h, w in ((2, 10, 13), (3, 20, 7), (4, 5, 40), (2, 3, 2)):
        x = rand(n, 8, h, w)
        for ours, eager in zip(compiled(x), shuffled(x), strict=True):
            torch.testing.assert_close(ours, eager)
    varying = [s.code for s in sources if "sizes[0]" in s.code]
    assert varying and not [c for c in varying if re.search(r"% \(*[^()]*\bs\d", c)]


def test_columns_of_sizes_that_vary():
    """Their arrays are on the stack: no longer than a number says, whatever the call that is compiled has."""
    def columns(x):
        twice = torch.cat([x[:, :4], x[:, :4]], -1)[:, :, 1:].tanh().softmax(1)
        return x.sum(1), x.var(1), x[:, :, ::2].sum(1), x[:, :, 1:].amax(1), twice

    compiled = minicompile.compile(columns, backend="cpp", fullgraph=True, dynamic=True)
    for shape in ((64, 30, 100), (64, 5, 17), (2, 4, 77), (1, 4, 1_500_000)):
        x = rand(*shape)
        torch.testing.assert_close(compiled(x), columns(x))


def test_short_rows_of_halves_are_walked_along_where_this_is_faster():
    """Not where integers are counted, whose last step has not all lanes, nor where what is read lies apart. Three floats need no step."""
    def code(fn, *inputs):
        return "".join(s.code for s in agree(fn, *inputs, rtol=2e-2, atol=2e-2))

    def masked_mean(x, m):
        return (x * m).sum(-1) / m.sum(-1).clamp(min=1)

    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    table = torch.arange(15) * 3 % 15
    for dtype in (torch.bfloat16, torch.float16):
        def x(size, dtype=dtype):
            return rand(64, size).to(dtype)
        assert ("step < 16" in code(lambda x: x.sum(-1), x(12))) == wide
        assert ("int64_t chunk" in code(masked_mean, x(20), rand(64, 20) > 0)) == wide
        assert "int64_t chunk" not in code(masked_mean, x(12), rand(64, 12) > 0)
        assert "int64_t chunk" not in code(lambda x: ((x > 0).sum(-1), x.sum(-1)), x(20))
        assert "int64_t chunk" not in code(lambda x, i: x[:, i].sum(-1), x(15), table)
        assert "int64_t chunk" not in code(lambda x, m: (F.pad(x, (1, 1)) * m).sum(-1), x(18), rand(64, 20) > 0)
    for size in (3, 4, 5):
        x, w = rand(64, size), rand(size, seed=1)
        assert ("step < 16" in code(lambda x: x.sum(-1), x)) == (wide and size != 3)
        assert ("step < 16" in code(lambda x, w: x + w, x, w)) == (wide and size != 4)


def test_columns_of_few_rows_are_added_up_in_floats():
    source, = agree(lambda x: (x.sum(0), x.var(0), x.mean(0)), rand(64, 64), rtol=1e-5, atol=1e-5)
    assert "total" not in source.code and "centre" not in source.code


def test_equal_numbers_have_equal_shares_of_a_softmax():
    for n in (3, 7, 49, 1000):
        agree(lambda x: x.softmax(-1), torch.full((5, n), 2.5), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_depends_on_the_channel_only_is_computed_once_where_channels_are_innermost(dtype):
    x = rand(2, 40, 5, 5).to(dtype).contiguous(memory_format=torch.channels_last)
    mean, weight, bias = (rand(40, seed=k).to(dtype) for k in (1, 2, 3))
    source, = agree(lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b), x, mean, mean.abs() + 0.5, weight, bias)
    row = source.code.partition("for (int64_t i0")[2]
    assert "sqrt" in source.code and "sqrt" not in row
    assert dtype is torch.float32 or row.count("mc_widen") == 1


def test_halves_are_not_converted_for_a_pass_that_needs_what_was_kept():
    source, = agree(lambda x: x.softmax(-1), rand(40, 96).bfloat16())
    assert source.code.count("mc_widen_bf16(") == 2


@pytest.mark.parametrize("maximum", [lambda x: x.abs(), lambda x: -x])
def test_a_sum_of_exponentials_below_another_maximum_may_be_too_small_for_a_reciprocal(maximum):
    def f(x):
        e = (x - maximum(x).amax(-1, keepdim=True)).exp()
        return e / e.sum(-1, keepdim=True)
    agree(f, torch.full((4, 37), -50.0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [(5, 64), (3, 75), (4, 9)])
def test_bytes_next_to_halves_are_converted_sixteen_at_a_time(half, size):
    x, mask, bytes_ = rand(*size).to(half), rand(*size, seed=1) > 0, (rand(*size, seed=2) * 50).to(torch.int8)
    for fn in (lambda x, m, q: x.masked_fill(m, -torch.inf).amax(1), lambda x, m, q: (x * m).sum(1) / m.sum(1), lambda x, m, q: x * q,
               lambda x, m, q: (x * 3 > q, x.relu() + 1), lambda x, m, q: (x * 20).to(torch.int8) + q,
               lambda x, m, q: (~m, x * m, m & (x > 0)),
               lambda x, m, q: (q.view(torch.uint8) + 100) * x, lambda x, m, q: (x.abs() * 90).to(torch.uint8),
               lambda x, m, q: x[:, 2:] * m[:, :-2] + q[:, 1:-1], lambda x, m, q: torch.where(m, x * 2, q).sum(0),
               lambda x, m, q: x.t() * m.t().contiguous(), lambda x, m, q: x.masked_fill(m, -torch.inf).softmax(1)):
        agree(fn, x, mask, bytes_, rtol=2e-2, atol=2e-2)
    (source,) = agree(lambda x, m: x * m > 0.5, rand(5, 64).to(half), rand(5, 64, seed=1) > 0)
    assert "mc_widen_u8(" in source.code and "mc_narrow_u8(" in source.code


@pytest.mark.parametrize("size", [(3, 16), (4, 9), (2, 2500), (2, 3, 40)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16])
def test_what_is_counted_in_a_row_is_as_wide_as_its_elements(size, dtype):
    x, y = torch.full(size, 1 if dtype is torch.bool else torch.iinfo(dtype).max, dtype=dtype), rand(*size)
    x[..., 1:5] = 0
    dims = tuple(range(1, len(size)))
    agree(lambda x, y: ((x.to(torch.int32) > 0).sum(dims), ((y > 0) & (x.double() > 0)).sum(dims), (x * y).sum(dims) / x.sum(dims)), x, y)
    agree(lambda x, y: ((x != 0).any(-1), (x[..., 5:] != 0).all(-1), ((y > 0) & (x != 0)).any(-1), (y.double() > 3).any(-1)), x, y)
    if dtype is torch.bool:
        agree(lambda x: (x.amax(-1), x.amin(-1), x[..., 5:].amin(-1)), x)
    (source,) = agree(lambda x: (x.sum(dims), x.float().mean(dims)), x)
    assert "int32_t part" in source.code and ("mc_widen_" in source.code) == (dtype.itemsize == 1 and size[-1] >= 16)


@pytest.mark.parametrize("where", [0, 40, 1100, None])
def test_the_extreme_of_a_row_of_doubles_with_a_nan(where):
    x = rand(3, 1200).double()
    if where is not None:
        x[1, where] = torch.nan
    for row in (x, x[:, where or 0:][:, :50]):
        (source,) = agree(lambda x: (x.amax(-1), x.amin(-1)), row.contiguous())
        assert "int64_t bad" in source.code


def powers(z, w):
    z = torch.view_as_complex(z)
    for _ in range(24):
        w = w * w * z
    return torch.view_as_real(w)


@pytest.mark.parametrize("function", [
    powers, lambda z, w: torch.view_as_real(torch.view_as_complex(z).conj()[:, :3] * w[:, :3]),
    lambda z, w: torch.view_as_real((torch.view_as_complex(z) * w).conj()[1:] * w[1:].conj()),
    lambda z, w: torch.view_as_real(torch.view_as_complex(z / 0) * w.real)], ids=["powers", "view", "views", "infinite"])
def test_products_of_pairs_with_whatever_is_complex(function, monkeypatch):
    monkeypatch.setattr(minicompile.config, "raise_on_internal_error", True)
    z, w = rand(5, 4, 2), torch.polar(torch.ones(5, 4), rand(5, 4))
    torch.testing.assert_close(minicompile.compile(function)(z, w), function(z, w), equal_nan=True)


def rotated(x, f):
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * f).flatten(-2).type_as(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [
    rotated, lambda x, f: rotated(x, f.conj()), lambda x, f: rotated(x, 2 * f),
    lambda x, f: torch.view_as_real(torch.view_as_complex(x.float().reshape(3, 40, 32, 2)) * f * f.real).flatten(-2).type_as(x)])
def test_products_of_pairs_that_are_viewed_as_complex_numbers_are_computed_by_loops(function, dtype):
    x, f = rand(3, 40, 64).to(dtype), torch.polar(torch.ones(40, 32), rand(40, 32))
    sources = agree(function, x, f, rtol=0, atol=0)
    assert any("i1 = lane" in source.code and "2*i1 + 1]" in source.code for source in sources), "the lane runs along the pairs"


def test_the_numbers_of_a_pair_are_written_by_one_kernel():
    c, s = rand(1, 40, 50), rand(1, 40, 50, seed=1)
    source, = agree(lambda x, c, s: torch.stack([x[..., ::2] * c - x[..., 1::2] * s, x[..., ::2] * s + x[..., 1::2] * c], -1),
                    rand(8, 40, 100), c, s, rtol=1e-6, atol=1e-6)
    assert "out1" not in source.code, "through one pointer, so that they are one vector"


def test_a_chunk_that_lies_in_memory_is_reduced_there():
    source, = agree(lambda x: (x.var(-1), x.mean(-1), x.argmax(-1)), rand(9, 3000), rtol=1e-5, atol=1e-6)
    assert "float t_" not in source.code and "float* t_" in source.code
    source, = agree(lambda x: (x.var(-1), x + 1), rand(9, 3000), rtol=1e-5, atol=1e-6)
    assert "float t_" in source.code


@pytest.mark.parametrize("length", [127, 128, 300, 1000, 2500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_long_rows_have_several_vectors_of_partial_results(dtype, length):
    x = (rand(5, length) * 3).to(dtype)

    def f(x):
        return x.sum(-1), (x * x).sum(-1), x.amax(-1), x.amin(-1), (x > 5).any(-1), (x > 5).sum(-1), (x / x.abs().clamp(min=1)).prod(-1)
    text = "".join(s.code for s in agree(f, x, rtol=1e-4, atol=1e-4))
    assert ("s[32];" in text) == (length >= 128)
    if dtype.is_floating_point:
        x[1, 3], x[2, -1], x[3, 100] = torch.nan, torch.nan, -torch.inf
        agree(f, x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fn", [lambda x: x.sum(-1), lambda x: x.mean(-1), lambda x: torch.var_mean(x, -1)[1]])
def test_a_sum_of_equal_numbers_is_good(fn):
    """Of 32 partial sums each has 31 additions, whose errors agree. So the error is 3.3 to 4.6 units on average, in whichever order
    they are added up. Of one vector of partial sums it is 27, 14 or 7, by the width."""
    x = torch.linspace(0.05, 1, 300)[:, None].repeat(1, 1000)
    call, _ = compile_cpp(fn, x)
    exact = fn(x.double())
    assert ((call(x)[0] - exact).abs() / exact).mean() < 5.5 * 2 ** -24


def test_additions_beside_an_exponential_have_one_vector():
    source, = agree(lambda x: x.exp().sum(-1), rand(5, 1000), rtol=1e-5, atol=1e-5)
    assert "s[32]" not in source.code


def test_a_condition_that_a_reduction_gave_is_not_computed_again_around_the_lanes():
    def f(x):
        x = x[1:4, 1:8]
        return torch.where(x.any(), x, 2).mean()
    agree(f, rand(6, 10))


@pytest.mark.parametrize("fn", [torch.exp, torch.exp2])
def test_exponentials_of_what_is_masked_take_no_longer_than_others(fn):
    """A product that is too small for a float costs the processor a hundred cycles, also if it is rounded to 0."""
    small = torch.tensor([-torch.inf, -1e9, -3e4, -400, -200, -177, -176, -175, -152, -151, -150, -149, -110, -104, -103.5, -100, -90, -87])
    agree(fn, torch.cat([small, small - 0.4]))
    run = minicompile.compile(fn, backend="cpp")

    def took(value):
        x, best = torch.full((1 << 16,), value), torch.inf
        for _ in range(20):
            start = time.process_time()
            run(x)
            best = min(best, time.process_time() - start)
        return best
    assert took(-torch.inf) < 3 * took(-1.0) and took(-300.0) < 3 * took(-1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows, columns", [(32, 16), (61, 47), (80, 64), (40, 100)])
def test_short_rows_do_each_pass_in_groups(rows, columns, dtype):
    """More rows than whole groups, NaN and infinities in some, and a row value that is a tuple, an input or a mask."""
    x, y = rand(rows, columns).to(dtype) * 3, rand(rows, 1).to(dtype)
    for row, value in enumerate((math.nan, math.inf, -math.inf)):
        x[row * 9, row] = value
    x[5] = -math.inf
    fns = {"log_softmax": lambda x, y: x.log_softmax(-1), "softmax": lambda x, y: x.softmax(-1), "logsumexp": lambda x, y: x.logsumexp(-1),
           "layer_norm": lambda x, y: F.layer_norm(x, x.shape[-1:]), "std": lambda x, y: x.std(-1),
           "input": lambda x, y: (x / y.exp()).softmax(-1),
           "where": lambda x, y: torch.where(x.amax(-1, True) > y, x, y).log_softmax(-1) * y.sigmoid()}
    for name, fn in fns.items():
        compiled, (source, *_) = compile_cpp(fn, x, y)
        short = columns * x.dtype.itemsize <= 400 or name in ("log_softmax", "logsumexp", "where") or dtype is torch.bfloat16
        assert ("row0" in source.code) == (short and rows >= 32 * torch.get_num_threads()), name
        found, eager, exact = compiled(x, y)[0].double(), fn(x, y).double(), fn(x.double(), y.double())
        there = exact.isfinite() & eager.isfinite()
        torch.testing.assert_close(found[~there], eager[~there], equal_nan=True)
        slack = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float64: 1e-14}[dtype]
        assert (found - exact)[there].abs().max() <= 4 * (eager - exact)[there].abs().max() + slack, name


@pytest.mark.parametrize("count, grouped", [(2, True), (8, False)])
def test_what_a_group_of_rows_keeps_fits_on_a_small_stack(count, grouped):
    def shares(x):
        exps = [(x.double() * k).exp() for k in range(1, count + 1)]
        return sum(e / e.sum(-1, True).log1p() for e in exps)
    x = torch.randint(0, 3, (64, 200), dtype=torch.uint8)
    compiled, (source,) = compile_cpp(shares, x)
    assert source.code.count("double kept") == count and ("row0" in source.code) == grouped
    torch.testing.assert_close(compiled(x)[0], shares(x))
