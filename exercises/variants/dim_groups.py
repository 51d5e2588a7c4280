import math


def _all(old, new):
    return [(list(range(len(old))), list(range(len(new))))]


def wrong_one_group(old, new):
    return _all(old, new)


def wrong_pairs_only(old, new):
    return [([k], [k]) for k in range(max(len(old), len(new)))]


def _greedy(old, new, *, ones=True, symbols=True, swap=False):
    groups, i, j = [], 0, 0
    while i < len(old) and j < len(new) or ones and (i < len(old) or j < len(new)):
        left, right, a, b = [], [], 1, 1
        if i < len(old):
            left, a, i = [i], old[i], i + 1
        if j < len(new):
            right, b, j = [j], new[j], j + 1
        while a != b:
            if symbols and (not isinstance(a, int) or not isinstance(b, int)) or i == len(old) and j == len(new):
                return _all(old, new)
            if i < len(old) and (j == len(new) or isinstance(a, int) and isinstance(b, int) and (a < b) != swap):
                left.append(i)
                a, i = a * old[i], i + 1
            elif j < len(new):
                right.append(j)
                b, j = b * new[j], j + 1
            else:
                return _all(old, new)
        groups.append((left, right))
    return groups


def wrong_loses_ones(old, new):
    return _greedy(old, new, ones=False)


def wrong_larger_side_grows(old, new):
    return _greedy(old, new, swap=True)


def wrong_symbols_are_split(old, new):
    return _greedy(old, new, symbols=False) if all(isinstance(n, int) for n in (*old, *new)) else [([k], [k]) for k in range(len(old))]


def wrong_sizes_not_positions(old, new):
    return [([old[i] for i in left], [new[j] for j in right]) for left, right in _greedy(old, new)]


def wrong_joins_equal_dims(old, new):
    groups = _greedy(old, new)
    return [(groups[0][0] + groups[1][0], groups[0][1] + groups[1][1]), *groups[2:]] if len(groups) > 1 else groups


def right_by_prefix_products(old, new):
    if not all(isinstance(n, int) for n in (*old, *new)):
        k = 0
        while k < min(len(old), len(new)) and old[k] == new[k]:
            k += 1
        tail = old[k:], new[k:]
        same = [([i], [i]) for i in range(k)]
        if tail == ((), ()):
            return same
        return _greedy(old, new)
    prefix = [[math.prod(side[:k]) for k in range(len(side) + 1)] for side in (old, new)]
    common = sorted(set(prefix[0]) & set(prefix[1]))
    groups = []
    for low, high in zip(common, common[1:]):
        groups.append(tuple([k for k in range(len(side)) if low <= p[k] and p[k + 1] <= high and p[k] < high]
                            for side, p in zip((old, new), prefix)))
    last = common[-1]
    rest = tuple([k for k in range(len(side)) if p[k] == last] for side, p in zip((old, new), prefix))
    return groups + ([rest] if rest != ([], []) else [])


SAME = [
    "- if not isinstance(a, int) or not isinstance(b, int) or (i == len(old) and j == len(new)):\n"
        "+ if not isinstance(a, int) or not isinstance(b, int):",
    "- if i < len(old) and (a < b or j == len(new)):\n+ if a < b or j == len(new):",
    "- if i < len(old) and (a < b or j == len(new)):\n+ if i <= len(old) and (a < b or j == len(new)):",
    "- if i < len(old) and (a < b or j == len(new)):\n+ if i < len(old) and a < b:",
    "- if i < len(old) and (a < b or j == len(new)):\n+ if i < len(old) and (a <= b or j == len(new)):",
]
