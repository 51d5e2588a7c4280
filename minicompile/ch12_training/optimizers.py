# %% [markdown]
# # Optimizers inside the graph
#
# `optimizer.step()` is Python around tensor operations: loops over parameter groups, a dictionary from each parameter
# to its state, a choice among three implementations. All of that is what capture inlines anyway. State that an optimizer
# makes at its first step are new objects of the trace, which the end of the compiled function stores where
# they belong; so the first step is one version of the compiled function, and later steps are another.
#
# Three things stand in the way. PyTorch keeps some of these functions from its own compiler, with decorators. An
# optimizer counts its steps in a tensor and computes with the number, `1 - beta ** step.item()`. And the step asks
# whether the GPU is recording, which is no question for a program that is being compiled.

# %%
from __future__ import annotations

import torch
from torch.optim import adagrad
from torch.optim.optimizer import _use_grad_for_differentiable

from ..ch01_graphs.fake import storage_key
from ..ch03_capture.calls import BY_CODE, DISABLED, NAMED, call_wrapped, handles
from ..ch03_capture.inputs import counter
from ..ch03_capture.operations import METHODS, emit_float
from ..ch03_capture.tensors import EXACT, call_tensor_method, emit
from ..ch03_capture.tracer import Tracer, call, is_library, unsupported
from ..ch03_capture.values import NONE, AbstractValue, Const, SymVal, TensorVal, as_number
from ..ch03_capture.wrap import wrap

# %% [markdown]
# ## The decorators
#
# The decorator of `step` breaks graphs on purpose, for torch.compile's sake, and sets the grad mode. What remains of
# it is written here in Python, and is interpreted as if the program contained it.

# %%
def in_grad_mode(step, self, *args, **kwargs):
    """`step(self, ...)` in the grad mode that the optimizer asks for."""
    previous = torch.is_grad_enabled()
    try:
        torch.set_grad_enabled(self.defaults["differentiable"])
        return step(self, *args, **kwargs)
    finally:
        torch.set_grad_enabled(previous)


def example(self, *args, **kwargs):
    """Something to decorate: all functions that a decorator makes have one code."""


@BY_CODE.of(_use_grad_for_differentiable(example).__code__)
def call_step(tx: Tracer, function, self, *args, **kwargs):
    """The step of an optimizer."""
    return call(tx, wrap(tx, in_grad_mode), [wrap(tx, function.real.__wrapped__), self, *args], kwargs)


@BY_CODE.of(torch._disable_dynamo(example).__code__, DISABLED)
def call_disabled(tx: Tracer, function, *args, **kwargs):
    """What torch keeps from its own compiler; of an optimizer, it may be inlined."""
    if not function.real.__module__.startswith("torch.optim"):
        unsupported(tx, f"a call of {function.real.__module__}.{function.real.__qualname__}")
    return call_wrapped(tx, function, *args, **kwargs)


@handles(*(getattr(torch.optim.Optimizer, name) for name in ("_accelerator_graph_capture_health_check",
                                                             "_cuda_graph_capture_health_check")      # until torch 2.12
           if name in vars(torch.optim.Optimizer)))
def health_check(tx, self):
    return NONE


# %% [markdown]
# ## The learning rate
#
# It may be a tensor, so that a scheduler can change it in place. Then `param.add_(grad, alpha=-lr)` asks a tensor for its
# number, where PyTorch has only a signature that takes a number. The product says the same, and leaves the number where
# it is.

# %%
SCALES = {"add": "alpha", "sub": "alpha", "addcmul": "value", "addcdiv": "value"}


def scaling_method(name: str, keyword: str):
    @METHODS.of((TensorVal, name))
    def scaled(tx: Tracer, self: TensorVal, *args, **kwargs):
        """self.name(operand, ..., keyword=number)"""
        if type(number := kwargs.get(keyword)) is TensorVal and args and not number.fake.requires_grad:
            args = [emit(tx, "call_function", torch.mul, [args[0], number], {}), *args[1:]]
            kwargs = {k: v for k, v in kwargs.items() if k != keyword}
        return call_tensor_method(tx, self, name, args, kwargs)


for _name, _keyword in SCALES.items():
    scaling_method(_name, _keyword)
    scaling_method(_name + "_", _keyword)


@handles(torch._foreach_add_)
def foreach_add_(tx: Tracer, tensors, others, *args, **kwargs):
    """torch._foreach_add_(tensors, others, alpha=number)"""
    if type(number := kwargs.get("alpha")) is TensorVal and not number.fake.requires_grad:
        others, kwargs = emit(tx, "call_function", torch._foreach_mul, [others, number], {}), {}
    return emit(tx, "call_function", torch._foreach_add_, [tensors, others, *args], kwargs)

# %% [markdown]
# The fused operators take the learning rate as a C++ number, which cannot be a symbol. Their other overloads take it as
# a tensor.

# %%
def handle_fused(operator):
    @handles(operator)
    def fused(tx: Tracer, *args, **kwargs):
        """A fused update of many parameters."""
        if type(lr := kwargs.get("lr")) is SymVal:
            kwargs["lr"] = emit(tx, "call_function", torch.scalar_tensor, [lr], {"dtype": Const(value=torch.float64)})
        return emit(tx, "call_function", operator, args, kwargs)


for _name in ("adam", "adamw", "sgd"):
    handle_fused(getattr(torch, f"_fused_{_name}_"))


# %% [markdown]
# Adagrad's has no such overload. It computes what the loop over single tensors computes, so the loop is interpreted.

# %%
@handles(adagrad._fused_adagrad)
def fused_adagrad(tx: Tracer, params, grads, state_sums, state_steps, grad_scale=NONE, found_inf=NONE, **options):
    if grad_scale is not NONE or found_inf is not NONE:
        unsupported(tx, "fused Adagrad with a GradScaler")
    return call(tx, wrap(tx, adagrad._single_tensor_adagrad), [params, grads, state_sums, state_steps, NONE, NONE], options)


# %% [markdown]
# `foreach_map(op, *lists)` is a loop as well. In PyTorch it is an operator of its own, to tell the compiler that the
# calls are independent; here this is found out (chapter 8).

# %%
def foreach_map(op, *operands):
    if not any(isinstance(one, (list, tuple)) for one in operands):
        return op(*operands)
    count = min([len(one) for one in operands if isinstance(one, (list, tuple))])
    return [op(*[one[i] if isinstance(one, (list, tuple)) else one for one in operands]) for i in range(count)]


@NAMED.of(("torch._higher_order_ops.foreach_map", "foreach_map"))
def map_over_lists(tx: Tracer, op, *operands):
    return call(tx, wrap(tx, foreach_map), [op, *operands])


# %% [markdown]
# ## Counters
#
# The number that a counter comes in with is read when the compiled function is called, and is a symbolic float of
# the trace. What the trace has added meanwhile is added to it, without rounding where the numbers are whole and not too
# large. From there on `lr / (1 - beta ** step)` is arithmetic on the host before the kernels run, in float64 as in
# eager. Only PyTorch's own code is answered so. Where a program asks for a number, the graph breaks: what programs do
# with one is as often a decision as a computation.

# %%
@METHODS.of((TensorVal, "item"))
def item(tx: Tracer, self: TensorVal) -> AbstractValue:
    """tensor.item()"""
    known, (added, version) = as_number(self), self.added or (0.0, self.version)
    if type(known) is Const or not can_be_read(tx, self, version):
        return call_tensor_method(tx, self, "item", [], {})
    if type(known) is not SymVal:
        known = counter(tx, self.source, self.real.item(), EXACT if added else None)
        if known is None:
            unsupported(tx, "a counter that is not a whole number")
        if added:
            known = emit_float(tx, "add", [known, Const(value=added)])
        self.number = known, version
    return known


def can_be_read(tx: Tracer, tensor: TensorVal, version: int) -> bool:
    """Whether it is a 0-d tensor on the CPU that came in, and that the trace has only counted up, to `version`."""
    fake, key = tensor.fake, storage_key(tensor.fake)
    return is_library(tx.frames[-1].code.co_filename) and tensor.real is not None and tensor.source is not None and \
        fake._version == version and fake.dim() == 0 and fake.device.type == "cpu" and not fake.requires_grad and \
        fake.dtype in (torch.float32, torch.float64) and not any(
            type(v) is TensorVal and v is not tensor and storage_key(v.fake) == key for v in tx.tracked.values())
