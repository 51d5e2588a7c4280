"""`minicompile.explain(f)(*args)`: what the compiler makes of one call, as data, as text, and as HTML in a
notebook.

It compiles f anew, apart from what is compiled already, runs it once, and listens to what the stages tell
(`logs.tell`). With `backend="eager"` it stops after capture: graphs, breaks and guards, without building
kernels.
"""
import html
import pathlib
import textwrap
import time

from .findings import Break, Findings, compile_alone, half_in_words, listening, summary


class Explanation(Findings):
    """What `explain` found; `print` it, or let a notebook show it; `explore()` writes all of it as a page."""

    def explore(self, path="explore.html", **how):
        """Write the page in which every line of every stage leads to those that it was made from (`minicompile.explore`);
        returns its path."""
        from .explore import explore
        return explore(self, path, **how)

    def __str__(self):
        return as_text(self)

    __repr__ = __str__

    def _repr_html_(self):
        return as_html(self)


def explain(function, **settings):
    """explain(f)(*args, **kwargs): compile f anew with these settings of `compile`, run it once, whatever the
    stance, and return an Explanation."""
    def run(*args, **kwargs):
        from .. import driver, frames, marks
        from ..api import compile
        from ..ch01_graphs.fake import load_meta_kernels
        from ..interrupts import as_compiler
        from ..stances import set_stance
        as_compiler(load_meta_kernels)     # seconds of imports that a process needs once; they are no part of this call
        target = marks.uncompiled(function)
        found = Explanation(getattr(target, "__qualname__", None) or type(target).__name__)
        found.call = target, args, kwargs, settings
        compiled, context = compile_alone(compile, target, settings)
        before, start = dict(driver.counters.seconds), time.perf_counter()
        with listening(found, context) as states:
            try:
                with set_stance():
                    compiled(*args, **kwargs)
            finally:
                for state in states:   # nothing of this stays behind
                    frames.forget(state)
        point_to_causes(found.breaks)
        found.seconds = stage_times(before, driver.counters.seconds)
        found.seconds["call"] = time.perf_counter() - start
        return found
    return run


def point_to_causes(breaks: list[Break]) -> None:
    """A break in a callee is found twice: by the caller, whose graph ends at the call, and by the callee
    itself."""
    for b in breaks:
        for n, other in enumerate(breaks, 1):
            if other.where == b.where and len(other.chain) < len(b.chain):
                b.advice = f"The function called here breaks (graph break {n}): mend that one."


def stage_times(before: dict, after: dict) -> dict[str, float]:
    took = {stage: t - before.get(stage, 0.0) for stage, t in after.items() if t > before.get(stage, 0.0)}
    lower = sum(took.get(s, 0.0) for s in ("lower", "fuse", "emit"))
    if "total" in took:                # of everything below capture
        took["differentiate"] = max(took.pop("total") - lower, 0.0)
    order = ("capture", "differentiate", "lower", "fuse", "emit")
    return {s: took[s] for s in (*order, *took) if s in took}


def times_in_words(seconds: dict) -> str:
    return ", ".join(f"{'in all, with compilers of kernels and the first run,' if stage == 'call' else stage} {1000 * t:,.0f} ms"
                     for stage, t in seconds.items())


def by_frame(items) -> dict:
    grouped = {}
    for item in items:
        grouped.setdefault(item.frame, []).append(item)
    return grouped


# ---- text ------------------------------------------------------------------------------------------------

def as_text(e: Explanation) -> str:
    lines = [f"{e.name}: {summary(e)}"]
    for n, graph in enumerate(e.graphs, 1):
        lines += ["", f"Graph {n}: {graph.frame}"]
        width = min(max((len(o.call) for o in graph.operations), default=0), 50)
        last = None
        for o in graph.operations:
            comment = f"# {o.where}: {o.source}" if (o.where, o.source) != last else ""
            last = o.where, o.source
            lines.append(f"  {o.call:{width}}  {o.result:14}  {comment}".rstrip())
        for half in graph.halves:
            lines += pointed(half_in_words(half))
            lines += [f"       {name}" for name in half.kernels]
        if graph.as_captured:
            lines += pointed(f"runs as captured, because {graph.as_captured}")
    for n, b in enumerate(e.breaks, 1):
        lines += ["", f"Graph break {n}: {b.reason}", f"  {b.where}"]
        lines += [f"    {line}" for line in (b.source, b.caret) if line]
        lines += [f"  called from {line}" for line in reversed(b.chain)]
        lines += pointed(b.advice)
    for s in e.skipped:
        lines += ["", f"Runs as it is: {s.frame}", f"  {s.reason}", f"  -> {s.advice}"]
    for r in e.recompiles:
        lines += ["", f"Version {r.version} of {r.frame}", f"  because {r.why}", f"  -> {r.advice}"]
    for frame, facts in by_frame(e.guards).items():
        lines += ["", f"Guards of {frame}"]
        lines += [f"  {f.text}" + (f"  # {f.where}" if f.where else "") for f in facts]
    if e.operators:
        lines += ["", "Operators: " + ", ".join(f"{name} {n}" for name, n in e.operators.most_common())]
    if e.seconds:
        lines += ["Times: " + times_in_words(e.seconds)]
    return "\n".join(lines)


def pointed(text: str) -> list[str]:
    """Lines of a text behind an arrow."""
    return textwrap.wrap(text, 110, initial_indent="  -> ", subsequent_indent="     ")


# ---- HTML ------------------------------------------------------------------------------------------------
# Colours are the notebook's own (inherited text, translucent greys), so that light and dark themes both work.

TEMPLATE = pathlib.Path(__file__).with_suffix(".html")


def as_html(e: Explanation) -> str:
    try:
        import jinja2
    except ImportError:
        return f"<pre>{html.escape(as_text(e))}</pre>"
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(e=e, summary=summary, times=times_in_words, half=half_in_words, by_frame=by_frame)
