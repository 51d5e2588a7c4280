"""The explorer: what it records of every stage, that it restores what it runs, and the page."""
import html.parser
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import minicompile
from minicompile.ch01_graphs.graph import closure
from minicompile.errors import MinicompileError
from minicompile.tools import apart
from minicompile.tools.answers import Answers, References, Seen
from minicompile.tools.explore import PANES, collect, explore, read_page, recording_of, render
from minicompile.tools.explore.measure import check, measure, verdict
from minicompile.tools.explore.recording import SECONDS_FOR_ALTERNATIVES
from minicompile.tools.restore import restored

pytestmark = pytest.mark.usefixtures("fresh")
HERE = open(__file__).read().splitlines()


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        return self.out(torch.softmax(scores, -1) @ v)


class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def explained(function, *args, **settings):
    return minicompile.explain(function, **settings)(*args)


def recorded(function, *args, **settings):
    return collect(explained(function, *args, **settings))


@pytest.fixture(scope="module")
def block():
    torch.manual_seed(0)
    minicompile.reset()
    return recorded(Block(), torch.randn(2, 16, 32))


def reaches(r, item, pane):
    made_from = {i.id: i.made_from for i in r.items}
    return [i for i in closure(item.made_from, made_from.get) if i.startswith(pane + "-")]


def test_every_line_of_every_stage_leads_to_the_source(block):
    known = {i.id for i in block.items}
    assert len(known) == len(block.items) and all(set(i.made_from) <= known for i in block.items)
    for pane in ("cpp", "triton"):
        lines = [i for i in block.pane(pane) if i.kind != "head"]
        assert {"forward", "backward"} == {i.text for i in block.pane(pane) if i.kind == "head"}
        assert len(lines) > 100 and [i.text for i in lines if not reaches(block, i, "source")] == []
        assert any("exp" in i.text and not i.quiet for i in lines)
    for pane in ("bytecode", "guards", "graph", "fusion", "loops"):
        assert [i.text for i in block.pane(pane) if i.kind not in ("head", "refused") and not i.quiet and not reaches(block, i, "source")
                and not i.text.startswith("tangent")] == []


def test_a_kernel_line_leads_to_the_line_that_asked_for_it(block):
    text = {i.id: i.text for i in block.items}
    (line,) = {text[s].strip() for i in block.pane("cpp") if "erf" in i.text and not i.quiet for s in reaches(block, i, "source")
               if "gelu" in text[s]}
    assert "F.gelu(self.up(self.norm2(x)))" in line
    ways = [[text[s] for s in reaches(block, i, "source")] for i in block.pane("cpp") if not i.quiet]
    assert any(len(way) == 1 and "torch.softmax" in way[0] for way in ways)


def test_instructions_of_inlined_functions(block):
    heads = [i.text for i in block.pane("bytecode") if i.kind == "head"]
    assert [h.split(" ")[0] for h in heads] == ["Block.forward", "Attention.forward"]
    (node,) = [i for i in block.pane("graph") if "= softmax(" in i.text or ".softmax(" in i.text]
    (instruction,) = node.made_from
    by_id = {i.id: i for i in block.items}
    (line,) = by_id[instruction].made_from
    assert "CALL" in by_id[instruction].text and "torch.softmax(scores, -1) @ v" in by_id[line].text


def test_guards_name_the_line_that_needed_them(block):
    guards = [i for i in block.pane("guards") if i.kind != "head"]
    assert len(guards) > 20 and all(i.facts["needed by"] for i in guards)
    (weight,) = [i for i in guards if i.text.startswith("self.up.weight is a float32")]
    texts = {i.id: i.text for i in block.items}
    assert any("self.up(self.norm2(x))" in texts[m] for m in weight.made_from)
    assert any(texts[m].startswith("self_up_weight: f32[128, 32] = input") for m in weight.made_from)


def test_refused_fusions_have_reason_and_bytes(block):
    refused = [i for i in block.pane("fusion") if i.kind == "refused"]
    assert refused and all(i.facts["reason"] and i.facts["would have saved"] and len(i.made_from) >= 2 for i in refused)


def test_the_cut_has_prices_and_alternatives(block):
    saved = [i for i in block.pane("cut") if i.kind == "saved"]
    assert len(saved) > 5 and all({"price", "counted", "the alternative"} <= set(i.facts) for i in saved)
    texts = {i.id: i for i in block.items}
    assert all(texts[i.made_from[0]].kind == "saved" and texts[i.made_from[0]].pane == "primitives" for i in saved)
    runs = {i.facts.get("runs in") for i in block.pane("primitives") if i.facts}
    assert {"forward", "backward", "forward and again in backward"} <= runs


def two_ways(x, w):
    small = torch.sin(x.sum(1, keepdim=True))
    return (torch.exp(small) * w).sum()


def test_the_alternative_costs_what_it_says():
    r = recorded(two_ways, torch.randn(8, 1000, requires_grad=True), torch.randn(8, 1000, requires_grad=True))
    said = [i.facts["the alternative"] for i in r.pane("cut") if i.kind == "saved"]
    assert said and all(re.match(r"save .+ instead, for (.+ more|the same price)|none", s) for s in said)


def broken(x):
    y = torch.sin(x)
    print("a break")
    return torch.cos(y)


def test_graph_breaks_have_graphs_of_their_own():
    r = recorded(broken, torch.randn(8))
    assert len([i for i in r.pane("graph") if i.kind == "head"]) == 2
    (said,) = [i for i in r.pane("graph") if i.kind == "break"]
    assert [i.kind for i in r.pane("graph") if i.kind in ("head", "break")] == ["head", "break", "head"]        # between its graphs
    texts = {i.id: i.text for i in r.items}
    assert 'print("a break")' in texts[said.made_from[0]] and said.facts["advice"]
    for word, line in (("sin", "y = torch.sin(x)"), ("cos", "return torch.cos(y)")):
        lines = [i for i in r.pane("cpp") if f"{word}f(" in i.text.replace(f"{word}f32(", f"{word}f(") or f"{word}(" in i.text]
        assert any(line in texts[s] for i in lines for s in reaches(r, i, "source"))


def test_without_kernels_there_are_graphs_and_guards():
    r = recorded(two_ways, torch.randn(8, 10), torch.randn(8, 10), backend="eager")
    assert r.pane("graph") and r.pane("guards") and not r.pane("cpp") and "Captured graph" in render(r)
    assert not recorded(lambda: 3).pane("cpp")


CORNERS = {
    "dropout": (lambda x: F.dropout(x * x, 0.5).sum(), (8, 16), {}), "nothing to do": (lambda x: x * 2, (0, 3), {}),
    "any size": (lambda x: torch.softmax(x * 2, -1) + x.shape[0], (8, 16), {"dynamic": True}),
    "a write": (lambda x: x.detach().clone().add_(1).relu_(), (8, 16), {}),
    "interpreted": (lambda x: F.gelu(x), (8,), {"backend": "loops"}),
    "no loops": (lambda x: F.gelu(x), (8,), {"backend": "aot_eager"}), "complex": (lambda x: torch.fft.fft(x).abs() + 1, (8,), {}),
}


@pytest.mark.parametrize("name", CORNERS)
def test_corners(name):
    function, shape, settings = CORNERS[name]
    r = recorded(function, torch.randn(shape, requires_grad=True), **settings)
    assert [i.text for p in ("cpp", "triton") for i in r.pane(p) if i.kind != "head" and not reaches(r, i, "source")] == []
    assert r.pane("joint") and Page(render(r)).made_from


@pytest.mark.parametrize("forks", [True, False], ids=["a process for each stage", "CUDA is in use"])
def test_a_program_that_can_be_called_once_and_one_that_prints(forks, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: not forks)
    calls = []

    def once(x):
        calls.append(1)
        if len(calls) > 1:
            raise KeyError("again")
        return x + 1

    r = recording_of(explained(once, torch.ones(3)), checked=False)
    assert r.summary["a call"] == "not timed: calling it again raises KeyError: 'again'" and calls == [1]

    def talks(x):
        print("heard")
        return x + 1

    explained(talks, torch.ones(3)).explore(tmp_path / "page.html")
    assert capsys.readouterr().out == "heard\n"


# ---- measuring, checking, restoring -----------------------------------------------------------------------

def test_a_training_step_is_restored():
    torch.manual_seed(0)
    model, count, seen = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)), 0, []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x):
        nonlocal count
        count += 1
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        seen.append(count)
        return loss.detach()

    x = torch.randn(4, 8)
    step(x)                                          # the optimizer has a state
    kept = [p.detach().clone() for p in (*model.parameters(), *model.buffers())]
    moments = [s["exp_avg"].clone() for s in optimizer.state.values()]
    gradients = [p.grad.clone() for p in model.parameters()]
    random = torch.get_rng_state()
    with restored([step, x]):
        for _ in range(3):
            step(x)
        assert not torch.equal(kept[0], model[0].weight) and count == 4
    assert count == 1 and seen == [1] and torch.equal(random, torch.get_rng_state())
    assert all(map(torch.equal, kept, (*model.parameters(), *model.buffers())))
    assert all(map(torch.equal, moments, (s["exp_avg"] for s in optimizer.state.values())))
    assert all(map(torch.equal, gradients, (p.grad for p in model.parameters())))
    assert [float(s["step"]) for s in optimizer.state.values()] == [1.0] * 6
    found = explained(step, x)
    after = [p.detach().clone() for p in model.parameters()]
    checks, taken = check(found), measure(found, seconds=0.05)
    assert checks["cpp"].startswith("checked: ") and taken.compiled > 0
    assert count == 2 and all(map(torch.equal, after, model.parameters()))


def test_checks_tell_equal_from_different():
    x = torch.arange(4.0)
    found = explained(lambda x: x + 1, x)
    assert check(found) == dict.fromkeys(
        ["graph", "joint", "primitives", "cut", "loops", "fusion", "cpp", "host"], "checked: equal to eager")

    def answers(value):
        return Answers({"call 1: result": Seen("tensor", ((4,), "torch.float32", "cpu", False, None), value)}, lowest=1e-5)
    refs = References(answers(x), answers(x.double()), answers(x))
    assert verdict(apart.Outcome(answers(x)), refs) == "checked: equal to eager"
    assert verdict(apart.Outcome(answers(x + 1e-7 * x)), refs).startswith("checked: largest difference to eager ")
    assert verdict(apart.Outcome(answers(x + 1)), refs).startswith("differs from eager: call 1: result: ")
    assert verdict(apart.Outcome(error="ended by SIGSEGV"), refs) == "fails: ended by SIGSEGV"


def test_every_step_is_timed():
    found = explained(Block(), torch.randn(2, 16, 32))
    taken = measure(found, seconds=0.05)
    schedules = [d["schedule"] for kind, d in found.graphs[0].told if kind == "schedule"]
    assert {n: len(s.steps) for n, s in enumerate(schedules)} == {n: len(t) for (_, n), t in taken.steps.items()}
    assert all(t > 0 for times in taken.steps.values() for t in times)
    r = collect(found, taken)
    kernels = [i for i in r.pane("fusion") if i.kind == "kernel"]
    assert kernels and all({"bytes", "time", "share of the call", "bandwidth"} <= set(i.facts) for i in kernels)
    shares = [float(i.facts["share of the call"][:-2]) for i in r.pane("fusion") if "share of the call" in i.facts]
    assert abs(sum(shares) - 100) < 3
    assert sum("µs" in i.text for i in r.pane("timeline")) == sum(len(s.steps) for s in schedules)


def test_times_of_another_program_are_left_out():
    """Compiled once more for its times, a function may become another program, as an optimizer's first and second step do."""
    found = explained(Block(), torch.randn(2, 16, 32))
    taken = measure(found, seconds=0.05)
    taken.steps = {key: times[1:] for key, times in taken.steps.items()}
    assert taken.steps and not any("µs" in i.text for i in collect(found, taken).pane("fusion"))


def test_bytes_of_a_kernel():
    found = explained(lambda x, y: x + y, torch.randn(1000), torch.randn(1000))
    (kernel,) = [i for i in collect(found).pane("fusion") if i.kind == "kernel"]
    assert kernel.facts["bytes"] == "12 KB"


# ---- the page ---------------------------------------------------------------------------------------------

class Page(html.parser.HTMLParser):
    """Ids, links between lines, addresses of anything outside."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.made_from, self.outside, self.lines = [], set(), [], {}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if "id" in attributes:
            self.ids.append(attributes["id"])
            self.lines[attributes["id"]] = attributes
        self.made_from |= set(attributes.get("data-from", "").split())
        self.outside += [v for k, v in attributes.items() if k in ("src", "href", "srcset", "action")]
        self.outside += [tag] if tag in ("link", "iframe", "img") else []


def test_the_page_is_one_small_file(block, tmp_path):
    text = render(block)
    page = Page(text)
    assert len(text.encode()) < 1_000_000 and not page.outside
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest|WebSocket", re.sub(r'id="recording">[^<]*', "", text))
    assert len(set(page.ids)) == len(page.ids) and page.made_from <= set(page.ids)
    assert {i.removeprefix("pane-") for i in page.ids if i.startswith("pane-")} == {p for p in PANES if block.pane(p)}
    (tmp_path / "page.html").write_text(text)
    assert read_page(tmp_path / "page.html").as_dict() == block.as_dict()


def test_a_page_that_is_none(tmp_path):
    (tmp_path / "x.html").write_text("<p>")
    for name in ("x.html", "missing.html"):
        with pytest.raises(MinicompileError, match="is not a page of the explorer"):
            read_page(tmp_path / name)


def before(x):
    y = torch.sin(x)
    return y * 2


def after(x):
    y = torch.sin(x)
    return y * 3 + 1


def test_two_versions_side_by_side(tmp_path):
    x = torch.randn(8)
    first = explore(explained(before, x), tmp_path / "before.html", measured=False, checked=False)
    second = explore(explained(after, x), tmp_path / "after.html", against=first, measured=False, checked=False)
    page = Page(second.read_text())
    assert {i[:2] for i in page.ids if "-source-" in i} == {"a-", "b-"} and page.made_from <= set(page.ids)
    r = read_page(second)
    assert r.title == "after"
    same = {i.text.split("  ", 1)[1]: f"b-{i.id}" in page.lines and "data-same" in page.lines[f"b-{i.id}"] for i in r.pane("source")
            if i.kind == ""}
    assert same["    y = torch.sin(x)"] and not same["    return y * 3 + 1"]
    (sine,) = [i for i in r.pane("graph") if "= sin(" in i.text]
    assert page.lines[f"b-{sine.id}"]["data-same"].startswith("a-graph-")


SCRIPT = """
import torch

def small(x):
    return torch.sin(x)

def large(x):
    for _ in range(40):
        x = torch.sin(x) @ x
    return x

small, large = torch.compile(small), torch.compile(large)
for _ in range(3):
    small(torch.ones(4)), large(torch.ones(300, 300))
"""


@pytest.mark.processes
def test_commands(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "model.py").write_text("import torch\ndef step(x, scale):\n    return torch.tanh(x) * scale\n")

    def run(*arguments):
        return subprocess.run([sys.executable, "-m", "minicompile", *arguments], capture_output=True, text=True, timeout=300)

    page = tmp_path / "page.html"
    done = run("run", "--explore", str(page), str(tmp_path / "script.py"))
    assert done.returncode == 0 and "large, the slowest frame" in done.stdout, done.stderr
    r = read_page(page)
    assert r.title == "large" and any("x = torch.sin(x) @ x" in i.text for i in r.pane("source")) and "µs" in r.pane("timeline")[-1].text
    assert run("run", "--explore").returncode == 1
    done = run("explore", f"{tmp_path}/model.py:step", "torch.randn(8)", "scale=2.0", "--out", str(page), "--quick")
    assert done.returncode == 0 and done.stdout.strip() == str(page), done.stderr
    assert read_page(page).title == "step"
    assert run("explore", f"{tmp_path}/model.py:step", "--against", "page.html", "--against-mode", "default").returncode == 1


def test_explain_explores(tmp_path):
    path = minicompile.explain(before)(torch.randn(8)).explore(tmp_path / "page.html")
    r = read_page(path)
    assert "a call" in r.summary and re.search(r"\d ms; checked: (equal|largest difference) to eager", r.notes["cpp"])


def test_alternatives_are_not_looked_for_without_end(monkeypatch):
    assert SECONDS_FOR_ALTERNATIVES > 0
    monkeypatch.setattr("minicompile.tools.explore.recording.SECONDS_FOR_ALTERNATIVES", -1.0)
    r = recording_of(explained(Block(), torch.randn(2, 16, 32)), measured=False, checked=False)
    assert all("too many" in i.facts["the alternative"] for i in r.pane("cut") if i.kind == "saved")
