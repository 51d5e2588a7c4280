# %% [markdown]
# # Running an operator on fakes
#
# The output device is that of the tensor inputs, unless the call names one (`torch.zeros(..., device=...)`,
# `x.to("cuda")`). A CPU scalar tensor may be combined with tensors of another device, as in eager. In-place
# operators return the very object they were given, as they must: Python code compares identities.
#
# A symbolic float (`floats.py`) is replaced by its present value on the way to the meta kernel, which is
# right where no shape depends on it. Those operators are listed; elsewhere the float is fixed by a guard.
#
# Some operators have results whose *shape* depends on data (`nonzero`, `x[mask]`) or that are Python numbers
# (`item`). There is nothing to fake there; they raise `DataDependent`, which capture turns into a graph
# break.

# %%
import contextlib
import functools
import re
from pathlib import Path

import torch
from torch.utils import _pytree as pytree

from ..errors import Unsupported
from .corrections import LIKE_THE_FIRST, true_form
from .fake import FakeTensor
from .refusals import REFUSALS, check_with_kernel
from .shapes import NUMBERS, answer_in_numbers

aten = torch.ops.aten
NAMESPACES = "aten", "prims", "minicompile"         # the others are a user's


class DataDependent(Unsupported):
    """The result's shape or Python value depends on numbers that a fake tensor does not have."""


DATA_DEPENDENT = {
    aten.item.default, aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default,
    aten.equal.default, aten.unique_dim.default, aten._unique2.default, aten.unique_consecutive.default,
    aten.is_nonzero.default, aten.allclose.default, aten.bincount.default, aten.repeat_interleave.Tensor,
}


def _check_data_dependent(func, args):
    if func in DATA_DEPENDENT:
        raise DataDependent(f"{func} gives a result that depends on tensor values")
    if func is aten.index.Tensor and any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8)
                                         for i in args[1]):
        raise DataDependent("indexing with a mask gives a result whose size depends on tensor values")


# %% [markdown]
# ## On which device?
#
# A meta tensor does not know it, so it is decided here. A call may name a device. A few operators follow
# their first operand whatever the others are, for instance a copy into a tensor. In all other cases the
# tensors have to agree, and an operator that gets tensors of two devices raises the error that eager raises.
#
# May a CPU tensor without dimensions stand beside tensors of a GPU? `x + t` takes one, `x.clamp(max=t)` refuses it, and meta kernels
# let both pass. The difference is a line in PyTorch's table of operators, which is installed beside it: a CUDA kernel is called only
# after a comparison of devices, except where the table says `device_check: NoCheck`. It says so of kernels that are loops over
# elements, which read such a tensor as a number; a few of them do so at some places only. What a loop writes is never a number to it.

# %%
@functools.cache
def of_one_device() -> set[str]:
    """The names of operators whose CUDA kernels take only tensors of one device."""
    table = Path(torch.__file__).parents[1] / "torchgen/packaged/ATen/native/native_functions.yaml"
    entries = re.split("^- func: ", table.read_text(), flags=re.M)[1:] if table.exists() else []
    return {f"aten::{entry.split('(')[0]}" for entry in entries if "device_check: NoCheck" not in entry
            and re.search(r"^    [\w, ]*\bCUDA\b|^  structured_delegate", entry, re.M)}


NUMBERS_AT = {                          # the places of operands, if not all
    **dict.fromkeys("addcdiv block_diag complex embedding huber_loss_backward masked_scatter mse_loss polar smooth_l1_loss "
                    "smooth_l1_loss_backward stack".split(), ()),
    **dict.fromkeys("logical_and logical_or logical_xor soft_margin_loss".split(), (1,)),
    **dict.fromkeys("addcmul lerp masked_fill".split(), (2,)), "soft_margin_loss_backward": (0, 2)}


# %% [markdown]
# The device is that of a tensor on a GPU, if there is one, and tensors elsewhere have to be numbers to the operator.

# %%
def _numbers(func, args, kwargs) -> list:
    """The operands that may be numbers of a CPU."""
    if func.name() in of_one_device():
        return []
    places = NUMBERS_AT.get(func._schema.name.removeprefix("aten::").rstrip("_"), range(len(args)))
    written = [a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments]
    return leaves([x for i in places if i < len(args) and not written[i] for x in leaves([args[i]], {})], kwargs)


def _common_device(func, args, kwargs, tensors: list[torch.Tensor]) -> torch.device:
    """Where an operator on these tensors runs."""
    if len({t.device for t in tensors}) == 1:
        return tensors[0].device
    device, numbers = next(t.device for t in tensors if t.device.type != "cpu"), _numbers(func, args, kwargs)
    for t in tensors:
        if t.device != device and (t.dim() or t.device.type != "cpu" or not any(t is x for x in numbers)):
            raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two "
                               f"devices, {device} and {t.device}!")
    return device


FIRST_DECIDES = {op for name in ("copy_ copy fill.Tensor fill_.Tensor resize_as_ index.Tensor "
                                 "index_put index_put_ _index_put_impl_ select_scatter slice_scatter "
                                 "diagonal_scatter as_strided_scatter index_fill.int_Tensor index_fill_.int_Tensor "
                                 "index_fill.int_Scalar index_fill_.int_Scalar").split()
                 for packet, _, kind in [name.partition(".")] for op in [getattr(getattr(aten, packet), kind or "default")]}


def _result_device(func, args, kwargs, tensors: list[torch.Tensor]) -> torch.device:
    if kwargs.get("device") is not None:
        device = torch.device(kwargs["device"])
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
        return device
    if func in FIRST_DECIDES:
        return args[0].device
    return _common_device(func, args, kwargs, tensors) if tensors else torch.device("cpu")


# %% [markdown]
# ## Symbolic floats
#
# The list names the operators that treat a number as data. For these the number may stay a symbol. Any other
# operator might look at it, and decide by its value what to do or what shape to give, so `settle_floats` asks
# for the value and thereby records a guard.

# %%
# Operators for which a float is data: no shape or dtype depends on its value, no kernel refuses some values,
# and the graph of primitives is the same for all.
FLOATS_ARE_DATA = {op for name in (
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
    ).split() for packet, _, kind in [name.partition(".")]
    for op in [getattr(getattr(aten, packet, None), kind or "default", None)] if op is not None}


def leaves(args, kwargs) -> list:
    """The arguments of an operator, which are tensors, numbers, other things, and lists of such."""
    return [x for a in (*args, *kwargs.values()) for x in (a if isinstance(a, (list, tuple)) else (a,))]


def settle_floats(func, args, kwargs):
    """The arguments, with symbolic floats fixed to their present values (by guards) unless they are data."""
    if func in FLOATS_ARE_DATA:
        return args, kwargs
    if not any(isinstance(x, torch.SymFloat) for x in leaves(args, kwargs)):
        return args, kwargs
    return pytree.tree_map(lambda x: x.node.guard_float() if isinstance(x, torch.SymFloat) else x,
                           (args, kwargs))

# %% [markdown]
# ## One question
#
# Everything comes together here: refuse what depends on data, unwrap the fakes, run the meta kernel, correct
# the strides of its result, and wrap it, or hand back the fake that an in-place operator was given.
#
# Read `run_on_fakes` in four parts. First come the refusals. Then the device is decided by the tensors among the
# arguments, and every fake is replaced by its meta tensor. `run_meta` runs the meta kernel and corrects its answer
# where it is known to be wrong (`corrections.py`); each `except` names a way in which a meta kernel can fail to
# answer. At the end come the operators that write. Their schema says which arguments they write to, and the fakes
# of those are returned as they are; all other results get new fakes.

# %%
# Fused optimizers: not all of them have meta kernels, and none with the learning rate in a tensor
FUSED = {getattr(packet, kind) for name in ("adam", "adamw", "sgd") for form in ("", "_")
         for packet in [getattr(aten, f"_fused_{name}{form}")] for kind in ("default", "tensor_lr")}


def _ctc_loss(log_probs, targets, input_lengths, target_lengths, *_):
    steps, batch = log_probs.shape[:2]
    if targets.dim() == 2 and targets.shape[1] < max(target_lengths, default=0) or len(target_lengths) != batch or \
            len(input_lengths) != batch or any(n > steps for n in input_lengths) or log_probs.dim() != 3:
        raise RuntimeError("lengths that do not fit the tensors")
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * max(target_lengths, default=0) + 1)


WITHOUT_META = {aten._ctc_loss.default: _ctc_loss,
                aten._ctc_loss_backward.default: lambda grad, log_probs, *_: torch.empty_like(
                    log_probs, memory_format=torch.contiguous_format)}


def run_on_fakes(func, args, kwargs):
    """Run one ATen operator on fakes: meta kernel inside, pretended device outside. Real tensors among the
    arguments (constants the program closed over) take part through their metadata."""
    if func in NUMBERS:
        return answer_in_numbers(NUMBERS[func](args[0]))
    _check_data_dependent(func, args)
    args, kwargs = settle_floats(func, args, kwargs)
    flat, spec = pytree.tree_flatten((args, kwargs))
    tensors = [x for x in flat if isinstance(x, torch.Tensor)]
    if func in REFUSALS:
        REFUSALS[func](func, *args, **kwargs)
    check_with_kernel(func, kwargs, flat, spec)
    device = _result_device(func, args, kwargs, tensors)
    meta_args, meta_kwargs = pytree.tree_unflatten([_without_fakes(x) for x in flat], spec)
    takes_device = any(a.name == "device" for a in func._schema.arguments)
    if takes_device and (not tensors or kwargs.get("device") is not None):
        meta_kwargs["device"] = torch.device("meta")
    if "pin_memory" in meta_kwargs:
        meta_kwargs = {**meta_kwargs, "pin_memory": None}
    out = run_meta(func, meta_args, meta_kwargs, flat, device)
    written = _written(func, args)

    def wrap(x):
        if not isinstance(x, torch.Tensor):
            return x
        if x.layout is not torch.strided:
            raise Unsupported(f"{func} gives a tensor of layout {x.layout}")
        return written[id(x)] if id(x) in written else FakeTensor(with_small_sizes(x), device)

    return pytree.tree_map(wrap, out)


def with_small_sizes(meta: torch.Tensor) -> torch.Tensor:
    """The tensor with sizes that are 0 or 1 at present as numbers, by a guard, as such sizes of inputs are: they broadcast differently."""
    small = [d for d, n in enumerate(meta.shape) if type(n) is torch.SymInt and n.node.hint in (0, 1)]
    if not small:
        return meta
    sizes = [int(n) if d in small else n for d, n in enumerate(meta.shape)]
    return meta.as_strided(sizes, meta.stride(), meta.storage_offset())


def _without_fakes(x):
    if isinstance(x, torch.Tensor):
        return x.meta if isinstance(x, FakeTensor) else x.detach().to("meta")
    return x.node.hint if isinstance(x, torch.SymFloat) else x


def run_meta(func, args, kwargs, flat, device):
    try:
        with _python_dispatcher(flat):
            if func in FUSED:               # new values of the first lists, if it does not write to them
                out = tuple([[torch.empty_like(t) for t in xs] for xs in args[:len(func._schema.returns)]]) or None
            elif func in LIKE_THE_FIRST:
                out = torch.empty_like(args[0])
            elif func in WITHOUT_META:
                out = WITHOUT_META[func](*args)
            else:
                out = func(*args, **kwargs)
        return true_form(func, out, args, device)
    except NotImplementedError as error:
        if func.namespace not in NAMESPACES:
            name = func.name().split(".")[0]
            raise Unsupported(f"the custom operator {func} has no fake implementation, so the shape of its "
                              f"result is not known (torch.library.register_fake({name!r}) gives it "
                              "one)") from error
        raise Unsupported(f"{func} has no meta kernel: {str(error).splitlines()[0]}") from error
    except ZeroDivisionError as error:          # the meta kernel of a mean's gradient, for an empty tensor
        raise Unsupported(f"the meta kernel of {func} divides by a size of zero") from error


def _written(func, args) -> dict:
    """id of a meta tensor -> the fake that the operator was given, for what it has written."""
    written = {}
    for schema, value in zip(func._schema.arguments, args):
        if schema.alias_info is not None and schema.alias_info.is_write:
            written |= {id(t.meta): t for t in pytree.tree_leaves(value) if isinstance(t, FakeTensor)}
    if func._schema.name.startswith("aten::_foreach_") or func in FUSED or func.namespace not in NAMESPACES:
        torch.autograd.graph.increment_version(written.values())        # these count versions themselves
    for t in written.values():
        if t.shape != t.meta.shape or t.stride() != t.meta.stride():
            _take_over_metadata(t)
    return written


def _take_over_metadata(fake: FakeTensor) -> None:
    """After `t_()` or `as_strided_()` on the meta tensor: give the wrapper the same sizes and strides."""
    meta = fake.meta
    with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowAutograd():
        aten.as_strided_.default(fake, meta.shape, meta.stride(), meta.storage_offset())


def _python_dispatcher(flat_args):
    """Meta kernels written in Python understand symbolic sizes; those in C++ are faster."""
    symbolic = any(isinstance(x, torch.SymInt) for x in flat_args) or any(
        isinstance(x, FakeTensor) and x._has_symbolic_sizes_strides for x in flat_args)
    return torch._C._EnablePythonDispatcher() if symbolic else contextlib.nullcontext()
