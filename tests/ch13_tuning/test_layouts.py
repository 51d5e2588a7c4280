"""A graph whose convolutions run in channels last: answers, strides and aliases are still eager's."""
import pytest
import torch
import torch.nn.functional as F

import minicompile
from minicompile import driver
from minicompile.ch13_tuning import layouts

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """The pass also on a CPU, and for few channels."""
    monkeypatch.setattr(layouts, "_wants_channels_last", lambda node: node.args[0].meta["val"].dim() == 4)
    monkeypatch.setattr(driver, "reads_many_channels", lambda gm: True)
    seen = []
    run = layouts.Turned.__init__
    monkeypatch.setattr(layouts.Turned, "__init__", lambda self, *args: seen.append(self) or run(self, *args))
    return seen


def view(y, x, w): return y.relu().view(y.shape[0], -1) * 2
def view_and_more(y, x, w): return (z := y.relu()).view(y.shape[0], -1) * 2, F.conv2d(z, w, padding=1)
def features(y, x, w): return y, F.conv2d(y.relu(), w, padding=1)
def patches(y, x, w): return y.flatten(2).transpose(1, 2)
def patches_inside(y, x, w): return y.flatten(2).transpose(1, 2).softmax(-1).contiguous()
def two_windows(y, x, w): return y, y.flatten(1)
def window(y, x, w): return y[:, 1:, ::2]
def written_through_a_view(y, x, w):
    y.flatten(1).mul_(2)
    return y + 1
def written_after_the_view(y, x, w):
    flat = y.reshape(-1)
    y.add_(1)
    return flat * 2
def its_own_contiguous(y, x, w):
    y.contiguous().add_(1)
    return F.conv2d(y, w, padding=1)
def relu_in_place(y, x, w):
    F.relu(y, inplace=True)
    return F.conv2d(y, w, padding=1).view(-1), y
def written_and_returned(y, x, w):
    z = y.view(-1)
    z.mul_(3)
    return y, z, F.conv2d(y, w, padding=1)
def transposed(y, x, w): return y.permute(0, 2, 3, 1).reshape(-1)[::3], y.permute(0, 2, 3, 1)
def strided(y, x, w): return torch.as_strided(y, (3, 4), (2, 1)) * 2
def strided_operator(y, x, w):
    return torch.ops.aten.as_strided.default(y, (3, 4), (2, 1)) * 2, torch.ops.aten.as_strided_copy(y, (3,), (5,))
def strided_scatter(y, x, w): return torch.as_strided_scatter(y, torch.ones(3, 4), (3, 4), (5, 1)) * 2
def written_input(y, x, w):
    x.copy_(y)
    return x.view(-1) + 1
def chunks(y, x, w):
    a, b = y.chunk(2, 1)
    a.mul_(2)
    return y * 1, b
def copied_channels_last(y, x, w):
    z = y.contiguous(memory_format=torch.channels_last)
    z.add_(1)
    return y, z * 2
def copied_and_returned(y, x, w): return y, y.to(memory_format=torch.channels_last)
def copied_transposed(y, x, w):
    z = y.permute(0, 2, 3, 1).reshape(-1)
    z.mul_(2)
    return y + 0, z
def copied_then_the_source(y, x, w):
    z = y.permute(0, 2, 3, 1).contiguous()
    y.add_(1)
    return z * 2
def transposed_result(y, x, w): return (y.transpose(1, 3) + 0, y.sum(1), y.mean((2, 3)))


PROGRAMS = [view, view_and_more, features, patches, patches_inside, two_windows, window, written_through_a_view, written_after_the_view,
            its_own_contiguous, relu_in_place, written_and_returned, transposed, strided, written_input, chunks,
            strided_operator, strided_scatter, copied_channels_last, copied_and_returned, copied_transposed, copied_then_the_source,
            transposed_result]


def ran(program, compiled, train):
    torch.manual_seed(0)
    x, w = torch.randn(2, 4, 6, 6), torch.randn(4, 4, 3, 3, requires_grad=train)

    def f(x, w):
        return program(F.conv2d(x, w, padding=1), x, w)

    outputs = (minicompile.compile(f, fullgraph=True) if compiled else f)(x, w)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    storages = [t.untyped_storage()._cdata for t in (*outputs, x)]
    facts = [(t.shape, t.stride()) for t in outputs], [storages.index(s) for s in storages]
    if train:
        sum((t * torch.arange(t.numel()).view(t.shape)).sum() for t in outputs).backward()
    return facts, [t.detach() for t in outputs], x, w.grad


RAISE = written_input, chunks                  # in eager, when it comes to the backward


@pytest.mark.parametrize("program, train", [(p, train) for p in PROGRAMS for train in (False, True) if not (train and p in RAISE)])
def test_nobody_sees_the_layout(program, train, everywhere):
    got, want = ran(program, True, train), ran(program, False, train)
    assert everywhere and len(everywhere) < 5
    assert got[0] == want[0]
    torch.testing.assert_close(got[1:], want[1:], rtol=1e-4, atol=1e-3)


def test_the_pass_draws_no_random_numbers(everywhere):
    """What makes tensors from nothing is not run when the layouts are looked for."""
    def f(x, w):
        return F.conv2d(x, w).mean((2, 3)) * torch.rand(4) + torch.empty(4).uniform_()

    x, w, compiled = torch.randn(2, 4, 6, 6), torch.randn(4, 4, 3, 3), minicompile.compile(f, fullgraph=True)
    for _ in range(2):
        answers, states = [], []
        for function in (f, compiled):
            torch.manual_seed(0)
            answers.append(function(x, w))
            states.append(torch.get_rng_state())
        torch.testing.assert_close(*answers)
        assert torch.equal(*states)
    assert everywhere


def test_what_needs_no_copy_gets_none(everywhere):
    """Between convolutions, in-place operators included, nothing is turned back."""
    def f(x, w):
        for _ in range(3):
            x = F.relu(F.conv2d(x, w, padding=1), inplace=True)
        return x.flatten(2).softmax(1).sum()

    x, w = torch.randn(2, 4, 6, 6), torch.randn(4, 4, 3, 3)
    torch.testing.assert_close(minicompile.compile(f, fullgraph=True)(x, w), f(x, w))
    assert len(everywhere) == 1 and not everywhere[0].seen


def test_a_graph_that_only_reads_images_keeps_its_layout(everywhere, monkeypatch):
    monkeypatch.setattr(driver, "reads_many_channels", layouts.reads_many_channels)

    def f(x, stem, w):
        y = F.conv2d(x, stem, stride=2)
        return (y if w is None else F.conv2d(y.relu(), w)).sum(1)

    x, stem, w = torch.randn(2, 3, 8, 8), torch.randn(8, 3, 2, 2), torch.randn(4, 8, 3, 3)
    torch.testing.assert_close(minicompile.compile(f, fullgraph=True)(x, stem, None), f(x, stem, None))
    assert not everywhere
    torch.testing.assert_close(minicompile.compile(f, fullgraph=True)(x, stem, w), f(x, stem, w))
    assert everywhere


@pytest.mark.parametrize("f", [
    lambda x, w: F.conv2d(input=x, weight=w), lambda x, w: torch.conv2d(x, weight=w, padding=1),
    lambda x, w: F.conv2d(weight=w, input=x.relu()), lambda x, w: F.conv2d(x, x)])
def test_operands_by_name_or_twice(f, everywhere, monkeypatch):
    monkeypatch.setattr(driver, "reads_many_channels", layouts.reads_many_channels)
    monkeypatch.setattr(layouts, "_wants_channels_last", lambda node: len(layouts.operands_of(node)) == 2)
    x, w = torch.randn(2, 8, 5, 5), torch.randn(4, 8, 3, 3)
    torch.testing.assert_close(minicompile.compile(f, fullgraph=True)(x, w), f(x, w))
    assert everywhere


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_views_and_results_on_a_gpu(mode, monkeypatch):
    """A network that makes vectors of images with `view`, and returns its feature maps."""
    monkeypatch.undo()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(inplace=True), torch.nn.Conv2d(8, 8, 3)).cuda().double()
    head, x = torch.nn.Linear(8 * 36, 5).cuda().double(), torch.randn(4, 3, 8, 8, device="cuda", dtype=torch.double)

    def f(x):
        y = net(x)
        return y, head(y.view(len(y), -1)), y[:, 1:].flatten(2).transpose(1, 2)

    compiled = minicompile.compile(f, mode=mode, fullgraph=True)
    for dtype in (torch.float64, torch.float32):              # cuDNN answers double precision in NCHW
        for module in (net, head):
            module.to(dtype)
        for _ in range(4):
            with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
                got, want = compiled(x.to(dtype)), f(x.to(dtype))
                gradients = [torch.autograd.grad(sum(t.square().sum() for t in out), net[0].weight) for out in (got, want)]
            assert [t.stride() for t in got] == [t.stride() for t in want]
            torch.testing.assert_close((*got, *gradients[0]), (*want, *gradients[1]), rtol=1e-3, atol=1e-3)
