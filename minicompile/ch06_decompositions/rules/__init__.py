# %% [markdown]
# # Coverage: the rules for single operators
#
# What makes a decomposition is next door, in `table.py` and `decompose.py`. Here is what it is applied to: a formula
# for each of some three hundred operators, in rooms by subject. Read `normalization.py` or `activations.py` for
# examples, and the others when you need them.

# %%
from . import activations, arithmetic, foreach_optimizers, indexing, linear_algebra, losses, normalization, pooling, reductions  # noqa: F401
