"""Explorers of the book: pages of `minicompile.tools.explore`, recorded while the site is built.

Some programs have one each (`PROGRAMS`); and where a cell of a chapter shows a text that was generated, its output leads to the
explorer of the graph that the text was generated from.
"""
from __future__ import annotations

import pathlib

from . import ROOT, cells, execute, links, names
from .listings import BACK, FOLDER
from .page import Page, write


def tour():
    """The function of the tour, with the arguments that it is shown with."""
    path = ROOT / "chapters" / "00_tour.py"
    namespace = {"__name__": "chapter_00_tour", "__file__": str(path)}
    for cell in cells.split(path.read_text()):
        if cell.kind == "code":
            execute.run_cell(cell, namespace, str(path))
        if "half_block" in namespace:
            return namespace["half_block"], (namespace["x"], namespace["w"], 0.5)
    raise LookupError("the tour has no half_block")


def program(name: str):
    def load():
        import _lib
        import explored
        if name == "gpt_block":
            module, x = _lib.example()
            return module, (x,)
        return getattr(explored, name)()
    return load


PROGRAMS = {
    "tour": ("The function of the tour", "the lines that the tour takes through all stages, forward and backward", tour),
    "gpt": ("A block of a GPT", "two norms, attention, and a feed-forward part with GELU", program("gpt_block")),
    "resnet": ("A block of a ResNet", "two convolutions, batch norms that keep running statistics, and a sum", program("residual_block")),
    "training_step": ("A training step", "gradients cleared, loss, backward pass and AdamW: what breaks the graph, and what is between the "
                      "breaks", program("training_step")),
    "attention": ("Attention written by hand", "a masked softmax between two products", program("attention_by_hand")),
}


def record(name: str) -> dict:
    """{html, what: the summary}"""
    import torch

    import minicompile
    from minicompile.tools.explore import recording_of, render
    title, _, load = PROGRAMS[name]
    torch.manual_seed(0)
    function, args = load()
    minicompile.explain(function)(*args)                       # the imports of a first compilation are not the program's
    torch.manual_seed(0)
    recording = recording_of(minicompile.explain(function)(*args), title=title)
    return {"html": render(recording, back=BACK), "what": recording.summary["what"], "call": recording.summary["a call"]}


def jobs() -> list:
    key = names.digest(pathlib.Path(__file__), *sorted((ROOT / "minicompile" / "tools" / "explore").glob("page.*")))
    return [execute.Job(f"explorer_{name}", lambda name=name: record(name), key) for name in PROGRAMS]


def write_all(outputs: dict, folder: pathlib.Path) -> None:
    """All explorers in the answers of the jobs, as files."""
    wanted = {f"{FOLDER}/{name}.html": outputs[f"explorer_{name}"]["html"] for name in PROGRAMS if f"explorer_{name}" in outputs}
    shown = [o for answer in outputs.values() if isinstance(answer, list) for cell in answer if isinstance(cell, list) for o in cell]
    wanted |= {o["explorer"].partition("#")[0]: o["page"] for o in shown if o.get("page")}
    for address, text in wanted.items():
        write(folder / address, text)
    for old in (folder / FOLDER).glob("*.html"):
        if f"{FOLDER}/{old.name}" not in wanted:
            old.unlink()


def page(book: links.Book, outputs: dict) -> Page:
    """The chapter that says how to use it. What mkdocs sees of it does not depend on what was recorded."""
    made = Page("explorer", "The explorer")
    recorded = {name: outputs.get(f"explorer_{name}", {}) for name in PROGRAMS}

    def prose(text):
        made.prose(links.rewrite(book, made.address, text, "tools/site/explorers.py:1"))

    prose("""# The explorer

Each line of a kernel was asked for by a line of your program. The compiler knows by which: every node of every stage carries the
place in the source that it stems from and the names of the nodes that it was made of. The explorer shows all stages of one compiled
call beside each other, and those names as highlights. Point at a line of C++ to see the Python that wanted it; point at a line of
Python to see its bytecode, the guards that it costs, its nodes in three graphs, its loops, and its lines in the kernels.

## Your own function""")
    made.block(command('python -m minicompile explore model.py:step "torch.randn(8, 64)"'))
    prose("""writes `explore.html`, one file that needs neither a network nor a server. What follows the function are the arguments to
call it with, a Python expression each. In a program or a notebook, `minicompile.explain(f)(*args).explore()` does the same. Of a whole
script,""")
    made.block(command("python -m minicompile run --explore page.html train.py"))
    prose("""shows the frame that spent the most time in its compiled graphs, as it ran there.

## What there is to see

- *Guards* name the line that needed them. A guard that makes a function compile again is traced to its cause here.
- *The cut* lists every tensor that forward saves for backward with its price in bytes moved, why it may not be computed again, and
  what the cheapest cut without it would save instead. In *Primitives*, marks say what is saved and what runs again
  ([chapter 5](chapter:05)).
- *Fusion* lists the loops of each kernel and, in red, the pairs that were refused: the reason, and the bytes of memory traffic that
  fusing would have saved ([chapter 8](chapter:08)).
- *C++* and *Triton* show what both generators write for each kernel, whichever of them runs here.
- *Times*: a stage has the time it took, a kernel its bytes, its share of the call, and its distance from the bandwidth limit. The limit is
  measured as well: a copy that moves as many bytes, on the same machine.
- *checked: equal to eager*, in a pane's heading, says that what this stage made was run and compared: results, gradients, parameters and
  buffers afterwards. Where rounding differs, it names the largest difference and the tensor. The runs leave no trace: parameters, the
  optimizer's state and random streams are what they were.

Arrow keys move along the lines and from pane to pane; the same links stand as words under the panes. A number beside a pane's
name counts its lines that belong to the selection. Panes are switched on and off by their names.

## Two versions side by side

A page can be compared with a page. Explore, edit, and explore again:""")
    made.block(command("python -m minicompile explore model.py:step ARGUMENTS --out before.html\n"
                       "python -m minicompile explore model.py:step ARGUMENTS --against before.html"))
    prose("""What changed is marked in every pane, and a line leads to its partner in the other version. `--against` also takes another
function, called with the same arguments, and `--against-mode default` compares two modes.

## Recorded for this book

Each was recorded while this site was built. Under a listing that a chapter generates, a link opens the listing's own.""")
    rows = "".join(
        f'<tr><td><a href="{FOLDER}/{name}.html">{title}</a></td><td>{words}</td><td>{recorded[name].get("what", "")}</td></tr>'
        for name, (title, words, _) in PROGRAMS.items())
    made.block('<div class="mc-wide" tabindex="0"><table class="mc-table"><thead><tr><th scope="col">program</th><th scope="col">what it '
               f'is</th><th scope="col">what was made of it</th></tr></thead><tbody>{rows}</tbody></table></div>')
    return made


def command(text: str) -> str:
    return f'<pre class="mc-code" tabindex="0"><code>{text}</code></pre>'
