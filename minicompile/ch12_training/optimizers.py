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
from torch.optim.optimizer import _use_grad_for_differentiable

from ..ch01_graphs.fake import storage_key
from ..ch03_capture.calls import BY_CODE, DISABLED, call_wrapped, handles
from ..ch03_capture.operations import METHODS, emit_float
from ..ch03_capture.tensors import EXACT, call_tensor_method
from ..ch03_capture.tracer import Tracer, call, is_library, unsupported
from ..ch03_capture.values import NEW, NONE, Const, ObjVal, SymVal, TensorVal, Value, as_number
from ..ch03_capture.wrap import counter, wrap

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
    """The step of an optimizer. On a GPU it stays outside: its counters are on the CPU, and one graph of both is not
    compiled yet."""
    existed = type(self) is ObjVal and self.real is not NEW
    if any(v.fake.is_cuda for v in tx.tensor_of_fake.values()) or existed and any(
            p.is_cuda for group in self.real.param_groups for p in group["params"]):
        unsupported(tx, "optimizer.step() of parameters on a GPU")
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
# ## Counters
#
# The number that a counter comes in with is read when the compiled function is called, and is a symbolic float of
# the trace. What the trace has added meanwhile is added to it, without rounding where the numbers are whole and not too
# large. From there on `lr / (1 - beta ** step)` is arithmetic on the host before the kernels run, in float64 as in
# eager. Only PyTorch's own code is answered so. Where a program asks for a number, the graph breaks: what programs do
# with one is as often a decision as a computation.

# %%
@METHODS.of((TensorVal, "item"))
def item(tx: Tracer, self: TensorVal) -> Value:
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
