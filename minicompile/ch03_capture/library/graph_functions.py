# %% [markdown]
# # Which functions go into the graph?
#
# Functions implemented in C++ (`torch.add`, `torch._C._nn.gelu`) must: there is no bytecode to look at. Of
# those written in Python, the functional ones of `torch.nn.functional` and `torch.functional` go in whole
# when they get tensors, because a graph of `layer_norm` and `cross_entropy` calls is one that a person can
# read. Everything else is inlined.

# %%
import types

import torch
from torch.utils._device import _device_constructors

from ... import marks
from ...ch01_graphs.fake import storage_key
from ...ch02_guards.identity import is_a, module_name
from ..keys import entries
from ..tensors import emit, fake_of, run_fake, to_arg
from ..tracer import Tracer, unsupported
from ..values import AbstractValue, ListVal, NONE, TensorVal, TupleVal, const
from ..wrap import realize
from .tensor_names import REFUSED_METHODS

GRAPH_MODULES = frozenset((
    "torch.functional", "torch.nn.functional", "torch._C._nn", "torch._C._linalg", "torch._C._fft",
    "torch._C._special", "torch._VF", "torch._tensor", "torch.linalg", "torch.special", "torch.fft",
    "torch._C"))
REFUSED_FUNCTIONS = frozenset((
    "save", "load", "manual_seed", "seed", "initial_seed", "from_numpy", "set_default_dtype", "compile",
    "set_default_device", "use_deterministic_algorithms", "set_printoptions", "from_file", "frombuffer",
    "is_nonzero", "set_num_threads", "_assert_async", "set_grad_enabled", "handle_torch_function",
    "from_dlpack", "set_float32_matmul_precision", "get_rng_state", "set_rng_state", "_set_grad_enabled",
    "unique", "nonzero", "unique_consecutive", "sparse_coo_tensor", "boolean_dispatch"))
# Other builtins that are no operators, as `_to_dlpack` and `set_flush_denormal`, see memory or change a setting
NO_OPERATORS = frozenset(("_parse_to", "_is_functional_tensor", "_is_functional_tensor_base", "spmm", "dsmm", "hsmm", "saddmm"))
OVERLOADS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_TORCH_BUILTINS: set = set()


def is_graph_function(function) -> bool:
    """Whether a call of this torch function becomes a node."""
    if is_a(function, OVERLOADS) or id(function) in marks.IN_GRAPH:
        return True
    kind = type(function)
    if kind is types.BuiltinFunctionType:
        if not _TORCH_BUILTINS:
            for space in (torch, torch._C._VariableFunctions, torch._C._nn, torch._C._linalg, torch._C._fft,
                          torch._C._special, torch._VF):
                found = [getattr(space, n, None) for n in dir(space)]
                _TORCH_BUILTINS.update(f for f in found if type(f) is types.BuiltinFunctionType)
        return function in _TORCH_BUILTINS and (name := function.__name__) not in REFUSED_FUNCTIONS \
            and name not in REFUSED_METHODS and (hasattr(torch.ops.aten, name) or name in NO_OPERATORS)
    if kind is types.FunctionType:
        module = module_name(function)
        return module in GRAPH_MODULES and function.__name__ not in REFUSED_FUNCTIONS \
            and function.__name__ not in INLINED_FUNCTIONS
    return False


INLINED_FUNCTIONS = frozenset(("multi_head_attention_forward", "has_torch_function", "_canonical_mask",
                               "_none_or_dtype", "_mha_shape_check", "_in_projection",
                               "_in_projection_packed",
                               "fn", "_get_softmax_dim", "_list_with_default", "_verify_batch_size"))


def call_graph_function(tx: Tracer, function, args, kwargs) -> AbstractValue:
    out = kwargs.get("out", NONE)
    if out is not NONE:
        return call_with_out(tx, function, args, {k: v for k, v in kwargs.items() if k != "out"}, out)
    return emit(tx, function, args, name_device(function, kwargs))


# %% [markdown]
# `torch.add(x, y, out=z)` is `z.copy_(x + y)`, for later stages too, where that means the same: `z` has the
# shape and the dtype of the result already, and is not read while it is written (which does no harm where the
# operation goes element by element). What eager refuses, as a gradient, the operation refuses on fakes, too. Only two inputs that
# overlap in memory are not seen to: a call with such runs the graph as it was (`given_out`), so that PyTorch refuses it.

# %%
def call_with_out(tx: Tracer, function, args, kwargs, out: AbstractValue) -> AbstractValue:
    outs = [realize(tx, o) for o in entries(tx, out)] if type(out) in (TupleVal, ListVal) else [out]
    reason = f"{function.__name__}(..., out=) that is no copy of the result"
    packet, inputs = getattr(torch.ops.aten, function.__name__, None), []
    fake_args, fake_kwargs = (fake_of(arg, inputs) for arg in (
        [to_arg(tx, a) for a in args], {k: to_arg(tx, v) for k, v in kwargs.items()}))
    if packet is None or not inputs or {*map(type, outs)} != {TensorVal} or len(set(outs)) < len(outs):
        unsupported(tx, reason)
    tags = {tag for overload in packet.overloads() for tag in getattr(packet, overload).tags}
    fakes, found = [o.fake for o in outs], emit(tx, function, args, kwargs)
    results = found.items if type(found) is TupleVal else [found]
    with torch._C._DisableAutocast():              # autocast leaves a call with `out=` alone
        uncast = run_fake(tx, function, fake_args, fake_kwargs)
    if torch.Tag.nondeterministic_seeded in tags or len(results) != len(outs) or \
            [r.fake.dtype for r in results] != [r.dtype for r in (uncast if type(found) is TupleVal else [uncast])]:
        unsupported(tx, reason)
    for result, fake in zip((r.fake for r in results), fakes):
        shared = [f for f in (*inputs, *fakes) if storage_key(f) == storage_key(fake) and f is not fake]
        if (result.shape, result.dtype, result.device) != (fake.shape, fake.dtype, fake.device) or shared or \
                any(f is fake for f in inputs) and torch.Tag.pointwise not in tags:
            unsupported(tx, reason)
    if function.__name__ in ("max", "min") and fakes[0].device.type == "cuda" and any(f.stride() != fakes[0].stride() for f in fakes):
        unsupported(tx, f"{function.__name__} into tensors of different strides, which a GPU's kernel may refuse")
    checked = run_fake(tx, function, fake_args, {**fake_kwargs, "out": fakes if len(outs) > 1 else fakes[0]})
    if any(type(fake.grad_fn).__name__ == "NotImplemented" for fake in fakes):             # a history that only raises
        unsupported(tx, reason)
    if len(outs) == 1:
        results[0].node.meta["given_out"] = True
    for o, result in zip(outs, results):
        emit(tx, "copy_", [o, result])
    if checked is None:
        return NONE
    return TupleVal(items=outs, cls=type(checked)) if len(outs) > 1 else outs[0]


# %% [markdown]
# Under `with torch.device("cuda"):` a call such as
# `torch.zeros(3)` makes a tensor on the GPU, because a mode adds the device. The graph will run without this mode,
# so the device is written down.

# %%
def name_device(function, kwargs) -> dict:
    """The arguments of a call that makes a tensor, with the default device spelled out. The compiler itself
    must not run under it."""
    if not torch._C._is_torch_function_mode_enabled() or function not in _device_constructors() or \
            kwargs.get("device", NONE) is not NONE:
        return kwargs
    return {**kwargs, "device": const(torch.overrides._get_current_function_mode().device)}
