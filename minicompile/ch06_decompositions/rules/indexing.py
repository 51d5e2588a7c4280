# %% [markdown]
# # Views, indexing and creation
#
# Half of this room is vocabulary: `t`, `transpose` and `permute` are one thing, `split`, `chunk` and
# `unbind` are slices, and the `_copy` variants that copy a view are the view and a `clone`. The other half
# is gradients of views. The gradient of a slice is zeros with a slice written into it, which the loop stage
# reads as "inside the range: the gradient, outside: 0".

# %%
from functools import partial

import torch
from torch import get_default_dtype

from ...ch01_graphs.layouts import same_layout
from ...ch01_graphs.shapes import float_function
from ...ch01_graphs.symbolic import present
from ..table import HALF, aten, constant, decomposition, dims_of, formulas, iota, overload, promoted, widen

# %% [markdown]
# ## Names for the same views
#
# In a functional graph an alias and its base are the same value.
#
# So most of these rules give back their operand, or call the one view that the later stages know: `t` and
# `transpose` become `permute`, `unbind` becomes a `select` for each index, `split` a `slice` for each part.

# %%
formulas({
    "alias detach lift_fresh lift": lambda x: x,
    "_unsafe_view _reshape_alias": lambda x, size, stride=None: aten.view.default(x, size),
}, complex=True)


@decomposition("expand", complex=True)
def expand(x, size, implicit=False):
    """A tensor that has the size already is itself. (Loops would take it for one that is read at other places.)"""
    same = len(size) == x.dim() and all(type(n) is type(m) is int and n in (m, -1) for n, m in zip(size, x.shape))
    return x if same else NotImplemented


@decomposition("transpose.int", complex=True)
def transpose(x, dim0, dim1):
    order = list(range(x.dim()))
    if order:
        order[dim0], order[dim1] = order[dim1], order[dim0]
    return aten.permute.default(x, order)


formulas({
    "t": lambda x: aten.permute.default(x, [1, 0]) if x.dim() == 2 else x,
    "squeeze squeeze.dim": lambda x, dim=None: aten.squeeze.dims(x, dims_of(dim, x.dim())),
    "unbind.int": lambda x, dim=0: [aten.select.int(x, dim, i) for i in range(x.shape[dim])],
}, complex=True)


@decomposition("split.Tensor", "unsafe_split.Tensor", complex=True)
def split(x, size, dim=0):
    total = x.shape[dim]
    if total == 0 or size == 0:
        return NotImplemented
    return [aten.slice.Tensor(x, dim, at, min(at + size, total)) for at in range(0, total, size)]


@decomposition("split_with_sizes", "unsafe_split_with_sizes", complex=True)
def split_with_sizes(x, sizes, dim=0):
    out, at = [], 0
    for size in sizes:
        out.append(aten.slice.Tensor(x, dim, at, at + size))
        at = at + size
    return out


def _copy_variant(name: str, kind: str = "") -> None:
    view = overload(f"{name}.{kind}")

    @decomposition(f"{name}_copy.{kind}", complex=True)
    def copied(*args, **kwargs):
        out = view(*args, **kwargs)
        if isinstance(out, (list, tuple)):
            return [x.clone(memory_format=torch.contiguous_format) for x in out]
        return out.clone(memory_format=torch.contiguous_format)


for _spec in ("alias expand permute t transpose.int squeeze squeeze.dim squeeze.dims unsqueeze "
              "slice.Tensor select.int diagonal unfold as_strided split.Tensor split_with_sizes unbind.int "
              "view.dtype detach lift_fresh").split():
    _copy_variant(*_spec.split("."))


@decomposition("view_copy", complex=True)
def view_copy(x, size):
    """Also of what could not be a view."""
    return x.reshape(size).clone(memory_format=torch.contiguous_format)


@decomposition("narrow_copy", complex=True)
def narrow_copy(x, dim, start, length):
    start = start + x.shape[dim] if start < 0 else start
    return aten.slice.Tensor(x, dim, start, start + length).clone(memory_format=torch.contiguous_format)


@decomposition("rot90", complex=True)
def rot90(x, k=1, dims=(0, 1)):
    if k % 4 == 0:
        return x.clone(memory_format=torch.contiguous_format)
    if k % 4 == 2:
        return torch.flip(x, list(dims))
    return torch.flip(x, [dims[1 if k % 4 == 1 else 0]]).transpose(*dims)


# %% [markdown]
# ## Joining and repeating
#
# `stack` is `cat` after an `unsqueeze`. Repeating is an `expand` along a new dimension that is then folded
# into its neighbour. No data moves in an expand; it moves once, when a loop writes the folded result.
#
# A roll is two slices, joined the other way round.

# %%
@decomposition("stack", complex=True)
def stack(tensors, dim=0):
    dim = dim % (tensors[0].dim() + 1)
    return torch.cat([t.unsqueeze(dim) for t in tensors], dim)


@decomposition("repeat", complex=True)
def repeat(x, repeats):
    lead = len(repeats) - x.dim()
    shape = [1] * lead + list(x.shape)
    pairs = [n for pair in zip([1] * len(shape), shape) for n in pair]
    spread = [n for pair in zip(repeats, shape) for n in pair]
    out = x.reshape(pairs).expand(spread).clone(memory_format=torch.contiguous_format)
    return out.view([r * n for r, n in zip(repeats, shape)])


@decomposition("roll", complex=True)
def roll(x, shifts, dims=()):
    if not dims:
        flat = roll(x.reshape(-1), shifts, [0])
        return flat if flat is NotImplemented else flat.view(x.shape)
    for shift, dim in zip(shifts, dims):
        size = x.shape[dim] if x.dim() else 0
        if not isinstance(size, int) or size == 0:
            return NotImplemented
        cut = (size - shift) % size
        x = torch.cat([aten.slice.Tensor(x, dim, cut, size), aten.slice.Tensor(x, dim, 0, cut)], dim)
    return x


@decomposition("pixel_shuffle", complex=True)
def pixel_shuffle(x, r):
    *lead, c, h, w = x.shape
    n = len(lead)
    out = x.reshape([*lead, c // (r * r), r, r, h, w])
    out = out.permute([*range(n), n, n + 3, n + 1, n + 4, n + 2]).clone(memory_format=torch.contiguous_format)
    return out.view([*lead, c // (r * r), h * r, w * r])


@decomposition("channel_shuffle", complex=True)
def channel_shuffle(x, groups):
    """As a call it might return its operand, on a GPU, where new memory is expected."""
    if 0 in x.shape:
        return NotImplemented
    apart = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    return apart.transpose(1, 2).clone(memory_format=torch.contiguous_format).reshape(x.shape)


@decomposition("pixel_unshuffle", complex=True)
def pixel_unshuffle(x, r):
    *lead, c, h, w = x.shape
    n = len(lead)
    out = x.reshape([*lead, c, h // r, r, w // r, r])
    out = out.permute([*range(n), n, n + 2, n + 4, n + 1, n + 3]).clone(memory_format=torch.contiguous_format)
    return out.view([*lead, c * r * r, h // r, w // r])


# %% [markdown]
# ## Gradients of views

# %%
def _zeros(size, like):
    return aten.full.default(list(size), 0, dtype=like.dtype, device=like.device)


formulas({
    "slice_backward": lambda grad, sizes, dim, start, end, step: (
        aten.slice_scatter.default(_zeros(sizes, grad), grad, dim, start, end, step)),
    "select_backward": lambda grad, sizes, dim, index: aten.select_scatter.default(_zeros(sizes, grad), grad, dim, index),
}, complex=True)


@decomposition("diagonal_scatter", complex=True)
def diagonal_scatter(x, src, offset=0, dim1=0, dim2=1):
    dim1, dim2 = dim1 % x.dim(), dim2 % x.dim()
    along = iota(src.shape[-1], x)
    place: list = [None] * x.dim()
    place[dim1], place[dim2] = along + max(-offset, 0), along + max(offset, 0)
    front = min(dim1, dim2) if abs(dim1 - dim2) == 1 else 0     # where indexing puts the dim that it makes
    out = aten.index_put.default(x, place, torch.movedim(src, -1, front).to(x.dtype))
    return out if same_layout(out, x) else aten.slice_scatter.default(x, out)       # with the gaps of `x`, which `index_put` drops


@decomposition("diagonal_backward", complex=True)
def diagonal_backward(grad, sizes, offset, dim1, dim2):
    return diagonal_scatter(_zeros(sizes, grad), grad, offset, dim1, dim2)


# %% [markdown]
# ## The gradient of an embedding
#
# Rows of the gradient that share a token must be added up: an accumulating `index_put`. For half types the
# sums are taken in float32, as eager's kernel does; the padding row gets nothing.

# %%
@decomposition("embedding_dense_backward")
def embedding_dense_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq):
    if scale_grad_by_freq:
        return NotImplemented
    rows = widen(grad)
    if padding_idx >= 0:
        rows = torch.where((indices == padding_idx).unsqueeze(-1), constant(0, rows), rows)
    table = _zeros([num_weights, grad.shape[-1]], rows)
    return aten.index_put.default(table, [indices], rows, True).to(grad.dtype)


# %% [markdown]
# ## Reading and writing at indices
#
# Two forms are primitives: reading a tensor at index tensors, and `index_put`, which writes there, or adds.
# The others say in their own way which indices they mean: along one dimension (`index_add`), flattened
# (`take`), or by a mask, where nothing is written at all and `where` chooses. A triangle is a comparison of
# row and column numbers.

# %%
formulas({
    "_unsafe_index.Tensor": aten.index.Tensor,
    "take": lambda x, index: aten.index.Tensor(x.reshape(-1), [index]),
    "_unsafe_index_put _index_put_impl": lambda x, indices, values, accumulate=False, unsafe=False: (
        aten.index_put.default(x, indices, values, accumulate)),
}, complex=True)


def _at(x, dim, index, wrap=True):
    """Indices that select `index` along `dim` of x. wrap: negative ones count from the end; else they are out of range."""
    index = index.reshape(-1)
    return [None] * (dim % max(x.dim(), 1)) + [index if wrap else torch.where(index < 0, x.shape[dim] if x.dim() else 1, index)]


@decomposition("index_add", complex=True)
def index_add(x, dim, index, source, alpha=1):
    if x.dim() == 0 or x.dtype is torch.bool:
        return NotImplemented
    source = source if alpha == 1 else source * alpha
    if x.dtype not in HALF:
        return aten.index_put.default(x, _at(x, dim, index, wrap=False), source, True)
    return aten.index_put.default(widen(x), _at(x, dim, index, wrap=False), widen(source), True).to(x.dtype)


@decomposition("index_fill.int_Scalar", "index_fill.int_Tensor", complex=True)
def index_fill(x, dim, index, value):
    value = value.to(x.dtype) if isinstance(value, torch.Tensor) else constant(value, x)
    return aten.index_put.default(x, _at(x, dim, index), value) if x.dim() else NotImplemented


formulas({
    "index_copy": lambda x, dim, index, source: (
        aten.index_put.default(x, _at(x, dim, index, wrap=False), source) if x.dim() else NotImplemented),
    "scatter.value": lambda x, dim, index, value: aten.scatter.src(x, dim, index, constant(value, x).expand(index.shape)),
}, complex=True)


@decomposition("masked_fill.Scalar", "masked_fill.Tensor", complex=True)
def masked_fill(x, mask, value):
    value = value.to(x.dtype) if isinstance(value, torch.Tensor) else constant(value, x)
    return torch.where(mask, value, x)


formulas({"trace": lambda x: torch.sum(torch.diagonal(x))})


def _triangle(name: str, keep) -> None:
    @decomposition(name, complex=True)
    def triangle(x, diagonal=0):
        rows, columns = iota(x.shape[-2], x, -2, x.dim()), iota(x.shape[-1], x, -1, x.dim())
        return torch.where(keep(columns - rows, diagonal), x, constant(0, x)).contiguous()


_triangle("tril", torch.le)
_triangle("triu", torch.ge)


def _reflected(size, before, after, like):
    place = torch.abs(iota(size + before + after, like) - before)
    return (size - 1) - torch.abs((size - 1) - place)


def _repeated(size, before, after, like):
    return torch.clamp(iota(size + before + after, like) - before, 0, size - 1)


def _padding(name: str, source) -> None:
    @decomposition(name, complex=True)
    def pad(x, padding):
        varies = not all(isinstance(s, int) for s in x.shape)       # halves in an inside of unknown length are converted one by one
        if varies and x.element_size() < 4 or any(isinstance(s, int) and s == 0 for s in x.shape):
            return NotImplemented
        at: list = [None] * x.dim()
        padded = [d for d in range(len(padding) // 2) if any(padding[2 * d:2 * d + 2])]
        for d in range(padded[0], padded[-1] + 1) if padded else ():        # with what lies between: neighbours stay in their places
            at[-1 - d] = source(x.shape[-1 - d], *padding[2 * d:2 * d + 2], x).view([-1] + [1] * (d - padded[0]))
        return aten.index.Tensor(x, at) if padded else x.clone()


for _n in (1, 2, 3):
    _padding(f"reflection_pad{_n}d", _reflected)
    _padding(f"replication_pad{_n}d", _repeated)


# %% [markdown]
# ## Creation
#
# All constants are `full`, all ranges `arange.start_step`. `full_like` keeps the order of dims in memory of
# its model, so that the zeros that join a channels_last computation are channels_last too.
#
# `_sized` makes a constant tensor of a given size and layout, and all `zeros` and `ones` end in it. (A `full` of the program stays as it
# is: what the loop stage does not find in its arguments, it finds in its fake.)
#
# `_like` makes it in the order of its model, and permutes it back.

# %%
CPU = torch.device("cpu")


def _sized(value, size, *, dtype=None, device=None, layout=None, pin_memory=None, like=None):
    """A tensor filled with a value, or uninitialised where that is None."""
    if layout not in (None, torch.strided):
        return NotImplemented
    place = dict(dtype=dtype or (get_default_dtype() if like is None else like.dtype),
                 device=device or (CPU if like is None else like.device))
    if value is None:
        return aten.empty.memory_format(size, **place)
    return aten.full.default(size, value, **place)


def _new(value, like, size, **options):
    return _sized(value, size, like=like, **options)


def _like(value, like, *, memory_format=None, **options):
    """In the memory order of `like` where eager would preserve it."""
    order = list(range(like.dim()))
    if memory_format is torch.channels_last and like.dim() == 4 or memory_format is torch.channels_last_3d:
        order = [0, *range(2, like.dim()), 1]
    elif memory_format in (None, torch.preserve_format) and not like.is_contiguous():
        order.sort(key=lambda d: (-present(like.stride(d)), d))
    out = _sized(value, [like.shape[d] for d in order], like=like, **options)
    if out is NotImplemented or order == sorted(order):
        return out
    return aten.permute.default(out, [order.index(d) for d in range(like.dim())])


for _name, _value in (("zeros", 0), ("ones", 1), ("empty", None)):
    decomposition(_name + "_like", complex=True)(partial(_like, _value))
    decomposition("new_" + _name, complex=True)(partial(_new, _value))
decomposition("zeros", "_efficientzerotensor", complex=True)(partial(_sized, 0))
decomposition("ones", complex=True)(partial(_sized, 1))


formulas({
    "full_like": lambda x, value, **options: _like(value, x, **options),
    "new_full": lambda x, size, value, **options: _new(value, x, size, **options),
    "scalar_tensor": lambda value, **options: _sized(value, [], **options),
}, complex=True)


@decomposition("fill.Scalar", "fill.Tensor", complex=True)
def fill(x, value):
    if isinstance(value, torch.Tensor):
        return torch.where(torch.ones_like(x, dtype=torch.bool), value.to(device=x.device, dtype=x.dtype), x)
    return torch.full_like(x, value)


formulas({
    "zero": torch.zeros_like,
    "copy": lambda x, src, non_blocking=False: src.to(device=x.device, dtype=x.dtype).expand(x.shape).clone(),
}, complex=True)


@decomposition("arange", "arange.start")
def arange(*bounds, dtype=None, layout=None, device=None, pin_memory=None):
    start, end = bounds if len(bounds) == 2 else (0, bounds[0])
    return aten.arange.start_step(start, end, 1, dtype=dtype or promoted(start, end), device=device or CPU)


@decomposition("linspace")
def linspace(start, end, steps, *, dtype=None, layout=None, device=None, pin_memory=None):
    dtype = dtype or get_default_dtype()
    if dtype not in (torch.float32, torch.float64) or steps < 2 or any(isinstance(x, complex) for x in (start, end)):
        return NotImplemented
    held = float_function("float32" if dtype is torch.float32 else "float")
    start, end = held(start), held(end)
    step = held(held(end - start) / held(steps - 1))
    i = aten.arange.start_step(0, steps, 1, dtype=torch.int64, device=device or CPU)
    x = i.to(torch.float64)              # eager rounds a sum and a product once, which float32 numbers in float64 are as well
    return torch.where(i < steps // 2, start + x * step, end - (steps - 1 - x) * step).to(dtype)


@decomposition("eye", "eye.m")
def eye(rows, columns=None, *, dtype=None, layout=None, device=None, pin_memory=None):
    i, j = (aten.arange.start_step(0, n, 1, dtype=torch.int64, device=device or CPU)
            for n in (rows, rows if columns is None else columns))
    return (i.unsqueeze(1) == j).to(dtype or get_default_dtype())


@decomposition("block_diag")
def block_diag(tensors):
    dtype = promoted(*tensors)
    tensors = [t.reshape([1, 1]) if t.dim() == 0 else t.unsqueeze(0) if t.dim() == 1 else t for t in tensors]
    columns, left, rows = sum(t.shape[1] for t in tensors), 0, []
    for t in tensors:
        rows.append(aten.constant_pad_nd.default(t, [left, columns - left - t.shape[1]], 0))
        left += t.shape[1]
    return torch.cat(rows, 0).to(dtype)
