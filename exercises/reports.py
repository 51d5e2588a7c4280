"""Results as JSON, JUnit XML, Gradescope's results.json and GitHub Classroom's autograding result."""
from __future__ import annotations

import json
import xml.etree.ElementTree as ET

from .grade import Outcome, Result


def detail(o: Outcome) -> str:
    """What went wrong with one behaviour, small: the first wrong case."""
    rows = [("input", o.input), ("first difference", o.where), ("expected", o.expected), ("got", o.got)]
    lines = [o.message] if o.message else []
    for name, text in rows:
        if text:
            head, *rest = str(text).splitlines() or [""]
            lines.append(f"{name}: {head}" if not rest else f"{name}:\n    " + "\n    ".join([head, *rest]))
    return "\n".join(lines)


def text(results: list[Result]) -> str:
    lines = []
    for r in results:
        lines.append(f"{r.id}: {r.earned} of {r.points} points")
        for o in r.outcomes:
            lines.append(f"  [{'x' if o.status == 'passed' else ' '}] {o.name} ({o.earned}/{o.points})" +
                         (f": {o.status}" if o.status != "passed" else ""))
        # the first failure in full: later ones often follow from it. Wrong predictions do not.
        failed = [o for o in r.outcomes if o.status not in ("passed", "skipped")]
        for o in [o for o in failed if o.predicted and o.status == "wrong"] or failed[:1]:
            lines += [f"    {line}" for line in detail(o).splitlines()]
    total = f"{sum(r.earned for r in results)} of {sum(r.points for r in results)} points"
    return "\n".join(lines + ([f"Total: {total}"] if len(results) != 1 else []))


def as_json(results: list[Result]) -> str:
    return json.dumps({"version": 1, "earned": sum(r.earned for r in results), "points": sum(r.points for r in results),
                       "exercises": [r.as_dict() for r in results]}, indent=1)


def junit(results: list[Result]) -> str:
    root = ET.Element("testsuites", name="minicompile exercises")
    for r in results:
        failed = [o for o in r.outcomes if o.status == "wrong"]
        skipped = [o for o in r.outcomes if o.status == "skipped"]
        errors = len(r.outcomes) - len(failed) - len(skipped) - sum(o.status == "passed" for o in r.outcomes)
        suite = ET.SubElement(root, "testsuite", name=r.id, tests=str(len(r.outcomes)), failures=str(len(failed)), errors=str(errors),
                              skipped=str(len(skipped)), time=f"{r.seconds:.3f}")
        for o in r.outcomes:
            case = ET.SubElement(suite, "testcase", classname=f"{r.chapter}.{r.id}", name=o.name, time=f"{o.seconds:.3f}")
            if o.status != "passed":
                tag = {"wrong": "failure", "skipped": "skipped"}.get(o.status, "error")
                note = ET.SubElement(case, tag, message=printable(o.message or o.status))
                if tag != "skipped":
                    note.set("type", o.status)
                    note.text = printable(detail(o))
    return ET.tostring(root, encoding="unicode", xml_declaration=True)


def printable(text: str) -> str:
    """Without the control characters that XML cannot hold."""
    return "".join(c if c in "\n\t" or ord(c) >= 32 and not 0xD800 <= ord(c) < 0xE000 and ord(c) not in (0xFFFE,
        0xFFFF) else "?" for c in text)


def gradescope(results: list[Result]) -> str:
    tests = [{"name": f"{r.id}: {o.name}", "number": f"{i}.{j}", "score": o.earned, "max_score": o.points,
              "status": "passed" if o.status == "passed" else "failed", "output": detail(o), "tags": [r.chapter], "visibility": "visible"}
             for i, r in enumerate(results, 1) for j, o in enumerate(r.outcomes, 1)]
    return json.dumps({"score": sum(r.earned for r in results), "execution_time": round(sum(r.seconds for r in results)),
                       "visibility": "visible",
                       "stdout_visibility": "hidden", "output": text(results), "tests": tests}, indent=1)


def classroom(results: list[Result]) -> str:
    """What a runner hands to GitHub Classroom's grading reporter (before base64)."""
    tests = [{"name": f"{r.id}: {o.name}", "status": {"passed": "pass", "wrong": "fail", "skipped": "fail"}.get(o.status, "error"),
              "score": o.earned, "message": detail(o), "test_code": f"python -m exercises grade {r.id}", "filename": f"{r.id}.py",
              "line_no": 0, "execution_time": f"{o.seconds:.3f}s"} for r in results for o in r.outcomes]
    status = "pass" if results and all(r.passed for r in results) else "fail"
    return json.dumps({"version": 1, "status": status, "max_score": sum(r.points for r in results), "tests": tests}, indent=1)


FORMATS = {"text": text, "json": as_json, "junit": junit, "gradescope": gradescope, "classroom": classroom}
