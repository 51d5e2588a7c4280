# %% [markdown]
# # Chapter 2: guards
#
# A compiled function is a bet that the next call looks like the one that was traced. This chapter is about
# checking the bet cheaply. `sources.py` says how a value was reached, `guards.py` and `torch_guards.py` what was
# assumed about it, `identity.py` whom an entry keeps alive. `stable.py` finds the assumptions that need no second look as long
# as nothing was written, `codegen.py` turns all assumptions of an entry into one fast function, and
# `cache.py` keeps several entries per function and decides when to give up.
