"""A write into a part of an input stores that part; what needs the old contents gets them."""
import pytest
import torch

import minicompile
from minicompile.ch07_loops.lower import lower

x = torch.arange(4 * 6 * 5.0).view(4, 6, 5)


def row(x, y, at): x[:, 2] = y
def rows(x, y, at): x[:, 1:5:2] = y[:, None]
def last(x, y, at): x[:, -1] = y
def beyond(x, y, at): x[:, 4:100] = y[:, None]
def nested(x, y, at): x[1][2:4] = y[0]
def three_deep(x, y, at): x[1:3][0][..., 1] = y[0, 0]
def several(x, y, at):
    for i in range(4):
        x[i, i + 1] = y[i] * i


def over_each_other(x, y, at):
    x[:, 1:4] = y[:, None]
    x[:, 2:5] = y[:, None] * 2
    x[0] = 7.0


def counter(x, y, at): x[2, 3] += 1
def scaled_rows(x, y, at): x[:, 2] *= y
def at_indices(x, y, at): x[:, at] = y[:, None]
def copied_at_indices(x, y, at): x.index_copy_(1, at, y[:, None].expand(-1, 2, -1))
def added_at_indices(x, y, at): x.index_put_((at, at), y[:2], accumulate=True)
def scattered(x, y, at): x[2].scatter_(0, at[:, None].expand(2, 5), y[:2])
def indices_in_a_view(x, y, at): x[1:, :, 2][at] = y[0, 0]
def written_then_read(x, y, at):
    x[:, 2] = y
    return x.sum(1), x[:, 1:3] @ y[0]


def read_between(x, y, at):
    x[:, 2] = y
    z = x[:, 1:4].sum(1)
    x[:, 3] = z
    return z


IN_PLACE = [row, rows, last, beyond, nested, three_deep, several, over_each_other, counter, scaled_rows, at_indices,
            copied_at_indices, added_at_indices, scattered, indices_in_a_view, written_then_read, read_between]


def shifted(x, y, at): x[:, 1:] = x[:, :-1].clone()
def from_elsewhere(x, y, at): x[:, 2] = x[:, 3] * 2 + x.flip(1)[:, 0]
def indices_from_itself(x, y, at): x[x[0, :2, 0].long() % 4, 1] = x[2, :2]
def old_contents_returned(x, y, at):
    old = x[:, 2] * 1
    x[:, 2] = y
    return old


def old_and_new(x, y, at):
    old = x[:, 1:3] * 2
    x[:, 2] = y
    return old + x[:, 2:4]


def new_contents_returned(x, y, at):
    x[:, 2] = y
    return x * 1, x.clone(), x[:, 1:3].clone()


def old_between(x, y, at):
    x[:, 2] = y
    z = x[:, 2] * 1
    x[:, 2] = y * 2
    return z


def all_of_it_too(x, y, at):
    x.mul_(2)
    x[:, 2] = y
    return x.sum()


def one_input_into_another(x, y, at):
    y.copy_(x[:, 2])
    x[:, 2] = y + 1
    y[1:] = x[:3, 2]


def nothing(x, y, at):
    x[:, 3:3] = 1.0
    x[at[:0]] = 2.0
    return x.sum()


OTHERS = [nothing, shifted, from_elsewhere, indices_from_itself, old_contents_returned, old_and_new, new_contents_returned,
          old_between, all_of_it_too, one_input_into_another]


def run(fn, inputs):
    with torch.no_grad():
        return fn(*inputs), inputs


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("backend", ["loops", "cpp"])
@pytest.mark.parametrize("fn", IN_PLACE + OTHERS, ids=lambda fn: fn.__name__)
def test_inputs_and_results_are_those_of_eager(fn, backend, layout, fresh):
    def inputs(dtype):
        memory = x.clone() if layout == "contiguous" else x.transpose(0, 1).contiguous().transpose(0, 1)
        return memory.to(dtype), -torch.arange(20.0, dtype=dtype).view(4, 5), torch.tensor([1, 0])
    compiled = minicompile.compile(fn, backend=backend, fullgraph=True)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        (result, expected_after), (got, after) = run(fn, inputs(dtype)), run(compiled, inputs(dtype))
        torch.testing.assert_close(got, result)
        torch.testing.assert_close(after, expected_after, rtol=0, atol=0)


@pytest.mark.parametrize("fn", IN_PLACE, ids=lambda fn: fn.__name__)
def test_no_memory_of_the_size_of_the_input(fn, monkeypatch, fresh):
    programs = []

    def watched(gm, *args):
        programs.append(lower(gm, *args))
        return programs[-1]
    monkeypatch.setattr(minicompile.driver, "lower", watched)
    run(minicompile.compile(fn, fullgraph=True), [x.clone(), -torch.arange(20.0).view(4, 5), torch.tensor([1, 0])])
    (program,) = programs
    large = {name for name, buffer in program.buffers.items() if buffer.layout.size == tuple(x.shape)}
    roots = set()
    for name in large:
        while program.buffers[name].alias_of is not None:
            name = program.buffers[name].alias_of
        roots.add(name)
    assert len(large) > 1 and roots <= set(program.inputs)
