# %% [markdown]
# # Coverage: what to do about single operators
#
# For each kind of view, how a write to it becomes a write to what it is a view of. The table that they are in, and what is done with
# a view that is not in it, is `UNDO` in `aliases.py`.

# %%
from . import views  # noqa: F401
