"""The build track: one file that grows, whose functions stand in chapters/tiny.py."""
import sys

import pytest
from typer.testing import CliRunner

from exercises import ExerciseError, __main__ as commands
from exercises.__main__ import app
from exercises.grade import grade
from exercises.sandbox import parts, target
from exercises.source import BEGIN, appended, begun_again, find_task, in_file, original, runs_here, starter, track

reads_bytecode = pytest.mark.skipif(sys.version_info >= (3, 13), reason="tiny knows the bytecode of CPython 3.11 and 3.12")
WRONG = "def for_iter(m, i):\n    m.pop(1)\n    m.frames[-1].at = i.value\n"


def file_with(*ids, before=""):
    return "\n\n\n".join([BEGIN, before, *(original(find_task(id)).text for id in ids)]) + "\n"


def test_there_are_fourteen_in_order():
    ids = [t.id for t in track()]
    assert len(ids) == 14 and ids[0] == "tiny-loop" and ids[-2:] == ["tiny-triton", "tiny-train"]
    assert all(t.file == "tiny.py" and t.demo and original(t).module == "chapters.tiny" for t in track())


def test_earlier_parts_of_the_file_stand_in_tiny():
    for t in track():
        target(t.id)
    source = appended(file_with("tiny-loop", "tiny-guard"), find_task("tiny-record"))
    assert [t.id for t in parts(find_task("tiny-inline"), source)] == ["tiny-loop", "tiny-guard", "tiny-inline"]       # one is not done
    assert [t.id for t in parts(find_task("tiny-record"), source)] == ["tiny-loop", "tiny-record"]
    assert [t.id for t in parts(find_task("last-uses"), source)] == ["last-uses"]


@reads_bytecode
def test_a_wrong_earlier_part_is_felt():
    assert grade("tiny-break", file_with("tiny-loop", "tiny-break"), 1).passed
    felt = {o.name: o.status for o in grade("tiny-break", file_with("tiny-break", before=WRONG), 1).outcomes}
    assert felt["no break"] == "passed" and felt["breaks at calls and in loops"] == "wrong"


def test_the_file_grows_and_begins_again():
    first, second = track()[:2]
    source = starter(first)
    assert [*in_file(source)] == [original(first).name] and "NotDone" in source
    with pytest.raises(ExerciseError, match="reset"):
        appended(source, first)
    both = appended(file_with(first.id), second)
    assert [*in_file(both)] == [original(first).name, original(second).name]
    again = begun_again(both, first)
    assert "raise NotDone('tiny-loop')" in again and in_file(again).keys() == in_file(both).keys()
    with pytest.raises(ExerciseError, match="line 1"):
        appended("def f(:\n", first)


def test_on_another_release_the_commands_say_so(tmp_path, monkeypatch):
    assert runs_here(find_task("last-uses")) and runs_here(track()[0]) == (sys.version_info < (3, 13))
    monkeypatch.setattr(commands, "runs_here", lambda task: False)
    for words in (["start", "tiny-cut"], ["grade", "tiny-cut"], ["run", "tiny"], ["run", "tiny-train"], ["run", "tiny-loop"]):
        said = CliRunner().invoke(app, [*words, "--dir", str(tmp_path)]).exception
        assert isinstance(said, ExerciseError) and "3.11 or 3.12" in str(said)


@reads_bytecode
def test_commands(tmp_path):
    def run(*words):
        return CliRunner().invoke(app, [*words, "--dir", str(tmp_path)])
    assert run("start", "tiny-loop").exit_code == run("start", "tiny-record").exit_code == 0
    assert isinstance(run("start", "tiny-loop").exception, ExerciseError)
    said = run("run", "tiny", "--mine").exception
    assert isinstance(said, ExerciseError) and "done yet" in str(said)
    file = tmp_path / "tiny.py"
    file.write_text(begun_again(file.read_text(), track()[0]).replace("raise NotDone('tiny-loop')", "m.pop(1)"))
    assert run("reset", "tiny-loop").exit_code == 0 and "NotDone('tiny-loop')" in file.read_text()
    assert "m.pop(1)" in next((tmp_path / "backup").iterdir()).read_text() and "def recorded" in file.read_text()
    done = run("grade", "--seed", "1")
    assert done.exit_code == 1 and "tiny-guard" not in done.output
    assert "tiny-loop: 0 of" in done.output and "tiny-record: 0 of" in done.output
