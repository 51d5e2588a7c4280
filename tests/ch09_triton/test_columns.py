"""Kernels that reduce rows and sum up columns on the way, under Triton's interpreter against eager."""
import os

import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="run by test_interpreter in a process of its own")

from minicompile.ch07_loops import reductions
from minicompile.ch08_fusion import alignment
from minicompile.ch09_triton.emit import emit_triton
from minicompile.ch11_runtime.host import compile_schedule
from tests.ch08_fusion.test_columns import gradients, inputs, schedule_of, walking


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch):
    """A kernel of a few programs is worth it here: the interpreter runs them one by one."""
    for module in (reductions, alignment):
        monkeypatch.setattr(module, "ENOUGH_BLOCKS", 4)


def check(fn, args):
    schedule = schedule_of(fn, args)
    assert len(walking(schedule)) == 1
    got = compile_schedule(schedule, "triton")([a.clone() for a in args])
    for g, w in zip(got, fn(*args), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-3, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize("size", [(8, 16, 6), (4, 4, 9, 8), (6, 32, 600), (5, 16, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm_backward(size, dtype):
    check(gradients, inputs(*size, dtype=dtype))


def test_a_nan_stays_in_its_row_and_its_columns():
    args = inputs(128, 6)
    args[0][37, 2] = float("nan")
    check(gradients, args)


def test_sums_of_integers_and_of_numbers_per_row():
    def both(x, per_row):
        return [x - x.sum(1, True), (x * per_row).sum(0), (x.long() * per_row.long()).sum(0), (per_row + 0 * x).sum(0)]
    check(both, [torch.randint(-9, 9, (160, 5)).float(), torch.randint(0, 3, (160, 1)).float()])


def test_the_loads_of_a_tile_come_before_its_arithmetic():
    kernel, = walking(schedule_of(gradients, inputs(8, 16, 600)))
    body = [line.split("  #")[0].strip() for line in emit_triton(kernel).code.split("for xoffset in")[1].splitlines()]
    loads = [k for k, line in enumerate(body) if "tl.load(" in line]
    assert len(loads) >= 5 and not any(line.startswith(("red", "sum", "tl.store")) for line in body[:loads[-1]])
