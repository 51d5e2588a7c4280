def wrong_order(shape):
    return tuple(reversed(right_forwards(shape)))


def wrong_zero(shape):
    out = [1]
    for size in reversed(shape[1:]):
        out.append(out[-1] * size)
    return tuple(reversed(out))[:len(shape)]


def wrong_own_size(shape):
    return tuple(s * max(n, 1) for s, n in zip(right_forwards(shape), shape))


def wrong_ones(shape):
    return (1,) * len(shape)


def wrong_first(shape):
    return (1,) + right_forwards(shape)[1:]


def right_forwards(shape):
    out = []
    for k in range(len(shape)):
        step = 1
        for size in shape[k + 1:]:
            step *= size or 1
        out.append(step)
    return tuple(out)
