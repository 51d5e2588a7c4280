"""The soak says what it found, and its exit status does."""
import time

from tests import soak


def test_one_verdict():
    said = []

    def clean(seconds, seed, jobs, number):
        return soak.Found(f"clean part, round {number}, seed {seed}")

    def wrong(seconds, seed, jobs, number):
        return soak.Found("second part", "line 1\nline 2" if number == 1 else "")

    assert soak.soak(0.001, 5, 1, {clean: 1.0}, said.append) and "nothing wrong" in said[-1]
    assert not soak.soak(12, 5, 1, {clean: 0.5, wrong: 0.5}, said.append)
    assert "1 parts found something: second part" in said[-1] and "line 1\nline 2" in said
    assert any("round 1, seed 1000005" in line for line in said)


def test_a_part_that_does_not_end_is_ended():
    start = time.monotonic()
    assert soak.process(["-c", "print('begun', flush=True); import time; time.sleep(100)"], 2.0) == (None, "begun\n")
    assert time.monotonic() - start < 60
    assert soak.process(["-c", "raise SystemExit(3)"], 60)[0] == 3


def test_no_result_is_wrong(monkeypatch):
    monkeypatch.setattr(soak, "process", lambda *a, **k: (-11, "Segmentation fault"))
    for part in (soak.python_programs, soak.tensor_programs, soak.programs_alone, soak.threads, soak.zoo):
        assert "Segmentation fault" in part(1.0, 0, 1, 0).wrong


def test_models_that_are_not_right(monkeypatch):
    def ran(command, seconds, **env):
        folder = command[command.index("--out") + 1]
        with open(f"{folder}/results.jsonl", "w") as file:
            file.write('{"commit": "x"}\n{"model": "a", "work": "training", "verdict": "pass"}\n'
                       '{"model": "b", "work": "inference", "verdict": "crash", "error": "ended by SIGSEGV"}\n')
        return None, ""
    monkeypatch.setattr(soak, "process", ran)
    found = soak.zoo(1.0, 0, 1, 0)
    assert found.words.startswith("2 works") and found.wrong == "b inference: crash: ended by SIGSEGV"


def test_threads_notice_a_difference(monkeypatch):
    monkeypatch.setattr(soak, "BACKENDS", (lambda gm, inputs: lambda *a: tuple(t + 1 if t.is_floating_point() else t for t in gm(*a)),))
    monkeypatch.setattr(soak, "SOURCES", ("def f(x, w):\n    return x * K @ w",))
    assert "not close" in soak.run_threads(20.0, 1)["wrong"][0]
