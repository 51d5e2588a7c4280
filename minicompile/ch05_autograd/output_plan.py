# %% [markdown]
# # What the caller gets
#
# A compiled graph computes fresh tensors. Eager programs also return their inputs, views of their inputs,
# and several views of one tensor, and what the caller does next may depend on it: writing to one shows in
# the other, and gradients flow through the view. So each output of the program has a *recipe*, carried out
# outside the compiled code by ordinary PyTorch (`outputs.py`):
#
# - `Constant`: a Python value, or a size computed from the inputs' sizes;
# - `Result(k)`: the k-th tensor that the compiled graph returns;
# - `Input(i)`: that input, unchanged as an object;
# - `Owner(k)`: the k-th of the detached tensors that several outputs are, or are views of, each with a recipe of its own;
# - `ViewOf(of, steps, detach, no_grad, apart)`: view operators applied to one of these again. A view that is taken
#   while gradients are off does not lead them back, and yet says that it requires them, and a later write to it that brings gradients
#   is an error. `x.data` is detached and counts its versions apart from `x`, so that autograd does not hear of what the caller writes
#   to it.
#
# What decides is who else can see the memory. Of the transpose in
#
#     def alone(x):
#         return (x + 1).t()
#
# nobody can tell that it is a view, so the graph returns it as a tensor of its own:
#
#     Result(index=0)
#
# Here the caller may write to the sum and look at its transpose. So the graph returns the sum only, and the transpose is taken anew:
#
#     def both(x):
#         y = x + 1
#         return y, y.t()
#
#     Result(index=0)
#     ViewOf(of=Result(index=0), steps=[aten.t.default()], detach=False, no_grad=False, apart=False)
#
# And here the graph has nothing to return:
#
#     def handed_out(x):
#         return x.t(), x.data
#
#     ViewOf(of=Input(index=0), steps=[aten.t.default()], detach=False, no_grad=False, apart=False)
#     ViewOf(of=Input(index=0), steps=[], detach=True, no_grad=False, apart=True)
#
# To write a recipe one has to know from which tensor an output descends, by which views, and with which history.

# %%
import operator
from dataclasses import dataclass
from typing import Any, Sequence

import torch
from torch import fx

from ..ch01_graphs.fake import FakeTensor
from ..ch01_graphs.layouts import each_has_its_place
from ..ch01_graphs.operators import owner_of
from ..ch01_graphs.shapes import expr_of
from ..ch01_graphs.trace import Recorder
from ..errors import Unsupported
from .aliases import Step, viewed_argument
from .schemas import is_mutable

aten = torch.ops.aten


@dataclass
class Constant:
    value: Any


@dataclass
class Result:
    index: int


@dataclass
class Input:
    index: int


@dataclass
class Owner:
    index: int


@dataclass
class ViewOf:
    of: Result | Input | Owner
    steps: list[Step]
    detach: bool
    no_grad: bool
    apart: bool = False

# %% [markdown]
# ## Following views back
#
# Each tensor of the recording descends from a *root*, a graph input or the result of an operator that
# allocates, by view steps. In-place operators return the tensor they were given, which is no step.

# %%
def view_chain(node: fx.Node, lent: dict | None = None) -> tuple[fx.Node, list[Step]]:
    """The root whose memory `node` shows, and the views that lead from the root to it. lent: for further nodes, as in `viewed_argument`,
    one for each that they are results of."""
    steps: list[Step] = []
    while (base := viewed_by(node, lent)) is not None:
        source, index = made_by(node)
        if not is_mutable(source.target):
            steps.append(Step(source.target, source.args[1:], source.kwargs, index))
        node = base
    return node, steps[::-1]


def viewed_by(node: fx.Node, lent: dict | None = None) -> fx.Node | None:
    """The node whose memory `node` shows, one step back; None for a root."""
    source, _ = made_by(node)
    if source.op != "call_function" or not isinstance(source.target, torch._ops.OpOverload) or not isinstance(node.meta["val"], FakeTensor):
        return None
    return viewed_argument(source, node.meta["val"], None if lent is None else lent.setdefault(source, {}))


def made_by(node: fx.Node) -> tuple[fx.Node, int | None]:
    """The call that made the value of `node`, and which of its several results this is."""
    return node.args if node.target is operator.getitem else (node, None)


def computes(node: fx.Node) -> bool:
    """Whether `node` is a call that is no view, and takes no item of several results."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if isinstance(node.target, torch._ops.OpOverload) and is_mutable(node.target):
        return True
    if isinstance(values := node.meta["val"], (list, tuple)):
        lent: dict = {}
        return any(not isinstance(v, FakeTensor) or viewed_argument(node, v, lent) is None for v in values)
    return viewed_by(node) is None


# %% [markdown]
# Why does this matter? An output that is a view of an input has to be a view of *that* tensor when the compiled
# function returns, since the program may write to one and look at the other. A compiled graph returns new tensors.
# So such an output is not returned by the graph at all. What is returned is a *recipe*: take input 2, transpose
# it, take row 3. The recipe is carried out on the real tensor after the graph has run. This is right only if the
# views have the gradient that eager's have, which is not so if a function of the program with a backward of its
# own stands between.

# %%
def has_own_gradient(view, source) -> bool:
    """Is there an autograd function of the program between a view and its source, or a view taken while
    gradients were off? Then repeating the view operators outside of the graph would give another gradient."""
    node, end = view.grad_fn, torch.autograd.graph.get_gradient_edge(source).node if source.requires_grad else None
    while node is not None and node is not end:
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        node = node.next_functions[0][0] if node.next_functions else None
    return node is not end


def viewed_without_gradients(view) -> bool:
    """Is it a view of the kind to which autograd lets nobody write later, with gradients on?"""
    of = torch._C._autograd
    if view.requires_grad:
        return view.grad_fn is None
    return view._is_view() and of._get_creation_meta(view) == of.CreationMeta.NO_GRAD_MODE


# %% [markdown]
# What `x.data` gives has the memory of `x` as well, and a version counter of its own. In the recording both are one node, but of the fakes
# one can ask whether a write to one is noticed by the other.

# %%
def counted_apart(view, source) -> bool:
    """Does autograd not hear of a write to `view`, a tensor that has the memory of `source`?"""
    if view is source or view.is_inference() or source.is_inference():
        return False
    before, known = view._version, source._version
    torch.autograd.graph.increment_version(view)
    apart = source._version == known
    torch._C._autograd._unsafe_set_version_counter((view,), (before,))
    return apart


# %% [markdown]
# `OutputPlan` writes the recipes. It begins by sorting: `members` groups the outputs by the root whose memory they show, `owned` by the
# tensor that they belong to for autograd, and `sources` has for each root the tensor that views are taken from, an input or the root's
# fake. If the root is no input and requires a gradient, and none of several outputs that show it does, the source is a detached alias.
#
# `recipe` handles what is no tensor. To autograd a view belongs to one tensor, its `_base`, and what is written to one of
# them gives a history to both. A detached alias of the root is such an *owner*, too: where several outputs belong to one, it is made once,
# and they are views of it. All others come from the source (`from_source`), in this order:
#
# 1. An output that is alone with its root, which is no input, becomes an ordinary result, unless it can be told to be a view after
#    all: by autograd, which forbids to write to one of several views of one operator (`marked`), by a conjugation that has not been
#    carried out (`lazy`), or by elements that share a place (`repeats`, as those of `expand`): when a part of it is written, autograd makes
#    room for the gradient of its base, and an output would be its own. Of a tensor that no derivative may have saved, writes are counted
#    for nobody, and what `torch.zeros` gives, which has a counter of its own in the recording, is the result.
# 2. What no recipe can reproduce is refused with a reason, and the graph runs operator by operator: a view that requires a gradient
#    though its source does not, or whose derivative is not that of its view operators.
# 3. What is left is a list of view steps from the input or from the root, which then becomes a result. `detach` and `no_grad` say
#    with which history they are repeated.

# %%
class OutputPlan:
    """Recipes for the outputs of a recording (`recipe`), the fakes of the `results` and the recipes of the `owners` that they need.
    position: of each input, by its placeholder."""

    def __init__(self, recorder: Recorder, outputs: Sequence, entries: list, position: dict[fx.Node, int]):
        self.recorder, self.position = recorder, position
        self.results, self.owners, self.index_of = [], {}, {}
        self.differentiated = any(isinstance(t, FakeTensor) and t.requires_grad for t in (*outputs, *entries))
        self.members: dict[fx.Node, dict[int, Any]] = {}
        self.owned: dict[int, set[int]] = {}
        for o in outputs:
            if isinstance(o, FakeTensor):
                self.members.setdefault(self.chain(o)[0], {})[id(o)] = o
                self.owned.setdefault(id(owner_of(o)), set()).add(id(o))
        self.sources = {root: entries[position[root]] if root in position else root.meta["val"] for root in self.members}
        for root, views in self.members.items():
            source, apart = self.sources[root], not any(o.requires_grad for o in views.values())
            if source.requires_grad and len(views) > 1 and root not in position and apart:
                self.sources[root] = source.detach()                # nobody differentiates it, or can any more

    def chain(self, o) -> tuple[fx.Node, list[Step]]:
        return view_chain(self.recorder.node_of(o))

    def result(self, fake) -> Result:
        self.index_of.setdefault(id(fake), len(self.results))
        if self.index_of[id(fake)] == len(self.results):
            self.results.append(fake)
        return Result(self.index_of[id(fake)])

    def recipe(self, o):
        if not isinstance(o, FakeTensor):
            return Constant(expr_of(o))
        (root, steps), owner = self.chain(o), owner_of(o)
        source = self.sources[root]
        if not o.requires_grad and owner is not source and owner is not source._base and len(self.owned[id(owner)]) > 1:
            of, before = self.owner(owner)
            return of if o is owner else ViewOf(of, steps[before:], False, viewed_without_gradients(o))
        return self.from_source(o, root, steps)

    def owner(self, owner) -> tuple[Owner, int]:
        """A detached alias of the root, and how many steps lead to it."""
        root, steps = self.chain(owner)
        if id(owner) not in self.owners:
            self.owners[id(owner)] = self.from_source(owner, root, steps)
        return Owner(list(self.owners).index(id(owner))), len(steps)

    def from_source(self, o, root: fx.Node, steps: list[Step]):
        source, known = self.sources[root], root in self.position
        # Autograd remembers of what may not be written in place that it is one of several views that an operator gave, or of gradients off
        marked = o.requires_grad and o._base is source and (any(step.index is not None for step in steps) or has_own_gradient(o, source))
        marked = marked or o._is_view() and o.requires_grad and viewed_without_gradients(o)
        apart = not o.requires_grad and counted_apart(o, source)
        lazy = o.meta.is_conj() or o.meta.is_neg()          # which `numpy()` and `view_as_real` refuse
        repeats = o._base is source and source.requires_grad and not each_has_its_place(o) and not has_own_gradient(o, source)
        if not known and len(self.members[root]) == 1 and not marked and not lazy and not repeats:
            return ViewOf(self.result(o), [], False, False, apart) if apart and self.differentiated else self.result(o)
        if o.requires_grad and not source.requires_grad:
            raise Unsupported("an output requires a gradient and the tensor it is a view of does not")
        if o.requires_grad and o is not source and o._base is not source:
            raise Unsupported("an in-place operation gave a detached alias of a tensor a gradient of its own")
        no_grad = bool(steps) and viewed_without_gradients(o)
        if o.requires_grad and not no_grad and has_own_gradient(o, source):
            raise Unsupported("an output is a view, and its gradient is not that of its view operators")
        of = Input(self.position[root]) if known else self.result(source)
        plain = not steps and (o is source or o.requires_grad)
        elsewhere = o._base is not source and o._base is not source._base
        detach = not steps or not o.requires_grad and (source.requires_grad or elsewhere)
        if steps and o._base is None and not o.is_inference():      # what was detached at last is no view, of which a write would be known
            steps, detach = [*steps, Step(aten.detach.default, (), {})], False
        return of if plain else ViewOf(of, steps, detach, no_grad, apart)


def places_of(recipes: list, outputs: Sequence) -> dict[int, tuple[int, bool]]:
    """`Joint.places`."""
    places = {}
    for place, (recipe, o) in enumerate(zip(recipes, outputs)):
        if isinstance(recipe, Result):
            places[recipe.index] = place, False
        elif isinstance(recipe, ViewOf) and isinstance(recipe.of, Result) and o.requires_grad:
            places.setdefault(recipe.of.index, (place, True))
    return places
