"""A kernel that cannot be built does not stop the program: the reference interpreter runs it, with one warning."""

import pytest
import torch

import minicompile
from minicompile.ch10_cpp import build


def break_the_compiler(monkeypatch, tmp_path, error=RuntimeError("the C++ compiler rejected a generated kernel:\nline 2")):
    monkeypatch.setenv("MINICOMPILE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "_loaded", {})

    def fail(text, target):
        raise error
    monkeypatch.setattr(build, "_compile", fail)


def program(x, y):
    return torch.softmax(x * y, -1).sum(0) + 17.25


def test_result_is_right_and_the_warning_names_the_kernel(monkeypatch, tmp_path):
    break_the_compiler(monkeypatch, tmp_path)
    x, y = torch.randn(5, 7), torch.randn(7)
    with pytest.warns(RuntimeWarning, match="could not be built.*rejected"):
        got = minicompile.compile(program, backend="cpp")(x, y)
    torch.testing.assert_close(got, program(x, y))


def test_an_exception_that_says_nothing_is_named(monkeypatch, tmp_path):
    break_the_compiler(monkeypatch, tmp_path, MemoryError())
    minicompile.reset()
    x, y = torch.randn(5, 7), torch.randn(7)
    with minicompile.config.patch(raise_on_internal_error=False), pytest.warns(RuntimeWarning, match="could not be built.*MemoryError"):
        got = minicompile.compile(program, backend="cpp")(x, y)
    torch.testing.assert_close(got, program(x, y))


def test_raises_when_asked_to(monkeypatch, tmp_path):
    break_the_compiler(monkeypatch, tmp_path)
    minicompile.reset()
    with minicompile.config.patch(raise_on_internal_error=True), pytest.raises(RuntimeError, match="rejected"):
        minicompile.compile(program, backend="cpp")(torch.randn(5, 7), torch.randn(7))
