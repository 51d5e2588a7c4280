def wrong_contiguous_only(t):
    return t.is_contiguous()


def wrong_ones_count(t):
    expected = 1
    for stride, size in sorted(zip(t.stride(), t.shape)):
        if stride != expected:
            return False
        expected *= size
    return True


def wrong_sorted_by_size(t):
    expected = 1
    for size, stride in sorted((n, s) for s, n in zip(t.stride(), t.shape) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def wrong_no_overlap_is_enough(t):
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(t.stride(), t.shape) if n != 1):
        if stride < expected:
            return False
        expected = stride * size
    return True


def wrong_smallest_stride_is_one(t):
    strides = [s for s, n in zip(t.stride(), t.shape) if n != 1]
    return not strides or min(strides) == 1


def right_by_addresses(t):
    places = {0}
    for n, s in zip(t.shape, t.stride()):
        places = {p + k * s for p in places for k in range(n)}
    return places == set(range(t.numel()))
