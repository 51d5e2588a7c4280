"""The pipeline as a picture that is also the navigation."""
from __future__ import annotations

import html

LABELS = {"ch01_graphs": "graphs", "ch02_guards": "guards", "ch03_capture": "capture", "ch04_breaks": "breaks", "ch05_autograd": "autograd",
          "ch06_decompositions": "primitives", "ch07_loops": "loops", "ch08_fusion": "fusion", "ch09_triton": "Triton", "ch10_cpp": "C++",
          "ch11_runtime": "runtime", "ch12_training": "training", "ch13_tuning": "layouts", "ch14_scale": "scale"}
IDEAS = {"ch01_graphs": "graphs, fake tensors and sizes: what all stages speak", "ch02_guards": "may compiled code be used again?",
         "ch03_capture": "bytecode in, graph out", "ch04_breaks": "what cannot be captured, and going on after it",
         "ch05_autograd": "the backward graph, ahead of time", "ch06_decompositions": "thousands of operators become few",
         "ch07_loops": "each operator as a loop nest", "ch08_fusion": "loops that share memory become one kernel",
         "ch09_triton": "kernels for a GPU", "ch10_cpp": "kernels for a CPU", "ch11_runtime": "the host program and CUDA graphs",
         "ch12_training": "a whole training step as one graph", "ch13_tuning": "the order of a tensor in memory",
         "ch14_scale": "caches and many GPUs"}


def label(chapter: str) -> str:
    return LABELS.get(chapter, chapter.partition("_")[2])


def strip(chapters: list[str], pages: dict, here: str = "") -> str:
    """A line of stations, one per chapter. pages: chapter -> address without ending. Addresses begin with `@`, the way up to the root."""
    words = "The stages of the compiler in order." + (f" You are at {label(here)}." if here in chapters else "")
    stations = "".join(f'<li><a href="@{pages[c]}.html"{" aria-current=location" if c == here else ""}><b>{int(c[2:4])}</b> '
                       f'<span>{html.escape(label(c))}</span></a></li>' for c in chapters)
    return f'<nav aria-label="{words}"><ol>{stations}</ol></nav>'


ROWS = [("every call", ["ch02_guards"]), ("first call: a program becomes graphs", ["ch03_capture", "ch04_breaks", "ch01_graphs"]),
        ("graphs become simpler graphs", ["ch05_autograd", "ch06_decompositions"]), ("operators become loops",
                                                                                     ["ch07_loops", "ch08_fusion"]),
        ("loops become machine code", ["ch09_triton", "ch10_cpp", "ch11_runtime"]),
        ("on top", ["ch12_training", "ch13_tuning", "ch14_scale"])]


def full_map(chapters: list[str], pages: dict) -> str:
    """The map of the front page: one row per step of the way down, each box a link."""
    rows = []
    for title, members in ROWS:
        boxes = "".join(f'<li><a href="{pages[c]}.html"><b>{int(c[2:4])} {html.escape(label(c))}</b>'
                        f'<span>{html.escape(IDEAS.get(c, ""))}</span></a></li>'
                        for c in members if c in chapters)
        if boxes:
            rows.append(f"<li><p>{html.escape(title)}</p><ul>{boxes}</ul></li>")
    return f'<nav aria-label="The way of a program through the compiler, from top to bottom" class="mc-map"><ol>{"".join(rows)}</ol></nav>'
