# %% [markdown]
# # Lists of operators
#
# What fakes have to know about an operator, and neither its schema nor its tags say.

# %%
import torch

aten = torch.ops.aten


def overloads(*packets) -> list:
    return [getattr(packet, name) for packet in packets for name in packet.overloads()]


def overload_named(name: str):
    """The ATen overload called `name` ("add.Tensor", "relu"), or None where torch has no such overload."""
    packet, _, kind = name.partition(".")
    return getattr(getattr(aten, packet, None), kind or "default", None)


def named(names: str) -> list:
    """The overloads of these names that torch has."""
    return [op for op in map(overload_named, names.split()) if op is not None]


def by_overload(rules: dict) -> dict:
    """{names of overloads: rule} as a table by overload."""
    return {op: rule for names, rule in rules.items() for op in named(names)}


# %% [markdown]
# Of some operators the size of the result, or a number that the program gets, depends on the numbers in tensors: `nonzero` says
# how many there are. A fake has no numbers, so the graph ends before them.
#
# On a GPU, most operators take tensors of a CPU that have no dims, as numbers. `NUMBERS_AT` names those that do so only for
# the operands at the given places, and `FIRST_DECIDES` those whose result is on the device of the first operand, whatever the others are.

# %%
DATA_DEPENDENT = set(named("item _local_scalar_dense nonzero masked_select equal unique_dim _unique2 unique_consecutive is_nonzero "
                           "allclose bincount repeat_interleave.Tensor"))

NUMBERS_AT = {
    **dict.fromkeys("addcdiv block_diag complex embedding huber_loss_backward masked_scatter mse_loss polar smooth_l1_loss "
                    "smooth_l1_loss_backward stack".split(), ()),
    **dict.fromkeys("logical_and logical_or logical_xor soft_margin_loss".split(), (1,)),
    **dict.fromkeys("addcmul lerp masked_fill".split(), (2,)), "soft_margin_loss_backward": (0, 2)}

FIRST_DECIDES = set(named(
    "copy_ copy fill.Tensor fill_.Tensor resize_as_ index.Tensor index_put index_put_ _index_put_impl_ select_scatter "
    "slice_scatter diagonal_scatter as_strided_scatter index_fill.int_Tensor index_fill_.int_Tensor index_fill.int_Scalar "
    "index_fill_.int_Scalar"))

# %% [markdown]
# A float that varies from call to call can be an input of the graph only if it is data to whatever takes it: no shape and no
# dtype depends on its value, no kernel refuses some values, and the graph of primitives is the same for all.

# %%
FLOATS_ARE_DATA = set(named(
    "add.Tensor add.Scalar add_.Tensor add_.Scalar sub.Tensor sub.Scalar sub_.Tensor sub_.Scalar "
    "rsub.Scalar rsub.Tensor mul.Tensor mul.Scalar mul_.Tensor mul_.Scalar div.Tensor div.Scalar "
    "div_.Tensor div_.Scalar div.Tensor_mode div.Scalar_mode floor_divide floor_divide.Scalar "
    "remainder.Scalar remainder.Tensor fmod.Scalar fmod.Tensor pow.Tensor_Scalar pow.Scalar pow_.Scalar "
    "eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar eq.Tensor ne.Tensor lt.Tensor le.Tensor "
    "gt.Tensor ge.Tensor clamp clamp_ clamp_min clamp_min_ clamp_max clamp_max_ lerp.Scalar lerp_.Scalar "
    "addcmul addcmul_ addcdiv addcdiv_ full full_like new_full scalar_tensor fill.Scalar fill_.Scalar "
    "masked_fill.Scalar masked_fill_.Scalar where.ScalarSelf where.ScalarOther where.Scalar leaky_relu "
    "leaky_relu_backward hardtanh threshold threshold_backward elu addmm baddbmm addmv addbmm addr addmm_ "
    "elu_ elu_backward hardtanh_ hardtanh_backward softplus softplus_backward hardshrink hardshrink_backward softshrink "
    "softshrink_backward index_add index_add_ scatter.value scatter_.value "
    "bernoulli.p bernoulli_.float uniform uniform_ normal_functional normal_ exponential exponential_ cauchy cauchy_ "
    "log_normal log_normal_ geometric geometric_ linspace "
    "index_fill.int_Scalar index_fill_.int_Scalar constant_pad_nd xlogy.Scalar_Other xlogy.Scalar_Self maximum minimum "
    + " ".join(f"_foreach_{name}{form}.{kind}" for name in "add sub mul div lerp addcmul addcdiv pow clamp_min clamp_max".split()
               for form in ("", "_") for kind in ("Scalar", "ScalarList", "List", "Tensor", "ScalarAndTensor"))))

# %% [markdown]
# Where PyTorch has no meta kernel for an operator, or none for all of its forms, its results are derived here: fused optimizers
# (none is there with the learning rate in a tensor), `x << y` and `x >> y` (none is there with a bool, which kernels take), what some
# distributions draw and its gradient, the loss of CTC, rounding as to a quantised tensor, and copies of views that could not be views.

# %%
FUSED = {getattr(packet, kind) for name in ("adam", "adamw", "sgd") for form in ("", "_")
         for packet in [getattr(aten, f"_fused_{name}{form}")] for kind in ("default", "tensor_lr")}


def _ctc_loss(log_probs, targets, input_lengths, target_lengths, *_):
    steps, batch = log_probs.shape[:2]
    if targets.dim() == 2 and targets.shape[1] < max(target_lengths, default=0) or len(target_lengths) != batch or \
            len(input_lengths) != batch or any(n > steps for n in input_lengths) or log_probs.dim() != 3:
        raise RuntimeError("lengths that do not fit the tensors")
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * max(target_lengths, default=0) + 1)


def _drawn(parameter, *_):
    return parameter.new_empty(parameter.shape)


def _rounded(x, *_):
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def _rounded_by_channel(x, *_):
    """Its derivative asks for the number of elements, so sizes are those at hand, by guards."""
    return _rounded(x.new_empty_strided(list(map(int, x.shape)), list(map(int, x.stride()))))


def _rounding_gradients(grad, x, *learned):
    """Those of the input and of what is learned, scale and zero point. The kernel computes in float32, but for an input of no elements."""
    return tuple([torch.empty_like(t, dtype=torch.float32 if x.numel() else t.dtype) for t in (x, *learned[:2])])


WITHOUT_META = {aten._ctc_loss.default: _ctc_loss,
                aten.fake_quantize_per_tensor_affine_cachemask.default: _rounded,
                aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default: _rounded,
                aten.fake_quantize_per_channel_affine_cachemask.default: _rounded_by_channel,
                aten._fake_quantize_learnable_per_tensor_affine.default: lambda x, *_: torch.empty_like(x),
                aten._fake_quantize_learnable_per_channel_affine.default: lambda x, *_: torch.empty_like(x),
                aten._fake_quantize_learnable_per_tensor_affine_backward.default: _rounding_gradients,
                aten._fake_quantize_learnable_per_channel_affine_backward.default: _rounding_gradients,
                aten._transformer_encoder_layer_fwd.default: lambda x, *_: torch.empty_like(x),
                aten._standard_gamma.default: _drawn, aten._sample_dirichlet.default: _drawn, aten.binomial.default: _drawn,
                aten._standard_gamma_grad.default: torch.add, aten._dirichlet_grad.default: torch.addcmul,
                aten.view_copy.default: lambda x, sizes: torch.empty_like(x.reshape(sizes), memory_format=torch.contiguous_format),
                aten.cudnn_grid_sampler.default: lambda x, grid: x.new_empty(*x.shape[:2], *grid.shape[1:3]),
                aten.cudnn_grid_sampler_backward.default: lambda x, grid, grad: (torch.empty_like(x), torch.empty_like(grid)),
                aten._ctc_loss_backward.default: lambda grad, log_probs, *_: torch.empty_like(
                    log_probs, memory_format=torch.contiguous_format),
                **{getattr(getattr(aten, f"__{i}{side[0]}shift__"), kind): getattr(torch.Tensor, f"bitwise_{side}_shift{'_' * len(i)}")
                   for side in ("left", "right") for i in ("", "i") for kind in ("Tensor", "Scalar")}}

# %% [markdown]
# The last lists are about views. `x.t_()` writes no data: the tensor object becomes a view of what it was, and `IN_PLACE_VIEWS` names that
# view; beside these only the others in `RESHAPING` change the size of what they are given. `SCATTERED` names the part of the first operand
# that a scatter into a view replaces by the second. And `SHAPED` are the operators whose meta kernels let sizes pass that the kernel
# refuses.

# %%
STRIDED = {aten.as_strided, aten.as_strided_, aten.as_strided_copy}
IN_PLACE_VIEWS = {
    aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.unsqueeze_.default: aten.unsqueeze.default,
    aten.as_strided_.default: aten.as_strided.default,
}
RESHAPING = {*IN_PLACE_VIEWS, *overloads(aten.resize_, aten.resize_as_, aten.set_)}
SCATTERED = {
    aten.select_scatter.default: aten.select.int,
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.diagonal_scatter.default: aten.diagonal.default,
    aten.as_strided_scatter.default: aten.as_strided.default,
}

SHAPED = set(overloads(*(getattr(aten, name + form) for form in ("", "_") for name in (
    "put index_add index_reduce index_copy index_fill scatter scatter_add scatter_reduce masked_scatter index_put").split()), *(
    getattr(aten, name) for name in (
        "heaviside binary_cross_entropy "
        "_index_put_impl_ index index_select embedding gather searchsorted bucketize nll_loss_forward nll_loss2d_forward soft_margin_loss "
        "max min median nanmedian mode upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d "
        "_upsample_bilinear2d_aa _upsample_bicubic2d_aa grid_sampler_2d grid_sampler_3d affine_grid_generator").split())))

