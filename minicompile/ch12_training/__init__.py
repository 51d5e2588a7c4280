# %% [markdown]
# # Chapter 12: the training step
#
# A training loop calls `backward()` in its middle, and then an optimizer, which is Python that goes through all parameters and
# launches a few operators for each. If a graph ends at `backward()`, the optimizer is not compiled, and what forward and backward know
# of each other ends there as well. This chapter makes one graph of all of it.
#
# A step that trains the numbers of the running example, with plain SGD:
#
#     def step(x, optimizer):
#         loss = (x - x.mean(1, keepdim=True)).square().sum()
#         loss.backward()
#         optimizer.step()
#         optimizer.zero_grad()
#         return loss.detach()
#
# As captured, it is this graph. `gradients` is what is left of the engine: a function of the loss and of the leaf that gives the gradient
# of the leaf. The loop of the optimizer is one `add_`, and its learning rate is an input, since a scheduler may change it:
#
#     x: f32[64, 256] = input
#     optimizer_param_groups_0_lr: f0 = input
#     mean: f32[64, 1] = x.mean(1, keepdim=True)
#     sub: f32[64, 256] = sub(x, mean)
#     square: f32[64, 256] = sub.square()
#     sum_1: f32[] = square.sum()
#     gradients: (f32[64, 256]) = gradients((sum_1,), (x,), None, False, True)
#     getitem: f32[64, 256] = getitem(gradients, 0)
#     _set_grad_enabled: None = _set_grad_enabled(False)
#     neg: -(f0) = neg(optimizer_param_groups_0_lr)
#     add_: f32[64, 256] = x.add_(getitem, alpha=neg)
#     _set_grad_enabled_1: None = _set_grad_enabled(True)
#     detach: f32[] = sum_1.detach()
#     return (detach,)
#
# `zero_grad` has left no line. The gradient was assigned to `x.grad` and taken away again before anybody could look, so it is a
# value of the graph like others, and later stages may keep it in registers.
#
# At the end of the chapter you can say what `backward()`, hooks, `.grad`, `.data` and an optimizer are to a graph, and which uses of them
# break it.
#
# What it leaves: in which order the elements of a tensor lie, which no number depends on (chapter 13).
#
# Sources: A. Paszke and others, *Automatic differentiation in PyTorch* (2017); D. Kingma, J. Ba, *Adam* (2015).
#
# In reading order:
#
# 1. `engine.py`: the engine as one node, and the leaves that it finds; `walk.py`: a call of it, in one pass or from hook to hook;
#    `backward.py`: what the program calls, and gradients that are cleared;
# 2. `slots.py`: what a program sees of it in its tensors; `hooks.py`: functions that the engine calls; `data.py`: tensors
#    that get other memory;
# 3. `optimizers.py`: decorators, learning rates, counters, the state of the first step, schedulers;
# 4. `memory.py`: what forward keeps for backward, when both are one graph.

# %%
from . import backward, data, hooks, optimizers, slots  # noqa: F401 (they fill tables of chapter 3)
