"""The README shows exactly the committed results, and its facts are those of the project."""

import importlib
import json
import pathlib
import re
import subprocess
import sys

import pytest
import torch

import minicompile

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
TEXT = README.partition("## Measured")[0]
COMMANDS = re.findall(r"(?:^    |`)((?:make|python|source) [^`\n#]*?)(?= +#|`|\n)", TEXT, re.M)


def test_results_table_is_current():
    run = subprocess.run([sys.executable, str(ROOT / "tools" / "results_table.py"), "--check"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_chapter_is_listed_in_the_order_of_the_book():
    listed = re.findall(r"\(chapters/(\d\d\w+)\.py\)", TEXT)
    assert listed == sorted(path.stem for path in (ROOT / "chapters").glob("[0-9]*.py"))
    assert minicompile.CHAPTERS and re.findall(r"\| `(ch\d\d_\w+)` \|", TEXT) == minicompile.CHAPTERS


def test_links_and_named_files_exist():
    files = re.findall(r"\]\(([^)#]+)\)", README) + re.findall(r"`((?:[\w.]+/)*[\w-]+(?:\.(?:py|json|md)|/))`", TEXT)
    made = {"my/", "bench-results/", "result.json", "my/tiny.py", "train.py", "model.py"}
    missing = [f for f in files if f not in made and not (ROOT / f).exists() and not (ROOT / "minicompile" / f).exists()]
    assert len(files) > 20 and not missing


def test_python_is_called_in_one_way():
    assert "source .venv/bin/activate" in COMMANDS and ".venv/bin/python" not in README
    assert TEXT.index("source .venv/bin/activate") < TEXT.index("    python ")


@pytest.mark.parametrize("command", [c for c in COMMANDS if not c.startswith("source")])
def test_commands_exist(command):
    program, *words = command.split()
    if program == "make":
        assert all(re.search(rf"^{word}:", (ROOT / "Makefile").read_text(), re.M) for word in words)
    elif words[0] == "-m":
        importlib.import_module(words[1])
        shown = {"minicompile": "minicompile.__main__", "exercises": "exercises.__main__"}.get(words[1])
        if shown and len(words) > 2:
            names = {c.name or c.callback.__name__ for c in importlib.import_module(shown).app.registered_commands}
            assert words[2] in names
    else:
        assert (ROOT / words[0]).exists()


def test_the_explained_function_runs():
    """`explain FILE:FUNCTION "ARGUMENTS"` of the first screen names a function that takes these arguments."""
    from chapters import explored
    (call,) = set(re.findall(r'python -m minicompile expl(?:ain|ore) chapters/explored\.py:(\w+) "(.*)"', TEXT))
    result = eval(f"function({call[1]})", {"torch": torch, "function": getattr(explored, call[0])})
    assert result.shape == (2, 4, 64, 32)


def test_figures_in_the_text():
    from exercises.source import load_tasks
    from minicompile.bench.zoo.models import MODELS
    from tests.programs.training import OPTIMIZERS
    transformers, programs = (json.loads((ROOT / "results" / f"{n}.json").read_text()) for n in ("transformers", "random-programs"))
    track = [id for id in load_tasks() if id.startswith("tiny-")]
    assert track and f"the build track: {len(track)} exercises" in TEXT and f"exercises start {track[0]} " in TEXT
    assert f"runs {len(MODELS)} models" in TEXT
    assert f"{transformers['ok']} architectures" in TEXT and f"{transformers['one graph']} of them as one graph" in TEXT
    assert f"{programs['programs']:,} of them, which made {programs['graphs']:,} graphs" in TEXT and programs["differ"] == 0
    assert f"with {len(OPTIMIZERS)} make-ups of optimizers" in TEXT
    assert "Python 3.11 to 3.13" in TEXT and 'requires-python = ">=3.11,<3.14"' in (ROOT / "pyproject.toml").read_text()
