"""What the chapters share: the running example, a way to watch the compiler at work, and pictures.

Pictures are inline SVG. They take their ink from the page (`currentColor`), so they are readable on light
and on dark; each carries its text alternative, which is also what a terminal shows.

    python chapters/_lib.py chapters/03_capture.py      # run one chapter, printing what its cells show
"""

from __future__ import annotations

import ast
import contextlib
import html
import json
import math
import re
import sys
import time
import types
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import minicompile  # noqa: E402

torch.set_num_threads(1)  # the times on the pages are those of one core
minicompile.config.raise_on_internal_error = True  # a bug must not hide behind the fallback in a book


# ---- the running example -------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).split(width, dim=2)
        q, k, v = [
            t.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v)
        ]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """One block of a small GPT: [batch, length, width] -> the same."""

    def __init__(self, width=64, heads=4):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def example(batch=4, length=32, width=64):
    """A block and an input for it, the same numbers each time."""
    torch.manual_seed(0)
    return Block(width), torch.randn(batch, length, width)


# ---- watching the compiler -----------------------------------------------------------------------


@dataclass
class Watched:
    """What the stages told while something ran."""

    captured: list = field(default_factory=list)  # ch03 Captured, one per frame
    graphs: list = field(default_factory=list)  # captured fx graphs
    halves: list = field(default_factory=list)  # dicts which, program, schedule, compiled
    recompiles: list = field(default_factory=list)  # dicts version, why
    states: list = field(default_factory=list)  # one per compiled code object, with its entries
    result: object = None

    def entry_text(self, frame=0, entry=0):
        """The generated Python function of a frame: guards and body."""
        return self.states[frame].cache.entries[entry].function.source_text

    def half(self, which="forward"):
        return next(h for h in self.halves if h["which"] == which)


@contextlib.contextmanager
def watching():
    """Yields a `Watched` that fills while the block runs."""
    from minicompile import logs

    found = Watched()

    def watch(kind, **data):
        if data.get("state") is not None and data["state"] not in found.states:
            found.states.append(data["state"])
        if kind in ("captured", "graph"):
            (found.captured if kind == "captured" else found.graphs).append(
                data["captured"] if kind == "captured" else data["captured"].gm
            )
        elif kind == "schedule":
            found.halves.append(data)
        elif kind == "recompile":
            found.recompiles.append(data)

    logs.watchers.append(watch)
    try:
        yield found
    finally:
        logs.watchers.remove(watch)


def watch(function, *args, **settings):
    """Compile `function` anew with these settings, call it once, and tell what happened."""
    minicompile.reset()
    with watching() as found:
        found.result = minicompile.compile(function, **settings)(*args)
    return found


def check_of(captured, function):
    """The generated guard check of a captured frame: check(function, *arguments) -> inputs of the graph, or None."""
    from minicompile.ch02_guards.codegen import build_check

    return build_check(captured.guards, captured.inputs, function.__code__, captured.constants)


def best_time(function, *args, repeat=30):
    """Seconds of the fastest of `repeat` calls, after two that are not counted."""
    function(*args), function(*args)
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        function(*args)
        times.append(time.perf_counter() - start)
    return min(times)


def tidy(text):
    """Generated code names the user's file; here its folder does not matter."""
    return re.sub(r"(?:/[\w.+-]+)+/(?=[\w.-]+\.py:\d)", "", text)


def head(text, lines=40):
    """Print the first lines of a long listing, and say how many there are."""
    all_lines = tidy(text).strip("\n").splitlines()
    print("\n".join(all_lines[:lines]))
    if len(all_lines) > lines:
        print(f"... {len(all_lines) - lines} more lines")


def folded(code, width=100):
    """Generated Python with the long conditions broken before each `and`, and where that is not enough before each `or`."""
    lines = code.splitlines()
    for word in (" and ", " or "):
        lines = [part for line in lines for part in (
            [line] if len(line) <= width else
            line.replace(word, "\n" + " " * (len(line) - len(line.lstrip()) + 8) + word.lstrip()).splitlines())]
    return "\n".join(lines)


def size(number):
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} GB"


def results(name):
    """A committed measurement: `results/NAME.json`."""
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def measured(name, dtype="bf16"):
    """The training runs of `results/NAME.json`: {compiler and mode: row}."""
    return {r["task"]["compiler"]: r for r in results(name)["results"] if r["task"]["dtype"] == dtype}


# ---- pictures ------------------------------------------------------------------------------------

BLUE, ORANGE, GREEN, RED, GREY = "#3f7fbf", "#d0772a", "#3f9a5f", "#c9504e", "#8a8a8a"
COLOURS = {"input": GREY, "compute": BLUE, "library": ORANGE, "saved": GREEN, "bad": RED, "plain": GREY}


class Picture:
    """An SVG with a text alternative and, optionally, a caption."""

    def __init__(self, body, width, height, alt, caption="", shrinks=0.85):
        """shrinks: how far it may shrink on a narrow screen before it scrolls; its smallest text is still to be read."""
        self.alt, self.caption = " ".join(alt.split()), caption
        name = "p" + format(abs(hash(body)) % 16**8, "x")
        self.svg = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'role="img" aria-labelledby="{name}" style="min-width:{shrinks * width:g}px;max-width:100%;height:auto" '
            f'font-family="system-ui, sans-serif" font-size="12" fill="currentColor">'
            f'<title id="{name}">{html.escape(self.alt)}</title>{body}</svg>'
        )

    def _repr_html_(self):
        caption = f"<figcaption>{html.escape(self.caption)}</figcaption>" if self.caption else ""
        return f'<figure class="mc-figure">{self.svg}{caption}</figure>'

    def __repr__(self):
        return f"[picture: {self.alt}]"


class Table:
    """Rows under a header, as HTML and as text."""

    def __init__(self, header, rows, caption=""):
        self.header, self.rows, self.caption = header, [[str(c) for c in row] for row in rows], caption

    def _repr_html_(self):
        def cells(row, tag):
            return (
                "<tr>"
                + "".join(
                    (
                        f'<th scope="col">{html.escape(c)}</th>'
                        if tag == "th" and c
                        else f"<td>{html.escape(c)}</td>"
                    )
                    for c in row
                )
                + "</tr>"
            )

        caption = f"<caption>{html.escape(self.caption)}</caption>" if self.caption else ""
        return (
            f"<table>{caption}<thead>{cells(self.header, 'th')}</thead>"
            f"<tbody>{''.join(cells(row, 'td') for row in self.rows)}</tbody></table>"
        )

    def __repr__(self):
        rows = [self.header, *self.rows]
        widths = [max(len(row[i]) for row in rows) for i in range(len(self.header))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in rows]
        return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def text_at(x, y, text, anchor="start", **style):
    extra = "".join(f' {k.replace("_", "-")}="{v}"' for k, v in style.items())
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{extra}>{html.escape(str(text))}</text>'


def box(x, y, w, h, label, colour=BLUE, note=""):
    middle = y + h / 2 + (4 if not note else -2)
    out = (
        f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="5" fill="{colour}" fill-opacity="0.16" '
        f'stroke="{colour}" stroke-width="1.4"/>' + text_at(x + w / 2, middle, label, "middle")
    )
    return out + (
        text_at(x + w / 2, middle + 14, note, "middle", font_size=10.5, opacity=0.75) if note else ""
    )


def arrow(x1, y1, x2, y2, dashed=False):
    angle = math.atan2(y2 - y1, x2 - x1)
    tips = [(x2 - 7 * math.cos(angle + d), y2 - 7 * math.sin(angle + d)) for d in (0.42, -0.42)]
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    points = f"{tips[0][0]:.1f},{tips[0][1]:.1f} {x2:.1f},{y2:.1f} {tips[1][0]:.1f},{tips[1][1]:.1f}"
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="currentColor" '
        f'stroke-opacity="0.65"{dash}/><polygon points="{points}" fill="currentColor" fill-opacity="0.65"/>'
    )


def row_of_boxes(boxes, alt, caption="", per_row=5):
    """Boxes in reading order joined by arrows. boxes: (label, note, kind)."""
    w, h, gap = 128, 46, 26
    body, columns = [], min(per_row, len(boxes))
    for n, (label, note, kind) in enumerate(boxes):
        row, column = divmod(n, per_row)
        x, y = 4 + column * (w + gap), 4 + row * (h + 30)
        body.append(box(x, y, w, h, label, COLOURS[kind], note))
        if n and column:
            body.append(arrow(x - gap + 2, y + h / 2, x - 2, y + h / 2))
        elif n:
            far, middle = 4 + (columns - 1) * (w + gap) + w / 2, y - 15
            body.append(
                f'<path d="M{far} {y - 30}V{middle}H{x + w / 2}" fill="none" stroke="currentColor" stroke-opacity="0.65"/>'
            )
            body.append(arrow(x + w / 2, middle, x + w / 2, y - 1))
    rows = math.ceil(len(boxes) / per_row)
    return Picture("".join(body), 8 + columns * (w + gap) - gap, 8 + rows * (h + 30) - 30, alt, caption)


def layers_of(nodes, edges):
    """Longest-path layering: node -> depth."""
    depth = dict.fromkeys(nodes, 0)
    for _ in nodes:
        for a, b in edges:
            depth[b] = max(depth[b], depth[a] + 1)
    return depth


def shortened(text, length):
    """The beginning of a text, cut behind a word if there is one."""
    if len(text) <= length:
        return text
    whole = re.match(rf"(.{{{length // 2},{length - 1}}})(?=\W)(?<!\W)", text, re.S)
    return (whole[1] if whole else text[: length - 1]) + "\u2026"


def drawing(nodes, edges, alt, caption="", marked=(), width=150):
    """A small directed graph, top to bottom. nodes: {name: (label, note, kind)}; edges: (from, to); marked:
    edges drawn dashed. Edges that skip a row go around the boxes between."""
    depth, h, gap, margin = layers_of(list(nodes), edges), 42, 30, 62
    rows: dict[int, list] = {}
    for name in nodes:
        rows.setdefault(depth[name], []).append(name)
    wide = max(map(len, rows.values()))
    total = wide * (width + 18) - 18
    place = {}
    for d, names in rows.items():
        order = sorted(
            names,
            key=lambda n: sum(place[a][0] for a, b in edges if b == n and a in place)
            / max(1, sum(b == n and a in place for a, b in edges)),
        )
        left = margin + (total - (len(names) * (width + 18) - 18)) / 2
        for i, name in enumerate(order):
            place[name] = (left + i * (width + 18), 4 + d * (h + gap))
    body, used = [], {-1: 0, 1: 0}
    for a, b in edges:
        (xa, ya), (xb, yb) = place[a], place[b]
        if depth[b] - depth[a] == 1:
            body.append(arrow(xa + width / 2, ya + h + 1, xb + width / 2, yb - 1, (a, b) in marked))
            continue
        between = [place[n][0] for d in range(depth[a], depth[b] + 1) for n in rows[d]]
        left, right = min(between), max(between) + width
        side = -1 if (xa - left) + (xb - left) <= (right - xa - width) + (right - xb - width) else 1
        used[side] += 1
        way = (left if side < 0 else right) + side * (8 + 7 * min(used[side], 7))
        dash = ' stroke-dasharray="4 3"' if (a, b) in marked else ""
        body.append(
            f'<path d="M{xa + width / 2 + 12 * side:.1f} {ya + h + 1:.1f}V{ya + h + gap * 0.35:.1f}H{way:.1f}V{yb - gap * 0.6:.1f}'
            f'H{xb + width / 2 + 12 * side:.1f}" fill="none" stroke="currentColor" stroke-opacity="0.65"{dash}/>'
        )
        body.append(arrow(xb + width / 2 + 12 * side, yb - gap * 0.6, xb + width / 2 + 12 * side, yb - 1))
    body += [
        box(*place[n], width, h, label, COLOURS[kind], note) for n, (label, note, kind) in nodes.items()
    ]
    return Picture("".join(body), total + 2 * margin, 8 + len(rows) * (h + gap) - gap, alt, caption)


class Bars:
    """Horizontal bars in HTML: on a narrow screen a label stands above its bar."""

    def __init__(self, rows, alt, caption):
        """rows: (label, share of the longest, colour, value as text)."""
        self.rows, self.caption = rows, caption
        self.alt = " ".join(f"{alt} {'; '.join(f'{label}: {value}' for label, _, _, value in rows)}.".split())

    def _repr_html_(self):
        room, wide = 0.56 * max(len(r[3]) for r in self.rows) + 1, 0.52 * max(len(r[0]) for r in self.rows) + 1
        body = "".join(
            f'<div style="display:flex;flex-wrap:wrap;gap:0 1em;margin:.25em 0"><span style="flex:0 0 '
            f'{wide:.1f}em">{html.escape(label)}</span>'
            f'<span style="flex:1 1 14em;display:flex;align-items:center;gap:.5em;padding-right:{room:.1f}em;white-space:nowrap">'
            f'<span style="flex:none;height:1.2em;border-radius:2px;width:{max(share, 0.003):.1%};background:{colour}"></span>'
            f'{html.escape(value)}</span></div>'
            for label, share, colour, value in self.rows
        )
        caption = f"<figcaption>{html.escape(self.caption)}</figcaption>" if self.caption else ""
        return (
            f'<figure class="mc-figure" style="text-align:left;width:auto"><div role="img" aria-label="{html.escape(self.alt)}" '
            f'style="max-width:44em;font:13px/1.5 system-ui,sans-serif">{body}</div>{caption}</figure>'
        )

    def __repr__(self):
        return f"[picture: {self.alt}]"


def bars(rows, unit="", alt="", caption="", form="{:,.3g}"):
    """Horizontal bars. rows: (label, value) or (label, value, kind)."""
    top = max(r[1] for r in rows) or 1
    return Bars(
        [(r[0], r[1] / top, COLOURS[r[2]] if len(r) > 2 else BLUE, f"{form.format(r[1])} {unit}".strip()) for r in rows],
        alt,
        caption,
    )


def timeline(spans, steps, alt, caption="", step_name="step"):
    """Lifetimes. spans: (name, first step, last step, note); steps: how many there are."""
    left, cell = 20 + 6.6 * max(len(s[0]) for s in spans), max(14, min(48, 520 // steps))
    body = []
    for k in range(steps):
        if steps <= 24 or k % 5 == 0:
            body.append(text_at(left + k * cell + cell / 2, 12, k, "middle", font_size=10, opacity=0.7))
    body.append(text_at(left - 6, 12, step_name, "end", font_size=10, opacity=0.7))
    for n, (name, first, last, note) in enumerate(spans):
        y = 20 + n * 20
        body.append(text_at(left - 6, y + 12, name, "end"))
        body.append(
            f'<rect x="{left + first * cell + 1:g}" y="{y}" width="{(last - first + 1) * cell - 2:g}" height="15" '
            f'rx="2" fill="{BLUE}" fill-opacity="0.55"/>'
        )
        body.append(text_at(left + (last + 1) * cell + 4, y + 12, note, font_size=10.5, opacity=0.8))
    said = "; ".join(f"{name} lives from {step_name} {a} to {b}" for name, a, b, _ in spans)
    return Picture("".join(body), left + steps * cell + 80, 26 + len(spans) * 20, f"{alt} {said}.", caption)


def lines(series, x_label, y_label, alt, caption="", log_y=False):
    """Curves with markers. series: {name: [(x, y), ...]}. The name stands at the end of its curve."""
    width, height, left, bottom = 460, 230, 58, 40
    points = [p for curve in series.values() for p in curve]
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    low, high = (min(ys) if log_y else 0), max(ys)
    scale = (
        (lambda y: (math.log(y) - math.log(low)) / ((math.log(high) - math.log(low)) or 1))
        if log_y
        else (lambda y: y / (high or 1))
    )

    def at(x, y):
        return (
            left + (width - left - 110) * (x - min(xs)) / ((max(xs) - min(xs)) or 1),
            height - bottom - (height - bottom - 28) * scale(y),
        )

    body = [
        f'<path d="M{left} 10V{height - bottom}H{width - 100}" stroke="currentColor" stroke-opacity="0.5" fill="none"/>',
        text_at((left + width - 110) / 2, height - 6, x_label, "middle"),
        text_at(4, 10, f"{y_label}, logarithmic" if log_y else y_label, font_size=11),
    ]
    for x in sorted(set(xs)):
        body.append(
            text_at(at(x, high)[0], height - bottom + 15, f"{x:g}", "middle", font_size=10, opacity=0.75)
        )
    for y in (low, high):
        body.append(
            text_at(left - 5, at(min(xs), y)[1] + 4, f"{y:,.0f}" if y >= 100 else f"{y:.3g}", "end", font_size=10, opacity=0.75)
        )
    for (name, curve), colour in zip(series.items(), (BLUE, ORANGE, GREEN, RED)):
        spots = [at(*p) for p in curve]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in spots)
        body.append(f'<path d="{path}" stroke="{colour}" stroke-width="2" fill="none"/>')
        body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in spots]
        body.append(text_at(spots[-1][0] + 7, spots[-1][1] + 4, name))
    said = ". ".join(
        f"{name}: " + ", ".join(f"{y:,.3g} at {x:g}" for x, y in c) for name, c in series.items()
    )
    return Picture("".join(body), width + 40, height, f"{alt} {said}.", caption)


class Listings:
    """Listings beside each other, below each other on a narrow screen. parts: (title, text)."""

    def __init__(self, parts):
        self.parts = [(title, tidy(text)) for title, text in parts]

    def _repr_html_(self):
        wide = min(60, 2 + 0.5 * max(len(line) for _, text in self.parts for line in text.splitlines()))
        cells = "".join(
            f'<div style="flex:1 1 {wide:g}em;min-width:0"><p><strong>{html.escape(t)}</strong></p>'
            f'<pre class="mc-out" tabindex="0" style="overflow-x:auto"><code>{html.escape(c.strip(chr(10)))}</code></pre></div>'
            for t, c in self.parts
        )
        return f'<div style="display:flex;flex-wrap:wrap;gap:1em">{cells}</div>'

    def __repr__(self):
        return "\n\n".join(f"--- {t}\n{c.rstrip()}" for t, c in self.parts)


class Walk:
    """Frames to step through, one below the other in print. frames: (sentence, with `code` in it, something that is shown)."""

    def __init__(self, title, frames):
        self.title, self.frames = title, frames

    def _repr_html_(self):
        def shown(thing):
            made = getattr(thing, "_repr_html_", None)
            return made() if made else f'<pre tabindex="0"><code>{html.escape(str(thing))}</code></pre>'

        def said(text):
            return re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(text))

        frames = "".join(f"<li><p>{said(text)}</p>{shown(thing)}</li>" for text, thing in self.frames)
        return (
            f'<section class="mc-walk" aria-label="{html.escape(self.title)}"><div class="mc-buttons" role="group" aria-label="Frames" '
            f'hidden>'
            f'<button type="button" data-go="back">Back</button><button type="button" data-go="on">Next</button><label>Frame '
            f'<input type="range" min="0" max="{len(self.frames) - 1}" value="0"></label><output aria-live="polite"></output></div>'
            f"<ol>{frames}</ol></section>"
        )

    def __repr__(self):
        return f"{self.title}\n" + "\n".join(f"{n}. {text}\n{thing}" for n, (text, thing) in enumerate(self.frames, 1))


def pipes(places, edges, alt, caption="", inside=(), width=620, radius=17, notes=None):
    """A network with straight edges. places: {name: (x, y)}; edges: (from, to, label, kind), where kind is "plain", "path" (thick) or
    "full" (dashed); inside: names that are tinted, one side of a cut; notes: {name: what stands below it}."""
    look = {"plain": ("currentColor", 1.4, ""), "path": (ORANGE, 3, ""), "full": (RED, 1.6, ' stroke-dasharray="5 3"')}
    body = []
    for a, b, label, kind in edges:
        (xa, ya), (xb, yb) = places[a], places[b]
        far, (colour, wide, dash) = math.hypot(xb - xa, yb - ya), look[kind]
        ux, uy = (xb - xa) / far, (yb - ya) / far
        x1, y1, x2, y2 = xa + radius * ux, ya + radius * uy, xb - (radius + 2) * ux, yb - (radius + 2) * uy
        tips = [(x2 - 8 * (ux * c - uy * s), y2 - 8 * (uy * c + ux * s)) for c, s in ((0.91, 0.41), (0.91, -0.41))]
        points = f"{tips[0][0]:.1f},{tips[0][1]:.1f} {x2:.1f},{y2:.1f} {tips[1][0]:.1f},{tips[1][1]:.1f}"
        body.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{wide}"{dash}/>'
            f'<polygon points="{points}" fill="{colour}"/>'
        )
        away = 7 + 3.2 * len(label) * abs(uy)            # from the line, to the side that is up
        x, y = xa + 0.42 * (xb - xa) + away * uy, ya + 0.42 * (yb - ya) - away * abs(ux) + 4 * abs(uy)
        body.append(text_at(x, y, label, "middle", font_size=12, font_weight="600" if kind != "plain" else "400"))
    for name, (x, y) in places.items():
        colour = GREEN if name in inside else BLUE
        body.append(f'<circle cx="{x}" cy="{y}" r="{radius}" fill="{colour}" fill-opacity="{0.45 if name in inside else 0.16}" '
                    f'stroke="{colour}"/>')
        body.append(text_at(x, y + 4, name, "middle"))
        body += [text_at(x, y + radius + 13, note, "middle", font_size=12, font_weight="600")] if (note := (notes or {}).get(name)) else []
    height = max(y for _, y in places.values()) + radius + (20 if notes else 8)
    said = "; ".join(f"{a} to {b}: {label}{dict(path=', on the path', full=', full').get(kind, '')}" for a, b, label, kind in edges)
    return Picture("".join(body), width, height, f"{alt} {said}.", caption)


# ---- a kernel, statement by statement ------------------------------------------------------------


class Tile(np.ndarray):
    """A NumPy array with the one method that tiles of Triton have besides."""

    def to(self, dtype, bitcast=False):
        return self.view(dtype) if bitcast else self.astype(dtype)


def tile(array):
    return np.asarray(array).view(Tile)


@dataclass
class Pointer:
    """A tensor argument of a kernel: its elements in memory, and the offsets that were added."""

    memory: np.ndarray
    offsets: object = 0

    def __add__(self, offsets):
        return Pointer(self.memory, self.offsets + offsets)


class NumpyTriton:
    """As much of `triton.language` as the chapters' kernels use. `touched`: (load or store, memory, offsets) of the last statement."""

    float32, int32, int64 = np.float32, np.int32, np.int64
    PropagateNan = types.SimpleNamespace(ALL=None)
    where, exp, abs = staticmethod(np.where), np.exp, np.abs
    div_rn = staticmethod(np.divide)

    def __init__(self, program):
        self.program, self.touched = program, []

    def program_id(self, axis):
        return self.program

    def arange(self, start, end):
        return tile(np.arange(start, end))

    def full(self, shape, value, dtype):
        return tile(np.full(shape, value, dtype))

    def maximum(self, a, b, propagate_nan=None):
        return np.maximum(a, b)

    def sum(self, x, axis):
        return tile(np.sum(x, axis))

    def reduce(self, x, axis, combine):
        return tile(np.max(x, axis))  # the only combine function of these kernels is nan_max

    def load(self, pointer, mask=True, other=np.nan, eviction_policy=None):
        offsets, inside = np.broadcast_arrays(pointer.offsets, mask)
        self.touched.append(("load", pointer.memory, offsets[inside]))
        return tile(np.where(inside, pointer.memory[np.clip(offsets, 0, len(pointer.memory) - 1)], other)).astype(np.float32)

    def store(self, pointer, value, mask=True):
        offsets, value, inside = np.broadcast_arrays(pointer.offsets, value, mask)
        self.touched.append(("store", pointer.memory, offsets[inside]))
        pointer.memory[offsets[inside]] = value[inside]


def run_statements(source, arguments, program=0):
    """Execute one program of a kernel's text on NumPy tiles. Yields (statement, {register: value}, touched) after each statement.
    arguments: {parameter: array}; block sizes are those of the KernelSource."""
    tl = NumpyTriton(program)
    function = next(f for f in ast.parse(source.code).body if isinstance(f, ast.FunctionDef) and f.name == source.name)
    names = {n: Pointer(a) for n, a in arguments.items()} | source.options["constants"]
    scope = {"tl": tl, "nan_max": None, "float": float, **names}

    def run(statements):
        for statement in statements:
            if isinstance(statement, ast.For):
                for scope[statement.target.id] in eval(ast.unparse(statement.iter), scope):
                    yield f"{ast.unparse(statement).splitlines()[0]}  # now {scope[statement.target.id]}", dict(scope), []
                    yield from run(statement.body)
                continue
            tl.touched = []
            exec(compile(ast.Module([statement], []), "<kernel>", "exec"), scope)
            yield ast.unparse(statement), dict(scope), tl.touched

    hidden = {"tl", "nan_max", "float", "__builtins__", *names}
    with np.errstate(invalid="ignore", over="ignore"):
        for text, registers, touched in run(function.body):
            yield text, {n: v for n, v in registers.items() if n not in hidden}, touched


def kernel_walk(title, source, arguments, program=0, last=9):
    """A Walk through one program: each frame shows a statement, the registers that are written so far, and the memory it touches."""
    label = {id(a): n for n, a in arguments.items()}

    def number(v):
        return "·" if isinstance(v, float | np.floating) and np.isnan(v) else f"{v:.3g}" if isinstance(v, float | np.floating) else str(v)

    frames, order = [], []
    for text, registers, touched in run_statements(source, arguments, program):
        written = [n for n in registers if n not in order or re.match(rf"{n} = ", text)]
        order = [n for n in order if n not in written] + written
        rows = [(n, "  ".join(number(v) for v in np.ravel(registers[n]))) for n in order[-last:]]
        places = [(kind, label[id(memory)], ", ".join(map(str, offsets.ravel()))) for kind, memory, offsets in touched]
        said = "".join(f" {kind.capitalize()}s {name}[{where}]." for kind, name, where in places)
        frames.append((text + said, Table(["register", "its tile"], rows)))
    return Walk(title, frames)


# ---- the interpreter, instruction by instruction -------------------------------------------------


class Stepper:
    """Rows (offset, instruction, stack before it, graph node it made). A table; a page may make it walk."""

    def __init__(self, function, rows):
        self.function, self.rows = function, rows

    def _repr_html_(self):
        data = [dict(offset=o, instruction=i, stack=s, node=n) for o, i, s, n in self.rows]
        body = "".join(
            f"<tr><td>{o}</td><td><code>{html.escape(i)}</code></td><td>{html.escape(' | '.join(s))}</td>"
            f"<td>{f'<code>{html.escape(n)}</code>' if n else ''}</td></tr>"
            for o, i, s, n in self.rows
        )
        return (
            f'<div class="mc-stepper" data-steps="{html.escape(json.dumps(data))}">'
            f'<table><caption>{self.function}, instruction by instruction</caption><thead><tr><th scope="col">offset</th>'
            f'<th scope="col">instruction</th><th scope="col">stack before it</th><th scope="col">written to the graph</th>'
            f"</tr></thead><tbody>{body}</tbody></table></div>"
        )

    def __repr__(self):
        return repr(
            Table(
                ["offset", "instruction", "stack before it", "written to the graph"],
                [(o, i, " | ".join(s), n) for o, i, s, n in self.rows],
            )
        )


def step_through(function, **args):
    """Capture `function(**args)`, up to its first graph break, and keep what each instruction of its own frame did."""
    import dataclasses

    from minicompile import errors
    from minicompile.ch01_graphs.graph import _call_text
    from minicompile.ch03_capture import capture
    from minicompile.ch03_capture.values import NULL, describe

    rows, real_start = [], capture.start_trace

    def short(value):
        words = re.sub(r"a tensor of shape \(([\d, ]*?),?\)", r"tensor[\1]", describe(value))
        return "NULL" if value is NULL else words.replace("torch.nn.functional", "F")

    def start(*arguments):
        tx, frame = real_start(*arguments)

        def watched(handler):
            def run(tx, frame, instruction, *operands):
                stack = [said for v in (*frame.stack, *operands) if (said := short(v)) != "NULL"]
                nodes = len(tx.graph.nodes)
                row = [instruction.offset, f"{instruction.opname} {instruction.argrepr}".strip(), stack, "the graph breaks"]
                rows.append(row)
                pushed = handler(tx, frame, instruction, *operands)
                new = [n for n in list(tx.graph.nodes)[nodes:] if n.op != "placeholder"]
                row[3] = "; ".join(f"{n.name} = {_call_text(n)}" for n in new)
                return pushed

            return run

        skip = ("RESUME", "PRECALL", "CACHE", "NOP", "KW_NAMES", "PUSH_NULL")
        frame.decoded = dataclasses.replace(
            frame.decoded,
            steps=[
                (handler if i.opname in skip else watched(handler), pops, i)
                for handler, pops, i in frame.decoded.steps
            ],
        )
        return tx, frame

    capture.start_trace = start
    try:
        with contextlib.suppress(errors.Unsupported):
            capture.capture(function, args)
    finally:
        capture.start_trace = real_start
    return Stepper(function.__name__, rows)


# ---- pictures of the compiler's own data ---------------------------------------------------------


def draw_fx(gm, alt, caption="", only=None, width=150):
    """A graph of calls: inputs grey, library calls orange, the rest blue. only: a predicate on nodes."""
    from minicompile.ch01_graphs.graph import type_text

    chosen = [n for n in gm.graph.nodes if n.op != "output" and (only is None or only(n))]
    nodes = {}
    for n in chosen:
        target = (
            n.name if n.op == "placeholder" else getattr(n.target, "__name__", str(n.target)).split(".")[0]
        )
        kind = (
            "input"
            if n.op == "placeholder"
            else "library" if re.search(r"mm|linear|matmul|attention", target) else "compute"
        )
        nodes[n.name] = (shortened(target, 22), shortened(type_text(n.meta.get("val")), 24), kind)
    edges = [(a.name, n.name) for n in chosen for a in n.all_input_nodes if a.name in nodes]
    return drawing(nodes, edges, alt, caption, width=width)


def loops_and_kernels(program, schedule):
    """(loop or call, kernel it is in) in program order; None for library calls."""
    from minicompile.ch08_fusion.kernel import Kernel

    home = {
        loop.name: step.name for step in schedule.steps if isinstance(step, Kernel) for loop in step.loops
    }
    return [(node, home.get(node.name)) for node in program.nodes]


def draw_fusion(program, schedule, alt="", caption=""):
    """Loops in a column on the left, kernels on the right; a line says which loop went where."""
    from minicompile.ch07_loops.ir import Extern
    from minicompile.ch08_fusion.kernel import Kernel

    rows, h = loops_and_kernels(program, schedule), 24
    steps = schedule.steps
    height = max(len(rows), len(steps)) * (h + 6) + 30
    gap_right = (height - 30) / max(1, len(steps))
    y_of, body = {}, [
        text_at(4, 12, f"{len(rows)} nodes", font_size=11),
        text_at(330, 12, f"{len(steps)} steps", font_size=11),
    ]
    for n, step in enumerate(steps):
        y = 22 + n * gap_right
        y_of[step.name] = y + h / 2
        is_kernel = isinstance(step, Kernel)
        label = step.name if is_kernel else str(step.op)
        body.append(box(330, y, 250, h, shortened(label, 36), BLUE if is_kernel else ORANGE))
    for n, (node, home) in enumerate(rows):
        y, extern = 22 + n * (h + 6), isinstance(node, Extern)
        label = str(node.op) if extern else f"{node.name}: " + ", ".join(node.origins[:2])
        label = shortened(label, 34)
        body.append(box(4, y, 230, h, label, ORANGE if extern else GREY))
        to = y_of.get(node.name if extern else home)
        if to is not None:
            body.append(arrow(236, y + h / 2, 328, to))
    kernels = sum(isinstance(s, Kernel) for s in steps)
    return Picture(
        "".join(body),
        590,
        height,
        f"{alt} {len(rows)} loops and library calls on the left become {kernels} "
        f"kernels and {len(steps) - kernels} library calls on the right.",
        caption,
    )


# ---- running a chapter ---------------------------------------------------------------------------


@dataclass
class Cell:
    kind: str  # "code" or "markdown"
    tags: list
    text: str
    line: int  # of the first line of its text, from 1


def cells(path) -> list[Cell]:
    """The cells of a percent-format file."""
    found, current = [], None
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        if line.startswith("# %%"):
            tags = re.search(r"tags=(\[.*?\])", line)
            current = Cell(
                "markdown" if "[markdown]" in line else "code",
                ast.literal_eval(tags[1]) if tags else [],
                "",
                number + 1,
            )
            found.append(current)
        elif current is not None:
            if current.kind == "markdown":
                line = re.sub(r"^# ?", "", line)
            current.text += line + "\n"
    return found


def run_cell(cell, namespace, path):
    """Execute one code cell as a notebook does: the value of a last expression is shown. Returns that value."""
    tree = ast.parse("\n" * (cell.line - 1) + cell.text, str(path))
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(path), "exec"), namespace)
    return (
        eval(compile(ast.Expression(last.value), str(path), "eval"), namespace)
        if last is not None
        else None
    )


def run_chapter(path, show=print):
    """Run all code cells of a chapter in one namespace."""
    namespace = {"__name__": "chapter", "__file__": str(path)}
    for cell in cells(path):
        if cell.kind == "code" and cell.text.strip() and "gpu-result" not in cell.tags:
            value = run_cell(cell, namespace, path)
            if value is not None:
                show(repr(value))
    return namespace


if __name__ == "__main__":
    for name in sys.argv[1:]:
        start = time.perf_counter()
        run_chapter(Path(name).resolve())
        print(f"\n({name}: {time.perf_counter() - start:.1f} s)", file=sys.stderr)
