"""mkdocs hooks: every page gets the pipeline map, places for its blocks, those blocks that the search has to see, and its neighbours."""
from __future__ import annotations

import json
import pathlib
import re

YOURS = ('<p data-search-exclude class="mc-yours">Your own function, from each line of source to its lines in the kernels: '
         '<code>python -m minicompile explore FILE:FUNCTION ARGUMENTS</code> (<a href="@explorer.html">the explorer</a>)</p>')
BLOCK = re.compile(r"<p>MC(BLOCK|FOUND)(\d{4})X</p>")


def on_page_content(html, page, config, files):
    work = pathlib.Path(config["docs_dir"]).parent
    address = page.file.src_uri.removesuffix(".md")
    stored = work / "found" / f"{address}.json"
    found = json.loads(stored.read_text()) if stored.exists() else {}
    html = BLOCK.sub(lambda m: found[m[2]] if m[1] == "FOUND" else f'<div data-search-exclude data-block="{int(m[2])}"></div>', html)
    html += YOURS.replace("@", "../" * address.count("/"))
    if address == "index":
        return html
    strip = json.loads((work / "strip.json").read_text())
    here = strip.get(page.meta.get("stage", ""), strip[""]).replace('href="@', 'href="' + "../" * address.count("/"))
    return f'<div data-search-exclude class="mc-strip">{here}</div>{html}'


def on_nav(nav, config, files):
    around = json.loads((pathlib.Path(config["docs_dir"]).parent / "neighbours.json").read_text())
    pages = {page.file.src_uri.removesuffix(".md"): page for page in nav.pages}
    for address, (before, after) in around.items():
        pages[address].previous_page, pages[address].next_page = pages.get(before), pages.get(after)
    return nav
