"""mkdocs hooks: finished blocks take their places, and every page gets the pipeline map."""
from __future__ import annotations

import json
import pathlib
import re

PLACE = re.compile(r"<p>MCBLOCK(\d{4})X</p>")


def on_page_content(html, page, config, files):
    work = pathlib.Path(config["docs_dir"]).parent
    address = page.file.src_uri.removesuffix(".md")
    stored = work / "blocks" / f"{address}.json"
    blocks = json.loads(stored.read_text()) if stored.exists() else []
    html = PLACE.sub(lambda found: blocks[int(found[1])], html)
    strip = json.loads((work / "strip.json").read_text())
    stage = page.meta.get("stage", "")
    up = "../" * address.count("/")
    here = strip.get(stage, strip[""]).replace('href="@', f'href="{up}')
    return f'<div data-search-exclude class="mc-strip">{here}</div>{html}' if address != "index" else html.replace("@@UP@@", up)


def on_post_page(output, page, config):
    """What the theme leaves out for screen readers and the keyboard."""
    output = output.replace('data-md-component="search" role="dialog"', 'data-md-component="search" role="dialog" aria-label="Search"')
    output = output.replace("<th></th>", "<td></td>").replace('<th scope="col"></th>', "<td></td>")
    return re.sub(r"<pre>(<span></span>)?<code>", r'<pre>\1<code tabindex="0">', output)
