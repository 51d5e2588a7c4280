"""The explorer: one page in which each line of each stage leads to what it was made from and to what became of it.

    minicompile.explain(f)(*args).explore("explore.html")
    python -m minicompile explore model.py:step "torch.randn(8, 64)"

`recording.py` collects the lines, `measure.py` runs and times them, `page.py` writes the HTML, which needs nothing
else: no network, no server.
"""
import pathlib

from .measure import Measured, check, measure
from .page import read_page, render
from .recording import PANES, Exploration, Item, collect


def explore(found, path="explore.html", *, against=None, measured: bool = True, checked: bool = True,
            title: str | None = None) -> pathlib.Path:
    """Write the page of an `Explanation`; returns its path.

    against: another one to be shown beside it, an `Explanation`, an `Exploration`, or the path of a page that was written
    earlier. measured: call it some more times, for times and bandwidth. checked: run every stage's result and compare it
    with eager. What these runs change is restored."""
    recording = recording_of(found, measured, checked, title)
    if against is not None and not isinstance(against, Exploration):
        against = recording_of(against, measured, checked, None) if hasattr(against, "graphs") else read_page(pathlib.Path(against))
    path = pathlib.Path(path)
    path.write_text(render(recording, against), encoding="utf-8")
    return path


def recording_of(found, measured: bool = True, checked: bool = True, title: str | None = None) -> Exploration:
    taken = None
    if found.call is not None and (measured or checked):
        checks = check(found) if checked else {}                  # forks, before anything starts threads here
        try:
            taken = measure(found) if measured else Measured()
        except Exception as error:                                # of the program, which may be meant to be called once
            taken = Measured(problem=f"calling it again raises {type(error).__name__}: {error}")
        taken.checks = checks
    recording = collect(found, taken)
    recording.title = title or recording.title
    return recording


__all__ = ["Item", "PANES", "Exploration", "check", "collect", "explore", "measure", "read_page", "recording_of", "render"]
