"""The renderer of the book: `python -m tools.site build`.

Chapters (`chapters/*.py`) are executed, the modules of the package are shown as they are, both become Markdown under `.site/docs`, and
mkdocs turns that into `site/`. `names` knows every definition of the package, `links` resolves what prose points at, `cells` splits
percent files, `execute` runs chapters in forked processes, `code_pages`, `chapter_pages` and `pages` write Markdown, `build` is the order.
"""
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]


class SiteError(Exception):
    """What is wrong with the book's sources: one line for each finding."""

    def __init__(self, findings):
        self.findings = [findings] if isinstance(findings, str) else list(findings)
        super().__init__("\n".join(self.findings))
