"""A page: Markdown for mkdocs, and blocks of finished HTML that take their places after mkdocs has rendered it."""
from __future__ import annotations

import json
import pathlib
import re
from dataclasses import dataclass, field

MARK = "MCBLOCK"


@dataclass
class Page:
    """address: path under the site without ending. stage: the chapter's package, for "you are here"."""
    address: str
    title: str
    stage: str = ""
    parts: list = field(default_factory=list)
    blocks: list = field(default_factory=list)

    def prose(self, markdown: str):
        self.parts.append(markdown)

    def block(self, html: str, search: bool = False):
        self.parts.append(f"{MARK}{len(self.blocks):04d}X")
        self.blocks.append(html if search else re.sub(r"^<\w+", r"\g<0> data-search-exclude", html))

    def write(self, docs: pathlib.Path):
        """Write the page and, beside it, its blocks; files that have not changed keep their time."""
        meta = f"---\ntitle: {json.dumps(self.title)}\nstage: {json.dumps(self.stage)}\n---\n\n"
        write(docs / f"{self.address}.md", meta + "\n\n".join(self.parts) + "\n")
        write(docs.parent / "blocks" / f"{self.address}.json", json.dumps(self.blocks))


def write(path: pathlib.Path, text: str):
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
