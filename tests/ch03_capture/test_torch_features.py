"""What torch offers inside of captured code: a table of features, each compiled against uncompiled.

A row builds its function and inputs anew, `build() -> (function, inputs)`. Function and inputs are built twice from one seed, once
to run plainly and once to run compiled, and each is called twice. Results, exceptions, gradients, the inputs afterwards,
parameters, buffers, the random stream and the modes of the library must be the same. `graphs=1` means that the whole function is
one graph; None, that it may break anywhere."""
import collections
import contextlib
import copy
import dataclasses
import dis
import enum
import functools
import gc
import io
import logging
import math
import sys
import threading
import types
import warnings
import weakref

import numpy
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from recorders import Captures
from torch.nn.utils import parametrizations, parametrize
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import minicompile
from minicompile.ch02_guards.guards import GuardSet
from minicompile.ch03_capture.capture import CaptureOptions, trace_frame

FEATURES = {}
LOG = []                                # what the programs append to; compared as well


def feature(function=None, *, graphs=1, calls=2, half=False):
    """half: gradients that meet at a parameter are summed in float32 where eager, with its cache of casts, sums in bfloat16."""
    if function is None:
        return functools.partial(feature, graphs=graphs, calls=calls, half=half)
    assert function.__name__ not in FEATURES
    FEATURES[function.__name__] = function, graphs, calls, half
    return function

pytestmark = pytest.mark.usefixtures("fresh")


def rand(*shape, grad=True):
    return torch.randn(*shape).requires_grad_(grad)


def modes():
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), torch.get_default_device(),
            torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.are_deterministic_algorithms_enabled(),
            torch.is_autocast_cache_enabled())


def facts(t):
    if not isinstance(t, torch.Tensor):
        return t
    return (type(t), t.dtype, t.shape, t.requires_grad, t.is_leaf, t.is_inference(), t.device)


def state_of(function, inputs):
    owner = getattr(function, "__self__", function)
    found = [t for t in pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor)]
    if isinstance(owner, nn.Module):
        found += [*owner.parameters(), *owner.buffers()]
    return found


def run(build, compile_, calls):
    """Everything that can be seen of `calls` calls."""
    torch.manual_seed(3)
    LOG.clear()
    function, inputs = build()
    compiled = compile_(function)
    seen = []
    for _ in range(calls):
        try:
            result = compiled(*inputs)
        except Exception as error:
            seen.append((type(error), str(error).splitlines()[:1]))
            result = None
        flat = pytree.tree_leaves(result)
        roots = [t for t in flat if isinstance(t, torch.Tensor) and t.requires_grad and t.grad_fn is not None]
        if roots:
            sum((r.abs() ** 2).sum() for r in roots).backward()
        seen.append(flat)
        seen.append(modes())
    state = state_of(function, inputs)
    seen += [state, [t.grad if t.is_leaf or t.retains_grad else None for t in state], list(LOG), torch.get_rng_state()]
    if isinstance(function, nn.Module):
        seen.append([sorted(function.state_dict()), function.training])
    return seen


def check_same(got, want, path="seen", **tolerance):
    if isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor), (path, got)
        assert facts(got) == facts(want), path
        if type(want) in (torch.Tensor, nn.Parameter, nn.Buffer):
            torch.testing.assert_close(got.detach(), want.detach(), equal_nan=True, msg=lambda m: f"{path}: {m}", **tolerance)
    elif isinstance(want, (list, tuple)):
        assert type(got) is type(want) and len(got) == len(want), (path, got, want)
        for i, (g, w) in enumerate(zip(got, want)):
            check_same(g, w, f"{path}[{i}]", **tolerance)
    elif isinstance(want, float) and want != want:
        assert got != got, path
    else:
        assert got == want, (path, got, want)


# ---- torch.autograd.Function ----------------------------------------------------------------------------------------

class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x ** 3

    @staticmethod
    def backward(ctx, grad):
        x, = ctx.saved_tensors
        return 7 * grad * x ** 2                     # not the derivative: shows who computes it


class Scaled(torch.autograd.Function):
    """Non-tensor arguments, attributes of ctx, an unused gradient, several outputs."""

    @staticmethod
    def forward(ctx, x, weight, factor, mode="a"):
        ctx.factor, ctx.mode = factor, mode
        ctx.save_for_backward(x, weight)
        return x * weight * factor, x.sum()

    @staticmethod
    def backward(ctx, grad, grad_sum):
        x, weight = ctx.saved_tensors
        gx = gw = None
        if ctx.needs_input_grad[0]:
            gx = grad * weight * ctx.factor * 2 + grad_sum
        if ctx.needs_input_grad[1]:
            gw = (grad * x).sum(0) * (3 if ctx.mode == "a" else 4)
        return gx, gw, None, None


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


class SortIndices(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        values, indices = x.sort(-1)
        ctx.mark_non_differentiable(indices)
        ctx.save_for_backward(indices)
        return values, indices

    @staticmethod
    def backward(ctx, grad, _):
        indices, = ctx.saved_tensors
        return torch.zeros_like(grad).scatter(-1, indices, grad) * 5


class Doubled(torch.autograd.Function):
    """Saves nothing."""
    @staticmethod
    def forward(ctx, x):
        order = x.argsort()
        ctx.mark_non_differentiable(order)
        return x * 2, order

    @staticmethod
    def backward(ctx, grad, _):
        return grad * 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_function_that_saves_nothing_has_several_backwards(backend):
    x = torch.arange(3., requires_grad=True)
    y, _ = minicompile.compile(lambda x: Doubled.apply(x), backend=backend)(x)
    for n in (2, 4):
        y.sum().backward()
        assert x.grad.tolist() == [n] * 3


class NewStyle(torch.autograd.Function):
    @staticmethod
    def forward(x, k):
        return x.sin() * k

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, k = inputs
        ctx.k = k
        ctx.save_for_backward(x, output)

    @staticmethod
    def backward(ctx, grad):
        x, out = ctx.saved_tensors
        return grad * x.cos() * ctx.k + out, None


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        ctx.shape = x.shape
        return x.sum(), x * 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g1, g2):
        out = torch.zeros(ctx.shape)
        if g1 is not None:
            out = out + g1
        if g2 is not None:
            out = out + 11 * g2
        return out


class InPlaceFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class SavedInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.relu_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        x, = ctx.saved_tensors
        return grad * (x > 0)


class InPlaceProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w)
        ctx.mark_dirty(x.mul_(w))
        return x

    @staticmethod
    def backward(ctx, grad):
        w, = ctx.saved_tensors
        return grad * w, grad * 5


class Printing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        LOG.append("forward")
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        LOG.append("backward")
        return grad * 3


class GradModes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        assert not torch.is_grad_enabled()
        y = x * 2
        assert not y.requires_grad
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 9


class Saves(torch.autograd.Function):
    """An intermediate that is neither input nor output, kept as an attribute."""
    @staticmethod
    def forward(ctx, x):
        ctx.e = x.exp()
        return ctx.e + 1

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.e * 2


@torch.jit.script
def scripted(x: torch.Tensor, n: int) -> torch.Tensor:
    if n > 2:
        x = torch.sin(x)
    return x * n


@feature
def function_under_script():
    return lambda x: scripted(x, 3) + scripted(x, n=2), (rand(3),)


@feature(graphs=None)
def function_under_trace():
    recorded = torch.jit.trace(lambda x: x * 2 if x.sum() > 0 else x * 3, torch.ones(3), check_trace=False)
    return lambda x: recorded(x) + 1, (torch.full((3,), -1.0),)


@feature
def annotated_for_script():
    def f(x):
        found = torch.jit.annotate(list[torch.Tensor], [])
        found.append(x.sin())
        return found
    return f, (rand(3),)


@feature
def function_apply():
    return lambda x: Cube.apply(x * 2) + 1, (rand(3),)


@feature
def function_apply_twice():
    return lambda x: Cube.apply(Cube.apply(x)) + Cube.apply(x), (rand(3),)


@feature
def function_without_grad():
    return lambda x: Cube.apply(x) + 1, (rand(3, grad=False),)


@feature
def function_under_no_grad():
    def f(x):
        with torch.no_grad():
            y = Cube.apply(x)
        return y + x
    return f, (rand(3),)


@feature
def function_with_arguments():
    return lambda x, w: Scaled.apply(x, w, 2.5), (rand(4, 3), rand(3))


@feature
def function_needs_input_grad():
    def f(x, w):
        a, b = Scaled.apply(x, w, 2, "b")
        return a.sum() + b
    return f, (rand(4, 3), rand(3, grad=False))


@feature
def function_straight_through():
    return lambda x: StraightThrough.apply(x * 3).sum() + x.mean(), (rand(5),)


@feature
def function_non_differentiable():
    def f(x):
        v, i = SortIndices.apply(x)
        return v * 2, i
    return f, (rand(4, 5),)


@feature
def function_setup_context():
    return lambda x: NewStyle.apply(x, 4).exp(), (rand(4),)


@feature
def function_once_differentiable():
    def f(x):
        a, b = Once.apply(x)
        return b * 3
    return f, (rand(4),)


@feature
def function_in_place():
    return lambda x: InPlaceFunction.apply(x.clone()) + x, (rand(4),)


@feature
def function_written_in_place_is_its_argument():
    def f(x):
        y = x * 2
        z = InPlaceFunction.apply(y)
        z.add_(1)
        return z is y, y * z, y
    return f, (rand(4),)


@feature
def function_written_in_place_twice():
    def f(x):
        y = x * 2
        for _ in range(2):
            y = SavedInPlace.apply(InPlaceFunction.apply(y)) + 1
        return y
    return f, (rand(4),)


@feature
def function_written_in_place_without_gradients():
    def f(x):
        y = x.detach()
        return InPlaceFunction.apply(y) is y, x * y
    return f, (rand(4),)


@feature
def function_written_in_place_gets_a_history():
    def f(x):
        y = torch.ones(4)
        return InPlaceProduct.apply(y, x), y.requires_grad
    return f, (rand(4),)


@feature(graphs=None)
def function_written_in_place_saved_and_written_again():
    def f(x):
        y = SavedInPlace.apply(x * 2)
        y.add_(1)
        try:
            torch.autograd.grad(y.sum(), x)
        except RuntimeError:
            return "raised"
    return f, (rand(4),)


@feature(graphs=None)
def function_written_in_place_a_view():
    def f(x):
        y = x * 2
        row = y[1:]
        return InPlaceFunction.apply(row) + 1, y
    return f, (rand(4),)


@feature(graphs=None)
def function_side_effects():
    return lambda x: Printing.apply(x) + 1, (rand(4),)


@feature
def function_grad_mode_inside():
    return lambda x: GradModes.apply(x.sin()), (rand(4),)


@feature
def function_saves_on_ctx():
    return lambda x: Saves.apply(x.sin()), (rand(4),)


@feature
def function_in_module():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 3)

        def forward(self, x):
            return StraightThrough.apply(self.lin(x)) * Cube.apply(self.lin.weight).sum()
    return M(), (rand(2, 3),)


# ---- checkpoint -----------------------------------------------------------------------------------------------------

class Block(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(4, 8), nn.Linear(8, 4), nn.Dropout(p)

    def forward(self, x):
        return x + self.drop(self.b(torch.relu(self.a(x))))


class Checkpointed(nn.Module):
    def __init__(self, reentrant, p=0.0, **kwargs):
        super().__init__()
        self.blocks = nn.ModuleList([Block(p), Block(p)])
        self.kwargs = dict(use_reentrant=reentrant, **kwargs)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, **self.kwargs)
        return x


@feature
def checkpoint_modern():
    return Checkpointed(False), (rand(3, 4),)


@feature
def checkpoint_reentrant():
    return Checkpointed(True), (rand(3, 4),)


@feature
def checkpoint_dropout():
    return Checkpointed(False, 0.5), (rand(3, 4),)


@feature
def checkpoint_dropout_reentrant():
    return Checkpointed(True, 0.5), (rand(3, 4),)


@feature
def checkpoint_no_rng_state():
    return Checkpointed(False, preserve_rng_state=False), (rand(3, 4),)


@feature
def checkpoint_lambda():
    def f(x, w):
        y = checkpoint(lambda a, b: torch.sin(a @ b), x, w, use_reentrant=False)
        return y.cos() @ w
    return f, (rand(4, 4), rand(4, 4))


@feature
def checkpoint_keyword_arguments():
    def g(a, *, scale):
        return (a * scale).exp()
    return lambda x: checkpoint(g, x, scale=3.0, use_reentrant=False) + x, (rand(4),)


@feature(graphs=None)
def checkpoint_no_grad_input_reentrant():
    return Checkpointed(True), (rand(3, 4, grad=False),)


@feature
def checkpoint_in_sequence():
    m = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())

    def f(x):
        return checkpoint_sequential(m, 2, x, use_reentrant=False)
    return f, (rand(3, 4),)


@feature
def checkpoint_in_sequence_reentrant():
    m = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Tanh())

    def f(x):
        return checkpoint_sequential(m, 3, x, use_reentrant=True)
    return f, (rand(3, 4),)


@feature(graphs=None)
def quantization_of_channels_observed_for_the_first_time():
    from torch.ao.quantization import FusedMovingAvgObsFakeQuantize, MovingAveragePerChannelMinMaxObserver
    quantized = FusedMovingAvgObsFakeQuantize(observer=MovingAveragePerChannelMinMaxObserver, quant_min=-128, quant_max=127,
                                              dtype=torch.qint8, qscheme=torch.per_channel_symmetric)
    m = nn.Linear(4, 5)

    def f(x):
        return torch.relu(x @ quantized(m.weight).T), quantized.scale.clone()
    return f, (rand(3, 4),)


# ---- parameters that the function makes ---------------------------------------------------------------------------------

@feature
def parameter_of_a_constant():
    return lambda x: (nn.Parameter(torch.full((3,), 2.0)) * x).sum(), (rand(3),)


@feature
def parameter_made_and_returned():
    return lambda x: (nn.Parameter(x * 2), nn.Parameter(x.detach() + 1, requires_grad=False)), (rand(3),)


@feature
def parameter_made_is_one():
    def f(x):
        p = nn.Parameter(torch.ones(3))
        return isinstance(p, nn.Parameter), type(p) is nn.Parameter, p.requires_grad, p.is_leaf, p.grad_fn, p.detach() * x
    return f, (rand(3),)


@feature
def parameter_made_in_a_module():
    def f(x):
        m = nn.Linear(3, 2)
        loss = (m(x.detach()) ** 2).sum()
        loss.backward()
        return loss.detach(), [(name, p.grad) for name, p in m.named_parameters()]
    return f, (rand(4, 3),)


@feature
def parameter_made_and_fitted():
    def f(x):
        p = nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.SGD([p], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (p - x.detach()).square().sum().backward()
            optimizer.step()
        return p
    return f, (rand(3),)


@feature(graphs=None)
def parameter_made_of_memory_that_is_written():
    def f(x):
        t = x.detach() * 2
        p = nn.Parameter(t)
        t.add_(1)
        with torch.no_grad():
            p.mul_(3)
        return p, t
    return f, (rand(3),)


@feature(graphs=None)
def parameter_made_of_an_argument():
    return lambda x: nn.Parameter(x), (rand(3),)


# ---- requires_grad_, detach_, hooks, backward inside ----------------------------------------------------------------

@feature(graphs=None)
def requires_grad_on_intermediate():
    def f(x):
        y = x * 2
        y.requires_grad_()
        z = (y ** 2).sum()
        return z, y.requires_grad
    return f, (rand(3, grad=False),)


@feature(graphs=None)
def requires_grad_of_input():
    def f(x):
        x.requires_grad_(True)
        return (x * 2).sum()
    return f, (rand(3, grad=False),)


@feature(graphs=None)
def detach_in_place():
    def f(x):
        y = x * 2
        y.detach_()
        return y + x
    return f, (rand(3),)


@feature
def detach():
    return lambda x: (x.detach() * 3 + x, x.detach().requires_grad), (rand(3),)


@feature(graphs=None)
def retain_grad():
    def f(x):
        y = x * 2
        y.retain_grad()
        (y ** 2).sum().backward()
        return y.grad + 1
    return f, (rand(3),)


@feature(graphs=None)
def hook_on_intermediate():
    def f(x):
        y = x * 2
        y.register_hook(lambda g: g * 10)
        return (y ** 2).sum()
    return f, (rand(3),)


@feature(graphs=None)
def backward_inside():
    def f(x):
        y = (x.sin() * 2).sum()
        y.backward()
        return x.grad * 3
    return f, (rand(3),)


@feature(graphs=None)
def autograd_grad_inside():
    def f(x):
        y = (x.sin() * 2).sum()
        g, = torch.autograd.grad(y, x)
        return g * 3 + x
    return f, (rand(3),)


@feature(graphs=None, calls=3)
def training_step():
    m = nn.Linear(3, 2)
    opt = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)

    def step(x):
        opt.zero_grad()
        loss = m(x.sin()).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(m.parameters(), 0.5)
        opt.step()
        return loss.detach(), m.weight.detach().clone()
    return step, (rand(4, 3, grad=False),)


@feature(graphs=None, calls=3)
def training_step_adam():
    m = nn.Linear(3, 2)
    opt = torch.optim.AdamW(m.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1)

    def step(x):
        opt.zero_grad(set_to_none=True)
        loss = m(x.sin()).pow(2).mean()
        loss.backward()
        opt.step()
        schedule.step()
        return loss.detach(), m.weight.detach().clone()
    return step, (rand(4, 3, grad=False),)


@feature
def gradient_as_input():
    x = rand(3)
    (x * 2).sum().backward()
    return lambda: x.grad * 2, ()


@feature(graphs=None)
def gradient_written():
    x = rand(3)
    (x * 2).sum().backward()

    def f():
        y = x.detach() * 2
        x.grad = y
        return x.grad + 1
    return f, ()


@feature(graphs=None)
def gradient_zeroed():
    x = rand(3)
    (x * 2).sum().backward()

    def f():
        x.grad.zero_()
        r = x * 2
        x.grad = None
        return r, x.grad is None
    return f, ()


# ---- Modes ------------------------------------------------------------------------------------------------------------

@feature
def grad_modes():
    @torch.no_grad()
    def g(x):
        return x * 2

    @torch.enable_grad()
    def h(x):
        return x * 3

    def f(x):
        with torch.no_grad():
            a, seen = h(x), torch.is_grad_enabled()
        with torch.set_grad_enabled(False):
            b = x * 2
        return g(x), a, b, seen, torch.is_grad_enabled()
    return f, (rand(3),)


@feature
def grad_modes_by_hand():
    class Quiet(torch.no_grad):
        def __enter__(self):
            super().__enter__()
            return self

    def f(x):
        quiet, loud = Quiet(), torch.enable_grad()
        with quiet as same, loud:
            loud.prev, seen = False, (same is quiet, quiet.prev, torch.is_grad_enabled())
        quiet.prev = False
        torch.no_grad.__exit__(quiet, exc_type=None, exc_value=None, traceback=None)
        y = x * 2
        loud.__enter__()
        return y, seen, loud.prev, x * 3
    return f, (rand(3),)


@feature
def set_grad_enabled_as_function():
    def f(x):
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        y = x * 2
        torch.set_grad_enabled(before)
        return y, x * 3
    return f, (rand(3),)


@feature
def contexts_that_refuse_their_arguments():
    makers = (lambda: torch.set_grad_enabled(1), lambda: torch.set_grad_enabled(None), lambda: torch.set_grad_enabled(),
              lambda: torch.set_grad_enabled(mode=False), lambda: torch.autocast("cpu", enabled=2), lambda: torch.autocast("q"),
              lambda: torch.autocast())

    def f(x):
        out = []
        for make in makers:
            try:
                with make():
                    out.append((x * 2).requires_grad)
            except Exception as error:
                out.append((type(error), str(error), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return out
    return f, (rand(3).requires_grad_(),)


@feature(graphs=2)
def no_grad_with_arguments():
    def f(x):
        try:
            with torch.no_grad(3):
                return x * 2
        except TypeError as error:
            return x * 3, str(error)
    return f, (rand(3),)


@feature
def set_grad_enabled_decorator():
    @torch.set_grad_enabled(False)
    def g(x):
        return x * 2

    @torch.no_grad
    def k(x):
        return x + 1
    return lambda x: (g(x), k(x), x * 3), (rand(3),)


@feature(calls=1)
def grad_mode_left_off():
    def f(x):
        torch.set_grad_enabled(False)
        return x * 2, torch.is_grad_enabled()
    return lambda x: (f(x), torch.set_grad_enabled(True) and None)[0], (rand(3),)


@feature(graphs=None)
def inference_mode_context():
    def f(x):
        with torch.inference_mode():
            y = x * 2
            seen = torch.is_inference_mode_enabled()
        return y, seen, y.is_inference(), y.requires_grad
    return f, (rand(3),)


@feature(graphs=None)
def inference_mode_decorator():
    @torch.inference_mode()
    def f(x):
        return x * 2 + 1
    return f, (rand(3),)


@feature(graphs=None)
def inference_tensor_as_input():
    with torch.inference_mode():
        y = torch.randn(3)
    return lambda x: (x.detach() * y, x.detach() + y.sum()), (rand(3),)


@feature(graphs=None)
def called_under_inference_mode():
    def f(x):
        return (x * 2).sin() + 1

    def g(x):
        with torch.inference_mode():
            return f(x)
    return g, (rand(3),)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_whether_a_tensor_was_made_under_inference_mode(mode):
    def f(x, y):
        tensors = x, x + 1, x[1:], y, y * 2, y[1:], torch.ones(2), y.detach(), x.view(-1).clone()
        return [t.is_inference() for t in tensors], torch.is_inference(y)
    with torch.inference_mode():
        made = torch.ones(3)
    compiled = minicompile.compile(f, fullgraph=True, backend="eager")
    for x, y in ((torch.ones(3), made), (made, torch.ones(3))):
        with mode():
            assert compiled(x, y) == f(x, y)


@pytest.mark.filterwarnings("ignore:To copy construct")
def test_a_tensor_of_a_tensor_is_made_on_the_default_device():
    compiled = minicompile.compile(lambda x: torch.tensor(x), fullgraph=True, backend="eager")
    with torch.device("meta"):
        assert compiled(torch.ones(3, device="cpu")).device.type == "meta"
    assert compiled(torch.ones(3)).device.type == "cpu"


def test_the_list_of_warnings_has_what_an_operation_of_the_graph_warns_of():
    def f(x, mask, value):
        with warnings.catch_warnings(record=True) as seen:
            x[mask] = value
            found = len(seen)
        return found
    compiled = minicompile.compile(f, backend="eager")
    args = torch.ones(3, 2), torch.tensor([1, 0, 1], dtype=torch.uint8), torch.zeros(2)             # an index that PyTorch warns of
    for action, expected in (("always", 1), ("ignore", 0), ("always", 1)):
        with warnings.catch_warnings():
            warnings.simplefilter(action)
            compiled(*args)                                          # which may warn while it is compiled
            assert f(*args) == compiled(*args) == expected


def test_a_tensor_of_a_tensor_warns_at_its_line():
    def f(x):
        return torch.tensor(x) + 1
    compiled = minicompile.compile(f, fullgraph=True, backend="eager")
    for _ in range(2):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            compiled(torch.ones(3))
            f(torch.ones(3))
        said, expected = [(str(w.message), w.category, w.filename, w.lineno) for w in seen]
        assert said == expected


@feature(graphs=None)
def inference_mode_off():
    def f(x):
        with torch.inference_mode(False):
            return x * 2
    return f, (rand(3),)


@feature(half=True)
def autocast_nested():
    def f(x, w):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            a = x @ w
            with torch.autocast("cpu", enabled=False):
                b = x @ w
                seen = torch.is_autocast_enabled("cpu")
            c = a @ w
            return a, b, c, seen, torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return f, (rand(3, 3), rand(3, 3))


@feature
def autocast_decorator():
    @torch.autocast("cpu", dtype=torch.bfloat16)
    def g(x, w):
        return x @ w
    return lambda x, w: g(x, w).float() + x, (rand(3, 3), rand(3, 3))


@feature(half=True)
def autocast_cache():
    m = nn.Linear(3, 3)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.m = m

        def forward(self, x):
            with torch.amp.autocast("cpu", dtype=torch.bfloat16):
                a = self.m(x) + self.m(x)
                with torch.no_grad():
                    b = self.m(x)
                c = self.m(x)
                with torch.amp.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
                    d = self.m(x)
            return a, b, c, d
    return M(), (rand(2, 3),)


@feature(graphs=None)
def called_under_autocast():
    @minicompile.disable
    def outer(f, x, w):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return f(x, w)

    def f(x, w):
        return x @ w + 1
    return lambda x, w: outer(f, x, w), (rand(3, 3), rand(3, 3))


@feature
def device_context():
    def f(x):
        with torch.device("cpu"):
            y = torch.ones(3)
        return x + y, y.device
    return f, (rand(3),)


@feature
def device_of_a_cpu_with_an_index():
    def f(x):
        made = torch.ones(2, device="cpu:0"), x.to("cpu:0", torch.float64), x.new_zeros(1, device=torch.device("cpu", 0))
        return x + 1, [t.device for t in made], torch.device("cpu:0"), made[0].device == x.device, torch.ones(2, device="meta:0").device
    return f, (rand(3),)


@feature
def device_context_meta():
    def f(x):
        with torch.device("meta") as d:
            y = torch.ones(3) * 2
            with torch.device("cpu"):
                z = torch.zeros(3) + torch.tensor([1.0, 2.0, 3.0])
        return x + 1 + z, y.device.type, y.shape, d
    return f, (rand(3),)


@feature(graphs=None)
def device_context_broken():
    def f(x):
        with torch.device("meta"):
            y = torch.ones(3) * 2
            LOG.append(x.sum().item())
            z = torch.ones(2)
        return x + torch.ones(3), y.device.type, z.device.type
    return f, (rand(3),)


@feature(graphs=None)
def device_default_changed():
    def f(x):
        return torch.ones(3).device.type, torch.tensor([1.0]).device.type

    def g(x):
        a = f(x)
        torch.set_default_device("meta")
        try:
            return a, f(x)
        finally:
            torch.set_default_device(None)
    return g, (rand(3),)


class Counting(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        LOG.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


@feature(graphs=None)
def function_mode():
    def f(x):
        return x.sin() + 1

    def g(x):
        a = f(x)
        with Counting():
            b = f(x)
        return a, b, f(x)
    return g, (rand(3),)


@feature(graphs=None)
def default_dtype_inside():
    def f(x):
        torch.set_default_dtype(torch.float64)
        try:
            y = torch.ones(3) * 2.5
        finally:
            torch.set_default_dtype(torch.float32)
        return x + y, y.dtype, torch.get_default_dtype()
    return f, (rand(3),)


@feature(graphs=None)
def default_dtype_outside():
    def f(x):
        return torch.ones(3) + x.double(), torch.tensor(2.5).dtype

    def g(x):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        r = f(x)
        torch.set_default_dtype(before)
        return r, f(x)
    return g, (rand(3),)


# ---- Functions of torch that are no operators --------------------------------------------------------------------------

@feature(graphs=None)
def memory_lent_to_other_libraries():
    def f(x):
        y = x + 1
        lent = torch.from_dlpack(torch.utils.dlpack.to_dlpack(y))
        lent.mul_(2)
        return y, torch.asarray(torch.utils.dlpack.to_dlpack(y)).data_ptr() == y.data_ptr()
    return f, (rand(3, grad=False),)


@feature(graphs=None)
def settings_changed_inside():
    def f(x):
        old = torch.get_autocast_dtype("cpu")
        torch.set_autocast_dtype("cpu", torch.float16)
        try:
            with torch.autocast("cpu"):
                y = x @ x
        finally:
            torch.set_autocast_dtype("cpu", old)
        known = torch.set_flush_denormal(True)
        z = torch.full((2,), 1e-41) * 2
        torch.set_flush_denormal(False)
        return y.dtype, known, z
    return f, (rand(3, 3),)


@feature(graphs=None)
def inference_tensors_in_a_loop():
    def f(x):
        found = []
        with torch.inference_mode():
            for _ in range(2):
                y = x * x
                found += [torch.is_inference(y), torch.is_inference(y.view(-1))]
        return found, torch.resize_as_(torch.ones(1), x).shape
    return f, (rand(3),)


# ---- Random numbers -----------------------------------------------------------------------------------------------------

@feature
def random_functions():
    def f(x):
        return (torch.rand(3), torch.randn(2, 3), torch.randint(0, 10, (4,)), torch.randperm(5), torch.rand_like(x),
                torch.bernoulli(x.sigmoid()), F.dropout(x, 0.5), torch.normal(0.0, 1.0, (3,)), x.detach().clone().uniform_(),
                torch.multinomial(x.detach().softmax(0), 2))
    return f, (rand(3),)


@feature(graphs=None)
def manual_seed_inside():
    def f(x):
        torch.manual_seed(5)
        a = torch.rand(3)
        torch.manual_seed(5)
        return a + x, torch.rand(3)
    return f, (rand(3),)


@feature(graphs=None)
def rng_state_inside():
    def f(x):
        state = torch.get_rng_state()
        a = torch.rand(3)
        torch.set_rng_state(state)
        return a + x, torch.rand(3)
    return f, (rand(3),)


@feature(graphs=None)
def fork_rng():
    def f(x):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            a = torch.rand(3)
        return a + x, torch.rand(3)
    return f, (rand(3),)


@feature(graphs=None)
def generator_argument():
    g = torch.Generator().manual_seed(4)
    return lambda x: (torch.rand(3, generator=g) + x, torch.randn(2, generator=g), torch.randperm(3, generator=g)), (rand(3),)


@feature(graphs=None)
def generator_as_input():
    def f(x, g):
        return torch.rand(3, generator=g) + x, F.dropout(x, 0.3), x.detach().clone().normal_(generator=g)
    return f, (rand(3), torch.Generator().manual_seed(4))


@feature(graphs=None)
def generator_made_inside():
    def f(x):
        g = torch.Generator()
        g.manual_seed(12)
        return torch.rand(3, generator=g) + x
    return f, (rand(3),)


# ---- Subclasses, custom operators -----------------------------------------------------------------------------------------

class Tagged(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        LOG.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


class Plain(torch.Tensor):
    pass


@feature(graphs=None)
def subclass_as_input():
    def f(x, t):
        a = x.sin()
        b = t * 2
        return a + 1, b, type(b).__name__
    return f, (rand(3), torch.ones(3).as_subclass(Tagged))


@feature(graphs=None)
def subclass_plain():
    def f(x, t):
        return x.sin() + 1, t + 1, isinstance(t, Plain)
    return f, (rand(3), torch.ones(3).as_subclass(Plain))


@feature(graphs=None)
def subclass_in_container():
    def f(x, box):
        y = x.cos()
        return y * 2, box["t"].shape, [box["t"]]
    return f, (rand(3), {"t": torch.ones(3).as_subclass(Plain)})


@feature(graphs=None)
def subclass_made_inside():
    def f(x):
        y = (x * 2).as_subclass(Plain)
        return type(y).__name__, y + 1
    return f, (rand(3, grad=False),)


@feature
def parameters_and_buffers_as_inputs():
    def f(p, b):
        return p * b + 1, isinstance(p, nn.Parameter), type(p).__name__, isinstance(b, nn.Buffer), isinstance(p, torch.Tensor)
    return f, (nn.Parameter(torch.ones(3)), nn.Buffer(torch.ones(3)))


@feature(graphs=None)
def sparse_tensor():
    def f(x, s):
        return torch.sparse.mm(s, x) + 1
    return f, (rand(3, 3), torch.eye(3).to_sparse())


_lib = torch.library.Library("minicompile_features", "DEF")
_lib.define("double(Tensor x) -> Tensor")
_lib.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
torch.library.register_fake("minicompile_features::double", lambda x: torch.empty_like(x))
_lib.define("no_fake(Tensor x) -> Tensor")
_lib.impl("no_fake", lambda x: x * 2, "CPU")


@torch.library.custom_op("minicompile_features::triple", mutates_args=())
def triple(x: torch.Tensor, k: float) -> torch.Tensor:
    return torch.from_numpy(x.detach().numpy() * 3 * k)


@triple.register_fake
def _(x, k):
    return torch.empty_like(x)


triple.register_autograd(lambda ctx, grad: (grad * 3 * ctx.k, None),
                         setup_context=lambda ctx, inputs, output: setattr(ctx, "k", inputs[1]))


@torch.library.custom_op("minicompile_features::fill", mutates_args=("x",))
def fill(x: torch.Tensor, v: float) -> None:
    x.detach().numpy()[:] = v


LIBRARY = torch.library.Library("minicompile_tests_plain", "FRAGMENT")
LIBRARY.define("doubled_(Tensor(a!) x) -> Tensor(a!)")
LIBRARY.impl("doubled_", lambda x: x.mul_(2), "CPU")
LIBRARY.impl("doubled_", lambda x: x, "Meta")            # does not count the version


@feature(graphs=None)
def custom_operator_writes_without_counting():
    def f(x):
        y = x.detach().clone()
        torch.ops.minicompile_tests_plain.doubled_(y)
        return y + 1
    return f, (rand(3),)


for _name, _results in (("turned", "Tensor"), ("parts", "Tensor[]")):
    LIBRARY.define(f"{_name}(Tensor x) -> {_results}")
LIBRARY.impl("turned", lambda x: x.sin(), "CPU")
LIBRARY.impl("parts", lambda x: [x.detach() * 2, x.cos()], "CPU")
torch.library.register_fake("minicompile_tests_plain::turned", torch.empty_like)
torch.library.register_fake("minicompile_tests_plain::parts", lambda x: [torch.empty_like(x), torch.empty_like(x)])


@feature(graphs=2)
def custom_operator_without_a_derivative():
    """Eager differentiates what its kernel calls."""
    return lambda x: torch.ops.minicompile_tests_plain.turned(x * 2) + 1, (rand(3),)


@feature(graphs=None)
def custom_operator_of_several_results_without_a_derivative():
    return lambda x: sum(torch.ops.minicompile_tests_plain.parts.default(x)) * x, (rand(3),)


LIBRARY.define("looked_into(Tensor x) -> Tensor")
LIBRARY.impl("looked_into", lambda x: x.exp(), "CPU")
LIBRARY.impl("looked_into", torch.library.fallthrough_kernel, "Autograd")
torch.library.register_fake("minicompile_tests_plain::looked_into", torch.empty_like)


@feature(graphs=2)
def custom_operator_that_autograd_passes_by():
    return lambda x: torch.ops.minicompile_tests_plain.looked_into(x.cos()) * x, (rand(3),)


@feature
def custom_operator_without_a_derivative_where_none_is_wanted():
    return lambda x: torch.ops.minicompile_tests_plain.turned(x.detach() * 2) + x, (rand(3),)


@feature(graphs=None)
def quantized_tensors():
    def f(x):
        q = torch.quantize_per_tensor(x, 0.1, 2, torch.quint8)
        return q.is_quantized, q.dtype, q.dequantize() + 1, q.int_repr()
    return f, (rand(3, grad=False),)


@feature
def custom_operator():
    return lambda x: torch.ops.minicompile_features.double(x.sin()) + 1, (rand(3, grad=False),)


@feature
def custom_operator_function():
    return lambda x: triple(x.sin(), 2.0) + torch.ops.minicompile_features.triple(x, 3.0), (rand(3),)


@feature(graphs=None)
def custom_operator_mutates():
    def f(x):
        y = x * 2
        fill(y, 4.0)
        return y + x
    return f, (rand(3, grad=False),)


@feature(graphs=None)
def custom_operator_without_fake():
    return lambda x: torch.ops.minicompile_features.no_fake(x.sin()) + 1, (rand(3, grad=False),)


@feature
def aten_operators():
    return lambda x: torch.ops.aten.mul.Tensor(x, 2) + torch.ops.aten.relu(x) + torch.ops.aten.add(x, 1), (rand(3),)


# ---- Hooks of modules ---------------------------------------------------------------------------------------------------

def hooked(register):
    m = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    register(m)
    return m, (rand(2, 3),)


@feature
def forward_hook():
    return hooked(lambda m: m[0].register_forward_hook(lambda mod, args, out: out * 2))


@feature
def forward_hook_with_kwargs():
    def hook(mod, args, kwargs, out):
        return out + len(args) + len(kwargs)
    return hooked(lambda m: m[0].register_forward_hook(hook, with_kwargs=True))


@feature
def forward_pre_hook():
    return hooked(lambda m: m[2].register_forward_pre_hook(lambda mod, args: (args[0] * 3,)))


@feature
def forward_pre_hook_with_kwargs():
    return hooked(lambda m: m[2].register_forward_pre_hook(lambda mod, args, kw: ((args[0] * 3,), kw), with_kwargs=True))


@feature
def forward_hook_records():
    return hooked(lambda m: m[0].register_forward_hook(lambda mod, args, out: LOG.append(tuple(out.shape))))


@feature
def forward_hook_keeps_activations():
    kept = {}

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(3, 3)
            self.l.register_forward_hook(lambda mod, args, out: kept.__setitem__("l", out.detach()))

        def forward(self, x):
            y = self.l(x)
            return y + kept["l"]
    return M(), (rand(2, 3),)


@feature(graphs=None)
def full_backward_hook():
    return hooked(lambda m: m[0].register_full_backward_hook(lambda mod, gi, go: (gi[0] * 2,)))


@feature(graphs=None)
def full_backward_pre_hook():
    return hooked(lambda m: m[2].register_full_backward_pre_hook(lambda mod, go: (go[0] * 2,)))


@feature(graphs=None)
def hook_on_root():
    m = nn.Linear(3, 3)
    m.register_forward_hook(lambda mod, args, out: out.relu() * 2)
    m.register_forward_pre_hook(lambda mod, args: args[0] + 1)
    m.register_full_backward_hook(lambda mod, gi, go: (gi[0] * 3,))
    return m, (rand(2, 3),)


@feature(graphs=None)
def hook_added_and_removed():
    m = nn.Linear(3, 3)

    def f(x):
        handle = m.register_forward_hook(lambda mod, args, out: out * 2)
        a = m(x)
        handle.remove()
        return a, m(x)
    return f, (rand(2, 3),)


@feature(graphs=None)
def parameter_hook():
    m = nn.Linear(3, 3)
    m.weight.register_hook(lambda g: g * 5)
    return m, (rand(2, 3),)


@feature(graphs=None)
def global_hooks():
    m = nn.Linear(3, 3)

    def f(x):
        return m(x) + 1

    def g(x):
        handle = nn.modules.module.register_module_forward_hook(lambda mod, args, out: out * 2)
        try:
            return f(x)
        finally:
            handle.remove()
    return lambda x: (f(x), g(x), f(x)), (rand(2, 3),)


# ---- Containers of modules ------------------------------------------------------------------------------------------------

@feature
def containers():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.ModuleList([nn.Linear(3, 3) for _ in range(4)])
            self.d = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Tanh()})
            self.s = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
            self.p = nn.ParameterList([torch.randn(3) for _ in range(3)])
            self.q = nn.ParameterDict({"x": torch.randn(3), "y": torch.randn(3)})

        def forward(self, x):
            for m in self.l[1:3]:
                x = m(x)
            for m in reversed(self.l):
                x = m(x)
            for m in self.s[:2]:
                x = m(x)
            x = self.s[-1](x) + self.l[-1](x) + self.s[1:](x)
            for k in self.d:
                x = self.d[k](x)
            for k, p in self.q.items():
                x = x * p if k == "x" else x + p
            for i, p in enumerate(self.p):
                x = x + p * i
            for p in self.p[1:]:
                x = x + p
            for name, m in self.named_children():
                x = x + len(name)
            for name, p in self.named_parameters():
                x = x + p.sum() * 0.01
            for m in self.modules():
                x = x + (1 if isinstance(m, nn.Linear) else 0)
            return x + len(self.l) + len(self.d) + len(self.s) + len(self.p) + len(self.q) + ("a" in self.d)
    return M(), (rand(2, 3),)


@feature
def sequential_parts():
    s = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 3), nn.Tanh()))

    def f(x):
        y = s[:2](x)
        for layer in s[2]:
            y = layer(y)
        a, *rest = s
        return y, a(x), len(rest), [type(m).__name__ for m in s.children()]
    return f, (rand(2, 3),)


@feature(graphs=None)
def state_of_module():
    m = nn.Linear(3, 3)

    def f(x):
        y = m(x)
        for k, v in m.state_dict().items():
            y = y + v.sum()
        return y, m.weight.shape[0] + m.in_features, m.bias is not None, m.training, next(m.parameters()).dtype
    return f, (rand(2, 3),)


@feature(graphs=None)
def lazy_attribute():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cache, self.n = None, 0

        def forward(self, x):
            if self.cache is None:
                self.cache = torch.arange(3.0)
            if not hasattr(self, "late"):
                self.late = 4
            self.n += 1
            return x + self.cache + self.late + self.n
    return M(), (rand(3),)


@feature(graphs=None)
def lazy_modules():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.LazyLinear(4)
            self.c = nn.LazyBatchNorm1d()

        def forward(self, x):
            return self.c(self.l(x)) + 1
    return M(), (rand(5, 3),)


@feature
def buffers_mutated():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.zeros(()))
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("none", None)
            self.bn = nn.BatchNorm1d(3)

        def forward(self, x):
            self.n += 1
            self.mean = self.mean * 0.9 + x.detach().mean(0)
            self.mean.mul_(2)
            self.none = self.mean + 1
            return self.bn(x) * self.n + self.mean + self.none
    return M(), (rand(4, 3),)


@feature(graphs=None)
def buffer_registered_inside():
    class M(nn.Module):
        def forward(self, x):
            if not hasattr(self, "late"):
                self.register_buffer("late", torch.ones(3))
            self.late += 1
            return x * self.late
    return M(), (rand(4, 3),)


@feature
def parametrized():
    class Symmetric(nn.Module):
        def forward(self, w):
            return w.triu() + w.triu(1).T
    m = nn.Linear(3, 3)
    parametrize.register_parametrization(m, "weight", Symmetric())
    return m, (rand(2, 3),)


@feature
def weight_norm_parametrization():
    return parametrizations.weight_norm(nn.Linear(3, 4)), (rand(2, 3),)


@feature(graphs=None)
def spectral_norm_parametrization():
    return parametrizations.spectral_norm(nn.Linear(3, 4)), (rand(2, 3),)


@feature(graphs=None)
def orthogonal_parametrization():
    return parametrizations.orthogonal(nn.Linear(3, 3)), (rand(2, 3),)


@feature(graphs=None)
def weight_norm_hook():
    return nn.utils.weight_norm(nn.Linear(3, 4)), (rand(2, 3),)


@feature(graphs=None)
def spectral_norm_hook():
    return nn.utils.spectral_norm(nn.Linear(3, 4)), (rand(2, 3),)


@feature
def tied_weights():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(5, 3)
            self.o = nn.Linear(3, 5, bias=False)
            self.o.weight = self.e.weight

        def forward(self, i):
            return self.o(self.e(i))
    return M(), (torch.tensor([1, 2, 4]),)


@feature(graphs=None)
def tied_weights_written():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("a", torch.ones(4))
            self.register_buffer("b", self.a[1:])
            self.c = nn.Buffer(self.a[:2])

        def forward(self, x):
            self.a.mul_(2)
            y = self.b * x[1:]
            self.c.add_(1)
            return y, self.a * x
    return M(), (rand(4, grad=False),)


@feature(graphs=None)
def input_overlaps_buffer():
    base = torch.arange(6.0)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("a", base[:4])

        def forward(self, x):
            self.a.add_(1)
            y = x * 2
            x.mul_(3)
            return y, self.a + 1
    return M(), (base[2:],)


# ---- Layers of torch.nn --------------------------------------------------------------------------------------------------

@feature(graphs=None)
def lstm():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.r = nn.LSTM(3, 4, num_layers=2, batch_first=True, bidirectional=True)

        def forward(self, x):
            y, (h, c) = self.r(x)
            return y.sin(), h, c
    return M(), (rand(2, 5, 3),)


@feature(graphs=None)
def rnn_and_gru():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.r, self.g, self.c, self.l = nn.RNN(3, 4), nn.GRU(4, 3, dropout=0.0), nn.GRUCell(3, 3), nn.LSTMCell(3, 3)

        def forward(self, x, h):
            y, h = self.r(x, h)
            z, _ = self.g(y)
            return self.c(z[0], z[1]), self.l(z[0])[1], h
    return M(), (rand(5, 2, 3), rand(1, 2, 4))


@feature(graphs=None)
def packed_sequence():
    r = nn.LSTM(3, 4)

    def f(x):
        p = nn.utils.rnn.pack_padded_sequence(x * 2, [5, 3])
        y, _ = r(p)
        return nn.utils.rnn.pad_packed_sequence(y)[0] + 1
    return f, (rand(5, 2, 3),)


@feature(graphs=None)
def attention():
    m = nn.MultiheadAttention(4, 2, batch_first=True, dropout=0.0)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.m = m

        def forward(self, x):
            y, w = self.m(x, x, x)
            z, none = self.m(x, y, y, need_weights=False)
            return y, w, z
    return M(), (rand(2, 3, 4),)


@feature(graphs=None)
def attention_eval():
    m = nn.MultiheadAttention(4, 2, batch_first=True).eval()
    return lambda x: m(x, x, x)[0], (rand(2, 3, 4, grad=False),)


@feature(graphs=None)
def attention_eval_no_grad():
    m = nn.MultiheadAttention(4, 2, batch_first=True).eval()

    def f(x):
        with torch.no_grad():
            return m(x, x, x)[0]
    return f, (rand(2, 3, 4, grad=False),)


@feature(graphs=None)
def transformer_encoder():
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2), (rand(2, 3, 4),)


@feature(graphs=None)
def transformer_encoder_eval():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    m = nn.TransformerEncoder(layer, 2).eval()

    def f(x):
        with torch.no_grad():
            return m(x)
    return f, (rand(2, 3, 4, grad=False),)


@feature(graphs=None)
def transformer():
    m = nn.Transformer(4, 2, 1, 1, 8, dropout=0.0, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(3)
    return lambda x, y: m(x, y, tgt_mask=mask), (rand(2, 3, 4), rand(2, 3, 4))


# ---- Sizes, dtypes, devices -------------------------------------------------------------------------------------------------

def test_copies_have_gradients():
    def f(x):
        x.grad = x + 1
        y = torch.zeros(3)
        y.grad = x * 2
        copies = copy.deepcopy([y, y.grad, x])
        return copies, copies[0].grad is copies[1], [c.grad for c in copies], y.grad is copies[1]
    compiled = minicompile.compile(f, backend="eager", fullgraph=True)
    for gradient in (None, torch.ones(3)):
        results = []
        for g in (f, compiled):
            x = torch.ones(3)
            x.grad = gradient
            results.append(g(x))
        assert repr(results[1]) == repr(results[0])


@feature
def sizes():
    def f(x):
        b, c, h = x.shape
        s = x.size()
        y = x.reshape(b, c // 2, 2, h).permute(0, 2, 1, 3).reshape(b * 2, -1)
        y = y.view(*x.shape[:-1], -1) + s.numel() + len(s) + x.shape[-1] + x.size(-1) + x.size()[0]
        return (y, s, s[1:], s.numel(), s == torch.Size([2, 4, 3]), s + (1,), torch.Size([1, 2]), tuple(s), list(s), 4 in s, s.index(4),
                s.count(2), max(s), math.prod(s), [*s], torch.Size((2, *s)), isinstance(s, tuple), type(s), repr(s), hash(s) == hash(s))
    return f, (rand(2, 4, 3),)


@feature
def python_answers():
    def f(x, y):
        return (x.dim(), x.ndim, x.ndimension(), x.stride(), x.stride(0), x.is_contiguous(), x.t().is_contiguous(), x.element_size(),
                x.numel(), x.nelement(), x.dtype.is_floating_point, x.dtype.is_complex, x.dtype.itemsize, x.is_floating_point(),
                x.is_complex(), x.storage_offset(), x[1:].storage_offset(), x.itemsize, x.nbytes, x.is_signed(), x.layout, len(x),
                x.requires_grad, x.is_leaf, x.get_device(), x.is_cuda, torch.is_floating_point(x), torch.is_tensor(x), torch.numel(x),
                x.is_same_size(y), x.shape == y.shape, x.type(), x.is_sparse, x.is_nested, x.is_meta, torch.is_complex(x),
                x.is_contiguous(memory_format=torch.contiguous_format), x.dense_dim() if x.is_sparse else 0,
                x.is_conj(), x.is_neg(), hasattr(x, "foo"), getattr(x, "foo", 3), getattr(x, "names", 3), getattr(x, "is_ipu", 3))
    return f, (rand(2, 3), rand(2, 3))


@feature
def dtypes_and_devices():
    def f(x):
        d = x.dtype
        other = torch.float64 if d == torch.float32 else torch.float16
        y = x.to(other).to(x.device).to("cpu", torch.float32).type(torch.float64).float().double()
        z = torch.zeros(3, dtype=other, device=x.device)
        return (y, z, x.device == torch.device("cpu"), x.device.type, x.device.index, str(d), d is torch.float32, torch.finfo(d).max,
                torch.iinfo(torch.int32).min, torch.finfo(d).eps, d in (torch.float32, torch.float16), y.type_as(x),
                torch.promote_types(d, other), torch.result_type(x, 1), x.to(y), torch.can_cast(d, torch.int64), x.type(torch.IntTensor)
                if False else None, repr(x.device), x.device, d, torch.float32.to_complex(), {d: 1}[torch.float32], x.half().dtype)
    return f, (rand(3),)


@feature
def einops_like():
    def rearrange(x, pattern):
        left, right = (side.split() for side in pattern.split("->"))
        sizes_ = dict(zip(left, x.shape))
        return x.permute([left.index(n) for n in right]).contiguous().view([sizes_[n] for n in right])

    def f(x):
        return rearrange(x, "a b c -> c a b").flatten(1).unflatten(1, (x.shape[0], -1))
    return f, (rand(2, 3, 4),)


@feature
def constants_of_jit_and_compiler():
    def f(x):
        if torch.jit.is_scripting() or torch.jit.is_tracing():
            return x
        torch._check(x.shape[0] == 3)
        torch._check(x.dim() == 1, lambda: f"bad {x.shape}")
        torch._check_is_size(x.shape[0])
        torch._assert(x.shape[0] > 1, "no")
        assert x.shape[0] == 3, "three"
        return x * 2
    return f, (rand(3),)


@feature
def no_transform_and_no_tangent():
    def f(x):
        y = x * 2
        primal, tangent = torch.autograd.forward_ad.unpack_dual(y)
        if torch._C._are_functorch_transforms_active() or tangent is not None or primal is not y:
            return x
        return torch.autograd.forward_ad.unpack_dual(x).primal + primal
    return f, (rand(3),)


@feature
def old_types_of_tensors_are_called():
    def f(x):
        made = (torch.Tensor([1, 2, 3]), torch.FloatTensor([[1, 2], [3, 4]]), torch.LongTensor((1, 2.5)), torch.BoolTensor([0, 2]),
                torch.Tensor([]), torch.DoubleTensor([x.shape[0]]), torch.Tensor(2, 3).fill_(1), torch.IntTensor(x.shape[0]).zero_(),
                torch.HalfTensor([-0.5]), torch.Tensor().shape)
        return x * made[0], *made, isinstance(x, torch.Tensor), isinstance(x, torch.FloatTensor), type(x) is torch.Tensor
    return f, (rand(3),)


@feature
def old_types_take_a_torch_size_for_sizes():
    def f(x):
        size = torch.Size([3]) + x.shape
        made = x.new(size), x.new(x.size()), x.new(x.shape * 2), torch.Tensor(x.shape), torch.DoubleTensor(size), x.new(x.sum().shape)
        return [m.fill_(1) for m in made], x.new((3, x.shape[0])), x.new([x.shape[0]]), x.new().shape
    return f, (rand(3),)


@feature(graphs=None)
def old_types_of_tensors_of_others():
    def f(x):
        return torch.Tensor(x.shape).fill_(2) + torch.Tensor(x.detach()) * 2, torch.FloatTensor(torch.Size([2, 1])).shape
    return f, (rand(3),)


@feature
def whether_a_graph_is_captured_on_the_gpu():
    def f(x):
        try:
            return x + torch.cuda.is_current_stream_capturing()
        except RuntimeError:                 # a PyTorch without CUDA
            return x * 2
    return f, (rand(3),)


@feature(graphs=None)
def failed_check():
    def f(x):
        y = x * 2
        torch._check(x.shape[0] == 4, lambda: f"expected 4, got {x.shape[0]}")
        return y
    return f, (rand(3),)


# ---- Data, views, indices -----------------------------------------------------------------------------------------------------

@feature
def data_attribute():
    return lambda x: (x.data * 2, x.data.requires_grad, (x * 2).data + x), (rand(3),)


@feature(graphs=None)
def data_written():
    def f(x):
        x.data.mul_(2)
        return x * 3
    return f, (rand(3),)


@feature(graphs=None)
def data_assigned():
    def f(x):
        y = x.detach() * 2
        x.data = y
        return x * 3
    return f, (rand(3),)


@feature(graphs=None)
def data_of_parameters_averaged():
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)

    def f(x):
        with torch.no_grad():
            for p, q in zip(a.parameters(), b.parameters()):
                p.mul_(0.9).add_(q, alpha=0.1)
            for p, q in zip(a.parameters(), b.parameters()):
                q.data.copy_(p.data)
        return a(x) + b(x), a.weight.detach().clone()
    return f, (rand(2, 3),)


@feature
def views_written():
    def f(x):
        y = x * 2
        y[0].add_(1)
        y.view(-1)[3:5].mul_(2)
        y.t()[1] = 5
        z = y.diagonal()
        z.zero_()
        y[..., 1:2] += 3
        a, b = y[1], y[:, 2:]
        b.sub_(1)
        return y, a, b
    return f, (rand(3, 4),)


@feature
def views_of_inputs_written():
    def f(x):
        v = x[1:]
        v.mul_(2)
        x[0, 0] = 9.0
        x.view(-1)[2] += 1
        return v + 1, x.sum()
    return f, (rand(3, 4, grad=False),)


@feature
def returned_views():
    return lambda x: (x[1:], x.t(), x.view(-1), x, x.detach(), x.expand(2, 3, 4), x.unsqueeze(0)[0], x.narrow(0, 0, 2), x.T), (rand(3, 4),)


@feature(graphs=None)
def out_argument():
    def f(x, o):
        torch.add(x, 1, out=o)
        y = torch.empty(3)
        r = torch.mul(x, 2, out=y)
        torch.sin(x, out=y)
        return o * 2, r + 1, r is y
    return f, (rand(3, grad=False), torch.zeros(3))


@feature(graphs=None)
def out_argument_resized():
    def f(x):
        y = torch.empty(0)
        torch.add(x, 1, out=y)
        v, i = torch.empty(2), torch.empty(2, dtype=torch.long)
        torch.max(x.reshape(1, 3).expand(2, 3), 1, out=(v, i))
        return y + 1, v, i
    return f, (rand(3, grad=False),)


@feature
def out_argument_under_autocast():
    layer = nn.utils.spectral_norm(nn.Linear(4, 3))

    def f(x):
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x), layer.weight_u
    return f, (rand(5, 4),)


@feature(graphs=None)
def out_argument_that_autocast_would_cast():
    def f(x, o, p):
        with torch.autocast("cpu", torch.bfloat16):
            torch.mm(x, x, out=o)
            torch.logsumexp(x.bfloat16(), 0, out=p)
        return o, p
    return f, (rand(4, 4, grad=False), torch.zeros(4, 4), torch.zeros(4))


@feature
def get_items():
    def f(x, i, m):
        j = torch.tensor([0, 2])
        n = 1
        return (x[0], x[-1], x[0, 1], x[..., 0], x[:, None], x[1:3, ::2], x[i], x[i, :], x[:, i], x[i, i], x[[0, 2]], x[[0, 1], [1, 2]],
                x[j],
                x[None], x[()], x[...], x[n], x[n:], x[:, n:n + 2], x[slice(0, 2)], x[True], x[None, ..., None], x[i][:, j], x[0][1],
                x[(0, 1)], x[1:1])
    return f, (rand(3, 4), torch.tensor([2, 0]), None)


@feature(graphs=None)
def get_items_masked():
    def f(x, m):
        y = x * 2
        y = y + x[torch.tensor(1)] + x[m.long()[0]] + x[numpy.int64(1)]
        return y[m] + 1, x[x > 0], y[m].sum()
    return f, (rand(3, 4), torch.tensor([True, False, True]))


@feature(graphs=None)
def set_items():
    def f(x, i, m):
        y = x * 1
        y[0] = 1
        y[0, 1] = x[1, 1]
        y[1:] = y[1:] * 2
        y[..., 0] = 3.5
        y[i] = 4
        y[:, i] = x[:, i] * 2
        y[i, i] = torch.tensor(2.0)
        y[m] = 0
        y[y > 1] = -1
        y[[0, 1], [2, 3]] = 7
        y[torch.tensor(1)] += 1
        y[None, 0] = x[0]
        y[-1] *= 2
        y[:, 1] = torch.arange(3)
        return y
    return f, (rand(3, 4), torch.tensor([2, 0]), torch.tensor([True, False, True]))


@feature
def tensors_made():
    def f(x):
        n = x.shape[0]
        return (torch.tensor([1, 2, 3]), torch.tensor([[1.0, n], [3, 4]]), torch.tensor(n), torch.tensor(2.5), torch.tensor(True),
                torch.tensor([n] * 3, dtype=torch.float64), torch.as_tensor([1, n]), torch.as_tensor(x), torch.full((n,), 2.0),
                torch.full_like(x, 3), torch.arange(n), torch.arange(0, 1, 0.25), torch.linspace(0, 1, n), torch.eye(n), torch.zeros(n, 2),
                torch.empty(n).fill_(1), torch.ones_like(x), torch.tensor([]), torch.tensor([x.dim(), len(x.shape)]), x.new_zeros(2),
                x.new_ones((2, n)), x.new_full((2,), 4.0), x.new_tensor([1, 2]), x.new_empty(2).zero_(), torch.scalar_tensor(2),
                torch.complex(x, x), torch.zeros((), dtype=torch.int32), torch.Tensor([1, 2]) if False else None, torch.ones(x.shape),
                torch.ones(*x.shape), torch.zeros(size=(2,)), torch.tril_indices(3, 3), torch.meshgrid(torch.arange(2), torch.arange(3),
                indexing="ij"), torch.cartesian_prod(torch.arange(2), torch.arange(2)), torch.hann_window(4))
    return f, (rand(3),)


@feature(graphs=None)
def tensors_made_of_tensors():
    def f(x):
        s = x.sum()
        return (torch.tensor([s.detach(), 2.0]), torch.tensor(x.detach()[0]), torch.stack([s, x[0]]), torch.tensor([x[0].item(), 2.0]),
                torch.as_tensor(s), torch.tensor([float(s), 1.0]))
    return f, (rand(3),)


@feature(graphs=None)
def legacy_constructors():
    def f(x):
        return torch.Tensor([1.0, 2.0]) + 1, torch.FloatTensor(2).zero_() + x[0], torch.LongTensor([1, 2]), torch.Tensor(2, 3).shape
    return f, (rand(3),)


@feature(graphs=None)
def numpy_bridge():
    def f(x):
        y = x.sin()
        a = y.detach().numpy() * 2
        b = torch.from_numpy(a)
        return b + x, torch.as_tensor(a) + 1, torch.tensor(a), type(a).__name__, numpy.asarray(y.detach()).sum().item() == a.sum() / 2
    return f, (rand(3),)


@feature(graphs=None)
def numpy_array_as_input():
    def f(x, a):
        return x * 2 + torch.from_numpy(a) + a.shape[0]
    return f, (rand(3), numpy.ones(3, dtype=numpy.float32))


@feature(graphs=None)
def vmap():
    def f(x):
        y = torch.func.vmap(lambda r: r * r.sum())(x * 2)
        return y + 1
    return f, (rand(3, 4),)


@feature(graphs=None)
def func_grad():
    def f(x):
        g = torch.func.grad(lambda t: (t ** 3).sum())(x * 2)
        return g + 1
    return f, (rand(3),)


# ---- Modules made and changed inside ------------------------------------------------------------------------------------------------

@feature(graphs=None)
def parameter_made():
    def f(x):
        p = nn.Parameter(torch.ones(3))
        return x * p, p, isinstance(p, nn.Parameter)
    return f, (rand(3),)


@feature(graphs=None)
def module_made():
    def f(x):
        torch.manual_seed(0)
        m = nn.Linear(3, 3)
        a = nn.ReLU()
        return a(m(x))
    return f, (rand(2, 3),)


@feature(graphs=None)
def stateless_module_made():
    def f(x):
        return nn.Softmax(dim=-1)(x) + nn.ReLU()(x) + nn.functional.gelu(x) + nn.CrossEntropyLoss()(x, torch.tensor([1, 0]))
    return f, (rand(2, 3),)


@feature(graphs=None)
def train_and_eval():
    m = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))

    def f(x):
        m.eval()
        a = m(x)
        m.train()
        return a, m(x), m.training, m[1].training
    return f, (rand(2, 3),)


@feature(graphs=None)
def module_to():
    m = nn.Linear(3, 3)

    def f(x):
        m.double()
        a = m(x.double())
        m.float()
        m.to(torch.float32)
        return a, m(x), m.weight.dtype
    return f, (rand(2, 3, grad=False),)


@feature(graphs=None)
def parameter_replaced():
    m = nn.Linear(3, 3)

    def f(x):
        m.weight = nn.Parameter(m.weight.detach() * 2)
        return m(x)
    return f, (rand(2, 3),)


@feature(graphs=None)
def submodule_replaced():
    m = nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    def f(x):
        m[1] = nn.Tanh()
        m.add_module("2", nn.Identity())
        return m(x), len(m)
    return f, (rand(2, 3),)


@feature(graphs=None)
def freezing():
    m = nn.Linear(3, 3)

    def f(x):
        m.requires_grad_(False)
        a = m(x)
        m.weight.requires_grad_(True)
        b = m(x)
        m.requires_grad_(True)
        return a, b
    return f, (rand(2, 3),)


@feature(graphs=None)
def zero_grad_inside():
    m = nn.Linear(3, 3)

    def f(x):
        m.zero_grad()
        return m(x), m.weight.grad is None
    return f, (rand(2, 3),)


@feature(graphs=None)
def functional_call():
    m = nn.Linear(3, 3)

    def f(x, w):
        return torch.func.functional_call(m, {"weight": w}, (x,)) + 1
    return f, (rand(2, 3), rand(3, 3))


@feature
def functional_losses():
    def f(x, y, i):
        return (F.mse_loss(x, y), F.l1_loss(x, y), F.smooth_l1_loss(x, y), F.huber_loss(x, y), F.cross_entropy(x, i),
                F.nll_loss(x.log_softmax(1), i),
                F.binary_cross_entropy_with_logits(x, y.sigmoid()), F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
                F.cosine_similarity(x, y), F.pairwise_distance(x, y), F.cross_entropy(x, i, label_smoothing=0.1, ignore_index=1),
                F.triplet_margin_loss(x, y, x * 2), F.margin_ranking_loss(x, y, torch.ones(4, 3)), F.normalize(x),
                F.soft_margin_loss(x, y.detach().sign()), F.poisson_nll_loss(x, y),
                F.hinge_embedding_loss(x, y.detach().sign()), F.cosine_embedding_loss(x, y, torch.ones(4)))
    return f, (rand(4, 3), rand(4, 3), torch.tensor([0, 2, 1, 1]))


@feature
def functional_images():
    def f(x):
        return (F.interpolate(x, scale_factor=2), F.interpolate(x, size=(5, 5), mode="bilinear"), F.pad(x, (1, 1, 1, 1), mode="reflect"),
                F.max_pool2d(x, 2),
                F.avg_pool2d(x, 2), F.adaptive_avg_pool2d(x, 1), F.adaptive_max_pool2d(x, (2, 2)), F.unfold(x, 2), F.pixel_shuffle(x, 2),
                F.grid_sample(x, F.affine_grid(torch.eye(2, 3)[None], [1, 4, 4, 4], align_corners=False), align_corners=False),
                F.max_pool2d(x, 2, return_indices=True), F.lp_pool2d(x, 2, 2), F.group_norm(x, 2), F.instance_norm(x),
                F.local_response_norm(x, 2))
    return f, (rand(1, 4, 4, 4),)


@feature
def functional_random():
    def f(x):
        return (F.dropout(x, 0.3), F.dropout1d(x), F.alpha_dropout(x, 0.3), F.feature_alpha_dropout(x, 0.3), F.rrelu(x, training=True),
                F.gumbel_softmax(x, tau=0.5))
    return f, (rand(2, 3, 4),)


@feature
def attention_functional():
    def f(q):
        return (F.scaled_dot_product_attention(q, q, q), F.scaled_dot_product_attention(q, q, q, is_causal=True),
                F.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(4, 4, dtype=torch.bool).tril()))
    return f, (rand(2, 2, 4, 3),)


@feature(graphs=None)
def attention_backend_chosen():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def f(q):
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, q, q)
    return f, (rand(2, 2, 4, 3),)


@feature(graphs=None)
def flags_of_cudnn_around_a_loss():
    def f(x):
        with torch.backends.cudnn.flags(enabled=False):
            x = F.ctc_loss(x.log_softmax(-1), torch.ones(2, 3, dtype=torch.long), (5, 4), (3, 2))
            x = x * (2 if torch.backends.cudnn.enabled else 3)
        return x * 2
    return f, (rand(5, 2, 4),)


@feature
def clip_gradients():
    m = nn.Linear(3, 3)
    m(torch.ones(2, 3)).sum().backward()

    def f(x):
        norm = nn.utils.clip_grad_norm_(m.parameters(), 0.1)
        nn.utils.clip_grad_value_(m.parameters(), 0.01)
        return m(x), norm, m.weight.grad.clone()
    return f, (rand(2, 3),)


@feature(graphs=None)
def parameters_as_vector():
    m = nn.Linear(3, 3)

    def f(x):
        v = nn.utils.parameters_to_vector(m.parameters())
        return m(x) + v.sum()
    return f, (rand(2, 3),)


@feature(graphs=None)
def distributions():
    def f(x):
        d = torch.distributions.Normal(x, torch.ones(3))
        return d.log_prob(torch.zeros(3)), d.rsample(), torch.distributions.Categorical(logits=x).entropy()
    return f, (rand(3),)


@feature
def tensor_dunders():
    def f(x, y):
        return (x @ x.T, 2 - x, 2 / x, 2 ** x, x.detach() // 2, 7 // (x.detach() + 5), x % 2, -x, +x, abs(x), x == y, x != y, x < 1, 1 < x,
                x & 1 if False else 0,
                ~(x > 0), (x > 0) & (y > 0), (x > 0) | (y > 0), (x > 0) ^ (y > 0), divmod(x, 2) if False else 0, x.__add__(1),
                torch.Tensor.mul(x, 2),
                round(x) if False else x.round(), torch.Tensor.add_(x * 1, 1), x.int() << 1, x.int() >> 1, x.add(1).mul_(2),
                reversed([x, y]).__next__())
    return f, (rand(3, 3), rand(3, 3))


@feature
def iterates_over_tensor():
    def f(x):
        total = 0
        for row in x:
            total = total + row.sin()
        a, b = x
        first, *rest = x
        return total, a + b, len(rest), [r.sum() for r in x], dict(enumerate(x)), sum(x), list(zip(x, x))[0][0], torch.stack(tuple(x))
    return f, (rand(2, 3),)


@feature(graphs=None)
def attributes_set_on_tensors():
    def f(x):
        y = x * 2
        y.tag = "here"
        x.mark = 5
        return y + 1, y.tag, x.mark
    return f, (rand(3),)


@feature(graphs=None)
def allowed_in_graph():
    return lambda x: checkpointless(x) + 1, (rand(3),)


def checkpointless(x):
    return x * 2


@feature(graphs=None)
def is_tensor_truth():
    def f(x):
        if x.sum() > 0:
            return x * 2
        if not (x > 100).any():
            return x.max().item() + x
        return x
    return f, (rand(3),)


@feature(graphs=None)
def compiled_function_inside():
    g = minicompile.compile(lambda x: x * 2, backend="eager")
    return lambda x: g(x) + 1, (rand(3),)


@feature(graphs=None)
def saved_tensors_hooks():
    def f(x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
            y = x.exp()
        return y + 1
    return f, (rand(3),)


@feature(graphs=None)
def anomaly_and_profiler():
    def f(x):
        with torch.profiler.record_function("part"):
            y = x * 2
        with torch.autograd.detect_anomaly(check_nan=False):
            z = y.sin()
        return z
    return f, (rand(3),)


@feature(graphs=None)
def scripted_function():
    @torch.jit.script
    def g(x):
        return x * 2
    return lambda x: g(x.sin()) + 1, (rand(3),)


@feature(graphs=None)
def resized_and_set():
    def f(x):
        y = x * 2
        y.resize_(2, 2)[1, 1] = 0
        z = torch.empty(0).set_(x.detach())
        return y[0], z + 1
    return f, (rand(3, grad=False),)


@feature(graphs=None)
def deep_copied_module():
    import copy
    m = nn.Linear(3, 3)

    def f(x):
        k = copy.deepcopy(m)
        return k(x) + m(x)
    return f, (rand(2, 3),)


@feature(graphs=None)
def deterministic_flag():
    def f(x):
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        y = x * 2
        torch.use_deterministic_algorithms(before)
        return y, before
    return f, (rand(3),)



# ---- More of nn.Module --------------------------------------------------------------------------------------------------

@feature(graphs=None)
def module_surgery():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 3)])
            self.n = 0

        def forward(self, x):
            if len(self.layers) < 3:
                self.layers.append(nn.Identity())
            for i in range(2):
                setattr(self, f"b{i}", i + self.n)
            self.n += 1
            if hasattr(self, "gone"):
                del self.gone
            else:
                self.gone = 1
            for layer in self.layers:
                x = layer(x)
            return x + self.b1 + len(self.layers)
    return M(), (rand(2, 3),)


@feature(graphs=None)
def module_apply_and_init():
    m = nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    def f(x):
        def reset(layer):
            if isinstance(layer, nn.Linear):
                nn.init.constant_(layer.weight, 0.5)
                nn.init.zeros_(layer.bias)
        m.apply(reset)
        return m(x)
    return f, (rand(2, 3),)


@feature(graphs=None)
def moving_average_of_parameters():
    m, average = nn.Linear(3, 3), nn.Linear(3, 3)

    def f(x):
        y = m(x)
        with torch.no_grad():
            for p, q in zip(m.parameters(), average.parameters()):
                q.lerp_(p, 0.1)
            for q in average.parameters():
                q.data = q.data * 1.0
        return y, [q.detach().clone() for q in average.parameters()]
    return f, (rand(2, 3),)


@feature(graphs=None)
def function_scale_is_a_global():
    def f(x):
        return GlobalScale.apply(x)

    def g(x):
        global SCALE
        SCALE = 2.0
        a = f(x)
        SCALE = 3.0
        b = f(x)
        SCALE = 2.0
        return a, b, f(x)
    return g, (rand(3),)


SCALE = 2.0


class GlobalScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * SCALE

    @staticmethod
    def backward(ctx, grad):
        return grad * 10


@feature(graphs=None)
def function_reverses_gradient():
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, k):
            ctx.k = k
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return -ctx.k * grad, None
    return lambda x: (Reverse.apply(x, 0.5), Reverse.apply(x, 2).sin()), (rand(3),)


@feature
def function_with_lists_and_objects():
    class Config:
        factor = 3

    class F_(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, config, sizes, fn):
            ctx.config, ctx.sizes = config, {"all": sizes}
            return torch.stack([fn(x) * config.factor * s for s in sizes]), len(sizes)

        @staticmethod
        def backward(ctx, grad, none):
            assert none is None
            parts = [g * s for g, s in zip(grad.unbind(0), ctx.sizes["all"])]
            return sum(parts) * ctx.config.factor, None, None, None
    config = Config()
    return lambda x: F_.apply(x * 2, config, [1, 2, 3], torch.sin), (rand(3),)


@feature
def function_behind_which_no_gradient_comes():
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return None

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.set_materialize_grads(False)
            return x * w

        @staticmethod
        def backward(ctx, grad):
            return (None, None) if grad is None else (2 * grad, grad)
    w = nn.Parameter(torch.ones(3))
    return lambda x: (Stop.apply(Doubled.apply(x * 2, w)) + x, w * 2), (rand(3),)


@feature(graphs=None)
def function_whose_backward_raises():
    """Where autograd calls it, not where the forward is called."""
    class Refuses(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("no gradient")

    class NoBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 3

    def f(x):
        results = []
        for cls in (Refuses, NoBackward):
            try:
                results.append(cls.apply(x * 2).detach())
            except Exception as error:
                results.append(type(error))
        return results
    return f, (rand(3),)


@feature(graphs=None)
def function_computes_gradient_by_autograd():
    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin().exp()

        @staticmethod
        def backward(ctx, grad):
            x, = ctx.saved_tensors
            with torch.enable_grad():
                d = x.detach().requires_grad_(True)
                y = d.sin().exp()
            return torch.autograd.grad(y, d, grad)[0]
    return lambda x: Again.apply(x * 2) + 1, (rand(3),)


@feature(graphs=None)
def function_writes_a_buffer():
    m = nn.BatchNorm1d(3)

    class Normalise(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            m.running_mean.add_(x.mean(0))
            return x - m.running_mean

        @staticmethod
        def backward(ctx, grad):
            m.running_var.add_(1)
            return grad * 2
    return lambda x: (Normalise.apply(x), m.running_mean.clone(), m.running_var.clone()), (rand(4, 3),)


@feature(graphs=None)
def checkpoint_with_side_effects():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn, self.l, self.calls = nn.BatchNorm1d(3), nn.Linear(3, 3), 0

        def forward(self, x):
            def block(x):
                LOG.append("block")
                self.calls += 1
                return self.bn(self.l(x)).relu()
            return checkpoint(block, x, use_reentrant=False) + self.calls
    return M(), (rand(4, 3),)


@feature
def checkpoints_that_end_in_views():
    layer = nn.Linear(3, 3)

    def transposed(x):
        return layer(x).sin().t()

    def cubed(x):
        return Cube.apply(layer(x))

    def f(x):
        for part in (transposed, cubed, cubed, transposed, transposed):
            x = checkpoint(part, x, use_reentrant=False)
        return x
    return f, (rand(3, 3),)


@feature(graphs=None, calls=3)
def losses_differentiated_in_turns():
    torch.manual_seed(4)
    generator, critic = nn.Sequential(nn.Linear(2, 3), nn.Tanh()), nn.Linear(3, 1)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (generator, critic)]

    def f(z, real):
        fake = generator(z)
        loss = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(real)).mean()
        losses = loss, F.softplus(-critic(fake)).mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        for one in losses:
            one.backward()
        for optimizer in optimizers:
            optimizer.step()
        return [loss.detach() for loss in losses], [p.detach().clone() for p in (*generator.parameters(), *critic.parameters())]
    return f, (rand(4, 2, grad=False), rand(4, 3, grad=False))


@feature
def checkpoint_nested():
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)

    def inner(x):
        return b(x).tanh()

    def outer(x):
        return checkpoint(inner, a(x).relu(), use_reentrant=False) * 2
    return lambda x: checkpoint(outer, x, use_reentrant=False).sum(), (rand(3, 4),)


@feature
def checkpoint_of_function():
    return lambda x: checkpoint(lambda t: Cube.apply(t.sin()) * 2, x, use_reentrant=False) + x, (rand(3),)


@feature(graphs=None)
def grad_scaler_and_closures():
    m = nn.Linear(3, 2)
    opt = torch.optim.LBFGS(m.parameters(), max_iter=2)

    def step(x):
        def closure():
            opt.zero_grad()
            loss = m(x).pow(2).mean()
            loss.backward()
            return loss
        return opt.step(closure).detach()
    return step, (rand(4, 3, grad=False),)


@feature(graphs=None)
def grad_fn_asked():
    def f(x):
        return (1 if x.grad_fn is None else 2) * x, x.is_leaf

    def g(x):
        return f(x * 1), f(x)
    return g, (rand(3),)


@feature(graphs=None)
def inference_after_training():
    m = nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    def f(x):
        a = m(x)
        with torch.inference_mode():
            b = m(x) + 1
            c = b.clone()
        d = b.clone() * 2
        return a, b, c, d
    return f, (rand(2, 3),)


@feature(graphs=None)
def cloned_parametrization_cache():
    m = parametrizations.weight_norm(nn.Linear(3, 4))

    def f(x):
        with parametrize.cached():
            return m(x) + m(x)
    return f, (rand(2, 3),)


@feature
def submodule_replaced_between_calls():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x):
            return self.act(x)
    return M(), (rand(2, 3),)


@feature(graphs=None)
def module_list_of_tensors_and_none():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_parameter("none", None)
            self.register_buffer("off", None)
            self.w = nn.Parameter(torch.ones(3))
            self.plain = torch.ones(3)
            self.heads = {"a": nn.Linear(3, 2), "b": [torch.ones(2)]}

        def forward(self, x):
            y = self.heads["a"](x) + self.heads["b"][0]
            return y, self.none is None, self.off is None, (x * self.w + self.plain).sum()
    return M(), (rand(2, 3),)


class Special(nn.Parameter):
    pass


@feature(graphs=None)
def tensor_subclass_parameter():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = Special(torch.ones(3))

        def forward(self, x):
            y = x.sin()
            return y * self.w, type(self.w).__name__
    return M(), (rand(3),)


# ---- Contexts entered by others than `with` ------------------------------------------------------------------------------

@feature
def exit_stack_of_torch_contexts():
    def f(x, w):
        with contextlib.ExitStack() as stack:
            for context in (torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad(), contextlib.nullcontext(),
                            torch.profiler.record_function("part"), torch.device("cpu")):
                stack.enter_context(context)
            stack.callback(LOG.append, "left")
            y = x @ w
        return y, x @ w, list(LOG)
    return f, (rand(3, 3), rand(3, 3))


@feature
def exit_stack_left_by_exception():
    def f(x):
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(contextlib.suppress(KeyError))
                stack.enter_context(torch.no_grad())
                y = x * 2
                raise ValueError(y.requires_grad)
        except ValueError as error:
            return y, x * 3, error.args
    return f, (rand(3),)


@feature
def exit_stack_that_is_kept():
    @contextlib.contextmanager
    def entered():
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            yield stack

    def f(x):
        with entered() as stack:
            y = x * 2
            rest = stack.pop_all()
        z = x * 3
        rest.close()
        return y, z, x * 4
    return f, (rand(3),)


@feature
def exit_of_stack_raises():
    class Leaves:
        def __exit__(self, *error):
            raise KeyError(error[0].__name__)

    def f(x):
        try:
            with contextlib.ExitStack() as stack:
                stack.push(Leaves())
                stack.enter_context(torch.no_grad())
                raise ValueError(2)
        except KeyError as error:
            return x * 2, repr(error), repr(error.__context__)
    return f, (rand(3),)


@feature
def contexts_entered_by_hand():
    def f(x):
        off, device = torch.no_grad(), torch.device("cpu")
        type(off).__enter__(off)
        device.__enter__()
        y = x * torch.ones(3)
        device.__exit__(None, None, None)
        type(off).__exit__(off, None, None, None)
        return y, x * 2
    return f, (rand(3),)


@feature(graphs=None)
def break_inside_exit_stack():
    def f(x):
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            y = x * 2
            LOG.append(y.sum().item())
            with contextlib.ExitStack() as inner:
                inner.enter_context(torch.enable_grad())
                z = x * 3
                LOG.append(z.sum().item())
                z = z + x
            w = x * 4
        return y, z, w, x * 5
    return f, (rand(3),)


@feature(graphs=None)
def exit_stack_across_frames():
    def f(x):
        stack = contextlib.ExitStack()
        enter(stack)
        y = x * 2
        LOG.append(y.sum().item())
        stack.close()
        return y, x * 3

    def enter(stack):
        stack.enter_context(torch.no_grad())
    return f, (rand(3),)


def test_exception_handled_by_the_caller():
    def f(x):
        return x + 1, sys.exc_info()[0], sys.exception()
    compiled = minicompile.compile(f, backend="eager")
    x = torch.ones(2)
    for _ in range(2):
        assert compiled(x)[1:] == (None, None)
        try:
            raise KeyError(1)
        except KeyError as error:
            assert compiled(x)[1:] == (KeyError, error)


# ---- out= ----------------------------------------------------------------------------------------------------------------

@feature
def out_is_the_result():
    def f(x, y):
        a, b = torch.empty(3, 3), torch.empty(6, 3).t()
        view = y[1:]
        got = (torch.add(x, 1, out=a), torch.mm(x, x, out=y[:3]), torch.cat([x, a], out=b.t()), torch.mul(view, 2, out=view))
        return got[0] is a, got[3] is view, a * 2, b, y, torch.sigmoid(x, out=x) is x
    return f, (rand(3, 3, grad=False), rand(5, 3, grad=False))


@feature
def out_of_several_results():
    def f(x):
        v, i = torch.empty(3), torch.empty(3, dtype=torch.int64)
        found = torch.max(x, 0, out=(v, i))
        kept = torch.topk(x, 2, out=[torch.empty(3, 2), torch.empty(3, 2, dtype=torch.int64)])
        return found.values is v, found[1] is i, type(found).__name__, v + 1, i, kept[0], kept[1]
    return f, (rand(3, 3, grad=False),)


@feature
def out_on_the_meta_device():
    def f(x):
        y = torch.empty(3, device="meta")
        return torch.add(y, 1, out=torch.empty(3, device="meta")) is y, torch.mul(y, y, out=y) is y, x
    return f, (rand(3),)


@feature
def out_without_gradients():
    def f(x, y):
        with torch.no_grad():
            torch.mul(x, 3, out=y)
        return y * 2, torch.eq(x, y, out=torch.empty(3, dtype=torch.bool))
    return f, (rand(3), rand(3))


@pytest.mark.parametrize("call", [
    lambda x, w: torch.add(x, x, out=torch.empty(2)),                                 # resizes, with a warning
    lambda x, w: torch.add(x, x, out=torch.empty(3, 3, dtype=torch.float64)),         # casts
    lambda x, w: torch.add(x, x, out=torch.empty(3, 3, dtype=torch.int64)),           # must not
    lambda x, w: torch.sum(x, 0, out=torch.empty(3, dtype=torch.float64)),
    lambda x, w: torch.add(x[:-1], 1, out=x[1:]),                                     # overlap
    lambda x, w: torch.add(x, 1, out=torch.empty(1, 3).expand(3, 3)),
    lambda x, w: torch.mm(x, x, out=x),
    lambda x, w: torch.add(w, 1, out=x),                                              # a gradient
    lambda x, w: torch.add(x, 1, out=w),
    lambda x, w: torch.randn(3, 3, out=x),
    lambda x, w: torch.max(x, 0, out=(x[0], torch.empty(3))),
    lambda x, w: torch.mm(x, w.detach(), out=torch.empty(3, 3, dtype=torch.bfloat16))])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_out_otherwise(call, autocast):
    def build():
        def f(x, w):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                return call(x, w), x * 2
        return f, (rand(3, 3, grad=False), rand(3, 3))
    check_same(run(build, functools.partial(minicompile.compile, backend="aot_eager"), 2), run(build, lambda f: f, 2))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "cpp"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_out_that_overlaps_an_operand(backend, dynamic):
    def into_the_first(a, b, c):
        return torch.add(a, b, out=a) is a, torch.mul(b, c, out=c) * 2

    f = minicompile.compile(into_the_first, backend=backend, dynamic=dynamic)
    for apart in (True, False, True):
        outcomes = []
        for g in (into_the_first, f):
            m = torch.arange(8.0)
            try:
                outcomes.append((g(m[:4], m[4:] if apart else m[2:6], torch.ones(4))[1].tolist(), m.tolist()))
            except RuntimeError as error:
                outcomes.append((str(error), m.tolist()))
        assert outcomes[0] == outcomes[1]


# ---- Copies --------------------------------------------------------------------------------------------------------------

@dataclasses.dataclass
class Pair:
    a: object
    b: list = dataclasses.field(default_factory=list)


class Color(enum.Enum):
    RED = 1


Point = collections.namedtuple("Point", "p q")


class Memoized:
    def __init__(self, a):
        self.a = a

    def __deepcopy__(self, memo):
        made = memo[id(self)] = Memoized(None)
        made.a, made.known = copy.deepcopy(self.a, memo), id(self.a) in memo
        return made


SETTINGS = types.SimpleNamespace(n=2, nested={"sizes": [1, 2], "t": torch.ones(2)}, color=Color.RED)


@feature
def deep_copies_own_their_memory():
    def f(x):
        pair = Pair(x, [x, 1])
        made = copy.deepcopy([pair, pair, {"again": x}])
        made[0].a.add_(1)
        made[0].b.append(2)
        return made[0] is made[1], made[0].a is made[2]["again"], made[0].a is made[0].b[0], made[0].a, pair.b, made[0].b, x
    return f, (rand(3, grad=False),)


@feature
def deep_copies_of_containers():
    def f(x):
        made = copy.deepcopy((Point(x, [1]), x.shape, {3, 1, 2}, frozenset({1}), collections.deque([x, 1], 3),
                              collections.OrderedDict(a=[x]),
                              collections.defaultdict(list, {"a": [x]}), Color.RED, torch.float32, len, f))
        return (*made[:1], tuple(made[1]), type(made[1]).__name__, made[2], made[3], list(made[4]), made[4].maxlen, dict(made[5]),
                made[6]["new"],
                made[7] is Color.RED, made[8], made[9] is len, made[10] is f)
    return f, (rand(3, grad=False),)


@feature
def deep_copies_that_contain_themselves():
    def f(x):
        ring, node = [x], types.SimpleNamespace(x=x)
        ring.append(ring)
        node.self = node
        made, other = copy.deepcopy(ring), copy.deepcopy(node)
        return made[1] is made, made is ring, other.self is other, made[0] + other.x
    return f, (rand(3, grad=False),)


@feature
def deep_copy_by_the_program():
    def f(x):
        thing, memo = Memoized([x]), {}
        made = copy.deepcopy([thing, thing])
        first, second = copy.deepcopy([x], memo), copy.deepcopy([x], memo)
        return made[0] is made[1], made[0].known, made[0].a[0] + 1, first[0] is second[0], memo[id(x)] is first[0], x.__deepcopy__({}) + 1
    return f, (rand(3, grad=False),)


@feature
def copies_of_what_existed_before():
    def f(x):
        deep, shallow = copy.deepcopy(SETTINGS), copy.copy(SETTINGS)
        deep.nested["sizes"].append(3)
        deep.nested["t"].add_(x)
        shallow.n = 5
        return deep.nested["sizes"], deep.nested["t"], SETTINGS.nested["sizes"], SETTINGS.n, shallow.nested is SETTINGS.nested, \
            deep.color is Color.RED
    return f, (rand(2, grad=False),)


@feature
def shallow_copies():
    class Reduced:
        def __init__(self, a):
            self.a = a

        def __reduce__(self):
            return Reduced, (self.a * 2,)

    class Stated:
        def __getstate__(self):
            return {"a": self.a, "more": 1}

        def __setstate__(self, state):
            self.__dict__.update(state)
            self.set = True

    def f(x):
        stated = Stated()
        stated.a = x
        made = copy.copy(stated)
        pair = copy.copy(Pair(x, [x]))
        return (copy.copy(Reduced(x)).a, made.a + made.more, made.set, pair.a is x, copy.copy([x]), copy.copy({1: x}), copy.copy((x,)),
                dataclasses.replace(pair, b=[1]).b, dataclasses.asdict(pair)["b"][0] + 1, dataclasses.astuple(pair)[0])
    return f, (rand(3, grad=False),)


@pytest.mark.parametrize("make", [
    lambda x, w: copy.deepcopy([x, x[1:]]),                           # two tensors, one memory
    lambda x, w: copy.deepcopy(x[1:]),
    lambda x, w: copy.deepcopy(x.expand(2, 3)),
    lambda x, w: copy.deepcopy(w),                                    # keeps requires_grad and grad
    lambda x, w: copy.deepcopy(w * 2),                                # an error
    lambda x, w: copy.copy(x),
    lambda x, w: copy.deepcopy(nn.Linear(2, 2)).weight,
    lambda x, w: copy.deepcopy(types)])
def test_copies_otherwise(make):
    def build():
        def f(x, w):
            made = make(x, w)
            return made, w * 2
        return f, (rand(3, grad=False), rand(3))
    check_same(run(build, functools.partial(minicompile.compile, backend="eager"), 2), run(build, lambda f: f, 2))


def test_copied_tensor_changes_between_calls():
    def f(x):
        y = copy.deepcopy(x)
        return getattr(y, "tag", None), y.grad, y + 1
    compiled, x = minicompile.compile(f, backend="eager"), torch.ones(3)
    for change in (lambda: None, lambda: setattr(x, "grad", torch.ones(3)), lambda: setattr(x, "tag", 3), lambda: delattr(x, "tag")):
        change()
        check_same(list(compiled(x)), list(f(x)))


# ---- What functions remember ---------------------------------------------------------------------------------------------

@functools.lru_cache(None)
def table(n, dtype=torch.float32):
    return torch.arange(n, dtype=dtype)


@functools.lru_cache(None)
def other_table(n):
    return torch.arange(n) * 10.0


@feature(calls=3)
def cached_tensors_are_one_object():
    table.cache_clear()

    def f(x):
        t = table(x.shape[0], dtype=x.dtype)
        t.add_(1)
        return x * t, table(x.shape[0], dtype=x.dtype) is t
    return f, (rand(3),)


@feature(graphs=None, calls=3)
def cached_lists_are_one_object():
    @functools.lru_cache
    def found(n):
        return [n]

    def f(x):
        LOG.append(1)
        found(3).append(1)
        return x * len(found(3)), found(2) is found(2)
    return f, (rand(3),)


@pytest.mark.parametrize("make", [torch.randn, lambda n: torch.randn(n), lambda n: [n], lambda n: ({"n": n}, n),
                                  lambda n: types.SimpleNamespace(n=n)])
def test_what_a_cached_function_makes_of_sizes_that_vary_is_made_once(make):
    first, second = functools.lru_cache(make), functools.lru_cache(make)

    def f(x, made):
        found = made(x.shape[0])
        if isinstance(found, list):
            found.append(1)
        elif isinstance(found, types.SimpleNamespace):
            found.n += 1
        elif isinstance(found, tuple):
            found[0]["n"] += 1
        return x * 2, found, made(x.shape[0]) is found
    compiled = minicompile.compile(f, backend="eager")
    for n in (2, 3, 4, 5, 4, 5, 3):
        torch.manual_seed(n)
        ours = compiled(torch.ones(n), first)
        torch.manual_seed(n)
        check_same(list(ours), list(f(torch.ones(n), second)))


def writes_to_it(x, made):
    found = made(x.shape[0])
    found.add_(1)
    return x * found, found is made(x.shape[0])


def writes_to_a_view(x, made):
    made((x.shape[0], 2))[1:] += 1
    return made((x.shape[0], 2)) * x[:, None]


def for_more_than_a_size(x, made):
    first, second = made(x.shape[0] * 2 - 1), made(x.shape[0], 2)
    second.mul_(2)
    return x[0] * first, x * second[:, 0], first is made(7)


def asks_without_gradients(x, made):
    with torch.no_grad():
        found = made(x.shape[0])
    return x * found, found.requires_grad


def for_a_tensor(x, made):
    return made(x) * 2, made(x + 1), made(x) is made(x)


@pytest.mark.parametrize("f", [writes_to_it, writes_to_a_view, for_more_than_a_size, asks_without_gradients, for_a_tensor])
def test_a_tensor_that_a_cached_function_makes_of_what_varies_is_made_once(f):
    weight = nn.Parameter(torch.ones(())) if f is asks_without_gradients else torch.ones(())

    def drive(called):
        made = functools.lru_cache(lambda *n: (n[0] if isinstance(n[0], torch.Tensor) else torch.ones(*n)) * weight)
        inputs = {n: torch.ones(n) for n in (2, 3, 4, 5, 6)}
        return [[t.clone() if isinstance(t, torch.Tensor) else t for t in called(inputs[n], made)] for n in (2, 3, 4, 5, 4, 5, 3, 6)]

    with Captures() as seen:
        check_same(drive(minicompile.compile(f, backend="eager")), drive(f))
    assert not seen.breaks


READ = [2]


def of_a_global(n):
    return n * READ[0]


def of_a_global_further_in(n):
    return (lambda: of_a_global(n) / 2)()


def of_a_default(n, read=READ):
    return n * read[0]


def of_an_attribute(n):
    return n * of_an_attribute.k


def of_a_name(n):
    return n * getattr(WithFactor, "k")


def of_a_module_in_a_module(n):
    return n * OUTER.inner.k


def of_a_class(n):
    return n * Read().k


def of_a_base(n):
    return n * Derived.k


def of_a_method_of_a_list(n):
    return n * first_of_all(0)


@functools.wraps(math.isqrt)
def of_a_global_by_another_name(n):
    return n * READ[0]


first_of_all = READ.__getitem__
OUTER = types.ModuleType("outer")
OUTER.inner = types.ModuleType("inner")


class Read:
    def __init__(self):
        self.k = READ[0]


class WithFactor:
    k = 2

    @functools.lru_cache
    def made(self, n):
        return n * self.k


class Derived(WithFactor):
    pass


def asked_after_a_write(x, made):
    x.add_(1)
    return x * made(3)


def asked_for_a_size(x, made):
    return x.new_ones(int(made(x.shape[0])))


@pytest.mark.parametrize("asked", [asked_after_a_write, asked_for_a_size, lambda x, made: x * made(len(x)) + made(len(x) + 1)])
@pytest.mark.parametrize("make", [
    of_a_global, of_a_global_further_in, WithFactor, of_a_default, of_an_attribute, of_a_name, of_a_module_in_a_module, of_a_class,
    of_a_base, of_a_method_of_a_list, of_a_global_by_another_name])
def test_a_cached_number_is_that_of_the_first_call(asked, make):
    def drive(called):
        holder = WithFactor()
        made, results = holder.made if make is WithFactor else functools.lru_cache(make), []
        for factor, n in ((2, 3), (2, 4), (2, 5), (3, 4), (3, 5), (3, 6), (4, 6), (4, 7)):
            READ[0] = holder.k = WithFactor.k = of_an_attribute.k = OUTER.inner.k = factor
            results.append(called(torch.ones(n), made))
        return results
    check_same(drive(minicompile.compile(asked, backend="eager", fullgraph=asked is not asked_after_a_write)), drive(asked))


def test_a_cached_function_that_raises_is_called_again():
    left = [2]

    @functools.cache
    def made(n):
        if left[0] > 0:
            raise ValueError("not yet")
        return torch.ones(n)

    def f(x, n):
        try:
            return x + made(n)
        except ValueError as error:
            return x * 2, str(error)
    compiled, x = minicompile.compile(f, backend="eager"), torch.ones(3)
    for left[0] in (2, 1, 0, 1):
        check_same(compiled(x, 3), f(x, 3))


def test_an_error_of_a_cached_function_that_nobody_catches_is_the_programs_under_fullgraph():
    @functools.cache
    def made(n):
        if n == 4:
            raise ValueError("four")
        return torch.ones(n)

    def catches(x):
        try:
            return x * made(x.shape[0])
        except ValueError:
            return x - 1
    compiled = minicompile.compile(lambda x: x * made(x.shape[0]), backend="eager", fullgraph=True)
    for n in (4, 3, 5, 4, 6, 4):
        with pytest.raises(ValueError, match="four") if n == 4 else contextlib.nullcontext():
            assert torch.equal(compiled(torch.ones(n)), torch.ones(n))
    with pytest.raises(minicompile.GraphBreakError, match="made, which has a cache, raises ValueError"):
        minicompile.compile(catches, backend="eager", fullgraph=True)(torch.ones(4))


def test_a_cached_function_is_not_called_for_a_version_that_does_not_fit():
    asked = []

    @functools.cache
    def made(n):
        asked.append(n)
        return torch.ones(n)

    def f(x, use):
        return x + made(x.shape[0]) if use else x * 2
    compiled = minicompile.compile(f, backend="eager")
    for n in (2, 3, 4):
        compiled(torch.ones(n), True)
    for n in (5, 6, 7):
        compiled(torch.ones(n), False)
    assert asked == [2, 3, 4]


def decided_by_a_dtype(x, first, second):
    found = first(x.shape[0])
    return x + second(x.shape[0]) if found.dtype == torch.float32 else x - found


def decided_by_a_size(x, first, second):
    found = first(x.shape[0])
    return x + second(x.shape[0]) if found.shape[0] != 4 else x * found.shape[0]


def decided_by_the_call(x, first, second):
    return x + first(x.shape[0]) if x.shape[0] % 2 else x * 2


def in_turn(x, first, second):
    found, more = first(x.shape[0]), second(x.shape[0])
    return x * more, found


@pytest.mark.parametrize("f", [decided_by_a_dtype, decided_by_a_size, decided_by_the_call, in_turn])
def test_cached_functions_are_called_when_and_in_the_order_in_which_the_program_calls_them(f):
    def drive(called):
        asked, answers = [], []

        @functools.cache
        def first(n):
            asked.append(("first", n))
            return torch.ones(n) if n % 3 else torch.ones(n).double()

        @functools.cache
        def second(n):
            asked.append(("second", n))
            return torch.ones(n) * 2
        for n in (2, 5, 4, 3, 7, 8, 6, 5, 9, 10, 12, 11):
            answers.append([called(torch.ones(n), first, second), list(asked)])
        return answers
    check_same(drive(minicompile.compile(f, backend="eager")), drive(f))


def test_a_cached_function_that_is_called_while_compiling_makes_inference_tensors_where_the_program_does():
    def drive(compiled):
        made = functools.cache(torch.ones)

        def f(x):
            return x * made(x.shape[0]), made(x.shape[0]), made(3)
        called, answers = minicompile.compile(f, backend="eager") if compiled else f, []
        for n in (2, 4, 5, 2):
            with torch.inference_mode():
                answers.append([t.is_inference() for t in called(torch.ones(n))])
        return answers
    assert drive(True) == drive(False)


def test_a_cache_that_forgets_within_a_call():
    def f(x, made):
        first, other, again = made(x.shape[0]), made(x.shape[0] + 1), made(x.shape[0])
        first.add_(1)
        return first is again, x * first, other, again.clone()

    def drive(called):
        made = functools.lru_cache(maxsize=1)(torch.ones)
        return [called(torch.ones(n), made) for n in (2, 3, 4, 2, 5)]
    check_same(drive(minicompile.compile(f, backend="eager")), drive(f))


@feature(calls=3)
def cached_method_keeps_its_first_answer():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))
            self.register_buffer("n", torch.ones(()))

        @functools.lru_cache(None)
        def scaled(self, n):
            return (self.w * self.n * n).detach()

        def forward(self, x):
            y = x * self.scaled(2) * self.w
            self.n.add_(1)
            return y
    return M(), (rand(3),)


def test_a_cached_method_keeps_no_object_and_is_called_in_the_mode_of_the_program():
    class Holder:
        n = 2.0

        @functools.lru_cache
        def number(self, k, more=0):
            return self.n * k + more

        @functools.lru_cache
        def tensor(self, k):
            return torch.ones(3, requires_grad=True) * k * self.n

    def f(x, holder):
        with torch.no_grad():
            quiet = holder.tensor(2)
        return x * quiet, quiet.requires_grad, holder.tensor(3) * holder.number(2) * holder.number(2, more=1)

    x, holder = torch.ones(3), Holder()
    compiled = minicompile.compile(f, backend="eager", fullgraph=True)
    for _ in range(3):
        expected = f(x, holder)
        Holder.tensor.cache_clear()
        result = compiled(x, holder)
        Holder.tensor.cache_clear()
        Holder.number.cache_clear()
        assert [t.requires_grad for t in (*result[::2], *expected[::2])] == [False, True] * 2
        check_same(result[1:2], expected[1:2])
        assert torch.equal(result[2], expected[2])
    gone = weakref.ref(holder)
    del holder
    gc.collect()
    assert gone() is None


def test_a_cached_function_of_what_is_only_handed_on():
    """The argument is in no other guard than the one that the call makes."""
    class Holder:
        @functools.lru_cache
        def number(self, k, more=0):
            return f"{k}{more}"

    @functools.lru_cache
    def number(k):
        return 2 * k

    def method(x, holder, k):
        return x + 1, holder.number(k), holder.number(k, 1), holder.number(2, more=k)

    def function(x, holder, k):
        return x * number(k)

    for f in (method, function):
        compiled, holder = minicompile.compile(f, backend="eager", fullgraph=True), Holder()
        for k in (1, 2, 3, True, 2, 1.5):
            check_same(compiled(torch.ones(3), holder, k), f(torch.ones(3), holder, k))
    compiled = minicompile.compile(method, backend="eager", fullgraph=True)
    for k in ("a", "b", None, "a"):
        check_same(compiled(torch.ones(3), holder, k), method(torch.ones(3), holder, k))


class Pattern:
    reverses = "reverses"

    def __init__(self, text):
        self.names, self.order = text.split(), []

    def orders(self, other):
        return self.reverses + str(self.order.extend(self.names.index(name) for name in other.names))


@functools.lru_cache
def prepared(pattern, of):
    left, right = (Pattern(side) for side in pattern.split(of[0]))
    left.orders(right)
    return left


@functools.lru_cache
def shaped(pattern, shape):
    return [shape[i] for i in pattern.order], Pattern.reverses


@functools.lru_cache
def in_state(n):
    return n, torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


class Rotary:
    def __init__(self):
        self.kept, self.more = None, Pattern("")

    def turned(self, x, pattern):
        with torch.autocast("cpu", torch.bfloat16):
            x = x.permute(prepared(pattern, ("->",)).order) * 2
        self.kept, self.more.names = x, None
        found = prepared(pattern, ("->",))
        return x.reshape(shaped(found, x.shape)[0]), found is prepared(pattern, ("->",))


def test_a_cached_function_that_sees_no_change_is_called_after_a_write_and_under_autocast():
    """As einops does."""
    rotary, compiled = Rotary(), minicompile.compile(Rotary.turned, backend="eager", fullgraph=True)
    for pattern in ("a b->b a", "a b->a b"):
        for n in (3, 4, 5):
            x = torch.randn(2, n)
            check_same(compiled(rotary, x, pattern), Rotary.turned(Rotary(), x, pattern))
            assert rotary.kept.shape == x.permute(prepared(pattern, ("->",)).order).shape


@functools.lru_cache
def asked_of(holder, n):
    return holder.count() + n


@pytest.mark.parametrize("has_lock", [False, True])
def test_a_cached_function_that_sees_a_change_through_what_a_class_in_c_holds(has_lock):
    def f(x, holder, names, n):
        names.append(n)
        return x + 1, asked_of(holder, n)

    def answers(f):
        holder = type("Holder", (), {})()
        names = []
        holder.count = functools.partial(len, names)
        if has_lock:
            holder.lock = threading.RLock()
        return [f(torch.ones(2), holder, names, n) for n in (1, 2, 1, 3)]
    check_same(answers(minicompile.compile(f, backend="eager")), answers(f))


class Watching(logging.StreamHandler):
    """A handler that looks at what the compiled function has written."""

    def emit(self, record):
        super().emit(record)
        self.stream.write(f"{counts}")


counts = []


@functools.lru_cache
def said_once(logger, text):
    logger.warning(text)


@pytest.mark.parametrize("handler", [logging.StreamHandler, Watching])
def test_a_message_that_a_cache_lets_through_once_is_written_after_a_write(handler):
    """As `warning_once` of transformers; a handler of the program sees what the program has written."""
    def f(x, logger, counts):
        counts.append(x.shape[0])
        said_once(logger, "new")
        counts.append(1)
        said_once(logger, "new")
        return x + 1

    def texts(f):
        said_once.cache_clear()
        counts.clear()
        written = io.StringIO()
        logger = logging.Logger("program")
        logger.addHandler(handler(written))
        with Captures() as seen:
            for n in (2, 3, 4):
                f(torch.ones(n), logger, counts)
        return written.getvalue(), counts[:], seen.breaks

    *expected, _ = texts(f)
    *got, breaks = texts(minicompile.compile(f, backend="eager"))
    assert got == expected and bool(breaks) == (handler is Watching)


@functools.lru_cache
def said(logger, text):
    return logger.warning(text)


@pytest.mark.parametrize("place", ["logger", "handler", "records"])
def test_what_a_program_puts_into_a_logger_sees_what_was_written(place, monkeypatch):
    def f(x, logger, counts, text):
        counts.append(x.shape[0])
        return x + 1, said(logger, text), len(logger.handlers)

    def answers(f):
        logger, handler, counts, seen = logging.Logger("program"), logging.NullHandler(), [], []
        logger.addHandler(handler)
        if place == "logger":
            logger.warning = lambda text: len(counts)
        elif place == "handler":
            handler.handle = lambda record: seen.append(len(counts))
        else:
            monkeypatch.setattr(logging, "_logRecordFactory", lambda *args: seen.append(len(counts)) or logging.LogRecord(*args))
        return [f(torch.ones(2), logger, counts, f"text {i}") for i in range(3)], seen
    check_same(answers(minicompile.compile(f, backend="eager")), answers(f))


def test_a_cached_function_that_may_see_a_change():
    def after(x, name):
        Pattern.reverses = name
        return x + 1, shaped(prepared("a b->b a", ("->",)), (name, 2))

    def written(x, name):
        found = prepared("a b->b a", ("->",))
        found.order.append(name)
        return x + 1, shaped(found, (name, 2, *"abcdefghi"))[0][:2]

    def within(x, n):
        with torch.autocast("cpu", torch.bfloat16):
            return x + 1, in_state(n)

    before = Pattern.reverses
    for f, arguments in ((after, "abac"), (written, [2, 3, 2]), (within, [2, 3, 2])):
        answers = []
        for one in (f, minicompile.compile(f, backend="eager")):
            for function in (prepared, shaped, in_state):
                function.cache_clear()
            answers.append([one(torch.ones(2), a) for a in arguments])
        check_same(*answers)
    Pattern.reverses = before


def test_caches_change_between_calls():
    functions = [table]

    def f(x):
        return functions[0](3) + x
    compiled, x = minicompile.compile(f, backend="eager"), torch.ones(3)
    for change in (lambda: None, table.cache_clear, lambda: functions.__setitem__(0, other_table), other_table.cache_clear):
        change()
        assert torch.equal(compiled(x), f(x))


def test_singledispatch():
    @functools.singledispatch
    def scaled(n, x):
        return x

    @scaled.register
    def _(n: int, x):
        return x * n

    def f(x, n):
        return scaled(n, x) + 1
    compiled, x = minicompile.compile(f, backend="eager", fullgraph=True), torch.ones(3)
    for n in (2, "b", 2.5, 3, True):
        assert torch.equal(compiled(x, n), f(x, n))
    scaled.register(str, lambda n, x: x * len(n))
    assert torch.equal(compiled(x, "abc"), f(x, "abc"))


@feature
def numbers_of_numpy_as_data():
    def f(x):
        return (torch.tensor(numpy.float64(1.5)), torch.tensor([numpy.int32(1), 2]), torch.as_tensor(numpy.int16(3)),
                torch.tensor([numpy.float64(1)]),
                torch.tensor((1, numpy.float32(2))), torch.full((2,), numpy.float64(2)), torch.scalar_tensor(numpy.float64(1)),
                torch.tensor(numpy.bool_(True)), torch.tensor(numpy.float64(2), dtype=torch.float16), x * numpy.float64(2),
                x.new_tensor(numpy.float64(3)))
    return f, (rand(3),)


@feature(graphs=None)
def complex_numbers_of_numpy():
    def f(x):
        return x * numpy.complex64(1 + 2j), x * numpy.complex128(1 + 2j), torch.tensor(numpy.complex64(1j))
    return f, (rand(3),)


@feature(graphs=None)
def round_of_a_tensor():
    def f(x):
        try:
            return round(x), round(x, 2)
        except TypeError as error:                 # a tensor has no `__round__`
            return x * 2, str(error)
    return f, (rand(3),)


@feature
def versions_and_loggers():
    import logging

    def f(x):
        logging.getLogger("minicompile.tests").debug("shape %s", x.shape)
        return x + (torch.__version__.split(".")[0] >= "2") + (torch.__version__ >= "2.1")
    return f, (rand(3),)


@feature(calls=3)
def spectral_norms():
    m = nn.utils.spectral_norm(nn.Conv2d(2, 3, 3))
    p = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
    return nn.Sequential(p, m), (rand(1, 2, 4, 4),)


@feature
def attributes_deleted():
    class Plain:
        shared = 1

        def __init__(self):
            self.n = 0

        def __delattr__(self, name):
            LOG.append(name)
            object.__delattr__(self, name)

    kept = Plain()

    def f(x):
        made = Plain()
        kept.extra = made.extra = x
        del kept.extra, made.extra
        try:
            del kept.shared
        except AttributeError as error:
            LOG.append(str(error))
        return x + 1, hasattr(kept, "extra"), hasattr(made, "extra"), list(LOG)
    return f, (rand(3),)


@feature
def tracebacks_that_are_not_looked_at():
    class Keeps:
        def __enter__(self):
            return self

        def __exit__(self, kind, error, traceback):
            LOG.append((kind, traceback is None, error.__traceback__ is traceback))
            return True

    def f(x):
        with Keeps():
            raise KeyError(1)
        try:
            raise ValueError(2)
        except ValueError as error:
            _, _, traceback = sys.exc_info()
            return x + 1, traceback is None, error.__traceback__ is traceback, KeyError(1).__traceback__
    return f, (rand(3),)


# ---- The random stream ---------------------------------------------------------------------------------------------------

def seeded(x, seed):
    torch.manual_seed(seed)
    return x + torch.rand(3)


@feature(graphs=None, calls=3)
def seeds_set_by_the_program():
    def f(x):
        a = [seeded(x, i) for i in range(2)]
        try:
            b = seeded(x, torch.initial_seed() % 5)
            raise ValueError
        except ValueError:
            c = torch.randn(2)
        finally:
            torch.default_generator.manual_seed(9)
        return a, b, c, torch.rand(1), torch.initial_seed()
    return f, (rand(3),)


@feature(graphs=None, calls=3)
def random_state_taken_back():
    def f(x):
        state = torch.get_rng_state()
        a = x + torch.rand(3)
        for _ in range(2):
            torch.set_rng_state(state)
            b = F.dropout(x, 0.5)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            c = seeded(x, 1)
        torch.cuda.manual_seed_all(3)
        return a, b, c, torch.rand(2)
    return f, (rand(3),)


@feature(graphs=None, calls=3)
def generators_of_the_program():
    kept = torch.Generator().manual_seed(3)

    def f(x):
        new = torch.Generator()
        new.manual_seed(1)
        return x + torch.rand(3, generator=new), torch.rand(3, generator=kept), torch.rand(1)
    return f, (rand(3),)


@pytest.mark.parametrize("call, words", [
    (lambda x: torch.manual_seed(1), "a call of torch.random.manual_seed"),
    (lambda x: torch.set_rng_state(torch.get_rng_state()), "a call of torch.random.get_rng_state"),
    (lambda x: torch.rand(3, generator=torch.default_generator), "a Generator object as an argument of a tensor operation")])
def test_random_state_reasons(call, words):
    with pytest.raises(minicompile.errors.GraphBreakError, match=words) as caught:
        minicompile.compile(lambda x: (x + 1, call(x)), backend="eager", fullgraph=True)(torch.ones(3))
    assert "Hint: Call it before or after the compiled function" in str(caught.value)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", FEATURES)
def test_feature(name, backend):
    build, graphs, calls, half = FEATURES[name]
    before = modes()
    want = run(build, lambda f: f, calls)
    assert modes() == before
    assert not isinstance(want[0], tuple) or graphs is None, want[0]
    got = run(build, functools.partial(minicompile.compile, backend=backend, fullgraph=graphs == 1), calls)
    check_same(got, want, **(dict(rtol=1e-2, atol=0.2) if half and backend != "eager" else {}))


def test_checkpoint_saves_only_its_input(monkeypatch):
    """Between forward and backward live the inputs of each block, not what it computes."""
    from minicompile.ch05_autograd import runtime
    saved, original = [], runtime.partition
    monkeypatch.setattr(runtime, "partition", lambda *args: saved.append(original(*args)) or saved[-1])
    sizes = []
    for use in (False, True):
        blocks = nn.ModuleList([Block(0.1) for _ in range(3)])

        def f(x):
            for block in blocks:
                x = checkpoint(block, x, use_reentrant=False) if use else block(x)
            return x
        minicompile.compile(f, backend="decomposed", fullgraph=True)(rand(64, 4)).sum().backward()
        halves = saved[-1]
        kept = {n for n, place in zip(halves.saved, halves.saved_inputs) if place is None}
        sizes.append(sum(n.meta["val"].nbytes for n in halves.backward.graph.nodes if n.name in kept))
    assert sizes[1] <= 2 * 64 * 4 * 4 + 3 * 64 * 4 + 64 < sizes[0]       # two inputs, three masks


def test_input_that_overlaps_a_buffer_after_compilation():
    def build():
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("a", torch.zeros(4))

            def forward(self, x):
                self.a.add_(1)
                return x * 2
        return M()
    plain, compiled = build(), build()
    function = minicompile.compile(compiled, backend="aot_eager", fullgraph=True)
    for pick in (lambda m: torch.ones(4), lambda m: m.a.view(4), lambda m: torch.ones(4)):
        assert torch.equal(function(pick(compiled)), plain(pick(plain)))
        assert torch.equal(compiled.a, plain.a)


@pytest.mark.parametrize("window", [False, True])
def test_requires_grad_of_a_view_taken_without_gradients(window):
    def flags(x):
        with torch.no_grad():
            view, new = x.t(), x.t() * 2
            inside = view.requires_grad, new.requires_grad, x.requires_grad
        return inside, view.requires_grad, x.t().requires_grad, x * 2
    x = torch.arange(6.0).reshape(2, 3).requires_grad_() if window else torch.ones(2, 3, requires_grad=True)
    for backend in ("eager", "aot_eager"):
        assert minicompile.compile(flags, backend=backend)(x)[:3] == flags(x)[:3]


# ---- numbers that are tensors --------------------------------------------------------------------------------------

def sizes_from_tensors(x, w):
    n = torch.div(x.shape[1], w * 2, rounding_mode="trunc")
    m = n - 1
    y = x.view(x.size(0), n, w * 2)
    if m > 0:
        y = y + m
    return y.new_zeros((2, m + 1)), y, n, int(m), list(range(m)), m.item(), y[:, :m], float(n), x.as_strided([2, n], [1, 1])


@pytest.mark.parametrize("backend", ("eager", "aot_eager", None))
def test_numbers_that_are_tensors(backend):
    compiled = minicompile.compile(sizes_from_tensors, backend=backend, fullgraph=True)
    for size in (16, 16, 24, 32):
        got, want = compiled(torch.ones(2, size), 4), sizes_from_tensors(torch.ones(2, size), 4)
        torch.testing.assert_close(got, want)
        assert [(type(v), getattr(v, "dtype", None)) for v in got] == [(type(v), getattr(v, "dtype", None)) for v in want]
    numbers = minicompile.compile(lambda x: (torch.div(7, 2), torch.add(1, 2.5), torch.mul(True, 3), torch.div(7., 0)),
                                  backend=backend)(torch.zeros(1))
    torch.testing.assert_close(numbers, tuple(map(torch.tensor, (3.5, 3.5, 3, float("inf")))))


def test_numbers_that_may_be_flushed_to_zero_are_not_known():
    def f(x):
        return x * (torch.tensor(1e-40) * 1e38), x * float(torch.tensor(1e-30) * 1e-10 * 1e38)
    compiled = minicompile.compile(f, backend="aot_eager")
    try:
        for flush in (False, True, False):
            torch.set_flush_denormal(flush)
            for a, b in zip(compiled(torch.ones(2)), f(torch.ones(2))):
                assert a.equal(b)
    finally:
        torch.set_flush_denormal(False)


def test_numbers_that_are_written_are_not_known():
    def in_place(x):
        t = torch.tensor(2)
        t += 3
        return x + t.item()

    def through_a_view(x):
        t = torch.tensor(2)
        t.view(1).add_(3)
        return x + t.item()

    def through_data(x):
        t = torch.tensor(2)
        t.view(1).data.add_(3)
        return x + t.item()

    def in_a_loop(x):
        t = torch.tensor(0)
        for _ in range(3):
            t = t + 1
        return x * t if t == 3 else x

    def random(x):
        return x + torch.rand(()).item() * 0 + torch.bernoulli(torch.tensor(1.)).item()

    for function in (in_place, through_a_view, through_data, in_a_loop, random):
        for _ in range(2):
            x = torch.zeros(2)
            assert minicompile.compile(function, backend="eager")(x).equal(function(x)), function.__name__


@pytest.mark.parametrize("backend", ("eager", "aot_eager"))
def test_names_that_differ_in_upper_case_only(backend):
    def f(x, X):
        return x - X
    assert minicompile.compile(f, backend=backend)(torch.ones(2), torch.zeros(2)).equal(torch.ones(2))


def test_whether_an_input_is_a_view():
    def asked(x):
        return x._is_view() + x
    fast = minicompile.compile(asked)
    for x in (torch.ones(2), torch.ones(2, 2)[0], (torch.ones(3).requires_grad_() * 2)[1:]):
        assert torch.equal(fast(x), asked(x))


@pytest.mark.parametrize("f", [lambda x: torch._neg_view(x).is_neg() + x, lambda x: torch._neg_view(x).resolve_neg().is_neg() + x,
                               lambda x: x.is_neg() + x])
def test_whether_a_tensor_is_a_lazy_negative(f):
    fast = minicompile.compile(f)
    for x in (torch.ones(2), torch._neg_view(torch.ones(2))):
        assert torch.equal(fast(x), f(x))


@pytest.mark.parametrize("f", [lambda z: z.conj().is_conj(), lambda z: torch.is_conj(z.conj()), lambda z: z.conj().resolve_conj(),
                               lambda z: torch.view_as_real(z.conj().resolve_conj()), lambda z: torch.resolve_conj(z.mH) * 2])
def test_lazy_conjugates(f):
    z = torch.randn(2, 2, dtype=torch.complex64)
    for backend in ("eager", "aot_eager"):
        got, want = minicompile.compile(f, backend=backend)(z), f(z)
        assert torch.equal(got, want) and got.is_conj() == want.is_conj() if isinstance(want, torch.Tensor) else got is want


@pytest.mark.parametrize("write", [lambda v: v.detach().zero_(), lambda v: v.view(torch.int32).zero_(), lambda v: v.data.zero_(),
                                   lambda v: v.squeeze().detach().add_(1)])
@pytest.mark.parametrize("part", [lambda base: base[1:5, 1:4], lambda base: base, lambda base: base.detach()])
def test_a_leaf_that_is_a_view_and_is_written_beside_its_history(write, part):
    def f(a):
        b = a.squeeze()
        write(a)
        return (b * 2).sum()

    seen = []
    for function in (f, minicompile.compile(f, backend="aot_eager")):
        torch.manual_seed(0)
        a = part(torch.randn(8, 6)).requires_grad_()
        out = function(a)
        out.backward()
        seen.append((a.detach().clone(), out.detach(), a.grad, a.is_leaf))
    torch.testing.assert_close(seen[1], seen[0])


@pytest.mark.parametrize("operand", [lambda x: x, lambda x: x * 2])
def test_whole_numbers_require_no_gradient(operand):
    def f(x):
        try:
            return operand(x).requires_grad_()
        except RuntimeError as error:
            return str(error), x + 1
    x = torch.arange(3)
    said, result = minicompile.compile(f)(x)
    assert (said, result.tolist()) == (f(x)[0], [1, 2, 3])


def instructions_for(f, *args):
    return trace_frame(f, dict(zip(f.__code__.co_varnames, args)), CaptureOptions()).tx.ops


def test_grad_modes_are_not_inlined():
    def empty(x):
        with torch.no_grad():
            pass

    def called(x):
        x.size()
        with torch.no_grad():
            pass
    assert instructions_for(empty, torch.ones(2)) <= len(list(dis.get_instructions(empty)))
    assert instructions_for(called, torch.ones(2)) - instructions_for(empty, torch.ones(2)) < 8


def test_a_function_is_guarded_once_for_all_its_calls(monkeypatch):
    def f(x, model):
        for _ in range(50):
            x = model(x)
        return x
    model, asked = nn.Sequential(nn.ReLU(), nn.Tanh()), []
    add = GuardSet.add
    monkeypatch.setattr(GuardSet, "add", lambda self, source, kind, *more: (asked.append(kind), add(self, source, kind, *more)))
    trace_frame(f, {"x": torch.ones(2), "model": model}, CaptureOptions())
    assert asked.count("FUNCTION") < 20 and asked.count("BASES") < 5


# ---- tensors that are known ----------------------------------------------------------------------------------------

class Sampler(torch.nn.Module):
    steps = 4

    def forward(self, x):
        times = list(reversed(torch.linspace(-1, 9, steps=self.steps + 1).int().tolist()))
        for now, after in zip(times[:-1], times[1:]):
            x = x + now if after < 0 else x * (now - after)
        rows, columns = torch.meshgrid(torch.arange(2), torch.arange(3), indexing="ij")
        levels = torch.tensor([[2, 3], [4, 5]])
        starts = torch.cat([levels.new_zeros((1,)), levels.prod(1).cumsum(0)[:-1]]).tolist()
        if torch.triu(torch.ones(3, 3), 1).bool().any():
            for height, width in levels:
                x = x + int(height) * width.item()
        return x, times, rows.tolist(), columns.sum().item(), starts, float(torch.tensor([2.5])), bool(torch.ones(1)), levels


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64, torch.bfloat16])
def test_numbers_of_constants_of_each_dtype(dtype):
    """PyTorch says of few dtypes whether a tensor of them is finite."""
    def f(x):
        small = torch.tensor(2.5).to(dtype)
        return small.clone().float() + x, small

    got, want = (g(torch.ones(3)) for g in (minicompile.compile(f, backend="eager", fullgraph=True), f))
    assert got[1].dtype == dtype and got[0].equal(want[0]) and got[1].float().equal(want[1].float())


def test_numbers_of_tensors_of_constants():
    compiled, x = minicompile.compile(Sampler(), backend="eager", fullgraph=True), torch.ones(2)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), Sampler()(x))
        compiled(x)[-1].zero_()


@pytest.mark.parametrize("write", (
    lambda t: t.add_(1), lambda t: t[0].zero_(), lambda t: t.view(2).data.zero_(), lambda t: t.numpy().fill(3),
    lambda t: torch.add(t, t, out=t), lambda t: t.detach().sub_(1)))
def test_what_was_written_is_not_of_constants(write):
    def asked(x):
        t = torch.arange(2)
        later = t * 2
        view = t.view(2)
        write(t)
        return x + 1, t.tolist(), view.tolist(), later.tolist(), (t + 1).sum().item()
    x = torch.ones(2)
    compiled = minicompile.compile(asked, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x), asked(x))


@pytest.mark.parametrize("draw", (lambda: torch.rand(3), lambda: torch.randperm(3), lambda: torch.zeros(3).normal_(),
                                  lambda: torch.nn.functional.dropout(torch.ones(3)), lambda: torch.bernoulli(torch.full((3,), 0.5))))
def test_what_was_drawn_is_not_of_constants(draw):
    def drawn(x):
        return x, (draw() * 2).tolist()
    compiled = minicompile.compile(drawn, backend="eager")
    for seed in range(4):
        results = []
        for f in (compiled, drawn):
            torch.manual_seed(seed)
            results.append(f(torch.ones(2)))
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("backend", ("eager", "aot_eager"))
def test_detach_in_place(backend):
    def f(x, w):
        y = x * w
        z = y.exp()
        same = y.detach_()
        with torch.no_grad():
            guess = (z * 2).detach_()
        return y is same, y, y.requires_grad, y.is_leaf, y * w, z, guess
    for fullgraph in (True, False):
        results = []
        for g in (minicompile.compile(f, backend=backend, fullgraph=fullgraph), f):
            x, w = torch.ones(2, requires_grad=True), torch.full((2,), 3.0, requires_grad=True)
            out = g(x, w)
            (out[4].sum() + out[5].sum()).backward()
            results.append((*out, x.grad, w.grad))
        torch.testing.assert_close(*results)


def test_detach_in_place_of_views_and_arguments():
    def view(x):
        return (x * 2)[:1].detach_()

    def argument(x):
        x.detach_()
        return x * 2
    with pytest.raises(RuntimeError, match="Can't detach views"):
        minicompile.compile(view, backend="eager")(torch.ones(2, requires_grad=True))
    x = torch.ones(2, requires_grad=True) * 1
    assert not minicompile.compile(argument, backend="eager")(x).requires_grad and not x.requires_grad


# ---- read-only views of dictionaries -------------------------------------------------------------------------------

def test_read_only_views_of_dictionaries():
    def program(compile):
        contents, said = {"a": 2, "b": torch.ones(2)}, []
        view = types.MappingProxyType(contents)

        class Holder:
            def __init__(self, **items):
                self.items = items
                self.view = types.MappingProxyType(self.items)

        @compile
        def read(x, holder):
            contents["a"] += 1
            for key, value in view.items():
                x = x * value
            contents["b"] = x
            return x, view["b"] is x, view.get("none"), "a" in view, len(view), sorted(view), {**view}["a"], holder.view["k"] + x

        @compile
        def written(x):
            view["c"] = x
        for i in range(4):
            holder = Holder(k=torch.full((2,), float(i)))
            holder.items["k"] += 1
            said.append(read(torch.ones(2), holder))
            contents["b"], contents[f"more {i}"] = torch.full((2,), 3.0), i + 1
            with pytest.raises(TypeError, match="item assignment"):
                written(torch.ones(2))
        holder.view = types.MappingProxyType({"k": torch.zeros(2), "j": 1})
        return said + [read(torch.ones(2), holder)]
    assert repr(program(minicompile.compile(backend="eager", fullgraph=True))) == repr(program(lambda f: f))


# ---- leaves that the function makes --------------------------------------------------------------------------------

@pytest.mark.parametrize("backend", ["eager", "loops"])
@pytest.mark.parametrize("differentiable", [False, True])
def test_leaf_made_inside_and_added_to_an_argument(backend, differentiable):
    @minicompile.compile(backend=backend)
    def add(x):
        leaf = torch.ones(3).requires_grad_()
        x += leaf
        return leaf
    x = torch.ones(3, requires_grad=differentiable) * 2
    leaf = add(x)
    x.sum().backward()
    assert leaf.grad.tolist() == [1, 1, 1]


@pytest.mark.parametrize("backend", ["eager", "loops"])
def test_hooks_that_are_registered_inside_and_called_later(backend):
    def tripled(gradient):
        return gradient * 3

    def leaf():
        made = torch.ones(2, requires_grad=True)
        made.register_hook(tripled)
        return made

    def told(said):
        made = torch.ones(2, requires_grad=True)
        made.register_post_accumulate_grad_hook(lambda x: said.append(x.grad.tolist()))
        return made

    def written(x):
        y = x * 2
        y.register_hook(tripled)
        x.add_(y)
        return x

    def broken():
        made = torch.ones(2, requires_grad=True)
        made.register_hook(tripled)
        made.sum().backward()
        LOG.append(made.grad.tolist())
        made.sum().backward()
        return made

    def program(compile):
        said, source = [], torch.ones(2, requires_grad=True)
        made = [compile(leaf)(), compile(told)(said), compile(broken)()]
        sum(t.sum() for t in (*made, compile(written)(source * 1))).backward()
        return [t.grad.tolist() for t in (*made, source)], said
    assert program(minicompile.compile(backend=backend)) == program(lambda f: f) == ([[3, 3], [1, 1], [9, 9], [7, 7]], [[1, 1]])


def test_copies_keep_what_hangs_on_a_state_dict():
    def f(module):
        found = module.state_dict()
        return [hasattr(d, "_metadata") for d in (found, copy.copy(found), copy.deepcopy(found), found.copy())], copy.copy(found)
    (kept, copied), (kept_eagerly, copied_eagerly) = minicompile.compile(f, backend="eager")(nn.Linear(2, 2)), f(nn.Linear(2, 2))
    assert kept == kept_eagerly == [True, True, True, False]
    assert vars(copied) == vars(copied_eagerly)


def test_what_was_saved_is_unpacked_as_often_as_the_program_reads_it():
    unpacked = []

    def unpack(saved):
        unpacked.append(1)
        return saved

    def program(compile):
        read, read_of_a_node = compile(lambda ctx: ctx.saved_tensors[0] * 2), compile(lambda node: node._saved_self * 2)

        class Square(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x * x

            @staticmethod
            def backward(ctx, g):
                return g * read(ctx)
        unpacked.clear()
        for _ in range(3):
            x = torch.arange(3., requires_grad=True)
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
                y = Square.apply(x) + x * x
            read_of_a_node(y.grad_fn.next_functions[1][0])
            y.sum().backward()
        y = checkpoint(Square.apply, x, use_reentrant=False)
        y.sum().backward()
        return x.grad.tolist(), len(unpacked)
    assert program(minicompile.compile) == program(lambda f: f)


class SavesWhatItReturns(torch.autograd.Function):
    @staticmethod
    def forward(x, y):
        return x * y, x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g, h):
        x, y = ctx.saved_tensors
        return g * y + h, g * x


@pytest.mark.parametrize("requires_grad", [True, False])
def test_an_input_that_is_returned_and_saved_is_refused_as_in_eager(requires_grad):
    """`setup_context` sees the input, and the output is another tensor, with another history."""
    def f(x):
        a, b = SavesWhatItReturns.apply(x, x * 2)
        return a + b

    for h in (f, minicompile.compile(f)):
        with pytest.raises(RuntimeError, match="returned as-is as output"):
            h(torch.ones(2, requires_grad=requires_grad))


class Named(collections.namedtuple("Named", "a")):
    pass


@pytest.mark.parametrize("make", [lambda: collections.OrderedDict(a=1), lambda: Named(1)])
def test_the_dictionary_of_a_container_is_no_method(make):
    def f(x):
        made = make()
        attributes = getattr(made, "__dict__", None)
        print(end="")
        return attributes, hasattr(made, "__dict__"), made.__dict__ == {}, x + 1

    def copies(x):
        found = nn.Linear(2, 2).state_dict(keep_vars=True)
        print(end="")
        return vars(copy.deepcopy(found)), x + 1
    for function in (f, copies):
        result, expected = minicompile.compile(function, backend="eager")(torch.ones(1)), function(torch.ones(1))
        assert result == expected
    with pytest.raises(minicompile.GraphBreakError, match="__dict__"):
        minicompile.compile(lambda x: make().__dict__ == {}, backend="eager", fullgraph=True)(torch.ones(1))


def test_how_much_a_deque_can_hold():
    def f(x, given):
        made = collections.deque([x], 3)
        return made.maxlen == 3, collections.deque().maxlen is None, given.maxlen, hasattr([x], "maxlen"), x + made.maxlen
    compiled = minicompile.compile(f, backend="eager", fullgraph=True)
    for given in (collections.deque(), collections.deque([1], 2)):
        assert compiled(torch.ones(1), given) == f(torch.ones(1), given)


@pytest.mark.parametrize("kind", (list, tuple))
@pytest.mark.parametrize("backend", ("eager", "aot_eager"))
def test_operators_on_lists_return_the_list_that_they_wrote_to(kind, backend):
    def f(tensors):
        written = torch._foreach_mul_(tensors, 2.0)
        return written, written is tensors, torch._foreach_exp_(list(written))[1] + 1

    def arguments():
        return kind([torch.ones(3), torch.arange(3.0)])

    compiled, want = minicompile.compile(f, backend=backend, fullgraph=True), f(arguments())
    for _ in range(2):
        tensors = arguments()
        got = compiled(tensors)
        assert got[0] is tensors and got[1] is want[1] is True and torch.equal(got[2], want[2])
        assert all(map(torch.equal, tensors, want[0]))


@pytest.mark.parametrize("view", [lambda a: a.unbind()[0], lambda a: a.split(1)[0], lambda a: next(iter(a))])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_write_that_autograd_refuses_is_refused(view, backend):
    """Behind a graph break the results of a graph are no views of each other."""
    def f(b):
        v = view(torch.zeros(2, 3))
        try:
            v.add_(b)
        except RuntimeError as error:
            return str(error)
        return v
    b = torch.ones(1, requires_grad=True)
    assert minicompile.compile(f, backend=backend)(b) == f(b)


CLASSES_FOR_DTYPES = {
    "creation": lambda x: (torch.zeros(x.shape, dtype=int), torch.full((2,), 1, dtype=float), torch.arange(3, dtype=int),
                           torch.eye(2, dtype=bool)),
    "of data": lambda x: (torch.tensor([1, 2], dtype=complex), x.new_tensor([1], dtype=int), torch.as_tensor([2], dtype=float),
                          torch.tensor([x.shape[0], 2], dtype=float)),
    "casts": lambda x: (x.to(float), x.to("cpu", int), x.to(torch.device("cpu"), dtype=bool), x.double().view(int)),
    "reductions": lambda x: (x.sum(dtype=float), torch.cumsum(x, 0, dtype=float), F.softmax(x, 0, dtype=float)),
    "questions": lambda x: (x * torch.can_cast(float, int), torch.zeros_like(x, dtype=torch.promote_types(int, float))),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "cpp"])
@pytest.mark.parametrize("name", CLASSES_FOR_DTYPES)
def test_classes_of_numbers_as_dtypes(name, backend):
    x, function = torch.randn(3, 4), CLASSES_FOR_DTYPES[name]
    for want, got in zip(function(x), minicompile.compile(function, backend=backend, fullgraph=True)(x)):
        torch.testing.assert_close(got, want)


def test_what_takes_a_class_for_no_dtype():
    @torch.compiler.allow_in_graph
    def converted(x, kind):
        return x * kind(2.7)

    def refused(x):
        try:
            return x.type(int)
        except ValueError:
            return x + 1

    x = torch.randn(3)
    torch.testing.assert_close(minicompile.compile(lambda x: converted(x, int), backend="aot_eager")(x), x * 2)
    torch.testing.assert_close(minicompile.compile(refused, backend="eager")(x), x + 1)


@pytest.mark.parametrize("operator", [torch.ops.aten.sum, torch.ops.aten.sum.default])
def test_operators_take_no_class_for_a_dtype(operator):
    with pytest.raises(RuntimeError):
        minicompile.compile(lambda x: operator(x, dtype=float), backend="eager")(torch.ones(3))


ROUNDED = {"per tensor": lambda x, s, z: torch.fake_quantize_per_tensor_affine(x * 2, 0.05, 3, 0, 255),
           "by tensors": lambda x, s, z: torch.fake_quantize_per_tensor_affine(x * 2, s[0].detach(), z[0].detach().int(), 0, 255),
           "per channel": lambda x, s, z: torch.fake_quantize_per_channel_affine(x * 2, s.detach(), z.detach().int(), 0, -8, 7),
           "learned": lambda x, s, z: torch._fake_quantize_learnable_per_tensor_affine(x * 2, s[:1], z[:1], -8, 7, 0.5),
           "learned per channel": lambda x, s, z: torch._fake_quantize_learnable_per_channel_affine(x * 2, s, z, 0, -8, 7, 0.5)}


@pytest.mark.parametrize("backend", ["aot_eager", "cpp"])
@pytest.mark.parametrize("name", ROUNDED)
def test_rounding_as_to_a_quantised_tensor_stays_in_the_graph(name, backend, reset):
    def derive(f, x):
        given = [x.clone().requires_grad_(), *(t.requires_grad_() for t in (torch.linspace(0.05, 0.2, len(x)), torch.zeros(len(x))))]
        y = f(*given)
        return y.detach(), *torch.autograd.grad(y.float().sin().sum(), given, allow_unused=True)
    compiled = minicompile.compile(ROUNDED[name], backend=backend, fullgraph=True)
    last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for x in (torch.randn(3, 4), torch.randn(5, 4), torch.randn(4, 5).t().bfloat16(), last):
        for found, expected in zip(derive(compiled, x), derive(ROUNDED[name], x), strict=True):
            torch.testing.assert_close(found, expected, check_stride=expected is not None)


def test_rounding_that_eager_refuses_raises_also_where_nobody_reads_it(reset):
    def f(x):
        torch.fake_quantize_per_tensor_affine(x, 0.05, 300, 0, 255)
        return x * 2
    with pytest.raises(RuntimeError, match="zero_point"):
        minicompile.compile(f, backend="aot_eager")(torch.ones(3))
