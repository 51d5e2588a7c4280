"""Wrong use, and machines that lack something: one clear sentence and the way out, no traceback from the command line."""
import errno
import os
import pathlib
import subprocess
import sys
import warnings

import pytest
import torch

import minicompile
from minicompile import cache
from minicompile.__main__ import main
from minicompile.ch10_cpp import build

ROOT = pathlib.Path(minicompile.__file__).parents[1]


def command(*arguments, cwd=ROOT, **env):
    """`python -m minicompile ARGUMENTS`: (exit status, everything it printed)."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "300", "CUDA_VISIBLE_DEVICES": "", **env}
    done = subprocess.run([sys.executable, "-m", "minicompile", *map(str, arguments)], cwd=cwd, capture_output=True, text=True,
                          env=environment, timeout=300)
    return done.returncode, done.stdout + done.stderr


def warned(function, *args) -> list[str]:
    """The texts of the warnings while function(*args) gives its right answer."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args)
    return [str(w.message) for w in caught if w.category is not ResourceWarning]


@pytest.fixture(autouse=True)
def empty_cache(reset, tmp_path, monkeypatch):
    monkeypatch.setenv("MINICOMPILE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_fallback", None)
    monkeypatch.setattr(build, "_loaded", {})
    build.compiler.cache_clear()
    yield
    build.compiler.cache_clear()


def chain(x):
    return (x * 2 + 1).relu()


def check(**settings):
    x = torch.randn(7)
    compiled = minicompile.compile(chain, **settings)
    for _ in range(2):
        assert torch.equal(compiled(x), chain(x))


# ---- the command line ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("arguments, words", [
    (["bench", "nanogtp"], ("nanogtp", "resnet50")),
    (["bench", "nanogpt", "--compilers", "eager,tensorflow"], ("tensorflow", "minicompile")),
    (["bench", "nanogpt", "--compilers", "minicompile:fast"], ("minicompile:fast", "reduce-overhead")),
    (["bench", "nanogpt", "--dtype", "fp8"], ("fp8", "bf16")),
    (["bench", "nanogpt", "--device", "tpu"], ("tpu", "cuda")),
    (["bench", "nanogpt", "--device", "cuda"], ("--device cuda", "Leave --device out")),
    (["bench", "nanogpt", "--steps", "1"], ("--steps 1", "at least")),
    (["bench", "nanogpt", "--data", "no-such-file.txt"], ("no-such-file.txt", "existing text file")),
    (["bench", "nanogpt", "--data", "SHORT"], ("short.txt", "at least 10,000")),
    (["run", "no_such_script.py"], ("no_such_script.py", "path of a Python file")),
    (["run"], ("needs a script",))], ids=lambda v: "-".join(v) if isinstance(v, list) else None)
def test_command_line(arguments, words, tmp_path, monkeypatch, capsys):
    (tmp_path / "short.txt").write_text("too short")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["minicompile", *[a.replace("SHORT", "short.txt") for a in arguments]])
    with pytest.raises(SystemExit) as caught:
        main()
    text = caught.value.code                                      # what the interpreter prints, with exit status 1
    assert isinstance(text, str) and text.startswith("minicompile: ") and not capsys.readouterr().err, text
    assert all(w in text for w in words) and len(text.splitlines()) == 1, text


@pytest.mark.processes
def test_command_line_as_a_process(tmp_path):
    status, text = command("bench", "nanogtp", cwd=tmp_path)
    assert status == 1 and text.startswith("minicompile: ") and len(text.splitlines()) == 1, text


@pytest.mark.processes
def test_wrong_use_in_a_script_names_its_line(tmp_path):
    (tmp_path / "script.py").write_text("import torch\n\nf = torch.compile(abs, mode='fastest')\n")
    status, text = command("run", tmp_path / "script.py")
    assert status == 1 and "Traceback" not in text
    assert "Unknown mode 'fastest'" in text and "script.py:3: f = torch.compile" in text


# ---- no compiler, no GPU -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("variables", [{"CXX": "/nonexistent"}, {"PATH": ""}], ids=["CXX", "PATH"])
def test_no_cpp_compiler(variables, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    texts = warned(check)
    assert len(texts) == 1 and "C++ compiler" in texts[0] and "apt install g++" in texts[0], texts
    minicompile.reset()
    with minicompile.config.patch(raise_on_internal_error=True):
        with pytest.raises(minicompile.MinicompileError, match="apt install g"):
            check()
    minicompile.reset()
    assert not warned(lambda: check(backend="aot_eager")), "the way out that the message names"


@pytest.mark.parametrize("settings, words", [
    (dict(backend="triton"), "TRITON_INTERPRET"), (dict(backend="cudagraphs"), "needs a GPU"),
    (dict(mode="reduce-overhead"), "need a GPU")], ids=str)
def test_gpu_asked_for_where_there_is_none(settings, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    texts = warned(lambda: check(**settings))
    assert len(texts) == 1 and words in texts[0], texts


# ---- cache directory -----------------------------------------------------------------------------------------------

def test_cache_directory_that_is_a_file(tmp_path, monkeypatch):
    (tmp_path / "blocked").write_text("")
    monkeypatch.setenv("MINICOMPILE_CACHE_DIR", str(tmp_path / "blocked" / "below"))
    texts = warned(check)
    assert len(texts) == 1 and "MINICOMPILE_CACHE_DIR" in texts[0], texts


def test_cache_directory_that_is_read_only(tmp_path, monkeypatch):
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode & os.W_OK == 0 and access(path, mode))   # root may write anywhere
    texts = warned(check)
    assert len(texts) == 1 and "not writable" in texts[0] and "MINICOMPILE_CACHE_DIR" in texts[0], texts


def test_cache_directory_that_is_full(tmp_path, monkeypatch):
    replace = os.replace

    def full(source, target, *rest):
        if str(tmp_path) in str(target):
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        return replace(source, target, *rest)
    monkeypatch.setattr(os, "replace", full)
    texts = warned(check)
    assert len(texts) == 1 and "No space left" in texts[0] and "MINICOMPILE_CACHE_DIR" in texts[0], texts
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()], "nothing half-written is left behind"


# ---- Python --------------------------------------------------------------------------------------------------------

@pytest.mark.processes
@pytest.mark.parametrize("version", [(3, 10, 4), (3, 14, 0)])
def test_unsupported_python(version):
    done = subprocess.run([sys.executable, "-c", f"import sys\nsys.version_info = {version}\nsys.version = '{version[0]}.{version[1]}'\n"
                           "import minicompile"], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].startswith("ImportError: minicompile needs CPython 3.11, 3.12 or 3.13; this is 3.")


@pytest.mark.processes
def test_makefile_names_another_python(tmp_path):
    fake = tmp_path / "python3.10"
    fake.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'import sys; sys.version_info = (3, 10); exec(sys.argv[2])' \"$@\"\n")
    fake.chmod(0o755)
    done = subprocess.run(["make", "-s", f"PYTHON={fake}", f"VENV={tmp_path / 'venv'}", str(tmp_path / "venv" / "installed")],
                          cwd=ROOT, capture_output=True, text=True)
    assert done.returncode and "needs Python 3.11 to 3.13" in done.stderr and "make PYTHON=python3.12" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "venv").exists()
