"""The README shows exactly the committed results."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def test_results_table_is_current():
    run = subprocess.run([sys.executable, str(ROOT / "tools" / "results_table.py"), "--check"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_chapter_is_listed():
    import minicompile
    text = (ROOT / "README.md").read_text()
    assert minicompile.CHAPTERS and all(f"`{chapter}`" in text for chapter in minicompile.CHAPTERS)
