# %% [markdown]
# # Coverage: what to do about single operators
#
# For each kind of view, how a write to it becomes a write to what it is a view of (`UNDO` in `aliases.py`); the visitors of operators
# whose schema lies (`VISITORS` in `functionalize.py`); and lists of operators that passes ask for.
