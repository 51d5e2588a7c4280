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
from torch import get_default_dtype
from torch.utils import _pytree as pytree

from ..errors import Unsupported, words_of
from .corrections import true_form
from .fake import FakeTensor, storage_key
from .refusals import REFUSALS, check_devices, check_with_kernel
from .rules.operators import DATA_DEPENDENT, FIRST_DECIDES, FLOATS_ARE_DATA, FUSED, NUMBERS_AT, RESHAPING, WITHOUT_META
from .shapes import IN_NUMBERS, answer_in_numbers

aten = torch.ops.aten
NAMESPACES = "aten", "prims", "minicompile"         # the others are a user's


class DataDependent(Unsupported):
    """The result's shape or Python value depends on numbers that a fake tensor does not have."""


def _check_data_dependent(func, args):
    if func in DATA_DEPENDENT:
        raise DataDependent(f"{func} gives a result that depends on tensor values")
    if func is aten.index.Tensor and any(map(_is_mask, args[1])):
        raise DataDependent("indexing with a mask gives a result whose size depends on tensor values")
    if func.overloadpacket in (aten.index_put, aten.index_put_, aten._index_put_impl_) and any(map(_is_mask, args[1])):
        _check_one_for_all(*args[:3])


def _is_mask(index) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _check_one_for_all(x, indices, values):
    """A mask is given one value for all of its places, or as many as there are."""
    behind = x.dim() - sum(1 if i is None or not _is_mask(i) else i.dim() for i in indices)
    first = next(k for k, i in enumerate(indices) if i is not None)
    places = behind + sum(i is None for i in indices[first:])              # dims of the result behind that of the places
    if values.dim() > places and values.shape[values.dim() - places - 1] != 1:
        raise DataDependent("the number of values for the places of a mask depends on tensor values")


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

    def is_number(t) -> bool:               # at each place that it has
        return not t.dim() and t.device.type == "cpu" and sum(t is x for x in numbers) == sum(t is x for x in tensors)
    check_devices(device, [t for t in tensors if not is_number(t)])
    return device


def _result_device(func, args, kwargs, tensors: list[torch.Tensor]) -> torch.device:
    if kwargs.get("device") is not None:
        device = torch.device(kwargs["device"])
        if device.type in ("cpu", "meta"):
            return torch.device(device.type)                          # "cpu:0" is no other
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
        return device
    if func in FIRST_DECIDES:
        return args[0].device
    return _common_device(func, args, kwargs, tensors) if tensors else torch.device("cpu")


# %% [markdown]
# ## Symbolic floats
#
# `FLOATS_ARE_DATA` names the operators that treat a number as data. For these the number may stay a symbol. Any other
# operator might look at it, and decide by its value what to do or what shape to give, so `settle_floats` asks
# for the value and thereby records a guard. (Functions that would fix it before they come here are made of others by `rules/floats.py`.)

# %%
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
# `torch.arange(n, -n, -1.0)` has as many elements as one with the step -1. Of integers this number is an expression; asked with floats,
# the meta kernel divides floats, and wants to know the quotient.

# %%
def in_integers(func, args, kwargs):
    """The arguments, with whole floats as integers where they are bounds of a range that a symbol bounds, too."""
    bounds = func is aten.arange.default or func is aten.arange.start or func is aten.arange.start_step
    if not (bounds and any(type(x) is torch.SymInt for x in args) and all(type(x) is not float or x.is_integer() for x in args)):
        return args, kwargs
    whole = [int(x) if type(x) is float else x for x in args]
    dtype = get_default_dtype() if any(type(x) is float for x in args) else None
    return whole, kwargs if kwargs.get("dtype") or dtype is None else {**kwargs, "dtype": dtype}

# %% [markdown]
# ## One question
#
# Everything comes together here: refuse what depends on data, unwrap the fakes, run the meta kernel, correct
# the strides of its result, and wrap it, or hand back the fake that an in-place operator was given.
#
# For `x` of float32 and 4 by 8 numbers on a GPU, a number `s` of float64 and `c` as `x` on the CPU, operators answer:
#
#     add.Tensor(x, s)     f32[4, 8] on cuda, strides (8, 1), memory of its own
#     t.default(x)         f32[8, 4] on cuda, strides (1, 8), memory of x
#     relu_.default(x)     x
#     nonzero.default(x)   DataDependent: aten.nonzero.default gives a result that depends on tensor values
#     add.Tensor(x, c)     RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda and cpu!
#
# The last is eager's own error: the program is wrong, and shall hear it. The one before says that the graph has to end here.
#
# Read `run_on_fakes` in four parts. First come the refusals. Then the device is decided by the tensors among the
# arguments, and every fake is replaced by its meta tensor. `run_meta` asks the meta kernel. At the end come the operators that write.
# Their schema says which arguments they write to, and the fakes of those are returned as they are (`_written`); all other results get
# new fakes (`wrap`), in memory of their own unless the schema says otherwise.

# %%
def run_on_fakes(func, args, kwargs):
    """Run one ATen operator on fakes: meta kernel inside, pretended device outside. Real tensors among the
    arguments (constants the program closed over) take part through their metadata."""
    if func in IN_NUMBERS:
        return answer_in_numbers(IN_NUMBERS[func](args[0]))
    _check_data_dependent(func, args)
    args, kwargs = in_integers(func, *settle_floats(func, args, kwargs))
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
    apart = () if returns_operands(func, device.type) else {storage_key(x) for x in tensors if isinstance(x, FakeTensor)}

    def wrap(x):
        if not isinstance(x, torch.Tensor):
            return x
        if x.layout is not torch.strided:
            raise Unsupported(f"{func} gives a tensor of layout {x.layout}")
        if id(x) in written:
            return written[id(x)]
        own = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if apart and storage_key(x) in apart else x
        return FakeTensor(with_small_sizes(own), device)

    return pytree.tree_map(wrap, out)


# %% [markdown]
# Two small questions about a result. May it lie in the memory of an operand? The schema marks views, and there are a few without a mark.
# And which of its sizes are symbols? Sizes of 0 and 1 never are, since broadcasting treats them differently.

# %%
@functools.cache
def returns_operands(func, device: str) -> bool:
    """Whether a result may lie in the memory of an operand. A meta kernel, or a fake of a user's, that returns its operand where nothing
    was to be done says so of kernels that copy it. The views that autograd is not told of have no mark, and on a GPU a shuffle of one
    group returns what it got."""
    unmarked = func is aten.lift.default or "unsafe_" in func.name() or func is aten.channel_shuffle.default and device != "cpu"
    return unmarked or any(r.alias_info is not None for r in func._schema.returns)


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


# %% [markdown]
# `run_meta` asks the meta kernel, or one of the two tables that know better, and corrects its answer where it is known to be wrong
# (`corrections.py`). Each `except` names a way in which a meta kernel can fail to answer: there is none, and if the operator is the
# program's own, its author can give one; or it trips over a case that it was not written for. Other errors are eager's.

# %%
def run_meta(func, args, kwargs, flat, device):
    try:
        with _python_dispatcher(flat):
            if func in FUSED:               # new values of the first lists, if it does not write to them
                out = tuple([[torch.empty_like(t) for t in xs] for xs in args[:len(func._schema.returns)]]) or None
            elif func in WITHOUT_META:
                out = WITHOUT_META[func](*args)
            else:
                out = func(*args, **kwargs)
            return true_form(func, out, args, kwargs, device)
    except NotImplementedError as error:
        if func.namespace not in NAMESPACES:
            name = func.name().split(".")[0]
            raise Unsupported(f"the custom operator {func} has no fake implementation, so the shape of its "
                              f"result is not known (torch.library.register_fake({name!r}) gives it "
                              "one)") from error
        words = words_of(error)
        raise Unsupported(f"{func} has no meta kernel" + f": {words}" * ("Meta tensors" not in words)) from error
    except (ZeroDivisionError, TypeError, AssertionError) as error:     # of a mean's gradient; of an interpolation of an empty batch
        raise Unsupported(f"the meta kernel of {func} fails, perhaps for an empty tensor: {error}") from error


# %% [markdown]
# What an operator has written is known from its schema. Three things may have happened to the meta tensors by then, and the fakes around
# them have to follow. A result of `out=` or an operand of an in-place operator may have been too small: eager raises, and so does
# this, with the shape put back. `t_()` and its like have changed the shape and nothing else, so the fake takes it over. And a view of the
# tensor may have been given another shape in place before, about which autograd's answers are not those of eager; then the graph ends.

# %%
def _written(func, args) -> dict:
    """id of a meta tensor -> the fake that the operator was given, for what it has written. Of operands that are too large for it the
    kernel says so, and the meta kernel resizes it."""
    written = {}
    for schema, value in zip(func._schema.arguments, args):
        if schema.alias_info is not None and schema.alias_info.is_write:
            written |= {id(t.meta): t for t in pytree.tree_leaves(value) if isinstance(t, FakeTensor)}
    if func._schema.name.startswith("aten::_foreach_") or func in FUSED or func.namespace not in NAMESPACES:
        torch.autograd.graph.increment_version(written.values())        # these count versions themselves
    for t in written.values():
        if owner_of(t).reshaped and (t.is_floating_point() or t.is_complex()):
            raise Unsupported("memory is written of which a view has changed its shape in place")
        if t.shape != t.meta.shape and func.namespace == "aten" and func not in RESHAPING:
            found = list(t.meta.shape)
            t.meta.as_strided_(t.shape, t.stride(), t.storage_offset())     # the program may go on
            raise RuntimeError(f"output with shape {list(t.shape)} doesn't match the broadcast shape {found}")
        if t.shape != t.meta.shape or t.stride() != t.meta.stride():
            _take_over_metadata(t)
    return written


def owner_of(t: FakeTensor) -> FakeTensor:
    """The tensor that `t` is a view of, to autograd, or `t` itself."""
    return t if t._base is None else t._base


def _take_over_metadata(fake: FakeTensor) -> None:
    """After `t_()` or `as_strided_()` on the meta tensor: give the wrapper the same sizes and strides."""
    meta = fake.meta
    owner_of(fake).reshaped |= fake._base is not None
    with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowAutograd():
        aten.as_strided_.default(fake, meta.shape, meta.stride(), meta.storage_offset())


def _python_dispatcher(flat_args):
    """Meta kernels written in Python understand symbolic sizes; those in C++ are faster."""
    symbolic = any(isinstance(x, torch.SymInt) for x in flat_args) or any(
        isinstance(x, FakeTensor) and x._has_symbolic_sizes_strides for x in flat_args)
    return torch._C._EnablePythonDispatcher() if symbolic else contextlib.nullcontext()
