"""Fusion against the unfused program: random programs, and the patterns that matter by name."""
import random

import pytest
import torch
import torch.nn.functional as F

from minicompile.ch01_graphs.fake import FakeMode
from minicompile.ch01_graphs.trace import trace
from minicompile.ch06_decompositions.decompose import decompose
from minicompile.ch07_loops.ir import Loop
from minicompile.ch07_loops.lower import Options, lower
from minicompile.ch08_fusion.dependencies import remove_dead
from minicompile.ch08_fusion.fuse import fuse, fuse_groups
from minicompile.ch08_fusion.groups import Fuser, FusionOptions
from minicompile.ch08_fusion.kernel import Kernel
from minicompile.ch08_fusion.reference import run_kernel, verify_schedule
from minicompile.ch11_runtime.host import compile_schedule

aten = torch.ops.aten


def lowered(fn, args, inline=False, **kw):
    mode = FakeMode()
    gm = decompose(trace(fn, [mode.from_real(a) for a in args]))
    return lower(gm, Options(**kw) if inline else Options(max_ops=1, **kw))


def check(fn, args, inline=False, **kw):
    """Fuse `fn` and compare the host program, which runs the fused loops in planned memory, with eager."""
    program = lowered(fn, args, inline, **kw)
    schedule = fuse(program)
    verify_schedule(schedule)
    def fresh(): return [a.clone() for a in args]
    kept = fresh()
    expected = fn(*kept)
    with torch.no_grad():
        given = fresh()
        got = compile_schedule(schedule, "loops")(list(given))
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, check_stride=True)
        for a, b in zip(given, kept):
            torch.testing.assert_close(a, b)
    return schedule


def kernels(schedule):
    return [s for s in schedule.steps if isinstance(s, Kernel)]


def test_a_chain_is_one_kernel():
    s = check(lambda x, b: [torch.relu(torch.sin(x + b) * 2).exp()], [torch.randn(8, 64), torch.randn(64)])
    (k,) = kernels(s)
    assert len(k.loops) > 2 and len(k.outputs) == 1 and len(k.local) == len(k.loops) - 1
    assert s.decisions and all(d.reason for d in s.decisions)


def test_softmax_is_one_kernel():
    s = check(lambda x, b: [F.softmax(x + b, -1)], [torch.randn(8, 64), torch.randn(64)])
    (k,) = kernels(s)
    assert len(k.vars) == 1 and len(k.reduction_vars) == 1 and k.outputs and not set(k.local) & set(k.outputs)


def test_layer_norm_is_one_kernel_over_flat_rows():
    s = check(lambda x, w, b: [F.layer_norm(x, (64,), w, b)], [torch.randn(4, 6, 64), torch.randn(64), torch.randn(64)])
    (k,) = kernels(s)
    assert [v.size for v in k.vars] == [24] and [v.size for v in k.reduction_vars] == [64]


def test_dims_that_everyone_merges_are_merged():
    (k,) = kernels(check(lambda x: [(x + 1).sin()], [torch.randn(2, 3, 4, 5)]))
    assert [v.size for v in k.vars] == [120]


def test_flat_and_split_loops_meet():
    s = check(lambda x, y: [((x + 1).reshape(512) * y).sin()], [torch.randn(8, 64), torch.randn(512)])
    assert len(kernels(s)) == 1


def test_unequal_factorisations_stay_apart_or_agree():
    check(lambda x, b: [(x + b).reshape(4, 6) * torch.arange(6)], [torch.randn(6, 4), torch.randn(4)])


def test_transposed_consumer_is_reordered():
    s = check(lambda x: [x.sin(), x.sin().t().contiguous() + 1], [torch.randn(8, 64)])
    assert len(kernels(s)) == 1


def test_sums_over_the_same_rows_share_a_kernel():
    s = check(lambda g, x: [(g * x).sum(-1), g.sum(-1), (x * x).mean(-1)], [torch.randn(32, 48), torch.randn(32, 48)])
    assert len(kernels(s)) == 1


def test_column_sum_does_not_join_row_sum():
    s = check(lambda x: [x.sum(0), x.sum(1)], [torch.randn(64, 64)])
    assert len(kernels(s)) == 2
    assert any("different elements" in d.reason for d in s.decisions if not d.accepted)


def test_producer_joins_a_column_sum():
    s = check(lambda x, g: [(x.sin() * g), (x.sin() * g).sum(0)], [torch.randn(64, 32), torch.randn(64, 32)])
    assert len(kernels(s)) == 1


def test_group_norm_statistics_and_use():
    check(lambda x, w, b: [F.group_norm(x, 4, w, b)], [torch.randn(2, 8, 5, 5), torch.randn(8), torch.randn(8)])
    x = torch.randn(2, 8, 5, 5).to(memory_format=torch.channels_last)
    check(lambda x: [(x - x.mean((2, 3), keepdim=True)).relu()], [x])


def test_batch_norm_training_updates_statistics():
    def f(x, w, b, mean, var):
        y, _, _, m, v = aten._native_batch_norm_legit_functional(x, w, b, mean, var, True, 0.1, 1e-5)
        mean.copy_(m)
        var.copy_(v)
        return [y.relu()]
    check(f, [torch.randn(4, 6, 5, 5), torch.randn(6), torch.randn(6), torch.zeros(6), torch.ones(6)])


def test_update_in_place_waits_for_readers():
    def f(p, g, m):
        new_m = m * 0.9 + g * 0.1
        new_p = p - 0.1 * new_m
        old_norm = (p * p).sum()
        m.copy_(new_m)
        p.copy_(new_p)
        return [old_norm]
    s = check(f, [torch.randn(16, 32) for _ in range(3)])
    assert s.program.buffers


def test_update_from_other_elements():
    def f(x):
        y = x.flip(0) + 1
        x.copy_(y)
        return [y.sum(0)]
    check(f, [torch.randn(7, 5)])


def test_library_calls_between_keep_their_order():
    def f(x, w, v):
        h = torch.mm(x, w).relu()
        return [torch.mm(h, v) + h.sum(), h * 2]
    check(f, [torch.randn(8, 16), torch.randn(16, 12), torch.randn(12, 4)])


def test_scatter_and_gather():
    def f(x, i, s):
        y = x.index_select(0, i) * 2
        z = torch.zeros(6, 5).index_add(0, i, y + s)
        return [z.sin() + x, y]
    check(f, [torch.randn(6, 5), torch.tensor([0, 3, 3, 1]), torch.randn(4, 5)])


def test_empty_tensors():
    check(lambda x: [x + 1, (x * 2).sum(0), (x * 2).sum(1)], [torch.randn(0, 5)])


def test_reductions_to_a_scalar_split_or_not():
    x = torch.randn(40000)
    for split in (True, False):
        check(lambda x: [x / x.sum(), (x * 2).amax()], [x], split_reductions=split, threads=8)


def random_program(rng, steps):
    """A function over (12, 16) matrices, made of random steps, and how many of its values it returns."""
    plan = [(rng.choice(["unary", "binary", "row", "column", "transpose", "flat", "softmax", "slice", "broadcast", "mm",
                         "cumulative"]), rng.random(), rng.random()) for _ in range(steps)]

    def fn(a, b, c):
        values = [a, b]
        for kind, p, q in plan:
            x, y = values[int(p * len(values))], values[int(q * len(values))]
            if kind == "unary":
                z = [torch.sin, torch.tanh, torch.neg][int(q * 3)](x)
            elif kind == "binary":
                z = x + y if p < q else x * y.cos()
            elif kind == "row":
                z = x - [torch.sum, torch.amax, torch.mean][int(q * 3)](x, 1, keepdim=True) * 0.1
            elif kind == "column":
                z = y * 0.5 + x.sum(0) * 0.1
            elif kind == "transpose":
                z = (x.t().contiguous() + 1).t()
            elif kind == "flat":
                z = (x.reshape(-1) * 2).reshape(2, 96).cos().reshape(12, 16)
            elif kind == "softmax":
                z = F.softmax(x, int(q * 2))
            elif kind == "slice":
                z = torch.cat([x[:, 8:], y[:, :8]], 1)
            elif kind == "broadcast":
                z = x * c + y[:1]
            elif kind == "mm":
                z = torch.mm(x, y.t().contiguous()).tanh().mm(x) * 0.1
            else:
                z = x.reshape(3, 4, 16).sum(1, keepdim=True).expand(3, 4, 16).reshape(12, 16).tanh()
            values.append(z)
        return [v for k, v in enumerate(values[2:]) if k % 3 == 2 or k == steps - 1]
    return fn


@pytest.mark.parametrize("seed", range(40))
def test_random_programs(seed):
    rng = random.Random(seed)
    fn = random_program(rng, rng.randint(3, 14))
    torch.manual_seed(seed)
    args = [torch.randn(12, 16), torch.randn(12, 16), torch.randn(16)]
    s = check(fn, args, inline=seed % 3 == 0)
    assert len(kernels(s)) <= sum(isinstance(n, Loop) for n in s.program.nodes)


def test_parts_of_a_cat_are_one_kernel():
    def f(a, b, c):
        return [torch.cat([torch.mm(a, b), torch.mm(b, c), torch.mm(c, a)], 1)]
    s = check(f, [torch.randn(16, 16) for _ in range(3)])
    assert len(kernels(s)) == 1


@pytest.mark.parametrize("strides, sizes, distance, expected", [
    ((192, 1), (8, 64), 64, True), ((192, 1), (8, 64), 128, True), ((192, 1), (8, 64), 32, False),
    ((192, 1), (8, 64), 192, False), ((192, 1), (8, 64), 192 * 8, True), ((1,), (64,), 64, True), ((1,), (64,), 63, False),
    ((192, 1), (8, 64), 129, False)])
def test_disjoint_accesses(strides, sizes, distance, expected):
    from minicompile.ch01_graphs.symbolic import Symbol
    from minicompile.ch08_fusion.legality import disjoint
    index = sum((Symbol(f"i{k}", n).expr * s for k, (s, n) in enumerate(zip(strides, sizes))), 0)
    assert disjoint(index, index + distance) is expected and disjoint(index + distance, index) is expected
    grid = [sum(s * i for s, i in zip(strides, point)) for point in torch.cartesian_prod(
        *[torch.arange(n) for n in sizes]).reshape(-1, len(sizes)).tolist()]
    assert expected is set(grid).isdisjoint(g + distance for g in grid)


def test_disjoint_accesses_where_sizes_vary():
    from minicompile.ch01_graphs.symbolic import Symbol
    from minicompile.ch08_fusion.legality import disjoint
    s, t = Symbol("s0", None, 2).expr, Symbol("s1", None, 2).expr
    i, j = Symbol("i0", s).expr, Symbol("i1", t).expr
    index = t * i + j
    for distance, expected in ((s * t, True), (s * t + 3, True), (2 * s * t, True), (s * t - 1, False), (t, False), (s, False),
                               (i * t + s * t, False)):
        assert disjoint(index, index + distance) is expected and disjoint(index + distance, index) is expected


def test_the_second_halves_of_split_sums_share_a_kernel():
    def f(g, x, w):
        d = g * torch.cos(x) * w
        return [d, d.sum(0), (d * x).sum(0)]
    s = check(f, [torch.randn(4096, 16) * 0.1, torch.randn(4096, 16), torch.randn(16)], inline=True, threads=64)
    assert len(kernels(s)) == 2


def test_empty_result_of_an_accumulation_has_memory():
    """All its loops are empty, so no step writes it, and its last version is an alias of the first."""
    import minicompile

    def scatter(x):
        return torch.zeros_like(x).scatter_add(0, torch.zeros_like(x, dtype=torch.long), x)
    x = torch.randn(0, 6)
    assert minicompile.compile(scatter, backend="loops", fullgraph=True)(x).shape == (0, 6)


def test_what_a_kernel_makes_is_on_the_device_that_it_writes():
    """And not on the one where new tensors are by default: the loops of a GPU were run with positions on the CPU."""
    x, out = torch.arange(12.0).reshape(3, 4), torch.full((3, 7), -1.0)
    gm = trace(lambda a: [torch.ops.aten.constant_pad_nd.default(a, [1, 2], 0.5)], [FakeMode().from_real(x)])
    [kernel] = fuse(lower(gm)).steps
    with torch.device("meta"):
        run_kernel(kernel, {kernel.inputs[0]: x, kernel.outputs[0]: out}, {})
    torch.testing.assert_close(out, F.pad(x, [1, 2], value=0.5))


def test_everybody_knows_what_runs_before_after_all_fusions():
    """What `merge` tells to the successors of the two groups is what a walk through the graph finds."""
    def f(x, *ws):
        ys = [(x @ w).relu() * w for w in ws]
        norm = torch.stack([y.square().sum() for y in ys] + [(y + 1).amax() for y in ys]).sum()
        return [y / norm + y.mean() for y in ys] + [norm.sqrt()]
    program = lowered(f, [torch.randn(8, 8) for _ in range(7)])
    fuser = Fuser(program, remove_dead(program), FusionOptions())
    fuse_groups(fuser)
    before = dict.fromkeys(fuser.groups, 0)
    for _ in before:
        for i, g in fuser.groups.items():
            for s in {fuser.find(s) for s in g.successors} - {i}:
                before[s] |= before[i] | 1 << i
    alive = sum(1 << i for i in before)
    assert {i: g.ancestors & alive for i, g in fuser.groups.items()} == before
    assert len(before) < len(fuser.nodes) // 2
