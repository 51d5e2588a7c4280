"""The fast part of the site's tests: the renderer on tiny pages. `python -m tools.site.browser` looks at the finished site."""
import pathlib
import textwrap

import pytest

from tools.site import cells, chapter_pages, code_pages, execute, highlight, links, names, pages


@pytest.fixture(scope="module")
def modules():
    return names.read_package()


@pytest.fixture
def folder(tmp_path):
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
    page = chapter_pages.chapter_page(book, path, results, "", folder)
    assert page.title == "Tiny" and not book.findings
    line = modules["minicompile.driver"].definitions["Counters"].line
    assert f"[`Counters`](../code/driver.html#L{line})" in "".join(page.parts)
    assert "said" in "".join(page.blocks) and "42" in "".join(page.blocks)


@pytest.mark.parametrize("target", ["ref:minicompile.driver.Countess", "chapter:77", "code:minicompile/no.py", "exercise:none",
                                    "code:minicompile/driver.py#L99999"])
def test_an_unknown_target_is_a_finding_with_its_line(modules, target):
    book = links.Book(modules)
    links.rewrite(book, "chapters/42_tiny", f"one\n[two]({target})", "chapters/42_tiny.py:10")
    assert book.findings == [f"chapters/42_tiny.py:11: no such {target.partition(':')[0]}: {target.partition(':')[2]}"]


def test_an_unknown_name_to_show_is_a_finding(folder, modules):
    path = page_in(folder, "# %% [markdown]\n# # Tiny\n#\n# %show minicompile.driver.nothing\n")
    book = links.Book(modules)
    chapter_pages.chapter_page(book, path, [], "", folder)
    assert book.findings == ["chapters/42_tiny.py:4: no such name to show: minicompile.driver.nothing"]


def test_an_exception_fails_with_its_line_and_outputs_are_cached(folder):
    path, cache = page_in(folder, "# %%\n1\n\n# %%\n1 / 0\n"), folder / "cache"
    outputs, failures = execute.outputs([path], cache, folder)
    assert failures == ["chapters/42_tiny.py:5: ZeroDivisionError: division by zero"] and not outputs
    page_in(folder, "# %%\nimport time\ntime.perf_counter_ns()\n")
    first, failures = execute.outputs([path], cache, folder)
    assert not failures and execute.outputs([path], cache, folder)[0] == first        # not run again
    page_in(folder, "# %%\nimport time\n\ntime.perf_counter_ns()\n")
    assert execute.outputs([path], cache, folder)[0] != first


def test_a_recorded_result_is_shown_only_while_its_cell_is_the_same(folder, modules):
    path = page_in(folder, '# %% tags=["gpu-result"]\nmeasure()\n')
    book = links.Book(modules)
    chapter_pages.chapter_page(book, path, [None], "", folder)
    assert "no recorded result" in book.findings[0]


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
    import pathlib
    import re
    book = links.Book(modules)
    book.exercises = pages.read_exercises(modules, pathlib.Path(__file__).parent.parent)
    for module in modules.values():
        shown = "".join(code_pages.module_page(book, module, "").blocks)
        assert len(re.findall(r" id=L\d+>", shown)) == sum(len(c.source.splitlines()) for c in module.cells if c.kind == "code"), module.path
        for exercise in module.exercises:
            name = next(n for n in module.definitions if links.solution(book, module, n) == exercise)
            d, folded = module.definitions[name], re.search(rf"<details[^>]*><summary>[^<]*solves exercise {exercise}</summary>(.*?)</details>", shown, re.S)
            assert [int(n) for n in re.findall(r" id=L(\d+)>", folded[1])] == list(range(d.body, d.end + 1)), exercise
    assert "<details>" in chapter_pages.fenced(book, "minicompile.ch08_fusion.fuse.score")
    assert "<details " in chapter_pages.source_of(book, "chapters/08_fusion", "minicompile.ch08_fusion.fuse.score")


def test_a_finished_site_with_a_broken_link_is_refused(tmp_path):
    (tmp_path / "a.html").write_text('<p id="here"><a href="b.html">x</a><a href="#gone">y</a><a href="#here">z</a></p><script src="https://e.org/x.js"></script>')
    assert sorted(links.check_site(tmp_path)) == ["a.html: <script> loads https://e.org/x.js", "a.html: no such anchor: #gone",
                                                   "a.html: no such page: b.html"]
