# %% [markdown]
# # Choosing block sizes
#
# A kernel that waits for memory is fast when enough bytes are on their way at any moment: by Little's law
# an H100 needs about 3.35 TB/s x 600 ns = 2 MB in flight, 15 KB for each of its 132 multiprocessors. Two
# ways to get there are many threads, and several independent 16-byte loads per thread. Block sizes decide
# both. One configuration per kernel is compiled; which one is a matter of shapes, by rules that a person
# can check. (torch.compile's Inductor also has rules, and compiles 2 or 3 candidates for reductions to time
# them; that is where part of its compile time goes.)

# %%
from dataclasses import dataclass

MULTIPROCESSORS = 132


@dataclass(frozen=True)
class Config:
    """Block sizes per axis name, warps per program, and whether a reduction is persistent."""

    blocks: dict
    num_warps: int
    persistent: bool = False


def power_of_2(n: int) -> int:
    """The smallest power of two >= n."""
    return 1 << max(0, n - 1).bit_length()


def clamp(n: int, low: int, high: int) -> int:
    return max(low, min(high, n))

# %% [markdown]
# ## Pointwise
#
# Eight elements per thread: one 16-byte load for half types, two for float32. Small tensors get smaller
# blocks, so that every multiprocessor has work. A kernel with many operands keeps fewer elements per
# thread, or it would run out of registers.

# %%
def pointwise_config(numel: int, operands: int) -> Config:
    """1-D: `numel` elements, `operands` loads and stores of full size."""
    block = 1024 if operands <= 8 else 512
    while block > 128 and numel < block * MULTIPROCESSORS * 2:
        block //= 2
    return Config({"x": block}, num_warps=clamp(block // (256 if block >= 512 else 64), 1, 4))


def tiled(ynumel: int, xnumel: int, operands: int) -> Config:
    """2-D tiles: 32 elements along each axis make full memory transactions for reads and writes alike."""
    budget = 2048 if operands <= 4 else 1024
    x = min(32 if budget == 1024 else 64, power_of_2(xnumel))
    y = min(budget // x, power_of_2(ynumel), 256)
    x = min(budget // y, power_of_2(xnumel), 256)
    return Config({"y": y, "x": x}, num_warps=clamp(x * y // 256, 1, 8))

MANY = 1 << 20              # elements from which rows and columns are worth two axes: enough programs for all multiprocessors


def rows_config(x: int) -> Config:
    """Blocks of `x` columns. A thread has the same eight columns of two rows, and computes only once what depends on the
    column. (The gradient of a batch norm's input, 103 million elements of bf16: 141 us, and 192 us on one axis. Four rows
    for a thread are as fast, eight warps slower; for float32 the memory takes so long that one axis is as fast.)"""
    return Config({"y": 2048 // x, "x": x}, num_warps=4)

ROWS = 64                   # of a tile in which additions to one row of a table meet first


def added(x: int) -> Config:
    """`ROWS` rows of at most 64 columns. (Twice the rows meet more often, and take all registers of a multiprocessor.)"""
    return Config({"y": ROWS, "x": min(x, 64)}, num_warps=4)

# %% [markdown]
# ## Reductions
#
# `inner`: the reduced axis is the contiguous one. Rows up to a few thousand elements are persistent when
# the row would otherwise be loaded more than once; a kernel with a single pass gains nothing from holding
# the row, except that it needs no loop. `outer`: neighbouring outputs are neighbours in memory, as in
# column sums. Then a block takes 32 or more columns, and its lanes along `r` are summed through shared
# memory once at the end. The times of this paragraph are those of an H100. Very long rows that are read and written
# want 8192 elements at a time (a log-softmax of 50304 columns: 310 us, and 414 us with 2048), rows that are
# only read want 2048 (maximum and sum of those: 455 us, and 645 us with 8192). A single column sum wants 16
# elements per thread (the weight gradient of a layer norm: 32 us, and 40 us with 8), two sums at once do not
# (57 us, and 49 us with 8).
#
# A sum over a batch has few rows and very many columns: the gradient of position embeddings adds 64 rows of 98,304 columns. The rows
# would fit into one tile, but then all of a program's loads come first and all of its arithmetic after them, and few such
# programs fit on a multiprocessor at once. Small programs that walk down 1024 elements at a time keep the memory busy.
# On an H200 the plain sum of these 64 rows takes 5 us as against 10, in bfloat16 4 and 10; the kernel of the position embeddings, which
# also computes and writes what it adds, takes 29 and 37.
#
# Drawing random numbers is much arithmetic that waits for no memory. Where a kernel draws in short rows, a thread has 32 elements, all of
# whose loads are on their way meanwhile: on an H200 dropout, residual and layer norm of 16,384 rows of 384 columns take 26.4 us
# where four times the warps take 31.4 (the same without the dropout: 24.8). Rows of 1,024 and of 2,048 want four warps.

# %%
def reduction_config(xnumel: int, rnumel: int, inner: bool, passes: int, live: int, sums: int, draws: bool) -> Config:
    """`passes`: how often a looped kernel would run along the row. `live`: full-size values that are alive
    at once, about. `sums`: values that are accumulated, each in a tile of its own. `draws`: whether random numbers are drawn."""
    return along_rows(xnumel, rnumel, passes, live, draws) if inner else down_columns(xnumel, rnumel, passes, sums)


def along_rows(xnumel: int, rnumel: int, passes: int, live: int, draws: bool) -> Config:
    row = power_of_2(rnumel)
    limit = 1024 if passes == 1 else 16384 if live <= 3 else 8192 if live <= 6 else 4096
    if row <= limit:
        x = clamp(1024 // row, 1, 64)
        while x > 1 and xnumel < x * MULTIPROCESSORS * 2:
            x //= 2
        per_thread = 32 if draws and row <= 512 else 16 if row >= (2048 if draws else 4096) else 8
        warps = clamp(x * row // (32 * per_thread), 1, 16)
        return Config({"x": x, "r": row}, warps, persistent=True)
    if xnumel >= 4 * MULTIPROCESSORS or rnumel < 8192:
        return Config({"x": 1, "r": 8192}, num_warps=16) if row >= 16384 and live > 1 else \
            Config({"x": 1, "r": min(row, 2048)}, num_warps=8)
    return Config({"x": 1, "r": min(row, 4096)}, num_warps=16)


def down_columns(xnumel: int, rnumel: int, passes: int, sums: int) -> Config:
    row = power_of_2(rnumel)
    if passes == sums == 1 and 8 < row <= 128 and xnumel >= 256 * MULTIPROCESSORS:
        x = 128 if xnumel >= 512 * MULTIPROCESSORS else 64
        return Config({"x": x, "r": 1024 // x}, num_warps=2, persistent=row <= 1024 // x)
    x = clamp(power_of_2(xnumel), 1, 64)
    while x > 16 and xnumel // x < MULTIPROCESSORS:
        x //= 2
    if row * x <= (4096 if passes > 1 or row <= 64 else 2048) and row <= 256:
        return Config({"x": x, "r": row}, num_warps=clamp(x * row // 256, 1, 8), persistent=True)
    r = clamp((4096 if sums == 1 else 2048) // x, 1, row)
    return Config({"x": x, "r": r}, num_warps=clamp(x * r // 256, 1, 8))


def walking(rows: int, row: int) -> Config:
    """`rows` rows in one program, a tile of whole rows at a time. One warp per program: sums along a row need
    no shared memory, and many independent programs hide the latency that the loop cannot (47 us where
    four warps take 64)."""
    row = power_of_2(row)
    x = clamp(1024 // row, 1, power_of_2(rows))
    return Config({"x": x, "r": row}, num_warps=max(1, x * row // 1024), persistent=True)


def unknown_row(inner: bool, xnumel: int) -> Config:
    """A row whose length is known only at run time cannot be held in one tile: always a loop."""
    x = 1 if inner else 64
    while x > 16 and xnumel // x < MULTIPROCESSORS * 2:
        x //= 2
    return Config({"x": x, "r": 1024 if inner else 2048 // x}, num_warps=8)
