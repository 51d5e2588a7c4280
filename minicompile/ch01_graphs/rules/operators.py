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


# Their result depends on the numbers in tensors.
DATA_DEPENDENT = {
    aten.item.default, aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default,
    aten.equal.default, aten.unique_dim.default, aten._unique2.default, aten.unique_consecutive.default,
    aten.is_nonzero.default, aten.allclose.default, aten.bincount.default, aten.repeat_interleave.Tensor,
}

# Operators that take tensors of a CPU without dims beside those of a GPU only at some places.
NUMBERS_AT = {                          # the places of operands, if not all
    **dict.fromkeys("addcdiv block_diag complex embedding huber_loss_backward masked_scatter mse_loss polar smooth_l1_loss "
                    "smooth_l1_loss_backward stack".split(), ()),
    **dict.fromkeys("logical_and logical_or logical_xor soft_margin_loss".split(), (1,)),
    **dict.fromkeys("addcmul lerp masked_fill".split(), (2,)), "soft_margin_loss_backward": (0, 2)}

# Whose device is that of the first operand.
FIRST_DECIDES = set(map(overload_named, (
    "copy_ copy fill.Tensor fill_.Tensor resize_as_ index.Tensor index_put index_put_ _index_put_impl_ select_scatter "
    "slice_scatter diagonal_scatter as_strided_scatter index_fill.int_Tensor index_fill_.int_Tensor index_fill.int_Scalar "
    "index_fill_.int_Scalar").split()))

# Operators for which a float is data: no shape or dtype depends on its value, no kernel refuses some values,
# and the graph of primitives is the same for all.
FLOATS_ARE_DATA = set(filter(None, map(overload_named, (
    "add.Tensor add.Scalar add_.Tensor add_.Scalar sub.Tensor sub.Scalar sub_.Tensor sub_.Scalar "
    "rsub.Scalar rsub.Tensor mul.Tensor mul.Scalar mul_.Tensor mul_.Scalar div.Tensor div.Scalar "
    "div_.Tensor div_.Scalar div.Tensor_mode div.Scalar_mode floor_divide floor_divide.Scalar "
    "remainder.Scalar remainder.Tensor fmod.Scalar fmod.Tensor pow.Tensor_Scalar pow.Scalar pow_.Scalar "
    "eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar eq.Tensor ne.Tensor lt.Tensor le.Tensor "
    "gt.Tensor ge.Tensor clamp clamp_ clamp_min clamp_min_ clamp_max clamp_max_ lerp.Scalar lerp_.Scalar "
    "addcmul addcmul_ addcdiv addcdiv_ full full_like new_full scalar_tensor fill.Scalar fill_.Scalar "
    "masked_fill.Scalar masked_fill_.Scalar where.ScalarSelf where.ScalarOther where.Scalar leaky_relu "
    "leaky_relu_backward hardtanh threshold threshold_backward elu addmm baddbmm addmv addbmm addr addmm_ "
    "index_fill.int_Scalar index_fill_.int_Scalar xlogy.Scalar_Other xlogy.Scalar_Self maximum minimum "
    + " ".join(f"_foreach_{name}{form}.{kind}" for name in "add sub mul div lerp addcmul addcdiv pow clamp_min clamp_max".split()
               for form in ("", "_") for kind in ("Scalar", "ScalarList", "List", "Tensor", "ScalarAndTensor"))
    ).split())))

# Fused optimizers: not all of them have meta kernels, and none with the learning rate in a tensor
FUSED = {getattr(packet, kind) for name in ("adam", "adamw", "sgd") for form in ("", "_")
         for packet in [getattr(aten, f"_fused_{name}{form}")] for kind in ("default", "tensor_lr")}

# Results like the first operand, where PyTorch 2.11 has no meta kernel.
LIKE_THE_FIRST = {aten._transformer_encoder_layer_fwd.default, aten._standard_gamma.default}

STRIDED = {aten.as_strided, aten.as_strided_, aten.as_strided_copy}
IN_PLACE_VIEWS = {                      # `x.t_()` writes no data: the tensor object becomes a view of what it was
    aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.unsqueeze_.default: aten.unsqueeze.default,
    aten.as_strided_.default: aten.as_strided.default,
}
SCATTERED = {                           # the part of their first operand that is replaced by the second
    aten.select_scatter.default: aten.select.int,
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.diagonal_scatter.default: aten.diagonal.default,
    aten.as_strided_scatter.default: aten.as_strided.default,
}

# Their meta kernels let sizes pass which the kernel refuses.
SHAPED = set(overloads(
    aten.put, aten.put_, aten.index_add, aten.index_add_, aten.index_reduce, aten.index_reduce_, aten.index_copy, aten.index_copy_,
    aten.index_fill, aten.index_fill_, aten.index, aten.index_select, aten.embedding, aten.gather,
    aten.scatter, aten.scatter_, aten.scatter_add, aten.scatter_add_, aten.scatter_reduce, aten.scatter_reduce_, aten.masked_scatter,
    aten.masked_scatter_, aten.index_put, aten.index_put_, aten._index_put_impl_, aten.searchsorted, aten.bucketize,
    aten.nll_loss_forward, aten.nll_loss2d_forward, aten.soft_margin_loss, aten.max, aten.min, aten.median, aten.nanmedian, aten.mode))


def _ctc_loss(log_probs, targets, input_lengths, target_lengths, *_):
    steps, batch = log_probs.shape[:2]
    if targets.dim() == 2 and targets.shape[1] < max(target_lengths, default=0) or len(target_lengths) != batch or \
            len(input_lengths) != batch or any(n > steps for n in input_lengths) or log_probs.dim() != 3:
        raise RuntimeError("lengths that do not fit the tensors")
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * max(target_lengths, default=0) + 1)


WITHOUT_META = {aten._ctc_loss.default: _ctc_loss,
                aten._ctc_loss_backward.default: lambda grad, log_probs, *_: torch.empty_like(
                    log_probs, memory_format=torch.contiguous_format)}
