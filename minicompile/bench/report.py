"""`report.html`: one self-contained page with the table, the plots and how to repeat it."""

from __future__ import annotations

import base64
import pathlib

import jinja2
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

from .table import HEADER, label, rows
from .worker import settings_of

COLORS = {"eager": "#8a8f98", "minicompile": "#2563eb", "torch": "#ea7317"}
STYLES = {"reduce-overhead": "--", "max-autotune": ":", "max-autotune-no-cudagraphs": "-."}
MARKERS = {"": None, "optimizer": "o", "step": "s"}         # what is compiled besides the model

FIGURES = """{% for plot in plots %}<figure>
<img alt="{{ plot.alt }}" src="data:image/png;base64,{{ plot.data }}">
<figcaption>{{ plot.alt }}</figcaption>
</figure>
{% endfor %}"""


def page(title: str, style: str, body: str, devices: str = "") -> jinja2.Template:
    """A report as a template. style: its own rules; devices: what its hardware has besides."""
    return jinja2.Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>""" + title + """</title>
<style>
 body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; padding: 0 1rem; color: #1f2328; background: #fff; }
 p, dl { max-width: 46rem; }
 table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
 th, td { padding: .35rem .5rem; border-bottom: 1px solid #d8dee4; text-align: right; }
 th { border-bottom: 2px solid #8a8f98; line-height: 1.25; }
 .scroll { overflow-x: auto; }
 figcaption { color: #57606a; font-size: .9rem; }
 img { max-width: 100%; height: auto; }
 code { background: #f3f4f6; padding: .1rem .3rem; overflow-wrap: anywhere; }
 dt { font-weight: 600; }
 dd { margin: 0 0 .5rem 0; }
""" + style + """</style>
</head>
<body>
<h1>""" + title + """</h1>
""" + body + """<h2>How it was measured</h2>
<dl>
<dt>Command</dt><dd><code>{{ command }}</code></dd>
<dt>Commit</dt><dd>{{ commit }}</dd>
<dt>Hardware</dt><dd>{{ hardware.gpu or "no GPU" }}; {{ hardware.cpu }}, {{ hardware.cores }} cores""" + devices + """</dd>
<dt>Versions</dt>
<dd>{% for name, v in versions.items() %}{{ name }} {{ v }}{{ ", " if not loop.last }}{% endfor %}</dd>
<dt>Date</dt><dd>{{ date }}</dd>
</dl>
</body>
</html>
""", autoescape=True)


PAGE = page("{{ benchmark }}: training speed", """ body { max-width: 70rem; }
 table { width: 100%; }
 th, td { white-space: nowrap; }
 th { vertical-align: bottom; white-space: normal; }
 th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
 tr.group td { border-top: 2px solid #d8dee4; }
 figure { margin: 1.5rem 0; }
""", """<p>Each compiler trained in a process of its own with empty caches, one after the other, on the same batches
from the same initial weights.</p>
<div class="scroll"><table>
<thead><tr>{% for name in header %}<th>{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in table %}<tr{% if not loop.first and loop.changed(row[0]) %} class="group"{% endif %}>
{%- for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody>
</table></div>
<p>A time is the median of whole training steps after the first ones, with the range from the 10th to the 90th
percentile. <i>vs torch</i> compares with torch.compile in the same mode; where the whole step or the optimizer is compiled, too, with
its fastest run. MFU is the model's floating-point
operations a second over the GPU's peak. Cold compile is the time from the first call to the end of the second
step. The loss difference is the largest over the run, against eager; a compiler that draws dropout masks from
another random stream differs by more than rounding.</p>
""" + FIGURES)


def _panels(groups: dict, height: float, rows: int = 1):
    """A figure with a column of axes for each group of runs."""
    return plt.subplots(rows, len(groups), figsize=(10, height), squeeze=False, layout="constrained",
                        sharex="col" if rows > 1 else False)


def loss_figure(groups: dict[str, list[dict]]):
    """Loss curves, and under them the differences to eager, which are too small to see in the curves."""
    figure, (above, below) = _panels(groups, 5.5, rows=2)
    for column, (name, runs) in enumerate(groups.items()):
        curves, differences = above[column], below[column]
        reference = next((r["losses"] for r in runs if r["task"]["compiler"] == "eager"), None)
        for rank, r in enumerate(runs):
            compiler, mode, extent = settings_of(r["task"]["compiler"])
            steps = range(1, len(r["losses"]) + 1)
            # Each line is thinner than those under it, so that all show where they coincide.
            look = dict(color=COLORS[compiler], linestyle=STYLES.get(mode, "-"),
                        marker=MARKERS[extent], markersize=3, markevery=0.1,
                        linewidth=6.2 - 5 * rank / max(len(runs) - 1, 1))
            curves.plot(steps, r["losses"], label=r["task"]["compiler"], **look)
            if reference and compiler != "eager":
                distance = [abs(a - b) or None for a, b in zip(r["losses"], reference)]
                differences.plot(steps, distance, **look | dict(marker=MARKERS[extent] or ".", markevery=None))
        curves.set(title=name, ylabel="loss")
        curves.legend(frameon=False, fontsize=8)
        differences.set(yscale="log", xlabel="step", ylabel="difference to eager")
        differences.xaxis.set_major_locator(MaxNLocator(integer=True))
        differences.grid(axis="y", color="#e5e7eb")
    return figure


def bar_figure(groups: dict[str, list[dict]], figure_of, unit: str):
    """One bar a run, from top to bottom in the order they ran."""
    figure, (axes,) = _panels(groups, 0.9 + 0.42 * max(map(len, groups.values())))
    for ax, (name, runs) in zip(axes, groups.items()):
        names = [r["task"]["compiler"] for r in runs]
        colors = [COLORS[name.partition(":")[0]] for name in names]
        bars = ax.barh(names, [figure_of(r) for r in runs], color=colors)
        ax.bar_label(bars, fmt="%.1f", fontsize=9, padding=3)
        ax.invert_yaxis()
        ax.margins(x=0.12)
        ax.set(title=name, xlabel=unit)
    return figure


def plot(figure, path: pathlib.Path, alt: str) -> dict:
    """Write a figure, and give it as a page shows it."""
    for ax in figure.axes:
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return {"alt": alt, "data": base64.b64encode(path.read_bytes()).decode()}


def write_report(record: dict, folder: pathlib.Path) -> pathlib.Path:
    """Write the plots and the page to `folder`; returns the page's path."""
    groups: dict[str, list[dict]] = {}
    compiled: dict[str, list[dict]] = {}
    for r in record["results"]:
        if "error" not in r:
            groups.setdefault(label(r["task"]), []).append(r)
            if r["task"]["compiler"] != "eager":
                compiled.setdefault(label(r["task"]), []).append(r)
    plots = []
    if groups:
        plots = [plot(bar_figure(groups, lambda r: r["ms"], "milliseconds"), folder / "time.png", "Time of a training step, median"),
                 plot(loss_figure(groups), folder / "loss.png", "Loss curves, and how far each is from eager")]
    if compiled:
        plots.append(plot(bar_figure(compiled, lambda r: r["cold_seconds"], "seconds"), folder / "compile.png",
                          "Cold compile: from the first call to the end of the second step, empty caches"))
    path = folder / "report.html"
    path.write_text(PAGE.render(record, table=rows(record["results"]), header=HEADER, plots=plots))
    return path
