# %% [markdown]
# # Chapter 6: Decompositions
#
# The graph that comes out of differentiation speaks ATen, a language of three thousand operators. Who writes a code generator
# does not want to know three thousand, and most of them are a few others put together. This chapter translates into a dialect
# of about 150.
#
# The running example is two operators of ATen,
#
#     x: f32[64, 256] = input
#     mean_dim: f32[64, 1] = aten.mean.dim(x, [1], True)
#     sub_tensor: f32[64, 256] = aten.sub.Tensor(x, mean_dim)
#     return (sub_tensor,)
#
# and three primitives, because a mean is a sum and a division:
#
#     x: f32[64, 256] = input
#     sum_dim_int_list: f32[64, 1] = aten.sum.dim_IntList(x, [1], True)
#     div_tensor: f32[64, 1] = aten.div.Tensor(sum_dim_int_list, 256)
#     sub_tensor: f32[64, 256] = aten.sub.Tensor(x, div_tensor)
#     return (sub_tensor,)
#
# At the end of the chapter you can write the rule of an operator, say what later stages may take for granted about a graph, and
# tell which promise about dtypes, strides or empty tensors a rule can break.
#
# What it leaves: that a primitive still reads and writes whole tensors (chapter 7).
#
# Sources: N. Higham, *Accuracy and Stability of Numerical Algorithms* (2002); M. Milakov, N. Gimelshein, *Online normalizer
# calculation for softmax* (2018).
#
# In reading order: `primitives.py`, the target language; `table.py`, how a translation is written; `decompose.py`, which runs the table
# over a graph. The translations themselves are in `rules`, by subject. `python -m minicompile.ch06_decompositions` prints the
# dialect.

# %%
from . import rules  # noqa: F401
from .decompose import Decomposed, decompose, violations
from .primitives import PRIMITIVES, is_primitive
from .table import TABLE, decomposition

__all__ = ["PRIMITIVES", "TABLE", "Decomposed", "decompose", "decomposition", "is_primitive", "violations"]
