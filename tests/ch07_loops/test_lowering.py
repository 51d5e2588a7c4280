"""What becomes a loop, what stays lazy, which layouts come out, and that the numbers are eager's."""
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

import minicompile
from minicompile.ch01_graphs.fake import FakeMode, FakeTensor
from minicompile.ch01_graphs.trace import Recorder, trace
from minicompile.ch06_decompositions import PRIMITIVES
from minicompile.ch06_decompositions.decompose import decompose
from minicompile.ch07_loops.builder import Builder
from minicompile.ch07_loops.ir import Extern
from minicompile.ch07_loops.lazy import Options
from minicompile.ch07_loops.lower import lower
from minicompile.ch07_loops.table import LOWERINGS
from minicompile.ch07_loops.verify import print_program, verify
from minicompile.ch08_fusion.fuse import fuse
from minicompile.ch08_fusion.kernel import Kernel
from minicompile.ch09_triton.emit import emit_triton
from minicompile.errors import Unsupported

from .helpers import check, externs, loops, program_of, run_program

aten = torch.ops.aten


def R(*size):
    return torch.randn(*size)


def test_pointwise_chain_is_one_loop():
    program = check(lambda x, y, b: F.gelu(x + b) * torch.sigmoid(y) - 2, [R(5, 7), R(5, 7), R(7)])
    assert len(program.nodes) == 1
    assert sum(i.op == "load" for i in program.nodes[0].body) == 3
    assert program.nodes[0].origins


def test_of_two_zeros_the_first_is_the_larger_wherever_they_are():
    x = torch.full((33,), -0.0)
    assert minicompile.compile(lambda x: torch.atan2(x, x.relu()), backend="loops")(x).equal(torch.atan2(x, x))


def test_shared_operand_is_evaluated_once():
    def chain(x):
        for _ in range(30):
            x = x * x.sin()
        return x
    program = check(chain, [R(4)])
    assert sum(i.op == "sin" for loop in loops(program) for i in loop.body) == 30


def test_body_size_is_bounded():
    def wide(*xs):
        return sum(x * 2 for x in xs)
    program = check(wide, [R(3) for _ in range(40)])
    for loop in loops(program):
        assert len({i.args[0] for i in loop.body if i.op == "load"}) <= 12


def test_views_cost_nothing():
    program = check(lambda x: (x.t()[1:3], x.view(2, 6, 4).permute(2, 0, 1), x.unsqueeze(1).expand(12, 5, 4)), [R(12, 4)])
    assert program.nodes == []


def test_matmul_takes_transposed_operand_without_copy():
    program = check(lambda x, w: torch.mm(x, w.t()), [R(4, 8), R(6, 8)])
    assert [type(n) for n in program.nodes] == [Extern]
    assert program.nodes[0].args[1].layout.stride == (1, 8)


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_layouts_follow_eager(form):
    x = R(2, 4, 5, 6).contiguous(memory_format=form)
    program = check(lambda x, y: (F.relu(x) + 1, x.transpose(1, 2) * y), [x, R(2, 5, 4, 6)])
    loop = loops(program)[0]
    store = next(i for i in loop.body if i.op == "store")
    last = loop.vars[-1]
    from minicompile.ch01_graphs.symbolic import coefficient
    assert coefficient(store.args[1], last) == 1


def test_convolution_keeps_channels_last():
    x, w = (R(*s).contiguous(memory_format=torch.channels_last) for s in [(2, 4, 8, 8), (6, 4, 3, 3)])
    program = check(lambda x, w: F.relu(F.conv2d(x, w, None, 1, 1)), [x, w])
    call, = externs(program)
    assert program.buffers[call.outputs[0]].layout.stride == (384, 1, 48, 6)


SPECIAL = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.5, -2.5, 3e38])


@pytest.mark.parametrize("op", [
    lambda x: x.amax(), lambda x: x.argmax(), lambda x: x.argmin(), lambda x: torch.maximum(x, x.flip(0)), lambda x: x.sum(),
    lambda x: (x > 0) | (x != x), lambda x: torch.where(x == x, x, 7), lambda x: x.to(torch.int32) * 0, lambda x: x.relu(),
    lambda x: x.clamp(-1, 1), lambda x: torch.softmax(x[3:], 0), lambda x: x.isnan(), lambda x: x.sign()[3:]])
def test_special_values(op):
    check(op, [SPECIAL])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_compute_in_float32(dtype):
    x, y = R(6, 33).to(dtype), R(33).to(dtype)
    program = check(lambda x, y: F.layer_norm(x + y, (33,)) * y, [x, y], rtol=2e-2, atol=2e-2)
    for loop in loops(program):
        for inst in loop.body:
            assert inst.dtype != dtype or inst.op == "load"


def test_half_comparison_rounds_what_memory_would_round():
    x = R(1000).bfloat16()
    check(lambda x: (x * 3.0 + 1.1) == (x * 3.0 + 1.1).amax(), [x])


@pytest.mark.parametrize("backend", ["loops", "cpp"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_integers_become_half_values_before_they_are_computed_with(dtype, backend):
    integers, halves = torch.arange(-3000, 3000, 7), (torch.rand(858) + 0.5).to(dtype)

    def f(i, h):
        return i * h, torch.atan2(i, h), i.to(dtype).sin(), i.int() + h, i > h
    for found, expected in zip(minicompile.compile(f, backend=backend)(integers, halves), f(integers, halves)):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("ends", [(-1, 1), (0.1, 0.7), (2, -5), (True, 3), (1e3, 1e-3), (1j, 2.5),
                                  (torch.tensor(1j), 2.0), (1, torch.tensor(2j)), (torch.tensor(1j), torch.tensor(3.0))])
@pytest.mark.filterwarnings("error")
def test_evenly_spaced_numbers_are_eagers(ends):
    def f(x):
        return [torch.linspace(*ends, n) for n in (2, 3, 7, 16, 33, 257, 1000)] + [torch.logspace(*ends, 3)], x + 1
    for found, expected in zip(minicompile.compile(f, backend="cpp")(R(1))[0], f(R(1))[0]):
        assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_an_element_does_not_depend_on_the_node_that_asks_for_it():
    """Lazy values are evaluated while later nodes are lowered, of other dtypes or with several results."""
    x = R(6, 5)
    for fn in (lambda x: torch.div(x, 0.7, rounding_mode="trunc"), lambda x: torch.div(x, 0.7, rounding_mode="floor"), torch.floor,
               lambda x: torch.remainder(x, 0.7), lambda x: x.clamp(0).sqrt()):
        check(lambda x: [fn(x).argmax(0), *torch.var_mean(fn(x), 1), fn(x) > 0, fn(x).to(torch.int64)], [x])


def test_emulated_casts_equal_eager_bit_for_bit():
    x = R(500).bfloat16()
    check(lambda x: ((x * 1.1) + 0.3) * x, [x], Options(emulate_precision_casts=True), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool])
def test_integers(dtype):
    x = torch.randint(0, 2 if dtype is torch.bool else 100, (4, 6)).to(dtype)
    y = torch.randint(1, 2 if dtype is torch.bool else 9, (6,)).to(dtype)
    check(lambda x, y: (x + y, x * y, x.sum(), x.sum(1), x == y, x < y, x | y, x & y, x.amax(0), x.any(), x / y), [x, y])
    if dtype is not torch.bool:
        check(lambda x, y: (x // y, x % y, torch.div(x, y, rounding_mode="trunc"), x - y, -x, x ** 2, x.prod(1)), [x, y])


@pytest.mark.parametrize("size", [(0,), (0, 3), (3, 0), (1,), (1, 1, 1), ()])
def test_degenerate_sizes(size):
    check(lambda x: (x + 1, x.sum(), x.any(), x.mean(-1) if x.dim() else x, x.reshape(-1) * 2, x.exp().unsqueeze(0)), [torch.randn(size)])

# Reductions


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("size,dims", [((4096, 48), [0]), ((3, 70000), [1]), ((64, 8, 30, 30), [0, 2, 3]), ((200000,), [0]),
                                       ((7, 9973), [1]), ((37, 411, 5), [0, 1]), ((2, 8, 4097), [0, 2])])
def test_split_reductions(size, dims, device):
    """Large reductions with few results come in two loops, and give what one loop gives."""
    x = R(*size)
    options = Options(threads=16, processors=132)

    def all_of(x):
        return (x.sum(dims), x.amax(dims), x.amin(dims, True), (x > 3).any(-1) if len(size) == 1 else (x > 3).sum(dims),
                *torch.var_mean(x, dims, correction=0))
    program = check(all_of, [x], options, rtol=1e-4, atol=1e-3, device=device)
    assert len(loops(program)) > 6
    assert len(loops(check(all_of, [x], Options(split_reductions=False), rtol=1e-4, atol=1e-3, device=device))) == 5


def test_split_needs_no_remainder_for_welford():
    program = check(lambda x: torch.var_mean(x, [0]), [R(99991)], Options(threads=4), rtol=1e-3)
    assert len(loops(program)) == 1             # a prime: no equal blocks


def test_argmax_takes_the_first():
    x = torch.tensor([[1., 3, 3, 0], [2, 2, 2, 2], [math.nan, 1, math.nan, 5]])
    check(lambda x: (x.argmax(), x.argmax(1), x.argmin(0), *x.max(1), *x.min(0)), [x])


def test_channels_last_statistics():
    x = R(4, 6, 8, 8).contiguous(memory_format=torch.channels_last)
    program = check(lambda x: torch.var_mean(x, [0, 2, 3]), [x], Options(threads=1), rtol=1e-3)
    loop, = loops(program)
    load = next(i for i in loop.body if i.op == "load")
    from minicompile.ch01_graphs.symbolic import coefficient
    assert coefficient(load.args[1], loop.vars[-1]) == 1
    assert [coefficient(load.args[1], v) for v in loop.reduction_vars] == [384, 48, 6]


# Indexing


def test_gathers_and_scatters():
    x, i, j = R(6, 5, 4), torch.tensor([[0, -1, 3], [2, 2, -6]]), torch.tensor([1, 0, -1])
    check(lambda x, i, j: (x[i], x[:, j], x[i, j], x[i, :, j], x[:, :, j][i], x[None, i]), [x, i, j])
    check(lambda x, j: (x.index_put((j,), x[:3] * 2), aten.index_put(x, [None, j], torch.ones(6, 3, 4)),
                        x.index_put((j,), x[3:] + 1, accumulate=True)), [x, j])
    k = torch.randint(0, 5, (6, 3, 4))
    check(lambda x, k: (x.gather(1, k), x.scatter(1, k, 2.0), torch.zeros(6, 5, 4).scatter_add(1, k, x[:, :3])), [x, k])
    check(lambda x: (torch.zeros(6, 5, 4).slice_scatter(x[:2], 0, 1, 5, 2), x.select_scatter(x[0, :, :1].squeeze(1)[:, None]
                     .expand(5, 4), 0, -2)), [x])


def test_embedding_out_of_range_is_an_error():
    program = program_of(lambda w, i: F.embedding(i, w) * 2, [R(5, 3), torch.tensor([0, 4])])
    with pytest.raises(IndexError):
        run_program(program, [R(5, 3), torch.tensor([0, 5])])


def test_embedding_gradient_accumulates():
    def gradient(w, i, g):
        return torch.autograd.grad(F.embedding(i, w), w, g)
    w = R(5, 3).requires_grad_()
    program = check(gradient, [w, torch.tensor([[1, 1, 4], [0, 1, 4]]), R(2, 3, 3)])
    assert any(i.op == "store" and i.mode == "atomic_add" for loop in loops(program) for i in loop.body)


@pytest.mark.parametrize("pieces", [2, 3, 12])
def test_cat_small_and_large(pieces):
    for rows in (3, 600):
        xs = [R(rows, k + 1) for k in range(pieces)]
        check(lambda *xs: torch.cat([x * 2 for x in xs], 1), xs)
        check(lambda *xs: torch.cat([x.t() for x in xs], 0).contiguous(), xs)


def test_views_of_a_flip_are_windows_on_memory_of_its_own():
    for window in (lambda x: x.flip(-1).unfold(-1, 2, 1), lambda x: x.flip(0)[:, ::2]):
        x = R(4, 6)
        program = check(lambda x: (window(x),), [x])
        assert program.outputs[0].layout.stride == window(x).stride()


def test_calls_and_results_get_eagers_strides_also_in_dimensions_of_one_element():
    """Attention of a GPU asks whether they are aligned, and convolutions tell channels last by them."""
    def heads(t):
        return t.view(2, -1, 4, 16).transpose(1, 2)
    q, k = R(2, 1, 64), R(2, 8, 64)
    program = check(lambda q, k: (F.scaled_dot_product_attention(heads(q), heads(k), heads(k)), heads(q * 2)), [q, k])
    call, = externs(program)
    assert [view.layout.stride for view in call.args[:3]] == [heads(t).stride() for t in (q, k, k)]
    assert program.outputs[1].layout.stride == heads(q * 2).stride()


def test_padding_and_pooling():
    x = R(2, 3, 9, 11)
    check(lambda x: (F.pad(x, (1, 2, 0, 3), value=2.5), F.pad(x, (-1, 2)), x.roll((2, -1), (2, 3)), x.flip(1, 3)), [x])
    check(lambda x: (*F.max_pool2d(x, 3, 2, 1, return_indices=True), F.avg_pool2d(x, 3, 2, 1), F.interpolate(x, scale_factor=2)),
          [x])


@pytest.mark.parametrize("backend", ["loops", "cpp"])
@pytest.mark.parametrize("divide", [torch.floor_divide, torch.remainder, torch.fmod,
                                    lambda a, b: torch.div(a, b, rounding_mode="trunc")])
def test_no_integer_is_divided_by_what_a_mask_leaves_out(divide, backend):
    """Where nothing is loaded there is 0. A divisor that is 0 in memory raises."""
    def f(a):
        return F.pad(divide(a + 7, a), (1, 2)), torch.cat([divide(a, a), a])
    compiled = minicompile.compile(f, backend=backend, fullgraph=True)
    for got, expected in zip(compiled(torch.tensor([3, -2])), f(torch.tensor([3, -2]))):
        assert torch.equal(got, expected)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        compiled(torch.tensor([3, 0]))


@pytest.mark.parametrize("pool", [lambda x: F.max_pool2d(x, 3, 2, 1), lambda x: F.avg_pool2d(x, 2)])
def test_pooling_gradient_is_a_gather(pool):
    x = R(2, 3, 8, 8).to(memory_format=torch.channels_last).requires_grad_()        # otherwise that of a maximum is left to eager
    program = check(lambda x: torch.autograd.grad(pool(x).square().sum(), x), [x])
    assert not externs(program)
    assert not any(i.op == "store" and i.mode for loop in loops(program) for i in loop.body)

# Mutation, creation, fallbacks


def mutating(body, tensors):
    """A graph that ends with `copy_` into its inputs, lowered; returns (program, inputs after running it)."""
    fakes = [FakeMode().from_real(t) for t in tensors]
    recorder = Recorder()
    for i, f in enumerate(fakes):
        recorder.placeholder(f"arg{i}", f)
    with recorder:
        values, outputs = body(*fakes)
        for target, value in values:
            target.copy_(value)
    program = lower(recorder.finish(outputs))
    verify(program)
    inputs = [t.clone() for t in tensors]
    return program, inputs, run_program(program, inputs)


def test_update_in_place_needs_no_temporary():
    p, g = R(5), R(5)
    program, after, _ = mutating(lambda p, g: ([(p, p - g * 0.1)], []), [p, g])
    assert len(program.nodes) == 1
    torch.testing.assert_close(after[0], p - g * 0.1)


def test_updates_that_read_each_other_are_stored_in_an_order_that_needs_no_temporary():
    p, m, g = R(5), R(5), R(5)

    def adam(p, m, g):
        new = m * 0.9 + g
        return [(m, new), (p, p - new * 0.1)], []
    program, after, _ = mutating(adam, [p, m, g])
    loop, = program.nodes                       # both are stored by the loop that reads both
    assert [program.buffers[name].alias_of for name in loop.outputs] == ["arg0", "arg1"]
    torch.testing.assert_close(after, [p - (m * 0.9 + g) * 0.1, m * 0.9 + g, g])


@pytest.mark.parametrize("body", [
    lambda x, y, z, w: [(x, y.flip(1) * 2), (y, y + 1)],                                # at other elements
    lambda x, y, z, w: [(x, x + y), (y, y + 1), (z, z + y)],                            # by two loops
    lambda x, y, z, w: [(x, y.t() * 2), (y, y + 1)],
    lambda x, y, z, w: [(x, y * 2), (y, y * w[0] + z)],                                 # needs more
    lambda x, y, z, w: [(x, y.sum(1, keepdim=True) + x), (y, y + 1)],
    lambda x, y, z, w: [(w, w + y[0]), (y, y + 1)]])                                    # over another space
def test_updates_that_another_loop_cannot_store_have_one_of_their_own(body):
    x, y, z, w = R(3, 3), R(3, 3), R(3, 3), R(3)
    program, after, _ = mutating(lambda *args: (body(*args), []), [x, y, z, w])
    assert all(len(loop.stores) == 1 for loop in loops(program))
    expected = [x, y, z, w]
    for target, value in body(x, y, z, w):
        expected[next(i for i, t in enumerate((x, y, z, w)) if t is target)] = value
    torch.testing.assert_close(after, expected)


def test_updates_in_a_circle_take_one_temporary():
    x, y, z, w = (R(5) for _ in range(4))
    program, after, _ = mutating(lambda x, y, z, w: ([(x, y * 1), (y, z * 1), (z, x + 1), (w, x + y)], []), [x, y, z, w])
    assert len(program.nodes) == 5
    torch.testing.assert_close(after, [y, z, x + 1, x + y])


def test_update_that_reads_other_elements_goes_through_a_temporary():
    x, y = R(5), R(5)
    program, after, _ = mutating(lambda x, y: ([(x, x.flip(0))], []), [x, y])
    torch.testing.assert_close(after[0], x.flip(0))
    program, after, _ = mutating(lambda x, y: ([(x, y * 1), (y, x * 1)], []), [x, y])
    torch.testing.assert_close(after, [y, x])


def test_returned_view_of_mutated_input_keeps_the_old_values():
    x = R(4)
    _, after, outs = mutating(lambda x: ([(x, x + 1)], [x.view(2, 2)]), [x])
    torch.testing.assert_close(outs[0], x.view(2, 2))
    torch.testing.assert_close(after[0], x + 1)


def test_creation_is_free():
    program = check(lambda x: x + torch.arange(4) * 2 + torch.ones(3, 4) + torch.eye(3, 4) + torch.tril(torch.full((3, 4), 2.)),
                    [R(3, 4)])
    assert len(program.nodes) == 1 and sum(i.op == "load" for i in program.nodes[0].body) == 1


def test_unknown_operators_call_their_kernel():
    program = check(lambda x: (x.cumsum(0) + 1, *torch.sort(x, 1), torch.linalg.inv(x @ x.t() + 9 * torch.eye(4))), [R(4, 5)],
                    rtol=1e-3)
    assert len(externs(program)) >= 3


def test_lowerings_and_decompositions_share_no_work():
    """Every lowering is of a primitive, and every primitive that can be a loop has one."""
    assert [str(op) for op in LOWERINGS if op not in PRIMITIVES] == []
    library = ("extern", "random")
    assert [str(op) for op, p in PRIMITIVES.items() if op not in LOWERINGS and p.category not in library] == []


def test_powers_are_products_also_of_integers():
    program = check(lambda x, y: (x ** 3, x ** 2, y ** 3, y ** -2, y ** 0.5, x ** 2.5), [torch.arange(5), R(5).abs() + 1])
    ops = [i.op for loop in loops(program) for i in loop.body]
    assert ops.count("pow") == 1


def test_sums_that_name_their_dtype():
    x = torch.randint(0, 9, (4, 6), dtype=torch.int32)
    check(lambda x, y: (x.sum(1, dtype=torch.int64), x.sum(1, dtype=torch.int32), y.sum(0, dtype=torch.float32),
                        y.prod(0, dtype=torch.float32), x.prod(1, dtype=torch.float64)), [x, R(4, 6)])


def test_diagonals_are_written_at_any_offset():
    def fn(x, y):
        return [torch.diagonal_scatter(x, torch.diagonal(y, k, a, b), k, a, b)
                for k in (-2, 0, 1) for a, b in ((0, 1), (2, 0), (1, 2))]
    check(fn, [R(4, 3, 5), R(4, 3, 5)])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16])
def test_diagonals_are_written_with_a_cast_and_keep_gaps(dtype):
    def fn(x, y):
        return x.diagonal_scatter(y.diagonal()), x[:, :3].diagonal_scatter(y.diagonal()), x.t().diagonal_scatter(y.diagonal())
    check(fn, [R(3, 5).to(dtype), R(3, 5)])


def dropped(monkeypatch, layout, dtype=torch.float32):
    """The program of a dropout of 1024 times 1024 elements, for a GPU whose eager kernel has this layout."""
    from minicompile.ch07_loops.rules import random
    monkeypatch.setattr(random, "eager_layout", lambda dtype, device: layout)
    x = torch.ones(1024, 1024, dtype=dtype)
    return x, program_of(lambda x: torch.native_dropout(x * 2, 0.25, True), [x], decomposed=False, device="cuda:0")


@pytest.mark.parametrize("layout", [(4, 1024), (8, 512 * 3), (16, 256)])
def test_dropout_draws_eagers_numbers_in_the_loop(monkeypatch, layout):
    from minicompile.ch07_loops.reference import philox_uniform
    x, program = dropped(monkeypatch, layout)
    [call] = externs(program)
    assert str(call.op) == "draw" and call.args[0] == -(-x.numel() // (4 * layout[1])) * 4
    kernels = [step for step in fuse(program).steps if isinstance(step, Kernel)]
    assert ["philox_four(" in emit_triton(kernel).code for kernel in kernels] == [True]
    seed, offset = torch.tensor(-5), torch.tensor(2**34 + 8)
    call.op = lambda count, device: (seed, offset)
    out, mask = run_program(program, [x])
    assert torch.equal(mask.flatten(), philox_uniform(seed, offset, torch.arange(x.numel()), layout) < 0.75)
    assert 0.74 < mask.float().mean() < 0.76
    torch.testing.assert_close(out, mask * 2 / 0.75)


def test_dropouts_between_which_nobody_draws_share_a_step(monkeypatch):
    from minicompile.ch07_loops.reference import philox_uniform
    from minicompile.ch07_loops.rules import random
    monkeypatch.setattr(random, "eager_layout", lambda dtype, device: (4, 1 << 19))

    def three(x):
        a, b = torch.native_dropout(x * 2, 0.25, True)[1], torch.native_dropout(x * 3, 0.5, True)[1]
        return a, b, torch.rand_like(x), torch.native_dropout(x * 4, 0.5, True)[1]
    x = torch.ones(1024, 1024)
    program = program_of(three, [x], decomposed=False, device="cuda:0")
    steps = externs(program)
    assert [str(call.op) for call in steps][::2] == ["draw", "draw"] and [call.args[0] for call in steps[::2]] == [8, 4]
    seed, offset = torch.tensor(7), torch.tensor(40)
    for call, start in ((steps[0], offset), (steps[2], offset + 12)):
        call.op = lambda count, device, start=start: (seed, start)
    steps[1].kwargs.pop("device", None)
    masks = run_program(program, [x])
    for mask, start, p in ((masks[0], 40, 0.75), (masks[1], 44, 0.5), (masks[3], 52, 0.5)):
        assert torch.equal(mask.flatten(), philox_uniform(seed, torch.tensor(start), torch.arange(x.numel()), (4, 1 << 19)) < p)


def test_dropout_of_an_unknown_layout_or_few_elements_is_a_library_call(monkeypatch):
    _, program = dropped(monkeypatch, None)
    assert [str(call.op) for call in externs(program)] == ["aten.native_dropout.default"]
    _, program = dropped(monkeypatch, (4, 1024), torch.float64)
    assert [str(call.op) for call in externs(program)] == ["aten.native_dropout.default"]
    few = program_of(lambda x: torch.native_dropout(x * 2, 0.25, True), [torch.ones(8, 16)], decomposed=False, device="cuda:0")
    assert [str(call.op) for call in externs(few)] == ["aten.native_dropout.default"]


def test_philox_is_the_published_generator():
    """Known answers of Philox4x32-10 (Salmon et al., Random123 test vectors): all zeros."""
    from minicompile.ch07_loops.reference import philox_uniform
    bits = [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]
    got = philox_uniform(torch.tensor(0), torch.tensor(0), torch.arange(4), (4, 1))
    torch.testing.assert_close(got, torch.tensor(bits).to(torch.float32) * 2.0**-32 + 2.0**-33)


def test_constants_of_the_program():
    table = torch.arange(6.).view(2, 3)
    check(lambda x: x * table, [R(2, 3)])

# Chains of views against eager


@st.composite
def view_chain(draw):
    steps = []
    for _ in range(draw(st.integers(1, 6))):
        steps.append(draw(st.sampled_from(["permute", "reshape", "slice", "select", "unsqueeze", "expand", "flip", "squeeze",
                                           "add", "diagonal", "unfold"])))
    return steps, draw(st.integers(0, 2**31))


def apply_chain(x, chain):
    import random
    steps, seed = chain
    rng = random.Random(seed)
    for step in steps:
        n = x.dim()
        d = rng.randrange(n) if n else 0
        if step == "permute" and n:
            order = list(range(n))
            rng.shuffle(order)
            x = x.permute(order)
        elif step == "reshape":
            flat, sizes = x.numel(), []
            while flat > 1 and len(sizes) < 3:
                f = rng.choice([k for k in range(1, flat + 1) if flat % k == 0])
                sizes.append(f)
                flat //= f
            x = x.reshape(sizes + [flat])
        elif step == "slice" and n and x.shape[d] > 1:
            x = x.narrow(d, 1, x.shape[d] - 1)[(slice(None),) * d + (slice(None, None, rng.choice([1, 2])),)]
        elif step == "select" and n > 1:
            x = x.select(d, rng.randrange(x.shape[d]))
        elif step == "unsqueeze" and n < 5:
            x = x.unsqueeze(rng.randrange(n + 1))
        elif step == "expand" and 1 in x.shape and x.numel() < 500:
            x = x.expand([3 if s == 1 else s for s in x.shape])
        elif step == "flip" and n:
            x = x.flip(d)
        elif step == "squeeze":
            x = x.squeeze()
        elif step == "add":
            x = x + 1
        elif step == "diagonal" and n > 1:
            x = x.diagonal(0, d, (d + 1) % n)
        elif step == "unfold" and n and n < 5 and x.shape[d] > 2:
            x = x.unfold(d, 2, 1)
    return x


@settings(max_examples=150, deadline=None)
@given(view_chain(), st.sampled_from([(4, 6), (2, 3, 4), (12,), (2, 1, 6, 2)]))
def test_view_chains(chain, size):
    x = torch.arange(float(math.prod(size))).reshape(size)
    check(lambda x: (apply_chain(x, chain), apply_chain(x * 2, chain), apply_chain(x, chain).sum()), [x], strides=False)


def test_symbolic_sizes():
    """One program serves all sizes: it takes the size as an input."""
    import minicompile

    def f(x, w):
        y = F.layer_norm(x, (8,), w)
        return F.softmax(y, -1), y.sum(0), torch.cat([x, y], 1), F.pad(x, (1, 1)), x.mean((0, 1)), torch.arange(x.shape[0])
    minicompile.reset()
    compiled = minicompile.compile(f, backend="loops", dynamic=True, fullgraph=True)
    before = minicompile.driver.counters.graphs
    for b, t in ((4, 6), (6, 10), (8, 3)):
        x, w = R(b, t, 8), R(8)
        torch.testing.assert_close(compiled(x, w), f(x, w))
    assert minicompile.driver.counters.graphs == before + 1


def test_print_program_reads():
    text = print_program(program_of(lambda x, w: F.relu(x @ w).sum(0), [R(3, 4), R(4, 5)]))
    assert "aten.mm.default" in text and "reduce(sum" in text and "return buf" in text


def test_spec_catches_a_bad_program():
    program = program_of(lambda x: x.sin(), [R(3)])
    program.nodes[0].outputs = ("buf9",)
    with pytest.raises(AssertionError):
        verify(program)


def test_a_widened_value_is_kept_narrow():
    """Several readers want the float32 copy of a computed bfloat16 value: memory gets the bfloat16 one."""
    def f(x, y, z):
        h = (torch.sigmoid(x) * torch.tanh(y) * z).float()
        return h.sum(0), (h * h).sum(1), h.exp().amax()
    program = program_of(f, [R(64, 64).bfloat16() for _ in "xyz"])
    large = [b for name, b in program.buffers.items() if name not in program.inputs and math.prod(b.layout.size) == 4096]
    assert [b.dtype for b in large] == [torch.bfloat16]


def test_constants_of_one_number_are_inlined(monkeypatch):
    """Each would be a copy from the host to the GPU in every call."""
    import minicompile
    from minicompile import driver
    programs, lower = [], driver.lower
    monkeypatch.setattr(driver, "lower", lambda gm: programs.append(lower(gm)) or programs[-1])

    def masks(x):
        m = torch.zeros(1, 4, 4, device=x.device, dtype=x.dtype)
        m[:, :2, :2] = 3
        m[0, 0], m[0, 1] = float("inf"), -0.0
        m[:, 2:, 1] = torch.tensor(4.)
        return x + m, torch.tensor(2.5), torch.tensor(3), x * torch.tensor(True), 1 / m, torch.tensor([1., 2, 3, 4]) * x
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = torch.ones(4, dtype=dtype)
        torch.testing.assert_close(minicompile.compile(masks)(x), masks(x), rtol=0, atol=0)
    assert [len(p.constants) for p in programs] == [1, 1, 1]


def test_a_constant_for_another_device_is_moved_when_compiling():
    from minicompile.ch07_loops.externs import move
    from minicompile.ch07_loops.ir import Buffer, Layout, Program
    from minicompile.ch07_loops.lazy import Lowering, Options, from_buffer
    g, value = Lowering(Options(), Program([], {}, [], [])), torch.arange(6.).view(2, 3).t()
    g.program.constants["c"] = value
    g.program.buffers["c"] = Buffer("c", value.dtype, value.device, Layout(tuple(value.shape), value.stride()))
    x = from_buffer(g, "c")
    there = move(g, x, torch.device("meta"))
    assert move(g, x, torch.device("meta")) is there and not g.program.nodes
    moved = g.program.constants[there.view.buffer]
    assert moved.is_meta and moved.stride() == value.stride() == there.stride and len(g.program.constants) == 2
    g.node, part = torch.fx.Graph().placeholder("p"), from_buffer(g, "c", Layout((2,), (1,), 1))
    assert move(g, part, torch.device("meta")) is not there and len(g.program.nodes) == 1


@pytest.mark.parametrize("backend", ["loops", "cpp"])
def test_a_scatter_of_nothing_is_what_it_scatters_into(backend):
    """The gradient of an empty diagonal is all zeros. The loop over its elements has none, and was dropped with the name that it wrote."""
    def f(b):
        rows = b.t()
        return (rows * 4).diagonal(3), (rows - rows.mean()).abs()
    b = torch.randn(3, 2, requires_grad=True)
    want, got = (torch.autograd.grad([t.sum() for t in g(b)], b) for g in (f, minicompile.compile(f, backend=backend)))
    torch.testing.assert_close(got, want)


def test_windows_written_one_after_another_are_read_once_each(monkeypatch):
    """Each write reads what was there before it twice; twenty of them are not a million reads."""
    reads = []
    read = Builder.read
    monkeypatch.setattr(Builder, "read", lambda b, x, index: reads.append(None) or read(b, x, index))

    def f(x):
        mask = x.new_zeros(20, 20)
        for i in range(20):
            mask[i:i + 2, i // 2:] = i
        return mask + x

    x = torch.randn(20, 20)
    assert torch.equal(minicompile.compile(f, backend="loops")(x), f(x))
    assert 20 < len(reads) < 2000


@pytest.mark.parametrize("reads, kept", [(25, 1), (100, 2)])
def test_what_an_index_reads_several_times_is_computed_once(reads, kept):
    """`f(x)[i // 2]` asks for each element twice in each dimension."""
    x, i = torch.randn(5, 5), torch.arange(reads) % 25
    program = check(lambda x, i: ((x + 1) * x).tanh().sub(x).flatten()[i], [x, i])
    assert len(loops(program)) == kept


def test_blocks_divide_or_are_short_powers_of_two_or_as_many_as_wanted():
    from minicompile.ch07_loops.reductions import block_count
    assert [block_count(256, 19), block_count(192, 5), block_count(197, 19), block_count(211, 100)] == [16, 6, 25, 106]
    assert block_count(1009, 3) == 3 and block_count(7, 6) == 7
    assert all(n <= blocks * -(-n // blocks) < n + -(-n // blocks) for n in (197, 211, 1009) for blocks in [block_count(n, 19)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", [torch.remainder, torch.fmod])
def test_numbers_that_a_remainder_of_halves_is_taken_by(op, dtype):
    """They are of the tensor's dtype, on both devices, whether they come as numbers or as tensors."""
    x, tenth = torch.randn(256).to(dtype), torch.tensor(0.1, dtype=dtype).item()
    for f in (lambda x: op(x, 0.1), lambda x: op(x, torch.tensor(0.1))):
        assert torch.equal(minicompile.compile(f, backend="loops")(x), f(x))
    gm = decompose(trace(lambda x: [op(x, 0.1)], [FakeTensor(x.to("meta"), torch.device("cuda", 0), False)]))
    assert f"tl.full([1], {tenth!r}, tl.float32)" in emit_triton(fuse(lower(gm)).steps[0]).code


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_scatters_on_a_gpu_are_the_librarys_under_deterministic_algorithms(device):
    def fake(*size, dtype=torch.float32):
        return FakeTensor(torch.empty(size, dtype=dtype, device="meta"), torch.device(device, 0))

    def scatters(x, i, j):
        return x.index_put((i,), x, accumulate=True), x.index_put((i,), x), x.scatter_add(0, j, x), x.scatter(0, j, x)
    fakes = [fake(5, 3), fake(5, dtype=torch.long), fake(5, 1, dtype=torch.long)]
    assert not externs(lower(decompose(trace(scatters, fakes))))
    torch.use_deterministic_algorithms(True)
    try:
        assert len(externs(lower(decompose(trace(scatters, fakes))))) == (4 if device == "cuda" else 0)
    finally:
        torch.use_deterministic_algorithms(False)


def on(device, dtype, *size):
    return FakeTensor(torch.empty(size, dtype=dtype, device="meta"), torch.device(device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("here, there", [("cpu", "cuda:0"), ("cuda:0", "cpu")])
@pytest.mark.parametrize("fn", [
    lambda x, i, v: aten.index_put(x, [i], v), lambda x, i, v: aten.index_put(x, [i.to("cpu") if x.is_cpu else i], v, True),
    lambda x, i, v: aten.index_fill(x, 0, x.new_zeros(2, dtype=torch.int64), v), lambda x, i, v: aten.fill(x, v) if x.is_cpu else x + v,
    lambda x, i, v: torch.where(v > 0, x, v) if v.is_cpu else x + 1,
], ids=["index_put", "accumulate", "index_fill", "fill", "where"])
def test_loops_read_the_memory_of_their_own_device(fn, here, there, dtype):
    operands = on(here, dtype, 4, 3), on(there, torch.int64, 2), on(there, dtype)
    recorder = Recorder()
    for name, x in zip("xiv", operands):
        recorder.placeholder(name, x)
    with torch.no_grad(), recorder:
        outputs = [fn(*operands)]
    program = lower(decompose(recorder.finish(outputs)))
    verify(program)
    assert torch.device(here) in [program.buffers[loop.outputs[0]].device for loop in loops(program)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64, torch.float64], ids=str)
def test_a_number_that_the_cpu_can_convert_is_not_copied_to_a_gpu(dtype):
    operands = on("cuda:0", torch.float32, 4, 3), on("cpu", dtype)
    recorder = Recorder()
    for name, x in zip("xv", operands):
        recorder.placeholder(name, x)
    with torch.no_grad(), recorder:
        out = aten._to_copy(operands[1], device=operands[0].device, dtype=torch.float32) + operands[0]
    program = lower(decompose(recorder.finish([out])))
    verify(program)
    assert not externs(program)


def test_a_loop_that_reads_the_memory_of_another_device_is_refused():
    program = program_of(lambda x, y: x * y + 1, [R(4, 3), R(4, 3)])
    buffer = program.buffers[program.inputs[1]]
    program.buffers[buffer.name] = dataclasses.replace(buffer, device=torch.device("cuda", 0))
    with pytest.raises(Unsupported, match=f"reads {buffer.name} on cuda"):
        verify(program)
