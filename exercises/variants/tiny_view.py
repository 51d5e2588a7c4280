from chapters.tiny import digits


def _position(seen, rows, *, offset=True, division=True, remainder=True, stride=True, none=None, backwards=False):
    columns = seen.numel() // rows
    found = digits(seen, rows, columns)
    if found is None:
        return none
    terms = [str(seen.storage_offset())] if seen.storage_offset() and offset else []
    for name, inner, count, step in reversed(found) if backwards else found:
        if step:
            text = f"({name} // {inner})" if inner > 1 and division else name
            if inner * count != (rows if name == "r" else columns) and remainder:
                text = f"({text} % {count})"
            terms.append(f"{step} * {text}" if step != 1 and stride else text)
    return " + ".join(terms) or "0"


def wrong_no_offset(seen, rows):
    return _position(seen, rows, offset=False)


def wrong_no_division(seen, rows):
    return _position(seen, rows, division=False)


def wrong_no_remainder(seen, rows):
    return _position(seen, rows, remainder=False)


def wrong_no_strides(seen, rows):
    return _position(seen, rows, stride=False)


def wrong_always_a_text(seen, rows):
    return _position(seen, rows, none="r + c")


def wrong_contiguous(seen, rows):
    return f"{seen.numel() // rows} * r + c"


def right_other_order(seen, rows):
    return _position(seen, rows, backwards=True)


# The same positions in longer texts, which are equal where the short ones are.
SAME = [
    "- terms = [str(seen.storage_offset())] if seen.storage_offset() else []\n"
        "+ terms = [str(seen.storage_offset())]",
    "- if stride:\n"
        "+ if True:",
    "- text = name if inner == 1 else f'({name} // {inner})'\n"
        "+ text = f'({name} // {inner})'",
    "- text = text if inner * count == {'r': rows, 'c': columns}[name] else f'({text} % {count})'\n"
        "+ text = f'({text} % {count})'",
    "- text = text if inner * count == {'r': rows, 'c': columns}[name] else f'({text} % {count})'\n"
        "+ text = text if inner == {'r': rows, 'c': columns}[name] else f'({text} % {count})'",
    "- text = text if inner * count == {'r': rows, 'c': columns}[name] else f'({text} % {count})'\n"
        "+ text = text if count == {'r': rows, 'c': columns}[name] else f'({text} % {count})'",
    "- terms.append(text if stride == 1 else f'{stride} * {text}')\n"
        "+ terms.append(f'{stride} * {text}')",
]
