# %% [markdown]
# # Pooling and resampling
#
# A pooling window of 3x3 is nine strided slices of the padded input, and the pool their maximum or sum. As
# slices are index maps, the whole pool is one pointwise loop with nine loads, and whatever comes before (a
# ReLU) or after fuses with it.
#
# The gradient of a pool *scatters*: each window adds to the pixels it covered. Scatters need atomics and a
# zeroed output. Turned around it is a *gather*: an input pixel lies in at most ceil(3/2)**2 = 4 windows of
# a 3x3 pool with stride 2, and it is known which; so each pixel looks at four windows and takes its share.
# Both loops stay small only for small windows; larger ones keep their library kernel.

# %%
import itertools
import math
import struct

import torch

from ..table import aten, constant, decomposition, iota

UNROLL = 25          # the largest number of loads that a pool is unrolled into


def _pairs(kernel, stride, padding, dilation=1):
    """Each for two dimensions. A stride that is not given is the kernel."""
    given = (kernel, kernel if stride in (None, [], ()) else stride, padding, dilation)
    lists = [list(v) if isinstance(v, (list, tuple)) else [v] for v in given]
    return [v * 2 if len(v) == 1 else v for v in lists]


def pooled_size(size, kernel, stride, padding, dilation=1, ceil_mode=False):
    """Output length of a pool along one dim, by eager's rule: the last window must start inside the
    left-padded input."""
    reach = size + 2 * padding - dilation * (kernel - 1) - 1
    out = -(-reach // stride) + 1 if ceil_mode else reach // stride + 1
    return out - 1 if ceil_mode and (out - 1) * stride >= size + padding else out


def _windows(x, kernel, stride, padding, dilation, out, fill):
    """Yields (offsets, slice of x at those offsets of every window) for all positions of the window,
    row by row."""
    n = len(kernel)
    pad = []
    for d in reversed(range(n)):
        need = (out[d] - 1) * stride[d] + dilation[d] * (kernel[d] - 1) + 1
        pad += [padding[d], max(need - x.shape[x.dim() - n + d] - padding[d], 0)]
    padded = aten.constant_pad_nd.default(x, pad, fill) if any(p != 0 for p in pad) else x
    for offsets in itertools.product(*(range(k) for k in kernel)):
        window = padded
        for d in range(n):
            start = offsets[d] * dilation[d]
            end = start + (out[d] - 1) * stride[d] + 1
            window = aten.slice.Tensor(window, x.dim() - n + d, start, end, stride[d])
        yield offsets, window


def _concrete(*sizes) -> bool:
    return all(isinstance(s, int) for s in sizes)


# %% [markdown]
# ## Max pooling
#
# The index is that of the pixel in its plane. Ties keep the first pixel, a NaN wins over everything before
# it: eager's rule, or gradients would go elsewhere. Padding is -inf, and a window of nothing but -inf
# answers with its first real pixel.
#
# The loop carries the place *within the window*, a number below 25, and computes the pixel's index from it
# at the end. That matters for training: backward asks each window whether this pixel was its largest, and
# that is a comparison of int8 places, if it can get them. So the index carries its `place` along as an
# attribute. Where both passes are in one graph, backward finds it there; the partitioner then saves the
# places, an eighth of the memory, and nothing computes the index.
#
# The forward rule goes over the positions of the window. It keeps the best value so far and the number of the
# position at which it was found, in one byte, and replaces both where the new value is better. Only at the
# end is the position turned into an index.
#
# Backward is written from the side of the input: each pixel adds up the gradients of the windows that chose
# it. `_covering` lists which windows contain a pixel; there are few, and the list has the same length for all
# pixels, so no scatter is needed.
#
# A CPU vectorizes backward over the channels if they are the innermost dimension. Over the pixels of a row it would have to gather, which
# takes several times as long as eager's kernel, and twice that where a batch norm reads the gradient for its sums and for its result. So
# the backward pass of an image whose channels lie outside is left to eager, which takes the index from the forward rule.

# %%
@decomposition("max_pool2d_with_indices")
def max_pool2d_with_indices(x, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False):
    kernel, stride, padding, dilation = _pairs(kernel_size, stride, padding, dilation)
    if math.prod(kernel) > UNROLL or not x.is_floating_point() or not _concrete(*x.shape[-2:]):
        return NotImplemented
    size = x.shape[-2:]
    out = [pooled_size(*a, ceil_mode) for a in zip(size, kernel, stride, padding, dilation)]
    begin = [iota(o, x) * s - p if p else iota(o, x) * s for o, s, p in zip(out, stride, padding)]
    best = offset = None
    for (i, j), value in _windows(x, kernel, stride, padding, dilation, out, -math.inf):
        if best is None:
            skipped = [_first_inside(*a) for a in zip(begin, dilation, padding)]
            offset = (skipped[0].unsqueeze(1) * kernel[1] + skipped[1]).to(torch.int8).expand(value.shape)
            best = value
            continue
        better = (value > best) | (value != value)
        best = torch.where(better, value, best)
        offset = torch.where(better, constant(i * kernel[1] + j, x, torch.int8), offset)
    place = offset.to(torch.int64)
    row = torch.div(place, kernel[1], rounding_mode="floor")
    column = place - row * kernel[1]
    index = (begin[0].unsqueeze(1) + row * dilation[0]) * size[1] + (begin[1] + column * dilation[1])
    index.place = offset
    return (best.clone() if math.prod(kernel) == 1 else best), index


def _first_inside(begin, dilation, padding):
    """How many positions of each window lie before the first pixel."""
    if not padding:
        return begin * 0
    outside = torch.clamp(-begin, min=0)
    return torch.div(outside + (dilation - 1), dilation, rounding_mode="floor") if dilation > 1 else outside


def _covering(size, out, kernel, stride, padding, dilation=1):
    """The windows covering each input position: yields (window number, is it a real one), vectors of
    length `size`."""
    def vectors(like):
        position = iota(size, like) + padding if padding else iota(size, like)
        span = dilation * (kernel - 1)
        last = torch.div(position, stride, rounding_mode="floor")
        for back in range(span // stride + 1):
            number = last - back if back else last
            covers = (number >= 0) & (number < out) & (position - number * stride <= span)
            yield torch.clamp(number, 0, out - 1), covers
    return vectors


def _gathered(grad, covering, value_of):
    """Sum `value_of(rows, columns)` over the windows covering each pixel."""
    total = None
    for (rows, row_ok), (columns, column_ok) in itertools.product(*(list(c(grad)) for c in covering)):
        at = [None] * (grad.dim() - 2) + [rows.unsqueeze(1), columns]
        value = torch.where(row_ok.unsqueeze(1) & column_ok, value_of(at), constant(0, grad))
        total = value if total is None else total + value
    return total


def _few(kernel, stride, dilation=(1, 1)) -> bool:
    return math.prod(d * (k - 1) // s + 1 for k, s, d in zip(kernel, stride, dilation)) <= UNROLL


def _would_gather(x) -> bool:
    """Are neighbouring channels of `x` apart in the memory of a CPU?"""
    return x.device.type == "cpu" and x.shape[-3] != 1 and x.stride(-3) != 1


@decomposition("max_pool2d_with_indices_backward", float32=True)
def max_pool2d_with_indices_backward(grad, x, kernel_size, stride, padding, dilation, ceil_mode, indices):
    kernel, stride, padding, dilation = _pairs(kernel_size, stride, padding, dilation)
    size, out = x.shape[-2:], grad.shape[-2:]
    if not _few(kernel, stride, dilation) or not _concrete(*size, *out) or _would_gather(x):
        return NotImplemented
    covering = [_covering(*a) for a in zip(size, out, kernel, stride, padding, dilation)]
    pixel = iota(size[0], x).unsqueeze(1) * size[1] + iota(size[1], x)
    place = getattr(indices, "place", None) if dilation == [1, 1] else None

    def share(at):
        if place is None:
            chosen = aten.index.Tensor(indices, at) == pixel
        else:
            within = [iota(n, x) + p - w.flatten() * s for n, p, w, s in zip(size, padding, at[-2:], stride)]
            own = (within[0].unsqueeze(1) * kernel[1] + within[1]).to(torch.int8)
            chosen = aten.index.Tensor(place, at) == own
        return torch.where(chosen, aten.index.Tensor(grad, at), constant(0, grad))

    return _gathered(grad, covering, share)


# %% [markdown]
# ## Average pooling
#
# Border windows count padding or not (`count_include_pad`), and a `ceil_mode` window that hangs over the
# padded edge never counts the overhang. The divisor depends on the window's place only, so it is a product
# of two vectors.
#
# `_window_length` counts the positions of each window that count, along one dimension; the divisor is the
# product for both. The gradient of each window is divided by its divisor and then gathered by the pixels, as
# for the maximum.

# %%
def _window_length(size, out, kernel, stride, padding, include_pad, like):
    """How many positions of each window count, a vector of length `out`."""
    start = iota(out, like) * stride - padding
    end = torch.clamp(start + kernel, max=size + padding)
    if not include_pad:
        start, end = torch.clamp(start, min=0), torch.clamp(end, max=size)
    return end - start


def _divisor(x, size, out, kernel, stride, padding, include_pad, override):
    if override is not None:
        return override
    fits = all((o - 1) * s + k <= n + 2 * p for n, o, k, s, p in zip(size, out, kernel, stride, padding))
    if fits and (include_pad or not any(padding)):
        return math.prod(kernel)
    lengths = [_window_length(*a, include_pad, x) for a in zip(size, out, kernel, stride, padding)]
    return (lengths[0].unsqueeze(1) * lengths[1]).to(x.dtype)


@decomposition("avg_pool2d", float32=True)
def avg_pool2d(x, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True,
               divisor_override=None):
    kernel, stride, padding, _ = _pairs(kernel_size, stride, padding)
    size = list(x.shape[-2:])
    if not _concrete(*size) or not x.is_floating_point():
        return NotImplemented
    out = [pooled_size(*a, 1, ceil_mode) for a in zip(size, kernel, stride, padding)]
    if kernel == size and out == [1, 1] and not any(padding) and divisor_override is None:
        return torch.mean(x, [-2, -1], True)
    if math.prod(kernel) > UNROLL:
        return NotImplemented
    total = None
    for _, value in _windows(x, kernel, stride, padding, [1, 1], out, 0):
        total = value if total is None else total + value
    return total / _divisor(x, size, out, kernel, stride, padding, count_include_pad, divisor_override)


@decomposition("avg_pool2d_backward", float32=True)
def avg_pool2d_backward(grad, x, kernel_size, stride, padding, ceil_mode, count_include_pad,
                        divisor_override):
    kernel, stride, padding, _ = _pairs(kernel_size, stride, padding)
    size, out = list(x.shape[-2:]), list(grad.shape[-2:])
    if not _few(kernel, stride) or not _concrete(*size, *out) or not grad.is_floating_point():
        return NotImplemented
    share = grad / _divisor(x, size, out, kernel, stride, padding, count_include_pad, divisor_override)
    if out == [1, 1] and kernel == size and not any(padding):
        return share.expand(x.shape).clone()
    covering = [_covering(*a) for a in zip(size, out, kernel, stride, padding)]
    return _gathered(grad, covering, lambda at: aten.index.Tensor(share, at))


@decomposition("_adaptive_avg_pool2d")
def adaptive_avg_pool2d(x, output_size):
    size, out = list(x.shape[-2:]), list(output_size)
    if not _concrete(*size, *out) or 0 in out or any(s % o for s, o in zip(size, out)):
        return NotImplemented
    return aten.avg_pool2d.default(x, [s // o for s, o in zip(size, out)])


@decomposition("_adaptive_avg_pool2d_backward")
def adaptive_avg_pool2d_backward(grad, x):
    size, out = list(x.shape[-2:]), list(grad.shape[-2:])
    if not _concrete(*size, *out) or 0 in out or any(s % o for s, o in zip(size, out)):
        return NotImplemented
    kernel = [s // o for s, o in zip(size, out)]
    return aten.avg_pool2d_backward.default(grad, x, kernel, kernel, [0, 0], False, True, None)


# %% [markdown]
# ## Nearest-neighbour resizing
#
# Output pixel `i` reads input pixel `floor(i / scale)`: an index map that is data only in name. Eager's kernels do not look at the scale
# where a dimension keeps its size, and some where it doubles; so where 2 pixels become 2 by a scale of 1.3, the kernel is asked.

# %%
def _source(out, size, scale, like, exact):
    """The input position for each of `out` output positions, as eager computes it: in float32."""
    ratio = struct.unpack("f", struct.pack("f", 1.0 / scale if scale else size / out))[0]
    steps = iota(out, like).to(torch.float32)
    place = torch.floor(((steps + 0.5) if exact else steps) * ratio).to(torch.int64)
    return torch.clamp(place, max=size - 1)


def _nearest(x, output_size, scales, exact):
    n = len(output_size)
    if not _concrete(*x.shape[2:], *output_size) or any(
            f and o != s * f and o in (s, 2 * s) for o, s, f in zip(output_size, x.shape[2:], scales)):
        return NotImplemented
    at = [_source(o, s, f, x, exact).view([-1] + [1] * (n - 1 - d))
          for d, (o, s, f) in enumerate(zip(output_size, x.shape[2:], scales))]
    return aten.index.Tensor(x, [None, None, *at])


for _name, _exact in (("upsample_nearest", False), ("_upsample_nearest_exact", True)):
    for _n in (1, 2, 3):
        decomposition(f"{_name}{_n}d")(
            lambda x, size, *scales, exact=_exact, n=_n, **kw:
            _nearest(x, size, list(scales or kw.values()) or [None] * n, exact))
