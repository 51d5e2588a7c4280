"""The engine of the exercises: starters, the sandbox, comparison, report formats, bad input, cheats."""
import ast
import base64
import json
import pathlib
import subprocess
import sys
import time
import xml.etree.ElementTree as ET

import jsonschema
import pytest
import torch

import minicompile
from exercises import ExerciseError, mutants, reports, validate
from exercises.__main__ import main
from exercises.data import NotPlain, decode, difference, encode
from exercises.grade import grade, solution
from exercises.source import edited, find_task, load_tasks, original, starter

ID = "last-uses"
ROOT = pathlib.Path(__file__).parents[2]
HEAD = "def last_uses(graph):\n"


@pytest.fixture(scope="module")
def results():
    return [grade(ID, starter(find_task(ID)), 1), grade(ID, solution(find_task(ID)), 1), grade(ID, HEAD + "    return {}\n", 1)]


def test_starter_fails_and_original_passes(results):
    begun, right, wrong = results
    assert {o.status for o in begun.outcomes} == {"not done"} and right.passed
    assert wrong.earned < wrong.points and wrong.outcomes[0].where


def test_starter_holds_no_solution():
    text = starter(find_task(ID))
    assert "raise NotDone" in text and "setdefault" not in text


def test_no_starter_holds_or_imports_a_solution():
    for task in load_tasks().values():
        text = "\n".join(line for line in starter(task).splitlines() if not line.startswith("#")) + "\n"
        if task.kind == "write":
            node, = ast.parse(original(task).text).body
            body = {line.strip() for part in node.body[ast.get_docstring(node) is not None:] for line in ast.unparse(part).splitlines()}
            assert not [line for line in body if len(line) > 12 and line in text], task.id
            names = [a.name for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom) for a in n.names]
            assert node.name not in names and text.rstrip().endswith(f"raise NotDone({task.id!r})")
        elif task.kind == "predict":
            assert all(f"\n{b.answer} = ...\n" in text for b in task.behaviours)
        else:
            assert text.count("\ndef ") >= 1 and (task.kind == "target" or text.rstrip().endswith(edited(original(task).text, task.plant)))


@pytest.mark.parametrize("body, status, says", [
    ("    while True: pass\n", "timeout", "endless"), ("    return bytearray(1 << 36)\n", "memory", "MiB"), ("    return {\n", "syntax",
                                                                                                             "line"),
    ("    import os; os._exit(0)\n", "error", "before it gave"), ("    import os; os.kill(os.getppid(), 9)\n", "error", "os.kill"),
    ("    return 1 / 0\n", "error", "line 2: return 1 / 0"), ("    return last_uses(graph)\n", "error", "RecursionError"),
    ("    open('x', 'w')\n", "error", "Error")])
def test_bad_files_get_one_line(body, status, says, monkeypatch):
    task = find_task(ID)
    monkeypatch.setattr(task, "seconds", 2.0)
    monkeypatch.setattr(task, "behaviours", task.behaviours[:1])
    outcome, = grade(ID, HEAD + body, 1).outcomes
    assert outcome.status == status and says in outcome.message and "\n" not in outcome.message and not outcome.earned


def test_no_such_exercise():
    with pytest.raises(ExerciseError, match="last-uses"):
        find_task("last-use")


@pytest.mark.parametrize("name", validate.CHEATS)
def test_cheats_earn_nothing(name):
    o = validate.original(find_task(ID))
    assert len(validate.CHEATS) >= 8
    assert grade(ID, validate.CHEATS[name].format(module=o.module, name=o.name, path=str(o.path)), 3).earned == 0


@pytest.mark.parametrize("before", ["import minicompile.ch01_graphs.graph as g\ng.interpret = lambda gm, args, run=None: [{}]\n",
                                    "import exercises.data as d\nd.encode = d.decode\n",
                                    "import minicompile.ch01_graphs.graph as g\n"
                                    "g.interpret.__code__ = (lambda gm, args, run=None: []).__code__\n"])
def test_a_file_that_changes_the_compiler_or_the_grader_earns_nothing(before):
    result = grade(ID, before + solution(find_task(ID)).replace("from __future__ import annotations", ""), 3)
    assert result.earned == 0 and "changes" in result.outcomes[0].message


def test_a_file_of_ordinary_python_may_name_its_caller():
    extra = "import collections, dataclasses, enum, typing\nA = collections.namedtuple('A', 'x')\nclass B(typing.NamedTuple):\n" \
            "    x: int\nclass C(enum.Enum):\n    X = 1\n" \
            "@dataclasses.dataclass\nclass D:\n    x: int\n"
    assert grade(ID, extra + solution(find_task(ID)).replace("from __future__ import annotations", ""), 3).passed


STEP = solution(find_task("no-breaks"))
HIDDEN = """
import torch
@torch.library.custom_op("exercises::hidden", mutates_args=())
def hidden(x: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.clone() for t in eager(x, weights, [])]
@hidden.register_fake
def _(x, weights):
    return [x @ weights[0], x.new_empty(())]
def step(x, weights, log):
    for k in range(len(weights)):
        log.append(f"layer {k}: {(5, 6)}")
    return tuple(hidden(x, list(weights)))
"""


@pytest.mark.parametrize("text, points", [
    ("import torch\n" + STEP, 10), (HIDDEN + STEP.replace("def step", "def eager"), 0),
    ("import torch\n" + STEP + "import minicompile\nstep = minicompile.disable(step)", 0),
    ("import torch, minicompile\nfrom types import SimpleNamespace\n"
     "minicompile.explain = lambda f, **k: lambda *a: SimpleNamespace(breaks=[], graph_count=1)\n"
     "minicompile.compile = lambda f, **k: f\n" + STEP, 0)])
def test_one_graph_is_run_and_not_claimed(text, points):
    assert grade("no-breaks", text, 3).earned == points


def test_a_decomposition_may_not_call_its_operator():
    text = "import torch\ndef gelu_backward(grad, x, approximate='none'):\n" \
           "    return torch.ops.aten.gelu_backward(grad, x, approximate=approximate)\n"
    assert grade("gelu-backward", text, 3).earned == 0


def test_what_runs_elsewhere_gets_data_only():
    from exercises.tasks.kit import run_rows
    for target in ("os.system.default", "aten.from_file.default", "prims.add.default"):
        with pytest.raises(ValueError, match="no operator of ATen"):
            run_rows([("x", "call_function", target, [], {})], [])


def test_zero_behaviours_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(validate, "load_tasks", dict)
    assert validate.main([]) == 1


def test_missing_variants_and_untested_tags_are_found(monkeypatch, tmp_path):
    for name, value in {"VARIANTS": tmp_path, "CHEATS": {}, "CONSTANTS": ()}.items():
        monkeypatch.setattr(validate, name, value)
    assert list(validate.problems(find_task(ID))) == ["0 wrong and 0 right variants; needed: (5, 1)"]
    monkeypatch.setattr(find_task(ID), "behaviours", [])
    assert list(validate.problems(find_task(ID))) == ["no behaviours"]
    found = list(validate.of_the_whole([t for t in validate.load_tasks().values() if t.id != "unwind"]))
    assert found == ["the package has a cell with the tag exercise:unwind, and no task has that name"]


def test_predictions_are_compared_with_what_the_compiler_says():
    task = find_task("predict-loops")
    answers = solution(task)
    assert grade(task.id, answers, 1).passed and len(answers.splitlines()) == len(task.behaviours)
    result = grade(task.id, answers + "CHAIN = 77\n", 1)
    assert [o.name for o in result.outcomes if not o.earned] == ["chain"]
    assert "CHAIN = 77 is not" in result.outcomes[0].message and "loop0 writes buf0" in result.outcomes[0].message


@pytest.mark.parametrize("id, record", [
    ("predict-graph", "mul = mul(gelu, 18): return F.gelu(x) * scale"), ("predict-guards", "fails NO_KEY: options has a key 'bias' now"),
    ("predict-breaks", 'a break at `print("half way")`: print()'), ("predict-saved", "amax_default, torch.float32 [64, 1]: 256 bytes"),
    ("predict-kernels", "loop0 and loop1: not fused, both read arg0, but at different elements")])
def test_whoever_predicts_wrongly_reads_the_record(id, record):
    wrong = "".join(f"{b.answer} = 77\n" for b in find_task(id).behaviours)
    assert record in reports.text([grade(id, wrong, 1)])


def test_messages_name_the_compilers_own_classes():
    text = "def broadcast_index(x, index):\n    return x.shape\n"
    assert "'Lazy' object has no attribute 'shape'" in reports.text([grade("broadcast-index", text, 1)])


@pytest.mark.parametrize("body, says", [("    while True: pass\n", "line 2: not finished"), ("    return bytearray(1 << 40)\n", "MiB"),
                                        ("    return 1 / 0\n", "ZeroDivisionError")])
def test_training_with_a_bad_function_ends_with_one_line(body, says, monkeypatch, tmp_path):
    from exercises import mine
    from minicompile.ch01_graphs import graph
    path = tmp_path / f"{ID}.py"
    path.write_text(HEAD + body)
    monkeypatch.setattr(mine, "PATIENCE", 1.0)
    monkeypatch.setattr(mine, "train", lambda task: {"losses": []} if task.compiler == "eager" else graph.last_uses(None))
    results = mine.run({ID: path}, 4, "cpu")
    assert "error" not in results["eager"] and says in results["minicompile"]["error"] and "\n" not in results["minicompile"]["error"]


def test_data_round_trip():
    value = {"a": [1, 2.5, float("nan"), (True, None)], 3: {"x"}, "t": torch.tensor([1.0, float("inf")]), "c": torch.tensor([1 + 2j])}
    assert difference(decode(json.loads(json.dumps(encode(value)))), value) is None
    class Sly(int):
        def __eq__(self, other):
            return True
    with pytest.raises(NotPlain):
        encode([Sly(3)])


def test_first_difference_is_named():
    assert difference({"capture": 1, "fuse": [1, 2]}, {"capture": 1, "fuse": [1, 3]}) == (("fuse", 1), 2, 3)
    assert difference(1.0, 1.0 + 1e-9, 1e-6) is None and difference(1, True) and difference({}, {"k": 1})


GRADESCOPE = {"type": "object", "required": ["tests"], "additionalProperties": False, "properties": {
    "score": {"type": "number"}, "execution_time": {"type": "number"}, "output": {"type": "string"},
    "visibility": {"enum": ["hidden", "after_due_date", "after_published", "visible"]},
    "stdout_visibility": {"enum": ["hidden", "after_due_date", "after_published", "visible"]}, "extra_data": {"type": "object"},
    "leaderboard": {"type": "array"},
    "tests": {"type": "array", "items": {"type": "object", "additionalProperties": False, "required": ["score", "max_score"],
                                         "properties": {
        "score": {"type": "number"}, "max_score": {"type": "number"}, "status": {"enum": ["passed", "failed"]}, "name": {"type": "string"},
        "name_format": {"type": "string"}, "number": {"type": "string"}, "output": {"type": "string"}, "output_format": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}}, "visibility": {"enum": ["hidden", "after_due_date", "after_published",
                                                                                        "visible"]},
        "extra_data": {"type": "object"}}}}}}
CLASSROOM = {"type": "object", "required": ["version", "status", "max_score", "tests"], "properties": {
    "version": {"const": 1}, "status": {"enum": ["pass", "fail", "error"]}, "max_score": {"type": "number"},
    "tests": {"type": "array", "items": {"type": "object", "required": ["name", "status", "score"], "properties": {
        "name": {"type": "string"}, "status": {"enum": ["pass", "fail", "error"]}, "score": {"type": "number"},
        "message": {"type": "string"},
        "test_code": {"type": "string"}, "filename": {"type": "string"}, "line_no": {"type": "integer"},
        "execution_time": {"type": "string"}}}}}}
OWN = {"type": "object", "required": ["version", "earned", "points", "exercises"], "properties": {"version": {"const": 1}, "exercises": {
    "type": "array", "items": {"type": "object", "required": ["id", "earned", "points", "passed", "outcomes"]}}}}


@pytest.mark.parametrize("name, schema", [("gradescope", GRADESCOPE), ("classroom", CLASSROOM), ("json", OWN)])
def test_json_reports(results, name, schema):
    data = json.loads(reports.FORMATS[name](results))
    jsonschema.validate(data, schema)
    base64.b64encode(json.dumps(data).encode())
    if name != "json":
        assert sum(t["score"] for t in data["tests"]) == sum(r.earned for r in results)


def test_junit(results):
    root = ET.fromstring(reports.junit(results))
    assert root.tag == "testsuites"
    for suite, result in zip(root, results, strict=True):
        cases = list(suite)
        assert suite.tag == "testsuite" and int(suite.get("tests")) == len(cases) == len(result.outcomes)
        assert int(suite.get("failures")) == sum(c.find("failure") is not None for c in cases)
        assert int(suite.get("errors")) == sum(c.find("error") is not None for c in cases)
        assert all(c.tag == "testcase" and c.get("name") and c.get("classname") and float(c.get("time")) >= 0 for c in cases)


def test_text_report_is_small(results):
    text = reports.text(results)
    assert "expected:" in text and "Traceback" not in text


def test_the_loop(tmp_path, monkeypatch, capsys):
    def call(*args):
        monkeypatch.setattr(sys, "argv", ["exercises", *args, "--dir", str(tmp_path)])
        status, printed = main(), capsys.readouterr()
        assert "Traceback" not in printed.err
        return status, printed.out + printed.err

    path = tmp_path / f"{ID}.py"
    assert subprocess.run([sys.executable, "-m", "exercises", "start", ID, "--dir", str(tmp_path)]).returncode == 0
    path.write_text("mine(")
    assert "stays as it is" in call("start", ID)[1] and path.read_text() == "mine("
    assert "syntax error" in call("grade", ID)[1] and "--give-up" in call("solution", ID)[1]
    assert "Hint 1" in call("hint", ID)[1] and "Hint 2" in call("hint", ID)[1]
    assert call("reset", ID)[0] == 0 and [p.read_text() for p in (tmp_path / "backup").iterdir()] == ["mine("]
    path.write_text(solution(find_task(ID)))
    assert call("watch", ID, "--once")[0] == 0 and "def last_uses" in call("solution", ID)[1]
    path.unlink()
    assert "does not exist" in call("grade", ID)[1]
    assert "--give-up" in call("solution", "predict-loops")[1] and "CHAIN = " in call("solution", "predict-loops", "--give-up")[1]


def test_a_function_that_guards_call_is_not_compiled_itself(tmp_path):
    from exercises import mine
    path = tmp_path / "same-constant.py"
    path.write_text(solution(find_task("same-constant")))
    minicompile.compile(lambda x: x + 1)(torch.ones(1))         # what this process compiled before is not counted
    results = mine.run({"same-constant": path}, 4, "cpu", seconds=240)
    assert results["minicompile"].get("graphs") == 1 and results["minicompile"]["losses"] == pytest.approx(results["eager"]["losses"])


def test_a_fork_ends_with_its_parent(tmp_path):
    program = ("import os, pathlib, time\nfrom exercises import sandbox\n"
               f"def body(pipe):\n    pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n    time.sleep(60)\n"
               "sandbox.in_fork(body, 60)\n")
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    child = int((tmp_path / "pid").read_text())
    parent.kill()
    parent.wait()

    def ended():
        try:
            return pathlib.Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except FileNotFoundError:
            return True
    wait_for(ended)


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_mistakes_are_made_by_machine_and_noticed():
    made = dict(mutants.mutants("def f(a, b):\n    if a and b > 1:\n        g(a, key=b)\n    return (a, b)\n"))
    for line in ("+ if a:", "+ if a and b >= 1:", "+ g(a)", "+ return (a,)", "+ if True:"):
        assert any(line in what for what in made), line
    assert mutants.survivors(find_task("sink-side"))[1] == []
