import torch

from minicompile.ch06_decompositions.table import _kind, _promote, number_dtype


def _ranked(operands, rank_of, number=number_dtype):
    ranks = {}
    for x in operands:
        rank = rank_of(x)
        dtype = x.dtype if isinstance(x, torch.Tensor) else number(x)
        ranks[rank] = _promote(ranks[rank], dtype) if rank in ranks else dtype
    return [ranks[r] for r in sorted(ranks)]


def _ranks(x):
    return 2 if not isinstance(x, torch.Tensor) else 0 if x.dim() else 1


def wrong_no_ranks(*operands):
    return _ranked(operands, lambda x: 0)[0]


def wrong_first_rank_only(*operands):
    return _ranked(operands, _ranks)[0]


def wrong_numbers_like_scalars(*operands):
    order = _ranked(operands, lambda x: 1 if _ranks(x) else 0)
    dtype = order[0]
    return order[1] if len(order) > 1 and _kind(order[1]) > _kind(dtype) else dtype


def wrong_scalars_like_tensors(*operands):
    order = _ranked(operands, lambda x: 0 if isinstance(x, torch.Tensor) else 2)
    dtype = order[0]
    return order[1] if len(order) > 1 and _kind(order[1]) > _kind(dtype) else dtype


def wrong_promotes_kinds(*operands):
    dtype, *rest = _ranked(operands, _ranks)
    for other in rest:
        if _kind(other) > _kind(dtype):
            dtype = _promote(dtype, other) if dtype is not torch.int64 else torch.float64
    return dtype


def wrong_higher_or_equal_kind(*operands):
    dtype, *rest = _ranked(operands, _ranks)
    for other in rest:
        if _kind(other) >= _kind(dtype):
            dtype = other
    return dtype


def wrong_numbers_are_double(*operands):
    dtype, *rest = _ranked(operands, _ranks, lambda x: torch.bool if isinstance(x, bool) else torch.int64 if isinstance(x,
        int) else torch.float64)
    for other in rest:
        if _kind(other) > _kind(dtype):
            dtype = other
    return dtype


def right_by_category(*operands):
    groups = [[x.dtype for x in operands if isinstance(x, torch.Tensor) and x.dim()],
              [x.dtype for x in operands if isinstance(x, torch.Tensor) and not x.dim()],
              [number_dtype(x) for x in operands if not isinstance(x, torch.Tensor)]]
    best = None
    for group in groups:
        if group:
            joined = group[0]
            for d in group[1:]:
                joined = torch.promote_types(joined, d)
            best = joined if best is None or _kind(joined) > _kind(best) else best
    return best


SAME = [
    '- rank, dtype = (2, number_dtype(x))\n'
        '+ rank, dtype = (3, number_dtype(x))',
    '- for other in order[1:]:\n'
        '+ for other in order[:]:',
]
