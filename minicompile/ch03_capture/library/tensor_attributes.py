# %% [markdown]
# # What is asked of a tensor
#
# Attributes and methods of tensors that are no operations of the graph: questions about shapes, strides, places and history. The fake
# answers them, with a guard where the answer is not part of the tensor's own. A row that answers NotImplemented leaves the
# question to `tensor_attribute`.
#
# An input to which the graph has written has another history than the real tensor. The attribute `data` shares memory, so that nothing
# is known any more about numbers in it.

# %%
import operator

import torch

from ...ch01_graphs.fake import storage_key
from ...ch02_guards.sources import AttrSource, CallSource
from ...ch02_guards.torch_guards import PLAIN_TYPES
from ..calls import handles
from ..protocol import METHODS, method
from ..storage import guard_place, guard_strides, inputs_around, taken_without_gradients
from ..tensors import TENSOR_ATTRIBUTES, call_tensor_method, check_unused, emit, said_by, tensor_shape
from ..tracer import call, guard, unsupported
from ..values import Const, MethodName, NONE, ObjVal, TRUE, TensorVal, boolean, const
from ..wrap import part, wrap

attribute = TENSOR_ATTRIBUTES.of
TENSOR_ATTRIBUTES.update({
    "shape": tensor_shape,
    "__class__": lambda tx, tensor: wrap(tx, tensor.cls),
    "nbytes": lambda tx, tensor: call(tx, wrap(tx, operator.mul), [
        call(tx, MethodName(self=tensor, name="numel"), []), const(tensor.fake.itemsize)]),
    # of such a view it is what the base says, which for an input that is itself a view is another tensor
    "requires_grad": lambda tx, tensor: unsupported(tx, "requires_grad of a view that was taken while gradients were off")
    if taken_without_gradients(tensor.fake) else NotImplemented})


@attribute("data")
def data(tx, tensor):
    """The same memory with a version counter of its own."""
    for value in tx.tensors.of_fake.values():
        if storage_key(value.fake) == storage_key(tensor.fake):
            value.number, value.updates, value.node.meta["exposed"] = None, ((), -1), True
    return emit(tx, getattr, [tensor, const("data")])


@handles(torch.nn.Parameter)
def parameter(tx, data=NONE, requires_grad=TRUE):
    """Parameter(data, requires_grad=True), of memory that the trace has made. It is a leaf that shows the same memory, and of its class."""
    if type(data) is not TensorVal or data.cls not in PLAIN_TYPES or type(requires_grad) is not Const or \
            storage_key(data.fake) in tx.tensors.in_memory or tx.effects.pure_since or tx.outer is not None:
        unsupported(tx, "creating a Parameter inside a compiled function")
    made = TENSOR_ATTRIBUTES["data"](tx, data)
    made.made = torch.nn.Parameter
    return call(tx, MethodName(self=made, name="requires_grad_"), [const(bool(requires_grad.value))])


def of_written(tx, tensor, name, answer):
    """Of an input that the graph has written to, where there is no history, whatever was written."""
    if not tensor.fake.requires_grad and not tensor.fake._is_view():
        return answer
    reason = f"{name} of an input that the graph has written to"
    check_unused(tx, tensor, reason)
    unsupported(tx, reason)


def is_written(tensor) -> bool:
    return tensor.real is not None and tensor.fake._version != tensor.version


TENSOR_ATTRIBUTES["is_leaf"] = lambda tx, tensor: of_written(tx, tensor, "is_leaf", TRUE) if is_written(tensor) else NotImplemented


@attribute("grad_fn")
def grad_fn(tx, tensor):
    if is_written(tensor):
        return of_written(tx, tensor, "grad_fn", NONE)
    node = said_by(tx, tensor.fake if tensor.real is None else tensor.real, "grad_fn")
    if node is None:
        return NotImplemented
    guard(tx, part(AttrSource, tensor.source, "grad_fn"), "TYPE_MATCH", type(node))
    return ObjVal(real=node, cls=type(node))


# %% [markdown]
# Methods. A size that is a symbol is a node of the graph.

# %%
@method(TensorVal, "size")
def size(tx, self, *args, **kwargs):
    shape = tensor_shape(tx, self)
    dim = (*args, *kwargs.values(), None)[0]
    if dim is None:
        return shape
    known = type(dim) is Const and type(dim.value) is int and -len(shape.items) <= dim.value < len(shape.items)
    return shape.items[dim.value] if known else call_tensor_method(tx, self, "size", args, kwargs)


def place_method(name, guarded):
    """A question about strides and places: the fake answers it, once it is guarded that it may."""
    @method(TensorVal, name)
    def ask(tx, self, *args, **kwargs):
        guarded(tx, self.fake)
        return call_tensor_method(tx, self, name, args, kwargs)


place_method("stride", guard_strides)
place_method("storage_offset", guard_place)


@method(TensorVal, "is_shared")
def is_shared(tx, self):
    if self.real is None or self.node.op != "placeholder":
        return call_tensor_method(tx, self, "is_shared", [], {})
    guard(tx, part(CallSource, self.source, "is_shared"), "CONSTANT_MATCH", self.real.is_shared())
    return const(self.real.is_shared())


# %% [markdown]
# An inference tensor has no version counter, and can be saved for no derivative. Under `inference_mode()` whatever is made is one, but
# not what shows the memory of a normal input; outside of it only what shows that of an input that was made under it.

# %%
@method(TensorVal, "is_inference")
def is_inference(tx, self):
    inputs = inputs_around(tx, self.fake)
    return boolean(inputs[0].real.is_inference() if inputs else tx.options.inference)


METHODS.update(dict.fromkeys([(TensorVal, "dim"), (TensorVal, "ndimension")], lambda tx, self: const(self.fake.dim())))
METHODS[TensorVal, "get_device"] = lambda tx, self: const(-1) if self.fake.device.type == "cpu" else \
    call_tensor_method(tx, self, "get_device", [], {})
