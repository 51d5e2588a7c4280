# %% [markdown]
# # Reductions: the rules
#
# Decompositions have made them regular: the dims are listed, and what is summed already has the dtype in
# which it is to be summed. So a rule is the name of a kind.

# %%
import math
from functools import partial

from ...ch01_graphs.symbolic import product
from ..builder import compute_dtype
from ..lazy import from_buffer
from ..reductions import block_results, reduction, reduction_loop, result_buffers, split_plan
from ..table import lowering

for _kind, _overload in (("sum", "sum.dim_IntList"), ("prod", "prod.dim_int"), ("any", "any.dims"),
                         ("max", "amax"), ("min", "amin"), ("argmax", "argmax"), ("argmin", "argmin")):
    lowering(_overload, loops=True)(partial(reduction, _kind))

# %% [markdown]
# ## Two results from one pass
#
# Blocks of equal length `n` with means `m_i` and squared deviations `q_i` combine to `sum(q_i) + n * sum((m_i
# - mean)**2)`, and the second term is again a welford, of the means.

# %%
@lowering("var_mean.correction", loops=True)
def var_mean(g, x, dims, *, correction=1, keepdim=False):
    """[variance, mean] of `dims` by Welford's method."""
    count = product(x.size[d] for d in dims or [] if x.size)
    if not dims or count == 0 or not x.dtype.is_floating_point or not x.size:
        return NotImplemented
    dtype = compute_dtype(x.dtype)
    names, strides = result_buffers(g, g.val, dims, keepdim)

    def results(b, squares, mean):
        by = b.constant(max(count - correction, 0), dtype) if isinstance(count, int) else b.op(
            "maximum", b.op("sub", b.index(count, dtype), b.constant(correction, dtype)), b.constant(0, dtype))
        return [b.op("truediv", squares, by), mean]

    def whole(b, elements, position):
        state = b.reduce("welford", elements[0])
        return results(b, b.get(state, 1), b.get(state, 0))

    def of_block(b, elements, position):
        state = b.reduce("welford", elements[0])
        return [b.get(state, 0), b.get(state, 1)]

    plan = split_plan(g, x, dims, exact=True)
    if plan is None:
        reduction_loop(g, [x], dims, whole, names, strides)
    else:
        length = count // math.prod(plan.values())
        parts, dims = block_results(g, x, dims, plan, [dtype, dtype], of_block, 0)

        def combine(b, elements, position):
            state = b.reduce("welford", elements[0])
            between = b.op("mul", b.get(state, 1), b.constant(length, dtype))
            return results(b, b.op("add", b.reduce("sum", elements[1]), between), b.get(state, 0))

        reduction_loop(g, parts, dims, combine, names, strides)
    return [from_buffer(g, name) for name in names]
