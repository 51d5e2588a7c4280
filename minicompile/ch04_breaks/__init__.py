# %% [markdown]
# # Chapter 4: graph breaks
#
# Some Python cannot be in a graph: `print`, `.item()`, a branch on the values of a tensor. A compiler that
# refuses such functions is of little use, so this one cuts them, wherever it happens: in the middle of an
# expression, in a loop, in a `try` or a `with`.
#
# The function of chapter 1, by somebody who wants to see what happens:
#
#     def noisy(x):
#         mean = x.mean(1, keepdim=True)
#         print("mean of row 0:", mean[0])
#         return x - mean
#
# There is a graph for what comes before `print` has to run, `mean[0]` included. It also returns `mean`, which the rest will need:
#
#     x: f32[64, 256] = input
#     mean: f32[64, 1] = x.mean(1, keepdim=True)
#     getitem: f32[1] = getitem(mean, 0)
#     return (getitem, mean)
#
# The compiled function ends with a call of what comes next. `__function(...)` makes a *step*, a function that consists of the one
# instruction which calls `print`. It gets what this needs, and what has to survive it, `x` and `mean`:
#
#     __t0 = __K[1].__dict__['print']
#     __next_call = __K[3]((__function(__k2, __G, 'noisy', None, ()), (x, __out[1], __t0, 'mean of row 0:', __out[0], )))
#
# The step hands `x` and `mean` on to a *resume function*. That is the bytecode of `noisy` again, behind a jump over all that
# has run already. Its beginning, and where the jump leads (Python 3.11):
#
#     RESUME
#     JUMP_FORWARD to 94
#     LOAD_FAST x
#     LOAD_FAST mean
#     BINARY_OP -
#     RETURN_VALUE
#
# It is a function like any other, so it is captured like any other, and has the second graph:
#
#     x: f32[64, 256] = input
#     mean: f32[64, 1] = input
#     sub: f32[64, 256] = sub(x, mean)
#     return (sub,)
#
# At the end of the chapter you can say where a function will be cut, what runs between two graphs, and what each cut costs.
#
# What it leaves: all that is done to a graph once there is one. The chapters 5 to 11 take one graph at a time and need not know
# that it was cut.
#
# Sources: J. Ansel and others, *PyTorch 2* (2024), section 3.6; J. C. Reynolds, *The discoveries of continuations* (1993), of
# which a resume function is one.
#
# In reading order: `breaks.py` decides where to cut and writes the part before; `resume.py` makes a function of the rest and
# `steps.py` one of the breaking instruction; `bytecode.py` is the assembler that both need.
