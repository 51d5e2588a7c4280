# %% [markdown]
# # Chapter 5: autograd
#
# In eager, backward is not a program: forward leaves nodes behind, and the engine walks them when `backward()` is called. Each derivative
# formula saves what it needs, whatever it costs. A compiler wants backward beforehand and as a graph, because then it can be compiled
# like forward, and because what is carried from one to the other can be chosen.
#
# The running example becomes interesting with an activation behind it: `torch.relu(x - x.mean(1, keepdim=True))`, of 64 by 256 numbers
# that require a gradient. The *joint graph* is what the engine of PyTorch did on fakes, recorded. `tangent0` is the gradient that will
# arrive for the result:
#
#     x: f32[64, 256] = input
#     mean_dim: f32[64, 1] = aten.mean.dim(x, [1], True)
#     sub_tensor: f32[64, 256] = aten.sub.Tensor(x, mean_dim)
#     relu_default: f32[64, 256] = aten.relu.default(sub_tensor)
#     tangent0: f32[64, 256] = input
#     threshold_backward_default: f32[64, 256] = aten.threshold_backward.default(tangent0, relu_default, 0)
#     neg_default: f32[64, 256] = aten.neg.default(threshold_backward_default)
#     sum_dim_int_list: f32[64, 1] = aten.sum.dim_IntList(neg_default, [1], True)
#     expand_default: f32[64, 256] = aten.expand.default(sum_dim_int_list, [64, 256])
#     div_scalar: f32[64, 256] = aten.div.Scalar(expand_default, 256)
#     add_tensor: f32[64, 256] = aten.add.Tensor(threshold_backward_default, div_scalar)
#     return (relu_default, add_tensor)
#
# Then it is cut in two, at the place where the least has to be carried across. Eager saves the result of `relu`, 64 KB, which its
# formula compares with 0. Here forward compares, and what is saved is the answer, a byte for each element:
#
#     x: f32[64, 256] = input
#     sum_dim_int_list: f32[64, 1] = aten.sum.dim_IntList(x, [1], True)
#     div_tensor: f32[64, 1] = aten.div.Tensor(sum_dim_int_list, 256)
#     sub_tensor: f32[64, 256] = aten.sub.Tensor(x, div_tensor)
#     full_default: f32[] = aten.full.default([], 0, dtype=torch.float32, device=cpu)
#     maximum_default: f32[64, 256] = aten.maximum.default(sub_tensor, full_default)
#     le_scalar: b8[64, 256] = aten.le.Scalar(maximum_default, 0)
#     return (maximum_default, le_scalar)
#
# (Between the two listings chapter 6 has taken `mean` and `relu` apart. The cut is made on what comes out of it, where a comparison is
# seen to be one.)
#
# At the end of the chapter you can tell for a training program what crosses from forward to backward and why, what happens to
# its writes and views, and what the compiled region looks like to the engine of PyTorch.
#
# What it leaves: that a graph may hold any of PyTorch's three thousand operators, and the stages behind would have to know each
# (chapter 6).
#
# Sources: A. Griewank, A. Walther, *Evaluating Derivatives* (2008); L. Ford, D. Fulkerson, *Maximal Flow through a Network*
# (1956); H. He, S. Yu, *Transcending Runtime-Memory Tradeoffs in Checkpointing by being Fusion Aware* (2023), for the cut of the
# joint graph.
#
# In reading order:
#
# 1. `aliases.py`: tensors that share memory; `schemas.py`: what an operator writes; `functionalize.py`: a graph in which
#    nothing is written;
# 2. `joint.py`: forward and backward, recorded in one graph; `output_plan.py`: of which of its results each output is made;
#    `registered.py`: derivatives that ask for numbers, which cannot be recorded;
#    `cleanup.py`: what of it is dead or computed twice;
# 3. `partition.py`: what to save and what to compute again, as a minimum cut; `maxflow.py`: the algorithm behind it;
# 4. `region.py`: the two halves as one node of the engine; `outputs.py`: what the caller gets, made by recipes; `callables.py`: the
#    state around compiled code; `undefined.py`: gradients that never arrive;
# 5. `second.py`: derivatives of derivatives;
# 6. `runtime.py`: the stage, which calls all of this in order.

# %%
from .rules import batch_norm, views  # noqa: F401  (they register)
