# %% [markdown]
# # Outputs
#
# A graph computes each tensor once, in memory of its own. What the caller gets may be several tensors in one memory, an input, or a
# constant. So an output is made from what the graph computes by a *recipe* (`output_plan.py`). For
#
#     def overlapping(x):
#         y = x * 2
#         return y, y[0], y.t(), x + 1
#
# the graph has two results, and the four recipes say what to do with them:
#
#     Result(index=0)
#     ViewOf(of=Result(index=0), steps=[aten.select.int(0, 0)], detach=False, no_grad=False, apart=False)
#     ViewOf(of=Result(index=0), steps=[aten.t.default()], detach=False, no_grad=False, apart=False)
#     Result(index=1)
#
# To the engine the results have to look as eager's (`as_new`). None of them may be a view that was made in here, because it forbids
# writing to one: a detached alias is none, and has the same version counter. And when the program writes to the real part of a complex
# tensor that is no view, the engine takes the place where that begins in memory for a number of real elements. So it must be zero.

# %%
from typing import Any, Callable, Sequence

import torch

from ..ch01_graphs.layouts import flat_storage
from .callables import with_grad_mode
from .joint import Joint, depends_on_sizes, resolver
from .output_plan import Constant, Input, Owner, Result, ViewOf


def complex_results(joint: Joint) -> list[int]:
    return [i for i, node in enumerate(joint.gm.graph.output_node().args[0][:joint.results]) if node.meta["val"].is_complex()]


def moved_to_zero(t: torch.Tensor) -> torch.Tensor:
    """A copy of all the memory from the first element of `t` to its last, seen as `t` sees it."""
    if t.is_conj():
        return moved_to_zero(t.conj()).conj()
    return flat_storage(t).clone().as_strided(t.shape, t.stride())


def as_new(results: Sequence, complex_ones: list[int]) -> tuple:
    """The `results` of a graph as tensors that an operator has made."""
    if complex_ones:
        results = [moved_to_zero(r) if i in complex_ones and r.storage_offset() else r for i, r in enumerate(results)]
    return tuple([r.detach() if has_base(r) else r for r in results])


def has_base(result) -> bool:
    return isinstance(result, torch.Tensor) and result._is_view()


# %% [markdown]
# `finish`, the last step of a call, has two jobs. It copies into the inputs what the program wrote to them, which the graph has returned as
# values. And it makes the outputs by their recipes: a result as it is, an input, a constant, or a view that is
# taken step by step from one of these. What kind of recipe it is, and whether its numbers depend on sizes, is known
# when the graph is compiled; `maker` decides it then, and each call only does what is left.

# %%
def build_finish(joint: Joint) -> Callable[[Sequence, Sequence], tuple]:
    """`finish(results, inputs) -> outputs`, the last step of every call."""
    if only_results(joint):
        return lambda results, inputs: tuple(results[:joint.results])
    makers = [maker(recipe, joint) for recipe in joint.recipes]
    owners = [maker(recipe, joint) for recipe in joint.owners]

    def finish(results, inputs):
        for offset, i in enumerate(joint.written):
            inputs[i].copy_(results[joint.results + offset])
        if owners:
            results = [*results[:joint.results], *[make(results, inputs) for make in owners]]
        return tuple([make(results, inputs) for make in makers])

    return finish


def only_results(joint: Joint) -> bool:
    """Are the outputs the results of the graph, and nothing is written or viewed?"""
    return joint.recipes == [Result(k) for k in range(joint.results)] and not joint.written


def maker(recipe: Constant | Result | Input | Owner | ViewOf, joint: Joint) -> Callable[[Sequence, Sequence], Any]:
    """`make(results, inputs)`: the output that `recipe` describes. The owners follow the results."""
    if isinstance(recipe, Result):
        return lambda results, inputs: results[recipe.index]
    if isinstance(recipe, Input):
        return lambda results, inputs: inputs[recipe.index]
    if isinstance(recipe, Owner):
        return lambda results, inputs: results[joint.results + recipe.index]
    if isinstance(recipe, Constant):
        value = resolver(recipe.value, joint.symbols)
        return lambda results, inputs: value(inputs)
    base = maker(recipe.of, joint)
    steps = [(step, resolver(step.args, joint.symbols) if depends_on_sizes(step.args) else None) for step in recipe.steps]

    def view(tensor, inputs):
        for step, by_size in steps:
            args = by_size(inputs) if by_size else step.args
            tensor = step.target(tensor, *args, **step.kwargs)
            tensor = tensor if step.index is None else tensor[step.index]
        return tensor

    def make(results, inputs):
        tensor = base(results, inputs)
        if recipe.apart:
            tensor = tensor.data
        elif recipe.detach:
            tensor = tensor.detach()
        return with_grad_mode(False, view, tensor, inputs) if recipe.no_grad else view(tensor, inputs)
    return make
