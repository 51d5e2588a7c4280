from functools import partial


def wrong_contiguous_only(t):
    return t.is_contiguous()


def _dense(t, *, by_size=False, ones=False, gaps=False):
    expected = 1
    for stride, size in sorted(((s, n) for s, n in zip(t.stride(), t.shape) if ones or n != 1), key=lambda dim: dim[by_size]):
        if stride < expected or stride > expected and not gaps:
            return False
        expected = stride * size
    return True


wrong_ones_count = partial(_dense, ones=True)
wrong_sorted_by_size = partial(_dense, by_size=True)
wrong_no_overlap_is_enough = partial(_dense, gaps=True)


def wrong_smallest_stride_is_one(t):
    strides = [s for s, n in zip(t.stride(), t.shape) if n != 1]
    return not strides or min(strides) == 1


def right_by_addresses(t):
    places = {0}
    for n, s in zip(t.shape, t.stride()):
        places = {p + k * s for p in places for k in range(n)}
    return places == set(range(t.numel()))
