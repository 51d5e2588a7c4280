"""Python source to HTML with little markup: a page of code has to stay small."""
from __future__ import annotations

import ast
import builtins
import html
import io
import keyword
import re
import token
import tokenize

STRINGS = {token.STRING, *(getattr(token, name) for name in ("FSTRING_START", "FSTRING_MIDDLE", "FSTRING_END") if hasattr(token, name))}


def marks(source: str) -> list:
    """(line, column, end line, end column, class) of what is coloured; nothing for text that is no Python."""
    found, before = [], ""
    try:
        for t in tokenize.generate_tokens(io.StringIO(source).readline):
            kind = None
            if t.type in STRINGS:
                kind = "s"
            elif t.type == token.COMMENT:
                kind = "c"
            elif t.type == token.NUMBER:
                kind = "m"
            elif t.type == token.NAME:
                kind = "n" if before in ("def", "class") else "k" if keyword.iskeyword(t.string) else None
            if kind:
                found.append((*t.start, *t.end, kind))
            if t.type not in (token.NL, token.NEWLINE, token.INDENT, token.DEDENT):
                before = t.string
    except (tokenize.TokenError, SyntaxError):
        pass
    return found


def lines_of(source: str, links: dict | None = None) -> list[str]:
    """One string of HTML per line. links: (line, column) -> (length, address)."""
    lines = source.splitlines()
    pieces: list[list] = [[] for _ in lines]
    for line, column, last, end, kind in marks(source):
        for n in range(line, min(last, len(lines)) + 1):
            start, stop = column if n == line else 0, end if n == last else len(lines[n - 1])
            if stop > start:
                pieces[n - 1].append((start, stop, f"<b class={kind}>", "</b>"))
    for (line, column), (length, address) in (links or {}).items():
        pieces[line - 1].append((column, column + length, f'<a href="{address}">', "</a>"))
    made = []
    for text, parts in zip(lines, pieces):
        out, position = [], 0
        for start, stop, opening, closing in sorted(parts):
            if start < position:
                continue
            out += [html.escape(text[position:start], False), opening, html.escape(text[start:stop], False), closing]
            position = stop
        made.append("".join(out) + html.escape(text[position:], False))
    return made


def part_of(source: str, first: int, last: int) -> list[str]:
    """Lines `first` to `last` in their places of the list that `lines_of` makes; the others are empty."""
    lines = source.splitlines()[first - 1:last]
    inside = lines[0][:1].isspace()                             # a method alone is no Python
    return [""] * (first - 1) + lines_of("\n".join(["class _:", *lines] if inside else lines))[inside:]


def numbered(lines: list[str], first: int, anchors: bool = True) -> str:
    """A code block with line numbers; each line is an anchor `L12`."""
    body = "\n".join(row(line, f" id=L{n}" if anchors else "") for n, line in enumerate(lines, first))
    return f'<pre class="mc-code mc-lines mc-numbered" tabindex="0" style="counter-reset:l {first - 1}"><code>{body}</code></pre>'


def plain(source: str, links: dict | None = None) -> str:
    return f'<pre class="mc-code mc-lines" tabindex="0"><code>{chr(10).join(map(row, lines_of(source, links)))}</code></pre>'


def row(line: str, anchor: str = "") -> str:
    """A line, which goes on below itself where the page is narrow, further in than it begins: `--i` is the number of spaces before it."""
    spaces = len(re.match("(?:<[^>]*>)*( *)", line)[1])
    return f"<i{anchor}{f' style=--i:{spaces}' if spaces else ''}>{line}</i>"


def uses(tree: ast.AST, known: set) -> list:
    """(line, column, name) of the first use of each known name per top-level statement, where no local hides it."""
    found = []
    for statement in tree.body:
        local = {a.arg for n in ast.walk(statement) if isinstance(n, ast.arguments)
                 for a in (*n.posonlyargs, *n.args, *n.kwonlyargs, *filter(None, (n.vararg, n.kwarg)))}
        local |= {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        seen = set()
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                if alias.asname is None and alias.name in known and hasattr(alias, "lineno"):
                    found.append((alias.lineno, alias.col_offset, alias.name))
            continue
        for n in ast.walk(statement):
            if (isinstance(n, ast.Name) and n.id in known and n.id not in local and n.id not in seen
                    and not hasattr(builtins, n.id) and n.id != getattr(statement, "name", None)):
                seen.add(n.id)
                found.append((n.lineno, n.col_offset, n.id))
    return found
