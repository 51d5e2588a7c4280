# %% [markdown]
# # What the schema says
#
# PyTorch's operator schemas state which arguments are written and which results are views of which
# arguments: `add_(Tensor(a!) self, ...) -> Tensor(a!)`, `select(Tensor(a) self, int dim, int index) ->
# Tensor(a)`. So the functional counterpart of an operator need not be listed. Its name is the name without
# the underscore, or without the `out` overload, or with `_functional` appended, and of `__ilshift__` without the `i`; its arguments
# have the same names; and it returns what the original returns followed by the new contents of each argument that was
# written.
#
# So `add_.Tensor` has `add.Tensor`, which takes the same three arguments and returns the new contents of `self`. `add.out` has
# it, too, without the argument `out`. `_native_batch_norm_legit` writes two of its arguments and returns three results; its
# counterpart is `_native_batch_norm_legit_functional`, with five. Where no operator of PyTorch fits, the graph runs operator by
# operator.

# %%
import functools
from typing import Any

import torch

from ..errors import Unsupported


def written_arguments(op) -> list:
    """The schema arguments that `op` writes."""
    return [a for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def is_mutable(op) -> bool:
    return isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable


def argument_of(node, name: str):
    """The argument of this name in a call of an operator, or its default."""
    place, schema = next((i, a) for i, a in enumerate(node.target._schema.arguments) if a.name == name)
    return node.args[place] if place < len(node.args) else node.kwargs.get(name, schema.default_value)


def signature(op) -> list[tuple[str, str]]:
    """(name, type) of each argument but those for `out` tensors."""
    return [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out]


@functools.cache
def functional_counterpart(op):
    """The operator that computes what `op` writes without writing it."""
    namespace, name = op._schema.name.split("::")
    ops = getattr(torch.ops, namespace)
    wanted = signature(op)
    stem = name.removesuffix("_")
    for candidate in (name if len(wanted) < len(op._schema.arguments) else stem, f"{stem}_functional", name.replace("__i", "__")):
        packet = getattr(ops, candidate, None)
        if packet is None:
            continue
        overloads = [getattr(packet, o) for o in packet.overloads()]
        fitting = [o for o in overloads if not o._schema.is_mutable and signature(o)[:len(wanted)] == wanted]
        if fitting:
            return min(fitting, key=lambda o: o._overloadname != op._overloadname)
    raise Unsupported(f"{op} writes to its arguments and has no functional counterpart")


@functools.cache
def parameters_of_counterpart(op) -> list[tuple[str, bool, Any]]:
    """(name, whether it is passed by name, default) of each argument of `op` with which to call its functional counterpart."""
    functional = functional_counterpart(op)
    defaults = {a.name: a.default_value for o in (functional, op) for a in o._schema.arguments if a.has_default_value()}
    keyword_only = {a.name for a in functional._schema.arguments if a.kwarg_only}
    return [(name, name in keyword_only, defaults.get(name)) for name, _ in signature(op)]


METADATA_OPS = {"aten::resize_", "aten::resize_as_", "aten::set_", "aten::as_strided_", "aten::detach_",
                "aten::resize", "aten::_resize_output_", "aten::swap_"}


def check_no_metadata_change(op):
    """Refuse operators that change what a tensor *is* (its shape, its storage) rather than what it
    contains."""
    name = op._schema.name
    if name in METADATA_OPS or name.endswith("_") and any(
            r.alias_info is not None for r in functional_counterpart(op)._schema.returns):
        raise Unsupported(f"{op} changes the shape or the storage of a tensor in place")
