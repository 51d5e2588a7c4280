# %% [markdown]
# # Chapter 1: graphs
#
# Eager PyTorch runs an operator and forgets it. Whoever wants to compute two operators in one loop over memory, or to leave one out, has
# to see both before the first one runs. So a program has to become data: a *graph*, the list of its operators. It is made by
# running the program once, with a recorder below it, on tensors that have no numbers, since only their shapes, dtypes and places in
# memory are asked for.
#
# The pages before this one tell how one comes to that. Here begins the code of the chapter, module by module, and the code of each
# chapter begins with a page like this.
#
# One function goes through these openings. It moves each row of a matrix so that its mean is zero:
#
#     def centred(x):
#         return x - x.mean(1, keepdim=True)
#
# Recorded for 64 by 256 numbers it is two operators of ATen, PyTorch's library. A line has a name, the dtype and the shape of the
# result, and the call. Nothing was added or divided to make these lines.
#
#     x: f32[64, 256] = input
#     mean_dim: f32[64, 1] = aten.mean.dim(x, [1], True)
#     sub_tensor: f32[64, 256] = aten.sub.Tensor(x, mean_dim)
#     return (sub_tensor,)
#
# A number of rows that will vary is a symbol. The same function, recorded for `s0` rows:
#
#     x: f32[s0, 256] = input
#     mean_dim: f32[s0, 1] = aten.mean.dim(x, [1], True)
#     sub_tensor: f32[s0, 256] = aten.sub.Tensor(x, mean_dim)
#     return (sub_tensor,)
#
# At the end of the chapter you can record such a graph of any function of tensors and run it, you know who has told the shape,
# the strides and the device of each line, and where PyTorch's own answer had to be corrected, and you can compute with sizes
# that nobody knows yet.
#
# What it leaves: whether a recording is right for another call (chapter 2), and what Python does between two operators, of which
# a recording shows nothing (chapter 3).
#
# Sources: J. Reed and others, *torch.fx* (2022), for the container; R. Cytron and others, *Efficiently Computing Static Single
# Assignment Form* (1991), for values that have one name and never change.
#
# In reading order:
#
# 1. `fake.py`: tensors without numbers, and the mode under which a program runs on them;
# 2. `graph.py`: the list of operators, what it means, how it is printed; `trace.py`: the recorder;
# 3. `operators.py`: one operator on fakes, from the first refusal to the result; `layouts.py`: where elements lie; `corrections.py`:
#    where the shape code of PyTorch is wrong; `refusals.py`: errors that only a kernel raises; `recipes.py`: answers that are kept;
# 4. `symbolic.py` and `floats.py`: expressions in sizes and numbers that are not known yet; `shapes.py`: how PyTorch's shape code computes
#    with them; `composites.py`, `rules/floats.py` and `rules/norms.py`: operators that insist on numbers;
# 5. `generators.py`: where random numbers come from.

# %%
from . import recipes  # noqa: F401 (gives fakes what runs an operator on them)
from .rules import forms, norms, refused  # noqa: F401 (they register)
