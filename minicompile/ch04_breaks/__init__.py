# %% [markdown]
# # Chapter 4: graph breaks
#
# Some Python cannot be in a graph: `print`, `.item()`, a branch on the values of a tensor. A compiler that
# refuses such
# functions is of little use, so this one cuts them. `breaks.py` decides where to cut and writes the part
# before;
# `resume.py` makes the rest a function of its own; `bytecode.py` is the assembler it needs.
