from minicompile.ch03_capture.interpreter import jump
from minicompile.ch03_capture.iterate import next_value
from minicompile.ch03_capture.tracer import PYTHON


def _ended(frame, i, more=0):
    jump(frame, i.argval)
    frame.ip += more + (0 if PYTHON < (3, 12) else 1 if PYTHON < (3, 13) else 2)


def wrong_iterator_gone(tx, frame, i, iterator):
    if (value := next_value(tx, iterator)) is not None:
        return [value]
    _ended(frame, i)


def wrong_order(tx, frame, i, iterator):
    if (value := next_value(tx, iterator)) is not None:
        return [value, iterator]
    _ended(frame, i)


def wrong_iterator_kept(tx, frame, i, iterator):
    if (value := next_value(tx, iterator)) is not None:
        return [iterator, value]
    _ended(frame, i)
    return [iterator]


def wrong_one_round_less(tx, frame, i, iterator):
    next_value(tx, iterator)
    if (value := next_value(tx, iterator)) is not None:
        return [iterator, value]
    _ended(frame, i)


def wrong_too_far(tx, frame, i, iterator):
    if (value := next_value(tx, iterator)) is not None:
        return [iterator, value]
    _ended(frame, i, 1)


def right_turned_around(tx, frame, i, iterator):
    found = next_value(tx, iterator)
    if found is None:
        jump(frame, i.argval)
        frame.ip = frame.ip + {11: 0, 12: 1}.get(PYTHON[1], 2)
        return None
    return [iterator] + [found]
