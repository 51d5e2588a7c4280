from minicompile.ch03_capture.effects import settled


def _difference(before, after, *, same=lambda a, b: a is b, overlap=False, front=True, back=True):
    before, after = [settled(item) for item in before], [settled(item) for item in after]
    shorter, start, end = min(len(before), len(after)), 0, 0
    while front and start < shorter and same(before[start], after[start]):
        start += 1
    while back and end < shorter - (0 if overlap else start) and same(before[-1 - end], after[-1 - end]):
        end += 1
    return start, len(before) - end, after[start:len(after) - end]


def wrong_by_equality(before, after):
    return _difference(before, after, same=lambda a, b: a == b)


def wrong_everything(before, after):
    return 0, len(before), list(after)


def wrong_no_end(before, after):
    return _difference(before, after, back=False)


def wrong_no_beginning(before, after):
    return _difference(before, after, front=False)


def wrong_both_ends_overlap(before, after):
    return _difference(before, after, overlap=True)


def wrong_only_appended(before, after):
    return len(before), len(before), list(after[len(before):])


def right_with_loops(before, after):
    return _difference(before, after)
