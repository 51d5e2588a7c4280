"""The zoo's `report.html`: totals, plots and every row."""
from __future__ import annotations

import pathlib

import jinja2
import matplotlib.pyplot as plt

from ..report import COLORS, FIGURES, page, plot

PAGE = page("A zoo of models", """ body { max-width: 80rem; }
 th, td { vertical-align: top; }
 th { position: sticky; top: 0; background: #fff; }
 td.text, th.text { text-align: left; }
 tr.bad td { background: #fff1f0; }
""", """<p>{{ chosen }} models of Hugging Face transformers, timm, torchvision and plain PyTorch, with random weights. Each ran under each
compiler in a
process of its own with empty caches. <i>Over eager</i> is the geometric mean of eager's time over the compiled time, of the models
that pass;
a model is slower when its confidence interval lies below 0.97.</p>
<div class="scroll"><table>
<thead><tr>{% for name in totals[0] %}<th>{{ name.replace("_", " ") }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in totals %}<tr>{% for value in row.values() %}<td>{{ number(value) }}</td>{% endfor %}</tr>{% endfor %}</tbody>
</table></div>
{% for kind, found in against_torch.items() if found %}<p>{{ kind }}, the {{ found.models }} models that both compilers pass:
minicompile is
{{ number(found.speed) }} times as fast as torch.compile, and its cold compile takes {{ number(found.cold) }} of the time.
{% if found.slower %}Slower than torch.compile beyond doubt: {{ found.slower | join(", ") }}.{% endif %}</p>
{% endfor %}
""" + FIGURES + """<h2>Every model</h2>
<div class="scroll"><table>
<thead><tr><th class="text">model</th><th class="text">work</th><th class="text">compiler</th><th class="text">verdict</th>
<th>over eager</th>
<th>interval</th><th>ms</th><th>eager ms</th><th>compile s</th><th>MB</th><th>eager MB</th><th>graphs</th><th>breaks</th>
<th>distance</th><th class="text">remarks</th></tr></thead>
<tbody>
{% for r in results %}<tr{% if r.verdict not in ("pass", "not installed", "eager fails") %} class="bad"{% endif %}>
<td class="text">{{ r.model }}</td><td class="text">{{ r.work }} {{ r.dtype }}</td><td class="text">{{ r.compiler }}</td>
<td class="text">{{ r.verdict }}</td>
<td>{{ number(r.speed) }}</td><td>{% if r.speed is defined %}{{ number(r.speed_low) }}-{{ number(r.speed_high) }}{% endif %}</td>
<td>{{ number(r.ms) }}</td><td>{{ number(r.eager_ms) }}</td><td>{{ number(r.cold_seconds) }}</td><td>{{ number(r.memory_mb) }}</td>
<td>{{ number(r.eager_memory_mb) }}</td><td>{{ number(r.graphs) }}</td>
<td>{% if r.breaks is defined %}{{ r.breaks | length }}{% endif %}</td>
<td>{{ number(r.distance) }}</td>
<td class="text">{{ r.error or (r.worst if r.verdict == "wrong") or (r.breaks or []) | join("; ") }}</td></tr>
{% endfor %}</tbody>
</table></div>
<p>Distance: how far the outputs, the loss, every gradient and buffer are from a reference in float64, at the first and at repeated
calls with
changing batch sizes, as a part of what is allowed: four times eager's own error and a floor.</p>
""", "; {{ devices }} devices, {{ jobs }} processes on each, one timed at a time")


def number(value) -> str:
    """A cell: three digits that count."""
    if value is None or isinstance(value, jinja2.Undefined):
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def sorted_figure(rows: list[dict], value, title: str, mark: float | None):
    """One line per compiler: the models' values, sorted, on a logarithmic axis."""
    kinds = sorted({(r["work"], r["dtype"]) for r in rows})
    figure, (axes,) = plt.subplots(1, len(kinds), figsize=(10, 3.6), squeeze=False, layout="constrained")
    for ax, kind in zip(axes, kinds):
        for compiler in sorted({r["compiler"] for r in rows}):
            values = sorted(value(r) for r in rows if (r["work"], r["dtype"], r["compiler"]) == (*kind, compiler))
            ax.plot(range(1, len(values) + 1), values, label=compiler, color=COLORS[compiler.partition(":")[0]], marker=".", markersize=3)
        if mark:
            ax.axhline(mark, color="#8a8f98", linewidth=0.8)
        ax.set(title=" ".join(kind), xlabel="models, sorted", ylabel=title, yscale="log")
        ax.legend(frameon=False, fontsize=8)
    return figure


def write_report(record: dict, folder: pathlib.Path) -> pathlib.Path:
    """Write the plots and the page to `folder`; returns the page's path."""
    plots, passed = [], [r for r in record["results"] if r["verdict"] == "pass"]
    timed = [r for r in passed if "speed" in r]
    for name, rows, value, alt, mark in (
            ("speed", timed, lambda r: r["speed"], "Times as fast as eager", 1.0),
            ("compile", passed, lambda r: r["cold_seconds"], "Cold compile, seconds, to the end of the second step", None),
            ("memory", timed, lambda r: r["memory_mb"] / r["eager_memory_mb"], "Peak memory, of eager's", 1.0)):
        if rows:
            plots.append(plot(sorted_figure(rows, value, alt, mark), folder / f"{name}.png", alt))
    path = folder / "report.html"
    rows = sorted(record["results"], key=lambda r: (r["verdict"] == "pass", r["model"], r["work"], r["compiler"]))
    path.write_text(PAGE.render(record | {"results": rows}, totals=record["summary"], plots=plots, number=number))
    return path
