# %% [markdown]
# # Tensors: from Python calls to graph nodes
#
# Here the graph grows. An operation on tensors becomes a node that names the very function the program
# called (`torch.nn.functional.layer_norm`, the method `view`, `operator.add`), so that the graph reads like
# the program. What the result looks like is not computed by rules of our own: the same function is called
# on fake tensors, and PyTorch answers. Its answer also decides what happens next. A tensor makes a node. A
# plain number (`x.dim()`, `x.size(0)`) needs no node: it is a constant, because the shapes it depends on
# are guarded. An error means that the program would fail here, and that is for the program to do: the graph
# ends before this instruction, and eager raises.
#
# An argument is written down twice. `to_arg` makes what stands in the node: nodes for tensors and symbols, containers of them,
# constants. `fake_of` makes what the call gets: the same with the fakes in place of nodes. `node_here` is for graphs inside of
# the graph (`library/regions.py`).

# %%
import enum
import keyword
import operator
import types

import numpy
import torch
from torch import get_default_dtype, is_grad_enabled
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from ..ch01_graphs.composites import with_symbols
from ..ch01_graphs.fake import FakeTensor, storage_key
from ..ch01_graphs.floats import OPERATIONS, float32
from ..ch01_graphs.graph import known_history
from ..ch01_graphs.shapes import is_symbolic
from ..ch02_guards.guards import class_lookup
from ..ch02_guards.sources import AttrSource
from ..ch02_guards.torch_guards import METHODS_OF_TENSORS
from ..errors import SkipFrame, Unsupported, marked, words_of
from ..tables import Table
from .builders import contents_of
from .constants import as_item, as_number, from_constants, function_and_rest, is_made_of_constants, known_tensor, name_of_target
from .exceptions import user_error
from .keys import entries
from .library.tensor_names import (
    FILLS, FILLS_WITH_INTEGERS, METADATA, READ_FROM_INPUT, REFUSED_METHODS, TAKES_SIZES, TAKES_VALUE, VIEW_ATTRIBUTES)
from .lookup import MISSING, lookup
from .storage import AS_STRIDED, check_strided, guard_not_a_view, guard_viewed_leaves, guard_views, taken_without_gradients
from .tracer import Tracer, call, guard, is_library, location, names_its_own, say_where, step_of, unsupported
from .values import (
    AbstractValue, BIRTHS, Const, DictVal, ListVal, MethodName, MethodVal, NONE, NUMPY_SCALARS, ObjVal, SliceVal, SymVal, TensorVal,
    TupleVal, const, describe, specialize)
from .wrap import realize, wrap, wrap_constant


def to_arg(tx: Tracer, value: AbstractValue):
    """An fx argument: tensors as nodes, constants as themselves, containers as containers."""
    kind = type(value)
    if kind is Const:
        return value.value.item() if type(value.value) in NUMPY_SCALARS else value.value
    if isinstance(value, (TensorVal, SymVal)):
        return node_here(tx, value.node)
    if kind in (TupleVal, ListVal):
        items = [realize(tx, item) for item in entries(tx, value)]
        if any(type(item) is SymVal or type(item) is Const and type(item.value) is int for item in items):
            items = map(as_number, items)                     # sizes, some of which are tensors
        items = [to_arg(tx, item) for item in items]
        if kind is ListVal:
            return items
        return value.cls(*items) if hasattr(value.cls, "_fields") else tuple(items)
    if kind is SliceVal:
        return slice(*(to_arg(tx, as_number(v)) for v in (value.start, value.stop, value.step)))
    if kind is DictVal:
        return {k: to_arg(tx, realize(tx, v)) for k, (_, v) in entries(tx, value).items() if isinstance(k, str)}
    if kind is ObjVal and isinstance(value.real, (type, torch.Generator)) and value.cls is type:
        return value.real
    if kind is ObjVal and issubclass(value.cls, list):
        return to_arg(tx, contents_of(tx, value))
    if kind is ObjVal and isinstance(value.real, enum.Enum):             # of an IntEnum: PyTorch takes it for a number
        for base, plain in (int, int.__index__), (float, float.__float__), (str, str.__str__):
            if isinstance(value.real, base):
                return plain(value.real)
    unsupported(tx, f"{describe(value)} as an argument of a tensor operation")


DTYPE_OF_CLASS = {int: torch.int64, float: torch.float64, bool: torch.bool, complex: torch.complex128}


def as_dtype(value: AbstractValue) -> AbstractValue:
    """A class of numbers, as in `x.to(float)`, is the dtype that PyTorch takes it for: a text of the graph can name that."""
    return const(DTYPE_OF_CLASS[value.real]) if type(value) is ObjVal and value.cls is type and value.real in DTYPE_OF_CLASS else value


def takes_classes(target) -> bool:
    """Whether what is called takes a class of numbers for a dtype: neither an operator nor a function of the program does."""
    if isinstance(target, types.FunctionType):
        return is_library(target.__code__.co_filename)
    return target != "type" and not isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))


def node_here(tx: Tracer, node: torch.fx.Node) -> torch.fx.Node:
    """`node` in the graph that is being built: one of the graph around it becomes an input (library/regions.py)."""
    if node.graph is tx.graph:
        return node
    if node not in tx.lifted:
        tx.lifted[node] = tx.graph.placeholder(f"outer_{node.name}")
        tx.lifted[node].meta.update(node.meta)
    return tx.lifted[node]


def fake_of(arg, tensors: list):
    """The fx argument with every node replaced by its fake result; the fake tensors are appended to
    `tensors`."""
    def replace(a):
        if type(a) is not torch.fx.Node:
            return a
        fake = a.meta["val"]
        if isinstance(fake, torch.Tensor):
            tensors.append(fake)
        return fake
    return map_aggregate(arg, replace)


# %% [markdown]
# ## One operation
#
# `emit` turns the values into arguments of a node, and these into fakes, on which it runs the call. An in-place operation
# returns the fake it was given; then the result *is* the value we already have, so `y = x.relu_()` gives `y is x` as in
# eager. Whether an operation wrote to one of its arguments shows in the version counters that autograd keeps, on fakes as
# on real tensors. If it wrote to one, that may be a guard or a break more (`storage.py`). If it wrote to none, there may be
# no need for a node: a result without tensors is a constant, one that the trace knows is that value, and what was computed from constants
# only is a number (`known_result`). All else is a node. Of the four operations in front of the `return` in
#
#     def measured(x):
#         y = x.relu_()
#         rows = x.size(0)
#         same = x.contiguous()
#         half = torch.div(x.shape[1], 2, rounding_mode="trunc")
#         return y + same * rows, x.view(-1, half)
#
# one becomes a node as it stands, since it writes. The others leave the number 3, the value of `x` once more, and a constant, whose number
# the trace knows when `view` asks for it:
#
#     x: f32[3, 4] = input
#     relu_: f32[3, 4] = x.relu_()
#     tensor: i64[] = tensor(2, dtype=torch.int64)
#     mul: f32[3, 4] = mul(x, 3)

# %%
FLOAT64 = torch.finfo(torch.float64)
TAKEN_FOR_OTHERS = (numpy.bool_, numpy.complex64)       # for a float or a bool, and for its real part


def emit(tx: Tracer, target, args, kwargs=None) -> AbstractValue:
    """Add a node for a call on values. target: a function, or the name of a method of the first argument."""
    kwargs = kwargs or {}
    if type(target) is str and target in tx.tensors.replaced:
        unsupported(tx, f"PyTorch's Tensor.{target}, which the program has replaced")
    if target in TAKES_SIZES:
        args = [args[0], *map(as_number, args[1:])]
    if (name := name_of_target(target)) in TAKES_VALUE or name == "fill_" and args[0].fake.device.type != "cpu":
        args, kwargs = [*args[:1], *map(as_number, args[1:])], {k: as_number(v) for k, v in kwargs.items()}
    updated = updates(UPDATES[target], args, kwargs) if target in UPDATES else ()
    if any(type(a) is Const and type(a.value) in TAKEN_FOR_OTHERS for a in (*args, *kwargs.values())):
        unsupported(tx, "a NumPy truth value or complex number, which PyTorch takes for a number of another kind")
    if takes_classes(target):
        args, kwargs = [*map(as_dtype, args)], {k: as_dtype(v) for k, v in kwargs.items()}
    fx_args = tuple(to_arg(tx, a) for a in args)
    fx_kwargs = {k: to_arg(tx, v) for k, v in kwargs.items()}
    if "from" in fx_kwargs and name in ("random_", "uniform_"):       # in a text, no argument has this name
        fx_args = (*fx_args, fx_kwargs.pop("from"))
    if odd := next(filter(keyword.iskeyword, fx_kwargs), None):
        unsupported(tx, f"an argument with the name {odd}, a keyword of Python")
    if target is operator.pow and type(fx_args[0]) in (int, float) and fx_args[0] < 0:
        target = torch.pow              # in the text of a graph, `-2.0 ** x` is -(2.0 ** x)
    fakes = []
    fake_args, fake_kwargs = fake_of(fx_args, fakes), fake_of(fx_kwargs, fakes)
    if does_not_fit(fake_args, fake_kwargs, fakes, target, name):
        return emit(tx, target, [*map(specialize, args)], {k: specialize(v) for k, v in kwargs.items()})
    before = [f._version for f in fakes]
    check_operands(tx, name, fakes)
    result = run_fake(tx, target, fake_args, fake_kwargs)
    if name in AS_STRIDED:
        check_strided(tx, name, fakes[0], result, len(fx_args) + len(fx_kwargs) > 3 or "scatter" in name)
    written = [f for f, version in zip(fakes, before) if f._version != version]
    check_written(tx, name, written, fakes, result)
    check_derivative(tx, target, fakes, result)
    if not written and (known := known_result(tx, target, args, kwargs, result)) is not None:
        return known
    node = tx.graph.create_node("call_method" if isinstance(target, str) else "call_function", target, fx_args, fx_kwargs)
    for tensor, field, number in updated:
        setattr(tensor, field, (number, tensor.fake._version))
    for given, fake in zip((*args, *kwargs.values()), (*fake_args, *fake_kwargs.values())):
        if fake is result and type(given) is not TensorVal:                     # `_foreach_add_` returns the list that it was given
            finish_node(tx, node, result)
            return given
    return wrap_result(tx, node, result)


def does_not_fit(args, kwargs, tensors: list, target, name: str) -> bool:
    """Is a number that varies too large for the dtype of a tensor beside it? A kernel may refuse to convert it (`x.fill_(1e300)`), or a
    factor (`alpha`), so it is taken for a constant, whose fit is asked (`refusals.py`). That it fits is a guard. Most operators of Python
    convert whatever it is, and of what gives integers only what fills refuses any. Beside integers a float has the default dtype."""
    factors = [kwargs[k] for k in ("alpha", "beta", "value") if type(kwargs.get(k)) is torch.SymInt]
    if factors and not all(t.dtype is not torch.bool and are_of(t.dtype, factors, ()) for t in tensors):
        return True
    args = (*args, *kwargs.values())
    floats = [x for x in args if type(x) is torch.SymFloat]
    if name in FILLS or name in FILLS_WITH_INTEGERS:
        dtypes = [x for x in args if type(x) is torch.dtype] + [t.dtype for t in tensors]
        integers = [x for x in args if type(x) is torch.SymInt]
        if not are_of(next((d for d in dtypes if d is not torch.bool), torch.bool), integers, floats * (name in FILLS)):
            return True
    if not floats or getattr(target, "__module__", None) == "_operator" and target not in (operator.pow, operator.ipow, operator.setitem):
        return False
    dtypes = {t.dtype for t in tensors} | {x for x in args if type(x) is torch.dtype}
    floating = [d for d in dtypes if d.is_floating_point or d.is_complex] or [get_default_dtype()]
    largest = min(torch.finfo(d).max for d in floating)
    return largest < FLOAT64.max and not all(abs(x) <= largest for x in floats)


def are_of(dtype, integers, floats) -> bool:
    """Whether an integer dtype has these numbers; any other dtype is said to have all. Nobody asks whether 64 bits hold an integer."""
    if dtype is torch.bool or dtype.is_floating_point or dtype.is_complex:
        return True
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    return (dtype is torch.int64 or all(low <= x <= high for x in integers)) and all(float(low) <= x <= float(high) for x in floats)


def known_result(tx: Tracer, target, args, kwargs, result) -> AbstractValue | None:
    """What an operation that has written to nothing gives, where no node is needed to compute it."""
    if not holds_tensor(result) and result is not None:
        return wrap_constant(tx, result)
    if not isinstance(result, FakeTensor) or id(result) in tx.tensors.of_fake:
        return tx.tensors.of_fake.get(id(result))               # `contiguous()` of a contiguous tensor: nothing to do
    if result.dim() or (real := from_constants(target, args, kwargs)) is None or real.dtype != result.dtype:
        return None
    return wrap_result(tx, tx.graph.call_function(torch.tensor, (real.item(),), {"dtype": real.dtype}), result)


# %% [markdown]
# Around the call there are checks, each for something that a fake does not show of the tensor that it stands for: in front of it
# those about the operands, behind it those about what was written and about the derivative.

# %%
def check_operands(tx: Tracer, name: str, fakes) -> None:
    """A view that was taken without gradients, and questions that a fake cannot answer."""
    if is_grad_enabled():
        for fake in fakes:
            if taken_without_gradients(fake):               # whether it requires one is for its base to say
                guard_not_a_view(tx, fake, "a view taken without gradients is used, of an input that is a view of another tensor")
    if name in ("is_conj", "resolve_conj") and any(f.dtype.is_complex for f in fakes):
        unsupported(tx, "whether a tensor is a lazy conjugate, which its fake does not know")
    if name in ("is_neg", "resolve_neg") and any(f.meta.is_neg() for f in fakes):
        unsupported(tx, "whether a tensor is a lazy negative, which its fake does not know")
    if name == "_is_view" and tx.tensors.of_fake[id(fakes[0])].real is not None:
        unsupported(tx, "whether an input is a view, which its fake does not know")


def check_written(tx: Tracer, name: str, written, fakes, result) -> None:
    """What was made under `inference_mode()` is not written outside of it, nor saved for a derivative; these operations are eager's."""
    if tx.tensors.made_in_inference:
        saved = fakes if any(isinstance(r, torch.Tensor) and r.requires_grad for r in pytree.tree_leaves(result)) else []
        if any(storage_key(f) in tx.tensors.made_in_inference for f in (*written, *saved)):
            unsupported(tx, f"{name} of an inference tensor, outside of inference_mode()")
    for fake in written:
        if is_grad_enabled() or fake._is_view() and fake.requires_grad:
            guard_views(tx, fake)
        else:
            guard_viewed_leaves(tx, fake)


def check_derivative(tx: Tracer, target, fakes, result) -> None:
    """An operator of the program without a derivative has in eager that of the operations in its kernel, which its fake does not show."""
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        nodes = [r.grad_fn for r in pytree.tree_leaves(result) if isinstance(r, torch.Tensor)]
        if any(n is not None and n.name() == "torch::autograd::WarnNotImplemented" for n in nodes) \
                or None in nodes and is_grad_enabled() and any(f.requires_grad for f in fakes) and passes_autograd(target):
            unsupported(tx, f"{target} has no derivative (torch.library.register_autograd gives it one)")


def passes_autograd(target) -> bool:
    """Whether the program has registered that autograd is to look into the kernel of an operator."""
    ops = [target] if isinstance(target, torch._ops.OpOverload) else [getattr(target, name) for name in target.overloads()]
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)
               and torch._C._dispatch_kernel_for_dispatch_key_is_fallthrough(op.name(), key)
               for op in ops for key in ("Autograd", "AutogradCPU", "AutogradCUDA"))


# %% [markdown]
# **Counters.** `step += 1` in an optimizer counts in a 0-d tensor on the CPU, and `mu_product *= mu` multiplies one; what follows asks
# for its number. So what the trace adds to such a tensor, and by what it multiplies one, is noted. A tensor that the trace itself has
# made has a known number, which changes. For one that came in, the operations are kept beside it, together with the version counter,
# so that any other write makes them invalid.

# %%
UPDATES = {target: op for op, targets in {"add": (operator.iadd, "add_", "__iadd__", torch._foreach_add_),
                                          "mul": (operator.imul, "mul_", "__imul__", torch._foreach_mul_)}.items() for target in targets}


def updates(op: str, args, kwargs) -> list[tuple]:
    """(tensor, its field, the value of the field) for the 0-d tensors to whose number an operation does `op`, once it has run."""
    tensors, *others = args
    others = [as_number(v) for v in (*others, *kwargs.values())]
    if len(others) == 2 and type(others[1]) is Const and others[1].value == 1:             # `alpha`
        others.pop()
    if len(others) != 1:
        return []
    tensors, found = tensors.items if type(tensors) is ListVal else [tensors], []
    amounts = map(as_number, others[0].items) if type(others[0]) in (ListVal, TupleVal) else others * len(tensors)
    for tensor, amount in zip(tensors, amounts) if len(set(tensors)) == len(tensors) else ():
        if type(tensor) is not TensorVal or tensor.fake.dim() or tensor.fake.dtype not in (torch.float32, torch.float64):
            continue
        if type(amount) is Const and type(amount.value) in (int, float):
            amount = const(held_by(tensor.fake, amount.value))
        elif type(amount) is not SymVal:
            continue
        if tensor.real is not None:
            before, version = tensor.updates or ((), tensor.version)
            if tensor.fake._version == version:
                found.append((tensor, "updates", (*before, (op, amount))))
        elif type(number := as_number(tensor)) is type(amount) is Const:
            found.append((tensor, "number", const(held_by(tensor.fake, OPERATIONS[op](number.value, amount.value)))))
    return found


def held_by(tensor: torch.Tensor, number: float) -> float:
    """What a float32 or float64 tensor makes of a number."""
    return float32(number) if tensor.dtype is torch.float32 else float(number)


# %% [markdown]
# `run_fake` runs the operation on fakes, which is how the trace learns shape and dtype of the result, and every
# error that depends on them. `wrap_result` turns what comes out into values: one for a tensor, one for a symbolic
# number, and for several results one node each that picks it out of the tuple.

# %%
def run_fake(tx, target, args, kwargs):
    try:
        with tx.tensors.mode, torch._C.DisableTorchFunction():
            function, args = function_and_rest(target, args)
            return with_symbols(function, *args, **kwargs)
    except Unsupported as error:
        unsupported(tx, error.reason)
    except Exception as error:
        if "is being modified inplace" in str(error):          # behind a break it would be no view, and nobody would refuse the write
            raise SkipFrame("a write to a view that autograd refuses", location(tx))
        first = (str(error).splitlines() or [""])[0]
        raise marked(say_where(tx, Unsupported(f"{name_of_target(target) or target} raised {type(error).__name__}: {first}")), failed=True)


def holds_tensor(result) -> bool:
    if isinstance(result, torch.Tensor) or is_symbolic(result):
        return True
    return isinstance(result, (tuple, list)) and any(holds_tensor(r) for r in result)


def finish_node(tx, node, result):
    node.meta.update(val=result, location=location(tx), origins=(), born=next(BIRTHS), known=is_made_of_constants(node, result))
    if tx.effects.region:
        node.meta["recompute"] = tx.effects.region


def wrap_result(tx, node, result) -> AbstractValue:
    finish_node(tx, node, result)
    if isinstance(result, torch.Tensor):
        if not isinstance(result, FakeTensor):
            unsupported(tx, f"{node.target} made a real tensor while tracing")
        return tx.tensors.of_fake.setdefault(id(result), TensorVal(node=node, fake=result))
    if is_symbolic(result):
        known = result.node
        return SymVal(node=node, sym=result) if known.is_symbolic() else const(known.hint)
    if result is None:
        return NONE
    if isinstance(result, (tuple, list)):
        items = [wrap_result(tx, tx.graph.call_function(operator.getitem, (node, i)), part)
                 if holds_tensor(part)
                 else wrap_constant(tx, part) for i, part in enumerate(result)]
        return ListVal(items=items) if type(result) is list else TupleVal(items=items, cls=type(result))
    unsupported(tx, f"{node.target} returns a {type(result).__name__}")


# %% [markdown]
# A tensor of the program can get other memory, and stay the object that it is: by an assignment to its `data` (chapter 12), or as
# an argument that an autograd function marks as dirty. Then its value names another node from here on. What was made of it before
# still knows the old fake, so that gets a value of its own.

# %%
def rename_tensor(tx: Tracer, tensor: TensorVal, other: TensorVal) -> TensorVal:
    """`tensor` is what `other` is from here on. Returns its former self."""
    former = TensorVal(node=tensor.node, fake=tensor.fake, real=tensor.real, source=tensor.source, version=tensor.version)
    tensor.node, tensor.fake, tensor.number = other.node, other.fake, None
    tx.tensors.of_fake.update({id(former.fake): former, id(tensor.fake): tensor})
    return former


# %% [markdown]
# ## Attributes and methods of tensors
#
# Metadata is read from the fake. What only the real tensor knows (its numbers, its address) ends the graph.
#
# Names come in groups (`library/tensor_names.py`). Before them comes a table of the attributes whose answer depends on what the trace
# has done so far, such as `grad` (`library/tensor_attributes.py`). What no group has is looked up in the tensor's class, as Python
# would: a method is kept by name, until it is called.

# %%
TENSOR_ATTRIBUTES = Table()          # name -> function(tx, tensor); NotImplemented leaves it to what follows


def tensor_attribute(tx: Tracer, tensor: TensorVal, name: str) -> AbstractValue:
    row, real, cls = TENSOR_ATTRIBUTES.get(name), tensor.real, tensor.cls
    if (found := class_lookup(cls, name)) is not METHODS_OF_TENSORS.get(name) and (added := of_program(tx, tensor, lookup(cls, name))):
        return added
    if row is not None and (answer := row(tx, tensor)) is not NotImplemented:
        return answer
    if name in METADATA:
        return wrap_constant(tx, getattr(tensor.fake, name))
    if name in VIEW_ATTRIBUTES:
        return emit(tx, getattr, [tensor, const(name)])
    if real is not None and name in READ_FROM_INPUT:
        return wrap(tx, said_by(tx, real, name), AttrSource(tensor.source, name))
    if name in ("is_leaf", "grad_fn"):
        return const(said_by(tx, tensor.fake, name))
    if found is MISSING and real is not None and name in real.__dict__:
        return wrap(tx, real.__dict__[name], AttrSource(tensor.source, name))
    if found is MISSING:
        guard(tx, tensor.source, "NO_ATTR", name)
        user_error(AttributeError, f"'Tensor' object has no attribute '{name}'")
    if isinstance(found, (property, types.GetSetDescriptorType)):
        unsupported(tx, f"the tensor attribute {name}")
    return MethodName(self=tensor, name=name)


# %% [markdown]
# A program may add methods to the class, or put others in the place of those that it has. They are inlined as those of any class.
# Operators and facts such as `shape` are asked for in too many ways for that: a program that replaces one of them is not captured.
# PyTorch's own method, which the new one may call, has no name any more by which a graph could call it, and breaks the graph.

# %%
def of_program(tx: Tracer, tensor: TensorVal, found) -> AbstractValue | None:
    """What a function or a property of the program in the class of a tensor makes of it."""
    getter = found.fget if type(found) is property else found
    if type(getter) is not types.FunctionType or is_library(getter.__code__.co_filename):
        return None
    return call(tx, wrap(tx, getter), [tensor]) if getter is not found else MethodVal(func=wrap(tx, found), self=tensor)


def replaced_operator(replaced: dict) -> str | None:
    """The name of one of the methods of tensors that the program has replaced, if it is called without being read."""
    return next((name for name, found in replaced.items() if name not in REFUSED_METHODS and (
        name.startswith("__") or type(found) not in (types.FunctionType, property) or name in METADATA or name in FACTS)), None)


FACTS = {"shape", "size", "dim", "numel", "stride", "storage_offset", "is_leaf", "grad", "grad_fn", "data", "_version"}


def said_by(tx: Tracer, tensor: torch.Tensor, name: str):
    """An attribute. Of a view that a write to its base has made invalid, a question for its history is an error."""
    try:
        return getattr(tensor, name)
    except RuntimeError as error:
        unsupported(tx, f"{name}: {words_of(error)}")


# %% [markdown]
# What follows on such a question may be a hook. Behind a break it hangs on the real tensor, which has no part in what
# the graph has computed from it, so this break comes before the first such use.

# %%
def used_since(tx: Tracer, tensor: TensorVal) -> int | None:
    """The number of the first node that computes from it something that autograd knows; None where there is none."""
    edge = tensor.fake.grad_fn, tensor.fake.output_nr
    return min((v.node.meta["born"] for v in tx.tensors.of_fake.values() if "born" in v.node.meta
                and any(edge in node.next_functions for node in known_history(v.fake))), default=None)


def check_unused(tx: Tracer, tensor: TensorVal, reason: str) -> None:
    """A break before the first use of a tensor whose history the trace has made, which an input gets when it is written."""
    made = tensor.real is None or tensor.fake._version != tensor.version
    if made and (since := used_since(tx, tensor)) is not None:
        try:
            unsupported(tx, reason)
        except Unsupported as error:
            error.step = step_of(tx, since) + 1
            raise

# %% [markdown]
# A shape is a tuple, some of whose items may be symbols. Each symbol that the program asks for is a node of the graph.

# %%
def tensor_shape(tx, tensor) -> AbstractValue:
    return TupleVal(items=[const(int(s)) if type(s) is int else size_node(tx, tensor, d, s)
                           for d, s in enumerate(tensor.fake.shape)], cls=torch.Size)


def size_node(tx, tensor, dim, size) -> AbstractValue:
    """A symbolic size as a node of the graph, one per tensor and dimension."""
    if isinstance(size.node.expr, int):
        return const(size.node.expr)
    known, key = tx.symbols.nodes, (tx.graph, tensor.node, dim)
    if key not in known:
        node = tx.graph.call_function(torch.ops.aten.sym_size.int, (node_here(tx, tensor.node), dim))
        known[key] = wrap_result(tx, node, size)
    return known[key]


# %% [markdown]
# Methods are operations of the graph, and the last line of the next function is all that they need. Those that are questions about
# shapes, strides and places have rows in the table of methods. A tensor that is known to hold a certain number may be asked for it.

# %%
NUMBER_METHODS = {"__int__": int, "__float__": float, "__index__": operator.index, "__bool__": bool}


def call_tensor_method(tx: Tracer, tensor: TensorVal, name: str, args, kwargs) -> AbstractValue:
    if name in ("item", "tolist", *NUMBER_METHODS) and not args:
        if type(known := as_item(tensor)) is Const and (name != "tolist" or not tensor.fake.dim()):
            return const(NUMBER_METHODS[name](known.value)) if name in NUMBER_METHODS else known
        if name == "tolist" and (real := known_tensor(tensor)) is not None:
            return wrap_constant(tx, real.tolist())
    if name in REFUSED_METHODS or name == "to" and any(type(as_dtype(a)) is ObjVal for a in args):
        unsupported(tx, f"Tensor.{name}() needs the numbers of the tensor or changes what it is")
    python = METHODS_OF_TENSORS.get(name)
    if type(python) is types.FunctionType and not names_its_own(tx, python):
        return call(tx, wrap(tx, python), [tensor, *args], kwargs)
    return emit(tx, name, [tensor, *args], kwargs)
