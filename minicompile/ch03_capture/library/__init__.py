# %% [markdown]
# # Coverage: builtins and library functions
#
# What has no bytecode, or bytecode that is not worth looking at, is a handler in one of capture's tables: Python's
# builtins, functions of its standard library, functions of torch that are no operators. A handler takes the values
# that stand for the arguments, and returns the one that stands for the result. Read a few of `builtins_.py` for
# examples.
