"""A graph behind a break raises: handlers that were entered before the break run, as in eager."""
import contextlib

import pytest
import torch
import torch.utils.checkpoint

import minicompile

pytestmark = pytest.mark.usefixtures("fresh")

LOG = []


@contextlib.contextmanager
def noted():
    LOG.append("enter")
    try:
        yield 5
    except IndexError:
        LOG.append("swallowed")
    finally:
        LOG.append("exit")


def caught(x, i):
    try:
        print(end="")
        x.add_(1)
        return x[i] * 2
    except IndexError:
        return x + 100
    finally:
        LOG.append("finally")


def goes_up(x, i):
    with torch.no_grad():
        try:
            print(end="")
            x.add_(1)
            y = x[i] * 2
        finally:
            LOG.append(torch.is_grad_enabled())
    return y


def values_wait(x, i):
    with torch.no_grad(), noted() as v:
        y = [x + 1]
        z = (x.sum(), print(end=""), x.add_(1), x[i] * v)
        return z[-1]
    return x, y, (lambda: i)()


def rounds(x, i):
    out = []
    for k in range(3):
        try:
            print(end="")
            x.mul_(2)
            out.append(x[i - k] + k)
        except IndexError as error:
            out.append(str(error))
            continue
        finally:
            LOG.append(k)
    return out


def handling(x, i):
    try:
        raise KeyError("first")
    except KeyError as error:
        try:
            print(end="")
            x.mul_(2)
            x = x[i]
        finally:
            LOG.append(repr(error))
    return x


def outcome(function, index):
    x = torch.ones(3)
    LOG.clear()
    try:
        result = function(x, torch.tensor([index]))
    except Exception as error:
        result = str(error), repr(error.__context__)
    return str(result), x.tolist(), list(LOG), torch.is_grad_enabled()


@pytest.mark.parametrize("function", [caught, goes_up, values_wait, rounds, handling], ids=lambda f: f.__name__)
def test_a_graph_that_has_written_raises(function):
    compiled = minicompile.compile(function, backend="eager")
    for index in (1, 7, 2, 4, 8):
        assert outcome(compiled, index) == outcome(function, index)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_checkpoint_stops_inside_a_resume_function(backend):
    def f(x):
        LOG.append(1)
        with torch.autocast("cpu", torch.bfloat16):
            try:
                y = x @ x
                print(end="")
                return y.sin() * y
            finally:
                LOG.pop()

    def gradients(function):
        x = torch.ones(4, 4, requires_grad=True)
        for _ in range(2):
            torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False).float().sum().backward()
            assert not LOG and not torch.is_autocast_enabled("cpu")
        return x.grad

    LOG.clear()
    assert torch.equal(gradients(minicompile.compile(f, backend=backend)), gradients(f))
