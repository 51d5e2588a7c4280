import math

from minicompile.ch01_graphs.symbolic import mul


def wrong_number_of_elements(buffer):
    out = 1
    for n in buffer.layout.size:
        out = mul(n, out)
    return out


def wrong_one_short(buffer):
    if 0 in [n for n in buffer.layout.size if isinstance(n, int)]:
        return 0
    return sum((mul(n - 1, s) for n, s in zip(buffer.layout.size, buffer.layout.stride)), 0)


def wrong_size_times_stride(buffer):
    return sum((mul(n, s) for n, s in zip(buffer.layout.size, buffer.layout.stride)), 0)


def wrong_empty_is_negative(buffer):
    return 1 + sum((mul(n - 1, s) for n, s in zip(buffer.layout.size, buffer.layout.stride)), 0)


def wrong_first_dim_only(buffer):
    size, stride = buffer.layout.size, buffer.layout.stride
    return mul(size[0], stride[0]) if size else 1


def wrong_ints_only(buffer):
    size, stride = buffer.layout.size, buffer.layout.stride
    if not all(isinstance(n, int) for n in (*size, *stride)):
        return math.prod(n for n in size if isinstance(n, int))
    return 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride))


def right_backwards(buffer):
    total = 1
    for n, s in reversed(list(zip(buffer.layout.size, buffer.layout.stride))):
        if isinstance(n, int) and n == 0:
            return 0
        total = mul(n, s) - s + total
    return total


SAME = [
    '- if any((isinstance(s, int) and s == 0 for s in sizes)):\n'
        '+ if any((s == 0 for s in sizes)):',
]
