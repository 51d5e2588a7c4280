"""Reductions of rows with the column sums over blocks of them in one kernel."""
import pytest
import torch

from minicompile.ch08_fusion.fuse import fuse
from minicompile.ch08_fusion.groups import FusionOptions
from minicompile.ch08_fusion.kernel import Kernel
from minicompile.ch08_fusion.reference import verify_schedule
from minicompile.ch11_runtime.host import compile_schedule
from tests.ch07_loops.helpers import program_of

aten = torch.ops.aten


def gradients(grad, x, mean, rstd, weight, residual):
    dx, dw, db = aten.native_layer_norm_backward(grad.float(), x, [x.shape[-1]], mean, rstd, weight, weight, [True, True, True])
    return [dx + residual, dw, db]


def inputs(*size, dtype=torch.float32):
    x, weight = torch.randn(size), torch.randn(size[-1])
    _, mean, rstd = torch.native_layer_norm(x, size[-1:], weight, weight, 1e-5)
    return [torch.randn(size).to(dtype), x, mean, rstd, weight, torch.randn(size)]


def schedule_of(fn, args, **options):
    """As for a GPU, on the CPU."""
    program = program_of(fn, args, device="cuda:0")
    for buffer in program.buffers.values():
        buffer.device = torch.device("cpu")
    schedule = fuse(program, FusionOptions(columns_with_rows=True, **options))
    verify_schedule(schedule)
    return schedule


def walking(schedule):
    return [s for s in schedule.steps if isinstance(s, Kernel) and s.walked]


@pytest.mark.parametrize("size", [(64, 128, 6), (8192, 5), (16, 64, 9, 8)])
def test_layer_norm_backward_is_one_walk_and_one_sum(size):
    args = inputs(*size, dtype=torch.bfloat16)
    schedule = schedule_of(gradients, args)
    (kernel,) = walking(schedule)
    assert len(schedule.steps) == 2 and kernel.vars[-len(kernel.walked):] == kernel.walked
    assert [len(loop.reduction_vars) > 0 and loop.reduction_vars == kernel.walked for loop in kernel.loops].count(True) == 2
    for got, want in zip(compile_schedule(schedule, "loops")(list(args)), gradients(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_off_by_default_on_a_cpu():
    program = program_of(gradients, inputs(8192, 5), device="cuda:0")
    for buffer in program.buffers.values():
        buffer.device = torch.device("cpu")
    assert not walking(fuse(program))


REFUSED = {
    "rows too long": (gradients, lambda: inputs(8192, 2049)),
    "too few rows": (gradients, lambda: inputs(1024, 8)),
    "rows do not fill their blocks": (gradients, lambda: inputs(8209, 3)),
    "maxima": (lambda x, m: [x - x.sum(1, True), (x * m).amax(0)], lambda: [torch.randn(8192, 6), torch.randn(8192, 1)]),
    "different elements": (lambda x, y, m: [x - x.sum(1, True), (y * m).sum(0)],
                           lambda: [torch.randn(8192, 6), torch.randn(8192, 6), torch.randn(8192, 1)]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    fn, made = REFUSED[name]
    schedule = schedule_of(fn, args := made())
    assert not walking(schedule)
    for got, want in zip(compile_schedule(schedule, "loops")(list(args)), fn(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_rows_that_are_updated_in_place():
    def update(x, m):
        columns, new = (x * m).sum(0), x - x.sum(1, True)
        x.copy_(new)                        # where functionalization puts it: last
        return [columns, new * 2]
    args = [torch.randn(8192, 6), torch.randn(8192, 1)]
    schedule = schedule_of(update, args)
    assert len(walking(schedule)) == 1
    given, kept = [a.clone() for a in args], [a.clone() for a in args]
    for got, want in zip(compile_schedule(schedule, "loops")(list(given)), update(*kept), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(given[0], kept[0])
