# %% [markdown]
# # The primitives
#
# PyTorch has three thousand operators, overloads counted; a compiler that had to know how to generate code
# for each of them would never be finished. But most of them are *compositions*: GELU is a few
# multiplications and an `erf`, a layer norm is two means and some arithmetic. This chapter rewrites a
# graph until only about 150 operators are left, the **primitives**. Everything after it (loops, fusion,
# code generation) needs to know these and nothing else.
#
# Two forces decide where to stop. *Fewer* primitives make the later stages smaller. But a composition must
# stay *fusible and exact*: `tanh` could be written with `exp`, and would be wrong near zero, so `tanh` is a
# primitive; a matrix product could be written as a broadcast multiplication and a sum, and would be a
# hundred times slower than cuBLAS, so `mm` is a primitive too, one that we never open.
#
# torch.compile does the same with two tables: its decompositions and its `prims`, a second operator set
# below ATen. We keep one vocabulary: a primitive is an ordinary ATen overload, so every intermediate graph
# is runnable PyTorch.

# %%
import dataclasses

import torch

from .table import overload


@dataclasses.dataclass(frozen=True)
class Primitive:
    """One operator that later stages must know: its ATen overload, its category, and what it means."""

    op: torch._ops.OpOverload
    category: str
    meaning: str


PRIMITIVES: dict[torch._ops.OpOverload, Primitive] = {}
CATEGORIES = ("pointwise", "reduction", "view", "indexing", "creation", "random", "extern")


def primitives(category: str, meanings: str) -> None:
    """Register `overloads: meaning`, a line for those that are said in one breath. What this version of torch lacks is left out."""
    for line in meanings.strip().splitlines():
        names, meaning = line.split(": ", 1)
        PRIMITIVES.update((op, Primitive(op, category, meaning)) for op in map(overload, names.split()) if op is not None)


def is_primitive(op) -> bool:
    return op in PRIMITIVES


# %% [markdown]
# ## Pointwise
#
# One output element from one element of each operand, after broadcasting. What a code generator may rely on
# (the driver of this chapter sees to it):
#
# - all *tensor* operands have one dtype, the dtype the operator computes in. Mixed operands got
#   explicit `_to_copy` nodes;
# - division never sees integers; functions of one operand with real results (`exp`, `sin` ...) convert them to the dtype of the result;
# - an operand may be a Python number only in `add`, `sub`, `mul`, `div`, in the `.Scalar` comparisons and
#   in `pow`; it takes the dtype of the tensor beside it. Other constants are 0-d `full` nodes;
# - `alpha` is gone from `add` and `sub`.
#
# Half-precision tensors compute in float32 and round when stored. Where eager's fused kernel rounds once at
# its end (GELU, layer norm, AdamW ...), the decomposition says so with explicit casts.

# %%
primitives("pointwise", """
    add.Tensor sub.Tensor mul.Tensor neg abs: a + b, a - b, a * b, -a and the magnitude of a
    div.Tensor: a / b, true division of floats
    div.Tensor_mode: division rounded by "floor" or "trunc"
    fmod.Tensor: remainder with the sign of the dividend
    remainder.Tensor: remainder with the sign of the divisor
    pow.Tensor_Tensor pow.Tensor_Scalar pow.Scalar: a ** b, where a or b may be a number
    reciprocal sqrt rsqrt: 1 / a, the square root, and 1 / sqrt(a)
    maximum minimum: the larger one and the smaller one; NaN wins
    atan2: angle of the point (b, a)
    hypot: sqrt(a*a + b*b) without overflow
    nextafter: the next float after a in the direction of b
    sign signbit: -1, 0 or 1, and whether the sign bit is set
    exp exp2 log log2 log10: e ** a, 2 ** a, and logarithms
    expm1 log1p: exp(a) - 1 and log(1 + a), exact near 0
    sin cos tan sinh cosh tanh: trigonometric and hyperbolic functions
    asin acos atan asinh acosh atanh: their inverses
    sigmoid: 1 / (1 + exp(-a))
    erf erfc erfinv: error function, 1 - erf(a), exact for large a, and the inverse
    lgamma digamma: logarithm of the gamma function, and its derivative
    floor ceil trunc round: round down, up, towards 0, and to nearest, ties to even
    eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor: comparisons of a and b
    eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar: comparisons of a with a number
    bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor bitwise_not: a & b, a | b, a ^ b, ~a; of bools, those of logic
    bitwise_left_shift.Tensor bitwise_right_shift.Tensor: a << b and a >> b
    where.self: a where the bool condition holds, else b
    _to_copy: convert to a dtype, device or memory format
    clone: a copy, possibly in another memory format
""")

# %% [markdown]
# ## Reductions
#
# The dims are always spelled out (a non-empty list of non-negative integers; `argmax`, `argmin` and `prod`:
# one), `sum` has no dtype argument (the input was converted instead), and half types were widened to
# float32 first, so that a reduction accumulates in the dtype of its input. `var_mean` stays whole: computed
# in one pass by Welford's method it is both faster and better conditioned than mean(x*x) - mean(x)**2.

# %%
primitives("reduction", """
    sum.dim_IntList: sum over dims
    prod.dim_int: product over one dim
    amax amin: largest and smallest element over dims; NaN wins
    argmax argmin: index of the first largest or smallest element along one dim, where NaN is the more extreme
    any.dims: is any bool of dims set
    var_mean.correction: variance (divided by n - correction) and mean, in one pass
""")

# %% [markdown]
# ## Views and indexing
#
# In a functional graph nothing is written in place, so a view is just an operator whose output element *is*
# some input element: a map from output indices to input indices. The loop stage composes these maps and no
# data moves. The second group reads or writes at indices that are data, or joins tensors; writing ones
# return a new tensor.

# %%
primitives("view", """
    view: the same elements in another shape
    view.dtype: the same bits as another dtype
    expand: repeat dims of size 1
    permute: reorder dims
    slice.Tensor: start:end:step of one dim
    select.int: one index of one dim
    unsqueeze: insert a dim of size 1
    squeeze.dims: drop those of the dims that have size 1
    diagonal: a diagonal of two dims, as the last dim
    unfold: sliding windows of one dim, as a new last dim
    as_strided: elements at offset + index . strides of the storage
""")
primitives("indexing", """
    index.Tensor: x[i, None, j]: integer tensors, negative ones count from the end
    index_select: x[.., i, ..] along one dim
    gather: x[i] along one dim, one index per output element
    embedding: rows of a table
    index_put: x with x[i] = v, or += v when accumulating
    scatter.src scatter_add scatter_reduce.two: x with x[i] = v, x[i] += v, or x[i] = reduce(x[i], v), along one dim
    slice_scatter: x with x[start:end:step] = v
    select_scatter: x with x[i] = v
    as_strided_scatter: x with the elements at offset + index . strides replaced
    cat: tensors one after the other along one dim
    constant_pad_nd: x with a border of one value
    flip: reversed dims
""")

# %% [markdown]
# ## Creation and random numbers
#
# `full` and `arange` are pointwise functions of no operand: they fuse away. Random operators keep their
# ATen form, because the stream of numbers must be the one that eager would have drawn.

# %%
primitives("creation", """
    full: every element is one number
    arange.start_step: start, start + step ...
    empty.memory_format: elements of any value
""")
primitives("random", """
    rand randn randint.low: uniform on [0, 1), standard normal, and uniform integers
    randperm: a random permutation
    bernoulli: 1 with probability a
    bernoulli.p: 1 with probability p, in the shape and dtype of a
    native_dropout: (x * mask / (1 - p), mask), on GPUs
    multinomial: indices drawn by weight
""")

# %% [markdown]
# ## Extern
#
# These have library kernels that we do not try to beat, or sequential dependencies that a parallel loop cannot
# express: a running sum needs the sum before it. They are called as they are. What stands in none of the lists is
# called as well; an operator on this list is one of which somebody has decided that it should be.

# %%
primitives("extern", """
    mm bmm mv dot: matrix product, a batch of them, matrix times vector, and inner product of two vectors
    addmm: bias + matrix product; cuBLASLt adds a 1-d bias in its epilogue
    baddbmm: bias + batch of matrix products
    convolution: n-d convolution, cuDNN or oneDNN
    convolution_backward: its three gradients
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_cudnn_attention: fused attention
    _scaled_dot_product_efficient_attention: fused attention with any bias
    _scaled_dot_product_flash_attention_backward _scaled_dot_product_flash_attention_for_cpu_backward: gradients of fused attention
    _scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward: the same
    sort sort.stable: sorted values and their indices, and the same with ties in order
    topk kthvalue: the k largest and their indices, and the k-th smallest and its index
    cumsum cumprod logcumsumexp: running sum, product and logsumexp
    cummax cummin: running maximum and minimum, and their indices
    searchsorted.Tensor bucketize.Tensor: positions in a sorted sequence, or in sorted boundaries
    nonzero: indices of the nonzero elements, a size that depends on data
    masked_scatter: x with the masked elements taken from a source in order
""")
