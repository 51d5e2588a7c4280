"""Which tests run by default, and in what surroundings.

Tests marked `gpu` are deselected, and counted as such, on machines without one; `-m gpu` asks for them anyway. Tests marked `slow` run with
`-m slow` only. No test sees the user's kernel cache: each session has an empty one, which its workers and the processes they start share.
"""
import gc
import os
import random
import shutil
import tempfile
import types

import numpy
import pytest
import torch
from torch.testing._internal import common_utils

import minicompile
from minicompile import frames
from minicompile.ch10_cpp import build

# PyTorch's database of operators looks for the unittest that asks for samples, through all of the stack and its sources, each time.
common_utils.extract_test_fn = lambda: None

# `torch.manual_seed` notes, for each kind of device that is not in use, from where it was called: a millisecond in all.
for kind in (torch.cuda, torch.mtia, torch.xpu):
    kind.traceback = types.SimpleNamespace(format_stack=list)

# Where each core has a worker, a second file of kernels saves no time, and takes some.
if os.environ.get("PYTEST_XDIST_WORKER"):
    build.cores = lambda: 1


def pytest_configure(config):
    if os.environ.get("PYTEST_XDIST_WORKER") is None:          # workers inherit the variable
        folder = tempfile.mkdtemp(prefix="minicompile-tests-")
        os.environ["MINICOMPILE_CACHE_DIR"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collectstart(collector):
    """The inputs that a module draws when it is imported are the same in every worker and in every run."""
    if isinstance(collector, pytest.Module):
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)


def pytest_collection_modifyitems(config, items):
    asked = config.option.markexpr or ""
    unwanted = {name for name in ("gpu", "slow") if name not in asked}
    if torch.cuda.is_available():
        unwanted.discard("gpu")
    without = {item for item in items if any(item.get_closest_marker(name) for name in unwanted)}
    if without:
        config.hook.pytest_deselected(items=list(without))
        items[:] = [item for item in items if item not in without]


def pytest_collection_finish(session):
    keep_what_is_there()


def keep_what_is_there():
    """What has been imported and collected stays: collections of garbage, which tests ask for, need not look through it each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def few_objects():
    """What the tests of a module have imported stays, too. A full collection would take 0.2 seconds for it."""
    yield
    keep_what_is_there()


@pytest.fixture(autouse=True)
def same_start():
    """Each test has the same random numbers, and leaves the process-wide switches as it found them."""
    torch.manual_seed(0)
    grad, dtype, threads = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()
    yield
    torch.set_grad_enabled(grad)
    torch.set_default_dtype(dtype)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    raising, minicompile.config.raise_on_internal_error = minicompile.config.raise_on_internal_error, False
    assert not raising, "the test leaves raise_on_internal_error set"


@pytest.fixture
def reset():
    """Nothing is compiled before the test and after it."""
    minicompile.reset()
    yield
    minicompile.reset()
    minicompile.set_stance("default")


@pytest.fixture
def fresh(reset):
    """Also, errors of the compiler itself reach the test: `pytestmark = pytest.mark.usefixtures("fresh")`."""
    with minicompile.config.patch(raise_on_internal_error=True):
        yield


@pytest.fixture
def captured(monkeypatch):
    """The codes that are captured from now on."""
    codes, compile_frame = [], frames.compile_frame
    monkeypatch.setattr(frames, "compile_frame", lambda state, *args: codes.append(state.code) or compile_frame(state, *args))
    return codes
