"""The frame of a script that took the most time in its compiled graphs: `python -m minicompile run --explore PAGE SCRIPT`."""
import contextlib
import pathlib

from ...ch04_breaks.resume import original_name
from ..findings import ANY, Findings, listening
from .measure import Measured, clocked, steps_of
from .page import render
from .recording import collect


@contextlib.contextmanager
def explored(path: str):
    """While the block runs, every graph's host program has clocks; afterwards the page of the slowest frame is written."""
    found, clocks = Findings("script"), {}
    try:
        with listening(found, ANY, clocked(clocks, most=300)):
            yield found
    finally:
        slowest = slowest_frame(found, clocks)
        if slowest is None:
            print(f"minicompile: {path} is not written: no compiled graph ran.")
        else:
            name, part, seconds, all_seconds = slowest
            measured = Measured(steps_of(part, clocks), device="cuda" if any(c.cuda for c in clocks.values()) else "cpu")
            recording = collect(part, measured)
            recording.title = name
            recording.summary["in the script"] = (f"{seconds:.3g} s in the graphs of this frame, of {all_seconds:.3g} s in all compiled "
                                                  f"graphs; {len({code for code, _ in found.frames})} frames were compiled")
            pathlib.Path(path).write_text(render(recording), encoding="utf-8")
            print(f"minicompile: {path} shows {name}, the slowest frame: {seconds:.3g} of {all_seconds:.3g} s in compiled graphs.")


def frame_key(code) -> tuple:
    """What the code of a function and that of its rests behind graph breaks share."""
    return code.co_filename, original_name(code)


def slowest_frame(found: Findings, clocks: dict) -> tuple | None:
    """(name, the `Findings` of this frame and what remains of it behind graph breaks, its seconds, all seconds)."""
    codes = {id(captured): code for code, captured in found.frames}
    parts, seconds = {}, {}
    for graph in found.graphs:
        code = codes[id(graph.captured)]
        frame = frame_key(code)
        parts.setdefault(frame, []).append(graph)
        seconds[frame] = seconds.get(frame, 0.0) + sum(clocks[id(data["compiled"])].total for kind, data in graph.told
                                                       if kind == "schedule" and id(data["compiled"]) in clocks)
    if not any(seconds.values()):
        return None
    frame = max(seconds, key=seconds.get)
    part = Findings(frame[1], parts[frame])
    part.frames = [(code, c) for code, c in found.frames if frame_key(code) == frame]
    names = {graph.frame for graph in parts[frame]}
    part.breaks = [b for b in found.breaks if b.frame in names]
    part.guards = [g for g in found.guards if g.frame in names]
    return frame[1], part, seconds[frame], sum(seconds.values())
