# %% [markdown]
# # Chapter 3: capture
#
# From a Python function to a graph, without asking the function's author for anything. `frame_hook.c` and
# `hook.py` get hold of the frame, `interpreter.py` and its neighbours run its bytecode on symbolic values,
# `capture.py` puts the result together.
