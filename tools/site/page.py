"""A page: Markdown for mkdocs, and blocks of finished HTML that take their places after mkdocs is done."""
from __future__ import annotations

import json
import pathlib
import re
from dataclasses import dataclass, field

MARK, FOUND = "MCBLOCK", "MCFOUND"
PLACE = '<div data-search-exclude data-block="{}"></div>'          # where a block goes, in what mkdocs makes
HOLE = "\0"                                                       # where what a cell shows goes, in a block


@dataclass
class Page:
    """address: path under the site without ending. stage: the chapter's package, for "you are here". hide: what the theme leaves out.
    rest: further pages of a chapter, whose blocks are filled after these. found: numbers of the blocks that
    the search has to see."""
    address: str
    title: str
    stage: str = ""
    hide: str = ""
    parts: list = field(default_factory=list)
    blocks: list = field(default_factory=list)
    found: set = field(default_factory=set)
    rest: list = field(default_factory=list)

    def prose(self, markdown: str):
        self.parts.append(markdown)

    def block(self, html: str, search: bool = False):
        if search:
            self.found.add(len(self.blocks))
        self.parts.append(f"{FOUND if search else MARK}{len(self.blocks):04d}X")
        self.blocks.append(html if search else re.sub(r"^<\w+", r"\g<0> data-search-exclude", html))

    def fill(self, shown: list[str]):
        """What cells show takes its places, in order."""
        waiting = iter(shown)
        for page in (self, *self.rest):
            page.blocks = [block.replace(HOLE, next(waiting, "")) if HOLE in block else block for block in page.blocks]

    def write(self, docs: pathlib.Path):
        """Write what mkdocs reads; files that have not changed keep their time."""
        meta = f"---\ntitle: {json.dumps(self.title)}\nstage: {json.dumps(self.stage)}\n" + (
            f"hide: [{self.hide}]\n" if self.hide else "") + "---\n\n"
        write(docs / f"{self.address}.md", meta + "\n\n".join(self.parts) + "\n")
        if self.found:
            write(docs.parent / "found" / f"{self.address}.json", json.dumps({f"{n:04d}": self.blocks[n] for n in sorted(self.found)}))


def write(path: pathlib.Path, text: str):
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
