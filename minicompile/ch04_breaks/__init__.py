# %% [markdown]
# # Chapter 4: graph breaks
#
# Some Python cannot be in a graph: `print`, `.item()`, a branch on the values of a tensor. A compiler that
# refuses such functions is of little use, so this one cuts them, wherever it happens: in the middle of an
# expression, in a loop, in a `try` or a `with`. `breaks.py` decides where to cut and writes the part before;
# `steps.py` makes a function of the breaking instruction and `resume.py` one of the rest; `bytecode.py` is
# the assembler that they need.
