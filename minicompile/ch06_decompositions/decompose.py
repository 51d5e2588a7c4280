# %% [markdown]
# # Running the table
#
# Nobody looks for parts of the graph here and replaces them (but for products of complex numbers, further below). The graph is
# *executed* on fake tensors, node by node, under a recorder that writes down the ATen calls it sees; a call that has a decomposition is
# not written down, the decomposition is run instead, and its calls are seen in turn. What is left when the run ends is the new
# graph. Shapes, dtypes and strides of every new node come for free, and so does the recursion: a layer norm
# that calls `mean` never asks how `mean` is done.
#
# `F.gelu(x).sum(1)` of a bfloat16 tensor is two ATen calls. This is what they come to (printed by `print_graph`). The GELU is
# computed in float32 and rounded once, the sum adds up in float32, and all operands of a node have one dtype:
#
#     x: bf16[4, 8] = input
#     _to_copy_default: f32[4, 8] = aten._to_copy.default(x, dtype=torch.float32)
#     mul_tensor: f32[4, 8] = aten.mul.Tensor(_to_copy_default, 0.5)
#     mul_tensor_1: f32[4, 8] = aten.mul.Tensor(_to_copy_default, 0.7071067811865476)
#     erf_default: f32[4, 8] = aten.erf.default(mul_tensor_1)
#     add_tensor: f32[4, 8] = aten.add.Tensor(erf_default, 1)
#     mul_tensor_2: f32[4, 8] = aten.mul.Tensor(mul_tensor, add_tensor)
#     _to_copy_default_1: bf16[4, 8] = aten._to_copy.default(mul_tensor_2, dtype=torch.bfloat16)
#     _to_copy_default_2: f32[4, 8] = aten._to_copy.default(_to_copy_default_1, dtype=torch.float32)
#     sum_dim_int_list: f32[4] = aten.sum.dim_IntList(_to_copy_default_2, [1])
#     _to_copy_default_3: bf16[4] = aten._to_copy.default(sum_dim_int_list, dtype=torch.bfloat16)
#     return (_to_copy_default_3,)

# %%
import contextlib
import functools
import itertools
import math
import operator
from typing import Callable

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from ..ch01_graphs.fake import FakeTensor
from ..ch01_graphs.floats import Float
from ..ch01_graphs.graph import call_node, map_args
from ..ch01_graphs.layouts import inverse, lies_as_well_as_can_be, memory_order
from ..ch01_graphs.operators import leaves
from ..ch01_graphs.recipes import NotKept, asked, fake_call
from ..ch01_graphs.shapes import expr_of
from ..ch01_graphs.trace import Recorder, run_recorded
from ..ch05_autograd.cleanup import clean, is_always_view, may_refuse
from .primitives import PRIMITIVES
from .table import HALF, TABLE

aten = torch.ops.aten


def expand(func, args, kwargs):
    """The result of the decomposition of one ATen call, or NotImplemented if it has none for these arguments.

    Operators that PyTorch itself defines as compositions (`reshape`, `to`) come apart by its own definition.
    They show up here when a decomposition calls them: below autograd nothing else opens them.
    """
    rule = TABLE.get(func)
    if rule is not None:
        return rule(*args, **kwargs)
    if func not in PRIMITIVES and _is_composite(func):
        return func.decompose(*args, **kwargs)
    return NotImplemented


@functools.cache
def _is_composite(func) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


# %% [markdown]
# ## The oracle
#
# The same few lines on *real* tensors are a backend: a mode under which a program runs on primitives only.
# It needs no graph, no fakes and no capture, so it tests the table by itself: run an operator with and
# without, compare. Nothing below needs it.

# %%
class Decomposed(TorchDispatchMode):
    """Eager execution in which each ATen operator that has a decomposition runs as that. `used` collects
    them; `leaves` collects the operators that ran as they are."""

    def __init__(self):
        super().__init__()
        self.used: set = set()
        self.leaves: set = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:
            out = expand(func, args, kwargs)
        if out is NotImplemented or any(out is x for x in args):    # autograd wants a view to be a new object
            self.leaves.add(func)
            return func(*args, **kwargs)
        self.used.add(func)
        return out


# %% [markdown]
# ## The recorder
#
# `Decomposer` is the recorder of chapter 1, which asks `expand` before it writes a call down. It stays active while a rule
# runs (`with self`), so that it gets the calls of the rule. A rule may decline when it has made some calls already: `mark`
# remembers the last node before it, and `erase_after` drops what came behind. `literal` switches the rules off, for an
# operator that is to be written down as it is.
#
# `repeat` spares work. Equal layers ask for the same expansion again and again, so what a call was expanded to is kept, as a
# `Pattern`, and written down once more for the next one. How, says the section "The same again".

# %%
class Decomposer(Recorder):
    """A recorder that records what decompositions are made of. While `literal`, calls are recorded as
    they are. patterns: what was expanded, by its `question`; `questions` have been asked."""

    literal, questions = False, 0

    def __init__(self):
        super().__init__()
        self.patterns: dict[tuple, Pattern] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self.literal:
            mark = self.mark()
            with self:
                out = expand(func, args, kwargs)
            if out is not NotImplemented:       # autograd wants a view to be a new object
                return self._alias(out) if any(out is x for x in args) else out
            self.erase_after(mark)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def repeat(self, rule, args, kwargs, expand: Callable, node: fx.Node | None = None):
        """What `expand()` gives for a call of `rule`; where there is a pattern for it, this is written again. node: what asks, if its
        fake is a promise. An expansion that asks in turn (a list, for each of its elements) is not kept: its parts are."""
        key, operands = question(self, rule, args, kwargs, node), [x for x in leaves(args, kwargs) if isinstance(x, FakeTensor)]
        if key is not None and (pattern := self.patterns.get(key)) is not None:
            return pattern.again(self, operands)
        mark, self.questions = self.mark(), self.questions + 1
        number, out = self.questions, expand()
        if key is not None and number == self.questions:
            with contextlib.suppress(NotKept):
                self.patterns[key] = Pattern(self, mark, operands, out)
        return out

    def mark(self) -> fx.Node | None:
        return next(iter(reversed(self.graph.nodes)), None)

    def since(self, mark: fx.Node | None) -> list[fx.Node]:
        """The nodes recorded after `mark`, newest first."""
        return list(itertools.takewhile(lambda node: node is not mark, reversed(self.graph.nodes)))

    def erase_after(self, mark: fx.Node | None):
        """Drop what a decomposition recorded before it declined."""
        for node in self.since(mark):
            self.graph.erase_node(node)


# %% [markdown]
# ## What the operator promised
#
# Two promises of the operator must survive: dtype and shape, and the order of dims in memory, because a later `view` or a
# library call may depend on it. The fake of the original node says what they are. `as_promised` compares what came out with it,
# result by result. An outcome with other strides gets a `clone` in the right order (`_ordered`), which is
# pointwise and fuses away. If a dtype or a shape differs, the decomposition is not used.

# %%
def as_promised(node: fx.Node, out):
    """`out` with the dtypes, shapes and strides that the fakes of `node` have, or NotImplemented if it cannot
    have them. Of several results those that nothing reads do not matter; and saved statistics, which follow
    the first result, are cast: in which float dtype a kernel returns them differs by device."""
    wanted = node.meta["val"]
    if not isinstance(wanted, (list, tuple)):
        return _fitted(out, wanted)
    if not isinstance(out, (list, tuple)) or len(out) != len(wanted):
        return NotImplemented
    read, results = read_results(node), []
    for i, (o, w) in enumerate(zip(out, wanted)):
        if i > 0 and all(isinstance(t, torch.Tensor) and t.is_floating_point() for t in (o, w)):
            o = o.to(w.dtype)
        results.append(_fitted(o, w) if i in read or None in read else o)
    return NotImplemented if any(r is NotImplemented for r in results) else results


def read_results(node: fx.Node) -> frozenset:
    """Which of several results are read, by their numbers; None stands for all of them at once."""
    return frozenset(user.args[1] if user.target is operator.getitem else None for user in node.users)


def _fitted(out, wanted):
    if isinstance(wanted, (list, tuple)):
        parts = [_fitted(o, w) for o, w in zip(out, wanted, strict=True)]
        return NotImplemented if any(p is NotImplemented for p in parts) else parts
    if not isinstance(wanted, torch.Tensor):
        return out
    if not isinstance(out, torch.Tensor) or out.dtype != wanted.dtype or out.shape != wanted.shape:
        return NotImplemented
    return _ordered(out, wanted)


def _ordered(out, wanted):
    """`out` with the strides of `wanted`, by a copy if they differ. Only dense layouts can be asked for."""
    if lies_as_well_as_can_be(out, wanted):
        return out
    order = memory_order(wanted.shape, wanted.stride())
    copy = out.permute(order).clone(memory_format=torch.contiguous_format)
    return copy.permute(inverse(order))


# %% [markdown]
# ## The same again
#
# Twelve equal layers ask for the same expansion twelve times, and an optimizer asks once for each parameter. What a rule
# does depends on the operator, on how its operands lie in memory, and on the arguments that are not data. So the nodes of
# one expansion serve as a *pattern* for the next one with an equal `question`: they are written down again, with other
# operands, and no rule runs. In a pattern, nodes are numbers: first come the operands, then what was written, in order. What
# cannot be told like this (symbolic sizes, constants that a rule makes) is expanded each time.
#
# `again` goes through the calls of a `Pattern` as an interpreter does, with what is now at those places. Which form a result has is not
# computed once more, either: the primitives were asked the same before, and chapter 1 keeps their answers (`recipes.py`).

# %%
class Place(int):
    """In a pattern: what has this number."""


class Pattern:
    """What one call was expanded to: the nodes after `mark`, and its result `out`."""

    def __init__(self, recorder: Recorder, mark: fx.Node | None, operands: list[FakeTensor], out):
        places = {recorder.node_of(t): Place(k) for k, t in reversed([*enumerate(operands)])}

        def place(a):
            if isinstance(a, fx.Node) and a not in places:
                raise NotKept
            return places[a] if isinstance(a, fx.Node) else a

        self.calls: list[tuple] = []
        for node in reversed(recorder.since(mark)):
            if node.op != "call_function":
                raise NotKept
            self.calls.append((node.target, *map_args(place, (node.args, node.kwargs))))
            places[node] = Place(len(operands) + len(self.calls) - 1)
        self.out = map_args(lambda x: place(recorder.node_of(x)) if isinstance(x, torch.Tensor) else x, out)

    def again(self, recorder: Recorder, operands: list[FakeTensor]):
        """Write the nodes once more, for these operands; the result."""
        values, nodes = list(operands), [recorder.node_of(t) for t in operands]

        def value_at(a):
            return values[a] if type(a) is Place else 1.0 if isinstance(a, Float) else a       # on which no form depends

        def node_at(a):
            return nodes[a] if type(a) is Place else a

        with torch._C._DisableTorchDispatch():
            for target, *call in self.calls:
                args, kwargs = map_args(value_at, call)
                values.append(target(*args) if target is operator.getitem else fake_call(target, args, kwargs))
                nodes.append(recorder.write(target, *map_args(node_at, call), values[-1]))
        return map_args(value_at, self.out)


# %% [markdown]
# A question has all that the answer depends on: of a tensor its layout, and which of the operands are one node;
# the exact value of any other argument; and of the results what `as_promised` looks at. A number that is computed at run
# time is known by its formula.

# %%
def question(recorder: Recorder, rule, args, kwargs, node: fx.Node | None = None) -> tuple | None:
    """Equal for two calls of `rule` that are expanded to the same nodes, and None if that cannot be told. node: what makes the call, if
    `as_promised` will look at it."""
    names: dict = {}

    def of(x):
        kind = type(x)
        if kind is FakeTensor:
            return asked(x, False, False), names.setdefault(recorder.node_of(x), len(names))
        if kind is float:
            return kind, repr(x)                 # -0.0 is not 0.0
        if kind is torch.SymFloat:
            return kind, expr_of(x)
        return tuple([of(item) for item in x]) if isinstance(x, (list, tuple)) else asked(x, False, False)

    wanted = None if node is None else node.meta["val"]
    with contextlib.suppress(NotKept):
        return rule, of(args), tuple(kwargs), of(tuple(kwargs.values())), asked(wanted, False, False), \
            isinstance(wanted, (list, tuple)) and read_results(node)
    return None


# %% [markdown]
# ## Products of complex numbers
#
# No kernel is generated for complex numbers. But a rotary embedding is often written with them: pairs of real numbers are viewed as
# complex ones, multiplied by `e^(i t)`, and the products viewed as pairs again. There the pairs are the operands, and the product four
# real ones, which fuse with what stands around. So `view_as_real` of a product looks at what has been recorded: `parts` finds the
# real and the imaginary part of each factor, and `product_in_pairs` puts those of the product side by side. The call of the complex
# product has no reader then, and is dropped.

# %%
def product_in_pairs(recorder: Recorder, node: fx.Node, product: torch.Tensor):
    """What `view_as_real` gives of a product that nothing else reads, if a factor is a view of pairs; else NotImplemented."""
    recorded = recorder.node_of(product)
    if not of_tensors(recorded) or product.dtype not in (torch.complex64, torch.complex128) or \
            any(user.target is not aten.view_as_real.default for user in node.args[0].users) or \
            not any(aten.view_as_complex.default in (f.target, *(a.target for a in f.all_input_nodes)) for f in recorded.all_input_nodes):
        return NotImplemented
    (a, b), (c, d) = map(parts, recorded.args)
    return torch.stack((a * c - b * d, a * d + b * c), -1)


def of_tensors(node: fx.Node) -> bool:
    """Is it a product of two tensors?"""
    return node.target is aten.mul.Tensor and len(node.all_input_nodes) == len({*node.args})


def parts(factor: fx.Node) -> tuple:
    """The real and the imaginary part of a recorded factor."""
    value = factor.meta["val"]
    if not value.is_complex():
        return value, 0                 # and no less: what is infinite times 0 is NaN
    if factor.target is aten._conj.default:
        real, imaginary = parts(factor.args[0])
        return real, -imaginary
    if value.meta.is_conj():            # a view of a conjugate, which no operator reads as numbers
        pairs = aten.view_as_real.default(aten._conj.default(value))
        return pairs.select(-1, 0), -pairs.select(-1, 1)
    pairs = factor.args[0].meta["val"] if factor.target is aten.view_as_complex.default else aten.view_as_real.default(value)
    return pairs.select(-1, 0), pairs.select(-1, 1)

# %% [markdown]
# ## Zeros without memory
#
# The derivative of `sgn`, and so the second one of `abs`, is a tensor that holds nothing but the fact that it is zero. Eager's product of
# it and another tensor is such a zero again, whatever the other holds, and so are its quotient and its views. As a primitive it is numbers
# in memory, whose product with an infinity is NaN. So what eager knows to be zero is found before the graph is interpreted, and becomes
# zeros there.

# %%
ANY, FIRST, ALL = any, operator.itemgetter(0), all
STAY_ZERO = {aten.mul.Tensor: ANY, aten.mul.Scalar: ANY, aten.dot.default: ANY, aten.vdot.default: ANY, aten.linalg_cross.default: ANY,
             aten.div.Tensor: lambda known: known[0] and not known[1], aten.div.Scalar: FIRST, aten.add.Tensor: ALL, aten.sub.Tensor: ALL}


def zeros_without_memory(gm: fx.GraphModule) -> set[fx.Node]:
    """The nodes whose results eager knows to be zero."""
    zeros: set[fx.Node] = set()
    for node in gm.graph.nodes:
        rule = FIRST if is_always_view(node.target) or node.target is operator.getitem else STAY_ZERO.get(node.target)
        known = zeros and rule is not None and rule([isinstance(a, fx.Node) and a in zeros for a in node.args[:2]])
        if known or node.target is aten._efficientzerotensor.default:
            zeros.add(node)
    return zeros


# %% [markdown]
# ## The stage
#
# The stage itself interprets the graph once, with a recorder that writes down what the rules call. `call` computes each node. If a node
# with an equal question came before, its pattern is written again. Otherwise `expanded` runs the rule and looks whether the
# results are as the node promises. If they are not, and no copy would mend that, what the rule has written is erased, and the
# operator itself is written down (`literal`): a library call. What was expanded becomes a pattern. In the end the notes that other
# stages have left on the node, such as "compute this again in backward", go to all nodes that have come from it. One does not go to all:
# an `index` may refuse what the program asked for (chapter 5, `cleanup.py`), and stays though nobody reads it; but the positions
# that a padding by reflection is expanded to are inside of its operand, so its `index` goes.
#
# Decompositions repeat themselves: each asks for its own 0, its own float32 copy of the same bfloat16 tensor.
# The cleanup of chapter 5 (`clean`) makes equal nodes one, and drops what nothing reads.

# %%
def decompose(gm: fx.GraphModule) -> fx.GraphModule:
    """The functional ATen graph `gm` over primitives, and operators that nothing decomposes.

    Every node keeps `location` and names the node it came from in `origins`. The input graph is unchanged.
    """
    recorder = Decomposer()
    inputs = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            inputs.append(node.meta["val"])
            recorder.placeholder(node.name, node.meta["val"]).meta.update(node.meta)

    def expanded(node, args, kwargs, mark):
        out = call_node(gm, node, args, kwargs)
        if node.target in TABLE:
            out = as_promised(node, out)
            if out is NotImplemented:
                recorder.erase_after(mark)
                recorder.literal = True
                out = call_node(gm, node, args, kwargs)
                recorder.literal = False
        return out

    zeros = zeros_without_memory(gm)

    def call(node, args, kwargs):
        mark = recorder.mark()
        expand = functools.partial(expanded, node, args, kwargs, mark)
        by_zero = node.target is aten.div.Tensor and node.args[1] in zeros          # which is infinite in eager, whatever the sign
        if by_zero or node in zeros and node.target in STAY_ZERO:
            val = node.meta["val"]
            number = 0 if not by_zero else math.nan if node.args[0] in zeros else math.inf
            out = torch.full(val.shape, number, dtype=val.dtype, device=val.device)
        else:
            out = product_in_pairs(recorder, node, *args) if node.target is aten.view_as_real.default else NotImplemented
        out = NotImplemented if out is NotImplemented else as_promised(node, out)
        if out is NotImplemented:
            recorder.erase_after(mark)
            out = recorder.repeat(node.target, args, kwargs, expand, node) if node.target in TABLE else expand()
        notes = {k: v for k, v in node.meta.items() if k not in ("val", "location", "origins")}
        refuses = may_refuse(node)
        for recorded in recorder.since(mark) if notes else ():
            recorded.meta.update(notes)
            if not refuses and may_refuse(recorded):
                del recorded.meta["asked"]
        return out

    with torch.no_grad(), torch._C._DisableAutocast(), recorder:     # the graph has its casts already
        outputs = run_recorded(recorder, gm, inputs, call)
    result = recorder.finish(outputs)
    result.meta.update(gm.meta)
    return clean(result)


# %% [markdown]
# ## The spec
#
# What the primitives promise to code generators, as a function that reads a graph and lists the nodes that
# break a promise.

# %%
def violations(gm: fx.GraphModule) -> list[str]:
    """One line per node that is not regular; an empty list for every graph that `decompose` returns."""
    found = []
    for node in gm.graph.nodes:
        primitive = PRIMITIVES.get(node.target) if node.op == "call_function" else None
        if primitive is None or primitive.category not in ("pointwise", "reduction"):
            continue
        operands = [n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta["val"], torch.Tensor)]
        if any(t.is_complex() for t in operands):
            continue
        if primitive.category == "pointwise":
            compared = operands[1:] if node.target is aten.where.self else operands
            if len({t.dtype for t in compared}) > 1:
                found.append(f"{node.format_node()}: operands of several dtypes")
            if node.kwargs.get("alpha", 1) != 1:
                found.append(f"{node.format_node()}: alpha")
        else:
            dims = node.args[1] if len(node.args) > 1 else None
            dims = [dims] if isinstance(dims, int) else dims
            if not dims or any(d < 0 for d in dims) or node.kwargs.get("dtype") is not None:
                found.append(f"{node.format_node()}: dims or dtype not explicit")
            if primitive.op not in EXTREMES and operands[0].dtype in HALF:
                found.append(f"{node.format_node()}: accumulates in half precision")
    return found


EXTREMES = (aten.amax.default, aten.amin.default, aten.argmax.default, aten.argmin.default)
