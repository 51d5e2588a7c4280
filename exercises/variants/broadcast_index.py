def wrong_aligned_left(x, index):
    return tuple(0 if s == 1 else i for s, i in zip(x.size, index))


def wrong_ignores_ones(x, index):
    return tuple(index[len(index) - len(x.size):])


def wrong_keeps_all(x, index):
    skip = len(index) - len(x.size)
    return tuple(index[:skip]) + tuple(0 if s == 1 else i for s, i in zip(x.size, index[skip:]))


def wrong_negative_slice(x, index):
    return tuple(0 if s == 1 else i for s, i in zip(x.size, index[-len(x.size):])) if len(x.size) > 1 else tuple(index[-1:])


def wrong_drops_ones(x, index):
    return tuple(i for s, i in zip(x.size, index[len(index) - len(x.size):]) if s != 1)


def wrong_reversed(x, index):
    return tuple(0 if s == 1 else i for s, i in zip(reversed(x.size), reversed(index)))


def right_from_the_right(x, index):
    out = []
    for d in range(1, len(x.size) + 1):
        out.insert(0, index[-d] if x.size[-d] != 1 else 0)
    return tuple(out)
