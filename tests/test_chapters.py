"""The narratives: every cell runs, every name and every chapter that they point at exists."""
import ast
import functools
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import minicompile
from chapters import _lib
from tools.site import cells, chapter_pages, links, names
from tools.site.chapter_pages import SHOW

minicompile.config.raise_on_internal_error = False        # which _lib sets for the pages

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "chapters").glob("[0-9][0-9]_*.py"))
TEXTS = [*PAGES, ROOT / "chapters" / "tiny.py", *sorted((ROOT / "chapters").glob("*.md"))]
QUICK = {"00", "01"}


def ids(paths):
    return [path.stem for path in paths]


def defined(dotted: str) -> bool:
    """Whether `minicompile.module.name` is a class or a function of that file, as the site will look for it."""
    parts = dotted.split(".")
    for length in range(len(parts) - 1, 0, -1):
        base = ROOT.joinpath(*parts[:length])
        file = base.with_suffix(".py") if base.with_suffix(".py").exists() else base / "__init__.py"
        if file.exists():
            tree = ast.parse(file.read_text())
            found = [tree]
            for name in parts[length:]:
                found = [n for n in (found[0].body if found else ()) if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name == name]
            return bool(found)
    return False


def not_there(dotted: str, begin: str | None, end: str | None) -> list[str]:
    """The words of a `%show` with which no line of the definition begins."""
    try:
        chapter_pages.place_of(book(), dotted, begin, end)
    except KeyError as error:
        return [str(error)]
    return []


@functools.cache
def book():
    return links.Book(names.read_package())


def test_there_is_a_page_for_each_chapter():
    written = {path.stem[:2] for path in PAGES}
    assert written >= {"00"} | {name[2:4] for name in minicompile.CHAPTERS if int(name[2:4]) <= 11}


@pytest.mark.parametrize("path", TEXTS, ids=ids(TEXTS))
def test_links(path):
    text = path.read_text()
    missing = [name for name in re.findall(r"\]\(ref:([\w.]+)\)", text) + re.findall(r"^(?:# )?%show +(\S+)", text, re.M)
               if not defined(name)]
    numbers = {page.stem[:2] for page in PAGES} | {"tiny"}
    missing += [f"{shown[1]} {words}" for shown in SHOW.finditer(re.sub("^# ?", "", text, flags=re.M)) if defined(shown[1])
                for words in not_there(*shown.groups())]
    missing += [n for n in re.findall(r"\]\(chapter:(\w+)\)", text) if n not in numbers]
    missing += [file for file in re.findall(r"\]\(code:([^)#]+)", text) if not (ROOT / file).exists()]
    assert not missing


def test_a_page_begins_with_its_title_and_names_its_exercises():
    for path in PAGES:
        first = _lib.cells(path)[0]
        assert first.kind == "markdown" and first.text.startswith("# "), path.name
        assert "<!-- exercises -->" in path.read_text(), path.name


@pytest.mark.parametrize("path", [p if p.stem[:2] in QUICK else pytest.param(p, marks=pytest.mark.slow) for p in PAGES],
                         ids=ids(PAGES))
def test_runs(path):
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "chapters/_lib.py", str(path)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert time.perf_counter() - start < 60
    assert str(ROOT) not in done.stdout, "a page must not show where it was built"


AS_NOTEBOOK = """
import json, pathlib
namespace = {"__name__": "__main__"}
for n, cell in enumerate(json.load(open("page.ipynb"))["cells"]):
    if cell["cell_type"] == "code":
        file = pathlib.Path(f"cell_{n}.py")
        file.write_text("".join(cell["source"]))
        exec(compile(file.read_text(), str(file.resolve()), "exec"), namespace)
"""


@pytest.mark.parametrize("path", [p if p.stem[:2] == "09" else pytest.param(p, marks=pytest.mark.slow) for p in PAGES], ids=ids(PAGES))
def test_the_notebook_runs_wherever_it_was_saved(path, tmp_path):
    jupytext = pytest.importorskip("jupytext", reason="which `make site` installs")
    from tools.site import build, chapter_pages
    (tmp_path / "page.ipynb").write_text(chapter_pages.notebook(build.read_book(ROOT), path, ROOT))
    made = jupytext.read(tmp_path / "page.ipynb")
    text = "".join(cell["source"] for cell in made["cells"] if cell["cell_type"] == "markdown")
    assert not re.search(r"%show|\]\((ref|chapter|code|exercise):|<!-- exercises", text)
    done = subprocess.run([sys.executable, "-c", AS_NOTEBOOK], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


def test_pictures_have_a_text_alternative():
    chart = _lib.bars([("a", 1.0), ("b", 2.5)], "ms", "Two bars.")
    assert 'role="img" aria-label="Two bars. a: 1 ms; b: 2.5 ms."' in chart._repr_html_() and "b: 2.5 ms" in repr(chart)
    made = [_lib.row_of_boxes([("a", "", "input"), ("b", "", "compute")], "Two boxes."),
            _lib.timeline([("x", 0, 2, "8 B")], 3, "One buffer."), _lib.lines({"f": [(1, 2), (2, 4)]}, "n", "t", "A curve."),
            _lib.drawing({"a": ("a", "", "input"), "b": ("b", "", "compute")}, [("a", "b")], "Two nodes.")]
    for picture in made:
        shown = picture._repr_html_()
        title = re.search(r'aria-labelledby="(\w+)".*?<title id="(\w+)">([^<]+)</title>', shown, re.S)
        assert title[1] == title[2] and title[3].strip() and title[3] in repr(picture)
        assert "http" not in shown.replace("http://www.w3.org/2000/svg", "")


def test_code_in_the_sentences_of_a_walk_is_set_as_code():
    assert "<p>While it runs <code>a &lt; b</code></p>" in _lib.Walk("Frames", [("While it runs `a < b`", 1)])._repr_html_()


def test_a_missing_name_is_noticed():
    assert defined("minicompile.ch05_autograd.partition.choose_saved")
    assert not defined("minicompile.ch05_autograd.partition.no_such_name")


def test_long_cells_of_code_are_introduced():
    """A cell of the package with more than 25 lines of code has at least as many words of prose before it, since the last such cell."""
    bare = []
    for path in sorted((ROOT / "minicompile").glob("ch*/**/*.py")):
        words = 0
        for cell in _lib.cells(path):
            lines = [line for line in cell.text.splitlines() if line.strip() and not line.lstrip().startswith(("#", "import ", "from "))]
            if cell.kind == "markdown":
                words += len(cell.text.split())
            elif len(lines) > 25:
                if words < len(lines):
                    bare.append(f"{path.relative_to(ROOT)}:{cell.line}: {words} words before {len(lines)} lines")
                words = 0
    assert bare == []


def test_formulas_are_written_as_code():
    """The site sets no mathematics: between dollars it would stand as it is typed."""
    typed = []
    for path in [*TEXTS, *sorted((ROOT / "minicompile").rglob("*.py")), ROOT / "README.md", ROOT / "ARCHITECTURE.md"]:
        prose = "\n".join(cell.text for cell in _lib.cells(path) if cell.kind == "markdown") if path.suffix == ".py" else path.read_text()
        for line in re.sub(r"`[^`]*`", "", prose).splitlines():
            if not line.startswith("    ") and re.search(r"\$\$|\$[^\s$][^$]*\$|\\[a-z]{2,}\b", line):
                typed.append(f"{path.name}: {line}")
    assert typed == []


def test_rows_of_tables_are_lines():
    """Of a table whose lines were joined, as those of a paragraph are, the site shows the text."""
    joined = [f"{path.name}: {line}" for path in [*TEXTS, *sorted((ROOT / "minicompile").rglob("*.py"))]
              for line in path.read_text().splitlines() if re.search(r"\w.*\|---|\|---.*\w", line) and line.startswith(("# ", "|"))]
    assert joined == []


# Names of torch.compile, of CPython 3.11, and of examples within a sentence
OF_OTHERS = {"cpp_wrapper", "POP_JUMP_FORWARD_IF_TRUE", "POP_JUMP_IF_TRUE", "mu_product", "d_loss", "g_loss",
             "float32_tensor", "int64_tensor", "m_i", "q_i", "NN_name", "__restrict__", "c_attn", "make_fx"}


def test_names_in_the_prose_are_names_of_the_code():
    """A name with an underscore that the prose of a module sets as code is there in the package, its tools and chapters, or in PyTorch."""
    code, prose = set(OF_OTHERS), {}
    for path in sorted(p for folder in ("minicompile", "exercises", "tests", "tools", "chapters") for p in (ROOT / folder).rglob("*.*")
                       if p.suffix in (".py", ".c", ".cpp", ".h", ".js")):
        text = path.read_text()
        if path.suffix == ".py" and re.search("^# %%", text, re.M):
            split = _lib.cells(path)
            prose[path] = "\n".join(cell.text for cell in split if cell.kind == "markdown") if "minicompile" in path.parts else ""
            text = "\n".join(re.sub("^#.*", "", cell.text, flags=re.M) for cell in split if cell.kind == "code")
        code.update(re.findall(r"\w+", text) if not {"tests", "exercises"} & {*path.parts} else (), [path.stem])
    prose.update({path: path.read_text() for path in (ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "chapters" / "glossary.md")})
    unknown = []
    for path, text in prose.items():
        for name in re.findall(r"\b[A-Za-z_]\w*", " ".join(re.findall(r"`([^`\n]+)`", text))):
            known = name in code or any(hasattr(place, name) for place in (torch, torch.fx, torch.nn.Module, torch.ops.aten))
            if re.search(r"[A-Za-z0-9]_[A-Za-z]", name) and not known:
                unknown.append(f"{path.relative_to(ROOT)}: {name}")
    assert unknown == []


def lines_of_code(text: str, first: int, last: int) -> int:
    """Lines that hold code, from `first` to `last`: no blanks, no comments, no docstrings."""
    words = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            words |= set(range(node.lineno, node.end_lineno + 1))
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") and first <= n <= last and n not in words
               for n, line in enumerate(text.splitlines(), 1))


def test_chapters_have_no_long_cells():
    """What a page shows at once, of its own cells and of the package, has at most 15 lines of code. Folded is what a reader may skip,
    and what answers an exercise."""
    long = []
    for path in [*PAGES, ROOT / "chapters" / "tiny.py"]:
        for cell in cells.split(path.read_text()):
            shown = []
            if cell.kind == "code" and not any(tag.startswith("exercise:") for tag in cell.tags):
                begin, end = chapter_pages.visible(cell)
                shown.append((cell.line, lines_of_code(cell.source, begin + 1, end)))
            for found in SHOW.finditer(cell.source if cell.kind == "markdown" else ""):
                module, first, last = chapter_pages.place_of(book(), *found.groups())
                if not links.solution(book(), module, found[1].removeprefix(f"{module.name}.")):
                    shown.append((cell.line, lines_of_code(module.source, first, last)))
            long += [f"{path.name}:{line}: {count} lines" for line, count in shown if count > 15]
    assert long == []
