# %% [markdown]
# # Fake tensors
#
# A compiler runs the program once without its data: it needs the shape, dtype, device, strides and aliasing
# of every intermediate tensor, and none of the numbers. PyTorch already knows how to compute those. Every
# operator has a *meta kernel*, which is what runs on `device="meta"`: tensors that have everything except
# memory. What a meta tensor cannot say is on which device the real tensor would live, so a meta tensor alone
# would pick the wrong kernels and autocast rules.
#
# A `FakeTensor` is that pair: a meta tensor, and the device it pretends to be on. It is a *wrapper subclass*:
# to PyTorch's dispatcher it is a tensor on that device, autograd differentiates through it as usual, and when
# a kernel would run, `__torch_dispatch__` of the `FakeMode` runs the meta kernel on the inner tensor and
# wraps the result. Two fakes alias when their meta tensors share a storage, so views and in-place operations
# keep their meaning.

# %%
from __future__ import annotations

import contextlib
import functools
import re
import weakref
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import Unsupported
from .corrections import LIKE_THE_FIRST, outside, true_form
from .layouts import present, symbolic_strides
from .shapes import NUMBERS, answer_in_numbers, answering, needs_numbers

aten = torch.ops.aten


class DataDependent(Unsupported):
    """The result's shape or Python value depends on numbers that a fake tensor does not have."""


class FakeTensor(torch.Tensor):
    """A tensor without data: `meta` has its shape, strides, dtype and storage; `device` is the pretence.
    entered: it stands for a real tensor that is neither a leaf nor a view. formers: how many fakes show what it was before it changed
    its shape."""

    meta: torch.Tensor
    entered = False
    formers = 0

    @staticmethod
    def __new__(cls, meta: torch.Tensor, device: torch.device, requires_grad: bool = False):
        fake = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), storage_offset=meta.storage_offset(), dtype=meta.dtype,
            layout=meta.layout, device=device, requires_grad=requires_grad)
        fake.meta = meta
        return fake

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self):
        sizes = ", ".join(map(str, self.shape))
        return f"Fake({str(self.dtype).removeprefix('torch.')}[{sizes}] on {self.device})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return fake_call(func, args, kwargs or {})


def storage_key(t: torch.Tensor) -> int:
    """Equal for two fakes, or two real tensors, exactly when they share memory."""
    return (t.meta if isinstance(t, FakeTensor) else t).untyped_storage()._cdata


def has_memory(t: torch.Tensor) -> bool:
    """False of what a transform (`vmap`, `grad`) has wrapped: a batch of tensors that says it is one, and the like."""
    try:
        t.untyped_storage()
    except NotImplementedError:
        return False
    return True

# %% [markdown]
# ## Running an operator on fakes
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
# ### On which device?
#
# A meta tensor does not know it, so it is decided here. A call may name a device. A few operators follow
# their first operand whatever the others are, for instance a copy into a tensor. In all other cases the
# tensors have to agree, and an operator that gets tensors of two devices raises the error that eager raises.

# %%
def _common_device(tensors: list[torch.Tensor]) -> torch.device:
    """Where an operator on these tensors runs. CPU scalars go along with tensors of any device."""
    device = next((t for t in tensors if t.dim() or t.device.type != "cpu"), tensors[0]).device
    for t in tensors:
        if t.device != device and t.dim() != 0:
            raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two "
                               f"devices, {device} and {t.device}!")
    return device


FIRST_DECIDES = {aten.copy_.default, aten.copy.default, aten.index.Tensor, aten.index_put.default,
                 aten.index_put_.default, aten._index_put_impl_.default}


def _result_device(func, args, kwargs, tensors: list[torch.Tensor]) -> torch.device:
    if kwargs.get("device") is not None:
        device = torch.device(kwargs["device"])
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
        return device
    if func in FIRST_DECIDES:
        return args[0].device
    return _common_device(tensors) if tensors else torch.device("cpu")


# %% [markdown]
# ### Symbolic floats
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
# ### What only the kernel refuses
#
# A program that eager would end with an exception must end so when compiled, and at the same line. Meta
# kernels check shapes. They do not check everything else: `torch.mm` of two dtypes, a float as an index, a
# softmax of integers, a copy onto overlapping memory all pass. Some of these rules are written down here.
#
# The rest only the kernel knows, so it is asked: once for each operator, dtypes and flags, and whenever something is
# written that shares memory with another argument, it runs on zeros that lie as the tensors would. That costs
# microseconds; beyond `TRIED_BYTES`, where it would not, the call itself will find out.

# %%
# Their kernels refuse operands of different dtypes, their meta kernels do not.
ONE_DTYPE = {getattr(aten, name).default for name in
             ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot")}


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


def is_viewed(t: torch.Tensor) -> bool:
    """Whether other tensors that are alive are views of `t`. After a write PyTorch derives the history of a view from that of its base
    anew: on real tensors by `as_strided`, on fakes by taking the view again, which is another part of memory if `t` has another shape."""
    if not isinstance(t, FakeTensor) or t._base is not None:
        return False
    memory = t.meta.untyped_storage()
    return torch._C._storage_Use_Count(memory._cdata) > 2 + t.formers       # this Python object, and the meta tensor of `t`


def _check_storage(t: FakeTensor, sizes, strides, offset=None) -> None:
    """`as_strided` beyond the memory that there is, which a meta tensor does not have."""
    form = [tuple(map(present, sizes)), tuple(map(present, strides)), present(t.storage_offset() if offset is None else offset)]
    there = t.meta.untyped_storage().nbytes()
    if type(there) is int and 0 not in form[0] and (needed := _length(form) * t.dtype.itemsize) > there:
        raise RuntimeError(f"setStorage: sizes {list(form[0])}, strides {list(form[1])}, storage offset {form[2]} "
                           f"require {needed} bytes, out of bounds for storage of size {there}")


def _check_indices(tensor, indices) -> None:
    """What the kernel of an `index_put` refuses and its meta kernel does not look at: floats, and masks of
    another shape."""
    d = 0
    for index in indices:
        if isinstance(index, torch.Tensor) and (index.is_floating_point() or index.is_complex()):
            raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
        width = index.dim() if index is not None and index.dtype in (torch.bool, torch.uint8) else 1
        if index is not None and index.dtype is torch.bool and index.shape != tensor.shape[d:d + width]:
            raise IndexError(f"the shape of the mask {list(index.shape)} does not match that of the indexed "
                             f"tensor {list(tensor.shape)} at dimension {d}")
        d += width


# %% [markdown]
# `_check_with_kernel` finds out whether the kernel has to be asked. It does not ask for operators whose
# result is random, for those that would trust numbers that are zeros here, and for derivatives, which no user
# calls. Then it looks whether a call of this kind has been accepted before. Two tensors that share memory are
# a case of their own: whether a kernel minds depends on how they overlap, so it is asked each time.
# `_kernel_refuses` builds the tensors: a block of zeros for each storage, and on each a tensor with the
# sizes, strides and offset of the fake.

# %%
# Words of refusals that are not about the numbers in the tensors, which are zeros here
REFUSALS = re.compile("not implemented for|unsupported operation|for input.numel|support|dtype|scalar type|boolean|[Bb]ool"
                      "|same (data ?)?type|can't be cast|inputs to be|should be the same|long tensor|without overflow|destination dtypes")
TRIED_BYTES = 1 << 20
_ACCEPTED: set = set()                  # calls, up to shapes and numbers, that a kernel has not refused


def _check_with_kernel(func, kwargs, flat, spec) -> None:
    fakes = [x for x in flat if isinstance(x, FakeTensor)]
    if not fakes or func.namespace != "aten" or any(t.device.type != "cpu" for t in fakes) \
            or torch.Tag.nondeterministic_seeded in func.tags or _trusts_positions(func) or _is_derivative(func):
        return
    forms = [_form(t) for t in fakes]
    shared = func._schema.is_mutable and (
        len({storage_key(t) for t in fakes}) < len(set(map(id, fakes))) or any(
            stride == 0 and size > 1 for sizes, strides, _ in forms for size, stride in zip(sizes, strides)))
    empty = [0 in sizes for sizes, _, _ in forms]
    key = func, tuple(kwargs), tuple([_kind_of(x) for x in flat]), tuple(empty)
    if not shared and key in _ACCEPTED:
        return
    if sum(_length(form) * t.dtype.itemsize for t, form in zip(fakes, forms)) > TRIED_BYTES:
        return
    error = _kernel_refuses(func, flat, spec)
    if error is not None:               # asked again the next time: it may be about the numbers or the shapes of this call
        raise type(error)(*error.args)
    if not shared:
        _ACCEPTED.add(key)


def _trusts_positions(func) -> bool:
    """LAPACK's solvers count pivots from 1 and do not check them: with zeros they write outside of their memory."""
    return any("pivots" in a.name for a in func._schema.arguments)


def _is_derivative(func) -> bool:
    """The autograd engine calls it, with what forward returned: no program is to be refused. And the dtypes may not be
    eager's: the statistics of a layer norm are float32 on fakes, and of its operand's dtype in a CPU kernel."""
    return func._schema.name.endswith("_backward")


def _kind_of(x):
    """What a refusal can depend on: of a tensor its dtype, of a number its type, of anything else (flags, names) all of it."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.dim() == 0
    return type(x) if isinstance(x, (int, float, complex, torch.SymInt, torch.SymFloat)) and type(x) is not bool else x


def _form(t: FakeTensor) -> tuple:
    """(sizes, strides, offset) of the present call."""
    meta = t.meta
    return tuple(map(present, meta.shape)), tuple(map(present, meta.stride())), present(meta.storage_offset())


def _length(form) -> int:
    """How many elements the memory must have, at least."""
    sizes, strides, offset = form
    return 1 + offset + sum((n - 1) * s for n, s in zip(sizes, strides) if n)


def _kernel_refuses(func, flat, spec):
    """The exception with which a kernel refuses tensors like these, or None."""
    blank: dict = {}                    # storage -> zeros

    def real(x):
        if not isinstance(x, FakeTensor):
            return present(x)
        sizes, strides, offset = form = _form(x)
        memory = blank.setdefault(storage_key(x), torch.UntypedStorage(0))
        if memory.nbytes() < _length(form) * x.dtype.itemsize:
            memory.resize_(_length(form) * x.dtype.itemsize)
        return torch.empty(0, dtype=x.dtype).set_(memory, offset, sizes, strides)

    with outside():
        args, kwargs = pytree.tree_unflatten([real(x) for x in flat], spec)
        for memory in blank.values():
            memory.fill_(0)
        try:
            func(*args, **kwargs)
        except Exception as error:      # or it is about the zeros
            return error if REFUSALS.search(str(error)) else None
    return None


# %% [markdown]
# ### Asked before
#
# A program asks the same question again and again: each of a hundred equal layers, and each of the stages that run
# the program, wants to know what an addition of two such tensors gives. A meta kernel, many of which are Python,
# takes fifty microseconds to answer. So answers are kept, under all that they depend on: the operator, how each tensor
# lies, and every number that is not data. They are forgotten when the compilation is over.
#
# Kept is a *recipe*, and each call makes tensors of its own from it: in new memory, or as views of the first argument.
# An elementwise operator that writes to its first argument gives this argument back, if its memory is no other's; the
# update of an optimizer consists of such. Other operators that write are asked each time, and so are operators of users,
# which may change. Where sizes are symbolic, so is every operator, since an answer may need a guard.

# %%
NAMESPACES = "aten", "prims", "minicompile"         # the others are a user's
PLAIN = frozenset((int, float, bool, complex, str, type(None), torch.dtype, torch.layout, torch.memory_format))
RECIPES: dict[tuple, Any] = {}


class NotKept(Exception):
    """A question or an answer that is of one call only."""


@functools.cache
def _may_be_kept(func) -> bool:
    kept = func.namespace in NAMESPACES and func.overloadpacket not in STRIDED and func not in NUMBERS
    return kept and (not func._schema.is_mutable or _writes_first(func))


@functools.cache
def _writes_first(func) -> bool:
    """Whether it is elementwise, in place."""
    written = [a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments]
    return torch.Tag.pointwise in func.tags and written[:1] == [True] and True not in written[1:] and len(func._schema.returns) == 1


def _check_alone(first, others) -> None:
    """What is written has an element for each position, in memory of its own."""
    if type(first) is not FakeTensor or 0 in first.meta.stride() or storage_key(first) in {
            storage_key(x) for x in others if isinstance(x, FakeTensor)}:
        raise NotKept


def _asked(x, floats: bool):
    """What an answer may depend on, of one argument. floats: whether the values of floats are none of it."""
    kind = type(x)
    if floats and (kind is float or kind is torch.SymFloat):
        return float
    if kind is FakeTensor and not (x._has_symbolic_sizes_strides or x.dtype.is_complex or x.meta.is_neg()):
        meta = x.meta
        return meta.shape, meta.stride(), meta.storage_offset(), meta.dtype, x.device
    if kind in PLAIN or kind is torch.device and (x.type != "cuda" or x.index is not None):
        return kind, x
    if isinstance(x, (list, tuple)):
        return tuple([_asked(item, floats) for item in x])
    raise NotKept


class Same:
    """In a recipe: the first argument."""


class SameMemory:
    """In a recipe: memory of the first argument."""


def _recipe(x, first, memory: set):
    """How to make a result like `x`. memory: the storages of the arguments, and of results that were met before."""
    kind = type(x)
    if x is first:
        return Same, None
    if kind in PLAIN:
        return kind, x
    if kind is list or kind is tuple:
        return kind, [_recipe(item, first, memory) for item in x]
    if kind is not FakeTensor or x.dtype.is_complex or x.meta.is_neg():
        raise NotKept
    sizes, strides, offset = form = _form(x)
    if type(first) is FakeTensor and storage_key(x) == storage_key(first) and x.dtype == first.dtype and x.device == first.device:
        return SameMemory, form
    if storage_key(x) in memory or offset or \
            x.meta.untyped_storage().nbytes() != (0 if 0 in sizes else _length(form) * x.dtype.itemsize):
        raise NotKept
    memory.add(storage_key(x))
    return kind, (sizes, strides, x.dtype, x.device)


def _made(kind, how, first):
    """A result by its recipe."""
    if kind is Same:
        return first
    if kind is FakeTensor:
        sizes, strides, dtype, device = how
        return FakeTensor(torch.empty_strided(sizes, strides, dtype=dtype, device="meta"), device)
    if kind is SameMemory:
        return FakeTensor(first.meta.as_strided(*how), first.device)
    return kind([_made(*part, first) for part in how]) if kind is list or kind is tuple else how


def fake_call(func, args, kwargs):
    """Run one ATen operator on fakes, or make again what it gave for such arguments."""
    if not _may_be_kept(func):
        return ask(func, args, kwargs)
    floats = func in FLOATS_ARE_DATA
    try:
        if func._schema.is_mutable:
            _check_alone(args[0], leaves(args[1:], kwargs))
        key = func, torch.get_default_dtype(), _asked(args, floats), tuple(kwargs), _asked(tuple(kwargs.values()), floats)
    except NotKept:
        return ask(func, args, kwargs)
    first = args[0] if args else None
    if (recipe := RECIPES.get(key)) is not None:
        return _made(*recipe, first)
    out = ask(func, args, kwargs)
    with contextlib.suppress(NotKept):
        recipe = _recipe(out, first, {storage_key(x) for x in leaves(args, kwargs) if isinstance(x, FakeTensor)})
        RECIPES[key] = recipe
    return out


# %% [markdown]
# ### One question
#
# Everything comes together here: refuse what depends on data, unwrap the fakes, run the meta kernel, correct
# the strides of its result, and wrap it, or hand back the fake that an in-place operator was given.
#
# Read `ask` in four parts. First come the refusals. Then the device is decided by the tensors among the
# arguments, and every fake is replaced by its meta tensor. `run_meta` runs the meta kernel and corrects its answer
# where it is known to be wrong (`corrections.py`); each `except` names a way in which a meta kernel can fail to
# answer. At the end come the operators that write. Their schema says which arguments they write to, and the fakes
# of those are returned as they are; all other results get new fakes.

# %%
# Fused optimizers: not all of them have meta kernels, and none with the learning rate in a tensor
FUSED = {getattr(packet, kind) for name in ("adam", "adamw", "sgd") for form in ("", "_")
         for packet in [getattr(aten, f"_fused_{name}{form}")] for kind in ("default", "tensor_lr")}
# Their meta kernels answer with plain tensors
QUANTIZING = {aten.quantize_per_tensor, aten.quantize_per_tensor_dynamic, aten.quantize_per_channel}


def _ctc_loss(log_probs, targets, input_lengths, target_lengths, *_):
    steps, batch = log_probs.shape[:2]
    if targets.dim() == 2 and targets.shape[1] < max(target_lengths, default=0) or len(target_lengths) != batch or \
            len(input_lengths) != batch or any(n > steps for n in input_lengths) or log_probs.dim() != 3:
        raise RuntimeError("lengths that do not fit the tensors")
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * max(target_lengths, default=0) + 1)


WITHOUT_META = {aten._ctc_loss.default: _ctc_loss,
                aten._ctc_loss_backward.default: lambda grad, log_probs, *_: torch.empty_like(
                    log_probs, memory_format=torch.contiguous_format)}


def ask(func, args, kwargs):
    """Run one ATen operator on fakes: meta kernel inside, pretended device outside. Real tensors among the
    arguments (constants the program closed over) take part through their metadata."""
    if func in NUMBERS:
        return answer_in_numbers(NUMBERS[func](args[0]))
    _check_data_dependent(func, args)
    args, kwargs = settle_floats(func, args, kwargs)
    flat, spec = pytree.tree_flatten((args, kwargs))
    tensors = [x for x in flat if isinstance(x, torch.Tensor)]
    _check_call(func, args, kwargs, tensors)
    _check_with_kernel(func, kwargs, flat, spec)
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


def _check_call(func, args, kwargs, tensors):
    """What can be refused without asking a kernel."""
    if func.overloadpacket in QUANTIZING:
        raise Unsupported(f"{func} gives a quantized tensor")
    if func in ONE_DTYPE and len({t.dtype for t in tensors}) > 1:
        raise RuntimeError(f"expected operands of one dtype, got {', '.join(str(t.dtype) for t in tensors)}")
    if func in FIRST_DECIDES and type(args[1]) in (list, tuple):
        _check_indices(args[0], args[1])
    if func.overloadpacket in STRIDED:
        _check_storage(*args, **kwargs)
    if func in IN_PLACE_VIEWS and is_viewed(args[0]):
        raise Unsupported("a tensor of which there are views changes its shape in place")


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

# %% [markdown]
# ## The mode
#
# `FakeMode` catches operators that have no fake argument (`torch.arange(10)`), and turns real tensors into
# fakes. A real tensor becomes the same fake each time, and real tensors that share memory become fakes that
# share memory: otherwise an in-place update through one of them would be lost on the others.

# %%
class DispatchMode(TorchDispatchMode):
    """A dispatch mode whose handler PyTorch does not wrap in `torch._dynamo.disable`, importing all of it."""

    @classmethod
    def _should_skip_dynamo(cls):
        return False


@contextlib.contextmanager
def plain_tensors():
    """Inference mode is off inside: tensors made under it have no version counter, which is how capture
    notices that an operation writes to a tensor. Gradients stay off."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


# %% [markdown]
# A leaf is a tensor that no differentiable operation has made, such as a parameter. Autograd refuses to write
# to a leaf that requires gradients. An activation that enters a graph is no leaf, and programs do write to
# it. So its fake is passed through an operation that does nothing, `Enter`, and is no leaf afterwards.

# %%
class Enter(torch.autograd.Function):
    """The identity, of a fake. What comes out is no leaf, so it may be written in place."""
    @staticmethod
    def forward(ctx, fake):
        ctx.set_materialize_grads(False)
        return FakeTensor(fake.meta, fake.device)

    @staticmethod
    def backward(ctx, grad):
        return grad


@functools.cache
def load_meta_kernels():
    """The first call of a meta kernel that is written in Python imports much of PyTorch, which then registers
    its classes with pytree. That comes before a trace: what the trace reads must be true at its end."""
    torch.add(torch.empty((), device="meta"), 1)


# %% [markdown]
# The two tables of the mode answer the same question for tensors and for storages: has this one been seen
# before? A tensor is looked up by its identity, and a weak reference tells whether it is still the same
# object. A storage is kept alive, because its address is the key. `_meta_like` has two branches. With
# symbolic sizes, a fresh meta tensor is made, whose strides are expressions. Otherwise the meta tensor is
# laid over the blank storage that stands for the real one.

# %%
class FakeMode(DispatchMode):
    """Under this mode every operator runs on fakes. `from_real` converts."""

    def __init__(self):
        super().__init__()
        load_meta_kernels()
        self.draws = False                  # whether an operator has drawn random numbers
        self._fakes: dict[int, tuple[weakref.ref, FakeTensor]] = {}
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.draws = self.draws or torch.Tag.nondeterministic_seeded in func.tags
        return fake_call(func, args, kwargs or {})

    def from_real(self, tensor: torch.Tensor, sizes: tuple | None = None) -> FakeTensor:
        """The fake of a real tensor: same shape (or `sizes`, which may hold SymInts), strides, dtype, device,
        requires_grad and, but for views, is_leaf."""
        known = self._fakes.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            raise Unsupported(f"a tensor of layout {tensor.layout} has no fake")
        if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
            raise Unsupported("the memory of a lazily conjugated, negated or zero tensor is not its value")
        if tensor.requires_grad and not (tensor.is_floating_point() or tensor.is_complex()):
            raise Unsupported("integers that require gradients (a copy from floats makes them) have no fake")
        with outside():
            fake = FakeTensor(self._meta_like(tensor, sizes), tensor.device, tensor.requires_grad)
            # Whether a view is a leaf is not asked: the answer would change what PyTorch notes about it
            if not tensor._is_view() and not tensor.is_leaf:
                with torch.enable_grad():
                    fake = Enter.apply(fake)
                    fake.entered = True
        self._fakes[id(tensor)] = (weakref.ref(tensor), fake)
        return fake

    def _meta_like(self, tensor, sizes):
        if sizes is not None and any(isinstance(s, torch.SymInt) for s in sizes):
            if tensor.is_contiguous():
                return torch.empty(sizes, dtype=tensor.dtype, device="meta")
            strides = symbolic_strides(tensor, sizes)
            return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device="meta")
        real = tensor.untyped_storage()
        if real._cdata not in self._storages:
            blank = torch.empty(real.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
            self._storages[real._cdata] = (real, blank)
        blank = self._storages[real._cdata][1]
        meta = torch.empty(0, dtype=tensor.dtype, device="meta")
        return meta.set_(blank, tensor.storage_offset(), tensor.shape, tensor.stride())


# %% [markdown]
# ## Operators that ask for numbers
#
# Some operators are composed of others in C++, with sizes as plain numbers (`interpolate`, `lstm_cell`), and
# ask a fake whose sizes are symbolic for them. Of many, PyTorch has a version in Python, which takes symbols:
# such a call is made again, with these. If that asks as well, it gets the sizes at hand, and a guard fixes
# them.
#
# One thing would be lost on the way. Autocast attaches its casts to operators, and the version in Python may be composed of
# others than that in C++: on a GPU the parts of `interpolate` are cast to float32, and the arithmetic that computes it in
# Python is not. So the version in C++ is watched first, on fakes that have the sizes at hand. What it does nothing with but
# cast it is cast here.
#
# And one version in Python is wrong: that of recurrent networks forgets the dropout between layers. There the layers are
# called one by one.

# %%
def cast_as_autocast(function, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments, as autocast hands them to the operators that `function` is composed of in C++."""
    if not torch._C._is_any_autocast_enabled():
        return args, kwargs
    flat, spec = pytree.tree_flatten((args, kwargs))
    twins = list(map(_with_numbers, flat))
    uses: dict = {id(t): set() for t in twins if isinstance(t, FakeTensor)}

    class Watch(DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            cast = func is aten._to_copy.default and kwargs.keys() == {"dtype"}
            for x in pytree.tree_leaves((args, kwargs)):
                if id(x) in uses:
                    uses[id(x)].add(kwargs["dtype"] if cast else None)
            return fake_call(func, args, kwargs or {})

    with outside(), Watch():
        twin_args, twin_kwargs = pytree.tree_unflatten(twins, spec)
        try:
            function(*twin_args, **twin_kwargs)
        except Exception:               # the call itself will raise it
            return args, kwargs
    casts = [next(iter(found)) if len(found := uses.get(id(t), ())) == 1 else None for t in twins]
    return pytree.tree_unflatten([x if dtype is None else x.to(dtype) for x, dtype in zip(flat, casts)], spec)


def _with_numbers(x):
    """The same with the sizes of the present call; a fake shares no memory with the given one."""
    if not isinstance(x, FakeTensor):
        return present(x)
    sizes, strides, _ = _form(x)
    return FakeTensor(torch.empty_strided(sizes, strides, dtype=x.dtype, device="meta"), x.device)


def layer_by_layer(function, *args):
    """A recurrent network, `function(x[, batch_sizes], hidden, params, has_biases, layers, dropout, train, ...)`."""
    at = next(i for i, a in enumerate(args) if isinstance(a, bool)) - 1
    hidden, params, has_biases, layers, dropout, train, both, *batch_first = args[at - 1:]
    if layers == 1 or not dropout or not train:
        return function(*args)
    swap = bool(batch_first and batch_first[0])
    x, sizes = args[0].transpose(0, 1) if swap else args[0], args[1:at - 1]
    states, ends = list(hidden) if isinstance(hidden, (tuple, list)) else [hidden], []
    for i in range(layers):
        now = [s[i * (1 + both):(i + 1) * (1 + both)] for s in states]
        weights = params[i * len(params) // layers:(i + 1) * len(params) // layers]
        x, *end = function(x, *sizes, now if isinstance(hidden, (tuple, list)) else now[0], weights, has_biases, 1, 0.0, train,
                           both, *[False for _ in batch_first])
        ends.append(end)
        x = torch.dropout(x, dropout, train) if i < layers - 1 else x
    return x.transpose(0, 1) if swap else x, *map(torch.cat, zip(*ends))


RECURRENT = {torch.gru, torch.lstm, torch.rnn_tanh, torch.rnn_relu}


def with_symbols(function, *args, **kwargs):
    """function(*args, **kwargs), where sizes of fakes may be symbolic."""
    try:
        return function(*args, **kwargs)
    except RuntimeError as error:
        if not needs_numbers(error):
            raise
    args, kwargs = cast_as_autocast(function, args, kwargs)
    try:
        with torch._C._EnablePythonDispatcher():
            return layer_by_layer(function, *args) if function in RECURRENT else function(*args, **kwargs)
    except RuntimeError as error:
        if not needs_numbers(error):
            raise
    with answering():
        args, kwargs = pytree.tree_map_only(torch.SymInt, int, (args, kwargs))
        return function(*args, **kwargs)
