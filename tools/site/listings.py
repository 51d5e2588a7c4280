"""Where a cell of a chapter shows a text that was generated, its output leads to the explorer of the graph that the text was generated
from."""
from __future__ import annotations

import ast
import contextlib
import re

from . import SiteError

FOLDER = "explore"
BACK = '<a href="../explorer.html">The explorer, in the book</a>'
GENERATED = ("cpp", "triton", "host", "loops", "primitives", "joint", "graph")
ENOUGH = 3                      # lines of an output that are lines of one generated text


@contextlib.contextmanager
def listening():
    """Yields `Findings` that fill with everything that is compiled meanwhile."""
    from minicompile.tools.findings import ANY, Findings, listening
    found = Findings("page")
    with listening(found, ANY):
        yield found


@contextlib.contextmanager
def unheard():
    """Nobody listens meanwhile: what a page says of things that go away must not be wrong because an explanation keeps them."""
    from minicompile import logs
    watchers, logs.watchers[:] = logs.watchers[:], []
    try:
        yield
    finally:
        logs.watchers[:] = watchers


def graph_of(found, call: str, namespace: dict):
    """The captured graph of a call such as `f(x, w)`, compiled for this: of a listing that a chapter has made with one stage alone."""
    import torch

    import minicompile
    tree = ast.parse(call, mode="eval").body
    function, *args = (eval(ast.unparse(part), namespace) for part in (tree.func, *tree.args))
    before, stream = len(found.graphs), torch.get_rng_state()
    minicompile.explain(function)(*[a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args])
    torch.set_rng_state(stream)
    if len(found.graphs) == before:
        raise SiteError([f"explore:{call} compiles no graph"])
    return found.graphs[before]


def with_explorers(found, outputs: list, name: str, asked: dict) -> list:
    """For the outputs of a page's cells: where one shows a generated text, a further output with the explorer of its graph. asked: for
    a cell the graph that its tag `explore:` names."""
    from minicompile.tools.explore import collect as recorded, render
    from minicompile.tools.findings import Findings, heard_captured
    texts = [(graph, {significant(line) for text in texts_of(graph) for line in text.split("\n")} - {""}) for graph in found.graphs]
    made: dict = {}
    for number, cell in enumerate(outputs):
        for output in list(cell or ()):
            lines = {significant(line) for line in re.sub(r"<[^>]+>", "\n", output["text"]).split("\n")} - {""}
            best = max(texts, key=lambda t: len(lines & t[1]), default=None)
            if number not in asked and (best is None or len(lines & best[1]) < ENOUGH):
                continue
            graph = asked.get(number) or best[0]
            if id(graph) not in made:
                part = Findings(graph.frame, [graph])
                for code, captured in found.frames:
                    if captured is graph.captured:
                        heard_captured(part, code, captured)
                r = recorded(part)
                r.title = graph.frame
                made[id(graph)] = f"{name}-{len(made) + 1}", r, render(r, back=BACK)
            address, r, text = made[id(graph)]
            same = [[i for i in r.pane(p) if significant(i.text) in lines] for p in GENERATED]
            item = next((i for i in max(same, key=len) if not i.quiet), None)
            output["explorer"] = f"{FOLDER}/{address}.html" + (f"#at=a-{item.id}&amp;panes=source,primitives,{item.pane}" if item else "")
            output["page"] = text if sum(o.get("explorer", "").startswith(f"{FOLDER}/{address}.html") for c in outputs
                                         for o in c or ()) == 1 else ""
    return outputs


def texts_of(graph) -> list[str]:
    """All that was generated from a captured graph, by both generators."""
    from minicompile.ch01_graphs.graph import print_graph
    from minicompile.ch07_loops.verify import print_program
    from minicompile.tools.explore.recording import GENERATORS, generated
    found = [print_graph(gm) for gm in (graph.gm, *(data["gm"] for kind, data in graph.told if kind == "stage"))]
    for host, loops in ((data["compiled"], data["program"]) for kind, data in graph.told if kind == "schedule"):
        found += [host.source, print_program(loops)]
        for own, kernel in zip(host.sources, host.kernels):
            found += [own.code if own.language == language else getattr(generated(language, kernel), "code", "") for language in GENERATORS]
    return found


def significant(line: str) -> str:
    """A line that says enough to be recognised, or "". Names of files and of kernels do not count."""
    import html
    line = re.sub(r"\s+", " ", re.sub(r"(//|#) .*", "", html.unescape(line))).strip()
    return line if len(line) > 12 and re.search(r"[=\[(]", line) else ""

