"""The page: the lines of a recording as HTML, which is readable without its script, and the script that links them."""
import base64
import difflib
import html
import json
import pathlib
import re
import zlib

from ...errors import MinicompileError
from .recording import PANES, Exploration, Item, from_dict

HERE = pathlib.Path(__file__).parent
FIRST_SHOWN = {1: ("source", "graph", "primitives", "fusion", "cpp", "host"), 2: ("source", "primitives", "fusion")}


def render(recording: Exploration, against: Exploration | None = None, back: str = "") -> str:
    """The whole page. against: the version before it. back: HTML in the header."""
    versions = [recording] if against is None else [against, recording]
    letters = "ab"[:len(versions)]
    same = partners(*versions) if len(versions) == 2 else {}
    panes = [pane for pane in PANES if any(v.pane(pane) for v in versions)]
    fields = {
        "TITLE": text(recording.title if against is None else f"{against.title} → {recording.title}"),
        "STYLE": (HERE / "page.css").read_text(encoding="utf-8"), "SCRIPT": (HERE / "page.js").read_text(encoding="utf-8"),
        "FIRSTLINE": text("; ".join(filter(None, map(recording.summary.get, ("what", "a call"))))), "SUMMARY": summary_html(versions),
        "BACK": back, "COUNT": str(len(versions)),
        "STRIP": "".join(f'<button type="button" data-pane="{p}" aria-pressed="false" title="{text(PANES[p][1])}">{text(PANES[p][0])}'
                         "<b></b></button>" for p in panes),
        "PANES": "".join(pane_html(p, versions, letters, same) for p in panes),
        "FIRST": " ".join(p for p in FIRST_SHOWN[len(versions)] if p in panes),
        "RECORDING": packed(recording),
    }
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda m: fields[m[1]], (HERE / "page.html").read_text(encoding="utf-8"))


def text(words: str) -> str:
    return html.escape(str(words), quote=True)


def summary_html(versions: list[Exploration]) -> str:
    names = list(dict.fromkeys(name for v in versions for name in v.summary))
    if len(versions) == 1:
        rows = "".join(f"<dt>{text(n)}</dt><dd>{text(versions[0].summary[n])}</dd>" for n in names)
        return f"<dl>{rows}</dl>"
    rows = "".join(f'<tr><th scope="row">{text(n)}</th>' + "".join(f"<td>{text(v.summary.get(n, ''))}</td>" for v in versions) + "</tr>"
                   for n in names)
    return ('<div class="wide"><table><thead><tr><td></td><th scope="col">before</th><th scope="col">after</th></tr></thead>'
            f"<tbody>{rows}</tbody></table></div>")


def pane_html(pane: str, versions: list[Exploration], letters: str, same: dict) -> str:
    title, what = PANES[pane]
    notes = [v.notes.get(pane, "") for v in versions]
    said = notes[0] if len(set(notes)) == 1 else " | ".join(notes)
    state = " bad" if re.search("differs from|fails: ", said) else " good" if "checked: " in said.replace("not checked: ", "") else ""
    when = [""] if len(versions) == 1 else [", before", ", after"]
    lists = "".join(f'<ol tabindex="0" aria-label="{text(title)}{words}">'
                    + "".join(line(i, letter, same) for i in v.pane(pane)) + "</ol>" for v, letter, words in zip(versions, letters, when))
    note = f'<small class="note{state}" title="{text(said)}">{text(said)}</small>'
    return (f'<section class="pane" id="pane-{pane}"><h2 title="{text(what)}">{text(title)}{note}</h2>'
            f'<p class="what">{text(what[:1].upper() + what[1:])}.</p><div class="lists">{lists}</div></section>')


def line(item: Item, letter: str, same: dict) -> str:
    other = same.get((letter, item.id))
    classes = " ".join(filter(None, [item.kind, "quiet" if item.quiet else "", "changed" if same and other is None else ""]))
    attributes = f' id="{letter}-{item.id}"' + (f' class="{classes}"' if classes else "")
    if item.made_from:
        attributes += f' data-from="{" ".join(f"{letter}-{i}" for i in item.made_from)}"'
    if other:
        attributes += f' data-same="{other}"'
    if item.facts:
        facts = html.escape(json.dumps(item.facts, ensure_ascii=False), quote=False).replace("'", "&#39;")
        attributes += f" data-facts='{facts}'"
    if not item.text:
        attributes += f' aria-label="{"lines that are not shown" if item.kind == "gap" else "empty line"}"'
    bar = f'<i style="width:{100 * item.width:.1f}%"></i>' if item.width is not None else ""
    return f'<li{attributes}>{bar}{text(item.text) or "&nbsp;"}</li>'


def partners(before: Exploration, after: Exploration) -> dict:
    """(letter, id) -> id in the page of the line that is the same in the other version."""
    found = {}
    for pane in PANES:
        a, b = before.pane(pane), after.pane(pane)
        matcher = difflib.SequenceMatcher(None, [plain(i.text, pane) for i in a], [plain(i.text, pane) for i in b], autojunk=False)
        for at, to, size in matcher.get_matching_blocks():
            for x, y in zip(a[at:at + size], b[to:to + size]):
                found["a", x.id], found["b", y.id] = f"b-{y.id}", f"a-{x.id}"
    return found


def plain(words: str, pane: str) -> str:
    """A line without what differs from one version to the next and means nothing."""
    words = re.sub(r"^ *\d+  ", "", words) if pane == "source" else re.sub(r"^(>>|  ) *\d+ ", "", words) if pane == "bytecode" else words
    return re.sub(r" *[\d.,]+ (µs|ms)|//.*\.py:\d.*|# .*\.py:\d.*", "", words)


# ---- a page can be read again -----------------------------------------------------------------------------

def packed(recording: Exploration) -> str:
    return base64.b64encode(zlib.compress(json.dumps(recording.as_dict(), ensure_ascii=False).encode(), 9)).decode()


def read_page(path: pathlib.Path) -> Exploration:
    """The recording in a page that was written earlier."""
    try:
        found = re.search(r'<script type="text/plain" id="recording">([^<]*)</script>', path.read_text(encoding="utf-8"))
        return from_dict(json.loads(zlib.decompress(base64.b64decode(found[1]))))
    except (OSError, TypeError, ValueError, KeyError, zlib.error) as error:
        raise MinicompileError(f"{path} is not a page of the explorer: {type(error).__name__}: {error}") from None
