# %% [markdown]
# # Tensors that are known
#
# `n = torch.div(x.shape[1], 2 * w, rounding_mode="trunc")` is a tensor, although nothing but integers went into it, and
# `x.view(-1, n, 2 * w)` asks for its value. A sampler asks for its times, `torch.linspace(-1, 999, 51).int().tolist()`. What
# operations that draw nothing make of constants is known while the function is traced.
#
# When a node is made, it is marked as known if its arguments are (`is_made_of_constants`). Its numbers are computed when somebody
# asks for them (`known_tensor`), from the nodes that it was made of, as long as nobody has written to one of these. What an
# elementwise operation makes of numbers is a constant of the graph at once (`from_constants`).

# %%
import contextlib
import math

import torch
from torch.utils import _pytree as pytree

from ..ch01_graphs.fake import FakeTensor
from ..ch01_graphs.shapes import expr_of
from ..ch01_graphs.symbolic import present
from .values import AbstractValue, Const, SymVal, TensorVal, const

MOST_NUMBERS = 4096          # of a tensor that is computed while tracing
OF_CONSTANTS = frozenset((
    "arange", "linspace", "logspace", "zeros", "ones", "full", "eye", "tensor", "as_tensor", "scalar_tensor", "zeros_like", "ones_like",
    "full_like", "new_zeros", "new_ones", "new_full", "getitem", "reshape", "view", "flatten", "unsqueeze", "squeeze", "expand", "t",
    "transpose", "permute", "flip", "stack", "cat", "concat", "repeat", "meshgrid", "tril", "triu", "unbind", "split", "chunk", "select",
    "index_select", "clone", "contiguous", "detach", "int", "long", "float", "double", "bool", "to", "type", "sum", "prod", "cumsum",
    "cumprod", "max", "min", "amax", "amin", "argmax", "argmin", "any", "all", "sort", "argsort", "diff",
    "lt", "le", "gt", "ge", "eq", "ne", "and_", "or_"))


# %% [markdown]
# ## Which nodes are known
#
# An operation qualifies by its name: it makes numbers (`arange`), moves them (`reshape`), or computes with them. `OF_CONSTANTS` lists
# these, without those that draw random numbers; elementwise operators need no list, since PyTorch tags them. Its result
# qualifies if it is on the CPU, needs no gradient and is small, as it may be computed during the trace.

# %%
def is_pointwise(target) -> bool:
    """Whether a torch function, method name or operator of Python is elementwise, and not random."""
    name = name_of_target(target)
    packet = getattr(torch.ops.aten, {"truediv": "div"}.get(name, name).strip("_"), None)
    operator_ = getattr(packet, "Tensor", None) or getattr(packet, "default", None)
    tags = getattr(operator_, "tags", ())
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def name_of_target(target) -> str:
    """`torch.add`, `torch.ops.aten.add` and `torch.ops.aten.add.Tensor` have one name; an operator that is not PyTorch's has its library's
    in front, `mylib::add`."""
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return getattr(target, "overloadpacket", target)._qualified_op_name.removeprefix("aten::")
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def function_and_rest(target, args):
    """(function, arguments). target: a function, or the name of a method of the first argument."""
    return (getattr(args[0], target), args[1:]) if isinstance(target, str) else (target, args)


def is_made_of_constants(node, result) -> bool:
    """Whether a new node computes small tensors on the CPU from constants only."""
    return node.op in ("call_function", "call_method") and all(n.meta.get("known") for n in node.all_input_nodes) \
        and is_of_constants(node.target) and all(map(is_short, pytree.tree_leaves(result)))


def is_of_constants(target) -> bool:
    """Whether a torch function, method name or operator of Python makes, moves or computes numbers, and draws none."""
    return name_of_target(target) in OF_CONSTANTS or is_pointwise(target)


def is_short(result) -> bool:
    return isinstance(result, FakeTensor) and result.device.type == "cpu" and not result.requires_grad and not result.is_complex() \
        and type(numel := result.numel()) is int and numel <= MOST_NUMBERS


# %% [markdown]
# ## Computing one
#
# Most known tensors are never asked for their value, so nothing is computed before somebody does. Then `constant_of` goes back
# through the nodes and calls the operations on real tensors, outside of the trace's modes (`on_real_tensors`).
#
# In between something may have written to one of these tensors. A fake counts writes in its version, which must be 0. Three ways of writing
# are not counted: through `data`, which marks the node as exposed; by an operator that does not say so; and by what writes to a view. So
# `is_only_read` also looks at everything that uses the tensor, or its relatives, and asks whether each of these only computes.
#
# One sort of size may vary even here: `torch.zeros(1).expand(n)` has as many elements as `n` says, all of them equal. Along such a
# dimension one element is computed, and expanded at the end to what `n` is at present.

# %%
@contextlib.contextmanager
def on_real_tensors():
    with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def constant_of(node, known: dict):
    """What a node computes that is made of constants and was never written to, with dimensions of size 1 where it is expanded. Raises
    ValueError for others, and where `data` was read, through which writes are not counted. known: of nodes already computed. A size
    that varies can only come from `expand`, along which all is equal."""
    if node not in known:
        fakes = pytree.tree_leaves(node.meta.get("val"))
        unwritten = "exposed" not in node.meta and all(isinstance(f, FakeTensor) and not f._version for f in fakes)
        if node.op == "placeholder" or not is_of_constants(node.target) or not unwritten:
            raise ValueError("not made of constants")

        def concrete(a):
            if isinstance(a, torch.fx.Node):
                value, fake = constant_of(a, known), a.meta["val"]
                return value.expand([present(expr_of(n)) for n in fake.shape]) if isinstance(fake, FakeTensor) else value
            return torch.device("cpu") if isinstance(a, torch.device) else a
        if name_of_target(node.target) == "expand":
            known[node] = constant_of(node.args[0], known)
        else:
            args, kwargs = (torch.fx.node.map_aggregate(a, concrete) for a in (node.args, node.kwargs))
            function, args = function_and_rest(node.target, args)
            known[node] = function(*args, **kwargs)
    if not is_normal(known[node]):
        raise ValueError("another number where they are flushed to zero")
    return known[node]


def is_normal(real) -> bool:
    """Whether no number is so small that `torch.set_flush_denormal`, which nobody can ask about, makes it zero."""
    numbers = real.flatten().tolist() if isinstance(real, torch.Tensor) else [real]
    return not any(type(n) is float and 0 < abs(n) < torch.finfo(torch.float32).tiny for n in numbers)


def is_only_read(node) -> bool:
    """Whether what uses a node, and the nodes that it and its views come from, writes nothing: some operators do without counting it."""
    reached, seen = [node], set()
    while reached:
        if (node := reached.pop()) not in seen:
            seen.add(node)
            if not all(is_of_constants(user.target) for user in node.users):
                return False
            reached += [n for n in (*node.users, *node.all_input_nodes) if n.meta.get("known")]
    return True


def known_tensor(tensor: TensorVal) -> torch.Tensor | None:
    """The real tensor, if its node is known and nobody has written to what it was made of."""
    if not tensor.node.meta.get("known") or not is_only_read(tensor.node):
        return None
    try:
        with on_real_tensors():
            real = constant_of(tensor.node, {}).expand(tensor.fake.shape)
        return real if real.dtype == tensor.fake.dtype else None
    except Exception:       # it was written to, or the program's own error
        return None


# %% [markdown]
# ## Who asks
#
# `as_number` and `as_item` are for those who need a number of Python, such as `int(t)` or a size: the first takes tensors without
# dimensions, the second any with one element. `from_constants` is asked when an elementwise operation is recorded. If all its operands are
# numbers, the result is a constant of the graph at once. An infinite one, or one that is not a number, is left to the graph, and so is one
# that a setting of the processor makes zero.

# %%
def as_number(value: AbstractValue) -> AbstractValue:
    """A tensor whose value is known as that number; any other value as it is."""
    if type(value) is not TensorVal:
        return value
    if value.number is not None and value.number[1] == value.fake._version:
        return value.number[0]
    known = value.number is None and not value.fake.dim() and (real := known_tensor(value)) is not None
    return const(real.item()) if known else value


def as_item(value: AbstractValue) -> AbstractValue:
    """A tensor that is known to hold one number as that number; any other value as it is."""
    number = as_number(value)
    if type(number) is TensorVal and number.fake.numel() == 1 and (real := known_tensor(number)) is not None:
        return const(real.item())
    return number


def from_constants(target, args, kwargs):
    """The 0-d tensor on the CPU that an elementwise operation makes of these values, or None if they are not all
    known, or its value is not finite."""
    values = [*args, *kwargs.values()]
    if not is_pointwise(target) or not all(
            type(v) in (Const, SymVal) or type(as_number(v)) is Const for v in values):
        return None

    def concrete(v):
        return torch.tensor(as_number(v).value, dtype=v.fake.dtype) if type(v) is TensorVal else v.value
    try:
        with on_real_tensors():
            args, kwargs = [concrete(v) for v in args], {k: concrete(v) for k, v in kwargs.items()}
            function, args = function_and_rest(target, args)
            real = function(*args, **kwargs)
            normal = all(map(is_normal, (*args, *kwargs.values(), real)))
    except Exception:
        return None
    return real if isinstance(real, torch.Tensor) and not real.is_complex() and math.isfinite(real.item()) and normal else None
