"""`explain`, and the logs: everything a user can see of a compilation, each with what to do about it."""
import html.parser
import logging
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import minicompile
from minicompile import advice, driver, logs
from minicompile.errors import GraphBreakError, MinicompileError

ROOT = pathlib.Path(minicompile.__file__).parents[1]


@pytest.fixture(autouse=True)
def logs_restored(fresh):
    yield
    minicompile.set_logs()
    logging.getLogger("minicompile").propagate = True


def two_graphs(x, k=2):
    y = x.sin() * k
    print(end="")
    return (y.cos() + 1).relu()


def normalized(x):
    return torch.nn.functional.layer_norm(x.sin(), (8,)).relu()


def helper(x):
    return x + 1 if x.sum() > 0 else x - 1


def calls_helper(x):
    return helper(x * 2) * 3


def test_fields():
    found = minicompile.explain(two_graphs)(torch.ones(8))
    assert (found.graph_count, found.graph_break_count, found.op_count) == (2, 1, 5) == (
        len(found.graphs), len(found.breaks), sum(found.operators.values()))
    assert found.operators["sin"] == 1 and found.name == "two_graphs"
    first, second = found.graphs
    assert [o.result for o in first.operations] == ["f32[8]"] * 2 and "x.sin() * k" in first.operations[0].source
    assert first.operations[0].where.startswith("test_explain.py:") and "the rest of" in second.frame
    assert isinstance(first.gm, torch.fx.GraphModule)
    half, = second.halves
    assert half.which == "forward" and half.loops == len(half.kernels) == 1 == found.kernel_count - 1
    stopped, = found.breaks
    assert "print" in stopped.reason and "print(end" in stopped.source and "compiled function" in stopped.advice
    assert any("x is a float32 tensor [8] on cpu" in str(g) for g in found.guards)
    assert any(str(g) == "k == 2" for g in found.guards)
    assert {"capture", "lower", "fuse", "emit", "call"} <= set(found.seconds) and all(t >= 0 for t in found.seconds.values())


def test_fusion():
    half, = minicompile.explain(normalized)(torch.rand(4, 8)).graphs[0].halves
    assert half.loops > len(half.kernels) == 1 and half.fused >= 1 and half.bytes_saved > 0
    found = minicompile.explain(normalized)(torch.rand(4, 8))
    assert "fusion saves" in str(found) and found.bytes_saved == half.bytes_saved


def test_text_and_html():
    found = minicompile.explain(two_graphs)(torch.ones(8))
    text = str(found)
    assert text == repr(found) and "\x1b" not in text
    for words in ("2 graphs, 1 graph break, 5 operations", "Graph 1: two_graphs", "Graph break 1: ", "print(end", "-> Print",
                  "Guards of two_graphs", "1 loop in 1 kernel", "Times: capture", "Operators: "):
        assert words in text, words
    page = found._repr_html_()

    class Checker(html.parser.HTMLParser):
        open_tags, closed = [], 0

        def handle_starttag(self, tag, attrs):
            if tag != "br":
                self.open_tags.append(tag)

        def handle_endtag(self, tag):
            assert self.open_tags.pop() == tag
            self.closed += 1
    checker = Checker()
    checker.feed(page)
    assert not checker.open_tags and checker.closed > 20
    assert "x.sin() * k" in page and "color:inherit" in page and "<script" not in page

    def tricky(x):
        return x + 1 if (x.sum() < 3 and "<b>&") else x
    assert "<b>" not in re.sub("<b>(Graph|Guards|Operators|Runs)", "", minicompile.explain(tricky, backend="eager")(
        torch.ones(1))._repr_html_())


def test_a_break_in_a_callee_names_the_call_chain():
    found = minicompile.explain(calls_helper, backend="eager")(torch.ones(2))
    assert found.graph_break_count == 2 and found.kernel_count == 0
    outer, inner = found.breaks
    assert len(outer.chain) == 1 and "calls_helper" in outer.chain[0] and "graph break 2" in outer.advice
    assert not inner.chain and "torch.where" in inner.advice and "called from" in str(found)


def test_explaining_leaves_nothing_behind_and_uses_nothing():
    compiled = minicompile.compile(two_graphs, backend="eager")
    compiled(torch.ones(2))
    before = driver.counters.graphs
    for _ in range(2):
        assert minicompile.explain(compiled)(torch.ones(2)).graph_count == 2
    assert driver.counters.graphs == before + 4 and not logs.watchers
    assert torch.equal(compiled(torch.ones(2)), two_graphs(torch.ones(2)))
    with pytest.raises(ZeroDivisionError):
        minicompile.explain(lambda x: x / 0 + 1 // 0)(torch.ones(1))
    assert not logs.watchers
    with pytest.raises(GraphBreakError):
        minicompile.explain(two_graphs, fullgraph=True)(torch.ones(1))


def test_modules_methods_training_and_skipped_frames():
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
    for target in (net, minicompile.compile(net)):
        found = minicompile.explain(target)(torch.randn(2, 4))
        assert found.name == "Sequential" and found.graph_count == 1 and "linear" in found.operators
        assert {half.which for half in found.graphs[0].halves} >= {"forward"}
        assert "addmm" in " ".join(found.graphs[0].halves[0].library_calls)

    def uses_debugger(x):
        sys._getframe()
        return x + 1
    found = minicompile.explain(uses_debugger)(torch.ones(1))
    assert found.graph_count == 0 and found.skipped[0].advice and "Runs as it is" in str(found)


def test_a_recompile_during_the_call():
    def inner(x, k):
        print(end="")
        return x * k if k > 1 else x + k

    def outer(x):
        print(end="")
        return inner(x, 1) + inner(x, 2)
    found = minicompile.explain(outer, backend="eager", dynamic=False)(torch.ones(2))
    assert found.recompiles and "k changed" in found.recompiles[0].why and "Version 2 of" in str(found)


# ---- logs ----------------------------------------------------------------------------------------------------------

def logged(caplog, topic, run):
    caplog.clear()
    with caplog.at_level(logging.DEBUG, f"minicompile.{topic}"):
        run()
    assert all(r.name == f"minicompile.{topic}" for r in caplog.records)
    return caplog.text


@pytest.mark.parametrize("topic, words", [
    ("graph_breaks", ["two_graphs", "print()", "test_explain.py", "-> Print"]),
    ("guards", ["x is a float32 tensor [4]", "compiled again", "def __compiled_two_graphs", "k == 2"]),
    ("graph", ["f32[4] = sin(x)|f32[4] = x.sin()", "# y = x.sin() * k"]),
    ("aot", ["forward", "aten.sin.default"]), ("loops", ["forward", "load"]),
    ("code", ["def call(args)", "extern|for (|void"]),
    ("bytecode", ["LOAD_FAST", "RETURN_VALUE", "is replaced by", "def __compiled_two_graphs", "the rest|resume"])])
def test_topics(caplog, topic, words):
    text = logged(caplog, topic, lambda: minicompile.compile(two_graphs)(torch.ones(4)))
    for alternatives in words:
        assert any(word in text for word in alternatives.split("|")), (alternatives, text)


def test_recompiles_say_what_to_do(caplog):
    compiled = minicompile.compile(two_graphs, backend="eager", dynamic=False)
    compiled(torch.ones(2))
    text = logged(caplog, "recompiles", lambda: compiled(torch.ones(3)))
    assert "size mismatch at dimension 0: expected 2, got 3" in text and "-> Sizes that vary" in text
    text = logged(caplog, "recompiles", lambda: compiled(torch.ones(3).double()))
    assert "dtype mismatch" in text and "one kind of tensor" in text


def test_fusion_decisions(caplog):
    text = logged(caplog, "fusion", lambda: minicompile.compile(normalized)(torch.rand(4, 8)))
    assert "fused" in text and "bytes" in text


def test_performance_hints(caplog):
    def f(x):
        return torch.linalg.qr(x)[1] * 2
    text = logged(caplog, "perf_hints", lambda: minicompile.compile(f)(torch.eye(3)))
    assert "qr" in text and "->" in text, text
    text = logged(caplog, "perf_hints", lambda: minicompile.compile(lambda x: torch.cummax(x @ x, 0)[0] * 2)(torch.eye(3)))
    assert "cummax" in text and "aten.mm" not in text, text


def test_every_reason_has_advice():
    assert "torch.where" in advice.for_break("a branch on the values of a tensor")
    assert advice.for_break("something nobody thought of") == advice.BREAK_DEFAULT
    for _, text in (*advice.BREAKS, *advice.RECOMPILES):
        assert text[0].isupper() and text.endswith(".")


def test_set_logs_is_exact_and_clear():
    minicompile.set_logs("code, graph", "fusion")
    assert [t for t in logs.ARTIFACTS if logs.on(t)] == ["graph", "fusion", "code"]
    minicompile.set_logs("all")
    assert all(map(logs.on, logs.ARTIFACTS))
    with pytest.raises(MinicompileError, match="Unknown log 'graf'. MINICOMPILE_LOGS takes: graph_breaks, recompiles"):
        minicompile.set_logs("graf")
    minicompile.set_logs()
    assert not any(map(logs.on, logs.ARTIFACTS))


@pytest.mark.processes
@pytest.mark.parametrize("value, words", [("graph_breaks", "[minicompile.graph_breaks]"), ("nonsense", "Unknown log 'nonsense'")])
def test_the_environment_variable(value, words):
    done = subprocess.run([sys.executable, "-c", "import torch, minicompile\n@minicompile.compile(backend='eager')\n"
                           "def f(x):\n    print(end='')\n    return x + 1\nf(torch.ones(1))"], cwd=ROOT, text=True,
                          capture_output=True, env={**os.environ, "MINICOMPILE_LOGS": value}, timeout=100)
    assert done.returncode == 0 and words in done.stderr, done.stderr


def checkpointed(a, b):
    return torch.utils.checkpoint.checkpoint(torch.mm, a, b, use_reentrant=False)


CONSTANT, LARGE_CONSTANT, TARGETS = torch.randn(4, 4), torch.randn(4, 5000), torch.arange(4)
LIBRARIES, SMALL = "because no kernel is generated", "because its kernels are small"
AS_CAPTURED = {
    "a product": (lambda a, b: a @ b, {}, LIBRARIES), "two products": (lambda a, b: a @ b @ CONSTANT, {}, LIBRARIES),
    "sizes that vary": (lambda a, b: a @ b, {"dynamic": True}, LIBRARIES),
    "a kernel": (lambda a, b: (a @ b).relu(), {}, SMALL), "a kernel in backward": (lambda a, b: a @ a, {}, SMALL),
    "a kernel of varying sizes": (lambda a, b: a.relu(), {"dynamic": True}, SMALL),
    "a large kernel of varying sizes": (lambda a, b: (a.repeat(100, 100) @ LARGE_CONSTANT[:, :400].t()).relu(), {"dynamic": True}, None),
    "two kernels": (lambda a, b: a.softmax(0).softmax(1), {}, SMALL), "a fused kernel": (lambda a, b: (a @ b).relu().sin(), {}, SMALL),
    "a fused kernel of much": (lambda a, b: (a @ b).sigmoid().tanh(), {}, None),
    "a cross entropy": (lambda a, b: F.cross_entropy(a, TARGETS), {}, SMALL),
    "a large cross entropy": (lambda a, b: F.cross_entropy(a @ LARGE_CONSTANT, TARGETS), {}, None),
    "a silu and a product": (lambda a, b: F.silu(a) * a, {}, SMALL),
    "seven calls": (lambda a, b: F.layer_norm(F.relu(a + 1) * 2, (4,)), {}, None),
    "a norm and a gelu": (lambda a, b: F.gelu(F.layer_norm(a, (4,))), {}, None),
    "one that eager makes of many": (lambda a, b: F.normalize(a), {}, None),
    "a large softmax": (lambda a, b: (a @ LARGE_CONSTANT).softmax(1), {}, SMALL),
    "a large mish": (lambda a, b: F.mish(a @ LARGE_CONSTANT), {}, None),
    "a large softmax with more": (lambda a, b: (a @ LARGE_CONSTANT).softmax(1).exp(), {}, None),
    "a large one": (lambda a, b: a.repeat(100, 100).relu(), {}, None),
    "a merged call": (lambda a, b: (a @ LARGE_CONSTANT) @ (a @ LARGE_CONSTANT).t(), {}, None),
    "a view": (lambda a, b: a @ b.t(), {}, SMALL), "a large view": (lambda a, b: LARGE_CONSTANT.t() @ a.t(), {}, SMALL),
    "a small kernel after much": (lambda a, b: (b @ (a @ LARGE_CONSTANT) @ LARGE_CONSTANT.t()).relu(), {}, SMALL),
    "a merged call and a small kernel": (lambda a, b: ((a @ LARGE_CONSTANT) @ (a @ LARGE_CONSTANT).t()).relu(), {}, None),
    "views": (lambda a, b: a[1:].t().unsqueeze(0), {}, "because it only takes views"),
    "a write": (lambda a, b: torch.mm(a.detach(), a.detach(), out=b.detach()) @ a, {}, None),
    "a checkpoint": (checkpointed, {}, None), "another rung": (lambda a, b: a @ b, {"backend": "cpp"}, None)}


@pytest.mark.parametrize("name", AS_CAPTURED)
def test_a_region_that_gains_nothing_runs_as_captured(name):
    function, settings, expected = AS_CAPTURED[name]
    a, b = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    found = minicompile.explain(function, **settings)(a, b)
    text = " ".join(str(found).split())
    assert f"runs as captured, {expected}" in text if expected else "runs as captured" not in text
    assert ("runs as captured" in found._repr_html_()) == (found.graphs[0].as_captured is not None) == bool(expected)
    assert ("kernel" in text.splitlines()[0].partition("Graph 1")[0]) != bool(expected) and not (expected and found.kernel_count)
    result = minicompile.compile(function, **settings)(a, b)
    assert ("CompiledRegion" in type(result.grad_fn).__name__) != bool(expected)


def turns(x):
    for _ in range(9):
        _ = [x, x]
    return x @ x


def broken(x):
    y = x @ x
    print(end="")
    return y @ y


MANY = [3, 1, 2]
PLAIN = {"one call": (lambda x: x.sort(), {}, True), "a few": (lambda *values: values[0] @ values[0] @ values[0], {}, True),
         "sizes that vary": (lambda x: x @ x, {"dynamic": True}, True), "of the library": (torch.matrix_exp, {}, True),
         "fewer calls than launches": (lambda x: torch.addmm(x, x, x), {}, True), "as many": (lambda x: (x @ x).relu(), {}, False),
         "much Python": (turns, {}, False), "more than the graph": (lambda x: x @ x if sorted(MANY)[0] else x, {}, False),
         "a module": (torch.nn.Linear(4, 4), {}, False), "a kernel": (torch.sin, {}, False),
         "a break": (broken, {}, False), "another rung": (lambda x: x.sort(), {"backend": "aot_eager"}, False)}


@pytest.mark.parametrize("name", PLAIN)
def test_a_frame_that_is_all_library_is_evaluated(name, monkeypatch):
    function, settings, expected = PLAIN[name]
    texts, x = [], torch.randn(4, 4)
    monkeypatch.setattr(logs, "watchers", [lambda kind, compiled=None, **_: kind == "entry" and texts.append(compiled.source_text)])
    compiled = minicompile.compile(function, **settings)
    for _ in range(2):
        results, others = (r if isinstance(r, tuple) else (r,) for r in (compiled(x), function(x)))
        assert all(map(torch.equal, results, others))
    assert ("return __EVALUATE_ALL" in texts[0]) == expected != ("__graph" in texts[0])


def test_what_varies_and_is_small_is_left_to_eager_up_to_some_size(reset):
    """Two versions for all sizes above 1: beyond the limit of the first one, the second has kernels, and serves what comes later."""
    compiled, made = minicompile.compile(lambda a: (a @ CONSTANT).relu().sin(), dynamic=True), []
    for rows in (3, 100, 4096, 4097, 100_000, 5000):
        a = torch.randn(rows, 4, requires_grad=True)
        torch.testing.assert_close(y := compiled(a), (a @ CONSTANT).relu().sin())
        made.append("CompiledRegion" in type(y.grad_fn).__name__)
    assert made == [False, False, False, True, True, True]


def test_a_region_with_a_marked_size_is_compiled(reset):
    """The mark promises one version for all sizes. A size that no tensor has leaves nobody to ask."""
    compiled = minicompile.compile(lambda a: (a @ CONSTANT).relu().sin())
    for rows in (3, 9000):
        minicompile.mark_dynamic(a := torch.randn(rows, 4, requires_grad=True), 0)
        with minicompile.set_stance("fail_on_recompile" if rows > 3 else "default"):
            assert "CompiledRegion" in type(compiled(a).grad_fn).__name__
    weight = torch.randn(4, 4, requires_grad=True)
    counted = minicompile.compile(lambda n: (torch.arange(float(n))[:, None].expand(n, 4) @ weight).relu().sin(), dynamic=True)
    for n in (3, 5, 9000):
        assert counted(n).shape == (n, 4)


def test_a_kernel_runs_where_nobody_differentiates():
    assert minicompile.explain(torch.relu)(torch.randn(4, 4)).graphs[0].as_captured is None


def test_a_view_is_left_to_eager_but_not_what_nobody_reads():
    for function, expected in ((lambda x: x.t(), "it only takes views"), (lambda x: (x.exp(), x.t())[1], None),
                               (lambda x: x.chunk(2, 1), "it only takes views"), (lambda x: torch.aminmax(x.t()), None)):
        for gradients in (False, True):
            x = torch.randn(3, 4, requires_grad=gradients)
            assert minicompile.explain(function)(x).graphs[0].as_captured == expected
