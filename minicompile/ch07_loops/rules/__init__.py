# %% [markdown]
# # Coverage: the lowerings of single operators
#
# What a lowering is made of is next door: `pointwise.py`, `views.py`, `reductions.py` have what the rules of a family share. Here is one
# rule for each primitive, in rooms by subject. Read `views.py` or `indexing.py` for examples.

# %%
from . import indexing, pointwise, random, reductions, scatters, views  # noqa: F401
