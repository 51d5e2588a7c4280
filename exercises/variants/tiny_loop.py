from chapters.tiny import ITERATOR, Break


def _outside(m):
    if m.outside and not isinstance(m.top(), ITERATOR):
        raise Break("outside")


def wrong_iterator_taken(m, i):
    _outside(m)
    for value in m.pop(1)[0]:
        return [value]
    m.frames[-1].at = i.value


def wrong_iterator_left(m, i):
    _outside(m)
    for value in m.top():
        return [value]
    m.frames[-1].at = i.value


def wrong_no_jump(m, i):
    _outside(m)
    for value in m.top():
        return [value]
    m.pop(1)


def wrong_everything_at_once(m, i):
    _outside(m)
    values = list(m.top())
    if values:
        return [values[0]]
    m.frames[-1].at = i.value
    m.pop(1)


def wrong_no_break(m, i):
    for value in m.top():
        return [value]
    m.frames[-1].at = i.value
    m.pop(1)


def wrong_ends_at_zero(m, i):
    _outside(m)
    value = next(m.top(), None)
    if value is not None and value is not 0:                    # noqa: F632
        return [value]
    m.frames[-1].at = i.value
    m.pop(1)


def wrong_one_too_far(m, i):
    _outside(m)
    for value in m.top():
        return [value]
    m.frames[-1].at = i.value + 1
    m.pop(1)


def right_with_next(m, i):
    if m.outside is not None and type(m.top()) is not ITERATOR:
        raise Break("this iterator may be used elsewhere")
    try:
        value = next(m.top())
    except StopIteration:
        m.frames[-1].stack.pop()
        m.frames[-1].at = i.value
        return []
    return [value]
