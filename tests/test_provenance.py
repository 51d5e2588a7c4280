"""Where everything came from: from a line of a kernel back to the user's text, through every graph on the way."""
import dis
import math

import pytest
import torch

import minicompile
from minicompile import logs
from minicompile.ch01_graphs.graph import Location, together
from minicompile.ch03_capture.capture import capture
from minicompile.ch08_fusion.kernel import Kernel

pytestmark = pytest.mark.usefixtures("fresh")
HERE = open(__file__).read().splitlines()


def compiled(function, *args):
    """(captured graph, stages by name in the order in which they were told, [(schedule, host program)]); runs the backward, too."""
    stages, schedules = [], []

    def watch(kind, **data):
        if kind == "graph":
            stages.append(("captured", data["captured"].gm))
        elif kind == "stage":
            stages.append((data["name"], data["gm"]))
        elif kind == "schedule":
            schedules.append((data["schedule"], data["compiled"]))

    logs.watchers.append(watch)
    try:
        out = minicompile.compile(function)(*args)
        if out.requires_grad:
            out.sum().backward()
    finally:
        logs.watchers.remove(watch)
    return stages, schedules


def line(words: str) -> int:
    """Number of the line of this file that ends with a comment of these words."""
    return next(n for n, text in enumerate(HERE, 1) if text.endswith(f"# {words}"))


def two_on_a_line(x):
    return torch.sin(x) + x.cos()


def test_a_location_names_its_instruction():
    gm = capture(two_on_a_line, {"x": torch.ones(3)}).gm
    found = [n.meta["location"] for n in gm.graph.nodes if n.op.startswith("call")]
    places = {i.offset: i.positions for i in dis.get_instructions(two_on_a_line)}
    texts = [HERE[l.lineno - 1][places[l.offset].col_offset:places[l.offset].end_col_offset] for l in found]
    assert texts == ["torch.sin(x)", "x.cos()", "torch.sin(x) + x.cos()"] and found[0] == found[1]          # one line


def test_locations_together():
    a, b, c = (Location("f.py", n, "f") for n in (3, 1, 2))
    both = together([None, a, b, a])
    assert both == a and both.lines == (b, a) and together([both, c, both]).lines == (b, c, a)
    assert together([a, a]) is a and together([None]) is None and together([]) is None


def gelu(x):
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)            # inside
    return 0.5 * x * (1 + torch.tanh(inner))                            # outside


def test_a_loop_of_two_lines_names_both():
    _, ((schedule, host),) = compiled(gelu, torch.randn(8))
    (loop,) = schedule.steps[0].loops
    lines = [line("inside"), line("outside")]
    assert [l.lineno for l in loop.location.lines] == lines and loop.location.lineno == lines[1]
    assert all(f"{__file__}:{n} in gelu" in host.sources[0].code for n in lines)


def twice(x):
    a = torch.sin(x) + 1                                                # first
    b = torch.sin(x) + 2                                                # second
    return a * b


def test_a_merged_subexpression_keeps_both_lines():
    stages, _ = compiled(twice, torch.randn(8))
    (sine,) = [n for n in dict(stages)["forward"].graph.nodes if "sin" in str(n.target)]
    assert [l.lineno for l in sine.meta["location"].lines] == [line("first"), line("second")]


def layers(x, v, w):
    h = torch.softmax(x, -1) @ v                                        # lower
    return torch.softmax(h, -1) @ w                                     # upper


def test_kernels_that_share_a_text_keep_their_own_lines():
    _, ((schedule, host),) = compiled(layers, *(torch.randn(16, 16) for _ in range(3)))
    kernels = {k: step for k, step in enumerate(schedule.steps) if isinstance(step, Kernel)}
    assert len(kernels) == 2 and len(host.sources) == 1 and {host.source_of[k] for k in kernels} == {0}
    assert [host.source_of[k] is None for k in range(len(schedule.steps))] == [k not in kernels for k in range(len(schedule.steps))]
    source = host.sources[0]
    assert len(source.lines) == len(source.code.split("\n")) and "\0" not in source.code
    (division,) = [k for k, text in zip(source.lines, source.code.split("\n")) if " / " in text and "const float" in text]
    found = [kernel.loops[division].location for kernel in kernels.values()]
    assert [l.lineno for l in found] == [line("lower"), line("upper")]


@pytest.mark.parametrize("size", [700, 5000])
@pytest.mark.parametrize("dim", [0, 1])
def test_every_loop_of_a_reduction_has_statements_in_the_text(size, dim):
    _, ((schedule, host),) = compiled(lambda x: torch.softmax(x, dim) * 2, torch.randn(16, size))
    for step, number in zip(schedule.steps, host.source_of):
        source = host.sources[number]
        said = dict.fromkeys(k for k in source.lines if k is not None)
        assert set(said) == set(range(len(step.loops)))
        stores = [k for k, text in zip(source.lines, source.code.split("\n")) if text.strip().startswith("out0[")]
        assert stores and all("out0" in host.kernels[number].loops[k].outputs for k in stores)


def training(x, w):
    h = torch.nn.functional.gelu(x @ w)
    return torch.nn.functional.layer_norm(h, (h.shape[-1],)).square().mean()


def test_origins_lead_through_every_stage_to_the_captured_graph():
    stages, schedules = compiled(training, torch.randn(8, 8), torch.randn(8, 8, requires_grad=True))
    order = ["captured", "recorded", "joint", "primitives", "forward", "backward"]
    assert list(dict.fromkeys(name for name, _ in stages)) == order and len(schedules) == 2
    graphs = dict(stages)
    names = {name: {n.name: n for n in gm.graph.nodes} for name, gm in graphs.items()}
    before = {"recorded": "captured", "joint": "recorded", "primitives": "joint", "forward": "primitives", "backward": "primitives"}
    reached = set()
    for half in ("forward", "backward"):
        for node in graphs[half].graph.nodes:
            if node.op != "call_function":
                continue
            stage, here = half, {node.name}
            while stage != "captured":
                here = {o for name in here for o in names[stage][name].meta.get("origins", ())}
                stage = before[stage]
                assert here and here <= set(names[stage]), (half, node.name, stage, here)
            reached |= here
    captured = {n.name for n in graphs["captured"].graph.nodes if n.op.startswith("call")}
    assert captured <= reached


@pytest.mark.parametrize("length", [64, 100_000])
def test_statements_of_a_triton_kernel_know_their_loops(length):
    from minicompile.ch09_triton.emit import emit_triton
    _, ((schedule, _),) = compiled(gelu, torch.randn(4, length))
    source = emit_triton(schedule.steps[0])
    text = source.code.split("\n")
    assert len(source.lines) == len(text)
    stores = [k for k, words in zip(source.lines, text) if words.strip().startswith("tl.store(")]
    assert stores == [0] and f"{line('inside')},{line('outside')} return" in source.code
    assert {k for k, words in zip(source.lines, text) if words.startswith(("import", "@", "def "))} == {None}
