# %% [markdown]
# # Coverage: single operations in Triton
#
# `scalars.py` is the table from the names of operations to their text. `prelude.py` has the operations that take more than one
# expression.

# %%
from . import prelude, scalars  # noqa: F401
