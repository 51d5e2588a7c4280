# %% [markdown]
# # Derivatives that ask for numbers
#
# A program may bring an operator of its own, with a derivative that is written in Python:
#
#     @torch.library.custom_op("moe::grouped_mm", mutates_args=())
#     def grouped_mm(x, weight, ends): ...
#
#     def backward(ctx, grad):
#         for expert, end in enumerate(ctx.ends.tolist()): ...
#
#     grouped_mm.register_autograd(backward, setup_context=save)
#
# As a rule the engine runs `backward` on fakes, and the recording holds what it computes. Not here: `tolist` asks for
# numbers, and a fake has none. The forward of the operator asks as well, but of a forward only the shape of
# the result need be known, which its fake implementation tells. Of a derivative that is known, too: a gradient has the shape
# of what it belongs to. So such a derivative becomes an operator itself, which is recorded and not looked into.
#
# Its arguments are those of the forward, the results, and the gradients of the results. When it runs, it does what the engine does in
# eager: `setup_context` puts into a context what the derivative needs, then `backward` reads it. In eager the first half
# runs in the forward pass, which can be told apart only if it does more than to save.

# %%
import functools
import inspect
import itertools
from types import SimpleNamespace
from typing import Any, Callable, NamedTuple

import torch
from torch import fx, is_grad_enabled
from torch.autograd import grad
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ..ch01_graphs.fake import fake_like, storage_key
from ..ch01_graphs.graph import call_node
from ..ch01_graphs.operators import NAMESPACES
from ..ch01_graphs.trace import backward_state, trace

# %% [markdown]
# ## Whether it can be recorded
#
# One has to try. The operator is called on new fakes, in a recording of its own that nobody keeps, and differentiated. The functions that
# were registered are found by way of the autograd node of the result: PyTorch makes a class for each such operator, whose `backward` refers
# to the two as `info`.

# %%
class Derivative(NamedTuple):
    """What `register_autograd` was given, which of the tensors among the arguments it saves, and whether it keeps a result."""
    setup_context: Callable | None
    backward: Callable
    saved: tuple[int, ...]
    keeps_results: bool


def tensors_in(values) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor)]


def derivative_behind(node, args: list, results: list) -> Derivative | None:
    """The derivative that a node of autograd stands for; None if it was not registered so."""
    forward = getattr(type(node), "_forward_cls", None)
    info = inspect.getclosurevars(forward.backward).nonlocals.get("info") if forward is not None else None
    if getattr(info, "_backward_fn", None) is None:
        return None
    saved, kept = ({*map(storage_key, tensors_in(values))} for values in (node.saved_tensors, (node.saved_tensors, vars(node))))
    return Derivative(info._setup_context_fn, info._backward_fn, tuple(i for i, t in enumerate(args) if storage_key(t) in saved),
                      any(storage_key(t) in kept for t in results))


def asks_for_numbers(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Derivative | None:
    """The derivative of this call, if it cannot be recorded."""
    known = []

    def differentiated(*leaves):
        copies = iter(leaves)
        result = op(*pytree.tree_map_only(torch.Tensor, lambda _: next(copies), args), **kwargs)
        outputs = [t for t in tensors_in(result) if t.requires_grad]
        known.append(derivative_behind(outputs[0].grad_fn, leaves, tensors_in(result)))
        with backward_state():
            return grad(outputs, [t for t in leaves if t.requires_grad], [*map(torch.ones_like, outputs)], allow_unused=True)

    with _disable_current_modes():
        try:
            trace(differentiated, [fake_like(t, t.requires_grad) for t in tensors_in(args)])
        except Exception:                   # of the program's function: whatever it is, eager may not meet it
            return known[0] if known else None
    return None


# %% [markdown]
# ## The derivative as an operator
#
# `derivative_operator` declares it to PyTorch. The context is any object with attributes and `save_for_backward`. Gradients come back
# in the form that the engine would give them. If no result is kept, the gradients, which have the same shapes, take their place among
# the arguments, and nothing is saved for a derivative that does not read it. A second derivative is refused, and the program that asks
# for one runs as it is: a graph has no place in which to note what this derivative computes.

# %%
class Context(SimpleNamespace):
    """The `ctx` that the functions of a program expect."""
    saved_tensors = ()

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors

    def ignored(self, *_):
        """What matters to the engine only."""

    set_materialize_grads = mark_non_differentiable = ignored


def with_defaults(schema, args, kwargs) -> tuple[tuple, dict]:
    """All arguments of an operator: PyTorch leaves out those that have their default."""
    given = dict(zip([a.name for a in schema.arguments], args), **kwargs)
    value = {a.name: given.get(a.name, a.default_value) for a in schema.arguments}
    keywords = {a.name: value.pop(a.name) for a in schema.arguments if a.kwarg_only}
    return tuple(value.values()), keywords


def as_gradient(gradient, of: torch.Tensor, arguments: list) -> torch.Tensor:
    """`gradient` in the form of the tensor that it is the gradient `of`, with memory of its own."""
    if gradient is None:
        return torch.zeros(of.shape, dtype=of.dtype, device=of.device)
    own = gradient.sum_to_size(of.shape).to(of.dtype).contiguous()
    return own.clone() if storage_key(own) in map(storage_key, arguments) else own


SERIAL_NUMBERS = itertools.count()         # an operator of the same name would take the place of one that a graph calls


@functools.cache
def derivative_operator(op: torch._ops.OpOverload, setup_context: Callable | None, backward: Callable) -> torch._ops.OpOverload:
    """The operator (results, gradients, wanted, *arguments of `op`) -> the gradients of the arguments that are wanted."""
    def derivative(results, gradients, wanted, *args, **kwargs):
        inputs, keywords = with_defaults(op._schema, args, kwargs)
        context = Context(needs_input_grad=tuple(wanted))
        if setup_context is not None:
            output = results[0] if len(op._schema.returns) == 1 else tuple(results)
            further = {"keyword_only_inputs": keywords} if keywords else {}
            setup_context(ctx=context, inputs=inputs, output=output, **further)
        found = backward(context, *gradients)
        found = found if isinstance(found, tuple) else (found,)
        arguments = [*results, *gradients, *tensors_in(inputs)]
        return [as_gradient(g, x, arguments) for g, x, asked in zip(found, inputs, wanted) if asked]

    def shapes(results, gradients, wanted, *args, **kwargs):
        inputs, _ = with_defaults(op._schema, args, kwargs)
        return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x, asked in zip(inputs, wanted) if asked]

    def refuse(ctx, *gradients):
        raise RuntimeError(f"the derivative of {op}, which asks for numbers, is differentiated once more")

    arguments = str(op._schema).split("(", 1)[1].rsplit(") -> ", 1)[0]
    name = f"{op.namespace}_{op.__name__.replace('.', '_')}_{next(SERIAL_NUMBERS)}"
    operator = torch.library.custom_op(f"minicompile_derivatives::{name}", derivative, mutates_args=(),
                                       schema=f"(Tensor[] results, Tensor[] gradients, bool[] wanted, {arguments}) -> Tensor[]")
    operator.register_fake(shapes)
    operator.register_autograd(refuse)
    return operator._opoverload


# %% [markdown]
# ## In the recording
#
# `Registered` stands for one call of the program's operator while forward and backward are recorded: the forward is that operator, the
# backward the other one. What eager saves of the arguments is saved here, too, so that a write in between is an error in both.

# %%
class Registered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own, op, kwargs, *args):
        result = op(*args, **kwargs)
        ctx.call = own, op, tensors_in(result) if own.keeps_results else None, args, kwargs
        ctx.save_for_backward(*(tensors_in(args)[i] for i in own.saved))
        return result

    @staticmethod
    def backward(ctx, *gradients):
        ctx.saved_tensors                               # raises if one was written
        own, op, results, args, kwargs = ctx.call
        wanted = list(ctx.needs_input_grad[3:])
        derivative = derivative_operator(op, own.setup_context, own.backward)
        found = iter(derivative(results or gradients, gradients, wanted, *args, **kwargs))
        return None, None, None, *(next(found) if asked else None for asked in wanted)


def operator_of_the_program(target) -> torch._ops.OpOverload | None:
    """The operator that a node calls, if it is not PyTorch's. (One that autocast casts for is left to the engine: what it casts
    is not what it is given.)"""
    if isinstance(target, torch._ops.OpOverloadPacket) and len(target.overloads()) == 1:
        target = getattr(target, target.overloads()[0])
    if not isinstance(target, torch._ops.OpOverload) or target.namespace in NAMESPACES:
        return None
    casts = any(torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), key) for key in ("AutocastCPU", "AutocastCUDA"))
    return None if casts else target


def kind_of_argument(leaf):
    """What of an argument decides whether a derivative can be recorded."""
    if isinstance(leaf, torch.Tensor):
        return str(leaf.shape), str(leaf.stride()), leaf.dtype, leaf.device, leaf.requires_grad
    return repr(leaf)


def calls_operators_of(gm: fx.GraphModule) -> Callable[[fx.Node, tuple, dict], Any]:
    """How `run_recorded` computes a node of `gm`. Layers that call an operator alike try its derivative once."""
    tried: dict = {}

    def call(node, args, kwargs):
        op = operator_of_the_program(node.target)
        if op is not None and is_grad_enabled() and any(t.requires_grad for t in tensors_in((args, kwargs))):
            positional, keywords = with_defaults(op._schema, args, kwargs)
            leaves, form = pytree.tree_flatten((positional, keywords))
            key = op, str(form), *map(kind_of_argument, leaves)
            if key not in tried:
                tried[key] = asks_for_numbers(op, positional, keywords)
            if tried[key] is not None:
                return Registered.apply(tried[key], op, keywords, *positional)
        return call_node(gm, node, args, kwargs)
    return call
