import math


def wrong_equal(a, b):
    return a == b


def wrong_repr(a, b):
    return repr(a) == repr(b) and type(a) is type(b) and a == b


def wrong_no_zeros(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list, frozenset)):
        return len(a) == len(b) and all(map(wrong_no_zeros, a, b))
    return a == b or a != a and b != b


def wrong_nan_differs(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list, frozenset)):
        return len(a) == len(b) and all(map(wrong_nan_differs, a, b))
    if isinstance(a, float):
        return a == b and math.copysign(1.0, a) == math.copysign(1.0, b)
    return a == b


def wrong_shallow(a, b):
    if isinstance(a, (tuple, list, frozenset, slice, complex)):
        return type(a) is type(b) and a == b
    return right_by_text(a, b)


def wrong_no_length(a, b):
    if type(a) is type(b) and isinstance(a, (tuple, list, frozenset)):
        return all(map(wrong_no_length, a, b))
    return right_by_text(a, b)


def wrong_never(a, b):
    return False


def right_by_text(a, b):
    def key(x):
        if isinstance(x, float):
            return float, "nan" if x != x else x.hex()
        if isinstance(x, complex):
            return complex, key(x.real), key(x.imag)
        if isinstance(x, slice):
            return slice, key(x.start), key(x.stop), key(x.step)
        if isinstance(x, (tuple, list, frozenset)):
            return type(x), *map(key, x)
        return type(x), x
    return key(a) == key(b)


SAME = [
    '- return a is b or bool(a == b)\n'
        '+ return bool(a == b)',
]
