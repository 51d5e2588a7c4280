# %% [markdown]
# # Chapter 13: layouts
#
# So far the layout of each tensor was eager's, because a program may look at strides. But some operators are faster in another
# layout, convolutions on a GPU above all, and a program that never looks would not notice. This chapter changes layouts where that
# pays, and puts them back where it would show.
#
# The running example has no convolution, so here is another function, of an image `x` with 16 channels and two weights:
#
#     def convolved(x, w, v):
#         return F.conv2d(torch.relu(F.conv2d(x, w)), v)
#
# On a GPU its captured graph becomes
#
#     x: f32[2, 16, 9, 9] = input
#     w: f32[16, 16, 3, 3] = input
#     v: f32[16, 16, 3, 3] = input
#     contiguous: f32[2, 16, 9, 9] = x.contiguous(memory_format=torch.channels_last)
#     contiguous_1: f32[16, 16, 3, 3] = w.contiguous(memory_format=torch.channels_last)
#     conv2d: f32[2, 16, 7, 7] = conv2d(contiguous, contiguous_1)
#     relu: f32[2, 16, 7, 7] = relu(conv2d)
#     contiguous_2: f32[2, 16, 7, 7] = relu.contiguous(memory_format=torch.channels_last)
#     contiguous_3: f32[16, 16, 3, 3] = v.contiguous(memory_format=torch.channels_last)
#     conv2d_1: f32[2, 16, 5, 5] = conv2d(contiguous_2, contiguous_3)
#     contiguous_4: f32[2, 16, 5, 5] = conv2d_1.contiguous()
#     return (contiguous_4,)
#
# `contiguous_2` costs nothing: the first convolution has given channels last, `relu` has kept it, and a tensor that lies as it should is
# not copied. `contiguous_4` is the border. The caller gets the strides that eager would have given.
#
# At the end of the chapter you can say where a program sees how a tensor lies, and how to change a layout everywhere else. There is one
# module, `layouts.py`.
#
# What it leaves: which of several right kernels is the fastest. Nothing is measured yet (`max_autotune` says so).
#
# Sources: Y. Liu and others, *Optimizing CNN Model Inference on CPUs* (2019), where layouts are searched for over the whole
# graph.
