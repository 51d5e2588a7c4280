"""What the stepper shows: one capture by the real interpreter, recorded instruction by instruction."""
from __future__ import annotations

import html
import inspect
import json
import sys

from . import highlight
from .page import Page


def gate(x, scale, training):
    h = x * scale
    for _ in range(2):
        h = h + 1
    if training:
        h = h.relu()
    return {"out": h, "mean": h.mean()}


class Watched(list):
    """The interpreter's list of instructions, which looks over its shoulder: to fetch an instruction is the moment before it runs."""

    def __init__(self, steps, look):
        super().__init__(steps)
        self.look = look

    def __getitem__(self, position):
        self.look(position)
        return super().__getitem__(position)


def record() -> dict:
    """{source, first line, steps: [{line, op, arg, stack, locals, nodes}], graph: lines, guards: lines}, as plain data."""
    import dataclasses

    import torch

    from minicompile.ch03_capture import interpreter, values
    from minicompile.ch03_capture.capture import capture
    steps, original = [], interpreter.Frame.__post_init__

    def watch(frame):
        original(frame)
        if frame.code is gate.__code__:
            frame.decoded = dataclasses.replace(frame.decoded, steps=Watched(frame.decoded.steps, lambda n: look(frame, n)))

    def look(frame, position):
        tx = sys._getframe(3).f_locals["tx"]          # look, lambda, __getitem__, run
        instruction = frame.decoded.instructions[position]
        steps.append({"line": frame.decoded.lines[position] - gate.__code__.co_firstlineno, "op": instruction.opname,
                      "arg": instruction.argrepr, "stack": [short(v) for v in frame.stack],
                      "locals": {k: short(v) for k, v in frame.locals.items()},
                      "nodes": sum(n.op != "placeholder" for n in tx.graph.nodes), "guards": len(list(tx.guards))})

    def short(value) -> str:
        kind = type(value).__name__
        if kind == "TensorVal":
            return f"tensor {value.node.name} {list(value.fake.shape)}"
        if kind == "Const":
            return repr(value.value)
        if kind in ("TupleVal", "ListVal"):
            return "(" + ", ".join(short(v) for v in value.items) + ")"
        if kind == "Lazy":
            return "not looked at yet"
        if kind == "IterVal":
            return "iterator"
        return "NULL" if value is values.NULL else values.describe(value)

    interpreter.Frame.__post_init__ = watch
    try:
        done = capture(gate, {"x": torch.ones(4, 3), "scale": 0.5, "training": True})
    finally:
        interpreter.Frame.__post_init__ = original
    nodes = [n for n in done.gm.graph.nodes if n.op not in ("placeholder", "output")]
    lines, _ = inspect.getsourcelines(gate)
    return {"source": [line.rstrip("\n") for line in lines], "steps": steps,
            "graph": [f"{n.name} = {getattr(n.target, '__name__', n.target)}({', '.join(map(str, n.args))})" for n in nodes],
            "guards": [str(g) for g in done.guards]}


NOTHING = {"source": [], "steps": [], "graph": [], "guards": []}


def page(data: dict = NOTHING) -> Page:
    """The page of these steps. What mkdocs sees of it does not depend on them."""
    made = Page("stepper", "The stepper", "ch03_capture")
    made.prose("# The stepper\n\n"
               "Capture runs a function's bytecode without running the function. Its stack holds descriptions of objects: a "
               "tensor is a node of the graph with a shape; a number is itself. Arithmetic on tensors writes a node, everything else "
               "happens "
               "at once: watch the loop leave two additions, and the branch on `training` leave nothing but a guard.\n\n"
               "Steps were recorded "
               f"from the interpreter of chapter 3 while it captured this function with Python "
               f"{sys.version_info[0]}.{sys.version_info[1]}. Use the buttons, or the "
               "left and right arrow keys while one of them has the focus.")
    source = "\n".join(f'<span data-line="{n}">{line}</span>' for n, line in enumerate(highlight.lines_of("\n".join(data["source"]))))
    stored = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    made.block(f'''<section class="mc-stepper" aria-label="Stepper" hidden>
<div class="mc-buttons" role="group" aria-label="Steps"><button type="button" data-go="first">First</button><button type="button"
data-go="back">Back</button> <button type="button" data-go="on">Next</button><button type="button" data-go="last">Last</button>
<label>Step <input type="range" min="0" max="{len(data["steps"]) - 1}" value="0"></label><output></output></div>
<p class="mc-now" aria-live="polite"></p>
<div class="mc-panes"><div><h2 class="mc-h">Function</h2><pre class="mc-code" tabindex="0"><code>{source}</code></pre></div>
<div><h2 class="mc-h">Bytecode</h2><pre class="mc-code mc-ops" tabindex="0"><code></code></pre></div>
<div><h2 class="mc-h">Stack, top first</h2><ol class="mc-stack"></ol><h2 class="mc-h">Locals</h2><dl class="mc-locals"></dl></div>
<div><h2 class="mc-h">Graph so far</h2><pre class="mc-code mc-graph" tabindex="0"><code></code></pre></div></div>
<script type="application/json" class="mc-data">{stored}</script></section>''')
    rows = "".join(f'<tr><td class="num">{n}</td><td class="num">{s["line"] + 1}</td><td><code>{html.escape(s["op"])} '
                   f'{html.escape(s["arg"])}</code></td>'
                   f'<td><code>{html.escape(", ".join(s["stack"]) or "empty")}</code></td><td class="num">{s["nodes"]}</td></tr>'
                   for n, s in enumerate(data["steps"], 1))
    made.prose("## All steps as a table")
    made.block('<details class="mc-all" open><summary>Each row is the moment before its instruction runs</summary><div class="mc-wide" '
               'tabindex="0"><table class="mc-table">'
               '<thead><tr><th scope="col">step</th><th scope="col">line</th><th scope="col">instruction</th><th scope="col">stack, '
               'deepest first</th>'
               f'<th scope="col">nodes</th></tr></thead><tbody>{rows}</tbody></table></div></details>')
    made.prose("## The graph that came out")
    made.block(highlight.plain("\n".join(data["graph"])))
    made.prose("## The guards")
    made.block(f'<pre class="mc-code" tabindex="0"><code>{html.escape(chr(10).join(data["guards"]), False)}</code></pre>')
    return made
