"""The fast part of the site's tests: the renderer on tiny pages. `python -m tools.site.browser` looks at the finished site."""
import pathlib
import re
import textwrap

import pytest
from test_chapters import book

from tools.site import SiteError, build, cells, chapter_pages, code_pages, execute, explorers, highlight, links, names, pages
from tools.site.page import HOLE, PLACE, Page


@pytest.fixture(scope="module")
def modules():
    return book().modules


@pytest.fixture(scope="module")
def prepared():
    """What the processes that run pages inherit, imported once."""
    execute.prepare()


@pytest.fixture
def folder(tmp_path, prepared):
    (tmp_path / "chapters").mkdir()
    return tmp_path


def page_in(folder: pathlib.Path, text: str) -> pathlib.Path:
    path = folder / "chapters" / "42_tiny.py"
    path.write_text(textwrap.dedent(text))
    return path


def test_a_page_shows_what_its_cells_print_and_return(folder, modules):
    path = page_in(folder, """\
        # %% [markdown]
        # # Tiny
        #
        # See [](ref:minicompile.driver.Counters).

        # %%
        print("said")
        6 * 7
        """)
    results = execute.run_page(path, folder)
    assert [o["text"] for o in results[0]] == ["said", "42"]
    book = links.Book(modules)
    page = chapter_pages.chapter_page(book, path, "", folder)
    chapter_pages.fill(book, page, path, results, folder)
    assert page.title == "Tiny" and not book.findings
    line = modules["minicompile.driver"].definitions["Counters"].line
    assert f"[`Counters`](../code/driver.html#L{line})" in "".join(page.parts)
    assert "said" in "".join(page.blocks) and "42" in "".join(page.blocks)


def test_a_long_line_goes_on_below_itself_further_in_than_it_begins():
    text = highlight.numbered(highlight.lines_of('def f():\n    """A.\n        B < 1"""\n\n    return 2'), 7)
    assert re.findall("<i([^>]*)>", text) == [" id=L7", " id=L8 style=--i:4", " id=L9 style=--i:8", " id=L10", " id=L11 style=--i:4"]
    assert "  B &lt; 1" in text and "mc-lines" in text and "mc-lines" in highlight.plain("x")


def test_titles_are_plain_text(modules):
    assert cells.title(cells.split("# %% [markdown]\n# # One `compile`"), "") == "One compile"
    assert not [m.path for m in modules.values() if "`" in m.title]


def test_the_names_of_a_module_are_listed_by_section(modules):
    text = code_pages.header(modules["minicompile.ch08_fusion.reference"])
    said = re.sub("<[^>]*>", "", text.replace("<br>", "; "))
    assert said.endswith("run_kernel, emit_reference, load_reference; What a kernel must obey: verify_kernel, verify_schedule")
    assert 'href="#what-a-kernel-must-obey"' in text


@pytest.mark.parametrize("target", ["ref:minicompile.driver.Countess", "chapter:77", "code:minicompile/no.py", "exercise:none",
                                    "code:minicompile/driver.py#L99999"])
def test_an_unknown_target_is_a_finding_with_its_line(modules, target):
    book = links.Book(modules)
    links.rewrite(book, "chapters/42_tiny", f"one\n[two]({target})", "chapters/42_tiny.py:10")
    assert book.findings == [f"chapters/42_tiny.py:11: no such {target.partition(':')[0]}: {target.partition(':')[2]}"]


def test_an_unknown_name_to_show_is_a_finding(folder, modules):
    path = page_in(folder, "# %% [markdown]\n# # Tiny\n#\n# %show minicompile.driver.nothing\n")
    book = links.Book(modules)
    chapter_pages.chapter_page(book, path, "", folder)
    assert book.findings == ["chapters/42_tiny.py:4: no such name to show: minicompile.driver.nothing"]


def test_a_part_of_a_definition_is_shown_by_the_words_it_begins_with(folder, modules):
    def shown(line):
        book = links.Book(modules)
        page = chapter_pages.chapter_page(book, page_in(folder, f"# %% [markdown]\n# # Tiny\n#\n# %show {line}\n"), "", folder)
        return "".join(page.blocks), book.findings
    name = "minicompile.ch05_autograd.maxflow.add_edge"
    whole, first = shown(name)[0], modules["minicompile.ch05_autograd.maxflow"].definitions["add_edge"].first
    part, findings = shown(name + ' "for tail" to "net.head"')
    assert not findings and f"lines {first + 1} to {first + 3}<" in part and "counter-reset:l " + str(first) in part
    assert whole.count("<i") == 5 and part.count("<i") == 3 and shown(name + ' "for tail"')[0].count("<i") == 4
    assert shown(name + ' "net.room"  to "for tail"')[1] == [f'chapters/42_tiny.py:4: no such name to show: {name} "for tail"']


def test_an_exception_fails_with_its_line_and_outputs_are_cached(folder):
    path, cache = page_in(folder, "# %%\n1\n\n# %%\n1 / 0\n"), folder / "cache"
    outputs, failures = execute.outputs([path], cache, folder)
    assert failures == ["chapters/42_tiny.py:5: ZeroDivisionError: division by zero"] and not outputs
    page_in(folder, "# %%\nimport time\ntime.perf_counter_ns()\n")
    first, failures = execute.outputs([path], cache, folder)
    assert not failures and execute.outputs([path], cache, folder)[0] == first        # not run again
    page_in(folder, "# %%\nimport time\n\ntime.perf_counter_ns()\n")
    assert execute.outputs([path], cache, folder)[0] != first


def test_a_cell_that_prints_has_to_show_something(folder):
    path = page_in(folder, "# %%\nfound = []\n\n# %%\nfor x in found:\n    print(x)\n")
    outputs, (failure,) = execute.outputs([path], folder / "cache", folder)
    assert failure.startswith("chapters/42_tiny.py:") and "this cell prints" in failure and not outputs
    page_in(folder, "# %%\ndef f():\n    print(1)\n\nif False:\n    print(2)\n")
    assert execute.outputs([path], folder / "cache", folder) == ({"42_tiny": [[]]}, [])


CLOCK = "import time\ntime.perf_counter_ns()\n"
MODULE = "# %% [markdown]\n# # Prose\n\n# %%\ndef f():  # why\n    return 1\n"


@pytest.fixture
def ran(folder):
    """Writes files, runs the page when it has to, and says whether it ran."""
    last = {}

    def ran(**texts):
        for name, text in texts.items():
            path = folder / {"page": "chapters/42_tiny.py", "module": "minicompile/part.py", "unused": "minicompile/other.py",
                             "data": "results/data.json"}[name]
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        found, failures = execute.outputs([folder / "chapters" / "42_tiny.py"], folder / "cache", folder)
        assert not failures
        same, last["found"] = last.get("found") == found, found
        return not same

    return ran


LOAD = """# %%
import importlib.util, sys
spec = importlib.util.spec_from_file_location("part", "minicompile/part.py")
part = sys.modules["part"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(part)
"""


def test_prose_and_comments_do_not_run_a_page_again_but_code_does(ran):
    assert ran(page=LOAD + CLOCK, module=MODULE, unused="x = 1\n")
    assert not ran()
    assert not ran(module=MODULE.replace("Prose", "Other prose\n#\n# longer").replace("# why", "# why not"))
    assert not ran(page="# %% [markdown]\n# More words.\n\n" + LOAD + CLOCK)
    assert ran(module=MODULE.replace("return 1", "return 2"))
    assert ran(module=MODULE.replace("return 1", '"""A docstring can be shown."""'))
    assert not ran(unused="x = 2\n")                                    # a module that the page has not loaded
    assert ran(page=LOAD + "# a comment in a cell is shown\n" + CLOCK)


def test_a_page_that_shows_source_runs_again_when_its_text_changes(ran):
    assert ran(page=LOAD + "import inspect\nprint(inspect.getsource(part.f))\n" + CLOCK, module=MODULE)
    assert not ran()
    assert ran(module=MODULE.replace("# why", "# why not"))


def test_a_page_whose_outputs_name_a_file_runs_again_when_its_lines_move(ran):
    page = LOAD + "print(f'part.py:{part.f.__code__.co_firstlineno}')\n" + CLOCK
    assert ran(page=page, module=MODULE)
    assert ran(module="\n" + MODULE)
    assert not ran(page="# %% [markdown]\n# Words.\n\n" + page)        # its own name is not among them
    own = LOAD + "print('42_tiny.py:5')\n" + CLOCK
    assert ran(page=own) and ran(page="# %% [markdown]\n# Words.\n\n" + own)
    assert not ran(page="# %% [markdown]\n# Other words.\n\n" + own)   # the lines stand where they stood


def test_a_page_runs_again_when_a_file_that_it_read_changes(ran):
    assert ran(page="# %%\nimport pathlib\nprint(pathlib.Path('results/data.json').read_text())\n" + CLOCK, data="1", unused="x = 1\n")
    assert not ran(unused="x = 2\n")
    assert ran(data="2")


def test_what_was_edited_while_a_page_ran_is_not_taken_for_what_it_read(ran):
    page = "# %%\nimport pathlib, time\nfile = pathlib.Path('results/data.json')\nprint(file.read_text())\n"
    assert ran(page=page + "time.sleep(0.05)\nfile.write_text('later')\n" + CLOCK, data="first")
    assert ran()


def test_a_code_page_is_made_again_when_what_it_links_to_moves(modules):
    import copy
    book = links.Book(modules)
    module = modules["minicompile.ch08_fusion.fuse"]
    page, kept = code_pages.module_page(book, module)
    assert code_pages.module_page(book, module, kept)[0].blocks is kept[1]
    origin, name = next(v for v in module.imports.values() if v[0] in modules and v[1] in modules[v[0]].definitions)
    moved = links.Book({**modules, origin: copy.deepcopy(modules[origin])})
    moved.modules[origin].definitions[name].line += 1000
    assert code_pages.module_page(moved, module, kept)[0].blocks != kept[1]


def test_a_changed_block_reaches_the_page_without_mkdocs(tmp_path):
    (tmp_path / ".site/html").mkdir(parents=True)
    (tmp_path / ".site/html/a.html").write_text("<p>before</p>" + PLACE.format(0) + PLACE.format(1))
    page, said = Page("a", "A"), []
    page.block("<b>one</b>")
    page.block(f"<i>{HOLE}</i>")
    page.fill(["two"])
    build.publish(tmp_path, {"a": page}, said.append)
    made = tmp_path / "site" / "a.html"
    assert made.read_text() == "<p>before</p><b data-search-exclude>one</b><i data-search-exclude>two</i>"
    build.publish(tmp_path, {"a": page}, said.append)
    page.blocks[0] = "three"
    made.touch()                                                       # edited by hand: written again
    build.publish(tmp_path, {"a": page}, said.append)
    assert "three" in made.read_text() and said == ["1 file has changed", "nothing has changed", "1 file has changed"]
    page.blocks[0] = '<a href="gone.html">'
    with pytest.raises(SiteError, match="no such page: gone.html"):
        build.publish(tmp_path, {"a": page}, said.append)
    with pytest.raises(SiteError):                                     # also when nothing has changed since
        build.publish(tmp_path, {"a": page}, said.append)


def test_a_recorded_result_is_shown_only_while_its_cell_is_the_same(folder, modules):
    path = page_in(folder, '# %% tags=["gpu-result"]\nmeasure()\n')
    book = links.Book(modules)
    chapter_pages.fill(book, chapter_pages.chapter_page(book, path, "", folder), path, [None], folder)
    assert "no recorded result" in book.findings[0]


def test_a_cell_of_measurements_says_where_they_were_made(folder, modules):
    import json
    source = """# %% tags=["gpu-result", "results:h100-a"]\nimport json, pathlib\njson.loads(pathlib.Path("results", "h100-a" +
    ".json").read_text())["ms"]\n"""
    path, file = page_in(folder, source), folder / "results" / "h100-a.json"

    def findings_and_page():
        book, page = links.Book(modules), chapter_pages.chapter_page(links.Book(modules), path, "", folder)
        outputs, failures = execute.outputs([path], folder / "cache", folder)
        chapter_pages.fill(book, page, path, outputs.get("42_tiny", []), folder)
        return book.findings + failures, "".join(page.blocks)

    file.parent.mkdir()
    file.write_text(json.dumps({"ms": 1.25, "commit": "abc123", "versions": {"torch": "2"}, "hardware": {"gpu": "H100"}}))
    findings, shown = findings_and_page()
    assert not findings and "1.25" in shown and "Measured on H100, torch 2: h100-a at commit abc123" in shown
    file.write_text(json.dumps({"ms": 2.5, "commit": "def456", "versions": {"torch": "2"}, "hardware": {"gpu": "H100"}}))
    assert "2.5" in findings_and_page()[1]                              # never what an older file said
    file.write_text(json.dumps({"ms": 3, "commit": "abc123", "versions": {"torch": "2"}, "hardware": {"gpu": None, "cpu": "EPYC"}}))
    assert "Measured on EPYC, torch 2" in findings_and_page()[1]
    for damaged in ({"ms": 1, "commit": "abc123", "versions": {}, "hardware": {}}, {"ms": 1, "versions": {}, "hardware": {"gpu": "H100"}}):
        file.write_text(json.dumps(damaged))
        assert "42_tiny.py:2: no measurement that this cell reads" in findings_and_page()[0][0]
    page_in(folder, source.replace("results:h100-a", "results:h100-b"))
    assert "no measurement that this cell reads" in findings_and_page()[0][0]


def test_a_package_that_cannot_be_imported_is_one_finding(folder, monkeypatch):
    monkeypatch.setattr(execute, "prepare", lambda root: {}["gone"])
    said = []
    assert execute.outputs([page_in(folder, "# %%\n1\n")], folder / "cache", folder, said.append) == ({}, ["KeyError: 'gone'"])


def test_a_page_that_failed_and_a_heading_in_a_code_cell_are_findings_and_nothing_else(folder, modules):
    path, book = page_in(folder, "# %%\nimport os\n\n# %%\n1\n#\n# ## A lost heading\n"), links.Book(modules)
    page = chapter_pages.chapter_page(book, path, "", folder)
    chapter_pages.fill(book, page, path, [], folder)
    assert book.findings == ["chapters/42_tiny.py:7: a heading in a code cell: # %% [markdown] is missing"]
    assert "<summary>Imports</summary>" in page.blocks[0] and "<summary>" not in page.blocks[1]


def test_cells_know_their_lines_and_tags():
    found = cells.split('# %% [markdown]\n# # T\n\n# %% tags=["exercise:a", "hide-input"]\n\nx = 1\n')
    assert [(c.kind, c.line, c.tags) for c in found] == [("markdown", 2, ()), ("code", 6, ("exercise:a", "hide-input"))]


def test_highlighting_keeps_the_text():
    import html
    import re
    source = 'def f(a="<&>"):  # why\n    """two\n    lines"""\n    return a < 1\n'
    shown = [html.unescape(re.sub(r"<[^>]+>", "", line)) for line in highlight.lines_of(source)]
    assert shown == source.splitlines()


def test_every_tagged_exercise_and_every_chapter_has_code(modules):
    chapters = names.chapter_names(modules)
    assert chapters[0] == "ch01_graphs" and all(any(m.chapter == c for m in modules.values()) for c in chapters)


def test_the_answer_of_every_exercise_is_folded_away(modules):
    book = links.Book(modules)
    book.exercises = pages.read_exercises(modules, pathlib.Path(__file__).parent.parent)
    for module in modules.values():
        shown = "".join(code_pages.module_page(book, module)[0].blocks)
        assert len(re.findall(r" id=L\d+[ >]",
                              shown)) == sum(len(c.source.splitlines()) for c in module.cells if c.kind == "code"), module.path
        for exercise in module.exercises:
            name = next(n for n in module.definitions if links.solution(book, module, n) == exercise)
            d, folded = module.definitions[name], re.search(rf"<details[^>]*><summary>[^<]*solves exercise "
                                                            rf"{exercise}</summary>(.*?)</details>", shown, re.S)
            assert [int(n) for n in re.findall(r" id=L(\d+)[ >]", folded[1])] == list(range(d.body, d.end + 1)), exercise
    assert "<details>" in chapter_pages.fenced(book, "minicompile.ch08_fusion.fuse.score")
    assert "<details " in chapter_pages.source_of(book, "chapters/08_fusion", "minicompile.ch08_fusion.fuse.score")


def test_imports_are_folded_away_on_a_code_page(modules):
    book = links.Book(modules)
    shown = "".join(code_pages.module_page(book, modules["minicompile.ch08_fusion.fuse"])[0].blocks)
    [folded] = re.findall(r'<details class="mc-fold"><summary>Imports</summary>(.*?)</details>', shown, re.S)
    text, rest = (re.sub("<[^>]+>", "", part) for part in (folded, shown.partition(folded)[2]))
    assert "from collections import defaultdict" in text and "def " not in text and "import " not in rest and "def fuse" in rest


def test_a_function_of_tiny_that_answers_an_exercise_is_folded_away_where_a_chapter_prints_it(folder, modules):
    (folder / "chapters" / "tiny.py").write_text(
        '# %% tags=["exercise:tiny-double"]\ndef double(x):\n    return x + x\n\n\n# %%\ndef half(x):\n    return x / 2\n')
    path = page_in(folder, """\
        # %% [markdown]
        # # Tiny

        # %%
        import inspect
        from chapters import tiny

        # %%
        print(inspect.getsource(tiny.double))

        # %%
        print(inspect.getsource(tiny.half))
        """)
    book = links.Book(modules, exercises={"tiny-double": {}})
    page = chapter_pages.chapter_page(book, path, "", folder)
    chapter_pages.fill(book, page, path, [[], *([{"kind": "text", "text": t}] for t in ("return x + x", "return x / 2"))], folder)
    parts = [part for block in page.blocks for part in re.findall("<details.*?</details>", block, re.S)]
    folded = "".join(part for part in parts if "solves exercise" in part)
    assert "return x + x" in folded and "return x / 2" not in folded and "return x / 2" in "".join(page.blocks)


def test_the_commands_that_the_exercises_page_shows_exist(modules, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from exercises.__main__ import app
    book = links.Book(modules)
    book.exercises = pages.read_exercises(modules, pathlib.Path(__file__).parent.parent)
    shown = [command.removeprefix("python -m exercises ").split() for command, _ in pages.commands(book, names.chapter_names(modules))]
    assert {words[0] for words in shown} >= {"start", "watch", "hint", "grade", "run"}
    monkeypatch.chdir(tmp_path)
    for words in shown:
        if words[0] in ("start", "hint", "status"):
            done = CliRunner().invoke(app, words)
            assert done.exit_code == 0, done.output
        else:                                       # these wait, grade or train; their arguments are checked all the same
            command = next(c for c in app.registered_commands if (c.name or c.callback.__name__) == words[0])
            assert len(words) == 1 or words[1] in (*book.exercises, "nanogpt", "tiny"), command
    assert (tmp_path / "my" / f"{shown[0][1]}.py").exists()


def test_a_finished_site_with_a_broken_link_is_refused(tmp_path):
    (tmp_path / "a.html").write_text('<p id="here"><a href="b.html">x</a><a href="#gone">y</a><a href="#here">z</a></p><script src="https://e.org/x.js"></script>')
    assert sorted(links.check_site(tmp_path)) == ["a.html: <script> loads https://e.org/x.js", "a.html: no such anchor: #gone",
                                                   "a.html: no such page: b.html"]


PAGES = """\
# %% [markdown]
# # Tiny
#
# ## First
#
# ### Detail

# %%
print("one")

# %% [markdown] tags=["page"]
# ## Second
#
# See [](exercise:none).
#
# ### Inside

# %%
print("two")

# %% [markdown]
# ### Deeper
#
# ## Third
#
# ### Again
"""


def test_a_long_chapter_is_several_pages_that_follow_one_another(folder, modules):
    path = page_in(folder, PAGES)
    book = links.Book(modules, chapters={"42": "chapters/42_tiny"})
    first = chapter_pages.chapter_page(book, path, "", folder)
    chapter_pages.fill(book, first, path, execute.run_page(path, folder), folder)
    (second,) = first.rest
    assert (first.title, second.title, second.address) == ("Tiny", "Second", "chapters/42_tiny_2")
    assert book.findings == ["chapters/42_tiny.py:14: no such exercise: none"]
    assert "one" in first.blocks[0] and "two" in second.blocks[0] and len(first.blocks) == len(second.blocks) == 1
    headings = [line for part in second.parts for line in part.split("\n") if line.startswith("#")]
    assert headings == ["# Second", "## Inside", "## Deeper", "## Third", "### Again"]
    assert any("42_tiny.ipynb" in part for part in second.parts) and not any("ipynb" in part for part in first.parts)
    around = build.neighbours(book, [], {p.address: p for p in (first, second)})
    assert around["chapters/42_tiny"] == ("index", "chapters/42_tiny_2") and around["chapters/42_tiny_2"] == ("chapters/42_tiny", "")


def test_code_pages_hang_below_their_chapter_and_lead_to_the_next(modules):
    chapters = names.chapter_names(modules)[:2]
    book = links.Book(modules, chapters={c[2:4]: f"chapters/{c[2:]}" for c in chapters})
    made = {f"chapters/{c[2:]}": Page(f"chapters/{c[2:]}", c, c) for c in chapters}
    around = build.neighbours(book, chapters, made)
    first, second = made
    code = [m.page for m in names.reading_order([m for m in modules.values() if m.chapter == chapters[0]])]
    assert around[first] == ("index", second) and around[code[0]] == (first, code[1]) and around[code[-1]][1] == second


def test_code_pages_come_in_the_order_in_which_the_opening_of_the_chapter_names_them(modules):
    order = names.reading_order([m for m in modules.values() if m.chapter == "ch07_loops"])
    pages = [m.page.rpartition("/")[2] for m in order if not m.is_coverage]
    assert pages[:4] == ["init", "ir", "builder", "lazy"] and pages[-3:] == ["lower", "reference", "verify"]
    assert [m.is_coverage for m in order] == sorted(m.is_coverage for m in order)


def shown(source):
    return chapter_pages.shown_code(cells.Cell("code", textwrap.dedent(source).strip(), 1))


def test_imports_and_the_code_of_pictures_are_folded():
    text = shown("""
        import a
        import b
        from c import (d,
                       e)

        value = d(a)
        bars(
            [("one", value)],
            "ms",
        )
        """)
    imports, _, rest = text.partition("</details>")
    code, _, drawing = rest.partition("<details")
    assert "Imports" in imports and "import" in imports and "value" in code and "bars" not in code and "import" not in code
    assert "The code that draws this" in drawing and "bars" in drawing
    assert "<details" not in shown("import a\nbars([a])") and shown("x = bars(\n1,\n2)\nx") == highlight.plain("x = bars(\n1,\n2)\nx")


def test_the_front_page_draws_the_committed_measurements():
    data = (pathlib.Path(__file__).parent.parent / "results" / "h100-gpt2.json").read_text()
    import json
    ms = {r["task"]["compiler"]: r["ms"] for r in json.loads(data)["results"]}
    picture = pages.measured(pathlib.Path(__file__).parent.parent)
    assert f"{ms['minicompile']:.1f} ms" in picture and f"minicompile {ms['minicompile']:.1f}" in picture and 'role="img"' in picture


LISTING = """# %%
import torch
import minicompile
from minicompile import logs

def curve(x):
    return torch.tanh(x * 2) + 1

seen = []
logs.watchers.append(lambda kind, **data: seen.append(data["compiled"]) if kind == "schedule" else None)
curved = minicompile.compile(curve)(torch.linspace(0, 1, 10))

# %%
print(seen[0].sources[0].code)

# %%
print("nothing that was generated\\nfor (a; b; c)\\nx = y + 1234567")
"""


def test_a_generated_listing_opens_in_the_explorer_of_its_graph(folder, modules):
    path = page_in(folder, LISTING)
    first, listing, other = execute.run_page(path, folder)
    assert not first and "explorer" not in other[0] and listing[0]["explorer"].startswith("explore/42_tiny-1.html#at=a-cpp-")
    line = listing[0]["explorer"].partition("#at=")[2].partition("&")[0]
    assert f'id="{line}"' in listing[0]["page"] and "torch.tanh(x * 2) + 1" in listing[0]["page"]
    assert re.search(r"1 graph, 0 graph breaks, 3 operations, [1-9]\d* guards", listing[0]["page"])
    shown = execute.output_html(listing)
    assert 'href="../explore/42_tiny-1.html#at=a-cpp-' in shown and "<!doctype" not in shown
    explorers.write_all({"42_tiny": [first, listing, other], "stepper": {"steps": [{"op": "x"}]}}, folder / "files")
    assert [p.name for p in (folder / "files" / "explore").iterdir()] == ["42_tiny-1.html"]
    explorers.write_all({}, folder / "files")
    assert not list((folder / "files" / "explore").iterdir())


MADE_BY_HAND = """# %%
import torch
from minicompile.ch01_graphs.fake import FakeMode
from minicompile.ch01_graphs.graph import print_graph
from minicompile.ch01_graphs.trace import trace

def doubled(x):
    x.mul_(2)
    return [x + torch.rand(3)]

x = torch.ones(3)

# %% tags=["explore:doubled(x)"]
print(print_graph(trace(doubled, [FakeMode().from_real(x)], ["x"])))

# %%
print(x.tolist())
"""


def test_a_listing_of_one_stage_opens_in_the_explorer_of_the_call_that_its_tag_names(folder):
    import torch
    before = torch.get_rng_state()
    _, (listing,), (after,) = execute.run_page(page_in(folder, MADE_BY_HAND), folder)
    assert torch.equal(torch.get_rng_state(), before) and "[1.0, 1.0, 1.0]" in after["text"]
    assert listing["explorer"].startswith("explore/42_tiny-1.html#at=a-") and "x.mul_(2)" in listing["page"]
    with pytest.raises(SiteError):
        execute.run_page(page_in(folder, MADE_BY_HAND.replace("explore:doubled(x)", "explore:abs(1)")), folder)


def test_explorers_have_a_budget_of_their_own(tmp_path):
    (tmp_path / "explore").mkdir()
    text = '<p id="a-cpp-1"></p>' + "x" * 300_000
    (tmp_path / "explore" / "one.html").write_text(text)
    (tmp_path / "page.html").write_text('<a href="explore/one.html#at=a-cpp-1&amp;panes=cpp">here</a>')
    assert links.check_site(tmp_path) == []
    (tmp_path / "page.html").write_text('<a href="explore/one.html#at=a-cpp-2">here</a>' + text)
    assert links.check_site(tmp_path) == ["page.html: 300 kB of HTML, which is too much",
                                          "page.html: no such anchor: explore/one.html#at=a-cpp-2"]


def test_the_explorer_of_ones_own_function_is_a_line_on_every_page(tmp_path, modules):
    from types import SimpleNamespace

    from tools.site import hooks
    (tmp_path / "docs").mkdir()
    (tmp_path / "strip.json").write_text('{"": ""}')
    for address, up in (("index", ""), ("chapters/00_tour", "../"), ("code/explore/page", "../../")):
        page = SimpleNamespace(file=SimpleNamespace(src_uri=f"{address}.md"), meta={})
        made = hooks.on_page_content("<p>text</p>", page, {"docs_dir": str(tmp_path / "docs")}, None)
        assert f'href="{up}explorer.html"' in made and "python -m minicompile explore FILE:FUNCTION" in made
    page = explorers.page(links.Book(modules), {})
    assert all(f'href="explore/{name}.html"' in page.blocks[-1] for name in ("tour", "gpt", "resnet", "training_step", "attention"))
