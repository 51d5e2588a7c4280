# %% [markdown]
# # Coverage: what is peculiar to single operators
#
# Where meta kernels are wrong about their results (`forms.py`), what kernels refuse (`refused.py`), derivatives that look at numbers, and
# lists of operators that fakes ask for (`operators.py`).
