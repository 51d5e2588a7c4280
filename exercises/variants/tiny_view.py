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
