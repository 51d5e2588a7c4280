from functools import partial

from minicompile.ch07_loops.ir import Layout
from minicompile.ch07_loops.lazy import contiguous_strides


def _layout(base, size, groups, *, check=True, ones=True, offset=True, step=-1, product=False):
    stride = [1] * len(size)
    for left, right in groups:
        left = [d for d in left if base.size[d] != 1 or not ones]
        for outer, inner in zip(left, left[1:]):
            if check and base.stride[outer] != base.stride[inner] * base.size[outer if product else inner]:
                return None
        last = base.stride[left[step]] if left else 1
        for d, s in zip(right, contiguous_strides([size[d] for d in right])):
            stride[d] = s * last
    return Layout(size, tuple(stride), base.offset if offset else 0)


wrong_always_possible = partial(_layout, check=False)
wrong_ones_count = partial(_layout, ones=False)
wrong_loses_offset = partial(_layout, offset=False)
wrong_first_stride = partial(_layout, step=0)
wrong_size_of_the_outer = partial(_layout, product=True)


def wrong_contiguous(base, size, groups):
    return Layout(size, tuple(contiguous_strides(size)), base.offset)


def wrong_only_contiguous_bases(base, size, groups):
    return _layout(base, size, groups) if tuple(base.stride) == tuple(contiguous_strides(base.size)) else None


def right_backwards(base, size, groups):
    stride = [0] * len(size)
    for left, right in groups:
        step, expected = 1, None
        for d in reversed(left):
            if base.size[d] == 1:
                continue
            if expected is None:
                step = base.stride[d]
            elif base.stride[d] != expected:
                return None
            expected = base.stride[d] * base.size[d]
        for d in reversed(right):
            stride[d] = step
            step = step * size[d]
    return Layout(tuple(size), tuple(stride), base.offset)


SAME = [
    '- stride: list = [1] * len(size)\n'
        '+ stride: list = [2] * len(size)',
]
