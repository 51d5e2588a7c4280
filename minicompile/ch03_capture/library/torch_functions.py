# %% [markdown]
# # Builtin functions, continued: questions that the program asks torch
#
# The trace is neither scripting nor tracing in the sense of `torch.jit`, and no transform of `torch.func` is at work, nor
# forward-mode differentiation: guards see to that. Grad mode and autocast are asked of the tracing thread, which is in the state that the
# program would be in. What the world guards pin down (the default dtype, deterministic algorithms) is simply asked.

# %%
import functools
import sys
import warnings

import numpy
import torch
import torch.nn.attention
from torch import get_default_dtype
from torch.utils import _pytree as pytree

from ... import marks
from ...ch01_graphs.layouts import contiguous_strides
from ..builders import as_python
from ..calls import HANDLED, REAL_CALLS, call, handles
from ..comparisons import truth
from ..constants import constant_of, on_real_tensors
from ..effects import call_later, kept_warnings
from ..exceptions import user_errors
from ..iterate import unpack
from ..methods import call_method
from ..operations import fold
from ..protocol import method
from ..tensors import as_dtype, call_tensor_method, emit, run_fake, to_arg, wrap_result
from ..tracer import answer, guard, is_library, line_of, unsupported
from ..values import (
    AbstractValue, Const, DictVal, FALSE, ListVal, NONE, NotConstant, SymVal, TRUE, TensorVal, TupleVal, boolean, const)
from ..wrap import wrap, wrap_constant
from .builtins_ import folded, refused
from .graph_functions import call_graph_function, name_device


def constant_answer(answer):
    return lambda tx, *args, **kwargs: const(answer)


for _function in (
        torch.jit.is_scripting, torch._jit_internal.is_scripting, torch.jit.is_tracing, torch._C._is_tracing,
        torch.overrides.has_torch_function, torch.overrides.has_torch_function_unary,
        torch.overrides.has_torch_function_variadic, torch.overrides.is_tensor_method_or_property,
        torch._C._is_torch_function_mode_enabled, torch._C._are_functorch_transforms_active, torch.compiler.is_exporting):
    HANDLED[_function] = constant_answer(False)
HANDLED[torch._C._get_tracing_state] = constant_answer(None)
HANDLED[torch._C._len_torch_dispatch_stack] = constant_answer(0)         # there is a guard
HANDLED[marks.is_compiling] = constant_answer(True)


@handles(torch.autograd.forward_ad.unpack_dual)
def unpack_dual(tx, tensor):
    """Nothing is captured under forward-mode differentiation, so no tensor has a tangent."""
    return call(tx, wrap(tx, torch.autograd.forward_ad.UnpackedDualTensor), [tensor, NONE])


@handles(torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling)
def torch_is_compiling(tx):
    """True for programs, which avoid what no compiler can trace; torch's own code means its own compiler."""
    if tx.options.unseen or is_library(tx.frames[-1].code.co_filename):
        return boolean(False)
    tx.told = True
    return boolean(True)


def setting(function):
    """The handler of a function that reads a setting of the library which no other guard covers: a guard asks
    again. (Inside of a context manager of the program, the answer is the program's own.)"""
    def handler(tx, *args, **kwargs):
        result = fold(tx, function, args, kwargs)
        if not kwargs and not tx.contexts and type(result) is Const:
            answer(tx, function, *(a.value for a in args))
        return result
    return handler


for _function in (
        torch.is_grad_enabled, torch.is_autocast_enabled, torch.get_default_dtype, torch.promote_types,
        torch.can_cast, torch.are_deterministic_algorithms_enabled, torch.cuda.is_available,
        torch.cuda.device_count, torch.broadcast_shapes, torch._C._get_privateuse1_backend_name,
        torch.distributed.is_available):
    HANDLED[_function] = folded(_function)
for _function in (
        torch.get_autocast_dtype, torch.is_autocast_cache_enabled, torch.get_float32_matmul_precision,
        torch.is_deterministic_algorithms_warn_only_enabled, torch.get_num_threads, torch.is_anomaly_enabled,
        torch.get_num_interop_threads, torch.is_anomaly_check_nan_enabled, torch.is_warn_always_enabled,
        torch.get_deterministic_debug_mode, torch.cuda.is_current_stream_capturing,
        *([torch.distributed.is_initialized] if torch.distributed.is_available() else [])):
    HANDLED[_function] = setting(_function)
HANDLED.update({                        # the old names
    torch.get_autocast_gpu_dtype: lambda tx: HANDLED[torch.get_autocast_dtype](tx, const("cuda")),
    torch.get_autocast_cpu_dtype: lambda tx: HANDLED[torch.get_autocast_dtype](tx, const("cpu"))})


# %% [markdown]
# ## Functions that need no node, or another one
#
# Some functions have an answer that capture knows, and some do nothing in a compiled program. A few others look at
# data, or make a choice that depends on whether tensors are fakes. They are written here in calls that do the same
# for both.

# %%
HANDLED.update({
    torch._C._log_api_usage_once: constant_answer(None),
    torch.is_inference_mode_enabled: lambda tx: boolean(tx.options.inference),
    torch.is_tensor: lambda tx, value: boolean(type(value) is TensorVal),
    torch.is_inference: lambda tx, input: call_method(tx, input, "is_inference", [], {}),
    torch.jit.annotate: lambda tx, the_type, the_value: the_value,
    torch.compiler.cudagraph_mark_step_begin: constant_answer(None),         # outputs are never overwritten (chapter 11)
    torch.nn.attention.sdpa_kernel: refused("sdpa_kernel(), which chooses kernels for all that runs inside"),
})

# PyTorch's own: a program may put others in their place, which call these.
ONE_HOT = torch.nn.functional.one_hot
ATTENTION = torch.nn.functional.scaled_dot_product_attention


@handles(ONE_HOT)
def one_hot(tx, *args, **kwargs):
    """Of fakes PyTorch computes it by a comparison, whose result lies as its operand does; otherwise it fills in a new tensor,
    after a look at the classes on a CPU."""
    compared = emit(tx, ONE_HOT, args, kwargs)
    x = args[0] if args else kwargs["input"]
    if type(x) is TensorVal and x.fake.device.type == "cpu":
        for compare, bound, error in (("ge", const(0), "Class values must be non-negative."),
                                      ("lt", wrap_constant(tx, compared.fake.shape[-1]), "Class values must be smaller than num_classes.")):
            holds = emit(tx, torch.all, [emit(tx, compare, [x, bound])])
            emit(tx, torch._assert_async, [holds, const(error)])
    return emit(tx, "contiguous", [compared])


def max_pool1d(function, tx, /, *args, **kwargs):
    """Where no gradient is wanted a CPU has a kernel for it, whose result lies row by row; of fakes it is a pooling over two dims."""
    pooled = emit(tx, function, args, kwargs)
    if type(pooled) is not TensorVal or pooled.fake.device.type != "cpu" or pooled.fake.requires_grad \
            or pooled.fake.stride() == contiguous_strides(pooled.fake.shape):
        return pooled
    return emit(tx, "clone", [pooled], {"memory_format": const(torch.contiguous_format)})


for _function in (torch.max_pool1d, torch.nn.functional.max_pool1d, torch.nn.functional._max_pool1d):
    HANDLED[_function] = functools.partial(max_pool1d, _function)


@handles(torch.as_tensor, torch.asarray)
def as_tensor(tx, data, dtype=NONE, device=NONE):
    """No copy when there is nothing to convert; constants become a new tensor."""
    named = {k: v for k, v in (("dtype", dtype), ("device", device)) if v is not NONE}
    if type(data) is not TensorVal:
        return make_tensor(torch.as_tensor, tx, data, **named)
    named = name_device(torch.as_tensor, named)
    return call_method(tx, data, "to", [], named) if named else data


# %% [markdown]
# `torch.tensor([[1, 2], [3, 4]])` has data, not tensors, for arguments. The call is made once, here and now on
# the CPU, to see which shape and dtype PyTorch gives to this data, and becomes a node, since each call of the
# program has to get a new tensor.

# %%
def make_tensor(function, tx, /, *args, **kwargs) -> AbstractValue:
    """torch.tensor(data): the data must be constants. Its fake is taken from a real tensor made here. NumPy's
    numbers, which become Python's in the graph, decide on the dtype."""
    kwargs = name_device(function, kwargs)
    if "data" in kwargs and not args:
        args = [kwargs["data"]]
        kwargs = {k: v for k, v in kwargs.items() if k != "data"}
    if function is torch.tensor and len(args) == 1 and type(args[0]) is TensorVal and not kwargs.keys() - {"dtype", "device"}:
        return tensor_of_tensor(tx, args[0], kwargs)
    if args and type(args[0]) is Const and type(args[0].value) is numpy.bool_:
        args = [boolean(args[0].value), *args[1:]]
    fx_args = tuple(to_arg(tx, a) for a in args)
    fx_kwargs = {k: to_arg(tx, as_dtype(v)) for k, v in kwargs.items()}
    if args and type(args[0]) is SymVal:
        scalar, number = args[0].scalar, args[0].number
        dtype = torch.int64 if number is int else get_default_dtype()
        if scalar is not None and function is not torch.scalar_tensor:
            dtype = torch.tensor(scalar(0)).dtype
        kwargs = {"dtype": const(dtype), **kwargs}
        return emit(tx, torch.full, [const(()), args[0]], kwargs)
    if function is not torch.scalar_tensor and type(args[0] if args else None) is not TensorVal and (dtype := dtype_of_numbers(tx, args)):
        fx_kwargs.setdefault("dtype", dtype)
    if (made := tensor_of_numbers(tx, args, fx_kwargs)) is not None:
        return made
    node = tx.graph.create_node("call_function", function, fx_args, fx_kwargs)
    if node.all_input_nodes:
        unsupported(tx, "torch.tensor() of tensors among other data")
    try:
        with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            real = function(*fx_args, **{**fx_kwargs, "device": "cpu"})
    except Exception as error:
        unsupported(tx, f"torch.tensor raised {type(error).__name__}: {error}")
    device = torch.device(fx_kwargs.get("device") or "cpu")
    result = run_fake(tx, torch.empty, (tuple(real.shape),), {
        "dtype": real.dtype, "device": device, "requires_grad": real.requires_grad})
    return wrap_result(tx, node, result)


# %% [markdown]
# Of a tensor it makes a copy without a history, which lies as the tensor does, and PyTorch says that there are better words for that.

# %%
def tensor_of_tensor(tx, tensor, named) -> AbstractValue:
    warn(tx, const("To copy construct from a tensor, it is recommended to use sourceTensor.detach().clone() or "
                   "sourceTensor.detach().clone().requires_grad_(True), rather than torch.tensor(sourceTensor)."))
    named = {k: v for k, v in named.items() if v is not NONE}
    return call_method(tx, call_method(tx, tensor, "detach", [], {}), "to", [], {"dtype": const(tensor.fake.dtype), **named, "copy": TRUE})


# %% [markdown]
# `torch.tensor([x.shape[0], 2])` has another number in each call, and a node would be for one of them. So numbers that vary, and
# tensors of one number, are joined: the real call tells the shape and the dtype, and is made of ones in their place.

# %%
def tensor_of_numbers(tx, args, fx_kwargs) -> AbstractValue | None:
    """torch.tensor([height, width]), where numbers among the data vary, or are tensors: they are joined, and get the shape of the data."""
    numbers = []
    if args and type(args[0]) is TensorVal:             # a copy of it, of which PyTorch warns: not while this compiles
        return None

    def noted(value):
        if type(value) in (Const, SymVal, TensorVal):
            numbers.append(value)
        return of_same_dtype(value)
    try:
        data = [as_python(tx, a, noted) for a in args]
        real = torch.tensor(*data, dtype=fx_kwargs.get("dtype"), device="cpu")
    except Exception:                   # `torch.tensor` itself will say
        return None
    tensors = [n.fake for n in numbers if type(n) is TensorVal]
    if {Const}.issuperset(map(type, numbers)) or real.numel() != len(numbers) or fx_kwargs.keys() - {"dtype", "device"} or tensors and (
            "device" in fx_kwargs or any(t.dim() or t.requires_grad or t.device.type != "cpu" for t in tensors)):
        return None
    named = {"dtype": const(real.dtype)} | {k: const(v) for k, v in fx_kwargs.items() if k == "device"}
    parts = [emit(tx, "to", [emit(tx, "reshape", [n, const(1)]), named["dtype"]]) if type(n) is TensorVal else
             emit(tx, torch.full, [TupleVal(items=[const(1)]), n], named) for n in numbers]
    return emit(tx, "view", [emit(tx, torch.cat, [ListVal(items=parts)]), *map(const, real.shape)])


def of_same_dtype(value: AbstractValue):
    """Something of the same dtype for a tensor or a number that varies; None for others."""
    if type(value) is TensorVal:
        return torch.zeros((), dtype=value.fake.dtype)
    return value.cls(1) if type(value) is SymVal else None


def dtype_of_numbers(tx, args):
    """The dtype of `torch.tensor(*args)` if there are numbers of NumPy, or in tensors, among the data, or None."""
    try:
        data = [as_python(tx, a, of_same_dtype) for a in args]
    except NotConstant:
        return None
    found = any(isinstance(leaf, (numpy.generic, torch.Tensor)) for leaf in pytree.tree_leaves(data))
    return torch.tensor(*data, device="cpu").dtype if found else None


for _function in (torch.tensor, torch.scalar_tensor):
    HANDLED[_function] = functools.partial(make_tensor, _function)


@method(TensorVal, "new_tensor")
def new_tensor(tx, self, /, *args, **kwargs) -> AbstractValue:
    named = {"dtype": self.fake.dtype, "device": self.fake.device} | {k: to_arg(tx, as_dtype(v)) for k, v in kwargs.items()}
    made = tensor_of_numbers(tx, args, named) if args and type(args[0]) in (ListVal, TupleVal) else None
    return made or call_tensor_method(tx, self, "new_tensor", args, kwargs)


# %% [markdown]
# `torch.Tensor([1, 2])` and `torch.LongTensor(2, 3)` are from before `torch.tensor`: types that are called, with numbers in a list or with
# sizes, and have the memory on the CPU whatever the default device is. So is `x.new(...)`. For them a `torch.Size` is sizes and a tuple
# numbers, and in a graph both are tuples.

# %%
def is_one_size(args) -> bool:
    return len(args) == 1 and getattr(args[0], "cls", None) is torch.Size


@method(TensorVal, "new")
def new(tx, self, /, *args, **kwargs) -> AbstractValue:
    return call_tensor_method(tx, self, "new_empty" if is_one_size(args) else "new", args, kwargs)


def call_type_of_tensors(dtype, tx, /, *args) -> AbstractValue:
    named = {"dtype": const(dtype or get_default_dtype()), "device": const(torch.device("cpu"))}
    if is_one_size(args):
        return emit(tx, torch.empty, args, named)
    if len(args) == 1 and type(args[0]) in (ListVal, TupleVal) and args[0].cls in (list, tuple):
        return make_tensor(torch.tensor, tx, *args, **named)
    if all(type(a) in (Const, SymVal) and a.cls is int for a in args):
        return emit(tx, torch.empty, [TupleVal(items=list(args) or [const(0)])], named)
    unsupported(tx, "a tensor of an old type, of neither a list nor sizes")


for _type, _dtype in {
        torch.Tensor: None, torch.FloatTensor: torch.float32, torch.DoubleTensor: torch.float64, torch.HalfTensor: torch.float16,
        torch.BFloat16Tensor: torch.bfloat16, torch.ByteTensor: torch.uint8, torch.CharTensor: torch.int8, torch.ShortTensor: torch.int16,
        torch.IntTensor: torch.int32, torch.LongTensor: torch.int64, torch.BoolTensor: torch.bool}.items():
    HANDLED[_type] = functools.partial(call_type_of_tensors, _dtype)


@handles(torch._C._group_tensors_by_device_and_dtype)
def group_tensors(tx, lists, with_indices=FALSE):
    """{(device, dtype): ([the tensors of each list that belong there], their positions)}; the first list decides."""
    lists = [unpack(tx, one) for one in unpack(tx, lists)]
    if not lists or not lists[0]:
        with user_errors():
            torch._C._group_tensors_by_device_and_dtype([[] for _ in lists])        # an error
    places: dict = {}
    for i, tensor in enumerate(lists[0]):
        if type(tensor) is not TensorVal:
            unsupported(tx, "grouping what is no tensor")
        places.setdefault((tensor.fake.device, tensor.fake.dtype), []).append(i)
    indexed = truth(tx, with_indices)

    def group(chosen):
        parts = [ListVal(items=[one[i] for i in chosen] if one else []) for one in lists]
        return TupleVal(items=[ListVal(items=parts), wrap_constant(tx, chosen if indexed else [])])
    return DictVal(items={kind: (wrap_constant(tx, kind), group(chosen)) for kind, chosen in places.items()})


# %% [markdown]
# **Masks made for compilers.** Eager attention is asked for with a mask only where something is to be hidden, which libraries
# find out by looking at the padding. A program that knows that it is compiled does not look: it makes a mask in any case, of
# positions and comparisons, and kernels for attention without a mask, several times as fast, are out of reach. So a mask
# that was made of constants alone, in a program that was told, is computed here. If it hides nothing, the call is made without
# it, if it hides what comes later, with `is_causal=True`: the call that eager makes. A program that was not told has made its
# mask for eager, too, whose kernels for masks draw other random numbers for dropout.

# %%
@handles(ATTENTION)
def attention(tx, *args, **kwargs):
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, args[:len(names)])) | kwargs
    mask = given.get("attn_mask", NONE)
    if tx.told and len(args) <= len(names) and type(mask) is TensorVal and given.get("is_causal", FALSE) is FALSE:
        args, kwargs = (), given | known_mask(mask)
    return call_graph_function(tx, ATTENTION, args, kwargs)


def known_mask(mask: TensorVal) -> dict:
    """The arguments that say the same as a mask, where it is known."""
    try:
        with on_real_tensors():
            value = constant_of(mask.node, {})
            if value.dtype == torch.bool and bool(value.all()):
                return {"attn_mask": NONE}
            causal = torch.ones(mask.fake.shape[-2:], dtype=torch.bool, device="cpu").tril()
            if value.dtype == torch.bool and torch.equal(value, causal.expand(value.shape)):
                return {"attn_mask": NONE, "is_causal": boolean(True)}
    except Exception:       # not made of constants, or of sizes that vary; or the program's own error, which the call itself will raise
        pass
    return {}


# %% [markdown]
# `ctc_loss` makes a tensor of the lengths and reads it at once, which no fake can. What it does around its kernel is
# written out. If the lengths are tensors, what the kernel keeps for the derivative has a size that depends on them.

# %%
def ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity):
    batched = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)
    loss = torch.ops.aten._ctc_loss.default(
        batched, targets.to(log_probs.device, torch.int64), input_lengths, target_lengths, blank, zero_infinity)[0]
    if zero_infinity:
        loss = torch.where(loss == float("inf"), torch.zeros_like(loss), loss)
    if reduction == "mean":
        return (loss / torch.tensor(target_lengths, dtype=loss.dtype, device=loss.device).clamp_min(1)).mean()
    return loss.sum() if reduction == "sum" else loss if log_probs.dim() == 3 else loss.squeeze(0)


@handles(torch.nn.functional.ctc_loss)
def call_ctc_loss(tx, log_probs, targets, input_lengths, target_lengths, blank=const(0), reduction=const("mean"), zero_infinity=FALSE):
    lengths = [unpack(tx, one) if type(one) in (ListVal, TupleVal) else None for one in (input_lengths, target_lengths)]
    if None in lengths or any(type(n) is not Const for one in lengths for n in one):
        unsupported(tx, "ctc_loss() with lengths that are tensors: what its derivative keeps has a size that depends on them")
    if log_probs.fake.device.type != "cpu" or torch._C._is_any_autocast_enabled() or reduction.value not in ("mean", "sum", "none"):
        unsupported(tx, "ctc_loss() on a GPU, or under autocast")
    return call(tx, wrap(tx, ctc_loss), [log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity])


# %% [markdown]
# A warning needs no break: it is given after the graph has run, in the name of the line that asked for it,
# since what is shown, and how often, depends on that. If it was going to be an exception, the program may
# catch it: a break. So is one that the program shows by a function of its own, or whose list it reads.

# %%
@handles(warnings.warn)
def warn(tx, message, category=NONE, stacklevel=const(1), source=NONE):
    given = getattr(category, "real", None) if category is not NONE else UserWarning
    given = message.cls if issubclass(message.cls, Warning) else given
    if not (isinstance(given, type) and issubclass(given, Warning)) or answer(tx, raises, given):
        unsupported(tx, "a warning that is an exception")
    if answer(tx, shown_by_program) or id(kept_warnings()) in tx.objects.tracked:
        unsupported(tx, "a warning that the program shows or keeps itself")
    level = max(stacklevel.value, 1)
    frame = tx.frames[-level] if level <= len(tx.frames) else None
    place = (frame.globals, frame.code.co_filename, line_of(frame)) if frame else (level - len(tx.frames),)
    call_later(tx, functools.partial(warn_at, place), message, wrap(tx, given), source)


def raises(category) -> bool:
    """Whether some filter makes exceptions of such warnings."""
    return any(action == "error" and issubclass(category, kind) for action, _, kind, *_ in warnings.filters)


def shown_by_program() -> bool:
    """Whether a function of the program is called with each warning."""
    return warnings.showwarning is not warnings._showwarning_orig


OUR_FILES = "<minicompile", marks.__file__.removesuffix("marks.py")


def warn_at(place, message, category, source):
    """warnings.warn in the name of a place: (globals, file, line), or how many frames above the program's."""
    if len(place) == 1:
        frame, above = sys._getframe(1), place[0]
        while above and frame.f_back is not None:
            frame = frame.f_back
            above -= not frame.f_code.co_filename.startswith(OUR_FILES)
        if above:                       # of nobody
            return warnings.warn(message, category, 2**30, source)
        place = frame.f_globals, frame.f_code.co_filename, frame.f_lineno
    registry = place[0].setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, *place[1:], place[0].get("__name__"), registry, source=source)


# %% [markdown]
# ## TorchScript
#
# A function under `torch.jit.script` keeps the function that it was made from, and that is inlined. A traced one is a
# recording, which may do less than its function.

# %%
@REAL_CALLS.of(torch.jit.ScriptFunction)
def call_script_function(tx, function, args, kwargs):
    python = getattr(function.real, "_torchdynamo_inline", None)
    scripted = python and torch.jit._state._try_get_jit_cached_function(python)
    if scripted is None or scripted.qualified_name != function.real.qualified_name:
        unsupported(tx, "a call of a function that torch.jit.trace made")
    guard(tx, function.source, "ID_MATCH", function.real)
    return call(tx, wrap(tx, python), args, kwargs)
