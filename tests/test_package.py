"""The source distribution and the wheel: built from the committed files, installed apart, and run outside of the checkout."""
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import textwrap
import zipfile

import pytest

pytestmark = pytest.mark.processes
ROOT = pathlib.Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"
PROGRAM = """
    import logging, sys
    import torch
    import minicompile
    from minicompile import driver
    from minicompile.ch02_guards.stable import unchanged
    from minicompile.ch03_capture import hook

    @minicompile.compile
    def step(x, w):
        y = torch.softmax(x @ w, -1) * 2 + 1
        print("between two graphs")
        return (y.relu() * x).sum()

    torch.manual_seed(0)
    x, w = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)
    for _ in range(2):
        loss = step(x, w)
        loss.backward()
    y = torch.softmax(x @ w, -1) * 2 + 1
    torch.testing.assert_close(loss, (y.relu() * x).sum())
    print(minicompile.__file__, hook._c.__file__, unchanged.__file__, driver.counters.graphs, driver.counters.kernels, sep="\\n")
"""


def ran(*command, cwd, **settings) -> list[str]:
    done = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True, timeout=300, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(source distribution, the wheel made from it)."""
    place = tmp_path_factory.mktemp("package")
    tree = place / "tree"
    shutil.copytree(ROOT / "minicompile", tree / "minicompile", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "ARCHITECTURE.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    source = place / ran(sys.executable, "-c", BUILD, "sdist", place, cwd=tree)[-1]
    with tarfile.open(source) as archive:
        archive.extractall(place / "unpacked", filter="data")
    (unpacked,) = (place / "unpacked").iterdir()
    return source, place / ran(sys.executable, "-c", BUILD, "wheel", place, cwd=unpacked)[-1]


def names_in(source: pathlib.Path) -> set[str]:
    with tarfile.open(source) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def test_the_source_distribution_holds_all_sources(built):
    wanted = {str(p.relative_to(ROOT)) for kind in ("py", "c", "h") for p in (ROOT / "minicompile").rglob(f"*.{kind}")}
    assert len(wanted) > 100 and wanted | {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "setup.py"} <= names_in(built[0])


def test_the_wheel_holds_the_package_and_says_what_it_is(built):
    with zipfile.ZipFile(built[1]) as archive:
        names = set(archive.namelist())
        (metadata,) = (archive.read(n).decode() for n in names if n.endswith(".dist-info/METADATA"))
    assert {n.partition("/")[0] for n in names} == {"minicompile", next(n for n in names if ".dist-info/" in n).partition("/")[0]}
    assert any(n.endswith("/licenses/LICENSE") for n in names)
    assert {"minicompile/ch10_cpp/prelude.h", "minicompile/ch10_cpp/launch.cpp"} <= names
    assert {"License-Expression: BSD-3-Clause", "Author: the minicompile authors", "Description-Content-Type: text/markdown"} \
        <= set(metadata.splitlines())


def test_the_wheel_runs_outside_of_the_checkout(built, tmp_path):
    home = tmp_path / "installed"
    ran(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", "--target", home,
        built[1], cwd=tmp_path)
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    environment = {**os.environ, "MINICOMPILE_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(home)}
    *printed, package, hook, memo, graphs, kernels = ran(sys.executable, "program.py", cwd=tmp_path, env=environment)
    assert printed == ["between two graphs"] * 2
    for file in (package, hook, memo):
        assert file.startswith(str(home)), file
    assert hook.endswith(".so") and memo.endswith(".so") and int(graphs) == 2 and int(kernels) >= 2
    script = home / "bin" / "minicompile"
    said = ran(sys.executable, script, "run", "program.py", cwd=tmp_path, env=environment)
    assert said[:2] == ["between two graphs"] * 2
