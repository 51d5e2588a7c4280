# %% [markdown]
# # The loops, executed
#
# What does a program of loops mean? This module says it in the plainest way: take every point of the
# iteration space, and run the body. It is the `loops` rung of the ladder, the oracle for both code
# generators, and nobody's idea of fast.
#
# "Every point" is done at once: a variable is an integer tensor that holds its value at all points, a value
# is a tensor of results at all points, and `load` is an indexing operation. Every access is checked against
# the bounds of its buffer, so an index that a fast kernel would silently read out of range is an error here.

# %%
import math

import torch

from ..ch01_graphs.symbolic import evaluate, symbols
from ..errors import OutOfRange
from .ir import Loop, Value, replay

MOST_POINTS = 1 << 22

# %% [markdown]
# ## The handler
#
# A body runs forwards, `replay(body, handler.step)`. Most operations are the PyTorch function of the same name, the others
# a method here. Index expressions are evaluated
# with tensors for symbols: `4*i0 + r0` is then the index at every point.
#
# An example. In a loop over 2 rows of 3 elements `env` holds a tensor of shape [2, 1] for `i0` and one of shape
# [3] for `r0`. The index `3*i0 + r0`, evaluated with these by broadcasting, is a tensor of six addresses. A load
# indexes the buffer's storage with it, and every operation after it works on tensors of shape [2, 3]. A `reduce`
# folds the dimensions of the reduction variables and leaves them with size 1, so that the result broadcasts
# against what follows. Every load and store checks that its addresses lie in the buffer. That makes this slow
# interpreter a good test: a kernel would silently read something else.

# %%
class GridHandler:
    """Evaluates a body over `grid`, whose first `out_dims` dims index the output and whose others are
    reduced. `env`: symbol name -> its value at all points. Stores are only collected."""

    def __init__(self, storages, env: dict, grid: tuple[int, ...], out_dims: int):
        self.storages, self.env, self.grid, self.out_dims = storages, env, grid, out_dims
        self.stores: list[tuple] = []

    def step(self, value: Value, args: tuple):
        if value.op == "bitcast":
            return args[0].contiguous().view(value.dtype)
        own = getattr(self, value.op, None)
        return own(*args, dtype=value.dtype) if own else (SCALAR.get(value.op) or OTHERS[value.op])(*args).to(value.dtype)

    def at(self, expr, dtype=torch.int64):
        return torch.as_tensor(evaluate(expr, self.env), dtype=dtype)

    def position(self, buffer, index, mask):
        where = self.at(index)
        if mask is not None:
            where = torch.where(mask, where, 0)
        self.check(where, self.storages[buffer].numel(), f"index {index} of {buffer}")
        return where

    def check(self, where, size: int, what: str):
        low, high = (int(where.min()), int(where.max())) if where.numel() else (0, -1)
        if low < 0 or high >= size:
            raise OutOfRange(f"{what} runs from {low} to {high}: out of range for {size} elements")

    def load(self, buffer, index, mask, *, dtype):
        if mask is not None and not bool(mask.any()):
            return torch.zeros((), dtype=dtype)
        storage, where = self.storages[buffer], self.position(buffer, index, mask)
        value = storage[where.to(storage.device)].to(where.device)          # a number of the host is elsewhere
        return value if mask is None else torch.where(mask, value, torch.zeros((), dtype=value.dtype))

    def store(self, buffer, index, mask, value, mode, *, dtype):
        self.stores.append((buffer, self.position(buffer, index, mask), value, mode, mask))

    def constant(self, value, *, dtype):
        return torch.tensor(value, dtype=dtype)

    def index(self, expr, *, dtype):
        if dtype is torch.float64:
            [argument] = symbols(expr)
            return self.env[argument.name]
        return self.at(expr, dtype)

    def indirect(self, value, symbol, size, *, dtype):
        self.check(value, int(self.at(size)), "an index that is data")
        self.env[symbol.name] = value
        return value

    def philox(self, seed, offset, index, layout, *, dtype):
        return philox_uniform(seed, offset, self.at(index), layout)

    def reduce(self, kind, value, position, *, dtype):
        def rows(t):
            return t.broadcast_to(self.grid).reshape(self.grid[:self.out_dims] + (-1,))

        out = extreme(rows(value), rows(self.at(position)), kind) if kind in ("argmax", "argmin") else \
            REDUCE[kind](rows(value).to(dtype))
        pad = (1,) * (len(self.grid) - self.out_dims)
        if isinstance(out, tuple):
            return tuple(o.reshape(o.shape + pad) for o in out)
        return out.reshape(out.shape + pad)

# %% [markdown]
# Philox is the counter-based generator of CUDA: ten rounds turn a key (the seed) and a counter into four 32-bit numbers. The counter
# is made of a thread's number and of how often it has drawn. `random.py` says which thread eager has for which element.

# %%
def philox_uniform(seed, offset, index, layout):
    """Uniform float32 numbers in (0, 1] for each element of `index` (int64). layout: how many elements a thread takes at a time, and how
    many threads there are."""
    low, (width, threads) = 0xFFFFFFFF, layout
    group = index // width
    thread, draw = group % threads, offset // 4 + group // threads * -(-width // 4) + index % width // 4
    c = [draw & low, draw >> 32, thread & low, 0 * thread]
    key = [seed & low, (seed >> 32) & low]
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [((b >> 32) & low) ^ c[1] ^ key[0], b & low, ((a >> 32) & low) ^ c[3] ^ key[1], a & low]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    component = (index % 4)[None].broadcast_to(1, *c[0].shape)
    bits = torch.stack(torch.broadcast_tensors(*c)).gather(0, component)[0]
    return bits.to(torch.float32) * 2.0**-32 + 2.0**-33

# %% [markdown]
# The reductions fold the last dim. `welford` gives what a running variance has at the end: the mean, the sum of the squared
# distances from it, and the count. The position of an extreme is the first one where it occurs, as in
# PyTorch, whatever order the loop has.

# %%
def extreme(value, place, kind):
    """The smallest `place` along the last dim where the extreme is. A NaN is more extreme than any number."""
    if value.dtype is torch.bool:
        value = value.to(torch.uint8)
    best = (value.amax if kind == "argmax" else value.amin)(-1, keepdim=True)
    hit = (value == best) | (value != value)
    return torch.where(hit, place, torch.iinfo(torch.int64).max).amin(-1)


def welford(v):
    mean = v.mean(-1)
    return mean, ((v - mean[..., None]) ** 2).sum(-1), torch.full_like(mean, v.shape[-1])


REDUCE = {"sum": lambda v: v.sum(-1), "prod": lambda v: v.prod(-1), "max": lambda v: v.amax(-1),
          "min": lambda v: v.amin(-1), "any": lambda v: v.any(-1), "welford": welford}

SCALAR = {name: getattr(torch, name) for name in
          "neg abs exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan asin acos atan sinh "
          "cosh tanh asinh acosh atanh erf erfc erfinv lgamma digamma sigmoid floor ceil round trunc sign "
          "signbit logical_not bitwise_not add sub mul remainder fmod pow atan2 hypot "
          "nextafter eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and "
          "bitwise_or bitwise_xor".split()}
for kind in torch.maximum, torch.minimum:       # of 0.0 and -0.0 PyTorch takes one or the other, by their place in memory
    SCALAR[kind.__name__] = lambda a, b, kind=kind: torch.where(torch.eq(a, b), a, kind(a, b))
SCALAR.update(truediv=torch.true_divide, floordiv=torch.floor_divide,
              truncdiv=lambda a, b: torch.div(a, b, rounding_mode="trunc"),
              lshift=torch.bitwise_left_shift, rshift=torch.bitwise_right_shift, erf_plus_one=lambda a: 1 + torch.erf(a))
OTHERS = {"where": torch.where, "to_dtype": lambda x: x, "round_to": lambda x, half: x.to(half), "get": lambda values, i: values[i]}

# %% [markdown]
# ## Running a loop
#
# A grid too large for memory is cut along the first output variable. All stores of a chunk happen after all
# its loads. Positions and constants are made where the loop writes.

# %%
def run_loop(loop: Loop, storages: dict[str, torch.Tensor], sizes: dict[str, int]) -> None:
    variables = loop.vars + loop.reduction_vars
    shape = tuple(evaluate(s.size, sizes) for s in variables)
    if 0 in shape:
        return
    rows = max(1, MOST_POINTS // max(1, math.prod(shape[1:])))
    with torch.device(storages[loop.outputs[0]].device):
        for start in range(0, shape[0], rows) if loop.vars else [0]:
            grid = (min(rows, shape[0] - start), *shape[1:]) if loop.vars else shape
            run_chunk(loop, storages, sizes, grid, start)


def run_chunk(loop: Loop, storages: dict[str, torch.Tensor], sizes: dict[str, int], grid: tuple[int, ...], start: int) -> None:
    """The part of a loop that begins at `start` of its first variable and has the sizes `grid`."""
    env = {name: torch.tensor(size, dtype=torch.float64 if type(size) is float else None)
           for name, size in sizes.items()}
    for d, symbol in enumerate(loop.vars + loop.reduction_vars):
        first = start if d == 0 else 0
        env[symbol.name] = torch.arange(first, first + grid[d]).reshape([-1] + [1] * (len(grid) - 1 - d))
    handler = GridHandler(storages, env, grid, len(loop.vars))
    replay(loop.body, handler.step)
    for buffer, where, value, mode, mask in handler.stores:
        perform_store(storages[buffer], where, value, mode, mask, grid, len(loop.vars))


def perform_store(storage, where, value, mode, mask, grid, out_dims) -> None:
    """Perform one `store` over the grid."""
    points = torch.broadcast_shapes(where.shape, value.shape, grid[:out_dims] + (1,) * (len(grid) - out_dims))
    where, value = where.broadcast_to(points), value.broadcast_to(points).to(storage.dtype)
    if mask is not None:
        mask = mask.broadcast_to(points)
        where, value = where[mask], value[mask]
    value = value.reshape(-1).clone()       # a load of a single element is a view, maybe of this storage
    storage.index_put_((where.reshape(-1),), value, accumulate=mode == "atomic_add")
