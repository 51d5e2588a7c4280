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
import functools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Callable, Sequence

import torch

from ..ch01_graphs.floats import NAMESPACE, Float, float_text
from ..ch01_graphs.layouts import flat_storage
from ..ch01_graphs.symbolic import Expr
from ..ch02_guards.codegen import define
from .aliases import Step
from .callables import with_grad_mode
from .joint import Joint
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
# taken step by step from one of these. All of that is known when the graph is compiled. So `finish` is written as text, and a call runs
# what is left. That of the four recipes above is
#
#     def finish(results, inputs):
#         return (results[0], c3(results[0], 0, 0), c4(results[0]), results[1], )
#
# where `c3` and `c4` are `select` and `t`. A size that varies is read from the inputs, as in `(inputs[1] // 2, 4, )`.

# %%
@dataclass(eq=False)
class FinishWriter:
    """The lines of `finish` so far, and its globals. off: whether gradients are off when it is called. written: how often a view was
    returned, by its text. shared: the name of a list of results, by the text of the call that gives it and the number of its turn."""

    symbols: dict[str, int]
    off: bool
    lines: list[str] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=lambda: {**NAMESPACE, "with_grad_mode": with_grad_mode})
    written: Counter[str] = field(default_factory=Counter)
    shared: dict[tuple[str, int], str] = field(default_factory=dict)


def build_finish(joint: Joint, off: bool = False) -> Callable[[Sequence, Sequence], tuple]:
    """`finish(results, inputs) -> outputs`, the last step of every call. off: it is called with gradients off."""
    if only_results(joint):
        return lambda results, inputs: tuple(results[:joint.results])
    w = FinishWriter(joint.symbols, off, [f"inputs[{i}].copy_(results[{joint.results + k}])" for k, i in enumerate(joint.written)])
    for k, recipe in enumerate(joint.owners):
        text = text_of_output(w, recipe)
        w.lines.append(f"owner{k} = {text}")
    outputs = "".join([text_of_output(w, recipe) + ", " for recipe in joint.recipes])
    text = "\n    ".join(["def finish(results, inputs):", *w.lines, f"return ({outputs})"])
    return define(text + "\n", "finish", w.names, "outputs")


def without_gradients(joint: Joint) -> bool:
    """Are all views taken with gradients off?"""
    return all(r.no_grad or not r.steps for r in (*joint.recipes, *joint.owners) if isinstance(r, ViewOf))


def only_results(joint: Joint) -> bool:
    """Are the outputs the results of the graph, and nothing is written or viewed?"""
    return joint.recipes == [Result(k) for k in range(joint.results)] and not joint.written


def text_of_output(w: FinishWriter, recipe: Constant | Result | Input | Owner | ViewOf) -> str:
    """The output that `recipe` describes."""
    if isinstance(recipe, ViewOf):
        return text_of_view(w, recipe)
    if isinstance(recipe, Constant):
        return text_of_constant(w, recipe.value)
    return {Result: "results[{}]", Input: "inputs[{}]", Owner: "owner{}"}[type(recipe)].format(recipe.index)


def text_of_constant(w: FinishWriter, value) -> str:
    """A value of a recipe, its symbolic sizes replaced by the present ones."""
    if isinstance(value, (Expr, Float)):
        return float_text(value, lambda name: f"inputs[{w.symbols[name]}]")
    if isinstance(value, (list, tuple)):            # sizes or dims: operators take either
        return f"({''.join([text_of_constant(w, v) + ', ' for v in value])})"
    if value is None or type(value) in (int, bool):
        return repr(value)
    same = (name for name, known in w.names.items() if known is value)
    name = next(same, f"c{len(w.names)}")
    w.names[name] = value
    return name


# %% [markdown]
# An operator may give several views, as `unbind` and `split` do, and often all of them are returned. It is called once for them, in a line
# of its own, since a call for each of a hundred rows would make ten thousand views:
#
#     def rows(x):
#         return x.unbind()
#
#     def finish(results, inputs):
#         several0 = c3(inputs[0])
#         return (several0[0], several0[1], several0[2], )
#
# Not for each program: of `x.unbind() + x.unbind()` every view is returned twice, as two tensors. So a recipe that was written before
# has the second call, and so on. And what `x.data` gives, which counts its versions apart, is another tensor each time.
#
# A view of a view is a call in the brackets of another, and of those Python takes 200. So many steps are several lines (`MOST_STEPS`).

# %%
MOST_STEPS = 30


def text_of_view(w: FinishWriter, recipe: ViewOf) -> str:
    base = text_of_output(w, recipe.of) + (".data" if recipe.apart else ".detach()" if recipe.detach else "")
    steps = recipe.steps
    while len(steps) > MOST_STEPS:
        name = f"line{len(w.lines)}"
        w.lines.append(f"{name} = {text_of_steps(w, recipe, steps[:MOST_STEPS], base)}")
        base, steps = name, steps[MOST_STEPS:]
    return text_of_steps(w, recipe, steps, base)


def text_of_steps(w: FinishWriter, recipe: ViewOf, steps: Sequence[Step], base: str) -> str:
    """Some of the steps of `recipe`, from `base` on."""
    quiet = recipe.no_grad and not w.off
    text = functools.reduce(lambda text, step: step_text(w, step, text, quiet), steps, base)
    if recipe.apart:
        return text
    turn = w.written[text]
    w.written[text] += 1
    return functools.reduce(lambda text, step: step_text(w, step, text, quiet, turn), steps, base)


def step_text(w: FinishWriter, step: Step, of: str, quiet: bool, turn: int | None = None) -> str:
    """A view of `of`. quiet: gradients are switched off for it. turn: of the call that gives several, if it is shared."""
    words = [of, *(text_of_constant(w, a) for a in step.args), *(f"{k}={text_of_constant(w, a)}" for k, a in step.kwargs.items())]
    call = f"{text_of_constant(w, VIEW_METHODS.get(step.target, step.target))}({', '.join(words)})"
    if quiet:
        call = f"with_grad_mode(False, lambda: {call})"
    if step.index is None:
        return call
    if turn is not None and (call, turn) not in w.shared:
        name = w.shared[call, turn] = f"several{len(w.shared)}"
        w.lines.append(f"{name} = {call}")
    return f"{call if turn is None else w.shared[call, turn]}[{step.index}]"


# %% [markdown]
# The methods of a tensor are found in half the time that an operator takes to look at its arguments.

# %%
VIEW_METHODS = {getattr(getattr(torch.ops.aten, name), overload): getattr(torch.Tensor, name) for name, overload in (
    ("view", "default"), ("select", "int"), ("transpose", "int"), ("permute", "default"), ("unsqueeze", "default"), ("expand", "default"),
    ("t", "default"), ("squeeze", "dim"), ("detach", "default"), ("unbind", "int"))}
