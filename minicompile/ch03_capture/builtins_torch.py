# %% [markdown]
# # Builtin functions, continued: questions that the program asks torch
#
# The trace is neither scripting nor tracing in the sense of `torch.jit`. Grad mode and autocast are asked
# of the tracing thread, which is in the state that the program would be in. What the world guards pin down
# (the default dtype, deterministic algorithms) is simply asked.

# %%
from __future__ import annotations

import types
import warnings

import torch

from .. import marks
from .builtins_ import folded
from .calls import HANDLED, handles
from .contexts import fresh, make_context
from .interpreter import is_library, location, unsupported
from .iterate import unpack
from .methods import call_method
from .operations import fold, identical, truth
from .tensors import emit, make_tensor, name_device
from .values import (
    Const, DictVal, FALSE, ListVal, NONE, ObjVal, TensorVal, TupleVal, boolean, user_error)
from .wrap import wrap_constant


def constant_answer(answer):
    return lambda tx, *args, **kwargs: Const(value=answer)


for _function in (
        torch.jit.is_scripting, torch._jit_internal.is_scripting, torch.jit.is_tracing, torch._C._is_tracing,
        torch.overrides.has_torch_function, torch.overrides.has_torch_function_unary,
        torch.overrides.has_torch_function_variadic, torch.overrides.is_tensor_method_or_property,
        torch._C._is_torch_function_mode_enabled, torch.compiler.is_exporting):
    HANDLED[_function] = constant_answer(False)
HANDLED[torch._C._get_tracing_state] = constant_answer(None)
HANDLED[marks.is_compiling] = constant_answer(True)


@handles(torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling)
def torch_is_compiling(tx):
    """True for programs, which avoid what no compiler can trace; torch's own code means its own compiler."""
    return boolean(not is_library(tx.frames[-1].code.co_filename))


def setting(function):
    """The handler of a function that reads a setting of the library which no other guard covers: a guard asks
    again. (Inside of a context manager of the program, the answer is the program's own.)"""
    def handler(tx, *args, **kwargs):
        result = fold(tx, function, args, kwargs)
        if not kwargs and not tx.contexts and type(result) is Const:
            question = function, tuple(a.value for a in args)
            tx.guards.add(None, "ANSWER", (*question, result.value), location(tx))
        return result
    return handler


for _function in (
        torch.is_grad_enabled, torch.is_autocast_enabled, torch.get_default_dtype, torch.promote_types,
        torch.can_cast, torch.are_deterministic_algorithms_enabled, torch.cuda.is_available,
        torch.cuda.device_count, torch.broadcast_shapes, torch._C._get_privateuse1_backend_name):
    HANDLED[_function] = folded(_function)
for _function in (
        torch.get_autocast_dtype, torch.is_autocast_cache_enabled, torch.get_float32_matmul_precision,
        torch.is_deterministic_algorithms_warn_only_enabled, torch.get_num_threads, torch.is_anomaly_enabled,
        torch.get_num_interop_threads, torch.is_anomaly_check_nan_enabled, torch.is_warn_always_enabled,
        torch.get_deterministic_debug_mode):
    HANDLED[_function] = setting(_function)


# %% [markdown]
# ## Functions that need no node, or another one

# %%
HANDLED.update({
    torch._C._log_api_usage_once: constant_answer(None),
    torch.is_inference_mode_enabled: lambda tx: boolean(tx.inference),
    torch.set_grad_enabled.clone: lambda tx, context: fresh(context),
    torch.is_tensor: lambda tx, value: boolean(type(value) is TensorVal),
    torch.numel: lambda tx, value: call_method(tx, value, "numel", []),
    torch.result_type: lambda tx, a, b: emit(tx, "call_function", torch.result_type, [a, b], {}),
    torch.set_grad_enabled: lambda tx, *args, **kwargs: make_context(
        tx, torch.set_grad_enabled, args, kwargs),
})


@handles(torch.as_tensor, torch.asarray)
def as_tensor(tx, data, dtype=NONE, device=NONE):
    """No copy when there is nothing to convert; constants become a new tensor."""
    named = {k: v for k, v in (("dtype", dtype), ("device", device)) if not identical(v, NONE)}
    named = name_device(torch.as_tensor, named)
    if type(data) is not TensorVal:
        return make_tensor(tx, torch.as_tensor, [data], named)
    return call_method(tx, data, "to", [], named) if named else data


@handles(torch._C._group_tensors_by_device_and_dtype)
def group_tensors(tx, lists, with_indices=FALSE):
    """{(device, dtype): ([the tensors of each list that belong there], their positions)}; one group only."""
    lists = [unpack(tx, one) for one in unpack(tx, lists)]
    kinds = {(t.fake.device, t.fake.dtype) for t in lists[0]}
    if len(kinds) > 1:
        unsupported(tx, "grouping tensors of several dtypes or devices")
    positions = range(len(lists[0])) if truth(tx, with_indices) else ()
    group = TupleVal(items=[ListVal(items=[ListVal(items=one) for one in lists]),
                            wrap_constant(tx, list(positions))])
    return DictVal(items={kind: [wrap_constant(tx, kind), group] for kind in kinds})


@handles(torch._assert)
def torch_assert(tx, condition, message):
    if not truth(tx, condition):
        user_error(AssertionError, message)


# %% [markdown]
# A warning needs no break: it is given after the graph has run.

# %%
@handles(warnings.warn)
def warn(tx, *args, **kwargs):
    tx.replays.append((ObjVal(real=warnings.warn, cls=types.BuiltinFunctionType), args, kwargs))
