"""Listings in the prose of the chapters' modules are what the code prints."""
import pathlib
import re

import pytest
import torch
import torch.nn.functional as F

import minicompile
from minicompile.ch01_graphs.fake import FakeMode
from minicompile.ch01_graphs.graph import print_graph
from minicompile.ch01_graphs.trace import trace
from minicompile.ch06_decompositions.decompose import decompose
from minicompile.ch07_loops.lower import lower
from minicompile.ch07_loops.verify import print_program
from minicompile.ch08_fusion.canonical import canonical, canonical_names
from minicompile.ch08_fusion.fuse import fuse
from minicompile.ch08_fusion.reference import emit_reference
from minicompile.ch09_triton.emit import emit_triton
from minicompile.ch10_cpp.emit import emit_cpp
from tests.pretended import moved

PACKAGE = pathlib.Path(minicompile.__file__).parent


def graph_of(f, *inputs, gpu=False):
    mode = FakeMode()
    graph = decompose(trace(lambda *x: [f(*x)], [mode.from_real(x) for x in inputs]))
    return moved(graph) if gpu else graph


def loops(*program, **where):
    return print_program(lower(graph_of(*program, **where)))


def kernel(emit, *program, **where):
    [fused] = fuse(lower(graph_of(*program, **where))).steps
    return emit(canonical(fused, canonical_names(fused))).code


CENTRED = lambda x: x - x.mean(1, keepdim=True), torch.ones(64, 256)
LISTINGS = {
    "ch06_decompositions/decompose.py": lambda: print_graph(graph_of(lambda x: F.gelu(x).sum(1), torch.ones(4, 8).bfloat16())),
    "ch07_loops/ir.py": lambda: loops(lambda x, w: torch.relu(x @ w).sum(0), torch.ones(3, 4), torch.ones(4, 5)),
    "ch07_loops/reductions.py": lambda: loops(lambda x: x.sum(0), torch.ones(16384, 384), gpu=True),
    "ch08_fusion/__init__.py": lambda: loops(*CENTRED) + "\n" + kernel(emit_reference, *CENTRED),
    "ch09_triton/__init__.py": lambda: kernel(emit_triton, *CENTRED, gpu=True),
    "ch09_triton/emit.py": lambda: kernel(emit_triton, lambda x: torch.relu(x) + 1, torch.ones(1000), gpu=True),
    "ch10_cpp/__init__.py": lambda: kernel(emit_cpp, *CENTRED)}


@pytest.mark.parametrize("path", LISTINGS)
def test_a_listing_is_what_the_code_prints(path):
    printed, text = LISTINGS[path]().splitlines(), (PACKAGE / path).read_text()
    fenced = re.search(r"^# ```python\n((?:# .*\n)+?)# ```", text, re.M)
    shown = fenced[1].replace("# ", "").splitlines() if fenced else re.findall(r"^#     (.+)", text, re.M)
    printed = {line.strip() for line in printed}
    assert len(shown) > 6 and [line for line in shown if line.strip() not in printed] == []
