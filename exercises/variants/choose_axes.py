import math
from collections import Counter
from functools import partial

from minicompile.ch01_graphs.symbolic import present, product
from minicompile.ch09_triton.tiling import Axis, contiguous_var, visits


def _axes(vars, reduction_vars, accesses, *, least=4096, heavy=True, short=4, rest=True, ones=True, names="yx", reduce_rank=2, extra=1):
    if reduction_vars:
        return [Axis("x", vars, 0, reduce_rank), Axis("r", reduction_vars, 1, reduce_rank)]
    total = math.prod(present(v.size) for v in vars)
    wanted = [contiguous_var(i, vars) for i in accesses if not heavy or visits(i, vars) * 2 > total]
    real = [v for v in vars if present(v.size) > 1 or not ones]
    split = [v for v in wanted if v is not None and v != real[-1]]
    if split and total >= least:
        v = max(set(split), key=split.count)
        cut = vars.index(v) + extra
        if (present(product(u.size for u in vars[cut:])) > 1 or not rest) and present(v.size) >= short:
            return [Axis(names[0], vars[:cut], 0, 2), Axis(names[1], vars[cut:], 1, 2)]
    return [Axis("x", vars, 0, 1)]


def wrong_always_one(vars, reduction_vars, accesses):
    return _axes(vars, reduction_vars, []) if not reduction_vars else _axes(vars, reduction_vars, accesses)


wrong_small_nests_too = partial(_axes, least=0)
wrong_small_accesses_too = partial(_axes, heavy=False)
wrong_short_variables_too = partial(_axes, short=2)
wrong_names_swapped = partial(_axes, names="xy")
wrong_rank_of_reductions = partial(_axes, reduce_rank=1)
wrong_cut_before = partial(_axes, extra=0)


def right_counted(vars, reduction_vars, accesses):
    if reduction_vars:
        return [Axis("x", vars, 0, 2), Axis("r", reduction_vars, 1, 2)]
    sizes = [present(v.size) for v in vars]
    total = math.prod(sizes)
    last = max((k for k, n in enumerate(sizes) if n > 1), default=None)
    votes = Counter()
    for access in accesses:
        v = contiguous_var(access, vars)
        if 2 * visits(access, vars) > total and v is not None and v is not vars[last]:
            votes[v] += 1
    one = [Axis("x", vars, 0, 1)]
    if total < 4096 or not votes:
        return one
    k = vars.index(votes.most_common(1)[0][0])
    if sizes[k] < 4 or math.prod(sizes[k + 1:]) <= 1:
        return one
    return [Axis("y", vars[:k + 1], 0, 2), Axis("x", vars[k + 1:], 1, 2)]


SAME = [
    '- if present(product((u.size for u in vars[cut:]))) > 1 and present(v.size) >= 4:\n'
        '+ if present(product((u.size for u in vars[cut:]))) >= 1 and present(v.size) >= 4:',
    '- if present(product((u.size for u in vars[cut:]))) > 1 and present(v.size) >= 4:\n'
        '+ if present(product((u.size for u in vars[:]))) > 1 and present(v.size) >= 4:',
    '- if present(product((u.size for u in vars[cut:]))) > 1 and present(v.size) >= 4:\n'
        '+ if present(v.size) >= 4:',
]
