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
    """Register one `overload: meaning` per line. Overloads that this version of torch lacks are left out."""
    for line in meanings.strip().splitlines():
        name, meaning = (part.strip() for part in line.split(":", 1))
        op = overload(name)
        if op is not None:
            PRIMITIVES[op] = Primitive(op, category, meaning)


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
# - functions with real results (`exp`, `sin`, `div` ...) never see integers;
# - an operand may be a Python number only in `add`, `sub`, `mul`, `div`, in the `.Scalar` comparisons and
#   in `pow`; it takes the dtype of the tensor beside it. Other constants are 0-d `full` nodes;
# - `alpha` is gone from `add` and `sub`.
#
# Half-precision tensors compute in float32 and round when stored. Where eager's fused kernel rounds once at
# its end (GELU, layer norm, AdamW ...), the decomposition says so with explicit casts.

# %%
primitives("pointwise", """
    add.Tensor: a + b
    sub.Tensor: a - b
    mul.Tensor: a * b
    div.Tensor: a / b, true division of floats
    div.Tensor_mode: division rounded by "floor" or "trunc"
    fmod.Tensor: remainder with the sign of the dividend
    remainder.Tensor: remainder with the sign of the divisor
    pow.Tensor_Tensor: a ** b
    pow.Tensor_Scalar: a ** number
    pow.Scalar: number ** b
    maximum: the larger one; NaN wins
    minimum: the smaller one; NaN wins
    atan2: angle of the point (b, a)
    hypot: sqrt(a*a + b*b) without overflow
    nextafter: the next float after a in the direction of b
    abs: magnitude
    neg: -a
    sign: -1, 0 or 1
    exp: e ** a
    exp2: 2 ** a
    expm1: exp(a) - 1, exact near 0
    log: natural logarithm
    log2: logarithm to base 2
    log10: logarithm to base 10
    log1p: log(1 + a), exact near 0
    sqrt: square root
    rsqrt: 1 / sqrt(a)
    reciprocal: 1 / a
    sin: sine
    cos: cosine
    tan: tangent
    asin: inverse sine
    acos: inverse cosine
    atan: inverse tangent
    sinh: hyperbolic sine
    cosh: hyperbolic cosine
    tanh: hyperbolic tangent
    asinh: inverse hyperbolic sine
    acosh: inverse hyperbolic cosine
    atanh: inverse hyperbolic tangent
    sigmoid: 1 / (1 + exp(-a))
    erf: error function
    erfc: 1 - erf(a), exact for large a
    erfinv: inverse error function
    lgamma: logarithm of the gamma function
    digamma: derivative of lgamma
    floor: round down
    ceil: round up
    trunc: round towards 0
    round: round to nearest, ties to even
    signbit: is the sign bit set
    eq.Tensor: a == b
    ne.Tensor: a != b
    lt.Tensor: a < b
    le.Tensor: a <= b
    gt.Tensor: a > b
    ge.Tensor: a >= b
    eq.Scalar: a == number
    ne.Scalar: a != number
    lt.Scalar: a < number
    le.Scalar: a <= number
    gt.Scalar: a > number
    ge.Scalar: a >= number
    bitwise_and.Tensor: a & b; logical "and" of bools
    bitwise_or.Tensor: a | b
    bitwise_xor.Tensor: a ^ b
    bitwise_not: ~a; logical "not" of a bool
    bitwise_left_shift.Tensor: a << b
    bitwise_right_shift.Tensor: a >> b
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
    amax: largest element over dims; NaN wins
    amin: smallest element over dims; NaN wins
    argmax: index of the first largest element along one dim; NaN is the largest
    argmin: index of the first smallest element along one dim; NaN is the smallest
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
    scatter.src: x with x[i] = v along one dim
    scatter_add: x with x[i] += v along one dim
    scatter_reduce.two: x with x[i] = reduce(x[i], v) along one dim
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
    rand: uniform on [0, 1)
    randn: standard normal
    randint.low: uniform integers
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
    mm: matrix product
    addmm: bias + matrix product; cuBLASLt adds a 1-d bias in its epilogue
    bmm: batch of matrix products
    baddbmm: bias + batch of matrix products
    mv: matrix times vector
    dot: inner product of two vectors
    convolution: n-d convolution, cuDNN or oneDNN
    convolution_backward: its three gradients
    _scaled_dot_product_flash_attention: fused attention, and its backward
    _scaled_dot_product_flash_attention_backward: gradients of it
    _scaled_dot_product_flash_attention_for_cpu: the same on CPU
    _scaled_dot_product_flash_attention_for_cpu_backward: gradients of it
    _scaled_dot_product_efficient_attention: fused attention with any bias
    _scaled_dot_product_efficient_attention_backward: gradients of it
    _scaled_dot_product_cudnn_attention: fused attention of cuDNN
    _scaled_dot_product_cudnn_attention_backward: gradients of it
    sort: sorted values and their indices
    sort.stable: the same, ties in order
    topk: the k largest and their indices
    kthvalue: the k-th smallest and its index
    cumsum: running sum
    cumprod: running product
    cummax: running maximum and its index
    cummin: running minimum and its index
    logcumsumexp: running logsumexp
    searchsorted.Tensor: positions in a sorted sequence
    bucketize.Tensor: positions in sorted boundaries
    nonzero: indices of the nonzero elements, a size that depends on data
    masked_scatter: x with the masked elements taken from a source in order
""")
