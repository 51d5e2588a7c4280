# %% [markdown]
# # Helpers that travel with a kernel
#
# Some operations take more than one expression. They are functions here, in the Triton language; `emit`
# puts the text of those that a kernel calls in front of it, decorated. A kernel's text is then complete: it
# can be read, hashed, sent to another process and compiled there without importing this package. This
# module itself never imports Triton, so that it loads on machines without it: `tl` and `libdevice` are
# names that exist where the text ends up.

# %%
from __future__ import annotations

import inspect
import re

from ...ch08_fusion.values import erf_polynomial

# ruff: noqa: F821


def nan_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


def nan_min(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


def multiply(a, b):
    return a * b

# %% [markdown]
# ## Division and powers with Python's signs
#
# The float version follows eager: take the exact remainder first, then divide what is left, which is close
# to an integer, and round. In float32 `/` may be two roundings off, which is another integer where these lie far apart.

# %%
def int_floordiv(a, b):
    quotient = a // b
    remainder = a - quotient * b
    return tl.where((remainder != 0) & ((remainder < 0) != (b < 0)), quotient - 1, quotient)


def int_remainder(a, b):
    remainder = a % b
    return tl.where((remainder != 0) & ((remainder < 0) != (b < 0)), remainder + b, remainder)


def shift_left(a, b):
    return tl.where((b < 0) | (b >= a.dtype.primitive_bitwidth), 0, a << b).to(a.dtype)


def shift_right(a, b):
    return tl.where((b < 0) | (b >= a.dtype.primitive_bitwidth), tl.where(a < 0, -1, 0), a >> b).to(a.dtype)


def float_remainder(a, b):
    remainder = libdevice.fmod(a, b)
    return tl.where((remainder != 0) & ((remainder < 0) != (b < 0)), remainder + b, remainder)


def float_floordiv(a, b):
    remainder = libdevice.fmod(a, b)
    if remainder.dtype == tl.float32:
        quotient = tl.div_rn(a - remainder, b)
    else:
        quotient = (a - remainder) / b
    quotient = tl.where((remainder != 0) & ((remainder < 0) != (b < 0)), quotient - 1, quotient)
    floor = tl.floor(quotient)
    floor = tl.where(quotient - floor > 0.5, floor + 1, floor)
    return tl.where(b == 0, a / b, tl.where(quotient == 0, libdevice.copysign(floor, a / b), floor))


# %% [markdown]
# Powers of integers are repeated squaring. The loop has a fixed number of rounds, as the lanes of a tile cannot
# leave it one by one. `digamma` shifts its argument up until the asymptotic series is accurate, and uses the
# reflection formula on the left.

# %%
def int_pow(base, exponent):
    result = base * 0 + 1
    power = base
    rest = exponent
    for _ in tl.static_range(63):
        result = tl.where((rest & 1) != 0, result * power, result)
        power = power * power
        rest = rest >> 1
    sign = tl.where((exponent & 1) != 0, base, base * 0 + 1)
    inverse = tl.where((base == 1) | (base + 1 == 0), sign, base * 0)     # no unsigned integer is compared with -1
    return tl.where(exponent < 0, inverse, result)


def digamma(x):
    reflected = x < 0.5
    z = tl.where(reflected, 1 - x, x)
    shift = tl.where(z != z, z, 0.0)
    for _ in tl.static_range(8):
        small = z < 8
        shift = tl.where(small, shift + 1 / z, shift)
        z = tl.where(small, z + 1, z)
    y = 1 / (z * z)
    series = 1 / 240 - y * (1 / 132 - y * (691 / 32760 - y / 12))
    series = y * (1 / 12 - y * (1 / 120 - y * (1 / 252 - y * series)))
    value = tl.log(z) - 0.5 / z - series - shift
    angle = x - tl.floor(x)
    value = tl.where(reflected, value - 3.141592653589793 / libdevice.tan(3.141592653589793 * angle), value)
    value = tl.where((x < 0) & ((angle == 0) | (x == float("-inf"))), float("nan"), value)
    return tl.where(x == 0, libdevice.copysign(x * 0 + float("inf"), x * -1), value)

# %% [markdown]
# ## One instruction
#
# A GPU has an instruction for 2^x and one for 1/sqrt(x). Triton's `exp2` and `rsqrt` stand for functions of libdevice that consist of
# it, so its compiler parses that library, half a megabyte, and links it to the kernel: 20 to 35 ms of a processor, a quarter of what a
# small kernel takes. The instruction itself gives the same bits.

# %%
def exp2_float(x):
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


def rsqrt_float(x):
    return tl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)

# %% [markdown]
# ## 1 + erf(x)
#
# Half of a GELU (chapter 8). `Q(t)` stands for the polynomial, which is put in when the text is made. The kernels are compiled
# without contraction of products and sums (`worker.py`), so the polynomial asks for fused multiply-adds itself: a
# GELU takes 18 instructions an element in place of 25.

# %%
def erf_plus_one(x):
    t = tl.abs(x)
    left = exp2_float(Q(t) * t)
    return tl.where(x > 0, 2 - left, left)

# %% [markdown]
# ## tanh
#
# The library's `tanh` branches: a polynomial near 0, where `1 - exp(-2x)` would lose its digits, and the exponential elsewhere.
# Elements of one thread go different ways, one after the other. Both ways together, without a branch, take a dozen
# instructions, and all elements of a thread go side by side. The error is at most 3 units in the last place. Minus zero stays
# minus zero.

# %%
def tanh_float(x):
    e = exp2_float(tl.abs(x) * -2.885390081777927)
    far = (1 - e) / (1 + e)
    y = x * x
    p = tl.fma(y, 0.01564048044383526, -0.05223110690712929)
    p = tl.fma(p, y, 0.13313521444797516)
    p = tl.fma(p, y, -0.33332622051239014)
    return tl.where(tl.abs(x) < 0.6, x * (1 + y * p), tl.where(x < 0, -far, far))

# %% [markdown]
# ## Random numbers
#
# Eager on CUDA draws from Philox4x32-10, a *counter-based* generator: ten rounds of multiplication and xor
# turn (seed, counter) into four 32-bit numbers, with no state to carry. The counter is made of the thread
# number and of how often that thread has drawn, so element number `index` of a kernel has its numbers
# without knowing any other's. A 32-bit number `n` becomes a float by `n / 2^32 + 1 / 2^33`, in (0, 1].
#
# Which thread draws for which element is eager's launch configuration: with `VEC` elements per thread at a time and `THREADS` threads,
# element `e` is component `e % 4` of a draw of thread `e / VEC % THREADS`.
#
# Ten rounds for each element cost more than the memory that dropout saves. So where the last axis of a tile has four neighbours for each
# draw, `philox_four` draws once for the first of them, and puts the four numbers side by side: `join` adds an axis of two, twice. (Four
# numbers that a thread has already are its registers; nothing moves.)

# %%
def philox_bits(seed, offset, index, VEC: tl.constexpr, THREADS: tl.constexpr):
    """The four numbers of the draw to which the element `index` belongs."""
    group = index // VEC
    draw = offset // 4 + (group // THREADS) * ((VEC + 3) // 4) + (index % VEC) // 4
    lane = (group % THREADS).to(tl.uint32)
    zero = lane * 0
    return tl.philox(seed, (draw & 0xffffffff).to(tl.uint32) + zero, ((draw >> 32) & 0xffffffff).to(tl.uint32) + zero, lane, zero)


def philox_uniform(seed, offset, index, VEC: tl.constexpr, THREADS: tl.constexpr):
    a, b, c, d = philox_bits(seed, offset, index, VEC, THREADS)
    component = index % VEC % 4
    bits = tl.where(component == 0, a, tl.where(component == 1, b, tl.where(component == 2, c, d)))
    return bits.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10


def philox_four(seed, offset, index, VEC: tl.constexpr, THREADS: tl.constexpr):
    """index: a tile of elements whose last axis of four has neighbours. The numbers, with two axes of two in its place."""
    a, b, c, d = philox_bits(seed, offset, tl.min(index, len(index.shape) - 1), VEC, THREADS)
    return tl.join(tl.join(a, c), tl.join(b, d)).to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10

# %% [markdown]
# ## Rows that many add to
#
# The gradient of an embedding adds a row of the table for every token, atomically. In a text a few characters make up most of it, and
# in a batch of short sentences most tokens are padding: thousands of additions to the same address, which the memory does one after the
# other. A tile of rows first adds up those that go to one place. `same[i, j]` says whether rows i and j do, and the sums are a
# product of this matrix with the values, on the tensor cores. These multiply bfloat16, which has 8 of the 24 bits of a float32; but a
# float32 is the sum of three of them, and their products with 0 and 1 are exact. Then the first row of each place writes. In a product 0
# times infinity would be NaN in rows that never met it, so a tile with such a number is added as it is.
# (On an H200, 16,384 tokens of width 384 into 104 characters: 19 us where each row by itself takes 37; of width 768 into 1,024, most
# of them padding: 49, and 153.)

# %%
def add_rows(pointers, values, keys):
    if tl.max(tl.max(tl.where(tl.abs(values) < 1e38, 0, 1), 1), 0) > 0:
        tl.atomic_add(pointers, values, sem="relaxed")
    else:
        same = keys == tl.trans(keys)
        place = tl.arange(0, values.shape[0])
        later = tl.max((same & (place[None, :] < place[:, None])).to(tl.int32), 1) > 0
        one = same.to(tl.bfloat16)
        high = values.to(tl.bfloat16)
        rest = values - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(one, high, tl.dot(one, middle, tl.dot(one, low)))
        tl.atomic_add(pointers, total, mask=tl.broadcast_to(later[:, None] == 0, values.shape), sem="relaxed")

# %%
HELPERS = [f for f in list(globals().values()) if inspect.isfunction(f) and f is not erf_polynomial]


def prelude_for(code: str) -> str:
    """The source of the helpers that `code` mentions, and of those that these mention, each decorated with `@triton.jit`."""
    texts: list[str] = []
    words = set(re.findall(r"\w+", code))
    for f in reversed(HELPERS):
        if f.__name__ in words:
            texts.append(f"@triton.jit\n{inspect.getsource(f).replace('Q(t)', erf_polynomial('tl.fma({}, t, {})'))}\n\n")
            words.update(re.findall(r"\w+", texts[-1]))
    return "".join(reversed(texts))
