# %% [markdown]
# # Lists of operators
#
# What the passes ask about an operator, and neither its schema nor its tags say.

# %%
import operator

import torch

aten = torch.ops.aten

# %% [markdown]
# The partition of a joint graph into forward and backward asks which results are cheap to compute again rather than save. Elementwise
# operators have a tag; `CHEAP` lists what is as cheap without it, and `BECOME_LOOPS` what else becomes a loop that may be fused.

# %%
CHEAP = {
    aten._to_copy, aten.clone, aten.copy, aten.fill, aten.zero, aten.full, aten.full_like, aten.zeros,
    aten.zeros_like, aten.ones, aten.ones_like, aten.new_zeros, aten.new_ones, aten.new_full,
    aten.scalar_tensor, aten.arange, aten.eye, aten.cat, aten.stack, aten.repeat, aten.flip, aten.roll,
    aten.tril, aten.triu, aten.constant_pad_nd, aten.slice_scatter, aten.select_scatter,
    aten.masked_fill, aten._native_batch_norm_legit_no_training,
}

BECOME_LOOPS = {
    aten.sum, aten.mean, aten.amax, aten.amin, aten.max, aten.min, aten.prod, aten.var, aten.var_mean,
    aten.std, aten.any, aten.all, aten.argmax, aten.argmin, aten._softmax, aten._log_softmax,
    aten._softmax_backward_data, aten._log_softmax_backward_data, aten.logsumexp, aten.native_layer_norm,
    aten.native_layer_norm_backward, aten.native_group_norm, aten.native_group_norm_backward,
    aten.native_batch_norm_backward, aten.native_dropout, aten._native_batch_norm_legit_functional,
    aten.native_batch_norm, aten.nll_loss_forward, aten.nll_loss_backward, aten.embedding,
    aten.embedding_dense_backward, aten.index, aten.gather, aten.scatter, aten.scatter_add,
    aten.index_select, aten.index_put, aten.select_backward, aten.slice_backward,
    aten.max_pool2d_with_indices, aten.avg_pool2d, aten.linalg_vector_norm, aten.bernoulli,
    aten.empty_like,
}

# %% [markdown]
# Whether a gradient is zero whatever the data is, is asked forward along the graph. `LINEAR` operators, as all views, give zero if
# their first operand is, a product as soon as either is, and `JOINS` if the operands at the given positions are.

# %%
LINEAR = {
    aten.div.Tensor, aten.neg.default, aten.clone.default, aten._to_copy.default, aten.sum.default, aten.sum.dim_IntList, operator.getitem,
    aten.reshape.default, aten._softmax_backward_data.default, aten._log_softmax_backward_data.default,
    aten.mul.Scalar, aten.div.Scalar, aten.flip.default, aten.index.Tensor, aten.masked_fill.Scalar,
    aten.roll.default, aten.rot90.default, aten.tril.default, aten.triu.default, aten.repeat.default, aten.constant_pad_nd.default,
    aten.cumsum.default, aten.mean.dim, aten.mean.default, aten.index_select.default, aten.gather.default,
}
ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten._efficientzerotensor.default}
PRODUCTS = {aten.mul.Tensor, aten.mm.default, aten.bmm.default}
JOINS = {aten.add.Tensor: (0, 1), aten.sub.Tensor: (0, 1), aten.where.self: (1, 2), aten.cat.default: (0,), aten.stack.default: (0,),
         aten.slice_scatter.default: (0, 1), aten.select_scatter.default: (0, 1), aten.diagonal_scatter.default: (0, 1),
         aten.as_strided_scatter.default: (0, 1), aten.index_put.default: (0, 2), aten.scatter.src: (0, 3),
         aten.scatter_add.default: (0, 3), aten.index_add.default: (0, 3)}

# %% [markdown]
# Operators that raise for some values of their operands must run where eager runs them. `REFUSING_INTEGERS` do so only for integers,
# divided by 0 or to a negative power. PyTorch does not say which these are: tests/test_refusals.py gives all operators such values. Of a
# user's operators nothing is known, and any may refuse.

# %%
REFUSING = set("""
    embedding _embedding_bag _embedding_bag_forward_only embedding_renorm gather take index index_select
    index_put index_add index_copy index_fill index_reduce put scatter scatter_add scatter_reduce segment_reduce nll_loss_forward
    nll_loss2d_forward multi_margin_loss multilabel_margin_loss_forward binary_cross_entropy max_unpool2d max_unpool3d masked_scatter
    histc histogram _histogramdd_bin_edges _histogramdd_from_bin_cts _linalg_eigh _linalg_svd linalg_eig _linalg_eigvals linalg_lstsq
    linalg_matrix_exp linalg_pinv cholesky cholesky_inverse ormqr _ctc_loss linspace logspace
    """.split())
REFUSING_INTEGERS = set("remainder fmod floor_divide div pow".split())
