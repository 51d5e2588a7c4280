from minicompile.ch01_graphs.symbolic import present
from minicompile.ch09_triton.tiling import stride_of


def wrong_last(index, vars):
    return vars[-1] if vars and stride_of(index, vars[-1]) == 1 else None


def wrong_smallest_of_any(index, vars):
    used = [v for v in vars if present(v.size) > 1 and stride_of(index, v) > 0]
    return min(used, key=lambda v: stride_of(index, v), default=None)


def wrong_single_values_count(index, vars):
    return next((v for v in vars if stride_of(index, v) == 1), None)


def wrong_last_of_equals(index, vars):
    return next((v for v in reversed(vars) if present(v.size) > 1 and stride_of(index, v) == 1), None)


def wrong_zero_is_smallest(index, vars):
    used = [(stride_of(index, v), k) for k, v in enumerate(vars) if present(v.size) > 1]
    return vars[min(used)[1]] if used and min(used)[0] == 1 else None


def wrong_largest_size(index, vars):
    used = [v for v in vars if present(v.size) > 1 and stride_of(index, v) > 0]
    best = max(used, key=lambda v: present(v.size), default=None)
    return best if best is not None and stride_of(index, best) == 1 else None


def right_first_of_stride_one(index, vars):
    for v in vars:
        if present(v.size) != 1 and stride_of(index, v) == 1:
            return v
    return None


SAME = [
    '- best = min((u for u in used if u[0] > 0), key=lambda u: u[0], default=(0, None))\n'
        '+ best = min((u for u in used if u[0] > 0), key=lambda u: u[0], default=(0,))',
    '- best = min((u for u in used if u[0] > 0), key=lambda u: u[0], default=(0, None))\n'
        '+ best = min((u for u in used if u[0] > 0), key=lambda u: u[0], default=(1, None))',
    '- best = min((u for u in used if u[0] > 0), key=lambda u: u[0], default=(0, None))\n'
        '+ best = min((u for u in used if u[0] > 0), key=lambda u: u[0], default=(None,))',
]
