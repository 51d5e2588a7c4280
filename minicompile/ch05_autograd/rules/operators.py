# %% [markdown]
# # Lists of operators
#
# What the passes ask about an operator, and neither its schema nor its tags say.

# %%
import torch

from ...ch01_graphs.rules.operators import named

aten = torch.ops.aten

# %% [markdown]
# The partition of a joint graph into forward and backward asks which results are cheap to compute again rather than save. Elementwise
# operators have a tag; `CHEAP` lists what is as cheap without it, and `BECOME_LOOPS` what else becomes a loop that may be fused.

# %%
CHEAP = {getattr(aten, name) for name in (
    "_to_copy clone copy fill zero full full_like zeros zeros_like ones ones_like new_zeros new_ones new_full scalar_tensor arange eye cat "
    "stack repeat flip roll tril triu constant_pad_nd slice_scatter select_scatter masked_fill "
    "_native_batch_norm_legit_no_training").split()}

BECOME_LOOPS = {getattr(aten, name) for name in (
    "sum mean amax amin max min prod var var_mean std any all argmax argmin _softmax _log_softmax _softmax_backward_data "
    "_log_softmax_backward_data logsumexp native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward "
    "native_batch_norm_backward native_dropout _native_batch_norm_legit_functional native_batch_norm nll_loss_forward nll_loss_backward "
    "embedding embedding_dense_backward index gather scatter scatter_add index_select index_put select_backward slice_backward "
    "max_pool2d_with_indices avg_pool2d linalg_vector_norm bernoulli empty_like").split()}

# %% [markdown]
# What makes zeros of nothing but a form: a derivative that is zero everywhere is one of these.

# %%
ZEROS = set(named("zeros zeros_like new_zeros _efficientzerotensor"))

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
    fake_quantize_per_tensor_affine_cachemask _fake_quantize_per_tensor_affine_cachemask_tensor_qparams
    fake_quantize_per_channel_affine_cachemask _fake_quantize_learnable_per_tensor_affine _fake_quantize_learnable_per_channel_affine
    """.split())
REFUSING_INTEGERS = set("remainder fmod floor_divide div pow".split())
