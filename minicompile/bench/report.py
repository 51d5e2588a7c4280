"""`report.html`: one self-contained page with the table, the plots and how to repeat it."""

from __future__ import annotations

import base64
import pathlib

import jinja2
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .run import HEADER, label, rows

COLORS = {"eager": "#8a8f98", "minicompile": "#2563eb", "torch": "#ea7317"}

PAGE = jinja2.Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ benchmark }}: training speed</title>
<style>
 body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1f2328; background: #fff; }
 table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .9rem; }
 th, td { padding: .35rem .6rem; border-bottom: 1px solid #d8dee4; text-align: right; white-space: nowrap; }
 th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
 .scroll { overflow-x: auto; } img { max-width: 100%; height: auto; } code { background: #f3f4f6; padding: .1rem .3rem; overflow-wrap: anywhere; }
 dt { font-weight: 600; } figure { margin: 1.5rem 0; } figcaption { color: #57606a; font-size: .9rem; }
</style></head><body>
<h1>{{ benchmark }}: training speed</h1>
<p>Each compiler trained in a process of its own with empty caches, one after the other, on the same batches from the same initial weights.</p>
<div class="scroll"><table><thead><tr>{% for h in header %}<th>{{ h }}</th>{% endfor %}</tr></thead><tbody>
{% for row in table %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}</tbody></table></div>
{% for plot in plots %}<figure><img alt="{{ plot.alt }}" src="data:image/png;base64,{{ plot.data }}"><figcaption>{{ plot.alt }}</figcaption></figure>{% endfor %}
<h2>How it was measured</h2>
<dl><dt>Command</dt><dd><code>{{ command }}</code></dd><dt>Commit</dt><dd>{{ commit }}</dd>
<dt>Hardware</dt><dd>{{ hardware.gpu or "no GPU" }}; {{ hardware.cpu }}, {{ hardware.cores }} cores</dd>
<dt>Versions</dt><dd>{% for k, v in versions.items() %}{{ k }} {{ v }}{{ ", " if not loop.last }}{% endfor %}</dd><dt>Date</dt><dd>{{ date }}</dd></dl>
<p>A time is the median of whole training steps after the first ones, with the range from the 10th to the 90th percentile. Cold compile is from the first call to the
end of the second step. The loss difference is the largest over the run, against eager; compilers that draw dropout masks from a different random stream differ by more than rounding.</p>
</body></html>""")

def _color(compiler: str):
    return COLORS[compiler.partition(":")[0]]


def _bars(ax, results, value, title, unit):
    names = [f"{r['task']['compiler']}\n{label(r['task'])}" for r in results]
    bars = ax.bar(names, [value(r) for r in results], color=[_color(r["task"]["compiler"]) for r in results])
    ax.bar_label(bars, fmt="%.1f", fontsize=8)
    ax.set_title(title), ax.set_ylabel(unit)
    ax.tick_params(axis="x", labelsize=7, rotation=30 if len(names) > 4 else 0)
    ax.spines[["top", "right"]].set_visible(False)


def write_report(record: dict, folder: pathlib.Path) -> pathlib.Path:
    """Write the plots and the page to `folder`; returns the page's path."""
    good = [r for r in record["results"] if "error" not in r]
    plots = []

    def save(fig, name, alt):
        fig.tight_layout()
        fig.savefig(folder / f"{name}.png", dpi=130)
        plt.close(fig)
        plots.append({"alt": alt, "data": base64.b64encode((folder / f"{name}.png").read_bytes()).decode()})

    if good:
        fig, ax = plt.subplots(figsize=(8, 4))
        for i, r in enumerate(good):
            ax.plot(range(1, len(r["losses"]) + 1), r["losses"], color=_color(r["task"]["compiler"]), alpha=0.8,
                    linestyle=["-", "--", ":", "-."][i % 4], linewidth=3 if i == 0 else 1.4, label=f"{r['task']['compiler']} {label(r['task'])}")
        ax.set_xlabel("step"), ax.set_ylabel("loss"), ax.legend(frameon=False, fontsize=8), ax.spines[["top", "right"]].set_visible(False)
        save(fig, "loss", "Loss curves, drawn on top of each other")
        fig, ax = plt.subplots(figsize=(8, 4))
        _bars(ax, good, lambda r: r["ms"], "Time per iteration (median)", "ms")
        save(fig, "time", "Milliseconds per training step, median")
        compiled = [r for r in good if r["task"]["compiler"] != "eager"]
        if compiled:
            fig, ax = plt.subplots(figsize=(8, 4))
            _bars(ax, compiled, lambda r: r["cold_seconds"], "Cold compile", "seconds")
            save(fig, "compile", "Seconds from the first call to the end of the second step, empty caches")
    page = folder / "report.html"
    page.write_text(PAGE.render(**{k: v for k, v in record.items() if k != "results"}, table=rows(record["results"]), header=HEADER,
                                plots=plots))
    return page
